"""The store of records: what one process writes another reads; what is torn, full or not meant is told or left out."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from mopd.base.files.records import Records
from mopd.base.types import UserError

ABOUT = {"content": "test"}
ONE = {"ids": np.arange(6, dtype=np.int32).reshape(3, 2), "logprobs": np.array([-0.5, -np.inf, -1e-30], np.float32)}
TWO = {"ids": np.zeros((0, 2), np.int32), "flag": np.array(True)}


def equal(found: dict[str, np.ndarray] | None, wanted: dict[str, np.ndarray]) -> bool:
    assert found is not None
    return found.keys() == wanted.keys() and all(
        found[name].dtype == array.dtype
        and found[name].shape == array.shape
        and found[name].tobytes() == array.tobytes()
        for name, array in wanted.items()
    )


def shard_of(folder: Path) -> Path:
    (shard,) = folder.glob("*.records")
    return shard


def write(folder: Path) -> Path:
    store = Records(folder, ABOUT)
    assert store.append(b"one", ONE) and store.append(b"two", TWO)
    return shard_of(folder)


def test_processes_share_a_folder(tmp_path: Path) -> None:
    here = Records(tmp_path / "store", ABOUT)
    here.append(b"mine", ONE)
    code = (
        "import sys, numpy as np; from mopd.base.files.records import Records; "
        f"s = Records(sys.argv[1], {ABOUT}); assert b'mine' in s; s.append(b'theirs', {{'a': np.ones(2)}})"
    )
    subprocess.run([sys.executable, "-c", code, str(here.folder)], check=True)
    here.append(b"later", TWO)
    assert here.get(b"theirs") is None, "read at the start"
    both = Records(here.folder, ABOUT)
    assert both.keys() == [b"later", b"mine", b"theirs"] and len(both) == 3 and b"mine" in both
    assert equal(both.get(b"mine"), ONE) and equal(both.get(b"later"), TWO) and both.get(b"other") is None
    assert both.num_bytes == sum(path.stat().st_size for path in here.folder.iterdir())
    both.append(b"mine", TWO)
    last = Records(here.folder)
    assert equal(dict(last.items())[b"mine"], TWO), "the newest record of a key, whichever process wrote it"
    assert last.about == ABOUT


@pytest.mark.parametrize("lost", [1, 50, 44 + 3, 10**6])
def test_a_torn_tail_is_left_out(tmp_path: Path, lost: int) -> None:
    shard = write(tmp_path)
    content = shard.read_bytes()
    tail = len(content) - content.rindex(b"two") + 44  # where the last record begins, from the end
    shard.write_bytes(content[: -min(lost, tail)])
    store = Records(tmp_path, ABOUT)
    assert store.keys() == [b"one"] and equal(store.get(b"one"), ONE)
    assert store.append(b"two", TWO)
    again = Records(tmp_path, ABOUT)
    assert equal(again.get(b"one"), ONE) and equal(again.get(b"two"), TWO)


def test_a_length_without_its_bytes_is_a_torn_tail(tmp_path: Path) -> None:
    store = Records(tmp_path, ABOUT)
    store.append(b"one", ONE)
    store.append(b"one", {"ids": np.full(64, 7)})
    shard = shard_of(tmp_path)
    shard.write_bytes(shard.read_bytes()[:-40] + bytes(40))
    assert equal(Records(tmp_path, ABOUT).get(b"one"), ONE), "the record before it"


def changed(old: bytes, new: bytes) -> Callable[[Path], int]:
    return lambda shard: shard.write_bytes(shard.read_bytes().replace(old, new, 1))


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (changed(b"records 1", b"records 2"), "holds 'mopd records 2', this mopd reads 'mopd records 1'"),
        (changed(b'"test"', b'"else"'), "content is 'else' there, and 'test' is asked for"),
        (changed(b'{"about"', b"about"), "does not begin as one"),
        (changed(b'"ids":', b'"idz":'), "the record at byte .* is not what was written"),
    ],
)
def test_what_is_not_meant_is_refused(tmp_path: Path, damage: Callable[[Path], int], line: str) -> None:
    damage(write(tmp_path))
    with pytest.raises(UserError, match=line):
        Records(tmp_path, ABOUT).get(b"one")


def test_room_is_bounded(tmp_path: Path) -> None:
    store = Records(tmp_path, ABOUT, max_bytes=1000)
    kept = [store.append(bytes([65 + i]), ONE) for i in range(20)]
    assert kept[0] and not kept[-1] and kept == sorted(kept, reverse=True)
    assert shard_of(tmp_path).stat().st_size == store.num_bytes <= 1000
    assert len(Records(tmp_path, ABOUT)) == sum(kept)


@contextmanager
def small_files(num_bytes: int) -> Iterator[None]:
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_refused_write_leaves_nothing_of_the_record(tmp_path: Path) -> None:
    store = Records(tmp_path, ABOUT)
    store.append(b"one", ONE)
    size = shard_of(tmp_path).stat().st_size
    with small_files(size + 100), pytest.raises(UserError, match="cannot be written: File too large; free space"):
        store.append(b"two", {"ids": np.zeros(1000)})
    assert shard_of(tmp_path).stat().st_size == size and b"two" not in store
    assert store.append(b"two", TWO)
    assert Records(tmp_path, ABOUT).keys() == [b"one", b"two"]
