"""Start the ranks of this machine as torchrun would, and end with the one error that matters.

    launcher ──> rank 0, rank 1, …   (each the leader of its own process group)
        └─────── reaper: waits for the launcher's end, then kills what is left of those groups

Several machines have a launcher each (``nodes.py``). The machine on which an error occurred prints it in full.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from mopd.base.files.temporary import TemporaryFolder
from mopd.base.hardware import node_name
from mopd.base.text import visible
from mopd.launch import sharing
from mopd.launch.failure import (
    ERROR_CODE,
    LAUNCH_DIR,
    LAUNCHER_PID,
    STOPPED_CODE,
    TORCHELASTIC_RUN_ID,
    Ended,
    RankFailure,
    read_failures,
    read_stopped,
    reserve,
)
from mopd.launch.node import RANK_DEFAULTS
from mopd.launch.nodes import Kind, NodeLostError, Nodes
from mopd.launch.signals import ENDING, first_sigterm_asks
from mopd.placement import reaper
from mopd.placement.ending import EXIT_S, TERMINATE_TIMEOUT_S

POLL_S = 0.1
_HANDLED = (*ENDING, signal.SIGQUIT)
"""Signals that end the ranks."""
_LOST_PEER = re.compile(
    r"Connection (closed|reset|refused)|closed by peer|Broken pipe|Timed out waiting|[Ss]ocket [Tt]imeout|"
    r"remote process|NCCL (communicator|Error)|failed to (recv|send)|StorageEnded"
)
"""Matches the error of a rank that has lost another one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cause:
    """Why this node's ranks ended."""

    kind: Kind
    code: int
    line: str
    """Error line, without ``mopd: error:``."""
    elsewhere: str
    """Error line for the other nodes."""
    traceback: str = ""


def launch(
    command: Sequence[str],
    *,
    num_ranks: int,
    nodes: Nodes,
    shared: str | None = None,
    cure: Callable[[], str] = lambda: "",
    ask: Callable[[], None] | None = None,
    watch: Callable[[], None] = lambda: None,
) -> Ended:
    """Run ``command`` as ``num_ranks`` ranks on this node, and print how they ended.

    The code is 0 when every rank ended well; 75 after a request to stop; 2 after a rank's user error (only its line is
    printed); 69 where a process or a machine was lost; 1 after any other failure (a traceback, or one line that names
    the rank and the signal that killed it); 128 + n when this process got signal n. No rank and no child of a rank is
    left when this returns or when this process is killed.

    Args:
        command: program and arguments. The program calls ``failure.run_as_rank``.
        num_ranks: on this node.
        nodes: the launchers of the run, which have met.
        shared: text for all ranks (``sharing.from_launcher``).
        cure: ends the line of a rank that died without an error of its own.
        ask: what the first SIGTERM does; without it SIGTERM ends the ranks.
        watch: is called again and again while the ranks run; its error ends them.

    Raises:
        UserError: no temporary folder can be written.
    """
    with _reaped_folder() as launch_dir:
        ranks = _Ranks(first=nodes.place.node_rank * num_ranks)
        try:
            with ranks.ended_by_signals(ask):
                reserve(launch_dir, range(ranks.first, ranks.first + num_ranks))
                if shared is not None:
                    sharing.to_ranks(launch_dir, shared)
                ranks.start(
                    command, [_environment(number, num_ranks, launch_dir, nodes) for number in range(num_ranks)]
                )
                ranks.wait(nodes, watch)
                if ranks.deaths and nodes.are_several:  # before the other nodes' ranks report the lost connection
                    own = _cause(ranks.deaths, read_failures(launch_dir), nodes, cure())
                    nodes.report(own.kind, own.elsewhere, code=own.code)
                ranks.end()
        except NodeLostError:
            return ended_by_others(nodes)
        except _SignalError as error:
            return _print_signal(error.number, nodes, cure())
        if ranks.deaths:
            return _print_cause(_cause(ranks.deaths, read_failures(launch_dir), nodes, cure()), nodes)
        line = read_stopped(launch_dir)
        if line is None:
            return Ended(code=0)
        if line:
            print(f"mopd: {line}", file=sys.stderr)
        return Ended(code=STOPPED_CODE, line=line)


