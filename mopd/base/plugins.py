"""Code of users that a recipe names: ``file.py:name``, ``package.module:name``, or the name of an entry point.

A file is imported under a name of its own, with its folder last on the import path, so that what lies beside it is
found and replaces no module of a package.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from mopd.base.files.reading import read_bytes, shown_path
from mopd.base.text import one_line, shortened
from mopd.base.types import UserError

GROUPS = {"loss": "mopd.losses", "callback": "mopd.callbacks", "reader": "mopd.readers"}
"""Kind of code -> group of entry points of installed packages that offer it."""


def load_plugin(key: str, reference: str, kind: str) -> Callable[..., Any]:
    """Import what the key of a recipe names, a function or class.

    Raises:
        UserError: there is no such file, module, name or entry point, the import failed, or it cannot be called.
    """
    source, name = resolved_plugin(key, reference, kind)
    try:
        module = _import_file(source) if source.endswith(".py") else importlib.import_module(source)
    except Exception as error:
        raise UserError(f"{key}: {shown_path(source)!r} cannot be imported: {described(error, source)}") from error
    found = getattr(module, name, None)
    if not callable(found):
        what = "holds no" if found is None else f"holds a {type(found).__name__}, no function,"
        raise UserError(f"{key}: {shown_path(source)!r} {what} {name!r}: correct the name")
    code: Callable[..., Any] = found
    return code


def plugin_hash(key: str, reference: str, kind: str) -> str:
    """Return the SHA-256 of the file that holds the code, without running it. Raises as ``load_plugin``."""
    return hashlib.sha256(read_bytes(plugin_path(key, reference, kind), cure=f"correct {key}")).hexdigest()


def plugin_path(key: str, reference: str, kind: str) -> Path:
    """Return the file that holds the code. Raises as ``load_plugin``."""
    source, _ = resolved_plugin(key, reference, kind)
    if source.endswith(".py"):
        return Path(source)
    try:
        spec = importlib.util.find_spec(source)
    except Exception as error:  # a package above it failed
        raise UserError(f"{key}: {source!r} cannot be imported: {described(error, source)}") from error
    if spec is None or spec.origin is None:
        raise UserError(f"{key}: no module {source!r} is installed here: install its package, or correct the name")
    return Path(spec.origin)


def resolved_plugin(key: str, reference: str, kind: str) -> tuple[str, str]:
    """Return the file or module that a reference names, and the name in it. Raises as ``load_plugin``."""
    if ":" not in reference:
        group = entry_points(group=GROUPS[kind])
        if reference not in group.names:
            there = ", ".join(sorted(group.names)) or "there are none"
            raise UserError(
                f"{key}: no installed package has an entry point {reference!r} of {GROUPS[kind]} ({there}): install "
                "it, or write file.py:name or package.module:name"
            )
        reference = group[reference].value
    source, _, name = reference.rpartition(":")
    if source.endswith(".py") and not os.path.isfile(source):
        raise UserError(f"{key}: file {shown_path(source)!r} does not exist in {os.getcwd()!r}: correct the path")
    return source, name


def described(error: BaseException, path: str | Path) -> str:
    """Return an exception of a user's code in a line, with the last line of its file that it passed."""
    file = os.path.abspath(path)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    where = f" (line {lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {shortened(one_line(error), 300)}{where}"


def _import_file(source: str) -> Any:
    path = os.path.abspath(source)
    name = f"mopd_plugin_{hashlib.sha256(path.encode()).hexdigest()[:16]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None  # it ends in .py
        if os.path.dirname(path) not in sys.path:
            sys.path.append(os.path.dirname(path))
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
