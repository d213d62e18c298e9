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
    """Uploads of these folders to the Hub, with ``HF_TOKEN``."""

    repo: str
    """Repository, ``namespace/name``."""
    private: bool = True
    """Make it private, and refuse a public one."""

    def check(self) -> None:
        if not REPOSITORY.fullmatch(self.repo):
            raise ValueError(f"repo is {self.repo!r}: write a name of the Hub, namespace/name")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig(Checked):
    """What training saves."""

    every_steps: Count = 100
    """Steps between checkpoints; the last step's comes besides."""
    keep_last: Count = 2
    """Newest ones to keep."""
    async_save: bool = True
    """Write from a copy in host memory (14 bytes a weight, 16 in float32) while training goes on."""
    keep_best: bool = True
    """Also keep that of the best mean validation reward."""
    export_hf: bool = True
    """Write the best, else the last, as a Hugging Face folder."""
    export_hf_every_steps: Count | None = None
    """Steps between further such folders (``hf_steps/step_N``)."""
    push_to_hub: PushConfig | None = None
    """Uploads of these folders to the Hub, with ``HF_TOKEN``."""

    def check(self) -> None:
        if self.push_to_hub is not None and not self.export_hf and self.export_hf_every_steps is None:
            raise ValueError("push_to_hub is set and nothing is exported: set export_hf or export_hf_every_steps")


@dataclass(frozen=True, kw_only=True, slots=True)
class CallbackConfig(Checked):
    """Classes of yours that follow the run (docs/extending.md#a-callback)."""

    module: str
    """A ``mopd.Callback``, or entry point ``mopd.callbacks``."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Its keywords."""
    timeout_s: Seconds = 60.0
    """Deadline of each call."""
    on_error: Literal["stop", "ignore"] = "stop"
    """After a failure: stop with a checkpoint, or go on without it."""

    def check(self) -> None:
        check_reference("module", self.module)


@dataclass(frozen=True, kw_only=True, slots=True)
class WandBConfig:
    """Weights & Biases; needs the package ``wandb``."""

    project: str
    """Project."""
    name: str | None = None
    """Run; absent: the run folder's name."""
    entity: str | None = None
    """Team or user; absent: the login's."""
    group: str | None = None
    """Group of runs."""
    tags: tuple[str, ...] = ()
    """Tags."""
    mode: Literal["online", "offline"] = "online"
    """``offline``: into the run folder only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricsConfig(Checked):
    """Where numbers go besides ``metrics.jsonl`` and the terminal."""

    diagnostics_every_steps: Count = 10
    """Steps between diagnostics (docs/metrics.md)."""
    keep_samples: bool = False
    """Keep trained samples, for ``mopd replay`` and ``data.scored``
    (docs/pipeline.md#samples-and-scores-that-are-kept)."""
    gradient_cosine_every_steps: Count | None = None
    """Steps between cosines of the domains' gradients (docs/metrics.md#who-gets-how-much)."""
    tensorboard: bool = True
    """Write TensorBoard files into the run folder."""
    wandb: WandBConfig | None = None
    """Weights & Biases; needs the package ``wandb``."""
