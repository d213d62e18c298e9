"""``mopd serve`` as a process: how it starts, what it refuses, how it ends, and what survives its death."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch

from mopd.cli.main import main
from mopd.config.groups import TorchEngineConfig
from mopd.engines.clients.remote import RemoteEngine
from mopd.engines.interface import (
    EngineBusy,
    EngineRejected,
    EngineUnavailable,
    SamplingParams,
    Scores,
    ToDraw,
    ToScore,
)
from mopd.engines.torch.engine import TorchEngine
from tests.fixtures.servers import engine_file, random_tokens, serve_process
from tests.fixtures.tiny_models import make_hf_model, make_tokenizer

SAMPLING = SamplingParams(max_new_tokens=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_hf_model(tmp_path_factory.mktemp("served"))
    make_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def local(folder: Path) -> TorchEngine:
    return TorchEngine.from_pretrained(folder, TorchEngineConfig(dtype="float32"))


def written(path: Path, model: Path, role: Any = "teacher", **changes: Any) -> Path:
    engine_file(model, role, **changes).write(path)
    return path


def with_engine(url: str, action: Callable[[RemoteEngine], Awaitable[Any]], **options: Any) -> Any:
    async def work() -> Any:
        engine = RemoteEngine(url, **{"timeout_s": 60.0, **options})
        try:
            return await action(engine)
        finally:
            await engine.close()

    return asyncio.run(work())


def get(url: str) -> httpx.Response:
    return httpx.get(url, trust_env=False, verify=False, timeout=30.0)


def is_healthy(url: str) -> bool:
    try:
        return get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


async def score_one(engine: RemoteEngine) -> list[Scores]:
    return await engine.score(ToScore(random_tokens(9), [4], top_k=4, temperature=1.0))


def test_start_ready_and_drain(folder: Path, local: TorchEngine, tmp_path: Path) -> None:
    """SIGTERM in the middle of a request: its answer arrives whole, nothing new gets in, exit code 0."""
    ready = tmp_path / "ready.json"
    with serve_process(written(tmp_path / "math.json", folder), "--ready-file", ready) as child:
        line = child.wait_ready()
        assert line == json.loads(ready.read_text()) == {"url": line["url"], "pid": child.process.pid}
        assert line["url"].startswith("http://127.0.0.1:")
        prompts, sampling = [[5, 6, 7 + i % 30] for i in range(400)], SamplingParams(max_new_tokens=240)

        async def work(engine: RemoteEngine) -> None:
            await score_one(engine)
            running = asyncio.create_task(engine.generate(ToDraw(prompts, sampling, list(range(len(prompts))))))
            while "mopd_running_requests 1.0" not in (await asyncio.to_thread(get, f"{line['url']}/metrics")).text:
                assert not running.done()
            os.kill(line["pid"], signal.SIGTERM)
            while await asyncio.to_thread(is_healthy, line["url"]):
                assert not running.done()
            other = RemoteEngine(line["url"], timeout_s=5.0)
            with pytest.raises(EngineUnavailable):
                await score_one(other)
            await other.close()
            drawn = await running
            for theirs, ours in zip(
                drawn, await local.generate(ToDraw(prompts, sampling, list(range(len(prompts))))), strict=True
            ):
                assert torch.equal(theirs.tokens, ours.tokens)

        with_engine(line["url"], work)
        code, stderr = child.end()
        assert (code, stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--port", "PORT"], "cannot listen on 127.0.0.1:PORT: address already in use: set another --port"),
        (["--port", "99999"], "--port 99999 is no port: set 0 (any free one) to 65535"),
        (["--host", "0.0.0.0"], "--host 0.0.0.0 is not the loopback interface, and anyone"),
        (["--token-file", "none"], "token file 'none' cannot be read"),
        (["--token-file", "SHORT"], "token file 'SHORT' must hold one word of 16 or more"),
        (["--teacher", "math"], "serve FILE: a recipe has several engines, an engine file has one: leave"),
    ],
)
def test_refusals_are_one_line(
    folder: Path, tmp_path: Path, arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    short = tmp_path / "short.token"
    short.write_text("secret\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        file = written(tmp_path / "math.json", folder)
        names = {"PORT": str(taken.getsockname()[1]), "SHORT": str(short), "FILE": str(file)}
        for name, value in names.items():
            arguments, line = [argument.replace(name, value) for argument in arguments], line.replace(name, value)
        assert main(["serve", str(file), *arguments]) == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith(f"mopd: error: {line}") and stderr.count("\n") == 1


def test_files_that_cannot_be_served(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing model, a damaged engine file."""
    missing = written(tmp_path / "missing.json", tmp_path / "none")
    damaged = tmp_path / "damaged.json"
    damaged.write_text(missing.read_text().replace('"max_logprobs"', '"logprobs"'))
    expected = {missing: f"{missing}: model: folder", damaged: f"{damaged}: is no engine file of this mopd"}
    for file, line in expected.items():
        assert main(["serve", str(file)]) == 2
        stderr = capsys.readouterr().err
        assert stderr.startswith(f"mopd: error: {line}") and stderr.count("\n") == 1


