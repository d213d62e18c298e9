"""``report.html``: one page without outside references, made of plain records. Texts of users and models are escaped.

Its card says what the run was, from the recipe and what the run found on its machine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from mopd.report.charts import NUM_COLOURS, Point, Series, cell, colour, histogram, line_chart, named_series, short
from mopd.report.curves import (
    GRADIENT_COSINE,
    SHARES,
    Curves,
    curves_by_metric,
    in_words,
    is_zero,
    mean_shares,
    panel_of,
    percents,
    phase_name,
)
from mopd.report.groups import group_values, label
from mopd.report.intervals import show_interval
from mopd.report.pipeline import stage_label, stage_seconds
from mopd.report.run_files import RunFiles

HEATS = (0.1, 0.5, 1.5, 4.0)
"""Nats from which a token's ground is one shade darker."""
MAIN = ("kl_k1", "loss", "topk_overlap")
"""Metrics whose charts are open; the others are folded."""
REWARD = ("Validation reward", "Mean on held-out prompts; dotted: each domain’s teacher.")
GROUP_CHARTS = {
    "tokens_per_s": ("tokens per second", "While the group had work; prompts and responses."),
    "latency_p95_s": ("seconds per request, p95", "From sending to the answer."),
    "queue_depth": ("waiting requests", "The most in a step that waited for a replica."),
}
"""Metric of groups -> heading and explanation of its chart."""
GROUP_COLUMNS = {
    "samples": "samples",
    "tokens_per_s": "tokens/s",
    "latency_p50_s": "p50",
    "latency_p95_s": "p95",
    "latency_p99_s": "p99",
    "queue_depth": "waiting",
    "in_flight_tokens": "tokens under way",
    "payload_bytes": "payload",
    "retries": "retries",
    "failures": "failures",
}
"""Key of ``report.json`` -> heading of its column."""
STAGE_COLOURS = {"busy": 0, "starved": 7, "blocked": 1}
"""Share of a stage's time -> number of its colour."""


def render_page(
    report: Mapping[str, Any],
    files: RunFiles,
    recipe: Mapping[str, Any],
    steps: Sequence[Mapping[str, Any]],
    validations: Sequence[Mapping[str, Any]],
    evidence: Sequence[str],
) -> str:
    """Return the page as text.

    Args:
        report: content of ``report.json``.
        files: the run folder, for what else it holds.
        recipe: values of the resolved recipe.
        steps, validations: records of ``metrics.jsonl`` and ``validation.jsonl``.
        evidence: lines on what stands behind the rewards.
    """
    curves = curves_by_metric(steps)
    pairs = curves.pop(GRADIENT_COSINE, {})
    domains = sorted({*report["domains"], *(domain for curve in curves.values() for domain in curve if domain)})
    teachers = {name: result["teacher"] for name, result in report["domains"].items()}
    others = {name: curve for name, curve in sorted(curves.items()) if name not in MAIN and name not in SHARES}
    has_shares = any(len(curves.get(name, {})) > 1 for name in SHARES)
    group_charts = _group_charts(steps)
    return render(
        "report.html.j2",
        run_name=files.path.resolve().name,
        report=report,
        evidence=evidence,
        num_recovered=sum(one["headroom_recovery"] is not None for one in report["domains"].values()),
        card=card(recipe, files.machine_record()),
        domains=domains,
        bars=[_bar(name, domains.index(name), result) for name, result in report["domains"].items()],
        reward_chart=_reward_chart(validations, domains, teachers),
        main_charts=_charts({name: curves[name] for name in MAIN if name in curves}, domains),
        share_charts=_charts({name: curves[name] for name in SHARES if name in curves}, domains) if has_shares else [],
        share_rows=mean_shares(curves, domains) if has_shares else [],
        share_headings=[in_words(name) for name in SHARES],
        pairs_chart=_pairs_chart(pairs) if pairs else None,
        other_charts=_charts({name: curve for name, curve in others.items() if not is_zero(curve)}, domains),
        zero_charts=_charts({name: curve for name, curve in others.items() if is_zero(curve)}, domains),
        group_headings=list(GROUP_COLUMNS.values()),
        group_rows=[
            {"name": label(room, name), "cells": [_group_cell(key, one[key]) for key in GROUP_COLUMNS]}
            for room, names in report["groups"].items()
            for name, one in names.items()
        ],
        group_charts=[chart for chart in group_charts if not chart["is_zero"]],
        zero_group_charts=[chart for chart in group_charts if chart["is_zero"]],
        examples=_examples(validations, report["best_step"], files.teacher_examples()),
        traces=_traces(files.last_traces()),
        pipeline=_pipeline(report["pipeline"], steps) if report["pipeline"] else None,
        ages=_ages(report["samples"]) if report["samples"] else None,
        phases=_phases(report["phases"]),
        step_title=phase_name("step"),
        recipe_lines=[_recipe_line(line) for line in files.recipe_text().splitlines()],
    )


