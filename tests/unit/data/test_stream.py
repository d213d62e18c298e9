"""The prompt stream: the same prompts whatever the batch size, in the asked proportions, and restored exactly."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from mopd.base.types import Prompt, UserError
from mopd.data.prompts import PromptDataset, PromptRow
from mopd.data.stream import PromptStream


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
