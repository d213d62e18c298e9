"""Requests and answers of the engine server. Sequences lie end to end in flat arrays, with their lengths beside them.

A score request for two sequences, of 5 and 4 tokens with 3 and 2 prompt tokens, at K = 8::

    tokens [9] int32 = 1 5 9 7 7 | 1 4 4 6        lengths [2] = 5 4        prompt_lengths [2] = 3 2

and its answer (2 + 2 response rows; nothing for the prompt)::

    lengths [2] = 2 2    ids [4 * 8] int32    logprobs [4 * 8]    token_logprobs [4]      8 K + 4 bytes per row

Shapes: N sequences, T tokens of all sequences, R rows (response tokens) of all sequences, K top-k.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mopd.wire.codec import Array, Message, WireError, array_field
from mopd.wire.limits import MAX_SAMPLES, MAX_TEMPERATURE, MIN_TEMPERATURE


@dataclass(frozen=True, kw_only=True)
class ScoreRequest(Message):
    """Score the response part of each sequence."""

    kind: ClassVar[str] = "score"
    tokens: Array = array_field("<i4")
    """[T] int32."""
    lengths: Array = array_field("<i4")
    """[N] int32, tokens of each sequence."""
    prompt_lengths: Array = array_field("<i4")
    """[N] int32, at least 1 each."""
    top_k: int
    temperature: float
    weight_version: int
    """The version that must answer; -1 is the checkpoint."""

    def check(self) -> None:
        """See ``Message.check``."""
        _check_sequences(self.tokens, self.lengths, "lengths")
        if self.prompt_lengths.shape != self.lengths.shape:
            raise WireError(f"{len(self.lengths)} lengths but {len(self.prompt_lengths)} prompt_lengths")
        if ((self.prompt_lengths < 1) | (self.prompt_lengths > self.lengths)).any():
            raise WireError("prompt_lengths must lie between 1 and the sequence's length")
        if self.top_k < 1:
            raise WireError(f"top_k is {self.top_k}: set 1 or more")
        if not MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE:
            raise WireError(
                f"temperature is {self.temperature}: scoring needs {MIN_TEMPERATURE} to {MAX_TEMPERATURE:g}"
            )

    @property
    def checksum(self) -> bytes:
        """16 bytes over the token ids and their split into sequences; the answer repeats them."""
        return _checksum(self.tokens, self.lengths, self.prompt_lengths)

    @property
    def num_rows(self) -> int:
        """R: rows that the answer has."""
        return len(self.tokens) - int(self.prompt_lengths.sum(dtype=np.int64))


@dataclass(frozen=True, kw_only=True)
class ScoreAnswer(Message):
    """A model's view of every response token; most probable id first in each row."""

    kind: ClassVar[str] = "scores"
    request_checksum: bytes
    weight_version: int
    top_k: int
    lengths: Array = array_field("<i4")
    """[N] int32, rows of each sequence."""
    ids: Array = array_field("<i4")
    """[R * K] int32."""
    logprobs: Array = array_field("<f4")
    """[R * K] fp32."""
    token_logprobs: Array = array_field("<f4")
    """[R] fp32."""

    def check(self) -> None:
        """See ``Message.check``."""
        _check_sequences(self.token_logprobs, self.lengths, "lengths", at_least=0)
        entries = len(self.token_logprobs) * self.top_k
        if self.top_k < 1 or self.ids.shape != (entries,) or self.logprobs.shape != (entries,):
            raise WireError(
                f"{len(self.token_logprobs)} rows x top_k {self.top_k} but {len(self.ids)} ids and "
                f"{len(self.logprobs)} logprobs"
            )
        if entries and self.ids.min() < 0:
            raise WireError("an id is negative")


@dataclass(frozen=True, kw_only=True)
class GenerateRequest(Message):
    """Draw one response per prompt."""

    kind: ClassVar[str] = "generate"
    tokens: Array = array_field("<i4")
    """[T] int32, prompts end to end."""
    lengths: Array = array_field("<i4")
    """[N] int32."""
    seeds: Array = array_field("<i8")
    """[N] int64, not negative."""
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    weight_version: int
    """The version that must answer."""

    def check(self) -> None:
        """See ``Message.check``."""
        _check_sequences(self.tokens, self.lengths, "lengths")
        if self.seeds.shape != self.lengths.shape or (self.seeds < 0).any():
            raise WireError(f"{len(self.lengths)} prompts need as many seeds, none negative; got {len(self.seeds)}")
        if self.max_new_tokens < 1:
            raise WireError(f"max_new_tokens is {self.max_new_tokens}: set 1 or more")
        if self.temperature != 0 and not MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE:
            raise WireError(f"temperature is {self.temperature}: set 0, or {MIN_TEMPERATURE} to {MAX_TEMPERATURE:g}")
        if not 0 < self.top_p <= 1:
            raise WireError(f"top_p is {self.top_p}: set a number in (0, 1]")
        if self.top_k != -1 and self.top_k < 1:
            raise WireError(f"top_k is {self.top_k}: set -1 (all) or a positive number")

    @property
    def checksum(self) -> bytes:
        """16 bytes over prompts and seeds; the answer repeats them."""
        return _checksum(self.tokens, self.lengths, self.seeds)


@dataclass(frozen=True, kw_only=True)
class GenerateAnswer(Message):
    """Sampled responses, stop token included where there is one."""

    kind: ClassVar[str] = "responses"
    request_checksum: bytes
    weight_version: int
    lengths: Array = array_field("<i4")
    """[N] int32, tokens of each response."""
    stopped: Array = array_field("|u1")
    """[N] uint8, 1 where the response ended with a stop token, 0 where at its length limit."""
    tokens: Array = array_field("<i4")
    """[R] int32."""
    logprobs: Array = array_field("<f4")
    """[R] fp32."""

    def check(self) -> None:
        """See ``Message.check``."""
        _check_sequences(self.tokens, self.lengths, "lengths")
        if self.logprobs.shape != self.tokens.shape or self.stopped.shape != self.lengths.shape:
            raise WireError(
                f"{len(self.tokens)} tokens of {len(self.lengths)} responses but {len(self.logprobs)} logprobs and "
                f"{len(self.stopped)} ends"
            )
        if (self.stopped > 1).any():
            raise WireError("stopped is neither 0 nor 1")


def split_points(lengths: Array) -> Array:
    """Where flat arrays are cut (``numpy.split``'s second argument)."""
    return np.cumsum(lengths, dtype=np.int64)[:-1]


def _check_sequences(flat: Array, lengths: Array, name: str, at_least: int = 1) -> None:
    """``flat`` is exactly the sequences that ``lengths`` announces, and integers are no negative ids."""
    if not 1 <= len(lengths) <= MAX_SAMPLES:
        raise WireError(f"{len(lengths)} sequences: send 1 to {MAX_SAMPLES}")
    if (lengths < at_least).any():
        raise WireError(f"{name} holds a value below {at_least}")
    total = int(lengths.sum(dtype=np.int64))
    if total != len(flat):
        raise WireError(f"{name} add up to {total} but {len(flat)} values came")
    if flat.dtype.kind == "i" and len(flat) and flat.min() < 0:
        raise WireError("a token id is negative")


def _checksum(*arrays: Array) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        digest.update(len(little).to_bytes(8, "little"))
        digest.update(little.view(np.uint8).data)
    return digest.digest()
