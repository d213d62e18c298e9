"""The two things an engine can do: generate and score. Everything on an engine's far side is its own affair.

An engine may live in this process, in a child process or on another machine: callers only await. The errors of an
engine that is somewhere else say whether another replica may be tried.
Shapes: R response tokens of one sample, K = top-k.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from mopd.transfer.buckets import TensorMeta
from mopd.transfer.group import GroupOrder
from mopd.types import PromptImage

DEFAULT_RETRY_AFTER_S = 1.0
"""Of a full queue that does not say when to come back, or says it in a way that cannot be meant."""
MAX_RETRY_AFTER_S = 30.0
"""Longest pause that a full queue can ask for: asking again costs next to nothing."""


class EngineError(RuntimeError):
    """An engine did not do what it was asked; the message names the engine."""


class EngineUnavailable(EngineError):
    """No usable answer: connection refused or reset, deadline passed, engine dead, HTTP 5xx, or an answer that is
    corrupt or belongs to another request. Another replica may be tried."""


class EngineUnreachable(EngineUnavailable):
    """Nobody takes requests there now: no connection, or one that ends before an answer begins; HTTP 502, 503, 504.
    This says nothing about the request, and may pass."""


class CorruptAnswer(EngineUnavailable):
    """An answer came, and it cannot be right."""


class EngineBusy(EngineError):
    """The engine's queue is full (HTTP 429). Another replica may be tried, or this one after ``retry_after_s``."""

    def __init__(self, message: str, *, retry_after_s: object) -> None:
        """``retry_after_s`` is what the engine says: no number, none at all or one out of bounds does no harm."""
        super().__init__(message)
        self.retry_after_s = _bounded(retry_after_s)
        """In [0, ``MAX_RETRY_AFTER_S``]."""


class EngineRejected(EngineError):
    """The engine refuses the request as such (any other HTTP 4xx): asking again, or elsewhere, is pointless."""


class StaleWeights(EngineUnavailable):
    """A rollout replica serves another ``weight_version`` than the one asked for, or is between two versions."""


class WeightsLost(EngineError):
    """New weights did not arrive completely: the engine has none until all of them arrive once."""


def _bounded(retry_after_s: object) -> float:
    if not isinstance(retry_after_s, (int, float)) or isinstance(retry_after_s, bool):
        return DEFAULT_RETRY_AFTER_S
    if not 0 <= retry_after_s < math.inf:
        return DEFAULT_RETRY_AFTER_S
    return float(min(retry_after_s, MAX_RETRY_AFTER_S))


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLimits:
    """What one request to an engine may ask for; ``None`` is no limit of the engine's own."""

    max_tokens_per_request: int | None = None
    """Tokens of one request together; of one that asks for responses, those of its prompts."""
    max_queued_tokens: int | None = None
    """Tokens that may wait and run at a time; beyond them requests are answered with ``EngineBusy``."""
    max_body_bytes: int | None = None
    """Bytes of one HTTP body."""
    max_sequences: int | None = None
    """Sequences that the engine works on at a time; more wait in it."""
    max_running_tokens: int | None = None
    """Tokens, drawn ones included, that the engine holds of all sequences at a time (vLLM: its KV cache; torch: a
    batch)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineInfo:
    """Who answers: what a caller must know before it trusts the scores."""

    model: str
    """The checkpoint, as the engine's owner spells it."""
    kind: Literal["torch", "vllm", "openai"]
    vocab_size: int
    """Rows of the output matrix, padding included."""
    max_positions: int
    """Longest sequence that the engine takes."""
    dtype: str
    """Parameter dtype, for example ``float32``."""
    weight_version: int
    """-1: the weights of the checkpoint, or none yet."""
    manifest: Mapping[str, str] | None = None
    """``config_sha256``, ``weights_sha256`` and ``tokenizer_sha256`` of the folder that the engine loaded, where its
    owner hashed it (``mopd.conversion.hf.manifest``)."""
    max_logprobs: int | None = None
    """Largest ``top_k`` of ``score``; ``None`` is the vocabulary."""
    image_processing: str | None = None
    """``ImageProcessing.fingerprint`` of how it turns images into patches; ``None``: it sees no images."""
    limits: EngineLimits = EngineLimits()


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How to draw a response. ``temperature=0`` is greedy decoding."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """-1 keeps the whole vocabulary."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """One sampled response, stop token included when there is one."""

    tokens: Tensor
    """[R] int64."""
    logprobs: Tensor
    """[R] fp32 log-probs of the drawn tokens under softmax(logits / temperature), before top-p and top-k cuts
    (temperature 1 when greedy)."""
    finish_reason: Literal["stop", "length", "handed_back"]
    """``handed_back``: new weights arrived. The response is not complete and may hold no token yet; its caller goes on
    with prompt and tokens as the next prompt."""
    token_versions: Tensor
    """[R] int32 ``weight_version`` of the weights that drew each token; it never falls."""


Images = Sequence[Sequence[PromptImage]] | None
"""The images of each sequence of a request, in the order of their places in it; ``None``: no sequence has one."""

Told = Callable[[int, Generation], None]
"""``told(i, generation)``: response i of a call is complete."""

OnRunning = Literal["finish", "continue"]
"""What becomes of responses that are under way when new weights arrive: they end under the old ones, or they go on
under the new ones (an engine that cannot go on hands them back)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """A model's view of one given response. Row r is the distribution over the token at response position r."""

    ids: Tensor
    """[R, K] int32, most probable first."""
    logprobs: Tensor
    """[R, K] fp32 under softmax(logits / temperature)."""
    token_logprobs: Tensor
    """[R] fp32 log-prob of the response's own token."""


