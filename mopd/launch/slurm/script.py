"""The job's script, which a person can read from top to bottom, change, and submit by hand.

The template renders quoted values alone: each ``{{ … }}`` becomes one word of the shell, unless a filter quotes it for
where else it stands (a remark, a line of sbatch). No value spans lines.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from mopd.base.text import file_name, visible
from mopd.base.types import UserError
from mopd.config.data import TransferQueueConfig
from mopd.config.load import Loaded
from mopd.config.machine.places import Tenant, engine_groups, path_of
from mopd.config.placements import RayConfig
from mopd.config.reading.tree import dotted
from mopd.config.slurm import SlurmConfig
from mopd.launch.slurm.layout import JobComponent, JobLayout, slurm_of

MAX_JOB_NAME = 60
MAX_FAILURES, LONG_LIFE_S = 4, 3600
"""A replica that has ended so often is not started again; one that worked for so long counts from the beginning."""
SCRIPT, RECIPE = "job.sh", "recipe.yaml"
"""Files of the run's ``job`` folder: the script, and the copy of the recipe that the job reads."""


class Quoted(str):
    """Text that is quoted already."""


def render_script(loaded: Loaded, layout: JobLayout, *, run: Path) -> str:
    """Write the script of a recipe's job, for bash.

    Args:
        layout: of ``lay_out``.
        run: the run's folder, or the folder of the runs of an array.

    Raises:
        UserError: a value, the working directory or the interpreter's path cannot stand in a script.
    """
    config = slurm_of(loaded)
    is_split, num_nodes = len(layout.components) > 1, sum(component.num_nodes for component in layout.components)
    one_each = [f"--nodes={num_nodes}", f"--ntasks={num_nodes}", "--ntasks-per-node=1"]
    are_wide = any(server.num_nodes > 1 for server in layout.servers)
    environment = Environment(
        loader=PackageLoader("mopd.launch.slurm", "."),
        autoescape=False,  # HTML's
        finalize=_word,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "remark": lambda text: Quoted(visible(text)),
        "sbatch": _sbatch_word,
        "words": lambda values: Quoted(" ".join(map(_word, values))),
        "lines": lambda values: Quoted(shlex.quote("\n".join(map(_on_one_line, values)))),  # for ``eval``
    }
    return environment.get_template("job.sh.j2").render(
        slurm=config,
        student_nodes=layout.places.student_nodes,
        recipe_name=loaded.path,
        script=shlex.quote(_path(run / "job" / SCRIPT)),
        recipe=_path(run / "job" / RECIPE),
        run_dir=_path(run),
        run_key=f"run_dir={json.dumps(_path(run), ensure_ascii=False)[:-1]}",
        folder=os.getcwd(),
        output=_output(loaded, run),
        job_name=visible(f"mopd-{run.resolve().name}")[:MAX_JOB_NAME],
        python=sys.executable,
        container=config.container.type if config.container else None,
        pyxis=_pyxis(config),
        student_gpus=" ".join(map(str, layout.student_gpus[0])),
        others_gpus=" ".join(map(str, layout.student_gpus[-1])),
        ray=str(Path(sys.executable).with_name("ray")),
        ray_keys=_ray_keys(loaded),
        ray_gpus=_ray_gpus(layout) if config.form == "ray" else [],
        max_failures=MAX_FAILURES,
        restarts_last_s=LONG_LIFE_S,
        table=_table(layout, "spare" if config.spare_nodes else "Ray"),
        is_split=is_split,
        num_nodes=num_nodes,
        everywhere=[f"--het-group=0-{len(layout.components) - 1}"] if is_split else one_each,
        components=[_options(config, component) for component in layout.components],
        servers=[_server(server) for server in layout.servers],
        are_wide=are_wide,
        first=Quoted("${node%%,*}" if are_wide else "$node"),
        nodes=Quoted('"$nodes"' if are_wide else "1"),
    )


def _options(config: SlurmConfig, component: JobComponent) -> list[str]:
    """Return the options of sbatch for one component."""
    options = [f"--nodes={component.num_nodes}", "--ntasks-per-node=1"]
    options += [f"--partition={component.partition}"] if component.partition else []
    for name in ("account", "qos", "time"):
        value = getattr(config, name)
        options += [f"--{name}={value}"] if value else []
    options += ["--no-kill"] if config.spare_nodes else []  # the job outlives a node
    options += [f"--gpus-per-node={component.gpus_per_node}"] if component.gpus_per_node else []
    options += [f"--cpus-per-task={component.cpus_per_node}"] if component.cpus_per_node else ["--exclusive", "--mem=0"]
    return [*options, *config.options]


def _server(server: Tenant) -> dict[str, Any]:
    """Return the template's values for one replica, which the script starts by a line."""
    nodes = (f'"${{nodes_{server.component}[{server.node + i}]}}"' for i in range(server.num_nodes))
    return {
        "nodes": Quoted(",".join(nodes)),
        "component": server.component,
        "teacher": server.key.partition(".")[2],
        "role": file_name(f"{server.key}.{server.number}"),
        "gpus": " ".join(map(str, server.gpus)),
        "number": server.number,
    }


