"""Start the ranks of this machine with torchrun's own agent, and end with the one error that matters.

    launcher ── torchrun agent ──> rank 0, rank 1, …   (each the leader of its own process group)
        └────── reaper: waits for the launcher's end, kills what is left of those groups

Several machines have a launcher each (see ``nodes``), and the error is told on the machine where it happened.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed import PrefixStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from mopd.base.files.temporary import TemporaryFolder
from mopd.base.hardware import node_name
from mopd.base.text import visible
from mopd.launch import sharing
from mopd.launch.failure import (
    ERROR_CODE,
    LAUNCH_DIR,
    LAUNCHER_PID,
    STOPPED_CODE,
    USER_ERROR_CODE,
    Ended,
    RankFailure,
    read_failures,
    read_stopped,
    reserve,
)
from mopd.launch.node import RANK_DEFAULTS
from mopd.launch.nodes import Kind, NodeLostError, Nodes
from mopd.launch.signals import first_sigterm_asks
from mopd.placement import reaper
from mopd.placement.ending import EXIT_S, TERMINATE_TIMEOUT_S

_LOST_PEER = re.compile(
    r"Connection (closed|reset|refused)|closed by peer|Broken pipe|Timed out waiting|[Ss]ocket [Tt]imeout|"
    r"remote process|NCCL (communicator|Error)|failed to (recv|send)|StorageEnded"
)
"""In an error of a rank that has lost another one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Account:
    """What is told of this node's ranks."""

    kind: Kind
    code: int
    line: str
    """Without ``mopd: error:``."""
    elsewhere: str
    """The same, on other nodes."""
    above: str = ""
    """A traceback."""

    def tell(self, nodes: Nodes) -> None:
        """To the other nodes."""
        nodes.tell(self.kind, self.elsewhere, code=self.code)


def launch(
    command: Sequence[str],
    *,
    num_ranks: int,
    nodes: Nodes,
    shared: str | None = None,
    cure: Callable[[], str] = lambda: "",
    ask: Callable[[], None] | None = None,
) -> Ended:
    """Run ``command`` as ``num_ranks`` ranks on this node, and tell how they ended.

    The code is 0 when every rank ended well; 75 after a request to stop; 2 after a rank's user error (its line is
    printed, nothing else); 1 after any other failure (a traceback, or one line that names the rank and the signal that
    killed it); 128 + n when this process got signal n. No rank and no child of a rank is left when this returns or when
    this process is killed.

    Args:
        command: program and arguments. The program calls ``failure.run_as_rank``.
        num_ranks: on this node.
        nodes: the launchers of the run, which have met.
        shared: text for all ranks (``sharing.from_launcher``).
        cure: its text ends the line of a death that says nothing of it.
        ask: what the first SIGTERM does; without it SIGTERM ends the ranks.

    Raises:
        UserError: no temporary folder can be written.
    """
    with _reaped_folder() as launch_dir:

        def account(deaths: Sequence[Death]) -> _Account:
            where = f" on {node_name()}" if nodes.are_several else ""
            return _account(deaths, read_failures(launch_dir), where, cure())

        def on_failure(deaths: Sequence[Death]) -> None:
            if nodes.are_several:  # the others' ranks have lost one, and shall hear why before these are through
                account(deaths).tell(nodes)

        agent = RankAgent(nodes, command, num_ranks=num_ranks, run_id=f"mopd-{os.getpid()}", on_failure=on_failure)
        with agent.ended_by_signals(ask=ask):
            first = nodes.place.node_rank * num_ranks
            reserve(launch_dir, range(first, first + num_ranks))
            if shared is not None:
                sharing.to_ranks(launch_dir, shared)
            os.environ.update(_rank_environment(num_ranks, launch_dir, nodes))
            try:
                deaths = agent.deaths()
            except OthersFailedError:
                return ended_by_others(nodes)
            except TerminatedError:
                return _tell_signal(signal.SIGTERM, nodes, cure())
            except SignalException as error:
                return _tell_signal(error.sigval, nodes, cure())
        if deaths:
            return _tell(account(deaths), nodes)
        line = read_stopped(launch_dir)
        if line is None:
            return Ended(code=0)
        if line:
            print(f"mopd: {line}", file=sys.stderr)
        return Ended(code=STOPPED_CODE, line=line)


def ended_by_others(nodes: Nodes) -> Ended:
    """Tell in one line that another node's end was this one's too."""
    cause = nodes.cause()
    if cause.code == STOPPED_CODE:
        print(f"mopd: {cause.line}", file=sys.stderr)
    elif cause.kind == "gone":
        print(f"mopd: error: {cause.line}", file=sys.stderr)
    else:
        why = cause.line or "it told no reason"
        print(f"mopd: error: {node_name()} ends with {cause.name}: {why}", file=sys.stderr)
    return Ended(code=cause.code, line=cause.line)


