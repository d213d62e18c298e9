"""Teachers: the right ones for each domain, ensembles by weight, failures named or returned, no bad score kept."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from mopd.base.types import TEACHER_FIELDS, FailedSample, SampleMeta, UserError
from mopd.config.groups import Assignment, TeacherConfig, TorchEngineConfig
from mopd.config.payloads import Asked, Combine
from mopd.data_plane.local import LocalDataPlane
from mopd.engines.interface import EngineRejected, EngineUnavailable, Scores, ToScore
from mopd.engines.replicas.interface import RouterLimits
from mopd.engines.torch.engine import TorchEngine
from mopd.losses import combine
from mopd.orchestrator.teachers import Rule, TeacherGroup, TeacherWorker
from tests.fixtures.samples import meta_of
from tests.fixtures.tiny_models import FP32_FORWARD_ATOL, VOCAB_SIZE, make_hf_model
from tests.unit.orchestrator.groups import teacher_of

LIMITS = RouterLimits(max_attempts=2, backoff_s=0.0, breaker_reset_s=0.0)


def teacher(*domains: str, weight: float | None = None, default: bool = False) -> TeacherConfig:
    return TeacherConfig(model="unread", domains=domains, weight=weight, default=default)


ONE_EACH = {"mathematician": teacher("math", "algebra"), "coder": teacher("code")}
ENSEMBLE = {"mathematician": teacher("math", weight=3.0), "coder": teacher("math", "code", weight=1.0)}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TorchEngine]:
    root = tmp_path_factory.mktemp("teachers")
    folders = {name: make_hf_model(root / name, seed=i) for i, name in enumerate(("mathematician", "coder"))}
    return {
        name: TorchEngine.from_pretrained(folder, TorchEngineConfig(dtype="float32"))
        for name, folder in folders.items()
    }


class Altered:
    """A scorer that answers through a real engine, with one sample's scores changed or refused."""

    def __init__(self, engine: TorchEngine, *, length: int, change: Callable[[Scores], Scores]) -> None:
        """Set up. ``change`` gets the sample of ``length`` tokens; it may raise."""
        self.engine, self.length, self.change = engine, length, change
        self.requests = 0

    async def score(self, asked: ToScore) -> list[Scores]:
        self.requests += 1
        await asyncio.sleep(0)
        scores = await self.engine.score(asked)
        return [self.change(s) if len(t) == self.length else s for t, s in zip(asked.tokens, scores, strict=True)]


group = partial(teacher_of, limits=LIMITS)


def samples(*domains: str) -> tuple[list[SampleMeta], list[Tensor]]:
    """Samples 70, 71, … of 5, 7, 7, 9, 9, … tokens."""
    generator = torch.Generator().manual_seed(1)
    metas, tokens = [], []
    for i, domain in enumerate(domains):
        prompt_length, response_length = 2 + i, 3 + i % 2
        tokens.append(torch.randint(3, VOCAB_SIZE, (prompt_length + response_length,), generator=generator))
        metas.append(meta_of(70 + i, domain, prompt=prompt_length, response=response_length))
    return metas, tokens


def run_worker(
    teachers: dict[str, TeacherConfig],
    groups: dict[str, TeacherGroup],
    *domains: str,
    keep_going: bool = False,
    prepare: Callable[[TeacherWorker], None] = lambda worker: None,
) -> tuple[dict[str, list[Tensor]], list[FailedSample], tuple[int, ...]]:
    """Fields of the samples that were scored, the others, and the ids of the former."""
    metas, tokens = samples(*domains)

    async def run() -> tuple[dict[str, list[Tensor]], list[FailedSample], tuple[int, ...]]:
        plane = LocalDataPlane()
        await plane.put(metas, {"tokens": tokens})
        worker = TeacherWorker(
            groups,
            Assignment(teachers),
            plane,
            asked=dict.fromkeys(groups, Asked(own=5)),
            temperature=0.8,
            keep_going=keep_going,
        )
        prepare(worker)
        failed = await worker.score(metas)
        lost = {failure.sample.sample_id for failure in failed}
        batch = await plane.claim([m.sample_id for m in metas if m.sample_id not in lost], TEACHER_FIELDS)
        return await plane.get(batch.sample_ids, TEACHER_FIELDS), failed, batch.sample_ids

    return asyncio.run(run())


