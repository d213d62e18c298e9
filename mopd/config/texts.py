"""What a recipe's texts may hold: paths and columns that the system can use, names that may be shown anywhere."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TypeVar

from mopd.files.yaml_text import MAX_KEY_CHARACTERS
from mopd.text import visible

Item = TypeVar("Item", bound=Hashable)
MAX_TEXT_BYTES = 4000
"""A path on Linux has at most 4,095."""


def check_text(text: str) -> None:
    """``ValueError`` unless ``text`` can be a path, a column, a URL: not empty, not endless, without NUL and halves of
    characters."""
    if not text:
        raise ValueError("is empty: write text, or remove the key")
    if "\0" in text:
        raise ValueError(f"{_shown(text)} holds a NUL character: remove it")
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError:
        raise ValueError(f"{_shown(text)} holds half a character (a lone surrogate): write it in UTF-8") from None
    if num_bytes > MAX_TEXT_BYTES:
        raise ValueError(f"{_shown(text)} has {num_bytes} bytes: write at most {MAX_TEXT_BYTES}")


def check_name(name: str) -> None:
    """``ValueError`` unless ``name`` may name a teacher or a domain.

    Brackets, slashes, quotes and spaces are fine, as every output escapes what it must; control characters and what
    turns the writing direction are not, as nobody could see which name it is.
    """
    check_text(name)
    if len(name) > MAX_KEY_CHARACTERS:
        raise ValueError(f"{_shown(name)} has {len(name)} characters: a name has at most {MAX_KEY_CHARACTERS}")
    if not any(letter.isprintable() and letter != " " for letter in name):
        raise ValueError(f"{_shown(name)} cannot be seen: a name has at least one character that is no space")
    if visible(name) != name:
        raise ValueError(f"{_shown(name)} holds a control character: a name is made of characters that can be seen")


def check_unrepeated(key: str, items: Iterable[Item]) -> None:
    """``ValueError`` that names the first item of list ``key`` that stands in it twice."""
    seen: set[Item] = set()
    for item in items:
        if item in seen:
            raise ValueError(f"{key} names {item!r} twice: remove one")
        seen.add(item)


def _shown(text: str) -> str:
    return ascii(text) if len(text) <= 40 else f"{text[:40]!a}…"
