"""What a rank does at birth and at death: it never outlives its launcher, and its error reaches the user once.

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

from mopd.base.files.writing import refusal, writing
from mopd.base.text import one_line
from mopd.base.types import UserError

LAUNCH_DIR = "MOPD_LAUNCH_DIR"
"""Environment variable: folder where ranks leave their process ids and errors."""
LAUNCHER_PID = "MOPD_LAUNCHER_PID"
"""Environment variable: process id of the launcher, which must be the rank's parent."""
TORCHELASTIC_RUN_ID = "TORCHELASTIC_RUN_ID"
"""Environment variable that torchrun sets in the ranks."""
USER_ERROR_CODE = 2
STOPPED_CODE = 75
"""Of a run that was asked to stop: a checkpoint of what it has done is there, and it goes on with ``--resume``."""
ERROR_CODE = 1
STORE_TIMEOUT_S = 10.0
RESERVED_BYTES = 2**18
"""Kept for each rank's error before the ranks start: a full disk must not swallow the line that tells of it."""
_MAX_MESSAGE, _MAX_TRACEBACK = 4_000, 16_000
"""Characters; whatever they are, they fit into the reserved bytes."""
STOPPED = "stopped"
"""Ending of the notes that the ranks of such a run leave in the launch folder; rank 0's holds the line to tell."""
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a launch ended."""

    code: int
    line: str = ""
    """What was told last; empty when all went well."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFailure:
    """An error that ended a rank."""

    rank: int
    is_user_error: bool
    message: str
    """One line for a user error."""
    traceback: str
    time_s: float
    """Seconds since the epoch."""


def is_rank() -> bool:
    """Whether torchrun (ours or the user's) started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_our_launchers() -> bool:
    """Whether our own launcher started this rank, not the user's torchrun."""
    return LAUNCH_DIR in os.environ


def rank_and_world_size() -> tuple[int, int]:
    """This process's rank and the number of ranks, as torchrun set them."""
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def local_world_size() -> int:
    """Ranks on this machine, as torchrun set them."""
    return int(os.environ["LOCAL_WORLD_SIZE"])


def num_groups() -> int:
    """Agents of torchrun, or launchers of ours, that have started ranks, one a machine; 1 in a process that is no
    rank."""
    return int(os.environ.get("GROUP_WORLD_SIZE", "1")) if is_rank() else 1


def group_rank() -> int:
    """Which of them has started this rank; 0 in a process that is no rank."""
    return int(os.environ.get("GROUP_RANK", "0")) if is_rank() else 0


def rank_0_host() -> str | None:
    """What ranks on other machines call rank 0's, as torchrun was told; ``None`` if there are none. On rank 0."""
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
    """Megatron and torch warn at import and at deprecated calls, on each rank, of nothing that a user can change."""
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.|mopd\.cpu_shim")


def leave_stopped(line: str) -> None:
    """At the end of a rank whose run was asked to stop: a note for our own launcher, which tells ``line``."""
    if is_our_launchers():
        (Path(os.environ[LAUNCH_DIR]) / f"{rank_and_world_size()[0]}.{STOPPED}").write_text(line, encoding="utf-8")
    elif line:
        print(f"mopd: {line}", file=sys.stderr)


def read_stopped(launch_dir: Path) -> str | None:
    """Rank 0's line if the run was asked to stop and did, empty where rank 0 is on another machine; else ``None``."""
    notes = sorted(launch_dir.glob(f"*.{STOPPED}"))
    return "".join(note.read_text(encoding="utf-8") for note in notes) if notes else None


def reserve(launch_dir: Path, ranks: Iterable[int]) -> None:
    """Make room for the errors of ``ranks``.

    Raises:
        UserError: there is none.
    """
    for rank in ranks:
        with writing(launch_dir), _draft(launch_dir, rank).open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, RESERVED_BYTES)


def read_failures(launch_dir: Path) -> list[RankFailure]:
    """The errors that ranks left in the launch folder, earliest first."""
    found = [RankFailure(**json.loads(path.read_text(encoding="utf-8"))) for path in launch_dir.glob("*.error.json")]
    return sorted(found, key=lambda failure: failure.time_s)


def close_standard_input() -> None:
    """Nobody answers questions of a rank or a server; a library that asks one gets the end of the input at once."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _tie_to_parent() -> Path | None:
    """Have the kernel kill this process when its parent dies. Returns the launch folder under our own launcher."""
    if TORCHELASTIC_RUN_ID not in os.environ:  # the parent is no launcher and may end first by right
        return None
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
    """Tell the launcher or the user of the error that ends this rank, then end the process; from any thread."""
    error = error if isinstance(error, UserError) else refusal(error) or error
    launch_dir = Path(os.environ[LAUNCH_DIR]) if TORCHELASTIC_RUN_ID in os.environ and is_our_launchers() else None
    is_user_error = isinstance(error, UserError)
    if launch_dir is not None:
        failure = RankFailure(
            rank=rank_and_world_size()[0],
            is_user_error=is_user_error,
            message=one_line(error)[:_MAX_MESSAGE],
            traceback="".join(traceback.format_exception(error))[-_MAX_TRACEBACK:],
            time_s=time.time(),
        )
        draft = _draft(launch_dir, failure.rank)
        with draft.open("r+b" if draft.exists() else "wb") as file:  # in place: the blocks are there
            file.write(json.dumps(asdict(failure)).encode())
            file.truncate()
        draft.rename(launch_dir / f"{failure.rank}.error.json")
    elif not is_user_error:
        traceback.print_exception(error)
    else:
        _tell_once(f"mopd: error: {one_line(error)}")
    with contextlib.suppress(OSError):  # a full disk or a reader that left; the error is told
        sys.stdout.flush()
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    os._exit(USER_ERROR_CODE if is_user_error else ERROR_CODE)


def _draft(launch_dir: Path, rank: int) -> Path:
    return launch_dir / f"{rank}.partial"


def _tell_once(line: str) -> None:
    """From the first rank that comes to a user error; torchrun's own store outlives the ranks and counts. The others
    end when it is told: at the first end torchrun ends all."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        print(line, file=sys.stderr, flush=True)
        return
    from torch.distributed import TCPStore  # heavy, and most ranks never come here

    timeout = datetime.timedelta(seconds=STORE_TIMEOUT_S)
    try:
        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout)
        if int(store.add("mopd/user_errors", 1)) > 1:
            store.wait(["mopd/told"], timeout)
            return
    except RuntimeError:  # the store has ended with node 0, or the first one before it could tell
        print(line, file=sys.stderr, flush=True)
        return
    print(line, file=sys.stderr, flush=True)
    with contextlib.suppress(RuntimeError):
        store.set("mopd/told", "")
