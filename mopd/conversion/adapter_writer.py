"""Writing of adapters as a folder in PEFT's format."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from mopd.base.files.writing import sync, writing
from mopd.conversion.hf.header import read_header
from mopd.conversion.hf.reader import weight_files
from mopd.conversion.hf.writer import MANIFEST_FILE, Group, shard_file
from mopd.conversion.job import CheckInputs, Job, Written, require_new
from mopd.conversion.models.adapted import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from mopd.conversion.models.config_keys import CONFIG_FILE

_NUM_SAMPLES, _SAMPLE_BYTES = 256, 4096


def base_hash(folder: Path) -> str:
    """Return a hash of a model folder's config, of names, dtypes and shapes of its tensors, and of the first bytes of
    some of them: models that were trained apart differ there."""
    digest = hashlib.sha256((folder / CONFIG_FILE).read_bytes())
    tensors = {name: (path, info) for path in weight_files(folder) for name, info in read_header(path).items()}
    every = -(-len(tensors) // _NUM_SAMPLES)
    for number, (name, (path, info)) in enumerate(sorted(tensors.items())):
        digest.update(f"{name}\0{info.dtype}\0{list(info.shape)}\n".encode())
        if number % every == 0:
            with path.open("rb") as file:
                file.seek(info.start)
                digest.update(file.read(min(_SAMPLE_BYTES, info.stop - info.start)))
    return digest.hexdigest()


def adapter_job(
    target: Path,
    groups: Sequence[Group],
    *,
    config: Mapping[str, Any],
    description: Mapping[str, Any],
    check_inputs: CheckInputs,
) -> Job:
    """Return the job of writing adapters and the content of their ``adapter_config.json``."""

    def finish(folder: Path, written: Mapping[str, Written]) -> None:
        (folder / ADAPTER_CONFIG).write_text(_config_text(config), encoding="utf-8")

    return Job(
        target=target,
        files=[shard_file(ADAPTER_WEIGHTS, groups)],
        description=description,
        finish=finish,
        manifest=MANIFEST_FILE,
        check_inputs=check_inputs,
    )


def _config_text(config: Mapping[str, Any]) -> str:
    return json.dumps(config, indent=2, sort_keys=True) + "\n"


def write_adapter(target: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Write adapters by PEFT's names and the content of their ``adapter_config.json``; the folder appears whole.

    Raises:
        UserError: ``target`` exists and is not an empty folder, or a write is refused.
    """
    require_new(target)
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
    try:
        with writing(target):
            folder.chmod(0o755)  # mkdtemp makes private folders
            whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
            save_file(whole, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
            (folder / ADAPTER_CONFIG).write_text(_config_text(config), encoding="utf-8")
            for path in folder.iterdir():
                sync(path)
            folder.rename(target)
            sync(target.parent)
    finally:
        if folder.exists():
            shutil.rmtree(folder)
