"""Whatever a response is, it is the response's own result: a number, words that can be written, and the run goes on."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mopd.base.metrics import MAX_LINE_BYTES
from mopd.config.rewards import (
    CodeConfig,
    JsonSchemaConfig,
    MathConfig,
    MultipleChoiceConfig,
    RegexConfig,
    RewardConfig,
)
from mopd.orchestrator.validation import _example, plain_examples
from mopd.rewards import judge
from mopd.rewards.domains import build_rewards
from mopd.rewards.interface import Graded, RewardItem
from tests.fuzz.test_responses import item as response_item
from tests.fuzz.test_responses import run_dir, show  # noqa: F401 - a fixture
from tests.unit.rewards.items import item

ASSERTS = ["assert f() == 1"]
LONG_S = 600.0
"""None of these responses runs long."""
GOOD: dict[str, tuple[RewardConfig, RewardItem]] = {
    "math": (MathConfig(type="math", timeout_s=LONG_S), item(r"\boxed{2}", "2")),
    "regex": (RegexConfig(type="regex", pattern="x(.*)", timeout_s=LONG_S), item("x1", "1")),
    "json_schema": (
        JsonSchemaConfig(type="json_schema", timeout_s=LONG_S),
        item("{}", {"type": "object", "additionalProperties": False}),
    ),
    "code": (CodeConfig(type="code", timeout_s=LONG_S), item("```\ndef f(): return 1\n```", ASSERTS)),
}
"""Grader -> a response that it gives 1."""
ENDING: dict[str, tuple[str, str]] = {
    # grader, response
    "a lone surrogate raised": ("code", '```\ndef f(): raise ValueError("\\ud800")\n```'),
    "a low one returned": ("code", '```\ndef f(): return "\\udfff"\n```'),
    "a name of surrogates": (
        "code",
        '```\ndef f(): raise type("\\udc80", (Exception,), {})("\\0\\x1b[2J\\u202e")\n```',
    ),
    "exits with one": ("code", '```\nimport sys\ndef f(): sys.exit("\\ud800")\n```'),
    "500 astral characters": ("code", '```\ndef f(): raise ValueError("\\U0010ffff" * 10**6)\n```'),
    "dies of a signal without a name": ("code", "```\ndef f():\n    import os; os.kill(os.getpid(), 40)\n```"),
    "the program itself": ("code", "```\ndef f(): return '\ud800'\n```"),
    "an escaped key": ("json_schema", '{"\\ud800": "x"}'),
    "a key that is one": ("json_schema", '{"\udc00\x00": "x"}'),
    "an escaped value": ("json_schema", '["\\udfff\\u0000"]'),
    "a match": ("regex", "x\ud800\udc00\ud800"),
    "a match of much": ("regex", "x" + "\U0001f600" * 10_000),
    "a box": ("math", "\\boxed{\ud800}"),
    "text": ("math", "1 \ud800 \x00 \u202e"),
}


def outcomes(grader: str, *items: RewardItem) -> list[Graded]:
    """Of a batch, and of another one behind it that must be judged too."""
    cfg, good = GOOD[grader]
    rewards = build_rewards({"math": cfg})

    async def both() -> list[Graded]:
        found = await rewards.score(items)
        assert [one.value for one in await rewards.score([good])] == [1.0]
        return found

    try:
        return asyncio.run(both())
    finally:
        rewards.close()


@pytest.fixture(scope="module")
def found() -> Mapping[str, Graded]:
    graded = {}
    for grader in GOOD:
        names = [name for name, (kind, _) in ENDING.items() if kind == grader]
        truth = GOOD[grader][1].ground_truth
        given = outcomes(grader, *(item(ENDING[name][1], truth) for name in names))
        graded |= dict(zip(names, given, strict=True))
    return graded


@pytest.mark.parametrize("name", ENDING)
def test_it_scores_0_and_its_words_can_be_written(name: str, found: Mapping[str, Graded]) -> None:
    assert found[name].value == 0.0 and found[name].problem
    for text in (found[name].extracted or "", found[name].problem):
        text.encode()
        assert len(text) <= judge.MAX_SHOWN


def test_a_grader_that_cannot_work_is_not_a_wrong_response() -> None:
    """Where no sandbox can be set up every program would score 0."""

    def grade(call: dict[str, Any]) -> Any:
        raise call["error"]

    settings = {"num_processes": 2, "timeout_s": 20.0, "grace_s": 0.0}
    for error in (OSError(28, "no space \ud800"), subprocess.SubprocessError("preexec")):
        answer = judge.judge(grade, [{"error": error}], settings)
        assert answer["item"] == 0 and answer["error"].startswith("could not judge: ")
        answer["error"].encode()
    answer = judge.judge(grade, [{"error": ValueError("\ud800")}], settings)
    assert answer == {"values": [[0.0, None, "ValueError: \\ud800"]]}


def test_what_one_response_takes_from_the_others_is_its_own_result(tmp_path: Path) -> None:
    """A disk that one fills, with files that are gone when it ends, ended the run by the error of another."""
    full, refused = tmp_path / "full", tmp_path / "refused"

    def wait_for(path: Path) -> None:
        while not path.exists():
            time.sleep(0.01)

    def grade(call: dict[str, Any]) -> Any:
        if call["fills"]:
            full.touch()
            wait_for(refused)
            full.unlink()
            return 0.0, None, "it wrote too much"
        if not refused.exists():
            wait_for(full)
            refused.touch()
            raise OSError(28, "No space left on device")
        return 1.0, "x", ""

    settings = {"num_processes": 2, "timeout_s": 600.0, "grace_s": 0.0}
    answer = judge.judge(grade, [{"fills": True}, {"fills": False}], settings)
    assert answer == {"values": [[0.0, None, "it wrote too much"], [1.0, "x", ""]]}


LONG = {
    "lines": "\n",
    "spaces": " ",
    "stars": "*",
    "boxes": "\\boxed{ ",
    "answers": "answer ",
    "brackets": "(",
    "surrogates": "\ud800",
    "colons": "answer: ",
}


@pytest.mark.parametrize("name", LONG)
def test_a_long_response_takes_no_longer_for_each_character(name: str) -> None:
    """These are graded on the event loop. As much text in responses of 300 characters and of 10,000, in processor time
    of this thread: what takes the square of a length takes 33 times as long."""
    reward = build_rewards({"math": MultipleChoiceConfig(type="multiple_choice")}).of("math")

    def seconds(length: int) -> float:
        text = f"answer{LONG[name] * length}!"[: length + 6]
        started = time.thread_time()
        for _ in range(30_000 // length):
            asyncio.run(reward([item(text, "C")]))  # type: ignore[arg-type]
        return time.thread_time() - started

    assert seconds(10_000) < 10 * seconds(300)


SHOWN = {"commas": "," * 2_500_000, "brackets": "[{" * 1_500_000}


@pytest.mark.parametrize("name", SHOWN)
def test_it_is_shown_in_records_and_report(name: str, run_dir: Path) -> None:  # noqa: F811
    given = response_item(SHOWN[name], None)
    show(run_dir, [given], [Graded(0.0, given.response[:500], "it is none")])


DEEP: Any = 1
for _ in range(62):
    DEEP = [DEEP]
UNREADABLE = {"deep": DEEP, "NaN": float("nan"), "huge": 10**30, "halves": "\ud800", "tuple keys": {(1, 2): 3}}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_could_not_be_read_again_is_left_out(name: str, caplog: pytest.LogCaptureFixture) -> None:
    example = _example(item("2", UNREADABLE[name]), Graded(1.0, "2"), [], None, [])
    assert plain_examples({"math": [example]}, "validation.jsonl", MAX_LINE_BYTES) == {}
    assert "validation.jsonl: the examples are left out (" in caplog.text
