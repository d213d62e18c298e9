"""``mopd bench``: the losses beside what else there is, the path from teachers to tensors beside the bare engine, the
data planes beside each other, the pipeline beside its slowest stage, the student beside plain PyTorch, weights on their
way to engines beside a bare broadcast."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from mopd.bench.losses.cases import add_arguments as add_losses_arguments
from mopd.launch.failure import ignore_library_warnings

ABOUT = "measure a part of mopd"
EXAMPLES = """\
examples:
  mopd bench                           the benches, with a line each
  mopd bench losses --quick            a few telling shapes
  mopd bench teachers --engine torch   without vLLM
  mopd bench data_plane --quick        some seconds
  mopd bench pipeline                  four scenarios, at several values of max_staleness: some minutes
  mopd bench pipeline --quick          one of them, shorter, at 0 and 2: some ten seconds
  mopd bench student --quick           fewer samples and rounds
  mopd bench weights --mb 500 --replicas 1
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Light to import, as all of this file; ``args.what`` names the chosen part, None for a list of all."""
    parts = parser.add_subparsers(metavar="WHAT", dest="what")
    parser.set_defaults(list_parts=parser.print_help)
    text = "time, memory and error of the losses beside others"
    add_losses_arguments(parts.add_parser("losses", help=text, description=text))
    text = "throughput and bytes of the path from teachers to tensors, by payload; exit code 1 below a goal"
    add = parts.add_parser("teachers", help=text, description=text).add_argument
    add("--engine", choices=("vllm", "torch"), default="vllm", help="engine on both sides (default: %(default)s)")
    add("--pairs", type=int, default=7, metavar="N", help="timed rounds, bare and each payload (default: %(default)s)")
    add("--sequences", type=int, default=64, metavar="N", help="sequences of the batch (default: %(default)s)")
    add("--top-k", type=int, default=64, metavar="K", help="scores per token (default: %(default)s)")
    add("--size", metavar="NAME", help="instead: qwen3-1.7b, random weights, beside a bare forward pass; on a GPU")
    rank = "instead: two adapters of this rank on one server, beside two servers of merged folders"
    add("--adapter-rank", type=int, metavar="R", help=rank)
    add("--json", action="store_true", help="print JSON instead of a table")
    text = "seconds of a step through each data plane"
    add = parts.add_parser("data_plane", help=text, description=text).add_argument
    add("--quick", action="store_true", help="8 and 32 MiB a step instead of 64 and 1024")
    add("--rounds", type=int, default=3, metavar="N", help="rounds of all contenders (default: %(default)s)")
    add("--json", action="store_true", help="print JSON instead of tables")

    text = "step times of the controller beside what bounds them, with stages that sleep; exit code 1 below a goal"
    add = parts.add_parser("pipeline", help=text, description=text).add_argument
    add("--quick", action="store_true", help="shorter stages and fewer steps: noisier")
    add("--json", action="store_true", help="print JSON instead of tables")

    text = "a student step beside plain PyTorch, packed sequences beside padded ones; exit code 1 below a goal"
    add = parts.add_parser("student", help=text, description=text).add_argument
    add("--quick", action="store_true", help="fewer samples and rounds of mixed lengths: noisier")
    add("--rounds", type=int, default=21, metavar="N", help="timed pairs of the toy step (default: %(default)s)")
    add("--size", metavar="NAME", help="instead: qwen3-1.7b, random weights, beside transformers' own model; on a GPU")
    add("--json", action="store_true", help="print JSON instead of tables")

    text = "an update of the rollout's weights by one way, by HTTP and as a bare broadcast; exit code 1 below a goal"
    add = parts.add_parser("weights", help=text, description=text).add_argument
    add("--mb", type=int, nargs="+", default=[500, 2000], metavar="N", help="sizes of students (default: 500 2000)")
    add("--replicas", type=int, nargs="+", default=[1, 3], metavar="N", help="numbers of engines (default: 1 3)")
    add("--way", choices=("collective", "ipc"), default="collective", help="weight_sync.type (default: %(default)s)")
    add("--bucket-mib", type=int, default=64, metavar="N", help="weight_sync.bucket_mib (default: %(default)s)")
    rank = "also: an update of an adapter of this rank alone, beside the whole model's, on CPUs"
    add("--rank", type=int, metavar="R", help=rank)
    link = "instead: student and engines in two networks, joined by a link of this rate; as root, with ip and tc"
    add("--link", type=int, metavar="MBIT", help=link)
    add("--rounds", type=int, default=3, metavar="N", help="rounds of all ways (default: %(default)s)")
    add("--json", action="store_true", help="print JSON instead of tables")


def run(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Measure; the exit code."""
    if args.what is None:
        args.list_parts()
        return 0
    ignore_library_warnings()
    if args.what == "losses":
        from mopd.bench.losses.command import run as measure
    elif args.what == "teachers":
        from mopd.bench.teachers import run as measure
    elif args.what == "data_plane":
        from mopd.bench.data_plane import run as measure
    elif args.what == "pipeline":
        from mopd.bench.pipeline import run as measure
    elif args.what == "student":
        from mopd.bench.student import run as measure
    else:
        from mopd.bench.weights import run as measure
    return measure(args, ["mopd", *arguments])
