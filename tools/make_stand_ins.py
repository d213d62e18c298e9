"""Make tiny stand-ins for the models and data of a first real run: a base, an expert in word problems, an expert in
small Python functions. About 20 seconds on a CPU core, once.

A Qwen3 of a hundred thousand weights learns both kinds of task from a teacher who forgets to carry and takes every
function for an addition: the *base*, right in about half of its answers. Two copies of it study one kind each rightly:
the *experts*. They answer as models of their kind do, with a chain of thought and a boxed answer, or with a fenced
program, so every reward, check and command meets what it is made for.

    python tools/make_stand_ins.py                       # into runs/stand_ins; --out FOLDER for another

    runs/stand_ins/models/{tiny-base, math-expert, code-expert}   Hugging Face folders
    runs/stand_ins/data/{train, validation}.parquet               both domains, columns as in docs/data.md
    runs/stand_ins/hub/{gsm8k, mbpp}/{train, test}.parquet        the same tasks in the columns of the data sets' own

No data or weights are downloaded. What the models know beyond these tasks is nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ is None or __package__ == "":  # run as a file: make `tools` importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.quickstart.cache import PartsFolder, fingerprint

VERSION = 2
"""Raise it when code below changes what is made: folders made before are then made again."""
SEED = 0
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
}
VOCABULARY_SIZE = 512
STEPS = {"tiny-base": 190, "math-expert": 70, "code-expert": 40}
BATCH_SIZE = 24
LR = 6e-3
TRAIN_ROWS = 1000
"""Training prompts per domain."""
VALIDATION_ROWS = 16
"""Validation prompts per domain: the reward starts a program for each response in code."""
NUMBERS = {"gsm8k": (3, 7), "mbpp": (1, 20)}
"""Of a task: smallest and largest."""
EXPERTS = {"gsm8k": "math-expert", "mbpp": "code-expert"}
_PEOPLE = ("Tom", "Ann", "Bob", "Mia", "Leo", "Eva", "Max", "Zoe", "Sam", "Amy", "Kim", "Joe")
_THINGS = ("apples", "books", "cards", "coins", "pens", "shells", "cups", "hats", "keys", "nuts", "eggs", "kites")
_OPERATIONS = (("add", "add {n} to a number", "+"), ("sub", "subtract {n} from a number", "-"))


@dataclass(frozen=True, slots=True)
class Exercise:
    """One task and what an expert answers."""

    prompt: str
    answer: str
    mistaken: str
    """What the base learns to answer."""
    truth: str
    """As the reward of the domain reads it."""
    row: dict[str, Any]
    """In the columns of the domain's own data set."""


def word_problem(rng: random.Random) -> Exercise:
    """In the manner of GSM8K."""
    who, what = rng.choice(_PEOPLE), rng.choice(_THINGS)
    a, b = (rng.randint(*NUMBERS["gsm8k"]) for _ in range(2))
    prompt = f"{who} has {a} {what} and buys {b} more. How many {what} does {who} have now?"

    def answer(total: int) -> tuple[str, str]:
        thought = f"{who} has {a} + {b} = {total} {what}."
        return thought, f"{thought} The answer is \\boxed{{{total}}}."

    thought, right = answer(a + b)
    row = {"question": prompt, "answer": f"{thought}\n#### {a + b}"}
    return Exercise(prompt, right, answer((a + b) % 10)[1], str(a + b), row)


def function(rng: random.Random) -> Exercise:
    """In the manner of MBPP."""
    name, text, sign = rng.choice(_OPERATIONS)
    n = rng.randint(*NUMBERS["mbpp"])
    task = f"Write a python function to {text.format(n=n)}."
    results = [(x, x + n if sign == "+" else x - n) for x in rng.sample(range(1, 100), 2)]
    tests = [f"assert {name}_{n}({x}) == {result}" for x, result in results]
    prompt = f"{task}\n\nYour code should pass these tests:\n\n" + "\n".join(tests)

    def program(sign: str) -> str:
        return f"def {name}_{n}(x):\n    return x {sign} {n}"

    row = {"task_id": n, "text": task, "code": program(sign), "test_list": tests, "test_setup_code": ""}
    right, mistaken = (f"```python\n{program(one)}\n```" for one in (sign, "+"))
    return Exercise(prompt, right, mistaken, json.dumps({"test_list": tests}), row)


KINDS: dict[str, Callable[[random.Random], Exercise]] = {"gsm8k": word_problem, "mbpp": function}


def exercises(domain: str, seed: str, but: frozenset[str] = frozenset()) -> Iterator[Exercise]:
    """Endless exercises whose prompts are not among ``but``."""
    rng = random.Random(f"{domain}/{seed}")  # Python hashes a text seed with SHA-512: equal on every machine
    while True:
        made = KINDS[domain](rng)
        if made.prompt not in but:
            yield made


