"""One start of 2, 4 and 1 ranks each serves the tests of this folder; checkpoints and experts have their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.tiny_models import make_hf_model
from tests.parity.student import context_cases, vision_cases, weight_cases
from tests.parity.student.harness import run_ranks

Results = dict[str, Any]

TWO_RANK_LAYOUTS = {
    "tp2": {"tp": 2, "pp": 1, "dp": 1, "sp": False},
    "tp2_sp": {"tp": 2, "pp": 1, "dp": 1, "sp": True},
    "pp2": {"tp": 1, "pp": 2, "dp": 1, "sp": False},
    "dp2": {"tp": 1, "pp": 1, "dp": 2, "sp": False},
}
FOUR_RANK_LAYOUTS = {
    "tp2_pp2": {"tp": 2, "pp": 2, "dp": 1, "sp": False},
    "tp2_sp_dp2": {"tp": 2, "pp": 1, "dp": 2, "sp": True},
    "pp2_dp2": {"tp": 1, "pp": 2, "dp": 2, "sp": False},
}
PIPELINES = {
    "vp4": {**TWO_RANK_LAYOUTS["pp2"], "vp": 4},
    "vp2_last": {**TWO_RANK_LAYOUTS["pp2"], "vp": 2, "last_stage_layers": 2},
}
"""Of a model of 8 layers: one in each of 8 chunks; stages of 6 and 2, each in 2 chunks."""
ONE = {"tp": 1, "pp": 1, "dp": 1, "sp": False}
SIZES = [
    *(("one", size) for size in (1, 2, 8)),
    *(("tp2", 2), ("tp2_sp", 1), ("pp2", 1), ("pp2", 8), ("dp2", 2)),
    *(("tp2_pp2", 1), ("tp2_sp_dp2", 2), ("pp2_dp2", 8)),
]
"""Layouts, and the micro-batch sizes that each is tried at."""
_FULL = {"recompute_granularity": "full", "recompute_num_layers": 1}
OVERRIDES: dict[str, Results] = {
    "tp2/matmul": {"disable_bf16_reduced_precision_matmul": True},
    "tp2/deterministic": {"deterministic_mode": True},
    "tp2_sp/embedding": {"clone_scatter_output_in_embedding": False},
    "tp2/distributed": {**_FULL, "recompute_method": "uniform", "distribute_saved_activations": True},
    "tp2/block": {**_FULL, "recompute_method": "block"},
    "tp2/modules": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
    "pp2/p2p": {"batch_p2p_comm": False},
    "pp2/p2p_sync": {"batch_p2p_sync": False},
}
"""Layout / name -> ``student.megatron_overrides``: every field that is allowed without TransformerEngine."""
OVERLAP: Results = {"overlap": True, "bucket_size": 3000}
"""Buckets so small that each layer's gradients travel alone."""
WIDE_PIPELINES = {
    "pp4_vp2": {"tp": 1, "pp": 4, "vp": 2, "dp": 1, "sp": False, "micro_batch_size": 4},
    "tp2_sp_vp2_last": {**FOUR_RANK_LAYOUTS["tp2_pp2"], "sp": True, "vp": 2, "last_stage_layers": 2},
    "vp4_dp2_overlap": {**FOUR_RANK_LAYOUTS["pp2_dp2"], "vp": 4, **OVERLAP},
    "vp2_cp2": {**TWO_RANK_LAYOUTS["pp2"], "vp": 2, "cp": 2, "micro_batch_size": 4},
}
ENSEMBLES = {"ensemble": "default", "ensemble_k2": "k2"}
"""Cases in which one domain has two teachers, with their losses."""
HEAD_CASES = {
    "one": [
        *((loss, "tied") for loss in ("default", "k2", "policy_gradient", "task", "ensemble")),
        ("default", "untied"),
    ],
    **{name: [("policy_gradient", "tied"), ("default", "untied")] for name in ("tp2", "tp2_sp")},
    **{name: [("policy_gradient", "tied")] for name in ("pp2", "dp2")},
}
"""Loss, and whether the embeddings are tied, by layout."""
PACKING = (True, False)
SUPERVISED: Results = {"objective": "sft_on_teacher", "steps": 1}
WARM_UP: Results = {"warm_up": 2, "steps": 4}
WARMED = {
    "tp2_plain": {**TWO_RANK_LAYOUTS["tp2"], "distributed_optimizer": False},
    "pp2": TWO_RANK_LAYOUTS["pp2"],
    "dp2_overlap": {**TWO_RANK_LAYOUTS["dp2"], **OVERLAP},
    "dp2_offload": {**TWO_RANK_LAYOUTS["dp2"], "offload": 0.5},
}
"""Layouts that a warm-up is tried at; experts' are in ``test_moe.py``."""
OTHER_LOSSES = (
    "reverse",
    "jsd",
    "k2",
    "policy_gradient",
    "domain_budget",
    "domain_mean",
    "task",
    "largest",
    "sampled_tail",
    "chunks",
)
TRIED_LOSSES = [
    *(("tp2", loss) for loss in (*OTHER_LOSSES, *ENSEMBLES)),
    *(("pp2", loss) for loss in ("task", "domain_mean", "ensemble_k2", "chunks")),
    *(
        ("dp2", loss)
        for loss in ("reverse", "policy_gradient", "domain_budget", "domain_mean", "largest", "ensemble", "chunks")
    ),
]
"""Vocabularies in parts meet every loss; a last stage, and batches in parts, those that look beyond a token."""
TIMEOUT_S = 3600


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test that needs a start of ranks waits for it; each start has a deadline of its own."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session")
def student_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything of this folder's jobs: checkpoints in and out."""
    return tmp_path_factory.mktemp("student")


