"""Recipes, ``--set``, and the file that a server is started with."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mopd.base.hardware import Hardware
from mopd.base.types import UserError
from mopd.config.load import Loaded, dump, load_recipe
from mopd.launch.preparing import settled
from mopd.placement.engine_file import is_engine_file, read_engine_file, rollout_file, teacher_file
from tests.fixtures.recipe import RECIPE
from tests.fixtures.whole_recipe import WHOLE_RECIPE
from tests.fuzz.harness import fuzz

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current directory holds the whole recipe and our own ones: some are the base of others."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(RECIPES, ".", dirs_exist_ok=True)
    Path("recipe.yaml").write_text(WHOLE_RECIPE)


def check_loads_back(loaded: Loaded) -> None:
    Path("resolved.yaml").write_text(dump(loaded), encoding="utf-8")
    assert load_recipe("resolved.yaml").recipe == loaded.recipe


def test_recipes() -> None:
    """What is not refused is printed as a recipe that loads back to the same; half stand below another recipe."""
    valid = [path.read_bytes() for path in sorted(RECIPES.glob("*.yaml"))]
    Path("above.yaml").write_text("base: mutated.yaml\nseed: 5\n")

    def read(content: bytes) -> None:
        Path("mutated.yaml").write_bytes(content)
        check_loads_back(load_recipe("above.yaml" if len(content) % 2 else "mutated.yaml"))

    fuzz("recipe", [*valid, WHOLE_RECIPE.encode()], read, (UserError,))


def test_overrides() -> None:
    Path("small.yaml").write_text(RECIPE)
    valid = [
        b"student.optimizer.lr=1e-5",
        b"teachers.new={model: m, domains: [a, b], engine: {type: torch}, placement: {type: local, gpus: [1]}}",
        b"data.chat_template_kwargs={a: [1, b, {c: yes}], d: '\xc3\xa9'}",
        b'student.megatron_overrides."a.b=c"=[1.5, null]',
        b"loss={type: topk_jsd, beta: 0.25}",
    ]

    def read(content: bytes) -> None:
        check_loads_back(load_recipe("small.yaml", [content.decode("utf-8", "surrogateescape")]))

    fuzz("--set", valid, read, (UserError,))


def test_engine_files() -> None:
    recipe = settled(load_recipe("recipe.yaml"), Hardware()).recipe
    valid = []
    for file in (teacher_file(recipe, "code[python]"), teacher_file(recipe, "math", 1), rollout_file(recipe)):
        file.write(Path("engine.json"))
        assert is_engine_file("engine.json") and read_engine_file("engine.json") == file
        valid.append(Path("engine.json").read_bytes())

    def read(content: bytes) -> None:
        Path("engine.json").write_bytes(content)
        read_engine_file("engine.json")

    fuzz("engine file", valid, read, (UserError,))
