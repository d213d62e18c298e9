"""The loss and its gradient do not depend on how the student is spread out or the batch is cut.

Invariant: one HF checkpoint and one batch give the same loss, gradient norm and metrics (1e-5 relative, fp32) for TP1,
TP2, TP2+SP, PP2 (interleaved and uneven too), DP2, TP2xPP2, TP2+SPxDP2, PP2xDP2 and micro-batches of 1, 2 and 8 samples
or by token budget, packed or right-padded, and whether the LM head makes all logits at once or those of a few tokens at
a time; and the numbers are right: they equal the definition, evaluated in float64 on transformers' own model. Not
exercised: CUDA, TransformerEngine, context parallelism.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from mopd.student.model.overrides import ALLOWED
from tests.parity.student.conftest import (
    HEAD_CASES,
    OVERRIDES,
    PIPELINES,
    SIZES,
    TRIED_LOSSES,
    TWO_RANK_LAYOUTS,
    WARMED,
    WIDE_PIPELINES,
)
from tests.parity.student.samples import DOMAINS, ENSEMBLE, Weights, make_samples

pytestmark = [pytest.mark.multirank, pytest.mark.slow]

Results = dict[str, Any]


def assert_same_step(step: Results, expected: Results) -> None:
    assert step.keys() == expected.keys()
    for name, value in expected.items():
        assert step[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


def assert_logprobs(results: Results, folder: Path) -> None:
    """The log-probs of a case are those of transformers' model of ``folder``."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    metas, fields = make_samples(16, vocab_size=model.config.vocab_size, top_k=8, seed=0, first_id=0)
    for i, row in zip((3, 1, 2, 5), results["logprobs"] + results["one_logprob"], strict=True):
        tokens, start = fields["tokens"][i], metas[i].prompt_length
        with torch.no_grad():
            rows = torch.log_softmax(model(tokens[None]).logits[0], -1)
        expected = torch.stack([rows[t - 1, tokens[t]] for t in range(start, len(tokens))])
        torch.testing.assert_close(torch.tensor(row), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("layout", "size"), SIZES)
def test_layouts_and_sizes_equal_one_rank(
    two_ranks: Results, four_ranks: Results, one_rank: Results, layout: str, size: int
) -> None:
    results = one_rank | two_ranks | four_ranks
    assert_same_step(results[f"{layout}/mbs{size}"]["steps"][0], one_rank["one/budget"]["steps"][0])


@pytest.mark.parametrize("layout", PIPELINES)
def test_interleaved_and_uneven_pipelines_equal_one(two_ranks: Results, one_rank: Results, layout: str) -> None:
    """Also forward only, for one sample among others."""
    found, expected = two_ranks[f"{layout}/deep"], one_rank["one/deep"]
    assert_same_step(found["steps"][0], expected["steps"][0])
    for name in ("logprobs", "one_logprob"):
        for row, wanted in zip(found[name], expected[name], strict=True):
            assert row == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("layout", WIDE_PIPELINES)
def test_interleaved_pipelines_of_four_ranks_equal_one(four_ranks: Results, one_rank: Results, layout: str) -> None:
    """With neighbours that are two ranks, beside tensor and sequence parallelism, and with traffic beside passes."""
    found, expected = four_ranks[f"{layout}/deep"]["steps"], one_rank["one/deep"]["steps"]
    for step, wanted in zip(found, expected, strict=True):
        assert_same_step(step, wanted)


@pytest.mark.parametrize("layout", ["one", *TWO_RANK_LAYOUTS])
def test_packed_sequences_equal_padded_ones(two_ranks: Results, one_rank: Results, layout: str) -> None:
    """Loss, gradient norm, every metric and the log-probs."""
    results = one_rank if layout == "one" else two_ranks
    packed, padded = (results[f"{layout}/packing/{on}"] for on in (True, False))
    assert packed["is_packed"] == [True] and padded["is_packed"] == [False]
    assert_same_step(packed["steps"][0], padded["steps"][0])
    assert_same_step(padded["steps"][0], one_rank["one/packing/False"]["steps"][0])
    for key in ("logprobs", "one_logprob"):
        for row, expected in zip(packed[key], padded[key], strict=True):
            assert row == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("layout", "loss"), [*TRIED_LOSSES, *((layout, "untied") for layout in ("tp2", "pp2", "dp2"))])
def test_other_losses_and_models(two_ranks: Results, one_rank: Results, layout: str, loss: str) -> None:
    assert_same_step(two_ranks[f"{layout}/{loss}"]["steps"][0], one_rank[f"one/{loss}"]["steps"][0])


