"""Model folders from anywhere: none of their code runs, and whatever is damaged is one line that names the file."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mopd.base.types import UserError
from mopd.cli.main import main
from mopd.config.groups import TorchEngineConfig
from mopd.conversion.hf.pretrained import load_config, load_tokenizer, read_stop_ids
from mopd.conversion.hf.reader import HfReader
from mopd.conversion.hf.writer import require_exportable
from mopd.conversion.jobs import streaming
from mopd.conversion.torch_dist.plan import TargetLayout
from mopd.data.tokenizer import load_tokenizer as load_student_tokenizer
from mopd.engines.torch.engine import TorchEngine
from tests.fixtures.tiny_models import make_hf_model, make_tokenizer
from tests.unit.conversion.jobs import run_job

Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_hf_model(tmp_path_factory.mktemp("whole") / "model", "qwen2", num_layers=1, vocab_size=48)
    make_tokenizer(folder)
    return folder


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "model")


def keys(file: str, **values: Any) -> Change:
    def change(folder: Path) -> None:
        path = folder / file
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return change


def text(file: str, content: str | bytes) -> Change:
    return lambda folder: (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())


def replaced(file: str, make: Callable[[Path], object]) -> Change:
    def change(folder: Path) -> None:
        (folder / file).unlink()
        make(folder / file)

    return change


CODE = """
from pathlib import Path
Path({mark!r}).touch()
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
class Config(PretrainedConfig):
    model_type = "evil"
class Model(PreTrainedModel):
    config_class = Config
class Tokenizer(PreTrainedTokenizerFast):
    pass
"""
LOADERS: list[Callable[[Path], object]] = [
    load_config,
    lambda folder: TorchEngine.from_pretrained(folder, TorchEngineConfig(dtype="float32")),
    lambda folder: TorchEngine.empty(folder, TorchEngineConfig(dtype="float32")),
    load_student_tokenizer,
    HfReader,
    lambda folder: main(["convert", "verify", str(folder), str(folder)]),
    lambda folder: main(["convert", "hf-to-megatron", str(folder), str(folder.parent / "out")]),
]


@pytest.mark.parametrize("model_type", ["evil", "qwen2"])
def test_code_of_a_folder_never_runs(
    model: Path, model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even after a ``y`` on standard input, which transformers asks for unless it is told not to."""
    (model / "code.py").write_text(CODE.format(mark=str(tmp_path / "ran")))
    classes = {
        "AutoConfig": "code.Config",
        "AutoModelForCausalLM": "code.Model",
        "AutoTokenizer": ["code.Tokenizer"] * 2,
    }
    keys("config.json", model_type=model_type, auto_map=classes)(model)
    keys("tokenizer_config.json", auto_map=classes, tokenizer_class="Tokenizer")(model)
    for load in LOADERS:
        monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
        try:
            load(model)
        except UserError as error:
            assert str(model) in str(error)
    assert not (tmp_path / "ran").exists()


def test_an_adapter_beside_the_weights_is_not_merged_silently(model: Path) -> None:
    (model / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "/elsewhere"}')
    with pytest.raises(UserError, match=r"adapter_config\.json: the folder holds an adapter, not a whole model"):
        TorchEngine.from_pretrained(model, TorchEngineConfig(dtype="float32"))


