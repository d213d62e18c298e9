"""The step from a written recipe to a run: the machine's decisions are made here, once, before anything starts.

On several machines node 0 decides for every rank of every node. The others read their own file and arguments only to
hold them against node 0's, and what their machine settles by itself beside it (``FACTS``). The first difference ends
the run before a rank does anything, in one line::

    node 0:  load ─> prepare ─> settled ─────────────────> agreed ─> its ranks
    node n:                        └─> load, compare, fetch ──┘ └──> its ranks

Settled recipes travel as JSON: through the launchers' store (``Nodes.once_per_node``) and their folders, or through
the store of torchrun's agent (``sharing.once_per_machine``).

Light to import: ``mopd config`` needs it too.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mopd.base.files.json_text import read_json_object
from mopd.base.hardware import Hardware, node_name, this_hardware
from mopd.base.types import UserError
from mopd.config.load import Loaded, differences, to_tree
from mopd.config.machine.auto import settle
from mopd.config.reading.build import build_from_json
from mopd.config.reading.tree import split_dotted
from mopd.config.schema import Recipe
from mopd.config.student import StudentConfig
from mopd.conversion.models.adapted import check_lora
from mopd.conversion.models.dims import ModelDims, check_layers, check_layout
from mopd.conversion.models.frozen import check_freeze
from mopd.conversion.models.reading import read_dims
from mopd.conversion.models.sections import check_sections
from mopd.launch import failure, sharing
from mopd.launch.node import compared_environment
from mopd.launch.nodes import Nodes
from mopd.run.locating import Located, apply, locate

FACTS = {
    "command": "start every node with the same command and options",
    "versions": "install the same on every node",
    "environment": "set the same on every node",
    "GPUs": "start the ranks on nodes with one kind of GPU",
    "student.model": "let all nodes read one folder, or copy it anew",
    "plugins": "let all nodes read one file, or copy it anew",
}
"""Facts that each node settles by itself and that must be the same on all nodes of ranks -> cure of a difference."""
MAX_SHOWN = 60
"""Characters of a value in a message; a longer one is shown by its hash."""
BYTES_OF_A_WEIGHT = {"float32": 4, "float16": 2, "bfloat16": 2}


def prepare(
    loaded: Loaded, further_models: Mapping[str, str] | None = None, *, num_nodes: int = 1, only: str | None = None
) -> Loaded:
    """Return the recipe as this machine would run it: without ``auto``, and with local paths in the place of names of
    the Hub, which are fetched. Of several machines node 0 decides for all (``agreed``).

    Args:
        further_models: models of the command line, by option; ``Loaded.located`` holds their paths.
        num_nodes: launchers of the run.
        only: a key of the recipe (``student.model``): no other name is fetched.

    Raises:
        UserError: what does not go together, or cannot be fetched.
    """
    located = locate(loaded, further_models or {}, only=only)
    return apply(settled(loaded, this_hardware(), located.path, num_nodes=num_nodes), located)


def agreed(
    load: Callable[[], Loaded],
    command: str,
    options: Mapping[str, str] | None = None,
    *,
    further_models: Mapping[str, str] | None = None,
    nodes: Nodes | None = None,
) -> Loaded:
    """Return the recipe that this process works by: ``prepare`` on node 0, the same recipe elsewhere.

    Args:
        load: reads the recipe as this node has it; not called in ranks that our launcher has started.
        command: what the ranks do (``train``).
        options: those that decide what each rank does. One that only rank 0 looks at may be another elsewhere.
        further_models: models of the command line, by option.
        nodes: the launchers of the run, where this is one of several.

    Raises:
        UserError: what does not go together, cannot be fetched, or is another on this node than on node 0.
    """
    further = further_models or {}
    number = failure.group_rank() if nodes is None else nodes.place.node_rank
    me = f"node {number} ({node_name()})"
    num_nodes = failure.num_groups() if nodes is None else nodes.place.num_nodes
    options_here = {"the command": command} | {name: shown(value) for name, value in (options or {}).items()}

    def first() -> str:
        own = load()
        made = prepare(own, further, num_nodes=num_nodes)
        if num_nodes == 1:
            return json.dumps(_account(made))
        of_ranks = rank_facts(made, num_local_ranks(made.recipe, num_nodes))
        facts = {"command": options_here} | _machine_facts() | of_ranks
        return json.dumps(_account(made) | {"written": to_tree(own.recipe), "facts": facts, "node": me})

    def others(text: str) -> str:
        theirs = json.loads(text)

        def compare(differences: Iterable[tuple[str, str, str, str]]) -> None:
            _refuse(me, theirs["node"], list(differences))

        compare(_other_facts(_machine_facts(), theirs["facts"]))  # first: another mopd has other keys
        compare(_other_facts({"command": options_here}, theirs["facts"]))
        own = load()
        compare(_other_values(own, theirs["written"]))
        made = _from_account(theirs)
        made = apply(made, locate(made, further, commits=made.commits))
        compare(_other_facts(rank_facts(made, num_local_ranks(made.recipe, num_nodes)), theirs["facts"]))
        return json.dumps(_account(made))

    if failure.is_rank():
        text = sharing.from_launcher() or sharing.once_per_machine(first, others)
    elif nodes is None:
        text = first()
    else:
        text = nodes.once_per_node(first, others)
        nodes.meet("one recipe")
    return recipe_of_task({"account": json.loads(text)})


def for_ranks(loaded: Loaded) -> str:
    """Return the text that the launcher shares with the ranks of this machine."""
    return json.dumps(_account(loaded))


def task_of(loaded: Loaded, what: str, options: Mapping[str, Any], log: Path | None) -> str:
    """Return the orchestrator's task as JSON: the recipe, resolved once, and the task's own options."""
    rest = {"what": what, "options": dict(options), "log": None if log is None else str(log)}
    return json.dumps({"account": _account(loaded), **rest})


def recipe_of_task(task: Mapping[str, Any]) -> Loaded:
    """Return the recipe in a task that ``task_of`` has made."""
    made = _from_account(task["account"])
    return apply(made, Located(paths=made.located, commits=made.commits))


def shown(value: Any) -> str:
    """Return a recipe's value as it stands in a message."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_SHOWN else f"sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def settled(loaded: Loaded, hardware: Hardware, folder: Callable[[str], str] = str, *, num_nodes: int = 1) -> Loaded:
    """Replace every ``auto`` by a value (``config/machine/auto.py``), with the reason as its origin. ``folder`` returns
    the path of a model of the recipe.

    Raises:
        UserError: file and key of what another choice needs.
    """
    recipe = loaded.recipe
    models = {"student": recipe.student.model, **{f"teachers.{n}": t.model for n, t in recipe.teachers.items()}}
    sizes = {key: num_weights(Path(folder(model))) for key, model in models.items()} if hardware.num_gpus else {}
    try:
        made = settle(recipe, hardware, num_ranks=num_local_ranks(recipe, num_nodes), num_weights=sizes)
    except ValueError as error:
        raise UserError(f"{loaded.path}: {error}") from error
    return loaded.settled(made.recipe, made.reasons)


