"""Measure what each loss, schedule and baseline learns on each toy, three seeds each: tables of
``docs/learning.md``, and by payload of ``docs/losses.md``.

    python tools/measure_learning.py                              # all; two CPU cores: see docs/learning.md
    python tools/measure_learning.py --only forward_kl stochastic # contenders and toys by name
    python tools/measure_learning.py --table                      # write the tables of what is there into the pages

Each run that ended is kept under a hash of its recipe and its toy, so that the tool goes on where it stopped, and
measures anew where a toy or a recipe has changed (a new key, too); with ``--missing`` it runs only what no recipe has a
result of. A run that failed, by its own line, is a result too; ``--retry`` tries those again. After ``--minutes`` no
run begins. Left out on purpose: any judgement.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ is None or __package__ == "":  # run as a file: make `tools` importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mopd.base.types import UserError
from mopd.config.load import Loaded, flatten, load_recipe
from mopd.report.build import headroom_recovery
from tools import make_toys
from tools.learning.contenders import CONTENDERS, OF_PAYLOADS, TOYS, Contender
from tools.learning.tables import fill
from tools.quickstart.cache import fingerprint

ROOT = Path(__file__).resolve().parents[1]
PAGES = {ROOT / "docs/learning.md": False, ROOT / "docs/losses.md": True}
"""Page -> whether its tables are those of payloads, or the others."""
RECORD = ROOT / "benchmarks/learning.jsonl"
"""Results behind the page's tables, a line each: they count as done in every checkout."""
RUN_TIMEOUT_S = 1800.0
"""Deadline of one run: many times what any takes."""
RECIPES = {"quickstart": "quickstart.yaml", "self": "self_distillation.yaml"}
SETTINGS = {
    "quickstart": (
        "student.parallel.tensor_model_parallel_size=1",
        "checkpoint.every_steps=1000",
        "validation.every_steps=50",
        "data.domain_weights={reversal: 1, sorting: 1, next_letter: 1}",
    ),
    "self": ("checkpoint.every_steps=1000", "validation.every_steps=50", "schedule.steps=100"),
}
"""One process, no checkpoint that nobody reads, and equal shares of the domains, as in the other toys; the recipe's own
shares are a contender."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of the tables."""

    contender: Contender
    toy: str
    seed: int
    loaded: Loaded
    overrides: tuple[str, ...]
    assets: Path

    @property
    def recipe_file(self) -> Path:
        return _recipe_file(self.toy, self.assets)

    @property
    def line(self) -> tuple[str, str, int]:
        return self.contender.name, self.toy, self.seed

    @property
    def key(self) -> str:
        """Hash of everything that the result hangs on."""
        flat = {k: v for k, v in flatten(self.loaded.recipe).items() if k != "run_dir"}
        tree = json.dumps(flat, default=str).replace(str(ROOT), "")  # the same in every checkout
        made = {part: one["files"] for part, one in json.loads((self.assets / "manifest.json").read_text()).items()}
        return fingerprint(tree, made, self.contender.untrained)[:16]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """What a command printed and spent."""

    printed: str
    cpu_s: float
    """User and system seconds of its process and of all below it, each of which its parent waits for."""
    process_s: float
    """Wall seconds from its start to its end."""


