"""What a run writes besides its recipe, checkpoints and numbers, and who is told of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mopd.config.values import Checked, Count, Seconds, check_reference

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
"""A repository's name on the Hub."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PushConfig(Checked):
    """Uploads of Hugging Face folders to the Hub with the environment's ``HF_TOKEN``; a failure does not end the
    run."""

    repo: str
    """Repository, ``namespace/name``, created where it is missing."""
    private: bool = True
    """Make the repository private, and refuse a public one."""

    def check(self) -> None:
        if not REPOSITORY.fullmatch(self.repo):
            raise ValueError(f"repo is {self.repo!r}: write a name of the Hub, namespace/name")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig(Checked):
    """What is saved while training."""

    every_steps: Count = 100
    """Optimizer steps between checkpoints; the last step is always saved."""
    keep_last: Count = 2
    """Newest checkpoints to keep."""
    async_save: bool = True
    """Copy the state into host memory (14 bytes a weight in bfloat16, 16 in float32), and write while training goes
    on."""
    keep_best: bool = True
    """Also keep the checkpoint with the best mean validation reward."""
    export_hf: bool = True
    """At the end write the best checkpoint, else the last, as a Hugging Face folder."""
    export_hf_every_steps: Count | None = None
    """Optimizer steps between further Hugging Face folders (``hf_steps/step_N``)."""
    push_to_hub: PushConfig | None = None
    """Also upload these folders to the Hub."""

    def check(self) -> None:
        if self.push_to_hub is not None and not self.export_hf and self.export_hf_every_steps is None:
            raise ValueError("push_to_hub is set and nothing is exported: set export_hf or export_hf_every_steps")


@dataclass(frozen=True, kw_only=True, slots=True)
class CallbackConfig(Checked):
    """A class of yours that follows the run (docs/extending.md#a-callback)."""

    module: str
    """The class, a ``mopd.Callback``: ``file.py:name``, ``package.module:name``, or an entry point
    ``mopd.callbacks``."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of the class."""
    timeout_s: Seconds = 60.0
    """Deadline of each of its calls."""
    on_error: Literal["stop", "ignore"] = "stop"
    """After an exception or a missed deadline: stop the run with a checkpoint, or go on without it."""

    def check(self) -> None:
        check_reference("module", self.module)


@dataclass(frozen=True, kw_only=True, slots=True)
class WandBConfig:
    """Weights & Biases run; the ``wandb`` package must be installed."""

    project: str
    """Project name."""
    name: str | None = None
    """Run name; the run folder's name when absent."""
    entity: str | None = None
    """Team or user of the project; absent: the login's own."""
    group: str | None = None
    """Group that the run is shown in."""
    tags: tuple[str, ...] = ()
    """Tags of the run."""
    mode: Literal["online", "offline"] = "online"
    """``offline`` writes to the run folder only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricsConfig(Checked):
    """Where numbers go besides ``metrics.jsonl`` and the terminal."""

    diagnostics_every_steps: Count = 10
    """Optimizer steps between diagnostics (docs/metrics.md)."""
    keep_samples: bool = False
    """Keep every trained sample, for ``mopd replay`` and ``data.scored``
    (docs/pipeline.md#samples-and-scores-that-are-kept)."""
    gradient_cosine_every_steps: Count | None = None
    """Optimizer steps between cosines of the domains' gradients (docs/metrics.md#who-gets-how-much); absent:
    never."""
    tensorboard: bool = True
    """Write TensorBoard event files into the run folder."""
    wandb: WandBConfig | None = None
    """Also log to Weights & Biases."""
