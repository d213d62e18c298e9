"""How members meet: strangers are refused in one line at once, the owner of the store decides, addresses are found."""

from __future__ import annotations

import dataclasses
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import psutil
import pytest
import torch
from torch.distributed import HashStore, PrefixStore, TCPStore

from mopd.weights.addresses import address_towards, interface_address
from mopd.weights.backends import open_gloo
from mopd.weights.group import GroupOrder, GroupStore, TransferFailed, TransferGroup, _prove
from mopd.weights.parts import TensorMeta
from mopd.weights.receiving import Receiver
from mopd.weights.signing import ForgedEntry
from mopd.weights.store import SignedStore
from tests.unit.weights.members import DEADLINE_S, LOOPBACK, assert_all_fail, order_of

FORGED = r"entry 'g/{}' is not signed with this run's secret"
JUNK = (b"", b"go", b"\x00" * 32 + b"go", b"\xff" * 500)


@pytest.fixture
def store() -> GroupStore:
    return GroupStore(LOOPBACK, DEADLINE_S)


def stranger(store: GroupStore) -> TCPStore:
    """Any process of this machine."""
    return TCPStore(LOOPBACK, store.port, is_master=False, timeout=timedelta(seconds=DEADLINE_S))


def fails(work: Callable[[], object], why: str) -> None:
    """In one line, whose reason is no deadline."""
    with pytest.raises(TransferFailed, match=why) as caught:
        work()
    assert "\n" not in str(caught.value)


def enters(store: GroupStore, order: GroupOrder, rank: int, pool: ThreadPoolExecutor) -> Future[TransferGroup]:
    """A member that has said that it is there, and waits for the others."""
    entering = pool.submit(TransferGroup, order, rank)
    store.store.wait([f"{order.group_id}/{rank}"], timedelta(seconds=DEADLINE_S))
    return entering


@pytest.mark.parametrize("junk", JUNK)
def test_a_verdict_of_a_stranger_lets_nobody_connect(store: GroupStore, junk: bytes) -> None:
    stranger(store).set("g/verdict", junk)  # type: ignore[arg-type]
    fails(lambda: TransferGroup(order_of(store), 1), FORGED.format("verdict"))


@pytest.mark.parametrize("junk", JUNK)
def test_a_member_that_a_stranger_announces_is_none(store: GroupStore, junk: bytes) -> None:
    order = order_of(store)
    stranger(store).set("g/1", junk)  # type: ignore[arg-type]
    with ThreadPoolExecutor(1) as pool:
        entering = enters(store, order, 0, pool)
        assert not store.decide(order)
        fails(lambda: entering.result(DEADLINE_S), FORGED.format("1"))


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
def test_gloo_connects_to_no_address_of_a_stranger(store: GroupStore, junk: bytes) -> None:
    """gloo's own entries: rank 1's addresses are somebody else's."""
    stranger(store).set("g/0/1", junk)  # type: ignore[arg-type]
    signed = SignedStore(store.store, "ours")
    with pytest.raises(ForgedEntry, match=FORGED.format("0/1")):
        open_gloo(PrefixStore("g", signed), 0, 2, DEADLINE_S, LOOPBACK)


@pytest.mark.parametrize("theirs", [("ours", "ours", "theirs"), ("theirs", "ours", "ours"), ("a", "b", "c")])
def test_who_is_connected_and_cannot_prove_the_secret_ends_the_group(
    store: GroupStore, theirs: tuple[str, ...]
) -> None:
    """As a stranger that took a member's place at another's port. Nobody goes on with who does not know it."""
    meeting = HashStore()

    def member(rank: int, secret: str) -> None:
        group = open_gloo(PrefixStore("g", meeting), rank, 3, DEADLINE_S, LOOPBACK)
        try:
            _prove(group, order_of(store, num_receivers=2, secret=secret), rank)
        finally:
            group.abort()

    with ThreadPoolExecutor(3) as pool:
        members = [pool.submit(member, rank, secret) for rank, secret in enumerate(theirs)]
        errors = [future.exception(DEADLINE_S) for future in members]
    assert all(isinstance(error, RuntimeError) for error in errors)
    assert any("does not know the group's secret" in str(error) for error in errors)


