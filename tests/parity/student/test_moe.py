"""A student with experts: layouts, balance of the load, checkpoints.

Invariant: one checkpoint and one batch give the same loss, gradient norm and metrics (1e-5 relative, fp32) on one rank,
with EP2, TP2+SP with experts split by rows or by number, PP2 (interleaved and uneven too), DP2, and on four ranks mixes
of these, for every family with experts (PP2 gives DeepSeek a stage without any); and the numbers are right: log-probs
and gradient norm equal those of transformers' own model. The balancing losses are means over micro-batches: equal over
layouts that cut the batch alike, packed or with padding, with recompute, and equal to their definitions, evaluated on
transformers' router logits. With replayed routes all equals transformers' model whose routers are made to choose alike.
Not exercised: CUDA; grouped products and the all-to-all dispatcher
(``test_transformer_engine.py``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.fixtures.tiny_models import make_hf_model
from tests.parity.student.balancing import Forced, by_definition
from tests.parity.student.conftest import OVERLAP, WARM_UP
from tests.parity.student.harness import run_ranks
from tests.parity.student.samples import DOMAINS, make_samples
from tests.parity.student.test_layouts import assert_logprobs, assert_same_step

pytestmark = [pytest.mark.multirank, pytest.mark.slow]

Results = dict[str, Any]
ONE = {"tp": 1, "pp": 1, "dp": 1, "sp": False}
TWO_RANK_LAYOUTS = {
    "ep2": {"tp": 1, "pp": 1, "dp": 2, "sp": False, "ep": 2},
    "tp2_sp": {"tp": 2, "pp": 1, "dp": 1, "sp": True},
    "tp2_sp_etp1": {"tp": 2, "pp": 1, "dp": 1, "sp": True, "ep": 1, "etp": 1},
    "tp2_sp_ep2": {"tp": 2, "pp": 1, "dp": 1, "sp": True, "ep": 2, "etp": 1},
    "pp2": {"tp": 1, "pp": 2, "dp": 1, "sp": False},
    "dp2": {"tp": 1, "pp": 1, "dp": 2, "sp": False},
}
FOUR_RANK_LAYOUTS = {
    "tp2_sp_pp2_ep2": {"tp": 2, "pp": 2, "dp": 1, "sp": True, "ep": 2, "etp": 1},
    "tp2_sp_dp2_ep2": {"tp": 2, "pp": 1, "dp": 2, "sp": True, "ep": 2},
}
PIPELINES = {"vp2": {**TWO_RANK_LAYOUTS["pp2"], "vp": 2}, "last": {**TWO_RANK_LAYOUTS["pp2"], "last_stage_layers": 1}}
"""Of models of 4 layers."""
DEEP = {"qwen3_moe": "vp2", "deepseek_v3": "vp2", "mixtral": "last"}
"""Families, and the pipeline that each is tried in; DeepSeek's first layer is dense."""
FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3")
TRIED = [
    *((layout, "deepseek_v3") for layout in TWO_RANK_LAYOUTS),
    *(("tp2_sp", "qwen3_moe"), ("tp2_sp_ep2", "mixtral"), ("pp2", "deepseek_v2")),
    *(("tp2_sp_pp2_ep2", "deepseek_v3"), ("tp2_sp_dp2_ep2", "qwen3_moe")),
]
"""Layouts and families that are held against one rank; Qwen's gradient norm at each layout against the definition
(``both``). ``make parity`` draws others."""
BALANCE = {
    "aux_loss": {"moe_aux_loss_coeff": 0.5},
    "seq_aux_loss": {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.5},
    "global_aux_loss": {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.5},
    "z_loss": {"moe_z_loss_coeff": 0.05},
}
BOTH = {"moe_aux_loss_coeff": 0.5, "moe_z_loss_coeff": 0.05}
SIZE = 3
"""Samples of a micro-batch at most; of 16 some micro-batches get 2, so that ranks that share experts fill them up with
a sequence of padding."""
PADDED: Results = {"micro_batch_size": SIZE, "packing": False}
PADDED_LAYOUTS = ("ep2", "tp2_sp", "pp2")
PADDED_CASES = ("ep2/deepseek_v3", "tp2_sp/qwen3_moe", "pp2/deepseek_v3")
_FULL: Results = {"recompute_granularity": "full", "recompute_num_layers": 1}
RECOMPUTED: dict[str, Results] = {
    "full": {"recompute": "full"},
    "block": {"overrides": {**_FULL, "recompute_method": "block"}},
    "moe": {"overrides": {"recompute_granularity": "selective", "recompute_modules": ["moe"]}},
}
"""``block`` recomputes the first of the two layers, and Megatron gives the other one no padding mask."""
BIASED = {"moe_router_bias_update_rate": 0.01}
SAVED = {
    "ep2": {**TWO_RANK_LAYOUTS["ep2"], "moe": BIASED, **OVERLAP},
    "pp2": {**TWO_RANK_LAYOUTS["pp2"], "moe": BIASED},
    "tp2_sp_etp1": TWO_RANK_LAYOUTS["tp2_sp_etp1"],
    "ep2_plain": {**TWO_RANK_LAYOUTS["ep2"], "distributed_optimizer": False},
}
REPLAYED: dict[str, Results] = {
    "tp2_sp": TWO_RANK_LAYOUTS["tp2_sp"],
    "tp2_sp_ep2": {**TWO_RANK_LAYOUTS["tp2_sp_ep2"], "recompute": "full"},
    "vp2": {**PIPELINES["vp2"], "micro_batch_size": 2, "recompute": "full"},
    "ep2": {**TWO_RANK_LAYOUTS["ep2"], "micro_batch_size": 3},
    "cp2": {**ONE, "cp": 2},
}
"""Layouts in which routers choose as a rollout's did, of a model of 4 layers."""
LOADED = (
    "tp2_sp_etp1/pp2",
    "tp2_sp_etp1/tp2_sp_etp1",
    "ep2/ep2",
    "ep2/tp2_sp_ep2",
    "ep2/pp2",
    "pp2/ep2",
    "ep2_plain/ep2_plain",
    "ep2_plain/pp2_plain",
)


