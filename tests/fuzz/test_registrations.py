"""What a run reads in the folder where servers register."""

from __future__ import annotations

import json
from pathlib import Path

from mopd.base.text import visible
from mopd.base.types import UserError
from mopd.engines.clients.remote import RemoteEngine
from mopd.serving.registration import FORMAT, read_registrations
from tests.fuzz.harness import fuzz

KEY = "teachers.math"
SERVER = {
    "format": FORMAT,
    "key": KEY,
    "server_id": "0123456789abcdef",
    "url": "http://10.0.0.5:8000",
    "host": "node1",
    "pid": 7,
    "started": 1.5,
    "beat": 3,
    "manifest": {"config_sha256": "c", "weights_sha256": "w", "tokenizer_sha256": "t"},
}


def test_registrations(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    path = tmp_path / f"{KEY}.node1.7.json"

    def read(content: bytes) -> None:
        path.write_bytes(content)
        path.chmod(0o600)
        found = read_registrations(tmp_path, KEY)
        assert len(found.servers) + len(found.problems) <= 1
        for problem in found.problems.values():
            raise UserError(problem)
        for server in found.servers.values():
            assert server.key == KEY and visible(server.place) == server.place and len(server.place) < 5000
            RemoteEngine(server.url, token="s" * 40, timeout_s=1.0)

    fuzz("registrations", [json.dumps(SERVER).encode()], read, (UserError,))
