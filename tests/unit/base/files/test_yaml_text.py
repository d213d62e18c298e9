"""YAML as it is read from files of a run, and scalars that are written back."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from mopd.base.files.yaml_text import MAX_YAML_VALUES, comment, compose_yaml, dump_inline, read_yaml_object
from mopd.base.types import UserError
from tests.unit.config.strategies import AWKWARD_TEXTS

TEXTS = [text for text in AWKWARD_TEXTS if not any("\ud800" <= letter <= "\udfff" for letter in text)]
SCALARS = [None, True, False, 0, -1, 2**64 - 1, -(2**63), 0.0, -0.0, 1e-6, 1e22, 1.5, 5e-324, 1.7e308]


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        read_yaml_object(path, cure="write it again")
    assert "\n" not in str(caught.value) and str(caught.value).endswith(": write it again")
    return str(caught.value).removeprefix(str(path))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: {b: 2024-01-01}", ":1: the date 2024-01-01 (in quotes it is text) has no place here"),
        ("a:\n- .inf", ":2: inf has no place here"),
        ("a: .nan", ":1: nan has no place here"),
        ("", ": holds no keys with values"),
        ("- a", ": holds no keys with values"),
        ("a: [", ":1: not readable as YAML"),
        ("a: &a [*a]", ":1: an alias refers to the value that holds it"),
        ("a: [" + "1," * MAX_YAML_VALUES + "]", ":1: more than"),
    ],
)
def test_refused_files(tmp_path: Path, text: str, line: str) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(text)
    assert refusal(path).startswith(line)


def test_a_file_is_read_as_plain_values(tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text("a: &a {b: [1, 2.5, yes, ~, '1']}\nc: *a\n")
    inner = {"b": [1, 2.5, True, None, "1"]}
    assert read_yaml_object(path, cure="") == {"a": inner, "c": inner}


@pytest.mark.parametrize(
    "value",
    [*TEXTS, *SCALARS, [], {}, [TEXTS], {"a": {"b": SCALARS}}, [{"yes": 1, "No": 2, "\x85": 3}]],
    ids=lambda v: ascii(v)[:20],
)
def test_scalars_read_back(value: object) -> None:
    """By our own reader as a value and as a key, and by anybody else's."""
    text = dump_inline(value)
    assert "\n" not in text
    read = yaml.safe_load(f"a: {text}  # {comment('# x')}")["a"]
    assert repr(read) == repr(value)
    marked = compose_yaml(f"a: {text}")
    assert marked is not None and isinstance(marked.value, dict)
    if isinstance(value, str) and 0 < len(value) <= 100:
        keys = compose_yaml(f"{text}: 1")
        assert keys is not None and isinstance(keys.value, dict) and list(keys.value) == [value]


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: ascii(text)[:20])
def test_comments_end_nothing(text: str) -> None:
    assert yaml.safe_load(f"a: 1  # {comment(text)}\nb: 2") == {"a": 1, "b": 2}
