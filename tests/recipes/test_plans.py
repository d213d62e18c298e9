"""Every recipe in the repository is planned from ``config.json`` files alone, at once and without torch; recipes for
real models say in their headers what the plan says."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mopd.base.hardware import Hardware
from mopd.cli.main import main
from mopd.config.load import draft_recipe, load_recipe
from mopd.launch.checks.static import StaticChecks
from tests.recipes.test_recipes import RECIPES, ROOT, name
from tests.unit.conversion.test_vision_dims import QWEN2_5_VL_3B, changed

GIB = 2**30
MAX_CALLS = 2_000_000
REAL = [path for path in RECIPES if "\n# command: mopd plan" in path.read_text(encoding="utf-8")]
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "hidden_size": 128,
    "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "vocab_size": 33, "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}  # fmt: skip
"""Config of the quickstart's models, which are made when they are needed."""
VISION_CONFIG = changed(
    QWEN2_5_VL_3B,
    {
        "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4,
        "max_position_embeddings": 128, "rope_scaling.mrope_section": [4, 6, 6], "vision_config.depth": 8,
        "vision_config.hidden_size": 64, "vision_config.intermediate_size": 96, "vision_config.num_heads": 4,
        "vision_config.out_hidden_size": 128, "vision_config.fullatt_block_indexes": [7],
    },
)  # fmt: skip
"""Config of the toy's models that see images."""
PROGRAM = """
import sys
from mopd.cli.main import main
calls = 0
def count(frame, event, value):
    global calls
    calls += event in ("call", "c_call")
sys.setprofile(count)
code = main(sys.argv[1:])
sys.setprofile(None)
print(calls, file=sys.stderr)
print([name for name in ("torch", "megatron", "transformers", "vllm", "ray") if name in sys.modules], file=sys.stderr)
sys.exit(code)
"""


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped configs, and those of the quickstart's models."""
    folder = tmp_path_factory.mktemp("configs")
    for shipped in (ROOT / "recipes" / "models").iterdir():
        (folder / shipped.name).symlink_to(shipped)
    text = dict.fromkeys(("base", "reversal", "sorting", "next_letter", "sorter", "copier", "sums", "mixed"), CONFIG)
    for model, config in {**text, "vision-base": VISION_CONFIG, "reader": VISION_CONFIG}.items():
        (folder / model).mkdir()
        (folder / model / "config.json").write_text(json.dumps(config))
    return folder


def command_of(path: Path) -> list[str]:
    """Return what the header says to run; a plan of a machine without GPUs where it says nothing."""
    line = re.search(r"^# command: mopd (plan .*)$", path.read_text(encoding="utf-8"), re.M)
    return shlex.split(line[1]) if line else ["plan", str(path.relative_to(ROOT))]


