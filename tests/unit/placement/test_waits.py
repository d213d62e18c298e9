"""The table of waits in docs/architecture.md, and shorter waits: each outer one is longer than those that it contains,
by the constants that the code uses. What is renewed has tests of its own: ``test_heartbeat.py`` and ``test_link.py`` of
``tests/unit/launch``, ``tests/unit/orchestrator/test_waiting.py``, ``tests/unit/engines/replicas``."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mopd.base.tasks import THREAD_END_S
from mopd.config.rewards import CodeConfig, ExactMatchConfig
from mopd.data.templates import rendering
from mopd.data_plane import transfer_queue
from mopd.engines.concurrency import CANCEL_GRACE_S
from mopd.engines.replicas.interface import LIMITS
from mopd.engines.replicas.router import MAX_BACKOFF_S
from mopd.launch import heartbeat, leading, nodes, rank_log, reaching
from mopd.launch.checks import conducting, meeting, run_folder
from mopd.launch.checks import conducting as all_reduce
from mopd.launch.slurm import job
from mopd.launch.slurm import submitting as waiting
from mopd.placement import ending, reaper, registered, server_group
from mopd.placement.ray import cluster
from mopd.placement.server_group import ServerGroup
from mopd.rewards import domains as judged
from mopd.rewards import judge, process
from mopd.rewards.domains import JudgedReward
from mopd.serving import registration
from mopd.student import parallel

ARCHITECTURE = Path(__file__).parents[3] / "docs" / "architecture.md"
T = 3600.0
CASES = {
    "a collective: one rank's waits in it": (T * (1 + parallel.MARGIN_SHARE), T),
    "a rank: the stacks that it leaves before": (T, max(T - rank_log.MARGIN_S, T * (1 - rank_log.MARGIN_SHARE))),
    "a process that is silent: its beats": (T, 3 * min(heartbeat.BEAT_S, T * heartbeat.BEAT_SHARE)),
    "the same, short": (1.0, 3 * min(heartbeat.BEAT_S, heartbeat.BEAT_SHARE)),
    "another rank: its looks at the count": (T, 3 * min(heartbeat.LOOK_S, T * heartbeat.LOOK_SHARE)),
    "launcher: the ranks of other nodes": (ending.EXIT_S, float(ending.TERMINATE_TIMEOUT_S)),
    "launcher: rank 0": (ending.TERMINATE_TIMEOUT_S, ending.END_S),
    "launcher: the ranks' reaper": (ending.TERMINATE_TIMEOUT_S, reaper.TRACKER_S),
    "launcher: the others' last word": (nodes.REPORT_S + ending.TERMINATE_TIMEOUT_S, ending.TERMINATE_TIMEOUT_S),
    "launchers: their beats": (nodes.SILENT_S, 3 * nodes.BEAT_S),
    "rank 0: the orchestrator": (ending.END_S, ending.GROUPS_CLOSE_S + process.END_S + THREAD_END_S),
    "groups: one, and Ray": (ending.GROUPS_CLOSE_S, ending.GROUP_CLOSE_S + cluster.LAST_CALL_TIMEOUT_S),  # type: ignore[attr-defined]
    "a group: watchers, servers": (
        ending.GROUP_CLOSE_S,
        CANCEL_GRACE_S + server_group.KILL_WAIT_S + server_group.STOP_GRACE_S + server_group.KILL_WAIT_S,  # type: ignore[attr-defined]
    ),
    "a watcher: the end of a server": (ending.WATCHERS_CLOSE_S, server_group.KILL_WAIT_S),  # type: ignore[attr-defined]
    "a killed server: its reaper": (server_group.KILL_WAIT_S, reaper.TRACKER_S),  # type: ignore[attr-defined]
    "a response: a grader that ends programs": (judged.OVERHEAD_S, judge.GRACE_S),
    "templates: rows of a batch": (rendering.DEADLINE_S, rendering.BATCH_ROWS * rendering.MAX_RENDER_S),
    "TransferQueue: an actor's silence": (
        T,
        transfer_queue.NUM_PROBES * (transfer_queue.PROBE_EVERY_S + transfer_queue.PROBE_TIMEOUT_S),
    ),
    "registered: a server's beats": (registered.SILENT_S, 3 * registration.BEAT_S),
    "check --nodes: node 0's verdict": (
        conducting.VERDICT_S + meeting.MARGIN_S,
        run_folder.STAGE_S + all_reduce.DEADLINE_S + all_reduce.DEADLINE_S + run_folder.STAGE_S,
    ),
    "check --nodes: an all-reduce": (all_reduce.DEADLINE_S + run_folder.STAGE_S, all_reduce.DEADLINE_S),
    "check --nodes: gloo's own reason": (all_reduce.DEADLINE_S, all_reduce.OPERATION_S["gloo"]),
    "ranks: nodes that do not reach one another": (T, reaching.REACH_S),
    "ranks: rank 0's log": (T, leading.SEEN_S),
    "mopd slurm: one call": (waiting.PATIENCE_S, job.CALL_TIMEOUT_S),
}
"""Outer wait: inner one -> seconds of both."""


@pytest.mark.parametrize("case", CASES)
def test_the_outer_wait_is_longer(case: str) -> None:
    outer, inner = CASES[case]
    assert outer > inner


@pytest.mark.parametrize("startup_s", [1.0, 600.0, 7200.0])
def test_a_restart_is_declared_for_as_long_as_its_tries_take(startup_s: float) -> None:
    request_s = 20.0
    group: Any = object.__new__(ServerGroup)
    group.cfg = SimpleNamespace(startup_timeout_s=startup_s)
    group.plan = SimpleNamespace(group=SimpleNamespace(routing=SimpleNamespace(request_timeout_s=request_s)))
    one = startup_s + request_s + server_group.KILL_WAIT_S + server_group.FIRST_PAUSE_S  # type: ignore[attr-defined]
    assert group._longest_restart_s > server_group.MAX_RESTARTS * one


@pytest.mark.parametrize("num_items", [0, 1, 7, 1000])
def test_a_batch_of_rewards_is_given_the_time_of_its_responses(num_items: int) -> None:
    reward = JudgedReward(CodeConfig(type="code", timeout_s=9.0), "rewards.code")
    assert reward._timeout_s(num_items) > num_items * (9.0 + judge.GRACE_S)


class Ending:
    """A reward whose end waits for the other one's."""

    def __init__(self, both: threading.Barrier) -> None:
        self._both = both

    def close(self) -> None:
        self._both.wait(60)


def test_rewards_end_side_by_side() -> None:
    """The orchestrator's end has the time of one."""
    both = threading.Barrier(2)
    rewards: Any = {"math": Ending(both), "code": Ending(both)}
    judged.DomainRewards(dict.fromkeys(rewards, ExactMatchConfig(type="exact_match")), rewards).close()


def test_a_requests_pauses_end_before_a_deadline() -> None:
    """Those between attempts: nobody counts them, so they must be short beside one."""
    assert min(MAX_BACKOFF_S, LIMITS.backoff_s * 2 ** (LIMITS.max_attempts - 2)) < 60.0 < T


def test_the_table_names_files_that_exist() -> None:
    page = ARCHITECTURE.read_text(encoding="utf-8")
    start = page.index("| outer wait | contains |")
    rows = page[start : page.index("\n\n", start)].splitlines()[2:]
    assert len(rows) > 8 and all(row.count("|") == 4 for row in rows)
    package = ARCHITECTURE.parents[1] / "mopd"
    named = {word for row in rows for word in row.split("`")[1::2] if "/" in word}
    assert named and all((package / name).exists() for name in named)
