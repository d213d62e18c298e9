"""Checkpoints of the student in Megatron's distributed format, which loads at another parallel layout.

A folder is complete when its ``manifest.json`` exists. Rank 0 writes it last; it holds the sha256 of every other file,
hashed by the rank that wrote the file. ``verify`` compares the hashes, which finds files that were damaged or mixed up
but proves nothing about who wrote the folder: ``load`` therefore reads every pickle of the format through
``restricted``.

Files are written by the ranks themselves. Megatron's own writer starts a manager process and forks for each file:
seconds a save on a small machine, and processes that outlive a killed rank. Megatron and torch also replace the
system's error by one without a reason.
"""

from __future__ import annotations

import copy
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as torch_save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future as TorchFuture

from mopd.base.files.json_text import read_json_object
from mopd.base.files.reading import shown_path
from mopd.base.files.writing import WriteRefusedError, reasoned, refusal, sync, write_text, writing
from mopd.base.hardware import give_back_freed_memory
from mopd.base.types import UserError
from mopd.conversion.job import files_below, sha256_of
from mopd.conversion.torch_dist.plan import EXTRA_STATE
from mopd.conversion.torch_dist.reader import MANIFEST_FILE, STATE_FILE, read_hashes
from mopd.conversion.torch_dist.writer import CONTENT
from mopd.student import cpu_shim
from mopd.student.averages import Averages
from mopd.student.checkpoints import restricted
from mopd.student.checkpoints.states import gather_states, load_states
from mopd.student.model import lora
from mopd.student.model.gpt import StudentModel
from mopd.student.parallel import Layout, raise_together

_OPTIMIZER, _EXPERTS_OPTIMIZER = "optimizer", "optimizer_experts"
_OF_CHECKPOINT = {"params", "step"}
"""What a parameter group has from a checkpoint; all else are options, which the recipe and this machine's Adam set."""


class CheckpointThread:
    """Runner of one piece of work at a time in a thread. Not in a process: a rank has threads, and a fork of a process
    with threads is unsafe; Megatron's ``AsyncCallsQueue`` forks, or hands tensors to a process that outlives a killed
    rank.

    Leaving the ``with`` block waits for the started work. If the block raised, it waits up to the same deadline and
    drops the work's own error in favour of the block's: as long as the other ranks answer, a checkpoint that was begun
    is completed.
    """

    def __init__(self, device: torch.device, *, timeout_s: float) -> None:
        """``timeout_s``: deadline of ``finish``."""
        self._timeout_s = timeout_s
        self._thread = ThreadPoolExecutor(1, "checkpoint", initializer=_use_device, initargs=(device,))
        self._work: Future[None] | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Start ``work``. The previous work must have been taken with ``finish``."""
        if self._work is not None:
            raise RuntimeError("a checkpoint is begun before the last one is finished")
        self._work = self._thread.submit(cpu_shim.activate()(work))

    @property
    def is_busy(self) -> bool:
        """Whether ``finish`` would have to wait."""
        return self._work is not None and not self._work.done()

    def finish(self) -> None:
        """Wait until the work is done and raise what it raised; return at once if none was started.

        Raises:
            UserError: the work is not done in time.
        """
        work, self._work = self._work, None
        if work is None:
            return
        # Not ``work.result(timeout)``: a TimeoutError raised by the work itself could not be told from the deadline's.
        if work not in wait([work], self._timeout_s).done:
            raise UserError(
                f"schedule.wait_timeout_s: a checkpoint was not written within {self._timeout_s:g} s: look at the disk "
                "behind run_dir, or raise it"
            )
        work.result()

    def __enter__(self) -> CheckpointThread:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if kind is None:
            self.finish()
        elif self._work is not None:
            wait([self._work], self._timeout_s)
        self._thread.shutdown(wait=False)


def _use_device(device: torch.device) -> None:
    """Select the rank's GPU in the new thread: CUDA's current device is per thread."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def save(
    folder: Path,
    chunks: Sequence[DistributedDataParallel],
    optimizer: ChainedOptimizer,
    layout: Layout,
    averages: Averages,
    *,
    state: Mapping[str, Any],
    background: CheckpointThread | None = None,
) -> None:
    """Write a complete checkpoint into ``folder``, which is created; replace what an interrupted save left there.
    Collective.

    ``state`` must be JSON-able; rank 0 writes it as ``state.json`` and ``load`` returns it. With ``background`` this
    returns as soon as everything is copied, and ``background.finish`` raises the errors of the writing.

    Raises:
        FileExistsError: ``folder`` already holds a complete checkpoint.
        WriteRefusedError: on every rank, when one of them cannot write.
    """
    _require_new(folder)
    sharded, gathered = _sharded_state(chunks, optimizer, averages, is_loading=False)
    if background is None:
        _write(folder, _make_ready(sharded, layout), layout, state)
        return
    ready = _make_ready(sharded, layout, gathered=gathered)
    # The steps go on using ``control_group``, whose collectives would be paired with the writer's.
    beside = replace(layout, control_group=layout.checkpoint_group)
    background.start(partial(_write, folder, ready, beside, copy.deepcopy(dict(state))))


