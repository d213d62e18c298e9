"""Updates of the rollout's weights: what travels, what seconds depend on, and published figures beside the plan's."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from mopd.cli.main import main
from mopd.config.load import load_recipe
from mopd.config.schema import Recipe
from mopd.config.student import ParallelConfig
from mopd.config.weights import BucketsConfig
from mopd.conversion.models.dims import ModelDims
from mopd.conversion.models.families import all_params
from mopd.conversion.models.reading import read_dims
from mopd.conversion.models.stages import stages_of
from mopd.planning.devices import GPUS, MIB, Cluster, Rates, rates_of
from mopd.planning.memory.ranks import plan_ranks
from mopd.planning.memory.shards import update_bytes
from mopd.planning.updates import Pieces, WeightUpdate, pieces, sender_ranks, weight_update
from mopd.planning.workload import expected

ROOT = Path(__file__).parents[3]
RECIPES = Path(__file__).parent / "recipes"
CONFIGS = ROOT / "recipes" / "models"
RECIPE = RECIPES / "four_nodes.yaml"
DENSE, EXPERTS = "Qwen3-8B", "Qwen3-30B-A3B"
BUCKET = 64 * MIB
GPUS_PER_NODE = GPUS["h100"].per_node
PAGE = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
NAMES = {
    "TP": "tensor_model_parallel_size", "PP": "pipeline_model_parallel_size", "DP": "data_parallel_size",
    "EP": "expert_model_parallel_size", "first": "num_layers_in_first_pipeline_stage",
    "last": "num_layers_in_last_pipeline_stage",
}  # fmt: skip


@cache
def dims_of(model: str) -> ModelDims:
    """Sizes of a model whose config is in the repository, or of one that differs from it in few of them."""
    if model == "Qwen3-0.6B":
        return replace(dims_of("Qwen3-1.7B"), hidden_size=1024, ffn_hidden_size=3072)
    if model == "27B":  # 52 layers of Qwen3-32B: the published one has other layers
        return replace(dims_of("Qwen3-32B"), num_layers=52)
    return read_dims(CONFIGS / model)


def layout_keys(layout: str) -> list[str]:
    """``TP 2, DP 4, offload`` as keys of a recipe."""
    words = [word for word in layout.split(", ") if word != "offload"]
    degrees = {"TP": 1, "PP": 1, "DP": 1, **{name: int(number) for name, number in map(str.split, words)}}
    keys = {NAMES[name]: str(number) for name, number in degrees.items()}
    keys["sequence_parallel"] = str(degrees["TP"] > 1).lower()
    if "EP" in degrees:
        keys["expert_tensor_parallel_size"] = "1"
    offload = f"student.optimizer.offload_fraction={float('offload' in layout)}"
    return [offload, *(f"student.parallel.{key}={value}" for key, value in keys.items())]


@cache
def recipe_of(layout: str, tp: int = 1, way: str = "collective") -> Recipe:
    """A recipe whose rollout is not placed yet."""
    keys = ["student.dtype=bfloat16", "student.recompute=full", f"weight_sync={{type: {way}}}"]
    keys += ["rollout.placement={type: auto}", f"rollout.engine.tensor_parallel_size={tp}"]
    return load_recipe(RECIPE, [*keys, *layout_keys(layout)]).recipe


def update(
    model: str,
    layout: str = "TP 1",
    *,
    rates: Rates | None = None,
    replicas: int = 1,
    tp: int = 1,
    nodes: int = 1,
    way: str = "collective",
    bucket_mib: int = 64,
) -> WeightUpdate:
    recipe = recipe_of(layout, tp, way)
    if isinstance(recipe.weight_sync, BucketsConfig):
        recipe = replace(recipe, weight_sync=replace(recipe.weight_sync, bucket_mib=bucket_mib))
    cluster = cluster_of(max(nodes, 1))
    return weight_update(recipe, dims_of(model), rates or rates_of("h100"), cluster, replicas=replicas, nodes=nodes)


def cluster_of(nodes: int) -> Cluster:
    return Cluster(name="h100", nodes=nodes, gpus_per_node=GPUS_PER_NODE, memory_bytes=GPUS["h100"].memory_bytes)


def travelling(model: str, parallel: ParallelConfig, bucket: int = BUCKET, large: int = BUCKET) -> Pieces:
    return pieces(dims_of(model), parallel, "none", 2, bucket, large)


@pytest.mark.parametrize(
    ("model", "layout", "senders"),
    [(DENSE, "TP 2", 1), (DENSE, "PP 4", 4), (EXPERTS, "DP 8, EP 8", 8), (EXPERTS, "PP 2, DP 4, EP 4", 8)],
)
def test_what_travels_is_cut_as_by_the_sender(model: str, layout: str, senders: int) -> None:
    """The name tables with the sender's own cut, for every tensor of the checkpoint."""
    from mopd.weights.parts import TensorMeta, cut_parts

    parallel, dims = recipe_of(layout).student.parallel, dims_of(model)
    stages, ranks = stages_of(parallel), parallel.expert_model_parallel_size
    metas = [
        TensorMeta(
            name,
            torch.bfloat16,
            shape,
            placed.stage(dims, stages) * ranks + (0 if placed.expert is None else placed.owner(dims, ranks=ranks)),
        )
        for placed in all_params(dims)
        for name, shape in zip(placed.hf_names, placed.hf_shapes, strict=True)
    ]
    for bucket, large in ((BUCKET, BUCKET), (BUCKET, MIB), (256 * MIB, 256 * MIB)):
        found = travelling(model, parallel, bucket, large)
        assert found.parts == len(cut_parts(metas, bucket, large))
        assert found.tensors == len(metas)
        assert found.senders == len({meta.sender for meta in metas}) == len(sender_ranks(parallel)) == senders
        assert found.turns == 1 + sum(a.sender != b.sender for a, b in pairwise(metas))
    assert sum(meta.num_bytes for meta in metas) == update_bytes(dims, recipe_of(layout).student)


