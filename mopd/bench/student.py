"""``mopd bench student``: a student step beside plain PyTorch, packed sequences beside padded ones; with ``--size`` a
published model's sizes on a GPU, beside transformers' own model.

Contenders step in turns in one process on the same samples, and must compute the same loss and gradient norm.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence

from mopd.base.files.temporary import TemporaryFolder
from mopd.base.types import UserError
from mopd.bench.clock import peak_bytes
from mopd.bench.harness import BenchReport, Comparison, Goals, Others, at_least, at_most, ratio, rows, say, timed
from mopd.bench.models import DOMAIN, SEED, TOY, Dtype, Samples, make_recipe, make_samples, size_on_gpu, write_model
from mopd.conversion.hf.pretrained import load_weights
from mopd.conversion.models.reading import read_dims
from mopd.data.packing import pack
from mopd.planning.devices import GPUS
from mopd.planning.stages import forward_flops
from mopd.student import parallel
from mopd.student.worker import StudentWorker

MOST_OF_PLAIN = 1.3
"""Largest allowed time of the student's step, relative to plain PyTorch's."""
LEAST_PACKED = 1.8
"""Least rate of packed samples, relative to padded ones' tokens a second."""
LEAST_SHARE, LEAST_SPEED_UP = 0.40, 1.5
"""Goals at a published size: share of a GPU's bf16 peak, and speed-up over transformers' model."""
NUM_THREADS = 2
MIXED_ROUNDS, MIXED_SAMPLES, QUICK_SAMPLES = 3, 24, 8
SHORTEST, LONGEST = 64, 4096
MAX_TOKENS = 8192
"""Largest number of tokens of a micro-batch of mixed lengths."""
SAMPLES_AS_DRAWN = 4
"""Number of samples of a right-padded micro-batch whose samples are not sorted by length."""
SIZED_LENGTHS = [(512, 1536)] * 8
"""(prompt, response) of a step at a published size: 16,384 tokens."""
SIZED_PER_FORWARD, SIZED_ROUNDS = 4, 5
SAME = {"float32": 1e-4, "bfloat16": 2e-2}
"""Largest relative difference of losses and gradient norms of two ways: sums come in another order in fp32; bf16 keeps
8 bits, and two programs differ by some of its roundings, 0.4 % each."""
COLUMNS = {"s": "median_s:.3f", "tokens/s": "tokens_per_s:,.0f", "x base": "ratio:.2f"}

Step = Callable[[], tuple[float, float]]
"""One optimizer step; returns the loss, and the gradient's norm before clipping."""
Makers = Mapping[str, Callable[[], Step]]
"""Functions that make the contenders, by name."""


