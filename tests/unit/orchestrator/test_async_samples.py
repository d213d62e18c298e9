"""Which samples asynchronous runs train on: every response that was drawn, however long it is, and none older than it
has to be. The real controller and ledger on a simulated clock, with log-normal lengths (sigma 1)."""

from __future__ import annotations

import functools
from typing import Literal

import numpy as np
import pytest

from mopd.orchestrator.pace import Pace
from tests.unit.orchestrator.async_world import World, ks_distance, ks_noise, run

simulated = functools.cache(run)
"""Function ``run`` with the real pace; several tests read one run."""
BOUND_BY = {"balanced": {"train_s": 1.0, "num_places": 80}, "trainer": {"train_s": 3.0}, "rollout": {"train_s": 0.5}}


@pytest.mark.parametrize("on_new_weights", ["finish", "continue"])
@pytest.mark.parametrize("max_staleness", [1, 4])
@pytest.mark.parametrize("bound_by", BOUND_BY)
def test_a_response_is_trained_on_however_long_it_is(
    bound_by: str, max_staleness: int, on_new_weights: Literal["finish", "continue"]
) -> None:
    world = World(max_staleness=max_staleness, on_new_weights=on_new_weights, **BOUND_BY[bound_by])
    found = simulated(world)
    trained = np.concatenate(found.trained)
    assert found.num_refused == 0
    assert np.array_equal(np.sort(trained), np.sort(np.round(found.drawn, 3)))
    assert max(ages.max() for ages in found.ages) <= max_staleness
    # Not only at the end, when whatever was admitted is trained on: also over the steps between.
    between = np.concatenate(found.trained[10:50])
    assert ks_distance(between, found.drawn) < ks_noise(len(between), len(found.drawn))


def test_no_sample_of_a_prompt_becomes_too_old_while_it_waits_for_the_others() -> None:
    options = {"prompts_per_step": 16, "samples_per_prompt": 4, "steps": 40}
    found = run(World(max_staleness=2, on_new_weights="continue", **options))
    assert found.num_refused == 0
    assert max(ages.max() for ages in found.ages) <= 2
    assert np.array_equal(np.sort(np.concatenate(found.trained)), np.sort(np.round(found.drawn, 3)))


def test_redrawing_trains_on_long_responses_less_often() -> None:
    """The distance above can show what ``on_expiry: redraw`` costs."""
    found = run(World(max_staleness=1, on_expiry="redraw"))
    trained = np.concatenate(found.trained)
    assert found.num_refused > 0.1 * len(trained)
    assert ks_distance(trained, found.drawn) > ks_noise(len(trained), len(found.drawn))
    longest = [np.sort(values)[-len(values) // 20 :].mean() for values in (trained, found.drawn)]
    assert longest[0] < 0.6 * longest[1]
    values = found.values[-1]
    assert {"drawn_samples/math", "drawn_tokens/math", "refused_tokens/math"} <= values.keys()


@pytest.mark.parametrize("on_expiry", ["hold", "redraw"])
def test_every_step_has_the_share_of_stored_samples(on_expiry: Literal["hold", "redraw"]) -> None:
    """They are ready at once, and take no place of a response that is still being drawn."""
    found = run(World(max_staleness=2, on_expiry=on_expiry, steps=20, on_policy_fraction=0.75))
    assert [values["stored_share"] for values in found.values] == [0.25] * 20
    assert max(ages.max() for ages in found.ages) <= 2


@pytest.mark.parametrize(("max_staleness", "soon", "later"), [(2, 1.75, 1.8), (8, 2.3, 1.85)])
def test_samples_come_just_in_time_where_the_trainer_is_slowest(
    max_staleness: int, soon: float, later: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds from the first steps on: the first lead is what the first batch took, less what is in flight by then."""
    world = World(max_staleness=max_staleness, on_new_weights="continue", train_s=3.0, steps=80)
    paced = run(world)
    monkeypatch.setattr(Pace, "due", lambda self, steps_ahead, now: now)
    at_once = run(world)
    assert at_once.mean_age(40) > max_staleness - 0.1
    assert np.concatenate(paced.ages[:40]).mean() < soon
    assert paced.mean_age(40) < later
    assert paced.mean_step_s() <= 1.01 * at_once.mean_step_s()


@pytest.mark.parametrize("max_staleness", [1, 4])
def test_the_pace_holds_up_no_run_that_the_rollout_bounds(max_staleness: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(max_staleness=max_staleness, on_new_weights="continue", train_s=0.5)
    paced = simulated(world)
    monkeypatch.setattr(Pace, "due", lambda self, steps_ahead, now: now)
    assert paced.mean_step_s() <= 1.01 * run(world).mean_step_s()


def test_what_is_drawn_again_waits_for_nobody_else() -> None:
    """Slots that are refused at the same time are scored and ready each as soon as it is drawn, also where discarding
    takes long."""
    world = World(max_staleness=1, on_expiry="redraw", train_s=0.5, discard_s=0.7)
    found = run(world)
    assert found.num_refused > 100
    assert found.waits_s.max() == pytest.approx(world.score_s)
    assert max(ages.max() for ages in found.ages) <= 1


@pytest.mark.parametrize("on_expiry", ["hold", "redraw"])
@pytest.mark.parametrize("max_staleness", [0, 1, 4])
@pytest.mark.parametrize("warm_up", [1, 7])
def test_no_batch_mixes_a_warm_up_with_what_follows(
    warm_up: int, max_staleness: int, on_expiry: Literal["hold", "redraw"]
) -> None:
    """Answers are scored by nobody; the first on-policy samples are of the weights after the warm-up, also where these
    would not be published by their number."""
    options = {"prompts_per_step": 16, "num_places": 16, "steps": 20, "sync_every_steps": min(2, 1 + max_staleness)}
    world = World(max_staleness=max_staleness, warm_up=warm_up, on_expiry=on_expiry, **options)
    found = run(world)
    assert found.answered == [1.0] * warm_up + [0.0] * (20 - warm_up)
    on_policy = (20 - warm_up) * 16
    assert on_policy <= found.num_scored <= on_policy + found.num_refused
    assert max(ages.max() for ages in found.ages) <= max_staleness
    assert found.ages[warm_up].max() == 0
    assert [values["is_warm_up"] for values in found.values] == found.answered
