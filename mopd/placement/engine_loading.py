"""The engine of an engine file, with its model loaded: the same one in this process and behind a server."""

from __future__ import annotations

from typing import Any

import torch

from mopd.config.engines import TorchEngineConfig, VllmEngineConfig
from mopd.engines.interface import SamplingParams
from mopd.engines.torch.engine import TorchEngine
from mopd.placement.engine_file import EngineFile


async def load_engine(file: EngineFile, device: torch.device | str) -> Any:
    """A teacher with its weights, or a rollout that waits for the student's.

    ``device`` is for ``torch`` engines; vLLM takes what it sees. ``UserError`` for a model that cannot be loaded.
    """
    if isinstance(file.engine, TorchEngineConfig):
        load = TorchEngine.from_pretrained if file.role == "teacher" else TorchEngine.empty
        return load(file.model, file.engine, device)
    return await _start_vllm(file, file.engine)


async def _start_vllm(file: EngineFile, cfg: VllmEngineConfig) -> Any:
    from mopd.engines.vllm.engine import VllmEngine

    timeout_s, sleeps = file.startup_timeout_s, file.enable_sleep_mode
    if file.role == "teacher":
        return await VllmEngine.start_teacher(
            file.model, cfg, max_logprobs=file.max_logprobs, startup_timeout_s=timeout_s, enable_sleep_mode=sleeps
        )
    sampling = SamplingParams(max_new_tokens=1, temperature=file.temperature, top_p=file.top_p, top_k=file.top_k)
    return await VllmEngine.start_rollout(
        file.model, cfg, sampling=sampling, startup_timeout_s=timeout_s, enable_sleep_mode=sleeps
    )
