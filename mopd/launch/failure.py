"""How a rank starts and ends: it never outlives its launcher, and its error reaches the user once.

Under ``mopd``'s own launcher a rank leaves its error as a JSON file in the launch folder and prints nothing; the
launcher prints the one error that came first. Under raw ``torchrun`` the rank prints by itself: a ``UserError`` as one
line from one rank (torchrun's store decides which), anything else as a traceback.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mopd.base.files.writing import refusal, writing
from mopd.base.text import one_line
from mopd.base.types import LostError, UserError

if TYPE_CHECKING:
    from torch.distributed import Store

LAUNCH_DIR = "MOPD_LAUNCH_DIR"
"""Environment variable: folder where ranks leave their process ids and errors."""
LAUNCHER_PID = "MOPD_LAUNCHER_PID"
"""Environment variable: process id of the launcher, which must be the rank's parent."""
TORCHELASTIC_RUN_ID = "TORCHELASTIC_RUN_ID"
"""Environment variable that torchrun sets in the ranks."""
LOST_CODE = LostError.exit_code
"""Exit code of a run that has lost a process or a machine, and is to be started again with ``--resume``."""
STOPPED_CODE = 75
"""Exit code of a run that was asked to stop: its checkpoint is there, and it goes on with ``--resume``."""
ERROR_CODE = 1
STORE_TIMEOUT_S = 10.0
ANSWER_S = 5.0
"""Seconds for the agent's store to answer."""
RESERVED_BYTES = 2**18
"""Disk space kept for each rank's error before the ranks start: a full disk must not swallow the line about it."""
_MAX_MESSAGE, _MAX_TRACEBACK = 4_000, 16_000
"""Longest texts of a report in characters, which fit into the reserved bytes in any encoding."""
STOPPED = "stopped"
"""Suffix of the notes that ranks of a stopped run leave in the launch folder; rank 0's holds the line to print."""
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a launch ended."""

    code: int
    line: str = ""
    """The last line that was printed; empty when all went well."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFailure:
    """An error that ended a rank."""

    rank: int
    code: int
    """Exit code that it gives the run; ``ERROR_CODE`` for an error that is no ``UserError``."""
    message: str
    """One line for a user error."""
    traceback: str
    time_s: float
    """Seconds since the epoch."""


def is_rank() -> bool:
    """Return whether our launcher or the user's torchrun started this process as a rank: by the variable that only
    those set. enroot's hook for PyTorch images sets RANK, WORLD_SIZE, LOCAL_RANK and MASTER_ADDR in every step of a
    Slurm job, other schedulers some of them."""
    return TORCHELASTIC_RUN_ID in os.environ


def is_our_launchers() -> bool:
    """Return whether our own launcher started this rank, not the user's torchrun."""
    return LAUNCH_DIR in os.environ


def rank_and_world_size() -> tuple[int, int]:
    """Return this process's rank and the number of ranks, from torchrun's variables."""
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def local_world_size() -> int:
    """Return the number of ranks on this machine, from torchrun's variables."""
    return int(os.environ["LOCAL_WORLD_SIZE"])


def num_groups() -> int:
    """Return the number of launchers (torchrun's agents or ours), one a machine; 1 in a process that is no rank."""
    return int(os.environ.get("GROUP_WORLD_SIZE", "1")) if is_rank() else 1


def group_rank() -> int:
    """Return the number of the launcher that has started this rank; 0 in a process that is no rank."""
    return int(os.environ.get("GROUP_RANK", "0")) if is_rank() else 0


def rank_0_host() -> str | None:
    """Return, on rank 0, the address by which other machines know its own; ``None`` if all ranks are on one."""
    if not is_rank() or local_world_size() == rank_and_world_size()[1]:
        return None
    return os.environ["MASTER_ADDR"]


def run_as_rank(action: Callable[[], int | None]) -> int:
    """Run a rank's work and return its exit code (0 to our own launcher, which has other ways to know); on an error the
    process ends here.

    Ending with ``os._exit`` is deliberate: after an error other ranks hang in collectives, and joining threads or
    destroying process groups could wait for them.
    """
    launch_dir = _tie_to_parent()
    close_standard_input()
    ignore_library_warnings()
    try:
        code = action()
        sys.stdout.flush()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # torch's CheckpointException is no Exception
        leave(error)
    return code or 0 if launch_dir is None else 0


def ignore_library_warnings() -> None:
    """Silence what Megatron and torch warn of at import and at deprecated calls: nothing that a user can change."""
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.|mopd\.student\.cpu_shim")


