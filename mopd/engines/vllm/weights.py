"""vLLM's worker processes as an engine tells them to change their weights."""

from __future__ import annotations

from typing import Any, Literal

from mopd.engines.staging import StagedFiles

UPDATE_TIMEOUT_S = 600.0


class VllmWorkers:
    """Of one ``AsyncLLM``."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._sleeping: Literal["no", "cache", "all"] = "no"

    @property
    def is_asleep(self) -> bool:
        """The cache is, if not all: then nothing runs, and ``wake_up`` lets requests run again."""
        return self._sleeping != "no"

    async def sleep(self, *, keeps_weights: bool) -> None:
        """Give the GPU memory back; weights go to host memory or are gone."""
        self._sleeping = "all"
        await self._llm.sleep(level=1 if keeps_weights else 2)

    async def wake_up(self, *, weights_only: bool) -> None:
        """Take it back: all that sleeps, or first the memory of the weights."""
        tags = ["weights"] if weights_only else ["kv_cache"] if self._sleeping == "cache" else None
        await self._llm.wake_up(tags)
        self._sleeping = "cache" if weights_only else "no"

    async def tell(self, method: str, **arguments: Any) -> list[Any]:
        """What each answers."""
        return list(await self._llm.collective_rpc(method, kwargs=arguments))

    async def halt(self) -> None:
        """Freeze what runs, and forget its keys and values."""
        if not self.is_asleep:
            await self._llm.pause_generation(mode="keep", clear_cache=True)

    async def go_on(self, label: str) -> None:
        """Undo ``halt``, with new weights: tokens from now on get the ``label``."""
        if not await self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache")
        await self._llm.reset_encoder_cache()  # of features that the old weights made
        await self._llm.update_weight_version(label)
        if not self.is_asleep:
            await self._llm.resume_generation()

    async def load(self, files: StagedFiles, label: str, *, some_stay: bool) -> None:
        """Let them read the weights while nothing runs. ``some_stay``: of whole layers."""
        await self.halt()
        args = (files.paths, some_stay)
        counts = await self._llm.collective_rpc("mopd_load_weights", timeout=UPDATE_TIMEOUT_S, args=args)
        if any(count != files.num_tensors for count in counts):
            raise RuntimeError(f"vLLM's workers read {counts} of {files.num_tensors} tensors")
        await self.go_on(label)
