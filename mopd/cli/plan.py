"""``mopd plan``: what goes where, whether it fits, and what a step will take, before anything is started."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mopd.base.files.yaml_text import dump_inline
from mopd.base.hardware import Hardware, this_hardware
from mopd.base.text import json_lines
from mopd.base.types import UserError
from mopd.cli.ranks import add_recipe
from mopd.config.load import Loaded, load_recipe
from mopd.config.machine.places import NodePool, place_recipe
from mopd.planning.devices import GPUS, Cluster, Rates, gpu_of, rates_of_gpu

if TYPE_CHECKING:
    from mopd.config.schema import Recipe
    from mopd.conversion.models.dims import ModelDims
    from mopd.planning.plan import PlanInput, RunPlan
    from mopd.planning.workload import Workload

MAX_NODES = 10_000
ABOUT = "what goes where, whether it fits, and how long a step will take"
EXAMPLES = """\
examples:
  mopd plan my.yaml --gpu h100                      on one node of eight H100
  mopd plan my.yaml --gpu h200 --nodes 4 --suggest  the fastest layout and split of 32 GPUs
  mopd plan my.yaml --probe                         on this machine, whose speed is measured first
  mopd plan my.yaml --gpu h100 --measured RUN       beside what a run measured
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Light to import, as all of this file."""
    add_recipe(parser)
    add = parser.add_argument
    add_gpu(parser)
    add("--nodes", type=int, metavar="N", help="nodes (default: with --gpu those of the recipe's job, else 1)")
    about = "with --gpu (default: those of the recipe's job, else those of the GPU's usual server)"
    add("--gpus-per-node", type=int, metavar="N", help=about)
    add("--configs", type=Path, metavar="DIR", help="where DIR/NAME/config.json stands for models that are not here")
    add("--prompt-length", type=float, metavar="MEAN", help="tokens (default: half of data.max_prompt_length)")
    add("--response-length", type=float, metavar="MEAN", help="tokens (default: half of rollout.max_response_length)")
    add("--image-length", type=float, default=0.0, metavar="MEAN", help="image tokens of a prompt (default: none)")
    add("--suggest", action="store_true", help="find the fastest layout and split of these GPUs")
    add("--measured", type=Path, metavar="RUN", help="take lengths from a run, and show the plan beside it")
    add("--probe", action="store_true", help="measure what this machine can do (some seconds; imports torch)")
    add("--json", action="store_true", help="print JSON, every number in bytes or seconds")


def add_gpu(parser: argparse.ArgumentParser) -> None:
    """Add what names GPUs."""
    add = parser.add_argument
    add("--gpu", metavar="NAME", help=f"nodes of these GPUs instead of this machine: {', '.join(GPUS)}")
    add("--gpu-memory", type=float, metavar="GIB", help="memory of each GPU (default: that of --gpu)")
    add("--tflops", type=float, metavar="N", help="dense bf16 operations of each GPU, 10^12 a second")


def run(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Print; the exit code.

    Raises:
        UserError: what cannot fit, by key, after the tables.
    """
    from mopd.planning.measured import compare, slowest
    from mopd.planning.plan import make_plan
    from mopd.planning.show import plain_suggestions, show, show_comparison, show_suggestions
    from mopd.planning.suggest import helps, suggest
    from mopd.report.run_files import RunFiles

    steps = []
    if args.measured is not None:
        files = RunFiles(args.measured)
        files.require_run()
        steps = files.steps()
    loaded, given, pool, rates = given_of(args, load_recipe(args.recipe, args.set), steps)
    if args.suggest:
        if rates is None or not given.cluster.gpus_per_node:
            raise UserError("--suggest shares GPUs out: name them with --gpu, or with --gpu-memory and --tflops")
        found = suggest(given, rates)
        if args.json:
            print(json_lines(plain_suggestions(found)))
        else:
            show_suggestions(found, helps(given, rates, found[0]), yaml_lines(found[0].keys))
        return 0
    plan = make_plan(given, pool, rates)
    rows = compare(plan, steps) if steps else []
    if args.json:
        print(json_lines({**plain_plan(loaded, plan, rates), "measured": [asdict(row) for row in rows]}))
    else:
        show(plan, rates)
        print(f"weights to the rollout: {loaded.weights_way}")
        if steps:
            show_comparison(rows, None if plan.times is None else plan.times.bound_by, slowest(steps))
    refuse(loaded, plan)
    return 0


def plain_plan(loaded: Loaded, plan: RunPlan, rates: Rates | None) -> dict[str, Any]:
    """Return the plan as plain values, and the way of the weights to the rollout."""
    from mopd.planning.show import plain

    return {**plain(plan, rates), "weights_way": loaded.weights_way}


def given_of(
    args: argparse.Namespace, loaded: Loaded, steps: Sequence[Mapping[str, Any]] = ()
) -> tuple[Loaded, PlanInput, NodePool, Rates | None]:
    """Return the settled recipe, what a plan of it is made from, its nodes, and rates where they are known."""
    from mopd.planning.models import STUDENT, read_models
    from mopd.planning.plan import PlanInput, check_models, settled_for
    from mopd.planning.workload import expected, measured

    loaded, cluster, pool, hardware = _nodes(args, loaded, this_hardware())
    read = read_models(loaded, args.configs)
    models = read.dims
    loaded = settled_for(loaded, models, pool, hardware)
    check_models(loaded, models, with_layout=not args.suggest)
    if steps:
        work = measured(loaded.recipe, steps, image_tokens=args.image_length)
    else:
        work = expected(
            loaded.recipe,
            prompt_tokens=args.prompt_length,
            response_tokens=args.response_length,
            image_tokens=args.image_length,
        )
    if loaded.recipe.sends_hidden:
        sizes = {name: models[f"teachers.{name}"].hidden_size for name in loaded.recipe.teachers}
        work = replace(work, hidden_sizes=sizes)
    _check_images(work, sees_images=models[STUDENT].vision is not None)
    rates = _rates(args, loaded.recipe, models[STUDENT], work)
    given = PlanInput(
        recipe=loaded.recipe, models=models, work=work, cluster=cluster, stored=read.stored, adapters=read.adapters
    )
    return loaded, given, pool, rates