def test_a_missing_member_is_counted(store: GroupStore) -> None:
    order = order_of(store, num_receivers=3)
    with ThreadPoolExecutor(2) as pool:
        entering = [enters(store, order, rank, pool) for rank in (0, 2)]
        assert not store.decide(dataclasses.replace(order, timeout_s=0.1))
        for told in assert_all_fail(entering):
            assert told == f"not all of 4 processes met at {LOOPBACK}:{store.port}: 2 not within 0.1 s"


def test_a_meeting_that_is_given_up_ends_for_who_came(store: GroupStore) -> None:
    order, given_up = order_of(store), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        entering = enters(store, order, 1, pool)
        given_up.set()
        assert not store.decide(order, given_up)
        fails(lambda: entering.result(DEADLINE_S), "given up")
    fails(lambda: TransferGroup(order_of(store, group_id="h"), 1, given_up=given_up), "given up")  # by the member


def test_a_store_that_is_gone_is_one_line(store: GroupStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mopd.weights.group.CONNECT_S", 0.05)
    with socket.create_server((LOOPBACK, 0)) as free:
        port = free.getsockname()[1]
    fails(lambda: TransferGroup(order_of(store, port=port), 1), rf"not all of 2 processes met at {LOOPBACK}:{port}: ")


def test_the_store_listens_at_its_address_alone() -> None:
    store = GroupStore("127.0.0.2", DEADLINE_S)
    found = [one.laddr for one in psutil.Process().net_connections("tcp") if one.laddr and one.laddr.port == store.port]
    assert {address.ip for address in found} == {"127.0.0.2"}
    with pytest.raises(OSError, match="assign"):
        GroupStore("192.0.2.77", DEADLINE_S)


def test_an_address_is_that_of_the_way_there() -> None:
    assert address_towards("localhost", 9) == address_towards("127.0.0.5", 9) == LOOPBACK
    for addresses in psutil.net_if_addrs().values():
        for own in (one.address for one in addresses if one.family == socket.AF_INET):
            assert address_towards(own, 9) in (own, LOOPBACK)
    with pytest.raises(OSError, match="known"):
        address_towards("no-such-host.invalid", 9)


def test_an_interface_is_known_by_its_name() -> None:
    assert interface_address("lo") == LOOPBACK
    with pytest.raises(OSError, match=r"^weight_sync\.interface is 'nope0', .* no IPv4 .*: set it to one of .*\blo\b"):
        interface_address("nope0")


def test_an_interface_that_a_receiver_lacks_is_told_and_nobody_waits_for_it(store: GroupStore) -> None:
    order = order_of(store)
    with ThreadPoolExecutor(2) as pool:
        deciding = pool.submit(store.decide, order, given_up := threading.Event())
        entering = enters(store, order, 0, pool)
        fails(
            lambda: TransferGroup(dataclasses.replace(order, interface="nope0"), 1),
            rf"met at {LOOPBACK}:{store.port}: weight_sync\.interface is 'nope0', which has no IPv4",
        )
        given_up.set()  # as the orchestrator does, which hears of it
        assert not deciding.result(DEADLINE_S)
        fails(lambda: entering.result(DEADLINE_S), "given up")


def test_a_weight_of_nobody_is_one_line(store: GroupStore) -> None:
    with pytest.raises(ValueError, match=r"^a weight comes from a sender beyond the 1 of the group$"):
        Receiver(order_of(store), 1, [TensorMeta("a", torch.float32, (2, 3), 1)], keeps_views=True)


def test_a_secret_is_not_shown(store: GroupStore) -> None:
    assert "nobody reads this" not in repr(order_of(store, secret="nobody reads this"))
