"""What a run was, on one card: from its recipe and what it found on its machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DEGREES = {
    "tensor": "tensor_model_parallel_size",
    "context": "context_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "data": "data_parallel_size",
}
LOSS_TYPE = "type"


def card(recipe: Mapping[str, Any], machine: Mapping[str, Any] | None) -> dict[str, list[str]]:
    """Heading -> lines. Folders and models are as the recipe spells them.

    Args:
        recipe: values of ``recipe.yaml``, of this version or another: what is not there is left out.
        machine: ``machine.json``; ``None`` where the run kept none.
    """
    teachers = _at(recipe, "teachers")
    lines = {
        "Student": [_joined(_at(recipe, "student", "model"), _at(recipe, "student", "dtype"))],
        "Teachers": [_teacher(name, teacher) for name, teacher in _items(teachers)],
        "Rollout": [_joined(_group(_at(recipe, "rollout")))],
        "Loss": [_loss(_at(recipe, "loss"))],
        "Schedule": [_schedule(recipe)],
        "Layout": [_layout(_at(recipe, "student", "parallel"))],
        "Hardware": [] if machine is None else [_hardware(machine)],
        "Packages": [] if machine is None else [", ".join(f"{k} {v}" for k, v in machine["packages"].items())],
    }
    return {heading: kept for heading, texts in lines.items() if (kept := [text for text in texts if text])}


def _teacher(name: str, teacher: Any) -> str:
    domains = _at(teacher, "domains")
    named = ", ".join(map(str, domains)) if isinstance(domains, list) else ""
    if _at(teacher, "default") is True:
        named = f"{named}, all others" if named else "all domains"
    return f"{name}: {_joined(_at(teacher, 'model'), named, _group(teacher))}"


def _group(group: Any) -> str:
    """Engine, placement and number of replicas."""
    parts = [_at(group, "engine", "type"), _at(group, "engine", "dtype"), _at(group, "placement", "type")]
    replicas = _at(group, "replicas")
    if isinstance(replicas, int) and replicas > 1:
        parts.append(f"{replicas} replicas")
    return ", ".join(str(part) for part in parts if part is not None)


def _loss(loss: Any) -> str:
    """Its type, and every plain setting that is there."""
    values = {key: value for key, value in _items(loss) if value is not None and not isinstance(value, (dict, list))}
    settings = (f"{key} {value}" for key, value in values.items() if key != LOSS_TYPE)
    return _joined(values.get(LOSS_TYPE), ", ".join(settings))


def _schedule(recipe: Mapping[str, Any]) -> str:
    counts = {
        "steps": _at(recipe, "schedule", "steps"),
        "prompts": _at(recipe, "schedule", "prompts_per_step"),
        "responses": _at(recipe, "rollout", "samples_per_prompt"),
    }
    rate = _at(recipe, "student", "optimizer", "lr")
    return _joined(
        " × ".join(f"{value} {what}" for what, value in counts.items() if value is not None),
        None if rate is None else f"learning rate {rate}",
    )


def _layout(parallel: Any) -> str:
    degrees = {name: _at(parallel, key) for name, key in DEGREES.items()}
    if not all(isinstance(degree, int) for degree in degrees.values()):
        return ""
    ranks = degrees["tensor"] * degrees["pipeline"] * degrees["data"]
    experts = _at(parallel, "expert_model_parallel_size")
    return _joined(
        f"{' × '.join(f'{name} {degree}' for name, degree in degrees.items())} = {ranks} "
        f"{'rank' if ranks == 1 else 'ranks'}",
        f"experts over {experts}" if isinstance(experts, int) and experts > 1 else None,
        "sequence parallel" if _at(parallel, "sequence_parallel") is True else None,
    )


def _hardware(machine: Mapping[str, Any]) -> str:
    gpus = machine["gpus"]
    counted = ", ".join(f"{gpus.count(name)} × {name}" for name in dict.fromkeys(gpus))
    cores = f"{machine['num_cores']} cores of {machine['cpu'] or 'a CPU'}"
    return _joined(counted or "no GPU", cores, f"{machine['memory_gib']:.0f} GiB of memory")


def _at(tree: Any, *path: str) -> Any:
    """What stands there; ``None`` for what does not."""
    for key in path:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree


def _items(tree: Any) -> list[tuple[str, Any]]:
    return list(tree.items()) if isinstance(tree, Mapping) else []


def _joined(*parts: Any) -> str:
    return " · ".join(str(part) for part in parts if part not in (None, ""))
