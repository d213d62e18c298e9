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
    """Columns by name; dots reach into nested ones."""

    prompt: str
    """Prompt: text, or chat messages."""
    ground_truth: str | None = None
    """Reference answer."""
    domain: str | None = None
    """Domain."""
    extra_info: str | None = None
    """What custom rewards get."""


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
    """Function that yields the rows of a file neither parquet nor JSONL (docs/extending.md#a-data-reader)."""

    module: str
    """Function, or entry point ``mopd.readers``."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Its keywords."""
    timeout_s: Seconds = 600.0
    """Deadline for a file."""
    max_memory_gib: Annotated[float, at_least(0.25, 1024.0)] = 8.0
    """Memory of its process."""

    def check(self) -> None:
        check_reference("module", self.module)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFileConfig:
    """One entry of ``data.train`` or ``data.validation``."""

    path: str
    """Parquet or JSONL file, or name of the Hub."""
    columns: ShippedColumns | ColumnsConfig | None = None
    """As ``data.columns``."""
    domain: str | None = None
    """Domain of its rows."""
    system_prompt: Lines | Mapping[str, Lines] | None = None
    """As ``data.system_prompt``."""
    prompt_suffix: Lines | Mapping[str, Lines] | None = None
    """As ``data.prompt_suffix``."""
    reader: ReaderConfig | None = None
    """Function that yields the rows of a file neither parquet nor JSONL (docs/extending.md#a-data-reader)."""

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
    """Prompts."""

    train: tuple[str | DataFileConfig, ...]
    """Training prompts: files, or names of the Hub (docs/data.md#files-and-columns)."""
    validation: tuple[str | DataFileConfig, ...] = ()
    """Validation prompts."""
    columns: ShippedColumns | ColumnsConfig = DEFAULT_COLUMNS
    """What the columns hold: a shipped mapping, or your own (docs/data.md#files-and-columns)."""
    chat_template: str | None = None
    """Jinja file instead of the tokenizer's chat template."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Its arguments, as ``enable_thinking: false``."""
    system_prompt: Lines | Mapping[str, Lines] | None = None
    """System message where a conversation has none, for all or by domain (docs/data.md#from-row-to-tokens)."""
    prompt_suffix: Lines | Mapping[str, Lines] | None = None
    """Text behind each prompt, likewise."""
    image_key: str = "images"
    """Column of images (docs/vision.md)."""
    max_pixels: Annotated[int, at_least(1, MAX_IMAGE_PIXELS)] | None = None
    """Size to which larger images shrink; absent: the processor's."""
    max_prompt_length: Annotated[int, at_least(1, MAX_TOKENS)] = 1024
    """Longest prompt in tokens, images included."""
    overlong_prompts: Literal["filter", "error", "truncate"] = "error"
    """Drop longer prompts, refuse them, or cut their left."""
    domain_weights: Mapping[str, float] | Literal["adaptive"] = field(default_factory=dict)
    """Domains' shares of the prompts; empty: by rows; ``adaptive``: by head-room
    (docs/data.md#prompts-where-head-room-is-left)."""
    adaptive_floor: Share = 0.3
    """With ``adaptive``: share dealt out evenly."""

    scores_cache: str | None = None
    """Folder of teachers' scores, for several runs (docs/pipeline.md#samples-and-scores-that-are-kept)."""
    scores_cache_max_gib: Positive = 100.0
    """Size at which it is full."""
    scored: tuple[str, ...] = ()
    """Folders of kept samples to train on (docs/pipeline.md#samples-and-scores-that-are-kept)."""

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
    """Steps between validations; those of step 0 and the end come besides."""
    temperature: NotNegative = 0.0
    """Sampling temperature; 0 is greedy."""
    samples_per_prompt: Count = 1
    """Responses per prompt, for avg@k and pass@k."""
    max_samples_per_domain: Count | None = None
    """First rows of each domain; absent: all."""
    watch: tuple[str, ...] = ()
    """Untaught domains, to see what the student forgets."""

    def check(self) -> None:
        if self.samples_per_prompt > 1 and self.temperature == 0:
            raise ValueError(
                f"samples_per_prompt is {self.samples_per_prompt}, but temperature is 0, so all responses of a prompt "
                "would be equal: set temperature above 0, or samples_per_prompt: 1"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalPlaneConfig:
    """The orchestrator's memory."""

    type: Literal["local"] = "local"
    """Data plane type."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferQueueConfig(Checked):
    """TransferQueue on a Ray cluster (``pip install 'mopd[ray]'``)."""

    type: Literal["transfer_queue"]
    """Data plane type."""
    address: str | None = None
    """As in ``placement: {type: ray}``."""
    num_storage_units: Annotated[int, at_least(1, MAX_STORAGE_UNITS)] = 2
    """Actors for tensors."""


DataPlane = LocalPlaneConfig | TransferQueueConfig
