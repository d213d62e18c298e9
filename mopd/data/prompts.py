"""Loading of prompt files: token ids with a domain, a ground truth, and file and row for messages."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mopd.base.files.reading import shown_path
from mopd.base.text import first_few
from mopd.base.types import ImageRef, PromptImage, UserError
from mopd.config.data import DataConfig, DataFileConfig, text_of
from mopd.config.groups import Assignment
from mopd.config.views import ViewConfig
from mopd.data.columns import RowReader
from mopd.data.files import MISSING, described, listed, quoted, read_rows
from mopd.data.images import ImageStore, holds_images
from mopd.data.templates.rendering import MAX_PROMPT_CHARACTERS, Renderer
from mopd.data.views import NO_VIEWS, Views
from mopd.data.vision_prompts import OTHER_MEDIA, VisionPrompts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
MAX_LISTED = 10
NUM_CONVERSATIONS = 8
"""Rows of a file whose messages are kept, to look at the chat template with."""
LOG_EVERY_S = 10.0
"""Seconds between progress lines while a file with images is read, which takes as long as its bytes."""


@dataclass(frozen=True, slots=True)
class PromptView:
    """A row's prompt as one teacher reads it."""

    text: str
    """As ``PromptRow.text``."""
    tokens: tuple[int, ...]
    """As ``PromptRow.tokens``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptRow:
    """One row of the data."""

    domain: str
    text: str
    """Rendered prompt, before any truncation; an image is the one token that stands for it."""
    tokens: tuple[int, ...]
    """Token ids, with as many for each image as the model sees."""
    ground_truth: Any
    """Ground truth; ``None`` if the column is absent."""
    extra_info: Any
    """Extra information; ``None`` if the column is absent."""
    place: str
    """File and row number, for messages."""
    images: tuple[ImageRef, ...] = ()
    """Images in the order of their places in the text."""
    views: Mapping[str, PromptView] = field(default_factory=dict)
    """Teacher -> the prompt as it reads it, of teachers with a view of their own. Nothing that draws or trains on the
    student's responses reads it."""

    conversation: Sequence[dict[str, Any]] | None = None
    """Messages, of a file's first rows, where they are chat and show no image."""

    def tokens_of(self, teacher: str | None) -> tuple[int, ...]:
        """Return the prompt that a teacher reads; the student's for ``None`` and for teachers without a view."""
        view = None if teacher is None else self.views.get(teacher)
        return self.tokens if view is None else view.tokens


@dataclass(eq=False)
class PromptDataset:
    """Rows in file order, with counts of those that were dropped or cut."""

    rows: Sequence[PromptRow]
    images: ImageStore | None = None
    """Store of the rows' images; ``None`` if the student sees none."""
    num_filtered: Mapping[str, int] = field(default_factory=dict)
    """Domain -> number of rows dropped for their length."""
    num_long_views: Mapping[str, int] = field(default_factory=dict)
    """Domain -> number of those that were dropped for the length of a teacher's view."""
    num_truncated: Mapping[str, int] = field(default_factory=dict)
    """Domain -> number of rows cut to the limit."""

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, index: int) -> PromptRow:
        """Return the row with the number that ``Prompt.row`` holds."""
        return self.rows[index]

    def images_of(self, indices: Sequence[int]) -> list[tuple[PromptImage, ...]] | None:
        """Return the images of some rows' prompts, in the form that engines take; ``None`` if the student sees none."""
        if self.images is None:
            return None
        return [tuple(self.images.prompt_image(ref) for ref in self.rows[index].images) for index in indices]

    @property
    def domain_counts(self) -> dict[str, int]:
        """Number of rows per domain, in alphabetical order."""
        return dict(sorted(Counter(row.domain for row in self.rows).items()))

    @property
    def image_counts(self) -> dict[str, int]:
        """Number of rows with images per domain that has some, in alphabetical order."""
        return dict(sorted(Counter(row.domain for row in self.rows if row.images).items()))

    @property
    def rows_by_domain(self) -> dict[str, list[int]]:
        """Row numbers per domain, ascending; domains in alphabetical order."""
        found: dict[str, list[int]] = defaultdict(list)
        for index, row in enumerate(self.rows):
            found[row.domain].append(index)
        return dict(sorted(found.items()))


