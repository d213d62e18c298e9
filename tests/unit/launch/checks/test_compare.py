"""Accounts of nodes beside one another: the odd one is named, whatever the others say."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd.base.types import UserError
from mopd.config.load import load_recipe
from mopd.launch.checks.conducting import DEADLINE_S, compare
from mopd.launch.checks.facts import NodeFacts, facts_of_this_node
from mopd.launch.node import compared_environment
from mopd.launch.preparing import rank_facts
from tests.fixtures.tiny_models import make_hf_model

RECIPE = """\
run_dir: run
student: {model: student, parallel: {data_parallel_size: 2}}
teachers: {one: {model: ./student, domains: [math]}}
data: {train: [train.jsonl]}
schedule: {steps: 3, prompts_per_step: 4}
"""


def node(name: str, **changes: Any) -> NodeFacts:
    plain = NodeFacts(
        name=name,
        versions={"mopd": "1 (ab)", "torch": "2"},
        recipe={"seed": "0", "run_dir": '"runs"'},
        models={"recipe.yaml:3: student.model": {"config.json": "aa", "tokenizer": "bb"}},
        gpus=("H100",) * 8,
        start={
            "environment": {"NVTE_FUSED_ATTN": "1"},
            "GPUs": {"the ranks' GPU": "H100"},
            "student.model": {"recipe.yaml:3: student.model: model.safetensors": "cc"},
        },
        shm_bytes=2**34,
        is_complete=True,
    )
    return dataclasses.replace(plain, **changes)


def failed(*facts: NodeFacts) -> list[str]:
    return [check.detail for check in compare(facts) if check.status == "failed"]


def test_equal_nodes_pass() -> None:
    assert {check.status for check in compare([node("a"), node("b"), node("c")])} == {"ok"}


def test_of_three_the_odd_one_is_named_be_it_the_first() -> None:
    other = {"mopd": "2 (cd)", "torch": "2"}
    line = "a: mopd is 2 (cd) there and 1 (ab) on b: install the same on every node"
    assert failed(node("a", versions=other), node("b"), node("c")) == [line]


def test_many_odd_nodes_are_one_line() -> None:
    facts = [node("a"), *(node(f"n{i}", recipe={"seed": "1", "run_dir": '"runs"'}) for i in range(6))]
    (line,) = failed(*facts)
    assert line.startswith("a: seed is 0 there and 1 on n0")


def test_a_model_is_named_by_its_key() -> None:
    other = {"recipe.yaml:3: student.model": {"config.json": "cc", "tokenizer": "dd"}}
    (line,) = failed(node("a"), node("b", models=other))
    assert line.startswith("b: recipe.yaml:3: student.model: config.json is cc there and aa on a: ")
    assert line.endswith("(and 1 more differences)")


def test_other_gpus_are_told_and_little_shared_memory_refused() -> None:
    mixed = list(compare([node("a"), node("b", gpus=("A100",) * 8)]))
    assert [(c.name, c.detail) for c in mixed if c.status == "warning"] == [
        ("GPUs", "most nodes have 8 x H100, but b has 8 x A100")
    ]
    assert failed(node("a"), node("b", shm_bytes=2**26)) == [
        "b: /dev/shm has 64 MiB, a node with GPUs needs 1024: give the container more (--shm-size, --ipc=host)"
    ]
    assert failed(node("a", gpus=(), shm_bytes=2**26)) == []


@pytest.mark.parametrize(
    ("kind", "other", "line"),
    [
        ("environment", {}, "b: NVTE_FUSED_ATTN is absent there and 1 on a: set the same on every node"),
        (
            "GPUs",
            {"the ranks' GPU": "A100, H100"},
            "b: the ranks' GPU is A100, H100 there and H100 on a: start the ranks on nodes with one kind of GPU",
        ),
        (
            "student.model",
            {"recipe.yaml:3: student.model: model.safetensors": "dd"},
            "b: recipe.yaml:3: student.model: model.safetensors is dd there and cc on a: "
            "let all nodes read one folder, or copy it anew",
        ),
    ],
)
def test_what_a_start_refuses_is_refused(kind: str, other: dict[str, str], line: str) -> None:
    """Between the nodes that have ranks: the third has none."""
    odd = node("b", start={**node("b").start, kind: other})
    assert failed(node("a"), odd, node("c", start={})) == [line]


def test_another_model_is_one_line() -> None:
    other = node("b", models={"recipe.yaml:3: student.model": {"config.json": "cc", "tokenizer": "bb"}})
    odd = dataclasses.replace(other, start={**other.start, "student.model": {"model.safetensors": "dd"}})
    assert len(failed(node("a"), odd)) == 1


def test_an_account_holds_what_a_start_compares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same functions make both; of nodes without ranks there is nothing to compare."""
    make_hf_model(tmp_path / "student")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    load = partial(load_recipe, recipe)
    facts, _ = facts_of_this_node(load, num_nodes=2, node=1)
    assert facts.start == {"environment": compared_environment()} | rank_facts(load(), 1)
    assert facts.start["environment"]["NVTE_FUSED_ATTN"] == "0"
    assert set(facts.start["student.model"]) == {
        f"{recipe}:2: student.model: {name}" for name in ("config.json", "model.safetensors")
    }
    registered = "slurm.nodes=2", "teachers.one.placement={type: registered, python: /opt/vllm/bin/python}"
    lacks, _ = facts_of_this_node(partial(load_recipe, recipe, registered), num_nodes=2, node=1)
    said = "teachers.one.placement.python: '/opt/vllm/bin/python' does not exist on "
    assert [said in line for line in (*facts.problems, *lacks.problems)].count(True) == 1
    unplugged = "slurm.interface=nope0", "weight_sync={type: collective, interface: nope1}"
    lacks, _ = facts_of_this_node(partial(load_recipe, recipe, unplugged), num_nodes=2, node=1)
    said = [line for line in lacks.problems if "no IPv4 address" in line]
    assert ["'nope1'" in said[0], "'nope0'" in said[1], len(said)] == [True, True, 2]
    (tmp_path / "student" / "model.safetensors").write_bytes(b"")
    damaged, _ = facts_of_this_node(load, num_nodes=2, node=1)
    assert "student" in damaged.problems[-1] and "not a sound safetensors file" in damaged.problems[-1]


