"""Random tiny models, samples and layouts, each from a number alone."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mopd.conversion.models.dims import ModelDims, layout_problem
from mopd.conversion.models.reading import read_dims
from mopd.conversion.models.stages import Stages
from tests.fixtures.tiny_models import make_hf_model
from tests.parity.student.ranks import LOSSES

Case = dict[str, Any]
DENSE_FAMILIES = ("qwen3", "qwen2", "llama", "mistral")
EXPERT_FAMILIES = ("qwen3_moe", "mixtral")
LATENT_FAMILIES = ("deepseek_v2", "deepseek_v3")
KINDS = (DENSE_FAMILIES, EXPERT_FAMILIES, LATENT_FAMILIES)
MOST_RANKS = 4
BALANCES: tuple[Case, ...] = (
    {"moe_aux_loss_coeff": 0.5, "moe_z_loss_coeff": 0.05},
    {"moe_aux_loss_coeff": 0.5, "moe_router_load_balancing_type": "seq_aux_loss"},
)


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """What one number stands for."""

    model: dict[str, Any]
    """Arguments of ``make_hf_model``."""
    case: Case
    """Samples, budget and loss: the same at every layout."""
    layouts: tuple[Case, ...]
    """One or two of two ranks and one of four, of those that the model divides into."""

    def describe(self) -> str:
        return f"{self.model} {self.case} {self.layouts}"


def draw(number: int, folder: Path) -> Drawn:
    """The model is written into ``folder``."""
    chance = random.Random(number)
    model = _model(chance, KINDS[number % len(KINDS)])
    make_hf_model(folder, seed=number, **model)
    lengths = _lengths(chance)
    longest = max(prompt + response for prompt, response in lengths)
    case: Case = {
        "model": str(folder),
        "lengths": lengths,
        # Room for the padding of an odd sequence on ranks that share it.
        "max_tokens": longest + 8 + chance.randrange(60),
        "loss": chance.choice(sorted(LOSSES)),
    }
    if chance.random() < 0.3:
        case["micro_batch_size"] = chance.randint(1, len(lengths))
    if chance.random() < 0.2:
        case["ensemble"], case["loss"] = True, "default"
    if model["family"] not in DENSE_FAMILIES and chance.random() < 0.4:
        # Means over micro-batches: every layout must cut the samples alike.
        case |= {"micro_batch_size": 1, "moe": chance.choice(BALANCES)}
    case["recompute"] = chance.choice(("none", "selective", "full"))
    fitting = [layout for layout in _layouts() if _fits(layout, read_dims(folder), len(lengths))]
    few, many = ([one for one in fitting if world_size(one) == ranks] for ranks in (2, 4))
    chosen = chance.sample(few, min(2, len(few))) + chance.sample(many, min(1, len(many)))
    return Drawn(model=model, case=case, layouts=tuple(chosen))


def world_size(layout: Case) -> int:
    return int(layout["tp"] * layout["cp"] * layout["pp"] * layout["dp"])


def _model(chance: random.Random, families: tuple[str, ...]) -> dict[str, Any]:
    family = chance.choice(families)
    heads = chance.choice((1, 2, 4, 6, 8))
    num_layers = chance.randint(1, 6)
    model: dict[str, Any] = {
        "family": family,
        "num_layers": num_layers,
        "num_heads": heads,
        "num_kv_heads": chance.choice([groups for groups in range(1, heads + 1) if heads % groups == 0]),
        "hidden_size": 8 * heads * chance.randint(1, 3),
        "head_dim": chance.choice((8, 16, 24, 32)),
        "ffn_size": chance.choice((2, 16, 48, 96)),
        "vocab_size": chance.choice((47, 61, 127, 128, 129, 200, 257, 300)),
        "tie_word_embeddings": chance.random() < 0.5,
    }
    if family in EXPERT_FAMILIES + LATENT_FAMILIES:
        model |= _experts(chance, family, num_layers)
    if family in LATENT_FAMILIES:
        model["num_kv_heads"] = heads
        model |= {
            "q_lora_rank": chance.choice((None, 8, 40)), "kv_lora_rank": chance.choice((8, 24)),
            "num_key_value_heads": heads,
            "qk_nope_head_dim": chance.choice((8, 16)), "qk_rope_head_dim": chance.choice((2, 8)),
            "v_head_dim": chance.choice((8, 16, 24)),
        }  # fmt: skip
    return model


def _experts(chance: random.Random, family: str, num_layers: int) -> dict[str, Any]:
    """A token's experts, of two to eight."""
    experts = chance.choice((2, 4, 6, 8))
    chosen = chance.randint(2, experts)
    width = chance.choice((2, 16, 48))
    if family == "mixtral":
        return {"num_local_experts": experts, "num_experts_per_tok": chosen}
    if family == "qwen3_moe":
        is_normalized = chance.random() < 0.5
        return {
            "num_experts": experts, "num_experts_per_tok": chosen if is_normalized else chance.randint(1, experts),
            "norm_topk_prob": is_normalized, "moe_intermediate_size": width,
            "decoder_sparse_step": chance.choice((1, 1, 2)) if num_layers > 1 else 1,
        }  # fmt: skip
    groups = {"n_group": 1, "topk_group": 1}
    if family == "deepseek_v3" and experts == 8 and chosen >= 4 and chance.random() < 0.5:
        groups, chosen = {"n_group": 4, "topk_group": 2}, 4
    return {
        "n_routed_experts": experts, "num_experts_per_tok": chosen, "moe_intermediate_size": width,
        "n_shared_experts": chance.choice((1, 2)), "first_k_dense_replace": chance.randrange(num_layers),
        "routed_scaling_factor": chance.choice((1.0, 2.5)), **groups,
    }  # fmt: skip


