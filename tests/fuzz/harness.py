"""Mutations of valid files, thrown at the code that reads them.

A reader holds when every mutation ends in a value or in an error that a user can cure, within bounds of time and
memory. ``make test`` runs a short form; ``make fuzz`` runs ``MOPD_FUZZ_MUTATIONS`` = 10,000 of each target. A failing
mutation is named by target and number, and ``MOPD_FUZZ_ONLY=number`` runs that one alone.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Sequence
from functools import partial

from tests.fixtures.effort import MAX_UNITS, peak_bytes, processor_units, reset_peak_bytes

MAX_SECONDS = 2.0
"""Processor time of one mutation that is measured again, beside a reference: a busy machine slows both."""
MAX_MIB = 300
NUM_MUTATIONS = int(os.environ.get("MOPD_FUZZ_MUTATIONS", "100"))
ONLY = os.environ.get("MOPD_FUZZ_ONLY")

NASTY = [
    b"\x00", b"\xff\xfe", b"\x1b[2J", b"\xed\xa0\x80", b"\\ud800", b"NaN", b"Infinity", b"-1e999", b"1e999",
    b"9" * 400, b"-9223372036854775809", b"18446744073709551616", b"null", b"true", b"{}", b"[]", b'""', b"[" * 300,
    b'{"a":' * 300, b"../" * 20, b"/dev/zero", b"\r", b"\n", b"\t", b'"', b"'", b":", b",", b"]", b"}", b"%s",
    b"!!python/object:os.system", b"!!bool maybe", b"!!int ''", b"&a [*a, *a]", b"*a", b"<<: *a", b"-0",
    b"0x" + b"f" * 600, b"1_0", b"\xc3\xa9" * 50, b"A" * 70_000, b"1.7976931348623157e308", b"4294967296", b"-1", b"0",
    b"math[/hard]",
]  # fmt: skip
"""Pieces that have broken readers of text; they are also put into binary files."""


def mutate(valid: bytes, rng: random.Random) -> bytes:
    """A copy with one to four changes: bits, bytes, pieces removed, repeated, moved, cut off, or ``NASTY``."""
    data = bytearray(valid)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 4))):
        start = rng.randrange(len(data) + 1)
        stop = min(len(data), start + rng.choice((1, 1, 2, 4, 8, 32, 200)))
        kind = rng.randrange(9)
        if kind == 0 and data:
            data[start % len(data)] ^= 1 << rng.randrange(8)
        elif kind == 1 and data:
            data[start % len(data)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        elif kind == 2:
            del data[start:stop]
        elif kind == 3:
            data[start:start] = data[start:stop] * rng.choice((1, 2, 50))
        elif kind == 4:
            del data[start:]
        elif kind == 5:
            data[start:start] = rng.choice(NASTY)
        elif kind == 6:
            data[start:stop] = rng.choice(NASTY)
        elif kind == 7:
            elsewhere = rng.randrange(len(data) + 1)
            data[start:stop] = data[elsewhere : elsewhere + stop - start]
        else:
            words = bytes(data).split(b" ")
            rng.shuffle(words)
            data = bytearray(b" ".join(words))
    return bytes(data)


def fuzz(
    name: str,
    valid: Sequence[bytes],
    read: Callable[[bytes], object],
    allowed: tuple[type[Exception], ...],
    change: Callable[[bytes, random.Random], bytes] = mutate,
    *,
    num_mutations: int = NUM_MUTATIONS,
) -> None:
    """Every ``change`` of a ``valid`` content is read, or refused with one of ``allowed`` in one line, in bounds.

    The valid contents themselves must be read, or the target proves nothing.
    """
    for content in valid:
        read(content)
    problems: list[str] = []
    num_refused = 0
    for number in [int(ONLY)] if ONLY else range(num_mutations):
        rng = random.Random(f"{name} {number}")
        content = change(rng.choice(list(valid)), rng)
        before = reset_peak_bytes()
        start = time.process_time()
        try:
            with contextlib.redirect_stdout(None):
                read(content)
        except allowed as error:
            num_refused += 1
            if "\n" in str(error).strip() or not str(error).strip() or len(str(error)) > 2000:
                problems.append(f"{number}: not one readable line: {str(error)[:200]!r}")
        except (Exception, SystemExit) as error:
            problems.append(f"{number}: {type(error).__name__}: {str(error)[:200]}")
        seconds, grown_mib = time.process_time() - start, (peak_bytes() - before) / 2**20
        if seconds > MAX_SECONDS and (units := processor_units(partial(read, content))) > MAX_UNITS:
            problems.append(f"{number}: {seconds:.1f} s, {units:.0f} times the reference")
        if grown_mib > MAX_MIB:
            problems.append(f"{number}: {grown_mib:.0f} MiB")
    print(f"{name}: {num_mutations} mutations, {num_refused} refused, {len(problems)} problems")
    assert not problems, f"{name}: {len(problems)} mutations did not hold:\n" + "\n".join(problems[:20])
    assert ONLY or num_refused, f"{name}: no mutation was refused"
