"""Conversion of samples to the tensors of one micro-batch.

A micro-batch is a pack, sequences end to end in one row of T tokens, or B right-padded sequences of S; both are padded
to the multiples that the layout needs. Tokens are [1, T] or [B, S]. What the loss reads is flat, in the order of the
logits' rows: the pack's T rows, or the S x B rows of [S, B]. K teacher tokens, n samples.

The logits at sequence row t predict token t + 1, so a response token at position p is scored by row p - 1. One sample
with prompt (1, 5) and response (7, 8, 2)::

    position       0  1  2  3  4
    tokens         1  5  7  8  2
    loss row          ^  ^  ^        rows prompt_length - 1 ... L - 2
    target            7  8  2
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from mopd.base.types import HIDDEN_FIELD, ROUTES_FIELD, WIDE_FIELDS, SampleMeta
from mopd.data.packing import PackingRules
from mopd.losses import choose_rows
from mopd.student.attention import PackedSequences, to_device
from mopd.student.images import StudentImages
from mopd.student.token_layout import TokenLayout, choose_token_layout
from mopd.student.vision import ImageInput

HostRows = np.ndarray[Any, Any]
"""Numbers of rows that stay on the host, so that nothing waits for the device to know them."""

Fields = Mapping[str, Mapping[int, Tensor]]
"""Field name -> sample id -> tensor, as fetched from the data plane."""

ROW_FIELDS = (
    "rollout_logprobs",
    "teacher_ids",
    "teacher_logprobs",
    "teacher_token_logprobs",
    HIDDEN_FIELD,
    "task_advantage",
    "baseline",
    "chunk_advantage",
)
"""Fields with one entry per response token, or per loss token (``WIDE_FIELDS``), that a loss may read."""


@dataclass(frozen=True, kw_only=True)
class LossRows:
    """Input of the loss, one entry for each row of the logits; rows that score no response token hold zeros."""

    loss_mask: Tensor
    """[T] bool: whether the row scores a response token that counts. All False if the stage does not read the mask."""
    loss_rows: Tensor | None
    """[N] int64: ascending numbers of the masked-in rows, never empty; ``None`` for all rows, or where the mask was not
    read. Computed on the host, so that the LM head can leave out prompts and padding without waiting for the device."""
    targets: Tensor
    """[T] int64: the response token that the row scores."""
    samples: Tensor
    """[T] int64: which of the n samples the row belongs to. Padding belongs to the sample before it or to filler."""
    domains: Tensor
    """[n] int64: index of each sample's domain."""
    sample_positions: Tensor
    """[n] int64: index of each sample among the plan's ascending sample ids; -1 for filler."""
    num_loss_tokens: Tensor
    """[n] int64: loss tokens of each whole sample; 0 where the mask was not read."""
    row_domains: HostRows | None = None
    """[N] int64: index of the domain of each row that becomes logits."""
    numbers: Tensor | None = None
    """[T] int64: place of each row among those of all context-parallel ranks; ``None`` for one rank."""
    fields: Mapping[str, Tensor] = field(default_factory=dict)
    """Row fields by name: [T], [T, K] or, with an ensemble of D teachers, [T, D, K]; dtypes as in the data plane.
    Hidden states of teachers of unequal sizes are padded to the largest."""

    def tensors(self) -> list[Tensor | None]:
        """Return every tensor that this object holds."""
        own = (self.loss_mask, self.loss_rows, self.targets, self.samples, self.numbers)
        return [*own, self.domains, self.sample_positions, self.num_loss_tokens, *self.fields.values()]


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Input of one forward pass, right-padded or packed. Causality hides the padding from the real tokens before it."""

    tokens: Tensor
    """[B, S] int64."""
    position_ids: Tensor
    """[B, S] int64; [3, B, S] (time, height, width) for a vision-language model."""
    padding_mask: Tensor
    """[B, S] bool, True = padding. Read by expert routers, which balance the load of real tokens."""
    rows: LossRows
    token_layout: TokenLayout
    packed: PackedSequences | None = None
    """Sequence boundaries of a pack ([1, T] instead of [B, S]); ``None`` if right-padded."""
    routes: Tensor | None = None
    """[T, layers with experts, experts of a token] int16 that the rollout's routers chose for each row, -1 where that
    is not known; ``None`` where none are replayed."""
    images: ImageInput | None = None
    """Images of the prompts; only on the first stage of a vision-language model, and only if there are any."""

    @property
    def shape(self) -> tuple[int, int]:
        """(B, S)."""
        return self.tokens.shape[0], self.tokens.shape[1]

    def tensors(self) -> list[Tensor]:
        """Return every tensor that this object holds."""
        starts = None if self.packed is None else self.packed.cu_seqlens
        own = (self.tokens, self.position_ids, self.padding_mask, starts, self.routes)
        seen = () if self.images is None else self.images.tensors()
        return [tensor for tensor in (*own, *self.rows.tensors(), *seen) if tensor is not None]


def build_micro_batch(
    samples: Sequence[SampleMeta],
    fields: Fields,
    *,
    rules: PackingRules,
    domains: Sequence[str],
    positions: Mapping[int, int],
    device: torch.device,
    at_least: tuple[int, int] = (1, 1),
    cp_size: int = 1,
    cp_rank: int = 0,
    vision: StudentImages | None = None,
) -> MicroBatch:
    """Build one micro-batch of ``samples`` on ``device``, packed or right-padded as ``rules`` say, with filler that has
    no loss up to ``at_least`` (see ``choose_token_layout``), and return this context-parallel rank's share of it.

    ``fields`` are those that the pipeline stage reads; what is not among them stays zero. ``vision`` is given if the
    model takes images. Copies to a GPU are queued on the current stream.

    Raises:
        ValueError: a field's length does not fit the sample's lengths, or a prompt is empty.
        UserError: an image cannot be read, as ``StudentImages.read`` says.
    """
    token_layout = choose_token_layout(samples, rules, at_least, cp_size, cp_rank)
    to = partial(to_device, device=device)
    num_rows = token_layout.num_rows
    tokens, padding = torch.zeros(num_rows, dtype=torch.int64), torch.ones(num_rows, dtype=torch.bool)
    for i, sample in enumerate(samples):
        _check(sample, fields)
        padding[token_layout.rows(i, 0, sample.length)] = False
        if "tokens" in fields:
            tokens[token_layout.rows(i, 0, sample.length)] = fields["tokens"][sample.sample_id]
    position_ids, images = token_layout.positions(), None
    if vision is not None:
        own_images = [(fields["tokens"][s.sample_id], fields["images"][s.sample_id]) for s in samples]
        position_ids = vision.position_ids(own_images, position_ids, token_layout)
        images = vision.read(own_images, token_layout)
    return MicroBatch(
        tokens=to(token_layout.sequences(tokens)),
        position_ids=to(token_layout.sequences(position_ids)),
        padding_mask=to(token_layout.sequences(padding)),
        rows=_loss_rows(samples, fields, token_layout, domains, positions, to),
        token_layout=token_layout,
        routes=_routes(samples, fields[ROUTES_FIELD], token_layout, to) if ROUTES_FIELD in fields else None,
        packed=None if token_layout.lengths is None else PackedSequences.of(token_layout.lengths, device),
        images=None if images is None else ImageInput(**{name: to(value) for name, value in vars(images).items()}),
    )


def _routes(
    samples: Sequence[SampleMeta], own: Mapping[int, Tensor], token_layout: TokenLayout, to: Callable[[Tensor], Tensor]
) -> Tensor | None:
    """Return ``MicroBatch.routes``; ``None`` of a micro-batch without samples."""
    if not samples:
        return None
    shape = own[samples[0].sample_id].shape[1:]
    routes = torch.full((token_layout.num_rows, *shape), -1, dtype=torch.int16)
    for i, sample in enumerate(samples):
        routes[token_layout.rows(i, 0, sample.length - 1)] = own[sample.sample_id].short()
    return to(token_layout.share(routes))


def _loss_rows(
    samples: Sequence[SampleMeta],
    fields: Fields,
    token_layout: TokenLayout,
    domains: Sequence[str],
    positions: Mapping[int, int],
    to: Callable[[Tensor], Tensor],
) -> LossRows:
    """Build the loss rows from ``fields``; ``to`` copies each tensor to the device."""
    targets = torch.zeros(token_layout.num_rows, dtype=torch.int64)
    loss_mask = torch.zeros(token_layout.num_rows, dtype=torch.bool)
    num_loss_tokens = torch.zeros(len(token_layout.firsts), dtype=torch.int64)
    row_fields = {}
    for name in filter(fields.__contains__, ROW_FIELDS):
        example = max(fields[name].values(), key=lambda own: own.shape[-1] if own.dim() > 1 else 0)
        row_fields[name] = torch.zeros(token_layout.num_rows, *example.shape[1:], dtype=example.dtype)
    for i, sample in enumerate(samples):
        # Shifted by one: the row before a token predicts it, so the last prompt row scores the first response token.
        scored = token_layout.rows(i, sample.prompt_length - 1, sample.length - 1)
        if "tokens" in fields:
            targets[scored] = fields["tokens"][sample.sample_id][sample.prompt_length :]
        if "loss_mask" in fields:
            loss_mask[scored] = own_mask = fields["loss_mask"][sample.sample_id]
            num_loss_tokens[i] = own_mask.sum()
        for name, values in row_fields.items():
            own, rows = fields[name][sample.sample_id], cast(slice | Tensor, scored)
            if len(own) < sample.response_length:
                rows = torch.arange(token_layout.num_rows)[scored][fields["loss_mask"][sample.sample_id]]
            values[(rows, ..., slice(own.shape[-1])) if own.dim() > 1 else rows] = own
    loss_mask = token_layout.share(loss_mask)
    chosen = choose_rows(loss_mask) if "loss_mask" in fields else None
    num_filler = len(token_layout.firsts) - len(samples)
    sample_domains = torch.tensor([domains.index(s.domain) for s in samples] + [0] * num_filler)
    sample_rows = token_layout.share(token_layout.samples())
    return LossRows(
        loss_mask=to(loss_mask),
        loss_rows=None if chosen is None else to(chosen),
        targets=to(token_layout.share(targets)),
        samples=to(sample_rows),
        domains=to(sample_domains),
        row_domains=sample_domains[sample_rows if chosen is None else sample_rows[chosen]].numpy(),
        sample_positions=to(torch.tensor([positions[s.sample_id] for s in samples] + [-1] * num_filler)),
        num_loss_tokens=to(num_loss_tokens),
        numbers=None if token_layout.cp_size == 1 else to(token_layout.share(torch.arange(token_layout.num_rows))),
        fields={name: to(token_layout.share(values)) for name, values in row_fields.items()},
    )


def _check(sample: SampleMeta, fields: Fields) -> None:
    if sample.prompt_length < 1:
        raise ValueError(f"sample {sample.sample_id} has an empty prompt: no row could score its first response token")
    for name, values in fields.items():
        if name == "images":
            continue  # one row for each image
        expected = {"tokens": sample.length, ROUTES_FIELD: sample.length - 1}.get(name, sample.response_length)
        actual = values[sample.sample_id].shape[0]
        if actual != expected and not (name in WIDE_FIELDS and actual == sample.num_loss_tokens):
            raise ValueError(f"sample {sample.sample_id}: field {name!r} has {actual} entries, {expected} expected")
