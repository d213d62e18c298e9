"""The floors hold, and what must stay light stays light."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "megatron", "ray", "vllm", "transformers")
LIGHT = (
    "mopd.base.types",
    "mopd.base.metrics",
    "mopd.config.load",
    "mopd.config.document",
    "mopd.orchestrator.controller",
    "mopd.placement.ending",
    "mopd.cli.main",
)


def test_import_contracts() -> None:
    """In a process of its own: the linter switches off the loggers of whoever calls it."""
    code = "from importlinter.cli import lint_imports as lint; raise SystemExit(lint(no_cache=True, no_logo=True))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules_import_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print([name for name in {HEAVY} if name in sys.modules])"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert done.stderr == ""
    assert done.stdout == "[]\n"


@cache
def names_in(path: Path) -> set[str]:
    """Every imported module or name, attribute and plain name that a file mentions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {part for alias in node.names for part in alias.name.split(".")}
            names |= set((getattr(node, "module", None) or "").split("."))
    return names


def test_one_file_reads_parallel_state() -> None:
    readers = [path for path in (ROOT / "mopd").rglob("*.py") if "parallel_state" in names_in(path)]
    allowed = {ROOT / "mopd" / "student" / "parallel.py", ROOT / "mopd" / "student/cpu_shim.py"}
    assert [str(path.relative_to(ROOT)) for path in readers if path not in allowed] == []


def test_the_environment_is_read_where_processes_start() -> None:
    """vLLM and SGLang read their settings from the environment: what starts them has to set them; so do groups of NCCL.
    Which GPUs a process may use stands there too, the keys of services that a start checks and uploads need, which are
    in no file of a run, where the user's caches are, which changes no run, and what a callback's process gets of it."""
    readers = {
        path.relative_to(ROOT) for path in (ROOT / "mopd").rglob("*.py") if names_in(path) & {"environ", "getenv"}
    }
    rooms = {Path("mopd/launch"), Path("mopd/launch/checks"), Path("mopd/placement"), Path("mopd/placement/ray")}
    assert {str(path) for path in readers if path.parent not in rooms} == {
        "mopd/engines/sglang/start.py",
        "mopd/engines/vllm/start.py",
        "mopd/base/hardware.py",
        "mopd/data/hub/push.py",
        "mopd/run/callbacks.py",
        "mopd/run/manifests.py",
        "mopd/weights/backends.py",
    }


def test_one_file_pickles() -> None:
    """Megatron's checkpoint format defines one file as a pickle."""
    pickling = {"pickle", "cloudpickle", "dill"}
    found = [str(path.relative_to(ROOT)) for path in (ROOT / "mopd").rglob("*.py") if names_in(path) & pickling]
    assert found == ["mopd/conversion/torch_dist/description.py"]


LOADERS = {"from_pretrained", "from_config", "from_hub", "pipeline", "get_class_from_dynamic_module", "hf_hub_download"}
"""What in transformers and its relatives may read, fetch or run what a folder names."""
OWN = {"TorchEngine", "cls"}
"""Its ``from_pretrained`` is ours and goes through the door."""
DOOR = "mopd/conversion/hf/pretrained.py"
UNPICKLERS = {("torch", "load"), ("numpy", "load"), ("np", "load"), ("joblib", "load")}


@cache
def calls_in(path: Path) -> list[tuple[ast.Call, str, str]]:
    """Every call of a file: the node, what it is called on (last name; "" for plain names) and its name."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            found.append((node, getattr(owner, "id", getattr(owner, "attr", "")), node.func.attr))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found.append((node, "", node.func.id))
    return found


def says(call: ast.Call, key: str, value: bool) -> bool:
    return any(word.arg == key and getattr(word.value, "value", None) is value for word in call.keywords)


def test_one_door_to_loaders_that_could_run_code() -> None:
    """Without ``trust_remote_code=False`` transformers asks on standard input, and a ``y`` runs the folder's code."""
    doors = set()
    for path in (path for folder in ("mopd", "tools") for path in (ROOT / folder).rglob("*.py")):
        for call, owner, name in calls_in(path):
            if name in LOADERS and owner not in OWN:
                doors.add(str(path.relative_to(ROOT)))
                assert says(call, "trust_remote_code", False), f"{path}:{call.lineno}"
                assert name == "from_config" or says(call, "local_files_only", True), f"{path}:{call.lineno}"
            assert not says(call, "trust_remote_code", True), f"{path}:{call.lineno}"
            if name == "AsyncEngineArgs":
                assert says(call, "trust_remote_code", False), f"{path}:{call.lineno}"
    assert doors == {DOOR}


def test_nothing_is_unpickled_without_limits() -> None:
    """Not by torch, and not by Megatron, whose loader unpickles whatever a checkpoint holds."""
    megatrons = set()
    for path in (path for folder in ("mopd", "tools") for path in (ROOT / folder).rglob("*.py")):
        for call, owner, name in calls_in(path):
            if (owner, name) in UNPICKLERS:
                safe = says(call, "weights_only", True) or says(call, "allow_pickle", False)
                assert safe, f"{path}:{call.lineno}"
            if (owner, name) == ("dist_checkpointing", "load"):
                megatrons.add(str(path.relative_to(ROOT)))
                assert {"sharded_strategy", "common_strategy"} <= {word.arg for word in call.keywords}
    assert megatrons == {"mopd/student/checkpoints/restricted.py"}
