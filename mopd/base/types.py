"""Ids, lengths and names that flow between the workers, never a tensor. No torch in this module.

One sample's life, with small numbers::

    Prompt(sample_id=7, domain="math", row=3)                                  # from the prompt stream
    SampleMeta(sample_id=7, domain="math", weight_version=2,
               prompt_length=3, response_length=4, num_loss_tokens=4)         # after the rollout
    tensor fields of sample 7 in the data plane (L = 3 + 4 tokens, R = 4 response tokens, K = ids of a row):
        tokens [L] int64 · loss_mask [R] bool · rollout_logprobs [R] fp32 · token_versions [R] int32
        teacher_ids [N, K] int32 · teacher_logprobs [N, K] fp32 · teacher_token_logprobs [R] fp32
        student_ids [R, top_k] int32, the student's most probable ids, where a teacher's payload asks for them
        teacher_hidden [N, H] bf16, hidden states that the teacher's output matrix reads, with ``payload: hidden``;
            H is the hidden size of the sample's own teacher
        task_advantage [R] fp32, of losses with a task reward · baseline [R] fp32, of ``loss.baseline: domain``
        environment_reward [1] fp32, where an environment has answered the student's turns
        routes [L - 1, layers with experts, experts of a token] uint8, or int16 of more than 256 experts, with
            ``rollout.replay_routes``: those that the rollout's routers chose

N, the loss tokens, are fewer than R where an environment gave some of the response, or ``rollout.masked_tail`` leaves
its end out: ``loss_mask`` is off there.

K is the largest number of ids that a teacher is asked for (``config/payloads.py``). Places of ``teacher_ids`` that hold
no id of their own, repeats and what other teachers are asked for more, have log-prob -inf.

A recipe with an ensemble (D = most teachers of any domain > 1) has ``teacher_ids`` and ``teacher_logprobs`` [N, D, K]
in all domains; entries beyond a domain's own teachers have weight 0. If the student's family has vision, every sample
also has ``images`` [N, 8] int64, a row for each image of its prompt (``data/image_refs.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

ROLLOUT_FIELDS = ("tokens", "loss_mask", "rollout_logprobs")
"""Fields that the rollout worker writes and a loss may need, beside ``token_versions``."""
TOKEN_FIELD = "teacher_token_logprobs"
"""The one field that the teacher worker writes whatever the payload: log-probs of the sampled tokens."""
TEACHER_FIELDS = ("teacher_ids", "teacher_logprobs", TOKEN_FIELD)
"""Fields that the teacher worker writes; without the first two where no teacher's payload has ids."""
HIDDEN_FIELD = "teacher_hidden"
"""Field that the teacher worker writes with ``payload: hidden``."""
ROUTES_FIELD = "routes"
"""Field that the rollout worker writes with ``rollout.replay_routes``."""
WIDE_FIELDS = (*TEACHER_FIELDS[:2], HIDDEN_FIELD)
"""Fields with one row for each loss token of a sample; other fields of responses have one for each token."""
LOSS_FIELDS = ROLLOUT_FIELDS + TEACHER_FIELDS
"""Fields that must exist before a sample can be trained on (``task_advantage`` joins them if a loss needs it)."""
FIRST_STORED = 2**40
"""Ids of prompts whose responses are stored ones (``data.scored``) start here, far from the training stream's."""


class UserError(Exception):
    """An error that the user can cure: one line that names what clashes, the values and the key to set."""

    exit_code: ClassVar[int] = 2
    """Exit code of a command that ends with it."""


class CutOffError(UserError):
    """An error that interrupts a run which itself can go on; ``RunDir.telling`` adds how."""


class LostError(CutOffError):
    """A process or a machine that the run needs is gone, and nothing in the recipe is wrong: another start may find it
    back, or do with others."""

    exit_code = 69
    """``EX_UNAVAILABLE`` of ``sysexits.h``: schedulers may start the run again."""


