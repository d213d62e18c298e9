"""Rewards: exact match, and functions of the user's in a process of their own."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mopd.base.types import UserError
from mopd.config.rewards import CustomRewardConfig, ExactMatchConfig
from mopd.rewards.domains import build_rewards
from mopd.rewards.interface import Graded, RewardItem

SOURCE = """
import os

import helper

def overlap(prompt, response, ground_truth, extra_info, domain):
    print("a user's print must not disturb the answers", flush=True)
    return helper.share(response, ground_truth) * extra_info["scale"]

def sleeps(**row):
    open(row["extra_info"]["pid"], "w").write(str(os.getpid()))
    while True:
        pass
"""
EXACT = ExactMatchConfig(type="exact_match")


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


def test_exact_match_strips_and_compares_text() -> None:
    items = [item(" ab\n", "ab"), item("ab c", "ab"), item("7", 7), item("", "")]
    graded = asyncio.run(build_rewards({"default": EXACT}).of("math")(items))
    assert [one.value for one in graded] == [1.0, 0.0, 1.0, 1.0]
    assert graded[1] == Graded(0.0, "ab c", "another text than the ground truth")
    with pytest.raises(UserError, match=r"f: row 3: the ground truth is list.*data.columns.ground_truth"):
        asyncio.run(build_rewards({"default": EXACT}).of("math")([item(ground_truth=["ab"])]))


def _state(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # gone before it was opened, or while it is read
        return None


def test_domains_have_their_own_rewards_and_equal_settings_share_one(source: Path) -> None:
    custom = CustomRewardConfig(type="custom", path=os.fspath(source), function="overlap")
    rewards = build_rewards({"code": custom, "law": custom, "art": EXACT, "default": EXACT})
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

    async def twice() -> list[Graded]:
        return [graded for _ in range(2) for graded in await rewards.score(items)]

    assert [graded.value for graded in asyncio.run(twice())] == 2 * [2.0, 1.0, 1.0, 0.0]
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
