"""Data files that anybody may have written: each is read, or refused in one line that names file, row and cure."""

from __future__ import annotations

import datetime
import io
import json
import os
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerBase

from mopd.base.types import UserError
from mopd.config.data import DataConfig
from mopd.config.reading.build import build_from_json
from mopd.data import files
from mopd.data.prompts import PromptDataset, load_prompts
from mopd.data.templates import rendering
from tests.fixtures.tiny_models import make_tokenizer

GOOD = b'{"data_source": "math", "prompt": "ab", "reward_model": {"ground_truth": "12"}}\n'
Load = Callable[..., PromptDataset]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def load(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> Load:
    def run(content: bytes, suffix: str, **keys: Any) -> PromptDataset:
        path = tmp_path / f"rows.{suffix}"
        path.write_bytes(content)
        cfg = build_from_json(DataConfig, {"train": [str(path)], **keys}, "recipe")
        return load_prompts(cfg.train, cfg, tokenizer)

    return run


def refusal(load: Load, content: bytes, suffix: str, **keys: Any) -> str:
    with pytest.raises(UserError) as caught:
        load(content, suffix, **keys)
    message = str(caught.value)
    assert f"rows.{suffix}" in message and "\n" not in message and len(message) < 1000
    return message


def parquet(table: pa.Table, **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, **options)
    return sink.getvalue()


def table(num_rows: int = 3, **columns: pa.Array) -> pa.Table:
    """Good rows, with columns replaced or added."""
    good = {
        "data_source": pa.array(["math"] * num_rows),
        "prompt": pa.array(["ab"] * num_rows),
        "reward_model": pa.array([{"ground_truth": "12"}] * num_rows),
    }
    return pa.table(good | columns)


def text_array(*values: bytes) -> pa.Array:
    """A text column without a check that it is text."""
    return pa.array(values, pa.binary()).cast(pa.binary()).view(pa.string())


BAD_LINES = {
    "not UTF-8": (b'{"prompt": "\xff"}', "line 2 is not UTF-8"),
    "half a character": (b'{"prompt": "\\ud800", "data_source": "m"}', "half a character"),
    "deep": (b'{"prompt": ' + b"[" * 90_000 + b"]" * 90_000 + b"}", "nested deeper than 64"),
    "a huge whole number": (b'{"prompt": 1' + b"0" * 5000 + b"}", "beyond 64 bits"),
    "a huge number": (b'{"prompt": 1e999}', "beyond double"),
    "NaN": (b'{"prompt": "a", "data_source": "m", "reward_model": {"ground_truth": NaN}}', "NaN is no JSON"),
    "a key twice": (b'{"prompt": "a", "prompt": "b", "data_source": "m"}', "'prompt' occurs twice"),
    "a key twice below": (b'{"prompt": "a", "reward_model": {"x": 1, "x": 2}}', "'x' occurs twice"),
    "text": (b'"abc"', "line 2 is str"),
    "null": (b"null", "line 2 is NoneType"),
    "two values": (GOOD.strip() + GOOD.strip(), "line 2 is not JSON"),
    "cut off": (GOOD[:40], "line 2 is not JSON"),
    "binary": (bytes(range(256)), "line 2 is not"),
    "UTF-16": ('{"prompt": "a"}'.encode("utf-16"), "line 2 is not UTF-8"),
    "zeros": (b"\0" * 5000, "line 2 is not JSON"),
    "a prompt of numbers": (b'{"prompt": [1, 2], "data_source": "m"}', "row 1: column 'prompt'"),
    "an empty chat": (b'{"prompt": [], "data_source": "m"}', "row 1: column 'prompt'"),
    "a message of lists": (b'{"prompt": [{"role": "user", "content": ["a"]}], "data_source": "m"}', "row 1"),
    "a long domain": (b'{"prompt": "a", "data_source": "' + b"m" * 300 + b'"}', "row 1: column 'data_source'"),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_bad_lines(load: Load, case: str) -> None:
    content, expected = BAD_LINES[case]
    assert expected in refusal(load, GOOD + content + b"\n", "jsonl")


def test_a_line_of_any_length_is_not_read_whole(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_ROW_BYTES", 100)
    assert "line 2 is longer than 100 bytes" in refusal(load, GOOD + b" " * 101 + GOOD, "jsonl")
    assert len(load(GOOD + GOOD, "jsonl")) == 2


def test_an_enormous_prompt_is_not_tokenized(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mopd.data.prompts.MAX_PROMPT_CHARACTERS", 1000)
    line = json.dumps({"data_source": "m", "prompt": "a" * 1001, "reward_model": {"ground_truth": "1"}}).encode()
    assert "row 1: the prompt in 'prompt' (data.columns.prompt) has 1001 characters" in refusal(
        load, GOOD + line, "jsonl"
    )


WHOLE = parquet(table())
BAD_PARQUETS: dict[str, tuple[Callable[[], bytes], str]] = {
    "no bytes": (lambda: b"", "does not end as one"),
    "four bytes": (lambda: b"PAR1", "does not end as one"),
    "the magic bytes alone": (lambda: b"PAR1" + bytes(4) + b"PAR1", "unreadable parquet"),
    "cut off": (lambda: WHOLE[:-20], "does not end as one"),
    "without a beginning": (lambda: WHOLE[100:], "unreadable parquet"),
    "a long description": (lambda: WHOLE[:-8] + b"\xff\xff\xff\x7fPAR1", "2147483647 bytes"),
    "a long list in its description": (lambda: thrift_list_bomb(), "unreadable parquet"),
    "JSON": (lambda: GOOD, "does not end as one"),
    "a column twice": (
        lambda: parquet(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])),
        "column 'prompt' stands there twice",
    ),
    "a field twice": (
        lambda: parquet(
            table(1, reward_model=pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"]))
        ),
        "column 'reward_model' has the field 'x' twice",
    ),
    "nanoseconds": (
        lambda: parquet(table(extra_info=pa.array([None, 1000, 1], pa.timestamp("ns")))),
        "row 2: column 'extra_info' of type timestamp[ns]",
    ),
    "a far day": (
        lambda: parquet(table(extra_info=pa.array([1, 2**30, 1], pa.date32()))),
        "row 1: column 'extra_info' of type date32",
    ),
    "a far moment": (
        lambda: parquet(table(extra_info=pa.array([{"at": None}, {"at": 2**62}, {"at": 1}]).cast(
            pa.struct({"at": pa.timestamp("us")})
        ))),
        "row 1: column 'extra_info'",
    ),
    "an unknown time zone": (
        lambda: parquet(table(extra_info=pa.array([1, 2, 3], pa.timestamp("us", tz="Nowhere/Never")))),
        "row 0: column 'extra_info'",
    ),
    "text that is none": (lambda: parquet(table(prompt=text_array(b"a", b"b", b"\xff\xfe"))), "row 2: column 'prompt'"),
    "bytes as prompts": (lambda: parquet(table(prompt=pa.array([b"a", b"b", b"c"]))), "row 0: column 'prompt'"),
    "nulls as prompts": (lambda: parquet(table(prompt=pa.nulls(3))), "row 0 has no column 'prompt'"),
    "moments as domains": (
        lambda: parquet(table(data_source=pa.array([1, 2, 3], pa.timestamp("us")))),
        "row 0: column 'data_source'",
    ),
    "NaN as ground truth": (
        lambda: parquet(table(reward_model=pa.array([{"ground_truth": x} for x in (1.5, float("nan"), 2.5)]))),
        "row 1: 'reward_model.ground_truth' (data.columns.ground_truth) holds a number that is not finite",
    ),
    "deep": (lambda: parquet(table(1, extra_info=pa.array([nest(70)]))), "is nested deeper than 64"),
    "deeper than pyarrow reads": (lambda: parquet(table(1, extra_info=pa.array([nest(120)]))), "schema depth limit"),
    "encrypted": (lambda: WHOLE[:-4] + b"PARE", "unreadable parquet"),
    "no rows": (lambda: parquet(table().slice(0, 0)), "no rows"),
    "no known column": (lambda: parquet(pa.table({f"c{i}": [1] for i in range(500)})), "and 480 more"),
    "corrupt pages": (lambda: WHOLE[:40] + bytes(60) + WHOLE[100:], "unreadable parquet file at or after row 0"),
}  # fmt: skip


def nest(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


def thrift_list_bomb() -> bytes:
    """A description whose second field, the schema, is a list of 2**31 - 1 structures."""
    description = bytes([0x15, 0x02, 0x19, 0xFC]) + b"\xff\xff\xff\xff\x07" + bytes(40)
    return b"PAR1" + description + len(description).to_bytes(4, "little") + b"PAR1"


@pytest.mark.parametrize("case", BAD_PARQUETS)
def test_bad_parquets(load: Load, case: str) -> None:
    make, expected = BAD_PARQUETS[case]
    assert expected in refusal(load, make(), "parquet")


def test_a_small_file_of_large_rows_does_not_fill_the_memory(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = parquet(table(2, prompt=pa.array(["a" * 40_000] * 2)))
    assert len(bomb) < 5000
    monkeypatch.setattr(files, "MAX_BATCH_BYTES", 50_000)
    assert "rows 0 to 1 hold 80" in refusal(load, bomb, "parquet")


GOOD_COLUMNS: dict[str, Callable[[], dict[str, pa.Array]]] = {
    "large text": lambda: {"prompt": pa.array(["ab"] * 3, pa.large_string())},
    "dictionary": lambda: {"data_source": pa.array(["math"] * 3).dictionary_encode()},
    "views": lambda: {"prompt": pa.array(["ab"] * 3, pa.string_view())},
    "decimals": lambda: {"extra_info": pa.array([Decimal("1.5")] * 3)},
    "moments": lambda: {"extra_info": pa.array([datetime.datetime(2020, 1, 1)] * 3)},
    "bytes": lambda: {"extra_info": pa.array([b"\xff"] * 3)},
    "maps": lambda: {"extra_info": pa.array([[("a", 1), ("a", 2)]] * 3, pa.map_(pa.string(), pa.int64()))},
    "nulls": lambda: {"extra_info": pa.nulls(3)},
    "an unread column of nanoseconds": lambda: {"other": pa.array([1, 2, 3], pa.timestamp("ns"))},
    "whole numbers as ground truth": lambda: {"reward_model": pa.array([{"ground_truth": 2**63 - 1}] * 3)},
}


@pytest.mark.parametrize("case", GOOD_COLUMNS)
def test_every_kind_of_column_is_read(load: Load, case: str) -> None:
    rows = load(parquet(table(**GOOD_COLUMNS[case]()), row_group_size=2), "parquet").rows
    assert [(row.domain, row.text) for row in rows] == [("math", "ab")] * 3


def test_row_groups_without_rows_and_batches_keep_the_row_numbers(load: Load) -> None:
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, table().schema) as writer:
        for rows in (table(100), table().slice(0, 0), table(30)):
            writer.write_table(rows)
    dataset = load(sink.getvalue(), "parquet")
    assert [row.place.rsplit(" ", 1)[1] for row in dataset.rows] == [str(i) for i in range(130)]


@pytest.mark.parametrize("kind", ["folder", "pipe", "loop", "absent"])
@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "jinja"])
def test_what_is_no_file_is_refused_at_once(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, kind: str, suffix: str
) -> None:
    path = tmp_path / f"rows.{suffix}"
    make = {"folder": path.mkdir, "pipe": lambda: os.mkfifo(path), "loop": lambda: path.symlink_to(path)}
    make.get(kind, lambda: None)()
    is_template = suffix == "jinja"
    cfg = DataConfig(train=(str(path),), chat_template=str(path) if is_template else None)
    with pytest.raises(UserError, match=f"rows.{suffix}.*correct data\\.{'chat_template' if is_template else 'train'}"):
        load_prompts(cfg.train, cfg, tokenizer)


CHAT = b'{"data_source": "m", "prompt": [{"role": "user", "content": "ab"}], "reward_model": {"ground_truth": "1"}}\n'
BAD_TEMPLATES = {
    "binary": (b"\x80\x81{{ messages }}", "template.jinja:1: not UTF-8 text"),
    "a syntax error": (b"{% for m in messages %}{{ m.content }}", "row 0: the chat template failed: Unexpected end"),
    "an unknown filter": (b"{{ messages | nothing }}", "row 0: the chat template failed: No filter named 'nothing'"),
    "deep": (b"{{ " + b"(" * 5000 + b"1" + b")" * 5000 + b" }}", "row 0: the chat template failed"),
    "a long range": (b"{% for i in range(10**9) %}a{% endfor %}", "row 0: the chat template failed: Range too big"),
    "long loops": (
        b"{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "it ran for 0.2 s on one row",
    ),
    "recursion": (b"{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "row 0: the chat template failed: maximum rec"),
    "half a character": (b'{{ "\\ud800" }}', "row 0: the chat template failed"),
    "a way out of the sandbox": (b"{{ messages.__class__.__mro__ }}", "row 0: the chat template failed"),
    "no text": (b"", "row 0: the prompt in 'prompt' (data.columns.prompt) has no tokens"),
    "its own refusal": (b"{{ raise_exception('two\nturns') }}", "row 0: the chat template failed: two turns"),
}


@pytest.mark.parametrize("case", BAD_TEMPLATES)
def test_bad_templates(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.setattr(rendering, "MAX_RENDER_S", 0.2)
    content, expected = BAD_TEMPLATES[case]
    path = tmp_path / "template.jinja"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"rows\.jsonl|template\.jinja") as caught:
        load(CHAT, "jsonl", chat_template=str(path))
    assert expected in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("arguments", [{"tools": 5}, {"tools": ["a"]}, {"documents": [1]}])
def test_arguments_that_the_template_cannot_take(load: Load, arguments: dict[str, Any]) -> None:
    assert "row 0: the chat template failed" in refusal(load, CHAT, "jsonl", chat_template_kwargs=arguments)
