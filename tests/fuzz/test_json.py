"""The reader of small JSON files, on which the others stand."""

from __future__ import annotations

from pathlib import Path

from mopd.base.files.json_text import read_json_object
from mopd.base.types import UserError
from tests.fuzz.harness import fuzz

VALID = [b'{"a": [1, 2.5, -3e4, true, null], "b": {"c": "\xc3\xa9 \\u00e9"}, "d": "x"}', b'{"sha256": {"x": "00ff"}}']


def test_json_files(tmp_path: Path) -> None:
    def read(content: bytes) -> None:
        path = tmp_path / "file.json"
        path.write_bytes(content)
        read_json_object(path, cure="write it again")

    fuzz("json", VALID, read, (UserError,))