def main() -> int:
    """Run what is missing; exit code 1 while some runs are missing, 2 for a contender that the loader refuses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="contenders or toys")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one thread each")
    parser.add_argument("--minutes", type=float, default=175.0, help="time after which no run begins")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/learning", metavar="FOLDER")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override keys of every recipe")
    parser.add_argument("--retry", action="store_true", help="run again what failed")
    parser.add_argument("--missing", action="store_true", help="only lines that no recipe, of today or before, has run")
    parser.add_argument("--list", action="store_true", help="print what would run, and whether its recipe is accepted")
    parser.add_argument("--table", action="store_true", help="only write the tables into their pages")
    args = parser.parse_args()
    if args.table:
        results = read_results(args.out)
        questions = dict.fromkeys(one.question for one in CONTENDERS)
        for page, of_payloads in PAGES.items():
            own = [question for question in questions if (question in OF_PAYLOADS) == of_payloads]
            page.write_text(fill(page.read_text(), results, own))
        RECORD.parent.mkdir(exist_ok=True)
        RECORD.write_text("".join(json.dumps(one, sort_keys=True) + "\n" for one in results))
        return 0
    try:
        cells = planned(args.only, args.seeds, args.set)
    except UserError as error:
        print(f"measure_learning: {error}", file=sys.stderr)
        return 2
    deadline = time.monotonic() + 60 * args.minutes
    done = done_keys(args.out, retry=args.retry)
    known = _by_line(read_results(args.out)) if args.missing else {}
    missing = [cell for cell in cells if cell.key not in done and cell.line not in known]
    print(f"{len(cells) - len(missing)} of {len(cells)} runs are done", flush=True)
    if args.list:
        print(*(f"{cell.key} {cell.contender.name}, {cell.toy}, seed {cell.seed}" for cell in missing), sep="\n")
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(args.jobs) as pool:
        num_done = sum(pool.map(lambda cell: time.monotonic() < deadline and measure(cell, args.out), missing))
    return int(num_done < len(missing))


def planned(only: Sequence[str], seeds: int, overrides: Sequence[str]) -> list[Cell]:
    """Return all runs of the contenders and toys named (all without names), seed after seed, so that an early stop
    leaves every line with as many seeds.

    Raises:
        UserError: a name that is none, or a contender with a key that the loader refuses.
    """
    names = {contender.name for contender in CONTENDERS}
    unknown = [name for name in only if name not in names and name not in TOYS]
    if unknown:
        known = ", ".join(map(repr, (*TOYS, *(one.name for one in CONTENDERS))))
        raise UserError(f"--only: {unknown[0]!r} is no contender and no toy: name some of {known}")
    chosen = [one for one in CONTENDERS if not names & set(only) or one.name in only]
    toys = [toy for toy in TOYS if not set(TOYS) & set(only) or toy in only]
    assets = {toy: _make(toy) for toy in toys if any(toy in one.toys for one in chosen)}
    cells = []
    for seed in range(seeds):
        for contender in chosen:
            for toy in toys:
                if toy in contender.toys and not (contender.untrained and (seed or toy == "stochastic")):
                    cells.append(_cell(contender, toy, seed, assets[toy], overrides))
    return cells


def _make(toy: str) -> Path:
    if toy in RECIPES:
        folder, needed = ROOT / "runs/quickstart_assets", "copier" if toy == "self" else "base"
        if not (folder / needed).exists():
            option = " --copier" if toy == "self" else ""
            raise UserError(
                f"{folder / needed} is not there: run python tools/make_quickstart.py{option}, or name other toys"
            )
        return folder
    make_toys.make(toy, ROOT / "runs/toys" / toy)
    return ROOT / "runs/toys" / toy


def _recipe_file(toy: str, assets: Path) -> Path:
    return ROOT / "recipes" / RECIPES[toy] if toy in RECIPES else assets / "recipe.yaml"


def _cell(contender: Contender, toy: str, seed: int, assets: Path, more: Sequence[str]) -> Cell:
    own = [override.replace("{toy}", toy).replace("{seed}", str(seed)) for override in contender.overrides]
    overrides = (*SETTINGS.get(toy, ()), *own, *more, f"seed={seed}")
    file = _recipe_file(toy, assets)
    try:
        loaded = load_recipe(file, overrides)
    except UserError as error:
        raise UserError(f"contender {contender.name!r} on {toy}: {error}") from error
    return Cell(contender=contender, toy=toy, seed=seed, loaded=loaded, overrides=overrides, assets=assets)


def done_keys(out: Path, *, retry: bool) -> set[str]:
    """Return the keys of the runs whose results are kept; with ``retry`` failed ones do not count."""
    return {one["key"] for one in read_results(out) if "key" in one and not (retry and "failed" in one)}


def read_results(out: Path) -> list[dict[str, Any]]:
    """Read the results of the record, and those of ``out``, which replace older ones of the same line, in a fixed
    order."""
    texts = RECORD.read_text().splitlines() if RECORD.exists() else []
    found = [json.loads(text) for text in (*texts, *(path.read_text() for path in sorted(out.glob("*.json"))))]
    known = _by_line(found)
    return [known[line] for line in sorted(known)]


def _by_line(results: Iterable[dict[str, Any]]) -> dict[tuple[str, str, int], dict[str, Any]]:
    """Return contender, toy and seed -> the last result of these."""
    return {(one["contender"], one["toy"], one["seed"]): one for one in results}


def measure(cell: Cell, out: Path) -> bool:
    """Run, score and keep one result; returns True."""
    folder, started = out / f"run-{cell.key}", time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    result: dict[str, Any] = {"key": cell.key, "contender": cell.contender.name, "toy": cell.toy, "seed": cell.seed}
    try:
        result |= _untrained(cell, folder) if cell.contender.untrained else _train(cell, folder)
    except subprocess.CalledProcessError as error:
        result["failed"] = next(reversed(error.stderr.strip().splitlines()), f"exit code {error.returncode}")[-300:]
    for path in out.glob("*.json"):  # of another recipe or toy: a table shows what is measured last
        if cell.line in _by_line([json.loads(path.read_text())]):
            path.unlink()
    draft = out / f"{cell.key}.partial"
    draft.write_text(json.dumps(result, indent=1))
    draft.replace(out / f"{cell.key}.json")
    shutil.rmtree(folder, ignore_errors=True)
    told = result.get("failed") or {name: result.get(name) for name in ("recovery", "distance")}
    print(
        f"{cell.contender.name}, {cell.toy}, seed {cell.seed}: {told} ({time.monotonic() - started:.0f} s)", flush=True
    )
    return True


def _train(cell: Cell, folder: Path) -> dict[str, Any]:
    from tools.learning.distance import distances  # it loads torch

    recipe = cell.loaded.recipe
    if recipe.data.scored:
        _keep_earlier_run(cell, Path(recipe.data.scored[0]).parent)
    ended = _mopd("train", str(cell.recipe_file), *cell.overrides, f"run_dir={folder}")
    report = json.loads((folder / "report.json").read_text())
    recovery = {name: one["headroom_recovery"] for name, one in report["domains"].items()}
    steps, lines = _lines(folder / "metrics.jsonl"), _lines(folder / "validation.jsonl") if recipe.validation else []
    return {
        "recovery": recovery,
        "domains": report["domains"],
        "wall_s": report["wall_s"],
        "cpu_s": ended.cpu_s,
        "process_s": ended.process_s,
        "curve": [(line["step"], line["rewards"]) for line in lines],
        "steps_s": [sum(one["timing/step_s"] for one in steps if one["step"] <= line["step"]) for line in lines],
        "validations_s": [line["wall_s"] for line in lines],
        "distance": {} if cell.toy == "self" else distances(recipe, folder / "hf"),
    }


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _keep_earlier_run(cell: Cell, kept: Path) -> None:
    """Make the run whose samples the contender trains on, unless it is there: the recipe as it is, of the same seed."""
    if (kept / "report.json").exists():
        return
    shutil.rmtree(kept, ignore_errors=True)
    plain = [own for own in cell.overrides if own in SETTINGS.get(cell.toy, ()) or own.startswith("seed=")]
    keeping = ("metrics.keep_samples=true", f"data.scores_cache={kept / 'scores'}", f"run_dir={kept}")
    _mopd("train", str(cell.recipe_file), *plain, *keeping)


def _untrained(cell: Cell, folder: Path) -> dict[str, Any]:
    """Validate the mean of the teachers' weights, or the teacher that is best over all domains, beside the student
    before training and each domain's teacher on the same prompts."""
    recipe, started = cell.loaded.recipe, time.monotonic()
    teachers = {teacher.domains[0]: teacher.model for teacher in recipe.teachers.values()}
    models = list(teachers.values())
    if cell.contender.untrained == "merge":
        _mopd("convert", "merge", str(folder), *models)
        models = [str(folder)]
    wall_s = time.monotonic() - started

    def rewards(model: str) -> dict[str, float]:
        ended = _mopd("eval", str(cell.recipe_file), *cell.overrides, "--model", model, "--json")
        found: dict[str, float] = json.loads(ended.printed)["rewards"]
        return found

    found = {model: rewards(model) for model in {*models, *teachers.values()}}
    before = rewards(recipe.student.model)
    after = max((found[model] for model in models), key=lambda own: sum(own.values()))
    own = {domain: found[model][domain] for domain, model in teachers.items()}
    recovery = {domain: headroom_recovery(before[domain], after[domain], own[domain]) for domain in own}
    return {"recovery": recovery, "wall_s": wall_s}


def _mopd(*arguments: str) -> Ended:
    return _run([sys.executable, "-m", "mopd", *arguments])


def _run(command: Sequence[str]) -> Ended:
    """Run a command to its end. ``CalledProcessError`` unless it succeeds within ``RUN_TIMEOUT_S``."""
    environment, started = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}, time.monotonic()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = subprocess.Popen(command, stdout=out, stderr=err, cwd=ROOT, env=environment)
        deadline = threading.Timer(RUN_TIMEOUT_S, child.kill)
        deadline.start()
        # The usage of this child alone: RUSAGE_CHILDREN would add what the other jobs run.
        _, status, usage = os.wait4(child.pid, 0)
        deadline.cancel()
        process_s = time.monotonic() - started
        child.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        if child.returncode:
            raise subprocess.CalledProcessError(child.returncode, command, out.read(), err.read())
        return Ended(printed=out.read(), cpu_s=usage.ru_utime + usage.ru_stime, process_s=process_s)


if __name__ == "__main__":
    sys.exit(main())