def leave_stopped(line: str) -> None:
    """Leave our launcher a note that the run was asked to stop and did, with the line to print; under raw torchrun
    print it."""
    if is_our_launchers():
        (Path(os.environ[LAUNCH_DIR]) / f"{rank_and_world_size()[0]}.{STOPPED}").write_text(line, encoding="utf-8")
    elif line:
        print(f"mopd: {line}", file=sys.stderr)


def read_stopped(launch_dir: Path) -> str | None:
    """Return rank 0's line if the run was asked to stop and did, empty where rank 0 is on another machine; else
    ``None``."""
    notes = sorted(launch_dir.glob(f"*.{STOPPED}"))
    return "".join(note.read_text(encoding="utf-8") for note in notes) if notes else None


def reserve(launch_dir: Path, ranks: Iterable[int]) -> None:
    """Reserve disk space for the errors of ``ranks``.

    Raises:
        UserError: there is none.
    """
    for rank in ranks:
        with writing(launch_dir), _draft(launch_dir, rank).open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, RESERVED_BYTES)


def read_failures(launch_dir: Path) -> list[RankFailure]:
    """Return the errors that ranks left in the launch folder, earliest first."""
    found = [RankFailure(**json.loads(path.read_text(encoding="utf-8"))) for path in launch_dir.glob("*.error.json")]
    return sorted(found, key=lambda failure: failure.time_s)


def close_standard_input() -> None:
    """Close standard input: a library that asks a question in a rank or server gets the end of the input at once."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _tie_to_parent() -> Path | None:
    """Have the kernel kill this process when its parent dies. Returns the launch folder under our own launcher."""
    parent = int(os.environ.get(LAUNCHER_PID, os.getppid()))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died before the call above
        os._exit(ERROR_CODE)
    if LAUNCH_DIR not in os.environ:
        return None
    # Ctrl-C reaches the ranks through the launcher; a Python handler would wait for a collective to end.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the launcher starts ranks with it blocked
    launch_dir = Path(os.environ[LAUNCH_DIR])
    (launch_dir / f"{os.getpid()}.pid").touch()
    return launch_dir


def leave(error: BaseException) -> None:
    """Report the error that ends this rank to the launcher or the user, then end the process; from any thread."""
    error = error if isinstance(error, UserError) else refusal(error) or error
    code = error.exit_code if isinstance(error, UserError) else ERROR_CODE
    if is_our_launchers():
        launch_dir = Path(os.environ[LAUNCH_DIR])
        failure = RankFailure(
            rank=rank_and_world_size()[0],
            code=code,
            message=one_line(error)[:_MAX_MESSAGE],
            traceback="".join(traceback.format_exception(error))[-_MAX_TRACEBACK:],
            time_s=time.time(),
        )
        draft = _draft(launch_dir, failure.rank)
        with draft.open("r+b" if draft.exists() else "wb") as file:  # in place: the blocks are there
            file.write(json.dumps(asdict(failure)).encode())
            file.truncate()
        draft.rename(launch_dir / f"{failure.rank}.error.json")
    elif code == ERROR_CODE:
        traceback.print_exception(error)
    else:
        _print_once(f"mopd: error: {one_line(error)}")
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a full disk or a reader that left; the error is reported
            stream.flush()
    os._exit(code)


def _draft(launch_dir: Path, rank: int) -> Path:
    return launch_dir / f"{rank}.partial"


def _print_once(line: str) -> None:
    """Print the line from the first rank that comes to a user error: the agent's store outlives the ranks and counts.
    The others end once it is printed, since at the first end torchrun ends all."""
    store = None
    # There is no such store, or it has ended with node 0, or the first rank has died before it could print.
    with contextlib.suppress(RuntimeError):
        store = agent_store("user_errors", STORE_TIMEOUT_S) if has_agent_store() else None
        if store is not None and store.add("count", 1) > 1:
            store.wait(["printed"])
            return
    print(line, file=sys.stderr, flush=True)
    with contextlib.suppress(RuntimeError):
        if store is not None:
            store.set("printed", "")


def has_agent_store() -> bool:
    """Return whether the launcher or torchrun's agent keeps a store for its ranks, which outlives them."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def agent_store(prefix: str, timeout_s: float = ANSWER_S) -> Store:
    """Connect to that store. ``prefix`` names the purpose of the keys."""
    from torch.distributed import PrefixStore, TCPStore  # heavy, and most commands never come here

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, is_master=False, timeout=datetime.timedelta(seconds=timeout_s))
    return PrefixStore(f"mopd/{prefix}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
