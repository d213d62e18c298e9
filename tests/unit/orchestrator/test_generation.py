"""Answers of ``mopd generate`` to prompts from the command line, by a Hugging Face folder or a converted checkpoint."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from mopd.cli.main import main
from mopd.conversion.jobs.streaming import hf_to_megatron
from mopd.conversion.torch_dist.plan import TargetLayout
from mopd.data.tokenizer import load_tokenizer
from mopd.engines.torch.loading import load_model
from tests.fixtures.recipe import RECIPE
from tests.fixtures.seen import Transformers, placeholders, prompt_image
from tests.fixtures.tiny_models import EOS_ID, make_hf_model, make_tokenizer
from tests.fixtures.vision import image_bytes, make_vision_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "student"
    make_hf_model(folder, "qwen3", seed=5)
    make_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("models") / "seeing")


def answers(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> list[dict[str, Any]]:
    assert main(["generate", *map(str, arguments), "--json"]) == 0
    told: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return told


def greedy_continuation(model: Path, text: str, num_tokens: int) -> str:
    """Return the greedy continuation by transformers alone."""
    tokenizer, causal = load_tokenizer(model), load_model(model, "float32", torch.device("cpu"))
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    made = causal.generate(ids, max_new_tokens=num_tokens, do_sample=False)[0, ids.shape[1] :]
    return str(tokenizer.decode(made, skip_special_tokens=True))


def test_greedy_is_what_transformers_says_with_template_and_raw(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--temperature", "0", "--max-new-tokens", "12")
    (chat,) = answers(capsys, model, "sort: b a", *options)
    (raw,) = answers(capsys, model, "sort: b a", "--raw", *options)
    assert chat["response"] == greedy_continuation(model, "user:sort: b a\nassistant:", 12)
    assert raw["response"] == greedy_continuation(model, "sort: b a", 12)
    assert chat["prompt"] == raw["prompt"] == "sort: b a"
    assert chat["response"] != raw["response"] and chat["mean_logprob"] < 0


def test_a_checkpoint_answers_as_the_folder_that_it_came_from(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = hf_to_megatron(model, tmp_path / "checkpoint", TargetLayout(tensor_model_parallel_size=2))
    job.begin(resume=False)
    job.write_share(0, 1)
    job.complete()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    asked = ("first prompt", "another", "--samples", "2", "--seed", "7", "--max-new-tokens", "8")
    assert answers(capsys, tmp_path / "checkpoint", *asked) == answers(capsys, model, *asked)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"], "what was converted is gone"


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_runs_model_ends_as_its_recipe_says(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], is_cut: bool
) -> None:
    options = ("sort: b a", "--temperature", "0", "--max-new-tokens", "12")
    (whole,) = answers(capsys, model, *options)
    text = whole["response"][3:5]
    rest = "" if is_cut else text
    shutil.copytree(model, tmp_path / "hf")
    rollout = f"{{stop: [{json.dumps(text)}], stop_text: {'cut' if is_cut else 'kept'}}}"
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("schedule:", f"rollout: {rollout}\nschedule:"))
    (ended,) = answers(capsys, tmp_path, *options)
    before = whole["response"].partition(text)[0]
    assert ended["response"] == before + rest and ended["finish_reason"] == "stop"
    assert ended["num_tokens"] == len(before) + 2 < whole["num_tokens"]  # a token a character


def test_samples_differ_and_depend_on_seed_and_number_alone(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    many = answers(capsys, model, "a", "b", "--samples", "3", "--max-new-tokens", "16")
    texts = [one["response"] for one in many]
    assert [one["prompt"] for one in many] == ["a"] * 3 + ["b"] * 3 and len(set(texts)) == 6
    assert [
        one["response"] for one in answers(capsys, model, "a", "--samples", "2", "--max-new-tokens", "16")
    ] == texts[:2]
    assert answers(capsys, model, "a", "--seed", "1", "--max-new-tokens", "16")[0]["response"] != texts[0]


def test_a_prompt_from_standard_input_and_text_for_a_pipe(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (expected,) = answers(capsys, model, "two\nlines", "--temperature", "0", "--max-new-tokens", "8")
    monkeypatch.setattr("sys.stdin", io.StringIO("two\nlines\n"))
    assert main(["generate", str(model), "-", "--temperature", "0", "--max-new-tokens", "8"]) == 0
    told = capsys.readouterr()
    assert told.out == expected["response"] + "\n"
    assert told.err.startswith(f"{expected['num_tokens']} tokens, {expected['finish_reason']}, mean log-prob -")
    assert main(["generate", str(model), "a", "b", "--samples", "2", "--max-new-tokens", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith(">>> ")] == [">>> a", ">>> b"]
    assert sum(line.startswith("--- ") for line in lines) == 4


def greedy_of_images(folder: Path, ids: list[int], images: list[bytes], num_tokens: int) -> str:
    """Return the greedy continuation by transformers alone, one token after another."""
    reference, shown = Transformers(folder), [prompt_image(folder, image) for image in images]
    prompt, made = list(ids), []
    for _ in range(num_tokens):
        rows = reference.logprobs([*prompt, *made, 0], len(prompt) + len(made), shown)
        made.append(int(rows.argmax()))
        if made[-1] == EOS_ID:
            break
    return str(load_tokenizer(folder).decode(made, skip_special_tokens=True))


def test_images_stand_where_their_marks_are(seeing: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Images come in the order of the marks, over all prompts; one prompt has none."""
    contents = [image_bytes(56, 84), image_bytes(75, 101, 1, kind="JPEG"), image_bytes(56, 56, 2)]
    files = [tmp_path / f"{number}.img" for number in range(3)]
    for file, content in zip(files, contents, strict=True):
        file.write_bytes(content)
    named = [part for file in files for part in ("--image", file)]
    texts = ["<image>a<image>", "b", "c <image>"]
    options = ("--raw", "--temperature", "0", "--max-new-tokens", "5")
    given = answers(capsys, seeing, *texts, *named, *options)
    encode = load_tokenizer(seeing).encode
    spelled = [placeholders(prompt_image(seeing, content)) for content in contents]
    ids = [
        [*spelled[0], *encode("a", add_special_tokens=False), *spelled[1]],
        encode("b", add_special_tokens=False),
        [*encode("c ", add_special_tokens=False), *spelled[2]],
    ]
    for one, own, shown in zip(given, ids, (contents[:2], [], contents[2:]), strict=True):
        assert one["response"] == greedy_of_images(seeing, own, shown, 5), one["prompt"]
    assert [one["prompt"] for one in given] == texts
    (chat,) = answers(capsys, seeing, "<image>a", "--image", files[0], "--temperature", "0", "--max-new-tokens", "5")
    assert chat["mean_logprob"] < 0


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["{model}", "<image>a", "--image", "{one}"], "sees no images: name a vision-language model, or remove"),
        (["{seeing}", "a", "--image", "{one}"], "the prompts have 0 <image> for 1 --image: write <image> where"),
        (["{seeing}", "<image>a"], "the prompts have 1 <image> for 0 --image"),
        (["{seeing}", "<image>a", "--image", "{nowhere}"], "nowhere"),
        (["{seeing}", "<image>a", "--image", "{text}"], "text: no image of the formats PNG, JPEG, WEBP, BMP"),
        (["{seeing}", "<image>a", "--image", "{cut}"], "cut: the image is damaged"),
        (["{seeing}", "<image>" * 17, *["--image", "{one}"] * 17], "a prompt has 17 images: at most 16 are taken"),
    ],
)
def test_images_that_cannot_be_shown_are_one_line(
    model: Path, seeing: Path, tmp_path: Path, arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"model": model, "seeing": seeing, **{name: tmp_path / name for name in ("one", "text", "cut", "nowhere")}}
    (tmp_path / "one").write_bytes(image_bytes(56, 84))
    (tmp_path / "cut").write_bytes(image_bytes(56, 84)[:-400])
    (tmp_path / "text").write_text("no image")
    assert main(["generate", *(argument.format(**names) for argument in arguments)]) == 2
    told = capsys.readouterr()
    assert told.out == "" and line in told.err and told.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["{nowhere}", "a"], "nowhere' is no Hugging Face folder (config.json), run (recipe.yaml) or complete"),
        (["{run}", "a"], "has no export (hf) yet, nor a complete checkpoint: wait"),
        (["{plain}", "a"], "has no chat template: add --raw"),
        (["{model}", ""], "prompt 1 has no tokens: fill it"),
        (["{model}", "a", "--raw", "--max-new-tokens", "999"], "the longest prompt has 1 tokens, the model takes 256"),
        (["{model}", "-", "-"], "generate: - stands twice"),
        (["{model}", "a", "--samples", "0"], "--samples is 0: set 1 to 1000"),
        (["{model}", "a", "--temperature", "nan"], "--temperature is nan: set 0 (greedy) or more"),
        (["{model}", "a", "--max-new-tokens", "0"], "--max-new-tokens is 0: set 1 or more"),
        (["{model}", "a", "--seed", "-1"], "--seed is -1: set 0 or more"),
    ],
)
def test_what_cannot_be_asked_is_one_line(
    model: Path, tmp_path: Path, arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(model, tmp_path / "plain")
    make_tokenizer(tmp_path / "plain", chat_template=None)
    for file in (tmp_path / "plain").glob("chat_template*"):
        file.unlink()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text("")
    names = {"model": model, **{name: tmp_path / name for name in ("nowhere", "run", "plain")}}
    if arguments == ["{model}", ""]:
        arguments = [*arguments, "--raw"]
    assert main(["generate", *(argument.format(**names) for argument in arguments)]) == 2
    told = capsys.readouterr()
    assert told.out == "" and line in told.err and told.err.count("\n") == 1
