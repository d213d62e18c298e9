"""The stages of ``tools/gpu_student.py`` in which a rollout shares the student's GPU."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from tools.gpu_stage import Check, Failed, Stage, need, start, wait

NEEDS = ("megatron.core", "transformers", "tokenizers", "pyarrow", "fastapi", "uvicorn", "httpx", "msgpack")
STEPS = 4
VLLM_SHARE = 0.6
"""Of the GPU, for the rollout's turn."""


def shared_stage(device: str, dtype: str, work: Path, stage: Stage, deadline: float) -> None:
    """``mopd train`` with student and rollout on one GPU by turns, beside a teacher that a server on the CPU scores."""
    need((*NEEDS, *(["vllm"] if device == "cuda" else [])))
    from tools import make_quickstart
    from tools.quickstart.cache import PartsFolder

    make_quickstart.STEPS = dict.fromkeys(make_quickstart.STEPS, 10)
    make_quickstart.TRAIN_ROWS, make_quickstart.VALIDATION_ROWS = 64, 8
    assets, ready = work / "assets", work / "ready.json"
    make_quickstart.build(PartsFolder(assets), threads=0)
    recipe = work / "run.yaml"
    recipe.write_text(json.dumps(shared_recipe(assets, work / "run", device)), encoding="utf-8")
    serve = [sys.executable, "-m", "mopd", "serve", str(recipe), "--teacher", "one", "--ready-file", str(ready)]
    teacher = start(serve, "cpu")
    try:
        while not ready.is_file():
            if teacher.poll() is not None or time.monotonic() > deadline:
                raise Failed("the teacher's server did not start")
            time.sleep(0.1)
        url = json.loads(ready.read_text())["url"]
        where = f"teachers.one.placement={{type: external, urls: ['{url}']}}"
        train = [sys.executable, "-m", "mopd", "train", str(recipe), "--set", where]
        wait(start(train, device), "mopd train with share_gpus_with", deadline)
    finally:
        teacher.kill()
        teacher.wait()
    lines = [json.loads(line) for line in (work / "run" / "metrics.jsonl").read_text().splitlines()]
    names = ("memory/", "timing/")
    stage.figures = {"steps": [{k: v for k, v in line.items() if k.startswith(names)} for line in lines]}
    lent = lines[-1]["memory/student_lent_gib"]
    stage.checks = [
        Check(name="steps", value=len(lines), limit=STEPS, ok=len(lines) == STEPS),
        Check(name="the student lends, GiB", value=lent, limit=0.0, ok=lent > 0.0),
    ]
    if device == "cuda":
        import torch

        total = torch.cuda.get_device_properties(0).total_memory / 2**30
        engine = VLLM_SHARE * total
        kept = (total - min(line["memory/free_for_student_gib"] for line in lines)) / engine
        stage.checks.append(Check(name="kept while asleep, of the engine's", value=kept, limit=0.1, ok=kept <= 0.1))


def shared_recipe(assets: Path, run: Path, device: str) -> dict[str, Any]:
    """One rank and one replica on its GPU; without CUDA torch engines, whose weights sleep as well."""
    vllm = {"type": "vllm", "gpu_memory_utilization": VLLM_SHARE}
    return {
        "run_dir": str(run),
        "student": {"model": f"{assets}/base", "optimizer": {"lr": 1e-4}},
        "teachers": {
            "one": {
                "model": f"{assets}/teachers/reversal",
                "default": True,
                "engine": {"type": "torch", "dtype": "float32"},
            }
        },
        "data": {"train": [f"{assets}/data/train.parquet"], "max_prompt_length": 64},
        "rollout": {
            "max_response_length": 16,
            "engine": vllm if device == "cuda" else {"type": "torch"},
            "placement": {"type": "local", "share_gpus_with": "student"},
        },
        "weight_sync": {"type": "ipc"},
        "schedule": {"steps": STEPS, "prompts_per_step": 24},
        "checkpoint": {"every_steps": 2, "export_hf": False},
    }
