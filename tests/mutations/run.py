"""Mutation tests: one small change of ``mopd`` at a time, held against the fast unit tests of the changed file.

``make mutations`` tries 200, sampled over all rooms; mutations are Cosmic Ray's. What survives is printed and written
into ``survivors.yaml``, where each wants a reason; ``outcome.yaml`` has the numbers. The sample hangs on the text of
lines alone: a change elsewhere keeps it.

A mutant is written into a copy of the repository, and its tests run in a fork of this process, which has imported torch
and the like already and never imports ``mopd``. How that ends:

======== ==============================================================================================================
killed   a test fails, and does not on the unchanged copy; or the run ends in another way (time, a crash, an exit), and
         the same tests pass on the unchanged copy
unclear  the unchanged copy ends no better: nothing is known, and it counts as not killed
survived no test fails
======== ==============================================================================================================
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import importlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent
SURVIVORS, OUTCOME = "survivors.yaml", "outcome.yaml"
HEAD = """\
# Written by `make mutations`, which keeps `equivalent` and `reason`: mutations that the fast unit tests do not see.
# `equivalent`: no test could see it. The others are seen by slower tests, or by none; the reason says so.
"""
COUNT, SEED = 200, 0
WANTED_SHARE = 0.9
MAX_TEST_FILES = 12
"""Nearest tests that a mutant is held against."""
LEAST_OF_ROOM = 2
LIMIT_S = 400
"""For one mutant, and again for its tests on the unchanged copy."""
PASSED, FAILED, INTERRUPTED, NOT_FOUND, NO_TESTS = 0, 1, 2, 4, 5
"""Exit codes of pytest; it is interrupted by a file that cannot be collected."""
SLOW = "not (slow or multirank or gpu or vllm or ray)"
UNREAD = ("#", '"""', "@dataclass", "import ", "from ", "def ", "class ", ")", "]", "}")
"""Beginnings of lines that are left alone: nothing reads them, or without them nothing is imported. The flags of a
dataclass guard against what nobody does."""
HEAVY = ("torch", "numpy", "transformers", "pyarrow.parquet", "hypothesis", "fastapi", "httpx", "jsonschema")
"""Imported once, before all forks."""


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """One change of one line."""

    file: str
    line: int
    operator: str
    occurrence: int
    before: str
    after: str

    @property
    def key(self) -> tuple[str, str, str]:
        """What identifies it however the lines above change."""
        return self.file, self.before, self.after


