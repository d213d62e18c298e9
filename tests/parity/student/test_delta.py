"""Students with gated delta nets: Qwen3-Next and the language models of Qwen3.5.

Invariant: as in ``test_families.py``, beside transformers and plain PyTorch in every layout, packed as padded; one
checkpoint goes on in another layout; and the rule by chunks is the one token by token. Without sequence parallelism
TP2 shows that the norms of the heads' answers, which Megatron does not know, have whole gradients. ``make test`` runs
few of the layouts, ``make families`` all.
"""

from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from mopd.base.types import UserError
from mopd.config.student import ParallelConfig, StudentConfig
from mopd.conversion.models.dims import check_layout
from mopd.conversion.models.families import hf_tensors
from mopd.conversion.models.reading import dims_from_config, read_dims
from mopd.engines.interface import SamplingParams
from mopd.engines.torch.decoding import decode, uniforms
from mopd.engines.torch.loading import load_model
from mopd.planning.memory import shards
from mopd.planning.memory.replicas import state_bytes
from mopd.student.model import gated_delta_net
from mopd.student.model.config import uses_transformer_engine
from mopd.student.model.gated_delta_net import delta_rule
from tests.fixtures.tiny_models import make_hf_model
from tests.parity.student import weight_cases
from tests.parity.student.harness import run_ranks
from tests.parity.student.test_families import IS_WHOLE, LAYOUTS, STEPS, supervised
from tests.parity.student.test_layouts import assert_logprobs, assert_same_step
from tests.parity.student.test_weights import check, vllm_server

pytestmark = [pytest.mark.multirank, pytest.mark.slow]

Results = dict[str, Any]
FAMILIES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
FEW = [("qwen3_next", "pp2"), ("qwen3_5_text", "tp2"), ("qwen3_5_moe_text", "tp2_sp")]
CASES = FEW
if IS_WHOLE:
    CASES = [
        (name, layout)
        for name in FAMILIES
        for layout in LAYOUTS
        # one family has no experts, which need sequence parallelism in the others
        if layout not in ("cp2", *(("ep2", "tp2_sp_ep2") if name == "qwen3_5_text" else ("tp2",)))
    ]
PADDED = CASES if IS_WHOLE else CASES[1:]
RESUMED = ("tp2_sp", "pp2")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("delta")
    keys: dict[str, Any] = {"tie_word_embeddings": False, "scale": 0.1}  # at 0.2 rounding is 1e-5 of the gradient
    return {name: make_hf_model(folder / name, name, **keys) for name in FAMILIES}


