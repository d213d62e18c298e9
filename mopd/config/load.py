"""From recipe files and overrides to a checked ``Recipe``, and back to text.

Precedence: schema default < ``base`` < recipe < override. Nothing is accepted silently: an unknown key, a wrong
type, a repeated key or a failed check raises ``UserError`` with the file, the line and the dotted path.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mopd.base.files.reading import shown_path
from mopd.base.files.yaml_text import MAX_YAML_BYTES, MAX_YAML_VALUES, comment, dump_inline
from mopd.base.types import UserError
from mopd.config.groups import STUDENT, EngineGroupConfig, TeacherConfig, TeacherDefaultsConfig
from mopd.config.reading.build import Builder, Path_, place
from mopd.config.reading.tree import (
    AUTO,
    Leaf,
    Node,
    Section,
    dotted,
    field_types,
    merge,
    read_chain,
    read_overrides,
    section_classes,
    shown_key,
    type_values,
)
from mopd.config.schema import Recipe

DEFAULT_ORIGIN = "default"
"""Origin of a value that no file sets."""
AUTO_ORIGIN = "auto: "
"""Beginning of the origin of a value that was ``auto``; the reason follows."""
WITHOUT_FILE = "keywords"
"""Name of a recipe that stands in no file, in messages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """A recipe with its history."""

    recipe: Recipe
    named: Recipe
    """``recipe`` with models and data as the user names them, which is what is printed, kept and compared."""
    origins: Mapping[str, str]
    """Dotted path of every value -> ``file:line``, ``override``, ``default`` or ``auto: REASON``."""
    path: str
    """The recipe file, as messages show it."""
    sources: tuple[str, ...]
    """All files read, the deepest base first, as messages show them."""
    located: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Name of the Hub, as it is written -> its local folder or files."""
    commits: Mapping[str, str] = field(default_factory=dict)
    """Key of the recipe -> its name of the Hub at the commit that was fetched."""

    def where(self, *path: str) -> str:
        """``file:line: dotted.path`` of a key, to begin an error line with; a default is named by the recipe file."""
        key = dotted(path)
        origin = self.origins.get(key) or next((o for k, o in self.origins.items() if k.startswith(f"{key}.")), None)
        is_ours = origin is None or origin == DEFAULT_ORIGIN or origin.startswith(AUTO_ORIGIN)
        return f"{place(self.path, self.path if origin is None or is_ours else origin)}: {key}"

    @property
    def weights_way(self) -> str:
        """How the student's weights come to the rollout in a settled recipe, and why, if that was ``auto``."""
        way, origin = self.recipe.weight_sync.type, self.origins.get("weight_sync.type", "")
        if not origin.startswith(AUTO_ORIGIN):
            return way
        why = origin.removeprefix(AUTO_ORIGIN)
        return why if way == AUTO else f"{way} ({why})"

    def settled(self, recipe: Recipe, reasons: Mapping[str, str]) -> Loaded:
        """Return this with ``recipe``, in which the values at ``reasons`` were ``auto``."""
        keys = map(dotted, leaf_paths(to_tree(recipe)))
        settled = {key: f"{AUTO_ORIGIN}{reason}" for key, reason in reasons.items()}
        origins = {key: settled.get(key, self.origins.get(key, DEFAULT_ORIGIN)) for key in keys}
        return dataclasses.replace(self, recipe=recipe, named=recipe, origins=origins)


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """A recipe of which some values may have been refused."""

    loaded: Loaded
    """The values that were accepted; others have their default, or are ``None``."""
    problems: tuple[str, ...]
    """One line each, as ``load_recipe`` would raise the first."""
    broken: frozenset[Path_]
    """Keys of what is not whole."""


def load_recipe(path: str | Path | None, overrides: Sequence[str] = ()) -> Loaded:
    """Read, merge and check a recipe.

    Args:
        path: recipe file (YAML; JSON is YAML too); ``None``: the overrides are the whole recipe.
        overrides: ``key=value`` texts; values are YAML.

    Raises:
        UserError: one line with file, line and dotted path.
    """
    loaded, _ = _build(path, overrides, None)
    _check_size(loaded)
    return loaded


