"""The checks of ``mopd check --nodes`` in their order, on one process of each node; node 0 judges and reports."""

from __future__ import annotations

import datetime
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

from mopd.base.text import first_line
from mopd.config.load import Loaded
from mopd.launch.checks.facts import NodeFacts, facts_of_this_node
from mopd.launch.checks.inputs import Check
from mopd.launch.checks.meeting import Meeting, meeting_at
from mopd.launch.checks.run_folder import STAGE_S, RunFolderTrials
from mopd.launch.node import Place
from mopd.launch.preparing import FACTS
from mopd.launch.reaching import CURE

NUM_VALUES = {"gloo": 2**20, "nccl": 2**24}
"""Summed fp32 values: 4 and 64 MiB."""
ROUNDS = 3
DEADLINE_S = 60.0
OPERATION_S = {"gloo": 30.0, "nccl": 300.0}
"""Deadline of each operation: gloo's own reason comes first; NCCL ends the process at its deadline, without a line."""
JOIN_S = 300.0
"""Seconds between the first node and the last: a cold file system serves Python and torch to all of them."""
VERDICT_S = 2 * (DEADLINE_S + STAGE_S)
"""Seconds that node 0 may take from its last decision on: the clocks, its own all-reduce, those of the others."""
CLOCK_ROUNDS = 3
MAX_CLOCK_OFFSET_S = 2.0
"""Heartbeats and stop requests carry times."""
MAX_LISTED = 8
MAX_NAMED = 4
"""Nodes named in one line."""
GPU_SHM_BYTES = 2**30
"""Shared memory that NCCL and vLLM need between the processes of a node; containers have 64 MiB by default."""


def check_nodes(place: Place, load: Callable[[], Loaded], *, join_s: float = JOIN_S) -> list[Check]:
    """Return every outcome, the same on all nodes.

    Args:
        place: which node this is, and where all meet.
        load: reads the recipe; a ``UserError`` of it is this node's outcome.
        join_s: deadline for all to come.

    Raises:
        UserError: node 0 cannot be reached, or ends without a verdict.
    """
    meeting = meeting_at(place, join_s)
    checks = _checks(meeting, load, join_s)
    verdict = meeting.decide("verdict", lambda: [asdict(check) for check in checks], VERDICT_S)
    meeting.part()
    return [Check(one["name"], one["status"], one["detail"]) for one in verdict]


def _checks(meeting: Meeting, load: Callable[[], Loaded], join_s: float) -> list[Check]:
    """Run all checks; their outcomes on node 0, elsewhere nothing."""
    place = meeting.place
    own, loaded = facts_of_this_node(load, num_nodes=place.num_nodes, node=place.node_rank)
    reports = meeting.gather("facts", asdict(own), join_s)
    facts = [NodeFacts() if one is None else NodeFacts.from_json(one) for one in reports]
    names = _names([one.name for one in facts])
    absent = [node for node, one in enumerate(reports) if one is None]
    checks: list[Check] = []
    if absent:
        which = ", ".join(map(str, absent[:MAX_LISTED])) + (", ..." if len(absent) > MAX_LISTED else "")
        detail = (
            f"node {which} of {place.num_nodes} (from 0) did not come to {place.host}:{place.port} in {join_s:.0f} s: "
            "is it up, does mopd start there, and is --nnodes right?"
        )
        checks.append(Check("nodes", "failed", detail))
    if place.is_first:
        present = [node for node in range(place.num_nodes) if node not in absent]
        checks += compare([replace(facts[node], name=names[node]) for node in present])
    all_read = meeting.decide("run folder", lambda: not absent and all(one.is_complete for one in facts), join_s)
    if all_read and loaded is not None:
        checks += RunFolderTrials(meeting, loaded, names).run()
    if meeting.decide("links", lambda: not absent, STAGE_S):
        checks += _clocks(meeting, names)
        checks += _links(meeting, names)
    return checks


def _names(names: Sequence[str]) -> list[str]:
    """Make names unique: with the node's number where several have one name, that alone where one has none."""
    return [
        f"node {node}" if name == "?" else name if names.count(name) == 1 else f"{name} (node {node})"
        for node, name in enumerate(names)
    ]


