"""Causal attention of the local layers: which rows of a micro-batch look at which, and the kernels that compute it.

The form is right-padded (B sequences of S tokens; what a real token sees lies before it, so causality hides padding) or
packed (sequences end to end, B = 1). Context-parallel rank r of c holds the chunks r and 2c - 1 - r of each sequence
cut into 2c, so that ranks have equal work; it gathers all keys and values of its layer.

TransformerEngine's layers do all of this themselves, from Megatron's own parameters.

Letters: T rows of this rank, H heads of the queries, G heads of the keys, D channels of a head, N sequences.
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
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad, scaled_dot_product_attention

_VARLEN_TAKES_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""Not before torch 2.12."""
_HALVES = (torch.float16, torch.bfloat16)
_FUSED_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedSequences:
    """Sequences that stand end to end in one row of tokens."""

    lengths: tuple[int, ...]
    """On the host, of whole sequences over all context-parallel ranks, with the padding that the layout needs."""
    cu_seqlens: Tensor
    """[N + 1] int32 on the device: where each begins, and the end."""

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> PackedSequences:
        """Copies to a GPU are queued on the current stream."""
        return cls(lengths=tuple(lengths), cu_seqlens=_bounds(lengths, device))

    @property
    def max_length(self) -> int:
        return max(self.lengths)

    def megatron_params(self) -> PackedSeqParams:
        """As TransformerEngine's layers take them."""
        longest = self.max_length
        return PackedSeqParams("thd", self.cu_seqlens, self.cu_seqlens, max_seqlen_q=longest, max_seqlen_kv=longest)


def zigzag_rows(lengths: Sequence[int], cp_size: int) -> list[Tensor]:
    """For each context-parallel rank the int64 numbers of its rows, of sequences that stand end to end.

    Raises:
        ValueError: a length is no multiple of 2 x ``cp_size``.
    """
    if any(length % (2 * cp_size) for length in lengths):
        raise ValueError(f"lengths {list(lengths)} are not all multiples of {2 * cp_size}")
    parts: list[list[Tensor]] = [[] for _ in range(cp_size)]
    for start, end in pairwise(accumulate(lengths, initial=0)):
        chunks = torch.arange(start, end).chunk(2 * cp_size)
        for rank, own in enumerate(parts):
            own += [chunks[rank], chunks[2 * cp_size - 1 - rank]]
    return [torch.cat(own) for own in parts]


@dataclass(frozen=True)
class _QueryPart:
    """Queries of every sequence of a run that look at the same share of its keys; the last one sees the last key."""

    first: int
    num_queries: int
    num_keys: int


class RowParams(PackedSeqParams):
    """What the local layers know of one micro-batch, handed through Megatron to every layer and its recomputation.

    The format is none of Megatron's: at ``"thd"`` it would turn queries and keys sequence by sequence, by lengths that
    it asks the device for.
    """

    def __init__(
        self, positions: Tensor, lengths: Sequence[int], *, is_packed: bool, cp_size: int = 1, cp_rank: int = 0
    ) -> None:
        """
        Args:
            positions: [T] int64, the position of each row in its sequence.
            lengths: of the whole sequences; of one where the form is right-padded.
        """
        super().__init__("rows", max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths))
        self.positions = positions
        self.is_packed = is_packed
        self.lengths = tuple(lengths)
        self.cp_size, self.cp_rank = cp_size, cp_rank

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """(length, how many) of neighbours of one length: one call serves them all."""
        return [(length, len(list(run))) for length, run in groupby(self.lengths)]

    def parts(self, length: int) -> tuple[_QueryPart, ...]:
        """Of this rank's rows of a sequence."""
        if self.cp_size == 1:
            return (_QueryPart(0, length, length),)
        chunk = length // (2 * self.cp_size)
        return (
            _QueryPart(0, chunk, (self.cp_rank + 1) * chunk),
            _QueryPart(chunk, chunk, (2 * self.cp_size - self.cp_rank) * chunk),
        )

    @cached_property
    def key_order(self) -> Tensor:
        """[T x cp] rows of the gathered keys, in the order of the sequences."""
        return sent(torch.cat(zigzag_rows(self.lengths, self.cp_size)).argsort(), self.positions.device)

    @cached_property
    def key_rows(self) -> Tensor:
        """Rows of the ordered keys that the parts look at, end to end."""
        rows = [
            torch.arange(start, start + part.num_keys)
            for start, end in pairwise(accumulate(self.lengths, initial=0))
            for part in self.parts(end - start)
        ]
        return sent(torch.cat(rows), self.positions.device)

    @cached_property
    def varlen_bounds(self) -> tuple[Tensor, Tensor, int, int]:
        """Bounds [parts + 1] int32 of the parts' queries and of their keys, and the longest of both."""
        parts = [part for length in self.lengths for part in self.parts(length)]
        queries, keys = [part.num_queries for part in parts], [part.num_keys for part in parts]
        device = self.positions.device
        return _bounds(queries, device), _bounds(keys, device), max(queries), max(keys)


