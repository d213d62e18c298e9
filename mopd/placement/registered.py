"""Servers that register with the run and may come and go: taken in, watched, let go, as long as enough are there.

::

    a file in RUN/replicas ──its count goes up──> asked who it is ──the group's model and scores──> works
             ▲                                          └── others ──> refused, told once
             └── comes back when it lives again ── no more work <──┬── its file is gone: what runs there may end
                                                                  └── silent, or no answer: it goes elsewhere

Below ``min_replicas`` the others work on, and requests wait where there is none, until ``startup_timeout_s`` is over.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mopd.base.files.reading import shown_path
from mopd.base.text import first_few, one_line
from mopd.base.types import LostError, UserError
from mopd.config.placements import RegisteredConfig
from mopd.conversion.hf.manifest import HASHES, Manifest
from mopd.engines.clients.remote import RemoteEngine
from mopd.engines.concurrency import cancel
from mopd.engines.interface import EngineError, EngineInfo, EngineRejected
from mopd.engines.replicas.identity import fingerprint, fingerprint_difference, problems_of
from mopd.engines.replicas.interface import Replica
from mopd.engines.replicas.router import Router
from mopd.placement.interface import GroupPlan
from mopd.serving.registration import Registration, read_registrations, read_server_token, remove_registration

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
LONGEST_LOOK_S = 2.0
"""Longest time that counts between two looks: while a training step blocks our own loop no server counts as silent."""
GONE_S = 1.0
"""Seconds without its file after which a server has left: one look may miss a file that is just being replaced, and
counts half of it at most."""
SILENT_S = 30.0
"""Seconds without a higher count after which a server is dead; network file systems show what was written several
seconds late."""
REMOVE_S = 600.0
"""Seconds of silence after which a file is removed, so that files do not gather; a server that comes back writes it
anew."""
HEALTH_EVERY_S = 2.0
HEALTH_FAILURES = 2
ASK_TIMEOUT_S = 10.0
ASK_AGAIN_S = 5.0
"""Pause after a server that lives by its file did not answer."""
MAX_SHOWN = 3
"""Servers that an error names."""


@dataclass(slots=True)
class Heartbeat:
    """Heartbeat of one server: what changed in its file while it was watched."""

    path: Path
    server: Registration
    is_alive: bool = False
    """Its count has gone up before our eyes: a file that a dead server left does not."""
    still_s: float = 0.0
    """Since its count went up."""
    missing_s: float = 0.0


class Heartbeats:
    """Finds out which servers live, by what changed in their files from look to look."""

    def __init__(self) -> None:
        self._by_id: dict[str, Heartbeat] = {}

    def note(self, servers: Mapping[Path, Registration], passed_s: float) -> None:
        """One more look, ``passed_s`` after the last."""
        seen = {server.server_id: (path, server) for path, server in servers.items()}
        for server_id, heartbeat in list(self._by_id.items()):
            if server_id not in seen:
                heartbeat.missing_s += min(passed_s, GONE_S / 2)
                if heartbeat.missing_s >= GONE_S:
                    del self._by_id[server_id]
                continue
            path, server = seen.pop(server_id)
            has_moved = server.beat > heartbeat.server.beat
            heartbeat.path, heartbeat.server, heartbeat.missing_s = path, server, 0.0
            heartbeat.is_alive = heartbeat.is_alive or has_moved
            heartbeat.still_s = 0.0 if has_moved else heartbeat.still_s + passed_s
        self._by_id |= {server_id: Heartbeat(path, server) for server_id, (path, server) in seen.items()}

    @property
    def alive(self) -> dict[str, Heartbeat]:
        """By server id."""
        return {server_id: heartbeat for server_id, heartbeat in self._by_id.items() if self.loss(server_id) is None}

    @property
    def silent(self) -> list[Registration]:
        """Servers whose files are not rewritten."""
        return [heartbeat.server for server_id, heartbeat in self._by_id.items() if self.loss(server_id) is not None]

    @property
    def dead(self) -> list[Path]:
        """Files that have not been rewritten for ``REMOVE_S``."""
        return [heartbeat.path for heartbeat in self._by_id.values() if heartbeat.still_s > REMOVE_S]

    def has_left(self, server_id: str) -> bool:
        """Return whether a server has removed its file."""
        return server_id not in self._by_id

    def loss(self, server_id: str) -> str | None:
        """Why a server is not there; ``None`` for one that is."""
        heartbeat = self._by_id.get(server_id)
        if heartbeat is None:
            return "has left"
        if not heartbeat.is_alive or heartbeat.still_s > SILENT_S:
            return f"is silent for {SILENT_S:g} s" if heartbeat.is_alive else "is silent"
        return None


class Refused(Exception):
    """A server that is none of this group's; asking it again is pointless."""


