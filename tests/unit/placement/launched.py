"""A launcher whose servers run already."""

from __future__ import annotations

from collections.abc import Sequence

from mopd.placement.server_group import Server


class Launched:
    """Implements ``Launcher`` with these ``processes``, one for each replica."""

    def __init__(self, processes: Sequence[Server]) -> None:
        self.processes = processes

    async def prepare(self) -> None:
        """Nothing is to be."""

    async def launch(self, index: int, token: str) -> Server:
        return self.processes[index]

    async def close(self) -> None:
        """Nothing was."""
