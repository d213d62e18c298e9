"""Wrong calls: each names the argument, the values and what to pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mopd.losses import (
    parallel_entropy_and_topk_overlap,
    parallel_gather_logprobs,
    parallel_policy_gradient,
    parallel_sampled_kl,
    parallel_topk_distill,
)

Z = torch.linspace(-1, 1, 40).view(4, 10)
IDS = torch.tensor([[0, 1, 2]]).expand(4, 3).contiguous()
LOGQ = torch.tensor([[0.5, 0.2, 0.1]]).log().expand(4, 3).contiguous()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inp": Z[0]}, r"inp is torch.float32 \[10\]"),
        ({"inp": Z.int()}, r"inp is torch.int32"),
        ({"inp": Z[:, :0]}, r"inp is torch.float32 \[4, 0\]"),
        ({"teacher_ids": IDS[:3]}, r"teacher_ids is torch.int64 \[3\]|teacher_ids is .*\[3, 3\]"),
        ({"teacher_ids": IDS.float()}, "teacher_ids is torch.float32"),
        ({"teacher_ids": IDS[:, 0]}, r"teacher_ids is \[4\]"),
        ({"teacher_ids": IDS[:, :2]}, r"teacher_ids is \[4, 2\] and teacher_logprobs \[4, 3\]"),
        ({"teacher_ids": IDS[:, :0], "teacher_logprobs": LOGQ[:, :0]}, "K must be at least 1"),
        (
            {"teacher_ids": IDS[:, None, None], "teacher_logprobs": LOGQ[:, None, None]},
            r"teacher_ids is \[4, 1, 1, 3\]",
        ),
        ({"teacher_logprobs": LOGQ.bfloat16()}, "teacher_logprobs is torch.bfloat16"),
        ({"inp": Z[:, :2]}, "K must lie between 1 and the vocabulary size 2"),
        ({"true_vocab_size": 2}, "vocabulary size 2"),
        ({"true_vocab_size": 11}, "true_vocab_size is 11 but the shards hold 10"),
        ({"vocab_range": (0, 9)}, r"vocab_range is \(0, 9\) but inp has 10 columns"),
        ({"vocab_range": (10, 20)}, "on a single rank"),
        (
            {"teacher_ids": IDS[:, None].expand(4, 2, 3), "teacher_logprobs": LOGQ[:, None].expand(4, 2, 3)},
            "teacher_weights",
        ),
        ({"teacher_weights": torch.ones(4, 2)}, r"teacher_weights is torch.float32 \[4, 2\]"),
        ({"loss": "kl"}, "loss is 'kl'"),
        ({"tail": "ghost"}, "tail is 'ghost'"),
        ({"beta": 1.5}, "beta is 1.5"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"logprob_min_clamp": 0.5}, "logprob_min_clamp is 0.5"),
        ({"loss_max_clamp": 0.0}, "loss_max_clamp is 0.0"),
        ({"loss_soft_cap": -1.0}, "loss_soft_cap is -1.0"),
        ({"loss_soft_cap": 1.0, "loss_max_clamp": 1.0}, "keep one"),
        ({"loss_weight": torch.ones(3)}, r"loss_weight is torch.float32 \[3\]"),
        ({"loss_weight": torch.ones(4, dtype=torch.bool)}, "loss_weight is torch.bool"),
        ({"target": torch.zeros(4)}, "target is torch.float32"),
        ({"backend": "cuda"}, "backend is 'cuda'"),
        ({"backend": "reference", "overwrite_input": True}, "'reference' has no"),
        ({"inp": Z.t().contiguous().t(), "overwrite_input": True}, "overwrite_input needs contiguous"),
    ],
)
def test_shapes_types_and_options(change: dict[str, Any], message: str) -> None:
    arguments = {"inp": Z, "teacher_ids": IDS, "teacher_logprobs": LOGQ, **change}
    with pytest.raises(ValueError, match=message) as error:
        parallel_topk_distill(**arguments)
    assert "\n" not in str(error.value)


def spoiled(tensor: Tensor, value: float) -> Tensor:
    tensor = tensor.clone()
    tensor[2, 1] = value
    return tensor


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"teacher_ids": spoiled(IDS, -1)}, "teacher_ids holds -1"),
        ({"teacher_ids": spoiled(IDS, 0)}, "one id twice"),
        ({"teacher_logprobs": spoiled(LOGQ, torch.nan)}, "teacher_logprobs holds nan"),
        ({"teacher_logprobs": spoiled(LOGQ, torch.inf)}, "teacher_logprobs holds inf"),
        ({"teacher_logprobs": spoiled(LOGQ, -0.5)}, "mass of 1.2"),
        ({"target": torch.tensor([0, 0, 0, 10])}, "target holds 10"),
    ],
)
def test_values_are_checked_on_request(change: dict[str, Any], message: str) -> None:
    arguments = {"inp": Z, "teacher_ids": IDS, "teacher_logprobs": LOGQ, **change}
    with pytest.raises(ValueError, match=message):
        parallel_topk_distill(check_values=True, **arguments)
    parallel_topk_distill(**arguments)
    padding = torch.tensor([1.0, 1, 0, 0])  # rows of weight 0 may hold anything
    parallel_topk_distill(check_values=True, loss_weight=padding, **arguments)


def test_sampled_functions() -> None:
    target, teacher = torch.tensor([0, 1, 2, 3]), torch.full((4,), -1.0)
    with pytest.raises(ValueError, match=r"target is torch.int64 \[3\]"):
        parallel_sampled_kl(Z, target[:3], teacher, "k2")
    with pytest.raises(ValueError, match=r"teacher_logprobs is torch\.float16"):
        parallel_policy_gradient(Z, target, teacher.half())
    with pytest.raises(ValueError, match="estimator is 'k4'"):
        parallel_sampled_kl(Z, target, teacher, "k4")
    with pytest.raises(ValueError, match="target holds 3"):
        parallel_sampled_kl(Z, target, teacher, "k2", true_vocab_size=3, check_values=True)
    with pytest.raises(ValueError, match="teacher_logprobs holds nan"):
        parallel_sampled_kl(Z, target, teacher * torch.nan, "k2", check_values=True)
    with pytest.raises(ValueError, match=r"ids is \[4, 3, 1\]"):
        parallel_gather_logprobs(Z, IDS.unsqueeze(-1))
    with pytest.raises(ValueError, match=r"teacher_ids is \[4, 12\]"):
        parallel_entropy_and_topk_overlap(Z, torch.zeros(4, 12, dtype=torch.long))


def overwriting_calls() -> list[Any]:
    target, teacher = torch.tensor([0, 1, 2, 3]), torch.full((4,), -1.0)
    return [
        lambda x: parallel_topk_distill(x, IDS, LOGQ, overwrite_input=True)[0].sum(),
        lambda x: parallel_gather_logprobs(x, IDS, overwrite_input=True)[0].sum(),
        lambda x: parallel_sampled_kl(x, target, teacher, "k2", overwrite_input=True)[0].sum(),
    ]


@pytest.mark.parametrize("call", overwriting_calls())
def test_second_backward_after_overwriting(call: Any) -> None:
    leaf = Z.clone().requires_grad_()
    loss = call(leaf * 1)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="overwrite_input=True"):
        loss.backward()


def test_second_backward_without_overwriting_is_fine() -> None:
    leaf = Z.clone().requires_grad_()
    loss = parallel_topk_distill(leaf, IDS, LOGQ)[0].sum()
    first = torch.autograd.grad(loss, leaf, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(loss, leaf)[0], first)


@pytest.mark.parametrize("call", overwriting_calls())
def test_others_who_saved_the_logits_are_told(call: Any) -> None:
    """Another graph that needs the overwritten logits fails instead of using the gradient in their place."""
    leaf = Z.clone().requires_grad_()
    logits = leaf * 1
    other = logits.square().sum()
    call(logits).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


def test_logits_changed_before_backward_are_noticed() -> None:
    leaf = Z.clone().requires_grad_()
    logits = leaf * 1
    loss = parallel_topk_distill(logits, IDS, LOGQ)[0].sum()
    with torch.no_grad():
        logits.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
