"""Throughput of the whole teacher path beside the bare engine: the same batch, in turns, both engines alive.

::

    bare:  AsyncLLM in this process (or the torch engine), all sequences at once
    path:  Router -> RemoteEngine -> HTTP -> ``mopd serve`` (a child process) -> the same engine

Then the answers alone: bytes per scored token, and the time until they are tensors. Shapes: R response tokens, K top-k.
"""

from __future__ import annotations

import asyncio
import functools
import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import yaml
from torch import Tensor

from mopd.bench.clock import Others, family_busy_s
from mopd.config.groups import RoutingConfig, TorchEngineConfig, VllmEngineConfig
from mopd.engines.clients.remote import RemoteEngine, to_scores
from mopd.files.temporary import TemporaryFolder
from mopd.replicas.interface import Replica
from mopd.replicas.router import Router
from mopd.types import UserError
from mopd.wire.messages import ScoreAnswer, decode, encode

EngineType = Literal["vllm", "torch"]
Score = Callable[[Sequence[Tensor], Sequence[int]], Awaitable[object]]

MODEL: dict[str, Any] = {"vocab_size": 32_000, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4}
"""28 million weights with tied embeddings; head_dim 64."""
MAX_LENGTH = 256
PROMPT_LENGTH = 32
MIN_PAIRS = 5
THROUGHPUT_GOAL = 0.85
"""Smallest allowed median of bare seconds / path seconds."""
START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 30.0
NUM_ROWS = 8192
NUM_SAMPLES = 32
REPEATS = 5
DECODE_GOAL = 10.0
"""Smallest allowed speed-up over nested lists."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Throughput:
    """Seconds of each pair, and what travelled."""

    engine: EngineType
    num_weights: int
    num_sequences: int
    num_tokens: int
    """Of the batch, prompts included."""
    num_rows: int
    """Scored response tokens."""
    top_k: int
    bare_s: tuple[float, ...]
    path_s: tuple[float, ...]
    answer_bytes_per_row: float
    """Bytes of the answers' bodies per scored token."""
    prompt_bytes_share: float
    """Share of the answers' bytes that grew with the prompts when they were made four times as long."""
    others_cores: float | None
    """Cores that processes which have nothing to do with this kept busy during the pairs; None where the system does
    not say."""
    throughput_goal: float = THROUGHPUT_GOAL

    @property
    def ratios(self) -> list[float]:
        """Throughput of the path relative to the bare engine, pair by pair."""
        return [bare / path for bare, path in zip(self.bare_s, self.path_s, strict=True)]

    @property
    def median_ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def payload_goal(self) -> int:
        """Bytes per scored token that an answer at fp32 may take."""
        return 8 * self.top_k + 32

    @property
    def is_met(self) -> bool:
        """Fast enough, small enough, and nothing for the prompts."""
        return (
            self.median_ratio >= self.throughput_goal
            and self.answer_bytes_per_row <= self.payload_goal
            and self.prompt_bytes_share == 0
        )


async def measure_throughput(
    engine: EngineType, *, num_pairs: int, num_sequences: int, top_k: int, progress: Callable[[str], None]
) -> Throughput:
    """Make a model, start both sides, measure ``num_pairs`` pairs after a warm-up of each.

    Raises:
        UserError: the server or the engine did not start.
    """
    with TemporaryFolder("mopd-bench-") as name:
        folder = Path(name)
        num_weights = make_model(folder / "model")
        tokens, starts = make_batch(num_sequences)
        progress("starting the server and the bare engine")
        async with _served(folder, engine, top_k) as remote, _bare(folder / "model", engine, top_k) as bare:
            router = Router("bench", [Replica(name="bench.0", engine=remote)], RoutingConfig(), kind="teacher")
            path = functools.partial(router.score, top_k=top_k, temperature=1.0)
            await bare(tokens, starts)
            await path(tokens, starts)
            received = await _received(remote, path, tokens, starts)
            times: dict[str, list[float]] = {"bare": [], "path": []}
            others = Others(family_busy_s)
            sides: list[tuple[str, Score]] = [("bare", bare), ("path", path)]
            for pair in range(num_pairs):
                for side, score in sides if pair % 2 == 0 else sides[::-1]:
                    started = time.perf_counter()
                    await score(tokens, starts)
                    times[side].append(time.perf_counter() - started)
                progress(f"pair {pair + 1}: bare {times['bare'][-1]:.2f} s, path {times['path'][-1]:.2f} s")
            others_cores = others.cores()
            share = await _prompt_share(remote, path)
            await router.close()
    num_rows = sum(len(sequence) - start for sequence, start in zip(tokens, starts, strict=True))
    return Throughput(
        engine=engine,
        num_weights=num_weights,
        num_sequences=num_sequences,
        num_tokens=sum(map(len, tokens)),
        num_rows=num_rows,
        top_k=top_k,
        bare_s=tuple(times["bare"]),
        path_s=tuple(times["path"]),
        answer_bytes_per_row=received / num_rows,
        prompt_bytes_share=share,
        others_cores=others_cores,
    )


