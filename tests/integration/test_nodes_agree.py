"""What decides a run is node 0's: another file, override, environment, package or model on another node is one line on
each of them, and no start. Launchers of ours and two agents of torchrun, as two nodes of this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from mopd.base.files.writing import PARTIALS
from mopd.base.hardware import NODE_NAME
from tests.fixtures.ports import free_port
from tests.integration.world import REPOSITORY, World, environment, read_metrics

pytestmark = pytest.mark.multirank
TIMEOUT_S = 240.0
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--local-addr", "127.0.0.1")


class Node:
    """One node's own command line, environment and working directory."""

    def __init__(
        self, recipe: Path, *overrides: str, command: str = "train", cwd: Path = REPOSITORY, **variables: str
    ) -> None:
        self.words = [command, str(recipe), *overrides]
        self.cwd, self.variables = cwd, variables


def run_both(first: Node, second: Node, *, torchrun: str | None = None) -> list[tuple[int, list[str]]]:
    """Exit codes and the lines of ``mopd``, by node. ``torchrun``: how two agents of it meet, in the place of our
    launchers."""
    port, started = free_port(), []
    for number, node in enumerate((first, second)):
        if torchrun is None:
            place = ("--nnodes", "2", "--node-rank", str(number), "--rdzv-endpoint", f"127.0.0.1:{port}")
            command = [sys.executable, "-m", "mopd", *node.words, *place]
        else:
            place = ("--nnodes", "2", "--node-rank", str(number), "--rdzv-backend", torchrun)
            meet = ("--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "one")
            command = [*TORCHRUN, *place, *meet, "-m", "mopd", *node.words]
        variables = {NODE_NAME: f"node-{number}", "GLOO_SOCKET_IFNAME": "lo", **node.variables}
        started.append(
            subprocess.Popen(
                command,
                cwd=node.cwd,
                env=environment() | variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        ended = [process.communicate(timeout=TIMEOUT_S)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    return [
        (process.returncode, [line for line in errors.splitlines() if line.startswith("mopd: ")] or [errors])
        for process, errors in zip(started, ended, strict=True)
    ]


def with_package(folder: Path, name: str, version: str) -> str:
    """A ``PYTHONPATH`` on which a package has another version."""
    file = folder / "site" / f"{name}-{version}.dist-info" / "METADATA"
    file.parent.mkdir(parents=True)
    file.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return f"{file.parents[1]}{os.pathsep}{REPOSITORY}"


def other_nodes(models: World, folder: Path, recipe: Path) -> dict[str, tuple[Node, str]]:
    """Node 1 as it differs, and what its line says."""
    based = folder / "based.yaml"
    based.write_text(f"base: {recipe.name}\nschedule: {{steps: 7}}\nteachers: {{left: {{weight: 2.0}}}}\n")
    changed = folder / "elsewhere" / models.student.name
    shutil.copytree(models.student, changed)
    with (changed / "model.safetensors").open("r+b") as weights:
        weights.seek(-3, os.SEEK_END)
        weights.write(b"\1")
    here, same = models.folder, "start every node with one recipe file and the same overrides"
    both = "on node 1 (node-1) and {} on node 0 (node-0)"
    return {
        "a base": (
            Node(based, cwd=here),
            f"based.yaml:3: teachers.left.weight is 2.0 {both.format('null')} (and 1 more differences): {same}",
        ),
        "a variable with a default": (
            Node(recipe, cwd=here, CUDA_DEVICE_MAX_CONNECTIONS="8"),
            f"CUDA_DEVICE_MAX_CONNECTIONS is 8 {both.format(1)}: set the same on every node",
        ),
        "a package": (
            Node(recipe, cwd=here, PYTHONPATH=with_package(folder, "numpy", "99.0")),
            f"numpy is 99.0 {both.format(metadata.version('numpy'))}: install the same on every node",
        ),
        "weights": (Node(recipe, cwd=changed.parent), ": student.model: model.safetensors is "),
    }


@pytest.mark.parametrize("difference", ["a base", "a variable with a default", "a package", "weights"])
def test_another_run_on_another_node_does_not_start(models: World, tmp_path: Path, difference: str) -> None:
    recipe = models.write_recipe(tmp_path / "run", student__model=models.student.name)
    node, told = other_nodes(models, tmp_path, recipe)[difference]
    (code, here), (its_code, there) = run_both(Node(recipe, cwd=models.folder), node)
    assert code == its_code == 2, (here, there)
    assert len(here) == len(there) == 1
    assert there[0].startswith("mopd: error: ") and told in there[0]
    assert here[0] == f"mopd: error: node-0 ends with node-1: {there[0].removeprefix('mopd: error: ')}"
    assert not (tmp_path / "run").exists() and not list(tmp_path.glob(PARTIALS))


@pytest.mark.long
def test_under_torchrun_too(world: World, tmp_path: Path) -> None:
    recipe = world.write_recipe(tmp_path / "run", schedule__steps=3)
    one, other = "1e-05 on node {} (node-1)", "0.002 on node {} (node-0)"  # c10d numbers nodes as it likes
    lines = (f"{one.format(1)} and {other.format(0)}", f"{other.format(1)} and {one.format(0)}")
    told = tuple(f"student.optimizer.lr is {line}: start every node with one recipe file" for line in lines)
    ended = run_both(Node(recipe), Node(recipe, "student.optimizer.lr=1e-5"), torchrun="c10d")
    assert all(code for code, _ in ended)
    found = [line for _, lines in ended for line in lines if any(text in line for text in told)]
    assert 1 <= len(found) <= 2 and all(line.startswith("mopd: error: ") for line in found), ended
    assert not (tmp_path / "run").exists()


def test_only_the_student_is_needed_on_every_node(world: World, tmp_path: Path) -> None:
    """Teachers, data and rewards are node 0's."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / world.student.name).symlink_to(world.student)
    names = {f"teachers__{name}__model": path.name for name, path in world.teachers.items()}
    data = {"data__train": [world.train.name], "data__validation": [world.validation.name]}
    recipe = world.write_recipe(tmp_path / "run", student__model=world.student.name, schedule__steps=3, **names, **data)
    ended = run_both(Node(recipe, cwd=world.folder), Node(recipe, cwd=elsewhere))
    assert [code for code, _ in ended] == [0, 0], ended
    assert len(read_metrics(tmp_path / "run")) == 3


def test_two_agents_of_torchrun_that_agree_train(world: World, tmp_path: Path) -> None:
    node = Node(world.write_recipe(tmp_path / "run", schedule__steps=3))
    ended = run_both(node, node, torchrun="c10d")
    assert [code for code, _ in ended] == [0, 0], ended
    assert len(read_metrics(tmp_path / "run")) == 3


def test_ranks_with_too_few_descriptors_are_not_started(models: World, tmp_path: Path) -> None:
    recipe = models.write_recipe(tmp_path / "run")
    done = subprocess.run(
        ["bash", "-c", 'ulimit -n 300; exec "$@"', "limited", sys.executable, "-m", "mopd", "train", str(recipe)],
        cwd=REPOSITORY,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("mopd: error: ") and "student.parallel: each of 2 ranks needs 3" in line
    assert "open files, and the limit here (ulimit -n, hard) is 300: raise it to 3" in line
    assert not (tmp_path / "run").exists()
