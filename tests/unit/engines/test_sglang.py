"""SglangClient against answers of a real SGLang 0.5.23 about a tiny model, as they came and with one thing wrong.

The real server: tests/integration/test_sglang.py (``make sglang``)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from mopd.base.types import UserError
from mopd.config.groups import SglangEngineConfig
from mopd.engines.clients.sglang import SglangClient
from mopd.engines.interface import (
    EngineRejected,
    EngineUnavailable,
    Generation,
    SamplingParams,
    Scores,
    ToDraw,
    ToScore,
)
from mopd.engines.sglang import child as sglang_child
from mopd.engines.sglang import engine as sglang_engine
from mopd.engines.sglang.engine import SglangEngine, SglangIncoming
from mopd.engines.sglang.start import SglangProcess, server_arguments
from mopd.engines.wire.weights import load_staged, stage_updates
from tests.fixtures.tiny_models import make_hf_model, make_tokenizer
from tests.unit.engines.raw_server import response, serving

PROMPT = [5, 9, 11, 20, 30, 7, 8, 22]
ANSWERS = json.loads((Path(__file__).parents[2] / "fixtures" / "sglang_answers.json").read_text(encoding="utf-8"))
SCORED = json.dumps(ANSWERS["scored"])
"""With ``max_new_tokens: 0``, ``logprob_start_len: 3``, ``top_logprobs_num: 3``."""
DRAWN = json.dumps(ANSWERS["drawn"])
"""With ``max_new_tokens: 5``, ``top_logprobs_num: 2``."""
TWO_VERSIONS = [{"version": "6", "start": 0, "end": 3}, {"version": "7", "start": 3, "end": 5}]
"""``weight_versions`` where an update came in mid-response."""
TOO_LONG = b'{"error":{"message":"The input (480 tokens) is longer than the model\'s context length (256 tokens)."}}'
Change = Callable[[dict[str, Any]], Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_hf_model(tmp_path_factory.mktemp("model"))
    make_tokenizer(folder)
    return folder


class Server:
    """Answers to ``/generate`` with ``body``."""

    def __init__(self, body: str, change: Change | None = None, *, status: str = "200 OK") -> None:
        answer = json.loads(body)
        if change is not None:
            change(answer)
        self.body, self.status = json.dumps(answer).encode(), status
        self.requests: list[dict[str, Any]] = []

    def answer(self, path: str, body: bytes) -> bytes:
        assert path == "/generate"
        self.requests.append(json.loads(body))
        return response(self.body, self.status)

    def ask(self, folder: Path, action: Callable[[SglangClient], Awaitable[Any]]) -> Any:
        async def run() -> Any:
            async with serving(self.answer) as url:
                client = SglangClient(url, folder, token="secret", timeout_s=10.0)
                try:
                    return await action(client)
                finally:
                    await client.close()

        return asyncio.run(run())

    def score(self, folder: Path, start: int = 4, **kwargs: Any) -> Scores:
        asked = {"top_k": 3, "temperature": 1.0, **kwargs}
        (given,) = self.ask(folder, lambda client: client.score(ToScore([torch.tensor(PROMPT)], [start], **asked)))
        return given

    def draw(self, folder: Path, prompt: list[int] = PROMPT, **sampling: Any) -> Generation:
        params = SamplingParams(**{"max_new_tokens": 5, "num_top_ids": 2, **sampling})
        (given,) = self.ask(folder, lambda client: client.generate(ToDraw([prompt], params, [3])))
        return given


def test_scores_are_asked_from_a_place_earlier(folder: Path) -> None:
    server = Server(SCORED)
    given = server.score(folder)
    assert (
        given.ids.tolist() == [[34, 8, 39], [34, 45, 43], [34, 12, 8], [34, 8, 19]] and given.ids.dtype == torch.int32
    )
    assert given.token_logprobs.tolist() == pytest.approx([-6.9767742, -7.6776819, -3.0801182, -5.0189466])
    assert given.logprobs[0].tolist() == pytest.approx([-1.4639586, -2.4405866, -2.6999946])
    (request,) = server.requests
    assert request["input_ids"] == PROMPT and request["logprob_start_len"] == 3 and request["top_logprobs_num"] == 3
    assert request["sampling_params"]["max_new_tokens"] == 0
    assert server.score(folder, start=8).ids.shape == (0, 3) and len(server.requests) == 1


def test_the_last_id_of_the_vocabulary_is_called_0(folder: Path) -> None:
    """A quirk of SGLang, whose log-prob is that id's (tests/integration/test_sglang.py scores it)."""
    tokens = [*PROMPT[:4], 47, *PROMPT[5:]]
    server = Server(SCORED, lambda answer: answer["meta_info"]["input_token_logprobs"][1].__setitem__(1, 0))
    (given,) = server.ask(
        folder, lambda client: client.score(ToScore([torch.tensor(tokens)], [4], top_k=3, temperature=1.0))
    )
    assert given.token_logprobs[0] == pytest.approx(-6.9767742)
    with pytest.raises(EngineUnavailable, match="scores other tokens"):
        server.score(folder)


