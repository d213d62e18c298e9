"""Contenders on logits, and from hidden states on (LM head and loss together), all on the same tensors.

Released packages are loaded by name and only here: nothing of mopd depends on them. Shape legend: T rows, V columns,
K ids of a row, H hidden width.
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

from mopd.bench.losses import exact, styles
from mopd.bench.losses.inputs import HeadInputs, LossInputs
from mopd.losses import LinearHead, linear_loss, parallel_topk_distill
from mopd.losses.linear.head import Rows

BASELINE, COMPILED = "eager fp32 log-softmax + gather", "eager under torch.compile"
FLOOR = "the three GEMMs alone"
CHECKED_ROWS = 32
"""Rows, evenly spaced, whose gradient is compared with float64."""
MEMORY_SHARE = 10
"""``linear_loss`` gets 1 / this of the memory of the logits."""
RowLoss = Callable[[Tensor, Tensor, Tensor], Tensor]
STYLES: tuple[tuple[str, str, RowLoss], ...] = (
    ("ghost-token style", "bucket", styles.ghost_token),
    ("verl style", "truncated", styles.verl),
    ("verl style, diagnostics", "truncated", styles.verl_with_diagnostics),
    ("NeMo-RL style, full normalisation", "renormalized teacher", styles.nemo_rl),
    ("NeMo-RL style, over K", "renormalized", styles.eager_renormalized),
    ("torch cross entropy", "cross entropy", styles.torch_cross_entropy),
)


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to get a loss and its gradient."""

    name: str
    group: Literal["floor", "ours", "plain", "style", "released"]
    loss: str
    """Name of what is computed: times are comparable between equal losses."""
    forward: Callable[[], Tensor] | str
    """Or why it cannot run here: it gets a row all the same."""
    leaves: Sequence[Tensor]
    upstream: Tensor | None = None
    """Gradient that backward starts from; None for a scalar loss."""
    restore: Callable[[], object] = lambda: None
    """Undoes what a run does to the inputs; outside the timed region."""
    overwrites: bool = False
    """The gradient lies in the logits' own memory."""
    check: Callable[[Sequence[Tensor]], float] | None = None
    """Gradients to their error against float64."""
    note: str = ""


def logits_contenders(inputs: LossInputs) -> list[Contender]:
    """Everybody who takes logits, the plain baseline first."""

    def add(name: str, group: Any, loss: str, rows: RowLoss | str, *, overwrites: bool = False) -> Contender:
        return Contender(
            name=name,
            group=group,
            loss=loss,
            forward=rows if isinstance(rows, str) else partial(rows, inputs.logits, inputs.ids, inputs.logprobs),
            leaves=(inputs.logits,),
            upstream=inputs.upstream,
            restore=inputs.restore if overwrites else (lambda: None),
            overwrites=overwrites,
            check=partial(_error, inputs, loss),
        )

    torch.compiler.reset()
    compiled = torch.compile(styles.eager, dynamic=False)
    second, left_out = "renormalized", "cross entropy"
    if inputs.ids.size(1) == 1:  # then the renormalised loss is constant
        second, left_out = left_out, second
    entries = [add(BASELINE, "plain", "bucket", styles.eager), add(COMPILED, "plain", "bucket", compiled)]
    for backend, reason in (("chunked", ""), ("triton", _lacks_triton(inputs.logits.device))):
        for loss, overwrites in (("bucket", False), ("bucket", True), (second, True)):
            rows = reason or partial(_our_rows, loss, {"backend": backend, "overwrite_input": overwrites})
            name = backend + (", overwrite_input" if overwrites else "")
            entries.append(add(name, "ours", loss, rows, overwrites=overwrites))
    return entries + [add(name, "style", loss, rows) for name, loss, rows in STYLES if loss != left_out]


def _lacks_triton(device: torch.device) -> str:
    if find_spec("triton") is None:
        return "triton is not installed"
    return "" if device.type == "cuda" else "needs a CUDA device: Triton's interpreter is no measure of time"


def _our_rows(loss: str, options: dict[str, Any], logits: Tensor, ids: Tensor, logprobs: Tensor) -> Tensor:
    tail = {"bucket": "bucket", "renormalized": "renormalize", "cross entropy": "none"}[loss]
    teacher = torch.zeros_like(logprobs) if loss == "cross entropy" else logprobs
    return parallel_topk_distill(logits, ids, teacher, tail=tail, **options)[0]


