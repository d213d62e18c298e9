"""Models and data sets of the Hugging Face Hub as local files, by way of ``huggingface_hub``: its cache, its
environment variables (``HF_HOME``, ``HF_ENDPOINT``, ``HF_TOKEN``, ``HF_HUB_OFFLINE``), its progress bars.

Only files that mopd reads are fetched: config, tokenizer, chat template, licence and safetensors of a model, parquet or
JSONL files of a data set. Never a pickle, never code.
"""

from __future__ import annotations

import glob
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from huggingface_hub import HfApi, constants, errors, get_cached_repo_tree, is_offline_mode, snapshot_download
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import tqdm

from mopd.base.files.reading import shown_path
from mopd.base.files.writing import refusal
from mopd.base.text import first_few, one_line, visible
from mopd.base.types import UserError
from mopd.conversion.hf.reader import INDEX_FILE, KEPT_PATTERNS, WEIGHTS_FILE, weight_files
from mopd.conversion.models.config_keys import CONFIG_FILE
from mopd.data.hub.names import CONVERTED, DATA_SUFFIXES, HubName, files_of_part, is_commit, matches

ANSWER_TIMEOUT_S = 60.0
"""Deadline for facts about a repository: its commit, its files. The library itself waits for these without end."""
STALL_TIMEOUT_S = 300.0
"""Longest time a download may bring nothing; the library's own deadlines (``HF_HUB_DOWNLOAD_TIMEOUT``) are less."""
MAX_FILES = 100_000
"""Largest number of files of one repository."""
MAX_DATA_FILES = 10_000
MAX_NAME_BYTES, MAX_PATH_CHARACTERS = 255, 1000
MAX_SIDE_BYTES = 256 * 2**20
"""Largest file beside the weights; the largest published tokenizers have 35 MiB."""
_NEVER = (".py", ".pyc", ".so", ".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".h5", ".msgpack")
_LISTED = 8
_KINDS = {"model": "model", "dataset": "data set"}
Answer = TypeVar("Answer")
Kind = Literal["model", "dataset"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetched:
    """Local files that a name of the Hub stands for."""

    paths: tuple[str, ...]
    """The folder of a model; the files of a data set."""
    commit: str


def fetch_model(name: HubName, *, with_weights: bool = True) -> Fetched:
    """Return a folder with the model, all of it in the cache.

    Raises:
        UserError: what is wrong with the repository or the access to it; the caller puts the key and the name before
            it.
    """
    repository = _Repository("model", name, name.revision)
    side = [
        file
        for file in repository.files
        if any(matches(file, pattern) for pattern in KEPT_PATTERNS) and not file.endswith(_NEVER)
    ]
    if not repository.files and is_offline_mode():
        raise UserError(_not_cached())
    if CONFIG_FILE not in side:
        raise UserError(f"it has no {CONFIG_FILE}: name a repository with a model for transformers")
    for file in side:
        size = repository.files[file]
        if size > MAX_SIDE_BYTES:
            raise UserError(f"its {visible(file)} has {size} bytes, above {MAX_SIDE_BYTES}: name another")
    if not with_weights:
        folder = repository.fetch(side)
    elif INDEX_FILE in repository.files:
        folder = repository.fetch([*side, INDEX_FILE])
        repository.fetch([*side, INDEX_FILE, *(path.name for path in weight_files(Path(folder)))])
    elif WEIGHTS_FILE in repository.files:
        folder = repository.fetch([*side, WEIGHTS_FILE])
    else:
        raise UserError(
            f"it has no {WEIGHTS_FILE} and no {INDEX_FILE} (other formats of weights are not read): name a repository "
            "with safetensors"
        )
    return Fetched(paths=(folder,), commit=repository.commit)


def fetch_data(name: HubName) -> Fetched:
    """Return the files of a split, or those that the name's part selects. Without a revision a split is looked for in
    the default branch, then in the branch where the Hub keeps every data set as parquet.

    Raises:
        UserError: as ``fetch_model``.
    """
    if name.part is None:
        raise UserError(
            f"a data set needs a split or a file: write {name}:SPLIT, {name}:CONFIG/SPLIT or {name}:FILE.parquet"
        )
    repository = _Repository("dataset", name, name.revision)
    there = list(repository.files)
    files = files_of_part(name.part, there)
    if not files and name.revision is None and not name.part.endswith(DATA_SUFFIXES):
        converted = _converted(name)
        if converted is not None:
            there, repository = [*there, *converted.files], converted
            files = files_of_part(name.part, list(converted.files))
    if not files and is_offline_mode():
        raise UserError(_not_cached())
    if not files:
        raise UserError(f"it has no {visible(name.part)!r}: {_there(there)}")
    if len(files) > MAX_DATA_FILES:
        raise UserError(f"{len(files)} files match, above {MAX_DATA_FILES}: name fewer")
    folder = repository.fetch(files)
    return Fetched(paths=tuple(os.path.join(folder, file) for file in files), commit=repository.commit)


def _converted(name: HubName) -> _Repository | None:
    """Return the branch of converted files; ``None`` if there is none."""
    try:
        return _Repository("dataset", name, CONVERTED)
    except UserError as error:
        if isinstance(error.__cause__, (errors.RevisionNotFoundError, errors.RevisionResolutionError)):
            return None
        raise


def _there(files: Iterable[str]) -> str:
    """Return a hint that lists what the name could have meant."""
    found = sorted(visible(file) for file in files if file.endswith(DATA_SUFFIXES))
    if not found:
        return "name a data set with parquet files"
    return f"name one of its splits or files ({first_few(found, _LISTED)})"


class _Repository:
    """One repository at one commit."""

    def __init__(self, kind: Kind, name: HubName, revision: str | None) -> None:
        """Resolve the revision and list the files. Raise ``UserError``."""
        self._kind, self._name, self._revision = kind, name, revision
        self._is_offline = is_offline_mode()
        self._api = HfApi(library_name="mopd")
        self._resolved = self._ask(
            lambda: self._api.resolve_revision(
                name.repository, repo_type=kind, revision=revision, local_files_only=self._is_offline
            )
        )
        self.commit: str = self._resolved.resolved
        if not is_commit(self.commit):
            raise UserError(f"{constants.ENDPOINT} answers with {self.commit!a:.80} for a commit: check HF_ENDPOINT")
        self.files: dict[str, int] = self._ask(self._list)
        """Path -> size in bytes."""

    def fetch(self, files: Sequence[str]) -> str:
        """Return the folder that holds ``files`` of this repository. Raise ``UserError``."""
        for file in files:
            self._check_path(file)
            if file not in self.files:
                raise UserError(f"it has no file {visible(file)!r}, which {INDEX_FILE} names: name a whole repository")
        moved = [time.monotonic()]

        class Bar(tqdm):
            """The library's progress bar, which also notes when something last moved."""

            def update(self, n: float | None = 1) -> bool | None:
                moved[0] = time.monotonic()
                shown: bool | None = super().update(n)
                return shown

        folder = self._ask(
            lambda: snapshot_download(
                self._name.repository,
                repo_type=self._kind,
                revision=self._resolved,
                allow_patterns=[glob.escape(file) for file in files],
                local_files_only=self._is_offline,
                library_name="mopd",
                tqdm_class=Bar,
            ),
            lambda: moved[0],
        )
        for file in files:
            path = os.path.join(folder, file)
            if not os.path.isfile(path) or os.path.getsize(path) != self.files[file]:
                state = "incomplete" if os.path.exists(path) else "missing"
                raise UserError(
                    f"{shown_path(path)} is {state}: remove {shown_path(os.path.dirname(os.path.dirname(folder)))} and "
                    "fetch it again, with network"
                )
        return folder

    def _list(self) -> dict[str, int]:
        repository, kind = self._name.repository, self._kind
        try:
            entries: Iterable[Any] = get_cached_repo_tree(repository, repo_type=kind, revision=self.commit)
        except errors.CachedRepoTreeNotFoundError:
            if self._is_offline:  # the cache was filled by another tool
                try:
                    folder = snapshot_download(
                        repository, repo_type=kind, revision=self._resolved, local_files_only=True, library_name="mopd"
                    )
                except errors.LocalEntryNotFoundError:  # the commit is known, none of its files is cached
                    return {}
                paths = (path for path in Path(folder).rglob("*") if path.is_file())
                return {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}
            entries = self._api.list_repo_tree(repository, recursive=True, revision=self.commit, repo_type=kind)
        listed = list(itertools.islice(entries, MAX_FILES + 1))
        if len(listed) > MAX_FILES:
            raise UserError(f"it lists more than {MAX_FILES} files: name a smaller repository")
        files = [entry for entry in listed if isinstance(entry, RepoFile)]
        if not all(isinstance(file.path, str) and type(file.size) is int and file.size >= 0 for file in files):
            raise UserError(f"{constants.ENDPOINT} lists what are no files: check HF_ENDPOINT")
        return {file.path: file.size for file in files}

    def _check_path(self, file: str) -> None:
        """Raise ``UserError`` for a file name that could leave the folder or that a file system cannot hold."""
        parts = file.split("/")
        long = len(file) > MAX_PATH_CHARACTERS or any(
            len(part.encode(errors="replace")) > MAX_NAME_BYTES for part in parts
        )
        if long or not file.isprintable() or "\\" in file or any(part in ("", ".", "..") for part in parts):
            raise UserError(f"it has a file of the name {file!a:.100}, which cannot be kept: name another repository")

    def _ask(self, call: Callable[[], Answer], moved: Callable[[], float] | None = None) -> Answer:
        """Return the library's answer, within ``ANSWER_TIMEOUT_S``, or, if ``moved`` tells when something last came,
        within ``STALL_TIMEOUT_S`` of that; raise one line for any error."""
        start = time.monotonic()
        try:
            if moved is not None:
                return _in_time(call, moved, STALL_TIMEOUT_S)
            return _in_time(call, lambda: start, ANSWER_TIMEOUT_S)
        except UserError:
            raise
        except Exception as error:  # requests, files, JSON: the library has no common error class
            refused = refusal(error)
            if refused is not None:
                raise refused from error
            raise UserError(self._describe(error)) from error

    def _describe(self, error: Exception) -> str:
        """Return the one line for an error of the library."""
        page = f"{constants.ENDPOINT}/{'datasets/' if self._kind == 'dataset' else ''}{self._name.repository}"
        if isinstance(error, errors.GatedRepoError):
            return f"it is gated: ask for access on {page}, and set HF_TOKEN to a token of yours"
        if isinstance(error, errors.RepositoryNotFoundError):
            return (
                f"there is no such {_KINDS[self._kind]}, or none that HF_TOKEN may see: correct the name or the path, "
                "or set HF_TOKEN"
            )
        if isinstance(error, errors.RevisionNotFoundError):
            return f"it has no revision {str(self._revision)!r}: name a branch, a tag or a commit that it has"
        if isinstance(error, errors.HfHubHTTPError) and error.response.status_code in (401, 403):
            return f"access is refused (HTTP {error.response.status_code}): set HF_TOKEN to a token that may read it"
        if self._is_offline and isinstance(error, (errors.LocalEntryNotFoundError, errors.RevisionResolutionError)):
            return _not_cached()
        return (
            f"it cannot be fetched ({type(error).__name__}: {one_line(error):.300}): check network and HF_ENDPOINT, "
            "or set HF_HUB_OFFLINE=1 if the cache holds it"
        )


def _not_cached() -> str:
    return (
        f"HF_HUB_OFFLINE is set, and the cache {shown_path(constants.HF_HUB_CACHE)!r} does not hold it whole: unset "
        "HF_HUB_OFFLINE, or fill the cache first"
    )


def _in_time(call: Callable[[], Answer], since: Callable[[], float], timeout_s: float) -> Answer:
    """Run ``call()`` in a thread and return its result; raise TimeoutError when the time is over."""
    answer: Future[Answer] = Future()

    def work() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:  # handed over, with its traceback
            answer.set_exception(error)

    # A daemon, which no pool has: a call that never returns must not keep the process alive.
    threading.Thread(target=work, name="hub", daemon=True).start()
    while (left := since() + timeout_s - time.monotonic()) > 0:
        if wait([answer], min(left, 1.0)).done:
            return answer.result()
    raise TimeoutError(f"nothing came for {timeout_s:g} s")
