"""``/v1/completions``: numbers of a plain transformers forward, in OpenAI's and vLLM's forms."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
import torch

from mopd.data.tokenizer import load_tokenizer
from mopd.engines.clients.openai import OpenAIScorer
from mopd.engines.interface import EngineInfo, Scores
from mopd.engines.torch.engine import TorchEngine
from tests.fixtures.servers import RunningServer, random_tokens, running_server

PROMPT = [5, 6, 7, 20, 9]


def complete(running: RunningServer, **fields: Any) -> httpx.Response:
    return httpx.post(f"{running.url}/v1/completions", json=fields, timeout=30.0, trust_env=False)


def answer(running: RunningServer, **fields: Any) -> dict[str, Any]:
    response = complete(running, **fields)
    assert response.status_code == 200, response.text
    return dict(response.json())


def logprobs_of(local: TorchEngine, tokens: list[int]) -> torch.Tensor:
    """[L, V] log-softmax of a plain forward; row r is about token r + 1."""
    with torch.inference_mode():
        return local.model(input_ids=torch.tensor([tokens])).logits[0].float().log_softmax(-1)


def test_prompt_logprobs(teacher: RunningServer, local: TorchEngine) -> None:
    """vLLM's form: the top-k of each position and the prompt's own token."""
    given = answer(teacher, prompt=PROMPT, max_tokens=0, prompt_logprobs=3)
    (choice,) = given["choices"]
    first, *rows = choice["prompt_logprobs"]
    assert first is None and len(rows) == len(PROMPT) - 1
    expected = logprobs_of(local, PROMPT)
    for place, row in enumerate(rows):
        top = expected[place].topk(3)
        assert {str(i) for i in top.indices.tolist()} | {str(PROMPT[place + 1])} == set(row)
        for token, entry in row.items():
            assert entry["logprob"] == pytest.approx(expected[place, int(token)].item(), abs=1e-5)
            rank = int((expected[place] > expected[place, int(token)]).sum()) + 1
            assert entry["rank"] == (rank if rank <= 3 else None)
            assert entry["decoded_token"]
    assert choice["token_ids"] == [] and choice["logprobs"] is None
    assert given["usage"] == {"prompt_tokens": 5, "completion_tokens": 0, "total_tokens": 5}


def test_echo_with_logprobs(teacher: RunningServer, local: TorchEngine, folder: Any) -> None:
    """OpenAI's form, as evaluation harnesses ask for it."""
    fields = {"max_tokens": 0, "echo": True, "logprobs": 2, "temperature": 0}
    (choice,) = answer(teacher, prompt=PROMPT, **fields)["choices"]
    tokenizer = load_tokenizer(folder)
    form = choice["logprobs"]
    assert choice["text"] == tokenizer.decode(PROMPT) == "".join(form["tokens"])
    assert form["text_offset"] == [0, 1, 2, 3, 4]
    assert form["token_logprobs"][0] is None and form["top_logprobs"][0] is None
    expected = logprobs_of(local, PROMPT)
    own = [expected[i, token].item() for i, token in enumerate(PROMPT[1:])]
    assert form["token_logprobs"][1:] == pytest.approx(own, abs=1e-5)
    best = expected[:-1].topk(2)
    assert [list(row.values()) for row in form["top_logprobs"][1:]] == [
        pytest.approx(row, abs=1e-5) for row in best.values.tolist()
    ]
    (as_ids,) = answer(teacher, prompt=PROMPT, return_tokens_as_token_ids=True, **fields)["choices"]
    assert as_ids["logprobs"]["tokens"] == [f"token_id:{token}" for token in PROMPT]


def test_a_client_made_for_stock_vllm(teacher: RunningServer, local: TorchEngine) -> None:
    """The engine for other people's servers takes this one for such a server."""
    tokens, starts = random_tokens(9, 30, 4), [4, 1, 4]

    async def score() -> tuple[EngineInfo, list[Scores]]:
        scorer = OpenAIScorer(teacher.url, served_model_name=None, vocab_size=48, max_positions=256, timeout_s=30.0)
        scores = await scorer.score(tokens, starts, top_k=8, temperature=1.0)
        info = await scorer.info()
        await scorer.close()
        return info, scores

    info, scores = asyncio.run(score())
    assert info.model == local.name
    expected = asyncio.run(local.score(tokens, starts, top_k=8, temperature=1.0))
    for theirs, ours in zip(scores, expected, strict=True):
        assert torch.equal(theirs.ids, ours.ids)
        torch.testing.assert_close(theirs.logprobs, ours.logprobs, atol=1e-5, rtol=0)
        torch.testing.assert_close(theirs.token_logprobs, ours.token_logprobs, atol=1e-5, rtol=0)


