"""Contenders on logits, and from hidden states on (LM head and loss together), all on the same tensors.

Released packages are loaded by name and only here: nothing of mopd depends on them. Losses in the style of other
toolkits are written for this benchmark from descriptions of their data flow, on one rank, where an all-reduce does
nothing; where a description leaves a choice, the cheaper one is taken. Each takes logits
[T, V], ``ids`` int64 [T, K] and the teacher's ``logprobs`` fp32 [T, K] and returns fp32 row losses [T].

Shape legend: T rows, V columns, K ids of a row, H hidden width.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mopd.bench.losses.inputs import HeadInputs, LossInputs
from mopd.losses import (
    LinearHead,
    linear_full_distill,
    linear_loss,
    parallel_sampled_kl,
    parallel_topk_distill,
)
from mopd.losses.linear.head import Rows

NO_ID = 2**31 - 1
"""Id of a place that repeats another, above every vocabulary."""
CHUNK_ROWS = 1024
"""Number of rows that the NeMo-RL style computes at a time."""


def bucket_terms(logp: Tensor, logprobs: Tensor, tail_floor: float) -> Tensor:
    """Return the KL over K ids and one more outcome for the rest, from log-probs [T, K], under autograd."""
    q = logprobs.exp()
    rest_q = (1 - q.sum(1)).clamp_min(tail_floor)
    rest_p = (1 - logp.exp().sum(1)).clamp_min(tail_floor)
    return (q * (logprobs - logp)).sum(1) + rest_q * (rest_q.log() - rest_p.log())


def eager(logits: Tensor, ids: Tensor, logprobs: Tensor) -> Tensor:
    """Plain style: log-softmax of the whole vocabulary in fp32, then gather."""
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
    """verl style: truncated forward KL, log-probs held above -10, rows in [0, 10], and the diagnostics that go with it:
    the student's own top-k, how many ids it shares with the teacher's and the student's mass on the shared ones.
    """
    loss: Tensor = VerlTopK.apply(logits, ids, logprobs)[0]
    return loss.clamp_max(10.0).clamp_min(0.0)


class VerlTopK(torch.autograd.Function):
    """``apply(logits, ids, logprobs)`` -> row losses, shared ids and student mass on those, [T] each.

    Forward makes an fp32 copy and, in place where that is possible, shift, exp, log-softmax and probabilities, which
    are saved; backward scatters -q into (sum of active q) x p.
    """

    MIN_LOGPROB = -10.0

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, logprobs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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
        return gradient.to(ctx.dtype), None, None


def _in_rows(values: Tensor, ids: Tensor) -> Tensor:
    """Return [T, K] bool: whether a value is among the ids of its own row."""
    ordered = ids.sort(1).values
    at = torch.searchsorted(ordered, values).clamp_max(ids.size(1) - 1)
    return ordered.gather(1, at) == values


def nemo_rl(logits: Tensor, ids: Tensor, logprobs: Tensor) -> Tensor:
    """NeMo-RL style with full normalisation: the student's log-probs over the whole vocabulary, chunk by chunk, forward
    and again in backward; the teacher renormalised over its K ids.
    """
    log_p: Tensor = ChunkedGather.apply(logits.float(), ids)
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
    """Compute a log-softmax as vocabulary-parallel code does: shift, exp, sum, and a place for an all-reduce after
    each."""
    shifted = z - z.amax(1, keepdim=True)
    return shifted.sub_(shifted.exp().sum(1, keepdim=True).log())


TAILS = {"bucket": "bucket", "truncated": "none", "renormalized": "renormalize", "renormalized teacher": "none"}
"""What is computed -> the tail of ``parallel_topk_distill`` that defines it."""


def exact_rows(loss: str, logits: Tensor, ids: Tensor, log_q: Tensor) -> Tensor:
    """Return row losses [T] in float64 under autograd, by the ``reference`` layer; meant for a few rows.

    All are KL(teacher || student) over the listed ids: ``bucket`` with one outcome more for every id that is not
    listed; ``truncated`` with both log-probs held at -10 and above and the row at [0, 10]; ``renormalized`` of the
    distributions conditional on the ids; ``renormalized teacher`` of the conditional teacher and the student over the
    whole vocabulary.
    """
    log_q, options = log_q.double(), dict[str, Any](tail=TAILS[loss])
    if loss == "renormalized teacher":
        log_q = log_q.log_softmax(1)
    elif loss == "truncated":
        options |= {"logprob_min_clamp": VerlTopK.MIN_LOGPROB, "loss_max_clamp": 10.0}
    rows, _ = parallel_topk_distill(logits.double(), ids, log_q, backend="reference", **options)
    return rows.clamp_min(0) if loss == "truncated" else rows


def error(exact_loss: Callable[[Tensor], Tensor], got: Tensor, logits: Tensor, upstream: Tensor) -> float:
    """Return ||got - exact|| / ||exact|| of a gradient [T, V] of sum upstream x loss, where ``exact_loss`` makes row
    losses of float64 logits; NaN where ``got`` holds one."""
    leaf = logits.detach().double().requires_grad_()
    (exact,) = torch.autograd.grad(exact_loss(leaf), leaf, upstream.double())
    return float((got.double() - exact).norm() / exact.norm())


BASELINE, COMPILED = "eager fp32 log-softmax + gather", "eager under torch.compile"
FLOOR = "the three GEMMs alone"
CHECKED_ROWS = 32
"""Rows, evenly spaced, whose gradient is compared with float64."""
MEMORY_SHARE = 10
"""Memory of the logits over the budget of ``linear_loss``."""
FULL_SHARE, FULL_ROWS = 64, 32
"""Memory of one side's logits over the budget of ``linear_full_distill``, and the rows that it has at least: with fewer
each chunk would read and write the weight gradient for next to no work."""
RowLoss = Callable[[Tensor, Tensor, Tensor], Tensor]
STYLES: tuple[tuple[str, str, RowLoss], ...] = (
    ("ghost-token style", "bucket", ghost_token),
    ("verl style, diagnostics", "truncated", verl),
    ("NeMo-RL style, full normalisation", "renormalized teacher", nemo_rl),
    ("NeMo-RL style, over K", "renormalized", eager_renormalized),
)


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to get a loss and its gradient."""

    name: str
    group: Literal["floor", "ours", "plain", "style", "released"]
    loss: str
    """Name of what is computed: times are comparable between equal losses."""
    forward: Callable[[], Tensor] | str
    """Function to time, or the reason why the contender cannot run here; it gets a row all the same."""
    leaves: Sequence[Tensor]
    upstream: Tensor | None = None
    """Gradient that backward starts from; None for a scalar loss."""
    restore: Callable[[], object] = lambda: None
    """Function that undoes what a run does to the inputs, outside the timed region."""
    overwrites: bool = False
    """Whether the gradient is written over the logits."""
    check: Callable[[Sequence[Tensor]], float] | None = None
    """Function from gradients to their error against float64."""
    note: str = ""


