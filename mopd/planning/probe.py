"""Measurement of this machine's rates with models of a recipe's shape, for ``mopd plan --probe``.

Measured are the torch engine and the Megatron student, with a few layers of the student's sizes and the plan's batches,
on as many threads as a rank has; collectives of two ranks over gloo; and weights on their way into messages.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.distributed import FileStore, PrefixStore

from mopd.base.files.temporary import TemporaryFolder
from mopd.base.types import SampleMeta, UserError
from mopd.config.groups import TorchEngineConfig
from mopd.config.schema import Recipe
from mopd.config.student import MoeConfig, ParallelConfig
from mopd.conversion.models.dims import ModelDims
from mopd.data_plane.local import LocalDataPlane
from mopd.engines.interface import SamplingParams, ToDraw, ToScore
from mopd.engines.torch.engine import TorchEngine
from mopd.engines.wire.weights import stage_updates
from mopd.planning.devices import Rates
from mopd.planning.memory.shards import num_tensors
from mopd.planning.stages import STEP_CALLS, TORCH_CALLS_PER_LAYER, forward_flops
from mopd.planning.workload import Workload
from mopd.weights.backends import open_gloo

MOST_LAYERS = 4
NUM_STEPS = 8
"""Steps of decoding that are measured."""
MOST_TOKENS = 16_384
"""Tokens of the largest batch that is measured: a rate hardly changes beyond."""
COPY_BYTES = 2**27
"""Bytes of a copy that is measured, more than the caches hold."""
STAGED_BYTES = 2**26
LARGE_SUM, SMALL_SUM = 2**18, 16
"""Elements of the collectives that are measured."""
SENT_TO_STAGED, LOADED_TO_STAGED = 4.3, 0.5
"""Rates of sending and of loading weights, over that of packing them: measured once."""
ROUNDS = 7
SUMS = 20
TIMEOUT_S = 60.0
START_S = 300.0
"""Seconds in which another process has imported torch, on a machine with much other work too."""


def probe(recipe: Recipe, dims: ModelDims, work: Workload) -> Rates:
    """Measure the rates of one rank of this machine with the others at work: ranks beyond the cores get their share."""
    ranks, cores = recipe.student.parallel.world_size, len(os.sched_getaffinity(0))
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, cores // ranks))
    share = min(1.0, cores / ranks)
    try:
        with _engine(dims, tp=1) as engine:
            prefill, step_s = _scoring(engine, dims, work), _decoding(engine, work)
        tp = recipe.student.parallel.tensor_model_parallel_size
        with _engine(dims, tp=tp) as engine, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of packages that a CPU does without
            train, optimizer_s = _training(engine, recipe, dims, work)
        bandwidth, stage = _bandwidth(), _staging()
        sums, collective_s = _collectives()
    finally:
        torch.set_num_threads(threads)
    call_s = step_s / (_layers(dims).num_layers * TORCH_CALLS_PER_LAYER + STEP_CALLS)
    return Rates(
        **dict.fromkeys(("train", "train_moe"), share * train),
        **dict.fromkeys(("bandwidth", "host"), share * bandwidth),
        **dict.fromkeys(("link", "network", "sums"), share * sums),
        **dict.fromkeys(("collective_s", "network_collective_s"), collective_s / share),
        **dict.fromkeys(("prefill", "prefill_moe"), prefill),
        expert_layer_s=0.0,
        call_s=call_s,
        tensor_s=optimizer_s / share,
        decode_step_s=0.0,
        part_s=collective_s / share,
        load_tensor_s=call_s,
        update_s=0.0,
        stage=stage,
        send=stage * SENT_TO_STAGED,
        receive=stage * LOADED_TO_STAGED,
        source=f"measured on this machine, {cores} cores for {ranks} ranks",
    )


@contextmanager
def _engine(dims: ModelDims, *, tp: int) -> Iterator[TorchEngine]:
    """Yield an engine of a few plain layers with one rank's share of the student's heads and columns."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": dims.hidden_size,
        "intermediate_size": dims.ffn_hidden_size // tp,
        "num_hidden_layers": _layers(dims).num_layers,
        "num_attention_heads": dims.num_attention_heads // tp,
        "num_key_value_heads": dims.groups_on_rank(tp),
        "head_dim": dims.head_dim,
        "max_position_embeddings": dims.max_positions,
        "rms_norm_eps": dims.norm_epsilon,
        "vocab_size": dims.vocab_size,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "tie_word_embeddings": False,
    }
    with TemporaryFolder("mopd-probe-") as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        engine = TorchEngine.empty(folder, TorchEngineConfig(dtype="float32"))
        weights = {name: 0.02 * torch.randn(slot.shape) for name, slot in engine.weight_slots.items()}
        asyncio.run(engine.load_weights(weights.items(), 0))
        save_file(weights, Path(folder, "model.safetensors"))
        yield engine


