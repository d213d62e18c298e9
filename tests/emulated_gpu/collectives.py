"""NCCL between emulated devices: gloo on their memory, with NCCL's conditions."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

COLLECTIVES = (
    "_all_gather_base", "_reduce_scatter_base", "all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all",
    "all_to_all_single", "broadcast", "irecv", "isend", "recv", "reduce", "reduce_scatter", "reduce_scatter_tensor",
    "send",
)  # fmt: skip
_of_nccl: WeakSet[dist.ProcessGroup] = WeakSet()


def _group_maker(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``init_process_group`` or ``new_group``: gloo in the place of NCCL, and remembered."""

    @functools.wraps(function)
    def make(*args: Any, **options: Any) -> Any:
        options.pop("device_id", None)
        asked = options.get("backend", args[0] if args and isinstance(args[0], str) else None)
        inherits = asked is None and dist.is_initialized() and dist.group.WORLD in _of_nccl
        args = tuple("gloo" if isinstance(value, str) and value == "nccl" else value for value in args)
        if options.get("backend") == "nccl":
            options["backend"] = "gloo"
        if asked == "nccl" or inherits:
            options.pop("pg_options", None)
        made = function(*args, **options)
        group = dist.group.WORLD if made is None else made
        if (asked == "nccl" or inherits) and isinstance(group, dist.ProcessGroup):
            _of_nccl.add(group)
        return made

    return make


class ProcessGroupNCCL:
    """A group of processes with a device each, as ``mopd/weights/backends.py`` makes one."""

    class Options:
        _timeout = timedelta(minutes=10)

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        self._store, self._rank, self._size, self._timeout = store, rank, size, options._timeout
        self._gloo: Any = None

    def broadcast(self, tensors: list[Tensor], options: Any = None) -> Any:
        for tensor in tensors:
            if not tensor.is_cuda or not tensor.is_contiguous():
                raise RuntimeError("Tensors must be CUDA and dense")
        if self._gloo is None:
            self._connect(tensors[0].device)
        lowered = [torch.ops.emulated_gpu.on_cpu(tensor) for tensor in tensors]
        return self._gloo.broadcast(lowered, options or dist.BroadcastOptions())

    def _connect(self, device: torch.device) -> None:
        """Meet the others at the first call, as NCCL does, which refuses two members on one device."""
        self._store.set(f"device of {self._rank}", str(torch.cuda.get_device_properties(device).uuid))
        uuids = [self._store.get(f"device of {number}") for number in range(self._size)]
        if len({*uuids}) < self._size:
            raise dist.DistBackendError(f"Duplicate GPU detected : {uuids}")
        store = dist.PrefixStore("gloo", self._store)
        self._gloo = dist.ProcessGroupGloo(store, self._rank, self._size, self._timeout)

    def abort(self) -> None:
        if self._gloo is not None:
            self._gloo.abort()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)


def _collective(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a collective: NCCL takes contiguous tensors of GPUs alone."""

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        given = [options.get("group"), *(value for value in args if isinstance(value, dist.ProcessGroup))]
        group = next((one for one in given if one is not None), dist.group.WORLD)
        for tensor in _tensors([*args, *options.values()]) if group in _of_nccl else ():
            if not tensor.is_cuda:
                raise RuntimeError(f"{function.__name__}: No backend type associated with device type cpu")
            if not tensor.is_contiguous():
                raise ValueError(f"{function.__name__}: Tensors must be contiguous")
        parts = args[0] if args and function.__name__ == "all_gather" else ()
        parts = args[1] if len(args) > 1 and function.__name__ == "reduce_scatter" else parts
        if len({part.shape for part in parts}) > 1:
            return _uneven(function.__name__, args[0], args[1], group)
        return function(*args, **options)

    return call


def _uneven(name: str, to: Any, source: Any, group: dist.ProcessGroup) -> None:
    """``all_gather`` or ``reduce_scatter`` of parts of several sizes, which gloo has not, as NCCL does it: rank by
    rank."""
    rank = dist.get_rank(group)
    if name == "all_gather":
        to[rank].copy_(source)
        for number, part in enumerate(to):
            dist.broadcast(part, group=group, group_src=number)
        return
    for number, part in enumerate(source):
        whole = part.clone()
        dist.reduce(whole, group=group, group_dst=number)
        if number == rank:
            to.copy_(whole)


def install(devices: ctypes.CDLL) -> None:
    """Let ``backend="nccl"`` make such groups."""
    devices.emulated_collectives()
    modules: tuple[Any, ...] = (dist, c10d)
    modules[0].ProcessGroupNCCL = ProcessGroupNCCL
    for names, wrap in ((("init_process_group", "new_group"), _group_maker), (COLLECTIVES, _collective)):
        for name in names:
            if hasattr(c10d, name):
                wrapped = wrap(getattr(c10d, name))
                for module in modules:
                    setattr(module, name, wrapped)
    for module in modules:
        module.is_nccl_available = lambda: True
    backend = c10d.get_backend
    modules[0].get_backend = lambda group=None: (
        "nccl" if (dist.group.WORLD if group is None else group) in _of_nccl else backend(group)
    )
    object_device = c10d._get_object_coll_device
    internals: Any = c10d
    internals._get_object_coll_device = lambda group=None: (
        "cuda" if (dist.group.WORLD if group is None else group) in _of_nccl else object_device(group)
    )