def _lengths(chance: random.Random) -> list[tuple[int, int]]:
    """Tokens of prompts and responses: any, one token each, or one very long among short ones."""
    num = chance.randint(1, 12)
    kind = chance.choice(("any", "ones", "one_long"))
    longest = {"any": 20, "ones": 1, "one_long": 4}[kind]
    lengths = [(chance.randint(1, 12), chance.randint(1, longest)) for _ in range(num)]
    if kind == "one_long":
        lengths[chance.randrange(num)] = (chance.randint(1, 40), chance.randint(60, 110))
    return lengths


def _layouts() -> list[Case]:
    """All that are refused for no model, of two and four ranks."""
    found: list[Case] = []
    sizes = [
        (tp, cp, pp, dp)
        for tp in (1, 2, 4) for cp in (1, 2, 4) for pp in (1, 2, 4) for dp in (1, 2, 4)
        if tp * cp * pp * dp in (2, MOST_RANKS)
    ]  # fmt: skip
    for tp, cp, pp, dp in sizes:
        plain: Case = {"tp": tp, "cp": cp, "pp": pp, "dp": dp, "sp": False}
        own = [plain] if tp == 1 else [plain, {**plain, "sp": True}]
        own += [{**one, "vp": chunks} for one in own for chunks in (2, 3) if pp > 1]
        own += [{**one, key: n} for one in own for key in ("last_stage_layers", "first_stage_layers") for n in (1, 2)
                if pp > 1]  # fmt: skip
        own += [
            {**one, "ep": ep, "etp": etp}
            for one in own for ep in (2, 4) for etp in (1, 2)
            if etp <= tp and tp * cp * dp % (ep * etp) == 0
        ]  # fmt: skip
        found += own
    return found


def _fits(layout: Case, dims: ModelDims, num_samples: int) -> bool:
    """A run of this model and samples is not refused."""
    if (dims.moe is not None or dims.mla is not None) and layout["tp"] > 1 and not layout["sp"]:
        return False
    chunks = layout.get("vp", 1)
    if num_samples % (layout["dp"] * (layout["pp"] if chunks > 1 else 1)):
        return False
    stages = Stages(
        pipeline_model_parallel_size=layout["pp"],
        virtual_pipeline_model_parallel_size=chunks,
        num_layers_in_first_pipeline_stage=layout.get("first_stage_layers"),
        num_layers_in_last_pipeline_stage=layout.get("last_stage_layers"),
    )
    if dims.moe is None and "ep" in layout:
        return False
    return not layout_problem(dims, stages, tp=layout["tp"], ep=layout.get("ep", 1), etp=layout.get("etp"))
