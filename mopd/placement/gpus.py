"""The GPUs of this process, and ``config/machine/places.py`` for the machine that it runs on."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mopd.config.groups import EngineGroupConfig
from mopd.config.load import Loaded
from mopd.config.machine.places import Places, engine_groups, place_on_machine
from mopd.config.placements import LocalConfig
from mopd.config.schema import Recipe


def local_rank() -> int | None:
    """This rank's number among those of its machine; None outside torchrun."""
    own = os.environ.get("LOCAL_RANK")
    return None if own is None else int(own)


def visible_gpus(gpus: Sequence[int]) -> list[str]:
    """Names of GPUs for a child's CUDA_VISIBLE_DEVICES, when this process itself may see only some."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is None:
        return [str(gpu) for gpu in gpus]
    names = [name.strip() for name in shown.split(",")]
    return [names[gpu] for gpu in gpus]


def places_here(groups: Mapping[str, EngineGroupConfig], *, num_ranks: int | None = None) -> Places:
    """Place what the trainer starts on this machine.

    Args:
        groups: those that are wanted.
        num_ranks: trainer ranks here, before they are started; ``None``: as many as torchrun says, 0 outside of it.
    """
    import torch  # seconds; the commands that only read a recipe describe their machine themselves

    if num_ranks is None:
        num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    return place_on_machine(groups, num_ranks, torch.cuda.device_count())


def check_gpus(loaded: Loaded, keys: Sequence[str] | None = None, *, num_nodes: int = 1) -> None:
    """Refuse GPUs that do not suffice for this node's share of the ranks and the groups ``keys`` (all).

    Raises:
        UserError: file, line and key.
    """
    recipe = loaded.recipe if keys is None else without_sharing(loaded.recipe)
    groups = {key: group for key, group in engine_groups(recipe).items() if keys is None or key in keys}
    places_here(groups, num_ranks=recipe.student.parallel.world_size // num_nodes).require(loaded.where)


def without_sharing(recipe: Recipe) -> Recipe:
    """The recipe where nothing trains beside the rollout, which then has GPUs of its own."""
    placement = recipe.rollout.placement
    if not isinstance(placement, LocalConfig):
        return recipe
    return replace(recipe, rollout=replace(recipe.rollout, placement=replace(placement, share_gpus_with=None)))
