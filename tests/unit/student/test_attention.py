"""Sequences end to end are what they are one below the other, for ordinary and latent attention."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mopd.config.student import StudentConfig
from mopd.conversion.models.dims import ModelDims, YarnRope
from mopd.student import attention, cpu_shim
from mopd.student.attention import PackedSequences, RowParams, zigzag_rows
from mopd.student.model.gpt import StudentModel, build_model
from mopd.student.parallel import Layout
from tests.unit.student.test_model_config import DIMS, LATENT

LENGTHS = (5, 3, 3, 7, 1)
YARN = YarnRope(factor=4.0, original_max_positions=64, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0)
CASES: dict[str, tuple[ModelDims, str]] = {
    "dense": (DIMS, "none"),
    "recompute": (DIMS, "full"),
    "selective": (DIMS, "selective"),
    "latent": (replace(DIMS, mla=LATENT), "none"),
    "wide values": (replace(DIMS, mla=replace(LATENT, v_head_dim=40)), "none"),
    "yarn": (replace(DIMS, mla=replace(LATENT, q_lora_rank=None), rope_scaling=YARN), "selective"),
}


def make_model(layout: Layout, dims: ModelDims, recompute: str) -> StudentModel:
    student = StudentConfig(model="unused", dtype="float32", recompute=recompute)  # type: ignore[arg-type]
    model = build_model(student, dims, layout)
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.train()


def seen(model: StudentModel, *inputs: Tensor, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and the gradients of the sum of the real tokens' largest ones."""
    model.zero_grad()
    logits = model(*inputs, **options)
    real = inputs[0] > 0
    logits[real].amax(-1).sum().backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return logits[real].detach(), {name: grad.clone() for name, grad in grads.items()}


@pytest.mark.parametrize("case", CASES)
def test_packed_equals_padded(layout: Layout, case: str) -> None:
    tokens = torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.int64)
    for b, length in enumerate(LENGTHS):
        tokens[b, :length] = torch.randint(1, DIMS.vocab_size, (length,), generator=torch.Generator().manual_seed(b))
    padded_positions = torch.arange(max(LENGTHS)).expand(tokens.shape)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    with cpu_shim.activate():
        model = make_model(layout, *CASES[case])
        logits, grads = seen(model, tokens, padded_positions)
        packed = PackedSequences.of(LENGTHS, layout.device)
        own_logits, own_grads = seen(model, tokens[tokens > 0][None], positions, packed=packed)
    torch.testing.assert_close(own_logits, logits, rtol=1e-5, atol=1e-5)
    assert own_grads.keys() == grads.keys() and len(grads) > 20
    for name, grad in grads.items():
        assert grad.norm() > 1e-3, name
        torch.testing.assert_close(own_grads[name], grad, rtol=1e-4, atol=1e-4 * float(grad.abs().max()))


def test_positions_begin_anew_with_each_sequence(layout: Layout) -> None:
    """Which no loss can tell: the rope's angles count in differences alone."""
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    angles: list[Tensor] = []
    with cpu_shim.activate():
        model = make_model(layout, DIMS, "none")
        model.rotary_pos_emb.register_forward_hook(lambda module, inputs, made: angles.append(made))
        tokens = torch.ones(1, sum(LENGTHS), dtype=torch.int64)
        model(tokens, positions[None], packed=PackedSequences.of(LENGTHS, layout.device))
    (made,) = angles
    assert made.shape == (sum(LENGTHS), 1, 1, DIMS.head_dim)
    assert torch.equal(made[:, 0, 0, 0], positions.float())  # the fastest channel turns by one a position


def by_documentation(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    begins: Tensor,
    keys_begin: Tensor,
    most: int,
    most_keys: int,
    **options: Any,
) -> Tensor:
    """What torch says that its kernel for sequences end to end computes: the last query sees the last key."""
    assert options.pop("window_size") == (-1, 0)
    outs = []
    for first, end, first_key, key_end in zip(begins, begins[1:], keys_begin, keys_begin[1:], strict=False):
        assert end - first <= most and key_end - first_key <= most_keys
        q, k, v = (
            x[None].transpose(1, 2) for x in (query[first:end], key[first_key:key_end], value[first_key:key_end])
        )
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1 + k.shape[2] - q.shape[2])
        outs.append(scaled_dot_product_attention(q, k, v, attn_mask=~hidden, **options)[0].transpose(0, 1))
    return torch.cat(outs)


@pytest.mark.parametrize("takes_groups", [True, False])
@pytest.mark.parametrize("cp_rank", [None, 0, 1])
def test_the_kernel_of_gpus_gets_what_the_loop_takes(
    layout: Layout, monkeypatch: pytest.MonkeyPatch, cp_rank: int | None, takes_groups: bool
) -> None:
    """On the keys of all ranks, which no other rank is asked for here."""
    monkeypatch.setattr(attention, "varlen_attn", by_documentation)
    monkeypatch.setattr(attention, "_VARLEN_TAKES_GROUPS", takes_groups)
    lengths = (12, 4, 4, 8)
    cp_size, rank = (1, 0) if cp_rank is None else (2, cp_rank)
    torch.manual_seed(0)
    query = torch.randn(sum(lengths) // cp_size, 4, 8)
    key, value = torch.randn(2, sum(lengths), 2, 8)
    positions = torch.cat([torch.arange(length) for length in lengths])
    rows = RowParams(positions, lengths, is_packed=True, cp_size=cp_size, cp_rank=rank)
    groups: Any = SimpleNamespace(cp=layout.cp_group, tp=layout.tp_group)
    with cpu_shim.activate():
        core = attention.CoreAttention(config=make_model(layout, DIMS, "none").config, pg_collection=groups)
    torch.testing.assert_close(core._varlen(query, key, value, rows), core._looped(query, key, value, rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("window", "has_sink"), [(None, False), (3, False), (None, True), (3, True)])
def test_what_the_memory_efficient_kernel_is_asked(
    dtype: torch.dtype, window: int | None, has_sink: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU it alone takes fp32, and masks where cuDNN does not take the heads (above 128 channels before Hopper);
    it wants as many heads of keys as of queries."""
    torch.manual_seed(0)
    query, (key, value) = torch.randn(2, 4, 6, 8, dtype=dtype), torch.randn(2, 2, 2, 6, 8, dtype=dtype)
    expected = attention._fused(query, key, value, None, window, has_sink=has_sink)

    def on_gpu(query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor | None, **options: Any) -> Tensor:
        if attn_mask is not None or dtype == torch.float32:
            assert query.shape[1] == key.shape[1] and not options["enable_gqa"]
        return scaled_dot_product_attention(query, key, value, attn_mask, **options)

    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    monkeypatch.setattr(attention, "sdpa_kernel", lambda kernels: nullcontext())
    monkeypatch.setattr(attention, "scaled_dot_product_attention", on_gpu)
    torch.testing.assert_close(attention._fused(query, key, value, None, window, has_sink=has_sink), expected)


def test_context_parallel_ranks_have_equal_work() -> None:
    """Each sequence's tokens are shared out, and every rank's queries look at as many keys."""
    lengths = (12, 24, 12)
    ranks = zigzag_rows(lengths, 3)
    assert torch.equal(torch.cat(ranks).sort().values, torch.arange(48))
    assert ranks[0].tolist() == [0, 1, 10, 11, *range(12, 16), *range(32, 36), 36, 37, 46, 47]
    positions = torch.cat([torch.arange(length) for length in lengths])
    assert len({int(positions[own].sum()) for own in ranks}) == 1
