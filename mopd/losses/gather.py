"""Log-probs of given ids as a differentiable function of vocab-parallel logits.

Shape legend: T rows, N ids of a row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mopd.losses.chunked import Selection, collect, write_gradient
from mopd.losses.occurrences import Groups, group_ids
from mopd.losses.topk import only, refuse_second_backward
from mopd.losses.vocab_parallel import VocabShard


class GatherLogProbs(torch.autograd.Function):
    """``apply(inp, ids_TN, active_T, shard, temperature, overwrite)`` -> log-probs [T, N], log-sum-exp [T]."""

    @staticmethod
    def forward(
        ctx: Any,
        inp: Tensor,
        ids_TN: Tensor,
        active_T: Tensor | None,
        shard: VocabShard,
        temperature: float,
        overwrite: bool,
    ) -> tuple[Tensor, Tensor]:
        known = (ids_TN >= 0) & (ids_TN < shard.vocab_size)
        groups = group_ids(ids_TN, known, 1)
        column, owned = shard.localize(ids_TN)
        stats, local_T = collect(inp, Selection(column, owned, groups.first_TN), shard, temperature, active_T)
        logprobs = torch.where(known, stats.logprobs_TN, -torch.inf)
        lse = only(active_T, stats.lse_T)
        if active_T is not None:
            logprobs = torch.where(active_T.unsqueeze(1), logprobs, 0)
            known = known & active_T.unsqueeze(1)
        ctx.save_for_backward(inp, logprobs, local_T, groups.group_TN, known, column, owned, active_T)
        ctx.shard, ctx.temperature, ctx.overwrite, ctx.spent = shard, temperature, overwrite, False
        return logprobs, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TN: Tensor, grad_lse_T: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_backward(ctx)
        inp, logprobs, local_T, group_TN, known, column, owned, active_T = ctx.saved_tensors
        grad = torch.where(known, grad_TN, 0) / ctx.temperature
        total = grad.sum(1) - grad_lse_T / ctx.temperature
        entry = Groups(group_TN, known, 1).sum_equal(grad) - logprobs.exp() * total.unsqueeze(1)
        out = inp if ctx.overwrite else torch.empty_like(inp)
        write_gradient(
            inp,
            out,
            entry_TN=entry,
            write_TN=owned & known,
            column_TN=column,
            dense_T=only(active_T, -total * local_T),
            shard=ctx.shard,
            temperature=ctx.temperature,
            active_T=active_T,
        )
        if ctx.overwrite:
            torch.autograd.graph.increment_version(inp)
        return out, None, None, None, None, None
