"""What a Hub answers about a repository: its commit and its list of files."""

from __future__ import annotations

from pathlib import Path

import pytest

from mopd.base.types import UserError
from mopd.data.hub.fetch import fetch_model
from mopd.data.hub.names import HubName
from tests.fixtures.hub import hub_of_this_process
from tests.fuzz.harness import fuzz

FILES = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"1", "README.md": b""}


@pytest.mark.parametrize("answer", ["info", "tree"])
def test_answers(tmp_path: Path, answer: str) -> None:
    with hub_of_this_process(tmp_path / "home") as hub:
        commit = hub.add("models/org/model", FILES)
        files = ",".join(f'{{"type": "file", "path": "{p}", "size": {len(c)}, "oid": "a"}}' for p, c in FILES.items())
        valid = {"info": f'{{"id": "org/model", "sha": "{commit}"}}', "tree": f"[{files}]"}[answer].encode()

        def read(content: bytes) -> None:
            if answer == "tree":  # a commit of its own: the library asks once for each
                hub.add("models/org/model", FILES)
            hub.garbage = {answer: content}
            fetch_model(HubName(repository="org/model", revision=None, part=None))

        fuzz(f"hub {answer}", [valid], read, (UserError,))
