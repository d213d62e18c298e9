"""First recipe from the names of models and data: the domains are those of the data, the rest is defaults worth
knowing, each with the reason why one would change it."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mopd.base.files.reading import shown_path
from mopd.base.files.yaml_text import dump_inline
from mopd.base.types import UserError
from mopd.config.data import DEFAULT_COLUMNS, SHIPPED, DataFileConfig, ShippedColumns
from mopd.config.losses import TopKLossConfig
from mopd.config.student import DEFAULT_LR, LORA_LR
from mopd.config.values import check_name
from mopd.conversion.models.reading import read_dims
from mopd.data.columns import survey
from mopd.data.files import listed, read_first
from mopd.data.hub.names import hub_data
from mopd.planning.models import config_folder

MAX_ROWS = 100_000
"""Rows of each file in which domains are looked for."""
_SPLIT_WORDS = re.compile(r"(^|[-_.])(train|training|test|validation|valid|val|dev|eval)([-_.]\d[\w-]*)?$")
_REWARDS = (
    ("math", re.compile(r"gsm|math|aime|amc|olympiad|numina|dapo")),
    ("code", re.compile(r"mbpp|code|humaneval|leetcode|apps|taco")),
    ("multiple_choice", re.compile(r"mmlu|gpqa|arc|hellaswag|choice|csqa")),
)
"""Reward -> names of domains that it usually judges."""
_OWN_REWARD = {"gsm8k": "math", "math": "math", "mbpp": "code"}
"""Columns -> what their ground truths are made for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenNames:
    """GivenNames that the user gives."""

    student: str
    teachers: Mapping[str, str]
    """Name -> model."""
    domains: Mapping[str, Sequence[str]]
    """Teacher -> domains, where they were given."""
    train: Sequence[str]
    validation: Sequence[str]
    run_dir: str
    lora: bool = False
    """Whether the student's adapters are trained alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Where a first recipe runs."""

    keys: Mapping[str, Any]
    """Keys of ``student``, ``teachers.NAME`` and ``rollout``, as a search finds them."""
    reason: str
    slurm: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What the models of a first recipe take."""

    length: int = 1024
    """Most tokens of a prompt, and of a response."""
    top_k: int = TopKLossConfig().top_k
    """Ids of a position."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectedFile:
    """One data file, looked into."""

    file: DataFileConfig
    """Entry of the recipe."""
    counts: Counter[str]
    """Rows by domain."""


