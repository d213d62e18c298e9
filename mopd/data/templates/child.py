"""Program of the process in which one chat template renders.

``python -I -S child.py PARENT_PID PROGRESS_FD LIBRARY…`` imports nothing of mopd; jinja2 is in a LIBRARY. Standard
input and output are one socket, a JSON text a line::

    parent ── {"template": text, "arguments": {…}, "limits": {…}} ──> child      once
    parent ── [[message, …], …]  a batch of conversations ──────────> child
           <── {"texts": [text, …]}  or  {"error": text, "row": number in the batch} ──

The number of the current row stands in PROGRESS_FD, which the parent can still read after this process is killed.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import resource
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any

if __name__ == "__main__":
    sys.path += sys.argv[3:]

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

PR_SET_PDEATHSIG = 1
MAX_ERROR_CHARACTERS = 1000


class Limits:
    """Limits of processor time, memory and text for a template, for one row and for all of them."""

    def __init__(self, render_s: float, mean_render_s: float, memory_bytes: int, characters: int, mean_characters: int):
        self._render_s, self._mean_render_s = render_s, mean_render_s
        self._characters, self._mean_characters = characters, mean_characters
        self._left_characters = characters
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # The default action ends the process. A Python handler would wait until an operation in C returns.
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
        signal.setitimer(signal.ITIMER_PROF, render_s)

    def begin_batch(self, num_rows: int, num_bytes: int) -> None:
        """Grant a batch its share of text: twice what its rows hold, and the mean for each."""
        self._left_characters += self._mean_characters * num_rows + 2 * num_bytes

    def begin_row(self) -> None:
        """Grant a row its processor time: what the rows before it have left and the mean, at most that of one row."""
        left_s = signal.getitimer(signal.ITIMER_PROF)[0]
        signal.setitimer(signal.ITIMER_PROF, min(self._render_s, left_s + self._mean_render_s))

    def check_text(self, text: str) -> None:
        """Raise ``ValueError`` if this text or all of them together are too long, or cannot be encoded."""
        self._left_characters -= len(text)
        if len(text) > self._characters:
            raise ValueError(f"its text has {len(text)} characters, the limit is {self._characters}")
        if self._left_characters < 0:
            raise ValueError(f"its texts have more than {self._mean_characters} characters a row beyond the rows' own")
        text.encode("utf-8")


class GenerationTag(Extension):
    """The tag around the model's own messages. transformers can mark its tokens; here it is text like any other."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Any) -> nodes.Node:
        """Turn the enclosed statements into a call, which gives them a scope of their own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method(self._body.__name__), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


def tojson(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return JSON without jinja's escapes for HTML."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: Any) -> None:
    """Refuse the conversation."""
    raise TemplateError(message)


def strftime_now(format: str) -> str:
    """Return the date in the form ``format``."""
    return datetime.now().strftime(format)


def make_environment() -> ImmutableSandboxedEnvironment:
    """Return the environment of a template, as in ``transformers.utils.chat_template_utils`` of transformers 5.

    That module takes a second to import; ``tests/unit/data/test_templates.py`` compares the two.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def compiled(template: str, arguments: dict[str, Any]) -> Callable[[list[Any]], str]:
    """Return a function that renders a conversation, as a tokenizer's ``apply_chat_template`` does."""
    for name in ("tools", "documents"):
        value = arguments.setdefault(name, None)
        if value is not None and not (isinstance(value, list) and all(isinstance(one, dict) for one in value)):
            raise TypeError(f"{name} is no list of objects")
    program = make_environment().from_string(template)
    return lambda messages: program.render({**arguments, "messages": messages, "add_generation_prompt": True})


def described(error: Exception, memory_bytes: int) -> str:
    """Return an error in words, whatever its own method for that does."""
    try:
        if isinstance(error, MemoryError):
            return f"it took more than {memory_bytes / 2**20:g} MiB of memory"
        return str(error)[:MAX_ERROR_CHARACTERS] or type(error).__name__
    except Exception:
        return type(error).__name__


def main(parent_pid: int, progress_fd: int) -> None:
    """Render batches until standard input closes."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # the parent died before the call above
        os._exit(1)
    progress = mmap.mmap(progress_fd, mmap.PAGESIZE)
    calls, answers = sys.stdin.buffer, sys.stdout.buffer
    settings = json.loads(calls.readline())
    limits, memory_bytes = Limits(**settings["limits"]), settings["limits"]["memory_bytes"]
    render = None
    for line in calls:
        row, texts = 0, []
        try:
            conversations = json.loads(line)
            limits.begin_batch(len(conversations), len(line))
            for row, messages in enumerate(conversations):
                progress[:4] = row.to_bytes(4, "little")
                limits.begin_row()
                if render is None:
                    render = compiled(settings["template"], settings["arguments"])
                texts.append(render(messages))
                limits.check_text(texts[-1])
            answer = json.dumps({"texts": texts}).encode()
        except Exception as error:  # a template raises what it likes
            texts.clear()
            answer = json.dumps({"error": described(error, memory_bytes), "row": row}).encode()
        answers.write(answer)
        answers.write(b"\n")  # one by one: together they are a copy, which a template could make too large
        answers.flush()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
