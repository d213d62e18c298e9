"""Causal attention of the local (not TransformerEngine) layers: which rows of a micro-batch attend to which, and the
kernels that compute it.

A micro-batch is right-padded (B sequences of S tokens; a real token only sees tokens before it, so causality hides the
padding) or packed (sequences end to end, B = 1). With context parallelism each sequence is cut into 2c chunks, and rank
r of c holds chunks r and 2c - 1 - r, which gives all ranks equal work. A rank gathers all keys and values of its layer.

TransformerEngine's layers do all of this themselves, from Megatron's own parameters. Where its fused rope cannot turn
queries and keys, the ropes of the local layers do, and ``EngineAttention`` stands between.

Letters: T rows of this rank, H query heads, G key heads, D channels of a head, N sequences.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad, scaled_dot_product_attention

from mopd.student.parallel import sharded_rows

_VARLEN_TAKES_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""Whether ``varlen_attn`` supports grouped-query attention itself, which it does from torch 2.12 on."""
_HALVES = (torch.float16, torch.bfloat16)
_FUSED_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedSequences:
    """Lengths and boundaries of sequences that are packed end to end in one row of tokens."""

    lengths: tuple[int, ...]
    """Lengths of the whole sequences over all context-parallel ranks, padding for the layout included. On the host."""
    cu_seqlens: Tensor
    """[N + 1] int32 on the device: the start of each sequence, then the end of the last."""

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> PackedSequences:
        """Build the boundaries on ``device``. Copies to a GPU are queued on the current stream."""
        return cls(lengths=tuple(lengths), cu_seqlens=_bounds(lengths, device))

    def megatron_params(self) -> PackedSeqParams:
        """Return the same boundaries in the form that TransformerEngine's layers take."""
        longest = max(self.lengths)
        return PackedSeqParams("thd", self.cu_seqlens, self.cu_seqlens, max_seqlen_q=longest, max_seqlen_kv=longest)


def zigzag_rows(lengths: Sequence[int], cp_size: int) -> list[Tensor]:
    """Return the int64 row numbers that each context-parallel rank holds of sequences that are packed end to end, whose
    lengths are multiples of 2 x ``cp_size``."""
    parts: list[list[Tensor]] = [[] for _ in range(cp_size)]
    for start, end in pairwise(accumulate(lengths, initial=0)):
        chunks = torch.arange(start, end).chunk(2 * cp_size)
        for rank, own in enumerate(parts):
            own += [chunks[rank], chunks[2 * cp_size - 1 - rank]]
    return [torch.cat(own) for own in parts]


@dataclass(frozen=True)
class _QueryPart:
    """A rank's queries of one chunk of a sequence and how many keys they may see. The last query sees the last key."""

    first: int
    num_queries: int
    num_keys: int


class RowParams(PackedSeqParams):
    """Description of one micro-batch for layers whose ropes take rows. Megatron passes it to every layer and to its
    recomputation.

    The format name is none of Megatron's: at ``"thd"`` Megatron would rotate queries and keys sequence by sequence,
    with lengths that it reads back from the device.
    """

    packed: PackedSequences | None = None
    """What ``EngineAttention`` needs of a packed micro-batch."""

    def __init__(
        self, positions: Tensor, lengths: Sequence[int], *, is_packed: bool, cp_size: int = 1, cp_rank: int = 0
    ) -> None:
        """Describe one micro-batch, or this context-parallel rank's share of it.

        Args:
            positions: [T] int64, the position of each row in its sequence.
            lengths: lengths of the whole sequences; the common length alone if the micro-batch is right-padded.
        """
        super().__init__("rows", max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths))
        self.positions = positions
        self.is_packed = is_packed
        self.lengths = tuple(lengths)
        self.cp_size, self.cp_rank = cp_size, cp_rank

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """(length, count) of neighbouring sequences of equal length: one kernel call serves all of them."""
        return [(length, len(list(run))) for length, run in groupby(self.lengths)]

    def parts(self, length: int) -> tuple[_QueryPart, ...]:
        """Return which queries of a sequence this rank holds, and how many keys each part of them sees."""
        if self.cp_size == 1:
            return (_QueryPart(0, length, length),)
        chunk = length // (2 * self.cp_size)
        return (
            _QueryPart(0, chunk, (self.cp_rank + 1) * chunk),
            _QueryPart(chunk, chunk, (2 * self.cp_size - self.cp_rank) * chunk),
        )

    @cached_property
    def key_order(self) -> Tensor:
        """[T x cp] int64: index that brings the gathered keys from rank order into sequence order."""
        return to_device(torch.cat(zigzag_rows(self.lengths, self.cp_size)).argsort(), self.positions.device)

    @cached_property
    def key_rows(self) -> Tensor:
        """Rows of the ordered keys that each query part sees, part after part; keys that two parts see occur twice."""
        rows = [
            torch.arange(start, start + part.num_keys)
            for start, end in pairwise(accumulate(self.lengths, initial=0))
            for part in self.parts(end - start)
        ]
        return to_device(torch.cat(rows), self.positions.device)

    @cached_property
    def varlen_bounds(self) -> tuple[Tensor, Tensor, int, int]:
        """Bounds [parts + 1] int32 of the query parts and of their keys, then the longest query part and key part."""
        parts = [part for length in self.lengths for part in self.parts(length)]
        queries, keys = [part.num_queries for part in parts], [part.num_keys for part in parts]
        device = self.positions.device
        return _bounds(queries, device), _bounds(keys, device), max(queries), max(keys)


