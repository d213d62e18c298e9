"""Chat templates in their process: what they make, what they may not, and what is left of them."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template

from mopd.base.types import UserError
from mopd.config.data import DataConfig
from mopd.data.prompts import encode_prompts, load_prompts
from mopd.data.templates import rendering
from mopd.data.templates.child import make_environment
from mopd.data.templates.rendering import Renderer
from mopd.data.tokenizer import load_tokenizer
from tests.fixtures.hostile_templates import ENDLESS, FORBIDDEN, GREEDY
from tests.fixtures.tiny_models import make_tokenizer

Messages = list[dict[str, Any]]
CHAT: Messages = [{"role": "user", "content": "ab"}]
TALK: Messages = [
    {"role": "system", "content": " Be <kind> & 'short'.\n"},
    {"role": "user", "content": "2 + 2 = ?\n\né 数 👩‍🔬"},
    {
        "role": "assistant", "content": "<think>\nhm\n</think>\n\n4",
        "tool_calls": [{"name": "f", "arguments": {"x": 1.5}}],
    },
    {
        "role": "user", "content": [{"type": "image"}, {"type": "text", "text": "and this?"}],
        "weight": 0.1, "last": True,
    },
]  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made") / "model"
    make_tokenizer(path)
    return path


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A tokenizer's folder that the test may change."""
    return Path(shutil.copytree(made, tmp_path / "model"))


def render(template: str, tokenizer: PreTrainedTokenizerBase, conversations: list[Messages], **more: Any) -> list[str]:
    path = Path("chat.jinja")
    path.write_text(template, encoding="utf-8")
    with Renderer(DataConfig(train=("-",), chat_template=str(path), chat_template_kwargs=more), tokenizer) as renderer:
        for number, messages in enumerate(conversations):
            renderer.put(messages, f"row {number}")
        return renderer.texts()


TEMPLATES = {
    "ChatML": "{% for m in messages %}\n    {{ '<|im_start|>' + m.role + '\\n' + m.content | string | trim }}\n"
    "{% endfor %}\n"
    "{%- if add_generation_prompt %}\n<|im_start|>assistant\n{% endif %}",
    "special tokens": "{{ bos_token }}{% for m in messages %}{{ m['role'] }}{{ eos_token }}{% endfor %}"
    "{{ unk_token }}{{ pad }}",
    "tojson": "{% for m in messages %}{{ m | tojson }}{{ m | tojson(indent=2) }}{{ m | tojson(sort_keys=true) }}"
    "{{ m | tojson(ensure_ascii=true, separators=(',', ':')) }}{% endfor %}{{ tools | tojson }}{{ documents }}",
    "loops that end early": "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}"
    "{% if loop.index == 3 %}{% break %}{% endif %}{% endfor %}",
    "what the model said": "{% set x = 1 %}{% for m in messages %}{% generation %}{% set x = 2 %}{{ m.content }}{{ x }}"
    "{% endgeneration %}\n{{ x }}{% endfor %}",
    "the day": "{{ strftime_now('the day: %%') }}",
    "an argument": "{{ enable_thinking is defined and enable_thinking }}{{ levels.x[1] if levels }}{{ bos_token }}",
    "parts": "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{{ '<image>' if p.type == 'image' else p.text }}{% endfor %}{% endif %}{% endfor %}",
    "namespaces and macros": "{% set ns = namespace(n=0, s=false) %}{% macro say(t, k=3) -%}\n[{{ t }}{{ k }}]\n"
    "{%- endmacro %}{% for m in messages[::-1] %}{% set ns.n = ns.n + 1 %}{{ say(m.role, ns.n) }}"
    "{% if not ns.s and m.role == 'system' %}{% set ns.s = true %}{% endif %}{% endfor %}{{ ns.n }}{{ ns.s }}"
    "{% if tools is none %}none{% endif %}",
    "split text": "{% set t = messages[2].content %}{{ t.split('</think>')[-1].lstrip('\\n') }}"
    "{{ t.startswith('<think>') }}",
    "tests and filters": "{{ messages | map(attribute='role') | join('|') }}"
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ missing is undefined }}"
    "{{ messages[0].nothing }}{{ messages | length }}{{ 'a<b' | e }}"
    "{{ messages[3].weight }}{{ messages[3].last }}{{ messages[2].tool_calls[0].arguments | items | list }}",
    "white space": "  {%- if true -%}  a \n {% endif %}\n  {% if true %}\n b\n   {% endif %}\n{# c #}\n d\n",
}


@pytest.mark.parametrize("case", TEMPLATES)
def test_renders_as_transformers_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path, case: str) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = load_tokenizer(folder)
    more = {"enable_thinking": False, "levels": {"x": [0, 1e30]}, "bos_token": "<own>", "tools": [{"name": "é"}]}
    for arguments in ({}, more):
        expected = tokenizer.apply_chat_template(
            TALK, chat_template=TEMPLATES[case], add_generation_prompt=True, tokenize=False, **arguments
        )
        assert render(TEMPLATES[case], tokenizer, [TALK, TALK], **arguments) == [expected] * 2


