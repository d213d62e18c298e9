"""A newcomer's first real run, with tiny stand-ins: the README's own recipe on local folders, and every command of
``docs/first_run.md`` with names of the Hub, from an empty cache."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.fixtures.hub import LoopbackHub, hub_environment, loopback_hub
from tests.fixtures.pages import ROOT, blocks
from tests.integration.world import TIMEOUT_S, environment
from tools import make_stand_ins
from tools.quickstart.cache import PartsFolder

pytestmark = [pytest.mark.slow, pytest.mark.multirank]
TEACHER_AT_LEAST = 0.75
MODELS = {
    "Qwen/Qwen3-1.7B": "tiny-base",
    "your-org/qwen3-8b-math": "math-expert",
    "your-org/qwen3-8b-code": "code-expert",
}
"""Name on the Hub -> stand-in."""
SHORT = ["student.optimizer.lr_warmup_steps=0", "schedule.prompts_per_step=16", "validation.max_samples_per_domain=8"]
STEPS = {
    "mopd train first.yaml": [*SHORT, "schedule.steps=2"],
    "mopd train first.yaml --resume": [*SHORT, "schedule.steps=3"],
    "mopd train first.yaml run_dir=runs/higher_lr student.optimizer.lr=5e-6": [*SHORT, "schedule.steps=1"],
}
"""Command of the page -> what makes it short."""
LAST = {"step_00000500": "step_00000003"}


@dataclass
class Newcomer:
    """A working folder, a Hub and a cache that is empty at first."""

    folder: Path
    hub: LoopbackHub
    home: Path
    said: dict[str, str] = field(default_factory=dict)
    """Command -> what it printed on both streams."""

    def run(self, words: list[str], *more: str) -> str:
        """A command to its good end; its standard output."""
        assert words[0] == "mopd"
        hub = {k: v for k, v in hub_environment(self.hub, self.home).items() if k.startswith("HF_")}
        done = subprocess.run(
            [sys.executable, "-m", "mopd", *words[1:], *more],
            cwd=self.folder,
            env=environment() | hub,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        self.said[" ".join(words)] = f"{done.stdout}\n{done.stderr}"
        assert done.returncode == 0, f"{words}: {done.stderr[-3000:]}"
        return done.stdout


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Newcomer]:
    root = tmp_path_factory.mktemp("first")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make_stand_ins, "BATCH_SIZE", 16)  # of 24: as good, in two thirds of the time
        right = make_stand_ins.build(PartsFolder(root))
    assert make_stand_ins.complaints(right) == []
    with loopback_hub() as hub:
        for name, folder in MODELS.items():
            hub.add(f"models/{name}", root / "models" / folder)
        for name, folder, splits in (
            ("openai/gsm8k", "gsm8k", {"main/train": "train", "main/test": "test"}),
            ("google-research-datasets/mbpp", "mbpp", {"full/train": "train", "full/validation": "test"}),
        ):
            files = {
                f"{part}-00000-of-00001.parquet": (root / "hub" / folder / f"{split}.parquet").read_bytes()
                for part, split in splits.items()
            }
            hub.add(f"datasets/{name}", files)
        yield Newcomer(root, hub, root / "home")


def check_rewards(run: Path) -> None:
    """Both teachers answer rightly, by the recipe's own rewards."""
    domains = json.loads((run / "report.json").read_text())["domains"]
    assert set(domains) == {"gsm8k", "mbpp"}
    for numbers in domains.values():
        assert numbers["teacher"] >= TEACHER_AT_LEAST and numbers["teacher"] > numbers["before"] >= 0
        assert numbers["after"] is not None


@pytest.mark.long
def test_the_readmes_recipe(newcomer: Newcomer) -> None:
    """As it stands there, but for the student's folder (the experts have the README's names) and the steps."""
    (recipe,) = re.findall(r"^```yaml\n(run_dir:.*?)^```", (ROOT / "README.md").read_text("utf-8"), re.M | re.S)
    (newcomer.folder / "mine.yaml").write_text(recipe)
    student = "student.model=models/tiny-base"
    told = newcomer.run(["mopd", "check", "mine.yaml"], student)
    assert "reward of math on gsm8k" in told and "reward of code on mbpp" in told and "failed" not in told
    newcomer.run(["mopd", "train", "mine.yaml"], student, "schedule.steps=2")
    report = newcomer.run(["mopd", "report", "runs/mine"])
    assert re.search(r"gsm8k\W", report) and re.search(r"mbpp\W", report)
    check_rewards(newcomer.folder / "runs" / "mine")
    assert len((newcomer.folder / "runs" / "mine" / "metrics.jsonl").read_text().splitlines()) == 2


def test_the_page(newcomer: Newcomer) -> None:
    commands = [
        words for block in blocks(ROOT / "docs" / "first_run.md") if not block.marker for words in block.commands
    ]
    assert len(commands) >= 10
    for words in commands:
        line = " ".join(words)
        shortened = [re.sub("|".join(LAST), lambda found: LAST[found[0]], word) for word in words]
        newcomer.run(shortened, *STEPS.get(line, []))
    assert set(STEPS) <= {" ".join(words) for words in commands}
    assert "Fetching" in newcomer.said["mopd check first.yaml"]
    check_rewards(newcomer.folder / "runs" / "first")
    recipe = (newcomer.folder / "runs" / "first" / "recipe.yaml").read_text()
    assert "your-org/qwen3-8b-math" in recipe and str(newcomer.home) not in recipe
    assert len((newcomer.folder / "runs" / "first" / "metrics.jsonl").read_text().splitlines()) == 3
    assert (newcomer.folder / "compare.html").is_file() and (newcomer.folder / "out" / "step_500").is_dir()
    (newcomer.folder / "said.json").write_text(json.dumps(newcomer.said))