def render(template: str, **values: Any) -> str:
    """Fill a template of this folder."""
    form: dict[str, Any] = {
        "autoescape": True,
        "undefined": StrictUndefined,
        "trim_blocks": True,
        "lstrip_blocks": True,
    }
    environment = Environment(loader=PackageLoader("mopd.report", "."), **form)
    environment.globals["num_colours"] = NUM_COLOURS
    environment.filters |= {
        "colour": colour,
        "short": short,
        "percent": lambda value: cell(value, "{:.0%}"),
        "interval": show_interval,
        "reward": lambda value: cell(value, "{:.3f}"),
        "duration": duration,
        "number": lambda value: cell(value, short),
    }
    return environment.get_template(template).render(values)


def chart(
    title: str, text: str, series: Sequence[Series], *, metric: str = "", from_zero: bool = True
) -> dict[str, Any]:
    """Make one figure of a page: title and text in words, with the metric's name."""
    return _figure(title, text, line_chart(series, label=f"{title} over steps", from_zero=from_zero), metric)


def _figure(title: str, text: str, svg: Markup, metric: str) -> dict[str, Any]:
    return {"title": title, "text": text, "metric": metric, "svg": svg, "legend": []}


def duration(seconds: float) -> str:
    """Write seconds as ``1 h 5 min``, ``2 min 10 s`` or ``7 s``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _charts(curves: Curves, domains: list[str]) -> list[dict[str, Any]]:
    charts = []
    for metric, by_domain in curves.items():
        panel = panel_of(metric)
        series = []
        for domain, points in sorted(by_domain.items()):
            name, index = (domain, domains.index(domain)) if domain else (panel.title, 0)
            series.append(Series(name=name, index=index, points=points, is_noisy=panel.is_noisy))
        charts.append(chart(panel.title, panel.text, series, metric=metric, from_zero=panel.from_zero))
    return charts


def _pairs_chart(pairs: Mapping[str, list[Point]]) -> dict[str, Any]:
    """Make a chart with a curve for each pair of domains."""
    panel = panel_of(GRADIENT_COSINE)
    series = named_series(
        {pair.replace("|", " and "): points for pair, points in sorted(pairs.items())}, is_noisy=False
    )
    return {**chart(panel.title, panel.text, series, metric=GRADIENT_COSINE, from_zero=False), "legend": series}


def _group_charts(steps: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Make a chart for each room and metric, with a curve for each group (replicas are in the table only)."""
    points: dict[tuple[str, str], dict[str, list[Point]]] = {}
    for record in steps:
        for room, names in group_values(record).items():
            for name, values in names.items():
                for metric in GROUP_CHARTS:
                    if metric in values and "replicas" in values:
                        curves = points.setdefault((room, metric), {})
                        curves.setdefault(name, []).append((record["step"], values[metric]))
    charts = []
    for (room, metric), curves in points.items():
        heading, text = GROUP_CHARTS[metric]
        named = {label(room, name): curve for name, curve in sorted(curves.items())}
        series = named_series(named, is_noisy=metric != "queue_depth")
        made = chart(f"{in_words(room)}: {heading}", text, series, metric=f"{room}/{metric}")
        charts.append({**made, "legend": series if len(series) > 1 else [], "is_zero": is_zero(curves)})
    return charts


