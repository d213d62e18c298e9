"""A run folder as a run leaves it: 40 steps, three validations, two domains."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from mopd.config.load import dump, load_recipe
from mopd.report.terminal import Terminal

RECIPE = """\
run_dir: runs/example
student: {model: models/student}
teachers:
  maths: {model: models/maths, domains: ["open/maths"]}
  code: {model: models/code, domains: [code]}
data: {train: [train.parquet], validation: [validation.parquet]}
schedule: {steps: 40, prompts_per_step: 8}
rewards: {default: {type: exact_match}}
validation: {every_steps: 20}
"""
REWARDS = {
    0: {"code": 0.2, "open/maths": 0.4},
    20: {"code": 0.6, "open/maths": 0.9},
    40: {"code": 0.5, "open/maths": 0.8},
}
DOMAINS = ("code", "open/maths")


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "example.yaml"
    path.write_text(RECIPE)
    return path


@pytest.fixture
def run_dir(tmp_path: Path, recipe_file: Path) -> Path:
    """A finished run; the best validation is not the last."""
    root = tmp_path / "run"
    root.mkdir()
    (root / "recipe.yaml").write_text(dump(load_recipe(recipe_file)))
    write_lines(root / "metrics.jsonl", [step_record(step) for step in range(1, 41)])
    write_lines(root / "validation.jsonl", [validation_record(step) for step in REWARDS])
    (root / "headroom.json").write_text(json.dumps({"code": {"teacher": 0.7}, "open/maths": {"teacher": 1.0}}))
    return root


def step_record(step: int) -> dict[str, Any]:
    record: dict[str, Any] = {"step": step, "loss": 1 / step, "grad_norm": 0.5, "tokens": 300.0}
    for number, domain in enumerate(DOMAINS):
        record |= {f"kl_k1/{domain}": (1 + number) / step, f"loss/{domain}": 2 / step, f"entropy/{domain}": None}
        if step % 10 == 0:
            record[f"topk_overlap/{domain}"] = 1 - 1 / step
    return {**record, "timing/rollout_s": 0.5, "timing/forward_backward_s": 1.0, "timing/step_s": 2.0}


def validation_record(step: int) -> dict[str, Any]:
    examples = {
        domain: [
            {
                "prompt": "<b>2+2</b>",
                "response": f"answer at {step}",
                "ground_truth": "4 & four",
                "reward": float(step > 0),
            }
        ]
        for domain in DOMAINS
    }
    return {"step": step, "rewards": REWARDS[step], "examples": examples, "wall_s": 5.0}


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def terminal(width: int = 200, **options: Any) -> Terminal:
    """A terminal whose text ``shown`` returns."""
    return Terminal(file=io.StringIO(), width=width, **options)


def shown(console: Terminal) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()
