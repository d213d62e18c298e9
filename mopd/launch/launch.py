"""Start the ranks of one machine with torchrun's own machinery, and end with the one error that matters.

    launcher ── torchrun agent ──> rank 0, rank 1, …   (each the leader of its own process group)
        └────── reaper: waits for the launcher's end, kills what is left of those groups

Several machines are started with ``torchrun … -m mopd …`` on each; this module is then not used.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from mopd.files.writing import temporary_folder
from mopd.launch import sharing
from mopd.launch.failure import (
    ERROR_CODE,
    LAUNCH_DIR,
    LAUNCHER_PID,
    USER_ERROR_CODE,
    RankFailure,
    read_failures,
    reserve,
)
from mopd.placement import reaper
from mopd.text import visible

TERMINATE_TIMEOUT_S = 30
"""torchrun's own wait between SIGTERM and SIGKILL when it ends ranks after a failure."""


def launch(command: Sequence[str], *, world_size: int, shared: str | None = None, cure: str = "") -> int:
    """Run ``command`` as ``world_size`` ranks and return the exit code of the whole.

    0 when every rank ended well; 2 after a rank's user error (its line is printed, nothing else); 1 after any other
    failure (a traceback, or one line that names the rank and the signal that killed it); 128 + n when this process got
    signal n. No rank and no child of a rank is left when this returns or when this process is killed.

    Args:
        command: program and arguments. The program calls ``failure.run_as_rank``.
        world_size: number of ranks, all on this machine.
        shared: text for all of them (``sharing.from_launcher``).
        cure: ends the line of a death that says nothing of it.

    Raises:
        UserError: no temporary folder can be written.
    """
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world_size,
        run_id=f"mopd-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
    )
    # The agent's account of a failure would bury ours.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    with _reaped_folder() as launch_dir:
        reserve(launch_dir, world_size)
        if shared is not None:
            sharing.to_ranks(launch_dir, shared)
        os.environ.update(_rank_environment(world_size, launch_dir))
        try:
            elastic_launch(config, command[0])(*command[1:])
        except ChildFailedError as error:
            return _tell(list(error.failures.items()), read_failures(launch_dir), cure)
        except SignalException as error:
            print(f"mopd: ended by {error.sigval.name}{cure}", file=sys.stderr)
            return 128 + error.sigval
    return 0


def _rank_environment(world_size: int, launch_dir: Path) -> dict[str, str]:
    """What ranks find in their environment besides torchrun's variables; a user's own setting wins."""
    defaults = {
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // world_size)),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron's overlap of TP communication relies on one queue
        "GLOO_SOCKET_IFNAME": "lo",  # one machine: works where the host's name does not resolve
    }
    chosen = {name: os.environ.get(name, value) for name, value in defaults.items()}
    return {**chosen, LAUNCH_DIR: str(launch_dir), LAUNCHER_PID: str(os.getpid())}


@contextmanager
def _reaped_folder() -> Iterator[Path]:
    """The launch folder, with a process that clears up after it (see ``reaper``)."""
    folder = temporary_folder("mopd-launch-")
    command = [sys.executable, "-I", "-S", reaper.__file__, str(folder)]
    clearing = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield folder
    finally:
        for number in handlers:
            signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C must not stop the clearing up
        assert clearing.stdin is not None
        clearing.stdin.close()
        clearing.wait(timeout=TERMINATE_TIMEOUT_S)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _tell(deaths: Sequence[tuple[int, ProcessFailure]], failures: Sequence[RankFailure], cure: str) -> int:
    """Print the cause among everything that failed and return the exit code.

    A user error explains itself. A rank that died without a word comes before reported exceptions, which are then the
    other ranks' broken collectives; they are still shown unless SIGKILL, which nobody sends to himself, settles it.

    Args:
        deaths: rank and how it ended, in the order in which the agent saw them; the ranks that the agent ended itself
            are among them.
        failures: errors that ranks reported, earliest first.
        cure: see ``launch``.
    """
    if failures and failures[0].is_user_error:
        print(f"mopd: error: {failures[0].message}", file=sys.stderr)
        return USER_ERROR_CODE
    told = {failure.rank for failure in failures}
    silent = [(rank, d) for rank, d in deaths if rank not in told and not _was_agents_doing(d, failures)]
    if not silent:
        rank = failures[0].rank
        traceback = visible(failures[0].traceback, keep="\n")
        print(f"{traceback}mopd: error: rank {rank} failed, see the traceback above", file=sys.stderr)
        return ERROR_CODE
    rank, death = silent[0]
    if failures and death.exitcode != -signal.SIGKILL:
        sys.stderr.write(visible(failures[0].traceback, keep="\n"))
    print(f"mopd: error: rank {rank} {_how_it_ended(death.exitcode)}{cure}", file=sys.stderr)
    return ERROR_CODE


def _how_it_ended(exitcode: int) -> str:
    if exitcode > 0:
        return f"ended with exit code {exitcode} and no message"
    name = signal.Signals(-exitcode).name
    return f"was killed by {name}" + (": often the kernel, out of memory" if name == "SIGKILL" else "")


def _was_agents_doing(death: ProcessFailure, failures: Sequence[RankFailure]) -> bool:
    """Whether the agent sent the signal: SIGTERM, or SIGKILL a while later, after some rank had failed."""
    if not failures:
        return False
    late = death.timestamp >= int(failures[0].time_s) + TERMINATE_TIMEOUT_S
    return death.exitcode == -signal.SIGTERM or (death.exitcode == -signal.SIGKILL and late)
