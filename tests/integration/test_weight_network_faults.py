"""What hinders weights between two networks: firewalls, a wrong interface, a server that stands still, a stranger. Each
is one line within the deadline, and ends a run that asks for the collective; others go on by HTTP."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from mopd.config.groups import TorchEngineConfig
from mopd.config.weights import CollectiveConfig
from mopd.engines.torch.engine import TorchEngine
from mopd.orchestrator.weights.transfer import CannotJoin, GroupTransfer
from mopd.weights.group import CONNECT_S, VERDICT_MARGIN_S, GroupStore
from tests.fixtures.linked import GroupSender
from tests.fixtures.networks import (
    called_within,
    can_make_networks,
    drop_all_but,
    drop_none,
    let_in,
    two_networks,
    within,
)
from tests.fixtures.servers import engine_file
from tests.integration.far_servers import TOKEN, FarServers, far_servers
from tests.integration.world import REPOSITORY, TIMEOUT_S, World, environment, read_metrics
from tests.parity.student.test_weights import IS_WHOLE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.multirank,
    pytest.mark.skipif(not can_make_networks(), reason="needs root, ip and iptables, to make networks"),
]
DEADLINE_S = 5.0
"""``weight_sync.timeout_s``."""
LONGEST_S = 2 * (max(DEADLINE_S, CONNECT_S) + VERDICT_MARGIN_S)
"""Of an update that nobody can join: two attempts."""
NUM_SERVERS = 2
ONLY_WHOLE = pytest.mark.skipif(not IS_WHOLE, reason="make weights")


@dataclass(frozen=True)
class Site:
    """A student's network, that of the servers, and both sides' weights."""

    near: str
    far: str
    servers: FarServers
    weights: dict[str, Tensor]


@pytest.fixture(scope="module")
def whole_site(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    model = world.student
    engine = TorchEngine.from_pretrained(model, TorchEngineConfig(dtype="float32"))
    weights = {name: slot.detach().clone() for name, slot in engine.weight_slots.items()}
    files = [engine_file(model, "rollout", replica=number) for number in range(NUM_SERVERS)]
    with two_networks() as (near, far), far_servers(far, tmp_path_factory.mktemp("servers"), files) as servers:
        yield Site(near, far, servers, weights)


@pytest.fixture
def site(whole_site: Site) -> Iterator[Site]:
    """Without firewalls before and after."""
    yield whole_site
    for network in (whole_site.near, whole_site.far):
        drop_none(network)


def sent(site: Site, action: Callable[[GroupSender], Awaitable[None]], **way: Any) -> float:
    """Seconds that the action took, in the student's network."""

    async def work() -> float:
        cfg = CollectiveConfig(**{"type": "collective", "bucket_mib": 1, "timeout_s": DEADLINE_S, **way})
        sender, began = GroupSender(site.servers.urls, site.weights, cfg, token=TOKEN), time.monotonic()
        try:
            await action(sender)
            return time.monotonic() - began
        finally:
            await sender.close()

    return called_within(site.near, lambda: asyncio.run(work()))


async def cannot_join(sender: GroupSender) -> None:
    with pytest.raises(CannotJoin) as caught:
        await sender.transfer.publish(1)
    line = str(caught.value)
    print(line)
    assert "\n" not in line and "weight_sync.interface" in line and "weight_sync.type: http" in line


def test_a_firewall_that_lets_http_alone_through(site: Site) -> None:
    drop_all_but(site.far, *site.servers.ports)
    drop_all_but(site.near)
    assert sent(site, cannot_join) < LONGEST_S


def test_a_firewall_that_lets_the_store_through(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """All meet, and cannot connect to one another."""
    drop_all_but(site.far, *site.servers.ports)
    drop_all_but(site.near)
    opened = GroupTransfer._open_store

    def open_store(self: GroupTransfer, timeout_s: float) -> GroupStore:
        store = opened(self, timeout_s)
        let_in(site.near, store.port)
        return store

    monkeypatch.setattr(GroupTransfer, "_open_store", open_store)
    assert sent(site, cannot_join) < LONGEST_S


def test_a_server_that_stands_still_costs_one_deadline(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    still = site.servers.living["rollout.1"]

    async def without_it(sender: GroupSender) -> None:
        still.send_signal(signal.SIGSTOP)
        try:
            began = time.monotonic()
            await sender.transfer.publish(1)
            assert time.monotonic() - began < 2 * DEADLINE_S
            assert sender.versions == [1, -1]
        finally:
            still.send_signal(signal.SIGCONT)
        assert caplog.text.count("rollout replica r1") == 1 and "r0" not in caplog.text
        await sender.targets.hear()
        await sender.transfer.publish(2)
        assert sender.versions == [2, 2]

    sent(site, without_it)


def trained(site: Site, world: World, run_dir: Path, **weight_sync: Any) -> subprocess.CompletedProcess[str]:
    """A run of three steps in the student's network."""
    external = {"type": "external", "urls": site.servers.urls, "token_file": str(site.servers.token_file)}
    recipe = world.write_recipe(
        run_dir,
        student__parallel={},
        rollout__placement=external,
        schedule__steps=3,
        validation=None,
        rewards={},
        weight_sync=weight_sync,
    )
    command = [*within(site.near), sys.executable, "-m", "mopd", "train", str(recipe)]
    return subprocess.run(
        command, cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


@pytest.fixture
def walled(site: Site) -> Site:
    drop_all_but(site.far, *site.servers.ports)
    drop_all_but(site.near)
    return site


@ONLY_WHOLE
def test_a_run_that_asks_for_the_collective_ends_in_one_line(walled: Site, world: World, tmp_path: Path) -> None:
    done = trained(walled, world, tmp_path / "run", type="collective", timeout_s=DEADLINE_S)
    print(done.stderr)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("mopd: error:")]
    assert len(errors) == 1 and "let all ports through between the machines" in errors[0]


@ONLY_WHOLE
@pytest.mark.long
def test_a_run_by_http_trains_as_one_by_a_group(site: Site, world: World, tmp_path: Path) -> None:
    """Without a firewall the weights go by a group; behind one, in a run that leaves the way to mopd, by HTTP from the
    first update on. Losses and rewards are the same to the last bit."""
    grouped = trained(site, world, tmp_path / "group", type="collective", timeout_s=DEADLINE_S)
    assert grouped.returncode == 0, grouped.stderr
    drop_all_but(site.far, *site.servers.ports)
    drop_all_but(site.near)
    done = trained(site, world, tmp_path / "http", type="auto")
    print(done.stderr)
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert done.stderr.count("the weights go by HTTP") == 1
    written = [(tmp_path / way / "metrics.jsonl").read_text(encoding="utf-8") for way in ("group", "http")]
    assert ["timing/weights_send_s" in text for text in written] == [True, False]
    by_group, by_http = (without_traffic(tmp_path / way) for way in ("group", "http"))
    assert len(by_http) == 3 and by_http == by_group


def without_traffic(run_dir: Path) -> list[dict[str, float]]:
    """``read_metrics`` without the bytes of HTTP to the rollout, of which weights are some or none."""
    lines = read_metrics(run_dir)
    return [{name: v for name, v in line.items() if not name.startswith("rollout/payload_bytes")} for line in lines]
