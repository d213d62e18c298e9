"""What one rank of the full-vocabulary test runs; started as a process of its own by ``test_full_ranks.py``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from mopd.losses import LinearHead, choose_rows, linear_full_distill
from tests.parity.losses.linear_topk import with_main_grad
from tests.parity.losses.tp_ranks import joined

VOCAB, PADDED_VOCAB = 50, 72
"""With four ranks the last one has padding alone, the one before part of it."""
HIDDEN, TEACHER_HIDDEN = 6, 9
ROWS = (8, 3)
TEMPERATURE = 1.3
FORMS: dict[str, dict[str, Any]] = {
    "forward_kl": {"loss": "forward_kl"},
    "reverse_kl": {"loss": "reverse_kl"},
    "jsd": {"loss": "jsd", "beta": 0.3},
    "skewed_forward_kl": {"loss": "forward_kl", "skew": 0.2},
    "skewed_reverse_kl": {"loss": "reverse_kl", "skew": 0.2},
}
WITH_TASK = {f"{form}+task": FORMS[form] for form in ("forward_kl", "jsd", "skewed_reverse_kl")}
"""Forms beside a policy gradient of the sampled token."""
CASES = FORMS | WITH_TASK
TASK_WEIGHT, CORRECTION = 0.7, ("icepop", 0.5, 2.0)
ON_TRITON = ("forward_kl", "jsd+task")
"""What the Triton layer, whose interpreter is slow, is tried with: one all-gather, and two."""
BUDGETS = {"all": 10**6, "few": 5500}
"""Bytes for logits and gradients: enough for all rows, and for a few."""


def problem(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """One batch with rows of weight 0; the same on all ranks."""
    generator = torch.Generator().manual_seed(4)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    hidden, weight = draw(*ROWS, HIDDEN), draw(PADDED_VOCAB, HIDDEN)
    # Nearly the student's columns in its first states: a teacher that the student partly agrees with.
    teacher_weight = torch.cat([weight + 0.3 * draw(*weight.shape), 0.5 * draw(PADDED_VOCAB, 3)], 1)
    teacher_hidden = torch.cat([hidden, draw(*ROWS, 3)], -1)
    loss_weight = torch.rand(ROWS, generator=generator)
    loss_weight[0] = 0  # under sequence parallelism this empties part of the first rank's share only
    loss_weight[5, 1] = 0
    target = torch.randint(0, VOCAB, ROWS, generator=generator)
    floats = {"hidden": hidden, "weight": weight, "teacher_hidden": teacher_hidden, "teacher_weight": teacher_weight}
    logits = hidden @ weight.t() / TEMPERATURE
    own = logits[..., :VOCAB].log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1)
    floats |= {"task_advantage": draw(*ROWS), "rollout_logprobs": own - 0.6 * draw(*ROWS)}
    return {**{name: x.to(dtype) for name, x in floats.items()}, "loss_weight": loss_weight, "target": target}


def task_options(data: dict[str, Tensor], form: str) -> dict[str, Any]:
    """Arguments of the policy gradient, where the form has one."""
    if form not in WITH_TASK:
        return {}
    rows = {name: data[name] for name in ("task_advantage", "rollout_logprobs")}
    return {**rows, "task_reward_weight": TASK_WEIGHT, "correction": CORRECTION}


def run_case(
    data: dict[str, Tensor],
    form: str,
    budget: int,
    group: dist.ProcessGroup | None,
    sequence_parallel: bool,
    **options: Any,
) -> dict[str, Tensor]:
    """Loss, metrics and gradients of one rank's share."""
    rank, world_size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    hidden = data["hidden"].chunk(world_size)[rank] if sequence_parallel else data["hidden"]
    hidden = hidden.clone().requires_grad_()
    weight = with_main_grad(data["weight"].chunk(world_size)[rank])
    loss, metrics = linear_full_distill(
        hidden,
        weight,
        data["teacher_hidden"],
        data["teacher_weight"].chunk(world_size)[rank],
        memory_budget=budget,
        head=LinearHead(group, sequence_parallel, choose_rows(data["loss_weight"] != 0)),
        target=data["target"],
        loss_weight=data["loss_weight"],
        true_vocab_size=VOCAB,
        temperature=TEMPERATURE,
        **CASES[form],
        **task_options(data, form),
        **options,
    )
    loss.backward()
    assert hidden.grad is not None
    result = {f"metric/{name}": value for name, value in metrics.items()}
    return result | {"loss": loss.detach(), "grad/hidden": hidden.grad, "grad/weight": weight.main_grad}  # type: ignore[attr-defined, dict-item]


def numbers_gathered(run: Callable[[], object]) -> Tensor:
    """Numbers a row of each all-gather that ``run`` makes."""
    real, found = dist.all_gather_into_tensor, list[int]()

    def counted(output: Tensor, own: Tensor, **options: Any) -> Any:
        found.append(own.size(1))
        return real(output, own, **options)

    with mock.patch.object(dist, "all_gather_into_tensor", counted):
        run()
    return torch.tensor(found)


def run_rank(rank: int, world_size: int, folder: str) -> None:
    """Compute every case on this rank's part of vocabulary and sequence."""
    data, single = problem(), problem(torch.float32)
    with joined(rank, world_size, folder) as results:
        for form in ON_TRITON:
            found = run_case(single, form, BUDGETS["all"], dist.group.WORLD, False, backend="triton")
            results[f"{form}/all/triton"] = found  # type: ignore[assignment]
        for form in CASES:
            case = partial(run_case, data, form, BUDGETS["all"], dist.group.WORLD, False)
            results[f"{form}/gathered"] = numbers_gathered(case)
            for name, budget in BUDGETS.items():
                for sequence_parallel in (False, True):
                    found = run_case(data, form, budget, dist.group.WORLD, sequence_parallel)
                    results[f"{form}/{name}/{'sp' if sequence_parallel else 'tp'}"] = found  # type: ignore[assignment]
