"""The checks of ``mopd check --nodes`` in their order, on one process of each node; node 0 judges and tells."""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist

from mopd.base.text import first_line
from mopd.config.load import Loaded
from mopd.launch.checks.compare import compare
from mopd.launch.checks.facts import NodeFacts, facts_of_this_node
from mopd.launch.checks.inputs import Check
from mopd.launch.checks.meeting import Meeting, meeting_at
from mopd.launch.checks.run_folder import STAGE_S, RunFolderTrials
from mopd.launch.node import Place
from mopd.launch.reaching import CURE

NUM_VALUES = {"gloo": 2**20, "nccl": 2**24}
"""fp32: 4 and 64 MiB."""
ROUNDS = 3
DEADLINE_S = 60.0
OPERATION_S = {"gloo": 30.0, "nccl": 300.0}
"""Deadline of each: gloo's own reason comes first; NCCL ends the process at its deadline, and nothing would be told."""


class AllReduce(threading.Thread):
    """Runs in a thread of its own, as a library that waits for a node in vain cannot be interrupted."""

    def __init__(self, meeting: Meeting) -> None:
        super().__init__(daemon=True)
        self._meeting = meeting
        self._backend = "nccl" if torch.cuda.is_available() else "gloo"
        self._found: dict[str, Any] = {}

    def measured(self) -> dict[str, Any]:
        """``bytes_per_s`` (of the bus: 2 (n - 1) / n of the data over the time) and ``backend``, or ``error``."""
        self.start()
        self.join(DEADLINE_S)
        if self.is_alive():
            return {"backend": self._backend, "error": f"no end in {DEADLINE_S:.0f} s"}
        return {"backend": self._backend, **self._found}

    def run(self) -> None:
        try:
            self._found = {"bytes_per_s": self._rate()}
        except (RuntimeError, ValueError) as error:  # what torch raises for a backend's failure; told by node and line
            self._found = {"error": first_line(error)}

    def _rate(self) -> float:
        place = self._meeting.place
        device = torch.device("cuda", 0) if self._backend == "nccl" else torch.device("cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            self._backend,
            store=self._meeting.store_for("all_reduce"),
            rank=place.node_rank,
            world_size=place.num_nodes,
            timeout=datetime.timedelta(seconds=OPERATION_S[self._backend]),
        )
        values = torch.empty(NUM_VALUES[self._backend], device=device)
        seconds = []
        for _ in range(ROUNDS):
            values.fill_(place.node_rank + 1.0)
            dist.barrier()
            begun = time.perf_counter()
            dist.all_reduce(values)
            summed = values[-1].item()  # waits for the device
            seconds.append(time.perf_counter() - begun)
            expected = place.num_nodes * (place.num_nodes + 1) / 2
            if summed != expected:
                raise RuntimeError(f"the sum over nodes is {summed}, not {expected}")
        dist.destroy_process_group()
        num_bytes = values.numel() * values.element_size()
        return 2 * (place.num_nodes - 1) / place.num_nodes * num_bytes / min(seconds)


JOIN_S = 300.0
"""How long the first node waits for the last: a cold file system serves Python and torch to all of them."""
VERDICT_S = 2 * (DEADLINE_S + STAGE_S)
"""What node 0 may take from its last decision on: answers of the clocks, its own all-reduce, those of the others."""
CLOCK_ROUNDS = 3
MAX_CLOCK_OFFSET_S = 2.0
"""Heartbeats and stop requests carry times."""


def check_nodes(place: Place, load: Callable[[], Loaded], *, join_s: float = JOIN_S) -> list[Check]:
    """Every outcome, on every node the same.

    Args:
        place: which node this is, and where all meet.
        load: reads the recipe; a ``UserError`` of it is this node's outcome.
        join_s: deadline for all to come.

    Raises:
        UserError: node 0 cannot be reached, or ends without a word.
    """
    with meeting_at(place, join_s) as meeting:
        checks = _checks(meeting, load, join_s)
        told = meeting.decide("verdict", lambda: [_plain(check) for check in checks], VERDICT_S)
        meeting.part()
        return [Check(one["name"], one["status"], one["detail"]) for one in told]


def _plain(check: Check) -> dict[str, str]:
    return {"name": check.name, "status": check.status, "detail": check.detail}


