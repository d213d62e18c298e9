"""A release: the version and the changelog's section change together, or not at all."""

from __future__ import annotations

import shutil
from datetime import date
from pathlib import Path

import pytest

import mopd
from tests.architecture.source import ROOT
from tools.release import main, set_version

CHANGES = "# Changelog\n\n## [Unreleased]\n{}\n## [0.2.0] - 2026-11-22\n\n### Added\n\n- Rewards.\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Our own package's version file, and a changelog with something new."""
    (tmp_path / "mopd").mkdir()
    shutil.copy(ROOT / "mopd" / "__init__.py", tmp_path / "mopd")
    (tmp_path / "CHANGELOG.md").write_text(CHANGES.format("\n### Fixed\n\n- A bug.\n"))
    return tmp_path


def test_version_and_changelog_change_together(root: Path) -> None:
    set_version(root, "97.0.0", date(2030, 1, 2))
    source = (ROOT / "mopd" / "__init__.py").read_text().replace(mopd.__version__, "97.0.0")
    assert (root / "mopd" / "__init__.py").read_text() == source
    closed = CHANGES.format("\n## [97.0.0] - 2030-01-02\n\n### Fixed\n\n- A bug.\n")
    assert (root / "CHANGELOG.md").read_text() == closed
    with pytest.raises(SystemExit, match=r"nothing stands under \[Unreleased\]"):
        main(["97.0.1"], root)


@pytest.mark.parametrize("version", ["0.0.1", mopd.__version__, "97.0", "97.0.0rc1", "v97.0.0"])
def test_what_does_not_follow_is_refused(root: Path, version: str) -> None:
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    with pytest.raises(SystemExit, match=f"version {version} is not above {mopd.__version__}"):
        main([version], root)
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before


def test_our_changelog_has_an_open_section() -> None:
    assert (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").count("\n## [Unreleased]\n") == 1
