"""Files of a run folder, as ``mopd report`` and ``mopd train --resume`` read them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mopd.base.types import UserError
from mopd.cli.watching.status import status_of
from mopd.conversion.hf.manifest import Manifest
from mopd.launch.slurm.job import kept_id
from mopd.report.build import build_report
from mopd.run import resuming
from mopd.run.folder import RunDir
from mopd.run.manifests import check_unchanged
from tests.fuzz.harness import fuzz

MODEL = {"path": "models/m", "config_sha256": "0" * 64, "weights_sha256": "1" * 64, "tokenizer_sha256": "2" * 64}
FINGERPRINT = {"vocab_size": 48, "token_logprobs": [-3.5 + i / 100 for i in range(47)]}
STEP = {
    "loss": 0.25, "grad_norm": 1.5, "lr": 1e-6, "kl_k1/math": 0.1, "kl_k1/code[/]": 1e-9, "entropy/math": None,
    "tokens": 300.0, "timing/step_s": 2.0, "timing/rollout_s": 0.5, "rate/train_tokens_per_s": 150.0,
    "teachers/samples/math": 8.0, "teachers/tokens/math": 200.0, "teachers/busy_s/math": 0.4,
    "teachers/tokens_per_s/math": 500.0, "teachers/latency_p50_s/math": 0.1, "teachers/queue_depth/math": 3.0,
    "teachers/in_flight_tokens/math": 64.0, "teachers/replicas/math": 1.0,
    "timing/wait_batch_s": 0.5, "timing/window_closed_s": 0.1, "timing/rewards_s": 0.2, "staleness_share/0": 0.75,
    "staleness_share/1": 0.25, "response_versions/mean": 1.5, "response_versions/max": 2.0, "refused_samples/math": 3.0,
}  # fmt: skip
EXAMPLE = {"prompt": "user: <b>2+2</b> \x1b", "response": "é", "ground_truth": {"a": [1.5, None]}, "reward": 1.0}
REWARDS = {0: {"math": 0.2, "code[/]": 0.0}, 2: {"math": 0.6, "code[/]": 1.0}}
MANIFESTS = {key: Manifest(**MODEL) for key in ("student", "teachers.math")}
FILES = {
    "recipe.yaml": "student:\n  model: models/student  # my.yaml:3\nschedule:\n  steps: 3\n  prompts_per_step: 8\n",
    "manifest.json": json.dumps(
        {"student": MODEL, "teachers.math": MODEL, "fingerprints": {"teachers.math": FINGERPRINT}}, indent=2
    ),
    "parity.json": json.dumps(
        {"math": {"kl": 1e-6, "mean_difference": 1e-7, "max_difference": 0.0, "num_positions": 8}}, indent=2
    ),
    "headroom.json": json.dumps(
        {"math": {"teacher": 1.0, "examples": [EXAMPLE]}, "code[/]": {"teacher": 0.5}}, indent=2
    ),
    "machine.json": json.dumps(
        {"gpus": ["H100"], "cpu": "a", "num_cores": 8, "memory_gib": 23.5, "packages": {"torch": "2.13.0"}}, indent=2
    ),
    "attempts.json": json.dumps({"starts": 2, "checkpoint": None, "last": "rank 1 failed"}),
    "job.json": json.dumps({"id": "1234", "form": "allocation"}),
    "metrics.jsonl": "".join(json.dumps({"step": step, **STEP}) + "\n" for step in (1, 2, 3)),
    "validation.jsonl": "".join(
        json.dumps({"step": step, "rewards": rewards, "wall_s": 2.5, "examples": {"math": [EXAMPLE]}}) + "\n"
        for step, rewards in REWARDS.items()
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_run_files(tmp_path: Path, name: str) -> None:
    run = RunDir(tmp_path)
    for each, content in FILES.items():
        (tmp_path / each).write_text(content)

    def read(content: bytes) -> None:
        (tmp_path / name).write_bytes(content)
        resuming.check_files(run)
        status_of(tmp_path)
        kept_id(tmp_path / "job.json")
        if name == "manifest.json":
            check_unchanged(run.manifest, MANIFESTS)
        elif name != "parity.json":
            build_report(tmp_path)

    fuzz(name, [FILES[name].encode()], read, (UserError,))
