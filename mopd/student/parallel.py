"""The parallel layout of the trainer ranks. The only module of mopd that reads Megatron's ``parallel_state``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from torch._C._distributed_c10d import HashStore

from mopd.base.files.writing import WriteRefusedError
from mopd.base.text import encodable
from mopd.base.types import UserError
from mopd.config.student import ParallelConfig
from mopd.config.values import MAX_SECONDS
from mopd.student import cpu_shim


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """This rank's coordinates among the trainer ranks, and its process groups."""

    rank: int
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    vp_size: int
    """Number of model chunks of every pipeline stage."""
    cp_rank: int
    cp_size: int
    dp_rank: int
    dp_size: int
    ep_rank: int
    ep_size: int
    etp_rank: int
    etp_size: int
    edp_rank: int
    """Index of the copy of the experts that this rank helps to hold."""
    sequence_parallel: bool
    device: torch.device
    tp_group: dist.ProcessGroup
    pp_group: dist.ProcessGroup
    cp_group: dist.ProcessGroup
    """Ranks that share the tokens of each sequence."""
    ep_group: dist.ProcessGroup
    """Ranks that share the experts of a layer."""
    etp_group: dist.ProcessGroup
    """Ranks that share each expert."""
    control_group: dist.ProcessGroup
    """gloo group over all trainer ranks, for CPU tensors: commands, hashes."""
    samples_group: dist.ProcessGroup
    """gloo group, for CPU tensors, of the ranks that compute the same samples: ``tp_group``'s and ``cp_group``'s. Only
    the prefetching thread beside Megatron's may use it."""
    checkpoint_group: dist.ProcessGroup
    """gloo group over all trainer ranks, used only by the threads that write a checkpoint beside the steps."""

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank holds the embedding, in its first chunk."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes logits and the loss, in its last chunk."""
        return self.pp_rank == self.pp_size - 1

    @property
    def reports_loss(self) -> bool:
        """Whether this rank adds its rows' share of the loss to sums over all ranks. Of tensor-parallel neighbours,
        which hold the same numbers, only the first does."""
        return self.is_last_stage and self.tp_rank == 0

    @property
    def copy(self) -> int:
        """Index of the copy of the non-expert weights that this rank helps to hold."""
        return self.dp_rank * self.cp_size + self.cp_rank

    def sizes(self) -> dict[str, int]:
        """Return the degrees of parallelism by recipe key; those of context and experts unless they are defaults."""
        defaults = {"cp": 1, "ep": 1, "etp": self.tp_size}
        sizes = {short: getattr(self, f"{short}_size") for short in _DIMENSIONS}
        return {f"{_DIMENSIONS[short]}_size": n for short, n in sizes.items() if n != defaults.get(short)}


_layout: Layout | None = None

_DIMENSIONS = {
    "tp": "tensor_model_parallel",
    "pp": "pipeline_model_parallel",
    "cp": "context_parallel",
    "dp": "data_parallel",
    "ep": "expert_model_parallel",
    "etp": "expert_tensor_parallel",
}
"""Prefix of a dimension's fields of ``Layout`` -> its name in Megatron and in the recipe's keys."""


MARGIN_SHARE = 0.25
"""Share of its deadline by which a rank waits longer in a collective. The other rank may be waiting for something else
(samples, a checkpoint that is being written): its own deadline then ends first, and its error says what was missing."""