def alone(engine: TorchEngine, tokens: Tensor, meta: SampleMeta) -> Scores:
    (scores,) = asyncio.run(engine.score(ToScore([tokens], [meta.prompt_length], top_k=5, temperature=0.8)))
    return scores


def test_each_sample_is_scored_by_its_domains_teacher(engines: dict[str, TorchEngine]) -> None:
    domains = ("code", "math", "algebra", "code", "math")
    fields, failed, _ = run_worker(ONE_EACH, {name: group(name, engines[name]) for name in ONE_EACH}, *domains)
    assert failed == []
    for i, (meta, tokens) in enumerate(zip(*samples(*domains), strict=True)):
        expected = alone(engines["coder" if meta.domain == "code" else "mathematician"], tokens, meta)
        assert torch.equal(fields["teacher_ids"][i], expected.ids)
        torch.testing.assert_close(fields["teacher_logprobs"][i], expected.logprobs, rtol=0, atol=FP32_FORWARD_ATOL)
        torch.testing.assert_close(
            fields["teacher_token_logprobs"][i], expected.token_logprobs, rtol=0, atol=FP32_FORWARD_ATOL
        )
        assert fields["teacher_ids"][i].shape == (meta.response_length, 5)


def test_an_ensemble_writes_every_view_and_the_weighted_mean(engines: dict[str, TorchEngine]) -> None:
    domains = ("math", "code")
    fields, _, _ = run_worker(ENSEMBLE, {name: group(name, engines[name]) for name in ENSEMBLE}, *domains)
    (math, code), (math_tokens, code_tokens) = samples(*domains)
    views = [alone(engines[name], math_tokens, math) for name in ENSEMBLE]
    assert torch.equal(fields["teacher_ids"][0], torch.stack([view.ids for view in views], dim=1))
    expected = 0.75 * views[0].token_logprobs + 0.25 * views[1].token_logprobs
    torch.testing.assert_close(fields["teacher_token_logprobs"][0], expected, rtol=0, atol=FP32_FORWARD_ATOL)
    only = alone(engines["coder"], code_tokens, code)
    assert fields["teacher_ids"][1].shape == (code.response_length, 2, 5)
    assert torch.equal(fields["teacher_ids"][1][:, 0], only.ids)
    torch.testing.assert_close(fields["teacher_token_logprobs"][1], only.token_logprobs, rtol=0, atol=FP32_FORWARD_ATOL)


@pytest.mark.parametrize(
    ("rule", "width"), [("mean_probability", 10), ("mean_logprob", 5), ("per_token_lowest_entropy", 5)]
)
def test_a_rule_makes_one_teacher_of_several(engines: dict[str, TorchEngine], rule: Combine, width: int) -> None:
    """Rows of all samples are equally wide, also those of a domain with one teacher, which are as they were."""
    workers: list[TeacherWorker] = []

    def prepare(worker: TeacherWorker) -> None:
        workers.append(worker)
        worker.join_by(Rule(rule, width), {})

    groups = {name: group(name, engines[name]) for name in ENSEMBLE}
    fields, _, _ = run_worker(ENSEMBLE, groups, "math", "code", prepare=prepare)
    (math, code), (math_tokens, code_tokens) = samples("math", "code")
    views = [alone(engines[name], math_tokens, math) for name in ENSEMBLE]
    stacked = [torch.stack([getattr(view, name) for view in views]) for name in ("ids", "logprobs", "token_logprobs")]
    expected = {
        "mean_probability": lambda: combine.mean_probability(*stacked, (0.75, 0.25)),  # type: ignore[call-arg]
        "mean_logprob": lambda: combine.mean_logprob(*stacked, (0.75, 0.25)),  # type: ignore[call-arg]
        "per_token_lowest_entropy": lambda: combine.lowest_entropy(*stacked),
    }[rule]()
    assert fields["teacher_ids"][0].shape == (math.response_length, width)
    close = {"rtol": 0, "atol": FP32_FORWARD_ATOL}
    torch.testing.assert_close(fields["teacher_logprobs"][0], expected.logprobs, **close)
    torch.testing.assert_close(fields["teacher_token_logprobs"][0], expected.token_logprobs, **close)
    only = alone(engines["coder"], code_tokens, code)
    assert torch.equal(fields["teacher_ids"][1][:, :5], only.ids)
    assert fields["teacher_logprobs"][1].shape == (code.response_length, width)
    assert (fields["teacher_logprobs"][1][:, 5:] == -torch.inf).all()
    numbers = workers[0].take_numbers()
    if rule == "per_token_lowest_entropy":
        shares = [float((expected.told == i).double().mean()) for i in range(2)]
        assert [numbers[f"teacher_chosen_share/{name}"] for name in ENSEMBLE] == pytest.approx(shares)
    else:
        assert numbers == {"teacher_disagreement/math": pytest.approx(float(expected.told.mean()), abs=1e-4)}
    assert workers[0].take_numbers() == {}