@pytest.fixture(scope="session")
def hf_model(student_folder: Path) -> Path:
    """The checkpoint that every layout starts from: Qwen3, tied embeddings, an odd vocabulary."""
    return make_hf_model(student_folder / "hf", "qwen3")


@pytest.fixture(scope="session")
def untied_model(student_folder: Path) -> Path:
    """Qwen2: biases and an output layer of its own."""
    return make_hf_model(student_folder / "hf_untied", "qwen2", seed=1, tie_word_embeddings=False)


@pytest.fixture(scope="session")
def deep_model(student_folder: Path) -> str:
    """Eight layers, tied embeddings."""
    return str(make_hf_model(student_folder / "hf_deep", "qwen3", num_layers=8))


@pytest.fixture(scope="session")
def latent_model(student_folder: Path) -> str:
    """Latent attention, experts in the second of two layers."""
    return str(make_hf_model(student_folder / "hf_latent", "deepseek_v3"))


@pytest.fixture(scope="session")
def vision_folder(student_folder: Path) -> Path:
    """Models that see images, and a data file that has some."""
    return vision_cases.make_vision_inputs(student_folder / "vision")


def _packing(layout: Results, on: bool) -> Results:
    """A loss that looks at whole responses and weighs them by their lengths."""
    return {**layout, "loss": "policy_gradient", "packing": on, "logprobs": True, "steps": 1}


def _ensemble(case: str) -> Results:
    return {"ensemble": True, "loss": ENSEMBLES[case], "steps": 1}


@pytest.fixture(scope="session")
def wide_models(student_folder: Path) -> dict[str, str]:
    """A vocabulary so large that the logits of a few samples pass a budget of 1 MiB on each of two ranks."""
    return {
        name: str(
            make_hf_model(student_folder / f"hf_wide_{name}", "qwen3", vocab_size=16_001, tie_word_embeddings=tied)
        )
        for name, tied in (("tied", True), ("untied", False))
    }


def _head_cases(layouts: dict[str, Results], models: dict[str, str], head_mib: int) -> dict[str, Results]:
    """Top-k and sampled losses and an ensemble on a large vocabulary with tied embeddings, and one without."""
    own = {"head_mib": head_mib, "micro_batch_size": 8, "steps": 1}
    return {
        f"{name}/wide/{loss}/{tied}": {
            **layout, "model": models[tied], **own, **(_ensemble(loss) if loss in ENSEMBLES else {"loss": loss})
        }
        for name, layout in layouts.items()
        for loss, tied in HEAD_CASES.get(name, HEAD_CASES["one"])
    }  # fmt: skip


