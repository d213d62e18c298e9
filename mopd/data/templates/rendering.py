"""Rendering of chat templates, which are untrusted programs: in a process with limits, every failure in one line."""

from __future__ import annotations

import json
import os
import reprlib
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import markupsafe

from mopd.base.files.reading import read_text, shown_path
from mopd.base.text import one_line
from mopd.base.types import UserError
from mopd.config.data import DataConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROGRAM = Path(__file__).with_name("child.py")
MAX_TEMPLATE_BYTES = 2**20
MAX_RENDER_S = 2.0
"""Limit of processor time for one row; a template takes well under a millisecond."""
MEAN_RENDER_S = 0.02
"""Limit of processor time per row over many of them."""
MAX_MEMORY_BYTES = 2**29
"""Address space of the process. The longest prompt takes a quarter of it."""
MAX_PROMPT_CHARACTERS = 4 * 2**20
"""Longest prompt. A longer one is a mistake in the data, and some tokenizers take minutes to tokenize it."""
MEAN_TEXT_CHARACTERS = 2**16
"""Limit of text per row over many of them, beyond twice what the rows hold."""
ESCAPE_CHARACTERS = 6
"""Most bytes that one character takes in JSON."""
BATCH_ROWS = 256
BATCH_CHARACTERS = 2**20
DEADLINE_S = 600.0
"""Deadline for an answer, against a process that was stopped (SIGSTOP). Limits of processor time end a template."""
END_S = 10.0


