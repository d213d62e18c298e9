"""The messages of a process group over which weights come: whoever sends them wrongly, twice, late or out of order is
refused, and the server goes on with the weights that it has."""

from __future__ import annotations

import dataclasses
import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mopd.config.groups import TorchEngineConfig
from mopd.engines.clients.remote import RemoteEngine
from mopd.engines.torch.engine import TorchEngine
from mopd.engines.wire.messages import Message, decode, encode
from mopd.engines.wire.weights import WeightFinish, WeightJoin, WeightPart, WeightReceived, WeightStart
from mopd.serving import updates
from mopd.serving.updates import MAX_JOIN_BYTES
from mopd.weights import group as transfer_group
from mopd.weights.carrying import TravellingParts
from mopd.weights.group import GroupOrder, GroupStore, TransferGroup
from mopd.weights.parts import TensorMeta, to_json
from mopd.weights.sending import send
from tests.fixtures.servers import RunningServer, running_server, wait_until
from tests.fixtures.updates import load
from tests.unit.serving.test_limits import TOKEN, post
from tests.unit.serving.test_updates import Weights, assert_serves, run

FUZZ = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
INT64 = st.integers(-(2**63), 2**63 - 1)
SMALL = st.integers(-1, 4)
SECONDS = st.sampled_from([0.0, -1.0, 1e-9, 0.2, 86400.0, float("nan"), float("inf")])
TEXT = st.sampled_from(["", "g", "G" * 64, "G" * 65, "\x00", "../..", "é" * 40])
LISTS = st.sampled_from([b"", b"{}", b"[]", b"[[]]", b"[" * 5000, b'[["a", "float32", [9], 0]]',
                         b'[["a", "Tensor", [], 0]]', b'[["a", "float32", [9], -1]]', b"\xff", b"NaN", b"[1]" * 99,
                         b'[["model.norm.weight", "float32", [1e3], 0]]'])  # fmt: skip
MEMORY = st.sampled_from(["", "[]", "{}", "[" * 3000, "x" * 70_000, '[{"gpu": "x"}]',
                          '[{"pid": 1, "descriptor": 0, "num_bytes": 9}]',
                          '[{"pid": -1, "descriptor": "../../1/fd/3", "num_bytes": 9e99}]'])  # fmt: skip
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(("group_id", "secret", "interface"), TEXT),
    "host": TEXT | st.sampled_from(["127.0.0.1", "[", "256.1.1.1", "::1", "x" * 257]),
    **dict.fromkeys(("first_rank", "num_senders", "num_receivers", "bucket_bytes", "large_bytes"), SMALL | INT64),
    "port": INT64 | st.sampled_from([0, 1, 65535, 65536]),
    "memory": MEMORY,
    "timeout_s": SECONDS.filter(lambda seconds: not 1 < seconds < float("inf")),
}
PATHS = tuple(f"/v1/weights/{step}" for step in ("join", "part", "start", "finish"))
SECRET = "s" * 16
DEADLINE_S = 600.0
POOL = ThreadPoolExecutor(4)


@pytest.fixture(scope="module")
def rollout(folder: Path) -> Iterator[RunningServer]:
    with running_server(TorchEngine.empty(folder, TorchEngineConfig(dtype="float32")), "rollout") as running:
        yield running


def metas_of(weights: Weights) -> list[TensorMeta]:
    return [TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights.items()]


def join(tensors: bytes, **changes: Any) -> WeightJoin:
    fields: dict[str, Any] = {"group_id": "g", "host": "127.0.0.1", "port": 9, "first_rank": 1, "memory": ""}
    fields |= {"num_senders": 1, "num_receivers": 1, "bucket_bytes": 2**20, "large_bytes": 2**16}
    fields |= {"timeout_s": 0.2, "secret": SECRET}
    return WeightJoin(**{**fields, **changes}, tensors=np.frombuffer(tensors, dtype=np.uint8))


def start(**changes: Any) -> WeightStart:
    fields = {"group_id": "g", "weight_version": 9, "verify": True, "on_running": "finish", "patience_s": DEADLINE_S}
    return WeightStart(**{**fields, **changes})


def finish(**changes: Any) -> WeightFinish:
    return WeightFinish(**{"group_id": "g", "weight_version": 9, **changes})


def ask(running: RunningServer, step: str, message: Message) -> httpx.Response:
    return post(running, f"/v1/weights/{step}", encode(message))


def serves(running: RunningServer, local: TorchEngine, version: int) -> None:
    async def look(remote: RemoteEngine) -> None:
        remote.allow(version)
        await assert_serves(remote, local, version)

    run(running, look)


