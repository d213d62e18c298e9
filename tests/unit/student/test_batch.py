from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mopd.base.types import SampleMeta
from mopd.data.packing import PackingRules
from mopd.student.batch import MicroBatch, build_micro_batch
from tests.fixtures.samples import meta_of

META_A = meta_of(7, prompt=2, response=3, num_loss_tokens=2)
META_B = meta_of(9, "code", response=1)
FIELDS = {
    "tokens": {7: torch.tensor([1, 5, 7, 8, 2]), 9: torch.tensor([4, 6])},
    "loss_mask": {7: torch.tensor([True, False, True]), 9: torch.tensor([True])},
    "teacher_ids": {7: torch.tensor([[3, 4], [5, 6], [7, 8]]).int(), 9: torch.tensor([[1, 2]]).int()},
    "teacher_token_logprobs": {7: torch.tensor([-1.0, -2.0, -3.0]), 9: torch.tensor([-4.0])},
}
PACKS = PackingRules(is_packed=True, max_tokens=64, micro_batch_size=None, square_cost=0.0)
RECTANGLES = replace(PACKS, is_packed=False)


def build(
    samples: list[SampleMeta],
    fields: dict = FIELDS,
    rules: PackingRules = RECTANGLES,
    at_least: tuple[int, int] = (1, 1),
) -> MicroBatch:
    return build_micro_batch(
        samples,
        fields,
        rules=rules,
        domains=("math", "code"),
        positions={7: 0, 9: 1},
        device=torch.device("cpu"),
        at_least=at_least,
    )


@pytest.mark.parametrize("rules", [PACKS, RECTANGLES])
def test_rows_of_loss_tokens_alone_stand_where_they_would_stand_among_all(rules: PackingRules) -> None:
    whole = build([META_A, META_B], rules=rules)
    mask = FIELDS["loss_mask"][7]
    few = {**FIELDS, "teacher_ids": {**FIELDS["teacher_ids"], 7: FIELDS["teacher_ids"][7][mask]}}
    rows, all_rows = build([META_A, META_B], few, rules).rows, whole.rows
    assert rows.fields["teacher_ids"][rows.loss_mask].equal(all_rows.fields["teacher_ids"][all_rows.loss_mask])
    assert (rows.fields["teacher_ids"][~rows.loss_mask] == 0).all()
    wrong = {**few, "teacher_ids": {**few["teacher_ids"], 7: few["teacher_ids"][7][:1]}}
    with pytest.raises(ValueError, match="field 'teacher_ids' has 1 entries"):
        build([META_A, META_B], wrong, rules)


def test_rows_score_the_next_token() -> None:
    batch = build([META_A, META_B], rules=replace(RECTANGLES, sequence_multiple=4))
    assert batch.shape == (2, 8) and batch.packed is None
    assert batch.tokens.tolist() == [[1, 5, 7, 8, 2, 0, 0, 0], [4, 6, 0, 0, 0, 0, 0, 0]]
    assert batch.position_ids.tolist() == [list(range(8))] * 2
    rows = batch.rows
    assert rows.targets[0::2].tolist() == [0, 7, 8, 2, 0, 0, 0, 0]
    assert rows.loss_mask[0::2].tolist() == [False, True, False, True, False, False, False, False]
    assert rows.targets[1::2].tolist() == [6, 0, 0, 0, 0, 0, 0, 0]
    assert rows.loss_mask[1::2].tolist() == [True] + [False] * 7
    assert rows.loss_rows is not None and rows.loss_rows.tolist() == [1, 2, 6]
    assert rows.fields["teacher_ids"][2:8:2].tolist() == [[3, 4], [5, 6], [7, 8]]
    assert rows.fields["teacher_ids"].shape == (16, 2)
    assert rows.fields["teacher_token_logprobs"][:2].tolist() == [0.0, -4.0]
    assert rows.samples.tolist() == [0, 1] * 8
    assert rows.domains.tolist() == [0, 1]
    assert rows.sample_positions.tolist() == [0, 1]
    assert rows.num_loss_tokens.tolist() == [2, 1]


def test_sequences_of_a_pack_stand_end_to_end() -> None:
    """Positions begin anew with each, which no loss would tell: a rope is relative."""
    batch = build([META_A, META_B], rules=PACKS)
    assert batch.shape == (1, 7) and batch.packed is not None
    assert batch.packed.lengths == (5, 2) and batch.packed.cu_seqlens.tolist() == [0, 5, 7]
    assert batch.tokens.tolist() == [[1, 5, 7, 8, 2, 4, 6]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1]]
    assert not batch.padding_mask.any()
    rows = batch.rows
    assert rows.targets.tolist() == [0, 7, 8, 2, 0, 6, 0]
    assert rows.loss_mask.tolist() == [False, True, False, True, False, True, False]
    assert rows.loss_rows is not None and rows.loss_rows.tolist() == [1, 3, 5]
    assert rows.fields["teacher_ids"][[1, 2, 3, 5]].tolist() == [[3, 4], [5, 6], [7, 8], [1, 2]]
    assert rows.fields["teacher_token_logprobs"].tolist() == [0.0, -1.0, -2.0, -3.0, 0.0, -4.0, 0.0]
    assert rows.samples.tolist() == [0] * 5 + [1] * 2
    assert (rows.domains.tolist(), rows.sample_positions.tolist()) == ([0, 1], [0, 1])
    assert rows.num_loss_tokens.tolist() == [2, 1]


def test_a_pack_is_padded_as_its_layout_needs() -> None:
    """Each sequence to a multiple of its own, the whole by a sequence of filler, which is no sample's."""
    batch = build([META_A, META_B], rules=replace(PACKS, sequence_multiple=4, total_multiple=16))
    assert batch.packed is not None and batch.packed.lengths == (8, 4, 4)
    assert batch.tokens.tolist() == [[1, 5, 7, 8, 2, 0, 0, 0, 4, 6, 0, 0, 0, 0, 0, 0]]
    assert batch.position_ids.tolist() == [[*range(8), *range(4), *range(4)]]
    assert batch.padding_mask.tolist() == [[False] * 5 + [True] * 3 + [False] * 2 + [True] * 6]
    assert batch.rows.samples.tolist() == [0] * 8 + [1] * 4 + [2] * 4
    assert batch.rows.sample_positions.tolist() == [0, 1, -1]
    assert batch.rows.num_loss_tokens.tolist() == [2, 1, 0]
    assert batch.rows.targets.nonzero().flatten().tolist() == [1, 2, 3, 8]


@pytest.mark.parametrize("rules", [PACKS, RECTANGLES], ids=["pack", "rectangle"])
def test_no_samples_give_filler_without_loss(rules: PackingRules) -> None:
    batch = build([], rules=replace(rules, sequence_multiple=2, total_multiple=2))
    assert batch.shape == (1, 2)
    assert not batch.rows.loss_mask.any() and batch.padding_mask.all()
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
    batch = build([META_A], at_least=(3, 7), rules=replace(RECTANGLES, sequence_multiple=4))
    assert batch.shape == (3, 8)
    assert batch.rows.sample_positions.tolist() == [0, -1, -1]
    assert not batch.rows.loss_mask.view(8, 3)[:, 1:].any()
    assert build([META_A], at_least=(1, 2)).shape == (1, 5)
    pack = build([META_A], at_least=(1, 9), rules=PACKS)
    assert pack.packed is not None and pack.packed.lengths == (5, 4)
    assert pack.rows.sample_positions.tolist() == [0, -1]
    assert build([META_A], at_least=(1, 2), rules=PACKS).shape == (1, 5)
