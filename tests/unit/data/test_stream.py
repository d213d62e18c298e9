"""The prompt stream: the same prompts whatever the batch size, in the asked proportions, and restored exactly."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from mopd.base.types import Prompt, UserError
from mopd.data.prompts import PromptDataset, PromptRow
from mopd.data.stream import PromptStream, headroom_shares


def dataset(**counts: int) -> PromptDataset:
    rows = [
        PromptRow(domain=d, text="", tokens=(i + 1,), ground_truth=None, extra_info=None, place="")
        for d, n in counts.items()
        for i in range(n)
    ]
    return PromptDataset(rows)


DATA = dataset(math=7, code=3, law=20)


def take(stream: PromptStream, *sizes: int) -> list[Prompt]:
    return [prompt for size in sizes for prompt in stream.next(size)]


def test_batch_size_changes_nothing() -> None:
    whole = take(PromptStream(DATA.rows_by_domain, {}, 5), 60)
    assert take(PromptStream(DATA.rows_by_domain, {}, 5), *[1] * 10, 0, 17, 3, 30) == whole
    assert [prompt.sample_id for prompt in whole] == list(range(60))
    assert all(prompt.domain == DATA.row(prompt.row).domain for prompt in whole)
    assert take(PromptStream(DATA.rows_by_domain, {}, 6), 60) != whole


def test_each_epoch_of_a_domain_is_a_new_shuffle_of_all_its_rows() -> None:
    prompts = take(PromptStream(DATA.rows_by_domain, {"math": 1, "code": 1, "law": 1}, 3), 120)
    for domain, rows in DATA.rows_by_domain.items():
        drawn = [p.row for p in prompts if p.domain == domain]
        epochs = [drawn[i : i + len(rows)] for i in range(0, len(drawn) - len(rows) + 1, len(rows))]
        assert len(epochs) >= 2 and all(sorted(epoch) == rows for epoch in epochs)
        assert len(set(map(tuple, epochs))) > 1


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ({}, {"math": 7 / 30, "code": 3 / 30, "law": 20 / 30}),
        ({"math": 1, "code": 1, "law": 1}, {"math": 1 / 3, "code": 1 / 3, "law": 1 / 3}),
        ({"math": 0.7, "code": 0.2, "law": 0.1}, {"math": 0.7, "code": 0.2, "law": 0.1}),
    ],
)
def test_any_stretch_has_the_asked_shares(weights: dict[str, float], shares: dict[str, float]) -> None:
    prompts = take(PromptStream(DATA.rows_by_domain, weights, 9), 3000)
    for start in (0, 17, 1234):
        counts = Counter(p.domain for p in prompts[start : start + 600])
        for domain, share in shares.items():
            assert abs(counts[domain] - 600 * share) <= 2
    if len(set(weights.values())) == 1:  # equal shares: the order inside a round is chance
        assert len({tuple(p.domain for p in prompts[i : i + 3]) for i in range(0, 300, 3)}) == 6


def test_restored_stream_continues_exactly() -> None:
    stream = PromptStream(DATA.rows_by_domain, {"math": 2, "code": 1, "law": 1}, 4)
    stream.next(37)
    state = json.loads(json.dumps(stream.state_dict()))
    expected = stream.next(50)
    restored = PromptStream(DATA.rows_by_domain, {"math": 2, "code": 1, "law": 1}, 4)
    restored.load_state_dict(state)
    assert restored.state_dict()["position"] == 37
    assert restored.next(50) == expected


def test_a_prompt_out_of_turn_is_the_domains_next_and_leaves_the_shares_alone() -> None:
    stream = PromptStream(DATA.rows_by_domain, {"math": 1, "code": 1, "law": 1}, 4)
    before = stream.next(30)
    twin = PromptStream(DATA.rows_by_domain, {"math": 1, "code": 1, "law": 1}, 4)
    twin.next(30)
    expected = next(prompt for prompt in twin.next(30) if prompt.domain == "code")
    extra = [stream.next_of("code") for _ in range(4)]
    assert extra[0].row == expected.row
    assert [prompt.sample_id for prompt in extra] == [30, 31, 32, 33]
    state = stream.state_dict()
    after = stream.next(60)
    assert Counter(prompt.domain for prompt in before + after) == {"math": 30, "code": 30, "law": 30}
    assert Counter(prompt.domain for prompt in after[:3]) == {"math": 1, "code": 1, "law": 1}
    restored = PromptStream(DATA.rows_by_domain, {"math": 1, "code": 1, "law": 1}, 4)
    restored.load_state_dict(state)
    assert restored.next(60) == after


LATER = {"math": 0.8, "code": 0.1, "law": 0.1}


def reweighed(start: int = 60) -> PromptStream:
    stream = PromptStream(DATA.rows_by_domain, {"math": 0.1, "code": 0.1, "law": 0.8}, 4)
    stream.reweigh(start, LATER)
    return stream


def test_shares_change_at_their_prompt_and_nothing_is_caught_up() -> None:
    stream, kept = reweighed(), PromptStream(DATA.rows_by_domain, {"math": 0.1, "code": 0.1, "law": 0.8}, 4)
    prompts = take(stream, *[7] * 23)
    assert prompts[:60] == kept.next(60)
    for part, shares in ((prompts[60:80], LATER), (prompts[60:160], LATER)):
        counts = Counter(p.domain for p in part)
        assert all(abs(counts[domain] - share * len(part)) <= 2 for domain, share in shares.items())
    assert take(reweighed(), 161) == prompts
    assert stream.shares(59)["law"] == 0.8 and stream.shares(60) == LATER


@pytest.mark.parametrize("position", [0, 59, 60, 61, 100])
def test_a_stream_with_changed_shares_is_restored_exactly(position: int) -> None:
    """Also where one of its prompts was replaced, which counts in no share."""
    stream = reweighed()
    stream.next(position)
    stream.next_of("code")
    state = json.loads(json.dumps(stream.state_dict()))
    restored = reweighed()
    restored.load_state_dict(state)
    assert restored.next(80) == stream.next(80)
    if position > 61:
        other = reweighed(61)
        with pytest.raises(UserError, match=r"changed its shares at prompt 60, by validation.jsonl at 61: restore"):
            other.load_state_dict(state)
    for before in ({"math": 3}, {"math": 0, "code": 0, "law": 10**9}, [], {"math": 1, "code": 0, "law": 0}):
        with pytest.raises(UserError, match="the checkpoint's prompt stream"):
            reweighed().load_state_dict(state | {"before": before})


def test_shares_come_before_the_prompts_that_are_drawn_by_them() -> None:
    stream = reweighed()
    stream.next(70)
    for start in (69, 59):
        with pytest.raises(ValueError, match=f"shares from prompt {start} on come too late"):
            stream.reweigh(start, LATER)
    stream.reweigh(70, {"math": 0.0, "code": 0.0, "law": 1.0})
    assert {prompt.domain for prompt in stream.next(20)} == {"law"}


@pytest.mark.parametrize(
    ("student", "floor", "shares"),
    [
        ({"math": 0.2, "code": 0.8}, 0.2, {"math": 0.1 + 0.8 * 0.75, "code": 0.1 + 0.8 * 0.25}),
        ({"math": 0.2, "code": 1.3}, 0.2, {"math": 0.9, "code": 0.1}),  # code is better than its teacher
        ({"math": 1.0, "code": 1.0}, 0.2, {"math": 0.5, "code": 0.5}),
        ({"math": 0.0, "code": 1.0}, 1.0, {"math": 0.5, "code": 0.5}),
    ],
)
def test_prompts_go_where_headroom_is_left(student: dict[str, float], floor: float, shares: dict[str, float]) -> None:
    assert headroom_shares(student, {"math": 0.8, "code": 1.0}, floor=floor) == pytest.approx(shares)


def test_position_in_other_data_is_refused() -> None:
    state = PromptStream(DATA.rows_by_domain, {}, 4).state_dict()
    with pytest.raises(UserError, match="seed 4, this recipe gives 5"):
        PromptStream(DATA.rows_by_domain, {}, 5).load_state_dict(state)
    with pytest.raises(UserError, match=r"num_rows .*'math': 7.* gives .*'math': 8"):
        PromptStream(dataset(math=8, code=3, law=20).rows_by_domain, {}, 4).load_state_dict(state)
    with pytest.raises(UserError, match="shares"):
        PromptStream(DATA.rows_by_domain, {"math": 1, "code": 1, "law": 1}, 4).load_state_dict(state)


@pytest.mark.parametrize(
    "change",
    [
        {"position": -1}, {"position": "7"}, {"position": None}, {"position": 6}, {"position": 7.0}, {"drawn": {}},
        {"drawn": None}, {"drawn": {"math": 7}}, {"drawn": {"math": 9, "code": 1, "law": -3}},
        {"drawn": {"math": 2.0, "code": 1, "law": 4}}, {"replaced": [0, 0, 0]}, {"replaced": {"math": True}},
        {"replaced": {"math": 99, "code": 0, "law": 0}}, {"seed": None}, {"num_rows": {"math": 10**18}}, {"shares": []},
    ],
)  # fmt: skip
def test_a_damaged_position_is_refused(change: dict[str, Any]) -> None:
    stream = PromptStream(DATA.rows_by_domain, {}, 4)
    stream.next(7)
    state = stream.state_dict()
    PromptStream(DATA.rows_by_domain, {}, 4).load_state_dict(state)
    for damaged in (state | change, {name: value for name, value in state.items() if name not in change}):
        with pytest.raises(UserError, match="the checkpoint's prompt stream"):
            stream.load_state_dict(damaged)
    assert stream.state_dict()["position"] == 7


def test_weights_name_every_domain_or_none() -> None:
    with pytest.raises(
        UserError, match=r"data.domain_weights names \['math'\], the data has \['code', 'law', 'math'\]"
    ):
        PromptStream(DATA.rows_by_domain, {"math": 1.0}, 0)
