"""Readers in real processes: the same bits, the storage's own words for what is not there, one line when it dies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from mopd.base.types import UserError
from mopd.data_plane.frames import packed
from mopd.data_plane.interface import StorageEnded
from mopd.data_plane.local import LocalDataPlane
from mopd.data_plane.reading import SocketReader
from mopd.data_plane.transfer_queue import QueueClient
from tests.fixtures.samples import meta_of

STORAGE = """
import asyncio, json, sys, torch
from mopd.data_plane.local import LocalDataPlane
from mopd.base.types import SampleMeta

async def main(host):
    plane = LocalDataPlane()
    metas = [SampleMeta(sample_id=i, domain="math", weight_version=0, prompt_length=1, response_length=2,
                        num_loss_tokens=2) for i in (10, 11)]
    await plane.put(metas, {"tokens": [torch.arange(3), torch.arange(100_000)],
                            "bf16": [torch.ones(2, 3).bfloat16().T, torch.zeros(0).bfloat16()]})
    plane.serve(host=host)
    print(json.dumps(plane.address), flush=True)
    sys.stdin.read()  # blocks the event loop: readers are answered all the same
    await plane.close()

asyncio.run(main(*json.loads(sys.argv[1])))
"""


@contextmanager
def storage(host: str | None = None) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    command = [sys.executable, "-c", STORAGE, json.dumps([host])]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        try:
            yield process, json.loads(process.stdout.readline())
        finally:
            process.kill()


def freeze(process: subprocess.Popen[str]) -> None:
    """Stop it, and wait until each of its threads has: the signal alone leaves one time to answer."""
    process.send_signal(signal.SIGSTOP)
    threads = list(Path(f"/proc/{process.pid}/task").iterdir())
    deadline = time.monotonic() + 10
    while any((thread / "stat").read_text().rsplit(")", 1)[1].split()[0] != "T" for thread in threads):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def is_in_the_kernel(address: dict[str, Any]) -> bool:
    """Whether a process listens under the abstract name of a storage."""
    return address["url"].removeprefix("ipc://") in Path("/proc/net/unix").read_text(encoding="utf-8")


@pytest.mark.parametrize("host", [None, "localhost"])
def test_another_process_reads_the_same_bits_and_errors_and_notices_a_kill(
    host: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file is left, however it ends, and in however long a folder."""
    deep = tmp_path / ("x" * 200)
    deep.mkdir()
    monkeypatch.setenv("TMPDIR", str(deep))
    with storage(host) as (process, address):
        assert host is not None or is_in_the_kernel(address)
        reader = SocketReader(address, timeout_s=60)
        got = reader.fetch([11, 10], ["bf16", "tokens"])
        assert list(got) == ["bf16", "tokens"]
        assert [t.shape for t in got["bf16"]] == [(0,), (3, 2)] and got["bf16"][1].dtype == torch.bfloat16
        assert torch.equal(got["bf16"][1], torch.ones(3, 2).bfloat16())
        assert torch.equal(got["tokens"][0], torch.arange(100_000)) and torch.equal(got["tokens"][1], torch.arange(3))
        needed = 8 * 100_003 + 2 * 6
        assert needed < reader.bytes_received < needed + 200
        for ids, names, text in (([9, 10], ["tokens"], r"\[9\] are unknown"), ([10], ["x"], r"'x' does not exist")):
            with pytest.raises(KeyError, match=text):
                reader.fetch(ids, names)
        assert reader.fetch([10], ["tokens"])["tokens"][0].tolist() == [0, 1, 2]
        freeze(process)
        killer = threading.Timer(0.3, process.kill)  # in the middle of a fetch
        killer.start()
        with pytest.raises(
            UserError, match=rf"^data plane: process {process.pid}, .* has ended.*: see its last lines$"
        ):
            reader.fetch([10], ["tokens"])
        with pytest.raises(UserError, match="has ended"):
            reader.fetch([10], ["tokens"])
        reader.close()
        with pytest.raises(UserError, match="has ended"):
            SocketReader(address, timeout_s=60)
        assert not is_in_the_kernel(address)
    assert list(deep.iterdir()) == []


