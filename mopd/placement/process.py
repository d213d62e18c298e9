"""One engine server as a child process of this one (or of an agent on another node), behind its reaper."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import mopd
from mopd.base.files.reading import shown_path
from mopd.base.files.temporary import TemporaryFolder
from mopd.base.files.writing import writing
from mopd.base.hardware import node_name
from mopd.base.types import UserError
from mopd.placement import reaper

TAIL_BYTES = 4096
USER_ERROR_PREFIX = "mopd: error: "
_FOREIGN = ("TORCHELASTIC_", "GROUP_", "ROLE_", "MOPD_")
_FOREIGN_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
RUN_SECRET = "MOPD_RUN_SECRET"
"""Environment variable: a secret that signs the entries of the store of a run's launchers, or of a replica's nodes."""
_OURS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
"""Variables by which another interpreter would find our packages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerState:
    """State of a server process."""

    url: str | None
    """Address; ``None`` before it answers."""
    pid: int | None
    """Process id of the server itself; ``None`` before it answers."""
    exit_code: int | None
    """Exit code, 128 + n for signal n; ``None`` while it runs."""
    ending: str | None = None
    """Description of its end, where the exit code does not tell."""

    @property
    def how_it_ended(self) -> str:
        """Description of its end, for a server that has ended."""
        assert self.exit_code is not None
        return self.ending or how_it_ended(self.exit_code)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerCommand:
    """Everything needed to start a server. Plain data: it may travel to another node."""

    engine_file: str
    """Text of the replica's ``EngineFile``."""
    token: str
    host: str
    environment: Mapping[str, str]
    """Set on top of what this process has."""
    python: str | None = None
    """Interpreter of another environment; ``None``: ours."""


class ServerProcess:
    """Implements ``Server``; starts at once."""

    def __init__(self, command: ServerCommand, *, folder: Path, log: Path) -> None:
        """``folder`` is made for this server alone and goes with it; ``log`` is appended to."""
        self._log = log
        self._is_told_to_end = False
        self._ready = folder / "ready.json"
        engine_file, token_file = folder / "engine.json", folder / "token"
        with writing(folder):
            folder.mkdir(mode=0o700, parents=True)
            package = _package_alone(folder) if command.python is not None else None
            engine_file.write_text(command.engine_file, encoding="utf-8")
            token_file.touch(mode=0o600)
            token_file.write_text(command.token, encoding="ascii")
        python = sys.executable if command.python is None else os.path.abspath(command.python)
        check_interpreter(python, "placement.python")
        serve = [python, "-m", "mopd", "serve", str(engine_file), "--ready-file", str(self._ready)]
        serve += ["--host", command.host, "--port", "0", "--token-file", str(token_file)]
        with writing(log):
            output = log.open("ab")
        with output:
            self._log_start = output.tell()
            self._reaper = subprocess.Popen(
                [sys.executable, "-I", "-S", reaper.__file__, str(folder), *serve],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,  # a terminal's Ctrl-C is for mopd, which ends its servers in order
                # vLLM's own sockets go with the folder; it leaves them where it is killed.
                env=server_environment(
                    os.environ, {"VLLM_RPC_BASE_PATH": str(folder), **command.environment}, package=package
                ),
            )

    async def state(self) -> ServerState:
        exit_code = self._reaper.poll()
        if exit_code is not None and exit_code < 0:  # the reaper itself was killed, and the server with it
            exit_code = 128 - exit_code
        try:
            ready = json.loads(self._ready.read_text(encoding="utf-8"))
        except FileNotFoundError:  # not ready yet, or gone with the server
            ready = {}
        ending = "was ended by mopd" if self._is_told_to_end else None
        return ServerState(url=ready.get("url"), pid=ready.get("pid"), exit_code=exit_code, ending=ending)

    async def terminate(self) -> None:
        """Send SIGTERM: the server answers the requests that it has begun."""
        if self._reaper.poll() is None:
            self._is_told_to_end = True
            self._reaper.send_signal(signal.SIGTERM)

    async def kill(self) -> None:
        """Kill the server and its children; ``state`` shows the end within moments."""
        assert self._reaper.stdin is not None
        self._is_told_to_end = self._is_told_to_end or self._reaper.poll() is None
        self._reaper.stdin.close()

    async def last_words(self) -> str:
        """Return the user error that it ended with, or the end of its log."""
        with self._log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self._log_start, size - TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
        errors = [line for line in lines if line.startswith(USER_ERROR_PREFIX)]
        is_full = os.statvfs(self._log).f_bavail == 0
        nothing = "it wrote nothing" + (": No space left on device for its log" if is_full else "")
        words = [line.removeprefix(USER_ERROR_PREFIX) for line in errors] or [line.strip() for line in lines]
        return f"{next(filter(None, reversed(words)), nothing)} (log: {self._log})"


def check_interpreter(python: str, where: str) -> None:
    """Raise ``UserError``, which begins with ``where``, if this machine has no such program."""
    if not os.path.isfile(python) or not os.access(python, os.X_OK):
        problem = "cannot be run" if os.path.lexists(python) else "does not exist"
        raise UserError(f"{where}: {shown_path(python)!r} {problem} on {node_name()}: name a Python interpreter")


def become_server(python: str, engine_file: str, options: Sequence[str]) -> NoReturn:
    """Replace this process by ``mopd serve`` of an engine file under another interpreter, whose environment need not
    have mopd."""
    folder = TemporaryFolder("mopd-serve-")
    path = folder.path / "engine.json"
    with writing(folder.path):
        path.write_text(engine_file, encoding="utf-8")
        kept = {key: value for key, value in os.environ.items() if key == RUN_SECRET}
        environment = server_environment(os.environ, kept, package=_package_alone(folder.path))
    os.set_inheritable(folder.fileno(), True)  # the folder's lock: it stays as long as the server runs
    os.execve(python, [python, "-m", "mopd", "serve", str(path), *options], environment)


def _package_alone(folder: Path) -> Path:
    """A place from which this very package can be imported, and nothing else of our environment."""
    place = folder / "package"
    place.mkdir()
    (place / "mopd").symlink_to(Path(mopd.__file__).resolve().parent, target_is_directory=True)
    return place


def server_environment(
    own: Mapping[str, str], extra: Mapping[str, str], *, package: Path | None = None
) -> dict[str, str]:
    """Environment of a server: ours without what makes us a trainer rank, with this very package importable; for
    another interpreter (``package``) also without what leads to our own packages."""
    kept = {k: v for k, v in own.items() if not k.startswith(_FOREIGN) and k not in _FOREIGN_NAMES}
    if package is not None:
        kept = {k: v for k, v in kept.items() if k not in _OURS}
        return {**kept, "PYTHONPATH": str(package), **extra}
    ours = str(Path(mopd.__file__).parents[1])
    paths = [ours, *(p for p in kept.get("PYTHONPATH", "").split(os.pathsep) if p and p != ours)]
    return {**kept, "PYTHONPATH": os.pathsep.join(paths), **extra}


def how_it_ended(exit_code: int) -> str:
    """An exit code in words."""
    if exit_code - 128 not in set(signal.Signals):
        return f"ended with exit code {exit_code}"
    name = signal.Signals(exit_code - 128).name
    return f"was killed by {name}" + (" (often the kernel, out of memory)" if name == "SIGKILL" else "")