@pytest.fixture(scope="session")
def moe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("moe")


@pytest.fixture(scope="session")
def moe_models(moe_folder: Path) -> dict[str, str]:
    return {family: str(make_hf_model(moe_folder / family, family)) for family in FAMILIES}


def _cases(layouts: dict[str, Results], models: dict[str, str]) -> dict[str, Results]:
    return {
        f"{name}/{family}": {**layouts[name], "model": models[family], "steps": 1}
        for name, family in TRIED
        if name in layouts
    }


def _deep(layout: Results, models: dict[str, str], family: str) -> Results:
    return {**layout, "model": models[family], "moe": BOTH, "micro_batch_size": 1, "steps": 1}


def _dense_latent(folder: Path) -> Results:
    """Latent attention without experts."""
    model = folder / "dense_latent"
    if not model.exists():
        make_hf_model(model, "deepseek_v3", first_k_dense_replace=2)
    return {"model": str(model), "dense": True, "steps": 1}


@pytest.fixture(scope="session")
def deep_models(moe_folder: Path) -> dict[str, str]:
    """Of four layers."""
    return {family: str(make_hf_model(moe_folder / f"deep_{family}", family, num_layers=4)) for family in DEEP}


@pytest.fixture(scope="session")
def moe_two_ranks(moe_models: dict[str, str], deep_models: dict[str, str], moe_folder: Path) -> Results:
    cases = _cases(TWO_RANK_LAYOUTS, moe_models)
    cases |= {
        f"{name}/dense_latent": {**TWO_RANK_LAYOUTS[name], **_dense_latent(moe_folder)} for name in ("tp2_sp", "pp2")
    }
    padded = {"model": moe_models["qwen3_moe"], "moe": BOTH, **PADDED, "steps": 1}
    cases |= {f"{name}/both": {**layout, **padded} for name, layout in TWO_RANK_LAYOUTS.items()}
    cases |= {
        f"{name}/seq": {**TWO_RANK_LAYOUTS[name], **padded, "moe": BALANCE["seq_aux_loss"]}
        for name in ("ep2", "tp2_sp")
    }
    cases |= {
        f"{name}/packed": {**cases[f"{name}/both"], "packing": True, "moe": BALANCE["seq_aux_loss"]}
        for name in PADDED_LAYOUTS
    }
    cases |= {f"{name}/padded": {**cases[name], "packing": False} for name in PADDED_CASES}
    cases["dp2/global"] = {
        **TWO_RANK_LAYOUTS["dp2"], **padded, "moe": BALANCE["global_aux_loss"], "micro_batch_size": 8
    }  # fmt: skip
    cases |= {
        f"recompute/{name}": {**TWO_RANK_LAYOUTS["tp2_sp_ep2"], **padded, **how} for name, how in RECOMPUTED.items()
    }
    cases["ep2/warm_up"] = {**TWO_RANK_LAYOUTS["ep2"], "model": moe_models["qwen3_moe"], **WARM_UP}
    cases["ep2/logprobs"] = {**TWO_RANK_LAYOUTS["ep2"], "model": moe_models["deepseek_v3"], "logprobs": True}
    for name, case in SAVED.items():
        saving = {"save": str(moe_folder / f"saved_{name}"), "steps": 2, "steps_after": 2}
        cases[f"save/{name}"] = {**case, **saving, "model": moe_models["deepseek_v3"]}
    for name in LOADED:
        source, target = name.split("/")
        layout = {**SAVED[source], **TWO_RANK_LAYOUTS[target.removesuffix("_plain")]}
        if "ep" not in TWO_RANK_LAYOUTS[target.removesuffix("_plain")]:
            del layout["ep"]
        loading = {"load": str(moe_folder / f"saved_{source}"), "steps_after": 2}
        cases[f"load/{name}"] = {**layout, **loading, "model": moe_models["deepseek_v3"]}
    states = {"offload": 0.5, "load": str(moe_folder / "saved_ep2"), "steps_after": 2}
    cases["load/ep2/ep2_offload"] = {**SAVED["ep2"], **states, "model": moe_models["deepseek_v3"]}
    replayed = {"model": deep_models["qwen3_moe"], "replay": True, "steps": 1, "logprobs": True}
    cases |= {f"replay/{name}": {**layout, **replayed} for name, layout in REPLAYED.items()}
    cases |= {f"deep/{family}": _deep(PIPELINES[how], deep_models, family) for family, how in DEEP.items()}
    return run_ranks(2, {"model": "unused", "cases": cases}, moe_folder / "two")


