"""What is a path and what a name of the Hub, and which files a part means."""

from __future__ import annotations

from pathlib import Path

import pytest

from mopd.data.hub.names import HubName, files_of_part, hub_data, hub_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("models/here", "Qwen/Qwen3-8B@main"):
        (tmp_path / name).mkdir(parents=True)


@pytest.mark.parametrize(
    ("text", "repository", "revision"),
    [
        ("org/name", "org/name", None),
        ("meta-llama/Llama-3.1_8B", "meta-llama/Llama-3.1_8B", None),
        ("org/name@v1.0", "org/name", "v1.0"),
        (f"org/name@{COMMIT}", "org/name", COMMIT),
        ("org/name@refs/pr/3", "org/name", "refs/pr/3"),
        ("models/absent@main", "models/absent", "main"),
    ],
)
def test_models(text: str, repository: str, revision: str | None) -> None:
    assert hub_model(text) == HubName(repository=repository, revision=revision, part=None)
    assert str(hub_model(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "models/here", "models/absent", "Qwen/Qwen3-8B@main", "./org/name", "/org/name", "name", "a/b/c", "org/",
        "/name", "org/na me", "org/name@", "org/name@../x", "org/name@a b", "org/a--b", "org/a..b", "org/name.git",
        "-org/name", "org/name-", "org/näme", "org/name:part", "https://host/x", "org/" + "x" * 100,
        "", "org/name\n", "o\0/x",
    ],
)  # fmt: skip
def test_paths(text: str) -> None:
    assert hub_model(text) is None


def test_data() -> None:
    for text in ("org/set:train", "org/set:main/train", "org/set@v1:data/*.parquet", "org/set", "org/set:a:b"):
        assert str(hub_data(text)) == text
    for text in ("org/set.parquet", "org/rows.jsonl", "org/set:", "rows.jsonl:train", "models/here", "org/set:a\nb"):
        assert hub_data(text) is None
    assert str(hub_data("org/set.parquet:train")) == "org/set.parquet:train"


def test_parts() -> None:
    files = ["main/train/0000.parquet", "main/train/0001.parquet", "main/test-0.parquet", "data/dev-00-of-01.parquet"]
    files += ["dev.jsonl", "default/x/0.parquet", "data/x-0.parquet", "x.parquet", "rows.csv"]
    for part, expected in {
        "main/train": files[:2],
        "main/test": files[2:3],
        "dev": files[3:4],
        "x": ["default/x/0.parquet"],
        "dev.jsonl": ["dev.jsonl"],
        "main/*.parquet": ["main/test-0.parquet"],
        "*/*/000?.parquet": files[:2],
        "*.parquet": ["x.parquet"],
        "rows": [],
        "../x": [],
    }.items():
        assert files_of_part(part, files) == expected, part