def _error(inputs: LossInputs, loss: str, gradients: Sequence[Tensor]) -> float:
    count = inputs.logits.size(0)
    picked = torch.arange(0, count, max(1, count // CHECKED_ROWS))[:CHECKED_ROWS]
    logits = inputs.untouched[picked].to(inputs.logits.device)
    picked = picked.to(inputs.logits.device)
    part = (x[picked] for x in (inputs.ids, inputs.logprobs, inputs.upstream))
    return exact.error(loss, gradients[0].detach()[picked], logits, *part)


def head_baseline(device: torch.device) -> str:
    """The way that is fastest where memory is plenty."""
    return f"GEMMs + {_layer(device)}, overwrite_input"


def _layer(device: torch.device) -> Literal["chunked", "triton"]:
    return "triton" if device.type == "cuda" else "chunked"


def head_contenders(inputs: HeadInputs) -> list[Contender]:
    """Everybody who takes hidden states, the floor and the baseline first."""
    device, leaves, teacher = inputs.hidden.device, (inputs.hidden, inputs.weight), (inputs.ids, inputs.logprobs)

    def add(name: str, group: Any, loss: str, total: Callable[[], Tensor] | str, **more: Any) -> Contender:
        return Contender(name=name, group=group, loss=loss, forward=total, leaves=leaves, **more)

    def logits() -> Tensor:
        return inputs.hidden @ inputs.weight.T

    def materialised() -> Tensor:
        options: dict[str, Any] = {"loss_weight": inputs.weights, "reduce_loss": True, "overwrite_input": True}
        return parallel_topk_distill(logits(), *teacher, backend=_layer(device), **options)[0]

    def eager() -> Tensor:
        return (styles.eager(logits(), *teacher) * inputs.weights).sum()

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
    entropy = liger("transformers.fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyLoss", *leaves[::-1], first)
    jsd = liger("transformers.fused_linear_jsd", "LigerFusedLinearJSD", *both, None)
    chunked = liger("chunked_loss.jsd_loss", "LigerFusedLinearJSDLoss", *both, first, needs_cuda=False, **weights)
    return [
        add(FLOOR, "floor", "none", logits, upstream=upstream),
        add(head_baseline(device), "ours", "bucket", materialised),
        add("GEMMs + eager fp32 loss", "plain", "bucket", eager),
        _fused(inputs, "bucket"),
        _fused(inputs, "cross entropy"),
        add("Liger fused-linear cross entropy", "released", "cross entropy", entropy),
        add("Liger fused-linear JSD", "released", "dense JSD", jsd),
        add("Liger chunked distillation", "released", "dense JSD", chunked),
    ]


def _fused(inputs: HeadInputs, loss: str) -> Contender:
    """``linear_loss`` within a small budget; the weight gradient goes to an fp32 ``main_grad``, as in Megatron."""
    logits_bytes = inputs.hidden.size(0) * inputs.weight.size(0) * inputs.hidden.element_size()
    budget = max(logits_bytes // MEMORY_SHARE, 6 * inputs.hidden.numel())
    weight = inputs.weight.detach().requires_grad_()
    main_grad = torch.zeros_like(weight, dtype=torch.float32)
    weight.main_grad = main_grad  # type: ignore[attr-defined]
    ids, logprobs, tail = inputs.ids, inputs.logprobs, "bucket"
    if loss == "cross entropy":
        ids, logprobs, tail = ids[:, :1], torch.zeros_like(logprobs[:, :1]), "none"

    def row_loss(logits: Tensor, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
        teacher = rows.of(ids), rows.of(logprobs)
        weights, overwrite = rows.of(inputs.weights), logits.requires_grad
        return parallel_topk_distill(logits, *teacher, tail=tail, loss_weight=weights, overwrite_input=overwrite)

    def total() -> Tensor:
        head = LinearHead()
        return linear_loss(inputs.hidden, weight, row_loss, head, head.rows_within(budget, inputs.hidden, weight))[0]

    note = f"memory budget {budget / 2**20:.3g} MiB, 1 / {logits_bytes / budget:.3g} of the logits"
    note += "; weight gradient added to an fp32 main_grad"
    restore, leaves = main_grad.zero_, (inputs.hidden,)
    return Contender(
        name="linear_loss", group="ours", loss=loss, forward=total, leaves=leaves, restore=restore, note=note
    )
