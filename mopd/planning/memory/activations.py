"""Memory of a training step beside weights, gradients and states: activations and the LM head.

Activations are counted as in Korthikanti et al. 2022 ("Reducing Activation Recomputation in Large Transformer Models"),
tensor by tensor for our layers: gated MLP, grouped queries, no dropout, a bias nowhere. Kept for the way back are:

    norm in, norm out, twice             4 h                of the sequence's part under sequence parallelism
    qkv, and q and k after the rope      2 q + 3 kv         q, kv: widths of all query, of all key heads
    attention's answer                   q
    keys and values of other ranks       2 kv (c - 1)       under context parallelism over c ranks
    gate and up, their product           3 f

No attention holds scores. A gated delta net keeps, k and v being the widths of its value heads' keys and of their
values, x of what it projects in and c of its convolution's channels, and t the tokens of a chunk times its value heads:

    projected in, convolved twice        x + 3 c
    heads, by chunks, in fp32            14 k + 10 v + 8 t  two elements each

A vision tower's block keeps for each patch, h and f being its own widths:

    norm in, norm out, twice             4 h                RMSNorm: in as fp32, and once more before its weight
    qkv, q and k after the rope          5 h                the values are a view of qkv, which stays whole
    attention's answer, and its copy     2 h
    MLP                                  2 f                gated: 4 f

A merger keeps its norm's in and out, and the in and out of its activation, 4 h a patch. Where blocks are frozen they
keep nothing, and of RMSNorm's in the normed form alone; where they are trained, a DeepStack merger's in is a block's.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from mopd.base.types import SampleMeta
from mopd.config.schema import Recipe
from mopd.config.student import ParallelConfig, StudentConfig
from mopd.conversion.models.dims import ModelDims
from mopd.conversion.models.stages import stages_of
from mopd.conversion.models.towers import TOWERS
from mopd.data.packing import PackingRules, pack, packing_rules
from mopd.planning.memory.shards import BYTES
from mopd.planning.workload import Workload

SCRATCH_ELEMENTS = 1 << 20
"""Elements of the largest buffer of a pass over logits on a CPU (``losses/chunked/blocks.py``); kernels on GPUs have
none."""
DELTA_CHUNK = 64
"""Tokens of a gated delta net that attend to each other directly (``student/model/gated_delta_net.py``)."""
_BLOCK = "blocks.{number}."
SUM_BYTES = 4
"""Hidden gradients of the LM head where several ranks add up to them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatchSize:
    """The micro-batches of one data-parallel rank."""

    sequences: int
    """Sequences of the largest micro-batch, if samples are as long as they may be."""
    tokens: int
    """Tokens of the largest micro-batch; shorter samples may fill it up."""
    in_step: int
    """Micro-batches of a step with samples of usual lengths."""
    padded_tokens: int
    """Tokens of a step on the busiest rank, padding included."""
    image_tokens: float
    """Image tokens of the largest micro-batch, whose prompts have as large a part of them as all have."""

    @property
    def length(self) -> int:
        """Length of the largest micro-batch's longest sequence."""
        return self.tokens // self.sequences