def test_a_response_names_the_weights_of_each_token(folder: Path) -> None:
    server = Server(DRAWN, lambda answer: answer["meta_info"].update(weight_versions=TWO_VERSIONS))
    given = server.draw(folder, temperature=0.5, top_p=0.9)
    assert given.tokens.tolist() == [34, 43, 9, 16, 9] and given.finish_reason == "length"
    assert given.token_versions.tolist() == [6, 6, 6, 7, 7]
    assert given.top_ids is not None and given.top_ids.tolist() == [[43, 34], [43, 34], [16, 34], [34, 43], [43, 34]]
    assert given.logprobs.tolist() == pytest.approx([-1.4312487, -0.8678178, -2.5924232, -3.41733, -4.1812482])
    params = server.requests[0]["sampling_params"]
    assert (params["temperature"], params["top_p"], params["sampling_seed"]) == (0.5, 0.9, 3)
    assert params["stop_token_ids"] == [2] and params["ignore_eos"] is False


def test_what_sglang_draws_beyond_an_end_is_cut(folder: Path) -> None:
    """Of ``ignore_eos`` it heeds no stop token; texts it cannot see."""
    server = Server(DRAWN)
    assert server.draw(folder).token_versions.tolist() == [-1] * 5  # the checkpoint's
    given = server.draw(folder, ignore_eos=True, stop_token_ids=(9,))
    assert (given.tokens.tolist(), given.finish_reason, len(given.token_versions)) == ([34, 43, 9], "stop", 3)
    assert given.top_ids is not None and len(given.top_ids) == len(given.logprobs) == 3
    given = server.draw(folder, stop=("g",))  # ids begin with 3 special tokens: 9 is g
    assert (given.tokens.tolist(), given.finish_reason) == ([34, 43, 9], "stop")
    begun = server.draw(folder, prompt=[5, 8], num_begun=1, stop=("f5",))  # f in the prompt, 5 drawn first
    assert begun.tokens.tolist() == [34]


CORRUPT_SCORES: dict[str, Change] = {
    "a row less": lambda answer: answer["meta_info"]["input_token_logprobs"].pop(),
    "another token": lambda answer: answer["meta_info"]["input_token_logprobs"][2].__setitem__(1, 6),
    "another prompt": lambda answer: answer["meta_info"].update(prompt_tokens=9),
    "no log-prob": lambda answer: answer["meta_info"]["input_token_logprobs"][1].__setitem__(0, None),
    "a log-prob of text": lambda answer: answer["meta_info"]["input_token_logprobs"][1].__setitem__(0, "-1.0"),
    "a truth": lambda answer: answer["meta_info"]["input_token_logprobs"][1].__setitem__(0, True),
    "NaN": lambda answer: answer["meta_info"]["input_token_logprobs"][1].__setitem__(0, float("nan")),
    "an id of text": lambda answer: answer["meta_info"]["input_top_logprobs"][1][0].__setitem__(1, "34"),
    "an id below 0": lambda answer: answer["meta_info"]["input_top_logprobs"][1][0].__setitem__(1, -1),
    "an entry less": lambda answer: answer["meta_info"]["input_top_logprobs"][2].pop(),
    "a null row": lambda answer: answer["meta_info"]["input_top_logprobs"].__setitem__(2, None),
    "no rows": lambda answer: answer["meta_info"].pop("input_top_logprobs"),
    "no log-probs": lambda answer: answer["meta_info"].pop("input_token_logprobs"),
    "no meta_info": lambda answer: answer.pop("meta_info"),
}
CORRUPT_RESPONSES: dict[str, Change] = {
    "other tokens": lambda answer: answer["output_ids"].__setitem__(0, 35),
    "a token less": lambda answer: answer["output_ids"].pop(),
    "no tokens": lambda answer: answer.pop("output_ids"),
    "no log-prob of it": lambda answer: answer["meta_info"]["output_token_logprobs"][0].__setitem__(0, None),
    "a row less": lambda answer: answer["meta_info"]["output_top_logprobs"].pop(),
    "no versions": lambda answer: answer["meta_info"].pop("weight_versions"),
    "a gap of versions": lambda answer: answer["meta_info"]["weight_versions"][0].update(start=1),
    "too few versions": lambda answer: answer["meta_info"]["weight_versions"].pop(),
    "an unknown end": lambda answer: answer["meta_info"].update(finish_reason={"type": "tired"}),
    "no end": lambda answer: answer["meta_info"].update(finish_reason=None),
}


