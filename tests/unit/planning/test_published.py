"""Published runs beside the plan of their models, layouts and lengths: docs/planning.md has their figures, this file
how they are planned."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from mopd.base.files.temporary import TemporaryFolder
from mopd.config.groups import VllmEngineConfig
from mopd.config.load import load_recipe
from mopd.config.schema import Recipe
from mopd.conversion.models.dims import ModelDims
from mopd.conversion.models.reading import read_dims
from mopd.planning.devices import GIB, GPUS, Cluster, Rates, rates_of
from mopd.planning.memory.activations import micro_batches
from mopd.planning.memory.ranks import EAGER_BYTES, head_shape, plan_ranks
from mopd.planning.memory.stored import stored_format, weights_bytes
from mopd.planning.plan import PlanInput, replica_of
from mopd.planning.stages import drawing_time, scoring_time, training_time
from mopd.planning.workload import Workload
from tests.unit.planning.test_stored import DEEPSEEK_V3
from tests.unit.planning.test_updates import NAMES, RECIPE, dims_of, rows

PROMPT = 150
"""Prompt tokens of a sample, where a run tells those of both together; few beside its responses."""
LOGPROB_PASSES = 2
"""Forward passes of NeMo-RL's trainer that ours lacks: of the policy before its step, and of the reference model."""
A800 = replace(rates_of("a100"), link=rates_of("a100").link * 200 / 300)
RATES: dict[str, Rates] = {"A800": A800, "H100": rates_of("h100")}


@cache
def model_of(name: str) -> ModelDims:
    if name == "Llama-3.1-8B":
        return replace(dims_of("Qwen3-8B"), num_layers=32, ffn_hidden_size=14336, vocab_size=128_256)
    return dims_of(name)


def recipe_of(layout: str, *, samples: int, longest: int, staleness: int = 0, recompute: str = "none") -> Recipe:
    """A recipe of micro-batches of one sample, as all of these runs have them."""
    degrees = {"TP": 1, "PP": 1, "DP": 1, **{name: int(number) for name, number in map(str.split, layout.split(", "))}}
    names = {**NAMES, "CP": "context_parallel_size"}
    keys = [f"student.parallel.{names[name]}={number}" for name, number in degrees.items()]
    keys += [f"student.parallel.sequence_parallel={str(degrees['TP'] > 1).lower()}"]
    keys += ["student.parallel.expert_tensor_parallel_size=1"] if "EP" in degrees else []
    keys += [f"schedule.prompts_per_step={samples}", f"schedule.max_staleness={staleness}"]
    keys += ["schedule.sync_every_steps=1", f"student.recompute={recompute}", "student.dtype=bfloat16"]
    keys += ["student.micro_batch_size=1", f"data.max_prompt_length={PROMPT}"]
    return load_recipe(RECIPE, [*keys, f"rollout.max_response_length={longest - PROMPT}"]).recipe


def work_of(recipe: Recipe, length: float) -> Workload:
    longest = recipe.rollout.max_response_length
    return Workload(
        samples=recipe.samples_per_step,
        prompt_tokens=PROMPT,
        response_tokens=length - PROMPT,
        longest_response=longest,
        max_tokens=longest + PROMPT,
        teacher_shares=dict.fromkeys(recipe.teachers, 0.0),
        max_teachers=1,
        source="published",
        image_tokens=0.0,
    )


def trainer_s(recipe: Recipe, dims: ModelDims, work: Workload, rates: Rates, *, passes: int = 0) -> float:
    """Seconds of a step of the trainer, and of so many more forward passes."""
    parts = training_time(recipe, dims, work, micro_batches(recipe, dims, work), rates, 8)
    of_layers = sum(parts.get(name, 0.0) for name in ("forward_backward", "experts", "exchange", "bubble"))
    return sum(parts.values()) + of_layers * passes / (4 if recipe.student.recompute == "full" else 3)


def engine_of(recipe: Recipe, dims: ModelDims, work: Workload, tp: int, replicas: int) -> tuple[Any, Any]:
    engine = VllmEngineConfig(type="vllm", dtype="bfloat16", tensor_parallel_size=tp, gpu_memory_utilization=0.8)
    group = replace(recipe.rollout, engine=engine)
    cluster = Cluster(name="h100", nodes=64, gpus_per_node=8, memory_bytes=GPUS["h100"].memory_bytes)
    given = PlanInput(recipe=recipe, models={"student": dims}, work=work, cluster=cluster)
    return group, replica_of(given, "rollout", group, samples=work.samples / replicas)


