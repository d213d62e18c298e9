"""Output matrices of teachers that send hidden states: this rank's rows of each, and the logits that they make.

The ranks of the last pipeline stage hold them beside the student's own head, cut to the same ids. They are frozen and
in no checkpoint: every start reads them from the teachers' folders.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mopd.config.schema import Recipe
from mopd.conversion.hf.head import open_teacher_head
from mopd.conversion.models.dims import ModelDims
from mopd.losses.call import accumulation_dtype
from mopd.losses.linear.head import matmul_into
from mopd.student.attention import to_device
from mopd.student.batch import HostRows
from mopd.student.parallel import Layout

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class TeacherHeads:
    """This rank's rows of the teachers' output matrices. R rows of logits, V columns of this rank."""

    def __init__(self, weights: Sequence[Tensor], teachers: Sequence[int]) -> None:
        """``weights``: [V, H] of each teacher, H its own hidden size; ``teachers``: number of each domain's teacher."""
        self._weights, self._teachers = [*weights], np.array(teachers)

    @classmethod
    def load(cls, recipe: Recipe, dims: ModelDims, layout: Layout, domains: Sequence[str]) -> TeacherHeads:
        """Read this rank's rows in the student's dtype; rows of the padded vocabulary are zero. ``dims`` are the
        student's.

        Raises:
            UserError: a matrix cannot be read, has values that are not finite, or is not of the student's ids.
        """
        names, weights = [*recipe.teachers], []
        columns = dims.padded_vocab_size(layout.tp_size) // layout.tp_size
        for name in names:
            head = open_teacher_head(name, recipe.teachers[name].model, vocab_size=dims.vocab_size)
            rows = head.rows(layout.tp_rank * columns, (layout.tp_rank + 1) * columns)
            weight = torch.zeros(columns, head.hidden_size, dtype=DTYPES[recipe.student.dtype], device=layout.device)
            weight[: len(rows)].copy_(rows)
            weights.append(weight)
        return cls(weights, [names.index(recipe.assignment.teachers_of(domain)[0]) for domain in domains])

    def row_bytes(self) -> int:
        """Return the bytes of one row of logits, and where there are several teachers of its copy on the way."""
        copies = 1 if len(self._weights) == 1 else 2
        return copies * self._weights[0].size(0) * accumulation_dtype(self._weights[0]).itemsize

    def logits(self, hidden: Tensor, domains: HostRows) -> Tensor:
        """Return the teachers' logits [R, V], fp32 (float64 of float64 heads) and never rounded to less.

        Args:
            hidden: [R, W] states of each row's teacher, of which the first H count.
            domains: [R] number of each row's domain.
        """
        first, teachers = self._weights[0], self._teachers[domains]
        out = hidden.new_empty(len(hidden), first.size(0), dtype=accumulation_dtype(first))
        asked = np.unique(teachers)
        for number in asked:
            weight, rows = self._weights[number], None
            if len(asked) > 1:
                rows = to_device(torch.from_numpy(np.flatnonzero(teachers == number)), out.device)
            own = hidden[:, : weight.size(1)] if rows is None else hidden[rows, : weight.size(1)]
            part = out if rows is None else out.new_empty(len(own), out.size(1))
            matmul_into(part, own.to(weight.dtype), weight.t(), accumulate=False)
            if rows is not None:
                out.index_copy_(0, rows, part)
        return out
