"""What a group of replicas is made of, and how it says that a sample cannot be done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mopd.engines.interface import EngineError, EngineInfo, EngineLimits, Generator, Scorer
from mopd.text import one_line
from mopd.types import UserError

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
    """A teacher's replica scores, a rollout replica generates. ``bytes_sent`` and ``bytes_received``, where an engine
    has them, are read as running totals of its payload."""
    limits: EngineLimits = NO_LIMITS
    """What the engine said of itself when it joined: how much of the group's work it is given at a time."""
    tells: bool = True
    """It is asked to tell each answer as soon as it is there. False for an engine of this process, which blocks its
    caller until all are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterLimits:
    """When a request or a replica is given up. No keys of a recipe: the deadline of a request is one, and these follow
    from what replicas do, whoever runs them."""

    max_attempts: int = 4
    """Tries of one request over all replicas, the first one included: one more than a replica's failures in a row."""
    backoff_s: float = 0.5
    """Wait before the second try; it doubles with each further one, and four tries span the restart of a connection."""
    breaker_failures: int = 3
    """Failures in a row after which a replica is left alone: one may be a lost connection, three are no chance."""
    breaker_reset_s: float = 10.0
    """How long it is left alone before one request tries it again: much shorter than a model takes to load."""


LIMITS = RouterLimits()
MAX_NAMED_ATTEMPTS = 8
"""Attempts that are named one by one; of more, each replica is named once."""


class SampleFailed(RuntimeError):
    """Samples that no replica could do. The message names the group, the attempts and the last error."""

    def __init__(
        self, group: str, positions: Sequence[int], *, attempts: Sequence[str], last_error: BaseException
    ) -> None:
        """
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
        self.group = group
        self.positions = tuple(positions)
        self.attempts = tuple(attempts)
        self.last_error = last_error


class NoReplica(RuntimeError):
    """No replica of the group can take work, and none will soon; the message tells the state of each."""


async def info_of(replica: Replica) -> EngineInfo:
    """What a replica says about itself; ``UserError`` if it does not."""
    engine: Any = replica.engine
    try:
        info: EngineInfo = await engine.info()
    except EngineError as error:
        raise UserError(f"{replica.name} does not tell what it serves: {error}: see its log") from error
    return info