class Rank0:
    """Of a group with one server, in this process."""

    def __init__(self, weights: Weights, *, num_receivers: int = 1, group_id: str = "g") -> None:
        self.weights, self.metas, self.store = weights, metas_of(weights), GroupStore("127.0.0.1", DEADLINE_S)
        self.order = GroupOrder(
            group_id=group_id,
            host=self.store.host,
            port=self.store.port,
            num_senders=1,
            num_receivers=num_receivers,
            bucket_bytes=2**20,
            large_bytes=2**16,
            timeout_s=DEADLINE_S,
            secret=SECRET,
        )

    def join(self, **changes: Any) -> WeightJoin:
        return join(to_json(self.metas), **dataclasses.asdict(self.order) | changes)

    def meet(self, running: RunningServer) -> TransferGroup:
        asking = POOL.submit(ask, running, "join", self.join())
        deciding = POOL.submit(self.store.decide, self.order)
        group = TransferGroup(self.order, 0)
        assert deciding.result()
        assert asking.result().status_code == 200, asking.result().text
        return group

    def send(self, group: TransferGroup) -> None:
        send(TravellingParts(group), self.metas, self.weights.items(), verify=True)

    def update(self, running: RunningServer, group: TransferGroup) -> None:
        """To version 9, and leave."""
        group_id = self.order.group_id
        assert ask(running, "start", start(group_id=group_id)).status_code == 200
        self.send(group)
        assert ask(running, "finish", finish(group_id=group_id)).status_code == 200
        group.close()


