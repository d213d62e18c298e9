"""Output of a plan: tables, and plain values for ``--json``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table

from mopd.config.machine.places import STUDENT, Places, Tenant
from mopd.config.reading.tree import dotted
from mopd.planning.balance import ROLLOUT, StepTimes
from mopd.planning.devices import GIB, SHARES, Rates
from mopd.planning.measured import PlannedAndMeasured
from mopd.planning.memory.ranks import HostPlan, RankPlan
from mopd.planning.memory.replicas import ReplicaPlan
from mopd.planning.plan import RunPlan
from mopd.planning.suggest import Help, Suggestion
from mopd.planning.updates import WeightUpdate
from mopd.planning.vision import TowerPlan
from mopd.report.terminal import Terminal

BAR = 38
"""Characters of a step in its picture."""
UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def plain(plan: RunPlan, rates: Rates | None) -> dict[str, Any]:
    """Return the plan as plain values, every number in bytes or seconds."""
    return {
        "cluster": {**dataclasses.asdict(plan.cluster), "usable_bytes": plan.cluster.usable_bytes},
        "samples": dataclasses.asdict(plan.work),
        "places": [dataclasses.asdict(tenant) for tenant in plan.places.tenants],
        "elsewhere": list(plan.places.elsewhere),
        "ranks": list(map(_sized, plan.ranks)),
        "replicas": {key: _sized(one) for key, one in plan.replicas.items()},
        "hosts": list(map(_sized, plan.hosts)),
        "links": [dataclasses.asdict(link) for link in plan.links],
        "vision_tower": None if plan.tower is None else dataclasses.asdict(plan.tower),
        "student": {"weights": plan.student_weights, "adapters": plan.adapters},
        "lm_head": [dataclasses.asdict(head) for head in plan.heads],
        "rates": None if rates is None else dataclasses.asdict(rates),
        "shares": {name: dataclasses.asdict(share) for name, share in SHARES.items()},
        "checkpoint_bytes": plan.checkpoint_bytes,
        "checkpoints_kept": plan.checkpoints_kept,
        "times": _plain_times(plan),
        "update": None if plan.update is None else dataclasses.asdict(plan.update),
        "problems": [{"key": dotted(path), "problem": text} for path, text in plan.problems],
    }


def _sized(part: RankPlan | ReplicaPlan | HostPlan) -> dict[str, Any]:
    return {**dataclasses.asdict(part), "num_bytes": part.num_bytes}


def _plain_times(plan: RunPlan) -> dict[str, Any] | None:
    times = plan.times
    if times is None:
        return None
    return {
        "step_s": times.step_s,
        "bound_by": times.bound_by,
        "stages": times.seconds,
        "spans": [{"what": name, "start_s": start, "end_s": end} for name, start, end in times.spans],
        "groups": {name: dataclasses.asdict(time) for name, time in times.groups.items()},
        "trainer": dict(plan.trainer),
        "balanced_replicas": dict(plan.balanced),
    }


def plain_suggestions(found: Sequence[Suggestion]) -> list[dict[str, Any]]:
    """Return suggestions as plain values, the fastest first."""
    return [
        {
            "keys": one.keys,
            "gpus": one.split.gpus,
            "step_s": one.split.times.step_s,
            "bound_by": one.split.times.bound_by,
            "num_bytes": one.num_bytes,
        }
        for one in found
    ]


def show(plan: RunPlan, rates: Rates | None) -> None:
    """Print the tables."""
    console = Terminal()
    work = plan.work
    console.print(
        f"a step: {work.samples} samples of {work.prompt_tokens:.0f} + {work.response_tokens:.0f} tokens "
        f"({work.source})"
    )
    if plan.tower is not None:
        console.print(_tower_line(plan.tower, work.image_tokens))
    if plan.adapters:
        share = plan.adapters / (plan.adapters + plan.student_weights)
        console.print(
            f"adapters: {plan.adapters / 1e6:.4g} M weights are trained beside {plan.student_weights / 1e6:.4g} M that "
            f"are not ({share:.2%})"
        )
    console.print(_places_table(plan.places))
    console.print(_memory_table(plan))
    kept, size = plan.checkpoints_kept, plan.checkpoint_bytes
    each, on_disk = f"{size / GIB:.{int(size < GIB)}f} GiB", _bytes((kept + 1) * size)
    console.print(f"a checkpoint has {each}, and {kept} are kept: {on_disk} of disk while another is written")
    console.print(_links_table(plan))
    if plan.heads:
        console.print(_head_table(plan))
    if plan.times is None:
        console.print("no times: --gpu names GPUs of the table, --probe measures this machine")
        return
    console.print(_stage_table(plan))
    if plan.update is not None:
        console.print(_update_table(plan.update))
    times = plan.times
    kind = f"max_staleness {times.max_staleness}" if times.max_staleness else "synchronous"
    bound = times.bound_by.replace("_", " ")
    console.print(f"step  {times.step_s:.3g} s ({kind}), bound by {bound}")
    for line in [*_picture(times), *_never_keep_up(plan)]:
        console.print(line)
    if rates is not None:
        console.print(f"rates  {rates.source}")


def _tower_line(tower: TowerPlan, image_tokens: float) -> str:
    images = f"{image_tokens:.0f} image tokens a sample" if image_tokens else "no images counted: give --image-length"
    return (
        f"vision tower: {tower.weights / 1e6:.4g} M weights, {tower.trained / 1e6:.4g} M of them trained, "
        f"{tower.flops_per_token / 1e9:.3g} GFLOP an image token ({images})"
    )


def _places_table(places: Places) -> Table:
    table = Table("where", "who", "GPUs")
    rows: dict[tuple[int, int, str], list[Tenant]] = {}
    for tenant in places.tenants:
        for node in range(tenant.node, tenant.node + tenant.num_nodes):
            rows.setdefault((tenant.component, node, tenant.key), []).append(tenant)
    for (component, node, key), own in sorted(rows.items(), key=lambda row: row[0][:2]):
        who = "ranks" if key == STUDENT else f"{key} replicas" if len(own) > 1 else f"{key} replica"
        gpus = " ".join("+".join(map(str, tenant.gpus)) for tenant in own if tenant.gpus)
        chosen = "" if own[0].is_fixed or not gpus else " (or others: Ray's choice)"
        where = f"{key}, node {node}" if component else f"node {node}"
        table.add_row(where, f"{who} {_range(tenant.number for tenant in own)}", f"{gpus}{chosen}" or "-")
    for key in places.elsewhere:
        table.add_row("elsewhere", key, "-")
    return table


def _range(numbers: Iterable[int]) -> str:
    ordered = sorted(numbers)
    if ordered[-1] - ordered[0] >= len(ordered):
        return ", ".join(map(str, ordered))
    return str(ordered[0]) if len(ordered) == 1 else f"{ordered[0]}-{ordered[-1]}"


def _memory_table(plan: RunPlan) -> Table:
    table = Table("memory", "GiB", "of", "parts, GiB")
    limit = f"{plan.cluster.usable_bytes / GIB:.1f}"
    for rank in plan.ranks:
        name = "each rank" if len(plan.ranks) == 1 else f"ranks of stage {rank.stage}, {rank.num_layers} layers"
        own = sum(rank.parts.values())
        table.add_row(name, f"{own / GIB:.2f}", limit, _parts(rank.parts))
        if rank.rollout_turn:
            turn = sum(rank.rollout_turn.values())
            table.add_row(f"{name}, rollout's turn", f"{turn / GIB:.2f}", limit, _parts(rank.rollout_turn))
        if rank.shared:
            table.add_row("rank 0 with engines", f"{rank.num_bytes / GIB:.2f}", limit, _parts(rank.shared))
    for key, one in plan.replicas.items():
        room = f"; {one.sequences} sequences" if one.cache_tokens else ""
        room += f"; weights stored as {one.stored}" if one.stored else ""
        per = "" if one.gpus == 1 else f" (each of {one.gpus} GPUs)"
        table.add_row(f"{key}{per}", f"{one.num_bytes / GIB:.2f}", limit, _parts(one.parts) + room)
    alike: dict[str, list[HostPlan]] = {}
    for host in plan.hosts:
        alike.setdefault(f"{host.component} {_parts(host.parts)}", []).append(host)
    known = f"{plan.cluster.usable_host_bytes / GIB:.0f}" if plan.cluster.host_bytes else ""
    for first, *more in alike.values():
        which = f"{'nodes' if more else 'node'} {_range(host.node for host in (first, *more))}"
        name = f"host of {which}" + (f" of component {first.component}" if first.component else "")
        table.add_row(name, f"{first.num_bytes / GIB:.2f}", known, _parts(first.parts))
    return table


def _parts(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {_digits(size / GIB)}" for name, size in parts.items() if size)


def _links_table(plan: RunPlan) -> Table:
    table = Table("bytes of a step", "in all", "each", "a response token")
    for link in plan.links:
        token = _bytes(link.num_bytes / link.rows) if link.rows else ""
        table.add_row(link.name, _bytes(link.num_bytes), f"{_bytes(link.bytes_each)} a {link.each}", token)
    return table


def _head_table(plan: RunPlan) -> Table:
    table = Table("LM head at TP", "ours, GiB", "rank, GiB", "an eager loss, GiB", "rank with it")
    for head in plan.heads:
        eager = head.rank_bytes - head.ours_bytes + head.eager_bytes
        table.add_row(
            str(head.tensor_model_parallel_size),
            f"{head.ours_bytes / GIB:.2f}",
            f"{head.rank_bytes / GIB:.1f} {_fits(head.fits)}",
            f"{head.eager_bytes / GIB:.2f}",
            f"{eager / GIB:.1f} {_fits(head.fits_eager)}",
        )
    return table


def _fits(fits: bool) -> str:
    return "fits" if fits else "does not fit"


def _stage_table(plan: RunPlan) -> Table:
    assert plan.times is not None
    table = Table("stage", "busy, s a step", "bound by", "replicas", "to keep up with the trainer")
    for name, seconds in plan.times.seconds.items():
        group = plan.times.groups.get(name)
        replicas = len(plan.places.of(name.replace("/", ".", 1))) if group else 0
        bound = group.bound if group else ", ".join(f"{part} {s:.3g}" for part, s in plan.trainer.items() if s)
        balanced = plan.balanced.get(name)
        table.add_row(
            name.replace("_", " "),
            f"{seconds:.3g}",
            bound if name in ("trainer", *plan.times.groups) else "",
            str(replicas) if group else "",
            ("none does" if balanced is None else str(balanced)) if group else "",
        )
    return table


def _picture(times: StepTimes) -> list[str]:
    """Return a line for each thing of a step, with a bar from its start to its end."""
    width = max(len(name) for name, _, _ in times.spans)
    lines = []
    for name, start, end in times.spans:
        first, last = (round(BAR * seconds / times.step_s) for seconds in (start, end))
        bar = f"{' ' * min(first, BAR - 1)}{'█' * max(1, last - first)}"
        lines.append(f"{name.replace('_', ' '):{width}}  {bar:{BAR}}  {end - start:.3g} s")
    return lines


def _never_keep_up(plan: RunPlan) -> list[str]:
    """Return a sentence for each group that no number of replicas makes as fast as the trainer."""
    assert plan.times is not None
    return [
        f"{name}: no number of replicas keeps up with the trainer's {plan.times.trainer_s:.3g} s, as one sample alone "
        "takes longer: raise schedule.max_staleness, prompts_per_step or the engine's tensor_parallel_size"
        for name, count in plan.balanced.items()
        if count is None
    ]


def _update_table(update: WeightUpdate) -> Table:
    table = Table("weights by", "bytes", "parts", "from, to", "nodes", "s an update", "bound by")
    chain, seconds = f"{update.senders}, {update.receivers}", f"{update.seconds:.3g}"
    numbers = (_bytes(update.num_bytes), str(update.parts), chain, str(update.nodes), seconds)
    table.add_row(update.way, *numbers, update.bound)
    return table


def show_comparison(rows: Sequence[PlannedAndMeasured], bound_planned: str | None, bound_measured: str) -> None:
    """Print the numbers of plan and run side by side."""
    console = Terminal()
    table = Table("plan beside the run", "planned", "measured", "ratio")
    for row in rows:
        write = _bytes if row.unit == "bytes" else _seconds
        ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
        table.add_row(row.what.replace("_", " "), write(row.planned), write(row.measured), ratio)
    console.print(table)
    named = "" if bound_planned is None else f"; planned: {bound_planned.replace('_', ' ')}"
    console.print(f"slowest stage, measured: {bound_measured.replace('_', ' ')}{named}")


def show_suggestions(found: Sequence[Suggestion], helps: Sequence[Help], keys: str) -> None:
    """Print the suggestions, what would help further, and the ``keys`` that the first one sets."""
    console = Terminal()
    table = Table("student", "GPUs", "replicas", "step, s", "bound by", "fullest GPU, GiB")
    for one in found:
        times = one.split.times
        table.add_row(
            one.split.trainer.label,
            str(one.split.trainer.gpus),
            ", ".join(f"{name} {count}{_degrees(name, one)}" for name, count in one.split.replicas.items()),
            f"{times.step_s:.3g}",
            times.bound_by.replace("_", " "),
            f"{one.num_bytes / GIB:.1f}",
        )
    console.print(table)
    for help_ in helps:
        console.print(f"with {help_.change}: {help_.step_s:.3g} s, bound by {help_.bound_by.replace('_', ' ')}")
    console.print("set for the first:")
    for line in keys.splitlines():
        console.print(line)


def _degrees(stage: str, found: Suggestion) -> str:
    """Return the GPUs of a suggested group's replica; nothing of a single one."""
    section = found.keys if stage == ROLLOUT else found.keys["teachers"]
    engine = section[stage.removeprefix("teachers/")]["engine"]
    tp, stages = engine["tensor_parallel_size"], engine.get("pipeline_parallel_size", 1)
    return (f" x TP {tp}" if tp > 1 else "") + (f" PP {stages}" if stages > 1 else "")


def _digits(value: float) -> str:
    """Return a number with two digits behind the point, or the first digit that is not 0."""
    return f"{value:.2f}" if value >= 0.01 else f"{value:.1g}"


def _seconds(value: float) -> str:
    return f"{value:.3g} s"


def _bytes(value: float) -> str:
    for size, unit in UNITS:
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f} B"
