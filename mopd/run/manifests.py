"""Hashes of the models of a run, kept in its folder and compared at resume and with what the servers report."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from mopd.base.files.json_text import read_json_object
from mopd.base.files.reading import open_regular, shown_path
from mopd.base.files.writing import WriteRefusedError, write_json, writing
from mopd.base.plugins import plugin_hash
from mopd.base.types import UserError
from mopd.config.groups import TeacherConfig
from mopd.config.losses import CustomLossConfig
from mopd.config.schema import Recipe
from mopd.conversion.adapters import read_adapter
from mopd.conversion.hf.header import read_header
from mopd.conversion.hf.manifest import ADAPTER_HASH, HASHES, Manifest, compare_manifests, make_manifest
from mopd.conversion.hf.reader import INDEX_FILE, PROCESSOR_PATTERNS, WEIGHTS_FILE, matching_files, weight_files
from mopd.conversion.job import sha256_of
from mopd.conversion.models.config_keys import CONFIG_FILE
from mopd.engines.replicas.identity import PROBE_TOKENS
from mopd.report.run_files import CURE

logger = logging.getLogger(__name__)

NUM_SAMPLES, SAMPLE_BYTES = 256, 4096
"""Number and size of the samples of a weight file that nodes compare besides both ends of each of its tensors."""
SAMPLE_THREADS = 16
"""Threads that read samples: a network file system answers many small reads at a time, and a model of experts has a
hundred thousand tensors."""
CACHE = "XDG_CACHE_HOME"
"""Environment variable that names the folder of caches; ``~/.cache`` without it."""
FINGERPRINTS = "fingerprints"
"""Key of ``manifest.json`` for scores on a fixed probe, by ``teachers.NAME``."""
COMMITS = "commits"
"""Key of ``manifest.json`` for the recipe's names of the Hub at their commits, by key of the recipe."""
PLUGINS = "plugins"
"""Key of ``manifest.json`` for the SHA-256 of the files whose code decides what is learned, by key of the recipe."""
EXTRAS = "engine.extra"
"""Key of ``manifest.json`` for arguments of an engine that may change scores, by ``rollout`` and ``teachers.NAME``: for
readers."""


def has_own_weights(teacher: TeacherConfig) -> bool:
    """Return whether the teacher's folder holds its weights; only a stock server's may lack them."""
    return not teacher.stock or any(Path(teacher.model).glob("*.safetensors"))


def hash_cache() -> Path | None:
    """Return the file of digests by (path, size, modification time), so that a start does not read hundreds of
    gigabytes again. ``None``, after a warning, where there is no folder for it: a container's home is often closed."""
    try:
        folder = Path(os.environ.get(CACHE) or Path("~/.cache").expanduser()) / "mopd"
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
    except (RuntimeError, WriteRefusedError) as error:  # pathlib's, of a user without a home
        logger.warning("the next start reads all weights again: %s (%s names the place)", error, CACHE)
        return None
    return folder / "weight_hashes.json"


def make_manifests(recipe: Recipe) -> dict[str, Manifest]:
    """Return the manifests of ``student`` and of each ``teachers.NAME``."""
    cache = hash_cache()
    lora = recipe.student.lora
    start = "" if lora is None or lora.path is None else read_adapter(lora.path).sha256
    student = make_manifest(Path(recipe.student.model), cache_file=cache)
    manifests = {"student": replace(student, adapter_sha256=start)}
    for name, teacher in recipe.teachers.items():
        own = make_manifest(Path(teacher.model), cache_file=cache, with_weights=has_own_weights(teacher))
        adapter = "" if teacher.adapter is None else read_adapter(teacher.adapter).sha256
        manifests[f"teachers.{name}"] = replace(own, adapter_sha256=adapter)
    return manifests


