"""A checkpoint that somebody else wrote, manifest included: none of its pickles runs, whichever command opens it."""

from __future__ import annotations

import io
import logging
import pickle
import shutil
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from mopd.base.types import UserError
from mopd.cli.main import main
from mopd.config.student import StudentConfig
from mopd.conversion.hf.reader import HfReader
from mopd.conversion.models.reading import read_dims
from mopd.student import cpu_shim
from mopd.student.averages import Averages
from mopd.student.checkpoints import checkpoint
from mopd.student.model.gpt import build_model
from mopd.student.optimizer import build_optimizer, wrap_data_parallel
from mopd.student.parallel import Layout
from mopd.student.weights import load_hf_into
from tests.fixtures.tiny_models import make_hf_model, make_tokenizer


class Touch:
    """Its unpickling creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


@dataclass(frozen=True)
class Run:
    """A student of one rank and a sound checkpoint of it."""

    step: Path
    resume: Callable[[Path], object]
    """As ``train --resume`` and ``eval --checkpoint`` load."""
    load_weights: Callable[[Path], object]
    """As ``convert verify`` loads."""


@pytest.fixture(scope="module")
def run(layout: Layout, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("run")
    source = make_hf_model(folder / "model", "qwen3", num_layers=1, hidden_size=32, num_heads=2)
    make_tokenizer(source)
    student, dims, step = StudentConfig(model=str(source), dtype="float32"), read_dims(source), folder / "step_00000001"
    with cpu_shim.activate():
        model = build_model(student, dims, layout)
        load_hf_into([model], HfReader(source), dims, layout)
        wrapped = wrap_data_parallel([model], use_distributed_optimizer=True)
        optimizer, _ = build_optimizer(replace(student.optimizer, lr=student.peak_lr), wrapped, num_steps=9)
        state = {"weight_version": 1, "source": str(source), "dtype": "float32", "extra": {"step": 1}}
        parts = (wrapped, optimizer, layout, Averages((), [model]))
        checkpoint.save(step, *parts, state=state)

        def resume(folder: Path) -> None:
            checkpoint.verify(folder)
            checkpoint.load(folder, *parts)

        yield Run(step, resume, lambda folder: checkpoint.load_weights(folder, model))


def archive(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def compressed(content: bytes) -> bytes:
    """The same archive with its entries deflated."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
    return stream.getvalue()


def change_description(folder: Path, change: Callable[[Metadata], object]) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def put(folder: Path, key: str, content: bytes) -> None:
    """Have the first part of a tensor or object lie in a new file."""
    (folder / "__0_9.distcp").write_bytes(content)

    def change(metadata: Metadata) -> None:
        index = next(index for index in metadata.storage_data if key in index.fqn)
        metadata.storage_data[index] = _StorageInfo("__0_9.distcp", 0, len(content))

    change_description(folder, change)


def poisoned_class() -> bytes:
    """A pickle that sets an attribute of a class of the format: ``BUILD`` with a state for slots."""
    return b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\n(N}X\x06\x00\x00\x00broken\x88stb."


PLACES: dict[str, Callable[[Path, Path], object]] = {
    ".metadata": lambda folder, mark: (folder / ".metadata").write_bytes(pickle.dumps(Touch(mark))),
    ".metadata, inside": lambda folder, mark: change_description(
        folder, lambda metadata: setattr(metadata, "planner_data", Touch(mark))
    ),
    ".metadata, a class": lambda folder, mark: (folder / ".metadata").write_bytes(poisoned_class()),
    "common.pt": lambda folder, mark: torch.save({"a": Touch(mark)}, folder / COMMON_STATE_FNAME),
    "common.pt, old format": lambda folder, mark: (folder / COMMON_STATE_FNAME).write_bytes(pickle.dumps(Touch(mark))),
    "common.pt, compressed": lambda folder, mark: (folder / COMMON_STATE_FNAME).write_bytes(
        compressed(archive({"a": torch.zeros(9)}))
    ),
    "weights": lambda folder, mark: put(folder, "embedding.word_embeddings.weight", archive(Touch(mark))),
    "optimizer": lambda folder, mark: put(folder, "optimizer.state.exp_avg.", archive(Touch(mark))),
}


