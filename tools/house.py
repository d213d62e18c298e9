"""Measure the house: ``python tools/house.py [--json] [--against REVISION]``.

Prints, for each room of ``mopd/`` (a top-level folder or file), its files and code lines, and for the whole package:

- *code lines*: lines with a token that is neither a comment nor part of a docstring;
- *arrows*: pairs of rooms of which one imports the other, ``if TYPE_CHECKING:`` apart;
- *floors*: rooms on the longest chain of arrows;
- *files with one importer*: files that exactly one other file of the package imports;
- *classes that only forward*: classes of two methods or more, each of which, constructor apart, does nothing but
  call one method of an attribute.

``--against`` measures a revision of git beside it.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import subprocess
import sys
import tarfile
import tempfile
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "mopd"
NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class House:
    """Measures of one tree."""

    code_lines: int
    physical_lines: int
    files: int
    rooms: int
    floors: int
    arrows: int
    one_importer_files: int
    forwarding_classes: list[str]
    test_code_lines: int
    lines_by_room: dict[str, int]
    files_by_room: dict[str, int]


def measure(root: Path) -> House:
    """Measure the tree whose package is ``root/mopd`` and whose tests are ``root/tests``."""
    files = {module_name(root, path): path for path in sorted((root / PACKAGE).rglob("*.py"))}
    trees = {name: ast.parse(path.read_bytes()) for name, path in files.items()}
    lines = {name: code_lines(path.read_bytes(), trees[name]) for name, path in files.items()}
    # The package itself stands on no floor: its ``__init__`` has the version, which is read anywhere.
    imported = {name: set(imports(tree, files)) - {name, PACKAGE} for name, tree in trees.items()}
    arrows = {(room(name), room(other)) for name, others in imported.items() for other in others}
    arrows = {(above, below) for above, below in arrows if above != below}
    importers = Counter(other for others in imported.values() for other in others)
    rooms = sorted({room(name) for name in files})
    lines_by_room, files_by_room = Counter[str](), Counter[str]()
    for name, count in lines.items():
        lines_by_room[room(name)] += count
        files_by_room[room(name)] += 1
    return House(
        code_lines=sum(lines.values()),
        physical_lines=sum(len(path.read_bytes().splitlines()) for path in files.values()),
        files=len(files),
        rooms=len(rooms),
        floors=num_floors(rooms, arrows),
        arrows=len(arrows),
        one_importer_files=sum(count == 1 for count in importers.values()),
        forwarding_classes=sorted(found for name, tree in trees.items() for found in forwarding(name, tree)),
        test_code_lines=sum(
            code_lines(path.read_bytes(), ast.parse(path.read_bytes())) for path in (root / "tests").rglob("*.py")
        ),
        lines_by_room=dict(lines_by_room.most_common()),
        files_by_room=dict(files_by_room),
    )


def module_name(root: Path, path: Path) -> str:
    """Return the dotted name of a file, without ``__init__``."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(module: str) -> str:
    """Return the room of a module: the package's own ``__init__`` and ``__main__`` belong to the command line."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] != "__main__" else "cli"


def code_lines(source: bytes, tree: ast.Module) -> int:
    """Count the lines with a token that is neither a comment nor part of a docstring."""
    found: set[int] = set()
    for token in tokenize.tokenize(io.BytesIO(source).readline):
        if token.type not in NOT_CODE:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        for statement in getattr(node, "body", []) if not isinstance(node, ast.Lambda | ast.IfExp) else []:
            if is_docstring(statement):
                found.difference_update(range(statement.lineno, statement.end_lineno + 1))
    return len(found)


def is_docstring(node: ast.AST) -> bool:
    """Whether a statement is a string alone: a docstring, or the one below a field or constant."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def imports(tree: ast.Module, files: dict[str, Path]) -> Iterator[str]:
    """Yield the package's files that a module imports, at its top or inside its functions."""
    for node in statements(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in files)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if inner in files:
                    yield inner
                elif node.module in files:
                    yield node.module


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield every node that is not below ``if TYPE_CHECKING:``."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from statements(child)


def num_floors(rooms: list[str], arrows: set[tuple[str, str]]) -> int:
    """Return the number of rooms on the longest chain of arrows. ``SystemExit`` for a circle."""
    below = {name: [target for source, target in arrows if source == name] for name in rooms}
    climbing: list[str] = []

    @cache
    def height(name: str) -> int:
        if name in climbing:
            raise SystemExit(f"a circle of rooms: {' -> '.join([*climbing[climbing.index(name) :], name])}")
        climbing.append(name)
        found = 1 + max(map(height, below[name]), default=0)
        climbing.pop()
        return found

    return max(map(height, rooms))


def forwarding(module: str, tree: ast.Module) -> Iterator[str]:
    """Yield the classes whose methods only call a method of an attribute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            methods = [item for item in node.body if isinstance(item, Function) and item.name != "__init__"]
            if len(methods) > 1 and all(map(only_forwards, methods)):
                yield f"{module}.{node.name}"


def only_forwards(method: Function) -> bool:
    """Whether a method does nothing but call ``self.ATTRIBUTE.METHOD(…)``."""
    body = [statement for statement in method.body if not is_docstring(statement)]
    if len(body) != 1 or not isinstance(body[0], ast.Return | ast.Expr) or body[0].value is None:
        return False
    value: ast.expr = body[0].value
    while isinstance(value, ast.Await | ast.Call):
        if isinstance(value, ast.Call):
            return ast.unparse(value.func).startswith("self.") and ast.unparse(value.func).count(".") > 1
        value = value.value
    return False


def measured_at(revision: str) -> House:
    """Measure a revision of git."""
    archive = subprocess.run(
        ["git", "archive", revision, PACKAGE, "tests"], cwd=ROOT, check=True, capture_output=True
    ).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
        return measure(Path(folder))


def table(houses: dict[str, House]) -> str:
    """Render measures side by side, one column for each house."""
    rows = {name: [asdict(house)[name] for house in houses.values()] for name in asdict(next(iter(houses.values())))}
    rows["forwarding_classes"] = [len(found) for found in rows["forwarding_classes"]]
    by_room, num_files = rows.pop("lines_by_room"), rows.pop("files_by_room")
    for name in sorted({name for counts in by_room for name in counts}):
        pairs = zip(by_room, num_files, strict=True)
        rows[f"  {name}"] = [f"{lines.get(name, 0)} in {files.get(name, 0)}" for lines, files in pairs]
    lines = [f"{'':24}" + "".join(f"{name:>16}" for name in houses)]
    for name, values in rows.items():
        lines.append(f"{name.replace('_', ' '):24}" + "".join(f"{value:>16}" for value in values))
    return "\n".join(lines)


def main() -> None:
    """Print the measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--against", metavar="REVISION", help="a revision of git to measure beside the tree")
    args = parser.parse_args()
    houses = {args.against: measured_at(args.against)} if args.against else {}
    houses["now"] = measure(ROOT)
    if args.json:
        print(json.dumps({name: asdict(house) for name, house in houses.items()}, indent=2))
    else:
        print(table(houses))
        for name in houses["now"].forwarding_classes:
            print(f"only forwards: {name}", file=sys.stderr)


if __name__ == "__main__":
    main()
