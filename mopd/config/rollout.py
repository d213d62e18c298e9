"""Keys of what is sampled: ``rollout`` (the student's responses and the replicas that draw them) and ``answers`` (the
teachers' own)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from mopd.config.environment import EnvironmentConfig
from mopd.config.groups import EngineGroupConfig, SglangEngineConfig, VllmEngineConfig
from mopd.config.placements import ExternalConfig, RayConfig
from mopd.config.schedule import MAX_SAMPLES
from mopd.config.values import (
    MAX_COUNT,
    MAX_STOP_IDS,
    MAX_TOKENS,
    Checked,
    Count,
    Fraction,
    Lines,
    NotNegative,
    Positive,
    Share,
    at_least,
    check_stop,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class HorizonConfig(Checked):
    """Length at which training responses stop (docs/losses.md#which-tokens-count-losstokens)."""

    start: Annotated[int, at_least(1, MAX_TOKENS)]
    """Tokens in the first step."""
    end: Annotated[int, at_least(1, MAX_TOKENS)] | None = None
    """Tokens after ``steps``; absent: ``start``."""
    steps: Count | None = None
    """Steps of even growth."""

    def check(self) -> None:
        if (self.end is None) != (self.steps is None):
            here, absent = ("end", "steps") if self.steps is None else ("steps", "end")
            raise ValueError(f"{here} is {getattr(self, here)} and {absent} is absent: set both, or remove {here}")
        if self.end is not None and self.end < self.start:
            raise ValueError(f"end is {self.end} and start is {self.start}: a horizon grows, set end to start or more")

    def at(self, step: int) -> int:
        """Return the tokens of the responses of a step, counted from 0."""
        if self.end is None or self.steps is None:
            return self.start
        return self.start + (self.end - self.start) * min(step, self.steps) // self.steps


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixConfig(Checked):
    """Given beginning of training responses (docs/losses.md#given-prefixes)."""

    source: Literal["teacher", "data"]
    """The teacher's answer, or the row's."""
    share: Share
    """Share of it in the first step."""
    steps: Count | None = None
    """Steps of even decrease to 0; absent: none."""
    reference: Lines | None = None
    """With ``data``: entry of ``extra_info``; absent: the ground truth."""

    def check(self) -> None:
        if self.reference is not None and self.source != "data":
            raise ValueError(
                f"reference is {self.reference!r} and source {self.source!r}, which reads no row: set source: data, or "
                "remove reference"
            )

    def at(self, step: int) -> float:
        """Return the share of a step, counted from 0."""
        return self.share if self.steps is None else self.share * max(0.0, 1 - step / self.steps)


def require_prefix(prefix: PrefixConfig | None, elsewhere: Mapping[str, bool]) -> None:
    """``ValueError`` where no response can begin with what is given. ``elsewhere``: reasons, and whether each holds."""
    for reason in [reason for reason, is_so in elsewhere.items() if is_so and prefix is not None]:
        raise ValueError(f"rollout.prefix is set, but {reason}: remove one of them")


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig(EngineGroupConfig):
    """How the student draws responses."""

    max_response_length: Annotated[int, at_least(1, MAX_TOKENS)] = 1024
    """Most tokens of a response."""
    horizon: HorizonConfig | None = None
    """Length at which training responses stop (docs/losses.md#which-tokens-count-losstokens)."""
    prefix: PrefixConfig | None = None
    """Given beginning of training responses (docs/losses.md#given-prefixes)."""
    temperature: Positive = 1.0
    """Sampling temperature."""
    top_p: Share = 1.0
    """Nucleus mass."""
    top_k: int = -1
    """Most probable tokens kept; -1: all."""
    min_p: Fraction = 0.0
    """Least share of the largest probability."""
    presence_penalty: Annotated[float, at_least(-2, 2)] = 0.0
    """Subtracted from logits of the response's tokens."""
    repetition_penalty: Annotated[float, at_least(0.01, 100)] = 1.0
    """Divides positive logits of seen tokens, multiplies negative ones."""
    stop: tuple[Lines, ...] = ()
    """Texts that end a response (docs/data.md#from-row-to-tokens)."""
    stop_text: Literal["kept", "cut"] = "kept"
    """Whether rewards, validation and ``mopd generate`` read it."""
    stop_token_ids: tuple[int | str, ...] = ()
    """Tokens or ids that end a response, beside the checkpoint's own."""
    ignore_eos: bool = False
    """The checkpoint's own end nothing."""
    on_truncated: Literal["train", "mask_tail", "drop"] = "train"
    """Responses cut at ``max_response_length`` (docs/data.md#responses-and-micro-batches)."""
    masked_tail: Count | None = None
    """With ``mask_tail``: last tokens without loss."""
    samples_per_prompt: Annotated[int, at_least(1, MAX_SAMPLES)] = 1
    """Responses per prompt."""
    environment: EnvironmentConfig | None = None
    """What answers the student's turns (docs/environments.md)."""
    on_new_weights: Literal["auto", "finish", "continue"] = "auto"
    """Whether responses end first, or go on under new weights (docs/pipeline.md#long-responses); ``auto``: ``continue``
    with ``max_staleness``."""

    replay_routes: bool = False
    """Train with the experts that the rollout chose (docs/parallelism.md#router-replay)."""

    def check(self) -> None:
        if isinstance(self.placement, RayConfig) and self.placement.shared_pool is not None:
            raise ValueError(
                f"placement.shared_pool is {self.placement.shared_pool!r}: only teachers take turns; remove it"
            )
        EngineGroupConfig.check(self)
        if isinstance(self.engine, VllmEngineConfig) and self.engine.pipeline_parallel_size > 1:
            raise ValueError(
                f"engine.pipeline_parallel_size is {self.engine.pipeline_parallel_size}, but the weights of a rollout "
                "go to tensor-parallel workers alone: remove it, and set tensor_parallel_size"
            )
        longest = 0 if self.horizon is None else self.horizon.end or self.horizon.start
        if longest > self.max_response_length:
            raise ValueError(
                f"horizon ends at {longest} tokens, max_response_length is {self.max_response_length}: lower "
                "horizon.end or horizon.start, or raise max_response_length"
            )
        turn = None if self.environment is None else self.environment.max_tokens_per_turn
        if turn is not None and turn > self.max_response_length:
            raise ValueError(
                f"environment.max_tokens_per_turn is {turn}, above max_response_length {self.max_response_length} for "
                "all turns together: lower it, or raise max_response_length"
            )
        if self.top_k != -1 and not 1 <= self.top_k <= MAX_COUNT:
            raise ValueError(f"top_k is {self.top_k}: set -1 (all) or a positive number up to {MAX_COUNT}")
        check_stop(self.stop)
        if (self.on_truncated == "mask_tail") != (self.masked_tail is not None):
            raise ValueError(
                f"on_truncated is {self.on_truncated!r} and masked_tail is {self.masked_tail}: set masked_tail with "
                "mask_tail, and only then"
            )
        if self.masked_tail is not None and self.environment is not None:
            raise ValueError(
                f"on_truncated is 'mask_tail' and environment.type {self.environment.type!r}, where a response ends "
                "between two turns: set on_truncated: train, or drop"
            )
        if self.masked_tail is not None and self.masked_tail >= self.max_response_length:
            raise ValueError(
                f"masked_tail is {self.masked_tail} and max_response_length {self.max_response_length}, so that a cut "
                "response would have no loss at all: lower masked_tail, or set on_truncated: drop"
            )
        if len(self.stop_token_ids) > MAX_STOP_IDS:
            raise ValueError(f"stop_token_ids names {len(self.stop_token_ids)}: name at most {MAX_STOP_IDS}")
        if self.stop_text == "cut" and not self.stop:
            raise ValueError("stop_text is 'cut', but stop is empty: name a text there, or remove stop_text")
        if self.stock:
            raise ValueError(f"placement.protocol is {self.stock!r}: such a server takes no weight updates; set mopd")
        is_sglang = isinstance(self.engine, SglangEngineConfig) and not isinstance(self.placement, ExternalConfig)
        if is_sglang and (self.presence_penalty != 0 or self.repetition_penalty != 1):
            raise ValueError(
                f"presence_penalty is {self.presence_penalty} and repetition_penalty {self.repetition_penalty}, but "
                "engine.type sglang reports log-probs after penalties, and the student's are those before: remove "
                "them, or set engine: {type: torch}"
            )

    def check_replay(self, elsewhere: Mapping[str, bool]) -> None:
        """Refuse to replay routes beside what has none; ``elsewhere``: problem -> whether the recipe has it. Raises
        ``ValueError``."""
        own = {
            "rollout.engine.type is sglang, which is not asked for routes": isinstance(self.engine, SglangEngineConfig),
            "rollout.engine.type is vllm, and rollout.stop ends responses before it tells their routes": bool(self.stop)
            and isinstance(self.engine, VllmEngineConfig),
        }
        for problem, is_so in ({**own, **elsewhere} if self.replay_routes else {}).items():
            if is_so:
                raise ValueError(f"rollout.replay_routes is true, but {problem}: change one of them")

    def check_vllm(self, validation_temperature: float | None) -> None:
        """vLLM reports log-probs of the logits as they are, or after temperature and cuts, nothing between. Raises
        ``ValueError``."""
        if not isinstance(self.engine, VllmEngineConfig) or isinstance(self.placement, ExternalConfig):
            return
        if self.is_exact:
            return
        if self.temperature != 1.0:
            raise ValueError(
                f"rollout.temperature is {self.temperature} and {self.biased}, but rollout.engine vllm "
                "reports log-probs before cuts and penalties at temperature 1 only: set temperature: 1.0, or remove "
                "them"
            )
        if validation_temperature not in (None, 0.0, 1.0):
            raise ValueError(
                f"validation.temperature is {validation_temperature}, but rollout.engine vllm with cuts or "
                f"penalties ({self.biased}) draws at temperature 0 or 1 only: set one of these"
            )

    @property
    def is_exact(self) -> bool:
        """Responses follow softmax(logits / temperature) without a cut or a penalty."""
        return not self.biased

    @property
    def biased(self) -> str:
        """The keys that cut or penalise, each with its value, for a message; empty where there are none."""
        neutral = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
        changed = [name for name, value in neutral.items() if getattr(self, name) != value]
        return " and ".join(f"rollout.{name} is {getattr(self, name)}" for name in changed)

    @property
    def cut_texts(self) -> tuple[str, ...]:
        """Stop texts that are cut from what is read."""
        return self.stop if self.stop_text == "cut" else ()


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswersConfig(Checked):
    """The teachers' answers to training prompts, drawn once."""

    temperature: NotNegative = 0.0
    """Sampling temperature; 0 is greedy."""
    folder: str | None = None
    """Folder for several runs; absent: the run's ``answers``."""
