"""A shard of records (``mopd/base/files/records.py``)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mopd.base.files.records import Records
from mopd.base.types import UserError
from tests.fuzz.harness import fuzz


def test_a_shard(tmp_path: Path) -> None:
    store = Records(tmp_path, {"content": "test"})
    for key in (b"one", b"two"):
        store.append(key, {"ids": np.arange(6, dtype=np.int32), "logprobs": np.zeros((3, 2), np.float32)})
    (shard,) = tmp_path.iterdir()

    def read(content: bytes) -> None:
        shard.write_bytes(content)
        dict(Records(tmp_path, {"content": "test"}).items())

    fuzz("records", [shard.read_bytes()], read, (UserError,))
