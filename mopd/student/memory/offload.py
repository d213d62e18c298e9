"""Adam's states and main weights in host memory, and the optimizer step over them there.

Used instead of Megatron 0.16.1's ``HybridDeviceOptimizer``, which also leaves the fp32 main weights on the device
unless TransformerEngine's optimizer keeps them, moves nothing that is not on CUDA, puts classes into checkpoints, and
creates the states that a checkpoint is read into by a step with random gradients.

Here the distributed optimizer's own lists hold some of their main weights as ``HostWeights``: Megatron fills in their
gradients, clips, saves, loads and copies them to the model like all others. Only the inner optimizer's step differs: it
sees the weights on the device alone, and torch's fused Adam steps the rest on the host.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.tensor_parallel import copy_tensor_model_parallel_attributes
from torch import Tensor
from torch.optim.adamw import adamw
from torch.overrides import TorchFunctionMode

BATCH_NUMEL = 2**24
"""Elements of gradient that are copied to the host together, at least one tensor: 64 MiB."""


class HostWeights(Tensor):
    """fp32 main weights in host memory. Their ``grad`` is a plain attribute: it stays on the device until the step."""

    grad: Tensor | None = None
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


@contextmanager
def main_weights_on_host() -> Iterator[None]:
    """Make fp32 copies of bf16 weights in host memory while an optimizer is created inside this block: the device might
    not hold all of them at once before any is moved. ``offload`` then puts each where it belongs."""
    with _FloatOnHost():
        yield


class _FloatOnHost(TorchFunctionMode):
    """Mode in which ``float()`` of a bf16 tensor returns a host tensor; Megatron makes main weights by that call."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float and args[0].dtype == torch.bfloat16:
            return args[0].cpu().float()
        return func(*args, **(kwargs or {}))


def offload(optimizer: ChainedOptimizer, fraction: float) -> None:
    """Keep at least ``fraction`` of each part's states in host memory, exceeding it as little as whole tensors allow.
    The parts are distributed optimizers that have no states yet."""
    for part in optimizer.chained_optimizers:
        if not part.is_stub_optimizer:
            hosted = _place(part, fraction)
            part.optimizer.step = HostStep(part.optimizer, hosted, part.buffers[0].grad_data.device)


def choose(sizes: Sequence[int], fraction: float) -> set[int]:
    """Return the indices of the tensors that go to the host: the largest that fit into the fraction, then the smallest
    of the others to cover what is left of it."""
    left, chosen = math.ceil(fraction * sum(sizes)), set[int]()
    places = sorted(range(len(sizes)), key=lambda place: -sizes[place])
    for place in places:
        if sizes[place] <= left:
            chosen.add(place)
            left -= sizes[place]
    if left:
        chosen.add(min(set(places) - chosen, key=lambda place: sizes[place]))
    return chosen


@torch.no_grad()
def _place(part: Any, fraction: float) -> list[list[HostWeights]]:
    """Replace main weights in the lists of a distributed optimizer; return those on the host by parameter group."""
    device = part.buffers[0].grad_data.device
    lists = list(zip(part.shard_fp32_groups, part.shard_fp32_from_float16_groups, strict=True))
    every = [main for pair in lists for mains in pair for main in mains]
    chosen = choose([main.numel() for main in every], fraction)
    placed: dict[Tensor, Tensor] = {}
    for place, main in enumerate(every):
        if place in chosen:
            placed[main] = _on_host(main)
        elif main.device != device:
            main.data = main.data.to(device)
    for group, pair in zip(part.optimizer.param_groups, lists, strict=True):
        for mains in pair:
            mains[:] = [placed.get(main, main) for main in mains]
        group["params"][:] = [*pair[0], *pair[1]]  # in place: Megatron holds the list elsewhere too
    for models, mains in zip(part.model_float16_groups, part.shard_fp32_from_float16_groups, strict=True):
        for model, main in zip(models, mains, strict=True):
            model.main_param = main  # Megatron's second handle, which would keep the device's copy alive
    groups = [group["params"] for group in part.optimizer.param_groups]
    return [[main for main in group if isinstance(main, HostWeights)] for group in groups]


