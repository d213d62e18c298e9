"""Responses, as every grader judges them and the report shows them. None is refused: each gets a number."""

from __future__ import annotations

import asyncio
import os
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mopd.base.files.writing import write_json
from mopd.base.metrics import MAX_LINE_BYTES
from mopd.config.load import dump, load_recipe
from mopd.config.rewards import (
    CodeConfig,
    CustomRewardConfig,
    ExactMatchConfig,
    JsonSchemaConfig,
    MathConfig,
    MultipleChoiceConfig,
    RegexConfig,
)
from mopd.data_plane.frames import packed, unpacked
from mopd.orchestrator.preflight.checks import why_not_better
from mopd.orchestrator.rollout import reward_item
from mopd.orchestrator.validation import ValidationResult, _example, append_record, plain_examples, record_of
from mopd.report.build import build_report
from mopd.rewards.domains import build_rewards
from mopd.rewards.interface import Graded, RewardItem
from tests.fuzz.harness import NUM_MUTATIONS, ONLY, mutate

BATCH = 50
NUM_PROGRAMS = NUM_MUTATIONS if "MOPD_FUZZ_MUTATIONS" in os.environ else NUM_MUTATIONS // 5
"""Responses for ``code`` in the short form: each starts a process."""
ACTING = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that a terminal or browser would act on."""
RECIPE = """\
run_dir: runs/example
student: {model: models/student}
teachers: {maths: {model: models/maths, domains: [math]}}
data: {train: [train.parquet], validation: [validation.parquet]}
schedule: {steps: 9, prompts_per_step: 8}
rewards: {default: {type: exact_match}}
validation: {every_steps: 9}
"""
HALVES = ("\\ud800", "\\udfff", "\\ude00\\ud83d", "\\ud83d\\ude00", "\ud800", "\udfff", "\udc80", "\ude00\ud83d")
PIECES = (
    "\\0", "\\x00", "\\x1b[2J", "\\x9b31m", "\\u202e", "\\u2066", "\\u2028", "\\ufeff", "\\ufffe", "\\U0010ffff",
    "\\U0001f600", "\\N{BELL}", "\\n", "\\r", "\\x85", "\\", '\\"', "\\u12", "\ud83d\ude00", "\x00", "\x1b[2J", "\x7f",
    "\x1b]0;x\x07", "\x9b31m", "\u202e", "\u2066", "\u2069", "\u2028", "\u2029", "\ufeff", "\ufffe", "\U0010ffff",
    "\U0001f600" * 600, "e\u0301" * 300, "\u0661", "\u212a", "\u017f", "\xa0", "\u200d", "\r", "\x0b", "\x0c", "\x1c",
    "\x85", "\n" * 3000, " " * 3000, "," * 5000, "[{" * 5000, '"' * 999, "'", "{{ 7 }}", "</pre><script>", "&#0;", "%s",
    "{0}", "```", "```\n", "\n```python\n", "\\boxed{", "}" * 500, "$$", "####", "answer is ", "(A)", "NaN", "1e999",
    "9" * 5000, "10**10**10", "\\frac{1}{0}", "a://b@c?d",
)  # fmt: skip
"""What may stand in a response, as itself and as the escapes by which a program or JSON makes it."""

PROGRAMS = (
    'raise ValueError("@")', 'raise type("E@", (Exception,), {})("@")', 'assert 0, "@"', 'return "@"',
    'return {"@": ["@"]}', 'return b"@"', "return 3@", 'print("@")\n    return 3', 'import sys; sys.exit("@")',
    'import sys; sys.stderr.write("@"); import os; os._exit(3)', 'import os; os.kill(os.getpid(), 40)  # "@"',
    'open("@", "w").write("@")',
)  # fmt: skip
ADD = "```python\ndef add(a, b):\n    {}\nif __name__ == '__main__':\n    print(add(1, 2))\n```"
TESTS = (
    ["assert add(1, 2) == 3"],
    [{"input": "", "output": "3"}],
    {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"},
)
SCHEMA = {"type": "object", "additionalProperties": {"type": "string", "pattern": "^x*$"}, "maxProperties": 1}
GRADERS: dict[str, tuple[Any, tuple[Any, ...], tuple[str, ...]]] = {
    # reward, ground truths that responses meet in turn, responses of which the first is right
    "exact_match": (ExactMatchConfig(type="exact_match"), ("42",), ("42", "@", "42@")),
    "multiple_choice": (
        MultipleChoiceConfig(type="multiple_choice"),
        ("C",),
        ("(C)", "answer@: C", "@\nC.@", "\\boxed{@C}"),
    ),
    "regex": (RegexConfig(type="regex", pattern="x(.*)", timeout_s=20.0), ("1",), ("x1", "x@", "@x1@")),
    "math": (
        MathConfig(type="math"),
        ("2",),
        ("\\boxed{2}", "\\boxed{@}", "$1 + @$", "so @ = 2", "#### @", "\\boxed{\\text{@}}"),
    ),
    "json_schema": (
        JsonSchemaConfig(type="json_schema", timeout_s=20.0),
        (SCHEMA,),
        ('{"@": "x"}', '{"a@": "@"}', '{"@": 1}', '["@"]', '```json\n{"@": 1}\n```', '"@"', "@"),
    ),
    "code": (
        CodeConfig(type="code", timeout_s=20.0),
        TESTS,
        (ADD.format("return a + b"), *(ADD.replace("{}", program) for program in PROGRAMS)),
    ),
}


def _piece(rng: random.Random) -> str:
    return "".join(rng.choice(rng.choice((HALVES, PIECES))) for _ in range(rng.choice((0, 1, 1, 2, 5))))


def response(name: str, number: int, templates: tuple[str, ...]) -> str:
    """Two thirds with pieces at the marks, the others changed anywhere, halves of characters among what comes out."""
    rng = random.Random(f"{name} {number}")
    template = rng.choice(templates)
    if number % 3:
        return re.sub("@", lambda _: _piece(rng), template)
    return mutate(template.encode(), rng).decode("utf-8", rng.choice(("surrogateescape", "replace")))


def item(text: str, truth: Any) -> RewardItem:
    row = SimpleNamespace(text="p", ground_truth=truth, extra_info=None, domain="math", place="f: row 3")
    made = reward_item(SimpleNamespace(row=lambda _: row), 0, text)  # type: ignore[arg-type]
    made.response.encode()
    return made


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "recipe").write_text(RECIPE)
    (tmp_path / "recipe.yaml").write_text(dump(load_recipe(tmp_path / "recipe")))
    return tmp_path


def show(run_dir: Path, items: list[RewardItem], graded: list[Graded]) -> None:
    """As validation and preflight do."""
    examples = {"math": [_example(one, given, [], None, []) for one, given in zip(items, graded, strict=True)]}
    count, share = {"math": len(items)}, {"math": 1.0}
    result = ValidationResult(
        rewards={"math": 0.0}, num_samples=count, truncated_share=share, extracted_share=share, examples=examples
    )
    (run_dir / "validation.jsonl").unlink(missing_ok=True)
    record = unpacked(packed(record_of(0, result, wall_s=1.0)))
    assert len(record["examples"]["math"]) == len(items)
    append_record(run_dir / "validation.jsonl", record)
    write_json(
        run_dir / "headroom.json",
        {"math": {"teacher": 1.0, "examples": plain_examples(examples, "headroom.json", MAX_LINE_BYTES)["math"]}},
    )
    build_report(run_dir)
    page = (run_dir / "report.html").read_bytes().decode()
    assert not ACTING.search(page.replace("\n", "").replace("\t", "")) and "<script>" not in page
    assert not ACTING.search(why_not_better("t", "math", "rewards.math", teacher=result, student=result))


async def judge(name: str, run_dir: Path) -> None:
    cfg, truths, templates = GRADERS[name]
    numbers = [int(ONLY)] if ONLY else list(range(NUM_PROGRAMS if name == "code" else NUM_MUTATIONS))
    right = item(templates[0], truths[0])
    rewards = build_rewards({"math": cfg})
    values: list[float] = []
    try:
        for start in range(0, len(numbers), BATCH):
            drawn = [
                item(response(name, number, templates), truths[number // 3 % len(truths)])
                for number in numbers[start : start + BATCH]
            ]
            *graded, last = await rewards.score([*drawn, right])
            assert last.value == 1.0, f"{name}: after {numbers[start]} to {numbers[start] + BATCH - 1}"
            for number, given in zip(numbers[start:], graded, strict=False):
                assert given.value in (0.0, 1.0), (name, number)
                for text in (given.extracted or "", given.problem):
                    text.encode()
                    assert len(text) <= 500, (name, number)
            values += [given.value for given in graded]
            show(run_dir, drawn, graded)
    finally:
        rewards.close()
    print(f"{name}: {len(values)} responses, {sum(values):.0f} right")
    assert ONLY or 0.0 in values


@pytest.mark.parametrize("name", GRADERS)
def test_responses(name: str, run_dir: Path) -> None:
    asyncio.run(judge(name, run_dir))


def test_responses_arrive_at_a_function_as_they_are(tmp_path: Path) -> None:
    """Which gets halves of characters too, where a tokenizer of its own makes them."""
    path = tmp_path / "mine.py"
    path.write_text("def f(response, extra_info, **row): return float(response == ''.join(map(chr, extra_info)))")
    reward = build_rewards({"math": CustomRewardConfig(type="custom", path=str(path), function="f")}).of("math")

    def made(number: int) -> RewardItem:
        text = response("custom", number, ("@", "x@y@"))
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")  # pairs are one character
        codes = [ord(character) for character in text]
        return RewardItem(prompt="p", response=text, ground_truth="", extra_info=codes, domain="math", place="f: row 3")

    async def run() -> None:
        for start in range(0, NUM_MUTATIONS, BATCH):
            given = await reward([made(number) for number in range(start, start + BATCH)])
            assert [one.value for one in given] == [1.0] * BATCH, start

    try:
        asyncio.run(run())
    finally:
        reward.close()
