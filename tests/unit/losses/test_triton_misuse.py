"""Wrong calls of the Triton layer, what it refuses to serve, and that nothing of the logits' size is made."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mopd.losses import parallel_gather_logprobs, parallel_sampled_kl, parallel_topk_distill
from mopd.losses.api import resolve_layer
from mopd.losses.call import MOST_IDS
from tests.parity.losses.triton_layer import DEVICE

Z = torch.linspace(-1, 1, 40).view(4, 10).to(DEVICE)
IDS = torch.tensor([[0, 1, 2]]).expand(4, 3).contiguous().to(DEVICE)
LOGQ = torch.tensor([[0.5, 0.2, 0.1]]).log().expand(4, 3).contiguous().to(DEVICE)
TARGET, TEACHER = torch.tensor([0, 1, 2, 3]).to(DEVICE), torch.full((4,), -1.0).to(DEVICE)


def overwriting_calls() -> list[Any]:
    options: dict[str, Any] = {"overwrite_input": True, "backend": "triton"}
    return [
        lambda x: parallel_topk_distill(x, IDS, LOGQ, **options)[0].sum(),
        lambda x: parallel_gather_logprobs(x, IDS, **options)[0].sum(),
        lambda x: parallel_sampled_kl(x, TARGET, TEACHER, "k2", **options)[0].sum(),
    ]


@pytest.mark.parametrize("call", overwriting_calls())
def test_second_backward_after_overwriting(call: Any) -> None:
    leaf = Z.clone().requires_grad_()
    loss = call(leaf * 1)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="overwrite_input=True"):
        loss.backward()


@pytest.mark.parametrize("call", overwriting_calls())
def test_others_who_saved_the_logits_are_told(call: Any) -> None:
    leaf = Z.clone().requires_grad_()
    logits = leaf * 1
    other = logits.square().sum()
    call(logits).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


def test_logits_changed_before_backward_are_noticed() -> None:
    leaf = Z.clone().requires_grad_()
    logits = leaf * 1
    loss = parallel_topk_distill(logits, IDS, LOGQ, backend="triton")[0].sum()
    with torch.no_grad():
        logits.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_second_backward_without_overwriting_is_fine() -> None:
    leaf = Z.clone().requires_grad_()
    loss = parallel_topk_distill(leaf, IDS, LOGQ, backend="triton")[0].sum()
    first = torch.autograd.grad(loss, leaf, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(loss, leaf)[0], first)


def spoiled(tensor: Tensor, value: float) -> Tensor:
    tensor = tensor.clone()
    tensor[2, 1] = value
    return tensor


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inp": Z.double()}, r"backend is 'triton' and inp is torch.float64"),
        ({"inp": Z.t().contiguous().t(), "overwrite_input": True}, "overwrite_input needs contiguous"),
        ({"teacher_ids": IDS[:, :2]}, r"teacher_ids is \[4, 2\] and teacher_logprobs \[4, 3\]"),
        ({"teacher_ids": spoiled(IDS, -1)}, "teacher_ids holds -1"),
        ({"teacher_ids": spoiled(IDS, 0)}, "one id twice"),
        ({"teacher_logprobs": spoiled(LOGQ, torch.nan)}, "teacher_logprobs holds nan"),
        ({"teacher_logprobs": spoiled(LOGQ, -0.5)}, "mass of 1.2"),
        ({"target": torch.tensor([0, 0, 0, 10]).to(DEVICE)}, "target holds 10"),
    ],
)
def test_bad_arguments(change: dict[str, Any], message: str) -> None:
    arguments = {"inp": Z, "teacher_ids": IDS, "teacher_logprobs": LOGQ, **change}
    with pytest.raises(ValueError, match=message):
        parallel_topk_distill(**arguments, backend="triton", check_values=True)


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
    assert resolve_layer("auto", Z) == ("triton" if Z.is_cuda else "chunked")
    assert resolve_layer("auto", Z.double()) == "chunked"
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


class LargeStorages(TorchDispatchMode):
    """Collects the storages above ``limit_bytes`` that operations return."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__()
        self.limit_bytes, self.seen = limit_bytes, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().nbytes() > self.limit_bytes:
                self.seen.add(leaf.untyped_storage().data_ptr())
        return result


@pytest.mark.parametrize("overwrite", [False, True])
def test_only_the_gradient_has_the_size_of_the_logits(overwrite: bool) -> None:
    rows, vocab, k = 4, 4096, 8
    logits = torch.randn(2, rows // 2, vocab, device=DEVICE).bfloat16().requires_grad_()
    ids = torch.randint(0, vocab, (2, rows // 2, k), device=DEVICE, dtype=torch.int32)
    logq = torch.full(ids.shape, -5.0, device=DEVICE)
    own = logits.untyped_storage().data_ptr()
    with LargeStorages(rows * vocab // 4) as storages:
        options: dict[str, Any] = {"overwrite_input": overwrite, "backend": "triton"}
        loss, _ = parallel_topk_distill(logits, ids, logq, with_entropy=True, **options)
        assert storages.seen <= {own}
        (gradient,) = torch.autograd.grad(loss.sum(), logits)
    assert storages.seen <= {own, gradient.untyped_storage().data_ptr()}
    assert (gradient.data_ptr() == logits.data_ptr()) == overwrite