def logits_contenders(inputs: LossInputs) -> list[Contender]:
    """Make all contenders that take logits, the plain baseline first."""
    picked, own = _picked(inputs), (inputs.ids, inputs.logprobs)

    def add(
        name: str,
        group: Any,
        loss: str,
        rows: RowLoss | str,
        *,
        overwrites: bool = False,
        lists: Sequence[Tensor] = own,
        exact: RowLoss | None = None,
    ) -> Contender:
        exact, listed = exact or partial(exact_rows, loss), [part[picked] for part in lists]
        return Contender(
            name=name,
            group=group,
            loss=loss,
            forward=rows if isinstance(rows, str) else partial(rows, inputs.logits, *lists),
            leaves=(inputs.logits,),
            upstream=inputs.upstream,
            restore=inputs.restore if overwrites else (lambda: None),
            overwrites=overwrites,
            check=partial(_error, inputs, lambda leaf: exact(leaf, *listed)),
        )

    torch.compiler.reset()
    compiled = torch.compile(eager, dynamic=False)
    left_out = "renormalized" if inputs.ids.size(1) == 1 else ""  # it would be constant
    entries = [add(BASELINE, "plain", "bucket", eager), add(COMPILED, "plain", "bucket", compiled)]
    for backend, reason in (("chunked", ""), ("triton", _lacks_triton(inputs.logits.device))):
        for loss, overwrites in (("bucket", False), ("bucket", True), ("renormalized", True)):
            rows = reason or partial(_our_rows, loss, {"backend": backend, "overwrite_input": overwrites})
            name = backend + (", overwrite_input" if overwrites else "")
            entries.append(add(name, "ours", loss, rows, overwrites=overwrites))
    fast = {"backend": _layer(inputs.logits.device), "overwrite_input": True}
    for payload, lists in payload_lists(inputs).items():
        rows, exact = (partial(payload_rows, payload, options) for options in (fast, {"backend": "reference"}))
        loss = "k2" if payload == "sampled" else "reverse KL"
        entries.append(add(f"payload {payload}", "ours", loss, rows, overwrites=True, lists=lists, exact=exact))
    entries += [add(name, "style", loss, rows) for name, loss, rows in STYLES]
    return [entry for entry in entries if entry.loss != left_out]


