"""Students whose updates reach engines by each way (``sending.py``): families, layouts, dtypes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.fixtures.tiny_models import make_hf_model

Cases = dict[str, dict[str, Any]]
LAYOUTS: Cases = {
    "tp2": {"tp": 2, "pp": 1, "dp": 1, "sp": True},
    "pp2": {"tp": 1, "pp": 2, "dp": 1, "sp": False},
    "dp2": {"tp": 1, "pp": 1, "dp": 2, "sp": False},
    "ep2": {"tp": 1, "pp": 1, "dp": 2, "sp": False, "ep": 2},
}
LARGE = 10_001
"""Tokens of a vocabulary whose embedding is more than one bucket."""
FAMILIES: Cases = {
    "dense": {"family": "llama", "tie_word_embeddings": False, "vocab_size": LARGE},
    "tied": {"family": "qwen3", "vocab_size": LARGE},
    "biased": {"family": "qwen2", "tie_word_embeddings": False, "hidden_size": 128},
    "experts": {"family": "qwen3_moe"},
    "mixtral": {"family": "mixtral", "tie_word_embeddings": False},
    "latent": {"family": "deepseek_v3", "tie_word_embeddings": False},
    "stacked": {"family": "gpt_oss", "tie_word_embeddings": False},
}
"""Heads of all but the latent, which vLLM refuses on a CPU, are 32 wide; the stacked one takes no updates there."""
FEW = (("tied", "pp2"), ("experts", "ep2"), ("latent", "tp2"), ("stacked", "ep2"))
"""Of every combination, those that ``make test`` runs; in fp32."""
DTYPES = {"bf16_to_fp32": ("bfloat16", "float32"), "fp32_to_bf16": ("float32", "bfloat16")}
"""Student's and rollout's."""


def make_models(folder: Path) -> dict[str, str]:
    """One of each family."""
    return {name: str(make_hf_model(folder / name, **keys)) for name, keys in FAMILIES.items()}


def case_of(model: str, layout: str, *, student: str = "float32", **sends: Any) -> dict[str, Any]:
    """``sends``: see ``run_sends``."""
    own = {"etp": 1} if Path(model).name == "stacked" else {}
    return {**LAYOUTS[layout], **own, "model": model, "dtype": student, "sends": {"dtype": "float32", **sends}}


def layouts_of(family: str) -> list[str]:
    """Experts have ranks of their own in one."""
    return [name for name in LAYOUTS if name != "ep2" or family in ("experts", "mixtral", "latent", "stacked")]


def on_two_ranks(models: dict[str, str], frozen: dict[str, Any]) -> Cases:
    """``frozen``: the case of a student with a frozen tower."""
    cases = {f"{family}/{layout}": case_of(models[family], layout) for family, layout in FEW}
    cases |= {
        name: case_of(models["dense"], "dp2", student=student, dtype=rollout)
        for name, (student, rollout) in DTYPES.items()
    }
    cases["tower"] = {**frozen, **LAYOUTS["pp2"], "sends": {"dtype": "float32", "sees": True}}
    return {f"sends/{name}": case for name, case in cases.items()}
