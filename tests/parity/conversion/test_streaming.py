"""Streaming conversion and real Megatron agree, both ways, bit for bit, for every family, tying, dtype and layout.

- What streaming writes, cut for a layout, Megatron's own ``dist_checkpointing.load`` reads into a ``GPTModel`` of that
  layout, and every parameter of every rank is what the rank reads from the Hugging Face folder by itself.
- What Megatron saves at a layout, streaming turns into the Hugging Face folder that the model came from.
- What streaming writes it also reads back, at the same cut and after ``reshard`` to another one.

Two ranks run every layout in one start. Not exercised: CUDA, TransformerEngine.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mopd.conversion.hf.reader import HfReader
from mopd.conversion.job import Job
from mopd.conversion.jobs import streaming
from mopd.conversion.models.reading import read_dims
from mopd.conversion.torch_dist.plan import TargetLayout
from tests.fixtures.tiny_models import FAMILIES, make_hf_model, make_tokenizer
from tests.fixtures.vision import VISION_FAMILIES, make_vision_model

LAYOUTS = ("1x1x1", "2x1x1", "1x2x1", "1x1x2", "2x1x2")
"""TP x PP x EP."""
PIPELINES = ("1x2x1x2x0", "1x2x1x1x1")
"""... x model chunks of a stage x layers of the last stage (0: as many as the others), for ``-deep`` models."""
ODD_VOCAB = 61
NAMES = [f"{family}-{head}" for family in FAMILIES for head in ("tied", "untied")] + ["qwen3_moe-mixed", "qwen3-bf16"]
NAMES += ["qwen2_5_vl-tied", "qwen3_vl-untied", "qwen3-deep", "deepseek_v3-deep"]

pytestmark = [pytest.mark.multirank, pytest.mark.slow]


def run(job: Job) -> None:
    assert job.begin(resume=False)
    job.write_share(0, 1)
    job.complete()


def target_layout(text: str) -> TargetLayout:
    tp, pp, ep, vp, last = (int(number) for number in (text + "x1x0").split("x")[:5])
    return TargetLayout(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vp,
        num_layers_in_last_pipeline_stage=last or None,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=1 if ep > 1 else tp,
    )


def fits(name: str, layout: str, folder: Path) -> bool:
    if name.endswith("-deep") or layout in PIPELINES:
        return name.endswith("-deep") and layout in ("1x1x1", *PIPELINES)
    return layout.endswith("x1") or read_dims(folder / name).moe is not None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hugging Face folders, what streaming makes of them, and what Megatron saved (see ``streaming_ranks.py``)."""
    folder = tmp_path_factory.mktemp("streaming")
    for seed, name in enumerate(NAMES):
        family, kind = name.split("-")
        keys = {"mixed": {"decoder_sparse_step": 2}, "deep": {"num_layers": 4}}.get(kind, {})
        tied = kind == "tied"
        if family in VISION_FAMILIES:
            make_vision_model(folder / name, family, seed, num_layers=4, tie_word_embeddings=tied)
            continue
        make_hf_model(folder / name, family, seed, vocab_size=ODD_VOCAB, tie_word_embeddings=tied, **keys)
        make_tokenizer(folder / name)
    path = folder / "qwen3-bf16" / "model.safetensors"
    weights = {name: tensor.bfloat16() for name, tensor in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})
    for name in NAMES:
        for layout in (*LAYOUTS, *PIPELINES):
            if fits(name, layout, folder):
                target = folder / f"{name}-streamed-{layout}"
                run(streaming.hf_to_megatron(folder / name, target, target_layout(layout), max_file_bytes=100_000))
    root = Path(__file__).parents[3]
    script = Path(__file__).with_name("streaming_ranks.py")
    torchrun = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [*torchrun, str(script), str(folder), ",".join((*LAYOUTS, *PIPELINES)), *NAMES],
        env=environment, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    return folder


def require_same_bits(one: Path, other: Path) -> None:
    before, after = HfReader(one), HfReader(other)
    expected = set(before.names)
    if read_dims(one).tied_embeddings:
        expected.discard("lm_head.weight")
    assert after.names == expected
    for name in expected:
        old, new = before.read(name), after.read(name)
        assert old.dtype == new.dtype and old.shape == new.shape, name
        assert torch.equal(old.reshape(-1).view(torch.uint8), new.reshape(-1).view(torch.uint8)), name


@pytest.mark.parametrize("name", NAMES)
def test_what_megatron_saved_comes_back(folder: Path, tmp_path: Path, name: str):
    for layout in (*LAYOUTS, *PIPELINES):
        if fits(name, layout, folder):
            run(streaming.megatron_to_hf(folder / f"{name}-saved-{layout}", tmp_path / layout))
            require_same_bits(folder / name, tmp_path / layout)


@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith("-tied")])
def test_what_streaming_wrote_comes_back_after_reshard(folder: Path, tmp_path: Path, name: str):
    layouts = [layout for layout in (*LAYOUTS, *PIPELINES) if fits(name, layout, folder)]
    for old, new in zip(layouts, [*layouts[1:], layouts[0]], strict=True):
        source = folder / f"{name}-streamed-{old}"
        run(streaming.megatron_to_hf(source, tmp_path / f"straight-{old}"))
        require_same_bits(folder / name, tmp_path / f"straight-{old}")
        run(streaming.reshard(source, tmp_path / f"cut-{new}", target_layout(new), max_file_bytes=100_000))
        data = {path.name: path.read_bytes() for path in (tmp_path / f"cut-{new}").glob("__*.distcp")}
        expected = {path.name: path.read_bytes() for path in (folder / f"{name}-streamed-{new}").glob("__*.distcp")}
        assert data == expected, "resharded files are those of a conversion cut for that layout"
        run(streaming.megatron_to_hf(tmp_path / f"cut-{new}", tmp_path / f"back-{new}"))
        require_same_bits(folder / name, tmp_path / f"back-{new}")


def test_side_files_travel_through(folder: Path, tmp_path: Path):
    run(streaming.megatron_to_hf(folder / "qwen3-untied-streamed-2x1x1", tmp_path / "out"))
    for path in (folder / "qwen3-untied").iterdir():
        if not path.name.startswith("model"):
            assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), path.name
