"""Where ranks and replicas stand: one owner for each GPU, nothing that straddles nodes, and errors by key."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from mopd.base.types import UserError
from mopd.config.load import Loaded, load_recipe
from mopd.launch.slurm.layout import JobLayout, lay_out
from mopd.launch.slurm.submitting import prepare_job
from tests.fixtures.tiny_models import make_hf_model

REGISTERED = {"type": "registered"}


def recipe(folder: Path, slurm: dict[str, Any], **keys: Any) -> Loaded:
    """A student of 8 ranks, two teachers that register: TP4 twice and TP1 three times."""
    vllm = {"type": "vllm", "tensor_parallel_size": 4}
    tree: dict[str, Any] = {
        "run_dir": "runs/one",
        "student": {"model": "models/student", "parallel": {"tensor_model_parallel_size": 2, "data_parallel_size": 4}},
        "teachers": {
            "math": {"model": "m", "domains": ["math"], "engine": vllm, "placement": REGISTERED, "replicas": 2},
            "code": {
                "model": "c",
                "domains": ["code"],
                "engine": {"type": "torch"},
                "placement": REGISTERED,
                "replicas": 3,
            },
        },
        "data": {"train": ["train.jsonl"]},
        "schedule": {"steps": 3, "prompts_per_step": 4},
        "slurm": slurm,
    }
    for dotted, value in keys.items():
        *parents, last = dotted.split("__")
        section = tree
        for name in parents:
            section = section.setdefault(name, {})
        section[last] = value
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
    return load_recipe(path)


def owners(layout: JobLayout) -> Counter[tuple[int, int, int]]:
    """(component, node, GPU) -> how many have it."""
    found = Counter((0, node, gpu) for node, own in enumerate(layout.student_gpus) for gpu in own)
    found.update((server.component, server.node, gpu) for server in layout.servers for gpu in server.gpus)
    return found


@pytest.mark.parametrize("form", ["allocation", "heterogeneous"])
@pytest.mark.parametrize("gpus", [4, 5, 6, 8])
@pytest.mark.parametrize("student_nodes", [None, 2, 4, 8])
def test_a_gpu_has_one_owner_that_the_job_has_asked_for(
    tmp_path: Path, form: str, gpus: int, student_nodes: int | None
) -> None:
    layout = lay_out(recipe(tmp_path, {"form": form, "gpus_per_node": gpus, "student_nodes": student_nodes}))
    assert set(owners(layout).values()) == {1}
    for component, node, gpu in owners(layout):
        assert node < layout.components[component].num_nodes and gpu < layout.components[component].gpus_per_node
    places = layout.places
    assert places.ranks_per_node * places.student_nodes == 8
    assert all(len(own) >= places.ranks_per_node for own in layout.student_gpus)
    asked = Counter((server.key, len(server.gpus)) for server in layout.servers)
    assert asked == {("teachers.math", 4): 2, ("teachers.code", 1): 3}
    assert len({(server.key, server.number) for server in layout.servers}) == 5


def test_one_allocation_is_as_small_as_it_can_be(tmp_path: Path) -> None:
    layout = lay_out(recipe(tmp_path, {"gpus_per_node": 8}))
    assert [component.num_nodes for component in layout.components] == [3]
    assert [(s.key, s.number, s.node, s.gpus) for s in layout.servers] == [
        ("teachers.math", 0, 1, (0, 1, 2, 3)),
        ("teachers.math", 1, 1, (4, 5, 6, 7)),
        ("teachers.code", 0, 2, (0,)),
        ("teachers.code", 1, 2, (1,)),
        ("teachers.code", 2, 2, (2,)),
    ]


def test_each_group_is_a_component(tmp_path: Path) -> None:
    components = {"teachers.math": {"partition": "a100", "gpus_per_node": 4}}
    layout = lay_out(recipe(tmp_path, {"form": "heterogeneous", "gpus_per_node": 8, "components": components}))
    assert [(c.key, c.num_nodes, c.gpus_per_node, c.partition) for c in layout.components] == [
        ("student", 1, 8, None),
        ("teachers.math", 2, 4, "a100"),
        ("teachers.code", 1, 3, None),
    ]


def test_spare_nodes_are_the_last_of_those_with_replicas(tmp_path: Path) -> None:
    layout = lay_out(recipe(tmp_path, {"gpus_per_node": 8, "nodes": 5, "spare_nodes": 2}))
    assert [component.num_nodes for component in layout.components] == [5]
    assert {server.node for server in layout.servers} == {1, 2}
    layout = lay_out(recipe(tmp_path, {"form": "heterogeneous", "gpus_per_node": 8, "nodes": 5, "spare_nodes": 1}))
    assert [component.num_nodes for component in layout.components] == [1, 2, 2]
    assert {server.node for server in layout.servers} == {0}


def test_without_gpus_replicas_take_nodes_in_turn(tmp_path: Path) -> None:
    layout = lay_out(recipe(tmp_path, {"nodes": 2}))
    assert layout.places.student_nodes == 2 and layout.places.ranks_per_node == 4 and not owners(layout)
    assert [server.node for server in layout.servers] == [0, 1, 0, 1, 0]


def test_ray_has_what_the_ranks_leave(tmp_path: Path) -> None:
    on_ray = {"type": "ray", "num_gpus": 4}
    keys = {"teachers__math__placement": on_ray, "teachers__code__placement": {"type": "ray", "num_gpus": 1}}
    layout = lay_out(recipe(tmp_path, {"form": "ray", "gpus_per_node": 8, "student_nodes": 2}, **keys))
    assert layout.components[0].num_nodes == 3 and layout.student_gpus == ((0, 1, 2, 3),) * 2 and layout.servers == ()


@pytest.mark.parametrize(
    ("slurm", "keys", "says"),
    [
        (
            {"nodes": 3},
            {},
            "slurm.student_nodes: the 8 ranks of student.parallel do not divide equally over 3 nodes: set it to 1 or 2",
        ),
        (
            {"student_nodes": 1, "gpus_per_node": 4},
            {},
            "do not divide equally over 1 nodes of 4 GPUs: set it to 2 or 4 or 8",
        ),
        (
            {"form": "heterogeneous", "gpus_per_node": 8, "components": {"teachers.math": {"gpus_per_node": 3}}},
            {},
            "teachers.math.engine.tensor_parallel_size: 4 GPUs, and a node has 3: only a registered teacher spans "
            "nodes, and takes whole ones: set at most 3, or a multiple of 3",
        ),
        ({"nodes": 2, "gpus_per_node": 8}, {}, "teachers.code.replicas: 3 replicas of 1 GPUs, and no node has 1 free"),
        (
            {"form": "heterogeneous", "nodes": 2, "gpus_per_node": 8},
            {},
            "slurm.nodes: 2, and the job's components have 1 + 1 + 1",
        ),
        ({"nodes": 2, "spare_nodes": 2, "gpus_per_node": 8}, {}, "slurm.spare_nodes: 2 for each of 1 components leave"),
        (
            {"nodes": 4, "gpus_per_node": 8, "student_nodes": 1},
            {},
            "slurm.nodes: 4, and nothing would run on 1 of them: lower it, or set placement: {type: registered}",
        ),
        (
            {"spare_nodes": 1, "gpus_per_node": 8},
            {"teachers__math__placement": {"type": "local"}, "teachers__code__placement": {"type": "local"}},
            "slurm.spare_nodes is 1, but no group registers",
        ),
        ({"form": "ray"}, {}, "slurm.form is 'ray', but teachers.math.placement.type is registered"),
        (
            {"form": "heterogeneous", "components": {"rollout": {}}},
            {},
            "slurm.components.rollout: no group of this name registers: name one of teachers.math, teachers.code",
        ),
        (
            {"gpus_per_node": 8},
            {"rollout__placement": {"type": "local"}},
            "rollout.placement: 1 replicas of 1 GPUs need 1 and 0 are free (8 GPUs on node 0; trainer ranks: GPU 0, 1",
        ),
        (
            {"form": "ray", "gpus_per_node": 4},
            {"teachers__math__placement": {"type": "ray", "num_gpus": 8}, "teachers__code__placement": {"type": "ray"}},
            "teachers.math.placement.num_gpus: 8 GPUs, and a node has 4: only a registered teacher spans nodes, and "
            "takes whole ones: set at most 4, or a multiple of 4 and placement.type: registered",
        ),
    ],
)
def test_what_cannot_be_is_told_by_file_and_key(
    tmp_path: Path, slurm: dict[str, Any], keys: dict[str, Any], says: str
) -> None:
    with pytest.raises(UserError) as caught:
        lay_out(recipe(tmp_path, slurm, **keys))
    assert says in str(caught.value) and str(tmp_path / "recipe.yaml") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_recipe_without_the_section_says_what_to_add(tmp_path: Path) -> None:
    loaded = recipe(tmp_path, {})
    without = replace(loaded, recipe=replace(loaded.recipe, slurm=None))
    with pytest.raises(UserError, match="slurm is absent: add the section"):
        lay_out(without)


def test_a_student_that_its_layout_does_not_divide_is_not_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_hf_model(tmp_path / "models" / "student")
    parallel = {"tensor_model_parallel_size": 8}
    with pytest.raises(UserError, match=r"student\.parallel\.tensor_model_parallel_size 8 does not divide"):
        prepare_job(recipe(tmp_path, {"nodes": 2}, student__parallel=parallel))
