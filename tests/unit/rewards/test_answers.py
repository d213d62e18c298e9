"""math, multiple_choice, regex and json_schema: what they extract, what they take for equal, and when they give up."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from mopd.base.types import CutOffError, UserError
from mopd.config.rewards import (
    ExactMatchConfig,
    JsonSchemaConfig,
    MathConfig,
    MultipleChoiceConfig,
    RegexConfig,
    RewardConfig,
)
from mopd.rewards.domains import build_rewards
from mopd.rewards.interface import Graded
from tests.unit.rewards.items import item, judged, values

PUBLISHED = [
    (r"${1,3} \cup {2,4}$", "${1,2,3,4}$", 1),
    (r"$\beta$", "$β$", 1),
    (r"$\frac{1}{3}$", r"$\frac13$", 1),
    ("1", "$x = 1$", 1),
    (r"$28\%$", "28 percent", 1),
    ("10", "$10 cm$", 1),
    ("$a < 2$", "$2 > a$", 1),
    ("$1 < x < 2$", "$(1,2)$", 1),
    ("$(1,2)$", "$1 < x < 2$", 0),
    ("101", "$a+2z = 2z + a = 101$", 1),
    ("$a+2z = 2z + a = 101$", "$101$", 0),
    (r"$\sqrt{2}$", r"\[ \sqrt{2} \]", 1),
    ("1/2", "1/2", 1),
]
"""What math-verify's README and tests give as examples: ground truth, response, and whether they are to be equal."""
ANSWERS = [
    ("So \\boxed{3}.\nNo: we forgot the first, and it is\n\\boxed{\\frac{1}{2}}.", "0.5", 1.0, r"\frac{1}{2}"),
    (r"$\boxed{3}$ or $\boxed{4}$", r"\{3, 4\}", 1.0, "3 and 4"),
    ("She has 3 apples and 4 pears, that is 7.", "She has 3 + 4 = <<3+4=7>>7.\n#### 7", 1.0, "7"),
    ("3 + 4\n#### 1,234", 1234, 1.0, "1234"),
    (r"The box says \boxed{8}, and 9 comes later", "8", 1.0, "8"),
    (r"\boxed{\frac{\sqrt{3}}{2}}", r"\frac{\sqrt3}{2}", 1.0, r"\frac{\sqrt{3}}{2}"),
    (r"\boxed{\text{No solution}}", r"\text{No solution}", 1.0, r"\text{No solution}"),
    (r"\boxed{41}", "42", 0.0, "41"),
    ("I do not know", "42", 0.0, None),
]
HOSTILE = [r"\boxed{10^{10^{10^{10}}}}", r"\boxed{9^{9^{9^{9}}}+1}", r"\boxed{999999!}"]


def test_math_takes_for_equal_what_math_verify_says_it_does() -> None:
    found = values(MathConfig(type="math"), *(item(response, truth) for truth, response, _ in PUBLISHED))
    assert [(truth, response, value) for (truth, response, _), value in zip(PUBLISHED, found, strict=True)] == PUBLISHED


def test_math_extracts_boxes_and_last_numbers_and_shows_them() -> None:
    found = judged(MathConfig(type="math"), *(item(response, truth) for response, truth, _, _ in ANSWERS))
    assert [(graded.value, graded.extracted) for graded in found] == [(value, shown) for *_, value, shown in ANSWERS]
    assert found[-2].problem == "another answer than the ground truth"


DEADLINES_S = (4.0, 40.0, 400.0)
"""Of responses that never end. Where the machine is so busy that an honest one beside them is late too, the next."""


def test_hostile_latex_scores_0_in_time_and_its_neighbours_are_judged() -> None:
    items = [item(r"\boxed{1}", "1"), *(item(response, "1") for response in HOSTILE), item("1", "1")]
    for timeout_s in DEADLINES_S:
        found = judged(MathConfig(type="math", timeout_s=timeout_s), *items)
        late = Graded(0.0, None, f"it took more than {timeout_s:g} s")
        assert [graded.value for graded in found[1:-1]] == [0.0] * len(HOSTILE) and found[1] == late
        if late not in (found[0], found[-1]):
            break
    assert [found[0].value, found[-1].value] == [1.0, 1.0]


CHOICES = [
    ("The answer is (C).", "C", "C"),
    ("Answer: b", "B", "B"),
    (r"(A) is wrong, so \boxed{\text{D}}", "(D)", "D"),
    ("We compare (A) with (B) and take (B).", 1, "B"),
    ("I think about A cat.\n**C**", "C", "C"),
    ("C. Because it is cold", "c", "C"),
    ("Final answer: **A**", 0, "A"),
    ("A man ate an apple", "A", None),
    ("", "A", None),
]


