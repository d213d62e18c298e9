"""vLLM's worker processes as an engine tells them to change their weights."""

from __future__ import annotations

from typing import Any

from mopd.engines.staging import StagedFiles

UPDATE_TIMEOUT_S = 600.0


class VllmWorkers:
    """Of one ``AsyncLLM``."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self.is_asleep = False
        """Then nothing runs, and ``wake_up`` lets requests run again."""

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
