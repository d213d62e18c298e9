"""How long a run takes to end. Each of these waits is longer than those that it contains::

launcher ── EXIT_S, TERMINATE_TIMEOUT_S ──> rank 0 ── END_S ──> orchestrator ── GROUPS_CLOSE_S ──> engine servers
                                                                    ├── THREAD_END_S ──> data plane
                                                                    └── REWARDS_END_S ──> reward processes
"""

from __future__ import annotations

import math

from mopd.base.tasks import THREAD_END_S
from mopd.engines.concurrency import CANCEL_GRACE_S
from mopd.placement.reaper import TRACKER_S
from mopd.rewards.process import END_S as REWARDS_END_S

STOP_GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL to a server of this run. No client waits for its answers any more: it is cut off
where it would let requests end first (``ServerLimits.drain_timeout_s``)."""
KILL_WAIT_S = TRACKER_S + 7.0
"""Seconds for a killed server to end: its reaper's own wait, and a busy machine's time to see it."""
LAST_CALL_TIMEOUT_S = 10.0
"""Seconds for an answer of an agent on a Ray node that ends a server, or itself. One that does not answer is lost, and
asked no more."""
WATCHERS_CLOSE_S = CANCEL_GRACE_S + KILL_WAIT_S
"""Seconds for the watchers of a group to end, one of which may be ending a server."""
GROUP_CLOSE_S = WATCHERS_CLOSE_S + STOP_GRACE_S + KILL_WAIT_S + LAST_CALL_TIMEOUT_S
"""Seconds for a group to end: its watchers, then its servers side by side."""
GROUPS_CLOSE_S = CANCEL_GRACE_S + GROUP_CLOSE_S + LAST_CALL_TIMEOUT_S
"""Seconds for all groups to end: a change of turns on shared GPUs, the groups side by side, then Ray's agents."""
MARGIN_S = 5.0
"""Seconds by which a wait for a process is longer than what that waits for."""
END_S = GROUPS_CLOSE_S + THREAD_END_S + REWARDS_END_S + MARGIN_S
"""Seconds for the orchestrator to end its engine servers, the data plane and the rewards, in this order."""
TERMINATE_TIMEOUT_S = math.ceil(END_S + MARGIN_S)
"""Whole seconds between the signal and SIGKILL when the launcher ends ranks after a failure. Rank 0 waits for the
orchestrator meanwhile."""
EXIT_S = 2.0 * TERMINATE_TIMEOUT_S
"""Seconds for the other nodes' ranks to end, once this node's have ended well: rank 0 may be on another node, and be
ended by its agent."""