def test_what_a_node_cannot_find_is_its_own_line() -> None:
    assert failed(node("a"), node("b", problems=("recipe.yaml:1: x is wrong", "y too"), is_complete=False)) == [
        "b: recipe.yaml:1: x is wrong",
        "b: y too",
    ]


def test_an_account_comes_back_as_it_was_and_of_another_version_what_is_known() -> None:
    facts = node("a", problems=("p",), start={"environment": {"NCCL_EMPTY": "", "NCCL_ODD": "\x1b"}})
    sent = json.loads(json.dumps(dataclasses.asdict(facts)))
    assert NodeFacts.from_json(sent) == facts
    assert NodeFacts.from_json({"name": "a", "of_tomorrow": [1]}) == NodeFacts(name="a")


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)
names = st.sampled_from([field.name for field in dataclasses.fields(NodeFacts)])


@settings(deadline=None)
@given(st.dictionaries(names, values) | values)
def test_whatever_comes_is_an_account_or_one_line(data: Any) -> None:
    try:
        facts = NodeFacts.from_json(data)
    except UserError as error:
        assert "start the same mopd on every node" in str(error)
    else:
        for check in compare([facts, node("b")]):
            assert isinstance(check.detail, str)


def test_the_documentation_names_the_deadline_of_a_sum() -> None:
    text = (Path(__file__).parents[4] / "docs" / "cluster.md").read_text()
    (row,) = (line for line in text.splitlines() if line.startswith("| all-reduce |"))
    assert f"does not end in {DEADLINE_S:g} s;" in row
