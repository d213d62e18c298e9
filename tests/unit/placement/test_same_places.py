"""``mopd plan``, ``mopd slurm``, ``mopd check`` and the run give everybody the same place, or refuse the same recipes.

Over random recipes. Each is asked as it is in use: the plan for its JSON, Slurm for the job's layout, the checks for
their refusal, the run (on node 0, in the step that the job gives it) for the environment of the servers that it starts.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mopd.base.hardware import Hardware
from mopd.base.types import UserError
from mopd.cli.main import main
from mopd.config.load import Loaded, draft_recipe, load_recipe
from mopd.config.machine.places import Places, engine_groups, ray_requests
from mopd.config.placements import LocalConfig, RayConfig
from mopd.launch.checks import facts
from mopd.launch.checks.static import StaticChecks
from mopd.launch.preparing import settled
from mopd.launch.slurm.layout import JobLayout, lay_out
from mopd.placement.gpus import check_gpus
from mopd.placement.groups import Groups
from mopd.placement.ray.cluster import Node, check_room
from mopd.placement.server_group import LocalLauncher
from tests.recipes.test_plans import CONFIG

SEED = 20_261_124
NUM_RECIPES = 60
PATIENCE_S = 300
MODELS = ("student", "a", "b")
Place = tuple[int, int, tuple[int, ...]]
"""Component, node, GPUs."""


def group(rng: random.Random, key: str, gpus: int, kinds: list[str]) -> dict[str, Any]:
    kind, size, replicas = rng.choice(kinds), rng.choice([1, 1, 1, 2, 2, 4]), rng.choice([1, 1, 1, 2, 3])
    placement: dict[str, Any] = {"type": kind}
    if kind == "in_process" and rng.random() < 0.8:
        size = 1
    if kind == "named":
        placement = {"type": "local"}
        wanted = size * replicas
        if wanted <= gpus:
            anywhere, last = rng.sample(range(gpus), wanted), list(range(gpus - wanted, gpus))
            placement["gpus"] = anywhere if rng.random() < 0.3 else last
    if kind == "shared":
        placement = {"type": "local"} | ({"share_gpus_with": "student"} if key == "rollout" else {})
    if kind in ("ray", "pool", "at"):
        placement = {"type": "ray", "num_gpus": 0 if kind == "ray" and rng.random() < (0.2 if gpus else 0.8) else size}
        placement |= {"pool": {"shared_pool": "p"}, "at": {"address": "h:1"}}.get(kind, {})
    vllm = {"type": "vllm", "tensor_parallel_size": size, "kv_cache_memory_bytes": 2**28}  # all fit into one GPU
    engine = {"type": "auto"} if kind == "auto" else vllm
    return {"placement": placement, "replicas": replicas, "engine": engine}


def tree_of(rng: random.Random, folder: Path, *, form: str | None) -> tuple[dict[str, Any], int]:
    """A recipe, and the GPUs of a node."""
    gpus = rng.choice([0, 4, 8, 8, 8])
    kinds = ["in_process", "local", "local", "named", "shared", "auto"]
    kinds += {"allocation": ["registered"] * 3 + ["ray"], "heterogeneous": ["registered"] * 3}.get(str(form), ["ray"])
    of_teachers = [*kinds, *(["pool", "pool"] if form in (None, "ray") else [])]
    parallel = {"tensor_model_parallel_size": rng.choice([1, 2]), "data_parallel_size": rng.choice([1, 1, 2, 3, 4])}
    teachers = {
        name: {"model": str(folder / name), "domains": [name], **group(rng, name, gpus, of_teachers)} for name in "ab"
    }
    tree: dict[str, Any] = {
        "run_dir": str(folder / "run"),
        "student": {"model": str(folder / "student"), "parallel": parallel, "max_tokens_per_micro_batch": 4096},
        "rollout": {"max_response_length": 8, **group(rng, "rollout", gpus, kinds)},
        "teachers": teachers,
        "data": {"train": [str(folder / "train.jsonl")], "max_prompt_length": 8},
        "schedule": {"steps": 3, "prompts_per_step": 24},
    }
    if form is not None:
        tree["slurm"] = {"form": form, "gpus_per_node": gpus}
        tree["slurm"] |= {"student_nodes": rng.choice([1, 2, 4])} if rng.random() < 0.3 else {}
        tree["slurm"] |= {"nodes": rng.choice([1, 2, 3, 4])} if rng.random() < 0.3 else {}
    return tree, gpus


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of which a config is all."""
    folder = tmp_path_factory.mktemp("models")
    for model in MODELS:
        (folder / model).mkdir()
        (folder / model / "config.json").write_text(json.dumps(CONFIG | {"dtype": "bfloat16"}))
        (folder / model / "model.safetensors").write_bytes(bytes(200))
    (folder / "train.jsonl").write_text("{}\n")
    return folder


