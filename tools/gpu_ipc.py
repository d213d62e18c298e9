"""Weights from one process to another on the same GPU by ``weight_sync: {type: ipc}``: time, memory, every bit.

The stage ``ipc`` of ``tools/gpu_student.py``; without CUDA a small model and shared memory take its place.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import secrets
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tools.gpu_stage import Check, Stage, need, start, wait

NEEDS = ("megatron.core",)
BUCKET_MIB = {"cuda": 512, "cpu": 4}
SHAPE = {"cuda": {}, "cpu": {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 4096}}
"""What differs from Qwen3-1.7B."""
NUM_UPDATES = 4
DEADLINE_S = 60.0
SHARE = 0.5
"""Of the device's copies of as many bytes within one process."""


def ipc_stage(device: str, dtype: str, work: Path, stage: Stage, deadline: float) -> None:
    """Sender and receiver, in processes of their own."""
    need(NEEDS)
    out = work / "ipc.json"
    child = start([sys.executable, "-m", "tools.gpu_ipc", "--device", device, "--out", str(out)], device)
    wait(child, "weights by ipc", deadline)
    found = stage.figures = json.loads(out.read_text())
    stage.checks = [
        Check(name="every bit arrived", value=found["equal"], limit=True, ok=found["equal"]),
        Check(
            name="memory beyond both models, in buckets",
            value=found["extra_buckets"],
            limit=2.1,
            ok=found["extra_buckets"] <= 2.1,
        ),
    ]
    if device == "cuda":
        share = found["copy_s"] / found["update_s"]
        stage.checks.append(Check(name="of the device's copies, at least", value=share, limit=SHARE, ok=share >= SHARE))


def measure(device_name: str, work: Path) -> dict[str, Any]:
    """Updates of a model shaped as Qwen3-1.7B (CPU: smaller), in bf16."""
    import torch

    from mopd.weights.carrying import MappedParts, part_memory_bytes
    from mopd.weights.group import GroupOrder, GroupStore, TransferGroup
    from mopd.weights.memory import SharedMemory
    from mopd.weights.sending import send

    device = torch.device(device_name)
    metas = _metas(device_name, work)
    weights = {meta.name: torch.randint(-99, 99, meta.shape, device=device).to(meta.dtype) for meta in metas}
    bucket_bytes = BUCKET_MIB[device_name] * 2**20
    before = _used_bytes(device)
    memory = SharedMemory(part_memory_bytes(metas, bucket_bytes), device)
    store = GroupStore("127.0.0.1", DEADLINE_S)
    order = GroupOrder(
        group_id="ipc",
        host=store.host,
        port=store.port,
        num_senders=1,
        num_receivers=1,
        bucket_bytes=bucket_bytes,
        large_bytes=bucket_bytes,
        timeout_s=DEADLINE_S,
        secret=secrets.token_hex(16),
        memory=memory.handles(1),
    )
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=_receive, args=(there, order, metas, device_name), daemon=True)
    child.start()
    deciding = threading.Thread(target=store.decide, args=(order,))
    deciding.start()
    carrier = MappedParts(TransferGroup(order, 0), memory.buffer, device)
    deciding.join()
    seconds = []
    for i in range(NUM_UPDATES):
        weights["model.norm.weight"].fill_(i + 1)
        here.recv()  # it waits for the first bucket
        began = time.perf_counter()
        send(carrier, metas, weights.items(), verify=i == 0)
        seconds.append(time.perf_counter() - began)
    sums = here.recv()
    child.join(DEADLINE_S)
    extra = len(memory.buffer) if device_name == "cpu" else _used_bytes(device) - before
    return {
        "num_bytes": sum(meta.num_bytes for meta in metas),
        "seconds": seconds,
        "update_s": min(seconds[1:]),
        "copy_s": _copy_s(weights, device),
        "extra_buckets": extra / bucket_bytes,
        "equal": sums == _sums(weights),
    }


def _metas(device_name: str, work: Path) -> list[Any]:
    import torch

    from mopd.bench.models import SIZES
    from mopd.conversion.models.reading import read_dims
    from mopd.student.weights import hf_tensors
    from mopd.weights.parts import TensorMeta

    (work / "config.json").write_text(
        json.dumps({**SIZES["qwen3-1.7b"], **SHAPE[device_name], "max_position_embeddings": 2048})
    )
    return [TensorMeta(*tensor) for tensor in hf_tensors(read_dims(work), torch.bfloat16)]


def _receive(pipe: Connection, order: Any, metas: Sequence[Any], device_name: str) -> None:
    """The engine's side: slots, into which each update is copied."""
    import torch

    from mopd.weights.receiving import Receiver

    device = torch.device(device_name)
    slots = {meta.name: torch.empty(meta.shape, dtype=meta.dtype, device=device) for meta in metas}
    receiver = Receiver(order, 1, metas, keeps_views=False, slots=slots, device=device)
    for i in range(NUM_UPDATES):
        pipe.send("ready")
        for name, tensor in receiver.tensors(verify=i == 0, patience_s=DEADLINE_S):
            slots[name].copy_(tensor)
    pipe.send(_sums(slots))
    receiver.close()


def _sums(weights: dict[str, Any]) -> list[int]:
    """Of each tensor's bytes and their places, on its device."""
    import torch

    from mopd.weights.parts import digest

    return [int(digest(tensor.contiguous().view(-1).view(torch.uint8))) for tensor in weights.values()]


def _copy_s(weights: dict[str, Any], device: Any) -> float:
    """Seconds of a copy of every tensor within this process."""
    import torch

    def settle() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    copies = {name: torch.empty_like(tensor) for name, tensor in weights.items()}
    seconds = []
    for _ in range(NUM_UPDATES):
        settle()
        began = time.perf_counter()
        for name, tensor in weights.items():
            copies[name].copy_(tensor)
        settle()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def _used_bytes(device: Any) -> int:
    """Of this process, on its GPU."""
    import torch

    return int(torch.cuda.memory_allocated(device)) if device.type == "cuda" else 0


def main() -> None:
    """Measure, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=tuple(SHAPE), required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.write_text(json.dumps(measure(args.device, args.out.parent)))


if __name__ == "__main__":
    main()
