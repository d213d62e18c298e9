"""Refusals of a plan, by key; the worth of a suggestion; the places of ranks and replicas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from mopd.cli.main import main
from mopd.config.load import load_recipe
from mopd.planning.memory.replicas import VLLM_BYTES_PER_LOGIT

ROOT = Path(__file__).parents[3]
RECIPES = Path(__file__).parent / "recipes"
CONFIGS = str(ROOT / "recipes" / "models")
ONE_NODE, FOUR_NODES, SIXTEEN_NODES = (
    str(RECIPES / f"{name}.yaml") for name in ("one_node", "four_nodes", "sixteen_nodes")
)

SHARED = [
    "rollout.placement={type: local, share_gpus_with: student}",
    "schedule.max_staleness=0",
    "schedule.sync_every_steps=1",
]
SIDES = {"A": (8, 4096), "B": (12_288, 8)}
LARGE = "teachers.large.engine.tensor_parallel_size"
SMALLER = "rollout.engine.gpu_memory_utilization=0.8"


def plan(recipe: str, *arguments: str, gpu: str = "h100") -> int:
    return main(["plan", recipe, "--gpu", gpu, "--configs", CONFIGS, *arguments])


def as_json(capsys: pytest.CaptureFixture[str], recipe: str, *arguments: str) -> Any:
    assert plan(recipe, "--json", *arguments) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("recipe", "arguments", "line"),
    [
        (ONE_NODE, ["student.parallel.data_parallel_size=8"], "student.parallel: 16 trainer ranks do not fill whole"),
        (ONE_NODE, ["student.recompute=none", "student.max_tokens_per_micro_batch=65536"], "every rank needs"),
        (ONE_NODE, ["student.parallel.tensor_model_parallel_size=3"], "3 does not divide the model's 8"),
        (ONE_NODE, ["student.parallel.pipeline_model_parallel_size=5"], "5 does not divide the model's 36 layers"),
        (ONE_NODE, ["teachers.math.engine.gpu_memory_utilization=0.95"], "teachers.math.engine.gpu_memory_utilization"),
        (ONE_NODE, ["rollout.max_response_length=60000"], "exceeds the 40960 positions of student.model"),
        (ONE_NODE, ["student.max_tokens_per_micro_batch=4096"], "is less than the 5120 tokens of the longest sample"),
        (ONE_NODE, ["teachers.math.model=experts/math/none"], "no such folder 'experts/math/none'"),
        (ONE_NODE, ["--nodes", "0"], "--nodes is 0: set 1 to"),
        (ONE_NODE, ["--prompt-length", "5000"], "--prompt-length is 5000: set 1 to data.max_prompt_length 1024"),
        (ONE_NODE, ["--probe"], "give one of them"),
        (FOUR_NODES, ["--nodes", "2"], "rollout.replicas: 2 replicas of 4 GPUs, and no node has 4 free"),
        (SIXTEEN_NODES, ["--nodes", "16", "student.parallel.expert_model_parallel_size=24"], "does not divide"),
        (SIXTEEN_NODES, ["--nodes", "16", f"{LARGE}=12"], f"{LARGE}: 12 GPUs, and a node has 8: only a registered"),
        (SIXTEEN_NODES, ["--nodes", "16", f"{LARGE}=4"], f"{LARGE}: 4: weights"),
        (SIXTEEN_NODES, ["--nodes", "1", "--suggest"], "of 8 GPUs (1 x 8 h100) the engines take 9"),
        (ONE_NODE, SHARED, "rollout.engine.gpu_memory_utilization: with placement.share_gpus_with 82.3 GiB of a GPU's"),
    ],
)
def test_what_cannot_work_is_one_line_with_its_key(
    recipe: str, arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(recipe, *arguments) == 2
    error = capsys.readouterr().err
    assert line in error and error.count("\n") == 1 and error.startswith("mopd: error: ")


def test_adapters_of_one_base_are_counted_once(capsys: pytest.CaptureFixture[str]) -> None:
    """The group has one base, and the samples of both teachers; an update brings a student's adapters alone."""
    base = "teachers.code.model=experts/math/Qwen3-8B"
    adapters = [base, "teachers.math.adapter=adapters/math", "teachers.code.adapter=adapters/code"]
    found = {way: as_json(capsys, ONE_NODE, *changes) for way, changes in (("folders", [base]), ("adapters", adapters))}
    assert found["folders"]["replicas"].keys() == {"rollout", "teachers.math", "teachers.code"}
    assert found["adapters"]["replicas"].keys() == {"rollout", "teachers.math"}
    scores = {way: [one for one in plan["links"] if "scores" in one["name"]] for way, plan in found.items()}
    assert sum(one["rows"] for one in scores["folders"]) == pytest.approx(scores["adapters"][0]["rows"])
    trained = as_json(capsys, ONE_NODE, "student.lora.rank=8")
    assert trained["update"]["num_bytes"] == 2 * trained["student"]["adapters"]
    # of vLLM's slots the student's adapter has one, and one more is empty
    assert trained["replicas"]["rollout"]["parts"]["adapters"] == 2 * trained["update"]["num_bytes"]
    parts = found["adapters"]["replicas"]["teachers.math"]["parts"]
    rank_32 = 4 * trained["student"]["adapters"]  # what an adapter counts as that is not here; 2 bytes, 3 slots
    assert parts["adapters"] == 3 * 2 * rank_32
    alone = found["folders"]["replicas"]["teachers.math"]["parts"]
    assert alone["adapters"] == 0 and alone["cache"] - parts["cache"] == parts["adapters"]


