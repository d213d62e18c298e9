"""Teacher and rollout groups in a recipe: defaults, ensembles, the default teacher, what fits together."""

from __future__ import annotations

import pytest

from mopd.base.hardware import Hardware
from mopd.base.types import UserError
from mopd.config.groups import TeacherConfig, TorchEngineConfig, VllmEngineConfig
from mopd.config.load import Loaded, dump, load_recipe
from mopd.config.machine.auto import settle
from mopd.config.machine.places import engine_groups
from mopd.config.placements import ExternalConfig, InProcessConfig, LocalConfig, RayConfig
from mopd.placement.engine_file import teacher_file
from tests.unit.config.conftest import Write

TWO = """\
run_dir: runs/two
student: {model: models/student}
teacher_defaults:
  engine: {type: vllm, dtype: float32, max_model_len: 512}
  placement: {type: local, num_threads: 1}
  replicas: 2
  routing: {request_timeout_s: 30}
teachers:
  math: {model: models/math, domains: [math]}
  code:
    model: models/code
    domains: [code]
    replicas: 3
    engine: {max_model_len: 1024}
    placement: {type: in_process}
data: {train: [train.jsonl], validation: [validation.jsonl]}
schedule: {steps: 3, prompts_per_step: 4}
rewards: {default: {type: exact_match}}
validation: {every_steps: 1}
"""


def load(write: Write, *overrides: str, text: str = TWO) -> Loaded:
    return load_recipe(write(text), overrides)


