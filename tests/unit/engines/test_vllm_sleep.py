"""The order in which a vLLM engine is told to sleep, to wake and to take weights between. vLLM on a CPU cannot sleep:
what it is told is all that can be seen here."""

from __future__ import annotations

import asyncio
from typing import Any

from mopd.engines.vllm.weights import VllmWorkers


class ResponseCallback:
    """Notes what an ``AsyncLLM`` is told."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def __getattr__(self, name: str) -> Any:
        async def note(*args: Any, **options: Any) -> Any:
            shown = [*map(str, args), *(f"{key}={value}" for key, value in options.items() if key in ("level", "mode"))]
            self.log.append(" ".join([name, *shown]))
            return [1] if name == "collective_rpc" else True

        return note


def test_weights_come_between_the_two_halves_of_waking() -> None:
    async def work() -> None:
        llm = ResponseCallback()
        workers = VllmWorkers(llm)
        await workers.sleep(keeps_weights=False)
        await workers.wake_up(weights_only=True)
        await workers.halt()
        await workers.go_on("7")
        await workers.wake_up(weights_only=False)
        reading = ["reset_prefix_cache", "reset_encoder_cache"]
        assert llm.log == [
            "sleep level=2",
            "wake_up ['weights']",
            *reading,
            "update_weight_version 7",
            "wake_up ['kv_cache']",
        ]
        llm.log.clear()
        await workers.halt()
        await workers.go_on("8")
        version = "update_weight_version 8"
        assert llm.log == ["pause_generation mode=keep", *reading, version, "resume_generation"]
        llm.log.clear()
        await workers.sleep(keeps_weights=True)  # a teacher's
        await workers.wake_up(weights_only=False)
        assert llm.log == ["sleep level=1", "wake_up None"]

    asyncio.run(work())
