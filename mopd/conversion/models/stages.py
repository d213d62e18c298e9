"""Cutting of a model's layers into pipeline stages, and of these into model chunks. No torch in this module.

Megatron's rules. With virtual stages each stage holds several chunks, and the layers go round the stages as often: with
8 layers, 2 stages and 2 chunks stage 0 holds layers 0, 1 and 4, 5, stage 1 holds 2, 3 and 6, 7.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache

from mopd.config.student import ParallelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Stages:
    """Number and sizes of pipeline stages. Fields are Megatron's, as in ``student.parallel``."""

    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int = 1
    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None

    def layers(self, num_layers: int) -> tuple[tuple[range, ...], ...]:
        """Return the layers of every chunk of every stage, of a model that ``problem`` finds nothing wrong with."""
        return _layers(self, num_layers)

    def stage_of(self, layer: int, num_layers: int) -> int:
        """Return the stage that holds a layer."""
        layers = enumerate(self.layers(num_layers))
        return next(stage for stage, chunks in layers if any(layer in own for own in chunks))

    def problem(self, num_layers: int, spelled: Callable[[str], str]) -> str:
        """Return why the layers cannot be cut so, with the key to set; empty if they can. ``spelled`` makes a key from
        a field's name."""
        degree, chunks = self.pipeline_model_parallel_size, self.virtual_pipeline_model_parallel_size
        given = {
            name: number
            for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
            if (number := getattr(self, name)) is not None
        }
        rest, others = num_layers - sum(given.values()), degree - len(given)
        if given and (others < 1 or rest < others or rest % others):
            named = " and ".join(f"{spelled(name)} {number}" for name, number in given.items())
            return (
                f"{named} leaves {rest} of the model's {num_layers} layers, which the other {others} stages do not "
                "share evenly: set another number, or leave the key out"
            )
        if rest % others:
            return (
                f"{spelled('pipeline_model_parallel_size')} {degree} does not divide the model's {num_layers} layers: "
                f"set it to a divisor of {num_layers}, or {spelled('num_layers_in_last_pipeline_stage')}"
            )
        for stage, size in enumerate(_sizes(self, num_layers)):
            if size % chunks:
                return (
                    f"{spelled('virtual_pipeline_model_parallel_size')} {chunks} does not divide the {size} layers of "
                    f"pipeline stage {stage}: set it to a divisor of {size}"
                )
        return ""


ONE_STAGE = Stages()


def stages_of(parallel: ParallelConfig) -> Stages:
    """Return the stages of a recipe."""
    return Stages(**{field.name: getattr(parallel, field.name) for field in fields(Stages)})


def _sizes(stages: Stages, num_layers: int) -> list[int]:
    """Return the number of layers of every stage."""
    first, last = stages.num_layers_in_first_pipeline_stage, stages.num_layers_in_last_pipeline_stage
    head, tail = [] if first is None else [first], [] if last is None else [last]
    others = stages.pipeline_model_parallel_size - len(head) - len(tail)
    return [*head, *[(num_layers - sum(head) - sum(tail)) // others] * others, *tail]


@lru_cache(maxsize=64)
def _layers(stages: Stages, num_layers: int) -> tuple[tuple[range, ...], ...]:
    chunks = stages.virtual_pipeline_model_parallel_size
    per_chunk = [size // chunks for size in _sizes(stages, num_layers)]
    found: list[tuple[range, ...]] = []
    for stage, size in enumerate(per_chunk):
        starts = [chunk * sum(per_chunk) + sum(per_chunk[:stage]) for chunk in range(chunks)]
        found.append(tuple(range(start, start + size) for start in starts))
    return tuple(found)
