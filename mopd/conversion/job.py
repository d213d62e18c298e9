"""One conversion: files written independently of one another, by any number of ranks, resumable, whole or absent.

While it runs everything lies beside the target, in ``.<target>.converting``::

    job.json            what is converted and how; --resume goes on only with the same
    lock                held by the process that writes
    journal/            one small file for each finished one, with its size and SHA-256
    stop                a rank has failed: all ranks leave
    out/                becomes the target by one rename, after its manifest was written

A file is finished when its bytes are on disk and the journal has it; the others are written again. A file's content
depends on the job alone, never on the number of ranks or on an interruption.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, BinaryIO, TypeVar

from mopd.base.files.json_text import read_json_object
from mopd.base.files.reading import shown_path
from mopd.base.files.writing import sync, write_json, writing
from mopd.base.types import UserError

MAX_FILE_BYTES = 2**30
"""Size at which a file of weights ends, unless the caller says otherwise."""
_HASHED_AT_ONCE = 2**20
_SPARE_BYTES = 2**24
"""Room for manifest, index and journal in the check of disk space."""
_MAX_JOURNAL_BYTES = 2**28
_MAX_UNHASHED = 2
"""Largest number of files that are written but not yet hashed."""

Item = TypeVar("Item")


class Stopped(Exception):
    """Another rank has failed; its error is the one to report."""


CheckInputs = Callable[[int, int, Callable[[], bool]], None]
"""Function ``(rank, size, is_over)`` that hashes this rank's share of the inputs while it writes, until ``is_over()``;
raises ``UserError``."""


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file to write."""

    name: str
    num_bytes: int
    """Size, at least approximately: used for the check of disk space and for progress."""
    write: Callable[[BinaryIO], list[int]]
    """Function that writes all its bytes and returns numbers that the end of the job needs (``Written.facts``)."""
    num_facts: int = 0
    """How many numbers ``write`` returns."""


@dataclass(frozen=True, slots=True)
class Written:
    """A finished file, as the journal records it."""

    name: str
    num_bytes: int
    sha256: str
    facts: list[int]


