"""The emulated devices themselves: apart from the CPU as GPUs are. ``tests/integration/test_emulated_gpu.py`` runs this
file on two of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

GPU, OTHER = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.mark.parametrize(
    "mix",
    [
        lambda gpu, cpu: gpu + cpu,
        lambda gpu, cpu: gpu @ cpu,
        lambda gpu, cpu: torch.cat((gpu, cpu)),
        lambda gpu, cpu: gpu.add_(cpu),
        lambda gpu, cpu: torch.where(cpu > 0, gpu, gpu),
        lambda gpu, cpu: gpu.gather(0, cpu.long()),
        lambda gpu, cpu: gpu + cpu.to(OTHER),
        lambda gpu, cpu: torch.rand(2, device=gpu.device, generator=torch.Generator()),
    ],
)
def test_devices_do_not_mix(mix: Callable[[Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(RuntimeError, match="same device"):
        mix(torch.ones(3, 3, device=GPU), torch.ones(3, 3))


def test_what_cuda_takes_from_the_host() -> None:
    """Numbers, and indices."""
    gpu = torch.arange(6.0, device=GPU).view(2, 3)
    assert (gpu + torch.tensor(1.0)).sum().item() == 21
    assert gpu[torch.tensor([1])].tolist() == [[3, 4, 5]]


def test_values_views_and_gradients() -> None:
    torch.manual_seed(0)
    plain = torch.randn(4, 6, requires_grad=True)
    gpu = plain.detach().to(GPU).requires_grad_()

    def loss(x: Tensor) -> Tensor:
        return (x[:, 1:4].t().softmax(0) ** 2).sum() + x.view(-1)[::5].cumsum(0)[-1]

    expected, found = loss(plain), loss(gpu)
    expected.backward(), found.backward()
    assert found.device == gpu.grad.device == GPU
    torch.testing.assert_close(found.cpu(), expected)
    torch.testing.assert_close(gpu.grad.cpu(), plain.grad)
    whole = torch.zeros(4, device=GPU)
    whole[1:3].fill_(2)
    torch.abs(whole - 3, out=(out := torch.empty(0, device=GPU)))
    assert whole.tolist() == [0, 2, 2, 0] and out.tolist() == [3, 1, 1, 3]


def test_a_thread_begins_on_the_first_device() -> None:
    seen: list[int] = []
    torch.cuda.set_device(OTHER)
    try:
        thread = threading.Thread(target=lambda: seen.append(torch.cuda.current_device()))
        thread.start()
        thread.join()
        assert torch.ones(1, device="cuda").device == OTHER and seen == [0]
    finally:
        torch.cuda.set_device(GPU)
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.cuda.set_device(torch.cuda.device_count())


def test_bytes_are_counted_by_device() -> None:
    torch.cuda.reset_peak_memory_stats(OTHER)
    before = torch.cuda.memory_allocated(OTHER)
    held = torch.ones(1000, device=OTHER)
    assert torch.cuda.memory_allocated(OTHER) - before == held.nbytes
    del held
    assert torch.cuda.memory_allocated(OTHER) == before
    assert torch.cuda.max_memory_allocated(OTHER) - before == 4000


def test_generators_draw_and_go_back() -> None:
    generator = torch.Generator(GPU).manual_seed(3)
    state = generator.get_state()
    drawn = torch.randn(5, device=GPU, generator=generator)
    generator.set_state(state)
    assert torch.equal(drawn, torch.randn(5, device=GPU, generator=generator))


def test_checkpoints_keep_the_device(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(3, device=OTHER)}, tmp_path / "a.pt")
    assert torch.load(tmp_path / "a.pt", weights_only=True)["a"].device == OTHER
    assert torch.load(tmp_path / "a.pt", weights_only=True, map_location="cpu")["a"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("window", [None, 2])
def test_packed_attention_is_its_definition(window: int | None) -> None:
    """Forward and backward, beside torch's own of one sequence in fp32."""
    torch.manual_seed(0)
    parts = [torch.randn(10, heads, 16).bfloat16() for heads in (4, 2, 2)]
    on_gpu = [x.to(GPU).requires_grad_() for x in parts]
    plain = [x.float().requires_grad_() for x in parts]
    grad = torch.randn(10, 4, 16).bfloat16()
    starts = torch.tensor([0, 4, 10], dtype=torch.int32, device=GPU)
    found: Any = varlen_attn(
        *on_gpu, starts, starts, 6, 6, window_size=(-1 if window is None else window, 0), enable_gqa=True
    )
    found.backward(grad.to(GPU))
    outs = []
    for first, end in ((0, 4), (4, 10)):
        at = torch.arange(end - first)
        behind = at[:, None] - at
        mask = (behind >= 0) & (behind <= (end if window is None else window))
        q, k, v = (x[first:end].transpose(0, 1)[None] for x in plain)
        outs.append(scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1))
    torch.cat(outs).backward(grad.float())
    # bf16 keeps 8 bits: a rounding of numbers about 4 errs by up to 2^-6.
    torch.testing.assert_close(found.cpu().float(), torch.cat(outs), rtol=2e-2, atol=2e-2)
    for one, other in zip(on_gpu, plain, strict=True):
        torch.testing.assert_close(one.grad.cpu().float(), other.grad, rtol=2e-2, atol=2e-2)


def test_packed_attention_refuses_what_the_kernel_does() -> None:
    starts = torch.tensor([0, 4], dtype=torch.int32, device=GPU)
    for dtype, width in ((torch.float32, 16), (torch.bfloat16, 12)):
        q = torch.zeros(4, 2, width, dtype=dtype, device=GPU)
        with pytest.raises(RuntimeError, match="FlashAttention"):
            varlen_attn(q, q, q, starts, starts, 4, 4, window_size=(-1, 0))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("world")
def test_nccl_takes_tensors_of_gpus() -> None:
    gpu = torch.ones(3, device=GPU)
    dist.all_reduce(gpu)
    dist.all_reduce(torch.ones(3), group=dist.new_group(backend="gloo"))
    assert gpu.tolist() == [1, 1, 1]
    told: list[Any] = [{"a": 1}]
    dist.broadcast_object_list(told)
    for group in (None, dist.new_group()):
        with pytest.raises(RuntimeError, match="device type cpu"):
            dist.all_reduce(torch.ones(3), group=group)
    with pytest.raises(ValueError, match="contiguous"):
        dist.broadcast(torch.ones(3, 3, device=GPU).t(), 0)
