"""Tensors over a real group of two members: where they lie, and that every bit arrives."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from mopd.base.types import NonFiniteError
from mopd.weights.buckets import TensorMeta, digest
from mopd.weights.group import GroupOrder, GroupStore, TransferFailed, TransferGroup
from mopd.weights.pieces import Expected, Segment, cut_pieces
from mopd.weights.receiving import BroadcastReceiver
from mopd.weights.sending import Sent, send

BUCKET = 3 * 2**20
DEADLINE_S = 600.0
Weights = dict[str, Tensor]


def make_weights(dtype: torch.dtype = torch.float32) -> Weights:
    """Large and small ones in turn, of odd sizes; one above a bucket."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "norm": (5,),
        "large": (3, 700_001),
        "a": (7, 3),
        "empty": (0, 4),
        "b": (1,),
        "q": (600, 1024),
        "end": (9,),
    }
    weights = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    return weights | {"steps": torch.tensor(7)}


def metas_of(weights: Weights) -> list[TensorMeta]:
    return [TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights.items()]


def exchange(
    weights: Weights,
    metas: list[TensorMeta],
    slots: Weights | None,
    *,
    spoil: Callable[[TransferGroup], None] = lambda group: None,
    **options: bool,
) -> tuple[Sent, Weights]:
    """What sending took, and what the receiver was given beside its slots. Verified, unless told."""
    options = {"verify": True, **options}
    store = GroupStore(DEADLINE_S)
    order = GroupOrder(
        group_id="g", port=store.port, world_size=2, bucket_bytes=BUCKET, timeout_s=DEADLINE_S, secret="s"
    )
    rest: Weights = {}

    def receive() -> None:
        receiver = BroadcastReceiver(
            order, 1, metas, keeps_views=slots is None, slots=slots or {}, device=torch.device("cpu")
        )
        for name, tensor in receiver.tensors(verify=options["verify"], patience_s=DEADLINE_S):
            rest[name] = tensor if slots is None else slots[name].copy_(tensor)
        receiver.close()

    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(receive)
        group = TransferGroup(order, 0, store)
        try:
            spoil(group)
            sent = send(group, metas, iter(weights.items()), bucket_bytes=BUCKET, **options)
            receiving.result(DEADLINE_S)
        finally:
            group.close()
            receiving.exception(DEADLINE_S)
    return sent, rest


def test_neighbours_that_are_small_share_a_bucket_and_large_ones_are_cut() -> None:
    weights = make_weights()
    parts = cut_pieces(metas_of(weights), BUCKET)
    names = [
        part.meta.name if isinstance(part, Segment) else [meta.name for meta in part.metas] for part in parts
    ]  # fmt: skip
    assert names == [["norm"], "large", "large", "large", ["a", "empty", "b"], "q", ["end", "steps"]]
    assert all(part.num_bytes <= BUCKET for part in parts)
    large = [part for part in parts if isinstance(part, Segment) and part.meta.name == "large"]
    assert torch.equal(torch.cat([part.of(weights["large"]) for part in large]), weights["large"].view(-1))
    assert [part.is_last for part in large] == [False, False, True]


def test_what_never_came_is_not_left_out() -> None:
    metas = metas_of(make_weights())
    expected = Expected(metas, lambda announced: cut_pieces(announced, BUCKET))
    with pytest.raises(TransferFailed, match="2 of 8 weights are left out, which never came"):
        expected.skip(2)
    assert expected.parts == cut_pieces(metas, BUCKET)
    expected.has_all = True
    expected.skip(2)
    assert expected.parts == cut_pieces(metas[2:], BUCKET)
    for count in (-1, len(metas), 2**40):
        with pytest.raises(TransferFailed):
            expected.skip(count)
    expected.skip(0)
    assert expected.parts == cut_pieces(metas, BUCKET)


@pytest.mark.parametrize("own_slots", [True, False])
def test_every_bit_arrives(own_slots: bool) -> None:
    weights = make_weights()
    slots = {name: torch.full_like(tensor, 3) for name, tensor in weights.items()} if own_slots else None
    sent, rest = exchange(weights, metas_of(weights), slots)
    got = rest if slots is None else slots
    assert got.keys() == weights.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in weights.items())
    assert sent.num_bytes >= sum(tensor.nbytes for tensor in weights.values())
    if own_slots:
        assert rest.keys() == {"norm", "a", "empty", "b", "end", "steps"}  # the others were written where they belong