def micro_batches(recipe: Recipe, dims: ModelDims, work: Workload) -> MicroBatchSize:
    """Return the micro-batches as a step packs them, except that packs are rounded up to certain sizes on a GPU.

    Raises:
        UserError: samples of such lengths cannot be shared out evenly.
    """
    student = recipe.student
    dp = student.parallel.data_parallel_size
    rules = packing_rules(student, dims, on_gpu=False)
    prompt = max(1, round(work.prompt_tokens))
    in_step, padded = _packed(tuple(work.response_lengths()), prompt, dp, rules)
    longest, share = rules.sequence(work.max_tokens), -(-work.samples // dp)
    sequences = min(student.micro_batch_size or max(1, rules.max_tokens // longest), share)
    fills_up = rules.is_packed and student.micro_batch_size is None
    tokens = max(sequences * longest, min(rules.max_tokens, share * longest)) if fills_up else sequences * longest
    return MicroBatchSize(
        sequences=sequences,
        tokens=tokens,
        in_step=in_step,
        padded_tokens=padded,
        image_tokens=tokens / work.max_tokens * recipe.data.max_prompt_length * work.image_tokens / work.prompt_tokens,
    )


@lru_cache(maxsize=256)
def _packed(lengths: tuple[int, ...], prompt: int, dp_size: int, rules: PackingRules) -> tuple[int, int]:
    """Return the micro-batches of a rank, and padded tokens of the busiest one."""
    samples = [
        SampleMeta(
            sample_id=number,
            domain="",
            weight_version=0,
            prompt_length=prompt,
            response_length=length,
            num_loss_tokens=length,
            truncated=False,
        )
        for number, length in enumerate(lengths)
    ]
    packed = pack(samples, rules, dp_size=dp_size).micro_batches
    return len(packed[0]), max(sum(rules.num_tokens(batch) for batch in rank) for rank in packed)


def layer_elements(dims: ModelDims, parallel: ParallelConfig, *, has_experts: bool, is_delta: bool = False) -> float:
    """Return the elements that one layer keeps for each token of a micro-batch, on one rank."""
    tp, others = parallel.tensor_model_parallel_size, parallel.context_parallel_size - 1
    hidden = dims.hidden_size / (tp if parallel.sequence_parallel else 1)
    if is_delta and dims.delta is not None:
        delta = dims.delta
        each = 14 * delta.key_head_dim + 10 * delta.value_head_dim + 8 * DELTA_CHUNK
        attention = (delta.in_rows + 3 * delta.conv_rows + delta.num_value_heads * each) / tp
    elif dims.mla is None:
        q, kv = dims.num_attention_heads * dims.head_dim / tp, dims.groups_on_rank(tp) * dims.head_dim
        # Ranks that share a key/value head gather the whole projection, of which they keep views.
        gathered = dims.qkv_rows if dims.num_query_groups < tp else 0
        attention = 3 * q + (3 + 2 * others) * kv + gathered
    else:
        mla, heads = dims.mla, dims.num_attention_heads / tp
        keys = mla.qk_nope_head_dim + mla.qk_rope_head_dim
        compressed = 2 * ((mla.q_lora_rank or 0) + mla.kv_lora_rank) + mla.qk_rope_head_dim
        attention = compressed + heads * ((4 + 2 * others) * keys + 3 * mla.v_head_dim)
    if not has_experts or dims.moe is None:
        return 4 * hidden + attention + 3 * dims.ffn_hidden_size / tp
    moe = dims.moe
    # A rank's tokens go out as one copy for each of their experts, and about as many come in from others.
    copies = moe.experts_per_token / tp * (2 * dims.hidden_size + 3 * moe.ffn_hidden_size)
    return 4 * hidden + attention + 3 * moe.shared_ffn_hidden_size / tp + copies + moe.num_experts


def tower_bytes(dims: ModelDims, student: StudentConfig, image_tokens: float) -> float:
    """Return the bytes that a trained part of the vision tower keeps of a micro-batch with so many image tokens."""
    vision, freeze, size = dims.vision, student.vision.freeze, BYTES[student.dtype]
    if vision is None or freeze == "tower_and_merger":
        return 0.0
    hidden, names = vision.hidden_size, {name for name, _ in TOWERS[dims.family].block}
    is_rms, is_gated = _BLOCK + "norm1.bias" not in names, _BLOCK + "mlp.gate_proj.weight" in names
    norm_in = 1 + 4 / size if is_rms else 1
    merging = 3.0 * hidden * (1 + len(vision.deepstack_layers))
    if freeze == "tower":
        elements = merging + hidden * len({vision.depth - 1, *vision.deepstack_layers})
    else:
        block = hidden * (2 * norm_in + 9) + vision.intermediate_size * (4 if is_gated else 2)
        blocks = vision.depth * hidden + block if student.recompute == "full" else vision.depth * block
        patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        elements = patch + blocks + norm_in * hidden + merging
    return image_tokens * vision.spatial_merge_size**2 * elements * size


def activation_bytes(dims: ModelDims, student: StudentConfig, batch: MicroBatchSize, *, stage: int) -> int:
    """Return the activations of one rank of a pipeline stage, in bytes, when its first micro-batch comes back."""
    parallel, size = student.parallel, BYTES[student.dtype]
    tp = parallel.tensor_model_parallel_size
    chunks = [list(map(dims.layer_kind, layers)) for layers in stages_of(parallel).layers(dims.num_layers)[stage]]
    tokens = batch.tokens / parallel.context_parallel_size
    each = {
        kind: layer_elements(dims, parallel, has_experts=kind[0], is_delta=kind[1]) * tokens * size
        for kind in {kind for own in chunks for kind in own}
    }
    seen = tower_bytes(dims, student, batch.image_tokens) if stage == 0 else 0.0
    border = dims.hidden_size / (tp if parallel.sequence_parallel else 1) * tokens * size
    held = list(zip(chunks_under_way(parallel, stage, batch.in_step), chunks, strict=True))
    of_tower = held[0][0] * seen  # on the first chunk
    if student.recompute == "full":
        return round(sum(number * len(own) for number, own in held) * border + max(each.values()) + of_tower)
    return round(sum(number * (sum(each[kind] for kind in own) + border) for number, own in held) + of_tower)


def chunks_under_way(parallel: ParallelConfig, stage: int, in_step: int) -> list[int]:
    """Return the micro-batches that each chunk of a stage has begun when the first comes back. Stage i of p begins p -
    i; with v chunks, which take p micro-batches in turn, 2 (p - i - 1) + (v - 1) p + 1 of all of them (Megatron's
    schedules)."""
    stages, chunks = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size
    begun = stages - stage if chunks == 1 else 2 * (stages - stage - 1) + (chunks - 1) * stages + 1
    counts = Counter(number // stages % chunks for number in range(min(begun, in_step * chunks)))
    return [counts[chunk] for chunk in range(chunks)]


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadShape:
    """The LM head and the loss on one rank of the last stage."""

    rows: int
    """Rows of logits: response tokens of a micro-batch."""
    tokens: int
    """Tokens of the micro-batch."""
    hidden: int
    columns: int
    """Columns of the vocabulary on this rank."""
    element: int
    """Bytes of one element."""
    ranks: int
    """Ranks that share the vocabulary."""
    splits_sequence: bool
    copies: bool = False
    """Whether logits are not fp32, padded, or divided by a temperature: what looks at them copies them first."""
    teacher: int = 0
    """Bytes for each logit of teachers that send hidden states: theirs, and of several teachers a copy on the way."""

    def rows_at_once(self, budget: int) -> int:
        """Return the rows whose logits exist at a time: all, or what ``lm_head_memory_budget_mib`` lets through
        (``LinearHead.rows_within``); 0 where not one fits."""
        row = self.columns * (self.element + self.teacher)
        if self.rows * row <= budget:
            return self.rows
        return max(0, min(self.rows, (budget - self._beside()) // row))

    def peak(self, budget: int) -> int:
        """Return the most bytes at one moment, above what goes in and comes out."""
        at_once = self.rows_at_once(budget)
        logits = at_once * self.columns * (self.element + self.teacher) + self._scratch(at_once)
        if at_once < self.rows:
            return logits + self._beside()
        return logits + max(self._gathered(), self._summed())

    def eager(self, bytes_per_logit: float) -> int:
        """Return the bytes of a loss that needs so many for each of the micro-batch's logits."""
        return round(self.tokens * self.columns * bytes_per_logit)

    def _scratch(self, rows: int) -> int:
        """Return the scratch of the passes over the logits: a block in fp32, and one more where they are copied."""
        block = min(rows, max(1, SCRATCH_ELEMENTS // self.columns)) * self.columns * SUM_BYTES
        return 2 * block if self.copies else block

    @property
    def _sum(self) -> int:
        return SUM_BYTES if self.ranks > 1 else self.element

    def _gathered(self) -> int:
        """Return the bytes of the chosen rows, which come from a whole sequence that is gathered first."""
        chosen = self.rows * self.hidden * self.element if self.rows < self.tokens else 0
        return chosen + (self.tokens * self.hidden * self.element if self.splits_sequence else 0)

    def _summed(self) -> int:
        """Return the bytes of the hidden gradient on its way to the sequence's form."""
        partial = self.rows * self.hidden * self._sum
        is_result = self._sum == self.element and self.rows == self.tokens and not self.splits_sequence
        if is_result:
            return 0
        whole = self.tokens * self.hidden * self._sum if self.rows < self.tokens and self.splits_sequence else 0
        return partial + whole

    def _beside(self) -> int:
        return self._gathered() + self._summed()
