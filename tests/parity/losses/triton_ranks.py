"""What one rank of the Triton layer's tensor-parallel test runs; a process of its own."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mopd.losses import parallel_gather_logprobs, parallel_sampled_kl, parallel_topk_distill
from tests.parity.losses.tp_ranks import VOCAB, borders, edge_cases, edge_problem, joined
from tests.parity.losses.tp_ranks import problem as larger_problem
from tests.parity.losses.triton_layer import to_device

FORMS = {
    "forward": {"loss": "forward_kl", "tail": "bucket", "with_entropy": True},
    "reverse": {"loss": "reverse_kl", "tail": "generalized"},
    "jsd": {"loss": "jsd", "tail": "bucket", "beta": 0.3},
    "conditional": {"loss": "reverse_kl", "tail": "renormalize"},
    "clamped": {"logprob_min_clamp": -3.0, "loss_soft_cap": 0.2},
}

EVENLY = ("forward", "gather", "k2")
"""What equal shards are tried with: a formula sees none of the shards, and unequal ones have them all."""


def problem() -> dict[str, Tensor]:
    """Six rows ``[2, 3]`` of the larger problem, with what can go wrong on a shard: see ``tp_ranks.problem``."""
    rows = torch.tensor([[[0, 0], [1, 1], [1, 2]], [[2, 3], [0, 1], [2, 0]]])
    return {name: value[rows[..., 0], rows[..., 1]] for name, value in larger_problem().items()}


def cases(
    shard: Tensor, data: dict[str, Tensor], backend: str, options: dict[str, Any], forms: Container[str] = FORMS
) -> dict[str, Tensor]:
    """Loss, gradient and metrics on one shard of the logits, two teachers wherever there can be."""
    data = {name: to_device(value) for name, value in data.items()}
    shared = {
        "loss_weight": data["weight"],
        "temperature": 1.3,
        "true_vocab_size": VOCAB,
        "backend": backend,
        **options,
    }
    two = {"teacher_ids": data["ids"], "teacher_logprobs": data["logq"], "teacher_weights": data["teacher_weights"]}
    results = {}
    for name, form in FORMS.items():
        if name not in forms:
            continue
        leaf = to_device(shard).clone().requires_grad_()
        loss, metrics = parallel_topk_distill(leaf, **two, **form, target=data["target"], **shared)
        loss.sum().backward()
        results |= {f"{name}/loss": loss.detach(), f"{name}/gradient": leaf.grad}
        results |= {f"{name}/{key}": value for key, value in metrics.items()}
    leaf = to_device(shard).clone().requires_grad_()
    logprobs, lse = parallel_gather_logprobs(leaf, data["ids"].flatten(2).int(), **shared)
    (torch.where(logprobs > -torch.inf, logprobs, 0).square().sum() + (3 * lse).sum()).backward()
    results |= {"gather/logprobs": logprobs.detach(), "gather/lse": lse.detach(), "gather/gradient": leaf.grad}
    leaf = to_device(shard).clone().requires_grad_()
    loss, _ = parallel_sampled_kl(leaf, data["target"], data["sampled"], "k2", **shared)
    loss.sum().backward()
    results |= {"k2/loss": loss.detach(), "k2/gradient": leaf.grad}
    return {name: value.cpu() for name, value in results.items() if value is not None}


def run_rank(rank: int, world_size: int, folder: str) -> None:
    """Compute this rank's shards: equal ones in a few forms, unequal ones in all."""
    data = problem()
    with joined(rank, world_size, folder) as results:
        for split in ("even", "uneven"):
            edges = borders(world_size, split == "even")
            low, high = edges[rank], edges[rank + 1]
            options: dict[str, Any] = {"dist_process_group": dist.group.WORLD}
            if split == "uneven":
                options["vocab_range"] = (low, high)
            shard = data["z"][..., low:high].contiguous()
            found = cases(shard, data, "triton", options, EVENLY if split == "even" else FORMS)
            results |= {f"{split}/{name}": value for name, value in found.items()}
        edge = {name: to_device(value) for name, value in edge_problem().items()}
        results |= edge_cases(edge["z"][:, low:high], edge, {**options, "backend": "triton"})
