"""Texts that end a response, found in the text of its tokens: the same way for every engine."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

from mopd.data.tokenizer import load_tokenizer

FIRST_TOKENS = 4
"""Tokens more than a text can have that are read before it: some decoders drop a space at the beginning."""

_tokenizer = functools.cache(load_tokenizer)
"""An engine has one folder and makes texts for every request; a large vocabulary takes a second to load."""


class StopTexts:
    """Tells with which token a response comes to one of some texts.

    A text may begin and end inside tokens. Its last token stays whole, with what it holds beyond the text: what was
    drawn is never split, and every log-prob is that of a token as it was drawn. Special tokens count as their text.
    """

    def __init__(self, folder: str | Path, stop: Sequence[str]) -> None:
        """Read the tokenizer of a checkpoint's folder. ``UserError`` if it has none."""
        self._tokenizer, self._stop = _tokenizer(str(folder)), tuple(stop)
        self.window = max(len(text.encode()) for text in stop) + FIRST_TOKENS
        """Last tokens of a response that are enough to find a text at its end: each has a byte of it or more."""

    def is_at_end(self, tokens: Sequence[int]) -> bool:
        """Return whether one of the texts is in the last ``window`` tokens."""
        text = str(
            self._tokenizer.decode(
                list(tokens[-self.window :]), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )
        return any(stop in text for stop in self._stop)

    def first_end(self, tokens: Sequence[int], *, after: int) -> int | None:
        """Return the number of tokens up to the first that completes a text; ``None`` if none does. The first ``after``
        of them are known to complete none."""
        ends = range(after + 1, len(tokens) + 1)
        return next((num for num in ends if self.is_at_end(tokens[max(0, num - self.window) : num])), None)