def test_an_adapter_that_is_here_counts_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shapes = {f"base_model.model.model.layers.0.mlp.up_proj.lora_{side}.weight": shape for side, shape in SIDES.items()}
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, tmp_path / "adapter_model.safetensors")
    found = as_json(capsys, ONE_NODE, f"teachers.math.adapter={tmp_path}")
    numbers = sum(rows * columns for rows, columns in SIDES.values())
    assert found["replicas"]["teachers.math"]["parts"]["adapters"] == 2 * 2 * numbers


def test_a_refused_plan_shows_its_parts_first(capsys: pytest.CaptureFixture[str]) -> None:
    degrees = ("tensor_model_parallel_size=1", "sequence_parallel=false")
    assert plan(ONE_NODE, *(f"student.parallel.{degree}" for degree in degrees)) == 2
    printed = capsys.readouterr()
    assert "each rank" in printed.out and "optimizer" in printed.out
    assert "student.parallel.tensor_model_parallel_size: every rank needs" in printed.err
    assert ONE_NODE in printed.err


def test_both_turns_of_a_shared_gpu_are_planned(capsys: pytest.CaptureFixture[str]) -> None:
    """The larger one decides; the replica is on the ranks' GPUs, the states that leave are in the host's memory."""
    apart, shared = as_json(capsys, ONE_NODE), as_json(capsys, ONE_NODE, *SHARED, SMALLER)
    (own,), (rank,) = apart["ranks"], shared["ranks"]
    turn = rank["rollout_turn"]
    assert not own["rollout_turn"] and turn["weights"] == rank["parts"]["weights"] == own["parts"]["weights"]
    assert turn["rollout"] == shared["replicas"]["rollout"]["num_bytes"]
    assert rank["num_bytes"] == sum(turn.values()) > sum(rank["parts"].values()) > own["num_bytes"]
    assert shared["hosts"][0]["parts"]["optimizer states, lent"] == 4 * rank["parts"]["optimizer"]
    assert plan(ONE_NODE, *SHARED, SMALLER) == 0
    printed = capsys.readouterr().out
    assert "rollout's turn" in printed and "ranks 0-3" in printed and "Ray's choice" not in printed
    gpus = {where["key"]: where["gpus"] for where in shared["places"] if where["key"] != "student"}
    assert gpus == {"rollout": [0, 1], "teachers.math": [4], "teachers.code": [5]}


