"""Headers of safetensors files, and the index of a folder of several."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save

from mopd.base.types import UserError
from mopd.conversion.hf.header import read_header
from mopd.conversion.hf.reader import HfReader
from tests.fuzz.harness import fuzz

TENSORS = {
    "model.embed_tokens.weight": torch.zeros(5, 4),
    "model.norm.weight": torch.zeros(4, dtype=torch.bfloat16),
    "model.layers.0.mlp.down_proj.weight": torch.zeros(4, 0),
    "scalar": torch.tensor(1.0),
}


def test_headers(tmp_path: Path) -> None:
    def read(content: bytes) -> None:
        path = tmp_path / "model.safetensors"
        path.write_bytes(content)
        read_header(path)

    fuzz("safetensors", [save(TENSORS), save(TENSORS, {"format": "pt"})], read, (UserError,))


def test_indices(tmp_path: Path) -> None:
    one, other = (dict(list(TENSORS.items())[part]) for part in (slice(2), slice(2, None)))
    files = {"model-00001-of-00002.safetensors": one, "model-00002-of-00002.safetensors": other}
    for name, tensors in files.items():
        (tmp_path / name).write_bytes(save(tensors))
    index = {tensor: name for name, tensors in files.items() for tensor in tensors}
    valid = json.dumps({"metadata": {"total_size": 88}, "weight_map": index}, indent=2).encode()

    def read(content: bytes) -> None:
        (tmp_path / "model.safetensors.index.json").write_bytes(content)
        HfReader(tmp_path)

    fuzz("safetensors index", [valid], read, (UserError,))
