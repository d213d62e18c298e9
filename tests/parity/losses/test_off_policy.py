"""How wrong a sampled loss's expected gradient is when another policy has drawn its tokens: the table of
``docs/losses.md``, by exact sums over the vocabulary."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from tests.parity.losses.on_device import parallel_policy_gradient, parallel_sampled_kl

ROOT = Path(__file__).parents[3]
VOCAB, NUM_PROBLEMS, KL = 1000, 8, 0.1
"""The row of the table that is computed here: nats between rollout and student."""
COLUMNS = {
    "k2": (None, "reverse"),
    "policy_gradient": (None, "reverse"),
    "k3": (None, "forward"),
    "tis": (("tis", 0.0, 2.0), "reverse"),
    "icepop": (("icepop", 0.5, 2.0), "reverse"),
}
"""What is measured -> its correction, and the KL whose gradient it shall have. The corrections are k2's."""


def problem(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Student's logits, teacher's log-probs, and log-probs of a rollout that is ``KL`` nats from the student."""
    generator = torch.Generator().manual_seed(seed)
    student, teacher, noise = (torch.randn(VOCAB, generator=generator, dtype=torch.float64) for _ in range(3))
    student = 2.5 * student
    low, high = 0.0, 10.0
    for _ in range(50):
        middle = (low + high) / 2
        rollout = torch.log_softmax(student + middle * noise, -1)
        distance = (rollout.exp() * (rollout - torch.log_softmax(student, -1))).sum()
        low, high = (middle, high) if distance < KL else (low, middle)
    return student, torch.log_softmax(student + 0.8 * teacher, -1), rollout


def error(name: str, student: Tensor, log_q: Tensor, rollout: Tensor) -> float:
    """Norm of what the expected gradient lacks, over the norm of the KL's gradient."""
    correction, wanted = COLUMNS[name]
    leaf = student.clone().requires_grad_()
    log_p = torch.log_softmax(leaf, -1)
    reverse, forward = (log_p.exp() * (log_p - log_q)).sum(), (log_q.exp() * (log_q - log_p)).sum()
    (expected,) = torch.autograd.grad(reverse if wanted == "reverse" else forward, leaf)
    rows, targets = student.expand(VOCAB, VOCAB).clone().requires_grad_(), torch.arange(VOCAB)
    if name == "policy_gradient":
        loss, _ = parallel_policy_gradient(rows, targets, log_q)
    else:
        estimator = name if correction is None else "k2"
        given = None if correction is None else rollout
        loss, _ = parallel_sampled_kl(rows, targets, log_q, estimator, rollout_logprobs=given, correction=correction)
    (gradient,) = torch.autograd.grad((loss * rollout.exp()).sum(), rows)
    return float((gradient.sum(0) - expected).norm() / expected.norm())


def test_the_table_of_the_docs() -> None:
    problems = [problem(seed) for seed in range(NUM_PROBLEMS)]
    mean = {name: sum(error(name, *one) for one in problems) / NUM_PROBLEMS for name in COLUMNS}
    text = (ROOT / "docs" / "losses.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| {KL} \| 0 \|(.*)\|$", text, re.M)
    told = dict(zip(("k2", "k3", "tis", "icepop"), map(float, row.split("|")), strict=True))
    assert {name: round(mean[name], 2) for name in told} == told
    assert round(mean["policy_gradient"], 2) == told["k2"]