def _reward_chart(
    validations: Sequence[Mapping[str, Any]], domains: list[str], teachers: Mapping[str, float | None]
) -> dict[str, Any]:
    series = []
    for index, domain in enumerate(domains):
        rewards = [(v["step"], {**v["rewards"], **v.get("watched", {})}) for v in validations]
        points = [(step, of_domains[domain]) for step, of_domains in rewards if domain in of_domains]
        series.append(Series(name=domain, index=index, points=points, goal=teachers.get(domain), has_marks=True))
    return chart(*REWARD, series, from_zero=False)


def _bar(name: str, index: int, result: Mapping[str, Any]) -> dict[str, Any]:
    """Return positions in percent on a track from the lowest to the highest reward, at least 0 to 1."""
    known = [value for key in ("before", "after", "teacher") if (value := result[key]) is not None]
    low, high = min([0.0, *known]), max([1.0, *known])

    def place(value: float | None) -> float | None:
        return None if value is None else round(100 * (value - low) / (high - low), 2)

    places = {f"{key}_at": place(result[key]) for key in ("before", "after", "teacher")}
    return {"name": name, "index": index, **result, **places}


def _group_cell(key: str, value: float | None) -> str:
    if key == "payload_bytes":
        return cell(value, lambda number: f"{number / 2**20:,.1f} MiB")
    return cell(value, lambda number: f"{short(number)} s" if key.startswith("latency") else short(number))


def _examples(
    validations: Sequence[Mapping[str, Any]], best_step: int | None, teachers: Mapping[str, Sequence[Mapping[str, Any]]]
) -> dict[str, list[dict[str, Any]]]:
    """Return, by domain, rows of the same prompt, answered before and after training and by the teacher. A prompt may
    stand in the data twice, so place and prompt together identify a row."""
    sides = {"before": 0, "after": best_step}
    answers: dict[str, dict[tuple[int, str], dict[str, Any]]] = {}

    def add(side: str, domain: str, examples: Sequence[Mapping[str, Any]]) -> None:
        rows = answers.setdefault(domain, {})
        for place, example in enumerate(examples):
            prompt = _prompt_text(example["prompt"])
            empty = {"prompt": prompt, "truth": example["ground_truth"], **dict.fromkeys((*sides, "teacher"))}
            row = rows.setdefault((place, prompt), {**empty, "images": [], "view": ""})
            row["images"] = row["images"] or example.get("images", [])
            row["view"] = row["view"] or example.get("view", "")
            whole = [{"text": example["response"], "is_given": False}]
            row[side] = {"segments": example.get("segments") or whole, "reward": example["reward"]}

    for side, step in sides.items():
        for validation in validations:
            if validation["step"] == step:
                for domain, examples in validation.get("examples", {}).items():
                    add(side, domain, examples)
    for domain, examples in teachers.items():
        add("teacher", domain, examples)
    return {domain: list(rows.values()) for domain, rows in sorted(answers.items())}


