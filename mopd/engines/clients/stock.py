"""What the clients of stock servers have in common: servers that score prompts at temperature 1, at their own ids."""

from __future__ import annotations

import torch

from mopd.base.types import UserError
from mopd.engines.checks import check_adapter, check_scoring
from mopd.engines.interface import EngineRejected, Scores, ToDraw, ToScore, refuse_images


def check_stock(asked: ToScore | ToDraw, because: str, *, name: str) -> None:
    """Raise ``EngineRejected`` for images, which the server of ``name`` does not see ``because`` of what it is, and
    ``ValueError`` for an adapter."""
    refuse_images(asked.images, name, because=because)
    check_adapter(asked.adapter, (), name=name)


def check_stock_scoring(asked: ToScore, *, vocab_size: int, name: str, server: str) -> None:
    """Raise for scores that a ``server`` of this kind cannot give.

    Raises:
        EngineRejected: ids of the caller's own, or hidden states, are asked for.
        UserError: another temperature than 1.
        ValueError: ``top_k`` outside the vocabulary, or a sequence without a prompt.
    """
    if asked.given is not None or asked.hidden_size:
        what = "log-probs of ids that it is asked for" if asked.given is not None else "hidden states"
        raise EngineRejected(f"{name}: {server} gives no {what}")
    if asked.temperature != 1:
        raise UserError(
            f"{name}: {server} scores prompts at temperature 1 only, loss.temperature is {asked.temperature}: set "
            "loss.temperature: 1.0"
        )
    if not 0 <= asked.top_k <= vocab_size:
        raise ValueError(f"top_k is {asked.top_k}: {name} has a vocabulary of {vocab_size}")
    check_scoring(asked)


def to_scores(ids: list[list[int]], logprobs: list[list[float]], own: list[float], top_k: int) -> Scores:
    """Return one sequence's rows as ``Scores``; ``own`` are the log-probs of its response tokens."""
    return Scores(
        ids=torch.tensor(ids, dtype=torch.int32).view(len(own), top_k),
        logprobs=torch.tensor(logprobs, dtype=torch.float32).view(len(own), top_k),
        token_logprobs=torch.tensor(own, dtype=torch.float32),
    )
