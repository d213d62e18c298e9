"""What becomes of samples when replicas die, hang, lie or refuse: real servers, real signals."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mopd.config.schema import Recipe
from mopd.engines.clients.remote import RemoteEngine
from mopd.engines.interface import Generation, SamplingParams, Scores, StaleWeights, ToDraw, ToScore
from mopd.engines.replicas.router import Router
from mopd.engines.torch.engine import TorchEngine
from mopd.placement import server_group as placement_of_servers
from mopd.placement.interface import ROLLOUT
from tests.integration.groups import (
    LEFT,
    LOCAL,
    ROUTING,
    SAMPLING,
    Student,
    assert_same_scores,
    is_alive,
    make_engine,
    make_recipe,
    make_samples,
    pid_of,
    run,
    score_here,
    server_group,
    started,
    until,
)
from tests.integration.world import World

pytestmark = [pytest.mark.slow, pytest.mark.multirank]

TOP_K = 8
NUM_SAMPLES = 120


@pytest.fixture(autouse=True)
def one_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement_of_servers, "MAX_RESTARTS", 1)


@pytest.fixture(scope="module")
def samples() -> tuple[list[Tensor], list[int]]:
    return make_samples(NUM_SAMPLES)


@pytest.fixture(scope="module")
def expected(models: World, samples: tuple[list[Tensor], list[int]]) -> list[Scores]:
    return score_here(models.teachers["left"], *samples, top_k=TOP_K)


def local_recipe(models: World, folder: Path, *, replicas: int, **routing: float) -> Recipe:
    defaults = {"placement": LOCAL, "replicas": replicas, "routing": {**ROUTING, **routing}}
    return make_recipe(models, folder, teacher_defaults=defaults)


async def score(router: Router, samples: tuple[list[Tensor], list[int]]) -> list[Scores]:
    return await router.score(ToScore(*samples, top_k=TOP_K, temperature=1.0))


async def kill_in_the_middle(router: Router, pid: int, work: asyncio.Task[list[Scores]]) -> None:
    """SIGKILL once some requests have been answered and others are under way."""
    router.take_numbers()  # of what was asked for before
    answered = 0
    while answered < 3:
        await asyncio.sleep(0.002)
        assert not work.done(), "too fast for this test: send more samples"
        answered += sum(len(counters.latencies_s) for counters in router.take_numbers().replicas)
    os.kill(pid, signal.SIGKILL)


def test_a_killed_replica_of_two_loses_and_doubles_no_sample(
    models: World, tmp_path: Path, samples: tuple[list[Tensor], list[int]], expected: list[Scores]
) -> None:
    """Then it dies once more than it may be restarted, and the other one carries on alone."""
    recipe = local_recipe(models, tmp_path, replicas=2)

    async def work() -> None:
        async with started(recipe, tmp_path / "logs", [LEFT]) as (groups, routers):
            router = routers[LEFT]
            placement = server_group(groups, LEFT)
            task = asyncio.create_task(score(router, samples))
            await kill_in_the_middle(router, pid_of(groups, LEFT, 0), task)
            assert_same_scores(await task, expected)
            assert router.take_numbers().retries > 0
            await until(lambda: placement.restarts == [1, 0] and placement.pids[0] is not None)
            assert_same_scores(await score(router, samples), expected)
            numbers = router.take_numbers()
            assert sum(replica.num_samples for replica in numbers.replicas) == NUM_SAMPLES
            assert all(replica.num_samples > 0 for replica in numbers.replicas)
            os.kill(pid_of(groups, LEFT, 0), signal.SIGKILL)
            await until(lambda: [replica.name for replica in router.replicas] == ["left.1"])
            assert_same_scores(await score(router, samples), expected)
            assert placement.restarts == [1, 0]

    run(work())


def test_a_hanging_replica_is_left_and_replaced(
    models: World,
    tmp_path: Path,
    samples: tuple[list[Tensor], list[int]],
    expected: list[Scores],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It keeps its connections and answers nothing: only deadlines tell."""
    monkeypatch.setattr(placement_of_servers, "HEALTH_EVERY_S", 1.0)
    recipe = local_recipe(models, tmp_path, replicas=2, request_timeout_s=3.0)

    async def work() -> None:
        async with started(recipe, None, [LEFT]) as (groups, routers):
            hanging = pid_of(groups, LEFT, 0)
            os.kill(hanging, signal.SIGSTOP)
            assert_same_scores(await score(routers[LEFT], samples), expected)
            numbers = {replica.name: replica for replica in routers[LEFT].take_numbers().replicas}
            assert numbers["left.0"].num_samples == 0 and numbers["left.0"].failures > 0
            assert numbers["left.1"].num_samples == NUM_SAMPLES
            placement = server_group(groups, LEFT)
            await until(lambda: placement.pids[0] not in (None, hanging))
            assert not is_alive(hanging)
            assert_same_scores(await score(routers[LEFT], samples), expected)

    run(work())


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_server_killed_during_an_update_never_serves_half_of_it(
    models: World, tmp_path: Path, replicas: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It comes back without weights, gets the current ones, which nobody stages once more, and answers for no other
    version."""
    victims: list[tuple[int, str]] = []
    post = RemoteEngine.post

    async def post_or_kill(engine: RemoteEngine, path: str, *args: Any, **options: Any) -> Any:
        if path == "/v1/weights/finish" and victims and engine.url == victims[0][1]:
            os.kill(victims.pop()[0], signal.SIGKILL)
        return await post(engine, path, *args, **options)

    monkeypatch.setattr(RemoteEngine, "post", post_or_kill)
    group = {"max_response_length": 4, "placement": LOCAL, "replicas": replicas, "routing": ROUTING}
    recipe = make_recipe(models, tmp_path, rollout=group)
    prompts, seeds = [[3, 4, 5 + i] for i in range(8)], list(range(8))

    async def work() -> None:
        student = Student(models.student)
        async with started(recipe, None, [ROLLOUT], student) as (groups, routers):
            await student.publish(1)
            student.weights = {name: weight * 1.1 for name, weight in student.weights.items()}
            victims.append((pid_of(groups, ROLLOUT, 0), server_group(groups, ROLLOUT).engines[0].url))
            await student.publish(2)
            assert not victims
            local = TorchEngine.empty(models.student, make_engine())
            await local.load_weights(student.weights.items(), 2)
            right = await local.generate(ToDraw(prompts, SAMPLING, seeds))
            for given in (await routers[ROLLOUT].generate(ToDraw(prompts, SAMPLING, seeds)), await restarted(groups)):
                for one, other in zip(given, right, strict=True):
                    assert one.tokens.tolist() == other.tokens.tolist()  # type: ignore[attr-defined]
                    torch.testing.assert_close(one.logprobs, other.logprobs, atol=1e-4, rtol=0)  # type: ignore[attr-defined]
            assert "rollout.0 has weights 2 again" in caplog.text

    async def restarted(groups: object) -> list[object]:
        placement = server_group(groups, ROLLOUT)  # type: ignore[arg-type]
        await until(lambda: placement.restarts[0] == 1 and placement.pids[0] is not None)
        known = placement.engines[0]
        await until(lambda: known.weight_version == 2)
        engine = RemoteEngine(known.url, token=placement.token, timeout_s=20.0)  # the router's own must not be touched
        for version in (1, -1):
            engine.weight_version = version
            with pytest.raises(StaleWeights):
                await engine.generate(ToDraw(prompts, SAMPLING, seeds))
        engine.weight_version = 2
        drawn = list(await engine.generate(ToDraw(prompts, SAMPLING, seeds)))
        await engine.close()
        return drawn

    run(work())


def test_a_replica_killed_in_mid_response_loses_and_doubles_none_of_many_callers(models: World, tmp_path: Path) -> None:
    """What had been told is not drawn again; the rest is, and is the same: it follows from prompt, seed and weights."""
    recipe = make_recipe(models, tmp_path, rollout={"replicas": 2, "placement": LOCAL, "max_response_length": 120})
    student = Student(models.student)
    sampling = SamplingParams(max_new_tokens=120)
    prompts = [[3 + i % 40, 5, 7 + i % 11] for i in range(160)]
    told: list[int] = []

    async def work() -> None:
        local = TorchEngine.empty(models.student, make_engine())
        await local.load_weights(student.weights.items(), 1)
        right = await local.generate(ToDraw(prompts, sampling, range(160)))
        async with started(recipe, None, [ROLLOUT], student) as (groups, routers):
            await student.publish(1)
            router, pid = routers[ROLLOUT], pid_of(groups, ROLLOUT, 0)

            def hear(number: int) -> None:
                if not told:
                    os.kill(pid, signal.SIGSTOP)  # it gets no further, however long this process takes
                told.append(number)

            async def caller(i: int) -> list[Generation]:
                own = [2 * i, 2 * i + 1]
                return await router.generate(
                    ToDraw([prompts[j] for j in own], sampling, own), on_response=lambda k, given: hear(own[k])
                )

            callers = [asyncio.create_task(caller(i)) for i in range(80)]
            await until(lambda: bool(told))
            os.kill(pid, signal.SIGKILL)
            assert len(told) < 160, "too fast for this test"
            drawn = [generation for pair in await asyncio.gather(*callers) for generation in pair]
            numbers = router.take_numbers()
            assert sorted(told) == list(range(160))
            assert sum(replica.num_samples for replica in numbers.replicas) == 160 and numbers.retries > 0
        for one, other in zip(drawn, right, strict=True):
            assert one.tokens.tolist() == other.tokens.tolist()
            assert set(one.token_versions.tolist()) == {1}

    run(work())