def draft_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Draft:
    """Read a recipe as ``load_recipe`` does, and list everything that it would refuse and not only the first.

    Raises:
        UserError: the text is no YAML, or a file is not there.
    """
    problems: list[str] = []
    loaded, builder = _build(path, overrides, problems)
    if not problems:
        _check_size(loaded)
    return Draft(loaded=loaded, problems=tuple(problems), broken=frozenset(builder.broken))


def _build(path: str | Path | None, overrides: Sequence[str], problems: list[str] | None) -> tuple[Loaded, Builder]:
    chain = [] if path is None else read_chain(path)
    name = WITHOUT_FILE if path is None else shown_path(path)
    tree = Section({}, name)
    for _, section in chain:
        tree = merge(tree, section, Recipe)
    if overrides:
        tree = merge(tree, read_overrides(overrides), Recipe)
    builder = Builder(name, Recipe, problems)
    for key in ("rollout", "teacher_defaults"):
        builder.attempt((key,), partial(_require_types, tree.items.get(key), (key,), name), None)
    tree = builder.attempt(("teacher_defaults",), partial(_spread_teacher_defaults, tree, name), tree)
    tree = builder.attempt(("teachers",), partial(_name_student, tree, name), tree)
    teachers = tree.items.get("teachers")
    for key, teacher in teachers.items.items() if isinstance(teachers, Section) else ():
        below = ("teachers", key)
        builder.attempt(below, partial(_require_types, teacher, below, name), None)
    recipe = builder.dataclass(tree, Recipe, (), None)
    origins = {dotted(key): builder.origins.get(key, DEFAULT_ORIGIN) for key in leaf_paths(to_tree(recipe))}
    sources = tuple(source for source, _ in chain) or (name,)
    return Loaded(recipe=recipe, named=recipe, origins=origins, path=name, sources=sources), builder


def _require_types(group: Node | None, path: Path_, file: str) -> None:
    """``UserError`` for a key of one type of engine or placement in a section that is left to ``auto``."""
    for name in ("engine", "placement"):
        section = group.items.get(name) if isinstance(group, Section) else None
        if not isinstance(section, Section):
            continue
        leaf = section.items.get("type", Leaf(AUTO, file))
        if not isinstance(leaf, Leaf) or leaf.value != AUTO:
            continue
        classes = section_classes(field_types(EngineGroupConfig)[name])
        keys = {value: field_types(cls) for cls in classes for value in type_values(cls)}
        for key, node in section.items.items():
            owners = [value for value, known in keys.items() if key in known]
            if owners and AUTO not in owners:
                kind = shown_key((*path, name, "type"))
                raise UserError(
                    f"{place(file, node.origin)}: {shown_key((*path, name, key))} is a key of type "
                    f"{' or '.join(owners)}, and {kind} is auto: set {kind}: {owners[0]}"
                )


def _spread_teacher_defaults(tree: Section, file: str) -> Section:
    """Put ``teacher_defaults`` under every teacher, each value with the place where the table stands."""
    defaults, teachers = tree.items.get("teacher_defaults"), tree.items.get("teachers")
    if not isinstance(defaults, Section) or not isinstance(teachers, Section):
        return tree
    # Checked first, or a long table of unknown keys would be copied once a teacher.
    Builder(file, Recipe).dataclass(defaults, TeacherDefaultsConfig, ("teacher_defaults",), TeacherDefaultsConfig())
    spread = {
        name: merge(defaults, teacher, TeacherConfig) if isinstance(teacher, Section) else teacher
        for name, teacher in teachers.items.items()
    }
    return Section(tree.items | {"teachers": Section(spread, teachers.origin)}, tree.origin)