class RowRotary(nn.Module):
    """Wrapper of a Megatron rotary embedding that takes each row's own position instead of counting rows."""

    def __init__(self, rope: nn.Module, *, is_latent: bool) -> None:
        """``is_latent``: the rope is a latent-attention layer's, which drops the batch dimension of packed rows."""
        super().__init__()
        self.rope = rope
        self._is_latent = is_latent

    def get_rotary_seq_len(
        self, context: Any, block: Any, hidden: Any, config: Any, packed_seq_params: RowParams
    ) -> RowParams:
        """Return the micro-batch's rows in place of a length: Megatron hands the result to ``forward`` unread."""
        return packed_seq_params

    def forward(self, rows: RowParams, **unread: Any) -> Any:
        """Return the angles [T, 1, 1, D], or [T, 1, D] beside queries [T, H, D], and the rope's scale if it has one."""
        made = self.rope(rows.max_seqlen_q, packed_seq=True)  # packed_seq: all context-parallel ranks' positions
        table, *scale = made if isinstance(made, tuple) else (made,)
        angles = table[rows.positions]
        if self._is_latent and rows.is_packed:
            angles = angles.squeeze(1)
        return (angles, *scale) if scale else angles


class CoreAttention(MegatronModule):
    """Replacement for Megatron's ``DotProductAttention``, which would hold all scores as a tensor [B, H, S, S]. It
    takes its sizes from the tensors."""

    def __init__(
        self,
        *,
        config: Any,
        pg_collection: Any,
        softmax_scale: float | None = None,
        window: int | None = None,
        scale: float | None = None,
        has_sinks: bool = False,
        **unread: Any,
    ) -> None:
        """``window``: tokens that each one sees, itself included; None for all before. ``scale``: this layer's factor
        of scores; None for ``softmax_scale``, the model's. ``has_sinks``: each head has a learned score that takes part
        in its softmax, under the name that it has in Megatron's attention."""
        super().__init__(config=config)
        self.softmax_offset: nn.Parameter | None = None
        if has_sinks:
            heads = config.num_attention_heads // pg_collection.tp.size()
            self.softmax_offset = nn.Parameter(torch.empty(heads, dtype=config.params_dtype))
        self._tp_group = pg_collection.tp
        self._window = window
        self._scale = softmax_scale if scale is None else scale
        self._cp_group = pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: RowParams,
        **unread: Any,
    ) -> Tensor:
        """Attend: [S, B, H, D] (latent attention with one sequence: [T, H, D]) -> [S, B, H D]."""
        rows = packed_seq_params
        if query.dim() == 3:
            query, key, value = (tensor.unsqueeze(1) for tensor in (query, key, value))
        width = value.shape[-1]
        if width != query.shape[-1]:  # latent attention, which names its scale; the fused kernels want one size
            widest = max(width, query.shape[-1])
            query, key, value = (pad(tensor, (0, widest - tensor.shape[-1])) for tensor in (query, key, value))
        if rows.cp_size > 1:
            # Backward adds up the ranks' gradients of each key and scatters them.
            both = gather_from_sequence_parallel_region(torch.cat((key, value), dim=-1), group=self._cp_group)
            key, value = both[rows.key_order].chunk(2, dim=-1)
        if not rows.is_packed:
            out = self._run(query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), rows).transpose(0, 1)
        elif query.is_cuda and query.dtype in _HALVES and self.softmax_offset is None:
            out = self._varlen(query.squeeze(1), key.squeeze(1), value.squeeze(1), rows)[:, None]
        else:
            out = self._looped(query.squeeze(1), key.squeeze(1), value.squeeze(1), rows)[:, None]
        return out[..., :width].flatten(2)

    def _varlen(self, query: Tensor, key: Tensor, value: Tensor, rows: RowParams) -> Tensor:
        """Attend over all packed sequences in one kernel."""
        if rows.cp_size > 1:
            # The kernel wants each part's keys contiguous: keys that both parts of a sequence see are copied.
            key, value = key[rows.key_rows], value[rows.key_rows]
        options: dict[str, Any] = {
            "scale": self._scale,
            "window_size": (-1 if self._window is None else self._window - 1, 0),
        }
        if _VARLEN_TAKES_GROUPS:
            options["enable_gqa"] = _is_grouped(query, key)
        else:
            key, value = _ungrouped(query, key, value)
        out = varlen_attn(query, key, value, *rows.varlen_bounds, **options)
        assert isinstance(out, Tensor)
        return out

    def _looped(self, query: Tensor, key: Tensor, value: Tensor, rows: RowParams) -> Tensor:
        """Attend over packed [T, H, D], one run of equally long sequences after another. Serves dtypes and devices
        without a varlen kernel."""
        counts = [count * length for length, count in rows.runs]
        queries = query.split([count // rows.cp_size for count in counts])
        outs = []
        for (_, num), q, k, v in zip(rows.runs, queries, key.split(counts), value.split(counts), strict=True):
            q, k, v = (x.unflatten(0, (num, -1)) for x in (q, k, v))
            outs.append(self._run(q, k, v, rows).flatten(0, 1))
        return torch.cat(outs)

    def _run(self, query: Tensor, key: Tensor, value: Tensor, rows: RowParams) -> Tensor:
        """Attend over sequences of one length: queries [N, S / cp, H, D], keys [N, S, G, D] -> [N, S / cp, H, D]."""
        outs = []
        for part in rows.parts(key.shape[1]):
            q = query[:, part.first : part.first + part.num_queries].transpose(1, 2)
            k, v = (x[:, : part.num_keys].transpose(1, 2) for x in (key, value))
            if self.softmax_offset is not None:
                outs.append(self._beside_sinks(q, k, v, self.softmax_offset).transpose(1, 2))
            else:
                outs.append(_fused(q, k, v, self._scale, self._window).transpose(1, 2))
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)

    def _beside_sinks(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> Tensor:
        """Attend as ``_fused`` does with a key more, whose value is 0 and whose score of a head is that of ``sinks``
        [H]: it has one channel more, where queries have the score and other keys 0. Any kernel differentiates that."""
        width = query.shape[-1]
        scale = width**-0.5 if self._scale is None else self._scale
        channel = (sinks / scale)[None, :, None, None].expand(*query.shape[:-1], 1)
        # The kernels of a GPU want multiples of 8 channels.
        missing = 8 - width % 8
        query = pad(torch.cat((query, channel), dim=-1), (0, missing - 1))
        key, value = (pad(x, (0, missing, 1, 0)) for x in (key, value))
        one = torch.zeros_like(key[:, :, :1])
        one[..., width] = 1
        key = torch.cat((one, key[:, :, 1:]), dim=2)
        return _fused(query, key, value, scale, self._window, has_sink=True)[..., :width]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """Return Megatron's description of the sinks for checkpoints, empty without any."""
        return sharded_rows(self, "softmax_offset", self._tp_group, prefix, sharded_offsets, metadata)


class EngineAttention(MegatronModule):
    """TransformerEngine's attention for layers whose ropes take rows: the format that keeps Megatron from turning each
    sequence by itself, with lengths that it reads back from the device in every layer, is known here alone."""

    def __init__(self, *, config: Any, **options: Any) -> None:
        super().__init__(config=config)
        self.engine = TEDotProductAttention(config=config, **options)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *unread: Any, packed_seq_params: RowParams, **options: Any
    ) -> Tensor:
        """Attend: [S, B, H, D] (latent attention with one sequence: [T, H, D]) -> [S, B, H D]."""
        packed, rest = packed_seq_params.packed, {"attention_mask": None, **options}
        if packed is None:
            batch = [x if x.dim() == 4 else x.unsqueeze(1) for x in (query, key, value)]
            out: Tensor = self.engine(*batch, **rest)
            return out
        rows = [x if x.dim() == 3 else x.squeeze(1) for x in (query, key, value)]
        out = self.engine(*rows, packed_seq_params=packed.megatron_params(), **rest)
        return out[:, None]


def _fused(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None, *, has_sink: bool = False
) -> Tensor:
    """Return [N, H, S, D] from queries of that shape and keys [N, G, S', D], by a kernel that does not hold the scores;
    the last query sees the last key, and each as many keys as the window has; ``has_sink``: and the first key. On a
    GPU torch raises if no such kernel fits."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    mask: Any = None
    is_masked = has_sink or (window is not None and window < num_keys)
    if is_masked:
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device)
        past = num_keys - num_queries  # keys before the first query's own
        mask = mask.tril(past)
        if window is not None:
            mask = mask.triu(past - window + 1)
        if has_sink:
            mask[:, 0] = True
    elif num_queries != num_keys:
        mask = causal_lower_right(num_queries, num_keys)
    if query.is_cuda and (is_masked or query.dtype not in _HALVES):
        # the memory-efficient kernel, the one that takes fp32, and masks for heads of any size, does not know groups
        key, value = _ungrouped(query, key, value)
    with sdpa_kernel(_FUSED_KERNELS) if query.is_cuda else nullcontext():
        out: Tensor = scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=_is_grouped(query, key),
        )
    return out


def _is_grouped(query: Tensor, key: Tensor) -> bool:
    """Return whether keys have fewer heads than queries; both are [..., H, S, D] or both [T, H, D]."""
    return query.shape[1] != key.shape[1]


def _ungrouped(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat keys and values so that each query head has a head of its own."""
    times = query.shape[1] // key.shape[1]
    return key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)


def _bounds(lengths: Sequence[int], device: torch.device) -> Tensor:
    return to_device(torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32), device)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to ``device``. A copy to a GPU goes through pinned memory and is queued without waiting."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
