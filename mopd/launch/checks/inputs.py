"""Checks that need neither model nor torch: all that is wrong with a recipe and its files, not only the first.

They need a look at the disk and are made before any rank is started. Each of ``mopd check --static`` says which parts
of the recipe it reads: one that reads what is refused already is left out, as it could only speak of the same mistake.
"""

from __future__ import annotations

import importlib.util
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from mopd.base.files.reading import shown_path
from mopd.base.hardware import Hardware
from mopd.base.text import visible
from mopd.base.types import UserError
from mopd.config.data import DataFileConfig
from mopd.config.load import Draft, Loaded
from mopd.config.machine.places import engine_groups, place_on_machine
from mopd.config.placements import LocalConfig
from mopd.config.reading.tree import dotted
from mopd.config.rewards import CustomRewardConfig, JsonSchemaConfig
from mopd.config.schema import Recipe
from mopd.conversion.models.dims import check_layout
from mopd.conversion.models.reading import read_dims
from mopd.conversion.models.stages import stages_of
from mopd.data.columns import survey
from mopd.data.files import quoted
from mopd.data.hub.names import hub_data, hub_model
from mopd.data.image_processing import read_image_processing, sees_images
from mopd.data.prompts import check_domains_have_teachers, check_student_sees_images, check_teachers_see_images
from mopd.launch.preparing import settled
from mopd.rewards.domains import build_rewards

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


MAX_ROWS = 10_000
"""Of each data file: a wrong column shows in the first, another domain among the first. Training reads them all."""
Path_ = tuple[str, ...]