def test_multiple_choice() -> None:
    found = judged(MultipleChoiceConfig(type="multiple_choice"), *(item(said, truth) for said, truth, _ in CHOICES))
    assert [graded.extracted for graded in found] == [letter for *_, letter in CHOICES]
    assert [graded.value for graded in found] == [float(letter is not None) for *_, letter in CHOICES]
    assert values(MultipleChoiceConfig(type="multiple_choice"), item("Answer: A", "B")) == [0.0]


def test_regex_compares_the_last_match_or_asks_for_one() -> None:
    group, plain = r"(?i)answer is (\w+)", r"^\d{3}$"
    found = judged(
        RegexConfig(type="regex", pattern=group), item("answer is b? No, the Answer is c", "c"), item("c", "c")
    )
    assert found == [Graded(1.0, "c"), Graded(0.0, None, "the pattern does not match")]
    assert values(RegexConfig(type="regex", pattern=plain), item("123"), item("1234")) == [1.0, 0.0]
    for timeout_s in DEADLINES_S:
        slow = RegexConfig(type="regex", pattern="^(?:a+)+$", timeout_s=timeout_s)
        late = Graded(0.0, None, f"it took more than {timeout_s:g} s")
        endless, honest = judged(slow, item("a" * 40 + "b"), item("aa"))
        assert endless == late
        if honest != late:
            break
    assert honest == Graded(1.0, "aa")


SCHEMA = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}


def test_json_schema_of_the_recipe_and_of_the_row(tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA))
    fenced = 'Here:\n```json\n{"a": "x"}\n```\nNo:\n```json\n{"a": 1}\n```\n'
    cfg = JsonSchemaConfig(type="json_schema", path=str(path))
    by_recipe = judged(cfg, *map(item, (fenced, '{"a": 1}', '{"b": 1}', "a")))
    assert [graded.value for graded in by_recipe] == [1.0, 1.0, 0.0, 0.0]
    assert by_recipe[2].extracted == '{"b": 1}' and "'a' is a required property" in by_recipe[2].problem
    assert by_recipe[3].extracted is None
    rows = (item('{"a": 1}', SCHEMA), item("[]", json.dumps(SCHEMA)), item('"x"', {"$ref": "http://127.0.0.1:9/s"}))
    cfg = JsonSchemaConfig(type="json_schema", timeout_s=600.0)
    assert [graded.value for graded in judged(cfg, *rows)] == [1.0, 0.0, 0.0]


BAD_TRUTHS: list[tuple[RewardConfig, Any, str]] = [
    (MathConfig(type="math"), [1], "the ground truth is list, the math reward compares text or a number"),
    (MathConfig(type="math"), None, "the row has no ground truth, which the math reward needs: add it"),
    (ExactMatchConfig(type="exact_match"), {"a": 1}, "the ground truth is a structure, the exact_match reward"),
    (RegexConfig(type="regex", pattern="(a)"), True, "the ground truth is bool"),
    (MultipleChoiceConfig(type="multiple_choice"), "a red fox", "'a red fox' is no choice: .* a letter or a whole"),
    (MultipleChoiceConfig(type="multiple_choice"), 26, "the ground truth 26 is no choice"),
    (JsonSchemaConfig(type="json_schema"), "x", "the ground truth is str, no JSON schema"),
    (JsonSchemaConfig(type="json_schema"), {"type": "nothing"}, "is no JSON schema .*is not valid"),
]


@pytest.mark.parametrize(("cfg", "truth", "message"), BAD_TRUTHS)
def test_ground_truths_of_another_kind_are_refused(cfg: RewardConfig, truth: Any, message: str) -> None:
    reward = build_rewards({"math": cfg}).of("math")
    with pytest.raises(UserError, match=message) as caught:
        reward.check(item("", truth))
    assert str(caught.value).startswith("f: row 3: ") and "data.columns.ground_truth" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "does not exist: correct rewards.math.path"), ("{", "not valid JSON"), ('{"type": 3}', "no JSON schema")],
)
def test_schemas_that_are_none(content: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=message) as caught:
        build_rewards({"math": JsonSchemaConfig(type="json_schema", path=str(path))})
    assert str(caught.value).startswith(str(path))


def test_a_process_that_dies_is_one_line_with_the_key_and_final() -> None:
    """Whoever kills it: the next batch is not judged by guesswork."""
    rewards = build_rewards({"math": RegexConfig(type="regex", pattern="a", timeout_s=30.0)})

    async def killed() -> None:
        assert (await rewards.score([item("a")]))[0].value == 1.0
        os.kill(rewards.of("math")._process._process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        for _ in range(2):
            with pytest.raises(CutOffError) as caught:
                await rewards.score([item("a")])
            line = "rewards.math: the regex reward ended its process (killed by signal 9): it wrote nothing to stderr"
            assert str(caught.value).startswith(line) and str(caught.value).endswith("memory and processes left")

    try:
        asyncio.run(killed())
    finally:
        rewards.close()
