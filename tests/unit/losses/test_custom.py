"""Losses of users: equal to built-in ones, exact under autograd whatever they read, and refused in a sentence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mopd.losses import (
    LinearHead,
    TopKRows,
    linear_loss,
    parallel_custom_loss,
    parallel_sampled_kl,
    parallel_topk_distill,
)
from mopd.losses.trial import plain_rows
from mopd.testing import UserError, check_loss
from tests.fixtures import custom_losses

T, V, K = 40, 300, 8


def problem(dtype: torch.dtype) -> dict[str, Tensor]:
    """Rows of weight 0, sampled tokens among the teacher's ids and not, places without an id."""
    generator = torch.Generator().manual_seed(0)
    logits, teacher = 3 * torch.randn(2, T, V, generator=generator)
    logprobs, ids = teacher.log_softmax(-1).topk(K)
    target = torch.randint(0, 290, (T,), generator=generator)
    target[:10] = ids[:10, 3]
    logprobs[7, 2:4] = -torch.inf
    weight = torch.rand(T, generator=generator)
    weight[5] = 0
    return {"inp": logits.to(dtype), "ids": ids, "logprobs": logprobs, "target": target, "weight": weight}


def solved(p: dict[str, Tensor], loss: Callable[..., Any], *given: Any, **options: Any) -> tuple[Tensor, Tensor, Any]:
    inp = p["inp"].clone().requires_grad_()
    values, metrics = loss(inp, *given, loss_weight=p["weight"], temperature=1.3, true_vocab_size=290, **options)
    values.sum().backward()
    assert inp.grad is not None
    return values.detach(), inp.grad, metrics


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_copy_of_the_forward_kl_is_the_forward_kl(dtype: torch.dtype) -> None:
    p = problem(dtype)
    given = (p["ids"], p["logprobs"])
    found = solved(p, parallel_custom_loss, *given, custom_losses.forward_kl, target=p["target"])
    expected = solved(p, parallel_topk_distill, *given, tail="none", target=p["target"])
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    for name, value in found[2].items():
        torch.testing.assert_close(value, expected[2][name])


def test_a_copy_with_a_tail_equals_the_default_loss() -> None:
    p = problem(torch.float32)
    given = (p["ids"], p["logprobs"])
    found = solved(p, parallel_custom_loss, *given, custom_losses.bucket_kl, target=p["target"])
    expected = solved(p, parallel_topk_distill, *given, target=p["target"])
    torch.testing.assert_close(found[:2], expected[:2], rtol=1e-6, atol=1e-6)
    assert found[2]["custom_tail"].shape == (T,) and found[2]["custom_tail"][5] == 0


def test_a_copy_of_a_loss_of_the_sampled_token_equals_it() -> None:
    p, zero = problem(torch.float32), torch.zeros(T)
    tokens = {"target": p["target"], "target_logprobs": zero - 1.5, "rollout_logprobs": zero - 1}
    found = solved(p, parallel_custom_loss, p["ids"], p["logprobs"], custom_losses.k2, **tokens)
    expected = solved(p, parallel_sampled_kl, p["target"], zero - 1.5, "k2")
    torch.testing.assert_close(found[:2], expected[:2], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rows_at_once", [T, 7])
def test_behind_an_lm_head_of_which_a_few_rows_are_computed_at_a_time(rows_at_once: int) -> None:
    p, generator = problem(torch.float32), torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(n, 8, generator=generator).requires_grad_() for n in (T, V))

    def found(loss: Callable[..., Any], *given: Any, **options: Any) -> tuple[Tensor, ...]:
        def of_rows(logits: Tensor, rows: Any) -> tuple[Tensor, dict[str, Tensor]]:
            own = {name: rows.of(p[name]) for name in ("ids", "logprobs", "target", "weight")}
            shared = {"target": own["target"], "loss_weight": own["weight"], "overwrite_input": True}
            return loss(logits, own["ids"], own["logprobs"], *given, **shared, **options)

        total, columns = linear_loss(hidden, weight, of_rows, LinearHead(), rows_at_once)
        return (*torch.autograd.grad(total, (hidden, weight)), columns["unweighted_loss"])

    own = found(parallel_custom_loss, custom_losses.forward_kl)
    for value, wanted in zip(own, found(parallel_topk_distill, tail="none"), strict=True):
        assert torch.equal(value, wanted)


