"""Damaged inputs and full disks: exit code 2, one line that names the file, and nothing left behind."""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from mopd.base.types import UserError
from mopd.cli.main import main
from mopd.conversion.hf.reader import HfReader
from mopd.conversion.hf.writer import write_folder
from mopd.conversion.jobs import streaming
from mopd.conversion.torch_dist.plan import TargetLayout
from tests.fixtures.tiny_models import make_hf_model, make_tokenizer
from tests.unit.conversion.jobs import run_job

INDEX = "model.safetensors.index.json"
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sharded Hugging Face folder and its distributed checkpoint."""
    folder = tmp_path_factory.mktemp("whole")
    single = make_hf_model(folder / "single", "qwen2", vocab_size=61, num_layers=2)
    make_tokenizer(single)
    reader = HfReader(single)
    stream = ((name, reader.read(name)) for name in sorted(reader.names))
    write_folder(folder / "hf", stream, source=single, max_file_bytes=60_000)
    run_job(streaming.hf_to_megatron(folder / "hf", folder / "megatron", TargetLayout(), max_file_bytes=80_000))
    return folder


@pytest.fixture
def hf(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole / "hf", tmp_path / "in" / "hf")


@pytest.fixture
def megatron(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole / "megatron", tmp_path / "in" / "megatron")


def refusal(capsys: pytest.CaptureFixture[str], source: Path, *options: str) -> str:
    """The one line with which a conversion ends; nothing is left beside the source."""
    action = "hf-to-megatron" if source.name == "hf" else "megatron-to-hf"
    place = source.parent.parent / "place"
    place.mkdir()
    assert main(["convert", action, str(source), str(place / "out"), "--max-file-bytes", "50000", *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("mopd: error: ") and captured.err.count("\n") == 1
    assert list(place.iterdir()) == []
    return captured.err


def file_of(folder: Path, name: str) -> Path:
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][name]


def change_tensor(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    path = file_of(folder, name)
    tensors = load_file(path)
    tensors[name] = change(tensors[name].clone()).contiguous()
    save_file({key: value.clone() for key, value in tensors.items()}, path)
    return path


def change_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def drop_tensor(hf: Path) -> None:
    path = file_of(hf, DOWN)
    tensors = load_file(path)
    del tensors[DOWN]
    save_file(tensors, path)
    change_index(hf, lambda index: index.pop(DOWN))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a truncated shard": (lambda hf: os.truncate(file_of(hf, DOWN), 1000), "not a sound safetensors file: truncated"),
    "a missing tensor": (drop_tensor, f"tensor '{DOWN}' is missing"),
    "a wrong shape": (
        lambda hf: change_tensor(hf, DOWN, lambda tensor: tensor.T),
        f"tensor '{DOWN}' has shape [96, 64], config.json asks for [64, 96]",
    ),
    "mixed dtypes of a stacked tensor": (
        lambda hf: change_tensor(hf, DOWN, lambda tensor: tensor.bfloat16()), "choose a dtype with --dtype"
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_folders(hf: Path, damage: str, capsys: pytest.CaptureFixture[str]):
    """Everything else that ``HfReader`` refuses: ``test_hf.py``."""
    change, line = DAMAGE[damage]
    change(hf)
    assert line in refusal(capsys, hf)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_weights(hf: Path, value: float, dtype: torch.dtype, capsys: pytest.CaptureFixture[str]):
    """Found in the middle, when other files are on disk already."""
    for name in ("model.layers.0.mlp.down_proj.weight", DOWN):
        change_tensor(hf, name, lambda tensor: tensor.to(dtype))
    change_tensor(hf, DOWN, lambda tensor: tensor.index_fill_(0, torch.tensor([63]), value))
    assert f"tensor '{DOWN}' has NaN or infinite values" in refusal(capsys, hf)


def pickle_weights(folder: Path, content: object) -> Path:
    """Replace the safetensors of a folder by one pickled file."""
    for path in (*folder.glob("*.safetensors"), folder / INDEX):
        path.unlink()
    torch.save(content, folder / "pytorch_model.bin")
    return folder / "pytorch_model.bin"


def test_pickled_weights_need_consent_and_give_the_same_files(
    hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    reader = HfReader(hf)
    run_job(streaming.hf_to_megatron(hf, tmp_path / "expected", TargetLayout()))
    path = pickle_weights(hf, {name: reader.read(name).clone() for name in reader.names})
    assert f"{path}: pickled weights can run code when read" in refusal(capsys, hf)
    run_job(streaming.hf_to_megatron(hf, tmp_path / "out", TargetLayout(), allow_pickle=True))
    for name in ("__0_0.distcp", ".metadata"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "expected" / name).read_bytes()


class Touch:
    """Its unpickling creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


