"""A manifest changes exactly when config, weights or tokenizer do, and unchanged files are not read twice."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mopd.conversion.hf.manifest import Manifest, compare_manifests, make_manifest
from mopd.conversion.hf.reader import HfReader
from mopd.conversion.hf.writer import write_folder
from tests.fixtures.tiny_models import make_hf_model, make_tokenizer


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = make_hf_model(tmp_path / "model")
    make_tokenizer(folder)
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "hashes.json"


def changed(old: Manifest, new: Manifest) -> list[str]:
    return [phrase.split()[0] for phrase in compare_manifests(old, new)]


def make_newer(path: Path, since: os.stat_result) -> None:
    """A clock of a few milliseconds a tick may give a new file the time of the old one."""
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, max(stat.st_mtime_ns, since.st_mtime_ns + 1)))


def test_each_change_is_named(model: Path, cache: Path):
    before = make_manifest(model, cache_file=cache)
    assert changed(before, make_manifest(model, cache_file=cache)) == []
    (model / "config.json").write_text((model / "config.json").read_text() + " ")
    assert changed(before, make_manifest(model, cache_file=cache)) == ["config_sha256"]
    (model / "tokenizer.json").write_text((model / "tokenizer.json").read_text() + " ")
    assert changed(before, make_manifest(model, cache_file=cache)) == ["config_sha256", "tokenizer_sha256"]


def test_one_changed_weight_is_seen(model: Path, cache: Path):
    before = make_manifest(model, cache_file=cache)
    path = model / "model.safetensors"
    stat, tensors = path.stat(), load_file(path)
    tensors["model.norm.weight"][3] += 1
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path)
    make_newer(path, stat)
    assert changed(before, make_manifest(model, cache_file=cache)) == ["weights_sha256"]


def test_swapped_tensors_and_other_dtypes_are_other_weights(tmp_path: Path, model: Path, cache: Path):
    before = make_manifest(model, cache_file=cache)
    for change in ("swap", "dtype", "shape"):
        tensors = load_file(model / "model.safetensors")
        q, k = "model.layers.0.input_layernorm.weight", "model.layers.1.input_layernorm.weight"
        if change == "swap":
            tensors[q], tensors[k] = tensors[k], tensors[q]
        elif change == "dtype":
            tensors[q] = tensors[q].view(torch.int32)
        else:
            tensors[q] = tensors[q].view(8, 8)
        folder = tmp_path / change
        folder.mkdir()
        (folder / "config.json").write_bytes((model / "config.json").read_bytes())
        save_file(tensors, folder / "model.safetensors")
        assert "weights_sha256" in changed(before, make_manifest(folder, cache_file=cache))


def test_weights_hash_does_not_depend_on_sharding(tmp_path: Path, model: Path, cache: Path):
    reader = HfReader(model)
    stream = ((name, reader.read(name)) for name in sorted(reader.names, reverse=True))
    write_folder(tmp_path / "sharded", stream, source=model, max_file_bytes=20_000)
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    old, new = (make_manifest(folder, cache_file=cache) for folder in (model, tmp_path / "sharded"))
    assert changed(old, new) == [] and old.path != new.path


def test_unchanged_files_come_from_the_cache(model: Path, cache: Path):
    """Bytes are changed behind the cache's back: same size and time, old hash; a new time reveals them."""
    before = make_manifest(model, cache_file=cache)
    path = model / "model.safetensors"
    stat = path.stat()
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x55")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert make_manifest(model, cache_file=cache) == before
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert changed(before, make_manifest(model, cache_file=cache)) == ["weights_sha256"]


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"x": 1}', b'{"x": {"w": 1}}', b"\xff", b"[" * 10_000])
def test_a_damaged_cache_is_warned_of_and_replaced(
    model: Path, cache: Path, content: bytes, caplog: pytest.LogCaptureFixture
):
    cache.write_bytes(content)
    assert make_manifest(model, cache_file=cache) == make_manifest(model, cache_file=None)
    assert "hashes.json" in caplog.text and "delete it" in caplog.text
    caplog.clear()
    make_manifest(model, cache_file=cache)
    assert not caplog.records


@pytest.mark.parametrize("place", ["/proc/hashes.json", "/dev/null/cache/hashes.json", "folder", "x" * 300])
def test_a_cache_that_cannot_be_written_is_warned_of(
    model: Path, tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "folder" / "in_the_way").mkdir(parents=True)
    cache = tmp_path / place
    assert make_manifest(model, cache_file=cache) == make_manifest(model, cache_file=None)
    assert "the next start reads all weights again" in caplog.text


def test_the_cache_forgets_files_that_are_gone_or_changed(tmp_path: Path, model: Path, cache: Path):
    gone = shutil.copytree(model, tmp_path / "gone")
    make_manifest(gone, cache_file=cache)
    make_manifest(model, cache_file=cache)
    before = json.loads(cache.read_text())
    shutil.rmtree(gone)
    make_newer(model / "model.safetensors", (model / "model.safetensors").stat())
    make_manifest(model, cache_file=cache)
    after = json.loads(cache.read_text())
    assert len(before) == 2 and len(after) == 1 and not before.keys() & after.keys()
