"""Make what ``recipes/quickstart.yaml`` and ``recipes/two_teachers_vllm_cpu.yaml`` need: a weak base model, three
experts, and prompts. About two minutes, once.

A character-level Qwen3 of half a million weights learns three sequence tasks (reversal, sorting, next letter) on inputs
of 2 to 4 letters: the *base*. Three copies of it then each study one task on 3 to 8 letters: the *experts*. On the
validation prompts (3 to 8 letters) an expert is nearly always right on its own task and forgets the others; the base
solves the short third of each. No data or weights are downloaded.

Left out on purpose: anything that a real expert has beyond being better than the base on its domain.

    python tools/make_quickstart.py                               # two CPU cores: about 2 minutes; again: at once
    python tools/make_quickstart.py --out /tmp/assets --threads 8

    python tools/make_quickstart.py --copier                      # also what recipes/self_distillation.yaml needs
    python tools/make_quickstart.py --other-tokenizer             # also what recipes/own_tokenizer_cpu.yaml needs

    runs/quickstart_assets/base, teachers/{reversal, sorting, next_letter}   Hugging Face folders
    runs/quickstart_assets/copier       the base, which sorts, and copies an answer that its prompt ends with
    runs/quickstart_assets/other/{base, reversal, sorting, next_letter}      experts again, with another tokenizer
    runs/quickstart_assets/data/{train, validation}.parquet                  columns as in docs/data.md
    runs/quickstart_assets/data_by_domain/DOMAIN_{train, validation}.parquet  the same rows, for runs with fewer domains
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

if __package__ is None or __package__ == "":  # run as a file: make `tools` importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.quickstart.cache import PartsFolder, fingerprint
from tools.quickstart.tasks import LETTERS, TASKS, Question, questions

VERSION = 1
"""Raise it when code below changes what is made: folders made before are then made again."""
SEED = 0
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
LENGTHS = (3, 8)
"""Letters of an input in the data and for the experts."""
BASE_LENGTHS = (2, 4)
"""Letters of an input for the base. It masters these, so its score is the share of short inputs: no luck involved."""
STEPS = {"base": 400, "reversal": 300, "sorting": 300, "next_letter": 300, "copier": 150, "other": 300}
BATCH_SIZE = 64
LR = 2e-3
TRAIN_ROWS = 6000
"""Training prompts per domain."""
VALIDATION_ROWS = 200
"""Validation prompts per domain."""
TEACHER_AT_LEAST, OTHER_AT_LEAST = 0.95, 0.9
BASE_AT_MOST = 0.5


def main() -> int:
    """Build what is missing; exit code 1 if a model is not what the quickstart needs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/quickstart_assets"), metavar="FOLDER")
    parser.add_argument("--copier", action="store_true", help="also make the student that can teach itself")
    parser.add_argument("--other-tokenizer", action="store_true", help="also make experts with another tokenizer")
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="CPU threads; 0 lets PyTorch choose")
    args = parser.parse_args()
    started = time.monotonic()
    folder = PartsFolder(args.out)
    with folder.locked():
        scores = build(folder, threads=args.threads, with_copier=args.copier, with_other=args.other_tokenizer)
    for model, by_domain in scores.items():
        print(f"{model:<14}" + "  ".join(f"{domain} {score:.3f}" for domain, score in by_domain.items()))
    problems = complaints(scores)
    print(*problems, f"{args.out}: {time.monotonic() - started:.0f} s", sep="\n")
    return 1 if problems else 0


