"""Where a server listens, and the file with its secret: what cannot be is one line, and nothing is waited for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mopd.base.types import UserError
from mopd.serving.address import Address, read_token_file

SECRET = "0123456789abcdef"


def test_a_secret(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(f" {SECRET}\n")
    assert read_token_file(path) == SECRET


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("none", "cannot be read: does not exist"),
        ("pipe", "cannot be read: not a regular file"),
        ("a\0b", "cannot be read: not a possible file name"),
        ("huge", "cannot be read: longer than 65536 bytes"),
        ("binary", "cannot be read"),
        ("short", "must hold one word of 16 or more ASCII characters"),
        ("letters", "must hold one word"),
    ],
)
def test_files_without_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, line: str) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    contents = {"short": b"abc", "letters": "é".encode() * 20, "binary": b"\xff" * 20}
    for file, content in {**contents, "huge": b"a" * 70_000}.items():
        Path(file).write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_token_file(Path(name))
    assert str(caught.value).startswith("token file '") and line in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("host", ["x" * 70 + ".example", "a..b", "\ud800"])
def test_hosts_that_are_no_names(host: str) -> None:
    with pytest.raises(UserError, match="is no host name"), Address(host=host).listen():
        pass


@pytest.mark.parametrize("port", [-1, 65536, 10**30])
def test_ports_that_are_none(port: int) -> None:
    with pytest.raises(UserError, match="is no port"), Address(port=port).listen():
        pass
