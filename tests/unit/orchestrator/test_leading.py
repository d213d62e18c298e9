"""The orchestrator's event loop: what no task would see ends the run too."""

from __future__ import annotations

import asyncio

import pytest

from mopd.base.tasks import Tasks
from mopd.orchestrator.leading import error_of_a_callback


def test_an_error_of_a_callback_ends_what_waits_for_its_work() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with Tasks() as tasks:
            tasks.start(error_of_a_callback())
            loop.call_later(0.01, {}.__getitem__, "nothing")
            await tasks.unless_failed(asyncio.wait_for(loop.create_future(), 60))

    with pytest.raises(KeyError, match="nothing"):
        asyncio.run(main())


def test_what_asyncio_says_otherwise_is_logged_as_before(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> str:
        loop = asyncio.get_running_loop()
        async with Tasks() as tasks:
            tasks.start(error_of_a_callback())
            await asyncio.sleep(0)
            loop.call_exception_handler({"message": "a socket was not closed"})
            return await tasks.unless_failed(asyncio.sleep(0, "done"))

    assert asyncio.run(main()) == "done"
    assert "a socket was not closed" in caplog.text