def planned(path: Path, configs: Path) -> tuple[dict[str, Any], int]:
    """Return what ``--json`` prints, and the number of function calls that it took."""
    command = [sys.executable, "-c", PROGRAM, *command_of(path), "--configs", str(configs), "--json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    calls, heavy = done.stderr.splitlines()
    assert heavy == "[]"
    return json.loads(done.stdout), int(calls)


def header_of(plan: dict[str, Any]) -> str:
    """The line that a recipe's header has: of the fullest rank and each replica, and of a step."""
    limit = plan["cluster"]["usable_bytes"] / GIB
    ranks = f"rank {max(rank['num_bytes'] for rank in plan['ranks']) / GIB:.0f}"
    replicas = [f"{key} {one['num_bytes'] / GIB:.0f}" for key, one in plan["replicas"].items()]
    times = plan["times"]
    bound = times["bound_by"].replace("_", " ")
    what = f"{', '.join([ranks, *replicas])} of {limit:.0f} GiB"
    return f"# planned: {what}; {times['step_s']:.0f} s a step, bound by {bound}"


@pytest.mark.parametrize("path", RECIPES, ids=name)
def test_a_plan_takes_no_torch_and_no_time(path: Path, configs: Path) -> None:
    plan, calls = planned(path, configs)
    assert plan["problems"] == []
    assert calls < MAX_CALLS
    if path not in REAL:
        return
    text = path.read_text(encoding="utf-8")
    assert header_of(plan) in text.splitlines(), header_of(plan)
    hours = load_recipe(path).recipe.schedule.steps * plan["times"]["step_s"] / 3600
    assert f"# wall time: {hours:.0f} h planned, not measured" in text.splitlines()
    size = plan["checkpoint_bytes"] / GIB
    kept = f"# checkpoints: {size:.{int(size < 1)}f} GiB each, {plan['checkpoints_kept']} kept"
    assert kept in text.splitlines(), kept
    cluster = plan["cluster"]
    nodes, gpus, memory = cluster["nodes"], cluster["gpus_per_node"], round(cluster["memory_bytes"] / GIB)
    on = f"# hardware: {nodes} node{'s' if nodes > 1 else ''} of {gpus} {cluster['name'].upper()} ({memory} GB)"
    assert on in text, on
    in_turns = {"rollout"} if plan["ranks"][0]["rollout_turn"] else set()
    places = [one for one in plan["places"] if one["is_fixed"] and one["key"] not in in_turns]
    owned = [(one["node"], gpu) for one in places for gpu in one["gpus"]]
    assert len(owned) == len(set(owned)) <= gpus * nodes


def test_there_are_recipes_for_real_models() -> None:
    """Each but the published case has more than one teacher, and runs of several nodes say how they are submitted."""
    assert len(REAL) == 7
    for path in REAL:
        recipe = load_recipe(path).recipe
        assert len(recipe.teachers) > 1 or path.stem == "gsm8k_distillation"
        assert recipe.rewards.keys() == {file.domain for file in recipe.data.files(recipe.data.train)}
        assert (recipe.slurm is not None) == (
            path.stem not in ("gsm8k_distillation", "qwen3_1_7b_two_4090", "qwen3_1_7b_lora_two_4090")
        )


@pytest.mark.parametrize("path", REAL, ids=name)
def test_a_real_recipe_passes_the_static_checks_and_is_submitted_dry(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names of the Hub are left for later; everything else is looked at."""
    recipe = load_recipe(path).recipe
    gpus = 0 if recipe.slurm is not None else 2 if "two" in path.stem else 8  # of a login node, or of the machine
    hardware = Hardware(gpu_memory_bytes=(80 * GIB,) * gpus, torch_cuda="12.9", vllm="0.32")
    checks = list(StaticChecks(draft_recipe(path), hardware).run())
    assert [check for check in checks if check.status == "failed"] == []
    assert {"recipe", "GPUs"} <= {check.name for check in checks if check.status == "ok"}
    if recipe.slurm is not None:
        assert main(["slurm", str(path), "--dry-run"]) == 0
        assert "#SBATCH" in capsys.readouterr().out


def test_the_page_shows_a_plan() -> None:
    """The page shows the plan as it is printed: a change of what a plan prints changes the page."""
    text = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```text\n(┏.*?)```", text, re.S)
    path = next(path for path in REAL if path.stem == "qwen3_8b_math_code_h100")
    command = [sys.executable, "-m", "mopd", *command_of(path)]
    environment = os.environ | {"COLUMNS": "110"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert f"mopd {' '.join(command_of(path))}" in text
    assert [line for line in block.splitlines() if line not in done.stdout.splitlines()] == []


def test_the_published_case_needs_no_tensor_parallelism(configs: Path) -> None:
    """A student of 4B and 24,576 tokens a micro-batch over a vocabulary of 151,936, beside a rollout that keeps 0.4 of
    each GPU (a published run that shares its GPUs so): the eager loss fits at TP 4 and not below, ours at TP 1."""
    from mopd.conversion.models.reading import read_dims
    from mopd.planning.devices import GPUS, Cluster
    from mopd.planning.memory.ranks import head_plans
    from mopd.planning.workload import expected

    path = next(path for path in REAL if path.stem == "gsm8k_distillation")
    recipe = load_recipe(path, ["student.dtype=bfloat16", "student.parallel.data_parallel_size=8"]).recipe
    assert recipe.student.max_tokens_per_micro_batch == 24_576
    dims = read_dims(ROOT / "recipes" / "models" / "Qwen3-4B")
    shared = Cluster(name="h100", nodes=1, gpus_per_node=8, memory_bytes=round(0.6 * GPUS["h100"].memory_bytes))
    heads = {plan.tensor_model_parallel_size: plan for plan in head_plans(recipe, dims, expected(recipe), shared, {})}
    assert {degree: head.fits_eager for degree, head in heads.items()} == {1: False, 2: False, 4: True, 8: True}
    assert heads[1].fits
    whole = head_plans(recipe, dims, expected(recipe), replace(shared, memory_bytes=10**12), {})
    assert whole[0].eager_bytes == 24_576 * 151_936 * 14
    assert whole[0].ours_bytes <= recipe.student.lm_head_memory_budget_mib * 2**20 + 16 * 2**20
