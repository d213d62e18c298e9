"""Cases in which two teachers of unequal hidden sizes send their states, one for each domain."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from mopd.base.types import SampleMeta
from mopd.config.groups import TeacherConfig
from mopd.config.losses import FullLossConfig, LargestTokensConfig, Loss
from tests.fixtures.tiny_models import make_hf_model
from tests.parity.student.samples import DOMAINS

VOCAB_SIZE = 16_001
"""So large that the logits of a few samples pass a budget of 1 MiB, and odd: the last rank's columns are padded."""
HIDDEN_SIZES = {"math": 32, "code": 96}
"""Of each domain's teacher; the student's is 64."""
LOSSES: dict[str, Loss] = {
    "full_forward": FullLossConfig(type="full_forward_kl"),
    "full_reverse": FullLossConfig(type="full_reverse_kl", temperature=1.5, aggregation="sequence_mean"),
    "full_forward_skew": FullLossConfig(type="full_forward_kl", skew=0.2),
    "full_reverse_skew": FullLossConfig(
        type="full_reverse_kl", skew=0.1, aggregation="sequence_mean", domain_budget={"math": 0.8, "code": 0.2}
    ),
    "full_jsd": FullLossConfig(type="full_jsd", beta=0.3),
    "full_jsd_task": FullLossConfig(type="full_jsd", task_reward_weight=0.7),
    "full_reverse_half": FullLossConfig(
        type="full_reverse_kl", tokens=LargestTokensConfig(largest="divergence", share=0.5)
    ),
    "full_forward_third": FullLossConfig(
        type="full_forward_kl", tokens=LargestTokensConfig(largest="student_entropy", share=0.3)
    ),
}


def make_models(folder: Path) -> dict[str, str]:
    """A student and the two teachers, one with an output matrix of its own."""
    student = make_hf_model(folder / "student", "qwen3", vocab_size=VOCAB_SIZE)
    math = make_hf_model(folder / "math", "qwen3", seed=3, vocab_size=VOCAB_SIZE, hidden_size=HIDDEN_SIZES["math"])
    untied = {"hidden_size": HIDDEN_SIZES["code"], "tie_word_embeddings": False}
    code = make_hf_model(folder / "code", "llama", seed=4, vocab_size=VOCAB_SIZE, **untied)
    return {"student": str(student), "math": str(math), "code": str(code)}


def teachers(models: dict[str, str]) -> dict[str, TeacherConfig]:
    """In another order than the domains', so that no number of one passes for the other's."""
    return {
        domain: TeacherConfig(model=models[domain], domains=(domain,), payload="hidden") for domain in DOMAINS[::-1]
    }


def make_hidden(metas: Sequence[SampleMeta], seed: int) -> list[Tensor]:
    """States of each response, which some teacher might have."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return [
        torch.randn(meta.response_length, HIDDEN_SIZES[meta.domain], generator=generator).bfloat16() for meta in metas
    ]