def engine_extras(recipe: Recipe) -> dict[str, Any]:
    """Return the arguments of ``engine.extra`` by key of the group; none of groups without any."""
    groups = {"rollout": recipe.rollout, **{f"teachers.{name}": own for name, own in recipe.teachers.items()}}
    if not recipe.needs_rollout:
        del groups["rollout"]
    return {key: dict(extra) for key, group in groups.items() if (extra := getattr(group.engine, "extra", {}))}


def plugin_hashes(recipe: Recipe, *, of_ranks: bool = False) -> dict[str, str]:
    """Return the SHA-256 of the files whose code decides what is learned, by key of the recipe; with ``of_ranks`` of
    those that ranks of every node read.

    Raises:
        UserError: the code is not there.
    """
    named: dict[str, tuple[str, str]] = {}
    if isinstance(recipe.loss, CustomLossConfig):
        named["loss.module"] = recipe.loss.module, "loss"
    splits = (("train", recipe.data.train), ("validation", recipe.data.validation))
    for split, entries in () if of_ranks else splits:
        for i, file in enumerate(recipe.data.files(entries)):
            if file.reader is not None:
                named[f"data.{split}[{i}].reader.module"] = file.reader.module, "reader"
    return {key: plugin_hash(key, module, kind) for key, (module, kind) in named.items()}


def write_manifests(
    path: Path,
    manifests: Mapping[str, Manifest],
    fingerprints: Mapping[str, Any],
    commits: Mapping[str, str],
    extras: Mapping[str, Any] | None = None,
    plugins: Mapping[str, str] | None = None,
) -> None:
    """Write ``manifest.json`` of the run folder."""
    content: dict[str, Any] = {
        key: {name: text for name, text in asdict(own).items() if text or name != ADAPTER_HASH}
        for key, own in manifests.items()
    }
    more = {FINGERPRINTS: dict(fingerprints), COMMITS: dict(commits), EXTRAS: dict(extras or {})}
    more[PLUGINS] = dict(plugins or {})
    write_json(path, content | {key: value for key, value in more.items() if value})


def read_fingerprints(path: Path) -> dict[str, Any]:
    """Return the fingerprints by ``teachers.NAME``; empty for a run without any. Raises as ``check_unchanged``."""
    return _read(path)[1]


def check_commits(path: Path, current: Mapping[str, str]) -> None:
    """Refuse to resume with another commit of a model or data set of the Hub than the run began with.

    Raises:
        UserError: names the key of the recipe, both commits and the name to write; the file is not what
            ``write_manifests`` writes.
    """
    stored = _read(path)[2]
    for key, name in current.items():
        if stored.get(key) != name:
            began = f"{stored[key]!r}: write that name" if key in stored else "a local path: write that path"
            raise UserError(f"{key}: is {name!r} on the Hub now, the run began with {began}, or set another run_dir")


def check_plugins(path: Path, current: Mapping[str, str]) -> None:
    """Refuse to resume with other code than the run began with. ``UserError`` names the key of the recipe."""
    stored = _read(path)[3]
    for key, digest in current.items():
        if stored.get(key) != digest:
            began = f"sha256 {stored[key][:16]}" if key in stored else "none"
            raise UserError(
                f"{key}: its file has sha256 {digest[:16]} now, the run began with {began}: restore the file, or set "
                "another run_dir"
            )


def check_unchanged(path: Path, current: Mapping[str, Manifest]) -> None:
    """Refuse to resume with another model than the run began with.

    Raises:
        UserError: names the key of the model, or of an adapter that alone has changed, and what changed; the file is
            not what ``write_manifests`` writes.
    """
    stored = _read(path)[0]
    unmatched = sorted(set(stored) ^ set(current))
    if unmatched:
        names = ", ".join(name[:80] for name in unmatched[:10])
        raise UserError(f"{shown_path(path)}: {names} stand only in one of this file and the recipe: {CURE}")
    for key, manifest in current.items():
        differences = compare_manifests(stored[key], manifest)
        if differences:
            what, which = "model", f"{key}.model {manifest.path!r}"
            if stored[key].identity[: len(HASHES)] == manifest.identity[: len(HASHES)]:
                what, which = "adapter", "student.lora.path" if key == "student" else f"{key}.adapter"
            raise UserError(
                f"{which} is not what the run began with: {'; '.join(differences)}: restore that {what}, or set "
                "another run_dir"
            )


