"""Students built as on a GPU: TransformerEngine's layers (by a stand-in that computes in plain torch), Megatron's
all-to-all dispatcher of tokens and grouped products of experts.

Invariant: from the same weights and samples, steps equal those of the local layers (1e-5 relative, fp32), packed and
padded, with recompute, experts over two ranks, latent attention and vision; no layer reads lengths back from the
device; a checkpoint of either kind of layers goes on under the other; and one of torch's Adam under the fused one,
which every student here has, and the other way. Not exercised: CUDA, TransformerEngine's kernels, tensor parallelism.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.tiny_models import make_hf_model
from tests.fixtures.warm import cold
from tests.parity.student.harness import run_ranks
from tests.parity.student.test_layouts import assert_same_step
from tests.parity.student.vision_cases import _case

pytestmark = [pytest.mark.multirank, pytest.mark.slow]

Results = dict[str, Any]
SCRIPT = Path(__file__).with_name("engine_ranks.py")
ONE = {"tp": 1, "pp": 1, "dp": 1, "sp": False, "steps": 2}
EP2 = {**ONE, "dp": 2, "ep": 2}
GROUPED = {"moe": {"moe_grouped_gemm": True}}
VARIANTS: dict[str, Results] = {"": {}, "/padded": {"packing": False}, "/full": {"recompute": "full"}}
FAMILIES: dict[str, Results] = {"qwen3": {}, "qwen3_moe": GROUPED, "deepseek_v3": {}}
SEEING = ("qwen2_5_vl", "qwen3_vl")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {family: str(make_hf_model(folder / family, family)) for family in FAMILIES}


@pytest.fixture(scope="module")
def one_rank(models: dict[str, str], vision_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("one")
    cases: Results = {}
    for family, own in FAMILIES.items():
        cases[f"{family}/local"] = {**ONE, "model": models[family], "impl": "local"}
        for variant, keys in VARIANTS.items():
            cases[f"{family}/engine{variant}"] = {**ONE, "model": models[family], **own, **keys}
        lora = {"model": models[family], "steps": 3, "lora": {"rank": 4, "alpha": 400.0}, "adam_eps": 1e-3}
        cases[f"{family}/local/lora"] = {**ONE, **lora, "impl": "local"}
        cases[f"{family}/engine/lora"] = {**ONE, **lora, **own}
        for saved, loaded in (("local", "engine"), ("engine", "local")):
            of = {**ONE, "model": models[family], "save": str(folder / f"{family}_{saved}"), "steps_after": 1}
            cases[f"{family}/{saved}/save"] = {**of, **({"impl": "local"} if saved == "local" else own)}
            of |= {"load": of.pop("save"), "steps": 0}
            cases[f"{family}/{loaded}/load"] = {**of, **({"impl": "local"} if loaded == "local" else own)}
    for family in SEEING:
        for impl in ("local", "transformer_engine"):
            cases[f"{family}/{impl}"] = _case(vision_folder, family, {**ONE, "impl": impl}, freeze="none", steps=2)
    with cold():  # the stand-in must be there before Megatron is imported
        return run_ranks(1, {"model": "unused", "cases": cases}, folder, script=SCRIPT)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_equal_the_local_layers(one_rank: Results, family: str, variant: str) -> None:
    local, engine = one_rank[f"{family}/local"], one_rank[f"{family}/engine{variant}"]
    for step, expected in zip(engine["steps"], local["steps"], strict=True):
        assert_same_step(step, expected)
    assert engine["is_packed"] == [variant != "/padded"]


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_see_what_the_local_layers_see(one_rank: Results, family: str) -> None:
    """Also beside layers with a norm in them, and of experts that are computed together."""
    local, engine = one_rank[f"{family}/local/lora"], one_rank[f"{family}/engine/lora"]
    for step, expected in zip(engine["steps"], local["steps"], strict=True):
        assert_same_step(step, expected)


@pytest.mark.parametrize("family", SEEING)
def test_steps_on_images_equal_the_local_layers(one_rank: Results, family: str) -> None:
    local, engine = one_rank[f"{family}/local"], one_rank[f"{family}/transformer_engine"]
    for step, expected in zip(engine["steps"], local["steps"], strict=True):
        both = [{k: v for k, v in one.items() if not k.startswith("rate/")} for one in (step, expected)]
        assert_same_step(*both)
    assert engine["is_packed"] == [True]


@pytest.mark.parametrize(("saved", "loaded"), [("local", "engine"), ("engine", "local")])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_goes_on_under_the_other_layers(one_rank: Results, family: str, saved: str, loaded: str) -> None:
    before, after = one_rank[f"{family}/{saved}/save"], one_rank[f"{family}/{loaded}/load"]
    assert after["loaded_hash"] == before["saved_hash"]
    assert_same_step(after["steps_after"][0], before["steps_after"][0])


ADAMS: dict[str, Results] = {
    "distributed": {},
    "plain": {"distributed_optimizer": False},
    "bf16": {"dtype": "bfloat16"},
    "on the host": {"offload": 0.5},
}


@pytest.fixture(scope="module")
def both_adams(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Results]:
    """Each Adam's own run, and its checkpoint of two steps under the other, by Adam and kind of optimizer."""
    folder = tmp_path_factory.mktemp("adams")
    scripts = {"torch": SCRIPT.with_name("ranks.py"), "fused": SCRIPT}
    results: dict[str, Results] = {}
    for turn, (adam, other) in enumerate((("torch", "fused"), ("fused", "torch"), ("torch", "fused"))):
        cases: Results = {}
        for kind, keys in ADAMS.items():
            of = {**ONE, "model": models["qwen3"], "impl": "local", "steps_after": 2, **keys}
            if turn < 2:
                cases[f"{kind}/save"] = {**of, "save": str(folder / f"{adam}_{kind}")}
            if turn > 0:
                cases[f"{kind}/load"] = {**of, "load": str(folder / f"{other}_{kind}"), "steps": 0}
        with cold():
            done = run_ranks(1, {"model": "unused", "cases": cases}, folder / str(turn), script=scripts[adam])
        results.setdefault(adam, {}).update(done)
    return results


@pytest.mark.parametrize(("saved", "loaded"), [("torch", "fused"), ("fused", "torch")])
@pytest.mark.parametrize("kind", ADAMS)
def test_a_checkpoint_goes_on_under_the_other_adam(
    both_adams: dict[str, Results], kind: str, saved: str, loaded: str
) -> None:
    """A count of steps that began anew would make the first of them more than twice as long."""
    before, after = both_adams[saved][f"{kind}/save"], both_adams[loaded][f"{kind}/load"]
    assert after["loaded_hash"] == before["saved_hash"]
    for step, expected in zip(after["steps_after"], before["steps_after"], strict=True):
        if kind != "bf16":
            assert_same_step(step, expected)
        for name in ("loss/math", "grad_norm"):  # a weight on the border between two numbers of bf16 may go either way
            assert step[name] == pytest.approx(expected[name], rel=1e-2), name


@pytest.mark.long
def test_experts_over_two_ranks(one_rank: Results, models: dict[str, str], tmp_path: Path) -> None:
    families = ("qwen3_moe", "deepseek_v3")
    cases = {family: {**EP2, "model": models[family], **GROUPED} for family in families}
    with cold():
        results = run_ranks(2, {"model": "unused", "cases": cases}, tmp_path, script=SCRIPT)
    for family in families:
        for step, expected in zip(results[family]["steps"], one_rank[f"{family}/local"]["steps"], strict=True):
            assert_same_step(step, expected)
