"""A conversion by one process: there and back every tensor is as it was, and an error leaves nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mopd.cli.main import main
from tests.fixtures.tiny_models import make_hf_model, make_tokenizer


def test_a_folder_comes_back_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_hf_model(tmp_path / "model")
    make_tokenizer(tmp_path / "model")
    assert main(["convert", "hf-to-megatron", str(tmp_path / "model"), str(tmp_path / "there")]) in (0, None)
    assert main(["convert", "megatron-to-hf", str(tmp_path / "there"), str(tmp_path / "back")]) in (0, None)
    told = capsys.readouterr().out
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "back"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert told.count("folder ") == 2 and str(tmp_path / "back") in told
