"""First parts of responses that are given, with real engines: what the student and its loss then see.

Invariant: a response is the given tokens, which carry no loss, and behind them what one pass over the whole says of the
drawn ones.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from mopd.base.types import Prompt, UserError
from mopd.config.groups import TorchEngineConfig
from mopd.config.rewards import ExactMatchConfig
from mopd.config.rollout import PrefixConfig
from mopd.data.prompts import PromptDataset, PromptRow
from mopd.data.turns import PlainText
from mopd.data_plane.local import LocalDataPlane
from mopd.engines.interface import SamplingParams, ToScore
from mopd.engines.torch.engine import TorchEngine
from mopd.orchestrator.prefixes import Prefixes, check_references
from mopd.orchestrator.rewards import RewardWorker
from mopd.orchestrator.rollout import RolloutWorker
from mopd.rewards.domains import build_rewards
from tests.fixtures.tiny_models import EOS_ID, make_hf_model, make_tokenizer
from tests.unit.orchestrator.test_answers import worker_of
from tests.unit.orchestrator.test_rollout import HandsBack

SAMPLING = SamplingParams(max_new_tokens=8)
REFERENCES = ("1+1=2", "so 123456789", "</s>")
NAMES = ("tokens", "loss_mask", "rollout_logprobs", "token_versions")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf_model(tmp_path_factory.mktemp("model"), seed=5, scale=0.1)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return make_tokenizer(folder)


@pytest.fixture(scope="module")
def engine(folder: Path, tokenizer: PreTrainedTokenizerBase) -> TorchEngine:
    return TorchEngine.from_pretrained(folder, TorchEngineConfig(dtype="float32"))


@pytest.fixture(scope="module")
def dataset(tokenizer: PreTrainedTokenizerBase) -> PromptDataset:
    ids = tuple(tokenizer("ab?")["input_ids"])
    return PromptDataset([
        PromptRow(domain="math", text="ab?", tokens=ids, ground_truth=text, extra_info={"way": text}, place="file: row")
        for text in REFERENCES
    ])  # fmt: skip


def prefixes_of(dataset: PromptDataset, cfg: PrefixConfig, **more: Any) -> Prefixes:
    fixed = {"prompts_per_step": 3, "samples_per_prompt": 2, "longest": 8, "answers": None, "plain": None}
    return Prefixes(cfg=cfg, dataset=dataset, **{**fixed, **more})


def roll(engine: Any, prefixes: Prefixes, first: int = 0) -> list[dict[str, Any]]:
    """Return the fields of the samples of the stream's prompts from number ``first`` on, with their ``meta``."""
    plane, dataset = LocalDataPlane(), prefixes.dataset
    worker = RolloutWorker(
        engine, plane, dataset, sampling=SAMPLING, seed=1, samples_per_prompt=2, prefixes=prefixes
    )  # fmt: skip
    prompts = [Prompt(sample_id=first + i, domain="math", row=i) for i in range(len(dataset.rows))]

    async def run() -> list[dict[str, Any]]:
        metas = await worker.generate(prompts)
        fields = await plane.get([meta.sample_id for meta in metas], NAMES)
        return [{"meta": meta} | {name: own[i] for name, own in fields.items()} for i, meta in enumerate(metas)]

    return asyncio.run(run())