def test_a_server_that_cannot_tell_where_it_is_ends(folder: Path, tmp_path: Path) -> None:
    """In order: a thread of the engine would otherwise keep the process for ever."""
    with serve_process(written(tmp_path / "math.json", folder), "--ready-file", "/proc/ready.json") as child:
        _out, stderr = child.process.communicate(timeout=120)
    assert child.process.returncode == 2
    assert stderr.endswith(
        "mopd: error: /proc/ready.json: cannot be written: No such file or directory; name another place\n"
    )


def test_a_token_off_loopback(folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("0123456789abcdef0123\n")
    file = written(tmp_path / "math.json", folder)
    with serve_process(file, "--host", "0.0.0.0", "--token-file", secret) as child:
        url = f"http://127.0.0.1:{child.wait_ready()['url'].rsplit(':', 1)[1]}"
        (scores,) = with_engine(url, score_one, token="0123456789abcdef0123")
        assert scores.ids.shape == (5, 4)
        with pytest.raises(EngineRejected, match="HTTP 401"):
            with_engine(url, score_one, token="0123456789abcdef0124")
        with_engine(url, lambda engine: engine.health(timeout_s=5.0))


def test_a_dead_engine_ends_its_server(folder: Path, tmp_path: Path) -> None:
    """Exit code 1, so that whoever supervises it starts another."""
    from mopd.serving.host import ThreadHost

    file, ready = written(tmp_path / "math.json", folder), tmp_path / "ready.json"

    class DeadEngine(TorchEngine):
        async def score(self, *args: Any, **kwargs: Any) -> list[Scores]:
            raise EngineUnavailable("the core process ended")

    async def host(*_: Any) -> ThreadHost:
        return ThreadHost(DeadEngine.from_pretrained(folder, TorchEngineConfig(dtype="float32")), max_batch_tokens=100)

    def ask() -> None:
        while not ready.exists():
            time.sleep(0.02)
        with pytest.raises(EngineUnavailable, match="503: the engine is dead: the core process ended"):
            with_engine(json.loads(ready.read_text())["url"], score_one)

    asker = threading.Thread(target=ask)
    asker.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mopd.placement.engine_loading.start_host", host)
        assert main(["serve", str(file), "--ready-file", str(ready)]) == 1
    asker.join(30)


def test_a_thousand_concurrent_requests(
    folder: Path, local: TorchEngine, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """One CPU server with room for 40 of them: every one is answered with its own scores, memory stays bounded."""
    num_requests = 1000
    file = written(tmp_path / "math.json", folder, max_tokens_per_request=1_000, max_queued_tokens=4_000)
    requests = [random_tokens(40 + i % 120, seed=i) for i in range(num_requests)]
    latencies: list[float] = []
    num_busy = 0

    async def ask(engine: RemoteEngine, tokens: list[torch.Tensor]) -> Scores:
        nonlocal num_busy
        start = time.monotonic()
        while True:
            try:
                (scores,) = await engine.score(ToScore(tokens, [10], top_k=8, temperature=1.0))
            except EngineBusy as refused:
                num_busy += 1
                await asyncio.sleep(refused.retry_after_s)
            else:
                latencies.append(time.monotonic() - start)
                return scores

    async def work() -> list[Scores]:
        engines = [RemoteEngine(url, timeout_s=120.0) for _ in range(16)]
        await asyncio.gather(*(score_one(engine) for engine in engines))
        before.append(server.memory_info().rss)
        results = await asyncio.gather(*(ask(engines[i % 16], tokens) for i, tokens in enumerate(requests)))
        for engine in engines:
            await engine.close()
        return list(results)

    before: list[int] = []
    with serve_process(file) as child:
        ready = child.wait_ready()
        url, server = ready["url"], psutil.Process(ready["pid"])
        start = time.monotonic()
        results = asyncio.run(work())
        wall_s = time.monotonic() - start
        status = Path(f"/proc/{ready['pid']}/status").read_text()
        metrics = get(f"{url}/metrics").text
    flat = asyncio.run(local.score(ToScore([r[0] for r in requests], [10] * num_requests, top_k=8, temperature=1.0)))
    for theirs, ours in zip(results, flat, strict=True):
        torch.testing.assert_close(theirs.logprobs, ours.logprobs, atol=1e-4, rtol=0)
        torch.testing.assert_close(theirs.token_logprobs, ours.token_logprobs, atol=1e-4, rtol=0)
    num_tokens = sum(len(r[0]) - 10 for r in requests) + 16 * 5
    assert f"mopd_scored_tokens_total {float(num_tokens)}" in metrics
    peak = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
    assert peak - before[0] < 400 * 2**20
    latencies.sort()
    figures = {
        "wall_s": round(wall_s, 2),
        "p50_s": round(latencies[num_requests // 2], 3),
        "p99_s": round(latencies[int(num_requests * 0.99)], 3),
        "busy_answers": num_busy,
        "grown_mib": (peak - before[0]) // 2**20,
    }
    for name, value in figures.items():
        record_property(name, value)
    print(f"1,000 concurrent requests: {figures}")
    assert num_busy > 0
