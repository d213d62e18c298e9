"""Rows of parquet and JSONL files, and values under dotted keys."""

from __future__ import annotations

import json
import threading
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mopd.base.files.json_text import MAX_DEPTH, parse_json
from mopd.base.files.reading import open_regular, shown_path
from mopd.base.text import first_few, one_line
from mopd.base.types import UserError
from mopd.config.data import ReaderConfig
from mopd.data.readers import read_lines

MISSING = object()
"""Result of ``lookup`` for a key that leads nowhere (a null that is present is ``None``)."""
MAX_ROW_BYTES = 16 * 2**20
"""Longest JSON line: a hundred times the longest prompt that a model takes."""
MAX_FOOTER_BYTES = 64 * 2**20
"""Longest footer (description of row groups and columns) of a parquet file: a terabyte's is shorter."""
BATCH_ROWS = 64
HEAVY_BATCH_ROWS = 4
"""Rows read at a time from a file with a heavy column."""
MAX_BATCH_BYTES = 64 * 2**20
"""Largest size in memory of ``BATCH_ROWS`` rows of a parquet file: a few bytes on disk may stand for gigabytes."""
MAX_GROUP_BYTES = 512 * 2**20
"""Largest row group of a parquet file from which single rows are read: a group is the least that can be read."""
CURE = "correct data.train or data.validation"
_READ_ERRORS = (pa.ArrowException, OSError, ValueError, OverflowError)
"""Errors that pyarrow raises; a conversion to Python may also overflow."""


