"""A check, before the ranks join, that the nodes of a run reach one another as their ranks will.

gloo takes five times a group's deadline until it gives a connection up, and says nothing of a firewall: with the
deadline of a run's groups that would be hours.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from mopd.base.text import one_line
from mopd.base.types import UserError
from mopd.launch.failure import agent_store, local_world_size, rank_and_world_size

REACH_S = 30.0
"""Seconds for the first ranks of all nodes to connect, once they are there."""
_GLOO_FACTOR = 5
CURE = (
    "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface that joins the nodes, and let all ports through "
    "between them there (firewall)"
)


def check_reach(timeout_s: float) -> None:
    """Connect the first ranks of all nodes to one another once, by gloo. Other ranks, and those of a single node, have
    nothing to do.

    Args:
        timeout_s: for all nodes' first ranks to come.

    Raises:
        UserError: this node does not reach the others.
    """
    num_ranks = rank_and_world_size()[1]
    if local_world_size() == num_ranks or os.environ["LOCAL_RANK"] != "0":
        return
    from torch.distributed import DistStoreError, PrefixStore, ProcessGroupGloo

    store, number, size = agent_store("reach"), int(os.environ["GROUP_RANK"]), int(os.environ["GROUP_WORLD_SIZE"])

    def meet(key: str, seconds: float, problem: str) -> None:
        if store.add(key, 1) == size:
            store.set(f"all {key}", "")
        try:
            store.wait([f"all {key}"], timedelta(seconds=seconds))
        except DistStoreError as error:
            missing = size - store.add(key, 0)
            raise UserError(problem.format(f"{missing} of {size} nodes", f"{seconds:g} s")) from error

    meet("here", timeout_s, "ranks of {} did not come within {} (schedule.wait_timeout_s): see their logs")
    with told_to_reach():
        group = ProcessGroupGloo(PrefixStore("gloo", store), number, size, timedelta(seconds=REACH_S / _GLOO_FACTOR))
    # A group that goes closes its connections, also those that a slower node is still about to make use of.
    meet("connected", 2 * REACH_S, "{} did not reach the others by gloo within {}: see their logs; " + CURE)
    del group


@contextmanager
def told_to_reach() -> Iterator[None]:
    """Turn gloo's failure to connect into one line."""
    try:
        yield
    except RuntimeError as error:
        if "connectFullMesh failed" not in str(error):
            raise
        reason = re.sub(r"^.*\[/\S*\] | \[none\]$", "", one_line(error))  # its place in the library's source
        raise UserError(f"the ranks of this node do not reach all others by gloo ({reason}): {CURE}") from error