def _tell_signal(number: signal.Signals, nodes: Nodes, cure: str) -> Ended:
    line = f"ended by {number.name}{cure}"
    if nodes.are_several:
        nodes.tell("signal", f"{line} on {node_name()}", code=128 + number)
        nodes.cause()
    print(f"mopd: {line}", file=sys.stderr)
    return Ended(code=128 + number, line=line)


def _rank_environment(num_ranks: int, launch_dir: Path, nodes: Nodes) -> dict[str, str]:
    """What ranks find in their environment besides torchrun's variables; a user's own setting wins."""
    defaults = RANK_DEFAULTS | {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // num_ranks))}
    if nodes.place.is_on_loopback:
        defaults["GLOO_SOCKET_IFNAME"] = "lo"  # works where the host's name does not resolve
    chosen = {name: os.environ.get(name, value) for name, value in defaults.items()}
    return {**chosen, LAUNCH_DIR: str(launch_dir), LAUNCHER_PID: str(os.getpid())}


@contextmanager
def _reaped_folder() -> Iterator[Path]:
    """The launch folder, with a process that clears up after it (see ``reaper``)."""
    folder = TemporaryFolder("mopd-launch-")
    command = [sys.executable, "-I", "-S", reaper.__file__, str(folder.path)]
    # The reaper has the folder's lock too: it outlives this process, and needs the folder until it has ended.
    clearing = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, pass_fds=[folder.fileno()])
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield folder.path
    finally:
        for number in handlers:
            signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C must not stop the clearing up
        assert clearing.stdin is not None
        clearing.stdin.close()
        clearing.wait(timeout=TERMINATE_TIMEOUT_S)
        folder.close()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _tell(own: _Account, nodes: Nodes) -> Ended:
    """Print the cause of the end, where it happened, and a line elsewhere."""
    if nodes.are_several:
        own.tell(nodes)
        if nodes.cause().node_rank != nodes.place.node_rank:
            return ended_by_others(nodes)
    print(f"{own.above}mopd: error: {own.line}", file=sys.stderr)
    return Ended(code=own.code, line=own.line)


def _account(deaths: Sequence[Death], failures: Sequence[RankFailure], where: str, cure: str) -> _Account:
    """The cause among everything that failed on this node.

    A user error explains itself. A rank that died without a word comes before reported exceptions, which are then the
    other ranks' broken collectives; they are still shown unless SIGKILL, which nobody sends to himself, settles it.

    Args:
        deaths: in the order in which the agent saw them; the ranks that the agent ended itself are among them.
        failures: errors that ranks reported, earliest first.
        where: follows the rank's number.
        cure: ends the line of a death that says nothing of it.
    """
    if failures and failures[0].is_user_error:
        line = failures[0].message
        return _Account(kind="user_error", code=USER_ERROR_CODE, line=line, elsewhere=line)
    told = {failure.rank for failure in failures}
    silent = [death for death in deaths if death.rank not in told and not _was_agents_doing(death, failures)]
    if not silent:
        first = failures[0]
        rank = f"rank {first.rank}{where} failed"
        return _Account(
            kind="peer_lost" if _LOST_PEER.search(first.traceback) else "error",
            code=ERROR_CODE,
            line=f"{rank}, see the traceback above",
            elsewhere=f"{rank}: {first.message}",
            above=visible(first.traceback, keep="\n"),
        )
    death = silent[0]
    line = f"rank {death.rank}{where} {_how_it_ended(death.exitcode)}{cure}"
    above = visible(failures[0].traceback, keep="\n") if failures and death.exitcode != -signal.SIGKILL else ""
    return _Account(kind="died", code=ERROR_CODE, line=line, elsewhere=line, above=above)


def _how_it_ended(exitcode: int) -> str:
    if exitcode > 0:
        return f"ended with exit code {exitcode} and no message"
    name = signal.Signals(-exitcode).name
    return f"was killed by {name}" + (": often the kernel, out of memory" if name == "SIGKILL" else "")


def _was_agents_doing(death: Death, failures: Sequence[RankFailure]) -> bool:
    """Whether the agent sent the signal, SIGKILL a while after the others, once some rank had failed."""
    if not failures:
        return False
    late = death.time_s >= int(failures[0].time_s) + TERMINATE_TIMEOUT_S
    return -death.exitcode in (signal.SIGINT, signal.SIGTERM) or (death.exitcode == -signal.SIGKILL and late)


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
