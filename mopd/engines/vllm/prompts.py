"""Requests in vLLM's form, and its answers as tensors, each checked against its request.

A prompt has ONE placeholder for each image, which vLLM expands. It would silently expand an expanded prompt once more,
and bind a placeholder too many to another image. After each answer vLLM's expansion is therefore compared with ours.
Shapes: R response tokens, K top-k.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mopd.base.types import PromptImage, RouteShape
from mopd.engines.interface import ROUTE_DTYPES, EngineUnavailable, Generation, SamplingParams, Scores
from mopd.engines.stop_texts import StopTexts
from mopd.engines.vision import EngineVision
from mopd.engines.vllm.given import GIVEN_IDS, GIVEN_START, GIVEN_TOP_K, HIDDEN_NAME
from mopd.engines.vllm.start import (
    EngineGenerateError,
    FlatLogprobs,
    RequestOutput,
    RequestOutputKind,
    TokensPrompt,
    VllmSamplingParams,
    WeightVersionSpan,
    tokens_input,
)

MAX_IMAGES = 64
"""Most images of one prompt; vLLM reserves no memory for them before they arrive."""
BARRED_BIAS = -100.0
"""Value added to the logits of ids that are never drawn; the lowest that vLLM takes."""


def sight_options(sight: EngineVision) -> dict[str, Any]:
    """Return vLLM's arguments for a model that sees images."""
    edges = {"shortest_edge": sight.processing.min_pixels, "longest_edge": sight.processing.max_pixels}
    return {
        "load_format": "safetensors",  # noise would also replace what vLLM computes itself, such as visual.input_norm
        "skip_tokenizer_init": False,  # vLLM finds placeholders by their text
        "limit_mm_per_prompt": {"image": MAX_IMAGES, "video": 0},
        "mm_processor_kwargs": {"size": edges},
        "mm_processor_cache_gb": 0,  # its two halves disagree after a pause, which empties one of them
        # raw: before ids are barred; processed log-probs would be those of the remaining ids alone
        "logprobs_mode": "raw_logprobs",
    }


