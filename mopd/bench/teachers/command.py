"""``mopd bench teachers``: the path from teachers to tensors. Throughput, payload, decoding, sharing of work."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
from importlib.util import find_spec
from typing import Any

from rich.table import Table

from mopd.bench.teachers.makespan import Makespan, measure_makespan
from mopd.bench.teachers.path import MIN_PAIRS, Decode, EngineType, Throughput, measure_decode, measure_throughput
from mopd.report.terminal import Terminal
from mopd.types import UserError


def run(args: argparse.Namespace) -> int:
    """Measure, print, and return 0 if every goal is met, else 1.

    Raises:
        UserError: an impossible option, or an engine that does not start.
    """
    for name, value in (("--pairs", args.pairs), ("--sequences", args.sequences), ("--top-k", args.top_k)):
        if value < 1:
            raise UserError(f"{name} is {value}: set 1 or more")
    if args.size is not None:
        return _full_size(args)
    engine: EngineType = args.engine
    if engine == "vllm" and find_spec("vllm") is None:
        raise UserError("bench teachers: vllm is not installed: install it (README.md, Install) or set --engine torch")
    throughput = asyncio.run(
        measure_throughput(
            engine,
            num_pairs=args.pairs,
            num_sequences=args.sequences,
            top_k=args.top_k,
            progress=lambda text: print(text, file=sys.stderr, flush=True),
        )
    )
    decode, makespan = measure_decode(args.top_k), measure_makespan()
    if args.json:
        print(json.dumps(report(throughput, decode, makespan), indent=2))
    else:
        show(throughput, decode, makespan)
    return 0 if throughput.is_met and decode.is_met and makespan.is_met else 1


def _full_size(args: argparse.Namespace) -> int:
    """``--size``: the torch engine on a GPU beside a forward pass, which has no goal."""
    from mopd.bench.teachers.full_size import measure_full_size

    scored = measure_full_size(args.size, top_k=args.top_k)
    found = scored.tree()
    if args.json:
        print(json.dumps(found, indent=2))
        return 0
    table = Table(f"{scored.size} on {scored.device}: {scored.num_tokens:,} tokens, K = {scored.top_k}", "tokens/s")
    table.add_row("torch engine, scores", f"{found['engine_tokens_per_s']:,.0f}")
    table.add_row("forward pass, logits", f"{found['forward_tokens_per_s']:,.0f}")
    Terminal().print(table, f"The engine has {scored.ratio:.0%} of the forward pass's throughput.")
    return 0


def report(throughput: Throughput, decode: Decode, makespan: Makespan) -> dict[str, Any]:
    """What ``--json`` prints."""
    return {
        "throughput": {
            **dataclasses.asdict(throughput),
            "ratios": throughput.ratios,
            "median_ratio": throughput.median_ratio,
            "payload_goal": throughput.payload_goal,
            "is_met": throughput.is_met,
            "is_enough_pairs": len(throughput.ratios) >= MIN_PAIRS,
        },
        "decode": {**dataclasses.asdict(decode), "speedup": decode.speedup, "is_met": decode.is_met},
        "makespan": {**dataclasses.asdict(makespan), "is_met": makespan.is_met},
    }


def show(throughput: Throughput, decode: Decode, makespan: Makespan) -> None:
    """The same as a table."""
    rate = [throughput.num_tokens / min(times) for times in (throughput.bare_s, throughput.path_s)]
    table = Table("what", "measured", "goal")
    table.add_row(
        f"throughput: router + HTTP + {throughput.engine}, relative to the bare engine",
        f"{throughput.median_ratio:.3f} (median of {len(throughput.ratios)} pairs, "
        f"{min(throughput.ratios):.3f} to {max(throughput.ratios):.3f})",
        f">= {throughput.throughput_goal}",
    )
    table.add_row("tokens/s, bare and path, best", f"{rate[0]:,.0f} and {rate[1]:,.0f}", "")
    table.add_row(
        f"payload: bytes per scored token at K = {throughput.top_k}, fp32",
        f"{throughput.answer_bytes_per_row:.1f}",
        f"<= {throughput.payload_goal}",
    )
    table.add_row("payload: share of the prompts", f"{throughput.prompt_bytes_share:g}", "0")
    table.add_row(
        f"decoding {decode.rows:,} rows into tensors, beside nested lists",
        f"{decode.speedup:.0f}x ({1000 * decode.binary_s:.2f} ms, {1000 * decode.lists_s:.1f} ms; "
        f"with JSON {1000 * decode.json_s:.0f} ms)",
        f">= {decode.goal:g}x",
    )
    table.add_row(
        f"makespan over {makespan.num_replicas} replicas over the ideal, worst of {makespan.num_batches} batches",
        f"{makespan.token_aware_worst:.3f} (by count: {makespan.count_based_worst:.3f})",
        f"<= {makespan.goal}",
    )
    others = throughput.others_cores
    console = Terminal()
    console.print(table)
    console.print(
        f"model of {throughput.num_weights / 1e6:.0f} M weights, {throughput.num_sequences} sequences, "
        f"{throughput.num_tokens:,} tokens, {throughput.num_rows:,} scored"
        + ("" if others is None else f"; other processes kept {others:.1f} cores busy meanwhile"),
        highlight=False,
    )
