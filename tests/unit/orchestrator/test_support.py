"""What a row of ids holds of its teacher, by numbers worked out by hand."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from mopd.base.types import Batch, SampleMeta
from mopd.config.groups import Assignment, TeacherConfig
from mopd.config.payloads import Asked
from mopd.engines.interface import Scores
from mopd.orchestrator.support import NO_ID, Coverage, coverage_metrics, support_rows
from mopd.orchestrator.teachers import TeacherWorker

ASKED = Asked(own=2, student=1, always=1)
OWN = torch.tensor([[1, 2], [1, 3]], dtype=torch.int32)
GIVEN = torch.tensor([[2, 5], [4, 1]], dtype=torch.int32)
"""The student's id, and the token that decides: the teacher's second id is the former in one row, and the latter in the
other the teacher's first."""
OF_OWN, OF_GIVEN = torch.tensor([[0.5, 0.25], [0.5, 0.125]]), torch.tensor([[0.25, 0.0625], [0.0625, 0.5]])


def rows(width: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    scores = Scores(ids=OWN, logprobs=OF_OWN.log(), token_logprobs=torch.zeros(2), given_logprobs=OF_GIVEN.log())
    return support_rows(scores, GIVEN, width)


def test_rows_hold_each_id_once() -> None:
    ids, logprobs = rows(width=5)
    assert ids.tolist() == [[1, 2, NO_ID, 5, NO_ID], [1, 3, 4, NO_ID, NO_ID]]
    assert logprobs.exp().tolist() == [[0.5, 0.25, 0.0, 0.0625, 0.0], [0.5, 0.125, 0.0625, 0.0, 0.0]]


def test_coverage_of_a_row() -> None:
    found = Coverage.of(rows()[1], ASKED)
    assert found.mass_R.tolist() == [0.8125, 0.6875]
    assert found.outside_R.tolist() == [True, False] and found.decision_mass_R.tolist() == [0.0625, 0.0]
    values = coverage_metrics({"math": [found]})
    assert values == {"support_mass_p01/math": 0.6875, "decision_outside/math": 0.5, "decision_mass/math": 0.03125}
    assert coverage_metrics({"math": [replace(found, has_always=False)]}).keys() == {"support_mass_p01/math"}


def test_the_lowest_hundredth() -> None:
    masses = torch.linspace(1, 0.5, 300)[:, None].log()
    (value,) = coverage_metrics({"math": [Coverage.of(masses, Asked(own=1))]}).values()
    assert value == pytest.approx(masses.exp().flatten().sort().values[3].item())


class _Plane:
    def __init__(self, logprobs: list[torch.Tensor]) -> None:
        self.logprobs = logprobs

    async def get(self, ids: Any, names: Any) -> dict[str, list[torch.Tensor]]:
        assert names == ["teacher_logprobs"] and len(ids) == len(self.logprobs)
        return {"teacher_logprobs": self.logprobs}


def test_a_batch_is_measured_by_what_each_teacher_was_asked_for() -> None:
    """In an ensemble each teacher counts for its own domains; a place of a teacher that a domain lacks does not."""
    teachers = {
        "first": TeacherConfig(model="a", domains=("math", "code"), weight=1.0),
        "second": TeacherConfig(model="b", domains=("math",), weight=1.0),
    }
    sure = torch.tensor([[0.5, 0.25, 0.125, 0.125]] * 2).log()
    both = torch.stack([rows()[1], sure], dim=1)
    samples = tuple(
        SampleMeta(sample_id=i, domain=domain, weight_version=0, prompt_length=1, response_length=2, num_loss_tokens=2)
        for i, domain in enumerate(("math", "code"))
    )
    asked = {"first": ASKED, "second": Asked(own=4)}
    plane = cast(Any, _Plane([both, torch.stack([sure, rows()[1]], dim=1)]))
    worker = TeacherWorker({}, Assignment(teachers), plane, asked=asked, temperature=1.0)
    values = asyncio.run(worker.coverage(Batch(samples=samples)))
    assert values["support_mass_p01/math"] == 0.6875 and values["support_mass_p01/code"] == 1.0
    assert values["decision_outside/math"] == 0.25 and values["decision_outside/code"] == 1.0
