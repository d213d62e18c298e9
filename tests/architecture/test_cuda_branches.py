"""Every function that asks for CUDA is executed as on a GPU: by a test that stubs the device, or by a stage of the
check that runs on one. Known by ``torch.cuda``, ``is_cuda``, ``HAVE_TE``, "cuda" as a text and names such as
``on_gpu``."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import yaml

from tests.architecture.source import PACKAGE, ROOT, path_of, trees
from tools.gpu_student import STAGES

TABLE: dict[str, dict[str, str]] = yaml.safe_load(Path(__file__).with_name("cuda_branches.yaml").read_text())
_NAME = re.compile(r"_?(is|has|on|is_on)_(cuda|gpu)|HAVE_TE")
_SCRIPT = (ROOT / "tools" / "gpu_check.sh").read_text(encoding="utf-8")


def asking(node: ast.AST, name: str = "") -> Counter[str]:
    """Return the functions below a node that ask for CUDA, with how often."""
    found: Counter[str] = Counter()
    for child in ast.iter_child_nodes(node):
        named = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        found[name or "module"] += _asks(child)
        found += asking(child, f"{name}.{child.name}".lstrip(".") if named else name)  # type: ignore[attr-defined]
    return +found


def _asks(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(value=ast.Attribute(value=ast.Name(id="torch"), attr="cuda")):
            return True
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return _NAME.fullmatch(name) is not None
        case ast.Constant(value=str(text)):
            return re.fullmatch("cuda(:.*)?", text) is not None or _NAME.fullmatch(text) is not None
    return False


def test_every_branch_is_executed_by_something() -> None:
    files = {module: str(path_of(module).relative_to(PACKAGE)) for module in trees()}
    found = {(files[module], name) for module, tree in trees().items() for name in asking(tree)}
    listed = {(file, name) for files in TABLE.values() for file, names in files.items() for name in names.split()}
    assert found - listed == set(), "name a test that executes these as on a GPU, or a stage"
    assert listed - found == set(), "these ask no more"


def test_what_executes_them_is_there() -> None:
    for place in TABLE:
        file, _, test = place.partition("::")
        if test:
            assert re.search(rf"^(async )?def {test}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE), place
        else:
            stage, *option = place.split()
            assert stage in STAGES or re.search(rf"^{stage} \d+ ", _SCRIPT, re.MULTILINE), place
            assert all(f"{word})" in _SCRIPT for word in option), place
