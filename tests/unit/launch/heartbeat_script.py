"""Ranks for the heartbeat's tests: ``python heartbeat_script.py BEHAVIOUR TIMEOUT_S``. Prints what a rank heard."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
import time
from datetime import timedelta

import torch.distributed as dist

from mopd.base.types import UserError
from mopd.launch import heartbeat
from mopd.launch.heartbeat import LeaderWatch, beating
from mopd.launch.ranks import CommandChannel

behaviour, timeout_s = sys.argv[1], float(sys.argv[2])
LONG_S = 2.5 * timeout_s


def join(leader: LeaderWatch | None = None) -> CommandChannel:
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", timeout=timeout)
    return CommandChannel(dist.new_group(backend="gloo", timeout=timeout), leader)


def held_in_a_library() -> None:
    """Keep the interpreter from all threads; the test ends it."""
    ctypes.PyDLL(None).sleep(600)


def lead() -> None:
    if behaviour == "late":
        time.sleep(LONG_S)
    heartbeat.announce()
    channel = join()
    channel.send({"call": "one"})
    if behaviour in ("waits", "held"):
        time.sleep(LONG_S) if behaviour == "waits" else held_in_a_library()
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


with beating(timeout_s):
    lead() if os.environ["RANK"] == "0" else follow()
sys.stdout.flush()
os._exit(0)
