"""Code inside vLLM's own worker processes: vLLM mixes ``WorkerExtension`` into its worker and calls methods by name.

Weights come by vLLM's weight-transfer protocol. It creates a ``GroupTransferEngine`` for each worker, by the name
``BACKEND``, and calls::

    init_transfer_engine                                             once for each group
    start_weight_update -> update_weights -> finish_weight_update    for each update

A worker that fails raises nothing and reports it when asked (``failure``): of several workers vLLM reads answers until
the first error, and would take the remaining answers for those of its next calls.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.models.utils import PPMissingLayer
from vllm.platforms import current_platform
from vllm.v1.outputs import LogprobsTensors

from mopd.base.text import one_line
from mopd.engines.interface import Reception
from mopd.engines.vllm.given import score_given, take_hidden
from mopd.weights.group import GroupOrder, TransferFailed
from mopd.weights.parts import from_json
from mopd.weights.receiving import Receiver

BACKEND = "mopd"
"""Value of ``weight_transfer_config.backend``."""


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Arguments of ``init_transfer_engine``, from ``VllmIncoming.join``."""

    order: dict[str, Any]
    """Fields of ``GroupOrder``."""
    first_rank: int
    tensors: list[list[Any]]
    """Rows of ``mopd.weights.parts.to_json``."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Arguments of ``update_weights``, from ``VllmIncoming.receive``."""

    verify: bool
    patience_s: float


@contextmanager
def quiet_reload() -> Iterator[None]:
    """Suppress vLLM's warning of each layer that gets no weights, for updates in which some layers keep theirs."""
    logger = logging.getLogger("vllm.model_executor.model_loader.reload")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


class GroupTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Weight receiver of one vLLM worker."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    receiver: Receiver | None = None
    failure: str | None = None
    """Error line of the last call; ``None`` if it succeeded."""
    reception = Reception(wait_s=0.0, load_s=0.0)
    """Durations of the last update."""
    takes_adapter = False
    """Whether an adapter's tensors arrive in the place of the model's."""
    arrived: dict[str, Tensor] | None = None
    """Those of a whole update, until they are used: vLLM drops all adapters when an update is finished."""

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Enter the group; blocks until it has met."""
        self.shutdown()
        parallel = self.parallel_config
        # each worker of the replica has its own rank in the group, in vLLM's order of workers
        rank = init_info.first_rank + parallel.data_parallel_index * parallel.world_size + parallel.rank
        try:
            self.failure = None
            self.receiver = Receiver(
                GroupOrder(**init_info.order), rank, from_json(init_info.tensors), keeps_views=True, device=self.device
            )
        except (TransferFailed, ValueError) as error:
            self.failure = one_line(error)

    def start_weight_update(self) -> None:
        """Begin an update; no request runs until it is finished."""
        self.failure = self.arrived = None
        if not self.takes_adapter:
            initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive the weights. vLLM's method would also synchronise an accelerator, which a CPU does not have."""
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except Exception as error:  # reported through `failure`
            self.failure = one_line(error)
            self._abandon()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load everything that the group sends. Layers keep views of the tensors until they are complete."""
        receiver, began = self.receiver, time.perf_counter()
        if receiver is None:
            raise TransferFailed("the worker is in no group")
        tensors = receiver.tensors(verify=update_info.verify, patience_s=update_info.patience_s)
        if self.takes_adapter:
            self.arrived = dict(tensors)
        else:
            self.model.load_weights(tensors)
        self.reception = Reception(wait_s=receiver.wait_s, load_s=time.perf_counter() - began - receiver.wait_s)

    def finish_weight_update(self) -> None:
        """Complete the layers. Called after a failure too, as vLLM's session must end; it then does nothing."""
        if self.failure is not None or self.receiver is None or self.takes_adapter:
            return
        with quiet_reload() if self.receiver.num_skipped else nullcontext():
            finalize_layerwise_reload(self.model, self.model_config)
        self._refresh_tied_head()

    def shutdown(self) -> None:
        """Leave the group."""
        receiver, self.receiver = self.receiver, None
        if receiver is not None:
            receiver.close()

    def _refresh_tied_head(self) -> None:
        """Recompute what vLLM derived from a tied output matrix.

        Such a matrix receives no tensor of its own, so vLLM's reload keeps what it derived from the old one (on a CPU a
        packed copy, from which it would go on computing logits).
        """
        model: Any = getattr(
            self.model, "language_model", self.model
        )  # a model that sees images wraps the language model
        head = model.lm_head  # of the last pipeline stage alone
        if model.config.get_text_config().tie_word_embeddings and not isinstance(head, PPMissingLayer):
            head.quant_method.process_weights_after_loading(head)

    def _abandon(self) -> None:
        """Leave the group and restore the old tensors of incomplete layers, so that a full update can begin."""
        self.shutdown()
        if self.takes_adapter:
            return
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                # vLLM's reload keeps the old tensors of a layer aside until it is complete; with nothing loaded it puts
                # them back
                info.load_numel, info.loaded_weights = 0, []
        finalize_layerwise_reload(self.model, self.model_config)


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

    parallel_config: Any
    """Attribute of vLLM's worker: its place among all."""
    model_runner: Any
    """Attribute of vLLM's worker: what runs the model."""
    weight_transfer_engine: Any
    """The ``GroupTransferEngine`` that vLLM makes by the name ``BACKEND``."""

    def mopd_watch(self, owner_pid: int) -> None:
        """End this worker and vLLM's core process as soon as process ``owner_pid``, which started them, is gone.

        vLLM's core does not notice that its owner was killed and would keep its memory for ever.
        """
        if self.parallel_config.node_rank > 0:  # the number means another process there: this node's started the worker
            owner_pid = os.getppid()
        # the executor "uni" runs the worker inside vLLM's core process; otherwise the core is the worker's parent
        core_pid = os.getpid() if os.getppid() == owner_pid else os.getppid()
        descriptor = os.pidfd_open(owner_pid)
        threading.Thread(target=_kill_after, args=(descriptor, core_pid), daemon=True, name="mopd-watch").start()

    def mopd_take_adapter(self) -> None:
        """From now on take what arrives for the tensors of an adapter."""
        self.weight_transfer_engine.takes_adapter = True

    def mopd_put_adapter(self, lora_id: int, config: dict[str, Any]) -> None:
        """Use what has arrived, if it has, as vLLM's adapter ``lora_id``; ``config`` is PEFT's."""
        engine = self.weight_transfer_engine
        tensors, engine.arrived = engine.arrived, None
        if tensors is not None:
            try:
                put_adapter(self.model_runner.lora_manager, lora_id, config, tensors)
            except Exception as error:  # reported through `failure`
                engine.failure = one_line(error)

    def mopd_score_given(self) -> None:
        """Let this worker answer requests for log-probs at given ids and for hidden states."""
        is_first = self.parallel_config.rank % self.parallel_config.tensor_parallel_size == 0
        score_given(self.model_runner, LogprobsTensors.empty_cpu, keeps_hidden=is_first)

    def mopd_take_hidden(self, name: str) -> bytes | None:
        """Return and forget a request's hidden states, if this worker has them (``take_hidden``)."""
        return take_hidden(self.model_runner, name)

    def mopd_num_hidden(self) -> int:
        """Return how many requests' hidden states wait here to be taken."""
        return len(self.model_runner.mopd_hidden)

    def mopd_outcome(self) -> dict[str, Any]:
        """Return why this worker's last ``init_weight_transfer_engine`` or update failed (``failure``), if it did, and
        the durations of its last update, the fields of ``Reception``."""
        engine = self.weight_transfer_engine
        return {"failure": engine.failure, **dataclasses.asdict(engine.reception)}


def put_adapter(worker_manager: Any, lora_id: int, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Replace an adapter of vLLM's by these whole tensors, of which each worker cuts its own. No request may run, and
    the prefix cache, whose keys hold the adapter's name, must be reset."""
    manager = worker_manager._adapter_manager
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    adapter = LoRAModel.from_lora_tensors(
        lora_id,
        tensors,
        PEFTHelper.from_dict(config),
        device="cpu",
        dtype=manager.lora_config.lora_dtype,
        weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
    )
    manager.remove_adapter(lora_id)
    manager.add_adapter(adapter)
    manager.activate_adapter(lora_id)
    manager.pin_adapter(lora_id)  # once evicted, vLLM would look for its folder


def _kill_after(owner_descriptor: int, core_pid: int) -> None:
    select.select([owner_descriptor], [], [])  # readable when the owner has ended; waits as long as this worker lives
    os.kill(core_pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
