"""Divergences over other ids than the teacher's own, on a vocabulary of twelve, against their definitions.

Rows are made as a run makes them (``support_rows``): places that repeat an id are empty. With ``tail: sampled`` the
expectation over the sampled token, by a sum over the whole vocabulary, is the reverse KL of all ids, value and
gradient, whatever the ids are; also for tokens that another policy drew, with their weight.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mopd.config.payloads import Asked
from mopd.engines.interface import Scores
from mopd.orchestrator.support import NO_ID, support_rows
from tests.parity.losses.definitions import reverse_kl_and_gradient, support, topk_loss
from tests.parity.losses.on_device import parallel_sampled_kl, parallel_topk_distill

VOCAB, K, ROWS = 12, 4, 6
ALWAYS = (3, 7)
PAYLOADS = {
    "topk": Asked(own=K),
    "student_topk": Asked(student=K),
    "union": Asked(own=K, student=K),
    "always": Asked(own=K, student=K, always=len(ALWAYS)),
}
LOSSES = [
    (loss, tail)
    for loss in ("forward_kl", "reverse_kl", "jsd")
    for tail in ("bucket", "generalized", "renormalize", "none")
]


@pytest.fixture
def z() -> Tensor:
    return 2 * torch.randn(ROWS, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def log_q() -> Tensor:
    drawn = torch.randn(ROWS, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    return (2 * drawn).log_softmax(-1)


def rows_of(asked: Asked, z: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """Ids and log-probs [T, K] of a run's rows, two places wider than the payload needs."""
    own = log_q.topk(asked.own, -1)
    always = torch.tensor(ALWAYS[: asked.always], dtype=torch.int64).expand(len(z), -1)
    given = torch.cat([z.topk(asked.student, -1).indices, always], 1)
    scores = Scores(
        ids=own.indices.int(),
        logprobs=own.values,
        token_logprobs=log_q[:, 0],
        given_logprobs=log_q.gather(1, given) if asked.given else None,
    )
    return support_rows(scores, given.int() if asked.given else None, asked.width + 2)


@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_row_holds_each_id_once(z: Tensor, log_q: Tensor, payload: str) -> None:
    asked = PAYLOADS[payload]
    ids, logprobs = rows_of(asked, z, log_q)
    assert ids.shape == logprobs.shape == (ROWS, asked.width + 2) and ids.dtype == torch.int32
    has_repeats = False
    for row, said, own_z, own_q in zip(ids.tolist(), logprobs, z, log_q, strict=True):
        expected = support(payload.replace("always", "union"), own_z, own_q, K, ALWAYS[: asked.always])
        has_repeats = has_repeats or len(expected) < asked.width
        assert [i for i in row if i != NO_ID] == expected
        assert torch.equal(said[said > -torch.inf], own_q[expected])
    assert has_repeats == (payload in ("union", "always"))  # else the test would show nothing of them


@pytest.mark.parametrize("backend", ["chunked", "reference"])
@pytest.mark.parametrize(("loss", "tail"), LOSSES)
@pytest.mark.parametrize("payload", PAYLOADS)
def test_every_payload_is_its_definition(
    z: Tensor, log_q: Tensor, payload: str, loss: str, tail: str, backend: str
) -> None:
    ids, logprobs = rows_of(PAYLOADS[payload], z, log_q)
    expected = []
    leaf = z.clone().requires_grad_()
    for own_z, own_q in zip(leaf, log_q, strict=True):
        row = support(payload.replace("always", "union"), own_z, own_q, K, ALWAYS[: PAYLOADS[payload].always])
        expected.append(topk_loss(own_z, row, own_q[row].tolist(), loss=loss, tail=tail))
    (gradient,) = torch.autograd.grad(torch.stack(expected).sum(), leaf)
    options: dict[str, Any] = {"loss": loss, "tail": tail, "backend": backend}
    for dtype, close in ((torch.float64, 1e-10), (torch.float32, 2e-6)):
        inp = z.to(dtype).requires_grad_()
        found, _ = parallel_topk_distill(inp, ids, logprobs.to(dtype), **options)
        (actual,) = torch.autograd.grad(found.sum(), inp)
        torch.testing.assert_close(found.double(), torch.stack(expected).detach(), atol=close, rtol=close)
        torch.testing.assert_close(actual.double(), gradient, atol=close, rtol=close)


