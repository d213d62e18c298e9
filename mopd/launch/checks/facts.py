"""What a node reports of itself: packages, GPUs and their health, the recipe as it reads it, models, and what it cannot
find."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import torch

from mopd.base.hardware import QUERY_TIMEOUT_S, Hardware, node_name, this_hardware
from mopd.base.text import first_line, one_line
from mopd.base.types import UserError
from mopd.config.load import Loaded, flatten
from mopd.config.machine.places import engine_groups, path_of, place_on_machine
from mopd.config.placements import RayConfig, RegisteredConfig
from mopd.conversion.hf.manifest import make_manifest
from mopd.data.hub.names import hub_model
from mopd.launch.checks.inputs import check_cuda, check_inputs, check_interface, check_machine, check_model_folder
from mopd.launch.node import compared_environment, gpus_of_step
from mopd.launch.preparing import rank_facts, settled, shown, weights_bytes
from mopd.launch.slurm.layout import JobComponent, JobLayout, lay_out, of_job, slurm_of
from mopd.placement.process import check_interpreter
from mopd.run.machine import describe_machine, package_versions

SHM = Path("/dev/shm")
PRODUCT_SIZE = 4096
"""Rows and columns of the product; each element is ``2 * PRODUCT_SIZE``, which bfloat16 holds exactly."""
MIN_FREE = 0.9
"""Share of a GPU's memory that must be free: other processes' leave too little for what was planned."""
GPU_COUNTERS = {
    "ecc.errors.uncorrected.volatile.total": "uncorrected memory errors since the driver was loaded",
    "remapped_rows.pending": "rows of its memory wait for a reset to be remapped",
    "remapped_rows.failure": "rows of its memory could not be remapped",
}
"""nvidia-smi's name -> meaning; those that it does not tell of (``[N/A]``) are passed over."""

