"""Release of a student's device memory to the rollout between two steps, and its restoration bit for bit.

::

    parameters          stay: they are what the rollout is given, and a forward alone (log-probs) needs no more
    gradient buffers    freed; between two steps they hold nothing, and a step begins by zeroing them (Megatron's own)
    optimizer states    to pinned host memory and back: fp32 main parameters, both moments

Megatron's ``optimizer.offload_to_cpu`` moves the model's own parameters if they are fp32, and makes pageable copies
anew each time. Here storages are emptied in place, so that all tensors and views of them stay valid.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer
from torch import Tensor

from mopd.base.types import UserError
from mopd.student import cpu_shim

GIB = 2**30
SLAB_BYTES = 2**28
"""Size of one piece of pinned host memory. torch rounds each piece up to a power of two, which this is."""


class GpuMemoryLease:
    """Memory of one rank that is lent to the rollout. On a CPU rank it goes back to the system's allocator."""

    def __init__(
        self, chunks: Sequence[DistributedDataParallel], optimizer: ChainedOptimizer, device: torch.device
    ) -> None:
        """``optimizer`` updates the parameters of ``chunks``."""
        self._chunks, self._optimizer, self._device = chunks, optimizer, device
        self._slabs: list[Tensor] = []
        """Pinned host memory, kept from one turn to the next: pinning takes longer than copying."""
        self._lent: list[tuple[torch.UntypedStorage, int]] = []
        self.numbers: dict[str, float] = {}
        """This rank's figures of the last turn: seconds, GiB lent, GiB that each side found free on its GPU."""

    @cpu_shim.activate()
    def lend(self) -> None:
        """Copy the states to host memory and free theirs on the device. Call it between two steps only."""
        started = time.monotonic()
        for chunk in self._chunks:
            chunk.offload_grad_buffers()
        self._lent = [(storage, storage.nbytes()) for storage in self._states()]
        missing = sum(size for _, size in self._lent) - sum(map(len, self._slabs))
        while missing > 0:
            size = min(SLAB_BYTES, missing)
            self._slabs.append(torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda"))
            missing -= size
        for part, host in self._pieces():
            host.copy_(part, non_blocking=True)
        # Copies are queued: the storages may be freed only once they are done.
        self._synchronize()
        for storage, _ in self._lent:
            storage.resize_(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        self.numbers["timing/lend_s"] = time.monotonic() - started
        self._record_free("rollout")
        buffers: Any = [buffer for c in self._chunks for buffer in (*c.buffers, *c.expert_parallel_buffers)]
        num_bytes = sum(buffer.grad_data.numel() * buffer.grad_data.element_size() for buffer in buffers)
        self.numbers["memory/student_lent_gib"] = (num_bytes + sum(n for _, n in self._lent)) / GIB

    @cpu_shim.activate()
    def restore(self) -> None:
        """Undo ``lend``. Raise ``UserError`` if the rollout has left too little device memory."""
        started = time.monotonic()
        self._record_free("student")
        try:
            for storage, size in self._lent:
                storage.resize_(size)
            for chunk in self._chunks:
                chunk.restore_grad_buffers()
        except torch.OutOfMemoryError as error:
            raise UserError(
                "rollout.placement.share_gpus_with: the rollout sleeps, and what the student lent it "
                f"({self.numbers['memory/student_lent_gib']:.1f} GiB) does not fit back: lower "
                "rollout.engine.gpu_memory_utilization, or see what else is on this GPU"
            ) from error
        for part, host in self._pieces():
            part.copy_(host, non_blocking=True)
        self._synchronize()
        self._lent = []
        self.numbers["timing/restore_s"] = time.monotonic() - started

    def _states(self) -> Iterator[torch.UntypedStorage]:
        """Yield every storage of the optimizer once, except those that hold the model's own parameters."""
        seen = {tensor.untyped_storage().data_ptr() for chunk in self._chunks for tensor in chunk.parameters()}
        for part in self._optimizer.chained_optimizers:
            if part.is_stub_optimizer:
                continue
            inner: Any = part.optimizer
            masters = [tensor for group in inner.param_groups for tensor in group["params"]]
            states = [value for state in inner.state.values() for value in state.values()]
            for tensor in (*masters, *states):
                if not isinstance(tensor, Tensor) or tensor.device.type != self._device.type:
                    continue
                storage = tensor.untyped_storage()
                if tensor.numel() > 1 and storage.nbytes() and storage.data_ptr() not in seen:
                    seen.add(storage.data_ptr())
                    yield storage

    def _pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield pairs of equally long byte ranges, of a storage and of a slab, which together cover all storages."""
        slabs = iter(self._slabs)
        host = next(slabs, torch.empty(0, dtype=torch.uint8))
        for storage, _ in self._lent:
            rest = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
            while len(rest):
                if not len(host):
                    host = next(slabs)
                size = min(len(rest), len(host))
                yield rest[:size], host[:size]
                rest, host = rest[size:], host[size:]

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _record_free(self, side: str) -> None:
        if self._device.type == "cuda":
            self.numbers[f"memory/free_for_{side}_gib"] = torch.cuda.mem_get_info()[0] / GIB
