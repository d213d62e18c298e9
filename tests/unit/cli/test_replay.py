"""What ``mopd replay`` changes of a run's recipe."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from mopd.cli.replay import _overrides
from mopd.config.load import load_recipe
from mopd.report.run_files import RunFiles
from tests.fixtures.recipe import RECIPE


@pytest.mark.parametrize(
    "own",
    [
        "rollout: {horizon: {start: 4}}",
        "data: {domain_weights: adaptive}\nvalidation: {}\nrewards: {default: {type: math}}",
        "schedule: {max_staleness: 2}",
    ],
)
def test_a_run_of_any_schedule_can_be_replayed(tmp_path: Path, own: str) -> None:
    (tmp_path / "base.yaml").write_text(RECIPE)
    files = RunFiles(tmp_path / "run")
    files.path.mkdir()
    files.recipe.write_text(f"base: ../base.yaml\nmetrics: {{keep_samples: true}}\n{own}\n")
    if "adaptive" in own:
        text = files.recipe.read_text().replace("data: {", "data: {validation: [v.parquet], ")
        files.recipe.write_text(text)
    load_recipe(files.recipe)
    overrides = _overrides(files, argparse.Namespace(steps=None, set=[]))
    replayed = load_recipe(files.recipe, overrides).recipe
    assert replayed.stored_share == 1.0 and replayed.rollout.horizon is None and not replayed.metrics.keep_samples
