"""Rewards on held-out prompts while training, and what they say about the best checkpoint."""

from __future__ import annotations

import json
import logging
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from mopd.config.schema import Recipe
from mopd.data.prompts import PromptDataset
from mopd.engines.interface import Generator, SamplingParams
from mopd.metrics import MAX_LINE_BYTES, JsonlWriter, apart
from mopd.rewards.domains import DomainRewards
from mopd.rollout.validation import ValidationResult, validate

logger = logging.getLogger(__name__)
NUM_EXAMPLES = 4
"""Generations per domain that are kept for the report: what one screen of it shows."""


class Validator:
    """Validates a generator and keeps ``validation.jsonl``."""

    def __init__(
        self,
        recipe: Recipe,
        dataset: PromptDataset,
        tokenizer: PreTrainedTokenizerBase,
        rewards: DomainRewards,
        path: Path | None,
    ) -> None:
        """``path`` is the file that ``record`` appends to; ``None`` where nothing may be written (``mopd check``)."""
        if recipe.validation is None:
            raise ValueError("the recipe has no validation section")
        self._cfg = recipe.validation
        self._dataset = dataset
        self._path = path
        self._seed = recipe.seed
        self._tokenizer = tokenizer
        self._rewards = rewards
        self._max_new_tokens = recipe.rollout.max_response_length
        self._last_step = recipe.schedule.steps

    @property
    def domains(self) -> tuple[str, ...]:
        """Domains of the validation prompts."""
        return tuple(sorted(self._dataset.domain_counts))

    def is_due(self, step: int) -> bool:
        """After ``step`` optimizer steps it is time to validate."""
        return step % self._cfg.every_steps == 0 or step == self._last_step

    async def run(self, generator: Generator, *, domains: tuple[str, ...] | None = None) -> ValidationResult:
        """Mean reward per domain of what ``generator`` answers; consumes no training randomness."""
        with apart():
            return await validate(
                generator,
                self._dataset,
                self._tokenizer,
                self._rewards,
                sampling=SamplingParams(max_new_tokens=self._max_new_tokens, temperature=self._cfg.temperature),
                seed=self._seed,
                domains=domains,
                max_samples_per_domain=self._cfg.max_samples_per_domain,
                num_examples=NUM_EXAMPLES,
            )

    async def record(self, generator: Generator, step: int) -> ValidationResult:
        """``run``, then append one line to the file."""
        start = time.perf_counter()
        result = await self.run(generator)
        self.append(step, result, wall_s=time.perf_counter() - start)
        return result

    def append(self, step: int, result: ValidationResult, *, wall_s: float) -> None:
        """Write one line for ``step``."""
        if self._path is None:
            raise RuntimeError("this validator has no file to write")
        line = {
            "step": step,
            "rewards": result.rewards,
            "truncated_share": result.truncated_share,
            "examples": _examples(result, self._path),
            "wall_s": wall_s,
        }
        with closing(JsonlWriter(self._path)) as writer:
            writer.write(line)


def _examples(result: ValidationResult, path: Path) -> dict[str, Any]:
    """As JSON: ground truths of parquet files may be decimals, times or bytes, which become text as for rewards."""
    text = json.dumps(result.examples, ensure_ascii=False, allow_nan=False, default=str)
    if len(text.encode()) > MAX_LINE_BYTES // 2:
        logger.warning("%s: the examples are left out, they have %d characters", path, len(text))
        return {}
    examples: dict[str, Any] = json.loads(text)
    return examples