def _name_student(tree: Section, file: str) -> Section:
    """Put ``student.model`` where a teacher's ``model`` is ``student``. ``UserError`` where such a teacher does not say
    which of the student's weights it has (``refresh``), or another one does."""
    student, teachers = tree.items.get("student"), tree.items.get("teachers")
    model = student.items.get("model") if isinstance(student, Section) else None
    if not isinstance(model, Leaf) or not isinstance(teachers, Section):
        return tree
    named = dict(teachers.items)
    for name, teacher in teachers.items.items():
        leaf = teacher.items.get("model") if isinstance(teacher, Section) else None
        if not isinstance(teacher, Section) or not isinstance(leaf, Leaf):
            continue
        refresh, key = teacher.items.get("refresh"), shown_key(("teachers", name))
        has_refresh = refresh is not None and not (isinstance(refresh, Leaf) and refresh.value is None)
        if leaf.value == STUDENT and not has_refresh:
            raise UserError(
                f"{place(file, leaf.origin)}: {key}.model is the student itself, and {key}.refresh is absent: set "
                f"refresh: frozen or {{every_steps: N}}; a folder of that name is ./{STUDENT}"
            )
        if has_refresh and leaf.value not in (STUDENT, model.value):
            raise UserError(
                f"{place(file, leaf.origin)}: {key}.refresh is set, but {key}.model is {leaf.value!r}: set model: "
                f"{STUDENT}, or remove refresh"
            )
        if leaf.value != STUDENT:
            continue
        named[name] = Section(teacher.items | {"model": Leaf(model.value, leaf.origin)}, teacher.origin)
    return Section(tree.items | {"teachers": Section(named, teachers.origin)}, tree.origin)


def _check_size(loaded: Loaded) -> None:
    """Refuse a recipe that does not load once every default stands in it."""
    if _num_values(to_tree(loaded.recipe)) > MAX_YAML_VALUES or len(dump(loaded).encode()) > MAX_YAML_BYTES:
        raise UserError(
            f"{loaded.path}: too long once every default stands in it: a recipe has at most {MAX_YAML_VALUES} keys "
            f"and values and {MAX_YAML_BYTES} bytes: name fewer teachers, domains or files"
        )


def _num_values(tree: Any) -> int:
    """Count the keys and values of a tree."""
    if isinstance(tree, dict):
        return 1 + len(tree) + sum(map(_num_values, tree.values()))
    return 1 + sum(map(_num_values, tree)) if isinstance(tree, list) else 1


def to_tree(value: Any) -> Any:
    """A config object as plain dicts, lists and scalars, in field order."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_tree(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: to_tree(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_tree(item) for item in value]
    return value


def leaf_paths(tree: Any, path: Path_ = ()) -> dict[Path_, Any]:
    """Path -> value of every scalar, list and empty mapping of a plain tree."""
    if isinstance(tree, dict) and (tree or not path):
        return {leaf: value for key, node in tree.items() for leaf, value in leaf_paths(node, (*path, key)).items()}
    return {path: tree}


def flatten(recipe: Recipe | Mapping[str, Any]) -> dict[str, Any]:
    """Dotted path -> value of everything in a recipe, or in the plain values of one."""
    return {dotted(path): value for path, value in leaf_paths(to_tree(recipe)).items()}


def differences(one: Recipe | Mapping[str, Any], other: Recipe | Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted path -> the two values (None where absent) of every key that differs."""
    left, right = flatten(one), flatten(other)
    keys = [*left, *(key for key in right if key not in left)]
    return {
        key: (left.get(key), right.get(key))
        for key in keys
        if (key in left) != (key in right) or left.get(key) != right.get(key)
    }


def dump(loaded: Loaded, *, origins: bool = True, only_ascii: bool = False) -> str:
    """The resolved recipe as YAML that loads back to the same ``Recipe``, each value with its origin as a comment."""
    lines = [comment(f"# resolved from {', '.join(reversed(loaded.sources))}")] if origins else []
    inline = partial(dump_inline, only_ascii=only_ascii)
    _dump_section(to_tree(loaded.named), (), loaded.origins if origins else {}, inline, lines)
    return "\n".join(lines) + "\n"


def _dump_section(
    section: Mapping[str, Any], path: Path_, origins: Mapping[str, str], inline: Callable[[Any], str], lines: list[str]
) -> None:
    for key, value in section.items():
        start = f"{'  ' * len(path)}{inline(key)}:"
        if isinstance(value, dict) and value:
            lines.append(start)
            _dump_section(value, (*path, key), origins, inline, lines)
        else:
            origin = origins.get(dotted((*path, key)))
            lines.append(f"{start} {inline(value)}" + (f"  # {comment(origin)}" if origin else ""))
