"""TransferQueue on a real Ray cluster, started once: the rules of the local plane, in other processes' hands too."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from mopd.base.types import UserError
from mopd.config.data import TransferQueueConfig
from mopd.data_plane.local import LocalDataPlane
from mopd.data_plane.queue_plane import HASHES, QueuePlane
from mopd.placement.ray.connection import connect, disconnect
from mopd.placement.storage import open_queue
from tests.unit.data_plane.rules import fill, samples, try_rules

pytest.importorskip("transfer_queue")
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.multirank]

NUM_UNITS = 2
FINISHED = ("tokens", "loss_mask", "teacher_ids")
READER = """
import json, sys
from mopd.data_plane.reading import open_reader
from mopd.base.types import UserError
reader = open_reader(json.loads(sys.argv[1]), timeout_s=60)
said = []
for ids, names in (([3, 1, 2], ["loss_mask", "tokens", "teacher_logprobs"]), ([1, 99], ["tokens"]), ([1], ["x"])):
    try:
        said.append({name: [t.tolist() for t in tensors] for name, tensors in reader.fetch(ids, names).items()})
    except KeyError as error:
        said.append(error.args[0])
import ray
print(json.dumps([said, reader.bytes_received, ray.is_initialized()]), flush=True)
sys.stdin.readline()
try:
    reader.fetch([1], ["tokens"])
except UserError as error:
    print(error, flush=True)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster of this machine, as a run's replicas would have started it."""
    ray = connect("placement", None, num_cpus=1, gpus=())
    with pytest.MonkeyPatch.context() as patch:  # beside other tests
        patch.setattr("mopd.data_plane.transfer_queue.STARTUP_S", 400.0)
        patch.setattr("mopd.data_plane.transfer_queue.PROBE_EVERY_S", 0.2)
        yield ray
    disconnect()


@pytest.fixture(scope="module")
def plane(cluster: Any) -> QueuePlane:
    """A run's queue; the first test leaves it empty, the second one closed. Starting one takes as many processes that
    import torch as it has actors: most of the time of this file."""
    return open_plane()


def open_plane(**changes: Any) -> QueuePlane:
    settings = {"type": "transfer_queue", "num_storage_units": NUM_UNITS, **changes}
    return open_queue(TransferQueueConfig(**settings), timeout_s=60)


def actor_processes() -> dict[str, psutil.Process]:
    """Living actors of TransferQueue on our own cluster, by class and process id."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            name = " ".join(process.cmdline())
            if name.startswith("ray::") and ("SimpleStorageUnit" in name or "TransferQueueController" in name):
                found[f"{name} {process.pid}"] = process
    return found


def test_both_planes_keep_the_same_rules_and_bits(plane: QueuePlane) -> None:
    async def both() -> None:
        assert await try_rules(plane) == await try_rules(LocalDataPlane())

    asyncio.run(both())


def test_ranks_read_by_address_and_what_was_saved_is_read_back(plane: QueuePlane, cluster: Any, tmp_path: Path) -> None:
    async def run() -> None:
        _, fields = samples()
        await fill(plane)
        assert cluster.util.list_named_actors(all_namespaces=True) == []  # two runs on one cluster do not meet
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        command = [sys.executable, "-W", "ignore", "-c", READER, json.dumps(plane.address)]
        with subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            (got, unknown, no_field), num_bytes, knows_ray = json.loads(process.stdout.readline())
            assert not knows_ray
            expected = {name: [fields[name][i].tolist() for i in (3, 1, 2)] for name in got}
            assert got == expected and list(got) == ["loss_mask", "tokens", "teacher_logprobs"]
            assert num_bytes == sum(fields[name][i].nbytes for name in got for i in (3, 1, 2))
            assert "[99] are unknown" in unknown and "'x' does not exist" in no_field
            await check_saving(plane, tmp_path / "samples")
            await check_kills(plane, process)
        await plane.close()
        deadline = time.monotonic() + 20
        while actor_processes() and time.monotonic() < deadline:
            await asyncio.sleep(0.2)
        assert actor_processes() == {}

    asyncio.run(run())


async def check_saving(plane: QueuePlane, folder: Path) -> None:
    """Leaves samples 1, read back, and 7."""
    metas, fields = samples()
    digest = await plane.save(folder)
    await plane.discard([meta.sample_id for meta in metas])
    victim = next(folder.rglob("su_0_*.pkl"))
    body, written = victim.read_bytes(), (folder / HASHES).read_bytes()
    for path, content, problem in (
        (victim, body[:-1] + bytes([body[-1] ^ 1]), rf"{victim.name}: not what was written \(SHA-256\)"),
        (folder / "more.pkl", b"", r"other files than files\.json names"),
        (folder / HASHES, None, r"files\.json.*drawn again"),
    ):
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(UserError, match=problem):
            await plane.load(folder, digest, FINISHED)
        victim.write_bytes(body)
        (folder / "more.pkl").unlink(missing_ok=True)
    (folder / HASHES).write_bytes(written)
    assert await plane.load(folder, digest, FINISHED) == metas[:4]
    got = await plane.get([2, 0], ["teacher_logprobs"])
    assert torch.equal(got["teacher_logprobs"][0], fields["teacher_logprobs"][2])
    await plane.put([metas[7]], {"tokens": [fields["tokens"][7]]})
    await plane.release(await plane.claim([0, 2, 3], FINISHED))
    assert plane.num_samples == 2


async def check_kills(plane: QueuePlane, process: subprocess.Popen[str]) -> None:
    """A dead storage unit is noticed by whoever asks, and so is a dead controller."""
    assert process.stdout is not None and process.stdin is not None
    for name, actor in actor_processes().items():
        if "SimpleStorageUnit" in name:
            actor.kill()
    started = time.monotonic()
    process.stdin.write("go\n")
    process.stdin.flush()
    with pytest.raises(
        UserError, match=r"^data plane: TransferQueue's storage unit \d .* has ended.*: see Ray's logs$"
    ):
        await plane.get([1], ["tokens"])
    line = await asyncio.to_thread(process.stdout.readline)
    assert line.startswith("data plane: TransferQueue's storage unit") and "has ended" in line
    assert time.monotonic() - started < 20
    actors = [*actor_processes().values()]
    for actor in actors:
        actor.kill()
    gone, _ = psutil.wait_procs(actors, timeout=60)  # until then its port still takes connections
    assert len(gone) == len(actors)
    with pytest.raises(UserError, match=r"TransferQueue's controller .* has ended"):
        await plane.claim([1], ["tokens"])


def test_one_run_uses_one_cluster(cluster: Any) -> None:
    with pytest.raises(UserError, match=r"data_plane.address is '127.0.0.1:1', but this run already uses .* None"):
        open_plane(address="127.0.0.1:1")


def test_a_full_cluster_is_told(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that others run: there the actors' CPUs are counted."""
    address = cluster.get_runtime_context().gcs_address
    monkeypatch.setattr("mopd.placement.ray.connection._address", address)
    with pytest.raises(UserError, match=r"TransferQueue needs 65 free CPUs .* num_storage_units 64\), and \d+ are"):
        open_plane(address=address, num_storage_units=64)
    assert actor_processes() == {}
