"""Losses as others compute them, written for this benchmark from descriptions of their data flow.

Each function takes logits [T, V], ``ids`` int64 [T, K] and the teacher's ``logprobs`` fp32 [T, K] and returns fp32 row
losses [T]. All run on one rank: where a style would all-reduce (over one shard), nothing happens here. Where a
description leaves a choice, the cheaper one is taken.

Shape legend: T rows, V columns, K ids of a row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_ROWS = 1024
"""Rows at a time of the NeMo-RL style."""


def bucket_terms(logp: Tensor, logprobs: Tensor, tail_floor: float) -> Tensor:
    """KL over K ids and one more outcome for the rest, from log-probs [T, K], under autograd."""
    q = logprobs.exp()
    rest_q = (1 - q.sum(1)).clamp_min(tail_floor)
    rest_p = (1 - logp.exp().sum(1)).clamp_min(tail_floor)
    return (q * (logprobs - logp)).sum(1) + rest_q * (rest_q.log() - rest_p.log())


def eager(logits: Tensor, ids: Tensor, logprobs: Tensor) -> Tensor:
    """Log-softmax of the whole vocabulary in fp32, then gather: what one writes first."""
    log_p = torch.log_softmax(logits, 1, dtype=torch.float32)
    return bucket_terms(log_p.gather(1, ids), logprobs, 1e-6)


def eager_renormalized(logits: Tensor, ids: Tensor, logprobs: Tensor) -> Tensor:
    """The default mode of the NeMo-RL style: fp32 logits, gather, softmax over the K ids on both sides.

    The loss does not see what the student does outside the K ids.
    """
    log_p = logits.float().gather(1, ids).log_softmax(1)
    log_q = logprobs.log_softmax(1)
    return (log_q.exp() * (log_q - log_p)).sum(1)


def ghost_token(logits: Tensor, ids: Tensor, logprobs: Tensor) -> Tensor:
    """Megatron's offline distillation style: log-sum-exp by shift, exp and sum (each of which could be all-reduced),
    and one ghost token for the mass outside the K ids, held above 1e-8; all of it under autograd.
    """
    z = logits.float()
    shift = z.detach().amax(1, keepdim=True)
    lse = (z - shift).exp().sum(1, keepdim=True).log() + shift
    return bucket_terms(z.gather(1, ids) - lse, logprobs, 1e-8)


def verl(logits: Tensor, ids: Tensor, logprobs: Tensor) -> Tensor:
    """verl style without diagnostics: truncated forward KL, log-probs held above -10, rows in [0, 10]."""
    loss, _, _ = VerlTopK.apply(logits, ids, logprobs, False)
    return loss.clamp_max(10.0).clamp_min(0.0)


def verl_with_diagnostics(logits: Tensor, ids: Tensor, logprobs: Tensor) -> Tensor:
    """The same with the diagnostics that go with it: the student's own top-k, how many ids it shares with the teacher's
    and the student's mass on the shared ones.
    """
    loss, _, _ = VerlTopK.apply(logits, ids, logprobs, True)
    return loss.clamp_max(10.0).clamp_min(0.0)


class VerlTopK(torch.autograd.Function):
    """``apply(logits, ids, logprobs, diagnostics)`` -> row losses, shared ids and student mass on those, [T] each.

    Forward makes an fp32 copy and, in place where that is possible, shift, exp, log-softmax and probabilities, which
    are saved; backward scatters -q into (sum of active q) x p.
    """

    MIN_LOGPROB = -10.0

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, ids: Tensor, logprobs: Tensor, diagnostics: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        z = logits.to(torch.float32, copy=True)
        z.sub_(z.amax(1, keepdim=True))
        p = z.exp()
        total = p.sum(1, keepdim=True)
        log_p = z.sub_(total.log())
        p.div_(total)
        chosen = log_p.gather(1, ids)
        active = chosen > VerlTopK.MIN_LOGPROB
        log_q = logprobs.clamp_min(VerlTopK.MIN_LOGPROB)
        q = log_q.exp()
        loss = (q * (log_q - chosen.clamp_min(VerlTopK.MIN_LOGPROB))).sum(1)
        shared, mass = torch.zeros_like(loss), torch.zeros_like(loss)
        if diagnostics:
            best, best_ids = log_p.topk(ids.size(1), 1)
            ours = _in_rows(best_ids, ids)
            shared, mass = ours.sum(1).float(), torch.where(ours, best.exp(), 0).sum(1)
        ctx.mark_non_differentiable(shared, mass)
        ctx.save_for_backward(p, ids, torch.where(active, q, 0))
        ctx.dtype = logits.dtype
        return loss, shared, mass

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        p, ids, q = ctx.saved_tensors
        gradient = p * q.sum(1, keepdim=True)
        gradient.scatter_add_(1, ids, -q)
        gradient.mul_(grad.unsqueeze(1))
        return gradient.to(ctx.dtype), None, None, None


def _in_rows(values: Tensor, ids: Tensor) -> Tensor:
    """[T, K] bool: where a value is among the ids of its own row."""
    ordered = ids.sort(1).values
    at = torch.searchsorted(ordered, values).clamp_max(ids.size(1) - 1)
    return ordered.gather(1, at) == values


def nemo_rl(logits: Tensor, ids: Tensor, logprobs: Tensor) -> Tensor:
    """NeMo-RL style with full normalisation: the student's log-probs over the whole vocabulary, chunk by chunk, forward
    and again in backward; the teacher renormalised over its K ids.
    """
    log_p = ChunkedGather.apply(logits.float(), ids)
    log_q = logprobs.log_softmax(1)
    return (log_q.exp() * (log_q - log_p)).sum(1)


class ChunkedGather(torch.autograd.Function):
    """``apply(logits fp32 [T, V], ids)`` -> log-probs [T, K]; saves the logits, normalises them again in backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor) -> Tensor:
        parts = [
            _log_softmax(z).gather(1, i) for z, i in zip(logits.split(CHUNK_ROWS), ids.split(CHUNK_ROWS), strict=True)
        ]
        ctx.save_for_backward(logits, ids)
        return torch.cat(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, ids = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        for low in range(0, logits.size(0), CHUNK_ROWS):
            part = slice(low, low + CHUNK_ROWS)
            p = torch.exp(_log_softmax(logits[part]), out=gradient[part])
            p.mul_(-grad[part].sum(1, keepdim=True)).scatter_add_(1, ids[part], grad[part])
        return gradient, None


def _log_softmax(z: Tensor) -> Tensor:
    """Log-softmax as a vocabulary-parallel one is made: shift, exp, sum, and a place for an all-reduce after each."""
    shifted = z - z.amax(1, keepdim=True)
    return shifted.sub_(shifted.exp().sum(1, keepdim=True).log())


def torch_cross_entropy(logits: Tensor, ids: Tensor, logprobs: Tensor) -> Tensor:
    """PyTorch's cross entropy of the first id, in fp32."""
    return torch.nn.functional.cross_entropy(logits.float(), ids[:, 0], reduction="none")
