"""Trials of a loss that its user writes, on a few made rows: what would teach the student something else in silence.

Shape legend: R rows, V ids of a small vocabulary, K ids of the teacher.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from mopd.losses.chunked.custom import EMPTY, LossProblem, RowFunction, TopKRows, result_of
from mopd.losses.custom import parallel_custom_loss

NUM_IDS, VOCAB = 4, 12
SURE = 40.0
"""Logit of an id beside 0 for the others: fp32 has no digits of what is left."""
CASES = (
    "the student is sure of one of the teacher's ids",
    "the student is sure of another id than the teacher's",
    "the teacher is sure of one id",
    "student and teacher agree",
    "a row holds a place without an id",
)
"""Rows of ``_extreme``; a plain row stands behind them."""
TOLERANCE = 1e-4
"""Largest difference from float64, absolute and relative."""
NEIGHBOURS = (
    "computes a row's loss from other rows (a mean, a softmax or a sort over dimension 0?): compute each row by "
    "itself, as loss.aggregation makes one number of them"
)
IN_PLACE = "changes its input in place: write x = x + y in the place of x += y, and clamp in that of clamp_"


def try_loss(function: RowFunction, *, own_samples: bool) -> tuple[str, ...]:
    """Return the names of a custom loss's own metrics. ``LossProblem`` if it returns no loss of each row, looks at
    other rows, changes its input, has no gradient, or is not finite on extreme rows."""
    rows = plain_rows(*_example(torch.float32), own_samples=own_samples)
    loss, metrics, gradients = _evaluated(function, rows)
    for first in (slice(0, 3), slice(3, None)):
        alone, _, of_alone = _evaluated(function, _part(rows, first))
        pairs = [(alone, loss[first]), *zip(of_alone, [one[first] for one in gradients], strict=True)]
        if not all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in pairs):
            raise LossProblem(NEIGHBOURS)
    if not any(bool(one.any()) for one in gradients):
        raise LossProblem("has a gradient of 0 on every row that was tried: nothing would be learned")
    loss, _, gradients = _evaluated(function, plain_rows(*_extreme(torch.float32), own_samples=own_samples))
    for i, case in enumerate(CASES):
        for what, value in (("losses", loss[i]), *(("gradients", one[i]) for one in gradients)):
            if not bool(torch.isfinite(value).all()):
                bad = value[~torch.isfinite(value)].flatten()[0].item()
                raise LossProblem(
                    f"has {what} of {bad} where {case}: keep to log-probs (rows.student_log_tail for the rest; never "
                    "the log of a probability or of 1 - a sum)"
                )
    return tuple(metrics)


def check_gradient(function: RowFunction, *, own_samples: bool) -> None:
    """``LossProblem`` unless the gradient is that of the value, by differences in float64."""
    rows = plain_rows(*_example(torch.float64), own_samples=own_samples)
    names, leaves = zip(*rows.leaves().items(), strict=True)

    def values(*inputs: Tensor) -> Tensor:
        return result_of(function, replace(rows, **dict(zip(names, inputs, strict=True))))[0]

    inputs = tuple(leaf.detach().requires_grad_() for leaf in leaves)
    if not torch.autograd.gradcheck(values, inputs, raise_exception=False):
        raise LossProblem(
            "has another gradient than that of its value (a detached factor, a custom backward, a kink?): if that is "
            "meant, pass same_gradient=False"
        )


def check_precision(function: RowFunction, *, own_samples: bool) -> None:
    """``LossProblem`` unless losses and their gradients at logits in fp32, by the way that a
    run takes, are those of float64 by plain torch."""
    for logits, ids, teacher, target in (_example(torch.float64), _extreme(torch.float64)):
        exact = logits.clone().requires_grad_()
        wanted, _ = result_of(function, plain_rows(exact, ids, teacher, target, own_samples=own_samples, leaves=False))
        (gradient,) = torch.autograd.grad(wanted.sum(), exact)
        inp, zero = logits.float().requires_grad_(), torch.zeros(len(ids))
        tokens = {"target_logprobs": zero - 1, "rollout_logprobs": zero - 2} if own_samples else {}
        found, _ = parallel_custom_loss(inp, ids, teacher.float(), function, target=target, **tokens)  # type: ignore[arg-type]
        (own,) = torch.autograd.grad(found.sum(), inp)
        for what, value, other in (("losses", found.detach(), wanted.detach()), ("gradients", own, gradient)):
            worst = float(((value.double() - other).abs() / other.abs().clamp_min(1)).max())
            if not worst <= TOLERANCE:
                raise LossProblem(
                    f"has {what} in fp32 that differ from float64 by {worst:.1e}: avoid differences of large numbers "
                    "and constants of a fixed dtype"
                )


def plain_rows(
    logits: Tensor, ids: Tensor, teacher: Tensor, target: Tensor, *, own_samples: bool, leaves: bool = True
) -> TopKRows:
    """Return the rows of whole logits [R, V], by plain torch: the definition of ``TopKRows``. With ``leaves`` its
    inputs begin the graph, else they are computed from ``logits``."""
    logprobs = logits.log_softmax(-1)
    listed = torch.zeros_like(logits, dtype=torch.bool).scatter(1, ids, teacher > -torch.inf)
    valid = teacher > -torch.inf
    student = {
        "student_logprobs": torch.where(valid, logprobs.gather(1, ids), EMPTY),
        "student_log_tail": logprobs.masked_fill(listed, -torch.inf).logsumexp(-1),
        "lse": logits.logsumexp(-1),
    }
    if own_samples:
        student["student_token_logprobs"] = logprobs.gather(1, target[:, None]).squeeze(1)
    if leaves:
        student = {name: value.detach().requires_grad_() for name, value in student.items()}
    tail = (1 - teacher.double().exp().sum(-1)).clamp_min(1e-30).log().to(logits.dtype)
    zero = logits.new_zeros(len(ids))
    tokens = {"teacher_token_logprobs": zero - 1, "rollout_logprobs": zero - 2} if own_samples else {}
    return TopKRows(
        ids=ids, valid=valid, teacher_logprobs=teacher.clamp_min(EMPTY), teacher_log_tail=tail, **student, **tokens
    )


def _example(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return logits [R, V], the teacher's ids and log-probs [R, K], and sampled tokens [R] of plain rows."""
    generator = torch.Generator().manual_seed(0)
    logits, teacher = 2 * torch.randn(2, 6, VOCAB, generator=generator, dtype=torch.float64)
    logprobs, ids = teacher.log_softmax(-1).topk(NUM_IDS)
    return logits.to(dtype), ids, logprobs.to(dtype), torch.arange(6)


