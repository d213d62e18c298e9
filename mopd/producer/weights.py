"""The student's weights between rank 0 and the producer process: both ends of each call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from typing import Any

from torch import Tensor

from mopd.placement.weights import GroupWeightSync
from mopd.producer.channel import Channel, Handler
from mopd.replicas.transfer import CALLS
from mopd.wire.weights import StagedConstants, StagedWeights, stage_updates


class FarWeights:
    """Implements ``Weights`` of rank 0: the process keeps them, sends them, and sends them again to a replica that
    comes back. Constants come to it once."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._given: StagedConstants | None = None
        self.again: Callable[[], Awaitable[None]] = _nobody

    loads_directly = False

    async def publish(
        self, weights: Iterable[tuple[str, Tensor]], weight_version: int, *, kept: Set[str] = frozenset()
    ) -> None:
        """``stage`` and ``send``. Servers refuse a stream that lacks ``kept``."""
        await self.send(self.stage(weights, weight_version))

    def stage(
        self, weights: Iterable[tuple[str, Tensor]], weight_version: int, constants: StagedConstants | None = None
    ) -> StagedWeights:
        """Read the stream to its end, into host memory. Blocks."""
        return stage_updates(weights, weight_version, constants=constants)

    async def send(self, staged: StagedWeights) -> None:
        """Returns when every replica that can answer has the weights."""
        constants = staged.constants
        if constants is not self._given:
            if constants is None:
                await self._channel.call("constants", None)
            else:
                names = {"constants_id": constants.constants_id, "digest": constants.digest}
                await self._channel.call("constants", names, frames=constants.bodies)
            self._given = constants
        head = {
            "weight_version": staged.weight_version,
            "update_id": staged.update_id,
            "num_tensors": staged.num_tensors,
            "digest": staged.digest,
        }
        await self._channel.call("weights", head, frames=staged.bodies)

    async def ask_for(self, weight_version: int) -> None:
        """Have requests ask for these weights (``GroupWeightSync.ask_for``)."""
        await self._channel.call("ask_for_weights", weight_version)

    def send_again_by(self, again: Callable[[], Awaitable[None]]) -> None:
        """Keep what sends newer weights once more (``GroupWeightSync.send_again_by``); the process calls it."""
        self.again = again


async def _nobody() -> None:
    """Before there is a student, nothing can be sent again."""


class FarTargets:
    """``TransferTargets`` of the process."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def lacking(self, weight_version: int | None) -> list[str]:
        """Names of the replicas without these weights (``TransferTargets.lacking``)."""
        return list(await self._call("lacking", weight_version))

    async def join(self, names: Sequence[str], order: Mapping[str, Any], tensors: bytes) -> dict[str, str]:
        """Have the replicas join the group (``TransferTargets.join``)."""
        return dict(await self._call("join", list(names), dict(order), tensors))

    async def start(self, names: Sequence[str], order: Mapping[str, Any]) -> dict[str, str]:
        """Have the replicas receive an update (``TransferTargets.start``)."""
        return dict(await self._call("start", list(names), dict(order)))

    async def finish(self, names: Sequence[str], order: Mapping[str, Any]) -> tuple[dict[str, str], float]:
        """Have the replicas use what came (``TransferTargets.finish``)."""
        failures, load_s = await self._call("finish", list(names), dict(order))
        return failures, load_s

    async def published(self, weight_version: int | None) -> None:
        """Note which weights requests ask for now (``TransferTargets.published``)."""
        await self._call("published", weight_version)

    async def _call(self, name: str, *arguments: Any) -> Any:
        return await self._channel.call("transfer", name, list(arguments))


class WeightAnswers:
    """The answering end of ``FarWeights`` and ``FarTargets``, beside the rollout's router."""

    def __init__(self, sync: Callable[[], GroupWeightSync]) -> None:
        """``sync()``: the way to the rollout's servers."""
        self._sync = sync
        self._constants: StagedConstants | None = None
        self.handlers: dict[str, Handler] = {
            "constants": self._keep_constants,
            "weights": self._weights,
            "ask_for_weights": self._ask_for_weights,
            "transfer": self._transfer,
        }
        """For a ``Channel``."""

    async def _keep_constants(self, head: dict[str, Any] | None, frames: Sequence[bytes] = ()) -> None:
        """Those of all weights that come from now on."""
        self._constants = None if head is None else StagedConstants(**head, bodies=tuple(frames))

    async def _weights(self, head: dict[str, Any], frames: Sequence[bytes]) -> None:
        await self._sync().send(StagedWeights(**head, bodies=tuple(frames), constants=self._constants))

    async def _ask_for_weights(self, weight_version: int) -> None:
        await self._sync().ask_for(weight_version)

    async def _transfer(self, name: str, arguments: Sequence[Any]) -> Any:
        assert name in CALLS
        return await getattr(self._sync().targets, name)(*arguments)
