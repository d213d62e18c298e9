"""Routers that are asked without a padding mask, and with one, in one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor

from mopd.config.student import MoeConfig, StudentConfig
from mopd.student import cpu_shim
from mopd.student.attention import PackedSequences
from mopd.student.model.balance import Balance
from mopd.student.model.gpt import StudentModel, build_model
from mopd.student.parallel import Layout
from tests.unit.student.test_model_config import DIMS, EXPERTS

LENGTH, NUM = 6, 3
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"recompute": "full"},
    "block": {
        "megatron_overrides": {
            "recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2
        }
    },
    "moe": {"megatron_overrides": {"recompute_granularity": "selective", "recompute_modules": ["moe"]}},
}  # fmt: skip


@pytest.fixture(autouse=True)
def forgotten_scale() -> Iterator[None]:
    """Without a schedule Megatron sets a scale of another shape than with one, in a variable of the class."""
    yield
    MoEAuxLossAutoScaler.main_loss_backward_scale = None


def gradients(
    layout: Layout, kind: str, mask: Tensor | None, *, lengths: Sequence[int] = (), **keys: Any
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Of the routers by name, after one micro-batch whose loss is the balancing losses alone; and the metrics. With
    ``lengths`` the sequences are cut to these and packed."""
    moe = MoeConfig(moe_router_load_balancing_type=kind, moe_aux_loss_coeff=0.3, moe_z_loss_coeff=0.02)  # type: ignore[arg-type]
    student = StudentConfig(model="unused", dtype="float32", moe=moe, **keys)
    dims = replace(DIMS, moe=EXPERTS)
    with cpu_shim.activate():
        model: StudentModel = build_model(student, dims, layout)
        torch.manual_seed(0)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        model.train()
        balance = Balance([model], moe, EXPERTS, layout)
        balance.begin(1)
        tokens = torch.randint(1, DIMS.vocab_size, (NUM, LENGTH), generator=torch.Generator().manual_seed(1))
        options: dict[str, Any] = {} if mask is None else {"padding_mask": mask}
        positions = torch.arange(LENGTH).expand(NUM, LENGTH)
        if lengths:
            tokens, positions = (
                torch.cat([row[:length] for row, length in zip(rows, lengths, strict=True)])[None]
                for rows in (tokens, positions)
            )
            index = torch.arange(NUM).repeat_interleave(torch.tensor(lengths))
            options = {
                "packed": PackedSequences.of(lengths, torch.device("cpu")),
                "samples": (index, NUM),
                "padding_mask": torch.zeros_like(tokens, dtype=torch.bool),
            }
        logits = model(tokens, positions, **options)
        (logits * 0.0).sum().backward()
        named = {name: p.grad for name, p in model.named_parameters() if "router" in name and p.grad is not None}
        return named, balance.metrics()


@pytest.mark.parametrize(
    ("kind", "recompute"),
    [*(("aux_loss", how) for how in RECOMPUTE), ("seq_aux_loss", "block"), ("global_aux_loss", "full")],
)
def test_no_mask_is_a_mask_without_padding(layout: Layout, kind: str, recompute: str) -> None:
    plain, seen = gradients(layout, kind, None)
    nothing_padded = torch.zeros(NUM, LENGTH, dtype=torch.bool)
    assert len(plain) == DIMS.num_layers and all(grad.norm() > 1e-3 for grad in plain.values())
    for mask, keys in ((None, RECOMPUTE[recompute]), (nothing_padded, {})):
        other, metrics = gradients(layout, kind, mask, **keys)
        assert metrics == pytest.approx(seen, rel=1e-6)
        for name, grad in plain.items():
            torch.testing.assert_close(other[name], grad, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("recompute", ["full", "block", "moe"])
def test_padding_changes_the_losses_alike_however_layers_are_recomputed(layout: Layout, recompute: str) -> None:
    padding = torch.arange(LENGTH).expand(NUM, LENGTH) >= torch.tensor([[6], [4], [2]])
    plain, _ = gradients(layout, "aux_loss", None)
    expected, with_padding = gradients(layout, "aux_loss", padding)
    other, metrics = gradients(layout, "aux_loss", padding, **RECOMPUTE[recompute])
    assert metrics == pytest.approx(with_padding, rel=1e-6)
    for name, grad in expected.items():
        torch.testing.assert_close(other[name], grad, rtol=1e-5, atol=1e-8)
        assert not torch.allclose(grad, plain[name], rtol=1e-3)


@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss", "global_aux_loss"])
@pytest.mark.parametrize("recompute", ["none", "full", "block"])
def test_packed_sequences_are_balanced_as_padded_ones(layout: Layout, kind: str, recompute: str) -> None:
    lengths = (6, 4, 2)
    padding = torch.arange(LENGTH).expand(NUM, LENGTH) >= torch.tensor(lengths)[:, None]
    expected, with_padding = gradients(layout, kind, padding)
    packed, metrics = gradients(layout, kind, None, lengths=lengths, **RECOMPUTE[recompute])
    assert metrics == pytest.approx(with_padding, rel=1e-5)
    for name, grad in expected.items():
        torch.testing.assert_close(packed[name], grad, rtol=1e-4, atol=1e-7)