def _extreme(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the same of the rows of ``CASES``."""
    logits, ids, logprobs, target = _example(torch.float64)
    ids[:] = torch.arange(NUM_IDS)
    logits[0] = logits[1] = 0
    logits[0, 0] = logits[1, VOCAB - 1] = SURE
    sure = torch.zeros(VOCAB, dtype=torch.float64)
    sure[0] = SURE
    logprobs[2] = sure.log_softmax(0)[:NUM_IDS]
    logprobs[3] = logits[3].log_softmax(0)[:NUM_IDS]
    logprobs[4, -1] = -torch.inf
    return logits.to(dtype), ids, logprobs.to(dtype), target


def _evaluated(function: RowFunction, rows: TopKRows) -> tuple[Tensor, dict[str, Tensor], list[Tensor]]:
    """Return losses [R], metrics, and the gradient of the losses' sum at each input."""
    leaves = list(rows.leaves().values())
    tensors = [value for field in fields(rows) if (value := getattr(rows, field.name)) is not None]
    before = [value._version for value in tensors]
    try:
        loss, metrics = result_of(function, rows)
        found = torch.autograd.grad(loss.sum(), leaves, allow_unused=True)
    except RuntimeError as error:
        if "in-place" in str(error) or "inplace" in str(error):
            raise LossProblem(IN_PLACE) from error
        raise
    if [value._version for value in tensors] != before:
        raise LossProblem(IN_PLACE)
    gradients = [torch.zeros_like(leaf) if one is None else one for leaf, one in zip(leaves, found, strict=True)]
    return loss.detach(), metrics, gradients


def _part(rows: TopKRows, which: slice) -> TopKRows:
    """Return some of the rows, as inputs that begin a graph."""
    values: dict[str, Any] = {field.name: getattr(rows, field.name) for field in fields(rows)}
    given = {name: value for name, value in values.items() if value is not None}
    return TopKRows(
        **{name: value[which].detach().requires_grad_(value.requires_grad) for name, value in given.items()}
    )
