"""Owns the servers of ``teachers.left``, until it is killed: ``python parent.py RECIPE MOMENT``.

Prints a line when the moment is near (``while starting``) or there (``while ready``).
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import torch

from mopd.config.load import load_recipe
from mopd.launch.preparing import prepare
from mopd.placement.groups import Groups


async def main(file: Path, moment: str) -> None:
    recipe = prepare(load_recipe(file)).recipe
    if moment == "while starting":
        print("starting", flush=True)
    async with Groups(recipe, log_dir=None, device=torch.device("cpu"), only=["teachers.left"]):
        if moment == "while ready":
            print("ready", flush=True)
            await asyncio.sleep(300)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
