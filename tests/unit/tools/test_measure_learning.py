"""``tools/measure_learning.py``: what it plans, refuses and keeps, the distance that it measures, its tables."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mopd.base.types import UserError
from tools import measure_learning
from tools.learning.contenders import CONFLICT, CONTENDERS, DECISION, GATE, PAYLOADS, REFERENCE, TOYS, Contender
from tools.learning.distance import _along_own_text
from tools.learning.tables import BEGIN, END, fill
from tools.toys.grammars import _model

ONLY = [REFERENCE, "reverse_kl", "foreign"]
QUESTIONS = list(dict.fromkeys(one.question for one in CONTENDERS))


def test_a_plan_has_every_seed_of_the_named_ones_and_a_key_that_follows_the_recipe() -> None:
    cells = measure_learning.planned(ONLY, 2, [])
    assert [(cell.contender.name, cell.toy, cell.seed) for cell in cells] == [
        (name, "foreign", seed) for seed in (0, 1) for name in (REFERENCE, "reverse_kl")
    ]
    keys = [cell.key for cell in cells]
    assert len(set(keys)) == 4
    assert [cell.key for cell in measure_learning.planned(ONLY, 2, ["run_dir=elsewhere"])] == keys
    assert not {cell.key for cell in measure_learning.planned(ONLY, 2, ["loss.top_k=8"])} & set(keys)


@pytest.mark.parametrize(
    ("overrides", "only", "line"),
    [
        (("loss.tale=none",), ["odd", "foreign"], r"contender 'odd' on foreign: .*unknown key 'loss.tale'"),
        ((), ["odd", "forein"], "--only: 'forein' is no contender and no toy"),
    ],
)
def test_what_cannot_run_is_named_before_anything_runs(
    overrides: tuple[str, ...], only: list[str], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure_learning, "CONTENDERS", (Contender("odd", "Odd", overrides),))
    with pytest.raises(UserError, match=line):
        measure_learning.planned(only, 1, [])


def test_what_is_done_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first line's run has failed; the second's result is of another recipe."""
    first, second = measure_learning.planned(ONLY, 1, [])
    keys = {first.key, second.key}
    for cell, key in ((first, first.key), (second, "of another recipe")):
        line = {"contender": cell.contender.name, "toy": cell.toy, "seed": cell.seed}
        (tmp_path / f"{key}.json").write_text(json.dumps({"key": key, **line, "failed": "loss is nan"}))
    monkeypatch.setattr(measure_learning, "RECORD", tmp_path / "record.jsonl")
    listing = ["measure_learning", "--only", *ONLY, "--seeds", "1", "--out", str(tmp_path), "--list"]
    for options, listed in (([], {second.key}), (["--retry"], keys), (["--missing"], set())):
        monkeypatch.setattr(sys, "argv", [*listing, *options])
        assert measure_learning.main() == 0
        out = capsys.readouterr().out
        assert f"{2 - len(listed)} of 2 runs are done" in out and {key for key in keys if key in out} == listed


def test_contenders_have_names_of_their_own_and_known_toys() -> None:
    assert len({one.name for one in CONTENDERS}) == len(CONTENDERS)
    assert {toy for one in CONTENDERS for toy in one.toys} <= set(TOYS)


def test_the_distance_is_the_kl_whatever_the_text() -> None:
    """Two models that say the same of every text, so that the KL is a sum over five words. Prompts of unequal length;
    answers end early, at the fourth word of ten, or not at all."""
    torch.manual_seed(0)
    heads = [torch.randn(5, 96) / 10 for _ in range(2)]
    models = [_model(torch.ones(5, 96), head, None).eval() for head in heads]
    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=1)
    p, q = (head.double().sum(1).softmax(0) for head in heads)
    for (first, second), expected in (((0, 1), (p * (p / q).log()).sum()), ((1, 0), (q * (q / p).log()).sum())):
        found, _ = _along_own_text(models[first], models[second], [[2], [3, 4, 2]], 10, tokenizer)
        assert found == pytest.approx(float(expected), rel=1e-4)