@pytest.mark.parametrize("change", CORRUPT_SCORES)
def test_corrupt_scores_are_no_answers(folder: Path, change: str) -> None:
    with pytest.raises(EngineUnavailable, match="corrupt answer"):
        Server(SCORED, CORRUPT_SCORES[change]).score(folder)


@pytest.mark.parametrize("change", CORRUPT_RESPONSES)
def test_corrupt_responses_are_no_answers(folder: Path, change: str) -> None:
    with pytest.raises(EngineUnavailable, match="corrupt answer"):
        Server(DRAWN, CORRUPT_RESPONSES[change]).draw(folder)


def test_what_sglang_gives_up_or_refuses(folder: Path) -> None:
    finish = {"type": "abort", "message": "no memory\nleft", "status_code": 503}
    with pytest.raises(EngineUnavailable, match=r"gave a request up: 'no memory\\nleft'") as gave_up:
        Server(DRAWN, lambda answer: answer["meta_info"].update(finish_reason=finish)).draw(folder)
    assert "\n" not in str(gave_up.value)
    refusing = Server(DRAWN, status="400 Bad Request")
    refusing.body = TOO_LONG
    with pytest.raises(EngineRejected, match="HTTP 400: The input"):
        refusing.score(folder)


def test_what_the_user_must_cure(folder: Path) -> None:
    server = Server(SCORED)

    def refuse(kind: type[Exception], match: str, ask: Callable[[], object]) -> None:
        with pytest.raises(kind, match=match) as caught:
            ask()
        assert "\n" not in str(caught.value) and not server.requests

    refuse(UserError, "temperature 1 only, loss.temperature is 0.5", lambda: server.score(folder, temperature=0.5))
    refuse(EngineRejected, "no hidden states", lambda: server.score(folder, hidden_size=64))
    given = [torch.zeros(4, 1, dtype=torch.int32)]
    refuse(EngineRejected, "no log-probs of ids that it is asked for", lambda: server.score(folder, given=given))
    refuse(UserError, "log-probs after penalties", lambda: server.draw(folder, presence_penalty=0.5))
    # such an id would end the server
    refuse(ValueError, "outside the vocabulary of 48", lambda: server.draw(folder, prompt=[5, 48]))
    refuse(UserError, "255 prompt tokens", lambda: server.draw(folder, prompt=[5] * 255))


