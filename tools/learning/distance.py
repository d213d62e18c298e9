"""How far a student is from its teachers, by full-vocabulary KL on held-out prompts.

Reverse KL(student ‖ teacher) is taken along responses that the student draws, forward KL(teacher ‖ student) along those
that the teacher draws: a student that learnt on its teachers' texts alone is near them in the second and may be far in
the first. Shapes: B prompts, S tokens, V words.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mopd.config.schema import Recipe
from mopd.conversion.hf.pretrained import load_weights
from mopd.data.prompts import load_prompts
from mopd.data.tokenizer import load_tokenizer

NUM_PROMPTS = 64
"""Held-out prompts of a domain, the first ones."""
NEVER = 1e-4
"""Probability below which a model would never draw a token."""


@torch.no_grad()
def distances(recipe: Recipe, student: Path) -> dict[str, dict[str, float]]:
    """Return ``reverse_kl`` and ``forward_kl`` of the Hugging Face folder ``student`` by domain, in nats a token, and
    ``never_drawn``, the share of the tokens that the student draws which the domain's teacher would never draw."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer = load_tokenizer(recipe.student.model)
    prompts, model = load_prompts(recipe.data.validation, recipe.data, tokenizer), _load(student)
    found: dict[str, dict[str, float]] = {}
    for domain, rows in prompts.rows_by_domain.items():
        own = [list(prompts.row(row).tokens) for row in rows[:NUM_PROMPTS]]
        teacher = _load(Path(recipe.teachers[recipe.assignment.teachers_of(domain)[0]].model))
        length = recipe.rollout.max_response_length
        reverse_kl, never_drawn = _along_own_text(model, teacher, own, length, tokenizer)
        forward_kl, _ = _along_own_text(teacher, model, own, length, tokenizer)
        found[domain] = {"reverse_kl": reverse_kl, "forward_kl": forward_kl, "never_drawn": never_drawn}
    return found


def _load(folder: Path) -> Any:
    return load_weights(folder, torch.float32)[0].eval()


@torch.no_grad()
def _along_own_text(
    first: Any, second: Any, prompts: list[list[int]], length: int, tokenizer: Any
) -> tuple[float, float]:
    """Return KL(first ‖ second), mean over the tokens of responses that ``first`` draws at temperature 1, and the share
    of these tokens that ``second`` would never draw."""
    pad, width = tokenizer.pad_token_id, max(map(len, prompts))
    tokens_BS = torch.tensor([[pad] * (width - len(row)) + row for row in prompts])
    visible_BS = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts])
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": length}
    drawn_BS = first.generate(input_ids=tokens_BS, attention_mask=visible_BS, pad_token_id=pad, **options)
    response_BS = drawn_BS[:, width:]
    ended_BS = (response_BS == tokenizer.eos_token_id).long()
    counts_BS = (ended_BS.cumsum(1) - ended_BS) == 0  # up to the first end, which is a token like others
    whole_BS = torch.cat([visible_BS, counts_BS.long()], 1)
    logprobs = [_logprobs(model, drawn_BS, whole_BS)[:, width - 1 : -1] for model in (first, second)]
    kl_BS = (logprobs[0].exp() * (logprobs[0] - logprobs[1])).sum(-1)
    is_never_BS = logprobs[1].gather(-1, response_BS[..., None])[..., 0] < math.log(NEVER)
    return float(kl_BS[counts_BS].mean()), float(is_never_BS[counts_BS].double().mean())


def _logprobs(model: Any, tokens_BS: Tensor, visible_BS: Tensor) -> Tensor:
    positions_BS = (visible_BS.cumsum(1) - 1).clamp(min=0)
    logits_BSV: Tensor = model(
        input_ids=tokens_BS, attention_mask=visible_BS, position_ids=positions_BS, use_cache=False
    ).logits
    return logits_BSV.double().log_softmax(-1)
