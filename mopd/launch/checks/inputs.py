"""Checks of the recipe's files and of the machine, made before any rank is started."""

from __future__ import annotations

import importlib.util
import os
import re
import resource
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from mopd.base.files.reading import shown_path
from mopd.base.hardware import Hardware
from mopd.base.plugins import plugin_path
from mopd.base.text import visible
from mopd.base.types import UserError
from mopd.config.environment import CustomEnvironmentConfig, VerifiersConfig
from mopd.config.load import Loaded
from mopd.config.losses import CustomLossConfig
from mopd.config.machine.places import engine_groups
from mopd.config.output import WandBConfig
from mopd.config.placements import LocalConfig
from mopd.config.rewards import CustomRewardConfig, JsonSchemaConfig
from mopd.config.student import ParallelConfig
from mopd.conversion.models.adapted import adapted_modules
from mopd.conversion.models.reading import read_dims
from mopd.data.image_processing import sees_images
from mopd.placement.process import check_interpreter
from mopd.weights.addresses import interface_address

MIN_RANKS, RANKS_PER_CORE = 64, 8
"""Ranks that may start on any machine, or for each of its cores: each is a process of several hundred MiB."""

OF_A_GROUP = 4
"""Descriptors of a gloo group besides those of its pairs: a listener, an epoll, a pipe."""
RESERVE = 256
"""Descriptors for all else: the standard streams, logs, stores, NCCL, GPUs, the data plane, files of a checkpoint."""
NUM_CPU_GROUPS = 18
"""Groups that a rank joins besides where all of Megatron's groups are gloo's."""
WANTED = 65536
"""The soft limit of open files is raised to this at most, and never lowered."""


@dataclass(frozen=True, slots=True)
class Check:
    """Outcome of one check."""

    name: str
    status: Literal["ok", "failed", "warning", "skipped"]
    detail: str
    """What was measured; for a failure also the key to change."""
    numbers: Mapping[str, float | None] | None = None
    """The same for programs, where there is more than one number to read."""


def check_inputs(loaded: Loaded, *, is_first: bool = True) -> None:
    """Check that every model folder, data file, template, interpreter, reward file and package of the recipe is there.
    On a node without rank 0 (not ``is_first``) only what its ranks read: the student, output matrices of teachers
    that send hidden states, and files with images for the student.

    Raises ``UserError`` that names recipe, key and path or package.
    """
    recipe = loaded.recipe
    if visible(os.getcwd()) != os.getcwd():  # paths below it go into files that take no such text
        raise UserError(f"{shown_path(os.getcwd())}: the working directory holds a control character: rename it")
    check_model_folder(recipe.student.model, loaded.where("student", "model"))
    for name, teacher in recipe.teachers.items() if is_first or recipe.sends_hidden else ():
        check_model_folder(teacher.model, loaded.where("teachers", name, "model"))
        if teacher.adapter is not None:
            check_adapter(loaded, name)
        if recipe.sends_hidden:  # ranks of every node read its output matrix
            from mopd.conversion.hf.head import open_teacher_head  # torch, for few recipes

            open_teacher_head(name, teacher.model, vocab_size=read_dims(Path(recipe.student.model)).vocab_size)
    if not is_first:
        for file in recipe.data.files(recipe.data.train) if sees_images(recipe.student.model) else ():
            check_data_file(loaded, file.path, "train")
        return
    for split, entries in (("train", recipe.data.train), ("validation", recipe.data.validation)):
        for file in recipe.data.files(entries):
            check_data_file(loaded, file.path, split)
    for _, check in file_checks(loaded, lambda *_: True):
        check()


