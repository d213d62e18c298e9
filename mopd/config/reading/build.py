"""Config objects from trees: every value checked against its field's type, every refusal with file, line and path."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, NoReturn, TypeVar

from mopd.base.files.yaml_text import EXPONENT
from mopd.base.text import shortened, without_credentials
from mopd.base.types import UserError
from mopd.config.reading.tree import (
    OVERRIDE_ORIGIN,
    Leaf,
    Node,
    Section,
    dotted,
    field_default,
    field_types,
    removes_entry,
    section_classes,
    shown_key,
    type_values,
    union_members,
)
from mopd.config.values import Lines, check_name, check_text

Path_ = tuple[str, ...]
Config = TypeVar("Config")
HINTS = {
    "loss.type=k1": "it cannot be a differentiable loss, as its gradient has expectation 0 and nothing is learned: set "
    "type: k2 (reverse KL), k3 (forward KL) or policy_gradient (k1 as a detached advantage)",
    "loss.advantage": "it is k1, the only unbiased one (k3 gives grad reverse KL - grad forward KL, almost no signal; "
    "k2 fails likewise): remove the key",
    "data.prompt_key": "set columns: {prompt: COLUMN, …}, or the name of a shipped mapping",
    "data.ground_truth_key": "set columns: {prompt: COLUMN, ground_truth: COLUMN, …}",
    "data.domain_key": "set columns: {prompt: COLUMN, domain: COLUMN, …}",
    "data.extra_info_key": "set columns: {prompt: COLUMN, extra_info: COLUMN, …}",
    "data.seed": "the recipe's seed also shuffles and mixes prompts: set seed",
    "student.precision": "the weights' numbers are of student.dtype: set that",
    "validation.reward": "rewards are a section of their own, by domain: set rewards.default",
    "validation.domain_rewards": "rewards are a section of their own, by domain: set rewards.DOMAIN",
}
"""Cures for keys and types that readers of verl's recipes and of the losses' papers try, and that do not exist here."""


def build_from_json(cls: type[Config], tree: dict[str, Any], file: str) -> Config:
    """An instance of a config class from a JSON object; ``UserError`` that names ``file`` and the dotted path."""
    built: Config = Builder(file, cls).dataclass(_section(tree, file), cls, (), None)
    return built


def _section(tree: dict[str, Any], file: str) -> Section:
    items = {key: _section(item, file) if isinstance(item, dict) else Leaf(item, file) for key, item in tree.items()}
    return Section(items, file)


def place(recipe_file: str, origin: str) -> str:
    """Return the place to show: ``file:line``, or the recipe with a note that an override gave the value."""
    return f"{recipe_file} ({OVERRIDE_ORIGIN})" if origin == OVERRIDE_ORIGIN else origin


class Builder:
    """Turns a merged tree into config objects, remembering origins."""

    def __init__(self, recipe_file: str, root: type, problems: list[str] | None = None) -> None:
        """``recipe_file`` as it may be shown; ``root`` is the class of the whole file.

        Without a list of ``problems`` the first refusal is raised. With one, every refusal is added to it and building
        goes on with the default, or with ``None`` where there is none: such objects may be looked at and not be used.
        """
        self.recipe_file = recipe_file
        self.root = root
        self.problems = problems
        self.origins: dict[Path_, str] = {}
        self.broken: set[Path_] = set()
        """Keys whose value was refused or is missing, and sections whose own check failed."""

    def fail(self, origin: str, path: Path_, problem: str) -> NoReturn:
        raise UserError(f"{place(self.recipe_file, origin)}: {f'{shown_key(path)}: ' if path else ''}{problem}")

    def dataclass(self, section: Section, cls: type, path: Path_, default: Any, others: tuple[type, ...] = ()) -> Any:
        """An instance of ``cls``; keys that the section lacks come from ``default``, else from the fields. ``others``
        are classes that another ``type`` of the section would have chosen."""
        types_ = field_types(cls)
        for key, node in section.items.items():
            if key not in types_:
                below = (*path, key)
                self.attempt(below, partial(self._fail_unknown, node.origin, below, tuple(types_), others), None)
        values: dict[str, Any] = {}
        missing: list[Path_] = []
        for field in dataclasses.fields(cls):
            inherited = getattr(default, field.name) if isinstance(default, cls) else field_default(field)
            below = (*path, field.name)
            if field.name in section.items:
                make = partial(self.value, section.items[field.name], types_[field.name], below, inherited)
                values[field.name] = self.attempt(below, make, None if inherited is dataclasses.MISSING else inherited)
            elif inherited is dataclasses.MISSING:
                missing.append(below)
                values[field.name] = None
            else:
                values[field.name] = inherited
        if missing:
            self.broken.update(missing)
            keys = f"missing {'keys' if missing[1:] else 'key'} {', '.join(map(dotted, missing))}"
            self.attempt(path, partial(self.fail, section.origin if path else self.recipe_file, (), keys), None)
        return self._checked(section, cls, path, values)

    def attempt(self, path: Path_, make: Callable[[], Any], fallback: Any) -> Any:
        """Return what ``make`` returns. If problems are listed, a refusal becomes ``fallback``, and ``path`` is
        broken."""
        if self.problems is None:
            return make()
        try:
            return make()
        except UserError as error:
            self.problems.append(str(error))
            self.broken.add(path)
            return fallback

    def _checked(self, section: Section, cls: type, path: Path_, values: dict[str, Any]) -> Any:
        """The object. Where a key below it is broken, a failed check that speaks of that key is no further problem."""
        below = [key[len(path) :] for key in self.broken if key[: len(path)] == path]
        try:
            return cls(**values)
        except ValueError as error:
            if not any(key and (key[-1] in str(error) or key[0] in str(error)) for key in below):
                self.attempt(path, partial(self._fail_check, error, section, tuple(values), path), None)
        except (TypeError, AttributeError):
            if not below:
                raise
        made: Any = object.__new__(cls)
        for name, value in values.items():
            object.__setattr__(made, name, value)
        return made

    def _fail_unknown(self, origin: str, path: Path_, known: tuple[str, ...], others: tuple[type, ...]) -> NoReturn:
        having = [value for cls in others if path[-1] in field_types(cls) for value in type_values(cls)]
        of_others = f"only type {' or '.join(having)} has it: remove it, or set {dotted((*path[:-1], 'type'))}"
        cure = HINTS.get(dotted(path)) or (of_others if having else self.suggest(path[-1], known))
        self.fail(origin, (), f"unknown key '{shown_key(path)}'; {cure}")

    def value(self, node: Node, annotation: Any, path: Path_, default: Any) -> Any:
        """The value of one key, checked against its annotation."""
        members = union_members(annotation)
        if isinstance(node, Leaf):
            self.origins[path] = node.origin
            if node.value is None and (type(None) in members or annotation is Any):
                return None
        classes = section_classes(annotation)
        if classes and (isinstance(node, Section) or {*members} <= {*classes, type(None)}):
            return self._one_of(node, classes, path, default)
        has_words = any(member is Lines or typing.get_origin(member) is Literal for member in members)
        for member in members:
            if typing.get_origin(member) is Mapping and (isinstance(node, Section) or not has_words):
                return self._mapping(node, typing.get_args(member)[1], path)
            if typing.get_origin(member) is tuple and section_classes(typing.get_args(member)[0]):
                return self._items(node, annotation, typing.get_args(member)[0], path)
        if annotation is Any and isinstance(node, Section):
            return self._mapping(node, Any, path)
        if isinstance(node, Section):
            self.fail(node.origin, path, f"expected {_expected(annotation)}, got {_shown_section(node)}")
        try:
            for member in members:
                converted = _convert(node.value, member)
                if converted is not _MISFIT:
                    return converted
        except ValueError as error:
            self.fail(node.origin, path, str(error))
        self.fail(node.origin, path, f"expected {_expected(annotation)}, got {_shown(node.value)}")

    def _mapping(self, node: Node, annotation: Any, path: Path_) -> dict[str, Any]:
        if not isinstance(node, Section):
            cure = "; {} empties it" if node.value is None else ""
            self.fail(node.origin, path, f"expected a section of named values, got {_shown(node.value)}{cure}")
        self.origins[path] = node.origin
        made = {}
        known = [key for key, item in node.items.items() if not removes_entry(item, annotation)]
        for key, item in node.items.items():
            below = (*path, key)
            if key not in known:
                self.attempt(below, partial(self._fail_removal, item.origin, below, known), None)
                continue
            made[key] = self.attempt(below, partial(self._named, key, item, annotation, path), None)
        return {key: value for key, value in made.items() if (*path, key) not in self.broken or value is not None}

    def _fail_removal(self, origin: str, path: Path_, known: list[str]) -> NoReturn:
        near = difflib.get_close_matches(path[-1], known, n=3) or known[:3]
        cure = f"did you mean {_shown(', '.join(near))}?" if near else "remove the key"
        self.fail(origin, path, f"null removes an entry, and there is none of this name; {cure}")

    def _named(self, key: str, item: Node, annotation: Any, path: Path_) -> Any:
        """One item of a mapping."""
        try:
            if annotation is not Any:
                check_name(key)
        except ValueError as error:
            self.fail(item.origin, path, f"name {error}")
        return self.value(item, annotation, (*path, key), None)

    def _items(self, node: Node, whole: Any, annotation: Any, path: Path_) -> tuple[Any, ...]:
        """A list whose items may be sections; ``whole`` is the list's own annotation."""
        if not isinstance(node, Leaf) or not isinstance(node.value, list):
            shown = _shown_section(node) if isinstance(node, Section) else _shown(node.value)
            self.fail(node.origin, path, f"expected {_expected(whole)}, got {shown}")
        made = []
        for i, item in enumerate(node.value):
            below = (*path[:-1], f"{path[-1]}[{i}]")
            inner = _section(item, node.origin) if isinstance(item, dict) else Leaf(item, node.origin)
            made.append(self.attempt(below, partial(self.value, inner, annotation, below, None), None))
        return tuple(item for item in made if item is not None)

    def _one_of(self, node: Node, classes: tuple[type, ...], path: Path_, default: Any) -> Any:
        """An instance of the class that the section's ``type`` key chooses."""
        if not isinstance(node, Section):
            self.fail(node.origin, path, f"expected a section, got {_shown(node.value)}")
        by_type = {value: cls for cls in classes for value in type_values(cls)}
        if not by_type:
            return self.dataclass(node, classes[0], path, default)
        leaf = node.items.get("type")
        if leaf is None:
            known = default if isinstance(default, classes) else None
            if known is None:
                self.fail(node.origin, path, f"missing key type: set one of {', '.join(by_type)}")
            return self.dataclass(node, type(known), path, known, classes)
        chosen = leaf.value if isinstance(leaf, Leaf) else None
        if not isinstance(chosen, str) or chosen not in by_type:
            hint = HINTS.get(f"{dotted((*path, 'type'))}={chosen}")
            cure = hint or self.suggest(_shown(chosen), tuple(by_type), "types")
            self.fail(leaf.origin, (*path, "type"), f"unknown type {_shown(chosen)}; {cure}")
        same = isinstance(default, classes) and getattr(default, "type", None) == chosen
        return self.dataclass(node, by_type[chosen], path, default if same else None, classes)

    def suggest(self, key: str, known: tuple[str, ...], noun: str = "keys") -> str:
        """A cure for a name that the schema does not have."""
        close = difflib.get_close_matches(key.strip("'"), known, n=1, cutoff=0.6)
        if close:
            return f"did you mean '{close[0]}'?"
        elsewhere = [path for path in _schema_paths(self.root, ()) if path[-1] == key] if noun == "keys" else []
        if len(elsewhere) == 1:
            return f"did you mean '{'.'.join(elsewhere[0])}'?"
        return f"known {noun}: {', '.join(known)}"

    def _fail_check(self, error: ValueError, section: Section, fields: tuple[str, ...], path: Path_) -> NoReturn:
        """Put file and dotted path before the message of a failed ``check``."""
        message = str(error)
        first = re.match(r"[\w.]+", message)
        named = first[0].rstrip(".").split(".") if first else [""]
        origin = section.origin if path else self.recipe_file
        if named[0] not in fields:
            self.fail(origin, path, message)
        node: Node = section
        for part in named:
            if not isinstance(node, Section) or part not in node.items:
                break
            node = node.items[part]
            origin = node.origin
        self.fail(origin, (), f"{dotted(path)}.{message}" if path else message)


