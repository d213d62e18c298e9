"""Servers as child processes of this one, on the loopback interface."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from mopd.base.files.temporary import TemporaryFolder
from mopd.base.files.writing import writing
from mopd.config.placements import LocalConfig
from mopd.placement.gpus import visible_gpus
from mopd.placement.interface import GroupPlan
from mopd.placement.process import ServerCommand, ServerProcess

HOST = "127.0.0.1"


class LocalLauncher:
    """Implements ``Launcher`` with child processes; ports, GPUs and threads are shared out here."""

    def __init__(self, plan: GroupPlan, *, log_dir: Path, gpus: Sequence[tuple[int, ...]]) -> None:
        """
        Args:
            plan: the group.
            log_dir: for the servers' logs.
            gpus: of each replica; an empty tuple without CUDA.
        """
        assert isinstance(plan.group.placement, LocalConfig)
        self._gpus = gpus
        self._plan, self._cfg = plan, plan.group.placement
        self._log_dir = log_dir
        self._folder: TemporaryFolder | None = None
        self._num_launches = 0

    async def prepare(self) -> None:
        with writing(self._log_dir):
            self._log_dir.mkdir(parents=True, exist_ok=True)
        self._folder = TemporaryFolder("mopd-servers-")

    async def launch(self, index: int, token: str) -> ServerProcess:
        assert self._folder is not None
        self._num_launches += 1
        folder = self._folder.path / str(self._num_launches)
        command = ServerCommand(
            engine_file=json.dumps(self._plan.files[index].to_json()),
            token=token,
            host=HOST,
            environment=self._environment(index),
            python=self._cfg.python,
        )
        log = self._log_dir / f"{self._plan.file_name(index)}.log"
        return ServerProcess(command, folder=folder, log=log)

    async def close(self) -> None:
        if self._folder is not None:
            self._folder.close()
            self._folder = None

    def _environment(self, index: int) -> dict[str, str]:
        cores, replicas = len(os.sched_getaffinity(0)), len(self._plan.files)
        threads = self._cfg.num_threads if self._cfg.num_threads is not None else max(1, cores // replicas)
        environment = {
            "OMP_NUM_THREADS": str(threads),
            # A waiting thread would keep its core from the ranks and the other replicas, which work at the same time.
            "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
        }
        if self._gpus[index]:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible_gpus(self._gpus[index]))
        return environment
