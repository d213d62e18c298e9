"""NaN and infinities on the other paths: sampled losses, the gather primitive, the LM head, diagnostics, the teacher.

As in ``test_non_finite.py``: the row that holds them has a loss that is not finite, and no other row has.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mopd.losses import (
    chunked_topk_logprobs,
    parallel_entropy_and_topk_overlap,
    parallel_gather_logprobs,
    parallel_policy_gradient,
    parallel_sampled_kl,
    parallel_topk_distill,
)
from tests.parity.losses.definitions import teacher_topk
from tests.parity.losses.linear_topk import linear_topk
from tests.parity.losses.triton_layer import DEVICE, to_device

ROWS, VOCAB, PADDED, HIDDEN, K = 5, 17, 19, 6, 3
BAD = 3
"""The row that is spoiled."""
NAN, INF = math.nan, math.inf
BACKENDS = ["reference", "chunked", "triton"]


def problem() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator)
    weight = torch.randn(PADDED, HIDDEN, generator=generator)
    z = hidden @ weight.t()
    ids, logq = teacher_topk(z[:, :VOCAB] + torch.randn(ROWS, VOCAB, generator=generator), K)
    return {"hidden": hidden, "weight": weight, "z": z, "ids": ids, "logq": logq}


def gradient_of(loss: Tensor, leaf: Tensor) -> list[bool]:
    """Which rows have a finite gradient."""
    (gradient,) = torch.autograd.grad(loss.sum(), leaf)
    return [bool(x) for x in gradient.isfinite().all(1)]


def only(row: int) -> list[bool]:
    return [t != row for t in range(ROWS)]


ESTIMATORS: dict[str, dict[str, Any]] = {
    "k2": {},
    "k3": {},
    "k3_reverse": {},
    "k2 clamped": {"loss_max_clamp": 0.5},
    "k3 clamped": {"loss_max_clamp": 0.5},
    "k3_reverse clamped": {"loss_max_clamp": 0.5},
    "k2 icepop": {"correction": ("icepop", 0.5, 2.0)},
    "k3 tis": {"correction": ("tis", 0.5, 2.0)},
    "policy gradient": {},
    "tis": {"correction": ("tis", 0.5, 2.0)},
    "icepop": {"correction": ("icepop", 0.5, 2.0)},
    "gate": {"correction": ("gate", 0.5, 2.0)},
    "dual clip": {"dual_clip": 2.0, "old_logprobs": None},
}
PLACES = {
    "target": (NAN, INF, -INF),
    "another token": (NAN, INF, -INF),
    "all": (NAN, INF, -INF),
    "teacher": (NAN, INF, -INF),
    "padding": (NAN, INF, -INF),
    "old_logprobs": (NAN, INF, -INF),
    "rollout_logprobs": (NAN, INF, -INF),
    "task_advantage": (NAN, INF, -INF),
}


SLOW = DEVICE.type == "cpu"
"""Triton's interpreter: all of these take their log-probs from one kernel, two stand for them."""


