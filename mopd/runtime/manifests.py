"""Hashes of the models of a run, kept in its folder and compared at resume."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from mopd.config.schema import Recipe
from mopd.conversion.manifest import Manifest, compare_manifests, make_manifest
from mopd.runtime.run_dir import atomic_write_json
from mopd.types import UserError

CACHE_FILE = Path("~/.cache/mopd/weight_hashes.json")
"""Digests by (path, size, modification time): a start does not read hundreds of gigabytes again."""


def make_manifests(recipe: Recipe) -> dict[str, Manifest]:
    """Manifest of ``student`` and of each ``teachers.NAME``."""
    cache = CACHE_FILE.expanduser()
    folders = {"student": recipe.student.model}
    folders |= {f"teachers.{name}": teacher.model for name, teacher in recipe.teachers.items()}
    return {key: make_manifest(Path(folder), cache_file=cache) for key, folder in folders.items()}


def write_manifests(path: Path, manifests: Mapping[str, Manifest]) -> None:
    """Keep them in the run folder."""
    atomic_write_json(path, {key: manifest.to_json() for key, manifest in manifests.items()})


def check_unchanged(path: Path, current: Mapping[str, Manifest]) -> None:
    """Refuse to resume with another model than the run began with.

    Raises:
        UserError: names the model's key, its folder and what changed.
    """
    stored = {key: Manifest.from_json(data) for key, data in json.loads(path.read_text(encoding="utf-8")).items()}
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
