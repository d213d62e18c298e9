"""Between a recipe as it is written and a run: what the machine decides is decided here, once, before anything starts.

Light to import: ``mopd config`` needs it too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from mopd.config.auto import settle
from mopd.config.load import Loaded
from mopd.files.json_text import read_json_object
from mopd.hardware import Hardware, this_hardware
from mopd.launch.failure import is_rank, local_world_size
from mopd.launch.nodes import Nodes
from mopd.run.locating import apply, locate
from mopd.types import UserError

BYTES_OF_A_WEIGHT = {"float32": 4, "float16": 2, "bfloat16": 2}


def prepare(
    loaded: Loaded,
    further_models: Mapping[str, str] | None = None,
    nodes: Nodes | None = None,
    *,
    only: str | None = None,
) -> Loaded:
    """The recipe as this machine runs it: no ``auto``, and local paths in the place of names of the Hub, which are
    fetched.

    Args:
        further_models: those of the command line, by option; ``Loaded.located`` tells where they are.
        nodes: the launchers of the run, where this is one of several.
        only: a key of the recipe (``student.model``): no other name is fetched.

    Raises:
        UserError: what does not go together, or cannot be fetched.
    """
    located = locate(loaded, further_models or {}, nodes, only=only)
    num_nodes = 1 if nodes is None else nodes.place.num_nodes
    return apply(settled(loaded, this_hardware(), located.path, num_nodes=num_nodes), located)


def settled(loaded: Loaded, hardware: Hardware, folder: Callable[[str], str] = str, *, num_nodes: int = 1) -> Loaded:
    """Every ``auto`` made a value (``config/auto.py``), with the reason as its origin. ``folder`` is where a model of
    the recipe lies.

    Raises:
        UserError: file and key of what another choice needs.
    """
    recipe = loaded.recipe
    models = {"student": recipe.student.model, **{f"teachers.{n}": t.model for n, t in recipe.teachers.items()}}
    try:
        made = settle(
            recipe,
            hardware,
            num_ranks=local_world_size() if is_rank() else recipe.student.parallel.world_size // num_nodes,
            num_weights={key: num_weights(Path(folder(model))) for key, model in models.items()}
            if hardware.num_gpus
            else {},
        )
    except ValueError as error:
        raise UserError(f"{loaded.path}: {error}") from error
    return loaded.settled(made.recipe, made.reasons)


def weights_bytes(folder: Path) -> int | None:
    """Of a model folder's safetensors; ``None`` for a folder without any."""
    sizes = [file.stat().st_size for file in folder.glob("*.safetensors")]
    return sum(sizes) if sizes else None


def num_weights(folder: Path) -> int | None:
    """Of a model folder on this machine, by the size of its files; ``None`` for none, or of an unusual dtype."""
    size, config = weights_bytes(folder), folder / "config.json"
    if size is None or not config.is_file():
        return None
    keys = read_json_object(config, cure="name the folder of a Hugging Face checkpoint")
    each = BYTES_OF_A_WEIGHT.get(str(keys.get("dtype", keys.get("torch_dtype"))))
    return None if each is None else size // each