@dataclass(frozen=True, kw_only=True)
class _Reading:
    """Everything that turns prompts into tokens."""

    cfg: DataConfig
    tokenizer: PreTrainedTokenizerBase
    renderer: Renderer
    vision: VisionPrompts | None = None
    images: ImageStore | None = None
    views: Views = NO_VIEWS
    of_views: Mapping[str, _Reading] = field(default_factory=dict)
    """The same for each teacher with a view, whose chat template may have arguments of its own."""


def load_prompts(
    entries: Sequence[str | DataFileConfig],
    cfg: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    vision: VisionPrompts | None = None,
    views: Views = NO_VIEWS,
) -> PromptDataset:
    """Read, render and tokenize the files of ``entries``, which are those of ``cfg``.

    Chat messages go through the chat template with a generation prompt and no further special tokens; a text prompt is
    tokenized plainly, with the special tokens that the tokenizer adds by itself. ``vision`` is given if the student
    sees images. ``views`` are rendered beside, each by a template process of its own, and for a teacher with another
    tokenizer by its own template. Raise ``UserError`` with file,
    row, column and key for whatever cannot be used. Ground truths are not checked here: their rewards do that.
    """
    images = None if vision is None else ImageStore(entries, cfg)
    unseen: Counter[str] = Counter()
    with ExitStack() as processes:

        def reading(own: DataConfig, tokenizer: PreTrainedTokenizerBase) -> _Reading:
            renderer = processes.enter_context(Renderer(own, tokenizer))
            return _Reading(cfg=own, tokenizer=tokenizer, renderer=renderer, vision=vision, images=images)

        def of_view(name: str, view: ViewConfig | None) -> _Reading:
            more = {} if view is None else view.chat_template_kwargs
            own = replace(cfg, chat_template_kwargs={**cfg.chat_template_kwargs, **more})
            if name not in views.tokenizers:
                return reading(own, tokenizer)
            return reading(replace(own, chat_template=None), views.tokenizers[name])

        of_views = {name: of_view(name, view) for name, view in views.by_teacher.items()}
        whole = replace(reading(cfg, tokenizer), views=views, of_views=of_views)
        rows = [row for i, file in enumerate(cfg.files(entries)) for row in _load_file(file, i, whole, unseen)]
    require_vision_student(unseen)
    return _limit_length(rows, cfg, images, views)


def encode_prompts(
    prompts: Sequence[str | list[dict[str, str]]],
    cfg: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    places: Sequence[str],
    vision: VisionPrompts | None = None,
    images: Sequence[Sequence[ImageRef]] | None = None,
) -> list[tuple[int, ...]]:
    """Return token ids of prompts that stand in no file, by the rules of ``load_prompts``; errors name ``places``."""
    images = [()] * len(prompts) if images is None else images
    with Renderer(cfg, tokenizer) as renderer:
        reading = _Reading(cfg=cfg, tokenizer=tokenizer, renderer=renderer, vision=vision)
        texts = [
            _text(prompt, place, reading, num_images=len(shown))
            for prompt, place, shown in zip(prompts, places, images, strict=True)
        ]
        _, encoded = _encoded(texts, reading)
    for ids, place in zip(encoded, places, strict=True):
        if not ids:
            raise UserError(f"{place} has no tokens: fill it")
    if vision is None:
        return encoded
    return [vision.expanded(ids, shown, place) for ids, shown, place in zip(encoded, images, places, strict=True)]


def check_domains_have_teachers(
    domain_counts: Mapping[str, int],
    teachers_by_domain: Mapping[str, Sequence[str]],
    *,
    default_teacher: str | None = None,
) -> list[str]:
    """Raise ``UserError`` with the counts if rows have no teacher; return warnings for teachers' domains with none."""
    orphans = {domain: count for domain, count in domain_counts.items() if domain not in teachers_by_domain}
    if orphans and default_teacher is None:
        raise UserError(
            f"no teacher answers for domain {_counted(orphans)}; teachers answer for "
            f"{listed(sorted(teachers_by_domain))}: add "
            "the domain to teachers.<name>.domains, set default: true for one teacher, or remove the rows"
        )
    return [
        f"teachers.{teacher}.domains names {domain!r}, but the data has no row of it"
        for domain, teachers in sorted(teachers_by_domain.items())
        for teacher in teachers
        if domain not in domain_counts
    ]


