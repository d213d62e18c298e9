"""Checks of requests to an engine and of its answers: can this request be served, is this answer possible at all?

The router checks every answer, wherever the engine runs. An answer that no distribution over a vocabulary can give (an
id listed twice, a mass above 1, NaN) would pass through the loss as a huge gradient. It means that the replica is
broken; the request may go to another one.
Shapes: R response tokens of all sequences, K top-k.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mopd.base.types import UserError
from mopd.engines.interface import ROUTE_DTYPES, Generation, Scores, ToDraw, ToScore, WeightsLost, num_routed

MAX_EXCESS = 1e-4
"""Probability mass above 1 that rounding explains (``docs/losses.md``); a log-prob may exceed 0 by as much."""
MAX_OWN_DIFFERENCE = 1e-3
"""Largest difference between the two log-probs that an answer may hold of one token, relative to max(1, their size)."""

Array = np.ndarray[Any, Any]


def check_weights(has_weights: bool, *, name: str) -> None:
    """Raise ``WeightsLost`` for an engine without weights."""
    if not has_weights:
        raise WeightsLost(f"the engine of {name} has no weights: send it some first")


def check_adapter(adapter: str, known: Collection[str], *, name: str) -> None:
    """Raise ``ValueError`` for an adapter that the engine of ``name`` has not loaded."""
    if adapter and adapter not in known:
        there = ", ".join(sorted(known)) or "none"
        raise ValueError(f"adapter {adapter!r} is not loaded in the engine of {name}, which has {there}")


def check_scoring(asked: ToScore) -> None:
    """Raise ``ValueError`` for a sequence whose prompt is empty or longer than the sequence."""
    for i, (sequence, start) in enumerate(zip(asked.tokens, asked.prompt_lengths, strict=True)):
        if not 1 <= start <= len(sequence):
            raise ValueError(f"sequence {i} has {len(sequence)} tokens and prompt length {start}: need 1 or more")


def check_sampling(asked: ToDraw, stop_ids: Sequence[int], *, name: str) -> None:
    """Raise for a request for responses that cannot be served.

    Raises:
        ValueError: a prompt is empty or has no token before ``num_begun``, or ``max_new_tokens`` is below 1.
        UserError: no token ends a response; the message names the checkpoint, ``name``.
    """
    prompts, sampling = asked.prompts, asked.sampling
    if sampling.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {sampling.max_new_tokens}: set 1 or more")
    if not all(prompts):
        raise ValueError(f"prompt {next(i for i, p in enumerate(prompts) if not p)} is empty")
    if any(len(prompt) <= sampling.num_begun for prompt in prompts):
        raise ValueError(f"num_begun is {sampling.num_begun}, and a prompt has no token before them")
    if not stop_ids and not sampling.ignore_eos:
        raise UserError(f"{name}: no eos_token_id in generation_config.json or config.json: set it there")


def check_length(asked: ToScore | ToDraw, limit: int, limit_key: str, *, name: str) -> None:
    """Raise ``UserError`` for a prompt that does not fit with its response, or a sequence that is too long.

    ``limit_key`` names the origin of ``limit``: the model's ``max_position_embeddings``, or the engine's
    ``max_model_len``, which can be raised. ``name`` is the model's or engine's.
    """
    longest = max(map(len, asked.sequences), default=0)
    max_new_tokens = asked.sampling.max_new_tokens if isinstance(asked, ToDraw) else None
    if longest + (max_new_tokens or 0) <= limit:
        return
    owner, cure = ("engine", "raise engine.max_model_len or ") if limit_key == "max_model_len" else ("model", "")
    if max_new_tokens is None:
        problem = f"sequence longer than the {owner}: {longest} tokens"
    else:
        problem = (
            f"prompt longer than the {owner}: {longest} prompt tokens + rollout.max_response_length {max_new_tokens}"
        )
    cure += "lower data.max_prompt_length or rollout.max_response_length"
    raise UserError(f"{problem} > {limit_key} {limit} of {name}: {cure}")


def check_ids(asked: ToScore | ToDraw, vocab_size: int, *, name: str) -> None:
    """Raise ``ValueError`` for an id outside the embedding of ``name``, which would end a server's process and not
    only the request. No sequence is empty."""
    for i, sequence in enumerate(asked.sequences):
        ids = torch.as_tensor(sequence)
        if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
            kind = "prompt" if isinstance(asked, ToDraw) else "sequence"
            raise ValueError(f"{kind} {i} has an id outside the vocabulary of {vocab_size} of {name}")


def check_scores(scores: Sequence[Scores], asked: ToScore, *, vocab_size: int | None) -> None:
    """Raise ``ValueError``, one line with the sequence, the row and what is wrong, unless ``scores`` can answer.

    Checks every promise of ``Scores``. Rows are ordered, most probable id first; ids of equal log-prob may stand in any
    order. A listed log-prob may be -inf: the entry then leaves the loss's set S. The token's own log-prob must be
    finite. Ids are below ``vocab_size``; ``None``: it is unknown.
    """
    top_k, num_given, hidden_size = asked.top_k, asked.num_given, asked.hidden_size
    if len(scores) != len(asked):
        raise ValueError(f"{len(scores)} answers for {len(asked)} sequences")
    responses = [tokens[start:] for tokens, start in zip(asked.tokens, asked.prompt_lengths, strict=True)]
    counts = [len(response) for response in responses]
    for i, (own, count) in enumerate(zip(scores, counts, strict=True)):
        _check_tensor(own.ids, "ids", (count, top_k), torch.int32, i)
        _check_tensor(own.logprobs, "logprobs", (count, top_k), torch.float32, i)
        _check_tensor(own.token_logprobs, "token_logprobs", (count,), torch.float32, i)
        if num_given:
            _check_tensor(own.given_logprobs, "given_logprobs", (count, num_given), torch.float32, i)
        if hidden_size:
            _check_tensor(own.hidden, "hidden", (count, hidden_size), torch.bfloat16, i)
            if own.hidden is not None and not own.hidden.isfinite().all():
                raise ValueError(f"sequence {i}: a hidden state is not finite")
    if not sum(counts):
        return
    rows = _Rows(counts)
    own_R = torch.cat([own.token_logprobs for own in scores]).numpy()
    sampled_R = torch.cat(responses).numpy()
    ids_RK = torch.cat([own.ids for own in scores]).numpy()
    logprobs_RK = torch.cat([own.logprobs for own in scores]).numpy()
    if top_k:
        rows.check(ids_RK, logprobs_RK, own_R, sampled_R, vocab_size)
    else:
        rows.check_own(own_R)
    if asked.given is not None and num_given:
        ids_RG = torch.cat([*asked.given]).numpy()
        given_RG = torch.cat([own.given_logprobs for own in scores if own.given_logprobs is not None]).numpy()
        rows.check_given(ids_RG, given_RG, own_R, sampled_R)


def check_hidden_size(hidden_size: int, own: int, *, name: str) -> None:
    """Raise ``ValueError`` unless ``hidden_size`` is 0 (no states) or ``own``, that of the model of ``name``."""
    if hidden_size not in (0, own):
        raise ValueError(f"hidden states of size {hidden_size} are asked for: those of {name} have {own}")


def check_given(asked: ToScore, *, vocab_size: int, name: str) -> None:
    """Raise ``ValueError`` unless the ids ``given`` are a row of as many, all in the vocabulary of ``name``, for each
    response token."""
    if asked.given is None:
        return
    for i, (ids, sequence, start) in enumerate(zip(asked.given, asked.tokens, asked.prompt_lengths, strict=True)):
        _check_tensor(ids, "given ids", (len(sequence) - start, asked.num_given), torch.int32, i)
        if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < vocab_size):
            raise ValueError(f"sequence {i}: given ids are outside the vocabulary of {vocab_size} of {name}")


def check_generations(generations: Sequence[Generation], asked: ToDraw, *, vocab_size: int | None) -> None:
    """Raise ``ValueError``, one line as in ``check_scores``, for responses that no engine can have drawn."""
    max_new_tokens, num_top_ids = asked.sampling.max_new_tokens, asked.sampling.num_top_ids
    routes = asked.sampling.routes
    for i, given in enumerate(generations):
        count = len(given.tokens) if isinstance(given.tokens, Tensor) and given.tokens.dim() == 1 else -1
        is_part = given.finish_reason == "handed_back"  # not complete: it may be empty, never full
        least, most = (0, max_new_tokens - 1) if is_part else (1, max_new_tokens)
        if not least <= count <= most:
            raise ValueError(f"response {i} has not {least} to {most} tokens (max_new_tokens) but {count}")
        _check_tensor(given.tokens, "tokens", (count,), torch.int64, i)
        _check_tensor(given.logprobs, "logprobs", (count,), torch.float32, i)
        _check_tensor(given.token_versions, "token_versions", (count,), torch.int32, i)
        if num_top_ids:
            _check_tensor(given.top_ids, "top_ids", (count, num_top_ids), torch.int32, i)
        if routes is not None:
            shape = num_routed(len(asked.prompts[i]), count), routes.num_layers, routes.num_choices
            _check_tensor(given.routes, "routes", shape, ROUTE_DTYPES[routes.item_bytes], i)
            told = given.routes
            if told is not None and told.numel() and not 0 <= int(told.min()) <= int(told.max()) < routes.num_experts:
                raise ValueError(f"response {i} has a route to an expert beyond the {routes.num_experts}")
        versions = given.token_versions.numpy()
        if (versions[1:] < versions[:-1]).any():
            raise ValueError(f"response {i} has a token whose weight version falls below the one before")
        if count and versions[0] < -1:
            raise ValueError(f"response {i} has a token of weight version {versions[0]}")
        if given.finish_reason not in ("stop", "length", "handed_back"):
            raise ValueError(f"response {i} ended for an unknown reason: {given.finish_reason!r:.40}")
    if not any(len(given.tokens) for given in generations):
        return
    rows = _Rows([len(given.tokens) for given in generations])
    rows.check_ids(torch.cat([given.tokens for given in generations]).numpy()[:, None], vocab_size)
    rows.check_own(torch.cat([given.logprobs for given in generations]).numpy())
    if num_top_ids:
        tops_RN = torch.cat([given.top_ids for given in generations if given.top_ids is not None]).numpy()
        rows.check_ids(tops_RN, vocab_size)
        rows.check_unrepeated(tops_RN)


class _Rows:
    """Checks the rows of all sequences in one pass; only a failure looks up which sequence the row belongs to."""

    def __init__(self, counts: Sequence[int]) -> None:
        self._ends = np.cumsum(counts)

    def check(self, ids_RK: Array, logprobs_RK: Array, own_R: Array, sampled_R: Array, vocab_size: int | None) -> None:
        self.check_ids(ids_RK, vocab_size)
        self.check_unrepeated(ids_RK)
        if not logprobs_RK.max() <= MAX_EXCESS:
            self._refuse(~(logprobs_RK.max(1) <= MAX_EXCESS), "a log-prob is above 0 or not a number", logprobs_RK)
        self.check_own(own_R)
        mass_R = np.exp(logprobs_RK).sum(1)  # fp32; numpy adds in pairs: rounding stays far below MAX_EXCESS
        rows, place_R = np.arange(len(own_R)), (ids_RK == sampled_R.astype(np.int32)[:, None]).argmax(1)
        is_listed = ids_RK[rows, place_R] == sampled_R
        limit = 1 + MAX_EXCESS
        self._refuse(mass_R > limit, "the probabilities of a row add up to more than 1", mass_R)
        with_own_R = np.where(is_listed, mass_R, mass_R + np.exp(own_R))
        self._refuse(with_own_R > limit, "the probabilities of a row and of the response's token add up to more than 1")
        difference_R = np.abs(np.where(is_listed, logprobs_RK[rows, place_R], own_R) - own_R)
        allowed_R = MAX_OWN_DIFFERENCE * np.maximum(1, -own_R)
        self._refuse(~(difference_R <= allowed_R), "the response's token has one log-prob in its row and another alone")
        disorder_R = (logprobs_RK[:, 1:] > logprobs_RK[:, :-1]).any(1)
        self._refuse(disorder_R, "a more probable id stands behind a less probable one")
        last_R = logprobs_RK[:, -1]  # -inf: the row lists fewer than K
        missing_R = ~is_listed & (last_R > -np.inf) & (own_R > last_R + allowed_R)
        self._refuse(missing_R, "the response's token is more probable than the last id of its row, but not listed")

    def check_unrepeated(self, ids_RK: Array) -> None:
        """Refuse rows that hold an id twice."""
        in_order = np.sort(ids_RK, axis=1)  # equal ids are neighbours
        self._refuse((in_order[:, 1:] == in_order[:, :-1]).any(1), "an id stands twice in one row")

    def check_given(self, ids_RG: Array, logprobs_RG: Array, own_R: Array, sampled_R: Array) -> None:
        """Refuse rows whose log-probs at given ids are none, or which have another one of the response's token."""
        self._refuse(~(logprobs_RG.max(1) <= MAX_EXCESS), "a given id has a log-prob above 0 or none", logprobs_RG)
        is_own_RG = ids_RG == sampled_R.astype(np.int32)[:, None]
        allowed_R1 = MAX_OWN_DIFFERENCE * np.maximum(1, -own_R)[:, None]
        bad_RG = is_own_RG & ~(np.abs(np.where(is_own_RG, logprobs_RG, 0) - own_R[:, None]) <= allowed_R1)
        self._refuse(bad_RG.any(1), "the response's token has one log-prob where it was given and another alone")

    def check_ids(self, ids_RK: Array, vocab_size: int | None) -> None:
        """Refuse rows of [R, K] ids with one outside the vocabulary."""
        if ids_RK.min() < 0 or (vocab_size is not None and ids_RK.max() >= vocab_size):
            limit = np.inf if vocab_size is None else vocab_size
            bad_R = ((ids_RK < 0) | (ids_RK >= limit)).any(1)
            self._refuse(bad_R, f"an id is outside the vocabulary of {vocab_size}", ids_RK)

    def check_own(self, own_R: Array) -> None:
        """Refuse rows of [R] log-probs that are above 0 or not finite."""
        if not (own_R.max() <= MAX_EXCESS and own_R.min() > -np.inf):
            bad_R = ~((own_R <= MAX_EXCESS) & (own_R > -np.inf))
            self._refuse(bad_R, "the response's token has a log-prob above 0 or not finite", own_R)

    def _refuse(self, bad_R: Any, problem: str, values: Array | None = None) -> None:
        if not bad_R.any():
            return
        row = int(bad_R.argmax())
        sequence = int(np.searchsorted(self._ends, row, side="right"))
        # a row is counted over all sequences; the message counts within its own
        place = row - (int(self._ends[sequence - 1]) if sequence else 0)
        shown = "" if values is None else f" ({_extreme(values[row]):g})"
        raise ValueError(f"sequence {sequence}, response position {place}: {problem}{shown}")


def _extreme(values: Array) -> float:
    """Return the value of a bad row that shows the fault best: NaN or the largest; of ids a negative one."""
    largest = float(values.max())
    return float(values.min()) if values.dtype.kind == "i" and values.min() < 0 else largest


def _check_tensor(value: object, name: str, shape: tuple[int, ...], dtype: torch.dtype, sequence: int) -> None:
    if not isinstance(value, Tensor):
        raise ValueError(f"sequence {sequence}: {name} is no tensor but {type(value).__name__}")
    if tuple(value.shape) != shape or value.dtype != dtype:
        raise ValueError(
            f"sequence {sequence}: {name} is {value.dtype} {list(value.shape)}, expected {dtype} {list(shape)}"
        )
