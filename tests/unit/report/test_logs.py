"""Logs of a run as one stream: last lines, then what is written, from files that come, grow and are cut off."""

from __future__ import annotations

from pathlib import Path

import pytest

from mopd.base.types import UserError
from mopd.report import run_files
from mopd.report.run_files import Logs


def write(folder: Path, name: str, text: bytes) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(text)


def test_last_lines_then_what_is_written(tmp_path: Path) -> None:
    write(tmp_path, "b/rank_1.log", b"one\ntwo\nthree\nhal")
    write(tmp_path, "a/teachers.math.0.log", b"\x1b[31mred\xff\r\n")
    logs = Logs(tmp_path)
    assert list(logs.last(2)) == ["a/teachers.math.0: \\x1b[31mred\ufffd", "b/rank_1: two", "b/rank_1: three"]
    assert list(logs.new()) == []
    write(tmp_path, "b/rank_1.log", b"f and more\n")
    write(tmp_path, "b/rank_2.log", b"a new one\n")
    assert list(logs.new()) == ["b/rank_1: half and more", "b/rank_2: a new one"]
    (tmp_path / "b/rank_1.log").write_bytes(b"anew\n")
    assert list(logs.new()) == ["b/rank_1: anew"]


def test_nodes_and_roles_by_pattern(tmp_path: Path) -> None:
    for name in ("a/rank_0.log", "a/rank_1.log", "b/rank_2.log", "b/orchestrator.log", "b/notes.txt"):
        write(tmp_path, name, b"here\n")
    assert list(Logs(tmp_path, role="rank_*", node="a").last(5)) == ["a/rank_0: here", "a/rank_1: here"]
    assert list(Logs(tmp_path, node="b").last(5)) == ["b/orchestrator: here", "b/rank_2: here"]


def test_a_line_without_end_is_shown_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_files, "MAX_STEP_BYTES", 4)
    write(tmp_path, "a/r.log", b"x" * 10)
    logs = Logs(tmp_path)
    shown = list(logs.last(5))
    write(tmp_path, "a/r.log", b"yyyyyyyy\n")
    shown += [line for _ in range(4) for line in logs.new()]
    assert len(shown) > 1
    assert "".join(line.removeprefix("a/r: ") for line in shown) == "x" * 10 + "y" * 8


def test_no_logs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no logs are there"):
        Logs(tmp_path / "logs")
