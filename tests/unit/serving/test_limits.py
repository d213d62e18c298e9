"""What a server refuses, and that it lives on: bodies, tokens, secrets, deadlines, clients that are slow or gone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from uvicorn.config import LOGGING_CONFIG

from mopd.config.groups import TorchEngineConfig
from mopd.engines.clients.remote import RemoteEngine
from mopd.engines.interface import EngineBusy, EngineUnavailable, ToScore
from mopd.engines.torch.engine import TorchEngine
from mopd.engines.wire.messages import ScoreAnswer, decode, encode
from mopd.placement.engine_loading import server_limits
from mopd.serving.admission import ServerLimits
from tests.fixtures.servers import GatedEngine, RunningServer, engine_file, random_tokens, running_server, wait_until
from tests.unit.engines.wire.test_messages import score_request
from tests.unit.serving.test_updates import run

TOKEN = "0123456789abcdef"
PROPAGATES = LOGGING_CONFIG["loggers"]["uvicorn"], "propagate", True
"""Without it ``caplog`` hears nothing of uvicorn."""
CLIENT = httpx.Client(timeout=30.0, trust_env=False)


def post(running: RunningServer, path: str, body: bytes, **headers: str) -> httpx.Response:
    return CLIENT.post(f"{running.url}{path}", content=body, headers=headers)


def assert_lives(running: RunningServer) -> None:
    """It scores, and nothing is left in its queue."""
    response = post(running, "/v1/score", encode(score_request()))
    assert response.status_code == 200
    assert decode(response.content, ScoreAnswer).request_checksum == score_request().checksum
    wait_until(lambda: running.server.admission.queued_tokens == 0)
    assert running.server.admission.num_running == 0


@pytest.fixture(scope="module")
def strict(folder: Any) -> Iterator[RunningServer]:
    """A teacher with small limits and short deadlines."""
    limits = {"max_body_bytes": 20_000, "body_timeout_s": 1.0, "head_timeout_s": 0.7, "stall_timeout_s": 0.7}
    with running_server(
        TorchEngine.from_pretrained(folder, TorchEngineConfig(dtype="float32")), limits=limits
    ) as running:
        yield running


def complaints(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Warnings and worse, but for what the garbage collector finds: that may be an earlier test's."""
    late = ("was never retrieved", "was destroyed but it is pending")
    records = [record for record in caplog.records if record.levelno >= logging.WARNING]
    return [one for one in records if one.name != "asyncio" or not any(text in one.getMessage() for text in late)]


def connect(running: RunningServer) -> socket.socket:
    host, port = running.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def test_limits_are_those_of_the_documentation() -> None:
    """Docs and server: a client is written against the former."""
    text = (Path(__file__).parents[3] / "docs" / "server.md").read_text().partition("\n## Limits\n")[2]
    rows = dict(line.strip("| ").split(" | ") for line in text.partition("\n## ")[0].splitlines() if " | " in line)
    limits = ServerLimits(max_tokens_per_request=1, max_queued_tokens=1)
    assert f"; {limits.head_timeout_s:g} s from its first byte" in rows["head of a request"]
    assert rows["connections"].startswith(f"{limits.max_connections:,}, or half")
    silent = rows["a client that does not read its answer, or sends nothing of its body"]
    assert silent == f"{limits.stall_timeout_s:g} s"
    assert f"; {limits.body_timeout_s:g} s; a `Content-Length`" in rows["one body"]


def test_a_body_too_large(strict: RunningServer) -> None:
    """Refused by its announced length; the client hears it although it is still sending."""
    for size in (20_001, 5_000_000):
        response = post(strict, "/v1/score", b"x" * size)
        assert response.status_code == 413
        assert f"a body of {size} bytes: this server takes 20000" in response.text
    assert_lives(strict)