def loop(
    model: str, layout: str, rollout: tuple[int, int], *, samples: int, lengths: tuple[int, int], **keys: Any
) -> tuple[float, float]:
    """Step of NeMo-RL, (mean, longest) ``lengths``, ``rollout`` (TP, replicas): synchronous one after the other on all
    GPUs, asynchronous side by side."""
    recipe, dims = recipe_of(layout, samples=samples, longest=lengths[1], **keys), model_of(model)
    work, rates, staleness = work_of(recipe, lengths[0]), rates_of("h100"), recipe.schedule.max_staleness
    group, own = engine_of(recipe, dims, work, *rollout)
    drawn = drawing_time(group, dims, work, own, rates, staleness, rollout[1], tells_top=False)
    trained = trainer_s(recipe, dims, work, rates, passes=LOGPROB_PASSES)
    return max(trained, drawn.capacity_s) if staleness else trained + drawn.step_s, trained


def training(model: str, layout: str, gpu: str, *, samples: int, length: int, recompute: str = "none") -> float:
    recipe, dims = recipe_of(layout, samples=samples, longest=length, recompute=recompute), model_of(model)
    return trainer_s(recipe, dims, work_of(recipe, length), RATES[gpu])


def prefill(tokens: int) -> float:
    """Tokens a second of 235B on one node, in prompts of so many tokens."""
    recipe, dims = recipe_of("TP 8", samples=128, longest=tokens + PROMPT), model_of("Qwen3-235B-A22B")
    work = replace(work_of(recipe, tokens), prompt_tokens=float(tokens), response_tokens=0.0)
    group, own = engine_of(recipe, dims, work, 8, 1)
    return work.tokens / scoring_time(group, dims, work, own, rates_of("h100"), 1.0, 1, finds_top=True).capacity_s


def rank_gib() -> float:
    """ms-swift's rank, with the logits that its loss holds in place of ours."""
    recipe, dims = recipe_of("TP 2, DP 8, EP 8", samples=16, longest=8192, recompute="full"), model_of("Qwen3-30B-A3B")
    work = work_of(recipe, 8192)
    cluster = Cluster(name="a100", nodes=2, gpus_per_node=8, memory_bytes=GPUS["a100"].memory_bytes)
    (rank,) = plan_ranks(recipe, dims, work, cluster, {})
    head = head_shape(recipe, dims, micro_batches(recipe, dims, work))
    return (rank.num_bytes - rank.parts["lm_head"] + head.eager(head.element + EAGER_BYTES)) / GIB


def stored_gib() -> float:
    """DeepSeek-R1's weights as its published config says that they are stored."""
    with TemporaryFolder("published-") as folder:
        Path(folder, "config.json").write_text(json.dumps(DEEPSEEK_V3))
        return weights_bytes(read_dims(Path(folder), takes_quantised=True), 2, stored_format(Path(folder))) / GIB


NEMO_8B = {"model": "Llama-3.1-8B", "samples": 2048}
NEMO_32B = {"model": "Qwen3-32B", "layout": "TP 4, PP 4, DP 2", "rollout": (4, 8), "samples": 2048}
NEMO_30B = {"model": "Qwen3-30B-A3B", "samples": 2048}
NEMO_235B = {"model": "Qwen3-235B-A22B", "samples": 512, "recompute": "full", "lengths": (5695, 8192)}
NEMO_235B |= {"layout": "TP 4, PP 8, first 11, last 11, DP 4, EP 16", "rollout": (8, 16), "staleness": 1}
APART = {"layout": "PP 2, DP 8, EP 8", "rollout": (2, 8), "staleness": 1}
PLANNED: dict[str, Any] = {
    "Llama 3.1 8B, 16 GPUs": lambda: loop(layout="PP 2, DP 8", rollout=(1, 16), lengths=(1060, 4096), **NEMO_8B)[0],
    "Llama 3.1 8B, 16 GPUs, async": lambda: loop(
        layout="PP 2, DP 4", rollout=(1, 8), lengths=(1129, 4096), staleness=1, **NEMO_8B
    )[0],
    "Qwen3-32B, 32 GPUs, v0.4": lambda: loop(lengths=(3206, 4096), **NEMO_32B)[0],
    "Qwen3-32B, 32 GPUs, v0.7": lambda: loop(lengths=(3256, 4096), **NEMO_32B)[0],
    "Qwen3-32B, 64 GPUs, async, v0.4": lambda: loop(lengths=(3207, 4096), staleness=1, **NEMO_32B)[0],
    "Qwen3-32B, 64 GPUs, async, v0.7": lambda: loop(lengths=(3258, 4096), staleness=1, **NEMO_32B)[0],
    "Qwen3-30B-A3B, 32 GPUs, v0.4": lambda: loop(
        layout="TP 2, DP 16, EP 8", rollout=(4, 8), lengths=(3154, 4096), **NEMO_30B
    )[0],
    "Qwen3-30B-A3B, 32 GPUs, v0.7": lambda: loop(
        layout="DP 32, EP 8", rollout=(2, 16), lengths=(3198, 4096), **NEMO_30B
    )[0],
    "Qwen3-30B-A3B, 32 GPUs, async, v0.4": lambda: loop(lengths=(3158, 4096), **NEMO_30B, **APART)[0],
    "Qwen3-30B-A3B, 32 GPUs, async, v0.7": lambda: loop(lengths=(3203, 4096), **NEMO_30B, **APART)[0],
    "Qwen3-235B-A22B, 256 GPUs, async, v0.7": lambda: loop(**NEMO_235B)[0],
    "Qwen3-30B-A3B, training, 16 A800": lambda: training(
        "Qwen3-30B-A3B", "TP 2, DP 8, EP 8", "A800", samples=16, length=8192, recompute="full"
    ),
    "Qwen3-30B-A3B, training, GiB a rank": rank_gib,
    "Qwen3-235B-A22B, training, 256 GPUs": lambda: training(
        "Qwen3-235B-A22B", "TP 2, PP 32, first 2, last 2, DP 4, EP 8", "H100", samples=2048, length=4096
    ),
    "Qwen3-4B, training, 8 GPUs": lambda: training(
        "Qwen3-4B", "DP 8", "H100", samples=16, length=16384, recompute="full"
    ),
    "Qwen3-0.6B, training, 1 GPU": lambda: training(
        "Qwen3-0.6B", "DP 1", "H100", samples=2, length=16384, recompute="full"
    ),
    "Qwen3-235B-A22B in fp8, tokens/s of prompts of 2,000": lambda: prefill(2000),
    "Qwen3-235B-A22B in fp8, tokens/s of prompts of 32,000": lambda: prefill(32000),
    "DeepSeek-R1 in fp8, weights, GiB each of 8 HPUs": lambda: stored_gib() / 8,
}
EXPERTS = "Qwen3-30B-A3B"


