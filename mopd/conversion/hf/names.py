"""Does a Hugging Face checkpoint hold the tensors that its config asks for, and no others?"""

from __future__ import annotations

import torch

from mopd.conversion.hf.reader import HfReader
from mopd.conversion.models import families
from mopd.conversion.models.dims import CONFIG_FILE, ModelDims
from mopd.types import UserError

_BLOCK_ROWS = 4096
"""Rows compared at a time."""


def check_names(reader: HfReader, dims: ModelDims) -> None:
    """Refuses a checkpoint that lacks a tensor, has one more than the family's table knows, or one of another shape.
    A tied checkpoint may repeat the embedding as its head; a different head would be lost, so it is refused.

    Raises:
        UserError: names the folder and the first such tensor.
    """
    expected: dict[str, tuple[int, ...]] = {}
    for placed in families.all_params(dims):  # ends at the first that is missing, however many the config asks for
        for name, shape in zip(placed.hf_names, placed.hf_shapes, strict=True):
            reader.require_shape(name, shape)
            expected[name] = shape
    extra = {name for name in reader.names - expected.keys() if not families.IGNORED.fullmatch(name)}
    (head,), (embedding,) = families.LM_HEAD.hf, families.EMBEDDING.hf
    if dims.tied_embeddings and head.name in extra:
        extra.discard(head.name)
        reader.require_shape(head.name, expected[embedding.name])
        one, other = reader.read(head.name), reader.read(embedding.name)
        if not all(torch.equal(a, b) for a, b in zip(one.split(_BLOCK_ROWS), other.split(_BLOCK_ROWS), strict=True)):
            raise UserError(
                f"{reader.folder / CONFIG_FILE}: 'tie_word_embeddings' is true but tensor '{head.name}' differs from "
                f"'{embedding.name}'; set it to false or fix the weights"
            )
    if extra:
        raise UserError(
            f"{reader.folder}: tensor '{min(extra)}' has no place in model_type {dims.family}"
            f"{f' (and {len(extra) - 1} more)' if len(extra) > 1 else ''}; use a checkpoint of the plain architecture"
        )
