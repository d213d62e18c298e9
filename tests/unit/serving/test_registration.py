"""What a server tells a run of itself, and what a run believes of what lies in its folder."""

from __future__ import annotations

import json
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mopd.base.types import UserError
from mopd.serving import registration
from mopd.serving.registration import MAX_BYTES, MAX_FILES, Registrar, read_registrations, read_server_token
from tests.fixtures.servers import wait_until

KEY = "teachers.math"
HASHES = {"config_sha256": "c", "weights_sha256": "w", "tokenizer_sha256": "t"}
GOOD: dict[str, Any] = {
    "format": registration.FORMAT,
    "key": KEY,
    "server_id": "0123456789abcdef",
    "url": "http://10.0.0.5:8000",
    "host": "node1",
    "pid": 7,
    "started": 1.5,
    "beat": 3,
    "manifest": HASHES,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "run" / "replicas"
    path.mkdir(parents=True, mode=0o700)
    return path


@pytest.fixture
def registrar(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registrar]:
    monkeypatch.setattr(registration, "BEAT_S", 0.02)
    registrar = Registrar(folder, KEY, host="node/1")
    yield registrar
    registrar.end()


def written(folder: Path, name: str = f"{KEY}.node1.7.json", mode: int = 0o600, **changes: Any) -> Path:
    path = folder / name
    path.write_text(json.dumps(GOOD | changes), encoding="utf-8")
    path.chmod(mode)
    return path


def problem(folder: Path) -> str:
    """Of the only file that lies there."""
    found = read_registrations(folder, KEY)
    assert not found.servers
    (line,) = found.problems.values()
    assert "\n" not in line and len(line) < 1000
    return line


def test_a_server_is_seen_while_it_lives_and_no_longer(tmp_path: Path, registrar: Registrar) -> None:
    folder = tmp_path / "run" / "replicas"
    assert not read_registrations(folder, KEY).servers
    before = time.time()
    registrar.begin("http://10.0.0.5:8000", HASHES)
    ((path, server),) = read_registrations(folder, KEY).servers.items()
    assert (server.key, server.url, server.host, server.pid) == (KEY, "http://10.0.0.5:8000", "node/1", os.getpid())
    assert dict(server.manifest) == HASHES and before - 1 <= server.started <= time.time() + 1
    assert path.name == f"{KEY}.node%2F1.{os.getpid()}.json"
    token = path.with_suffix(".token")
    assert [stat.S_IMODE(p.stat().st_mode) for p in (folder, path, token)] == [0o700, 0o600, 0o600]
    assert read_server_token(path) == registrar.token
    token.unlink()  # by whoever clears up; the next count brings it back
    wait_until(lambda: token.exists() and read_registrations(folder, KEY).servers[path].beat >= server.beat + 2)
    assert read_registrations(folder, KEY).servers[path].server_id == server.server_id
    assert not read_registrations(folder, "rollout").servers
    registrar.end()
    registrar._thread.join(20)  # which a count may hold up for longer than the end waits
    assert list(folder.iterdir()) == []


def test_a_count_that_is_written_late_leaves_nothing(
    folder: Path, registrar: Registrar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Network file systems take their time; the end does not wait for them."""
    is_writing, goes_on, write = threading.Event(), threading.Event(), registration.write_private  # type: ignore[attr-defined]
    registrar.begin("http://10.0.0.5:8000", HASHES)

    def write_late(path: Path, content: bytes) -> None:
        is_writing.set()
        assert goes_on.wait(20)
        write(path, content)

    monkeypatch.setattr(registration, "write_private", write_late)
    assert is_writing.wait(20)
    registrar.end()
    goes_on.set()
    registrar._thread.join(20)
    assert list(folder.iterdir()) == []


def test_a_server_outlives_a_folder_that_cannot_be_written(
    folder: Path, registrar: Registrar, caplog: pytest.LogCaptureFixture
) -> None:
    registrar.begin("http://10.0.0.5:8000", HASHES)
    aside = folder.rename(folder.with_name("aside"))
    wait_until(lambda: "the run cannot see that this server lives" in caplog.text)
    time.sleep(0.1)
    assert caplog.text.count("cannot see") == 1 and not folder.exists()
    aside.rename(folder)
    (before,) = read_registrations(folder, KEY).servers.values()
    wait_until(lambda: next(iter(read_registrations(folder, KEY).servers.values())).beat > before.beat)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"format": "mopd replica 2"}, "is no server's of this mopd"),
        ({"key": "rollout"}, "is of 'rollout', not of 'teachers.math'"),
        ({"key": "r" * 100}, f"is of '{'r' * 80}', not of"),
        ({"server_id": "../../etc"}, "server_id is none"),
        ({"url": "http://user:secret@10.0.0.5"}, "has a user name or password"),
        ({"beat": "many"}, "beat"),
        ({"host": "x" * 2000}, "host has more than"),
        ({"manifest": {"config_sha256": 3}}, "manifest"),
        ({"surplus": 1}, "surplus"),
        ({"manifest": {str(i): "" for i in range(100)}}, "not valid JSON (more than"),
    ],
)
def test_what_no_server_writes_is_ignored(folder: Path, changes: dict[str, Any], said: str) -> None:
    written(folder, **changes)
    line = problem(folder)
    assert said in line and "secret" not in line


def make_fifo(path: Path) -> None:
    os.mkfifo(path, 0o600)


def of_somebody_else(path: Path) -> None:
    written(path.parent, path.name)
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(path, 12345, 12345)


HOSTILE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "half written": (lambda path: path.write_text(json.dumps(GOOD)[:60]), "not valid JSON"),
    "no object": (lambda path: path.write_text("[1, 2]"), "is no server's of this mopd"),
    "large": (lambda path: path.write_text(" " * MAX_BYTES + "{}"), "longer than"),
    "a link": (lambda path: path.symlink_to(written(path.parent.parent, "real")), "cannot be read"),
    "a folder": (lambda path: path.mkdir(), "not a regular file"),
    "a pipe": (make_fifo, "not a regular file"),
    "writable by others": (lambda path: written(path.parent, path.name, mode=0o666), "others than this user"),
    "somebody else's": (of_somebody_else, "others than this user"),
}


@pytest.mark.parametrize("make", HOSTILE)
def test_hostile_files_are_ignored_in_time(folder: Path, make: str) -> None:
    action, said = HOSTILE[make]
    action(folder / f"{KEY}.evil.1.json")
    assert said in problem(folder)


def test_a_good_server_beside_them_is_found(folder: Path) -> None:
    (folder / f"{KEY}.evil.1.json").write_text("{")
    (folder / "unrelated.json").write_text("{")
    (folder / f".{KEY}.node1.7.json.3.partial").write_text("{")
    written(folder, f"{KEY}.hard.node1.7.json", key=f"{KEY}.hard")  # of a teacher whose name begins alike
    path = written(folder)
    found = read_registrations(folder, KEY)
    assert list(found.servers) == [path] and [p.name for p in found.problems] == [f"{KEY}.evil.1.json"]


def test_more_files_than_servers_can_be(folder: Path) -> None:
    for i in range(MAX_FILES + 5):
        (folder / f"{KEY}.n.{i}.json").touch()
    problems = read_registrations(folder, KEY).problems
    assert len(problems) == MAX_FILES + 1 and f"more than {MAX_FILES} files" in problems[folder]


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_folder_that_others_can_write_is_refused(folder: Path, mode: int) -> None:
    written(folder)
    folder.chmod(mode)
    for refuse in (lambda: read_registrations(folder, KEY), lambda: Registrar(folder, KEY, host="a")):
        with pytest.raises(UserError, match=r"others than this user may write there, .* chmod 700 it") as caught:
            refuse()
        assert "\n" not in str(caught.value)


def test_a_folder_that_is_a_link_or_file_is_refused(folder: Path) -> None:
    link, file = folder.with_name("link"), folder.with_name("file")
    link.symlink_to(folder)
    file.touch()
    for path in (link, file):
        with pytest.raises(UserError, match="is no folder: remove it"):
            read_registrations(path, KEY)


@pytest.mark.parametrize("content", [None, "a link", b"short", b"\xff" * 40, b"x" * 100_000])
def test_a_secret_that_is_none(folder: Path, content: Any) -> None:
    path = written(folder)
    token = path.with_suffix(".token")
    if content == "a link":
        token.symlink_to(written(folder.parent, "secret"))
    elif content is not None:
        token.write_bytes(content)
        token.chmod(0o600)
    with pytest.raises(UserError) as caught:
        read_server_token(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000
