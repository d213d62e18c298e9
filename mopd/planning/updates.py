"""Seconds of an update of the rollout's weights, by the way that they take.

``collective`` and ``ipc`` send parts, one at a time, and three things go on at once: the longest of them counts, and
the other two for one part each.

::

    sender      gather 0 │ gather 1 │ gather 2 │ …
    chain                │ part 0 ─> receiver 1 ─> receiver 2 ─> … │ part 1 ─> …
    receivers                       │ load 0   │ load 1   │ …

``http`` packs, sends and loads one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from mopd.config.placements import InProcessConfig
from mopd.config.schema import Recipe
from mopd.config.student import Freeze, FrozenPart, ParallelConfig
from mopd.config.weights import BucketsConfig, IpcConfig
from mopd.conversion.models import families
from mopd.conversion.models.adapted import adapted_modules
from mopd.conversion.models.adapter_updates import sends_adapters
from mopd.conversion.models.dims import ModelDims
from mopd.conversion.models.frozen import part_of
from mopd.conversion.models.stages import Stages, stages_of
from mopd.conversion.models.towers import is_trained
from mopd.planning.devices import MIB, Cluster, Rates
from mopd.planning.memory.shards import BYTES
from mopd.planning.traffic import sent_bytes

HTTP_PIECE_BYTES = 64 * MIB
"""Bytes of one message of an update by HTTP."""
TAKEN_OVER = 0.5
"""Share of packing by HTTP after which the student goes on: rank 0 has handed its weights over, and they become
messages (``mopd bench weights``: 0.7 of 1.5 s)."""
HOST_LARGE_BYTES = MIB
"""Bytes from which a tensor leaves host memory as a part of its own; from a GPU's it does from a bucket's on."""
TENSOR_CALLS = 10
"""Operations by which a sender brings one tensor into a bucket (cut, cast, copied, checked); assumed."""
GATHERS = 2
"""Collectives by which the sender gets one tensor of its tensor-parallel group."""
BUCKET_PASSES = 3
"""Passes over the memory of the weights until they are in buckets: read, written, searched for NaN."""
RECEIVER_PASSES = 6
"""Passes of each receiver of a broadcast without GPUs: into a socket, out of it and into its model, read and
written."""
MAPPED_PASSES = 2
"""Passes of each receiver that maps buckets: read there, written into its model."""
LOAD_PASSES = 4
"""Passes over a receiver's own share: into its layer's tensors and from there into the engine's, read and written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pieces:
    """Numbers of what travels in one update."""

    tensors: int
    parts: int
    """Buckets of small neighbours, and segments of large tensors."""
    turns: int
    """Runs of parts of one sender: at each the chain empties and fills anew."""
    senders: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightUpdate:
    """One update of all replicas of the rollout."""

    way: str
    num_bytes: int
    """Bytes that each receiver gets."""
    parts: int
    senders: int
    receivers: int
    """Workers of engines by ``collective`` and ``ipc``, else replicas."""
    nodes: int
    """Nodes that senders and receivers are on."""
    seconds: float
    student_s: float
    """Seconds of them until the student goes on."""
    bound: str
    """What takes longest: gathering, link, network, memory, latency, loading, control; by HTTP packing, sending."""


def pieces(
    dims: ModelDims,
    parallel: ParallelConfig,
    freeze: Freeze,
    size: int,
    bucket_bytes: int,
    large_bytes: int,
    parts: tuple[FrozenPart, ...] = (),
) -> Pieces:
    """Return what travels of a model with ``size`` bytes a weight; tensors of ``large_bytes`` are cut, not packed.
    ``parts``: what ``student.freeze`` names."""
    expert_ranks = parallel.expert_model_parallel_size
    return _pieces(dims, stages_of(parallel), expert_ranks, freeze, size, bucket_bytes, large_bytes, parts)


