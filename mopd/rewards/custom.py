"""A reward function of the user's, in processes and an environment of its own.

They start at the first call, import the file once and answer one JSON line per batch (see ``child.py`` and
``supervisor.py``).
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mopd.config.data import CustomRewardConfig
from mopd.files.reading import shown_path
from mopd.rewards.child import MAX_REWARD
from mopd.rewards.interface import RewardItem
from mopd.rewards.process import RewardFailed, RewardProcess
from mopd.text import one_line
from mopd.types import UserError

GIB = 2**30


class CustomReward:
    """Implements ``Reward``. Every failure is a ``UserError`` that names the file and the function, and is final."""

    needs_ground_truth = False

    def __init__(self, cfg: CustomRewardConfig) -> None:
        """``UserError`` when the file does not exist; the function is looked up at the first call."""
        self._cfg = cfg
        self._process: RewardProcess | None = None
        self._failure: UserError | None = None
        self._lock = asyncio.Lock()
        try:
            self._path = Path(cfg.path).resolve()
            is_file = self._path.is_file()
        except (OSError, ValueError, RuntimeError):  # too long, NUL, a circle of links
            is_file = False
        if not is_file:
            raise UserError(f"{shown_path(cfg.path)}: no such file: correct the path of the custom reward")

    async def __call__(self, items: Sequence[RewardItem]) -> list[float]:
        """The function's value for each item, within ``timeout_s`` for the whole batch (and again for the import)."""
        async with self._lock:
            if self._failure is not None:
                raise self._failure
            try:
                return await asyncio.to_thread(self._score, items)
            except RewardFailed as error:
                self._failure = UserError(
                    f"{shown_path(self._cfg.path)}: custom reward {self._cfg.function!r} {one_line(error)}"
                )
                await asyncio.to_thread(self.close)
                raise self._failure from error
            except asyncio.CancelledError:
                if self._process is not None:
                    self._process.abandon()  # the thread comes back
                raise

    def close(self) -> None:
        """End the processes."""
        if self._process is not None:
            self._process.end()

    def _score(self, items: Sequence[RewardItem]) -> list[float]:
        """In a thread."""
        timeout_s = self._cfg.timeout_s
        if self._process is None:
            max_bytes = int(self._cfg.max_memory_gib * GIB)
            try:
                self._process = RewardProcess(self._path, self._cfg.function, max_bytes=max_bytes)
            except (OSError, ValueError) as error:
                raise RewardFailed(f"could not be started: {error}") from error
            _require_no_error(self._process.exchange(None, timeout_s), items)
        answer = self._process.exchange([_arguments(item) for item in items], timeout_s)
        _require_no_error(answer, items)
        values = answer.get("values")
        if not isinstance(values, list) or len(values) != len(items) or not all(map(_is_reward, values)):
            raise RewardFailed(f"sent no answer of {len(items)} numbers: it wrote to a descriptor not its own")
        return [float(value) for value in values]


def _arguments(item: RewardItem) -> str:
    """The function's keywords as JSON; what JSON does not know goes as its text."""
    arguments = {
        "prompt": item.prompt,
        "response": item.response,
        "ground_truth": item.ground_truth,
        "extra_info": item.extra_info,
        "domain": item.domain,
    }
    try:
        return json.dumps(arguments, default=str)
    except (TypeError, ValueError, RecursionError) as error:  # keys that are no text, whole numbers of 5,000 digits
        raise RewardFailed(f"cannot be given {item.place}: {error}") from error


def _is_reward(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and abs(value) <= MAX_REWARD  # type: ignore[arg-type]


def _require_no_error(answer: dict[str, Any], items: Sequence[RewardItem]) -> None:
    if "error" not in answer:
        return
    number = answer.get("item")
    place = ""
    if type(number) is int and 0 <= number < len(items):
        place = f", for {items[number].place} (domain {items[number].domain!r})"
    raise RewardFailed(f"{answer['error']}{place}")