def file_checks(loaded: Loaded, is_whole: Callable[..., bool]) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield title and check of each file and package that the recipe names, apart from models and data.

    ``is_whole`` tells of the parts of a key whether the recipe has a valid value there; without parts, whether all of
    it is valid.
    """
    recipe = loaded.recipe
    if is_whole("data") and recipe.data.chat_template is not None:
        yield "data.chat_template", partial(_check_file, loaded, recipe.data.chat_template, "data", "chat_template")
    if is_whole("student") and recipe.student.lora is not None and recipe.student.lora.path is not None:
        yield "student.lora.path", partial(_check_start, loaded)
    for key, group in (engine_groups(recipe) if is_whole() else {}).items():
        if isinstance(group.placement, LocalConfig) and group.placement.python is not None:
            where = loaded.where(*key.split(".", 1), "placement", "python")
            yield f"{key}.placement.python", partial(check_interpreter, group.placement.python, where)
    if is_whole("loss") and isinstance(recipe.loss, CustomLossConfig):
        yield "loss.module", partial(_check_loss, recipe.loss)
    for i, callback in enumerate(recipe.callbacks if is_whole("callbacks") else ()):
        yield f"callbacks[{i}]", partial(_check_callback, f"callbacks[{i}].module", callback.module)
    environment = recipe.rollout.environment if is_whole("rollout") else None
    if isinstance(environment, CustomEnvironmentConfig):
        place = ("rollout", "environment", "module")
        yield "rollout.environment", partial(_check_file, loaded, environment.module, *place)
    if isinstance(environment, VerifiersConfig) and environment.python is not None:
        where = loaded.where("rollout", "environment", "python")
        yield "rollout.environment", partial(check_interpreter, environment.python, where)
    for name in recipe.rewards or {}:
        if is_whole("rewards", name):
            yield f"reward of {name}", partial(_check_reward, loaded, name)
    if is_whole("checkpoint") and recipe.checkpoint.push_to_hub is not None:
        yield "push_to_hub", partial(_check_push, loaded.where("checkpoint", "push_to_hub"))
    if is_whole("metrics") and recipe.metrics.wandb is not None:
        yield "wandb", partial(_check_wandb, recipe.metrics.wandb)


def check_adapter(loaded: Loaded, name: str) -> None:
    """Check that a teacher's adapter can be read, and fits its model where that has weights here."""
    from mopd.conversion.adapters import read_adapter  # torch, for few recipes

    teacher = loaded.recipe.teachers[name]
    assert teacher.adapter is not None
    has_weights = any(Path(teacher.model).glob("*.safetensors"))
    try:
        read_adapter(teacher.adapter, teacher.model if has_weights else None)
    except UserError as error:
        raise UserError(f"{loaded.where('teachers', name, 'adapter')}: {error}") from error


def check_data_file(loaded: Loaded, file: str, split: str) -> None:
    """Check that a file of ``data.train`` or ``data.validation`` is there and not empty."""
    _check_file(loaded, file, "data", split)
    if Path(file).stat().st_size == 0:
        raise UserError(f"{loaded.where('data', split)}: file {file!r} is empty: write prompts or remove it")


def _check_start(loaded: Loaded) -> None:
    """Check the adapter that the student begins with."""
    from mopd.conversion.adapters import read_start  # torch, for few recipes

    student = loaded.recipe.student
    assert student.lora is not None and student.lora.path is not None
    modules = [own.module for own in adapted_modules(read_dims(Path(student.model)), student.lora.target_modules)]
    try:
        read_start(student.lora.path, student.model, student.lora, modules)
    except UserError as error:
        raise UserError(f"{loaded.where('student', 'lora', 'path')}: {error}") from error


def _check_reward(loaded: Loaded, name: str) -> None:
    reward = loaded.recipe.rewards[name]
    if isinstance(reward, (CustomRewardConfig, JsonSchemaConfig)) and reward.path is not None:
        _check_file(loaded, reward.path, "rewards", name, "path")


def _check_loss(loss: CustomLossConfig) -> None:
    from mopd.student.custom_loss import load_custom_loss  # torch, for few recipes

    load_custom_loss(loss)


def _check_callback(key: str, reference: str) -> None:
    plugin_path(key, reference, "callback")


def _check_push(where: str) -> None:
    from mopd.data.hub.push import check_token  # half a second, for few recipes

    check_token(where)


def _check_wandb(cfg: WandBConfig) -> None:
    """Refuse Weights & Biases without its package, or without a key for its server."""
    if importlib.util.find_spec("wandb") is None:
        raise UserError(
            "metrics.wandb is set, but the package is not installed: pip install 'mopd[wandb]', or remove the section"
        )
    if cfg.mode == "online" and os.environ.get("WANDB_MODE", "online") == "online" and not _has_wandb_key():
        raise UserError(
            "metrics.wandb: there is no key for Weights & Biases here: run wandb login, export WANDB_API_KEY, or set "
            "metrics.wandb.mode: offline"
        )