def test_what_sglang_is_started_with(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU by itself; on a CPU by what runs there."""
    cfg = SglangEngineConfig(type="sglang", dtype="float32", tensor_parallel_size=2, extra={"attention_backend": "fa3"})
    asked: dict[str, Any] = {"max_sequence": 100, "enable_sleep_mode": True, "fixed": False}
    with pytest.raises(UserError, match="SGLang cannot sleep on this machine"):
        server_arguments(folder, cfg, **asked)
    incoming = SglangIncoming(cast(Any, None))
    assert incoming._target() == ({}, torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert incoming._target() == ({}, torch.device("cuda"))
    given = server_arguments(folder, cfg, **asked)
    assert (given["device"], given["attention_backend"], given["tp_size"]) == ("cuda", "fa3", 2)
    assert (given["enable_memory_saver"], given["enable_weights_cpu_backup"], given["load_format"]) == (
        True,
        False,
        "dummy",
    )
    assert "disable_cuda_graph" not in given and given["context_length"] == 108
    teacher = server_arguments(folder, cfg, **{**asked, "fixed": True})
    assert teacher["enable_weights_cpu_backup"] and teacher["load_format"] == "safetensors"
    for extra, said in {
        "tp_size": "set engine.tensor_parallel_size",
        "quantization": "at each update",
        "speculative_algorithm": "a draft keeps its first weights",
        "port": "remove",
    }.items():
        with pytest.raises(UserError, match=said):
            server_arguments(folder, replace(cfg, extra={extra: 1}), **asked)


class Started:
    """Stands where a ``SglangProcess`` does, in front of a server that a test makes."""

    failure: str | None = None

    def __init__(self, folder: Path, url: str) -> None:
        self.name, self.client = str(folder), SglangClient(url, folder, timeout_s=10.0)

    async def close(self) -> None:
        await self.client.close()


def test_new_weights_are_files_between_a_pause_and_its_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several files where they are large; none is left. What SGLang does not load ends the engine."""
    monkeypatch.setattr(sglang_engine, "FILE_BYTES", 20_000)
    weights = load_file(folder / "model.safetensors")
    routes: list[str] = []
    loaded: dict[str, torch.Tensor] = {}
    places: list[Path] = []
    status = ["200 OK"]

    def answer(path: str, body: bytes) -> bytes:
        routes.append(path)
        told = json.loads(body)
        if path == "/update_weights_from_disk":
            assert (told["weight_version"], told["load_format"]) == ("3", "safetensors")
            places.append(Path(told["model_path"]))
            for file in places[-1].glob("*.safetensors"):
                loaded.update(load_file(file))
            assert len([*places[-1].iterdir()]) > 1
            return response(b'{"success": true, "message": "", "num_paused_requests": 0}', status[0])
        return response(b'{"status": "ok"}')

    async def run() -> None:
        async with serving(answer) as url:
            cfg = SglangEngineConfig(type="sglang", dtype="float32")
            engine = SglangEngine(
                cast(Any, Started(folder, url)), cfg, max_sequence=99, can_sleep=False, cache_tokens=None, fixed=False
            )
            with pytest.raises(RuntimeError, match="no weights"):
                await engine.generate(ToDraw([[5]], SamplingParams(max_new_tokens=1), [0]))
            await load_staged(engine, stage_updates(weights.items(), 3))
            assert (await engine.info()).max_positions == 99 and engine.weight_version == 3
            assert routes == ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]
            assert loaded.keys() == weights.keys()
            assert all(torch.equal(loaded[name], tensor) for name, tensor in weights.items())
            status[0] = "400 Bad Request"
            with pytest.raises(EngineUnavailable, match="is gone: a weight update failed"):
                await load_staged(engine, stage_updates(weights.items(), 3))
            assert engine.weight_version == -1
            with pytest.raises(EngineUnavailable, match="is gone"):
                await engine.info()
            await engine.close()

    asyncio.run(run())
    assert len(places) == 2 and not any(place.exists() for place in places)


def test_the_server_ends_whatever_fails_before(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The group that is left, then the connections."""
    endless = tmp_path / "endless.py"
    endless.write_text("import time\ntime.sleep(600)\n", encoding="utf-8")
    monkeypatch.setattr(sglang_child, "__file__", str(endless))

    async def fail() -> None:
        raise OSError("cannot be closed")

    async def run() -> None:
        process = SglangProcess({"model_path": str(folder), "device": "cpu"})
        cfg = SglangEngineConfig(type="sglang", dtype="float32")
        engine = SglangEngine(process, cfg, max_sequence=99, can_sleep=False, cache_tokens=None, fixed=False)
        assert process.failure is None
        monkeypatch.setattr(engine.incoming, "leave", fail)
        monkeypatch.setattr(process.client, "close", fail)
        try:
            with pytest.raises(OSError, match="cannot be closed"):
                await engine.close()
            assert process.failure is not None and not process._folder.path.exists()
        finally:
            process._process.kill()

    asyncio.run(run())
