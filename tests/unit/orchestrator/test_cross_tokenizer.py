"""A teacher with another tokenizer: its scores of its own tokens reach the data plane as rows of the student's.

Written from the definition: characters are the student's tokens, so that a chunk is a piece of text between places
where a token of the teacher ends. Not exercised here: bytes that are parts of characters (``tests/unit/data``).
"""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from mopd.base.metrics import apart
from mopd.base.types import SampleMeta
from mopd.config.data import DataConfig
from mopd.config.groups import TeacherConfig, TorchEngineConfig
from mopd.config.losses import KLLossConfig, Loss, TopKLossConfig
from mopd.config.schedule import PreflightConfig, ScheduleConfig
from mopd.config.schema import Recipe
from mopd.config.student import StudentConfig
from mopd.data.cross_tokenizer import CrossTokenizer
from mopd.data.prompts import PromptDataset, PromptRow, PromptView
from mopd.data_plane.local import LocalDataPlane
from mopd.engines.torch.engine import TorchEngine
from mopd.launch.checks.inputs import Check
from mopd.orchestrator.preflight.scores import ScoresCheck
from mopd.orchestrator.support import NO_ID
from mopd.orchestrator.teachers import TeacherWorker
from tests.fixtures.samples import meta_of
from tests.fixtures.tiny_models import BOS_ID, EOS_ID, make_hf_model, make_tokenizer
from tests.unit.orchestrator.groups import teacher_of
from tests.unit.orchestrator.test_views import FAULTS, Shifted
from tools.quickstart.tokenizer import build_other_tokenizer

TOP_K = 48
RESPONSES = ["abcdefgh ponm", "kkkk", "the gap: 1,2", "p"]
"""The last one does not end."""
ENGINE = TorchEngineConfig(dtype="float32")
SAMPLED, TOPK = KLLossConfig(type="k2"), TopKLossConfig(top_k=TOP_K)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    other = build_other_tokenizer(200)
    made = make_hf_model(base / "other", vocab_size=len(other) + 3)  # some ids only pad the matrix
    other.save_pretrained(made)
    make_tokenizer(make_hf_model(base / "same", seed=3))
    return {"other": made, "same": base / "same"}


@pytest.fixture(scope="module")
def tokenizers(folders: dict[str, Path]) -> tuple[PreTrainedTokenizerFast, PreTrainedTokenizerFast]:
    return make_tokenizer(folders["same"]), build_other_tokenizer(200)


def recipe_of(folders: dict[str, Path], loss: Loss, *names: str, is_compared: bool = True) -> Recipe:
    payload = "topk" if isinstance(loss, TopKLossConfig) else "sampled"
    own = {"other": {"tokenizer": "own", "tokenizer_map": {"<pad>": None, "<bos>": None}, "weight": 3.0}}
    return Recipe(
        run_dir="unused",
        student=StudentConfig(model="unused"),
        teachers={
            name: TeacherConfig(
                **{"model": str(folders[name]), "domains": ("math",), "payload": payload, "weight": 1.0}  # type: ignore[arg-type]
                | own.get(name, {})
            )
            for name in names
        },
        data=DataConfig(train=("unused",), max_prompt_length=16),
        loss=loss,
        schedule=ScheduleConfig(steps=1, prompts_per_step=1),
        preflight=PreflightConfig(compare_with_transformers=is_compared),
    )


