from __future__ import annotations

from pathlib import Path

import pytest

from mopd.student.checkpoint import is_complete, read_state, verify, write_hash_manifest
from mopd.types import UserError


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "step_00000002"
    (folder / "sub").mkdir(parents=True)
    (folder / ".metadata").write_bytes(b"pickle")
    (folder / "sub" / "__0_0.distcp").write_bytes(b"weights")
    write_hash_manifest(folder, {"weight_version": 2})
    return folder


def test_a_written_folder_is_complete_and_verifies(saved: Path) -> None:
    assert is_complete(saved)
    verify(saved)
    assert read_state(saved) == {"weight_version": 2}


@pytest.mark.parametrize("name", [".metadata", "sub/__0_0.distcp", "state.json"])
def test_a_changed_file_is_refused(saved: Path, name: str) -> None:
    (saved / name).write_bytes(b"{}")
    with pytest.raises(UserError, match=f"{name}: changed since it was saved"):
        verify(saved)


def test_a_missing_file_is_refused(saved: Path) -> None:
    (saved / ".metadata").unlink()
    with pytest.raises(UserError, match=r"\.metadata: missing"):
        verify(saved)


def test_a_file_that_was_added_is_refused(saved: Path) -> None:
    (saved / "__1_0.distcp").write_bytes(b"evil")
    with pytest.raises(UserError, match=r"__1_0\.distcp: not listed"):
        verify(saved)


def test_without_manifest_a_folder_is_incomplete(saved: Path) -> None:
    (saved / "manifest.json").unlink()
    assert not is_complete(saved)
    with pytest.raises(UserError, match="no complete checkpoint"):
        verify(saved)


def test_a_broken_manifest_is_refused(saved: Path) -> None:
    (saved / "manifest.json").write_text("{")
    with pytest.raises(UserError, match=r"manifest\.json: unreadable"):
        verify(saved)
