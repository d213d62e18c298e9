"""Distillation losses on vocab-parallel logits. Formulas and conventions: ``docs/losses.md``."""

from mopd.losses.aggregation import token_weights
from mopd.losses.api import (
    fused_vocab_parallel_topk_kl,
    parallel_entropy_and_topk_overlap,
    parallel_gather_logprobs,
    parallel_policy_gradient,
    parallel_sampled_kl,
    parallel_topk_distill,
)
from mopd.losses.linear import linear_topk_distill
from mopd.losses.teacher_topk import chunked_topk_logprobs

__all__ = [
    "chunked_topk_logprobs",
    "fused_vocab_parallel_topk_kl",
    "linear_topk_distill",
    "parallel_entropy_and_topk_overlap",
    "parallel_gather_logprobs",
    "parallel_policy_gradient",
    "parallel_sampled_kl",
    "parallel_topk_distill",
    "token_weights",
]
