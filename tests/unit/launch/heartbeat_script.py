"""Ranks for the heartbeat's tests: ``python heartbeat_script.py BEHAVIOUR TIMEOUT_S``. Prints what a rank heard."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from datetime import timedelta

import torch.distributed as dist

from mopd.launch import heartbeat
from mopd.launch.heartbeat import LeaderWatch, beating
from mopd.launch.ranks import CommandChannel
from mopd.types import UserError

behaviour, timeout_s = sys.argv[1], float(sys.argv[2])
LONG_S = 2.5 * timeout_s


def join(leader: LeaderWatch | None = None) -> CommandChannel:
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", timeout=timeout)
    return CommandChannel(dist.new_group(backend="gloo", timeout=timeout), leader)


async def block() -> None:
    time.sleep(600)  # the test ends it


def lead() -> None:
    if behaviour == "late":
        time.sleep(LONG_S)
    heartbeat.announce()
    channel = join()
    channel.send({"call": "one"})
    if behaviour in ("waits", "hung loop"):
        asyncio.run(heartbeat.tied_to(asyncio.sleep(LONG_S) if behaviour == "waits" else block()))
    elif behaviour == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif behaviour == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    channel.send({"call": "two"})


def follow() -> None:
    leader = LeaderWatch(timeout_s)
    leader.await_joining()
    channel = join(leader)
    try:
        print(channel.receive()["call"], flush=True)
        print(channel.receive()["call"], flush=True)
    except UserError as error:
        print(error)
    except RuntimeError as error:
        print(re.sub(r".*Connection (closed|reset) by peer.*", "lost", str(error), flags=re.DOTALL))


if behaviour == "hung loop" and os.environ["RANK"] == "0":
    heartbeat.LOOP_S = 0.0
with beating(timeout_s):
    lead() if os.environ["RANK"] == "0" else follow()
sys.stdout.flush()
os._exit(0)
