"""Parquet files of prompts in the columns that reinforcement-learning data sets use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tools.quickstart.tasks import Question


def write_prompts(folder: Path, by_split: dict[str, list[Question]]) -> dict[str, Any]:
    """Write ``<split>.parquet`` files; returns the number of rows by split."""
    for split, asked in by_split.items():
        rows = [
            {
                "data_source": question.domain,
                "prompt": [{"role": "user", "content": question.prompt}],
                "reward_model": {"style": "rule", "ground_truth": question.answer},
                "extra_info": {"index": index, "split": split},
            }
            for index, question in enumerate(asked)
        ]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}.parquet")
    return {"rows": {split: len(asked) for split, asked in by_split.items()}}