@pytest.mark.parametrize("hands_back", [False, True])
def test_given_tokens_carry_no_loss_and_the_drawn_ones_stand_behind_them(
    hands_back: bool, engine: TorchEngine, dataset: PromptDataset, tokenizer: PreTrainedTokenizerBase
) -> None:
    plain = PlainText(tokenizer)
    prefixes = prefixes_of(dataset, PrefixConfig(source="data", share=1.0, reference="way"), plain=plain)
    samples = roll(HandsBack(engine) if hands_back else engine, prefixes)
    for i, sample in enumerate(samples):
        meta, given = sample["meta"], plain.encode(REFERENCES[i // 2])[:7]
        response = sample["tokens"][meta.prompt_length :]
        assert response[: len(given)].tolist() == given and EOS_ID not in given
        assert sample["loss_mask"].tolist() == [place >= len(given) for place in range(len(response))]
        assert len(given) < len(response) <= SAMPLING.max_new_tokens
        assert meta.num_loss_tokens == len(response) - len(given) == meta.response_length - len(given)
        assert {len(sample[name]) for name in NAMES[1:]} == {len(response)}
        assert sample["token_versions"].diff().min() >= 0
        assert meta.truncated == (response[-1] != EOS_ID)
    tokens, starts = [sample["tokens"] for sample in samples], [sample["meta"].prompt_length for sample in samples]
    scored = asyncio.run(engine.score(ToScore(tokens, starts, top_k=0, temperature=1.0)))
    for sample, scores in zip(samples, scored, strict=True):
        mask = sample["loss_mask"]
        torch.testing.assert_close(sample["rollout_logprobs"][mask], scores.token_logprobs[mask], atol=1e-4, rtol=0)
        assert not sample["rollout_logprobs"][~mask].any()
    mean = sum(len(plain.encode(text)[:7]) for text in REFERENCES) / 3
    assert prefixes.take_numbers() == {"prefix_length/math": pytest.approx(mean)} and prefixes.take_numbers() == {}


def test_the_share_falls_to_none_of_a_teachers_answer(
    folder: Path, engine: TorchEngine, dataset: PromptDataset
) -> None:
    answers = replace(
        worker_of({"first": engine, "second": engine}, None, samples_per_prompt=2),
        dataset=dataset, sampling=SamplingParams(max_new_tokens=8, temperature=1.0),
    )  # fmt: skip
    whole = asyncio.run(answers.draw([Prompt(sample_id=0, domain="math", row=i) for i in range(3)]))
    said = [own.tokens.tolist()[: len(own.tokens) - (own.finish_reason == "stop")] for own in whole]
    prefixes = prefixes_of(dataset, PrefixConfig(source="teacher", share=0.8, steps=2), answers=answers.draw)
    for step, share in enumerate((0.8, 0.4)):
        for sample, own in zip(roll(engine, prefixes, first=3 * step), said, strict=True):
            num_given = int((~sample["loss_mask"]).sum())
            assert num_given == int(share * len(own))
            start = sample["meta"].prompt_length
            assert sample["tokens"][start : start + num_given].tolist() == own[:num_given]
    silent = replace(prefixes, answers=replace(answers, teachers={}).draw)  # it would fail if it were asked
    assert all(sample["loss_mask"].all() for sample in roll(engine, silent, first=6))


def test_a_reward_judges_the_whole_response(
    engine: TorchEngine, dataset: PromptDataset, tokenizer: PreTrainedTokenizerBase
) -> None:
    plane = LocalDataPlane()
    plain = PlainText(tokenizer)
    prefixes = prefixes_of(dataset, PrefixConfig(source="data", share=1.0), plain=plain, samples_per_prompt=1)
    rollout = RolloutWorker(engine, plane, dataset, sampling=SAMPLING, seed=1, prefixes=prefixes)
    read: list[str] = []

    class Listening:
        async def score(self, items: Any) -> Any:
            read.extend(item.response for item in items)
            return await build_rewards({"default": ExactMatchConfig(type="exact_match")}).score(items)

    async def judge() -> None:
        prompts = [Prompt(sample_id=0, domain="math", row=0)]
        await RewardWorker(dataset, tokenizer, Listening(), plane).values(prompts, await rollout.generate(prompts))

    asyncio.run(judge())
    assert read[0].startswith(REFERENCES[0])


@pytest.mark.parametrize(
    ("cfg", "row", "line"),
    [
        ({}, {"ground_truth": 4}, "file: row: ground_truth is 4, and rollout.prefix.source 'data' begins responses"),
        ({"reference": "way"}, {"extra_info": None}, "file: row: extra_info.way is None"),
        ({"reference": "way"}, {"extra_info": {"way": ""}}, "file: row: extra_info.way is ''"),
    ],
)
def test_a_row_without_its_reference_is_named(
    cfg: dict[str, Any], row: dict[str, Any], line: str, dataset: PromptDataset, tokenizer: PreTrainedTokenizerBase
) -> None:
    rows = [dataset.rows[0], replace(dataset.rows[0], **row)]
    with pytest.raises(UserError) as refused:
        check_references(PrefixConfig(source="data", share=0.5, **cfg), PromptDataset(rows), tokenizer)
    assert str(refused.value).startswith(line)
