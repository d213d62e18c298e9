"""The interface of an engine: generate responses and score them.

An engine may live in this process, in a child process or on another machine; callers only await. The class of an error
says whether another replica may be tried.
Shapes: R response tokens of one sample, K = top-k.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, ClassVar, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from mopd.base.types import PromptImage, RouteShape
from mopd.weights.group import GroupOrder
from mopd.weights.parts import TensorMeta

DEFAULT_RETRY_AFTER_S = 1.0
"""Pause in seconds after a full queue that names none, or an invalid one."""
MAX_RETRY_AFTER_S = 30.0
"""Longest pause in seconds that a full queue can ask for: asking again costs next to nothing."""


class EngineError(RuntimeError):
    """A request to an engine failed; the message names the engine."""


class EngineUnavailable(EngineError):
    """No usable answer: connection refused or reset, deadline passed, engine dead, HTTP 5xx, or an answer that is
    corrupt or belongs to another request. Another replica may be tried."""


class EngineUnreachable(EngineUnavailable):
    """Nobody takes requests there now: no connection, or one that ends before an answer begins; HTTP 502, 503, 504.
    This says nothing about the request, and may pass."""


class CorruptAnswer(EngineUnavailable):
    """An answer that cannot be right."""


class EngineBusy(EngineError):
    """The engine's queue is full (HTTP 429). Another replica may be tried, or this one after ``retry_after_s``."""

    def __init__(self, message: str, *, retry_after_s: object) -> None:
        """Bound ``retry_after_s``, which is whatever the engine sent: missing, no number or out of range."""
        super().__init__(message)
        self.retry_after_s = _bounded(retry_after_s)
        """Pause in seconds before the next try, in [0, ``MAX_RETRY_AFTER_S``]."""


class EngineRejected(EngineError):
    """The engine refuses the request as such (any other HTTP 4xx): asking again, or elsewhere, is pointless."""


class StaleWeights(EngineUnavailable):
    """A rollout replica serves another ``weight_version`` than the one asked for, or is between two versions."""


class WeightsLost(EngineError):
    """New weights did not arrive completely: the engine has no weights until a whole update arrives."""


