"""Reading and writing Hugging Face folders: slices, sharded files, every kind of damage, all or nothing."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from mopd.base.files.writing import sync
from mopd.base.types import UserError
from mopd.conversion.hf import writer
from mopd.conversion.hf.reader import HfReader
from mopd.conversion.hf.writer import require_exportable, write_folder
from tests.fixtures.tiny_models import make_hf_model, make_tokenizer

INDEX = "model.safetensors.index.json"


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    return {
        "a.weight": torch.randn(6, 4),
        "b.weight": torch.randn(4, 6).to(torch.bfloat16),
        "c.bias": torch.arange(5, dtype=torch.float32),
        "d.scalar": torch.tensor(3.0),
    }


@pytest.fixture
def single(tmp_path: Path, tensors: dict[str, Tensor]) -> Path:
    folder = tmp_path / "single"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def sharded(tmp_path: Path, tensors: dict[str, Tensor]) -> Path:
    """a and b in the first file, c and d in the second."""
    folder = tmp_path / "sharded"
    folder.mkdir()
    index = {}
    for number, names in enumerate((("a.weight", "b.weight"), ("c.bias", "d.scalar")), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names}, folder / file)
        index |= dict.fromkeys(names, file)
    write_index(folder, index)
    return folder


def write_index(folder: Path, index: dict[str, str]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))


def read_index(folder: Path) -> dict[str, str]:
    return json.loads((folder / INDEX).read_text())["weight_map"]


def refusal(folder: Path) -> str:
    """The message with which a folder is refused when it is opened: one line."""
    with pytest.raises(UserError) as error:
        HfReader(folder)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("kind", ["single", "sharded"])
def test_reads_tensors_and_slices(kind: str, tensors: dict[str, Tensor], request: pytest.FixtureRequest):
    reader = HfReader(request.getfixturevalue(kind))
    assert reader.names == set(tensors)
    for name, tensor in tensors.items():
        assert reader.shape(name) == tensor.shape
        assert torch.equal(reader.read(name), tensor) and reader.read(name).dtype == tensor.dtype
    assert torch.equal(reader.read_slice("a.weight", 0, 2, 5), tensors["a.weight"][2:5])
    assert torch.equal(reader.read_slice("b.weight", 1, 3, 6), tensors["b.weight"][:, 3:])
    assert reader.read_slice("a.weight", 0, 6, 6).shape == (0, 4)


@pytest.mark.parametrize("size", [0, 5, 8, 20])
def test_file_that_ends_too_early_or_too_late(single: Path, size: int):
    path = single / "model.safetensors"
    whole = path.read_bytes()
    for content, problem in ((whole[:size], ""), (whole[:-3], "truncated"), (whole + b"x", "longer than its header")):
        path.write_bytes(content)
        assert str(path) in (message := refusal(single)) and problem in message


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[]",
        b'{"a": 3}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 7]}}',
        b'{"a": {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "a": {"dtype": "F32", "shape": [1], '
        b'"data_offsets": [4, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "b": {"dtype": "F32", "shape": [1], '
        b'"data_offsets": [4, 8]}}',
        b"\xff" * 16,
    ],
)
def test_corrupt_header(tmp_path: Path, header: bytes):
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    assert str(path) in refusal(tmp_path)


@pytest.mark.parametrize("file", ["../single/model.safetensors", "/etc/passwd", "..", "", "x\\y.safetensors", "w.bin"])
def test_index_that_points_elsewhere(sharded: Path, single: Path, file: str):
    write_index(sharded, {**read_index(sharded), "a.weight": file})
    message = refusal(sharded)
    assert str(sharded / INDEX) in message and "a.weight" in message


def test_index_and_files_must_agree(sharded: Path):
    index = read_index(sharded)
    write_index(sharded, {**index, "a.weight": index["c.bias"]})
    assert "'a.weight'" in refusal(sharded)
    write_index(sharded, {name: file for name, file in index.items() if name != "a.weight"})
    assert "does not list tensor 'a.weight'" in refusal(sharded)
    write_index(sharded, {**index, "z": index["c.bias"]})
    assert "'z'" in refusal(sharded)
    save_file({name: torch.zeros(1) for name in ("a.weight", "c.bias", "d.scalar")}, sharded / index["c.bias"])
    assert "tensor 'a.weight' is also in" in refusal(sharded)
    (sharded / index["c.bias"]).unlink()
    write_index(sharded, index)
    assert index["c.bias"] in refusal(sharded)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}'])
def test_corrupt_index(sharded: Path, content: str):
    (sharded / INDEX).write_text(content)
    assert str(sharded / INDEX) in refusal(sharded)


def test_folder_without_weights(tmp_path: Path):
    assert "no model.safetensors" in refusal(tmp_path)


@pytest.mark.parametrize("max_file_bytes", [2**30, 40_000])
def test_written_folder_is_complete_and_transformers_loads_it(tmp_path: Path, max_file_bytes: int):
    source = make_hf_model(tmp_path / "source")
    make_tokenizer(source)
    (source / "LICENSE").write_text("as it was")
    reader = HfReader(source)
    target = tmp_path / "target"
    stream = ((name, reader.read(name)) for name in sorted(reader.names))
    write_folder(target, stream, source=source, max_file_bytes=max_file_bytes)
    for path in source.iterdir():
        if not path.name.startswith("model"):
            assert (target / path.name).read_bytes() == path.read_bytes(), path.name
    written = {path.name for path in target.iterdir()}
    assert "LICENSE" in written and not any(name.startswith("part-") for name in written)
    assert (INDEX in written) == (max_file_bytes == 40_000)
    expected = load_file(source / "model.safetensors")
    state = AutoModelForCausalLM.from_pretrained(target).state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
    assert HfReader(target).names == reader.names
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target"]


def test_files_are_on_disk_before_the_folder_has_its_name(
    tmp_path: Path, single: Path, monkeypatch: pytest.MonkeyPatch
):
    target, synced = tmp_path / "target", list[str]()

    def noted(path: Path) -> None:
        synced.append(path.name)
        assert (path == tmp_path) == target.exists()
        sync(path)

    monkeypatch.setattr(writer, "sync", noted)
    write_folder(target, [("t", torch.zeros(1))], source=single)
    assert sorted(synced[:-1]) == sorted(path.name for path in target.iterdir())
    assert synced[-1] == tmp_path.name


def test_shards_stay_within_the_limit(tmp_path: Path, single: Path):
    stream = ((f"t{number}", torch.full((25,), number)) for number in range(5))
    write_folder(tmp_path / "target", stream, source=single, max_file_bytes=250)
    shards = sorted((tmp_path / "target").glob("*.safetensors"))
    assert [list(load_file(path)) for path in shards] == [[f"t{number}"] for number in range(5)]


def test_nothing_is_left_when_writing_fails(tmp_path: Path, single: Path):
    def half() -> Iterator[tuple[str, Tensor]]:
        for number in range(4):
            yield f"t{number}", torch.zeros(100)
        raise RuntimeError("rank lost")

    with pytest.raises(RuntimeError, match="rank lost"):
        write_folder(tmp_path / "target", half(), source=single, max_file_bytes=400)
    assert [path.name for path in tmp_path.iterdir()] == ["single"]


def test_existing_target_is_not_overwritten(tmp_path: Path, single: Path):
    (tmp_path / "empty").mkdir()
    write_folder(tmp_path / "empty", [("t", torch.zeros(1))], source=single)
    with pytest.raises(UserError, match="already exists"):
        write_folder(tmp_path / "empty", [], source=single)
    with pytest.raises(UserError, match="already exists"):
        require_exportable(tmp_path / "empty", single)


@pytest.mark.parametrize(("names", "problem"), [(("t", "t"), "twice"), ((), "no tensor")])
def test_a_stream_has_tensors_and_each_once(tmp_path: Path, single: Path, names: tuple[str, ...], problem: str):
    with pytest.raises(ValueError, match=problem):
        write_folder(tmp_path / "target", ((name, torch.zeros(1)) for name in names), source=single)
    assert [path.name for path in tmp_path.iterdir()] == ["single"]
