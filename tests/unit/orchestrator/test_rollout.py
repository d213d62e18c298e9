"""Rollout and validation with a real engine: ids, seeds, fields and rewards."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from mopd.base.types import ROLLOUT_FIELDS, Prompt, SampleMeta, UserError
from mopd.config.data import ValidationConfig
from mopd.config.groups import TorchEngineConfig
from mopd.config.rewards import ExactMatchConfig
from mopd.config.rollout import RolloutConfig
from mopd.data.prompts import PromptDataset, PromptRow
from mopd.data_plane.local import LocalDataPlane
from mopd.engines.interface import Generation, Generator, SamplingParams, ToDraw, ToScore
from mopd.engines.torch.engine import TorchEngine
from mopd.orchestrator.rewards import RewardWorker
from mopd.orchestrator.rollout import RolloutWorker, derive_seed, repeated_share
from mopd.orchestrator.validation import ValidationResult, Validator
from mopd.rewards.domains import build_rewards
from mopd.rewards.interface import RewardItem
from tests.fixtures.tiny_models import EOS_ID, FP32_FORWARD_ATOL, make_hf_model, make_tokenizer
from tests.unit.orchestrator.groups import router_of

SAMPLING = SamplingParams(max_new_tokens=6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_tokenizer(path)
    return make_hf_model(path, seed=5, scale=0.1)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return make_tokenizer(folder)


@pytest.fixture
def engine(folder: Path) -> TorchEngine:
    """An engine with weights of version 3."""
    engine = TorchEngine.empty(folder, TorchEngineConfig(dtype="float32"))
    source = TorchEngine.from_pretrained(folder, TorchEngineConfig(dtype="float32"))
    asyncio.run(engine.load_weights(source.model.named_parameters(), 3))
    return engine


@pytest.fixture
def dataset(tokenizer: PreTrainedTokenizerBase) -> PromptDataset:
    texts = [("math", "1+1="), ("code", "ab?"), ("math", "2+2="), ("math", "9"), ("code", "cd?")]
    more = {"ground_truth": "?", "extra_info": None, "place": "file: row"}
    return PromptDataset(
        [
            PromptRow(domain=domain, text=text, tokens=tuple(tokenizer(text)["input_ids"]), **more)
            for domain, text in texts
        ]
    )


def prompts(dataset: PromptDataset) -> list[Prompt]:
    return [Prompt(sample_id=40 + i, domain=row.domain, row=i) for i, row in enumerate(dataset.rows)]


Rolled = tuple[list[SampleMeta], dict]


def roll(engine: Generator, dataset: PromptDataset, given: list[Prompt], **kwargs: object) -> Rolled:
    async def run() -> Rolled:
        plane = LocalDataPlane()
        worker = RolloutWorker(engine, plane, dataset, **{"sampling": SAMPLING, "seed": 1, **kwargs})
        metas = await worker.generate(given)
        return metas, await plane.get([meta.sample_id for meta in metas], (*ROLLOUT_FIELDS, "token_versions"))

    return asyncio.run(run())


def test_metas_and_fields_describe_the_same_samples(engine: TorchEngine, dataset: PromptDataset) -> None:
    given = prompts(dataset)
    metas, fields = roll(engine, dataset, given)
    assert [meta.sample_id for meta in metas] == [40, 41, 42, 43, 44]
    for i, (prompt, meta) in enumerate(zip(given, metas, strict=True)):
        tokens = fields["tokens"][i]
        assert tokens.dtype == torch.int64 and tuple(tokens[: meta.prompt_length].tolist()) == dataset.rows[i].tokens
        assert len(tokens) == meta.length and meta.domain == prompt.domain and meta.weight_version == 3
        assert fields["loss_mask"][i].all() and fields["loss_mask"][i].dtype == torch.bool
        assert len(fields["loss_mask"][i]) == len(fields["rollout_logprobs"][i]) == meta.response_length
        assert meta.num_loss_tokens == meta.response_length and meta.num_versions == 1
        assert fields["token_versions"][i].tolist() == [3] * meta.response_length
        assert meta.truncated == (tokens[-1].item() != EOS_ID)


def test_a_sample_depends_on_its_id_not_on_its_batch(engine: TorchEngine, dataset: PromptDataset) -> None:
    given = prompts(dataset)
    _, together = roll(engine, dataset, given, samples_per_prompt=3)
    metas, alone = roll(engine, dataset, given[2:3], samples_per_prompt=3)
    assert [meta.sample_id for meta in metas] == [126, 127, 128]
    assert [t.tolist() for t in alone["tokens"]] == [t.tolist() for t in together["tokens"][6:9]]
    assert len({tuple(t.tolist()) for t in alone["tokens"]}) > 1
    _, other_seed = roll(engine, dataset, given[2:3], samples_per_prompt=3, seed=2)
    assert [t.tolist() for t in other_seed["tokens"]] != [t.tolist() for t in alone["tokens"]]


def test_every_complete_response_is_told_once_with_its_newest_weights(
    engine: TorchEngine, dataset: PromptDataset
) -> None:
    async def run() -> list[tuple[int, int]]:
        heard: list[tuple[int, int]] = []
        worker = RolloutWorker(engine, LocalDataPlane(), dataset, sampling=SAMPLING, seed=1, samples_per_prompt=2)
        await worker.generate(prompts(dataset), ended=lambda prompt, version: heard.append((prompt.sample_id, version)))
        return heard

    assert sorted(asyncio.run(run())) == [(40 + i, 3) for i in range(5) for _ in range(2)]


def test_a_rollout_without_replicas_names_samples_and_reason(engine: TorchEngine, dataset: PromptDataset) -> None:
    router = router_of("rollout", engine, kind="rollout")
    router.set_weight_version(3)
    router.remove("rollout.0", reason="killed twice")
    with pytest.raises(UserError, match=r"rollout gave no response for samples 40, .* 'math': .*killed twice"):
        roll(router, dataset, prompts(dataset))


class HandsBack:
    """An engine that stops after two tokens of each call, as one does that gets new weights each time."""

    weight_version = 3

    def __init__(self, engine: TorchEngine) -> None:
        self.engine = engine
        self.asked: list[tuple[int, ...]] = []

    async def generate(self, asked: ToDraw, **_: Any) -> list[Generation]:
        self.asked += map(tuple, asked.prompts)
        whole = await self.engine.generate(asked)
        version = len(self.asked)
        return [
            Generation(
                tokens=given.tokens[:2],
                logprobs=given.logprobs[:2],
                token_versions=torch.full((min(2, len(given.tokens)),), version, dtype=torch.int32),
                finish_reason=given.finish_reason if len(given.tokens) <= 2 else "handed_back",
            )
            for given in whole
        ]


def test_a_response_that_is_handed_back_goes_on_where_it_was(engine: TorchEngine, dataset: PromptDataset) -> None:
    generator = HandsBack(engine)
    metas, fields = roll(generator, dataset, prompts(dataset)[:1])
    (meta,), tokens, versions = metas, fields["tokens"][0].tolist(), fields["token_versions"][0].tolist()
    prompt_length, response = meta.prompt_length, tokens[meta.prompt_length :]
    assert meta.num_versions == len(generator.asked) == -(-len(response) // 2) > 1
    assert generator.asked == [tuple(tokens[: prompt_length + 2 * i]) for i in range(meta.num_versions)]
    assert versions == [1 + i // 2 for i in range(len(response))] and meta.weight_version == 1
    assert len(response) == SAMPLING.max_new_tokens or response[-1] == EOS_ID

    async def drawn_under_prefixes() -> list[float]:
        """Log-probs of the whole response in one forward pass."""
        scores = await engine.score(
            ToScore([fields["tokens"][0]], [prompt_length], top_k=1, temperature=SAMPLING.temperature)
        )
        return scores[0].token_logprobs.tolist()

    expected = pytest.approx(asyncio.run(drawn_under_prefixes()), abs=FP32_FORWARD_ATOL)
    assert fields["rollout_logprobs"][0].tolist() == expected


def test_a_stop_text_may_begin_before_a_response_was_handed_back(
    engine: TorchEngine, dataset: PromptDataset, tokenizer: PreTrainedTokenizerBase
) -> None:
    (prompt,) = prompts(dataset)[:1]
    _, fields = roll(HandsBack(engine), dataset, [prompt])
    start = len(dataset.row(prompt.row).tokens)
    response = fields["tokens"][0].tolist()[start:]
    stop = (tokenizer.decode(response[1:3]),)  # its characters are drawn by two calls
    assert len(response) > 3 and stop[0] not in tokenizer.decode(response[:2])
    metas, fields = roll(HandsBack(engine), dataset, [prompt], sampling=replace(SAMPLING, stop=stop))
    assert fields["tokens"][0].tolist()[start:] == response[:3]
    assert not metas[0].truncated


def test_the_tail_of_a_truncated_response_carries_no_loss(engine: TorchEngine, dataset: PromptDataset) -> None:
    given = prompts(dataset)
    sampling = replace(SAMPLING, stop_token_ids=tuple(range(3, 40, 4)))
    metas, fields = roll(engine, dataset, given, sampling=sampling, masked_tail=2)
    plain, whole = roll(engine, dataset, given, sampling=sampling)
    assert {meta.truncated for meta in metas} == {True, False}
    for meta, mask, own, tokens, other in zip(
        metas, fields["loss_mask"], plain, fields["tokens"], whole["tokens"], strict=True
    ):
        num = meta.response_length - 2 * meta.truncated
        assert mask.tolist() == [True] * num + [False] * (meta.response_length - num)
        assert meta == replace(own, num_loss_tokens=num) and torch.equal(tokens, other)


@pytest.mark.parametrize(
    ("tokens", "share"),
    [([], 0), ([1, 2, 3], 0), ([1, 2, 3, 4], 0), ([1, 2, 3, 4, 5], 0), ([7] * 13, 0.9), ([1, 2, 3, 4] * 2, 0.2)],
)
def test_the_share_of_repeated_4_grams(tokens: list[int], share: float) -> None:
    assert repeated_share(torch.tensor(tokens, dtype=torch.int64)) == pytest.approx(share)


def test_repeated_4_grams_are_counted_as_they_are() -> None:
    tokens = torch.randint(0, 3, (500,), generator=torch.Generator().manual_seed(0))
    grams = [tuple(gram) for gram in tokens.unfold(0, 4, 1).tolist()]
    assert repeated_share(tokens) == pytest.approx(1 - len(set(grams)) / len(grams))


def test_responses_stop_at_the_horizon_of_their_prompts_step(engine: TorchEngine, dataset: PromptDataset) -> None:
    """Steps of two prompts; the third step's horizon is the longest response, where a cut is a truncation. A horizon
    holds for a response that is handed back too."""
    limits = {20: 2, 21: 4, 22: SAMPLING.max_new_tokens}
    asked: list[int] = []

    class Records(HandsBack):
        async def generate(self, request: ToDraw, **more: Any) -> list[Generation]:
            asked.append(request.sampling.max_new_tokens)
            return await engine.generate(request, **more)

    given = prompts(dataset)
    for generator in (Records(engine), HandsBack(engine)):
        metas, fields = roll(generator, dataset, given, limit=lambda number: limits[number // 2])
        for prompt, meta, tokens in zip(given, metas, fields["tokens"], strict=True):
            limit, ended = limits[prompt.sample_id // 2], tokens[-1].item() == EOS_ID
            assert meta.response_length == meta.num_loss_tokens == limit or ended
            is_last = limit == SAMPLING.max_new_tokens
            assert (meta.at_horizon, meta.truncated) == (not ended and not is_last, not ended and is_last)
        assert {meta.at_horizon for meta in metas} == {True, False} and any(meta.truncated for meta in metas)
    assert asked == [2, 4, SAMPLING.max_new_tokens]  # no token beyond the horizon is asked for


def test_a_prompt_that_is_drawn_again_gets_another_response(engine: TorchEngine, dataset: PromptDataset) -> None:
    (prompt,) = prompts(dataset)[:1]
    responses = [
        roll(engine, dataset, [replace(prompt, attempt=attempt)])[1]["tokens"][0].tolist() for attempt in (0, 1, 1)
    ]
    assert responses[1] == responses[2] != responses[0]


def test_seeds_are_63_bit_and_of_two_families() -> None:
    seeds = [derive_seed(s, i, purpose) for s in (0, 1) for i in range(200) for purpose in ("rollout", "validation")]
    assert len(set(seeds)) == 800
    assert min(seeds) >= 0 and 2**62 < max(seeds) < 2**63
    assert derive_seed(1, 23) == derive_seed(1, 23, "rollout") != derive_seed(12, 3)


LENGTHS = {"code": [3.0, 3, 3, 3], "math": [1.0, 2, 3, 6]}
"""Rewards of a prompt's four responses."""
ADVANTAGES = {
    "mean": [-2, -1, 0, 3],
    "leave_one_out": [1 - 11 / 3, 2 - 10 / 3, 3 - 9 / 3, 6 - 6 / 3],
    "grpo": [-2 / math.sqrt(14 / 3), -1 / math.sqrt(14 / 3), 0, 3 / math.sqrt(14 / 3)],
}


