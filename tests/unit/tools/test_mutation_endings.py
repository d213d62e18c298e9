"""The run of mutations counts a kill only where the mutation alone is its cause: tried on a small repository."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.mutations import run

ROOT = Path(__file__).parents[3]

FILES = {
    "mopd/__init__.py": "",
    "mopd/sound/it.py": "def more(number):\n    return number + 1\n\n\ndef unseen(number):\n    return number * 2\n",
    "mopd/shaky/it.py": "def less(number):\n    return number - 1\n",
    "mopd/ends/it.py": "import os\n\n\ndef end(number):\n    if number < 0:\n        os._exit(4)\n",
    "mopd/lost/it.py": "def f(number):\n    return number + 0\n",
    "tests/unit/sound/test_sound.py": "from mopd.sound.it import more\n\n\ndef test_more():\n    assert more(5) == 6\n",
    # Fails whatever the file says.
    "tests/unit/shaky/test_shaky.py": "from mopd.shaky.it import less\n\n\ndef test_it():\n    assert less(5) == 99\n",
    # The name of its case comes from what is mutated.
    "mopd/named/it.py": "MOST = 3\n",
    "tests/unit/named/test_named.py": "import pytest\n\nfrom mopd.named.it import MOST\n\n\n"
    "@pytest.mark.parametrize('number', [MOST])\ndef test_it(number):\n    assert number == 3\n",
    # Ends the process of the mutant alone.
    "tests/unit/ends/test_ends.py": "from mopd.ends.it import end\n\n\ndef test_end():\n    end(1)\n",
    # Ends every process.
    "tests/unit/lost/test_lost.py": "import os\n\nfrom mopd.lost.it import f\n\n\ndef test_it():\n    os._exit(f(3))\n",
}
LINES: dict[str, tuple[int, ...]] = {
    "mopd/sound/it.py": (2, 6),
    "mopd/shaky/it.py": (2,),
    "mopd/ends/it.py": (5,),
    "mopd/lost/it.py": (2,),
    "mopd/named/it.py": (1,),
}


TRY = """
import sys
from pathlib import Path
from tests.mutations import run
run.ROOT = Path(sys.argv[1])
places = [place.rsplit(":", 1) for place in sys.argv[3:]]
for one in run.try_all([next(run.mutations_of(7, file, int(line))) for file, line in places], Path(sys.argv[2])):
    print("ended", f"{one['file']}:{one['line']}", one["ending"])
"""
"""In a process of its own, as ``make mutations``: it forks, and the tests' own processes have threads."""
PLACES = [f"{file}:{line}" for file, lines in LINES.items() for line in lines]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "repository"
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    subprocess.run(["git", "init", "--quiet"], cwd=root, check=True, timeout=60)
    return root


def endings(repository: Path, results: Path, places: list[str]) -> dict[str, str]:
    """Place -> how its first mutation ended."""
    command = [sys.executable, "-c", TRY, str(repository), str(results), *places]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=600)
    told = (line.split() for line in done.stdout.splitlines() if line.startswith("ended "))
    return {place: ending for _, place, ending in told}


EXPECTED = {
    "mopd/sound/it.py:2": "killed",
    "mopd/sound/it.py:6": "survived",
    "mopd/shaky/it.py:2": "unclear",
    "mopd/ends/it.py:5": "killed",
    "mopd/lost/it.py:2": "unclear",
    "mopd/named/it.py:1": "killed",
}


@pytest.mark.long
def test_only_what_the_mutation_caused_is_a_kill(repository: Path) -> None:
    """Statuses of pytest that say nothing, and a test that always fails, are tried on the unchanged copy."""
    results = repository.parent / "results"
    assert endings(repository, results, PLACES) == EXPECTED
    known = results.read_text()
    assert endings(repository, results, PLACES) == EXPECTED and results.read_text() == known


def test_a_changed_test_is_run_again(repository: Path) -> None:
    results, one = repository.parent / "results", PLACES[1:2]
    assert endings(repository, results, one) == {"mopd/sound/it.py:6": "survived"}
    (repository / "tests" / "unit" / "sound" / "test_unseen.py").write_text(
        "from mopd.sound.it import unseen\n\n\ndef test_unseen():\n    assert unseen(3) == 6\n"
    )
    assert endings(repository, results, one) == {"mopd/sound/it.py:6": "killed"}
    assert len(results.read_text().splitlines()) == 2


def of(ending: str, number: int) -> dict[str, Any]:
    return {"file": "a.py", "line": number, "before": f"{number}", "after": "0", "ending": ending, "tests": ["t.py"]}


def test_the_run_writes_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Reasons are kept, what is killed now is left out, and what is new has room for a reason."""
    monkeypatch.setattr(run, "ROOT", tmp_path)
    known = [
        {"file": "a.py", "before": "1", "after": "0", "equivalent": True, "reason": "the same"},
        {"file": "a.py", "before": "2", "after": "0", "equivalent": False, "reason": "slow tests"},
        {"file": "a.py", "before": "3", "after": "0", "equivalent": True, "reason": "unclear now"},
        {"file": "a.py", "before": "9", "after": "0", "equivalent": True, "reason": "killed now"},
    ]
    (tmp_path / "survivors.yaml").write_text(yaml.safe_dump(known))
    found = [of("survived", 1), of("survived", 2), of("unclear", 3), of("survived", 4), of("killed", 9)]
    assert not run.report(found, tmp_path, is_whole=True)
    listed = yaml.safe_load((tmp_path / "survivors.yaml").read_text())
    new = {"file": "a.py", "before": "4", "after": "0", "equivalent": False, "reason": ""}
    assert listed == [*known[:2], {**known[2], "equivalent": False}, new]
    counts = {"tried": 5, "killed": 1, "survived": 2, "equivalent": 1, "unclear": 1, "without_reason": 1}
    assert yaml.safe_load((tmp_path / "outcome.yaml").read_text()) == {**counts, "killed_share": 0.25}
    assert "a.py:4 (survived)\n  - 4\n  + 0\n  NO REASON YET\n  tests: t.py\n" in capsys.readouterr().out


@pytest.mark.parametrize(("reason", "is_enough"), [("", False), ("slow tests", True)])
def test_enough_is_nine_of_ten_with_a_reason_for_each_other(tmp_path: Path, reason: str, is_enough: bool) -> None:
    (tmp_path / "survivors.yaml").write_text(
        yaml.safe_dump([{"file": "a.py", "before": "0", "after": "0", "equivalent": False, "reason": reason}])
    )
    before = (tmp_path / "survivors.yaml").read_text()
    found = [of("survived", 0), *(of("killed", number) for number in range(1, 10))]
    assert run.report(found, tmp_path, is_whole=False) == is_enough
    assert not run.report([*found, of("unclear", 10)], tmp_path, is_whole=False)
    assert (tmp_path / "survivors.yaml").read_text() == before and not (tmp_path / "outcome.yaml").exists()


def test_every_survivor_that_is_kept_has_a_reason() -> None:
    for one in run.read_survivors().values():
        assert one["reason"].strip(), one
        assert not (one["equivalent"] and "limit or a pace" in one["reason"]), one
