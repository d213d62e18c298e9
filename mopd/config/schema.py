"""Every key of a recipe: frozen dataclasses; the text under a field is its help and its line in ``docs/recipes.md``.

Checks that need one class sit in its ``__post_init__`` and raise ``ValueError`` that names the key to set; the loader
adds file and dotted path. Values that follow from others are properties, never keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mopd.config.losses import KLLoss, Loss, PolicyGradient, TopKLoss
from mopd.config.numbers import require_at_least, require_fraction, require_positive
from mopd.config.student import Optimizer as Optimizer
from mopd.config.student import Parallel as Parallel
from mopd.config.student import Student as Student


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchEngine:
    """A transformers model in this process, on CPU or GPU."""

    type: Literal["torch"] = "torch"
    """Engine type."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Parameter and activation dtype; log-probs are fp32 whatever this is."""
    max_tokens_per_batch: int = 65536
    """Token budget of one forward pass, padding included; a larger request is split."""
    max_logits_rows: int = 1024
    """Rows of [vocabulary] logits that scoring holds at a time."""

    def __post_init__(self) -> None:
        require_at_least("max_tokens_per_batch", self.max_tokens_per_batch, 1)
        require_at_least("max_logits_rows", self.max_logits_rows, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class InProcess:
    """On trainer rank 0, between training steps."""

    type: Literal["in_process"] = "in_process"
    """Placement type."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Teacher:
    """One standalone domain expert and the domains that it answers for."""

    model: str
    """Folder of the teacher's Hugging Face checkpoint."""
    domains: tuple[str, ...]
    """Values of the data's domain column that go to this teacher."""
    engine: TorchEngine = TorchEngine()
    """Engine that runs the model."""
    placement: InProcess = InProcess()
    """Where the replicas run."""
    replicas: int = 1
    """Copies of the teacher; each owns its resources."""

    def __post_init__(self) -> None:
        require_at_least("replicas", self.replicas, 1)
        if not self.domains:
            raise ValueError("domains is empty: name at least one value of the data's domain column")
        if len(set(self.domains)) != len(self.domains):
            raise ValueError(f"domains {list(self.domains)} names a domain twice: remove one")


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """Prompt files and how to read their rows."""

    train: tuple[str, ...]
    """Parquet or JSONL files of training prompts."""
    validation: tuple[str, ...] = ()
    """Parquet or JSONL files of validation prompts."""
    domain_key: str = "data_source"
    """Column that holds the domain. Dots reach into nested columns."""
    prompt_key: str = "prompt"
    """Column that holds the prompt: text, or chat messages for the chat template."""
    ground_truth_key: str = "reward_model.ground_truth"
    """Column that holds the reference answer for rewards; may be absent when nothing needs it."""
    extra_info_key: str = "extra_info"
    """Column that is handed to custom rewards; may be absent."""
    chat_template: str | None = None
    """Jinja file that replaces the tokenizer's own chat template."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Extra arguments of the chat template (for example ``enable_thinking: false``)."""
    max_prompt_length: int = 1024
    """Longest prompt in tokens."""
    overlong_prompts: Literal["filter", "error", "truncate"] = "error"
    """What happens to a longer prompt: dropped with a count, refused, or cut from the left."""
    domain_weights: Mapping[str, float] = field(default_factory=dict)
    """Relative share of each domain in the prompt stream; empty mixes by row count. Names every domain or none."""
    seed: int | None = None
    """Seed of shuffling and mixing; the recipe's ``seed`` when absent."""

    def __post_init__(self) -> None:
        require_at_least("max_prompt_length", self.max_prompt_length, 1)
        if not self.train:
            raise ValueError("train is empty: name at least one parquet or JSONL file")
        for name, weight in self.domain_weights.items():
            require_positive(f"domain_weights.{name}", weight)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """How the student samples its own responses."""

    engine: TorchEngine = TorchEngine()
    """Engine that runs the student's weights."""
    placement: InProcess = InProcess()
    """Where the engine runs."""
    max_response_length: int = 1024
    """Longest response in tokens; longer ones are cut and counted as truncated."""
    temperature: float = 1.0
    """Sampling temperature."""
    top_p: float = 1.0
    """Nucleus mass."""
    top_k: int = -1
    """Keep only this many most probable tokens; -1 keeps all."""
    samples_per_prompt: int = 1
    """Responses drawn per prompt."""

    def __post_init__(self) -> None:
        require_at_least("max_response_length", self.max_response_length, 1)
        require_positive("temperature", self.temperature)
        require_fraction("top_p", self.top_p, low_open=True)
        require_at_least("samples_per_prompt", self.samples_per_prompt, 1)
        if self.top_k != -1 and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}: set -1 (all) or a positive number")

    @property
    def is_exact(self) -> bool:
        """Responses follow softmax(logits / temperature) without a cut."""
        return self.top_p == 1.0 and self.top_k == -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """How long and in what rhythm to train."""

    steps: int
    """Optimizer steps."""
    prompts_per_step: int
    """Prompts of one optimizer step, over all ranks."""
    max_staleness: int = 0
    """Weight versions that a sample may be behind; 0 is synchronous training."""
    wait_timeout_s: float = 3600.0
    """Deadline of every wait between workers (for a batch, a weight update, another rank)."""

    def __post_init__(self) -> None:
        require_at_least("steps", self.steps, 1)
        require_at_least("prompts_per_step", self.prompts_per_step, 1)
        require_positive("wait_timeout_s", self.wait_timeout_s)
        if self.max_staleness != 0:
            raise ValueError(f"max_staleness is {self.max_staleness}: only 0 (synchronous) is supported; set 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactMatch:
    """1 when the response equals the ground truth after stripping surrounding white space, else 0."""

    type: Literal["exact_match"] = "exact_match"
    """Reward type."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CustomReward:
    """A Python function of yours, run in a process of its own with a clean environment.

    The function takes ``prompt, response, ground_truth, extra_info, domain`` as keywords and returns a number.
    """

    type: Literal["custom"]
    """Reward type."""
    path: str
    """Python file that holds the function."""
    function: str
    """Name of the function in that file."""
    timeout_s: float = 60.0
    """Deadline for one batch of calls."""

    def __post_init__(self) -> None:
        require_positive("timeout_s", self.timeout_s)


Reward = ExactMatch | CustomReward


@dataclass(frozen=True, kw_only=True, slots=True)
class Validation:
    """Reward per domain on held-out prompts, greedy unless a temperature is set."""

    every_steps: int = 50
    """Optimizer steps between validations; step 0 and the last step are always validated."""
    reward: Reward = ExactMatch()
    """Reward of a domain that ``domain_rewards`` does not name."""
    domain_rewards: Mapping[str, Reward] = field(default_factory=dict)
    """Reward by domain."""
    temperature: float = 0.0
    """Sampling temperature; 0 is greedy."""
    max_samples_per_domain: int | None = None
    """Only the first rows of each domain; absent means all."""
    num_examples: int = 4
    """Generations per domain that are kept for the report."""

    def __post_init__(self) -> None:
        require_at_least("every_steps", self.every_steps, 1)
        require_at_least("temperature", self.temperature, 0)
        require_at_least("num_examples", self.num_examples, 0)
        if self.max_samples_per_domain is not None:
            require_at_least("max_samples_per_domain", self.max_samples_per_domain, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """What is saved while training."""

    every_steps: int = 100
    """Optimizer steps between checkpoints; the last step is always saved."""
    keep_last: int = 2
    """Newest checkpoints that are kept."""
    keep_best: bool = True
    """Also keep the checkpoint with the best mean validation reward (saved when it is reached)."""
    export_hf: bool = True
    """At the end write the result (the best checkpoint, else the last) as a Hugging Face folder."""

    def __post_init__(self) -> None:
        require_at_least("every_steps", self.every_steps, 1)
        require_at_least("keep_last", self.keep_last, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Preflight:
    """Checks before the first step; ``mopd check`` runs the same ones."""

    allow_same_weights: bool = False
    """Permit a teacher with the student's own weights (self-distillation)."""
    require_better_teacher: bool = True
    """Refuse a fresh run whose teacher does not beat the student on its own domain's validation prompts."""
    max_self_kl: float = 1e-5
    """Largest mean KL, in nats per token, of a teacher scored against itself."""
    max_logprob_difference: float = 1e-3
    """Largest mean |student - engine| log-prob difference at equal weights (widen it for bfloat16)."""
    num_probe_samples: int = 4
    """Probe sequences per teacher."""

    def __post_init__(self) -> None:
        require_positive("max_self_kl", self.max_self_kl)
        require_positive("max_logprob_difference", self.max_logprob_difference)
        require_at_least("num_probe_samples", self.num_probe_samples, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class WandB:
    """Weights & Biases run; the ``wandb`` package must be installed."""

    project: str
    """Project name."""
    name: str | None = None
    """Run name; the run folder's name when absent."""
    mode: Literal["online", "offline"] = "online"
    """``offline`` writes to the run folder only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Metrics:
    """Where numbers go besides ``metrics.jsonl`` and the terminal."""

    diagnostics_every_steps: int = 10
    """Optimizer steps between the dearer diagnostics: student entropy and top-k overlap."""
    tensorboard: bool = True
    """Write TensorBoard event files into the run folder."""
    wandb: WandB | None = None
    """Also log to Weights & Biases."""

    def __post_init__(self) -> None:
        require_at_least("diagnostics_every_steps", self.diagnostics_every_steps, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """One run, complete: what ``mopd train`` reads."""

    run_dir: str
    """Folder of this run: resolved recipe, metrics, checkpoints, report. Not empty: needs ``--resume``."""
    seed: int = 0
    """Root of all randomness; sampling seeds derive from it and the sample id."""
    student: Student
    """The model that learns."""
    teachers: Mapping[str, Teacher]
    """Domain experts by name; metrics and reports use the name."""
    data: Data
    """Prompt files."""
    rollout: Rollout = Rollout()
    """Sampling of responses."""
    loss: Loss = TopKLoss()
    """What the student minimises."""
    schedule: Schedule
    """Steps and rhythm."""
    validation: Validation | None = None
    """Reward on held-out prompts; absent means none."""
    checkpoint: Checkpoint = Checkpoint()
    """Saving."""
    preflight: Preflight = Preflight()
    """Checks before the first step."""
    metrics: Metrics = Metrics()
    """Metric sinks."""

    def __post_init__(self) -> None:
        self._check_teachers()
        self._check_loss()
        if self.samples_per_step % self.student.parallel.data_parallel_size:
            raise ValueError(
                f"schedule.prompts_per_step {self.schedule.prompts_per_step} x rollout.samples_per_prompt "
                f"{self.rollout.samples_per_prompt} is not a multiple of student.parallel.data_parallel_size "
                f"{self.student.parallel.data_parallel_size}: set prompts_per_step to a multiple of it"
            )
        if self.validation is not None and not self.data.validation:
            raise ValueError("validation is set but data.validation is empty: name files there or remove validation")
        if self.checkpoint.keep_best and self.validation is None:
            raise ValueError("checkpoint.keep_best needs validation: add a validation section or set keep_best: false")
        if self.preflight.require_better_teacher and self.validation is None:
            raise ValueError(
                "preflight.require_better_teacher needs validation: add a validation section or set it to false"
            )

    def _check_teachers(self) -> None:
        if not self.teachers:
            raise ValueError("teachers is empty: name at least one teacher")
        owner: dict[str, str] = {}
        for name, teacher in self.teachers.items():
            for domain in teacher.domains:
                if domain in owner:
                    raise ValueError(
                        f"teachers.{owner[domain]}.domains and teachers.{name}.domains both name {domain!r}: "
                        "leave it in one of them"
                    )
                owner[domain] = name

    def _check_loss(self) -> None:
        sampled = isinstance(self.loss, (KLLoss, PolicyGradient))
        if sampled and not self.rollout.is_exact:
            raise ValueError(
                f"loss.type {self.loss.type!r} estimates an expectation over the student's own distribution, but "
                f"rollout.top_p is {self.rollout.top_p} and rollout.top_k is {self.rollout.top_k}: "
                "set rollout.top_p: 1.0 and rollout.top_k: -1"
            )
        if sampled and self.rollout.temperature != self.loss.temperature:
            raise ValueError(
                f"loss.temperature is {self.loss.temperature} but rollout.temperature is {self.rollout.temperature}: "
                f"loss.type {self.loss.type!r} needs them equal"
            )
        if self.needs_task_advantage and self.validation is None:
            raise ValueError("loss.task_reward_weight needs validation.reward: add a validation section or set it to 0")
        if self.needs_task_advantage and self.rollout.samples_per_prompt < 2:
            raise ValueError(
                "loss.task_reward_weight needs a baseline over several responses of a prompt, but "
                "rollout.samples_per_prompt is 1: set it to 2 or more"
            )

    @property
    def teacher_by_domain(self) -> dict[str, str]:
        """Domain -> name of the teacher that answers for it."""
        return {domain: name for name, teacher in self.teachers.items() for domain in teacher.domains}

    @property
    def data_seed(self) -> int:
        return self.seed if self.data.seed is None else self.data.seed

    @property
    def samples_per_step(self) -> int:
        """Responses of one optimizer step."""
        return self.schedule.prompts_per_step * self.rollout.samples_per_prompt

    @property
    def needs_task_advantage(self) -> bool:
        """The loss reads the ``task_advantage`` field."""
        return isinstance(self.loss, PolicyGradient) and self.loss.task_reward_weight > 0
