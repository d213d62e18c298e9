"""What is counted, in bounded memory, and under which names it is logged."""

from __future__ import annotations

import asyncio

import pytest

from mopd.base.metrics import apart, is_counted
from mopd.engines.interface import EngineUnavailable, ToDraw
from mopd.engines.replicas.router import Router
from mopd.engines.replicas.statistics import MAX_LATENCIES, GroupNumbers, ReplicaCounters, group_metrics
from tests.unit.engines.replicas.stand_in import SAMPLING, StandIn, make_router, run, samples, score


def test_percentiles_are_nearest_ranks_of_the_latest() -> None:
    counters = ReplicaCounters("math.0")
    for value in range(2 * MAX_LATENCIES, 0, -1):
        counters.answered(num_samples=1, num_tokens=1, latency_s=value)
    own = counters.take("closed", 0.0)
    own.latencies_s = own.latencies_s[-100:]
    assert own.num_samples == 2 * MAX_LATENCIES and counters.take("closed", 0.0).latencies_s == ()
    numbers = GroupNumbers(
        kind="teacher", name="math", replicas=(own,), queue_depth=0, queued_tokens=0, busy_s=0.0, retries=0
    )
    values = group_metrics(numbers)
    assert [values[f"teachers/latency_p{percent}_s/math"] for percent in (50, 95, 99)] == [50, 95, 99]


def test_a_groups_numbers_have_their_names_and_start_anew_each_step() -> None:
    engines = [StandIn(0), StandIn(1)]
    router = make_router(engines, max_tokens_per_request=20, max_inflight_tokens=20)
    tokens, starts = samples(*[20] * 10)

    async def work() -> tuple[dict[str, float], dict[str, float]]:
        await score(router, tokens, starts)
        await asyncio.sleep(50)
        first = group_metrics(router.take_numbers())
        return first, group_metrics(router.take_numbers())

    first, second = run(work)
    assert first["teachers/samples/math"] == 10 and first["teachers/tokens/math"] == 200
    assert first["teachers/busy_s/math"] == pytest.approx(1.0, abs=0.01)
    assert first["teachers/tokens_per_s/math"] == pytest.approx(200, rel=0.01)
    assert first["teachers/tokens_per_s/math.0"] == pytest.approx(100, rel=0.01)
    for name in ("p50", "p95", "p99"):
        assert first[f"teachers/latency_{name}_s/math"] == pytest.approx(0.2, rel=0.01)
        assert f"teachers/latency_{name}_s/math" not in second
    assert (first["teachers/queue_depth/math"], first["teachers/queued_tokens/math"]) == (8, 160)
    assert first["teachers/in_flight_tokens/math"] == first["teachers/in_flight_tokens/math.1"] == 20
    assert first["teachers/payload_bytes/math"] == 200 + 10 * 200
    assert first["teachers/samples/math.0"] + first["teachers/samples/math.1"] == 10
    assert first["teachers/replicas_up/math"] == first["teachers/replicas/math"] == 2
    assert first["teachers/breaker/math.0"] == first["teachers/retries/math"] == 0
    assert second["teachers/samples/math"] == second["teachers/queue_depth/math"] == 0
    assert second["teachers/in_flight_tokens/math"] == second["teachers/payload_bytes/math"] == 0
    assert "teachers/tokens_per_s/math" not in second


def test_one_replica_stands_for_its_group_and_generations_count_what_was_drawn() -> None:
    router = make_router([StandIn(0)], kind="rollout")

    async def work() -> dict[str, float]:
        router.set_weight_version(0)
        await router.generate(ToDraw([[1, 2, 3], [4]], SAMPLING, [1, 2]))
        return group_metrics(router.take_numbers())

    values = run(work)
    assert values["rollout/tokens"] == 4 + 2 * SAMPLING.max_new_tokens
    assert all(name.count("/") == 1 for name in values)


def test_rollout_replicas_are_told_by_number() -> None:
    router = make_router([StandIn(0), StandIn(1)], kind="rollout")
    router.weight_version = 1  # which none of them has
    values = run_numbers(router)
    assert (values["rollout/replicas"], values["rollout/breaker/0"], values["rollout/breaker/1"]) == (2, 3, 3)
    assert {name.split("/", 2)[2] for name in values if name.count("/") == 2} == {"0", "1"}


def run_numbers(router: Router) -> dict[str, float]:
    async def work() -> dict[str, float]:
        return group_metrics(router.take_numbers())

    return run(work)


def test_payload_of_both_lives_of_a_restarted_replica_counts() -> None:
    old, new = StandIn(0), StandIn(1)
    old.bytes_sent, new.bytes_sent = 10_000, 20_000  # from before they joined
    router = make_router([old])
    tokens, starts = samples(10)

    async def work() -> float:
        await score(router, tokens, starts)
        router.replace("math.0", new)
        await score(router, tokens, starts)
        return group_metrics(router.take_numbers())["teachers/payload_bytes/math"]

    assert run(work) == 2 * (10 + 100)


def test_requests_apart_are_in_no_steps_numbers() -> None:
    """Validation beside training: as if only training had asked, though both wait for the same replica."""
    tokens, starts = samples(*[20] * 6)

    def work(with_validation: bool) -> dict[str, float]:
        router = make_router([StandIn(0)], max_tokens_per_request=20, max_inflight_tokens=40)

        async def checks() -> None:
            with apart():
                await score(router, tokens, starts)

        async def both() -> dict[str, float]:
            if with_validation:
                await checks()
                assert is_counted()
                assert group_metrics(router.take_numbers())["teachers/samples/math"] == 0
            beside = asyncio.create_task(checks()) if with_validation else None
            await score(router, tokens, starts)
            if beside is not None:
                await beside
            return group_metrics(router.take_numbers())

        return run(both)

    alone, beside = work(False), work(True)
    assert alone["teachers/samples/math"] == 6 and alone["teachers/queue_depth/math"] == 4
    assert alone.keys() == beside.keys()
    for name in ("samples", "tokens", "queue_depth", "queued_tokens", "in_flight_tokens", "retries", "replicas_up"):
        assert alone[f"teachers/{name}/math"] == beside[f"teachers/{name}/math"], name


def test_a_checks_failures_do_not_hide() -> None:
    """What a replica does wrong is told whoever met it."""
    router = make_router([StandIn(0, lambda call: EngineUnavailable("dead")), StandIn(1)])
    tokens, starts = samples(20)

    async def work() -> dict[str, float]:
        with apart():
            await score(router, tokens, starts)
        return group_metrics(router.take_numbers())

    values = run(work)
    assert values["teachers/samples/math"] == 0
    assert values["teachers/failures/math.0"] == values["teachers/retries/math"] == 1
