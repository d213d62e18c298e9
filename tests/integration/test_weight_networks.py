"""Weights of a student in one network to engines in another: two namespaces of this machine, joined by one link.

Neither side reaches the other's loopback interface, so that whatever names 127.0.0.1 where it should not fails here.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shutil
from pathlib import Path

import pytest

from mopd.config.groups import TorchEngineConfig, VllmEngineConfig
from tests.fixtures.networks import can_make_networks, two_networks, within
from tests.fixtures.servers import engine_file
from tests.fixtures.warm import cold
from tests.integration.far_servers import TOKEN, far_servers
from tests.integration.world import mopd
from tests.parity.student.harness import run_ranks
from tests.parity.student.sending import NUM_VERSIONS, NUM_WAYS
from tests.parity.student.test_weights import IS_WHOLE, check
from tests.parity.student.weight_cases import case_of, make_models

pytestmark = [
    pytest.mark.slow,
    pytest.mark.multirank,
    pytest.mark.skipif(not can_make_networks(), reason="needs root, ip and iptables, to make networks"),
]
TORCH = TorchEngineConfig(dtype="float32")
ENGINES: tuple[TorchEngineConfig | VllmEngineConfig, ...] = (TORCH,)
LAYOUTS: tuple[str, ...] = ("pp2",)
if IS_WHOLE:
    LAYOUTS = ("tp2", "pp2", "ep2")
    if importlib.util.find_spec("vllm"):
        from tests.integration.test_server_vllm import CFG  # its module needs vLLM

        ENGINES = (TORCH, CFG, dataclasses.replace(CFG, tensor_parallel_size=2))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_student_answers_in_another_network(tmp_path: Path) -> None:
    """Two ranks to engines of every kind at once, which then score as the student does, and as after HTTP: by layers
    to torch, and under ``make weights`` by tensors and by experts too, to vLLM of one worker and of two."""
    model = make_models(tmp_path)["experts"]
    files = [
        engine_file(Path(model), "rollout", engine=engine, replica=number, startup_timeout_s=300.0)
        for number, engine in enumerate(ENGINES)
    ]
    with two_networks() as (near, far), far_servers(far, tmp_path / "servers", files) as servers:
        cases = {
            layout: case_of(model, layout, urls=servers.urls, token=TOKEN, first=NUM_WAYS * NUM_VERSIONS * number)
            for number, layout in enumerate(LAYOUTS)
        }
        job = {"model": model, "cases": cases}
        found = run_ranks(2, job, tmp_path / "ranks", timeout_s=850, within=within(near))
    for layout, one in found.items():
        print(f"{layout} to {len(ENGINES)} engines in another network: {one['apart']:.1e}")
        check(one)


@pytest.mark.skipif(not IS_WHOLE, reason="make weights")
@pytest.mark.skipif(shutil.which("tc") is None, reason="needs tc, to give a link a rate")
def test_the_benchmark_over_a_link() -> None:
    """Whatever the times are: nothing is faster than the link, and no goal has HTTP in it."""
    with cold():  # a fork of another process would be in that one's network
        done = mopd("bench", "weights", "--link", "100", "--mb", "12", "--replicas", "1", "--rounds", "1", "--json")
    assert done.returncode in (0, 1), done.stderr
    told = json.loads(done.stdout)
    (part,) = told["parts"]
    assert part["link_mbit"] == 100
    seconds = {row["name"]: row["median_s"] for row in part["rows"]}
    assert seconds.keys() == {"link", "collective", "http"} and seconds["link"] < min(seconds.values()) * 1.001
    assert {name.split("/")[-1] for name in told["goals"]} == {"of_link", "extra_buckets"}
