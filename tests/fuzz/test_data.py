"""Prompt files, from bytes to tokens."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerBase

from mopd.base.types import UserError
from mopd.config.data import DataConfig
from mopd.data.image_files import image_size, read_rgb
from mopd.data.image_processing import read_image_processing
from mopd.data.prompts import load_prompts
from mopd.data.templates import rendering
from tests.fixtures.hostile_templates import ENDLESS, FORBIDDEN, GREEDY
from tests.fixtures.tiny_models import make_tokenizer
from tests.fixtures.vision import image_bytes, write_image_processing
from tests.fuzz.harness import NUM_MUTATIONS, fuzz

ROWS: list[dict[str, Any]] = [
    {
        "data_source": domain,
        "prompt": [{"role": "user", "content": f"{domain} é {i}", "name": None}],
        "reward_model": {"ground_truth": str(i)},
        "extra_info": {"index": i, "share": i / 7, "tags": ["a", None]},
    }
    for i, domain in enumerate(["math", "code"] * 12)
]
JSONL = [
    "".join(json.dumps(row, ensure_ascii=i % 2 == 0) + "\n" for i, row in enumerate(ROWS)).encode(),
    b'{"data_source": "m", "prompt": "ab c", "reward_model": null}\n\n{"data_source": "n", "prompt": "d"}',
]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"compression": "none", "use_dictionary": False},
    {"compression": "zstd", "row_group_size": 7},
    {"compression": "gzip", "data_page_version": "2.0", "write_page_checksum": True},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def parquet(**options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(ROWS), sink, **options)
    return sink.getvalue()


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_prompt_files(tmp_path: Path, tokenizer: PreTrainedTokenizerBase, suffix: str) -> None:
    path = tmp_path / f"rows.{suffix}"
    cfg = DataConfig(train=(str(path),), max_prompt_length=100_000)

    def read(content: bytes) -> None:
        path.write_bytes(content)
        load_prompts(cfg.train, cfg, tokenizer)

    valid = JSONL if suffix == "jsonl" else [parquet(**options) for options in OPTIONS]
    fuzz(suffix, valid, read, (UserError,))


def test_parquet_inside_its_frame(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Pages and description are damaged, the end of the file is right: more reaches the parser."""
    path = tmp_path / "rows.parquet"
    cfg = DataConfig(train=(str(path),), max_prompt_length=100_000)
    whole = parquet(**OPTIONS[1])

    def read(content: bytes) -> None:
        path.write_bytes(content + whole[-8:])
        load_prompts(cfg.train, cfg, tokenizer)

    fuzz("parquet inside", [whole[:-8]], read, (UserError,))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP"])
def test_images(kind: str) -> None:
    """From the header to the pixels."""

    def read(content: bytes) -> None:
        size = image_size(content, "here")
        image = read_rgb(content, "here")
        assert (image.height, image.width, image.mode) == (*size, "RGB")

    modes = ("RGB", "L") if kind == "JPEG" else ("RGB", "RGBA", "P") if kind == "PNG" else ("RGB",)
    fuzz(f"image {kind}", [image_bytes(kind=kind, mode=mode) for mode in modes], read, (UserError,))


def test_image_processing(tmp_path: Path) -> None:
    write_image_processing(tmp_path, "qwen2_5_vl")
    path = tmp_path / "preprocessor_config.json"
    valid = [path.read_bytes()]
    write_image_processing(tmp_path, "qwen3_vl")
    valid.append(path.read_bytes())

    def read(content: bytes) -> None:
        path.write_bytes(content)
        processing = read_image_processing(tmp_path, None)
        assert min(processing.grid(300, 500)) >= 1 and processing.fingerprint

    fuzz("image processing", valid, read, (UserError,))


HOSTILE = [*ENDLESS.values(), *GREEDY.values(), *FORBIDDEN.values()]
BLOCKS = [
    "{0}{1}",
    "{{% if messages %}}{0}{{% else %}}{1}{{% endif %}}",
    "{{% for m in messages %}}{0}{1}{{% endfor %}}",
    "{{% set y %}}{0}{{% endset %}}{1}{{{{ y * 9 }}}}",
    "{{% macro f() %}}{0}{{% endmacro %}}{1}{{{{ f() }}}}",
    "{{% filter center(99999) %}}{0}{{% endfilter %}}{1}",
]


def hostile_template(valid: bytes, rng: random.Random) -> bytes:
    """One or two hostile templates and the valid one, within one another."""
    parts = [*rng.choices(HOSTILE, k=rng.choice((1, 1, 2))), valid.decode()]
    while len(parts) > 1:
        rng.shuffle(parts)
        parts.append(rng.choice(BLOCKS).format(parts.pop(), parts.pop()))
    return parts[0].encode("utf-8", "surrogatepass")


def test_chat_templates(tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, path = tmp_path / "rows.jsonl", tmp_path / "chat.jinja"
    rows.write_bytes(JSONL[0][:400].split(b"\n")[0])
    cfg = DataConfig(train=(str(rows),), chat_template=str(path), max_prompt_length=100_000)
    valid = [
        b"{% for m in messages %}{{ m['role'] + ':' + m['content'] + '\\n' }}{% endfor %}"
        b"{% if add_generation_prompt %}assistant:{% endif %}",
        b"{%- set ns = namespace(n=0) -%}{%- for m in messages if m.role == 'user' -%}{%- set ns.n = ns.n + 1 -%}"
        b"<{{ m.content | trim }} {{ ns.n }} {{ m | tojson }}>{%- endfor -%}",
    ]

    def read(content: bytes) -> None:
        path.write_bytes(content)
        load_prompts(cfg.train, cfg, tokenizer)

    few = NUM_MUTATIONS // 5  # each starts a process
    fuzz("jinja", valid, read, (UserError,), num_mutations=few)
    monkeypatch.setattr(rendering, "MAX_RENDER_S", 0.2)
    fuzz("hostile jinja", valid, read, (UserError,), hostile_template, num_mutations=few)
