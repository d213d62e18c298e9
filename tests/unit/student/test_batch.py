from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mopd.student.batch import MicroBatch, build_micro_batch
from mopd.types import SampleMeta

META_A = SampleMeta(sample_id=7, domain="math", weight_version=0, prompt_length=2, response_length=3, num_loss_tokens=2)
META_B = SampleMeta(sample_id=9, domain="code", weight_version=0, prompt_length=1, response_length=1, num_loss_tokens=1)
FIELDS = {
    "tokens": {7: torch.tensor([1, 5, 7, 8, 2]), 9: torch.tensor([4, 6])},
    "loss_mask": {7: torch.tensor([True, False, True]), 9: torch.tensor([True])},
    "teacher_ids": {7: torch.tensor([[3, 4], [5, 6], [7, 8]]).int(), 9: torch.tensor([[1, 2]]).int()},
    "teacher_token_logprobs": {7: torch.tensor([-1.0, -2.0, -3.0]), 9: torch.tensor([-4.0])},
}


def build(
    samples: list[SampleMeta],
    fields: dict = FIELDS,
    pad_to_multiple_of: int = 1,
    at_least: tuple[int, int] = (1, 1),
) -> MicroBatch:
    return build_micro_batch(
        samples,
        fields,
        domains=("math", "code"),
        positions={7: 0, 9: 1},
        pad_to_multiple_of=pad_to_multiple_of,
        device=torch.device("cpu"),
        at_least=at_least,
    )


def test_rows_score_the_next_token() -> None:
    batch = build([META_A, META_B], pad_to_multiple_of=4)
    assert batch.shape == (2, 8)
    assert batch.tokens.tolist() == [[1, 5, 7, 8, 2, 0, 0, 0], [4, 6, 0, 0, 0, 0, 0, 0]]
    rows = batch.rows
    assert rows.targets[:, 0].tolist() == [0, 7, 8, 2, 0, 0, 0, 0]
    assert rows.loss_mask[:, 0].tolist() == [False, True, False, True, False, False, False, False]
    assert rows.targets[:, 1].tolist() == [6, 0, 0, 0, 0, 0, 0, 0]
    assert rows.loss_mask[:, 1].tolist() == [True] + [False] * 7
    assert rows.fields["teacher_ids"][1:4, 0].tolist() == [[3, 4], [5, 6], [7, 8]]
    assert rows.fields["teacher_ids"].shape == (8, 2, 2)
    assert rows.fields["teacher_token_logprobs"][0].tolist() == [0.0, -4.0]
    assert rows.domains.tolist() == [0, 1]
    assert rows.sample_positions.tolist() == [0, 1]


def test_no_samples_give_filler_without_loss() -> None:
    batch = build([], pad_to_multiple_of=2)
    assert batch.shape == (1, 2)
    assert not batch.rows.loss_mask.any()
    assert batch.rows.sample_positions.tolist() == [-1]


def test_a_field_of_the_wrong_length_is_refused() -> None:
    fields = {**FIELDS, "loss_mask": {7: torch.tensor([True]), 9: torch.tensor([True])}}
    with pytest.raises(ValueError, match="sample 7: field 'loss_mask' has 1 entries, 3 expected"):
        build([META_A], fields)


def test_an_empty_prompt_is_refused() -> None:
    meta = replace(META_A, prompt_length=0)
    with pytest.raises(ValueError, match="empty prompt"):
        build([meta])


def test_padding_is_what_no_sample_fills() -> None:
    """Routers leave it out of their balance; filler sequences are padding as a whole."""
    batch = build([META_B, META_A], at_least=(3, 6))
    assert batch.padding_mask.tolist() == [[False] * 2 + [True] * 4, [False] * 5 + [True], [True] * 6]


def test_a_batch_is_padded_to_a_common_shape() -> None:
    """Ranks that gather each other's tokens need equally many; filler has no loss and counts for no sample."""
    batch = build([META_A], at_least=(3, 7), pad_to_multiple_of=4)
    assert batch.shape == (3, 8)
    assert batch.rows.sample_positions.tolist() == [0, -1, -1]
    assert not batch.rows.loss_mask[:, 1:].any()
    assert build([META_A], at_least=(1, 2)).shape == (1, 5)
