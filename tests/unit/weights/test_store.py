"""What strangers write into a group's store, which asks nobody for a password: refused in one line, at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore

from mopd.weights.backends import open_gloo
from mopd.weights.group import GroupOrder, GroupStore, TransferFailed, TransferGroup, _prove
from mopd.weights.signing import ForgedEntry
from mopd.weights.stages import SenderSignals
from mopd.weights.store import SignedStore

DEADLINE_S = 30.0
FORGED = r"entry 'g/{}' is not signed with this run's secret"
JUNK = (b"", b"go", b"\x00" * 32 + b"go", b"\xff" * 500)


def order_of(store: GroupStore, world_size: int = 2, secret: str = "ours") -> GroupOrder:
    return GroupOrder(
        group_id="g", port=store.port, world_size=world_size, bucket_bytes=1, timeout_s=DEADLINE_S, secret=secret
    )


def stranger(store: GroupStore) -> TCPStore:
    """Any process of this machine."""
    return TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=DEADLINE_S))


def fails(work: Callable[[], object], why: str) -> None:
    """In one line, whose reason is no deadline."""
    with pytest.raises(TransferFailed, match=why) as caught:
        work()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("junk", JUNK)
def test_a_verdict_of_a_stranger_lets_nobody_connect(junk: bytes) -> None:
    store = GroupStore(DEADLINE_S)
    stranger(store).set("g/verdict", junk)  # type: ignore[arg-type]
    fails(lambda: TransferGroup(order_of(store), 1), FORGED.format("verdict"))


@pytest.mark.parametrize("junk", JUNK)
def test_a_member_that_a_stranger_announces_is_none(junk: bytes) -> None:
    store = GroupStore(DEADLINE_S)
    stranger(store).set("g/1", junk)  # type: ignore[arg-type]
    fails(lambda: TransferGroup(order_of(store), 0, store), FORGED.format("1"))


def test_what_was_signed_for_another_key_or_with_another_secret_is_forged() -> None:
    inner = HashStore()
    ours = SignedStore(inner, "ours")
    ours.set("g/1", "go")
    assert ours.get("g/1") == b"go"
    inner.set("g/verdict", inner.get("g/1"))
    with pytest.raises(ForgedEntry):
        ours.get("g/verdict")
    with pytest.raises(ForgedEntry):
        SignedStore(inner, "theirs").get("g/1")


@pytest.mark.parametrize("junk", JUNK)
def test_gloo_connects_to_no_address_of_a_stranger(junk: bytes) -> None:
    """gloo's own entries: rank 1's addresses are somebody else's."""
    store = GroupStore(DEADLINE_S)
    stranger(store).set("g/0/1", junk)  # type: ignore[arg-type]
    signed = SignedStore(store.store, "ours")
    with pytest.raises(ForgedEntry, match=FORGED.format("0/1")):
        open_gloo(PrefixStore("g", signed), 0, 2, DEADLINE_S)


@pytest.mark.parametrize("theirs", [("ours", "ours", "theirs"), ("theirs", "ours", "ours"), ("a", "b", "c")])
def test_who_is_connected_and_cannot_prove_the_secret_ends_the_group(theirs: tuple[str, ...]) -> None:
    """As a stranger that took a member's place at another's port. Nobody goes on with who does not know it."""
    meeting, store = HashStore(), GroupStore(DEADLINE_S)

    def member(rank: int, secret: str) -> None:
        group = open_gloo(PrefixStore("g", meeting), rank, 3, DEADLINE_S)
        try:
            _prove(group, order_of(store, 3, secret), rank)
        finally:
            group.abort()

    with ThreadPoolExecutor(3) as pool:
        members: list[Future[None]] = [pool.submit(member, rank, secret) for rank, secret in enumerate(theirs)]
        errors = [future.exception(DEADLINE_S) for future in members]
    assert all(isinstance(error, RuntimeError) for error in errors)
    assert any("does not know the group's secret" in str(error) for error in errors)


def test_members_that_know_it_meet() -> None:
    store = GroupStore(DEADLINE_S)
    order = order_of(store, 3)
    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(TransferGroup, order, rank) for rank in (1, 2)]
        groups = [TransferGroup(order, 0, store), *(other.result(DEADLINE_S) for other in others)]
        told = [pool.submit(group.tell, 0) for group in groups[1:]]
        assert groups[0].tell(7) == 7 and [value.result(DEADLINE_S) for value in told] == [7, 7]
    for group in groups:
        group.close()


@pytest.mark.parametrize("junk", JUNK)
def test_a_word_of_a_stranger_is_no_turn(junk: bytes) -> None:
    store = GroupStore(DEADLINE_S)
    words = SenderSignals(order_of(store), store)
    for word in ("1.1", "off"):
        stranger(store).set(f"g.words/{word}", junk)  # type: ignore[arg-type]
    fails(lambda: words.wait(1, 1, DEADLINE_S), r"entry 'g\.words/1\.1' is not signed")
    fails(words.is_set, r"entry 'g\.words/off' is not signed")


def test_a_secret_is_not_shown() -> None:
    store = GroupStore(DEADLINE_S)
    order = dataclasses.replace(order_of(store), secret="nobody reads this")
    assert "nobody reads this" not in repr(order)