def test_a_storage_that_does_not_answer_is_waited_for_until_the_deadline() -> None:
    """The reads of one command have one together: the other ranks wait for all of them in one collective. A deadline of
    its own would end after this test may."""
    with storage() as (process, address):
        reader = SocketReader(address, timeout_s=100_000)
        assert reader.fetch([10], ["tokens"], waited_s=99_000)["tokens"][0].tolist() == [0, 1, 2]
        freeze(process)
        with pytest.raises(UserError, match=r"did not answer within 100000 s \(schedule.wait_timeout_s\)"):
            reader.fetch([10], ["tokens"], waited_s=99_999.8)
        process.send_signal(signal.SIGCONT)
        with pytest.raises(UserError, match="answer to another question"):  # what was given up arrives
            reader.fetch([11], ["tokens"])
        reader.close()
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(20) == 0
        assert not is_in_the_kernel(address)


def test_nobody_reads_without_the_keys() -> None:
    async def run() -> None:
        plane = LocalDataPlane()
        await plane.put([meta_of(1)], {"tokens": [torch.arange(2)]})
        plane.serve(host="127.0.0.1")
        address = plane.address
        assert address["url"].startswith("tcp://127.0.0.1:")
        own_public, own_secret = (key.decode() for key in zmq.curve_keypair())
        others = {"public_key": own_public, "secret_key": own_secret}
        plain = {name: address[name] for name in ("type", "url", "pid")}
        for wrong in (address | others, address | {"server_key": own_public}, plain):
            with pytest.raises(UserError, match=r"lets nobody in|did not answer"):
                SocketReader(wrong, timeout_s=1)
        reader = SocketReader(address, timeout_s=10)
        assert reader.fetch([1], ["tokens"])["tokens"][0].tolist() == [0, 1]
        reader.close()
        await plane.close()

    asyncio.run(run())


def test_a_stranger_s_bytes_stop_nobody() -> None:
    with storage() as (process, address), zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0  # else a failure below waits for ever
        socket.connect(address["url"])
        good = {"number": 1, "sample_ids": [10], "fields": ["tokens"]}
        for parts in (
            [b"\xc1"],
            [packed(7)],
            [packed(good), b"more"],
            [packed(good | {"sample_ids": ["1"]})],
            [packed(good | {"fields": "tokens"})],
            [packed({"number": 1})],
        ):
            socket.send_multipart(parts)
        socket.send(packed(good))
        assert socket.poll(10_000) and len(socket.recv_multipart()) == 2
        reader = SocketReader(address, timeout_s=10)
        assert reader.fetch([10], ["tokens"])["tokens"][0].tolist() == [0, 1, 2]
        reader.close()
        assert process.stdin is not None and process.stderr is not None
        process.stdin.close()
        assert process.stderr.read().count("a question that is none") == 6


def test_no_host_no_plane() -> None:
    with pytest.raises(UserError, match=r"data plane: cannot listen on '192.0.2.1'"):
        LocalDataPlane().serve(host="192.0.2.1")


def test_other_users_do_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """To a storage of another user this process is a stranger."""
    plane = LocalDataPlane()
    with monkeypatch.context() as context:
        context.setattr("os.geteuid", lambda: os.getuid() + 1)
        plane.serve(host=None)
    # The storage hangs up at once: the reader sees it connect first, or only the end.
    with pytest.raises((UserError, StorageEnded), match=r"did not answer|lets nobody in"):
        reader = SocketReader(plane.address, timeout_s=0.5)
        try:
            reader.fetch([10], ["tokens"])
        finally:
            reader.close()
    asyncio.run(plane.close())


def test_an_actor_of_transfer_queue_lives_while_it_listens() -> None:
    client = QueueClient.__new__(QueueClient)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        client._servers = {"controller": {"ip": "127.0.0.1", "ports": {"request_handle_socket": port}}}
        asyncio.run(client._require_alive(Counter()))
    with pytest.raises(StorageEnded, match=rf"controller \(127\.0\.0\.1, ports \[{port}\]\) has ended"):
        asyncio.run(client._require_alive(Counter()))
