"""Workflows, hooks and templates name targets, files and programs that exist."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.architecture.source import ROOT

GITHUB = ROOT / ".github"
WORKFLOWS = {path.name: yaml.safe_load(path.read_text("utf-8")) for path in (GITHUB / "workflows").glob("*.yml")}
RULES = dict(re.findall(r"^([a-z-]+):(?: .*)?\n((?:\t.*\n)*)", (ROOT / "Makefile").read_text("utf-8"), re.M))
"""Target of the Makefile -> its commands."""
TESTS = r"-m (pytest|tests\.)"


def made(workflow: dict[Any, Any]) -> list[str]:
    """Targets that a workflow hands to ``make.yml``."""
    jobs = [job for job in workflow["jobs"].values() if job.get("uses") == "./.github/workflows/make.yml"]
    return [target for job in jobs for target in json.loads(job["with"]["targets"])]


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_calls_what_exists(name: str) -> None:
    workflow = WORKFLOWS[name]
    assert workflow[True] and workflow["permissions"] == {"contents": "read"}  # YAML 1.1 reads the key `on` as true
    called = made(workflow)
    for job in workflow["jobs"].values():
        assert ("uses" in job) != ("runs-on" in job and "timeout-minutes" in job)
        assert "uses" not in job or (ROOT / job["uses"]).is_file()
        for run in (step["run"] for step in job.get("steps", ()) if "run" in step):
            program = run.split()[0]
            assert program == "make" or os.access(ROOT / program, os.X_OK), run
            called += re.findall(r"\bmake ([a-z-]+)", run)
    assert (called or name == "make.yml") and set(called) <= set(RULES)


def test_every_long_form_runs_nightly() -> None:
    tests = {target for target, commands in RULES.items() if re.search(TESTS, commands)}
    by_hand = {"image-jobs"}  # wants root and an image that was built before
    assert set(made(WORKFLOWS["nightly.yml"])) == tests - set(made(WORKFLOWS["ci.yml"])) - by_hand and len(tests) > 8
    assert {"lint", "docs", "dist", "test"} == set(made(WORKFLOWS["ci.yml"]))


def test_hooks_run_what_is_installed() -> None:
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))["repos"]
    pinned = {line.split("==")[0] for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines()}
    programs = {Path(hook["entry"].split()[0]).name for hook in repo["hooks"]}
    assert programs == {"ruff", "codespell", "mypy", "lint-imports"}
    assert {program.replace("lint-imports", "import-linter") for program in programs} <= pinned
    assert all(re.search(rf"\$\(BIN\)/{program}\b", RULES["lint"]) for program in programs)


@pytest.mark.parametrize("page", sorted(GITHUB.rglob("*.md")), ids=lambda page: page.name)
def test_pages_name_what_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    named = [path for path in re.findall(r"`([\w./-]+\.(?:md|py))`", text) if "/" in path or path.isupper()]
    assert [link for link in links if not (page.parent / link).is_file()] == []
    assert [path for path in named if not (ROOT / path).is_file()] == []
    assert set(re.findall(r"`make ([a-z-]+)`", text)) <= set(RULES)


def test_error_lines_name_extras_that_exist() -> None:
    """What a recipe may miss is told with the extra that brings it."""
    section = (ROOT / "pyproject.toml").read_text("utf-8").partition("[project.optional-dependencies]\n")[2]
    extras = set(re.findall(r"^([a-z]+) = \[", section.partition("\n[")[0], re.M))
    told = {
        name for path in (ROOT / "mopd").rglob("*.py") for name in re.findall(r"mopd\[(\w+)\]", path.read_text("utf-8"))
    }
    assert {"ray", "vllm", "vision", "wandb"} <= told <= extras


def test_the_citation_has_what_the_format_asks_for() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert {"cff-version", "message", "title", "authors", "license"} <= set(cited)
    assert f'license = "{cited["license"]}"' in (ROOT / "pyproject.toml").read_text("utf-8")
