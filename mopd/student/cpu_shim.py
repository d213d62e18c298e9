"""Megatron-Core on a machine without CUDA. This module is the only place that knows how.

Megatron asks for CUDA by literals (``device="cuda"``), by ``torch.cuda`` calls and by comparing type strings. Without
CUDA ``activate()`` answers those on the CPU; with CUDA it does nothing. Three parts:

- ``torch.cuda`` functions and Megatron's CUDA random-state functions, replaced once per process;
- the name ``torch`` in Megatron's schedules, also replaced once. Forward and backward passes and Adam need no more, so
  they run outside ``activate()``;
- for all else, a ``TorchFunctionMode`` that redirects device arguments. It intercepts every torch call, and is per
  thread: each thread that builds, clips, saves or loads enters ``activate()`` (``asyncio.to_thread`` starts without).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import random as megatron_random
from torch import Tensor
from torch.overrides import TorchFunctionMode

_install_lock = threading.Lock()
_is_installed = False
_thread = threading.local()


@contextmanager
def activate() -> Iterator[None]:
    """Let this thread run Megatron without CUDA; do nothing with CUDA. May be nested; also works as a decorator of
    plain functions (not of generators, whose body would run after it has ended)."""
    if torch.cuda.is_available() or getattr(_thread, "is_active", False):
        yield
        return
    _install()
    _thread.is_active = True
    try:
        with _CudaOnCpu():
            yield
    finally:
        _thread.is_active = False


class _CudaOnCpu(TorchFunctionMode):
    """Mode that redirects ``cuda`` device arguments to the CPU and answers ``Tensor.type()`` with CUDA names."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.type and len(args) == 1 and not kwargs:
            # The distributed optimizer sorts parameters by this string.
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if kwargs and _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": "cpu"}
        if func is Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], "cpu", *args[2:])
        return func(*args, **(kwargs or {}))


class _TorchOnCpu(ModuleType):
    """``torch`` with a ``zeros`` that takes "cuda" for the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def zeros(*size: Any, device: Any = None, **options: Any) -> Tensor:
        return torch.zeros(*size, device="cpu" if _is_cuda(device) else device, **options)


def _is_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


def _install() -> None:
    """Replace the process-wide functions, once."""
    global _is_installed
    with _install_lock:
        if _is_installed:
            return
        cuda: Any = torch.cuda
        cuda.current_device = lambda: torch.device("cpu")
        cuda.synchronize = lambda device=None: None
        cuda.get_rng_state = lambda device="cuda": torch.get_rng_state()
        cuda.set_rng_state = lambda new_state, device="cuda": torch.set_rng_state(new_state)
        cuda.manual_seed = torch.manual_seed
        rng: Any = megatron_random
        rng._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
        rng._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)
        # The schedules call ``torch.zeros(..., device="cuda")`` in each pass; a mode there would slow every torch call.
        schedules_module: Any = schedules
        schedules_module.torch = _TorchOnCpu("torch")
        _is_installed = True
