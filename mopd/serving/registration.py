"""Registration of servers with a run: one small file each in the run's folder ``replicas``.

::

    teachers.math.node1.4711.json    key, URL, identity, and a count that goes up while the server lives
    teachers.math.node1.4711.token   the secret that this server asks for, mode 0600

The count is the heartbeat: a reader compares two readings by its own clock, as the clocks of two machines differ.
Folder and files belong to one user; nothing else there is trusted. Light to import.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from mopd.base.files.json_text import parse_json
from mopd.base.files.reading import OTHERS_WRITE, read_bytes, shown_path
from mopd.base.files.writing import write_private, writing
from mopd.base.text import file_name, one_line, visible
from mopd.base.types import UserError
from mopd.config.reading.build import build_from_json
from mopd.config.values import check_server_url
from mopd.serving.address import MAX_TOKEN_BYTES, check_token

logger = logging.getLogger(__name__)

FORMAT = "mopd replica 1"
BEAT_S = 2.0
"""Seconds between two counts."""
MAX_FILES = 1024
"""Files that are read for one group; more cannot all be servers'."""
MAX_BYTES = 16_384
MAX_VALUES = 64
"""Values in one file: it has some ten."""
MAX_TEXT = 1024
"""Characters of one text in it."""
_CURE = "remove it, servers write their own anew"


@dataclass(frozen=True, kw_only=True, slots=True)
class Registration:
    """One server's description of itself."""

    key: str
    """Key of its group: ``rollout`` or ``teachers.NAME``."""
    server_id: str
    """Random id of this life of the server."""
    url: str
    host: str
    """Name of its machine, for people."""
    pid: int
    started: float
    """Seconds since the epoch on its machine, for people."""
    beat: int
    """Heartbeat count: goes up every ``BEAT_S`` while the server lives."""
    manifest: Mapping[str, str]
    """Hashes of the folder that it serves."""

    def __post_init__(self) -> None:
        check_server_url(self.url)
        if not re.fullmatch("[0-9a-f]{16}", self.server_id):
            raise ValueError("server_id is none")
        for name in ("key", "host"):
            if len(getattr(self, name)) > MAX_TEXT:
                raise ValueError(f"{name} has more than {MAX_TEXT} characters")

    @property
    def place(self) -> str:
        """URL, machine and process, fit for a message."""
        return f"{self.url} on {visible(self.host)}, process {self.pid}"


@dataclass(kw_only=True, slots=True)
class RegisteredServers:
    """Result of one look into the folder, for one group."""

    servers: dict[Path, Registration] = field(default_factory=dict)
    """Servers by file."""
    problems: dict[Path, str] = field(default_factory=dict)
    """Files that are no server's, with the reason."""


def read_registrations(folder: Path, key: str) -> RegisteredServers:
    """Return the servers of the group ``key`` that ``folder`` names; none if there is no folder yet.

    Raises:
        UserError: others than this user may have written in the folder.
        OSError: it cannot be read now.
    """
    found = RegisteredServers()
    if not _is_there(folder):
        return found
    for path in _files_of(folder, key):
        if len(found.servers) + len(found.problems) >= MAX_FILES:
            found.problems[folder] = (
                f"{shown_path(folder)}: more than {MAX_FILES} files of {key}: the others are not read"
            )
            break
        try:
            server = _read(path)
            if server.key.startswith(f"{key}."):  # teacher math.hard beside teacher math
                continue
            if server.key != key:
                raise UserError(f"{shown_path(path)}: is of {visible(server.key)[:80]!r}, not of {key!r}: {_CURE}")
            found.servers[path] = server
        except UserError as error:
            if os.path.lexists(path):  # else the server removed it while it was read
                found.problems[path] = str(error)
    return found


def read_server_token(path: Path) -> str:
    """Return the secret of the server of file ``path``; ``UserError`` if it is missing, another user's, or none."""
    file = path.with_suffix(".token")
    return check_token(
        read_bytes(file, cure=_CURE, max_bytes=MAX_TOKEN_BYTES, is_private=True).decode("ascii", "replace"), file
    )


