"""Recipe files as trees that remember where each value stands; reading, overrides and merging, no schema values yet."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mopd.base.files.json_text import MAX_DEPTH
from mopd.base.files.reading import read_text, shown_path
from mopd.base.files.yaml_text import MAX_KEY_CHARACTERS, MAX_YAML_BYTES, Marked, YamlError, compose_yaml, plain
from mopd.base.text import shortened, visible, without_credentials
from mopd.base.types import UserError

AUTO = "auto"
"""Value of a ``type`` key that leaves the choice to the machine: the keys beside it are those of every type."""
STANDARD_INPUT = "-"
"""Name of a recipe that is read from there."""
OVERRIDE_ORIGIN = "override"
"""Origin of a value given on the command line."""
MAX_FILES = 16
"""Largest number of files: a recipe and its bases."""
MAX_OVERRIDES = 1000
"""Largest number of overrides of one command."""
_QUOTED = r'"(?:[^"\\]|\\.)*"'
"""A part of a dotted path as JSON text."""


@dataclass(slots=True)
class Leaf:
    """A scalar or a list, which an overlay replaces as a whole."""

    value: Any
    origin: str
    """``file:line`` or ``override``."""


@dataclass(slots=True)
class Section:
    """A mapping, which an overlay merges key by key."""

    items: dict[str, Node]
    origin: str


Node = Leaf | Section


def dotted(path: Sequence[str]) -> str:
    """``("data", "a.b") -> 'data."a.b"'``: the spelling that an override reads back, quoted parts as JSON text."""
    return ".".join(part if _is_plain(part) else _quoted(part) for part in path)


def shown_key(path: Sequence[str]) -> str:
    """``dotted`` for a message: the end of a path that is very long."""
    key = dotted(path)
    return key if len(key) <= 300 else f"…{key[-280:]}"


def _quoted(part: str) -> str:
    return json.dumps(part, ensure_ascii=visible(part) != part)


def _is_plain(part: str) -> bool:
    return bool(part) and part == part.strip() and part.isprintable() and not set('."=') & set(part)


def _is_possible(part: str) -> bool:
    return 0 < len(part) <= MAX_KEY_CHARACTERS and not any("\ud800" <= letter <= "\udfff" for letter in part)


def split_dotted(text: str) -> tuple[str, ...]:
    """Inverse of ``dotted``. Raises ``UserError`` for an empty part."""
    found = re.findall(rf'(?:^|\.)(?:({_QUOTED})|([^."]*))', text, re.DOTALL)
    try:
        parts = tuple(json.loads(quoted, strict=False) if quoted else plain_part for quoted, plain_part in found)
    except ValueError:
        parts = ()
    if not parts or not all(map(_is_possible, parts)) or dotted(parts) != text:
        raise UserError(
            f"override: {_shown(text)!r} is not a key: write section.key, and quote a part that has a dot or '='"
        )
    return parts


def read_chain(path: str | Path) -> list[tuple[str, Section]]:
    """The recipe and the files that it stands on, the deepest ``base`` first, each with its name as it may be shown.

    A file names at most one ``base``, relative to its own folder. Raises ``UserError`` for a file that cannot be
    read, is no mapping, repeats a key or stands on itself, and for more or longer files than a recipe needs.
    """
    chain: list[tuple[str, Section]] = []
    seen: list[str] = []
    name: str | None = os.fspath(path)
    named_by = ""
    bytes_left = MAX_YAML_BYTES
    while name is not None:
        try:
            real = os.path.realpath(name)
        except ValueError:  # no possible file name, which reading it will say
            real = name
        if real in seen:
            raise UserError(
                f"{named_by}: base '{shown_path(name)}' leads back to a file that stands on it: remove one base"
            )
        if len(seen) == MAX_FILES:
            raise UserError(f"{named_by}: base: more than {MAX_FILES} files stand on each other: join some of them")
        seen.append(real)
        section, num_bytes = _read_file(name, named_by, bytes_left)
        bytes_left -= num_bytes
        chain.insert(0, (shown_path(name), section))
        base = section.items.pop("base", None)
        if base is None:
            break
        if not isinstance(base, Leaf) or not isinstance(base.value, str) or not base.value:
            raise UserError(
                f"{base.origin}: base: expected the path of one recipe file, relative to {shown_path(name)}"
            )
        named_by = base.origin
        name = os.path.normpath(os.path.join(os.path.dirname(name), base.value))
    return chain


def read_overrides(overrides: Sequence[str]) -> Section:
    """``["a.b=1", "a.c=[x]"]`` as one tree; values are YAML and a later one wins.

    Raises ``UserError`` for an override without ``=`` or with unreadable YAML, and for more than ``MAX_OVERRIDES``.
    """
    if len(overrides) > MAX_OVERRIDES:
        raise UserError(f"{len(overrides)} overrides, the limit is {MAX_OVERRIDES}: write a recipe file")
    root = Section({}, OVERRIDE_ORIGIN)
    for override in overrides:
        match = re.match(rf'((?:{_QUOTED}|[^="])*)=(.*)', override, re.DOTALL)
        if match is None:
            raise UserError(f"override {_shown(override)}: expected key=value, for example schedule.steps=10")
        path = split_dotted(match[1].strip())
        node = _parse(match[2], f"override {_shown(override)}", one_line_origin=OVERRIDE_ORIGIN)
        if len(path) + _depth(node) > MAX_DEPTH:
            raise UserError(f"override {_shown(override)}: nested deeper than {MAX_DEPTH}: set a key of the schema")
        for part in reversed(path):
            node = Section({part: node}, OVERRIDE_ORIGIN)
        assert isinstance(node, Section)
        root = merge(root, node, None)
    return root


def _shown(text: str) -> str:
    return shortened(visible(without_credentials(text)))


def _depth(node: Any) -> int:
    """Levels of nested sections and lists."""
    if isinstance(node, Section):
        below = list(node.items.values())
    elif isinstance(node, Leaf):
        return _depth(node.value)
    else:
        below = list(node.values()) if isinstance(node, dict) else node if isinstance(node, list) else []
    return 1 + max(map(_depth, below), default=0)


def merge(base: Section, overlay: Section, annotation: Any, default: Any = None) -> Section:
    """``overlay`` over ``base``: sections merge, leaves replace, and a section of another ``type`` with other keys
    replaces (but adds to one of type ``auto``). An empty mapping of free names empties the one below it, and ``null``
    removes an entry from one whose values cannot be null.

    ``annotation`` is the schema's type for this section (None: unknown) and ``default`` the schema's default object:
    a section without a ``type`` key is of the default's type.
    """
    above, below_type = _section_type(annotation, overlay, None), _section_type(annotation, base, default)
    is_known = None not in (above, below_type) and below_type != AUTO
    if is_known and _class_of(annotation, above) is not _class_of(annotation, below_type):
        return overlay
    items = dict(base.items)
    for key, node in overlay.items.items():
        below = items.get(key)
        if isinstance(below, Section) and isinstance(node, Section):
            inner, inner_default = _child(annotation, base, overlay, key, default)
            is_emptied = not node.items and any(typing.get_origin(m) is Mapping for m in union_members(inner))
            items[key] = node if is_emptied else merge(below, node, inner, inner_default)
        elif below is not None and removes_entry(node, value_type(annotation)):
            del items[key]
        else:
            items[key] = node
    return Section(items, overlay.origin)


def value_type(annotation: Any) -> Any:
    """Annotation of the values of a mapping of free names; ``Any`` for what is none."""
    mappings = [member for member in union_members(annotation) if typing.get_origin(member) is Mapping]
    return typing.get_args(mappings[0])[1] if mappings else Any


def removes_entry(node: Node, annotation: Any) -> bool:
    """Whether a value in a mapping of values of this type is ``null`` and cannot be one of them."""
    is_null = isinstance(node, Leaf) and node.value is None
    return is_null and annotation is not Any and type(None) not in union_members(annotation)


def union_members(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of ``X | Y | None``, or the annotation itself."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def section_classes(annotation: Any) -> tuple[type, ...]:
    """The dataclasses among the alternatives of an annotation."""
    return tuple(m for m in union_members(annotation) if isinstance(m, type) and dataclasses.is_dataclass(m))


@functools.cache
def field_types(cls: type) -> dict[str, Any]:
    """Field name -> resolved annotation, in order of definition."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def type_values(cls: type) -> tuple[str, ...]:
    """Values of the ``type`` key that choose this class; empty when it has none."""
    annotation = field_types(cls).get("type")
    return typing.get_args(annotation) if annotation is not None else ()


