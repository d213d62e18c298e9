"""Rates of GPUs by their makers' data sheets, and the shares of them that a program gets, as others have published.

A plan multiplies the two. mopd has not been measured on these GPUs yet: the shares are assumptions, each with a source.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields, replace

from mopd.base.types import UserError

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
    host_bytes: int
    """Memory of its server's host."""
    source: str
    per_node: int = 8
    """GPUs of its server."""


GPUS = {
    # memory, operations, bandwidth of the memory, NVLink or PCIe, network adapter, host, source
    "a100": Gpu(81_920 * MIB, 312e12, 2.039e12, 300e9, 25e9, 2048 * GIB,
             "NVIDIA A100 80GB SXM data sheet; DGX A100 user guide (one 200 Gb/s adapter for each GPU, 2 TB)"),
    "h100": Gpu(81_559 * MIB, 989.4e12, 3.35e12, 450e9, 50e9, 2048 * GIB,
             "NVIDIA H100 SXM data sheet (1,979 TFLOP/s with sparsity); DGX H100 data sheet (400 Gb/s for each GPU, "
             "2 TB)"),
    "h20": Gpu(97_871 * MIB, 148e12, 4.0e12, 450e9, 50e9, 2048 * GIB,
             "NVIDIA H20 SXM data sheet (148 TFLOP/s, 96 GB); adapters and host as of a DGX H100"),
    "h200": Gpu(143_771 * MIB, 989.4e12, 4.8e12, 450e9, 50e9, 2048 * GIB,
             "NVIDIA H200 SXM data sheet; DGX H200 data sheet (400 Gb/s for each GPU, 2 TB)"),
    "b200": Gpu(183_359 * MIB, 2_250e12, 8.0e12, 900e9, 50e9, 2048 * GIB,
             "NVIDIA DGX B200 data sheet (eight GPUs: 72 PFLOP/s fp8 with sparsity, 64 TB/s, 14.4 TB/s NVLink, 2 TB)"),
    "b300": Gpu(275_040 * MIB, 2_250e12, 8.0e12, 900e9, 100e9, 2048 * GIB,
             "NVIDIA DGX B300 data sheet (eight GPUs: 72 PFLOP/s fp8 with sparsity, 2.3 TB, 800 Gb/s for each, 2 TB)"),
    "gb200": Gpu(189_471 * MIB, 2_500e12, 8.0e12, 900e9, 50e9, 960 * GIB,
             "NVIDIA GB200 NVL72 data sheet (72 GPUs: 360 PFLOP/s bf16 with sparsity, 576 TB/s); a tray of four, of "
             "whose NVLink to other trays a plan knows nothing", per_node=4),
    "mi300x": Gpu(196_592 * MIB, 1_307e12, 5.3e12, 448e9, 50e9, 2048 * GIB,
             "AMD MI300X data sheet (1,307 TFLOP/s, 192 GB, seven links of 64 GB/s); adapters and host assumed"),
    "l40s": Gpu(46_068 * MIB, 362e12, 0.864e12, 32e9, 25e9, 1024 * GIB,
             "NVIDIA L40S data sheet (733 TFLOP/s with sparsity, PCIe 4); adapters and host assumed"),
    "4090": Gpu(24_564 * MIB, 165.2e12, 1.008e12, 32e9, 12.5e9, 256 * GIB,
             "NVIDIA Ada whitepaper (165 TFLOP/s with fp32 sums, PCIe 4); adapters and host assumed"),
}  # fmt: skip
"""Name that ``mopd plan --gpu`` takes -> GPU."""
OPERATIONS_PER_BYTE = 300
"""bf16 operations for each byte of memory bandwidth, as an H100 has: for a GPU of which only operations are given."""


