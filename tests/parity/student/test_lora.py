"""A student with adapters: values, layouts, checkpoints, export.

Invariant: loss, gradients of every A and B and their norm equal, at every layout (1e-6 and 1e-5 relative, fp32), those
of transformers' model with ``W + alpha / r B A`` in float64, by the chain rule; a checkpoint goes on at another layout;
the merged export holds the bits of the exact merge and the adapter's folder is its input again. With full recompute, as
the embedding is frozen. PEFT itself is no dependency. Not
exercised: CUDA; norms within layers and grouped experts (``test_transformer_engine.py``).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from mopd.conversion.adapters import merge_adapter, read_adapter
from mopd.conversion.hf.reader import HfReader
from mopd.conversion.jobs import rewriting, streaming
from mopd.conversion.models.adapted import adapted_modules, target_names
from mopd.conversion.models.reading import read_dims
from mopd.conversion.torch_dist.reader import TorchDistReader
from tests.fixtures.adapters import ALPHA, RANK, write_adapter
from tests.fixtures.tiny_models import make_hf_model
from tests.parity.student.harness import run_ranks
from tests.parity.student.samples import hash_of, make_samples
from tests.parity.student.test_layouts import assert_same_step
from tests.unit.conversion.jobs import run_job

pytestmark = [pytest.mark.multirank, pytest.mark.slow]

Results = dict[str, Any]
ONE = {"tp": 1, "pp": 1, "dp": 1, "sp": False}
LAYOUTS: dict[str, Results] = {
    "tp2": {**ONE, "tp": 2},
    "tp2_sp": {**ONE, "tp": 2, "sp": True},
    "pp2": {**ONE, "pp": 2},
    "dp2": {**ONE, "dp": 2},
    "cp2": {**ONE, "cp": 2},
}
EXPERT_LAYOUTS: dict[str, Results] = {
    "ep2": {**ONE, "dp": 2, "ep": 2},
    "tp2_sp": LAYOUTS["tp2_sp"],
    "tp2_sp_ep2": {**LAYOUTS["tp2_sp"], "ep": 2, "etp": 1},
    "cp2": {**LAYOUTS["cp2"], "ep": 2},
}
DENSE, LATENT = "qwen2", "deepseek_v3"
CASES = [*((DENSE, name) for name in LAYOUTS), *((LATENT, name) for name in EXPERT_LAYOUTS)]
RUNS = ("tp2", "pp2", "dp2")
"""Layouts whose steps are compared, and which take over the checkpoint of the first."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lora")


@pytest.fixture(scope="module")
def models(folder: Path) -> dict[str, Path]:
    """Bases with biases and a tied head, and with latent attention and experts; an adapter of each, B random."""
    made = {DENSE: make_hf_model(folder / DENSE, DENSE), LATENT: make_hf_model(folder / LATENT, LATENT)}
    for family, base in made.items():
        generator, tensors = torch.Generator().manual_seed(1), {}
        for own in adapted_modules(read_dims(base), "all_linear"):
            for half, shape in (("A", (RANK, own.num_inputs)), ("B", (own.num_outputs, RANK))):
                drawn = torch.randn(shape, generator=generator) * 0.05
                tensors[f"base_model.model.{own.module}.lora_{half}.weight"] = drawn
        write_adapter(folder / f"{family}_adapter", tensors)
    return made


