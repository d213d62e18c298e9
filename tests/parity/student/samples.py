"""Seeded samples with teacher fields, without a rollout or a teacher; weights by their bits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from mopd.base.types import RouteShape, SampleMeta

DOMAINS = ("math", "code")
Weights = dict[str, tuple[float, float]]
ENSEMBLE: Weights = {"math": (0.25, 0.75), "code": (1.0, 0.0)}
"""Shares of two teachers: both answer for math, the first one alone for code."""


def make_samples(
    num: int,
    *,
    vocab_size: int,
    top_k: int,
    seed: int = 0,
    first_id: int = 0,
    weights: Weights | None = None,
    lengths: Sequence[tuple[int, int]] | None = None,
) -> tuple[list[SampleMeta], dict[str, list[Tensor]]]:
    """``num`` samples of unequal lengths in two domains, all loss fields included.

    With ``weights`` (shares by domain) the teacher fields are those of an ensemble, a second teacher beside the first.
    ``lengths``: tokens of each prompt and response, which are drawn otherwise.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    metas, fields = [], {}
    for i in range(num):
        prompt, response = (draw(1, 9), draw(1, 14)) if lengths is None else lengths[i]
        teacher = torch.log_softmax(2 * torch.randn(response, vocab_size, generator=generator), -1)
        # Never token 0: transformers gives the padding token's embedding no gradient.
        tokens = torch.randint(1, vocab_size, (prompt + response,), generator=generator)
        loss_mask = torch.rand(response, generator=generator) > 0.1
        loss_mask[-1] = True
        top = teacher.topk(top_k)
        own = teacher.gather(1, tokens[prompt:, None])[:, 0]
        values = {
            "tokens": tokens,
            "loss_mask": loss_mask,
            "rollout_logprobs": own - 0.3 * torch.rand(response, generator=generator),
            "teacher_ids": top.indices.int(),
            "teacher_logprobs": top.values,
            "teacher_token_logprobs": own,
            "task_advantage": torch.randn(1, generator=generator).expand(response),
        }
        for name, value in values.items():
            fields.setdefault(name, []).append(value)
        domain = DOMAINS[draw(0, 2)]
        if weights is not None:
            second = torch.log_softmax(2 * torch.randn(response, vocab_size, generator=generator), -1)
            top = second.topk(top_k)
            for name, value in (("teacher_ids", top.indices.int()), ("teacher_logprobs", top.values)):
                fields[name][-1] = torch.stack([fields[name][-1], value], dim=1)
            own = weights[domain][0] * own + weights[domain][1] * second.gather(1, tokens[prompt:, None])[:, 0]
            fields["teacher_token_logprobs"][-1] = own
        metas.append(
            SampleMeta(
                sample_id=first_id + i,
                domain=domain,
                weight_version=0,
                prompt_length=prompt,
                response_length=response,
                num_loss_tokens=int(loss_mask.sum()),
            )
        )
    return metas, fields


def make_routes(metas: Sequence[SampleMeta], shape: RouteShape, *, seed: int) -> list[Tensor]:
    """Experts that some rollout might have chosen, of all tokens of each sample but the last."""
    generator = torch.Generator().manual_seed(seed)
    drawn = (torch.rand(meta.length - 1, shape.num_layers, shape.num_experts, generator=generator) for meta in metas)
    return [scores.topk(shape.num_choices).indices.to(torch.uint8) for scores in drawn]


def hash_of(weights: Iterable[tuple[str, Tensor]]) -> str:
    """Of weights by name, bit by bit, in whatever order they come."""
    own = {
        name: hashlib.sha256(tensor.view(torch.uint8).cpu().numpy().tobytes()).hexdigest() for name, tensor in weights
    }
    return hashlib.sha256(repr(sorted(own.items())).encode()).hexdigest()
