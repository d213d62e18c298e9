"""Three sequence tasks over the letters a to p: what the tiny experts know and the student is to learn.

===========  =============  ========
domain       prompt         answer
===========  =============  ========
reversal     ``rev bpac``   ``capb``
sorting      ``sort bpac``  ``abcp``
next_letter  ``next bpac``  ``cabd``
===========  =============  ========

The answer's length is the input's, so a longer input is a harder question.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass

LETTERS = string.ascii_lowercase[:16]
"""Letters of inputs and answers. Few: sorting has an order to learn for every pair, and lessons are to be short."""


@dataclass(frozen=True, slots=True)
class Task:
    """One domain: the word that opens its prompts and the function that its experts learn."""

    word: str
    answer: Callable[[str], str]


def _next_letters(text: str) -> str:
    return "".join(LETTERS[(LETTERS.index(letter) + 1) % len(LETTERS)] for letter in text)


TASKS: dict[str, Task] = {
    "reversal": Task("rev", lambda text: text[::-1]),
    "sorting": Task("sort", lambda text: "".join(sorted(text))),
    "next_letter": Task("next", _next_letters),
}


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt and its only right answer."""

    domain: str
    prompt: str
    answer: str


def questions(domain: str, lengths: tuple[int, int], seed: str) -> Iterator[Question]:
    """Endless questions of ``domain`` with ``lengths[0]`` to ``lengths[1]`` letters, each length as likely."""
    rng = random.Random(f"{domain}/{seed}")  # Python hashes a text seed with SHA-512: equal on every machine
    task = TASKS[domain]
    while True:
        text = "".join(rng.choices(LETTERS, k=rng.randint(*lengths)))
        yield Question(domain, f"{task.word} {text}", task.answer(text))