class Generator(Protocol):
    """Samples responses with the weights of the moment."""

    @property
    def weight_version(self) -> int:
        """Of the weights that answer now; -1 before the first ``TakesWeights.load_weights``."""
        ...

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        seeds: Sequence[int],
        *,
        told: Told | None = None,
        images: Images = None,
    ) -> list[Generation]:
        """One response per prompt. A response depends on its prompt, its seed and the weights, not on its neighbours'
        seeds. ``seeds`` are non-negative and below 2**63.

        ``told`` is called on the caller's event loop for each response as soon as it is complete, at most once each;
        an engine that cannot tell before the end never calls it. The list holds them all.

        A prompt holds one placeholder for each token of its ``images``. ``EngineRejected`` for images that the engine
        cannot see; placeholders and other tokens that only an image may stand for are never drawn.
        """
        ...


class TakesWeights(Protocol):
    """An engine whose weights can be replaced."""

    weight_version: int
    """Of the last ``load_weights``."""

    async def load_weights(
        self, weights: Iterable[tuple[str, Tensor]], weight_version: int, *, kept: Set[str] = frozenset()
    ) -> None:
        """Replace all weights by ``(hf_name, tensor)`` pairs, but those named in ``kept``, which an engine that has
        weights keeps. Before the first one is replaced it raises, and the old ones answer on: ``ValueError`` if a name
        or shape does not match or a weight is missing, ``NonFiniteError`` for NaN or infinite values, also such as do
        not fit the engine's dtype."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Reception:
    """What receiving weights took an engine."""

    wait_s: float
    """Seconds in which it had nothing to load."""
    load_s: float
    """The other seconds."""


class Incoming(Protocol):
    """Weights that come to an engine over a process group, into its own memory."""

    async def join(self, order: GroupOrder, first_rank: int, metas: Sequence[TensorMeta]) -> None:
        """Enter a group, from ``first_rank`` on with one rank for each worker, and leave the one before. The engine
        works meanwhile. ``ValueError`` unless ``metas``, which will come in this order, are exactly its weights;
        ``WeightsLost`` if the group does not meet."""
        ...

    async def receive(
        self, weight_version: int, *, verify: bool, patience_s: float, ready: Callable[[], object]
    ) -> Reception:
        """Replace all weights by what the group's rank 0 sends. ``ready`` is called once the engine has stopped and
        waits for the first bucket, which may take ``patience_s``. ``WeightsLost`` if not everything arrived as it was
        sent; the group is left then."""
        ...

    async def leave(self) -> None:
        """Leave the group; what waits in ``join`` fails at once, in ``receive`` at the next bucket or its deadline."""
        ...


class Scorer(Protocol):
    """Scores given responses with fixed weights."""

    async def score(
        self,
        tokens: Sequence[Tensor],
        prompt_lengths: Sequence[int],
        *,
        top_k: int,
        temperature: float,
        images: Images = None,
    ) -> list[Scores]:
        """Score the response part of each sequence (``tokens[i][prompt_lengths[i]:]``).

        ``tokens`` hold one placeholder for each token of an image (after merging), as for ``Generator.generate``.
        ``EngineRejected`` for images that the engine cannot see."""
        ...


class Described(Protocol):
    """What every engine that a group may hold offers besides its work."""

    async def info(self) -> EngineInfo:
        """Model, versions and limits of this moment; ``EngineUnavailable`` if the engine does not answer."""
        ...