def expected_over_tokens(
    z: Tensor, log_q: Tensor, asked: Asked, drawn_from: Tensor, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Expectation of value and gradient of row 0 over tokens that ``drawn_from`` [V] draws, and the summed variance of
    the gradient's entries."""
    ids, logprobs = (own[0].expand(VOCAB, -1) for own in rows_of(asked, z, log_q))
    leaf, target = z[0].expand(VOCAB, -1).clone().requires_grad_(), torch.arange(VOCAB)
    given: dict[str, Any] = {"loss": "reverse_kl", "target": target, **options}
    if options["tail"] == "sampled":
        given["target_logprobs"] = log_q[0]
    loss, _ = parallel_topk_distill(leaf, ids, logprobs, **given)
    (rows,) = torch.autograd.grad(loss.sum(), leaf)
    mean = (drawn_from[:, None] * rows).sum(0)
    return (drawn_from * loss).sum().detach(), mean, (drawn_from[:, None] * (rows - mean).square()).sum()


@pytest.mark.parametrize("backend", ["chunked", "reference"])
@pytest.mark.parametrize("payload", PAYLOADS)
def test_the_sampled_tail_is_the_whole_reverse_kl_in_expectation(
    z: Tensor, log_q: Tensor, payload: str, backend: str
) -> None:
    truth, gradient = reverse_kl_and_gradient(z[0], log_q[0])
    on_policy = z[0].softmax(0)
    options = {"tail": "sampled", "backend": backend}
    value, found, variance = expected_over_tokens(z, log_q, PAYLOADS[payload], on_policy, **options)
    torch.testing.assert_close(value, truth, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(found, gradient, atol=1e-10, rtol=1e-10)
    # the sum over S leaves less to chance than the sampled token alone
    leaf = z[0].expand(VOCAB, -1).clone().requires_grad_()
    alone, _ = parallel_sampled_kl(leaf, torch.arange(VOCAB), log_q[0], "k2")
    (rows,) = torch.autograd.grad(alone.sum(), leaf)
    assert variance < 0.7 * (on_policy[:, None] * (rows - gradient).square()).sum()
    # the bucket alone is another divergence
    _, found, variance = expected_over_tokens(z, log_q, PAYLOADS[payload], on_policy, tail="bucket", backend=backend)
    assert variance < 1e-20 and (found - gradient).abs().max() > 1e-3


def test_tokens_of_another_policy_need_their_weight(z: Tensor, log_q: Tensor) -> None:
    """The ids are those that the old policy found most probable, as they are in a run."""
    _, gradient = reverse_kl_and_gradient(z[0], log_q[0])
    old = z[0] + torch.randn(VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    asked = PAYLOADS["topk"]
    weighted = {"rollout_logprobs": old.log_softmax(0), "correction": ("tis", 0.0, 1e9)}
    for options, is_right in ((weighted, True), ({}, False)):
        _, found, _ = expected_over_tokens(z, log_q, asked, old.softmax(0), tail="sampled", **options)
        assert ((found - gradient).abs().max() < 1e-10) == is_right


def test_terms_of_the_sampled_tail_are_told_apart(z: Tensor, log_q: Tensor) -> None:
    ids, logprobs = rows_of(PAYLOADS["topk"], z, log_q)
    target = torch.tensor(
        [int(ids[0, 0]), *[next(j for j in range(VOCAB) if j not in row) for row in ids[1:].tolist()]]
    )
    own = log_q.gather(1, target[:, None]).squeeze(1)
    options: dict[str, Any] = {"loss": "reverse_kl", "target": target}
    task = {"task_advantage": torch.ones(ROWS), "task_reward_weight": 0.25}
    _, bucket = parallel_topk_distill(z, ids, logprobs, tail="bucket", **options)
    _, found = parallel_topk_distill(z, ids, logprobs, tail="sampled", target_logprobs=own, **options, **task)
    assert found["outside"].tolist() == [0.0] + [1.0] * (ROWS - 1) and found["tail_loss"][0] == 0
    torch.testing.assert_close(found["task_loss"], torch.full((ROWS,), -0.25, dtype=torch.float64))
    parts = bucket["unweighted_loss"] + found["tail_loss"] + found["task_loss"]
    torch.testing.assert_close(found["unweighted_loss"], parts)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"loss": "forward_kl"}, "samples of the student estimate reverse_kl alone"),
        ({"target_logprobs": None}, "needs target, target_logprobs"),
        ({"target": None}, "needs target, target_logprobs"),
    ],
)
def test_what_the_sampled_tail_needs(z: Tensor, log_q: Tensor, change: dict[str, Any], problem: str) -> None:
    ids, logprobs = rows_of(PAYLOADS["topk"], z, log_q)
    options = {"loss": "reverse_kl", "target": ids[:, 0].long(), "target_logprobs": logprobs[:, 0], **change}
    with pytest.raises(ValueError, match=problem):
        parallel_topk_distill(z, ids, logprobs, tail="sampled", **options)