def _traces(told: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the traces of the last validation with the heat of each drawn token."""
    if told is None or not told["domains"]:  # they are left out where a file's reader would refuse them
        return None
    domains = {
        domain: {
            "prompt": trace["prompt"],
            "segments": [
                one | {"heat": 0 if one["is_given"] else sum(one["kl"] >= least for least in HEATS)}
                for one in trace["segments"]
            ],
        }
        for domain, (trace, *_) in told["domains"].items()
    }
    return {"step": told["step"], "domains": domains, "heats": HEATS}


def _prompt_text(prompt: Any) -> str:
    """Return a prompt as text: chat messages become lines, the role named where there are several."""
    if not isinstance(prompt, list):
        return str(prompt)
    if len(prompt) == 1:
        return str(prompt[0]["content"])
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def _phases(found: Mapping[str, Mapping[str, float]]) -> list[dict[str, Any]]:
    shown = percents([phase["share"] for phase in found.values()])
    return [
        {"title": phase_name(name), "mean_s": phase["mean_s"], "percent": percent}
        for (name, phase), percent in zip(found.items(), shown, strict=True)
    ]


def _pipeline(found: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Make the rows of the stages' table, and a curve of each stage's busy share."""
    rows = []
    for name, stage in found["stages"].items():
        percent = percents([stage[share] for share in STAGE_COLOURS])
        shares = [
            {"name": share, "index": index, "percent": text}
            for (share, index), text in zip(STAGE_COLOURS.items(), percent, strict=True)
        ]
        counts = {key: cell(stage[key], "{:d}") for key in ("replicas", "balanced_replicas")}
        rows.append({"name": stage_label(name), "is_bound": name == found["bound_by"], "shares": shares, **counts})
    points: dict[str, list[Point]] = {name: [] for name in found["stages"]}
    for record in steps:
        for name, seconds in stage_seconds(record).items():
            points[name].append((record["step"], seconds[0] / sum(seconds)))
    series = named_series({stage_label(name): curve for name, curve in points.items()}, is_noisy=True)
    made = {**chart("Busy share of each stage", "Of a step’s seconds.", series), "legend": series}
    return {"bound_by": stage_label(found["bound_by"]), "rows": rows, "colours": STAGE_COLOURS, "chart": made}


def _ages(found: Mapping[str, Any]) -> dict[str, Any]:
    """Make a histogram of the samples' ages, and count the samples that were not trained on."""
    title = "Staleness of the samples"
    text = "Share of the samples by the optimizer steps that the weights behind them lagged."
    svg = histogram([(float(age), share) for age, share in found["shares"].items()], label=title)
    mean, most = found["response_versions_mean"], found["response_versions_max"]
    refused, replaced = found["refused_samples"], found["replaced_samples"]
    counts = []
    for name in sorted({*refused, *replaced, *found["drawn_length"]}):
        tokens, num_refused = found["refused_tokens"].get(name), refused.get(name, 0)
        counts.append({
            "name": name,
            "refused": num_refused,
            "drawn": cell(found["drawn_length"].get(name), short),
            "trained": cell(found["trained_length"].get(name), short),
            "length": cell(tokens / num_refused if num_refused and tokens is not None else None, short),
            "replaced": replaced.get(name, 0),
        })  # fmt: skip
    return {
        "histogram": _figure(title, text, svg, "staleness_share"),
        "versions": {"mean": cell(mean, "{:.2f}"), "most": cell(most, "{:d}")},
        "counts": counts,
    }


def _recipe_line(line: str) -> tuple[str, str]:
    """Split a line of YAML before the comment that names a value's origin."""
    if line.startswith("#"):
        return "", line
    match = re.match(r"(.*?)(  # [^'\"]*)?$", line)
    return (match[1], match[2] or "") if match else (line, "")


DEGREES = {
    "tensor": "tensor_model_parallel_size",
    "context": "context_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "data": "data_parallel_size",
}
LOSS_TYPE = "type"


def card(recipe: Mapping[str, Any], machine: Mapping[str, Any] | None) -> dict[str, list[str]]:
    """Describe a run, as lines by heading. Folders and models are as the recipe spells them.

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
    """Name a group's engine, placement and number of replicas."""
    parts = [_at(group, "engine", "type"), _at(group, "engine", "dtype"), _at(group, "placement", "type")]
    replicas = _at(group, "replicas")
    if isinstance(replicas, int) and replicas > 1:
        parts.append(f"{replicas} replicas")
    return ", ".join(str(part) for part in parts if part is not None)


def _loss(loss: Any) -> str:
    """Name the loss' type and its scalar settings."""
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
    """Return the value at a path of keys, or ``None``."""
    for key in path:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree


def _items(tree: Any) -> list[tuple[str, Any]]:
    return list(tree.items()) if isinstance(tree, Mapping) else []


def _joined(*parts: Any) -> str:
    return " · ".join(str(part) for part in parts if part not in (None, ""))
