"""Names and messages of users and models, made fit for where they go: a terminal, a log, a file name."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any
from urllib.parse import quote

_ACTS_ON_TERMINALS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters (C0, DEL, C1), line ends of Unicode, overrides of the writing direction, halves of characters."""
_URL = re.compile(r"(\w://)([^\s'\"]+)")
MAX_FILE_NAME_BYTES = 200
"""Linux takes 255; what is left is for numbers and suffixes."""


def visible(text: str, *, keep: str = "") -> str:
    """``text`` with what a terminal or browser would act on spelled out: ESC becomes ``\\x1b``.

    ``keep`` lists characters that stay as they are, for example ``"\\n"`` where lines are meant.
    """
    return _ACTS_ON_TERMINALS.sub(lambda found: found[0] if found[0] in keep else ascii(found[0])[1:-1], text)


def without_credentials(text: str) -> str:
    """``text`` without what URLs in it may tell: user names, passwords, queries."""
    return _URL.sub(_without_secrets, text)


def _without_secrets(url: re.Match[str]) -> str:
    _, at, place = url[2].rpartition("@")
    place, mark, query = place.partition("?")
    return f"{url[1]}{'…@' if at else ''}{place}{mark}{'…' if query else ''}"


def encodable(text: str) -> str:
    """Spell out halves of characters (lone surrogates), which UTF-8 does not carry."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def message_of(error: BaseException | str) -> str:
    """An error's own words, never quoted; empty where it has none or cannot be asked for them."""
    try:
        return str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    except Exception:  # a ``__str__`` of somebody else's; what this is called for goes on
        return ""


def one_line(error: BaseException | str) -> str:
    """A message on one line that a terminal only shows; an error without words by its type. URLs lose credentials."""
    text = without_credentials(" ".join(message_of(error).split()))
    return visible(text) or type(error).__name__


def first_line(error: BaseException | str) -> str:
    """The first line with words of a message, shown as ``one_line`` shows it."""
    return _lines(error)[0]


def last_line(error: BaseException | str) -> str:
    """The last line with words of a message, shown as ``one_line`` shows it: what a long report comes to."""
    return _lines(error)[-1]


def _lines(error: BaseException | str) -> list[str]:
    """At least one."""
    lines = [line for line in message_of(error).splitlines() if line.strip()]
    return [one_line(line) for line in lines] or [one_line(error)]


def json_lines(value: Any, *, only_ascii: bool = False) -> str:
    """Indented JSON to print: characters outside ASCII as they are, but none that a terminal acts on."""
    text = json.dumps(value, indent=2, ensure_ascii=only_ascii, allow_nan=False)
    return _ACTS_ON_TERMINALS.sub(lambda found: found[0] if found[0] == "\n" else f"\\u{ord(found[0]):04x}", text)


def file_name(name: str) -> str:
    """One part of a path that stands for ``name`` alone: two names never share it, and none leads elsewhere.

    Plain names stay as they are; other characters are percent-encoded, and a long name ends in its SHA-256.
    """
    encoded = quote(name.encode("utf-8", "surrogatepass"), safe=" +,=@")
    if encoded.startswith("."):
        encoded = f"%2E{encoded[1:]}"
    if len(encoded) <= MAX_FILE_NAME_BYTES:
        return encoded
    return f"{encoded[: MAX_FILE_NAME_BYTES - 65]}~{hashlib.sha256(encoded.encode()).hexdigest()}"