def _clocks(meeting: Meeting, names: Sequence[str]) -> list[Check]:
    """Compare clocks: node 0 tells its time between two looks of each node at its own, and the narrowest try counts."""
    tries = []
    for number in range(CLOCK_ROUNDS):
        begun = time.time()
        meeting.gather(f"clock/{number}", True, STAGE_S)
        answer = meeting.decide(f"clock/{number}", time.time, STAGE_S)
        ended = time.time()
        tries.append((ended - begun, answer - (begun + ended) / 2))
    width_s, offset_s = min(tries) if meeting.place.node_rank else (0.0, 0.0)
    answers: list[Any] = meeting.gather("clock", {"width_s": width_s, "offset_s": offset_s}, STAGE_S)
    problems, largest = [], 0.0
    for name, answer in zip(names, answers, strict=bool(answers)):
        if answer is None:
            problems.append(f"{name}: clock: no answer in {STAGE_S:g} s")
            continue
        off_s = abs(answer["offset_s"])
        largest = max(largest, off_s)
        if off_s > MAX_CLOCK_OFFSET_S + answer["width_s"] / 2:
            side = "behind" if answer["offset_s"] > 0 else "ahead of"
            problems.append(
                f"{name}: clock: {off_s:.1f} s {side} {names[0]}'s, at most {MAX_CLOCK_OFFSET_S:g} are allowed: start "
                "an NTP service there"
            )
    return meeting.outcomes("clock", problems, f"{largest:.3f} s apart at most")


def _links(meeting: Meeting, names: Sequence[str]) -> list[Check]:
    """Sum over the nodes, and measure how fast that goes."""
    answers = meeting.gather("all_reduce", measured_all_reduce(meeting), DEADLINE_S + STAGE_S)
    problems, rates = [], []
    for name, answer in zip(names, answers, strict=bool(answers)):
        if answer is None:
            problems.append(f"{name}: all-reduce: no answer")
        elif "error" in answer:
            problems.append(f"{name}: all-reduce over {answer['backend']}: {answer['error']}: {CURE}")
        else:
            rates.append(float(answer["bytes_per_s"]))
    detail = f"{min(rates, default=0.0) / 1e9:.2f} GB/s at the slowest node"
    return meeting.outcomes("all-reduce", problems[:1], detail)


def measured_all_reduce(meeting: Meeting) -> dict[str, Any]:
    """Return ``backend`` and ``bytes_per_s`` (of the bus: 2 (n - 1) / n of the data over the time), or ``error``."""
    found: dict[str, Any] = {"backend": "nccl" if torch.cuda.is_available() else "gloo"}

    def measure() -> None:
        try:
            found["bytes_per_s"] = _rate(meeting, found["backend"])
        except (RuntimeError, ValueError) as error:  # what torch raises for a backend's failure; its line is reported
            found["error"] = first_line(error)

    # A thread of its own: a library that waits for a node in vain cannot be interrupted.
    thread = threading.Thread(target=measure, daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    return {**found, "error": f"no end in {DEADLINE_S:.0f} s"} if thread.is_alive() else found


def _rate(meeting: Meeting, backend: str) -> float:
    place = meeting.place
    device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        store=PrefixStore("all_reduce", meeting.store),
        rank=place.node_rank,
        world_size=place.num_nodes,
        timeout=datetime.timedelta(seconds=OPERATION_S[backend]),
    )
    values = torch.empty(NUM_VALUES[backend], device=device)
    expected = place.num_nodes * (place.num_nodes + 1) / 2
    seconds = []
    for _ in range(ROUNDS):
        values.fill_(place.node_rank + 1.0)
        dist.barrier()
        begun = time.perf_counter()
        dist.all_reduce(values)
        summed = values[-1].item()  # waits for the device
        seconds.append(time.perf_counter() - begun)
        if summed != expected:
            raise RuntimeError(f"the sum over nodes is {summed}, not {expected}")
    dist.destroy_process_group()
    num_bytes = values.numel() * values.element_size()
    return 2 * (place.num_nodes - 1) / place.num_nodes * num_bytes / min(seconds)


