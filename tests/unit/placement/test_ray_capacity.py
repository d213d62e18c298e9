"""Does a plan fit a cluster? The arithmetic, without Ray."""

from __future__ import annotations

import sys

import pytest

from mopd.base.types import UserError
from mopd.config.machine.places import RayRequest
from mopd.placement.ray.cluster import Node, check_room
from mopd.placement.ray.connection import connect


def need(key: str, count: int, gpus: float, cpus: float = 1) -> RayRequest:
    return RayRequest(name=key, keys=(key,), count=count, num_gpus=gpus, num_cpus=cpus)


def nodes(*gpus: float, cpus: float = 16) -> list[Node]:
    return [Node(address=f"10.0.0.{i}", num_gpus=count, num_cpus=cpus) for i, count in enumerate(gpus)]


def test_a_shortage_is_named() -> None:
    with pytest.raises(UserError) as failure:
        check_room([need("teachers.math", 2, 4), need("teachers.code", 3, 4)], nodes(8, 8))
    message = str(failure.value)
    assert "\n" not in message
    for part in ("teachers.code", "3 replicas of 4 GPUs", "need 20 GPUs", "4 GPUs are missing", "placement.num_gpus"):
        assert part in message


@pytest.mark.parametrize(
    ("requests", "free"),
    [
        ([need("teachers.math", 2, 4), need("teachers.code", 4, 2), need("rollout", 8, 1)], nodes(8, 8, 8)),
        # the largest first: replicas of one GPU would sit on both nodes and leave no place for 4 together
        ([need("rollout", 4, 1), need("teachers.math", 1, 4)], nodes(4, 4)),
        ([need("teachers.math", 2, 4)], [Node(address="127.0.0.1", num_gpus=4, num_cpus=1)] * 2),
    ],
)
def test_plans_that_fit(requests: list[RayRequest], free: list[Node]) -> None:
    check_room(requests, free)


@pytest.mark.parametrize(
    ("request_", "free", "says"),
    [
        (need("teachers.math", 1, 8), nodes(4, 4), r"teachers\.math.*no node has that much left in one place"),
        (need("teachers.math", 3, 0, cpus=4), nodes(1, cpus=8), "each.*: 4 CPUs are missing"),
        (need("teachers.math", 1, 1), [], "no node"),
    ],
)
def test_what_is_short_is_named(request_: RayRequest, free: list[Node], says: str) -> None:
    with pytest.raises(UserError, match=says):
        check_room([request_], free)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"^data_plane\.type needs Ray.*pip install 'mopd\[ray\]'$"):
        connect("data_plane", "auto", num_cpus=1, gpus=())
