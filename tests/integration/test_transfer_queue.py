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

from mopd.base.types import SampleMeta, UserError
from mopd.config.data import TransferQueueConfig
from mopd.data_plane.local import LocalDataPlane
from mopd.data_plane.queue_plane import HASHES, QueuePlane
from mopd.placement.ray.connection import connect, disconnect
from mopd.placement.storage import open_queue
from tests.parity.student.samples import make_samples

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
    with pytest.MonkeyPatch.context() as patch:  # several queues, beside other tests
        patch.setattr("mopd.data_plane.transfer_queue.STARTUP_S", 400.0)
        yield ray
    disconnect()


@pytest.fixture(scope="module")
def planes(cluster: Any) -> tuple[QueuePlane, QueuePlane]:
    """Two runs' queues on one cluster; each test leaves them empty, the last one closed."""
    return open_plane(), open_plane()


def open_plane(**changes: Any) -> QueuePlane:
    return open_queue(
        TransferQueueConfig(**{"type": "transfer_queue", "num_storage_units": NUM_UNITS, **changes}), timeout_s=60
    )


def actor_processes() -> dict[str, psutil.Process]:
    """Living actors of TransferQueue on our own cluster, by class and process id."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            name = " ".join(process.cmdline())
            if name.startswith("ray::") and ("SimpleStorageUnit" in name or "TransferQueueController" in name):
                found[f"{name} {process.pid}"] = process
    return found


def samples() -> tuple[list[SampleMeta], dict[str, list[torch.Tensor]]]:
    metas, fields = make_samples(8, vocab_size=50, top_k=4)
    fields["bf16"] = [(torch.arange(2 * (i + 1)) / 7).bfloat16().view(2, -1).T for i in range(8)]  # not contiguous
    fields["images"] = [torch.arange(8 * (i % 3)).reshape(i % 3, 8) for i in range(8)]  # of some samples none
    fields["same_lengths"] = [torch.full((3,), float("nan") if i == 2 else -0.0) for i in range(8)]
    return metas, fields


async def fill(plane: QueuePlane | LocalDataPlane) -> None:
    """As rollout and teachers do: some fields first, the teachers' of half of the samples later."""
    metas, fields = samples()
    early = {name: tensors for name, tensors in fields.items() if not name.startswith("teacher")}
    late = {name: tensors[:4] for name, tensors in fields.items() if name.startswith("teacher")}
    await plane.put(metas, early)
    await plane.update([meta.sample_id for meta in metas[:4]], late)


def test_both_planes_keep_the_same_rules_and_bits(planes: tuple[QueuePlane, QueuePlane]) -> None:
    async def run(plane: QueuePlane | LocalDataPlane) -> list[Any]:
        metas, fields = samples()
        await fill(plane)
        order = [3, 0, 2]
        got = await plane.get(order, list(fields))
        said: list[Any] = [list(got)]
        for name, tensors in got.items():
            for i, tensor in zip(order, tensors, strict=True):
                assert (tensor.dtype, tensor.shape) == (fields[name][i].dtype, fields[name][i].shape), name
                assert torch.equal(tensor.view(torch.uint8), fields[name][i].contiguous().view(torch.uint8)), name
        batch = await plane.claim([3, 1], ["tokens", "teacher_ids"])
        said += [batch.samples == (metas[1], metas[3]), plane.num_samples]
        for call in (
            plane.put([metas[0]], {"tokens": [torch.zeros(1)]}),
            plane.put([metas[0]], {"tokens": []}),
            plane.update([1, 2], {"tokens": [torch.zeros(1)] * 2}),
            plane.update([99], {"x": [torch.zeros(1)]}),
            plane.get([99, 1], ["tokens"]),
            plane.claim([1, 2], ["tokens"]),
            plane.claim([4, 2], ["teacher_ids"]),
            plane.claim([99], []),
            plane.discard([3]),
            plane.release(type(batch)(samples=(metas[5],))),
        ):
            with pytest.raises((KeyError, ValueError)) as caught:
                await call
            said.append(caught.value.args[0])
        await plane.release(batch)
        await plane.discard([0])
        for sample in (0, 1, 3):
            with pytest.raises(KeyError, match=rf"samples \[{sample}\] are unknown"):
                await plane.get([sample], ["tokens"])
        await plane.put([metas[1]], {"tokens": [torch.arange(2)]})  # released: the id may come again
        said += [(await plane.get([1], ["tokens"]))["tokens"][0].tolist(), plane.num_samples]
        await plane.discard([1, 2, 4, 5, 6, 7])
        return said

    async def both() -> None:
        assert await run(planes[1]) == await run(LocalDataPlane())

    asyncio.run(both())


