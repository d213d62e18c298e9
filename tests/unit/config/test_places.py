"""Who gets which GPU: decided from numbers alone, with CUDA and without."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from mopd.base.types import UserError
from mopd.config.groups import EngineGroupConfig, VllmEngineConfig
from mopd.config.machine.places import NodePool, Places, Tenant, place, place_on_machine, room_for_auto
from mopd.config.placements import (
    AutoPlacementConfig,
    ExternalConfig,
    InProcessConfig,
    LocalConfig,
    RayConfig,
    RegisteredConfig,
)


def local(*named: int, replicas: int = 1, size: int = 1) -> EngineGroupConfig:
    engine: Any = {"engine": VllmEngineConfig(type="vllm", tensor_parallel_size=size)} if size > 1 else {}
    return EngineGroupConfig(placement=LocalConfig(type="local", gpus=named), replicas=replicas, **engine)


def shared(replicas: int = 1, size: int = 1) -> EngineGroupConfig:
    engine: Any = {"engine": VllmEngineConfig(type="vllm", tensor_parallel_size=size)}
    return EngineGroupConfig(
        placement=LocalConfig(type="local", share_gpus_with="student"), replicas=replicas, **engine
    )


IN_PROCESS = EngineGroupConfig(placement=InProcessConfig())
WIDE_IN_PROCESS = EngineGroupConfig(
    placement=InProcessConfig(), engine=VllmEngineConfig(type="vllm", tensor_parallel_size=2)
)
RAY = EngineGroupConfig(placement=RayConfig(type="ray", num_gpus=1))
AUTO = EngineGroupConfig(placement=AutoPlacementConfig())
EXTERNAL = EngineGroupConfig(placement=ExternalConfig(type="external", urls=("http://h:1",)))


def on_ray(size: int, replicas: int = 1, *, address: str | None = "auto", pool: str | None = None) -> EngineGroupConfig:
    engine = VllmEngineConfig(type="vllm", tensor_parallel_size=max(size, 1))
    placement = RayConfig(type="ray", num_gpus=size, address=address, shared_pool=pool)
    return EngineGroupConfig(engine=engine, placement=placement, replicas=replicas)


def registered(size: int, replicas: int = 1) -> EngineGroupConfig:
    engine = VllmEngineConfig(type="vllm", tensor_parallel_size=size)
    return EngineGroupConfig(engine=engine, placement=RegisteredConfig(type="registered"), replicas=replicas)


def gpus_of(places: Places, key: str) -> tuple[tuple[int, ...], ...]:
    return tuple(tenant.gpus for tenant in places.of(key))


def where(places: Places, key: str) -> list[tuple[int, tuple[int, ...]]]:
    return [(tenant.node, tenant.gpus) for tenant in places.of(key)]


@pytest.mark.parametrize(
    ("groups", "num_gpus", "num_ranks", "expected", "ray"),
    [
        ({"rollout": IN_PROCESS, "teachers.a": IN_PROCESS}, 1, 1, {}, ()),
        ({"rollout": IN_PROCESS, "teachers.a": local()}, 2, 1, {"teachers.a": ((1,),)}, ()),
        (
            {"rollout": local(replicas=2), "teachers.a": local()},
            4,
            1,
            {"rollout": ((1,), (2,)), "teachers.a": ((3,),)},
            (),
        ),
        ({"rollout": local(replicas=2, size=2)}, 8, 2, {"rollout": ((2, 3), (4, 5))}, ()),
        (
            {"rollout": local(), "teachers.a": local(1, 2, replicas=2)},
            4,
            1,
            {"rollout": ((3,),), "teachers.a": ((1,), (2,))},
            (),
        ),
        ({"rollout": local(3, 2, size=2)}, 4, 2, {"rollout": ((3, 2),)}, ()),
        ({"rollout": IN_PROCESS, "teachers.a": RAY, "teachers.b": local()}, 4, 1, {"teachers.b": ((1,),)}, (2,)),
        ({"rollout": EXTERNAL, "teachers.a": EXTERNAL}, 2, 2, {}, ()),
        ({"rollout": local()}, 1, 0, {"rollout": ((0,),)}, ()),
        (
            {"rollout": shared(2, size=2), "teachers.a": local()},
            6,
            4,
            {"rollout": ((0, 1), (2, 3)), "teachers.a": ((4,),)},
            (),
        ),
        ({"rollout": shared()}, 2, 0, {"rollout": ((0,),)}, ()),
        (
            {"rollout": WIDE_IN_PROCESS, "teachers.a": WIDE_IN_PROCESS, "teachers.b": local()},
            3,
            1,
            {"teachers.b": ((2,),)},
            (),
        ),
        # without CUDA nothing is shared out
        ({"rollout": local(replicas=3), "teachers.a": IN_PROCESS}, 0, 4, {"rollout": ((), (), ())}, ()),
        ({"rollout": on_ray(0, 3, address=None)}, 0, 2, {"rollout": ((), (), ())}, ()),
        # groups of one pool have its GPUs by turns; replica i of each has bundle i
        (
            {
                "rollout": local(),
                "teachers.a": on_ray(2, 2, address=None, pool="p"),
                "teachers.b": on_ray(1, 1, address=None, pool="p"),
            },
            6,
            1,
            {"rollout": ((1,),), "teachers.a": ((2, 3), (4, 5)), "teachers.b": ((2, 3),)},
            (2, 3, 4, 5),
        ),
    ],
)
def test_every_gpu_has_one_owner(
    groups: dict[str, EngineGroupConfig],
    num_gpus: int,
    num_ranks: int,
    expected: dict[str, tuple[tuple[int, ...], ...]],
    ray: tuple[int, ...],
) -> None:
    places = place_on_machine(groups, num_ranks, num_gpus).require()
    assert {key: gpus_of(places, key) for key in expected} == expected and places.ray_gpus == ray
    assert gpus_of(places, "student") == tuple((rank,) if num_gpus else () for rank in range(num_ranks))


@pytest.mark.parametrize(
    ("groups", "num_gpus", "num_ranks", "parts"),
    [
        ({"rollout": local()}, 1, 1, ["rollout.placement: 1 replicas of 1 GPUs need 1 and 0 are free", "in_process"]),
        ({"rollout": local(replicas=2, size=2)}, 4, 1, ["need 4 and 3 are free", "trainer ranks: GPU 0", "any 2 x 2"]),
        (
            {"rollout": local(), "teachers.a": local()},
            2,
            1,
            ["teachers.a.placement: ", "0 are free", "rollout: any 1 x 1"],
        ),
        ({"rollout": local(0)}, 4, 1, ["rollout.placement.gpus: GPU 0 belongs to trainer rank 0"]),
        ({"rollout": local(1)}, 4, 2, ["GPU 1 belongs to trainer rank 1"]),
        ({"rollout": local(1), "teachers.a": local(1)}, 4, 1, ["teachers.a.placement.gpus: GPU 1 belongs to rollout"]),
        ({"rollout": local(1), "teachers.a": local(2, 1, replicas=2)}, 4, 1, ["GPU 1 belongs to rollout"]),
        ({"rollout": local(4)}, 4, 1, ["GPU 4 is not there (4 GPUs on node 0", "from 0 to 3"]),
        ({"rollout": local(0)}, 0, 1, ["rollout.placement.gpus: names GPU 0, but node 0 has no CUDA device"]),
        (
            {"rollout": shared(2)},
            4,
            1,
            ["rollout.placement.share_gpus_with: its replicas need 2 GPUs, and 1 of node 0"],
        ),
        ({"rollout": shared(), "teachers.a": local()}, 1, 1, ["teachers.a.placement", "rollout: 1 x 1 of the ranks'"]),
        (
            {"rollout": IN_PROCESS},
            2,
            4,
            ["student.parallel: 4 trainer ranks do not fill whole nodes of 1 x 2 GPUs", "use 2 nodes"],
        ),
        ({"rollout": WIDE_IN_PROCESS}, 4, 2, ["rollout.engine.tensor_parallel_size: GPU 1 belongs to trainer rank 1"]),
        ({"rollout": WIDE_IN_PROCESS}, 1, 1, ["GPU 1 is not there"]),
        (
            {"rollout": WIDE_IN_PROCESS, "teachers.a": local(1)},
            4,
            1,
            ["teachers.a.placement.gpus: GPU 1 belongs to in_pro"],
        ),
        (
            {"rollout": on_ray(2, 2, address=None), "teachers.a": local()},
            4,
            1,
            ["rollout.placement.num_gpus: 2 replicas of 2 GPUs in node 0's own Ray cluster, and 2 are free", "on Ray"],
        ),
        ({"rollout": RAY}, 0, 1, ["rollout.placement.num_gpus: 1 replicas of 1 GPUs", "0 are free"]),
        ({f"teachers.{i}": local(replicas=4) for i in range(40)}, 8, 1, ["and 33 more", "8 GPUs on node 0"]),
    ],
)
def test_refusals_are_one_line(
    groups: dict[str, EngineGroupConfig], num_gpus: int, num_ranks: int, parts: list[str]
) -> None:
    with pytest.raises(UserError) as error:
        place_on_machine(groups, num_ranks, num_gpus).require()
    message = str(error.value)
    assert "\n" not in message and len(message) < 700
    for part in parts:
        assert part in message


def test_groups_of_placement_auto_find_what_the_others_leave() -> None:
    groups = {"rollout": AUTO, "teachers.a": local(3), "teachers.b": on_ray(2, address=None), "teachers.c": AUTO}
    assert room_for_auto(groups, 1, 8) == (4, 2)
    assert room_for_auto(groups, 6, 8) == (0, 2)  # the others do not fit
    assert not place_on_machine(groups, 1, 8).of("rollout")


def test_no_gpu_is_given_twice() -> None:
    """Over many machines and recipes: either refused, or all replicas and ranks have GPUs of their own that exist."""
    kinds = [IN_PROCESS, local(), local(replicas=2), local(size=2), local(1), local(2, 3, replicas=2), RAY, EXTERNAL]
    held = 0
    for chosen in itertools.product(kinds, repeat=3):
        groups = {"rollout": chosen[0], "teachers.a": chosen[1], "teachers.b": chosen[2]}
        for num_gpus, num_ranks in ((1, 1), (2, 2), (4, 1), (8, 2), (8, 0)):
            places = place_on_machine(groups, num_ranks, num_gpus)
            if places.problems:
                continue
            alone = [t for t in places.tenants if t.key == "student" or groups[t.key] is not IN_PROCESS]
            owned = [gpu for tenant in alone for gpu in tenant.gpus]
            assert len(owned) == len(set(owned)) and set(owned) <= set(range(num_gpus))
            held += 1
    assert held > 500


def test_ranks_fill_as_few_nodes_as_hold_them_evenly() -> None:
    places = place({}, 12, NodePool(gpus_per_node=8, num_nodes=4))
    assert (places.student_nodes, places.ranks_per_node, places.reserved) == (2, 6, (6, 6))
    assert where(places, "student")[5:7] == [(0, (5,)), (1, (0,))]
    spread = place({}, 12, NodePool(gpus_per_node=8, num_nodes=4, student_nodes=4))
    assert (spread.student_nodes, spread.ranks_per_node) == (4, 3)
    on_cpus = place({}, 4, NodePool(gpus_per_node=0, num_nodes=2))
    assert (on_cpus.student_nodes, where(on_cpus, "student")) == (2, [(0, ()), (0, ()), (1, ()), (1, ())])


def test_what_starts_with_the_trainer_has_the_first_gpus_of_node_0_without_a_gap() -> None:
    """A step that sees only these counts them alike; the other nodes keep none for it."""
    groups = {"rollout": local(5), "teachers.a": registered(2, 3)}
    places = place(groups, 4, NodePool(gpus_per_node=8, student_nodes=2, num_nodes=2)).require()
    assert places.reserved == (6, 2)
    assert where(places, "teachers.a") == [(0, (6, 7)), (1, (2, 3)), (1, (4, 5))]


def test_replicas_that_register_take_the_first_node_with_room() -> None:
    groups = {"rollout": registered(4, 2), "teachers.a": registered(1, 2)}
    places = place(groups, 6, NodePool(gpus_per_node=8, num_nodes=None))
    assert where(places, "rollout") == [(1, (0, 1, 2, 3)), (1, (4, 5, 6, 7))]
    assert where(places, "teachers.a") == [(0, (6,)), (0, (7,))] and places.num_nodes == (2,)
    on_cpus = place(groups, 2, NodePool(gpus_per_node=0, num_nodes=2))
    assert [node for node, _ in where(on_cpus, "rollout") + where(on_cpus, "teachers.a")] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("pool", "expected", "num_nodes"),
    [
        (NodePool(gpus_per_node=8, num_nodes=None), {"a": [1], "b": [2, 4]}, (6,)),
        (NodePool(gpus_per_node=8, num_nodes=6), {"a": [1], "b": [2, 4]}, (6,)),
        (
            NodePool(gpus_per_node=8, num_nodes=None, components={"teachers.a": 8, "teachers.b": 4}),
            {"b": [0, 4]},
            (1, 1, 8),
        ),
    ],
)  # fmt: skip
def test_a_teacher_larger_than_a_node_has_whole_ones(
    pool: NodePool, expected: dict[str, list[int]], num_nodes: tuple[int, ...]
) -> None:
    stages = VllmEngineConfig(type="vllm", tensor_parallel_size=8, pipeline_parallel_size=2)
    groups = {"teachers.a": registered(4), "teachers.b": replace(registered(1, 2), engine=stages)}
    places = place(groups, 8, pool).require()
    for name, nodes in expected.items():
        assert [node for node, _ in where(places, f"teachers.{name}")] == nodes
    assert {tenant.num_nodes for tenant in places.of("teachers.b")} == {4 if pool.components else 2}
    assert {len(tenant.gpus) for tenant in places.of("teachers.b")} == {4 if pool.components else 8}
    assert places.num_nodes == num_nodes


@pytest.mark.parametrize(
    ("groups", "nodes", "line"),
    [
        ({"rollout": registered(16)}, None, "rollout.engine.tensor_parallel_size: 16 GPUs, and a node has 8: only"),
        ({"teachers.a": registered(12)}, None, "takes whole ones: set at most 8, or a multiple of 8"),
        ({"teachers.a": registered(16)}, 2, "teachers.a.replicas: 1 replicas of 16 GPUs, and no 2 nodes in a row have"),
    ],
)  # fmt: skip
def test_what_does_not_span_nodes(groups: dict[str, EngineGroupConfig], nodes: int | None, line: str) -> None:
    with pytest.raises(UserError, match=line):
        place(groups, 1, NodePool(gpus_per_node=8, num_nodes=nodes)).require()


def test_components_are_nodes_of_their_own() -> None:
    groups = {"rollout": registered(2, 3), "teachers.a": registered(1, 2)}
    pool = NodePool(gpus_per_node=8, num_nodes=None, components={"rollout": 4, "teachers.a": 0})
    places = place(groups, 4, pool).require()
    assert places.num_nodes == (1, 2, 1)
    assert places.of("rollout")[2] == Tenant(key="rollout", number=2, component=1, node=1, gpus=(0, 1))
    assert gpus_of(places, "teachers.a") == ((), ())


def test_ray_is_asked_for_the_largest_replicas_first() -> None:
    """First fit in the recipe's order would put a pair on each node, and leave no three together."""
    groups = {"rollout": on_ray(2, 2), "teachers.a": on_ray(3)}
    pool = NodePool(gpus_per_node=4, num_nodes=2)
    places = place(groups, 1, pool).require()
    assert not any(tenant.is_fixed for key in groups for tenant in places.of(key))
    assert [node for node, _ in where(places, "teachers.a")] == [0]
    assert {node for node, _ in where(places, "rollout")} == {1}
    assert place(groups, 1, NodePool(gpus_per_node=4, has_ray=False)).elsewhere == ("rollout", "teachers.a")
    job = place({"rollout": on_ray(4, 2)}, 1, NodePool(gpus_per_node=4, num_nodes=None))
    assert job.num_nodes == (3,)