def _on_host(main: Tensor) -> HostWeights:
    """Return a copy in host memory with the attributes that Megatron reads, never the model's own storage."""
    copied = torch.empty(main.shape, dtype=torch.float32, device="cpu").copy_(main)
    own: HostWeights = Tensor._make_subclass(HostWeights, copied)
    copy_tensor_model_parallel_attributes(own, main)
    if hasattr(main, "shared"):
        own.shared = main.shared  # type: ignore[attr-defined]
    return own


class HostStep:
    """Replacement for the ``step`` of an Adam some of whose weights are ``HostWeights``."""

    def __init__(self, inner: torch.optim.Optimizer, hosted: Sequence[Sequence[HostWeights]], device: torch.device):
        """``hosted``: weights in host memory by parameter group. Two buffers of host memory (pinned with CUDA)
        alternate: while gradients arrive in one, the step reads the other."""
        self._inner = inner
        self._step = inner.step
        largest = max((weights.numel() for group in hosted for weights in group), default=0)
        self._batches = [
            (number, batch) for number, group in enumerate(hosted) for batch in _cut(group, max(largest, BATCH_NUMEL))
        ]
        size = max((sum(weights.numel() for weights in batch) for _, batch in self._batches), default=0)
        self._has_cuda = device.type == "cuda"
        self._buffers = [torch.empty(size, pin_memory=self._has_cuda) for _ in range(min(2, len(self._batches)))]

    @torch.no_grad()
    def __call__(self) -> None:
        """Run one step and consume the gradients of the host's weights."""
        grads = {}
        for _, batch in self._batches:
            for weights in batch:
                assert weights.grad is not None
                grads[weights], weights.grad = weights.grad, None  # the inner optimizer passes over those without
        self._step()
        # Double buffering: the next batch's gradients are copied while the host steps over this batch.
        arriving = self._send(0, grads) if self._batches else None
        for turn, (number, batch) in enumerate(self._batches):
            assert arriving is not None
            (arrived, event), arriving = arriving, None
            if turn + 1 < len(self._batches):
                arriving = self._send(turn + 1, grads)
            if event is not None:
                event.synchronize()
            self._update(number, batch, arrived)

    def _send(self, turn: int, grads: dict[HostWeights, Tensor]) -> tuple[list[Tensor], torch.cuda.Event | None]:
        """Start copying a batch's gradients to host memory; they are there once the returned event has passed."""
        _, batch = self._batches[turn]
        sizes = [weights.numel() for weights in batch]
        arrived = list(self._buffers[turn % 2][: sum(sizes)].split(sizes))
        for weights, own in zip(batch, arrived, strict=True):
            own.copy_(grads[weights].view(-1), non_blocking=True)
        if not self._has_cuda:
            return arrived, None
        event = torch.cuda.Event()
        event.record()
        return arrived, event

    def _update(self, number: int, batch: Sequence[HostWeights], grads: list[Tensor]) -> None:
        """Step over one batch of parameter group ``number`` with torch's fused Adam."""
        group = self._inner.param_groups[number]
        states = [self._inner.state[weights] for weights in batch]
        for weights, state in zip(batch, states, strict=True):
            if "exp_avg" not in state:
                state.update(exp_avg=torch.zeros_like(weights), exp_avg_sq=torch.zeros_like(weights))
        if isinstance(self._inner, torch.optim.AdamW):
            steps = [state.setdefault("step", torch.tensor(0.0)) for state in states]
        else:  # the fused Adam counts by group and has already counted this step
            steps = [torch.tensor(group["step"] - 1.0) for _ in batch]
        adamw(
            list(batch),
            grads,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            steps,
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def _cut(group: Sequence[HostWeights], most: int) -> list[list[HostWeights]]:
    """Cut the group into runs of at most ``most`` elements."""
    runs: list[list[HostWeights]] = []
    size = most + 1
    for weights in group:
        if size + weights.numel() > most:
            runs.append([])
            size = 0
        runs[-1].append(weights)
        size += weights.numel()
    return runs
