"""Start of an SGLang server: its arguments, its environment, its process."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from mopd.base.files.temporary import TemporaryFolder
from mopd.base.types import UserError
from mopd.config.groups import SglangEngineConfig
from mopd.engines.clients.sglang import SglangClient
from mopd.engines.interface import EngineError
from mopd.engines.sglang import child

HOST = "127.0.0.1"
REQUEST_S = 86400.0
"""Limit of a request in seconds: whoever asks the engine has a shorter one, and SGLang's watchdog ends what hangs."""
PROBE_S, PAUSE_S = 30.0, 0.5
END_S = 3.0
SPARE_POSITIONS = 8
"""Positions that SGLang wants beyond the longest sequence, of which none enters the model."""
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # by SPARE_POSITIONS
}
_CURES = {
    "dp_size": "set replicas",
    "tp_size": "set engine.tensor_parallel_size",
    "pp_size": "set engine.tensor_parallel_size",
    **dict.fromkeys(("nnodes", "port", "api_key", "admin_api_key"), "remove it"),
}
"""Arguments on which mopd stands without setting them here, and the cure."""
_CHANGES_WEIGHTS = ("quantization", "modelopt", "torchao", "enable_lora", "lora_", "json_model_override", "model_impl")
"""Beginnings of arguments after which a rollout has other parameters than the student."""


def server_arguments(
    folder: Path, cfg: SglangEngineConfig, *, max_sequence: int, enable_sleep_mode: bool, fixed: bool
) -> dict[str, Any]:
    """Return the fields of ``ServerArgs``; ``UserError`` for those that this machine cannot provide, or that others
    decide. With ``fixed`` the engine keeps the weights of the folder."""
    on_cuda = torch.cuda.is_available()
    if enable_sleep_mode and not on_cuda:
        raise UserError(
            f"{folder}: SGLang cannot sleep on this machine, and GPUs are shared by turns "
            "(placement.share_gpus_with): set engine: {type: torch}, or give the group GPUs of its own"
        )
    if cfg.max_total_tokens is None and not on_cuda:
        raise UserError("engine.max_total_tokens is not set: SGLang needs it on a CPU")
    own = {
        "model_path": str(folder),
        "trust_remote_code": False,
        "skip_tokenizer_init": True,
        # dummy weights if all of them will arrive: the folder's would hide a weight that SGLang did not take
        "load_format": "safetensors" if fixed else "dummy",
        "dtype": cfg.dtype,
        "context_length": max_sequence + SPARE_POSITIONS,
        "tp_size": cfg.tensor_parallel_size,
        "mem_fraction_static": cfg.mem_fraction_static,
        "max_total_tokens": cfg.max_total_tokens,
        "max_running_requests": cfg.max_running_requests,
        "enable_memory_saver": enable_sleep_mode,
        "enable_weights_cpu_backup": enable_sleep_mode and fixed,
        "host": HOST,
        "skip_server_warmup": True,
        "device": "cuda" if on_cuda else "cpu",
    }
    for name in cfg.extra:
        if name in own or name in _CURES:
            cure = f"set engine.{name}" if hasattr(cfg, name) else _CURES.get(name, "remove it")
            raise UserError(f"engine.extra.{name}: mopd sets this argument of SGLang: {cure}")
        if not fixed and name.startswith(_CHANGES_WEIGHTS):
            raise UserError(
                f"engine.extra.{name}: the student's weights arrive as they are trained, at each update: remove it"
            )
        if not fixed and name.startswith("speculative_"):
            raise UserError(
                f"engine.extra.{name}: a draft keeps its first weights while the student's change, and log-probs of "
                "drafted tokens were not compared with the student's: remove it"
            )
    on_cpu = {"attention_backend": "torch_native", "disable_overlap_schedule": True, "disable_cuda_graph": True}
    return {**({} if on_cuda else on_cpu), "log_level": "warning", **own, **cfg.extra}


class SglangProcess:
    """The server that was started with some arguments, a child of this process."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        """Start it; it is not ready yet."""
        self._folder, self.name = TemporaryFolder("mopd-sglang-"), str(arguments["model_path"])
        self._port = _held_port()
        port, token = self._port.getsockname()[1], secrets.token_urlsafe(24)
        path = self._folder.path / child.ARGUMENTS
        path.touch(mode=0o600)
        path.write_text(json.dumps({**arguments, "port": port, "api_key": token}), encoding="utf-8")
        on_cpu = {"SGLANG_USE_CPU_ENGINE": "1"} if arguments["device"] == "cpu" else {}
        self._process = subprocess.Popen(
            [sys.executable, "-P", child.__file__, str(self._folder.path), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,  # standard output is for results: mopd's own address
            env={**os.environ, **_ENVIRONMENT, **on_cpu},
        )
        self.client = SglangClient(
            f"http://{HOST}:{port}", Path(self.name), token=token, timeout_s=REQUEST_S, name=f"SGLang of {self.name}"
        )

    @property
    def failure(self) -> str | None:
        """How the server ended; ``None`` while it runs."""
        code = self._process.poll()
        return None if code is None else f"its process has ended with exit code {code} (see its log)"

    async def ready(self, timeout_s: float) -> None:
        """Return once the server has drawn a token. ``UserError`` if it does not in time, or has ended."""
        deadline = time.monotonic() + timeout_s
        while True:
            if self.failure is not None:
                raise UserError(f"{self.name}: SGLang refused to start: {self._refusal() or self.failure}")
            try:
                await self.client.health(timeout_s=PROBE_S)
                return
            except EngineError as error:
                if time.monotonic() > deadline:
                    raise UserError(
                        f"{self.name}: SGLang did not start within {timeout_s:g} s (its own messages stand above): "
                        f"{error}: raise placement.startup_timeout_s"
                    ) from error
            await asyncio.sleep(PAUSE_S)

    async def close(self) -> None:
        """End the server and what it has started, whatever fails on the way."""
        try:
            await self.client.close()
        finally:
            await asyncio.to_thread(self._end)

    def _end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._port.close()
        self._folder.close()

    def _refusal(self) -> str:
        path = self._folder.path / child.REFUSAL
        return path.read_text(encoding="utf-8")[:600] if path.exists() else ""


def _held_port() -> socket.socket:
    """Return a socket whose port nobody else is given in the minute until SGLang listens on it, which it can as this
    one does not."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((HOST, 0))
    return held