class StaticChecks:
    """Runs all of them; each outcome by itself."""

    def __init__(self, draft: Draft, hardware: Hardware) -> None:
        self._draft = draft
        self._loaded = draft.loaded
        self._recipe = draft.loaded.recipe
        self._hardware = hardware
        self._no_folder: set[Path_] = set()
        """Models that are not here, whatever the reason."""
        self._domains: dict[str, int] = {}
        """Rows by domain, of the training data where it has some."""
        self._with_images: Counter[str] = Counter()
        """Rows with images by domain, among those looked at."""
        self._student_sees: bool | None = None
        """Images; ``None`` where its config is not known."""
        self._are_all_read = True

    def run(self) -> Iterator[Check]:
        """Yield each outcome, in the order of what relies on what."""
        for problem in self._draft.problems:
            yield Check("recipe", "failed", problem)
        if not self._draft.problems:
            yield Check("recipe", "ok", f"{len(self._loaded.origins)} values")
        yield from self._models()
        yield from self._files()
        if ("student", "model") not in self._no_folder:
            yield from self._try("layout of the student", [("student",)], self._layout)
        if not self._draft.broken:
            gpus = list(self._try("GPUs", [], self._gpus))
            yield from gpus
            if gpus[0].status == "ok":
                yield from self._try("weights to the rollout", [], self._weights)
        for split in ("train", "validation"):
            yield from self._rows(split)
        domains = [("teachers", name, key) for name in self._recipe.teachers or {} for key in ("domains", "default")]
        if not self._domains:
            return
        yield from self._try("teachers of the domains", [("data",), *domains], self._routes)
        if self._with_images and not self._no_folder and self._student_sees is not None:
            models = [("teachers", name, "model") for name in self._recipe.teachers or {}]
            yield from self._try("images", [("data",), *models, *domains], self._images)
        if self._is_whole(("validation",)) and self._is_whole(("loss",)) and self._recipe.needs_rewards:
            yield from self._try("rewards of the domains", [("data",), ("rewards",)], self._rewards)

    def _models(self) -> Iterator[Check]:
        models: list[tuple[tuple[str, ...], str]] = []
        if self._is_whole(("student", "model")):
            models.append((("student", "model"), self._recipe.student.model))
        for name, teacher in (self._recipe.teachers or {}).items():
            if self._is_whole(("teachers", name, "model")):
                models.append((("teachers", name, "model"), teacher.model))
        for key, model in models:
            name = dotted(key)
            if hub_model(model) is not None:
                yield Check(name, "skipped", f"{model} is a name of the Hub, which is fetched when a run needs it")
                self._no_folder.add(key)
                continue
            for check in self._try(name, [], partial(check_model_folder, model, self._loaded.where(*key))):
                if check.status == "failed":
                    self._no_folder.add(key)
                yield check

    def _files(self) -> Iterator[Check]:
        if self._is_whole(("data",)) and self._recipe.data.chat_template is not None:
            yield from self._try("data.chat_template", [], partial(check_chat_template, self._loaded))
        if not self._draft.broken:
            for key, python in interpreters(self._recipe).items():
                check = partial(check_interpreter, self._loaded, key, python)
                yield from self._try(f"{key}.placement.python", [], check)
        for name in self._recipe.rewards or {}:
            yield from self._try(
                f"reward of {name}", [("rewards", name)], partial(check_reward_file, self._loaded, name)
            )
        if self._is_whole(("metrics",)) and self._recipe.metrics.wandb is not None:
            yield from self._try("wandb", [("metrics",)], partial(check_wandb, self._loaded))

    def _layout(self) -> str:
        check_machine(self._loaded)
        parallel = self._recipe.student.parallel
        dims = read_dims(Path(self._recipe.student.model))
        self._student_sees = dims.vision is not None
        check_layout(
            dims,
            tensor_model_parallel_size=parallel.tensor_model_parallel_size,
            stages=stages_of(parallel),
            expert_model_parallel_size=parallel.expert_model_parallel_size,
            expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
        )
        return f"{parallel.world_size} ranks for {dims.num_layers} layers of {dims.family}"

    def _gpus(self) -> str:
        loaded = settled(self._loaded, self._hardware)
        num_ranks = loaded.recipe.student.parallel.world_size
        place_on_machine(engine_groups(loaded.recipe), num_ranks, self._hardware.num_gpus).require(loaded.where)
        return f"{self._hardware.num_gpus} here, {num_ranks} trainer ranks"

    def _weights(self) -> str:
        return settled(self._loaded, self._hardware).weights_way

    def _rows(self, split: str) -> Iterator[Check]:
        if not self._is_whole(("data",)):
            return
        entries = getattr(self._recipe.data, split)
        for i, file in enumerate(self._recipe.data.files(entries)):
            title = f"data.{split}[{i}]"
            if hub_data(file.path) is not None:
                yield Check(title, "skipped", f"{file.path} is a name of the Hub, which is fetched when a run needs it")
                self._are_all_read = False
                continue
            yield from self._try(title, [], partial(self._read, file, split))

    def _read(self, file: DataFileConfig, split: str) -> str:
        try:
            check_data_file(self._loaded, file.path, split)
            sees = bool(self._student_sees)
            found = survey(file, MAX_ROWS, image_key=self._recipe.data.image_key, student_sees=sees)
        except UserError:
            self._are_all_read = False
            raise
        for domain, count in found.counts.items():
            before = self._domains.get(domain, 0)
            self._domains[domain] = before + count if split == "train" else before or count
        self._with_images += found.with_images
        shown = ", ".join(f"{quoted(domain)} {count}" for domain, count in sorted(found.counts.items())[:10])
        seen = f", {found.with_images.total()} of them with images" if found.with_images else ""
        return f"rows by domain: {shown}{seen}" + ("" if found.is_whole else f" (of the first {MAX_ROWS})")

    def _images(self) -> str:
        """Rows with images are their teachers', who see them, and the student's."""
        if not self._student_sees:
            check_student_sees_images(self._with_images)
        teachers = self._recipe.teachers.items()
        sighted = [name for name, teacher in teachers if sees_images(teacher.model)]
        check_teachers_see_images(self._with_images, self._recipe.assignment, sighted)
        read_image_processing(self._recipe.student.model, self._recipe.data.max_pixels)
        return f"student and {len(sighted)} of {len(teachers)} teachers see them"

    def _routes(self) -> str:
        assignment = self._recipe.assignment
        warnings = check_domains_have_teachers(self._domains, assignment.by_domain, default_teacher=assignment.default)
        if warnings and self._are_all_read:
            return "; ".join(warnings)
        return f"{len(self._domains)} domains"

    def _rewards(self) -> str:
        rewards = build_rewards(self._recipe.rewards)
        try:
            for domain in self._domains:
                rewards.of(domain)
        except UserError as error:
            raise UserError(f"{self._loaded.path}: {error}") from error
        return f"{len(self._domains)} domains"

    def _try(self, title: str, needs: Sequence[Path_], check: Callable[[], str | None]) -> Iterator[Check]:
        """``check`` where all that it reads is whole."""
        if not all(map(self._is_whole, needs)):
            return
        try:
            yield Check(title, "ok", check() or "there")
        except UserError as error:
            yield Check(title, "failed", str(error))

    def _is_whole(self, key: Path_) -> bool:
        """Neither the key nor what is above or below it is broken."""
        return not any(key[: len(other)] == other[: len(key)] for other in self._draft.broken)