@pytest.fixture(scope="module")
def ranks(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Results:
    cases = {f"{name}/{layout}": {**LAYOUTS[layout], **STEPS, "model": str(models[name])} for name, layout in CASES}
    cases |= {f"{case}/padded": {**cases[case], "packing": False} for case in ("/".join(one) for one in PADDED)}
    saved = {"model": str(models["qwen3_5_moe_text"]), "steps_after": 1}
    folder = str(tmp_path_factory.mktemp("saved") / "checkpoint")
    cases["save"] = {**LAYOUTS["tp2_sp"], **saved, "steps": 1, "save": folder}
    cases |= {f"load/{layout}": {**LAYOUTS[layout], **saved, "load": folder} for layout in RESUMED}
    cases["sends"] = weight_cases.case_of(str(models["qwen3_next"]), "pp2")
    results: Results = {}
    for size in (1, 2):
        own = {name: case for name, case in cases.items() if (size == 1) == ("/one" in name)}
        if own:
            results |= run_ranks(size, {"model": "unused", "cases": own}, tmp_path_factory.mktemp("ranks"))
    return results


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_three_steps_equal_plain_pytorch(ranks: Results, models: dict[str, Path], name: str, layout: str) -> None:
    assert_logprobs(ranks[f"{name}/{layout}"], models[name])
    steps = ranks[f"{name}/{layout}"]["steps"]
    expected = supervised(models[name], tuple(step["lr"] for step in steps))
    for step, (loss, norm) in zip(steps, expected, strict=True):
        assert step["weighted_loss/math"] + step["weighted_loss/code"] == pytest.approx(loss, rel=1e-5)
        if "ep2" in layout:  # where experts have an optimizer of their own
            assert step["grad_norm"] == pytest.approx(norm, rel=1e-4)
        else:
            assert step["exact_grad_norm"] == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize(("name", "layout"), PADDED)
def test_packed_sequences_equal_padded_ones(ranks: Results, name: str, layout: str) -> None:
    packed, padded = ranks[f"{name}/{layout}"], ranks[f"{name}/{layout}/padded"]
    assert packed["is_packed"] == [True] and padded["is_packed"] == [False]
    for step, expected in zip(packed["steps"], padded["steps"], strict=True):
        assert_same_step(step, expected)


@pytest.mark.parametrize("layout", RESUMED)
def test_a_checkpoint_goes_on(ranks: Results, layout: str) -> None:
    saved, loaded = ranks["save"], ranks[f"load/{layout}"]
    assert loaded["loaded_hash"] == saved["saved_hash"] != saved["hash"]
    assert_same_step(loaded["steps_after"][0], saved["steps_after"][0])


def test_engines_follow_the_student(ranks: Results) -> None:
    check(ranks["sends"])


@torch.no_grad()
def test_the_torch_engine_draws_from_what_it_scores(models: dict[str, Path]) -> None:
    """With prompts of unequal lengths, and rows that end before others and leave the cache."""
    model = load_model(models["qwen3_5_text"], "float32", torch.device("cpu"))
    prompts, drawn = [[3, 4, 5, 6, 7], [9, 10], [5] * 12, [7, 8, 9]], dict[int, tuple[Tensor, Tensor]]()

    def note(row: int, tokens: Tensor, logprobs: Tensor, *unread: Any) -> None:
        drawn[row] = tokens, logprobs

    stop_ids = torch.tensor([2, 10, 11, 12, 13])
    decode(model, prompts, SamplingParams(max_new_tokens=20), uniforms([1, 2, 3, 4], 20), stop_ids, note)
    assert len({len(tokens) for tokens, _ in drawn.values()}) > 2
    for row, (tokens, logprobs) in drawn.items():
        logits = model(torch.tensor([prompts[row] + tokens.tolist()]), use_cache=False).logits[0]
        expected = logits.log_softmax(-1)[len(prompts[row]) - 1 : -1].gather(1, tokens[:, None])[:, 0]
        torch.testing.assert_close(logprobs, expected, atol=2e-5, rtol=0)


@pytest.mark.vllm
@pytest.mark.timeout(900)
@pytest.mark.skipif(not IS_WHOLE or find_spec("vllm") is None, reason="make families, with vLLM")
def test_vllm_follows_the_student(tmp_path: Path) -> None:
    """In bf16, in which alone vLLM computes these layers on a CPU, before and after updates by each way."""
    wide: dict[str, Any] = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    model = str(make_hf_model(tmp_path / "model", "qwen3_5_text", scale=0.1, **wide))
    with vllm_server(model, tmp_path, 1, dtype="bfloat16") as url:
        case = weight_cases.case_of(model, "tp2", student="bfloat16", dtype="bfloat16", urls=[url])
        found = run_ranks(2, {"model": model, "cases": {"sends": case}}, tmp_path / "ranks", timeout_s=850)
    check(found["sends"], atol=6e-2)


def _token_by_token(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """The rule as it is defined, in float64."""
    query, key, value, decay, beta = (x.double() for x in (query, key, value, decay, beta))
    state, outs = torch.zeros(*key.shape[::2], key.shape[-1], value.shape[-1]).double(), []
    for t in range(query.shape[1]):
        state = state * decay[:, t, :, None, None].exp()
        known = (state * key[:, t, :, :, None]).sum(-2)
        state = state + key[:, t, :, :, None] * ((value[:, t] - known) * beta[:, t, :, None])[..., None, :]
        outs.append((state * query[:, t, :, :, None]).sum(-2) * query.shape[-1] ** -0.5)
    return torch.stack(outs, dim=1)


@pytest.mark.parametrize("length", [1, 64, 150])
def test_the_rule_by_chunks_is_the_one_token_by_token(length: int) -> None:
    """Values and gradients, over no, one and two borders of chunks."""
    generator = torch.Generator().manual_seed(length)
    drawn = [torch.randn(2, length, 3, width, generator=generator) for width in (16, 16, 24, 1, 1)]
    query, key = (torch.nn.functional.normalize(x, dim=-1) for x in drawn[:2])
    inputs = [query, key, drawn[2], -drawn[3][..., 0].exp(), drawn[4][..., 0].sigmoid()]
    weight = torch.randn(2, length, 3, 24, generator=generator)
    found, expected = list[Tensor](), list[Tensor]()
    for rule, results in ((delta_rule, found), (_token_by_token, expected)):
        own = [x.clone().requires_grad_() for x in inputs]
        out = rule(*own)
        (out * weight).sum().backward()
        results += [out.detach().float(), *(x.grad for x in own)]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_the_kernels_of_fla_are_asked_on_a_gpu_that_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in that has their signature: no GPU is here."""
    on_gpu = torch.device("cuda")
    assert gated_delta_net._rule(on_gpu) is delta_rule

    def chunk_gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor) -> tuple[Tensor, None]:
        return delta_rule(q, k, v, g, beta), None

    for name in ("fla", "fla.ops", "fla.ops.gated_delta_rule"):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(
        sys.modules["fla.ops.gated_delta_rule"], "chunk_gated_delta_rule", chunk_gated_delta_rule, False
    )
    rule = gated_delta_net._rule(on_gpu)
    assert rule is not delta_rule
    inputs = [torch.randn(2, 5, 3, 4) for _ in range(3)] + [-torch.rand(2, 5, 3) for _ in range(2)]
    assert torch.equal(rule(*inputs), delta_rule(*inputs))
    assert gated_delta_net._rule(torch.device("cpu")) is delta_rule


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"context_parallel_size": 2}, "student.parallel.context_parallel_size is 2 and model_type qwen3_5_text has"),
        ({"tensor_model_parallel_size": 4}, "tensor_model_parallel_size 4 does not divide the model's 2 key/value"),
    ],
)
def test_layouts_that_would_part_what_is_one(models: dict[str, Path], keys: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        check_layout(read_dims(models["qwen3_5_text"]), ParallelConfig(**keys))


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"layer_types": ["linear_attention"]}, "layer_types"),
        ({"layer_types": ["linear_attention", "sliding_attention"]}, "layer_types"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads"),
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"model_type": "qwen3_5"}, "model_type"),
        ({"attention_bias": True}, "attention_bias"),
    ],
)
def test_what_cannot_be_carried_is_refused_by_name(models: dict[str, Path], keys: dict[str, Any], key: str) -> None:
    file = models["qwen3_5_text"] / "config.json"
    with pytest.raises(UserError, match=f"config.json: '{key}'"):
        dims_from_config(json.loads(file.read_text()) | keys, file)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_plan_counts_each_weight(models: dict[str, Path], name: str) -> None:
    dims = read_dims(models[name])
    stages = [shards.shard(dims, ParallelConfig(pipeline_model_parallel_size=2), stage) for stage in (0, 1)]
    assert shards.total_weights(dims) == sum(map(prod, hf_tensors(dims).values()))
    assert sum(stage.num_weights for stage in stages) == shards.shard(dims, ParallelConfig(), 0).num_weights
    assert state_bytes(dims, 4) == 4 * (4 * 16 * 24 + 3 * (2 * 2 * 16 + 4 * 24))  # of one layer


def test_layers_of_transformer_engine_are_refused(models: dict[str, Path]) -> None:
    student = StudentConfig(model=str(models["qwen3_next"]), transformer_impl="transformer_engine")
    with pytest.raises(UserError, match="the layers of model_type qwen3_next are local ones"):
        uses_transformer_engine(student, read_dims(models["qwen3_next"]))