RESET_CURE = "reset it (nvidia-smi -r), or leave this node out"


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFacts:
    """One node's report. Plain JSON types, each with a default: another version may not know it."""

    name: str = "?"
    versions: Mapping[str, str] = field(default_factory=dict)
    """Package -> version; ``mopd`` with a hash of its source, and the GPUs' ``driver``."""
    gpus: tuple[str, ...] = ()
    """Their kinds, one each."""
    recipe: Mapping[str, str] = field(default_factory=dict)
    """Key -> its value as JSON, or a hash of it."""
    models: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Key of the recipe -> hashes and size of the folder that it names; none for a name of the Hub."""
    start: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """What a start compares between the nodes of ranks besides versions, by kind (``preparing.FACTS``); none of a node
    without ranks."""
    shm_bytes: int = 0
    problems: tuple[str, ...] = ()
    """What is wrong on this node whatever the others say, with file, line and key."""
    is_complete: bool = False
    """The recipe could be read."""

    @classmethod
    def from_json(cls, data: Any) -> NodeFacts:
        """Invert ``dataclasses.asdict``. What is absent has its default, what is unknown is left out.

        Raises:
            UserError: a value of another type.
        """
        hints = get_type_hints(cls)
        given: dict[str, Any] = {name: data[name] for name in hints if name in data} if isinstance(data, dict) else {}
        if not isinstance(data, dict) or not all(_fits(value, hints[name]) for name, value in given.items()):
            raise UserError("what a node told of itself cannot be read: start the same mopd on every node")
        lists: dict[str, Any] = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
        return cls(**{**given, **lists})


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a JSON value is of a field's type. Unlike texts of a recipe, those of a variable may be empty."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind is None:
        return type(value) is hint
    if kind is tuple:
        return isinstance(value, list) and all(_fits(item, inner[0]) for item in value)
    return isinstance(value, dict) and all(_fits(item, inner[1]) for item in value.values())


def facts_of_this_node(load: Callable[[], Loaded], *, num_nodes: int, node: int) -> tuple[NodeFacts, Loaded | None]:
    """Describe this node, and return the recipe if it can be read. ``load`` raises ``UserError`` where it cannot."""
    problems: list[str] = []
    facts = NodeFacts(
        name=node_name(),
        versions=package_versions(),
        gpus=tuple(describe_machine()["gpus"]),
        shm_bytes=shutil.disk_usage(SHM).total if SHM.is_dir() else 0,
    )
    loaded: Loaded | None = None
    models: dict[str, dict[str, str]] = {}
    start: dict[str, dict[str, str]] = {}
    with _noted(problems):
        loaded = load()
    if loaded is not None:
        recipe = loaded.recipe
        folders: dict[tuple[str, ...], str] = {("student", "model"): recipe.student.model}
        folders |= {("teachers", name, "model"): teacher.model for name, teacher in recipe.teachers.items()}
        local = {loaded.where(*key): model for key, model in folders.items() if hub_model(model) is None}
        for where, model in local.items():  # of names of the Hub each machine fetches the commit that node 0 found
            with _noted(problems):
                models[where] = _model_facts(model, where)
        with _noted(problems):
            if len(local) == len(folders):
                check_inputs(loaded)
        with _noted(problems):
            check_interface(loaded, "weight_sync")
        with _noted(problems):
            check_interface(loaded, "slurm")
        with _noted(problems):
            _check_gpus(loaded, num_nodes, node)
        for key, group in engine_groups(recipe).items() if loaded.recipe.slurm is not None else ():
            if isinstance(group.placement, (RayConfig, RegisteredConfig)) and group.placement.python is not None:
                with _noted(problems):  # a job's replicas; of servers elsewhere nothing is known here
                    check_interpreter(group.placement.python, loaded.where(*path_of(key), "placement", "python"))
        with _noted(problems):
            num_ranks = _num_ranks(loaded, _place_in_job(loaded, num_nodes, node), num_nodes)
            if num_ranks:  # as ``launch/preparing.py`` makes them when the run starts
                start = {"environment": compared_environment()} | rank_facts(loaded, num_ranks)
                if hub_model(recipe.student.model) is not None:
                    del start["student.model"]
        problems += gpu_problems()
        values = {key: shown(value) for key, value in flatten(loaded.named).items()}
        facts = dataclasses.replace(facts, models=models, recipe=values, start=start, is_complete=True)
    return dataclasses.replace(facts, problems=tuple(problems)), loaded


@contextmanager
def _noted(problems: list[str]) -> Iterator[None]:
    """Add the line of a ``UserError`` in the block to ``problems``, once."""
    try:
        yield
    except UserError as error:
        line = one_line(error)
        if line not in problems:
            problems.append(line)


def _model_facts(model: str, where: str) -> dict[str, str]:
    """Return what identifies a model's folder, without reading weights."""
    check_model_folder(model, where)
    manifest = make_manifest(Path(model), cache_file=None, with_weights=False)
    return {
        "config.json": manifest.config_sha256[:12],
        "tokenizer": manifest.tokenizer_sha256[:12],
        "bytes of weights": str(weights_bytes(Path(model)) or 0),
    }


Place_ = tuple[JobLayout, JobComponent, int]
"""The layout of a job, a node's component of it, and the node's number there."""


def _place_in_job(loaded: Loaded, num_nodes: int, node: int) -> Place_ | None:
    """Return this node's place in the job of ``mopd slurm``, if these are its nodes."""
    if loaded.recipe.slurm is None:
        return None
    layout = lay_out(loaded)
    nodes = [(component, index) for component in layout.components for index in range(component.num_nodes)]
    return (layout, *nodes[node]) if len(nodes) == num_nodes else None


def _num_ranks(loaded: Loaded, place: Place_ | None, num_nodes: int) -> int:
    """Return the number of trainer ranks on this node."""
    world_size = loaded.recipe.student.parallel.world_size
    if place is None:
        return world_size // num_nodes
    layout, component, index = place
    has_ranks = component is layout.components[0] and index < layout.places.student_nodes
    return world_size // layout.places.student_nodes if has_ranks else 0


