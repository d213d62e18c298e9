"""YAML from untrusted sources: strict, bounded in size, depth, count and magnitude; and scalars that load back.

PyYAML alone expands aliases without end, collapses mappings under the tag of a scalar (``!!str {=: 1}`` is text),
raises KeyError for ``!!bool maybe`` and reads ``1:30`` as 90. Here a text becomes ``Marked`` values within limits, or
one line that says what is wrong and where.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mopd.base.files.json_text import MAX_DEPTH
from mopd.base.files.reading import read_text, shown_path
from mopd.base.text import one_line, visible
from mopd.base.types import UserError

MAX_YAML_BYTES = 2**20
"""Longest text; PyYAML reads about a million characters a second."""
MAX_YAML_VALUES = 20_000
"""Largest number of keys and values of one text, aliases written out; PyYAML composes about 40,000 a second."""
MAX_KEY_CHARACTERS = 100
"""Longest key: written with escapes it stays below the 1,024 characters within which YAML looks for its colon."""
EXPONENT = re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+")
"""Pattern of numbers such as ``1e-6``, which YAML 1.1 reads as text."""
_REFUSED = re.compile("[^\t\n\r\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that YAML forbids outside escapes, and U+0085, U+2028, U+2029, which it would fold like line ends."""
_SURROGATES = re.compile("[\ud800-\udfff]")
_WORD = re.compile(r"(?!\.\.\.)[A-Za-z_./][A-Za-z0-9_./-]*")
_REPRESENTER = yaml.representer.SafeRepresenter()
_RESOLVER = yaml.resolver.Resolver()
_TAG = "tag:yaml.org,2002:"


class YamlError(ValueError):
    """One line that says what is wrong in a YAML text."""

    def __init__(self, problem: str, *, line: int | None = None, path: tuple[str, ...] = ()) -> None:
        super().__init__(problem)
        self.line = line
        """Line of the problem, counted from 1."""
        self.path = path
        """Keys from the root to the value."""


@dataclass(frozen=True, slots=True)
class Date:
    """A scalar that YAML 1.1 reads as a date or time; no file that we read holds one."""

    text: str

    def __repr__(self) -> str:
        return f"the date {self.text} (in quotes it is text)"


@dataclass(frozen=True, slots=True)
class Marked:
    """A value and its line. Aliases share one object, never in a circle."""

    value: bool | int | float | str | Date | list[Marked] | dict[str, tuple[int, Marked]] | None
    """The value. Mappings give each key's own line. Floats may be infinite or NaN."""
    line: int