def test_knows_what_transformers_knows() -> None:
    """No filter, test, function, tag or setting is missing or more: a new transformers would show here."""
    mine, theirs = make_environment(), _compile_jinja_template("").environment
    for name in ("filters", "tests", "globals"):
        assert set(getattr(mine, name)) == set(getattr(theirs, name))
    assert {tag for one in mine.extensions.values() for tag in one.tags} == {
        tag for one in theirs.extensions.values() for tag in one.tags
    }
    names = ("trim_blocks", "lstrip_blocks", "keep_trailing_newline", "autoescape", "undefined", "loader", "policies")
    for name in names:
        assert getattr(mine, name) == getattr(theirs, name), name
    assert type(mine).__mro__ == type(theirs).__mro__


HOSTILE = {**ENDLESS, **GREEDY, **FORBIDDEN}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_templates_are_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path, case: str) -> None:
    limit_s = 0.05 if case in ENDLESS else 0.2
    monkeypatch.setattr(rendering, "MAX_RENDER_S", limit_s)
    (folder / "chat_template.jinja").write_text(HOSTILE[case], encoding="utf-8")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"data_source": "m", "prompt": CHAT, "reward_model": {"ground_truth": "1"}}))
    cfg = DataConfig(train=(str(rows),))
    others = {*psutil.Process().children()}  # of earlier tests: what forks their children, Ray's
    with pytest.raises(UserError) as caught:
        load_prompts(cfg.train, cfg, load_tokenizer(folder))
    shown = str(caught.value)
    assert "rows.jsonl: row 0: the chat template failed: " in shown and str(folder) in shown
    assert "\n" not in shown and len(shown) < 600
    limits = (f"it ran for {limit_s:g} s", "more than 512 MiB", "characters, the limit is")
    exceeded = any(words in shown for words in limits)
    assert exceeded or case not in {**ENDLESS, **GREEDY}, shown
    assert {*psutil.Process().children()} <= others


def in_config(folder: Path, template: str) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))


def in_list(folder: Path, template: str) -> None:
    in_config(folder, [{"name": "tool_use", "template": "a"}, {"name": "default", "template": template}])  # type: ignore


def beside(folder: Path, template: str) -> None:
    (folder / "chat_template.jinja").write_text(template)


def beside_others(folder: Path, template: str) -> None:
    beside(folder, template)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("a")


@pytest.mark.parametrize("put", [in_config, in_list, beside, beside_others])
def test_every_place_of_a_tokenizers_template(folder: Path, put: Callable[[Path, str], None]) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    put(folder, "{{ 'a' * 10 ** 10 }}")
    with pytest.raises(UserError, match="prompt 1: the chat template failed: it took more than 512 MiB") as caught:
        encode_prompts([CHAT], DataConfig(train=("-",)), load_tokenizer(folder), ["prompt 1"])
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("name", ["chat_template.jinja", "additional_chat_templates/a.jinja"])
def test_a_template_without_end_is_not_read(folder: Path, name: str) -> None:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")
    with pytest.raises(UserError, match="not a regular file"):
        load_tokenizer(folder)


def test_a_tokenizer_with_templates_but_no_default(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    in_config(folder, [{"name": "a", "template": "x"}])  # type: ignore[arg-type]
    with pytest.raises(UserError, match="template failed: This model has multiple chat templates with no default"):
        encode_prompts([CHAT], DataConfig(train=("-",)), load_tokenizer(folder), ["prompt 1"])


NUMBERED = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize("characters", [1, 3000])
def test_rows_keep_their_order_over_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path, characters: int
):
    """By number, and by size: 3,000 rows of 3,000 characters are nine megabytes."""
    monkeypatch.chdir(tmp_path)
    texts = [f"{i} " + "é" * characters for i in range(3000)]
    assert render(NUMBERED, load_tokenizer(folder), [[{"role": "user", "content": text}] for text in texts]) == texts


@pytest.mark.parametrize(
    ("act", "problem"),
    [
        ("{{ raise_exception('no') }}", "no"),
        ("{{ 'a' * 10 ** 10 }}", "it took more than 512 MiB of memory"),
        (f"{ENDLESS['nested loops']}", "it ran for 0.2 s on one row"),
        ("{{ 'a' * 4194304 }}", "its text has 4194306 characters, the limit is 4194304"),
    ],
)
def test_the_row_at_fault_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path, act: str, problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rendering, "MAX_RENDER_S", 0.2)
    rows = [[{"role": "user", "content": str(i)}] for i in range(1000)]
    template = f"{{% if messages[0].content == '777' %}}{act}{{% endif %}}ok"
    with pytest.raises(UserError) as caught:
        render(template, load_tokenizer(folder), rows)
    assert str(caught.value).startswith(f"row 777: the chat template failed: {problem}")
    assert str(caught.value).endswith("correct the row or the template, data.chat_template 'chat.jinja'")