def _ray_gpus(layout: JobLayout) -> list[list[int]]:
    """Return the GPUs of each node's Ray daemon: those that the student's ranks leave."""
    (component,) = layout.components
    firsts = [len(own) for own in layout.student_gpus]
    firsts += [0] * (component.num_nodes - len(firsts))
    return [list(range(first, component.gpus_per_node)) for first in firsts]


def _ray_keys(loaded: Loaded) -> list[str]:
    """Return the keys that take the address of the job's own cluster."""
    groups = engine_groups(loaded.recipe)
    on_ray = [path_of(key) for key in groups if isinstance(groups[key].placement, RayConfig)]
    keys = [dotted((*path, "placement", "address")) for path in on_ray]
    if isinstance(loaded.recipe.data_plane, TransferQueueConfig):
        keys.append("data_plane.address")
    return [f"{key}=" for key in keys]


def _pyxis(config: SlurmConfig) -> list[str]:
    """Return the options of srun for a container of pyxis; none without.

    Raises:
        UserError: the container cannot see the working directory, whose name would end where a mount's source ends.
    """
    folder = os.getcwd()
    if config.container is not None and {":", ","} & set(folder):
        raise UserError(
            f"{visible(folder)}: a container's mount cannot name a working directory with a colon or a comma: call "
            "mopd slurm in another"
        )
    if config.container is None or config.container.type != "pyxis":
        return []
    mounts = ",".join([f"{folder}:{folder}", *config.container.mounts])
    image, workdir = f"--container-image={config.container.image}", f"--container-workdir={folder}"
    return [image, f"--container-mounts={mounts}", workdir]


def _table(layout: JobLayout, others: str) -> list[str]:
    """Return a line for each node: what it is for; ``others`` for those that nothing has a fixed place on."""
    lines = []
    for index, component in enumerate(layout.components):
        for node in range(component.num_nodes):
            name = f"node {node}" if len(layout.components) == 1 else f"{component.key}, node {node}"
            parts = []
            if index == 0 and node < layout.places.student_nodes:
                first = node * layout.places.ranks_per_node
                last = first + layout.places.ranks_per_node - 1
                ranks = f"rank {first}" if first == last else f"ranks {first} to {last}"
                parts.append(f"{ranks} of the student{_on(layout.student_gpus[node])}")
            parts += [
                f"{server.key}.{server.number}{_on(server.gpus)}"
                for server in layout.servers
                if server.component == index and node in range(server.node, server.node + server.num_nodes)
            ]
            lines.append(f"{name}: {'; '.join(parts) or others}")
    return lines


def _on(gpus: Sequence[int]) -> str:
    if not gpus:
        return ""
    return f" on GPU {gpus[0]}" if len(gpus) == 1 else f" on GPUs {gpus[0]} to {gpus[-1]}"


def _path(path: Path) -> str:
    """Return the path in a form that no command reads as an option."""
    return f"./{path}" if str(path).startswith("-") else str(path)


def _output(loaded: Loaded, run: Path) -> str:
    """Return the path of the job's log, in which sbatch replaces nothing but ``%j``."""
    folder = os.path.join(os.getcwd(), run, "logs", "job")
    if "\\" in folder:
        raise UserError(
            f"{loaded.where('run_dir')}: {visible(folder)} holds a backslash, which Slurm takes out of the path of a "
            "job's log: set another run_dir, or call mopd slurm elsewhere"
        )
    return f"{folder.replace('%', '%%')}/%j.log"


def _word(value: object) -> str:
    """Quote the value of an expression of the template as one word of the shell."""
    if isinstance(value, (Quoted, int)):
        return str(value)
    assert isinstance(value, str), value
    return shlex.quote(_on_one_line(value))


def _sbatch_word(text: str) -> Quoted:
    """Quote a word of a ``#SBATCH`` line.

    sbatch reads a backslash in either kind of quotes, ``#`` outside of them as a remark, and ``hetjob`` (once
    ``packjob``) anywhere in a line as the next component (``get_argument`` in ``src/common/slurm_opt.c``).
    """
    quoted = re.sub(r'[\\"]', r"\\\g<0>", _on_one_line(text))
    divided = re.sub("(?i)(het|pack)(?=job)", r"\1\\", quoted)
    return Quoted(text if re.fullmatch("[A-Za-z0-9_=./,:@%+-]+", divided) else f'"{divided}"')


def _on_one_line(text: str) -> str:
    """Return the text; ``UserError`` for the working directory or interpreter's path, which no reader of the recipe has
    checked, with a line end in it."""
    if visible(text) != text:
        raise UserError(
            f"'{visible(text)[:300]}' would stand in the job's script, and holds a control character, such as a line "
            "end: rename it"
        )
    return text
