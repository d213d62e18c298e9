"""Readers of users: their rows are prompts like others, and what they do wrong is one line."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from mopd.base.types import UserError
from mopd.config.data import DataConfig, ReaderConfig
from mopd.config.reading.build import build_from_json
from mopd.data.columns import survey
from mopd.data.prompts import load_prompts
from mopd.data.tokenizer import load_tokenizer
from tests.fixtures.tiny_models import make_tokenizer

CODE = """\
import csv
import os
import sys
import time

from beside import NAME


def table(path, delimiter=",", repeat=1):
    print("said")
    with open(path, newline="") as file:
        for row in csv.DictReader(file, delimiter=delimiter):
            for _ in range(repeat):
                yield {**row, "domain": NAME}


def failing(path):
    yield {"question": "a", "answer": "b"}
    raise LookupError("no such\\ncolumn")


def texts(path):
    return ["a"]


def numbers(path):
    yield {"question": float("nan")}


def slow(path):
    yield {"question": "a", "answer": "b"}
    time.sleep(600)


def lingering(path):
    if os.fork() == 0:
        time.sleep(600)
    yield {"question": "a", "answer": "b"}


def greedy(path):
    yield {"question": bytes(2**30).decode(), "answer": "b"}


def environment(path):
    yield {"question": " ".join(sorted(os.environ)), "answer": str("mopd" in sys.modules)}


def pictures(path):
    yield {"question": "a", "answer": "b", "images": [{"path": "a.png"}]}


def leaving(path):
    sys.exit(3)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "mine.py").write_text(CODE)
    (tmp_path / "beside.py").write_text("NAME = 'math'\n")
    (tmp_path / "data.csv").write_text("question;answer\nab;1\ncd;2\n")
    return tmp_path


def config(folder: Path, name: str, **keys: Any) -> DataConfig:
    entry = {"path": str(folder / "data.csv"), "columns": "question_answer", "domain": "math"}
    entry["reader"] = {"module": f"{folder / 'mine.py'}:{name}", **keys}
    return build_from_json(DataConfig, {"train": [entry]}, "recipe")


def rows(folder: Path, name: str, **keys: Any) -> list[tuple[str, Any]]:
    cfg = config(folder, name, **keys)
    dataset = load_prompts(cfg.train, cfg, load_tokenizer(folder / "tokenizer"))
    return [(row.text, row.ground_truth) for row in map(dataset.row, range(len(dataset)))]


def test_its_rows_are_prompts(folder: Path) -> None:
    found = rows(folder, "table", options={"delimiter": ";", "repeat": 2})
    assert [truth for _, truth in found] == ["1", "1", "2", "2"] and "ab" in found[0][0] and "cd" in found[3][0]


def test_a_survey_reads_no_more_rows_than_it_counts(folder: Path) -> None:
    cfg = config(folder, "table", options={"delimiter": ";", "repeat": 10**9})
    (file,) = cfg.files(cfg.train)
    began = time.monotonic()
    counted = survey(file, 100)
    assert counted.counts == {"math": 100} and not counted.is_whole
    assert time.monotonic() - began < 60


def test_its_environment_is_clean(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "1")
    ((text, truth),) = rows(folder, "environment")
    assert "SECRET" not in text and "PATH" in text and truth == "False"


@pytest.mark.parametrize(
    ("name", "words"),
    {
        "failing": r"failed: LookupError: no such column \(line 19\)",
        "texts": "failed: TypeError: it yields str, no dictionary of columns",
        "numbers": "failed: ValueError: Out of range float values",
        "greedy": "failed: MemoryError",
        "leaving": "failed: SystemExit: 3",
        "absent": "failed: AttributeError: .* has no attribute 'absent'",
        "lingering": "took longer than timeout_s 3",
        "slow": "took longer than timeout_s 3",
        "pictures": "row 0: rows of a reader have no images",
    }.items(),
)
def test_what_goes_wrong_is_one_line(folder: Path, name: str, words: str) -> None:
    began = time.monotonic()
    with pytest.raises(UserError, match=f"data.csv: .*{words}") as refused:
        rows(folder, name, timeout_s=3 if name in ("slow", "lingering") else 60, max_memory_gib=0.5)
    assert "\n" not in str(refused.value) and time.monotonic() - began < 60


def test_a_file_that_is_not_there(folder: Path) -> None:
    os.remove(folder / "mine.py")
    with pytest.raises(UserError, match=r"reader\.module: file '.*mine.py' does not exist"):
        rows(folder, "table")
    assert ReaderConfig(module="some:name").timeout_s == 600
