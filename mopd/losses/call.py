"""One call of a public function: checked arguments, rows flattened."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from mopd.losses import checks
from mopd.losses.chunked import accumulation_dtype
from mopd.losses.gather import GatherLogProbs
from mopd.losses.reference import scaled_logits
from mopd.losses.triton import support
from mopd.losses.vocab_parallel import VocabShard, resolve_shard


@dataclass(frozen=True)
class Call:
    """What every function of the package needs, after the checks."""

    inp: Tensor
    rows: tuple[int, ...]
    """Leading dims of the logits."""
    shard: VocabShard
    temperature: float
    weight_T: Tensor | None
    backend: str
    """As it was asked for."""
    overwrite: bool
    check_values: bool

    @cached_property
    def active_T(self) -> Tensor | None:
        """Rows of weight other than 0; None means all. Not made where nobody asks: the Triton layer looks itself."""
        return None if self.weight_T is None else self.weight_T != 0

    @cached_property
    def layer(self) -> str:
        """The layer that serves this call: reference, chunked or triton."""
        return support.resolve(self.backend, self.inp)

    @property
    def reference(self) -> bool:
        """Whether the float64 oracle serves this call."""
        return self.layer == "reference"

    def on_triton(self, num_ids: int, teachers: int = 1) -> bool:
        """Whether the Triton layer serves a call with so many ids a row, of all ``teachers``.

        Raises ValueError where it was named and does not.
        """
        return self.layer == "triton" and support.fits(num_ids, teachers, self.backend)

    @property
    def dtype(self) -> torch.dtype:
        """Type of losses and metrics."""
        return accumulation_dtype(self.inp)

    def flat(self, per_row: Tensor) -> Tensor:
        """``[rows, ...]`` to ``[T, ...]``."""
        return per_row.flatten(0, len(self.rows) - 1)

    def number(self, name: str, per_row: Tensor) -> Tensor:
        """A float per row, checked and flattened."""
        checks.check_rows(name, per_row, self.rows, "float")
        return self.flat(per_row.detach()).to(self.dtype)

    def logprobs(self, name: str, per_row: Tensor, *, sampled: bool = False) -> Tensor:
        """Log-probs per row as ``number``. What can be none is NaN, so that no clip makes a loss of it: +inf, and -inf
        of a policy that has ``sampled`` the token."""
        value = self.number(name, per_row)
        return torch.where(value.isinf() if sampled else value == torch.inf, torch.nan, value)

    def ids(self, name: str, per_row: Tensor) -> Tensor:
        """An id per row, checked and flattened; int32 or int64 as it came."""
        checks.check_rows(name, per_row, self.rows, "int")
        return self.flat(per_row)

    def gather(self, ids_TN: Tensor) -> tuple[Tensor, Tensor]:
        """Differentiable log-probs ``[T, N]`` and log-sum-exp ``[T]``; 0 on rows of weight 0."""
        if self.on_triton(ids_TN.size(1)):
            from mopd.losses.triton.functions import TritonGather

            logprobs, lse = TritonGather.apply(
                self.inp, ids_TN.contiguous(), self.weight_T, self.shard, self.temperature, self.overwrite
            )
            return logprobs, lse
        ids_TN = ids_TN.long()
        if not self.reference:
            logprobs, lse = GatherLogProbs.apply(
                self.inp, ids_TN, self.active_T, self.shard, self.temperature, self.overwrite
            )
            return logprobs, lse
        z = self.reference_logits()
        log_p, lse = z.log_softmax(1), z.logsumexp(1)
        known = (ids_TN >= 0) & (ids_TN < self.shard.vocab_size)
        logprobs = torch.where(known, log_p.gather(1, torch.where(known, ids_TN, 0)), -torch.inf)
        if self.active_T is not None:
            logprobs, lse = torch.where(self.active_T.unsqueeze(1), logprobs, 0), torch.where(self.active_T, lse, 0)
        return logprobs.to(self.dtype), lse.to(self.dtype)

    def reference_logits(self) -> Tensor:
        """Scaled logits ``[T, V]`` of the reference layer."""
        return scaled_logits(self.inp, self.shard.vocab_size, self.temperature, self.active_T)

    def finish(self, loss_T: Tensor, metrics: dict[str, Tensor], reduce_loss: bool) -> tuple[Tensor, dict[str, Tensor]]:
        """Unflattens; sums the rows where asked to."""
        loss = loss_T.to(self.dtype)
        loss = loss.sum() if reduce_loss else loss.view(self.rows)
        return loss, {name: value.detach().to(self.dtype).view(self.rows) for name, value in metrics.items()}

    def weighted(self, loss_T: Tensor) -> Tensor:
        """Row losses times their weight, exactly 0 on rows of weight 0."""
        if self.weight_T is None or self.active_T is None:
            return loss_T
        return torch.where(self.active_T, loss_T * self.weight_T, 0)

    def masked(self, metrics: dict[str, Tensor]) -> dict[str, Tensor]:
        """Metrics with 0 on rows of weight 0."""
        if self.active_T is None:
            return metrics
        return {name: torch.where(self.active_T, value, 0) for name, value in metrics.items()}


def open_call(
    inp: Tensor,
    *,
    temperature: float,
    loss_weight: Tensor | None,
    dist_process_group: dist.ProcessGroup | None,
    vocab_range: tuple[int, int] | None,
    true_vocab_size: int | None,
    overwrite_input: bool,
    is_cg_capturable: bool,
    backend: str,
    check_values: bool,
) -> Call:
    """Checks the shared arguments. Raises ValueError."""
    world_size = 1 if dist_process_group is None else dist.get_world_size(dist_process_group)
    checks.check_logits(inp, temperature, backend, overwrite_input, world_size)
    checks.check_capture(is_cg_capturable, check_values)
    rows = tuple(inp.shape[:-1])
    shard = resolve_shard(inp.size(-1), dist_process_group, vocab_range, true_vocab_size)
    support.resolve(backend, inp)
    weight = None
    if loss_weight is not None:
        checks.check_rows("loss_weight", loss_weight, rows, "float")
        weight = loss_weight.detach().flatten().to(accumulation_dtype(inp))
    return Call(inp, rows, shard, temperature, weight, backend, overwrite_input, check_values)
