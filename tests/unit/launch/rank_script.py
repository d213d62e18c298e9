"""A rank for the launcher's tests: ``python rank_script.py BEHAVIOUR FOLDER``. Leaves ``FOLDER/RANK.pid``.

Ranks that have nothing to do wait in a real gloo collective, as trainer ranks do.
"""

from __future__ import annotations

import datetime
import errno
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from mopd.base.types import UserError
from mopd.launch import reaching
from mopd.launch.failure import rank_and_world_size, run_as_rank
from tests.fixtures.networks import enter_network

enter_network()
behaviour, folder = sys.argv[1], Path(sys.argv[2])


def work() -> None:
    rank, world_size = rank_and_world_size()
    if behaviour == "reach_nobody":
        reaching.REACH_S = 8.0  # nothing would come later either
    if behaviour in ("reach", "reach_nobody"):
        reaching.check_reach(120.0)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    if behaviour == "with_child" and rank == 0:
        child = subprocess.Popen(["sleep", "600"])
        (folder / "child.pid").write_text(str(child.pid))
    (folder / f"{rank}.part").write_text(str(os.getpid()))
    (folder / f"{rank}.part").rename(folder / f"{rank}.pid")
    dist.barrier()
    if behaviour == "environment" and rank == world_size - 1:
        names = ("OMP_NUM_THREADS", "CUDA_DEVICE_MAX_CONNECTIONS", "MASTER_ADDR", "WORLD_SIZE")
        (folder / "environment").write_text(" ".join(os.environ[name] for name in names))
    elif behaviour == "user_error" and rank == 1:
        raise UserError("recipe.yaml:3: student.model: this folder\nis broken")
    elif behaviour == "user_error_everywhere":
        raise UserError("every rank saw it")
    elif behaviour == "bug" and rank == 1:
        raise ZeroDivisionError("the bug in rank one")
    elif behaviour == "full_disk_behind_torch":
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/runs/one/file")
        raise CheckpointException("write", {1: (full, traceback.extract_stack())})
    elif behaviour == "bug_behind_torch":
        raise CheckpointException("write", {1: (ZeroDivisionError("the bug in rank one"), traceback.extract_stack())})
    elif behaviour == "full_output":
        os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
        print("a result")
        return
    elif behaviour == "kill_itself" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    elif behaviour == "exit_silently" and rank == 1:
        os._exit(7)
    elif behaviour == "kill_itself_beside_sleepers" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    elif behaviour in ("hang_in_python", "with_child", "kill_itself_beside_sleepers"):
        time.sleep(600)
    dist.barrier()  # the others wait here; a collective that loses a peer raises on them


raise SystemExit(run_as_rank(work))
