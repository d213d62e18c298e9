"""The output matrix of a Hugging Face folder, which makes logits of a model's last hidden states."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from mopd.base.types import UserError
from mopd.conversion.hf.reader import HfReader, named_as_in, require_finite
from mopd.conversion.models import families
from mopd.conversion.models.reading import read_dims


class OutputHead:
    """Reader of rows of the output matrix, [V, H], or of the embedding where the two are tied.

    ``logits = hidden @ rows.T`` is all that the supported families compute after their final norm: none has a bias, a
    scale or a soft cap there.
    """

    def __init__(self, folder: Path) -> None:
        """Open the folder. No weight is read; weights other than the matrix may be quantised.

        Raises:
            UserError: a family without a name table, or a matrix that is missing, has a bias, is quantised, or has
                another shape than the config says.
        """
        config, self._reader = read_dims(folder, takes_quantised=True), HfReader(folder)
        dims = named_as_in(self._reader, config)
        head, embedding = families.vocabulary_names(dims)
        self._name = embedding if dims.tied_embeddings else head
        self.vocab_size, self.hidden_size = dims.vocab_size, dims.hidden_size
        self._reader.require_shape(self._name, (dims.vocab_size, dims.hidden_size))
        dtype, bias = self._reader.dtype(self._name), head.removesuffix("weight") + "bias"
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise UserError(f"{folder}: tensor '{self._name}' is quantised ({dtype}); its rows alone make no logits")
        if bias in self._reader.names:
            raise UserError(f"{folder}: tensor '{bias}' adds to the logits, which the hidden states do not hold")

    def rows(self, start: int, stop: int) -> Tensor:
        """Return rows ``start`` to ``stop``, as far as there are any, in the dtype of the file: a view of the file.

        Raises:
            UserError: some value is NaN or infinite.
        """
        stop = min(stop, self.vocab_size)
        return require_finite(self._name, self._reader.read_slice(self._name, 0, start, stop), self._reader.folder)


def open_teacher_head(name: str, folder: str, *, vocab_size: int) -> OutputHead:
    """Return the output matrix of teacher ``name`` for ``payload: hidden``.

    Raises:
        UserError: the matrix cannot be read, or its rows are not the student's ``vocab_size`` ids.
    """
    key, cure = f"teachers.{name}.payload is 'hidden'", "choose another teacher, or payload: topk and a top-k loss"
    try:
        head = OutputHead(Path(folder))
    except UserError as error:
        raise UserError(f"{key}, but its output matrix cannot be used: {error}: {cure}") from error
    if head.vocab_size != vocab_size:
        raise UserError(
            f"{key}, but teachers.{name}.model {folder} has logits of {head.vocab_size} ids and student.model of "
            f"{vocab_size}: {cure}"
        )
    return head
