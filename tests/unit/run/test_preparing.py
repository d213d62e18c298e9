"""The account of node 0's recipe, as the ranks of every node get it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from mopd.config.load import Loaded, dump, load_recipe
from mopd.launch import sharing
from mopd.launch.failure import LAUNCH_DIR
from mopd.launch.node import compared_environment
from mopd.run.leading import require_shared
from mopd.run.preparing import agreed, for_ranks
from mopd.types import UserError
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
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", LAUNCH_DIR: str(folder)}.items():
        patch.setenv(name, value)
    return agreed(refuse)


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


@pytest.mark.parametrize(
    ("name", "is_compared"),
    [
        ("NVTE_FUSED_ATTN", True),
        ("OMP_NUM_THREADS", True),
        ("NVIDIA_TF32_OVERRIDE", True),
        ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", True),
        ("CUBLAS_WORKSPACE_CONFIG", True),
        ("NCCL_ALGO", True),
        ("NCCL_P2P_DISABLE", True),
        ("NCCL_NVLS_ENABLE", True),
        ("NCCL_CTA_POLICY", True),
        ("TORCH_COMPILE_DISABLE", True),
        ("TORCH_DISTRIBUTED_DEBUG", True),
        ("TORCH_NCCL_BLOCKING_WAIT", True),
        ("TORCH_NCCL_HIGH_PRIORITY", True),
        ("TORCH_JIT_DISABLE_NEW_EXECUTOR", True),
        ("TORCH_BLAS_PREFER_CUBLASLT", True),
        ("PYTORCH_JIT", True),
        ("PYTORCH_TUNABLEOP_ENABLED", True),
        ("PYTORCH_TUNABLEOP_TUNING", True),
        ("DISABLE_FLASH_ATTN", True),
        ("FLASH_ATTENTION_DETERMINISTIC", True),
        ("FLASH_ATTN_CUDA_ARCHS", True),
        ("USE_TRITON_FLASH_ATTENTION", True),
        ("ENABLE_PERSISTENT_TMA_MATMUL", True),
        ("XFORMERS_FORCE_DISABLE_TRITON", True),
        ("KMP_DETERMINISTIC_REDUCTION", True),
        ("MKL_CBWR", True),
        ("OMP_DYNAMIC", True),
        ("UB_SKIPMC", True),
        ("CUDA_VISIBLE_DEVICES", False),
        ("NCCL_SOCKET_IFNAME", False),
        ("TRITON_CACHE_DIR", False),
        ("NVTE_DEBUG_LEVEL", False),
        ("OMP_PLACES", False),
        ("NCCL_IB_HCA", False),
        ("NCCL_TOPO_FILE", False),
        ("NCCL_DEBUG", False),
        ("TORCH_HOME", False),
        ("TORCH_EXTENSIONS_DIR", False),
        ("TORCH_NCCL_TRACE_BUFFER_SIZE", False),
        ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", False),
        ("PYTORCH_KERNEL_CACHE_PATH", False),
        ("PYTORCH_TUNABLEOP_FILENAME", False),
        ("USER", False),
        ("TORCH_LOGS", False),
        ("HOME", False),
    ],
)
def test_variables_that_decide_numbers(name: str, is_compared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    assert (name in compared_environment()) == is_compared


def test_what_our_launcher_sets_counts_as_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "CUDA_DEVICE_MAX_CONNECTIONS"):
        monkeypatch.delenv(name, raising=False)
    assert compared_environment()["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in compared_environment()


def test_a_run_folder_that_a_node_does_not_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mopd.run.leading.SEEN_S", 0.0)
    logs = tmp_path / "run" / "logs" / "node-1"
    with pytest.raises(
        UserError, match=r"run_dir: .*/run/logs/node-0/rank_0.log', which rank 0 has made, is not there on"
    ):
        require_shared(logs, "node-0/rank_0.log")
    (logs.parent / "node-0").mkdir(parents=True)
    (logs.parent / "node-0" / "rank_0.log").touch()
    require_shared(logs, "node-0/rank_0.log")
    require_shared(None, None)