def test_a_teacher_on_two_nodes_is_planned_there(capsys: pytest.CaptureFixture[str]) -> None:
    """Its weights are halved, by stages as by tensor parallelism, whose sums leave the node; without a row of free
    nodes it is refused."""
    key, few = "teachers.large.engine", ["--nodes", "16", "teachers.large.replicas=2"]
    one, stages, wide = (
        as_json(capsys, SIXTEEN_NODES, *few, *keys)
        for keys in ([], [f"{key}.pipeline_parallel_size=2"], [f"{key}.tensor_parallel_size=16"])
    )
    half = one["replicas"]["teachers.large"]["parts"]["weights"] // 2
    for plan_ in (stages, wide):
        own = plan_["replicas"]["teachers.large"]
        assert own["gpus"] == 16 and own["parts"]["weights"] == half
        nodes = [(place["node"], place["num_nodes"]) for place in plan_["places"] if place["key"] == "teachers.large"]
        assert nodes == [(12, 2), (14, 2)]
    times = [found["times"]["stages"]["teachers/large"] for found in (one, stages, wide)]
    assert times[1] < times[2] < times[0]
    assert plan(SIXTEEN_NODES, "--nodes", "16", f"{key}.pipeline_parallel_size=2") == 2
    assert "no 2 nodes in a row have 8 free for replica 2" in capsys.readouterr().err