class RowRotary(nn.Module):
    """A rope of Megatron's whose angles follow the rows' own positions instead of counting them."""

    def __init__(self, rope: nn.Module, *, is_latent: bool) -> None:
        """``is_latent``: it belongs to a layer of latent attention, which drops the dimension of one sequence."""
        super().__init__()
        self.rope = rope
        self._is_latent = is_latent

    def get_rotary_seq_len(
        self, context: Any, block: Any, hidden: Any, config: Any, packed_seq_params: RowParams
    ) -> RowParams:
        """Megatron asks here how many angles there are, and gives the answer to ``forward``."""
        return packed_seq_params

    def forward(self, rows: RowParams, **unread: Any) -> Any:
        """[T, 1, 1, D], or [T, 1, D] beside queries [T, H, D]; together with its scale where the rope has one."""
        made = self.rope(rows.max_seqlen_q, packed_seq=True)  # of all ranks
        table, *scale = made if isinstance(made, tuple) else (made,)
        angles = table[rows.positions]
        if self._is_latent and rows.is_packed:
            angles = angles.squeeze(1)
        return (angles, *scale) if scale else angles


class CoreAttention(MegatronModule):
    """In the place of Megatron's ``DotProductAttention``, whose scores are a tensor [B, H, S, S]. Takes its sizes from
    the tensors."""

    def __init__(self, *, config: Any, pg_collection: Any, softmax_scale: float | None = None, **unread: Any) -> None:
        super().__init__(config=config)
        self._scale = softmax_scale
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
        """[S, B, H, D] (latent attention with one sequence: [T, H, D]) -> [S, B, H D]."""
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
        elif query.is_cuda and query.dtype in _HALVES:
            out = self._varlen(query.squeeze(1), key.squeeze(1), value.squeeze(1), rows)[:, None]
        else:
            out = self._looped(query.squeeze(1), key.squeeze(1), value.squeeze(1), rows)[:, None]
        return out[..., :width].flatten(2)

    def _varlen(self, query: Tensor, key: Tensor, value: Tensor, rows: RowParams) -> Tensor:
        """All sequences in one kernel."""
        if rows.cp_size > 1:
            key, value = key[rows.key_rows], value[rows.key_rows]
        options: dict[str, Any] = {"scale": self._scale, "window_size": (-1, 0)}
        if _VARLEN_TAKES_GROUPS:
            options["enable_gqa"] = _is_grouped(query, key)
        else:
            key, value = _ungrouped(query, key, value)
        out = varlen_attn(query, key, value, *rows.varlen_bounds, **options)
        assert isinstance(out, Tensor)
        return out

    def _looped(self, query: Tensor, key: Tensor, value: Tensor, rows: RowParams) -> Tensor:
        """[T, H, D], one run of equally long sequences after another."""
        counts = [count * length for length, count in rows.runs]
        queries = query.split([count // rows.cp_size for count in counts])
        outs = []
        for (_, num), q, k, v in zip(rows.runs, queries, key.split(counts), value.split(counts), strict=True):
            q, k, v = (x.unflatten(0, (num, -1)) for x in (q, k, v))
            outs.append(self._run(q, k, v, rows).flatten(0, 1))
        return torch.cat(outs)

    def _run(self, query: Tensor, key: Tensor, value: Tensor, rows: RowParams) -> Tensor:
        """Sequences of one length: queries [N, S / cp, H, D], keys [N, S, G, D] -> [N, S / cp, H, D]."""
        outs = []
        for part in rows.parts(key.shape[1]):
            q = query[:, part.first : part.first + part.num_queries].transpose(1, 2)
            k, v = (x[:, : part.num_keys].transpose(1, 2) for x in (key, value))
            outs.append(_fused(q, k, v, self._scale).transpose(1, 2))
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)


def _fused(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """[N, H, S, D] from queries and [N, G, S', D] keys, by a kernel that holds no scores; the last query sees the last
    key. On a GPU an error where there is none, as torch would take one that holds them."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    if query.is_cuda and query.dtype not in _HALVES:  # whose kernel does not know groups
        key, value = _ungrouped(query, key, value)
    is_square = num_queries == num_keys
    with sdpa_kernel(_FUSED_KERNELS) if query.is_cuda else nullcontext():
        out: Tensor = scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=None if is_square else causal_lower_right(num_queries, num_keys),
            is_causal=is_square,
            scale=scale,
            enable_gqa=_is_grouped(query, key),
        )
    return out


def _is_grouped(query: Tensor, key: Tensor) -> bool:
    """From [..., H, S, D] or, both, [T, H, D]."""
    return query.shape[1] != key.shape[1]


def _ungrouped(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values with a head for each of the queries'."""
    times = query.shape[1] // key.shape[1]
    return key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)


def _bounds(lengths: Sequence[int], device: torch.device) -> Tensor:
    return sent(torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32), device)


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """On ``device``; to a GPU from pinned memory, so that nobody waits for the copy."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