def make_model(folder: Path) -> int:
    """A random Llama; returns its number of weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LlamaConfig(
            **MODEL,
            num_attention_heads=8,
            num_key_value_heads=8,
            max_position_embeddings=MAX_LENGTH,
            tie_word_embeddings=True,
            bos_token_id=1,
            eos_token_id=2,
        )
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return sum(weight.numel() for weight in model.parameters())


def make_batch(num_sequences: int) -> tuple[list[Tensor], list[int]]:
    """Sequences of 64 to 192 random tokens, prompts of 32."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(64, 193, (num_sequences,), generator=generator).tolist()
    tokens = [torch.randint(3, MODEL["vocab_size"], (length,), generator=generator) for length in lengths]
    return tokens, [PROMPT_LENGTH] * num_sequences


async def _received(remote: RemoteEngine, path: Score, tokens: Sequence[Tensor], starts: Sequence[int]) -> int:
    """Bytes of the answers to one batch."""
    before = remote.bytes_received
    await path(tokens, starts)
    return remote.bytes_received - before


async def _prompt_share(remote: RemoteEngine, path: Score) -> float:
    """The same 16 responses after short and after long prompts: what the answer grew by, relative to its size."""
    short, long = [
        await _received(remote, path, [torch.arange(3, 3 + start + 32) for _ in range(16)], [start] * 16)
        for start in (PROMPT_LENGTH, 4 * PROMPT_LENGTH)
    ]
    return (long - short) / long


def _engine_config(engine: EngineType) -> TorchEngineConfig | VllmEngineConfig:
    if engine == "torch":
        return TorchEngineConfig(dtype="float32")
    is_cpu = not torch.cuda.is_available()
    return VllmEngineConfig(
        type="vllm",
        dtype="float32" if is_cpu else "bfloat16",
        max_model_len=MAX_LENGTH,
        gpu_memory_utilization=0.3,  # both sides share the machine
        kv_cache_memory_bytes=2**30,
        enforce_eager=is_cpu,
    )


@asynccontextmanager
async def _bare(model: Path, engine: EngineType, top_k: int) -> AsyncIterator[Score]:
    """The engine alone, without any of our code around vLLM's."""
    config = _engine_config(engine)
    if isinstance(config, TorchEngineConfig):
        from mopd.engines.torch.engine import TorchEngine

        torch_engine = TorchEngine.from_pretrained(model, config, "cuda" if torch.cuda.is_available() else "cpu")
        yield functools.partial(torch_engine.score, top_k=top_k, temperature=1.0)
        return
    from mopd.engines.vllm import start as vllm

    options = {"max_logprobs": top_k, "logprobs_mode": "processed_logprobs", "enable_prefix_caching": False}
    args = vllm.engine_args(model, config, MAX_LENGTH, options, fixed=True)
    llm = await asyncio.to_thread(vllm.start_llm, model, args, START_TIMEOUT_S)
    params = vllm.VllmSamplingParams(
        max_tokens=1,
        temperature=0.0,
        prompt_logprobs=top_k,
        flat_logprobs=True,
        detokenize=False,
        output_kind=vllm.RequestOutputKind.FINAL_ONLY,
    )
    numbers = iter(range(sys.maxsize))

    async def one(sequence: list[int]) -> None:
        async for _ in llm.generate(vllm.tokens_input(sequence), params, f"bare-{next(numbers)}"):
            pass

    async def score(tokens: Sequence[Tensor], starts: Sequence[int]) -> None:
        await asyncio.gather(*(one(sequence.tolist()) for sequence in tokens))

    try:
        yield score
    finally:
        await vllm.stop_llm(llm, STOP_TIMEOUT_S)


