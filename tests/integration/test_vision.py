"""Runs of a vision-language student with a teacher that sees images and one that does not, as a user starts them.

Models are random: what is shown here is that the parts fit, that nothing is lost between them, and that a run is a
function of its recipe. That such a student learns is shown by ``recipes/vision_cpu.yaml``.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import Qwen2_5_VLForConditionalGeneration

from mopd.cli.main import main
from tests.fixtures.tiny_models import make_hf_model
from tests.fixtures.vision import VISION_VOCAB_SIZE, image_bytes, make_vision_model, make_vision_tokenizer
from tests.integration.world import mopd, read_metrics, read_validation, start_mopd

pytestmark = [pytest.mark.slow, pytest.mark.multirank]
STEPS = 3
SIZES = ((56, 84), (75, 101))
"""The second is scaled."""


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and data: training images by path, one row with two of them; validation images as bytes."""
    folder = tmp_path_factory.mktemp("vision")
    make_vision_model(folder / "student", seed=0)
    make_vision_model(folder / "reader", seed=1)
    make_hf_model(folder / "sorter", "qwen2", seed=2, vocab_size=VISION_VOCAB_SIZE)
    make_vision_tokenizer(folder / "sorter")
    (folder / "images").mkdir()
    lines = []
    for number in range(8):
        (folder / f"images/{number}.png").write_bytes(image_bytes(*SIZES[number % 2], seed=number))
        names = [f"images/{number}.png", f"images/{(number + 1) % 8}.png"] if number == 3 else [f"images/{number}.png"]
        read = _row("read", "<image>" * len(names) + f"what {number}")
        lines += [{**read, "images": [{"path": name} for name in names]}, _row("sort", f"sort {number}")]
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    held_out = [
        {**_row("read", f"see <image> {n}"), "images": [{"bytes": image_bytes(seed=20 + n, kind="JPEG"), "path": None}]}
        for n in range(3)
    ]
    texts = [{**_row("sort", f"sort {n}"), "images": None} for n in range(20, 23)]
    pq.write_table(pa.Table.from_pylist([*held_out, *texts]), folder / "validation.parquet")
    return folder


def _row(domain: str, content: str) -> dict[str, Any]:
    prompt = [{"role": "user", "content": content}]
    return {"data_source": domain, "prompt": prompt, "reward_model": {"style": "rule", "ground_truth": "a"}}