def test_ranks_read_by_address_and_what_was_saved_is_read_back(
    planes: tuple[QueuePlane, QueuePlane], tmp_path: Path
) -> None:
    async def run() -> None:
        _, fields = samples()
        plane, other = planes
        await fill(plane)
        with pytest.raises(KeyError, match="unknown"):  # two runs on one cluster do not meet
            await other.get([1], ["tokens"])
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        command = [sys.executable, "-W", "ignore", "-c", READER, json.dumps(plane.address)]
        with subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None and process.stdin is not None
            (got, unknown, no_field), num_bytes, knows_ray = json.loads(process.stdout.readline())
            assert not knows_ray
            expected = {name: [fields[name][i].tolist() for i in (3, 1, 2)] for name in got}
            assert got == expected and list(got) == ["loss_mask", "tokens", "teacher_logprobs"]
            assert num_bytes == sum(fields[name][i].nbytes for name in got for i in (3, 1, 2))
            assert "[99] are unknown" in unknown and "'x' does not exist" in no_field
            await check_saving(plane, other, tmp_path)
            await check_kills(plane, process)
        await plane.close()
        await other.close()
        deadline = time.monotonic() + 20
        while actor_processes() and time.monotonic() < deadline:
            await asyncio.sleep(0.2)
        assert actor_processes() == {}

    asyncio.run(run())


async def check_saving(plane: QueuePlane, other: QueuePlane, folder: Path) -> None:
    metas, fields = samples()
    digest = await plane.save(folder / "samples")
    hashes = folder / "samples" / HASHES
    written = hashes.read_text()
    victim = next((folder / "samples").rglob("su_0_*.pkl"))
    body = victim.read_bytes()
    victim.write_bytes(body[:-1] + bytes([body[-1] ^ 1]))
    with pytest.raises(UserError, match=rf"{victim.name}: not what was written \(SHA-256\)"):
        await other.load(folder / "samples", digest, FINISHED)
    victim.write_bytes(body)
    (folder / "samples" / "more.pkl").write_bytes(b"")
    with pytest.raises(UserError, match=r"other files than files\.json names"):
        await other.load(folder / "samples", digest, FINISHED)
    (folder / "samples" / "more.pkl").unlink()
    hashes.unlink()
    with pytest.raises(UserError, match=r"files.json.*drawn again"):
        await other.load(folder / "samples", digest, FINISHED)
    hashes.write_text(written)
    assert await other.load(folder / "samples", digest, FINISHED) == metas[:4]
    assert other.num_samples == 4
    got = await other.get([2, 0], ["teacher_logprobs"])
    assert torch.equal(got["teacher_logprobs"][0], fields["teacher_logprobs"][2])
    await other.put([metas[7]], {"tokens": [fields["tokens"][7]]})
    await other.release(await other.claim([0, 1, 2, 3], FINISHED))
    assert other.num_samples == 1


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
    said = await asyncio.to_thread(process.stdout.readline)
    assert said.startswith("data plane: TransferQueue's storage unit") and "has ended" in said
    assert time.monotonic() - started < 20
    for actor in actor_processes().values():
        actor.kill()
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
