"""Names and messages of users and models, made fit for a terminal, a log or a file name."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Sequence
from typing import Any
from urllib.parse import quote

_ACTS_ON_TERMINALS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters (C0, DEL, C1), Unicode line ends, overrides of the writing direction, lone surrogates."""
_URL = re.compile(r"(\w://)([^\s'\"]+)")
MAX_NAMED_SAMPLES = 8
MAX_FILE_NAME_BYTES = 200
"""Longest file name in bytes. Linux takes 255; the rest is for numbers and suffixes."""


def visible(text: str, *, keep: str = "") -> str:
    """Spell out everything in ``text`` that a terminal or browser would act on: ESC becomes ``\\x1b``.

    ``keep`` lists characters that stay as they are, for example ``"\\n"`` if several lines are meant.
    """
    return _ACTS_ON_TERMINALS.sub(lambda found: found[0] if found[0] in keep else ascii(found[0])[1:-1], text)


def without_credentials(text: str) -> str:
    """Return ``text`` without the secrets that URLs in it may hold: user names, passwords, queries."""
    return _URL.sub(_without_secrets, text)


def _without_secrets(url: re.Match[str]) -> str:
    _, at, place = url[2].rpartition("@")
    place, mark, query = place.partition("?")
    return f"{url[1]}{'…@' if at else ''}{place}{mark}{'…' if query else ''}"


def encodable(text: str) -> str:
    """Spell out lone surrogates, which UTF-8 does not carry."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def message_of(error: BaseException | str) -> str:
    """Return an error's own words, never quoted; empty if it has none or raises when asked for them."""
    try:
        return str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    except Exception:  # a foreign ``__str__`` may raise anything; the caller goes on
        return ""


def one_line(error: BaseException | str) -> str:
    """Return a message as one line that a terminal only shows; for an error without words, its type. URLs lose
    credentials."""
    text = without_credentials(" ".join(message_of(error).split()))
    return visible(text) or type(error).__name__


def first_line(error: BaseException | str) -> str:
    """Return the first line with words of a message, in the form of ``one_line``."""
    return _lines(error)[0]


def last_line(error: BaseException | str) -> str:
    """Return the last line with words of a message, in the form of ``one_line``: the conclusion of a long report."""
    return _lines(error)[-1]


def _lines(error: BaseException | str) -> list[str]:
    """Return the lines with words, at least one."""
    lines = [line for line in message_of(error).splitlines() if line.strip()]
    return [one_line(line) for line in lines] or [one_line(error)]


def json_lines(value: Any, *, only_ascii: bool = False) -> str:
    """Return indented JSON to print: characters outside ASCII as they are, but none that a terminal acts on."""
    text = json.dumps(value, indent=2, ensure_ascii=only_ascii, allow_nan=False)
    return _ACTS_ON_TERMINALS.sub(lambda found: found[0] if found[0] == "\n" else f"\\u{ord(found[0]):04x}", text)


def file_name(name: str) -> str:
    """Return one part of a path that stands for ``name`` alone: two names never share it, and none leads elsewhere.

    Plain names stay as they are; other characters are percent-encoded, and a long name ends in its SHA-256.
    """
    encoded = quote(name.encode("utf-8", "surrogatepass"), safe=" +,=@")
    if encoded.startswith("."):
        encoded = f"%2E{encoded[1:]}"
    if len(encoded) <= MAX_FILE_NAME_BYTES:
        return encoded
    return f"{encoded[: MAX_FILE_NAME_BYTES - 65]}~{hashlib.sha256(encoded.encode()).hexdigest()}"


def shortened(text: str, most: int = 80) -> str:
    """Cut a text to ``most`` characters, of which the last three then are dots."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def first_few(texts: Sequence[str], most: int, between: str = ", ") -> str:
    """Join the first ``most`` texts, and say how many more there are."""
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return between.join(texts[:most]) + more


def named_samples(sample_ids: Sequence[int], domains: Collection[str]) -> str:
    """Return the ids of samples, at most ``MAX_NAMED_SAMPLES`` of them, and their domains, for a message."""
    ids = first_few([str(one) for one in sample_ids], MAX_NAMED_SAMPLES)
    return f"{ids} of domain {', '.join(map(repr, sorted(domains)))}"
