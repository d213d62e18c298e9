"""The public functions as the tests call them: on the CUDA device where there is one, with tensors from the CPU.

A test that imports them from here proves the same on a GPU machine (``auto`` is the compiled Triton layer there, and
``chunked`` runs on the device too) as it does on a CPU. What hands in a buffer to be written calls the package itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch.utils._pytree import tree_map

from mopd import losses
from tests.parity.losses.triton_layer import DEVICE, to_cpu, to_device


def on_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` itself without a device; else it works there, and autograd goes back to the tensors handed in."""
    if DEVICE.type == "cpu":
        return function

    @wraps(function)
    def moved(*args: Any, **options: Any) -> Any:
        args, options = tree_map(to_device, (args, options))
        return tree_map(to_cpu, function(*args, **options))

    return moved


parallel_entropy_and_topk_overlap = on_device(losses.parallel_entropy_and_topk_overlap)
parallel_gather_logprobs = on_device(losses.parallel_gather_logprobs)
parallel_policy_gradient = on_device(losses.parallel_policy_gradient)
parallel_sampled_kl = on_device(losses.parallel_sampled_kl)
parallel_topk_distill = on_device(losses.parallel_topk_distill)