def ended_by_others(nodes: Nodes) -> Ended:
    """Print in one line that this node ends because another one has."""
    cause = nodes.cause()
    if cause.code == STOPPED_CODE:
        print(f"mopd: {cause.line}", file=sys.stderr)
    elif cause.kind == "gone":
        print(f"mopd: error: {cause.line}", file=sys.stderr)
    else:
        why = cause.line or "it told no reason"
        print(f"mopd: error: {node_name()} ends with {cause.name}: {why}", file=sys.stderr)
    return Ended(code=cause.code, line=cause.line)


def _print_signal(number: signal.Signals, nodes: Nodes, cure: str) -> Ended:
    line = f"ended by {number.name}{cure}"
    if nodes.are_several:
        nodes.report("signal", f"{line} on {node_name()}", code=128 + number)
        nodes.cause()
    print(f"mopd: {line}", file=sys.stderr)
    return Ended(code=128 + number, line=line)


def _print_cause(own: _Cause, nodes: Nodes) -> Ended:
    """Print the cause of the end on the node where it happened, and one line on the others."""
    if nodes.are_several:
        nodes.report(own.kind, own.elsewhere, code=own.code)
        if nodes.cause().node_rank != nodes.place.node_rank:
            return ended_by_others(nodes)
    print(f"{own.traceback}mopd: error: {own.line}", file=sys.stderr)
    return Ended(code=own.code, line=own.line)


