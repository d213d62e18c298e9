"""vLLM's answers as tensors, each checked against its request. Shapes: R response tokens, K top-k."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence

import torch
from torch import Tensor

from mopd.engines.interface import EngineUnavailable, Generation, Scores
from mopd.engines.vllm.start import EngineGenerateError, FlatLogprobs, RequestOutput, WeightVersionSpan


async def last_output(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    """Return the finished output of a request."""
    async for output in stream:
        if output.finished:
            return output
    raise EngineGenerateError("the answer ended before it was finished")


def read_scores(output: RequestOutput, tokens: Sequence[int], start: int, top_k: int, *, name: str) -> Scores:
    """Return rows ``tokens[start:]`` of vLLM's flat prompt log-probs: each row holds the sequence's own token, then the
    top-k.

    ``EngineUnavailable``, with the engine's ``name``, if they are not those of ``tokens``.
    """
    flat = output.prompt_logprobs
    if not isinstance(flat, FlatLogprobs) or len(flat) != len(tokens):
        raise EngineUnavailable(f"vLLM of {name} answered without log-probs for {len(tokens)} tokens")
    first, last = flat.start_indices[start], flat.end_indices[-1]
    shape = (len(tokens) - start, top_k + 1)
    if last - first != math.prod(shape):
        raise EngineUnavailable(f"vLLM of {name} answered {last - first} log-probs instead of {shape}")
    ids = torch.tensor(flat.token_ids[first:last], dtype=torch.int64).view(shape)
    if ids[:, 0].tolist() != list(tokens[start:]):
        raise EngineUnavailable(f"vLLM of {name} scored other tokens than it was given")
    logprobs = torch.tensor(flat.logprobs[first:last], dtype=torch.float32).view(shape)
    return Scores(
        ids=ids[:, 1:].int(), logprobs=logprobs[:, 1:].contiguous(), token_logprobs=logprobs[:, 0].contiguous()
    )


def no_scores(top_k: int) -> Scores:
    """Return the scores of an empty response."""
    empty = torch.zeros(0, top_k)
    return Scores(ids=empty.int(), logprobs=empty, token_logprobs=torch.zeros(0))


def read_generation(output: RequestOutput, stop_ids: Sequence[int], *, name: str) -> Generation:
    """Return the response and its log-probs; ``EngineUnavailable`` if they do not belong together."""
    completion = output.outputs[0]
    tokens, flat = list(completion.token_ids), completion.logprobs
    if completion.finish_reason not in ("stop", "length") or not isinstance(flat, FlatLogprobs):
        raise EngineUnavailable(f"vLLM of {name} ended a response with {completion.finish_reason!r}")
    if not tokens or list(flat.token_ids) != tokens:
        raise EngineUnavailable(f"vLLM of {name} reported log-probs of other tokens than it drew")
    return Generation(
        tokens=torch.tensor(tokens, dtype=torch.int64),
        logprobs=torch.tensor(flat.logprobs, dtype=torch.float32),
        finish_reason="stop" if tokens[-1] in stop_ids else "length",
        token_versions=_read_versions(completion.weight_versions, len(tokens), name=name),
    )


def _read_versions(spans: Sequence[WeightVersionSpan] | None, num_tokens: int, *, name: str) -> Tensor:
    """Return [R] int32 versions from vLLM's spans; ``EngineUnavailable`` unless they cover all tokens in order. vLLM's
    label before the first update is a word, ``default``: the checkpoint's weights, -1."""
    versions: list[int] = []
    for span in spans or ():
        if span.start != len(versions) or span.end <= span.start:
            break
        label = -1 if span.version == "default" else int(span.version)
        versions += [label] * (span.end - span.start)
    if len(versions) != num_tokens:
        raise EngineUnavailable(f"vLLM of {name} does not tell which weights drew its {num_tokens} tokens: {spans}")
    return torch.tensor(versions, dtype=torch.int32)
