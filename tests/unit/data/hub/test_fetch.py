"""Models and data of a real HTTP server by way of the real library: what is fetched, what is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub import constants

from mopd.base.types import UserError
from mopd.data.hub import fetch
from mopd.data.hub.fetch import fetch_data, fetch_model
from mopd.data.hub.names import CONVERTED, HubName, hub_data, hub_model
from tests.fixtures.hub import LoopbackHub

WHOLE = {
    "config.json": b"{}",
    "generation_config.json": b"{}",
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"x",
    "additional_chat_templates/tool.jinja": b"x",
    "LICENSE": b"free",
    "model.safetensors": b"12345678",
}
NEVER = {
    "pytorch_model.bin": b"pickle",
    "modeling_own.py": b"code",
    "tokenizer_own.py": b"code",
    "training_args.bin": b"pickle",
    "original/model.safetensors": b"else",
    "onnx/model.onnx": b"else",
    "consolidated.safetensors": b"else",
}
ROWS = {"main/train-00000-of-00002.parquet": b"a", "main/train-00001-of-00002.parquet": b"b", "main/test.parquet": b"c"}


def model(text: str = "org/model") -> HubName:
    name = hub_model(text)
    assert name is not None
    return name


def data(text: str) -> HubName:
    name = hub_data(text)
    assert name is not None
    return name


def below(folder: str) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file()}


def test_a_model_without_pickles_and_code(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = hub.add("models/org/model", WHOLE | NEVER)
    fetched = fetch_model(model())
    assert fetched.commit == commit and below(fetched.paths[0]) == set(WHOLE)
    assert (Path(fetched.paths[0]) / "model.safetensors").read_bytes() == b"12345678"
    hub.add("models/org/model", WHOLE | {"config.json": b'{"a": 1}'})
    assert fetch_model(model(f"org/model@{commit}")).paths == fetched.paths
    moved = fetch_model(model("org/model@main"))
    assert moved.commit != commit and (Path(moved.paths[0]) / "config.json").read_bytes() == b'{"a": 1}'
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch_model(model("org/model@main")) == moved and hub.requests == []


def test_shards_are_those_of_the_index(hub: LoopbackHub) -> None:
    shards = {f"model-0000{i}-of-00002.safetensors": b"%d" % i for i in (1, 2)}
    index = {"model.safetensors.index.json": json.dumps({"weight_map": dict(zip("ab", shards, strict=True))}).encode()}
    hub.add("models/org/model", {"config.json": b"{}", **shards, **index, **NEVER, "model-old.safetensors": b"else"})
    fetched = fetch_model(model())
    assert below(fetched.paths[0]) == {"config.json", *shards, *index}
    assert below(fetch_model(model(), with_weights=False).paths[0]) >= {"config.json"}
    hub.add("models/org/model", {"config.json": b"{}", **index})
    with pytest.raises(UserError, match=r"it has no file 'model-00001-of-00002.safetensors', which model.safetensors"):
        fetch_model(model())


def test_splits_and_files_of_data_sets(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = hub.add("datasets/org/data", ROWS | {"data/train-0.parquet": b"d", "x/deep/e.jsonl": b"{}"})
    for part, files in {
        "main/train": ["main/train-00000-of-00002.parquet", "main/train-00001-of-00002.parquet"],
        "main/test": ["main/test.parquet"],
        "train": ["data/train-0.parquet"],
        "main/*.parquet": sorted(ROWS),
        "x/deep/e.jsonl": ["x/deep/e.jsonl"],
    }.items():
        fetched = fetch_data(data(f"org/data:{part}"))
        root = constants.HF_HUB_CACHE + f"/datasets--org--data/snapshots/{commit}/"
        assert fetched.commit == commit and [path.removeprefix(root) for path in fetched.paths] == sorted(files)
    converted = hub.add("datasets/org/data", {"other/train/0000.parquet": b"z"}, branch=CONVERTED)
    fetched = fetch_data(data("org/data:other/train"))
    assert fetched.commit == converted and Path(fetched.paths[0]).read_bytes() == b"z"
    with pytest.raises(
        UserError, match=r"it has no 'no/train': name one of its splits or files \(data/train-0.parquet"
    ):
        fetch_data(data("org/data:no/train"))
    with pytest.raises(UserError, match="it has no 'other/train'"):
        fetch_data(data("org/data@main:other/train"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch_data(data("org/data:other/train")) == fetched
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set, and the cache"):
        fetch_data(data("org/data:no/train"))
    with pytest.raises(UserError, match="needs a split or a file: write org/data:SPLIT"):
        fetch_data(data("org/data"))


def refusal(text: str = "org/model") -> str:
    with pytest.raises(UserError) as caught:
        fetch_model(model(text))
    message = str(caught.value)
    assert "\n" not in message and len(message) < 900
    return message


def test_what_a_repository_may_be_instead(hub: LoopbackHub) -> None:
    assert "there is no such model, or none that HF_TOKEN may see" in refusal()
    hub.add("models/org/model", WHOLE)
    assert "it has no revision 'v9': name a branch, a tag or a commit" in refusal("org/model@v9")
    assert "it has no revision" in refusal(f"org/model@{'0' * 40}")
    repository = hub.repositories["models/org/model"]
    for status in (401, 403):
        repository.error = (status, "GatedRepo")
        assert f"it is gated: ask for access on {hub.url}/org/model, and set HF_TOKEN" in refusal()
        repository.error = (status, "")
        assert f"access is refused (HTTP {status}): set HF_TOKEN" in refusal()
    repository.error = None
    hub.add("models/org/model", {"config.json": b"{}", "pytorch_model.bin": b"pickle"})
    assert "it has no model.safetensors and no model.safetensors.index.json" in refusal()
    hub.add("models/org/model", {"model.safetensors": b"1"})
    assert "it has no config.json" in refusal()
    for name in ("tokenizer\n.json", f"tokenizer{'x' * 300}.json", "additional_chat_templates/.."):
        hub.add("models/org/model", WHOLE | {name: b"{}"})
        assert "it has a file of the name" in refusal()


def test_a_token_reaches_the_hub(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("models/org/model", WHOLE)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    fetch_model(model())
    assert hub.tokens == {"Bearer hf_secret"}


def test_a_sick_server(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("models/org/model", WHOLE)
    for garbage in (b"<html>", b"[]", b'{"sha": "../../x"}', b'{"id": "a", "sha": 5}', b'[{"type": "file"}]'):
        hub.garbage = {"info": garbage, "tree": garbage}
        assert "cannot be fetched" in refusal() or "for a commit" in refusal()
    hub.garbage = {}
    hub.repositories["models/org/model"].sent_bytes = 3
    assert "cannot be fetched (OSError: Consistency check failed" in refusal()
    hub.repositories["models/org/model"].sent_bytes = None
    monkeypatch.setattr(fetch, "MAX_FILES", 3)
    hub.add("models/org/model", WHOLE | {"more": b""})
    assert "it lists more than 3 files" in refusal()
    monkeypatch.setattr(fetch, "MAX_FILES", 100)
    monkeypatch.setattr(fetch, "STALL_TIMEOUT_S", 0.5)
    hub.stalls_after = 3
    hub.add("models/org/model", WHOLE | {"model.safetensors": b"a" * 100})
    assert "cannot be fetched (TimeoutError: nothing came for 0.5 s): check network" in refusal()
    hub.stalls_after = None
    monkeypatch.setattr(fetch, "ANSWER_TIMEOUT_S", 0.3)
    hub.released.clear()
    assert "cannot be fetched (TimeoutError: nothing came for 0.3 s): check network" in refusal()


def test_no_network_and_an_empty_cache(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    message = refusal()
    assert "cannot be fetched (RevisionResolutionError" in message and "HF_HUB_OFFLINE=1" in message
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set, and the cache" in refusal()


def test_an_incomplete_cache_is_told(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("models/org/model", WHOLE)
    folder = Path(fetch_model(model()).paths[0])
    (folder / "model.safetensors").unlink()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "does not hold it whole" in refusal()
