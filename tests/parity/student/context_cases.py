"""What the starts of ranks in this folder do with ranks that share the tokens of each sequence: cases by name."""

from __future__ import annotations

from typing import Any

Cases = dict[str, dict[str, Any]]
CP2: dict[str, Any] = {"tp": 1, "cp": 2, "pp": 1, "dp": 1, "sp": False}
FOUR_RANK_LAYOUTS: Cases = {
    "cp4": {**CP2, "cp": 4},
    "cp2_tp2_sp": {**CP2, "tp": 2, "sp": True},
    "cp2_pp2": {**CP2, "pp": 2},
    "cp2_dp2": {**CP2, "dp": 2},
}
ON_FOUR_RANKS = {
    "cp4": ("masked_sequences/packed", "largest_tokens/packed", "sequence_mean/packed", "latent/packed"),
    "cp2_tp2_sp": ("masked_sequences/packed", "latent/packed"),
    "cp2_pp2": ("masked_sequences/padded", "latent/padded"),
    "cp2_dp2": ("largest_tokens/packed", "latent/packed"),
}
PACKING = {"packed": True, "padded": False}
_BALANCE = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.5, "moe_z_loss_coeff": 0.05}


def cases_of(layout: dict[str, Any], latent_model: str) -> Cases:
    """Losses that look at whole responses, an ensemble, and latent attention with experts whose load is balanced by
    sequence. One sample at a time leaves some ranks without a row of the loss."""
    few = {**layout, "steps": 1, "micro_batch_size": 1}
    cases: Cases = {"ensemble": {**layout, "ensemble": True, "steps": 1}}
    for form, packing in PACKING.items():
        cases |= {
            f"masked_sequences/{form}": {
                **layout, "packing": packing, "loss": "policy_gradient", "steps": 1, "logprobs": True
            },
            f"largest_tokens/{form}": {**few, "packing": packing, "loss": "task"},
            f"sequence_mean/{form}": {**few, "packing": packing, "loss": "reverse"},
            f"latent/{form}": {**few, "packing": packing, "model": latent_model, "moe": _BALANCE},
        }  # fmt: skip
    return cases


def on_one_rank(latent_model: str, one: dict[str, Any]) -> Cases:
    return {f"context/one/{name}": case for name, case in cases_of(one, latent_model).items()}


def on_two_ranks(latent_model: str) -> Cases:
    """All of them, recomputed too; traffic beside computation."""
    cases = {f"context/cp2/{name}": case for name, case in cases_of(CP2, latent_model).items()}
    whole = cases["context/cp2/masked_sequences/packed"]
    for recompute in ("selective", "full"):
        cases[f"context/cp2/masked_sequences/{recompute}"] = {**whole, "recompute": recompute}
    cases["context/cp2/overlap"] = {**CP2, "overlap": True, "bucket_size": 3000, "steps": 2}
    return cases


def on_four_ranks(latent_model: str) -> Cases:
    """Beside tensor, pipeline, data and expert parallelism, each in one form or the other."""
    cases = {
        f"context/{layout}/{name}": cases_of(FOUR_RANK_LAYOUTS[layout], latent_model)[name]
        for layout, names in ON_FOUR_RANKS.items()
        for name in names
    }
    cases["context/cp2_dp2/latent/packed"]["ep"] = 4  # the ranks of a sequence share experts too
    return cases
