"""Commands to vLLM's worker processes that change their weights."""

from __future__ import annotations

from typing import Any, Literal


class VllmWorkers:
    """Worker processes of one ``AsyncLLM``."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._sleeping: Literal["no", "cache", "all"] = "no"

    @property
    def is_asleep(self) -> bool:
        """Whether the cache or all memory sleeps. Nothing runs then; ``wake_up`` lets requests run again."""
        return self._sleeping != "no"

    async def sleep(self, *, keeps_weights: bool) -> None:
        """Release the GPU memory; the weights move to host memory or are dropped."""
        self._sleeping = "all"
        await self._llm.sleep(level=1 if keeps_weights else 2)

    async def wake_up(self, *, weights_only: bool) -> None:
        """Allocate all memory that sleeps; with ``weights_only`` that of the weights first."""
        tags = ["weights"] if weights_only else ["kv_cache"] if self._sleeping == "cache" else None
        await self._llm.wake_up(tags)
        self._sleeping = "cache" if weights_only else "no"

    async def tell(self, method: str, **arguments: Any) -> list[Any]:
        """Call ``method`` in every worker and return their answers."""
        return list(await self._llm.collective_rpc(method, kwargs=arguments))

    async def halt(self) -> None:
        """Freeze running requests and drop their keys and values."""
        if not self.is_asleep:
            await self._llm.pause_generation(mode="keep", clear_cache=True)

    async def go_on(self, label: str) -> None:
        """Undo ``halt`` under new weights; tokens drawn from now on carry ``label``."""
        if not await self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache")
        await self._llm.reset_encoder_cache()  # its image features were made by the old weights
        await self._llm.update_weight_version(label)
        if not self.is_asleep:
            await self._llm.resume_generation()
