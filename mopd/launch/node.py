"""This machine's place among those of a run, and what must be the same on all of them."""

from __future__ import annotations

import argparse
import ipaddress
import os
import re
from dataclasses import dataclass

from mopd.base.types import UserError
from mopd.launch.failure import is_rank
from mopd.placement.process import RUN_SECRET as RUN_SECRET

LOOPBACK = "127.0.0.1"
MAX_NODES = 4096
RANK_DEFAULTS = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
"""Variables that our launcher sets for ranks where the user does not: Megatron's overlap of TP communication relies on
one queue."""
_COMPARED = re.compile(
    r"NVTE_|UB_|CUBLAS|CUDNN_|CUTLASS_|NVIDIA_TF32|TORCH_|PYTORCH_|TORCHDYNAMO_|TORCHINDUCTOR_|AOT|INDUCTOR_|TRITON_|"
    r"(\w+_)?(FLASH_?ATT|FLASHINFER|XFORMERS)|(DISABLE|ENABLE|USE|FORCE)_\w*(FLASH|TRITON|FUSED|FUSION|TMA)|"
    r"ATEN_|ONEDNN_|DNNL_|MKL_|MKLDNN_|KMP_|OPENBLAS_|OMP_(NUM_THREADS|DYNAMIC|SCHEDULE)$|"
    r"CUDA_(DEVICE_MAX_CONNECTIONS|GRAPH_)|MEGATRON_|NCCL_|NVSHMEM_|UCC_"
)
"""Prefixes of variables that choose kernels and algorithms, the order in which they add, and how ranks communicate.
They are whole families, as the next version of a library reads further variables."""
_LEFT_OUT = re.compile(
    r"_(DIR|PATH|FILE|FILENAME|HOME|ROOT|HUB)$|CACHE|LOG|(?<!TORCH_DISTRIBUTED_)DEBUG|VERBOSE|TRACE|DUMP|PROFILE|"
    r"IFNAME|NCCL_(IB_|HOSTID|COMM_ID|NET)|NVSHMEM_(HCA|IB_|BOOTSTRAP)|KMP_AFFINITY|CUDA_ARCH_LIST"
)
"""Parts of names that exclude a variable: paths, logging and interfaces may differ between nodes."""


def compared_environment() -> dict[str, str]:
    """Return the variables that must be the same on all nodes, as ranks on this machine have them."""
    set_here = {
        name: value for name, value in os.environ.items() if _COMPARED.match(name) and not _LEFT_OUT.search(name)
    }
    return set_here if is_rank() else RANK_DEFAULTS | set_here


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A launcher's place among those of a run, one a node."""

    num_nodes: int = 1
    node_rank: int = 0
    host: str = LOOPBACK
    """Address of node 0, the same on all nodes."""
    port: int = 0
    """Port of the store that node 0's launcher holds; 0 for any, where there is one node."""

    @property
    def is_first(self) -> bool:
        """Whether rank 0 runs here, and what the run starts besides ranks."""
        return self.node_rank == 0

    @property
    def is_on_loopback(self) -> bool:
        """Whether all launchers run on this machine."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:  # a host's name
            return False


def add_node_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that place this launcher, with torchrun's names and meaning."""
    add = parser.add_argument
    add("--nnodes", type=int, default=1, metavar="N", help="start this command once on each of N nodes (default: 1)")
    add(
        "--node-rank",
        type=int,
        default=0,
        metavar="R",
        help="with --nnodes: which of them this is, from 0 (default) to N-1",
    )
    add("--rdzv-endpoint", metavar="HOST:PORT", help="with --nnodes: an address and a free port of node 0")


def place_of(args: argparse.Namespace) -> Place:
    """Return this launcher's place from its options. ``UserError`` for options that do not go together."""
    if args.nnodes == 1 and args.node_rank == 0 and args.rdzv_endpoint is None:
        return Place()
    if not 1 <= args.nnodes <= MAX_NODES:
        raise UserError(f"--nnodes is {args.nnodes}: set 1 to {MAX_NODES}")
    if not 0 <= args.node_rank < args.nnodes:
        raise UserError(f"--node-rank is {args.node_rank}: with --nnodes {args.nnodes} set 0 to {args.nnodes - 1}")
    if args.rdzv_endpoint is None:
        raise UserError(f"--nnodes {args.nnodes} needs --rdzv-endpoint HOST:PORT: an address and a free port of node 0")
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:\[\]]+)):(\d{1,5})", args.rdzv_endpoint)
    if match is None or not 0 < int(match[3]) < 2**16:
        raise UserError(f"--rdzv-endpoint is {args.rdzv_endpoint!r}: write HOST:PORT, with a port from 1 to 65535")
    return Place(num_nodes=args.nnodes, node_rank=args.node_rank, host=match[1] or match[2], port=int(match[3]))


def node_of_step() -> tuple[int, int] | None:
    """Return number of nodes and this node's number in the Slurm step of this process; ``None`` outside of one."""
    num_nodes = os.environ.get("SLURM_STEP_NUM_NODES", os.environ.get("SLURM_NNODES"))
    node = os.environ.get("SLURM_NODEID")
    if num_nodes is None or node is None or "SLURM_PROCID" not in os.environ:
        return None
    return int(num_nodes), int(node)


def gpus_of_step() -> int | None:
    """Return the number of GPUs that Slurm gives the job on this node; ``None`` if it is not set."""
    count = os.environ.get("SLURM_GPUS_ON_NODE", "")
    return int(count) if count.isdecimal() else None
