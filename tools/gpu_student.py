"""The student on one GPU beside the same weights on the CPU, then the quickstart with its engines on the GPU, then a
model of full size.

    quickstart   recipes/quickstart.yaml shortened, on one rank: student and engines share the GPU, in one process; it
                 trains, sends its weights to the rollout, scores, saves, ends and goes on from its checkpoint;
                 the result answers a prompt
    student      forward, backward, optimizer steps (also with Adam's states in host memory), checkpoint and resume, in
                 bf16 on the GPU and in fp32 on the CPU
    families     the same of local layers, of experts, latent attention and vision in fp32; and of TransformerEngine's
                 layers where it is installed, with grouped products of experts, in bf16
    training     mopd bench student --size qwen3-1.7b: tokens/s, share of the peak, memory, beside transformers
    scoring      mopd bench teachers --size qwen3-1.7b: tokens/s beside a bare forward pass
    shared       a rollout on the student's GPU by turns (share_gpus_with): vLLM's memory comes back, training goes on;
                 the teacher is on the CPU, as it would need a GPU of its own
    ipc          weights of that size from one process to another on the GPU (weight_sync: {type: ipc}): time beside a
                 copy within one, memory
    collective   mopd bench weights: weights from one GPU to another (weight_sync: {type: collective}) beside a bare
                 broadcast of NCCL and HTTP; takes two GPUs

Models and data are made on the spot and train to nothing. A stage that cannot run is skipped with its reason; the
result is one JSON file. On a machine without CUDA ``--device cpu`` compares fp32 with fp32, which tests this tool.

    python tools/gpu_student.py --out student.json                   # one GPU: some minutes
    python tools/gpu_student.py --device cpu --stages student        # no GPU: half a minute

Exit codes: 0 nothing failed, 1 a check failed, 2 wrong options or no such device.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

if __package__ is None or __package__ == "":  # run as a file: make `tools` importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.gpu_ipc import ipc_stage
from tools.gpu_sharing import shared_stage
from tools.gpu_stage import ROOT, Check, Failed, Skipped, Stage, is_there, need, start, wait

STUDENT_NEEDS = ("megatron.core", "transformers", "safetensors", "psutil", "yaml", "numpy")
QUICKSTART_NEEDS = (
    *STUDENT_NEEDS, "tokenizers", "pyarrow", "rich", "jinja2", "tensorboard", "fastapi", "uvicorn",
    "httpx", "msgpack", "prometheus_client",
)  # fmt: skip
BENCH_NEEDS = (*STUDENT_NEEDS, "rich", "pyarrow")
SIZE = "qwen3-1.7b"
SEEING = "qwen2_5_vl"
FAMILIES = ("qwen3", "qwen3_moe", "deepseek_v3", SEEING)
QUICKSTART_STEPS = 4

LIMITS: dict[str, dict[str, float]] = {
    # Two orders of summation in fp32, 2^-24 each: 1e-6 measured between CPUs; a GPU may fuse more.
    "float32": {"loss": 1e-4, "grad_norm": 1e-3, "gradient_angle": 1e-3, "logprob": 1e-3, "resumed": 1e-4},
    # bf16 keeps 8 bits, so a rounding errs by up to 2^-9 = 0.2 %, and errors of many add up by chance. A CPU's own bf16
    # differs from its fp32 by 1e-4, 2e-3, 8e-4 and 0.013 nats here; a GPU sums in another order and rounds elsewhere:
    # about five times as much is allowed. A wrong mask, scale or shard errs by 10 % and more. Resumed: the additions of
    # a GPU's backward come in any order.
    "bfloat16": {"loss": 5e-3, "grad_norm": 2e-2, "gradient_angle": 1e-2, "logprob": 5e-2, "resumed": 5e-3},
}
"""Largest differences by the dtype under test; relative, save ``logprob`` (mean, nats) and ``gradient_angle`` (1 less
the cosine of the worst tensor)."""


def compare(
    reference: Mapping[str, Any],
    tested: Mapping[str, Any],
    angles: Mapping[str, float],
    *,
    is_exact: bool,
    slack: float = 1.0,
) -> list[Check]:
    """The checks of the student's stage.

    Args:
        reference: what ``gpu_student_rank.measure`` saw in fp32 on the CPU.
        tested: what it saw on the device.
        angles: 1 less the cosine between both gradients of the first step, by parameter.
        is_exact: sums come in one order, so that a resumed run must equal an uninterrupted one bit for bit.
        slack: times ``LIMITS``.
    """
    limits = {name: slack * limit for name, limit in LIMITS[tested["dtype"]].items()}

    def within(name: str, value: float, limit: float) -> Check:
        return Check(name=name, value=value, limit=limit, ok=value <= limit)  # a NaN is not

    checks = [
        within(f"{name} of step {i + 1}", _relative(step[name], expected[name]), limits[name])
        for i, (step, expected) in enumerate(zip(tested["steps"][:2], reference["steps"][:2], strict=True))
        for name in ("loss", "grad_norm")
    ]
    differences = [abs(a - b) for a, b in zip(tested["logprobs"], reference["logprobs"], strict=True)]
    checks.append(within("log-probs, mean difference", sum(differences) / len(differences), limits["logprob"]))
    worst = max(angles, key=lambda name: angles[name])
    checks.append(within(f"gradient angle, worst tensor ({worst})", angles[worst], limits["gradient_angle"]))
    for key, name, limit in (
        ("resumed", "losses after resuming", 0.0 if is_exact else limits["resumed"]),
        ("resumed_on_host", "the same with optimizer states in host memory", limits["resumed"]),
    ):
        found = [_relative(a["loss"], b["loss"]) for a, b in zip(tested[key], tested["steps"][2:], strict=True)]
        checks.append(within(name, max(found), limit))
    flags = ["saved_equals_loaded", "changed", *(["resumed_equals_uninterrupted"] if is_exact else [])]
    return checks + [Check(name=name, value=tested[name], limit=True, ok=tested[name] is True) for name in flags]


def _relative(value: float, expected: float) -> float:
    return abs(value - expected) / abs(expected)


def student_stage(device: str, dtype: str, work: Path, stage: Stage, deadline: float) -> None:
    """The same four steps on both devices at once, and what differs."""
    need(STUDENT_NEEDS)
    model = work / "model"
    _make_model(model)
    _beside_the_cpu(device, dtype, work, stage, deadline, {"model": str(model)})


def families_stage(device: str, dtype: str, work: Path, stage: Stage, deadline: float) -> None:
    """``student_stage`` of small models of other families. Experts chosen in bf16 are not always those of fp32."""
    need((*STUDENT_NEEDS, "tokenizers", "torchvision", "PIL"))
    from tests.fixtures.tiny_models import make_hf_model
    from tests.parity.student.vision_cases import make_vision_inputs

    models = {family: {"model": str(make_hf_model(work / family, family))} for family in FAMILIES if family != SEEING}
    if SEEING in FAMILIES:
        seen = make_vision_inputs(work / "seen")
        models[SEEING] = {"model": str(seen / SEEING), "data": str(seen / "data" / "rows.jsonl")}
    impls = ("local", *(["transformer_engine"] if device == "cuda" and is_there("transformer_engine") else []))
    for family, options in models.items():
        for impl in impls:
            of_impl = dtype if impl != "local" or family == "qwen3" else "float32"
            own, slack = Stage(name=family, status=""), 10.0 if of_impl == "bfloat16" else 1.0
            (folder := work / f"{family}_{impl}").mkdir()
            _beside_the_cpu(device, of_impl, folder, own, deadline, {**options, "impl": impl}, slack=slack)
            stage.checks += [dataclasses.replace(one, name=f"{family}, {impl}: {one.name}") for one in own.checks]


def _beside_the_cpu(
    device: str, dtype: str, work: Path, stage: Stage, deadline: float, options: Mapping[str, str], *, slack: float = 1
) -> None:
    """Fill the stage with what a student does on ``device`` and in fp32 on the CPU."""
    runs = {"reference": ("cpu", "float32"), "tested": (device, dtype)}
    children = {name: _start_rank(work / name, *how, options) for name, how in runs.items()}
    try:
        for name, child in children.items():
            wait(child, f"student on {' in '.join(runs[name])}", deadline)
    finally:
        for child in children.values():
            child.kill()
    reference, tested = (json.loads((work / name / "result.json").read_text()) for name in runs)
    is_on_it = (tested["device"] == reference["device"]) == (device == "cpu")  # a child may have lost sight of the GPU
    stage.checks = [Check(name=f"ran on {device}", value=is_on_it, limit=True, ok=is_on_it)]
    stage.checks += compare(reference, tested, _angles(work), is_exact=device == "cpu", slack=slack)
    stage.figures = {
        name: {key: result[key] for key in ("device", "dtype", "steps", "peak_gib", "seconds")}
        for name, result in (("reference", reference), ("tested", tested))
    }


def quickstart_stage(device: str, dtype: str, work: Path, stage: Stage, deadline: float) -> None:
    """``mopd train`` on the shortened recipe, as a user would start it."""
    need(QUICKSTART_NEEDS)
    from tools import make_quickstart
    from tools.quickstart.cache import PartsFolder

    make_quickstart.STEPS = dict.fromkeys(make_quickstart.STEPS, 10)
    make_quickstart.TRAIN_ROWS, make_quickstart.VALIDATION_ROWS = 64, 8
    assets = work / "assets"
    make_quickstart.build(PartsFolder(assets), threads=0)
    run = work / "run"
    command = [sys.executable, "-m", "mopd", "train", str(ROOT / "recipes" / "quickstart.yaml")]
    for setting in quickstart_settings(assets, run):
        command += ["--set", setting]
    half = ["--set", f"schedule.steps={QUICKSTART_STEPS // 2}"]
    wait(start([*command, *half], device), "mopd train recipes/quickstart.yaml", deadline)
    wait(start([*command, "--resume"], device), "mopd train recipes/quickstart.yaml --resume", deadline)
    asked = [sys.executable, "-m", "mopd", "generate", str(run), "abc", "--max-new-tokens", "4"]
    wait(start(asked, device), "mopd generate", deadline)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    stage.checks = [
        Check(name="steps", value=len(lines), limit=QUICKSTART_STEPS, ok=len(lines) == QUICKSTART_STEPS),
        Check(name="exported", value=(run / "hf").is_dir(), limit=True, ok=(run / "hf").is_dir()),
        Check(name="report", value=(run / "report.html").is_file(), limit=True, ok=(run / "report.html").is_file()),
    ]
    stage.figures = {"first_step": lines[0], "last_step": lines[-1]}


def training_stage(device: str, dtype: str, work: Path, stage: Stage, deadline: float) -> None:
    """``mopd bench student`` at full size."""
    stage.figures = _bench("student", device, work, deadline)
    stage.checks = [Check(name="goals", value=stage.figures["is_met"], limit=True, ok=stage.figures["is_met"])]


def scoring_stage(device: str, dtype: str, work: Path, stage: Stage, deadline: float) -> None:
    """``mopd bench teachers`` at full size; it has no goal."""
    stage.figures = _bench("teachers", device, work, deadline)


def collective_stage(device: str, dtype: str, work: Path, stage: Stage, deadline: float) -> None:
    """``mopd bench weights`` of a 1.7B-shaped student's bytes in fp32; without CUDA of some megabytes, whose times say
    nothing."""
    need((*BENCH_NEEDS, "fastapi", "uvicorn", "httpx", "msgpack", "prometheus_client"))
    if device == "cuda":
        import torch

        if torch.cuda.device_count() < 2:
            raise Skipped("a student and an engine need a GPU each: this machine has one")
    sizes = ["6900", "--bucket-mib", "256"] if device == "cuda" else ["12", "--bucket-mib", "8", "--rounds", "1"]
    out = work / "out.json"
    with out.open("w") as file:
        command = [sys.executable, "-m", "mopd", "bench", "weights", "--replicas", "1", "--json", "--mb", *sizes]
        wait(start(command, device, stdout=file), "mopd bench weights", deadline, good=(0, 1))
    stage.figures = found = json.loads(out.read_text())
    stage.checks = [
        Check(name=name, value=goal["value"], limit=goal.get("at_least", goal.get("at_most")), ok=goal["is_met"])
        for name, goal in found["goals"].items()
        if device == "cuda" or name.endswith("/extra_buckets")
    ]


def _bench(what: str, device: str, work: Path, deadline: float) -> dict[str, Any]:
    """What ``mopd bench`` measures at full size, which takes a GPU."""
    need(BENCH_NEEDS)
    if device == "cpu":
        raise Skipped(f"{SIZE} is for a GPU")
    out = work / "out.json"
    with out.open("w") as file:
        child = start([sys.executable, "-m", "mopd", "bench", what, "--size", SIZE, "--json"], device, stdout=file)
        wait(child, f"mopd bench {what} --size {SIZE}", deadline, good=(0, 1))
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def quickstart_settings(assets: Path, run: Path) -> list[str]:
    """``--set`` of the shortened quickstart: one rank, whose GPU the engines in its process share."""
    teachers = [f"teachers.{name}.model={assets}/teachers/{name}" for name in ("reversal", "sorting", "next_letter")]
    return [
        f"run_dir={run}",
        f"student.model={assets}/base",
        "student.parallel.tensor_model_parallel_size=1",
        *teachers,
        f"data.train=[{assets}/data/train.parquet]",
        f"data.validation=[{assets}/data/validation.parquet]",
        f"schedule.steps={QUICKSTART_STEPS}",
        "schedule.prompts_per_step=24",
        f"validation.every_steps={QUICKSTART_STEPS}",
        "checkpoint.every_steps=2",
        "student.optimizer.lr_warmup_steps=1",
        "preflight.require_better_teacher=false",  # nobody has learnt anything
    ]


STAGES: dict[str, Callable[[str, str, Path, Stage, float], None]] = {
    "quickstart": quickstart_stage,
    "student": student_stage,
    "families": families_stage,
    "training": training_stage,
    "scoring": scoring_stage,
    "shared": shared_stage,
    "ipc": ipc_stage,
    "collective": collective_stage,
}
"""In order of importance."""


def run_stage(name: str, device: str, dtype: str, work: Path, deadline: float) -> Stage:
    """A stage within what is left of the time."""
    stage, started = Stage(name=name, status="passed"), time.monotonic()
    try:
        if started >= deadline:
            raise Skipped("no time is left: raise --time-limit")
        folder = work / name
        folder.mkdir()
        STAGES[name](device, dtype, folder, stage, deadline)
        broken = [check.name for check in stage.checks if not check.ok]
        if broken:
            raise Failed(", ".join(broken))
    except Skipped as error:
        stage.status, stage.reason = "skipped", str(error)
    except Failed as error:
        stage.status, stage.reason = "failed", str(error)
    stage.seconds = round(time.monotonic() - started, 1)
    return stage


def _make_model(folder: Path) -> None:
    """A random Qwen3 of half a million weights, with distributions far from uniform."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=512, hidden_size=128, intermediate_size=192, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=256, tie_word_embeddings=True,
        initializer_range=0.1, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).float().save_pretrained(folder)