def limits_of(names: GivenNames, configs: Path | None) -> Limits:
    """Return the defaults, or less where a model takes less, by each ``config.json`` that is here (``read_models``).

    Raises:
        UserError: one of them cannot be used.
    """
    default, dims = Limits(), {}
    for model in (names.student, *names.teachers.values()):
        if (folder := config_folder(model, configs)) is not None:
            dims[model] = read_dims(folder, takes_quantised=model != names.student)
    length = min([default.length, *(one.max_positions // 2 for one in dims.values())])
    vocab_size = dims[names.student].vocab_size if names.student in dims else default.top_k
    return Limits(length=length, top_k=min(default.top_k, vocab_size))


def first_recipe(names: GivenNames, layout: Layout, limits: Limits = Limits()) -> str:
    """Return the text of a recipe.

    Raises:
        UserError: a data file cannot be read, or has columns that no shipped mapping knows; it is not clear which
            teacher answers for a domain.
    """
    train = [inspect_file(text) for text in names.train]
    validation = [inspect_file(text) for text in names.validation]
    counts = sum((found.counts for found in train), Counter[str]())
    rewards = {domain: guess_reward(domain, train) for domain in sorted(counts)}
    teachers = assign_domains(names, counts, rewards)
    return "".join(
        f"{line}\n"
        for line in [
            "# mopd check FILE says what is missing or wrong, mopd train FILE starts it. Every key: docs/recipes.md",
            f"run_dir: {dump_inline(names.run_dir)}",
            "",
            *_student(names, layout),
            "",
            "teachers:                          # who answers for which domain",
            *(
                f"  {dump_inline(name)}: {dump_inline(_teacher(name, model, teachers[name], layout))}"
                for name, model in names.teachers.items()
            ),
            "",
            *_data(train, validation, limits.length),
            "",
            "rollout:",
            f"  max_response_length: {limits.length:<11} # in tokens; chains of thought are long, cut ones are counted",
            *(f"  {key}: {dump_inline(value)}" for key, value in layout.keys.get("rollout", {}).items()),
            "",
            *_loss(limits.top_k),
            "schedule:",
            "  steps: 500",
            "  prompts_per_step: 128            # of all domains together",
            *_validation(validation, rewards, counts),
            *(["", f"slurm: {dump_inline(layout.slurm)}"] if layout.slurm else []),
        ]
    )


def inspect_file(text: str) -> InspectedFile:
    """Find the columns of a data file or data set, and the domains of its rows."""
    paths: Sequence[str] = [text]
    name = hub_data(text)
    if name is not None:
        from mopd.data.hub.fetch import fetch_data  # heavy, and most data are files

        try:
            paths = fetch_data(name).paths
        except UserError as error:
            raise UserError(f"{text}: no file here, and on the Hub {error}") from error
    known = [detect_columns(Path(path), text) for path in paths]
    if name is not None:
        stem = name.repository.rpartition("/")[2]
    else:
        stem = _SPLIT_WORDS.sub("", Path(text).stem) or Path(text).resolve().parent.name
    columns = known[0]
    domain = None if SHIPPED[columns].domain is not None else stem.lower()
    file = DataFileConfig(path=text, columns=columns, domain=domain)
    counts = Counter[str]()
    for path in paths:
        counts += survey(dataclasses.replace(file, path=path), MAX_ROWS).counts
    return InspectedFile(file=file, counts=counts)


def detect_columns(path: Path, shown: str) -> ShippedColumns:
    """Return the name of the shipped mapping that fits the file's columns.

    Raises:
        UserError: none does.
    """
    first = read_first(path)
    columns = first.keys()
    if {"prompt", "data_source"} <= columns:
        return DEFAULT_COLUMNS
    if {"question", "answer"} <= columns:
        return "gsm8k" if "####" in str(first.get("answer")) else "question_answer"
    if "test_list" in columns and columns & {"prompt", "text"}:
        return "mbpp"
    if "problem" in columns and columns & {"answer", "solution"}:
        return "math"
    if {"conversations", "domain"} <= columns:
        return "openthoughts"
    if "messages" in columns:
        return "messages"
    raise UserError(
        f"{shown_path(shown)}: no shipped mapping fits its columns {listed(sorted(columns))}: rename them, "
        "or write data.train of a recipe by hand, with columns: {prompt: COLUMN, ground_truth: COLUMN, domain: COLUMN} "
        "beside the path (docs/data.md)"
    )


def assign_domains(names: GivenNames, counts: Mapping[str, int], rewards: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the domains of each teacher: as given, else all to the only teacher, else by name: ``math`` answers for
    ``openai/math``, and for what the reward ``math`` judges.

    Raises:
        UserError: a domain is left, or claimed twice.
    """
    assigned: dict[str, list[str]] = {name: list(names.domains.get(name, ())) for name in names.teachers}
    for name in names.domains:
        if name not in names.teachers:
            raise UserError(f"--domains {name}: no --teacher has that name: it is one of {listed([*names.teachers])}")
    taken = set(itertools.chain.from_iterable(assigned.values()))
    unknown = sorted(taken - counts.keys())
    if unknown:
        raise UserError(f"--domains: the data have no row of {listed(unknown)}: they have {_counted(counts)}")
    left = []
    for domain in sorted(counts.keys() - taken):
        words = {*re.split(r"[\W_]+", domain.lower()), rewards[domain]}
        fitting = [name for name in names.teachers if name.lower() in words]
        fitting = [domain] if domain in names.teachers else fitting
        if len(names.teachers) == 1:
            fitting = [*names.teachers]
        if len(fitting) == 1:
            assigned[fitting[0]].append(domain)
        else:
            left.append(domain)
    idle = [name for name, domains in assigned.items() if not domains]
    if left or idle:
        raise UserError(
            f"which teacher answers for which domain? The data have {_counted(counts)}; not clear: "
            f"{listed([*left, *idle])}: say it with --domains TEACHER=DOMAIN,DOMAIN for each teacher"
        )
    return assigned


def guess_reward(domain: str, found: Sequence[InspectedFile]) -> str:
    """Guess a domain's reward by the columns of the files that have it, else by its name."""
    for one in found:
        columns = one.file.columns
        if domain in one.counts and isinstance(columns, str) and columns in _OWN_REWARD:
            return _OWN_REWARD[columns]
    return next((reward for reward, names in _REWARDS if names.search(domain.lower())), "exact_match")


def read_names(
    student: str,
    teachers: Sequence[str],
    domains: Sequence[str],
    *,
    train: Sequence[str],
    validation: Sequence[str],
    run_dir: str,
    lora: bool = False,
) -> GivenNames:
    """Read the names from the command line.

    Raises:
        UserError: ``--teacher`` or ``--domains`` is no ``NAME=…``, or names a teacher twice.
    """
    pairs: dict[str, list[tuple[str, str]]] = {"--teacher": [], "--domains": []}
    for option, texts in (("--teacher", teachers), ("--domains", domains)):
        for text in texts:
            name, equals, value = text.partition("=")
            try:
                check_name(name)
            except ValueError as error:
                raise UserError(f"{option} {text!a:.80}: the name {error}") from error
            if not equals or not value:
                raise UserError(
                    f"{option} {text!a:.80}: write {option} NAME={'MODEL' if option == '--teacher' else 'A,B'}"
                )
            if name in dict(pairs[option]):
                raise UserError(f"{option} names {name!r} twice: remove one")
            pairs[option].append((name, value))
    return GivenNames(
        student=student,
        teachers=dict(pairs["--teacher"]),
        domains={name: value.split(",") for name, value in pairs["--domains"]},
        train=train,
        validation=validation,
        run_dir=run_dir,
        lora=lora,
    )


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{domain!r} ({count} rows)" for domain, count in sorted(counts.items())[:10])


def _student(names: GivenNames, layout: Layout) -> list[str]:
    keys = dict(layout.keys.get("student", {}))
    optimizer = {"lr": LORA_LR if names.lora else DEFAULT_LR, "lr_warmup_steps": 10, **keys.pop("optimizer", {})}
    lora = ["  lora: {rank: 32}                 # adapters alone are trained (docs/lora.md)"] if names.lora else []
    return [
        "student:",
        f"  model: {dump_inline(names.student)}",
        *lora,
        f"  # {layout.reason}",
        *(f"  {key}: {dump_inline(value)}" for key, value in keys.items()),
        f"  optimizer: {dump_inline(optimizer)}",
    ]


def _teacher(name: str, model: str, domains: Sequence[str], layout: Layout) -> dict[str, Any]:
    return {"model": model, "domains": list(domains), **layout.keys.get("teachers", {}).get(name, {})}


def _loss(top_k: int) -> list[str]:
    if top_k == Limits().top_k:
        return []
    return [f"loss: {{type: topk_forward_kl, top_k: {top_k}}}   # all ids of the student", ""]


def _data(train: Sequence[InspectedFile], validation: Sequence[InspectedFile], length: int) -> list[str]:
    lines = ["data:"]
    for key, files in (("train", train), ("validation", validation)):
        if files:
            lines.append(f"  {key}:")
            lines.extend(f"    - {_entry(found.file)}  # {_comment(found.counts)}" for found in files)
    return [
        *lines,
        f"  max_prompt_length: {length:<13} # in tokens; a longer prompt refuses the run (overlong_prompts)",
    ]


def _entry(file: DataFileConfig) -> str:
    if file.columns == DEFAULT_COLUMNS and file.domain is None:
        return dump_inline(file.path)
    parts = {"path": file.path, "columns": file.columns, "domain": file.domain}
    return "{" + ", ".join(f"{key}: {dump_inline(value)}" for key, value in parts.items() if value is not None) + "}"


def _comment(counts: Mapping[str, int]) -> str:
    return re.sub(r"[\r\n]", " ", _counted(counts))


def _validation(
    validation: Sequence[InspectedFile], rewards: Mapping[str, str], counts: Mapping[str, int]
) -> list[str]:
    if not validation:
        return ["", "# with data.validation: rewards by domain and a validation section show what the student gains"]
    held_out = set(itertools.chain.from_iterable(found.counts for found in validation))
    missing = sorted(counts.keys() - held_out)
    if missing:
        raise UserError(f"--validation has no row of {listed(missing)}: add a file, or the teacher cannot be checked")
    return [
        "",
        "rewards:                           # how a response is judged, by domain (docs/rewards.md)",
        *(f"  {dump_inline(domain)}: {{type: {reward}}}" for domain, reward in rewards.items()),
        "",
        "validation: {every_steps: 50, max_samples_per_domain: 200}",
    ]