@lru_cache(maxsize=4096)
def _pieces(
    dims: ModelDims,
    stages: Stages,
    expert_ranks: int,
    freeze: Freeze,
    size: int,
    bucket_bytes: int,
    large_bytes: int,
    frozen: tuple[FrozenPart, ...],
) -> Pieces:
    tensors = parts = turns = room = 0
    senders, previous = set[tuple[int, int]](), None
    for sender, weights in _tensors(dims, stages, expert_ranks, freeze, frozen):
        num_bytes = weights * size
        if sender != previous:
            senders.add(sender)
            turns, room, previous = turns + 1, 0, sender
        if num_bytes >= large_bytes:
            parts, room = parts - (-num_bytes // bucket_bytes), 0
        elif num_bytes > room:
            parts, room = parts + 1, bucket_bytes - num_bytes
        else:
            room -= num_bytes
        tensors += 1
    return Pieces(tensors=tensors, parts=parts, turns=turns, senders=len(senders))


def _tensors(
    dims: ModelDims, stages: Stages, expert_ranks: int, freeze: Freeze, frozen: tuple[FrozenPart, ...]
) -> Iterator[tuple[tuple[int, int], int]]:
    """Yield the sender (pipeline stage, expert-parallel rank) and the weights of each tensor that travels, in the
    checkpoint's order."""
    last = stages.pipeline_model_parallel_size - 1, 0
    for placed in families.tower_params(dims):
        if is_trained(placed.megatron[0], freeze):
            yield (0, 0), math.prod(placed.hf_shapes[0])
    table = dims.vocab_size * dims.hidden_size
    if "embeddings" not in frozen:
        yield (0, 0), table
    of_kind: dict[bool, list[tuple[int, int]]] = {}
    for layer in range(dims.num_layers):
        stage, kind = stages.stage_of(layer, dims.num_layers), dims.is_moe_layer(layer)
        if kind not in of_kind:
            of_kind[kind] = _layer_tensors(dims, layer, expert_ranks, frozen)
        for rank, weights in of_kind[kind]:
            yield (stage, rank), weights
    yield last, dims.hidden_size
    if not dims.tied_embeddings and "output_layer" not in frozen:
        yield last, table


def _layer_tensors(
    dims: ModelDims, layer: int, expert_ranks: int, frozen: tuple[FrozenPart, ...]
) -> list[tuple[int, int]]:
    """Return the expert-parallel rank that sends each tensor of a layer, and its weights, in the checkpoint's order."""
    sizes = families.sizes(dims)
    rows = [row for row in families.layer_params(dims, layer) if part_of(row) not in frozen]
    tensors = [(row.is_expert, math.prod(sizes[name] for name in tensor.shape)) for row in rows for tensor in row.hf]
    num_experts = dims.moe.num_experts if dims.moe is not None else 0
    found = [(0, weights) for is_expert, weights in tensors if not is_expert]
    experts = [weights for is_expert, weights in tensors if is_expert]
    return found + [(i * expert_ranks // num_experts, weights) for i in range(num_experts) for weights in experts]


def sender_ranks(parallel: ParallelConfig) -> list[int]:
    """Return the trainer ranks that may send: of each pipeline stage the first of each expert-parallel rank."""
    step = parallel.resolved_expert_tensor_parallel_size
    experts = range(0, parallel.expert_model_parallel_size * step, step)
    stages = range(0, parallel.world_size, parallel.ranks_per_stage)
    return [stage + expert for stage in stages for expert in experts]


def weight_update(
    recipe: Recipe, dims: ModelDims, rates: Rates, cluster: Cluster, *, replicas: int, nodes: int
) -> WeightUpdate:
    """Return the update of so many replicas of the rollout, which are with the senders on so many nodes."""
    student, way, num_bytes = recipe.student, recipe.weight_sync, sent_bytes(recipe, dims)
    size, freeze, name, receivers = BYTES[student.dtype], student.vision.freeze, "http", replicas
    if isinstance(recipe.rollout.placement, InProcessConfig):
        name, found = "in_process", pieces(dims, student.parallel, freeze, size, num_bytes, 0, student.freeze)
        seconds = student_s = _gathering_s(recipe, dims, rates, found.tensors)
        bound = "gathering"
    elif isinstance(way, BucketsConfig):
        name, receivers, bucket = way.type, replicas * recipe.rollout.gpus_per_replica, way.bucket_mib * MIB
        large = bucket if cluster.gpus_per_node else min(bucket, HOST_LARGE_BYTES)
        senders = ParallelConfig() if isinstance(way, IpcConfig) else student.parallel
        found = pieces(dims, senders, freeze, size, bucket, large, student.freeze)
        if student.lora is not None and sends_adapters(recipe, dims):  # by the first rank, A and B of each module
            tensors = 2 * sum(1 for _ in adapted_modules(dims, student.lora.target_modules))
            found = Pieces(tensors=tensors, parts=-(-num_bytes // bucket), turns=1, senders=1)
        times = _times_of_parts(recipe, dims, found, rates, cluster, receivers, nodes)
        seconds, student_s, bound = _overlapped(times, found)
    else:
        found = Pieces(tensors=0, parts=-(-num_bytes // HTTP_PIECE_BYTES), turns=1, senders=1)
        times = {"packing": num_bytes / rates.stage, "sending": num_bytes * replicas / rates.send}
        times["loading"] = num_bytes / rates.receive
        student_s, bound = TAKEN_OVER * times["packing"], max(times, key=times.__getitem__)
        seconds = times["packing"] + max(times["sending"], times["loading"])
    return WeightUpdate(
        way=name, num_bytes=num_bytes, parts=found.parts, senders=found.senders, receivers=receivers, nodes=nodes,
        seconds=seconds, student_s=student_s, bound=bound,
    )  # fmt: skip


def _gathering_s(recipe: Recipe, dims: ModelDims, rates: Rates, tensors: int) -> float:
    """Return the seconds until all tensors were in buckets, if one sender gathered them; of a model with experts those
    are nearly all weights."""
    parallel, num_bytes = recipe.student.parallel, sent_bytes(recipe, dims)
    dense, experts = parallel.tensor_model_parallel_size, parallel.resolved_expert_tensor_parallel_size
    ranks = dense if dims.moe is None else experts
    each = TENSOR_CALLS * rates.call_s + (GATHERS * rates.collective_s if ranks > 1 else 0.0)
    return num_bytes * (BUCKET_PASSES / rates.bandwidth + (ranks - 1) / ranks / rates.link) + tensors * each


def _times_of_parts(
    recipe: Recipe, dims: ModelDims, found: Pieces, rates: Rates, cluster: Cluster, receivers: int, nodes: int
) -> dict[str, float]:
    """Return the seconds of each thing that an update in parts waits for, were it alone."""
    num_bytes, is_mapped = sent_bytes(recipe, dims), isinstance(recipe.weight_sync, IpcConfig)
    latency, loading = found.parts * rates.part_s, found.tensors * rates.load_tensor_s
    if is_mapped or not cluster.gpus_per_node:
        passes = MAPPED_PASSES if is_mapped else RECEIVER_PASSES
        # without GPUs all processes share the host's memory
        passes *= 1 if cluster.gpus_per_node else receivers
        bound, moving = "memory", num_bytes * passes / rates.bandwidth
    else:
        bound, moving = ("network", num_bytes / rates.network) if nodes > 1 else ("link", num_bytes / rates.link)
        latency += found.turns * (nodes * rates.collective_s + (nodes - 1) * rates.network_collective_s)
        loading += num_bytes / recipe.rollout.gpus_per_replica * LOAD_PASSES / rates.bandwidth
    gathering = _gathering_s(recipe, dims, rates, found.tensors)
    return {"gathering": gathering, bound: moving, "latency": latency, "loading": loading, "control": rates.update_s}


def _overlapped(times: dict[str, float], found: Pieces) -> tuple[float, float, str]:
    """Return the seconds of an update, those of them until its last part has left, and what takes longest."""
    (link,) = times.keys() - {"gathering", "latency", "loading", "control"}
    # the first part of each turn is gathered while others send
    gathering, loading = times["gathering"] * (1 - found.turns / found.parts), times["loading"]
    chain, slower = times[link] + times["latency"], max(link, "latency", key=times.__getitem__)
    bound = max((chain, slower), (gathering, "gathering"), (loading, "loading"), (times["control"], "control"))[1]
    sent = times["gathering"] / found.parts + max(chain, gathering, loading)
    return sent + loading / found.parts + times["control"], sent, bound
