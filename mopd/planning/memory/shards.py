"""Weights of the student on each trainer rank, counted from the name tables, and the bytes that belong to them.

Ranks of one pipeline stage hold equally much. What Megatron's buffers add to align parameters is left out.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache

from mopd.config.student import Freeze, FrozenPart, LoraConfig, ParallelConfig, StudentConfig
from mopd.conversion.models import families
from mopd.conversion.models.adapted import adapted_parts
from mopd.conversion.models.dims import ModelDims
from mopd.conversion.models.frozen import part_of
from mopd.conversion.models.rows import EMBEDDING, LM_HEAD, Param
from mopd.conversion.models.stages import stages_of
from mopd.conversion.models.towers import is_merger

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
GRADIENT_BYTES = 4
"""Bytes of one gradient: with ``grad_reduce_in_fp32`` the buffers are fp32 whatever the model's dtype."""
MOMENT_BYTES = 8
"""Bytes of Adam's two moments, in fp32."""
MAIN_BYTES = 4
"""Bytes of the fp32 copy of a weight that is not fp32 itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """Numbers of one rank's weights."""

    dense: int
    """Weights outside the experts; copies of them are on every data-parallel rank."""
    experts: int
    constants: int
    """Weights that are kept in fp32 and not trained by gradients (the routers' biases)."""
    tower: int
    """Weights of the vision tower without its mergers, on the first stage, whole on each of its ranks."""
    mergers: int
    """Weights of the mergers, which turn the tower's features into embeddings, likewise."""
    frozen: int = 0
    """Weights outside the experts that ``student.freeze`` names."""
    adapters: tuple[int, int] | None = None
    """Weights of adapters outside and beside experts; ``None`` of a student that trains its own weights."""

    def trained_dense(self, freeze: Freeze) -> int:
        """Return the weights outside the experts that are trained, with what ``student.vision.freeze`` leaves of the
        vision tower."""
        tower = {"none": self.tower + self.mergers, "tower": self.mergers, "tower_and_merger": 0}
        return self.dense - self.frozen + tower[freeze]

    def trained(self, freeze: Freeze) -> tuple[int, int]:
        """Return the weights with gradients, outside experts and in them."""
        return self.adapters or (self.trained_dense(freeze), self.experts)

    @property
    def num_weights(self) -> int:
        """Number of weights in the model's dtype."""
        return self.dense + self.experts + self.tower + self.mergers + sum(self.adapters or ())