DAMAGE: dict[str, tuple[Change, str]] = {
    "a billion layers": (keys("config.json", num_hidden_layers=10**9), "config.json: 'num_hidden_layers'"),
    "two thousand layers": (
        keys("config.json", num_hidden_layers=2000, layer_types=None), "config.json: 'num_hidden_layers'"
    ),
    "a wide model": (keys("config.json", hidden_size=2**24), "config.json: asks for"),
    "a vocabulary beyond memory": (keys("config.json", vocab_size=2**40), "config.json: asks for"),
    "a number beyond 64 bits": (keys("config.json", vocab_size=10**30), "config.json: 'vocab_size'"),
    "a billion labels": (keys("config.json", num_labels=10**9), "config.json: 'num_labels'"),
    "a kernel of a hub": (keys("config.json", attn_implementation="a/b"), "names code outside the folder"),
    "an unknown type": (keys("config.json", model_type="nothing"), "config.json: cannot be used"),
    "text for a number": (keys("config.json", hidden_size="wide"), "config.json: "),
    "heads that do not fit": (keys("config.json", num_key_value_heads=1), "mismatched keys in the weights: .*k_proj"),
    "a repeated key": (text("config.json", '{"model_type": "qwen2", "model_type": "llama"}'), "config.json: .*twice"),
    "a deep nest": (text("config.json", "[" * 10**5), "config.json: .*nested deeper"),
    "no JSON": (text("config.json", b"\x00\xff"), "config.json:1: not UTF-8"),
    "a pipe": (replaced("config.json", os.mkfifo), "config.json"),
    "a folder": (replaced("config.json", Path.mkdir), "config.json"),
    "a damaged generation config": (text("generation_config.json", "{"), "generation_config.json: not valid JSON"),
    "a stop id of text": (keys("generation_config.json", eos_token_id="stop"), "generation_config.json"),
    "empty weights": (text("model.safetensors", b""), "model.safetensors: not a sound safetensors file"),
    "a header beyond the file": (text("model.safetensors", b"\xff" * 8 + b"{}"), "model.safetensors: not a sound"),
    "weights in a pipe": (replaced("model.safetensors", os.mkfifo), "model.safetensors: not a regular file"),
    "no weights": (replaced("model.safetensors", lambda path: None), "no safetensors file"),
    "an index that leads out": (
        text("model.safetensors.index.json", '{"weight_map": {"a": "../x.safetensors"}}'), "not a .safetensors file"
    ),
}  # fmt: skip


TOKENIZERS: dict[str, tuple[Change, str]] = {
    "a repeated token": (text("tokenizer.json", '{"model": {"vocab": {"a": 1, "a": 2}}}'), "tokenizer.json: .*twice"),
    "a token far away": (text("tokenizer.json", '{"model": {"vocab": {"a": 1000000000}}}'), "'a' has id 1000000000"),
    "an added token far away": (text("tokenizer.json", '{"added_tokens": [{"id": 1000000000}]}'), "has id 1000000000"),
    "no model": (text("tokenizer.json", "{}"), "cannot load the tokenizer"),
    "another type": (keys("tokenizer.json", model=7), "cannot load the tokenizer"),
    "no JSON": (text("tokenizer_config.json", "]"), "tokenizer_config.json: not valid JSON"),
    "a list": (text("tokenizer_config.json", "[]"), "tokenizer_config.json: holds a list"),
    "a special token of numbers": (keys("tokenizer_config.json", eos_token=[1]), "cannot load the tokenizer"),
    "a pipe": (replaced("tokenizer_config.json", os.mkfifo), "tokenizer_config.json: not a regular file"),
}


@pytest.mark.parametrize(
    ("load", "change", "line"),
    [(LOADERS[1], *damage) for damage in DAMAGE.values()]
    + [(load_tokenizer, *damage) for damage in TOKENIZERS.values()],
    ids=[*DAMAGE, *(f"a tokenizer with {damage}" for damage in TOKENIZERS)],
)
def test_damaged_folders(model: Path, load: Callable[[Path], object], change: Change, line: str) -> None:
    change(model)
    with pytest.raises(UserError, match=line) as refused:
        load(model)
    assert str(model) in str(refused.value) and "\n" not in str(refused.value)


def test_what_python_writes_into_published_folders_is_read(model: Path) -> None:
    """No limit is 10**30 in a tokenizer's config, and some configs hold an infinity."""
    keys("tokenizer_config.json", model_max_length=10**30)(model)
    keys("config.json", time_step_limit=[0.0, float("inf")])(model)
    assert load_tokenizer(model).model_max_length == 10**30
    TorchEngine.from_pretrained(model, TorchEngineConfig(dtype="float32"))


