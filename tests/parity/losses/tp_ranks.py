"""What one rank of the tensor-parallel test runs; started as a process of its own by ``test_tensor_parallel.py``."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from mopd.losses import (
    parallel_entropy_and_topk_overlap,
    parallel_gather_logprobs,
    parallel_policy_gradient,
    parallel_sampled_kl,
    parallel_topk_distill,
)
from tests.parity.losses.definitions import teacher_topk
from tests.parity.losses.triton_layer import to_device

PADDED_VOCAB = 104
VOCAB = 101
UNEVEN = {1: [0, 104], 2: [0, 37, 104], 4: [0, 13, 14, 90, 104]}
"""Shard borders of the case with unequal shards."""
ROWS = (3, 4)
ON_TRITON = (
    *("forward_kl/bucket/two", "reverse_kl/generalized/two", "jsd/bucket/two", "reverse_kl/renormalize/two"),
    *("clamped", "k2", "gather"),
)
"""The cases for the Triton layer, whose interpreter is slow."""
EVENLY_ON_TRITON = ("forward_kl/bucket/two", "k2", "gather")
"""What equal shards are tried with there: a formula sees none of the shards, and unequal ones have them all."""


def problem() -> dict[str, Tensor]:
    """One batch [S, B, V] with everything that could go wrong on a shard; the same on all ranks."""
    generator = torch.Generator().manual_seed(11)
    z = torch.randn(*ROWS, PADDED_VOCAB, generator=generator) * 3
    teachers = z.unsqueeze(2)[..., :VOCAB] + torch.randn(*ROWS, 2, VOCAB, generator=generator)
    ids, logq = teacher_topk(teachers, 6)
    order = torch.tensor([2, 40, 41, 60])
    ids[0, 0], logq[0, 0] = order[:1] + torch.arange(6), logq[0, 0].sort(descending=True).values  # all on shard 0
    logq[1, 1, 0, 5] = -torch.inf
    z[2, 3, 20:80] = -torch.inf  # whole shards without mass
    ids[2, 3], logq[2, 3] = torch.arange(6), torch.full((6,), 0.1).log()
    z[..., VOCAB:] = 30.0  # padding must not count
    weight = torch.rand(*ROWS, generator=generator) + 0.1
    weight[1, 2] = 0
    target = torch.randint(0, 20, ROWS, generator=generator)
    return {
        "z": z,
        "ids": ids,
        "logq": logq,
        "teacher_weights": torch.rand(*ROWS, 2, generator=generator),
        "weight": weight,
        "target": target,
        "advantage": torch.randn(ROWS, generator=generator),
        "sampled": torch.log_softmax(z[..., :VOCAB] * 0.9, -1).gather(-1, target.unsqueeze(-1)).squeeze(-1),
    }


def small_problem() -> dict[str, Tensor]:
    """Six rows ``[2, 3]`` of it for the Triton layer, with what can go wrong on a shard; the third has no weight."""
    rows = torch.tensor([[[0, 0], [1, 1], [1, 2]], [[2, 3], [0, 1], [2, 0]]])
    return {name: to_device(value[rows[..., 0], rows[..., 1]]) for name, value in problem().items()}


def cases(
    shard: Tensor, data: dict[str, Tensor], options: dict[str, Any], names: Container[str] = ()
) -> dict[str, Tensor]:
    """Loss and gradient of every function, or of the named ones, on one shard of the logits."""
    shared = {"loss_weight": data["weight"], "temperature": 1.3, "true_vocab_size": VOCAB, **options}
    one = {"teacher_ids": data["ids"][..., 0, :], "teacher_logprobs": data["logq"][..., 0, :]}
    two = {"teacher_ids": data["ids"], "teacher_logprobs": data["logq"], "teacher_weights": data["teacher_weights"]}
    calls: dict[str, Any] = {}
    for loss in ("forward_kl", "reverse_kl", "jsd"):
        for tail in ("bucket", "generalized", "renormalize", "none"):
            kind = {"loss": loss, "tail": tail, "beta": 0.3}
            calls[f"{loss}/{tail}"] = lambda x, kind=kind: parallel_topk_distill(x, **one, **kind, **shared)
            calls[f"{loss}/{tail}/two"] = lambda x, kind=kind: parallel_topk_distill(x, **two, **kind, **shared)
    clamped = {
        "logprob_min_clamp": -3.0,
        "loss_soft_cap": 0.2,
        "entry_max_clamp": 0.05,
        "with_entropy": True,
        "target": data["target"],
    }
    calls["clamped"] = lambda x: parallel_topk_distill(x, **two, **clamped, **shared)
    tail = {"loss": "reverse_kl", "tail": "sampled", "target": data["target"], "target_logprobs": data["sampled"] - 0.5}
    calls["sampled_tail"] = lambda x: parallel_topk_distill(x, **one, **tail, **shared)
    task = {"target": data["target"], "task_advantage": data["advantage"], "task_reward_weight": 0.5}
    task |= {"rollout_logprobs": data["sampled"], "correction": ("icepop", 0.5, 2.0)}
    for name, given in (("one", one), ("two", two)):
        calls[f"task/{name}"] = lambda x, given=given: parallel_topk_distill(x, **given, **task, **shared)
    for estimator in ("k2", "k3", "k3_reverse"):
        calls[estimator] = lambda x, e=estimator: parallel_sampled_kl(x, data["target"], data["sampled"], e, **shared)
    calls["policy_gradient"] = lambda x: parallel_policy_gradient(x, data["target"], data["sampled"], **shared)
    for name, given in (("kl", one), ("kl/two", two)):
        topk = {key.replace("teacher", "topk"): value for key, value in given.items()}
        calls[f"policy_gradient/{name}"] = lambda x, topk=topk: parallel_policy_gradient(
            x, data["target"], data["sampled"], **topk, **shared
        )
    results = {}
    for name, call in calls.items():
        if names and name not in names:
            continue
        leaf = shard.clone().requires_grad_()
        loss, metrics = call(leaf)
        loss.sum().backward()
        results |= {f"{name}/loss": loss.detach(), f"{name}/gradient": leaf.grad}
        results |= {f"{name}/metric/{key}": value for key, value in metrics.items()}
    leaf = shard.clone().requires_grad_()
    logprobs, lse = parallel_gather_logprobs(leaf, data["ids"].flatten(2).int(), **shared)
    (logprobs.square().sum() + (3 * lse).sum()).backward()
    results |= {"gather/logprobs": logprobs.detach(), "gather/lse": lse.detach(), "gather/gradient": leaf.grad}
    if not names:
        ids = data["ids"][..., 0, :].int()
        results["entropy"], results["overlap"] = parallel_entropy_and_topk_overlap(shard, ids, **shared)
    return {name: value.cpu() for name, value in results.items() if value is not None}


def edge_problem() -> dict[str, Tensor]:
    """Five rows [T, V]: clean, NaN on the first shard, +inf on the last, NaN in the padding, and all of the student's
    mass on one shard, e^120 above the rest."""
    generator = torch.Generator().manual_seed(12)
    z = torch.randn(5, PADDED_VOCAB, generator=generator)
    z[:, VOCAB:] = 3.0
    z[1, 5], z[2, VOCAB - 1], z[3, VOCAB:] = torch.nan, torch.inf, torch.nan
    z[4, :3] += 120
    ids = torch.tensor([[0, 1, 2], [0, 1, 50]]).expand(5, 2, 3).clone()
    logq = torch.tensor([0.3, 0.2, 0.1]).log().expand(5, 2, 3).clone()
    return {"z": z, "ids": ids, "logq": logq, "target": ids[:, 0, 1], "sampled": logq[:, 0, 1]}


def edge_cases(shard: Tensor, data: dict[str, Tensor], options: dict[str, Any]) -> dict[str, Tensor]:
    """Loss and gradient where a row is not finite on some shard, or has no tail that fp32 could tell."""
    shared = {"true_vocab_size": VOCAB, **options}
    teachers = {"teacher_ids": data["ids"], "teacher_logprobs": data["logq"], "teacher_weights": torch.ones(5, 2)}
    teachers = {name: value.to(shard.device) for name, value in teachers.items()}
    results = {}
    for form in (("forward_kl", "bucket"), ("reverse_kl", "generalized"), ("jsd", "renormalize"), None):
        leaf = shard.clone().requires_grad_()
        if form is None:
            loss, _ = parallel_sampled_kl(leaf, data["target"], data["sampled"], "k2", **shared)
        else:
            loss, _ = parallel_topk_distill(leaf, **teachers, loss=form[0], tail=form[1], **shared)
        loss.sum().backward()
        results |= {f"edge/{form}/loss": loss.detach(), f"edge/{form}/gradient": leaf.grad}
    return {name: value.cpu() for name, value in results.items() if value is not None}


def borders(world_size: int, even: bool) -> list[int]:
    step = PADDED_VOCAB // world_size
    return list(range(0, PADDED_VOCAB + 1, step)) if even else UNEVEN[world_size]


@contextmanager
def joined(rank: int, world_size: int, folder: str) -> Iterator[dict[str, Tensor]]:
    """Join the group and save what the block leaves in the dict. gloo carries CUDA tensors too."""
    torch.set_num_threads(1)
    store, timeout = dist.FileStore(str(Path(folder) / "store"), world_size), datetime.timedelta(seconds=600)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    results: dict[str, Tensor] = {}
    yield results
    torch.save(results, Path(folder) / f"rank{rank}.pt")
    dist.destroy_process_group()


def spawn(run_rank: Callable[[int, int, str], None], world_size: int, folder: Path) -> list[Any]:
    """Run every rank in a process of its own and return what they saved."""
    mp.spawn(run_rank, args=(world_size, str(folder)), nprocs=world_size)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(world_size)]


def run_rank(rank: int, world_size: int, folder: str, *, on_triton: bool = False) -> None:
    """Compute this rank's shards in every case."""
    data = small_problem() if on_triton else problem()
    edge = {name: to_device(value) if on_triton else value for name, value in edge_problem().items()}
    with joined(rank, world_size, folder) as results:
        for split in ("even", "uneven"):
            edges = borders(world_size, split == "even")
            low, high = edges[rank], edges[rank + 1]
            options: dict[str, Any] = {"dist_process_group": dist.group.WORLD}
            names: Container[str] = ()
            if split == "uneven":
                options["vocab_range"] = (low, high)
            if on_triton:
                options["backend"] = "triton"
                names = EVENLY_ON_TRITON if split == "even" else ON_TRITON
            found = cases(data["z"][..., low:high].contiguous(), data, options, names)
            if split == "uneven" or not on_triton:
                found |= edge_cases(edge["z"][:, low:high], edge, options)
            results |= {f"{split}/{name}": value for name, value in found.items()}
