"""Rewards: exact match, and functions of the user's in a process of their own."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from mopd.base.types import UserError
from mopd.config.rewards import CustomRewardConfig, ExactMatchConfig
from mopd.rewards.domains import CustomReward, ExactMatchReward, build_rewards
from mopd.rewards.interface import Graded, RewardItem
from mopd.rewards.process import RewardProcess

SOURCE = """
import os
import subprocess
import sys
import sys

import helper

print("imported")

def overlap(prompt, response, ground_truth, extra_info, domain):
    print("a user's print must not disturb the answers", flush=True)
    return helper.share(response, ground_truth) * extra_info["scale"]

def environment(**row):
    return len(set(os.environ) - {"PATH", "LANG", "LC_CTYPE"})

def raises(**row):
    raise KeyError("no such thing")

def text(**row):
    return "great"

def infinite(**row):
    return float("inf")

def dies(**row):
    sys.stderr.write("killed by myself\\n")
    os._exit(7)

def sleeps(**row):
    open(row["extra_info"]["pid"], "w").write(str(os.getpid()))
    while True:
        pass
"""

RAISING_LINE = next(i for i, line in enumerate(SOURCE.splitlines(), start=1) if "raise KeyError" in line)


def item(response: str = "ab", ground_truth: Any = "ab", domain: str = "math", **extra: Any) -> RewardItem:
    return RewardItem(
        prompt="p", response=response, ground_truth=ground_truth, extra_info=extra, domain=domain, place="f: row 3"
    )


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "helper.py").write_text("def share(a, b):\n    return sum(x == y for x, y in zip(a, b)) / len(b)\n")
    path = tmp_path / "rewards_of_mine.py"
    path.write_text(SOURCE)
    return path


@pytest.fixture
def call(source: Path) -> Iterator[Any]:
    opened: list[CustomReward] = []

    def run(function: str, items: Sequence[RewardItem], timeout_s: float = 20.0, batches: int = 1) -> list[float]:
        cfg = CustomRewardConfig(type="custom", path=str(source), function=function, timeout_s=timeout_s)
        opened.append(CustomReward(cfg))

        async def batches_in_turn() -> list[float]:
            return [graded.value for _ in range(batches) for graded in await opened[-1](items)]

        return asyncio.run(batches_in_turn())

    yield run
    for reward in opened:
        reward.close()


def test_exact_match_strips_and_compares_text() -> None:
    items = [item(" ab\n", "ab"), item("ab c", "ab"), item("7", 7), item("", "")]
    graded = asyncio.run(ExactMatchReward()(items))
    assert [one.value for one in graded] == [1.0, 0.0, 1.0, 1.0]
    assert graded[1] == Graded(0.0, "ab c", "another text than the ground truth")
    with pytest.raises(UserError, match=r"f: row 3: the ground truth is list.*data.columns.ground_truth"):
        asyncio.run(ExactMatchReward()([item(ground_truth=["ab"])]))


def test_custom_function_sees_its_row_and_nothing_else(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "x")
    items = [item("ab", "ab", scale=2), item("ax", "ab", scale=1)]
    assert call("overlap", items, batches=2) == [2.0, 0.5, 2.0, 0.5]
    assert call("environment", [item()]) == [0.0]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("raises", rf"failed: KeyError: 'no such thing' \(line {RAISING_LINE}\)"),
        ("text", r"returned 'great', not a finite number, for f: row 3"),
        ("infinite", r"returned inf, not a finite number"),
        ("dies", r"ended its process \(exit code 7\): killed by myself"),
        ("absent", r"cannot be loaded: AttributeError: .*absent"),
    ],
)
def test_failures_name_file_and_function(call: Any, source: Path, function: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        call(function, [item()])
    assert str(caught.value).startswith(f"{source}: custom reward {function!r}") and "\n" not in str(caught.value)


def test_deadline_kills_the_process(call: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no answer within timeout_s 15:"):  # a slow start would say the same
        call("sleeps", [item(pid=str(tmp_path / "pid"))], timeout_s=15.0)
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 30
    while (state := _state(pid)) not in ("Z", None):
        assert time.monotonic() < deadline, state
        time.sleep(0.05)


def _state(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # gone before it was opened, or while it is read
        return None


def test_missing_file_is_refused_at_once() -> None:
    with pytest.raises(UserError, match=r"nowhere.py: no such file"):
        CustomReward(CustomRewardConfig(type="custom", path="nowhere.py", function="f"))


def test_domains_have_their_own_rewards_and_equal_settings_share_one(source: Path) -> None:
    custom = CustomRewardConfig(type="custom", path=os.fspath(source), function="overlap")
    exact = ExactMatchConfig(type="exact_match")
    rewards = build_rewards({"code": custom, "law": custom, "art": exact, "default": exact})
    assert rewards.of("code") is rewards.of("law")
    assert rewards.of("art") is rewards.of("math")  # both exact_match
    assert rewards.name("art") == "rewards.art (exact_match)" and rewards.name("x") == "rewards.default (exact_match)"
    assert rewards.unused(["code", "law"]) == ["art"]
    items = [
        item("ax", domain="code", scale=4),
        item("ab"),
        item("ax", domain="law", scale=2),
        item("ax", domain="art"),
    ]
    assert [graded.value for graded in asyncio.run(rewards.score(items))] == [2.0, 1.0, 1.0, 0.0]
    rewards.close()
    with pytest.raises(UserError, match=r"rewards has none for domain 'a.b'.*add rewards.\"a.b\", or rewards.default"):
        build_rewards({"code": custom}).of("a.b")


def test_the_process_ends_with_its_parent(source: Path, tmp_path: Path) -> None:
    program = f"""
import asyncio
from mopd.config.rewards import CustomRewardConfig as Config
from mopd.rewards.domains import CustomReward
from mopd.rewards.interface import RewardItem
reward = CustomReward(Config(type="custom", path={str(source)!r}, function="sleeps"))
extra_info = {{"pid": {str(tmp_path / "pid")!r}}}
item = RewardItem(prompt="", response="", ground_truth="", extra_info=extra_info, domain="", place="")
asyncio.run(reward([item]))
"""
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=Path(__file__).parents[3])
    deadline = time.monotonic() + 60
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < deadline and parent.poll() is None
        time.sleep(0.05)
    pid = int((tmp_path / "pid").read_text())
    assert _state(pid) == "R"
    parent.kill()
    parent.wait()
    while _state(pid) not in ("Z", None):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_caller_that_leaves_while_it_starts_leaves_nothing_behind(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the end of the run would wait for the deadline of a batch that nobody wants."""
    reward = CustomReward(CustomRewardConfig(type="custom", path=os.fspath(source), function="sleeps", timeout_s=100))
    is_starting, goes_on, begin = threading.Event(), threading.Event(), reward._start

    def start_slowly() -> RewardProcess:
        is_starting.set()
        assert goes_on.wait(30)
        return begin()

    monkeypatch.setattr(reward, "_start", start_slowly)

    async def leave() -> None:
        asked = asyncio.create_task(reward([item(pid=str(tmp_path / "pid"))]))
        await asyncio.to_thread(is_starting.wait, 30)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        goes_on.set()

    asyncio.run(leave())  # waits for its threads
    reward.close()