@pytest.mark.parametrize("layout", TWO_RANK_LAYOUTS)
def test_measuring_the_domains_gradients_changes_nothing(two_ranks: Results, one_rank: Results, layout: str) -> None:
    """Their cosine is that of one rank to a hundredth: each rank has signs of its own for its part of the sketches."""
    step, (name,) = dict(two_ranks[f"{layout}/cosine"]["steps"][0]), ["gradient_cosine/math|code"]
    assert step.pop(name) == pytest.approx(one_rank["one/cosine"]["steps"][0][name], abs=0.02)
    assert_same_step(step, one_rank["one/budget"]["steps"][0])


def test_the_sequence_mask_leaves_some_responses_out(one_rank: Results) -> None:
    """Else the equalities of the policy gradient would not show that every layout leaves out the same ones."""
    for name in ("one/policy_gradient", "one/wide/policy_gradient/tied"):
        step = one_rank[name]["steps"][0]
        assert 0 < round(sum(step[f"masked_sequences/{domain}"] for domain in DOMAINS), 6) < 16


@pytest.mark.parametrize("case", ["tp2_sp/recompute_full", "tp2/recompute_selective"])
def test_recompute_changes_nothing(two_ranks: Results, one_rank: Results, case: str) -> None:
    assert_same_step(two_ranks[case]["steps"][0], one_rank["one/budget"]["steps"][0])


@pytest.mark.parametrize(
    ("case", "plain"),
    [
        ("save/dp2_overlap", "save/tp2"),
        ("dp2/steps/overlap", "dp2/steps"),
        ("dp2/steps/offload", "dp2/steps"),
        ("context/cp2/overlap", "save/cp2"),
        ("tp2_sp_dp2/overlap", "save/tp2"),
        ("pp2_dp2/overlap", "save/tp2"),
    ],
)
def test_overlap_and_offload_change_nothing(
    two_ranks: Results, four_ranks: Results, saved_ranks: Results, case: str, plain: str
) -> None:
    """In the first step Megatron learns when gradients are complete, and sends them all at its end."""
    steps, expected = ((two_ranks | four_ranks | saved_ranks)[name]["steps"] for name in (case, plain))
    assert len(steps) >= 2
    for step, other in zip(steps, expected, strict=True):
        assert_same_step(step, other)


@pytest.mark.parametrize("layout", WARMED)
def test_a_warm_up_and_what_follows_equal_one_rank(two_ranks: Results, one_rank: Results, layout: str) -> None:
    """The optimizer begins anew in its middle (``tests/unit/student/test_worker.py`` says as what)."""
    steps, expected = two_ranks[f"{layout}/warm_up"]["steps"], one_rank["one/warm_up"]["steps"]
    assert ["k1/math" in step for step in expected] == [False, False, True, True]
    for step, wanted in zip(steps, expected, strict=True):
        assert_same_step(step, wanted)


@pytest.mark.parametrize("name", OVERRIDES)
def test_allowed_overrides_change_nothing(two_ranks: Results, one_rank: Results, name: str) -> None:
    assert_same_step(two_ranks[f"override/{name}"]["steps"][0], one_rank["one/budget"]["steps"][0])


def test_every_allowed_override_is_tried() -> None:
    assert {field for given in OVERRIDES.values() for field in given} == set(ALLOWED)


@pytest.mark.parametrize(
    ("layout", "loss", "tied"),
    [(name.replace("one", "small"), *case) for name, cases in HEAD_CASES.items() for case in cases],
)
def test_lm_head_in_chunks_equals_all_logits_at_once(
    two_ranks: Results, one_rank: Results, layout: str, loss: str, tied: str
) -> None:
    """A memory budget of 1 MiB changes neither losses and metrics nor the gradient norm."""
    results = one_rank if layout == "small" else two_ranks
    chunked, plain = results[f"{layout}/wide/{loss}/{tied}"], one_rank[f"one/wide/{loss}/{tied}"]
    assert chunked["head_in_chunks"] and not plain["head_in_chunks"]
    step, expected = ({**result["steps"][0]} for result in (chunked, plain))
    assert step.pop("grad_norm") == pytest.approx(expected.pop("grad_norm"), rel=1e-4)  # see Case.exact_grad_norm
    assert_same_step(step, expected)


