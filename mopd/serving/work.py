"""From a decoded request to an encoded answer: what may be asked of this engine, and the engine's call."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from mopd.engines.interface import EngineInfo, SamplingParams
from mopd.serving.errors import bad_request
from mopd.serving.host import EngineHost
from mopd.wire.codec import Array, encode
from mopd.wire.limits import CONTENT_TYPE
from mopd.wire.messages import GenerateAnswer, GenerateRequest, ScoreAnswer, ScoreRequest, split_points


class Work(Protocol):
    """One request at the engine."""

    @property
    def num_tokens(self) -> int:
        """What it costs the queue."""
        ...

    @property
    def weight_version(self) -> int:
        """The version that must answer."""
        ...

    @property
    def media_type(self) -> str:
        """Of the answer."""
        ...

    def check(self, info: EngineInfo) -> None:
        """``Refusal`` 400 for what this engine cannot do: a bad request must not spoil the call that it shares."""
        ...

    async def run(self, host: EngineHost) -> Any:
        """The engine's part."""
        ...

    def answer_bytes(self, answer: Any) -> int:
        """About how long ``encode`` makes what ``run`` returned."""
        ...

    def encode(self, answer: Any) -> bytes:
        """The body of the answer to what ``run`` returned; ``Refusal`` 400 if it cannot be sent as asked."""
        ...


class _WireWork:
    """What requests in mopd's own form have in common."""

    media_type = CONTENT_TYPE

    def answer_bytes(self, answer: ScoreAnswer | GenerateAnswer) -> int:
        """See ``Work.answer_bytes``."""
        return sum(value.nbytes for value in vars(answer).values() if isinstance(value, np.ndarray))

    def encode(self, answer: ScoreAnswer | GenerateAnswer) -> bytes:
        """See ``Work.encode``."""
        try:
            return encode(answer)
        except ValueError as error:  # log-probs that the asked dtype cannot hold
            raise bad_request(str(error)) from error


class ScoreWork(_WireWork):
    """Implements ``Work`` for ``/v1/score``."""

    def __init__(self, request: ScoreRequest) -> None:
        self._request = request
        self.num_tokens = len(request.tokens)
        self.num_rows = 0
        self.weight_version = request.weight_version

    def check(self, info: EngineInfo) -> None:
        """See ``Work.check``."""
        request = self._request
        check_token(int(request.tokens.max()), info)
        check_length(int(request.lengths.max()), info)
        check_top_k(request.top_k, info)

    async def run(self, host: EngineHost) -> ScoreAnswer:
        """See ``Work.run``."""
        request = self._request
        scores = await host.score(
            _split(request.tokens, request.lengths),
            request.prompt_lengths.tolist(),
            top_k=request.top_k,
            temperature=request.temperature,
        )
        self.num_rows = request.num_rows
        return ScoreAnswer(
            request_checksum=request.checksum,
            weight_version=request.weight_version,
            top_k=request.top_k,
            logprob_dtype=request.logprob_dtype,
            lengths=request.lengths - request.prompt_lengths,
            ids=torch.cat([given.ids.reshape(-1) for given in scores]).numpy(),
            logprobs=torch.cat([given.logprobs.reshape(-1) for given in scores]).numpy(),
            token_logprobs=torch.cat([given.token_logprobs for given in scores]).numpy(),
        )


class GenerateWork(_WireWork):
    """Implements ``Work`` for ``/v1/generate``."""

    def __init__(self, request: GenerateRequest) -> None:
        self._request = request
        self.num_tokens = len(request.tokens) + len(request.lengths) * request.max_new_tokens
        self.num_rows = 0
        self._vocab_size = 0
        self.weight_version = request.weight_version

    def check(self, info: EngineInfo) -> None:
        """See ``Work.check``."""
        self._vocab_size = info.vocab_size
        check_token(int(self._request.tokens.max()), info)
        check_length(int(self._request.lengths.max()) + self._request.max_new_tokens, info)

    async def run(self, host: EngineHost) -> GenerateAnswer:
        """See ``Work.run``."""
        request = self._request
        sampling = SamplingParams(
            max_new_tokens=request.max_new_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=min(request.top_k, self._vocab_size),
        )
        prompts = [prompt.tolist() for prompt in np.split(request.tokens, split_points(request.lengths))]
        drawn = await host.generate(prompts, sampling, request.seeds.tolist())
        tokens = torch.cat([generation.tokens for generation in drawn]).numpy()
        self.num_rows = len(tokens)
        return GenerateAnswer(
            request_checksum=request.checksum,
            weight_version=request.weight_version,
            logprob_dtype=request.logprob_dtype,
            lengths=np.array([len(generation.tokens) for generation in drawn], dtype=np.int32),
            stopped=np.array([generation.finish_reason == "stop" for generation in drawn], dtype=np.uint8),
            tokens=tokens,
            logprobs=torch.cat([generation.logprobs for generation in drawn]).numpy(),
        )


def check_token(largest: int, info: EngineInfo) -> None:
    """``Refusal`` 400 when the largest id of a request is outside the vocabulary."""
    if largest >= info.vocab_size:
        raise bad_request(f"token {largest} is outside the vocabulary of {info.vocab_size} of {info.model}")


def check_length(length: int, info: EngineInfo) -> None:
    """``Refusal`` 400 for a sequence, prompt and response, that the model cannot take."""
    if length > info.max_positions:
        raise bad_request(f"a sequence of {length} tokens: {info.model} takes {info.max_positions}")


def check_top_k(top_k: int, info: EngineInfo) -> None:
    """``Refusal`` 400 for more log-probs per token than the engine gives."""
    largest = info.vocab_size if info.max_logprobs is None else info.max_logprobs
    if top_k > largest:
        raise bad_request(f"top_k is {top_k}: {info.model} gives at most {largest}")


def _split(tokens: Array, lengths: Array) -> list[Tensor]:
    return list(torch.from_numpy(tokens.astype(np.int64)).split(lengths.tolist()))