def build(
    folder: PartsFolder, *, threads: int, with_copier: bool = False, with_other: bool = False
) -> dict[str, dict[str, float]]:
    """Make every missing part. Returns exact match on the validation prompts: model -> domain -> share."""
    data = fingerprint(VERSION, LETTERS, LENGTHS, TRAIN_ROWS, VALIDATION_ROWS)
    base = fingerprint(data, SEED, SHAPE, LR, BATCH_SIZE, BASE_LENGTHS, STEPS["base"])
    experts = {domain: fingerprint(base, domain, STEPS[domain]) for domain in TASKS}
    parts = {"data": data, "data_by_domain": data, "base": base} | {
        f"teachers/{domain}": made_from for domain, made_from in experts.items()
    }
    if with_copier:
        parts["copier"] = fingerprint(base, "copier", STEPS["copier"])
    if with_other:
        other = fingerprint(base, "other", LENGTHS)
        parts |= {"other/base": other}
        parts |= {f"other/{domain}": fingerprint(other, domain, STEPS["other"]) for domain in TASKS}
    found: dict[str, Any] = {part: folder.facts(part, made_from) for part, made_from in parts.items()}
    if None in found.values():
        # Imported here: a second call answers without loading torch.
        from tools.quickstart.models import ModelMaker
        from tools.quickstart.prompts import write_prompts
        from tools.quickstart.tokenizer import build_other_tokenizer, build_tokenizer

        found["data"] = folder.build("data", data, lambda out: write_prompts(out, prompts()))
        found["data_by_domain"] = folder.build("data_by_domain", data, lambda out: write_prompts(out, by_domain()))
        options: dict[str, Any] = {"seed": SEED, "shape": SHAPE, "batch_size": BATCH_SIZE, "lr": LR, "threads": threads}
        maker = ModelMaker(build_tokenizer(), validation(), **options)
        found["base"] = folder.build(
            "base", base, lambda out: maker.make(out, None, tuple(TASKS), BASE_LENGTHS, STEPS["base"])
        )
        for domain, made_from in experts.items():
            found[f"teachers/{domain}"] = folder.build(
                f"teachers/{domain}",
                made_from,
                lambda out, domain=domain: maker.make(out, folder.root / "base", (domain,), LENGTHS, STEPS[domain]),
            )
        if with_copier:
            start = folder.root / "base"
            found["copier"] = folder.build(
                "copier",
                parts["copier"],
                lambda out: maker.make(out, start, ("sorting",), LENGTHS, STEPS["copier"], shows_answers=True),
            )
        if with_other:
            maker = ModelMaker(build_other_tokenizer(), validation(), **options)
            for part, tasks in {"base": tuple(TASKS), **{domain: (domain,) for domain in TASKS}}.items():
                begin, steps = (None, STEPS["base"]) if part == "base" else (folder.root / "other/base", STEPS["other"])
                found[f"other/{part}"] = folder.build(
                    f"other/{part}",
                    parts[f"other/{part}"],
                    lambda out, tasks=tasks, begin=begin, steps=steps: maker.make(out, begin, tasks, LENGTHS, steps),
                )
    models = {part: facts for part, facts in found.items() if not part.startswith("data")}
    return {part.removeprefix("teachers/"): facts["exact_match"] for part, facts in models.items()}


def validation() -> dict[str, list[Question]]:
    """Held-out questions by domain."""
    return {domain: list(islice(questions(domain, LENGTHS, "validation"), VALIDATION_ROWS)) for domain in TASKS}


def prompts() -> dict[str, list[Question]]:
    """Questions by split, domains in turn; no training prompt is a validation prompt."""
    held_out = validation()
    asked = {question.prompt for domain in held_out.values() for question in domain}
    train = {}
    for domain in TASKS:
        fresh = (question for question in questions(domain, LENGTHS, "train") if question.prompt not in asked)
        train[domain] = list(islice(fresh, TRAIN_ROWS))
    by_split = {"train": train, "validation": held_out}
    return {
        split: [question for row in zip(*by_domain.values(), strict=True) for question in row]
        for split, by_domain in by_split.items()
    }


def by_domain() -> dict[str, list[Question]]:
    """The same questions, one split for each domain: ``sorting_train`` and so on."""
    return {
        f"{domain}_{split}": [question for question in asked if question.domain == domain]
        for split, asked in prompts().items()
        for domain in TASKS
    }


def complaints(scores: dict[str, dict[str, float]]) -> list[str]:
    """What the quickstart's promise lacks, one line each."""
    lines = []
    for domain in TASKS:
        other = scores.get(f"other/{domain}", {domain: 1.0})[domain]
        if other < OTHER_AT_LEAST:
            lines.append(f"other/{domain}: {other:.3f} on its own domain, {OTHER_AT_LEAST} needed")
        if scores[domain][domain] < TEACHER_AT_LEAST:
            lines.append(f"teacher {domain}: {scores[domain][domain]:.3f} on its own domain, {TEACHER_AT_LEAST} needed")
        if scores["base"][domain] > BASE_AT_MOST:
            lines.append(f"base: {scores['base'][domain]:.3f} on {domain}, at most {BASE_AT_MOST} wanted")
    return lines


if __name__ == "__main__":
    sys.exit(main())