def _read(path: Path) -> tuple[dict[str, Manifest], dict[str, Any], dict[str, str], dict[str, str]]:
    """Return manifests by key of the model, fingerprints by ``teachers.NAME``, commits and hashes of code by key of the
    recipe."""
    data = read_json_object(path, cure=CURE)
    fingerprints, commits = data.pop(FINGERPRINTS, {}), data.pop(COMMITS, {})
    plugins = data.pop(PLUGINS, {})
    data.pop(EXTRAS, None)
    names = {field.name for field in fields(Manifest)}
    for key, value in data.items():
        if not _is_text(value) or value.keys() | {ADAPTER_HASH} != names:
            raise UserError(
                f"{shown_path(path)}: {key[:80]!r} does not hold {', '.join(sorted(names))} as text: {CURE}"
            )
    if not isinstance(fingerprints, dict) or not all(map(_is_fingerprint, fingerprints.values())):
        raise UserError(f"{shown_path(path)}: {FINGERPRINTS!r} holds what is no score of the probe: {CURE}")
    if not _is_text(commits):
        raise UserError(f"{shown_path(path)}: {COMMITS!r} holds what are no names of the Hub: {CURE}")
    if not _is_text(plugins):
        raise UserError(f"{shown_path(path)}: {PLUGINS!r} holds what are no hashes: {CURE}")
    return {key: Manifest(**value) for key, value in data.items()}, fingerprints, commits, plugins


def _is_text(value: Any) -> bool:
    """Return whether a JSON value is an object of texts."""
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _is_fingerprint(value: Any) -> bool:
    scores = value.get("token_logprobs") if isinstance(value, dict) else None
    are_scores = isinstance(scores, list) and [type(score) for score in scores] == [float] * (PROBE_TOKENS - 1)
    return are_scores and type(value.get("vocab_size")) is int


def glimpse(folder: Path) -> dict[str, str]:
    """Return a digest of each file that trainer ranks read of the student's folder, for nodes to compare before they
    load it: of a weight file's header, both ends of each tensor and samples all over it, of the whole of other files.
    Empty where there is no such folder.

    Raises:
        UserError: the index or a header is damaged.
    """
    has_weights = any((folder / name).exists() for name in (INDEX_FILE, WEIGHTS_FILE))
    whole = matching_files(folder, (CONFIG_FILE, INDEX_FILE, *PROCESSOR_PATTERNS))
    weights = [path for path in weight_files(folder) if path.is_file()] if has_weights else []
    digests = {path.name: sha256_of(path) for path in whole} | {path.name: _sampled_sha256(path) for path in weights}
    return {name: digest[:12] for name, digest in digests.items()}


def _sampled_sha256(path: Path) -> str:
    tensors = read_header(path).values()
    with open_regular(path, cure="let all nodes read one folder") as file, ThreadPoolExecutor(SAMPLE_THREADS) as pool:
        size = os.fstat(file.fileno()).st_size
        header_bytes = min((info.start for info in tensors), default=size)
        places = {*range(0, size, max(SAMPLE_BYTES, size // NUM_SAMPLES)), max(0, size - SAMPLE_BYTES)}
        samples = [(0, header_bytes), *((start, SAMPLE_BYTES) for start in sorted(places))]
        for info in tensors:
            length = min(SAMPLE_BYTES, info.stop - info.start)
            samples += [(info.start, length), (info.stop - length, length)]
        digest = hashlib.sha256(f"{size}\0".encode())
        for content in pool.map(lambda sample: os.pread(file.fileno(), sample[1], sample[0]), samples):
            digest.update(content)
    return digest.hexdigest()
