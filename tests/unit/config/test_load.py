"""Recipes load strictly, merge by the written order, and print to something that loads back."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from mopd.base.types import UserError
from mopd.config.load import Loaded, differences, dump, load_recipe, to_tree
from mopd.config.losses import KLLossConfig, TopKLossConfig
from mopd.config.rewards import CustomRewardConfig
from tests.fixtures.recipe import RECIPE

Write = Callable[..., str]


def refusal(path: str, *overrides: str) -> str:
    """The one line that a recipe is refused with."""
    with pytest.raises(UserError) as caught:
        load_recipe(path, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_values_and_origins(write: Write) -> None:
    loaded = load_recipe(write(), ["seed=7"])
    assert loaded.recipe.student.optimizer.lr == 1e-6  # YAML 1.1 reads this as text
    assert loaded.recipe.teachers["math"].domains == ("math",)
    assert loaded.recipe.seed == 7
    assert loaded.origins["student.optimizer.lr"] == "recipe.yaml:4"
    assert loaded.origins["seed"] == "override"
    assert loaded.origins["student.optimizer.min_lr"] == "default"
    assert loaded.sources == ("recipe.yaml",)


def test_precedence_default_base_recipe_set(write: Write) -> None:
    write(RECIPE + "seed: 1\ncheckpoint: {every_steps: 11, keep_last: 11}\n", "base/tiny.yaml")
    top = write("base: ../base/tiny.yaml\nseed: 2\ncheckpoint: {keep_last: 12}\n", "mine/top.yaml")
    recipe = load_recipe(top, ["checkpoint.keep_last=13", "seed=3", "seed=4"]).recipe
    assert recipe.checkpoint.keep_best is True  # default
    assert recipe.checkpoint.every_steps == 11  # base
    assert recipe.checkpoint.keep_last == 13  # an override over recipe over base
    assert recipe.seed == 4  # the later one
    loaded = load_recipe(top)
    assert (loaded.recipe.seed, loaded.recipe.checkpoint.keep_last) == (2, 12)
    assert loaded.origins["checkpoint.every_steps"] == "base/tiny.yaml:12"
    assert loaded.origins["checkpoint.keep_last"] == "mine/top.yaml:3"
    assert loaded.sources == ("base/tiny.yaml", "mine/top.yaml")


def test_teachers_merge_by_name_and_lists_are_replaced(write: Write) -> None:
    write(name="base.yaml")
    top = write(
        "base: base.yaml\nteachers:\n  math: {replicas: 2}\n  code: {model: models/code, domains: [code]}\n"
        "data: {train: [other.jsonl, more.jsonl]}\n"
    )
    recipe = load_recipe(top).recipe
    assert list(recipe.teachers) == ["math", "code"]
    assert (recipe.teachers["math"].model, recipe.teachers["math"].replicas) == ("models/math", 2)
    assert recipe.data.train == ("other.jsonl", "more.jsonl")
    assert recipe.data.validation == ("validation.jsonl",)


def test_an_empty_mapping_of_names_empties_the_one_below_and_an_empty_section_says_nothing(write: Write) -> None:
    write(RECIPE + "loss: {top_k: 8}\n", "base.yaml")
    top = write("base: base.yaml\ndata: {domain_weights: {math: 2, code: 1}}\nloss: {}\n")
    recipe = load_recipe(top).recipe
    assert (recipe.data.fixed_weights, recipe.loss.top_k) == ({"math": 2, "code": 1}, 8)
    assert load_recipe(top, ["data.domain_weights={}"]).recipe.data.fixed_weights == {}


def test_section_of_another_type_replaces_unless_it_has_the_same_keys(write: Write) -> None:
    write(RECIPE + "loss: {type: topk_reverse_kl, top_k: 8, tail: none}\n", "base.yaml")
    merged = load_recipe(write("base: base.yaml\nloss: {top_k: 9}\n")).recipe.loss
    assert merged == TopKLossConfig(type="topk_reverse_kl", top_k=9, tail="none")
    assert load_recipe(write("base: base.yaml\nloss: {type: k2}\n")).recipe.loss == KLLossConfig(type="k2")
    sibling = load_recipe("base.yaml", ["loss.type=topk_jsd", "loss.beta=0.3"]).recipe.loss
    assert sibling == TopKLossConfig(type="topk_jsd", top_k=8, tail="none", beta=0.3)


def test_type_that_equals_the_default_merges(write: Write) -> None:
    """The base leaves ``type`` out, which means the default's; naming that type above it changes nothing."""
    write(RECIPE + "loss: {top_k: 8}\n", "base.yaml")
    assert load_recipe(write("base: base.yaml\nloss: {type: topk_forward_kl}\n")).recipe.loss == TopKLossConfig(top_k=8)
    assert load_recipe(write("base: base.yaml\nloss: {type: k3}\n")).recipe.loss == KLLossConfig(type="k3")


