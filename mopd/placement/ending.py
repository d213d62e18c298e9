"""How long replicas take to end. Each of these waits is longer than those that it contains."""

from __future__ import annotations

from mopd.engines.concurrency import CANCEL_GRACE_S
from mopd.placement.reaper import TRACKER_S

STOP_GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL to a server of this run. Nobody waits for an answer of it any more: it is cut off
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
