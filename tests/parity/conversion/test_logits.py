"""A converted checkpoint computes what transformers computes: fp32 logits within 1e-4, every family, tied and untied.

A round trip cannot see a mistake that load and export share (q and k swapped twice, a wrong rotary base): this can.
One rank; other layouts are compared with this one in ``tests/parity/student``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from mopd import cpu_shim
from mopd.config.schema import Parallel, Student
from mopd.conversion.dims import read_dims
from mopd.conversion.hf import HfReader
from mopd.student import parallel
from mopd.student.model import build_model
from mopd.student.weights import load_hf_into
from tests.fixtures.tiny_models import make_hf_model

B, S, VOCAB_SIZE = 2, 23, 61


@pytest.fixture(scope="module")
def layout() -> Iterator[parallel.Layout]:
    yield parallel.initialize(Parallel(), timeout_s=60, seed=0)
    parallel.destroy()
    dist.destroy_process_group()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_logits_equal_those_of_transformers(family: str, tied: bool, layout: parallel.Layout, tmp_path: Path):
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    folder = make_hf_model(
        tmp_path, family, vocab_size=VOCAB_SIZE, tie_word_embeddings=tied, rope_parameters=rope, rms_norm_eps=1e-5
    )
    dims = read_dims(folder)
    tokens = torch.randint(VOCAB_SIZE, (B, S), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(S).expand(B, S)
    hidden = torch.ones(S, S, dtype=torch.bool).triu(1)[None, None]
    with cpu_shim.activate(), torch.no_grad():
        model = build_model(Student(model=str(folder), dtype="float32"), dims, layout)
        load_hf_into([model], HfReader(folder), dims, tp_group=layout.tp_group)
        logits = model(tokens, positions, hidden)
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens).logits
    assert expected.std() > 0.5, "logits too flat to tell anything"
    torch.testing.assert_close(logits[..., :VOCAB_SIZE], expected, atol=1e-4, rtol=0)
