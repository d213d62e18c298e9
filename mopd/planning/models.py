"""Sizes of a recipe's models from their ``config.json``, wherever one is: no weights, no network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path

from mopd.base.files.reading import shown_path
from mopd.base.types import UserError
from mopd.config.load import Loaded
from mopd.config.student import LoraConfig
from mopd.conversion.hf.header import read_header
from mopd.conversion.models.adapted import ADAPTER_WEIGHTS
from mopd.conversion.models.config_keys import CONFIG_FILE
from mopd.conversion.models.dims import ModelDims
from mopd.conversion.models.reading import read_dims
from mopd.data.hub.names import HubName, hub_model
from mopd.planning.memory.shards import adapter_weights
from mopd.planning.memory.stored import StoredFormat, stored_format

STUDENT = "student"
ABSENT_RANK = 32
"""Rank, on all linear layers, of a teacher's adapter that is not on this machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadModels:
    """Models of a recipe by ``student`` and ``teachers.NAME``."""

    dims: Mapping[str, ModelDims]
    stored: Mapping[str, StoredFormat]
    """Formats of those teachers whose weights are quantised."""
    adapters: Mapping[str, int]
    """Weights of the adapter of each of those teachers that have one."""


def read_models(loaded: Loaded, configs: Path | None) -> ReadModels:
    """Return the sizes of ``student`` and of each ``teachers.NAME``, whose weights may be quantised.

    A model's ``config.json`` is that of its folder, of ``configs``/LAST-PART-OF-ITS-NAME, or what the Hub's cache has.

    Raises:
        UserError: file, line and key of a model whose config is nowhere, or cannot be used.
    """
    recipe = loaded.recipe
    wanted: dict[str, tuple[str, tuple[str, ...]]] = {STUDENT: (recipe.student.model, ("student", "model"))}
    wanted |= {f"teachers.{name}": (one.model, ("teachers", name, "model")) for name, one in recipe.teachers.items()}
    read, read_format = cache(read_dims), cache(stored_format)
    models, stored = {}, {}
    for key, (model, path) in wanted.items():
        folder = config_folder(model, configs)
        if folder is None:
            cure = "give --configs DIR, where DIR/NAME/config.json is that of a model whose name ends in NAME"
            if hub_model(model) is not None:
                raise UserError(
                    f"{loaded.where(*path)}: {model!r} is no folder here and not in the Hub's cache: {cure}"
                )
            raise UserError(f"{loaded.where(*path)}: no such folder {shown_path(model)!r}: {cure}")
        models[key] = read(folder, takes_quantised=key != STUDENT)
        if key != STUDENT and (own := read_format(folder)) is not None:
            stored[key] = own
    adapters = {
        key: _adapter_weights(Path(one.adapter), models[key])
        for key, one in ((f"teachers.{name}", one) for name, one in recipe.teachers.items())
        if one.adapter is not None
    }
    return ReadModels(dims=models, stored=stored, adapters=adapters)


def _adapter_weights(folder: Path, dims: ModelDims) -> int:
    path = folder / ADAPTER_WEIGHTS
    if not path.is_file():
        return adapter_weights(dims, LoraConfig(rank=ABSENT_RANK))
    return sum(prod(info.shape) for info in read_header(path).values())


def config_folder(model: str, configs: Path | None) -> Path | None:
    """Return the first folder that has the ``config.json``; the model's own comes first. ``None``: there is none."""
    own, name = Path(model), hub_model(model)
    places = [own]
    if configs is not None:
        places.append(configs / (own.name if name is None else name.repository.partition("/")[2]))
    if name is not None:
        places += _cached(name)
    return next((place for place in places if (place / CONFIG_FILE).is_file()), None)


def _cached(name: HubName) -> list[Path]:
    """Return the folder in the Hub's cache, if it is there."""
    from huggingface_hub import try_to_load_from_cache  # half a second, for names of the Hub alone

    found = try_to_load_from_cache(name.repository, CONFIG_FILE, revision=name.revision)
    return [Path(found).parent] if isinstance(found, str) else []
