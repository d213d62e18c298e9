"""Checks of single values of a recipe: ranges of numbers, what texts and names may hold, addresses of servers.

Each error names the field, its value and what to set. Every number of a recipe passes one of these checks, so that none
is left that a rank, a timer or a fp32 tensor cannot hold.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cache, partial
from typing import Annotated, Any, NewType, TypeVar, get_args, get_type_hints
from urllib.parse import urlsplit

from mopd.base.files.yaml_text import MAX_KEY_CHARACTERS
from mopd.base.text import visible

Item = TypeVar("Item", bound=Hashable)
Lines = NewType("Lines", str)
"""A text that may have several lines; any other has one."""
MAX_TEXT_BYTES = 4000
"""A path on Linux has at most 4,095."""
MAX_URL_CHARACTERS = 2048
MAX_HOST_CHARACTERS = 253
_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
"""One part of a host name, as DNS and container networks allow it."""
MAX_COUNT = 2**31 - 1
"""Largest count of rows, tokens, steps: what 32-bit indices hold."""
MAX_TOKENS = 2**24
"""Largest number of tokens of one sequence: sixteen times the longest context of any model."""
MAX_BYTES = 2**50
MAX_PROCESSES = 65_536
"""Ranks, CPUs or GPUs, whatever the cluster."""
MAX_REPLICAS = 1024
MAX_STOP_TEXTS, MAX_STOP_CHARACTERS, MAX_STOP_IDS = 64, 256, 1024
"""Each drawn token is held against all stop texts."""
MAX_NUMBER = 1e30
"""Largest number that is no count; fp32 ends at 3.4e38, and numbers are multiplied."""
MIN_POSITIVE = 1e-30
"""Smallest number above 0, as fp32 ends at 1.2e-38."""
MIN_SECONDS, MAX_SECONDS = 0.001, 2_000_000.0
"""A millisecond, below which gloo takes a deadline for none, and 23 days, as poll(2) counts milliseconds in 32 bits."""
MAX_SEED = 2**63 - 1
"""torch takes 64 bits, and Megatron adds a rank's number."""


def require_at_least(name: str, value: float, low: float, high: float | None = None) -> None:
    """Raise ``ValueError`` unless ``low <= value <= high``; ``high`` is ``MAX_COUNT`` or ``MAX_NUMBER`` by type."""
    if not math.isfinite(value) or value < low:
        raise ValueError(f"{name} is {value}: set {low} or more")
    if high is None:
        high = MAX_COUNT if isinstance(value, int) else MAX_NUMBER
    if value > high:
        raise ValueError(f"{name} is {value}: set at most {high:.15g}")


def require_positive(name: str, value: float) -> None:
    """Raise ``ValueError`` unless ``value`` is from ``MIN_POSITIVE`` to ``MAX_NUMBER``."""
    if not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} is {value}: set a positive number")
    if not MIN_POSITIVE <= value <= MAX_NUMBER:
        raise ValueError(f"{name} is {value}: set a number from {MIN_POSITIVE} to {MAX_NUMBER}")


def require_seconds(name: str, value: float) -> None:
    """Raise ``ValueError`` unless ``value`` is from ``MIN_SECONDS`` to ``MAX_SECONDS``."""
    require_positive(name, value)
    if not MIN_SECONDS <= value <= MAX_SECONDS:
        raise ValueError(f"{name} is {value}: set {MIN_SECONDS} to {MAX_SECONDS:.0f} seconds")


def require_seed(name: str, value: int) -> None:
    """Raise ``ValueError`` unless torch takes ``value`` for a seed."""
    if not -(2**63) <= value <= MAX_SEED:
        raise ValueError(f"{name} is {value}: set a whole number of 64 bits, at most {MAX_SEED}")


