"""The producer replaces samples that cannot be scored: other prompts of their domains, a full batch, a count.

Real engine, router, data plane and stream; the student is not needed for it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from mopd.base.hardware import Hardware
from mopd.base.tasks import Stop
from mopd.base.types import LOSS_FIELDS, Batch, FailedSample, UserError
from mopd.config.groups import Assignment, TorchEngineConfig
from mopd.config.load import load_recipe
from mopd.data.packing import PackingRules
from mopd.data.prompts import PromptDataset, PromptRow
from mopd.data.stream import PromptStream
from mopd.data_plane.local import LocalDataPlane
from mopd.engines.interface import EngineRejected, SamplingParams, Scores, ToScore
from mopd.engines.torch.engine import TorchEngine
from mopd.launch.preparing import settled
from mopd.orchestrator.controller import Controller
from mopd.orchestrator.ledger import Ledger, Slot
from mopd.orchestrator.rollout import RolloutWorker
from mopd.orchestrator.teachers import TeacherWorker
from tests.fixtures.recipe import RECIPE
from tests.fixtures.tiny_models import VOCAB_SIZE, make_hf_model
from tests.unit.orchestrator.groups import teacher_of

BAD_TOKEN = 40
"""The teacher refuses every sample whose prompt begins with it."""
PACKING = PackingRules(is_packed=True, max_tokens=1024, micro_batch_size=None, square_cost=0.0)


@dataclasses.dataclass
class Picky:
    """A teacher that refuses some samples."""

    engine: TorchEngine
    bad_token: int

    async def score(self, asked: ToScore) -> list[Scores]:
        if any(int(sequence[0]) == self.bad_token for sequence in asked.tokens):
            raise EngineRejected("math.0: I do not like it")
        return await self.engine.score(asked)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> TorchEngine:
    """Weights of version 0."""
    engine = TorchEngine.from_pretrained(
        make_hf_model(tmp_path_factory.mktemp("model")), TorchEngineConfig(dtype="float32")
    )
    engine.weight_version = 0
    return engine


def dataset(*, bad_share: int) -> PromptDataset:
    """20 rows each of two domains; every ``bad_share``-th row of math is refused."""
    rows = []
    for i in range(20):
        first = BAD_TOKEN if i % bad_share == 0 else 5
        for domain, tokens in (("math", (first, 7 + i)), ("code", (6, 7 + i))):
            rows.append(PromptRow(domain=domain, text="", tokens=tokens, ground_truth=None, extra_info=None, place=""))
    return PromptDataset(rows)


def produce(
    engine: TorchEngine,
    data: PromptDataset,
    tmp_path: Path,
    *,
    samples_per_prompt: int = 1,
    more: Sequence[str] = (),
    stop_token_ids: tuple[int, ...] = (),
) -> tuple[Controller, Batch, LocalDataPlane]:
    """Let a controller make its first batch."""
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    settings = [
        "schedule.prompts_per_step=8",
        f"rollout.samples_per_prompt={samples_per_prompt}",
        "on_failure=replace",
        "teachers.math.domains=[math, code]",
        "loss.top_k=4",
        *more,
    ]
    recipe = settled(load_recipe(path, settings), Hardware()).recipe
    plane = LocalDataPlane()
    teacher = teacher_of("math", Picky(engine, BAD_TOKEN))
    sampling = SamplingParams(max_new_tokens=3, stop_token_ids=stop_token_ids)

    async def expect_step() -> None:
        assert not controller._num_drawing

    controller = Controller(
        recipe=recipe,
        prompts=PromptStream(data.rows_by_domain, {"math": 1, "code": 1}, 0),
        rollout=RolloutWorker(engine, plane, data, sampling=sampling, seed=0, samples_per_prompt=samples_per_prompt),
        teachers=TeacherWorker(
            {"math": teacher}, Assignment(recipe.teachers), plane, asked=recipe.asked, temperature=1.0, keep_going=True
        ),
        rewards=None,
        student=SimpleNamespace(dp_size=1, packing=PACKING, expect_step=expect_step),
        plane=plane,
        observer=SimpleNamespace(),
        stop=Stop(),
        ledger=Ledger(prompts_per_step=8, max_staleness=0, step=0),
        unit=8,
    )

    async def run() -> Batch:
        async with controller._tasks as tasks:
            tasks.start(controller.produce())
            slots = await tasks.unless_failed(controller.ledger.take(timeout_s=30))
            return await plane.claim([sample.sample_id for slot in slots for sample in slot.samples], LOSS_FIELDS)

    return controller, asyncio.run(run()), plane


def test_refused_samples_are_replaced_by_the_next_prompts_of_their_domain(
    engine: TorchEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = dataset(bad_share=2)
    with caplog.at_level(logging.WARNING):
        controller, batch, plane = produce(engine, data, tmp_path)
    drawn = PromptStream(data.rows_by_domain, {"math": 1, "code": 1}, 0).next(8)
    refused = [p.sample_id for p in drawn if data.row(p.row).tokens[0] == BAD_TOKEN]
    assert refused, "the seed must draw a refused prompt"
    assert len(batch.samples) == 8 and Counter(s.domain for s in batch.samples) == {"math": 4, "code": 4}
    assert not set(refused) & set(batch.sample_ids)
    assert set(batch.sample_ids) & set(range(8)) == set(range(8)) - set(refused)
    assert plane.num_samples == 8  # nothing of the refused ones is left
    counts = controller._batch_metrics(batch, [])
    assert counts["replaced_samples/code"] == 0
    assert counts["replaced_samples/math"] == controller.prompts.state_dict()["position"] - 8 >= len(refused)
    assert f"sample {refused[0]} of domain 'math' is replaced: teachers.math: " in caplog.text
    assert "I do not like it" in caplog.text
    again = {"replaced_samples/code": 0, "replaced_samples/math": 0, "staleness": 0}
    assert controller._batch_metrics(batch, []) == again


def test_all_samples_of_a_prompt_go_together(engine: TorchEngine, tmp_path: Path) -> None:
    _, batch, _ = produce(engine, dataset(bad_share=2), tmp_path, samples_per_prompt=3)
    assert len(batch.samples) == 24
    assert set(Counter(sample_id // 3 for sample_id in batch.sample_ids).values()) == {3}


def test_a_domain_that_always_fails_ends_the_run(engine: TorchEngine, tmp_path: Path) -> None:
    line = r"more than 8 prompts of one step .* by teachers.math \(domain 'math'\): .*not like"
    with pytest.raises(UserError, match=line):
        produce(engine, dataset(bad_share=1), tmp_path)


@pytest.mark.parametrize("samples_per_prompt", [1, 2])
def test_prompts_with_a_cut_response_are_dropped_for_the_next_ones(
    engine: TorchEngine, tmp_path: Path, samples_per_prompt: int
) -> None:
    data, more = dataset(bad_share=100), ["rollout.on_truncated=drop"]
    ids = tuple(range(3, VOCAB_SIZE, 3))  # of three tokens one mostly ends a response
    options = {"samples_per_prompt": samples_per_prompt, "stop_token_ids": ids}
    _, all_of_them, _ = produce(engine, data, tmp_path, **options)
    kept = {sample.sample_id for sample in all_of_them.samples if not sample.truncated}
    assert any(sample.truncated for sample in all_of_them.samples)
    controller, batch, plane = produce(engine, data, tmp_path, **options, more=more)
    assert not any(sample.truncated for sample in batch.samples) and plane.num_samples == len(batch.samples)
    assert Counter(s.domain for s in batch.samples) == dict.fromkeys(("math", "code"), 4 * samples_per_prompt)
    of_prompt = Counter(sample_id // samples_per_prompt for sample_id in kept)
    whole = {i for i in kept if of_prompt[i // samples_per_prompt] == samples_per_prompt}
    assert whole and whole <= set(batch.sample_ids)
    counts = controller._batch_metrics(batch, [])
    num_dropped = controller.prompts.state_dict()["position"] - 8
    assert counts["dropped_samples/code"] + counts["dropped_samples/math"] >= 1
    assert 0 < num_dropped <= 8 * 8


def test_a_step_whose_responses_are_all_cut_ends_the_run(engine: TorchEngine, tmp_path: Path) -> None:
    line = r"on_truncated drop: more than 8 prompts for each of a step's 8 .* raise rollout.max_response_length"
    with pytest.raises(UserError, match=line):
        produce(engine, dataset(bad_share=100), tmp_path, more=["rollout.on_truncated=drop"])


def test_replacements_are_counted_by_the_step_of_their_slots(engine: TorchEngine, tmp_path: Path) -> None:
    """Each of two steps may replace as many as it has prompts; one more of either ends the run."""
    controller, _, plane = produce(engine, dataset(bad_share=20), tmp_path)
    controller._num_replaced.clear()
    controller.ledger = Ledger(prompts_per_step=8, max_staleness=1, step=0)
    slots = controller.ledger.admit(controller.prompts.next(16))

    async def replace_all() -> None:
        for number in (0, 8, *range(1, 8), *range(9, 16)):
            await replace_one(slots[number])
        for number in (15, 0):
            with pytest.raises(UserError, match="more than 8 prompts of one step could not be scored"):
                await replace_one(slots[number])

    async def replace_one(slot: Slot) -> None:
        samples = await controller.rollout.generate([slot.prompt])
        failed = [FailedSample(sample=samples[0], teacher="math", reason="lost")]
        before = slot.prompt
        assert await controller._replace([slot], {slot: samples}, failed) == [slot]
        assert slot.prompt != before and slot.prompt.domain == before.domain

    asyncio.run(replace_all())
    assert plane.num_samples == 8 + 2  # those of the batch, and of the two that nobody replaced


def test_the_stored_state_holds_the_prompts_that_no_step_has_used(engine: TorchEngine, tmp_path: Path) -> None:
    """A run that goes on from here draws them again, those that replaced others included."""
    data = dataset(bad_share=2)
    controller, batch, _ = produce(engine, data, tmp_path)
    state = json.loads(json.dumps(controller.state))
    assert [entry["sample_id"] for entry in state["ledger"]["open"]] != [*range(8)]
    stream = PromptStream(data.rows_by_domain, {"math": 1, "code": 1}, 0)
    stream.load_state_dict(state["prompts"])
    ledger = Ledger(prompts_per_step=8, max_staleness=0, step=0)
    ledger.load_state_dict(state["ledger"], stream.prompt)
    assert sorted(slot.prompt.sample_id for slot in ledger.slots) == list(batch.sample_ids)
    assert not ledger.has_room()
    assert ledger.state_dict() == controller.ledger.state_dict()
    resumed = dataclasses.replace(controller, ledger=ledger)
    assert state["ledger"]["replaced"]["math"] > 0  # told by the steps before the checkpoint, and not once more
    assert resumed._batch_metrics(batch, [])["replaced_samples/math"] == 0