@pytest.mark.parametrize("form", ADVANTAGES)
def test_task_advantages_compare_a_prompts_responses(
    engine: TorchEngine,
    dataset: PromptDataset,
    tokenizer: PreTrainedTokenizerBase,
    form: Literal["mean", "leave_one_out", "grpo"],
) -> None:
    plane = LocalDataPlane()
    worker = RolloutWorker(engine, plane, dataset, sampling=SAMPLING, seed=1, samples_per_prompt=4)

    class Rewards:
        async def score(self, items: Sequence[RewardItem]) -> list[Any]:
            values = [value for item in items[::4] for value in LENGTHS[item.domain]]
            return [SimpleNamespace(value=value) for value in values]

    rewards: Any = Rewards()
    judge = RewardWorker(dataset, tokenizer, rewards, plane, form=form)

    async def run() -> dict[str, Any]:
        metas = await worker.generate(prompts(dataset))
        await judge.judge(prompts(dataset), metas)
        return await plane.get([meta.sample_id for meta in metas], ["task_advantage"])

    per_sample = [values.unique().item() for values in asyncio.run(run())["task_advantage"]]  # one along a response
    for start, row in zip(range(0, 20, 4), dataset.rows, strict=True):
        expected = ADVANTAGES[form] if row.domain == "math" else [0.0] * 4
        assert per_sample[start : start + 4] == pytest.approx(expected)
    assert judge.take_numbers() == {"even_rewards_share/code": 1.0, "even_rewards_share/math": 0.0}
    assert judge.take_numbers() == {}