def test_pickled_code_does_not_run_even_with_consent(hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = pickle_weights(hf, {DOWN: Touch(tmp_path / "ran")})
    assert f"{path}: cannot be read as tensors alone" in refusal(capsys, hf, "--allow-pickle")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [b"", b"\x80\x02", b"PK\x03\x04 no archive"])
def test_corrupt_pickle(hf: Path, content: bytes, capsys: pytest.CaptureFixture[str]):
    pickle_weights(hf, {}).write_bytes(content)
    assert "pytorch_model.bin: cannot be read" in refusal(capsys, hf, "--allow-pickle")


def test_full_disk_while_writing(hf: Path, tmp_path: Path):
    """The operating system refuses in the middle: a limit on file size in a forked child."""
    for job in (
        lambda: streaming.hf_to_megatron(hf, tmp_path / "place" / "out", TargetLayout()),
        lambda: streaming.megatron_to_hf(tmp_path / "megatron", tmp_path / "place" / "out"),
    ):
        if not (tmp_path / "megatron").exists():
            run_job(streaming.hf_to_megatron(hf, tmp_path / "megatron", TargetLayout()))
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                torch.set_num_threads(1)
                resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
                made = job()
                try:
                    run_job(made)
                except UserError as error:
                    made.discard()
                    os.write(write, str(error).encode())
            except BaseException as error:
                print(repr(error), file=sys.stderr)
            finally:  # else the child goes on with pytest's other tests
                os._exit(0)
        os.waitpid(child, 0)
        os.close(write)
        message = os.fdopen(read).read()
        assert "cannot be written: File too large; free space there" in message
        assert list((tmp_path / "place").iterdir()) == []


def test_space_is_checked_before_the_first_byte(
    hf: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=10_000_000))
    assert "needs 0.0 GB, 0.0 GB are free; free space there or name another place" in refusal(capsys, hf)


