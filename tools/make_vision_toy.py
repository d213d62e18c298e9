"""Make what ``recipes/vision_cpu.yaml`` needs: a weak vision-language base model, a vision-language teacher, a text
teacher, and prompts of which half have an image. About three minutes on two cores, once.

The images are 56 x 84 pixels and show two glyphs, shifted, in two colours, under noise. Domain *read* asks for the
letters, domain *sort* for those of a text in order. The base, a Qwen2.5-VL of a million weights, sees every glyph but
has learnt wrong names for half of them, and to sort short inputs alone: it has a third of each domain. The teacher
of *read* is a copy of it that has learnt the right names and forgot to sort; that of *sort* is a plain Qwen3 with
the same tokenizer that sees no images. No data or weights are downloaded.

    python tools/make_vision_toy.py                               # --out FOLDER for another place; again: at once

    runs/vision_assets/models/{vision-base, reader, sorter}   Hugging Face folders
    runs/vision_assets/data/train.jsonl, images/              images by path (JPEG); columns as in docs/data.md
    runs/vision_assets/data/validation.parquet                images as bytes (PNG)
    runs/vision_assets/data/{blank, shuffled}.parquet         the same rows with an empty image, or another row's
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __package__ is None or __package__ == "":  # run as a file: make `tools` importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.quickstart.cache import PartsFolder, fingerprint
from tools.vision_toy.tasks import BASE_LENGTHS, DOMAINS, KNOWN, LENGTHS

VERSION = 1
"""Raise it when code below changes what is made: folders made before are then made again."""
SEED = 0
TEXT_SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
TOWER_SHAPE: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_heads": 3,
    "out_hidden_size": 128,
    "window_size": 56,
    "fullatt_block_indexes": [2],
    "initializer_range": 0.05,
}
BASE, TEACHERS = "vision-base", {"read": "reader", "sort": "sorter"}
"""Folders of the student, and of each domain's teacher."""
STEPS = {"tower": 150, "base": 400, "read": 100, "short": 200, "sort": 400}
BATCH_SIZE = 64
LR = 2e-3
TRAIN_ROWS = 2000
"""Training prompts per domain."""
VALIDATION_ROWS = 200
"""Validation prompts per domain."""
TEACHER_AT_LEAST = 0.95
BASE_AT_MOST = 0.5


def main() -> int:
    """Build what is missing; exit code 1 if a model is not what the recipe needs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/vision_assets"), metavar="FOLDER")
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="CPU threads; 0 lets PyTorch choose")
    args = parser.parse_args()
    started = time.monotonic()
    folder = PartsFolder(args.out)
    with folder.locked():
        facts = build(folder, threads=args.threads)
    for model, found in facts.items():
        scores = "  ".join(f"{domain} {score:.3f}" for domain, score in found["exact_match"].items())
        print(f"{model:<14}{scores}  {found['weights']:,} weights")
    problems = complaints(facts)
    print(*problems, f"{args.out}: {time.monotonic() - started:.0f} s", sep="\n")
    return 1 if problems else 0


def build(folder: PartsFolder, *, threads: int) -> dict[str, dict[str, Any]]:
    """Make every missing part. Returns what was measured: model -> ``exact_match`` by domain, number of ``weights``."""
    data = fingerprint(VERSION, LENGTHS, TRAIN_ROWS, VALIDATION_ROWS)
    base = fingerprint(data, SEED, TEXT_SHAPE, TOWER_SHAPE, LR, BATCH_SIZE, BASE_LENGTHS, KNOWN, STEPS)
    models = {BASE: base} | {name: fingerprint(base, domain) for domain, name in TEACHERS.items()}
    parts = {"data": data} | {f"models/{name}": made_from for name, made_from in models.items()}
    found: dict[str, Any] = {part: folder.facts(part, made_from) for part, made_from in parts.items()}
    if None in found.values():
        # Imported here: a second call answers without loading torch.
        from tools.vision_toy.models import ToyMaker
        from tools.vision_toy.rows import rows, write_data

        found["data"] = folder.build(
            "data", data, lambda out: write_data(out, num_train=TRAIN_ROWS, num_validation=VALIDATION_ROWS)
        )
        maker = ToyMaker(
            rows("validation", VALIDATION_ROWS, kind="PNG"),
            seed=SEED,
            text_shape=TEXT_SHAPE,
            tower_shape=TOWER_SHAPE,
            batch_size=BATCH_SIZE,
            lr=LR,
            threads=threads,
        )
        start = folder.root / "models" / BASE
        makers: dict[str, Callable[[Path], dict[str, Any]]] = {
            BASE: lambda out: maker.make_base(out, tower_steps=STEPS["tower"], steps=STEPS["base"]),
            TEACHERS["read"]: lambda out: maker.make_reader(out, start, steps=STEPS["read"]),
            TEACHERS["sort"]: lambda out: maker.make_sorter(out, short_steps=STEPS["short"], steps=STEPS["sort"]),
        }
        for name, make in makers.items():
            found[f"models/{name}"] = folder.build(f"models/{name}", models[name], make)
    return {name: found[f"models/{name}"] for name in models}


def complaints(facts: dict[str, dict[str, Any]]) -> list[str]:
    """What the recipe's promise lacks, one line each."""
    lines = []
    for domain in DOMAINS:
        teacher, base = (facts[model]["exact_match"][domain] for model in (TEACHERS[domain], BASE))
        if teacher < TEACHER_AT_LEAST:
            lines.append(f"teacher {domain}: {teacher:.3f} on its own domain, {TEACHER_AT_LEAST} needed")
        if base > BASE_AT_MOST:
            lines.append(f"base: {base:.3f} on {domain}, at most {BASE_AT_MOST} wanted")
    return lines


if __name__ == "__main__":
    sys.exit(main())
