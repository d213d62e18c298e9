"""Where numbers go: the record file, event files, the terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mopd.base.metrics import StepMetrics, read_jsonl
from mopd.base.types import UserError
from mopd.config.load import load_recipe
from mopd.config.output import WandBConfig
from mopd.report.sinks import LINE_EVERY_S, PlainProgress, Sinks, WandBSink, make_progress, verify_wandb
from tests.unit.report.conftest import shown, terminal


def step(number: int, **values: float) -> StepMetrics:
    named = {"loss": 1 / number, "kl_k1/code": 0.5, "kl_k1/open/maths": 0.25, "timing/step_s": 1.5}
    return StepMetrics(step=number, values={**named, "rate/train_tokens_per_s": 2000.0, **values})


def test_every_sink_gets_every_step(tmp_path: Path, recipe_file: Path) -> None:
    console = terminal()
    sinks = Sinks(load_recipe(recipe_file).recipe, tmp_path, resume_step=None, console=console)
    for number in (1, 2):
        sinks.log(step(number))
        records = read_jsonl(tmp_path / "metrics.jsonl")  # complete while the run goes on
        assert records[-1]["kl_k1/open/maths"] == 0.25 and len(records) == number
    sinks.log_validation(2, {"code": 0.5})
    sinks.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 1.0), (2, 0.5)]
    assert [(e.step, e.value) for e in events.Scalars("kl_k1/open/maths")] == [(1, 0.25), (2, 0.25)]
    assert [(e.step, e.value) for e in events.Scalars("reward/code")] == [(2, 0.5)]
    assert "step 1/40" in shown(console) and "reward code 0.500" in shown(console)


def test_weights_and_biases_gets_what_the_recipe_names(
    tmp_path: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package's own arguments, of a stand-in that takes any; the run's id is kept for a resume."""
    given: list[dict[str, Any]] = []
    run = SimpleNamespace(define_metric=lambda *_, **__: None, finish=lambda: None)

    def init(**keys: Any) -> Any:
        given.append(keys)
        return run

    package = SimpleNamespace(init=init, Error=RuntimeError)
    monkeypatch.setitem(sys.modules, "wandb", package)
    keys = "{project: p, entity: team, group: seeds, tags: [a, b]}"
    for _ in range(2):
        cfg = load_recipe(recipe_file, [f"metrics.wandb={keys}"]).recipe.metrics.wandb
        assert cfg is not None
        WandBSink(cfg, tmp_path, {}).close()
    first, second = given
    assert {name: first[name] for name in ("project", "entity", "group", "tags", "name")} == {
        "project": "p", "entity": "team", "group": "seeds", "tags": ("a", "b"), "name": tmp_path.name,
    }  # fmt: skip
    assert second["id"] == first["id"] and second["resume"] == "allow"


def test_credentials_are_tried_where_numbers_go_online(monkeypatch: pytest.MonkeyPatch) -> None:
    def login(*, verify: bool) -> None:
        raise RuntimeError(f"Failed to verify credentials\nverify {verify}")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(login=login, Error=RuntimeError))
    verify_wandb(WandBConfig(project="p", mode="offline"))
    with pytest.raises(UserError, match=r"^metrics\.wandb: Failed to verify .*True: run wandb login, or set") as told:
        verify_wandb(WandBConfig(project="p"))
    assert "\n" not in str(told.value)


def test_a_resumed_run_writes_the_steps_after_its_checkpoint_anew(tmp_path: Path, recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file, ["metrics.tensorboard=false"]).recipe
    first = Sinks(recipe, tmp_path, resume_step=None, console=terminal())
    for number in (1, 2, 3):
        first.log(step(number, loss=9.0))
    first.close()
    second = Sinks(recipe, tmp_path, resume_step=1, console=terminal())
    second.log(step(2, loss=7.0))
    second.close()
    assert [(r["step"], r["loss"]) for r in read_jsonl(tmp_path / "metrics.jsonl")] == [(1, 9.0), (2, 7.0)]
    assert not (tmp_path / "tensorboard").exists()


def test_event_files_of_a_resumed_run_show_each_step_once(tmp_path: Path, recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file).recipe
    for resume_step, loss in ((None, 9.0), (1, 7.0)):
        sinks = Sinks(recipe, tmp_path, resume_step=resume_step, console=terminal())
        for number in range((resume_step or 0) + 1, 4):
            sinks.log(step(number, loss=loss))
        sinks.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 9.0), (2, 7.0), (3, 7.0)]


def test_plain_lines_are_rare_but_the_last_step_is_always_there() -> None:
    now = 0.0
    console = terminal(width=20)  # narrower than a line: a log is not wrapped
    progress = PlainProgress(console, 100, 0, clock=lambda: now)
    for number in range(1, 101):
        now += 1
        progress.log(step(number))
    lines = shown(console).splitlines()
    assert len(lines) == 1 + 99 // LINE_EVERY_S + (99 % LINE_EVERY_S > 0)
    assert lines[0].startswith("step 1/100  loss 1.000  KL code 0.500  open/maths 0.250  1.50 s/step  2,000 tokens/s")
    assert lines[0].endswith("1:39 left") and lines[-1].startswith("step 100/100")


def test_time_left_of_a_resumed_run_counts_its_own_steps() -> None:
    now = 0.0
    console = terminal()
    progress = PlainProgress(console, 100, 90, clock=lambda: now)
    now = 3.0
    progress.log(step(91))
    assert shown(console).rstrip().endswith("0:27 left")


def test_a_terminal_shows_a_table_by_domain_with_the_last_rewards() -> None:
    console = terminal(120, force_terminal=True, force_interactive=True)
    progress = make_progress(console, 40, 10, {"code": 0.125})
    progress.log(step(11, **{"topk_overlap/code": 0.875}))
    progress.log(step(12))  # the overlap comes now and then: its last value stays
    progress.close()
    first = shown(console)
    for text in ("open/maths", "12/40", "0.125", "0.875", "1.50 s/step"):
        assert text in first
    progress = make_progress(console, 40, 10, {})
    progress.log_validation(20, {"code": 0.75})
    progress.close()
    assert "reward at 20" in shown(console)[len(first) :] and "0.750" in shown(console)[len(first) :]
