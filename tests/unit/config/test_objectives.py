"""Objectives and warm-up: which step trains on what, what a recipe then needs, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mopd.base.types import LOSS_FIELDS, ROLLOUT_FIELDS, UserError
from mopd.config.load import load_recipe
from mopd.config.machine.places import engine_groups
from mopd.config.schema import Recipe

Write = Callable[..., str]
WITHOUT_VALIDATION = ("validation=null", "checkpoint.keep_best=false", "preflight.require_better_teacher=false")
WARM_UP = "schedule.warm_up={objective: sft_on_teacher, steps: 2}"
OPENAI = "teachers.math.placement={type: external, urls: [http://a:1], protocol: openai}"


def recipe_of(path: str, *overrides: str) -> Recipe:
    return load_recipe(path, overrides).recipe


@pytest.mark.parametrize(
    ("overrides", "steps", "has_rollout"),
    [
        ((), ["on_policy"] * 3, True),
        (WITHOUT_VALIDATION, ["on_policy"] * 3, True),
        ((WARM_UP, *WITHOUT_VALIDATION), ["sft_on_teacher"] * 2 + ["on_policy"], True),
        (("objective=sft_on_teacher",), ["sft_on_teacher"] * 3, True),
        (("objective=sft_on_teacher", *WITHOUT_VALIDATION), ["sft_on_teacher"] * 3, False),
        (("objective=off_policy_scores", *WITHOUT_VALIDATION), ["off_policy_scores"] * 3, False),
    ],
)
def test_every_step_has_its_objective_and_the_run_its_groups(
    write: Write, overrides: tuple[str, ...], steps: list[str], has_rollout: bool
) -> None:
    recipe = recipe_of(write(), *overrides)
    assert [recipe.objective_at(step) for step in (1, 2, 3)] == steps
    assert list(engine_groups(recipe)) == [*(["rollout"] if has_rollout else []), "teachers.math"]
    assert recipe.draws_answers == (steps[0] != "on_policy")


def test_a_step_waits_for_the_fields_of_its_objective_alone(write: Write) -> None:
    rewarded = ["loss={type: policy_gradient, task_reward_weight: 1}", "rollout.samples_per_prompt=2"]
    recipe = recipe_of(write(), WARM_UP, "answers.temperature=1", *rewarded)
    assert [recipe.loss_fields(step) for step in (2, 3)] == [ROLLOUT_FIELDS, (*LOSS_FIELDS, "task_advantage")]
    scored = recipe_of(write(), "objective=off_policy_scores")
    assert scored.loss_fields(1) == LOSS_FIELDS


def test_a_baseline_needs_no_reward_of_its_samples(write: Write) -> None:
    rewarded = ["loss={type: policy_gradient, task_reward_weight: 1}", "rollout.samples_per_prompt=2"]
    recipe = recipe_of(
        write(), "objective=sft_on_teacher", "answers.temperature=1", *rewarded, *WITHOUT_VALIDATION, "rewards={}"
    )
    assert not recipe.needs_rewards and not recipe.needs_task_advantage


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["objective=sft"], "objective: expected one of on_policy, sft_on_teacher, off_policy_scores, got 'sft'"),
        (
            [WARM_UP, "objective=sft_on_teacher"],
            "schedule.warm_up is set, but objective is 'sft_on_teacher' and a warm-up comes before on-policy steps: "
            "remove one of them",
        ),
        (
            ["schedule.warm_up={objective: off_policy_scores, steps: 3}"],
            "schedule.warm_up.steps is 3 and steps is 3, which counts them: set fewer, or for a run without on-policy "
            "steps objective: off_policy_scores",
        ),
        (
            [WARM_UP, "student.optimizer.lr_warmup_steps=1"],
            "student.optimizer.lr_warmup_steps 1 is not below schedule.steps less schedule.warm_up.steps, 1: set fewer",
        ),
        (
            ["schedule.warm_up={objective: on_policy, steps: 1}"],
            "schedule.warm_up.objective: expected one of sft_on_teacher, off_policy_scores, got 'on_policy'",
        ),
        *(
            (
                [f"loss.type={loss}", overrides],
                f"{key} is 'off_policy_scores', which trains on the teachers' answers, but loss.type '{loss}' "
                "estimates an expectation over the student's own samples: set loss.type: topk_forward_kl, "
                "topk_reverse_kl or topk_jsd",
            )
            for loss in ("policy_gradient", "k2", "k3", "k3_reverse")
            for overrides, key in (
                ("objective=off_policy_scores", "objective"),
                ("schedule.warm_up={objective: off_policy_scores, steps: 1}", "schedule.warm_up.objective"),
            )
        ),
        (
            ["objective=off_policy_scores", "loss.task_reward_weight=0.5"],
            "objective is 'off_policy_scores', which trains on the teachers' answers, but loss.task_reward_weight 0.5 "
            "is a policy gradient over the student's own samples: remove it",
        ),
        *(
            (
                ["objective=sft_on_teacher", override, *more],
                f"{override.split('=')[0]} is set, but objective or schedule.warm_up trains on the teachers' own "
                "answers: remove one of them",
            )
            for override, *more in (
                ("data.scored=[kept]", "schedule.on_policy_fraction=0.5"),
                ("metrics.keep_samples=true",),
            )
        ),
        (
            ["data.scored=[kept]", "schedule.on_policy_fraction=0.5", "rollout.horizon={start: 4}"],
            "rollout.horizon is set, but data.scored has responses of their own length: remove one of them",
        ),
        (
            ["data.scored=[kept]", "schedule.on_policy_fraction=0.5", "data.domain_weights=adaptive"],
            "data.domain_weights is adaptive, but data.scored has samples whose domains stay as they are: give every "
            "domain its weight, or remove data.scored",
        ),
        (
            ["objective=sft_on_teacher", "rollout.samples_per_prompt=4"],
            "rollout.samples_per_prompt is 4, but answers.temperature is 0, where a teacher's answers to one prompt "
            "are all the same: set answers.temperature: 1.0, or samples_per_prompt: 1",
        ),
        (
            ["objective=sft_on_teacher", OPENAI, "answers.temperature=1"],
            "teachers.math.placement.protocol is 'openai', a server that draws greedily: set answers.temperature: 0, "
            "or serve the teacher with `mopd serve` and remove protocol",
        ),
        (
            ["objective=sft_on_teacher", OPENAI, "answers.folder=kept"],
            "teachers.math.placement.protocol is 'openai', a server that does not say which weights it holds: set no "
            "answers.folder, or serve the teacher with `mopd serve` and remove protocol",
        ),
    ],
)
def test_what_cannot_be_trained_on_is_refused(write: Write, overrides: list[str], line: str) -> None:
    with pytest.raises(UserError) as caught:
        load_recipe(write(), overrides)
    assert str(caught.value).endswith(line), str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["objective=sft_on_teacher"], "objective trains on no response of the student"),
        (["rollout.environment={type: python_tool}"], "rollout.environment has turns, of which none is given"),
        (["rollout.horizon={start: 4}"], "rollout.horizon cuts responses after a number of tokens"),
        ([OPENAI], "teachers.math is behind a stock server, which only scores"),
        (["teachers.math.tokenizer=own"], "teachers.math.tokenizer is 'own', and a chunk may hold given and drawn"),
    ],
)
def test_prefixes_are_refused_where_none_can_be_given(write: Write, overrides: list[str], reason: str) -> None:
    given = "rollout.prefix={source: teacher, share: 0.5}"
    with pytest.raises(UserError) as refused:
        recipe_of(write(), given, *overrides)
    assert f"rollout.prefix is set, but {reason}" in str(refused.value)


def test_a_teachers_prefix_names_no_entry_of_a_row(write: Write) -> None:
    line = "rollout.prefix.reference is 'way' and source 'teacher', which reads no row: set source: data"
    with pytest.raises(UserError, match=line):
        recipe_of(write(), "rollout.prefix={source: teacher, share: 0.5, reference: way}")


def test_a_prefix_falls_by_equal_parts_and_asks_teachers_for_answers(write: Write) -> None:
    recipe = recipe_of(write(), "rollout.prefix={source: teacher, share: 0.8, steps: 4}")
    assert recipe.rollout.prefix is not None and recipe.takes_prefixes and not recipe.draws_answers
    assert [round(recipe.rollout.prefix.at(step), 3) for step in range(6)] == [0.8, 0.6, 0.4, 0.2, 0, 0]