class Renderer:
    """Renders conversations, one batch while the next is read. Its process lives from the first batch to the context's
    end.

    Not thread-safe.
    """

    def __init__(self, cfg: DataConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raise ``UserError`` if the file of ``data.chat_template`` is set and cannot be read."""
        self._cfg, self._tokenizer = cfg, tokenizer
        self._template: str | None = None
        """Template in place of the tokenizer's own."""
        if cfg.chat_template is not None:
            cure = "correct data.chat_template"
            self._template = read_text(cfg.chat_template, cure=cure, max_bytes=MAX_TEMPLATE_BYTES)
        self.has_template = self._template is not None or tokenizer.chat_template is not None
        self._process: _TemplateProcess | None = None
        self._rows: list[str] = []
        """JSON of conversations that wait for their batch to be full."""
        self._num_characters = 0
        self._places: list[str] = []
        self._sent: list[str] = []
        """Places of the batch that the process is rendering."""
        self._texts: list[str] = []

    def __enter__(self) -> Renderer:
        return self

    def __exit__(self, *error: object) -> None:
        if self._process is not None:
            self._process.end()

    def put(self, messages: list[dict[str, Any]], place: str) -> None:
        """Add a conversation; ``place`` heads its errors.

        Raises:
            UserError: as ``texts`` does, for earlier conversations too; this one is too long.
        """
        row = json.dumps(messages, default=_plain)
        if len(row) > ESCAPE_CHARACTERS * MAX_PROMPT_CHARACTERS:
            raise UserError(f"{place}: the messages have {len(row)} characters as JSON: shorten or remove the row")
        self._rows.append(row)
        self._places.append(place)
        self._num_characters += len(row)
        if len(self._rows) >= BATCH_ROWS or self._num_characters >= BATCH_CHARACTERS:
            self._send()

    def texts(self) -> list[str]:
        """Return the texts, each with a generation prompt, of the conversations since the last call, in their order.

        Raises:
            UserError: the template raises something, makes no text that can be encoded, or exceeds a limit.
        """
        self._send()
        self._receive()
        texts, self._texts = self._texts, []
        return texts

    def _send(self) -> None:
        self._receive()
        if not self._rows:
            return
        if self._process is None:
            self._process = _TemplateProcess(self._settings(self._places[0]))
        self._process.send(f"[{', '.join(self._rows)}]\n".encode())
        self._sent, self._places, self._rows, self._num_characters = self._places, [], [], 0

    def _receive(self) -> None:
        if not self._sent:
            return
        assert self._process is not None
        places, self._sent = self._sent, []
        answer = self._process.receive()
        if "error" in answer:
            raise self._failure(places[min(answer["row"], len(places) - 1)], answer["error"])
        self._texts += answer["texts"]

    def _settings(self, place: str) -> bytes:
        try:
            template = self._tokenizer.get_chat_template(self._template)
            if not isinstance(template, str):
                raise TypeError(f"it is {reprlib.repr(template)}, not text")
            if len(template) > MAX_TEMPLATE_BYTES:
                raise ValueError(f"it has {len(template)} characters, the limit is {MAX_TEMPLATE_BYTES}")
        except Exception as error:  # the tokenizer has none, several, or something else
            raise self._failure(place, str(error)) from error
        limits = {
            "render_s": MAX_RENDER_S, "mean_render_s": MEAN_RENDER_S, "memory_bytes": MAX_MEMORY_BYTES,
            "characters": MAX_PROMPT_CHARACTERS, "mean_characters": MEAN_TEXT_CHARACTERS,
        }  # fmt: skip
        arguments = {**self._tokenizer.special_tokens_map, **self._cfg.chat_template_kwargs}
        settings = {"template": template, "arguments": arguments, "limits": limits}
        return json.dumps(settings, default=_plain).encode() + b"\n"

    def _failure(self, place: str, problem: str) -> UserError:
        whose = f"data.chat_template {self._cfg.chat_template!r}"
        if self._template is None:
            whose = f"the tokenizer's in {shown_path(self._tokenizer.name_or_path)}"
        return UserError(
            f"{place}: the chat template failed: {one_line(problem):.200}: correct the row or the template, {whose}"
        )


class _TemplateProcess:
    """A running ``child.py``."""

    def __init__(self, settings: bytes) -> None:
        with ExitStack() as on_error:
            self._socket, theirs = socket.socketpair()
            on_error.callback(self._socket.close)
            self._socket.settimeout(DEADLINE_S)
            self._answers = on_error.enter_context(self._socket.makefile("rb"))
            # Memory that both processes map: it can be read after the child was killed.
            self._progress = os.memfd_create("mopd-template")
            on_error.callback(os.close, self._progress)
            os.ftruncate(self._progress, os.sysconf("SC_PAGE_SIZE"))
            with theirs:
                libraries = [str(Path(str(library.__file__)).parents[1]) for library in (jinja2, markupsafe)]
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(PROGRAM), str(os.getpid()), str(self._progress), *libraries],
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=subprocess.DEVNULL,
                    env={"PATH": os.defpath, "LANG": "C.UTF-8"},
                    cwd="/",
                    pass_fds=[self._progress],
                    start_new_session=True,
                )
            self._cleanup = on_error.pop_all()
        self._is_late = False
        self.send(settings)

    def send(self, message: bytes) -> None:
        """Write to the process. If it no longer reads, ``receive`` says why."""
        try:
            self._socket.sendall(message)
        except TimeoutError:
            self._is_late = True
        except (BrokenPipeError, ConnectionResetError):
            return

    def receive(self) -> dict[str, Any]:
        """Return the next answer, or why none will come and the row at which the process ended."""
        line = b""
        try:
            line = b"" if self._is_late else self._answers.readline(MAX_MEMORY_BYTES)
        except TimeoutError:
            self._is_late = True
        except ConnectionResetError:
            pass
        # Anything but a whole line means that the process is gone or too late.
        if line.endswith(b"\n"):
            answer: dict[str, Any] = json.loads(line)
            return answer
        self._process.kill()
        code = self._process.wait(END_S)
        why = f"its process ended ({f'signal {-code}' if code < 0 else f'exit code {code}'})"
        if self._is_late:
            why = f"no answer within {DEADLINE_S:g} s: has somebody stopped its process?"
        elif code == -signal.SIGPROF:
            why = f"it ran for {MAX_RENDER_S:g} s on one row, or {MEAN_RENDER_S:g} s a row: does a loop of it end?"
        return {"error": why, "row": int.from_bytes(os.pread(self._progress, 4, 0), "little")}

    def end(self) -> None:
        """Kill the process and forget it."""
        with self._cleanup:
            self._process.kill()
            self._process.wait(END_S)


def _plain(value: Any) -> Any:
    """Return what JSON has no form for as a template would print it, for example a date of a parquet file."""
    return dict(value) if isinstance(value, Mapping) else str(value)
