"""Weights alone in Megatron's distributed format: what the conversion commands read and write.

The folder has the shape of a run's checkpoint (``checkpoint.save``), without optimizer and random states.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mopd.student.checkpoints import checkpoint, restricted
from mopd.student.model.gpt import StudentModel
from mopd.student.parallel import Layout


def save_model(folder: Path, model: StudentModel, layout: Layout, *, state: Mapping[str, Any]) -> None:
    """Write the weights of all ranks; ``state`` is JSON-able. Collective. Raises as ``checkpoint.save`` does."""
    sharded = {"model": model.sharded_state_dict(metadata=dict(checkpoint.CONTENT))}
    checkpoint.write(folder, sharded, layout, state=state)


@torch.no_grad()
def load_model(folder: Path, model: StudentModel) -> None:
    """Read the weights of a verified ``folder``, a run's checkpoint or one of ``save_model``. Collective.

    Call ``checkpoint.verify`` first. Raises ``UserError`` on every rank as ``restricted.load`` does.
    """
    sharded = {"model": model.sharded_state_dict(metadata=dict(checkpoint.CONTENT))}
    loaded = restricted.load(sharded, folder)
    model.load_state_dict(loaded["model"])