@lru_cache(maxsize=4096)
def shard(dims: ModelDims, parallel: ParallelConfig, stage: int) -> Shard:
    """Return the shard of every rank of a pipeline stage (from 0)."""
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    layers = own_layers(dims, parallel)
    etp, ep = parallel.resolved_expert_tensor_parallel_size, parallel.expert_model_parallel_size
    sizes = families.sizes(dims)
    dense = experts = constants = 0
    for kind, count in Counter(map(dims.layer_kind, layers[stage])).items():
        example = next(layer for layer in range(dims.num_layers) if dims.layer_kind(layer) == kind)
        for param in families.layer_params(dims, example):
            numel = _numel(param, sizes)
            if param.stays_fp32:
                constants += count * numel
            elif param.is_expert:
                assert dims.moe is not None
                experts += count * (dims.moe.num_experts // ep) * _share(param, numel, etp)
            else:
                dense += count * _share(param, numel, tp)
    vocabulary = dims.padded_vocab_size(tp) // tp * dims.hidden_size
    is_first, is_last = stage == 0, stage == pp - 1
    tables = int(is_first) + int(is_last) - int(is_first and is_last and dims.tied_embeddings)
    mergers, tower = _tower(dims) if is_first else (0, 0)
    return Shard(
        dense=dense + tables * vocabulary + (dims.hidden_size if is_last else 0),
        experts=experts,
        constants=constants,
        tower=tower,
        mergers=mergers,
    )


def student_shard(dims: ModelDims, student: StudentConfig, stage: int) -> Shard:
    """Return the shard of every rank of a pipeline stage of the student, adapters included."""
    own = shard(dims, student.parallel, stage)
    if student.lora is not None:
        return replace(own, adapters=_adapters(dims, student.parallel, student.lora, stage))
    return replace(own, frozen=_frozen(dims, student.parallel, student.freeze, stage)) if student.freeze else own


@lru_cache(maxsize=4096)
def _frozen(dims: ModelDims, parallel: ParallelConfig, parts: tuple[FrozenPart, ...], stage: int) -> int:
    """Return a rank's weights of the ``parts``, without those that are kept in fp32."""
    tp, last = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size - 1
    sizes = families.sizes(dims) | {"vocab": dims.padded_vocab_size(tp)}
    rows = [param for layer in own_layers(dims, parallel)[stage] for param in families.layer_params(dims, layer)]
    rows += [EMBEDDING] if stage == 0 else []
    if stage == last and not (dims.tied_embeddings and last == 0):
        rows.append(EMBEDDING if dims.tied_embeddings else LM_HEAD)
    return sum(
        _share(param, _numel(param, sizes), tp) for param in rows if part_of(param) in parts and not param.stays_fp32
    )


@lru_cache(maxsize=64)
def _frozen_weights(dims: ModelDims, parts: tuple[FrozenPart, ...]) -> int:
    """Return the weights of the ``parts``, each once."""
    frozen = (placed for placed in families.all_params(dims) if part_of(placed.param) in parts)
    return sum(math.prod(shape) for placed in frozen for shape in placed.hf_shapes)


@lru_cache(maxsize=4096)
def _adapters(dims: ModelDims, parallel: ParallelConfig, lora: LoraConfig, stage: int) -> tuple[int, int]:
    """Return the weights of A and B on a rank, outside and beside experts: one is cut as the weight is."""
    sizes, dense, experts = families.sizes(dims), 0, 0
    for layer in own_layers(dims, parallel)[stage]:
        for param in families.layer_params(dims, layer):
            ranks, times = parallel.tensor_model_parallel_size, 1
            if param.is_expert:
                assert dims.moe is not None
                ranks = parallel.resolved_expert_tensor_parallel_size
                times = dims.moe.num_experts // parallel.expert_model_parallel_size
            cut_a = ranks if param.merge == "columns" else 1
            cut_b = ranks if param.merge not in ("columns", "replicated") else 1
            for part in adapted_parts(param, lora.target_modules):
                outputs, inputs = (sizes[name] for name in param.hf[part].shape)
                numel = times * lora.rank * (inputs // cut_a + outputs // cut_b)
                experts, dense = (experts + numel, dense) if param.is_expert else (experts, dense + numel)
    return dense, experts


@lru_cache(maxsize=64)
def adapter_weights(dims: ModelDims, lora: LoraConfig) -> int:
    """Return the weights of all adapters, each once."""
    return sum(_adapters(dims, ParallelConfig(), lora, 0))


@lru_cache(maxsize=64)
def _adapted_weights(dims: ModelDims, lora: LoraConfig) -> int:
    """Return the weights that adapters are merged into."""
    return sum(
        math.prod(shape)
        for placed in families.all_params(dims)
        if adapted_parts(placed.param, lora.target_modules)
        for shape in placed.hf_shapes
    )


def own_layers(dims: ModelDims, parallel: ParallelConfig) -> list[list[int]]:
    """Return the layers of every pipeline stage."""
    stages = stages_of(parallel).layers(dims.num_layers)
    return [[layer for chunk in chunks for layer in chunk] for chunks in stages]


def max_expert_layers(dims: ModelDims, parallel: ParallelConfig) -> int:
    """Return the layers with experts of the stage that has most of them."""
    return max(sum(map(dims.is_moe_layer, layers)) for layers in own_layers(dims, parallel))


def num_tensors(dims: ModelDims, parallel: ParallelConfig) -> int:
    """Return the parameter tensors of a rank of the first stage, with head and last norm."""
    experts = 0 if dims.moe is None else dims.moe.num_experts // parallel.expert_model_parallel_size
    rows = (row for layer in own_layers(dims, parallel)[0] for row in families.layer_params(dims, layer))
    return 3 + sum(experts if row.is_expert else 1 for row in rows)


@lru_cache(maxsize=64)
def total_weights(dims: ModelDims) -> int:
    """Return the weights of the model, each once, without rows that pad the vocabulary."""
    one = shard(dims, ParallelConfig(), 0)
    padding = _tables(dims, dims.padded_vocab_size(1)) - _tables(dims, dims.vocab_size)
    return one.num_weights + one.constants - padding


def update_bytes(dims: ModelDims, student: StudentConfig, *, adapters: bool = False) -> int:
    """Return the bytes of an update of the weights for a rollout replica that is up: all but what is frozen;
    ``adapters`` alone, or the weights that they are merged into."""
    if student.lora is not None and adapters:
        return adapter_weights(dims, student.lora) * BYTES[student.dtype]
    if student.lora is not None:
        return _adapted_weights(dims, student.lora) * BYTES[student.dtype]
    one = shard(dims, ParallelConfig(), 0)
    moving = total_weights(dims) - tower_weights(dims) + one.trained_dense(student.vision.freeze) - one.dense
    moving -= _frozen_weights(dims, student.freeze) if student.freeze else 0
    return moving * BYTES[student.dtype]


@lru_cache(maxsize=64)
def tower_weights(dims: ModelDims) -> int:
    """Return the weights of the vision tower, mergers included; 0 for a model of text."""
    return sum(_tower(dims))


@lru_cache(maxsize=64)
def expert_weights(dims: ModelDims) -> int:
    """Return the weights of all experts."""
    return shard(dims, ParallelConfig(), 0).experts


@lru_cache(maxsize=64)
def active(dims: ModelDims) -> int:
    """Return the weights in the layers that one token meets: its own experts, no embedding and no head."""
    one = shard(dims, ParallelConfig(), 0)
    of_token = 0 if dims.moe is None else one.experts * dims.moe.experts_per_token // dims.moe.num_experts
    return one.dense - _tables(dims, dims.padded_vocab_size(1)) + of_token


def _tables(dims: ModelDims, rows: int) -> int:
    """Return the weights of embedding and head, which have so many rows."""
    return (1 if dims.tied_embeddings else 2) * rows * dims.hidden_size


def tensor_bytes(own: Shard, student: StudentConfig) -> dict[str, int]:
    """Return weights, gradients and optimizer states of one rank on its device, as Megatron allocates them."""
    size = BYTES[student.dtype]
    state = MOMENT_BYTES + (MAIN_BYTES if size < 4 else 0)
    return {
        "weights": own.num_weights * size + own.constants * 4,
        "gradients": sum(own.trained(student.vision.freeze)) * GRADIENT_BYTES,
        "optimizer": round(_num_stepped(own, student) * state * (1 - student.optimizer.offload_fraction)),
    }


def average_bytes(own: Shard, student: StudentConfig) -> int:
    """Return the bytes of one average of one rank's trained weights, in fp32 on its device."""
    return sum(own.trained(student.vision.freeze)) * MAIN_BYTES


def offloaded_bytes(own: Shard, student: StudentConfig) -> int:
    """Return the bytes of one rank's optimizer states that ``offload_fraction`` keeps in host memory, and of as many
    main weights: also of a student in fp32, which has none elsewhere."""
    return round(_num_stepped(own, student) * (MOMENT_BYTES + MAIN_BYTES) * student.optimizer.offload_fraction)


def _num_stepped(own: Shard, student: StudentConfig) -> float:
    """Return the weights whose states one rank keeps. With the distributed optimizer its share of them: over the
    data-parallel ranks, and for experts over the ranks that hold copies of them."""
    parallel, (dense, experts) = student.parallel, own.trained(student.vision.freeze)
    if not student.optimizer.use_distributed_optimizer:
        return dense + experts
    return dense / parallel.num_copies + experts / (parallel.ranks_per_stage // parallel.expert_ranks)


def checkpoint_bytes(dims: ModelDims, student: StudentConfig, num_averages: int = 0) -> int:
    """Return the bytes of weights (of adapters alone, where there are some), optimizer states and averages of the whole
    model, each once; the distributed optimizer also writes fp32 weights as its own."""
    alone = ParallelConfig()
    own = student_shard(dims, replace(student, parallel=alone), 0)
    together = replace(student.optimizer, offload_fraction=0.0)
    parts = tensor_bytes(own, replace(student, parallel=alone, optimizer=together))
    has_main_weights = BYTES[student.dtype] < 4 or not student.optimizer.use_distributed_optimizer
    again = 0 if has_main_weights else MAIN_BYTES * sum(own.trained(student.vision.freeze))
    weights = parts["weights"] if own.adapters is None else sum(own.adapters) * BYTES[student.dtype]
    return weights + parts["optimizer"] + again + num_averages * average_bytes(own, student)


def _tower(dims: ModelDims) -> tuple[int, int]:
    """Return the weights of the vision tower's mergers, and of the rest of it."""
    found = [0, 0]
    for placed in families.tower_params(dims):
        found[not is_merger(placed.megatron[0])] += math.prod(placed.hf_shapes[0])
    return found[0], found[1]


def _numel(param: Param, sizes: dict[str, int]) -> int:
    return sum(math.prod(sizes[name] for name in tensor.shape) for tensor in param.hf)


def _share(param: Param, numel: int, ranks: int) -> int:
    return numel if param.merge == "replicated" else numel // ranks
