"""Stored prompts among those that the student answers: their share, their order, and how a run goes on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mopd.base.types import Prompt, UserError
from mopd.data.stream import MixedStream, PromptStream

ROWS = {"code": [*range(0, 20, 2)], "math": [*range(1, 20, 2)]}
STORED = ["math", "code", "code"]


def mixed(fraction: float, stored: list[str] = STORED, seed: int = 3) -> MixedStream:
    return MixedStream(ROWS, {}, seed, stored=stored, on_policy_fraction=fraction)


@pytest.mark.parametrize(
    ("fraction", "of_step"), [(0.0, [8] * 5), (0.25, [6] * 5), (0.7, [2, 2, 3, 2, 3]), (1.0, [0] * 5)]
)
def test_every_step_has_its_share(fraction: float, of_step: list[int]) -> None:
    stream, plain = mixed(fraction), PromptStream(ROWS, {}, 3)
    steps = [stream.next(8) for _ in of_step]
    assert [sum(prompt.is_stored for prompt in step) for step in steps] == of_step
    prompts = [prompt for step in steps for prompt in step]
    fresh = [prompt for prompt in prompts if not prompt.is_stored]
    assert fresh == plain.next(len(fresh)), "the very prompts of a run without stored ones"
    stored = [prompt for prompt in prompts if prompt.is_stored]
    assert [prompt.row for prompt in stored] == [i % 3 for i in range(len(stored))]
    assert all(prompt.domain == STORED[prompt.row] for prompt in stored)
    assert len({prompt.sample_id for prompt in prompts}) == len(prompts)


def test_a_stream_goes_on_where_it_was() -> None:
    whole, first = mixed(0.3), mixed(0.3)
    expected = whole.next(30)
    seen = first.next(11)
    state = json.loads(json.dumps(first.state_dict()))
    again = mixed(0.3)
    again.load_state_dict(state)
    assert seen + [again.next(1)[0] for _ in range(19)] == expected
    assert [again.prompt(p.sample_id, p.domain, p.row) for p in expected] == expected


@pytest.mark.parametrize(
    ("stream", "change", "line"),
    [
        (mixed(0.4), {}, "had stored_share 7/10, this recipe gives 3/5: restore data.scored and schedule.on_policy"),
        (mixed(0.3, STORED * 2), {}, "had num_stored 3, this recipe gives 6"),
        (mixed(0.3, seed=4), {}, "had seed 3, this recipe gives 4"),
        (mixed(0.3), {"place": -1}, "holds no place"),
    ],
)
def test_another_stream_is_refused(stream: MixedStream, change: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line):
        stream.load_state_dict(mixed(0.3).state_dict() | change)


def test_a_stored_prompt_that_is_gone_is_told() -> None:
    stored = next(prompt for prompt in mixed(0.3).next(9) if prompt.is_stored)
    assert stored == Prompt(sample_id=2**40, domain="math", row=0)
    with pytest.raises(UserError, match=r"stored prompt 0 of domain 'math' is not in data.scored"):
        mixed(0.3, ["code"]).prompt(stored.sample_id, stored.domain, stored.row)
