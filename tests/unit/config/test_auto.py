"""What each ``auto`` becomes, with and without CUDA: nothing here looks at the machine that runs the tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mopd.base.hardware import Hardware
from mopd.base.types import UserError
from mopd.config.groups import TorchEngineConfig, VllmEngineConfig
from mopd.config.load import Loaded, differences, dump, load_recipe
from mopd.config.machine.auto import GIB, compares_with_transformers, settle
from mopd.config.machine.places import engine_groups, place_on_machine
from mopd.config.placements import InProcessConfig, LocalConfig
from mopd.config.schema import Recipe
from mopd.launch.preparing import settled

REQUIRED = """\
run_dir: runs/one
student: {model: models/student}
teachers:
  math: {model: models/math, domains: [math]}
  code: {model: models/code, domains: [code]}
data: {train: [train.jsonl]}
schedule: {steps: 3, prompts_per_step: 4}
"""
NO_GPU = Hardware(torch_cuda=None, vllm="0.32.0")
NODE = Hardware(gpu_memory_bytes=(80 * GIB,) * 8, torch_cuda="13.0", vllm="0.32.0")
ONE = Hardware(gpu_memory_bytes=(80 * GIB,), torch_cuda="13.0", vllm="0.32.0")
NO_VLLM = Hardware(gpu_memory_bytes=(80 * GIB,) * 8, torch_cuda="13.0")
CPU_TORCH = Hardware(gpu_memory_bytes=(80 * GIB,) * 8, vllm="0.32.0")
SMALL = dict.fromkeys(("student", "teachers.math", "teachers.code"), 600_000_000)
LARGE = dict.fromkeys(SMALL, 8_000_000_000)
Load = Callable[..., Loaded]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(REQUIRED)
    return lambda *overrides: load_recipe("recipe.yaml", overrides)


def summary(recipe: Recipe) -> dict[str, tuple[str, str, str]]:
    return {key: (g.placement.type, g.engine.type, g.engine.dtype) for key, g in engine_groups(recipe).items()}


@pytest.mark.parametrize(
    ("hardware", "num_ranks", "sizes", "group", "student_dtype", "reason"),
    [
        (NO_GPU, 1, SMALL, ("in_process", "torch", "float32"), "float32", "no GPU"),
        (NO_GPU, 2, {}, ("in_process", "torch", "float32"), "float32", "no GPU"),
        (CPU_TORCH, 1, LARGE, ("in_process", "torch", "float32"), "float32", "this torch is a CPU build"),
        (NODE, 4, LARGE, ("local", "vllm", "bfloat16"), "bfloat16", "4 of 8 GPUs are free, 3 wanted"),
        (NODE, 5, {}, ("local", "vllm", "bfloat16"), "bfloat16", "3 of 8 GPUs are free, 3 wanted"),
        (NO_VLLM, 4, LARGE, ("local", "torch", "bfloat16"), "bfloat16", "4 of 8 GPUs are free, 3 wanted"),
        (ONE, 1, SMALL, ("in_process", "torch", "bfloat16"), "bfloat16", "and everything fits on one: about"),
        (ONE, 1, LARGE, ("local", "vllm", "bfloat16"), "bfloat16", "0 of 1 GPUs are free, 3 wanted"),
        (ONE, 1, {**SMALL, "teachers.math": None}, ("local", "vllm", "bfloat16"), "bfloat16", "0 of 1 GPUs"),
        (NODE, 8, SMALL, ("in_process", "torch", "bfloat16"), "bfloat16", "0 of 8 GPUs are free, 3 wanted, and"),
    ],
)
def test_a_recipe_of_the_required_keys(
    load: Load,
    hardware: Hardware,
    num_ranks: int,
    sizes: dict[str, int | None],
    group: tuple[str, str, str],
    student_dtype: str,
    reason: str,
) -> None:
    made = settle(load().recipe, hardware, num_ranks=num_ranks, num_weights=sizes)
    assert summary(made.recipe) == dict.fromkeys(("rollout", "teachers.math", "teachers.code"), group)
    assert made.recipe.student.dtype == student_dtype
    assert reason in made.reasons["rollout.placement.type"]
    assert {"student.dtype", "teachers.code.engine.type", "rollout.engine.dtype"} <= made.reasons.keys()


@pytest.mark.parametrize("hardware", [NO_GPU, ONE])
def test_engines_that_work_beside_training_get_processes_of_their_own(load: Load, hardware: Hardware) -> None:
    made = settle(load("schedule.max_staleness=1").recipe, hardware, num_ranks=1, num_weights=SMALL)
    assert {kind for kind, _, _ in summary(made.recipe).values()} == {"local"}
    if hardware is NO_GPU:
        assert made.reasons["rollout.placement.type"] == "schedule.max_staleness 1: it works while the student trains"


def test_the_room_of_logits_counts(load: Load) -> None:
    made = settle(load("student.lm_head_memory_budget_mib=80000").recipe, ONE, num_ranks=1, num_weights=SMALL)
    assert {kind for kind, _, _ in summary(made.recipe).values()} == {"local"}


def test_reasons_of_an_engine(load: Load) -> None:
    def reason(hardware: Hardware, *overrides: str) -> str:
        made = settle(load(*overrides).recipe, hardware, num_ranks=1, num_weights=SMALL)
        return f"{made.recipe.teachers['math'].engine.type}: {made.reasons['teachers.math.engine.type']}"

    assert reason(NODE) == "vllm: 8 GPUs and vllm 0.32.0"
    assert reason(NO_VLLM) == "torch: vllm is not installed"
    assert reason(ONE) == reason(NODE, "teachers.math.placement={type: in_process}")
    assert reason(ONE) == "torch: it shares the student's GPU"
    on_ray = "teachers.math.placement={type: ray, num_gpus: 1, address: auto}"
    assert reason(NO_GPU, on_ray) == reason(NODE, on_ray) == "vllm: CUDA and vllm 0.32.0"
    assert reason(NODE, "teachers.math.placement={type: ray}") == "torch: placement.num_gpus is 0"
    assert reason(NODE, "loss.temperature=0.7") == ("torch: vllm scores at temperature 1 only, loss.temperature is 0.7")


@pytest.mark.parametrize(
    ("overrides", "engine"),
    [
        (["rollout.top_p=0.9"], "vllm"),
        (["rollout.temperature=0.7"], "vllm"),
        (["rollout.top_p=0.9", "rollout.temperature=0.7"], "torch"),
        (["rollout.top_k=5", "data.validation=[v]", "validation={temperature: 0.6}"], "torch"),
        (["rollout.top_k=5", "data.validation=[v]", "validation={temperature: 0}"], "vllm"),
    ],
)
def test_a_rollout_that_vllm_cannot_report_is_torch(load: Load, overrides: list[str], engine: str) -> None:
    recipe = load("rewards.default={type: exact_match}", *overrides).recipe
    assert settle(recipe, NODE, num_ranks=1).recipe.rollout.engine.type == engine


def test_what_is_said_stays_and_what_is_left_out_is_settled(load: Load) -> None:
    made = settle(
        load(
            "student.dtype=float32",
            "teacher_defaults.engine={dtype: float32}",
            "teachers.math.engine={type: torch, max_tokens_per_batch: 7}",
            "teachers.code.placement={type: external, urls: ['http://h:1']}",
            "rollout.engine={type: vllm, kv_cache_memory_bytes: 5}",
            "rollout.placement={type: local, gpus: [6]}",
        ).recipe,
        NODE,
        num_ranks=2,
    )
    recipe = made.recipe
    assert recipe.student.dtype == "float32"
    assert recipe.teachers["math"].engine == TorchEngineConfig(dtype="float32", max_tokens_per_batch=7)
    assert recipe.teachers["math"].placement == LocalConfig(type="local")
    assert recipe.teachers["code"].engine == VllmEngineConfig(type="vllm", dtype="float32")
    assert recipe.rollout.engine == VllmEngineConfig(type="vllm", dtype="bfloat16", kv_cache_memory_bytes=5)
    assert recipe.rollout.placement == LocalConfig(type="local", gpus=(6,))
    assert sorted(made.reasons) == [
        "rollout.engine.dtype", "rollout.on_new_weights", "teachers.code.engine.type", "teachers.math.placement.type",
        "weight_sync.type",
    ]  # fmt: skip
    assert made.reasons["teachers.math.placement.type"] == "5 of 8 GPUs are free, 1 wanted"


def test_vllm_is_given_room_to_score_the_longest_sequence(load: Load) -> None:
    engine = settle(load("rollout.max_response_length=16000").recipe, NODE, num_ranks=1).recipe.rollout.engine
    assert isinstance(engine, VllmEngineConfig) and engine.max_scoring_tokens == 16000 + 1024


def test_replicas_take_gpus_of_their_own_or_are_refused_with_the_table(load: Load) -> None:
    def shares(*overrides: str) -> list[tuple[int, ...]]:
        recipe = settle(load("student.parallel.data_parallel_size=4", *overrides).recipe, NODE, num_ranks=4).recipe
        return [
            one.gpus for one in place_on_machine(engine_groups(recipe), 4, 8).require().tenants if one.key != "student"
        ]

    assert shares() == [(4,), (5,), (6,)]
    assert shares("teachers.code.placement={type: local, gpus: [4]}") == [(5,), (6,), (4,)]
    table = (
        r"8 GPUs on node 0; trainer ranks: GPU 0, 1, 2, 3; rollout: any 1 x 1; teachers.math: any 4 x 1; teachers.code"
    )
    with pytest.raises(UserError, match=table):
        shares("teachers.math.replicas=4")


def test_a_rollout_that_shares_takes_no_gpu_of_its_own_and_nothing_is_in_process_beside_it(load: Load) -> None:
    shared = ("rollout.placement={type: local, share_gpus_with: student}", "schedule.max_staleness=0")
    on_cpu = settle(load(*shared).recipe, NO_GPU, num_ranks=1)
    assert {teacher.placement.type for teacher in on_cpu.recipe.teachers.values()} == {"local"}
    assert on_cpu.reasons["teachers.math.placement.type"].startswith("rollout.placement.share_gpus_with")
    recipe = settle(load("student.parallel.data_parallel_size=4", *shared).recipe, NODE, num_ranks=4).recipe
    assert recipe.rollout.engine.type == "vllm"
    places = place_on_machine(engine_groups(recipe), 4, 8).require()
    assert [one.gpus for one in places.tenants if one.key != "student"] == [(0,), (4,), (5,)]


def test_the_origin_says_why(load: Load) -> None:
    loaded = load()
    on_node = settled(loaded, NODE)
    assert "    type: vllm  # auto: 8 GPUs and vllm 0.32.0" in dump(on_node).splitlines()
    assert "  dtype: bfloat16  # auto: CUDA" in dump(on_node).splitlines()
    assert on_node.where("student", "dtype") == "recipe.yaml: student.dtype"
    Path("kept.yaml").write_text(dump(on_node))
    kept = load_recipe("kept.yaml")
    assert kept.recipe == on_node.recipe == settled(kept, NO_GPU).recipe
    changed = differences(kept.named, settled(loaded, NO_GPU).named)
    assert changed["student.dtype"] == ("bfloat16", "float32")


def test_a_choice_that_another_key_forbids_is_named(load: Load) -> None:
    pool = "teachers.math.placement={type: ray, num_gpus: 1, shared_pool: one}"
    assert settled(load(pool), NODE).recipe.teachers["math"].engine.type == "vllm"
    with pytest.raises(UserError, match=r"^recipe.yaml: teachers.math.placement.shared_pool is 'one', but only engine"):
        settled(load(pool), NO_VLLM)


def test_a_key_of_one_type_needs_that_type(load: Load) -> None:
    with pytest.raises(
        UserError, match=r"override\): rollout.engine.gpu_memory_utilization is a key of type vllm, .* set"
    ):
        load("rollout.engine={gpu_memory_utilization: 0.8}")
    with pytest.raises(UserError, match=r"teachers.math.placement.gpus is a key of type local"):
        load("teachers.math.placement.gpus=[1]")
    with pytest.raises(UserError, match=r"teacher_defaults.engine.max_tokens_per_batch is a key of type torch"):
        load("teacher_defaults.engine={type: auto, max_tokens_per_batch: 5}")
    known = load("teacher_defaults.engine.type=vllm", "teachers.math.engine={gpu_memory_utilization: 0.8}")
    assert known.recipe.teachers["math"].engine == VllmEngineConfig(type="vllm", gpu_memory_utilization=0.8)


def test_in_process_groups_of_the_recipe_count_towards_what_fits(load: Load) -> None:
    beside = {**SMALL, "teachers.code": 20_000_000_000}
    recipe = load("teachers.code.placement={type: in_process}").recipe
    assert settle(recipe, ONE, num_ranks=1, num_weights=SMALL).recipe.rollout.placement == InProcessConfig()
    made = settle(recipe, ONE, num_ranks=1, num_weights=beside).recipe
    assert made.rollout.placement == LocalConfig(type="local")


@pytest.mark.parametrize(
    ("wanted", "weights", "free", "expected"),
    [
        ("auto", 2 * GIB, 8 * GIB, True),
        ("auto", 16 * GIB, 32 * GIB, False),
        ("auto", 438 * GIB, 2048 * GIB, False),
        (True, 438 * GIB, 2048 * GIB, True),
        (True, 16 * GIB, 1 * GIB, True),
        (False, 1, 64 * GIB, False),
        ("auto", None, 64 * GIB, False),
        (True, None, 64 * GIB, False),
    ],
)
def test_a_teacher_is_compared_where_its_weights_fit(
    wanted: bool | str, weights: int | None, free: int, expected: bool
) -> None:
    compared, why = compares_with_transformers(wanted, weights_bytes=weights, free_memory_bytes=free)
    assert compared is expected and why