def _check_gpus(loaded: Loaded, num_nodes: int, node: int) -> None:
    """Check that this node has the GPUs that its ranks need, node 0 also those of the groups that the trainer starts,
    and in a job those that it asked for."""
    hardware, student_nodes, place = this_hardware(), num_nodes, _place_in_job(loaded, num_nodes, node)
    num_ranks = _num_ranks(loaded, place, num_nodes)
    if num_ranks:
        check_cuda(hardware)
    if place is not None:
        layout, component, index = place
        loaded = of_job(loaded)
        _check_job_gpus(loaded, component, hardware)
        student_nodes = layout.places.student_nodes
        num_visible = len(layout.student_gpus[index]) if num_ranks else 0
        hardware = dataclasses.replace(hardware, gpu_memory_bytes=hardware.gpu_memory_bytes[:num_visible])
    elif node == 0:
        check_machine(loaded, num_nodes)
    groups = engine_groups(settled(loaded, hardware, num_nodes=student_nodes).recipe) if node == 0 else {}
    place_on_machine(groups, num_ranks, hardware.num_gpus).require(loaded.where)


def _check_job_gpus(loaded: Loaded, component: JobComponent, hardware: Hardware) -> None:
    """Check that Slurm, and the driver where there is one, show as many GPUs as the job asked for."""
    counts = [count for count in (gpus_of_step(), len(hardware.gpu_memory_bytes) or None) if count is not None]
    if not counts or min(counts) >= component.gpus_per_node:
        return
    own = slurm_of(loaded).components.get(component.key)
    is_own = own is not None and own.gpus_per_node is not None
    key = ("slurm", "components", component.key, "gpus_per_node") if is_own else ("slurm", "gpus_per_node")
    raise UserError(
        f"{loaded.where(*key)}: {component.gpus_per_node} are planned, and this node has {min(counts)}: set it to what "
        "the nodes have, or leave this node out"
    )


def gpu_problems() -> Iterator[str]:
    """Yield a line for each GPU that this process sees and that is not well: it must multiply matrices, have its memory
    free, and have lost no bit."""
    ids = {}
    for number in range(torch.cuda.device_count()):
        try:
            ids[str(torch.cuda.get_device_properties(number).uuid)] = number
            yield from _tried(number)
        except RuntimeError as error:  # CUDA's, of a GPU that has fallen off the bus or that another process blocks
            yield f"GPU {number}: {first_line(error)}: {RESET_CURE}"
    if ids:
        yield from _counted(_query(), ids)


def _tried(number: int) -> Iterator[str]:
    device = torch.device("cuda", number)
    free, total = torch.cuda.mem_get_info(device)
    if free < MIN_FREE * total:
        yield (
            f"GPU {number}: {free / 2**30:.1f} of {total / 2**30:.1f} GiB are free: end what else runs there "
            "(nvidia-smi lists it)"
        )
    product = torch.full((PRODUCT_SIZE, PRODUCT_SIZE), 2.0, dtype=torch.bfloat16, device=device) @ torch.ones(
        (PRODUCT_SIZE, PRODUCT_SIZE), dtype=torch.bfloat16, device=device
    )
    wrong = int((product != 2 * PRODUCT_SIZE).sum())
    if wrong:
        yield f"GPU {number}: {wrong} of {PRODUCT_SIZE**2} elements of a product are wrong: leave this node out"


def _counted(text: str, ids: Mapping[str, int]) -> Iterator[str]:
    """Yield a line for each counter above 0 in nvidia-smi's answer, of the GPUs ``ids``: UUID -> number."""
    for line in text.splitlines():
        uuid, *values = (part.strip() for part in line.split(","))
        number = ids.get(uuid.removeprefix("GPU-"))
        for name, value in zip(GPU_COUNTERS, values, strict=False) if number is not None else ():
            if re.fullmatch("[1-9][0-9]*|Yes", value):
                yield f"GPU {number}: {GPU_COUNTERS[name]} ({name} {value}): {RESET_CURE}"


def _query() -> str:
    if shutil.which("nvidia-smi") is None:
        return ""
    command = ["nvidia-smi", f"--query-gpu=uuid,{','.join(GPU_COUNTERS)}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, stdin=subprocess.DEVNULL)
    return done.stdout if done.returncode == 0 else ""
