"""What pip is to install into an image, one requirement a line.

requirements.py wanted [--extras a,b] [--without torch,triton]   those of pyproject.toml, without mopd itself
requirements.py pins                                             those of constraints.txt that are not installed yet
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
from pathlib import Path

import tomllib


def wanted(project: dict, extras: list[str], without: list[str]) -> list[str]:
    """Requirements of the package and of ``extras``, of extras that those name too; ``without`` names packages."""
    found = []
    for requirement in [*project["dependencies"], *(r for e in extras for r in project["optional-dependencies"][e])]:
        own = re.fullmatch(rf"{project['name']}\[(.+)\]", requirement)
        if own:
            found += wanted({**project, "dependencies": []}, own[1].split(","), without)
        elif name_of(requirement) not in without:
            found.append(requirement)
    return found


def pins(constraints: str) -> list[str]:
    """The image's own packages were built to go together, and keep their versions."""
    lines = [line.partition("#")[0].strip() for line in constraints.splitlines()]
    return [line for line in lines if line and not is_installed(name_of(line))]


def name_of(requirement: str) -> str:
    """As pip compares names."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower()


def is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("wanted", "pins"))
    parser.add_argument("--extras", default="")
    parser.add_argument("--without", default="")
    args = parser.parse_args()
    if args.what == "pins":
        print("\n".join(pins(Path("constraints.txt").read_text(encoding="utf-8"))))
        return
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [extra for extra in args.extras.split(",") if extra]
    print("\n".join(wanted(project, extras, [name_of(name) for name in args.without.split(",") if name])))


if __name__ == "__main__":
    main()