def test_the_best_teacher_alone_is_asked(engines: dict[str, TorchEngine]) -> None:
    other = Altered(engines["mathematician"], length=0, change=lambda scores: scores)
    groups = {"mathematician": group("mathematician", other), "coder": group("coder", engines["coder"])}

    def prepare(worker: TeacherWorker) -> None:
        worker.join_by(Rule("best_reward", 5), {"math": "coder"})

    fields, _, _ = run_worker(ENSEMBLE, groups, "math", prepare=prepare)
    (meta,), (tokens,) = samples("math")
    assert other.requests == 0 and torch.equal(fields["teacher_ids"][0], alone(engines["coder"], tokens, meta).ids)


def test_a_response_is_compared_with_the_other_responses_of_its_domain() -> None:
    """Responses of 3, 4, 3, 4, 3 tokens. The first token of each is no loss token, and what it holds counts nowhere.
    The only one of its domain has nothing to be compared with."""
    domains = ("math", "code", "math", "algebra", "math")
    metas, tokens = samples(*domains)
    metas = [replace(meta, num_loss_tokens=meta.response_length - 1) for meta in metas]
    loss_mask = [torch.arange(meta.response_length) > 0 for meta in metas]
    teacher_says, rollout_said = (
        [torch.where(mask, -(i + torch.arange(len(mask))) * factor, 100.0) for i, mask in enumerate(loss_mask)]
        for factor in (0.5, 0.25)
    )

    async def run(ids: list[int]) -> dict[int, Tensor]:
        plane = LocalDataPlane()
        fields = {"tokens": tokens, "loss_mask": loss_mask, "rollout_logprobs": rollout_said}
        await plane.put(metas, fields | {"teacher_token_logprobs": teacher_says})
        batch = await plane.claim(ids, ["tokens"])
        await TeacherWorker({}, Assignment(ONE_EACH), plane, asked={}, temperature=1.0).compare(batch)
        return dict(zip(ids, (await plane.get(ids, ["baseline"]))["baseline"], strict=True))

    found = asyncio.run(run([70, 71, 72, 73, 74]))
    advantages = {i: [-0.25 * (i + j) for j in range(1, meta.response_length)] for i, meta in enumerate(metas)}
    for i, meta in enumerate(metas):
        others = [one for j in range(5) if j != i and domains[j] == domains[i] for one in advantages[j]]
        expected = sum(others) / len(others) if others else 0.0
        assert found[meta.sample_id].tolist() == pytest.approx([expected] * meta.response_length)
    assert not found[71].any() and found[70].all()
    again = asyncio.run(run([74, 72, 73, 71, 70]))
    assert all(torch.equal(again[i], found[i]) for i in found), "whatever the order"
    teacher_says[2][1] = -torch.inf
    assert asyncio.run(run([70, 71, 72, 73, 74]))[70].tolist() == pytest.approx([sum(advantages[4]) / 2] * 3)


def test_unknown_domain_is_named_before_anything_is_scored(engines: dict[str, TorchEngine]) -> None:
    scorer = Altered(engines["coder"], length=0, change=lambda s: s)
    with pytest.raises(
        UserError, match=r"'law' \(known: 'algebra', 'code', 'math'\): add it to teachers.<name>.domains"
    ):
        run_worker(ONE_EACH, {"coder": group("coder", scorer)}, "code", "law")
    assert scorer.requests == 0


