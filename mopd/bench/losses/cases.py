"""Shapes that a run of the benchmark measures, in order. Light to import: no torch.

Shape legend: T rows (tokens), V vocabulary, K ids of a row, H hidden width.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mopd.base.types import UserError

HEADLINE_VOCAB, HEADLINE_K = 151_936, 64
VOCABS = (HEADLINE_VOCAB, 32_000, 128_256)
KS = (HEADLINE_K, 128, 512)
ROWS = {"cuda": (8192, 1024, 32_768), "cpu": (512, 128)}
"""Rows of the default grid, the most telling first: a run that a time limit cuts off has measured what matters."""
QUICK = {
    "cuda": ((8192, 151_936, 64), (1024, 151_936, 64), (8192, 32_000, 512), (32_768, 128_256, 128)),
    "cpu": ((512, 151_936, 64), (128, 32_000, 64)),
}
HEADS = {"cuda": ((8192, HEADLINE_VOCAB, HEADLINE_K, 4096),), "cpu": ((512, 32_000, HEADLINE_K, 256),)}
REPEATS = {"cuda": 20, "cpu": 5}
DTYPE = {"cuda": "bfloat16", "cpu": "float32"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One problem on logits. Example: ``Case(rows=512, vocab=151936, k=64, dtype="float32")``."""

    rows: int
    vocab: int
    k: int
    dtype: str
    tp_shard: int = 1
    """Number of vocabulary shards, of which one is measured without its collective."""
    hidden: int | None = None
    """Width of the hidden states; set for the problems that begin before the LM head."""

    @property
    def columns(self) -> int:
        """Number of columns of the logits: the vocabulary, or the largest of N shards."""
        return -(-self.vocab // self.tp_shard)

    @property
    def title(self) -> str:
        """Describe the case in one line."""
        text = f"T={self.rows} V={self.vocab} K={self.k} {self.dtype}"
        if self.hidden is not None:
            text += f" H={self.hidden}"
        if self.tp_shard > 1:
            text += f", one of {self.tp_shard} shards ({self.columns} columns), collective left out"
        return text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``mopd bench losses``."""
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    add("--shapes", nargs="+", metavar="T,V,K", help="rows, vocabulary, ids a row; default: a grid, headline first")
    add("--heads", nargs="+", metavar="T,V,K,H", help="shapes with an LM head of width H before the loss")
    add(
        "--tp-shard",
        nargs="+",
        type=int,
        default=[1],
        metavar="N",
        help="measure one of N vocabulary shards (default: 1)",
    )
    add("--quick", action="store_true", help="a few telling shapes instead of the grid")
    add("--repeats", type=int, metavar="N", help="timed rounds; default: 20 on cuda, 5 on cpu")
    add("--time-limit", type=float, metavar="SECONDS", help="stop after this time and keep what is measured")
    add("--tune", action="store_true", help="first tune the Triton kernels for these shapes and store the table")
    add("--json", action="store_true", help="print JSON instead of tables")
    add("--output", type=Path, metavar="FILE", help="also write the JSON here, after every shape")


def make_cases(args: argparse.Namespace, *, device: str) -> list[Case]:
    """Check the options. Either list of shapes given means that only the named ones are measured.

    Raises:
        UserError: a malformed or impossible value.
    """
    for name, value in (("--repeats", args.repeats), *(("--tp-shard", n) for n in args.tp_shard)):
        if value is not None and value < 1:
            raise UserError(f"{name} is {value}: set 1 or more")
    if args.time_limit is not None and not args.time_limit > 0:
        raise UserError(f"--time-limit is {args.time_limit}: set seconds above 0")
    if args.output is not None and not args.output.parent.is_dir():
        raise UserError(f"--output: folder {str(args.output.parent)!r} does not exist: make it")
    cases = _cases(args, device)
    for case in cases:
        if case.k > case.columns:
            raise UserError(f"--shapes: K={case.k} exceeds the {case.columns} columns of a shard: set K lower")
    return cases


def _cases(args: argparse.Namespace, device: str) -> list[Case]:
    shapes: Iterable[tuple[int, ...]] = [_numbers("--shapes", text, 3) for text in args.shapes or ()]
    heads: Iterable[tuple[int, ...]] = [_numbers("--heads", text, 4) for text in args.heads or ()]
    if args.shapes is None and args.heads is None:
        shapes = QUICK[device] if args.quick else itertools.product(ROWS[device], VOCABS, KS)
        heads = HEADS[device]
    shards, dtype = dict.fromkeys(args.tp_shard), DTYPE[device]
    logits = [Case(rows=t, vocab=v, k=k, dtype=dtype, tp_shard=n) for t, v, k in shapes for n in shards]
    heads_of = [Case(rows=t, vocab=v, k=k, hidden=h, dtype=dtype) for t, v, k, h in heads]
    first = len(shards)  # the headline at every shard count, then the LM heads, then the rest
    return logits[:first] + heads_of + logits[first:]


def _numbers(name: str, text: str, count: int) -> tuple[int, ...]:
    parts = text.split(",")
    if len(parts) != count or not all(part.isdigit() and int(part) > 0 for part in parts):
        form = ("T,V,K", "512,151936,64") if count == 3 else ("T,V,K,H", "512,151936,64,256")
        raise UserError(f"{name}: {text!r} is not {form[0]}: write {count} numbers above 0, as {form[1]}")
    return tuple(int(part) for part in parts)
