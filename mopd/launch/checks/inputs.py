"""Checks that need nothing but a look at the disk, made before any rank is started."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mopd.base.files.reading import shown_path
from mopd.base.text import visible
from mopd.base.types import UserError
from mopd.config.load import Loaded
from mopd.config.machine.places import engine_groups
from mopd.config.placements import LocalConfig
from mopd.config.rewards import CustomRewardConfig, JsonSchemaConfig
from mopd.config.schema import Recipe
from mopd.data.image_processing import sees_images

MIN_RANKS, RANKS_PER_CORE = 64, 8
"""Ranks that may start on any machine, and for each of its cores: each is a process of several hundred MiB."""


@dataclass(frozen=True, slots=True)
class Check:
    """Outcome of one check."""

    name: str
    status: Literal["ok", "failed", "warning", "skipped"]
    detail: str
    """What was measured; for a failure also the key to change."""


def check_inputs(loaded: Loaded, *, is_first: bool = True) -> None:
    """Every model folder, data file, template, interpreter and reward file of the recipe is there, and every package.
    On a node without rank 0 (not ``is_first``) only what its ranks read: the student, and files with images for it.

    Raises ``UserError`` that names recipe, key and path or package.
    """
    recipe = loaded.recipe
    if visible(os.getcwd()) != os.getcwd():  # paths below it go into files that take no such text
        raise UserError(f"{shown_path(os.getcwd())}: the working directory holds a control character: rename it")
    check_model_folder(recipe.student.model, loaded.where("student", "model"))
    if not is_first:
        for file in recipe.data.files(recipe.data.train) if sees_images(recipe.student.model) else ():
            check_data_file(loaded, file.path, "train")
        return
    for name, teacher in recipe.teachers.items():
        check_model_folder(teacher.model, loaded.where("teachers", name, "model"))
    for split, entries in (("train", recipe.data.train), ("validation", recipe.data.validation)):
        for file in recipe.data.files(entries):
            check_data_file(loaded, file.path, split)
    for key, python in interpreters(recipe).items():
        check_interpreter(loaded, key, python)
    check_chat_template(loaded)
    for name in recipe.rewards:
        check_reward_file(loaded, name)
    check_wandb(loaded)


def check_data_file(loaded: Loaded, file: str, split: str) -> None:
    """A file of ``data.train`` or ``data.validation`` is there and not empty."""
    _check_file(loaded, file, "data", split)
    if Path(file).stat().st_size == 0:
        raise UserError(f"{loaded.where('data', split)}: file {file!r} is empty: write prompts or remove it")


def check_chat_template(loaded: Loaded) -> None:
    """The file of ``data.chat_template``, if any, is there."""
    if loaded.recipe.data.chat_template is not None:
        _check_file(loaded, loaded.recipe.data.chat_template, "data", "chat_template")


def check_reward_file(loaded: Loaded, name: str) -> None:
    """The file that a reward of the recipe names, if any, is there."""
    reward = loaded.recipe.rewards[name]
    if isinstance(reward, (CustomRewardConfig, JsonSchemaConfig)) and reward.path is not None:
        _check_file(loaded, reward.path, "rewards", name, "path")


def interpreters(recipe: Recipe) -> dict[str, str]:
    """``placement.python`` of the groups that have one, by key of the group."""
    placements = {key: group.placement for key, group in engine_groups(recipe).items()}
    return {key: p.python for key, p in placements.items() if isinstance(p, LocalConfig) and p.python is not None}


def check_interpreter(loaded: Loaded, key: str, python: str) -> None:
    """A group's ``placement.python`` is there and can be run."""
    where = loaded.where(*key.split(".", 1), "placement", "python")
    if not os.path.isfile(python):
        raise UserError(f"{where}: file {shown_path(python)!r} does not exist{_seen_from(Path(python))}")
    if not os.access(python, os.X_OK):
        raise UserError(f"{where}: {shown_path(python)!r} cannot be run: name a Python interpreter")


def check_wandb(loaded: Loaded) -> None:
    """The package is there where the recipe asks for it."""
    if loaded.recipe.metrics.wandb is not None and importlib.util.find_spec("wandb") is None:
        raise UserError(
            "metrics.wandb is set but the wandb package is not installed: run pip install wandb, or remove the section"
        )


def check_machine(loaded: Loaded, num_nodes: int = 1) -> None:
    """The ranks that are to start here are a number that one machine can hold, and each node has as many."""
    world_size, num_cores = loaded.recipe.student.parallel.world_size, len(os.sched_getaffinity(0))
    num_ranks, rest = divmod(world_size, num_nodes)
    if rest:
        raise UserError(
            f"{loaded.where('student', 'parallel')}: {world_size} ranks cannot be shared out evenly over --nnodes "
            f"{num_nodes}: start on a number of nodes that divides {world_size}, or change the sizes"
        )
    most = max(MIN_RANKS, RANKS_PER_CORE * num_cores)
    if num_ranks > most:
        raise UserError(
            f"{loaded.where('student', 'parallel')}: {num_ranks} ranks on this machine of {num_cores} cores, where "
            f"{most} are possible: lower the sizes, or start on several nodes (--nnodes)"
        )


def check_world_size(loaded: Loaded, world_size: int) -> None:
    """The ranks that torchrun started are those that the student's layout needs."""
    parallel = loaded.recipe.student.parallel
    if world_size == parallel.world_size:
        return
    shard = parallel.world_size // parallel.data_parallel_size
    data, rest = divmod(world_size, shard)
    cure = f"set student.parallel.data_parallel_size to {data}" if not rest else f"start a multiple of {shard} ranks"
    raise UserError(
        f"{loaded.where('student', 'parallel')}: tensor_model_parallel_size {parallel.tensor_model_parallel_size} x "
        f"context_parallel_size {parallel.context_parallel_size} x pipeline_model_parallel_size "
        f"{parallel.pipeline_model_parallel_size} x data_parallel_size "
        f"{parallel.data_parallel_size} needs {parallel.world_size} ranks, torchrun started {world_size}: "
        f"start {parallel.world_size} (torchrun --nproc-per-node), or {cure}"
    )


def check_model_folder(folder: str | Path, where: str) -> None:
    """``folder`` looks like a Hugging Face checkpoint; ``where`` heads the error."""
    path = Path(folder)
    if not os.path.isdir(path):  # unlike Path.is_dir, which raises where a name is too long or a folder is closed
        raise UserError(
            f"{where}: folder {shown_path(folder)!r} does not exist{_seen_from(path)}, or write a name of the Hub "
            "(namespace/name)"
        )
    if not os.path.isfile(path / "config.json"):
        raise UserError(
            f"{where}: folder {shown_path(folder)!r} has no config.json: name the folder of a Hugging Face checkpoint"
        )


def _check_file(loaded: Loaded, file: str, *key: str) -> None:
    if not os.path.isfile(file):
        problem = "is no regular file" if os.path.lexists(file) and not os.path.islink(file) else "does not exist"
        raise UserError(f"{loaded.where(*key)}: file {shown_path(file)!r} {problem}{_seen_from(Path(file))}")


def _seen_from(path: Path) -> str:
    if path.is_absolute():
        return ": check the path"
    return f" in {os.getcwd()!r}: check the path, which is relative to the current directory"
