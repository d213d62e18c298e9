"""What the images are made of: files that lint, packages that are pinned, commands of services that mopd takes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from mopd.cli.main import parse
from mopd.config.load import load_recipe
from mopd.config.placements import RegisteredConfig
from tests.architecture.source import ROOT

DOCKER = ROOT / "docker"
DOCKERFILES = sorted(DOCKER.glob("Dockerfile.*"))
SCRIPTS = sorted(DOCKER.glob("*.sh"))


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_has_nothing_to_say(path: Path) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([str(hadolint), str(path)], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_has_nothing_to_say(path: Path) -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([str(shellcheck), str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_images_are_pinned_and_not_roots(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert re.search(r"^FROM \S+:\d+\.\d+[\w.-]*$", text, re.M)
    assert re.findall(r"^USER (.*)$", text, re.M) == ["1000:1000"]
    assert "HEALTHCHECK" in text and "org.opencontainers.image.version" in text
    assert not re.search(r"(TOKEN|PASSWORD|SECRET)=", text)
    for source in re.findall(r"^COPY (.*) \S+$", text, re.M):
        assert all((ROOT / word).exists() for word in source.split()), source


def printed(*arguments: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, str(DOCKER / "requirements.py"), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.split("\n")[:-1]


def test_requirements_of_an_image() -> None:
    plain = printed("wanted")
    assert any(line.startswith("torch>=") for line in plain) and not any(line.startswith("ray") for line in plain)
    without = printed("wanted", "--extras", "ray,dev", "--without", "torch,triton")
    assert {"ray==2.60.0", "mkdocs>=1.6,<2"} <= set(without)
    assert not [line for line in without if re.match(r"(torch|triton|mopd)\b", line)]
    assert [line for line in printed("pins") if line.startswith(("torch==", "numpy=="))] == []


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, object]]:
    found = yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))["services"]
    assert isinstance(found, dict)
    return found


def test_commands_of_services_are_mopds_and_their_recipe_loads(
    services: dict[str, dict[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    served = set()
    for name, service in services.items():
        command = service["command"]
        assert isinstance(command, list)
        if command[0] != "mopd":
            continue
        args = parse(command[1:])
        recipe = load_recipe(args.recipe, args.set).recipe
        assert all(isinstance(teacher.placement, RegisteredConfig) for teacher in recipe.teachers.values())
        if command[1] == "serve":
            served.add(args.teacher)
            assert args.host == name
            assert service["environment"] == {"MOPD_HEALTH_URL": f"http://{name}:{args.port}/health"}
            assert str(args.register) == "runs/compose/replicas"
        else:
            assert recipe.run_dir == "runs/compose"
            assert served == set(recipe.teachers)


def test_services_have_no_rights_that_they_do_not_need(services: dict[str, dict[str, object]]) -> None:
    for service in services.values():
        assert service["user"] == "1000:1000" and service["cap_drop"] == ["ALL"]
        for port in service.get("ports", []):  # type: ignore[attr-defined]
            assert str(port).startswith("127.0.0.1:")
