"""``report.html``: one page without outside references, from plain records. Texts of users and models are escaped."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from mopd.metrics import VOLATILE_PREFIXES
from mopd.report.charts import NUM_COLOURS, Series, cell, line_chart, short
from mopd.report.groups import group_values, is_group_metric, label

TITLES = {
    "kl_k1": (
        "KL(student ‖ teacher)",
        "Nats per token, on the student's own tokens. 0: agrees with its teacher.",
    ),
    "loss": ("Loss", "What the student minimised, per response token."),
    "topk_overlap": ("Top-k overlap", "Share of the teacher's top-k tokens that are in the student's top-k."),
    "kl_k3": ("KL, k3 estimator", "The same KL from an estimator that is never negative; KL above is k1."),
    "kl_net": (
        "KL above its floor",
        "The KL above less what the teacher's engine measured against the teacher itself.",
    ),
    "kl_floor": ("Floor of the KL", "What a teacher's engine measured against its own folder, before the first step."),
    "entropy": ("Student entropy", "Nats per token."),
    "teacher_mass": ("Teacher mass in the top-k", "Probability that the teacher's top-k captures."),
    "student_mass": ("Student mass in the teacher's top-k", "Probability that the student gives to those tokens."),
    "response_length": ("Response length", "Tokens, mean."),
    "truncated_share": ("Truncated share", "Responses cut at the length limit."),
    "clamped_share": ("Clamped share", "Tokens whose loss met a clamp: their gradient is zero."),
    "tail_floored_share": ("Tail-floored share", "Tokens whose mass outside the top-k met its numerical floor."),
    "num_tokens": ("Loss tokens per step", "Response tokens with a loss."),
}
"""Metric -> title and explanation; metrics not named here are shown under their own name."""
MAIN = ("kl_k1", "loss", "topk_overlap")
"""Shown at once; the others fold away."""
GROUP_CHARTS = {
    "tokens_per_s": ("tokens per second", "While the group had work; prompts and responses."),
    "latency_p95_s": ("seconds per request, p95", "From sending to the answer."),
    "queue_depth": ("waiting requests", "The most in a step that waited for a replica."),
}
"""Metric of groups -> heading and explanation of its chart."""


def render_page(
    report: Mapping[str, Any],
    *,
    steps: Sequence[Mapping[str, Any]],
    validations: Sequence[Mapping[str, Any]],
    recipe: Mapping[str, Any],
    recipe_text: str,
    run_name: str,
) -> str:
    """The page as text.

    Args:
        report: content of ``report.json``.
        steps, validations: records of ``metrics.jsonl`` and ``validation.jsonl``.
        recipe, recipe_text: the resolved recipe, as values and as the run wrote it.
    """
    curves = _curves_by_metric(steps)
    domains = sorted({*report["domains"], *(domain for curve in curves.values() for domain in curve if domain)})
    teachers = {name: result["teacher"] for name, result in report["domains"].items()}
    environment = Environment(
        loader=PackageLoader("mopd.report", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters |= {
        "short": short,
        "percent": lambda value: cell(value, "{:.0%}"),
        "reward": lambda value: cell(value, "{:.3f}"),
        "duration": _duration,
        "number": lambda value: cell(value, short),
        "size": lambda num_bytes: cell(num_bytes, lambda number: f"{number / 2**20:,.1f} MiB"),
    }
    return environment.get_template("report.html.j2").render(
        run_name=run_name,
        report=report,
        group_label=label,
        domains=domains,
        num_colours=NUM_COLOURS,
        bars=[_bar(name, domains.index(name), result) for name, result in report["domains"].items()],
        reward_chart=_reward_chart(validations, domains, teachers),
        main_charts=_charts({name: curves[name] for name in MAIN if name in curves}, domains),
        other_charts=_charts({name: curve for name, curve in sorted(curves.items()) if name not in MAIN}, domains),
        group_charts=_group_charts(steps),
        examples=_examples(validations, report["best_step"]),
        phases=_phases(steps),
        recipe_lines=[_recipe_line(line) for line in recipe_text.splitlines()],
        recipe=recipe,
    )


def _curves_by_metric(steps: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """metric -> domain -> points; a metric without domains has the one domain ``""``."""
    curves: dict[str, dict[str, list[tuple[float, float]]]] = {}
    has_domains = {name.split("/", 1)[0] for record in steps for name in record if _domain_of(name)}
    for record in steps:
        for name, value in record.items():
            if is_group_metric(name):
                continue
            metric, domain = (name.split("/", 1)[0], _domain_of(name)) if _domain_of(name) else (name, "")
            if name == "step" or value is None or (not domain and metric in has_domains):
                continue
            curves.setdefault(metric, {}).setdefault(domain, []).append((record["step"], value))
    return curves


def _domain_of(name: str) -> str:
    return name.split("/", 1)[1] if "/" in name and not name.startswith(VOLATILE_PREFIXES) else ""


def _charts(curves: Mapping[str, Mapping[str, list[tuple[float, float]]]], domains: list[str]) -> list[dict[str, Any]]:
    charts = []
    for metric, by_domain in curves.items():
        title, text = TITLES.get(metric, (metric, ""))
        series = [
            Series(name=domain or metric, index=domains.index(domain) if domain else 0, points=points)
            for domain, points in sorted(by_domain.items())
        ]
        charts.append(_chart(title, text, series))
    return charts


def _group_charts(steps: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A chart per room and metric, one curve per group (replicas are in the table only)."""
    points: dict[tuple[str, str], dict[str, list[tuple[float, float]]]] = {}
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
        title = f"{room.removesuffix('s').capitalize()}: {heading}"
        series = [Series(name=name, index=i, points=curves[name]) for i, name in enumerate(sorted(curves))]
        charts.append({**_chart(title, text, series), "legend": series})
    return charts


