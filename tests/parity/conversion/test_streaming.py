"""Hugging Face -> Megatron -> Hugging Face gives every bit back, through a model and by streaming, for every family,
tying, dtype and layout.

- What streaming writes, cut for a layout, Megatron's own ``dist_checkpointing.load`` reads into a ``GPTModel`` of that
  layout, poisoned with NaN before, and every parameter of every rank is what the rank reads from the Hugging Face
  folder by itself, zeros where the vocabulary is padded.
- What such a model exports, and what streaming makes of what Megatron saves of it, is the folder that it came from.
- What streaming writes it also reads back, at the same cut and after ``reshard`` to another one.

Four ranks run every layout in one start; TP1 x PP1 has DP4 there, so that ranks that must stay silent are exercised
too. Not exercised: CUDA, NCCL, TransformerEngine's layer spec and grouped experts (their names are tested in
``tests/unit/student/test_weights.py``).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mopd.conversion.hf.reader import HfReader
from mopd.conversion.jobs import streaming
from mopd.conversion.models.reading import read_dims
from mopd.conversion.torch_dist.plan import TargetLayout
from tests.fixtures.tiny_models import FAMILIES, add_mtp, make_hf_model, make_tokenizer
from tests.fixtures.vision import VISION_FAMILIES, make_vision_model
from tests.unit.conversion.jobs import run_job

Keys = dict[str, int | None]


def keys(tp: int = 1, pp: int = 1, ep: int = 1, etp: int | None = None, vp: int = 1, last: int | None = None) -> Keys:
    return {
        "tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": etp, "virtual_pipeline_model_parallel_size": vp,
        "num_layers_in_last_pipeline_stage": last,
    }  # fmt: skip


DENSE = {"one": keys(), "tp2": keys(tp=2), "pp2": keys(pp=2), "tp2_pp2": keys(tp=2, pp=2)}
EXPERTS = {
    "ep2": keys(ep=2), "ep4": keys(ep=4), "tp2_ep2": keys(tp=2, ep=2, etp=1), "tp2_ep2_etp2": keys(tp=2, ep=2, etp=2),
    "pp2_ep2": keys(pp=2, ep=2), "tp2_pp2_ep2": keys(tp=2, pp=2, ep=2, etp=1),
}  # fmt: skip
DEEP = {"vp2": keys(pp=2, vp=2), "last1": keys(pp=2, last=1)}
LAYOUTS = DENSE | EXPERTS | DEEP
ODD_VOCAB = 61
WITH_EXPERTS = ("qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3", "gpt_oss", "minimax_m2")
THOROUGH = ("llama-tied", "deepseek_v3-tied")
NAMES = [f"{family}-{head}" for family in FAMILIES for head in ("tied", "untied")] + ["qwen3_moe-mixed", "qwen3-bf16"]
NAMES += ["qwen2_5_vl-tied", "qwen3_vl-untied", "qwen3-deep", "deepseek_v3-deep"]

pytestmark = [pytest.mark.multirank, pytest.mark.slow]


def layouts_of(name: str) -> list[str]:
    """Every layout for two checkpoints; for the others one of each dimension, or none and all at once where untied."""
    family, kind = name.split("-")
    has_experts = family in WITH_EXPERTS
    if kind == "deep":
        return ["one", *DEEP]
    if name in THOROUGH:
        return [*DENSE, *(EXPERTS if has_experts else ())]
    if kind == "untied" and family not in VISION_FAMILIES:
        return ["one", "tp2_pp2_ep2" if has_experts else "tp2_pp2"]
    tp2 = "tp2_ep2" if family == "gpt_oss" else "tp2"  # which divides no expert
    return [*(["one"] if family in VISION_FAMILIES else []), tp2, "pp2", *(["ep2"] if has_experts else [])]


def cut_for(layout: str) -> TargetLayout:
    own = LAYOUTS[layout]
    etp = own["expert_tensor_parallel_size"] or own["tensor_model_parallel_size"]
    return TargetLayout(**own | {"expert_tensor_parallel_size": etp})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hugging Face folders, what streaming makes of them, and what ``streaming_ranks.py`` exported and saved."""
    folder = tmp_path_factory.mktemp("streaming")
    for seed, name in enumerate(NAMES):
        family, kind = name.split("-")
        more = {"mixed": {"decoder_sparse_step": 2}, "deep": {"num_layers": 4}}.get(kind, {})
        tied = kind == "tied"
        if family in VISION_FAMILIES:
            make_vision_model(folder / name, family, seed, num_layers=4, tie_word_embeddings=tied)
            continue
        make_hf_model(folder / name, family, seed, vocab_size=ODD_VOCAB, tie_word_embeddings=tied, **more)
        make_tokenizer(folder / name)
    add_mtp(folder / "glm4_moe-untied")
    add_mtp(folder / "qwen3_next-untied", "mtp.")
    path = folder / "qwen3-bf16" / "model.safetensors"
    weights = {name: tensor.bfloat16() for name, tensor in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})
    plan = {
        layout: {"keys": own, "names": [name for name in NAMES if layout in layouts_of(name)]}
        for layout, own in LAYOUTS.items()
    }
    for name in NAMES:
        for layout in layouts_of(name):
            target = folder / f"{name}-streamed-{layout}"
            run_job(streaming.hf_to_megatron(folder / name, target, cut_for(layout), max_file_bytes=100_000))
    root = Path(__file__).parents[3]
    script = Path(__file__).with_name("streaming_ranks.py")
    torchrun = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [*torchrun, str(script), str(folder), json.dumps(plan)],
        env=environment, capture_output=True, text=True, timeout=600, check=False,
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
        old, new = before.read(name).contiguous(), after.read(name).contiguous()
        assert old.dtype == new.dtype and old.shape == new.shape, name
        assert torch.equal(old.reshape(-1).view(torch.uint8), new.reshape(-1).view(torch.uint8)), name


@pytest.mark.parametrize("name", NAMES)
def test_what_a_model_exports_and_what_megatron_saved_comes_back(folder: Path, tmp_path: Path, name: str):
    for layout in layouts_of(name):
        require_same_bits(folder / name, folder / f"{name}-exported-{layout}")
        run_job(streaming.megatron_to_hf(folder / f"{name}-saved-{layout}", tmp_path / layout))
        require_same_bits(folder / name, tmp_path / layout)


@pytest.mark.parametrize("name", NAMES)
def test_what_streaming_wrote_comes_back_after_reshard(folder: Path, tmp_path: Path, name: str):
    layouts = layouts_of(name)
    for old, new in zip(layouts, [*layouts[1:], layouts[0]], strict=True):
        source = folder / f"{name}-streamed-{old}"
        run_job(streaming.megatron_to_hf(source, tmp_path / f"straight-{old}"))
        require_same_bits(folder / name, tmp_path / f"straight-{old}")
        run_job(streaming.reshard(source, tmp_path / f"cut-{new}", cut_for(new), max_file_bytes=100_000))
        data = {path.name: path.read_bytes() for path in (tmp_path / f"cut-{new}").glob("__*.distcp")}
        expected = {path.name: path.read_bytes() for path in (folder / f"{name}-streamed-{new}").glob("__*.distcp")}
        assert data == expected, "resharded files are those of a conversion cut for that layout"
    run_job(streaming.megatron_to_hf(tmp_path / f"cut-{new}", tmp_path / "back"))
    require_same_bits(folder / name, tmp_path / "back")
