"""Memory and speed of checkpoint conversion, beside a plain copy of the same files and beside Megatron with a model.

Makes a random sharded mixture-of-experts checkpoint of the asked size (Qwen3-MoE architecture, bf16), copies its files,
converts it to Megatron's format and back, each step in a process of its own, and prints one table (``--json``: JSON):
seconds, bytes per second, that rate over the copy's, and peak resident memory above the process before the step. Every
step starts with its input out of the page cache and ends with its output on disk.

``model-to-megatron`` and ``model-to-hf``, which must be asked for, do the same with a ``GPTModel`` that Megatron's
``dist_checkpointing`` writes and loads.

    python tools/measure_conversion.py --folder /data/measure --gigabytes 8
    python tools/measure_conversion.py --folder /data/measure --steps copy    # one step at a time; results add up
    python tools/measure_conversion.py --folder /data/measure --gigabytes 3 --steps make to-megatron to-hf \\
        model-to-megatron model-to-hf

Left out: several ranks (torchrun), network file systems.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mopd.conversion.job import Job
    from mopd.student.parallel import Layout

STEPS = ("make", "copy", "to-megatron", "to-hf", "compare")
MODEL_STEPS = ("model-to-megatron", "model-to-hf")
HIDDEN, EXPERT_WIDTH, EXPERTS, VOCABULARY = 2048, 768, 64, 151936
RESULTS = "results.json"
SHARD_BYTES = 2**30
STEP_TIMEOUT_S = 3600


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, required=True, help="where the files go: three times their size is needed"
    )
    parser.add_argument("--gigabytes", type=float, default=8.0, help="size of the checkpoint")
    parser.add_argument("--steps", nargs="+", choices=(*STEPS, *MODEL_STEPS), default=list(STEPS))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", choices=(*STEPS, *MODEL_STEPS), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        print(json.dumps(run_step(args.child, args.folder, args.gigabytes)))
        return 0
    args.folder.mkdir(parents=True, exist_ok=True)
    path = args.folder / RESULTS
    results = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    for step in args.steps:
        options = ["--folder", str(args.folder), "--gigabytes", str(args.gigabytes), "--child", step]
        done = subprocess.run(
            [sys.executable, __file__, *options], stdout=subprocess.PIPE, text=True, check=True, timeout=STEP_TIMEOUT_S
        )
        results[step] = json.loads(done.stdout.splitlines()[-1])
        path.write_text(json.dumps(results, indent=1), encoding="utf-8")
    for step in ("to-megatron", "to-hf", *MODEL_STEPS):
        if step in results and "copy" in results:
            results[step]["over_copy"] = round(results[step]["bytes_per_s"] / results["copy"]["bytes_per_s"], 2)
    print(json.dumps(results, indent=1)) if args.json else show(results)
    return 0


def show(results: dict[str, dict[str, float]]) -> None:
    """One line a step."""
    print(f"{'step':<18} {'GB':>6} {'seconds':>8} {'MB/s':>7} {'over copy':>9} {'MB above baseline':>18}")
    for step, row in results.items():
        over = f"{row['over_copy']:.2f}" if "over_copy" in row else ""
        print(
            f"{step:<18} {row['bytes'] / 1e9:6.2f} {row['seconds']:8.1f} {row['bytes_per_s'] / 1e6:7.0f} {over:>9} "
            f"{row['peak_above_baseline'] / 1e6:18.0f}"
        )


def run_step(step: str, folder: Path, gigabytes: float) -> dict[str, float]:
    """One step in this process: bytes read, seconds, bytes per second, peak resident bytes above the start."""
    from mopd.conversion.jobs import streaming
    from mopd.conversion.torch_dist.plan import TargetLayout

    source, copy, megatron, back = (folder / name for name in ("source", "copy", "megatron", "back"))
    targets = {"make": source, "copy": copy, "to-megatron": megatron, "to-hf": back}
    targets |= {name: folder / name for name in MODEL_STEPS}
    if step in targets:
        shutil.rmtree(targets[step], ignore_errors=True)
    inputs = {"copy": source, "to-megatron": source, "to-hf": megatron, "compare": back}
    inputs |= dict(zip(MODEL_STEPS, (source, megatron), strict=True))
    joined = join() if step in MODEL_STEPS else None
    for path in sorted(inputs[step].rglob("*")) if step in inputs else ():
        forget(path)
    baseline = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the kernel's peak starts anew
    start_s = time.perf_counter()
    if step == "make":
        finish_job(checkpoint_job(source, gigabytes))
    elif step == "copy":
        copy_folder(source, copy)
    elif step == "to-megatron":
        finish_job(streaming.hf_to_megatron(source, megatron, TargetLayout()))
    elif step == "to-hf":
        finish_job(streaming.megatron_to_hf(megatron, back))
    elif joined is not None:
        through_model(source, megatron, targets[step], joined, is_export=step == "model-to-hf")
    else:
        compare(source, back)
    seconds = time.perf_counter() - start_s
    num_bytes = sum(path.stat().st_size for path in targets.get(step, back).rglob("*") if path.is_file())
    return {
        "bytes": num_bytes,
        "seconds": round(seconds, 2),
        "bytes_per_s": round(num_bytes / seconds),
        "peak_above_baseline": memory("VmHWM") - baseline,
    }


def checkpoint_job(target: Path, gigabytes: float) -> Job:
    """A checkpoint of random weights as a job."""
    import torch

    from mopd.conversion.hf.writer import Group, hf_job
    from mopd.conversion.models.families import hf_tensors
    from mopd.conversion.models.reading import dims_from_config

    layer_bytes = 2 * (3 * EXPERTS * EXPERT_WIDTH * HIDDEN + 2 * HIDDEN * (32 * 128 + 4 * 128))
    layers = max(1, round((gigabytes * 1e9 - 4 * VOCABULARY * HIDDEN) / layer_bytes))
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": HIDDEN,
        "intermediate_size": 6144, "moe_intermediate_size": EXPERT_WIDTH, "num_experts": EXPERTS,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "num_hidden_layers": layers, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "vocab_size": VOCABULARY, "max_position_embeddings": 4096, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False, "use_sliding_window": False,
        "dtype": "bfloat16",
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(2**22, generator=generator).bfloat16()

    def group(name: str, shape: tuple[int, ...]) -> Group:
        def read() -> list[torch.Tensor]:
            count = torch.Size(shape).numel()
            repeated = noise.roll(abs(hash_of(name)) % noise.numel()).repeat(-(-count // noise.numel()))
            return [repeated[:count].view(shape)]

        return Group((name,), (shape,), (torch.bfloat16,), read)

    groups = [
        group(name, shape) for name, shape in hf_tensors(dims_from_config(config, target / "config.json")).items()
    ]
    return hf_job(
        target, groups, side_files=target, config=config, description={"command": "make"}, max_file_bytes=SHARD_BYTES
    )


def hash_of(name: str) -> int:
    """A number for a name, the same in every process."""
    import zlib

    return zlib.crc32(name.encode())


def join() -> Layout:
    """A world of one rank, with everything imported."""
    from mopd.config.student import ParallelConfig
    from mopd.student import parallel
    from mopd.student.checkpoints import checkpoint  # noqa: F401

    return parallel.initialize(ParallelConfig(), timeout_s=STEP_TIMEOUT_S, seed=0)


def through_model(source: Path, megatron: Path, target: Path, layout: Layout, *, is_export: bool) -> None:
    """The same conversions with the whole model in memory, as a training run has it."""
    from mopd.config.student import StudentConfig
    from mopd.conversion.hf.reader import HfReader
    from mopd.conversion.hf.writer import write_folder
    from mopd.conversion.models.reading import read_dims
    from mopd.conversion.torch_dist.writer import CONTENT
    from mopd.student import cpu_shim
    from mopd.student.checkpoints import checkpoint
    from mopd.student.model.gpt import build_model
    from mopd.student.weights import iter_hf_weights, load_hf_into

    with cpu_shim.activate():
        dims = read_dims(source)
        model = build_model(StudentConfig(model=str(source), dtype="bfloat16"), dims, layout)
        if is_export:
            checkpoint.load_weights(megatron, model)
            write_folder(target, iter_hf_weights([model], dims, layout), source=source)
        else:
            load_hf_into([model], HfReader(source), dims, layout)
            sharded = {"model": model.sharded_state_dict(metadata=dict(CONTENT))}
            checkpoint.write(target, sharded, layout, state={"source": str(source)})


def finish_job(job: Job) -> None:
    """Run a job as one rank."""
    job.begin(resume=False)
    job.write_share(0, 1)
    job.complete()


def copy_folder(source: Path, target: Path) -> None:
    """Copy all files, each on disk at the end."""
    target.mkdir()
    for path in sorted(source.iterdir()):
        shutil.copyfile(path, target / path.name)
        with (target / path.name).open("rb") as file:
            os.fsync(file.fileno())


def compare(source: Path, back: Path) -> None:
    """Both folders hold the same bits under the same names."""
    import torch

    from mopd.conversion.hf.reader import HfReader

    before, after = HfReader(source), HfReader(back)
    if before.names != after.names:
        raise SystemExit(f"names differ: {sorted(before.names ^ after.names)[:3]}")
    for name in sorted(before.names):
        one, other = (reader.read(name).reshape(-1).view(torch.uint8) for reader in (before, after))
        if not torch.equal(one, other):
            raise SystemExit(f"{name} differs")


def forget(path: Path) -> None:
    """Drop a file from the page cache."""
    if path.is_file():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def memory(field: str) -> int:
    """Bytes of a field of ``/proc/self/status``."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field}")


if __name__ == "__main__":
    raise SystemExit(main())