def require_vision_student(unseen: Mapping[str, int]) -> None:
    """Raise ``UserError`` with the counts if there are rows with images that the student cannot see."""
    if unseen:
        raise UserError(
            f"rows with images, of domain {_counted(unseen)}, for a student that sees none: set student.model to a "
            "vision-language model, or remove these rows"
        )


def require_vision_teachers(image_counts: Mapping[str, int], assignment: Assignment, sighted: Collection[str]) -> None:
    """Raise ``UserError`` with the counts if a teacher of rows with images is not among the ``sighted`` ones."""
    blind: dict[str, dict[str, int]] = defaultdict(dict)
    for domain, count in image_counts.items():
        for name in assignment.teachers_of(domain):
            if name not in sighted:
                blind[name][domain] = count
    if blind:
        shown = "; ".join(f"teachers.{name} for domain {_counted(counts)}" for name, counts in blind.items())
        raise UserError(
            f"rows with images have a teacher that sees none: {shown}: give these domains a vision-language teacher, "
            "or remove the rows"
        )


def _counted(domains: Mapping[str, int]) -> str:
    """Return domains with their rows, for a message."""
    return first_few([f"{quoted(domain)} ({count} rows)" for domain, count in sorted(domains.items())], MAX_LISTED)


def _load_file(file: DataFileConfig, index: int, reading: _Reading, unseen: Counter[str]) -> list[PromptRow]:
    """Return the rows of one file, the one with ``index`` in the list. Rows whose images the student cannot see are
    counted by domain in ``unseen``."""
    reader = RowReader(file, image_key=reading.cfg.image_key, further=reading.views.columns)
    path, vision, key = Path(file.path), reading.vision, reader.mapping
    rows: list[PromptRow] = []
    texts: list[str | None] = []
    of_views: dict[str, list[tuple[int, str | None]]] = {name: [] for name in reading.of_views}  # by teacher
    columns = [*reader.columns, *(OTHER_MEDIA if vision is not None else ())]
    logged_at = time.monotonic()
    for number, row in read_rows(path, columns, heavy=reader.image_column, reader=file.reader):
        place = f"{shown_path(path)}: row {number}"
        found = reader.read(row, place)
        prompt = found.prompt
        if reader.holds_questions and reading.renderer.has_template and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        prompt = _with_system(prompt, text_of(file.system_prompt, found.domain), place)
        prompt = _with_suffix(prompt, text_of(file.prompt_suffix, found.domain), place)
        if not _is_finite(found.ground_truth):
            raise UserError(
                f"{place}: {key.ground_truth!r} (data.columns.ground_truth) holds a number that is not finite: "
                "store it as text, or null"
            )
        images: tuple[ImageRef, ...] = ()
        if vision is not None:
            vision.refuse_other_media(row, place)
            images = vision.refs(found.images, path, file=index, row=number, place=place)
        elif holds_images(found.images):
            unseen[found.domain] += 1
        texts.append(_text(prompt, place, reading, column=key.prompt, num_images=len(images)))
        is_kept = len(rows) < NUM_CONVERSATIONS and not isinstance(prompt, str) and not images
        for name in reading.views.of(found.domain):
            own = reading.views.prompt(name, row, found, prompt, place)
            where = f"{place}: teachers.{name}.view"
            of_views[name].append((len(rows), _text(own, where, reading.of_views[name], num_images=len(images))))
        rows.append(
            PromptRow(
                domain=found.domain,
                text="",
                tokens=(),
                ground_truth=None if found.ground_truth is MISSING else found.ground_truth,
                extra_info=None if found.extra_info is MISSING else found.extra_info,
                place=place,
                images=images,
                conversation=list(prompt) if is_kept else None,
            )
        )
        if images and time.monotonic() > logged_at + LOG_EVERY_S:
            logged_at = time.monotonic()
            logger.info("%s: images of %d rows read", shown_path(path), number + 1)
    if reading.images is not None and any(row.images for row in rows):
        reading.images.prepare(index)
    made = _tokenized(rows, texts, reading, f"the prompt in {key.prompt!r} (data.columns.prompt)")
    rows = [replace(row, text=one.text, tokens=one.tokens) for row, one in zip(rows, made, strict=True)]
    for name, own in of_views.items():
        seen = [rows[i] for i, _ in own]
        read = _tokenized(seen, [text for _, text in own], reading.of_views[name], f"teachers.{name}.view")
        for (i, _), view in zip(own, read, strict=True):
            rows[i] = replace(rows[i], views={**rows[i].views, name: view})
    return rows