def require_fraction(name: str, value: float, *, low_open: bool = False, high_open: bool = False) -> None:
    """Raise ``ValueError`` unless ``value`` lies in [0, 1], ends excluded where named open."""
    if not (value > 0 if low_open else value >= 0) or not (value < 1 if high_open else value <= 1):
        low, high = "(" if low_open else "[", ")" if high_open else "]"
        raise ValueError(f"{name} is {value}: set a number in {low}0, 1{high}")
    if 0 < value < MIN_POSITIVE:
        raise ValueError(f"{name} is {value}: set {MIN_POSITIVE} or more")


def at_least(low: float, high: float | None = None) -> Callable[[str, float], None]:
    """Return ``require_at_least`` with these bounds, to annotate a field with."""
    return partial(require_at_least, low=low, high=high)


Count = Annotated[int, at_least(1)]
"""A number of things, at least one."""
Whole = Annotated[int, at_least(0)]
"""A whole number that may be 0."""
NotNegative = Annotated[float, at_least(0)]
Positive = Annotated[float, require_positive]
Fraction = Annotated[float, require_fraction]
"""A share from 0 to 1, both included."""
Share = Annotated[float, partial(require_fraction, low_open=True)]
"""A share above 0."""
Decay = Annotated[float, partial(require_fraction, high_open=True)]
"""A share below 1."""
Seconds = Annotated[float, require_seconds]
Processes = Annotated[int, at_least(1, MAX_PROCESSES)]
"""A number of ranks, CPUs or GPUs, at least one."""


class Checked:
    """Base of sections whose numbers have ranges, or that have checks of their own."""

    __slots__ = ()

    def __post_init__(self) -> None:
        check_ranges(self)
        self.check()

    def check(self) -> None:
        """Raise ``ValueError`` that names the key to set; every number is in its range by then."""


def check_ranges(section: Any) -> None:
    """Hold every field of a section against the range that annotates it; ``ValueError`` names the field."""
    for name, check in _range_checks(section.__class__):
        value = getattr(section, name)
        if value is not None:
            check(name, value)


@cache
def _range_checks(cls: type) -> tuple[tuple[str, Callable[[str, Any], None]], ...]:
    """Return the checks in the annotations ``Annotated[type, check]`` and ``Annotated[type, check] | None``."""
    hints = get_type_hints(cls, include_extras=True)
    return tuple(
        (name, check)
        for name, hint in hints.items()
        for member in (hint, *get_args(hint))
        for check in getattr(member, "__metadata__", ())
    )


def check_text(text: str, *, keep: str = "") -> None:
    """``ValueError`` unless ``text`` can be a path, a name, a URL, a line of a script: not empty, not endless, without
    control characters, but for those of ``keep``, and halves of characters."""
    if not text:
        raise ValueError("is empty: write text, or remove the key")
    if "\0" in text:
        raise ValueError(f"{_shown(text)} holds a NUL character: remove it")
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError:
        raise ValueError(f"{_shown(text)} holds half a character (a lone surrogate): write it in UTF-8") from None
    if visible(text, keep=keep) != text:
        example = "" if "\n" in keep else ", such as a line end"
        raise ValueError(f"{_shown(text)} holds a control character{example}: remove it")
    if num_bytes > MAX_TEXT_BYTES:
        raise ValueError(f"{_shown(text)} has {num_bytes} bytes: write at most {MAX_TEXT_BYTES}")


def check_name(name: str) -> None:
    """``ValueError`` unless ``name`` may name a teacher or a domain.

    Brackets, slashes, quotes and spaces are fine, as every output escapes what it must; control characters and what
    turns the writing direction are not, as a reader could not see which name it is.
    """
    check_text(name)
    if len(name) > MAX_KEY_CHARACTERS:
        raise ValueError(f"{_shown(name)} has {len(name)} characters: a name has at most {MAX_KEY_CHARACTERS}")
    if not any(letter.isprintable() and letter != " " for letter in name):
        raise ValueError(f"{_shown(name)} cannot be seen: a name has at least one character that is no space")


