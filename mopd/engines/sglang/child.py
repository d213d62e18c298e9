"""An SGLang server as a process of its own, run by file: ``python child.py FOLDER OWNER_PID``.

FOLDER has ``arguments.json``, the fields of SGLang's ``ServerArgs``. What SGLang refuses of them is written to
``refusal.txt`` there, one line. The server ends as soon as the process OWNER_PID, its parent, is gone; SGLang's own
processes end with it.
"""

import ctypes
import difflib
import json
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1
ARGUMENTS, REFUSAL = "arguments.json", "refusal.txt"


def main(folder: Path, owner_pid: int) -> None:
    """Serve until the process is told to end."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != owner_pid:  # it was gone before the kernel was told to watch it
        sys.exit(1)
    arguments = json.loads((folder / ARGUMENTS).read_text(encoding="utf-8"))
    try:
        from sglang.launch_server import run_server
        from sglang.srt.server_args import ServerArgs
        from sglang.srt.utils import kill_process_tree
        from sglang.version import __version__
    except ImportError as error:
        _refuse(folder, f"it cannot be imported by {sys.executable} ({error})")
    known = list(ServerArgs.__struct_fields__)
    for name in arguments:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "remove it"
            _refuse(folder, f"engine.extra.{name}: SGLang {__version__} has no such argument: {hint}")
    try:
        server_args = ServerArgs(**arguments)
        server_args.resolve_once()
    except (AssertionError, TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        _refuse(folder, str(error) or type(error).__name__)
    try:
        run_server(server_args)
    finally:  # its processes do not end by themselves where it could not listen
        kill_process_tree(os.getpid(), include_parent=False)


def _refuse(folder: Path, problem: str) -> None:
    (folder / REFUSAL).write_text(" ".join(problem.split()), encoding="utf-8")
    sys.exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
