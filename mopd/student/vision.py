"""The vision tower of a vision-language student: transformers' own module on every rank of the first pipeline stage.

Each tensor-parallel rank computes all of the tower, on the images of its data-parallel rank, without communication, so
a micro-batch without images can skip it. What is frozen has no gradient and so no place in Megatron's buffers.

``StageClock`` measures the tower's share of a step and the pipeline's bubble. Megatron's schedule starts and stops the
timers of its configuration around each forward and backward pass. On a GPU the times are CUDA events, read once after
the step, so that nothing waits for the device before.

Letters: P patches of all images, N tokens of them (merged patches), H channels of the language model.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mopd.config.student import StudentConfig
from mopd.conversion.hf.pretrained import build_tower
from mopd.conversion.models.towers import is_merger, is_trained
from mopd.student.parallel import Layout


@dataclass(frozen=True, kw_only=True)
class ImageInput:
    """Images of one micro-batch; images that occur several times are held once."""

    patches: Tensor
    """[P, channels x frames x side x side] fp32."""
    grids: Tensor
    """[images, 3] int64: size of each image in patches, as (1, height, width)."""
    rows: Tensor
    """[N] int64: rows of the image tokens among this rank's flat [S, B], in the order of tokens."""
    sources: Tensor
    """[N] int64: index of the feature that each of these rows gets."""

    def tensors(self) -> tuple[Tensor, ...]:
        """Return every tensor that this object holds."""
        return tuple(vars(self).values())


def make_tower(student: StudentConfig, dtype: torch.dtype) -> nn.Module:
    """Return the tower on the CPU with undefined weights, frozen as ``student.vision.freeze`` says."""
    tower: Any = build_tower(Path(student.model), dtype)
    freeze = student.vision.freeze
    for name, parameter in tower.named_parameters():
        parameter.requires_grad_(is_trained(name, freeze))
        # Tensor-parallel ranks compute the same gradient; kernels that add in no fixed order would let copies drift.
        parameter.average_gradients_across_tp_domain = True
    if student.recompute == "full" and freeze == "none":
        tower.gradient_checkpointing_enable({"use_reentrant": False})
    built: nn.Module = tower
    return built


TOWER = "vision-tower"
_PASSES = ("forward-compute", "backward-compute")
"""Megatron's names of the timers around forward and backward passes."""


class Span:
    """Start and stop times under one timer name: seconds, or CUDA events on a GPU."""

    def __init__(self, *, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._opened: Any = None
        self.closed: list[tuple[Any, Any]] = []

    def start(self, barrier: bool = False) -> None:
        """Note the start. ``barrier`` belongs to Megatron's interface and is ignored."""
        self._opened = self._now()

    def stop(self, barrier: bool = False) -> None:
        """Note the end, if the span was started."""
        if self._opened is not None:  # a backward pass need not begin where its end is seen
            self.closed.append((self._opened, self._now()))
            self._opened = None

    @property
    def seconds(self) -> float:
        """Total length of all closed spans."""
        return sum(_between(*span) for span in self.closed)

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class StageClock:
    """Replacement for Megatron's ``config.timers`` on one rank, which also times the vision tower. Call ``begin``
    before a step's passes and ``metrics`` after them."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._spans: dict[str, Span] = {}

    def __call__(self, name: str, log_level: int | None = None) -> Span:
        """Return the timer of a name. Of Megatron's timers only those of its passes are read."""
        if name not in self._spans:
            self._spans[name] = Span(on_gpu=self._layout.device.type == "cuda")
        return self._spans[name]

    def begin(self) -> None:
        """Clear the last step's times."""
        for span in self._spans.values():
            span.closed.clear()

    def metrics(self) -> dict[str, float]:
        """Return the step's shares under their metric names, equal on every rank. Collective."""
        rank, passes = dist.get_rank(), [self(name) for name in _PASSES]
        busy = sum(span.seconds for span in passes)
        begin = passes[0].closed[0][0]
        whole = max(_between(begin, span.closed[-1][1]) for span in passes if span.closed)
        # The tower runs on the first stage alone, so its share is one of that stage's time.
        first_stage = busy if self._layout.is_first_stage else 0.0
        table = torch.zeros(dist.get_world_size(), 4, dtype=torch.float64, device=self._layout.device)
        table[rank] = torch.tensor([busy, whole, first_stage, self(TOWER).seconds])
        dist.all_reduce(table)
        total_busy, _, total_first_stage, total_tower = table.sum(0).tolist()
        return {
            "rate/vision_tower_share": total_tower / total_first_stage,
            "rate/pipeline_bubble_share": 1 - total_busy / (len(table) * float(table[:, 1].max())),
        }


def add_clock(first_chunk: Any, layout: Layout) -> StageClock:
    """Return a clock of the model's passes, set in the configuration that the chunks share, and of its tower if any."""
    clock = StageClock(layout)
    first_chunk.config.timers = clock
    if layout.is_first_stage:
        _watch(first_chunk.vision_model, clock(TOWER))
    return clock


def _watch(tower: nn.Module, span: Span) -> None:
    """Let ``span`` measure the tower's forward and, if something in it is trained, its backward."""

    def begin_backward(module: Any, inputs: Any, made: Any) -> None:
        span.stop()
        if made.pooler_output.requires_grad:
            made.pooler_output.register_hook(lambda grad: span.start())

    tower.register_forward_pre_hook(lambda module, inputs: span.start())
    tower.register_forward_hook(begin_backward)
    trained = [(name, parameter) for name, parameter in tower.named_parameters() if parameter.requires_grad]
    if trained:
        # Find the parameter whose gradient is complete last. Backward runs against the order of the forward pass, in
        # which blocks come first, then DeepStack's mergers, then the merger.
        _, last = min(trained, key=lambda item: (is_merger(item[0]), item[0].startswith("merger.")))
        last.register_post_accumulate_grad_hook(lambda parameter: span.stop())


def image_features(tower: nn.Module, images: ImageInput) -> tuple[Tensor, list[Tensor]]:
    """Return [N, H] for the tokens of ``images.rows``, and DeepStack's [N, H] for each of the first decoder layers."""
    made = tower(images.patches, grid_thw=images.grids, return_dict=True)
    deeper = getattr(made, "deepstack_features", None) or []
    return made.pooler_output[images.sources], [features[images.sources] for features in deeper]


def _between(begin: Any, end: Any) -> float:
    """Return the seconds between two times; waits for the device if they are CUDA events."""
    if isinstance(begin, float):
        return float(end - begin)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000
