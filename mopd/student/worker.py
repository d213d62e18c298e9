"""The student on one trainer rank. Every method is called on all ranks with the same arguments."""

from __future__ import annotations

import math
import resource
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from mopd.base.types import DomainSums, MicroBatchPlan, NonFiniteError, SampleMeta, UserError
from mopd.config.schema import Recipe
from mopd.conversion.adapter_writer import base_hash, write_adapter
from mopd.conversion.hf.reader import kept_files, open_model
from mopd.conversion.hf.writer import mtp_tensors, require_exportable, write_folder
from mopd.conversion.models.adapter_updates import check_updates
from mopd.conversion.models.dims import check_routes
from mopd.conversion.models.families import Placed
from mopd.conversion.models.frozen import constant_names
from mopd.data.packing import pack, packing_rules
from mopd.data_plane.interface import Reader
from mopd.student import cpu_shim, parallel
from mopd.student.averages import Averages
from mopd.student.batch import MicroBatch, build_micro_batch
from mopd.student.checkpoints import checkpoint
from mopd.student.conflicts import cosines, sketch_gradient
from mopd.student.cross_entropy import CrossEntropy
from mopd.student.images import StudentImages
from mopd.student.memory.lending import GpuMemoryLease
from mopd.student.model.balance import Balance
from mopd.student.model.config import check_attention
from mopd.student.model.freezing import freeze
from mopd.student.model.gpt import HeadHook, LMHead, build_chunks
from mopd.student.model.lora import adapter_config, add_adapters
from mopd.student.model.replay import Replay
from mopd.student.objective import Objective, Sums
from mopd.student.optimizer import (
    build_optimizer,
    clear_moments,
    complete_weights,
    guarded_step,
    overlaps,
    set_learning_rate,
    wrap_data_parallel,
)
from mopd.student.reading import StageReader, one_ahead
from mopd.student.schedule import HookFor, Shape, run_schedule
from mopd.student.teacher_heads import TeacherHeads
from mopd.student.token_layout import TokenLayout, choose_token_layout
from mopd.student.vision import add_clock
from mopd.student.weights import (
    hf_senders,
    iter_adapter_weights,
    iter_hf_weights,
    iter_sender_weights,
    load_hf_into,
    rows_by_local_name,
)

_MAX_NAMED_SAMPLES = 8

WeightPart = Literal["all", "constants", "trained"]
"""Choice of weights: all, those that no step changes, or the others."""


