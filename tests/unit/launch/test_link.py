"""The link between orchestrator and rank 0: whole messages, errors as they were raised, the other end gone at once."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from mopd.base.files.writing import WriteRefusedError
from mopd.base.tasks import Tasks
from mopd.base.types import CutOffError, LostError, NonFiniteError, SampleMeta, UserError
from mopd.data_plane.interface import StorageEnded
from mopd.data_plane.local import LocalDataPlane
from mopd.launch.heartbeat import Heartbeat
from mopd.launch.link import LinkEnded, RankLink, error_head, error_of
from mopd.orchestrator.ranks import Ranks

CHUNK = bytes(2**24)
NUM_CHUNKS = 64
"""1 GiB together."""
LONGEST_CLAIM_S = 0.05


def ends(silent_s: float | None = None) -> tuple[RankLink, RankLink]:
    """Rank 0's and the orchestrator's."""
    ours, theirs = socket.socketpair()
    return RankLink(ours, "the orchestrator process", silent_s=silent_s), RankLink(theirs, "rank 0")


def answering(link: RankLink, answer: Callable[[dict[str, Any]], None]) -> threading.Thread:
    """Rank 0, which answers each call until the other end is closed."""

    def work() -> None:
        try:
            while True:
                answer(link.next_command())
        except LinkEnded:
            pass

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def asked(link: RankLink, work: Callable[[Ranks], Awaitable[None]]) -> None:
    async def main() -> None:
        async with Tasks() as tasks:
            ranks = Ranks(link)
            tasks.start(ranks.run())
            await tasks.unless_failed(asyncio.wait_for(work(ranks), 60))

    asyncio.run(main())


def test_frames_arrive_whole() -> None:
    one, other = ends()
    frames = [b"abc" + bytes(5_000_000), b"", memoryview(bytes(70_000))]
    sending = threading.Thread(target=one.send, args=({"value": [1, 0.1, "é\ud800"]}, frames))
    sending.start()
    head, got = other.receive()
    assert head == {"value": [1, 0.1, "é\ud800"]} and got == [bytes(frame) for frame in frames]
    sending.join()


def test_commands_come_one_after_another_and_each_gets_its_answer() -> None:
    one, other = ends()
    done: list[int] = []

    def answer(command: dict[str, Any]) -> None:
        number = command["kwargs"]["number"]
        time.sleep(0.001 * (number % 3))
        done.append(number)
        one.send({"more": True}, [b"%d" % number])
        one.send({"value": number}, [b"last"])

    async def work(ranks: Ranks) -> None:
        calls = [asyncio.ensure_future(ranks.ask_for_frames("x", number=i)) for i in range(20)]
        await asyncio.sleep(0)
        calls[7].cancel()  # its caller goes away: the ranks are told all the same
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        del outcomes[7]
        assert outcomes == [(i, [b"%d" % i, b"last"]) for i in range(20) if i != 7]
        await ranks.settle()
        assert done == [*range(20)] and ranks.num_calls == 20

    answering(one, answer)
    asked(other, work)


def test_claims_are_answered_while_a_model_arrives() -> None:
    """The event loop of the orchestrator takes part in a data plane meanwhile."""
    one, other = ends()
    seconds: list[float] = []

    def answer(command: dict[str, Any]) -> None:
        for _ in range(NUM_CHUNKS):
            one.send({"more": True}, [CHUNK])
        one.send({"value": None})

    async def work(ranks: Ranks) -> None:
        plane = LocalDataPlane()
        meta = SampleMeta(
            sample_id=0, domain="math", weight_version=0, prompt_length=1, response_length=1, num_loss_tokens=1
        )
        arriving = asyncio.ensure_future(ranks.ask_for_frames("weights"))
        while not arriving.done():
            began = time.perf_counter()
            await plane.put([meta], {})
            await plane.release(await plane.claim([0], []))
            await asyncio.sleep(0)
            seconds.append(time.perf_counter() - began)
        _, frames = await arriving
        assert sum(map(len, frames)) == NUM_CHUNKS * len(CHUNK)

    answering(one, answer)
    asked(other, work)
    assert len(seconds) > 100
    seconds.sort()
    assert seconds[int(0.99 * len(seconds))] < LONGEST_CLAIM_S


@pytest.mark.parametrize(
    ("error", "arrives_as"),
    [
        (UserError("a line"), UserError),
        (NonFiniteError("a line"), NonFiniteError),
        (StorageEnded("a line"), LostError),
        (WriteRefusedError("a line"), CutOffError),
    ],
)
def test_user_errors_are_those_that_were_raised(error: UserError, arrives_as: type[UserError]) -> None:
    one, other = ends()
    other.send(error_head(error))
    with pytest.raises(UserError, match=r"^a line$") as caught:
        one.next_command()
    assert type(caught.value) is arrives_as


def test_any_other_error_has_its_traceback() -> None:
    try:
        raise ZeroDivisionError("a bug")
    except ZeroDivisionError as error:
        said = str(error_of(error_head(error), "the orchestrator process"))
    assert said.startswith("in the orchestrator process:\nTraceback ") and "ZeroDivisionError: a bug" in said


def test_a_wait_ends_with_the_other_end_at_once() -> None:
    one, other = ends()

    def answer(command: dict[str, Any]) -> None:
        one.close()

    async def work(ranks: Ranks) -> None:
        await ranks.ask("forward_backward")

    answering(one, answer)
    with pytest.raises(LinkEnded, match="rank 0 has ended"):
        asked(other, work)
    with pytest.raises(LinkEnded):
        other.send({"call": "x"})


def test_an_error_said_before_the_end_is_read_after_it() -> None:
    one, other = ends()
    one.send({"value": "an answer that is not read"})
    other.send(error_head(UserError("why it ends")))
    other.close()
    with pytest.raises(UserError, match="why it ends"):
        one.next_command()


def test_a_silent_end_is_given_up_and_a_slow_one_is_not() -> None:
    """A stopped process holds its socket open. Beats are no messages, and are lost where they are not read."""
    one, other = ends(silent_s=0.5)
    with Heartbeat(other.beat, 0.5):
        calling = threading.Timer(1.5, other.send, ({"call": "x", "kwargs": {}},))
        calling.start()
        assert one.next_command()["call"] == "x"
    with pytest.raises(UserError, match=r"the orchestrator process gave no sign of life for 0.5 s"):
        one.next_command()
    for _ in range(10_000):
        other.beat()