def held_out() -> dict[str, list[Exercise]]:
    """Validation exercises by domain."""
    return {domain: list(itertools.islice(exercises(domain, "validation"), VALIDATION_ROWS)) for domain in KINDS}


def build(folder: PartsFolder) -> dict[str, dict[str, float]]:
    """Make every missing part. Returns the share of validation exercises answered rightly: model -> domain -> share."""
    data = fingerprint(VERSION, TRAIN_ROWS, VALIDATION_ROWS, NUMBERS)
    base = fingerprint(data, SEED, SHAPE, VOCABULARY_SIZE, LR, BATCH_SIZE, STEPS["tiny-base"])
    parts = {"data": data, "hub": data, "models/tiny-base": base}
    parts |= {f"models/{name}": fingerprint(base, name, STEPS[name]) for name in EXPERTS.values()}
    found: dict[str, Any] = {part: folder.facts(part, made_from) for part, made_from in parts.items()}
    if None in found.values():
        # Imported here: a second call answers without loading torch.
        from tools.quickstart.stand_in_models import StandInMaker

        made = splits()
        found["data"] = folder.build("data", data, lambda out: write_data(out, made))
        found["hub"] = folder.build("hub", data, lambda out: write_data_sets(out, made))
        maker = StandInMaker(
            held_out(), seed=SEED, shape=SHAPE, vocabulary_size=VOCABULARY_SIZE, batch_size=BATCH_SIZE, lr=LR
        )
        start = folder.root / "models/tiny-base"
        lessons: dict[str, tuple[Path | None, tuple[str, ...]]] = {"tiny-base": (None, tuple(KINDS))}
        lessons |= {name: (start, (domain,)) for domain, name in EXPERTS.items()}
        for name, (parent, domains) in lessons.items():
            found[f"models/{name}"] = folder.build(
                f"models/{name}",
                parts[f"models/{name}"],
                lambda out, parent=parent, domains=domains, name=name: maker.make(out, parent, domains, STEPS[name]),
            )
    return {part.split("/")[1]: facts["right"] for part, facts in found.items() if part.startswith("models")}


def splits() -> dict[str, dict[str, list[Exercise]]]:
    """Split -> domain -> exercises; no training prompt is a validation prompt."""
    validation = held_out()
    asked = frozenset(one.prompt for made in validation.values() for one in made)
    train = {domain: list(itertools.islice(exercises(domain, "train", asked), TRAIN_ROWS)) for domain in KINDS}
    return {"train": train, "validation": validation}


def write_data(folder: Path, splits: dict[str, dict[str, list[Exercise]]]) -> dict[str, Any]:
    """One file a split, domains in turn, in the columns that reinforcement-learning data sets use."""
    for split, by_domain in splits.items():
        rows = [
            {
                "data_source": domain,
                "prompt": [{"role": "user", "content": one.prompt}],
                "reward_model": {"style": "rule", "ground_truth": one.truth},
                "extra_info": {"split": split},
            }
            for made in zip(*by_domain.values(), strict=True)
            for domain, one in zip(by_domain, made, strict=True)
        ]
        _write(folder / f"{split}.parquet", rows)
    return {}


def write_data_sets(folder: Path, splits: dict[str, dict[str, list[Exercise]]]) -> dict[str, Any]:
    """A folder a domain, in its data set's own columns, which call the held-out split ``test``."""
    for split, by_domain in splits.items():
        for domain, made in by_domain.items():
            (folder / domain).mkdir(exist_ok=True)
            _write(folder / domain / f"{'train' if split == 'train' else 'test'}.parquet", [one.row for one in made])
    return {}


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), path)


def complaints(right: dict[str, dict[str, float]]) -> list[str]:
    """What a first run would lack, one line each."""
    return [
        f"{expert}: {right[expert][domain]:.2f} in {domain}, the base has {right['tiny-base'][domain]:.2f}: too near"
        for domain, expert in EXPERTS.items()
        if right[expert][domain] < right["tiny-base"][domain] + 0.2
    ]


def main() -> int:
    """Build what is missing; exit code 1 if a model is not what a first run needs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/stand_ins"), metavar="FOLDER")
    args = parser.parse_args()
    started = time.monotonic()
    folder = PartsFolder(args.out)
    with folder.locked():
        right = build(folder)
    for name, by_domain in right.items():
        print(f"{name:<14}" + "  ".join(f"{domain} {share:.2f}" for domain, share in by_domain.items()))
    problems = complaints(right)
    print(*problems, f"{args.out}: {time.monotonic() - started:.0f} s", sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