@pytest.mark.parametrize(("case", "weights"), [("budget", None), ("ensemble", ENSEMBLE)])
def test_equals_the_definition(one_rank: Results, hf_model: Path, case: str, weights: Weights | None) -> None:
    """The token loss is the sum of each teacher's forward KL (on its top-k and the rest as one outcome) times its
    share, the loss the mean over the batch's loss tokens, whose gradient at the LM head has a norm in each domain;
    masses and overlaps are means with the same shares; k1 is the student's log-prob less such a mean of the teachers'.
    In float64 on transformers' own model.
    """
    model = AutoModelForCausalLM.from_pretrained(hf_model, dtype=torch.float64)
    metas, fields = make_samples(16, vocab_size=model.config.vocab_size, top_k=8, seed=1, first_id=100, weights=weights)
    names = ("loss", "k1", "teacher_mass", "student_mass", "topk_overlap")
    expected = {f"{name}/{domain}": 0.0 for name in names for domain in DOMAINS}
    total, all_hidden = torch.zeros(()), []
    for i, meta in enumerate(metas):
        hidden = model.model(fields["tokens"][i][None]).last_hidden_state
        hidden.retain_grad()
        all_hidden.append(hidden)
        logits = model.lm_head(hidden)[0]
        shares = (1.0,) if weights is None else weights[meta.domain]
        for r in range(meta.response_length):
            if not fields["loss_mask"][i][r]:
                continue
            log_p = torch.log_softmax(logits[meta.prompt_length + r - 1], -1)
            all_ids, all_logprobs = (
                fields[name][i][r].view(len(shares), 8) for name in ("teacher_ids", "teacher_logprobs")
            )
            for share, ids, logprobs in zip(shares, all_ids.long(), all_logprobs.double(), strict=True):
                q, p = logprobs.exp(), log_p.exp()[ids]
                kl = (q * (q / p).log()).sum() + (1 - q.sum()) * ((1 - q.sum()) / (1 - p.sum())).log()
                total = total + share * kl
                own_top = set(log_p.topk(8).indices.tolist())
                expected[f"loss/{meta.domain}"] += share * kl.item()
                expected[f"teacher_mass/{meta.domain}"] += share * q.sum().item()
                expected[f"student_mass/{meta.domain}"] += share * p.sum().item()
                expected[f"topk_overlap/{meta.domain}"] += share * len(own_top & set(ids.tolist())) / 8
            own = log_p[fields["tokens"][i][meta.prompt_length + r]]
            expected[f"k1/{meta.domain}"] += (own - fields["teacher_token_logprobs"][i][r]).item()
    loss = total / sum(meta.num_loss_tokens for meta in metas)
    loss.backward()
    norm = math.sqrt(sum(float(parameter.grad.square().sum()) for parameter in model.parameters()))
    for domain in DOMAINS:
        own = [hidden.grad for hidden, meta in zip(all_hidden, metas, strict=True) if meta.domain == domain]
        expected[f"gradient_squares/{domain}"] = sum(float(gradient.square().sum()) for gradient in own)
    step = one_rank[f"one/{case}"]["steps"][0]
    assert step["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert step["weighted_loss/math"] + step["weighted_loss/code"] == pytest.approx(loss.item(), rel=1e-5)
    for name, value in expected.items():
        assert step[name] == pytest.approx(value, rel=1e-5), name


@pytest.mark.parametrize("layout", ["one", "tp2", "pp2", "dp2"])
def test_supervised_training_equals_plain_pytorch(
    two_ranks: Results, one_rank: Results, hf_model: Path, layout: str
) -> None:
    """``sft_on_teacher``: torch's cross entropy over the batch's loss tokens, on transformers' model in fp32 as well.
    No field of a teacher is read: those of the samples would give another loss."""
    model = AutoModelForCausalLM.from_pretrained(hf_model, dtype=torch.float32)
    metas, fields = make_samples(16, vocab_size=model.config.vocab_size, top_k=8, seed=1, first_id=100)
    total = torch.zeros(())
    for meta, tokens, loss_mask in zip(metas, fields["tokens"], fields["loss_mask"], strict=True):
        rows = model(tokens[None]).logits[0, meta.prompt_length - 1 : -1]
        total += torch.nn.functional.cross_entropy(
            rows[loss_mask], tokens[meta.prompt_length :][loss_mask], reduction="sum"
        )
    loss = total / sum(meta.num_loss_tokens for meta in metas)
    loss.backward()
    norm = math.sqrt(sum(float(parameter.grad.double().square().sum()) for parameter in model.parameters()))
    step = (one_rank | two_ranks)[f"{layout}/supervised"]["steps"][0]
    assert step["weighted_loss/math"] + step["weighted_loss/code"] == pytest.approx(loss.item(), rel=1e-6)
    assert step["exact_grad_norm"] == pytest.approx(norm, rel=1e-6)
    assert not any(name.startswith(("k1", "teacher")) for name in step)


@pytest.mark.parametrize("name", ["logprobs", "untied"])
def test_logprobs_equal_transformers(
    two_ranks: Results, one_rank: Results, hf_model: Path, untied_model: Path, name: str
) -> None:
    """``logprobs`` returns each response token's log-prob, in the order asked, at every layout; also for one sample."""
    folder = untied_model if name == "untied" else hf_model
    for results in (one_rank[f"one/{name}"], *(two_ranks[f"{layout}/{name}"] for layout in ("tp2", "pp2", "dp2"))):
        assert_logprobs(results, folder)