def test_type_key_in_a_free_form_section_is_a_plain_key(write: Write) -> None:
    write(RECIPE + "# \n", "base.yaml")
    loaded = load_recipe(
        write("base: base.yaml\nstudent: {megatron_overrides: {type: a, x: 1}}\n"),
        ["student.megatron_overrides.type=b", "student.megatron_overrides.eps=1e-5"],
    )
    assert loaded.recipe.student.megatron_overrides == {"type": "b", "x": 1, "eps": 1e-5}


def test_unions_inside_named_sections(write: Write) -> None:
    custom = "{type: custom, path: r.py, function: f, timeout_s: 3}"
    recipe = load_recipe(write(), [f"rewards.math={custom}"]).recipe
    reward = recipe.rewards["math"]
    assert reward == CustomRewardConfig(type="custom", path="r.py", function="f", timeout_s=3.0)
    assert isinstance(reward, CustomRewardConfig) and isinstance(reward.timeout_s, float)


def test_null_takes_an_optional_section_away(write: Write) -> None:
    off = ["validation=null", "checkpoint.keep_best=false", "preflight.require_better_teacher=false"]
    assert load_recipe(write(), off).recipe.validation is None
    adaptive = "data.domain_weights=adaptive"
    assert load_recipe(write(), [adaptive]).recipe.data.fixed_weights == {}
    said = "data.domain_weights is 'adaptive', but validation is absent, which measures the head-room: add validation"
    assert said in refusal(write(), *off, adaptive)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "loss={type: topk_forward_kl, baseline: domain}",
            "unknown key 'loss.baseline'; only type policy_gradient has it: remove it, or set loss.type",
        ),
        ("student.optimizer.lrr=1", "unknown key 'student.optimizer.lrr'; did you mean 'lr'?"),
        (
            "student.tensor_model_parallel_size=2",
            "unknown key 'student.tensor_model_parallel_size'; "
            "did you mean 'student.parallel.tensor_model_parallel_size'?",
        ),
        (
            "student.optimizer.lr_warmup_steps=3",
            "student.optimizer.lr_warmup_steps 3 is not below schedule.steps 3: set fewer",
        ),
        ("schedule.steps=many", "schedule.steps: expected a whole number, got 'many'"),
        ("schedule.steps=true", "schedule.steps: expected a whole number, got true"),
        ("student.optimizer.lr=.inf", "student.optimizer.lr: expected a number or null, got inf"),
        ("student.model=3", "student.model: expected text, got 3"),
        ("student.dtype=fp8", "student.dtype: expected one of auto, float32, bfloat16, got 'fp8'"),
        ("checkpoint.keep_best=1", "checkpoint.keep_best: expected true or false, got 1"),
        ("data.train=train.jsonl", "data.train: expected a list (text or a section each), got 'train.jsonl'"),
        ("data.train=[1]", "data.train[0]: expected text or a section, got 1"),
        ("data.seed=3", "unknown key 'data.seed'; the recipe's seed also shuffles"),
        (
            "loss={type: policy_gradient, advantage: k3}",
            "unknown key 'loss.advantage'; it is k1, the only unbiased one",
        ),
        ("rollout=null", "rollout: expected a section, got null"),
        ("rollout={engine: torch}", "rollout.engine: expected a section, got 'torch'"),
        (
            "data.domain_weights=[1]",
            "data.domain_weights: expected a section of named values or one of adaptive, got [1]",
        ),
        ("data.adaptive_floor=0", "data.adaptive_floor is 0.0: set a number in (0, 1]"),
        (
            "loss.domain_budget={math: 0.5, code: 0.4}",
            "loss.domain_budget sums to 0.9 (math 0.5, code 0.4): set shares",
        ),
        ("loss.domain_budget={math: 1.5, code: -0.5}", "loss.domain_budget.math is 1.5: set a number in (0, 1]"),
        (
            "loss={aggregation: domain_mean, domain_budget: {math: 1}}",
            "loss.domain_budget is set and loss.aggregation is 'domain_mean', which sets the domains' shares",
        ),
        ("data.domain_weights.math=much", "data.domain_weights.math: expected a number, got 'much'"),
        ("run_dir={a: 1}", "run_dir: expected text, got a section"),
        ("loss.type=topk_kl", "loss.type: unknown type 'topk_kl'; did you mean 'topk_jsd'?"),
        ("rewards.math={path: r.py}", "missing key type: set one of exact_match, math, multiple_choice, regex"),
        ("rewards.math={type: regex, pattern: '(a'}", "rewards.math.pattern is no regular expression of Python"),
        ("rewards.math={type: regex, pattern: '(a)(b)'}", "rewards.math.pattern has 2 groups: keep the answer's one"),
        ("rewards=null", "expected a section of named values, got null; {} empties it"),
        ("student.precision=bf16", "unknown key 'student.precision'; the weights' numbers are of student.dtype"),
        (
            "data.train.0.path=a.jsonl",
            "data.train: expected a list (text or a section each), got numbers of items: give the",
        ),
        (
            "slurm.options.0=--x",
            "slurm.options: expected a list (text each), got numbers of items: give the whole list",
        ),
        (
            "validation.reward={type: exact_match}",
            "unknown key 'validation.reward'; rewards are a section of their own, by domain: set rewards.default",
        ),
        (
            "validation.domain_rewards={}",
            "unknown key 'validation.domain_rewards'; rewards are a section of their own, by domain: set",
        ),
        (
            "validation.samples_per_prompt=4",
            "validation.samples_per_prompt is 4, but temperature is 0, so all responses",
        ),
        (
            "validation.watch=[math]",
            "validation.watch names 'math', but teachers.math.domains does too: leave it in one",
        ),
        ("teachers.code={domains: [code]}", "missing key teachers.code.model"),
        ("loss.type=k1", "loss.type: unknown type 'k1'; it cannot be a differentiable loss"),
        ("data.domain_weights.math=-1", "data.domain_weights.math is -1.0: set a positive number"),
        ("loss={type: k2, correction: {type: none}}", "loss.correction.type is 'none' and sequence is absent"),
        ("loss={type: k2, correction: {type: tis, low: 2}}", "loss.correction.high is 2.0 and low is 2.0: set high"),
        (
            "loss={type: policy_gradient, correction: {type: tis, sequence: {low: 1.2}}}",
            "loss.correction.sequence.high is 1.1 and low is 1.2: set high above low",
        ),
        (
            "loss.correction={type: tis}",
            "loss.correction is set, but topk_forward_kl without task_reward_weight and tail: sampled takes",
        ),
        ("rollout.horizon={start: 0}", "rollout.horizon.start is 0: set 1 or more"),
        ("rollout.horizon={start: 8, end: 16}", "rollout.horizon.end is 16 and steps is absent: set both"),
        ("rollout.horizon={start: 8, steps: 4}", "rollout.horizon.steps is 4 and end is absent: set both"),
        ("rollout.horizon={start: 8, end: 4, steps: 2}", "rollout.horizon.end is 4 and start is 8: a horizon grows"),
        ("rollout={max_response_length: 8, horizon: {start: 9}}", "rollout.horizon ends at 9 tokens, max_response"),
        (
            "rollout={max_response_length: 8, horizon: {start: 2, end: 9, steps: 3}}",
            "rollout.horizon ends at 9 tokens, max_response_length is 8: lower horizon.end or horizon.start, or raise",
        ),
        ("loss.tokens={largest: divergence}", "missing key loss.tokens.share"),
        ("loss.tokens={largest: divergence, share: 0}", "loss.tokens.share is 0.0: set a number in (0, 1]"),
        ("loss.tokens={largest: margin, share: 0.5}", "loss.tokens.largest: expected one of"),
        ("loss.tokens=half", "loss.tokens: expected"),
    ],
)
def test_refusals_name_file_path_and_cure(write: Write, override: str, line: str) -> None:
    refused = refusal(write(), override)
    assert refused.startswith("recipe.yaml (override): ")
    assert line in refused


