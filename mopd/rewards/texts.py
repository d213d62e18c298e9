"""Rewards that compare short texts on the event loop: exact match and multiple choice."""

from __future__ import annotations

import re
from collections.abc import Sequence

from mopd.rewards.ground_truths import letter_of, text_of
from mopd.rewards.interface import Graded, RewardItem

CHOICES = (
    re.compile(r"\\boxed\s*\{\s*(?:\\(?:text|textbf|mathrm|mathbf)\s*\{\s*)?\(?([A-Za-z])\)?\s*\}"),
    re.compile(r"\b(?:answer|choice|option)\b(?:\s+is)?(?:\s*:)?\s*[*_$]*\(?([A-Za-z])\b(?!['’])", re.I),
    re.compile(r"\(([A-Z])\)"),
    re.compile(r"^(?:[^\S\n]|[*_$])*([A-Z])(?:[.):]|(?:[^\S\n]|[*_$])*$)", re.M),
)
"""Forms of a choice, in order: a box, "Answer: C" or "the answer is (C)", "(C)", a letter that begins a line as "C." or
is all of it. The last match of the first form that occurs counts. They run on the event loop, so each takes time in
proportion to the response: no two neighbouring repeats take the same characters, no repeat goes on in the next line."""
MAX_EXTRACTED = 500


class ExactMatchReward:
    """Reward 1 for the right answer, 0 for any other: compares both as text without surrounding white space."""

    def check(self, item: RewardItem) -> None:
        """Raise ``UserError`` for a ground truth that is neither text nor a number."""
        text_of(item, "exact_match")

    async def __call__(self, items: Sequence[RewardItem]) -> list[Graded]:
        """Return 1.0 or 0.0 per item."""
        return [self._graded(item) for item in items]

    def close(self) -> None:
        """Do nothing: no process or file is held."""

    def _graded(self, item: RewardItem) -> Graded:
        response = item.response.strip()
        equal = response == text_of(item, "exact_match")
        return Graded(float(equal), response[:MAX_EXTRACTED], "" if equal else "another text than the ground truth")


class MultipleChoiceReward:
    """Reward 1 if the response chooses the right letter."""

    def check(self, item: RewardItem) -> None:
        """Raise ``UserError`` for a ground truth that is neither a letter nor the number of a choice."""
        letter_of(item)

    async def __call__(self, items: Sequence[RewardItem]) -> list[Graded]:
        """Return 1.0 or 0.0 per item."""
        return [self._graded(item) for item in items]

    def close(self) -> None:
        """Do nothing: no process or file is held."""

    def _graded(self, item: RewardItem) -> Graded:
        right = letter_of(item)
        for form in CHOICES:
            found = form.findall(item.response)
            if found:
                chosen = found[-1].upper()
                return Graded(float(chosen == right), chosen, "" if chosen == right else "another choice")
        return Graded(0.0, None, "it names no choice")
