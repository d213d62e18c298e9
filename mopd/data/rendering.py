"""A chat template, which is somebody's program, at work: with a limit of time, every failure in one line."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mopd.config.data import DataConfig
from mopd.text import one_line
from mopd.types import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_RENDER_S = 10.0
"""Processor time for one row; a template takes well under a millisecond. Its sandbox bounds each ``range``, but not
loops within loops."""


def render(
    messages: list[dict[str, Any]],
    cfg: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    template: str | None,
    place: str,
) -> str:
    """The text of a conversation with a generation prompt, by ``template`` in place of the tokenizer's own.

    Raises:
        UserError: headed by ``place``; whatever the template raises or makes that is no text.
    """
    try:
        with _time_limit(MAX_RENDER_S):
            rendered = tokenizer.apply_chat_template(
                messages, chat_template=template, add_generation_prompt=True, tokenize=False, **cfg.chat_template_kwargs
            )
        if not isinstance(rendered, str):
            raise TypeError(f"it gives {type(rendered).__name__}, not text")
        rendered.encode("utf-8")
    except Exception as error:  # templates are user code: they raise what they like
        source = "the tokenizer's" if template is None else f"data.chat_template {cfg.chat_template!r}"
        raise UserError(
            f"{place}: the chat template failed: {one_line(error):.200}: correct the row or the template, {source}"
        ) from error
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