class Samples:
    """Responses of the student, and rows whose prompts the teacher reads in its own tokens."""

    def __init__(self, student: PreTrainedTokenizerFast, teacher: PreTrainedTokenizerFast) -> None:
        generator = torch.Generator().manual_seed(2)
        self.student, self.teacher = student, teacher
        self.cross = CrossTokenizer(
            student, teacher, {"<pad>": None, "<bos>": None}, most_tokens=64, key="teachers.other"
        )
        self.metas: list[SampleMeta] = []
        self.tokens: list[Tensor] = []
        rows = []
        for i, text in enumerate(RESPONSES):
            prompt = (BOS_ID, *student(f"say {i}")["input_ids"])
            view = PromptView("", tuple(teacher(f"<|start|><|user|>say {i}")["input_ids"]))
            rows.append(
                PromptRow(
                    domain="math",
                    text="",
                    tokens=prompt,
                    ground_truth=None,
                    extra_info=None,
                    place=f"row {i}",
                    views={"other": view},
                )
            )
            response = student(text)["input_ids"] + [EOS_ID] * (i < len(RESPONSES) - 1)
            self.metas.append(meta_of(70 + i, "math", prompt=len(prompt), response=len(response)))
            self.tokens.append(torch.tensor([*prompt, *response]))
        self.dataset = PromptDataset(rows)
        self.rows = {meta.sample_id: i for i, meta in enumerate(self.metas)}
        self.drawn = [-2 * torch.rand(meta.response_length, generator=generator) for meta in self.metas]

    async def put(self, plane: LocalDataPlane) -> None:
        fields = {"tokens": [own.clone() for own in self.tokens], "rollout_logprobs": self.drawn}
        await plane.put(self.metas, fields)

    def worker(
        self, recipe: Recipe, folders: dict[str, Path], plane: LocalDataPlane, fault: str = "none"
    ) -> TeacherWorker:
        groups = {}
        for name in recipe.teachers:
            engine = TorchEngine.from_pretrained(folders[name], ENGINE)
            size = len(self.teacher) + 3 if name == "other" else len(self.student)
            groups[name] = teacher_of(name, Shifted(engine, fault) if name == "other" else engine, vocab_size=size)
        options = {"asked": recipe.asked, "temperature": 1.0, "dataset": self.dataset, "cross": {"other": self.cross}}
        return TeacherWorker(groups, recipe.assignment, plane, **options)

    def scored(self, recipe: Recipe, folders: dict[str, Path]) -> tuple[dict[str, list[Tensor]], dict[str, float]]:
        async def run() -> tuple[dict[str, list[Tensor]], dict[str, float]]:
            plane = LocalDataPlane()
            await self.put(plane)
            worker = self.worker(recipe, folders, plane)
            assert await worker.score(self.metas, self.rows) == []
            names = [name for name in recipe.loss_fields(1) if name != "loss_mask"]
            return await plane.get([meta.sample_id for meta in self.metas], names), worker.take_numbers()

        return asyncio.run(run())


@pytest.fixture(scope="module")
def samples(tokenizers: tuple[PreTrainedTokenizerFast, PreTrainedTokenizerFast]) -> Samples:
    return Samples(*tokenizers)


