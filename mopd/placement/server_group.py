"""Replicas that this run starts itself: brought up, watched, restarted, given up. A launcher knows how processes start.

::

    bring up ──healthy──> working ──died or hung──> suspended ──bring up──> replaced (rollout: no work before weights)
        └──not in time──> UserError                     └──MAX_RESTARTS used up──> removed from the router
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from mopd.base.files.temporary import TemporaryFolder
from mopd.base.files.writing import writing
from mopd.base.types import UserError
from mopd.config.placements import LocalConfig, RayConfig
from mopd.engines.clients.remote import RemoteEngine
from mopd.engines.concurrency import all_or_none, cancel
from mopd.engines.interface import EngineError, EngineInfo, EngineUnavailable
from mopd.engines.replicas.interface import Replica
from mopd.engines.replicas.router import Router
from mopd.placement.ending import KILL_WAIT_S, STOP_GRACE_S, WATCHERS_CLOSE_S
from mopd.placement.gpus import visible_gpus
from mopd.placement.interface import GroupPlan, KeptAwake
from mopd.placement.process import ServerCommand, ServerProcess, ServerState

logger = logging.getLogger(__name__)

POLL_S = 0.1
HEALTH_EVERY_S = 5.0
HEALTH_FAILURES = 2
"""Health calls in a row without an answer in time: one may be our own loop's fault, which a training step blocks."""
MAX_RESTARTS = 3
"""Restarts of each replica that died: a fourth death is no accident. The others then carry on, and the
run stops when none is left."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
"""Seconds of pause before a replica is started again after a failed start."""


class Server(Protocol):
    """A server process somewhere. No method waits for the process."""

    async def state(self) -> ServerState:
        """Return the state now; a server that cannot be reached any more has ended."""
        ...

    async def last_words(self) -> str:
        """Why it ended, on one line, with the place of its log."""
        ...

    async def terminate(self) -> None:
        """Ask it to end in order."""
        ...

    async def kill(self) -> None:
        """End it now."""
        ...


class Launcher(Protocol):
    """Starts server processes somewhere."""

    async def prepare(self) -> None:
        """Prepare the first launch; ``UserError`` if there is no room."""
        ...

    async def launch(self, index: int, token: str) -> Server:
        """Start replica ``index``; returns at once. ``UserError`` if it cannot be."""
        ...

    async def close(self) -> None:
        """Clean up after the last server has ended."""
        ...


class LocalLauncher:
    """Implements ``Launcher`` with child processes of this one on the loopback interface; GPUs and threads are shared
    out here."""

    def __init__(self, plan: GroupPlan, *, log_dir: Path, gpus: Sequence[tuple[int, ...]]) -> None:
        """
        Args:
            plan: the group.
            log_dir: for the servers' logs.
            gpus: of each replica; an empty tuple without CUDA.
        """
        assert isinstance(plan.group.placement, LocalConfig)
        self._gpus = gpus
        self._plan, self._cfg = plan, plan.group.placement
        self._log_dir = log_dir
        self._folder: TemporaryFolder | None = None
        self._num_launches = 0

    async def prepare(self) -> None:
        with writing(self._log_dir):
            self._log_dir.mkdir(parents=True, exist_ok=True)
        self._folder = TemporaryFolder("mopd-servers-")

    async def launch(self, index: int, token: str) -> ServerProcess:
        assert self._folder is not None
        self._num_launches += 1
        folder = self._folder.path / str(self._num_launches)
        command = ServerCommand(
            engine_file=json.dumps(self._plan.files[index].to_json()),
            token=token,
            host="127.0.0.1",
            environment=self._environment(index),
            python=self._cfg.python,
        )
        log = self._log_dir / f"{self._plan.file_name(index)}.log"
        return ServerProcess(command, folder=folder, log=log)

    async def close(self) -> None:
        if self._folder is not None:
            self._folder.close()
            self._folder = None

    def _environment(self, index: int) -> dict[str, str]:
        cores, replicas = len(os.sched_getaffinity(0)), len(self._plan.files)
        threads = self._cfg.num_threads if self._cfg.num_threads is not None else max(1, cores // replicas)
        environment = {
            "OMP_NUM_THREADS": str(threads),
            # A waiting thread would keep its core from the ranks and the other replicas, which work at the same time.
            "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
        }
        if self._gpus[index]:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible_gpus(self._gpus[index]))
        return environment


class ReplicaDied(Exception):
    """A server ended, or was not healthy in time; the message tells how."""


class Life:
    """One replica between two restarts."""

    def __init__(self, server: Server, engine: RemoteEngine, info: EngineInfo, pid: int) -> None:
        self.server, self.engine, self.pid = server, engine, pid
        self.manifest, self.limits = info.manifest, info.limits


class ServerGroup:
    """Implements ``Placement`` over a launcher."""

    def __init__(self, plan: GroupPlan, launcher: Launcher, *, kept_awake: KeptAwake = contextlib.nullcontext) -> None:
        """``kept_awake`` is held while a replica starts (a pool of GPUs that groups share)."""
        assert isinstance(plan.group.placement, (LocalConfig, RayConfig))
        self.plan = plan
        self.cfg = plan.group.placement
        self.restarts = [0] * len(plan.files)
        """Restarts of each replica so far."""
        self._launcher, self._kept_awake = launcher, kept_awake
        self.token = secrets.token_hex(32)
        """Access token of this group's servers."""
        self._lives: list[Life | None] = [None] * len(plan.files)
        self._servers: list[Server] = []
        self._former: list[RemoteEngine] = []
        """Clients of dead replicas. Requests may still use one; they are few, and closed at the end."""
        self._watchers: list[asyncio.Task[None]] = []

    @property
    def pids(self) -> list[int | None]:
        """Process of each replica's server, on its own machine; None while it is being restarted."""
        return [None if life is None else life.pid for life in self._lives]

    @property
    def engines(self) -> list[RemoteEngine]:
        """Clients of the replicas that work now."""
        return [life.engine for life in self._lives if life is not None]

    async def start(self) -> list[Replica]:
        await self._launcher.prepare()
        async with self._kept_awake():
            try:
                await all_or_none(map(self._first_life, range(len(self.plan.files))))
            except ReplicaDied as error:
                raise UserError(f"{self.plan.key}: {error}") from error
        return [
            Replica(name=self.plan.replica_name(i), engine=life.engine, limits=life.limits)
            for i, life in enumerate(self._lives)
            if life is not None
        ]

    def watch(self, router: Router) -> None:
        assert not self._watchers
        self._watchers = [asyncio.create_task(self._watch(i, router)) for i in range(len(self._lives))]

    async def close(self) -> None:
        await cancel(self._watchers, grace_s=WATCHERS_CLOSE_S)  # one may be ending a server
        for task in self._watchers:
            if not task.done():
                logger.error("%s: a watcher did not end", self.plan.key)
            elif not task.cancelled() and task.exception() is not None:
                logger.error("%s: a watcher failed", self.plan.key, exc_info=task.exception())
        self._watchers = []
        for engine in (*self.engines, *self._former):
            await engine.close()
        self._lives, self._former = [None] * len(self._lives), []
        await asyncio.gather(*(self._end(server, STOP_GRACE_S) for server in self._servers))
        self._servers = []
        await self._launcher.close()

    async def all_do(self, what: str, act: Callable[[RemoteEngine], Awaitable[None]]) -> None:
        """``act`` on every replica that works, at once. One that fails is ended, and what it holds is free; its
        watcher starts it again. ``UserError`` if its process does not end."""

        async def one(life: Life) -> None:
            try:
                await act(life.engine)
            except EngineError as error:
                logger.warning("%s does not %s and is ended: %s", life.engine.name, what, error)
                await self._end(life.server, grace_s=0.0)
                if (await life.server.state()).exit_code is None:
                    raise UserError(
                        f"{life.engine.name} does not {what} ({error}), and does not end either: see what holds it"
                    ) from error

        await all_or_none([one(life) for life in self._lives if life is not None])

    async def _first_life(self, index: int) -> None:
        self._lives[index] = await self._bring_up(index)

    async def _bring_up(self, index: int) -> Life:
        """A healthy replica; ``ReplicaDied`` (its process is ended then) or ``UserError`` if there is none."""
        deadline = time.monotonic() + self.cfg.startup_timeout_s
        server = await self._launcher.launch(index, self.token)
        self._servers.append(server)
        engine: RemoteEngine | None = None
        try:
            state = await self._answering(index, server, deadline)
            assert state.url is not None and state.pid is not None
            timeout_s, name = self.plan.group.routing.request_timeout_s, self.plan.replica_name(index)
            engine = RemoteEngine(state.url, token=self.token, timeout_s=timeout_s, name=name)
            await engine.health(timeout_s=max(1.0, deadline - time.monotonic()))
            return Life(server, engine, await engine.info(), state.pid)
        except BaseException as error:
            if engine is not None:
                await engine.close()
            await asyncio.shield(self._forget(server))
            if isinstance(error, EngineError):
                raise ReplicaDied(f"{self.plan.replica_name(index)}: {error}") from error
            raise

    async def _answering(self, index: int, server: Server, deadline: float) -> ServerState:
        """Wait until the server says that it is ready."""
        name = self.plan.replica_name(index)
        while True:
            state = await server.state()
            if state.exit_code is not None:
                raise ReplicaDied(f"{name} {state.how_it_ended} at its start: {await server.last_words()}")
            if state.url is not None:
                return state
            # After the look: a blocked event loop must not make a server late that is ready.
            if time.monotonic() > deadline:
                raise ReplicaDied(
                    f"{name} was not ready within {self.cfg.startup_timeout_s:g} s: raise "
                    f"placement.startup_timeout_s, or see why: {await server.last_words()}"
                )
            await asyncio.sleep(POLL_S)

    async def _watch(self, index: int, router: Router) -> None:
        """Keep one replica alive until it has used up its restarts."""
        name = self.plan.replica_name(index)
        first = self._lives[index]
        assert first is not None
        life = first
        while True:
            reason = await self._death(index, life)
            self._lives[index] = None
            logger.warning("%s %s", name, reason)
            router.suspend(name, reason=f"is being restarted: it {reason}", timeout_s=self._longest_restart_s)
            self._former.append(life.engine)
            words = await life.server.last_words()
            await self._forget(life.server)
            again = await self._restart(index, first.manifest, f"{reason}; {words}")
            if isinstance(again, str):
                router.give_up(name, reason=again)
                return
            life = again
            router.replace(name, life.engine, life.limits)
            logger.warning("%s works again, restart %d of %d", name, self.restarts[index], MAX_RESTARTS)

    @property
    def _longest_restart_s(self) -> float:
        """Longest time that requests may have to wait for a replica that is being restarted."""
        answer_s = self.plan.group.routing.request_timeout_s  # of ``info``, after the start
        return (self.cfg.startup_timeout_s + answer_s + LONGEST_PAUSE_S + KILL_WAIT_S) * MAX_RESTARTS

    async def _death(self, index: int, life: Life) -> str:
        """Wait for the end of a replica, or until it no longer answers; says how it ended."""
        timeout_s = self.plan.group.routing.request_timeout_s
        failures = 0
        next_health = time.monotonic() + HEALTH_EVERY_S
        health: asyncio.Task[None] | None = None
        try:
            while True:
                state = await life.server.state()
                if state.exit_code is not None:
                    return state.how_it_ended
                if health is None and time.monotonic() >= next_health:
                    health = asyncio.create_task(life.engine.health(timeout_s=timeout_s))
                if health is not None and health.done():
                    failures = failures + 1 if _has_failed(health) else 0
                    health, next_health = None, time.monotonic() + (0.0 if failures else HEALTH_EVERY_S)
                if failures == HEALTH_FAILURES:
                    return f"did not answer /health {failures} times in a row (routing.request_timeout_s {timeout_s:g})"
                await asyncio.sleep(POLL_S)
        finally:
            if health is not None:
                await cancel([health])

    async def _restart(self, index: int, manifest: Mapping[str, str] | None, reason: str) -> Life | str:
        """A new life, or why there is none."""
        pause_s = FIRST_PAUSE_S
        while self.restarts[index] < MAX_RESTARTS:
            self.restarts[index] += 1
            try:
                async with self._kept_awake():
                    life = await self._bring_up(index)
                    if life.manifest == manifest:
                        self._lives[index] = (
                            life  # inside the block: the next holder of the memory then puts it to sleep
                        )
                        return life
            except (ReplicaDied, UserError) as error:
                reason = str(error)
                logger.warning("restart %d failed: %s", self.restarts[index], reason)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                continue
            await life.engine.close()
            await self._forget(life.server)
            return f"{self.plan.model} is not the model any more that the run began with: restore it"
        return f"{reason} (restarts: {MAX_RESTARTS} of {MAX_RESTARTS})"

    async def _forget(self, server: Server) -> None:
        await self._end(server, grace_s=0.0)
        # ``close`` does not wait for a start that was cancelled twice, and has forgotten its server by then.
        if server in self._servers:
            self._servers.remove(server)

    async def _end(self, server: Server, grace_s: float) -> None:
        """End a process, first in order if there is time, and wait for its end."""
        if grace_s > 0:
            await server.terminate()
            if await _wait_for_end(server, grace_s):
                return
        await server.kill()
        if not await _wait_for_end(server, KILL_WAIT_S):
            logger.error("%s: a server did not end within %g s of SIGKILL", self.plan.key, KILL_WAIT_S)


async def _wait_for_end(server: Server, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while (await server.state()).exit_code is None:
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(POLL_S / 2)
    return True


def _has_failed(health: asyncio.Task[Any]) -> bool:
    error = health.exception()
    if error is not None and not isinstance(error, EngineUnavailable):
        raise error
    return error is not None
