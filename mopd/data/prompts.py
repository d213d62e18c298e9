"""Prompt files become token ids with a domain, a ground truth and a place to be found again."""

from __future__ import annotations

import math
import reprlib
import signal
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mopd.config.columns import DataFileConfig
from mopd.config.data import DataConfig
from mopd.data.columns import RowReader
from mopd.data.files import MISSING, listed, quoted, read_rows
from mopd.files.reading import read_text, shown_path
from mopd.text import one_line
from mopd.types import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_PROMPT_CHARACTERS = 4 * 2**20
"""A prompt beyond this is a mistake in the data, and some tokenizers take minutes to say how many tokens it has."""
MAX_DOMAIN_CHARACTERS = 200
MAX_LISTED = 10
MAX_TEMPLATE_BYTES = 2**20
MAX_RENDER_S = 10.0
"""Processor time for one row; a template, which is somebody's program, takes well under a millisecond. Its sandbox
bounds each ``range``, but not loops within loops."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptRow:
    """One row of the data."""

    domain: str
    text: str
    """Rendered prompt, before any truncation."""
    tokens: tuple[int, ...]
    ground_truth: Any
    """``None`` when the column is absent."""
    extra_info: Any
    """``None`` when the column is absent."""
    place: str
    """File and row number, for messages."""


class PromptDataset:
    """Rows in file order, with what was dropped or cut on the way."""

    def __init__(
        self,
        rows: Sequence[PromptRow],
        *,
        num_filtered: Mapping[str, int] | None = None,
        num_truncated: Mapping[str, int] | None = None,
    ) -> None:
        self.rows = tuple(rows)
        self.num_filtered = dict(num_filtered or {})
        """Domain -> rows dropped for their length."""
        self.num_truncated = dict(num_truncated or {})
        """Domain -> rows cut to the limit."""

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, index: int) -> PromptRow:
        """Row by the number that ``Prompt.row`` holds."""
        return self.rows[index]

    @property
    def domain_counts(self) -> dict[str, int]:
        """Rows per domain, in alphabetical order."""
        return dict(sorted(Counter(row.domain for row in self.rows).items()))

    @property
    def rows_by_domain(self) -> dict[str, list[int]]:
        """Row numbers per domain, ascending; domains in alphabetical order."""
        found: dict[str, list[int]] = defaultdict(list)
        for index, row in enumerate(self.rows):
            found[row.domain].append(index)
        return dict(sorted(found.items()))


def load_prompts(
    entries: Sequence[str | DataFileConfig], cfg: DataConfig, tokenizer: PreTrainedTokenizerBase
) -> PromptDataset:
    """Read, render and tokenize the files of ``entries``, which are those of ``cfg``.

    Chat messages go through the chat template with a generation prompt and no further special tokens; a text prompt is
    tokenized plainly, with the special tokens that the tokenizer adds by itself. ``UserError`` names file, row, column
    and key for whatever cannot be used. Whether a ground truth is one is for its reward to say.
    """
    template = _template(cfg)
    files = cfg.files(entries)
    rows = [row for file in files for row in _load_file(file, cfg, tokenizer, template)]
    return _limit_length(rows, cfg)


def encode_prompt(
    prompt: str | list[dict[str, str]], cfg: DataConfig, tokenizer: PreTrainedTokenizerBase, *, place: str
) -> tuple[int, ...]:
    """Token ids of a prompt that stands in no file, by the rules of ``load_prompts``; ``place`` names it in errors."""
    template = _template(cfg)
    (ids,) = _tokenize([_text(prompt, place, cfg, tokenizer, template)], [not isinstance(prompt, str)], tokenizer)
    if not ids:
        raise UserError(f"{place} has no tokens: fill it")
    return ids


def _template(cfg: DataConfig) -> str | None:
    if cfg.chat_template is None:
        return None
    return read_text(cfg.chat_template, cure="correct data.chat_template", max_bytes=MAX_TEMPLATE_BYTES)


def check_domains_have_teachers(
    domain_counts: Mapping[str, int],
    teachers_by_domain: Mapping[str, Sequence[str]],
    *,
    default_teacher: str | None = None,
) -> list[str]:
    """``UserError`` with the counts if rows have no teacher; returns warnings for teachers' domains without rows."""
    orphans = {domain: count for domain, count in domain_counts.items() if domain not in teachers_by_domain}
    if orphans and default_teacher is None:
        shown = ", ".join(f"{quoted(domain)} ({count} rows)" for domain, count in sorted(orphans.items())[:MAX_LISTED])
        more = f" and {len(orphans) - MAX_LISTED} more" if len(orphans) > MAX_LISTED else ""
        raise UserError(
            f"no teacher answers for domain {shown}{more}; teachers answer for {listed(sorted(teachers_by_domain))}: "
            "add the domain to teachers.<name>.domains, set default: true for one teacher, or remove the rows"
        )
    return [
        f"teachers.{teacher}.domains names {domain!r}, but the data has no row of it"
        for domain, teachers in sorted(teachers_by_domain.items())
        for teacher in teachers
        if domain not in domain_counts
    ]


