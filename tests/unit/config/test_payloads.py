"""Payloads: what they ask of a teacher, and which pairs of keys are refused when a recipe is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from mopd.base.types import HIDDEN_FIELD, LOSS_FIELDS, ROLLOUT_FIELDS, TOKEN_FIELD, UserError
from mopd.config.load import load_recipe
from mopd.config.payloads import Asked
from mopd.config.schema import Recipe

FULL = ["teacher_defaults.payload=hidden", "loss={type: full_reverse_kl}"]
REVERSE = "loss={type: topk_reverse_kl, top_k: 4, tail: sampled"


def recipe_of(folder: Path, *overrides: str) -> Recipe:
    tree = {
        "run_dir": "runs/x",
        "student": {"model": "m"},
        "teachers": {name: {"model": name, "domains": [name]} for name in ("a", "b")},
        "data": {"train": ["x.parquet"]},
        "schedule": {"steps": 10, "prompts_per_step": 8},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(tree))
    return load_recipe(path, list(overrides)).recipe


PAIR = ["teachers.a.weight=1", "teachers.b={model: b, domains: [a, b], weight: 1}"]
JUDGED = ["validation={every_steps: 5}", "data.validation=[x.parquet]", "rewards={default: {type: exact_match}}"]


def test_rows_of_joint_teachers(tmp_path: Path) -> None:
    for rule, shape in (
        ("weighted_mean", (2, 64)),
        ("mean_probability", (1, 128)),
        ("mean_logprob", (1, 64)),
        ("best_reward", (1, 64)),
        ("per_token_lowest_entropy", (1, 64)),
    ):
        recipe = recipe_of(tmp_path, *PAIR, *JUDGED, f"combine={rule}")
        assert (recipe.teachers_per_row, recipe.support_width) == shape


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["combine=mean_probability"], "no domain has several teachers"),
        ([*PAIR, "combine=mean_logprob", "loss={type: k2}"], "where weighted_mean already is the mean of log-probs"),
        (
            [*PAIR, "combine=per_token_lowest_entropy", "loss={type: k2}", "teacher_defaults.payload=sampled"],
            "payload 'sampled' has no ids whose entropy",
        ),
        ([*PAIR, "combine=best_reward"], "validation is absent, which measures rewards"),
        (
            [
                *(*PAIR, *JUDGED, "combine=best_reward"),
                "teachers.a.placement={type: external, urls: ['http://a:1'], protocol: openai}",
            ],
            "teachers.a is behind an openai server, which only scores",
        ),
        (
            [*PAIR, *JUDGED, "combine=best_reward", "objective=sft_on_teacher"],
            "trains on answers, which teachers give by their weights",
        ),
    ],
)
def test_rules_that_have_nothing_to_work_on(tmp_path: Path, overrides: list[str], problem: str) -> None:
    with pytest.raises(UserError, match=problem) as raised:
        recipe_of(tmp_path, *overrides)
    assert "set combine: weighted_mean, or change that" in str(raised.value) and "\n" not in str(raised.value)


def test_numbers_of_ids(tmp_path: Path) -> None:
    keys = ("loss.top_k=16", "loss.always_ids=[<tool_call>, 7]", "teacher_defaults.payload=union")
    recipe = recipe_of(tmp_path, *keys, "teachers.b.payload=student_topk")
    assert recipe.loss.always_ids == ("<tool_call>", 7)  # type: ignore[union-attr]
    assert recipe.asked == {"a": Asked(own=16, student=16, always=2), "b": Asked(own=0, student=16, always=2)}
    assert recipe.support_width == 34 and recipe.loss_fields(1) == LOSS_FIELDS
    plain = recipe_of(tmp_path)
    assert plain.asked["a"] == Asked(own=64) and plain.support_width == 64
    sampled = recipe_of(tmp_path, "teacher_defaults.payload=sampled", "loss={type: k2}")
    hidden = recipe_of(tmp_path, "teacher_defaults.payload=hidden", "loss={type: full_jsd, beta: 0.1}")
    assert hidden.asked["b"] == Asked(hidden=True) and hidden.support_width == 0 and hidden.sends_hidden
    assert hidden.loss_fields(1) == (*ROLLOUT_FIELDS, TOKEN_FIELD, HIDDEN_FIELD)
    assert (
        sampled.support_width == 0
        and not sampled.sends_hidden
        and sampled.loss_fields(1) == (*ROLLOUT_FIELDS, TOKEN_FIELD)
    )


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["loss={type: full_jsd}"],
            "teachers.a.payload is 'topk' and loss.type 'full_jsd', but hidden states and losses",
        ),
        (
            ["teachers.b.payload=hidden"],
            "need each other: set loss.type: full_forward_kl, full_reverse_kl or full_jsd,",
        ),
        ([*FULL, "loss.skew=1"], "skew is 1: set at least 0 and less than 1"),
        ([*FULL, "loss={type: full_jsd, skew: 0.1}"], "skew is 0.1 and type 'full_jsd', whose mixture is beta's"),
        ([*FULL, "loss.top_k=4"], "top_k"),
        ([*FULL, "loss.tail=bucket"], "tail"),
        ([*FULL, "loss.always_ids=[3]"], "always_ids"),
        (
            [*FULL, "teachers.a.placement={type: external, urls: ['http://a:1'], protocol: openai}"],
            "teachers.a.payload is 'hidden', but teachers.a.placement.protocol is 'openai'",
        ),
        (
            [*FULL, "teachers.a.weight=1", "teachers.b={model: b, domains: [a, b], weight: 1}"],
            "loss.type is 'full_reverse_kl', but a domain has several teachers",
        ),
        (
            ["loss={type: topk_forward_kl, top_k: 1, tail: renormalize}"],
            "'topk' gives no gradient: a distribution over",
        ),
        (["loss={type: topk_jsd, top_k: 1, tail: renormalize}", "teachers.b.payload=union"], "gives no gradient"),
        (["loss={type: topk_jsd, tail: sampled}"], "loss.tail is 'sampled', but the student's own tokens estimate no"),
        (["loss.tail=none", "teachers.a.payload=student_topk"], "drives all mass into the student's own ids"),
        (["loss={type: k2, correction: {type: icepop, low: 1.5}}"], "loss.correction keeps ratios from 1.5 to 2"),
        (
            ["loss={type: k2, correction: {type: none, sequence: {low: 1.05}}}"],
            "loss.correction.sequence keeps mean ratios from 1.05 to 1.1",
        ),
        (
            ["teacher_defaults.payload=sampled"],
            "teachers.a.payload is 'sampled', but loss.type 'topk_forward_kl' reads",
        ),
        (
            ["teacher_defaults.payload=sampled", "loss={type: policy_gradient}"],
            "set payload: topk, or loss.type: k2, or loss.baseline: domain",
        ),
        (
            ["teacher_defaults.payload=sampled", "loss={type: policy_gradient, baseline: none, always_ids: [3]}"],
            "which has no row of ids, but loss.always_ids is set",
        ),
        (
            ["teacher_defaults.payload=sampled", "loss={type: k2, tokens: {largest: divergence, share: 0.5}}"],
            "which has no row of ids, but loss.tokens is set",
        ),
        (["teachers.b.payload=sampled", "loss={type: k2}"], "teachers have payload 'sampled' and others"),
        (
            ["teachers.b.payload=union", "loss={type: k2}"],
            "reads the sampled token alone: set payload: sampled or topk",
        ),
        (
            [
                "teachers.b.payload=union",
                "teachers.b.placement={type: external, protocol: openai, urls: ['http://h:1']}",
            ],
            "teachers.b.payload is 'union', but teachers.b.placement.protocol is 'openai'",
        ),
        (
            ["loss.always_ids=[3]", "teachers.b.placement={type: external, protocol: openai, urls: ['http://h:1']}"],
            "loss.always_ids is set, but teachers.b.placement.protocol is 'openai'",
        ),
        (
            ["teachers.b.payload=student_topk", "objective=off_policy_scores"],
            "is 'student_topk', but objective trains on",
        ),
        (
            ["teachers.b.payload=union", "data.scored=[x]", "schedule.on_policy_fraction=0.5"],
            "is 'union', but data.scored trains on responses of which nobody told",
        ),
        ([REVERSE + "}", "rollout.top_p=0.9"], "loss.tail 'sampled' estimates an expectation over the student's own"),
        ([REVERSE + "}", "rollout.min_p=0.1"], "but rollout.min_p is 0.1: remove that"),
        (["loss={type: k2}", "rollout.presence_penalty=0.5"], "but rollout.presence_penalty is 0.5: remove that"),
        (["loss={type: k3}", "rollout.repetition_penalty=1.1"], "but rollout.repetition_penalty is 1.1: remove that"),
        ([REVERSE + "}", "objective=off_policy_scores"], "loss.tail 'sampled' is a policy gradient over"),
        (
            [REVERSE + "}", "teachers.a.weight=1", "teachers.b={model: b, domains: [a], weight: 1}"],
            "loss.tail is 'sampled', but a domain has several teachers",
        ),
        (["loss.always_ids=[1.5]"], "loss.always_ids: expected a list (a whole number or text each)"),
        (["teachers.a.payload=logits"], "teachers.a.payload: expected one of topk, sampled, student_topk, union"),
    ],
)
def test_what_is_refused(tmp_path: Path, overrides: list[str], line: str) -> None:
    with pytest.raises(UserError) as refusal:
        recipe_of(tmp_path, *overrides)
    assert line in str(refusal.value) and "\n" not in str(refusal.value)
