"""Two nodes, one with a fault: ``python -m tests.integration.node_faults FOLDER``, in a mount namespace of its own.

``FOLDER`` holds ``recipe.yaml``, its models and data. Node 1 is a forked process with mounts that no other sees: what
is wrong there is wrong on its disk, and found by the command itself. Prints one JSON object a fault.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib.metadata
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from mopd.cli.main import main
from tests.fixtures.ports import free_port
from tests.fixtures.warm_template import import_as_commands_do

CLONE_NEWNS = 0x00020000
DEADLINE_S = 60.0


def mount(*words: str | Path) -> None:
    subprocess.run(["mount", *map(str, words)], check=True)


def over(path: Path, change: Callable[[str], str], spare: Path) -> None:
    """Put a changed copy of a file over it."""
    copy = spare / path.name
    copy.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")
    mount("--bind", copy, path)


class Faults:
    """Each method is what node 1 does to itself before the command."""

    def __init__(self, folder: Path) -> None:
        self.teacher, self.run = folder / "teacher_right", folder / "run"
        self.spare = folder / "spare"
        self.spare.mkdir(exist_ok=True)

    def none(self) -> None:
        pass

    def version(self) -> None:
        (own,) = [p for p in importlib.metadata.files("numpy") or [] if p.name == "METADATA"]
        over(Path(str(own.locate())), lambda text: text.replace("\nVersion: ", "\nVersion: 99.", 1), self.spare)

    def missing_model(self) -> None:
        mount("-t", "tmpfs", "tmpfs", self.teacher)

    def other_config(self) -> None:
        over(self.teacher / "config.json", lambda text: text.replace("}", " }"), self.spare)

    def read_only(self) -> None:
        mount("--bind", self.run, self.run)
        mount("-o", "remount,bind,ro", self.run)

    def full_disk(self) -> None:
        mount("-t", "tmpfs", "-o", "size=64k", "tmpfs", self.run)
        with (self.run / "full").open("wb") as file:
            file.write(bytes(2**16))

    def not_shared(self) -> None:
        mount("-t", "tmpfs", "tmpfs", self.run)

    def no_locks(self) -> None:
        """As NFS with ``nolock`` or ``local_lock``: the call succeeds, and excludes nobody on another node."""
        fcntl.flock = lambda *_: None  # type: ignore[assignment]

    def gpus(self) -> None:
        os.environ["SLURM_GPUS_ON_NODE"] = "6"


def node(number: int, port: int, recipe: Path, fault: Callable[[], None], out: Path) -> int:
    """Process id of a node that runs the command; it leaves what it printed in ``out``."""
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        for stream in (1, 2):
            os.dup2(os.open(f"{out}.{stream}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
        os.environ |= {"MOPD_NODE_NAME": f"node{number + 1}", "SLURM_GPUS_ON_NODE": "8"}
        if number:
            assert ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS) == 0
            fault()
        place = ["--nnodes", "2", "--node-rank", str(number), "--rdzv-endpoint", f"127.0.0.1:{port}"]
        code = main(["check", str(recipe), "--nodes", "--json", *place])
    finally:
        sys.stdout.flush()
        os._exit(code)
    return 0


def ended(pid: int) -> int:
    """The exit code; a process that does not end in time is killed."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, 9)
        time.sleep(0.02)


def try_all(folder: Path) -> None:
    faults = Faults(folder)
    import_as_commands_do()
    for name in [name for name in vars(Faults) if not name.startswith("_")]:
        begun, port = time.monotonic(), free_port()
        outs = [folder / f"{name}.{number}" for number in range(2)]
        pids = [node(number, port, folder / "recipe.yaml", getattr(faults, name), outs[number]) for number in range(2)]
        codes = [ended(pid) for pid in pids]
        texts = [[Path(f"{out}.{stream}").read_text(encoding="utf-8") for stream in (1, 2)] for out in outs]
        seconds = time.monotonic() - begun
        print(json.dumps({"fault": name, "codes": codes, "texts": texts, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    try_all(Path(sys.argv[1]))
