"""Loading into and exporting from one rank's model: what does not fit is refused, in one line that names it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mopd.base.types import UserError
from mopd.config.student import StudentConfig, VisionConfig
from mopd.conversion.hf.reader import HfReader
from mopd.conversion.models.dims import ModelDims
from mopd.conversion.models.frozen import constant_names
from mopd.conversion.models.reading import read_dims
from mopd.student import cpu_shim, parallel
from mopd.student.model.gpt import build_model
from mopd.student.weights import hf_senders, iter_hf_weights, iter_sender_weights, load_hf_into, num_senders, own_sender
from tests.fixtures.tiny_models import make_hf_model
from tests.fixtures.vision import VISION_FAMILIES, make_vision_model

Tensors = dict[str, Tensor]
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
TE_NAMES = {
    "input_layernorm": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm": "mlp.linear_fc1.layer_norm_weight",
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_hf_model(tmp_path / "hf", "qwen3")


@pytest.fixture
def model(checkpoint: Path, layout: parallel.Layout) -> nn.Module:
    return build(checkpoint, layout)


def build(checkpoint: Path, layout: parallel.Layout, dtype: str = "float32") -> nn.Module:
    with cpu_shim.activate():
        return build_model(StudentConfig(model=str(checkpoint), dtype=dtype), read_dims(checkpoint), layout)


def load(model: nn.Module, checkpoint: Path, layout: parallel.Layout) -> None:
    load_hf_into([model], HfReader(checkpoint), read_dims(checkpoint), layout)


def export(model: nn.Module, dims: ModelDims, layout: parallel.Layout) -> Tensors:
    return dict(iter_hf_weights([model], dims, layout))


def edit(checkpoint: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    change(tensors)
    save_file(tensors, checkpoint / "model.safetensors")


def test_exported_tensors_do_not_follow_the_model(checkpoint: Path, model: nn.Module, layout: parallel.Layout):
    load(model, checkpoint, layout)
    tensors = export(model, read_dims(checkpoint), layout)
    for parameter in model.parameters():
        parameter.data.zero_()
    expected = load_file(checkpoint / "model.safetensors")
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "qwen3_moe"])
def test_tensors_in_place_are_the_same_and_copies_where_they_must_be(
    family: str, layout: parallel.Layout, tmp_path: Path
):
    checkpoint = make_hf_model(tmp_path, family)
    model, dims = build(checkpoint, layout), read_dims(checkpoint)
    load(model, checkpoint, layout)
    tensors = dict(iter_hf_weights([model], dims, layout, in_place=True))
    expected = load_file(checkpoint / "model.safetensors")
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    copied = {name for name, tensor in tensors.items() if tensor.untyped_storage().data_ptr() not in own}
    merged = ("q_proj", "k_proj", "v_proj")  # whose rows take turns in Megatron's matrix
    assert copied == {name for name in expected if any(part in name for part in merged)}


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_one_rank_sends_all_from_where_it_lies(family: str, layout: parallel.Layout, tmp_path: Path):
    checkpoint = make_hf_model(tmp_path, family)
    model, dims = build(checkpoint, layout), read_dims(checkpoint)
    load(model, checkpoint, layout)
    expected = list(iter_hf_weights([model], dims, layout, in_place=True))
    sent = list(iter_sender_weights([model], dims, layout, takes=lambda row: True))
    assert [name for name, _ in sent] == [name for name, _ in expected]
    for (name, tensor), (_, own) in zip(sent, expected, strict=True):
        assert tensor is not None and torch.equal(tensor, own), name
    assert list(hf_senders([model], dims, layout)) == [own_sender(dims, layout)] * len(expected)
    assert num_senders(dims, layout) == 1


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize(
    ("tp", "pp", "ep", "etp"), [(1, 1, 1, 1), (2, 1, 2, 1), (2, 3, 4, 1), (4, 2, 2, 2), (1, 2, 4, 1)]
)
def test_every_sender_is_one_rank(family: str, tp: int, pp: int, ep: int, etp: int, tmp_path: Path):
    """Of eight ranks a stage."""
    dims, own = read_dims(make_hf_model(tmp_path, family)), list[int]()
    for stage in range(pp):
        for rank in range(8):
            layout: Any = SimpleNamespace(
                copy=rank // tp, tp_rank=rank % tp, pp_rank=stage, pp_size=pp, ep_size=ep,
                etp_rank=rank % etp, ep_rank=rank // etp % ep, edp_rank=rank // etp // ep,
            )  # fmt: skip
            number = own_sender(dims, layout)
            own += [] if number is None else [number]
    assert sorted(own) == list(range(num_senders(dims, layout)))
    assert len(own) == pp * (1 if dims.moe is None else ep)


def test_wrapped_model_and_names_of_the_transformer_engine_spec(checkpoint: Path, layout: parallel.Layout):
    """The same layers with their norms where TransformerEngine keeps them, inside two wrappers."""
    model = build(checkpoint, layout)
    for layer in model.decoder.layers:
        for local, fused in TE_NAMES.items():
            owner, _, name = fused.rpartition(".")
            layer.get_submodule(owner).register_parameter(name, getattr(layer, local).weight)
            delattr(layer, local)
    wrapped = nn.ModuleDict({"module": nn.ModuleDict({"module": model})})
    load(wrapped, checkpoint, layout)
    assert any(name.endswith("linear_fc1.layer_norm_weight") for name, _ in model.named_parameters())
    tensors = export(wrapped, read_dims(checkpoint), layout)
    expected = load_file(checkpoint / "model.safetensors")
    assert set(tensors) == set(expected)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())


def _as_te_grouped(experts: nn.Module) -> nn.Module:
    """The parameters of a ``SequentialMLP`` where ``TEGroupedMLP`` keeps them."""
    grouped = nn.Module()
    for part in ("linear_fc1", "linear_fc2"):
        owner = nn.Module()
        for i, expert in enumerate(experts.local_experts):
            owner.register_parameter(f"weight{i}", getattr(expert, part).weight)
        grouped.add_module(part, owner)
    return grouped


def test_grouped_experts_load_and_export(layout: parallel.Layout, tmp_path: Path):
    checkpoint = make_hf_model(tmp_path, "qwen3_moe")
    model = build(checkpoint, layout)
    for layer in model.decoder.layers:
        layer.mlp.experts = _as_te_grouped(layer.mlp.experts)
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    load(model, checkpoint, layout)
    tensors = export(model, read_dims(checkpoint), layout)
    expected = load_file(checkpoint / "model.safetensors")
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_constants_are_what_has_no_gradient(family: str, layout: parallel.Layout, tmp_path: Path):
    """By the names of the checkpoint, and exported apart from the others."""
    checkpoint = make_vision_model(tmp_path, family)
    dims, expected = read_dims(checkpoint), load_file(checkpoint / "model.safetensors")
    for freeze in ("tower", "tower_and_merger", "none"):
        student = StudentConfig(model=str(checkpoint), dtype="float32", vision=VisionConfig(freeze=freeze))
        with cpu_shim.activate():
            model = build_model(student, dims, layout)
        load(model, checkpoint, layout)
        constants = constant_names(dims, student)
        frozen = [param for param in model.parameters() if not param.requires_grad]
        assert len(constants) == len(frozen) and bool(frozen) == (freeze != "none")
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data.fill_(7.0)
        apart, rest = (
            dict(iter_hf_weights([model], dims, layout, takes=lambda row, part=part: row.hf_names[0] in part))
            for part in (constants, expected.keys() - constants)
        )
        assert apart.keys() == constants and all(torch.equal(apart[name], expected[name]) for name in constants)
        assert rest.keys() == expected.keys() - constants and all((tensor == 7.0).all() for tensor in rest.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), r"hf: tensor '.*1\.mlp\.up_proj\.weight' is missing"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(3)}), r"model\.safetensors: .*norm\.weight.*\[3\]"),
        (
            lambda t: t.update({"model.layers.0.self_attn.o_proj.bias": torch.zeros(64)}),
            r"'model\.layers\.0\.self_attn\.o_proj\.bias' has no place in model_type qwen3",
        ),
        (lambda t: t.update({HEAD: t[EMBEDDING] + 1}), "'tie_word_embeddings' is true"),
    ],
)
def test_checkpoint_that_does_not_fit(
    checkpoint: Path, model: nn.Module, layout: parallel.Layout, change: Callable[[Tensors], object], message: str
):
    edit(checkpoint, change)
    with pytest.raises(UserError, match=message) as refusal:
        load(model, checkpoint, layout)
    assert "\n" not in str(refusal.value)


def test_redundant_tensors_of_old_checkpoints_are_accepted(checkpoint: Path, model: nn.Module, layout: parallel.Layout):
    """A tied head that repeats the embedding, and rotary frequencies that follow from the config."""
    redundant = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}
    edit(checkpoint, lambda t: t.update({HEAD: t[EMBEDDING].clone(), **redundant}))
    load(model, checkpoint, layout)
    assert HEAD not in export(model, read_dims(checkpoint), layout)


def test_parameter_without_a_row_is_a_bug(checkpoint: Path, model: nn.Module, layout: parallel.Layout):
    model.decoder.layers[0].register_parameter("novel", nn.Parameter(torch.zeros(1)))
    with pytest.raises(RuntimeError, match=r"decoder\.layers\.0\.novel"):
        load(model, checkpoint, layout)


def test_model_that_lacks_a_parameter_is_a_bug(checkpoint: Path, model: nn.Module, layout: parallel.Layout):
    load(model, checkpoint, layout)
    del model.decoder.final_layernorm
    with pytest.raises(RuntimeError, match=r"no pipeline stage holds 'decoder\.final_layernorm\.weight'"):
        export(model, read_dims(checkpoint), layout)