def test_refusals_name_the_line_of_the_file_that_holds_the_key(write: Write) -> None:
    write(RECIPE.replace("prompts_per_step: 4", "promts_per_step: 4"), "base.yaml")
    assert refusal(write("base: base.yaml\n")).startswith("base.yaml:8: unknown key 'schedule.promts_per_step'")
    assert refusal(write(RECIPE + "rollout:\n  top_p: a\n")).startswith("recipe.yaml:12: rollout.top_p: expected")
    assert refusal(write(RECIPE + "loss:\n\n  top_k: 0\n")).startswith("recipe.yaml:13: loss.top_k is 0")
    cross = refusal(write(RECIPE + "loss:\n  type: k2\nrollout: {top_p: 0.5}\n"))
    assert cross.startswith("recipe.yaml:12: loss.type 'k2' estimates")


def test_a_horizon_belongs_to_the_step_of_a_prompts_number(write: Write) -> None:
    grows = ["rollout={max_response_length: 100, horizon: {start: 10, end: 25, steps: 4}}"]
    recipe = load_recipe(write(), [*grows, "schedule.prompts_per_step=4"]).recipe
    limits = [recipe.response_limit(number) for number in range(28)]
    assert limits == [10] * 4 + [13] * 4 + [17] * 4 + [21] * 4 + [25] * 12
    fixed = load_recipe("recipe.yaml", ["rollout={max_response_length: 100, horizon: {start: 10}}"]).recipe
    assert {fixed.response_limit(number) for number in (0, 5000)} == {10}
    assert load_recipe("recipe.yaml").recipe.response_limit(5) == 1024
    refused = refusal("recipe.yaml", *grows, *TASK)
    assert "loss.task_reward_weight is above 0, but rollout.horizon cuts responses before the answers" in refused


