"""Descriptors of ranks: counted as the groups are that a rank really joins, and the limit raised, or refused."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import resource
import subprocess
import sys
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from mopd.base.types import UserError
from mopd.config.student import ParallelConfig
from mopd.data_plane.local import LocalDataPlane
from mopd.data_plane.reading import open_reader
from mopd.launch.checks.inputs import gloo_groups, needed_files, raise_open_files
from tests.fixtures.ports import free_port

DEADLINE_S = 240.0
LAYOUTS: list[dict[str, Any]] = [
    {"data_parallel_size": 4},
    {"tensor_model_parallel_size": 2, "context_parallel_size": 2},
    {"pipeline_model_parallel_size": 2, "data_parallel_size": 2, "expert_model_parallel_size": 2},
]


def rank(number: int, sizes: dict[str, Any], port: int, file: Path) -> None:
    """Join as a trainer rank does; rank 0 leaves the sizes of its groups and how many descriptors they have cost."""
    import torch.distributed as dist

    from mopd.student import parallel

    degrees = ParallelConfig(**sizes)
    os.environ |= {
        "RANK": str(number), "WORLD_SIZE": str(degrees.world_size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "one", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    before = len(os.listdir("/proc/self/fd"))
    with parallel.joined(degrees, timeout_s=DEADLINE_S, seed=0, local_rank=number) as layout:
        dist.barrier(group=layout.control_group)
        groups = [group.size() for group in dist.distributed_c10d._world.pg_map]
        if number == 0:
            file.write_text(json.dumps({"groups": groups, "files": len(os.listdir("/proc/self/fd")) - before}))


@pytest.mark.multirank
@pytest.mark.parametrize("sizes", LAYOUTS, ids=["data", "tensor and context", "pipeline and experts"])
def test_groups_are_those_that_a_rank_joins(sizes: dict[str, Any], tmp_path: Path) -> None:
    degrees, port, file = ParallelConfig(**sizes), free_port(), tmp_path / "told"
    context = multiprocessing.get_context("spawn")
    children = [context.Process(target=rank, args=(i, sizes, port, file)) for i in range(degrees.world_size)]
    for child in children:
        child.start()
    for child in children:
        child.join(DEADLINE_S)
    assert [child.exitcode for child in children] == [0] * degrees.world_size
    told = json.loads(file.read_text())
    assert len(told["groups"]) == len(gloo_groups(degrees, on_gpu=False))
    assert not Counter(gloo_groups(degrees, on_gpu=True)) - Counter(told["groups"])
    assert told["files"] <= needed_files(degrees, on_gpu=False, is_first=False)


def hold_samples(pipe: Connection) -> None:
    """Serve an empty data plane until the other end of the pipe says that it is enough."""
    plane = LocalDataPlane()
    plane.serve(host="127.0.0.1")
    pipe.send(plane.address)
    pipe.recv()
    asyncio.run(plane.close())


@pytest.mark.multirank
def test_each_reader_costs_the_process_that_holds_the_samples_one() -> None:
    ours, its = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=hold_samples, args=(its,))
    child.start()
    address, descriptors = ours.recv(), Path(f"/proc/{child.pid}/fd")
    before = len(os.listdir(descriptors))
    readers = [open_reader(address, timeout_s=DEADLINE_S) for _ in range(8)]
    assert len(os.listdir(descriptors)) == before + len(readers)
    for reader in readers:
        reader.close()
    ours.send("enough")
    child.join(DEADLINE_S)
    assert child.exitcode == 0


def test_the_soft_limit_goes_up_and_what_is_too_low_is_refused() -> None:
    """In a child, whose limits go with it."""
    program = (
        "import resource; from mopd.config.student import ParallelConfig; from mopd.launch.checks.inputs import *\n"
        "ranks = ParallelConfig(data_parallel_size=4)\n"
        "def limit(soft, hard):\n"
        "  resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))\n"
        "  raise_open_files(ranks, 'here', on_gpu=False, is_first=True)\n"
        "limit(200, 2000)\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE))\n"
        "limit(100, 300)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.stdout == "(2000, 2000)\n"
    needed = needed_files(ParallelConfig(data_parallel_size=4), on_gpu=False, is_first=True)
    line = f"here: each of 4 ranks needs {needed} open files, and the limit here (ulimit -n, hard) is 300: raise it to"
    assert done.stderr.splitlines()[-1].startswith(f"mopd.base.types.UserError: {line} {needed} ")


def test_a_limit_that_is_high_stays() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    raise_open_files(ParallelConfig(), "here", on_gpu=True, is_first=False)
    after = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert after[1] == before[1] and after[0] >= before[0]
    with pytest.raises(UserError, match="ulimit -n"):
        raise_open_files(ParallelConfig(data_parallel_size=60_000), "here", on_gpu=True, is_first=False)