def run_validation(
    engine: TorchEngine, dataset: PromptDataset, tokenizer: Any, seed: int = 1, domains: Any = None, **validation: Any
) -> ValidationResult:
    rollout, cfg = RolloutConfig(max_response_length=SAMPLING.max_new_tokens), ValidationConfig(**validation)
    recipe: Any = SimpleNamespace(seed=seed, validation=cfg, rollout=rollout, own_tokenizers=())
    recipe.longest_response = lambda teacher: rollout.max_response_length
    rewards = build_rewards({"default": ExactMatchConfig(type="exact_match")})
    validator = Validator(recipe, dataset, tokenizer, rewards)
    return asyncio.run(validator.run(engine, domains=domains))


def test_validation_rewards_each_domain(
    engine: TorchEngine, dataset: PromptDataset, tokenizer: PreTrainedTokenizerBase
) -> None:
    first = run_validation(engine, dataset, tokenizer)
    answer = first.examples["math"][0]["response"]
    rows = [replace(row, ground_truth=answer if i == 0 else "never") for i, row in enumerate(dataset.rows)]
    result = run_validation(engine, PromptDataset(rows), tokenizer)
    assert result.rewards == {"code": 0.0, "math": pytest.approx(1 / 3)}
    assert result.num_samples == {"code": 2, "math": 3}
    assert list(result.rewards) == ["code", "math"]
    assert [example["prompt"] for example in result.examples["math"]] == ["1+1=", "2+2=", "9"]
    assert result.examples["math"][0] == {
        "prompt": "1+1=", "response": answer, "ground_truth": answer, "reward": 1.0, "extracted": answer.strip(),
        "problem": "",
    }  # fmt: skip
    assert result.examples["code"][0]["problem"] == "another text than the ground truth"
    assert result.extracted_share == {"code": 1.0, "math": 1.0}
    only = run_validation(engine, PromptDataset(rows), tokenizer, max_samples_per_domain=1, domains=["math"])
    assert only.rewards == {"math": 1.0} and only.num_samples == {"math": 1}
    with pytest.raises(UserError, match="no row of domain 'law'"):
        run_validation(engine, dataset, tokenizer, domains=["law"])