def write(folder: Path, sharded: dict[str, Any], layout: Layout, *, state: Mapping[str, Any]) -> None:
    """Write a sharded state dict and its manifest into ``folder``. Collective; raises as ``save`` does."""
    _require_new(folder)
    _write(folder, _make_ready(sharded, layout), layout, state)


def _require_new(folder: Path) -> None:
    if is_complete(folder):
        raise FileExistsError(f"{folder} already holds a complete checkpoint")


def _write(folder: Path, ready: Ready, layout: Layout, state: Mapping[str, Any]) -> None:
    """Write the folder, collectively over ``layout.control_group`` alone; remove it again if a write is refused."""
    dist.barrier(group=layout.control_group)
    try:
        raise_together(layout, lambda: _make_anew(folder))
        hashes = _write_sharded(folder, ready, layout)
        raise_together(layout, lambda: write_hash_manifest(folder, {**state, "layout": layout.sizes()}, hashes))
    except WriteRefusedError:  # on every rank: none of them writes any more
        if layout.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)  # the disk may be full: give the space back
        dist.barrier(group=layout.control_group)
        raise
    finally:
        give_back_freed_memory()


def _make_anew(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with writing(folder):
        folder.mkdir(parents=True)


@torch.no_grad()
def load(
    folder: Path,
    chunks: Sequence[DistributedDataParallel],
    optimizer: ChainedOptimizer,
    layout: Layout,
    averages: Averages,
) -> dict[str, Any]:
    """Load weights, optimizer and averages of a verified ``folder``, return the ``state`` given to ``save``.
    Collective.

    The caller sets the learning rate of the state's ``weight_version``, by the recipe's values. Call ``verify`` first.
    Raises ``UserError`` on every rank as ``restricted.load`` does.
    """
    state = read_state(folder)
    options = [{name: group[name] for name in group.keys() - _OF_CHECKPOINT} for group in optimizer.param_groups]
    sharded, _ = _sharded_state(chunks, optimizer, averages, is_loading=True)
    # The big states of distributed optimizers are taken out and loaded a few at a time, after everything else.
    distributed = {
        key: (part, sharded[key].pop("param_state"))
        for part, key in _parts(optimizer)
        if isinstance(part, DistributedOptimizer)
    }
    loaded = restricted.load(sharded, folder)
    _load_chunks([chunk.module for chunk in chunks], loaded["model"])
    averages.load(loaded.get("averages", {}))
    for part, key in _parts(optimizer):
        if key == _EXPERTS_OPTIMIZER:
            _add_common_state(part, loaded.setdefault(key, {}), loaded[_OPTIMIZER])
        _count_as_here(part, loaded[key])
    for part, key in _parts(optimizer):  # not above: it takes the main part's count out of what was loaded
        part.load_state_dict(loaded[key])
    with _without_steps(optimizer):
        load_states(distributed, partial(restricted.load, folder=folder, is_part=True), layout.control_group)
    for group, own in zip(optimizer.param_groups, options, strict=True):
        for name in group.keys() - own.keys() - _OF_CHECKPOINT:
            del group[name]
        group.update(own)
    return state


@torch.no_grad()
def load_weights(folder: Path, *chunks: StudentModel) -> None:
    """Load only the weights of a verified ``folder`` of a run or a conversion. Collective; raises as ``load`` does."""
    _load_chunks(chunks, restricted.load({"model": sharded_weights(chunks)}, folder)["model"])


def sharded_weights(chunks: Sequence[StudentModel]) -> dict[str, Any]:
    """Return sharded state dicts by chunk number. Names count a chunk's layers from 0; keys are the whole model's. Of a
    student with adapters they hold these alone, under PEFT's names.

    Layers' extra states are left out, of what is saved and of what is asked for: which layers have one depends on the
    layer spec and on TransformerEngine's version (its norms have one from 2.0 on), all are empty without fp8, and with
    it they are pickles.
    """
    if any(lora.all_factors(chunks)):
        return {str(number): lora.sharded_adapters(chunk) for number, chunk in enumerate(chunks)}
    states = [chunk.sharded_state_dict(metadata=dict(CONTENT)) for chunk in chunks]
    return {
        str(number): {name: value for name, value in state.items() if EXTRA_STATE not in name}
        for number, state in enumerate(states)
    }


def _load_chunks(chunks: Sequence[StudentModel], loaded: Mapping[str, Any]) -> None:
    for number, chunk in enumerate(chunks):
        extra_states = dict.fromkeys(name for name in chunk.state_dict() if EXTRA_STATE in name)
        # Of a student with adapters they alone are saved; ``restricted`` has found all that were asked for.
        chunk.load_state_dict({**extra_states, **loaded[str(number)]}, strict=not any(lora.all_factors([chunk])))


def write_hash_manifest(folder: Path, state: Mapping[str, Any], known: Mapping[str, str] | None = None) -> None:
    """Write ``state.json``, then ``manifest.json`` with the sha256 of every file, which completes the folder. ``known``
    hashes, by file name, are taken as given.

    Raises:
        WriteRefusedError: the system refuses, or a file that was written has been removed.
    """
    write_text(folder / STATE_FILE, json.dumps(state, indent=1, sort_keys=True))
    hashes = dict(known or {})
    with writing(folder):
        found = [name for name in files_below(folder) if name != MANIFEST_FILE]
        hashes |= {name: sha256_of(folder / name) for name in found if name not in hashes}
    for name in sorted(set(hashes) - set(found)):
        raise WriteRefusedError(f"{shown_path(folder / name)}: was removed before the checkpoint was whole")
    write_text(folder / MANIFEST_FILE, json.dumps({"sha256": hashes}, indent=1, sort_keys=True))


def is_complete(folder: Path) -> bool:
    """Return whether ``save`` reached its end in ``folder``."""
    return (folder / MANIFEST_FILE).is_file()


def verify(folder: Path) -> None:
    """Compare every file of ``folder`` with its manifest, without unpickling anything.

    Raises:
        UserError: incomplete checkpoint, or a file that is missing, changed or not in the manifest.
    """
    if not is_complete(folder):
        raise UserError(f"{folder}: no complete checkpoint ({MANIFEST_FILE} is missing): resume from another one")
    expected = read_hashes(folder / MANIFEST_FILE)
    found = [name for name in files_below(folder) if name != MANIFEST_FILE]
    for name in sorted(set(expected) ^ set(found)):
        problem = "missing" if name in expected else f"not listed in {MANIFEST_FILE}"
        raise UserError(f"{folder / name}: {problem}: restore the folder or resume from another checkpoint")
    for name in found:
        if sha256_of(folder / name) != expected[name]:
            raise UserError(f"{folder / name}: changed since it was saved (sha256): resume from another checkpoint")


def read_state(folder: Path) -> dict[str, Any]:
    """Return the ``state`` that was given to ``save``, with the saved ``layout``.

    Raises:
        UserError: the file is damaged, or the checkpoint is a conversion's, which holds weights alone.
    """
    state = read_json_object(folder / STATE_FILE, cure="resume from another checkpoint")
    for key, kind in (("weight_version", int), ("layout", dict), ("extra", dict)):
        if type(state.get(key)) is not kind:
            raise UserError(
                f"{shown_path(folder / STATE_FILE)}: has no {key!r}, so it is no checkpoint of a run: name a step "
                "folder of a run, or convert it and name the Hugging Face folder"
            )
    return state


def _sharded_state(
    chunks: Sequence[DistributedDataParallel], optimizer: ChainedOptimizer, averages: Averages, *, is_loading: bool
) -> tuple[dict[str, Any], set[int]]:
    """Return what is saved, as Megatron's sharded state dict, and the addresses of storages that nothing else uses.
    Random states are not part of it: nothing on a trainer rank draws from them."""
    sharded: dict[str, Any] = {"model": sharded_weights([chunk.module for chunk in chunks])}
    sharded["averages"] = averages.sharded(sharded["model"])
    gathered: set[int] = set()
    for part, _ in _parts(optimizer):
        _create_states(part)  # all of them before the first is gathered, whose addresses may come free
    for part, key in _parts(optimizer):
        if isinstance(part, DistributedOptimizer):
            part.get_parameter_state_dp_zero = partial(gather_states, part, gathered)
        sharded[key] = part.sharded_state_dict(sharded["model"], is_loading=is_loading, metadata=dict(CONTENT))
    return sharded, gathered


def _parts(optimizer: ChainedOptimizer) -> list[tuple[Any, str]]:
    """Return the optimizer's parts and their keys: with expert parallelism, experts' parameters are a second part."""
    keys = (_OPTIMIZER, _EXPERTS_OPTIMIZER)[: len(optimizer.chained_optimizers)]
    return list(zip(optimizer.chained_optimizers, keys, strict=True))


def _add_common_state(part: Any, loaded: dict[str, Any], main: Mapping[str, Any]) -> None:
    """Complete the experts' part from a checkpoint of a layout without expert parallelism. Such a checkpoint holds the
    part's tensors but not what is kept once per part: use the part's own parameter groups, at the main part's step."""
    inner, main_inner = (state.get("optimizer", state) for state in (loaded, main))
    if "param_groups" in inner:
        return
    own = part.state_dict()
    groups = copy.deepcopy(own.get("optimizer", own)["param_groups"])
    main_group = main_inner["param_groups"][0]
    if "step" in main_group:  # the plain optimizer keeps it as common_step, below
        for group in groups:
            group["step"] = main_group["step"]
    (loaded.setdefault("optimizer", {}) if "optimizer" in own else loaded)["param_groups"] = groups
    if "common_step" in main_inner.get("state", {}):
        inner.setdefault("state", {})["common_step"] = main_inner["state"]["common_step"]


def _count_as_here(part: Any, loaded: dict[str, Any]) -> None:
    """Put the count of steps where this machine's Adam looks for it: a checkpoint may come from a machine with another
    one. torch's AdamW counts by parameter (Megatron: once for all, or with a distributed optimizer by group), the fused
    ones of TransformerEngine and apex by group, in whole numbers."""
    inner = loaded.get("optimizer", loaded)
    groups, states = inner["param_groups"], inner.get("state", {})
    count = float(states.pop("common_step", groups[0].get("step", 0)))
    is_fused = not isinstance(part.optimizer, torch.optim.AdamW)
    for group in groups:
        group.pop("step", None)
        if is_fused or isinstance(part, DistributedOptimizer):
            group["step"] = int(count) if is_fused else count
    if not is_fused and not isinstance(part, DistributedOptimizer) and count:
        states["common_step"] = torch.tensor(count)


def _create_states(part: Any) -> None:
    """Create the optimizer states, so that they can be sharded. torch's AdamW also needs a step per parameter, which
    Megatron's initialiser (written for fused Adam) does not create."""
    part.init_state_fn(part.optimizer, part.config)
    if isinstance(part.optimizer, torch.optim.AdamW):
        for states in part.optimizer.state.values():
            states.setdefault("step", torch.tensor(0.0))


@contextmanager
def _without_steps(optimizer: ChainedOptimizer) -> Iterator[None]:
    """Work around three faults of Megatron 0.16.1 with torch's AdamW. It fills every state of a parameter, ``step``
    included, from tensors that have none, so ``step`` is removed meanwhile. It gives all parameters one ``step``
    tensor, which each would then increment, so each gets its own. The third is in ``_create_states``."""
    states = [state for part, _ in _parts(optimizer) for state in part.optimizer.state.values()]
    steps = [{"step": own.pop("step").clone()} if "step" in own else {} for own in states]
    yield
    for own, step in zip(states, steps, strict=True):
        own.update(step)
    for part, _ in _parts(optimizer):
        _create_states(part)


_FORMAT = CheckpointingConfig("torch_dist", 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """The part of a sharded state dict that this rank is about to write."""

    tensors: dict[str, Any]
    """torch's sharded tensors and objects by key, of which this rank writes a part."""
    common: bytes
    """Serialised values that are stored once; empty on all ranks but 0."""
    is_copied: bool
    """Whether the tensors are copies in host memory that nothing else uses."""


def _make_ready(sharded: dict[str, Any], layout: Layout, *, gathered: Set[int] | None = None) -> Ready:
    """Check a sharded state dict and choose what this rank writes of it. Collective.

    With ``gathered`` (addresses of storages that nothing else uses) all other tensors are copied into host memory,
    pinned with CUDA, and the owner may change its own afterwards. Without, ``Ready`` holds the owner's own tensors.
    """
    sharded_part, common = save_preprocess({**sharded, "content_metadata": dict(CONTENT)}, True)
    by_key, _, _ = torch_dist._replace_state_dict_keys_with_sharded_keys(sharded_part, True)
    if gathered is not None:
        _copy_tensors(by_key, gathered)
        if layout.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
    once = io.BytesIO()
    if layout.rank == 0:
        torch.save(common, once)
    tensors = torch_dist.mcore_to_pyt_state_dict(by_key, False)
    return Ready(tensors=tensors, common=once.getvalue(), is_copied=gathered is not None)


@torch.no_grad()
def _copy_tensors(by_key: Mapping[str, list[Any]], gathered: Set[int]) -> None:
    for shard in (shard for shards in by_key.values() for shard in shards if isinstance(shard, ShardedTensor)):
        tensor = shard.data
        if tensor is not None and tensor.untyped_storage().data_ptr() not in gathered:
            shard.data = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            shard.data.copy_(tensor, non_blocking=True)


def _write_sharded(folder: Path, ready: Ready, layout: Layout) -> dict[str, str]:
    """Write into the empty ``folder`` and return the sha256 of all ranks' tensor files by name, each hashed by the rank
    that wrote it. Collective, over ``layout.control_group`` alone.

    Raises:
        WriteRefusedError: on every rank, when one of them cannot write.
    """
    raise_together(layout, lambda: _save_common(ready.common, folder / COMMON_STATE_FNAME))
    writer = _Writer(folder, from_host=ready.is_copied)
    try:
        torch_save(
            ready.tensors,
            storage_writer=writer,
            planner=torch_dist.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
            process_group=layout.control_group,
        )
    except CheckpointException as error:  # on every rank, with the errors of all
        refused = refusal(error)
        if refused is None:
            raise
        raise refused from error
    raise_together(layout, lambda: _save_format(folder))
    hashes: list[dict[str, str]] = [{} for _ in range(dist.get_world_size(layout.control_group))]
    dist.all_gather_object(hashes, writer.hashes, group=layout.control_group)
    return {name: digest for own in hashes for name, digest in own.items()}


def _save_common(common: bytes, path: Path) -> None:
    """Write ``common.pt``. Called on rank 0."""
    with writing(path):
        path.write_bytes(common)
        sync(path)


def _save_format(folder: Path) -> None:
    with writing(folder):
        save_config(_FORMAT, str(folder))
        sync(folder / CONFIG_FNAME)


class _Files(FileSystem):
    """torch's file system with errors that name the file and the system's reason."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with writing(Path(path)), Path(path).open(mode) as file, reasoned(cast(Any, file)) as stream:
            yield stream

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Do nothing: rank 0 has made the folder. A new one, were it gone, would lack the files written so far."""

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        with writing(Path(new_path)):
            super().rename(path, new_path)


class _Writer(FileSystemWriter):
    """torch's writer that also keeps the sha256 of the files that this rank has written, by name."""

    def __init__(self, folder: Path, *, from_host: bool) -> None:
        super().__init__(folder, thread_count=1)
        if from_host:  # torch's look-ahead copies would wait for the stream of the training steps
            self.per_thread_copy_ahead = 0
        self.fs = _Files()
        self.hashes: dict[str, str] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        written = super().write_data(plan, planner)
        names = {result.storage_data.relative_path for result in written.wait()}
        # Hashed here and not after torch's ``save``, which collects errors of this method and raises them on all ranks.
        for path in (Path(self.path) / name for name in names):
            with writing(path):
                self.hashes[path.name] = sha256_of(path)
        return written
