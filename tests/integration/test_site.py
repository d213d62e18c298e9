"""The docs as a site: built as ``make docs`` builds it, and opened in a real browser."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import mopd.losses
from tests.fixtures.browser import NEEDS_CHROMIUM, WIDTHS, look
from tests.fixtures.pages import ROOT
from tools.screenshot import browser

PAGES = sorted(path.stem for path in (ROOT / "docs").glob("*.md"))
LOADED = re.compile(r"<(?:script|img|iframe|source|video|audio)\b[^>]*?\bsrc=[\"']?([^\"' >]+)|<link\b[^>]*?>", re.I)
OUTSIDE = re.compile(r"^(?:[a-z]+:)?//", re.I)
HIDDEN = ".md-nav, .md-sidebar, .md-search, .md-header, .md-skip, .headerlink, .md-clipboard, .md-top, .md-dialog"
"""Menus, bars and buttons of the theme, which wait beside or above the page."""
SCROLLS = "pre, code, .md-typeset__scrollwrap, .md-typeset__table, .md-code__content, .highlight, .doc-signature"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    call = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)]
    # A proxy that is not there: whoever asks the network fails.
    environment = (
        os.environ | {"NO_MKDOCS_2_WARNING": "1"} | dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    )
    done = subprocess.run(call, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_every_page_is_there_and_loads_nothing_from_elsewhere(site: Path) -> None:
    made = {path.relative_to(site).as_posix() for path in site.rglob("*.html")}
    assert {f"{page}.html" for page in PAGES} <= made
    outside = []
    for path in [site / name for name in made]:
        for match in LOADED.finditer(path.read_text(encoding="utf-8")):
            target = match[1] or next(iter(re.findall(r"\bhref=[\"']?([^\"' >]+)", match[0])), "")
            if OUTSIDE.match(target) and 'rel="canonical"' not in match[0]:
                outside.append(f"{path.name}: {target}")
    for path in site.rglob("*.css"):
        outside += [
            f"{path.name}: {url}" for url in re.findall(r"url\([\"']?((?:https?:)?//[^)\"']+)", path.read_text("utf-8"))
        ]
    assert outside == []


def test_functions_of_the_losses_are_described(site: Path) -> None:
    text = (site / "api.html").read_text(encoding="utf-8")
    for name in mopd.losses.__all__:
        assert f'id="mopd.losses.{name}"' in text
    assert "Compute the divergence between teacher and student on some ids" in text


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join(10)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as started:
        yield started


@NEEDS_CHROMIUM
@pytest.mark.parametrize(("page", "width"), [("index", WIDTHS[0]), *((page, WIDTHS[1]) for page in PAGES)])
def test_nothing_is_cut(chromium: Any, address: str, page: str, width: int) -> None:
    """As narrow as a phone, where most would be; a desk shows one page."""
    problems, _ = look(
        chromium,
        f"{address}/{page}.html",
        width=width,
        charts=".chart",
        boxes=".md-container",
        ignore=HIDDEN,
        scrolls=SCROLLS,
    )
    assert problems == []
