"""Start of vLLM: its environment, its arguments, its limits. The one module that imports vLLM (some seconds).

``engine.py`` imports vLLM's names from here: the environment must be set before vLLM is imported.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import difflib
import math
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import psutil

# vLLM and the processes that it starts read these; some are read while it is imported.
os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_HOST_IP="127.0.0.1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",  # replicas that share a machine would all bind to its first cores
    VLLM_ALLOW_LONG_MAX_MODEL_LEN="1",  # see engine_args
    VLLM_USE_V2_MODEL_RUNNER="0",  # the one that runs on CPU and GPU, and that the tests cover
    VLLM_WORKER_MULTIPROC_METHOD="spawn",  # a fork would inherit this process's threads and CUDA state
)
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # standard output is for results: a server's address

from vllm import SamplingParams as _SamplingParams
from vllm import __version__ as vllm_version
from vllm.config.lora import MaxLoRARanks as MaxLoRARanks
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import TokensPrompt as TokensPrompt  # "as": other files import it from here
from vllm.inputs.engine import tokens_input as tokens_input
from vllm.logprobs import FlatLogprobs as FlatLogprobs
from vllm.lora.request import LoRARequest as LoRARequest
from vllm.outputs import RequestOutput as RequestOutput
from vllm.outputs import WeightVersionSpan as WeightVersionSpan
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind as RequestOutputKind
from vllm.v1 import utils as vllm_utils
from vllm.v1.engine.async_llm import AsyncLLM as AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError as EngineDeadError
from vllm.v1.engine.exceptions import EngineGenerateError as EngineGenerateError
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from mopd.base.text import one_line
from mopd.base.types import LostError, UserError
from mopd.config.groups import VllmEngineConfig
from mopd.conversion.models.known import FAMILIES
from mopd.conversion.models.reading import read_dims
from mopd.engines.interface import EngineNode, SamplingParams
from mopd.engines.torch.loading import read_config

VllmSamplingParams = _SamplingParams
_SHUTDOWN_S = 1.0
_KILLED_S, _LOOK_S = 5.0, 0.02
_MIN_TEMPERATURE = 0.01  # vLLM raises a lower positive temperature to this one
_starting = threading.Lock()
_started: WeakKeyDictionary[AsyncLLM, set[psutil.Process]] = WeakKeyDictionary()
"""Processes of each engine at its start: nobody finds a worker once the engine core, its parent, has ended."""
_NODES = "mopd serve --nnodes starts it on several nodes (docs/teachers.md)"
_NOT_EXTRA = {
    **dict.fromkeys(("nnodes", "node_rank", "master_addr", "master_port"), _NODES),
    **dict.fromkeys(("data_parallel_size", "data_parallel_backend", "data_parallel_rank"), "set replicas"),
    **dict.fromkeys(
        ("worker_cls", "distributed_executor_backend", "tokenizer", "runner", "trust_remote_code"), "remove it"
    ),
}
"""Arguments on which mopd stands without setting them, and the cure."""
_CHANGES_WEIGHTS = ("quantization", "enable_lora", "hf_overrides", "model_impl")
"""Beginnings of arguments after which a rollout has other parameters than the student."""
_ROUNDS_UPDATES = ("fp8", "fp8_per_tensor", "fp8_per_block", "fp8_per_channel")
"""Values of ``quantization`` by which vLLM rounds whatever weights arrive, at each update as at the first load."""


def sequence_limit(folder: Path, cfg: VllmEngineConfig) -> int:
    """Return the longest sequence that an engine with ``cfg`` takes; ``UserError`` if its keys are contradictory."""
    most = int(read_config(folder).get_text_config().max_position_embeddings)
    limit = most if cfg.max_model_len is None else cfg.max_model_len
    if limit > most:
        raise UserError(
            f"engine.max_model_len (absent: data.max_prompt_length + rollout.max_response_length) is {limit}, but "
            f"{folder} supports {most} positions: set {most} or less"
        )
    if cfg.max_scoring_tokens < limit:
        raise UserError(
            f"engine.max_scoring_tokens is {cfg.max_scoring_tokens}, which no sequence of engine.max_model_len {limit} "
            f"fits: set max_scoring_tokens to {limit} or more, or max_model_len to {cfg.max_scoring_tokens} or less"
        )
    if current_platform.is_cpu():
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend  # its kernels are in vLLM's CPU builds only

        config = read_config(folder).get_text_config()
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        if head_dim not in CPUAttentionBackend.get_supported_head_sizes():  # vLLM would die at the first request
            raise UserError(
                f"{folder}: attention heads of {head_dim} dimensions; vLLM on a CPU supports "
                f"{CPUAttentionBackend.get_supported_head_sizes()}: set engine: {{type: torch}}"
            )
        if cfg.kv_cache_memory_bytes is None:
            raise UserError("engine.kv_cache_memory_bytes is not set: vLLM needs it on a CPU")
        if cfg.max_num_batched_tokens <= limit:
            raise UserError(
                f"engine.max_num_batched_tokens is {cfg.max_num_batched_tokens}: on a CPU it must exceed "
                f"engine.max_model_len, {limit}: raise it or lower max_model_len"
            )
    return limit


def has_cut(sampling: SamplingParams) -> bool:
    """Return whether a cut or a penalty changes the distribution that is drawn from."""
    return sampling.has_penalty or (sampling.temperature > 0 and not sampling.is_exact)


def check_temperature(sampling: SamplingParams, *, before_cut: bool, sees: bool = False) -> None:
    """Raise ``UserError`` for a ``sampling`` whose log-probs vLLM cannot report.

    vLLM reports log-probs either before temperature and cuts (``before_cut``), or after both. For a model that ``sees``
    images it must be before: its image tokens are cut.
    """
    temperature = sampling.temperature
    if 0 < temperature < _MIN_TEMPERATURE:
        raise UserError(
            f"temperature is {temperature}: vLLM draws at {_MIN_TEMPERATURE} or more, or greedily: set 0 or "
            f"{_MIN_TEMPERATURE} or more"
        )
    if sees and temperature not in (0, 1):
        raise UserError(
            f"temperature is {temperature}: vLLM reports the log-probs of a model that sees images at temperature 1 "
            "alone: set 1.0, or 0, or engine: {type: torch}"
        )
    if (before_cut and temperature not in (0, 1)) or (not before_cut and has_cut(sampling)):
        names = ("top_p", "top_k", "min_p", "presence_penalty", "repetition_penalty")
        shaped = ", ".join(f"{name} {getattr(sampling, name)}" for name in names)
        raise UserError(
            f"temperature {temperature} with {shaped}: a vLLM engine that is set up for rollout."
            f"{'cuts or penalties' if before_cut else 'temperature without cuts and penalties'} cannot report these "
            "log-probs: use temperature 1.0 with them, or none of them, or engine: {type: torch}"
        )


def engine_args(
    folder: Path,
    cfg: VllmEngineConfig,
    max_sequence: int,
    options: Mapping[str, Any],
    *,
    fixed: bool,
    node: EngineNode | None = None,
) -> AsyncEngineArgs:
    """Return vLLM's arguments; ``UserError`` for those that this machine cannot provide.

    ``options`` depend on the engine's purpose; with ``fixed`` it keeps the weights of the folder.
    """
    options = {**options, **({} if node is None else _node_args(cfg, node))}
    if options.get("enable_sleep_mode") and not current_platform.is_sleep_mode_available():
        raise UserError(
            f"{folder}: vLLM cannot sleep on this machine, and GPUs are shared by turns (placement.share_gpus_with, "
            "placement.shared_pool): set engine: {type: torch}, or give the group GPUs of its own"
        )
    if current_platform.is_cpu():
        if options.get("enable_return_routed_experts"):
            raise UserError(
                "rollout.replay_routes is true, and vLLM tells routes on GPUs alone (by its V2 model runner): set "
                "rollout.engine: {type: torch}, or replay_routes: false"
            )
        options |= _cpu_options(folder, cfg, fixed=fixed)
    own = dict(
        model=str(folder),
        generation_config="vllm",
        dtype=cfg.dtype,
        # vLLM needs room to draw one token after what it scores; that token never enters the model
        max_model_len=max_sequence + 1,
        tensor_parallel_size=cfg.tensor_parallel_size,
        pipeline_parallel_size=cfg.pipeline_parallel_size,
        gpu_memory_utilization=cfg.gpu_memory_utilization,
        kv_cache_memory_bytes=cfg.kv_cache_memory_bytes,
        max_num_batched_tokens=cfg.max_num_batched_tokens,
        max_num_seqs=cfg.max_num_seqs,
        enforce_eager=cfg.enforce_eager,
        # a request with a seed of its own kills the engine in the middle of a chunked prompt on a CPU
        enable_chunked_prefill=not current_platform.is_cpu(),
        worker_extension_cls="mopd.engines.vllm.worker.WorkerExtension",
        disable_log_stats=True,
        # dummy weights if all of them will arrive: the folder's would hide a weight that vLLM did not take
        **{"skip_tokenizer_init": True, "load_format": "safetensors" if fixed else "dummy", **options},
    )
    _check_extra(cfg.extra, own, fixed=fixed)
    if not fixed and "quantization" in cfg.extra and read_dims(folder).moe is not None:
        raise UserError(
            f"engine.extra.quantization is {cfg.extra['quantization']!r}, and {folder} has experts: vLLM on a CPU dies "
            "once updates of them arrive in fp8, and no GPU has tried: remove it"
        )
    try:
        return AsyncEngineArgs(trust_remote_code=False, **own, **cfg.extra)
    except (TypeError, ValueError) as error:  # sections among the arguments are checked here, the rest at the start
        raise UserError(f"engine.extra {dict(cfg.extra)}: vLLM refuses: {one_line(error):.400}") from error


def _cpu_options(folder: Path, cfg: VllmEngineConfig, *, fixed: bool) -> dict[str, Any]:
    """Return the arguments that the model needs on a CPU; ``UserError`` for what vLLM cannot do there."""
    if cfg.pipeline_parallel_size > 1:  # its runner makes no room for what stages pass on
        raise UserError(
            f"engine.pipeline_parallel_size is {cfg.pipeline_parallel_size}, and vLLM on a CPU has no stages: remove "
            "it, and set tensor_parallel_size"
        )
    config = read_config(folder).get_text_config()
    family = FAMILIES.get(config.model_type)
    if family is not None and family.vllm_on_cpu:
        raise UserError(
            f"{folder}: vLLM on a CPU {family.vllm_on_cpu} model_type {config.model_type}: set engine: {{type: torch}}"
        )
    if not fixed and getattr(config, "kv_lora_rank", None) is not None:
        raise UserError(
            f"{folder}: vLLM on a CPU gives up weights of latent attention once it has packed them, so that no update "
            "reaches them: set rollout.engine: {type: torch}"
        )
    if "linear_attention" not in (getattr(config, "layer_types", None) or ()):
        return {}
    if cfg.dtype != "bfloat16":
        raise UserError(
            f"{folder}: vLLM on a CPU computes gated delta nets in bf16 alone, and engine.dtype is {cfg.dtype}: set it "
            "to bfloat16, or engine: {type: torch}"
        )
    return {"enable_prefix_caching": False}  # which takes prompts in chunks where layers have states


def _node_args(cfg: VllmEngineConfig, node: EngineNode) -> dict[str, Any]:
    """Return the arguments of a replica on several nodes."""
    if cfg.num_gpus % node.num_nodes:
        raise UserError(
            f"engine.tensor_parallel_size {cfg.tensor_parallel_size} x pipeline_parallel_size "
            f"{cfg.pipeline_parallel_size} do not divide over --nnodes {node.num_nodes}, equally many GPUs on each: "
            "change one of them"
        )
    return {
        "nnodes": node.num_nodes,
        "node_rank": node.node_rank,
        "master_addr": node.master_addr,
        "master_port": node.master_port,
        "distributed_executor_backend": "mp",
    }


def _check_extra(extra: Mapping[str, Any], own: Mapping[str, Any], *, fixed: bool) -> None:
    """Raise ``UserError`` for arguments that this vLLM does not know, or that others decide."""
    known = [field.name for field in dataclasses.fields(AsyncEngineArgs)]
    for name in extra:
        where = f"engine.extra.{name}"
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "remove it"
            raise UserError(f"{where}: vLLM {vllm_version} has no such argument: {hint}")
        if name in own or name in _NOT_EXTRA:
            cure = f"set engine.{name}" if hasattr(VllmEngineConfig, name) else _NOT_EXTRA.get(name, "remove it")
            raise UserError(f"{where}: mopd sets this argument of vLLM: {cure}")
        rounds = name == "quantization" and extra[name] in _ROUNDS_UPDATES
        if rounds and not fixed and own.get("enable_lora"):
            raise UserError(f"{where} is {extra[name]!r}, and student.lora trains beside plain weights: remove it")
        if not fixed and name == "speculative_config":
            raise UserError(
                f"{where}: vLLM reports other log-probs of drafted tokens than they were drawn with, and a draft keeps "
                "its first weights while the student's change: remove it"
            )
        if not fixed and name.startswith(_CHANGES_WEIGHTS) and not rounds:
            more = f", or set one of {', '.join(_ROUNDS_UPDATES)}" if name == "quantization" else ""
            raise UserError(
                f"{where}: the student's weights arrive as they are trained, at each update: remove it{more}"
            )


def group_transfer() -> WeightTransferConfig:
    """Return the configuration that lets weights arrive over a group (``mopd.engines.vllm.worker``)."""
    return WeightTransferConfig(backend="mopd")


def run_workers(folder: Path, args: AsyncEngineArgs, node: EngineNode) -> NoReturn:
    """Run the workers of a node that is not the replica's first, for as long as they live.

    Raises:
        UserError: vLLM refuses the arguments.
        LostError: a worker has ended.
    """
    with _starting, _restored_environment(), _refusals(folder, "on this node of the replica"):
        os.environ["VLLM_HOST_IP"] = node.address
        executor = MultiprocExecutor(args.create_engine_config(headless=True), monitor_workers=False)
    executor.start_worker_monitor(inline=True)
    raise LostError(f"{folder}: a worker of vLLM has ended on node {node.node_rank} of the replica: its log says why")


def start_llm(
    folder: Path, args: AsyncEngineArgs, startup_timeout_s: float, node: EngineNode | None = None
) -> AsyncLLM:
    """Start vLLM and block until it answers; ``UserError`` if it does not. This process starts one engine at a time."""
    with _starting, _restored_environment(), _refusals(folder, f"within {startup_timeout_s:g} s"):
        os.environ["VLLM_ENGINE_READY_TIMEOUT_S"] = str(math.ceil(startup_timeout_s))
        if node is not None:
            os.environ["VLLM_HOST_IP"] = node.address
        if args.enable_return_routed_experts:
            os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        config = args.create_engine_config()
        if config.parallel_config.world_size == 1:
            # on a CPU vLLM would put a second process, with a second import of everything, behind its core
            config.parallel_config.distributed_executor_backend = "uni"
        llm = AsyncLLM.from_vllm_config(config, disable_log_stats=True)
        cores = llm.engine_core.resources.engine_manager.processes
        _started[llm] = _with_children(core.pid for core in cores if core.pid is not None)
        return llm


@contextmanager
def _refusals(folder: Path, when: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, RuntimeError, OSError, TimeoutError) as error:
        raise UserError(
            f"{folder}: vLLM did not start {when} or refused the engine section (its own messages stand above): "
            f"{one_line(error):.400}"
        ) from error


def cache_tokens(llm: AsyncLLM) -> int | None:
    """Return the tokens that the key-value cache holds; ``None`` if vLLM does not report it."""
    cache = llm.vllm_config.cache_config
    return cache.num_gpu_blocks * cache.block_size if cache.num_gpu_blocks else None


async def stop_llm(llm: AsyncLLM, grace_s: float = _SHUTDOWN_S) -> None:
    """End vLLM's task in this loop, then its processes; requests that still run fail with ``EngineDeadError``.

    Processes that have not ended in order after ``grace_s`` seconds are killed, whatever vLLM's own shutdown raises.

    Raises:
        LostError: a killed process has not ended.
    """
    handler = llm.output_handler
    if handler is not None:  # first: it would take the end of the processes for a crash, and log its stack
        handler.cancel()
        await asyncio.gather(handler, return_exceptions=True)
        llm.output_processor.propagate_error(EngineDeadError())
    await asyncio.to_thread(_shut_down, llm, grace_s)


def _shut_down(llm: AsyncLLM, grace_s: float) -> None:
    processes = _started.pop(llm, set())
    processes = processes | _with_children(process.pid for process in processes if _is_alive(process))
    try:
        llm.shutdown(grace_s)
    finally:
        llm.shutdown = lambda *_, **__: None  # its destructor calls it again, when half of the interpreter may be gone
        left = _kill(processes)
    if left:
        raise LostError(
            f"process {left[0].pid} of vLLM has not ended {_KILLED_S:g} s after SIGKILL: its driver holds it"
        )


def _with_children(pids: Iterable[int]) -> set[psutil.Process]:
    """Return these processes, and all below them, as far as they have not ended."""
    found = set[psutil.Process]()
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.add(psutil.Process(pid))
            found.update(psutil.Process(pid).children(recursive=True))
    return found


def _kill(processes: set[psutil.Process]) -> list[psutil.Process]:
    """Kill them, and return those that have not ended ``_KILLED_S`` seconds later."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    deadline = time.monotonic() + _KILLED_S
    while (left := [process for process in processes if _is_alive(process)]) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    return left


def _kill_tree(pid: int) -> None:
    """Kill a process and all below it, whichever of them ends meanwhile.

    vLLM's own asks each for its name, which raises for one that has just ended: processes stayed alive, sockets open,
    and the error took the place of the one for which vLLM shuts down.
    """
    _kill(_with_children([pid]))


vllm_utils.kill_process_tree = _kill_tree


def _is_alive(process: psutil.Process) -> bool:
    """Whether it runs; one that has ended and that its parent has not asked about does not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


@contextmanager
def _restored_environment() -> Iterator[None]:
    """Restore the environment afterwards: vLLM sets variables (LD_PRELOAD, …) meant for its own children only."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)
