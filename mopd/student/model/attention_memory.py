"""What attention costs on a GPU without TransformerEngine: the local layers hold whole score matrices."""

from __future__ import annotations

from dataclasses import dataclass

from mopd.config.schema import Recipe
from mopd.conversion.models.dims import ModelDims
from mopd.types import UserError

SCORE_BYTES = 4
"""Scores go through the softmax in fp32, and its backward keeps the result."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreMatrices:
    """Score matrices [sequences, heads, length, length] of this rank at the largest micro-batch."""

    sequences: int
    heads: int
    length: int
    layers: int
    """Layers whose matrices live at the same time."""

    @property
    def num_bytes(self) -> int:
        """fp32, the causal half that is masked included."""
        return self.sequences * self.heads * self.length**2 * self.layers * SCORE_BYTES


def largest_scores(recipe: Recipe, dims: ModelDims) -> ScoreMatrices:
    """The matrices of a micro-batch of the longest samples that the recipe lets through.

    Without recompute the backward needs those of all layers of the stage, else those of one layer at a time.
    """
    student = recipe.student
    degrees = student.parallel
    length = recipe.data.max_prompt_length + recipe.rollout.max_response_length
    fitting = student.micro_batch_size or max(1, student.max_tokens_per_micro_batch // length)
    share = -(-recipe.schedule.prompts_per_step * recipe.rollout.samples_per_prompt // degrees.data_parallel_size)
    recomputes = student.recompute != "none" or "recompute_granularity" in student.megatron_overrides
    return ScoreMatrices(
        sequences=min(fitting, share),
        heads=max(1, dims.num_attention_heads // degrees.tensor_model_parallel_size),
        length=length,
        layers=1 if recomputes else dims.num_layers // degrees.pipeline_model_parallel_size,
    )


def check_scores(scores: ScoreMatrices, *, free_bytes: int) -> str:
    """A line of warning for the log.

    Args:
        scores: of the largest micro-batch.
        free_bytes: of the device, with model, gradients and optimizer in place.

    Raises:
        UserError: they cannot fit; one line with the numbers and what to set.
    """
    what = (
        f"attention without TransformerEngine holds {scores.layers} x [{scores.sequences}, {scores.heads}, "
        f"{scores.length}, {scores.length}] fp32 scores, {scores.num_bytes / 2**30:.1f} GiB at the longest samples"
    )
    if scores.num_bytes > free_bytes:
        cures = "student.micro_batch_size or student.max_tokens_per_micro_batch" if scores.sequences > 1 else ""
        recompute = "" if scores.layers == 1 else ", set student.recompute: selective"
        raise UserError(
            f"{what}, and {free_bytes / 2**30:.1f} GiB of the GPU are free: install TransformerEngine, lower "
            f"{cures or 'data.max_prompt_length or rollout.max_response_length'}{recompute}, or raise "
            "student.parallel.tensor_model_parallel_size"
        )
    return f"{what}; {free_bytes / 2**30:.1f} GiB of the GPU are free. TransformerEngine's kernels hold none"
