"""Messages of errors, whatever errors are: what tells of one never fails itself."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from mopd.base.text import first_line, last_line, message_of, one_line

ROOT = Path(__file__).parents[3]


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("error", "first", "last"),
    [
        (asyncio.TimeoutError(), "TimeoutError", "TimeoutError"),
        (RuntimeError("\n \n"), "RuntimeError", "RuntimeError"),
        (Mute("x"), "Mute", "Mute"),
        (KeyError(), "KeyError", "KeyError"),
        (KeyError("samples [9] are unknown"), "samples [9] are unknown", "samples [9] are unknown"),
        (KeyError(9), "9", "9"),
        (ValueError("\n\n  one \r\n\ttwo\x1b[31m\n"), "one", r"two\x1b[31m"),
        (ValueError("at http://me:hunter2@h/\nthen \ud800"), "at http://…@h/", r"then \ud800"),
        ("a\nb", "a", "b"),
    ],
)  # fmt: skip
def test_lines_of_any_error(error: BaseException | str, first: str, last: str) -> None:
    assert (first_line(error), last_line(error)) == (first, last)
    assert "\n" not in one_line(error) and one_line(error)
    assert isinstance(message_of(error), str)


def test_nobody_takes_an_error_apart_by_itself() -> None:
    own_way = re.compile(r"str\((error|exc|err|e)\)\.(strip|split|splitlines|partition)|error\.args\[0\]")
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in (ROOT / "mopd").rglob("*.py")
        if path != ROOT / "mopd" / "base" / "text.py"
        for line in path.read_text(encoding="utf-8").splitlines()
        if own_way.search(line)
    ]
    assert found == []
