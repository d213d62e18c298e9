"""Released packages, measured where they are installed.

They are loaded by name and only here: nothing of mopd depends on them.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mopd.bench.losses.inputs import HeadInputs

MEMORY_SHARE = 10
"""A fused head gets 1 / this of the memory of the logits."""


def one_rank(device: torch.device) -> Any:
    """A process group of one rank, made when the first contender asks for it; ``close`` takes it down."""
    if not dist.is_initialized():
        backend = "gloo" if device.type == "cpu" else "nccl"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return dist.group.WORLD


def close() -> None:
    """Takes the group down, if one was made."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _missing(module: str, package: str, *, device: torch.device | None = None) -> str:
    """Why a package cannot run here, empty if it can; ``device`` for what needs CUDA."""
    if find_spec(module) is None:
        return f"{package} is not installed"
    return "needs a CUDA device" if device is not None and device.type == "cpu" else ""


def cross_entropies(device: torch.device) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor] | str]:
    """Cross entropy of the first id: (logits, ids, logprobs) -> row losses [T], or why there is none."""
    engine = _missing("transformer_engine", "transformer-engine", device=device)
    return {
        "Megatron-Core fused cross entropy": _missing("megatron", "megatron-core") or _megatron,
        "TransformerEngine cross entropy": engine or _transformer_engine,
    }


def _megatron(logits: Tensor, ids: Tensor, logprobs: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of optional packages that this function does not use
        module = importlib.import_module("megatron.core.fusions.fused_cross_entropy")
    loss: Tensor = module.fused_vocab_parallel_cross_entropy(logits.unsqueeze(1), ids[:, :1], one_rank(logits.device))
    return loss.squeeze(1)


def _transformer_engine(logits: Tensor, ids: Tensor, logprobs: Tensor) -> Tensor:
    module = importlib.import_module("transformer_engine.pytorch.cross_entropy")
    loss: Tensor = module.parallel_cross_entropy(logits.unsqueeze(1), ids[:, :1])
    return loss.squeeze(1)


def heads(inputs: HeadInputs) -> list[tuple[str, str, Callable[[], Tensor] | str]]:
    """Fused LM heads: name, loss and a function to the scalar loss, or why there is none. The losses are cross entropy
    of the first id and JSD against a dense teacher (another, larger problem)."""
    student, first = (inputs.hidden, inputs.weight), inputs.ids[:, 0]
    both = (*student, inputs.teacher_hidden, inputs.teacher_weight)

    def liger(module: str, name: str, *arguments: Any, **options: Any) -> Callable[[], Tensor]:
        return lambda: getattr(importlib.import_module(f"liger_kernel.{module}"), name)(**options)(*arguments)

    entropy = liger(
        "transformers.fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyLoss", *reversed(student), first
    )
    jsd = liger("transformers.fused_linear_jsd", "LigerFusedLinearJSD", *both, None)
    weights = {"weight_hard_loss": 0.0, "weight_soft_loss": 1.0}
    chunked = liger("chunked_loss.jsd_loss", "LigerFusedLinearJSDLoss", *both, first, **weights)
    missing = _missing("liger_kernel", "liger-kernel")
    needs = _missing("liger_kernel", "liger-kernel", device=inputs.hidden.device)
    return [
        *_torch_heads(inputs),
        ("Liger fused-linear cross entropy", "cross entropy", needs or entropy),
        ("Liger fused-linear JSD", "dense JSD", needs or jsd),
        ("Liger chunked distillation", "dense JSD", missing or chunked),
    ]


def _torch_heads(inputs: HeadInputs) -> list[tuple[str, str, Callable[[], Tensor] | str]]:
    name = "torch linear_cross_entropy"
    function = getattr(torch.nn.functional, "linear_cross_entropy", None)
    if function is None:
        return [(name, "cross entropy", f"torch {torch.__version__} has no linear_cross_entropy")]
    total = partial(function, inputs.hidden, inputs.weight, inputs.ids[:, 0])
    # its default chunks are far slower on a CPU; these hold as large a part of the logits as ours may
    rows = -(-inputs.hidden.size(0) // MEMORY_SHARE)
    chunked = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=rows)  # type: ignore[attr-defined,unused-ignore]
    return [
        (name, "cross entropy", total),
        (f"{name}, chunked", "cross entropy", partial(total, options=chunked)),
    ]