TASK = ["loss.task_reward_weight=0.5", "rollout.samples_per_prompt=2", "rewards.default={type: exact_match}"]


@pytest.mark.parametrize(
    ("loss", "what"),
    [
        *(([f"loss.type={name}"], f"loss.type '{name}'") for name in ("k2", "k3", "k3_reverse", "policy_gradient")),
        (TASK, "loss.task_reward_weight 0.5"),
    ],
)
def test_old_samples_of_a_sampled_loss_need_a_correction(write: Write, loss: list[str], what: str) -> None:
    stale = ["schedule.max_staleness=2", *loss]
    assert refusal(write(), *stale) == (
        f"recipe.yaml (override): schedule.max_staleness is 2, but {what} estimates an expectation over "
        "the current student's own samples and loss.correction is absent: set it, for example loss.correction: {type: "
        "icepop}, or schedule.max_staleness: 0"
    )
    for correction in ("{type: icepop}", "{type: none, sequence: {}}"):
        remote = "teacher_defaults.placement={type: local}", "rollout.placement={type: local}"
        load_recipe("recipe.yaml", [*stale, f"loss.correction={correction}", *remote])


def test_a_sampled_loss_of_a_rounded_rollout_needs_a_correction(write: Write) -> None:
    rounded = ["rollout.engine={type: vllm, extra: {quantization: fp8}}", "rollout.placement={type: local}"]
    refused = refusal(write(), *rounded, "loss.type=k2")
    assert "rollout.engine.extra.quantization is 'fp8', but loss.type 'k2' estimates an expectation" in refused
    assert refused.endswith("{type: icepop}, or leave it out")
    load_recipe("recipe.yaml", [*rounded, "loss.type=k2", "loss.correction={type: icepop}"])
    load_recipe("recipe.yaml", rounded)


def test_missing_keys_are_all_named(write: Write) -> None:
    assert refusal(write("run_dir: x\nseed: 1\n")) == ("recipe.yaml: missing keys student, teachers, data, schedule")
    text = RECIPE.replace("steps: 3, prompts_per_step: 4", "max_staleness: 0")
    assert refusal(write(text)) == "recipe.yaml:8: missing keys schedule.steps, schedule.prompts_per_step"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: 1\nb: 2\na: 3\n", "recipe.yaml:3: key 'a' repeats line 1: remove one of them"),
        ("data:\n  x: 1\n  x: 1\n", "recipe.yaml:3: key 'x' repeats line 2: remove one of them"),
        ("on: 1\n", "recipe.yaml:1: key True is not text: put it in quotes"),
        ("a: &x {b: {c: *x}}\n", "recipe.yaml:1: an alias refers to the value that holds it"),
        ("", "recipe.yaml: expected keys with values"),
        ("- a\n", "recipe.yaml: expected keys with values"),
        ("base: [a]\n", "recipe.yaml:1: base: expected the path of one recipe file"),
        ("base: {type: x}\n", "recipe.yaml:1: base: expected the path of one recipe file"),
    ],
)
def test_unreadable_files(write: Write, text: str, line: str) -> None:
    assert refusal(write(text)).startswith(line)


@pytest.mark.parametrize("override", ["steps", "=1", "a..b=1", ".a=1", "a.=1", "student.model=[1, 2"])
def test_unreadable_overrides(write: Write, override: str) -> None:
    assert refusal(write(), override).startswith("override")


