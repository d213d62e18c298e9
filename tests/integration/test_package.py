"""The wheel of the sdist in a fresh environment, away from the repository: version, templates and data are inside."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

import mopd
from tests.fixtures.recipe import RECIPE
from tests.fixtures.runs import make_run
from tools.release import build

ROOT = Path(mopd.__file__).parents[1]


def call(*words: str | Path, folder: Path) -> str:
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [*map(str, words)], cwd=folder, env=clean, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{words}: {done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, which leaves nothing in the repository and takes nothing stale from it."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "mopd", source / "mopd", ignore=shutil.ignore_patterns("__pycache__"))
    sdist, made = build(source, out)
    assert sdist.name == f"mopd-{mopd.__version__}.tar.gz" and sorted(out.iterdir()) == sorted((sdist, made))
    return made


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs' folder of an environment that has the wheel, and sees the packages of this one."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "packages.pth").write_text(sysconfig.get_path("purelib"))  # adds the folder, without its own .pth files
    pip = (sys.executable, "-m", "pip", "--python", folder / "bin" / "python")
    call(*pip, "install", "--no-deps", "--no-index", "--quiet", "--ignore-installed", wheel, folder=folder)
    return folder / "bin"


def test_one_version(wheel: Path, installed: Path, tmp_path: Path) -> None:
    assert re.fullmatch(rf"mopd-{re.escape(mopd.__version__)}-py3-none-any\.whl", wheel.name)
    assert call(installed / "mopd", "--version", folder=tmp_path) == f"mopd {mopd.__version__}\n"
    about = "import importlib.metadata, mopd; print(importlib.metadata.version('mopd'), mopd.__file__)"
    version, _, file = call(installed / "python", "-c", about, folder=tmp_path).strip().partition(" ")
    assert version == mopd.__version__ and Path(file).is_relative_to(installed.parent)
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## \[(\d[^]]*)\]", changes, re.M)[0] == mopd.__version__


def test_everything_that_is_read_is_inside(installed: Path) -> None:
    (package,) = installed.parent.glob("lib/python*/site-packages/mopd")
    plain = [path.relative_to(ROOT / "mopd") for path in (ROOT / "mopd").rglob("*") if path.is_file()]
    missing = [str(path) for path in plain if path.suffix != ".pyc" and not (package / path).is_file()]
    assert len(plain) > 100 and missing == []


def test_commands_work_elsewhere(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    assert "top_k: 64" in call(installed / "mopd", "config", "recipe.yaml", folder=tmp_path)
    rows = [
        {"data_source": "gsm8k", "prompt": f"1 + {n}?", "reward_model": {"ground_truth": f"{n + 1}"}} for n in (1, 2)
    ]
    (tmp_path / "data.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    models = "--student Qwen/Qwen3-1.7B --teacher math=your-org/math"
    pipe = f"set -o pipefail; {installed}/mopd init {models} --train data.jsonl | {installed}/mopd check --static -"
    checked = call("bash", "-c", pipe, folder=tmp_path)
    assert "gsm8k" in checked and "failed" not in checked and "Hub" in checked
    make_run(tmp_path / "run")
    assert "gsm8k" in call(installed / "mopd", "report", "run", folder=tmp_path)
    assert "<svg" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