def _bounded(retry_after_s: object) -> float:
    if not isinstance(retry_after_s, (int, float)) or isinstance(retry_after_s, bool):
        return DEFAULT_RETRY_AFTER_S
    if not 0 <= retry_after_s < math.inf:
        return DEFAULT_RETRY_AFTER_S
    return float(min(retry_after_s, MAX_RETRY_AFTER_S))


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLimits:
    """Limits of one request to an engine; ``None`` means that the engine sets none."""

    max_tokens_per_request: int | None = None
    """Tokens of one request together; for generation the tokens of its prompts."""
    max_queued_tokens: int | None = None
    """Tokens that may wait or run at a time; requests beyond them are answered with ``EngineBusy``."""
    max_body_bytes: int | None = None
    """Bytes of one HTTP body."""
    max_sequences: int | None = None
    """Sequences that the engine runs at a time; others wait inside it."""
    max_running_tokens: int | None = None
    """Tokens of all sequences, drawn ones included, that it holds at a time (vLLM: its KV cache; torch: a batch)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineNode:
    """One node of an engine that spans several. Node 0 answers; the others hold their share of its workers."""

    num_nodes: int
    node_rank: int
    address: str
    """Address of this node by which the others reach it."""
    master_addr: str
    """Address of node 0."""
    master_port: int
    """Free port there, where the workers meet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineInfo:
    """An engine's description of itself: what a caller must know before it trusts the scores."""

    model: str
    """The checkpoint, as the engine's owner spells it."""
    kind: Literal["torch", "vllm", "sglang", "openai"]
    vocab_size: int
    """Rows of the output matrix, padding included."""
    max_positions: int
    """Longest sequence that the engine takes."""
    dtype: str
    """Parameter dtype, for example ``float32``."""
    weight_version: int
    """Version of the weights that answer now; -1: the checkpoint's, or none yet."""
    manifest: Mapping[str, str] | None = None
    """``config_sha256``, ``weights_sha256`` and ``tokenizer_sha256`` of the folder that the engine loaded, if its owner
    hashed it (``mopd.conversion.hf.manifest``)."""
    max_logprobs: int | None = None
    """Largest ``top_k`` of ``score``; ``None``: the size of the vocabulary."""
    image_processing: str | None = None
    """``ImageProcessing.fingerprint`` of the way it turns images into patches; ``None``: it sees no images."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of each adapter that requests may name, by name; empty text where nobody hashed it."""
    num_workers: int = 1
    """Processes that hold its weights, each a member of a transfer group."""
    limits: EngineLimits = EngineLimits()

    @property
    def most_logprobs(self) -> int:
        """``max_logprobs``, where it is ``None`` too."""
        return self.vocab_size if self.max_logprobs is None else min(self.vocab_size, self.max_logprobs)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Parameters of drawing a response. ``temperature=0`` is greedy decoding."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """-1 keeps the whole vocabulary."""
    min_p: float = 0.0
    """Ids are kept whose probability is at least this share of the largest."""
    presence_penalty: float = 0.0
    """Taken from the logits of ids that the response holds already."""
    repetition_penalty: float = 1.0
    """Divides positive logits of ids that prompt or response holds already, and multiplies negative ones."""
    stop: tuple[str, ...] = ()
    """Texts at whose end the response ends, with the token in which one is complete (``StopTexts``)."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the response beside the checkpoint's own."""
    ignore_eos: bool = False
    """The checkpoint's own stop ids end nothing."""
    num_begun: int = 0
    """Tokens at the end of each prompt that are the response's already: it was handed back, and goes on."""
    routes: RouteShape | None = None
    """Shape of the routes that are told with each response; ``None``: none are."""
    num_top_ids: int = 0
    """Most probable ids that are told with each token (``Generation.top_ids``)."""

    @property
    def is_exact(self) -> bool:
        """Responses follow softmax(logits / temperature), without a cut or a penalty."""
        uncut = self.top_p == 1 and self.top_k == -1 and self.min_p == 0
        return uncut and not self.has_penalty

    @property
    def has_penalty(self) -> bool:
        """What was drawn before changes the logits."""
        return self.presence_penalty != 0 or self.repetition_penalty != 1

    def ends(self, own: Sequence[int]) -> tuple[int, ...]:
        """Return the ids that end a response; ``own`` are the checkpoint's."""
        return (*(() if self.ignore_eos else own), *self.stop_token_ids)