def run(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Measure and print. Return the exit code.

    Raises:
        UserError: an impossible option.
        RuntimeError: contenders do not compute the same.
    """
    if args.rounds < 1:
        raise UserError(f"--rounds is {args.rounds}: set 1 or more")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report, others = BenchReport(benchmark="student", arguments=arguments, as_json=args.json, device=device), Others()
    if args.size is not None:
        options: dict[str, Any] = {"dtype": "bfloat16", "per_forward": SIZED_PER_FORWARD, "count": SIZED_ROUNDS}
        report.add(*measure_size(args.size, size_on_gpu(args.size), SIZED_LENGTHS, **options))
    else:
        say("student: a step beside plain PyTorch")
        report.add(*measure_toy(args.rounds))
        say("student: packed and padded sequences")
        num, count = (QUICK_SAMPLES, 1) if args.quick else (MIXED_SAMPLES, MIXED_ROUNDS)
        report.add(*measure_mixed(count, num))
    report.others_cores = others.cores()
    return report.finish()


def measure_toy(count: int) -> tuple[Comparison, Goals]:
    """Time a step of the quickstart's student on 96 samples of its kind, packed and padded, and in plain PyTorch."""
    with scratch_model(TOY, longest=128) as (folder, device):
        samples = make_samples(toy_lengths(), vocab_size=TOY["vocab_size"])
        own = partial(student_step, folder, samples, longest=128)
        plain = partial(PlainStep, folder, samples, device)
        makers: Makers = {"student": own, "student, padded": partial(own, packing=False), "plain PyTorch": plain}
        seconds, _ = contest(makers, device, count)
    goal = at_most(ratio(seconds, "student", "plain PyTorch"), MOST_OF_PLAIN)
    return part("toy", samples, seconds, "plain PyTorch"), {"student_over_plain": goal}


def measure_mixed(count: int, num_samples: int) -> tuple[Comparison, Goals]:
    """Time the same student on log-normal lengths: packed, in rectangles of similar lengths, in rectangles as drawn."""
    with scratch_model(TOY, longest=LONGEST) as (folder, device):
        samples = make_samples(mixed_lengths(num_samples), vocab_size=TOY["vocab_size"])
        packed = partial(student_step, folder, samples, longest=LONGEST, max_tokens_per_micro_batch=MAX_TOKENS)
        makers = {
            "packed": packed,
            "padded, sorted by length": partial(packed, packing=False),
            "padded, as drawn": partial(packed, packing=False, micro_batch_size=SAMPLES_AS_DRAWN),
        }
        seconds, _ = contest(makers, device, count)
    goal = at_least(ratio(seconds, "padded, as drawn", "packed"), LEAST_PACKED)
    return part("mixed lengths", samples, seconds, "packed"), {"packed_over_padded": goal}


def measure_size(
    name: str, shape: Mapping[str, Any], lengths: Sequence[tuple[int, int]], dtype: Dtype, per_forward: int, count: int
) -> tuple[Comparison, Goals]:
    """Time a student of any shape beside transformers' own model on the same samples: tokens a second, share of the
    GPU's peak, memory. ``per_forward`` samples make a micro-batch. In bf16 the student keeps fp32 weights and gradients
    beside, the other does not."""
    longest = max(map(sum, lengths))
    with scratch_model(shape, longest=longest, dtype=dtype) as (folder, device):
        samples = make_samples(lengths, vocab_size=shape["vocab_size"])
        keys: dict[str, Any] = {"dtype": dtype, "max_tokens_per_micro_batch": per_forward * longest}
        makers: Makers = {
            "student": partial(student_step, folder, samples, longest=longest, **keys),
            "transformers": partial(PlainStep, folder, samples, device, dtype=dtype, per_forward=per_forward),
        }
        dims = read_dims(folder)
        seconds, peaks = contest(makers, device, count, same=SAME[dtype])
    context, num_rows = samples.num_tokens / len(lengths) / 2, sum(response for _, response in lengths)
    flops = 3 * forward_flops(dims, tokens=samples.num_tokens, context=context, rows=num_rows)
    machine = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    peak = next((gpu.flops for key, gpu in GPUS.items() if key in machine.lower()), math.nan)
    found = part(f"{name} on {machine}", samples, seconds, "transformers")
    found.columns = {**COLUMNS, "of the peak": "share_of_peak:.1%", "GiB": "peak_gib:.1f"}
    for row in found.rows:
        row |= {"share_of_peak": flops / row["median_s"] / peak, "peak_gib": peaks.get(row["name"])}
    goals = {"share_of_peak": at_least(found.rows[0]["share_of_peak"], LEAST_SHARE)}
    goals["speed_up"] = at_least(ratio(seconds, "transformers", "student"), LEAST_SPEED_UP)
    return found, goals


def part(title: str, samples: Samples, seconds: Mapping[str, Sequence[float]], base: str) -> Comparison:
    """Make the table of steps on the same samples."""
    num = samples.num_tokens
    made = rows(seconds, base, lambda name, median_s: {"tokens_per_s": num / median_s})
    remarks = [f"{num:,} tokens a step; x base: time relative to {base!r}"]
    return Comparison(title=title, columns=COLUMNS, rows=made, facts={"num_tokens": num, "base": base}, remarks=remarks)


def toy_lengths(num: int = 96) -> list[tuple[int, int]]:
    """Draw (prompt, response) lengths like the quickstart's: a question of 3 to 8 letters and its answer."""
    generator = torch.Generator().manual_seed(SEED)
    letters = torch.randint(3, 9, (num,), generator=generator).tolist()
    words = torch.randint(6, 10, (num,), generator=generator).tolist()  # the task's name, marks
    return [(word + letter, letter + 1) for word, letter in zip(words, letters, strict=True)]


def mixed_lengths(num: int) -> list[tuple[int, int]]:
    """Draw (prompt, response) lengths, log-normal in sum, a quarter of each the prompt. The median is the geometric
    mean of ``SHORTEST`` and ``LONGEST``, which lie two deviations off it."""
    generator = torch.Generator().manual_seed(SEED)
    bounds = torch.tensor([float(SHORTEST), float(LONGEST)]).log()
    drawn = bounds.mean() + (bounds[1] - bounds[0]) / 4 * torch.randn(num, generator=generator)
    lengths = drawn.exp().round().clamp(SHORTEST, LONGEST).long().tolist()
    return [(length // 4, length - length // 4) for length in lengths]


@contextmanager
def scratch_model(
    shape: Mapping[str, Any], *, longest: int, dtype: Dtype = "float32"
) -> Iterator[tuple[Path, torch.device]]:
    """Yield the folder of a random model and the student's device, with ``NUM_THREADS`` threads; a process group that
    the block has started is destroyed."""
    threads = torch.get_num_threads()
    torch.set_num_threads(NUM_THREADS)
    try:
        with TemporaryFolder("mopd-bench-") as folder:
            write_model(Path(folder), shape, longest=longest, dtype=dtype)
            yield Path(folder), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    finally:
        torch.set_num_threads(threads)
        if dist.is_initialized():
            parallel.destroy()
            dist.destroy_process_group()


def student_step(folder: Path, samples: Samples, *, longest: int, **student: Any) -> Step:
    """Return an optimizer step of the student of ``folder``; ``student`` are further keys of its section."""
    worker = StudentWorker(make_recipe(folder, longest=longest, **student), samples.plane().reader(), [DOMAIN])
    plan = pack(list(samples.metas), worker.packing, dp_size=1)

    def step() -> tuple[float, float]:
        sums = worker.forward_backward(plan, diagnostics=False)
        return sums[DOMAIN].sums["weighted_loss"], worker.optim_step()["grad_norm"]

    return step


def contest(
    makers: Makers, device: torch.device, count: int, *, same: float = SAME["float32"]
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Make the contenders, take a step of each that is not timed and ``count`` that are.

    Returns:
        Seconds; on CUDA GiB of each one's weights, gradients and optimizer states with the most that a step adds.

    Raises:
        RuntimeError: they do not compute the same.
    """
    steps, results, peaks = {}, {}, {}
    for name, make in makers.items():
        before = _allocated(device)
        steps[name] = make()
        results[name] = steps[name]()
        if device.type == "cuda":
            peaks[name] = (_allocated(device) - before + peak_bytes(steps[name], device)) / 2**30
    first = next(iter(results.values()))
    for name, result in results.items():
        if not all(math.isclose(a, b, rel_tol=same) for a, b in zip(result, first, strict=True)):
            raise RuntimeError(f"{name} has (loss, gradient norm) {result} where others have {first}")
    return timed(steps, count), peaks


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


class PlainStep:
    """Training step in plain PyTorch: forward KL on the teacher's top k and the rest as one outcome, mean over response
    tokens; clipping; Adam.

    ``per_forward`` samples pass the model at a time. Weights, gradients and Adam's states are of ``dtype``; the loss is
    computed in fp32.
    """

    def __init__(
        self, folder: Path, samples: Samples, device: torch.device, dtype: Dtype = "float32", per_forward: int = 10_000
    ) -> None:
        student = make_recipe(folder, longest=2).student
        cfg = student.optimizer
        self.model, _ = load_weights(folder, getattr(torch, dtype))
        self.model.train().to(device)
        self._samples, self._device, self._per_forward, self._clip_grad = samples, device, per_forward, cfg.clip_grad
        adam: dict[str, Any] = {"betas": (cfg.adam_beta1, cfg.adam_beta2), "eps": cfg.adam_eps}
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), student.peak_lr, weight_decay=cfg.weight_decay, **adam
        )

    def __call__(self) -> tuple[float, float]:
        """Take one optimizer step. Return the loss, and the gradient's norm before clipping."""
        self._optimizer.zero_grad()
        num_rows = sum(meta.response_length for meta in self._samples.metas)
        total = torch.zeros((), device=self._device)
        for start in range(0, len(self._samples.metas), self._per_forward):
            loss = self._losses(slice(start, start + self._per_forward)).sum() / num_rows
            loss.backward()
            total += loss.detach()
        norm = clip_grad_norm_(self.model.parameters(), self._clip_grad)
        self._optimizer.step()
        return total.item(), norm.item()

    def _losses(self, part: slice) -> Tensor:
        """Return the losses of the part's response tokens, ``[R]``."""
        fields = {name: tensors[part] for name, tensors in self._samples.fields.items()}
        tokens = pad_sequence(fields["tokens"], batch_first=True)
        rows = [  # flat numbers of those that score a response token
            torch.arange(meta.prompt_length - 1, meta.length - 1) + b * tokens.size(1)
            for b, meta in enumerate(self._samples.metas[part])
        ]
        made = (tokens, *map(torch.cat, (rows, fields["teacher_ids"], fields["teacher_logprobs"])))
        tokens, chosen, ids, teacher_logprobs = (tensor.to(self._device) for tensor in made)
        # Right padding and a causal model: no mask is needed.
        logits = self.model(input_ids=tokens, use_cache=False).logits
        logprobs = torch.log_softmax(logits.flatten(0, 1)[chosen], -1, dtype=torch.float32).gather(1, ids.long())
        probs, kept = teacher_logprobs.exp(), logprobs.exp()
        rest, own_rest = 1 - probs.sum(1), 1 - kept.sum(1)
        return (probs * (teacher_logprobs - logprobs)).sum(1) + rest * (rest / own_rest).log()
