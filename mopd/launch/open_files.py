"""Descriptors of a trainer rank: gloo connects every rank of a group with every other, one socket for each pair. Node
0's launcher, which holds the store, and the process that holds the samples have one for each rank besides."""

from __future__ import annotations

import resource

from mopd.base.types import UserError
from mopd.config.student import ParallelConfig

OF_A_GROUP = 4
"""Descriptors of a gloo group besides those of its pairs: a listener, an epoll, a pipe."""
RESERVE = 256
"""For all else: the standard streams, logs, stores, NCCL, GPUs, the data plane, files of a checkpoint."""
WANTED = 65536
"""Enough for any run here; a limit that is higher or lower by its owner's choice stays."""


def gloo_groups(parallel: ParallelConfig, *, on_gpu: bool) -> list[int]:
    """Sizes of the groups that a rank joins (``student/parallel.py``): on a GPU those for CPU tensors, Megatron's for
    optimizer states among them; on a CPU all."""
    tp, cp, pp = (
        parallel.tensor_model_parallel_size,
        parallel.context_parallel_size,
        parallel.pipeline_model_parallel_size,
    )
    ep, etp, dp = (
        parallel.expert_model_parallel_size,
        parallel.resolved_expert_tensor_parallel_size,
        parallel.data_parallel_size,
    )
    world = parallel.world_size
    edp = world // (ep * etp * pp)
    both = [world, world, tp * cp, dp, dp * cp, edp]  # commands, checkpoints, samples; Megatron's
    if on_gpu:
        return both
    of_tp = [tp, tp * cp, tp * dp, tp * dp * cp, tp * pp]
    of_experts = [ep, etp, ep * etp, ep * etp * pp, edp]
    embeddings = [min(pp, 2), 1]
    return [*both, world, world, dp, dp * cp, cp, pp, *of_tp, *of_experts, *embeddings]


def needed_files(parallel: ParallelConfig, *, on_gpu: bool, is_first: bool) -> int:
    """Descriptors that a process of a node comes to. On node 0 (``is_first``) rank 0 may also hold the samples, with a
    connection of each rank that reads them."""
    readers = parallel.world_size if is_first else 0
    return RESERVE + readers + sum(size - 1 + OF_A_GROUP for size in gloo_groups(parallel, on_gpu=on_gpu))


def raise_open_files(parallel: ParallelConfig, where: str, *, on_gpu: bool, is_first: bool) -> None:
    """Raise this process's soft limit, which its children inherit, as far as the hard one lets it.

    Args:
        parallel: the ranks.
        where: file, line and key that an error names.
        on_gpu: whether NCCL connects them.
        is_first: whether rank 0 is on this node.

    Raises:
        UserError: the ranks need more.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    most = WANTED if hard == unlimited else min(WANTED, hard)
    if soft != unlimited and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    needed = needed_files(parallel, on_gpu=on_gpu, is_first=is_first)
    if soft != unlimited and soft < needed:
        raise UserError(
            f"{where}: each of {parallel.world_size} ranks needs {needed} open files, and the limit here (ulimit -n, "
            f"hard) is {soft}: raise it to {needed} (LimitNOFILE of the service, /etc/security/limits.conf, --ulimit "
            "nofile of the container)"
        )
