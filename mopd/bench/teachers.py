"""``mopd bench teachers``: the whole teacher path beside the bare engine: the same batch, in turns, both engines alive;
the path once for each payload, all of one server.

::

    bare:  AsyncLLM in this process (or the torch engine), all sequences at once
    path:  Router -> RemoteEngine -> HTTP -> ``mopd serve`` (a child process) -> the same engine

With ``--size`` the torch engine beside a bare forward pass at a published model's sizes, on a GPU; with
``--adapter-rank`` two adapters on one server (``mopd.bench.adapters``). Shapes: R response tokens, K top-k.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mopd.base.files.temporary import TemporaryFolder
from mopd.base.types import UserError
from mopd.bench.adapters import measure_adapters
from mopd.bench.harness import BenchReport, Comparison, Others, at_least, at_most, ratio, rounds, rows, say, timed
from mopd.bench.models import DOMAIN, Dtype, make_recipe, make_tokens, qwen3, size_on_gpu, write_model
from mopd.bench.processes import TIMEOUT_S, TOKEN, family_busy_s, servers
from mopd.config.groups import RoutingConfig, TorchEngineConfig, VllmEngineConfig
from mopd.config.losses import TopKLossConfig
from mopd.config.payloads import Asked, Payload, asked
from mopd.conversion.hf.pretrained import load_weights
from mopd.engines.clients.remote import RemoteEngine
from mopd.engines.interface import ToScore
from mopd.engines.replicas.interface import Replica
from mopd.engines.replicas.router import Router
from mopd.engines.torch.engine import TorchEngine
from mopd.placement.engine_file import teacher_file

Score = Callable[[Sequence[Tensor], Sequence[int]], Awaitable[object]]

MODEL = {**qwen3(512, 1408, 4, 8, 8, 64, vocab=32_000), "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
"""Llama of 28 million weights with tied embeddings."""
MAX_LENGTH = 256
PROMPT_LENGTH = 32
LEAST_THROUGHPUT = 0.85
"""Goal of the path's throughput, relative to the bare engine."""
STOP_TIMEOUT_S = 30.0
COLUMNS = {"s": "median_s:.3f", "tokens/s": "tokens_per_s:,.0f"}
BARE = "bare"
PAYLOADS: tuple[Payload, ...] = ("topk", "student_topk", "union", "sampled", "hidden")
SIZED_SEQUENCES, SIZED_LENGTH, SIZED_PROMPT, SIZED_PER_FORWARD, SIZED_ROUNDS = 16, 2048, 512, 4, 5