def test_tokens_after_the_end_and_before_the_prompt_count_nowhere() -> None:
    """The first model always ends at once; the second is as sure of it after the prompt, and of nothing elsewhere."""
    ends, unsure = torch.zeros(5, 96), torch.zeros(5, 96)
    ends[1], unsure[1] = 1.0, 0.0
    embeddings = torch.ones(5, 96)
    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=1)
    models = [_model(embeddings, head, None).eval() for head in (ends, unsure)]
    found, never_drawn = _along_own_text(*models, [[2], [3, 4]], 10, tokenizer)  # type: ignore[call-arg]
    assert found == pytest.approx(torch.tensor(5.0).log().item(), rel=1e-3)
    assert never_drawn == 0


def test_words_that_the_other_would_never_draw_are_counted_along_the_own_text() -> None:
    """The first draws five words alike and ends at the second one; the other is sure of one word, and says the four
    others never."""
    alike, sure = torch.zeros(5, 96), torch.zeros(5, 96)
    sure[3] = 1.0
    models = [_model(torch.ones(5, 96), head, None).eval() for head in (alike, sure)]
    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=1)
    _, never_drawn = _along_own_text(*models, [[2]] * 400, 10, tokenizer)  # type: ignore[call-arg]
    assert never_drawn == pytest.approx(0.8, abs=0.03)
    assert _along_own_text(*reversed(models), [[2]], 10, tokenizer)[1] == 0  # type: ignore[call-arg]


def result(name: str, toy: str, seed: int, **more: Any) -> dict[str, Any]:
    return {"contender": name, "toy": toy, "seed": seed, "wall_s": 20.0, **more}


def test_tables_hold_mean_spread_worst_domain_and_failures() -> None:
    results = [
        result(REFERENCE, "long", 0, recovery={"walk": 0.9, "hop": 0.7}),
        result(REFERENCE, "long", 1, recovery={"walk": 1.0, "hop": 0.8}),
        result("k3", "long", 0, failed="the loss is not finite"),
        result("k2", "stochastic", 0, distance={"calm": {"reverse_kl": 0.5, "forward_kl": 0.25}}),
        result("jsd", "stochastic", 0, distance={"calm": {"reverse_kl": 1, "forward_kl": 1, "never_drawn": 0.125}}),
    ]
    page = fill(f"before\n{BEGIN}\noutdated\n{END}\nafter\n", results, QUESTIONS)
    assert page.startswith(f"before\n{BEGIN}\n") and page.endswith(f"{END}\nafter\n") and "outdated" not in page
    assert "| forward_kl | – | – | 0.850 ± 0.071, worst 0.75 (2 × 20 s) | – | – |" in page
    assert "| k3 | – | – | failed: the loss is not finite | – | – |" in page and "k3_reverse" not in page
    assert "| k2 | – | 0.500 / 0.250 / – (1 × 20 s) | – | – | – |" in page
    assert "| jsd | – | 1.000 / 1.000 / 0.125 (1 × 20 s) | – | – | – |" in page
    quick = [
        result(REFERENCE, "quickstart", seed, recovery={"sorting": 0.75 + seed, "reversal": 1.0}) for seed in (0, 1)
    ]
    assert f"| {REFERENCE} | 1.000, 1.000 | 0.750, 1.750 |" in fill(f"{BEGIN}{END}", quick, [CONFLICT])
    domains = {"mixed": {"before": 0.25, "after": 0.75}}
    page = fill(f"{BEGIN}{END}", [result("half: gate", "half", 0, recovery={"mixed": 2.0}, domains=domains)], [GATE])
    assert "| half: gate | 0.250 → 0.750 (1 × 20 s) |" in page
    by_payload = [*results[:1], result("reverse_kl", "stochastic", 0, distance=results[3]["distance"])]
    by_payload += [result("decision: reverse_kl, union", "decision", 0, recovery={"talk": 0.75})]
    page = fill(f"{BEGIN}{END}", by_payload, [PAYLOADS, DECISION])
    assert "| reverse_kl | 0.500 / 0.250 / – (1 × 20 s) |" not in page  # no line of the table itself is measured
    assert "| decision: reverse_kl, union | 0.750, worst 0.75 (1 × 20 s) |" in page
    with pytest.raises(ValueError, match="lacks the lines"):
        fill("no marks", results, QUESTIONS)


