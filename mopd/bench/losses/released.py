"""Released packages, measured where they are installed.

They are loaded by name and only here: nothing of mopd depends on them.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mopd.bench.losses.inputs import HeadInputs

MEMORY_SHARE = 10
"""A fused head gets 1 / this of the memory of the logits."""


@dataclass(frozen=True)
class Released:
    """A loss of a released package."""

    name: str
    loss: str
    run: Callable[..., Tensor] | str
    """(logits, ids, logprobs) -> row losses [T]; for a fused LM head () -> scalar loss; or why there is none."""


class Collective:
    """A process group of one rank, made when the first contender asks for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made = False

    def group(self) -> Any:
        """The group of all (one) ranks."""
        if not self._made:
            backend = "gloo" if self._device.type == "cpu" else "nccl"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
            self._made = True
        return dist.group.WORLD

    def close(self) -> None:
        """Takes the group down."""
        if self._made:
            dist.destroy_process_group()
            self._made = False


def cross_entropies(device: torch.device, collective: Collective) -> list[Released]:
    """Cross entropy of the first id on logits."""
    return [_megatron(collective), _transformer_engine(device)]


def _megatron(collective: Collective) -> Released:
    name = "Megatron-Core fused cross entropy"
    if find_spec("megatron") is None:
        return Released(name, "cross entropy", "megatron-core is not installed")

    def rows(logits: Tensor, ids: Tensor, logprobs: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns of optional packages that this function does not use
            module = importlib.import_module("megatron.core.fusions.fused_cross_entropy")
        loss = module.fused_vocab_parallel_cross_entropy(logits.unsqueeze(1), ids[:, :1], collective.group())
        return loss.squeeze(1)

    return Released(name, "cross entropy", rows)


def _transformer_engine(device: torch.device) -> Released:
    name = "TransformerEngine cross entropy"
    if find_spec("transformer_engine") is None:
        return Released(name, "cross entropy", "transformer-engine is not installed")
    if device.type == "cpu":
        return Released(name, "cross entropy", "needs a CUDA device")

    def rows(logits: Tensor, ids: Tensor, logprobs: Tensor) -> Tensor:
        module = importlib.import_module("transformer_engine.pytorch.cross_entropy")
        loss = module.parallel_cross_entropy(logits.unsqueeze(1), ids[:, :1])
        return loss.squeeze(1)

    return Released(name, "cross entropy", rows)


def heads(inputs: HeadInputs) -> list[Released]:
    """Fused LM heads: cross entropy of the first id, and JSD against a dense teacher (another, larger problem)."""
    return [
        *_torch_heads(inputs),
        _liger(inputs, "Liger fused-linear cross entropy", "cross entropy", _liger_cross_entropy, cuda_only=True),
        _liger(inputs, "Liger fused-linear JSD", "dense JSD", _liger_jsd, cuda_only=True),
        _liger(inputs, "Liger chunked distillation", "dense JSD", _liger_chunked, cuda_only=False),
    ]


def _torch_heads(inputs: HeadInputs) -> list[Released]:
    name = "torch linear_cross_entropy"
    function = getattr(torch.nn.functional, "linear_cross_entropy", None)
    if function is None:
        reason = f"torch {torch.__version__} has no linear_cross_entropy"
        return [Released(name, "cross entropy", reason)]

    def total(options: Any) -> Callable[[], Tensor]:
        return lambda: function(inputs.hidden, inputs.weight, inputs.ids[:, 0], options=options)

    # its default chunks are far slower on a CPU; these hold as large a part of the logits as ours may
    rows = -(-inputs.hidden.size(0) // MEMORY_SHARE)
    chunked = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=rows)  # type: ignore[attr-defined,unused-ignore]
    return [
        Released(name, "cross entropy", total(None)),
        Released(f"{name}, chunked", "cross entropy", total(chunked)),
    ]


def _liger(
    inputs: HeadInputs, name: str, loss: str, total: Callable[[HeadInputs], Tensor], *, cuda_only: bool
) -> Released:
    if find_spec("liger_kernel") is None:
        return Released(name, loss, "liger-kernel is not installed")
    if cuda_only and inputs.hidden.device.type == "cpu":
        return Released(name, loss, "needs a CUDA device")
    return Released(name, loss, lambda: total(inputs))


def _liger_cross_entropy(inputs: HeadInputs) -> Tensor:
    module = importlib.import_module("liger_kernel.transformers.fused_linear_cross_entropy")
    loss: Tensor = module.LigerFusedLinearCrossEntropyLoss()(inputs.weight, inputs.hidden, inputs.ids[:, 0])
    return loss


def _liger_jsd(inputs: HeadInputs) -> Tensor:
    module = importlib.import_module("liger_kernel.transformers.fused_linear_jsd")
    loss: Tensor = module.LigerFusedLinearJSD()(
        inputs.hidden, inputs.weight, inputs.teacher_hidden, inputs.teacher_weight, None
    )
    return loss


def _liger_chunked(inputs: HeadInputs) -> Tensor:
    module = importlib.import_module("liger_kernel.chunked_loss.jsd_loss")
    loss: Tensor = module.LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0)(
        inputs.hidden, inputs.weight, inputs.teacher_hidden, inputs.teacher_weight, inputs.ids[:, 0]
    )
    return loss
