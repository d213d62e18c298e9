"""How a run becomes a job of a Slurm cluster: what ``mopd slurm`` asks for; nothing that decides what is learned."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from mopd.base.text import visible
from mopd.config.values import MAX_PROCESSES, Checked, Processes, at_least, check_unrepeated, require_at_least
from mopd.config.weights import check_interface

MAX_SEEDS = 1000
"""Slurm's own default limit of an array."""
MAX_SIGNAL_S = 65_535
"""The longest warning that sbatch takes."""
_NAME = re.compile(r"[A-Za-z0-9_.,:@+-]+")
_TIME = re.compile(r"\d{1,6}(:[0-5]\d){0,2}|\d{1,4}-\d{1,2}(:[0-5]\d){0,2}", re.ASCII)
_OPTION = re.compile(r"(--[a-z][a-z0-9-]*)(=.*)?")
OURS = (
    "--account", "--array", "--chdir", "--cpus-per-task", "--error", "--exclusive", "--export", "--gpus-per-node",
    "--job-name", "--no-requeue", "--nodes", "--ntasks", "--ntasks-per-node", "--open-mode", "--output", "--parsable",
    "--partition", "--qos", "--requeue", "--signal", "--tasks-per-node", "--time", "--wait", "--wrap",
)  # fmt: skip
"""Options of sbatch that follow from other keys, or that the script stands on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmContainerConfig:
    """Image for every step."""

    type: Literal["pyxis", "apptainer"]
    """``srun --container-image``, or ``apptainer exec``."""
    image: str
    """File or ``docker://…`` with ``mopd`` installed."""
    mounts: tuple[str, ...] = ()
    """``SOURCE:TARGET`` folders beside the working directory."""

    def __post_init__(self) -> None:
        if self.image.startswith("-"):
            raise ValueError(f"image is {self.image!r:.60}, which would be read as an option: name an image")
        for mount in self.mounts:
            if not re.fullmatch(r"/[^:,]*:/[^:,]*(:ro|:rw)?", mount):
                raise ValueError(f"mounts names {mount!r}: write SOURCE:TARGET, both from the root on")
        check_unrepeated("mounts", self.mounts)


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmComponentConfig(Checked):
    """With ``heterogeneous``: how ``rollout`` or ``teachers.NAME`` differs from the student."""

    partition: str | None = None
    """Partitions, with commas."""
    gpus_per_node: Annotated[int, at_least(0, MAX_PROCESSES)] | None = None
    """GPUs of each node."""
    cpus_per_node: Processes | None = None
    """CPUs of each node."""

    def check(self) -> None:
        _require_name("partition", self.partition)


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmConfig(Checked):
    """The job of ``mopd slurm`` (docs/cluster.md#slurm)."""

    form: Literal["allocation", "heterogeneous", "ray"] = "allocation"
    """Kind of job."""
    partition: str | None = None
    """Partitions, with commas; absent: the cluster's default."""
    nodes: Processes | None = None
    """Nodes; absent: as few as possible."""
    spare_nodes: Annotated[int, at_least(0, MAX_PROCESSES)] = 0
    """Empty nodes for registered replicas that lose theirs."""
    student_nodes: Processes | None = None
    """Nodes of the student; absent: as few as possible, all without GPUs."""
    gpus_per_node: Annotated[int, at_least(0, MAX_PROCESSES)] = 0
    """GPUs of each node; may be absent where nodes have none."""
    cpus_per_node: Processes | None = None
    """CPUs of each node; absent: all."""
    time: str | None = None
    """Limit for sbatch, quoted (``"12:00:00"``); a longer run is queued again."""
    stop_before_s: Annotated[int, at_least(1, MAX_SIGNAL_S)] = 300
    """Seconds before the limit at which to stop; a step and two checkpoints must fit."""
    interface: Annotated[str, check_interface] | None = None
    """Network interface (``ib0``; docs/cluster.md#networks); absent: NodeAddr's."""
    account: str | None = None
    """Account to charge."""
    qos: str | None = None
    """Quality of service."""
    options: tuple[str, ...] = ()
    """Further sbatch options, as ``["--constraint=h100"]``."""
    setup: tuple[str, ...] = ()
    """Shell lines before every step, as ``["module load cuda"]``."""
    container: SlurmContainerConfig | None = None
    """Image for every step."""
    components: Mapping[str, SlurmComponentConfig] = field(default_factory=dict)
    """With ``heterogeneous``: how ``rollout`` or ``teachers.NAME`` differs from the student."""
    seeds: tuple[int, ...] = ()
    """One run per seed, in ``run_dir/seed_N``."""

    def check(self) -> None:
        for name in ("partition", "account", "qos"):
            _require_name(name, getattr(self, name))
        self._check_time()
        for option in self.options:
            _require_option(option)
        for seed in self.seeds:
            require_at_least("seeds", seed, 0)
        check_unrepeated("seeds", self.seeds)
        if len(self.seeds) > MAX_SEEDS:
            raise ValueError(f"seeds names {len(self.seeds)}: name at most {MAX_SEEDS}")
        if self.form == "ray" and self.spare_nodes:
            raise ValueError("spare_nodes is set, but form is 'ray', and Ray uses all nodes: remove it, or raise nodes")
        if self.form == "heterogeneous" and self.seeds:
            raise ValueError(
                "seeds makes an array, and a heterogeneous job cannot be one: remove seeds, or set form: allocation"
            )
        if self.components and self.form != "heterogeneous":
            raise ValueError(
                f"components is set, but form is {self.form!r}: set form: heterogeneous, or remove components"
            )

    def _check_time(self) -> None:
        if self.time is None:
            return
        if not _TIME.fullmatch(self.time):
            raise ValueError(
                f"time is {self.time!r:.60}: write minutes, hours:minutes:seconds or days-hours, in quotes"
            )
        if seconds_of(self.time) <= self.stop_before_s:
            raise ValueError(
                f"stop_before_s is {self.stop_before_s} and time {self.time!r} is no longer: set fewer seconds, or "
                "more time"
            )


def seconds_of(time: str) -> int:
    """Convert ``time`` to seconds as sbatch does: ``90`` and ``90:00`` are minutes, ``1:30:00`` hours, ``1-12``
    days."""
    days, _, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if days:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, minutes, seconds = 0, parts[0], parts[1] if len(parts) == 2 else 0
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _require_name(name: str, value: str | None) -> None:
    if value is not None and not _NAME.fullmatch(value):
        raise ValueError(f"{name} is {visible(value)!r:.60}: write letters, digits and any of . , : @ + _ -")


def _require_option(option: str) -> None:
    found = _OPTION.fullmatch(option)
    if found is None:
        raise ValueError(f"options names {option!r:.60}: write long options, as in --constraint=h100")
    ours = next((name for name in OURS if name.startswith(found[1])), None)  # sbatch takes any beginning of a name
    if ours is not None and found[1] != "--gpus":
        which = "" if ours == found[1] else f" as {ours}"
        raise ValueError(
            f"options names {found[1]}, which follows{which} from the other keys of this section: remove it"
        )
