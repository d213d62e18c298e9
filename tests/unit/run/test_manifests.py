"""The models of a run that goes on are those that it began with, and the same on all of its nodes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from mopd.base.types import UserError
from mopd.conversion.hf.manifest import make_manifest
from mopd.run.manifests import (
    NUM_SAMPLES,
    SAMPLE_BYTES,
    check_plugins,
    check_unchanged,
    glimpse,
    hash_cache,
    make_manifests,
    write_manifests,
)
from tests.fixtures.adapters import random_adapter, write_adapter
from tests.fixtures.tiny_models import make_hf_model


def test_another_model_or_another_set_of_them_is_refused(tmp_path: Path) -> None:
    one = make_manifest(make_hf_model(tmp_path / "model"), cache_file=None)
    models = {"student": one, "teachers.math": one}
    path = tmp_path / "manifest.json"
    write_manifests(path, models, {}, {}, {"teachers.math": {"quantization": "fp8"}})
    assert json.loads(path.read_text())["engine.extra"] == {"teachers.math": {"quantization": "fp8"}}
    check_unchanged(path, models)
    write_manifests(path, models, {}, {}, plugins={"loss.module": "a" * 64})
    check_unchanged(path, models)
    check_plugins(path, {"loss.module": "a" * 64})
    with pytest.raises(UserError, match=r"^loss\.module: .* sha256 b{16} now, the run began with sha256 a{16}:"):
        check_plugins(path, {"loss.module": "b" * 64})
    with pytest.raises(UserError, match=r"^answers: its file has sha256 b{16} now, the run began with none: restore"):
        check_plugins(path, {"answers": "b" * 64})
    for current, names in (({"student": one}, "teachers.math"), ({**models, "teachers.code": one}, "teachers.code")):
        with pytest.raises(UserError, match=f"manifest.json: {names} stand only in one of this file and the recipe"):
            check_unchanged(path, current)
    other = replace(one, weights_sha256="0" * 64)
    with pytest.raises(UserError, match=r"^teachers\.math\.model '.*' is not what the run began with"):
        check_unchanged(path, {"student": one, "teachers.math": other})


def test_the_adapter_that_a_student_begins_with_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    base, path = make_hf_model(tmp_path / "model"), tmp_path / "manifest.json"
    adapter = write_adapter(tmp_path / "adapter", random_adapter(base, 0))
    student = SimpleNamespace(model=str(base), lora=SimpleNamespace(path=str(adapter)))
    recipe: Any = SimpleNamespace(student=student, teachers={})
    write_manifests(path, make_manifests(recipe), {}, {})
    check_unchanged(path, make_manifests(recipe))
    write_adapter(adapter, random_adapter(base, 1))
    with pytest.raises(UserError, match=r"^student\.lora\.path is not what the run began with: adapter_sha256 was"):
        check_unchanged(path, make_manifests(recipe))


def test_a_closed_folder_of_caches_is_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert hash_cache() == tmp_path / "caches" / "mopd" / "weight_hashes.json" and not caplog.records
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc")
    assert hash_cache() is None
    (record,) = caplog.records
    assert "/proc/mopd: cannot be written" in record.getMessage() and "XDG_CACHE_HOME" in record.getMessage()


MATRIX, NORM = 2**20, 2048
"""Elements of 2 bytes: samples of the whole file lie further apart than a norm is long."""
NAME = "model.safetensors"


def write_layers(file: Path, changes: Mapping[str, tuple[int, int]] | None = None, num_layers: int = 8) -> None:
    """Matrices and norms in turns; ``changes`` are tensors with (first, count) of the elements that are 1."""
    sizes = {"first": NORM} | {f"{i}.{name}": n for i in range(num_layers) for name, n in (("w", MATRIX), ("z", NORM))}
    tensors = {name: np.zeros(size, np.float16) for name, size in sizes.items()}
    for name, (first, count) in (changes or {}).items():
        tensors[name][first : first + count] = 1
    save_file(tensors, file)


def test_a_change_of_any_tensor_is_seen(tmp_path: Path) -> None:
    """A norm of 4 KiB among matrices, or one end of a matrix: all lie between the samples of the whole file."""
    file = tmp_path / NAME
    write_layers(file)
    before = glimpse(tmp_path)
    assert file.stat().st_size // NUM_SAMPLES > SAMPLE_BYTES * 2
    changes = [{name: (i, 1)} for name in ("first", "0.z", "3.z", "7.z") for i in (0, NORM // 2, NORM - 1)]
    changes += [{f"{i}.w": (first, 1)} for i in (0, 7) for first in (0, 1000, MATRIX - 1000, MATRIX - 1)]
    found = set()
    for change in changes:
        write_layers(file, change)
        found.add(glimpse(tmp_path)[NAME])
    assert len(found) == len(changes) and before[NAME] not in found
    write_layers(file)
    assert glimpse(tmp_path) == before


def test_a_change_as_long_as_the_way_between_two_samples_is_seen(tmp_path: Path) -> None:
    """In the middle of a matrix, too."""
    file = tmp_path / NAME
    write_layers(file)
    before, step = glimpse(tmp_path), file.stat().st_size // NUM_SAMPLES // 2
    for first in (MATRIX // 3, MATRIX // 2):
        write_layers(file, {"4.w": (first, step)})
        assert glimpse(tmp_path) != before


def test_a_header_is_compared_whole(tmp_path: Path) -> None:
    """Two tensors whose names have changed places hold each other's weights."""
    file = tmp_path / NAME
    write_layers(file)
    before = glimpse(tmp_path)
    content = file.read_bytes()
    file.write_bytes(
        content.replace(b'"0.z"', b'"?.z"', 1).replace(b'"1.z"', b'"0.z"', 1).replace(b'"?.z"', b'"1.z"', 1)
    )
    assert glimpse(tmp_path) != before


def test_files_that_decide_what_is_read_are_compared(tmp_path: Path) -> None:
    """The index decides which weight files there are; a file that it does not name is not read."""
    assert glimpse(tmp_path / "none") == glimpse(tmp_path) == {}
    (tmp_path / "config.json").write_text("{}")
    assert set(glimpse(tmp_path)) == {"config.json"}
    for name in ("a.safetensors", "b.safetensors"):
        write_layers(tmp_path / name, num_layers=1)
    (tmp_path / "c.safetensors").write_bytes(b"")
    index, found = tmp_path / "model.safetensors.index.json", []
    for files in ({"first": "a.safetensors"}, {"first": "b.safetensors"}, {"first": "gone.safetensors"}):
        index.write_text(json.dumps({"weight_map": files}))
        found.append(glimpse(tmp_path))
    names = [set(one) - {"config.json", index.name} for one in found]
    assert names == [{"a.safetensors"}, {"b.safetensors"}, set()]
    assert len({one[index.name] for one in found}) == 3 and len({one["config.json"] for one in found}) == 1


def test_a_damaged_weight_file_is_named(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(bytes(100))
    with pytest.raises(UserError, match=r"model\.safetensors.*: not a sound safetensors file: "):
        glimpse(tmp_path)
