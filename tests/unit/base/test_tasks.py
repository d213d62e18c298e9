"""Tasks: the first error is everybody's, and none outlives the block."""

from __future__ import annotations

import asyncio

import pytest

from mopd.base.tasks import Tasks, ended_on_error


def test_an_error_of_one_ends_what_is_waited_for_and_all_others() -> None:
    ended: list[str] = []

    async def endless(name: str) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(name)

    async def fail() -> None:
        await asyncio.sleep(0.01)
        raise ValueError("the first")

    async def main() -> None:
        async with Tasks() as tasks:
            tasks.start(endless("beside"))
            tasks.start(fail())
            await tasks.unless_failed(endless("waited for"))

    with pytest.raises(ValueError, match="the first"):
        asyncio.run(main())
    assert sorted(ended) == ["beside", "waited for"]


def test_work_that_ends_well_is_returned_and_an_earlier_error_is_raised_first() -> None:
    async def value() -> int:
        return 5

    async def fail() -> None:
        raise ValueError("before")

    async def main() -> None:
        async with Tasks() as tasks:
            assert await tasks.unless_failed(value()) == 5
            assert await tasks.start(value()) == 5
            tasks.start(fail())
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            with pytest.raises(ValueError, match="before"):
                await tasks.unless_failed(value())

    asyncio.run(main())


@pytest.mark.parametrize("end_fails", [False, True])
def test_the_error_of_a_block_stays_the_first_whatever_its_end_raises(
    end_fails: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    ended: list[str] = []

    async def end() -> None:
        ended.append("once")
        if end_fails:
            raise OSError("cannot be ended")

    async def main(fails: bool) -> None:
        async with ended_on_error(end):
            if fails:
                raise ValueError("the first")

    asyncio.run(main(False))
    assert not ended
    with pytest.raises(ValueError, match="the first"):
        asyncio.run(main(True))
    assert ended == ["once"] and ("OSError: cannot be ended" in capfd.readouterr().err) == end_fails
