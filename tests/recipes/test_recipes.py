"""Every recipe in the repository resolves strictly and opens with what it costs and gives."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mopd.config.load import dump, load_recipe

ROOT = Path(__file__).parents[2]
RECIPES = sorted(p for p in (ROOT / "recipes").rglob("*.yaml") if ROOT / "recipes" / "base" not in p.parents)
BASES = sorted((ROOT / "recipes" / "base").glob("*.yaml"))
HEADER = ("# hardware: ", "# wall time: ", "# expected: ")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", RECIPES, ids=name)
def test_recipe_resolves(path: Path, tmp_path: Path) -> None:
    """Model folders and data files need not exist here."""
    loaded = load_recipe(path)
    printed = tmp_path / "printed.yaml"
    printed.write_text(dump(loaded), encoding="utf-8")
    assert load_recipe(printed).recipe == loaded.recipe


@pytest.mark.parametrize("path", RECIPES, ids=name)
def test_recipe_opens_with_hardware_wall_time_and_expected_result(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()[: len(HEADER)]
    for line, start in zip(lines, HEADER, strict=True):
        assert line.startswith(start) and len(line) > len(start), f"line {line!r} should begin with {start!r}"


@pytest.mark.parametrize("path", BASES, ids=name)
def test_base_is_used(path: Path) -> None:
    """A base that no recipe stands on is never checked."""
    assert any(str(path) in load_recipe(recipe).sources for recipe in RECIPES)


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=name)
def test_recipes_in_the_documentation_resolve(page: Path, tmp_path: Path) -> None:
    """Every YAML block that names a run folder is a whole recipe."""
    blocks = re.findall(r"^```yaml\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    for number, block in enumerate(block for block in blocks if block.startswith("run_dir:")):
        path = tmp_path / f"{number}.yaml"
        path.write_text(block, encoding="utf-8")
        load_recipe(path)


def test_the_readme_shows_a_recipe() -> None:
    assert "```yaml\nrun_dir:" in (ROOT / "README.md").read_text(encoding="utf-8")
