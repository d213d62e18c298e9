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

__all__ = [
    "fused_vocab_parallel_topk_kl",
    "parallel_entropy_and_topk_overlap",
    "parallel_gather_logprobs",
    "parallel_policy_gradient",
    "parallel_sampled_kl",
    "parallel_topk_distill",
    "token_weights",
]
