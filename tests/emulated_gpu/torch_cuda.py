"""What ``torch.cuda`` answers of emulated devices, and what a CPU build of torch lacks for their tensors."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

MEMORY = 16 << 30
"""Bytes that a device says it has."""

_devices: Any
_numbers: Sequence[int] = ()
_local = threading.local()


def _index(device: Any = None) -> int:
    if isinstance(device, str | torch.device):
        asked = torch.device(device)
        if asked.type != "cuda":
            raise ValueError(f"Expected a cuda device, but got: {asked}")
        device = asked.index
    return _devices.emulated_device() if device is None or device < 0 else device


class Event:
    """Event on work that is done as soon as it is asked for."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._is_timing, self._at = enable_timing, 0.0

    def record(self, stream: Any = None) -> None:
        self._at = time.perf_counter()

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        if not (self._is_timing and end._is_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        return (end._at - self._at) * 1e3


class Stream:
    """Stream of a device; the only one that there is, by another name."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = torch.device("cuda", _index(device))

    def wait_stream(self, stream: Stream) -> None: ...

    def wait_event(self, event: Event) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event


class on_device:
    """``torch.cuda.device``."""

    def __init__(self, device: Any) -> None:
        self._now = None if device is None else _index(device)

    def __enter__(self) -> None:
        self._before = _devices.emulated_device()
        _devices.emulated_set_device(self._before if self._now is None else self._now)

    def __exit__(self, *error: object) -> None:
        _devices.emulated_set_device(self._before)


class on_stream(on_device):
    """``torch.cuda.stream``, after which the thread's device is the stream's."""

    def __init__(self, stream: Stream | None) -> None:
        super().__init__(None if stream is None else stream.device)
        self._stream = stream

    def __enter__(self) -> None:
        super().__enter__()
        self._last = current_stream()
        _local.stream = self._stream or self._last

    def __exit__(self, *error: object) -> None:
        _local.stream = self._last
        super().__exit__(*error)


def current_stream(device: Any = None) -> Stream:
    return getattr(_local, "stream", None) or Stream(device)


def set_device(device: Any) -> None:
    number = _index(device)
    if number >= len(_numbers):
        raise RuntimeError("CUDA error: invalid device ordinal")
    _devices.emulated_set_device(number)


def _properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        name="Emulated GPU",
        major=9,
        minor=0,
        total_memory=MEMORY,
        multi_processor_count=132,
        uuid=f"00000000-0000-0000-0000-{_numbers[_index(device)]:012d}",
    )


def _allocated(device: Any = None) -> int:
    return int(_devices.emulated_allocated(_index(device)))


def _peak(device: Any = None) -> int:
    return int(_devices.emulated_peak(_index(device)))


def _pinned(tensor: Tensor, device: Any = None) -> Tensor:
    if tensor.is_cuda:
        raise RuntimeError(f"cannot pin '{tensor.type()}' only dense CPU tensors can be pinned")
    return tensor.clone()


def _storage_to(storage: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """``UntypedStorage.to``; a CPU build makes storages of the CPU alone."""
    if device.type != "cuda":
        return _torch_storage_to(storage, device, non_blocking)
    copy = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device).untyped_storage()
    return copy.copy_(storage, non_blocking)


_torch_storage_to = torch._utils._to


def install(devices: ctypes.CDLL, numbers: Sequence[int]) -> None:
    """Answer for ``devices``, of which this process sees those of these ``numbers``."""
    global _devices, _numbers
    _devices, _numbers = devices, numbers
    devices.emulated_allocated.restype = devices.emulated_peak.restype = ctypes.c_int64
    generators = tuple(torch.Generator(torch.device("cuda", number)) for number in range(len(numbers)))
    core: Any = torch._C
    core._cuda_getDevice = lambda: devices.emulated_device()
    cuda: Any = torch.cuda
    cuda._initialized = True
    cuda._lazy_init = cuda.init = lambda: None
    cuda.is_initialized = lambda: True
    cuda.is_available = lambda: bool(numbers)
    cuda.device_count = lambda: len(numbers)
    cuda.current_device, cuda.set_device = _index, set_device
    cuda.Event, cuda.Stream, cuda.device, cuda.stream = Event, Stream, on_device, on_stream
    cuda.device_of = lambda tensor: on_device(tensor.device if tensor.is_cuda else None)
    cuda.current_stream, cuda.default_stream = current_stream, Stream
    cuda.synchronize = lambda device=None: None
    cuda.empty_cache = cuda.ipc_collect = lambda: None
    cuda.is_current_stream_capturing = lambda: False
    cuda.memory_allocated = cuda.memory_reserved = _allocated
    cuda.max_memory_allocated = cuda.max_memory_reserved = _peak
    cuda.reset_peak_memory_stats = lambda device=None: devices.emulated_reset_peak(_index(device))
    cuda.mem_get_info = lambda device=None: (MEMORY - _allocated(device), MEMORY)
    cuda.get_device_name = lambda device=None: _properties(device).name
    cuda.get_device_capability = lambda device=None: (9, 0)
    cuda.get_device_properties = _properties
    cuda.is_bf16_supported = lambda including_emulation=True: True
    cuda.default_generators = generators
    cuda.nccl.version = lambda: (2, 27, 3)
    tensor: Any = Tensor
    tensor.pin_memory = _pinned
    tensor.record_stream = lambda self, stream: None
    utils: Any = torch._utils
    storage: Any = torch.storage
    utils._to = storage._to = _storage_to
