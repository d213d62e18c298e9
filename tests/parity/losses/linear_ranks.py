"""What one rank of the fused-head test runs; started as a process of its own by ``test_linear_ranks.py``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.parity.losses.definitions import teacher_topk
from tests.parity.losses.linear_topk import linear_topk, with_main_grad
from tests.parity.losses.tp_ranks import joined
from tests.parity.losses.triton_layer import to_device

PADDED_VOCAB = 72
VOCAB = 70
HIDDEN = 10
ROWS = (8, 3)
AT_ONCE = (None, 7)
"""Rows whose logits exist at a time: all, or a few, of which the last ones are fewer."""


def problem() -> dict[str, Tensor]:
    """One batch with rows of weight 0; the same on all ranks."""
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(*ROWS, HIDDEN, generator=generator, dtype=torch.float64)
    weight = torch.randn(PADDED_VOCAB, HIDDEN, generator=generator, dtype=torch.float64)
    noise = torch.randn(*ROWS, VOCAB, generator=generator)
    ids, logq = teacher_topk((hidden @ weight.t())[..., :VOCAB] + noise, 6)
    loss_weight = torch.rand(ROWS, generator=generator)
    loss_weight[0] = 0  # with sequence parallelism this empties part of the first rank's share only
    loss_weight[5, 1] = 0
    target = torch.randint(0, VOCAB, ROWS, generator=generator)
    return {"hidden": hidden, "weight": weight, "ids": ids, "logq": logq, "loss_weight": loss_weight, "target": target}


def run_case(
    rank: int, world_size: int, data: dict[str, Tensor], *, into_main_grad: bool = False, **options: Any
) -> dict[str, Tensor]:
    """Loss, metrics and gradients of one rank's share."""
    hidden = data["hidden"]
    if options["sequence_parallel"]:
        hidden = hidden.chunk(world_size)[rank]
    on_device = options.get("backend") == "triton"  # gloo sums CUDA tensors, and gathers none
    data = {name: to_device(value) if on_device else value for name, value in data.items()}
    hidden = (to_device(hidden) if on_device else hidden).clone().requires_grad_()
    weight = with_main_grad(data["weight"].chunk(world_size)[rank])
    if not into_main_grad:
        weight = torch.nn.Parameter(weight.detach())
    loss, metrics = linear_topk(
        hidden,
        weight,
        data["ids"],
        data["logq"],
        loss_weight=data["loss_weight"],
        target=data["target"],
        true_vocab_size=VOCAB,
        temperature=1.2,
        with_entropy=True,
        **options,
    )
    loss.backward()
    assert hidden.grad is not None
    grad = weight.main_grad if into_main_grad else weight.grad  # type: ignore[attr-defined]
    result = {f"metric/{name}": value for name, value in metrics.items()}
    result |= {"loss": loss.detach(), "grad/hidden": hidden.grad, "grad/weight": grad}
    return {name: value.cpu() for name, value in result.items()}


def run_rank(rank: int, world_size: int, folder: str) -> None:
    """Compute every case on this rank's part of vocabulary and sequence."""
    data = problem()
    single = {name: value.float() if value.dtype == torch.float64 else value for name, value in data.items()}
    with joined(rank, world_size, folder) as results:
        for at_once in AT_ONCE:
            shared: dict[str, Any] = {"group": dist.group.WORLD, "rows_at_once": at_once}
            for sequence_parallel in (False, True):
                name = f"{at_once}/{'sp' if sequence_parallel else 'tp'}"
                options = {**shared, "sequence_parallel": sequence_parallel}
                results[name] = run_case(rank, world_size, data, **options)
                results[f"{name}/main_grad"] = run_case(rank, world_size, data, into_main_grad=True, **options)
            options = {**shared, "sequence_parallel": False, "backend": "triton"}
            results[f"{at_once}/triton"] = run_case(rank, world_size, single, **options)
