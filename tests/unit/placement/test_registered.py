"""Servers that come and go while a group works: who is taken in, who is let go, and what becomes of the samples.

The servers are real ones in threads of this process; each registers by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mopd.base.types import UserError
from mopd.config.groups import EngineGroupConfig, RoutingConfig, TorchEngineConfig
from mopd.config.placements import RegisteredConfig
from mopd.engines.concurrency import cancel
from mopd.engines.interface import SamplingParams, ToDraw, ToScore
from mopd.engines.replicas.identity import Needs
from mopd.engines.replicas.interface import RouterLimits
from mopd.engines.replicas.router import Router
from mopd.orchestrator.weights.sync import GroupWeightSync
from mopd.placement import registered
from mopd.placement.interface import GroupPlan
from mopd.placement.registered import Heartbeats
from mopd.serving import registration
from mopd.serving.registration import Registrar, Registration
from tests.fixtures.servers import GatedEngine, RunningServer, random_tokens, running_server
from tests.fixtures.tiny_models import FP32_FORWARD_ATOL, make_hf_model

HASHES = {"config_sha256": "c" * 64, "weights_sha256": "w" * 64, "tokenizer_sha256": "t" * 64}
SAMPLING = SamplingParams(max_new_tokens=4)
PATH = Path("teachers.math.a.1.json")


def seen(beat: int, server_id: str = "0" * 16) -> dict[Path, Registration]:
    url = "http://127.0.0.1:1"
    return {
        PATH: Registration(
            key="k", server_id=server_id, url=url, host="a", pid=1, started=0.0, beat=beat, manifest=HASHES
        )
    }


def test_a_file_that_nobody_rewrites_is_no_server() -> None:
    heartbeats = Heartbeats()
    for _ in range(1000):
        heartbeats.note(seen(9), 1.0)
        assert not heartbeats.alive and len(heartbeats.silent) == 1
    heartbeats.note(seen(10), 1.0)
    assert list(heartbeats.alive) == ["0" * 16] and not heartbeats.silent


def test_a_silent_server_is_lost_and_comes_back() -> None:
    heartbeats = Heartbeats()
    for beat in (1, 2):
        heartbeats.note(seen(beat), 1.0)
    for _ in range(int(registered.SILENT_S)):
        heartbeats.note(seen(2), 1.0)
        assert heartbeats.loss("0" * 16) is None
    heartbeats.note(seen(2), 1.0)
    assert heartbeats.loss("0" * 16) == "is silent for 30 s" and not heartbeats.has_left("0" * 16)
    heartbeats.note(seen(3), 1.0)
    assert heartbeats.loss("0" * 16) is None


def test_files_of_dead_servers_do_not_gather() -> None:
    heartbeats = Heartbeats()
    for _ in range(601):
        heartbeats.note(seen(9), 1.0)
        assert not heartbeats.dead
    heartbeats.note(seen(9), 1.0)
    assert heartbeats.dead == [PATH]


def test_one_look_that_misses_a_file_is_no_loss() -> None:
    heartbeats = Heartbeats()
    for servers in (seen(1), seen(2), {}, seen(3), {}):
        heartbeats.note(servers, 0.6)
    assert heartbeats.alive
    heartbeats.note({}, 0.6)
    assert heartbeats.loss("0" * 16) == "has left" and heartbeats.has_left("0" * 16)


def test_one_look_after_a_long_time_is_no_loss_either() -> None:
    """A training step has blocked the loop: it is still one look."""
    heartbeats = Heartbeats()
    for beat in (1, 2):
        heartbeats.note(seen(beat), 1.0)
    heartbeats.note({}, registered.LONGEST_LOOK_S)
    assert not heartbeats.has_left("0" * 16)
    heartbeats.note({}, registered.LONGEST_LOOK_S)
    assert heartbeats.has_left("0" * 16)


def test_the_next_life_under_the_same_name_is_another_server() -> None:
    heartbeats = Heartbeats()
    for beat in (50, 51):
        heartbeats.note(seen(beat), 1.0)
    for beat in (0, 1):
        heartbeats.note(seen(beat, "1" * 16), 1.0)
    assert list(heartbeats.alive) == ["1" * 16]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf_model(tmp_path_factory.mktemp("registered") / "own", seed=1)


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "BEAT_S", 0.05)
    for name, value in (("LOOK_EVERY_S", 0.05), ("GONE_S", 0.08), ("HEALTH_EVERY_S", 0.05), ("ASK_AGAIN_S", 0.2)):
        monkeypatch.setattr(registered, name, value)


class Place:
    """A run's folder and the servers that registered there."""

    def __init__(self, folder: Path, key: str, role: str, model: Path) -> None:
        self.folder, self.key, self.role, self.model = folder, key, role, model
        self._stack = ExitStack()
        self._servers: dict[str, tuple[RunningServer, Registrar, ExitStack]] = {}

    def start(
        self,
        host: str,
        *,
        model: Path | None = None,
        hashes: dict[str, str] = HASHES,
        told: dict[str, str] | None = None,
    ) -> GatedEngine:
        """A server that registers as ``host``; ``told``: what its file says of it."""
        folder = self.model if model is None else model
        make = GatedEngine.from_pretrained if self.role == "teacher" else GatedEngine.empty
        engine = make(folder, TorchEngineConfig(dtype="float32"))
        assert isinstance(engine, GatedEngine)
        registrar, stack = Registrar(self.folder, self.key, host=host), ExitStack()
        running = stack.enter_context(running_server(engine.arm(), self.role, manifest=hashes, token=registrar.token))
        registrar.begin(running.url, hashes if told is None else told)
        self._servers[host] = running, registrar, stack
        return engine

    def leave(self, host: str) -> None:
        """In order: first the file, then the server."""
        _, registrar, _ = self._servers[host]
        registrar.end()

    def kill(self, host: str) -> None:
        """The server; its file stays, as its count does."""
        running, registrar, stack = self._servers.pop(host)
        registrar._over.set()
        registrar._thread.join(20)
        registrar._write()  # where a count was under way, its thread has taken the file along
        running.engine.gate.set()
        stack.close()

    def close(self) -> None:
        for host, (_, registrar, _) in list(self._servers.items()):
            registrar.end()
            self.kill(host)