def _has_wandb_key() -> bool:
    """Return whether the environment holds a key, or a netrc file a login as ``wandb login`` writes it, for whichever
    server."""
    if any(os.environ.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")):
        return True
    for path in filter(None, (os.environ.get("NETRC"), "~/.netrc", "~/_netrc")):
        try:
            text = Path(path).expanduser().read_text(encoding="utf-8", errors="replace")
        except (OSError, RuntimeError):  # absent, closed, or no home
            continue
        if re.search(r"\blogin\s+user\b", text):
            return True
    return False


def check_machine(loaded: Loaded, num_nodes: int = 1) -> None:
    """Check that the ranks divide equally over the nodes, and that one machine can hold its share."""
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


def check_interface(loaded: Loaded, section: Literal["weight_sync", "slurm"]) -> None:
    """Check that this machine has the network interface that the key ``interface`` of a section names, if any: else the
    first update of weights would be the first to miss it."""
    name = getattr(getattr(loaded.recipe, section), "interface", None)
    try:
        name is None or interface_address(name, loaded.where(section, "interface"))
    except OSError as error:
        raise UserError(str(error)) from error


def check_cuda(hardware: Hardware) -> None:
    """Refuse a torch that cannot use the GPUs that are shown: the run would go on in silence, on the CPU.

    Raises:
        UserError: what torch and the driver have.
    """
    if not hardware.gpu_memory_bytes:
        return
    there = f"{len(hardware.gpu_memory_bytes)} GPUs are shown here, and this torch"
    cure = "or export CUDA_VISIBLE_DEVICES= to stay on the CPU"
    if hardware.torch_cuda is None:
        raise UserError(f"{there} is a CPU build: install one for CUDA in its place, {cure}")
    torch_cuda, driver_cuda = hardware.torch_cuda, hardware.driver_cuda
    if driver_cuda is not None and int(torch_cuda.partition(".")[0]) > int(driver_cuda.partition(".")[0]):
        raise UserError(
            f"{there} is built for CUDA {torch_cuda}, the driver takes CUDA {driver_cuda} (nvidia-smi): install a "
            f"newer driver or a torch for CUDA {driver_cuda.partition('.')[0]}, {cure}"
        )


def check_world_size(loaded: Loaded, world_size: int) -> None:
    """Check that torchrun started as many ranks as the student's layout needs."""
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


def gloo_groups(parallel: ParallelConfig, *, on_gpu: bool) -> list[int]:
    """Return sizes of the gloo groups that a rank joins (``student/parallel.py``), on a CPU an upper bound."""
    world, dp, cp = parallel.world_size, parallel.data_parallel_size, parallel.context_parallel_size
    experts = parallel.expert_model_parallel_size * parallel.resolved_expert_tensor_parallel_size
    expert_dp = world // (experts * parallel.pipeline_model_parallel_size)
    # Commands, checkpoints, samples; Megatron's for optimizer states.
    groups = [world, world, parallel.tensor_model_parallel_size * cp, dp, dp * cp, expert_dp]
    return groups if on_gpu else groups + [world] * NUM_CPU_GROUPS


def needed_files(parallel: ParallelConfig, *, on_gpu: bool, is_first: bool) -> int:
    """Return how many descriptors a process of a node comes to: gloo connects every rank of a group with every other
    by a socket. On node 0 (``is_first``) the launcher holds the store, and rank 0 may hold the samples, with a
    connection of each rank."""
    readers = parallel.world_size if is_first else 0
    return RESERVE + readers + sum(size - 1 + OF_A_GROUP for size in gloo_groups(parallel, on_gpu=on_gpu))


def raise_open_files(parallel: ParallelConfig, where: str, *, on_gpu: bool, is_first: bool) -> None:
    """Raise this process's soft limit, which its children inherit, as far as the hard one lets it.

    Args:
        parallel: the ranks.
        where: file, line and key that an error names.
        on_gpu: whether NCCL connects them.
        is_first: whether rank 0 is on this node.

    Raises:
        UserError: the ranks need more.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    most = WANTED if hard == unlimited else min(WANTED, hard)
    if soft != unlimited and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    needed = needed_files(parallel, on_gpu=on_gpu, is_first=is_first)
    if soft != unlimited and soft < needed:
        raise UserError(
            f"{where}: each of {parallel.world_size} ranks needs {needed} open files, and the limit here (ulimit -n, "
            f"hard) is {soft}: raise it to {needed} (LimitNOFILE of the service, /etc/security/limits.conf, --ulimit "
            "nofile of the container)"
        )


def check_model_folder(folder: str | Path, where: str) -> None:
    """Check that ``folder`` looks like a Hugging Face checkpoint; ``where`` heads the error."""
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


def check_samples(loaded: Loaded, folder: str) -> None:
    """Check that a folder of ``data.scored`` is there; ``mopd score`` may make it, and a run reads what it holds."""
    if not os.path.isdir(folder):
        where = loaded.where("data", "scored")
        raise UserError(
            f"{where}: folder {shown_path(folder)!r} does not exist{_seen_from(Path(folder))}, or make it with "
            "`mopd score`"
        )


def _seen_from(path: Path) -> str:
    if path.is_absolute():
        return ": check the path"
    return f" in {os.getcwd()!r}: check the path, which is relative to the current directory"