def test_several_texts_are_completed_as_the_engine_does(
    teacher: RunningServer, local: TorchEngine, folder: Any
) -> None:
    tokenizer = load_tokenizer(folder)
    texts = ["abc", "left 7"]
    fields = {"max_tokens": 6, "temperature": 0.0, "logprobs": 0}
    given = answer(teacher, prompt=texts, model=str(folder), **fields)
    for text, choice in zip(texts, given["choices"], strict=True):
        tokens = tokenizer.encode(text)
        with torch.inference_mode():
            greedy = local.model.generate(torch.tensor([tokens]), max_new_tokens=6, do_sample=False)[0].tolist()
        assert tokens + choice["token_ids"] == greedy
        assert choice["text"] == tokenizer.decode(choice["token_ids"])
        assert choice["finish_reason"] == ("stop" if choice["token_ids"][-1] == 2 else "length")
        expected = logprobs_of(local, greedy)
        own = [expected[i - 1, greedy[i]].item() for i in range(len(tokens), len(greedy))]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(own, abs=1e-5)
    assert [choice["index"] for choice in given["choices"]] == [0, 1]


def test_a_seed_repeats_a_sample(teacher: RunningServer) -> None:
    fields = {"prompt": [PROMPT, PROMPT], "max_tokens": 12, "seed": 3}
    one, two = (answer(teacher, **fields)["choices"] for _ in range(2))
    assert one == two
    assert one[0]["token_ids"] != one[1]["token_ids"]
    assert answer(teacher, **{**fields, "seed": 4})["choices"] != one


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({}, "prompt"),
        ({"prompt": PROMPT, "best_of": 2}, "best_of"),
        ({"prompt": PROMPT, "n": 2}, "n: "),
        ({"prompt": PROMPT, "stream": True}, "stream is true"),
        ({"prompt": PROMPT, "model": "other"}, "model is 'other'"),
        ({"prompt": PROMPT, "max_tokens": -1}, "max_tokens"),
        ({"prompt": PROMPT, "max_tokens": "4"}, "max_tokens"),
        ({"prompt": PROMPT, "max_tokens": 1000}, "a sequence of 1005 tokens"),
        ({"prompt": PROMPT, "temperature": -1}, "temperature"),
        ({"prompt": PROMPT, "temperature": 1e-39}, "temperature is 1e-39"),
        ({"prompt": PROMPT, "top_k": 0}, "top_k is 0"),
        ({"prompt": PROMPT, "seed": -1}, "seed is -1"),
        ({"prompt": PROMPT, "prompt_logprobs": 49}, "top_k is 49"),
        ({"prompt": []}, "a prompt is empty"),
        ({"prompt": ""}, "a prompt is empty"),
        ({"prompt": [[1], []]}, "a prompt is empty"),
        ({"prompt": [1, 48]}, "token 48 is outside"),
        ({"prompt": [-1]}, "not negative"),
        ({"prompt": [2**70]}, "beyond 64 bits"),
        ({"prompt": [2**60]}, "is outside"),
        ({"prompt": PROMPT, "temperature": 1e7}, "temperature is 10000000"),
        ({"prompt": "a" * 8193}, "a text of 8193 characters"),
        ({"prompt": [[1], ["a"]]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": PROMPT, "max_tokens": True}, "max_tokens"),
        ({"prompt": PROMPT, "max_tokens": 2**63}, "a sequence of"),
        ({"prompt": PROMPT, "top_p": 1e300}, "top_p"),
        ({"prompt": PROMPT, "seed": 10**30}, "beyond 64 bits"),
        ({"prompt": PROMPT, "stop": ["x"] * 100}, "stop"),
        ({"prompt": PROMPT, "n": 10**9}, "n: "),
        ({"prompt": PROMPT, "logprobs": 2**40}, "top_k is"),
        ({"prompt": [1, "a"]}, "prompt"),
    ],
)
def test_what_is_refused(teacher: RunningServer, fields: dict[str, Any], problem: str) -> None:
    response = complete(teacher, **fields)
    assert response.status_code == 400
    assert problem in response.json()["error"]["message"]


def test_models(teacher: RunningServer, folder: Any) -> None:
    (model,) = httpx.get(f"{teacher.url}/v1/models").json()["data"]
    assert model == {"id": str(folder), "object": "model", "max_model_len": 256}


def test_without_a_tokenizer(local: TorchEngine) -> None:
    with running_server(local) as running:
        assert "send token ids" in complete(running, prompt="abc").text
        (choice,) = answer(running, prompt=PROMPT, max_tokens=0, echo=True, logprobs=1)["choices"]
        assert choice["text"] == "" and choice["logprobs"]["tokens"][0] == "token_id:5"
