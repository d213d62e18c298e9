"""The parts of a group of replicas, and the errors for a sample that it cannot do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mopd.base.text import one_line
from mopd.base.types import LostError, UserError
from mopd.engines.interface import EngineError, EngineInfo, EngineLimits, Generator, Scorer

Kind = Literal["teacher", "rollout"]
NO_LIMITS = EngineLimits()


@dataclass(frozen=True, kw_only=True, slots=True)
class Replica:
    """One copy of a model, ready to work.

    Example: ``Replica(name="math.1", engine=RemoteEngine("http://127.0.0.1:41503", timeout_s=60.0))``.
    """

    name: str
    """Unique in its group; stands in errors, metrics and names of log files."""
    engine: Scorer | Generator
    """A teacher's replica scores, a rollout replica generates. If the engine has ``bytes_sent`` and ``bytes_received``,
    they are read as running totals of its payload."""
    limits: EngineLimits = NO_LIMITS
    """The engine's limits when it joined; they bound the work that it is given at a time."""
    tells: bool = True
    """Whether it reports each answer as soon as it is there. False for an engine of this process, which blocks its
    caller until all are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterLimits:
    """Limits after which a request or a replica is given up. They are no recipe keys: the deadline of a request is one,
    and these follow from how replicas fail, wherever they run."""

    max_attempts: int = 4
    """Attempts of one request over all replicas, the first included: one more than a replica's failures in a row."""
    backoff_s: float = 0.5
    """Seconds before the second attempt, doubled for each further one: four span the restart of a connection."""
    breaker_failures: int = 3
    """Failures in a row that open a replica's breaker: one may be a lost connection, three are no coincidence."""
    breaker_reset_s: float = 10.0
    """Seconds until an open breaker lets one request try again: much shorter than a model takes to load."""


LIMITS = RouterLimits()
MAX_NAMED_ATTEMPTS = 8
"""Attempts that a message lists one by one; of more, each replica is named once."""


class SampleFailed(RuntimeError):
    """Samples that no replica could do. The message names the group, the attempts and the last error."""

    def __init__(
        self, group: str, positions: Sequence[int], *, attempts: Sequence[str], last_error: BaseException
    ) -> None:
        """Build the message.

        Args:
            group: for example ``teacher 'math'``.
            positions: places of the samples in the caller's request.
            attempts: replicas that were tried, in order, with their URLs; one may stand there twice.
            last_error: why the last of them (or the wait for one) failed.
        """
        named = attempts if len(attempts) <= MAX_NAMED_ATTEMPTS else dict.fromkeys(attempts)
        tried = f"{len(attempts)} attempts on {', '.join(named)}" if attempts else "no replica was tried"
        reason = one_line(last_error)
        super().__init__(f"{group} could not answer for {len(positions)} samples: {tried}; last error: {reason}")
        self.positions = tuple(positions)
        self.last_error = last_error

    def ends(self, line: str) -> UserError:
        """Return the error of a run that this one ends: a ``LostError`` if no replica is left."""
        return (LostError if isinstance(self.last_error, NoReplica) else UserError)(line)


class NoReplica(RuntimeError):
    """No replica of the group can take work, now or soon; the message tells the state of each."""


async def info_of(replica: Replica) -> EngineInfo:
    """Return a replica's description of itself; ``UserError`` if it gives none."""
    engine: Any = replica.engine
    try:
        info: EngineInfo = await engine.info()
    except EngineError as error:
        raise UserError(f"{replica.name} does not tell what it serves: {error}: see its log") from error
    return info
