"""Hidden states on their way from engines of two sizes to the student's loss, through router and data plane."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from mopd.base.types import UserError
from mopd.config.groups import TorchEngineConfig
from mopd.conversion.hf.head import OutputHead, open_teacher_head
from mopd.data.packing import pack
from mopd.engines.torch.engine import TorchEngine
from mopd.orchestrator.teachers import TeacherWorker
from mopd.student import parallel
from tests.parity.student.hidden_cases import HIDDEN_SIZES, VOCAB_SIZE, make_models
from tests.parity.student.ranks import Case
from tests.parity.student.samples import DOMAINS, make_samples
from tests.unit.orchestrator.groups import teacher_of


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_models(tmp_path_factory.mktemp("hidden"))


def test_what_teachers_send_is_their_divergence_over_the_vocabulary(
    models: dict[str, str], layout: parallel.Layout
) -> None:
    """As transformers computes it from the logits of both, within 1e-3 nats: states travel in bfloat16."""
    case: dict[str, Any] = {"tp": 1, "pp": 1, "dp": 1, "sp": False, "loss": "full_forward", "hidden": models}
    it = Case(models["student"], case)
    assert it.plane is not None
    cfg = TorchEngineConfig(dtype="float32")
    engines = {domain: TorchEngine.from_pretrained(models[domain], cfg) for domain in DOMAINS}
    groups = {
        domain: teacher_of(domain, engine, vocab_size=VOCAB_SIZE, hidden_size=HIDDEN_SIZES[domain])
        for domain, engine in engines.items()
    }
    metas, fields = make_samples(8, vocab_size=VOCAB_SIZE, top_k=8)
    own = {name: fields[name] for name in ("tokens", "loss_mask", "rollout_logprobs")}
    worker = TeacherWorker(groups, it.recipe.assignment, it.plane, asked=it.recipe.asked, temperature=1.0)

    async def score() -> None:
        await it.plane.put(metas, own)
        assert await worker.score(metas) == []

    asyncio.run(score())
    sums = it.worker.forward_backward(pack(metas, it.worker.packing, dp_size=1), diagnostics=True)
    it.close()
    assert sums.keys() == set(DOMAINS)
    student = AutoModelForCausalLM.from_pretrained(models["student"], dtype=torch.float64)
    for domain in DOMAINS:
        teacher, total, count = AutoModelForCausalLM.from_pretrained(models[domain], dtype=torch.float64), 0.0, 0
        for meta, tokens, mask in zip(metas, own["tokens"], own["loss_mask"], strict=True):
            if meta.domain == domain:
                with torch.no_grad():
                    log_p, log_q = (
                        model(tokens[None]).logits[0, meta.prompt_length - 1 : -1].log_softmax(-1)[mask]
                        for model in (student, teacher)
                    )
                total, count = total + float((log_q.exp() * (log_q - log_p)).sum()), count + len(log_p)
        assert sums[domain].num_tokens == count
        assert sums[domain].sums["loss"] / count == pytest.approx(total / count, abs=1e-3)
        assert 0 < sums[domain].sums["hidden_error"] / count < 0.05


def test_rows_of_an_output_matrix(models: dict[str, str]) -> None:
    """A tied one is the embedding; rows beyond the last are none."""
    for name, key in (("math", "model.embed_tokens.weight"), ("code", "lm_head.weight")):
        head = OutputHead(Path(models[name]))
        expected = AutoModelForCausalLM.from_pretrained(models[name], dtype=torch.float32).state_dict()[key]
        assert torch.equal(head.rows(100, 200), expected[100:200]) and len(head.rows(VOCAB_SIZE, VOCAB_SIZE + 9)) == 0
        assert torch.equal(head.rows(VOCAB_SIZE - 1, VOCAB_SIZE + 9), expected[-1:])
    with pytest.raises(UserError, match="has logits of 16001 ids and student"):
        open_teacher_head("code", models["code"], vocab_size=48)
