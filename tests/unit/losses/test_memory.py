"""The chunked layer never makes a second tensor of the logits' size, besides the gradient where none is overwritten."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mopd.losses import parallel_entropy_and_topk_overlap, parallel_sampled_kl, parallel_topk_distill
from mopd.losses.chunked.blocks import BLOCK_ELEMENTS
from tests.parity.losses.triton_layer import DEVICE

ROWS, VOCAB, K = 96, 40_000, 16
BLOCK_BYTES = 4 * BLOCK_ELEMENTS


class LargeStorages(TorchDispatchMode):
    """Collects the storages above ``limit_bytes`` that operations return."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__()
        self.limit_bytes = limit_bytes
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().nbytes() > self.limit_bytes:
                self.seen.add(leaf.untyped_storage().data_ptr())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("layout", "overwrite"), [("flat", False), ("flat", True), ("transposed", False)])
@pytest.mark.parametrize("function", ["topk", "sampled"])
def test_no_second_logits_tensor(dtype: torch.dtype, overwrite: bool, function: str, layout: str) -> None:
    torch.manual_seed(0)
    z = torch.randn(8, ROWS // 8, VOCAB).to(dtype)
    logits = (z.transpose(0, 1) if layout == "transposed" else z).requires_grad_()
    rows = logits.shape[:-1]
    ids = torch.randint(0, VOCAB, (*rows, K))
    logq = torch.full((*rows, K), -5.0)
    weight = (torch.rand(rows) > 0.3).float()
    assert z.nbytes > 1.5 * BLOCK_BYTES  # else this test shows nothing
    with LargeStorages(BLOCK_BYTES) as storages:
        options = {"overwrite_input": overwrite, "loss_weight": weight}
        if function == "topk":
            loss, _ = parallel_topk_distill(logits, ids, logq, temperature=0.9, **options)  # type: ignore[arg-type]
        else:
            loss, _ = parallel_sampled_kl(logits, ids[..., 0], logq[..., 0], "k2", **options)  # type: ignore[arg-type]
        forward = storages.seen - {z.untyped_storage().data_ptr()}
        (gradient,) = torch.autograd.grad(loss.sum(), logits)
    assert not forward
    assert storages.seen - {z.untyped_storage().data_ptr()} <= {gradient.untyped_storage().data_ptr()}
    assert (gradient.data_ptr() == z.data_ptr()) == overwrite


def test_diagnostics_are_bounded() -> None:
    z = torch.randn(ROWS, VOCAB)
    ids = torch.randint(0, VOCAB, (ROWS, K))
    with LargeStorages(2 * BLOCK_BYTES) as storages:
        parallel_entropy_and_topk_overlap(z, ids)
    assert storages.seen <= {z.untyped_storage().data_ptr()}


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_triton_layer_makes_the_gradient_alone(overwrite: bool) -> None:
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
