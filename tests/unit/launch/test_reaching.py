"""Ranks of two nodes that do not reach one another, though their launchers have met: one line, and soon."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from mopd.base.hardware import NODE_NAME
from mopd.launch import reaching
from mopd.launch.reaching import CURE, told_to_reach
from tests.fixtures.networks import ADDRESSES, NETWORK, can_make_networks, two_networks
from tests.unit.launch import launchers

PORT = 29_531
DEADLINE_S = 150.0


def launched(folder: Path, networks: list[str], behaviour: str = "reach") -> list[tuple[int, str]]:
    """Exit code and errors of two nodes of one rank each."""
    started = []
    for node, network in enumerate(networks):
        command = [str(launchers.HERE / "launch_script.py"), f"1,2,{node},{PORT},{ADDRESSES[0]}"]
        variables = {"GLOO_SOCKET_IFNAME": network, NETWORK: network, NODE_NAME: f"node-{node}"}
        started.append(launchers.start(behaviour, folder, command, **variables))
    try:
        return [launchers.ended(process) for process in started]
    finally:
        for process in started:
            process.kill()


@pytest.mark.multirank
@pytest.mark.skipif(not can_make_networks(), reason="no network namespaces or no iptables here")
def test_a_firewall_between_the_nodes_is_told_with_its_cure(tmp_path: Path) -> None:
    with two_networks(open_port=PORT) as networks:
        (code, errors), (other_code, other_errors) = launched(tmp_path, networks, "reach_nobody")
    line = f"the ranks of this node do not reach all others by gloo (Connect timeout): {CURE}\n"
    assert (code, other_code) == (2, 2)
    assert errors.endswith(line) and other_errors.endswith(line)
    assert "Traceback" not in errors + other_errors


@pytest.mark.multirank
@pytest.mark.skipif(not can_make_networks(), reason="no network namespaces or no iptables here")
def test_nodes_without_a_firewall_reach_one_another(tmp_path: Path) -> None:
    with two_networks() as networks:
        assert [code for code, _ in launched(tmp_path, networks)] == [0, 0]


def test_other_errors_are_left_alone() -> None:
    with pytest.raises(RuntimeError, match="another"), told_to_reach():
        raise RuntimeError("another")


def test_a_fast_node_keeps_its_connections_until_all_have_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other node, which this test is, has connected and not said so yet: closed connections would end its start."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    own = TCPStore("127.0.0.1", store.port, is_master=False)
    monkeypatch.setattr(reaching, "agent_store", lambda prefix: own)
    places = "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 GROUP_RANK=0 GROUP_WORLD_SIZE=2 GLOO_SOCKET_IFNAME=lo"
    for place in places.split():
        monkeypatch.setenv(*place.split("="))
    fast = threading.Thread(target=reaching.check_reach, args=(DEADLINE_S,), daemon=True)
    fast.start()
    store.add("here", 1)
    store.set("all here", "")
    slow = ProcessGroupGloo(PrefixStore("gloo", store), 1, 2, timedelta(seconds=DEADLINE_S))
    fast.join(1.0)
    assert fast.is_alive()
    store.add("connected", 1)
    store.set("all connected", "")
    fast.join(DEADLINE_S)
    assert not fast.is_alive()
    del slow