def _load_file(
    file: DataFileConfig, cfg: DataConfig, tokenizer: PreTrainedTokenizerBase, template: str | None
) -> list[PromptRow]:
    reader, path = RowReader(file), Path(file.path)
    key = reader.mapping
    rows: list[PromptRow] = []
    is_chat: list[bool] = []
    is_asked = reader.holds_questions and (template is not None or tokenizer.chat_template is not None)
    for number, columns in read_rows(path, reader.columns):
        place = f"{shown_path(path)}: row {number}"
        found = reader.read(columns, place)
        prompt = found.prompt
        if is_asked and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        is_chat.append(not isinstance(prompt, str))
        if not _is_finite(found.ground_truth):
            raise UserError(
                f"{place}: {key.ground_truth!r} (data.columns.ground_truth) holds a number that is not finite: "
                "store it as text, or null"
            )
        rows.append(
            PromptRow(
                domain=_domain(found.domain, place, key.domain),
                text=_text(prompt, place, cfg, tokenizer, template, column=key.prompt),
                tokens=(),
                ground_truth=None if found.ground_truth is MISSING else found.ground_truth,
                extra_info=None if found.extra_info is MISSING else found.extra_info,
                place=place,
            )
        )
    tokens = _tokenize([row.text for row in rows], is_chat, tokenizer)
    for row, ids in zip(rows, tokens, strict=True):
        if not ids:
            raise UserError(f"{row.place}: the prompt in {key.prompt!r} (data.columns.prompt) has no tokens: fill it")
    return [replace(row, tokens=ids) for row, ids in zip(rows, tokens, strict=True)]


def _tokenize(
    texts: Sequence[str], is_chat: Sequence[bool], tokenizer: PreTrainedTokenizerBase
) -> list[tuple[int, ...]]:
    ids: dict[int, tuple[int, ...]] = {}
    for chat in (False, True):
        chosen = [i for i, flag in enumerate(is_chat) if flag == chat]
        if chosen:  # a rendered chat already carries its special tokens
            encoded = tokenizer([texts[i] for i in chosen], add_special_tokens=not chat, verbose=False)["input_ids"]
            ids.update({i: tuple(row) for i, row in zip(chosen, encoded, strict=True)})
    return [ids[i] for i in range(len(texts))]


def _text(
    prompt: Any,
    place: str,
    cfg: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    template: str | None,
    column: str | None = None,
) -> str:
    text = prompt if isinstance(prompt, str) else _render(prompt, place, cfg, tokenizer, template, column)
    if len(text) > MAX_PROMPT_CHARACTERS:
        raise UserError(
            f"{place}: the prompt{'' if column is None else f' in {column!r} (data.columns.prompt)'} has {len(text)} "
            f"characters, the limit is {MAX_PROMPT_CHARACTERS}: shorten or remove it"
        )
    return text


def _render(
    prompt: Any,
    place: str,
    cfg: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    template: str | None,
    column: str | None,
) -> str:
    where = place if column is None else f"{place}: column {column!r} (data.columns.prompt)"
    if not isinstance(prompt, list) or not prompt or not all(isinstance(message, Mapping) for message in prompt):
        raise UserError(f"{where} is {_kind(prompt)}, not text or a list of chat messages")
    messages = [{key: value for key, value in message.items() if value is not None} for message in prompt]
    for message in messages:  # parquet fills absent keys with nulls
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise UserError(f"{where} has a message whose {key!r} is {_kind(message.get(key))}, not text")
    if template is None and tokenizer.chat_template is None:
        raise UserError(f"{where} holds chat messages but the tokenizer has no chat template: set data.chat_template")
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


def _is_finite(value: Any) -> bool:
    """No NaN and no infinity in it: nothing equals NaN, and JSON, in which it is kept, has neither."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, Mapping):
        return all(map(_is_finite, value.values()))
    return not isinstance(value, (list, tuple)) or all(map(_is_finite, value))


def _domain(domain: Any, place: str, key: str | None) -> str:
    if not isinstance(domain, str) or not domain:
        raise UserError(f"{place}: column {key!r} (data.columns.domain) is {_kind(domain)}, not the name of a domain")
    if len(domain) > MAX_DOMAIN_CHARACTERS:
        raise UserError(
            f"{place}: column {key!r} (data.columns.domain) is {_kind(domain)} of {len(domain)} characters, the name "
            f"of a domain has at most {MAX_DOMAIN_CHARACTERS}"
        )
    return domain


def _limit_length(rows: Sequence[PromptRow], cfg: DataConfig) -> PromptDataset:
    limit, kept = cfg.max_prompt_length, []
    filtered: Counter[str] = Counter()
    truncated: Counter[str] = Counter()
    for row in rows:
        if len(row.tokens) <= limit:
            kept.append(row)
        elif cfg.overlong_prompts == "error":
            raise UserError(
                f"{row.place}: the prompt has {len(row.tokens)} tokens, data.max_prompt_length is {limit}: "
                "raise it or set data.overlong_prompts: filter or truncate"
            )
        elif cfg.overlong_prompts == "filter":
            filtered[row.domain] += 1
        else:
            truncated[row.domain] += 1
            kept.append(replace(row, tokens=row.tokens[-limit:]))
    gone = sorted(set(filtered) - {row.domain for row in kept})
    if gone:
        raise UserError(
            f"every prompt of domain {', '.join(f'{d!r} ({filtered[d]} rows)' for d in gone)} is longer than "
            f"data.max_prompt_length {limit} and filtered: raise it or set data.overlong_prompts: truncate"
        )
    return PromptDataset(kept, num_filtered=filtered, num_truncated=truncated)


def _kind(value: Any) -> str:
    return f"{type(value).__name__} {_SHORT.repr(value)}"


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 40
