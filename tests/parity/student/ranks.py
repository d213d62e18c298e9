"""One rank of a parity job: builds a student per case, trains a few steps, writes what it saw (rank 0).

A job is ``{"model": folder, "out": file, "cases": {name: case}}``; a case names its layout (``tp``, ``pp``, ``dp``,
``sp``, perhaps ``ep`` and ``etp``) and what to do; see ``run_case``. The process group lives through all cases,
Megatron's groups are rebuilt per layout.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save_file
from torch import Tensor

from mopd.base.types import MicroBatchPlan, SampleMeta, UserError
from mopd.config.data import DataConfig, ValidationConfig
from mopd.config.groups import TeacherConfig
from mopd.config.losses import (
    CustomLossConfig,
    KLLossConfig,
    LargestTokensConfig,
    MismatchCorrectionConfig,
    PolicyGradientConfig,
    SequenceMaskConfig,
    TopKLossConfig,
)
from mopd.config.output import MetricsConfig
from mopd.config.rewards import ExactMatchConfig
from mopd.config.rollout import AnswersConfig, RolloutConfig
from mopd.config.schedule import ScheduleConfig, WarmUpConfig
from mopd.config.schema import Recipe
from mopd.config.student import LoraConfig, MoeConfig, OptimizerConfig, ParallelConfig, StudentConfig, VisionConfig
from mopd.config.views import RefreshConfig
from mopd.conversion.models import reading
from mopd.data.packing import pack
from mopd.data_plane.interface import Reader
from mopd.data_plane.local import LocalDataPlane
from mopd.data_plane.reading import SocketReader
from mopd.launch.ranks import CommandChannel
from mopd.orchestrator.support import NO_ID
from mopd.student import cpu_shim, optimizer, parallel
from mopd.student.checkpoints import checkpoint, restricted, states
from mopd.student.model.lora import all_factors
from mopd.student.weights import iter_adapter_weights
from mopd.student.worker import StudentWorker
from tests.parity.student import hidden_cases
from tests.parity.student.pictures import make_seen_samples
from tests.parity.student.refused_saves import refused_saves
from tests.parity.student.samples import DOMAINS, ENSEMBLE, hash_of, make_routes, make_samples
from tests.parity.student.sending import NUM_VERSIONS, run_sends

TOP_K = 8
NUM_SAMPLES = 16
ADAM_EPS = 1e-4
"""Adam's first step is lr * g / (|g| + eps): with the usual 1e-8 a gradient that is nothing but rounding moves its
weight as far as any, another way at another layout, and the next steps may differ by more than 1e-5."""
COPIES = Path(__file__).parents[2] / "fixtures" / "custom_losses.py"
LOSSES = {
    "default": TopKLossConfig(top_k=TOP_K),
    "reverse": TopKLossConfig(type="topk_reverse_kl", top_k=TOP_K, temperature=1.5, aggregation="sequence_mean"),
    "domain_budget": TopKLossConfig(top_k=TOP_K, aggregation="sequence_mean", domain_budget={"math": 0.8, "code": 0.2}),
    "domain_mean": KLLossConfig(type="k3", top_k=TOP_K, aggregation="domain_mean"),
    "jsd": TopKLossConfig(type="topk_jsd", top_k=TOP_K, aggregation="token_sum", loss_soft_cap=1.0),
    "k2": KLLossConfig(type="k2", top_k=TOP_K, correction=MismatchCorrectionConfig(type="tis")),
    "policy_gradient": PolicyGradientConfig(
        type="policy_gradient",
        top_k=TOP_K,
        task_reward_weight=0.5,
        old_logprobs="rollout",
        # Some responses of the samples are within these bounds, others on either side.
        correction=MismatchCorrectionConfig(type="icepop", sequence=SequenceMaskConfig(low=0.7, high=3.2)),
    ),
    "task": TopKLossConfig(
        top_k=TOP_K,
        task_reward_weight=0.5,
        aggregation="sequence_mean",
        correction=MismatchCorrectionConfig(type="icepop", sequence=SequenceMaskConfig(low=0.7, high=3.2)),
        tokens=LargestTokensConfig(largest="student_entropy", share=0.5),
    ),
    "largest": KLLossConfig(type="k2", top_k=TOP_K, tokens=LargestTokensConfig(largest="divergence", share=0.3)),
    "sampled_tail": TopKLossConfig(
        type="topk_reverse_kl", top_k=TOP_K, tail="sampled", correction=MismatchCorrectionConfig(type="tis")
    ),
    "chunks": TopKLossConfig(top_k=TOP_K, aggregation="sequence_mean"),
    "custom": CustomLossConfig(type="custom", module=f"{COPIES}:forward_kl", top_k=TOP_K),
    "plain_tail": TopKLossConfig(tail="none", top_k=TOP_K),
    "custom_k2": CustomLossConfig(type="custom", module=f"{COPIES}:k2", own_samples=True, top_k=TOP_K),
    "plain_k2": KLLossConfig(type="k2", top_k=TOP_K),
    **hidden_cases.LOSSES,
}


TEACHERS = {
    "one": {"all": TeacherConfig(model="unused", domains=DOMAINS)},
    "chunks": {"all": TeacherConfig(model="unused", domains=DOMAINS, tokenizer="own")},
    "ensemble": {
        "first": TeacherConfig(model="unused", domains=DOMAINS, weight=1.0),
        "second": TeacherConfig(model="unused", domains=("math",), weight=3.0),
    },
}


def teachers_of(case: dict[str, Any]) -> dict[str, TeacherConfig]:
    if "hidden" in case:
        return hidden_cases.teachers(case["hidden"])
    if "ema" in case:
        refresh = RefreshConfig(ema=case["ema"])
        return {"all": TeacherConfig(model="unused", domains=DOMAINS, refresh=refresh)}
    return TEACHERS["ensemble" if "ensemble" in case else "chunks" if case.get("loss") == "chunks" else "one"]


def make_recipe(model: str, case: dict[str, Any]) -> Recipe:
    """The recipe of a case; everything that a case does not name is the same for all."""
    return Recipe(
        run_dir="unused",
        objective=case.get("objective", "on_policy"),
        answers=AnswersConfig(temperature=1.0),
        student=StudentConfig(
            model=model,
            lora=LoraConfig(**case["lora"]) if "lora" in case else None,
            dtype=case.get("dtype", "float32"),
            transformer_impl=case.get("impl", "auto"),
            recompute=case.get("recompute", "none"),
            packing=case.get("packing", True),
            overlap=case.get("overlap"),
            micro_batch_size=case.get("micro_batch_size"),
            max_tokens_per_micro_batch=case.get("max_tokens", 128 if "data" in case else 64),
            lm_head_memory_budget_mib=case.get("head_mib", 1024),
            parallel=ParallelConfig(
                tensor_model_parallel_size=case["tp"],
                context_parallel_size=case.get("cp", 1),
                pipeline_model_parallel_size=case["pp"],
                virtual_pipeline_model_parallel_size=case.get("vp", 1),
                data_parallel_size=case["dp"],
                sequence_parallel=case["sp"],
                expert_model_parallel_size=case.get("ep", 1),
                expert_tensor_parallel_size=case.get("etp"),
                num_layers_in_first_pipeline_stage=case.get("first_stage_layers"),
                num_layers_in_last_pipeline_stage=case.get("last_stage_layers"),
            ),
            freeze=tuple(case.get("frozen", ())),
            vision=VisionConfig(**({"freeze": case["freeze"]} if "freeze" in case else {})),
            moe=MoeConfig(**case.get("moe", {})),
            megatron_overrides=case.get("overrides", {}),
            optimizer=OptimizerConfig(
                lr=3e-3,
                lr_warmup_steps=1,
                weight_decay=0.1,
                clip_grad=1.0,
                adam_eps=case.get("adam_eps", ADAM_EPS),
                use_distributed_optimizer=case.get("distributed_optimizer", True),
                offload_fraction=case.get("offload", 0.0),
            ),
        ),
        teachers=teachers_of(case),
        data=DataConfig(train=(case.get("data", "unused"),), validation=("unused",), max_prompt_length=16),
        rollout=RolloutConfig(max_response_length=16, samples_per_prompt=2, replay_routes=case.get("replay", False)),
        loss=LOSSES[case.get("loss", "default")],
        schedule=ScheduleConfig(
            steps=100 if "ema" in case else 10,
            prompts_per_step=NUM_SAMPLES,
            wait_timeout_s=120,
            warm_up=WarmUpConfig(objective="sft_on_teacher", steps=case["warm_up"]) if "warm_up" in case else None,
        ),
        rewards={"default": ExactMatchConfig(type="exact_match")},
        validation=ValidationConfig(),
        metrics=MetricsConfig(gradient_cosine_every_steps=case.get("cosine_every")),
    )


def open_plane(plane: LocalDataPlane | None, layout: parallel.Layout) -> Reader:
    """Every rank's way to rank 0's samples."""
    channel = CommandChannel(layout.control_group)
    if plane is None:
        return SocketReader(channel.receive(), timeout_s=60)
    plane.serve(host=None)
    channel.send(plane.address)
    return plane.reader()


def add_chunks(fields: dict[str, list[Tensor]], seed: int) -> None:
    """Make every third row one of a chunk of several tokens: no ids, but an advantage."""
    generator = torch.Generator().manual_seed(seed)
    fields["chunk_advantage"] = []
    for ids, logprobs in zip(fields["teacher_ids"], fields["teacher_logprobs"], strict=True):
        drawn = torch.randn(len(ids), generator=generator)
        drawn[torch.arange(len(ids)) % 3 != 1] = 0
        ids[drawn != 0], logprobs[drawn != 0] = NO_ID, -torch.inf
        fields["chunk_advantage"].append(drawn)


class Case:
    """A student and its samples; step s trains on samples ``s * 100 …``."""

    def __init__(self, model: str, case: dict[str, Any]) -> None:
        self.case = case
        self.recipe = recipe = make_recipe(model, case)
        layout = parallel.initialize(
            recipe.student.parallel, timeout_s=120, seed=0, local_rank=int(os.environ.get("LOCAL_RANK", "0"))
        )
        self.plane = LocalDataPlane() if layout.rank == 0 else None
        self.reader = open_plane(self.plane, layout)
        with patch.object(optimizer, "BUCKET_SIZE", case.get("bucket_size")):
            self.worker = StudentWorker(recipe, self.reader, DOMAINS)
        self.is_packed: set[bool] = set()
        """Forms of the micro-batches that this rank's model has seen."""
        self.average: dict[str, Tensor] | None = None
        """Moving average of the whole model's weights from the first step on, in float64; on rank 0, else empty."""
        model = self.worker._chunks[0].module
        model.register_forward_pre_hook(self._note_form, with_kwargs=True)  # type: ignore[attr-defined]

    def _note_form(self, model: Any, inputs: Any, options: dict[str, Any]) -> None:
        self.is_packed.add(options["packed"] is not None)

    def close(self) -> None:
        """All ranks have read what they wanted."""
        torch.distributed.barrier()
        self.reader.close()
        if self.plane is not None:
            asyncio.run(self.plane.close())

    def plan(self, step: int, **poison: Any) -> MicroBatchPlan:
        metas, fields = self._samples(step)
        if poison:
            fields["teacher_logprobs"][poison["sample"]][-1, 0] = float("nan")
        if self.plane is not None:
            asyncio.run(self.plane.put(metas, fields))
        torch.distributed.barrier()
        return pack(metas, self.worker.packing, dp_size=self.worker.dp_size)

    def _samples(self, step: int) -> tuple[list[SampleMeta], dict[str, list[Tensor]]]:
        drawn: dict[str, Any] = {"top_k": TOP_K, "seed": step, "first_id": 100 * step}
        if "data" not in self.case:
            drawn |= {"weights": ENSEMBLE if "ensemble" in self.case else None, "lengths": self.case.get("lengths")}
            num = len(self.case.get("lengths", range(NUM_SAMPLES)))
            metas, fields = make_samples(num, vocab_size=self.worker.dims.vocab_size, **drawn)
            if self.recipe.rollout.replay_routes:
                assert self.worker.dims.moe is not None
                fields["routes"] = make_routes(metas, self.worker.dims.moe.route_shape, seed=step)
            if self.recipe.has_chunks:
                add_chunks(fields, step)
            if "hidden" in self.case:
                fields["teacher_hidden"] = hidden_cases.make_hidden(metas, step)
            return metas, fields
        model, seen = Path(self.case["processor"]), self.case.get("with_images", True)
        metas, fields = make_seen_samples(NUM_SAMPLES, model, Path(self.case["data"]), with_images=seen, **drawn)
        if self.worker.dims.vision is None:
            del fields["images"]
        return metas, fields

    def tower_hashes(self) -> list[str]:
        """Of the weights of every rank's tower, without ranks that have none."""
        tower = getattr(self.worker._chunks[0].module, "vision_model", None)
        digest = hashlib.sha256()
        for parameter in () if tower is None else tower.parameters():
            digest.update(parameter.detach().view(torch.uint8).cpu().numpy().tobytes())
        found: list[str | None] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(found, None if tower is None else digest.hexdigest())
        return [one for one in found if one is not None]

    def train(self, num_steps: int) -> list[dict[str, Any]]:
        """Per step: sums by domain and metric, gradient norm, lr."""
        seen = []
        for _ in range(num_steps):
            step = self.worker.weight_version + 1
            sums = self.worker.forward_backward(self.plan(step), diagnostics=True)
            metrics = {f"{name}/{domain}": value for domain in sums for name, value in sums[domain].sums.items()}
            tokens = {f"num_tokens/{domain}": value.num_tokens for domain, value in sums.items()}
            is_exact = {"head_mib", "objective"} & self.case.keys() and self.case.get("ep", 1) == 1
            exact = {"exact_grad_norm": self.exact_grad_norm()} if is_exact else {}
            if "ema" in self.case and self.average is None:
                self.average = {name: tensor.double() for name, tensor in self.worker.weights()}
            seen.append(metrics | tokens | self.worker.optim_step() | exact)
            if self.average is not None:
                decay = self.case["ema"]
                for name, tensor in self.worker.weights():
                    self.average[name] = decay * self.average[name] + (1 - decay) * tensor.double()
        return seen

    def average_report(self) -> dict[str, Any]:
        """The ranks' average beside the plain one, which began with this student's first step, and the weights."""
        of_ranks, weights = dict(self.worker.weights(ema=self.case["ema"])), dict(self.worker.weights())

        def farthest(from_what: dict[str, Tensor]) -> float:
            return max((float((of_ranks[n].double() - t).abs().max()) for n, t in from_what.items()), default=0.0)

        return {
            "hash": hash_of(of_ranks.items()),
            "error": farthest(self.average or {}),
            "from_weights": farthest(weights),
        }

    @cpu_shim.activate()
    def exact_grad_norm(self) -> float:
        """In float64: torch's fp32 norm of a million numbers, which Megatron takes on a CPU, errs by 1e-4."""
        optimizer = self.worker._optimizer
        optimizer.prepare_grads()
        squares = 0.0
        for part in optimizer.chained_optimizers:  # experts' are the second
            total = torch.zeros((), dtype=torch.float64, device=self.worker.layout.device)
            for grad in part.get_main_grads_for_grad_norm():
                total += grad.double().square().sum()
            torch.distributed.all_reduce(total, group=part.get_grad_stats_parallel_group())
            squares += float(total)
        return squares**0.5

    def adapter_gradients(self, file: Path) -> dict[str, Any]:
        """Loss and gradient norm of a batch; the gradients go to ``file``, by PEFT's names."""
        worker = self.worker
        sums = worker.forward_backward(self.plan(9), diagnostics=False)
        norm = self.exact_grad_norm()
        gradients = {id(f.own): f.own.main_grad for f in all_factors([chunk.module for chunk in worker._chunks])}  # type: ignore[attr-defined]
        lora = worker.recipe.student.lora
        assert lora is not None
        chunks = worker._chunks
        whole = dict(iter_adapter_weights(chunks, worker.dims, worker.layout, lora, instead=gradients))
        if worker.layout.rank == 0:
            save_file({name: tensor.cpu().contiguous() for name, tensor in whole.items()}, file)
        trained = [p for chunk in chunks for p in chunk.parameters() if hasattr(p, "main_grad")]
        return {
            "loss": sum(one.sums["weighted_loss"] for one in sums.values()),
            "norm": norm,
            "num_buffered": sum(buffer.numel_unpadded for chunk in chunks for buffer in _buffers(chunk)),
            "num_adapters": sum(p.numel() for p in trained),
        }

    def any_rank(self, flag: bool) -> bool:
        """Whether ``flag`` holds on some rank."""
        total = torch.tensor(int(flag), device=self.worker.layout.device)
        torch.distributed.all_reduce(total)
        return bool(total)

    def weights_hash(self, without: str = " ") -> str:
        """Of all weights whose names do not begin so, bit by bit (rank 0)."""
        return hash_of((name, tensor) for name, tensor in self.worker.weights() if not name.startswith(without))


