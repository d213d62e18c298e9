"""A checkpoint of either format as Hugging Face tensors, read one parameter at a time: what verify and inspect see."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from mopd.conversion.hf.reader import HfReader
from mopd.conversion.jobs.streaming import read_row, side_files_of
from mopd.conversion.mapped import as_bytes
from mopd.conversion.models import families
from mopd.conversion.models.dims import ModelDims, read_dims
from mopd.conversion.models.families import Placed
from mopd.conversion.torch_dist.reader import FORMAT_FILE, TorchDistReader
from mopd.conversion.torch_dist.sharded import sharded_key
from mopd.types import UserError


@dataclass(frozen=True, eq=False)
class Contents:
    """One opened checkpoint."""

    folder: Path
    origin: Path
    """Folder of its config and tokenizer."""
    dims: ModelDims
    reader: HfReader | TorchDistReader

    @property
    def is_megatron(self) -> bool:
        """A distributed checkpoint, not a Hugging Face folder."""
        return isinstance(self.reader, TorchDistReader)

    def rows(self) -> list[Placed]:
        """Its parameters, as the config has them."""
        return list(families.all_params(self.dims))

    def read(self, row: Placed) -> Iterator[tuple[str, Tensor]]:
        """The tensors of one parameter.

        Raises:
            UserError: one is missing, has another shape or is corrupt.
        """
        if isinstance(self.reader, TorchDistReader):
            yield from zip(row.hf_names, read_row(self.reader, row, self.dims), strict=True)
            return
        for name, shape in zip(row.hf_names, row.hf_shapes, strict=True):
            self.reader.require_shape(name, shape)
            yield name, self.reader.read(name)

    def unexpected(self) -> list[str]:
        """Names of weights that the config has no place for. Optimizer states are not weights."""
        if isinstance(self.reader, TorchDistReader):
            known = {sharded_key(row, self.dims).key for row in self.rows()}
            found = {key for key in self.reader.keys if key.startswith(("decoder.", "embedding.", "output_layer."))}
            return sorted(found - known)
        known = set(families.hf_tensors(self.dims))
        if self.dims.tied_embeddings:
            known.add(families.LM_HEAD.hf[0].name)
        return sorted(name for name in self.reader.names - known if not families.IGNORED.fullmatch(name))


def open_checkpoint(folder: Path, *, allow_pickle: bool = False) -> Contents:
    """Open a Hugging Face folder or a distributed checkpoint, whichever it is.

    Raises:
        UserError: it is neither, or unsound.
    """
    if (folder / FORMAT_FILE).is_file():
        reader = TorchDistReader(folder, allow_pickle=allow_pickle)
        origin = side_files_of(folder, None)
        return Contents(folder, origin, read_dims(origin), reader)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give a Hugging Face folder or a distributed checkpoint")
    return Contents(folder, folder, read_dims(folder), HfReader(folder, allow_pickle=allow_pickle))


def fingerprint(tensor: Tensor) -> dict[str, Any]:
    """Dtype, shape and SHA-256 of one tensor."""
    digest = hashlib.sha256(as_bytes(tensor.contiguous())).hexdigest()
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "sha256": digest}
