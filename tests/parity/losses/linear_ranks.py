"""What one rank of the fused-head test runs; started as a process of its own by ``test_linear_ranks.py``."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mopd.losses import linear_topk_distill
from tests.parity.losses.definitions import teacher_topk
from tests.parity.losses.triton_layer import to_device

PADDED_VOCAB = 72
VOCAB = 70
HIDDEN = 10
ROWS = (8, 3)
UNEVEN = {2: [0, 27, 72], 4: [0, 9, 40, 41, 72]}
"""Shard borders of the case with unequal shards."""
STRATEGIES = ("materialize", "token_chunks", "vocab_slices")
BUDGET = {2: 12_000, 4: 9_000}
"""Bytes by number of ranks: enough for a few rows, or columns, beside the gradients."""


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


def run_case(rank: int, data: dict[str, Tensor], edges: list[int], **options: Any) -> dict[str, Tensor]:
    """Loss, metrics and gradients of one rank's share."""
    sequence_parallel, to_main_grad = options["sequence_parallel"], options.get("gradient_accumulation_fusion", False)
    hidden = data["hidden"]
    if sequence_parallel:
        hidden = hidden.chunk(len(edges) - 1)[rank]
    on_device = options.get("backend") == "triton"  # gloo sums CUDA tensors, and gathers none
    data = {name: to_device(value) if on_device else value for name, value in data.items()}
    hidden = (to_device(hidden) if on_device else hidden).clone().requires_grad_()
    weight = torch.nn.Parameter(data["weight"][edges[rank] : edges[rank + 1]].clone())
    weight.main_grad = torch.zeros_like(weight)  # type: ignore[attr-defined]
    loss, metrics = linear_topk_distill(
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
    loss.sum().backward()
    assert hidden.grad is not None
    grad = weight.main_grad if to_main_grad else weight.grad  # type: ignore[attr-defined]
    result = {f"metric/{name}": value for name, value in metrics.items()}
    result |= {"loss": loss.detach().sum(), "grad/hidden": hidden.grad, "grad/weight": grad}
    return {name: value.cpu() for name, value in result.items()}


def run_rank(rank: int, world_size: int, folder: str) -> None:
    """Joins the group, computes every case and saves the results."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), world_size)
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    data, results = problem(), {}
    step = PADDED_VOCAB // world_size
    even = list(range(0, PADDED_VOCAB + 1, step))
    shared: dict[str, Any] = {"dist_process_group": dist.group.WORLD, "memory_budget": BUDGET[world_size]}
    for strategy in STRATEGIES:
        for sequence_parallel in (False, True):
            name = f"{strategy}/{'sp' if sequence_parallel else 'tp'}"
            options = {**shared, "strategy": strategy, "reduce_loss": True, "sequence_parallel": sequence_parallel}
            results[name] = run_case(rank, data, even, **options)
            fused = {"gradient_accumulation_fusion": True, "unit_upstream": True}
            results[f"{name}/main_grad"] = run_case(rank, data, even, **options, **fused)
        edges = UNEVEN[world_size]
        options = {**shared, "strategy": strategy, "reduce_loss": True, "sequence_parallel": False}
        options["vocab_range"] = (edges[rank], edges[rank + 1])
        results[f"{strategy}/uneven"] = run_case(rank, data, edges, **options)
        single = {name: value.float() if value.dtype == torch.float64 else value for name, value in data.items()}
        results[f"{strategy}/triton"] = run_case(rank, single, edges, **options, backend="triton")
    torch.save(results, Path(folder) / f"rank{rank}.pt")
    dist.destroy_process_group()
