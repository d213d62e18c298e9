"""Uneven and interleaved stages in a plan: time, memory, what is sent."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table

from mopd.cli.main import main
from mopd.config.load import load_recipe
from mopd.config.student import ParallelConfig
from mopd.conversion.models.reading import read_dims
from mopd.planning.devices import GPUS, Cluster, rates_of
from mopd.planning.memory.activations import chunks_under_way
from mopd.planning.plan import PlanInput
from mopd.planning.suggest import trainers
from mopd.planning.workload import expected

ROOT = Path(__file__).parents[3]
RECIPES = Path(__file__).parent / "recipes"
RECIPE, EXPERTS = (str(RECIPES / f"{name}.yaml") for name in ("four_nodes", "sixteen_nodes"))
KEY = "student.parallel."
PIPELINE = (f"{KEY}pipeline_model_parallel_size=2", f"{KEY}data_parallel_size=2")


@pytest.mark.parametrize(("stages", "chunks", "in_step"), [(2, 2, 8), (4, 3, 8), (4, 2, 4), (4, 1, 8), (4, 1, 2)])
def test_micro_batches_under_way_are_megatrons(stages: int, chunks: int, in_step: int) -> None:
    """The plan's number is that of Megatron's warm-up and the one after it, by chunk, from its own tables."""
    parallel = ParallelConfig(pipeline_model_parallel_size=stages, virtual_pipeline_model_parallel_size=chunks)
    for stage in range(stages):
        group = SimpleNamespace(size=lambda: stages, rank=lambda stage=stage: stage)
        virtual = None if chunks == 1 else chunks
        to = SimpleNamespace(pp_group=group, virtual_pipeline_model_parallel_size=virtual)
        _, _, warm_up, remaining = get_pp_rank_microbatches(in_step, chunks, stages, p2p_communicator=to)
        table = get_schedule_table(in_step, chunks, stages)[: warm_up + min(1, remaining)]
        counts = Counter(chunk for _, chunk in table)
        assert chunks_under_way(parallel, stage, in_step) == [counts[chunk] for chunk in range(chunks)]


def plan(capsys: pytest.CaptureFixture[str], *arguments: str, recipe: str = RECIPE, nodes: int = 4) -> Any:
    options = ("--gpu", "h100", "--nodes", str(nodes), "--configs", str(ROOT / "recipes" / "models"), "--json")
    assert main(["plan", recipe, *options, *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_what_interleaving_and_a_shorter_last_stage_change(capsys: pytest.CaptureFixture[str]) -> None:
    even, uneven, virtual = (
        plan(capsys, *PIPELINE, *(f"{KEY}{key}" for key in keys))
        for keys in ((), ("num_layers_in_last_pipeline_stage=17",), ("virtual_pipeline_model_parallel_size=3",))
    )
    times = [one["times"]["trainer"] for one in (even, uneven, virtual)]
    assert [rank["num_layers"] for one in (even, uneven) for rank in one["ranks"]] == [18, 18, 19, 17]
    # The LM head is worth some layers, so the last stage is the slower one until it has fewer.
    assert times[1]["forward_backward"] < times[0]["forward_backward"] == times[2]["forward_backward"]
    # A third, of perhaps one micro-batch more.
    assert times[2]["bubble"] == pytest.approx(times[0]["bubble"] / 3, rel=0.05)
    sent = [next(link["bytes_each"] for link in one["links"] if link["name"] == "pipeline") for one in (even, virtual)]
    assert sent[1] == 3 * sent[0]
    activations = [one["ranks"][0]["parts"]["activations"] for one in (even, virtual)]
    # Two micro-batches of 18 layers against 2 + 2 + 3 of chunks of 6.
    assert activations[0] < activations[1] < 1.3 * activations[0]
    assert virtual["ranks"][0]["parts"]["weights"] == even["ranks"][0]["parts"]["weights"]


NAMES = {
    "TP": "tensor_model_parallel_size", "PP": "pipeline_model_parallel_size", "DP": "data_parallel_size",
    "VP": "virtual_pipeline_model_parallel_size", "EP": "expert_model_parallel_size",
    "first": "num_layers_in_first_pipeline_stage", "last": "num_layers_in_last_pipeline_stage",
}  # fmt: skip
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "parallelism.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| Qwen3-")
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} {row[1]}")
def test_the_page_says_what_the_plan_says(row: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """docs/parallelism.md, within rounding."""
    student, layout, recompute, *numbers = row
    degrees = {"TP": 1, "PP": 1, **{name: int(number) for name, number in map(str.split, layout.split(", "))}}
    keys = {NAMES[name]: str(number) for name, number in degrees.items()}
    keys["sequence_parallel"] = str(degrees["TP"] > 1).lower()
    if "EP" in degrees:
        keys["expert_tensor_parallel_size"] = "1"
    arguments = [f"student.model=Qwen/{student}", f"student.recompute={recompute}"]
    arguments += [f"{KEY}{key}={value}" for key, value in keys.items()]
    found = plan(capsys, *arguments, recipe=EXPERTS if "EP" in degrees else RECIPE, nodes=64)
    times = found["times"]["trainer"]
    planned = (max(rank["num_bytes"] for rank in found["ranks"]) / 2**30, sum(times.values()), times["bubble"])
    assert [float(number) for number in numbers] == pytest.approx(planned, abs=0.06)


def test_the_search_shortens_a_last_stage_that_the_head_makes_the_slowest() -> None:
    """Of 64 layers the search tries 32 and 32, a shorter last stage, two chunks a stage, and no others."""
    recipe = load_recipe(RECIPE, ["student.dtype=bfloat16"]).recipe
    cluster = Cluster(name="h100", nodes=8, gpus_per_node=8, memory_bytes=GPUS["h100"].memory_bytes)
    models = {"student": read_dims(ROOT / "recipes" / "models" / "Qwen3-32B")}
    given = PlanInput(recipe=recipe, models=models, work=expected(recipe), cluster=cluster)
    seconds = {
        (load.keys.get(NAMES["last"]), load.keys.get(NAMES["VP"])): sum(load.parts.values())
        for load in trainers(given, rates_of("h100"), at_most=64)
        if [load.keys[NAMES[degree]] for degree in ("TP", "PP", "DP")] == [8, 2, 4]
    }
    assert seconds.keys() == {(None, None), (31, None), (None, 2)}
    assert seconds[31, None] < seconds[None, None] and seconds[None, 2] < seconds[None, None]