CALL = 9
"""A tag after which a response is another one: the teacher writes it in 4 of 1,000 responses."""


def learned(asked: Asked, tail: str = "bucket") -> float:
    """Probability of the tag after 600 steps of a student that begins as its teacher but for the tail, where it has
    put all on the tag: 60 in 1,000."""
    q = torch.full((VOCAB,), 0.007, dtype=torch.float64)
    q[: K + 1] = torch.tensor([0.52, 0.26, 0.14, 0.02, 0.01])
    q[CALL] = 0.004
    log_q = (q / q.sum()).log()[None]
    start = log_q.clone()
    tail_ids = [j for j in range(VOCAB) if j >= K]
    start[0, tail_ids] = torch.log(log_q[0, tail_ids].exp().sum()) - 30
    start[0, CALL] = log_q[0, tail_ids].exp().sum().log()
    z = start.requires_grad_()
    optimizer = torch.optim.Adam([z], lr=0.03)
    target = torch.arange(VOCAB)
    for _ in range(600):
        p = z.detach().softmax(-1)[0]
        ids, logprobs = (own.expand(VOCAB, -1) for own in rows_of(asked, z.detach(), log_q))
        extra: dict[str, Any] = {"target": target, "target_logprobs": log_q[0]} if tail == "sampled" else {}
        loss, _ = parallel_topk_distill(
            z.expand(VOCAB, -1), ids, logprobs, loss="reverse_kl", tail=tail, loss_weight=p, **extra
        )
        optimizer.zero_grad()
        loss.sum().backward()
        optimizer.step()
    return float(z.detach().softmax(-1)[0, CALL])


def test_a_tag_that_decides_is_learnt_where_it_is_in_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the teacher's top k alone the student's calls are as many as all rare tokens together, for ever: the bucket
    weighs the same on both sides. With the student's own top k they fall until others are above them there; the tag
    in every row, and the sampled tail, bring them to the teacher's."""
    monkeypatch.setattr("tests.parity.losses.test_payloads.ALWAYS", (CALL,))
    assert learned(PAYLOADS["topk"]) > 0.05
    assert learned(PAYLOADS["union"]) < 0.021  # the teacher's fourth most probable id has 0.02
    assert learned(Asked(own=K, always=1)) < 0.006
    assert learned(PAYLOADS["topk"], tail="sampled") < 0.006
