"""What runs on a node of a Ray cluster: it holds the resources of one replica and starts servers with them."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from mopd.placement.process import ServerCommand, ServerProcess


class Agent:
    """An actor. Methods return at once. The servers die with the actor's process (see ``reaper``)."""

    def __init__(self, log_dir: str) -> None:
        """Logs go to ``log_dir`` where that is a folder of this node too, else to a temporary one."""
        self._folder = Path(tempfile.mkdtemp(prefix="mopd-agent-"))
        self._log_dir = Path(log_dir) if os.path.isdir(log_dir) else Path(tempfile.mkdtemp(prefix="mopd-logs-"))
        self._servers: dict[str, ServerProcess] = {}

    def launch(self, server: str, log_name: str, command: dict[str, Any]) -> None:
        """Start a server; no earlier one had its name. ``command``: fields of ``ServerCommand`` but ``host``."""
        from ray.util import get_node_ip_address

        full = ServerCommand(host=get_node_ip_address(), **command)
        self._servers[server] = ServerProcess(full, folder=self._folder / server, log=self._log_dir / log_name)

    def state(self, server: str) -> tuple[str | None, int | None, int | None]:
        """Fields of ``ServerState``."""
        state = self._servers[server].state()
        return state.url, state.pid, state.exit_code

    def last_words(self, server: str) -> str:
        """Why it ended, with the place of its log."""
        process = self._servers[server]
        return f"{process.last_words()} (log: {process.log})"

    def terminate(self, server: str) -> None:
        """Ask it to end in order."""
        self._servers[server].terminate()

    def kill(self, server: str) -> None:
        """End it now."""
        self._servers[server].kill()

    def close(self) -> None:
        """Remove what lies on the disk; the servers have ended."""
        shutil.rmtree(self._folder, ignore_errors=True)  # the last reaper may have been faster
