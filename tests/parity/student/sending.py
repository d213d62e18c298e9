"""A student's updates to engines by each way, and what the engines say afterwards (run by ``ranks.py``).

::

    version 0, 1, 2:   train a step ──> one way ──> is it the student? ──> the others ──> is it the same, bit by bit?
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from mopd.base.tasks import Tasks
from mopd.base.types import MicroBatchPlan
from mopd.config.groups import RoutingConfig, TorchEngineConfig, VllmEngineConfig
from mopd.config.placements import LocalConfig
from mopd.config.schema import Recipe
from mopd.config.weights import BucketsConfig, CollectiveConfig, IpcConfig
from mopd.data_plane.interface import Storage
from mopd.engines.clients.remote import RemoteEngine
from mopd.engines.interface import ToScore
from mopd.engines.replicas.interface import Replica
from mopd.engines.replicas.router import Router
from mopd.engines.torch.engine import TorchEngine
from mopd.engines.wire.weights import StagedWeights
from mopd.launch.link import RankLink, error_head
from mopd.launch.ranks import CommandChannel, follow, run_commands, student_facts
from mopd.orchestrator.ranks import Ranks
from mopd.orchestrator.student import StudentGroup
from mopd.orchestrator.weights.sync import GroupWeightSync
from mopd.student.worker import StudentWorker
from tests.fixtures.servers import RunningServer, running_server
from tests.fixtures.updates import unpacked

WAYS: tuple[BucketsConfig, ...] = (
    CollectiveConfig(type="collective", bucket_mib=1, timeout_s=30.0),
    IpcConfig(type="ipc", bucket_mib=1, timeout_s=30.0),
)
if torch.cuda.is_available():  # engines have devices of their own here, whose memory ``ipc`` does not reach
    WAYS = WAYS[:1]
NUM_WAYS = 1 + len(WAYS)
"""HTTP too."""
NUM_VERSIONS = 3
NUM_REPLICAS = 2


def run_sends(
    recipe: Recipe, worker: StudentWorker, plans: list[MicroBatchPlan], plane: Storage | None, case: dict[str, Any]
) -> Any:
    """On every rank; what rank 0, whose ``plane`` holds the samples of ``plans``, found. ``case["sends"]``: the
    engines' ``dtype``; ``urls`` of servers in the place of torch engines here, with their ``token`` if they are on
    another machine, the ``first`` version that they are to get. A student that ``sees`` images is asked nothing, and
    sends over groups."""
    channel = CommandChannel(worker.layout.control_group)
    if plane is None:
        follow(worker, channel)
        return {}
    with contextlib.ExitStack() as stack:
        sends = case["sends"]
        engine: Any = TorchEngineConfig(dtype=sends["dtype"])
        urls, servers = list(sends.get("urls", ())), list[RunningServer]()
        if urls:
            engine = VllmEngineConfig(type="vllm", dtype=sends["dtype"])
        for number in range(0 if urls else NUM_REPLICAS):
            device = torch.device("cpu")
            if torch.cuda.is_available():  # the last ones: the ranks have the first
                device = torch.device("cuda", torch.cuda.device_count() - 1 - number)
            made = TorchEngine.empty(recipe.student.model, engine, device)
            server = stack.enter_context(running_server(made, "rollout"))
            urls.append(server.url)
            servers.append(server)
        rollout = dataclasses.replace(recipe.rollout, engine=engine, placement=LocalConfig(type="local"))
        recipe = dataclasses.replace(recipe, rollout=rollout)
        sender = Sender(recipe, worker, plans, plane)
        ours, theirs = socket.socketpair()
        link = RankLink(theirs, "rank 0")

        def drive() -> dict[str, Any]:
            try:
                found = asyncio.run(sender.lead(link, urls, [server.engine for server in servers], sends))
                link.send({"end": None})
                return found
            except BaseException as error:
                link.send(error_head(error))
                raise

        driving = stack.enter_context(ThreadPoolExecutor(1)).submit(drive)
        run_commands(worker, channel, RankLink(ours, "the orchestrator"))
        found = driving.result()
        found["num_constants"] = len(worker.constants)
        channel.send({"call": "stop", "kwargs": {"is_asked": False}})
        return found


class Sender:
    """The orchestrator, in a thread of rank 0's process."""

    def __init__(self, recipe: Recipe, worker: StudentWorker, plans: list[MicroBatchPlan], plane: Storage) -> None:
        self._recipe, self._worker, self._plans, self._plane = recipe, worker, plans, plane
        self._engines: list[RemoteEngine] = []

    async def lead(
        self, link: RankLink, urls: list[str], here: list[TorchEngine], sends: dict[str, Any]
    ) -> dict[str, Any]:
        """All versions, each by all ways. ``here``: engines of this process."""
        async with Tasks() as tasks:
            ranks = Ranks(link)
            tasks.start(ranks.run())
            return await tasks.unless_failed(self._all(ranks, urls, here, sends))

    async def _all(
        self, ranks: Ranks, urls: list[str], here: list[TorchEngine], sends: dict[str, Any]
    ) -> dict[str, Any]:
        token = sends.get("token")
        engines = [RemoteEngine(url, token=token, timeout_s=60.0, name=f"r{i}") for i, url in enumerate(urls)]
        self._engines = engines
        router = Router("rollout", [Replica(name=e.name, engine=e) for e in engines], RoutingConfig(), kind="rollout")
        engine: Any = TorchEngineConfig(dtype=self._recipe.student.dtype)
        rollout = dataclasses.replace(self._recipe.rollout, engine=engine)
        exact = self._facts(dataclasses.replace(self._recipe, rollout=rollout))["announced"]["tensors"]
        by_group, *by_ipc = (self._group(ranks, router, way, sends) for way in WAYS)
        by_http = StudentGroup(self._recipe, ranks, self._facts(self._recipe), GroupWeightSync(router))
        found: dict[str, Any] = {
            "apart": 0.0,
            "mean_apart": 0.0,
            "moved": [],
            "is_student": True,
            "is_same": True,
            "num_skipped": [],
        }
        ways = (by_group, *by_ipc, by_http)
        if sends.get("sees"):  # an engine leaves the group of one way for the next
            ways = (by_group, by_group, *by_ipc, *by_ipc)
        elif token is not None:
            ways = (by_group, by_http)  # they cannot map the student's memory
        version, before, last = sends.get("first", 0), list[Tensor](), by_http
        for number, plan in enumerate(self._plans):
            if number:
                await by_group.forward_backward(plan, diagnostics=False)
                await by_group.optim_step()
            said: list[list[Tensor]] = []
            for student in (*ways[number:], *ways[:number]):
                if student is not last:  # the ranks are in one group at a time
                    await last.close()
                last = student
                await student.publish(version)
                assert [engine.weight_version for engine in engines] == [version] * len(engines)
                version += 1
                if here:
                    tensors, frames = await ranks.ask_for_frames("weights", tensors=exact)
                    own = list(unpacked(StagedWeights.pack(version, tensors.encode(), frames)))
                    found["is_student"] &= _hold(own, [one.weight_slots for one in here])
                if sends.get("sees"):
                    found["num_skipped"].append([one.incoming._receiver.num_skipped for one in here])
                else:
                    said.append(await self._said(by_group, found))
            found["is_same"] &= all(all(map(torch.equal, said[0], other)) for other in said[1:])
            if before and said:
                found["moved"].append(float((said[0][0] - before[0]).abs().max()))
            before = said[0] if said else []
        for student in (by_group, *by_ipc, by_http):
            await student.close()
        await router.close()
        for engine in engines:
            await engine.close()
        return found

    def _group(self, ranks: Ranks, router: Router, way: BucketsConfig, sends: dict[str, Any]) -> StudentGroup:
        recipe = dataclasses.replace(self._recipe, weight_sync=way)
        return StudentGroup(recipe, ranks, self._facts(recipe), GroupWeightSync(router))

    def _facts(self, recipe: Recipe) -> dict[str, Any]:
        return student_facts(recipe, self._worker)

    async def _said(self, student: StudentGroup, found: dict[str, Any]) -> list[Tensor]:
        """[R] log-probs of the same responses by each engine; how far they are from what the student says."""
        batches = self._plans[0].micro_batches
        samples = sorted((s for rank in batches for batch in rank for s in batch), key=lambda s: s.sample_id)
        tokens = (await self._plane.get([s.sample_id for s in samples], ("tokens",)))["tokens"]
        own = torch.cat(await student.logprobs(samples, temperature=1.0))
        said = []
        for engine in self._engines:
            scores = await engine.score(ToScore(tokens, [s.prompt_length for s in samples], top_k=1, temperature=1.0))
            said.append(torch.cat([given.token_logprobs for given in scores]))
            differences = (own - said[-1]).abs()
            found["apart"] = max(found["apart"], float(differences.max()))
            found["mean_apart"] = max(found["mean_apart"], float(differences.mean()))
        return said


def _hold(weights: list[tuple[str, Tensor]], slots: list[Any]) -> bool:
    """Every replica every bit; where the rollout computes in a narrower dtype than the student, rounded."""
    return all(
        slot.keys() == dict(weights).keys()
        and all(torch.equal(slot[name].cpu(), tensor.to(slot[name].dtype)) for name, tensor in weights)
        for slot in slots
    )