@pytest.fixture
def hostile(run: Run, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    folder = shutil.copytree(run.step, tmp_path / "in" / run.step.name)
    PLACES[request.param](folder, tmp_path / "ran")
    state = checkpoint.read_state(folder)
    checkpoint.write_hash_manifest(folder, state)
    return folder


@pytest.mark.parametrize("hostile", PLACES, indirect=True)
def test_no_door_runs_code(
    hostile: Path,
    run: Run,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Resuming and evaluating refuse each place; conversions refuse those that they read."""
    place: str = request.node.callspec.params["hostile"]
    with pytest.raises(UserError) as refused:
        run.resume(hostile)
    assert str(hostile) in str(refused.value) and "\n" not in str(refused.value)
    if not place.startswith("optimizer"):
        with pytest.raises(UserError):
            run.load_weights(hostile)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    stacks = [record for record in caplog.records if record.exc_info and record.levelno > logging.DEBUG]
    assert not place.startswith(".metadata") or not stacks
    capsys.readouterr()
    for number, command in enumerate((["inspect"], ["megatron-to-hf"], ["reshard"], ["verify", "--no-logits"])):
        out = [] if command == ["inspect"] else [str(run.step if "verify" in command else tmp_path / f"out{number}")]
        code = main(["convert", *command, str(hostile), *out])
        reads = place.startswith(".metadata") or (place == "weights" and command != ["inspect"])
        assert code == (0 if not reads else 1 if place == "weights" and "verify" in command else 2), command
        told = capsys.readouterr()
        assert code != 2 or (told.err.startswith("mopd: error: ") and told.err.count("\n") == 1 and not told.out)
    assert not (tmp_path / "ran").exists()
    assert not hasattr(Metadata, "broken")


def test_a_sound_checkpoint_loads(run: Run) -> None:
    run.resume(run.step)
    run.load_weights(run.step)


def test_an_extra_state_is_never_read(run: Run, tmp_path: Path) -> None:
    """TransformerEngine would unpickle it. Checkpoints of fp8 that others wrote have some."""
    folder, key = shutil.copytree(run.step, tmp_path / "step"), f"{MODULE}._extra_state/shard_0_1"
    content = archive([torch.frombuffer(bytearray(pickle.dumps(Touch(tmp_path / "ran"))), dtype=torch.uint8)])
    (folder / "__0_9.distcp").write_bytes(content)

    def add(metadata: Metadata) -> None:
        metadata.state_dict_metadata[key] = BytesStorageMetadata()
        metadata.storage_data[MetadataIndex(key)] = _StorageInfo("__0_9.distcp", 0, len(content))

    change_description(folder, add)
    checkpoint.write_hash_manifest(folder, checkpoint.read_state(folder))
    run.resume(folder)
    run.load_weights(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('{"sharded_backend": "zarr"}', "'sharded_backend' is 'zarr'"),
        ('{"sharded_backend": "torch_dist", "x": 1}', "'x' is 1"),
        ('{"sharded_backend": "torch_dist", "common_backend_version": 2}', "'common_backend_version' is 2"),
        ("[]", "holds a list"),
    ],
)
def test_another_format(run: Run, tmp_path: Path, text: str, line: str) -> None:
    folder = shutil.copytree(run.step, tmp_path / "step")
    (folder / "metadata.json").write_text(text)
    with pytest.raises(UserError, match=rf"metadata\.json: .*{line}"):
        run.load_weights(folder)


def remove(metadata: Metadata, key: str) -> None:
    for index in [index for index in metadata.storage_data if key in index.fqn]:
        del metadata.storage_data[index]
    for name in [name for name in metadata.state_dict_metadata if key in name]:
        del metadata.state_dict_metadata[name]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda metadata: remove(metadata, "final_layernorm"), "final_layernorm"),
        (lambda metadata: metadata.storage_data.clear(), "cannot be loaded"),
        (lambda metadata: setattr(next(iter(metadata.storage_data.values())), "relative_path", "../x"), "not a file"),
        (lambda metadata: setattr(next(iter(metadata.storage_data.values())), "length", 7), "cannot be loaded"),
        (lambda metadata: setattr(metadata.state_dict_metadata[WEIGHT], "size", torch.Size((7, 7))), "outside it"),
    ],
)
def test_damaged_descriptions(run: Run, tmp_path: Path, change: Callable[[Metadata], object], line: str) -> None:
    folder = shutil.copytree(run.step, tmp_path / "step")
    change_description(folder, change)
    checkpoint.write_hash_manifest(folder, checkpoint.read_state(folder))
    with pytest.raises(UserError, match=line) as refused:
        run.resume(folder)
    assert str(folder) in str(refused.value) and "\n" not in str(refused.value)


WEIGHT = "embedding.word_embeddings.weight"
MODULE = "decoder.layers.self_attention.linear_proj"
