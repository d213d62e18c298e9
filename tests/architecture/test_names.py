"""One name for one thing, and nothing that only its own tests would miss."""

from __future__ import annotations

import ast
import dataclasses
import importlib
from collections import Counter

import pytest
from vulture import Vulture

from mopd.config.schema import Recipe
from tests.architecture.source import ROOT, imports, path_of, trees

MIN_LINES = 40
MAX_FILES_IN_A_FOLDER = 20

RUN_ELSEWHERE = {"mopd.placement.ray.agent"}
"""In a process of its own, which shall import no more than that."""

CALLED_BY_LIBRARIES = {
    "mopd/__init__.py": {"__dir__", "__getattr__"},
    "mopd/api/__init__.py": {"to_yaml"},
    "mopd/conversion/torch_dist/description.py": {"find_class"},
    "mopd/conversion/torch_dist/reader.py": {"readable", "readinto", "seekable"},
    "mopd/engines/vllm/worker.py": {
        "finish_weight_update",
        "init_transfer_engine",
        "start_weight_update",
        "update_weights",
        "mopd_outcome",
        "mopd_put_adapter",
        "mopd_take_adapter",
        "mopd_score_given",
        "mopd_take_hidden",
        "mopd_num_hidden",
        "WorkerExtension",
        "mopd_watch",
    },
    "mopd/serving/server.py": {"capture_signals", "eof_received", "data_received", "send_400_response"},
    "mopd/student/attention.py": {"get_rotary_seq_len"},
    "mopd/student/model/gated_delta_net.py": {"_apply_output_gate"},
    "mopd/student/schedule.py": {"_communicate_shapes"},
    "mopd/student/model/replay.py": {"get_replay_topk"},
    "mopd/student/checkpoints/restricted.py": {"load_common", "read_metadata", "load_bytes"},
    "mopd/student/checkpoints/checkpoint.py": {"create_stream"},
    "tools/sglang_cpu/sgl_kernel/__init__.py": {"create_module"},
}
"""What no line of the package names, because a base class of a library does, Python, or a program with the API."""


def test_config_classes_say_so() -> None:
    """Sections of a recipe. ``Recipe`` is the whole; the other dataclasses beside them are no sections."""
    pending, sections = [Recipe], set()
    names = [module for module in trees() if module.startswith("mopd.config.")]
    known = {
        value
        for name in names
        for value in vars(importlib.import_module(name)).values()
        if isinstance(value, type) and dataclasses.is_dataclass(value)
    }
    while pending:
        section = pending.pop()
        if section in sections:
            continue
        sections.add(section)
        texts = " ".join(str(field.type) for field in dataclasses.fields(section))
        pending += [cls for cls in known - sections if cls.__name__ in texts.replace("|", " ").split()]
    assert len(sections) > 10
    assert sorted(cls.__name__ for cls in sections if not cls.__name__.endswith("Config")) == ["Recipe"]


def test_no_small_file_with_one_importer() -> None:
    """But commands and model families, which are a file each for the one that picks among them."""
    importers = Counter(module for name, tree in trees().items() for module in imports(tree) - {name})
    small = [
        name
        for name in trees()
        if importers[name] == 1
        and not name.startswith(("mopd.cli.", "mopd.conversion.models.known."))
        and path_of(name).name != "__init__.py"
        and len(path_of(name).read_text(encoding="utf-8").splitlines()) < MIN_LINES
    ]
    assert sorted(set(small) - RUN_ELSEWHERE) == []


def test_no_folder_is_crowded() -> None:
    rooms = Counter(path_of(name).parent.relative_to(ROOT) for name in trees())
    assert {str(room): count for room, count in rooms.items() if count > MAX_FILES_IN_A_FOLDER} == {}


@pytest.fixture(scope="module")
def unused() -> dict[str, set[str]]:
    """File -> functions, classes, methods and module-level names that nothing in the package or its tools names."""
    search = Vulture()
    search.scavenge([str(ROOT / "mopd"), str(ROOT / "tools")])
    found: dict[str, set[str]] = {}
    for item in search.get_unused_code(min_confidence=60):
        file = str(item.filename.relative_to(ROOT)) if item.filename.is_absolute() else str(item.filename)
        at_the_top = item.typ == "variable" and _stands_at_the_top(file, item.name)
        if item.typ in ("function", "class", "method", "property") or at_the_top:
            found.setdefault(file, set()).add(item.name)
    return found


def _stands_at_the_top(file: str, name: str) -> bool:
    body = ast.parse((ROOT / file).read_text(encoding="utf-8")).body
    targets = [t for node in body if isinstance(node, ast.Assign) for t in node.targets]
    targets += [node.target for node in body if isinstance(node, ast.AnnAssign)]
    return any(isinstance(target, ast.Name) and target.id == name for target in targets)


def test_no_unused_name(unused: dict[str, set[str]]) -> None:
    """A name that only tests use is used by nobody."""
    left = {file: names - CALLED_BY_LIBRARIES.get(file, set()) for file, names in unused.items()}
    assert {file: sorted(names) for file, names in left.items() if names} == {}


def test_no_exception_that_is_not_needed(unused: dict[str, set[str]]) -> None:
    idle = {file: names - unused.get(file, set()) for file, names in CALLED_BY_LIBRARIES.items()}
    assert {file: sorted(names) for file, names in idle.items() if names} == {}
