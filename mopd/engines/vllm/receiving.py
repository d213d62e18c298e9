"""mopd's engine of vLLM's weight-transfer protocol: loads a group's buckets into the model, inside each vLLM worker.

vLLM creates one for each worker, by the name ``BACKEND`` (``WorkerExtension`` registers it), and calls

    init_transfer_engine                                             once for each group
    start_weight_update -> update_weights -> finish_weight_update    for each update

A worker that fails raises nothing and reports it when asked (``failure``): of several workers vLLM reads answers until
the first error, and would take the remaining answers for those of its next calls.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from mopd.base.text import one_line
from mopd.engines.interface import Reception
from mopd.weights.buckets import from_json
from mopd.weights.group import GroupOrder, TransferFailed
from mopd.weights.mapped import open_receiver
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
    """Rows of ``mopd.weights.buckets.to_json``."""


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

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Enter the group; blocks until it has met."""
        self.shutdown()
        parallel = self.parallel_config
        # each worker of the replica has its own rank in the group, in vLLM's order of workers
        rank = init_info.first_rank + parallel.data_parallel_index * parallel.world_size + parallel.rank
        try:
            self.failure = None
            self.receiver = open_receiver(
                GroupOrder(**init_info.order),
                rank,
                from_json(init_info.tensors),
                keeps_views=True,
                device=self.device,
            )
        except (TransferFailed, ValueError) as error:
            self.failure = one_line(error)

    def start_weight_update(self) -> None:
        """Begin an update; no request runs until it is finished."""
        self.failure = None
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
        self.model.load_weights(receiver.tensors(verify=update_info.verify, patience_s=update_info.patience_s))
        self.reception = Reception(wait_s=receiver.wait_s, load_s=time.perf_counter() - began - receiver.wait_s)

    def finish_weight_update(self) -> None:
        """Complete the layers. Called after a failure too, as vLLM's session must end; it then does nothing."""
        if self.failure is not None or self.receiver is None:
            return
        with quiet_reload() if self.receiver.num_skipped else nullcontext():
            finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Leave the group."""
        receiver, self.receiver = self.receiver, None
        if receiver is not None:
            receiver.close()

    def _abandon(self) -> None:
        """Leave the group and restore the old tensors of incomplete layers, so that a full update can begin."""
        self.shutdown()
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                # vLLM's reload keeps the old tensors of a layer aside until it is complete; with nothing loaded it puts
                # them back
                info.load_numel, info.loaded_weights = 0, []
        finalize_layerwise_reload(self.model, self.model_config)