def remove_registration(path: Path) -> None:
    """Remove a server's files, the one that names it first; ``OSError`` if the system refuses."""
    for file in (path, path.with_suffix(".token")):
        file.unlink(missing_ok=True)


def _is_there(folder: Path) -> bool:
    """Return whether there is such a folder; ``UserError`` if others than this user may write in it."""
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(found.st_mode):
        raise UserError(f"{shown_path(folder)}: is no folder: remove it")
    if found.st_uid != os.geteuid() or found.st_mode & OTHERS_WRITE:
        raise UserError(
            f"{shown_path(folder)}: others than this user may write there, and servers are believed what they write: "
            f"chown and chmod 700 it, or remove it"
        )
    return True


def _files_of(folder: Path, key: str) -> Iterator[Path]:
    start = f"{file_name(key)}."
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(start) and entry.name.endswith(".json"):
                yield folder / entry.name


def _read(path: Path) -> Registration:
    try:
        content = read_bytes(path, cure=_CURE, max_bytes=MAX_BYTES, is_private=True)
        tree = parse_json(content, max_depth=4, max_values=MAX_VALUES)
    except ValueError as error:
        raise UserError(f"{shown_path(path)}: not valid JSON ({one_line(error)}): {_CURE}") from error
    if not isinstance(tree, dict) or tree.pop("format", None) != FORMAT:
        raise UserError(f"{shown_path(path)}: is no server's of this mopd: {_CURE}")
    return build_from_json(Registration, tree, shown_path(path))


class Registrar:
    """A server's own files: written when it answers, rewritten while it lives, removed when it ends in order.

    Example::

        registrar = Registrar(Path("runs/one/replicas"), "teachers.math", host="node1")
        registrar.begin("http://10.0.0.5:8000", manifest)   # clients have to send registrar.token
        registrar.end()
    """

    def __init__(self, folder: Path, key: str, *, host: str) -> None:
        """Create the folder if it is missing. ``UserError`` if it cannot be created, or others may write in it."""
        self.token = secrets.token_hex(32)
        with writing(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
        _is_there(folder)
        self._path = folder / f"{file_name(key)}.{file_name(host)}.{os.getpid()}.json"
        self._token_path = self._path.with_suffix(".token")
        self._key, self._host = key, host
        self._mine: Registration | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="registration", daemon=True)

    def begin(self, url: str, manifest: Mapping[str, str]) -> None:
        """Write the files: from now on the run may use the server. ``UserError`` if they cannot be written."""
        self._mine = Registration(
            key=self._key,
            server_id=secrets.token_hex(8),
            url=url,
            host=self._host,
            pid=os.getpid(),
            started=time.time(),
            beat=0,
            manifest=manifest,
        )
        write_private(self._token_path, self.token.encode("ascii"))  # first: a reader of the other file needs it
        self._write()
        self._thread.start()

    def end(self) -> None:
        """Remove the files; may be called twice, and without ``begin``."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(BEAT_S)
        with writing(self._path):
            remove_registration(self._path)

    def _write(self) -> None:
        assert self._mine is not None
        if not self._token_path.exists():
            write_private(self._token_path, self.token.encode("ascii"))
        write_private(self._path, json.dumps({"format": FORMAT, **asdict(self._mine)}).encode("utf-8"))

    def _beat(self) -> None:
        """Rewrite the file every ``BEAT_S``. If it cannot be written for a while, the server, which has loaded its
        model, goes on: the run drops it and takes it in again."""
        assert self._mine is not None
        is_refused = False
        while not self._over.wait(BEAT_S):
            self._mine = replace(self._mine, beat=self._mine.beat + 1)
            try:
                self._write()
                if self._over.is_set():  # `end` did not wait for this write
                    with writing(self._path):
                        remove_registration(self._path)
                is_refused = False
            except UserError as error:
                if not is_refused:
                    logger.warning("the run cannot see that this server lives: %s", error)
                is_refused = True
