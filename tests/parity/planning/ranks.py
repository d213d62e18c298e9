"""One rank of a job that weighs a real student: every case is a student that trains one step, and whose tensors are
counted on every rank. ``{"models": {name: folder}, "out": file, "cases": {name: case}}``; a case as in
``tests/parity/student/ranks.py``, with the name of its ``model``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from mopd.bench.clock import peak_bytes
from mopd.student import cpu_shim, parallel
from mopd.student.batch import build_micro_batch
from mopd.student.memory.offload import HostWeights
from mopd.student.model.gpt import LMHead
from tests.parity.student.ranks import DOMAINS, Case, layout_of


def weigh(it: Case) -> dict[str, int]:
    """Bytes of this rank's weights, gradients, averages and optimizer states, those in host memory apart."""
    worker = it.worker
    chunks, optimizer = worker._chunks, worker._optimizer
    weights = [weight for chunk in chunks for weight in chunk.parameters()]
    storages = {weight.untyped_storage().data_ptr() for weight in weights}
    constants = [buffer for chunk in chunks for name, buffer in chunk.named_buffers() if name.endswith("expert_bias")]
    states: dict[int, torch.Tensor] = {}
    hosted: dict[int, torch.Tensor] = {}
    for part in optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            for main in group["params"]:
                own = hosted if isinstance(main, HostWeights) else states
                if main.untyped_storage().data_ptr() not in storages:  # else a view of the model's own
                    own[main.data_ptr()] = main
                own |= {value.data_ptr(): value for value in part.optimizer.state[main].values() if value.dim()}
    return {
        "weights": sum(weight.nbytes for weight in [*weights, *constants]),
        "gradients": sum(
            buffer.grad_data.nbytes for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        ),
        "optimizer": sum(state.nbytes for state in states.values()),
        "offloaded": sum(state.nbytes for state in hosted.values()),
        "averages": sum(own.nbytes for decay in it.recipe.averages for own in worker._averages.of(decay).values()),
    }


@cpu_shim.activate()
def head_peak(it: Case) -> dict[str, int] | None:
    """The LM head and the loss of this rank's first micro-batch: its sizes, and the most bytes at one moment. Every
    rank of the last stage calls it."""
    worker, plan = it.worker, it.plan(2)
    layout = worker.layout
    if not layout.is_last_stage:
        return None
    samples = plan.micro_batches[layout.dp_rank][0]
    batch = build_micro_batch(
        samples,
        worker.reader.fetch(samples, worker._objective.field_names),
        rules=worker.packing,
        domains=DOMAINS,
        positions={sample_id: i for i, sample_id in enumerate(plan.sample_ids)},
        device=layout.device,
    )
    model: Any = worker._chunks[-1].module
    tied = model.share_embeddings_and_output_weights
    weight = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
    num, length = batch.shape
    own = length // layout.tp_size if layout.sequence_parallel else length
    hidden = torch.randn(own, num, weight.shape[1], dtype=weight.dtype, requires_grad=True)
    sizes = {"num_domains": len(DOMAINS), "num_samples": plan.num_samples, "num_loss_tokens": plan.num_loss_tokens}
    sums = worker._objective.new_sums(diagnostics=False, **sizes)

    def work() -> None:
        hidden.grad = None
        worker._objective(LMHead(hidden, weight), rows=batch.rows, sums=sums).backward()

    work()
    peak = peak_bytes(work, torch.device("cpu"))
    index = batch.rows.loss_rows
    rows = num * length if index is None else len(index)
    return {"rows": rows, "tokens": num * length, "peak": peak - hidden.nbytes}


def main(job_path: str) -> None:
    job = json.loads(Path(job_path).read_text())
    torch._dynamo.config.disable = True  # Megatron has small functions compiled, for seconds each
    results, active = {}, None
    for name, case in sorted(job["cases"].items(), key=lambda item: layout_of(item[1])):
        if active is not None and active != layout_of(case):
            torch.distributed.barrier()
            parallel.destroy()
        active = layout_of(case)
        it = Case(job["models"][case["model"]], case)
        it.train(1)
        own = {"rank": it.worker.layout.rank, "stage": it.worker.layout.pp_rank, **weigh(it), "head": head_peak(it)}
        every: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(every, own)
        results[name] = every
        it.close()
    if torch.distributed.get_rank() == 0:
        Path(job["out"]).write_text(json.dumps(results))
    torch.distributed.barrier()
    parallel.destroy()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
