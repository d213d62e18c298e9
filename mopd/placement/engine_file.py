"""File that tells the process of one replica what to load: its own sub-config as JSON, nothing else of the recipe."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from mopd.base.files.json_text import read_json_object
from mopd.base.files.reading import open_regular, shown_path
from mopd.base.files.writing import write_json
from mopd.base.types import UserError
from mopd.config.data import MAX_IMAGE_PIXELS
from mopd.config.groups import AutoEngineConfig, SettledEngine, VllmEngineConfig
from mopd.config.payloads import Asked
from mopd.config.placements import LocalConfig, RayConfig, RegisteredConfig
from mopd.config.reading.build import build_from_json
from mopd.config.reading.tree import AUTO
from mopd.config.schema import Recipe
from mopd.config.student import LoraConfig
from mopd.config.values import (
    MAX_COUNT,
    MAX_REPLICAS,
    Count,
    Positive,
    Seconds,
    Whole,
    at_least,
    check_name,
    check_ranges,
)
from mopd.conversion.models.adapter_updates import sends_adapters
from mopd.conversion.models.reading import read_dims

FORMAT = "mopd engine 1"
_CURE = "let mopd write it anew"
STARTUP_TIMEOUT_S = 600.0
"""Deadline for a server that is started by hand."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineFile:
    """One replica, complete: what ``mopd serve`` needs to know."""

    role: Literal["teacher", "rollout"]
    """``rollout``: its weights come from the student, as those of a teacher that is refreshed do."""
    name: str
    """The teacher's name in the recipe, or ``rollout``."""
    replica: Annotated[int, at_least(0, MAX_REPLICAS)]
    """Number of the replica in its group, from 0."""
    model: str
    """Absolute path of the checkpoint's folder."""
    adapters: Mapping[str, str]
    """Absolute paths of adapters that requests name, by the teacher's name."""
    student_adapter: LoraConfig | None
    """With ``rollout``: the weights stay those of ``model``, and an adapter's come from the student."""
    engine: SettledEngine
    max_logprobs: Count
    """Most ids that will be asked for at a position, given ones included."""
    max_given: Whole
    """Most ids that it will be given at a position."""
    temperature: Positive
    """Sampling temperature of most requests; with ``is_exact`` it decides what a vLLM rollout reports."""
    is_exact: bool
    """Whether these draw without cuts and penalties."""
    tells_routes: bool
    """It is asked which experts tokens go through (``rollout.replay_routes``)."""
    longest_sequence: Count
    """Tokens of the longest prompt with its response."""
    max_pixels: Annotated[int, at_least(1, MAX_IMAGE_PIXELS)] | None
    """Largest number of pixels of an image that the model is shown, as ``data.max_pixels``."""
    max_tokens_per_request: Count
    """Tokens of one request (to generate: of its prompts)."""
    max_queued_tokens: Annotated[int, at_least(1, 2 * MAX_COUNT)]
    """Tokens that wait or run at a time."""
    request_timeout_s: Seconds
    startup_timeout_s: Seconds
    """Deadline for the engine to be ready."""
    enable_sleep_mode: bool
    """The engine can be put to sleep: it shares GPUs."""

    def __post_init__(self) -> None:
        check_name(self.name)
        if self.engine.dtype == AUTO:
            raise ValueError("engine.dtype is auto: set the dtype that it became")
        check_ranges(self)

    @property
    def label(self) -> str:
        """``math/0``: name and replica, for logs."""
        return f"{self.name}/{self.replica}"

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {"format": FORMAT, **dataclasses.asdict(self)}

    def write(self, path: Path) -> None:
        """Write the file."""
        write_json(path, self.to_json())


def teacher_file(recipe: Recipe, name: str, replica: int = 0) -> EngineFile:
    """The file of a teacher's replica, with the adapters of all that share it; ``UserError`` lists the teachers when
    there is no such one."""
    if name not in recipe.teachers:
        raise UserError(f"--teacher {name}: the recipe has no such teacher; it has {', '.join(recipe.teachers)}")
    name = recipe.on_group_of(name)[0]
    role: Literal["teacher", "rollout"] = "rollout" if name in recipe.refreshed else "teacher"
    return _file(recipe, role, name, replica, recipe.teachers[name].model, recipe.teachers[name])


