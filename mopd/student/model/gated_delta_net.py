"""Gated delta nets (Yang, Kautz and Hatamizadeh 2024), the linear attention of Qwen3-Next and Qwen3.5.

Each value head has a state [K, V], which every token decays, corrects and reads::

    S_t = exp(g_t) S_(t-1) + k_t (x) beta_t (v_t - exp(g_t) S_(t-1)^T k_t)        o_t = S_t^T q_t / sqrt(K)

Megatron-Core 0.16.1 has a module for it that refuses packed sequences; only its linear layers are used. The order of
rows is our own: those of one key head and of its value heads stand together, so that tensor parallelism cuts between
heads. Letters: N sequences, L tokens of each, T of a chunk, G key heads of this rank, H value heads, X rows of
``linear_in`` on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.nn.functional import conv1d, pad, rms_norm, silu, softplus
from torch.nn.utils.rnn import pad_sequence

from mopd.conversion.models.dims import DeltaDims
from mopd.student.attention import RowParams
from mopd.student.model.norms import RMSNorm

CHUNK = 64
"""Tokens that attend to each other directly; the state passes from chunk to chunk."""
_SHARDS = ("conv_weight", "A_log", "dt_bias")


class GatedDeltaNet(MegatronModule):
    """Linear attention in the place of Megatron's ``SelfAttention``: the state and the convolution before it begin anew
    with each sequence."""

    def __init__(
        self, config: TransformerConfig, *, sizes: DeltaDims, layer_number: int, pg_collection: Any, **unread: Any
    ) -> None:
        super().__init__(config)
        self.layer_number, self.sizes, self.tp_group = layer_number, sizes, pg_collection.tp
        ranks = self.tp_group.size()
        linear: dict[str, Any] = {"config": config, "bias": False, "tp_group": self.tp_group}
        self.linear_in = ColumnParallelLinear(
            config.hidden_size, sizes.in_rows, init_method=config.init_method, gather_output=False, **linear
        )
        self.conv_weight = self._shard(sizes.conv_rows // ranks, 1, sizes.conv_size)
        self.A_log = self._shard(sizes.num_value_heads // ranks)
        self.dt_bias = self._shard(sizes.num_value_heads // ranks)
        self.out_norm = RMSNorm(config, sizes.value_head_dim, config.layernorm_epsilon)
        # Each rank's part of its gradient comes from its own heads, and is summed in ``_gated``.
        self.out_norm.weight.sequence_parallel = False  # type: ignore[attr-defined]
        self.linear_out = RowParallelLinear(
            sizes.value_rows, config.hidden_size, init_method=config.init_method, input_is_parallel=True,
            skip_bias_add=True, **linear,
        )  # fmt: skip

    def _shard(self, *shape: int) -> nn.Parameter:
        parameter = nn.Parameter(torch.empty(shape, dtype=self.config.params_dtype))  # the model moves as a whole
        set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
        return parameter

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, *, packed_seq_params: RowParams, **unread: Any
    ) -> tuple[Tensor, None]:
        """Return [S, B, hidden] from such states (this rank's part of S under sequence parallelism), and no bias.

        Sequences of a pack are padded on the right, which what comes before does not see, to the longest of those at
        most twice as long.
        """
        mixed, _ = self.linear_in(hidden_states)  # [S, B, X]
        lengths = packed_seq_params.lengths
        if not packed_seq_params.is_packed:
            out = self._run(mixed.transpose(0, 1)).transpose(0, 1)
        else:
            apart, found = mixed.squeeze(1).split(lengths), dict[int, Tensor]()
            for same in _of_like_length(lengths):
                rows = self._run(pad_sequence([apart[i] for i in same], batch_first=True))
                found |= {i: row[: lengths[i]] for i, row in zip(same, rows, strict=True)}
            out = torch.cat([found[i] for i in range(len(lengths))])[:, None]
        hidden, _ = self.linear_out(out.contiguous())
        return hidden, None

    def _run(self, mixed: Tensor) -> Tensor:
        """Return the heads' answers [N, L, H V] to ``mixed`` [N, L, X]."""
        sizes, length = self.sizes, mixed.shape[1]
        shared = sizes.num_value_heads // sizes.num_key_heads
        keys, values = sizes.key_head_dim, shared * sizes.value_head_dim
        heads = mixed.unflatten(-1, (-1, sizes.in_rows // sizes.num_key_heads))  # [N, L, G, rows of a key head]
        qkv, z, b, a = heads.split([2 * keys + values, values, shared, shared], dim=-1)
        channels = pad(qkv.flatten(-2).transpose(1, 2), (sizes.conv_size - 1, 0))
        seen = silu(conv1d(channels, self.conv_weight, groups=channels.shape[1])).transpose(1, 2)
        q, k, v = seen.unflatten(-1, (-1, 2 * keys + values)).split([keys, keys, values], dim=-1)
        q, k = (x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        q, k = (x.to(v.dtype).repeat_interleave(shared, dim=2) for x in (q, k))
        v, z = (x.reshape(*x.shape[:2], -1, sizes.value_head_dim) for x in (v, z))
        decay = -self.A_log.float().exp() * softplus(a.flatten(-2).float() + self.dt_bias.float())
        out = _rule(mixed.device)(q, k, v, decay, b.flatten(-2).sigmoid())
        return self._gated(out, z).reshape(mixed.shape[0], length, -1)

    def _gated(self, out: Tensor, gate: Tensor) -> Tensor:
        """Norm each head's answer, by w and not 1 + w, and gate it."""
        # Backward adds up the ranks' gradients, which Megatron does for norms of queries and keys alone.
        weight = copy_to_tensor_model_parallel_region(self.out_norm.weight, group=self.tp_group)
        normed = rms_norm(out, self.out_norm.normalized_shape, weight, self.out_norm.eps)
        return (normed * silu(gate.float())).to(out.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return Megatron's description of the weights for a checkpoint, with the cut of those it does not know."""
        found: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        own = {name: getattr(self, name) for name in _SHARDS}
        cut: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            dict.fromkeys(_SHARDS, 0),
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        )
        return found | cut


class GatedAttention(SelfAttention):
    """Attention of the layers between gated delta nets. Megatron's has its gate compiled, a minute's work on a CPU."""

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        return (x * gate.reshape(x.shape).float().sigmoid()).to(x.dtype)


def _of_like_length(lengths: Sequence[int]) -> list[list[int]]:
    """Return the numbers of the sequences in groups, of which none has one twice as long as another or longer."""
    groups: dict[int, list[int]] = {}
    for number, length in enumerate(lengths):
        groups.setdefault(length.bit_length(), []).append(number)
    return list(groups.values())


Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""Function of normed queries and keys [N, L, H, K], values [N, L, H, V], log decays and betas [N, L, H] -> [N, L, H, V]
in the values' dtype."""


def _rule(device: torch.device) -> Rule:
    """Return FLA's kernels on a GPU if the package (flash-linear-attention) is there, else plain torch."""
    return _fla_rule if device.type == "cuda" and find_spec("fla") is not None else delta_rule


def _fla_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    chunked = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    inputs = (x.contiguous() for x in (query, key, value))
    out: Tensor = chunked(*inputs, g=decay.contiguous(), beta=beta.contiguous())[0]
    return out


def delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Compute a ``Rule`` in fp32, chunk by chunk: within one, what its tokens write is the solution of a triangular
    system of T equations; between them goes the state."""
    length = query.shape[1]
    size = min(CHUNK, length)
    q, k, v, g, b = (_in_chunks(x, size) for x in (query * query.shape[-1] ** -0.5, key, value, decay, beta))
    g, b = g.cumsum(-1), b.unsqueeze(-1)  # [N, H, chunks, T], [..., T, 1]
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    decays = (g.unsqueeze(-1) - g.unsqueeze(-2)).masked_fill(later, -torch.inf).exp()  # [..., T, T]
    grown = g.exp().unsqueeze(-1)
    wanted = torch.cat((v * b, k * b * grown), dim=-1)
    solved = torch.linalg.solve_triangular((k * b) @ k.mT * decays, wanted, upper=False, unitriangular=True)
    new, old = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    scores, asked = q @ k.mT * decays, q * grown
    last = g[..., -1:]
    kept, written = last.exp().unsqueeze(-1), k * (last - g).exp().unsqueeze(-1)
    state, outs = q.new_zeros(*q.shape[:2], k.shape[-1], v.shape[-1]), []
    for c in range(q.shape[2]):
        change = new[:, :, c] - old[:, :, c] @ state
        outs.append(asked[:, :, c] @ state + scores[:, :, c] @ change)
        state = kept[:, :, c] * state + written[:, :, c].mT @ change
    out = torch.stack(outs, dim=2).movedim(1, 3).flatten(1, 2)  # [N, H, chunks, T, V] -> [N, L, H, V]
    return out[:, :length].to(value.dtype)


def _in_chunks(x: Tensor, size: int) -> Tensor:
    """Return [N, L, H, …] as [N, H, chunks, size, …] in fp32, with zeros behind it: no decay, and nothing written."""
    missing = -x.shape[1] % size
    padded: Tensor = pad(x.float(), (0, 0) * (x.dim() - 2) + (0, missing))
    chunked: Tensor = padded.unflatten(1, (-1, size)).movedim(3, 1)
    return chunked
