"""Rows of parquet and JSONL files, and values under dotted keys."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mopd.types import UserError

MISSING = object()
"""What ``lookup`` returns where a key leads nowhere (a present null is ``None``)."""


def read_rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """``(row number from 0, row)`` of a file; parquet reads only the named top-level columns.

    ``UserError`` for a missing, unreadable or empty file, or a file that is neither ``.parquet`` nor ``.jsonl``.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file: correct data.train or data.validation")
    readers = {".parquet": _read_parquet, ".jsonl": _read_jsonl}
    if path.suffix not in readers:
        raise UserError(
            f"{path}: unknown kind {path.suffix!r}: data.train and data.validation take .parquet and .jsonl"
        )
    number = -1
    for number, row in enumerate(readers[path.suffix](path, columns)):
        yield number, row
    if number == -1:
        raise UserError(f"{path}: the file has no rows: fill it or remove it from data.train or data.validation")


def lookup(row: Mapping[str, Any], key: str) -> Any:
    """Value under a dotted key, or ``MISSING``: ``lookup({"a": {"b": 1}}, "a.b")`` is 1."""
    value: Any = row
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return MISSING
        value = value[part]
    return value


def _read_parquet(path: Path, columns: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    try:
        with pq.ParquetFile(path) as file:
            present = [name for name in dict.fromkeys(columns) if name in file.schema_arrow.names]
            if not present and file.metadata.num_rows:
                raise UserError(f"{path}: none of the columns {list(columns)}: it has {file.schema_arrow.names}")
            for batch in file.iter_batches(columns=present):
                yield from batch.to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: unreadable parquet file: {' '.join(str(error).split())[:200]}") from error


def _read_jsonl(path: Path, columns: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(f"{path}: line {number} is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise UserError(f"{path}: line {number} is {type(row).__name__}, not an object with columns")
            yield row
