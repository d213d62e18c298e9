"""What teachers say of drawn tokens: by turn, and token by token of one response."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mopd.data_plane.local import LocalDataPlane
from mopd.orchestrator.traces import MOST_NATS, Traces, turns_of
from tests.fixtures.samples import meta_of


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, so that a character may be several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_alone = Tokenizer(models.BPE(vocab={own: i for i, own in enumerate(alphabet)}, merges=[]))
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bytes_alone)


def noted(tokenizer: Any, texts: list[tuple[str, bool]], said: list[float], *, has_turns: bool) -> Traces:
    """Traces of one sample of domain ``math``, whose segments are given or drawn; the rollout said -1 of each token."""
    parts = [(tokenizer(text, add_special_tokens=False)["input_ids"], is_drawn) for text, is_drawn in texts]
    prompt = tokenizer("a?", add_special_tokens=False)["input_ids"]
    tokens = torch.tensor([*prompt, *(token for own, _ in parts for token in own)])
    mask = torch.tensor([is_drawn for own, is_drawn in parts for _ in own])

    async def note() -> Traces:
        plane = LocalDataPlane()
        meta = meta_of(7, "math", prompt=len(prompt), response=len(mask))
        await plane.put(
            [meta], {"tokens": [tokens], "loss_mask": [mask], "rollout_logprobs": [torch.full(mask.shape, -1.0)]}
        )
        traces = Traces(plane, tokenizer, has_turns=has_turns)
        await traces.note([meta], {7: torch.tensor(said)})
        return traces

    return asyncio.run(note())


def test_turns_begin_behind_given_tokens() -> None:
    mask = torch.tensor([0, 1, 1, 0, 0, 1, 0, 1, 1], dtype=torch.bool)
    assert turns_of(mask).tolist() == [1, 1, 1, 1, 1, 2, 2, 3, 3]
    assert turns_of(~mask)[:3].tolist() == [1, 1, 1]


def test_means_by_turn_and_one_response_by_token(tokenizer: PreTrainedTokenizerFast) -> None:
    said = [-2.0, -4.0, 0.0, 0.0, -1.0, -torch.inf]
    traces = noted(tokenizer, [("ab", True), ("<>", False), ("c!", True)], said, has_turns=True)
    numbers = traces.take_numbers()
    assert numbers == {"turn_1_kl/math": 2.0, "turn_2_kl/math": MOST_NATS / 2}
    assert traces.take_numbers() == {}
    (trace,) = traces.take_shown()["math"]
    assert trace["prompt"] == "a?"
    assert [tuple(one.values()) for one in trace["segments"]] == [
        ("a", False, 1.0), ("b", False, 3.0), ("<>", True, None), ("c", False, 0.0), ("!", False, MOST_NATS),
    ]  # fmt: skip
    assert traces.take_shown() == {}


def test_a_character_of_several_tokens_is_one(tokenizer: PreTrainedTokenizerFast) -> None:
    traces = noted(tokenizer, [("é", True), ("ü", False)], [-2.0, -2.0, 0.0, 0.0], has_turns=False)
    assert traces.take_numbers() == {}
    (trace,) = traces.take_shown()["math"]
    assert [tuple(one.values()) for one in trace["segments"]] == [("é", False, 2.0), ("ü", True, None)]
