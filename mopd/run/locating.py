"""Names of the Hub in a recipe become local folders and files: fetched once on each machine, at one commit for all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mopd.base.types import UserError
from mopd.config.data import DataFileConfig
from mopd.config.load import Loaded
from mopd.config.placements import ExternalConfig
from mopd.config.reading.tree import dotted
from mopd.config.schema import Recipe
from mopd.data.hub.names import HubName, hub_data, hub_model

MAX_NAMES = 500
"""Names of the Hub in one recipe."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """One name of the Hub."""

    key: str
    """Where it stands in the recipe: ``student.model``, ``data.train[0]``."""
    where: str
    """File, line and key, to begin an error line with."""
    text: str
    name: HubName
    kind: Literal["model", "data"]
    with_weights: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Located:
    """What the names of a recipe stand for on this machine."""

    paths: Mapping[str, Sequence[str]]
    """Name, as it is written -> its folder, or its files."""
    commits: Mapping[str, str]
    """Key of the recipe -> the name at the commit that was fetched."""

    def path(self, model: str) -> str:
        """The folder of ``student.model`` or of a teacher's."""
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
    wanted = [one for one in _wanted(loaded, further_models) if only in (None, one.key)]
    if not wanted:
        return Located(paths={}, commits={})
    if len(wanted) > MAX_NAMES:
        raise UserError(f"{loaded.path}: names {len(wanted)} models and data sets of the Hub: name at most {MAX_NAMES}")
    return _fetch(wanted if commits is None else _pinned(wanted, commits))


def apply(loaded: Loaded, located: Located) -> Loaded:
    """``loaded.recipe`` with local paths; ``loaded.named`` stays as it is."""
    return dataclasses.replace(
        loaded, recipe=_with_paths(loaded.recipe, located), located=located.paths, commits=located.commits
    )


def unpinned(recipe: Recipe) -> Recipe:
    """``recipe`` without the revisions of its names: which commit they mean is told by the run's ``manifest.json``."""

    def model(text: str) -> str:
        name = hub_model(text)
        return text if name is None else str(dataclasses.replace(name, revision=None))

    def data(text: str) -> list[str]:
        name = hub_data(text)
        return [text if name is None else str(dataclasses.replace(name, revision=None))]

    return _replaced(recipe, model, data)


def _wanted(loaded: Loaded, further_models: Mapping[str, str]) -> Iterator[Wanted]:
    recipe = loaded.recipe
    models: list[tuple[tuple[str, ...], str, bool]] = [(("student",), recipe.student.model, True)]
    for name, teacher in recipe.teachers.items():
        # A stock server has the weights; here its tokenizer is enough.
        placement = teacher.placement
        is_elsewhere = isinstance(placement, ExternalConfig) and placement.protocol == "openai"
        models.append((("teachers", name), teacher.model, not is_elsewhere))
    for path, text, with_weights in models:
        found = hub_model(text)
        if found is not None:
            yield Wanted(
                key=dotted((*path, "model")),
                where=loaded.where(*path, "model"),
                text=text,
                name=found,
                kind="model",
                with_weights=with_weights,
            )
    for option, text in further_models.items():
        found = hub_model(text)
        if found is not None:
            yield Wanted(key=option, where=option, text=text, name=found, kind="model")
    for split, entries in (("train", recipe.data.train), ("validation", recipe.data.validation)):
        for i, file in enumerate(recipe.data.files(entries)):
            found = hub_data(file.path)
            if found is not None:
                where = f"{loaded.where('data', split)}[{i}]"
                yield Wanted(key=f"data.{split}[{i}]", where=where, text=file.path, name=found, kind="data")


def _pinned(wanted: Sequence[Wanted], commits: Mapping[str, str]) -> list[Wanted]:
    """What another machine fetches: the commits that the first one found.

    Raises:
        UserError: the first one has a folder or file of that name.
    """
    for one in wanted:
        if one.key not in commits:
            here = "folder" if one.kind == "model" else "file"
            raise UserError(
                f"{one.where}: {one.text!r} is a {here} on node 0 and none on this node, where it would be a name of "
                "the Hub: let all nodes see it, and start them in one working directory"
            )
    return [
        dataclasses.replace(one, name=one.name.at(commits[one.key].partition("@")[2].partition(":")[0]))
        for one in wanted
    ]


def _fetch(wanted: Sequence[Wanted]) -> Located:
    from huggingface_hub import constants  # heavy, and most recipes never come here

    from mopd.data.hub.fetch import Fetched, fetch_data, fetch_model

    paths: dict[str, Sequence[str]] = {}
    commits: dict[str, str] = {}
    known: dict[tuple[str, HubName, bool], Fetched] = {}
    for one in wanted:
        key = (one.kind, one.name, one.with_weights)
        try:
            if key not in known:
                is_model = one.kind == "model"
                known[key] = fetch_model(one.name, with_weights=one.with_weights) if is_model else fetch_data(one.name)
        except UserError as error:
            here = "folder" if one.kind == "model" else "file"
            raise UserError(
                f"{one.where}: {one.text!r} is no {here} here, and on the Hub ({constants.ENDPOINT}) {error}"
            ) from error
        paths[one.text] = known[key].paths
        commits[one.key] = str(one.name.at(known[key].commit))
    return Located(paths=paths, commits=commits)


def _with_paths(recipe: Recipe, located: Located) -> Recipe:
    return _replaced(recipe, located.path, lambda text: located.paths.get(text, [text]))


def _replaced(recipe: Recipe, model: Callable[[str], str], data: Callable[[str], Sequence[str]]) -> Recipe:
    """With each model's and data entry's text replaced; an entry may become several."""

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
