"""Who is measured on logits, all on the same tensors.

Shape legend: T rows, V columns, K ids of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from mopd.bench.losses import exact, released, styles
from mopd.bench.losses.inputs import LossInputs
from mopd.losses import parallel_topk_distill

Errors = dict[str, float]
Group = Literal["floor", "ours", "plain", "style", "released"]
BASELINE = "eager fp32 log-softmax + gather"
CHECKED_ROWS = 32
"""Rows, evenly spaced, whose gradient is compared with float64."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to get a loss and its gradient."""

    name: str
    group: Group
    loss: str
    """What is computed: times are comparable between equal losses."""
    forward: Callable[[], Tensor]
    leaves: Sequence[Tensor]
    upstream: Tensor | None
    """What backward starts from; None for a scalar loss."""
    restore: Callable[[], None] = lambda: None
    """Undoes what a run does to the inputs; outside the timed region."""
    overwrites: bool = False
    """The gradient lies in the logits' own memory."""
    check: Callable[[Sequence[Tensor]], Errors] | None = None
    """Gradients to errors against float64."""
    note: str = ""


@dataclass(frozen=True)
class Absent:
    """A contender that cannot run here, and why: it gets a row all the same."""

    name: str
    group: Group
    loss: str
    reason: str


Entry = Contender | Absent
RowLoss = Callable[[Tensor, Tensor, Tensor], Tensor]


def logits_contenders(inputs: LossInputs, *, collective: released.Collective) -> list[Entry]:
    """Everybody who takes logits, the plain baseline first."""
    k = inputs.ids.size(1)
    torch.compiler.reset()
    compiled = torch.compile(styles.eager, dynamic=False)
    entries: list[Entry] = [
        _entry(inputs, BASELINE, "plain", "bucket", styles.eager),
        _entry(inputs, "eager under torch.compile", "plain", "bucket", compiled),
        *ours(inputs),
        _entry(inputs, "ghost-token style", "style", "bucket", styles.ghost_token),
        _entry(inputs, "verl style", "style", "truncated", styles.verl),
        _entry(inputs, "verl style, diagnostics", "style", "truncated", styles.verl_with_diagnostics),
        _entry(inputs, "NeMo-RL style, full normalisation", "style", "renormalized teacher", styles.nemo_rl),
    ]
    if k > 1:  # at K = 1 the renormalised loss is constant
        entries.append(_entry(inputs, "NeMo-RL style, over K", "style", "renormalized", styles.eager_renormalized))
        return entries
    entries.append(_entry(inputs, "torch cross entropy", "plain", "cross entropy", styles.torch_cross_entropy))
    for package in released.cross_entropies(inputs.logits.device, collective):
        if isinstance(package.run, str):
            entries.append(Absent(package.name, "released", package.loss, package.run))
        else:
            entries.append(_entry(inputs, package.name, "released", package.loss, package.run, spoils=True))
    return entries


def ours(inputs: LossInputs) -> list[Entry]:
    """Every layer that can run on the device, with and without overwriting the logits."""
    entries: list[Entry] = []
    losses = ["bucket", "renormalized" if inputs.ids.size(1) > 1 else "cross entropy"]
    for backend in ("chunked", "triton"):
        reason = _why_not(backend, inputs.logits.device)
        for loss, overwrite in ((losses[0], False), (losses[0], True), (losses[1], True)):
            name = backend + (", overwrite_input" if overwrite else "")
            if reason is not None:
                entries.append(Absent(name, "ours", loss, reason))
                continue
            rows = _our_rows(backend, loss, overwrite)
            entries.append(_entry(inputs, name, "ours", loss, rows, spoils=overwrite, overwrites=overwrite))
    return entries


def _our_rows(backend: Literal["chunked", "triton"], loss: str, overwrite: bool) -> RowLoss:
    tail = {"bucket": "bucket", "renormalized": "renormalize", "cross entropy": "none"}[loss]

    def rows(logits: Tensor, ids: Tensor, logprobs: Tensor) -> Tensor:
        teacher = torch.zeros_like(logprobs) if loss == "cross entropy" else logprobs
        return parallel_topk_distill(logits, ids, teacher, tail=tail, backend=backend, overwrite_input=overwrite)[0]

    return rows


def _why_not(backend: str, device: torch.device) -> str | None:
    if backend != "triton":
        return None
    if find_spec("triton") is None:
        return "triton is not installed"
    return None if device.type == "cuda" else "needs a CUDA device: Triton's interpreter is no measure of time"


def _entry(
    inputs: LossInputs,
    name: str,
    group: Group,
    loss: str,
    rows: RowLoss,
    *,
    spoils: bool = False,
    overwrites: bool = False,
) -> Contender:
    def check(gradients: Sequence[Tensor]) -> Errors:
        count = inputs.logits.size(0)
        picked = torch.arange(0, count, max(1, count // CHECKED_ROWS))[:CHECKED_ROWS]
        logits = inputs.untouched[picked].to(inputs.logits.device)
        picked = picked.to(inputs.logits.device)
        part = (x[picked] for x in (inputs.ids, inputs.logprobs, inputs.upstream))
        return exact.errors(loss, gradients[0].detach()[picked], logits, *part)

    return Contender(
        name=name,
        group=group,
        loss=loss,
        forward=lambda: rows(inputs.logits, inputs.ids, inputs.logprobs),
        leaves=(inputs.logits,),
        upstream=inputs.upstream,
        restore=inputs.restore if spoils else (lambda: None),
        overwrites=overwrites,
        check=check,
    )