def test_several_responses_of_a_prompt_give_its_mean_and_its_best(
    engine: TorchEngine, dataset: PromptDataset, tokenizer: PreTrainedTokenizerBase
) -> None:
    one = run_validation(engine, dataset, tokenizer, temperature=1.0)
    assert one.pass_at_k == {} and one.scores == {"code": [0.0, 0.0], "math": [0.0, 0.0, 0.0]}
    answer = one.examples["math"][0]["response"]
    rows = [replace(row, ground_truth=answer if i == 0 else "never") for i, row in enumerate(dataset.rows)]
    four = run_validation(engine, PromptDataset(rows), tokenizer, temperature=1.0, samples_per_prompt=4)
    assert four.num_samples == {"code": 8, "math": 12} and len(four.examples["math"]) == 3
    assert four.examples["math"][0]["response"] == answer  # the first of four is the only one of one
    assert four.scores["math"][0] in (0.25, 0.5, 0.75) and four.scores["math"][1:] == [0.0, 0.0]
    assert four.rewards["math"] == pytest.approx(four.scores["math"][0] / 3)
    assert four.pass_at_k == {"code": 0.0, "math": pytest.approx(1 / 3)}
    assert four.prompts == one.prompts
    fewer = run_validation(engine, dataset, tokenizer, max_samples_per_domain=2)
    assert fewer.prompts["code"] == one.prompts["code"] and fewer.prompts["math"] != one.prompts["math"]