def _buffers(chunk: Any) -> list[Any]:
    return [*chunk.buffers, *chunk.expert_parallel_buffers]


def run_case(model: str, case: dict[str, Any]) -> dict[str, Any]:
    """Optionally load, train ``steps``, save, train ``steps_after``; report what was seen and weight hashes."""
    if case.get("dense"):  # every layer is, which ``read_dims`` refuses in a family with experts
        with patch.object(reading, "_checked_experts", lambda keys, moe: None):
            it = Case(model, case)
    else:
        it = Case(model, case)
    result: dict[str, Any] = {}
    if "sends" in case:
        plans = [it.plan(step) for step in range(NUM_VERSIONS)]
        result = run_sends(it.recipe, it.worker, plans, it.plane, case)
        it.close()
        return result
    if "load" in case:
        with a_few_states_at_a_time(result):
            result["extra"] = it.worker.load(Path(case["load"]))
        result["weight_version"] = it.worker.weight_version
        if "ema" in case:
            result["loaded_average"] = it.average_report()
        result["loaded_hash"] = it.weights_hash()
    if "gradients" in case:
        result["gradients"] = it.adapter_gradients(Path(case["gradients"]))
    if case.get("logprobs"):
        samples = {s.sample_id: s for rank in it.plan(0).micro_batches for batch in rank for s in batch}
        rows = it.worker.logprobs([samples[i] for i in (3, 1, 2)])
        result["logprobs"] = [row.tolist() for row in rows]
        result["one_logprob"] = [row.tolist() for row in it.worker.logprobs([samples[5]])]
    result["steps"] = it.train(case.get("steps", 0))
    result["is_packed"] = sorted(it.is_packed)
    result["head_in_chunks"] = it.any_rank(it.worker._objective._has_warned)
    if "save" in case:
        is_async = case.get("async", True)
        with held_back():  # what is written after the next steps must be what was there before them
            it.worker.save(Path(case["save"]), {"note": "kept"}, is_async=is_async)
            result["saved_hash"] = it.weights_hash()
            if "ema" in case:
                result["saved_average"] = it.average_report()
            result["steps_after"] = it.train(case.get("steps_after", 0))
            result["was_saving"] = it.worker.saving.is_busy
        it.worker.finish_save()
    else:
        result["steps_after"] = it.train(case.get("steps_after", 0))
    if "frozen" in case:
        result["num_trained"] = sum(p.numel() for c in it.worker._chunks for b in _buffers(c) for p in b.params)
    if "ema" in case:
        result["average"] = it.average_report()
    if {"save", "load"} & case.keys():
        result["hash"] = it.weights_hash()
    if "data" in case:
        result["towers"] = it.tower_hashes()
        result["num_trained"] = sum(
            p.numel() for chunk in it.worker._chunks for buffer in chunk.buffers for p in buffer.params
        )
        result["text_hash"] = it.weights_hash(without="visual.")
    if "save_hf" in case:
        result |= export(it, Path(case["save_hf"]))
    if "poison" in case:
        result["poison"] = poison(it)
    it.close()
    return result