class StudentWorker:
    """Megatron model, optimizer and schedule of one rank. Callers refer to samples by id.

    One step is ``forward_backward`` then ``optim_step``. ``weight_version`` counts optimizer steps.
    """

    def __init__(self, recipe: Recipe, reader: Reader, domains: Sequence[str]) -> None:
        """Join the parallel layout, build the model, load its Hugging Face weights, build the optimizer.

        ``reader`` reads this rank's sample fields. ``domains`` are all values that a sample's domain may take; their
        order must be the same on every rank.

        Raises:
            UserError: the world size, the layout, an override, the checkpoint or the schedule does not fit.
        """
        student = recipe.student
        self.recipe = recipe
        self.domains = tuple(domains)
        self.weight_version = 0
        source, self.dims = open_model(Path(student.model))  # raises before a model of the config's size is built
        check_updates(recipe, self.dims)
        self.constants = constant_names(self.dims, student)
        """``hf_name`` of every tensor that no step changes."""
        kept_files(Path(student.model))  # raises now what ``save_hf`` would after the last step
        longest = _longest(recipe, self.dims.max_positions)
        self.layout = parallel.initialize(student.parallel, timeout_s=recipe.schedule.wait_timeout_s, seed=recipe.seed)
        self.packing = packing_rules(student, self.dims, on_gpu=self.layout.device.type == "cuda")
        vision, replays = self.dims.vision, recipe.rollout.replay_routes
        check_routes(self.dims, replay_routes=replays)
        self.reader = StageReader(reader, self.layout, has_images=vision is not None, replays_routes=replays)
        has_tower = self.layout.is_first_stage
        self._images = None if vision is None else StudentImages(recipe, vision, has_tower=has_tower)
        with cpu_shim.activate():
            chunks = build_chunks(student, self.dims, self.layout)
            check_attention(student, self.dims, self.layout, max_length=longest)
            load_hf_into(chunks, source, self.dims, self.layout)
            if student.lora is not None or student.freeze:
                rows = [rows_by_local_name(chunk, self.dims, self.layout) for chunk in chunks]
                freeze(chunks, rows, student)
                if student.lora is not None:
                    add_adapters(chunks, rows, student, self.dims, self.layout, seed=recipe.seed)
            for chunk in chunks:
                chunk.train()
            self._chunks = wrap_data_parallel(
                chunks,
                use_distributed_optimizer=student.optimizer.use_distributed_optimizer,
                overlap=overlaps(student, self.dims, self.layout),
            )
            self._clock = None if vision is None else add_clock(chunks[0], self.layout)
            self._balance = None if self.dims.moe is None else Balance(chunks, student.moe, self.dims.moe, self.layout)
            self._replay = None
            if replays and self.dims.moe is not None:
                self._replay = Replay(chunks, self.dims.moe, self.layout, self.domains)
            optimizer = replace(student.optimizer, lr=student.peak_lr)
            self._optimizer, self._scheduler = build_optimizer(optimizer, self._chunks, num_steps=recipe.schedule.steps)
        self._averages = Averages(recipe.averages, [chunk.module for chunk in self._chunks])
        self._objective, self._cross_entropy = self._objectives(recipe)
        self._plan: MicroBatchPlan | None = None
        self._cosines: dict[str, float] = {}
        """Metrics of the domains' gradients in the last ``forward_backward``, where they were due."""
        self.saving = checkpoint.CheckpointThread(self.layout.device, timeout_s=recipe.schedule.wait_timeout_s)
        """Writer of asynchronous checkpoints. Enter it around all use of the student."""
        self._lending = (
            GpuMemoryLease(self._chunks, self._optimizer, self.layout.device) if recipe.shares_gpus else None
        )

    def _objectives(self, recipe: Recipe) -> tuple[Objective, CrossEntropy]:
        """Return what steps minimise: the recipe's loss, and on the teachers' own answers their cross entropy."""
        shares = None
        if recipe.teachers_per_row > 1:
            shares = torch.tensor(recipe.assignment.weight_table(self.domains), device=self.layout.device)
        limits = {
            "true_vocab_size": self.dims.vocab_size,
            "lm_head_memory_budget_mib": recipe.student.lm_head_memory_budget_mib,
        }
        heads = None
        if recipe.sends_hidden and self.layout.is_last_stage:
            heads = TeacherHeads.load(recipe, self.dims, self.layout, self.domains)
        objective = Objective(
            recipe.loss,
            self.layout,
            teacher_weights=shares,
            has_support=recipe.support_width > 0,
            has_chunks=recipe.has_chunks,
            heads=heads,
            **limits,
        )
        return objective, CrossEntropy(recipe.loss, self.layout, **limits)

    @property
    def dp_size(self) -> int:
        """Data-parallel degree: the number of rows of a plan."""
        return self.layout.dp_size

    def forward_backward(self, plan: MicroBatchPlan, *, diagnostics: bool) -> dict[str, DomainSums]:
        """Compute the gradients of the whole plan's loss, which is that of the next step (``Recipe.objective_at``), and
        return its sums by domain (equal on every rank).

        Sums: loss (unweighted token losses), weighted_loss (adds up over domains to the loss that is minimised), k1
        (student - teacher log-prob of the sampled token), k3, teacher_mass, student_mass, clamped, …; entropy and
        topk_overlap if ``diagnostics``.

        Raises:
            NonFiniteError: on every rank, naming domain and samples; weights are untouched.
        """
        every, step = self.recipe.metrics.gradient_cosine_every_steps, self.weight_version + 1
        self._cosines = {}
        if every is not None and (step == 1 or step % every == 0):
            self._cosines = self._gradient_cosines(plan)
        sums = self._gradients(plan, diagnostics=diagnostics)
        result, bad = sums.reduce(self.domains, self.layout)
        if bad:
            raise NonFiniteError(self._describe_bad_loss(plan, bad))
        # The plan's count is the loss's denominator: another number of masked tokens would silently rescale the loss.
        num_tokens = sum(domain.num_tokens for domain in result.values())
        if num_tokens != plan.num_loss_tokens:
            raise ValueError(f"loss masks hold {num_tokens} tokens but the plan says {plan.num_loss_tokens}")
        self._plan = plan
        return result

    def _gradients(self, plan: MicroBatchPlan, *, diagnostics: bool) -> Sums:
        """Compute the gradients of the plan's loss, in place of those before, and return its sums, not yet reduced."""
        positions = {sample_id: i for i, sample_id in enumerate(plan.sample_ids)}
        sizes = {"num_domains": len(self.domains), "num_samples": plan.num_samples}
        kind = self.recipe.objective_at(self.weight_version + 1)
        objective = self._cross_entropy if kind == "sft_on_teacher" else self._objective
        factors = objective.domain_factors(_samples(plan), self.domains)
        sums = objective.new_sums(
            diagnostics=diagnostics,
            domain_factors=factors,
            own_samples=kind == "on_policy",
            num_loss_tokens=objective.num_loss_tokens(plan),
            **sizes,
        )

        def hook_for(batch: MicroBatch) -> HeadHook:
            return partial(objective, rows=batch.rows, sums=sums)

        # Both: Megatron sums gradients in the buffers of its DDP, which ``zero_grad`` of the optimizer does not touch.
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        if self._balance is not None:
            self._balance.begin(len(plan.micro_batches[self.layout.dp_rank]))
        if self._replay is not None:
            self._replay.begin()
        if self._clock is not None:
            self._clock.begin()
        self._run(plan, objective.field_names, positions, hook_for, forward_only=False)
        return sums

    def _gradient_cosines(self, plan: MicroBatchPlan) -> dict[str, float]:
        """Return the cosines between the gradients of the domains' own losses. Training sees nothing of it."""
        # What Megatron's routers count and learn in a pass (bias, tokens of each expert) is in buffers.
        kept = [(buffer, buffer.clone()) for chunk in self._chunks for buffer in chunk.module.buffers()]
        sketches = {}
        for domain in self.domains:
            own = sorted((s for s in _samples(plan) if s.domain == domain), key=lambda sample: sample.sample_id)
            # A number that can always be shared out evenly, whatever their lengths.
            del own[len(own) - len(own) % (self.dp_size * self.packing.count_multiple) :]
            if any(sample.num_loss_tokens for sample in own):
                self._gradients(pack(own, self.packing, dp_size=self.dp_size), diagnostics=False)
                with cpu_shim.activate():
                    sketches[domain] = sketch_gradient(self._optimizer, self.layout)
        for buffer, value in kept:
            buffer.copy_(value)
        return cosines(sketches)

    def optim_step(self) -> dict[str, float]:
        """Clip and apply the gradients of the last ``forward_backward``, and count one ``weight_version`` more. The
        first step after ``schedule.warm_up`` finds moments of 0, as in a new optimizer. Return ``grad_norm`` (before
        clipping), the ``lr`` that was used, and the metrics of experts, vision tower and the domains' gradients if
        there are any.

        Raises:
            NonFiniteError: the gradient norm is not finite, weights and optimizer states are untouched; or a weight is
                not after the step, on the ranks that hold it.
            RuntimeError: no gradients since the last step.
        """
        if self._plan is None:
            raise RuntimeError("optim_step without a forward_backward before it")
        num_done, _ = self.recipe.schedule.learning_rate_steps(self.weight_version)
        if num_done == 0:  # the moments, if there are any, are those of a warm-up's gradients
            clear_moments(self._optimizer)
        lr = float(self._optimizer.param_groups[0]["lr"])
        norm = guarded_step(self._optimizer, self._chunks)
        if not math.isfinite(norm):
            raise NonFiniteError(
                f"gradient norm is {norm} at step {self.weight_version + 1} although every loss is finite: "
                f"{_list_samples(_samples(self._plan))}; the weights are unchanged; lower student.optimizer.lr or set "
                "loss.loss_soft_cap"
            )
        self._plan = None
        self.weight_version += 1
        if self.recipe.averages:
            complete_weights(self._chunks)
            self._averages.update()
        set_learning_rate(self._scheduler, self.recipe.schedule, self.weight_version)
        metrics = {"grad_norm": norm, "lr": lr} | self._cosines
        for part in (self._balance, self._replay, self._clock):
            metrics |= {} if part is None else part.metrics()
        return metrics

    @torch.no_grad()
    def logprobs(self, samples: Sequence[SampleMeta], *, temperature: float = 1.0) -> list[Tensor]:
        """Return the log-probs of each sample's response tokens under softmax(logits / temperature), from field
        ``tokens``: [R] fp32 on rank 0 in the order of ``samples``, an empty list elsewhere. Draws no randomness."""
        unique = sorted({sample.sample_id: sample for sample in samples}.values(), key=lambda sample: sample.sample_id)
        plan = self._plan_forward(unique)
        collected: list[tuple[TokenLayout, Tensor]] = []

        def hook_for(batch: MicroBatch) -> HeadHook:
            def hook(head: LMHead) -> Tensor:
                rows = self._objective.logprobs(head, batch.rows.targets, temperature=temperature)
                collected.append((batch.token_layout, rows))
                return rows.sum()

            return hook

        ids = [sample.sample_id for sample in unique]
        self._run(plan, ("tokens",), {i: n for n, i in enumerate(ids)}, hook_for, forward_only=True)
        lengths = [sample.response_length for sample in unique]
        flat = torch.zeros(sum(lengths), device=self.layout.device)
        views = dict(zip(ids, torch.split(flat, lengths), strict=True))
        if self.layout.reports_loss:
            for batch, (token_layout, rows) in zip(plan.micro_batches[self.layout.dp_rank], collected, strict=True):
                whole = token_layout.spread(rows)
                for i, sample in enumerate(batch):
                    own = token_layout.rows(i, sample.prompt_length - 1, sample.length - 1)
                    views[sample.sample_id].copy_(whole[own])
        # Each sample's rank has filled its numbers and all others hold 0, so the sum gathers them.
        dist.all_reduce(flat)
        if self.layout.rank:
            return []
        by_id = dict(zip(ids, torch.split(flat.cpu(), lengths), strict=True))
        return [by_id[sample.sample_id] for sample in samples]

    def weights(
        self, part: WeightPart = "all", *, in_place: bool = False, ema: float | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield from ``iter_hf_weights``: all weights, the ``constants`` or the others; with ``ema`` their average of
        this decay, one of ``recipe.averages``. Every rank must exhaust it."""
        complete_weights(self._chunks)
        takes, instead = partial(self._is_of, part), {} if ema is None else self._averages.of(ema)
        yield from iter_hf_weights(
            self._chunks, self.dims, self.layout, takes=takes, in_place=in_place, instead=instead
        )

    def adapter_weights(self, *, ema: float | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield from ``iter_adapter_weights``, as ``weights``, of a student with adapters."""
        lora = self.recipe.student.lora
        assert lora is not None
        complete_weights(self._chunks)
        instead = {} if ema is None else self._averages.of(ema)
        yield from iter_adapter_weights(self._chunks, self.dims, self.layout, lora, instead=instead)

    def sender_weights(self, part: WeightPart) -> Iterator[tuple[str, Tensor | None]]:
        """Yield from ``iter_sender_weights``, as ``weights``."""
        complete_weights(self._chunks)
        yield from iter_sender_weights(self._chunks, self.dims, self.layout, takes=partial(self._is_of, part))

    def _is_of(self, part: WeightPart, placed: Placed) -> bool:
        return part == "all" or (placed.hf_names[0] in self.constants) == (part == "constants")

    def weight_senders(self) -> list[int]:
        """Return the sender of each of the model's Hugging Face tensors, in checkpoint order."""
        return list(hf_senders(self._chunks, self.dims, self.layout))

    def lend(self) -> None:
        """Free the device memory that the rollout may use, on every rank, between two steps (``GpuMemoryLease``)."""
        assert self._lending is not None
        self._lending.lend()
        dist.barrier(group=self.layout.control_group)  # the rollout may be on any rank's GPU

    def restore(self) -> None:
        """Take the lent memory back."""
        assert self._lending is not None
        self._lending.restore()

    @cpu_shim.activate()
    def save(self, folder: Path, extra: Mapping[str, Any], *, is_async: bool = False) -> None:
        """Write a complete checkpoint (see ``checkpoint.save``); ``load`` returns ``extra`` (JSON-able). With
        ``is_async`` this returns as soon as the state is copied: the files are written during what the student does
        next, up to ``saving.finish()``, which must come before the next save."""
        state = {
            "weight_version": self.weight_version,
            "source": str(Path(self.recipe.student.model).resolve()),
            "dtype": self.recipe.student.dtype,
            "extra": dict(extra),
        }
        if self.recipe.student.lora is not None:
            state |= self._adapter_state()
        complete_weights(self._chunks)
        background = self.saving if is_async else None
        parts = (self._chunks, self._optimizer, self.layout, self._averages)
        checkpoint.save(folder, *parts, state=state, background=background)

    def finish_save(self) -> None:
        """Wait until an asynchronous ``save`` is complete on every rank. Together: a rank that goes on alone would wait
        in the next command's collective for the rest of this and for what that command itself waits for.

        Raises:
            UserError: this rank's files are not written in time.
        """
        self.saving.finish()
        dist.barrier(group=self.layout.control_group)

    @cpu_shim.activate()
    def load(self, folder: Path) -> dict[str, Any]:
        """Restore a checkpoint written by ``save``, at this or another layout; return its ``extra``.

        Raises:
            UserError: on every rank, if the folder is incomplete or differs from its manifest.
        """
        parallel.raise_together(self.layout, partial(checkpoint.verify, folder))
        parallel.raise_together(self.layout, partial(self._check_adapter, folder))
        complete_weights(self._chunks)
        state = checkpoint.load(folder, self._chunks, self._optimizer, self.layout, self._averages)
        self.weight_version = state["weight_version"]
        set_learning_rate(self._scheduler, self.recipe.schedule, self.weight_version)
        self._plan = None
        extra: dict[str, Any] = state["extra"]
        return extra

    def _adapter_state(self) -> dict[str, Any]:
        """Return PEFT's description of the adapters, and a hash of the model that they stand beside; empty without."""
        lora, base = self.recipe.student.lora, Path(self.recipe.student.model)
        if lora is None:
            return {}
        return {"adapter": adapter_config(lora, self.dims, str(base.resolve())), "base_sha256": base_hash(base)}

    def _check_adapter(self, folder: Path) -> None:
        """Raise ``UserError`` unless a checkpoint holds adapters as this student's, of the same base, or none as it."""
        (saved, base), (own, own_base) = (
            (state.get("adapter", {}), state.get("base_sha256"))
            for state in (checkpoint.read_state(folder), self._adapter_state())
        )
        for key in ("r", "lora_alpha", "target_modules"):
            if saved.get(key) != own.get(key):
                raise UserError(
                    f"{folder}: its adapters' {key} is {saved.get(key)}, by student.lora it is {own.get(key)}: set the "
                    "section as it was, or begin another run"
                )
        if base != own_base:
            raise UserError(f"{folder}: its adapters belong to another model than student.model: name that one")

    def save_hf(self, folder: Path) -> None:
        """Write the student as a Hugging Face folder with the config and tokenizer files of ``student.model``. Adapters
        are merged there, and stand by themselves in its ``adapter`` folder, in PEFT's format.

        Raises:
            UserError: on every rank, if ``folder`` exists and is not empty.
        """
        source = Path(self.recipe.student.model)
        parallel.raise_together(self.layout, lambda: require_exportable(folder, source))
        if self.layout.rank:
            for _ in self.weights():
                raise RuntimeError("weights arrived at a rank other than 0")
        else:
            write_folder(folder, chain(self.weights(), mtp_tensors(self.dims, source)), source=source)
        if self.recipe.student.lora is not None:
            tensors = dict(self.adapter_weights())
            if self.layout.rank == 0:
                write_adapter(folder / "adapter", tensors, self._adapter_state()["adapter"])
        dist.barrier(group=self.layout.control_group)

    def memory(self) -> dict[str, float]:
        """Return this rank's peak memory so far in GiB: device memory with CUDA, else resident memory. If memory is
        lent to the rollout, also ``GpuMemoryLease.numbers``."""
        lent = {} if self._lending is None else self._lending.numbers
        kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak_gib = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else kib / 2**20
        return lent | {"memory/student_peak_gib": peak_gib}

    def _run(
        self,
        plan: MicroBatchPlan,
        loss_fields: Sequence[str],
        positions: Mapping[int, int],
        hook_for: HookFor,
        *,
        forward_only: bool,
    ) -> None:
        """Run the schedule over this data-parallel rank's share of the plan."""
        share = plan.micro_batches[self.layout.dp_rank]
        self.reader.begin()

        def build(number: int) -> MicroBatch:
            return build_micro_batch(
                share[number],
                self.reader.fetch(share[number], loss_fields),
                rules=self.packing,
                domains=self.domains,
                positions=positions,
                device=self.layout.device,
                at_least=self._common_shape(plan, number),
                cp_size=self.layout.cp_size,
                cp_rank=self.layout.cp_rank,
                vision=self._images,
            )

        run_schedule(
            self._chunks,
            one_ahead(build, range(len(share)), self.layout.device, self.reader.note_wait),
            [self._hidden_shape(batch, self._common_shape(plan, number)) for number, batch in enumerate(share)],
            hook_for,
            forward_only=forward_only,
            has_experts=self.dims.moe is not None,
        )

    def _hidden_shape(self, batch: Sequence[SampleMeta], at_least: tuple[int, int]) -> Shape:
        """Return the shape of a micro-batch's hidden states on this rank, between layers."""
        size, length = choose_token_layout(batch, self.packing, at_least).shape
        ranks = self.layout.cp_size * (self.layout.tp_size if self.layout.sequence_parallel else 1)
        return length // ranks, size, self.dims.hidden_size

    def _common_shape(self, plan: MicroBatchPlan, number: int) -> tuple[int, int]:
        """Return the (B, S) or (1, T) that micro-batch ``number`` has at least. Without CUDA, ranks that share experts
        gather each other's tokens and must bring equally many."""
        if self.layout.ep_size == 1 or torch.cuda.is_available():
            return (1, 1)
        batches = [rank[number] for rank in plan.micro_batches]
        if self.packing.is_packed:
            return 1, max((self.packing.num_tokens(batch) for batch in batches if batch), default=1)
        longest = max((sample.length for batch in batches for sample in batch), default=1)
        return max([1, *map(len, batches)]), longest

    def _plan_forward(self, samples: Sequence[SampleMeta]) -> MicroBatchPlan:
        """Return a plan for any number of samples, forward only."""
        plan = pack(samples, replace(self.packing, count_multiple=1), dp_size=1)
        # Every rank must bring as many micro-batches as the others, and as the schedule needs; empty ones are filler.
        (batches,) = plan.micro_batches
        multiple = self.packing.count_multiple
        num = -(-len(batches) // (self.dp_size * multiple)) * multiple
        shares = [batches[rank :: self.dp_size] for rank in range(self.dp_size)]
        return replace(plan, micro_batches=tuple(share + ((),) * (num - len(share)) for share in shares))

    def _describe_bad_loss(self, plan: MicroBatchPlan, positions: Sequence[int]) -> str:
        bad = {plan.sample_ids[i] for i in positions}
        samples = [sample for sample in _samples(plan) if sample.sample_id in bad]
        return (
            f"loss is not finite at step {self.weight_version + 1}: {_list_samples(samples)}; the weights are "
            "unchanged; check these domains' teachers, or lower student.optimizer.lr"
        )


def _samples(plan: MicroBatchPlan) -> list[SampleMeta]:
    return [sample for rank in plan.micro_batches for batch in rank for sample in batch]


def _list_samples(samples: Sequence[SampleMeta]) -> str:
    """Name domains and sample ids for a message: the first few ids of each domain."""
    by_domain: dict[str, list[int]] = {}
    for sample in samples:
        by_domain.setdefault(sample.domain, []).append(sample.sample_id)
    parts = []
    for domain, ids in sorted(by_domain.items()):
        named = ", ".join(str(i) for i in sorted(ids)[:_MAX_NAMED_SAMPLES])
        more = f" and {len(ids) - _MAX_NAMED_SAMPLES} more" if len(ids) > _MAX_NAMED_SAMPLES else ""
        parts.append(f"domain {domain!r} samples {named}{more}")
    return "; ".join(parts)


def _longest(recipe: Recipe, max_positions: int) -> int:
    """Return the tokens of the longest sample. Raise ``UserError`` if they may exceed the model's positions."""
    needed = recipe.data.max_prompt_length + recipe.rollout.max_response_length
    if needed > max_positions:
        raise UserError(
            f"data.max_prompt_length {recipe.data.max_prompt_length} + rollout.max_response_length "
            f"{recipe.rollout.max_response_length} = {needed} exceeds the model's {max_positions} positions "
            f"({recipe.student.model}): lower one of them"
        )
    return needed
