"""Which of two things is wrong where a teacher does not beat the student."""

from __future__ import annotations

from typing import Any

from mopd.orchestrator.preflight.checks import why_not_better
from mopd.orchestrator.validation import ValidationResult


def result(reward: float, *, share: float = 1.0, cut: float = 0.0, **example: Any) -> ValidationResult:
    shown = {"prompt": "p", "response": "It is\n\x1b[1m" + "so " * 200 + "41.", "ground_truth": "42", "reward": 0.0}
    shown |= {"extracted": "41", "problem": "another answer"} | example
    return ValidationResult(
        rewards={"math": reward},
        num_samples={"math": 20},
        truncated_share={"math": cut},
        extracted_share={"math": share},
        examples={"math": [shown]},
    )


def why(teacher: ValidationResult, student: ValidationResult) -> str:
    line = why_not_better("expert", "math", "rewards.default (regex)", teacher=teacher, student=student)
    assert line.isprintable() and len(line) < 1000
    return line


def test_a_worse_teacher_is_the_teachers_fault() -> None:
    line = why(result(0.2), result(0.4))
    assert line.startswith("teachers.expert does not beat the student on its own domain 'math': teacher 0.200, student")
    assert "teachers.expert.model" in line and "rewards" not in line
    assert "never matched" not in why(result(0.4), result(0.4)) and "never matched" not in why(result(0.0), result(0.1))


def test_two_zeros_are_the_rewards_and_one_response_is_shown() -> None:
    line = why(result(0.0, share=0.5), result(0.0))
    assert line.startswith("rewards.default (regex) never matched on domain 'math': teachers.expert and the student")
    assert "though it extracted something from 50% of the teacher's 20 responses" in line
    assert "so so 41.', from which was extracted '41' (another answer), ground truth '42'" in line
    assert "data.columns.ground_truth" in line and "were cut" not in line


def test_an_extractor_that_finds_nothing_is_named_as_such_and_so_are_cut_responses() -> None:
    nothing = {"extracted": None, "problem": "the pattern does not match"}
    line = why(result(0.0, share=0.0, cut=0.75, **nothing), result(0.0, share=0.0, **nothing))
    assert "and extracted nothing from any of the 20 responses of either" in line
    assert "from which was extracted nothing (the pattern does not match)" in line
    assert "75% of the responses were cut: raise rollout.max_response_length" in line
