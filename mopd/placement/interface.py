"""Interface of placements: replicas that are ready, watched from then on, and gone after ``close``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from mopd.base.text import file_name
from mopd.config.groups import EngineGroupConfig
from mopd.engines.replicas.identity import Needs
from mopd.engines.replicas.interface import Kind, Replica
from mopd.engines.replicas.router import Router
from mopd.placement.engine_file import EngineFile

KeptAwake = Callable[[], AbstractAsyncContextManager[None]]
"""Context that is held while a group works, or its replicas start: the group has the GPUs that it shares."""
ROLLOUT = "rollout"
"""Key of the rollout group; a teacher's is ``teachers.NAME``, as in the recipe."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupPlan:
    """One group as it is to be: everything that a placement reads."""

    key: str
    """``rollout`` or ``teachers.NAME``."""
    kind: Kind
    name: str
    """The teacher's name, or ``rollout``."""
    model: str
    """Folder of the checkpoint, as the recipe spells it."""
    group: EngineGroupConfig
    needs: Needs
    files: tuple[EngineFile, ...]
    """One per replica that this run starts; none for ``external`` and ``registered``."""

    def replica_name(self, index: int) -> str:
        """``math.0``: in errors and metrics."""
        return f"{self.name}.{index}"

    def file_name(self, index: int) -> str:
        """``teachers.math.0``: of log files and folders, whatever characters the name has."""
        return f"{file_name(self.key)}.{index}"


class WeightSource(Protocol):
    """Source of the weights that the rollout's replicas answer with, as its placement needs it."""

    kept_awake: KeptAwake
    """Context that is held while weights are sent."""

    async def stop(self) -> None:
        """Send no weights from now on: the replicas sleep, and lose theirs."""
        ...

    async def go_on(self) -> int | None:
        """Give replicas that are awake the weights of the moment; return the version that is asked for, if any."""
        ...

    def watch(self, give_up: Callable[..., None], *, patience_s: float) -> WeightWatch:
        """Begin to send weights again to replicas without them; ``give_up`` one that cannot be reached."""
        ...


class WeightWatch(Protocol):
    """A watch that was begun."""

    async def close(self) -> None:
        """End it."""
        ...


class Placement(Protocol):
    """The replicas of one group. Used on one event loop."""

    plan: GroupPlan

    async def start(self) -> list[Replica]:
        """Start all replicas and wait until each is healthy. Call ``close`` whatever comes of it.

        Raises:
            UserError: a replica cannot be started or is not healthy in time; names the group's key and the log file.
        """
        ...

    def watch(self, router: Router) -> None:
        """Begin to watch: a replica that dies is suspended in ``router``, restarted and replaced, or removed for
        good."""
        ...

    async def close(self) -> None:
        """End everything that ``start`` and later restarts began; may be called twice."""
        ...