def refusal(write: Write, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load(write, *overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_teachers_inherit_the_defaults_key_by_key(write: Write) -> None:
    teachers = load(write).recipe.teachers
    assert teachers["math"].engine == VllmEngineConfig(type="vllm", dtype="float32", max_model_len=512)
    assert teachers["math"].placement == LocalConfig(type="local", num_threads=1)
    assert teachers["math"].replicas == 2
    assert teachers["code"].engine == VllmEngineConfig(type="vllm", dtype="float32", max_model_len=1024)
    assert teachers["code"].placement == InProcessConfig()
    assert teachers["code"].replicas == 3
    assert teachers["code"].routing.request_timeout_s == 30


def test_an_engine_of_another_type_takes_nothing_from_the_defaults(write: Write) -> None:
    teachers = load(write, "teachers.math.engine={type: torch, max_tokens_per_batch: 7}").recipe.teachers
    assert teachers["math"].engine == TorchEngineConfig(max_tokens_per_batch=7)


def test_a_teachers_own_key_wins_whatever_file_or_flag_sets_the_default(write: Write) -> None:
    write(TWO, "base.yaml")
    loaded = load_recipe(write("base: base.yaml\nteacher_defaults: {replicas: 5}\n", "over.yaml"), ["seed=1"])
    assert [teacher.replicas for teacher in loaded.recipe.teachers.values()] == [5, 3]
    by_flag = load_recipe("over.yaml", ["teacher_defaults.replicas=7"]).recipe.teachers
    assert [teacher.replicas for teacher in by_flag.values()] == [7, 3]


def test_inherited_values_show_where_they_stand(write: Write) -> None:
    loaded = load(write)
    assert loaded.origins["teachers.math.replicas"] == "recipe.yaml:6"
    assert loaded.origins["teachers.code.replicas"] == "recipe.yaml:13"
    assert loaded.origins["teachers.math.engine.dtype"] == "recipe.yaml:4"
    assert loaded.origins["teachers.math.engine.max_num_seqs"] == "default"
    assert "  math:\n    engine:\n      type: vllm  # recipe.yaml:4" in dump(loaded)


@pytest.mark.parametrize("key", ["model", "domains", "weight", "default"])
def test_what_makes_a_teacher_itself_is_no_default(write: Write, key: str) -> None:
    assert f"unknown key 'teacher_defaults.{key}'" in refusal(write, f"teacher_defaults.{key}=x")


def test_defaults_that_clash_are_no_error_while_every_teacher_overrides_one_side(write: Write) -> None:
    clash = "teacher_defaults.placement={type: local, gpus: [0, 1, 2]}"
    overrides = ("teachers.math.replicas=3", "teachers.code.replicas=3", "teachers.code.placement={type: local}")
    assert [t.placement.gpus for t in load(write, clash, *overrides).recipe.teachers.values()] == [(0, 1, 2)] * 2
    message = refusal(write, clash, *overrides[1:])
    assert "teachers.math.placement.gpus names 3 GPUs, but 2 replicas" in message


def test_several_teachers_of_a_domain_need_weights(write: Write) -> None:
    assert "teachers.math.domains and teachers.code.domains name 'code', but teachers.code.weight is absent" in refusal(
        write, "teachers.math.domains=[math, code]", "teachers.math.weight=3"
    )


def test_shares_of_an_ensemble_add_up_to_one(write: Write) -> None:
    assignment = load(
        write, "teachers.math.domains=[math, code]", "teachers.math.weight=3", "teachers.code.weight=1"
    ).recipe.assignment
    assert assignment.teachers_of("code") == ("math", "code")
    assert assignment.weights_of("code") == (0.75, 0.25)
    assert assignment.weights_of("math") == (1.0,)
    assert assignment.max_teachers == 2
    assert assignment.weight_table(["math", "code"]) == ((1.0, 0.0), (0.75, 0.25))


def test_only_a_named_default_teacher_answers_for_other_domains(write: Write) -> None:
    with pytest.raises(UserError, match=r"no teacher answers for domain 'law' \(known: 'code', 'math'\)"):
        load(write).recipe.assignment.teachers_of("law")
    recipe = load(write, "teachers.other={model: m, default: true}").recipe
    assert recipe.assignment.teachers_of("law") == ("other",)
    assert recipe.assignment.teachers_of("math") == ("math",)
    assert recipe.assignment.domains_among(["law", "math"]) == ("code", "law", "math")
    assert recipe.assignment.domains_of("other", ["law", "math"]) == ("law",)
    assert load(write).recipe.assignment.domains_among(["law"]) == ("code", "math")


REFUSALS = {
    "teachers.x={model: m}": "teachers.x.domains is empty: name at least one value",
    'teachers."math.1"={model: m, domains: [law]}': "and 'math.1' is the name of one and of a teacher",
    "teachers.math.weight=0": "teachers.math.weight is 0.0: set a positive number",
    "loss.temperature=0.5": "loss.temperature is 0.5, but teachers.math runs vLLM, which scores at temperature 1 only",
    "teachers.math.placement={type: external, urls: []}": "urls is empty",
    "teachers.math.placement={type: external, urls: ['host:1']}": "urls has 'host:1': begin it with http://",
    "teachers.code.placement={type: external, urls: ['http://a', 'http://b']}": "but placement.urls names 2",
    "rollout.placement={type: external, urls: ['http://a'], protocol: openai}": "such a server takes no weight updates",
    "teachers.math.placement.gpus=[0, 1, 2]": "placement.gpus names 3 GPUs, but 2 replicas of tensor_parallel_size x",
    "teachers.math.placement={type: ray, shared_pool: p}": "placement.shared_pool is 'p', but only engine.type vllm",
    "rollout.placement={type: ray, shared_pool: p}": "shared_pool is 'p': only teachers take turns",
    "rollout.routing.max_inflight_tokens=10": "max_inflight_tokens is 10 and max_tokens_per_request",
    "rollout.engine={dtype: float16}": "rollout.engine.dtype: expected one of auto, float32, bfloat16",
    "teachers.math.engine.tensor_parallel_size=0": "tensor_parallel_size is 0: set 1 or more",
    "rollout={engine: {type: vllm}, temperature: 0.5, top_p: 0.9}": "reports log-probs before cuts and penalties",
    "rollout={engine: {type: vllm}, temperature: 0.5, min_p: 0.1}": "temperature is 0.5 and rollout.min_p is 0.1, but",
    "rollout.placement={type: external, urls: ['http://a'], protocol: sglang}": "is 'sglang': such a server takes no",
    "rollout={engine: {type: sglang}, presence_penalty: 0.5}": "engine.type sglang reports log-probs after penalties",
    "rollout.stop=['']": "rollout.stop: is empty",
    "rollout.stop=[a, a]": "stop names 'a' twice",
    f"rollout.stop=[{'a' * 257}]": "stop has a text of 257 characters: name at most 256",
    "rollout.stop_text=cut": "stop_text is 'cut', but stop is empty",
    "rollout.on_truncated=mask_tail": "on_truncated is 'mask_tail' and masked_tail is None: set masked_tail with",
    "rollout.masked_tail=4": "on_truncated is 'train' and masked_tail is 4: set masked_tail with mask_tail",
    "rollout={on_truncated: mask_tail, masked_tail: 8, max_response_length: 8}": "masked_tail is 8 and max_response_l",
    "rollout={on_truncated: mask_tail, masked_tail: 2, environment: {type: python_tool}}": "environment.type 'pyth",
    "on_failure=ignore": "on_failure: expected one of stop, replace",
    "teachers.math.placement.share_gpus_with=student": "share_gpus_with is set: only the rollout shares",
    "rollout.placement={type: local, share_gpus_with: student}": "but teachers.code.placement is in_process, where",
    "rollout.placement={type: local, share_gpus_with: student, gpus: [0]}": "gpus is [0], but share_gpus_with: student",
}


@pytest.mark.parametrize("override", REFUSALS)
def test_what_does_not_fit_is_named(write: Write, override: str) -> None:
    assert REFUSALS[override] in refusal(write, override)


def test_what_sglang_cannot_is_refused_by_its_key(write: Write) -> None:
    plain = TWO.replace("type: vllm, dtype: float32, max_model_len: 512", "type: sglang")
    plain = plain.replace("    engine: {max_model_len: 1024}\n", "")
    assert load(write, text=plain).recipe.teachers["math"].gpus_per_replica == 1
    for override, said in {
        "teachers.math.payload=student_topk": "teachers.math.engine.type is 'sglang', a server that gives log-probs of",
        "loss={type: topk_reverse_kl, always_ids: [3]}": "loss.always_ids is set, but teachers.math.engine.type is 'sg",
        "loss.temperature=0.5": "teachers.math runs SGLang, which scores at temperature 1 only",
        "teachers.math.placement={type: ray, shared_pool: p}": "shared_pool is 'p', but only engine.type vllm",
    }.items():
        with pytest.raises(UserError) as caught:
            load(write, override, text=plain)
        assert said in str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("schedule.max_staleness=1", "schedule.max_staleness is 1, but with rollout.placement.share_gpus_with student"),
        ("rollout.replicas=3", "need 3 GPUs, but rollout.placement.share_gpus_with has those of 2 trainer ranks"),
        (
            "weight_sync={type: collective}",
            "puts two processes on one GPU, which NCCL refuses: set weight_sync.type: ipc",
        ),
    ],
)
def test_what_cannot_take_turns_is_refused(write: Write, override: str, message: str) -> None:
    shared = (
        "rollout.placement={type: local, share_gpus_with: student}",
        "student.parallel.tensor_model_parallel_size=2",
        "teachers.code.placement.type=local",
    )
    assert load(write, *shared, "rollout.replicas=2").recipe.shares_gpus
    assert message in refusal(write, *shared, override)