def _tokenized(
    rows: Sequence[PromptRow], texts: Sequence[str | None], reading: _Reading, what: str
) -> list[PromptView]:
    """Return text and tokens of some rows' prompts; ``what`` names them in an error."""
    whole, tokens = _encoded(texts, reading)
    for row, ids in zip(rows, tokens, strict=True):
        if not ids:
            raise UserError(f"{row.place}: {what} has no tokens: fill it")
    if reading.vision is not None:
        tokens = [reading.vision.expanded(ids, row.images, row.place) for row, ids in zip(rows, tokens, strict=True)]
    return [PromptView(text, ids) for text, ids in zip(whole, tokens, strict=True)]


def _encoded(texts: Sequence[str | None], reading: _Reading) -> tuple[list[str], list[tuple[int, ...]]]:
    """Return every text, including those that the renderer still has (``None``), and its tokens."""
    rendered = iter(reading.renderer.texts())
    whole = [next(rendered) if text is None else text for text in texts]
    ids: dict[int, tuple[int, ...]] = {}
    for chat in (False, True):
        chosen = [i for i, text in enumerate(texts) if (text is None) == chat]
        if chosen:  # a rendered chat already carries its special tokens
            read = reading.tokenizer([whole[i] for i in chosen], add_special_tokens=not chat, verbose=False)
            ids.update({i: tuple(row) for i, row in zip(chosen, read["input_ids"], strict=True)})
    return whole, [ids[i] for i in range(len(texts))]


def _text(prompt: Any, place: str, reading: _Reading, column: str | None = None, num_images: int = 0) -> str | None:
    """Return a plain prompt; hand a conversation to the renderer and return ``None``."""
    where = place if column is None else f"{place}: column {column!r} (data.columns.prompt)"
    if not isinstance(prompt, str):
        reading.renderer.put(_messages(prompt, place, where, reading, num_images), place)
        return None
    text = prompt if reading.vision is None else reading.vision.placed_in_text(prompt, num_images, place)
    if len(text) > MAX_PROMPT_CHARACTERS:
        raise UserError(
            f"{place}: the prompt{'' if column is None else f' in {column!r} (data.columns.prompt)'} has {len(text)} "
            f"characters, the limit is {MAX_PROMPT_CHARACTERS}: shorten or remove it"
        )
    return text


def _messages(prompt: Any, place: str, where: str, reading: _Reading, num_images: int) -> list[dict[str, Any]]:
    if not isinstance(prompt, list) or not prompt or not all(isinstance(message, Mapping) for message in prompt):
        raise UserError(f"{where} is {described(prompt)}, not text or a list of chat messages")
    messages = [{key: value for key, value in message.items() if value is not None} for message in prompt]
    for message in messages:  # parquet fills absent keys with nulls, dropped above
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise UserError(f"{where} has a message whose {key!r} is {described(message.get(key))}, not text")
    if not reading.renderer.has_template:
        raise UserError(f"{where} holds chat messages but the tokenizer has no chat template: set data.chat_template")
    return messages if reading.vision is None else reading.vision.placed_in_chat(messages, num_images, place)


def _with_system(prompt: Any, system: str | None, place: str) -> Any:
    """Return a conversation with the recipe's system message, where it begins without one of its own."""
    if system is None:
        return prompt
    if isinstance(prompt, str):
        raise UserError(
            f"{place}: the prompt is plain text, which has no place for data.system_prompt: store chat messages, or "
            "leave it out"
        )
    has_own = bool(prompt) and isinstance(prompt[0], Mapping) and prompt[0].get("role") == "system"
    return prompt if has_own else [{"role": "system", "content": system}, *prompt]


