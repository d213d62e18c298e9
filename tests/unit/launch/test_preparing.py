"""The account of node 0's recipe, as the ranks of every node get it."""

from __future__ import annotations

import dataclasses
import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import repeat
from pathlib import Path

import pytest
import torch

from mopd.base.hardware import node_name
from mopd.base.types import UserError
from mopd.config.load import Loaded, dump, load_recipe
from mopd.launch import sharing
from mopd.launch.failure import LAUNCH_DIR
from mopd.launch.leading import mark_start, require_shared
from mopd.launch.node import Place, compared_environment
from mopd.launch.nodes import NodeLostError, Nodes
from mopd.launch.preparing import agreed, for_ranks
from tests.fixtures.ports import free_port
from tests.fixtures.whole_recipe import WHOLE_RECIPE


@pytest.fixture
def loaded(tmp_path: Path) -> Loaded:
    path = tmp_path / "recipe.yaml"
    path.write_text(WHOLE_RECIPE)
    return load_recipe(path, ["seed=8"])


def refuse() -> Loaded:
    raise AssertionError("a rank does not read the recipe again")


def in_rank_of(folder: Path, text: str, patch: pytest.MonkeyPatch) -> Loaded:
    sharing.to_ranks(folder, text)
    own = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "one"}
    for name, value in (own | {LAUNCH_DIR: str(folder)}).items():
        patch.setenv(name, value)
    return agreed(refuse, "train")


