from __future__ import annotations

import threading

import pytest
import torch

from mopd.student.checkpoints.background import Background
from mopd.types import UserError

CPU = torch.device("cpu")


def refuse() -> None:
    raise UserError("no space")


def test_work_goes_on_beside_and_its_error_is_told_once() -> None:
    may_end = threading.Event()

    def work() -> None:
        assert may_end.wait(60)
        refuse()

    with Background(CPU, timeout_s=60) as background:
        background.finish()  # of nothing
        assert not background.is_busy
        background.start(work)
        assert background.is_busy
        with pytest.raises(RuntimeError, match="before the last one is finished"):
            background.start(work)
        may_end.set()
        with pytest.raises(UserError, match="no space"):
            background.finish()
        background.finish()
        background.start(lambda: None)  # a later one starts anew


def test_an_error_waits_for_what_was_begun() -> None:
    may_end, ended = threading.Event(), threading.Event()

    def work() -> None:
        assert may_end.wait(60)
        ended.set()
        refuse()

    background = Background(CPU, timeout_s=60)
    background.start(work)
    threading.Timer(0.05, may_end.set).start()
    with pytest.raises(ZeroDivisionError), background:
        _ = 1 / 0
    assert ended.is_set()


def test_the_end_of_the_block_tells_of_the_last_one() -> None:
    with pytest.raises(UserError, match="no space"), Background(CPU, timeout_s=60) as background:
        background.start(refuse)


def test_the_wait_has_a_deadline() -> None:
    may_end = threading.Event()

    def work() -> None:
        assert may_end.wait(60)

    background = Background(CPU, timeout_s=0.05)
    background.start(work)
    with pytest.raises(UserError, match=r"schedule\.wait_timeout_s: a checkpoint was not written within 0\.05 s"):
        background.finish()
    may_end.set()
