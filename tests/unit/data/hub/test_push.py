"""Folders of a run on a Hub of the tests' own: what is uploaded, what is told where it is not."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mopd.base.types import UserError
from mopd.config.output import PushConfig
from mopd.data.hub.push import HubPusher, check_token, make_repository
from tests.fixtures.hub import LoopbackHub, hub_of_this_process

MINE = PushConfig(repo="me/student")
WAIT_S = 30.0


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")  # its storage is another service
    with hub_of_this_process(tmp_path / "home") as running:
        monkeypatch.setenv("HF_TOKEN", "hf_mine")
        yield running


def folder(path: Path, text: str) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(text)
    (path / "model.safetensors").write_bytes(text.encode() * 1000)
    return path


def until_is(pusher: HubPusher, **numbers: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while any(pusher.take_numbers()[f"hub/{name}"] != number for name, number in numbers.items()):
        assert time.monotonic() < deadline, pusher.take_numbers()
        time.sleep(0.02)


def test_each_folder_is_a_commit_and_nobody_waits_for_it(hub: LoopbackHub, tmp_path: Path) -> None:
    make_repository(MINE, "push")
    make_repository(MINE, "push")  # it is there, and private
    repository = hub.repositories["models/me/student"]
    assert repository.private and hub.tokens == {"Bearer hf_mine"}
    pusher = HubPusher(MINE, tmp_path / "pushed.json", {})
    hub.released.clear()
    begun = time.monotonic()
    for step in (1, 2):
        pusher.push(folder(tmp_path / f"step_{step}", str(step)), f"step {step}")
    assert time.monotonic() - begun < 1.0 and pusher.take_numbers()["hub/waiting"] == 2
    hub.released.set()
    pusher.finish()
    assert pusher.take_numbers() == {"hub/pushed": 2, "hub/failures": 0, "hub/waiting": 0}
    commits = json.loads((tmp_path / "pushed.json").read_text())
    assert [repository.messages[commits[f"step_{step}"]] for step in (1, 2)] == ["step 1", "step 2"]
    assert repository.commits[commits["step_2"]]["model.safetensors"] == b"2" * 1000
    assert repository.branches["main"] == commits["step_2"]
    again = HubPusher(MINE, tmp_path / "pushed.json", commits)
    assert again.has_pushed(tmp_path / "step_2") and not again.has_pushed(tmp_path / "step_3")


def test_a_failure_is_told_and_tried_again_with_the_next(
    hub: LoopbackHub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_repository(MINE, "push")
    pusher = HubPusher(MINE, tmp_path / "pushed.json", {})
    hub.num_refused = 1
    with caplog.at_level(logging.WARNING):
        pusher.push(folder(tmp_path / "step_1", "1"), "step 1")
        until_is(pusher, failures=1, pushed=0, waiting=1)
        pusher.push(folder(tmp_path / "step_2", "2"), "step 2")
        until_is(pusher, failures=1, pushed=2, waiting=0)
        hub.num_refused = 2
        pusher.push(folder(tmp_path / "step_3", "3"), "step 3")
        until_is(pusher, failures=2, waiting=1)
        pusher.finish()
    told = [record.getMessage() for record in caplog.records if record.name == "mopd.data.hub.push"]
    assert len(told) == 4 and all("\n" not in line for line in told)
    assert "step_1 could not be uploaded to me/student (" in told[0] and "out of order" in told[0]
    assert "1 folders are not on the Hub: hf upload me/student FOLDER" in told[-1] and "step_3" in told[-1]
    assert set(json.loads((tmp_path / "pushed.json").read_text())) == {"step_1", "step_2"}


def test_what_cannot_be_uploaded_is_refused_before_the_run(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("models/me/open", {"config.json": b"{}"})
    with pytest.raises(UserError, match=r"^key: me/open is there and public: set push_to_hub\.private: false"):
        make_repository(PushConfig(repo="me/open"), "key")
    make_repository(PushConfig(repo="me/open", private=False), "key")
    monkeypatch.setenv("HF_TOKEN", "")
    with pytest.raises(UserError, match=r"^key: HF_TOKEN is not set here: export a token that may write"):
        check_token("key")
    with pytest.raises(ValueError, match="repo is 'student': write a name of the Hub"):
        PushConfig(repo="student")