def test_a_slower_link_or_longer_latencies_cost_what_travels() -> None:
    """A link that bounds an update takes in proportion to the bytes; a part's latency in proportion to the parts."""
    plain, between = rates_of("h100"), update("Qwen3-32B", nodes=2)
    slower = update("Qwen3-32B", nodes=2, rates=replace(plain, network=plain.network / 2))
    assert slower.bound == between.bound == "network"
    assert slower.seconds - between.seconds == pytest.approx(between.num_bytes / plain.network, rel=0.01)
    late = update("Qwen3-32B", nodes=2, rates=replace(plain, part_s=plain.part_s + 1e-3))
    assert late.seconds - between.seconds == pytest.approx(1e-3 * between.parts, rel=0.01)
    assert update("Qwen3-32B", nodes=2, bucket_mib=256).seconds < between.seconds
    assert update("Qwen3-32B").seconds < between.seconds / 2


def test_more_receivers_cost_the_latency_of_a_longer_chain_and_no_bandwidth() -> None:
    few, many = (update("Qwen3-32B", nodes=nodes, replicas=replicas) for nodes, replicas in ((2, 8), (33, 256)))
    assert many.receivers == 32 * few.receivers
    assert few.seconds < many.seconds < 1.05 * few.seconds


def test_each_change_of_the_sender_fills_the_chain_anew() -> None:
    """Experts by turns: with more senders, or over more nodes, of which each adds to the chain, an update is later."""
    rates = replace(rates_of("h100"), load_tensor_s=0.0)
    layouts = ("DP 8", "DP 8, EP 2", "DP 8, EP 8")
    updates = [update(EXPERTS, layout, rates=rates, nodes=33) for layout in layouts]
    assert [one.senders for one in updates] == [1, 2, 8]
    assert updates[0].seconds < updates[1].seconds < updates[2].seconds
    near = update(EXPERTS, "DP 8, EP 8", rates=rates, nodes=3)
    assert updates[2].seconds - near.seconds > 5 * (
        updates[0].seconds - update(EXPERTS, "DP 8", rates=rates, nodes=3).seconds
    )
    assert travelling(EXPERTS, recipe_of("DP 8, EP 8").student.parallel).turns > 300


def test_senders_gather_beside_one_another() -> None:
    """Where gathering bounds an update, more senders hide more of it."""
    rates = replace(rates_of("h100"), call_s=1e-4, load_tensor_s=0.0)
    one, eight = update(EXPERTS, "DP 8", rates=rates), update(EXPERTS, "DP 8, EP 8", rates=rates)
    assert one.bound == eight.bound == "gathering"
    assert eight.seconds < 0.8 * one.seconds


def test_experts_cost_the_loader_and_dense_models_the_link() -> None:
    """Of the same bytes: 18,867 tensors of 30B-A3B and 707 of 32B."""
    dense, experts = (update(model, nodes=2) for model in ("Qwen3-32B", EXPERTS))
    assert (dense.bound, experts.bound) == ("network", "loading")
    assert dense.seconds < experts.seconds < 5


def test_ways_of_shared_gpus_and_by_http() -> None:
    """Shared GPUs read at the rate of their memory; the orchestrator's one process sends to each replica in turn."""
    shared, sent = update(DENSE, way="ipc"), update(DENSE)
    assert shared.way == "ipc" and shared.seconds < sent.seconds
    assert update(DENSE, way="ipc", bucket_mib=1).seconds > update(DENSE, way="ipc").seconds
    one, many = (update(DENSE, way="http", replicas=replicas) for replicas in (1, 16))
    assert one.seconds > 20 * update(DENSE, nodes=2).seconds
    assert (one.bound, many.bound) == ("loading", "sending")
    assert many.student_s == one.student_s < one.seconds < many.seconds