def check_reference(key: str, reference: str) -> None:
    """``ValueError`` unless ``reference`` names code: ``file.py:name``, ``package.module:name``, or an entry point."""
    source, colon, name = reference.rpartition(":")
    dotted = source.replace(".", "").replace("_", "").isalnum()
    if not (name.isidentifier() and (source.endswith(".py") or dotted) if colon else reference):
        raise ValueError(
            f"{key} is {_shown(reference)}: write file.py:name, package.module:name, or the name of an entry point"
        )


def check_unrepeated(key: str, items: Iterable[Item]) -> None:
    """``ValueError`` that names the first item of list ``key`` that stands in it twice."""
    seen: set[Item] = set()
    for item in items:
        if item in seen:
            raise ValueError(f"{key} names {item!r} twice: remove one")
        seen.add(item)


def check_stop(texts: Sequence[str]) -> None:
    """``ValueError`` for stop texts that are too many, empty or too long."""
    if len(texts) > MAX_STOP_TEXTS:
        raise ValueError(f"stop has {len(texts)} texts: name at most {MAX_STOP_TEXTS}")
    for text in texts:
        if not text:
            raise ValueError("stop has an empty text, with which every response would end at once: remove it")
        if len(text) > MAX_STOP_CHARACTERS:
            raise ValueError(f"stop has a text of {len(text)} characters: name at most {MAX_STOP_CHARACTERS}")
    check_unrepeated("stop", texts)


def _shown(text: str) -> str:
    return ascii(text) if len(text) <= 40 else f"{text[:40]!a}…"


def check_server_url(url: str) -> None:
    """``http(s)://host[:port][/path]`` in plain ASCII, and nothing else.

    A user name, a password or a query is refused, since every log would show it: tokens go into ``token_file``.

    Raises:
        ValueError: what is wrong, with the URL as ``shown_url`` shows it.
    """
    problem = _url_problem(url)
    if problem:
        raise ValueError(f"{shown_url(url)!r}: {problem}")


def shown_url(url: str) -> str:
    """The URL without what may be secret in it (anything before an @, a query, a fragment), fit for a terminal."""
    scheme, separator, rest = url.partition("//")
    if "@" in url:
        scheme = scheme if separator and "@" not in scheme else ""
        rest = f"…@{url.rpartition('@')[2]}"
        separator = "//" if scheme else ""
    kept = re.split(r"[?#]", rest, maxsplit=1)
    text = visible(f"{scheme}{separator}{kept[0]}{'?…' if len(kept) > 1 else ''}")
    return text if len(text) <= 300 else f"{text[:300]}…"


def _url_problem(url: str) -> str:
    """Why it is refused; empty for a good one."""
    if not url.startswith(("http://", "https://")):
        return "begin it with http:// or https://"
    if len(url) > MAX_URL_CHARACTERS:
        return f"longer than {MAX_URL_CHARACTERS} characters: shorten it"
    if not re.fullmatch(r"[!-~]+", url) or "\\" in url:
        return "has a space, a control character or one outside ASCII: write the host in ASCII (xn--…)"
    if "@" in url:
        return "has a user name or password in it, which logs would show: put a token into a file, named as token_file"
    if "?" in url or "#" in url:
        return "has a query or fragment, which logs would show: remove it"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return "its host or port cannot be read: write http://host:port with a port of 1 to 65535"
    if port == 0 or parts.netloc.endswith(":"):
        return "port 0 and an empty port are none: write http://host:port with a port of 1 to 65535"
    return "" if _is_host(host, is_bracketed=parts.netloc.startswith("[")) else "its host is no name and no address"


def _is_host(host: str, *, is_bracketed: bool) -> bool:
    if is_bracketed:
        try:
            return isinstance(ipaddress.ip_address(host), ipaddress.IPv6Address) and "%" not in host
        except ValueError:
            return False
    labels = host.removesuffix(".").split(".")
    if len(labels) == 4 and all(label.isdigit() for label in labels):
        try:
            ipaddress.IPv4Address(".".join(labels))
        except ValueError:
            return False
    return len(host) <= MAX_HOST_CHARACTERS and all(_LABEL.fullmatch(label) for label in labels)
