"""The stand-ins' exercises are right, and their tokenizer gives every text back."""

from __future__ import annotations

import itertools
import re

import pytest

from tools.make_stand_ins import KINDS, VOCABULARY_SIZE, exercises, held_out, splits
from tools.quickstart.stand_in_models import build_tokenizer


def test_an_expert_programs_what_the_tests_want() -> None:
    for one in itertools.islice(exercises("mbpp", "x"), 50):
        program = re.fullmatch(r"```python\n(.*)\n```", one.answer, re.S)
        assert program is not None
        exec("\n".join([program[1], *one.row["test_list"]]), {})
        assert all(test in one.prompt and test in one.truth for test in one.row["test_list"])


def test_an_expert_boxes_the_sum_that_it_was_asked_for() -> None:
    for one in itertools.islice(exercises("gsm8k", "x"), 50):
        total = sum(map(int, re.findall(r"\d+", one.prompt)))
        assert one.truth == str(total) and one.answer.endswith(f"\\boxed{{{total}}}.")
        assert one.row["answer"].endswith(f"#### {total}") and one.row["question"] == one.prompt


@pytest.mark.parametrize("domain", KINDS)
def test_the_base_has_something_to_learn_and_something_right(domain: str) -> None:
    asked = held_out()[domain]
    right = sum(one.mistaken == one.answer for one in asked)
    assert len(asked) / 5 < right < len(asked) * 4 / 5


def test_no_training_prompt_is_a_validation_prompt() -> None:
    made = splits()
    for domain in KINDS:
        train, asked = ({one.prompt for one in made[split][domain]} for split in ("train", "validation"))
        assert train and asked and not train & asked


def test_the_tokenizer_gives_every_text_back() -> None:
    tokenizer = build_tokenizer(VOCABULARY_SIZE)
    for text in ("Tom has 17 apples.\n\n```python\ndef f(x):\n    return x - 3\n```", "Größe ≥ 5 🙂 <end>"):
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
    assert len(tokenizer("1234")["input_ids"]) == 4
