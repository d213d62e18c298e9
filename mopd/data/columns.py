"""Rows of any known schema, read as prompt, ground truth, domain and extra information."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mopd.base.files.reading import shown_path
from mopd.base.types import UserError
from mopd.config.data import SHIPPED, DataFileConfig, mapping_of
from mopd.data.files import MISSING, described, listed, lookup, quoted, read_rows
from mopd.data.image_files import read_rgb
from mopd.data.images import holds_images, stored_images

_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant"}
"""ShareGPT's ``from`` -> chat role; other values are roles already."""
MAX_DOMAIN_CHARACTERS = 200
MAX_IMAGE_ROWS = 64
"""Largest number of rows of a file whose images ``survey`` decodes."""
_ASK_FOR_TESTS = "{task}\n\nYour code should pass these tests:\n\n{tests}"
"""Form in which MBPP is asked: only its tests tell the function's name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fields:
    """Contents of one row; ``MISSING`` where there is no such column."""

    prompt: Any
    ground_truth: Any
    domain: str
    extra_info: Any
    images: Any


class RowReader:
    """Reader of one file's rows by its column mapping."""

    def __init__(self, file: DataFileConfig, *, image_key: str | None = None, further: Sequence[str] = ()) -> None:
        """``file`` comes from ``DataConfig.files``; without ``image_key`` images are not read. ``further``: top-level
        columns that are read besides, for the caller."""
        assert file.columns is not None, "an entry as DataConfig.files gives it"
        self.mapping = mapping_of(file.columns)
        self._name = file.columns if isinstance(file.columns, str) else None
        self._domain = file.domain
        self._has_own_reader = file.reader is not None
        self._image_key = image_key
        self._further = further

    @property
    def image_column(self) -> str | None:
        """Top-level column of the images."""
        return None if self._image_key is None else self._image_key.split(".")[0]

    @property
    def holds_questions(self) -> bool:
        """Whether a plain-text prompt of this schema is a user's question, since the data set has no chat messages."""
        return self._name in _QUESTIONS

    @property
    def columns(self) -> list[str]:
        """Top-level columns that are read."""
        own = (self.mapping.prompt, self.mapping.ground_truth, self.mapping.domain, self.mapping.extra_info)
        keys = [key.split(".")[0] for key in own if key is not None]
        images = [] if self.image_column is None else [self.image_column]
        return [*keys, *_FURTHER.get(self._name or "", ()), *images, *self._further]

    def read(self, row: Mapping[str, Any], place: str) -> Fields:
        """Return the fields of a row.

        Raises:
            UserError: there is no prompt or no domain; a column that a shipped mapping reads holds what it cannot read.
        """
        convert = _CONVERSIONS.get(self._name or "")
        truth = lookup(row, self.mapping.ground_truth)
        prompt = lookup(row, self.mapping.prompt)
        if convert is not None:
            prompt, truth = convert(row, prompt, truth, place)
        domain = self._domain if self._domain is not None else lookup(row, self.mapping.domain)
        for what, key, value in (("prompt", self.mapping.prompt, prompt), ("domain", self.mapping.domain, domain)):
            if value is MISSING or value is None:
                raise UserError(f"{place} has no column {key!r} (it has {listed([*row])}): {self._cure(what)}")
        if not isinstance(domain, str) or not 0 < len(domain) <= MAX_DOMAIN_CHARACTERS:
            raise UserError(
                f"{place}: column {self.mapping.domain!r} (data.columns.domain) is {described(domain)}, not the name "
                f"of a domain: store text of 1 to {MAX_DOMAIN_CHARACTERS} characters"
            )
        images = lookup(row, self._image_key)
        if self._has_own_reader and holds_images(images):
            raise UserError(f"{place}: rows of a reader have no images: write them as parquet, and leave reader out")
        return Fields(
            prompt=as_messages(prompt),
            ground_truth=truth,
            domain=domain,
            extra_info=lookup(row, self.mapping.extra_info),
            images=images,
        )

    def _cure(self, what: str) -> str:
        constant = ", or give the entry a domain" if what == "domain" else ""
        if self._name is None:
            return f"set data.columns.{what}{constant}"
        return (
            f"columns are read as {self._name!r}: set data.columns to what fits ({', '.join(SHIPPED)}) or to a section "
            f"that names the {what}'s column{constant}"
        )


class RowCheck(Protocol):
    """A look at each row that is surveyed, as that of ``mopd.data.views.Views``."""

    @property
    def columns(self) -> Sequence[str]: ...
    def check(self, row: Mapping[str, Any], found: Fields, place: str) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """Counts of the first rows of a file."""

    counts: Counter[str]
    """Number of rows by domain."""
    with_images: Counter[str]
    """Number of rows with images by domain."""
    is_whole: bool
    """Whether these are all rows of the file."""