def field_default(field: dataclasses.Field[Any]) -> Any:
    """The default of a field, or ``dataclasses.MISSING``."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _section_type(annotation: Any, section: Section, default: Any) -> Any:
    """Value of the section's ``type`` key where the schema knows such a key, else the default's."""
    if not any(type_values(cls) for cls in section_classes(annotation)):
        return None
    leaf = section.items.get("type")
    if isinstance(leaf, Leaf):
        return leaf.value
    return getattr(default, "type", None)


def _class_of(annotation: Any, chosen: Any) -> Any:
    """The dataclass that a value of ``type`` chooses; the value itself where there is none."""
    return next((cls for cls in section_classes(annotation) if chosen in type_values(cls)), chosen)


def _child(annotation: Any, base: Section, overlay: Section, key: str, default: Any) -> tuple[Any, Any]:
    """Annotation and default of ``key`` inside a section."""
    chosen = _section_type(annotation, overlay, _section_type(annotation, base, default))
    for cls in section_classes(annotation):
        fields = {field.name: field for field in dataclasses.fields(cls)}
        if key in fields and (chosen is None or chosen in type_values(cls)):
            return field_types(cls)[key], getattr(default, key, field_default(fields[key]))
    for member in union_members(annotation):
        if typing.get_origin(member) is Mapping:
            return typing.get_args(member)[1], None
    return None, None


def _read_file(name: str, named_by: str, max_bytes: int) -> tuple[Section, int]:
    """The tree of one file, and its size; ``named_by`` is the place that names it as its base."""
    heading = f"{named_by}: base" if named_by else "recipe"
    if name == STANDARD_INPUT and not named_by:
        text = _read_standard_input(max_bytes)
    elif not os.path.lexists(name):
        raise UserError(f"{heading} '{shown_path(name)}' does not exist: check the path")
    else:
        try:
            text = read_text(name, cure="name a recipe file", max_bytes=max_bytes)
        except UserError as error:
            raise UserError(f"{heading} {error}") from error
    node = _parse(text, shown_path(name))
    if not isinstance(node, Section):
        raise UserError(
            f"{shown_path(name)}: expected keys with values, as in 'run_dir: runs/first'; the file holds none"
        )
    return node, len(text.encode())


def _read_standard_input(max_bytes: int) -> str:
    if sys.stdin.isatty():
        raise UserError("recipe: standard input is a terminal: name a recipe file, or write one into a pipe")
    content = sys.stdin.buffer.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise UserError(f"recipe: standard input is longer than {max_bytes} bytes: name a recipe file")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"recipe: standard input is not UTF-8 text ({error.reason}): name a recipe file") from error


def _parse(text: str, name: str, *, one_line_origin: str | None = None) -> Node:
    """YAML text as a tree; ``name`` heads the errors."""
    try:
        root = compose_yaml(text)
    except YamlError as error:
        line = f":{error.line}" if error.line is not None and one_line_origin is None else ""
        key = f"{shown_key(error.path)}: " if error.path else ""
        raise UserError(f"{name}{line}: {key}{error}") from None
    if root is None:
        return Leaf(None, one_line_origin or name)
    return _tree(root, root.line, name, one_line_origin)


def _tree(marked: Marked, line: int, name: str, one_line_origin: str | None) -> Node:
    """Sections and leaves; ``line`` is that of the value's key."""
    origin = one_line_origin or f"{name}:{line}"
    if not isinstance(marked.value, dict):
        return Leaf(plain(marked), origin)
    items = {key: _tree(value, at, name, one_line_origin) for key, (at, value) in marked.value.items()}
    return Section(items, origin)
