"""Diagnostics that cost a pass of their own: entropy of the student and overlap of the two top-k sets. No gradient.

Shape legend: T rows, K ids of a row.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from mopd.losses.call import LossCall
from mopd.losses.chunked.blocks import blocks
from mopd.losses.chunked.passes import Scratch

LARGEST_EXACT_ID = 1 << 24
"""Largest id that can be sent in fp32, which holds integers exactly up to here."""


def entropy_and_overlap(inp: Tensor, ids_TK: Tensor, call: LossCall) -> tuple[Tensor, Tensor]:
    """Return the entropy in nats ``[T]``, and the share of the teacher's ids among the student's K most probable
    ``[T]``.

    One all-reduce of ``[T, tp * (2 + 2 K)]``: per rank the log-sum-exp, the mean logit, and the K best logits with ids.
    """
    rows, k = ids_TK.shape
    shard, dtype = call.shard, call.dtype
    own = inp.new_zeros(rows, 2 + 2 * k, dtype=dtype)
    own[:, 0] = -torch.inf
    own[:, 2 : 2 + k] = -torch.inf
    own[:, 2 + k :] = -1
    scratch, num_best = Scratch(inp, call), min(k, shard.num_columns)
    for block in blocks(inp, call.active_T) if shard.num_columns else ():
        if block.empty:
            continue
        logits = scratch.scaled(block.read(inp))
        part = block.rows_of(own).clone()
        part[:, :2] = _lse_and_mean(logits, scratch)
        top = logits.topk(num_best, dim=1)
        part[:, 2 : 2 + num_best] = top.values
        part[:, 2 + k : 2 + k + num_best] = (top.indices + shard.start).to(part.dtype)
        block.put_rows(own, part)
    # A SUM over cells of which one rank each fills its own: exact, and equal on all ranks.
    pay = own.new_zeros(rows, shard.world_size, own.size(1))
    pay[:, shard.rank] = own
    if shard.world_size > 1:
        dist.all_reduce(pay, group=shard.group)
    entropy = _entropy_of_parts(pay[..., 0], pay[..., 1])
    best = pay[..., 2 : 2 + k].flatten(1).topk(k, dim=1).indices
    student_ids = pay[..., 2 + k :].flatten(1).gather(1, best).long()
    valid = (ids_TK >= 0) & (ids_TK < shard.vocab_size)
    hits = torch.zeros_like(entropy)
    for column in range(k):  # one column at a time: a [T, K, K] table would be the largest tensor here
        hits += ((student_ids == ids_TK[:, column : column + 1]).any(1) & valid[:, column]).to(dtype)
    overlap = torch.where(entropy.isfinite(), hits / valid.sum(1).clamp_min(1), torch.nan)
    return call.only_active(entropy), call.only_active(overlap)


def entropy_rows(inp: Tensor, call: LossCall) -> Tensor:
    """Return the entropy in nats ``[T]``; a pass and an all-reduce of ``[T, tp * 2]``: log-sum-exp and mean logit."""
    shard = call.shard
    pay = inp.new_zeros(inp.shape[:-1].numel(), shard.world_size, 2, dtype=call.dtype)
    own = pay[:, shard.rank]
    own[:, 0] = -torch.inf
    scratch = Scratch(inp, call)
    for block in blocks(inp, call.active_T) if shard.num_columns else ():
        if not block.empty:
            block.put_rows(own, _lse_and_mean(scratch.scaled(block.read(inp)), scratch))
    if shard.world_size > 1:
        dist.all_reduce(pay, group=shard.group)
    return call.only_active(_entropy_of_parts(pay[..., 0], pay[..., 1]))


def _entropy_of_parts(lse: Tensor, mean: Tensor) -> Tensor:
    """Return the entropy [T] of a distribution in parts, from log-sum-exp and mean logit of each part, [T, parts]."""
    joint = torch.logsumexp(lse, 1)
    share = torch.exp(lse - joint.unsqueeze(1))
    return joint - torch.where(share == 0, 0, share * mean).sum(1)


def _lse_and_mean(logits: Tensor, scratch: Scratch) -> Tensor:
    """Return log-sum-exp and mean logit of a block's rows, [R, 2]."""
    share = torch.softmax(logits, 1, out=scratch.result(logits.size(0)))
    mean = torch.where(logits == -torch.inf, 0, share * logits).sum(1) / share.sum(1)
    return torch.stack([torch.logsumexp(logits, 1), mean], 1)
