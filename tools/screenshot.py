"""A picture of a page of ours, as a headless Chromium draws it: ``python -m tools.screenshot PAGE PICTURE``."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")


def find_chromium() -> str | None:
    """The system's, by whichever name it has."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def browser() -> Iterator[Browser]:
    """The system's Chromium, without a window. ``SystemExit`` where there is none."""
    path = find_chromium()
    if path is None:
        raise SystemExit("no chromium on this machine: install the package chromium of its system")
    options = ["--no-sandbox"] if os.geteuid() == 0 else []  # which Chromium refuses to root
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=path, args=options)
        yield made
        made.close()


def main() -> None:
    """Take the upper part of the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path, help="HTML file")
    parser.add_argument("picture", type=Path, help="PNG file to write")
    parser.add_argument("--width", type=int, default=1120)
    parser.add_argument("--height", type=int, default=1525)
    args = parser.parse_args()
    with browser() as chromium:
        page = chromium.new_page(viewport={"width": args.width, "height": args.height})
        page.goto(args.page.resolve().as_uri())
        args.picture.parent.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=args.picture)
    print(f"{args.picture}: {args.picture.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