@pytest.fixture(scope="session")
def moe_four_ranks(moe_models: dict[str, str], moe_folder: Path) -> Results:
    return run_ranks(4, {"model": "unused", "cases": _cases(FOUR_RANK_LAYOUTS, moe_models)}, moe_folder / "four")


@pytest.fixture(scope="session")
def moe_one_rank(moe_models: dict[str, str], deep_models: dict[str, str], moe_folder: Path) -> Results:
    cases = {f"one/{family}": {**ONE, "model": model, "steps": 1} for family, model in moe_models.items()}
    cases |= {f"deep/{family}": _deep(ONE, deep_models, family) for family in DEEP}
    cases["one/warm_up"] = {**ONE, "model": moe_models["qwen3_moe"], **WARM_UP}
    cases["one/dense_latent"] = {**ONE, **_dense_latent(moe_folder)}
    for kind in BALANCE:
        cases[f"one/{kind}"] = {**cases["one/qwen3_moe"], "moe": BALANCE[kind], "micro_batch_size": 1}
        cases[f"one/{kind}/padded"] = {**cases[f"one/{kind}"], **PADDED}
        cases[f"one/{kind}/packed"] = {**cases[f"one/{kind}/padded"], "packing": True}
    return run_ranks(1, {"model": "unused", "cases": cases}, moe_folder / "one")


@pytest.mark.parametrize(("layout", "family"), TRIED)
def test_layouts_equal_one_rank(
    moe_two_ranks: Results, moe_four_ranks: Results, moe_one_rank: Results, layout: str, family: str
) -> None:
    found = (moe_two_ranks | moe_four_ranks)[f"{layout}/{family}"]
    assert_same_step(found["steps"][0], moe_one_rank[f"one/{family}"]["steps"][0])


def test_a_warm_up_and_what_follows_equal_one_rank(moe_two_ranks: Results, moe_one_rank: Results) -> None:
    """Experts' states are a part of the optimizer of their own, which begins anew as well."""
    steps, expected = moe_two_ranks["ep2/warm_up"]["steps"], moe_one_rank["one/warm_up"]["steps"]
    for step, wanted in zip(steps, expected, strict=True):
        assert_same_step(step, wanted)