def survey(
    file: DataFileConfig,
    max_rows: int,
    *,
    image_key: str | None = None,
    student_sees: bool = False,
    checks: Sequence[RowCheck] = (),
) -> Survey:
    """Count up to ``max_rows`` rows. If the student sees images, decode those of some rows. ``checks`` look at
    each row, too.

    Raises:
        UserError: file, row and column of what cannot be read, and of images that cannot be used.
    """
    reader = RowReader(file, image_key=image_key, further=[name for check in checks for name in check.columns])
    counts, with_images = Counter[str](), Counter[str]()
    path = Path(file.path)
    rows = read_rows(path, reader.columns, heavy=reader.image_column, reader=file.reader)
    for number, row in itertools.islice(rows, max_rows):
        place = f"{shown_path(path)}: row {number}"
        found = reader.read(row, place)
        counts[found.domain] += 1
        for check in checks:
            check.check(row, found, place)
        if student_sees:
            images = stored_images(found.images, path, place)
            for image in images if with_images.total() < MAX_IMAGE_ROWS else ():
                read_rgb(image.read(), image.place)
        if holds_images(found.images):
            with_images[found.domain] += 1
    return Survey(counts=counts, with_images=with_images, is_whole=next(rows, None) is None)


def _gsm8k(row: Mapping[str, Any], prompt: Any, truth: Any, place: str) -> tuple[Any, Any]:
    """Take the number behind ``####`` as ground truth, without thousands separators."""
    if truth is MISSING or truth is None:
        return prompt, truth
    if not isinstance(truth, str) or "####" not in truth:
        raise UserError(
            f"{place}: column 'answer' has no '#### NUMBER' at its end, which columns: gsm8k reads: {_other('answer')}"
        )
    return prompt, truth.rpartition("####")[2].strip().replace(",", "")


def _math(row: Mapping[str, Any], prompt: Any, truth: Any, place: str) -> tuple[Any, Any]:
    """Take the column ``answer`` as ground truth, else the content of the last ``\\boxed{…}`` of ``solution``."""
    if truth is not MISSING and truth is not None:
        return prompt, truth
    solution = lookup(row, "solution")
    if solution is MISSING or solution is None:
        return prompt, truth
    boxed = _last_boxed(solution) if isinstance(solution, str) else None
    if boxed is None:
        raise UserError(
            f"{place}: there is no column 'answer' and no \\boxed{{…}} in column 'solution', of which columns: math "
            f"reads one: {_other('answer')}"
        )
    return prompt, boxed


def _last_boxed(text: str) -> str | None:
    """Return the content of the last ``\\boxed{…}`` or ``\\fbox{…}``, braces inside it matched."""
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start < 0:
        return None
    start = text.index("{", start) + 1
    depth = 1
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start:end].strip()
    return None


def _mbpp(row: Mapping[str, Any], prompt: Any, truth: Any, place: str) -> tuple[Any, Any]:
    """Return the task with its tests, and ``{"test_list": [...], "test_setup_code": "..."}`` for reward ``code``."""
    if prompt is MISSING or prompt is None:
        prompt = lookup(row, "text")  # the full set calls the column text, the sanitized one prompt
    if not isinstance(truth, list) or not truth or not all(isinstance(test, str) for test in truth):
        raise UserError(
            f"{place}: column 'test_list' is no list of assert statements, which columns: mbpp reads: "
            f"{_other('test_list')}"
        )
    setup = []
    for name in ("test_imports", "test_setup_code"):
        value = lookup(row, name)
        lines = value if isinstance(value, list) else [] if value in (MISSING, None) else [value]
        if not all(isinstance(line, str) for line in lines):
            raise UserError(f"{place}: column {name!r} holds what is no text: {_other(name)}")
        setup += [line for line in lines if line]
    if isinstance(prompt, str):
        prompt = _ASK_FOR_TESTS.format(task=prompt, tests="\n".join(truth))
    return prompt, {"test_list": truth, "test_setup_code": "\n".join(setup)}


def _openthoughts(row: Mapping[str, Any], prompt: Any, truth: Any, place: str) -> tuple[Any, Any]:
    """Put the column ``system``, if there is one, before the conversation."""
    system = lookup(row, "system")
    if isinstance(prompt, list) and isinstance(system, str) and system:
        prompt = [{"role": "system", "content": system}, *prompt]
    return prompt, truth


def _other(column: str) -> str:
    return f"correct the row, or map the columns yourself (data.columns, {quoted(column)})"


def as_messages(prompt: Any) -> Any:
    """Return chat messages with ``role`` and ``content``, without the assistant messages at the end: the student writes
    its own answer. Return anything else as it is."""
    if not isinstance(prompt, list) or not all(isinstance(message, Mapping) for message in prompt):
        return prompt
    messages = [_as_message(message) for message in prompt]
    while len(messages) > 1 and messages[-1].get("role") == "assistant":
        messages.pop()
    return messages


def _as_message(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ShareGPT's ``from`` and ``value`` as ``role`` and ``content``."""
    if not {"from", "value"} <= message.keys() or message.get("role") is not None:
        return message
    who = message["from"]
    rest = {key: value for key, value in message.items() if key not in ("from", "value", "role", "content")}
    return {"role": _ROLES.get(who, who) if isinstance(who, str) else who, "content": message["value"], **rest}


_Conversion = Callable[[Mapping[str, Any], Any, Any, str], tuple[Any, Any]]
_CONVERSIONS: Mapping[str, _Conversion] = {
    "gsm8k": _gsm8k, "math": _math, "mbpp": _mbpp, "openthoughts": _openthoughts,
}  # fmt: skip
"""Name of a shipped mapping -> function of row, prompt, ground truth and place that returns prompt and ground truth."""
_QUESTIONS = ("gsm8k", "math", "mbpp", "question_answer")
_FURTHER = {"math": ("solution",), "mbpp": ("text", "test_imports", "test_setup_code"), "openthoughts": ("system",)}
"""Top-level columns that a shipped mapping reads beside those that it names."""
