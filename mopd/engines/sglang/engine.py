"""Engine over an SGLang server that this process starts, and speaks to over HTTP on the loopback interface.

New weights arrive in this process, are written to files in memory where there is room, and SGLang loads them
(``/update_weights_from_disk``): whatever its layout, it takes them as it takes a checkpoint. Running requests are
frozen meanwhile, and go on under the new weights; their keys and values are computed anew.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
from safetensors.torch import save_file
from torch import Tensor

from mopd.base.files.temporary import TemporaryFolder
from mopd.base.files.writing import writing
from mopd.base.tasks import ended_on_error
from mopd.base.text import one_line
from mopd.base.types import UserError
from mopd.config.groups import SglangEngineConfig
from mopd.engines.checks import check_weights
from mopd.engines.interface import (
    EngineInfo,
    EngineLimits,
    EngineRejected,
    EngineUnavailable,
    Generation,
    Reception,
    ResponseCallback,
    Scores,
    ToDraw,
    ToScore,
    WeightsLost,
)
from mopd.engines.sglang.start import SglangProcess, server_arguments
from mopd.engines.torch.engine import TorchIncoming
from mopd.engines.torch.loading import build_empty_model, weight_slots
from mopd.engines.vision import read_vision
from mopd.weights.group import TransferFailed
from mopd.weights.receiving import Receiver

T = TypeVar("T")
MEMORY = Path("/dev/shm")
FILE_BYTES = 2**31
"""Bytes of weights from which a file is full: so much is held beside the files."""


class SglangEngine:
    """Implements ``Scorer``, ``Generator`` and ``Described`` (``mopd.engines.interface``)."""

    sight = None

    def __init__(
        self,
        process: SglangProcess,
        cfg: SglangEngineConfig,
        *,
        max_sequence: int,
        can_sleep: bool,
        cache_tokens: int | None,
        fixed: bool,
    ) -> None:
        """Wrap a server that is ready; use ``start``. With ``fixed`` the checkpoint's weights stay."""
        self.max_positions = min(max_sequence, process.client.max_positions)
        self.name, self.can_sleep, self.weight_version = process.name, can_sleep, -1
        self._process, self._client, self._cfg, self._fixed = process, process.client, cfg, fixed
        self._cache_tokens, self._has_weights = cache_tokens, fixed
        self._sleeping: Literal["no", "cache", "all"] = "no"
        self._num_running = 0
        self._failure: str | None = None
        model = build_empty_model(Path(self.name), cfg.dtype, torch.device("meta"))
        self.weight_slots: dict[str, Tensor] = {} if fixed else weight_slots(model)
        self.incoming = SglangIncoming(self)

    @classmethod
    async def start(
        cls,
        folder: str | Path,
        cfg: SglangEngineConfig,
        *,
        max_sequence: int,
        startup_timeout_s: float,
        enable_sleep_mode: bool = False,
        fixed: bool,
    ) -> SglangEngine:
        """Start a server for sequences of ``max_sequence`` tokens, with the weights of ``folder`` (``fixed``) or with
        none until they arrive.

        Raises:
            UserError: the folder or the configuration cannot work, or the server did not start in time.
        """
        if read_vision(Path(folder), None) is not None:
            raise UserError(f"{folder}: a model that sees images, which SGLang is not asked about: set another engine")
        arguments = server_arguments(
            Path(folder), cfg, max_sequence=max_sequence, enable_sleep_mode=enable_sleep_mode, fixed=fixed
        )
        process = SglangProcess(arguments)
        async with ended_on_error(process.close):
            await process.ready(startup_timeout_s)
            said = await process.client.control("GET", "/server_info")
            tokens = said.get("max_total_num_tokens")
            cache_tokens = tokens if type(tokens) is int and tokens > 0 else None
            return cls(
                process,
                cfg,
                max_sequence=max_sequence,
                can_sleep=enable_sleep_mode,
                cache_tokens=cache_tokens,
                fixed=fixed,
            )

    async def info(self) -> EngineInfo:
        """Describe the engine; ``EngineUnavailable`` if SGLang has died."""
        await self.check_health()
        return EngineInfo(
            model=self.name,
            kind="sglang",
            vocab_size=self._client.vocab_size,
            max_positions=self.max_positions,
            dtype=self._cfg.dtype,
            weight_version=self.weight_version,
            limits=EngineLimits(max_sequences=self._cfg.max_running_requests, max_running_tokens=self._cache_tokens),
        )

    async def check_health(self) -> None:
        """Raise ``EngineUnavailable`` once SGLang's process has ended; it does not come back."""
        self._failure = self._failure or self._process.failure
        if self._failure is not None:
            raise EngineUnavailable(f"the SGLang engine of {self.name} is gone: {self._failure}")

    async def close(self) -> None:
        """End SGLang's processes. Requests that still run fail with ``EngineUnavailable``."""
        self._failure = self._failure or "it was closed"
        try:
            await self.incoming.leave()
        finally:
            await self._process.close()

    async def sleep(self) -> None:
        """Release the GPU memory. No request may run. A teacher's weights move to host memory; a rollout's are dropped,
        since new ones arrive anyway."""
        await self._require_idle("sleep")
        if not self._fixed:
            self._has_weights, self.weight_version = False, -1
        await self._call(self._client.control("POST", "/release_memory_occupation"))
        self._sleeping = "all"

    async def wake_up(self, *, weights_only: bool = False) -> None:
        """Undo ``sleep``; with ``weights_only`` the key-value cache sleeps on, until a second call."""
        await self._require_idle("wake_up")
        rest = {"tags": ["kv_cache", "cuda_graph"]} if self._sleeping == "cache" else {}
        told = {"tags": ["weights"]} if weights_only else rest
        await self._call(self._client.control("POST", "/resume_memory_occupation", **told))
        self._sleeping = "cache" if weights_only else "no"

    async def score(self, asked: ToScore) -> list[Scores]:
        """Score the response part of each sequence (``SglangClient.score``)."""
        return await self._request(self._client.score(asked))

    async def generate(self, asked: ToDraw, *, on_response: ResponseCallback | None = None) -> list[Generation]:
        """Draw one response per prompt (``SglangClient.generate``)."""
        return await self._request(self._client.generate(asked, on_response=on_response))

    async def halt(self) -> None:
        """Freeze running requests and drop their keys and values."""
        if self._sleeping == "no":
            await self._client.control("POST", "/pause_generation", mode="retract")

    async def load(self, folder: Path, weight_version: int) -> None:
        """Load new weights from the files of ``folder``, and undo ``halt``; tokens drawn then carry the version."""
        told = {"model_path": str(folder), "load_format": "safetensors", "weight_version": str(weight_version)}
        await self._client.control("POST", "/update_weights_from_disk", **told)
        if self._sleeping == "no":
            await self._client.control("POST", "/continue_generation")

    async def replace_weights(self, work: Coroutine[Any, Any, T], weight_version: int) -> T:
        """Run ``work``, which gives SGLang these weights, and return its result.

        After ``WeightsLost`` the engine has no weights. After any other failure it never answers again: half of its
        weights may be new.
        """
        self._has_weights, self.weight_version = False, -1
        try:
            result = await self._call(work)
        except WeightsLost:
            raise
        except BaseException as error:
            self._failure = self._failure or f"a weight update failed: {one_line(error):.300}"
            if isinstance(error, EngineRejected):
                raise EngineUnavailable(f"the SGLang engine of {self.name} is gone: {self._failure}") from error
            raise
        self._has_weights, self.weight_version = True, weight_version
        return result

    async def _request(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            await self.check_health()
            check_weights(self._has_weights, name=self.name)
            if self._sleeping != "no":
                raise RuntimeError(f"the engine of {self.name} sleeps: call wake_up first")
        except BaseException:
            work.close()
            raise
        self._num_running += 1
        try:
            return await self._call(work)
        finally:
            self._num_running -= 1

    async def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Await SGLang; once its process has ended, every failure is that end."""
        try:
            return await work
        except EngineUnavailable:
            await self.check_health()
            raise

    async def _require_idle(self, action: str) -> None:
        await self.check_health()
        if self._num_running:
            raise RuntimeError(f"{action} while {self._num_running} calls run in the engine of {self.name}")
        if not self.can_sleep:
            raise RuntimeError(f"the engine of {self.name} was started without enable_sleep_mode")


class SglangIncoming(TorchIncoming):
    """Implements ``Incoming`` (``mopd.engines.interface``) for ``SglangEngine``; joins groups as ``TorchEngine``'s."""

    def __init__(self, engine: SglangEngine) -> None:
        super().__init__(cast(Any, engine))  # of which it asks the name alone
        self._sglang = engine

    def _target(self) -> tuple[dict[str, Tensor], torch.device]:
        """SGLang's memory is another process's: nothing is written there."""
        return {}, torch.device("cuda" if torch.cuda.is_available() else "cpu")

    async def receive(
        self, weight_version: int, *, verify: bool, patience_s: float, ready: Callable[[], object]
    ) -> Reception:
        """Replace all weights by what the group sends. Running requests are frozen; after a failure they stay frozen
        until weights arrive."""
        engine = self._sglang
        await engine.check_health()
        if self._receiver is None:
            raise WeightsLost(f"{engine.name} is in no group")
        work = self._receive(self._receiver, weight_version, verify, patience_s, ready)
        return await engine.replace_weights(work, weight_version)

    async def _receive(
        self, receiver: Receiver, weight_version: int, verify: bool, patience_s: float, ready: Callable[[], object]
    ) -> Reception:
        engine, began = self._sglang, time.perf_counter()
        await engine.halt()
        ready()
        num_bytes = sum(slot.numel() * slot.element_size() for slot in engine.weight_slots.values())
        with TemporaryFolder("mopd-weights-", place=_roomy(num_bytes)) as folder:
            try:
                await asyncio.to_thread(_write, receiver, folder, verify=verify, patience_s=patience_s)
            except TransferFailed as error:
                raise WeightsLost(f"{engine.name}: {error}") from error
            await engine.load(folder, weight_version)
        return Reception(wait_s=receiver.wait_s, load_s=time.perf_counter() - began - receiver.wait_s)


def _roomy(num_bytes: int) -> Path | None:
    """Return the memory's file system if it has room for the weights and as much again; else ``None``, for where
    temporary files go."""
    return MEMORY if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 2 * num_bytes else None


def _write(receiver: Receiver, folder: Path, *, verify: bool, patience_s: float) -> None:
    """Write the tensors that arrive into files. ``TransferFailed`` if not all arrive as they were sent."""
    held: dict[str, Tensor] = {}
    count, size = 0, 0

    def flush() -> None:
        with writing(folder):
            save_file(held, folder / f"model-{count:05d}.safetensors")
        held.clear()

    for name, tensor in receiver.tensors(verify=verify, patience_s=patience_s):
        held[name] = tensor.to("cpu", copy=True).contiguous()
        size += held[name].nbytes
        if size >= FILE_BYTES:
            flush()
            count, size = count + 1, 0
    if held:
        flush()
