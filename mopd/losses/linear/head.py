"""The output matrix of a language model as a vocab-parallel linear layer: rows in, gradients out.

It does what Megatron-Core's ``ColumnParallelLinear`` does around its matrix product, for any subset of the rows: gather
what sequence parallelism has split, sum the hidden gradient over the tensor-parallel ranks, and put the weight gradient
into ``weight.main_grad`` if that exists. The products themselves are the BLAS library's.

Shape legend: T rows of the whole batch (all leading dims together), N rows that are computed, H hidden size, V columns
of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mopd.losses.call import accumulation_dtype
from mopd.losses.checks import FLOATS

CONVERSION_ELEMENTS = 1 << 20
"""Elements converted at a time if the BLAS library cannot accumulate half-precision products in fp32."""


@dataclass(frozen=True)
class LinearHead:
    """Distribution of an LM head over ranks, and the choice of the rows that are computed.

    Raises ValueError for a ``row_index`` of another form, and for ``sequence_parallel`` without a group.
    """

    group: dist.ProcessGroup | None = None
    """Tensor-parallel group; None for a single rank."""
    sequence_parallel: bool = False
    """Whether hidden states arrive as this rank's share of the first dimension."""
    row_index: Tensor | None = None
    """int64 ``[N]``, N >= 1, ascending: flat numbers of the rows to compute; None means all."""

    def __post_init__(self) -> None:
        index = self.row_index
        if index is not None and (index.dtype != torch.int64 or index.dim() != 1 or index.numel() == 0):
            raise ValueError(f"row_index is {index.dtype} {list(index.shape)}: pass int64 [N] with at least one row")
        if self.sequence_parallel and self.group is None:
            raise ValueError("sequence_parallel is True but group None: pass the tensor-parallel group")

    @property
    def world_size(self) -> int:
        """Number of ranks that share the vocabulary."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def splits_sequence(self) -> bool:
        """Whether hidden states must be gathered."""
        return self.sequence_parallel and self.world_size > 1

    def row_shape(self, hidden: Tensor) -> torch.Size:
        """Return the leading dims of the logits that belong to ``hidden``."""
        first, *rest = hidden.shape[:-1]
        return torch.Size([first * self.world_size if self.splits_sequence else first, *rest])

    def num_rows(self, hidden: Tensor) -> int:
        """Return the number of rows that are computed."""
        return self.row_shape(hidden).numel() if self.row_index is None else self.row_index.numel()

    def begin_gather(self, hidden: Tensor) -> Callable[[], Tensor]:
        """Start to gather the rows that are computed; the returned function waits and returns them, ``[N, H]``, without
        a copy if nothing is to be gathered or chosen."""
        gathered = None
        if self.splits_sequence:
            own = hidden.contiguous()
            hidden = hidden.new_empty(*self.row_shape(hidden), hidden.size(-1))
            gathered = dist.all_gather_into_tensor(hidden, own, group=self.group, async_op=True)

        def finish() -> Tensor:
            if gathered is not None:
                gathered.wait()
            flat = hidden.flatten(0, -2)
            return flat if self.row_index is None else flat.index_select(0, self.row_index)

        return finish

    def begin_give_back(self, grad_NH: Tensor, hidden: Tensor) -> Callable[[], Tensor]:
        """Start to sum this rank's part of the rows' gradient over the ranks; the returned function waits and returns
        the gradient of ``hidden``, 0 in rows that are not computed.

        The sum runs in the dtype of ``grad_NH``, which may be overwritten, and is rounded once.
        """
        if self.splits_sequence:
            whole = self._all_rows(grad_NH, hidden)
            own = whole.new_empty(whole.size(0) // self.world_size, whole.size(1))
            scattered = dist.reduce_scatter_tensor(own, whole, group=self.group, async_op=True)

            def finish_scattered() -> Tensor:
                scattered.wait()
                return own.to(hidden.dtype).view(hidden.shape)

            return finish_scattered
        summed = dist.all_reduce(grad_NH, group=self.group, async_op=True) if self.world_size > 1 else None

        def finish() -> Tensor:
            if summed is not None:
                summed.wait()
            return self._all_rows(grad_NH.to(hidden.dtype), hidden).view(hidden.shape)

        return finish

    def _all_rows(self, grad_NH: Tensor, hidden: Tensor) -> Tensor:
        """Return ``[T, H]``, 0 in rows that are not computed."""
        if self.row_index is None:
            return grad_NH
        num_rows = self.row_shape(hidden).numel()
        return grad_NH.new_zeros(num_rows, grad_NH.size(1)).index_copy_(0, self.row_index, grad_NH)

    def spread(self, value_N: Tensor, hidden: Tensor) -> Tensor:
        """Return numbers of the computed rows as ``[rows]``, 0 elsewhere. Differentiable."""
        shape = self.row_shape(hidden)
        if self.row_index is None:
            return value_N.view(shape)
        return value_N.new_zeros(shape.numel()).index_copy(0, self.row_index, value_N).view(shape)

    def sum_dtype(self, weight: Tensor) -> torch.dtype:
        """Return the dtype in which hidden gradients are summed: fp32 or wider if several ranks contribute."""
        return accumulation_dtype(weight) if self.world_size > 1 else weight.dtype

    def rows_within(self, memory_budget: int, hidden: Tensor, weight: Tensor, row_bytes: int = 0) -> int:
        """Return how many rows of logits may exist at once: all that are computed, or as many as fit beside the
        gradients. ``row_bytes`` is what else exists for each of these rows, as a teacher's logits.

        Counted are bytes besides inputs, results, ``[T, K]`` numbers and the scratch of the logits passes. The same on
        all ranks, whose shards are equal.

        Raises:
            ValueError: not even one row fits (the message names the least that would do), or shapes or dtypes are
                wrong.
        """
        check_factors(hidden, weight)
        num_rows, row = self.num_rows(hidden), weight.size(0) * weight.element_size() + row_bytes
        if num_rows * row <= memory_budget:
            return num_rows
        beside = self._bytes_beside_chunks(hidden, weight)
        fit = min(num_rows, (memory_budget - beside) // row)
        if fit < 1:
            needs = {"all rows at once": num_rows * row, "one at a time": beside + row}
            least = ", ".join(f"{name} {size}" for name, size in needs.items())
            raise ValueError(
                f"memory_budget is {memory_budget} bytes, too little for {num_rows} rows of {weight.size(0)} columns: "
                f"set at least {min(needs.values())} (bytes needed: {least}) or pass fewer rows"
            )
        return fit

    def _bytes_beside_chunks(self, hidden: Tensor, weight: Tensor) -> int:
        """Return the bytes beside a chunk's logits: gathered rows, and gradients that are not results themselves."""
        num_rows, total = self.num_rows(hidden), self.row_shape(hidden).numel()
        size, hidden_size, summed = weight.element_size(), hidden.size(-1), self.sum_dtype(weight).itemsize
        beside = hidden_size * num_rows * size if num_rows < total else 0
        beside += hidden_size * total * size if self.splits_sequence else 0
        is_result = summed == size and num_rows == total and not self.splits_sequence
        if torch.is_grad_enabled() and hidden.requires_grad and not is_result:
            whole = total if self.splits_sequence and num_rows < total else 0
            beside += hidden_size * (num_rows + whole) * summed
        if torch.is_grad_enabled() and weight.requires_grad and main_grad(weight) is None:
            beside += weight.numel() * accumulation_dtype(weight).itemsize
        return beside