def rollout_file(recipe: Recipe, replica: int = 0) -> EngineFile:
    """The file of a rollout replica."""
    return _file(recipe, "rollout", None, replica, recipe.student.model, recipe.rollout)


def _file(
    recipe: Recipe, role: Literal["teacher", "rollout"], teacher: str | None, replica: int, model: str, group: Any
) -> EngineFile:
    name, rollout = teacher or "rollout", recipe.rollout
    placement, routing = group.placement, group.routing
    most = MAX_REPLICAS if isinstance(placement, RegisteredConfig) else group.num_replicas
    if not 0 <= replica < most:
        raise UserError(f"--replica {replica}: {name} has {most} replicas, numbered from 0")
    has_deadline = isinstance(placement, (LocalConfig, RayConfig, RegisteredConfig))
    together = (None,) if teacher is None else recipe.on_group_of(teacher)
    longest = max(map(recipe.longest_sequence, together))
    engine = group.engine
    if isinstance(engine, AutoEngineConfig):
        raise ValueError(f"{name}: engine.type is auto: settle the recipe first")
    if isinstance(engine, VllmEngineConfig) and engine.max_model_len is None:
        engine = dataclasses.replace(engine, max_model_len=longest)
    most_probable = Asked(own=recipe.loss.top_k)  # a rollout tells its own ids
    asked = [most_probable if name is None else recipe.asked[name] for name in together]
    adapters = {name: recipe.teachers[name].adapter for name in together if name is not None}
    return EngineFile(
        role=role,
        name=name,
        replica=replica,
        model=os.path.abspath(model),
        adapters={name: os.path.abspath(path) for name, path in adapters.items() if path is not None},
        student_adapter=_students_adapter(recipe) if role == "rollout" else None,
        engine=engine,
        max_logprobs=max(1, *(one.width for one in asked)),
        max_given=max(one.given for one in asked),
        temperature=1.0 if teacher in recipe.refreshed else rollout.temperature,
        is_exact=teacher in recipe.refreshed or rollout.is_exact,
        tells_routes=teacher is None and rollout.replay_routes,
        longest_sequence=longest,
        max_pixels=recipe.data.max_pixels,
        max_tokens_per_request=max(routing.max_tokens_per_request, longest),  # one sample is never cut
        max_queued_tokens=2 * routing.max_inflight_tokens,  # a router's requests and those of other clients
        request_timeout_s=routing.request_timeout_s,
        startup_timeout_s=placement.startup_timeout_s if has_deadline else STARTUP_TIMEOUT_S,
        enable_sleep_mode=group.shares_gpus or (isinstance(placement, RayConfig) and placement.shared_pool is not None),
    )


def _students_adapter(recipe: Recipe) -> LoraConfig | None:
    """Return what the student's updates bring alone, if they do."""
    lora = recipe.student.lora
    if lora is None or not sends_adapters(recipe, read_dims(Path(recipe.student.model))):
        return None
    return dataclasses.replace(lora, path=None)


def is_engine_file(path: str | Path) -> bool:
    """Return whether a file begins as ``EngineFile.write`` makes it begin (a recipe does not)."""
    try:
        with open_regular(path, cure=_CURE) as file:
            start = file.read(64).lstrip()
    except UserError:
        return False  # reading it as a recipe says what is wrong
    return start.startswith(b"{") and f'"format": "{FORMAT}"'.encode() in start


def read_engine_file(path: str | Path) -> EngineFile:
    """Inverse of ``EngineFile.write``; ``UserError`` for a file of another version or with other keys or values."""
    try:
        tree = read_json_object(path, cure=_CURE)
        if tree.pop("format", None) != FORMAT:
            raise UserError(f"{shown_path(path)}: format is not {FORMAT!r}")
        return build_from_json(EngineFile, tree, shown_path(path))
    except UserError as error:
        problem = str(error).removeprefix(f"{shown_path(path)}: ").removesuffix(f": {_CURE}")
        raise UserError(f"{shown_path(path)}: is no engine file of this mopd ({problem}): {_CURE}") from error