def test_at_equal_processor_seconds_each_shows_what_it_had_when_the_fastest_ended() -> None:
    """Supervised training spends 5 s of a processor on its steps, the other run 10 s (half of a processor's 20 s) and
    is half way after 5: its best validation until then counts, though a later one is better and an earlier one too
    good for a domain alone."""
    domains = {name: {"before": 0.2, "teacher": 1.0, "after": 1.0} for name in ("walk", "hop")}

    def trained(name: str, cpu_s: float, rewards: list[tuple[float, float]], **more: Any) -> dict[str, Any]:
        curve = [[10 * i, {"walk": walk, "hop": hop}] for i, (walk, hop) in enumerate(rewards)]
        spent = {"cpu_s": cpu_s, "process_s": 40.0, "steps_s": [0.0, 5.0, 10.0, 20.0], "validations_s": [1.0] * 4}
        recovery = {"walk": 1.0, "hop": 1.0}
        return result(name, "long", 0, recovery=recovery, domains=domains, curve=curve, **spent, **more)

    rewards = [(0.2, 0.2), (0.6, 0.6), (1.0, 0.1), (1.0, 1.0)]
    results = [
        trained(REFERENCE, 20.0, rewards),
        trained("sft_on_teacher", 10.0, rewards),
        result("off_policy_scores", "long", 0, recovery={"walk": 0.5, "hop": 0.7}, domains=domains, curve=[[0, {}]]),
        result("merge", "long", 0, recovery={"walk": 0.5, "hop": 0.7}),
    ]
    table = fill(f"{BEGIN}{END}", results, QUESTIONS).partition("at equal processor seconds\n\n")[2].splitlines()
    assert table[:6] == [
        "|  | long, 5 s |",
        "| --- | --- |",
        "| forward_kl | 0.500 (1 × 10 s) |",
        "| sft_on_teacher | 1.000 (1 × 5 s) |",
        "| off_policy_scores | – |",
        "| best single teacher | – |",
    ]
    assert table[6] == "| merge | 0.600 (1 × 0 s) |"
    assert "processor seconds" not in fill(f"{BEGIN}{END}", results[2:], QUESTIONS)


def test_processor_seconds_are_those_of_one_command_and_of_what_it_starts() -> None:
    busy = "import time\nwhile time.process_time() < 0.5: pass"
    starting = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {busy!r}])"
    with ThreadPoolExecutor(2) as pool:
        ended = pool.map(lambda code: measure_learning._run([sys.executable, "-c", code]), [starting, "print(1)"])
    first, second = ended
    assert first.cpu_s > 0.5 > second.cpu_s > 0 and second.printed == "1\n"


def test_the_record_counts_in_every_checkout_and_newer_results_replace_its_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, record, out = tmp_path / "page.md", tmp_path / "record.jsonl", tmp_path / "out"
    page.write_text("<!-- tables of tools/measure_learning.py: begin --><!-- end -->")
    out.mkdir()
    monkeypatch.setattr(measure_learning, "PAGES", {page: False})
    monkeypatch.setattr(measure_learning, "RECORD", record)
    first, second = (cell for cell in measure_learning.planned(ONLY, 1, []))
    old = {"key": "of another recipe", "contender": first.contender.name, "toy": first.toy, "seed": 0, "failed": "old"}
    other = {**old, "key": second.key, "toy": second.toy, "contender": second.contender.name, "failed": "new"}
    record.write_text("".join(json.dumps(one) + "\n" for one in (old, other)))
    assert measure_learning.done_keys(out, retry=False) == {"of another recipe", second.key}
    (out / "new.json").write_text(json.dumps({**old, "key": first.key, "failed": "newer"}))
    monkeypatch.setattr(sys, "argv", ["measure_learning", "--table", "--out", str(out)])
    assert measure_learning.main() == 0
    (out / "new.json").unlink()
    assert measure_learning.done_keys(out, retry=False) == {first.key, second.key}
    assert len(record.read_text().splitlines()) == 2
    assert "newer" in page.read_text()


def test_a_command_that_fails_or_outlasts_its_deadline_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(subprocess.CalledProcessError) as failed:
        measure_learning._mopd("train", "no-such-recipe.yaml")
    assert "no-such-recipe.yaml" in failed.value.stderr
    monkeypatch.setattr(measure_learning, "RUN_TIMEOUT_S", 0.1)
    with pytest.raises(subprocess.CalledProcessError, match="SIGKILL"):
        measure_learning._run([sys.executable, "-c", "import time; time.sleep(60)"])