def test_any_values_leave_the_weights(
    rollout: RunningServer, weights: Weights, local: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No group was met: nothing that is sent changes what the server answers."""
    monkeypatch.setattr(transfer_group, "CONNECT_S", 0.05)  # for stores that are not there
    run(rollout, lambda remote: load(remote, weights.items(), 1))
    right = to_json(metas_of(weights))
    messages = st.one_of(
        st.builds(
            lambda changes, tensors: ("join", join(tensors, **changes)),
            st.fixed_dictionaries({}, optional=FIELDS),
            LISTS | st.just(right),
        ),
        st.builds(
            lambda **changes: ("start", start(**changes)),
            group_id=TEXT, weight_version=INT64, on_running=TEXT | st.just("finish"), patience_s=SECONDS,
        ),
        st.builds(
            lambda data, **numbers: ("part", WeightPart(**numbers, data=np.frombuffer(data, dtype=np.uint8))),
            st.binary(max_size=99), group_id=TEXT, index=INT64, digest=INT64,
        ),
        st.builds(lambda **changes: ("finish", finish(**changes)), group_id=TEXT, weight_version=INT64),
    )  # fmt: skip

    @FUZZ
    @given(messages)
    def any_values(asked: tuple[str, Message]) -> None:
        response = ask(rollout, *asked)
        assert response.status_code in (400, 409), response.text
        assert "Traceback" not in response.text and "\n" not in response.json()["error"]["message"]

    @FUZZ
    @given(st.sampled_from(PATHS), st.binary(max_size=300))
    def any_bytes(path: str, body: bytes) -> None:
        assert post(rollout, path, body).status_code == (409 if path.endswith("part") else 400)

    any_values()
    any_bytes()
    serves(rollout, local, 1)


def test_a_long_list_is_refused_and_stops_nobody(rollout: RunningServer) -> None:
    """It is read beside the event loop, and no further than any model's could go."""
    asking, slowest = POOL.submit(ask, rollout, "join", join(b"[" + b"[]," * 2_500_000 + b"[]]")), 0.0
    while not asking.done():
        took = httpx.get(f"{rollout.url}/health", timeout=20.0, trust_env=False).elapsed.total_seconds()
        slowest = max(slowest, took)
    assert asking.result().status_code == 400, asking.result().text
    assert slowest < 5.0
    assert post(rollout, PATHS[0], b"x" * (MAX_JOIN_BYTES + 1)).status_code == 413
    for path in PATHS[2:]:
        assert post(rollout, path, b"x" * (2**16 + 1)).status_code == 413


def test_out_of_order_twice_and_late(rollout: RunningServer, weights: Weights, local: TorchEngine) -> None:
    rank_0 = Rank0(weights)
    group = rank_0.meet(rollout)
    assert ask(rollout, "finish", finish()).status_code == 409  # not begun
    assert ask(rollout, "start", start(group_id="h")).status_code == 409
    assert ask(rollout, "start", start()).status_code == 200
    for step, message in (("start", start()), ("finish", finish(group_id="h"))):
        assert ask(rollout, step, message).status_code == 409, step
    rank_0.send(group)
    for _ in range(2):
        answer = ask(rollout, "finish", finish())
        assert decode(answer.content, WeightReceived).weight_version == 9
    assert ask(rollout, "finish", finish(weight_version=8)).status_code == 409
    serves(rollout, local, 9)

    newer = Rank0(weights, group_id="h")
    assert ask(rollout, "start", start()).status_code == 200  # and its sender is gone
    group.close()
    following = newer.meet(rollout)
    for step, message in (("start", start()), ("finish", finish())):
        assert ask(rollout, step, message).status_code == 409, "of the group before"
    assert ask(rollout, "start", start(group_id="h", weight_version=10)).status_code == 200
    newer.send(following)
    assert ask(rollout, "finish", finish(group_id="h", weight_version=10)).status_code == 200
    serves(rollout, local, 10)
    following.close()


def test_finish_tells_of_a_failure_that_was_there_before_it_asked(rollout: RunningServer, weights: Weights) -> None:
    group = Rank0(weights).meet(rollout)
    assert ask(rollout, "start", start()).status_code == 200
    group.close()
    wait_until(lambda: "closed by a failure" in ask(rollout, "start", start()).text)
    answer = ask(rollout, "finish", finish())
    assert answer.status_code == 409 and "weights 9 did not arrive: " in answer.text
    assert "closed by a failure" in ask(rollout, "finish", finish(group_id="h")).text


def test_a_join_that_waits_gives_way_to_a_new_one(rollout: RunningServer, weights: Weights, local: TorchEngine) -> None:
    lonely = Rank0(weights, num_receivers=2, group_id="lonely")
    waiting = POOL.submit(ask, rollout, "join", lonely.join(timeout_s=3600.0))
    wait_until(lambda: rollout.server.updates.is_running)
    rank_0 = Rank0(weights)
    group = rank_0.meet(rollout)
    assert waiting.result(600).status_code == 409
    rank_0.update(rollout, group)
    serves(rollout, local, 9)


def test_a_join_that_is_still_read_gives_way_to_a_new_one(
    rollout: RunningServer, weights: Weights, local: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However late it is read, and in whichever order they are."""
    began, goes_on, read = threading.Event(), threading.Event(), updates.from_json  # type: ignore[attr-defined]

    def read_slowly(rows: object) -> list[TensorMeta]:
        if not began.is_set():
            began.set()
            assert goes_on.wait(600)
        return read(rows)

    monkeypatch.setattr(updates, "from_json", read_slowly)
    lonely = Rank0(weights, num_receivers=2, group_id="lonely")
    waiting = POOL.submit(ask, rollout, "join", lonely.join(timeout_s=3600.0))
    assert began.wait(600)
    rank_0 = Rank0(weights)
    group = rank_0.meet(rollout)
    goes_on.set()
    assert waiting.result(600).status_code == 409 and "another group came" in waiting.result().text
    rank_0.update(rollout, group)
    serves(rollout, local, 9)


def test_an_update_that_nobody_asks_about_any_more_is_told_once(
    rollout: RunningServer, weights: Weights, caplog: pytest.LogCaptureFixture
) -> None:
    """Its sender has died: the server's log has a line, and no traceback when what failed is forgotten."""
    group = Rank0(weights).meet(rollout)
    assert ask(rollout, "start", start()).status_code == 200
    group.close()
    wait_until(lambda: not rollout.server.updates.is_running)
    rank_0 = Rank0(weights, group_id="h")
    group = rank_0.meet(rollout)
    rank_0.update(rollout, group)
    gc.collect()
    (told,) = [record.getMessage() for record in caplog.records if record.name == updates.logger.name]
    assert told.startswith("weights 9 did not arrive: ") and "WeightUpdates._receive" not in caplog.text


def test_who_may_not(folder: Path, teacher: RunningServer, weights: Weights) -> None:
    """Without the token; at a teacher, whose weights are fixed; from a web page; while the engine sleeps."""
    messages = (("join", join(to_json(metas_of(weights)))), ("start", start()), ("finish", finish()))
    for step, message in messages[:2]:
        refused = ask(teacher, step, message)
        assert refused.status_code == 403 and "this server's weights are fixed" in refused.text, step
    assert "this engine cannot sleep" in post(teacher, "/v1/sleep", b"").text
    engine = TorchEngine.empty(folder, TorchEngineConfig(dtype="float32"))
    with running_server(engine, "rollout", token=TOKEN) as running:
        for path in (*(f"/v1/weights/{step}" for step, _ in messages), "/v1/sleep", "/v1/wake", "/v1/wake/weights"):
            for headers in ({}, {"authorization": "Bearer wrong"}):
                assert post(running, path, b"", **headers).status_code == 401, path
        own = {"authorization": f"Bearer {TOKEN}"}
        assert post(running, "/v1/sleep", b"", **own).status_code == 200
        for step, message in messages[:2]:
            refused = post(running, f"/v1/weights/{step}", encode(message), **own)
            assert refused.status_code in (409, 503), step
        assert post(running, "/v1/wake/weights", b"", **own).status_code == 200
        assert post(running, "/v1/weights/start", encode(start()), **own).status_code == 409  # in no group
        assert post(running, "/v1/wake", b"x" * (2**16 + 1), **own).status_code == 413
    page = {"origin": "http://evil.example"}
    for step, message in messages:
        assert post(teacher, f"/v1/weights/{step}", encode(message), **page).status_code == 403


def test_every_port_is_this_machines_own(rollout: RunningServer, weights: Weights) -> None:
    def listening() -> set[tuple[str, int]]:
        found = psutil.Process().net_connections("tcp")
        return {(one.laddr.ip, one.laddr.port) for one in found if one.status == psutil.CONN_LISTEN}

    before = listening()
    group = Rank0(weights).meet(rollout)
    opened = listening() - before
    group.close()
    assert len(opened) >= 2  # the store's, and gloo's
    assert {address for address, _ in opened} == {"127.0.0.1"}
