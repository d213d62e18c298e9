"""Our own rewards that may run long on a hostile response: math, regex, json_schema and code.

They run in forks of a process of their own (``judge.py``), a few at a time, each with a deadline.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from mopd.base.files.json_text import read_json_object
from mopd.base.files.reading import shown_path
from mopd.base.types import UserError
from mopd.config.rewards import CodeConfig, JsonSchemaConfig, MathConfig, RegexConfig
from mopd.rewards.graders.system_calls import architecture_named
from mopd.rewards.ground_truths import schema_of, tests_of, text_of
from mopd.rewards.interface import Graded, RewardItem
from mopd.rewards.process import RewardFailed, RewardProcess
from mopd.rewards.served import GIB, ServedReward

JudgedConfig = MathConfig | RegexConfig | JsonSchemaConfig | CodeConfig
MAX_PROCESSES = 32
START_S = 60.0
"""Seconds for an import; also added to every batch's deadline."""
OVERHEAD_S = 3.0
"""Most seconds per response beyond its deadline: a fork, and ending what it has started."""
BYTES_PER_VALUE = 12 * 1024
"""Bytes of one answer: 500 characters extracted and 500 of a problem, escaped."""


class JudgedReward(ServedReward):
    """One of these rewards, by its configuration."""

    def __init__(self, cfg: JudgedConfig, key: str) -> None:
        """Prepare the settings. ``key`` heads its errors. ``UserError`` for a file or a machine that cannot be used."""
        cure = ": see that the machine has memory and processes left"
        super().__init__(f"{key}: the {cfg.type} reward", cure)
        self._cfg = cfg
        self._num_processes = max(2, min(MAX_PROCESSES, len(os.sched_getaffinity(0)) // 2))
        self._settings: dict[str, Any] = {"num_processes": self._num_processes, "timeout_s": cfg.timeout_s}
        self._max_bytes = (self._num_processes + 1) * GIB
        if isinstance(cfg, RegexConfig):
            self._settings["pattern"] = cfg.pattern
        elif isinstance(cfg, JsonSchemaConfig):
            self._settings["path"] = None if cfg.path is None else _checked_schema(cfg.path, key)
        elif isinstance(cfg, CodeConfig):
            self._settings["max_bytes"] = int(cfg.max_memory_gib * GIB)
            self._max_bytes += 2 * self._num_processes * self._settings["max_bytes"]  # a program and its tests
            if architecture_named(os.uname().machine) is None:
                raise UserError(
                    f"{key}: the code reward knows no way to confine programs on {os.uname().machine}: run on x86_64 "
                    "or aarch64, or write a custom reward"
                )

    def check(self, item: RewardItem) -> None:
        """Raise ``UserError`` unless the ground truth has a shape that the reward reads."""
        self._told(item)

    def _told(self, item: RewardItem) -> dict[str, Any]:
        """Return the judge's input beside the response."""
        if isinstance(self._cfg, CodeConfig):
            return {"tests": tests_of(item)}
        if isinstance(self._cfg, JsonSchemaConfig):
            return {} if self._cfg.path is not None else {"truth": schema_of(item)}
        if isinstance(self._cfg, RegexConfig) and not self._cfg.reads_ground_truth:
            return {}
        return {"truth": text_of(item, self._cfg.type)}

    def _start(self) -> RewardProcess:
        return RewardProcess(
            "judge.py",
            (self._cfg.type, json.dumps(self._settings)),
            max_bytes=self._max_bytes,
            bytes_per_value=BYTES_PER_VALUE,
        )

    def _call(self, item: RewardItem) -> str:
        try:
            return json.dumps({"response": item.response, **self._told(item)})
        except (TypeError, ValueError, RecursionError) as error:
            raise RewardFailed(f"cannot be given {item.place}: {error}") from error

    def _graded(self, value: Any, item: RewardItem) -> Graded | None:
        if not isinstance(value, list) or len(value) != 3 or value[0] not in (0.0, 1.0):
            return None
        return Graded(float(value[0]), None if value[1] is None else str(value[1]), str(value[2]))

    def _timeout_s(self, num_items: int) -> float:
        rounds = math.ceil(num_items / self._num_processes)
        each_again = num_items  # one at a time, see judge.py
        return START_S + (rounds + each_again) * (self._cfg.timeout_s + OVERHEAD_S)


def _checked_schema(path: str, key: str) -> str:
    """Return the absolute path of a JSON schema; ``UserError`` if it is none."""
    from jsonschema import SchemaError
    from jsonschema.validators import validator_for

    schema = read_json_object(path, cure=f"correct {key}.path")
    try:
        validator_for(schema).check_schema(schema)
    except SchemaError as error:
        raise UserError(f"{shown_path(path)}: no JSON schema ({error.message[:200]}): correct {key}.path") from error
    return str(Path(path).resolve())