COPIED = ["README.md", "LICENSE", "chat_template.jinja", "tokenizer_config.json", "generation_config.json"]


@pytest.mark.parametrize("file", COPIED)
def test_a_link_out_of_the_folder_is_not_copied(
    model: Path, file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = tmp_path / "secret"
    secret.write_text('{"secret": 1}')
    (model / file).unlink(missing_ok=True)
    (model / file).symlink_to(secret)
    with pytest.raises(UserError, match=f"{file}: leads out of the folder, to {secret}"):
        require_exportable(tmp_path / "out", model)
    for command in (["hf-to-megatron"], ["pad-vocab", "--multiple", "8"], ["extract-head"]):
        capsys.readouterr()
        assert main(["convert", command[0], str(model), str(tmp_path / "out"), *command[1:]]) == 2
        told = capsys.readouterr().err
        assert told.startswith("mopd: error: ") and "leads out of the folder" in told and told.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "secret"]


def test_links_of_a_hub_cache_and_within_the_folder_are_copied(model: Path, tmp_path: Path) -> None:
    blobs = tmp_path / "hub" / "models--us--ours" / "blobs"
    snapshot = blobs.parent / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(model.iterdir())):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    # What several models share lies beside them all, behind a link of each.
    digest = "ab" * 32
    shared = tmp_path / "hub" / "blobs" / digest[:2] / digest
    shared.parent.mkdir(parents=True)
    blob = (snapshot / "tokenizer.json").resolve()
    blob.rename(shared)
    blob.symlink_to(shared)
    (snapshot / "LICENSE").symlink_to("config.json")
    run_job(streaming.hf_to_megatron(snapshot, tmp_path / "out", TargetLayout()))
    for name in ("config.json", "tokenizer.json", "LICENSE"):
        copy = tmp_path / "out" / "hf" / name
        assert not copy.is_symlink() and copy.read_bytes() == (snapshot / name).read_bytes()


def test_nothing_is_written_through_a_link(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for link in (tmp_path / "out", tmp_path / ".out.converting", tmp_path / ".out.converting" / "out"):
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(elsewhere)
        assert main(["convert", "hf-to-megatron", str(model), str(tmp_path / "out"), "--resume"]) == 2
        assert f"{link}: is a symbolic link" in capsys.readouterr().err
        link.unlink()
    assert list(elsewhere.iterdir()) == []


NEGATIVE = '{"name": "a", "num_bytes": 1, "sha256": "", "facts": [-1]}\n'
JOURNALS = ["{}\n", '{"name": 1}\n', "[\n", NEGATIVE, "\x00\n", "[]"]


@pytest.mark.parametrize("line", JOURNALS)
def test_a_damaged_journal(model: Path, tmp_path: Path, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    job = streaming.hf_to_megatron(model, tmp_path / "out", TargetLayout())
    assert job.begin(resume=False)
    (job.work / "journal" / "a.json").write_text(line)
    assert job._lock_file is not None
    job._lock_file.close()
    assert main(["convert", "hf-to-megatron", str(model), str(tmp_path / "out"), "--resume"]) == 2
    told = capsys.readouterr().err
    assert re.search(r"a\.json: (not understood; |not valid JSON .*: |holds a list, .*: )remove ", told)
    assert told.count("\n") == 1


def test_a_comparison_ends_after_a_thousand_differences(
    whole: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys("config.json", num_hidden_layers=1500, layer_types=None)(model)
    assert main(["convert", "verify", str(whole), str(model), "--json"]) == 1
    differences = json.loads(capsys.readouterr().out)["differences"]
    assert 1000 < len(differences) < 1010 and "not compared" in differences[-1]["problem"]


def test_a_model_whose_config_has_no_place_for_stop_ids_has_none(tmp_path: Path) -> None:
    """transformers' own text config of Qwen3-VL has none by itself."""
    from transformers import Qwen3VLConfig  # heavy

    assert read_stop_ids(tmp_path, Qwen3VLConfig()) == ()
