"""Compiles every kernel of the Triton layer for a GPU that need not be there, as the layer itself would launch them.

Run as a program, without TRITON_INTERPRET: ``python -m tests.unit.losses.compile_kernels [--folder DIR]``. Compiles a
case's kernels as they are launched first, and prints a JSON line about each: registers, spilled bytes, shared memory
as ptxas reports them, the widths of the loads and stores of global memory in bits, and of the machine code the number
of instructions, in all and in each loop.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mopd.losses.call import LossCall, VocabShard
from mopd.losses.chunked.full import FullDistill, FullLoss
from mopd.losses.sampled import TaskTerm
from mopd.losses.topk import TopKLoss
from mopd.losses.triton import coefficients, full, functions, launches, table

HOPPER = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int32: "i32",
    torch.int64: "i64",
}
OPTIONS = ("num_warps", "num_stages")


class Recorder:
    """Stands in for a kernel and notes how it is launched."""

    def __init__(self, kernel: Any, calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]]) -> None:
        self.kernel, self.calls = kernel, calls

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **kwargs: self.calls.append((self.kernel, args, kwargs))


@contextmanager
def recorded() -> Iterator[list[tuple[Any, tuple[Any, ...], dict[str, Any]]]]:
    """Launches inside are noted, not run."""
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    saved = []
    for module in (coefficients, full, functions, launches):
        for name, value in vars(module).copy().items():
            if isinstance(value, triton.JITFunction) and name.endswith("_kernel"):
                saved.append((module, name, value))
                setattr(module, name, Recorder(value, calls))
    try:
        yield calls
    finally:
        for module, name, value in saved:
            setattr(module, name, value)


def source(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[ASTSource, dict[str, int]]:
    """The specialisation that a launch with these arguments compiles, and its options."""
    options = {name: kwargs[name] for name in OPTIONS if name in kwargs}
    bound = inspect.signature(kernel.fn).bind(*args, **{k: v for k, v in kwargs.items() if k not in OPTIONS})
    signature, constants, attributes = {}, {}, {}
    for number, param in enumerate(kernel.params):
        value = bound.arguments[param.name]
        if param.is_constexpr or value is None or (type(value) is int and value == 1):
            signature[param.name], constants[param.name] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[param.name] = "*" + TYPES[value.dtype]
            attributes[(number,)] = [["tt.divisibility", 16]]  # torch's allocations on a GPU start at 512 bytes
        elif isinstance(value, float):
            signature[param.name] = "fp32"
        else:
            signature[param.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0:
                attributes[(number,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attributes), options


def launched(dtype: torch.dtype, vocab: int, true_vocab: int, k: int, teachers: int, **kind: Any) -> list[Any]:
    """Every launch of one forward and backward of top-k and gather, on tensors without memory of their own."""
    rows, n = 8192, k * teachers
    logits = torch.empty_strided((rows, vocab), (vocab, 1), dtype=dtype, device="meta")
    ids = torch.empty(rows, n, dtype=torch.int64, device="meta")
    logq = torch.empty(rows, n, device="meta")
    weights = torch.empty(rows, teachers, device="meta") if teachers > 1 else None
    weight, target = torch.empty(rows, device="meta"), torch.empty(rows, dtype=torch.int64, device="meta")
    shard = VocabShard(0, min(true_vocab, vocab), true_vocab, 0, 1, None)
    call = LossCall((rows,), shard, "triton", torch.float32, weight, temperature=0.9)
    entropy = kind.pop("entropy", False)
    task = TaskTerm(weight, weight, ("icepop", 0.5, 2.0)) if kind.pop("task", False) else None
    loss_kind = TopKLoss(**{"loss": "forward_kl", "tail": "bucket", "beta": 0.5, **kind})
    lists = functions.TeacherLists(ids, k, logq, weights, target)
    with recorded() as calls:
        leaf = logits.requires_grad_()
        loss, _ = functions.TritonTopK.apply(leaf, call, loss_kind, lists, task, entropy)
        loss.backward(torch.empty_like(loss))
        gathered, _ = functions.TritonGather.apply(leaf, call, ids)
        gathered.backward(torch.empty_like(gathered))
    return calls


def launched_full(dtype: torch.dtype, vocab: int, true_vocab: int, **kind: Any) -> list[Any]:
    """Every launch of one forward and backward of a full-vocabulary divergence, as ``launched``."""
    rows = 1024
    logits = torch.empty_strided((rows, vocab), (vocab, 1), dtype=dtype, device="meta")
    teacher = torch.empty(rows, vocab, device="meta")
    shard = VocabShard(0, true_vocab, true_vocab, 0, 1, None)
    call = LossCall((rows,), shard, "triton", torch.float32, torch.empty(rows, device="meta"), temperature=0.9)
    target, number = torch.empty(rows, dtype=torch.int64, device="meta"), torch.empty(rows, device="meta")
    given = (target, TaskTerm(number, None, None)) if kind.pop("task", False) else (None, None)
    with recorded() as calls:
        loss, *_ = FullDistill.apply(logits.requires_grad_(), teacher, call, FullLoss(**kind), *given, full.TRITON)
        loss.backward(torch.empty_like(loss))
    return calls


def loops(cubin: Path) -> tuple[int, list[dict[str, int]]]:
    """Instructions of a kernel's machine code, and its loops: what stands between a label and the branch back to it.

    That is what one round issues, as no branch leads forward in them; inner loops are in the outer's count once.
    """
    nvdisasm = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    listing = subprocess.run([str(nvdisasm), "-c", str(cubin)], check=True, capture_output=True, text=True).stdout
    code: list[str] = []
    labels: dict[str, int] = {}
    found: list[dict[str, int]] = []
    for line in listing.splitlines():
        if label := re.match(r"\.(L_x_\d+):", line):
            labels[label.group(1)] = len(code)
        elif (instruction := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line)) and instruction.group(1) != "NOP":
            code.append(instruction.group(1))
            back = re.search(r"\bBRA\b.*`\(\.(L_x_\d+)\)", code[-1])
            if back and labels.get(back.group(1), len(code)) < len(code) - 1:
                body = code[labels[back.group(1)] :]
                found.append({
                    "instructions": len(body),
                    "exp2": sum("MUFU.EX2" in x for x in body),
                    "wide_loads": sum(bool(re.search(r"\bLDG\S*\.128", x)) for x in body),
                    "loads": sum("LDG" in x for x in body),
                    "barriers": sum("BAR.SYNC" in x for x in body),
                })  # fmt: skip
    return len(code), found


def compiled(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Compiles one launch and reads what ptxas says about it."""
    src, options = source(kernel, args, kwargs)
    code = triton.compile(src, target=HOPPER, options=options)
    ptx = folder / f"{src.name}.ptx"
    ptx.write_text(code.asm["ptx"])
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    command = [str(ptxas), "-v", "-arch=sm_90a", str(ptx), "-o", str(folder / f"{src.name}.cubin")]
    report = subprocess.run(command, check=True, capture_output=True, text=True).stderr

    def number(pattern: str) -> int:
        found = re.search(pattern, report)
        return int(found.group(1)) if found else 0

    instructions, found = loops(folder / f"{src.name}.cubin")
    widths: Counter[str] = Counter()
    for kind, vector, bits in re.findall(r"\b(ld|st)\.global[.\w:]*?(?:\.(v\d))?\.b(\d+)", code.asm["ptx"]):
        widths[f"{kind}{int(bits) * int((vector or 'v1')[1:])}"] += 1
    return {
        "kernel": src.name,
        "warps": code.metadata.num_warps,
        "constants": {name: value for name, value in kwargs.items() if type(value) is int},
        "registers": number(r"Used (\d+) registers"),
        "spilled_bytes": number(r"(\d+) bytes spill stores"),
        "shared_bytes": code.metadata.shared,
        "widths": dict(sorted(widths.items())),
        "instructions": instructions,
        "loops": found,
    }


