"""Adapters in vLLM: arguments that make room for them, and names in requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, get_args

from mopd.base.text import one_line
from mopd.base.types import UserError
from mopd.conversion.adapters import Adapter
from mopd.engines.vllm.start import AsyncLLM, LoRARequest, MaxLoRARanks

STUDENT_ID = 1
"""vLLM's number of the adapter whose tensors the student sends."""


def lora_options(num_adapters: int, rank: int, modules: Iterable[str]) -> dict[str, Any]:
    """Return vLLM's arguments for so many adapters of ``rank`` or less on ``modules`` of the base. ``UserError`` for a
    rank above vLLM's."""
    ranks = [most for most in get_args(MaxLoRARanks) if most >= rank]
    if not ranks:
        raise UserError(f"an adapter has rank {rank}, vLLM takes {max(get_args(MaxLoRARanks))} at most: merge it")
    return {
        "enable_lora": True,
        # one slot more: on a CPU a request without an adapter reads the last one
        "max_loras": num_adapters + 1,
        "max_cpu_loras": num_adapters + 1,
        "max_lora_rank": min(ranks),
        # without names vLLM wraps the output matrix, and drops its delta or dies at prompt log-probs
        "lora_target_modules": sorted({module.rsplit(".", 1)[-1] for module in modules}),
    }


def teacher_options(adapters: Mapping[str, Adapter]) -> dict[str, Any]:
    """Return ``lora_options`` for a teacher's adapters; none without any. ``UserError`` for what vLLM would silently
    leave out."""
    for adapter in adapters.values():
        for module in adapter.modules:
            if ".experts." in module:
                raise UserError(
                    f"{adapter.path}: adapts {module!r}, and vLLM's experts take none here: merge it (mopd convert "
                    "merge-lora)"
                )
    if not adapters:
        return {}
    modules = (module for adapter in adapters.values() for module in adapter.modules)
    return lora_options(len(adapters), max(adapter.rank for adapter in adapters.values()), modules)


def lora_requests(adapters: Mapping[str, Adapter]) -> dict[str, LoRARequest]:
    """Return what requests name each adapter by."""
    return {
        name: LoRARequest(name, number, str(adapter.path.absolute()))
        for number, (name, adapter) in enumerate(adapters.items(), start=1)
    }


async def load_adapters(llm: AsyncLLM, requests: Mapping[str, LoRARequest]) -> None:
    """Load all adapters, for as long as the engine lives. ``UserError`` for one that vLLM refuses."""
    for request in requests.values():
        try:
            await llm.add_lora(request)
            await llm.pin_lora(request.lora_int_id)
        except Exception as error:  # vLLM's core passes on whatever its worker raised
            raise UserError(f"{request.lora_path}: vLLM refuses the adapter: {one_line(error):.400}") from error
