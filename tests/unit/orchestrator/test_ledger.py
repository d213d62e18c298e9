"""Ledger: nothing lost, nothing trained on twice, no sample too old, the stream's mix in every batch, whatever becomes
ready when."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import pytest

from mopd.base.types import Prompt, SampleMeta, UserError
from mopd.orchestrator.ledger import Ledger, Slot
from tests.fixtures.samples import meta_of
from tests.fixtures.token_clock import run_on_token_clock

DOMAINS = ("math", "math", "code", "math", "vision")
P = 8
LOOP = asyncio.new_event_loop()


def prompt(sample_id: int) -> Prompt:
    return Prompt(sample_id=sample_id, domain=DOMAINS[sample_id % len(DOMAINS)], row=sample_id)


def sample(slot: Slot, weight_version: int) -> SampleMeta:
    return meta_of(slot.prompt.sample_id, slot.prompt.domain, weight_version)


def take(ledger: Ledger) -> list[Slot]:
    return LOOP.run_until_complete(ledger.take(timeout_s=0.001))


def restored(ledger: Ledger) -> Ledger:
    """Return the ledger that a killed run goes on with."""
    state = json.loads(json.dumps(ledger.state_dict()))
    on_expiry = "hold" if ledger._holds else "redraw"
    again = Ledger(prompts_per_step=P, max_staleness=ledger.max_staleness, step=ledger.step, on_expiry=on_expiry)
    again.load_state_dict(state, lambda sample_id, domain, row: prompt(sample_id))
    return again


@pytest.mark.parametrize("on_expiry", ["hold", "redraw"])
@pytest.mark.parametrize(("max_staleness", "every"), [(0, 1), (1, 1), (1, 2), (3, 1), (3, 3)])
@pytest.mark.parametrize("seed", range(4))
def test_random_orders_kills_and_failures(
    max_staleness: int, every: int, seed: int, on_expiry: Literal["hold", "redraw"]
) -> None:
    rng = random.Random(f"{max_staleness} {every} {seed}")
    ledger = Ledger(prompts_per_step=P, max_staleness=max_staleness, step=0, on_expiry=on_expiry)
    position, spare, version = 0, 10_000 * len(DOMAINS), 0
    running: dict[Slot, int] = {}
    trained: list[int] = []
    refused = 0
    while ledger.step < 60:
        while ledger.has_room():
            (slot,) = ledger.admit([prompt(position)])
            running[slot] = version
            position += 1
        assert position <= (version + max_staleness + 1) * P
        for slot in rng.sample([*running], rng.randint(0, len(running))) if rng.random() < 0.8 else [*running]:
            if len(running) > 2 and slot.number % 7 == 0 and rng.random() < 0.8:
                continue  # a straggler, which others overtake
            drawn_by = running.pop(slot)
            if rng.random() < 0.05:
                spare += len(DOMAINS)
                ledger.replace(slot, prompt(spare + slot.prompt.sample_id % len(DOMAINS)))
                running[slot] = version
            elif not ledger.complete(slot, [sample(slot, drawn_by)]):
                ledger.again(slot)
                running[slot], refused = version, refused + 1
        for slot in ledger.stale():
            ledger.again(slot)
            running[slot], refused = version, refused + 1
        try:
            batch = take(ledger)
        except UserError:
            continue
        assert Counter(s.prompt.domain for s in batch) == Counter(
            DOMAINS[i % len(DOMAINS)] for i in range(ledger.step * P, ledger.step * P + P)
        )
        assert all(ledger.step - s.weight_version <= max_staleness for s in batch)
        assert [s.prompt.sample_id for s in batch] == sorted(s.prompt.sample_id for s in batch)
        trained += [s.prompt.sample_id for s in batch]
        ledger.trained(batch)
        if ledger.step % every == 0:
            version = ledger.step
            ledger.publish(version)
        if rng.random() < 0.1 and version == ledger.step:  # killed, resumed from the checkpoint of this step
            ledger = restored(ledger)
            running = dict.fromkeys(ledger.slots, version)
    assert len(set(trained)) == len(trained) == 60 * P
    if max_staleness == 0 or on_expiry == "hold":
        assert refused == 0
    elif every <= max_staleness:
        assert refused > 0  # else the other half of this test shows nothing
    state = ledger.state_dict()
    ended = sum(sum(state[end].values()) for end in ("trained", "refused", "replaced"))
    assert ended + len(ledger.slots) == sum(state["admitted"].values())


def complete(ledger: Ledger, slots: Sequence[Slot], version: int = 0) -> None:
    for slot in slots:
        assert ledger.complete(slot, [sample(slot, version)])


def overtaken(on_expiry: Literal["hold", "redraw"]) -> tuple[Ledger, Slot]:
    """Three slots of weights 0, two of which are ready, and one trained on; the other one is still being drawn."""
    ledger = Ledger(prompts_per_step=1, max_staleness=2, step=0, on_expiry=on_expiry)
    late, *others = ledger.admit([Prompt(sample_id=i, domain="math", row=i) for i in range(3)])
    assert not ledger.has_room()
    complete(ledger, others)
    for step in (1, 2):
        ledger.trained(take(ledger))
        ledger.publish(step)
        complete(ledger, ledger.admit([Prompt(sample_id=2 + step, domain="math", row=3)]), step)
    return ledger, late


def test_a_step_waits_for_a_slot_that_would_become_too_old() -> None:
    ledger, late = overtaken("hold")
    # Steps 1 and 2 took others of weights 0; step 3 is the last one for those that are left, which is ``late``.
    line = r"step 3; ready by domain: 'math' 2 of 1; others of 'math' would become too old"
    with pytest.raises(UserError, match=line):
        take(ledger)
    assert ledger.complete(late, [sample(late, 0)])
    assert take(ledger) == [late]
    ledger.trained([late])
    assert [slot.weight_version for slot in take(ledger)] == [1]
    assert ledger.state_dict()["refused"] == {}


def test_a_slot_whose_place_others_took_is_waited_for_before_it_is_the_last_one() -> None:
    """Two of weights 0 are left for two steps: the first of these may not take one of weights 1."""
    ledger = Ledger(prompts_per_step=1, max_staleness=2, step=0)
    slow, slower, first = ledger.admit([Prompt(sample_id=i, domain="math", row=i) for i in range(3)])
    complete(ledger, [first])
    ledger.trained(take(ledger))
    ledger.publish(1)
    complete(ledger, ledger.admit([Prompt(sample_id=3, domain="math", row=3)]), 1)
    with pytest.raises(UserError, match="would become too old"):
        take(ledger)
    complete(ledger, [slow])
    assert take(ledger) == [slow]
    ledger.trained([slow])
    complete(ledger, [slower])
    assert take(ledger) == [slower]


def test_an_overtaken_slot_is_drawn_again_with_a_count() -> None:
    ledger, late = overtaken("redraw")
    ledger.trained(take(ledger))
    ledger.publish(3)
    assert ledger.is_stale([sample(late, 0)]) and not ledger.is_stale([sample(late, 1)])
    assert not ledger.complete(late, [sample(late, 0)])
    ledger.again(late)
    assert late.prompt.attempt == 1 and ledger.state_dict()["refused"] == {"math": 1}
    complete(ledger, [late], 3)
    assert [slot.weight_version for slot in take(ledger)] == [2]  # the oldest weights come first


def test_a_slot_that_completes_while_its_last_step_is_trained_on_is_too_old() -> None:
    ledger = Ledger(prompts_per_step=1, max_staleness=1, step=0, on_expiry="redraw")
    late, other = ledger.admit([Prompt(sample_id=i, domain="math", row=i) for i in range(2)])
    complete(ledger, [other])
    ledger.trained(take(ledger))
    ledger.publish(1)
    complete(ledger, ledger.admit([Prompt(sample_id=2, domain="math", row=2)]), 1)
    take(ledger)  # step 2, the last one for weights 0, is under way
    assert not ledger.complete(late, [sample(late, 0)])


def test_responses_that_go_on_under_new_weights_hold_up_nobody() -> None:
    ledger = Ledger(prompts_per_step=1, max_staleness=1, step=0, on_new_weights="continue")
    long, *_ = ledger.admit([prompt(0)])
    for step in range(1, 6):
        complete(ledger, ledger.admit([prompt(5 * step)]), step - 1)
        ledger.trained(take(ledger))
        ledger.publish(step)
    over_five = dataclasses.replace(sample(long, 0), num_versions=6, version_span=5)
    assert ledger.version_of([over_five]) == 5  # its newest token
    assert ledger.drawn(long, [over_five]) and long.weight_version == 5
    ledger.publish(6)
    assert long.weight_version == 5  # scoring it takes time, in which it ages
    assert ledger.complete(long, [over_five])
    assert take(ledger) == [long]


def test_a_response_that_waits_for_the_others_of_its_prompt_ages() -> None:
    ledger = Ledger(prompts_per_step=1, max_staleness=1, step=0, on_new_weights="continue")
    group, other = ledger.admit([prompt(0), prompt(5)])
    ledger.ended(group, 0)  # the first of two
    complete(ledger, [other], 0)
    ledger.trained(take(ledger))
    ledger.publish(1)
    assert group.weight_version == 0
    complete(ledger, ledger.admit([prompt(10)]), 1)
    with pytest.raises(UserError, match="would become too old first"):
        take(ledger)
    long = dataclasses.replace(sample(group, 0), num_versions=2, version_span=1)
    ledger.ended(group, 1)
    assert group.weight_version == ledger.version_of([long, sample(group, 0)]) == 0
    assert ledger.complete(group, [long, sample(group, 0)])
    assert take(ledger) == [group]


def test_no_prompt_is_admitted_for_a_step_after_the_last() -> None:
    ledger = Ledger(prompts_per_step=4, max_staleness=3, step=7, last_step=9)
    assert ledger.has_room(8) and not ledger.has_room(9)


def test_a_wait_without_end_says_what_is_missing() -> None:
    ledger = Ledger(prompts_per_step=4, max_staleness=0, step=3)
    slots = ledger.admit([prompt(i) for i in range(4)])
    complete(ledger, [slots[0], slots[2]], 3)
    with pytest.raises(UserError, match=r"4 prompts of step 4; ready by domain: 'code' 1 of 1, 'math' 1 of 3; 4 are"):
        take(ledger)


def test_a_change_right_after_a_wait_began_ends_it() -> None:
    """Before the loop has come round once: the last sample of a step may well be ready then."""

    async def wait(ledger: Ledger) -> list[Slot]:
        asyncio.get_running_loop().call_soon(complete, ledger, ledger.slots)
        return await ledger.take(timeout_s=1.0)

    async def wait_for_room(ledger: Ledger) -> None:
        asyncio.get_running_loop().call_soon(ledger.publish, 1)
        await asyncio.wait_for(asyncio.ensure_future(ledger.room(1)), 1.0)

    ledger = Ledger(prompts_per_step=P, max_staleness=0, step=0)
    ledger.admit([prompt(i) for i in range(P)])
    assert len(LOOP.run_until_complete(wait(ledger))) == P
    LOOP.run_until_complete(wait_for_room(ledger))


def test_nothing_is_trained_on_twice() -> None:
    ledger = Ledger(prompts_per_step=1, max_staleness=2, step=0)
    complete(ledger, ledger.admit([prompt(0)]))
    batch = take(ledger)
    ledger.trained(batch)
    with pytest.raises(RuntimeError, match="sample 0 is trained on a second time"):
        ledger.trained(batch)


def test_a_lost_prompt_is_noticed_at_the_next_step() -> None:
    ledger = Ledger(prompts_per_step=1, max_staleness=2, step=0)
    slots = ledger.admit([prompt(0), prompt(1), prompt(2)])
    complete(ledger, slots)
    del ledger._open[1]
    with pytest.raises(RuntimeError, match="lost or counted twice after step 1: 'math': 2 admitted, 1 accounted for"):
        ledger.trained(take(ledger))


@pytest.mark.parametrize(
    "change",
    [
        {"open": [{"sample_id": 1, "domain": "math", "row": 1, "attempt": -1}]},
        {"open": [{"sample_id": 1, "domain": "math", "row": 1}]}, {"open": []}, {"order": ["code"]},
        {"admitted": {"math": 7}}, {"trained": {"math": 1.5}}, {"refused": None},
    ],
)  # fmt: skip
def test_a_damaged_state_is_refused(change: dict[str, object]) -> None:
    ledger = Ledger(prompts_per_step=1, max_staleness=2, step=0)
    ledger.admit([prompt(1)])
    again = Ledger(prompts_per_step=1, max_staleness=2, step=0)
    with pytest.raises(UserError, match="open prompts cannot be read"):
        again.load_state_dict(ledger.state_dict() | change, lambda sample_id, domain, row: prompt(sample_id))


def test_samples_that_come_one_by_one_may_take_longer_than_the_deadline_together() -> None:
    """The deadline is that of the next change: a batch of slow responses is not late because there are many."""

    async def wait(ledger: Ledger) -> list[Slot]:
        loop = asyncio.get_running_loop()
        for i, slot in enumerate(ledger.slots):
            loop.call_later(0.5 * (i + 1), complete, ledger, [slot])
        return await ledger.take(timeout_s=1.5)

    ledger = Ledger(prompts_per_step=5, max_staleness=0, step=0)
    ledger.admit([prompt(i) for i in range(5)])
    assert len(run_on_token_clock(wait(ledger))) == 5
