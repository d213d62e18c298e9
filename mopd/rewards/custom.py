"""The user's own reward function, in processes and an environment of its own.

They start at the first call, import the file once and answer one JSON line per batch (``child.py``, ``supervisor.py``).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from mopd.base.files.reading import shown_path
from mopd.base.types import UserError
from mopd.config.rewards import CustomRewardConfig
from mopd.rewards.child import MAX_REWARD
from mopd.rewards.interface import Graded, RewardItem
from mopd.rewards.process import RewardFailed, RewardProcess
from mopd.rewards.served import GIB, ServedReward

BYTES_PER_VALUE = 32
"""Most bytes of one number in an answer."""
MAX_EXTRACTED = 500


class CustomReward(ServedReward):
    """Reward of the user's function. Every failure names the file and the function, and is final."""

    def __init__(self, cfg: CustomRewardConfig) -> None:
        """Find the file; the function is looked up at the first call. ``UserError`` if the file does not exist."""
        super().__init__(f"{shown_path(cfg.path)}: custom reward {cfg.function!r}")
        self._cfg = cfg
        try:
            self._path = Path(cfg.path).resolve()
            is_file = self._path.is_file()
        except (OSError, ValueError, RuntimeError):  # too long, NUL, a circle of links
            is_file = False
        if not is_file:
            raise UserError(f"{shown_path(cfg.path)}: no such file: correct the path of the custom reward")

    def check(self, item: RewardItem) -> None:
        """Accept any row: only the function knows what it needs."""

    def _start(self) -> RewardProcess:
        return RewardProcess(
            "child.py",
            (str(self._path), self._cfg.function),
            max_bytes=int(self._cfg.max_memory_gib * GIB),
            bytes_per_value=BYTES_PER_VALUE,
            folder=self._path.parent,
        )

    def _call(self, item: RewardItem) -> str:
        """Return the function's keyword arguments as JSON; what JSON does not know goes as its text."""
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

    def _graded(self, value: Any, item: RewardItem) -> Graded | None:
        """Return the outcome of a valid number: the whole response was judged."""
        if type(value) not in (int, float) or not math.isfinite(value) or abs(value) > MAX_REWARD:
            return None
        return Graded(float(value), item.response[:MAX_EXTRACTED])

    def _timeout_s(self, num_items: int) -> float:
        return self._cfg.timeout_s