def _check_images(work: Workload, *, sees_images: bool) -> None:
    if not 0 <= work.image_tokens <= work.prompt_tokens:
        raise UserError(
            f"--image-length is {work.image_tokens:g}: set 0 to the {work.prompt_tokens:g} tokens of a prompt, which "
            "they are part of, or give a longer --prompt-length"
        )
    if work.image_tokens and not sees_images:
        raise UserError("--image-length: the student sees no images: leave it out")


def _nodes(args: argparse.Namespace, loaded: Loaded, hardware: Hardware) -> tuple[Loaded, Cluster, NodePool, Hardware]:
    """Describe what is planned for: GPUs of the table on the nodes of the recipe's job, or on those of the options;
    else this machine. And the recipe as it is read there, and what the launcher of the first node sees."""
    for name in ("nodes", "gpus_per_node"):
        if getattr(args, name) is not None and not 1 <= getattr(args, name) <= MAX_NODES:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(args, name)}: set 1 to {MAX_NODES}")
    gpu, host = gpu_of(args.gpu, memory_gib=args.gpu_memory, tflops=args.tflops), 0
    if gpu is not None:
        if args.probe:
            raise UserError("--gpu plans for other machines and --probe measures this one: give one of them")
        loaded, pool = _job(args, loaded, gpu.per_node)
        name, memory, host = args.gpu or "gpu", gpu.memory_bytes, gpu.host_bytes
    elif hardware.num_gpus and args.probe:
        raise UserError("--probe measures a CPU, and this machine has GPUs: name them with --gpu")
    elif hardware.num_gpus:
        pool = NodePool(gpus_per_node=hardware.num_gpus, num_nodes=args.nodes or 1)
        name, memory, host = "gpu", min(hardware.gpu_memory_bytes), hardware.free_memory_bytes
    elif args.nodes not in (None, 1):
        raise UserError(f"--nodes is {args.nodes}, and this machine has no GPU to multiply: name some with --gpu")
    else:
        pool, name, memory = NodePool(gpus_per_node=0), "cpu", hardware.free_memory_bytes
    places, seen = place_recipe(loaded.recipe, pool), pool.gpus_per_node
    if gpu is not None and _is_job(loaded):
        from mopd.launch.slurm.layout import student_gpus

        seen = len(student_gpus(loaded, places)[0])
    if seen:
        hardware = Hardware(gpu_memory_bytes=(memory,) * seen, torch_cuda="planned", vllm="planned")
    nodes, gpus = sum(places.num_nodes), pool.gpus_per_node
    cluster = Cluster(name=name, nodes=nodes, gpus_per_node=gpus, memory_bytes=memory, host_bytes=host)
    return loaded, cluster, pool, hardware


def _is_job(loaded: Loaded) -> bool:
    """The recipe's own job is planned for, as it asks for GPUs."""
    return loaded.recipe.slurm is not None and loaded.recipe.slurm.gpus_per_node > 0


def _job(args: argparse.Namespace, loaded: Loaded, gpus_per_node: int) -> tuple[Loaded, NodePool]:
    """The nodes of the recipe's job, if it asks for GPUs; options go before its keys."""
    from mopd.launch.slurm.layout import job_nodes, of_job

    config = loaded.recipe.slurm
    if config is None or not _is_job(loaded):
        return loaded, NodePool(gpus_per_node=args.gpus_per_node or gpus_per_node, num_nodes=args.nodes or 1)
    nodes, gpus = args.nodes or config.nodes, args.gpus_per_node or config.gpus_per_node
    own = replace(loaded.recipe, slurm=replace(config, nodes=nodes, gpus_per_node=gpus))
    loaded = of_job(replace(loaded, recipe=own))
    return loaded, job_nodes(loaded)


def _rates(args: argparse.Namespace, recipe: Recipe, dims: ModelDims, work: Workload) -> Rates | None:
    gpu = gpu_of(args.gpu, memory_gib=args.gpu_memory, tflops=args.tflops)
    if gpu is not None:
        return rates_of_gpu(args.gpu or "gpu", gpu) if gpu.flops else None
    if not args.probe:
        return None
    from mopd.planning.probe import probe

    return probe(recipe, dims, work)


def yaml_lines(tree: Mapping[str, Any], depth: int = 0) -> str:
    """Sections of sections stand on lines of their own."""
    lines = []
    for key, value in tree.items():
        is_section = isinstance(value, dict) and any(isinstance(below, dict) for below in value.values())
        head = f"{'  ' * depth}{dump_inline(key)}:"
        lines.append(f"{head}\n{yaml_lines(value, depth + 1)}" if is_section else f"{head} {dump_inline(value)}")
    return "\n".join(lines)


def refuse(loaded: Loaded, plan: RunPlan) -> None:
    """Raise ``UserError`` for the first of what cannot work."""
    if not plan.problems:
        return
    (path, problem), *more = plan.problems
    raise UserError(f"{loaded.where(*path)}: {problem}" + (f" (and {len(more)} more)" if more else ""))
