"""One call of a public function: this rank's share of the vocabulary, the options, and the rows.

Everything below the public functions takes the logits and a ``LossCall``. Shape legend: T rows (all leading dims of the
logits together), V columns of this rank, N ids of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mopd.losses import checks

MOST_IDS = 4096
"""Largest number of ids of one row, all teachers together, in the Triton layer, where one program sorts a row's ids."""
MOST_PAIRS = 1 << 16
"""Largest number of ids of one row times teachers: a program holds a number for each in its registers."""


@dataclass(frozen=True)
class VocabShard:
    """Mapping from the columns of this rank's logits to ids."""

    start: int
    """Id of column 0."""
    num_columns: int
    """Number of columns that are true ids; the rest is padding."""
    vocab_size: int
    """Number of true ids of all ranks together."""
    rank: int
    world_size: int
    group: dist.ProcessGroup | None

    def localize(self, ids_TN: Tensor) -> tuple[Tensor, Tensor]:
        """Return (column, owned) of global ids; the column of an id that this rank does not own is 0."""
        column = ids_TN - self.start
        owned = (column >= 0) & (column < self.num_columns)
        return torch.where(owned, column, 0), owned


@dataclass(frozen=True)
class LossCall:
    """Everything that a function of the package needs beside the logits, after the checks."""

    rows: tuple[int, ...]
    """Leading dims of the logits."""
    shard: VocabShard
    layer: str
    """The layer that serves this call: reference, chunked or triton."""
    dtype: torch.dtype
    """Dtype of losses and metrics."""
    weight_T: Tensor | None
    temperature: float = 1.0
    backend: str = "auto"
    """The layer that was asked for."""
    overwrite_input: bool = False
    check_values: bool = False

    @cached_property
    def active_T(self) -> Tensor | None:
        """Rows whose weight is not 0; None means all. Computed on demand: the Triton layer reads the weights itself."""
        return None if self.weight_T is None else self.weight_T != 0

    def on_triton(self, num_ids: int, teachers: int = 1) -> bool:
        """Return whether the Triton layer serves a call with ``num_ids`` ids a row, of all ``teachers`` together.

        Raise ValueError if it was named and does not.
        """
        if self.layer != "triton":
            return False
        most = min(MOST_IDS, MOST_PAIRS // teachers)
        if num_ids > most and self.backend == "triton":
            raise ValueError(
                f"backend is 'triton' and a row holds {num_ids} ids of {teachers} teachers: at most {most} ids fit, "
                "set 'chunked' or 'auto'"
            )
        return num_ids <= most

    def flat(self, per_row: Tensor) -> Tensor:
        """Reshape ``[rows, ...]`` to ``[T, ...]``."""
        return per_row.flatten(0, len(self.rows) - 1)

    def number(self, name: str, per_row: Tensor) -> Tensor:
        """Check and flatten a float per row."""
        checks.check_rows(name, per_row, self.rows, "float")
        return self.flat(per_row.detach()).to(self.dtype)

    def logprobs(self, name: str, per_row: Tensor, *, sampled: bool = False) -> Tensor:
        """Check and flatten log-probs per row. Values that no log-prob can have become NaN, so that no clip turns them
        into a loss: +inf, and -inf where the policy has ``sampled`` the token."""
        value = self.number(name, per_row)
        return torch.where(value.isinf() if sampled else value == torch.inf, torch.nan, value)

    def ids(self, name: str, per_row: Tensor) -> Tensor:
        """Check and flatten an id per row; the dtype stays int32 or int64."""
        checks.check_rows(name, per_row, self.rows, "int")
        return self.flat(per_row)

    def finish(self, loss_T: Tensor, metrics: dict[str, Tensor], reduce_loss: bool) -> tuple[Tensor, dict[str, Tensor]]:
        """Restore the row dims, or sum the rows if asked to."""
        loss = loss_T.to(self.dtype)
        loss = loss.sum() if reduce_loss else loss.view(self.rows)
        return loss, {name: value.detach().to(self.dtype).view(self.rows) for name, value in metrics.items()}

    def weighted(self, loss_T: Tensor) -> Tensor:
        """Return row losses times their weight, exactly 0 on rows of weight 0."""
        return loss_T if self.weight_T is None else self.only_active(loss_T * self.weight_T)

    def only_active(self, per_row: Tensor) -> Tensor:
        """Return ``[T]`` or ``[T, N]`` with 0 on rows of weight 0."""
        if self.active_T is None:
            return per_row
        return torch.where(self.active_T if per_row.dim() == 1 else self.active_T.unsqueeze(1), per_row, 0)

    def masked(self, metrics: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return metrics with 0 on rows of weight 0."""
        return {name: self.only_active(value) for name, value in metrics.items()}

    def refuse_second_backward(self, ctx: Any) -> None:
        """Raise RuntimeError on a second backward with ``overwrite_input``: the first has overwritten the logits."""
        if self.overwrite_input and ctx.spent:
            raise RuntimeError(
                "overwrite_input=True: the first backward has overwritten the logits with their gradient"
            )
        ctx.spent = True


def resolve_shard(
    width: int, group: dist.ProcessGroup | None, vocab_range: tuple[int, int] | None, true_vocab_size: int | None
) -> VocabShard:
    """Return the shard of a tensor with ``width`` columns. Shards are equal and in rank order unless ``vocab_range`` is
    given.

    Raise ValueError if the range does not fit the tensor, or leaves the true vocabulary size unknown.
    """
    rank, world_size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    if vocab_range is None:
        start, total = rank * width, world_size * width
    else:
        start, end = vocab_range
        if end - start != width or start < 0:
            raise ValueError(f"vocab_range is {vocab_range} but inp has {width} columns: they must match")
        if world_size == 1 and start != 0:
            raise ValueError(f"vocab_range is {vocab_range} on a single rank: pass dist_process_group")
        if world_size > 1 and true_vocab_size is None:
            raise ValueError(f"vocab_range is {vocab_range} and true_vocab_size None: pass the whole size")
        total = end if true_vocab_size is None else max(end, true_vocab_size)
    if true_vocab_size is not None and not 0 < true_vocab_size <= total:
        raise ValueError(f"true_vocab_size is {true_vocab_size} but the shards hold {total} columns: lower it")
    size = total if true_vocab_size is None else true_vocab_size
    return VocabShard(start, min(width, max(0, size - start)), size, rank, world_size, group)


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """Return fp32, or float64 for float64 logits (tests)."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