class NonFiniteError(UserError):
    """A loss or gradient norm is NaN or infinite; the message names step, domain and sample ids."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RouteShape:
    """What a rollout tells of each token's way through the experts."""

    num_layers: int
    """Layers with experts."""
    num_choices: int
    """Experts of a token in each of them."""
    num_experts: int

    @property
    def item_bytes(self) -> int:
        """Bytes of an expert's number."""
        return 1 if self.num_experts <= 256 else 2

    @property
    def token_bytes(self) -> int:
        """Bytes of a token."""
        return self.num_layers * self.num_choices * self.item_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageRef:
    """The place where an image of a prompt is found again. References travel, pixels do not."""

    file: int
    """Index of the data file in the list that the prompts were loaded from."""
    row: int
    """Row number in that file."""
    number: int
    """Place among the images of the row."""
    digest: bytes
    """First 16 bytes of SHA-256 over the encoded file."""
    grid: tuple[int, int, int]
    """(1, height, width) in patches, before they are merged: it has ``height * width / merge_size**2`` tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptImage:
    """An image of a prompt, in the form that an engine gets."""

    digest: bytes
    """As ``ImageRef.digest``: equal images are loaded and sent once."""
    grid: tuple[int, int, int]
    """As ``ImageRef.grid``."""
    load: Callable[[], bytes]
    """Return the encoded file, checked against the digest. ``UserError`` names file and row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One prompt of the domain-mixed stream."""

    sample_id: int
    """Position in the stream; unique in a run, the root of this sample's random seed."""
    domain: str
    """Value of the row's domain column."""
    row: int
    """Row number in the loaded dataset, where its tokens and its ground truth are found; of a stored prompt its number
    among those of ``data.scored``."""
    attempt: int = 0
    """Number of earlier draws, with weights that became too old."""

    @property
    def is_stored(self) -> bool:
        """Whether its responses are stored ones, drawn by other weights or by somebody else."""
        return self.sample_id >= FIRST_STORED

    @property
    def queue(self) -> str:
        """Which others may take its place in a batch: those of its domain, stored ones apart."""
        return f"{self.domain} (stored)" if self.is_stored else self.domain


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleMeta:
    """Identity and lengths of a sample, all that the controller knows of it."""

    sample_id: int
    domain: str
    weight_version: int
    """Version of the student's weights that sampled the response: the oldest of its tokens'."""
    prompt_length: int
    response_length: int
    num_loss_tokens: int
    """Response tokens with ``loss_mask`` set."""
    truncated: bool = False
    """Whether the response ended at the length limit, not at a stop token."""
    at_horizon: bool = False
    """Whether it was stopped before that limit, at its step's horizon (``rollout.horizon``)."""
    repeated_share: float = 0.0
    """Share of the response's 4-grams that stand earlier in it (``repeated_share``)."""
    num_versions: int = 1
    """Versions of the weights that sampled the response: more than one if it continued under new weights."""
    version_span: int = 0
    """Optimizer steps by which the weights of its newest token are ahead of those of its oldest."""

    @property
    def newest_version(self) -> int:
        """Version of the weights that sampled the newest of its tokens."""
        return self.weight_version + self.version_span

    @property
    def length(self) -> int:
        """Tokens of prompt and response together."""
        return self.prompt_length + self.response_length


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedSample:
    """A sample that no replica of a teacher could score, in a recipe with ``on_failure: replace``."""

    sample: SampleMeta
    teacher: str
    reason: str
    """The last error, one line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Samples claimed for one optimizer step, in order of their ids."""

    samples: tuple[SampleMeta, ...]

    @property
    def sample_ids(self) -> tuple[int, ...]:
        return tuple(sample.sample_id for sample in self.samples)

    @property
    def num_loss_tokens(self) -> int:
        """The global denominator of ``token_mean``, known before the first backward."""
        return sum(sample.num_loss_tokens for sample in self.samples)

    @property
    def num_tokens(self) -> int:
        return sum(sample.length for sample in self.samples)


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatchPlan:
    """Assignment of samples to micro-batches: ``micro_batches[dp_rank][i]`` holds the samples of micro-batch ``i``.

    Every data-parallel rank has the same number of micro-batches (pipeline schedules need it).

    Example: two DP ranks, two micro-batches each, five samples: ``micro_batches = (((s0, s3), (s4,)), ((s1,),
    (s2,)))``.
    """

    micro_batches: tuple[tuple[tuple[SampleMeta, ...], ...], ...]
    num_loss_tokens: int
    """Loss tokens of the whole batch, over all ranks."""
    num_samples: int
    """Samples of the whole batch, over all ranks (the denominator of ``sequence_mean``)."""

    @property
    def sample_ids(self) -> tuple[int, ...]:
        """All sample ids of the plan, ascending."""
        return tuple(sorted(s.sample_id for rank in self.micro_batches for mb in rank for s in mb))

    def to_json(self) -> dict[str, Any]:
        """Return the plan in plain JSON types, for the trip from the orchestrator to the ranks."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> MicroBatchPlan:
        """Undo ``to_json``."""
        micro_batches = tuple(
            tuple(tuple(SampleMeta(**sample) for sample in mb) for mb in rank) for rank in data["micro_batches"]
        )
        return cls(
            micro_batches=micro_batches, num_loss_tokens=data["num_loss_tokens"], num_samples=data["num_samples"]
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class DomainSums:
    """Sums over one domain's loss tokens in one step, over all ranks: divide by ``num_tokens`` for a mean."""

    num_tokens: int
    sums: Mapping[str, float]
    """Metric name -> sum over tokens: loss, k1, k3, teacher_mass, clamped, … (see ``docs/metrics.md``)."""