@asynccontextmanager
async def _served(folder: Path, engine: EngineType, top_k: int) -> AsyncIterator[RemoteEngine]:
    """``mopd serve`` in a child process, and its client."""
    recipe, ready, log = folder / "recipe.yaml", folder / "ready.json", folder / "serve.log"
    recipe.write_text(yaml.safe_dump(_recipe(folder, engine, top_k)))
    command = [sys.executable, "-m", "mopd", "serve", str(recipe), "--teacher", "bench", "--ready-file", str(ready)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
    try:
        url = await _wait_until_ready(process, ready, log)
        remote = RemoteEngine(url, timeout_s=START_TIMEOUT_S, name="bench.0")
        try:
            yield remote
        finally:
            await remote.close()
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            await asyncio.to_thread(process.wait, STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            await asyncio.to_thread(process.wait, STOP_TIMEOUT_S)


async def _wait_until_ready(process: subprocess.Popen[bytes], ready: Path, log: Path) -> str:
    give_up_at = time.monotonic() + START_TIMEOUT_S
    while not ready.exists():
        if process.poll() is not None or time.monotonic() > give_up_at:
            last = " ".join(log.read_text(errors="replace").split())[-500:]
            raise UserError(f"bench teachers: mopd serve did not become ready: {last}")
        await asyncio.sleep(0.2)
    return str(json.loads(ready.read_text())["url"])


def _recipe(folder: Path, engine: EngineType, top_k: int) -> dict[str, Any]:
    """The smallest recipe with one teacher; nothing but that teacher is read."""
    config = _engine_config(engine)
    keys = {name: getattr(config, name) for name in type(config).__dataclass_fields__}
    model = str(folder / "model")
    return {
        "run_dir": str(folder / "run"),
        "student": {"model": model},
        "teachers": {"bench": {"model": model, "domains": ["bench"], "engine": keys}},
        "data": {"train": ["none.jsonl"]},
        "loss": {"type": "topk_forward_kl", "top_k": top_k},
        "schedule": {"steps": 1, "prompts_per_step": 1},
        "checkpoint": {"keep_best": False},
        "preflight": {"require_better_teacher": False},
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Decode:
    """Seconds until one answer is in tensors, medians."""

    rows: int
    top_k: int
    binary_s: float
    """From the bytes of the body: checksum, checks and copies included."""
    lists_s: float
    """``torch.tensor`` of nested lists that lie in memory already: the parsing before it is not counted."""
    json_s: float
    """The same with the parsing of JSON."""
    json_bytes: int
    binary_bytes: int
    goal: float = DECODE_GOAL

    @property
    def speedup(self) -> float:
        return self.lists_s / self.binary_s

    @property
    def is_met(self) -> bool:
        return self.speedup >= self.goal


def measure_decode(top_k: int) -> Decode:
    """One answer of 8,192 rows, as it comes over the wire and as JSON."""
    message = make_answer(top_k)
    body = encode(message)
    nested = [part.reshape(NUM_ROWS, -1).tolist() for part in (message.ids, message.logprobs, message.token_logprobs)]
    text = json.dumps(nested)

    def from_lists(lists: list[Any]) -> Any:
        ids, *logprobs = lists
        return torch.tensor(ids, dtype=torch.int32), [torch.tensor(part, dtype=torch.float32) for part in logprobs]

    return Decode(
        rows=NUM_ROWS,
        top_k=top_k,
        binary_s=_median_s(lambda: to_scores(decode(body, ScoreAnswer))),
        lists_s=_median_s(lambda: from_lists(nested)),
        json_s=_median_s(lambda: from_lists(json.loads(text))),
        json_bytes=len(text),
        binary_bytes=len(body),
    )


def make_answer(top_k: int) -> ScoreAnswer:
    """Plausible scores of 32 responses."""
    generator = np.random.default_rng(0)
    logprobs = -generator.exponential(4.0, (NUM_ROWS, top_k)).astype(np.float32)
    return ScoreAnswer(
        request_checksum=bytes(16),
        weight_version=-1,
        top_k=top_k,
        lengths=np.full(NUM_SAMPLES, NUM_ROWS // NUM_SAMPLES, dtype=np.int32),
        ids=generator.integers(0, 150_000, NUM_ROWS * top_k, dtype=np.int32),
        logprobs=np.sort(logprobs)[:, ::-1].reshape(-1).copy(),
        token_logprobs=logprobs[:, 0].copy(),
    )


def _median_s(work: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times)
