"""Recipe files as trees that remember where each value stands; reading, ``--set`` and merging, no schema values yet."""

from __future__ import annotations

import dataclasses
import os
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mopd.types import UserError

SET_ORIGIN = "--set"
"""Origin of a value given on the command line."""


@dataclass(slots=True)
class Leaf:
    """A scalar or a list, which an overlay replaces as a whole."""

    value: Any
    origin: str
    """``file:line`` or ``--set``."""


@dataclass(slots=True)
class Section:
    """A mapping, which an overlay merges key by key."""

    items: dict[str, Node]
    origin: str


Node = Leaf | Section


def dotted(path: Sequence[str]) -> str:
    """``("data", "a.b") -> 'data."a.b"'``: the spelling that ``--set`` reads back."""
    return ".".join(f'"{part}"' if "." in part or "=" in part else part for part in path)


def split_dotted(text: str) -> tuple[str, ...]:
    """Inverse of ``dotted``. Raises ``UserError`` for an empty part."""
    parts = tuple(quoted or plain for quoted, plain in re.findall(r'(?:^|\.)(?:"([^"]*)"|([^."]*))', text))
    if not all(parts) or dotted(parts) != text:
        raise UserError(f"--set: {text!r} is not a key: write section.key, and quote a part that has a dot or '='")
    return parts


def read_chain(path: str | Path) -> list[tuple[str, Section]]:
    """The recipe and the files that it stands on, the deepest ``base`` first, each with its file name.

    A file names at most one ``base``, relative to its own folder. Raises ``UserError`` for a file that cannot be
    read, is no mapping, repeats a key or stands on itself.
    """
    chain: list[tuple[str, Section]] = []
    seen: list[str] = []
    name: str | None = os.fspath(path)
    named_by = ""
    while name is not None:
        if os.path.realpath(name) in seen:
            raise UserError(f"{named_by}: base {name!r} leads back to a file that stands on it: remove one base")
        seen.append(os.path.realpath(name))
        section = _read_file(name, named_by)
        chain.insert(0, (name, section))
        base = section.items.pop("base", None)
        if base is None:
            break
        if not isinstance(base, Leaf) or not isinstance(base.value, str):
            raise UserError(f"{base.origin}: base: expected the path of one recipe file, relative to {name}")
        named_by = base.origin
        name = os.path.normpath(os.path.join(os.path.dirname(name), base.value))
    return chain


def read_overrides(overrides: Sequence[str]) -> Section:
    """``["a.b=1", "a.c=[x]"]`` as one tree; values are YAML and a later one wins.

    Raises ``UserError`` for an override without ``=`` or with unreadable YAML.
    """
    root = Section({}, SET_ORIGIN)
    for override in overrides:
        match = re.match(r'((?:"[^"]*"|[^="])*)=(.*)', override, re.DOTALL)
        if match is None:
            raise UserError(f"--set {override}: expected key=value, for example --set schedule.steps=10")
        path = split_dotted(match[1].strip())
        node = _parse(match[2], f"--set {override}", one_line_origin=SET_ORIGIN)
        for part in reversed(path):
            node = Section({part: node}, SET_ORIGIN)
        assert isinstance(node, Section)
        root = merge(root, node, None)
    return root


def merge(base: Section, overlay: Section, annotation: Any, default: Any = None) -> Section:
    """``overlay`` over ``base``: sections merge, leaves replace, and a section of another ``type`` replaces.

    ``annotation`` is the schema's type for this section (None: unknown) and ``default`` the schema's default object:
    a section without a ``type`` key is of the default's type.
    """
    above, below_type = _section_type(annotation, overlay, None), _section_type(annotation, base, default)
    if None not in (above, below_type) and above != below_type:
        return overlay
    items = dict(base.items)
    for key, node in overlay.items.items():
        below = items.get(key)
        if isinstance(below, Section) and isinstance(node, Section):
            inner, inner_default = _child(annotation, base, overlay, key, default)
            items[key] = merge(below, node, inner, inner_default)
        else:
            items[key] = node
    return Section(items, overlay.origin)


def union_members(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of ``X | Y | None``, or the annotation itself."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def section_classes(annotation: Any) -> tuple[type, ...]:
    """The dataclasses among the alternatives of an annotation."""
    return tuple(m for m in union_members(annotation) if isinstance(m, type) and dataclasses.is_dataclass(m))


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


def _read_file(name: str, named_by: str) -> Section:
    where = f"{named_by}: base" if named_by else "recipe"
    try:
        text = Path(name).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{where} {name!r} does not exist: check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{where} {name!r} cannot be read: {error}") from None
    node = _parse(text, name)
    if not isinstance(node, Section):
        raise UserError(f"{name}: expected keys with values, as in 'run_dir: runs/first'; the file holds none")
    return node


def _parse(text: str, name: str, *, one_line_origin: str | None = None) -> Node:
    """YAML text as a tree; ``name`` heads the errors."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is None:
            return Leaf(None, one_line_origin or name)
        return _Reader(name, one_line_origin).node(root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark is not None and one_line_origin is None else ""
        raise UserError(f"{name}{line}: not readable as YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{name}: not readable as YAML: {' '.join(str(error).split())}") from None


class _Reader(yaml.constructor.SafeConstructor):
    """Turns YAML nodes into a tree, refusing repeated keys, keys that are not text, and self-reference."""

    def __init__(self, name: str, one_line_origin: str | None) -> None:
        super().__init__()
        self._name = name
        self._one_line_origin = one_line_origin
        self._open: list[yaml.Node] = []

    def node(self, node: yaml.Node, origin: str | None = None) -> Node:
        """The tree under a YAML node; ``origin`` is that of its key."""
        origin = origin or self._origin(node)
        if not isinstance(node, yaml.MappingNode):
            return Leaf(self._plain(node), origin)
        with self._entered(node):
            items = {key: self.node(value, self._origin(key_node)) for key, key_node, value in self._pairs(node)}
        return Section(items, origin)

    def _origin(self, node: yaml.Node) -> str:
        return self._one_line_origin or f"{self._name}:{node.start_mark.line + 1}"

    def _plain(self, node: yaml.Node) -> Any:
        with self._entered(node):
            if isinstance(node, yaml.MappingNode):
                return {key: self._plain(value) for key, _, value in self._pairs(node)}
            if isinstance(node, yaml.SequenceNode):
                return [self._plain(child) for child in node.value]
            return self.construct_object(node, deep=True)

    def _pairs(self, node: yaml.MappingNode) -> list[tuple[str, yaml.Node, yaml.Node]]:
        lines: dict[str, int] = {}
        for key_node, _ in node.value:
            key = self._plain(key_node)
            if not isinstance(key, str):
                raise UserError(f"{self._origin(key_node)}: key {key!r} is not text: put it in quotes")
            if key in lines:
                raise UserError(f"{self._origin(key_node)}: key {key!r} repeats line {lines[key]}: remove one of them")
            lines[key] = key_node.start_mark.line + 1
        return [(key, key_node, value) for key, (key_node, value) in zip(lines, node.value, strict=True)]

    @contextmanager
    def _entered(self, node: yaml.Node) -> Iterator[None]:
        if any(node is parent for parent in self._open):
            raise UserError(f"{self._origin(node)}: an alias refers to the value that holds it: write the value out")
        self._open.append(node)
        yield
        self._open.pop()