def gpu_of(name: str | None, *, memory_gib: float | None, tflops: float | None) -> Gpu | None:
    """Return the GPU ``name`` of the table in any case of letters, with memory and operations of its own where given;
    ``None`` if nothing is given.

    Raises:
        UserError: no such name; operations of a GPU whose memory nobody knows.
    """
    if name is None and memory_gib is None and tflops is None:
        return None
    if name is None:
        if memory_gib is None:
            raise UserError("--tflops of which GPU? Name it with --gpu, or give --gpu-memory too")
        found = Gpu(0, 0.0, 0.0, 32e9, 12.5e9, 256 * GIB, "as given; links as of PCIe 4, and the host, assumed")
    elif name.lower() in GPUS:
        found = GPUS[name.lower()]
    else:
        near = difflib.get_close_matches(name.lower(), GPUS, n=1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        raise UserError(
            f"--gpu {name!a:.40}: it is none of {', '.join(GPUS)}{meant}: name one, or give --gpu-memory and --tflops"
        )
    if memory_gib is not None:
        found = replace(found, memory_bytes=round(memory_gib * GIB))
    if tflops is not None:
        flops = tflops * 1e12
        found = replace(found, flops=flops, bandwidth=found.bandwidth or flops / OPERATIONS_PER_BYTE)
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """Share of a peak that a program gets, or a cost that no peak tells."""

    value: float
    source: str


SHARES = {
    "training": Share(value=0.40, source="Megatron-LM: 44 to 52 % of an A100 (Narayanan et al. 2021), 41 to 48 % of an "
                      "H100 (its README); less for our shorter sequences"),
    "device": Share(value=0.05, source="of a GPU's memory that no plan fills: what the driver keeps (79.11 of 79.6 GiB "
                    "are there), other contexts, buffers that NCCL makes later"),
    "training_moe": Share(value=0.30, source="grouped products of few tokens: with expert_layer_s, between what "
                          "NeMo-RL, ms-swift and a tuned pretraining reach (docs/planning.md)"),
    "expert_layer_s": Share(value=3.5e-3, source="routing, sorting, launches and a look of the host at the counts, a "
                            "layer and micro-batch, likewise"),
    "prefill_moe": Share(value=0.20, source="vLLM scores 21,000 to 24,000 tokens/s of 235B on eight H100 (gpustack)"),
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
    "stage": Share(value=0.35e9, source="bytes a second of weights on their way to messages by HTTP: rank 0 copies and "
                   "digests them, the link, msgpack and CRC-32; mopd bench weights, one core each"),
    "send": Share(value=1.5e9, source="bytes a second of the process that sends them, to all together, likewise"),
    "receive": Share(value=0.18e9, source="bytes a second of a replica that takes, compares and loads them, likewise"),
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
    """The same with experts, their exchange and ``expert_layer_s`` apart."""
    prefill: float
    """Operations a second of a forward pass of a dense model."""
    prefill_moe: float
    """The same with experts, their exchange apart."""
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
    expert_layer_s: float
    """Seconds of a forward pass through the experts of one layer, however few tokens it has."""
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
    return rates_of_gpu(name, GPUS[name])


def rates_of_gpu(name: str, gpu: Gpu) -> Rates:
    """Return the rates of a GPU whose operations are known."""
    share = {key: entry.value for key, entry in SHARES.items()}
    peaks = {"prefill", "prefill_moe", "bandwidth", "link"}
    as_they_are = [field.name for field in fields(Rates) if field.name in share.keys() - peaks]
    return Rates(
        train=gpu.flops * share["training"],
        train_moe=gpu.flops * share["training_moe"],
        prefill=gpu.flops * share["prefill"],
        prefill_moe=gpu.flops * share["prefill_moe"],
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
    host_bytes: int = 0
    """Memory of a node's host beside GPUs; 0 where nobody knows it."""

    @property
    def usable_bytes(self) -> int:
        """Memory of one GPU that a plan fills; without GPUs all of it."""
        return round(self.memory_bytes * (1 - SHARES["device"].value)) if self.gpus_per_node else self.memory_bytes

    @property
    def usable_host_bytes(self) -> int:
        """Memory of a node's host that a plan fills, beside GPUs; 0 where nobody knows it."""
        return round(self.host_bytes * (1 - SHARES["device"].value))

    @property
    def num_gpus(self) -> int:
        return self.nodes * self.gpus_per_node
