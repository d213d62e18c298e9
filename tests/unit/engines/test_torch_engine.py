"""TorchEngine against transformers itself: the same distributions, whatever the batching, and no shared randomness."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, GraniteConfig, GraniteForCausalLM

from mopd.base.types import NonFiniteError, UserError
from mopd.config.groups import TorchEngineConfig
from mopd.engines.checks import check_scores
from mopd.engines.interface import Generation, SamplingParams, Scores, ToDraw, ToScore
from mopd.engines.torch import engine as torch_engine
from mopd.engines.torch.engine import TorchEngine
from tests.fixtures.tiny_models import EOS_ID, FP32_FORWARD_ATOL, VOCAB_SIZE, make_hf_model

PROMPTS = [[5, 9, 11], [7], [3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [20, 21, 22, 23], [5, 9, 11], [30, 3]]
SEEDS = [10, 11, 12, 13, 14, 15]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    folders = {
        family: make_hf_model(root / family, family, seed=3, tie_word_embeddings=family != "llama")
        for family in ("qwen3", "qwen2", "llama")
    }
    for folder in folders.values():  # many stop tokens: random models end their responses at different steps
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS_ID, *range(30, 36)]}))
    return folders


@pytest.fixture(scope="module")
def engine(folders: dict[str, Path]) -> TorchEngine:
    return TorchEngine.from_pretrained(folders["qwen3"], TorchEngineConfig(dtype="float32"))


def generate(engine: TorchEngine, prompts: list[list[int]], seeds: list[int], **sampling: float) -> list[Generation]:
    return asyncio.run(engine.generate(ToDraw(prompts, SamplingParams(**{"max_new_tokens": 16, **sampling}), seeds)))


def score(
    engine: TorchEngine, prompts: list[list[int]], generations: list[Generation], **kwargs: float
) -> list[Scores]:
    tokens = [torch.tensor([*p, *g.tokens.tolist()]) for p, g in zip(prompts, generations, strict=True)]
    kwargs = {"top_k": 8, "temperature": 1.0, **kwargs}
    return asyncio.run(engine.score(ToScore(tokens, [len(p) for p in prompts], **kwargs)))


@torch.no_grad()
def reference_logprobs(folder: Path, prompt: list[int], response: list[int], temperature: float) -> torch.Tensor:
    """[R, V] in float64: one sequence at a time, no cache, no padding."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1).float()


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_generation_scoring_and_transformers_agree(
    folders: dict[str, Path], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_engine, "MAX_LOGITS_ROWS", 7)
    engine = TorchEngine.from_pretrained(folders[family], TorchEngineConfig(dtype="float32", max_tokens_per_batch=60))
    generations = generate(engine, PROMPTS, SEEDS, temperature=0.7)
    assert len({len(g.tokens) for g in generations}) > 1  # rows left the batch at different steps
    scores = score(engine, PROMPTS, generations, temperature=0.7)
    for prompt, generation, given in zip(PROMPTS, generations, scores, strict=True):
        expected = reference_logprobs(folders[family], prompt, generation.tokens.tolist(), 0.7)
        own = expected.gather(-1, generation.tokens[:, None]).squeeze(-1)
        torch.testing.assert_close(generation.logprobs, own, rtol=0, atol=FP32_FORWARD_ATOL)
        torch.testing.assert_close(given.token_logprobs, own, rtol=0, atol=FP32_FORWARD_ATOL)
        top = expected.topk(8, dim=-1)
        torch.testing.assert_close(given.logprobs, top.values, rtol=0, atol=FP32_FORWARD_ATOL)
        torch.testing.assert_close(expected.gather(-1, given.ids.long()), top.values, rtol=0, atol=FP32_FORWARD_ATOL)
        assert given.ids.dtype == torch.int32 and given.logprobs.dtype == torch.float32
        assert (given.logprobs.diff(dim=-1) <= 0).all()


