"""One micro-batch ahead of its user; in a tensor-parallel group one rank reads, and all get the bytes or the error."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mopd.base.types import UserError
from mopd.config.student import ParallelConfig
from mopd.data_plane.local import LocalDataPlane
from mopd.student import parallel
from mopd.student.reading import StageReader, one_ahead
from tests.fixtures.samples import meta_of


def test_the_next_one_is_built_while_this_one_is_used() -> None:
    built: list[int] = []
    second = threading.Event()

    def build(number: int) -> Any:
        assert threading.current_thread() is not threading.main_thread()
        built.append(number)
        if number == 1:
            second.set()
        return number

    batches: Any = one_ahead(build, range(4), torch.device("cpu"))
    assert next(batches) == 0
    assert second.wait(10)  # without another ``next``
    assert built == [0, 1]
    assert list(batches) == [1, 2, 3] and built == [0, 1, 2, 3]
    assert list(one_ahead(build, range(0), torch.device("cpu"))) == []


def test_an_error_of_the_thread_is_the_caller_s() -> None:
    def build(number: int) -> Any:
        if number == 1:
            raise UserError("the storage has ended")
        return number

    batches: Any = one_ahead(build, range(3), torch.device("cpu"))
    assert next(batches) == 0
    with pytest.raises(UserError, match="the storage has ended"):
        next(batches)


class Ending:
    """A reader whose storage is gone."""

    bytes_received = 0

    def fetch(
        self, sample_ids: Sequence[int], fields: Sequence[str], *, waited_s: float = 0.0
    ) -> dict[str, list[torch.Tensor]]:
        raise UserError("data plane: the storage has ended")

    def close(self) -> None: ...


class Recording:
    """A reader whose ``fetch`` takes ``takes_s`` of ``now``, and notes what it is told of earlier waits."""

    bytes_received = 0

    def __init__(self) -> None:
        self.waited: list[float] = []
        self.now = self.takes_s = 0.0

    def monotonic(self) -> float:
        return self.now

    def fetch(
        self, sample_ids: Sequence[int], fields: Sequence[str], *, waited_s: float = 0.0
    ) -> dict[str, list[torch.Tensor]]:
        self.waited.append(waited_s)
        self.now += self.takes_s
        return {"tokens": [torch.zeros(1)] * len(sample_ids)}

    def close(self) -> None: ...


def test_what_reads_of_one_command_were_waited_for_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    layout: Any = SimpleNamespace(
        samples_group=SimpleNamespace(size=lambda: 1), is_first_stage=True, is_last_stage=False
    )
    own = Recording()
    monkeypatch.setattr("mopd.student.reading.time", own)
    reader = StageReader(own, layout)
    for takes_s, waited_s in ((700.0, 700.0), (600.0, 200.0), (100.0, 5000.0)):
        own.takes_s = takes_s
        reader.fetch([meta_of(0)], ())
        reader.note_wait(waited_s)  # the second was ahead; most of the third was computation
    assert own.waited == [0.0, 700.0, 900.0] and reader._waited_s == 1000.0
    reader.fetch([], ())
    reader.note_wait(100.0)  # an empty micro-batch reads nothing
    assert reader._waited_s == 1000.0
    reader.begin()
    reader.fetch([meta_of(0)], ())
    assert own.waited[-1] == 0.0


@pytest.mark.parametrize(
    ("is_first", "is_last", "names"),
    [(True, False, {"tokens"}), (False, False, set()), (False, True, {"tokens", "loss_mask"})],
)
def test_a_stage_reads_what_it_needs(is_first: bool, is_last: bool, names: set[str]) -> None:
    layout: Any = SimpleNamespace(
        samples_group=SimpleNamespace(size=lambda: 1), is_first_stage=is_first, is_last_stage=is_last
    )
    plane = LocalDataPlane()
    fields = {"tokens": torch.arange(3), "loss_mask": torch.ones(2, dtype=torch.bool), "other": torch.ones(2)}
    asyncio.run(plane.put([meta_of(0)], {name: [tensor] for name, tensor in fields.items()}))
    assert StageReader(plane.reader(), layout).fetch([meta_of(0)], ("tokens", "loss_mask")).keys() == names


def test_a_wait_is_told_before_the_next_one_is_begun() -> None:
    seen: list[str] = []

    def build(number: int) -> Any:
        seen.append(f"build {number}")
        return number

    def note_wait(seconds: float) -> None:
        assert seconds >= 0
        seen.append("wait")

    batches: Any = one_ahead(build, range(3), torch.device("cpu"), note_wait)
    assert list(batches) == [0, 1, 2]
    assert seen == ["build 0", "wait", "build 1", "wait", "build 2", "wait"]


def rank(number: int, folder: str, end: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=number, world_size=2)
    layout = parallel.initialize(ParallelConfig(tensor_model_parallel_size=2), timeout_s=300, seed=0)
    plane = LocalDataPlane()
    if number == 0:  # the other rank's plane is empty: it must not be asked
        tensors = {"tokens": [torch.arange(3), torch.arange(4)], "bf16": [torch.ones(2, 3).bfloat16()] * 2}
        asyncio.run(plane.put([meta_of(5), meta_of(6)], tensors))
    said: list[Any] = []
    reader = StageReader(plane.reader(), layout)
    got = reader.fetch([meta_of(6), meta_of(5)], ("tokens", "bf16"))
    said.append({name: {i: t.tolist() for i, t in values.items()} for name, values in got.items()})
    said.append([reader.bytes_received, str(got["bf16"][5].dtype), reader.fetch([], ("tokens",))])
    for own, ids, names in ((plane.reader(), [7], ("tokens",)), (plane.reader(), [5], ("x",)), (Ending(), [5], ())):
        try:
            StageReader(own, layout).fetch([meta_of(i) for i in ids], names or ("tokens",))
        except (KeyError, UserError) as error:
            said.append([type(error).__name__, error.args[0]])
    end.send(said)
    end.poll(300)


@pytest.mark.multirank
def test_ranks_of_a_group_get_the_same_bytes_and_errors(tmp_path: Path) -> None:
    # Not forked from this process, in which other tests make process groups.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([StageReader.__module__])
    ends, processes = [], []
    for number in range(2):
        end, other = context.Pipe()
        processes.append(context.Process(target=rank, args=(number, str(tmp_path), other), daemon=True))
        processes[-1].start()
        other.close()
        ends.append(end)
    said = []
    for end in ends:
        assert end.poll(300)
        said.append(end.recv())
    for process in processes:
        process.terminate()
        process.join(20)
    first, second = said
    assert (
        first[0]
        == second[0]
        == {"tokens": {6: [0, 1, 2, 3], 5: [0, 1, 2]}, "bf16": {i: [[1.0] * 3] * 2 for i in (6, 5)}}
    )
    tensors = 8 * 7 + 2 * 12
    assert first[1] == [tensors, "torch.bfloat16", {"tokens": {}}]
    assert tensors < second[1][0] < tensors + 100 and second[1][1:] == first[1][1:]
    assert first[2:] == second[2:]
    assert [error[0] for error in first[2:]] == ["KeyError", "KeyError", "UserError"]
    assert "[7] are unknown" in first[2][1] and "'x' does not exist for samples [5]" in first[3][1]
