"""Who is measured on logits, all on the same tensors.

Shape legend: T rows, V columns, K ids of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal

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
    forward: Callable[[], Tensor] | str
    """Or why it cannot run here: it gets a row all the same."""
    leaves: Sequence[Tensor]
    upstream: Tensor | None = None
    """What backward starts from; None for a scalar loss."""
    restore: Callable[[], object] = lambda: None
    """Undoes what a run does to the inputs; outside the timed region."""
    overwrites: bool = False
    """The gradient lies in the logits' own memory."""
    check: Callable[[Sequence[Tensor]], Errors] | None = None
    """Gradients to errors against float64."""
    note: str = ""


RowLoss = Callable[[Tensor, Tensor, Tensor], Tensor]


def logits_contenders(inputs: LossInputs) -> list[Contender]:
    """Everybody who takes logits, the plain baseline first."""
    torch.compiler.reset()
    compiled = torch.compile(styles.eager, dynamic=False)
    add = partial(_contender, inputs)
    entries = [
        add(BASELINE, "plain", "bucket", styles.eager),
        add("eager under torch.compile", "plain", "bucket", compiled),
        *_ours(inputs),
        add("ghost-token style", "style", "bucket", styles.ghost_token),
        add("verl style", "style", "truncated", styles.verl),
        add("verl style, diagnostics", "style", "truncated", styles.verl_with_diagnostics),
        add("NeMo-RL style, full normalisation", "style", "renormalized teacher", styles.nemo_rl),
    ]
    if inputs.ids.size(1) > 1:  # at K = 1 the renormalised loss is constant
        return [*entries, add("NeMo-RL style, over K", "style", "renormalized", styles.eager_renormalized)]
    entries.append(add("torch cross entropy", "plain", "cross entropy", styles.torch_cross_entropy))
    for name, rows in released.cross_entropies(inputs.logits.device).items():
        entries.append(add(name, "released", "cross entropy", rows, spoils=True))
    return entries


def _ours(inputs: LossInputs) -> Iterator[Contender]:
    """Every layer that can run on the device, with and without overwriting the logits."""
    second = "renormalized" if inputs.ids.size(1) > 1 else "cross entropy"
    needs = "triton is not installed" if find_spec("triton") is None else ""
    if not needs and inputs.logits.device.type != "cuda":
        needs = "needs a CUDA device: Triton's interpreter is no measure of time"
    for backend, reason in (("chunked", ""), ("triton", needs)):
        for loss, overwrite in (("bucket", False), ("bucket", True), (second, True)):
            name = backend + (", overwrite_input" if overwrite else "")
            rows = reason or partial(_our_rows, loss, backend=backend, overwrite_input=overwrite)
            yield _contender(inputs, name, "ours", loss, rows, spoils=overwrite, overwrites=overwrite)


def _our_rows(loss: str, logits: Tensor, ids: Tensor, logprobs: Tensor, **options: Any) -> Tensor:
    tail = {"bucket": "bucket", "renormalized": "renormalize", "cross entropy": "none"}[loss]
    teacher = torch.zeros_like(logprobs) if loss == "cross entropy" else logprobs
    return parallel_topk_distill(logits, ids, teacher, tail=tail, **options)[0]


def _contender(
    inputs: LossInputs,
    name: str,
    group: Group,
    loss: str,
    rows: RowLoss | str,
    *,
    spoils: bool = False,
    overwrites: bool = False,
) -> Contender:
    return Contender(
        name=name,
        group=group,
        loss=loss,
        forward=rows if isinstance(rows, str) else partial(rows, inputs.logits, inputs.ids, inputs.logprobs),
        leaves=(inputs.logits,),
        upstream=inputs.upstream,
        restore=inputs.restore if spoils else (lambda: None),
        overwrites=overwrites,
        check=partial(_errors, inputs, loss),
    )


def _errors(inputs: LossInputs, loss: str, gradients: Sequence[Tensor]) -> Errors:
    count = inputs.logits.size(0)
    picked = torch.arange(0, count, max(1, count // CHECKED_ROWS))[:CHECKED_ROWS]
    logits = inputs.untouched[picked].to(inputs.logits.device)
    picked = picked.to(inputs.logits.device)
    part = (x[picked] for x in (inputs.ids, inputs.logprobs, inputs.upstream))
    return exact.errors(loss, gradients[0].detach()[picked], logits, *part)