def _start_rank(out: Path, device: str, dtype: str, options: Mapping[str, str]) -> subprocess.Popen[str]:
    given = {**options, "dtype": dtype, "out": str(out)}
    if device == "cpu" and "impl" in given:
        given["impl"] = "local"
    arguments = [word for name, value in given.items() for word in (f"--{name}", value)]
    return start([sys.executable, "-m", "tools.gpu_student_rank", *arguments], device)


def _angles(work: Path) -> dict[str, float]:
    """1 less the cosine between the gradients of both runs, of every parameter that both have by one name."""
    from safetensors.torch import load_file

    reference, tested = (load_file(work / name / "gradients.safetensors") for name in ("reference", "tested"))
    common = [name for name in reference if name in tested]
    if not common:
        raise Failed("the two models have no parameter by one name")
    angles = {}
    for name in common:
        a, b = reference[name].double().flatten(), tested[name].double().flatten()
        angles[name] = 1.0 - float(a @ b / (a.norm() * b.norm()))
    return angles


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages, print a line for each, write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", choices=tuple(LIMITS), help="under test; default bfloat16 on cuda, float32 on cpu")
    parser.add_argument("--stages", default=",".join(STAGES), metavar="NAMES", help=f"of {', '.join(STAGES)}")
    parser.add_argument("--time-limit", type=float, default=300.0, metavar="SECONDS", help="for everything")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the result as JSON")
    args = parser.parse_args(arguments)
    names = args.stages.split(",")
    if not set(names) <= set(STAGES):
        parser.error(f"--stages {args.stages}: name some of {', '.join(STAGES)}")
    if not 0 < args.time_limit < float("inf"):
        parser.error(f"--time-limit {args.time_limit}: set seconds above 0")
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} sees no CUDA device: use --device cpu to test this tool")
    deadline = time.monotonic() + args.time_limit
    dtype = args.dtype or ("bfloat16" if args.device == "cuda" else "float32")
    stages = []
    with tempfile.TemporaryDirectory(prefix="mopd-gpu-student-", ignore_cleanup_errors=True) as work:
        for name in names:
            stages.append(run_stage(name, args.device, dtype, Path(work), deadline))
            print(f"== {name}: {stages[-1].status} in {stages[-1].seconds:g} s {stages[-1].reason}".rstrip())
            for check in stages[-1].checks:
                print(f"   {'ok ' if check.ok else 'BAD'} {check.name}: {check.value:.3g} (limit {check.limit:g})")
    device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    result = {"device": device, "torch": torch.__version__, "stages": [dataclasses.asdict(stage) for stage in stages]}
    if args.out is not None:
        result = json.loads(json.dumps(result), parse_constant=str)  # NaN is no JSON
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 1 if any(stage.status == "failed" for stage in stages) else 0


if __name__ == "__main__":
    sys.exit(main())
