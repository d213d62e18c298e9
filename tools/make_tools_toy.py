"""Make what ``recipes/tools_cpu.yaml`` needs: a weak base, two experts, and prompts. A few minutes, once.

    python tools/make_tools_toy.py                            # again: at once
    runs/tools_assets/base, teachers/{sums, reversal}         Hugging Face folders
    runs/tools_assets/data/{train, validation}.parquet        columns as in docs/data.md

Two domains. ``sums`` asks for the sum of two numbers of many digits, which a model of half a million weights cannot
add: it calls the calculator of ``python_tool`` and copies what comes back. ``reversal`` is the quickstart's and needs
no tool. The base has learned both on short inputs; an expert has studied one of them on inputs of any length, and goes
on rightly behind mistakes: some characters of what it said were replaced while it learned.

The words of a call around the expression are one token each: a model of characters would spend its weights on them.
Left out on purpose: thinking, several calls, calls that fail.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ is None or __package__ == "":  # run as a file: make `tools` importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.quickstart.cache import PartsFolder, fingerprint
from tools.quickstart.tasks import LETTERS, Question, questions

DIGITS, DOMAINS = "0123456789", ("sums", "reversal")
VERSION = 2
"""Raise it when code below changes what is made."""
CALL = ('<tool_call>{"name": "calculator", "arguments": {"expression": "', '"}}</tool_call>')
"""Tokens around the expression of a call."""
SHAPE = {
    "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32,
}  # fmt: skip
LENGTHS, BASE_LENGTHS = (3, 5), (2, 3)
"""Digits of a number, letters of a text: of the data and the experts, and of the base."""
STEPS = {"base": 400, "sums": 300, "reversal": 300}
BATCH_SIZE, LR = 32, 2e-3
MISTAKES = 0.15
"""Share of the characters in an expert's lessons that it reads as others."""
ROWS = {"train": 3000, "validation": 100}
"""Prompts of each domain."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """A question with the turns of its answer."""

    question: Question
    turns: tuple[str, ...]
    """What is said, what the tool answers, what is said then."""


def lessons(domain: str, lengths: tuple[int, int], seed: str) -> Iterator[Lesson]:
    """Endless questions of a domain, each length as likely."""
    if domain == "reversal":
        yield from (Lesson(question, (question.answer,)) for question in questions(domain, lengths, seed))
    rng = random.Random(f"{domain}/{seed}")
    while True:
        size = rng.randint(*lengths)
        a, b = (rng.randrange(10 ** (size - 1), 10**size) for _ in range(2))
        total = str(a + b)
        turns = (f"{CALL[0]}{a}+{b}{CALL[1]}", total, total)
        yield Lesson(Question(domain, f"sum {a} {b}", total), turns)


def held_out() -> dict[str, list[Question]]:
    """Validation questions by domain."""
    return {
        domain: [one.question for one in itertools.islice(lessons(domain, LENGTHS, "validation"), ROWS["validation"])]
        for domain in DOMAINS
    }


def write_data(folder: Path) -> dict[str, Any]:
    """Write both splits, domains in turn; no training prompt is a validation prompt."""
    from tools.quickstart.prompts import write_prompts

    kept = held_out()
    asked = {question.prompt for own in kept.values() for question in own}
    train = {
        domain: list(itertools.islice(
            (one.question for one in lessons(domain, LENGTHS, "train") if one.question.prompt not in asked),
            ROWS["train"],
        ))
        for domain in kept
    }  # fmt: skip
    splits = {"train": train, "validation": kept}
    return write_prompts(
        folder, {name: [q for row in zip(*own.values(), strict=True) for q in row] for name, own in splits.items()}
    )


class Maker:
    """Trains with one set of numbers."""

    def __init__(self, threads: int) -> None:
        import torch

        from tools.quickstart.tokenizer import build_tokenizer

        if threads:
            torch.set_num_threads(threads)
        self.tokenizer = build_tokenizer(CALL, characters=f"{DIGITS}+")

    def make(
        self, out: Path, start: Path | None, domains: tuple[str, ...], lengths: tuple[int, int], steps: int
    ) -> Any:
        """Train a fresh model, or one that begins with ``start``, on lessons of ``domains`` in turn, and save it."""
        import torch

        from mopd.conversion.hf.pretrained import load_weights
        from tools.quickstart.models import progress
        from tools.quickstart.training import as_inputs, fit, new_model

        model = new_model(self.tokenizer, SHAPE, 0) if start is None else load_weights(start, torch.float32)[0]
        label = "base" if start is None else f"expert in {domains[0]}"
        streams = itertools.cycle([lessons(domain, lengths, label) for domain in domains])
        kept = {question.prompt for own in held_out().values() for question in own}
        fresh = (one for one in (next(stream) for stream in streams) if one.question.prompt not in kept)
        mistakes = random.Random(label) if start is not None else None
        batches = (as_inputs(self._rows(list(itertools.islice(fresh, BATCH_SIZE)), mistakes)) for _ in range(steps))
        with progress(label, steps) as report:
            seconds = fit(model, batches, steps=steps, lr=LR, report=report)
        model.save_pretrained(out)
        self.tokenizer.save_pretrained(out)
        return {"train_s": round(seconds, 1)}

    def _rows(self, batch: list[Lesson], mistakes: random.Random | None) -> Any:
        """Right-padded tokens and labels [B, S] int64; labels are those of what is said, with its end, and some of its
        characters are read as others."""
        import torch

        from tools.quickstart.training import IGNORED, prompt_ids

        def ids(text: str) -> list[int]:
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

        rows = []
        for lesson in batch:
            tokens = prompt_ids(self.tokenizer, lesson.question.prompt)
            labels = [IGNORED] * len(tokens)
            for number, turn in enumerate(lesson.turns):
                is_said = number % 2 == 0
                own = [*ids(turn), self.tokenizer.eos_token_id] if is_said else ids(f"<user>{turn}<assistant>")
                labels += own if is_said else [IGNORED] * len(own)
                if is_said and mistakes is not None:
                    like = [ids(DIGITS), ids(LETTERS)]
                    own = [self._read(token, like, mistakes) for token in own]
                tokens += own
            rows.append((tokens, [*labels[1:], IGNORED]))
        width = max(len(tokens) for tokens, _ in rows)
        pad = self.tokenizer.pad_token_id
        return (
            torch.tensor([tokens + [pad] * (width - len(tokens)) for tokens, _ in rows]),
            torch.tensor([labels + [IGNORED] * (width - len(labels)) for _, labels in rows]),
        )

    def _read(self, token: int, alike: list[list[int]], mistakes: random.Random) -> int:
        """Return the token, or now and then another of its kind."""
        kind = next((kind for kind in alike if token in kind), None)
        return token if kind is None or mistakes.random() >= MISTAKES else mistakes.choice(kind)


def build(folder: PartsFolder, *, threads: int) -> None:
    """Make every part that is missing."""
    data = fingerprint(VERSION, LENGTHS, ROWS)
    base = fingerprint(VERSION, SHAPE, BASE_LENGTHS, STEPS["base"], BATCH_SIZE, LR)
    folder.build("data", data, write_data)
    maker: list[Maker] = []

    def make(out: Path, *args: Any) -> Any:
        maker[:] = maker or [Maker(threads)]  # a second call answers without loading torch
        return maker[0].make(out, *args)

    folder.build("base", base, lambda out: make(out, None, DOMAINS, BASE_LENGTHS, STEPS["base"]))
    for domain in DOMAINS:
        folder.build(
            f"teachers/{domain}",
            fingerprint(base, domain, LENGTHS, STEPS[domain], MISTAKES),
            lambda out, domain=domain: make(out, folder.root / "base", (domain,), LENGTHS, STEPS[domain]),
        )


def main() -> int:
    """Build what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/tools_assets"), metavar="FOLDER")
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="CPU threads; 0 lets PyTorch choose")
    args = parser.parse_args()
    started, folder = time.monotonic(), PartsFolder(args.out)
    with folder.locked():
        build(folder, threads=args.threads)
    print(f"{args.out}: {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