def test_scoring_never_holds_more_rows_of_logits_than_allowed(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_engine, "MAX_LOGITS_ROWS", 4)
    engine = TorchEngine.from_pretrained(folders["qwen3"], TorchEngineConfig(dtype="float32"))
    generations = generate(engine, PROMPTS, SEEDS)
    expected = score(engine, PROMPTS, generations)  # also probes the model's own logits, once
    rows: list[int] = []

    class Rows(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.dim() > 1 and result.shape[-1] == VOCAB_SIZE:
                rows.append(result.numel() // VOCAB_SIZE)
            return result

    with Rows():
        again = score(engine, PROMPTS, generations)
    assert set(rows) - {engine.model.config.hidden_size} <= {1, 2, 3, 4} and 4 in rows  # H rows: the weight, transposed
    for first, second in zip(expected, again, strict=True):
        assert torch.equal(first.ids, second.ids) and torch.equal(first.logprobs, second.logprobs)


def test_neighbours_change_nothing(engine: TorchEngine) -> None:
    together = generate(engine, PROMPTS, SEEDS)
    for prompt, seed, expected in zip(PROMPTS, SEEDS, together, strict=True):
        alone = generate(engine, [prompt], [seed])[0]
        assert alone.tokens.tolist() == expected.tokens.tolist()
        assert alone.finish_reason == expected.finish_reason
        torch.testing.assert_close(alone.logprobs, expected.logprobs, rtol=0, atol=FP32_FORWARD_ATOL)
    shuffled = generate(engine, PROMPTS[::-1], SEEDS[::-1])
    assert [g.tokens.tolist() for g in shuffled[::-1]] == [g.tokens.tolist() for g in together]


def test_seed_decides_and_length_limit_only_cuts(engine: TorchEngine) -> None:
    first, again, other = generate(engine, [[5, 9, 11]] * 3, [1, 1, 2])
    assert first.tokens.tolist() == again.tokens.tolist() != other.tokens.tolist()
    short = generate(engine, [[5, 9, 11]], [1], max_new_tokens=3)[0]
    assert short.tokens.tolist() == first.tokens.tolist()[:3]


def test_greedy_equals_transformers_generate(folders: dict[str, Path], engine: TorchEngine) -> None:
    model = AutoModelForCausalLM.from_pretrained(folders["qwen3"], dtype=torch.float32)
    for prompt, generation in zip(PROMPTS, generate(engine, PROMPTS, SEEDS, temperature=0.0), strict=True):
        expected = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=16)[0, len(prompt) :]
        assert generation.tokens.tolist() == expected.tolist()
        assert generation.finish_reason == ("stop" if int(expected[-1]) in engine.stop_ids else "length")


def test_random_state_is_left_alone(folders: dict[str, Path]) -> None:
    before = torch.get_rng_state()
    engine = TorchEngine.from_pretrained(folders["qwen3"], TorchEngineConfig(dtype="float32"))
    empty = TorchEngine.empty(folders["qwen3"], TorchEngineConfig(dtype="float32"))
    generations = generate(engine, PROMPTS, SEEDS, top_p=0.9, top_k=5)
    score(engine, PROMPTS, generations)
    asyncio.run(empty.load_weights(engine.model.named_parameters(), 1))
    assert torch.equal(before, torch.get_rng_state())


def test_full_vocabulary_and_empty_response(engine: TorchEngine) -> None:
    sequence = torch.tensor([4, 8, 15, 16])
    whole, nothing = asyncio.run(engine.score(ToScore([sequence, sequence], [2, 4], top_k=VOCAB_SIZE, temperature=1.0)))
    torch.testing.assert_close(whole.logprobs.exp().sum(-1), torch.ones(2))
    assert sorted(whole.ids[0].tolist()) == list(range(VOCAB_SIZE))
    assert nothing.ids.shape == (0, VOCAB_SIZE) and nothing.token_logprobs.shape == (0,)
    with pytest.raises(ValueError, match=f"top_k is {VOCAB_SIZE + 1}.*vocabulary of {VOCAB_SIZE}"):
        asyncio.run(engine.score(ToScore([sequence], [2], top_k=VOCAB_SIZE + 1, temperature=1.0)))
    with pytest.raises(ValueError, match="prompt length 0"):
        asyncio.run(engine.score(ToScore([sequence], [0], top_k=1, temperature=1.0)))


@pytest.mark.parametrize(("top_k", "temperature"), [(0, 1.0), (3, 0.7)])
def test_given_ids_and_most_probable_ids_are_those_of_transformers(
    engine: TorchEngine, folders: dict[str, Path], top_k: int, temperature: float
) -> None:
    prompts = [[5, 9, 11], [7], [3, 4, 5, 6, 7]]
    drawn = generate(engine, prompts, [1, 2, 3], temperature=temperature, num_top_ids=5)
    given = [own.top_ids for own in drawn if own.top_ids is not None]
    tokens = [torch.tensor([*p, *g.tokens.tolist()]) for p, g in zip(prompts, drawn, strict=True)]
    options: dict[str, Any] = {"top_k": top_k, "temperature": temperature, "given": given}
    scores = asyncio.run(engine.score(ToScore(tokens, [len(p) for p in prompts], **options)))
    for prompt, own, ids, scored in zip(prompts, drawn, given, scores, strict=True):
        expected = reference_logprobs(folders["qwen3"], prompt, own.tokens.tolist(), temperature)
        assert ids.sort().values.tolist() == expected.topk(5).indices.sort().values.tolist()
        assert scored.given_logprobs is not None and scored.logprobs.shape == (len(ids), top_k)
        torch.testing.assert_close(scored.given_logprobs, expected.gather(1, ids.long()), rtol=0, atol=1e-5)
        torch.testing.assert_close(scored.token_logprobs, own.logprobs, rtol=0, atol=1e-5)
        assert scored.token_logprobs.stride() == (1,)  # what travels as bytes


def test_hidden_states_make_the_log_probs_of_transformers(engine: TorchEngine, folders: dict[str, Path]) -> None:
    """Also of one response among others, and of none; they are what the output matrix reads, rounded to bfloat16."""
    generator, starts, head = torch.Generator().manual_seed(1), (1, 3, 5), engine.model.get_output_embeddings().weight
    tokens = [torch.randint(3, VOCAB_SIZE, (length,), generator=generator) for length in (9, 4, 5)]
    scores = asyncio.run(engine.score(ToScore(tokens, starts, top_k=2, temperature=0.8, hidden_size=64)))
    check_scores(scores, ToScore(tokens, starts, temperature=1.0, top_k=2, hidden_size=64), vocab_size=VOCAB_SIZE)
    for sequence, start, own in zip(tokens[:2], starts, scores, strict=False):
        expected = reference_logprobs(folders["qwen3"], sequence[:start].tolist(), sequence[start:].tolist(), 0.8)
        assert own.hidden is not None
        found = (own.hidden.float() @ head.T / 0.8).log_softmax(-1)
        assert float((expected.exp() * (expected - found)).sum(-1).max()) < 1e-4
        assert float((found - expected).abs().max()) < 0.1
    for wrong, problem in ((torch.zeros(8, 64), "hidden is torch.float32"), (None, "hidden is no tensor")):
        with pytest.raises(ValueError, match=problem):
            bad = [replace(scores[0], hidden=wrong), *scores[1:]]
            check_scores(bad, ToScore(tokens, starts, temperature=1.0, top_k=2, hidden_size=64), vocab_size=VOCAB_SIZE)
    assert scores[0].hidden is not None
    infinite = replace(scores[0], hidden=scores[0].hidden.clone().fill_(torch.inf))
    with pytest.raises(ValueError, match="sequence 0: a hidden state is not finite"):
        bad = [infinite, *scores[1:]]
        check_scores(bad, ToScore(tokens, starts, temperature=1.0, top_k=2, hidden_size=64), vocab_size=VOCAB_SIZE)


def test_scores_may_enter_autograd(engine: TorchEngine) -> None:
    generation = generate(engine, [[5, 6]], [0])[0]
    given = score(engine, [[5, 6]], [generation])[0]
    for tensor in (generation.tokens, generation.logprobs, given.ids, given.logprobs, given.token_logprobs):
        assert not tensor.is_inference()
    weight = torch.ones((), requires_grad=True)
    (weight * given.logprobs).sum().backward()  # an inference tensor raises here
    (weight * generation.logprobs).sum().backward()
    assert weight.grad is not None


def test_model_that_changes_its_logits_is_refused_for_scoring(tmp_path: Path) -> None:
    config = GraniteConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, logits_scaling=4.0, initializer_range=0.5, eos_token_id=2,
    )  # fmt: skip
    GraniteForCausalLM(config).save_pretrained(tmp_path)
    engine = TorchEngine.from_pretrained(tmp_path, TorchEngineConfig(dtype="float32"))
    with pytest.raises(UserError, match="'granite' changes its logits"):
        asyncio.run(engine.score(ToScore([torch.tensor([4, 5, 6])], [1], top_k=2, temperature=1.0)))


