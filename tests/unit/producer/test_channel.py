"""Calls between two processes: answers to their callers, errors as they were raised, the other end's death at once."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest

from mopd.data_plane.frames import packed
from mopd.data_plane.interface import StorageEnded
from mopd.files.writing import WriteRefusedError
from mopd.producer import channel
from mopd.producer.channel import MAX_FRAME_BYTES, MAX_HEAD_BYTES, PIECE_BYTES, Channel, Handler, PeerEnded
from mopd.types import CutOffError, UserError


async def slow(value: int, seconds: float) -> int:
    await asyncio.sleep(seconds)
    return value


async def refuse(kind: str) -> None:
    kinds = {"user": UserError, "storage": StorageEnded, "write": WriteRefusedError, "bug": ZeroDivisionError}
    raise kinds[kind](f"a {kind} error")


async def measure(name: str, frames: list[bytes]) -> list[Any]:
    return [name, *map(len, frames), frames[0][:3]]


HANDLERS: dict[str, Handler] = {"slow": slow, "refuse": refuse, "measure": measure}


def between(work: Callable[[Channel, Channel], Awaitable[None]], own: Mapping[str, Handler] = {}) -> None:
    """``work`` with two connected ends; the second one answers ``HANDLERS``."""

    async def main() -> None:
        one, other = socket.socketpair()
        asking, answering = Channel("the other", own), Channel("rank 0", HANDLERS)
        running = [asyncio.ensure_future(asking.run(one)), asyncio.ensure_future(answering.run(other))]
        try:
            await asyncio.wait_for(work(asking, answering), 60)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    asyncio.run(main())


async def begun(hanging: list[None], num: int) -> None:
    """So many calls have come to their handler."""

    async def look() -> None:
        while len(hanging) < num:
            await asyncio.sleep(0.01)

    await asyncio.wait_for(look(), 20)


def test_halves_of_characters_end_no_channel() -> None:
    """In an error of a handler, an answer or an argument: they are spelled out."""

    async def fail(text: str) -> None:
        raise UserError(f"{text} \ud800")

    async def work(asking: Channel, answering: Channel) -> None:
        answering.answer({"fail": fail})
        for _ in range(2):
            with pytest.raises(UserError) as caught:
                await asking.call("fail", "\udfff")
            assert str(caught.value) == "\\udfff \\ud800"
        assert await asking.call("measure", "x\ud800", frames=[b"abc"]) == ["x\\ud800", 3, b"abc"]

    between(work)


def test_many_calls_at_a_time_each_get_their_own_answer() -> None:
    async def work(asking: Channel, answering: Channel) -> None:
        answers = await asyncio.gather(*(asking.call("slow", i, 0.001 * (50 - i)) for i in range(50)))
        assert answers == [*range(50)] and asking.num_calls == 50
        assert asking.bytes_moved == answering.bytes_moved < 50 * 100

    between(work)


def test_errors_are_those_of_the_handler() -> None:
    async def work(asking: Channel, answering: Channel) -> None:
        # the last two are of kinds that the channel does not know
        for kind, arrives_as in (("user", UserError), ("storage", CutOffError), ("write", CutOffError)):
            with pytest.raises(UserError, match=rf"^a {kind} error$") as caught:
                await asking.call("refuse", kind)
            assert type(caught.value) is arrives_as
        with pytest.raises(RuntimeError, match=r"(?s)^in the other:\nTraceback .* in refuse.*ZeroDivisionError: a bug"):
            await asking.call("refuse", "bug")
        assert await asking.call("slow", 7, 0) == 7  # it goes on

    between(work)


def test_frames_arrive_whole_beside_small_calls() -> None:
    async def work(asking: Channel, answering: Channel) -> None:
        frames = [b"abc" + bytes(5_000_000), b"", bytes(70_000)]
        large, small = asking.call("measure", "weights", frames=frames), asking.call("slow", 1, 0)
        assert await asyncio.gather(large, small) == [["weights", 5_000_003, 0, 70_000, b"abc"], 1]

    between(work)


def test_a_call_that_is_given_up_between_two_pieces_leaves_the_way_whole() -> None:
    async def work(asking: Channel, answering: Channel) -> None:
        large = bytes(8 * PIECE_BYTES)
        given_up = asyncio.ensure_future(asking.call("measure", "old", frames=[large]))
        while answering._arriving is None or answering._arriving._num_bytes < PIECE_BYTES:
            await asyncio.sleep(0)
        given_up.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await given_up
        assert answering._arriving is not None, "it was over before it could be given up"
        assert await asking.call("slow", 3, 0) == 3
        assert await asking.call("measure", "new", frames=[b"xyz", large]) == ["new", 3, len(large), b"xyz"]

    between(work)


def test_the_other_end_may_call_and_tell() -> None:
    told: list[str] = []

    async def hear(text: str) -> None:
        told.append(text)

    async def work(asking: Channel, answering: Channel) -> None:
        await answering.tell("hear", "a line of the log")
        await answering.call("hear", "another")
        assert told == ["a line of the log", "another"]

    between(work, {"hear": hear})


def test_whoever_waits_learns_of_the_others_end_at_once() -> None:
    hanging: list[None] = []

    async def hang() -> None:
        hanging.append(None)
        await asyncio.Event().wait()

    async def work(asking: Channel, answering: Channel) -> None:
        answering.answer({"hang": hang})
        waiting = [asyncio.ensure_future(asking.call("hang")) for _ in range(3)]
        await begun(hanging, 3)
        assert answering._writer is not None
        answering._writer.transport.abort()
        for outcome in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(outcome, PeerEnded) and str(outcome) == "the other has ended"
        with pytest.raises(PeerEnded):
            await asking.call("slow", 1, 0)

    between(work)


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (struct.pack("<II", MAX_HEAD_BYTES + 1, 0), "sent a message of 268435457 bytes"),
        (struct.pack("<II", 5, 2**20), "and 1048576 frames"),
        (struct.pack("<IIQ", 5, 1, MAX_FRAME_BYTES + 1), "sent a frame of 1073741825 bytes"),
        (struct.pack("<IIQ", 0, 1, 9), "sent a piece of no frame"),
        (struct.pack("<IIQ", 1, 1, 4) + packed([])[:1] + struct.pack("<IIQ", 0, 1, PIECE_BYTES + 1), "sent a piece"),
        (struct.pack("<IIQ", 1, 1, 4) + packed([])[:1] + struct.pack("<II", 0, 0), "sent a piece of no frame"),
        (struct.pack("<IIQ", 1, 1, 4) + packed([])[:1] + struct.pack("<IIQ", 0, 1, 5) + bytes(5), "4 bytes has 5"),
    ],
)
def test_sizes_are_bounded_before_anything_is_read(message: bytes, problem: str) -> None:
    async def main() -> None:
        one, other = socket.socketpair()
        running = asyncio.ensure_future(Channel("the other", {}).run(one))
        await asyncio.get_running_loop().run_in_executor(None, other.sendall, message)
        with pytest.raises(RuntimeError, match=problem):
            await asyncio.wait_for(running, 20)
        other.close()

    asyncio.run(main())


def test_answers_for_a_peer_that_has_gone_are_dropped_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    hanging: list[None] = []

    async def end_badly() -> None:
        hanging.append(None)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError as error:
            raise RuntimeError("cancelled, and says so in its own way") from error

    async def work() -> None:
        one, other = socket.socketpair()
        asking, answering = Channel("the other", {}), Channel("rank 0", {"end_badly": end_badly})
        asks, answers = asyncio.ensure_future(asking.run(one)), asyncio.ensure_future(answering.run(other))
        calls = [asyncio.ensure_future(asking.call("end_badly")) for _ in range(50)]
        await begun(hanging, 50)
        asks.cancel()
        with pytest.raises(PeerEnded):
            await asyncio.wait_for(answers, 20)
        await asyncio.gather(asks, *calls, return_exceptions=True)

    asyncio.run(work())
    assert [record.getMessage() for record in caplog.records] == []


def test_a_channel_that_is_given_up_while_it_opens_answers_nobody_and_keeps_nobody() -> None:
    async def main() -> None:
        one, other = socket.socketpair()
        channel = Channel("the other", {})
        with one, other:
            running = asyncio.ensure_future(channel.run(one))
            asked = asyncio.ensure_future(channel.call("slow", 1, 0.0))
            await asyncio.sleep(0)
            running.cancel()
            with pytest.raises(PeerEnded):
                await asyncio.wait_for(asked, 20)

    asyncio.run(main())


def test_an_end_that_is_stopped_as_it_reads_a_model_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender waits for room in the socket then, and what it would say of itself behind that."""
    monkeypatch.setattr(channel, "BEAT_S", 0.05)

    async def main() -> None:
        one, other = socket.socketpair()
        asking = Channel("the other", {}, silent_s=0.2)
        running = asyncio.ensure_future(asking.run(one))
        sending = asyncio.ensure_future(asking.call("weights", frames=[bytes(PIECE_BYTES)] * 8))
        with pytest.raises(UserError, match=r"the other gave no sign of life for 0.2 s"):
            await running
        with pytest.raises(PeerEnded):
            await sending
        other.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_silent_end_is_given_up_and_a_slow_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose process was stopped holds its socket open; a handler may take many times as long as the silence."""
    monkeypatch.setattr(channel, "BEAT_S", 0.05)

    async def main() -> None:
        one, other = socket.socketpair()
        asking, answering = Channel("the other", {}, silent_s=2.0), Channel("rank 0", HANDLERS)
        running, serving = (asyncio.ensure_future(end.run(s)) for end, s in ((asking, one), (answering, other)))
        assert await asking.call("slow", 7, 5.0) == 7
        kept = other.dup()
        serving.cancel()
        with pytest.raises(UserError, match="the other gave no sign of life for 2 s"):
            await running
        with pytest.raises(PeerEnded):
            await asking.call("slow", 7, 0.0)
        kept.close()

    asyncio.run(asyncio.wait_for(main(), 60))
