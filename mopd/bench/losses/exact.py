"""Row losses of the contenders from their definitions, float64 under autograd: what gradients are measured against.

Each function takes the student's log-probs [T, V], ``ids`` [T, K] and the teacher's log-probs [T, K], all float64, and
returns row losses [T].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Definition = Callable[[Tensor, Tensor, Tensor], Tensor]


def bucket(log_p: Tensor, ids: Tensor, log_q: Tensor) -> Tensor:
    """KL(teacher || student) over K + 1 outcomes, the last one being every id that is not listed."""
    listed = torch.zeros_like(log_p, dtype=torch.bool).scatter(1, ids, True)
    log_tail = log_p.masked_fill(listed, -torch.inf).logsumexp(1)
    q = log_q.exp()
    tail = (1 - q.sum(1)).clamp_min(0)
    on_tail = torch.where(tail > 0, tail * (tail.clamp_min(1e-300).log() - log_tail), 0)
    return (q * (log_q - log_p.gather(1, ids))).sum(1) + on_tail


def truncated(log_p: Tensor, ids: Tensor, log_q: Tensor) -> Tensor:
    """The sum over the listed ids alone, both log-probs held at -10 and above, the row at [0, 10]."""
    log_p, log_q = log_p.gather(1, ids).clamp_min(-10), log_q.clamp_min(-10)
    return (log_q.exp() * (log_q - log_p)).sum(1).clamp(0, 10)


def renormalized(log_p: Tensor, ids: Tensor, log_q: Tensor) -> Tensor:
    """KL of the two distributions conditional on the listed ids."""
    log_q = log_q.log_softmax(1)
    return (log_q.exp() * (log_q - log_p.gather(1, ids).log_softmax(1))).sum(1)


def renormalized_teacher(log_p: Tensor, ids: Tensor, log_q: Tensor) -> Tensor:
    """KL from the teacher conditional on the listed ids to the student over the whole vocabulary."""
    log_q = log_q.log_softmax(1)
    return (log_q.exp() * (log_q - log_p.gather(1, ids))).sum(1)


def cross_entropy(log_p: Tensor, ids: Tensor, log_q: Tensor) -> Tensor:
    """-log p of the first listed id."""
    return -log_p[torch.arange(len(ids), device=ids.device), ids[:, 0]]


DEFINITIONS: dict[str, Definition] = {
    "bucket": bucket,
    "truncated": truncated,
    "renormalized": renormalized,
    "renormalized teacher": renormalized_teacher,
    "cross entropy": cross_entropy,
}


def gradient(loss: str, logits: Tensor, ids: Tensor, logprobs: Tensor, upstream: Tensor) -> Tensor:
    """d(sum upstream x loss) / d logits in float64, [T, V]; meant for a few rows."""
    leaf = logits.detach().double().requires_grad_()
    rows = DEFINITIONS[loss](leaf.log_softmax(1), ids, logprobs.double())
    (result,) = torch.autograd.grad(rows, leaf, upstream.double())
    return result


def errors(loss: str, got: Tensor, logits: Tensor, ids: Tensor, logprobs: Tensor, upstream: Tensor) -> dict[str, float]:
    """How far a gradient [T, V] is from float64.

    ``relative``: ||got - exact|| / ||exact||. ``scaled``: the largest over rows, on the K ids, relative to
    upstream x (||p_S|| + ||q_S||), the sizes of what is subtracted. NaN where ``got`` holds one.
    """
    exact = gradient(loss, logits, ids, logprobs, upstream)
    difference = got.double() - exact
    p = logits.detach().double().log_softmax(1).gather(1, ids).exp()
    q = torch.ones_like(p) if loss == "cross entropy" else logprobs.double().exp()
    size = upstream.double() * (p.norm(dim=1) + q.norm(dim=1))
    return {
        "relative": float(difference.norm() / exact.norm()),
        "scaled": float((difference.gather(1, ids).norm(dim=1) / size).max()),
    }