def _size_cases(layouts: dict[str, Results]) -> dict[str, Results]:
    return {
        f"{name}/mbs{size}": {**layouts[name], "micro_batch_size": size, "steps": 1}
        for name, size in SIZES
        if name in layouts
    }


@pytest.fixture(scope="session")
def saved_ranks(hf_model: Path, deep_model: str, student_folder: Path) -> Results:
    """Checkpoints of two ranks, at their own layout and at others. ``make parity`` tries every pair of layouts."""
    tp2, _, pp2, dp2 = TWO_RANK_LAYOUTS.values()
    plain, twice = {"distributed_optimizer": False}, {"steps": 2, "steps_after": 2}
    deep = {"model": deep_model, "micro_batch_size": 8, "steps": 1, "steps_after": 1}  # as many as stages
    saved = {
        "tp2": {**tp2, **twice},
        "tp2_plain": {**tp2, **twice, **plain},
        "tp2_waiting": {**tp2, **twice, "async": False},
        "tp2_bf16_offload": {**tp2, **twice, "dtype": "bfloat16", "offload": 1.0},
        "dp2_overlap": {**dp2, **twice, **OVERLAP},
        "vp4": {**PIPELINES["vp4"], **deep},
        "cp2": {**context_cases.CP2, **twice},
        "tp2_warm_up": {**tp2, "warm_up": 2, "steps": 1, "steps_after": 3},
        "dp2_warm_up": {**dp2, **OVERLAP, "warm_up": 2, **twice},
        "dp2_offload_warm_up": {**dp2, "offload": 0.5, "warm_up": 2, "steps": 3, "steps_after": 2},
    }
    loaded = {f"{name}/{name}": case for name, case in saved.items()} | {
        "tp2/pp2": {**pp2, **twice},
        "tp2/dp2_offload": {**dp2, **twice, "offload": 0.5},
        "dp2_overlap/tp2": {**tp2, **twice},
        "tp2_plain/pp2_plain": {**pp2, **twice, **plain},
        "vp4/vp2_last": {**PIPELINES["vp2_last"], **deep},
        "cp2/tp2": {**tp2, **twice},
    }
    cases = {f"save/{name}": {**case, "save": str(student_folder / f"saved_{name}")} for name, case in saved.items()}
    for name, case in loaded.items():
        source = str(student_folder / f"saved_{name.split('/')[0]}")
        cases[f"load/{name}"] = {**case, "steps": 0, "load": source}
    cases["tp2/save_hf"] = {**tp2, "steps": 1, "save_hf": str(student_folder / "exported"), "refused_saves": True}
    return run_ranks(2, {"model": str(hf_model), "cases": cases}, student_folder / "saving")