def _environment(number: int, num_ranks: int, launch_dir: Path, nodes: Nodes) -> dict[str, str]:
    """Return the environment of the node's rank ``number``: this process's, torchrun's variables and our own.

    A user's own setting wins over our defaults.
    """
    place = nodes.place
    defaults = RANK_DEFAULTS | {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // num_ranks))}
    defaults["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "1"
    if place.is_on_loopback:
        defaults["GLOO_SOCKET_IFNAME"] = "lo"  # works where the host's name does not resolve
    rank, world_size = str(place.node_rank * num_ranks + number), str(place.num_nodes * num_ranks)
    return {
        **defaults,
        **os.environ,
        "LOCAL_RANK": str(number),
        "RANK": rank,
        "GROUP_RANK": str(place.node_rank),
        "ROLE_RANK": rank,
        "ROLE_NAME": "trainer",
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "WORLD_SIZE": world_size,
        "GROUP_WORLD_SIZE": str(place.num_nodes),
        "ROLE_WORLD_SIZE": world_size,
        "MASTER_ADDR": place.host,
        "MASTER_PORT": str(nodes.port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        TORCHELASTIC_RUN_ID: f"mopd-{os.getpid()}",
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the launchers' store: ranks hold none themselves
        LAUNCH_DIR: str(launch_dir),
        LAUNCHER_PID: str(os.getpid()),
    }


@contextmanager
def _reaped_folder() -> Iterator[Path]:
    """Make the launch folder, and start the process that clears up after it (``reaper``)."""
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
        clearing.communicate(timeout=TERMINATE_TIMEOUT_S)
        folder.close()
        for number, handler in handlers.items():
            signal.signal(number, handler)


@dataclass(frozen=True, slots=True)
class _Death:
    """A rank that ended badly."""

    rank: int
    exitcode: int
    """Exit code; -n for signal n."""
    is_ours: bool
    """The launcher's own signal ended it."""


class _SignalError(Exception):
    """This process got a signal that ends the ranks."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number


class _Ranks:
    """The rank processes of this node. They end by SIGINT: SIGTERM, which a scheduler sends to every process of a job
    that ends, only asks them."""

    def __init__(self, first: int) -> None:
        """``first``: number of the node's first rank."""
        self.first = first
        self.deaths: list[_Death] = []
        """Ranks that ended badly, in the order in which that was seen."""
        self._processes: list[subprocess.Popen[bytes]] = []
        self._received: list[signal.Signals] = []
        self._sent: set[int] = set()

    @contextmanager
    def ended_by_signals(self, ask: Callable[[], None] | None) -> Iterator[None]:
        """While the block lasts, signals end the ranks; with ``ask`` the first SIGTERM calls that instead. An error
        that leaves the block ends the ranks too."""
        before = {number: signal.getsignal(number) for number in _HANDLED}
        for number in _HANDLED:
            if before[number] != signal.SIG_IGN:  # as under nohup
                signal.signal(number, self._note)
        if ask is not None:
            first_sigterm_asks(ask, then=self._note)
        try:
            yield
        except BaseException:
            self.end()
            raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal. Raised here, it could cut off the start of a rank, which would then be unknown."""
        self._received.append(signal.Signals(number))

    def start(self, command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> None:
        """Start one rank for each environment."""
        # A rank gets SIGINT once it can end by it (``failure.run_as_rank``), not as a traceback while Python starts.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for environment in environments:
                self._processes.append(subprocess.Popen(command, env=environment, start_new_session=True))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def wait(self, nodes: Nodes, watch: Callable[[], None]) -> None:
        """Return when all ranks of the run have ended well, or one of this node's has failed (``deaths``).

        Raises:
            NodeLostError: another node has failed.
            _SignalError: this process got a signal.
        """
        while self._are_alive() and not self.deaths:
            self._raise_signal()
            nodes.check()
            watch()
            time.sleep(POLL_S)
        if not self.deaths:  # ranks of other nodes may still need node 0's store
            nodes.await_end(EXIT_S, poll=self._raise_signal)

    def end(self) -> None:
        """End the ranks: by SIGKILL those that take longer than ``TERMINATE_TIMEOUT_S``, or all after another signal.

        Raises:
            _SignalError: there was such a signal.
        """
        self._send(signal.SIGINT)
        num_received, deadline = len(self._received), time.monotonic() + TERMINATE_TIMEOUT_S
        while self._are_alive() and time.monotonic() < deadline and len(self._received) == num_received:
            time.sleep(POLL_S)
        self._send(signal.SIGKILL)
        while self._are_alive():
            time.sleep(POLL_S)
        if len(self._received) > num_received:
            self._raise_signal()

    def _raise_signal(self) -> None:
        if self._received:
            raise _SignalError(self._received[-1])

    def _are_alive(self) -> bool:
        """Return whether a rank still runs; add those that have failed since the last look to ``deaths``."""
        known = {death.rank for death in self.deaths}
        codes = {self.first + number: process.poll() for number, process in enumerate(self._processes)}
        self.deaths += [
            _Death(rank, code, is_ours=-code in self._sent)
            for rank, code in codes.items()
            if code and rank not in known
        ]
        return None in codes.values()

    def _send(self, number: signal.Signals) -> None:
        self._are_alive()  # what has ended until now did so by itself
        running = [process for process in self._processes if process.returncode is None]
        if running:
            self._sent.add(number)
        for process in running:
            with suppress(ProcessLookupError):
                (os.killpg if number == signal.SIGKILL else os.kill)(process.pid, number)


def _cause(deaths: Sequence[_Death], failures: Sequence[RankFailure], nodes: Nodes, cure: str) -> _Cause:
    """Find the cause among everything that failed on this node.

    A user error explains itself. A rank that died without an error comes before reported exceptions, which are then the
    other ranks' broken collectives; they are still shown unless a SIGKILL from outside settles it.

    Args:
        deaths: in the order in which they were seen.
        failures: errors that ranks reported, earliest first.
        nodes: name this node in the line where there are several.
        cure: ends the line of a rank that died without an error.
    """
    where = f" on {node_name()}" if nodes.are_several else ""
    if failures and failures[0].code != ERROR_CODE:
        line = failures[0].message
        return _Cause(kind="user_error", code=failures[0].code, line=line, elsewhere=line)
    reported = {failure.rank for failure in failures}
    silent = [death for death in deaths if death.rank not in reported and not death.is_ours]
    if not silent:
        first = failures[0]
        rank = f"rank {first.rank}{where} failed"
        return _Cause(
            kind="peer_lost" if _LOST_PEER.search(first.traceback) else "error",
            code=ERROR_CODE,
            line=f"{rank}, see the traceback above",
            elsewhere=f"{rank}: {first.message}",
            traceback=visible(first.traceback, keep="\n"),
        )
    death = silent[0]
    line = f"rank {death.rank}{where} {_how_it_ended(death.exitcode)}{cure}"
    traceback = visible(failures[0].traceback, keep="\n") if failures and death.exitcode != -signal.SIGKILL else ""
    return _Cause(kind="died", code=ERROR_CODE, line=line, elsewhere=line, traceback=traceback)


def _how_it_ended(exitcode: int) -> str:
    if exitcode > 0:
        return f"ended with exit code {exitcode} and no message"
    name = signal.Signals(-exitcode).name
    return f"was killed by {name}" + (": often the kernel, out of memory" if name == "SIGKILL" else "")
