"""A server on a Ray node whose agent stops answering. A real cluster: ``tests/integration/test_placement_ray.py``."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mopd.placement.ray.cluster import CALL_TIMEOUT_S, LAST_CALL_TIMEOUT_S, LOST_CODE, RayServer  # type: ignore[attr-defined]


class Agent:
    """One whose calls are answered ``num_answers`` times."""

    def __init__(self, num_answers: int) -> None:
        self.num_answers = num_answers
        self.ask: Any = self
        self.timeouts: list[float] = []
        self.num_lost = 0

    def remote(self, name: str, method: str) -> str:
        return method


class Cluster:
    class ray:
        class exceptions:
            RayError = ZeroDivisionError

    def __init__(self, agent: Agent) -> None:
        self.agent, self.nodes = agent, {agent: "10.0.0.1"}

    async def ask(self, reference: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        self.agent.timeouts.append(timeout_s)
        if len(self.agent.timeouts) > self.agent.num_answers:
            raise asyncio.TimeoutError
        return None

    def lose(self, agent: Agent) -> None:
        agent.num_lost += 1


@pytest.mark.parametrize("num_answers", [0, 1, 2])
def test_a_server_that_is_to_end_costs_one_short_deadline(num_answers: int) -> None:
    """The orchestrator's end has time for one, whenever the agent stops answering."""
    agent = Agent(num_answers)
    server = RayServer(Cluster(agent), agent, "math.0")  # type: ignore[arg-type]

    async def end() -> int | None:
        await server.terminate()
        await server.last_words()
        await server.kill()
        return (await server.state()).exit_code

    assert asyncio.run(end()) == LOST_CODE
    assert agent.timeouts == [LAST_CALL_TIMEOUT_S] * (num_answers + 1) and agent.num_lost == 1


def test_one_that_works_may_be_late_once() -> None:
    agent = Agent(0)
    server = RayServer(Cluster(agent), agent, "math.0")  # type: ignore[arg-type]
    assert asyncio.run(server.state()).exit_code == LOST_CODE
    assert agent.timeouts == [CALL_TIMEOUT_S] * 2
