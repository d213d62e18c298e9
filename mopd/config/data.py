"""Data sections of a recipe: training prompts and the columns of their files, the validation by which the student is
judged, and the data plane that carries tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Annotated, Any, Literal

from mopd.config.values import (
    MAX_TOKENS,
    Checked,
    Count,
    Lines,
    NotNegative,
    Positive,
    Seconds,
    Share,
    at_least,
    check_name,
    check_reference,
    require_positive,
)

TEMPLATE_ARGUMENTS = frozenset(
    ("conversation", "messages", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize")
)
"""Arguments that every chat template gets from mopd."""
MAX_STORAGE_UNITS = 1024
MAX_IMAGE_PIXELS = 2**26
"""Largest number of pixels of one image, as its header tells: 8,192 x 8,192. Decoded it has 200 MB."""
MAX_IMAGE_BYTES = 2**24
"""Largest size of one encoded image."""

ShippedColumns = Literal["verl", "dapo", "gsm8k", "math", "mbpp", "openthoughts", "messages", "question_answer"]
"""Names of mappings that come with mopd."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnsConfig:
    """A mapping of columns. Dots reach into nested ones."""

    prompt: str
    """Column that holds the prompt: text, or chat messages."""
    ground_truth: str | None = None
    """Column that holds the reference answer."""
    domain: str | None = None
    """Column that holds the domain."""
    extra_info: str | None = None
    """Column that is handed to custom rewards."""


_VERL = ColumnsConfig(
    prompt="prompt", ground_truth="reward_model.ground_truth", domain="data_source", extra_info="extra_info"
)
SHIPPED: Mapping[ShippedColumns, ColumnsConfig] = MappingProxyType(
    {
        "verl": _VERL,
        "dapo": _VERL,
        "gsm8k": ColumnsConfig(prompt="question", ground_truth="answer"),
        "math": ColumnsConfig(prompt="problem", ground_truth="answer"),
        "mbpp": ColumnsConfig(prompt="prompt", ground_truth="test_list"),
        "openthoughts": ColumnsConfig(prompt="conversations", domain="domain"),
        "messages": ColumnsConfig(prompt="messages", ground_truth="ground_truth"),
        "question_answer": ColumnsConfig(prompt="question", ground_truth="answer"),
    }
)
"""Mappings by name; what else a name does is told in ``docs/data.md``."""
DEFAULT_COLUMNS: ShippedColumns = "verl"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReaderConfig(Checked):
    """A function of yours that yields the rows of a file (docs/extending.md#a-data-reader)."""

    module: str
    """The function: ``file.py:name``, ``package.module:name``, or an entry point ``mopd.readers``."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of the function."""
    timeout_s: Seconds = 600.0
    """Deadline for all rows of a file."""
    max_memory_gib: Annotated[float, at_least(0.25, 1024.0)] = 8.0
    """Memory of the function's process, in GiB."""

    def check(self) -> None:
        check_reference("module", self.module)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFileConfig:
    """One entry of ``data.train`` or ``data.validation``."""

    path: str
    """A ``.parquet`` or ``.jsonl`` file, or a name of the Hub."""
    columns: ShippedColumns | ColumnsConfig | None = None
    """As ``data.columns``, for this entry alone."""
    domain: str | None = None
    """Domain of every row of this entry."""
    system_prompt: Lines | Mapping[str, Lines] | None = None
    """As ``data.system_prompt``, for this entry alone."""
    prompt_suffix: Lines | Mapping[str, Lines] | None = None
    """As ``data.prompt_suffix``, for this entry alone."""
    reader: ReaderConfig | None = None
    """Reads a file that is neither parquet nor JSONL."""

    def __post_init__(self) -> None:
        if self.domain is not None:
            try:
                check_name(self.domain)
            except ValueError as error:
                raise ValueError(f"domain: {error}") from None


def text_of(texts: str | Mapping[str, str] | None, domain: str) -> str | None:
    """Return the ``system_prompt`` or ``prompt_suffix`` of a domain."""
    return texts.get(domain, texts.get("default")) if isinstance(texts, Mapping) else texts


