"""What one rank of each machine makes under torchrun is what all ranks of it get."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from mopd.base.types import UserError
from mopd.launch import sharing
from mopd.launch.failure import LAUNCH_DIR
from mopd.launch.node import RUN_SECRET
from mopd.weights.signing import read_signed, sign

RANKS = [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)]
"""Rank, machine, rank on the machine."""


def rank(
    number: int,
    machine: int,
    local: int,
    port: int,
    folder: Path,
    agents_store: bool = True,
    bad: int = -1,
    secrets: tuple[str, str] = ("", ""),
) -> None:
    """Leaves its text, or the line of its error; rank ``bad`` fails to make one. ``secrets`` by machine."""

    def make(text: str) -> str:
        if number == bad:
            raise UserError(f"{text} is bad")
        return text

    with pytest.MonkeyPatch.context() as patch:
        variables = {
            "RANK": number, "WORLD_SIZE": len(RANKS), "LOCAL_RANK": local, "GROUP_RANK": machine,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": agents_store,
            "GROUP_WORLD_SIZE": 2, "TORCHELASTIC_RUN_ID": "one", RUN_SECRET: secrets[machine],
        }  # fmt: skip
        for name, value in variables.items():
            patch.setenv(name, str(value))
        try:
            text = sharing.once_per_machine(
                lambda: make(f"first of {number}"), lambda first: make(f"{number} after {first}")
            )
        except UserError as error:
            (folder / str(number)).write_text(str(error))
            return
        (folder / str(number)).write_text(text)


def texts_of_ranks(folder: Path, port: int, *more: object) -> list[str]:
    context = multiprocessing.get_context("spawn")
    # The last one starts first: it has to wait.
    children = [context.Process(target=rank, args=(*one, port, folder, *more)) for one in reversed(RANKS)]
    for child in children:
        child.start()
    for child in children:
        child.join(120)
    assert [child.exitcode for child in children] == [0] * len(RANKS)
    return [(folder / str(number)).read_text() for number, _, _ in RANKS]


def test_one_rank_of_each_machine_makes_the_text(tmp_path: Path) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    texts = texts_of_ranks(tmp_path, store.port)
    assert texts == ["first of 0", "first of 0", "2 after first of 0", "2 after first of 0"]


@pytest.mark.parametrize(("bad", "line"), [(0, "first of 0 is bad"), (2, "2 after first of 0 is bad")])
def test_one_machines_error_is_every_ranks(bad: int, line: str, tmp_path: Path) -> None:
    """No rank goes on before all machines have their text."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert texts_of_ranks(tmp_path, store.port, True, bad) == [line] * len(RANKS)


def test_with_a_secret_of_the_run(tmp_path: Path) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    texts = texts_of_ranks(tmp_path, store.port, True, -1, ("s3cret", "s3cret"))
    assert texts == ["first of 0", "first of 0", "2 after first of 0", "2 after first of 0"]
    told = read_signed("s3cret", "recipe/0", store.get("mopd/start/0/recipe/0"))
    assert json.loads(told) == {"text": "first of 0"}


@pytest.mark.parametrize("secrets", [("s3cret", ""), ("", "s3cret"), ("s3cret", "another")])
def test_machines_with_different_secrets_end_in_one_line(secrets: tuple[str, str], tmp_path: Path) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for line in texts_of_ranks(tmp_path, store.port, True, -1, secrets):
        assert line.startswith(f"MASTER_ADDR 127.0.0.1:{store.port}: ") and "\n" not in line
        assert line.endswith(": set MOPD_RUN_SECRET to the same on all nodes, or keep other users from this port")


STRANGERS = {
    "as ours": b'{"text": "own"}',
    "signed with another": sign("another", "k", b"{}") + b"{}",
    "no JSON": b"\xff",
}


@pytest.mark.parametrize("name", STRANGERS)
def test_what_a_stranger_leaves_is_no_recipe(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for key in ("mopd/start/0/recipe/0", "mopd/start/0/recipe/all"):
        store.set(key, STRANGERS[name])  # type: ignore[arg-type]  # bytes are allowed
    for variable, value in {
        "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0", RUN_SECRET: "s3cret",
    }.items():  # fmt: skip
        monkeypatch.setenv(variable, value)
    with pytest.raises(UserError, match="'recipe/0' is not signed with this run's secret: set MOPD_RUN_SECRET"):
        sharing.once_per_machine(lambda: "", lambda first: first)


def test_without_the_agents_store_is_one_line(tmp_path: Path) -> None:
    for line in texts_of_ranks(tmp_path, 1, False):
        assert "start the ranks with mopd train or torchrun" in line and "\n" not in line


def test_from_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LAUNCH_DIR, raising=False)
    assert sharing.from_launcher() is None
    monkeypatch.setenv(LAUNCH_DIR, str(tmp_path))
    assert sharing.from_launcher() is None
    sharing.to_ranks(tmp_path, "é")
    assert sharing.from_launcher() == "é"
