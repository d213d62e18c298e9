"""How long a run takes to end. Each of these waits is longer than those that it contains::

launcher ── EXIT_S, TERMINATE_TIMEOUT_S ──> rank 0 ── END_S ──> orchestrator ── GROUPS_CLOSE_S ──> engine servers
                                                                    ├── REWARDS_END_S ──> reward processes
                                                                    └── THREAD_END_S ──> data plane
"""

from __future__ import annotations

import math

from mopd.placement.ending import GROUPS_CLOSE_S
from mopd.rewards.process import END_S as REWARDS_END_S
from mopd.tasks import THREAD_END_S

MARGIN_S = 5.0
"""Seconds by which a wait for a process is longer than what that waits for."""
END_S = GROUPS_CLOSE_S + THREAD_END_S + REWARDS_END_S + MARGIN_S
"""Seconds for the orchestrator to end its engine servers, the data plane and the rewards, in this order."""
TERMINATE_TIMEOUT_S = math.ceil(END_S + MARGIN_S)
"""Whole seconds between the signal and SIGKILL when torchrun's agent ends ranks after a failure. Rank 0 waits for the
orchestrator meanwhile."""
EXIT_S = 2.0 * TERMINATE_TIMEOUT_S
"""Seconds for the other nodes' ranks to end, once this node's have ended well: rank 0 may be on another node, and be
ended by its agent."""