def name_and_source(cell: str) -> tuple[str, str]:
    """A run's name, and the name of the link that it is."""
    found = re.fullmatch(r"\[(.*)\]\[(\w+)\]", cell)
    assert found, cell
    return found[1], found[2]


@pytest.mark.parametrize("row", rows("run"), ids=lambda row: name_and_source(row[0])[0])
def test_published_runs_are_planned_within_two_times(row: list[str]) -> None:
    """Training with experts within 1.5 times; memory within a tenth."""
    (what, _), (published, shown, ratio) = name_and_source(row[0]), row[1:]
    planned, measured = PLANNED[what](), float(published.replace(",", ""))
    assert shown == (f"{planned:,.0f}" if planned >= 100 else f"{planned:.3g}")
    assert ratio == f"{planned / measured:.2f}"
    most = 1.1 if "GiB" in what else 1.5 if what.startswith(EXPERTS) else 2
    assert 1 / most <= planned / measured <= most


def test_every_published_run_is_on_the_page() -> None:
    runs = [name_and_source(row[0]) for row in rows("run")]
    assert [name for name, _ in runs] == list(PLANNED)
    assert len({re.sub(r",.*", "", name) + source for name, source in runs}) >= 8


def test_experts_of_other_nodes_cost_their_exchange() -> None:
    """What EP 8 keeps in a node EP 64 sends over its adapters; a dense model has no exchange."""
    dims = model_of("Qwen3-235B-A22B")
    times = {}
    for ranks in (8, 64):
        recipe = recipe_of(f"DP 64, EP {ranks}", samples=512, longest=8192, recompute="full")
        work = work_of(recipe, 5000)
        times[ranks] = training_time(recipe, dims, work, micro_batches(recipe, dims, work), rates_of("h100"), 8)
    assert times[64]["exchange"] > 5 * times[8]["exchange"] > 0
    assert sum(times[64].values()) > sum(times[8].values())
    dense = recipe_of("DP 8", samples=512, longest=8192)
    found = training_time(
        dense, model_of("Qwen3-4B"), work := work_of(dense, 5000),
        micro_batches(dense, model_of("Qwen3-4B"), work), rates_of("h100"), 8,
    )  # fmt: skip
    assert not {"exchange", "experts"} & found.keys()


@pytest.mark.parametrize("model", [EXPERTS, "Qwen3-8B"])
def test_as_many_sequences_are_under_way_as_steps(model: str) -> None:
    """A replica that one step's samples do not fill is faster with those of several; never beyond its room, and never
    faster than its longest response allows."""
    recipe = recipe_of("DP 8", samples=64, longest=8192)
    work, dims = work_of(recipe, 4000), model_of(model)
    group, own = engine_of(recipe, dims, work, 1, 1)
    seconds = [
        drawing_time(
            group, dims, work, replace(own, sequences=256), rates_of("h100"), staleness, 4, tells_top=False
        ).capacity_s
        for staleness in (1, 3, 15)
    ]
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > 2 * seconds[2]
    longer = replace(work, longest_response=4 * work.longest_response)
    room = replace(own, sequences=256)
    tail = drawing_time(group, dims, longer, room, rates_of("h100"), 3, 4, tells_top=False).capacity_s
    assert tail > 1.5 * seconds[1]
