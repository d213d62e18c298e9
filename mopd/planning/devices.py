"""Rates of GPUs by their makers' data sheets, and the shares of them that a program gets, as others have published.

A plan multiplies the two. mopd has not been measured on these GPUs yet: the shares are assumptions, each with a source.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

MIB, GIB = 2**20, 2**30


def gib(num_bytes: float) -> str:
    """Return a size as text."""
    return f"{num_bytes / GIB:.1f} GiB"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU of a server, and its links, in one direction each."""

    memory_bytes: int
    """Memory as ``memory.total`` of nvidia-smi gives it."""
    flops: float
    """Dense bf16 operations a second."""
    bandwidth: float
    """Bytes a second of its memory."""
    link: float
    """Bytes a second to the other GPUs of its server (NVLink)."""
    network: float
    """Bytes a second to other servers: one network adapter for each GPU."""
    source: str


GPUS = {
    # memory, operations, bandwidth of the memory, NVLink, network adapter, source
    "a100": Gpu(81_920 * MIB, 312e12, 2.039e12, 300e9, 25e9,
             "NVIDIA A100 80GB SXM data sheet; DGX A100 user guide (one 200 Gb/s adapter for each GPU)"),
    "h100": Gpu(81_559 * MIB, 989.4e12, 3.35e12, 450e9, 50e9,
             "NVIDIA H100 SXM data sheet (1,979 TFLOP/s with sparsity); DGX H100 data sheet (400 Gb/s for each GPU)"),
    "h200": Gpu(143_771 * MIB, 989.4e12, 4.8e12, 450e9, 50e9,
             "NVIDIA H200 SXM data sheet; DGX H200 data sheet (400 Gb/s for each GPU)"),
    "b200": Gpu(183_359 * MIB, 2_250e12, 8.0e12, 900e9, 50e9,
             "NVIDIA DGX B200 data sheet (eight GPUs: 72 PFLOP/s fp8 with sparsity, 64 TB/s, 14.4 TB/s NVLink)"),
}  # fmt: skip
"""Name that ``mopd plan --gpu`` takes -> GPU."""
GPUS_PER_NODE = 8
"""GPUs of each server that the table is about."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """Share of a peak that a program gets, or a cost that no peak tells."""

    value: float
    source: str


SHARES = {
    "training": Share(value=0.40, source="Megatron-LM: 44 to 52 % of an A100 (Narayanan et al. 2021), 41 to 48 % of an "
                      "H100 (its README); less for our shorter sequences"),
    "training_moe": Share(value=0.20, source="half of a dense model's: small products, and tokens exchanged"),
    "prefill": Share(value=0.50, source="Pope et al. 2022 reach 76 % with large batches; ours are single requests"),
    "bandwidth": Share(value=0.70, source="copies reach 80 to 90 % of the data sheet; attention over pages less"),
    "link": Share(value=0.70, source="nccl-tests on NVLink and InfiniBand, large messages"),
    "decode_step_s": Share(value=2e-3, source="vLLM's scheduler and sampler, per step and whatever the model"),
    "collective_s": Share(value=15e-6, source="all-reduce of a few kilobytes over NVLink, nccl-tests"),
    "network_collective_s": Share(value=40e-6, source="the same between servers"),
    "call_s": Share(value=5e-6, source="launch of a CUDA kernel from Python"),
    "part_s": Share(value=0.2e-3, source="launch of a broadcast, and a look for its end every 0.2 ms; assumed"),
    "load_tensor_s": Share(value=0.15e-3, source="vLLM's loader: 0.16 to 0.28 ms for an expert's tensor, measured on a "
                           "core that others used (0.32, layerwise reload); below 0.17 ms after checkpoint-engine, "
                           "which loads the 36,945 tensors of 235B in 6.2 s"),
    "update_s": Share(value=0.1, source="stop, start and finish of an update, and emptying of caches; assumed, below "
                      "the 0.18 s of a whole update of 0.6B by vLLM's own transfer (huggingface/trl 5892)"),
    "stage": Share(value=0.45e9, source="bytes a second of the process that packs weights (copy, msgpack, CRC-32), "
                   "measured on one core: docs/planning.md"),
    "send": Share(value=0.8e9, source="bytes a second of the process that sends them, to all together, likewise"),
    "receive": Share(value=0.23e9, source="bytes a second of a replica that takes, checks and loads them, likewise"),
    "host": Share(value=20e9, source="bytes a second of host memory that a rank's fused Adam moves, measured on one "
                  "core; the cores of a node share its memory"),
    "vllm_reserve_bytes": Share(value=4 * GIB, source="CUDA graphs, activations of a step, as vLLM tells at its start"),
    "rank_reserve_bytes": Share(value=3 * GIB, source="CUDA's context, NCCL's buffers, workspaces of cuBLAS"),
    "fragments": Share(value=0.05, source="of what a rank allocates: pieces that the allocator cannot use"),
}  # fmt: skip
"""Assumptions, each by its name in ``--json``."""


OPTIMIZER_CALLS = 5
"""Kernels of Adam, clipping and copying for one tensor, most of them for many tensors at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Rates of one device: a peak times its share, or what ``--probe`` measured."""

    train: float
    """Operations a second, forward and backward of a dense model."""
    train_moe: float
    """The same with experts."""
    prefill: float
    """Operations a second of a forward pass."""
    bandwidth: float
    """Bytes a second of its memory."""
    link: float
    network: float
    sums: float | None
    """Bytes a second of tensor-parallel sums; ``None`` where ``train`` has them in it, as published shares do."""
    host: float
    """Bytes a second of host memory, of a rank's part of an optimizer step there."""
    call_s: float
    """Seconds of one operation, however small."""
    tensor_s: float
    """Seconds of the optimizer for one parameter tensor, however small."""
    decode_step_s: float
    """Seconds beside the model of one step of an engine with a scheduler of its own."""
    collective_s: float
    """Seconds of a collective of few bytes within a node."""
    network_collective_s: float
    part_s: float
    """Seconds of a part of the weights on its way, however small."""
    load_tensor_s: float
    """Seconds of an engine's loader for one tensor of the checkpoint, however small."""
    update_s: float
    """Seconds of an update of the weights beside what moves them."""
    stage: float
    """Bytes a second of weights into host memory, ready for the wire."""
    send: float
    """Bytes a second of these to replicas, which share the sender."""
    receive: float
    """Bytes a second of these into one replica, beside the others."""
    source: str


def rates_of(name: str) -> Rates:
    """Return the rates of a GPU of the table."""
    gpu = GPUS[name]
    share = {key: entry.value for key, entry in SHARES.items()}
    peaks = {"prefill", "bandwidth", "link"}
    as_they_are = [field.name for field in fields(Rates) if field.name in share.keys() - peaks]
    return Rates(
        train=gpu.flops * share["training"],
        train_moe=gpu.flops * share["training_moe"],
        prefill=gpu.flops * share["prefill"],
        bandwidth=gpu.bandwidth * share["bandwidth"],
        link=gpu.link * share["link"],
        network=gpu.network * share["link"],
        sums=None,
        tensor_s=OPTIMIZER_CALLS * share["call_s"],
        source=f"{name}: {gpu.source}; shares of it are assumptions",
        **{key: share[key] for key in as_they_are},
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Nodes that are all alike."""

    name: str
    """Name of the GPU, or ``cpu``."""
    nodes: int
    gpus_per_node: int
    """0 without GPUs."""
    memory_bytes: int
    """Memory of one GPU; of a node's host where there is none."""

    @property
    def num_gpus(self) -> int:
        return self.nodes * self.gpus_per_node