def num_local_ranks(recipe: Recipe, num_nodes: int) -> int:
    """Return the number of trainer ranks on this machine, one of ``num_nodes``."""
    return failure.local_world_size() if failure.is_rank() else recipe.student.parallel.world_size // num_nodes


def weights_bytes(folder: Path) -> int | None:
    """Return the size of a model folder's safetensors; ``None`` for a folder without any."""
    sizes = [file.stat().st_size for file in folder.glob("*.safetensors")]
    return sum(sizes) if sizes else None


def num_weights(folder: Path) -> int | None:
    """Return the number of a model folder's weights, by the size of its files; ``None`` without files, or for an
    unusual dtype."""
    size, config = weights_bytes(folder), folder / "config.json"
    if size is None or not config.is_file():
        return None
    keys = read_json_object(config, cure="name the folder of a Hugging Face checkpoint")
    each = BYTES_OF_A_WEIGHT.get(str(keys.get("dtype", keys.get("torch_dtype"))))
    return None if each is None else size // each


def check_student_layout(student: StudentConfig) -> ModelDims:
    """Check that layout and sections fit the model, whose folder is here; return the model's sizes."""
    dims = read_dims(Path(student.model))
    check_layout(dims, student.parallel)
    check_layers(dims, student.transformer_impl)
    check_lora(dims, student)
    check_freeze(dims, student)
    check_sections(dims, student)
    return dims


def _account(loaded: Loaded) -> dict[str, Any]:
    rest = {field.name: getattr(loaded, field.name) for field in dataclasses.fields(Loaded) if field.name != "named"}
    account: dict[str, Any] = to_tree(rest | {"recipe": loaded.named})
    return account


def _from_account(account: Mapping[str, Any]) -> Loaded:
    """Invert ``_account``, whose ``recipe`` has models and data as the user names them."""
    fields = {field.name: account[field.name] for field in dataclasses.fields(Loaded) if field.name in account}
    recipe = build_from_json(Recipe, account["recipe"], account["path"])
    return Loaded(**{**fields, "recipe": recipe, "named": recipe, "sources": tuple(account["sources"])})


def _machine_facts() -> dict[str, dict[str, str]]:
    """Return those of ``FACTS`` that need no recipe: kind -> name -> value."""
    from mopd.run.machine import package_versions  # heavy: torch

    return {"versions": package_versions(), "environment": compared_environment()}


def rank_facts(loaded: Loaded, num_ranks: int) -> dict[str, dict[str, str]]:
    """Return those of ``FACTS`` that need the recipe, on a machine with ``num_ranks`` of the ranks."""
    from mopd.run.machine import kinds_of_gpus  # heavy: torch
    from mopd.run.manifests import glimpse, plugin_hashes

    files, where = glimpse(Path(loaded.recipe.student.model)), loaded.where("student", "model")
    return {
        "GPUs": {"the ranks' GPU": kinds_of_gpus(num_ranks)},
        "student.model": {f"{where}: {name}": digest for name, digest in files.items()},
        "plugins": {
            key: f"sha256 {digest[:16]}" for key, digest in plugin_hashes(loaded.recipe, of_ranks=True).items()
        },
    }


def _other_values(own: Loaded, written: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """Yield key, this node's value, node 0's and the cure of each difference."""
    cure = "start every node with one recipe file and the same overrides"
    for key, (here, there) in differences(own.recipe, written).items():
        yield own.where(*split_dotted(key)), shown(here), shown(there), cure


def _other_facts(
    own: Mapping[str, Mapping[str, str]], theirs: Mapping[str, Mapping[str, str]]
) -> Iterator[tuple[str, str, str, str]]:
    for kind, here in own.items():
        there = theirs[kind]
        for name in dict.fromkeys([*there, *here]):
            if here.get(name) != there.get(name):
                yield name, here.get(name, "absent"), there.get(name, "absent"), FACTS[kind]


def _refuse(me: str, first: str, found: list[tuple[str, str, str, str]]) -> None:
    """Raise ``UserError`` for the first difference; several mostly have one cause."""
    if found:
        what, here, there, cure = found[0]
        more = f" (and {len(found) - 1} more differences)" if len(found) > 1 else ""
        raise UserError(f"{what} is {here} on {me} and {there} on {first}{more}: {cure}")
