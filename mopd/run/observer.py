"""What happens between optimizer steps: metric sinks, validation, checkpoints. None of it touches training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mopd.engines.interface import Generator
from mopd.metrics import StepMetrics
from mopd.report.sinks import Sinks
from mopd.run.checkpointing import Checkpointer
from mopd.run.validation import Best, Validator


class RunObserver:
    """Implements the controller's ``Observer`` for a run folder."""

    def __init__(
        self,
        *,
        sinks: Sinks,
        watch: Callable[[StepMetrics], StepMetrics],
        checkpointer: Checkpointer,
        validator: Validator | None,
        generator: Generator,
        best: Best | None,
    ) -> None:
        self._sinks = sinks
        self._watch = watch
        self._checkpointer = checkpointer
        self._validator = validator
        self._generator = generator
        self.best = best

    def log(self, metrics: StepMetrics) -> None:
        """One step's numbers to every sink."""
        self._sinks.log(self._watch(metrics))

    async def after_step(self, step: int, prompts_state: Mapping[str, Any]) -> None:
        """Validate, then save: a checkpoint never misses the validation of its own step."""
        if self._validator is not None and self._validator.is_due(step):
            result = await self._validator.record(self._generator, step)
            self._sinks.log_validation(step, result.rewards)
            reward = sum(result.rewards.values()) / len(result.rewards)
            if self.best is None or reward > self.best.reward:
                self.best = Best(step=step, reward=reward)
        best_step = self.best.step if self.best else None
        await self._checkpointer.save_if_due(step, {"prompts": dict(prompts_state)}, best_step=best_step)
