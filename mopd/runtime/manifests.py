"""Hashes of the models of a run, kept in its folder and compared at resume and with what the servers say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mopd.config.groups import Teacher
from mopd.config.placement import External
from mopd.config.schema import Recipe
from mopd.conversion.manifest import Manifest, compare_manifests, make_manifest
from mopd.files.writing import write_json
from mopd.types import UserError

CACHE_FILE = Path("~/.cache/mopd/weight_hashes.json")
"""Digests by (path, size, modification time): a start does not read hundreds of gigabytes again."""
FINGERPRINTS = "fingerprints"
"""Key of ``manifest.json`` beside those of the models: scores on a fixed probe, by ``teachers.NAME``."""


def has_own_weights(teacher: Teacher) -> bool:
    """Whether the teacher's folder holds its weights; only a stock server's may lack them."""
    if not (isinstance(teacher.placement, External) and teacher.placement.protocol == "openai"):
        return True
    return any(Path(teacher.model).glob("*.safetensors"))


def make_manifests(recipe: Recipe) -> dict[str, Manifest]:
    """Manifest of ``student`` and of each ``teachers.NAME``."""
    cache = CACHE_FILE.expanduser()
    manifests = {"student": make_manifest(Path(recipe.student.model), cache_file=cache)}
    for name, teacher in recipe.teachers.items():
        manifests[f"teachers.{name}"] = make_manifest(
            Path(teacher.model), cache_file=cache, with_weights=has_own_weights(teacher)
        )
    return manifests


def write_manifests(path: Path, manifests: Mapping[str, Manifest], fingerprints: Mapping[str, Any]) -> None:
    """Keep them in the run folder."""
    models: dict[str, Any] = {key: manifest.to_json() for key, manifest in manifests.items()}
    write_json(path, models | ({FINGERPRINTS: dict(fingerprints)} if fingerprints else {}))


def read_fingerprints(path: Path) -> dict[str, Any]:
    """Fingerprints by ``teachers.NAME``; empty for a run without any."""
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return dict(data[FINGERPRINTS]) if FINGERPRINTS in data else {}


def check_unchanged(path: Path, current: Mapping[str, Manifest]) -> None:
    """Refuse to resume with another model than the run began with.

    Raises:
        UserError: names the model's key, its folder and what changed.
    """
    data = json.loads(path.read_text(encoding="utf-8"))
    stored = {key: Manifest.from_json(value) for key, value in data.items() if key != FINGERPRINTS}
    unmatched = sorted(set(stored) ^ set(current))
    if unmatched:
        raise UserError(f"{path}: {', '.join(unmatched)} stand only in one of this file and the recipe")
    for key, manifest in current.items():
        differences = compare_manifests(stored[key], manifest)
        if differences:
            raise UserError(
                f"{key}.model {manifest.path!r} is not what the run began with: {'; '.join(differences)}: "
                "restore that model, or set another run_dir"
            )
