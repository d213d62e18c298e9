"""What vLLM answers, as tensors; believed where it belongs to what was asked. Shapes: R response tokens, K top-k."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence

import torch
from torch import Tensor

from mopd.engines.interface import EngineUnavailable, Generation, Scores
from mopd.engines.vllm.start import EngineGenerateError, FlatLogprobs, RequestOutput, WeightVersionSpan


async def last_output(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    """The finished output of a request."""
    async for output in stream:
        if output.finished:
            return output
    raise EngineGenerateError("the answer ended before it was finished")


def read_scores(output: RequestOutput, tokens: Sequence[int], start: int, top_k: int, *, name: str) -> Scores:
    """Rows ``tokens[start:]`` of the flat prompt log-probs: the sequence's own token first, then the top-k.

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
    """Of an empty response."""
    empty = torch.zeros(0, top_k)
    return Scores(ids=empty.int(), logprobs=empty, token_logprobs=torch.zeros(0))


def read_generation(output: RequestOutput, stop_ids: Sequence[int], *, name: str) -> Generation:
    """The response and the log-probs of its tokens; ``EngineUnavailable`` if they do not belong together."""
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
    """[R] int32 from vLLM's spans, which cover all tokens in order; ``EngineUnavailable`` if they do not. Its label
    before the first update is a word: the weights of the checkpoint."""
    versions: list[int] = []
    for span in spans or ():
        if span.start != len(versions) or span.end <= span.start:
            break
        label = -1 if span.version == "default" else int(span.version)
        versions += [label] * (span.end - span.start)
    if len(versions) != num_tokens:
        raise EngineUnavailable(f"vLLM of {name} does not tell which weights drew its {num_tokens} tokens: {spans}")
    return torch.tensor(versions, dtype=torch.int32)
