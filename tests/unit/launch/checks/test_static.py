"""``mopd check`` tells everything that is wrong with a recipe and its files, each mistake once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from mopd.base.hardware import Hardware
from mopd.cli import main as cli
from mopd.config.load import draft_recipe
from mopd.launch.checks.inputs import Check
from mopd.launch.checks.static import StaticChecks

MODEL = {
    "model_type": "llama", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64,
    "num_key_value_heads": 2, "intermediate_size": 32, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "rope_theta": 1e4, "tie_word_embeddings": False,
}  # fmt: skip
RECIPE = """\
run_dir: runs/one
student: {model: models/student}
teachers:
  math: {model: models/math, domains: [gsm8k]}
  law: {model: models/law, domains: [law]}
data: {train: [train.jsonl], validation: [validation.jsonl]}
schedule: {steps: 5, prompts_per_step: 4}
rewards: {default: {type: exact_match}}
validation: {every_steps: 5}
"""
MISTAKES = {
    "unknown key": (("{steps: 5", "{steps: 5, stepz: 6"), "unknown key 'schedule.stepz'"),
    "wrong type": (("every_steps: 5", "every_steps: often"), "validation.every_steps: expected a whole number"),
    "no such type": (("exact_match", "exact"), "rewards.default.type: unknown type 'exact'"),
    "out of range": (("prompts_per_step: 4", "prompts_per_step: 0"), "schedule.prompts_per_step is 0"),
    "no folder": (("model: models/law", "model: models/none"), "teachers.law.model: folder 'models/none'"),
    "no file": (("[validation.jsonl]", "[none.jsonl]"), "data.validation: file 'none.jsonl' does not exist"),
    "no teacher": (("domains: [law]", "domains: [tax]"), "no teacher answers for domain 'law' (2 rows)"),
}

OF_FILES = {
    "mistyped folder": (("models/law", "model/law"), "'model/law' is not here and 'models/law' is: correct it, or"),
    "mistyped name": (
        ("models/law", "models/laws"),
        "teachers.law.model: 'models/laws' is not here and 'models/law' is",
    ),
    "mistyped data": (("[train.jsonl]", "['sets/trai.jsonl:x']"), "data.train: 'sets/trai.jsonl:x' is not here and"),
    "samples": (
        (
            "[validation.jsonl]}\nschedule: {",
            "[validation.jsonl], scored: [none]}\nschedule: {on_policy_fraction: 0.5, ",
        ),
        "data.scored: folder 'none' does not exist",
    ),
    "template": (
        ("[validation.jsonl]}", "[validation.jsonl], max_prompt_length: 3, system_prompt: a b}"),
        "data.max_prompt_length: 3 tokens, and the chat template takes 3 without a prompt: raise it",
    ),
    "positions": (
        ("validation: {every_steps: 5}", "rollout: {max_response_length: 4000}"),
        "data.max_prompt_length 1024 + rollout.max_response_length 4000 = 5024 exceeds the 4096 positions of student",
    ),
    "micro-batch": (
        ("{model: models/student}", "{model: models/student, max_tokens_per_micro_batch: 1000}"),
        "student.max_tokens_per_micro_batch: 1000 is less than the 2048 tokens of the longest sample",
    ),
    "ids": (
        ("validation: {every_steps: 5}", "loss: {type: topk_forward_kl, top_k: 65}"),
        "loss.top_k: 65 is above the 64 ids of student.model: lower it",
    ),
    "routes": (
        ("validation: {every_steps: 5}", "rollout: {replay_routes: true}"),
        "rollout.replay_routes is true, and model_type llama has no experts: remove it",
    ),
    "frozen": (
        ("{model: models/student}", "{model: models/student, freeze: [router]}"),
        "student.freeze names router, which this model of model_type llama does not have",
    ),
    "experts": (
        ("{model: models/student}", "{model: models/student, moe: {moe_aux_loss_coeff: 0.1}}"),
        "student.moe is set but model_type llama has no experts: remove the section",
    ),
    "tower": (
        ("{model: models/student}", "{model: models/student, vision: {freeze: none}}"),
        "student.vision is set but model_type llama has no vision: remove the section",
    ),
    "pixels": (
        ("[validation.jsonl]}", "[validation.jsonl], max_pixels: 4096}"),
        "data.max_pixels is set but student.model sees no images: remove the key",
    ),
    "budget of no domain": (
        ("validation: {every_steps: 5}", "loss: {type: topk_forward_kl, domain_budget: {gsm8k: 0.5, lwa: 0.5}}"),
        "loss.domain_budget names ['gsm8k', 'lwa'], the data has ['gsm8k', 'law']: name every domain or none",
    ),
    "weight of no domain": (
        ("[validation.jsonl]}", "[validation.jsonl], domain_weights: {gsm8k: 1, lwa: 2}}"),
        "data.domain_weights names ['gsm8k', 'lwa'], the data has ['gsm8k', 'law']: name every domain or none",
    ),
    "watched domain": (
        ("{every_steps: 5}", "{every_steps: 5, watch: [tax]}"),
        "validation.watch names 'tax', but data.validation has no row of it: add some",
    ),
    "ground truth": (
        ("{type: exact_match}", "{type: multiple_choice}}\nloss: {type: topk_forward_kl, top_k: 8"),
        "validation.jsonl: row 0: the ground truth '1' is no choice: the multiple_choice reward takes a letter",
    ),
    "tokenizer": (("models/law", "models/other"), "do not share a tokenizer: 1 of 3 ids mean different tokens"),
    "stop token": (
        ("validation: {every_steps: 5}", "rollout: {stop_token_ids: [a, b, 7]}"),
        "rollout.stop_token_ids names 7, which is no token of student.model's tokenizer",
    ),
    "decision token": (
        ("validation: {every_steps: 5}", "loss: {type: topk_forward_kl, always_ids: [z]}"),
        "loss.always_ids names 'z', which is no token of student.model's tokenizer",
    ),
    "text of no domain": (
        ("[validation.jsonl]}", "[validation.jsonl], prompt_suffix: {law: x, tax: y}}"),
        "data.prompt_suffix names domain 'tax', and the data has 'gsm8k', 'law': correct or remove it",
    ),
    "own tokenizer": (
        ("models/law", "models/law, tokenizer: own"),
        "but teachers.law.tokenizer is own: remove that key",
    ),
}
"""Mistakes that the files of models show, or names of what is here."""


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[Check]]:
    """Outcomes for a recipe, beside files that fit ``RECIPE``."""
    monkeypatch.chdir(tmp_path)
    for name in ("student", "math", "law", "other"):
        Path("models", name).mkdir(parents=True)
        Path("models", name, "config.json").write_text(json.dumps(MODEL))
        vocabulary = {"a": 0, "b" if name != "other" else "c": 1}
        tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="a"))
        tokenizer.pre_tokenizer = WhitespaceSplit()
        tokenizer.add_special_tokens(["<s>"])
        tokenizer.save(str(Path("models", name, "tokenizer.json")))
        template = "{{ bos_token }} {% for message in messages %}{{ message['content'] }} {% endfor %}"
        config = {"bos_token": {"content": "<s>"}, "chat_template": template}
        Path("models", name, "tokenizer_config.json").write_text(json.dumps(config))
    Path("sets").mkdir()
    Path("sets", "train.jsonl").touch()
    rows = [{"data_source": d, "prompt": "x", "reward_model": {"ground_truth": "1"}} for d in ("gsm8k", "law", "law")]
    for file in ("train.jsonl", "validation.jsonl"):
        Path(file).write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(text: str) -> list[Check]:
        Path("recipe.yaml").write_text(text)
        return list(StaticChecks(draft_recipe("recipe.yaml"), Hardware()).run())

    return run


def failures(checks: list[Check]) -> list[str]:
    return [check.detail for check in checks if check.status == "failed"]


def test_nothing_is_wrong(check: Callable[[str], list[Check]]) -> None:
    checks = check(RECIPE)
    assert not failures(checks)
    assert {"recipe", "layout of the student", "GPUs", "data.train[0]", "rewards of the domains"} <= {
        check.name for check in checks
    }


@pytest.mark.parametrize(
    ("file", "text", "line"),
    [
        ("tokenizer.json", "{}", "models/student/tokenizer.json: "),
        ("tokenizer_config.json", "[1]", "tokenizer_config.json: is no configuration of a tokenizer: copy"),
        ("tokenizer_config.json", "{", "tokenizer_config.json: is no configuration of a tokenizer: copy"),
    ],
)
def test_damaged_tokenizers_are_told(check: Callable[[str], list[Check]], file: str, text: str, line: str) -> None:
    Path("models", "student", file).write_text(text)
    found = failures(check(RECIPE))
    assert found and all(line in one and "\n" not in one for one in found)


def test_what_is_not_here_is_skipped_and_not_counted(check: Callable[[str], list[Check]]) -> None:
    """Names of the Hub, data that only the Hub has, and a tokenizer without its file."""
    Path("models", "math", "tokenizer.json").unlink()
    hub = RECIPE.replace("[train.jsonl]", "['org/set:default/train']").replace("models/law", "Org/Law-7B")
    checks = {one.name: one for one in check(hub.replace(", validation: [validation.jsonl]", "").replace(
        "validation: {every_steps: 5}\n", ""
    ))}  # fmt: skip
    assert {name for name, one in checks.items() if one.status == "skipped"} == {
        "teachers.law.model", "data.train[0]", "tokenizer of math", "teachers of the domains",
    }  # fmt: skip
    assert checks["lengths"].detail == "2048 tokens in 2 of 3 models"
    assert not [one for one in checks.values() if one.status == "failed"]
    named = RECIPE.replace("models/law", "model/law@main")
    assert {one.name: one.status for one in check(named)}["teachers.law.model"] == "skipped"


@pytest.mark.parametrize("name", [*MISTAKES, *OF_FILES])
def test_each_mistake_alone_is_one_line(check: Callable[[str], list[Check]], name: str) -> None:
    (old, new), line = (MISTAKES | OF_FILES)[name]
    (found,) = failures(check(RECIPE.replace(old, new)))
    assert line in found and "\n" not in found


@pytest.mark.parametrize("left_out", MISTAKES)
def test_six_mistakes_are_six_lines(check: Callable[[str], list[Check]], left_out: str) -> None:
    text, lines = RECIPE, []
    for name, ((old, new), line) in MISTAKES.items():
        if name != left_out:
            assert old in text
            text = text.replace(old, new)
            lines.append(line)
    found = failures(check(text))
    assert len(found) == len(lines) == 6, found
    assert all(any(line in detail for detail in found) for line in lines), found


def test_a_view_that_names_no_column(check: Callable[[str], list[Check]]) -> None:
    found = failures(check(RECIPE.replace("domains: [law]", "domains: [law], view: {prompt: '{hint.a} {prompt}'}")))
    files = ("train.jsonl", "validation.jsonl")
    assert [line.partition(" (it has")[0] for line in found] == [
        f"{file}: row 1: teachers.law.view: the row has no column 'hint.a'" for file in files
    ]
    there = RECIPE.replace("domains: [law]", "domains: [law], view: {prompt: '{reward_model.ground_truth}'}")
    assert not failures(check(there))


def test_a_watched_domain_needs_no_teacher(check: Callable[[str], list[Check]]) -> None:
    row = {"data_source": "tax", "prompt": "x", "reward_model": {"ground_truth": "1"}}
    with Path("validation.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    assert not failures(check(RECIPE.replace("{every_steps: 5}", "{every_steps: 5, watch: [tax]}")))
    (found,) = failures(check(RECIPE))
    assert "no teacher answers for domain 'tax' (1 rows)" in found


def test_a_layout_that_divides_nothing(check: Callable[[str], list[Check]]) -> None:
    (found,) = failures(
        check(
            RECIPE.replace(
                "{model: models/student}", "{model: models/student, parallel: {tensor_model_parallel_size: 4}}"
            )
        )
    )
    assert "tensor_model_parallel_size 4 does not divide" in found


def test_too_few_gpus(check: Callable[[str], list[Check]]) -> None:
    check(RECIPE + "teacher_defaults: {placement: {type: local}}\n")
    one = Hardware(gpu_memory_bytes=(2**30,), torch_cuda="12.8")
    (found,) = failures(list(StaticChecks(draft_recipe("recipe.yaml"), one).run()))
    assert "1 GPUs on node 0" in found and "trainer ranks: GPU 0" in found


def test_a_name_of_the_hub_is_not_fetched(check: Callable[[str], list[Check]]) -> None:
    checks = check(RECIPE.replace("model: models/law", "model: somebody/law-expert"))
    assert not failures(checks)
    assert [check.name for check in checks if check.status == "skipped"] == ["teachers.law.model"]


def test_the_command_prints_a_line_for_each(
    check: Callable[[str], list[Check]], capsys: pytest.CaptureFixture[str]
) -> None:
    check(RECIPE.replace("{steps: 5", "{stepz: 5").replace("models/law", "models/none"))
    capsys.readouterr()
    assert cli.main(["check", "recipe.yaml", "--static"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and all(line.startswith("mopd: error: ") for line in lines), lines
    assert cli.main(["check", "recipe.yaml", "--static", "--json"]) == 2
    statuses = [outcome["status"] for outcome in json.loads(capsys.readouterr().out)]
    assert statuses.count("failed") == 3


def test_without_static_the_ranks_do_not_start(
    check: Callable[[str], list[Check]], capsys: pytest.CaptureFixture[str]
) -> None:
    check(RECIPE.replace("models/law", "models/none"))
    assert cli.main(["check", "recipe.yaml"]) == 2
    assert "folder 'models/none' does not exist" in capsys.readouterr().err