AWKWARD = [
    'data.domain_weights."a.b=c"=1e-3',
    "data.domain_weights.yes=2",
    'data.columns={prompt: p, domain: "a: b # c \\"d"}',
    "data.columns={prompt: '1e-6', domain: d}",
    "data.columns.extra_info='null'",
    "rollout.top_k=-1",
    'student.megatron_overrides={a: 1e-5, b: [1e-3, "x\\ny", null], c: {d: true, e: {}}, f: "\\U0001F600"}',
    "student.optimizer.adam_eps=1.2345678901234567e-11",
    "loss={type: policy_gradient, correction: {type: tis, sequence: {low: 0.99}}}",
    "metrics.wandb={project: p}",
]


@pytest.mark.parametrize("overrides", [[], AWKWARD])
def test_dump_loads_back_identically(write: Write, overrides: list[str]) -> None:
    loaded = load_recipe(write(), overrides)
    again = load_recipe(write(dump(loaded), "resolved.yaml"))
    assert again.recipe == loaded.recipe
    assert "default" not in again.origins.values()
    plain = load_recipe(write(dump(loaded, origins=False), "plain.yaml"))
    assert plain.recipe == loaded.recipe
    as_json = load_recipe(write(json.dumps(to_tree(loaded.recipe), ensure_ascii=False), "resolved.json"))
    assert as_json.recipe == loaded.recipe


def test_dump_shows_where_each_value_comes_from(write: Write) -> None:
    lines = dump(load_recipe(write(), ["seed=1"])).splitlines()
    assert "run_dir: runs/one  # recipe.yaml:1" in lines
    assert "seed: 1  # override" in lines
    assert "    lr: 1.0e-06  # recipe.yaml:4" in lines
    assert "    min_lr: 0.0  # default" in lines


def test_where_heads_an_error_line(write: Write) -> None:
    loaded: Loaded = load_recipe(write(), ["seed=1"])
    assert loaded.where("student", "model") == "recipe.yaml:3: student.model"
    assert loaded.where("rollout", "top_p") == "recipe.yaml: rollout.top_p"
    assert loaded.where("student", "parallel") == "recipe.yaml: student.parallel"
    assert loaded.where("seed") == "recipe.yaml (override): seed"


def test_differences(write: Write) -> None:
    one = load_recipe(write()).recipe
    two = load_recipe("recipe.yaml", ["seed=1", "loss.type=k2", "data.train=[x]"]).recipe
    found = differences(one, two)
    assert found["seed"] == (0, 1)
    assert found["data.train"] == (["train.jsonl"], ["x"])
    assert found["loss.tail"] == (None, None)  # only one of the two losses has the key
    assert "run_dir" not in found
    assert differences(one, one) == {}


def test_what_staleness_asks_of_the_rest(write: Write) -> None:
    assert refusal(write(), "schedule.sync_every_steps=3", "schedule.max_staleness=1") == (
        "recipe.yaml (override): schedule.sync_every_steps is 3, so samples become 2 steps old, but max_staleness is "
        "1: set max_staleness to 2 or more"
    )
    assert "rollout.on_new_weights is 'continue', but with schedule.max_staleness 0" in refusal(
        write(), "rollout.on_new_weights=continue"
    )
    assert refusal(write(), "schedule.max_staleness=1", "teachers.math.placement={type: in_process}") == (
        "recipe.yaml (override): schedule.max_staleness is 1, but teachers.math.placement is in_process, on rank 0 "
        "between training steps: set teachers.math.placement.type: local, or max_staleness: 0"
    )
    load_recipe(write(), ["schedule.max_staleness=2", "schedule.sync_every_steps=3"])


def test_what_stored_samples_ask_of_the_rest(write: Write) -> None:
    scored = ["data.scored=[a]", "schedule.on_policy_fraction=0.5"]
    for one, told in ((scored[0], "absent, and data.scored names 1"), (scored[1], "0.5, and data.scored names 0")):
        assert f"schedule.on_policy_fraction is {told} folders: set both, or neither" in refusal(write(), one)
    remote = ["teacher_defaults.placement={type: local}", "rollout.placement={type: local}", "schedule.max_staleness=1"]
    assert "schedule.max_staleness is 1, but with schedule.on_policy_fraction 0 nothing is drawn" in refusal(
        write(), *scored, *remote, "schedule.on_policy_fraction=0"
    )
    assert refusal(write(), *scored, "loss.type=k2").startswith(
        "recipe.yaml (override): data.scored names samples of other weights, but loss.type 'k2' estimates"
    )
    assert load_recipe("recipe.yaml", [*scored, *remote]).recipe.stored_share == 0.5
    load_recipe("recipe.yaml", [*scored, "loss={type: k2, correction: {type: tis}}"])
    load_recipe("recipe.yaml", [scored[0], "schedule.on_policy_fraction=1", "loss.type=k2"])
