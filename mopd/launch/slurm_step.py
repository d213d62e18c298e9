"""What Slurm tells the processes of a step about their place in it."""

from __future__ import annotations

import os


def node_of_step() -> tuple[int, int] | None:
    """(number of nodes, this node's number) of the Slurm step that this process is in; ``None`` outside of one."""
    num_nodes = os.environ.get("SLURM_STEP_NUM_NODES", os.environ.get("SLURM_NNODES"))
    node = os.environ.get("SLURM_NODEID")
    if num_nodes is None or node is None or "SLURM_PROCID" not in os.environ:
        return None
    return int(num_nodes), int(node)


def gpus_of_step() -> int | None:
    """GPUs that Slurm gives the job on this node; ``None`` where it says nothing."""
    told = os.environ.get("SLURM_GPUS_ON_NODE", "")
    return int(told) if told.isdecimal() else None