def test_truncated_distributed_file(megatron: Path, capsys: pytest.CaptureFixture[str]):
    path = sorted(megatron.glob("__0_*.distcp"))[2]
    os.truncate(path, path.stat().st_size // 2)
    assert str(path) in refusal(capsys, megatron)


def test_changed_distributed_file(megatron: Path, capsys: pytest.CaptureFixture[str]):
    path = sorted(megatron.glob("__0_*.distcp"))[2]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert f"{path}: changed since it was saved" in refusal(capsys, megatron)


@pytest.mark.parametrize("name", [".metadata", "common.pt", "state.json", "hf/config.json"])
def test_changed_description(megatron: Path, name: str, capsys: pytest.CaptureFixture[str]):
    with (megatron / name).open("ab") as file:
        file.write(b" ")
    assert f"{megatron / name}: changed since it was saved" in refusal(capsys, megatron)


def test_without_manifest(megatron: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (megatron / "manifest.json").unlink()
    assert f"{megatron}: no complete checkpoint of mopd" in refusal(capsys, megatron)
    run_job(streaming.megatron_to_hf(megatron, tmp_path / "out", allow_pickle=True))
    assert HfReader(tmp_path / "out").names


def test_description_that_would_run_code(megatron: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (megatron / "manifest.json").unlink()
    (megatron / ".metadata").write_bytes(pickle.dumps(Touch(tmp_path / "ran")))
    assert "which no description of tensors needs" in refusal(capsys, megatron, "--allow-pickle")
    assert not (tmp_path / "ran").exists()


def test_description_that_points_elsewhere(megatron: Path, capsys: pytest.CaptureFixture[str]):
    (megatron / "manifest.json").unlink()
    metadata = pickle.loads((megatron / ".metadata").read_bytes())
    next(iter(metadata.storage_data.values())).relative_path = "../../secret"
    (megatron / ".metadata").write_bytes(pickle.dumps(metadata))
    assert "points to '../../secret', which is not a file name" in refusal(capsys, megatron, "--allow-pickle")


def test_description_without_an_entry(megatron: Path, capsys: pytest.CaptureFixture[str]):
    (megatron / "manifest.json").unlink()
    metadata = pickle.loads((megatron / ".metadata").read_bytes())
    index = next(entry for entry in metadata.storage_data if entry.fqn == "decoder.layers.mlp.linear_fc2.weight")
    chunks = metadata.state_dict_metadata[index.fqn].chunks
    del metadata.storage_data[index]
    (megatron / ".metadata").write_bytes(pickle.dumps(metadata))
    assert f"does not say where tensor '{index.fqn}'" in refusal(capsys, megatron, "--allow-pickle")
    chunks.remove(next(chunk for chunk in chunks if chunk.offsets == index.offset))
    (megatron / ".metadata").write_bytes(pickle.dumps(metadata))
    (megatron.parent.parent / "place").rmdir()
    assert f"has no entry for a part of tensor '{index.fqn}'" in refusal(capsys, megatron, "--allow-pickle")


def test_missing_origin(megatron: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A run's checkpoint has no side files of its own; they come from the run's model, or from --side-files."""
    manifest = json.loads((megatron / "manifest.json").read_text())
    for path in (megatron / "hf").iterdir():
        del manifest["sha256"][f"hf/{path.name}"]
        path.unlink()
    state = json.loads((megatron / "state.json").read_text())
    (megatron / "state.json").write_text(json.dumps({**state, "source": str(tmp_path / "gone")}))
    del manifest["sha256"]["state.json"]
    (megatron / "manifest.json").write_text(json.dumps(manifest))
    assert "gone', which is gone: restore that folder or name another with --side-files" in refusal(capsys, megatron)
    run_job(streaming.megatron_to_hf(megatron, tmp_path / "out", side_files=whole / "hf"))
    assert (tmp_path / "out" / "config.json").read_bytes() == (whole / "hf" / "config.json").read_bytes()


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--tensor-model-parallel-size", "3"], "-size 3 does not divide the model's 2 key/value heads: set it to a"),
        (["--tensor-model-parallel-size", "0"], "--tensor-model-parallel-size is 0: set 1 or more"),
        (["--pipeline-model-parallel-size", "3"], "-size 3 does not divide the model's 2 layers"),
        (
            ["--expert-model-parallel-size", "2"],
            "--expert-model-parallel-size is 2 but model_type qwen2 has no experts",
        ),
        (["--virtual-pipeline-model-parallel-size", "2"], "needs --pipeline-model-parallel-size > 1"),
        (["--max-file-bytes", "0"], "--max-file-bytes is 0"),
    ],
)
def test_layouts_that_do_not_fit(hf: Path, options: list[str], line: str, capsys: pytest.CaptureFixture[str]):
    assert line in refusal(capsys, hf, *options)


def test_existing_target_is_left_alone(hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    assert main(["convert", "hf-to-megatron", str(hf), str(tmp_path / "out")]) == 2
    assert "exists and is not an empty folder" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]