FinishReason = Literal["stop", "length", "handed_back"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """One sampled response, stop token included when there is one."""

    tokens: Tensor
    """[R] int64."""
    logprobs: Tensor
    """[R] fp32 log-probs of the drawn tokens under softmax(logits / temperature), before penalties and cuts
    (temperature 1 when greedy)."""
    finish_reason: FinishReason
    """Why the response ended. ``handed_back``: new weights arrived. It is not complete and may hold no token yet; the
    caller continues it with prompt and tokens as the next prompt."""
    token_versions: Tensor
    """[R] int32 ``weight_version`` of the weights that drew each token, never decreasing."""
    top_ids: Tensor | None = None
    """[R, ``num_top_ids``] int32 most probable ids at each place, before cuts, in any order; ``None`` for 0 of them."""
    routes: Tensor | None = None
    """[``num_routed``, layers with experts, experts of a token] of ``ROUTE_DTYPES``: the experts that each token went
    through, of prompt and response; ``None`` where nobody asked."""


ROUTE_DTYPES = {1: torch.uint8, 2: torch.int16}
"""Dtypes of routes by ``RouteShape.item_bytes``."""


def num_routed(prompt_length: int, response_length: int) -> int:
    """Return the tokens that an engine has routed: not the last one that it drew, and none before the first."""
    return prompt_length + response_length - 1 if response_length else 0


Images = Sequence[Sequence[PromptImage]] | None
"""The images of each sequence of a request, in the order of their places in it; ``None``: no sequence has one."""

Given = Sequence[Tensor] | None
"""Ids at which log-probs are asked for: [R, G] int32 for each sequence of a request, G the same; ``None`` for no ids.
An id may stand twice in a row."""

NO_VISION = "the model sees no images: route rows with images to one that does"


ColumnsT = TypeVar("ColumnsT", bound="_Columns")


class _Columns:
    """Request about N sequences: each of its ``COLUMNS`` is ``None`` or has one entry for each sequence."""

    __slots__ = ()
    COLUMNS: ClassVar[tuple[str, ...]]
    images: Images

    def __post_init__(self) -> None:
        counts = {name: len(column) for name in self.COLUMNS if (column := getattr(self, name)) is not None}
        if len({*counts.values()}) > 1:
            raise ValueError("a request has " + " but ".join(f"{count} {name}" for name, count in counts.items()))

    @property
    def sequences(self) -> Sequence[Any]:
        """The ids of each sequence: ``tokens`` or ``prompts``."""
        sequences: Sequence[Any] = getattr(self, self.COLUMNS[0])
        return sequences

    def __len__(self) -> int:
        return len(self.sequences)

    def at(self: ColumnsT, places: Sequence[int]) -> ColumnsT:
        """Return the request about some of the sequences."""
        columns = {name: getattr(self, name) for name in self.COLUMNS}
        chosen = {name: own if own is None else [own[i] for i in places] for name, own in columns.items()}
        return replace(self, **chosen)  # type: ignore[type-var]

    @property
    def seen(self) -> Sequence[Sequence[PromptImage]]:
        """The images of each sequence, none where it has none."""
        return [()] * len(self) if self.images is None else self.images


@dataclass(frozen=True, slots=True, eq=False)
class ToScore(_Columns):
    """What a ``Scorer`` is asked of the responses of N sequences, ``tokens[i][prompt_lengths[i]:]``. ``ValueError``
    unless each sequence has its own of what there is one of for each."""

    COLUMNS = ("tokens", "prompt_lengths", "images", "given")
    tokens: Sequence[Tensor]
    """Ids of each sequence, with one placeholder for each token of an image (after merging)."""
    prompt_lengths: Sequence[int]
    """Tokens of each sequence before its response, 1 or more."""
    _: KW_ONLY
    top_k: int
    """K, the number of most probable ids that a row tells; 0: none."""
    temperature: float
    """Divides the logits."""
    images: Images = None
    given: Given = None
    hidden_size: int = 0
    """H, the model's, to be told its hidden states too; 0: they are not told."""
    adapter: str = ""
    """Name of the adapter beside the weights that answers (``EngineInfo.adapters``); empty: none, or the student's."""

    def __post_init__(self) -> None:
        _Columns.__post_init__(self)  # super() does not know a class with slots
        if not self.num_given:
            object.__setattr__(self, "given", None)

    @property
    def num_given(self) -> int:
        """G, the number of ids that each row is given."""
        return self.given[0].shape[1] if self.given else 0

    @property
    def kind(self) -> Hashable:
        """What requests have in common that can be ``joined``."""
        return ToScore, self.top_k, self.temperature, self.num_given, self.hidden_size, self.adapter


@dataclass(frozen=True, slots=True, eq=False)
class ToDraw(_Columns):
    """What a ``Generator`` is asked for: one response to each of N prompts. ``ValueError`` as of ``ToScore``."""

    COLUMNS = ("prompts", "seeds", "images")
    prompts: Sequence[Sequence[int]]
    """Ids of each prompt, with placeholders as in ``ToScore``."""
    sampling: SamplingParams
    seeds: Sequence[int]
    """Seed of each response, in [0, 2**63)."""
    _: KW_ONLY
    images: Images = None
    adapter: str = ""
    """As in ``ToScore``."""

    @property
    def kind(self) -> Hashable:
        """What requests have in common that can be ``joined``."""
        return ToDraw, self.sampling, self.adapter


RequestT = TypeVar("RequestT", ToScore, ToDraw)


def joined(requests: Sequence[RequestT]) -> RequestT:
    """Return requests of one ``kind``, at least one, as one request."""
    columns: dict[str, Any] = {
        name: [one for asked in requests for one in getattr(asked, name)]
        for name in requests[0].COLUMNS
        if name != "images" and getattr(requests[0], name) is not None
    }
    images = [own for asked in requests for own in asked.seen]
    return replace(requests[0], **columns, images=images if any(images) else None)


def refuse_images(images: Images, name: str, *, because: str = NO_VISION) -> None:
    """Raise ``EngineRejected`` for any image: engine ``name`` sees none and would answer as if there were none."""
    if images is not None and any(images):
        raise EngineRejected(f"{name}: {because}")


ResponseCallback = Callable[[int, Generation], None]
"""Callback of ``Generator.generate``: ``on_response(i, generation)`` is called when response i is complete."""

OnRunning = Literal["finish", "continue"]
"""Policy for responses in progress when new weights arrive: ``finish`` them under the old weights, or ``continue`` them
under the new ones (an engine that cannot continue hands them back)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """Distributions over one given response. Row r is the distribution over the token at response position r."""

    ids: Tensor
    """[R, K] int32, most probable first; K may be 0."""
    logprobs: Tensor
    """[R, K] fp32 under softmax(logits / temperature)."""
    token_logprobs: Tensor
    """[R] fp32 log-prob of the response's own token."""
    given_logprobs: Tensor | None = None
    """[R, G] fp32 log-probs of the ids that were given (``Given``); ``None`` if none were."""
    hidden: Tensor | None = None
    """[R, H] bf16 hidden states that the output matrix reads, where they were asked for."""


class Generator(Protocol):
    """An engine that samples responses with its current weights."""

    @property
    def weight_version(self) -> int:
        """Version of the weights that answer now; -1 before the first that came from a student."""
        ...

    async def generate(self, asked: ToDraw, *, on_response: ResponseCallback | None = None) -> list[Generation]:
        """Draw one response per prompt. A response depends on its prompt, its seed and the weights, not on its
        neighbours' seeds. Placeholders and other tokens that only an image may stand for are never drawn.

        ``on_response`` is called on the caller's event loop for each response as soon as it is complete, at most once
        each; an engine that knows a response only at the end never calls it. The returned list holds all responses.
        ``EngineRejected`` for images that the engine cannot see, ``ValueError`` for an adapter that is not there.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Reception:
    """Durations of one weight reception."""

    wait_s: float
    """Seconds in which the engine had nothing to load."""
    load_s: float
    """Remaining seconds of the reception."""


class Incoming(Protocol):
    """Receives weights into an engine's own memory: over a process group, or where they are staged. An engine in a
    ``ThreadHost`` runs nothing else during ``receive``; another one freezes running requests, and continues them under
    the new weights."""

    async def join(self, order: GroupOrder, first_rank: int, metas: Sequence[TensorMeta]) -> None:
        """Leave the previous group and enter a new one, from ``first_rank`` on with one rank for each worker.

        The engine keeps working meanwhile. ``metas``: the engine's weights in their order of arrival (``check_fit``).
        ``WeightsLost`` if the group does not meet.
        """
        ...

    async def receive(
        self, weight_version: int, *, verify: bool, patience_s: float, ready: Callable[[], object]
    ) -> Reception:
        """Replace all weights by what rank 0 of the group sends.

        ``ready`` is called once the engine has stopped and waits for the first bucket, which may take ``patience_s``
        seconds. ``WeightsLost``, after which the group is left, if not everything arrived as it was sent.
        """
        ...

    async def leave(self) -> None:
        """Leave the group. A waiting ``join`` fails at once, a ``receive`` at the next bucket or its deadline."""
        ...


class Scorer(Protocol):
    """An engine that scores given responses with fixed weights."""

    async def score(self, asked: ToScore) -> list[Scores]:
        """Score the response part of each sequence. ``EngineRejected`` for images that the engine cannot see,
        ``ValueError`` for an adapter that is not there."""
        ...


class Described(Protocol):
    """An engine that describes itself, as every engine of a group must."""

    async def info(self) -> EngineInfo:
        """Return model, versions and limits as they are now; ``EngineUnavailable`` if the engine does not answer."""
        ...


class TakesWeights(Described, Protocol):
    """An engine whose weights can be replaced."""

    name: str
    """Checkpoint, for messages."""

    @property
    def incoming(self) -> Incoming:
        """Its receiver of weights."""
        ...

    @property
    def weight_slots(self) -> Mapping[str, Tensor]:
        """Places of the weights by ``hf_name``, for their shapes and dtypes."""
        ...
