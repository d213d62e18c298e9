"""The two things an engine can do: generate and score. Everything on an engine's far side is its own affair.

An engine may live in this process (``torch``), in a child process or on another machine (``vllm``): callers only await.
Shapes: R response tokens of one sample, K = top-k.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor


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
    finish_reason: Literal["stop", "length"]


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
    """Samples responses with weights that can be replaced."""

    weight_version: int
    """Version of the weights that answer now; -1 before the first ``load_weights``."""

    async def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, seeds: Sequence[int]
    ) -> list[Generation]:
        """One response per prompt. A response depends on its prompt, its seed and the weights, not on its neighbours'
        seeds. ``seeds`` are non-negative and below 2**63."""
        ...

    async def load_weights(self, weights: Iterable[tuple[str, Tensor]], weight_version: int) -> None:
        """Replace all weights by ``(hf_name, tensor)`` pairs; raises ``ValueError`` if a name or shape does not match
        or a weight is missing."""
        ...


class Scorer(Protocol):
    """Scores given responses with fixed weights."""

    async def score(
        self, tokens: Sequence[Tensor], prompt_lengths: Sequence[int], *, top_k: int, temperature: float
    ) -> list[Scores]:
        """Score the response part of each sequence (``tokens[i][prompt_lengths[i]:]``)."""
        ...