def scoring_params(top_k: int, start: int, given: Tensor | None, hidden_name: str | None = None) -> VllmSamplingParams:
    """Return the parameters of a request that scores its prompt, from place ``start`` on also at the ids ``given``
    [R, G], and has its hidden states kept under ``hidden_name``."""
    extra, width = None, top_k
    if given is not None or hidden_name is not None:
        ids = b"" if given is None else given.to(torch.int32).contiguous().numpy().tobytes()
        extra = {GIVEN_IDS: ids, GIVEN_START: start - 1, GIVEN_TOP_K: top_k}
        extra |= {} if hidden_name is None else {HIDDEN_NAME: hidden_name}
        width += 0 if given is None else given.shape[1]
    return VllmSamplingParams(
        max_tokens=1,
        temperature=0.0,
        prompt_logprobs=width,
        extra_args=extra,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def drawing_params(
    sampling: SamplingParams, seed: int, stop_ids: Sequence[int], sight: EngineVision | None
) -> VllmSamplingParams:
    """Return the parameters of a request for a response. With stop texts vLLM tells each token, and all before it."""
    cuts = sampling if sampling.temperature else SamplingParams(max_new_tokens=1)  # no cut matters to greedy
    return VllmSamplingParams(
        max_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=cuts.top_p,
        top_k=cuts.top_k,
        min_p=cuts.min_p,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty,
        seed=seed,
        stop_token_ids=list(sampling.ends(stop_ids)),
        ignore_eos=True,  # the stop ids are those of the torch engine, not vLLM's reading of the config
        logit_bias=None if sight is None else dict.fromkeys(sight.dims.token_ids, BARRED_BIAS),
        logprobs=sampling.num_top_ids,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.CUMULATIVE if sampling.stop else RequestOutputKind.FINAL_ONLY,
    )


async def make_prompt(tokens: list[int], images: Sequence[PromptImage], sight: EngineVision | None) -> Any:
    """Return the argument of vLLM's ``generate``. ``UserError`` for an image that cannot be read."""
    if not images or sight is None:
        return tokens_input(tokens)
    from mopd.data.image_files import read_rgb  # Pillow, which models of text never need

    pictures = [
        await asyncio.to_thread(read_rgb, await asyncio.to_thread(image.load), f"image {image.digest.hex()}")
        for image in images
    ]
    return TokensPrompt(
        prompt_token_ids=collapsed(tokens, images, sight),
        multi_modal_data={"image": pictures},
        multi_modal_uuids={"image": [image.digest.hex() for image in images]},
    )


def collapsed(tokens: list[int], images: Sequence[PromptImage], sight: EngineVision) -> list[int]:
    """Return ``tokens`` with one placeholder per image; ``ValueError`` if placeholders and ``images`` do not fit."""
    kept, done = list[int](), 0
    for start, image in zip(sight.starts(tokens, images), images, strict=True):
        kept += tokens[done : start + 1]
        done = start + sight.processing.num_tokens(image.grid)
    return kept + tokens[done:]


def require_same_expansion(output: RequestOutput, tokens: list[int], *, name: str) -> None:
    """Raise ``EngineUnavailable`` if vLLM of ``name`` saw another prompt than ``tokens``."""
    seen = list(output.prompt_token_ids or ())
    if seen != tokens:
        raise EngineUnavailable(
            f"vLLM of {name} read {len(seen)} tokens where {len(tokens)} were asked about: its processor makes other "
            "patches of the images"
        )


async def last_output(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    """Return the finished output of a request."""
    async for output in stream:
        if output.finished:
            return output
    raise EngineGenerateError("the answer ended before it was finished")


async def until_stopped(
    stream: AsyncIterator[RequestOutput], texts: StopTexts, begun: Sequence[int], abort: Callable[[], Awaitable[None]]
) -> tuple[RequestOutput, int | None]:
    """Return the finished output of a request, and the number of tokens with which it came to one of ``texts``
    (``None``: to none), beyond which vLLM may have drawn some more.

    ``begun`` are the response's tokens at the end of the prompt. ``abort`` ends the request, whose last output follows.
    """
    num_seen, end = 0, None
    async for output in stream:
        if end is None:
            tokens = [*begun, *output.outputs[0].token_ids]
            end = texts.first_end(tokens, after=len(begun) + num_seen)
            num_seen = len(tokens) - len(begun)
            if end is not None and not output.finished:
                await abort()
        if output.finished:
            return output, None if end is None else end - len(begun)
    raise EngineGenerateError("the answer ended before it was finished")


def read_scores(
    output: RequestOutput,
    tokens: Sequence[int],
    start: int,
    top_k: int,
    given: Tensor | None = None,
    states: Tensor | None = None,
    *,
    name: str,
) -> Scores:
    """Return rows ``tokens[start:]`` of vLLM's flat prompt log-probs: each row holds the sequence's own token, then the
    top-k, then the ids ``given`` [R, G]. ``states`` are the hidden states [R, H], where they were asked for.

    ``EngineUnavailable``, with the engine's ``name``, if they are not those of ``tokens`` or of the ids.
    """
    flat = output.prompt_logprobs
    if not isinstance(flat, FlatLogprobs) or len(flat) != len(tokens):
        raise EngineUnavailable(f"vLLM of {name} answered without log-probs for {len(tokens)} tokens")
    first, last = flat.start_indices[start], flat.end_indices[-1]
    num_given = 0 if given is None else given.shape[1]
    shape = (len(tokens) - start, top_k + 1 + num_given)
    if last - first != math.prod(shape):
        raise EngineUnavailable(f"vLLM of {name} answered {last - first} log-probs instead of {shape}")
    ids = torch.tensor(flat.token_ids[first:last], dtype=torch.int64).view(shape)
    if ids[:, 0].tolist() != list(tokens[start:]):
        raise EngineUnavailable(f"vLLM of {name} scored other tokens than it was given")
    if given is not None and not torch.equal(ids[:, top_k + 1 :], given.long()):
        raise EngineUnavailable(f"vLLM of {name} scored other ids than it was given")
    logprobs = torch.tensor(flat.logprobs[first:last], dtype=torch.float32).view(shape)
    return Scores(
        ids=ids[:, 1 : top_k + 1].int(),
        logprobs=logprobs[:, 1 : top_k + 1].contiguous(),
        token_logprobs=logprobs[:, 0].clone(memory_format=torch.contiguous_format),  # also of one row
        given_logprobs=None if given is None else logprobs[:, top_k + 1 :].contiguous(),
        hidden=states,
    )


def read_hidden(bits: bytes | None, num_rows: int, hidden_size: int, *, name: str) -> Tensor:
    """Return the hidden states [R, H] bf16 that a worker has kept; ``EngineUnavailable`` if they are not R of size
    H."""
    if bits is None or len(bits) != 2 * num_rows * hidden_size:
        said = "none" if bits is None else f"{len(bits)} bytes"
        raise EngineUnavailable(f"vLLM of {name} kept {said} of {num_rows} hidden states of size {hidden_size}")
    return torch.frombuffer(bytearray(bits), dtype=torch.bfloat16).view(num_rows, hidden_size)


def no_scores(top_k: int, num_given: int, hidden_size: int) -> Scores:
    """Return the scores of an empty response."""
    empty = torch.zeros(0, top_k)
    given = torch.zeros(0, num_given) if num_given else None
    states = torch.zeros(0, hidden_size, dtype=torch.bfloat16) if hidden_size else None
    return Scores(ids=empty.int(), logprobs=empty, token_logprobs=torch.zeros(0), given_logprobs=given, hidden=states)


def read_generation(
    output: RequestOutput, stop_ids: Sequence[int], num_top_ids: int = 0, *, text_end: int | None = None, name: str
) -> Generation:
    """Return the response and its log-probs; ``EngineUnavailable`` if they do not belong together. vLLM puts each token
    before the most probable ids of its place, even where it is one of them. ``text_end``: the number of tokens up to
    a stop text."""
    completion = output.outputs[0]
    tokens, flat = list(completion.token_ids), completion.logprobs
    has_ended = text_end is not None or completion.finish_reason in ("stop", "length")
    if not has_ended or not isinstance(flat, FlatLogprobs):
        raise EngineUnavailable(f"vLLM of {name} ended a response with {completion.finish_reason!r}")
    width = num_top_ids + 1
    if not tokens or list(flat.token_ids[::width]) != tokens or len(flat.token_ids) != width * len(tokens):
        raise EngineUnavailable(f"vLLM of {name} reported log-probs of other tokens than it drew")
    top_ids = torch.tensor(flat.token_ids, dtype=torch.int32).view(-1, width)[:text_end, 1:].contiguous()
    return Generation(
        tokens=torch.tensor(tokens[:text_end], dtype=torch.int64),
        logprobs=torch.tensor(flat.logprobs[::width][:text_end], dtype=torch.float32),
        top_ids=top_ids if num_top_ids else None,
        finish_reason="stop" if text_end is not None or tokens[-1] in stop_ids else "length",
        token_versions=_read_versions(completion.weight_versions, len(tokens), name=name)[:text_end],
    )


def read_routes(output: RequestOutput, shape: RouteShape, layers: Sequence[int], *, name: str) -> Tensor:
    """Return ``Generation.routes`` of a finished request, whose routes vLLM tells of all layers, those without experts
    too; ``EngineUnavailable`` if there are not as many as its tokens."""
    completion = output.outputs[0]
    told, count = completion.routed_experts, len(output.prompt_token_ids or ()) + len(completion.token_ids) - 1
    if told is None or len(told) < count:
        raise EngineUnavailable(f"vLLM of {name} tells no routes of its {count} tokens")
    return torch.from_numpy(told[:count, list(layers)].astype(np.int16)).to(ROUTE_DTYPES[shape.item_bytes])


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