def read_rows(
    path: Path, columns: Sequence[str], *, heavy: str | None = None, reader: ReaderConfig | None = None
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield ``(row number from 0, row)`` of a file. Of parquet only the named top-level columns are read, few rows at a
    time if the file has the column ``heavy``, which is one of them. With a ``reader`` the rows are what it makes of
    the file.

    Raise ``UserError`` that names file and row, for a missing, unreadable or empty file, a file that is neither
    ``.parquet`` nor ``.jsonl``, a repeated column or key, and a value that Python cannot hold.
    """
    if reader is None and path.suffix not in (".parquet", ".jsonl"):
        raise UserError(
            f"{shown_path(path)}: unknown kind {path.suffix!r}: data.train and data.validation take .parquet and "
            ".jsonl, or set the entry's reader"
        )
    number = -1
    if reader is not None:
        rows = _rows_of_lines(path, read_lines(path, reader, MAX_ROW_BYTES))
    else:
        rows = _read_parquet(path, columns, heavy) if path.suffix == ".parquet" else _read_jsonl(path)
    for number, row in enumerate(rows):
        yield number, row
    if number == -1:
        raise UserError(
            f"{shown_path(path)}: the file has no rows: fill it, or remove it from data.train or data.validation"
        )


def read_first(path: Path) -> Mapping[str, Any]:
    """Return the first row, with all columns. Raise ``UserError`` as ``read_rows``."""
    columns: list[str] = []
    if path.suffix == ".parquet":
        _check_frame(path)
        try:
            with _open_parquet(path) as file:
                columns = list(dict.fromkeys(file.schema_arrow.names))
        except _READ_ERRORS as error:
            raise _unreadable(path, 0, error) from error
    return next(read_rows(path, columns))[1]


def lookup(row: Mapping[str, Any], key: str | None) -> Any:
    """Return the value under a dotted key, or ``MISSING``, also without a key: ``lookup({"a": {"b": 1}}, "a.b")`` is
    1."""
    if key is None:
        return MISSING
    value: Any = row
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return MISSING
        value = value[part]
    return value


class ColumnReader:
    """Reader of single values of one top-level column by row number, in any order. Thread-safe."""

    def __init__(self, path: Path, column: str) -> None:
        """Find out where rows begin. Raise ``UserError`` as ``read_rows``, and for a row group above
        ``MAX_GROUP_BYTES``."""
        self._path, self._column = path, column
        self._lock = threading.Lock()
        self._group: tuple[int, pa.ChunkedArray] | None = None
        """Number and column of the row group that was read last."""
        self._starts = self._group_starts() if path.suffix == ".parquet" else _line_starts(path)
        """Parquet: first row of each row group, then the number of rows. JSON lines: offset of each line."""

    def value(self, row: int) -> Any:
        """Return the value, or ``MISSING`` if the row has no such column.

        Raises:
            UserError: the file cannot be read, or no longer has such a row.
        """
        with self._lock:
            if self._path.suffix == ".parquet":
                return self._of_group(row)
            if row >= len(self._starts):
                raise self._changed(row)
            with open_regular(self._path, cure=CURE) as file:
                file.seek(self._starts[row])
                line = file.readline(MAX_ROW_BYTES + 1)
            return _parse_row(line, f"{shown_path(self._path)}: row {row}").get(self._column, MISSING)

    def _of_group(self, row: int) -> Any:
        group = bisect_right(self._starts, row) - 1
        if group >= len(self._starts) - 1:
            raise self._changed(row)
        try:
            if self._group is None or self._group[0] != group:
                self._group = None  # freed before the next is read: two may not fit in memory
                with _open_parquet(self._path) as file:
                    if self._column not in file.schema_arrow.names:
                        return MISSING
                    self._group = group, file.read_row_group(group, columns=[self._column]).column(0)
            return self._group[1][row - self._starts[group]].as_py()
        except _READ_ERRORS as error:
            raise _unreadable(self._path, row, error) from error

    def _group_starts(self) -> array[int]:
        _check_frame(self._path)
        starts = array("q", [0])
        try:
            with _open_parquet(self._path) as file:
                for i in range(file.metadata.num_row_groups):
                    group = file.metadata.row_group(i)
                    if group.total_byte_size > MAX_GROUP_BYTES:
                        raise UserError(
                            f"{shown_path(self._path)}: row group {i} has {group.total_byte_size} bytes; to read one "
                            f"image of it at most {MAX_GROUP_BYTES} are taken: write it again with row_group_size=100"
                        )
                    starts.append(starts[-1] + group.num_rows)
        except _READ_ERRORS as error:
            raise _unreadable(self._path, 0, error) from error
        return starts

    def _changed(self, row: int) -> UserError:
        return UserError(f"{shown_path(self._path)}: row {row} is not there any more: restore the file, or start again")


def _line_starts(path: Path) -> array[int]:
    """Return the offsets of the lines that are not blank."""
    starts, place = array("q"), 0
    with open_regular(path, cure=CURE) as file:
        while line := file.readline(MAX_ROW_BYTES + 1):
            if line.strip():
                starts.append(place)
            place += len(line)
    return starts


def _read_jsonl(path: Path) -> Iterator[Mapping[str, Any]]:
    with open_regular(path, cure=CURE) as file:
        yield from _rows_of_lines(path, iter(partial(file.readline, MAX_ROW_BYTES + 1), b""))


def _rows_of_lines(path: Path, lines: Iterator[bytes]) -> Iterator[Mapping[str, Any]]:
    for number, line in enumerate(lines, 1):
        where = f"{shown_path(path)}: line {number}"
        if len(line) > MAX_ROW_BYTES:
            raise UserError(f"{where} is longer than {MAX_ROW_BYTES} bytes: shorten or remove it")
        if line.strip():
            yield _parse_row(line, where)


def _parse_row(line: bytes, where: str) -> Mapping[str, Any]:
    try:
        row = parse_json(line)
    except UnicodeDecodeError as error:
        raise UserError(f"{where} is not UTF-8 text ({error.reason}): save the file as UTF-8") from error
    except ValueError as error:
        at = f"{error.msg} (column {error.colno})" if isinstance(error, json.JSONDecodeError) else error
        raise UserError(f"{where} is not JSON: {at}: correct or remove it") from error
    if not isinstance(row, dict):
        raise UserError(f"{where} is {type(row).__name__}, not an object with columns: correct or remove it")
    return row


def _read_parquet(path: Path, columns: Sequence[str], heavy: str | None) -> Iterator[Mapping[str, Any]]:
    _check_frame(path)
    number = 0
    try:
        with _open_parquet(path) as file:
            present = _chosen_columns(path, file, columns)
            batch_rows = HEAVY_BATCH_ROWS if heavy in present else BATCH_ROWS
            for batch in file.iter_batches(batch_size=batch_rows, columns=present):
                if batch.nbytes > MAX_BATCH_BYTES:
                    raise UserError(
                        f"{shown_path(path)}: rows {number} to {number + batch.num_rows - 1} hold "
                        f"{batch.nbytes} bytes, more than {MAX_BATCH_BYTES}: shorten or remove them"
                    )
                for i in range(batch.num_rows):
                    yield {name: _value(path, number, batch, name, i) for name in present}
                    number += 1
    except _READ_ERRORS as error:
        raise _unreadable(path, number, error) from error


def _open_parquet(path: Path) -> pq.ParquetFile:
    return pq.ParquetFile(
        path, thrift_string_size_limit=MAX_FOOTER_BYTES, thrift_container_size_limit=2**20, buffer_size=2**20
    )


def _unreadable(path: Path, row: int, error: Exception) -> UserError:
    return UserError(
        f"{shown_path(path)}: unreadable parquet file at or after row {row}: {one_line(error):.200}: write it "
        f"again, or {CURE}"
    )


def _check_frame(path: Path) -> None:
    """Check the magic bytes at the end and the footer's length, before a parser sees the file."""
    with open_regular(path, cure=CURE) as file:
        size = file.seek(0, 2)
        file.seek(max(size - 8, 0))
        footer = file.read(8)
    if size < 12 or footer[4:] not in (b"PAR1", b"PARE"):
        raise UserError(
            f"{shown_path(path)}: unreadable parquet file: it does not end as one (cut off, or of another kind): write "
            f"it again, or {CURE}"
        )
    length = int.from_bytes(footer[:4], "little")
    if length > min(size - 12, MAX_FOOTER_BYTES):
        raise UserError(
            f"{shown_path(path)}: unreadable parquet file: its description is said to have {length} bytes, the file "
            f"has {size} (limit {MAX_FOOTER_BYTES}): write it again, or {CURE}"
        )


def _chosen_columns(path: Path, file: pq.ParquetFile, columns: Sequence[str]) -> list[str]:
    """Return those of ``columns`` that the file has. Refuse what Python objects cannot distinguish or hold.

    It reads the schema alone: pyarrow ends the process at a damaged description of a row group's column.
    """
    shown, schema = shown_path(path), file.schema_arrow
    again = _repeated(schema.names)
    if again is not None:
        raise UserError(f"{shown}: column {quoted(again)} stands there twice: keep one of them")
    present = [name for name in dict.fromkeys(columns) if name in schema.names]
    if not present and file.metadata.num_rows:
        raise UserError(f"{shown}: none of the columns {list(columns)}: it has {listed(schema.names)}: {CURE}")
    for name in present:
        _check_type(f"{shown}: column {quoted(name)}", schema.field(name).type)
    return present


def _check_type(where: str, root: pa.DataType) -> None:
    """Refuse a field that occurs twice in a structure (a mapping would keep one of them), and deep nesting."""
    level = [root]
    for _ in range(MAX_DEPTH):
        below: list[pa.DataType] = []
        for kind in level:
            fields = [kind.field(i) for i in range(kind.num_fields)]
            again = _repeated([field.name for field in fields]) if pa.types.is_struct(kind) else None
            if again is not None:
                raise UserError(f"{where} has the field {quoted(again)} twice: keep one of them")
            below.extend(field.type for field in fields)
        if not below:
            return
        level = below
    raise UserError(f"{where} is nested deeper than {MAX_DEPTH}: flatten it")


def _value(path: Path, number: int, batch: pa.RecordBatch, name: str, i: int) -> Any:
    column = batch.column(name)
    try:
        return column[i].as_py()
    except _READ_ERRORS as error:
        raise UserError(
            f"{shown_path(path)}: row {number}: column {quoted(name)} of type {str(column.type)[:80]} holds what "
            f"Python cannot ({one_line(error):.200}): store it as text or numbers"
        ) from error


def listed(names: Sequence[Any], most: int = 20) -> str:
    """Return the first few names, quoted, for a message."""
    return first_few([quoted(name) for name in names], most)


def quoted(name: Any) -> str:
    """Return one name, quoted and shortened, for the middle of a message."""
    text = repr(name)
    return text if len(text) <= 80 else f"{text[:60]}…{text[-10:]}"


def described(value: Any) -> str:
    """Return type and value, for the middle of a message."""
    return f"{type(value).__name__} {quoted(value)}"


def _repeated(names: Sequence[str]) -> str | None:
    return next((name for name, count in Counter(names).items() if count > 1), None)