def test_wrong_weights_are_refused_and_leave_no_half_loaded_engine(
    engine: TorchEngine, folders: dict[str, Path]
) -> None:
    good = list(engine.model.named_parameters())
    name, tensor = good[3]
    wrong = {
        f"{name!r} has shape": [*good[:3], (name, tensor[:1]), *good[4:]],
        f"are missing, among them {name!r}": [*good[:3], *good[4:]],
        "'extra' does not exist": [*good, ("extra", tensor)],
        f"{name!r} arrives twice": [*good, good[3]],
    }
    target = TorchEngine.empty(folders["qwen3"], TorchEngineConfig(dtype="float32"))
    for message, weights in wrong.items():
        asyncio.run(target.load_weights(good, 1))
        with pytest.raises(ValueError, match=message):
            asyncio.run(target.load_weights(weights, 2))
        assert target.weight_version == 1
        assert torch.equal(generate(target, [[5]], [0])[0].tokens, generate(engine, [[5]], [0])[0].tokens)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("value", "dtype"),
    [(float("nan"), "float32"), (float("-inf"), "float32"), (float("inf"), "bfloat16"), (3.4e38, "bfloat16")],
)
def test_nonfinite_weights_are_refused_and_the_old_ones_answer_on(
    engine: TorchEngine, folders: dict[str, Path], value: float, dtype: Any, streamed: bool
) -> None:
    """Also such as become infinite in the engine's dtype."""
    good = {name: tensor.clone() for name, tensor in engine.model.named_parameters()}
    name = next(name for name, tensor in reversed(good.items()) if tensor.dim() == 2)
    bad = {**good, name: good[name].clone()}
    bad[name][1, 2] = value
    target = TorchEngine.empty(folders["qwen3"], TorchEngineConfig(dtype=dtype))
    asyncio.run(target.load_weights(good.items(), 1))
    before = generate(target, PROMPTS, SEEDS)
    with pytest.raises(NonFiniteError) as refused:
        asyncio.run(target.load_weights(iter(bad.items()) if streamed else bad.items(), 2))
    assert f"weight {name!r} of the student has values that are NaN or infinite in {dtype}" in str(refused.value)
    assert "\n" not in str(refused.value) and "go back to a checkpoint" in str(refused.value)
    assert target.weight_version == 1
    for old, now in zip(before, generate(target, PROMPTS, SEEDS), strict=True):
        assert torch.equal(old.tokens, now.tokens) and torch.equal(old.logprobs, now.logprobs)