@dataclass(frozen=True)
class Rows:
    """Rows ``low`` to ``high`` of those that are computed; ``index_N`` numbers these among the T, None means all."""

    index_N: Tensor | None
    low: int
    high: int

    def of(self, per_row: Tensor) -> Tensor:
        """Return their part of a per-row tensor ``[T, ...]``."""
        if self.index_N is None:
            return per_row[self.low : self.high]
        return per_row.index_select(0, self.index_N[self.low : self.high])


def choose_rows(marks: Tensor) -> Tensor | None:
    """Return the ``row_index`` of the marked rows (bool ``[rows]``), None if all are marked. Waits for the device.

    If none is, the first row stands in (its weight is 0), so that no kernel has to cope with an empty tensor.
    """
    index = marks.flatten().nonzero().flatten()
    if index.numel() == marks.numel():
        return None
    return index if index.numel() else index.new_zeros(1)


def check_factors(hidden: Tensor, weight: Tensor) -> None:
    """Raise ValueError for shapes or dtypes that make no logits."""
    good = hidden.dim() in (2, 3) and weight.dim() == 2 and hidden.size(-1) == weight.size(-1) and weight.numel() > 0
    if not good or hidden.dtype != weight.dtype or hidden.dtype not in FLOATS:
        raise ValueError(
            f"hidden is {hidden.dtype} {list(hidden.shape)} and weight {weight.dtype} {list(weight.shape)}: "
            "pass float hidden [T, H] or [S, B, H] and weight [V/tp, H] of one dtype"
        )


def main_grad(weight: Tensor) -> Tensor | None:
    """Return the buffer of Megatron's DistributedDataParallel, None if autograd is to get the weight's gradient."""
    buffer: Tensor | None = getattr(weight, "main_grad", None)
    return buffer


def mark_added(weight: Tensor) -> None:
    """Tell Megatron that ``main_grad`` holds this gradient already."""
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]


def matmul_into(out: Tensor, a: Tensor, b: Tensor, *, accumulate: bool) -> None:
    """Compute ``out (+)= a @ b``. ``out`` may be wider than the factors: sums are then never rounded to their dtype."""
    if a.dtype == out.dtype:
        out.addmm_(a, b, beta=int(accumulate))
    elif a.is_cuda:
        torch.addmm(out, a, b, out_dtype=out.dtype, beta=int(accumulate), out=out)
    else:
        _matmul_converted(out if accumulate else out.zero_(), a, b)


def _matmul_converted(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Compute ``out += a @ b`` in the dtype of ``out``, converting parts of the factors: slices of the longer dim."""
    inner = a.size(1)
    if inner <= a.size(0):
        wide, step = b.to(out.dtype), max(1, CONVERSION_ELEMENTS // max(1, inner))
        for low in range(0, a.size(0), step):
            out[low : low + step].addmm_(a[low : low + step].to(out.dtype), wide)
        return
    step = max(1, CONVERSION_ELEMENTS // max(1, a.size(0), b.size(1)))
    for low in range(0, inner, step):
        out.addmm_(a[:, low : low + step].to(out.dtype), b[low : low + step].to(out.dtype))
