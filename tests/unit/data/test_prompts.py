"""Prompt files: what practitioners have becomes tokens, and what cannot be used is named in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerBase

from mopd.base.types import UserError
from mopd.config.data import DataConfig, DataFileConfig
from mopd.config.reading.build import build_from_json
from mopd.data.prompts import PromptDataset, check_domains_have_teachers, check_texts_have_domains, load_prompts
from mopd.data.tokenizer import load_tokenizer
from tests.fixtures.tiny_models import make_tokenizer

Row = dict[str, Any]
Load = Callable[..., PromptDataset]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return load_tokenizer(folder)


@pytest.fixture
def load(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> Load:
    """Write rows to ``data.jsonl`` or ``data.parquet`` and load them."""

    def run(rows: list[Row], kind: str = "jsonl", **keys: Any) -> PromptDataset:
        path = tmp_path / f"data.{kind}"
        if kind == "parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        cfg = build_from_json(DataConfig, {"train": [str(path)], **keys}, "recipe")
        return load_prompts(cfg.train, cfg, tokenizer)

    return run


def chat(text: str, **extra: Any) -> list[Row]:
    return [{"role": "user", "content": text, **extra}]


def row(prompt: Any = "ab", domain: Any = "math", answer: Any = "12", **extra: Any) -> Row:
    return {"data_source": domain, "prompt": prompt, "reward_model": {"ground_truth": answer}, **extra}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_chat_rows_in_both_formats(load: Load, tokenizer: PreTrainedTokenizerBase, kind: str) -> None:
    rows = [row(chat("ab"), extra_info={"index": 4, "split": "train"}), row(chat("cd?"), "code", "x")]
    dataset = load(rows, kind)
    assert [r.domain for r in dataset.rows] == ["math", "code"]
    assert dataset.row(0).text == "user:ab\nassistant:"
    assert (
        list(dataset.row(0).tokens)
        == tokenizer.apply_chat_template(chat("ab"), add_generation_prompt=True)["input_ids"]
    )
    assert [r.ground_truth for r in dataset.rows] == ["12", "x"]
    assert dataset.row(0).extra_info == {"index": 4, "split": "train"}
    assert dataset.row(1).extra_info is None
    assert dataset.domain_counts == {"code": 1, "math": 1}
    assert dataset.rows_by_domain == {"code": [1], "math": [0]}


def test_a_data_sets_question_is_a_users_message_where_there_is_a_template(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"question": "ab", "answer": "#### 12"}))
    cfg = DataConfig(train=(DataFileConfig(path=str(path), columns="gsm8k", domain="math"),))
    own = {"prompt": "question", "ground_truth": "answer"}
    plain = build_from_json(DataConfig, {"train": [{"path": str(path), "columns": own, "domain": "math"}]}, "recipe")
    without = make_tokenizer(tmp_path / "plain", chat_template=None)
    assert load_prompts(cfg.train, cfg, tokenizer).row(0).text == "user:ab\nassistant:"
    assert load_prompts(cfg.train, cfg, without).row(0).text == "ab"
    path.write_text(json.dumps(row(chat("ab"))))
    chats = DataConfig(train=(str(path),))
    with pytest.raises(UserError, match=r"no chat template: set data.chat_template"):
        load_prompts(chats.train, chats, without)
    path.write_text(json.dumps({"question": "ab", "answer": "#### 12"}))
    assert load_prompts(plain.train, plain, tokenizer).row(0).text == "ab"


def test_text_prompts_take_the_tokenizers_own_special_tokens(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, adds_bos=True)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in (row("ab c"), row(chat("d")))))
    cfg = DataConfig(train=(str(path),))
    dataset = load_prompts(cfg.train, cfg, load_tokenizer(tmp_path))
    assert tokenizer.decode(dataset.row(0).tokens) == "<bos>ab c"
    assert tokenizer.decode(dataset.row(1).tokens) == "user:d\nassistant:"


def test_column_names_are_keys_of_the_recipe(load: Load) -> None:
    rows = [{"meta": {"kind": "math"}, "q": {"text": "ab"}, "answer": 7}]
    for kind in ("jsonl", "parquet"):
        columns = {"domain": "meta.kind", "prompt": "q.text", "ground_truth": "answer"}
        dataset = load(rows, kind, columns=columns)
        found = dataset.row(0)
        assert (found.domain, found.text, found.ground_truth, found.extra_info) == ("math", "ab", 7, None)


def test_recipes_template_and_its_arguments(load: Load, tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{{ mood }}:{{ messages[0]['content'] }}{% if add_generation_prompt %}>{% endif %}")
    dataset = load([row(chat("ab"))], chat_template=str(template), chat_template_kwargs={"mood": "calm"})
    assert dataset.row(0).text == "calm:ab>"
    with pytest.raises(UserError, match=r"nowhere.jinja: does not exist: correct data.chat_template"):
        load([row()], chat_template="nowhere.jinja")


def test_recipes_system_message_stands_before_conversations_that_have_none(load: Load, tmp_path: Path) -> None:
    """Not before one of their own; an entry's own goes before the section's; plain text has no place for it."""
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m['role'] }}:{{ m['content'] }};{% endfor %}")
    own = [{"role": "system", "content": "own"}, *chat("cd")]
    dataset = load([row(chat("ab")), row(own)], chat_template=str(template), system_prompt="Box it.")
    assert [dataset.row(i).text for i in (0, 1)] == ["system:Box it.;user:ab;", "system:own;user:cd;"]
    cfg = DataConfig(train=("a.jsonl", DataFileConfig(path="b.jsonl", system_prompt="Code.")), system_prompt="Box it.")
    assert [file.system_prompt for file in cfg.files(cfg.train)] == ["Box it.", "Code."]
    with pytest.raises(UserError, match=r"is plain text, which has no place for data\.system_prompt"):
        load([row("ab")], system_prompt="Box it.")


def test_texts_of_the_recipe_by_domain(load: Load, tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m['role'] }}:{{ m['content'] }};{% endfor %}")
    asked = [*chat("ab"), {"role": "assistant", "content": "x"}, {"role": "user", "content": "cd"}]
    rows = [row(asked), row(chat("ab"), domain="code"), row(chat("ab"), domain="law")]
    texts = {"prompt_suffix": {"math": "\nBox it.", "default": "!"}, "system_prompt": {"code": "Code."}}
    dataset = load(rows, chat_template=str(template), **texts)
    assert [dataset.row(i).text for i in range(3)] == [
        "user:ab;assistant:x;user:cd\nBox it.;",
        "system:Code.;user:ab!;",
        "user:ab!;",
    ]
    assert load([row("ab")], prompt_suffix="=?").row(0).text == "ab=?"
    with pytest.raises(UserError, match=r"row 0: the prompt has no user message with text, behind which data\."):
        load([row([{"role": "system", "content": "a"}])], prompt_suffix="=?")


def test_a_text_for_a_domain_that_does_not_exist_is_refused() -> None:
    entry = DataFileConfig(path="b.jsonl", prompt_suffix={"mtah": "?"})
    for cfg, name in (
        (DataConfig(train=("a.jsonl",), system_prompt={"default": "a", "mtah": "b"}), "system_prompt"),
        (DataConfig(train=("a.jsonl", entry), system_prompt={"math": "b"}), "prompt_suffix"),
    ):
        with pytest.raises(UserError, match=rf"data\.{name} names domain 'mtah', and the data has 'code', 'math'"):
            check_texts_have_domains(cfg, {"math": 1, "code": 2})
        check_texts_have_domains(cfg, ["math", "mtah"])


def test_parquet_nulls_in_messages_are_absent_keys(load: Load, tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text(
        "{% for m in messages %}{% if m.name is defined %}{{ m.name }}{% endif %}{{ m.content }}{% endfor %}"
    )
    rows = [row(chat("ab", name=None)), row(chat("cd", name="eve"))]
    dataset = load(rows, "parquet", chat_template=str(template))
    assert [r.text for r in dataset.rows] == ["ab", "evecd"]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_unusable_rows_are_named(load: Load, kind: str) -> None:
    cases: list[tuple[Row, str]] = [
        (row(domain=3), r"row 0: column 'data_source' \(data.columns.domain\) is int 3"),
        (row(domain=""), r"row 0: column 'data_source' \(data.columns.domain\) is str ''"),
        (row(domain=None), r"row 0 has no column 'data_source' .* set data.columns to what fits"),
        ({"data_source": "math", "question": "a"}, r"row 0 has no column 'prompt' .* set data.columns to what fits"),
        (row(7), r"row 0: column 'prompt' \(data.columns.prompt\) is int 7, not text"),
        (row([{"role": "user", "content": 5}]), r"\(data.columns.prompt\) has a message whose 'content' is int 5"),
        (row(""), r"row 0: the prompt in 'prompt' \(data.columns.prompt\) has no tokens"),
    ]
    for bad, message in cases:
        with pytest.raises(UserError, match=message) as caught:
            load([bad], kind)
        assert f"data.{kind}" in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(UserError, match="row 2"):
        load([row(), row(), row("")], kind)


def test_unusable_files_are_named(tmp_path: Path, tokenizer: PreTrainedTokenizerBase, load: Load) -> None:
    """What their bytes may be: ``test_damaged_files.py``."""
    (tmp_path / "text.csv").write_text("a,b\n")
    (tmp_path / "empty.jsonl").write_text("\n")
    for name, message in {"text.csv": "unknown kind '.csv'", "empty.jsonl": "has no rows"}.items():
        cfg = DataConfig(train=(str(tmp_path / name),))
        with pytest.raises(UserError, match=message) as caught:
            load_prompts(cfg.train, cfg, tokenizer)
        assert name in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"none of the columns.*it has"):
        load([{"x": 1}], "parquet")


def test_overlong_prompts(load: Load) -> None:
    rows = [row("abcdef"), row("ab"), row("abcde", "code"), row("cd", "code")]
    with pytest.raises(
        UserError, match=r"row 0: the prompt has 6 tokens, data.max_prompt_length is 4.*overlong_prompts"
    ):
        load(rows, max_prompt_length=4)
    kept = load(rows, max_prompt_length=4, overlong_prompts="filter")
    assert [r.text for r in kept.rows] == ["ab", "cd"]
    assert kept.num_filtered == {"math": 1, "code": 1} and kept.num_truncated == {}
    cut = load(rows, max_prompt_length=4, overlong_prompts="truncate")
    whole = load(rows)
    assert [r.tokens for r in cut.rows] == [r.tokens[-4:] for r in whole.rows]
    assert cut.row(0).text == "abcdef"
    assert cut.num_truncated == {"math": 1, "code": 1} and cut.num_filtered == {}
    assert len(load(rows, max_prompt_length=6)) == 4
    with pytest.raises(UserError, match=r"every prompt of domain 'math' \(2 rows\).*data.max_prompt_length 3"):
        load([row("abcdef"), row("abcd"), row("a", "code")], max_prompt_length=3, overlong_prompts="filter")


def test_every_domain_needs_a_teacher() -> None:
    counts = {"math": 10, "law": 3, "code": 5, "art": 1}
    with pytest.raises(UserError, match=r"'art' \(1 rows\), 'law' \(3 rows\); teachers answer for 'code', 'math'"):
        check_domains_have_teachers(counts, {"math": ("m",), "code": ("c",)})
    assert check_domains_have_teachers(counts, {"math": ("m",), "code": ("c",)}, default_teacher="m") == []
    warnings = check_domains_have_teachers({"math": 10}, {"math": ("m",), "code": ("c", "d")})
    assert len(warnings) == 2 and "teachers.c.domains names 'code'" in warnings[0]
    assert check_domains_have_teachers({"math": 10}, {"math": ("m",)}) == []