def payload_lists(inputs: LossInputs) -> dict[str, tuple[Tensor, Tensor]]:
    """Return ids and teacher's log-probs of each payload's rows; where the loss needs the sampled token it is last."""
    own, student = (inputs.ids, inputs.logprobs), (inputs.student_ids, inputs.student_logprobs)
    token, repeats = (student[0][:, -1:], student[1][:, -1:]), _in_rows(student[0], own[0])
    others = student[0].masked_fill(repeats, NO_ID), student[1].masked_fill(repeats, -torch.inf)

    def join(more: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return torch.cat([own[0], more[0]], 1), torch.cat([own[1], more[1]], 1)

    joined = {"union": join(others), "topk, tail sampled": join(token)}
    return {"topk": own, "student_topk": student, "sampled": token, **joined}


def payload_rows(payload: str, options: dict[str, Any], logits: Tensor, ids: Tensor, logprobs: Tensor) -> Tensor:
    """Compute what a payload's rows are for: the reverse KL with a bucket, or k2 of the sampled token."""
    target, at_target = ids[:, -1], logprobs[:, -1]
    if payload == "sampled":
        return parallel_sampled_kl(logits, target, at_target, "k2", **options)[0]
    if payload == "topk, tail sampled":
        ids, logprobs = ids[:, :-1], logprobs[:, :-1]
        options = {**options, "tail": "sampled", "target": target, "target_logprobs": at_target}
    return parallel_topk_distill(logits, ids, logprobs, loss="reverse_kl", **options)[0]


def _lacks_triton(device: torch.device) -> str:
    if find_spec("triton") is None:
        return "triton is not installed"
    return "" if device.type == "cuda" else "needs a CUDA device: Triton's interpreter is no measure of time"


def _our_rows(loss: str, options: dict[str, Any], logits: Tensor, ids: Tensor, logprobs: Tensor) -> Tensor:
    return parallel_topk_distill(logits, ids, logprobs, tail=TAILS[loss], **options)[0]


def _picked(inputs: LossInputs) -> Tensor:
    """Return the rows whose gradient is checked."""
    count = inputs.logits.size(0)
    return torch.arange(0, count, max(1, count // CHECKED_ROWS), device=inputs.logits.device)[:CHECKED_ROWS]


def _error(inputs: LossInputs, exact_loss: Callable[[Tensor], Tensor], gradients: Sequence[Tensor]) -> float:
    picked = _picked(inputs)
    logits = inputs.untouched[picked.to(inputs.untouched.device)].to(picked.device)
    return error(exact_loss, gradients[0].detach()[picked], logits, inputs.upstream[picked])


def head_baseline(device: torch.device) -> str:
    """Name the way that is fastest where memory is plenty."""
    return f"GEMMs + {_layer(device)}, overwrite_input"


def _layer(device: torch.device) -> Literal["chunked", "triton"]:
    return "triton" if device.type == "cuda" else "chunked"


def head_contenders(inputs: HeadInputs) -> list[Contender]:
    """Make all contenders that take hidden states, the floor and the baseline first."""
    device, leaves, teacher = inputs.hidden.device, (inputs.hidden, inputs.weight), (inputs.ids, inputs.logprobs)

    def add(name: str, group: Any, loss: str, total: Callable[[], Tensor] | str, **more: Any) -> Contender:
        return Contender(name=name, group=group, loss=loss, forward=total, leaves=leaves, **more)

    def logits() -> Tensor:
        return inputs.hidden @ inputs.weight.T

    def materialised() -> Tensor:
        options: dict[str, Any] = {"loss_weight": inputs.weights, "reduce_loss": True, "overwrite_input": True}
        return parallel_topk_distill(logits(), *teacher, backend=_layer(device), **options)[0]

    def unfused() -> Tensor:
        return (eager(logits(), *teacher) * inputs.weights).sum()

    def liger(
        module: str, name: str, *arguments: Any, needs_cuda: bool = True, **options: Any
    ) -> Callable[[], Tensor] | str:
        if find_spec("liger_kernel") is None:
            return "liger-kernel is not installed"
        if needs_cuda and device.type == "cpu":
            return "needs a CUDA device"
        return lambda: getattr(importlib.import_module(f"liger_kernel.{module}"), name)(**options)(*arguments)

    upstream = torch.randn(len(inputs.hidden), len(inputs.weight), dtype=inputs.hidden.dtype, device=device)
    both, first = (*leaves, inputs.teacher_hidden, inputs.teacher_weight), inputs.ids[:, 0]
    weights = {"weight_hard_loss": 0.0, "weight_soft_loss": 1.0}
    jsd = liger("transformers.fused_linear_jsd", "LigerFusedLinearJSD", *both, None)
    chunked = liger("chunked_loss.jsd_loss", "LigerFusedLinearJSDLoss", *both, first, needs_cuda=False, **weights)
    return [
        add(FLOOR, "floor", "none", logits, upstream=upstream),
        add(head_baseline(device), "ours", "bucket", materialised),
        add("GEMMs + eager fp32 loss", "plain", "bucket", unfused),
        _fused(inputs),
        add("GEMMs of both + eager fp32 KL", "plain", "full KL", lambda: eager_full(inputs)),
        _fused_full(inputs),
        add("Liger fused-linear JSD", "released", "dense JSD", jsd),
        add("Liger chunked distillation", "released", "dense JSD", chunked),
    ]


def _fused(inputs: HeadInputs) -> Contender:
    """Make the contender ``linear_loss`` within a small budget; the weight gradient goes to an fp32 ``main_grad``, as
    in Megatron."""
    logits_bytes = inputs.hidden.size(0) * inputs.weight.size(0) * inputs.hidden.element_size()
    budget = max(logits_bytes // MEMORY_SHARE, 6 * inputs.hidden.numel())
    weight = inputs.weight.detach().requires_grad_()
    main_grad = torch.zeros_like(weight, dtype=torch.float32)
    weight.main_grad = main_grad  # type: ignore[attr-defined]

    def row_loss(logits: Tensor, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
        teacher = rows.of(inputs.ids), rows.of(inputs.logprobs)
        weights, overwrite = rows.of(inputs.weights), logits.requires_grad
        return parallel_topk_distill(logits, *teacher, loss_weight=weights, overwrite_input=overwrite)

    def total() -> Tensor:
        head = LinearHead()
        return linear_loss(inputs.hidden, weight, row_loss, head, head.rows_within(budget, inputs.hidden, weight))[0]

    made: dict[str, Any] = {"leaves": (inputs.hidden,), "restore": main_grad.zero_}
    made["note"] = _budget_note(budget, logits_bytes)
    return Contender(name="linear_loss", group="ours", loss="bucket", forward=total, **made)


def _budget_note(budget: int, logits_bytes: int) -> str:
    note = f"memory budget {budget / 2**20:.3g} MiB, 1 / {logits_bytes / budget:.3g} of the logits"
    return note + "; weight gradient added to an fp32 main_grad"


def eager_full(inputs: HeadInputs) -> Tensor:
    """Compute the KL of teacher and student over the whole vocabulary as one writes it first: all logits of both."""
    log_q = (inputs.teacher_hidden @ inputs.teacher_weight.T).float().log_softmax(1)
    log_p = (inputs.hidden @ inputs.weight.T).float().log_softmax(1)
    return ((log_q.exp() * (log_q - log_p)).sum(1) * inputs.weights).sum()


def _fused_full(inputs: HeadInputs) -> Contender:
    """Make the contender ``linear_full_distill``; budget and weight gradient as in ``_fused``."""
    columns, size = inputs.weight.size(0), inputs.hidden.element_size()
    logits_bytes, row_bytes = inputs.hidden.size(0) * columns * size, columns * (size + 4)
    budget = max(logits_bytes // FULL_SHARE, FULL_ROWS * row_bytes)
    weight = inputs.weight.detach().requires_grad_()
    main_grad = torch.zeros_like(weight, dtype=torch.float32)
    weight.main_grad = main_grad  # type: ignore[attr-defined]

    def total() -> Tensor:
        teacher = inputs.teacher_hidden, inputs.teacher_weight
        own = {"memory_budget": budget, "loss_weight": inputs.weights}
        return linear_full_distill(inputs.hidden, weight, *teacher, **own)[0]  # type: ignore[arg-type]

    made: dict[str, Any] = {"leaves": (inputs.hidden,), "restore": main_grad.zero_}
    made["note"] = _budget_note(budget, logits_bytes)
    return Contender(name="linear_full_distill", group="ours", loss="full KL", forward=total, **made)