@pytest.mark.parametrize("drip", [False, True], ids=["silent", "drip by drip"])
def test_a_client_that_sends_slowly(strict: RunningServer, drip: bool) -> None:
    """Its place is free again when the body is late; another client is served meanwhile."""
    with connect(strict) as slow:
        slow.sendall(b"POST /v1/score HTTP/1.1\r\nhost: localhost\r\ncontent-length: 19000\r\n\r\nabc")
        assert_lives(strict)
        start = time.monotonic()
        while drip and time.monotonic() < start + 0.9:
            with contextlib.suppress(OSError):  # it may have been given up already
                slow.sendall(b"x")
            time.sleep(0.05)
        assert b"408" in slow.recv(1000).split(b"\r\n")[0]
    assert strict.server._bodies._arrived_bytes == 0
    assert_lives(strict)


def test_too_much_arrives_at_once(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has arrived counts, not what was announced."""
    head = b"POST /v1/score HTTP/1.1\r\nhost: localhost\r\ncontent-length: 20000\r\n\r\n"
    with running_server(engine, limits={"max_body_bytes": 20_000}) as running:
        slow = [connect(running) for _ in range(9)]
        try:
            for connection in slow:
                connection.sendall(head)
            assert_lives(running)
            monkeypatch.setattr(running.server._bodies, "_max_arriving_bytes", 80_000)
            for connection in slow[:4]:
                connection.sendall(b"x" * 19_999)
            wait_until(lambda: running.server._bodies._arrived_bytes == 4 * 19_999)
            response = post(running, "/v1/score", encode(score_request()))
            assert response.status_code == 429 and "79996 bytes of other bodies" in response.text
        finally:
            for connection in slow:
                connection.close()
        wait_until(lambda: running.server._bodies._arrived_bytes == 0)
        assert_lives(running)


def test_a_client_that_does_not_read(engine: TorchEngine) -> None:
    """The answer is larger than what the sockets hold; after the deadline its room in the queue is free again."""
    limits = {"stall_timeout_s": 0.5, "max_tokens_per_request": 40_000, "max_queued_tokens": 40_000}
    tokens = random_tokens(*[250] * 150)
    body = encode(
        score_request(
            tokens=torch.cat(tokens).int().numpy(),
            lengths=np.full(150, 250, dtype=np.int32),
            prompt_lengths=np.full(150, 1, dtype=np.int32),
            top_k=48,
        )
    )
    with running_server(engine, limits=limits) as running:
        host, port = running.url.removeprefix("http://").split(":")
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect((host, int(port)))
            slow.sendall(
                f"POST /v1/score HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
            )
            wait_until(lambda: running.server.admission.queued_tokens > 0)
            wait_until(lambda: running.server.admission.queued_tokens == 0)
        assert_lives(running)


@pytest.mark.parametrize("text", ["0", "-1", "nan", "soon", ""])
def test_a_deadline_that_is_none(teacher: RunningServer, text: str) -> None:
    response = post(teacher, "/v1/score", encode(score_request()), **{"x-mopd-deadline-s": text})
    assert response.status_code == 400 and "positive number of seconds" in response.text


def test_a_deadline_that_passes(gated: GatedEngine) -> None:
    """The client's and the server's own, the other being far longer; what waited never reaches the engine."""
    body = encode(score_request())
    with running_server(gated) as running:
        gated.gate.clear()
        for _ in range(2):
            assert post(running, "/v1/score", body, **{"x-mopd-deadline-s": "0.2"}).status_code == 504
        gated.gate.set()
        assert_lives(running)
        assert len(gated.num_samples) == 2  # the first, which ran on unheard, and the last
    with running_server(gated, limits={"request_timeout_s": 0.2}) as running:
        gated.gate.clear()
        assert post(running, "/v1/score", body, **{"x-mopd-deadline-s": "600"}).status_code == 504
        gated.gate.set()


def test_a_full_queue_and_recovery(gated: GatedEngine) -> None:
    """Room for two requests of 9 tokens; the third hears 429 and when to come back, and is served later."""
    with running_server(gated, limits={"max_tokens_per_request": 9, "max_queued_tokens": 18}) as running:

        async def work(remote: RemoteEngine) -> None:
            gated.gate.clear()

            async def score() -> Any:
                return await remote.score(ToScore(random_tokens(5, 4), [3, 2], top_k=1, temperature=1.0))

            first = [asyncio.create_task(score()) for _ in range(2)]
            while running.server.admission.queued_tokens < 18:
                await asyncio.sleep(0.01)
            with pytest.raises(EngineBusy, match="18 of 18 tokens are queued: no room for 9") as refused:
                await score()
            assert 0 < refused.value.retry_after_s <= 30
            response = await asyncio.to_thread(post, running, "/v1/score", encode(score_request()))
            error = response.json()["error"]
            assert error["type"] == "busy" and error["retry_after_s"] <= int(response.headers["retry-after"])
            gated.gate.set()
            await asyncio.gather(*first)
            await score()

        run(running, work)
        assert_lives(running)


def test_a_client_that_goes_away(gated: GatedEngine) -> None:
    """Its waiting request leaves the queue without having reached the engine."""
    with running_server(gated) as running:

        async def work(staying: RemoteEngine) -> None:
            gated.gate.clear()
            going = RemoteEngine(running.url, timeout_s=0.3)
            first = asyncio.create_task(staying.score(ToScore(random_tokens(5), [2], top_k=1, temperature=1.0)))
            while not gated.num_samples:
                await asyncio.sleep(0.01)
            with pytest.raises(EngineUnavailable, match=r"no answer to /v1/score within 0\.3 s"):
                await going.score(ToScore(random_tokens(50), [2], top_k=1, temperature=1.0))
            await going.close()
            while running.server.admission.queued_tokens > 5:
                await asyncio.sleep(0.01)
            gated.gate.set()
            await first

        run(running, work)
        assert_lives(running)
        assert gated.num_samples == [1, 2]


def test_an_engines_own_fault_is_500_and_its_death_503(gated: GatedEngine) -> None:
    problems: list[Exception] = [RuntimeError("bug"), EngineUnavailable("core process ended")]
    deaths: list[int] = []

    def fail(_: int) -> None:
        raise problems[0]

    with running_server(gated, on_dead=lambda: deaths.append(1)) as running:
        gated._pass = fail  # type: ignore[method-assign]
        assert post(running, "/v1/score", encode(score_request())).status_code == 500
        assert CLIENT.get(f"{running.url}/health").status_code == 200
        problems.pop(0)
        for _ in range(2):
            response = post(running, "/v1/score", encode(score_request()))
            assert response.status_code == 503 and "core process ended" in response.text
        assert CLIENT.get(f"{running.url}/health").json() == {"status": "dead"}
        assert deaths == [1]


def test_top_k_is_what_the_recipe_asks_for(engine: TorchEngine, folder: Any) -> None:
    """It decides how long an answer is: the whole vocabulary for every token is more than anybody wants."""
    assert server_limits(engine_file(folder)).max_logprobs == 8
    with running_server(engine, limits={"max_logprobs": 8}) as running:
        assert CLIENT.get(f"{running.url}/info").json()["engine"]["max_logprobs"] == 8
        response = post(running, "/v1/score", encode(score_request(top_k=9)))
        assert response.status_code == 400 and "top_k is 9" in response.text
        assert_lives(running)


def test_a_request_that_outlives_the_drain(
    gated: GatedEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hears so, and the server ends without a traceback."""
    monkeypatch.setitem(*PROPAGATES)
    with ThreadPoolExecutor() as pool, running_server(gated, limits={"drain_timeout_s": 1}) as running:
        gated.gate.clear()
        asking = pool.submit(post, running, "/v1/score", encode(score_request()))
        assert gated.entered.acquire(timeout=30)
    gated.gate.set()
    response = asking.result()
    assert response.status_code == 503 and "the server ended before" in response.text
    assert not [record for record in complaints(caplog) if record.exc_info]