def mapping_of(columns: ShippedColumns | ColumnsConfig) -> ColumnsConfig:
    """The columns themselves."""
    return SHIPPED[columns] if isinstance(columns, str) else columns


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig(Checked):
    """Prompt files and how to read their rows."""

    train: tuple[str | DataFileConfig, ...]
    """Training prompts: files, or splits of data sets of the Hub (docs/data.md#files-and-columns)."""
    validation: tuple[str | DataFileConfig, ...] = ()
    """Validation prompts, as ``train``."""
    columns: ShippedColumns | ColumnsConfig = DEFAULT_COLUMNS
    """Which columns hold what: the name of a mapping, or a section (docs/data.md#files-and-columns)."""
    chat_template: str | None = None
    """Jinja file that replaces the tokenizer's own chat template."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template, as ``enable_thinking: false``."""
    system_prompt: Lines | Mapping[str, Lines] | None = None
    """System message where a conversation has none, for all or by domain (docs/data.md#from-row-to-tokens)."""
    prompt_suffix: Lines | Mapping[str, Lines] | None = None
    """Text behind each prompt, for all or by domain."""
    image_key: str = "images"
    """Column that holds a row's images (docs/vision.md)."""
    max_pixels: Annotated[int, at_least(1, MAX_IMAGE_PIXELS)] | None = None
    """Larger images are scaled down to so many pixels; absent: the processor's limit."""
    max_prompt_length: Annotated[int, at_least(1, MAX_TOKENS)] = 1024
    """Longest prompt in tokens, images included."""
    overlong_prompts: Literal["filter", "error", "truncate"] = "error"
    """Drop a longer prompt, refuse it, or cut it from the left."""
    domain_weights: Mapping[str, float] | Literal["adaptive"] = field(default_factory=dict)
    """Share of each domain in the prompt stream; empty: by row count; ``adaptive``: by head-room
    (docs/data.md#prompts-where-head-room-is-left)."""
    adaptive_floor: Share = 0.3
    """With ``adaptive``: share of prompts that all domains get equally."""

    scores_cache: str | None = None
    """Folder of the teachers' scores, which runs may share (docs/pipeline.md#samples-and-scores-that-are-kept)."""
    scores_cache_max_gib: Positive = 100.0
    """Size of ``scores_cache`` from which nothing more is added."""
    scored: tuple[str, ...] = ()
    """Folders of kept samples to train on beside the student's own
    (docs/pipeline.md#samples-and-scores-that-are-kept)."""

    def check(self) -> None:
        if not self.image_key:
            raise ValueError("image_key is empty: name the column of the images")
        for name in sorted(TEMPLATE_ARGUMENTS & self.chat_template_kwargs.keys()):
            raise ValueError(f"chat_template_kwargs.{name} is set by mopd itself: remove it")
        if not self.train:
            raise ValueError("train is empty: name at least one parquet or JSONL file")
        for split, entries in (("train", self.train), ("validation", self.validation)):
            for i, file in enumerate(self.files(entries)):
                if file.domain is None and mapping_of(file.columns or self.columns).domain is None:
                    name = f"columns {file.columns}" if isinstance(file.columns, str) else "columns"
                    raise ValueError(
                        f"{split}[{i}]: {file.path!a:.80}: its {name} have no domain: add one to the entry, as in "
                        "{path: …, domain: NAME}"
                    )
        for name, weight in self.fixed_weights.items():
            require_positive(f"domain_weights.{name}", weight)

    @property
    def fixed_weights(self) -> Mapping[str, float]:
        """``domain_weights`` by name; empty where they are adaptive, too."""
        return {} if isinstance(self.domain_weights, str) else self.domain_weights

    def files(self, entries: Sequence[str | DataFileConfig]) -> list[DataFileConfig]:
        """Entries of ``train`` or ``validation``, each with the columns, system message and suffix that hold for it."""
        whole = [DataFileConfig(path=entry) if isinstance(entry, str) else entry for entry in entries]
        return [
            replace(
                file,
                columns=self.columns if file.columns is None else file.columns,
                system_prompt=self.system_prompt if file.system_prompt is None else file.system_prompt,
                prompt_suffix=self.prompt_suffix if file.prompt_suffix is None else file.prompt_suffix,
            )
            for file in whole
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationConfig(Checked):
    """Rewards on held-out prompts."""

    every_steps: Count = 50
    """Optimizer steps between validations, beside those of step 0 and the last step."""
    temperature: NotNegative = 0.0
    """Sampling temperature; 0 is greedy."""
    samples_per_prompt: Count = 1
    """Responses per prompt, k, for avg@k and pass@k. Above 1 needs ``temperature`` above 0."""
    max_samples_per_domain: Count | None = None
    """First rows of each domain; absent: all."""
    watch: tuple[str, ...] = ()
    """Domains that no teacher teaches, to see what the student forgets; they need a reward."""

    def check(self) -> None:
        if self.samples_per_prompt > 1 and self.temperature == 0:
            raise ValueError(
                f"samples_per_prompt is {self.samples_per_prompt}, but temperature is 0, so all responses of a prompt "
                "would be equal: set temperature above 0, or samples_per_prompt: 1"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalPlaneConfig:
    """Samples in the orchestrator's memory."""

    type: Literal["local"] = "local"
    """Data plane type."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferQueueConfig(Checked):
    """Samples in TransferQueue's storage units on a Ray cluster (``pip install 'mopd[ray]'``)."""

    type: Literal["transfer_queue"]
    """Data plane type."""
    address: str | None = None
    """As in ``placement: {type: ray}``."""
    num_storage_units: Annotated[int, at_least(1, MAX_STORAGE_UNITS)] = 2
    """Actors that hold the tensors."""


DataPlane = LocalPlaneConfig | TransferQueueConfig
