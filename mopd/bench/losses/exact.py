"""Row losses of the contenders from their definitions, float64 under autograd: what gradients are measured against."""

from __future__ import annotations

import torch
from torch import Tensor


def row_losses(loss: str, log_p: Tensor, ids: Tensor, log_q: Tensor) -> Tensor:
    """Row losses [T] from the student's log-probs [T, V], ``ids`` [T, K] and the teacher's log-probs [T, K], float64.

    ``cross entropy``: -log p of the first id. The others are KL(teacher || student) over the listed ids: ``bucket``
    with one outcome more for every id that is not listed; ``truncated`` with both log-probs held at -10 and above and
    the row at [0, 10]; ``renormalized`` of the distributions conditional on the ids; ``renormalized teacher`` of the
    conditional teacher and the student over the whole vocabulary.
    """
    chosen = log_p.gather(1, ids)
    if loss == "cross entropy":
        return -chosen[:, 0]
    if loss == "truncated":
        chosen, log_q = chosen.clamp_min(-10), log_q.clamp_min(-10)
    if loss in ("renormalized", "renormalized teacher"):
        log_q = log_q.log_softmax(1)
    if loss == "renormalized":
        chosen = chosen.log_softmax(1)
    rows = (log_q.exp() * (log_q - chosen)).sum(1)
    if loss == "bucket":
        listed = torch.zeros_like(log_p, dtype=torch.bool).scatter(1, ids, True)
        tail = (1 - log_q.exp().sum(1)).clamp_min(0)
        log_tail = log_p.masked_fill(listed, -torch.inf).logsumexp(1)
        rows = rows + torch.where(tail > 0, tail * (tail.clamp_min(1e-300).log() - log_tail), 0)
    return rows.clamp(0, 10) if loss == "truncated" else rows


def gradient(loss: str, logits: Tensor, ids: Tensor, logprobs: Tensor, upstream: Tensor) -> Tensor:
    """d(sum upstream x loss) / d logits in float64, [T, V]; meant for a few rows."""
    leaf = logits.detach().double().requires_grad_()
    rows = row_losses(loss, leaf.log_softmax(1), ids, logprobs.double())
    (result,) = torch.autograd.grad(rows, leaf, upstream.double())
    return result


def error(loss: str, got: Tensor, logits: Tensor, ids: Tensor, logprobs: Tensor, upstream: Tensor) -> float:
    """||got - exact|| / ||exact|| of a gradient [T, V]; NaN where ``got`` holds one."""
    exact = gradient(loss, logits, ids, logprobs, upstream)
    return float((got.double() - exact).norm() / exact.norm())
