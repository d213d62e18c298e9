from __future__ import annotations

from pathlib import Path

import pytest

from mopd.base.types import UserError
from mopd.student.checkpoints.checkpoint import is_complete, read_state, verify, write_hash_manifest

STATE = {"weight_version": 2, "layout": {"tensor_model_parallel_size": 1}, "extra": {"step": 2}}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "step_00000002"
    (folder / "sub").mkdir(parents=True)
    (folder / ".metadata").write_bytes(b"pickle")
    (folder / "sub" / "__0_0.distcp").write_bytes(b"weights")
    write_hash_manifest(folder, STATE)
    return folder


def test_a_written_folder_is_complete_and_verifies(saved: Path) -> None:
    assert is_complete(saved)
    verify(saved)
    assert read_state(saved) == STATE


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        (".metadata", b"{}", r"\.metadata: changed since it was saved"),
        ("sub/__0_0.distcp", b"{}", "sub/__0_0.distcp: changed since it was saved"),
        ("state.json", b"{}", "state.json: changed since it was saved"),
        (".metadata", None, r"\.metadata: missing"),
        ("__1_0.distcp", b"evil", r"__1_0\.distcp: not listed"),
        ("manifest.json", None, "no complete checkpoint"),
    ],
)
def test_another_content_is_refused(saved: Path, name: str, content: bytes | None, problem: str) -> None:
    (saved / name).unlink(missing_ok=True)
    if content is not None:
        (saved / name).write_bytes(content)
    assert is_complete(saved) == (name != "manifest.json")
    with pytest.raises(UserError, match=problem):
        verify(saved)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "not valid JSON"),
        ("[]", "holds a list, not a JSON object"),
        ("{}", "'sha256' is not a map"),
        ('{"sha256": {"a": 1}}', "'sha256' is not a map"),
        ('{"sha256": {}, "sha256": {}}', "occurs twice"),
        ('{"sha256": {"../secret": "00"}}', "which is no file of this folder"),
        ('{"sha256": {"/etc/passwd": "00"}}', "which is no file of this folder"),
        ("[" * 100_000, "nested deeper"),
    ],
)
def test_a_broken_manifest_is_refused(saved: Path, text: str, problem: str) -> None:
    (saved / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=rf"manifest\.json: .*{problem}"):
        verify(saved)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"weight_version": 2}', "has no 'layout', so it is no checkpoint of a run"),
        ('{"weight_version": true, "layout": {}, "extra": {}}', "has no 'weight_version'"),
        ('{"weight_version": 1e999}', "beyond double precision"),
    ],
)
def test_a_broken_state_is_refused(saved: Path, text: str, problem: str) -> None:
    (saved / "state.json").write_text(text)
    with pytest.raises(UserError, match=rf"state\.json: .*{problem}"):
        read_state(saved)
