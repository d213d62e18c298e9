"""Megatron's loader of distributed checkpoints, with restricted readers for every pickle.

Megatron itself unpickles ``.metadata`` and each object of a checkpoint without limits, so the author of a folder could
run code here; ``manifest.json`` does not help, since it stands in the same folder. Here ``.metadata`` is read by
``conversion.torch_dist.description``, ``common.pt`` by ``conversion.torch_dist.pickled``, and no object at all.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME, TorchCommonLoadStrategy
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from mopd.base.files.reading import open_regular, shown_path
from mopd.base.types import UserError
from mopd.conversion.torch_dist.description import read_description
from mopd.conversion.torch_dist.pickled import DAMAGE, load_plain, reason_of
from mopd.conversion.torch_dist.reader import METADATA_FILE, require_format

_CURE = "restore the folder or name another checkpoint"


def load(sharded: dict[str, Any], folder: Path, *, is_part: bool = False) -> dict[str, Any]:
    """Run ``dist_checkpointing.load`` on an untrusted folder. Collective.

    With ``is_part`` ranks may ask for pieces that together make up no whole tensor.

    Raises:
        UserError: on every rank, if the folder is damaged, belongs to another model, or holds anything but tensors,
            plain values and their description.
    """
    require_format(folder)
    description = read_description(folder / METADATA_FILE)  # not inside torch's loader, which logs a stack of its own
    try:
        loaded: dict[str, Any] = dist_checkpointing.load(
            sharded,
            str(folder),
            sharded_strategy=_Tensors(description),
            common_strategy=_Common(),
            validate_access_integrity=not is_part,
        )
    except CheckpointException as error:  # holds the other ranks' errors too; derives from BaseException
        causes = [cause for cause, _ in error.failures.values()]
        refusal = next((cause for cause in causes if isinstance(cause, UserError)), None)
        if refusal is not None:
            raise UserError(str(refusal)) from error
        raise UserError(f"{shown_path(folder)}: cannot be loaded ({reason_of(causes[0])}): {_CURE}") from error
    except CheckpointingException as error:
        raise UserError(f"{shown_path(folder)}: cannot be loaded ({reason_of(error)}): {_CURE}") from error
    return loaded


class _Common(TorchCommonLoadStrategy):
    """Loader of ``common.pt``, the values that are stored once and not sharded."""

    def load_common(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        """Return the values by name. Raise ``UserError`` if the file holds anything else."""
        path = Path(checkpoint_dir) / COMMON_STATE_FNAME
        with open_regular(path, cure=_CURE) as stream:
            try:
                common = load_plain(stream)
            except DAMAGE as error:
                raise _damaged(path, error) from error
        if not isinstance(common, dict):
            raise UserError(f"{shown_path(path)}: holds a {type(common).__name__}, not values by name: {_CURE}")
        return common


class _Tensors(torch_dist.TorchDistLoadShardedStrategy):
    """Loader of tensors. ``load`` follows Megatron's method, with another reader and another planner."""

    def __init__(self, description: Metadata) -> None:
        super().__init__()
        self._description = description

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        tensors = [value for value in nested_values(sharded_state_dict) if isinstance(value, ShardedTensor)]
        by_key, flat_mapping, rename_mapping = torch_dist._replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        targets = torch_dist.mcore_to_pyt_state_dict(by_key, True)
        planner = _Planner(
            shapes_validation_sharded_tensors=[tensor for tensor in tensors if not tensor.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors={t.key: t for t in tensors if t.allow_shape_mismatch},
        )
        reader = _CheckedReader(checkpoint_dir)
        reader.description = self._description
        _load_state_dict(targets, reader, planner=planner)  # torch's public ``load`` wants equal keys on all ranks
        loaded = {key: torch_dist._unwrap_pyt_sharded_tensor(value) for key, value in targets.items()}
        loaded = torch_dist._replace_sharded_keys_with_state_dict_keys(loaded, flat_mapping, rename_mapping)
        torch_dist._restore_dict_types(loaded, sharded_state_dict)
        return loaded


class _CheckedReader(FileSystemReader):
    """Reader that opens files of the folder alone (``read_description`` has checked their names), with
    ``weights_only``."""

    description: Metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.description


class _Planner(torch_dist.MCoreLoadPlanner):
    """Load planner of tensors alone: a student asks for no objects, which the superclass would unpickle."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise TypeError(f"an object is asked for: {read_item.dest_index.fqn}")


def _damaged(path: Path, error: BaseException) -> UserError:
    return UserError(f"{shown_path(path)}: cannot be read as plain values ({reason_of(error)}): {_CURE}")
