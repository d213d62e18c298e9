"""The errors that ``docs/troubleshooting.md`` quotes are those that the code prints."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from tests.architecture.source import ROOT, trees

PAGE = ROOT / "docs" / "troubleshooting.md"
GAP = "\0"


@cache
def texts_of_the_package() -> list[str]:
    """Every text of the package; what is filled in is one ``GAP``."""
    found = []
    for tree in trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(part.value if isinstance(part, ast.Constant) else GAP for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    job = (ROOT / "mopd/launch/slurm/job.sh.j2").read_text(encoding="utf-8")
    return [*found, *re.sub(r"\$\w+|\{\{.*?\}\}", GAP, job).splitlines()]


def quoted() -> list[str]:
    """Messages in the first column of tables whose head says ``message``; each span in backticks is one."""
    spans: list[str] = []
    is_table = False
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| message"):
            is_table = True
        elif not line.startswith("|"):
            is_table = False
        elif is_table and not line.startswith("|---") and not cells[0].startswith("CUDA"):
            spans += re.findall(r"`([^`]+)`", cells[0])
    return spans


def stands_in_the_package(message: str) -> bool:
    """Its parts between ``…`` follow one another in one text, with something filled in between them."""
    parts = [re.escape(part.strip()) for part in message.split("…") if part.strip(" ()")]
    pattern = re.compile(rf"[^{GAP}]*{GAP}[^{GAP}]*".join(parts))
    return any(pattern.search(text) for text in texts_of_the_package())


def test_messages_are_found_and_others_are_not() -> None:
    assert len(quoted()) > 15
    assert stands_in_the_package("is not empty: add --resume") and stands_in_the_package(
        "differs from the run to resume"
    )
    assert not stands_in_the_package("the moon is in the way") and not stands_in_the_package("resume … differs from")


@pytest.mark.parametrize("message", quoted())
def test_the_code_prints_it(message: str) -> None:
    assert stands_in_the_package(message)