def test_sampled_validation_repeats_itself_and_leaves_training_alone(
    engine: TorchEngine, dataset: PromptDataset, tokenizer: PreTrainedTokenizerBase
) -> None:
    state = torch.get_rng_state()
    _, before = roll(engine, dataset, prompts(dataset))
    first = run_validation(engine, dataset, tokenizer, temperature=1.0)
    assert run_validation(engine, dataset, tokenizer, temperature=1.0) == first
    assert run_validation(engine, dataset, tokenizer, temperature=1.0, seed=2) != first
    same_numbers = [replace(prompt, sample_id=prompt.row) for prompt in prompts(dataset)]
    _, training = roll(engine, dataset, same_numbers)  # sample n and row n must not share a seed
    answers = {
        row.domain: [
            tokenizer.decode(t[len(r.tokens) :], skip_special_tokens=True)
            for t, r in zip(training["tokens"], dataset.rows, strict=True)
            if r.domain == row.domain
        ]
        for row in dataset.rows
    }
    assert {d: [e["response"] for e in examples] for d, examples in first.examples.items()} != answers
    _, after = roll(engine, dataset, prompts(dataset))
    assert [t.tolist() for t in before["tokens"]] == [t.tolist() for t in after["tokens"]]
    assert torch.equal(state, torch.get_rng_state())
