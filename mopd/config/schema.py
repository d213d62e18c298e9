"""Every key of a recipe: frozen dataclasses; the text under a field is its help and its line in ``docs/recipes.md``.

Checks that need one class sit in its ``check`` and raise ``ValueError`` that names the key to set; the loader adds file
and dotted path. Values that follow from others are properties, never keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from mopd.base.types import HIDDEN_FIELD, LOSS_FIELDS, ROLLOUT_FIELDS, ROUTES_FIELD, TOKEN_FIELD
from mopd.config.data import DataConfig, DataPlane, LocalPlaneConfig, ValidationConfig
from mopd.config.gates import DomainConfig, GateConfig, require_gates
from mopd.config.groups import (
    Assignment,
    TeacherConfig,
    TeacherDefaultsConfig,
    hosts_of,
    require_turns,
)
from mopd.config.losses import (
    KLLossConfig,
    Loss,
    Objective,
    TopKLossConfig,
    check_domain_budget,
    require_dense_loss,
    require_own_samples,
)
from mopd.config.output import CallbackConfig, CheckpointConfig, MetricsConfig
from mopd.config.payloads import (
    Asked,
    Combine,
    asked,
    require_combine,
    require_own_tokenizers,
    require_payloads,
)
from mopd.config.placements import InProcessConfig
from mopd.config.rewards import EnvironmentRewardConfig, RewardConfig
from mopd.config.rollout import AnswersConfig, RolloutConfig, require_prefix
from mopd.config.schedule import MAX_SAMPLES, PreflightConfig, ScheduleConfig
from mopd.config.slurm import SlurmConfig
from mopd.config.student import StudentConfig
from mopd.config.values import Checked, require_seed
from mopd.config.views import RefreshConfig, ViewConfig
from mopd.config.weights import AutoSyncConfig, WeightSync, check_weight_sync

MAX_TEACHERS = 100
MOST_OWN_TOKENS = 2
"""Most tokens that a teacher with another tokenizer reads of a response, as a multiple of the student's most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe(Checked):
    """What ``mopd train`` reads."""

    run_dir: str
    """Folder of this run, empty or with ``--resume``."""
    seed: Annotated[int, require_seed] = 0
    """Root of all randomness."""
    objective: Objective = "on_policy"
    """What steps train on (docs/pipeline.md#baselines)."""
    answers: AnswersConfig = AnswersConfig()
    """The teachers' answers to training prompts, drawn once."""
    student: StudentConfig
    """The model that learns."""
    teacher_defaults: TeacherDefaultsConfig = TeacherDefaultsConfig()
    """What teachers inherit, key by key."""
    teachers: Mapping[str, TeacherConfig]
    """Domain experts."""
    combine: Combine = "weighted_mean"
    """How several teachers of a domain join (docs/losses.md#one-distribution-of-several-teachers-combine)."""
    on_failure: Literal["stop", "replace"] = "stop"
    """After a sample that no replica could score: end the run, or draw another."""
    data: DataConfig
    """Prompts."""
    domains: Mapping[str, DomainConfig] = field(default_factory=dict)
    """What holds for one domain alone."""
    rollout: RolloutConfig = RolloutConfig()
    """How the student draws responses."""
    weight_sync: WeightSync = AutoSyncConfig()
    """How weights reach the rollout (docs/weights.md)."""
    loss: Loss = TopKLossConfig()
    """What the student minimises."""
    schedule: ScheduleConfig
    """Steps and their rhythm."""
    rewards: Mapping[str, RewardConfig] = field(default_factory=dict)
    """Judges of responses by domain, or ``default`` (docs/rewards.md)."""
    validation: ValidationConfig | None = None
    """Rewards on held-out prompts."""
    data_plane: DataPlane = LocalPlaneConfig()
    """Carrier of samples to the ranks (docs/data_plane.md)."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """What training saves."""
    preflight: PreflightConfig = PreflightConfig()
    """Checks before the first step, those of ``mopd check``."""
    metrics: MetricsConfig = MetricsConfig()
    """Where numbers go besides ``metrics.jsonl`` and the terminal."""
    callbacks: tuple[CallbackConfig, ...] = ()
    """Classes of yours that follow the run (docs/extending.md#a-callback)."""
    slurm: SlurmConfig | None = None
    """The job of ``mopd slurm`` (docs/cluster.md#slurm)."""

    def check(self) -> None:
        self._check_teachers()
        hosts_of(self.teachers)
        self._check_refresh()
        self._check_own_tokenizers()
        self._check_loss()
        payloads = {name: (teacher.payload, teacher.scores_own_ids_only) for name, teacher in self.teachers.items()}
        elsewhere = {"data.scored": bool(self.data.scored), "objective": "off_policy_scores" in self.objectives}
        require_payloads(payloads, self.loss, elsewhere=elsewhere, is_ensemble=self.assignment.max_teachers > 1)
        self._check_combine()
        self._check_gates()
        self._check_objective()
        self.rollout.check_vllm(None if self.validation is None else self.validation.temperature)
        self._check_staleness()
        self._check_stored()
        self._check_environment()
        self._check_prefix()
        without_routes = {
            "objective or schedule.warm_up trains on the teachers' own answers": self.draws_answers,
            "data.scored has samples without routes": bool(self.data.scored),
            "student.packing is false": not self.student.packing,
        }
        self.rollout.check_replay(without_routes)
        check_weight_sync(self.weight_sync, self.rollout.placement)
        require_turns(
            self.rollout,
            self.teachers,
            max_staleness=self.schedule.max_staleness,
            num_ranks=self.student.parallel.world_size,
        )
        if self.samples_per_step > MAX_SAMPLES:
            raise ValueError(
                f"schedule.prompts_per_step {self.schedule.prompts_per_step} x rollout.samples_per_prompt "
                f"{self.rollout.samples_per_prompt} are {self.samples_per_step} samples: set at most {MAX_SAMPLES}"
            )
        self._check_shares()
        warmup = self.student.optimizer.lr_warmup_steps
        steps, _ = self.schedule.learning_rate_steps(self.schedule.steps)
        if warmup >= steps:
            told = "schedule.steps" if self.schedule.warm_up is None else "schedule.steps less schedule.warm_up.steps,"
            raise ValueError(f"student.optimizer.lr_warmup_steps {warmup} is not below {told} {steps}: set fewer")
        if self.data.domain_weights == "adaptive":
            self._check_adaptive()
        if self.validation is not None and not self.data.validation:
            raise ValueError("validation is set but data.validation is empty: name files there or remove validation")
        taught = [domain for domain in self.watched_domains if domain in self.assignment.by_domain]
        if taught:
            name = self.assignment.by_domain[taught[0]][0]
            raise ValueError(
                f"validation.watch names {taught[0]!r}, but teachers.{name}.domains does too: leave it in one of them"
            )
        if self.needs_rewards and not self.rewards:
            what = (
                "loss.task_reward_weight" if self.needs_task_advantage else f"domains.{next(iter(self.gates), '')}.gate"
            )
            what = what if self.validation is None else "validation"
            raise ValueError(
                f"rewards is empty, but {what} needs one for each domain: add rewards.DOMAIN, or rewards.default as in "
                "rewards: {default: {type: exact_match}}"
            )

    def _check_adaptive(self) -> None:
        """Every domain's head-room can be measured."""
        if self.validation is None:
            raise ValueError(
                "data.domain_weights is 'adaptive', but validation is absent, which measures the head-room: add "
                "validation, or give every domain its weight"
            )
        for name, teacher in self.teachers.items():
            if teacher.stock:
                raise ValueError(
                    f"data.domain_weights is 'adaptive', but teachers.{name} is behind an {teacher.stock} server, "
                    "which only scores: its reward is not known; give every domain its weight"
                )

    def _check_teachers(self) -> None:
        if not self.teachers:
            raise ValueError("teachers is empty: name at least one teacher")
        if len(self.teachers) > MAX_TEACHERS:
            raise ValueError(f"teachers names {len(self.teachers)}: name at most {MAX_TEACHERS}")
        defaults = [name for name, teacher in self.teachers.items() if teacher.default]
        if len(defaults) > 1:
            raise ValueError(f"teachers.{defaults[1]}.default is true and teachers.{defaults[0]}.default too: keep one")
        for domain, names in self.assignment.by_domain.items():
            without = [name for name in names if self.teachers[name].weight is None]
            if len(names) > 1 and without:
                both = " and ".join(f"teachers.{name}.domains" for name in names)
                raise ValueError(
                    f"{both} name {domain!r}, but teachers.{without[0]}.weight is absent: leave the domain in one of "
                    "them, or give each a weight (an ensemble)"
                )
        for name, teacher in self.teachers.items():
            other = next((other for other in self.teachers if teacher.may_name(name, other)), None)
            if other is not None:
                raise ValueError(
                    f"teachers.{name} has several replicas, and {other!r} is the name of one and of a teacher: rename "
                    "the teacher"
                )
            runs = "SGLang" if "sglang" in (teacher.stock or teacher.engine.type) else "vLLM"
            if teacher.scores_at_temperature_1_only and self.loss.temperature != 1.0:
                raise ValueError(
                    f"loss.temperature is {self.loss.temperature}, but teachers.{name} runs {runs}, which scores at "
                    f"temperature 1 only: set loss.temperature: 1.0, or teachers.{name}.engine.type: torch"
                )

    def _check_combine(self) -> None:
        unknown = "validation is absent, which measures rewards" if self.validation is None else None
        for name in [name for names in self.assignment.by_domain.values() if len(names) > 1 for name in names]:
            if stock := self.teachers[name].stock:
                unknown = f"teachers.{name} is behind an {stock} server, which only scores"
        require_combine(
            self.combine,
            self.loss,
            [teacher.payload for teacher in self.teachers.values()],
            is_ensemble=self.assignment.max_teachers > 1,
            unknown_rewards=unknown,
            draws_answers=self.draws_answers,
            has_own_tokenizers=bool(self.own_tokenizers),
        )

    def _check_own_tokenizers(self) -> None:
        payloads = {name: self.teachers[name].payload for name in self.own_tokenizers}
        answers = {"objective or schedule.warm_up": self.draws_answers, "data.scored": bool(self.data.scored)}
        require_own_tokenizers(payloads, self.loss, max_staleness=self.schedule.max_staleness, elsewhere=answers)

    def _check_gates(self) -> None:
        elsewhere = {
            "objective or schedule.warm_up trains on the teachers' own answers": self.draws_answers,
            "data.scored has samples of their own": bool(self.data.scored),
            "rollout.horizon cuts responses before the answers": self.rollout.horizon is not None,
        }
        asking = [domain for domain, gate in self.gates.items() if gate.by == "teacher_answers"]
        for name in [name for domain in asking for name in self.assignment.teachers_of(domain)]:
            elsewhere[f"teachers.{name} has refresh, and its answers are kept"] = name in self.refreshed
            stock = self.teachers[name].stock
            elsewhere[f"teachers.{name} is behind an {stock} server, which only scores"] = bool(stock)
        for name in self.own_tokenizers:
            elsewhere[f"teachers.{name}.tokenizer is 'own', whose chunks have an advantage of their own"] = True
        if asking and self.rollout.environment is not None:
            elsewhere["rollout.environment makes responses of several turns, and a teacher's answer is one"] = True
        require_gates(self.gates, self.loss, elsewhere)

    def _check_refresh(self) -> None:
        """A teacher that is the student can be given its weights, and what is kept of its answers stays true."""
        for name, refresh in self.refreshed.items():
            every = refresh.every_steps
            dtype = self.teachers[name].engine.dtype
            problems = {
                "payload is 'hidden', and the student's ranks keep the output matrix of a folder": self.sends_hidden,
                "objective or schedule.warm_up trains on its own answers, which are kept": self.draws_answers,
                "data.scores_cache keeps scores, and its own change": self.data.scores_cache is not None,
                "there is no rollout that the weights are made ready for": not self.needs_rollout,
                "rollout.placement.share_gpus_with lends the student's memory": self.rollout.shares_gpus,
                f"its engine.dtype is {dtype} and rollout.engine.dtype {self.rollout.engine.dtype}, in which the "
                "weights travel": dtype != self.rollout.engine.dtype,
                f"checkpoint.every_steps is {self.checkpoint.every_steps}, no multiple of it, and a resumed run would "
                "lack the weights between": every > 0 and self.checkpoint.every_steps % every != 0,
            }
            for problem, is_so in problems.items():
                if is_so:
                    raise ValueError(
                        f"teachers.{name}.refresh.every_steps is {every}, but {problem}: change one of them, or set "
                        "refresh: frozen"
                    )

    def _check_shares(self) -> None:
        """Every data-parallel rank gets equally many samples, with virtual stages in micro-batches for all stages."""
        parallel = self.student.parallel
        shares, more = parallel.data_parallel_size, ""
        if parallel.virtual_pipeline_model_parallel_size > 1:
            shares *= parallel.pipeline_model_parallel_size
            more = f" x pipeline_model_parallel_size {parallel.pipeline_model_parallel_size} (with virtual stages)"
        if self.samples_per_step % shares:
            raise ValueError(
                f"schedule.prompts_per_step {self.schedule.prompts_per_step} x rollout.samples_per_prompt "
                f"{self.rollout.samples_per_prompt} is not a multiple of student.parallel.data_parallel_size "
                f"{parallel.data_parallel_size}{more}: set prompts_per_step to a multiple of {shares}"
            )

    def _check_loss(self) -> None:
        rollout = self.rollout
        check_domain_budget(self.loss)
        require_own_samples(
            self.loss,
            biased=rollout.biased,
            temperature=rollout.temperature,
            max_staleness=self.schedule.max_staleness,
            stored_share=self.stored_share,
            quantised=rollout.quantised,
            has_chunks=self.has_chunks,
        )
        if self.needs_task_advantage and self.rollout.samples_per_prompt < 2:
            raise ValueError(
                "loss.task_reward_weight needs a baseline over several responses of a prompt, but "
                "rollout.samples_per_prompt is 1: set it to 2 or more"
            )
        if self.needs_task_advantage and self.rollout.horizon is not None:
            raise ValueError(
                "loss.task_reward_weight is above 0, but rollout.horizon cuts responses before the answers that "
                "rewards judge: remove one of them"
            )

    def _check_stored(self) -> None:
        fraction, folders = self.schedule.on_policy_fraction, len(self.data.scored)
        if (fraction is None) != (not folders):
            raise ValueError(
                f"schedule.on_policy_fraction is {'absent' if fraction is None else fraction}, and data.scored names "
                f"{folders} folders: set both, or neither"
            )
        if folders and self.data.domain_weights == "adaptive":
            raise ValueError(
                "data.domain_weights is adaptive, but data.scored has samples whose domains stay as they are: give "
                "every domain its weight, or remove data.scored"
            )
        if folders and self.rollout.horizon is not None:
            raise ValueError(
                "rollout.horizon is set, but data.scored has responses of their own length: remove one of them"
            )
        for name in self.views if folders else ():
            raise ValueError(
                f"teachers.{name}.view is set, but data.scored has responses without the rows that a view is made of: "
                "remove one of them"
            )
        if fraction == 0 and self.schedule.max_staleness:
            raise ValueError(
                f"schedule.max_staleness is {self.schedule.max_staleness}, but with schedule.on_policy_fraction 0 "
                "nothing is drawn beside the student's steps: set max_staleness: 0"
            )

    def _check_environment(self) -> None:
        environment = self.rollout.environment
        if environment is None:
            for name, reward in self.rewards.items():
                if isinstance(reward, EnvironmentRewardConfig):
                    raise ValueError(
                        f"rewards.{name}.type is 'environment', but rollout.environment is absent: add one, or choose "
                        "another reward"
                    )
        elif self.draws_answers:
            raise ValueError(
                f"rollout.environment is {environment.type!r}, but objective or schedule.warm_up trains on the "
                "teachers' own answers, which are one turn: remove one of them"
            )
        elif self.own_tokenizers:
            raise ValueError(
                f"rollout.environment is {environment.type!r}, but teachers.{self.own_tokenizers[0]}.tokenizer is "
                "'own', and a chunk may hold the student's tokens beside given ones: remove one of them"
            )

    def _check_prefix(self) -> None:
        elsewhere = {
            "objective trains on no response of the student": "on_policy" not in self.objectives,
            "rollout.environment has turns, of which none is given": self.rollout.environment is not None,
            "rollout.horizon cuts responses after a number of tokens": self.rollout.horizon is not None,
            "domains has a gate, which would judge what is given": bool(self.gates),
        }
        for name, teacher in self.teachers.items():
            if name in self.own_tokenizers:
                elsewhere[f"teachers.{name}.tokenizer is 'own', and a chunk may hold given and drawn tokens"] = True
            if self.takes_prefixes:
                elsewhere[f"teachers.{name} is behind a stock server, which only scores"] = bool(teacher.stock)
                elsewhere[f"teachers.{name} has refresh, and its answers are kept"] = name in self.refreshed
        require_prefix(self.rollout.prefix, elsewhere)

    def _check_objective(self) -> None:
        warm_up = self.schedule.warm_up
        if warm_up is not None and self.objective != "on_policy":
            raise ValueError(
                f"schedule.warm_up is set, but objective is {self.objective!r} and a warm-up comes before on-policy "
                "steps: remove one of them"
            )
        if not self.draws_answers:
            return
        for key, is_set in (("data.scored", self.data.scored), ("metrics.keep_samples", self.metrics.keep_samples)):
            if is_set:
                raise ValueError(
                    f"{key} is set, but objective or schedule.warm_up trains on the teachers' own answers: remove one "
                    "of them"
                )
        if "off_policy_scores" in self.objectives:
            key = "objective" if warm_up is None else "schedule.warm_up.objective"
            require_dense_loss(self.loss, key)
        if self.answers.temperature == 0 and self.rollout.samples_per_prompt > 1:
            raise ValueError(
                f"rollout.samples_per_prompt is {self.rollout.samples_per_prompt}, but answers.temperature is 0, where "
                "a teacher's answers to one prompt are all the same: set answers.temperature: 1.0, or "
                "samples_per_prompt: 1"
            )
        for name, teacher in self.teachers.items():
            if not teacher.stock:
                continue
            what = "draws greedily" if self.answers.temperature else "does not say which weights it holds"
            cure = "answers.temperature: 0" if self.answers.temperature else "no answers.folder"
            if self.answers.temperature or self.answers.folder is not None:
                raise ValueError(
                    f"teachers.{name}.placement.protocol is {teacher.stock!r}, a server that {what}: set {cure}, or "
                    "serve the teacher with `mopd serve` and remove protocol"
                )

    def _check_staleness(self) -> None:
        most = self.schedule.max_staleness
        if self.rollout.on_new_weights == "continue" and most == 0:
            raise ValueError(
                "rollout.on_new_weights is 'continue', but with schedule.max_staleness 0 nothing is under way when new "
                "weights arrive: set max_staleness to 1 or more, or remove on_new_weights"
            )
        groups = {"rollout": self.rollout, **{f"teachers.{name}": teacher for name, teacher in self.teachers.items()}}
        for key, group in groups.items():
            if most and isinstance(group.placement, InProcessConfig):
                raise ValueError(
                    f"schedule.max_staleness is {most}, but {key}.placement is in_process, on rank 0 between training "
                    f"steps: set {key}.placement.type: local, or max_staleness: 0"
                )

    @property
    def on_new_weights(self) -> Literal["finish", "continue"]:
        """``rollout.on_new_weights``, also where it is ``auto``."""
        if self.rollout.on_new_weights != "auto":
            return self.rollout.on_new_weights
        return "continue" if self.schedule.max_staleness else "finish"

    def objective_at(self, step: int) -> Objective:
        """``objective`` of one step, from 1 on: ``schedule.warm_up``'s in its steps."""
        warm_up = self.schedule.warm_up
        return self.objective if warm_up is None or step > warm_up.steps else warm_up.objective

    @property
    def stored_share(self) -> float:
        """Share of the prompts whose responses are those of ``data.scored``."""
        return 0.0 if self.schedule.on_policy_fraction is None else 1 - self.schedule.on_policy_fraction

    @property
    def objectives(self) -> set[Objective]:
        """``objective``, and that of ``schedule.warm_up``."""
        warm_up = self.schedule.warm_up
        return {self.objective} if warm_up is None else {self.objective, warm_up.objective}

    @property
    def draws_answers(self) -> bool:
        """Some steps train on the teachers' own answers."""
        return self.objectives != {"on_policy"}

    @property
    def takes_prefixes(self) -> bool:
        """Responses of the student begin with the teachers' own answers."""
        return self.rollout.prefix is not None and self.rollout.prefix.source == "teacher"

    @property
    def needs_rollout(self) -> bool:
        """Some steps, or the validation, need the student's own responses."""
        return "on_policy" in self.objectives or self.validation is not None

    def loss_fields(self, step: int) -> tuple[str, ...]:
        """Fields that a sample must have before ``step`` can train on it."""
        fields: tuple[str, ...] = LOSS_FIELDS if self.support_width else (*ROLLOUT_FIELDS, TOKEN_FIELD)
        fields += (HIDDEN_FIELD,) * self.sends_hidden + (ROUTES_FIELD,) * self.rollout.replay_routes
        match self.objective_at(step):
            case "sft_on_teacher":
                return ROLLOUT_FIELDS
            case "off_policy_scores":
                return fields
        fields += ("chunk_advantage",) * self.has_chunks
        return (*fields, "task_advantage") if self.needs_task_advantage else fields

    @property
    def asked(self) -> dict[str, Asked]:
        """What each teacher is asked for at each response token."""
        return {name: asked(teacher.payload, self.loss) for name, teacher in self.teachers.items()}

    @property
    def sends_hidden(self) -> bool:
        """Teachers send hidden states: all of them or none."""
        return any(own.hidden for own in self.asked.values())

    @property
    def support_width(self) -> int:
        """K: places of a row of ids in the data plane, those of the teacher asked for most, or of all that have their
        probabilities averaged; 0: there are no rows."""
        width = max(own.width for own in self.asked.values())
        return width * (self.assignment.max_teachers if self.combine == "mean_probability" else 1)

    @property
    def teachers_per_row(self) -> int:
        """D: teachers whose ids stand beside one another in the data plane."""
        return self.assignment.max_teachers if self.combine == "weighted_mean" else 1

    @property
    def has_in_process_engines(self) -> bool:
        """Some group's engines run in the orchestrator's process, batch by batch."""
        groups = (self.rollout, *self.teachers.values())
        return any(isinstance(group.placement, InProcessConfig) for group in groups)

    @property
    def prompts_together(self) -> int:
        """Prompts that go through rollout and scoring as one unit: one, so that none waits for another; or a step's
        where engines work ``in_process``, as what is computed in one batch decides the last bits of torch's results."""
        return self.schedule.prompts_per_step if self.has_in_process_engines else 1

    @property
    def shares_gpus(self) -> bool:
        """The rollout's replicas are on the trainer ranks' GPUs, by turns."""
        return self.needs_rollout and self.rollout.shares_gpus

    @property
    def has_engines_beside(self) -> bool:
        """Engines work while the student trains, or while its memory is lent: none may be in rank 0's process."""
        return self.schedule.max_staleness > 0 or self.shares_gpus

    def on_group_of(self, teacher: str) -> tuple[str, ...]:
        """Teachers that the replicas of a teacher answer for, the one that the group is named after first."""
        hosts = hosts_of(self.teachers)
        return tuple(name for name in self.teachers if hosts[name] == hosts[teacher])

    @property
    def views(self) -> dict[str, ViewConfig]:
        """Views of the teachers that have one of their own."""
        return {name: teacher.view for name, teacher in self.teachers.items() if teacher.view is not None}

    @property
    def refreshed(self) -> dict[str, RefreshConfig]:
        """Teachers that are the student and get its new weights."""
        refresh = {name: teacher.refresh for name, teacher in self.teachers.items()}
        return {name: own for name, own in refresh.items() if isinstance(own, RefreshConfig)}

    @property
    def averages(self) -> tuple[float, ...]:
        """Decays of the averages of weights that the student's ranks keep for teachers."""
        return tuple(sorted({own.ema for own in self.refreshed.values() if own.ema is not None}))

    @property
    def own_tokenizers(self) -> tuple[str, ...]:
        """Teachers that read other tokens than the student."""
        return tuple(name for name, teacher in self.teachers.items() if teacher.tokenizer == "own")

    @property
    def has_chunks(self) -> bool:
        """A top-k loss has teachers of another tokenizer: chunks of several tokens have an advantage in its place."""
        return bool(self.own_tokenizers) and isinstance(self.loss, TopKLossConfig)

    def longest_response(self, teacher: str | None = None) -> int:
        """Tokens of the longest response: the student's, or in the tokens of a teacher, of which more are not asked."""
        factor = MOST_OWN_TOKENS if teacher in self.own_tokenizers else 1
        return factor * self.rollout.max_response_length

    def longest_sequence(self, teacher: str | None = None) -> int:
        """Tokens of the longest prompt with its response: the student's, or what a teacher reads."""
        view = None if teacher is None else self.teachers[teacher].view
        own = None if view is None else view.max_prompt_length
        return (self.data.max_prompt_length if own is None else own) + self.longest_response(teacher)

    @property
    def gates(self) -> dict[str, GateConfig]:
        """Gates of the domains that have one."""
        return {name: domain.gate for name, domain in self.domains.items() if domain.gate is not None}

    @property
    def assignment(self) -> Assignment:
        """The teachers of each domain."""
        return Assignment(self.teachers)

    @property
    def watched_domains(self) -> tuple[str, ...]:
        """Domains that are validated and not taught."""
        return () if self.validation is None else self.validation.watch

    @property
    def samples_per_step(self) -> int:
        """Responses of one optimizer step."""
        return self.schedule.prompts_per_step * self.rollout.samples_per_prompt

    def response_limit(self, prompt: int) -> int:
        """Most tokens of a training response to the stream's prompt of this number: its step's horizon."""
        horizon = self.rollout.horizon
        longest = self.rollout.max_response_length
        return longest if horizon is None else horizon.at(prompt // self.schedule.prompts_per_step)

    @property
    def needs_rewards(self) -> bool:
        """Responses are judged."""
        return self.validation is not None or self.needs_task_advantage or bool(self.gates)

    @property
    def needs_task_advantage(self) -> bool:
        """The loss reads the ``task_advantage`` field."""
        has_reward = not isinstance(self.loss, KLLossConfig) and self.loss.task_reward_weight > 0
        return has_reward and "on_policy" in self.objectives
