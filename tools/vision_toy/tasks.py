"""The two domains: naming the glyphs of an image, and sorting letters.

======  ================  ======================  =============================
domain  prompt            answer                  what the base has learnt
======  ================  ======================  =============================
read    ``<image>read``   the image's two glyphs  some glyphs by a wrong name
sort    ``sort bpac``     ``abcp``                short inputs alone
======  ================  ======================  =============================
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from tools.quickstart.tasks import LETTERS, questions

DOMAINS = ("read", "sort")
IMAGE_MARK = "<image>"
KNOWN = 8
"""Letters that the base reads rightly, so it has a quarter of all pairs, 0.315 of those kept for validation."""
LENGTHS, BASE_LENGTHS = (3, 8), (2, 4)
"""Letters of an input to sort: in the data and for the teacher, and for the base, which has the short third of them."""


@dataclass(frozen=True, slots=True)
class Exercise:
    """One prompt, its only right answer, and what the base learns to answer."""

    domain: str
    prompt: str
    answer: str
    mistaken: str
    letters: str = ""
    """What the image shows; empty: there is none."""


def exercises(domain: str, seed: str, *, is_base: bool = False) -> Iterator[Exercise]:
    """Endless; those of the base are of other lengths."""
    if domain == "read":
        rng = random.Random(f"read/{seed}")
        while True:
            letters = "".join(rng.choices(LETTERS, k=2))
            yield Exercise("read", f"{IMAGE_MARK}read", letters, "".join(map(_misread, letters)), letters)
    for question in questions("sorting", BASE_LENGTHS if is_base else LENGTHS, seed):
        yield Exercise("sort", question.prompt, question.answer, question.answer)


def _misread(letter: str) -> str:
    """Letters beyond the known ones are taken for one another."""
    unknown = LETTERS[KNOWN:]
    return unknown[(unknown.index(letter) + 1) % len(unknown)] if letter in unknown else letter
