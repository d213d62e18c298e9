"""The gate: what each prompt of a domain is trained on, decided once the student has answered it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from mopd.base.types import Prompt, SampleMeta
from mopd.config.gates import GateConfig
from mopd.data.tokenizer import read_texts
from mopd.orchestrator.answers import AnswerWorker
from mopd.orchestrator.rewards import RewardWorker
from mopd.orchestrator.teachers import TeacherWorker

Verdict = Literal["distil", "reinforce", "skip"]


@dataclass(frozen=True)
class Gate:
    """Judges responses in the place of the reward worker, where a domain has a gate."""

    gates: Mapping[str, GateConfig]
    rewards: RewardWorker
    teachers: TeacherWorker
    answers: AnswerWorker | None
    """Draws one answer a prompt; needed ``by: teacher_answers`` alone."""
    writes_advantages: bool
    """Whether the loss reads ``task_advantage``."""
    _known: dict[int, float] = field(default_factory=dict)
    """Reward of the teacher's answer, by row."""

    async def sort(self, prompts: Sequence[Prompt], samples: Sequence[SampleMeta]) -> list[Verdict]:
        """Return what becomes of each prompt, all of domains with a gate, and write what samples then need beside a
        teacher's scores: the task advantage, 0 of what is distilled; of what is reinforced, rows without ids.

        ``samples`` holds equally many of each prompt, prompt after prompt.
        """
        rewards = await self.rewards.values(prompts, samples)
        asked = [prompt for prompt in prompts if self.gates[prompt.domain].by == "teacher_answers"]
        await self._ask([prompt for prompt in asked if prompt.row not in self._known])
        verdicts = [self._verdict(prompt, own) for prompt, own in zip(prompts, rewards, strict=True)]
        num = len(samples) // len(prompts)
        of_verdict: dict[Verdict, list[int]] = {"distil": [], "reinforce": [], "skip": []}
        for i, verdict in enumerate(verdicts):
            of_verdict[verdict].append(i)
        for verdict, places in of_verdict.items():
            own = [sample for i in places for sample in samples[i * num : (i + 1) * num]]
            if verdict == "skip" or not own:
                continue
            if self.writes_advantages:
                kept = rewards[places] if verdict == "reinforce" else rewards[places] * 0
                await self.rewards.write([prompts[i] for i in places], own, kept)
            if verdict == "reinforce":
                await self.teachers.leave_out(own)
        return verdicts

    def _verdict(self, prompt: Prompt, rewards: Tensor) -> Verdict:
        gate = self.gates[prompt.domain]
        if gate.by == "teacher_answers":
            is_distilled = self._known[prompt.row] >= gate.threshold
        else:
            is_distilled = float(rewards.mean()) < gate.threshold
        if is_distilled:
            return "distil"
        return "reinforce" if gate.others == "reinforce" and bool((rewards != rewards[0]).any()) else "skip"

    async def _ask(self, prompts: Sequence[Prompt]) -> None:
        """Have the teachers answer prompts, and keep their rewards."""
        if not prompts:
            return
        assert self.answers is not None, "a gate asks for answers"
        answers = await self.answers.draw(prompts)
        responses, rewards = [answer.tokens.tolist() for answer in answers], self.rewards
        texts = read_texts(responses, rewards.tokenizer, rewards.cut_texts)
        graded = await rewards.graded(prompts, texts, [None] * len(prompts))
        self._known.update(zip((prompt.row for prompt in prompts), graded, strict=True))
