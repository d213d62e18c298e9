"""The readers and writers of small files: what they refuse, in one line, and that nothing is left half-written."""

from __future__ import annotations

import errno
import io
import json
import os
import tempfile
import traceback
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException

from mopd.base.files.json_text import MAX_DEPTH, parse_json, read_json_object
from mopd.base.files.reading import read_text, shown_path
from mopd.base.files.writing import (
    WriteRefusedError,
    reasoned,
    refusal,
    temporary_folder,
    write_json,
    write_text,
    writing,
)
from mopd.base.types import UserError

REFUSED = {
    "not JSON": "{",
    "repeated key": '{"a": 1, "b": {"c": 1, "c": 2}}',
    "NaN": '{"a": NaN}',
    "infinity": '{"a": [-Infinity]}',
    "overflow": '{"a": 1e999}',
    "65 bits": '{"a": 18446744073709551616}',
    "many digits": '{"a": ' + "9" * 5000 + "}",
    "surrogate in a value": '{"a": "\\ud800"}',
    "surrogate in a key": '{"\\ud800": 1}',
    "deep list": '{"a": ' + "[" * MAX_DEPTH + "1" + "]" * MAX_DEPTH + "}",
    "very deep": "[" * 100_000,
    "many values": '{"a": [' + "[]," * 2_000_001 + "1]}",
    "two values": "{} {}",
    "byte order mark": '\ufeff{"a": 1}',
    "a list": "[1]",
}


@pytest.mark.parametrize("content", REFUSED.values(), ids=REFUSED)
def test_json_is_refused_in_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UserError) as refusal:
        read_json_object(path, cure="write it again")
    message = str(refusal.value)
    assert message.startswith(str(path)) and message.endswith(": write it again")
    assert "\n" not in message and len(message) < 400


def test_json_keeps_every_value() -> None:
    value = {"a": [1, -(2**63), 2**64 - 1, 0.1, -1e-300, True, None, "é\U0001f600\x00"], "b": {"": {}}}
    assert parse_json(json.dumps(value)) == value
    assert parse_json("[" * MAX_DEPTH + "1" + "]" * MAX_DEPTH)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("absent", "does not exist"),
        ("folder", "not a regular file"),
        ("pipe", "not a regular file"),
        ("absent/below", "does not exist"),
        ("text/below", "cannot be read"),
        ("x" * 300, "cannot be read"),
        ("nul\x00", "not a possible file name"),
        ("half\ud800", "not a possible file name"),
        ("latin", ":2: not UTF-8"),
        ("long", "longer than 1000 bytes"),
        ("/dev/zero", "not a regular file"),
    ],
)
def test_text_is_refused_in_one_line(tmp_path: Path, name: str, problem: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_text("x")
    (tmp_path / "latin").write_bytes(b"one\n\xe9\n")
    (tmp_path / "long").write_bytes(b"x" * 1001)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError) as refusal:
        read_text(f"{tmp_path}/{name}" if name != "/dev/zero" else name, cure="mend it", max_bytes=1000)
    assert problem in str(refusal.value) and str(refusal.value).endswith(": mend it")
    str(refusal.value).encode("utf-8")


def test_paths_are_shown_without_what_a_terminal_acts_on() -> None:
    assert shown_path("a\x1b[2J\n\ud800é") == "a\\x1b[2J\\n\\ud800é"
    assert len(shown_path("x" * 5000)) < 300


def test_writes_replace_whole_files(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_json(path, {"a": 1})
    write_json(path, {"ä": [2.5]})
    assert json.loads(path.read_text(encoding="utf-8")) == {"ä": [2.5]}
    for refuse in (lambda: write_json(path, {"a": float("nan")}), lambda: write_text(path, "\ud800")):
        with pytest.raises(ValueError):
            refuse()
    assert json.loads(path.read_text(encoding="utf-8")) == {"ä": [2.5]}
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_refused_write_is_one_line_with_path_and_reason(tmp_path: Path) -> None:
    full = Path("/dev/full")
    with pytest.raises(UserError, match="/dev/full: cannot be written: No space left on device; free"), writing(full):
        full.write_bytes(b"x")
    with pytest.raises(UserError, match="cannot be written: No such file"):
        write_text(tmp_path / "absent" / "file", "x")


def test_a_library_that_hides_the_reason_tells_it(tmp_path: Path) -> None:
    """``torch.save`` replaces the error of a failed write; safetensors has it in its text only."""
    weights = {"w": torch.zeros(1000)}
    with pytest.raises(UserError, match=r"^x: cannot be written: No space left on device"), writing("x"):  # noqa: SIM117
        with Path("/dev/full").open("wb", buffering=0) as file, reasoned(file) as stream:
            torch.save(weights, stream)
    with pytest.raises(UserError, match=r"^x: cannot be written: No such file or directory"), writing("x"):
        save_file(weights, tmp_path / "absent" / "file")
    with pytest.raises(RuntimeError), reasoned(io.BytesIO()):
        raise RuntimeError("of the library's own")


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    """``error`` as it is caught, with its cause."""
    try:
        raise error from cause
    except BaseException as caught:
        return caught


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/a/file")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (FULL, "/a/file: cannot be written: No space left on device; free space there or name another place"),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), b"/a/b"), "/a/b: cannot be written: Disk quota exceeded"),
        (OSError(errno.EROFS, os.strerror(errno.EROFS)), "file: cannot be written: Read-only file system; make"),
        (raised(ValueError("x"), raised(TypeError("y"), FULL)), "/a/file: cannot be written: No space left"),
        (CheckpointException("write", {3: (FULL, traceback.StackSummary())}), "/a/file: cannot be written: No space"),
        (CheckpointException("write", {0: (WriteRefusedError("told"), traceback.StackSummary())}), "told"),
        (OSError(errno.ENOENT, "No such file or directory", "x"), None),
        (ValueError("x"), None),
        (CheckpointException("read", {0: (ValueError("x"), traceback.StackSummary())}), None),
    ],
)
def test_a_full_disk_is_found_behind_other_errors(error: BaseException, line: str | None) -> None:
    found = refusal(error)
    assert found is None if line is None else line in str(found)


def test_a_circle_of_causes_ends() -> None:
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    assert refusal(one) is None


def test_temporary_folders_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc")
    with pytest.raises(UserError, match=r"^/proc: cannot be written"):
        temporary_folder("x")