def test_many_rows_have_less_time_each_than_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """A tenth of the row's limit for each of a million rows would be a week: the mean ends it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rendering, "MAX_RENDER_S", 0.5)
    monkeypatch.setattr(rendering, "MEAN_RENDER_S", 0.0)
    slow = "{% for a in range(20) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
    with pytest.raises(UserError, match=r"row [1-9]\d*: .* failed: it ran for 0.5 s on one row, or 0 s a row"):
        render(slow, load_tokenizer(folder), [CHAT] * 5000)


def test_many_rows_have_less_text_each_than_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """A thousand rows of two characters would otherwise become four gigabytes of prompts."""
    monkeypatch.chdir(tmp_path)
    tokenizer = load_tokenizer(folder)
    with pytest.raises(UserError, match="its texts have more than 65536 characters a row beyond the rows' own"):
        render("{{ 'a' * 4000000 }}", tokenizer, [CHAT] * 1000)
    long = [[{"role": "user", "content": "a" * 100_000}]] * 100
    assert sum(map(len, render(f"{NUMBERED}{NUMBERED}", tokenizer, long))) == 20_000_000


def test_an_answer_that_takes_the_last_of_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    """Each half of these characters takes six bytes on its way, 46 MB in all: at some of these limits there is room for
    the texts, or for their JSON, and not for what comes behind."""
    monkeypatch.chdir(tmp_path)
    tokenizer = load_tokenizer(folder)
    ends = set()
    for limit_mib in range(96, 320, 32):
        monkeypatch.setattr(rendering, "MAX_MEMORY_BYTES", limit_mib * 2**20)
        try:
            assert render("{{ '\U0001f600' * 60000 }}", tokenizer, [CHAT] * 64) == ["\U0001f600" * 60000] * 64
            ends.add("texts")
        except UserError as error:
            assert f": the chat template failed: it took more than {limit_mib} MiB of memory: " in str(error), error
            ends.add("line")
    assert ends == {"texts", "line"}


def test_values_without_a_form_in_json(tmp_path: Path, folder: Path) -> None:
    """A date in a parquet file's messages reads as it did in the run's own process."""
    chat = [{"role": "user", "content": "ab", "at": datetime.datetime(2024, 1, 2), "raw": b"c"}]
    pq.write_table(pa.Table.from_pylist([{"data_source": "m", "prompt": chat}]), tmp_path / "a.parquet")
    (folder / "chat_template.jinja").write_text("{{ messages[0].at }} {{ messages[0].raw }}")
    cfg = DataConfig(train=(str(tmp_path / "a.parquet"),))
    assert load_prompts(cfg.train, cfg, load_tokenizer(folder)).rows[0].text == "2024-01-02 00:00:00 b'c'"


def test_the_process_has_limits_and_nothing_of_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setenv("SECRET", "x")
    others = {*psutil.Process().children()}
    with Renderer(DataConfig(train=("-",)), load_tokenizer(folder)) as renderer:
        renderer.put(CHAT, "row 0")
        renderer.texts()
        (child,) = {*psutil.Process().children()} - others
        assert set(child.environ()) <= {"PATH", "LANG", "LC_CTYPE"} and child.cwd() == "/"
        limits = (Path("/proc") / str(child.pid) / "limits").read_text()
        assert {line.split("  ")[0]: line.split()[-2] for line in limits.splitlines()}["Max address space"] == str(
            2**29
        )
        assert not any("torch" in one.path or "/mopd" in one.path for one in child.memory_maps())
    assert not child.is_running()


@pytest.mark.parametrize("characters", [1, 2**21])
def test_a_process_that_somebody_stopped_is_named(folder: Path, characters: int) -> None:
    """It answers no more; beyond what fits into the socket it does not even take its rows."""
    others = {*psutil.Process().children()}
    with Renderer(DataConfig(train=("-",)), load_tokenizer(folder)) as renderer:
        renderer.put(CHAT, "row 0")
        renderer.texts()
        (child,) = {*psutil.Process().children()} - others
        child.suspend()
        assert renderer._process is not None
        renderer._process._socket.settimeout(0.2)
        with pytest.raises(UserError, match=r"^row 1: the chat template failed: no answer within .* stopped its proc"):
            renderer.put([{"role": "user", "content": "a" * characters}], "row 1")
            renderer.texts()
    assert not child.is_running()


def test_the_process_dies_with_the_run(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(rendering, "MAX_RENDER_S", 600.0)
    (folder / "chat_template.jinja").write_text(ENDLESS["nested loops"])
    tokenizer = load_tokenizer(folder)
    told, tell = os.pipe()
    run = os.fork()
    if run == 0:
        with Renderer(DataConfig(train=("-",)), tokenizer) as renderer:
            renderer.put(CHAT, "row 0")
            renderer._send()
            os.write(tell, b"x")
            renderer.texts()
    assert os.read(told, 1) == b"x"
    (child,) = psutil.Process(run).children()
    while child.cpu_times().user < 0.5:  # until it renders
        time.sleep(0.05)
    os.kill(run, signal.SIGKILL)
    os.waitpid(run, 0)
    try:
        child.wait(60)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
