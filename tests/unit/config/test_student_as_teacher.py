"""A teacher that is the student: named by ``model: student``, with weights that its ``refresh`` says, and nothing that
would make these others than it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from mopd.base.types import UserError
from mopd.cli.main import main
from mopd.config.load import draft_recipe, dump, load_recipe
from mopd.config.schema import Recipe
from mopd.config.views import RefreshConfig
from mopd.engines.replicas.identity import Needs
from mopd.placement.engine_file import teacher_file
from tests.fixtures.recipe import RECIPE

MATH = "{model: models/math, domains: [math]}"
EXPERT = "{model: models/math, domains: [math], engine: {type: torch, dtype: float32}}"
SELF = "{model: student, domains: [math], refresh: frozen}"
EVERY = "{model: student, domains: [math], refresh: {every_steps: 2}, engine: {type: torch, dtype: float32}}"
ROLLOUT = "rollout: {engine: {type: torch, dtype: float32}}\n"


def load(folder: Path, teacher: str, more: str = "", *overrides: str) -> Recipe:
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.replace(MATH, teacher) + more)
    loaded = load_recipe(path, overrides)
    again = folder / "again.yaml"
    again.write_text(dump(loaded))
    assert load_recipe(again).recipe == loaded.recipe
    return loaded.recipe


def test_the_teacher_has_the_students_model(tmp_path: Path) -> None:
    frozen = load(tmp_path, SELF, "", "student.model=elsewhere/model")
    assert frozen.teachers["math"].model == frozen.student.model == "elsewhere/model"
    assert frozen.refreshed == {} and teacher_file(load(tmp_path, EXPERT), "math").role == "teacher"
    every = load(tmp_path, EVERY, ROLLOUT + "checkpoint: {every_steps: 4}\n", "rollout.temperature=0.7")
    assert every.refreshed == {"math": RefreshConfig(every_steps=2)}
    average = load(tmp_path, EVERY.replace("every_steps: 2", "ema: 0.99"), ROLLOUT)
    assert (average.averages, average.refreshed["math"].every_steps) == ((0.99,), 1) and every.averages == ()
    file = teacher_file(every, "math")
    # its weights come from the student, and it scores at temperature 1 whatever the rollout draws at
    assert (file.role, file.name, file.temperature, file.max_logprobs) == ("rollout", "math", 1.0, every.loss.top_k)


def test_a_view_makes_sequences_of_its_own_length(tmp_path: Path) -> None:
    view = "view: {prompt: '{prompt}', max_prompt_length: 3000}"
    recipe = load(tmp_path, EXPERT[:-1] + f", {view}}}")
    assert (recipe.longest_sequence(), recipe.longest_sequence("math")) == (2048, 4024)
    assert teacher_file(recipe, "math").longest_sequence == 4024


def test_teachers_of_one_model_need_what_each_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server of the one without the long view, which vLLM starts for its own length, is not too short for it."""
    monkeypatch.chdir(tmp_path)
    for name in ("student", "math"):
        (tmp_path / "models" / name).mkdir(parents=True)
        (tmp_path / "models" / name / "config.json").write_text('{"model_type": "qwen3"}')
    view = "view: {prompt: '{prompt}', max_prompt_length: 3000}"
    plain = "{model: models/math, domains: [code], payload: union, engine: {type: torch, dtype: float32}}"
    recipe = load(tmp_path, f"{EXPERT[:-1]}, {view}}}\n  again: {plain}")
    for name, length, width in (("math", 4024, recipe.loss.top_k), ("again", 2048, 2 * recipe.loss.top_k)):
        needs, file = Needs.of(recipe, name), teacher_file(recipe, name)
        assert (needs.length, needs.num_ids) == (length, width) == (file.longest_sequence, file.max_logprobs)


OPENAI = "}, placement: {type: external, protocol: openai, urls: ['http://a'], served_model_name: m}}"
REFUSED = [
    (
        "{model: student, domains: [math]}",
        "",
        "teachers.math.model is the student itself, and teachers.math.refresh is",
    ),
    (
        "{model: models/math, domains: [math], refresh: frozen}",
        "",
        "refresh is set, but teachers.math.model is 'models",
    ),
    (SELF.replace("frozen", "thawed"), "", "teachers.math.refresh: expected one of frozen or a section or null"),
    (SELF.replace("frozen", "{every_steps: 0}"), "", "teachers.math.refresh.every_steps is 0"),
    (SELF.replace("frozen", "{ema: 1}"), "", "teachers.math.refresh.ema is 1: set a decay above 0 and below 1"),
    (SELF.replace("frozen", "{ema: 0.0}"), "", "refresh.ema is 0: set a decay above 0 and below 1, for example 0.99"),
    (EVERY.replace("every_steps: 2}", "ema: 0.9}").replace("}}", OPENAI), ROLLOUT, "refresh has ema, but placement"),
    (SELF.replace("frozen", "{every: 3}"), "", "unknown key 'teachers.math.refresh.every'"),
    (EVERY, ROLLOUT + "checkpoint: {every_steps: 3}\n", "is 2, but checkpoint.every_steps is 3, no multiple of it"),
    (
        EVERY[:-1] + ", payload: hidden}",
        ROLLOUT + "loss: {type: full_reverse_kl}\n",
        "is 2, but payload is 'hidden', and the student's ranks keep the output matrix of a folder",
    ),
    (EVERY, "", "but its engine.dtype is float32 and rollout.engine.dtype auto, in which the weights travel"),
    (EVERY, ROLLOUT + "data: {scores_cache: kept}\n", "every_steps is 2, but data.scores_cache keeps scores"),
    (EVERY, ROLLOUT + "objective: sft_on_teacher\n", "but objective or schedule.warm_up trains on its own answers"),
    (EVERY.replace("}}", OPENAI), ROLLOUT, "refresh has every_steps, but placement.protocol is 'openai', a server"),
    (EVERY.replace("}}", "}, placement: {type: registered}}"), ROLLOUT, "but placement.type is 'registered'"),
    (SELF.replace("}", ", view: {}}"), "", "teachers.math.view: the view is empty"),
    (
        SELF.replace("}", ", view: {prompt: x}}"),
        "data: {scored: [kept]}\nschedule: {on_policy_fraction: 0.5}\n",
        "teachers.math.view is set, but data.scored has responses without the rows",
    ),
]


@pytest.mark.parametrize(("teacher", "more", "line"), REFUSED, ids=[line[:40] for *_, line in REFUSED])
def test_what_would_not_be_true_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], teacher: str, more: str, line: str
) -> None:
    base, path = tmp_path / "base.yaml", tmp_path / "recipe.yaml"
    base.write_text(RECIPE.replace(MATH, teacher))
    path.write_text("base: base.yaml\n" + more)
    with pytest.raises(UserError) as caught:
        load_recipe(path)
    assert line in str(caught.value) and "\n" not in str(caught.value)
    assert any(line in problem for problem in draft_recipe(path).problems)  # of mopd check --static, which goes on
    assert main(["config", str(path)]) == 2
    assert line in capsys.readouterr().err