@cpu_shim.activate()
def initialize(parallel: ParallelConfig, *, timeout_s: float, seed: int, local_rank: int | None = None) -> Layout:
    """Join the other ranks and build Megatron's process groups; return the existing layout if it is the same.

    Without an initialised ``torch.distributed`` this joins the ranks that torchrun started (NCCL with CUDA, else gloo),
    or becomes a world of one.

    Args:
        parallel: the layout.
        timeout_s: longest wait of one rank; that of a collective is ``MARGIN_SHARE`` longer.
        seed: seed of Megatron's random states.
        local_rank: this rank's number among those of its machine, which is its GPU's; ignored without CUDA, and may be
            left out by a rank that is alone.

    Raises:
        UserError: the world size is not the recipe's, or there is no such GPU.
        RuntimeError: another layout is active (``destroy`` it first).
    """
    global _layout
    if _layout is not None:
        if not _is_same(_layout, parallel):
            raise RuntimeError(f"another parallel layout is active: {_layout.sizes()}; destroy it first")
        return _layout
    timeout_s = min(timeout_s * (1 + MARGIN_SHARE), MAX_SECONDS)
    _init_distributed(timeout_s, local_rank)
    check_world_size(parallel, dist.get_world_size())
    chunks = parallel.virtual_pipeline_model_parallel_size
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=parallel.resolved_expert_tensor_parallel_size,
        distributed_timeout_minutes=max(1, math.ceil(timeout_s / 60)),
    )
    # Nothing draws from these states (no dropout, weights come from a checkpoint); Megatron's modules ask for them.
    model_parallel_cuda_manual_seed(seed)
    places: dict[str, Any] = {}
    for short, name in _DIMENSIONS.items():
        places[f"{short}_rank"] = getattr(parallel_state, f"get_{name}_rank")()
        places[f"{short}_size"] = getattr(parallel_state, f"get_{name}_world_size")()
        places[f"{short}_group"] = getattr(parallel_state, f"get_{name}_group")()
    del places["dp_group"]
    _layout = Layout(
        **places,
        rank=dist.get_rank(),
        vp_size=chunks,
        edp_rank=parallel_state.get_expert_data_parallel_rank(),
        sequence_parallel=parallel.sequence_parallel,
        device=torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu"),
        control_group=dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)),
        samples_group=_samples_group(timeout_s),
        # ``CheckpointThread.finish`` sets the deadline of these waits, which include disks; a rank that dies ends
        # them too.
        checkpoint_group=dist.new_group(backend="gloo", timeout=timedelta(seconds=MAX_SECONDS)),
    )
    return _layout


def _samples_group(timeout_s: float) -> dist.ProcessGroup:
    """Return a gloo group like Megatron's group of tensor- and context-parallel ranks. Megatron numbers ranks so that
    those of such a group are consecutive, which is checked."""
    own = parallel_state.get_tensor_and_context_parallel_group()
    group: dist.ProcessGroup
    group, _ = dist.new_subgroups(group_size=own.size(), backend="gloo", timeout=timedelta(seconds=timeout_s))
    ranks = dist.get_process_group_ranks(group)
    if ranks != dist.get_process_group_ranks(own):
        raise RuntimeError(f"Megatron's group of tensor- and context-parallel ranks is not ranks {ranks}")
    return group


def _is_same(layout: Layout, parallel: ParallelConfig) -> bool:
    """Return whether the layout is the asked one. The data-parallel degree follows from the world size."""
    chunks, is_split = parallel.virtual_pipeline_model_parallel_size, parallel.sequence_parallel
    if (layout.vp_size, layout.etp_size) != (chunks, parallel.resolved_expert_tensor_parallel_size):
        return False
    degrees = {short: f"{name}_size" for short, name in _DIMENSIONS.items() if short not in ("dp", "etp")}
    is_equal = (getattr(layout, f"{short}_size") == getattr(parallel, key) for short, key in degrees.items())
    return layout.sequence_parallel == is_split and all(is_equal)


def schedule_groups() -> ProcessGroupCollection:
    """Return the groups that Megatron's pipeline schedules look up themselves if they are not given."""
    return ProcessGroupCollection.use_mpu_process_groups(["tp", "cp", "pp", "embd", "pos_embd", "dp_cp"])


