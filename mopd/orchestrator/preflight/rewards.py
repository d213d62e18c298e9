"""Which of two things is wrong where a teacher's reward is not above the student's: the teacher, or the reward."""

from __future__ import annotations

from typing import Any

from mopd.base.text import one_line
from mopd.orchestrator.validation import ValidationResult

MAX_RESPONSE, MAX_ANSWER = 200, 60
"""Characters of a response and of an answer in a message."""
MANY = 0.5
"""Share of responses from which on that they were cut is worth telling."""


def why_not_better(
    teacher_name: str, domain: str, reward_name: str, *, teacher: ValidationResult, student: ValidationResult
) -> str:
    """One line with the keys to change; ``reward_name`` is the reward's key and type."""
    if teacher.rewards[domain] == student.rewards[domain] == 0.0:
        return _never_matched(teacher_name, domain, reward_name, teacher, student)
    return (
        f"teachers.{teacher_name} does not beat the student on its own domain {domain!r}: teacher "
        f"{teacher.rewards[domain]:.3f}, student {student.rewards[domain]:.3f}; check teachers.{teacher_name}.model "
        f"and teachers.{teacher_name}.domains, or set preflight.require_better_teacher: false"
    )


def _never_matched(name: str, domain: str, reward: str, teacher: ValidationResult, student: ValidationResult) -> str:
    """Neither answered right once: probably nobody was understood."""
    share, num = teacher.extracted_share[domain], teacher.num_samples[domain]
    if share == student.extracted_share[domain] == 0.0:
        found = f"and extracted nothing from any of the {num} responses of either"
    else:
        found = f"though it extracted something from {share:.0%} of the teacher's {num} responses"
    cut = ""
    if teacher.truncated_share[domain] >= MANY:
        cut = (
            f"; {teacher.truncated_share[domain]:.0%} of the responses were cut: raise rollout.max_response_length, or "
        )
    return (
        f"{reward} never matched on domain {domain!r}: teachers.{name} and the student both have 0.000, {found}; here "
        f"is one response of the teacher: {_shown(teacher.examples[domain])}{cut or ': '}change the reward or "
        f"data.columns.ground_truth, or teachers.{name}.model and domains, or set "
        "preflight.require_better_teacher: false"
    )


def _shown(examples: list[dict[str, Any]]) -> str:
    """A response's end, where answers stand, what was extracted from it, and what was wanted."""
    example = next((one for one in examples if one["extracted"] is not None), examples[0])
    response, extracted = one_line(example["response"]), example["extracted"]
    if len(response) > MAX_RESPONSE:
        response = f"…{response[-MAX_RESPONSE:]}"
    answer = "nothing" if extracted is None else repr(_cut(one_line(extracted)))
    why = f" ({_cut(one_line(example['problem']))})" if example["problem"] else ""
    truth = _cut(one_line(str(example["ground_truth"])))
    return f"{response!r}, from which was extracted {answer}{why}, ground truth {truth!r}"


def _cut(text: str) -> str:
    return text if len(text) <= MAX_ANSWER else f"{text[: MAX_ANSWER - 1]}…"