@contextmanager
def a_few_states_at_a_time(result: dict[str, Any]) -> Iterator[None]:
    """Loads take several rounds; notes how many numbers of optimizer states each of this rank's had room for."""
    rounds: list[int] = []
    real = restricted.load

    def load(sharded: dict[str, Any], folder: Path, *, is_part: bool = False) -> dict[str, Any]:
        if is_part:
            entries = [entry for part in sharded.values() for states in part.values() for entry in states.values()]
            rounds.append(sum(entry.data.numel() for entry in entries))
        return real(sharded, folder, is_part=is_part)

    with patch.object(states, "_NUM_AT_ONCE", 2**13), patch.object(restricted, "load", load):
        yield
    result["rounds"] = rounds


@contextmanager
def held_back() -> Iterator[None]:
    """Threads that write checkpoints begin at the end of the block."""
    may_write = threading.Event()
    real = checkpoint._write

    def write(*args: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert may_write.wait(120)
        real(*args)

    with patch.object(checkpoint, "_write", write):
        yield
    may_write.set()


def export(it: Case, folder: Path) -> dict[str, Any]:
    """An export, then what every rank says to a second one, to a checkpoint that is none, and to those that cannot be
    written."""
    it.worker.save_hf(folder)
    result: dict[str, Any] = {"sums": {name: float(tensor.double().sum()) for name, tensor in it.worker.weights()}}
    for name, call in (("save_hf_again", it.worker.save_hf), ("load_incomplete", it.worker.load)):
        try:
            call(folder)
        except UserError as error:
            result[name] = str(error)
    if it.case.get("refused_saves"):
        result["refused_saves"] = refused_saves(it.worker, folder)
    return result


def poison(it: Case) -> dict[str, Any]:
    """A NaN among the teacher's log-probs, then infinite gradients behind a finite loss: what stops, what changed."""
    before = it.weights_hash()
    result: dict[str, Any] = {}
    try:
        it.worker.forward_backward(it.plan(8, sample=5), diagnostics=False)
    except UserError as error:
        result["loss"] = str(error)
    it.worker.forward_backward(it.plan(9), diagnostics=False)
    for buffer in it.worker._chunks[0].buffers:
        buffer.grad_data.fill_(float("inf"))
    try:
        it.worker.optim_step()
    except UserError as error:
        result["grad_norm"] = str(error)
    return result | {"is_unchanged": before == it.weights_hash()}


def layout_of(case: dict[str, Any]) -> tuple[int, ...]:
    degrees = (case["tp"], case.get("cp", 1), case["pp"], case.get("vp", 1), case["dp"], case["sp"])
    return (*degrees, case.get("ep", 1), case.get("etp") or case["tp"])


def main(job_path: str) -> None:
    job = json.loads(Path(job_path).read_text())
    assert torch.cuda.is_available() or "EMULATED_GPUS" not in os.environ, "what is asked of GPUs would pass on a CPU"
    torch._dynamo.config.disable = True  # Megatron has small functions compiled, for seconds each
    results, active = {}, None
    # Loads follow all saves; within each, one layout after another: building the process groups is dear.
    for name, case in sorted(job["cases"].items(), key=lambda item: ("load" in item[1], layout_of(item[1]))):
        if active is not None and active != layout_of(case):
            torch.distributed.barrier()
            parallel.destroy()
        active = layout_of(case)
        results[name] = run_case(case.get("model", job["model"]), case)
    if torch.distributed.get_rank() == 0:
        Path(job["out"]).write_text(json.dumps(results))
    torch.distributed.barrier()
    parallel.destroy()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
