"""Content hashes of a Hugging Face folder, which tell whether it is still the model that the run began with.

The weights hash is taken over tensors (name, dtype, shape, bytes), so it does not depend on how they are sharded over
files. Reading a large model takes minutes; digests are therefore kept in a cache file, per weight file, by (path, size,
modification time in ns).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mopd.base.files.json_text import read_json_object
from mopd.base.files.reading import shown_path
from mopd.base.files.writing import WriteRefusedError, write_text
from mopd.base.types import UserError
from mopd.conversion.hf.header import TensorInfo, read_header
from mopd.conversion.hf.reader import PROCESSOR_PATTERNS, TOKENIZER_PATTERNS, matching_files, weight_files
from mopd.conversion.models.config_keys import CONFIG_FILE, read_config

logger = logging.getLogger(__name__)

HASHES = ("config_sha256", "weights_sha256", "tokenizer_sha256")
ADAPTER_HASH = "adapter_sha256"
_CHUNK_BYTES = 2**24
_HASH_THREADS = 4
_MAX_CACHE_BYTES = 2**28


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Identity of one model folder. All hashes are hexadecimal SHA-256."""

    path: str
    """Folder, as the recipe spells it; not part of the identity."""
    config_sha256: str
    """Hash of the bytes of ``config.json``."""
    weights_sha256: str
    """Hash of names, dtypes, shapes and bytes of all tensors; empty if they were not hashed (a teacher whose weights
    only an external server has)."""
    tokenizer_sha256: str
    """Hash of names and bytes of the files of tokenizer, chat template and image processor."""
    adapter_sha256: str = ""
    """``Adapter.sha256`` of the adapter beside it; empty without one."""

    @property
    def identity(self) -> list[str]:
        """All hashes, without that of an adapter where there is none."""
        return [getattr(self, name) for name in HASHES] + [self.adapter_sha256] * bool(self.adapter_sha256)


def make_manifest(folder: Path, *, cache_file: Path | None, with_weights: bool = True) -> Manifest:
    """Hash a model folder, without its weights if asked to.

    Weight files whose (path, size, mtime_ns) stand in ``cache_file`` are not read again. The cache only saves time: if
    it is damaged or cannot be written, that is logged as a warning and the weights are read.

    Raises:
        UserError: the folder is no sound Hugging Face checkpoint.
    """
    folder = Path(folder)
    read_config(folder)
    return Manifest(
        path=str(folder),
        config_sha256=_hash_files(folder, [folder / CONFIG_FILE]),
        weights_sha256=_hash_weights(folder, cache_file) if with_weights else "",
        tokenizer_sha256=_hash_files(folder, matching_files(folder, (*TOKENIZER_PATTERNS, *PROCESSOR_PATTERNS))),
    )


def compare_manifests(old: Manifest, new: Manifest) -> list[str]:
    """Return what changed between two manifests of the same model, one phrase per hash; empty if nothing did."""
    return [
        f"{name} was {getattr(old, name)[:12]}…, is {getattr(new, name)[:12]}…"
        for name in (*HASHES, ADAPTER_HASH)
        if getattr(old, name) != getattr(new, name)
    ]


def _hash_files(folder: Path, paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _hash_weights(folder: Path, cache_file: Path | None) -> str:
    cache = {} if cache_file is None else _read_cache(cache_file)
    tensors: dict[str, str] = {}
    fresh: dict[str, dict[str, str]] = {}
    for path in weight_files(folder):
        if not path.is_file():
            raise UserError(f"{path}: missing; fetch the checkpoint again")
        key = _cache_key(path)
        if key not in cache:
            cache[key] = fresh[key] = _hash_tensors(path)
        tensors |= cache[key]
    if fresh and cache_file is not None:
        known = {key: own for key, own in _read_cache(cache_file).items() if _is_current(key)}
        _write_cache(cache_file, known | fresh)
    lines = "".join(f"{name}\0{tensors[name]}\n" for name in sorted(tensors))
    return hashlib.sha256(lines.encode()).hexdigest()


def _cache_key(path: Path) -> str:
    stat = path.stat()
    return f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"


def _is_current(key: str) -> bool:
    """Return whether the file is still there, unchanged. Entries of other files can never be used again."""
    try:
        return _cache_key(Path(key.rsplit("|", 2)[0])) == key
    except OSError:
        return False


def _hash_tensors(path: Path) -> dict[str, str]:
    """Return the digest of each tensor of one file; hashlib releases the interpreter lock, so threads help."""
    header = read_header(path)
    with ThreadPoolExecutor(_HASH_THREADS) as pool:
        digests = pool.map(lambda info: _hash_tensor(path, info), header.values())
        return dict(zip(header, digests, strict=True))


def _hash_tensor(path: Path, info: TensorInfo) -> str:
    digest = hashlib.sha256(f"{info.dtype}\0{list(info.shape)}\0".encode())
    with path.open("rb") as file:
        file.seek(info.start)
        left = info.stop - info.start
        while left:
            chunk = file.read(min(left, _CHUNK_BYTES))
            if not chunk:
                raise UserError(f"{path}: became shorter while it was read; leave the checkpoint alone during a run")
            digest.update(chunk)
            left -= len(chunk)
    return digest.hexdigest()


def _read_cache(cache_file: Path) -> dict[str, dict[str, str]]:
    try:
        if not os.path.lexists(cache_file):
            return {}
        cache = read_json_object(cache_file, cure="delete it", max_bytes=_MAX_CACHE_BYTES)
        for digests in cache.values():
            if not isinstance(digests, dict) or not all(isinstance(digest, str) for digest in digests.values()):
                raise UserError(f"{shown_path(cache_file)}: is not a cache of weight hashes: delete it")
    except UserError as error:
        logger.warning("weights are read anew: %s", error)
        return {}
    return cache


def _write_cache(cache_file: Path, cache: dict[str, dict[str, str]]) -> None:
    """Write the cache. Two runs may share the file: the last writer wins, and a reader never sees half of it."""
    try:
        write_text(cache_file, json.dumps(cache))
    except WriteRefusedError as error:
        logger.warning("the next start reads all weights again: %s", error)