@dataclass(kw_only=True, slots=True)
class _Known:
    """A server that works, or is just being asked who it is."""

    name: str
    server: Registration
    engine: RemoteEngine
    task: asyncio.Task[Any]
    """First the check whether it fits (returns its ``Replica``), then the wait for its death (returns how it died)."""


class RegisteredGroup:
    """Implements ``Placement`` for servers that register."""

    def __init__(self, plan: GroupPlan, folder: Path) -> None:
        """``folder`` is where they register; it need not be there yet."""
        assert isinstance(plan.group.placement, RegisteredConfig)
        self.plan = plan
        self.cfg = plan.group.placement
        self._folder = folder
        self._router: Router | None = None
        self._heartbeats = Heartbeats()
        self._asked: dict[str, _Known] = {}
        self._members: dict[str, _Known] = {}
        """Both by server id."""
        self._ask_again: dict[str, float] = {}
        self._refused: set[str] = set()
        self._answers: dict[str, str] = {}
        """Server id -> why it was not taken in."""
        self._lost: dict[str, str] = {}
        """Name -> reason, of those that the router still knows: requests wait there for another."""
        self._told: set[Hashable] = set()
        self._standards: tuple[EngineInfo, Mapping[str, Any]] | None = None
        """Description of the first server, and its scores of the fixed probe: later ones must be the same."""
        self._checking = asyncio.Lock()
        self._former: list[RemoteEngine] = []
        """Clients of servers that have gone. Requests may still use one; closed at the end."""
        self._watcher: asyncio.Task[None] | None = None

    async def start(self) -> list[Replica]:
        """Wait for ``min_replicas`` servers."""
        deadline = time.monotonic() + self.cfg.startup_timeout_s
        replicas: dict[str, Replica] = {}
        while True:
            replicas |= {replica.name: replica for replica in await self._look(LOOK_EVERY_S)}
            if len(self._members) >= self.cfg.min_replicas:
                return [replicas[member.name] for member in self._members.values()]
            if time.monotonic() > deadline:
                raise self._shortage()
            await asyncio.sleep(LOOK_EVERY_S)

    def watch(self, router: Router) -> None:
        """Begin to take in new servers, and to give no work to those that have gone."""
        assert self._watcher is None
        self._router = router
        self._watcher = asyncio.create_task(self._watch(router))

    def lose(self, name: str, *, reason: str) -> None:
        """Let go of a replica that others found useless; it may come back."""
        for server_id, member in list(self._members.items()):
            if member.name == name:
                self._let_go(server_id, reason, is_dead=True)

    async def close(self) -> None:
        """Close connections; the servers go on."""
        known = [*self._members.values(), *self._asked.values()]
        tasks = [member.task for member in known]
        await cancel(tasks if self._watcher is None else [self._watcher, *tasks])
        for engine in (*(member.engine for member in known), *self._former):
            await engine.close()
        self._members, self._asked, self._former, self._watcher = {}, {}, [], None

    async def _watch(self, router: Router) -> None:
        before, short_s = time.monotonic(), 0.0
        try:
            while True:
                await asyncio.sleep(LOOK_EVERY_S)
                now = time.monotonic()
                passed_s, before = min(now - before, LONGEST_LOOK_S), now
                for replica in await self._look(passed_s):
                    router.add(replica)
                if self._members:  # requests need not wait for those that have gone
                    for name, reason in self._lost.items():
                        router.remove(name, reason=reason)
                    self._lost = {}
                short_s = 0.0 if len(self._members) >= self.cfg.min_replicas else short_s + passed_s
                if short_s > self.cfg.startup_timeout_s:
                    raise LostError(str(self._shortage()))
        except UserError as error:
            router.fail(error)
        except Exception as error:
            router.fail(UserError(f"{self.plan.key}: its servers can be watched no more: {one_line(error)}"))
            raise

    async def _look(self, passed_s: float) -> list[Replica]:
        """Look once at files and servers; those that were taken in."""
        try:
            found = await asyncio.to_thread(read_registrations, self._folder, self.plan.key)
        except OSError as error:  # what cannot be read for a while says nothing about any server
            self._tell("folder", f"{shown_path(self._folder)}: cannot be read now: {error.strerror}")
        else:
            for path, problem in found.problems.items():
                self._tell(path, f"ignored: {problem}")
            self._heartbeats.note(found.servers, passed_s)
            for path in self._heartbeats.dead:
                remove_registration(path)
        for server_id, member in list(self._members.items()):
            loss = self._heartbeats.loss(server_id)
            if loss is not None:
                self._let_go(server_id, loss, is_dead=not self._heartbeats.has_left(server_id))
            elif member.task.done():
                self._let_go(server_id, member.task.result(), is_dead=True)
        taken_in = [replica for server_id in list(self._asked) if (replica := self._take_in(server_id)) is not None]
        now = time.monotonic()
        for server_id, heartbeat in self._heartbeats.alive.items():
            is_known = server_id in self._members or server_id in self._asked or server_id in self._refused
            if not is_known and now >= self._ask_again.get(server_id, 0.0):
                self._ask(server_id, heartbeat)
        return taken_in

    def _ask(self, server_id: str, heartbeat: Heartbeat) -> None:
        """Begin to ask a server who it is."""
        name, server = self._free_name(), heartbeat.server
        try:
            token = read_server_token(heartbeat.path)
            timeout_s = self.plan.group.routing.request_timeout_s
            engine = RemoteEngine(server.url, token=token, timeout_s=timeout_s, name=name)
        except UserError as error:
            self._note_answer(server_id, server, str(error))
            return
        task = asyncio.create_task(self._admit(name, server, engine))
        self._asked[server_id] = _Known(name=name, server=server, engine=engine, task=task)

    def _take_in(self, server_id: str) -> Replica | None:
        """A server that was asked, when it has answered and fits."""
        member = self._asked[server_id]
        if not member.task.done():
            return None
        del self._asked[server_id]
        error = member.task.exception()
        if error is not None:
            self._former.append(member.engine)
            if isinstance(error, Refused):
                self._refused.add(server_id)
            elif not isinstance(error, (EngineError, UserError)):
                raise error
            self._note_answer(server_id, member.server, one_line(error))
            return None
        replica: Replica = member.task.result()
        member.task = asyncio.create_task(self._death(member.engine))
        self._members[server_id] = member
        self._answers.pop(server_id, None)
        logger.info("%s works: %s", member.name, member.server.place)
        return replica

    def _note_answer(self, server_id: str, server: Registration, answer: str) -> None:
        self._answers[server_id] = answer
        self._ask_again[server_id] = time.monotonic() + ASK_AGAIN_S
        self._tell(server_id, f"{self.plan.key}: the server at {server.place} is not taken in: {answer}")

    def _tell(self, what: Hashable, line: str) -> None:
        """Log a line once for each ``what``."""
        if what not in self._told:
            self._told.add(what)
            logger.warning("%s", line)

    async def _admit(self, name: str, server: Registration, engine: RemoteEngine) -> Replica:
        """The server as a replica of the group. ``Refused`` if it can be none, ``EngineError`` or ``UserError`` where
        it may answer later."""
        try:
            await engine.health(timeout_s=ASK_TIMEOUT_S)
            info = await engine.info()
        except EngineRejected as error:
            raise Refused(str(error)) from error
        if info.manifest is None or dict(info.manifest) != dict(server.manifest):
            raise Refused("another server answers there than the one that registered")
        replica = Replica(name=name, engine=engine, limits=info.limits)
        async with self._checking:  # one after another: the first sets the standards
            await self._check(replica, info)
        return replica

    async def _check(self, replica: Replica, info: EngineInfo) -> None:
        plan, is_rollout = self.plan, self.plan.kind == "rollout"
        first = info if self._standards is None else self._standards[0]
        assert first.manifest is not None
        hashes = Manifest(path="the group's first server", **{name: first.manifest[name] for name in HASHES})
        problems = problems_of(info, hashes, plan.needs, key=plan.key, is_rollout=is_rollout)
        if problems:
            raise Refused("; ".join(problems))
        for name, sha256 in first.adapters.items():
            if info.adapters.get(name) != sha256:
                raise Refused(f"its adapter {name!r} is not that of the group's first server, or not there")
        scores: Mapping[str, Any] = {}
        if not is_rollout:  # which has no weights yet
            scores = await fingerprint(
                replica,
                vocab_size=info.vocab_size,
                temperature=plan.needs.temperature,
                sees_images=info.image_processing is not None,
            )
        if self._standards is None:
            self._standards = info, scores
            return
        difference = 0.0 if is_rollout else fingerprint_difference(self._standards[1], scores)
        limit = plan.needs.preflight.logprob_limit(first.dtype, info.dtype)
        if not difference <= limit:
            raise Refused(
                f"it scores the fixed probe otherwise than the group's first server (mean |log-prob difference| "
                f"{difference:.2e}, limit {limit:g})"
            )

    async def _death(self, engine: RemoteEngine) -> str:
        """Wait until a server does not answer any more; says how."""
        failures = 0
        while True:
            await asyncio.sleep(HEALTH_EVERY_S)
            try:
                await engine.health(timeout_s=self.plan.group.routing.request_timeout_s)
                await engine.info()  # another server at that address would refuse our secret
                failures = 0
            except EngineError as error:
                failures += 1
                if failures == HEALTH_FAILURES:
                    return f"does not answer: {one_line(error)}"

    def _let_go(self, server_id: str, reason: str, *, is_dead: bool) -> None:
        member = self._members.pop(server_id)
        member.task.cancel()
        self._former.append(member.engine)
        self._ask_again[server_id] = time.monotonic() + ASK_AGAIN_S
        logger.warning("%s gets no more work: %s %s", member.name, member.server.place, reason)
        if self._router is not None:
            self._lost[member.name] = reason
            # Longer than we wait for another server: our line is the better one.
            timeout_s = 2 * self.cfg.startup_timeout_s
            self._router.suspend(member.name, reason=f"is gone: it {reason}", timeout_s=timeout_s, is_dead=is_dead)

    def _free_name(self) -> str:
        """Return the name with the lowest free number: names of metrics stay few however many servers come and go."""
        taken = {member.name for member in (*self._members.values(), *self._asked.values())} | self._lost.keys()
        names = map(self.plan.replica_name, itertools.count())
        return next(name for name in names if name not in taken)

    def _shortage(self) -> UserError:
        key, cfg, folder = self.plan.key, self.cfg, shown_path(self._folder)
        alive = self._heartbeats.alive
        told = [f"{alive[i].server.place}: {answer}" for i, answer in self._answers.items() if i in alive]
        told += [f"{server.place}: silent" for server in self._heartbeats.silent]
        others = f" (not taken in: {first_few(told, MAX_SHOWN, '; ')})" if told else ""
        which = "--rollout" if self.plan.kind == "rollout" else f"--teacher {self.plan.name}"
        return UserError(
            f"{key}.placement.min_replicas: {len(self._members)} of {cfg.min_replicas} servers are there after "
            f"{cfg.startup_timeout_s:g} s{others}: start more with mopd serve RECIPE {which} --register {folder}, or "
            "raise placement.startup_timeout_s"
        )