@dataclass(kw_only=True, eq=False)
class Job:
    """A folder to be written. Rank 0 calls ``begin``, all ranks ``write_share``, rank 0 ``complete`` or ``discard``."""

    target: Path
    files: Sequence[OutputFile]
    description: Mapping[str, Any]
    """JSON-able: command, options and identity of the inputs. The same description gives the same bytes."""
    finish: Callable[[Path, Mapping[str, Written]], None]
    """Function that writes the rest of the folder (metadata, side files), given the written files."""
    manifest: str
    """Name of the file that is written last: the SHA-256 of every other file, and the description under ``job``."""
    check_inputs: CheckInputs | None = None
    _lock_file: IO[str] | None = field(init=False, default=None)

    @property
    def work(self) -> Path:
        """The folder of an unfinished conversion."""
        return self.target.parent / f".{self.target.name}.converting"

    @property
    def out(self) -> Path:
        """The target before it has its name."""
        return self.work / "out"

    @property
    def num_bytes(self) -> int:
        """Bytes to write in all."""
        return sum(file.num_bytes for file in self.files)

    def begin(self, *, resume: bool) -> bool:
        """Make or take over the work folder; return False if ``resume`` finds nothing left to do.

        Raises:
            UserError: the target exists, another conversion has the folder, it was of something else, or the disk is
                too small.
        """
        if resume and self._is_complete():
            shutil.rmtree(self.work, ignore_errors=True)
            return False
        require_new(self.target)
        if self.work.exists() and not resume:
            raise UserError(f"{self.work}: left by an interrupted conversion; add --resume to go on, or remove it")
        with writing(self.target.parent):
            self.target.parent.mkdir(parents=True, exist_ok=True)
            is_new = not self.work.exists()
            self._refuse_links()
            try:
                self.work.mkdir(exist_ok=True)
                self._lock()
                self._agree()
                (self.work / "journal").mkdir(exist_ok=True)
                done = sum(entry.num_bytes for entry in self._journal().values())
                require_free_bytes(self.target.parent, self.num_bytes - done + _SPARE_BYTES)
                self.out.mkdir(exist_ok=True)
            except BaseException:
                if is_new:
                    shutil.rmtree(self.work, ignore_errors=True)
                raise
        (self.work / "stop").unlink(missing_ok=True)
        return True

    def write_share(self, rank: int, size: int) -> None:
        """Write this rank's files; those that the journal has, and that still have that hash, are left alone.

        Raises:
            UserError: an input is unsound or an output cannot be written.
            Stopped: another rank has called ``stop``.
        """
        is_over = threading.Event()
        with ThreadPoolExecutor(1) as checker, ThreadPoolExecutor(1) as finisher:
            checked = checker.submit(self.check_inputs, rank, size, is_over.is_set) if self.check_inputs else None
            try:
                self._write_files(self.files[rank::size], finisher, checked)
                if checked is not None:
                    checked.result()
            finally:
                is_over.set()

    def _write_files(
        self, files: Sequence[OutputFile], finisher: ThreadPoolExecutor, checked: Future[None] | None
    ) -> None:
        """Write files one after another; hashing one overlaps with writing the next."""
        finished = self._journal()
        pending: list[Future[None]] = []
        for file in files:
            if (self.work / "stop").exists():
                raise Stopped
            if checked is not None and checked.done():
                checked.result()
            if self._is_finished(file, finished):
                continue
            path = self.out / file.name
            with writing(path), path.open("wb") as stream:
                facts = file.write(stream)
            pending.append(finisher.submit(self._finish_file, path, facts))
            if len(pending) > _MAX_UNHASHED:
                pending.pop(0).result()
        for future in pending:
            future.result()

    def stop(self) -> None:
        """Make all ranks leave ``write_share`` at their next file."""
        (self.work / "stop").touch()

    def complete(self) -> None:
        """Write the last files and give the folder its name."""
        journal = self._journal()
        with writing(self.target):
            self._remove_leftovers()
            self.finish(self.out, {file.name: journal[file.name] for file in self.files})
            names = files_below(self.out)
            hashes = {name: journal[name].sha256 if name in journal else sha256_of(self.out / name) for name in names}
            write_json(self.out / self.manifest, {"sha256": hashes, "job": self.description}, sort_keys=True)
            for path in self.out.rglob("*"):
                if path.name not in journal:
                    sync(path)
            sync(self.out)
            self.out.rename(self.target)  # atomic; replaces an empty folder of that name
            sync(self.target.parent)
            shutil.rmtree(self.work)

    def discard(self) -> None:
        """Remove everything that was written."""
        shutil.rmtree(self.work, ignore_errors=True)

    def _remove_leftovers(self) -> None:
        """Remove what an interrupted ``finish`` wrote: the manifest must not list it."""
        for path in set(self.out.iterdir()) - {self.out / file.name for file in self.files}:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def _is_complete(self) -> bool:
        path = self.target / self.manifest
        return path.is_file() and _read(path, cure="remove its folder").get("job") == _plain(self.description)

    def _refuse_links(self) -> None:
        """Raise ``UserError`` for a link in the work folder: files written through it could land anywhere."""
        for path in (self.work, *self.work.rglob("*")):
            if path.is_symlink():
                raise UserError(
                    f"{shown_path(path)}: is a symbolic link, which no conversion makes; remove {self.work}"
                )

    def _lock(self) -> None:
        self._lock_file = (self.work / "lock").open("w")
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"{self.work}: another process is converting into it; wait for its end") from error

    def _agree(self) -> None:
        """Check that the work folder belongs to the same conversion, or make a new one this conversion's."""
        path = self.work / "job.json"
        mine = _plain(self.description)
        if not path.is_file():
            write_json(path, mine, sort_keys=True)
            return
        theirs = _read(path, cure=f"remove {self.work}")
        for key in sorted(theirs.keys() | mine.keys()):
            if theirs.get(key) != mine.get(key):
                raise UserError(
                    f"{self.work}: the interrupted conversion had another {key!r} ({theirs.get(key)!r:.100}, now "
                    f"{mine.get(key)!r:.100}); repeat it as it was, or remove the folder"
                )

    def _journal(self) -> dict[str, Written]:
        """Return the finished files by name. A journal file that a crash cut off still has its temporary name."""
        kinds = {"name": str, "num_bytes": int, "sha256": str, "facts": list}
        done = {}
        for path in sorted((self.work / "journal").glob("*.json")):
            entry = _read(path, cure=f"remove {self.work}")
            is_sound = {key: type(value) for key, value in entry.items()} == kinds
            if not is_sound or not all(type(fact) is int and fact >= 0 for fact in entry["facts"]):
                raise UserError(f"{shown_path(path)}: not understood; remove {self.work}")
            done[entry["name"]] = Written(**entry)
        return done

    def _is_finished(self, file: OutputFile, journal: Mapping[str, Written]) -> bool:
        path, entry = self.out / file.name, journal.get(file.name)
        if entry is None or len(entry.facts) != file.num_facts or not path.is_file():
            return False
        # Hashed again: the file may have been damaged since.
        return path.stat().st_size == entry.num_bytes and sha256_of(path) == entry.sha256

    def _finish_file(self, path: Path, facts: list[int]) -> None:
        """Sync and hash a file, then enter it into the journal."""
        with writing(path):
            sync(path)
            # Only after the sync: what the journal has must survive a crash.
            entry = Written(path.name, path.stat().st_size, sha256_of(path), facts)
            write_json(self.work / "journal" / f"{path.name}.json", asdict(entry), sort_keys=True)


def _read(path: Path, *, cure: str) -> dict[str, Any]:
    return read_json_object(path, cure=cure, max_bytes=_MAX_JOURNAL_BYTES)


def _plain(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value as JSON gives it back."""
    plain: dict[str, Any] = json.loads(json.dumps(value))
    return plain


def grouped_by_size(items: Iterable[Item], size_of: Callable[[Item], int], limit: int) -> Iterator[list[Item]]:
    """Yield items in runs, each ended before its sizes exceed ``limit`` in all; a larger item is a run by itself."""
    run: list[Item] = []
    total = 0
    for item in items:
        total += size_of(item)
        if run and total > limit:
            yield run
            run, total = [], size_of(item)
        run.append(item)
    if run:
        yield run


def sha256_of(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_HASHED_AT_ONCE):
            digest.update(piece)
    return digest.hexdigest()


def files_below(folder: Path) -> list[str]:
    """Return the relative names of all files, sorted."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def require_new(target: Path) -> None:
    """Refuse a target that exists already, or a link, which a rename cannot replace.

    Raises:
        UserError: names it.
    """
    if target.is_symlink():
        raise UserError(f"{shown_path(target)}: is a symbolic link; name the folder that it leads to, or remove it")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{shown_path(target)}: already exists; name another folder or remove it")


def require_free_bytes(folder: Path, needed: int) -> None:
    """Refuse to begin what the disk cannot hold.

    Raises:
        UserError: names both sizes.
    """
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"{folder}: needs {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free; free space there or name another "
            "place"
        )
