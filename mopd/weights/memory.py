"""Memory that one process fills and others of its machine read in place.

On a CPU it is a file without a name (memfd), which the others open through ``/proc``: it leaves nothing behind, and is
gone with the last process that holds it. It does not count as part of ``/dev/shm``, which is small in many containers.
On CUDA it is device memory whose handles the others open (CUDA IPC); each handle is for one process, as the memory's
owner counts, in CUDA, the processes that have opened it.
"""

from __future__ import annotations

import base64
import json
import mmap
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mopd.base.files.json_text import parse_json
from mopd.base.text import first_line

_NAME = "mopd-weights"
_EXPANDABLE = re.compile(r"\bexpandable_segments:\s*(True|1)\b", re.IGNORECASE)


class SharedMemory:
    """The owner's side of such memory."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._descriptor: int | None = None
        if device.type == "cuda":
            with _whole_segments():
                self.buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        else:
            self._descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
            os.posix_fallocate(self._descriptor, 0, num_bytes)  # reserved now: a lack is an error, not a later signal
            self.buffer = torch.frombuffer(mmap.mmap(self._descriptor, num_bytes), dtype=torch.uint8)
        self.device = device
        """Device of ``buffer``, which is [num_bytes] uint8."""

    def handles(self, count: int) -> str:
        """Return JSON for ``count`` processes: a list with a handle of its own for each."""
        if self._descriptor is not None:
            one = {"pid": os.getpid(), "descriptor": self._descriptor, "num_bytes": len(self.buffer)}
            return json.dumps([one] * count)
        uuid = str(torch.cuda.get_device_properties(self.device).uuid)
        return json.dumps([{"gpu": uuid, "handle": self._export()} for _ in range(count)])

    def close(self) -> None:
        """Prevent further opening; the memory is freed when no process reads it any more."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)
        self.buffer = self.buffer[:0].clone()

    def _export(self) -> list[Any]:
        """Return the arguments of ``UntypedStorage._new_shared_cuda``, except the device."""
        _, *fields = self.buffer.untyped_storage()._share_cuda_()
        return [base64.b64encode(field).decode() if isinstance(field, bytes) else field for field in fields]


def open_memory(handles: str, place: int, device: torch.device) -> Tensor:
    """Open the ``buffer`` of another process by the handle at ``place``; it is held as long as a view of it is.

    Raises:
        ValueError: there is no such memory, or it cannot be reached from ``device``.
    """
    try:
        handle = parse_json(handles)[place]
        if device.type == "cuda":
            return _open_cuda(handle["gpu"], list(handle["handle"]), device)
        pid, descriptor, num_bytes = (handle[key] for key in ("pid", "descriptor", "num_bytes"))
        if not all(type(number) is int and number >= 0 for number in (pid, descriptor, num_bytes)) or not num_bytes:
            raise ValueError("pid, descriptor and num_bytes are not numbers")
        return _open_file(f"/proc/{pid}/fd/{descriptor}", num_bytes)
    except (ValueError, TypeError, KeyError, IndexError, OSError, OverflowError, RuntimeError) as error:
        # RuntimeError: CUDA's, of a handle whose owner is gone or lets nobody in
        raise ValueError(f"the sender's memory cannot be opened: {first_line(error)}") from error


@contextmanager
def _whole_segments() -> Iterator[None]:
    """Let torch allocate by ``cudaMalloc`` inside, whatever PYTORCH_CUDA_ALLOC_CONF says.

    The handle of an expandable segment is a file descriptor that the receiver takes out of the owner's process
    (``pidfd_getfd``), as a debugger would: Linux refuses that to a process that is neither root nor the parent.
    """
    read, write = (getattr(torch._C, f"_accelerator_{word}AllocatorSettings", None) for word in ("get", "set"))
    if read is None or write is None:  # an older torch, which knows CUDA's alone
        settings = str(torch.cuda.memory._snapshot()["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"])
        write = torch.cuda.memory._set_allocator_settings
    else:
        settings = str(read())
    if not _EXPANDABLE.search(settings):
        yield
        return
    write(_EXPANDABLE.sub("expandable_segments:False", settings))  # the whole line: torch resets what it does not name
    try:
        yield
    finally:
        write(settings)


def _open_file(path: str, num_bytes: int) -> Tensor:
    if not os.readlink(path).startswith(f"/memfd:{_NAME} "):
        raise ValueError(f"{path} is another file")
    descriptor = os.open(path, os.O_RDWR)
    try:
        return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
    finally:
        os.close(descriptor)


def _open_cuda(gpu: str, fields: list[Any], device: torch.device) -> Tensor:
    own = str(torch.cuda.get_device_properties(device).uuid)
    if own != gpu:
        raise ValueError(f"it is on GPU {gpu}, this process on {own}: rollout.placement.share_gpus_with is needed")
    torch.cuda._lazy_init()
    decoded = [base64.b64decode(field) if isinstance(field, str) else field for field in fields]
    index = torch.cuda.current_device() if device.index is None else device.index
    storage = torch.UntypedStorage._new_shared_cuda(index, *decoded)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
