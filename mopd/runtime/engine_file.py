"""What travels to the process of one replica: its own sub-config as a small JSON file, nothing else of the recipe."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mopd.config.engines import Engine, TorchEngine, VllmEngine
from mopd.config.placement import Local, RayPlacement
from mopd.config.schema import Recipe
from mopd.types import UserError

FORMAT = "mopd engine 1"
_ENGINES = {"torch": TorchEngine, "vllm": VllmEngine}
STARTUP_TIMEOUT_S = 600.0
"""Of a server that somebody starts by hand."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineFile:
    """One replica, complete: what ``mopd serve`` needs to know."""

    role: Literal["teacher", "rollout"]
    name: str
    """The teacher's name in the recipe, or ``rollout``."""
    replica: int
    """Number of the replica in its group, from 0."""
    model: str
    """Absolute path of the checkpoint's folder."""
    engine: Engine
    max_logprobs: int
    """Largest ``top_k`` that will be asked for."""
    temperature: float
    """Sampling temperature of most requests; with ``top_p`` and ``top_k`` it decides what a vLLM rollout reports."""
    top_p: float
    top_k: int
    max_tokens_per_request: int
    """Tokens of one request."""
    max_queued_tokens: int
    """Tokens that wait or run at a time."""
    request_timeout_s: float
    startup_timeout_s: float
    """Deadline for the engine to be ready."""
    enable_sleep_mode: bool
    """The engine can be put to sleep (a shared pool of GPUs)."""

    @property
    def label(self) -> str:
        """``math/0``: name and replica, for logs."""
        return f"{self.name}/{self.replica}"

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {"format": FORMAT, **dataclasses.asdict(self)}

    def write(self, path: Path) -> None:
        """Write the file."""
        path.write_text(json.dumps(self.to_json(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def teacher_file(recipe: Recipe, name: str, replica: int = 0) -> EngineFile:
    """The file of a teacher's replica; ``UserError`` lists the teachers when there is no such one."""
    if name not in recipe.teachers:
        raise UserError(f"--teacher {name}: the recipe has no such teacher; it has {', '.join(recipe.teachers)}")
    return _file(recipe, "teacher", name, replica, recipe.teachers[name].model, recipe.teachers[name])


def rollout_file(recipe: Recipe, replica: int = 0) -> EngineFile:
    """The file of a rollout replica."""
    return _file(recipe, "rollout", "rollout", replica, recipe.student.model, recipe.rollout)


def _file(
    recipe: Recipe, role: Literal["teacher", "rollout"], name: str, replica: int, model: str, group: Any
) -> EngineFile:
    if not 0 <= replica < group.num_replicas:
        raise UserError(f"--replica {replica}: {name} has {group.num_replicas} replicas, numbered from 0")
    placement, routing = group.placement, group.routing
    supervised = isinstance(placement, (Local, RayPlacement))
    longest = recipe.data.max_prompt_length + recipe.rollout.max_response_length
    engine = group.engine
    if isinstance(engine, VllmEngine) and engine.max_model_len is None:
        engine = dataclasses.replace(engine, max_model_len=longest)
    return EngineFile(
        role=role,
        name=name,
        replica=replica,
        model=os.path.abspath(model),
        engine=engine,
        max_logprobs=recipe.loss.top_k,
        temperature=recipe.rollout.temperature,
        top_p=recipe.rollout.top_p,
        top_k=recipe.rollout.top_k,
        max_tokens_per_request=max(routing.max_tokens_per_request, longest),  # one sample is never cut
        max_queued_tokens=2 * routing.max_inflight_tokens,  # a router and whoever else looks at the teacher
        request_timeout_s=routing.request_timeout_s,
        startup_timeout_s=placement.startup_timeout_s if supervised else STARTUP_TIMEOUT_S,
        enable_sleep_mode=isinstance(placement, RayPlacement) and placement.shared_pool is not None,
    )


def is_engine_file(path: str | Path) -> bool:
    """Whether a file begins as ``EngineFile.write`` makes it begin (a recipe does not)."""
    try:
        with open(path, encoding="utf-8") as file:
            return FORMAT in file.read(64)
    except (OSError, UnicodeDecodeError):
        return False  # reading it as a recipe says what is wrong


def read_engine_file(path: str | Path) -> EngineFile:
    """Inverse of ``EngineFile.write``; ``UserError`` for a file of another version or with other keys."""
    try:
        tree = json.loads(Path(path).read_text(encoding="utf-8"))
        if tree.pop("format") != FORMAT:
            raise ValueError(f"format is not {FORMAT!r}")
        engine = tree.pop("engine")
        return EngineFile(engine=_ENGINES[engine["type"]](**engine), **tree)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        problem = " ".join(str(error).split())[:200]
        raise UserError(f"{path}: is no engine file of this mopd ({problem}): let mopd write it anew") from error
