"""This machine among those of a run: what it is called, and which of the launchers it has."""

from __future__ import annotations

import argparse
import ipaddress
import os
import re
import socket
from dataclasses import dataclass

from mopd.text import file_name
from mopd.types import UserError

NODE_NAME = "MOPD_NODE_NAME"
"""Environment variable: another name for this machine, as where two of its launchers stand for two nodes."""
RUN_SECRET = "MOPD_RUN_SECRET"
"""Environment variable: a secret of the run's launchers, against what others write into their store."""
LOOPBACK = "127.0.0.1"
MAX_NODES = 4096


def node_name() -> str:
    """``NODE`` in ``RUN/logs/NODE/ROLE.log``, fit for a file name: Slurm's name of the node, else the host's without
    its domain."""
    given = os.environ.get(NODE_NAME) or os.environ.get("SLURMD_NODENAME")
    return file_name(given or socket.gethostname().partition(".")[0] or "localhost")


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """One launcher's place among those of a run, one a node."""

    num_nodes: int = 1
    node_rank: int = 0
    host: str = LOOPBACK
    """Address of node 0, as all nodes know it."""
    port: int = 0
    """Of the store that node 0's launcher holds; 0 for any, where there is one node."""

    @property
    def is_first(self) -> bool:
        """Here runs rank 0, and what this run starts besides ranks."""
        return self.node_rank == 0

    @property
    def is_on_loopback(self) -> bool:
        """All launchers run on this machine."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:  # a host's name
            return False


def add_node_arguments(parser: argparse.ArgumentParser) -> None:
    """torchrun's names and meaning."""
    add = parser.add_argument
    add("--nnodes", type=int, default=1, metavar="N", help="start this command once on each of N nodes")
    add("--node-rank", type=int, default=0, metavar="R", help="with --nnodes: which of them this is, 0 to N-1")
    add("--rdzv-endpoint", metavar="HOST:PORT", help="with --nnodes: an address and a free port of node 0")


def place_of(args: argparse.Namespace) -> Place:
    """Where the command line puts this launcher. ``UserError`` for options that do not go together."""
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
