"""The toy's data files: paths of images in JSON Lines, encoded bytes in parquet, in the columns of docs/data.md."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tools.vision_toy.glyphs import blank, encoded
from tools.vision_toy.tasks import DOMAINS, Exercise, exercises

Row = tuple[Exercise, bytes]
"""An exercise and its encoded image, empty without."""
IMAGES = "images"


def rows(split: str, count: int, *, kind: str, without: frozenset[str] = frozenset()) -> dict[str, list[Row]]:
    """``count`` rows of each domain, with images of the format ``kind``; no prompt to sort is one of ``without``."""
    made: dict[str, list[Row]] = {}
    for domain in DOMAINS:
        dice = random.Random(f"{split} images")
        fresh = (one for one in exercises(domain, split) if one.letters or one.prompt not in without)
        made[domain] = [(one, encoded(one.letters, dice, kind) if one.letters else b"") for one in islice(fresh, count)]
    return made


def write_data(folder: Path, *, num_train: int, num_validation: int) -> dict[str, Any]:
    """Write ``train.jsonl`` with its images beside it, ``validation.parquet``, and that file again with other images:
    ``blank.parquet``, ``shuffled.parquet``. Returns the number of rows by split."""
    held_out = rows("validation", num_validation, kind="PNG")
    train = rows("train", num_train, kind="JPEG", without=frozenset(one.prompt for one, _ in held_out["sort"]))
    _write_jsonl(folder / "train.jsonl", _mixed(train))
    _write_parquet(folder / "validation.parquet", _mixed(held_out))
    read = held_out["read"]
    nothing = [(one, blank("PNG")) for one, _ in read]
    _write_parquet(folder / "blank.parquet", _mixed({**held_out, "read": nothing}))
    _write_parquet(folder / "shuffled.parquet", _mixed({**held_out, "read": shuffled(read)}))
    return {"rows": {"train": len(DOMAINS) * num_train, "validation": len(DOMAINS) * num_validation}}


def shuffled(read: Sequence[Row]) -> list[Row]:
    """Each exercise with the image of another."""
    order = random.Random("shuffled").sample(range(len(read)), len(read))
    follower = {place: order[(i + 1) % len(order)] for i, place in enumerate(order)}
    return [(one, read[follower[place]][1]) for place, (one, _) in enumerate(read)]


def _mixed(by_domain: dict[str, list[Row]]) -> list[Row]:
    return [row for group in zip(*by_domain.values(), strict=True) for row in group]


def _columns(one: Exercise, index: int, split: str) -> dict[str, Any]:
    return {
        "data_source": one.domain,
        "prompt": [{"role": "user", "content": one.prompt}],
        "reward_model": {"style": "rule", "ground_truth": one.answer},
        "extra_info": {"index": index, "split": split},
    }


def _write_jsonl(path: Path, mixed: Sequence[Row]) -> None:
    (path.parent / IMAGES).mkdir()
    lines = []
    for index, (one, file) in enumerate(mixed):
        row = _columns(one, index, path.stem)
        if file:
            name = f"{IMAGES}/{index:05d}.jpg"
            (path.parent / name).write_bytes(file)
            row["images"] = [{"path": name}]
        lines.append(json.dumps(row) + "\n")
    path.write_text("".join(lines), encoding="utf-8")


def _write_parquet(path: Path, mixed: Sequence[Row]) -> None:
    table = [
        {**_columns(one, index, path.stem), "images": [{"bytes": file, "path": None}] if file else None}
        for index, (one, file) in enumerate(mixed)
    ]
    pq.write_table(pa.Table.from_pylist(table), path)