def test_the_search_gives_a_teacher_that_no_node_holds_a_stage_on_each_of_two(
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = ["student.model=Qwen/Qwen3-1.7B", "student.parallel={data_parallel_size: 8}", "student.moe={}"]
    arguments = [SIXTEEN_NODES, *small, "schedule.prompts_per_step=64", "--nodes", "4", "--suggest"]
    assert plan(*arguments, gpu="l40s") == 0
    engine = yaml.safe_load(capsys.readouterr().out.partition("set for the first:")[2])["teachers"]["large"]["engine"]
    assert (engine["tensor_parallel_size"], engine["pipeline_parallel_size"]) == (8, 2)


@pytest.mark.parametrize(("gpu", "student", "shares"), [("4090", "1.7B", True), ("h100", "8B", False)])
def test_the_search_tries_turns_on_the_students_gpus(
    gpu: str, student: str, shares: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two GPUs of 24 GB hold student, rollout and a teacher by turns alone; where a step would wait for weights by
    HTTP they are apart. What is suggested is planned, fits, and is suggested again."""
    tree = {
        "run_dir": "runs/one",
        "student": {"model": f"Qwen/Qwen3-{student}", "max_tokens_per_micro_batch": 4096},
        "teachers": {"math": {"model": "Qwen/Qwen3-4B", "default": True}},
        "data": {"train": ["train.jsonl"], "max_prompt_length": 1024},
        "schedule": {"steps": 3, "prompts_per_step": 64},
    }
    base, found = tmp_path / "base.yaml", tmp_path / "found.yaml"
    base.write_text(yaml.safe_dump(tree))
    arguments = ["--gpus-per-node", "2" if shares else "8", "--suggest"]
    assert plan(str(base), *arguments, gpu=gpu) == 0
    keys = yaml.safe_load(capsys.readouterr().out.partition("set for the first:")[2])
    assert keys["rollout"]["placement"].get("share_gpus_with") == ("student" if shares else None)
    found.write_text(yaml.safe_dump({"base": "base.yaml", **keys}))
    assert plan(str(found), *arguments[:2], gpu=gpu) == 0
    capsys.readouterr()
    assert plan(str(found), *arguments, gpu=gpu) == 0
    assert yaml.safe_load(capsys.readouterr().out.partition("set for the first:")[2])["rollout"] == keys["rollout"]


def test_teachers_that_fit_by_turns_alone_share_a_pool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Student and rollout have the first of two GPUs of 24 GB, both teachers the second; the step takes as long as one
    after the other, and what is suggested is planned and fits. On three GPUs each has its own."""
    teacher = {"model": "Qwen/Qwen3-4B"}
    tree = {
        "run_dir": "runs/one",
        "student": {"model": "Qwen/Qwen3-1.7B", "max_tokens_per_micro_batch": 4096},
        "teachers": {"math": {**teacher, "default": True}, "code": {**teacher, "domains": ["code"]}},
        "data": {"train": ["train.jsonl"], "max_prompt_length": 1024},
        "schedule": {"steps": 3, "prompts_per_step": 64},
    }
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(tree))
    placements = []
    for gpus in ("2", "3"):
        assert plan(str(tmp_path / "base.yaml"), "--gpus-per-node", gpus, "--suggest", gpu="4090") == 0
        keys = yaml.safe_load(capsys.readouterr().out.partition("set for the first:")[2])
        placements.append([own["placement"] for own in keys["teachers"].values()])
        (tmp_path / "found.yaml").write_text(yaml.safe_dump({"base": "base.yaml", **keys}))
        assert plan(str(tmp_path / "found.yaml"), "--gpus-per-node", gpus, gpu="4090") == 0
        capsys.readouterr()
    assert placements == [[{"type": "ray", "num_gpus": 1, "shared_pool": "teachers"}] * 2, [{"type": "local"}] * 2]


def test_an_engine_without_graphs_draws_a_few_sequences_slower(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["schedule.prompts_per_step=2", "rollout.samples_per_prompt=1", "student.model=Qwen/Qwen3-1.7B"]
    times = [as_json(capsys, ONE_NODE, *few, f"rollout.engine.enforce_eager={value}") for value in ("false", "true")]
    graphs, eager = (found["times"]["stages"]["rollout"] for found in times)
    assert eager > 2 * graphs


def test_sglang_is_planned_as_vllm_is_and_refused_by_its_own_keys(capsys: pytest.CaptureFixture[str]) -> None:
    sglang = "rollout.engine={type: sglang, tensor_parallel_size: 2, mem_fraction_static: 0.9}"
    ours, theirs = (as_json(capsys, ONE_NODE, *one) for one in ([sglang], []))
    assert ours["replicas"]["rollout"] == theirs["replicas"]["rollout"]
    assert ours["times"] == theirs["times"]
    assert plan(ONE_NODE, sglang.replace("0.9", "0.15")) == 2
    refused = capsys.readouterr().err
    assert "mem_fraction_static" in refused and "gpu_memory_utilization" not in refused


def test_a_recipe_with_a_job_is_planned_on_its_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    """16 ranks, and 14 GPUs of replicas: the section says how many nodes, and how they are split; options go first."""
    job = "slurm={{gpus_per_node: 8, form: {}, student_nodes: {}}}"
    together = as_json(capsys, FOUR_NODES, job.format("allocation", 4))
    assert (together["cluster"]["nodes"], together["cluster"]["gpus_per_node"]) == (4, 8)
    nodes = [one["node"] for one in together["places"] if one["key"] == "student"]
    assert nodes == [n for n in range(4) for _ in range(4)]
    assert [one["node"] for one in together["places"] if one["key"] == "rollout"] == [0, 1]
    apart = as_json(capsys, FOUR_NODES, job.format("heterogeneous", 2))
    assert apart["cluster"]["nodes"] == 6 and {one["component"] for one in apart["places"]} == {0, 1, 2, 3, 4}
    assert plan(FOUR_NODES, job.format("allocation", 2)) == 0
    assert "node 3" in capsys.readouterr().out
    assert plan(FOUR_NODES, job.format("allocation", 2), "--nodes", "3") == 2
    assert "no node has 2 free" in capsys.readouterr().err
    assert plan(FOUR_NODES, job.format("allocation", 4), "--gpus-per-node", "16") == 0
    assert plan(FOUR_NODES, job.format("heterogeneous", 2), "--nodes", "4") == 2
    assert "slurm.nodes: 4, and the job's components have 2 + 1 + 1 + 1 + 1 nodes" in capsys.readouterr().err


@pytest.mark.parametrize(("recipe", "nodes"), [(ONE_NODE, 1), (FOUR_NODES, 4)])
def test_a_suggestion_is_a_recipe_that_fits_and_is_no_slower(
    recipe: str, nodes: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its keys in the recipe give a plan whose step takes what the search said."""
    first, *rest = as_json(capsys, recipe, "--nodes", str(nodes), "--suggest")
    assert all(one["step_s"] >= first["step_s"] * 0.99 for one in rest)
    keys = first["keys"]
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "data_parallel_size")
    parallel = {**dict.fromkeys(sizes, 1), "sequence_parallel": False, **keys["student"]["parallel"]}
    overrides = [f"student.parallel.{key}={str(value).lower()}" for key, value in parallel.items()]
    overrides += [f"student.{key}={value}" for key, value in keys["student"].items() if key == "recompute"]
    groups = {"rollout": keys["rollout"], **{f"teachers.{name}": own for name, own in keys["teachers"].items()}}
    for key, own in groups.items():
        overrides += [f"{key}.replicas={own['replicas']}"]
        overrides += [f"{key}.engine.{name}={value}" for name, value in own["engine"].items() if name != "type"]
        overrides += [f"{key}.placement.min_replicas=1"] if nodes > 1 else []
    own = as_json(capsys, recipe, "--nodes", str(nodes), *overrides)
    assert own["problems"] == []
    assert own["times"]["step_s"] == pytest.approx(first["step_s"], rel=0.05)
    shipped = as_json(capsys, recipe, "--nodes", str(nodes))
    assert own["times"]["step_s"] <= 1.01 * shipped["times"]["step_s"]


def test_replicas_that_keep_up_do(capsys: pytest.CaptureFixture[str]) -> None:
    """A group is as fast as the trainer with the number of replicas that the plan names for balance; with one less it
    is not."""
    first = as_json(capsys, FOUR_NODES, "--nodes", "16")
    wanted = first["times"]["balanced_replicas"]["rollout"]
    for count, keeps_up in ((wanted, True), (wanted - 1, False)):
        own = as_json(capsys, FOUR_NODES, "--nodes", "16", f"rollout.replicas={count}")
        assert (own["times"]["stages"]["rollout"] <= own["times"]["stages"]["trainer"]) == keeps_up


def test_lengths_that_are_given_are_planned_with(capsys: pytest.CaptureFixture[str]) -> None:
    long = as_json(capsys, ONE_NODE, "--response-length", "4000")
    short = as_json(capsys, ONE_NODE, "--response-length", "400")
    assert (short["samples"]["response_tokens"], long["samples"]["response_tokens"]) == (400, 4000)
    for stage in ("rollout", "teachers/math", "trainer"):
        assert long["times"]["stages"][stage] > 3 * short["times"]["stages"][stage]
    assert long["ranks"] == short["ranks"]  # memory is that of the longest


def test_response_lengths_have_the_mean_that_they_are_given() -> None:
    from mopd.planning.workload import expected

    recipe = load_recipe(ONE_NODE).recipe
    for mean in (40.0, 400.0, 2048.0, 3500.0, 4096.0):
        lengths = expected(recipe, response_tokens=mean).response_lengths()
        assert len(lengths) == recipe.samples_per_step and lengths == sorted(lengths)
        assert sum(lengths) / len(lengths) == pytest.approx(mean, rel=0.03) and max(lengths) <= 4096


def test_states_on_the_host_are_less_on_every_gpu_and_more_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    """But not more in a checkpoint."""
    key = "student.optimizer.offload_fraction={}"
    before, half, none = (as_json(capsys, ONE_NODE, key.format(fraction)) for fraction in (0, 0.5, 1))
    (states,) = (rank["parts"]["optimizer"] for rank in before["ranks"])
    assert half["ranks"][0]["parts"]["optimizer"] == pytest.approx(states / 2, rel=1e-6)
    assert none["ranks"][0]["parts"]["optimizer"] == 0
    name, copied = "optimizer states", "copy for a checkpoint"
    held = [plan["hosts"][0]["parts"] for plan in (before, half, none)]
    assert name not in held[0]
    for parts, share in ((held[1], 0.5), (held[2], 1.0)):
        ranks = sum(len(tenant["gpus"]) for tenant in half["places"] if tenant["key"] == "student")
        assert parts[name] == pytest.approx(share * ranks * states, rel=1e-6)
        assert parts[copied] == held[0][copied]
    assert "optimizer_on_host" not in before["times"]["trainer"]
    spent = [plan["times"]["trainer"]["optimizer_on_host"] for plan in (half, none)]
    assert spent[1] == pytest.approx(2 * spent[0], rel=1e-6) and spent[0] > before["times"]["trainer"]["optimizer"]


def test_payloads_differ_by_what_they_carry_and_by_a_pass_over_the_logits(capsys: pytest.CaptureFixture[str]) -> None:
    """In bytes of a response token, 4 a number: the ids that a teacher is given, its own, log-probs of both; and the
    student's ids from the rollout. In seconds: where nobody looks for most probable ids, a pass less."""
    k, payloads = 64, ("topk", "student_topk", "union", "sampled")
    tokens: dict[str, dict[str, float]] = {}
    stages: dict[str, dict[str, float]] = {}
    for payload in payloads:
        loss = "loss={type: k2}" if payload == "sampled" else f"loss={{type: topk_reverse_kl, top_k: {k}}}"
        keys = (loss, f"teacher_defaults.payload={payload}", "schedule.max_staleness=0", "schedule.sync_every_steps=1")
        found = as_json(capsys, FOUR_NODES, "--nodes", "4", *keys)
        tokens[payload] = {one["name"]: one["num_bytes"] / one["rows"] for one in found["links"] if one["rows"]}
        stages[payload] = found["times"]["stages"]
    work, rates = found["samples"], found["rates"]
    for link, ids in (
        ("teachers.math: tokens and scores", {"topk": 2 * k, "student_topk": 2 * k, "union": 4 * k}),
        ("rollout: prompts and responses", {"student_topk": k, "union": k}),
        ("fields to last stage", {"topk": 2 * k, "student_topk": 2 * k, "union": 4 * k}),
    ):
        for payload in payloads:
            more = tokens[payload][link] - tokens["sampled"][link]
            assert more == pytest.approx(4 * ids.get(payload, 0), abs=0.01), (link, payload)
    rows = work["samples"] * work["response_tokens"]
    pass_s = rows / 3 * 151_936 * VLLM_BYTES_PER_LOGIT / rates["bandwidth"]
    math = {payload: seconds["teachers/math"] for payload, seconds in stages.items()}
    assert math["topk"] == math["union"] and math["student_topk"] == math["sampled"]
    assert math["topk"] - math["sampled"] == pytest.approx(pass_s, rel=1e-6)
    drawn = {payload: seconds["rollout"] for payload, seconds in stages.items()}
    assert drawn["topk"] == drawn["sampled"] < drawn["student_topk"] == drawn["union"]


def test_ranks_that_share_sequences_keep_less_of_them_and_share_states(capsys: pytest.CaptureFixture[str]) -> None:
    """Context-parallel ranks in place of data-parallel ones have the same weights, gradients and states, half the
    tokens, but all keys."""
    degrees = "student.parallel.data_parallel_size={}", "student.parallel.context_parallel_size={}"
    apart, shared = (
        as_json(
            capsys, FOUR_NODES, "--nodes", "4", "student.recompute=none", degrees[0].format(dp), degrees[1].format(cp)
        )
        for dp, cp in ((8, 1), (4, 2))
    )
    (before,), (after,) = (plan["ranks"] for plan in (apart, shared))
    for part in ("weights", "gradients", "optimizer"):
        assert before["parts"][part] == after["parts"][part]
    assert 0.5 < after["parts"]["activations"] / before["parts"]["activations"] < 0.55
    sent = {flow["name"]: flow["bytes_each"] for flow in shared["links"]}
    assert 0 < sent["context-parallel"] < sent["tensor-parallel"] / 5
    assert "context-parallel" not in {flow["name"] for flow in apart["links"]}


@pytest.mark.parametrize(
    ("options", "name", "gib", "gpus"),
    [
        (["--gpu", "H200"], "H200", 140, 8),
        (["--gpu", "GB200"], "GB200", 185, 4),
        (["--gpu", "h100", "--gpu-memory", "94"], "h100", 94, 8),
        (["--gpu", "Mi300X"], "Mi300X", 192, 8),
    ],
)
def test_gpus_are_named_in_any_case_or_described(
    options: list[str], name: str, gib: int, gpus: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", FOUR_NODES, "--configs", CONFIGS, "--json", "--nodes", "8", *options]) == 0
    cluster = json.loads(capsys.readouterr().out)["cluster"]
    assert (cluster["name"], round(cluster["memory_bytes"] / 2**30), cluster["gpus_per_node"]) == (name, gib, gpus)
    assert cluster["usable_bytes"] == round(0.95 * cluster["memory_bytes"])


def test_a_gpu_that_the_table_lacks_has_times_where_its_operations_are_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A 1.7B student on two GPUs of 24 GiB; half of the operations take longer."""
    small = [f"{key}=Qwen/Qwen3-1.7B" for key in ("student.model", "teachers.math.model", "teachers.code.model")]
    small += ["rollout.max_response_length=1024", "teacher_defaults.engine.gpu_memory_utilization=0.6"]
    small += [
        "student.parallel.data_parallel_size=1",
        "student.recompute=full",
        "student.max_tokens_per_micro_batch=2048",
    ]
    steps = []
    for tflops in (["--tflops", "330"], ["--tflops", "165"], []):
        code = main(["plan", ONE_NODE, "--configs", CONFIGS, "--json", "--gpu-memory", "24", *tflops, *small])
        assert code == 0, capsys.readouterr().err
        times = json.loads(capsys.readouterr().out)["times"]
        steps.append(times and times["trainer"]["forward_backward"])
    assert steps[2] is None and steps[1] == pytest.approx(2 * steps[0])


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--gpu", "h1000"], "--gpu 'h1000': it is none of a100, h100"),
        (["--gpu", "b2000"], "(did you mean b200?)"),
        (["--tflops", "100"], "--tflops of which GPU? Name it with --gpu, or give --gpu-memory too"),
        (["--gpu", "h100", "--image-length", "9999"], "or give a longer --prompt-length"),
    ],
)
def test_gpus_that_nobody_knows(options: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", ONE_NODE, "--configs", CONFIGS, *options]) == 2
    error = capsys.readouterr().err
    assert line in error and error.count("\n") == 1


def test_a_gpu_that_only_its_margin_fills_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A 32B teacher on one GPU of 79.6 GiB, of which it would take 79.2."""
    keys = ["teachers.math.model=Qwen/Qwen3-32B", "teachers.math.engine.gpu_memory_utilization=0.9"]
    assert plan(ONE_NODE, *keys) == 2
    printed = capsys.readouterr()
    assert "teachers.math.engine.gpu_memory_utilization: 0.9 of 79.6 GiB leaves 4.0 GiB of the 75.7 GiB" in printed.err
    assert "max_num_batched_tokens 8192 x 151936 take 7.5 GiB" in printed.err
    assert plan(ONE_NODE, keys[0], "teachers.math.engine.gpu_memory_utilization=0.85") == 0


def test_longer_responses_than_a_chunk_take_no_more_for_their_scores(capsys: pytest.CaptureFixture[str]) -> None:
    """vLLM holds the log-probs of a chunk, whatever the prompt."""
    longer = ["rollout.max_response_length=16384", "student.max_tokens_per_micro_batch=20000"]
    longer += ["teachers.math.engine.max_scoring_tokens=20000", "student.parallel.data_parallel_size=1"]
    scoring = [
        as_json(capsys, ONE_NODE, "student.parallel.tensor_model_parallel_size=4", *longer, *keys)["replicas"][
            "teachers.math"
        ]["parts"]["scoring"]
        for keys in ([], ["teachers.math.engine.max_num_batched_tokens=4096"])
    ]
    assert scoring[0] == int(8192 * 151_936 * 6.5) == 2 * scoring[1]


def test_hosts_are_planned_by_node_and_held_against_their_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """Updates by HTTP are kept where the orchestrator and the replicas are; a checkpoint's copy where ranks write."""
    hosts = as_json(capsys, FOUR_NODES, "--nodes", "4", "weight_sync.type=http")["hosts"]
    assert [host["node"] for host in hosts] == [0, 2]
    kept = [host["parts"].get("weights kept by the orchestrator", 0) for host in hosts]
    assert kept[0] > 16e9 and not any(kept[1:])
    assert [("weights kept aside by rollout replicas" in host["parts"]) for host in hosts] == [False, True]
    assert ["copy for a checkpoint" in host["parts"] for host in hosts] == [True, False]
    small = ["student.parallel.tensor_model_parallel_size=4", "student.parallel.data_parallel_size=1"]
    small += [f"{key}.engine.tensor_parallel_size=2" for key in ("teachers.math", "teachers.code")]
    small += ["student.optimizer.offload_fraction=1", "rollout.replicas=6", "weight_sync.type=http"]
    assert main(["plan", ONE_NODE, "--configs", CONFIGS, "--gpu", "4090", "--gpu-memory", "80", "--nodes", "3",
                 *small, "--gpus-per-node", "24"]) == 2  # fmt: skip
    error = capsys.readouterr().err
    assert "weight_sync.type: the host of node 0 needs" in error and "of 243.2 GiB" in error


def test_a_search_says_what_would_help_and_its_picture_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    """Bound by weights over HTTP: fewer updates, another way and staler samples each help; in a synchronous step the
    stages follow one another, in an asynchronous one they go on side by side."""
    synchronous = ["schedule.max_staleness=0", "schedule.sync_every_steps=1", "weight_sync.type=http"]
    assert plan(ONE_NODE, "--suggest", *synchronous) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("with ")]
    assert len(lines) == 3 and any(line.startswith("with weight_sync.type: collective: ") for line in lines)
    for keys in (synchronous, []):
        times = as_json(capsys, ONE_NODE, *keys)["times"]
        spans = {one["what"]: (one["start_s"], one["end_s"]) for one in times["spans"]}
        assert times["step_s"] == max(end for _, end in spans.values())
        lengths = {name: end - start for name, (start, end) in spans.items()}
        assert times["stages"]["weight_sync"] == pytest.approx(
            sum(seconds for name, seconds in lengths.items() if name.startswith("weights"))
        )
        drawn = max(spans[name][1] for name in spans if name == "rollout" or name.startswith("teachers"))
        assert spans["trainer"][0] == (drawn if keys else 0)
        assert spans["weights, the trainer waits"][0] == spans["trainer"][1]
        taken = spans["weights, on their way"]
        assert taken[0] == (spans["weights, the trainer waits"][1] if keys else 0)


def test_a_search_keeps_no_more_states_on_hosts_than_must_and_no_more_than_they_hold(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A student of 32B beside a rollout and teachers, one as large, on eight GPUs; hosts of 256 GiB hold no states of
    it."""
    large = [f"{key}.model=Qwen/Qwen3-32B" for key in ("student", "teachers.math")]
    lengths = ["rollout.max_response_length=1024", "student.max_tokens_per_micro_batch=4096"]
    command = ["plan", ONE_NODE, "--configs", CONFIGS, *large, *lengths]
    assert main([*command, "--gpu", "h100", "--suggest", "--json"]) == 0
    keys = json.loads(capsys.readouterr().out)[0]["keys"]
    fraction = keys["student"]["optimizer"]["offload_fraction"]
    assert 0 < fraction < 1
    assert keys["teachers"]["math"]["engine"]["gpu_memory_utilization"] == 0.85  # more than the recipe's, and it fits
    parallel = {"data_parallel_size": 1, **keys["student"]["parallel"]}
    set_to = [f"student.parallel.{key}={json.dumps(value)}" for key, value in parallel.items()]
    set_to += ["student.recompute=full"]
    set_to += [f"rollout.{key}={json.dumps(value)}" for key, value in keys["rollout"].items()]
    set_to += [f"teachers.{n}.{k}={json.dumps(v)}" for n, own in keys["teachers"].items() for k, v in own.items()]
    for less, code in ((0.0, 0), (0.05, 2)):
        offload = f"student.optimizer.offload_fraction={fraction - less}"
        assert main([*command, "--gpu", "h100", *set_to, offload]) == code
        assert ("every rank needs" in capsys.readouterr().err) == bool(code)
    assert main([*command, "--gpu", "4090", "--gpu-memory", "79.6", "--gpus-per-node", "8", "--suggest"]) == 2
    assert "no layout of the student fits the others" in capsys.readouterr().err
