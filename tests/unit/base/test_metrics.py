"""Step records, phase times and the files of records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mopd.base.metrics import (
    JsonlWriter,
    StepMetrics,
    StepTimer,
    horizon_metrics,
    merge_step,
    read_jsonl,
    share_metrics,
    truncate_jsonl,
)
from mopd.base.types import Batch, DomainSums, SampleMeta, UserError


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def sample(sample_id: int, domain: str, response_length: int, **more: Any) -> SampleMeta:
    return SampleMeta(
        sample_id=sample_id,
        domain=domain,
        weight_version=0,
        prompt_length=10,
        response_length=response_length,
        num_loss_tokens=response_length,
        **more,
    )


def test_phases_add_up_and_a_flush_starts_anew() -> None:
    clock = Clock()
    timer = StepTimer(clock)
    timer.begin()
    with timer("rollout"):
        clock.now += 2
    clock.now += 1
    for _ in range(2):
        with timer("optim_step"):
            clock.now += 0.25
    assert timer.flush() == {"rollout": 2, "optim_step": 0.5, "step": 3.5}
    assert timer.flush() == {}


def test_blocks_of_one_phase_that_overlap_count_once() -> None:
    clock = Clock()
    timer = StepTimer(clock)
    first, second = timer("rollout"), timer("rollout")
    with first:
        clock.now += 1
        second.__enter__()
        clock.now += 1
    clock.now += 1
    second.__exit__(None, None, None)
    clock.now += 1
    assert timer.flush() == {"rollout": 3}


def test_time_between_a_flush_and_the_next_begin_belongs_to_no_step() -> None:
    clock = Clock()
    timer = StepTimer(clock)
    timer.begin()
    with timer("rollout"):
        clock.now += 1
        timer.flush()
        clock.now += 60  # validation, a checkpoint
        timer.begin()
        clock.now += 1
    clock.now += 2
    assert timer.flush() == {"rollout": 1, "step": 3}


def test_a_phase_that_is_open_at_the_flush_goes_on_in_the_next_record() -> None:
    clock = Clock()
    timer = StepTimer(clock)
    with timer("rollout"):
        clock.now += 3
        assert timer.flush() == {"rollout": 3}
        clock.now += 1
    assert timer.flush() == {"rollout": 1}


def test_a_step_record_holds_means_by_domain_and_what_was_minimised() -> None:
    batch = Batch(
        samples=(sample(0, "math", 4), sample(1, "code", 2, truncated=True, repeated_share=0.25), sample(2, "math", 6))
    )
    sums = {
        "math": DomainSums(num_tokens=10, sums={"loss": 5.0, "weighted_loss": 0.4, "k1": 1.0, "clamped": 2.0}),
        "code": DomainSums(num_tokens=2, sums={"loss": 3.0, "weighted_loss": 0.2, "k1": 0.5, "clamped": 0.0}),
    }
    metrics = merge_step(7, batch=batch, sums=sums, values={"lr": 0.1}, timings={"rollout": 1.0, "step": 2.0})
    assert metrics.step == 7
    assert metrics.values == pytest.approx(
        {
            "loss": 0.6,
            "lr": 0.1,
            "loss/math": 0.5,
            "kl_k1/math": 0.1,
            "clamped_share/math": 0.2,
            "num_tokens/math": 10,
            "loss/code": 1.5,
            "kl_k1/code": 0.25,
            "clamped_share/code": 0,
            "num_tokens/code": 2,
            "response_length/math": 5,
            "truncated_share/math": 0,
            "repeated_share/math": 0,
            "num_samples/math": 2,
            "response_length/code": 2,
            "truncated_share/code": 1,
            "repeated_share/code": 0.25,
            "num_samples/code": 1,
            "tokens": 42,
            "timing/rollout_s": 1,
            "timing/step_s": 2,
            "rate/train_tokens_per_s": 21,
        }
    )
    assert metrics.by_domain("loss") == pytest.approx({"math": 0.5, "code": 1.5})


def test_shares_of_a_step_stand_beside_their_targets() -> None:
    batch = Batch(samples=tuple(sample(i, "math" if i else "code", 4) for i in range(4)))
    sums = {
        "math": DomainSums(num_tokens=9, sums={"weight": 0.4, "weighted_loss": -0.3, "gradient_squares": 9.0}),
        "code": DomainSums(num_tokens=1, sums={"weight": 0.6, "weighted_loss": 0.1, "gradient_squares": 1.0}),
    }
    prompts, budget = {"math": 0.7, "code": 0.2, "law": 0.1}, {"math": 0.3, "code": 0.5, "law": 0.2}
    expected = {
        "prompts_share": (0.75, 0.25, 0), "prompts_share_target": (0.7, 0.2, 0.1), "tokens_share": (0.9, 0.1, 0),
        "loss_weight_share": (0.4, 0.6, 0), "loss_weight_share_target": (0.3, 0.5, 0.2),
        "loss_share": (0.75, 0.25, 0), "gradient_share": (0.75, 0.25, 0),
    }  # fmt: skip
    flat = {f"{name}/{d}": value for name, row in expected.items() for d, value in zip(prompts, row, strict=True)}
    found = share_metrics(batch, sums, prompts=prompts, budget=budget)
    assert found == pytest.approx(flat | {"absent_domains": 1})
    bare = {"math": DomainSums(num_tokens=9, sums={"weighted_loss": 0.0})}
    assert share_metrics(batch, bare, prompts={"math": 1.0}, budget={}) == {
        "prompts_share_target/math": 1, "prompts_share/math": 0.75, "tokens_share/math": 1,
    }  # fmt: skip


def test_means_are_over_the_tokens_that_count_where_not_all_do() -> None:
    """Of what is known of all tokens, over all of them."""
    batch = Batch(samples=(sample(1, "math", 8),))
    sums = {"loss": 6.0, "weighted_loss": 2.0, "k1": 4.0, "loss_tokens": 2.0, "score": 10.0, "chosen_score": 7.0}
    metrics = merge_step(
        4, batch=batch, sums={"math": DomainSums(num_tokens=8, sums=sums)}, values={}, timings={}
    ).values
    wanted = {"loss": 3.0, "kl_k1": 0.5, "loss_tokens_share": 0.25, "token_score": 1.25, "chosen_score_share": 0.7}
    assert {name: metrics[f"{name}/math"] for name in wanted} == wanted


def test_a_horizon_is_told_with_the_share_of_responses_that_it_stopped() -> None:
    samples = (sample(1, "math", 4, at_horizon=True), sample(2, "math", 2), sample(3, "code", 3))
    values = horizon_metrics(Batch(samples=samples), 4)
    assert values == {"horizon": 4.0, "at_horizon_share/math": 0.5, "at_horizon_share/code": 0.0}


def test_what_counts_samples_is_a_share_of_samples() -> None:
    batch = Batch(samples=(sample(1, "math", 6), sample(2, "math", 2), sample(3, "code", 4)))
    sums = {"loss": 1.0, "weighted_loss": 0.1, "masked_sequences": 1.0}
    both = {
        domain: DomainSums(num_tokens=n, sums={**sums, "masked_sequences": masked})
        for domain, n, masked in (("math", 8, 1.0), ("code", 4, 0.0))
    }
    metrics = merge_step(4, batch=batch, sums=both, values={}, timings={})
    assert metrics.by_domain("masked_sequences_share") == {"math": 0.5, "code": 0.0}
    assert metrics.by_domain("masked_sequences") == {}


def test_more_numbers_join_a_step_but_never_replace_one() -> None:
    metrics = StepMetrics(step=2, values={"loss": 1.0}).plus({"teachers/samples/math": 4.0})
    assert metrics.record == {"step": 2, "loss": 1.0, "teachers/samples/math": 4.0}
    with pytest.raises(ValueError, match="metrics loss of step 2 are given twice"):
        metrics.plus({"loss": 2.0})


def test_a_domain_whose_samples_have_no_loss_token_still_counts_its_samples() -> None:
    batch = Batch(samples=(sample(0, "math", 4),))
    values = merge_step(1, batch=batch, sums={}, values={}, timings={}).values
    assert values["num_samples/math"] == 1
    assert "loss/math" not in values and values["loss"] == 0


def test_lines_are_on_disk_at_once_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    writer = JsonlWriter(path)
    writer.write(StepMetrics(step=1, values={"loss": 0.1 + 0.2, "kl_k3/ü": float("inf")}).record)
    assert read_jsonl(path) == [{"step": 1, "loss": 0.1 + 0.2, "kl_k3/ü": None}]
    with pytest.raises(ValueError):
        writer.write({"step": 2, "loss": float("nan")})
    writer.write({"step": 2})
    writer.close()
    assert [record["step"] for record in read_jsonl(path)] == [1, 2]


def test_truncation_keeps_the_bytes_up_to_the_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    kept = b'{"step": 1, "loss": 0.5}\n{"step":2,  "loss": 0.25}\n'
    path.write_bytes(kept + b'{"step": 3}\n{"step": 4, "lo')
    truncate_jsonl(path, after_step=2)
    assert path.read_bytes() == kept
    truncate_jsonl(tmp_path / "absent.jsonl", after_step=2)
    assert not (tmp_path / "absent.jsonl").exists()


def test_a_torn_last_line_is_not_read_and_is_removed_before_writing_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    assert read_jsonl(path) == [{"step": 1}]
    writer = JsonlWriter(path)
    writer.write({"step": 2})
    writer.close()
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


@pytest.mark.parametrize("line", ["nonsense", "[1]", '{"loss": 1}', '{"step": "1"}'])
def test_a_line_that_is_no_record_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:2: "):
        read_jsonl(path)
