"""Cut a release: ``python -m tools.release 0.3.0`` sets the version and closes the changelog's open section;
``python -m tools.release --build dist`` builds sdist and wheel (``make dist`` also tries them)."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[1]
OPEN = "## [Unreleased]\n"
SDIST = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> None:
    """Set a version, or build. ``SystemExit`` with one line for a version that cannot follow the last one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version", nargs="?", metavar="VERSION", help="three numbers, above those of the last release")
    parser.add_argument("--build", type=Path, metavar="FOLDER", help="build sdist and wheel of what is there")
    args = parser.parse_args(arguments)
    if (args.version is None) == (args.build is None):
        parser.error("give a VERSION, or --build FOLDER")
    if args.build is not None:
        for path in build(root, args.build):
            print(path)
        return
    set_version(root, args.version, date.today())
    print(f"now: make lint && make dist && make test, git commit -am 'Release {args.version}', git tag v{args.version}")


def set_version(root: Path, version: str, day: date) -> None:
    """Write ``version`` into the package, and over the changelog's open section. ``SystemExit`` changes nothing."""
    package, changelog = root / "mopd" / "__init__.py", root / "CHANGELOG.md"
    source, changes = package.read_text(encoding="utf-8"), changelog.read_text(encoding="utf-8")
    (old,) = re.findall(r'^__version__ = "(.*)"$', source, re.M)
    if not re.fullmatch(r"\d+\.\d+\.\d+", version) or _numbers(version) <= _numbers(old):
        raise SystemExit(f"release: error: version {version} is not above {old}: give three numbers, as in 1.2.3")
    body = changes.partition(OPEN)[2].partition("\n## [")[0]
    if not re.search(r"^- ", body, re.M):
        raise SystemExit("release: error: CHANGELOG.md: nothing stands under [Unreleased]: say what is new")
    package.write_text(source.replace(f'"{old}"', f'"{version}"'), encoding="utf-8")
    changelog.write_text(changes.replace(OPEN, f"{OPEN}\n## [{version}] - {day.isoformat()}\n", 1), encoding="utf-8")


def build(source: Path, out: Path) -> tuple[Path, Path]:
    """Build the sdist of ``source``, and the wheel from that sdist, so that it holds all that a build needs; return
    both. Without the network: the environment's own setuptools."""
    out.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-c", SDIST, str(out.resolve())], cwd=source, check=True, stdout=sys.stderr)
    sdist = max(out.glob("mopd-*.tar.gz"), key=lambda path: path.stat().st_mtime_ns)
    wheel = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    subprocess.run([*wheel, "--wheel-dir", str(out), str(sdist)], check=True)
    return sdist, max(out.glob("mopd-*.whl"), key=lambda path: path.stat().st_mtime_ns)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


if __name__ == "__main__":
    main()