_MISFIT = object()


def _convert(value: Any, annotation: Any) -> Any:
    """``value`` as the annotated type, or ``_MISFIT``. No guess beyond int -> float and exponents without a dot.

    Raises ``ValueError`` for a text that is of the type and of no use.
    """
    origin = typing.get_origin(annotation)
    if annotation is Any:
        return _convert_plain(value)
    if annotation is float:
        if isinstance(value, str) and EXPONENT.fullmatch(value):
            value = float(value)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return float(value) if number and math.isfinite(value) else _MISFIT
    if annotation in (str, Lines) and isinstance(value, str):
        check_text(value, keep="\n" if annotation is Lines else "")
        return value
    if annotation in (bool, int):
        return value if type(value) is annotation else _MISFIT
    if origin is Literal:
        return value if isinstance(value, str) and value in typing.get_args(annotation) else _MISFIT
    if origin is types.UnionType:
        found = [_convert(value, member) for member in typing.get_args(annotation)]
        return next((one for one in found if one is not _MISFIT), _MISFIT)
    if origin is tuple:
        if not isinstance(value, list):
            return _MISFIT
        items = tuple(_convert(item, typing.get_args(annotation)[0]) for item in value)
        return _MISFIT if any(item is _MISFIT for item in items) else items
    return _MISFIT