def everything(rows: TopKRows) -> Tensor:
    """A function of every input, no divergence at all."""
    assert rows.student_token_logprobs is not None and rows.rollout_logprobs is not None
    own = rows.student_token_logprobs.square() * rows.student_log_tail
    return rows.student_logprobs.sin().sum(-1) * rows.lse + rows.student_log_tail.square() + own


def test_whatever_a_function_reads_has_its_gradient() -> None:
    """As autograd has it from whole logits in float64; with the student so sure that fp32 holds no tail."""
    p = problem(torch.float64)
    p["inp"][3] /= 300
    p["inp"][3, p["ids"][3, 0]] = 120.0
    logits = p["inp"].clone().requires_grad_()
    tokens = {"target_logprobs": torch.full((T,), -1.0), "rollout_logprobs": torch.full((T,), -2.0)}
    found, _ = parallel_custom_loss(logits, p["ids"], p["logprobs"], everything, target=p["target"], **tokens)
    (own,) = torch.autograd.grad(found.sum(), logits)
    rows = plain_rows(logits, p["ids"], p["logprobs"].double(), p["target"], own_samples=True, leaves=False)
    # a place without an id is no input that moves
    rows = replace(rows, student_logprobs=torch.where(rows.valid, rows.student_logprobs, -1e4))
    expected = everything(rows)
    (wanted,) = torch.autograd.grad(expected.sum(), logits)
    torch.testing.assert_close((found, own), (expected, wanted), rtol=1e-9, atol=1e-9)


def test_rows_that_are_not_finite_are_not_hidden() -> None:
    p = problem(torch.float32)
    p["inp"][1, 3] = torch.nan
    p["logprobs"][2, 0] = torch.inf
    found = solved(p, parallel_custom_loss, p["ids"], p["logprobs"], custom_losses.bucket_kl, target=p["target"])
    assert found[0].isnan().nonzero().flatten().tolist() == [1, 2]
    assert found[1].isnan().any(1).nonzero().flatten().tolist() == [1, 2]


@pytest.mark.parametrize("name", ["forward_kl", "bucket_kl"])
def test_right_losses_pass(name: str) -> None:
    check_loss(getattr(custom_losses, name))


def test_options_and_sampled_tokens_reach_the_function() -> None:
    check_loss("tests.fixtures.custom_losses:k2", own_samples=True, scale=2.0)
    check_loss(custom_losses.k3_reverse, own_samples=True, same_gradient=False)
    with pytest.raises(UserError, match=r"'k2' fails: AssertionError"):
        check_loss(custom_losses.k2)
    with pytest.raises(UserError, match=r"'k2' fails: TypeError: .*unexpected keyword argument 'beta'"):
        check_loss(custom_losses.k2, own_samples=True, beta=1)


@pytest.mark.parametrize(
    ("name", "words"),
    {
        "neighbours": "computes a row's loss from other rows",
        "only_value_of_neighbours": "computes a row's loss from other rows",
        "in_place": "changes its input in place",
        "in_place_of_teacher": "changes its input in place",
        "one_minus_sum": "of inf where the student is sure of one of the teacher's ids",
        "log_of_probability": "of nan where a row holds a place without an id",
        "detached": "do not depend on the student's log-probs by autograd",
        "through_numpy": "do not depend on the student's log-probs by autograd",
        "constant": "has a gradient of 0 on every row",
        "whole_sum": r"returns losses of shape \[\] for 6 rows",
        "shapeless_metric": r"returns size of shape \[\] for 6 rows",
        "large_numbers": "has losses in fp32 that differ from float64",
        "wrong_gradient": "has another gradient than that of its value",
        "failing": r"fails: KeyError: no such column \(line \d+\)",
    }.items(),
)
def test_wrong_losses_are_refused_in_a_sentence(name: str, words: str) -> None:
    with pytest.raises(UserError, match=f"^check_loss: '{name}' .*{words}") as refused:
        check_loss(getattr(custom_losses, name))
    assert "\n" not in str(refused.value)