def digest(*parts: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big")


def sample(count: int, seed: int) -> list[Mutation]:
    """Mutations of lines in the order of their hashes, of each room by its share of the lines, two at least."""
    rooms: dict[str, list[tuple[int, str, int]]] = defaultdict(list)
    for path in sorted((ROOT / "mopd").rglob("*.py")):
        file = path.relative_to(ROOT).as_posix()
        seen: dict[str, int] = defaultdict(int)
        for number, text in enumerate(path.read_text().splitlines(), 1):
            if not text.lstrip().startswith(UNREAD) and text.strip():
                seen[text] += 1
                rooms[file.split("/")[1]].append((digest(seed, file, text, seen[text]), file, number))
    whole = sum(map(len, rooms.values()))
    found: list[Mutation] = []
    for lines in rooms.values():
        wanted = max(LEAST_OF_ROOM, round(count * len(lines) / whole))
        mutations = (mutation for line in sorted(lines) for mutation in mutations_of(*line))
        found += itertools.islice(mutations, wanted)
    return sorted(found, key=lambda mutation: digest(seed, mutation.key))


@cache
def operators() -> dict[str, Any]:
    from cosmic_ray.plugins import get_operator, operator_names

    kinds = {name: get_operator(name) for name in operator_names() if "RemoveDecorator" not in name}
    return {name: kind() for name, kind in kinds.items() if not kind.arguments()}


@cache
def parsed(file: str) -> tuple[str, list[Any]]:
    """The text of a file, and the nodes of its tree."""
    from cosmic_ray.ast import ast_nodes, get_ast

    source = (ROOT / file).read_text()
    return source, list(ast_nodes(get_ast(source)))


def mutate(file: str, operator: str, occurrence: int) -> str | None:
    """The text of a file with one mutation."""
    from cosmic_ray.mutating import mutate_code

    return mutate_code((ROOT / file).read_text(), operators()[operator], occurrence)


def mutations_of(order: int, file: str, line: int) -> Iterator[Mutation]:
    """At most one mutation of a line: none where nothing can be changed, or only what a run never reads."""
    source, nodes = parsed(file)
    near = [node for node in nodes if node.start_pos[0] <= line <= node.end_pos[0]]
    kinds: dict[str, list[str]] = defaultdict(list)
    for name, operator in operators().items():
        if any(first[0] == line for node in near for first, _ in operator.mutation_positions(node)):
            kinds[name.split("_")[0]].append(name)
    for kind in sorted(kinds, key=lambda kind: digest(order, kind)):
        name = min(kinds[kind], key=lambda name: digest(order, name))
        places = [first[0] for node in nodes for first, _ in operators()[name].mutation_positions(node)]
        occurrence = min((i for i, place in enumerate(places) if place == line), key=lambda i: digest(order, i))
        code = mutate(file, name, occurrence)
        if code is None or read_of(code) in (None, read_of(source)):
            continue
        old, new = source.splitlines(), code.splitlines()
        changed = [i for i in range(len(old)) if i >= len(new) or old[i] != new[i]]
        low, high = changed[0], changed[-1] + 1
        yield Mutation(
            file=file,
            line=low + 1,
            operator=name,
            occurrence=occurrence,
            before=" ".join(text.strip() for text in old[low:high]),
            after=" ".join(text.strip() for text in new[low : high + len(new) - len(old)]),
        )
        return


def read_of(source: str) -> str | None:
    """The syntax tree without annotations, which nothing evaluates; ``None`` where there is none (``f(-, x)``)."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        for name in ("annotation", "returns"):
            if getattr(node, name, None) is not None:
                setattr(node, name, ast.Constant(value=None))
    return ast.dump(tree)


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
    return found


class NearTests:
    """Which unit tests are near a file: they import it, or what imports it."""

    def __init__(self) -> None:
        self.imports = {
            path.relative_to(ROOT).as_posix(): imports_of(path)
            for folder in ("mopd", "tests/unit")
            for path in sorted((ROOT / folder).rglob("*.py"))
        }

    def of(self, file: str) -> list[str]:
        """The nearest files of tests: those that import it, those of its room, those that import what imports it."""
        found: list[str] = []
        modules = {file}
        room = Path("tests/unit", *Path(file).parts[1:-1][:1]).as_posix()
        beside = [path for path in self.imports if path.startswith(room + "/")]
        for _ in range(3):
            names = {module.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for module in modules}
            importers = {path for path, imported in self.imports.items() if imported & names}
            for paths in (importers, beside):
                tests = [path for path in paths if Path(path).name.startswith("test_") and path not in found]
                found += sorted(tests, key=lambda path: self._distance(path, file))
            if len(found) >= MAX_TEST_FILES:
                break
            modules = {path for path in importers if not Path(path).name.startswith("test_")}
            beside = []
        return found[:MAX_TEST_FILES]

    def _distance(self, test: str, file: str) -> tuple[bool, bool, int, str]:
        room = file.removeprefix("mopd/").rpartition("/")[0]
        names_it = Path(file).stem in Path(test).stem
        return not names_it, not test.startswith(f"tests/unit/{room}".rstrip("/")), len(self.imports[test]), test


class Copy:
    """A copy of the repository in which tests run, of one mutant after the other."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "repository"
        self._temp = folder / "temp"
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.run(listed, cwd=ROOT, capture_output=True, check=True, text=True).stdout.split("\0"):
            if name and (ROOT / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name)

    @contextlib.contextmanager
    def changed(self, mutation: Mutation) -> Iterator[None]:
        code = mutate(mutation.file, mutation.operator, mutation.occurrence)
        assert code is not None, f"{mutation} cannot be made again: has the file changed?"
        (self.root / mutation.file).write_text(code)
        try:
            yield
        finally:
            shutil.copy2(ROOT / mutation.file, self.root / mutation.file)

    def run(self, tests: Sequence[str], log: Path, *, limit_s: float, stops: bool = True) -> int | None:
        """Exit status of pytest, which ``stops`` at the first failure; ``None`` when it ran out of time."""
        sys.stdout.flush()
        log.with_suffix(".failed").unlink(missing_ok=True)
        child = os.fork()
        if child == 0:
            os._exit(self._run_here(tests, log, stops=stops))
        deadline = time.monotonic() + limit_s
        while True:
            done, status = os.waitpid(child, os.WNOHANG)
            if done or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # with what tests have left
        if not done:
            os.waitpid(child, 0)
        shutil.rmtree(self._temp, ignore_errors=True)
        return os.waitstatus_to_exitcode(status) if done else None

    def _run_here(self, tests: Sequence[str], log: Path, *, stops: bool) -> int:
        import pytest

        os.setsid()
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for number in (1, 2):
            os.dup2(descriptor, number)
        os.chdir(self.root)
        for name in [name for name in sys.modules if name.partition(".")[0] in ("mopd", "tests", "tools")]:
            del sys.modules[name]
        sys.path[:] = [str(self.root), *(entry for entry in sys.path if entry not in ("", str(ROOT)))]
        os.environ["PYTHONPATH"] = str(self.root)
        # A mutant as long as the original, within its second, would be taken for it.
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        recorder = Recorder()
        options = [
            *(["-x"] if stops else []),
            "--timeout=120",
            "-p",
            "no:cacheprovider",
            f"--basetemp={self._temp}",
            "-m",
            SLOW,
        ]
        status = int(pytest.main([*options, *tests], plugins=[recorder]))
        log.with_suffix(".failed").write_text("\n".join(recorder.failed))
        return status


class Recorder:
    """A plugin of pytest: which tests and files failed."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    pytest_collectreport = pytest_runtest_logreport


def failed(log: Path) -> list[str]:
    """Tests that failed in the last run; none where it did not come to its end."""
    file = log.with_suffix(".failed")
    return file.read_text().splitlines() if file.exists() else []


class Trial:
    """Tries mutants one after the other; ``results`` keeps a line of each for the next start."""

    def __init__(self, folder: Path, results: Path) -> None:
        self.copy, self.near = Copy(folder), NearTests()
        self._log, self._results = folder / "log", results
        known = map(json.loads, results.read_text().splitlines()) if results.exists() else ()
        self._known = {(one["file"], one["before"], one["after"], one.get("read")): one for one in known}

    def outcome(self, mutation: Mutation) -> dict[str, Any]:
        """How one ended. What is known is not tried again, unless the file or its tests have changed since."""
        tests = self.near.of(mutation.file)
        read = f"{digest(*((ROOT / path).read_text() for path in (mutation.file, *tests))):016x}"
        known = self._known.get((*mutation.key, read))
        if known is not None:
            return known
        began = time.monotonic()
        with self.copy.changed(mutation):
            status = self.copy.run(tests, self._log, limit_s=LIMIT_S) if tests else NO_TESTS
        by = failed(self._log)[:1] if status in (FAILED, INTERRUPTED) else []
        if status in (PASSED, NO_TESTS):
            ending = "survived"
        elif by:
            ending = "killed"  # until ``confirm``
        else:
            unchanged = self.copy.run(tests, self._log, limit_s=LIMIT_S)
            ending = "killed" if unchanged == PASSED else "unclear"
        seconds = round(time.monotonic() - began, 1)
        one = asdict(mutation) | {"ending": ending, "status": status, "by": by, "tests": tests, "seconds": seconds}
        with self._results.open("a") as file:
            file.write(json.dumps(one | {"read": read}) + "\n")
        return one

    def confirm(self, found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """``found``, where no test counts that fails without a mutation, too."""
        killers = sorted({name for one in found if one["ending"] == "killed" for name in one["by"]})
        files = sorted({name.partition("::")[0] for name in killers})
        status = self._run_unchanged(killers)
        if status == NOT_FOUND:  # a case that only the mutant has, as its name comes from what was mutated
            status = self._run_unchanged(files)
        if status not in (PASSED, FAILED, INTERRUPTED):
            raise SystemExit(f"tests that killed do not come to their end on the unchanged copy ({status})")
        failing = set(failed(self._log))
        bad = {name for name in killers if failing & {name, name.partition("::")[0]}}
        for name in sorted(bad):
            print(f"fails without a mutation, too: {name}")
        return [one | ({"ending": "unclear"} if bad & {*one["by"]} else {}) for one in found]

    def _run_unchanged(self, tests: Sequence[str]) -> int | None:
        return self.copy.run(tests, self._log, limit_s=30 * LIMIT_S, stops=False) if tests else PASSED


def try_all(mutations: Sequence[Mutation], results: Path) -> list[dict[str, Any]]:
    """How each ended: ``killed``, ``unclear`` or ``survived``."""
    found = []
    with tempfile.TemporaryDirectory(prefix="mopd-mutations-") as folder:
        trial = Trial(Path(folder), results)
        for number, mutation in enumerate(mutations, 1):
            one = trial.outcome(mutation) | {"line": mutation.line}
            found.append(one)
            print(f"{number:4} {one['ending']:8} {one['seconds']:6.1f} s  {mutation.file}:{mutation.line}", flush=True)
        return trial.confirm(found)


def read_survivors(folder: Path = FOLDER) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Known survivors by ``Mutation.key``: ``reason``, and ``equivalent`` where no test could tell."""
    file = folder / SURVIVORS
    listed = (yaml.safe_load(file.read_text()) if file.exists() else None) or []
    return {(one["file"], one["before"], one["after"]): one for one in listed}


def report(found: Sequence[dict[str, Any]], folder: Path, *, is_whole: bool) -> bool:
    """Print what was not killed, and the numbers; whether enough was, and all else has a reason.

    Args:
        found: of ``try_all``.
        folder: has ``survivors.yaml``.
        is_whole: nothing of the sample is left out: write both files anew.
    """
    reasons = read_survivors(folder)
    listed: list[dict[str, Any]] = []
    for one in found:
        if one["ending"] != "killed":
            known = reasons.get((one["file"], one["before"], one["after"]), {})
            listed.append(
                {
                    **{key: one[key] for key in ("file", "before", "after")},
                    # What is unclear is not known to be equivalent.
                    "equivalent": bool(known.get("equivalent")) and one["ending"] == "survived",
                    "reason": known.get("reason", ""),
                }
            )
            print(f"\n{one['file']}:{one['line']} ({one['ending']})\n  - {one['before']}\n  + {one['after']}")
            print(f"  {listed[-1]['reason'] or 'NO REASON YET'}\n  tests: {' '.join(one['tests']) or 'none'}")
    numbers = Counter(one["ending"] for one in found)
    equivalent, unreasoned = sum(one["equivalent"] for one in listed), sum(not one["reason"] for one in listed)
    share = numbers["killed"] / max(1, len(found) - equivalent)
    counts = {"tried": len(found), "killed": numbers["killed"], "survived": numbers["survived"] - equivalent}
    counts |= {"equivalent": equivalent, "unclear": numbers["unclear"], "without_reason": unreasoned}
    print("\n" + ", ".join(f"{key} {value}" for key, value in counts.items()))
    print(f"{share:.1%} of those that are not equivalent are killed, {WANTED_SHARE:.0%} are wanted")
    if is_whole:
        for name, head, content in (
            (SURVIVORS, HEAD, listed),
            (OUTCOME, "# Written by `make mutations`.\n", {**counts, "killed_share": round(share, 4)}),
        ):
            text = yaml.safe_dump(content, sort_keys=False, width=120, allow_unicode=True)
            (folder / name).write_text(head + text)
            print(f"written: {(folder / name).relative_to(ROOT)}")
    return share >= WANTED_SHARE and not unreasoned


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--most", type=int, help="only the first so many of the sample; writes no numbers")
    parser.add_argument("--results", type=Path, default=ROOT / "runs" / "mutations.jsonl")
    args = parser.parse_args()
    mutations = sample(args.count, args.seed)[: args.most]
    args.results.parent.mkdir(parents=True, exist_ok=True)
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRITON_INTERPRET": "1"}
    for name in HEAVY:
        importlib.import_module(name)
    is_whole = args.most is None and (args.count, args.seed) == (COUNT, SEED)
    raise SystemExit(0 if report(try_all(mutations, args.results), FOLDER, is_whole=is_whole) else 1)


if __name__ == "__main__":
    main()
