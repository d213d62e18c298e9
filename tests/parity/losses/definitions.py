"""The losses written from their definitions: probability vectors over explicit outcomes, float64, autograd.

Nothing here knows a closed-form gradient. One row at a time: ``z`` [V] logits, ``ids`` and ``logq`` lists of K numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def terms(a: Tensor, b: Tensor, generalized: bool) -> list[Tensor]:
    """a_i log(a_i / b_i), plus b_i - a_i for the generalised form; 0 log 0 = 0."""
    found = []
    for x, y in zip(a, b, strict=True):
        term = x * torch.log(x / y) if float(x.detach()) > 0 else x.new_zeros(())
        found.append(term + y - x if generalized else term)
    return found


def divergence(a: Tensor, b: Tensor, generalized: bool) -> Tensor:
    """The sum of the terms."""
    return torch.stack([a.new_zeros(()), *terms(a, b, generalized)]).sum()


def outcome_vectors(
    z: Tensor, ids: Sequence[int], logq: Sequence[float], tail: str, temperature: float
) -> tuple[Tensor, Tensor]:
    """Student and teacher as vectors over the outcomes that ``tail`` distinguishes."""
    p = torch.exp(z.double() / temperature)
    p = p / p.sum()
    listed = {i: math.exp(x) for i, x in zip(ids, logq, strict=True) if i < len(z) and x > -math.inf}
    on_ids = torch.stack([p[i] for i in listed]) if listed else p[:0]
    teacher = torch.tensor(list(listed.values()), dtype=torch.float64)
    if tail == "renormalize":
        return on_ids / on_ids.sum(), teacher / teacher.sum()
    if tail == "bucket":
        others = [p[j] for j in range(len(z)) if j not in listed]
        rest = torch.stack(others).sum() if others else p.new_zeros(())
        teacher_rest = max(0.0, 1 - float(teacher.sum()))
        return torch.cat([on_ids, rest.view(1)]), torch.cat([teacher, teacher.new_tensor([teacher_rest])])
    return on_ids, teacher


def topk_loss(
    z: Tensor,
    ids: Sequence[int],
    logq: Sequence[float],
    *,
    loss: str,
    tail: str,
    beta: float = 0.5,
    temperature: float = 1.0,
    entry_max_clamp: float = math.inf,
) -> Tensor:
    """One teacher, one row; no id's own term is above the clamp."""
    p, q = outcome_vectors(z, ids, logq, tail, temperature)
    generalized = tail == "generalized"
    if loss == "jsd" and 0 < beta < 1:
        mixture = beta * q + (1 - beta) * p
        sides = zip(terms(q, mixture, generalized), terms(p, mixture, generalized), strict=True)
        found = [beta * of_q + (1 - beta) * of_p for of_q, of_p in sides]
    else:
        forward = loss == "forward_kl" or (loss == "jsd" and beta == 0)
        found = terms(q, p, generalized) if forward else terms(p, q, generalized)
    num_ids = len(found) - (tail == "bucket")
    held = [term.clamp_max(entry_max_clamp) for term in found[:num_ids]] + found[num_ids:]
    return torch.stack([z.double().new_zeros(()), *held]).sum()


def reverse_kl_and_gradient(z: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """sum_j p_j log(p_j / q_j) over the whole vocabulary, and its gradient [V]."""
    leaf = z.detach().double().requires_grad_()
    p = torch.exp(leaf) / torch.exp(leaf).sum()
    value = divergence(p, log_q.double().exp(), generalized=False)
    return value.detach(), torch.autograd.grad(value, leaf)[0]


def support(payload: str, z: Tensor, log_q: Tensor, k: int, always: Sequence[int] = ()) -> list[int]:
    """The ids of a row, each once: those of the teacher, of the student, and the ones that are always there."""
    own = log_q.topk(k).indices.tolist() if payload in ("topk", "union") else []
    student = z.topk(k).indices.tolist() if payload in ("student_topk", "union") else []
    return list(dict.fromkeys([*own, *student, *always]))


def rows_and_gradient(
    z: Tensor, ids: Tensor, logq: Tensor, upstream: Tensor, weights: Tensor | None = None, **options: object
) -> tuple[Tensor, Tensor]:
    """Losses [T] and d(sum upstream * loss)/dz [T, V] in float64; ``ids`` [T, K] or [T, D, K]."""
    leaf = z.detach().double().requires_grad_()
    if ids.dim() == 2:
        ids, logq = ids.unsqueeze(1), logq.unsqueeze(1)
    if weights is None:
        weights = torch.ones(ids.shape[:2])
    rows = []
    for t in range(len(z)):
        parts = [
            float(weights[t, d]) * topk_loss(leaf[t], ids[t, d].tolist(), logq[t, d].double().tolist(), **options)  # type: ignore[arg-type]
            for d in range(ids.size(1))
            if float(weights[t, d]) != 0
        ]
        rows.append(torch.stack(parts).sum())
    loss = torch.stack(rows)
    (gradient,) = torch.autograd.grad((loss * upstream.double()).sum(), leaf)
    return loss.detach(), gradient


def teacher_topk(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Top-k ids (int64) and fp32 log-probs of a teacher's logits [..., V]."""
    logprobs, ids = torch.log_softmax(logits.double(), -1).topk(k, -1)
    return ids, logprobs.float()
