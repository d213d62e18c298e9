"""torchrun's agent, which starts and watches this node's ranks, as our launcher uses it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch.distributed import PrefixStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from mopd.launch.nodes import NodeLostError, Nodes
from mopd.launch.signals import first_sigterm_asks
from mopd.placement.ending import EXIT_S, TERMINATE_TIMEOUT_S

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that end the ranks."""


@dataclass(frozen=True, slots=True)
class Death:
    """A rank that ended badly."""

    rank: int
    exitcode: int
    """-n for signal n."""
    time_s: float
    """Seconds since the epoch, when it was seen."""


class OthersFailedError(SignalException):
    """Another node has failed; this node's ranks get SIGINT."""


class TerminatedError(SignalException):
    """SIGTERM is to end the ranks now; they get SIGINT."""


class RankAgent(LocalElasticAgent):
    """Ends ranks by SIGINT: SIGTERM, which a job that ends sends to every process of it, only asks them."""

    def __init__(
        self,
        nodes: Nodes,
        command: Sequence[str],
        *,
        num_ranks: int,
        run_id: str,
        on_failure: Callable[[Sequence[Death]], None],
    ) -> None:
        """``num_ranks`` are this node's; ``on_failure`` is called as soon as one of them has ended badly."""
        # The agent's account of a failure would bury ours.
        names = [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]
        for name in ("torch.distributed.elastic", *names):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "none"  # its handler raises wherever it comes, see ``_end``
        self._nodes = nodes
        self._asked: SignalException | None = None
        self._is_ending = False
        self._on_failure = on_failure
        self._first: set[int] = set()
        """Ranks that ended badly before this ended the others."""
        spec = WorkerSpec(
            role="trainer",
            local_world_size=num_ranks,
            entrypoint=command[0],
            args=tuple(command[1:]),
            rdzv_handler=_Met(nodes, run_id),
            max_restarts=0,
            monitor_interval=0.1,
        )
        super().__init__(
            spec,
            DefaultLogsSpecs(log_dir=os.devnull),
            exit_barrier_timeout=EXIT_S,
            shutdown_timeout=TERMINATE_TIMEOUT_S,
        )

    def deaths(self) -> list[Death]:
        """Start the ranks and wait for their end: those that failed, first those that did so by themselves, then those
        that this ended because of them.

        Raises:
            TerminatedError: SIGTERM, while ``ended_by_signals``.
            OthersFailedError: another node has failed.
            SignalException: another signal asks for the end.
        """
        failures = self.run().failures
        deaths = [Death(rank, failure.exitcode, failure.timestamp) for rank, failure in failures.items()]
        return sorted(deaths, key=lambda death: death.rank not in self._first)

    @contextlib.contextmanager
    def ended_by_signals(self, *, ask: Callable[[], None] | None) -> Iterator[None]:
        """While the block lasts, signals end the ranks; with ``ask`` the first SIGTERM calls it instead."""
        before = {number: signal.getsignal(number) for number in ENDING}
        for number in ENDING:
            if before[number] != signal.SIG_IGN:  # as under nohup
                signal.signal(number, self._end)
        if ask is not None:
            first_sigterm_asks(ask, then=self._end)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _end(self, number: int, frame: FrameType | None) -> None:
        """A handler. A signal is heeded when the agent next looks at its ranks: raised here, it could cut off the start
        of one, of which nobody would know then, or be lost in a destructor, of which Python tells."""
        sent = signal.Signals(number)
        asked = SignalException(sent.name, sent)
        if sent == signal.SIGTERM:
            asked = TerminatedError(sent.name, signal.SIGINT)
        if self._is_ending:
            raise asked
        self._asked = self._asked or asked

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = TERMINATE_TIMEOUT_S) -> None:
        """Whoever sends a signal while the ranks end does not want to wait for them."""
        self._is_ending = True
        try:
            super()._shutdown(death_sig, timeout)
        except SignalException:
            super()._shutdown(signal.SIGKILL, 0)
            raise
        finally:
            self._is_ending = False

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Ranks get SIGINT when they can end by it (``failure.run_as_rank``): one that comes while Python starts would
        be told as a traceback."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return super()._start_workers(worker_group)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._asked is not None:
            raise self._asked
        ranks = {int(worker.id): int(worker.global_rank) for worker in worker_group.workers}
        codes = {pid: code for pid in ranks if (code := _exitcode(pid)) is not None}
        ended = [] if self._first else [(pid, code) for pid, code in codes.items() if code]
        if ended:
            self._first = {ranks[pid] for pid, _ in ended}
            self._on_failure([Death(ranks[pid], code, time.time()) for pid, code in ended])
            for pid in ranks:  # before the agent's SIGTERM
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGINT)
        # torchrun's own look sends SIGTERM to all others at an end that ours has not seen
        result = super()._monitor_workers(worker_group) if codes else RunResult(state=WorkerState.HEALTHY)
        if result.state == WorkerState.HEALTHY:
            try:
                self._nodes.check()
            except NodeLostError as error:
                raise OthersFailedError("another node has failed", signal.SIGINT) from error
        return result


def _exitcode(pid: int) -> int | None:
    """Of a child that has ended, -n for signal n, 0 for one that torchrun has waited for; ``None`` while it runs."""
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


class _Met(RendezvousHandler):
    """The rendezvous of launchers that have met already."""

    def __init__(self, nodes: Nodes, run_id: str) -> None:
        self._nodes, self._run_id = nodes, run_id

    use_agent_store = True

    def next_rendezvous(self) -> RendezvousInfo:
        place = self._nodes.place
        address = RendezvousStoreInfo(place.host, self._nodes.port)
        return RendezvousInfo(PrefixStore("agent", self._nodes.store), place.node_rank, place.num_nodes, address)

    def get_backend(self) -> str:
        return "mopd"

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nobody asks."""

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True