def raise_together(layout: Layout, check: Callable[[], None]) -> None:
    """Run ``check`` on rank 0 and raise its ``UserError`` on every rank, so that none waits for the others. A
    ``WriteRefusedError`` keeps its type everywhere."""
    refusals: list[tuple[str, bool] | None] = [None]
    if layout.rank == 0:
        try:
            check()
        except UserError as error:
            refusals = [(encodable(str(error)), isinstance(error, WriteRefusedError))]
    dist.broadcast_object_list(refusals, group_src=0, group=layout.control_group)
    if refusals[0] is not None:
        message, is_write = refusals[0]
        raise (WriteRefusedError if is_write else UserError)(message)


@contextmanager
def joined(parallel: ParallelConfig, *, timeout_s: float, seed: int, local_rank: int | None = None) -> Iterator[Layout]:
    """Run ``initialize`` for the duration of a rank's work; at the end the ranks wait for each other and leave.

    After an error nothing is waited for: the other ranks hang in collectives, and the process is about to end.
    """
    layout = initialize(parallel, timeout_s=timeout_s, seed=seed, local_rank=local_rank)
    yield layout
    # A group that is still alive when the interpreter ends may abort the process from one of gloo's threads.
    dist.barrier(group=layout.control_group)
    destroy()
    dist.destroy_process_group()


def destroy() -> None:
    """End every process group but the world's; ``initialize`` may then build another layout. Ranks that may still
    communicate must meet in a barrier before. Megatron alone would only forget its groups, each of which has three
    threads, one of them awake 100 times a second (gloo)."""
    global _layout
    parallel_state.destroy_model_parallel()
    for name, value in list(vars(parallel_state).items()):
        if isinstance(value, dist.ProcessGroup):  # Megatron keeps two of them
            setattr(parallel_state, name, None)
    _layout = None
    if not dist.is_initialized():
        return
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def check_world_size(parallel: ParallelConfig, world_size: int) -> None:
    """Raise ``UserError`` unless ``world_size`` ranks fit the layout."""
    if world_size != parallel.world_size:
        keys = [f"{_DIMENSIONS[short]}_size" for short in ("tp", "cp", "pp", "dp")]
        degrees = {key: getattr(parallel, key) for key in keys}
        raise UserError(
            f"world size {world_size} is not student.parallel's {parallel.world_size}, the product of {degrees}: start "
            f"{parallel.world_size} ranks or change these keys"
        )


def device_number(local_rank: int | None, *, num_devices: int, is_alone: bool) -> int:
    """Return the number of a rank's GPU, which is the rank's number among those of its machine.

    Raises:
        UserError: there is no such GPU.
        ValueError: ``local_rank`` is missing.
    """
    if local_rank is None:
        if not is_alone:
            raise ValueError("ranks with CUDA need their local_rank")
        local_rank = 0
    if local_rank >= num_devices:
        raise UserError(
            f"trainer rank with LOCAL_RANK {local_rank} sees {num_devices} CUDA devices and needs number {local_rank}: "
            "start as many ranks on each machine as it has GPUs, and show every rank all of them (CUDA_VISIBLE_DEVICES)"
        )
    return local_rank


def _init_distributed(timeout_s: float, local_rank: int | None) -> None:
    """Initialise ``torch.distributed``, unless it is."""
    if dist.is_initialized():
        return
    is_alone = not dist.is_torchelastic_launched()
    if torch.cuda.is_available():  # before NCCL starts: it takes the current device
        torch.cuda.set_device(device_number(local_rank, num_devices=torch.cuda.device_count(), is_alone=is_alone))
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    timeout = timedelta(seconds=timeout_s)
    if is_alone:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout)


def sharded_rows(
    module: torch.nn.Module, name: str, group: Any, prefix: str, offsets: Any, metadata: dict[str, Any] | None
) -> Any:
    """Return Megatron's description for checkpoints of a module whose parameter ``name`` is each tensor-parallel rank's
    own rows (``sharded_state_dict``); empty if it has none."""
    return make_sharded_tensors_for_checkpoint(
        module.state_dict(prefix="", keep_vars=True),
        prefix,
        {name: 0},
        offsets,
        tp_group=group,
        dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
    )
