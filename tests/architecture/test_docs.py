"""Pages name keys, commands, files and metrics that exist.

A page says what it means in backticks or in a block of commands; what stands there is looked up. Keys are held against
``docs/recipes.md``, which is itself held against the schema.
"""

from __future__ import annotations

import ast
import io
import itertools
import re
import shlex
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path

import pytest

from mopd.cli.completion import parts_of
from mopd.cli.main import _parser, main
from tests.architecture.source import ROOT, trees

PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")])
SUFFIXES = {
    "py",
    "md",
    "json",
    "jsonl",
    "yaml",
    "yml",
    "html",
    "parquet",
    "pt",
    "txt",
    "safetensors",
    "distcp",
    "log",
    "sh",
}
FOLDERS = ("mopd/", "docs/", "recipes/", "tools/", "tests/", "docker/", "benchmarks/")
METRICS_OF_OTHERS = {"memory"}
"""First parts of names that torch or Megatron make up."""


def texts(page: Path) -> tuple[list[str], list[str]]:
    """What stands in backticks, and the lines of blocks."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^```[a-z]*\n(.*?)^```", text, re.M | re.S)
    rest = re.sub(r"^```[a-z]*\n.*?^```", "", text, flags=re.M | re.S)
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", rest)]
    return spans, [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]


@cache
def key_paths() -> set[tuple[str, ...]]:
    """Every key of a recipe with the sections above it."""
    paths, sections = set(), []
    for line in (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8").splitlines():
        heading = re.match(r"## (?:`([^`]+)`|Top level)", line)
        row = re.match(r"- `([a-z_0-9]+)` \(", line)
        if heading:
            section = tuple(heading[1].split(".")) if heading[1] else ()
            sections = [section]
            if section[:1] == ("teacher_defaults",):
                sections += [("teachers", "NAME", *section[1:]), ("rollout", *section[1:])]
        elif row:
            paths |= {(*section, row[1]) for section in sections}
    return paths


def is_key(parts: tuple[str, ...]) -> bool:
    """Whether a dotted name is a key or section, from the top or from some section on; NAME stands for any name."""
    for path in key_paths():
        for start in range(len(path)):
            part = path[start : start + len(parts)]
            if len(part) == len(parts) and all(p in (q, "NAME") or q == "*" for p, q in zip(part, parts, strict=True)):
                return True
    return len(parts) > 1 and parts[-2] in MAPPINGS and is_key(parts[:-1])


MAPPINGS = ("domain_weights", "rewards", "chat_template_kwargs", "megatron_overrides", "options")
"""Keys below which names are the user's, or Megatron's."""


def keys_in(page: Path) -> set[str]:
    """Dotted names in backticks that begin with a section, and what ``--set`` is given."""
    sections = {part for path in key_paths() for part in path[:-1]} - {"NAME"}
    spans, lines = texts(page)
    found = {span.split("=")[0].split(":")[0].strip() for span in spans}
    named = {n for n in found if re.fullmatch(r"[a-z_0-9]+(\.[A-Za-z_0-9*]+)+", n) and n.split(".")[0] in sections}
    named = {name for name in named if name.rsplit(".", 1)[1] not in SUFFIXES}
    named |= {pair[1] for span in spans if (pair := re.fullmatch(r"([a-z_]+): [\w./-]+", span))}
    for text in [*spans, *lines]:
        named |= set(re.findall(r"--set ['\"]?([a-z_0-9]+(?:\.[a-zA-Z_0-9]+)*)=", text)) - {"key", "a.b"}
    return named


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_keys(page: Path) -> None:
    assert len(keys_in(ROOT / "docs" / "data.md")) > 10
    assert sorted(name for name in keys_in(page) if not is_key(tuple(name.split(".")))) == []


@cache
def help_of(*command: str) -> str:
    """What ``mopd COMMAND --help`` prints; empty for a command that does not exist."""
    out = io.StringIO()
    with redirect_stdout(out), pytest.raises(SystemExit) as ended:
        main([*command, "--help"])
    return out.getvalue() if ended.value.code == 0 else ""


def commands_in(page: Path) -> list[list[str]]:
    spans, lines = texts(page)
    found = []
    for text in [*spans, *lines]:
        call = re.match(r"(?:\S*torchrun .*-m |\$ |.*bin/)?mopd ([a-z].*)", text.strip())
        if call:
            found.append(shlex.split(call[1].split("  ")[0].split(" #")[0].replace("'", "").replace("(", "")))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(commands_in(ROOT / "README.md")) > 8
    for words in commands_in(page):
        depth = 2 if words[0] in ("bench", "convert") and len(words) > 1 and re.fullmatch("[a-z-]+", words[1]) else 1
        text = help_of(*words[:depth])
        assert text, f"{page.name}: mopd {' '.join(words[:depth])} is no command"
        options = [word.split("=")[0] for word in words if word.startswith("--")]
        assert [option for option in options if not re.search(rf"{option}\b", text)] == [], f"{page.name}: {words}"


def test_the_page_of_commands_has_all() -> None:
    calls = commands_in(ROOT / "docs" / "commands.md")
    commands = parts_of(_parser())
    assert set(commands) == {words[0] for words in calls}
    assert set(parts_of(commands["bench"])) == {words[1] for words in calls if words[0] == "bench" and words[1:]}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    spans, lines = texts(page)
    named = {call[1] for text in [*spans, *lines] if (call := re.match(r"make ([a-z-]+)", text.strip()))}
    assert sorted(named - targets) == []


def files_in(page: Path) -> set[str]:
    spans, _ = texts(page)
    paths = {span for span in spans if re.fullmatch(r"[\w*][\w./*-]*(/|\.(py|md|sh|j2|yaml))", span) and "/" in span}
    return {path for path in paths if path.startswith(FOLDERS) or path.endswith((".py", "/"))}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files(page: Path) -> None:
    """From the repository's root, from the package on, or beside the page; links from the page."""
    places = (ROOT, ROOT / "mopd", page.parent)
    lost = {path for path in files_in(page) if not any(list(place.glob(path.rstrip("/"))) for place in places)}
    assert sorted(lost - NOT_IN_THE_REPOSITORY) == []
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_stand_alone(page: Path) -> None:
    """A table without an empty line above is text to ``make docs``, and text right below one is a row of it."""
    lines = [line[:1].strip() for line in plain(page)]
    pairs = enumerate(itertools.pairwise(lines), 2)
    assert [i for i, (one, next_) in pairs if one and next_ and (one == "|") != (next_ == "|")] == []


