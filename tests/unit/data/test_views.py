"""Teachers' own views of the prompts: rendered as conversations of their own, and nowhere in what the student reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from mopd.base.types import UserError
from mopd.config.data import DataConfig
from mopd.config.groups import Assignment, TeacherConfig
from mopd.config.reading.build import build_from_json
from mopd.config.views import ViewConfig
from mopd.data.prompts import PromptDataset, load_prompts
from mopd.data.tokenizer import load_tokenizer
from mopd.data.views import Views
from tests.fixtures.tiny_models import CHAT_TEMPLATE, make_tokenizer

CHAT = [
    {"role": role, "content": text}
    for role, text in (("system", "be kind"), ("user", "one"), ("assistant", "a"), ("user", "two"))
]
TEMPLATE = CHAT_TEMPLATE.replace("assistant:{% endif", "assistant:{% if thinking %}think {% endif %}{% endif")


def row(prompt: Any = None, domain: str = "math", **extra: Any) -> dict[str, Any]:
    prompt = [{"role": "user", "content": "ab"}] if prompt is None else prompt
    return {"data_source": domain, "prompt": prompt, "reward_model": {"ground_truth": "12"}, **extra}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder, chat_template=TEMPLATE)
    return load_tokenizer(folder)


def load(
    folder: Path, tokenizer: PreTrainedTokenizerBase, rows: list[dict[str, Any]], views: dict[str, Any], **keys: Any
) -> PromptDataset:
    """Load rows for teachers ``one`` and ``other`` of math and ``coder`` of code, some of which have views."""
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    cfg = build_from_json(DataConfig, {"train": [str(path)], **keys}, "recipe")
    domains = {"one": "math", "other": "math", "coder": "code"}
    assignment = Assignment({n: TeacherConfig(model="x", domains=(own,), weight=1.0) for n, own in domains.items()})
    built = {name: build_from_json(ViewConfig, view, "recipe") for name, view in views.items()}
    return load_prompts(cfg.train, cfg, tokenizer, views=Views(built, assignment))


def test_each_teacher_reads_its_own_view_and_the_student_none(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    rows = [
        row(hint={"deep": ["x", 1]}),
        row(CHAT, hint={"deep": "y"}),
        row(domain="code"),
        row("cd", hint={"deep": "z"}),
    ]
    views = {
        "one": {"prompt": "{prompt}\n{{answer}} {ground_truth}"},
        "other": {"prompt": "{hint.deep}", "chat_template_kwargs": {"thinking": True}},
    }
    seen, plain = load(tmp_path, tokenizer, rows, views), load(tmp_path, tokenizer, rows, {})
    assert {name: view.text for name, view in seen.row(0).views.items()} == {
        "one": "user:ab\n{answer} 12\nassistant:",
        "other": 'user:["x", 1]\nassistant:think ',
    }
    assert seen.row(1).views["one"].text == "system:be kind\nuser:one\nassistant:a\nuser:two\n{answer} 12\nassistant:"
    assert seen.row(1).views["other"].text == "system:be kind\nuser:one\nassistant:a\nuser:y\nassistant:think "
    assert seen.row(2).views == {}
    assert {name: view.text for name, view in seen.row(3).views.items()} == {"one": "cd\n{answer} 12", "other": "z"}
    for one in seen.rows:
        for name in ("one", "other", "coder"):
            told = one.views[name].text if name in one.views else one.text
            assert one.tokens_of(name) == tuple(tokenizer(told, add_special_tokens=False)["input_ids"])
    # what the student reads is what it reads where no teacher has a view, token by token
    assert [(one.text, one.tokens) for one in seen.rows] == [(one.text, one.tokens) for one in plain.rows]
    assert all(one.tokens_of(None) == one.tokens for one in seen.rows)


def test_system_messages_and_ready_conversations(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    told = [{"from": "human", "value": "so"}, {"from": "gpt", "value": "the end"}]
    rows = [row(told=told), row(CHAT, told="plain")]
    views = {"one": {"system": "know {ground_truth}\n{prompt}"}, "other": {"messages": "told"}}
    seen = load(tmp_path, tokenizer, rows, views, prompt_suffix="?")
    assert seen.row(0).views["one"].text == "system:know 12\nab?\nuser:ab?\nassistant:"  # the same messages
    assert seen.row(0).views["other"].text == "user:so\nassistant:"
    seen = load(tmp_path, tokenizer, rows, views, system_prompt="be short")
    assert seen.row(0).text == "system:be short\nuser:ab\nassistant:"
    assert seen.row(0).views["one"].text == "system:know 12\nab\nuser:ab\nassistant:"
    assert seen.row(0).views["other"].text == "user:so\nassistant:"  # the answer at its end is left out
    assert seen.row(1).views["one"].text.startswith("system:know 12\ntwo\nuser:one\nassistant:a\nuser:two\n")
    assert seen.row(1).views["other"].text == "plain"


LONG = {"prompt": "{prompt} and so on and so on"}


@pytest.mark.parametrize(
    ("view", "rows", "line"),
    [
        ({"prompt": "{hint}"}, [row()], "row 0: teachers.one.view: the row has no column 'hint' (it has"),
        ({"messages": "told"}, [row(told="a"), row(told=None)], "row 1: teachers.one.view: the row has no column"),
        ({"system": "a"}, [row("ab")], "teachers.one.view.system: the prompt is plain text"),
        ({"messages": "told"}, [row(told=[{"role": "user"}])], "teachers.one.view has a message whose 'content'"),
        ({"prompt": "a"}, [row([{"role": "system", "content": "b"}])], "one.view: the prompt has no user message"),
        (LONG, [row()], "teachers.one.view has 38 tokens, data.max_prompt_length is 30, and a view is never cut:"),
        ({**LONG, "max_prompt_length": 37}, [row()], "38 tokens, teachers.one.view.max_prompt_length is 37"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, view: dict[str, Any], rows: list[Any], line: str
) -> None:
    for policy in ("error", "truncate"):
        with pytest.raises(UserError) as caught:
            load(tmp_path, tokenizer, rows, {"one": view}, max_prompt_length=30, overlong_prompts=policy)
        assert line in str(caught.value) and "\n" not in str(caught.value)


def test_the_reference_answer_may_be_what_is_missing(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(UserError, match=r"no reference answer \(data.columns.ground_truth\)"):
        load(tmp_path, tokenizer, [row() | {"reward_model": {}}], {"one": {"prompt": "{ground_truth}"}})


def test_rows_with_long_views_are_dropped_and_counted(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [row(hint="a"), row(hint="a" * 50), row(domain="code")]
    view = {"prompt": "{hint}", "max_prompt_length": 40}
    seen = load(tmp_path, tokenizer, rows, {"one": view}, overlong_prompts="filter", max_prompt_length=30)
    assert [one.domain for one in seen.rows] == ["math", "code"] and seen.num_filtered == {"math": 1}
    short = load(tmp_path, tokenizer, rows, {"one": view | {"max_prompt_length": 90}}, max_prompt_length=30)
    assert len(short) == 3 and len(short.row(1).views["one"].tokens) > 30


@pytest.mark.parametrize(
    ("view", "line"),
    [
        ({}, "the view is empty"),
        ({"max_prompt_length": 9}, "the view is empty"),
        ({"prompt": ""}, "prompt: is empty"),
        ({"prompt": "{prompt"}, "prompt has a brace without its other one"),
        ({"system": "\\boxed{}"}, "system has {}, which is no column's name: write {{ and }} for braces"),
        ({"prompt": "{a[0]}"}, "prompt has {a[0]}, which is no column's name"),
        ({"prompt": "{a!r}"}, "which is no column's name"),
        ({"prompt": "a\tb"}, "holds a control character"),
        ({"messages": "a", "system": "b"}, "messages is set beside system or prompt"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize is set by mopd itself"),
    ],
)
def test_views_that_mean_nothing_are_refused(view: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as caught:
        build_from_json(ViewConfig, view, "recipe")
    assert line in str(caught.value) and "\n" not in str(caught.value)