@pytest.fixture
def place(tmp_path: Path, model: Path, fast: None) -> Iterator[Place]:
    place = Place(tmp_path / "run" / "replicas", "teachers.math", "teacher", model)
    yield place
    place.close()


def make_plan(place: Place, **keys: Any) -> GroupPlan:
    cfg = RegisteredConfig(type="registered", **{"startup_timeout_s": 20.0, **keys})
    routing = RoutingConfig(request_timeout_s=60.0, max_tokens_per_request=40, max_inflight_tokens=40)
    return GroupPlan(
        key=place.key,
        kind="teacher" if place.role == "teacher" else "rollout",
        name=place.key.removeprefix("teachers."),
        model=str(place.model),
        group=EngineGroupConfig(placement=cfg, replicas=max(1, cfg.min_replicas), routing=routing),
        needs=Needs(length=64, num_ids=4),
        files=(),
    )


@asynccontextmanager
async def working(place: Place, **keys: Any) -> AsyncIterator[tuple[registered.RegisteredGroup, Router]]:
    """The group, started and watched."""
    group = registered.RegisteredGroup(make_plan(place, **keys), place.folder)
    try:
        replicas = await group.start()
        limits = RouterLimits(backoff_s=0.1, breaker_reset_s=0.3)
        router = Router(group.plan.name, replicas, group.plan.group.routing, kind=group.plan.kind, limits=limits)
        group.watch(router)
        yield group, router
        await router.close()
    finally:
        await group.close()


def names(router: Router) -> list[str]:
    return sorted(replica.name for replica in router.replicas)