def run(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Measure and print. Return the exit code.

    Raises:
        UserError: an impossible option, or an engine that does not start.
    """
    numbers = {"--pairs": args.pairs, "--sequences": args.sequences, "--top-k": args.top_k}
    for name, value in (numbers | {"--adapter-rank": args.adapter_rank}).items():
        if value is not None and value < 1:
            raise UserError(f"{name} is {value}: set 1 or more")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report = BenchReport(benchmark="teachers", arguments=arguments, as_json=args.json, device=device)
    if args.size is not None and args.adapter_rank is not None:
        raise UserError(f"--size {args.size} and --adapter-rank {args.adapter_rank} measure different things: give one")
    if args.size is not None:
        lengths = [SIZED_LENGTH] * SIZED_SEQUENCES
        report.add(measure_size(args.size, size_on_gpu(args.size), lengths, dtype="bfloat16", top_k=args.top_k))
        return report.finish()
    if args.engine == "vllm" and find_spec("vllm") is None:
        raise UserError("bench teachers: vllm is not installed: pip install 'mopd[vllm]', or set --engine torch")
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(64, 193, (args.sequences,), generator=generator).tolist()
    tokens = [torch.randint(3, MODEL["vocab_size"], (length,), generator=generator) for length in lengths]
    if args.adapter_rank is None:
        asyncio.run(measure_path(report, args.engine, tokens, args.pairs, args.top_k))
        return report.finish()
    options = {"longest": MAX_LENGTH, "rank": args.adapter_rank, "top_k": args.top_k, "count": args.pairs}
    starts = [PROMPT_LENGTH] * args.sequences
    asyncio.run(measure_adapters(report, MODEL, _engine_config(args.engine), tokens, starts, **options))
    return report.finish()


async def measure_path(report: BenchReport, engine: str, tokens: Sequence[Tensor], num_pairs: int, top_k: int) -> None:
    """Start both sides, and measure ``num_pairs`` pairs after a warm-up of each, of sequences ``tokens`` [L] int64.

    Raises:
        UserError: the server or the engine did not start.
    """
    cfg, lengths, num_sequences = _engine_config(engine), list(map(len, tokens)), len(tokens)
    num_tokens, num_rows = sum(lengths), sum(lengths) - PROMPT_LENGTH * num_sequences
    starts, options = [PROMPT_LENGTH] * num_sequences, {"top_k": top_k, "temperature": 1.0}
    with TemporaryFolder("mopd-bench-") as name:
        model = Path(name) / "model"
        num_weights = write_model(model, MODEL, longest=MAX_LENGTH)
        teacher = teacher_file(make_recipe(model, longest=MAX_LENGTH, engine=cfg, top_k=2 * top_k), DOMAIN)
        say("teachers: starting the server and the bare engine")
        async with servers(Path(name), teacher) as urls, _bare(model, cfg, options) as bare:
            remote = RemoteEngine(next(iter(urls)), token=TOKEN, timeout_s=TIMEOUT_S, name="bench.0")
            router = Router("bench", [Replica(name="bench.0", engine=remote)], RoutingConfig(), kind="teacher")
            sides: dict[str, Score] = {BARE: bare}
            sides |= {
                payload: _path(router, asked(payload, TopKLossConfig(top_k=top_k)), lengths) for payload in PAYLOADS
            }
            bytes_of = {}
            for side, score in sides.items():
                before = remote.bytes_sent, remote.bytes_received
                await score(tokens, starts)
                bytes_of[side] = remote.bytes_sent - before[0], remote.bytes_received - before[1]
            seconds: dict[str, list[float]] = {side: [] for side in sides}
            others = Others(family_busy_s)
            for order in rounds(sides, num_pairs):
                for side in order:
                    began = time.perf_counter()
                    await sides[side](tokens, starts)
                    seconds[side].append(time.perf_counter() - began)
                say("teachers: " + ", ".join(f"{side} {times[-1]:.2f} s" for side, times in seconds.items()))
            report.others_cores = others.cores()
            await router.close()
            await remote.close()

    def figures(name: str, median_s: float) -> dict[str, float | None]:
        carried = sum(bytes_of[name]) / num_rows if name != BARE else None
        return {"tokens_per_s": num_tokens / median_s, "row_bytes": carried}

    sizes = {"num_weights": num_weights, "num_sequences": num_sequences, "num_tokens": num_tokens, "num_rows": num_rows}
    part = Comparison(
        title=f"{engine}, {num_tokens:,} tokens",
        columns={**COLUMNS, "x bare": "ratio:.3f", "bytes a row": "row_bytes:.1f"},
        rows=rows(seconds, BARE, figures),
        facts={"engine": engine, "top_k": top_k, **sizes},
        remarks=[
            f"{num_weights / 1e6:.0f} M weights, {num_sequences} sequences, {num_rows:,} scored rows, K = {top_k}; "
            "bytes of requests and answers, tokens of the prompts included"
        ],
    )
    goals = {"throughput": at_least(ratio(seconds, BARE, "topk"), LEAST_THROUGHPUT)}
    goals["answer_bytes_per_token"] = at_most(bytes_of["topk"][1] / num_rows, 8 * top_k + 32)
    report.add(part, goals)


def _path(router: Router, wants: Asked, lengths: Sequence[int]) -> Score:
    """Return the score function of the whole path for sequences of these lengths: every row is given the same ids."""
    ids = torch.arange(wants.given, dtype=torch.int32)
    given = [ids.expand(length - PROMPT_LENGTH, -1).contiguous() for length in lengths] if wants.given else None
    size = MODEL["hidden_size"] if wants.hidden else 0
    more: dict[str, Any] = {"top_k": wants.own, "temperature": 1.0, "given": given, "hidden_size": size}
    return lambda tokens, starts: router.score(ToScore(tokens, starts, **more))


def _engine_config(engine: str) -> TorchEngineConfig | VllmEngineConfig:
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
async def _bare(model: Path, cfg: TorchEngineConfig | VllmEngineConfig, wanted: dict[str, Any]) -> AsyncIterator[Score]:
    """Yield the score function of the engine alone, without any of our code around vLLM's."""
    if isinstance(cfg, TorchEngineConfig):
        engine = TorchEngine.from_pretrained(model, cfg, "cuda" if torch.cuda.is_available() else "cpu")
        yield lambda tokens, starts: engine.score(ToScore(tokens, starts, **wanted))
        return
    from mopd.engines.vllm import start as vllm

    top_k = wanted["top_k"]
    options = {"max_logprobs": top_k, "logprobs_mode": "processed_logprobs", "enable_prefix_caching": False}
    args = vllm.engine_args(model, cfg, MAX_LENGTH, options, fixed=True)
    llm = await asyncio.to_thread(vllm.start_llm, model, args, TIMEOUT_S)
    alone: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0, "flat_logprobs": True, "detokenize": False}
    final = vllm.RequestOutputKind.FINAL_ONLY
    params = vllm.VllmSamplingParams(prompt_logprobs=top_k, output_kind=final, **alone)
    numbers = itertools.count()

    async def one(sequence: list[int]) -> None:
        async for _ in llm.generate(vllm.tokens_input(sequence), params, f"bare-{next(numbers)}"):
            pass

    async def score(tokens: Sequence[Tensor], starts: Sequence[int]) -> None:
        await asyncio.gather(*(one(sequence.tolist()) for sequence in tokens))

    try:
        yield score
    finally:
        await vllm.stop_llm(llm, STOP_TIMEOUT_S)


