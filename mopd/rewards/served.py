"""A reward in processes of its own: started at the first call, asked one batch after the other, ended for good when one
fails (``process.py``)."""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from mopd.base.text import one_line
from mopd.base.types import CutOffError, UserError
from mopd.rewards.interface import Graded, RewardItem
from mopd.rewards.process import RewardFailed, RewardProcess

GIB = 2**30


class ServedReward(ABC):
    """Base of such rewards. Every failure is a ``UserError`` that begins with the reward's name."""

    def __init__(self, called: str, cure: str = "") -> None:
        """Prepare the reward. ``called`` heads its errors: a file or a key, and the reward; ``cure`` ends those of a
        run that can go on."""
        self._called, self._cure = called, cure
        self._process: RewardProcess | None = None
        self._failure: UserError | None = None
        self._lock = asyncio.Lock()
        self._is_abandoned = False

    @abstractmethod
    def check(self, item: RewardItem) -> None:
        """Raise ``UserError`` for a row whose ground truth is unusable."""

    async def __call__(self, items: Sequence[RewardItem]) -> list[Graded]:
        """Return the outcome of each item, within a deadline for the whole batch (and another for the start)."""
        async with self._lock:
            if self._failure is not None:
                raise self._failure
            try:
                return await asyncio.to_thread(self._score, items)
            except RewardFailed as error:
                kind = CutOffError if self._cure else UserError
                self._failure = kind(f"{self._called} {one_line(error)}{self._cure}")
                await asyncio.to_thread(self.close)
                raise self._failure from error
            except asyncio.CancelledError:
                self._is_abandoned = True  # if the process is just being started, `_score` ends it
                if self._process is not None:
                    self._process.abandon()  # the thread returns soon
                raise

    def close(self) -> None:
        """End the processes."""
        if self._process is not None:
            self._process.end()

    @abstractmethod
    def _start(self) -> RewardProcess:
        """Start the processes; ``OSError`` or ``ValueError`` if the system refuses."""

    @abstractmethod
    def _call(self, item: RewardItem) -> str:
        """Return the process's input for an item, as JSON; ``RewardFailed`` or ``UserError`` if there is none."""

    @abstractmethod
    def _graded(self, value: Any, item: RewardItem) -> Graded | None:
        """Return the outcome that ``value`` stands for; ``None`` if it is none."""

    @abstractmethod
    def _timeout_s(self, num_items: int) -> float:
        """Return the deadline in seconds of a batch of so many items; for 0 that of the start."""

    def _score(self, items: Sequence[RewardItem]) -> list[Graded]:
        """Grade the items in a thread, after the start if it is the first call."""
        calls = [self._call(item) for item in items]
        if self._process is None:
            try:
                self._process = self._start()
            except (OSError, ValueError) as error:
                raise RewardFailed(f"could not be started: {error}") from error
            if self._is_abandoned:
                self._process.abandon()
            _require_no_error(self._process.exchange(None, self._timeout_s(0)), items)
        answer = self._process.exchange(calls, self._timeout_s(len(calls)))
        _require_no_error(answer, items)
        values = answer.get("values")
        values = values if isinstance(values, list) and len(values) == len(items) else [None] * len(items)
        graded = [self._graded(value, item) for value, item in zip(values, items, strict=True)]
        known = [outcome for outcome in graded if outcome is not None and math.isfinite(outcome.value)]
        if len(known) != len(items):
            raise RewardFailed(f"sent no answer of {len(items)} numbers: it wrote to a descriptor not its own")
        return known


def _require_no_error(answer: dict[str, Any], items: Sequence[RewardItem]) -> None:
    if "error" not in answer:
        return
    number = answer.get("item")
    place = ""
    if type(number) is int and 0 <= number < len(items):
        place = f", for {items[number].place} (domain {items[number].domain!r})"
    raise RewardFailed(f"{answer['error']}{place}")