@pytest.fixture(scope="module")
def two_ranks(folder: Path, models: dict[str, Path]) -> Results:
    def case(family: str, name: str, layout: Results) -> Results:
        lora = {"rank": RANK, "alpha": float(ALPHA), "path": str(folder / f"{family}_adapter")}
        own = {"model": str(models[family]), "lora": lora, "objective": "sft_on_teacher"}
        return {**layout, **own, "distributed_optimizer": False, "gradients": str(folder / f"{family}_{name}")}

    cases = {f"{DENSE}/{name}": case(DENSE, name, layout) for name, layout in LAYOUTS.items()}
    cases |= {f"{LATENT}/{name}": case(LATENT, name, layout) for name, layout in EXPERT_LAYOUTS.items()}
    cases[f"{DENSE}/tp2_sp"]["recompute"] = cases[f"{LATENT}/ep2"]["recompute"] = "full"
    cases[f"{LATENT}/tp2_sp"]["packing"] = False
    for name in RUNS:
        own = case(DENSE, "", {**LAYOUTS[name], "distributed_optimizer": True})
        del own["gradients"], own["distributed_optimizer"]
        cases[f"run/{name}"] = {**own, "save": str(folder / f"saved_{name}"), "steps": 1, "steps_after": 1}
        cases[f"load/{name}"] = {**own, "load": str(folder / "saved_tp2"), "steps": 0, "steps_after": 1}
    cases["run/tp2"]["save_hf"] = str(folder / "hf")
    latent = case(LATENT, "", EXPERT_LAYOUTS["tp2_sp_ep2"])
    del latent["gradients"]
    cases["save/latent"] = {**latent, "save": str(folder / "latent"), "steps": 1, "steps_after": 1}
    cases["load/latent"] = {
        **latent, **EXPERT_LAYOUTS["ep2"], "etp": None, "load": str(folder / "latent"), "steps": 0, "steps_after": 1
    }  # fmt: skip
    return run_ranks(2, {"model": "unused", "cases": cases}, folder / "job")


class Truth:
    """Loss and gradients in float64, of transformers' model with the adapter merged."""

    def __init__(self, base: Path, adapter: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64, experts_implementation="eager")
        self.factors = {
            name: tensor.double() for name, tensor in load_file(adapter / "adapter_model.safetensors").items()
        }
        self.modules = sorted({name.split(".lora_")[0].removeprefix("base_model.model.") for name in self.factors})
        for module in self.modules:
            a, b = self._pair(module)
            with torch.no_grad():
                self._of(module, "data").add_(ALPHA / RANK * b @ a)
        self.loss = self._loss()
        self.loss.backward()
        self.gradients: dict[str, Tensor] = {}
        for module in self.modules:
            (a, b), weight = self._pair(module), ALPHA / RANK * self._of(module, "grad")
            self.gradients[f"base_model.model.{module}.lora_A.weight"] = b.T @ weight
            self.gradients[f"base_model.model.{module}.lora_B.weight"] = weight @ a.T

    def _pair(self, module: str) -> tuple[Tensor, Tensor]:
        return tuple(self.factors[f"base_model.model.{module}.lora_{half}.weight"] for half in "AB")  # type: ignore[return-value]

    def _of(self, module: str, attribute: str) -> Tensor:
        """Weight or gradient of a module; experts are parts of one tensor in transformers."""
        parameters = dict(self.model.named_parameters())
        if f"{module}.weight" in parameters:
            return getattr(parameters[f"{module}.weight"], attribute)
        layer, expert, name = module.rsplit(".", 2)
        fused = parameters[f"{layer}.{'down_proj' if name == 'down_proj' else 'gate_up_proj'}"]
        own = getattr(fused, attribute)[int(expert)]
        return own if name == "down_proj" else own.chunk(2)[name == "up_proj"]

    def _loss(self) -> Tensor:
        metas, fields = make_samples(16, vocab_size=self.model.config.vocab_size, top_k=8, seed=9, first_id=900)
        total = torch.zeros(())
        for meta, tokens, loss_mask in zip(metas, fields["tokens"], fields["loss_mask"], strict=True):
            rows = self.model(tokens[None]).logits[0, meta.prompt_length - 1 : -1]
            own = tokens[meta.prompt_length :][loss_mask]
            total = total + torch.nn.functional.cross_entropy(rows[loss_mask], own, reduction="sum")
        return total / sum(meta.num_loss_tokens for meta in metas)


