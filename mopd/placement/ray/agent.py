"""What runs on a node of a Ray cluster: it holds the resources of one replica and starts servers with them."""

from __future__ import annotations

import dataclasses
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

    def launch(self, server: str, log_name: str, command: ServerCommand) -> None:
        """Start a server on this node's address; no earlier one had its name."""
        from ray.util import get_node_ip_address

        command = dataclasses.replace(command, host=get_node_ip_address())
        self._servers[server] = ServerProcess(command, folder=self._folder / server, log=self._log_dir / log_name)

    async def ask(self, server: str, method: str) -> Any:
        """What a method of ``Server`` returns."""
        return await getattr(self._servers[server], method)()

    def close(self) -> None:
        """Remove what lies on the disk; the servers have ended."""
        shutil.rmtree(self._folder, ignore_errors=True)  # the last reaper may have been faster
