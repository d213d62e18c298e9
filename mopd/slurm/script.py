"""The job's script: one that a person reads from top to bottom, may change, and may submit by hand."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from mopd.config.data import TransferQueueConfig
from mopd.config.load import Loaded
from mopd.config.placements import RayConfig
from mopd.config.reading.tree import dotted
from mopd.config.slurm import SlurmConfig
from mopd.slurm.layout import JobComponent, JobLayout, JobServer, groups_of, path_of, slurm_of
from mopd.text import file_name, visible

MAX_JOB_NAME = 60


def render_script(loaded: Loaded, layout: JobLayout, *, run: Path, recipe: Path, script: Path) -> str:
    """The script of a recipe's job, for bash.

    Args:
        layout: of ``lay_out``.
        run: the run's folder, or the folder of the runs of an array.
        recipe: the recipe's copy that the job reads.
        script: where the text will lie.
    """
    config = slurm_of(loaded)
    is_split = len(layout.components) > 1
    environment = Environment(
        loader=PackageLoader("mopd.slurm", "."),
        autoescape=False,  # a shell's quotes: the filter q
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"q": shlex.quote, "remark": _remark, "sbatch": _sbatch_word}
    return environment.get_template("job.sh.j2").render(
        slurm=config,
        layout=layout,
        recipe_name=loaded.path,
        script=str(script),
        recipe=str(recipe),
        run_dir=str(run),
        folder=os.getcwd(),
        output=f"{_literal(run / 'logs' / 'job')}/%j.log",
        job_name=visible(f"mopd-{run.resolve().name}")[:MAX_JOB_NAME],
        python=sys.executable,
        container=_container(config),
        head_step=_head_step(config),
        train_step=_head_step(config, layout.student_gpus),
        student_gpus=_numbers(layout.student_gpus),
        ray=_ray(config),
        ray_keys=_ray_keys(loaded),
        ray_gpus=_ray_gpus(layout) if config.form == "ray" else [],
        table=_table(layout),
        is_split=is_split,
        num_nodes=sum(component.num_nodes for component in layout.components),
        components=[
            {
                "options": _options(config, component),
                "nodelist": f"SLURM_JOB_NODELIST_HET_GROUP_{index}" if is_split else "SLURM_JOB_NODELIST",
            }
            for index, component in enumerate(layout.components)
        ],
        het=[f" --het-group={index}" if is_split else "" for index in range(len(layout.components))],
        servers=[_server(server) for server in layout.servers],
    )


def _options(config: SlurmConfig, component: JobComponent) -> list[str]:
    """Of sbatch, for one component."""
    options = [f"--nodes={component.num_nodes}", "--ntasks-per-node=1"]
    options += [f"--partition={component.partition}"] if component.partition else []
    for name in ("account", "qos", "time"):
        value = getattr(config, name)
        options += [f"--{name}={value}"] if value else []
    options += [f"--gpus-per-node={component.gpus_per_node}"] if component.gpus_per_node else []
    options += [f"--cpus-per-task={component.cpus_per_node}"] if component.cpus_per_node else ["--exclusive", "--mem=0"]
    return [*options, *map(_sbatch_word, config.options)]


def _server(server: JobServer) -> dict[str, Any]:
    """A replica as the script starts it: a line."""
    room, _, name = server.key.partition(".")
    return {
        "node": f"nodes_{server.component}[{server.node}]",
        "component": server.component,
        "role": file_name(f"{server.key}.{server.number}"),
        "gpus": _numbers(server.gpus),
        "which": f"--teacher={shlex.quote(name)}" if name else f"--{room}",
        "number": server.number,
    }


def _head_step(config: SlurmConfig, gpus: Sequence[int] = ()) -> str:
    """What stands before a command that runs on the job's first node, where the script runs too. A container of pyxis
    begins with a step."""
    on_gpus = f"on_gpus {shlex.quote(_numbers(gpus))} " if gpus else ""
    if config.container is None or config.container.type != "pyxis":
        return on_gpus
    task = f"bash -c 'on_gpus \"$@\"' task {shlex.quote(_numbers(gpus))} " if gpus else ""
    return f'"${{step[@]}}" --nodes=1 --ntasks=1 --nodelist="${{nodes_0[0]}}" {task}'


def _numbers(gpus: Sequence[int]) -> str:
    return " ".join(map(str, gpus))


def _ray_gpus(layout: JobLayout) -> list[list[int]]:
    """GPUs for the Ray daemon of each node: what the student's ranks leave."""
    (component,) = layout.components
    owned = [layout.student_gpus if node < layout.student_nodes else () for node in range(component.num_nodes)]
    return [[gpu for gpu in range(component.gpus_per_node) if gpu not in own] for own in owned]


def _ray(config: SlurmConfig) -> str:
    """Ray's command, as a step or the script calls it."""
    if config.container is None:
        return shlex.quote(str(Path(sys.executable).with_name("ray")))
    return '"${inside[@]}" ray' if config.container.type == "apptainer" else "ray"


def _ray_keys(loaded: Loaded) -> list[str]:
    """Keys that take the address of the job's own cluster."""
    groups = groups_of(loaded)
    on_ray = [path_of(key) for key in groups if isinstance(groups[key].placement, RayConfig)]
    keys = [dotted((*path, "placement", "address")) for path in on_ray]
    if isinstance(loaded.recipe.data_plane, TransferQueueConfig):
        keys.append("data_plane.address")
    return keys


def _container(config: SlurmConfig) -> str:
    """Options of srun for a container of pyxis; empty without."""
    if config.container is None or config.container.type != "pyxis":
        return ""
    folder = os.getcwd()
    mounts = ",".join([f"{folder}:{folder}", *config.container.mounts])
    image, workdir = f"--container-image={config.container.image}", f"--container-workdir={folder}"
    return "".join(f" {shlex.quote(word)}" for word in (image, f"--container-mounts={mounts}", workdir))


def _table(layout: JobLayout) -> list[str]:
    """What each node is for, a line each."""
    lines = []
    for index, component in enumerate(layout.components):
        for node in range(component.num_nodes):
            name = f"node {node}" if len(layout.components) == 1 else f"{component.key}, node {node}"
            parts = []
            if index == 0 and node < layout.student_nodes:
                first = node * layout.ranks_per_node
                last = first + layout.ranks_per_node - 1
                ranks = f"rank {first}" if first == last else f"ranks {first} to {last}"
                parts.append(f"{ranks} of the student{_on(layout.student_gpus)}")
            parts += [
                f"{server.key}.{server.number}{_on(server.gpus)}"
                for server in layout.servers
                if (server.component, server.node) == (index, node)
            ]
            lines.append(f"{name}: {'; '.join(parts) if parts else 'Ray, or nothing yet'}")
    return lines


def _on(gpus: Sequence[int]) -> str:
    if not gpus:
        return ""
    return f" on GPU {gpus[0]}" if len(gpus) == 1 else f" on GPUs {gpus[0]} to {gpus[-1]}"


def _remark(text: str) -> str:
    """On one line of a remark."""
    return visible(text)


def _sbatch_word(text: str) -> str:
    """A word of a ``#SBATCH`` line, which has quotes as the shell has and takes ``#`` for a remark."""
    return text if text and all(letter.isalnum() or letter in "-_=./,:@%+" for letter in text) else shlex.quote(text)


def _literal(path: Path) -> str:
    """A path in which sbatch replaces nothing."""
    return str(path).replace("%", "%%")