@pytest.fixture(scope="session")
def two_ranks(
    hf_model: Path,
    untied_model: Path,
    deep_model: str,
    latent_model: str,
    wide_models: dict[str, str],
    student_folder: Path,
    vision_folder: Path,
) -> Results:
    tp2, tp2_sp, _, dp2 = TWO_RANK_LAYOUTS.values()
    cases = _size_cases(TWO_RANK_LAYOUTS)
    cases |= {
        f"{name}/packing/{on}": _packing(layout, on) for name, layout in TWO_RANK_LAYOUTS.items() for on in PACKING
    }
    for name, loss in TRIED_LOSSES:
        own = _ensemble(loss) if loss in ENSEMBLES else {"loss": loss, "steps": 1}
        cases[f"{name}/{loss}"] = {**TWO_RANK_LAYOUTS[name], **own}
    for name in ("tp2", "pp2", "dp2"):
        layout = TWO_RANK_LAYOUTS[name]
        cases[f"{name}/untied"] = {**layout, "model": str(untied_model), "steps": 1, "logprobs": True}
        cases[f"{name}/logprobs"] = {**layout, "logprobs": True}
        cases[f"{name}/supervised"] = {**layout, **SUPERVISED}
    cases |= {f"{name}/warm_up": {**layout, **WARM_UP} for name, layout in WARMED.items()}
    untied_steps = {**dp2, "model": str(untied_model), "micro_batch_size": 2, "steps": 3}
    cases |= {"dp2/steps": untied_steps, "dp2/steps/overlap": {**untied_steps, **OVERLAP, "logprobs": True}}
    cases["dp2/steps/offload"] = {**untied_steps, **OVERLAP, "offload": 1.0}
    cases |= {f"{name}/cosine": {**one, "cosine_every": 1, "steps": 1} for name, one in TWO_RANK_LAYOUTS.items()}
    cases["tp2_sp/recompute_full"] = {**tp2_sp, "recompute": "full", "steps": 1}
    cases["tp2/recompute_selective"] = {**tp2, "recompute": "selective", "steps": 1}
    for name, overrides in OVERRIDES.items():
        layout = TWO_RANK_LAYOUTS[name.split("/")[0]]
        cases[f"override/{name}"] = {**layout, "overrides": overrides, "steps": 1}
    cases |= _head_cases(TWO_RANK_LAYOUTS, wide_models, head_mib=1)
    for name in ("tp2", "pp2", "dp2"):
        cases[f"poison/{name}"] = {**TWO_RANK_LAYOUTS[name], "poison": True}
    once = {"model": deep_model, "steps": 1, "logprobs": True}
    cases |= {f"{name}/deep": {**layout, **once} for name, layout in PIPELINES.items()}
    cases |= vision_cases.on_two_ranks(vision_folder, {**TWO_RANK_LAYOUTS, "cp2": context_cases.CP2})
    cases |= context_cases.on_two_ranks(latent_model)
    frozen = cases["vision/qwen2_5_vl/pp2"]
    cases |= weight_cases.on_two_ranks(weight_cases.make_models(student_folder / "sent"), frozen)
    return run_ranks(2, {"model": str(hf_model), "cases": cases}, student_folder / "two")


@pytest.fixture(scope="session")
def four_ranks(
    hf_model: Path, deep_model: str, latent_model: str, student_folder: Path, vision_folder: Path
) -> Results:
    cases = _size_cases(FOUR_RANK_LAYOUTS) | vision_cases.on_four_ranks(vision_folder, FOUR_RANK_LAYOUTS)
    cases |= context_cases.on_four_ranks(latent_model)
    cases |= {f"{name}/deep": {**one, "model": deep_model, "steps": 2} for name, one in WIDE_PIPELINES.items()}
    cases |= {
        f"{name}/overlap": {**FOUR_RANK_LAYOUTS[name], **OVERLAP, "steps": 2} for name in ("tp2_sp_dp2", "pp2_dp2")
    }
    return run_ranks(4, {"model": str(hf_model), "cases": cases}, student_folder / "four")


@pytest.fixture(scope="session")
def one_rank(
    hf_model: Path,
    untied_model: Path,
    deep_model: str,
    latent_model: str,
    wide_models: dict[str, str],
    student_folder: Path,
    vision_folder: Path,
) -> Results:
    cases = _size_cases({"one": ONE}) | vision_cases.on_one_rank(vision_folder, ONE)
    cases |= _head_cases({"one": ONE}, wide_models, head_mib=1024) | _head_cases(
        {"small": ONE}, wide_models, head_mib=1
    )
    cases |= {f"one/packing/{on}": _packing(ONE, on) for on in PACKING}
    cases |= context_cases.on_one_rank(latent_model, ONE)
    cases["one/budget"] = {**ONE, "steps": 1}
    cases |= {f"one/{loss}": {**ONE, "loss": loss, "steps": 1} for loss in OTHER_LOSSES}
    cases |= {f"one/{case}": {**ONE, **_ensemble(case)} for case in ENSEMBLES}
    cases["one/cosine"] = {**ONE, "cosine_every": 1, "steps": 1}
    cases["one/untied"] = {**ONE, "model": str(untied_model), "steps": 1, "logprobs": True}
    cases["one/logprobs"] = {**ONE, "logprobs": True}
    cases["one/supervised"] = {**ONE, **SUPERVISED}
    cases["one/warm_up"] = {**ONE, **WARM_UP}
    cases["one/deep"] = {**ONE, "model": deep_model, "steps": 2, "logprobs": True}
    return run_ranks(1, {"model": str(hf_model), "cases": cases}, student_folder / "one")