@pytest.fixture(scope="module")
def truths(folder: Path, models: dict[str, Path]) -> dict[str, Truth]:
    return {family: Truth(base, folder / f"{family}_adapter") for family, base in models.items()}


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_loss_and_gradients_equal_the_definition(
    two_ranks: Results, truths: dict[str, Truth], folder: Path, family: str, layout: str
) -> None:
    found, truth = two_ranks[f"{family}/{layout}"]["gradients"], truths[family]
    gradients = load_file(folder / f"{family}_{layout}")
    assert gradients.keys() == truth.gradients.keys()
    assert found["loss"] == pytest.approx(truth.loss.item(), rel=1e-6)
    squares = sum(float(gradient.square().sum()) for gradient in truth.gradients.values())
    assert found["norm"] == pytest.approx(math.sqrt(squares), rel=3e-6)
    for name, gradient in gradients.items():
        expected = truth.gradients[name]
        assert float((gradient - expected).abs().max()) <= 1e-5 * float(expected.abs().max()) + 1e-9, name


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_nothing_but_adapters_has_gradient_buffers(two_ranks: Results, family: str, layout: str) -> None:
    found = two_ranks[f"{family}/{layout}"]["gradients"]
    assert 0 < found["num_buffered"] == found["num_adapters"]


@pytest.mark.parametrize("name", RUNS)
def test_checkpoints_go_on_at_every_layout(two_ranks: Results, name: str) -> None:
    saved, run, loaded = (two_ranks[f"{kind}/{own}"] for kind, own in (("run", "tp2"), ("run", name), ("load", name)))
    assert_same_step(run["steps"][0], saved["steps"][0])
    assert loaded["loaded_hash"] == saved["saved_hash"]
    assert_same_step(loaded["steps_after"][0], saved["steps_after"][0])


def test_checkpoints_of_experts_go_on(two_ranks: Results) -> None:
    saved, loaded = two_ranks["save/latent"], two_ranks["load/latent"]
    assert loaded["loaded_hash"] == saved["saved_hash"]
    assert_same_step(loaded["steps_after"][0], saved["steps_after"][0])


def test_checkpoints_hold_adapters_alone(two_ranks: Results, folder: Path, models: dict[str, Path]) -> None:
    state = json.loads((folder / "saved_tp2" / "state.json").read_text())
    assert (state["adapter"]["r"], state["adapter"]["lora_alpha"]) == (RANK, ALPHA)
    keys = TorchDistReader(folder / "saved_tp2").keys
    assert keys and all("base_model.model." in key for key in keys)  # optimizer states have a prefix


def test_checkpoints_become_folders_that_a_student_begins_with(
    two_ranks: Results, folder: Path, models: dict[str, Path]
) -> None:
    run_job(streaming.megatron_to_peft(folder / "saved_tp2", folder / "peft"))
    tensors, began = (read_adapter(folder / name, models[DENSE]).tensors() for name in ("peft", f"{DENSE}_adapter"))
    assert tensors.keys() == began.keys()
    assert not any(torch.equal(tensor, began[name]) for name, tensor in tensors.items())
    run_job(rewriting.merge_lora(models[DENSE], folder / "peft", folder / "merged"))
    merged = load_file(folder / "merged" / "model.safetensors")
    assert hash_of(merged.items()) == two_ranks["run/tp2"]["saved_hash"]
    run_job(streaming.megatron_to_hf(folder / "saved_tp2", folder / "at_once"))
    assert hash_of(load_file(folder / "at_once" / "model.safetensors").items()) == hash_of(merged.items())


def test_exports_are_merged_exactly(two_ranks: Results, folder: Path, models: dict[str, Path]) -> None:
    adapter = read_adapter(folder / "hf" / "adapter", models[DENSE])
    reader = HfReader(models[DENSE])
    base = {name: reader.read_slice(name, 0, 0, reader.shape(name)[0]) for name in reader.names}
    expected = {**base, **merge_adapter(base, adapter)}
    merged = load_file(folder / "hf" / "model.safetensors")
    for name, tensor in merged.items():
        assert torch.equal(tensor, expected[name]), name
    assert sum(not torch.equal(tensor, base[name]) for name, tensor in merged.items()) == len(adapter.modules)
    config = json.loads((folder / "hf" / "adapter" / "adapter_config.json").read_text())
    assert config["target_modules"] == target_names(read_dims(models[DENSE]), "all_linear")