def _with_suffix(prompt: Any, suffix: str | None, place: str) -> Any:
    """Return a prompt with the recipe's text behind it, of a conversation behind its last user message."""
    if suffix is None:
        return prompt
    if isinstance(prompt, str):
        return prompt + suffix
    if not isinstance(prompt, list):
        return prompt  # refused where messages are read
    users = [i for i, message in enumerate(prompt) if isinstance(message, Mapping) and message.get("role") == "user"]
    if not users or not isinstance(prompt[users[-1]].get("content"), str):
        raise UserError(
            f"{place}: the prompt has no user message with text, behind which data.prompt_suffix is to stand: correct "
            "the row, or leave the suffix out"
        )
    last = {**prompt[users[-1]], "content": prompt[users[-1]]["content"] + suffix}
    return [*prompt[: users[-1]], last, *prompt[users[-1] + 1 :]]


def check_texts_have_domains(cfg: DataConfig, domains: Collection[str]) -> None:
    """Raise ``UserError`` if a ``system_prompt`` or ``prompt_suffix`` names a domain that no row has."""
    for name in ("system_prompt", "prompt_suffix"):
        files = [file for file in (*cfg.train, *cfg.validation) if isinstance(file, DataFileConfig)]
        for texts in (getattr(cfg, name), *(getattr(file, name) for file in files)):
            unknown = sorted(texts.keys() - {*domains, "default"}) if isinstance(texts, Mapping) else []
            if unknown:
                raise UserError(
                    f"data.{name} names domain {quoted(unknown[0])}, and the data has {listed(sorted(domains))}: "
                    "correct or remove it"
                )


def _is_finite(value: Any) -> bool:
    """Return whether no number in it is NaN or infinite: NaN equals nothing, and JSON, which keeps it, has neither."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, Mapping):
        return all(map(_is_finite, value.values()))
    return not isinstance(value, (list, tuple)) or all(map(_is_finite, value))


def _limit_length(rows: Sequence[PromptRow], cfg: DataConfig, images: ImageStore | None, views: Views) -> PromptDataset:
    limit, kept = cfg.max_prompt_length, []
    filtered, long_views, truncated = Counter[str](), Counter[str](), Counter[str]()
    for row in rows:
        if _has_long_view(row, cfg, views):
            filtered[row.domain] += 1
            long_views[row.domain] += 1
        elif len(row.tokens) <= limit:
            kept.append(row)
        elif cfg.overlong_prompts == "error" or (row.images and cfg.overlong_prompts == "truncate"):
            cure = "filter" if row.images else "filter or truncate"
            inside = "" if not row.images else f", {len(row.images)} images included, which cannot be cut"
            raise UserError(
                f"{row.place}: the prompt has {len(row.tokens)} tokens{inside}, data.max_prompt_length is {limit}: "
                f"raise it or set data.overlong_prompts: {cure}"
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
            f"data.max_prompt_length {limit}, or longer than a view may be, and filtered: raise it or set "
            "data.overlong_prompts: truncate"
        )
    return PromptDataset(kept, images, filtered, long_views, truncated)


def _has_long_view(row: PromptRow, cfg: DataConfig, views: Views) -> bool:
    """Return whether some teacher's view of a row is too long, if such rows are dropped; ``UserError`` if not: a view
    is never cut."""
    for name, view in row.views.items():
        config = views.by_teacher[name]
        own = None if config is None else config.max_prompt_length
        limit, key = (cfg.max_prompt_length, "data") if own is None else (own, f"teachers.{name}.view")
        if len(view.tokens) > limit:
            if cfg.overlong_prompts == "filter":
                return True
            what, cure = f"teachers.{name}.view", f"teachers.{name}.view.max_prompt_length"
            if config is None:
                what, cure = f"the prompt in the tokens of teachers.{name}", "data.max_prompt_length"
            raise UserError(
                f"{row.place}: {what} has {len(view.tokens)} tokens, {key}.max_prompt_length is {limit}, and a view is "
                f"never cut: raise {cure}, or set data.overlong_prompts: filter"
            )
    return False
