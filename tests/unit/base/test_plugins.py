"""Code that a recipe names: found in files, packages and entry points; every failure is one line that names the key."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest

from mopd.base.plugins import load_plugin, plugin_hash
from mopd.base.types import UserError

CODE = "import beside\n\ndef double(x):\n    return 2 * x + beside.ZERO\n\nNUMBER = 3\n"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Named as a module of Python's, which it must not replace, with a module beside it."""
    (tmp_path / "beside.py").write_text("ZERO = 0\n")
    (tmp_path / "json.py").write_text(CODE)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    return tmp_path / "json.py"


def test_a_file_is_imported_once_and_replaces_no_module(file: Path) -> None:
    double = load_plugin("loss.module", "json.py:double", "loss")
    assert double(4) == 8 and load_plugin("loss.module", f"{file}:double", "loss") is double
    import json

    assert hasattr(json, "dumps")
    assert plugin_hash("loss.module", "json.py:double", "loss") == hashlib.sha256(CODE.encode()).hexdigest()


def test_packages_and_their_entry_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = "tests.fixtures.custom_losses:k2"
    installed = tmp_path / "mine-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(f"[mopd.losses]\nmine = {named}\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert load_plugin("loss.module", "mine", "loss") is load_plugin("loss.module", named, "loss")
    assert plugin_hash("loss.module", "mine", "loss") == plugin_hash("loss.module", named, "loss")
    with pytest.raises(UserError, match=r"no installed package has an entry point 'mine' of mopd\.callbacks"):
        load_plugin("callbacks[0].module", "mine", "callback")


@pytest.mark.parametrize(
    ("reference", "words"),
    {
        "none.py:f": "file 'none.py' does not exist in ",
        "json.py:f": "'json.py' holds no 'f': correct the name",
        "json.py:NUMBER": "'json.py' holds a int, no function, 'NUMBER'",
        "broken.py:f": r"'broken.py' cannot be imported: ZeroDivisionError: division by zero \(line 2\)",
        "no_such_package.sub:f": "cannot be imported: ModuleNotFoundError",
        "mine": r"no installed package has an entry point 'mine' of mopd\.losses \(there are none\)",
    }.items(),
)
def test_what_is_not_there_is_one_line(file: Path, reference: str, words: str) -> None:
    file.with_name("broken.py").write_text("x = 1\n1 / 0\n")
    with pytest.raises(UserError, match=rf"^loss\.module: .*{words}") as refused:
        load_plugin("loss.module", reference, "loss")
    assert "\n" not in str(refused.value)
