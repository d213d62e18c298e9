"""What a run folder tells the report: its files, read and checked. Works while the run is still writing them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from mopd.metrics import read_jsonl
from mopd.types import UserError


class RunFiles:
    """Reader of one run folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.recipe = root / "recipe.yaml"
        self.metrics = root / "metrics.jsonl"
        self.validation = root / "validation.jsonl"
        self.headroom = root / "headroom.json"
        self.report_json = root / "report.json"
        self.report_html = root / "report.html"

    def require_run(self) -> None:
        """Raise ``UserError`` unless the folder holds a run that has begun."""
        if not self.recipe.is_file():
            raise UserError(f"{str(self.root)!r} holds no run (no recipe.yaml): name the run_dir of a begun run")

    def recipe_text(self) -> str:
        """The resolved recipe as it was written, origins included."""
        return self.recipe.read_text(encoding="utf-8")

    def recipe_tree(self) -> dict[str, Any]:
        """The resolved recipe as plain values."""
        tree = yaml.safe_load(self.recipe_text())
        if not isinstance(tree, dict):
            raise UserError(f"{self.recipe}: not a recipe: restore the file that the run wrote")
        return tree

    def steps(self) -> list[dict[str, Any]]:
        """Records of ``metrics.jsonl``, in order of steps."""
        return read_jsonl(self.metrics)

    def validations(self) -> list[dict[str, Any]]:
        """Records of ``validation.jsonl``, in order of steps; ``UserError`` for one without rewards by domain."""
        records = read_jsonl(self.validation)
        for record in records:
            if not isinstance(record.get("rewards"), dict) or not record["rewards"]:
                raise UserError(f"{self.validation}: step {record['step']} has no rewards: remove the line")
        return records

    def last_rewards(self) -> dict[str, float]:
        """Rewards by domain of the newest validation; empty before the first."""
        records = self.validations()
        return records[-1]["rewards"] if records else {}

    def teacher_rewards(self) -> dict[str, float]:
        """Each domain's own teacher on the validation prompts; empty if that was not measured."""
        if not self.headroom.exists():
            return {}
        return {domain: entry["teacher"] for domain, entry in json.loads(self.headroom.read_text("utf-8")).items()}
