"""Which rows of the table "Owed on a GPU" in docs/performance.md the results of ``tools/gpu_check.sh`` can fill.

A row names where it is checked: a file of tests, whose stage leaves a log, or a stage of ``tools/gpu_student.py``,
which leaves its figures. The standard library is enough.

    python tools/gpu_rows.py benchmarks/nvidia-h100-2026-01-01       # what all results' names begin with
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "performance.md"
LOGS = {"tests/gpu/test_benchmark.py": "goals"}
"""Tests -> the stage of ``gpu_check.sh`` that runs them."""


def rows(page: str) -> list[tuple[str, str]]:
    """Return each row of the table as what is owed and the name of where it is checked: a file, or a stage."""
    section = page.split("\n## Owed on a GPU\n")[1].split("\n## ")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return [(owed, re.findall(r"`([^`]+)`", place)[-1]) for owed, _, place in cells[2:]]


def reason_against(place: str, results: str) -> str:
    """Return why a row cannot be filled, or nothing if it can."""
    if place in LOGS:
        log = Path(f"{results}-{LOGS[place]}.log")
        passed = re.search(r"(\d+) (?:passed|failed)", log.read_text(errors="replace")) if log.is_file() else None
        return "" if passed else f"no test of stage {LOGS[place]} ran"
    found = Path(f"{results}-student.json")
    stages = json.loads(found.read_text())["stages"] if found.is_file() else []
    stage = next((one for one in stages if one["name"] == place), None)
    if stage is None:
        return "stage student did not run"
    return "" if stage["figures"] else f"{place}: {stage['reason'] or stage['status']}"


def main(results: str) -> None:
    """Print a line for each row."""
    found = [(owed, reason_against(place, results)) for owed, place in rows(PAGE.read_text(encoding="utf-8"))]
    print(
        f"== docs/performance.md, Owed on a GPU: {sum(not why for _, why in found)} of {len(found)} rows can be filled"
    )
    for owed, why in found:
        print(f"   {'no ' if why else 'yes'} {owed}{f' ({why})' if why else ''}")


if __name__ == "__main__":
    main(sys.argv[1])
