"""Losses of TRL and NeMo-RL that docs/losses.md calls the same function as ours, on a vocabulary of twelve.

Their definitions are written here from their documentation and code, plainly; value and gradient of each equal ours in
float64, or follow from ours as the page says.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mopd.losses import parallel_full_distill, parallel_topk_distill

VOCAB, K, ROWS = 12, 4, 6


def drawn(seed: int) -> Tensor:
    return 2 * torch.randn(ROWS, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


Z, LOG_Q = drawn(3), drawn(4).log_softmax(-1)
LOGPROBS, IDS = LOG_Q.topk(K, -1)


def kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    return (log_a.exp() * (log_a - log_b)).sum(-1)


def generalized(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """TRL's divergence of two distributions: beta 0 is KL(teacher ‖ student), 1 KL(student ‖ teacher)."""
    if beta in (0, 1):
        return kl(log_q, log_p) if beta == 0 else kl(log_p, log_q)
    mixture = (beta * log_q.exp() + (1 - beta) * log_p.exp()).log()
    return beta * kl(log_q, mixture) + (1 - beta) * kl(log_p, mixture)


def on_ids(z: Tensor, *, beta: float, add_tail: bool) -> Tensor:
    """TRL's on a row's ids, with one more outcome for all others, or conditional on them."""

    def outcomes(logprobs: Tensor) -> Tensor:
        if not add_tail:
            return logprobs.log_softmax(-1)
        return torch.cat([logprobs, (1 - logprobs.exp().sum(-1, keepdim=True)).log()], -1)

    return generalized(outcomes(z.log_softmax(-1).gather(-1, IDS)), outcomes(LOGPROBS), beta)


def nemo_rl(z: Tensor, *, kl_type: str, zero_outside_topk: bool) -> Tensor:
    """NeMo-RL's on the teacher's ids: the teacher conditional on them; the student too, or with its own log-probs."""
    student = z.log_softmax(-1).gather(-1, IDS) if zero_outside_topk else z.gather(-1, IDS).log_softmax(-1)
    teacher = LOGPROBS.log_softmax(-1)
    return kl(teacher, student) if kl_type == "forward" else kl(student, teacher)


def value_and_gradient(loss: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    leaf = Z.clone().requires_grad_()
    rows = loss(leaf)
    return rows.detach(), torch.autograd.grad(rows.sum(), leaf)[0]


def assert_same(theirs: Callable[[Tensor], Tensor], ours: Callable[[Tensor], tuple[Tensor, object]]) -> None:
    for one, other in zip(value_and_gradient(theirs), value_and_gradient(lambda z: ours(z)[0]), strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-10)


NAMES = {0.0: "forward_kl", 1.0: "reverse_kl", 0.3: "jsd"}


@pytest.mark.parametrize("beta", NAMES)
def test_trl(beta: float) -> None:
    for add_tail, tail in ((True, "bucket"), (False, "renormalize")):
        assert_same(
            lambda z, own=add_tail: on_ids(z, beta=beta, add_tail=own),
            lambda z, own=tail: parallel_topk_distill(z, IDS, LOGPROBS, loss=NAMES[beta], tail=own, beta=beta),
        )
    assert_same(
        lambda z: generalized(z.log_softmax(-1), LOG_Q, beta),
        lambda z: parallel_full_distill(z, LOG_Q, loss=NAMES[beta], beta=beta),
    )


@pytest.mark.parametrize("kl_type", ["forward", "reverse"])
def test_nemo_rl(kl_type: str) -> None:
    assert_same(
        lambda z: nemo_rl(z, kl_type=kl_type, zero_outside_topk=False),
        lambda z: parallel_topk_distill(z, IDS, LOGPROBS, loss=f"{kl_type}_kl", tail="renormalize"),
    )


def test_nemo_rls_forward_kl_outside_of_the_ids_is_the_truncated_sum_by_the_teachers_mass() -> None:
    mass = LOGPROBS.exp().sum(-1)
    assert_same(
        lambda z: mass * (nemo_rl(z, kl_type="forward", zero_outside_topk=True) + mass.log()),
        lambda z: parallel_topk_distill(z, IDS, LOGPROBS, tail="none"),
    )


@pytest.mark.parametrize("beta", NAMES)
def test_golds_matched_loss_is_ours_without_the_bucket(beta: float) -> None:
    """TRL's GOLD where one token of the student is one of a teacher with another vocabulary: the divergence summed over
    the tokens that both have, with their probabilities as they are. Ours has one more outcome, all other tokens; where
    neither has mass there, the two are one."""
    generator = torch.Generator().manual_seed(7)
    ours, theirs = (torch.randperm(n, generator=generator)[:K] for n in (VOCAB, VOCAB + 5))
    for outside in (0.0, -60.0):  # added to the logits of all other tokens
        other_z = 2 * torch.randn(ROWS, VOCAB + 5, dtype=torch.float64, generator=generator)
        shift, other_shift = torch.full((VOCAB,), outside).double(), torch.full((VOCAB + 5,), outside).double()
        shift[ours], other_shift[theirs] = 0, 0
        log_q = (other_z + other_shift).log_softmax(-1)[:, theirs]
        ids = ours.expand(ROWS, K)

        def gold(z: Tensor, log_q: Tensor = log_q, ids: Tensor = ids, shift: Tensor = shift) -> Tensor:
            return generalized((z + shift).log_softmax(-1).gather(-1, ids), log_q, beta)

        def rest(z: Tensor, log_q: Tensor = log_q, ids: Tensor = ids, shift: Tensor = shift) -> Tensor:
            inside = (z + shift).log_softmax(-1).gather(-1, ids)
            return generalized(*((1 - own.exp().sum(-1, keepdim=True)).log() for own in (inside, log_q)), beta)  # type: ignore[call-arg]

        assert_same(
            (lambda z, own=gold, more=rest: own(z) + more(z)) if not outside else gold,
            lambda z, log_q=log_q, ids=ids, shift=shift: parallel_topk_distill(
                z + shift, ids, log_q, loss=NAMES[beta], tail="bucket", beta=beta
            ),
        )
