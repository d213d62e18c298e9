"""Writing Megatron's distributed format from the ranks themselves, so that a refused write is one line with its file.

Megatron's own writer starts a manager process and forks per file: seconds per save on a small machine, and processes
that outlive a killed rank. It and torch also replace the system's error by one without a reason.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as torch_save

from mopd.files.writing import reasoned, refusal, writing
from mopd.student.parallel import Layout, raise_together

_FORMAT = CheckpointingConfig("torch_dist", 1)


def write_sharded(folder: Path, sharded: dict[str, Any], layout: Layout, *, content: Mapping[str, Any]) -> None:
    """Write a sharded state dict into the empty ``folder``; ``content`` describes it to readers. Collective.

    Raises:
        WriteRefusedError: on every rank, when one of them cannot write.
    """
    sharded_part, common = save_preprocess({**sharded, "content_metadata": dict(content)}, True)
    raise_together(layout, lambda: _save_common(common, folder / COMMON_STATE_FNAME))
    by_key, _, _ = torch_dist._replace_state_dict_keys_with_sharded_keys(sharded_part, True)
    try:
        torch_save(
            torch_dist.mcore_to_pyt_state_dict(by_key, False),
            storage_writer=_Writer(folder, thread_count=1),
            planner=torch_dist.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
            process_group=layout.control_group,
        )
    except CheckpointException as error:  # on every rank, with the errors of all
        refused = refusal(error)
        if refused is None:
            raise
        raise refused from error
    raise_together(layout, lambda: _save_format(folder))


def _save_common(common: Mapping[str, Any], path: Path) -> None:
    """What is kept once, by rank 0."""
    with writing(path), path.open("wb") as file, reasoned(file) as stream:
        torch.save(common, stream)


def _save_format(folder: Path) -> None:
    with writing(folder):
        save_config(_FORMAT, str(folder))


class _Files(FileSystem):
    """torch's file system with errors that name the file and the system's reason."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with writing(Path(path)), Path(path).open(mode) as file, reasoned(cast(Any, file)) as stream:
            yield stream


class _Writer(FileSystemWriter):
    def __init__(self, folder: Path, *, thread_count: int) -> None:
        super().__init__(folder, thread_count=thread_count)
        self.fs = _Files()
