"""What the student does on this process's device: the child of ``tools/gpu_student.py``, one per device and dtype.

Four optimizer steps on seeded samples, a checkpoint after the second, then two workers that resume from it and take the
last two again, one of them with all optimizer states in host memory. Writes ``result.json`` and the first step's
gradients, ``gradients.safetensors``.

    python -m tools.gpu_student_rank --model FOLDER --dtype float32 --out FOLDER
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from mopd.base.types import MicroBatchPlan, SampleMeta
from mopd.config.data import DataConfig, ValidationConfig
from mopd.config.groups import TeacherConfig
from mopd.config.losses import TopKLossConfig
from mopd.config.rewards import ExactMatchConfig
from mopd.config.rollout import RolloutConfig
from mopd.config.schedule import ScheduleConfig
from mopd.config.schema import Recipe
from mopd.config.student import MoeConfig, OptimizerConfig, ParallelConfig, StudentConfig
from mopd.conversion.models.reading import read_dims
from mopd.data.packing import pack
from mopd.data_plane.local import LocalDataPlane
from mopd.student import parallel
from mopd.student.worker import StudentWorker

DOMAINS = ("a", "b")
NUM_SAMPLES = 16
LONGEST = 24
"""Tokens of a prompt, and of a response."""
TOP_K = 8
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Trained:
    """What is trained, and how."""

    model: str
    dtype: Any
    impl: Any = "auto"
    data: str | None = None
    """A data file with images (``tests/parity/student/pictures.py``)."""


def make_recipe(of: Trained, *, offload_fraction: float = 0.0) -> Recipe:
    """One rank, forward KL on top-k; several micro-batches with padding."""
    dims = read_dims(Path(of.model))
    return Recipe(
        run_dir="unused",
        student=StudentConfig(
            model=of.model,
            dtype=of.dtype,
            transformer_impl=of.impl,
            moe=MoeConfig(moe_grouped_gemm=dims.moe is not None and of.impl == "transformer_engine"),
            max_tokens_per_micro_batch=256,
            optimizer=OptimizerConfig(lr=1e-3, lr_warmup_steps=1, clip_grad=1.0, offload_fraction=offload_fraction),
        ),
        teachers={"all": TeacherConfig(model="unused", domains=DOMAINS)},
        data=DataConfig(train=(of.data or "unused",), validation=("unused",), max_prompt_length=LONGEST),
        rollout=RolloutConfig(max_response_length=LONGEST),
        loss=TopKLossConfig(top_k=TOP_K),
        schedule=ScheduleConfig(steps=10, prompts_per_step=NUM_SAMPLES, wait_timeout_s=TIMEOUT_S),
        rewards={"default": ExactMatchConfig(type="exact_match")},
        validation=ValidationConfig(),
    )


def make_samples(step: int, vocab_size: int) -> tuple[list[SampleMeta], dict[str, list[Tensor]]]:
    """Seeded by the step and drawn on the CPU: the same ones on every device."""
    generator = torch.Generator().manual_seed(step)
    metas: list[SampleMeta] = []
    fields: dict[str, list[Tensor]] = {}
    for i in range(NUM_SAMPLES):
        prompt, response = (int(torch.randint(1, LONGEST + 1, (), generator=generator)) for _ in range(2))
        teacher = torch.log_softmax(2 * torch.randn(response, vocab_size, generator=generator), -1)
        top = teacher.topk(TOP_K)
        tokens = torch.randint(1, vocab_size, (prompt + response,), generator=generator)
        own = teacher.gather(1, tokens[prompt:, None])[:, 0]
        values = {
            "tokens": tokens,
            "loss_mask": torch.ones(response, dtype=torch.bool),
            "rollout_logprobs": own,
            "teacher_ids": top.indices.int(),
            "teacher_logprobs": top.values,
            "teacher_token_logprobs": own,
        }
        for name, value in values.items():
            fields.setdefault(name, []).append(value)
        metas.append(
            SampleMeta(
                sample_id=1000 * step + i,
                domain=DOMAINS[i % 2],
                weight_version=0,
                prompt_length=prompt,
                response_length=response,
                num_loss_tokens=response,
            )
        )
    return metas, fields


class Trainee:
    """A student of this process with samples of its own."""

    def __init__(self, recipe: Recipe) -> None:
        parallel.initialize(ParallelConfig(), timeout_s=TIMEOUT_S, seed=0)
        self.plane = LocalDataPlane()
        self.worker = StudentWorker(recipe, self.plane.reader(), DOMAINS)
        self.recipe = recipe

    def plan(self, step: int) -> MicroBatchPlan:
        if self.worker.dims.vision is None:
            metas, fields = make_samples(step, self.worker.dims.vocab_size)
        else:
            metas, fields = self._seen(step)
        asyncio.run(self.plane.put(metas, fields))
        return pack(metas, self.worker.packing, dp_size=1)

    def _seen(self, step: int) -> tuple[list[SampleMeta], dict[str, list[Tensor]]]:
        from tests.parity.student.pictures import make_seen_samples  # a test's, as the models with a tower are

        recipe = self.recipe
        drawn: dict[str, Any] = {"top_k": TOP_K, "seed": step, "first_id": 1000 * step}
        (images,) = recipe.data.train
        assert isinstance(images, str)  # a file, without columns of its own
        metas, fields = make_seen_samples(NUM_SAMPLES, Path(recipe.student.model), Path(images), **drawn)
        return [replace(meta, domain=DOMAINS[i % 2]) for i, meta in enumerate(metas)], fields

    def step(self, gradients: Path | None = None) -> dict[str, float]:
        """One optimizer step; its loss and the norm of its gradient."""
        sums = self.worker.forward_backward(self.plan(self.worker.weight_version + 1), diagnostics=True)
        if gradients is not None:
            save_file(self.gradients(), gradients)
        loss = sum(domain.sums["weighted_loss"] for domain in sums.values())
        return {"loss": loss, "grad_norm": self.worker.optim_step()["grad_norm"]}

    def gradients(self) -> dict[str, Tensor]:
        """Of every parameter that is trained by Megatron's name, fp32 on the CPU."""
        parameters: Mapping[str, Any] = dict(self.worker._chunks[0].module.named_parameters())
        trained = {name: one for name, one in parameters.items() if one.requires_grad}
        return {name: parameter.main_grad.float().cpu().contiguous() for name, parameter in trained.items()}

    def weights_hash(self) -> str:
        digest = hashlib.sha256()
        for name, tensor in self.worker.weights():
            digest.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def measure(of: Trained, out: Path) -> dict[str, Any]:
    """Everything that is compared later."""
    started = time.monotonic()
    recipe = make_recipe(of)
    first = Trainee(recipe)
    samples = [sample for rank in first.plan(0).micro_batches for batch in rank for sample in batch]
    first_four = sorted(samples, key=lambda sample: sample.sample_id)[:4]
    logprobs = torch.cat(first.worker.logprobs(first_four)).tolist()
    steps = [first.step(out / "gradients.safetensors"), first.step()]
    first.worker.save(out / "checkpoint", {"note": "kept"}, is_async=True)
    saved = first.weights_hash()
    steps += [first.step(), first.step()]
    first.worker.saving.finish()
    again = Trainee(recipe)
    extra = again.worker.load(out / "checkpoint")
    loaded = again.weights_hash()
    resumed = [again.step(), again.step()]
    resumed_hash, peak_gib = again.weights_hash(), again.worker.memory()["memory/student_peak_gib"]
    on_host = Trainee(make_recipe(of, offload_fraction=1.0))
    on_host.worker.load(out / "checkpoint")
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "dtype": of.dtype,
        "logprobs": logprobs,
        "steps": steps,
        "saved_equals_loaded": saved == loaded and extra == {"note": "kept"},
        "changed": saved != first.weights_hash(),
        "resumed": resumed,
        "resumed_equals_uninterrupted": resumed_hash == first.weights_hash(),
        "resumed_on_host": [on_host.step(), on_host.step()],
        "peak_gib": peak_gib,
        "seconds": time.monotonic() - started,
    }


def main() -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), required=True)
    parser.add_argument("--impl", choices=("auto", "local", "transformer_engine"), default="auto")
    parser.add_argument("--data")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True)
    result = measure(Trained(args.model, args.dtype, args.impl, args.data), args.out)
    (args.out / "result.json").write_text(json.dumps(result), encoding="utf-8")
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
