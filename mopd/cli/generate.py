"""``mopd generate``: what a student answers, to look at it."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from mopd.base.text import json_lines, visible
from mopd.base.types import UserError

if TYPE_CHECKING:
    from mopd.orchestrator.tasks.generation import Answer

ABOUT = "sample from a Hugging Face model, a run or a checkpoint"
EXAMPLES = """\
examples:
  mopd generate runs/quickstart "sort cab" --samples 4
  mopd generate runs/mine/checkpoints/step_00000100 "What is 12 x 12?" --samples 4 --temperature 0.7
  mopd generate models/student - --raw < prompt.txt
  mopd generate runs/tools "sum 123 4567" --environment
  mopd generate runs/vision "<image>Which letters?" --image one.png
"""
STDIN = "-"
MAX_PROMPTS = MAX_SAMPLES = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Light to import, as all of this file."""
    add = parser.add_argument
    about = "Hugging Face folder or name on the Hub, run folder (its export), checkpoint folder"
    add("model", metavar="MODEL", help=about)
    add("prompts", nargs="+", metavar="PROMPT", help="text of a user's message; - reads it from standard input")
    about = "for the next <image> of the prompts, in order; once for each"
    add("--image", dest="images", action="append", default=[], metavar="FILE", help=about)
    about = "play each prompt in the environment of the run's recipe; what was given stands behind |"
    add("--environment", action="store_true", help=about)
    add("--raw", action="store_true", help="continue the text as it is, without the chat template")
    add("--samples", type=int, default=1, metavar="N", help="responses to each prompt (default: %(default)s)")
    add("--temperature", type=float, default=1.0, metavar="T", help="0 is greedy (default: %(default)s)")
    about = "longest response (default: 256, or what the model has room for)"
    add("--max-new-tokens", type=int, metavar="N", help=about)
    add("--seed", type=int, default=0, metavar="N", help="of the sampling (default: %(default)s)")
    add("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Sample and print; the exit code.

    Raises:
        UserError: an impossible option, or a model or prompt that cannot be used.
    """
    _check(args)
    prompts = [sys.stdin.read().removesuffix("\n") if prompt == STDIN else prompt for prompt in args.prompts]
    from mopd.orchestrator.tasks.generation import generate

    answers = generate(
        args.model,
        prompts,
        images=args.images,
        is_raw=args.raw,
        num_samples=args.samples,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        seed=args.seed,
        in_environment=args.environment,
    )
    if args.json:
        print(json_lines([asdict(answer) for answer in answers]))
    else:
        _print(answers, num_samples=args.samples)
    return 0


def _check(args: argparse.Namespace) -> None:
    if not 1 <= args.samples <= MAX_SAMPLES:
        raise UserError(f"--samples is {args.samples}: set 1 to {MAX_SAMPLES}")
    if args.max_new_tokens is not None and args.max_new_tokens < 1:
        raise UserError(f"--max-new-tokens is {args.max_new_tokens}: set 1 or more")
    if not (math.isfinite(args.temperature) and args.temperature >= 0):
        raise UserError(f"--temperature is {args.temperature}: set 0 (greedy) or more")
    if not 0 <= args.seed < 2**63:
        raise UserError(f"--seed is {args.seed}: set 0 or more, below 2**63")
    if args.prompts.count(STDIN) > 1:
        raise UserError("generate: - stands twice, but there is one standard input: name it once")
    if len(args.prompts) > MAX_PROMPTS:
        raise UserError(f"generate: {len(args.prompts)} prompts: name at most {MAX_PROMPTS}")


def _print(answers: Sequence[Answer], *, num_samples: int) -> None:
    """Each prompt above its responses; one response to one prompt alone, fit for a pipe."""
    for number, answer in enumerate(answers):
        summary = f"{answer.num_tokens} tokens, {answer.finish_reason}, mean log-prob {answer.mean_logprob:.3f}"
        if len(answers) == 1:
            print(_shown(answer))
            print(summary, file=sys.stderr)
            return
        if number % num_samples == 0:
            print(f"{'' if number == 0 else chr(10)}>>> {visible(answer.prompt, keep=chr(9))}")
        print(f"--- {number % num_samples + 1} of {num_samples}: {summary}")
        print(_shown(answer))


def _shown(answer: Answer) -> str:
    """Return the response; of one with segments each in a paragraph, and given ones behind a bar."""
    if not answer.segments:
        return visible(answer.response, keep="\n\t")
    paragraphs = [(one.is_given, visible(one.text.strip("\n"), keep="\n\t")) for one in answer.segments]
    return "\n".join("| " + text.replace("\n", "\n| ") if is_given else text for is_given, text in paragraphs)