class Definition:
    """One response in pieces of text: the teacher's tokens end at ``ends`` characters, and so do the chunks."""

    def __init__(self, folder: Path, samples: Samples, i: int) -> None:
        text, has_end = RESPONSES[i], i < len(RESPONSES) - 1
        ids = samples.teacher(text, add_special_tokens=False)["input_ids"]
        written = [samples.teacher.decode([own]) for own in ids]
        assert "".join(written) == text
        self.chunks = [[*range(sum(map(len, written[:n])), sum(map(len, written[: n + 1])))] for n in range(len(ids))]
        if has_end:
            ids, self.chunks = [*ids, samples.teacher.eos_token_id], [*self.chunks, [len(text)]]
        prompt = samples.dataset.row(i).views["other"].tokens
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        with torch.no_grad():
            self.logprobs = model(torch.tensor([[*prompt, *ids]])).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
        self.sums = self.logprobs.gather(-1, torch.tensor(ids)[:, None]).squeeze(-1)
        self._written = [samples.teacher.decode([own]) for own in ids]

    def as_text(self, row: int, known: dict[int, float], samples: Samples) -> dict[int, float]:
        """What follows the text before a row: ``known`` if the teacher reads it as it did, or the rest of a longer
        token that it would have said in the place of the last one."""
        before = self._written[row - 1] if row else ""
        listed = self.logprobs[row - 1].topk(TOP_K) if row else None
        longer: dict[str, float] = {}
        for value, other in zip(listed.values.exp().tolist(), listed.indices.tolist(), strict=True) if listed else ():
            text = samples.teacher.decode([other])
            if len(text) > len(before) and text.startswith(before) and other not in samples.teacher.all_special_ids:
                longer[text[len(before)]] = longer.get(text[len(before)], 0.0) + value
        if not longer:
            return known
        again = self.sums[row - 1].exp().item()
        whole = again + sum(longer.values())
        found = {own: again * share / whole for own, share in known.items()}
        for letter, share in longer.items():
            own = samples.student.get_vocab()[letter]
            found[own] = found.get(own, 0.0) + share / whole
        return dict(sorted(found.items(), key=lambda item: -item[1])[:TOP_K])

    def spread(self, drawn: Tensor) -> Tensor:
        """Each chunk's log-prob by the shares of its characters' own."""
        found = torch.zeros(len(drawn), dtype=torch.float64)
        for total, places in zip(self.sums, self.chunks, strict=True):
            found[places] = total * drawn[places].double() / drawn[places].double().sum()
        return found

    def is_several(self) -> Tensor:
        return torch.tensor([len(places) > 1 for places in self.chunks for _ in places])


def test_a_sampled_loss_reads_the_chunks_log_prob(folders: dict[str, Path], samples: Samples) -> None:
    fields, numbers = samples.scored(recipe_of(folders, SAMPLED, "other"), folders)
    several = 0
    for i, own in enumerate(fields["teacher_token_logprobs"]):
        wanted = Definition(folders["other"], samples, i)
        torch.testing.assert_close(own.double(), wanted.spread(samples.drawn[i]), rtol=0, atol=2e-5)
        several += int(wanted.is_several().sum())
    total = sum(meta.response_length for meta in samples.metas)
    assert 5 < several < total - 5
    assert numbers["one_to_one_share/other"] == pytest.approx(1 - several / total)
    assert numbers["unscored_share/other"] == 0 and 1 < numbers["chunk_tokens/other"] < 2
    assert all(map(torch.equal, fields["tokens"], samples.tokens))


def test_probes_count_to_no_step(folders: dict[str, Path], samples: Samples) -> None:
    with apart():  # as the preflight asks
        assert samples.scored(recipe_of(folders, SAMPLED, "other"), folders)[1] == {}


def test_a_topk_loss_reads_rows_where_chunks_begin_and_an_advantage_of_the_rest(
    folders: dict[str, Path], samples: Samples
) -> None:
    fields, _ = samples.scored(recipe_of(folders, TOPK, "other"), folders)
    vocabulary, num_rest = samples.student.get_vocab(), 0
    for i in range(len(RESPONSES)):
        wanted = Definition(folders["other"], samples, i)
        ids, logprobs, advantage = (fields[name][i] for name in ("teacher_ids", "teacher_logprobs", "chunk_advantage"))
        drawn, response = samples.drawn[i].double(), samples.tokens[i][samples.metas[i].prompt_length :].tolist()
        for row, places in enumerate(wanted.chunks):
            best = wanted.logprobs[row].topk(TOP_K)
            known = {}
            for value, other in zip(best.values.exp().tolist(), best.indices.tolist(), strict=True):
                first = samples.teacher.decode([other])[:1]  # the student writes a pair of letters as two tokens
                if other in samples.teacher.all_special_ids:
                    first = "<eos>" if other == samples.teacher.eos_token_id else ""
                if first in vocabulary:
                    known[vocabulary[first]] = known.get(vocabulary[first], 0.0) + value
            begun = known.get(response[places[0]])
            rest = None if begun is None else wanted.sums[row].item() - math.log(begun)
            for place in places[1:]:
                share = drawn[place] / drawn[places[1:]].sum()
                own = 0.0 if rest is None else float(rest * share - drawn[place])
                assert advantage[place].item() == pytest.approx(own, abs=5e-5)
                assert (ids[place] == NO_ID).all() and (logprobs[place] == -torch.inf).all()
                num_rest += rest is not None
            for place in places[:1]:
                assert advantage[place] == 0
                got = {
                    int(a): math.exp(b)
                    for a, b in zip(ids[place].tolist(), logprobs[place].tolist(), strict=True)
                    if a != NO_ID
                }
                assert got == pytest.approx(wanted.as_text(row, known, samples), abs=2e-5)
                assert ((ids[place] == NO_ID) == (logprobs[place] == -torch.inf)).all()
    assert num_rest > 1


