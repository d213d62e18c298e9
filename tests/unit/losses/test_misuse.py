"""Wrong calls: each names the argument, the values and what to pass."""

from __future__ import annotations

import os
import subprocess
import sys
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
from mopd.losses.api import resolve_layer
from mopd.losses.call import MOST_IDS
from tests.parity.losses.triton_layer import DEVICE, to_device

Z = torch.linspace(-1, 1, 40).view(4, 10)
IDS = torch.tensor([[0, 1, 2]]).expand(4, 3).contiguous()
LOGQ = torch.tensor([[0.5, 0.2, 0.1]]).log().expand(4, 3).contiguous()
TARGET, TEACHER = torch.tensor([0, 1, 2, 3]), torch.full((4,), -1.0)
in_both_layers = pytest.mark.parametrize("backend", ["chunked", "triton"])


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
        ({"entry_max_clamp": 0.0}, "entry_max_clamp is 0.0"),
        ({"loss_soft_cap": 1.0, "loss_max_clamp": 1.0}, "keep one"),
        ({"loss_weight": torch.ones(3)}, r"loss_weight is torch.float32 \[3\]"),
        ({"loss_weight": torch.ones(4, dtype=torch.bool)}, "loss_weight is torch.bool"),
        ({"target": torch.zeros(4)}, "target is torch.float32"),
        ({"backend": "cuda"}, "backend is 'cuda'"),
        ({"backend": "reference", "overwrite_input": True}, "'reference' has no"),
        ({"inp": Z.t().contiguous().t(), "overwrite_input": True}, "overwrite_input needs contiguous"),
        ({"inp": Z.double(), "backend": "triton"}, r"backend is 'triton' and inp is torch.float64"),
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


@in_both_layers
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
def test_values_are_checked_on_request(change: dict[str, Any], message: str, backend: str) -> None:
    given = {"inp": Z, "teacher_ids": IDS, "teacher_logprobs": LOGQ, **change}
    arguments = {"backend": backend, **{name: to_device(value) for name, value in given.items()}}
    with pytest.raises(ValueError, match=message):
        parallel_topk_distill(check_values=True, **arguments)
    parallel_topk_distill(**arguments)
    padding = torch.tensor([1.0, 1, 0, 0]).to(DEVICE)  # rows of weight 0 may hold anything
    parallel_topk_distill(check_values=True, loss_weight=padding, **arguments)


def test_sampled_functions() -> None:
    target, teacher = TARGET, TEACHER
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


CALLS: dict[str, Any] = {
    "topk": lambda x, **options: parallel_topk_distill(x, to_device(IDS), to_device(LOGQ), **options),
    "gather": lambda x, **options: parallel_gather_logprobs(x, to_device(IDS), **options),
    "sampled": lambda x, **options: parallel_sampled_kl(x, to_device(TARGET), to_device(TEACHER), "k2", **options),
}


@in_both_layers
@pytest.mark.parametrize("function", CALLS)
def test_backward_after_overwriting(function: str, backend: str) -> None:
    """A second one is refused, and another graph that needs the overwritten logits fails instead of using the gradient
    in their place."""
    leaf = Z.to(DEVICE).clone().requires_grad_()
    logits = leaf * 1
    other = logits.square().sum()
    loss = CALLS[function](logits, overwrite_input=True, backend=backend)[0].sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="overwrite_input=True"):
        loss.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


@in_both_layers
def test_backward_without_overwriting(backend: str) -> None:
    """A second one gives the same; logits that were changed in between are noticed."""
    leaf = Z.to(DEVICE).clone().requires_grad_()
    logits = leaf * 1
    loss = CALLS["topk"](logits, backend=backend)[0].sum()
    first, again = (torch.autograd.grad(loss, leaf, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, again)
    with torch.no_grad():
        logits.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_too_many_ids_are_refused_by_name_and_left_to_chunked_otherwise() -> None:
    vocab, k = MOST_IDS + 10, MOST_IDS + 1
    z, ids = torch.zeros(1, vocab, device=DEVICE), torch.arange(k, device=DEVICE)[None]
    logq = torch.full((1, k), -20.0, device=DEVICE)
    with pytest.raises(ValueError, match=f"a row holds {k} ids of 1 teachers: at most {MOST_IDS} ids fit"):
        parallel_topk_distill(z, ids, logq, backend="triton")
    teachers = 64
    many = ids[:, :32].expand(teachers, -1).unsqueeze(0)
    with pytest.raises(ValueError, match="a row holds 2048 ids of 64 teachers: at most 1024 ids fit"):
        options = {"teacher_weights": torch.ones(1, teachers, device=DEVICE)}
        parallel_topk_distill(z, many, torch.full(many.shape, -9.0, device=DEVICE), backend="triton", **options)
    with pytest.raises(ValueError, match="ids of 1 teachers: at most"):
        parallel_gather_logprobs(z, ids, backend="triton")
    loss, _ = parallel_topk_distill(z, ids, logq)
    torch.testing.assert_close(loss, parallel_topk_distill(z, ids, logq, backend="chunked")[0])


def test_auto_takes_triton_on_cuda_only() -> None:
    assert resolve_layer("auto", torch.zeros(1)) == "chunked"
    assert resolve_layer("auto", Z.to(DEVICE)) == ("triton" if DEVICE.type == "cuda" else "chunked")
    assert resolve_layer("auto", Z.to(DEVICE).double()) == "chunked"
    assert resolve_layer("chunked", Z) == "chunked"


def test_without_the_interpreter_cpu_tensors_are_refused() -> None:
    code = (
        "import torch; from mopd.losses import parallel_topk_distill as f\n"
        "z, ids = torch.zeros(1, 4), torch.zeros(1, 1, dtype=torch.long)\n"
        "f(z, ids, -torch.ones(1, 1)); import sys; assert 'triton.language' not in sys.modules\n"
        "try:\n    f(z, ids, -torch.ones(1, 1), backend='triton')\n"
        "except ValueError as error:\n    print(error)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert "inp is on cpu: set 'chunked', or TRITON_INTERPRET=1" in done.stdout, done.stderr
