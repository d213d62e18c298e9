"""Distillation losses on vocab-parallel logits. Formulas and conventions: ``docs/losses.md``.

``api`` holds the public functions, ``full`` those of the whole vocabulary, ``custom`` that of a user's function.
``divergences`` with ``topk``, ``sampled``, ``aggregation`` and ``choice`` hold the formulas; ``chunked``, ``triton``
and ``reference`` are the layers that compute them; ``linear`` puts an LM head before any of them; ``teacher_topk`` is
the teacher's side; ``trial`` tries a user's function.
"""

from mopd.losses.aggregation import domain_factors, token_weights
from mopd.losses.api import (
    parallel_entropy_and_topk_overlap,
    parallel_gather_logprobs,
    parallel_policy_gradient,
    parallel_sampled_kl,
    parallel_topk_distill,
)
from mopd.losses.choice import largest_rows, num_chosen, total_chosen
from mopd.losses.chunked.custom import TopKRows
from mopd.losses.custom import parallel_custom_loss
from mopd.losses.full import linear_full_distill, parallel_full_distill
from mopd.losses.linear.head import LinearHead, choose_rows
from mopd.losses.linear.loss import linear_loss
from mopd.losses.sampled import kept_sequences
from mopd.losses.teacher_topk import chunked_topk_logprobs

__all__ = [
    "LinearHead",
    "TopKRows",
    "choose_rows",
    "chunked_topk_logprobs",
    "domain_factors",
    "kept_sequences",
    "largest_rows",
    "linear_full_distill",
    "linear_loss",
    "num_chosen",
    "parallel_custom_loss",
    "parallel_entropy_and_topk_overlap",
    "parallel_full_distill",
    "parallel_gather_logprobs",
    "parallel_policy_gradient",
    "parallel_sampled_kl",
    "parallel_topk_distill",
    "token_weights",
    "total_chosen",
]
