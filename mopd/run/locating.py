"""The replacement of a recipe's names of the Hub by local folders and files. Each machine fetches them once, all at one
commit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mopd.base.types import UserError
from mopd.config.data import DataFileConfig
from mopd.config.load import Loaded
from mopd.config.reading.tree import dotted
from mopd.config.schema import Recipe
from mopd.data.hub.names import HubName, hub_data, hub_model

MAX_NAMES = 500
"""Most names of the Hub in one recipe."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HubEntry:
    """A name of the Hub in a recipe."""

    key: str
    """Where it stands in the recipe: ``student.model``, ``data.train[0]``."""
    where: str
    """File, line and key, to begin an error line with."""
    text: str
    name: HubName
    kind: Literal["model", "data"]
    with_weights: bool = True

    @property
    def local(self) -> str:
        """What it would be on this machine: a folder or a file."""
        return "folder" if self.kind == "model" else "file"


@dataclass(frozen=True, kw_only=True, slots=True)
class Located:
    """The local paths and commits of a recipe's names of the Hub."""

    paths: Mapping[str, Sequence[str]]
    """Name, as it is written -> its folder, or its files."""
    commits: Mapping[str, str]
    """Key of the recipe -> the name at the commit that was fetched."""

    def path(self, model: str) -> str:
        """Return the folder of a ``model`` of the recipe."""
        return self.paths[model][0] if model in self.paths else model


def locate(
    loaded: Loaded,
    further_models: Mapping[str, str],
    *,
    only: str | None = None,
    commits: Mapping[str, str] | None = None,
) -> Located:
    """Fetch what the recipe names onto this machine, or what it names at the key ``only``. ``further_models`` are those
    of the command line, by option; ``commits`` those that node 0 found, by key.

    Raises:
        UserError: file, key, both readings of the name and the cure.
    """
    entries = [one for one in _hub_entries(loaded, further_models) if only in (None, one.key)]
    if not entries:
        return Located(paths={}, commits={})
    if len(entries) > MAX_NAMES:
        raise UserError(
            f"{loaded.path}: names {len(entries)} models and data sets of the Hub: name at most {MAX_NAMES}"
        )
    return _fetch(entries if commits is None else [_pinned(one, commits) for one in entries])


def locate_inputs(loaded: Loaded) -> Located:
    """Fetch the recipe's data, and of its models all but the weights. Raises as ``locate`` does."""
    entries = [dataclasses.replace(one, with_weights=False) for one in _hub_entries(loaded, {})]
    return _fetch(entries) if entries else Located(paths={}, commits={})


def apply(loaded: Loaded, located: Located) -> Loaded:
    """Return ``loaded`` with local paths in ``recipe``; ``named`` stays as it is."""
    recipe = _replaced(loaded.recipe, located.path, lambda text: located.paths.get(text, [text]))
    return dataclasses.replace(loaded, recipe=recipe, located=located.paths, commits=located.commits)


def unpinned(recipe: Recipe) -> Recipe:
    """Return ``recipe`` without the revisions of its names: the run's ``manifest.json`` holds their commits."""

    def without_revision(text: str, name: HubName | None) -> str:
        return text if name is None else str(dataclasses.replace(name, revision=None))

    return _replaced(
        recipe,
        lambda text: without_revision(text, hub_model(text)),
        lambda text: [without_revision(text, hub_data(text))],
    )


def _hub_entries(loaded: Loaded, further_models: Mapping[str, str]) -> Iterator[HubEntry]:
    recipe = loaded.recipe
    models = [("student.model", loaded.where("student", "model"), recipe.student.model, True)]
    for name, teacher in recipe.teachers.items():
        path = ("teachers", name, "model")
        # A stock server has the weights; here its tokenizer is enough.
        models.append((dotted(path), loaded.where(*path), teacher.model, not teacher.stock))
    models += [(option, option, text, True) for option, text in further_models.items()]
    for key, where, text, with_weights in models:
        hub_name = hub_model(text)
        if hub_name is not None:
            yield HubEntry(key=key, where=where, text=text, name=hub_name, kind="model", with_weights=with_weights)
    for split, entries in (("train", recipe.data.train), ("validation", recipe.data.validation)):
        for i, file in enumerate(recipe.data.files(entries)):
            hub_name = hub_data(file.path)
            if hub_name is not None:
                where = f"{loaded.where('data', split)}[{i}]"
                yield HubEntry(key=f"data.{split}[{i}]", where=where, text=file.path, name=hub_name, kind="data")


def _pinned(entry: HubEntry, commits: Mapping[str, str]) -> HubEntry:
    """Return the entry at the commit that node 0 has found.

    Raises:
        UserError: node 0 has a folder or file of that name.
    """
    if entry.key not in commits:
        raise UserError(
            f"{entry.where}: {entry.text!r} is a {entry.local} on node 0 and none on this node, where it would be a "
            "name of the Hub: let all nodes see it, and start them in one working directory"
        )
    commit = commits[entry.key].partition("@")[2].partition(":")[0]
    return dataclasses.replace(entry, name=entry.name.at(commit))


def _fetch(entries: Sequence[HubEntry]) -> Located:
    from huggingface_hub import constants  # heavy, and most recipes never come here

    from mopd.data.hub.fetch import Fetched, fetch_data, fetch_model

    paths: dict[str, Sequence[str]] = {}
    commits: dict[str, str] = {}
    known: dict[tuple[str, HubName, bool], Fetched] = {}
    for one in entries:
        key = (one.kind, one.name, one.with_weights)
        try:
            if key not in known:
                is_model = one.kind == "model"
                known[key] = fetch_model(one.name, with_weights=one.with_weights) if is_model else fetch_data(one.name)
        except UserError as error:
            raise UserError(
                f"{one.where}: {one.text!r} is no {one.local} here, and on the Hub ({constants.ENDPOINT}) {error}"
            ) from error
        paths[one.text] = known[key].paths
        commits[one.key] = str(one.name.at(known[key].commit))
    return Located(paths=paths, commits=commits)


def _replaced(recipe: Recipe, model: Callable[[str], str], data: Callable[[str], Sequence[str]]) -> Recipe:
    """Replace each model's and data entry's text; a data entry may become several."""

    def entries(given: Sequence[str | DataFileConfig]) -> tuple[Any, ...]:
        return tuple(
            path if isinstance(entry, str) else dataclasses.replace(entry, path=path)
            for entry in given
            for path in data(entry if isinstance(entry, str) else entry.path)
        )

    files = dataclasses.replace(
        recipe.data, train=entries(recipe.data.train), validation=entries(recipe.data.validation)
    )
    teachers = {
        name: dataclasses.replace(teacher, model=model(teacher.model)) for name, teacher in recipe.teachers.items()
    }
    student = dataclasses.replace(recipe.student, model=model(recipe.student.model))
    return dataclasses.replace(recipe, student=student, teachers=teachers, data=files)