def test_two_default_teachers_are_refused(write: Write) -> None:
    both = ("teachers.math.default=true", "teachers.code.default=true")
    assert "teachers.code.default is true and teachers.math.default too: keep one" in refusal(write, *both)


def test_tensor_parallel_replicas_need_their_gpus_on_ray() -> None:
    group = {"model": "m", "domains": ("a",), "engine": VllmEngineConfig(type="vllm", tensor_parallel_size=4)}
    with pytest.raises(
        ValueError, match=r"placement.num_gpus is 1 but engine.tensor_parallel_size x pipeline_parallel_size is 4: set"
    ):
        TeacherConfig(**group, placement=RayConfig(type="ray", num_gpus=1))
    TeacherConfig(**group, placement=RayConfig(type="ray", num_gpus=4))


def test_urls_are_the_replicas_of_external_servers() -> None:
    placement = ExternalConfig(type="external", urls=("http://a:1", "http://b:1"))
    assert TeacherConfig(model="m", domains=("a",), placement=placement).num_replicas == 2


ADAPTERS = """\
run_dir: runs/two
student: {model: models/student}
teachers:
  math: {model: models/base, adapter: adapters/math, domains: [math]}
  code: {model: models/base, adapter: adapters/code, domains: [code], payload: union}
  law: {model: models/base, domains: [law]}
data: {train: [train.jsonl]}
schedule: {steps: 3, prompts_per_step: 4}
loss: {type: topk_forward_kl, top_k: 8}
"""


def adapter_groups(write: Write, *overrides: str) -> list[str]:
    return list(engine_groups(load(write, *overrides, text=ADAPTERS).recipe))


def test_adapters_of_one_base_share_a_group(write: Write) -> None:
    """Wherever all that places and runs them agrees; never with a teacher that has no adapter."""
    every = ["rollout", "teachers.math", "teachers.code", "teachers.law"]
    recipe = load(write, text=ADAPTERS).recipe
    assert list(engine_groups(recipe)) == ["rollout", "teachers.math", "teachers.law"]
    assert recipe.on_group_of("code") == ("math", "code") and recipe.on_group_of("law") == ("law",)
    made = settle(recipe, Hardware(), num_ranks=1).recipe
    file = teacher_file(made, "math")
    assert teacher_file(made, "code") == file
    assert [*file.adapters] == ["math", "code"] and file.name == "math" and file.max_given == 8
    for change in (
        "share=false",
        "model=models/other",
        "replicas=2",
        "engine={type: torch}",
        "routing.max_tokens_per_request=9",
    ):
        assert adapter_groups(write, f"teachers.code.{change}") == every
    assert adapter_groups(write, "teachers.code.share=true", "teachers.math.share=true") == [
        every[0],
        every[1],
        every[3],
    ]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            ("math.share=true", "code.share=true", "code.model=models/other"),
            "but their model differs: 'models/base' and",
        ),
        (
            ("math.share=true", "code.share=true", "code.engine={type: torch}"),
            "are true, but their engine differs: give",
        ),
        (("law.share=true",), "teachers.law.share is true, but adapter is absent: remove share"),
        (("math.model=student", "math.refresh=frozen"), "but refresh makes the student the teacher: remove one"),
    ],
)
def test_adapters_that_cannot_share_are_refused(write: Write, change: tuple[str, ...], line: str) -> None:
    with pytest.raises(UserError) as caught:
        load(write, *(f"teachers.{own}" for own in change), text=ADAPTERS)
    assert line in str(caught.value) and "\n" not in str(caught.value)