def _checks(meeting: Meeting, load: Callable[[], Loaded], join_s: float) -> list[Check]:
    """All that node 0 finds; elsewhere nothing."""
    own, loaded = facts_of_this_node(load, num_nodes=meeting.place.num_nodes, node=meeting.place.node_rank)
    told = meeting.gather("facts", asdict(own), join_s)
    facts = [NodeFacts() if one is None else NodeFacts.from_json(one) for one in told]
    facts = [replace(one, name=name) for one, name in zip(facts, _names(facts), strict=True)]
    names = [one.name for one in facts]
    absent = [node for node, one in enumerate(told) if one is None]
    checks = (
        [
            *_absent(absent, meeting.place, join_s),
            *compare([one for one, there in zip(facts, told, strict=True) if there is not None]),
        ]
        if facts
        else []
    )
    all_read = meeting.decide("run folder", lambda: not absent and all(one.is_complete for one in facts), join_s)
    if all_read and loaded is not None:
        checks += RunFolderTrials(meeting, loaded, names).run()
    if meeting.decide("links", lambda: not absent, STAGE_S):
        checks += _clocks(meeting, names)
        checks += _links(meeting, names)
    return checks


def _names(facts: Sequence[NodeFacts]) -> list[str]:
    """Names that stand once: with the node's number where several have one name, or it alone where one has none."""
    names = [one.name for one in facts]
    return [
        f"node {node}" if name == "?" else name if names.count(name) == 1 else f"{name} (node {node})"
        for node, name in enumerate(names)
    ]


def _absent(nodes: Sequence[int], place: Place, join_s: float) -> list[Check]:
    if not nodes:
        return []
    which = ", ".join(map(str, nodes[:8])) + (", ..." if len(nodes) > 8 else "")
    return [
        Check(
            "nodes",
            "failed",
            f"node {which} of {place.num_nodes} (from 0) did not come to {place.host}:{place.port} in {join_s:.0f} s: "
            "is it up, does mopd start there, and is --nnodes right?",
        )
    ]


def _clocks(meeting: Meeting, names: Sequence[str]) -> list[Check]:
    """Node 0 tells its time between two looks of each node at its own clock; the narrowest of some tries counts."""
    place = meeting.place
    best = (float("inf"), 0.0)
    for one in range(CLOCK_ROUNDS):
        begun = time.time()
        meeting.gather(f"clock/{one}", True, STAGE_S)
        answer = meeting.decide(f"clock/{one}", time.time, STAGE_S)
        ended = time.time()
        best = min(best, (ended - begun, answer - (begun + ended) / 2))
    own = {"width_s": best[0], "offset_s": best[1]} if place.node_rank else {"width_s": 0.0, "offset_s": 0.0}
    answers: list[Any] = meeting.gather("clock", own, STAGE_S)
    if not meeting.leads:
        return []
    problems, largest = [], 0.0
    for name, answer in zip(names, answers, strict=True):
        if answer is None:
            problems.append(f"{name}: clock: no answer in {STAGE_S:g} s")
            continue
        largest = max(largest, abs(answer["offset_s"]))
        if abs(answer["offset_s"]) > MAX_CLOCK_OFFSET_S + answer["width_s"] / 2:
            side = "behind" if answer["offset_s"] > 0 else "ahead of"
            problems.append(
                f"{name}: clock: {abs(answer['offset_s']):.1f} s {side} {names[0]}'s, at most {MAX_CLOCK_OFFSET_S:g} "
                "are allowed: start an NTP service there"
            )
    return [Check("clock", "failed", line) for line in problems] or [
        Check("clock", "ok", f"{largest:.3f} s apart at most")
    ]


def _links(meeting: Meeting, names: Sequence[str]) -> list[Check]:
    answers = meeting.gather("all_reduce", AllReduce(meeting).measured(), DEADLINE_S + STAGE_S)
    problems, rates = [], []
    for name, answer in zip(names, answers, strict=bool(answers)):
        if answer is None:
            problems.append(f"{name}: all-reduce: no answer")
        elif "error" in answer:
            problems.append(f"{name}: all-reduce over {answer['backend']}: {answer['error']}: {CURE}")
        else:
            rates.append(float(answer["bytes_per_s"]))
    if problems:
        return [Check("all-reduce", "failed", problems[0])]
    return [Check("all-reduce", "ok", f"{min(rates) / 1e9:.2f} GB/s at the slowest node")] if rates else []