def write_recipe(assets: Path, run_dir: Path, *, parallel: dict[str, int], **student: Any) -> Path:
    """Beside ``run_dir``. The reader is a server, so images go over the wire; the others stand in the orchestrator."""
    tree = {
        "run_dir": str(run_dir),
        "seed": 3,
        "student": {
            "model": str(assets / "student"),
            "dtype": "float32",
            "parallel": parallel,
            "optimizer": {"lr": 2.0e-3, "lr_warmup_steps": 1},
            "max_tokens_per_micro_batch": 256,
            **student,
        },
        "teachers": {
            "reader": {
                "model": str(assets / "reader"),
                "domains": ["read"],
                "placement": {"type": "local", "num_threads": 1},
            },
            "sorter": {"model": str(assets / "sorter"), "domains": ["sort"]},
        },
        "data": {
            "train": [str(assets / "train.jsonl")],
            "validation": [str(assets / "validation.parquet")],
            "max_prompt_length": 64,
        },
        "rollout": {"max_response_length": 4},
        "loss": {"type": "topk_forward_kl", "top_k": 8},
        "schedule": {"steps": STEPS, "prompts_per_step": 8, "wait_timeout_s": 120},
        "rewards": {"default": {"type": "exact_match"}},
        "preflight": {"require_better_teacher": False},
        "validation": {"every_steps": STEPS},
        "checkpoint": {"every_steps": 1, "keep_last": STEPS},
        "metrics": {"tensorboard": False},
    }
    path = run_dir.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def trained(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a whole run that trains its tower, on two tensor-parallel ranks."""
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    layout = {"tensor_model_parallel_size": 2}
    recipe = write_recipe(assets, run_dir, parallel=layout, vision={"freeze": "none"})
    done = mopd("train", recipe)
    assert done.returncode == 0, done.stderr
    return run_dir


def test_all_weights_move_and_come_back_by_their_names(assets: Path, trained: Path) -> None:
    before, after = (load_file(folder / "model.safetensors") for folder in (assets / "student", trained / "hf"))
    assert before.keys() == after.keys()
    assert [name for name, weight in before.items() if torch.equal(weight, after[name])] == []
    exported = Qwen2_5_VLForConditionalGeneration.from_pretrained(trained / "hf")
    for name, weight in exported.model.visual.state_dict().items():
        assert torch.equal(weight, after[f"visual.{name}"]), name
    processing = "preprocessor_config.json"
    assert (trained / "hf" / processing).read_bytes() == (assets / "student" / processing).read_bytes()


def test_the_report_shows_what_was_seen(trained: Path) -> None:
    assert main(["report", str(trained)]) == 0
    page = (trained / "report.html").read_text()
    assert page.count('<img src="data:image/jpeg;base64,') == 3
    records = read_validation(trained)
    held = [["images" in row for row in record["examples"]["read"]] for record in records]
    assert held == [[True] * 3, [False] * 3]
    assert not any("images" in row for record in records for row in record["examples"]["sort"])


@pytest.mark.long
def test_killed_run_resumes_bit_for_bit(assets: Path, trained: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    layout = {"tensor_model_parallel_size": 2}
    recipe = write_recipe(assets, run_dir, parallel=layout, vision={"freeze": "none"})
    process = start_mopd("train", recipe)
    deadline, metrics = time.monotonic() + 120, run_dir / "metrics.jsonl"
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 1:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[1]
        time.sleep(0.01)
    family = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=60)
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive

    done = mopd("train", recipe, "--resume")

    assert done.returncode == 0, done.stderr
    assert _computed(run_dir) == _computed(trained)
    assert read_validation(run_dir) == read_validation(trained)
    ours, theirs = (load_file(run / "hf" / "model.safetensors") for run in (run_dir, trained))
    assert ours.keys() == theirs.keys()
    assert [name for name, weight in ours.items() if not torch.equal(weight, theirs[name])] == []


def _computed(run_dir: Path) -> list[dict[str, float]]:
    """Without what happened on the wire: a server that has started anew is sent the images again, and one that is slow
    is asked again."""
    wire = tuple(f"teachers/{name}" for name in ("payload_bytes", "retries", "failures", "busy_answers"))
    return [
        {name: value for name, value in line.items() if not name.startswith(wire)} for line in read_metrics(run_dir)
    ]


@pytest.mark.long
def test_a_frozen_tower_stays_and_its_merger_learns(assets: Path, tmp_path: Path) -> None:
    """On two pipeline stages, of which the first has the tower."""
    run_dir = tmp_path / "run"
    layout = {"pipeline_model_parallel_size": 2}
    recipe = write_recipe(assets, run_dir, parallel=layout)
    placements = ("teachers.reader.placement={type: in_process}", "rollout.placement={type: local, num_threads: 1}")
    done = mopd("train", recipe, "schedule.steps=2", *placements)
    assert done.returncode == 0, done.stderr
    before, after = (load_file(folder / "model.safetensors") for folder in (assets / "student", run_dir / "hf"))
    same = {name for name, weight in before.items() if torch.equal(weight, after[name])}
    assert same == {name for name in before if name.startswith(("visual.patch_embed.", "visual.blocks."))}


def test_a_text_teacher_for_images_ends_before_anything_is_written(assets: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    recipe = write_recipe(assets, run_dir, parallel={"tensor_model_parallel_size": 1})
    done = mopd("train", recipe, "teachers.reader.domains=[sort]", "teachers.sorter.domains=[read]")
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("mopd: error:")]
    assert "8 rows" in line and "sorter" in line
    assert not run_dir.exists()
