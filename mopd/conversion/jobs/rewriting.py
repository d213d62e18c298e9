"""Hugging Face folders made of Hugging Face folders, tensor by tensor: models combined, a LoRA adapter merged into its
base model, or the vocabulary resized.

Average (Wortsman et al. 2022, "model soups"): ``sum_i w_i x_i`` with ``sum_i w_i = 1``. Task arithmetic (Ilharco et al.
2023): ``base + sum_i w_i (x_i - base)``. LoRA (Hu et al. 2021), as the PEFT library saves it: ``W + s B A`` with A [r,
in], B [out, r] and ``s = lora_alpha / r`` (``/ sqrt(r)`` with ``use_rslora``); anything else in an adapter is refused
by name, never dropped. Sums are taken in fp32 (fp64 for fp64 weights, and by LoRA) and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mopd.base.files.reading import shown_path
from mopd.base.types import UserError
from mopd.conversion.adapters import Adapter, peft_names, read_any_adapter
from mopd.conversion.hf.reader import (
    HfReader,
    check_names,
    identity,
    named_as_in,
    open_model,
    read_tokenizer_json,
)
from mopd.conversion.hf.writer import Group, hf_job
from mopd.conversion.job import MAX_FILE_BYTES, Job, sha256_of
from mopd.conversion.models import families
from mopd.conversion.models.adapted import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from mopd.conversion.models.config_keys import CONFIG_FILE, read_config
from mopd.conversion.models.dims import ModelDims
from mopd.conversion.models.mapping import merged, pad_rows
from mopd.conversion.models.reading import dims_from_config, read_dims
from mopd.conversion.models.towers import named_as_read

_BLOCK_ELEMENTS = 2**24
"""Number of elements that are widened at a time."""


def rewritten(
    command: str,
    reader: HfReader,
    target: Path,
    read: Callable[[str], Tensor],
    *,
    max_file_bytes: int,
    options: Mapping[str, Any] | None = None,
    made_from: Mapping[str, Any] | None = None,
    names: Mapping[str, str] | None = None,
    rows: Mapping[str, int] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Job:
    """Return the job of writing a folder's tensors anew, in their dtypes, beside copies of its other files.

    Args:
        read: makes a tensor, by the name that it has in ``reader``.
        options: the command's options, for the description.
        made_from: identity of the inputs, if ``reader`` is not the only one.
        names: new name -> old name; None keeps all.
        rows: new sizes of dimension 0, by old name.
        config: replaces ``config.json``.
    """

    def group(new: str, old: str) -> Group:
        shape = reader.shape(old)
        if rows is not None and old in rows:
            shape = (rows[old], *shape[1:])
        return Group((new,), (shape,), (reader.dtype(old),), lambda: [read(old)])

    description = {
        "command": command,
        "options": {**(options or {}), "max_file_bytes": max_file_bytes},
        "source": identity(reader.files, reader.folder),
        **(made_from or {}),
    }
    chosen = names if names is not None else {name: name for name in sorted(reader.names)}
    return hf_job(
        target, [group(new, old) for new, old in chosen.items()],
        side_files=reader.folder, description=description, config=config, max_file_bytes=max_file_bytes,
    )  # fmt: skip


def merge(
    models: Sequence[Path],
    target: Path,
    *,
    weights: Sequence[float] | None = None,
    base: Path | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> Job:
    """Return the job of combining Hugging Face folders; config and tokenizer are those of ``base``, else of the first
    model.

    Args:
        weights: one per model; None gives each ``1 / len(models)``.
        base: if given, task arithmetic on it.

    Raises:
        UserError: the models differ in architecture, names, shapes, dtypes or vocabulary; or the weights do not fit.
    """
    chosen = list(weights) if weights is not None else [1 / len(models)] * len(models)
    if len(chosen) != len(models):
        raise UserError(f"--weights has {len(chosen)} values for {len(models)} models: give one per model")
    if not all(math.isfinite(weight) for weight in chosen):
        raise UserError(f"--weights {chosen}: every one must be a finite number")
    if base is None and abs(sum(chosen) - 1) > 1e-6:
        raise UserError(f"--weights sum to {sum(chosen):g}: an average needs 1, task arithmetic needs --base")
    readers = [HfReader(folder) for folder in [*([base] if base is not None else []), *models]]
    _require_alike(readers)
    factors = chosen if base is None else [1 - sum(chosen), *chosen]
    return rewritten(
        "merge", readers[0], target, lambda name: _combine(name, readers, factors),
        options={"weights": chosen, "has_base": base is not None},
        made_from={"source": [identity(reader.files, reader.folder) for reader in readers]},
        max_file_bytes=max_file_bytes,
    )  # fmt: skip


def pad(source: Path, target: Path, *, multiple: int, max_file_bytes: int = MAX_FILE_BYTES) -> Job:
    """Return the job of adding zero rows to embedding and LM head until their number is a multiple of ``multiple``.

    A padded token has logit 0; engines that do not mask it give it some probability.

    Raises:
        UserError: ``multiple`` is less than 1, or the folder is unsound.
    """
    if multiple < 1:
        raise UserError(f"--multiple is {multiple}: set 1 or more")
    reader, dims = open_model(source)
    rows = -(-dims.vocab_size // multiple) * multiple
    options = {"multiple": multiple}
    return _resized(reader, dims, target, rows, lambda tensor: pad_rows(tensor, rows), options, max_file_bytes)


def unpad(source: Path, target: Path, *, vocab_size: int, max_file_bytes: int = MAX_FILE_BYTES) -> Job:
    """Return the job of keeping the first ``vocab_size`` rows of embedding and LM head.

    Raises:
        UserError: there are fewer rows, or a row that would be lost is not zero.
    """
    reader, dims = open_model(source)
    if not 1 <= vocab_size <= dims.vocab_size:
        raise UserError(f"--vocab-size is {vocab_size}: set 1 to {dims.vocab_size}, the rows of {source}")

    def cut(tensor: Tensor) -> Tensor:
        if tensor[vocab_size:].any():
            raise UserError(
                f"{source}: rows from {vocab_size} on are not zero, so they are no padding: set a larger --vocab-size"
            )
        return tensor[:vocab_size]

    return _resized(reader, dims, target, vocab_size, cut, {"vocab_size": vocab_size}, max_file_bytes)


def extract_head(source: Path, target: Path, *, max_file_bytes: int = MAX_FILE_BYTES) -> Job:
    """Return the job of writing ``lm_head.weight`` [V, H] (the embedding if they are tied) with config and tokenizer.

    Raises:
        UserError: the folder is unsound.
    """
    reader, dims = open_model(source)
    head, embedding = families.vocabulary_names(dims)
    names = {head: embedding if dims.tied_embeddings else head}
    return rewritten("extract-head", reader, target, reader.read_finite, names=names, max_file_bytes=max_file_bytes)


def _resized(
    reader: HfReader,
    dims: ModelDims,
    target: Path,
    rows: int,
    change: Callable[[Tensor], Tensor],
    options: Mapping[str, int],
    max_file_bytes: int,
) -> Job:
    vocabulary = families.vocabulary_names(dims)
    config = read_config(reader.folder)
    text = config["text_config"] if dims.vision is not None and "text_config" in config else config
    text["vocab_size"] = rows
    dims_from_config(config, reader.folder / CONFIG_FILE)  # refuses to cut off the ids of vision

    def read(name: str) -> Tensor:
        tensor = reader.read_finite(name)
        return change(tensor) if name in vocabulary else tensor

    return rewritten(
        "resize-vocab", reader, target, read,
        options=options, rows=dict.fromkeys(vocabulary, rows), config=config, max_file_bytes=max_file_bytes,
    )  # fmt: skip


def _combine(name: str, readers: Sequence[HfReader], factors: Sequence[float]) -> Tensor:
    """Return the weighted sum of one tensor over all models, in the dtype of the first."""
    sources = [reader.read_finite(name) for reader in readers]
    first = sources[0]
    if not first.is_floating_point():
        for reader, other in zip(readers, sources, strict=True):
            if not torch.equal(first, other):
                raise UserError(f"{reader.folder}: tensor '{name}' of {first.dtype} differs between the models")
        return first
    wide = torch.float64 if first.dtype == torch.float64 else torch.float32
    result = torch.empty_like(first)
    flat = [source.reshape(-1).split(_BLOCK_ELEMENTS) for source in sources]
    for out, *blocks in zip(result.view(-1).split(_BLOCK_ELEMENTS), *flat, strict=True):
        total = torch.zeros(out.shape, dtype=wide)
        for block, factor in zip(blocks, factors, strict=True):
            total.add_(block.to(wide), alpha=factor)
        out.copy_(total)
    return result


def _require_alike(readers: Sequence[HfReader]) -> None:
    """Raise ``UserError`` unless all folders have one architecture, the same tensors and the same vocabulary."""
    first, *others = readers
    dims = named_as_in(first, read_dims(first.folder))
    check_names(first, dims)
    vocabulary = _vocabulary(first.folder)
    for other in others:
        if named_as_in(other, read_dims(other.folder)) != dims:
            raise UserError(
                f"{other.folder / CONFIG_FILE}: another architecture than {first.folder}, or other names of tensors: "
                "merge like models"
            )
        if alone := first.names ^ other.names:
            holder = first if min(alone) in first.names else other
            raise UserError(f"{holder.folder}: tensor '{min(alone)}' is in this model alone: merge like models")
        for name in sorted(first.names):
            if (first.shape(name), first.dtype(name)) != (other.shape(name), other.dtype(name)):
                raise UserError(
                    f"{other.folder}: tensor '{name}' is {other.dtype(name)} {list(other.shape(name))}, in "
                    f"{first.folder} {first.dtype(name)} {list(first.shape(name))}: merge like models"
                )
        if _vocabulary(other.folder) != vocabulary:
            raise UserError(f"{other.folder}: another vocabulary than {first.folder}: token ids would mean other text")


def _vocabulary(folder: Path) -> Any:
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    model = read_tokenizer_json(path).get("model")
    if not isinstance(model, dict) or "vocab" not in model:
        raise UserError(f"{shown_path(path)}: has no 'model.vocab'; fetch the file again")
    return model["vocab"]


def merge_lora(source: Path, adapter: Path, target: Path, *, max_file_bytes: int = MAX_FILE_BYTES) -> Job:
    """Return the job of writing the base model ``source`` with the adapter folder merged into it, in the base's dtypes.

    Raises:
        UserError: an adapter of another kind, for another model, or with a part that cannot be merged.
    """
    reader, dims = open_model(source)
    given = read_any_adapter(adapter)
    given.check_base(reader, lambda name: named_as_read(name, dims))
    modules = {named_as_read(f"{module}.weight", dims): module for module in (*given.modules, *given.replaced)}
    made_from = {"adapter": [sha256_of(adapter / name) for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)]}
    return rewritten(
        "merge-lora", reader, target, lambda name: _merged(reader.read_finite(name), given, modules.get(name)),
        made_from=made_from, max_file_bytes=max_file_bytes,
    )  # fmt: skip


def _merged(weight: Tensor, adapter: Adapter, module: str | None) -> Tensor:
    if module is None:
        return weight
    if module in adapter.replaced:
        return adapter.read(adapter.replaced[module]).to(weight.dtype)
    a, b = (adapter.read(name) for name in peft_names(module))
    return merged(weight, a, b, adapter.scales[module])