def test_an_ensemble_may_hold_both_kinds(folders: dict[str, Path], samples: Samples) -> None:
    alone = samples.scored(recipe_of(folders, TOPK, "other"), folders)[0]
    both, _ = samples.scored(recipe_of(folders, TOPK, "other", "same"), folders)
    for i in range(len(RESPONSES)):
        assert torch.equal(both["teacher_ids"][i][:, 0], alone["teacher_ids"][i])
        torch.testing.assert_close(both["chunk_advantage"][i], 0.75 * alone["chunk_advantage"][i])


def judged(folders: dict[str, Path], samples: Samples, loss: Loss, fault: str, *, is_compared: bool) -> list[Check]:
    recipe = recipe_of(folders, loss, "other", is_compared=is_compared)

    async def judge() -> list[Check]:
        plane = LocalDataPlane()
        await samples.put(plane)
        worker = samples.worker(recipe, folders, plane, fault)
        assert await worker.score(samples.metas, samples.rows) == []
        prompts = worker.prompts_of("other", samples.metas, samples.rows)
        group = worker._groups["other"]
        check = ScoresCheck(recipe, group, plane, None, "float32", prompts=prompts, cross=samples.cross)
        return [await check.judge(samples.metas), await check.chunks(samples.metas)]

    return asyncio.run(judge())


@pytest.mark.parametrize("loss", [SAMPLED, TOPK], ids=["sampled", "topk"])
@pytest.mark.parametrize("is_compared", [True, False], ids=["transformers", "itself"])
def test_the_preflight_knows_its_own_tokens(
    folders: dict[str, Path], samples: Samples, loss: Loss, is_compared: bool
) -> None:
    scores, chunks = judged(folders, samples, loss, "none", is_compared=is_compared)
    assert scores.status == "ok", scores.detail
    assert chunks.status == "ok" and "% of" in chunks.detail and "mean chunk" in chunks.detail


@pytest.mark.parametrize("fault", [name for name in FAULTS if name != "none"])
def test_a_shift_on_its_way_is_caught(folders: dict[str, Path], samples: Samples, fault: str) -> None:
    assert judged(folders, samples, SAMPLED, fault, is_compared=True)[0].status == "failed"


def test_nobody_learns_what_the_teacher_has_not_read(folders: dict[str, Path], samples: Samples) -> None:
    """A teacher that takes two tokens: the student's others keep their own log-prob, and a warning tells how many."""
    short = Samples(samples.student, samples.teacher)
    short.cross = CrossTokenizer(
        samples.student, samples.teacher, {"<pad>": None, "<bos>": None}, most_tokens=2, key="teachers.other"
    )
    fields, numbers = short.scored(recipe_of(folders, SAMPLED, "other"), folders)
    assert numbers["unscored_share/other"] > 0.5
    assert torch.equal(fields["teacher_token_logprobs"][0][-5:], short.drawn[0][-5:])
    _, chunks = judged(folders, short, SAMPLED, "none", is_compared=True)
    assert chunks.status == "warning" and "are in none" in chunks.detail