def machine_of(num_gpus: int) -> Hardware:
    memory = (80 * 2**30,) * num_gpus
    return Hardware(gpu_memory_bytes=memory, torch_cuda="13.0", vllm="0.32.0", free_memory_bytes=2**50)


def shown(monkeypatch: pytest.MonkeyPatch, num_gpus: int) -> Hardware:
    """What every way to look at the machine says."""
    hardware = machine_of(num_gpus)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    for module in ("cli.plan", "launch.checks.facts"):
        monkeypatch.setattr(f"mopd.{module}.this_hardware", lambda: hardware)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(num_gpus))))
    return hardware


def planned(path: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[dict[str, list[Place]], str]:
    """Places by key from the plan's JSON, and its line if it refuses."""
    main(["plan", str(path), "--json", *arguments])
    told = capsys.readouterr()
    if not told.out:
        return {}, told.err
    found: dict[str, list[Place]] = {}
    for one in json.loads(told.out)["places"]:
        found.setdefault(one["key"], []).append((one["component"], one["node"], tuple(one["gpus"])))
    return found, told.err


def by_key(places: Places) -> dict[str, list[Place]]:
    found: dict[str, list[Place]] = {}
    for one in places.tenants:
        found.setdefault(one.key, []).append((one.component, one.node, one.gpus))
    return found


def refusal(work: Callable[..., Any], *arguments: Any) -> str:
    try:
        work(*arguments)
    except UserError as error:
        return str(error)
    return ""


def _text(line: str) -> str:
    """Key and fault. What was ``auto`` has no line of the file once it is settled, and another row in the table."""
    return line.partition(": ")[2].partition(" (")[0]


def run_on_node_0(
    loaded: Loaded, hardware: Hardware, ranks: int, nodes: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, list[tuple[int, ...]]]:
    """GPUs of each replica that the run starts: of ``local`` ones as their servers see them, of its own Ray cluster all
    of them together."""
    recipe = settled(loaded, hardware, num_nodes=nodes).recipe
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    groups = Groups(recipe, log_dir=folder, device=torch.device("cpu"))
    seen: dict[str, list[tuple[int, ...]]] = {}
    for key, plan in groups.plans.items():
        if isinstance(plan.group.placement, LocalConfig):
            given = [one.gpus for one in groups._places.of(key)]
            launcher = LocalLauncher(plan, log_dir=folder, gpus=given)
            environments = [launcher._environment(i) for i in range(plan.group.replicas)]
            shown = [one.get("CUDA_VISIBLE_DEVICES", "") for one in environments]
            seen[key] = [tuple(int(gpu) for gpu in names.split(",") if gpu) for names in shown]
    own = {k: p.group for k, p in groups.plans.items() if getattr(p.group.placement, "address", "") is None}
    if own:
        cluster = Node(address="here", num_cpus=10**6, num_gpus=len(groups._places.ray_gpus))
        check_room(ray_requests(own), [cluster])
        seen["Ray"] = [groups._places.ray_gpus]
    return seen


@pytest.mark.timeout(PATIENCE_S)
def test_one_machine(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Plan, ``mopd check --static``, the launcher's check, and the run, of a machine with and without GPUs."""
    rng, outcomes = random.Random(SEED), Counter[str]()
    for _ in range(NUM_RECIPES):
        tree, gpus = tree_of(rng, folder, form=None)
        path = folder / "recipe.yaml"
        path.write_text(yaml.safe_dump(tree))
        if refusal(load_recipe, path):
            continue
        hardware, loaded = shown(monkeypatch, gpus), load_recipe(path)
        places, error = planned(path, capsys)
        static = next(one for one in StaticChecks(draft_recipe(path), hardware).run() if one.name == "GPUs")
        ready = settled(loaded, hardware)
        refused = refusal(check_gpus, ready)
        assert (static.status == "failed", static.detail if refused else "") == (bool(refused), refused), tree
        assert bool(error) == bool(refused), (tree, error, refused)
        outcomes["refused" if refused else f"{bool(gpus)}"] += 1
        if refused:
            assert _text(refused) in error, f"{tree}\n{error}\n{refused}"
            continue
        world_size = loaded.recipe.student.parallel.world_size
        started = run_on_node_0(loaded, hardware, world_size, 1, folder, monkeypatch)
        assert places["student"] == [(0, 0, (rank,) if gpus else ()) for rank in range(world_size)]
        assert_started_as_planned(started, places, ready)
    assert min(outcomes.values()) > 1 and len(outcomes) == 3, outcomes


def assert_started_as_planned(
    started: dict[str, list[tuple[int, ...]]], places: dict[str, list[Place]], ready: Loaded
) -> None:
    of_ray = set[int]()
    for key, group_ in engine_groups(ready.recipe).items():
        if isinstance(group_.placement, LocalConfig):
            assert [(0, 0, gpus) for gpus in started[key]] == places[key], (key, started, places)
        elif isinstance(group_.placement, RayConfig) and group_.placement.address is None:
            of_ray |= {gpu for _, node, gpus in places[key] for gpu in gpus if node == 0}
    assert set(*started.get("Ray", [()])) == of_ray, (started, places)


@pytest.mark.timeout(PATIENCE_S)
@pytest.mark.parametrize("form", ["allocation", "heterogeneous", "ray"])
def test_a_job(form: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Plan, layout, ``mopd check --nodes`` on every node and the launchers' checks in their steps, and the run."""
    rng, outcomes = random.Random(SEED), Counter[str]()
    for _ in range(NUM_RECIPES):
        tree, gpus = tree_of(rng, folder, form=form)
        path = folder / "recipe.yaml"
        path.write_text(yaml.safe_dump(tree))
        if refusal(load_recipe, path):
            continue
        loaded = load_recipe(path)
        refused = refusal(lay_out, loaded)
        if "slurm.form is" in refused:
            continue
        outcomes["refused" if refused else f"{bool(gpus)}"] += 1
        if gpus:  # without, a plan is of this machine
            shown(monkeypatch, 0)
            places, error = planned(path, capsys, "--gpu", "h100")
            assert bool(error) == bool(refused) and _text(refused) in error, f"{tree}\n{error}\n{refused}"
        if refused:
            continue
        layout = lay_out(loaded)
        if gpus:
            _assert_as_laid_out(loaded, layout, places)
        _assert_checks_accept(loaded, layout, gpus, monkeypatch)
        hardware = shown(monkeypatch, len(layout.student_gpus[0]))
        student_nodes, ranks = layout.places.student_nodes, layout.places.ranks_per_node
        if form == "ray":
            loaded = load_recipe(path, [f"{key}.placement.address=h:1" for key in _on_ray(loaded)])
            _assert_ray_has_room(loaded, layout, gpus)
        started = run_on_node_0(loaded, hardware, ranks, student_nodes, folder, monkeypatch)
        ready = settled(loaded, hardware, num_nodes=student_nodes)
        assert_started_as_planned(started, places if gpus else by_key(layout.places), ready)
    assert min(outcomes.values()) > 1 and len(outcomes) == 3, outcomes


def _on_ray(loaded: Loaded) -> list[str]:
    return [key for key, one in engine_groups(loaded.recipe).items() if isinstance(one.placement, RayConfig)]


def _assert_as_laid_out(loaded: Loaded, layout: JobLayout, places: dict[str, list[Place]]) -> None:
    """But for groups of placement ``auto``: the job leaves them to its node, where they come before or between other
    ``local`` ones, on GPUs that the job gives to the trainer's step all the same."""
    laid_out = by_key(layout.places)
    of_node = {key for key, one in engine_groups(loaded.recipe).items() if isinstance(one.placement, LocalConfig)}
    has_auto = len(places) > len(laid_out)
    for key, own in laid_out.items():
        if has_auto and key in of_node:
            assert [(*place[:2], len(place[2])) for place in places[key]] == [
                (*place[:2], len(place[2])) for place in own
            ]
            assert all(set(gpus) <= set(layout.student_gpus[node]) for _, node, gpus in places[key])
        else:
            assert places[key] == own
    taken = Counter((0, node, gpu) for node, own in enumerate(layout.student_gpus) for gpu in own)
    taken.update((one.component, one.node, gpu) for one in layout.servers for gpu in one.gpus)
    assert set(taken.values()) == {1}
    assert all(gpu < layout.components[component].gpus_per_node for component, _, gpu in taken)


def _assert_checks_accept(loaded: Loaded, layout: JobLayout, gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On each node: that of the whole node, and that of the launcher in its step."""
    nodes = [(one, i) for one in layout.components for i in range(one.num_nodes)]
    for number, (component, index) in enumerate(nodes):
        shown(monkeypatch, component.gpus_per_node)
        facts._check_gpus(loaded, len(nodes), number)
        if component is layout.components[0] and index < layout.places.student_nodes:
            hardware = shown(monkeypatch, len(layout.student_gpus[index]))
            ready = settled(loaded, hardware, num_nodes=layout.places.student_nodes)
            if loaded.recipe.slurm is not None and loaded.recipe.slurm.form != "ray":  # whose addresses come later
                check_gpus(ready, None if index == 0 else (), num_nodes=layout.places.student_nodes)


def _assert_ray_has_room(loaded: Loaded, layout: JobLayout, gpus: int) -> None:
    """The request fits what the job's daemons show."""
    firsts = [len(own) for own in layout.student_gpus]
    firsts += [0] * (layout.components[0].num_nodes - len(firsts))
    view = [Node(address=str(i), num_cpus=10**6, num_gpus=gpus - first) for i, first in enumerate(firsts)]
    check_room(ray_requests(engine_groups(loaded.recipe)), view)
