"""Code inside vLLM's own worker processes. vLLM mixes this class into its worker and calls its methods by name."""

from __future__ import annotations

import dataclasses
import os
import select
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

from safetensors import safe_open
from torch import Tensor
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.platforms import current_platform

from mopd.engines.vllm.receiving import BACKEND, GroupTransferEngine, quiet_reload

WeightTransferEngineFactory.register_engine(BACKEND, GroupTransferEngine)


def _pack_experts_at_every_load() -> None:
    """Patch vLLM (0.32) on a CPU to pack the weights of experts at every load.

    For a CPU's kernels vLLM packs them when it makes the kernel, at the first load. Those of a later load it would put
    unpacked where packed ones are expected, so the kernel is made anew.
    """
    set_up = UnquantizedFusedMoEMethod._setup_kernel

    def make_and_pack(self: Any, layer: Any, w13: Tensor, w2: Tensor) -> None:
        self.moe_kernel = None
        set_up(self, layer, w13, w2)

    UnquantizedFusedMoEMethod._setup_kernel = make_and_pack


if current_platform.is_cpu():
    _pack_experts_at_every_load()


class WorkerExtension:
    """Methods that ``VllmEngine`` calls in every worker (one per GPU of the replica)."""

    reload_weights: Any
    """Method of vLLM's worker: replaces the weights in place, name by name."""
    model_runner: Any
    """Attribute of vLLM's worker: holds the model."""
    weight_transfer_engine: Any
    """The ``GroupTransferEngine`` that vLLM makes by the name ``BACKEND``."""

    def mopd_watch(self, owner_pid: int) -> None:
        """End this worker and vLLM's core process as soon as process ``owner_pid``, which started them, is gone.

        vLLM's core does not notice that its owner was killed and would keep its memory for ever.
        """
        # the executor "uni" runs the worker inside vLLM's core process; otherwise the core is the worker's parent
        core_pid = os.getpid() if os.getppid() == owner_pid else os.getppid()
        descriptor = os.pidfd_open(owner_pid)
        threading.Thread(target=_kill_after, args=(descriptor, core_pid), daemon=True, name="mopd-watch").start()

    def mopd_load_weights(self, paths: Sequence[str], some_stay: bool) -> int:
        """Replace the weights by the tensors of these safetensors files and return their number. With ``some_stay`` the
        files hold whole layers, and others keep theirs."""
        count = 0

        def tensors() -> Iterator[tuple[str, Tensor]]:
            nonlocal count
            for path in paths:
                with safe_open(path, framework="pt", device="cpu") as file:
                    for name in file.keys():  # noqa: SIM118 (not a mapping)
                        count += 1
                        yield name, file.get_tensor(name)

        with quiet_reload() if some_stay else nullcontext():
            self.reload_weights(weights_iterator=tensors())
        self._refresh_tied_head()
        return count

    def mopd_transfer_failure(self) -> str | None:
        """Return why this worker's last ``init_weight_transfer_engine`` or ``update_weights`` failed, if it did."""
        failure: str | None = self.weight_transfer_engine.failure
        return failure

    def mopd_received(self) -> dict[str, float]:
        """Finish a reception over a group and return its durations, the fields of ``Reception``."""
        self._refresh_tied_head()
        return dataclasses.asdict(self.weight_transfer_engine.reception)

    def _refresh_tied_head(self) -> None:
        """Recompute what vLLM derived from a tied output matrix.

        Such a matrix receives no tensor of its own, so vLLM's reload keeps what it derived from the old one (on a CPU a
        packed copy, from which it would go on computing logits).
        """
        model = self.model_runner.get_model()
        model = getattr(model, "language_model", model)  # a model that sees images wraps the language model
        if model.config.get_text_config().tie_word_embeddings:
            model.lm_head.quant_method.process_weights_after_loading(model.lm_head)


def _kill_after(owner_descriptor: int, core_pid: int) -> None:
    select.select([owner_descriptor], [], [])  # readable when the owner has ended; waits as long as this worker lives
    os.kill(core_pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
