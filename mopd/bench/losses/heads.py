"""Who is measured from hidden states on: LM head and loss together.

Shape legend: T rows, V vocabulary, K ids of a row, H hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from mopd.bench.losses import exact, released, styles
from mopd.bench.losses.contenders import CHECKED_ROWS, Contender, Errors, Group
from mopd.bench.losses.inputs import HeadInputs
from mopd.losses import LinearHead, linear_loss, parallel_topk_distill
from mopd.losses.linear.head import Rows

FLOOR = "the three GEMMs alone"
CHECKED_IDS = 256
"""Rows of the weight gradient that are compared with float64."""


def baseline(device: torch.device) -> str:
    """The way that is fastest where memory is plenty."""
    return f"GEMMs + {_layer(device)}, overwrite_input"


def _layer(device: torch.device) -> Literal["chunked", "triton"]:
    return "triton" if device.type == "cuda" else "chunked"


class Truth:
    """Gradients in float64 of a few rows of the hidden states and of the weight; each loss is worked out once."""

    def __init__(self, inputs: HeadInputs) -> None:
        self._inputs = inputs
        count, vocab = inputs.hidden.size(0), inputs.weight.size(0)
        device = inputs.hidden.device
        self.rows = torch.arange(0, count, max(1, count // CHECKED_ROWS), device=device)[:CHECKED_ROWS]
        spaced = torch.arange(0, vocab, max(1, 2 * vocab // CHECKED_IDS), device=device)
        self.ids = torch.cat([spaced, inputs.ids[:, 0]])[:CHECKED_IDS]
        self._known: dict[str, tuple[Tensor, Tensor]] = {}

    def errors(self, loss: str, gradients: Sequence[Tensor]) -> Errors:
        """||got - exact|| / ||exact|| of d / d hidden and d / d weight."""
        if loss not in self._known:
            self._known[loss] = self._work_out(loss)
        hidden, weight = self._known[loss]
        got = gradients[0].detach()[self.rows].double(), gradients[1].detach()[self.ids].double()
        return {
            "hidden": float((got[0] - hidden).norm() / hidden.norm()),
            "weight": float((got[1] - weight).norm() / weight.norm()),
        }

    @torch.no_grad()
    def _work_out(self, loss: str) -> tuple[Tensor, Tensor]:
        inputs = self._inputs
        weight = inputs.weight.detach().double()
        of_weight = weight.new_zeros(len(self.ids), weight.size(1))
        of_hidden = weight.new_zeros(len(self.rows), weight.size(1))
        for low in range(0, inputs.hidden.size(0), CHECKED_ROWS):
            part = slice(low, low + CHECKED_ROWS)
            hidden = inputs.hidden.detach()[part].double()
            ids, logprobs = inputs.ids[part], inputs.logprobs[part]
            with torch.enable_grad():
                gradient = exact.gradient(loss, hidden @ weight.T, ids, logprobs, inputs.weights[part])
            of_weight += gradient[:, self.ids].T @ hidden
            mine = ((self.rows >= low) & (self.rows < low + CHECKED_ROWS)).nonzero().flatten()
            of_hidden[mine] = gradient[self.rows[mine] - low] @ weight
        return of_hidden, of_weight


def head_contenders(inputs: HeadInputs) -> list[Contender]:
    """Everybody who takes hidden states, the floor and the baseline first."""
    truth, device = Truth(inputs), inputs.hidden.device
    student, teacher = (inputs.hidden, inputs.weight), (inputs.ids, inputs.logprobs)

    def add(name: str, group: Group, loss: str, total: Callable[[], Tensor] | str) -> Contender:
        check = partial(truth.errors, loss) if loss in exact.DEFINITIONS else None
        return Contender(name=name, group=group, loss=loss, forward=total, leaves=student, check=check)

    def logits() -> Tensor:
        return inputs.hidden @ inputs.weight.T

    def materialised() -> Tensor:
        options: dict[str, Any] = {"loss_weight": inputs.weights, "reduce_loss": True, "overwrite_input": True}
        return parallel_topk_distill(logits(), *teacher, backend=_layer(device), **options)[0]

    def eager() -> Tensor:
        return (styles.eager(logits(), *teacher) * inputs.weights).sum()

    shape = inputs.hidden.size(0), inputs.weight.size(0)
    upstream = torch.randn(shape, dtype=inputs.hidden.dtype, device=device)
    return [
        replace(add(FLOOR, "floor", "none", logits), upstream=upstream),
        add(baseline(device), "ours", "bucket", materialised),
        add("GEMMs + eager fp32 loss", "plain", "bucket", eager),
        _fused(inputs, truth, "bucket"),
        _fused(inputs, truth, "cross entropy"),
        *(add(name, "released", loss, total) for name, loss, total in released.heads(inputs)),
    ]


def _fused(inputs: HeadInputs, truth: Truth, loss: str) -> Contender:
    """``linear_loss`` within a small budget; the weight gradient goes to an fp32 ``main_grad``, as in Megatron."""
    logits_bytes = inputs.hidden.size(0) * inputs.weight.size(0) * inputs.hidden.element_size()
    budget = max(logits_bytes // released.MEMORY_SHARE, 6 * inputs.hidden.numel())
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
    return Contender(
        name="linear_loss",
        group="ours",
        loss=loss,
        forward=total,
        leaves=(inputs.hidden,),
        restore=main_grad.zero_,
        check=lambda gradients: truth.errors(loss, (*gradients, main_grad)),
        note=f"{note}; weight gradient added to an fp32 main_grad",
    )