CASES: dict[str, dict[str, Any]] = {
    "qwen": {"dtype": torch.bfloat16, "vocab": 151_936, "true_vocab": 151_669, "k": 64, "teachers": 1},
    "shard": {"dtype": torch.bfloat16, "vocab": 19_072, "true_vocab": 19_072, "k": 64, "teachers": 2, "loss": "jsd"},
    "odd": {"dtype": torch.bfloat16, "vocab": 151_669, "true_vocab": 151_665, "k": 512, "teachers": 1},
    "fp32": {"dtype": torch.float32, "vocab": 32_000, "true_vocab": 32_000, "k": 512, "teachers": 1,
             "loss": "reverse_kl", "tail": "renormalize", "logprob_min_clamp": -10.0, "entropy": True},
    "task": {"dtype": torch.bfloat16, "vocab": 151_936, "true_vocab": 151_669, "k": 64, "teachers": 1, "task": True,
             "entry_max_clamp": 0.05},
}  # fmt: skip
FULL_CASES: dict[str, dict[str, Any]] = {
    "full": {"dtype": torch.bfloat16, "vocab": 151_936, "true_vocab": 151_669, "loss": "forward_kl"},
    "mixed": {
        "dtype": torch.float32,
        "vocab": 32_000,
        "true_vocab": 32_000,
        "loss": "reverse_kl",
        "skew": 0.1,
        "task": True,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=None, help="keep PTX and cubin here")
    parser.add_argument("--case", action="append", metavar="NAME[:KERNEL,…]", help="with kernels: these only")
    arguments = parser.parse_args()
    table.device_name = lambda device: table.ANY_DEVICE  # type: ignore[assignment]
    for case in arguments.case or [*CASES, *FULL_CASES]:
        name, _, kernels = case.partition(":")
        first = {}
        for call in launched(**CASES[name]) if name in CASES else launched_full(**FULL_CASES[name]):
            first.setdefault(call[0].fn.__name__, call)
        for call in (first[kernel] for kernel in (kernels.split(",") if kernels else first)):
            with tempfile.TemporaryDirectory() as scratch:
                folder = Path(scratch) if arguments.folder is None else arguments.folder / name
                folder.mkdir(parents=True, exist_ok=True)
                print(json.dumps({"case": name, **compiled(*call, folder)}), flush=True)  # type: ignore[call-arg]


if __name__ == "__main__":
    main()