def test_unreadable_checkpoints_name_the_folder(tmp_path: Path) -> None:
    def refuse(folder: Path, match: str) -> None:
        with pytest.raises(UserError, match=match) as caught:
            TorchEngine.from_pretrained(folder, TorchEngineConfig(dtype="float32"))
        assert str(folder) in str(caught.value) and "\n" not in str(caught.value)

    refuse(tmp_path / "nowhere", "no config.json")
    make_hf_model(tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    refuse(tmp_path / "cut", "not a sound safetensors file: truncated")
    weights.unlink()
    refuse(tmp_path / "cut", "no safetensors")
    (tmp_path / "cut" / "config.json").write_text("{")
    refuse(tmp_path / "cut", r"config\.json: not valid JSON")
    small, large = make_hf_model(tmp_path / "small", num_layers=1), make_hf_model(tmp_path / "large", num_layers=2)
    (large / "model.safetensors").write_bytes((small / "model.safetensors").read_bytes())
    refuse(large, "missing keys")


def test_prompt_longer_than_the_model(engine: TorchEngine) -> None:
    with pytest.raises(UserError, match=r"prompt longer than the model: 250 .* 16 > max_position_embeddings 256"):
        generate(engine, [[3] * 250], [0])
    with pytest.raises(UserError, match="sequence longer than the model: 257"):
        asyncio.run(engine.score(ToScore([torch.full((257,), 3)], [1], top_k=1, temperature=1.0)))


def test_bfloat16_engine_reports_fp32_logprobs(folders: dict[str, Path]) -> None:
    engine = TorchEngine.from_pretrained(folders["qwen3"], TorchEngineConfig(dtype="bfloat16"))
    generation = generate(engine, [[5, 6]], [0])[0]
    assert next(engine.model.parameters()).dtype == torch.bfloat16
    assert generation.logprobs.dtype == torch.float32
    torch.testing.assert_close(
        score(engine, [[5, 6]], [generation])[0].token_logprobs, generation.logprobs, rtol=0, atol=0.1
    )


def test_sleep_gives_the_gpus_memory_back(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """To the device, from torch's cache: after the weights' storages are freed."""
    engine = TorchEngine.from_pretrained(folders["qwen3"], TorchEngineConfig(dtype="float32"))
    held: list[int] = []
    weights = list(engine.weight_slots.values())
    monkeypatch.setattr(type(engine.model), "device", torch.device("cuda", 0))
    monkeypatch.setattr(
        torch.cuda, "empty_cache", lambda: held.append(sum(one.untyped_storage().nbytes() for one in weights))
    )
    asyncio.run(engine.sleep())
    assert held == [0]
