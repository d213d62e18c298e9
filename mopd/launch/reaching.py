"""Whether the nodes of a run reach one another as their ranks will, before the ranks join.

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
from mopd.launch.failure import local_world_size, rank_and_world_size
from mopd.launch.heartbeat import agent_store

REACH_S = 30.0
"""For the first ranks of all nodes to connect, once they are there."""
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
    store = agent_store("reach")
    if store is None:
        return
    from torch.distributed import DistStoreError, PrefixStore, ProcessGroupGloo

    number, size = int(os.environ["GROUP_RANK"]), int(os.environ["GROUP_WORLD_SIZE"])
    if store.add("here", 1) == size:
        store.set("all", "")
    try:
        store.wait(["all"], timedelta(seconds=timeout_s))
    except DistStoreError as error:
        raise UserError(
            f"ranks of {size - store.add('here', 0)} of {size} nodes did not come within {timeout_s:g} s "
            "(schedule.wait_timeout_s): see their logs"
        ) from error
    with told_to_reach():
        group = ProcessGroupGloo(PrefixStore("gloo", store), number, size, timedelta(seconds=REACH_S / _GLOO_FACTOR))
    # A group that goes closes its connections, also those that a slower node is still about to make use of.
    if store.add("connected", 1) == size:
        store.set("all connected", "")
    try:
        store.wait(["all connected"], timedelta(seconds=2 * REACH_S))
    except DistStoreError as error:
        raise UserError(
            f"{size - store.add('connected', 0)} of {size} nodes did not reach the others by gloo within "
            f"{2 * REACH_S:g} s: see their logs; {CURE}"
        ) from error
    del group


@contextmanager
def told_to_reach() -> Iterator[None]:
    """Turns gloo's failure to connect into one line."""
    try:
        yield
    except RuntimeError as error:
        if "connectFullMesh failed" not in str(error):
            raise
        reason = re.sub(r"^.*\[/\S*\] | \[none\]$", "", one_line(error))  # its place in the library's source
        raise UserError(f"the ranks of this node do not reach all others by gloo ({reason}): {CURE}") from error
