"""Teachers behind servers that somebody else runs: the right ones pass the preflight, swapped ones never train."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from mopd.config.groups import TorchEngineConfig
from mopd.conversion.hf.manifest import HASHES, make_manifest
from mopd.engines.torch.engine import TorchEngine
from tests.fixtures.mistakes import MistakenEngine
from tests.fixtures.servers import running_server
from tests.integration.world import World, mopd

pytestmark = [pytest.mark.slow, pytest.mark.multirank]

ONE_RANK = {"tensor_model_parallel_size": 1}


@contextmanager
def served(engine: TorchEngine, folder: Path, *, port: int = 0) -> Iterator[str]:
    """URL of a server around ``engine`` that gives the hashes of ``folder``, as ``mopd serve`` does for its model."""
    hashes = asdict(make_manifest(folder, cache_file=folder.parent / "hashes.json"))
    with running_server(engine, port=port, manifest={name: hashes[name] for name in HASHES}) as server:
        yield server.url


@contextmanager
def teacher_server(folder: Path, *, port: int = 0) -> Iterator[str]:
    """URL of a server of the model in ``folder``."""
    with served(TorchEngine.from_pretrained(folder, TorchEngineConfig(dtype="float32")), folder, port=port) as url:
        yield url


def external(url: str, **keys: Any) -> dict[str, Any]:
    return {"type": "external", "urls": [url], **keys}


def test_servers_are_told_apart_by_their_hashes(world: World, tmp_path: Path) -> None:
    with teacher_server(world.teachers["left"]) as left, teacher_server(world.teachers["right"]) as right:
        keys = {"teachers__left__placement": external(left), "teachers__right__placement": external(right)}
        done = mopd("check", world.write_recipe(tmp_path / "run", student__parallel=ONE_RANK, **keys), "--json")
        assert done.returncode == 0, done.stderr
        checks = {check["name"]: check["detail"] for check in json.loads(done.stdout)}
        assert checks["identity of left"] == "its replica has the hashes of the recipe's folder"
        swapped = {
            "teachers__left__placement": external(right),
            "teachers__right__placement": external(left),
            "preflight__require_better_teacher": False,
        }
        done = mopd("train", world.write_recipe(tmp_path / "run", student__parallel=ONE_RANK, **swapped))
    assert done.returncode == 2, done.stderr
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("mopd: error:")]
    assert "teachers.left: weights_sha256 is " in error and "replica left.0" in error


@pytest.mark.parametrize(
    ("mistake", "compare", "found"),
    [
        ("dropped bos", False, "they differ from what its own generation reports"),
        ("swapped", "auto", "mean KL to a transformers forward"),
    ],
)
def test_a_server_with_the_right_hashes_and_wrong_scores(
    world: World, tmp_path: Path, mistake: str, compare: object, found: str
) -> None:
    folder = world.teachers["right" if mistake == "swapped" else "left"]
    engine = MistakenEngine.from_pretrained(folder, TorchEngineConfig(dtype="float32"))
    engine.mistake = mistake  # type: ignore[attr-defined]
    with served(engine, world.teachers["left"]) as url:
        recipe = world.write_recipe(
            tmp_path / "run",
            student__parallel=ONE_RANK,
            teachers__left__placement=external(url),
            preflight__require_better_teacher=False,
            preflight__compare_with_transformers=compare,
        )
        done = mopd("train", recipe)
    assert done.returncode == 2, done.stderr
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("mopd: error:")]
    assert found in error
    assert "the scores are not this teacher's; check teachers.left.engine and placement" in error
    assert not (tmp_path / "run").exists()