def test_the_student_waits_while_its_weights_travel() -> None:
    """It is held for the chain, and not for what the engines do behind it."""
    found = update("Qwen3-32B", nodes=2)
    assert found.num_bytes / rates_of("h100").network < found.student_s < found.seconds
    longer = update("Qwen3-32B", nodes=2, rates=replace(rates_of("h100"), update_s=2.0))
    assert longer.student_s == found.student_s and longer.seconds > found.seconds + 1


def test_a_plan_prints_the_update(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(RECIPES / "one_node.yaml")
    arguments = ["plan", recipe, "--gpu", "h100", "--configs", str(CONFIGS), "weight_sync.type=collective"]
    assert main([*arguments, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    found = plan["update"]
    assert {key: found[key] for key in ("way", "senders", "receivers", "nodes")} == {
        "way": "collective", "senders": 1, "receivers": 2, "nodes": 1,
    }  # fmt: skip
    (flow,) = [one for one in plan["links"] if one["name"] == "weights to rollout"]
    assert flow["each"] == "worker" and flow["num_bytes"] == 2 * (found["num_bytes"] // 4)
    assert plan["times"]["stages"]["weight_sync"] == pytest.approx(found["seconds"] / 4)
    assert main(arguments) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "│ collective" in line]
    for shown in ("16.4 GB", str(found["parts"]), f"{found['seconds']:.3g}", found["bound"]):
        assert shown in line


def rows(title: str) -> list[list[str]]:
    """The cells of the page's table whose head begins so."""
    (table,) = re.findall(rf"^\| {re.escape(title)} .*\n\|[-|]+\|\n((?:\|.*\n)+)", PAGE, re.M)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


@pytest.mark.parametrize("row", rows("updated student"), ids=lambda row: f"{row[0]} {row[1]}")
def test_the_page_says_what_an_update_takes(row: list[str]) -> None:
    """Layouts fit into their nodes, and the numbers are those of the plan."""
    model, nodes, layout, rollout, *shown = row
    replicas, _, tp = (int(word) if word.isdigit() else 0 for word in rollout.replace("x TP", "x").split())
    recipe, cluster = recipe_of(layout, tp), cluster_of(int(nodes))
    ranks = recipe.student.parallel.world_size
    assert ranks + replicas * tp <= cluster.num_gpus
    planned = plan_ranks(recipe, dims_of(model), expected(recipe), cluster, {})
    assert max(rank.num_bytes for rank in planned) < cluster.memory_bytes
    of_ranks = {rank // GPUS_PER_NODE for rank in sender_ranks(recipe.student.parallel)}
    own = 1 if cluster.nodes == 1 else len(of_ranks) + replicas * tp // GPUS_PER_NODE
    found = update(model, layout, replicas=replicas, tp=tp, nodes=own)
    assert shown == [f"{found.num_bytes / 1e9:.1f}", f"{found.seconds:.2f}", found.bound]
    if model == EXPERTS:
        assert found.seconds < 5


PUBLISHED: dict[str, dict[str, Any]] = {
    "0.6B, vLLM's own transfer": {"model": "Qwen3-0.6B"},
    "27B, verl's nccl": {"model": "27B", "replicas": 2, "tp": 4, "nodes": 2},
    "32B, TRL": {"model": "Qwen3-32B", "replicas": 4, "tp": 4, "nodes": 3, "rates": rates_of("h200")},
    "235B, checkpoint-engine": {
        "model": "Qwen3-235B-A22B",
        "layout": "DP 8, EP 8",
        "tp": 8,
        "rates": replace(rates_of("h100"), link=rates_of("h100").link * 200 / 450),  # H800: 400 GB/s in both directions
    },
    "7B, verl's nccl": {"model": "Qwen2.5-Coder-7B", "replicas": 8, "nodes": 2},
}


@pytest.mark.parametrize("row", rows("published"), ids=lambda row: row[0])
def test_published_figures_are_within_two_times_where_the_hardware_is_the_same(row: list[str]) -> None:
    """But for the one whose weights are in host memory, of which the page says so."""
    what, _, published, shown, ratio = row
    seconds = update(**PUBLISHED[what]).seconds
    numbers = [float(number) for number in published.split(" to ")]  # one, or the least and the most
    measured = sum(numbers) / len(numbers)
    assert (shown, ratio) == (f"{seconds:.2f}", f"{seconds / measured:.2f}")
    assert (0.5 < seconds / measured < 2) == (what != "7B, verl's nccl")


def test_every_published_figure_is_on_the_page() -> None:
    assert [row[0] for row in rows("published")] == list(PUBLISHED)