async def until(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "the condition did not come true"
        await asyncio.sleep(0.02)


def scoring(router: Router, count: int = 12) -> Awaitable[list[Any]]:
    tokens = random_tokens(*[18] * count)
    return router.score(ToScore(tokens, [4] * count, top_k=4, temperature=1.0))


def run(work: Awaitable[None]) -> None:
    asyncio.run(asyncio.wait_for(work, 300))


def test_servers_come_and_go_and_no_sample_is_lost(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        first = place.start("a")
        async with working(place) as (_, router):
            assert names(router) == ["math.0"]
            expected = await scoring(router)
            first.gate.clear()
            asked = asyncio.ensure_future(scoring(router))
            second = place.start("b")
            await until(lambda: names(router) == ["math.0", "math.1"] and sum(second.num_samples) > 5)
            first.gate.set()
            for one, other in zip(await asked, expected, strict=True):
                torch.testing.assert_close(one.token_logprobs, other.token_logprobs, rtol=0, atol=FP32_FORWARD_ATOL)
            first.gate.clear()  # what it has under way when it leaves may end there
            calls = len(first.num_samples)
            asked = asyncio.ensure_future(scoring(router))
            await until(lambda: len(first.num_samples) > calls)
            place.leave("a")
            await until(lambda: names(router) == ["math.1"])
            first.gate.set()
            assert len(await asked) == 12
            numbers = {replica.name: replica for replica in router.take_numbers().replicas}
            assert sum(replica.num_samples for replica in numbers.values()) == 36
            assert sum(replica.failures for replica in numbers.values()) == 0 and numbers["math.0"].state == "gone"
            place.start("c")  # the lowest number that is free
            await until(lambda: names(router) == ["math.0", "math.1"])

    run(work())
    assert "math.0 gets no more work: http://127.0.0.1:" in caplog.text and "has left" in caplog.text


def test_a_killed_server_is_let_go_and_its_samples_go_elsewhere(place: Place) -> None:
    async def work() -> None:
        first, _ = place.start("a"), place.start("b")
        async with working(place, min_replicas=2) as (_, router):
            first.gate.clear()
            calls = len(first.num_samples)
            asked = asyncio.ensure_future(scoring(router))
            await until(lambda: len(first.num_samples) > calls)
            await asyncio.to_thread(place.kill, "a")
            assert len(await asked) == 12
            await until(lambda: len(names(router)) == 1)
            assert len(await scoring(router)) == 12

    run(work())


def test_requests_wait_for_another_server_and_then_end_in_one_line(place: Place) -> None:
    async def work() -> None:
        place.start("a")
        async with working(place, startup_timeout_s=20.0) as (_, router):
            await asyncio.to_thread(place.kill, "a")
            asked = asyncio.ensure_future(scoring(router))
            await asyncio.sleep(0.5)
            assert not asked.done()
            place.start("b")
            assert len(await asked) == 12
        place.leave("b")
        place.start("c")
        async with working(place) as (group, router):
            group.cfg = replace(group.cfg, startup_timeout_s=4.0)  # longer than a look counts
            await asyncio.to_thread(place.kill, "c")
            line = (
                r"^teachers.math.placement.min_replicas: 0 of 1 servers are there after 4 s \(not taken in: .* on c, "
                r"process \d+: .*\): start more with mopd serve RECIPE --teacher math --register .*/run/replicas"
            )
            with pytest.raises(UserError, match=line):
                await scoring(router)
            with pytest.raises(UserError, match=line):
                await scoring(router)

    run(work())


def test_a_group_that_never_comes_is_one_line(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which says what it met: nothing, a server that is not one of its own, a file that a dead server left."""

    async def start(startup_timeout_s: float) -> None:
        async with working(place, startup_timeout_s=startup_timeout_s, min_replicas=2):
            pass

    def hosts() -> set[str]:
        return {path.name.split(".")[2] for path in place.folder.glob("teachers.*")}

    async def until_the_dead_are_forgotten() -> None:
        starting = asyncio.ensure_future(start(60.0))
        await until(lambda: hosts() == {"liar"})
        await cancel([starting])

    with pytest.raises(UserError, match=r"0 of 2 servers are there after 0.5 s: start more"):
        run(start(0.5))
    place.start("dead")
    place.kill("dead")
    place.start("liar", told=HASHES | {"weights_sha256": "x"})
    with pytest.raises(UserError) as caught:
        run(start(5.0))
    line = str(caught.value)
    assert "\n" not in line and "on liar, process" in line and "another server answers there" in line
    assert "on dead, process" in line and "silent" in line
    assert hosts() == {"dead", "liar"}
    monkeypatch.setattr(registered, "REMOVE_S", 1.0)
    run(until_the_dead_are_forgotten())


@pytest.mark.parametrize("what", ["weights", "scores"])
def test_another_model_is_refused_once(
    place: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    """By its hashes, or where these are equal (another engine of the same files) by its scores."""
    other = make_hf_model(tmp_path / "other", seed=2)

    async def work() -> None:
        place.start("a")
        async with working(place) as (_, router):
            place.start("b", model=other, hashes=HASHES | ({"weights_sha256": "x" * 64} if what == "weights" else {}))
            await until(lambda: "is not taken in" in caplog.text)
            await asyncio.sleep(0.6)
            assert names(router) == ["math.0"] and len(await scoring(router)) == 12

    run(work())
    assert caplog.text.count("is not taken in") == 1
    said = "weights_sha256 is xxxxxxxxxxxx" if what == "weights" else "scores the fixed probe otherwise"
    assert said in caplog.text


def test_a_folder_that_others_can_write_ends_the_group(place: Place) -> None:
    async def work() -> None:
        place.start("a")
        async with working(place) as (_, router):
            place.folder.chmod(0o777)
            await until(lambda: router._pool._failure is not None)
            with pytest.raises(UserError, match="others than this user may write there"):
                await scoring(router)

    run(work())
    place.folder.chmod(0o700)


def test_a_rollouts_newcomer_gets_the_weights_first(tmp_path: Path, model: Path, fast: None) -> None:
    place = Place(tmp_path / "replicas", "rollout", "rollout", model)
    weights = list(load_file(model / "model.safetensors").items())

    async def work() -> None:
        place.start("a")
        async with working(place) as (group, router):
            sync = GroupWeightSync(router)
            await sync.publish(weights, 5)
            repair = sync.watch(group.lose, patience_s=60.0)
            second = place.start("b")
            await until(lambda: len(names(router)) == 2 and not router.needs_weights)
            place.leave("a")
            await until(lambda: names(router) == ["rollout.1"])
            drawn = await router.generate(ToDraw([[5, 6, 7]] * 3, SAMPLING, [1, 2, 3]))
            assert {int(v) for given in drawn for v in given.token_versions} == {5} and second.num_samples
            await repair.close()

    try:
        run(work())
    finally:
        place.close()
