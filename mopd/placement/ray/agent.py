"""Agent on a node of a Ray cluster: it holds the resources of one replica and starts servers with them."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from mopd.base.files.temporary import TemporaryFolder
from mopd.placement import reaper
from mopd.placement.process import ServerCommand, ServerProcess


class Agent:
    """An actor. Methods return at once. The servers and the folder go with the actor's process (see ``reaper``)."""

    def __init__(self, log_dir: str) -> None:
        """Logs go to ``log_dir`` where that is a folder of this node too, else to a temporary one, which stays until
        the next run on this node."""
        self._folder = TemporaryFolder("mopd-agent-")
        self._logs = None if os.path.isdir(log_dir) else TemporaryFolder("mopd-logs-")
        self._log_dir = Path(log_dir) if self._logs is None else self._logs.path
        self._servers: dict[str, ServerProcess] = {}
        command = [sys.executable, "-I", "-S", reaper.__file__, "--apart", str(self._folder.path)]
        self._reaper = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        self._reaper.wait()

    def launch(self, server: str, log_name: str, command: ServerCommand) -> str:
        """Start a server on this node's address, which is returned; no earlier one had its name."""
        from ray.util import get_node_ip_address

        command = dataclasses.replace(command, host=get_node_ip_address())
        self._servers[server] = ServerProcess(command, folder=self._folder.path / server, log=self._log_dir / log_name)
        return command.host

    async def ask(self, server: str, method: str) -> Any:
        """Call a method of ``Server`` and return its result."""
        return await getattr(self._servers[server], method)()

    def close(self) -> None:
        """Remove what lies on the disk; the servers have ended."""
        self._folder.close()