def test_groups_of_a_pool_have_one_set_of_gpus() -> None:
    """As large as the largest of them, and as many as the most replicas; each has no more tenants than replicas."""
    groups = {"teachers.a": on_ray(1, 2, pool="p"), "teachers.b": on_ray(3, 1, pool="p")}
    places = place(groups, 2, NodePool(gpus_per_node=8)).require()
    assert gpus_of(places, "teachers.a") == ((2, 3, 4), (5, 6, 7))
    assert gpus_of(places, "teachers.b") == ((2, 3, 4),)


@pytest.mark.parametrize(
    ("groups", "num_ranks", "pool", "says"),
    [
        (
            {},
            9,
            NodePool(gpus_per_node=8, num_nodes=2),
            "student.parallel: 9 trainer ranks do not fill whole nodes of 2 x 8",
        ),
        (
            {},
            8,
            NodePool(gpus_per_node=8, student_nodes=3, num_nodes=3),
            "equally over 3 nodes of 8 GPUs: set it to 1 or 2",
        ),
        (
            {},
            8,
            NodePool(gpus_per_node=4, student_nodes=1),
            "slurm.student_nodes: the 8 ranks of student.parallel do not divide equally over 1 nodes of 4 GPUs",
        ),
        (
            {},
            8,
            NodePool(gpus_per_node=8, student_nodes=4, num_nodes=2),
            "over 4 nodes of 8 GPUs, and there are 2: set it to 1 or 2",
        ),
        (
            {"rollout": registered(4, 3)},
            4,
            NodePool(gpus_per_node=8, num_nodes=1),
            "rollout.replicas: 3 replicas of 4 GPUs, and no node has 4 free for replica 1 (0 of 8 are free): lower "
            "replicas, or use 2 nodes",
        ),
        (
            {"rollout": on_ray(4, 2)},
            4,
            NodePool(gpus_per_node=8),
            "rollout.replicas: 2 replicas of 4 GPUs, and no node has 4 free for replica 1",
        ),
        (
            {"rollout": on_ray(2)},
            1,
            NodePool(gpus_per_node=0),
            "rollout.placement.num_gpus: 2 GPUs, and a node has 0: only a registered teacher spans nodes",
        ),
        (
            {"rollout": registered(2)},
            1,
            NodePool(gpus_per_node=8, num_nodes=3, components={"rollout": 8}),
            "slurm.nodes: 3, and the job's components have 1 + 1 nodes",
        ),
    ],
)
def test_a_pool_that_is_too_small_is_told_by_key(
    groups: dict[str, EngineGroupConfig], num_ranks: int, pool: NodePool, says: str
) -> None:
    places = place(groups, num_ranks, pool)
    with pytest.raises(UserError) as caught:
        places.require()
    assert says in str(caught.value) and "\n" not in str(caught.value)
    assert all(tenant.node < (pool.num_nodes or 1) for tenant in places.tenants)


def test_a_teachers_key_is_its_name_whatever_it_holds() -> None:
    with pytest.raises(UserError, match=r"^teachers/a.b/placement/gpus: GPU 9 is not there"):
        place_on_machine({"teachers.a.b": local(9)}, 1, 2).require(lambda *path: "/".join(path))
    assert Counter(tenant.key for tenant in place_on_machine({"teachers.a.b": local()}, 1, 2).tenants) == {
        "student": 1,
        "teachers.a.b": 1,
    }