def compose_yaml(text: str) -> Marked | None:
    """Return a YAML text as values that remember their lines; None for an empty text.

    Expanding every alias gives at most ``MAX_YAML_VALUES`` values, ``MAX_YAML_BYTES`` characters, ``MAX_DEPTH`` levels.

    Raises:
        YamlError: it is no YAML, too much, or has a tag, merge key or number that is not allowed here.
    """
    if len(text) > MAX_YAML_BYTES:
        raise YamlError(f"longer than {MAX_YAML_BYTES} characters")
    if found := _REFUSED.search(text):
        problem = f"character U+{ord(found[0]):04X} may stand in YAML as an escape in double quotes only"
        raise YamlError(f"not readable as YAML: {problem}", line=text.count("\n", 0, found.start()) + 1)
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        return None if root is None else _Reader().marked(root, ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = one_line(str(error.problem or error.context))[:200]
        line = None if mark is None else mark.line + 1
        raise YamlError(f"not readable as YAML: {problem}", line=line) from None
    except YamlError:
        raise
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # raised by chr() and int() inside PyYAML
        problem = f"an escape or version number is out of range ({one_line(error):.100})"
        raise YamlError(f"not readable as YAML: {problem}", line=loader.line + 1) from None
    finally:
        loader.dispose()


def plain(marked: Marked) -> Any:
    """Return the value without its lines: dicts, lists and scalars."""
    value = marked.value
    if isinstance(value, dict):
        return {key: plain(item) for key, (_, item) in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def read_yaml_object(path: str | Path, *, cure: str) -> dict[str, Any]:
    """Return the mapping in a YAML file, as plain values.

    Raises:
        UserError: with path, line and ``cure``, for what ``read_text`` and ``compose_yaml`` refuse and for any other
            kind of value.
    """
    text = read_text(path, cure=cure, max_bytes=MAX_YAML_BYTES)
    try:
        root = compose_yaml(text)
        if root is not None:
            _check_plain(root)
    except YamlError as error:
        line = "" if error.line is None else f":{error.line}"
        raise UserError(f"{shown_path(path)}{line}: {error}: {cure}") from error
    if root is None or not isinstance(root.value, dict):
        raise UserError(f"{shown_path(path)}: holds no keys with values: {cure}")
    value: dict[str, Any] = plain(root)
    return value


def _check_plain(marked: Marked) -> None:
    """Raise ``YamlError`` for a date and for a number that is not finite, which JSON could not express."""
    value = marked.value
    if isinstance(value, Date) or (isinstance(value, float) and not math.isfinite(value)):
        raise YamlError(f"{value!r} has no place here", line=marked.line)
    if isinstance(value, dict):
        for _, item in value.values():
            _check_plain(item)
    elif isinstance(value, list):
        for item in value:
            _check_plain(item)


def dump_inline(value: Any, *, only_ascii: bool = False) -> str:
    """Return YAML of a scalar, a list or a mapping of plain values on one line, which loads back to the same."""
    if value is None or isinstance(value, (bool, int, float)) or (isinstance(value, str) and _is_word(value)):
        text: str = _REPRESENTER.represent_data(value).value  # safe_dump's result, in a fraction of its time
        return text
    form: dict[str, Any] = {"default_flow_style": True, "width": math.inf, "sort_keys": False}
    text = yaml.safe_dump(value, allow_unicode=True, **form)
    text = text.removesuffix("\n").removesuffix("\n...")
    if _REFUSED.search(text) or "\n" in text or (only_ascii and not text.isascii()):
        text = yaml.dump(value, Dumper=_Quoting, **form).removesuffix("\n")
    return text


def _is_word(text: str) -> bool:
    """Return whether a text has only characters of words and paths, and YAML reads it as text."""
    return _WORD.fullmatch(text) is not None and _RESOLVER.resolve(yaml.ScalarNode, text, (True, False)) == f"{_TAG}str"


def comment(text: str) -> str:
    """Return text that may stand behind ``#`` without ending the comment or the file."""
    return _REFUSED.sub(lambda found: ascii(found[0])[1:-1], text.replace("\n", "\\n").replace("\r", "\\r"))


class _Quoting(yaml.SafeDumper):
    """Dumper that puts every text in double quotes, with escapes for all that is not ASCII."""


_Quoting.add_representer(str, lambda dumper, text: dumper.represent_scalar(f"{_TAG}str", text, style='"'))


class _Loader(yaml.SafeLoader):
    """PyYAML's loader, which stops at the limits while it composes: what is too deep or too long never gets built."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._num_nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._depth += 1
        self._num_nodes += 1
        line = self.peek_event().start_mark.line + 1
        if self._depth > MAX_DEPTH:
            raise YamlError(f"nested deeper than {MAX_DEPTH}", line=line)
        if self._num_nodes > MAX_YAML_VALUES:
            raise YamlError(f"more than {MAX_YAML_VALUES} keys and values", line=line)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


@dataclass(frozen=True, slots=True)
class _Size:
    """Size of a node with its aliases written out."""

    values: int
    characters: int
    depth: int


class _Reader:
    """Converter from composed nodes to ``Marked`` values: each node once, however many aliases name it."""

    def __init__(self) -> None:
        self._done: dict[int, tuple[Marked, _Size]] = {}
        self._open: set[int] = set()

    def marked(self, node: yaml.Node, path: tuple[str, ...]) -> Marked:
        """Return the value of the root node."""
        return self._node(node, path)[0]

    def _node(self, node: yaml.Node, path: tuple[str, ...]) -> tuple[Marked, _Size]:
        if id(node) in self._done:
            return self._done[id(node)]
        line = node.start_mark.line + 1
        if id(node) in self._open:
            raise YamlError("an alias refers to the value that holds it: write the value out", line=line)
        self._open.add(id(node))
        value: Any
        if isinstance(node, yaml.ScalarNode):
            value = self._scalar(node, path)
            size = _Size(1, len(node.value), 1)
        elif isinstance(node, yaml.MappingNode):
            value, size = self._mapping(node, path)
        else:
            self._check_tag(node, "seq", path)
            items = [self._node(item, path) for item in node.value]
            value, size = [item for item, _ in items], _together(1, 0, [size for _, size in items])
        if size.values > MAX_YAML_VALUES or size.characters > MAX_YAML_BYTES or size.depth > MAX_DEPTH:
            limits = f"{MAX_YAML_VALUES} keys and values, {MAX_YAML_BYTES} characters or {MAX_DEPTH} levels"
            raise YamlError(f"more than {limits}, aliases written out", line=line, path=path)
        self._open.discard(id(node))
        done = self._done[id(node)] = Marked(value, line), size
        return done

    def _mapping(self, node: yaml.MappingNode, path: tuple[str, ...]) -> tuple[dict[str, tuple[int, Marked]], _Size]:
        self._check_tag(node, "map", path)
        items: dict[str, tuple[int, Marked]] = {}
        sizes: list[_Size] = []
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            key = self._key(key_node, path)
            if key in items:
                raise YamlError(f"key {key!r} repeats line {items[key][0]}: remove one of them", line=line)
            value, size = self._node(value_node, (*path, key))
            items[key] = line, value
            sizes.append(size)
        return items, _together(1 + len(items), sum(map(len, items)), sizes)

    def _key(self, node: yaml.Node, path: tuple[str, ...]) -> str:
        line = node.start_mark.line + 1
        if not isinstance(node, yaml.ScalarNode):
            raise YamlError("a key is a list or a mapping: write text", line=line, path=path)
        if node.tag == f"{_TAG}merge":
            raise YamlError("merge keys (<<) are not read: write the keys out", line=line, path=path)
        key = self._scalar(node, path)
        if not isinstance(key, str):
            raise YamlError(f"key {key!r} is not text: put it in quotes", line=line)
        if not key or len(key) > MAX_KEY_CHARACTERS:
            shown = f"{key[:40]!r}…" if key else "''"
            raise YamlError(f"key {shown}: write 1 to {MAX_KEY_CHARACTERS} characters", line=line, path=path)
        return key

    def _scalar(self, node: yaml.ScalarNode, path: tuple[str, ...]) -> bool | int | float | str | Date | None:
        """Return the value of a scalar. Raise ``YamlError`` if its text is none of its tag's."""
        text, kind = node.value, node.tag.removeprefix(_TAG)
        looks = _RESOLVER.resolve(yaml.ScalarNode, text, (True, False)).removeprefix(_TAG)
        try:
            if kind == "str":
                return _text(text)
            if kind == "timestamp" == looks:
                return Date(text)
            if kind == "float" and (looks in ("int", "float") or EXPONENT.fullmatch(text)):
                return _float(text)
            if kind == looks == "int":
                return _int(text)
            if kind == looks == "bool":
                return text.lower() in ("yes", "true", "on")
            if kind == looks == "null":
                return None
            if kind == looks:
                raise ValueError(f"{text!r} has a meaning of its own in YAML: put it in quotes")
        except ValueError as error:
            raise YamlError(str(error), line=node.start_mark.line + 1, path=path) from None
        raise _foreign(node, path, f"{text[:40]!r} is no value of tag {node.tag[:80]!r}")

    def _check_tag(self, node: yaml.Node, kind: str, path: tuple[str, ...]) -> None:
        if node.tag != f"{_TAG}{kind}":
            raise _foreign(node, path, f"tag {node.tag[:80]!r} has no place here")


def _foreign(node: yaml.Node, path: tuple[str, ...], problem: str) -> YamlError:
    key = f"{visible(path[-1])}: " if path else ""
    return YamlError(f"not readable as YAML: {key}{problem}: remove the tag", line=node.start_mark.line + 1)


def _together(values: int, characters: int, sizes: list[_Size]) -> _Size:
    return _Size(
        values + sum(size.values for size in sizes),
        characters + sum(size.characters for size in sizes),
        1 + max((size.depth for size in sizes), default=0),
    )


def _text(text: str) -> str:
    """Join surrogate pairs, as JSON's escapes mean them. Raise ``ValueError`` for a lone surrogate."""
    if not _SURROGATES.search(text):
        return text
    try:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
    except UnicodeDecodeError:
        raise ValueError(f"text {text[:40]!a} holds half a character (a lone surrogate)") from None


def _int(text: str) -> int:
    """Return a whole number of YAML 1.1 within 64 bits. Refuse those that look decimal and are not."""
    digits = text.replace("_", "").lstrip("+-").lower()
    if ":" in digits:
        raise ValueError(f"{text[:40]} is a number of base 60 in YAML: write it in decimal, or in quotes for text")
    if re.fullmatch("0[0-9]+", digits):
        raise ValueError(f"{text[:40]} is an octal number in YAML: remove the leading zero, or put text in quotes")
    base = {"0x": 16, "0b": 2}.get(digits[:2], 10)
    digits = digits if base == 10 else digits[2:]
    value = int(digits, base) if 0 < len(digits) <= 64 else None
    if value is not None and text.startswith("-"):
        value = -value
    if value is None or not -(2**63) <= value < 2**64:
        raise ValueError(f"the whole number {text[:20]}{'…' * (len(text) > 20)} is beyond 64 bits")
    return value


def _float(text: str) -> float:
    digits = text.replace("_", "").lower()
    if ":" in digits:
        raise ValueError(f"{text[:40]} is a number of base 60 in YAML: write it in decimal, or in quotes for text")
    sign = -1.0 if digits.startswith("-") else 1.0
    if digits.lstrip("+-") == ".inf":
        return sign * math.inf
    if digits == ".nan":
        return math.nan
    return float(digits)
