"""Health of this node's GPUs before a job: each multiplies matrices, has its memory free, and has lost no bit."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping

import torch

from mopd.base.hardware import QUERY_TIMEOUT_S
from mopd.base.text import first_line

SIZE = 4096
"""Rows and columns of the product; each element is ``2 * SIZE``, which bfloat16 holds exactly."""
MIN_FREE = 0.9
"""Share of a GPU's memory that must be free: other processes' leave too little for what was planned."""
COUNTERS = {
    "ecc.errors.uncorrected.volatile.total": "uncorrected memory errors since the driver was loaded",
    "remapped_rows.pending": "rows of its memory wait for a reset to be remapped",
    "remapped_rows.failure": "rows of its memory could not be remapped",
}
"""nvidia-smi's name -> meaning; those that it does not tell of (``[N/A]``) are passed over."""

CURE = "reset it (nvidia-smi -r), or leave this node out"


def gpu_problems(query: Callable[[], str] | None = None) -> Iterator[str]:
    """Yield a line for each GPU that this process sees and that is not well. ``query`` gives the counters."""
    ids = {}
    for number in range(torch.cuda.device_count()):
        try:
            ids[str(torch.cuda.get_device_properties(number).uuid)] = number
            yield from _tried(number)
        except RuntimeError as error:  # CUDA's, of a GPU that has fallen off the bus or that another process blocks
            yield f"GPU {number}: {first_line(error)}: {CURE}"
    if ids:
        yield from counted(_query() if query is None else query(), ids)


def _tried(number: int) -> Iterator[str]:
    device = torch.device("cuda", number)
    free, total = torch.cuda.mem_get_info(device)
    if free < MIN_FREE * total:
        yield (
            f"GPU {number}: {free / 2**30:.1f} of {total / 2**30:.1f} GiB are free: end what else runs there "
            "(nvidia-smi lists it)"
        )
    product = torch.full((SIZE, SIZE), 2.0, dtype=torch.bfloat16, device=device) @ torch.ones(
        (SIZE, SIZE), dtype=torch.bfloat16, device=device
    )
    wrong = int((product != 2 * SIZE).sum())
    if wrong:
        yield f"GPU {number}: {wrong} of {SIZE**2} elements of a product are wrong: leave this node out"


def counted(text: str, ids: Mapping[str, int]) -> Iterator[str]:
    """Yield a line for each counter above 0 in nvidia-smi's answer, of the GPUs ``ids``: UUID -> number."""
    for line in text.splitlines():
        uuid, *values = (part.strip() for part in line.split(","))
        number = ids.get(uuid.removeprefix("GPU-"))
        for name, value in zip(COUNTERS, values, strict=False) if number is not None else ():
            if re.fullmatch("[1-9][0-9]*|Yes", value):
                yield f"GPU {number}: {COUNTERS[name]} ({name} {value}): {CURE}"


def _query() -> str:
    if shutil.which("nvidia-smi") is None:
        return ""
    command = ["nvidia-smi", f"--query-gpu=uuid,{','.join(COUNTERS)}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, stdin=subprocess.DEVNULL)
    return done.stdout if done.returncode == 0 else ""
