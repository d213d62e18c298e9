"""Values for every key of a recipe, good and bad, derived from the annotations of the schema."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from hypothesis import strategies as st

from mopd.config.reading.tree import field_types, section_classes, type_values, union_members
from mopd.config.schema import Recipe
from mopd.config.values import Lines

Field = tuple[tuple[str, ...], type, str]
"""Path of a section, one of its classes, one key."""
AWKWARD_TEXTS = [
    "yes", "No", "~", "null", "", " ", "1e3", "1e999", "-1E+5", ".5", "0x10", "010", "0o17", "1_000", "1:30", ".inf",
    "2024-01-01", "2024-01-01 12:00:00Z", "-.NaN", "=", "<<", "!", "!!int", "&a", "*a", "- a", "? a", "a: b", "a #b",
    "%YAML", "---", "...", "|", ">-", "{a}", "[", "'", '"', "\\", "@", "`", "a\nb", "\n", "\r\n", "a\n\n b", "\t",
    "a\tb", "\x00", "\x1b[2J", "\x7f", "a\x85b", "\u2028", "\u2029x", "\ufeff", "\ufeffa", "\ufffe", "\U0001f600",
    "\U0010ffff", "\ud800", "é" * 50, "x" * 200, "a.b=c", '"a".b', "math[/hard]", "../..", "/", " a ", "a  b",
]  # fmt: skip
TEXTS = st.sampled_from(AWKWARD_TEXTS) | st.text(st.characters(), max_size=12)
INTEGERS = st.integers(-3, 300) | st.sampled_from([2**31 - 1, 2**31, 2**63 - 1, -(2**63), 2**64 - 1, 10**30, -(10**30)])
FLOATS = (
    st.floats(0, 4) | st.floats() | st.integers(-1, 9) | st.sampled_from(["1e-6", "2.E+3", "1e999", 1e-300, 10**25])
)
PLAIN = st.recursive(
    st.none() | st.booleans() | INTEGERS | FLOATS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


def fields(cls: type = Recipe, path: tuple[str, ...] = ()) -> Iterator[Field]:
    """Every key of every form of every section, once for each place where the section may stand."""
    for name, annotation in field_types(cls).items():
        yield path, cls, name
        for section, below in _sections(annotation, (*path, name)):
            yield from fields(section, below)


def classes(cls: type = Recipe) -> dict[str, type]:
    """Every section's class, by name."""
    return {found.__name__: found for _, found, _ in fields(cls)}


def _sections(annotation: Any, path: tuple[str, ...]) -> Iterator[tuple[type, tuple[str, ...]]]:
    for member in union_members(annotation):
        is_mapping = typing.get_origin(member) is Mapping
        for section in section_classes(typing.get_args(member)[1] if is_mapping else member):
            yield section, (*path, "math") if is_mapping else path


def least(annotation: Any) -> Any:
    """A value that suffices for a required key."""
    member = union_members(annotation)[0]
    if typing.get_origin(member) is Literal:
        return typing.get_args(member)[-1]
    if typing.get_origin(member) is tuple:
        return [least(typing.get_args(member)[0])]
    if typing.get_origin(member) is Mapping:
        return {"math": least(typing.get_args(member)[1])}
    if section_classes(member):
        return least_section(section_classes(member)[0])
    return {str: "http://a", Lines: "{prompt}", int: 8, float: 0.5, bool: True, Any: "any.jsonl"}[member]


def least_section(cls: type) -> dict[str, Any]:
    """The required keys of a section, and the ``type`` that chooses it."""
    chosen: dict[str, Any] = {"type": type_values(cls)[-1]} if type_values(cls) else {}
    own: dict[str, Any] = {"domains": ["math"]} if "domains" in field_types(cls) else {}
    own |= {"repo": "me/student"} if "repo" in field_types(cls) else {}
    own |= {"system": "one"} if "system" in field_types(cls) else {}
    own |= {"module": "file.py:name"} if "module" in field_types(cls) else {}
    if cls is Recipe:
        own = {"checkpoint": {"keep_best": False}, "preflight": {"require_better_teacher": False}}
    needed = [field for field in dataclasses.fields(cls) if field.default is field.default_factory]
    return {**{field.name: least(field_types(cls)[field.name]) for field in needed}, **own, **chosen}


def values(annotation: Any) -> st.SearchStrategy[Any]:
    """Values that fit an annotation, and some that do not."""
    return st.one_of(*map(_member_values, union_members(annotation)))


def _member_values(member: Any) -> st.SearchStrategy[Any]:
    origin, arguments = typing.get_origin(member), typing.get_args(member)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is tuple:
        return st.lists(values(arguments[0]), max_size=3)
    if origin is Mapping:
        return st.dictionaries(st.just("math") | TEXTS, values(arguments[1]), max_size=2)
    if dataclasses.is_dataclass(member):
        types_ = field_types(typing.cast(type, member))
        some = {name: values(annotation) for name, annotation in types_.items() if not section_classes(annotation)}
        if not some:  # it holds sections alone
            return st.just(least_section(typing.cast(type, member)))
        key = st.sampled_from([name for name in some if name != "type"] or ["type"])
        changed = key.flatmap(lambda name: st.fixed_dictionaries({name: some[name]}))
        return changed.map(lambda change: {**least_section(typing.cast(type, member)), **change})
    by_type = {bool: st.booleans(), int: INTEGERS, float: FLOATS, str: TEXTS, type(None): st.none(), Any: PLAIN}
    by_type[Lines] = TEXTS
    return by_type[member]


def overlay(field: Field, value: Any) -> dict[str, Any]:
    """A recipe's tree that sets one key, with what its section needs beside it."""
    path, cls, name = field
    tree: dict[str, Any] = {**(least_section(cls) if type_values(cls) else {}), name: value}
    for part in reversed(path):
        tree = {part: tree}
    return tree
