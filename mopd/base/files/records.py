"""An append-only store of named arrays by key, in shards that several processes may write at a time.

A shard is a header line, then one record after the other::

    {"about": {…}, "format": "mopd records 1"}\\n
    sha256 of what follows [32] · length of the key [4] · length of the payload [8] · key · payload (safetensors)

Each process writes shards of its own, so no lock is needed, on a network file system neither. What a process that died
left unfinished at the end of its shard is not read: the record counts as never written. The last record of a key wins.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from mopd.base.files.json_text import parse_json
from mopd.base.files.reading import open_regular, shown_path
from mopd.base.files.writing import append_whole, writing
from mopd.base.types import UserError

logger = logging.getLogger(__name__)

FORMAT = "mopd records 1"
SUFFIX = ".records"
SHARD_BYTES = 2**30
"""Size from which a process begins its next shard."""
_MAX_HEADER_BYTES = 2**16
_MAX_KEY_BYTES = 2**12
_HEAD_BYTES = 44
_CURE = "remove this file (its records are made again), or name another folder"


class Records:
    """Store in one folder. ``get`` and ``append`` may be called from any thread."""

    def __init__(self, folder: str | Path, about: Mapping[str, str] | None = None, *, max_bytes: int = 2**62) -> None:
        """Read the index of the folder, which need not exist.

        Args:
            about: what the records are and what they hold for; written into each shard. ``None``: what the shards say.
            max_bytes: size of the folder's shards from which ``append`` writes nothing more.

        Raises:
            UserError: a shard is damaged, of another format, or about something else.
        """
        self.folder, self._max_bytes = Path(folder), max_bytes
        self._about = None if about is None else dict(about)
        self._index: dict[bytes, tuple[Path, int, int]] = {}
        """Key -> shard, offset and length of its newest record."""
        self._lock = threading.Lock()
        self._own: Path | None = None
        self.num_bytes = 0
        """Size of all shards, as far as this process knows."""
        for shard in sorted(self.folder.glob(f"*{SUFFIX}")):
            self._read_index(shard)

    @property
    def about(self) -> dict[str, str]:
        """What the records are about; empty where nobody has said so."""
        return dict(self._about or {})

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, key: bytes) -> bool:
        return key in self._index

    def keys(self) -> list[bytes]:
        """All keys, in their own order."""
        return sorted(self._index)

    def items(self) -> Iterator[tuple[bytes, dict[str, np.ndarray]]]:
        """Yield every record in the order of the keys."""
        for key in self.keys():
            arrays = self.get(key)
            assert arrays is not None
            yield key, arrays

    def get(self, key: bytes) -> dict[str, np.ndarray] | None:
        """Return the newest record of a key, ``None`` where there is none. ``UserError`` for a damaged one."""
        place = self._index.get(key)
        if place is None:
            return None
        shard, offset, length = place
        with open_regular(shard, cure=_CURE) as file:
            record = os.pread(file.fileno(), length, offset)
        if not _is_whole(record, length):
            raise _damaged(shard, f"the record at byte {offset} is not what was written")
        try:
            arrays: dict[str, np.ndarray] = load(record[_HEAD_BYTES + len(key) :])
        except (SafetensorError, KeyError) as error:
            raise _damaged(shard, f"the record at byte {offset} holds no arrays ({error})") from error
        return {name: array.copy() for name, array in arrays.items()}  # the library's cannot be written to

    def append(self, key: bytes, arrays: Mapping[str, np.ndarray]) -> bool:
        """Add a record, and return whether there was room for it: on return the operating system has it.

        Raises:
            UserError: the system refuses (a full disk); nothing of the record stays.
        """
        assert 0 < len(key) <= _MAX_KEY_BYTES, "a key that can be read back"
        payload = save({name: np.asarray(array, order="C") for name, array in arrays.items()})
        rest = len(key).to_bytes(4, "little") + len(payload).to_bytes(8, "little") + key + payload
        record = hashlib.sha256(rest).digest() + rest
        with self._lock:
            if self.num_bytes + len(record) > self._max_bytes:
                return False
            if self._own is None or self._own.stat().st_size >= SHARD_BYTES:
                self._own = self._new_shard()
            offset = self._write(self._own, record)
            self._index[key] = (self._own, offset, len(record))
            self.num_bytes += len(record)
        return True

    def _new_shard(self) -> Path:
        header = json.dumps({"about": self._about or {}, "format": FORMAT}, sort_keys=True).encode() + b"\n"
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        # numbered, so that the newest record of a key is known; the name's rest keeps processes apart
        number = max((int(path.name[:6]) for path in self._shards()), default=0) + 1
        shard = self.folder / f"{number:06d}-{uuid.uuid4().hex[:12]}{SUFFIX}"
        self._write(shard, header)
        self.num_bytes += len(header)
        return shard

    def _shards(self) -> list[Path]:
        return sorted(path for path in self.folder.glob(f"*{SUFFIX}") if path.name[:6].isdigit())

    @staticmethod
    def _write(shard: Path, content: bytes) -> int:
        """Append to a shard of this process, whole or not at all; return the offset."""
        with writing(shard), shard.open("ab", buffering=0) as file:
            return append_whole(file, content, is_synced=False)

    def _read_index(self, shard: Path) -> None:
        with open_regular(shard, cure=_CURE) as file:
            size = os.fstat(file.fileno()).st_size
            line = file.readline(_MAX_HEADER_BYTES)
            if not line.endswith(b"\n") and len(line) == size:
                return  # its process died before the first record
            self._check_header(shard, line)
            offset, last = len(line), None
            while offset < size:
                head = os.pread(file.fileno(), _HEAD_BYTES + _MAX_KEY_BYTES, offset)
                key_bytes, payload_bytes = (int.from_bytes(head[a:b], "little") for a, b in ((32, 36), (36, 44)))
                length = _HEAD_BYTES + key_bytes + payload_bytes
                if not 0 < key_bytes <= _MAX_KEY_BYTES or offset + length > size:
                    break
                key = head[_HEAD_BYTES : _HEAD_BYTES + key_bytes]
                last = (key, self._index.get(key), offset, length)
                self._index[key] = (shard, offset, length)
                offset += length
            # A machine that stopped may leave the last record's length without its bytes.
            if last is not None and not _is_whole(os.pread(file.fileno(), last[3], last[2]), last[3]):
                key, before, offset, _ = last
                self._index.pop(key)
                self._index |= {} if before is None else {key: before}
            if offset < size:
                logger.warning("%s: an unfinished record of %d bytes is left out", shown_path(shard), size - offset)
        self.num_bytes += size

    def _check_header(self, shard: Path, line: bytes) -> None:
        try:
            header = parse_json(line)
            if header["format"] != FORMAT:
                raise UserError(
                    f"{shown_path(shard)}: holds {str(header['format'])[:80]!r}, this mopd reads {FORMAT!r}: {_CURE}"
                )
            about = {str(key): str(value) for key, value in header["about"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _damaged(shard, f"it does not begin as one ({error!r:.200})") from error
        if self._about is None:
            self._about = about
        for key in sorted(about.keys() | self._about.keys()):
            if about.get(key) != self._about.get(key):
                there, asked = (f"{one.get(key)!r:.200}" for one in (about, self._about))
                raise UserError(
                    f"{shown_path(shard)}: {key} is {there} there, and {asked} is asked for: name another folder"
                )


def _is_whole(record: bytes, length: int) -> bool:
    return len(record) == length and hashlib.sha256(record[32:]).digest() == record[:32]


def _damaged(shard: Path, problem: str) -> UserError:
    return UserError(f"{shown_path(shard)}: not a sound file of records: {problem}: {_CURE}")