def _least_s(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Return the shortest of several times after a warm-up: other work on this machine only ever makes it slower."""
    work()
    return min(_spent_s(work) for _ in range(rounds))


def _spent_s(work: Callable[[], object]) -> float:
    """Return the seconds of ``work``, or of processors if those are fewer: then others had the processors meanwhile."""
    began, used = time.perf_counter(), time.process_time()
    work()
    return min(time.perf_counter() - began, time.process_time() - used)


def _sequences(engine: TorchEngine, count: int, length: int) -> list[torch.Tensor]:
    return [torch.randint(1, engine.vocab_size, (length,)) for _ in range(count)]


def _flops(dims: ModelDims, *, tokens: float, length: float, rows: float) -> float:
    """Return the operations of a forward pass of the few layers."""
    return forward_flops(_layers(dims), tokens=tokens, context=length / 2, rows=rows)


def _scoring(engine: TorchEngine, dims: ModelDims, work: Workload) -> float:
    """Measure the operations a second while a teacher scores its share of a step."""
    length, prompt = round(work.length), max(1, round(work.prompt_tokens))
    share = max(work.teacher_shares.values())
    count = max(1, min(round(work.samples * share), MOST_TOKENS // length))
    tokens = _sequences(engine, count, max(length, prompt + 1))

    def score() -> None:
        asyncio.run(engine.score(ToScore(tokens, [prompt] * count, top_k=min(16, engine.vocab_size), temperature=1.0)))

    rows = count * (len(tokens[0]) - prompt)
    return _flops(dims, tokens=count * len(tokens[0]), length=length, rows=rows) / _least_s(score)


def _decoding(engine: TorchEngine, work: Workload) -> float:
    """Measure the seconds of a step in which every sequence of a batch draws a token."""
    prompt = max(1, round(work.prompt_tokens))
    prompts = [row.tolist() for row in _sequences(engine, max(1, min(work.samples, MOST_TOKENS // prompt)), prompt)]
    seeds = list(range(len(prompts)))

    def draw(num_tokens: int) -> None:
        asyncio.run(engine.generate(ToDraw(prompts, SamplingParams(max_new_tokens=num_tokens), seeds)))

    return max(0.0, _least_s(lambda: draw(1 + NUM_STEPS)) - _least_s(lambda: draw(1))) / NUM_STEPS


def _training(engine: TorchEngine, recipe: Recipe, dims: ModelDims, work: Workload) -> tuple[float, float]:
    """Measure one rank's operations a second in a step, and the optimizer's seconds for one tensor, with a student that
    is the only rank of its world and has a rank's share of heads and columns."""
    from mopd.data.packing import pack
    from mopd.student import parallel
    from mopd.student.worker import StudentWorker

    length, prompt = round(work.length), max(1, round(work.prompt_tokens))
    share = -(-work.samples // recipe.student.parallel.data_parallel_size)
    count = max(1, min(share, MOST_TOKENS // length))
    domain = next(iter(recipe.assignment.by_domain), "others")
    plane, metas = _filled_plane(recipe, dims, work, count, domain)
    own = _alone(recipe, engine.name)
    worker = StudentWorker(own, plane.reader(), [domain])
    rules = dataclasses.replace(worker.packing, max_tokens=max(worker.packing.max_tokens, length))
    plan = pack(metas, rules, dp_size=1)
    steps = [
        (_spent_s(partial(worker.forward_backward, plan, diagnostics=False)), _spent_s(worker.optim_step))
        for _ in range(1 + ROUNDS)
    ]
    parallel.destroy()
    torch.distributed.destroy_process_group()
    forward = _flops(dims, tokens=count * length, length=length, rows=count * (length - prompt))
    tp = recipe.student.parallel.tensor_model_parallel_size
    forward_s, optimizer_s = (min(part) for part in zip(*steps[1:], strict=True))
    return 3 * forward / tp / forward_s, optimizer_s / num_tensors(_layers(dims), ParallelConfig())


def _alone(recipe: Recipe, folder: str) -> Recipe:
    """Return the recipe of one rank without parallelism, with the plain model in ``folder``, also as each teacher."""
    student = dataclasses.replace(
        recipe.student,
        model=folder,
        dtype="float32",
        parallel=ParallelConfig(),
        moe=MoeConfig(),
        freeze=(),
        optimizer=dataclasses.replace(recipe.student.optimizer, offload_fraction=0.0),
        megatron_overrides={},
    )
    teachers = {name: dataclasses.replace(teacher, model=folder) for name, teacher in recipe.teachers.items()}
    rollout = dataclasses.replace(recipe.rollout, replay_routes=False)
    return dataclasses.replace(recipe, student=student, teachers=teachers, rollout=rollout)


def _filled_plane(
    recipe: Recipe, dims: ModelDims, work: Workload, count: int, domain: str
) -> tuple[LocalDataPlane, list[SampleMeta]]:
    """Return a data plane with samples of mean length that have every field that a loss reads; hidden states as wide as
    the student's."""
    prompt, response = max(1, round(work.prompt_tokens)), max(1, round(work.length) - max(1, round(work.prompt_tokens)))
    teachers = (work.max_teachers,) if work.max_teachers > 1 else ()
    shape = (response, *teachers, max(1, min(recipe.support_width, dims.vocab_size)))
    one = {
        "tokens": torch.ones(prompt + response, dtype=torch.int64),
        "loss_mask": torch.ones(response, dtype=torch.bool),
        "rollout_logprobs": torch.full((response,), -1.0),
        "teacher_ids": torch.arange(shape[-1], dtype=torch.int32).expand(shape).contiguous(),
        "teacher_logprobs": torch.full(shape, -float(shape[-1])),
        "teacher_token_logprobs": torch.full((response,), -1.0),
        "teacher_hidden": torch.zeros(response, dims.hidden_size, dtype=torch.bfloat16),
        "task_advantage": torch.zeros(response),
        "baseline": torch.zeros(response),
    }
    metas = [
        SampleMeta(
            sample_id=i,
            domain=domain,
            weight_version=0,
            prompt_length=prompt,
            response_length=response,
            num_loss_tokens=response,
        )
        for i in range(count)
    ]
    plane = LocalDataPlane()
    asyncio.run(plane.put(metas, {name: [value] * count for name, value in one.items()}))
    return plane, metas


def _layers(dims: ModelDims) -> ModelDims:
    """Return the sizes of the few dense layers that are measured."""
    text = dataclasses.replace(dims, delta=None, gated_attention=False, zero_centered_norms=False)
    return dataclasses.replace(text, num_layers=min(MOST_LAYERS, dims.num_layers), moe=None, mla=None, family="llama")


def _bandwidth() -> float:
    """Measure the bytes a second that a copy reads and writes."""
    source, target = torch.ones(COPY_BYTES // 4), torch.zeros(COPY_BYTES // 4)
    return 2 * COPY_BYTES / _least_s(lambda: target.copy_(source))


def _staging() -> float:
    """Measure the bytes of weights a second that are packed into messages."""
    weights = [(str(i), torch.ones(STAGED_BYTES // 16)) for i in range(4)]
    return STAGED_BYTES / _least_s(lambda: stage_updates(weights, 0), 3)


def _collectives() -> tuple[float, float]:
    """Measure the bytes a second that a rank sends in a sum of two ranks, and the seconds of a sum of few bytes.

    Raises:
        UserError: the other process does not come.
    """
    context = multiprocessing.get_context("spawn")
    with TemporaryFolder("mopd-probe-") as folder:
        is_there = context.Event()
        other = context.Process(target=_other_rank, args=(str(folder), is_there), daemon=True)
        other.start()
        began = time.monotonic()
        while not is_there.wait(0.2):
            if not other.is_alive() or time.monotonic() - began > START_S:
                other.kill()
                raise UserError(
                    f"--probe: the second process to measure sums with was not there after "
                    f"{time.monotonic() - began:.0f} s: measure when less runs on this machine"
                )
        large, small = _sums(0, str(folder))
        other.join(TIMEOUT_S)
    return 4 * LARGE_SUM / large, small


def _other_rank(folder: str, is_there: Event) -> None:
    is_there.set()
    _sums(1, folder)


def _sums(number: int, folder: str) -> tuple[float, float]:
    """Measure the seconds of a large and of a small sum, as one of two processes."""
    group = open_gloo(PrefixStore("probe", FileStore(str(Path(folder, "store")), 2)), number, 2, TIMEOUT_S, "127.0.0.1")
    large, small = ([torch.ones(size)] for size in (LARGE_SUM, SMALL_SUM))
    return _least_wait_s(lambda: group.allreduce(large).wait()), _least_wait_s(lambda: group.allreduce(small).wait())


def _least_wait_s(work: Callable[[], object]) -> float:
    """Return the shortest of several times of what waits for another process."""
    work()
    times = []
    for _ in range(SUMS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)
