"""Responses that end at texts and at tokens of the recipe's own, and penalties, of the torch engine."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from mopd.base.types import UserError
from mopd.config.groups import TorchEngineConfig
from mopd.engines.interface import Generation, SamplingParams, ToDraw, ToScore
from mopd.engines.stop_texts import StopTexts
from mopd.engines.torch.engine import TorchEngine
from tests.fixtures.tiny_models import FP32_FORWARD_ATOL, VOCAB_SIZE, make_hf_model

PROMPTS = [[5, 9, 11], [7], [3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [20, 21, 22, 23], [5, 9, 11], [30, 3]]
SEEDS = [10, 11, 12, 13, 14, 15]
random_ = random.Random(0)
PIECES = ["<pad>", "<bos>", "<eos>", *"abc", *("".join(random_.choices("abc ", k=n)) for n in (2, 2, 3, 3, 4) * 9)]
PIECES = [*dict.fromkeys([*PIECES, *(f"a{i}b" for i in range(VOCAB_SIZE))])][:VOCAB_SIZE]


def write_tokenizer(folder: Path) -> None:
    """Tokens of several characters, so that a text begins and ends inside them."""
    core = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(PIECES)}, unk_token="<pad>"))
    core.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>").save_pretrained(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_hf_model(tmp_path_factory.mktemp("model"), "qwen3", seed=3)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> TorchEngine:
    return TorchEngine.from_pretrained(folder, TorchEngineConfig(dtype="float32"))


def generate(engine: TorchEngine, prompts: list[list[int]], seeds: list[int], **sampling: Any) -> list[Generation]:
    return asyncio.run(engine.generate(ToDraw(prompts, SamplingParams(**{"max_new_tokens": 24, **sampling}), seeds)))


def text_of(tokens: list[int]) -> str:
    return "".join(PIECES[token] for token in tokens)


def first_end(tokens: list[int], stop: tuple[str, ...]) -> int | None:
    """By the whole text."""
    ends = (num for num in range(1, len(tokens) + 1) if any(s in text_of(tokens[:num]) for s in stop))
    return next(ends, None)


def test_the_first_token_that_completes_a_text_ends(folder: Path) -> None:
    draws, found = random.Random(1), 0
    for _ in range(200):
        stop = tuple("".join(draws.choices("abc ", k=draws.randint(1, 6))) for _ in range(2))
        tokens = draws.choices(range(VOCAB_SIZE), k=30)
        expected = first_end(tokens, stop)
        assert StopTexts(folder, stop).first_end(tokens, after=0) == expected
        found += expected is not None
    assert 40 < found < 200
    assert StopTexts(folder, ["<eos>"]).first_end([3, 2, 4], after=0) == 2  # a special token is its text


def test_a_response_ends_with_the_token_that_completes_the_text(engine: TorchEngine) -> None:
    whole = generate(engine, PROMPTS, SEEDS, ignore_eos=True)
    texts = [text_of(own.tokens.tolist()) for own in whole]
    stop = (texts[0][7:10], texts[3][21:26])
    stopped = generate(engine, PROMPTS, SEEDS, ignore_eos=True, stop=stop)
    ends = [first_end(own.tokens.tolist(), stop) for own in whole]
    assert None in ends and len({*ends} - {None}) > 1
    for own, full, end in zip(stopped, whole, ends, strict=True):
        assert own.tokens.tolist() == full.tokens.tolist()[:end]
        torch.testing.assert_close(own.logprobs, full.logprobs[:end], rtol=0, atol=FP32_FORWARD_ATOL)
        assert own.finish_reason == ("length" if end is None else "stop")
    # the text may begin in what was drawn before the response was handed back
    prompt, tokens, end = PROMPTS[0], whole[0].tokens.tolist(), ends[0]
    assert end is not None and end > 1
    begun = [*prompt, *tokens[: end - 1]]
    straddled = (text_of(tokens[end - 2 : end])[-len(PIECES[tokens[end - 1]]) - 1 :],)
    for num_begun, is_ended in ((end - 1, True), (0, False)):
        found = [
            len(one.tokens) == 1
            for seed in range(300)
            for one in generate(
                engine, [begun], [seed], stop=straddled, num_begun=num_begun, max_new_tokens=2, ignore_eos=True
            )
            if one.tokens[0] == tokens[end - 1]
        ]
        assert found and all(ended == is_ended for ended in found)


def test_ids_that_end_a_response(engine: TorchEngine) -> None:
    own = set(engine.stop_ids)
    whole = generate(engine, PROMPTS, SEEDS, ignore_eos=True)
    assert {len(one.tokens) for one in whole} == {24} and {one.finish_reason for one in whole} == {"length"}
    ids = (int(whole[0].tokens[5]), int(whole[2].tokens[9]))
    for is_ignored in (True, False):
        ending = {*ids, *(() if is_ignored else own)}
        for one, full in zip(
            generate(engine, PROMPTS, SEEDS, stop_token_ids=ids, ignore_eos=is_ignored), whole, strict=True
        ):
            ends = [i + 1 for i, token in enumerate(full.tokens.tolist()) if token in ending]
            assert one.tokens.tolist() == full.tokens.tolist()[: ends[0] if ends else None]
            assert one.finish_reason == ("stop" if ends else "length")


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no tokenizer files"):
        StopTexts(tmp_path, ["a"])


def test_the_repetition_penalty_is_that_of_transformers(folder: Path, engine: TorchEngine) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    plain = generate(engine, PROMPTS, SEEDS, temperature=0.0, ignore_eos=True)
    given = generate(engine, PROMPTS, SEEDS, temperature=0.0, ignore_eos=True, repetition_penalty=1.7)
    assert [one.tokens.tolist() for one in given] != [one.tokens.tolist() for one in plain]
    for prompt, own in zip(PROMPTS, given, strict=True):
        asked: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24, "repetition_penalty": 1.7}
        expected = model.generate(torch.tensor([prompt]), eos_token_id=None, **asked)[0, len(prompt) :]
        assert own.tokens.tolist() == expected.tolist()


def test_the_presence_penalty_is_of_what_the_response_holds_and_log_probs_are_before_it(engine: TorchEngine) -> None:
    prompt, held = [5, 9, 11], [7, 12]

    def drawn_after(num_begun: int, penalty: float) -> torch.Tensor:
        """Share of each first token over many seeds."""
        seeds = list(range(4000))
        made = generate(
            engine, [[*prompt, *held]] * 4000, seeds, max_new_tokens=1, presence_penalty=penalty, num_begun=num_begun
        )
        row = asyncio.run(
            engine.score(ToScore([torch.tensor([*prompt, *held, 3])], [5], top_k=VOCAB_SIZE, temperature=1.0))
        )[0]
        logprobs = torch.zeros(VOCAB_SIZE).scatter(0, row.ids[0].long(), row.logprobs[0])
        drawn = torch.cat([one.tokens for one in made])
        reported = torch.cat([one.logprobs for one in made])
        torch.testing.assert_close(reported, logprobs[drawn], rtol=0, atol=FP32_FORWARD_ATOL)
        mask = torch.zeros(VOCAB_SIZE)
        mask[held] = 1.0 if num_begun else 0.0
        expected = (logprobs - penalty * mask).softmax(-1)
        assert (torch.bincount(drawn, minlength=VOCAB_SIZE) / 4000 - expected).abs().max() < 0.02
        return expected[held]

    assert (drawn_after(2, -2.0) > 3 * drawn_after(0, -2.0)).all()


def test_min_p_keeps_what_is_near_the_most_probable(engine: TorchEngine) -> None:
    row = asyncio.run(engine.score(ToScore([torch.tensor([5, 9, 11])], [2], top_k=VOCAB_SIZE, temperature=1.0)))[0]
    probs = torch.zeros(VOCAB_SIZE).scatter(0, row.ids[0].long(), row.logprobs[0].exp())
    least = float(probs.max() * 0.6)
    allowed = {i for i, p in enumerate(probs.tolist()) if p >= least}
    assert 1 < len(allowed) < VOCAB_SIZE / 2
    made = generate(engine, [[5, 9]] * 1000, list(range(1000)), max_new_tokens=1, min_p=0.6)
    assert {int(one.tokens) for one in made} == allowed
    torch.testing.assert_close(made[0].logprobs.exp(), probs[made[0].tokens], rtol=0, atol=1e-5)
