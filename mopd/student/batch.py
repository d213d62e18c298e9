"""From samples to the tensors of one micro-batch, and micro-batches through Megatron's pipeline schedule.

A micro-batch is a pack, sequences end to end in one row of T tokens, or B right-padded sequences of S; what the layout
needs is padded in both. Tokens are [1, T] or [B, S]. What the loss reads is flat, row by row of the logits: T rows, or
those of [S, B]. K teacher tokens, n samples.

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

import torch
from torch import Tensor

from mopd.data.packing import PackingRules
from mopd.losses import choose_rows
from mopd.student.attention import PackedSequences, sent
from mopd.student.form import Form, choose_form
from mopd.student.images import StudentImages
from mopd.student.vision import ImageInput
from mopd.types import SampleMeta

Fields = Mapping[str, Mapping[int, Tensor]]
"""Field name -> sample id -> tensor, as fetched from the data plane."""

ROW_FIELDS = ("rollout_logprobs", "teacher_ids", "teacher_logprobs", "teacher_token_logprobs", "task_advantage")
"""Fields with one entry per response token that a loss may read."""


@dataclass(frozen=True, kw_only=True)
class LossRows:
    """What the loss reads, row by row of the logits; rows without a response token hold zeros."""

    loss_mask: Tensor
    """[T] bool: this row scores a response token that counts; none does where the mask was not read."""
    loss_rows: Tensor | None
    """[N] int64: numbers of these rows, ascending, never empty; ``None`` for all, or where the mask was not read.
    Known without asking the device, so that the LM head can leave prompts and padding out."""
    targets: Tensor
    """[T] int64: the response token that the row scores."""
    samples: Tensor
    """[T] int64: which of the n samples the row belongs to, padding to the one before it or to filler."""
    domains: Tensor
    """[n] int64: index of each sample's domain."""
    sample_positions: Tensor
    """[n] int64: index of each sample among the plan's ascending sample ids; -1 for filler."""
    num_loss_tokens: Tensor
    """[n] int64: loss tokens of each whole sample; 0 where the mask was not read."""
    fields: Mapping[str, Tensor] = field(default_factory=dict)
    """Row fields by name: [T], [T, K] or (D teachers, an ensemble) [T, D, K], dtypes as in the data plane."""

    def tensors(self) -> list[Tensor | None]:
        """All that it holds."""
        own = (self.loss_mask, self.loss_rows, self.targets, self.samples)
        return [*own, self.domains, self.sample_positions, self.num_loss_tokens, *self.fields.values()]


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Input of one forward pass: right-padded sequences, or packed ones. Attention is causal, so a real token never
    looks at the padding behind it."""

    tokens: Tensor
    """[B, S] int64."""
    position_ids: Tensor
    """[B, S] int64; [3, B, S] (time, height, width) of a vision-language model."""
    padding_mask: Tensor
    """[B, S] bool, True = padding, for routers of experts, which balance the load of real tokens."""
    rows: LossRows
    form: Form
    packed: PackedSequences | None = None
    """Where sequences begin, if they stand end to end ([1, T] instead of [B, S])."""
    images: ImageInput | None = None
    """On the first stage of a vision-language model, where a prompt has any."""

    @property
    def shape(self) -> tuple[int, int]:
        """(B, S)."""
        return self.tokens.shape[0], self.tokens.shape[1]

    def tensors(self) -> list[Tensor]:
        """All that it holds."""
        starts = None if self.packed is None else self.packed.cu_seqlens
        own = (self.tokens, self.position_ids, self.padding_mask, starts)
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
    """``samples`` as one micro-batch on ``device``, in the form that ``rules`` ask for, with filler without loss up to
    ``at_least`` (see ``choose_form``): this context-parallel rank's share of it.

    ``fields`` are those that the pipeline stage reads; what is not among them stays zero. ``vision`` is given where the
    model sees images. Copies to a GPU are queued on the current stream.

    Raises:
        ValueError: a field's length does not fit the sample's lengths, or a prompt is empty.
        UserError: see ``StudentImages.read``.
    """
    form = choose_form(samples, rules, at_least, cp_size, cp_rank)
    to = partial(sent, device=device)
    tokens, padding = torch.zeros(form.num_rows, dtype=torch.int64), torch.ones(form.num_rows, dtype=torch.bool)
    for i, sample in enumerate(samples):
        _check(sample, fields)
        padding[form.rows(i, 0, sample.length)] = False
        if "tokens" in fields:
            tokens[form.rows(i, 0, sample.length)] = fields["tokens"][sample.sample_id]
    position_ids, images = form.positions(), None
    if vision is not None:
        own_images = [(fields["tokens"][s.sample_id], fields["images"][s.sample_id]) for s in samples]
        position_ids = vision.position_ids(own_images, position_ids, form)
        images = vision.read(own_images, form)
    return MicroBatch(
        tokens=to(form.sequences(tokens)),
        position_ids=to(form.sequences(position_ids)),
        padding_mask=to(form.sequences(padding)),
        rows=_loss_rows(samples, fields, form, domains, positions, to),
        form=form,
        packed=None if form.lengths is None else PackedSequences.of(form.lengths, device),
        images=None if images is None else ImageInput(**{name: to(value) for name, value in vars(images).items()}),
    )


def _loss_rows(
    samples: Sequence[SampleMeta],
    fields: Fields,
    form: Form,
    domains: Sequence[str],
    positions: Mapping[int, int],
    to: Callable[[Tensor], Tensor],
) -> LossRows:
    """Rows of ``fields``, sent by ``to``."""
    targets = torch.zeros(form.num_rows, dtype=torch.int64)
    loss_mask = torch.zeros(form.num_rows, dtype=torch.bool)
    num_loss_tokens = torch.zeros(len(form.firsts), dtype=torch.int64)
    row_fields = _empty_row_fields(fields, form.num_rows)
    for i, sample in enumerate(samples):
        scored = form.rows(i, sample.prompt_length - 1, sample.length - 1)
        if "tokens" in fields:
            targets[scored] = fields["tokens"][sample.sample_id][sample.prompt_length :]
        if "loss_mask" in fields:
            loss_mask[scored] = own_mask = fields["loss_mask"][sample.sample_id]
            num_loss_tokens[i] = own_mask.sum()
        for name, values in row_fields.items():
            values[scored] = fields[name][sample.sample_id]
    loss_mask = form.share(loss_mask)
    chosen = choose_rows(loss_mask) if "loss_mask" in fields else None
    num_filler = len(form.firsts) - len(samples)
    return LossRows(
        loss_mask=to(loss_mask),
        loss_rows=None if chosen is None else to(chosen),
        targets=to(form.share(targets)),
        samples=to(form.share(form.samples())),
        domains=to(torch.tensor([domains.index(s.domain) for s in samples] + [0] * num_filler)),
        sample_positions=to(torch.tensor([positions[s.sample_id] for s in samples] + [-1] * num_filler)),
        num_loss_tokens=to(num_loss_tokens),
        fields={name: to(form.share(values)) for name, values in row_fields.items()},
    )


def _empty_row_fields(fields: Fields, num_rows: int) -> dict[str, Tensor]:
    """Zeros [T, …] for every row field that was fetched; trailing shape and dtype are the samples' own."""
    empty = {}
    for name in ROW_FIELDS:
        if name in fields:
            example = next(iter(fields[name].values()))
            empty[name] = torch.zeros(num_rows, *example.shape[1:], dtype=example.dtype)
    return empty


def _check(sample: SampleMeta, fields: Fields) -> None:
    if sample.prompt_length < 1:
        raise ValueError(f"sample {sample.sample_id} has an empty prompt: no row could score its first response token")
    for name, values in fields.items():
        if name == "images":
            continue  # one row for each image
        expected = sample.length if name == "tokens" else sample.response_length
        actual = values[sample.sample_id].shape[0]
        if actual != expected:
            raise ValueError(f"sample {sample.sample_id}: field {name!r} has {actual} entries, {expected} expected")
