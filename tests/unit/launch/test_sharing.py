"""What one rank of each machine makes under torchrun is what all ranks of it get."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from mopd.launch import sharing
from mopd.launch.failure import LAUNCH_DIR
from mopd.types import UserError

RANKS = [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)]
"""Rank, machine, rank on the machine."""


def rank(number: int, machine: int, local: int, port: int, folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        variables = {
            "RANK": number, "WORLD_SIZE": len(RANKS), "LOCAL_RANK": local, "GROUP_RANK": machine,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True",
        }  # fmt: skip
        for name, value in variables.items():
            patch.setenv(name, str(value))
        text = sharing.once_per_machine(lambda: f"first of {number}", lambda first: f"{number} after {first}")
        (folder / str(number)).write_text(text)


def test_one_rank_of_each_machine_makes_the_text(tmp_path: Path) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    # The last one starts first: it has to wait.
    children = [context.Process(target=rank, args=(*one, store.port, tmp_path)) for one in reversed(RANKS)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0] * len(RANKS)
    texts = [(tmp_path / str(number)).read_text() for number, _, _ in RANKS]
    assert texts == ["first of 0", "first of 0", "2 after first of 0", "2 after first of 0"]


def test_without_a_store_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    with pytest.raises(UserError, match="names of the Hub need the store of torchrun's agent"):
        sharing.once_per_machine(str, str)


def test_from_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LAUNCH_DIR, raising=False)
    assert sharing.from_launcher() is None
    monkeypatch.setenv(LAUNCH_DIR, str(tmp_path))
    assert sharing.from_launcher() is None
    sharing.to_ranks(tmp_path, "é")
    assert sharing.from_launcher() == "é"