def test_a_group_takes_its_turn_around_the_work(engines: dict[str, TorchEngine]) -> None:
    seen: list[str] = []

    @asynccontextmanager
    async def kept_awake():  # type: ignore[no-untyped-def]
        seen.append("awake")
        yield
        seen.append("asleep")

    def note(scores: Scores) -> Scores:
        seen.append("scored")
        return scores

    groups = {"coder": group("coder", Altered(engines["coder"], length=5, change=note))}
    groups["coder"].kept_awake = kept_awake
    run_worker({"coder": teacher("code")}, groups, "code")
    assert seen == ["awake", "scored", "asleep"]


def fail(error: Exception, scores: Scores) -> Scores:
    raise error


rejected = partial(fail, EngineRejected("coder.0: too long for me"))


def test_a_failure_ends_the_run_with_sample_domain_teacher_and_last_error(engines: dict[str, TorchEngine]) -> None:
    groups = {"coder": group("coder", Altered(engines["coder"], length=7, change=rejected))}
    with pytest.raises(UserError) as caught:
        run_worker({"coder": teacher("code")}, groups, *["code"] * 2)
    message = str(caught.value)
    assert message.startswith("teachers.coder did not score samples 71 of domain 'code': ")
    assert "too long for me" in message and "on_failure: replace" in message and "\n" not in message


def test_samples_that_fail_are_returned_and_the_others_kept(engines: dict[str, TorchEngine]) -> None:
    scorers = {"coder": Altered(engines["coder"], length=7, change=rejected), "mathematician": engines["mathematician"]}
    domains = ("code", "math", "code", "code")  # 5, 7, 7 and 9 tokens: the mathematician takes the first 7
    fields, failed, ids = run_worker(
        ONE_EACH, {name: group(name, scorer) for name, scorer in scorers.items()}, *domains, keep_going=True
    )
    assert [(f.sample.sample_id, f.teacher) for f in failed] == [(72, "coder")]
    assert "too long for me" in failed[0].reason
    assert ids == (70, 71, 73)
    metas, tokens = samples(*domains)
    assert torch.equal(fields["teacher_ids"][2], alone(engines["coder"], tokens[3], metas[3]).ids)


def test_a_sample_of_an_ensemble_needs_all_its_teachers(engines: dict[str, TorchEngine]) -> None:
    scorers = {"coder": Altered(engines["coder"], length=5, change=rejected), "mathematician": engines["mathematician"]}
    groups = {name: group(name, scorer) for name, scorer in scorers.items()}
    _, failed, ids = run_worker(ENSEMBLE, groups, "math", "math", keep_going=True)
    assert [f.sample.sample_id for f in failed] == [70] and ids == (71,)


def test_a_teacher_without_replicas_ends_even_a_run_that_replaces(engines: dict[str, TorchEngine]) -> None:
    groups = {"coder": group("coder", engines["coder"])}
    groups["coder"].router.remove("coder.0", reason="killed three times")
    line = r"teachers.coder did not score samples 70 of domain 'code': .*killed three times"
    with pytest.raises(UserError, match=line):
        run_worker({"coder": teacher("code")}, groups, "code", keep_going=True)


def test_one_dead_teacher_ends_the_others_work(engines: dict[str, TorchEngine]) -> None:
    """Nothing is left behind: asyncio would warn of a task that is never awaited, and the tests forbid warnings."""
    unavailable = partial(fail, EngineUnavailable("coder.0: no answer"))
    coder = Altered(engines["coder"], length=5, change=unavailable)
    scorers = {"coder": coder, "mathematician": engines["mathematician"]}
    with pytest.raises(UserError, match=r"2 attempts on coder\.0, coder\.0"):
        run_worker(ONE_EACH, {name: group(name, scorer) for name, scorer in scorers.items()}, "code", "math")


def test_bad_scores_name_sample_domain_teacher_and_replica(engines: dict[str, TorchEngine]) -> None:
    """The change is one of those that ``tests/unit/engines/test_answers.py`` lists."""
    change = Altered(engines["coder"], length=5, change=lambda scores: replace(scores, ids=scores.ids + VOCAB_SIZE))
    expected = (
        r"teachers.coder did not score samples 70 of domain .code.: .*2 attempts .*coder\.0: corrupt .*outside the"
    )
    with pytest.raises(UserError, match=expected) as caught:
        run_worker({"coder": teacher("code")}, {"coder": group("coder", change)}, "code")
    assert "\n" not in str(caught.value)
