"""Writer of Megatron's distributed format that runs in the ranks themselves and names the file of a refused write.

Megatron's own writer starts a manager process and forks per file: seconds per save on a small machine, and processes
that outlive a killed rank. Megatron and torch also replace the system's error by one without a reason.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as torch_save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future as TorchFuture

from mopd.base.files.writing import reasoned, refusal, sync, writing
from mopd.conversion.job import sha256_of
from mopd.student.parallel import Layout, raise_together

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


def make_ready(
    sharded: dict[str, Any], layout: Layout, *, content: Mapping[str, Any], gathered: Set[int] | None = None
) -> Ready:
    """Check a sharded state dict and choose what this rank writes of it; ``content`` describes it to readers.
    Collective.

    With ``gathered`` (addresses of storages that nothing else uses) all other tensors are copied into host memory,
    pinned with CUDA, and the owner may change its own afterwards. Without, ``Ready`` holds the owner's own tensors.
    """
    sharded_part, common = save_preprocess({**sharded, "content_metadata": dict(content)}, True)
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


def write_sharded(folder: Path, ready: Ready, layout: Layout) -> dict[str, str]:
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