@pytest.mark.parametrize("family", DEEP)
def test_interleaved_and_uneven_pipelines_equal_one(moe_two_ranks: Results, moe_one_rank: Results, family: str) -> None:
    """Balancing losses and loads included."""
    assert_same_step(moe_two_ranks[f"deep/{family}"]["steps"][0], moe_one_rank[f"deep/{family}"]["steps"][0])


@pytest.mark.parametrize("layout", ["tp2_sp", "pp2"])
def test_latent_attention_without_experts(
    moe_two_ranks: Results, moe_one_rank: Results, moe_folder: Path, layout: str
) -> None:
    """Without sequence parallelism, which is refused, Megatron's gradient norm is 2.656 where 2.700 is right."""
    step = moe_two_ranks[f"{layout}/dense_latent"]["steps"][0]
    assert_same_step(step, moe_one_rank["one/dense_latent"]["steps"][0])
    expected = by_definition(str(moe_folder / "dense_latent"))
    assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_norm_equals_that_of_transformers(
    moe_one_rank: Results, moe_models: dict[str, str], family: str
) -> None:
    expected = by_definition(moe_models[family])
    assert moe_one_rank[f"one/{family}"]["steps"][0]["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}


def assert_weighed_once(step: Results, moe: Results, expected: dict[str, float]) -> None:
    assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    if "moe_aux_loss_coeff" in moe:
        name = NAMES[moe.get("moe_router_load_balancing_type", "aux_loss")]
        assert step[f"moe/{name}"] == pytest.approx(expected["moe_aux_loss_coeff"], rel=1e-4)
    if "moe_z_loss_coeff" in moe:
        assert step["moe/z_loss"] == pytest.approx(expected["moe_z_loss_coeff"], rel=1e-4)


@pytest.mark.parametrize(("form", "size"), [("", 1), ("/padded", SIZE), ("/packed", SIZE)])
@pytest.mark.parametrize("kind", BALANCE)
def test_each_balancing_loss_is_weighed_once(
    moe_one_rank: Results, moe_models: dict[str, str], kind: str, form: str, size: int
) -> None:
    """In the gradient by its coefficient, a sum over the two layers; reported as a mean over them."""
    result, packing = moe_one_rank[f"one/{kind}{form}"], form != "/padded"
    assert result["is_packed"] == [packing]
    expected = by_definition(moe_models["qwen3_moe"], BALANCE[kind], size, packing=packing)
    assert_weighed_once(result["steps"][0], BALANCE[kind], expected)


@pytest.fixture(scope="session")
def both_by_definition(moe_models: dict[str, str]) -> dict[str, float]:
    return by_definition(moe_models["qwen3_moe"], BOTH, SIZE)


@pytest.mark.parametrize(
    "case", [*(f"{name}/both" for name in TWO_RANK_LAYOUTS), *(f"recompute/{name}" for name in RECOMPUTED)]
)
def test_balancing_losses_are_weighed_once_on_two_ranks(
    moe_two_ranks: Results, both_by_definition: dict[str, float], case: str
) -> None:
    """Over micro-batches, DP, TP, PP and EP, with padding, and with layers recomputed or not."""
    assert_weighed_once(moe_two_ranks[case]["steps"][0], BOTH, both_by_definition)


@pytest.fixture(scope="session")
def replayed_by_definition(deep_models: dict[str, str]) -> dict[str, float]:
    return by_definition(deep_models["qwen3_moe"], routes=True)


@pytest.mark.parametrize("layout", REPLAYED)
def test_replayed_routes_are_those_that_are_gone(
    moe_two_ranks: Results, replayed_by_definition: dict[str, float], layout: str
) -> None:
    step = moe_two_ranks[f"replay/{layout}"]["steps"][0]
    for name, value in replayed_by_definition.items():
        assert step[name] == pytest.approx(value, rel=1e-4), name
    layers = [step[f"route_agreement_by_layer/{number}"] for number in range(4)]
    assert sum(layers) / 4 == pytest.approx(replayed_by_definition["moe/route_agreement"], rel=1e-6)
    assert {f"route_agreement/{domain}" for domain in DOMAINS} <= step.keys()


@pytest.mark.parametrize("layout", REPLAYED)
@torch.no_grad()
def test_replayed_logprobs_equal_transformers(moe_two_ranks: Results, deep_models: dict[str, str], layout: str) -> None:
    theirs, found = AutoModelForCausalLM.from_pretrained(deep_models["qwen3_moe"]), moe_two_ranks[f"replay/{layout}"]
    metas, fields = make_samples(16, vocab_size=theirs.config.vocab_size, top_k=8, seed=0, first_id=0)
    forced = Forced(theirs, metas, seed=0)
    for i, row in zip((3, 1, 2, 5), found["logprobs"] + found["one_logprob"], strict=True):
        forced.sample, tokens, start = i, fields["tokens"][i], metas[i].prompt_length
        wanted = theirs(tokens[None]).logits[0].log_softmax(-1)[start - 1 : -1].gather(1, tokens[start:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(row), wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["ep2", "tp2_sp"])
def test_the_loss_by_sequences_ignores_padding(moe_two_ranks: Results, moe_models: dict[str, str], name: str) -> None:
    moe = BALANCE["seq_aux_loss"]
    expected = by_definition(moe_models["qwen3_moe"], moe, SIZE)
    assert_weighed_once(moe_two_ranks[f"{name}/seq"]["steps"][0], moe, expected)


@pytest.mark.parametrize("name", PADDED_LAYOUTS)
def test_packed_sequences_are_balanced_each_for_itself(
    moe_two_ranks: Results, moe_one_rank: Results, name: str
) -> None:
    """Micro-batches of 3 and of 2 of the same samples, packed and padded, though other sequences stand beside them."""
    step = moe_two_ranks[f"{name}/packed"]["steps"][0]
    assert_same_step(step, moe_one_rank["one/seq_aux_loss/packed"]["steps"][0])
    assert_same_step(step, moe_one_rank["one/seq_aux_loss/padded"]["steps"][0])


@pytest.mark.parametrize("case", PADDED_CASES)
def test_packed_sequences_equal_padded_ones(moe_two_ranks: Results, case: str) -> None:
    packed, padded = (moe_two_ranks[f"{case}{form}"] for form in ("", "/padded"))
    assert packed["is_packed"] == [True] and padded["is_packed"] == [False]
    assert_same_step(packed["steps"][0], padded["steps"][0])


def test_the_global_loss_is_one_of_all_data_parallel_ranks(moe_two_ranks: Results, moe_models: dict[str, str]) -> None:
    """One micro-batch on each of two ranks is one of all samples."""
    moe = BALANCE["global_aux_loss"]
    assert_weighed_once(moe_two_ranks["dp2/global"]["steps"][0], moe, by_definition(moe_models["qwen3_moe"], moe, 16))


def test_logprobs_equal_transformers(moe_two_ranks: Results, moe_models: dict[str, str]) -> None:
    assert_logprobs(moe_two_ranks["ep2/logprobs"], Path(moe_models["deepseek_v3"]))


@pytest.mark.parametrize("name", ["ep2", "ep2_plain"])
def test_checkpoint_at_the_same_layout_is_bit_exact(moe_two_ranks: Results, name: str) -> None:
    """Weights, expert biases (which move under ``ep2``), losses and loads after two more steps."""
    saved, loaded = moe_two_ranks[f"save/{name}"], moe_two_ranks[f"load/{name}/{name}"]
    assert loaded["loaded_hash"] == saved["saved_hash"] != saved["hash"]
    assert loaded["steps_after"] == saved["steps_after"]
    assert loaded["hash"] == saved["hash"]


@pytest.mark.parametrize("name", [*LOADED, "ep2/ep2_offload"])
def test_checkpoint_at_another_layout_continues(moe_two_ranks: Results, name: str) -> None:
    saved, loaded = moe_two_ranks[f"save/{name.split('/')[0]}"], moe_two_ranks[f"load/{name}"]
    assert loaded["loaded_hash"] == saved["saved_hash"]
    for step, expected in zip(loaded["steps_after"], saved["steps_after"], strict=True):
        for key in expected:
            if key.startswith(("loss/", "weighted_loss/", "grad_norm", "lr", "moe/")):
                assert step[key] == pytest.approx(expected[key], rel=1e-5), key
