"""Conversion commands as a user starts them: plain, under torchrun, and through the scripts in ``tools/``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mopd.conversion.jobs import streaming
from mopd.conversion.torch_dist.plan import TargetLayout
from tests.fixtures.tiny_models import make_hf_model, make_tokenizer
from tests.unit.conversion.jobs import all_bytes, run_job

ROOT = Path(__file__).parents[2]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
SMALL = ("--max-file-bytes", "50000")

pytestmark = [pytest.mark.multirank, pytest.mark.slow]


def python(*arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=240, check=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_hf_model(tmp_path_factory.mktemp("convert") / "model", "mixtral", vocab_size=61)
    make_tokenizer(folder)
    return folder


def test_two_ranks_write_what_one_writes(model: Path, tmp_path: Path):
    run_job(streaming.hf_to_megatron(model, tmp_path / "expected", TargetLayout(), max_file_bytes=50_000))
    done = python(*TORCHRUN, "-m", "mopd", "convert", "hf-to-megatron", model, tmp_path / "megatron", *SMALL)
    assert done.returncode == 0, done.stderr
    assert all_bytes(tmp_path / "megatron") == all_bytes(tmp_path / "expected")
    done = python(*TORCHRUN, "tools/convert_megatron_to_hf.py", tmp_path / "megatron", tmp_path / "hf", *SMALL)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(str(tmp_path / "hf")) == 1, "one rank tells"
    run_job(streaming.megatron_to_hf(tmp_path / "expected", tmp_path / "expected-hf", max_file_bytes=50_000))
    assert all_bytes(tmp_path / "hf") == all_bytes(tmp_path / "expected-hf")


def test_one_ranks_error_ends_all_and_leaves_nothing(model: Path, tmp_path: Path):
    spoiled = shutil.copytree(model, tmp_path / "in" / "spoiled")
    weights = {name: tensor.clone() for name, tensor in load_file(model / "model.safetensors").items()}
    weights["model.norm.weight"][3] = torch.nan
    save_file(weights, spoiled / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "place").mkdir()
    done = python(*TORCHRUN, "-m", "mopd", "convert", "hf-to-megatron", spoiled, tmp_path / "place" / "out", *SMALL)
    assert done.returncode != 0
    line = f"mopd: error: {spoiled}: tensor 'model.norm.weight' has NaN or infinite values"
    assert done.stderr.count(line) == 1
    assert "UserError" not in done.stderr
    assert list((tmp_path / "place").iterdir()) == []


def test_script(model: Path, tmp_path: Path):
    done = python("tools/convert_hf_to_megatron.py", model, tmp_path / "out", "--json")
    assert done.returncode == 0 and '"bytes"' in done.stdout, done.stderr
    done = python("tools/convert_hf_to_megatron.py", model, tmp_path / "out")
    line = f"mopd: error: convert: '{tmp_path / 'out'}' exists and is not an empty folder: name another\n"
    assert done.returncode == 2 and done.stderr == line
