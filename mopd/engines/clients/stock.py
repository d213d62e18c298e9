"""What the clients of stock servers have in common: servers that score prompts at temperature 1, at their own ids."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mopd.base.types import UserError
from mopd.engines.checks import check_scoring
from mopd.engines.interface import EngineRejected, Given, Scores


def check_stock_scoring(
    tokens: Sequence[Tensor],
    prompt_lengths: Sequence[int],
    *,
    top_k: int,
    temperature: float,
    given: Given,
    hidden_size: int,
    vocab_size: int,
    name: str,
    server: str,
) -> None:
    """Raise for scores that a ``server`` of this kind cannot give.

    Raises:
        EngineRejected: ids of the caller's own, or hidden states, are asked for.
        UserError: another temperature than 1.
        ValueError: ``top_k`` outside the vocabulary, or a sequence without a prompt.
    """
    if given is not None or hidden_size:
        what = "log-probs of ids that it is asked for" if given is not None else "hidden states"
        raise EngineRejected(f"{name}: {server} gives no {what}")
    if temperature != 1:
        raise UserError(
            f"{name}: {server} scores prompts at temperature 1 only, loss.temperature is {temperature}: set "
            "loss.temperature: 1.0"
        )
    if not 0 <= top_k <= vocab_size:
        raise ValueError(f"top_k is {top_k}: {name} has a vocabulary of {vocab_size}")
    check_scoring(tokens, prompt_lengths)


def to_scores(ids: list[list[int]], logprobs: list[list[float]], own: list[float], top_k: int) -> Scores:
    """Return one sequence's rows as ``Scores``; ``own`` are the log-probs of its response tokens."""
    return Scores(
        ids=torch.tensor(ids, dtype=torch.int32).view(len(own), top_k),
        logprobs=torch.tensor(logprobs, dtype=torch.float32).view(len(own), top_k),
        token_logprobs=torch.tensor(own, dtype=torch.float32),
    )