def compare(facts: Sequence[NodeFacts]) -> Iterator[Check]:
    """Compare the reports of the nodes that came; yield one outcome for each fact."""
    for one in facts:
        for problem in one.problems:
            yield Check(one.name, "failed", f"{one.name}: {problem}")
    names = [one.name for one in facts]
    yield _outcome(
        "versions",
        _differences(names, [one.versions for one in facts]),
        ", ".join(f"{name} {version}" for name, version in facts[0].versions.items()),
    )
    whole = [one for one in facts if one.is_complete]
    if whole:
        own = [one.name for one in whole]
        recipes = _differences(own, [one.recipe for one in whole], cure="start every node with one recipe file")
        yield _outcome("recipe", recipes, f"{len(whole[0].recipe)} values")
        models = list(_models(whole))
        yield from models
        yield from _start(whole, are_models_equal=all(check.status == "ok" for check in models))
    yield from _gpus(facts)
    small = [one.name for one in facts if one.gpus and one.shm_bytes < GPU_SHM_BYTES]
    least = min(one.shm_bytes for one in facts)
    yield _outcome(
        "/dev/shm",
        [f"{_named(small)}: /dev/shm has {least / 2**20:.0f} MiB, a node with GPUs needs {GPU_SHM_BYTES / 2**20:.0f}: "
         "give the container more (--shm-size, --ipc=host)"] if small else [],
        f"{least / 2**30:.1f} GiB at least",
    )  # fmt: skip


def _models(facts: Sequence[NodeFacts]) -> Iterator[Check]:
    for where in dict.fromkeys(where for one in facts for where in one.models):
        having = [one for one in facts if where in one.models]
        problems = _differences(
            [one.name for one in having],
            [one.models[where] for one in having],
            head=f"{where}: ",
            cure="let all nodes read one folder, or copy it anew",
        )
        yield _outcome(where, problems, ", ".join(f"{k} {v}" for k, v in having[0].models[where].items()))


def _start(facts: Sequence[NodeFacts], *, are_models_equal: bool) -> Iterator[Check]:
    """Compare what a start would refuse. If models differ, their files need no second line."""
    for kind, cure in FACTS.items():
        having = [one for one in facts if kind in one.start]
        if having and (are_models_equal or kind != "student.model"):
            values = [one.start[kind] for one in having]
            problems = _differences([one.name for one in having], values, cure=cure)
            yield _outcome(f"ranks: {kind}", problems, f"equal on {len(having)} nodes")


def _gpus(facts: Sequence[NodeFacts]) -> Iterator[Check]:
    kinds = [", ".join(f"{n} x {kind}" for kind, n in Counter(one.gpus).items()) or "no GPU" for one in facts]
    common = _most_common(kinds)
    others = [f"{one.name} has {kind}" for one, kind in zip(facts, kinds, strict=True) if kind != common]
    if others:
        yield Check("GPUs", "warning", f"most nodes have {common}, but {'; '.join(others[:MAX_NAMED])}")
    else:
        yield Check("GPUs", "ok", f"{common} on each of {len(facts)} nodes")


def _differences(
    names: Sequence[str],
    values: Sequence[Mapping[str, str]],
    *,
    head: str = "",
    cure: str = "install the same on every node",
) -> list[str]:
    """Return a line for each key whose values are not equal. It names the nodes that differ from most others."""
    found = []
    for key in dict.fromkeys(key for value in values for key in value):
        shown = [value.get(key, "absent") for value in values]
        common = _most_common(shown)
        odd = [(name, value) for name, value in zip(names, shown, strict=True) if value != common]
        if odd:
            among = [name for name, value in odd if value == odd[0][1]]
            other = next(name for name, value in zip(names, shown, strict=True) if value == common)
            found.append(f"{_named(among)}: {head}{key} is {odd[0][1]} there and {common} on {other}: {cure}")
    return found


def _most_common(values: Sequence[str]) -> str:
    """Return the most common value, the first of equally common ones."""
    return Counter(values).most_common(1)[0][0]


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more


def _outcome(name: str, problems: Sequence[str], detail: str) -> Check:
    """Return one outcome; several problems are one line, as most have one cause."""
    if not problems:
        return Check(name, "ok", detail)
    more = f" (and {len(problems) - 1} more differences)" if len(problems) > 1 else ""
    return Check(name, "failed", f"{problems[0]}{more}")