def _chart(title: str, text: str, series: list[Series]) -> dict[str, Any]:
    return {"title": title, "text": text, "svg": line_chart(series, label=f"{title} over steps")}


def _reward_chart(
    validations: Sequence[Mapping[str, Any]], domains: list[str], teachers: Mapping[str, float | None]
) -> Markup:
    series = [
        Series(
            name=domain,
            index=index,
            points=[(v["step"], v["rewards"][domain]) for v in validations if domain in v["rewards"]],
            goal=teachers.get(domain),
            has_marks=True,
        )
        for index, domain in enumerate(domains)
    ]
    return line_chart(series, label="Validation reward over steps")


def _bar(name: str, index: int, result: Mapping[str, float | None]) -> dict[str, Any]:
    """Positions in percent on a track from the lowest to the highest reward, at least 0 to 1."""
    known = [value for key, value in result.items() if key != "headroom_recovery" and value is not None]
    low, high = min([0.0, *known]), max([1.0, *known])

    def place(value: float | None) -> float | None:
        return None if value is None else round(100 * (value - low) / (high - low), 2)

    places = {f"{key}_at": place(result[key]) for key in ("before", "after", "teacher")}
    return {"name": name, "index": index, **result, **places}


def _examples(validations: Sequence[Mapping[str, Any]], best_step: int | None) -> dict[str, list[dict[str, Any]]]:
    """Domain -> rows of the same prompt answered before and after training. A prompt may stand in the data twice, so a
    row is known by its place and its prompt."""
    answers: dict[str, dict[tuple[int, str], dict[str, Any]]] = {}
    for validation in validations:
        side = {0: "before", best_step: "after"}.get(validation["step"])
        if side is None:
            continue
        for domain, examples in validation.get("examples", {}).items():
            rows = answers.setdefault(domain, {})
            for place, example in enumerate(examples):
                prompt = _prompt_text(example["prompt"])
                row = rows.setdefault(
                    (place, prompt), {"prompt": prompt, "truth": example["ground_truth"], "before": None, "after": None}
                )
                row[side] = {"response": example["response"], "reward": example["reward"]}
    return {domain: list(rows.values()) for domain, rows in sorted(answers.items())}


def _prompt_text(prompt: Any) -> str:
    """A prompt as text: chat messages become lines, the role named where there are several."""
    if not isinstance(prompt, list):
        return str(prompt)
    if len(prompt) == 1:
        return str(prompt[0]["content"])
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def _phases(steps: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Mean seconds per step of each phase and its share of the step, longest first."""
    totals: dict[str, float] = {}
    for record in steps:
        for name, value in record.items():
            if name.startswith("timing/") and value is not None:
                phase = name.removeprefix("timing/").removesuffix("_s")
                totals[phase] = totals.get(phase, 0.0) + value
    whole = totals.pop("step", 0.0)
    ordered = sorted(totals.items(), key=lambda item: -item[1])
    return [{"name": n, "mean_s": t / len(steps), "share": t / whole if whole else None} for n, t in ordered]


def _recipe_line(line: str) -> tuple[str, str]:
    """A line of YAML, cut before the comment that tells a value's origin."""
    if line.startswith("#"):
        return "", line
    match = re.match(r"(.*?)(  # [^'\"]*)?$", line)
    return (match[1], match[2] or "") if match else (line, "")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