@cache
def anchors(page: Path) -> set[str]:
    """Anchors that ``make docs`` makes of a page's headings."""
    names = [
        re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line.lstrip("# ")) for line in plain(page) if re.match("#+ ", line)
    ]
    return {re.sub(r"[^\w -]", "", name.lower()).replace(" ", "-") for name in names}


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda page: page.name)
def test_anchors(page: Path) -> None:
    """Links lead to a heading; those to objects of ``docs/api.md``, which has them from docstrings, are left out."""
    links = re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text(encoding="utf-8"))
    lost = [link for link in links if link[1] not in anchors(page.parent / link[0] if link[0] else page)]
    assert [link for link in lost if not link[1].startswith("mopd.")] == []


NOT_IN_THE_REPOSITORY = {
    "logs/",
    "checkpoints/",
    "hf/",
    "checkpoints/step_N/",
    "timing/",
    "rate/",
    "memory/",
    "rollout/",
    "teachers/",
}
NOT_IN_THE_REPOSITORY |= {"benchmarks/"}
"""Folders of a run, beginnings of metric names, and what ``tools/gpu_check.sh`` makes."""


@cache
def words_of_the_package() -> set[str]:
    """Words in the package's texts: metric names are put together from them."""
    words: set[str] = set()
    for tree in trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                words |= set(re.findall(r"[A-Za-z_0-9]+", node.value))
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                words.add(node.target.id)  # fields whose names become names of metrics
    return words


def test_metrics() -> None:
    """Every name in the first column of a table of ``docs/metrics.md``, and every ``name/DOMAIN`` of any page."""
    named = set()
    for line in (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("| `"):
            named |= set(re.findall(r"`([^`]+)`", line.split("|")[1]))
    for page in PAGES:
        named |= {span for span in texts(page)[0] if re.fullmatch(r"[a-z_0-9]+/(DOMAIN|TEACHER|GROUP)", span)}
    assert len(named) > 40
    parts = {part for name in named for part in name.split("/") if re.fullmatch("[a-z_0-9]+", part)}
    assert sorted(parts - words_of_the_package() - METRICS_OF_OTHERS) == []


SETTINGS = {
    "cluster.md": {"10 minutes"},
    "data_plane.md": {"10 seconds"},
    "pipeline.md": {"1 s", "3 s", "8 s"},
    "planning.md": {"5 %"},
    "teachers.md": {"20 times"},
}
"""Figures in the text of a page that somebody has set: limits, goals, properties of an experiment. What was measured
stands in a table."""
FIGURE = re.compile(r"(?<![\w.,])\d[\d.,]* ?(?:[x×](?! ?\d)|%|times|tokens/s|ms|s|seconds|min|minutes|hours)(?![\w/])")


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.parent != ROOT or page.name == "README.md"],
    ids=lambda page: page.name,
)
def test_figures_stand_in_tables(page: Path) -> None:
    """A ratio, a share or a time in the text is one of a table of its page (of the README: of any), or a setting."""
    tables: set[str] = set()
    for source in [page] if page.name != "README.md" else PAGES:
        tables |= set(FIGURE.findall("\n".join(line for line in plain(source) if line.startswith("|"))))
    told = set(FIGURE.findall("\n".join(line for line in plain(page) if not line.startswith("|"))))
    assert sorted(told - tables) == sorted(SETTINGS.get(page.name, set()) - tables)
    parts = [part for part in "\n".join(plain(page)).split("\n\n") if re.search(r"EPYC|Xeon|(busy|idle)\s+cores", part)]
    assert [part for part in parts if not re.search(r"20\d\d", part)] == [], "say when that was measured"


def plain(page: Path) -> list[str]:
    """Lines outside of blocks."""
    return re.sub(r"^```[a-z]*\n.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S).splitlines()


def test_paths_of_the_makefile_exist() -> None:
    """A rule that names files which have moved fails only where somebody runs it."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"(?<![\w./$(-])(?:mopd|docs|recipes|tools|tests|docker)/[\w./*-]*", text))
    assert len(named) > 20
    assert not [name for name in named if not any(ROOT.glob(name))]
