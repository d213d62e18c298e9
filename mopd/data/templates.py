"""Chat templates: read within limits, and run within a bound of time. A template is somebody's program."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedTokenizerBase

from mopd.files.reading import read_text
from mopd.text import one_line

MAX_TEMPLATE_BYTES = 2**20
MAX_RENDER_S = 10.0
"""Processor time for one row; a template takes well under a millisecond. Its sandbox bounds each ``range``, but not
loops within loops."""


def read_template(path: str | None) -> str | None:
    """The Jinja file ``data.chat_template``. ``UserError`` if it is absent, no text or too long."""
    if path is None:
        return None
    return read_text(path, cure="correct data.chat_template", max_bytes=MAX_TEMPLATE_BYTES)


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    template: str | None,
    arguments: Mapping[str, Any],
) -> str:
    """The messages as the template (``None``: the tokenizer's own) writes them, with a generation prompt.

    Raises:
        ValueError: one line that says why the template gives no text.
    """
    try:
        with _time_limit(MAX_RENDER_S):
            rendered = tokenizer.apply_chat_template(
                messages, chat_template=template, add_generation_prompt=True, tokenize=False, **arguments
            )
        if not isinstance(rendered, str):
            raise TypeError(f"it gives {type(rendered).__name__}, not text")
        rendered.encode("utf-8")
    except Exception as error:  # templates are user code: they raise what they like
        raise ValueError(f"{one_line(error):.200}") from error
    return rendered


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """``TimeoutError`` in the block after so much processor time of this process. Python delivers signals to its main
    thread alone: elsewhere there is no limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise TimeoutError(f"it ran for {seconds:g} s on one row: does a loop of it end?")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