def test_a_rank_gets_every_value_with_its_origin(
    loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file may be gone or edited by then; what a machine's ``auto`` was stays decided."""
    told = for_ranks(loaded.settled(loaded.recipe, {"student.dtype": "CUDA"}))
    Path(loaded.path).unlink()
    found = in_rank_of(tmp_path, told, monkeypatch)
    assert found.recipe == found.named == loaded.recipe
    assert dump(found) == dump(loaded.settled(loaded.recipe, {"student.dtype": "CUDA"}))
    assert found.where("seed") == loaded.where("seed") and found.sources == loaded.sources


def test_names_of_the_hub_stay_names_beside_their_folders(
    loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, commits = loaded.recipe.student.model, {"student.model": "org/student@0123"}
    fetched = dataclasses.replace(loaded, located={model: ["/cache/student"]}, commits=commits)
    found = in_rank_of(tmp_path, for_ranks(fetched), monkeypatch)
    assert found.recipe.student.model == "/cache/student" and found.named == loaded.recipe
    assert found.commits == commits and found.located == {model: ["/cache/student"]}
    assert json.loads(for_ranks(found)) == json.loads(for_ranks(fetched))


COMPARED = """NVTE_FUSED_ATTN OMP_NUM_THREADS OMP_DYNAMIC NVIDIA_TF32_OVERRIDE TORCH_ALLOW_TF32_CUBLAS_OVERRIDE
    CUBLAS_WORKSPACE_CONFIG NCCL_ALGO NCCL_P2P_DISABLE NCCL_NVLS_ENABLE NCCL_CTA_POLICY TORCH_COMPILE_DISABLE
    TORCH_DISTRIBUTED_DEBUG TORCH_NCCL_BLOCKING_WAIT TORCH_JIT_DISABLE_NEW_EXECUTOR TORCH_BLAS_PREFER_CUBLASLT
    PYTORCH_JIT PYTORCH_TUNABLEOP_TUNING DISABLE_FLASH_ATTN FLASH_ATTENTION_DETERMINISTIC FLASH_ATTN_CUDA_ARCHS
    USE_TRITON_FLASH_ATTENTION ENABLE_PERSISTENT_TMA_MATMUL XFORMERS_FORCE_DISABLE_TRITON KMP_DETERMINISTIC_REDUCTION
    MKL_CBWR UB_SKIPMC"""
LEFT_OUT = """CUDA_VISIBLE_DEVICES NCCL_SOCKET_IFNAME TRITON_CACHE_DIR NVTE_DEBUG_LEVEL OMP_PLACES NCCL_IB_HCA
    NCCL_TOPO_FILE NCCL_DEBUG TORCH_HOME TORCH_EXTENSIONS_DIR TORCH_NCCL_TRACE_BUFFER_SIZE
    TORCH_NCCL_DEBUG_INFO_TEMP_FILE PYTORCH_KERNEL_CACHE_PATH PYTORCH_TUNABLEOP_FILENAME USER TORCH_LOGS
    HOME"""


@pytest.mark.parametrize(("names", "is_compared"), [(COMPARED, True), (LEFT_OUT, False)])
def test_variables_that_decide_numbers(names: str, is_compared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in names.split():
        monkeypatch.setenv(name, "1")
        assert (name in compared_environment()) == is_compared, name


def test_what_our_launcher_sets_counts_as_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a rank it is set or not; in a container of enroot, which sets RANK too, the launcher is still to set it."""
    for name in ("TORCHELASTIC_RUN_ID", "CUDA_DEVICE_MAX_CONNECTIONS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert compared_environment()["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in compared_environment()


SMALL = """\
run_dir: run
student: {model: student, parallel: {data_parallel_size: 2}}
teachers: {one: {model: ./student, domains: [math]}}
data: {train: [train.jsonl]}
schedule: {steps: 3, prompts_per_step: 4}
"""


@dataclasses.dataclass
class OneNode:
    """A launcher in a thread, and what is its own."""

    command: str = "train"
    options: dict[str, str] = dataclasses.field(default_factory=dict)
    gpu: str = "H100"

    def agree(self, place: Place, path: Path, agreed_all: threading.Barrier) -> Loaded | str:
        """The recipe, or the line of the error. The store goes with node 0's launcher."""
        GPU.name = self.gpu
        try:
            with Nodes(place) as nodes:
                nodes.join()
                found = agreed(partial(load_recipe, path), self.command, self.options, nodes=nodes)
                agreed_all.wait(DEADLINE_S)
                return found
        except (UserError, NodeLostError) as error:
            return str(error)


GPU = threading.local()
DEADLINE_S = 240.0


def agree(first: OneNode, second: OneNode, folder: Path, patch: pytest.MonkeyPatch) -> list[Loaded | str]:
    """What comes of the two launchers, in one process and on one disk."""
    patch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    patch.chdir(folder)
    patch.setattr(torch.cuda, "device_count", lambda: 8)
    patch.setattr(torch.cuda, "get_device_name", lambda number: GPU.name)
    path, port = folder / "recipe.yaml", free_port()
    path.write_text(SMALL)
    with ThreadPoolExecutor(2) as pool:
        places = [Place(num_nodes=2, node_rank=number, port=port) for number in (0, 1)]
        return list(pool.map(OneNode.agree, (first, second), places, repeat(path), repeat(threading.Barrier(2))))


def test_nodes_that_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"--checkpoint": "run/checkpoints/step_1"}
    one, other = agree(OneNode("eval", options), OneNode("eval", options), tmp_path, monkeypatch)
    assert isinstance(one, Loaded) and isinstance(other, Loaded) and one.recipe == other.recipe


@pytest.mark.parametrize(
    ("first", "second", "line"),
    [
        (
            OneNode(),
            OneNode(gpu="A100"),
            "the ranks' GPU is A100 on {} and H100 on {}: start the ranks on nodes with one kind of GPU",
        ),
        (
            OneNode("eval", {"--model": "a"}),
            OneNode("eval", {"--checkpoint": "a"}),
            '--model is absent on {} and "a" on {} (and 1 more differences): '
            "start every node with the same command and options",
        ),
        (
            OneNode("train"),
            OneNode("check"),
            "the command is check on {} and train on {}: start every node with the same command and options",
        ),
    ],
    ids=["GPUs", "model and checkpoint", "commands"],
)
def test_nodes_that_differ(
    first: OneNode, second: OneNode, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, there = agree(first, second, tmp_path, monkeypatch)
    assert there == line.format(*(f"node {number} ({node_name()})" for number in (1, 0)))


def test_a_run_folder_that_a_node_does_not_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of its own with logs of former starts is none either."""
    monkeypatch.setattr("mopd.launch.leading.SEEN_S", 0.0)
    first, other = tmp_path / "run" / "logs" / "node-0", tmp_path / "own" / "logs" / "node-1"
    first.mkdir(parents=True)
    mark = mark_start(first)
    told = r"^run_dir: '.*/own/logs/node-0/\.start' is not there on node-1 as rank 0 has written it: "
    with pytest.raises(UserError, match=told):
        require_shared(other, mark)
    shutil.copytree(tmp_path / "run", tmp_path / "own")
    require_shared(other, mark)
    mark = mark_start(first)
    with pytest.raises(UserError, match=told):
        require_shared(other, mark)
    require_shared(first.parent / "node-1", mark)
    require_shared(None, None)