def measure_size(
    name: str, shape: Mapping[str, Any], lengths: Sequence[int], *, dtype: Dtype, top_k: int, prompt: int = SIZED_PROMPT
) -> Comparison:
    """Time scoring with the torch engine beside a bare forward pass of the same model that ends with the logits of the
    responses' tokens: sequences of these lengths, whose first ``prompt`` tokens are unscored. It has no goal."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokens = [make_tokens(length, shape["vocab_size"], seed=i) for i, length in enumerate(lengths)]
    with TemporaryFolder("mopd-bench-") as made:
        write_model(Path(made), shape, longest=max(lengths), dtype=dtype)
        budget = TorchEngineConfig(dtype=dtype, max_tokens_per_batch=SIZED_PER_FORWARD * max(lengths))
        engine = TorchEngine.from_pretrained(Path(made), budget, device)
        model, _ = load_weights(Path(made), getattr(torch, dtype))
        model.eval().to(device)

        def score() -> None:
            asyncio.run(engine.score(ToScore(tokens, [prompt] * len(tokens), top_k=top_k, temperature=1.0)))

        @torch.inference_mode()
        def forward() -> None:
            for start in range(0, len(tokens), SIZED_PER_FORWARD):
                batch = pad_sequence(tokens[start : start + SIZED_PER_FORWARD], batch_first=True).to(device)
                model(input_ids=batch, use_cache=False, logits_to_keep=batch.size(1) - prompt + 1)
            if device.type == "cuda":
                torch.cuda.synchronize()

        contenders = {"torch engine, scores": score, "forward pass, logits": forward}
        timed(contenders, 1)
        seconds = timed(contenders, SIZED_ROUNDS)
    num = sum(lengths)
    made_rows = rows(seconds, "forward pass, logits", lambda name, median_s: {"tokens_per_s": num / median_s})
    columns, facts = {**COLUMNS, "x forward": "ratio:.2f"}, {"num_tokens": num, "top_k": top_k}
    return Comparison(title=f"{name}: {num:,} tokens, K = {top_k}", columns=columns, rows=made_rows, facts=facts)
