"""The tensors that all contenders of one case share.

Shape legend: T rows, V columns, K ids of a row, H hidden width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mopd.bench.losses.cases import Case

SEED = 0
SPREAD = 3.0
"""Standard deviation of the teacher's logits; its 64 best of 151,936 ids then hold about 0.4 of the mass."""
DISTANCE = 0.02
"""Standard deviation, in units of ``SPREAD``, of what student and teacher differ by: late in a run, where the gradient
is a small difference and careless rounding shows."""
CHUNK_ELEMENTS = 1 << 26
"""Number of elements that are drawn at a time, so that the inputs never need a second tensor of their size in fp32."""
SHARE_OF_DEVICE = 1 / 16
"""Share of the device's memory up to which the untouched copy of the logits stays on the device."""


@dataclass(frozen=True)
class LossInputs:
    """One problem. Every contender reads these very tensors."""

    logits: Tensor
    """[T, V] of the case's dtype, a leaf that requires grad."""
    ids: Tensor
    """int64 [T, K], the teacher's most probable ids of each row, best first."""
    logprobs: Tensor
    """fp32 [T, K], the teacher's log-probs over the whole vocabulary."""
    student_ids: Tensor
    """int64 [T, K], the student's most probable ids. The last one is the sampled token: which it is costs nothing."""
    student_logprobs: Tensor
    """fp32 [T, K], the teacher's log-probs of these."""
    upstream: Tensor
    """fp32 [T], d(total) / d(row loss); about 1 / T, never equal."""
    untouched: Tensor
    """[T, V], what ``restore`` copies back."""

    def restore(self) -> None:
        """Put the logits back after a contender has written its gradient over them."""
        with torch.no_grad():
            self.logits.copy_(self.untouched)


@dataclass(frozen=True)
class HeadInputs:
    """One problem that begins before the LM head; student and teacher each have hidden states and a head."""

    hidden: Tensor
    """[T, H], a leaf that requires grad."""
    weight: Tensor
    """[V, H], a leaf that requires grad."""
    teacher_hidden: Tensor
    teacher_weight: Tensor
    ids: Tensor
    """int64 [T, K]"""
    logprobs: Tensor
    """fp32 [T, K]"""
    weights: Tensor
    """fp32 [T], weight of each row in the scalar loss: 1 / T, because fused heads of others know means only."""


def make_inputs(case: Case, device: torch.device) -> LossInputs:
    """Draw a teacher and a student close to it. The same case gives the same tensors on one device."""
    generator = torch.Generator(device).manual_seed(SEED)
    dtype = getattr(torch, case.dtype)
    logits = torch.empty(case.rows, case.columns, dtype=dtype, device=device)
    ids = torch.empty(case.rows, case.k, dtype=torch.int64, device=device)
    logprobs = torch.empty(case.rows, case.k, device=device)
    student_ids, student_logprobs = torch.empty_like(ids), torch.empty_like(logprobs)
    step = max(1, CHUNK_ELEMENTS // case.columns)
    for low in range(0, case.rows, step):
        part = slice(low, min(low + step, case.rows))
        teacher = torch.randn(logits[part].shape, generator=generator, device=device).mul_(SPREAD)
        log_q = teacher.log_softmax(1)
        logprobs[part], ids[part] = log_q.topk(case.k, 1)
        noise = torch.randn(teacher.shape, generator=generator, device=device)
        logits[part] = teacher.add_(noise, alpha=SPREAD * DISTANCE)
        student_ids[part] = teacher.topk(case.k, 1).indices
        student_logprobs[part] = log_q.gather(1, student_ids[part])
    room = device.type == "cpu" or logits.nbytes <= SHARE_OF_DEVICE * torch.cuda.mem_get_info(device)[1]
    untouched = logits.clone() if room else logits.cpu().pin_memory()
    upstream = (torch.rand(case.rows, generator=generator, device=device) + 0.5) / case.rows
    return LossInputs(logits.requires_grad_(), ids, logprobs, student_ids, student_logprobs, upstream, untouched)


def make_head_inputs(case: Case, device: torch.device) -> HeadInputs:
    """Draw hidden states and both heads: the student's head is the teacher's plus noise."""
    assert case.hidden is not None
    hidden_size = case.hidden
    generator = torch.Generator(device).manual_seed(SEED)
    dtype = getattr(torch, case.dtype)

    def draw(rows: int, scale: float) -> Tensor:
        return torch.randn(rows, hidden_size, generator=generator, device=device).mul_(scale)

    hidden = draw(case.rows, 1.0)
    weight = draw(case.vocab, SPREAD / math.sqrt(hidden_size))
    noise = draw(case.vocab, DISTANCE * SPREAD / math.sqrt(hidden_size))
    student, teacher = (weight + noise).to(dtype), weight.to(dtype)
    hidden = hidden.to(dtype)
    ids = torch.empty(case.rows, case.k, dtype=torch.int64, device=device)
    logprobs = torch.empty(case.rows, case.k, device=device)
    step = max(1, CHUNK_ELEMENTS // case.vocab)
    for low in range(0, case.rows, step):
        part = slice(low, min(low + step, case.rows))
        logprobs[part], ids[part] = (hidden[part] @ teacher.T).float().log_softmax(1).topk(case.k, 1)
    return HeadInputs(
        hidden=hidden.clone().requires_grad_(),
        weight=student.requires_grad_(),
        teacher_hidden=hidden,
        teacher_weight=teacher,
        ids=ids,
        logprobs=logprobs,
        weights=torch.full((case.rows,), 1 / case.rows, device=device),
    )