def _convert_plain(value: Any) -> Any:
    """A value of a free-form section (``megatron_overrides``): what JSON can say, exponents as numbers."""
    if isinstance(value, list):
        items = [_convert_plain(item) for item in value]
        return _MISFIT if any(item is _MISFIT for item in items) else items
    if isinstance(value, dict):
        pairs = {key: _convert_plain(item) for key, item in value.items()}
        return _MISFIT if any(item is _MISFIT for item in pairs.values()) else pairs
    if isinstance(value, str) and EXPONENT.fullmatch(value):
        value = float(value)
    if isinstance(value, float) and not math.isfinite(value):
        return _MISFIT
    return value if value is None or isinstance(value, (bool, int, float, str)) else _MISFIT


def _expected(annotation: Any) -> str:
    """An annotation in a reader's words."""
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Any: "a plain value"}
    words |= {type(None): "null", Lines: "text"}
    parts: list[str] = []
    for member in union_members(annotation):
        if typing.get_origin(member) is Literal:
            parts.append("one of " + ", ".join(str(choice) for choice in typing.get_args(member)))
        elif typing.get_origin(member) is Mapping:
            parts.append("a section of named values")
        elif section_classes(member):
            parts.append("a section")
        elif typing.get_origin(member) is tuple:
            parts.append(f"a list ({_expected(typing.get_args(member)[0])} each)")
        else:
            parts.append(words[member])
    return " or ".join(parts)


def _shown(value: Any) -> str:
    """A value as it would stand in the file, cut to one short line."""
    names = {True: "true", False: "false"}
    text = "null" if value is None else names[value] if isinstance(value, bool) else without_credentials(repr(value))
    return shortened(text)


def _shown_section(section: Section) -> str:
    """A section that stands where none may."""
    if section.items and all(key.isdecimal() for key in section.items):
        return "numbers of items: give the whole list"
    return "a section"


def _schema_paths(cls: type, path: Path_) -> list[Path_]:
    """Every key that the schema knows, ``NAME`` standing for the names in a mapping."""
    found: list[Path_] = []
    for name, annotation in field_types(cls).items():
        found.append((*path, name))
        for member in union_members(annotation):
            mapped = typing.get_origin(member) is Mapping
            inner = typing.get_args(member)[1] if mapped else member
            below = (*path, name, "NAME") if mapped else (*path, name)
            for section in section_classes(inner):
                found.extend(p for p in _schema_paths(section, below) if p not in found)
    return found
