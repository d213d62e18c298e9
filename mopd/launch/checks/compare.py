"""What nodes tell of themselves, held against one another: the one that differs is named, with the key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from mopd.launch.checks.facts import NodeFacts
from mopd.launch.checks.inputs import Check
from mopd.launch.preparing import FACTS

MAX_NAMED = 4
"""Nodes in one line."""
GPU_SHM_BYTES = 2**30
"""What NCCL and vLLM share between the processes of a node; containers begin with 64 MiB."""


def compare(facts: Sequence[NodeFacts]) -> Iterator[Check]:
    """Outcomes, one line each; of nodes that came."""
    for one in facts:
        for problem in one.problems:
            yield Check(one.name, "failed", f"{one.name}: {problem}")
    names = [one.name for one in facts]
    twice = [name for name, count in Counter(names).items() if count > 1]
    yield _outcome("versions", _differences(names, [one.versions for one in facts]), _versions(facts[0]))
    whole = [one for one in facts if one.is_complete]
    if whole:
        own = [one.name for one in whole]
        recipes = _differences(own, [one.recipe for one in whole], cure="start every node with one recipe file")
        yield _outcome("recipe", recipes, f"{len(whole[0].recipe)} values")
        models = list(_models(whole))
        yield from models
        yield from _start(whole, are_models_equal=all(check.status == "ok" for check in models))
    yield from _gpus(facts)
    small = [one.name for one in facts if one.gpus and one.shm_bytes < GPU_SHM_BYTES]
    least = min(one.shm_bytes for one in facts)
    yield _outcome(
        "/dev/shm",
        [f"{_named(small)}: /dev/shm has {least / 2**20:.0f} MiB, a node with GPUs needs {GPU_SHM_BYTES / 2**20:.0f}: "
         "give the container more (--shm-size, --ipc=host)"] if small else [],
        f"{least / 2**30:.1f} GiB at least",
    )  # fmt: skip
    if twice:
        yield Check("names", "warning", f"several nodes call themselves {_named(twice)}")


def _versions(one: NodeFacts) -> str:
    return ", ".join(f"{name} {version}" for name, version in one.versions.items())


def _models(facts: Sequence[NodeFacts]) -> Iterator[Check]:
    for where in dict.fromkeys(where for one in facts for where in one.models):
        having = [one for one in facts if where in one.models]
        problems = _differences(
            [one.name for one in having],
            [one.models[where] for one in having],
            head=f"{where}: ",
            cure="let all nodes read one folder, or copy it anew",
        )
        yield _outcome(where, problems, ", ".join(f"{k} {v}" for k, v in having[0].models[where].items()))


def _start(facts: Sequence[NodeFacts], *, are_models_equal: bool) -> Iterator[Check]:
    """What a start would refuse; files of a model that is another one need no second line."""
    for kind, cure in FACTS.items():
        having = [one for one in facts if kind in one.start]
        if having and (are_models_equal or kind != "student.model"):
            values = [one.start[kind] for one in having]
            problems = _differences([one.name for one in having], values, cure=cure)
            yield _outcome(f"ranks: {kind}", problems, f"equal on {len(having)} nodes")


def _gpus(facts: Sequence[NodeFacts]) -> Iterator[Check]:
    kinds = [", ".join(f"{n} x {kind}" for kind, n in Counter(one.gpus).items()) or "no GPU" for one in facts]
    common = _most_common(kinds)
    others = [f"{one.name} has {kind}" for one, kind in zip(facts, kinds, strict=True) if kind != common]
    if others:
        yield Check("GPUs", "warning", f"most nodes have {common}, but {'; '.join(others[:MAX_NAMED])}")
    else:
        yield Check("GPUs", "ok", f"{common} on each of {len(facts)} nodes")


def _differences(
    names: Sequence[str],
    values: Sequence[Mapping[str, str]],
    *,
    head: str = "",
    cure: str = "install the same on every node",
) -> list[str]:
    """A line for each key whose values are not equal; the nodes that most others disagree with stand first."""
    found = []
    for key in dict.fromkeys(key for value in values for key in value):
        shown = [value.get(key, "absent") for value in values]
        common = _most_common(shown)
        odd = [(name, value) for name, value in zip(names, shown, strict=True) if value != common]
        if odd:
            among = [name for name, value in odd if value == odd[0][1]]
            other = next(name for name, value in zip(names, shown, strict=True) if value == common)
            found.append(f"{_named(among)}: {head}{key} is {odd[0][1]} there and {common} on {other}: {cure}")
    return found


def _most_common(values: Sequence[str]) -> str:
    """Of equally common ones the first."""
    return Counter(values).most_common(1)[0][0]


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more


def _outcome(name: str, problems: Sequence[str], detail: str) -> Check:
    """One outcome; several problems are one line, as most have one cause."""
    if not problems:
        return Check(name, "ok", detail)
    more = f" (and {len(problems) - 1} more differences)" if len(problems) > 1 else ""
    return Check(name, "failed", f"{problems[0]}{more}")