@pytest.mark.parametrize(
    ("name", "backend"),
    [(n, b) for n in ESTIMATORS for b in BACKENDS if b != "triton" or not SLOW or n in ("k2 clamped", "icepop")],
)
def test_sampled(name: str, backend: str) -> None:
    data, options = problem(), dict(ESTIMATORS[name])
    teacher = data["logq"][:, 0]
    given = {"old_logprobs": teacher + 0.1, "rollout_logprobs": teacher + 0.05, "task_advantage": torch.ones(ROWS)}
    if options.pop("correction", None) is None:
        del given["rollout_logprobs"]
    if name in ("policy gradient", "tis", "icepop", "gate"):
        del given["old_logprobs"]
    clamped, is_estimator = "clamped" in name, name.startswith("k")
    for place, values in PLACES.items():
        if place in ("old_logprobs", "task_advantage") and is_estimator:
            continue
        if place in ("old_logprobs", "rollout_logprobs", "task_advantage") and place not in given:
            continue
        for value in values[:1] if backend == "triton" and SLOW else values:
            z, own = data["z"].clone(), {"teacher": teacher.clone(), **{k: v.clone() for k, v in given.items()}}
            target = data["ids"][:, 0]
            column: Any = {"target": target[BAD], "another token": data["ids"][BAD, 1], "all": slice(VOCAB)}.get(place)
            if column is not None:
                z[BAD, column] = value
            elif place == "padding":
                z[:, VOCAB:] = value
            else:
                own[place][BAD] = value
            leaf = z.to(DEVICE).requires_grad_()
            shared: Any = {"true_vocab_size": VOCAB, "backend": backend, **options}
            rows = {key: to_device(x) for key, x in own.items()}
            q = rows.pop("teacher")
            if is_estimator:
                if "rollout_logprobs" in rows:
                    shared |= {
                        "correction": ESTIMATORS[name]["correction"],
                        "rollout_logprobs": rows["rollout_logprobs"],
                    }
                loss, _ = parallel_sampled_kl(leaf, to_device(target), q, name.split()[0], **shared)
            else:
                shared |= {"correction": ESTIMATORS[name].get("correction"), "task_reward_weight": 0.5, **rows}
                loss, _ = parallel_policy_gradient(leaf, to_device(target), q, **shared)
            legitimate = place == "padding" or (value == -INF and place == "another token")
            capped = clamped and value == -INF and place in ("target", "teacher")  # infinite, and held
            finite, told = [bool(x) for x in loss.detach().isfinite()], (place, value, loss)
            assert finite == only(-1 if legitimate or capped else BAD), told
            gradient = gradient_of(loss, leaf)
            assert (
                gradient == only(-1) if legitimate or capped else all(gradient[t] for t in range(ROWS) if t != BAD)
            ), told


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("task_advantage", NAN),
        ("task_advantage", INF),
        *(("rollout_logprobs", x) for x in (NAN, INF, -INF)),
        ("z", -INF),
    ],
)
def test_a_task_advantage_beside_a_divergence(place: str, value: float, backend: str) -> None:
    """Also a sampled token of probability 0, which no teacher lists, so that the divergence is finite."""
    data = problem()
    target = torch.tensor([next(i for i in range(VOCAB) if i not in row) for row in data["ids"].tolist()])
    rows = {"task_advantage": torch.ones(ROWS), "rollout_logprobs": torch.full((ROWS,), -2.0)}
    if place == "z":
        data["z"][BAD, target[BAD]] = value
    else:
        rows[place][BAD] = value
    options: Any = {"true_vocab_size": VOCAB, "backend": backend, "task_reward_weight": 0.5, "tail": "generalized"}
    options |= {name: to_device(x) for name, x in {**rows, "target": target}.items()}
    leaf = data["z"].to(DEVICE).requires_grad_()
    given = [to_device(data[name]) for name in ("ids", "logq")]
    loss, _ = parallel_topk_distill(leaf, *given, correction=("tis", 0.5, 2.0), **options)
    assert loss.detach().isfinite().tolist() == only(BAD)
    assert all(finite for t, finite in enumerate(gradient_of(loss, leaf)) if t != BAD)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_gathered(backend: str, value: float) -> None:
    data = problem()
    for column, listed in ((int(data["ids"][BAD, 1]), True), (int(data["ids"][BAD].sum()) % VOCAB, False)):
        listed = listed or column in data["ids"][BAD].tolist()
        z = data["z"].clone()
        z[BAD, column], z[:, VOCAB:] = value, NAN
        options: Any = {"true_vocab_size": VOCAB, "backend": backend}
        logprobs, lse = parallel_gather_logprobs(z.to(DEVICE), to_device(data["ids"]), **options)
        masked = value == -INF
        assert lse.isfinite().tolist() == only(-1 if masked else BAD)
        assert logprobs.isfinite().all(1).tolist() == only(-1 if masked and not listed else BAD)
        if masked and listed:
            assert logprobs[BAD].isfinite().sum() == K - 1


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("backend", ["chunked", "triton"])
@pytest.mark.parametrize("at_once", [None, 2])
def test_lm_head(at_once: int | None, backend: str, value: float) -> None:
    """An infinite hidden state makes logits of both infinities, some of NaN."""
    data = problem()
    hidden = data["hidden"].clone()
    hidden[BAD, 2] = value
    for loss, tail in (("reverse_kl", "generalized"), ("forward_kl", "bucket"))[: 1 if backend == "triton" else 2]:
        leaf = hidden.to(DEVICE).requires_grad_()
        given = [to_device(data[name]) for name in ("weight", "ids", "logq")]
        total, metrics = linear_topk(
            leaf, *given, loss=loss, tail=tail, rows_at_once=at_once, backend=backend, true_vocab_size=VOCAB,
            with_entropy=True,
        )  # fmt: skip
        for name in ("unweighted_loss", "student_mass", "entropy"):
            assert metrics[name].isfinite().tolist() == only(BAD), name
        assert not total.isfinite()


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_diagnostics_and_the_teachers_side(value: float) -> None:
    data = problem()
    z, hidden = data["z"].clone(), data["hidden"].clone()
    z[BAD, 4], z[:, VOCAB:], hidden[BAD, 1] = value, NAN, value
    for result in parallel_entropy_and_topk_overlap(to_device(z), to_device(data["ids"]), true_vocab_size=VOCAB):
        assert result.isfinite().tolist() == only(-1 if value == -INF else BAD)
    target = to_device(data["ids"][:, 0])
    scored = chunked_topk_logprobs(
        to_device(hidden), to_device(data["weight"]), K, max_rows=2, target=target, true_vocab_size=VOCAB
    )
    assert scored.target_logprobs is not None
    for values in (scored.logprobs.sum(1), scored.mass, scored.target_logprobs):
        assert values.isfinite().tolist() == only(BAD)
