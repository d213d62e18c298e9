"""Recipes that nobody means well: each is refused in one line that names file and cure, with little work."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mopd.base.files.yaml_text import MAX_YAML_BYTES
from mopd.base.types import UserError
from mopd.config.load import dump, load_recipe
from mopd.config.reading.tree import dotted, split_dotted
from tests.fixtures.effort import MAX_UNITS, measured_effort, processor_units
from tests.fixtures.recipe import RECIPE
from tests.unit.config.conftest import Write

MAX_CALLS = 6_000_000
MAX_BYTES = 2**26
TEN = ", ".join(["*{0}"] * 10)
BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{TEN.format(f'a{i - 1}')}]\n" for i in range(1, 30))
CHAIN = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 3000))
TEACHERS = "".join(f"  t{i}: {{model: m, domains: [d{i}]}}\n" for i in range(101))
MATH = "  math: {model: models/math, domains: [math]}\n"
FREE = "student.megatron_overrides"


def refusal(path: str | Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught, measured_effort(memory=True) as effort:
        load_recipe(path, overrides)
    assert effort.calls < MAX_CALLS and effort.grown_bytes < MAX_BYTES
    if effort.seconds > 1:  # perhaps inside a single call
        assert processor_units(lambda: load_recipe(path, overrides)) < MAX_UNITS
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 2000
    return str(caught.value)


FILES: dict[str, tuple[str | bytes, str]] = {
    "alias bomb": (BOMB, "recipe.yaml:5: a4: more than 20000 keys and values"),
    "alias chain": (CHAIN, "recipe.yaml:64: a63: more than 20000 keys and values, 1048576 characters or 64 levels"),
    "repeated text": (f"a: &a {'x' * 99_999}\nb: [{TEN.format('a')}, *a]\n", "recipe.yaml:2: b: more than"),
    "many values": (f"a: [{'1,' * 25_000}]", "recipe.yaml:1: more than 20000 keys and values"),
    "deep flow": ("a: " + "[" * 100_000, "recipe.yaml:1: nested deeper than 64"),
    "deep flow, closed": ("a: " + "[" * 9999 + "]" * 9999, "recipe.yaml:1: nested deeper than 64"),
    "deep block": ("".join(f"{' ' * i}a:\n" for i in range(500)), "recipe.yaml:64: nested deeper than 64"),
    "deep list": ("- " * 50_000, "recipe.yaml:1: nested deeper than 64"),
    "deep keys": ("? " * 50_000, "recipe.yaml:1: nested deeper than 64"),
    "long": ("#" * (MAX_YAML_BYTES + 1), "recipe recipe.yaml: longer than 1048576 bytes"),
    "many teachers": (RECIPE.replace(MATH, TEACHERS), "recipe.yaml:5: teachers names 101: name at most 100"),
    "long key": ("k" * 101 + ": 1", "recipe.yaml:1: key 'kkkk"),
    "empty key": ("a: {'': 1}", "recipe.yaml:1: a: key '': write 1 to 100 characters"),
    "key of a list": ("? [a]\n: 1", "recipe.yaml:1: a key is a list or a mapping: write text"),
    "date as key": ("2024-01-01: 1", "recipe.yaml:1: key the date 2024-01-01 (in quotes it is text) is not text"),
    "merge key": ("a: &a {b: 1}\nc:\n  <<: *a\n", "recipe.yaml:3: c: merge keys (<<) are not read: write the keys out"),
    "two documents": (f"{RECIPE}---\n{RECIPE}", "recipe.yaml:11: not readable as YAML: but found another document"),
    "text after the end": (f"{RECIPE}...\nx", "recipe.yaml:12: not readable as YAML"),
    "YAML 2": (f"%YAML 2.0\n---\n{RECIPE}", "recipe.yaml:1: not readable as YAML: found incompatible YAML document"),
    "YAML 1.9...": (f"%YAML 1.{'9' * 9999}\n---\na: 1", "recipe.yaml:1: not readable as YAML: an escape or version"),
    "tabs": ("a:\n\tb: 1", "recipe.yaml:2: not readable as YAML: found character '\\t'"),
    "NUL": ("a: b\nc: \0", "recipe.yaml:2: not readable as YAML: character U+0000"),
    "ESC": ("a: \x1b[2J", "recipe.yaml:1: not readable as YAML: character U+001B"),
    "folded line ends": ("a: b\nc: d\x85e", "recipe.yaml:2: not readable as YAML: character U+0085"),
    "not UTF-8": (b"a: b\nc: \xff", "recipe recipe.yaml:2: not UTF-8 text"),
    "UTF-16": (RECIPE.encode("utf-16"), "recipe recipe.yaml:1: not UTF-8 text"),
    "UTF-16 without mark": (RECIPE.encode("utf-16-le"), "recipe.yaml:1: not readable as YAML: character U+0000"),
    "set": ("a: !!set {b}", "recipe.yaml:1: not readable as YAML: a: tag 'tag:yaml.org,2002:set' has no place here"),
    "object": ("a: !!python/object:os.X {}", "recipe.yaml:1: not readable as YAML: a: tag 'tag:yaml.org,2002:python"),
    "long table of unknown defaults": (
        RECIPE.replace(MATH, "".join(f"  t{i}: {{}}\n" for i in range(1500)))
        + f"teacher_defaults: {{{', '.join(f'k{i}: 1' for i in range(6000))}}}",
        "recipe.yaml:1510: unknown key 'teacher_defaults.k0'",
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_files(write: Write, case: str) -> None:
    content, line = FILES[case]
    Path("recipe.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert refusal("recipe.yaml").startswith(line)


VALUES = {
    "!!bool maybe": "a: 'maybe' is no value of tag 'tag:yaml.org,2002:bool': remove the tag",
    "!!int ''": "a: '' is no value of tag 'tag:yaml.org,2002:int'",
    "!!int x": "a: 'x' is no value of tag",
    "!!float ''": "a: '' is no value of tag",
    "!!null x": "a: 'x' is no value of tag",
    "!!timestamp x": "a: 'x' is no value of tag",
    "!!binary aGk=": "a: 'aGk=' is no value of tag",
    "!!python/name:os.system ''": "a: '' is no value of tag",
    "!own 1": "a: '1' is no value of tag '!own'",
    "!!str [b]": "a: tag 'tag:yaml.org,2002:str' has no place here",
    "!!omap [b: 1]": "a: tag 'tag:yaml.org,2002:omap' has no place here",
    "!!python/tuple [1]": "a: tag 'tag:yaml.org,2002:python/tuple' has no place here",
    "0x" + "f" * 6000: f"{FREE}.a: the whole number 0xffffffffffffffffff… is beyond 64 bits",
    "!!int 0x" + "f" * 6000: "is beyond 64 bits",
    "0b" + "1" * 6000: "is beyond 64 bits",
    "9" * 6000: "is beyond 64 bits",
    "-9223372036854775809": "the whole number -9223372036854775809 is beyond 64 bits",
    "1:30": f"{FREE}.a: 1:30 is a number of base 60 in YAML: write it in decimal, or in quotes for text",
    "1:" * 3000 + "1": "is a number of base 60",
    "1:30.5": "is a number of base 60",
    "010": "010 is an octal number in YAML: remove the leading zero, or put text in quotes",
    "1e999": f"{FREE}.a: expected a plain value, got '1e999'",
    "'-1e999'": "expected a plain value, got '-1e999'",
    "1.0e+999": "expected a plain value, got inf",
    "-.INF": "expected a plain value, got -inf",
    "[.nan]": "expected a plain value, got [nan]",
    "2024-01-01": "expected a plain value, got the date 2024-01-01 (in quotes it is text)",
    "2024-13-45": "expected a plain value, got the date 2024-13-45",
    "{b: [2024-01-01T00:00:00Z]}": f"{FREE}.a.b: expected a plain value, got [the date",
    "=": "'=' has a meaning of its own in YAML: put it in quotes",
    "<<": "'<<' has a meaning of its own in YAML",
    '"\\ud800"': "text '\\ud800' holds half a character",
    '"\\U00110000"': "an escape or version number is out of range",
    '"\\xZZ"': "expected escape sequence of 2 hexadecimal numbers",
    "*b": "found undefined alias 'b'",
    "'" + "1" * 200_000 + "e'": None,
}


@pytest.mark.parametrize("value", VALUES, ids=lambda value: value[:30])
def test_values(write: Write, value: str) -> None:
    """In a file and in an override; digits without end are only text."""
    line = VALUES[value]
    optimizer = "  optimizer: {lr: 1e-6}\n"
    name = write(RECIPE.replace(optimizer, f"{optimizer}  megatron_overrides:\n    a: {value}\n"))
    if line is None:
        load_recipe(name)
        return
    assert refusal(name).startswith("recipe.yaml:6: ") and line in refusal(name)
    shown = refusal(write(), f"{FREE}={{a: {value}}}")
    assert shown.startswith(("recipe.yaml (override): ", "override "))


OVERRIDES = {
    f"{FREE}={'[' * 5000}": "nested deeper than 64",
    f"{FREE}.{'.'.join('a' * 5000)}=1": "nested deeper than 64",
    f"{FREE}.a={'[' * 62}{']' * 62}": "nested deeper than 64",
    f"{FREE}.{'x' * 101}=1": "is not a key",
    f"{FREE}.\udcff=1": "is not a key",
    "seed=\udcff": "character U+DCFF",
    "a\nb: 1": "override a\\nb: 1: expected key=value",
    'a"b=1': "expected key=value",
    'a."".b=1': "is not a key",
    "seed=" + "9" * 30: "the whole number 99999999999999999999… is beyond 64 bits",
    "seed=9223372036854775808": "seed is 9223372036854775808: set a whole number of 64 bits, at most 92233720368547",
    "schedule.prompts_per_step=999999": "are 1999998 samples: set at most 1000000",
    "student.parallel={data_parallel_size: 60000, pipeline_model_parallel_size: 2}": "is 120000 ranks: set at most",
    "student.parallel={pipeline_model_parallel_size: 3, virtual_pipeline_model_parallel_size: 2}": (
        "data_parallel_size 1 x pipeline_model_parallel_size 3 (with virtual stages): set prompts_per_step to"
    ),
    "loss.type=" + "x" * 99_999: "loss.type: unknown type 'xxx",
    "loss.type=[k2]": "loss.type: unknown type ['k2']",
    "x" * 90 + "=1": "unknown key 'xxxx",
    "run_dir=''": "run_dir: is empty: write text, or remove the key",
    'run_dir="a\\0b"': "run_dir: 'a\\x00b' holds a NUL character: remove it",
    "run_dir=" + "x" * 4001: "has 4001 bytes: write at most 4000",
    "data.train=[a, '']": "data.train[1]: is empty",
    "data.chat_template_kwargs.tokenize=true": "data.chat_template_kwargs.tokenize is set by mopd itself: remove it",
    "data.train=[]": "data.train is empty",
    "teachers.math.domains=[" + "math," * 9999 + "]": "teachers.math.domains names 'math' twice: remove one",
    "teachers.math.placement={type: local, gpus: [0, 0]}": "placement.gpus names 0 twice",
    "teachers.math.placement={type: local, gpus: [-1]}": "placement.gpus is -1: set 0 or more",
    "data.chat_template_kwargs={a: " + "😀" * 270_000 + "}": "too long once every default stands in it",
}


@pytest.mark.parametrize("override", OVERRIDES, ids=lambda text: text.encode("ascii", "replace").decode()[:50])
def test_overrides(write: Write, override: str) -> None:
    more = ["rollout.samples_per_prompt=2"] if "prompts_per_step" in override else []
    assert OVERRIDES[override] in refusal(write(), override, *more)


def test_many_overrides(write: Write) -> None:
    assert refusal(write(), *["seed=1"] * 1001) == "1001 overrides, the limit is 1000: write a recipe file"


BASES = {
    "": "recipe.yaml:1: base: expected the path of one recipe file",
    "a\0b": "recipe.yaml:1: base 'a\\x00b' does not exist",
    "\x1b[2J": "recipe.yaml:1: base '\\x1b[2J' does not exist",
    "x" * 5000: "recipe.yaml:1: base 'xxx",
    ".": "recipe.yaml:1: base .: not a regular file",
    "/dev/zero": "recipe.yaml:1: base /dev/zero: not a regular file",
    "pipe": "recipe.yaml:1: base pipe: not a regular file",
    "loop": "recipe.yaml:1: base loop: cannot be read (Too many levels of symbolic links)",
    "link.yaml": "recipe.yaml:1: base 'link.yaml' leads back to a file that stands on it",
    "sub/../recipe.yaml": "recipe.yaml:1: base 'recipe.yaml' leads back",
    "huge": "recipe.yaml:1: base huge: longer than",
}


@pytest.mark.parametrize("base", BASES, ids=lambda base: ascii(base)[:20])
def test_bases(write: Write, base: str) -> None:
    """A path that is no file, no end or no way out is refused as base, and as the recipe itself where it can be one."""
    os.mkfifo("pipe")
    Path("loop").symlink_to("loop")
    Path("link.yaml").symlink_to("recipe.yaml")
    with Path("huge").open("wb") as file:
        file.truncate(2**30)
    assert refusal(write(f"base: {json.dumps(base)}\n{RECIPE}")).startswith(BASES[base])
    if not base.endswith(".yaml"):
        assert refusal(base).startswith("recipe ")


def test_a_long_chain_of_bases(write: Write) -> None:
    for number in range(100):
        write(f"base: {number + 1}.yaml\n", f"{number}.yaml")
    write(name="100.yaml")
    assert refusal("0.yaml") == "15.yaml:1: base: more than 16 files stand on each other: join some of them"
    assert load_recipe("85.yaml").recipe == load_recipe("100.yaml").recipe


GOOD_NAMES = [
    "math[/hard]",
    "code[python]",
    "a/b: c",
    "..",
    "a.b=c",
    'a"b',
    "yes",
    "1",
    "<<",
    "数学",
    "👩‍🔬",
    " a b ",
    "x" * 100,
]
BAD_NAMES = {
    "\x1b[31m": "holds a control character",
    "a\nb": "holds a control character",
    "a\0b": "holds a NUL character",
    "a\x9bb": "holds a control character",
    "a\u202eb": "holds a control character",
    "\ud800": "holds half a character",
    " ": "cannot be seen",
    "\u200b": "cannot be seen",
    "x" * 101: "has at most 100|write 1 to 100 characters",
    "": "empty|write 1 to 100 characters",
}
PLACES = {
    "teachers": lambda name: {"teachers": {name: {"model": "m", "domains": ["law"]}}},
    "teachers.a.domains": lambda name: {"teachers": {"a": {"model": "m", "domains": [name]}}},
    "data.domain_weights": lambda name: {"data": {"domain_weights": {name: 1}}},
    "rewards": lambda name: {"rewards": {name: {"type": "exact_match"}}},
}


@pytest.mark.parametrize("place", PLACES)
def test_names(write: Write, place: str) -> None:
    """A name may hold anything that can be seen; what it may not hold is told where it stands."""
    write(name="base.yaml")
    for name in GOOD_NAMES:
        loaded = load_recipe(write(json.dumps({"base": "base.yaml", **PLACES[place](name)})))
        assert load_recipe(write(dump(loaded), "resolved.yaml")).recipe == loaded.recipe
    for name, problem in BAD_NAMES.items():
        shown = refusal(write(json.dumps({"base": "base.yaml", **PLACES[place](name)})))
        assert place in shown and any(words in shown for words in problem.split("|")), shown


@pytest.mark.parametrize("name", [*GOOD_NAMES, "a\nb", "\x1b", "\\", '"', "é\u2028", " "])
def test_a_dotted_path_reads_back(name: str) -> None:
    assert split_dotted(dotted(("data", name, "x"))) == ("data", name, "x")


def test_files_with_odd_names(write: Write) -> None:
    """A name that breaks lines or terminals is escaped in errors and in the comments of the resolved recipe."""
    name = "a\nb\x1b[2J\x85\u2028\ufffe#.yaml"
    loaded = load_recipe(write(name=name), ["seed=3"])
    assert loaded.origins["run_dir"] == "a\\nb\\x1b[2J\\x85\\u2028\ufffe#.yaml:1"
    assert load_recipe(write(dump(loaded), "resolved.yaml")).recipe == loaded.recipe
    assert refusal(name, "seed=x").startswith("a\\nb\\x1b[2J")


def test_ways_of_writing_text(write: Write) -> None:
    """Byte order mark, other line ends, JSON with pairs of escapes for one character."""
    plain = load_recipe(write()).recipe
    for text in (
        "\ufeff" + RECIPE,
        RECIPE.replace("\n", "\r\n"),
        RECIPE.replace("\n", "\r"),
        f"%YAML 1.1\n---\n{RECIPE}",
    ):
        Path("other.yaml").write_bytes(text.encode())
        assert load_recipe("other.yaml").recipe == plain
    write(json.dumps({"base": "recipe.yaml", "run_dir": "runs/😀"}), "emoji.json")
    assert "\\ud83d\\ude00" in Path("emoji.json").read_text() and load_recipe("emoji.json").recipe.run_dir == "runs/😀"
