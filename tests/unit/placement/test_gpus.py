"""Who gets which GPU: decided from numbers alone, with CUDA and without."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from mopd.config.groups import EngineGroupConfig, VllmEngineConfig
from mopd.config.load import load_recipe
from mopd.config.placements import ExternalConfig, InProcessConfig, LocalConfig, RayConfig
from mopd.placement import gpus
from mopd.placement.gpus import Machine, share_gpus, visible_gpus
from mopd.types import UserError


def local(*named: int, replicas: int = 1, size: int = 1) -> EngineGroupConfig:
    engine: Any = {"engine": VllmEngineConfig(type="vllm", tensor_parallel_size=size)} if size > 1 else {}
    return EngineGroupConfig(placement=LocalConfig(type="local", gpus=named), replicas=replicas, **engine)


def shared(replicas: int = 1, size: int = 1) -> EngineGroupConfig:
    engine: Any = {"engine": VllmEngineConfig(type="vllm", tensor_parallel_size=size)}
    return EngineGroupConfig(
        placement=LocalConfig(type="local", share_gpus_with="student"), replicas=replicas, **engine
    )


IN_PROCESS = EngineGroupConfig(placement=InProcessConfig())
WIDE_IN_PROCESS = EngineGroupConfig(
    placement=InProcessConfig(), engine=VllmEngineConfig(type="vllm", tensor_parallel_size=2)
)
RAY = EngineGroupConfig(placement=RayConfig(type="ray", num_gpus=1))
EXTERNAL = EngineGroupConfig(placement=ExternalConfig(type="external", urls=("http://h:1",)))


def machine(num_gpus: int, num_ranks: int = 1) -> Machine:
    return Machine(num_gpus=num_gpus, num_ranks=num_ranks)


@pytest.mark.parametrize(
    ("groups", "num_gpus", "num_ranks", "expected", "rest"),
    [
        ({"rollout": IN_PROCESS, "teachers.a": IN_PROCESS}, 1, 1, {}, ()),
        ({"rollout": IN_PROCESS, "teachers.a": local()}, 2, 1, {"teachers.a": ((1,),)}, ()),
        (
            {"rollout": local(replicas=2), "teachers.a": local()},
            4,
            1,
            {"rollout": ((1,), (2,)), "teachers.a": ((3,),)},
            (),
        ),
        ({"rollout": local(replicas=2, size=2)}, 8, 2, {"rollout": ((2, 3), (4, 5))}, (6, 7)),
        (
            {"rollout": local(), "teachers.a": local(1, 2, replicas=2)},
            4,
            1,
            {"rollout": ((3,),), "teachers.a": ((1,), (2,))},
            (),
        ),
        ({"rollout": local(3, 2, size=2)}, 4, 2, {"rollout": ((3, 2),)}, ()),
        ({"rollout": IN_PROCESS, "teachers.a": RAY, "teachers.b": local()}, 4, 1, {"teachers.b": ((1,),)}, (2, 3)),
        ({"rollout": EXTERNAL, "teachers.a": EXTERNAL}, 2, 2, {}, ()),
        ({"rollout": local()}, 1, 0, {"rollout": ((0,),)}, ()),
        (
            {"rollout": shared(2, size=2), "teachers.a": local()},
            6,
            4,
            {"rollout": ((0, 1), (2, 3)), "teachers.a": ((4,),)},
            (5,),
        ),
        ({"rollout": shared()}, 2, 0, {"rollout": ((0,),)}, (1,)),
        (
            {"rollout": WIDE_IN_PROCESS, "teachers.a": WIDE_IN_PROCESS, "teachers.b": local()},
            3,
            1,
            {"teachers.b": ((2,),)},
            (),
        ),
        # without CUDA nothing is shared out
        ({"rollout": local(replicas=3), "teachers.a": IN_PROCESS}, 0, 4, {"rollout": ((), (), ())}, ()),
        ({"rollout": RAY}, 0, 2, {}, ()),
    ],
)
def test_every_gpu_has_one_owner(
    groups: dict[str, EngineGroupConfig],
    num_gpus: int,
    num_ranks: int,
    expected: dict[str, tuple[tuple[int, ...], ...]],
    rest: tuple[int, ...],
) -> None:
    shares = share_gpus(groups, machine(num_gpus, num_ranks))
    assert (shares.groups, shares.rest) == (expected, rest)


@pytest.mark.parametrize(
    ("groups", "num_gpus", "num_ranks", "parts"),
    [
        ({"rollout": local()}, 1, 1, ["rollout.placement: 1 replicas of 1 GPUs need 1 and 0 are free", "in_process"]),
        ({"rollout": local(replicas=2, size=2)}, 4, 1, ["need 4 and 3 are free", "trainer ranks: GPU 0", "any 2 x 2"]),
        (
            {"rollout": local(), "teachers.a": local()},
            2,
            1,
            ["teachers.a.placement: ", "0 are free", "rollout: any 1 x 1"],
        ),
        ({"rollout": local(0)}, 4, 1, ["rollout.placement.gpus: GPU 0 belongs to trainer rank 0"]),
        ({"rollout": local(1)}, 4, 2, ["GPU 1 belongs to trainer rank 1"]),
        ({"rollout": local(1), "teachers.a": local(1)}, 4, 1, ["teachers.a.placement.gpus: GPU 1 belongs to rollout"]),
        ({"rollout": local(1), "teachers.a": local(2, 1, replicas=2)}, 4, 1, ["GPU 1 belongs to rollout"]),
        ({"rollout": local(4)}, 4, 1, ["GPU 4 is not there, this machine shows 4", "from 0 to 3"]),
        ({"rollout": local(0)}, 0, 1, ["rollout.placement.gpus is [0], but this machine has no CUDA device"]),
        ({"rollout": shared(2)}, 4, 1, ["rollout.placement.share_gpus_with: its replicas need 2 GPUs, and 1 of this"]),
        ({"rollout": shared(), "teachers.a": local()}, 1, 1, ["teachers.a.placement", "rollout: 1 x 1 of the ranks'"]),
        ({"rollout": IN_PROCESS}, 2, 4, ["4 trainer ranks run on this machine and each sees 2 GPUs"]),
        ({"rollout": WIDE_IN_PROCESS}, 4, 2, ["tensor_parallel_size 2 in_process: GPU 1 belongs to trainer rank 1"]),
        ({"rollout": WIDE_IN_PROCESS}, 1, 1, ["GPU 1 is not there"]),
        (
            {"rollout": WIDE_IN_PROCESS, "teachers.a": local(1)},
            4,
            1,
            ["teachers.a.placement.gpus: GPU 1 belongs to in_pro"],
        ),
        ({f"teachers.{i}": local(replicas=4) for i in range(40)}, 8, 1, ["and 33 more", "8 GPUs here"]),
    ],
)
def test_refusals_are_one_line(
    groups: dict[str, EngineGroupConfig], num_gpus: int, num_ranks: int, parts: list[str]
) -> None:
    with pytest.raises(UserError) as error:
        share_gpus(groups, machine(num_gpus, num_ranks))
    message = str(error.value)
    assert "\n" not in message and len(message) < 700
    for part in parts:
        assert part in message


def test_no_gpu_is_given_twice() -> None:
    """Over many machines and recipes: either refused, or all shares and ranks are disjoint and exist."""
    kinds = [IN_PROCESS, local(), local(replicas=2), local(size=2), local(1), local(2, 3, replicas=2), RAY, EXTERNAL]
    held = 0
    for chosen in itertools.product(kinds, repeat=3):
        groups = {"rollout": chosen[0], "teachers.a": chosen[1], "teachers.b": chosen[2]}
        for num_gpus, num_ranks in ((1, 1), (2, 2), (4, 1), (8, 2), (8, 0)):
            try:
                shares = share_gpus(groups, machine(num_gpus, num_ranks))
            except UserError:
                continue
            owned = [gpu for replicas in shares.groups.values() for own in replicas for gpu in own]
            owned += [*range(num_ranks), *shares.rest]
            assert len(owned) == len(set(owned)) and set(owned) <= set(range(num_gpus))
            held += 1
    assert held > 500


@pytest.mark.parametrize(
    ("shown", "expected"), [(None, ["1", "2"]), ("4,5,6", ["5", "6"]), ("GPU-a, GPU-b, GPU-c", ["GPU-b", "GPU-c"])]
)
def test_a_child_sees_what_this_process_counts(
    monkeypatch: pytest.MonkeyPatch, shown: str | None, expected: list[str]
) -> None:
    if shown is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert visible_gpus((1, 2)) == expected


def test_this_machine_counts_its_own_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    for name, value in (("LOCAL_WORLD_SIZE", "4"), ("LOCAL_RANK", "3"), ("RANK", "11"), ("WORLD_SIZE", "12")):
        monkeypatch.setenv(name, value)
    assert (gpus.this_machine(), gpus.local_rank()) == (machine(8, 4), 3)
    assert gpus.this_machine(num_ranks=2) == machine(8, 2)
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name)
    assert (gpus.this_machine(), gpus.local_rank()) == (machine(8, 0), None)


def test_a_recipe_is_refused_before_its_ranks_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``mopd eval`` asks for the rollout's GPUs alone."""
    file = tmp_path / "recipe.yaml"
    file.write_text(
        "run_dir: run\nstudent: {model: m, parallel: {tensor_model_parallel_size: 2}}\n"
        "teachers: {a: {model: m, domains: [x], placement: {type: local}}}\n"
        "data: {train: [t.jsonl], validation: [v.jsonl], max_prompt_length: 8}\n"
        "schedule: {steps: 1, prompts_per_step: 1}\nvalidation: {}\nrollout: {max_response_length: 8}\n"
        "rewards: {default: {type: exact_match}}\n"
    )
    loaded = load_recipe(file)
    gpus.check_gpus(loaded)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match=r"recipe.yaml: teachers.a.placement: .* trainer ranks: GPU 0, 1"):
        gpus.check_gpus(loaded)
    gpus.check_gpus(loaded, ("rollout",))