def test_values_travel_in_the_smaller_dtype_and_end_in_the_slots() -> None:
    """From fp32 by bf16 into fp32, with slots that begin between two words and weights that are not contiguous."""
    weights = make_weights()
    weights["q"] = weights["q"].t().contiguous().t()
    metas = [
        TensorMeta(m.name, torch.bfloat16 if m.dtype == torch.float32 else m.dtype, m.shape) for m in metas_of(weights)
    ]
    slots = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    slots["large"] = torch.zeros(1 + weights["large"].numel(), dtype=torch.bfloat16)[1:].view(3, -1)
    exchange(weights, metas, slots)
    for name, tensor in weights.items():
        expected = tensor.bfloat16() if tensor.dtype == torch.float32 else tensor
        assert torch.equal(slots[name], expected.to(slots[name].dtype)), name


class Watched:
    """Wraps what a group sends; ``flip`` is the place of a buffer among them that is changed on its way."""

    def __init__(self, flip: int | None = None) -> None:
        self.addresses: list[int] = []
        self._flip = flip

    def __call__(self, group: TransferGroup) -> None:
        self._honest = group.broadcast
        group.broadcast = self._broadcast  # type: ignore[method-assign, assignment]

    def _broadcast(self, buffer: Tensor, **options: Any) -> Any:
        self.addresses.append(buffer.data_ptr())
        if len(self.addresses) - 1 == self._flip:
            buffer = buffer.clone()
            buffer[-1] ^= 8
        return self._honest(buffer, **options)


def test_a_large_tensor_leaves_from_its_own_memory() -> None:
    weights, watched = make_weights(), Watched()
    exchange(weights, metas_of(weights), None, spoil=watched)
    assert {weights["large"].data_ptr(), weights["q"].data_ptr()} <= set(watched.addresses)


@pytest.mark.parametrize("place", [1, 3, 5])
def test_a_flipped_bit_of_a_piece_is_seen(place: int) -> None:
    weights = make_weights()
    with pytest.raises(TransferFailed, match=f"part {place} of 7 changed on its way"):
        exchange(weights, metas_of(weights), None, spoil=Watched(place))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("options", [{}, {"checks_values": False}, {"verify": False}])
def test_what_is_no_number_does_not_leave(value: float, options: dict[str, bool]) -> None:
    weights = make_weights()
    weights["q"][-1, -1] = value
    watched = Watched()
    with pytest.raises(NonFiniteError, match="'q'"):
        exchange(weights, metas_of(weights), None, spoil=watched, **options)
    assert weights["q"].data_ptr() not in watched.addresses


def test_values_that_somebody_else_looks_at_are_not_read() -> None:
    weights = make_weights()
    weights["q"][-1, -1] = float("nan")
    _, got = exchange(weights, metas_of(weights), None, verify=False, checks_values=False)
    assert got["q"][-1, -1].isnan()


def test_a_sum_beyond_all_numbers_is_no_fault() -> None:
    weights = make_weights()
    weights["q"].fill_(3e38)
    _, got = exchange(weights, metas_of(weights), None)
    assert torch.equal(got["q"], weights["q"])


def test_digests_see_bits_places_and_lengths() -> None:
    data = torch.arange(4_000_003, dtype=torch.int64).view(torch.uint8)[: 8 * 4_000_000 + 5].clone()
    first = int(digest(data))
    for place in (0, 8 * 2**18 + 3, len(data) - 1):
        for bit in (1, 128):
            data[place] ^= bit
            assert int(digest(data)) != first, (place, bit)
            data[place] ^= bit
    words = data[:-5].view(torch.int64)
    words[[5, 3_000_000]] = words[[3_000_000, 5]]
    assert int(digest(data)) != first
    assert int(digest(torch.zeros(8, dtype=torch.uint8))) != int(digest(torch.zeros(16, dtype=torch.uint8))) != 0
    odd = torch.cat([torch.zeros(3, dtype=torch.uint8), data])[3:]
    assert int(digest(odd)) == int(digest(data))
