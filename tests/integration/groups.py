"""Groups of replicas without a student: tiny random models, a recipe, routers, and weights to push."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from mopd.config.load import load_recipe
from mopd.config.schema import Recipe
from mopd.engines.interface import SamplingParams, Scores
from mopd.engines.replicas.interface import RouterLimits
from mopd.engines.replicas.router import Router
from mopd.engines.torch.engine import TorchEngine
from mopd.launch.preparing import prepare
from mopd.orchestrator.weights.sync import GroupWeightSync
from mopd.placement.groups import Groups
from mopd.placement.interface import ROLLOUT
from mopd.placement.server_group import ServerGroup
from tests.fixtures.tiny_models import VOCAB_SIZE, make_hf_model, make_tokenizer
from tests.integration.world import World

T = TypeVar("T")

LEFT, RIGHT = "teachers.left", "teachers.right"
ROUTING = {"request_timeout_s": 20.0, "max_tokens_per_request": 64, "max_inflight_tokens": 256}
LOCAL = {"type": "local", "startup_timeout_s": 90.0, "num_threads": 1}
LIMITS = RouterLimits(backoff_s=0.1, breaker_reset_s=2.0)
"""Short, as everything here fails soon; all attempts at a dead replica take longer than its death goes unnoticed."""
SAMPLING = SamplingParams(max_new_tokens=4)


def make_models(folder: Path) -> World:
    """A student and two teachers with random weights; no data."""
    world = World(folder)
    for seed, path in enumerate((world.student, *world.teachers.values())):
        make_hf_model(path, "qwen3", seed=seed, scale=0.1)
        make_tokenizer(path)
    return world


def make_recipe(world: World, folder: Path, **overrides: Any) -> Recipe:
    """The recipe of ``world`` with ``a__b=value`` for ``a.b``, short deadlines and this folder."""
    tree = world.recipe(folder / "run", **overrides)
    tree["teacher_defaults"] = {"routing": ROUTING, **tree.get("teacher_defaults", {})}
    tree["rollout"].setdefault("routing", ROUTING)
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return prepare(load_recipe(path)).recipe


def run(work: Coroutine[Any, Any, T], *, timeout_s: float = 120.0) -> T:
    """Run it on a loop of its own, with a deadline."""
    return asyncio.run(asyncio.wait_for(work, timeout_s))


class Student:
    """Stands where the trainer's student does: weights that can be published."""

    def __init__(self, folder: Path) -> None:
        self.weights = load_file(folder / "model.safetensors")
        self.sync: GroupWeightSync | None = None

    async def publish(self, version: int) -> None:
        assert self.sync is not None
        await self.sync.publish(self.weights.items(), version)


@asynccontextmanager
async def started(
    recipe: Recipe, log_dir: Path | None, only: Sequence[str] | None, student: Student | None = None
) -> AsyncIterator[tuple[Groups, dict[str, Router]]]:
    """The groups of a recipe with their routers, watched."""
    device = torch.device("cpu")
    async with Groups(recipe, log_dir=log_dir, device=device, only=only) as groups:
        routers = {
            key: Router(plan.name, groups.replicas(key), plan.group.routing, kind=plan.kind, limits=LIMITS)
            for key, plan in groups.plans.items()
        }
        sender = student if student is not None else Student(Path(recipe.student.model))
        if ROLLOUT in routers:
            sender.sync = GroupWeightSync(routers[ROLLOUT])
        groups.watch(routers, {ROLLOUT: sender.sync} if ROLLOUT in routers else {})
        yield groups, routers
        for router in routers.values():
            await router.close()


def make_samples(count: int, *, seed: int = 0) -> tuple[list[Tensor], list[int]]:
    """Sequences of 8 to 24 random tokens and their prompt lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(8, 25, (count,), generator=generator).tolist()
    return [torch.randint(3, VOCAB_SIZE, (n,), generator=generator) for n in lengths], [3] * count


def score_here(folder: Path, tokens: Sequence[Tensor], prompt_lengths: Sequence[int], *, top_k: int) -> list[Scores]:
    """Each sample alone through a plain transformers forward."""
    model = TorchEngine.from_pretrained(folder, make_engine()).model
    results = []
    for sequence, start in zip(tokens, prompt_lengths, strict=True):
        with torch.no_grad():
            logits = model(input_ids=sequence[None], use_cache=False).logits[0, start - 1 : -1]
        logprobs = logits.float().log_softmax(-1)
        top = logprobs.topk(top_k)
        own = logprobs.gather(1, sequence[start:, None])[:, 0]
        results.append(Scores(ids=top.indices.int(), logprobs=top.values, token_logprobs=own))
    return results


def make_engine() -> Any:
    from mopd.config.groups import TorchEngineConfig as Config

    return Config(dtype="float32")


def assert_same_scores(given: Sequence[Scores], expected: Sequence[Scores], *, atol: float = 1e-4) -> None:
    """Every sample once, in order, with these log-probs."""
    assert len(given) == len(expected)
    for one, other in zip(given, expected, strict=True):
        torch.testing.assert_close(one.logprobs, other.logprobs, atol=atol, rtol=0)
        torch.testing.assert_close(one.token_logprobs, other.token_logprobs, atol=atol, rtol=0)


async def until(condition: Callable[[], bool], *, timeout_s: float = 60.0) -> None:
    """Wait for a condition; ``AssertionError`` after the deadline."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        await asyncio.sleep(0.05)


def server_group(groups: Groups, key: str) -> ServerGroup:
    """A group's placement, when it is one with processes of its own."""
    placement = groups._placements[key]
    assert isinstance(placement, ServerGroup)
    return placement


def pid_of(groups: Groups, key: str, index: int) -> int:
    """Process of a replica's server."""
    pid = server_group(groups, key).pids[index]
    assert pid is not None
    return pid


def is_alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"
