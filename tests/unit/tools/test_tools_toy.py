"""The toy whose student calls a tool: its lessons are what ``python_tool`` answers, and the recipe reads them."""

from __future__ import annotations

import asyncio
import itertools
import random
from pathlib import Path

from mopd.config.environment import PythonToolConfig
from mopd.config.load import load_recipe
from mopd.environments.process import Environments
from tools import make_tools_toy as toy

ROOT = Path(__file__).parents[3]


def test_the_calculator_says_what_the_lesson_says() -> None:
    async def play(turns: tuple[str, ...]) -> list[str | None]:
        environments = Environments(PythonToolConfig(type="python_tool", turn_timeout_s=60.0))
        try:
            episode = await environments.reset({"prompt": "", "domain": "sums"}, 0)
            return [(await episode.step(turn))[0] for turn in turns]
        finally:
            environments.close()

    for lesson in itertools.islice(toy.lessons("sums", toy.LENGTHS, "a test"), 2):
        call, observed, answer = lesson.turns
        assert asyncio.run(play((call, answer))) == [observed, None]
        assert answer == lesson.question.answer == observed


def test_prompts_are_apart_and_mistakes_are_read_not_learned() -> None:
    kept = {question.prompt for own in toy.held_out().values() for question in own}
    assert len(kept) > 150
    maker, batch = toy.Maker(0), list(itertools.islice(toy.lessons("sums", toy.LENGTHS, "a test"), 16))
    (plain, labels), (changed, same) = (maker._rows(batch, chance) for chance in (None, random.Random(0)))
    assert (labels == same).all() and plain.shape == changed.shape
    assert 0.02 < (plain != changed).float().mean() < 0.2
    calls = [maker.tokenizer.convert_tokens_to_ids(word) for word in toy.CALL]
    assert all(((plain == word) == (changed == word)).all() for word in calls)


def test_the_recipe_reads_what_is_made() -> None:
    recipe = load_recipe(ROOT / "recipes/tools_cpu.yaml").recipe
    assert {f"teachers/{name}" for name in recipe.teachers} == {f"teachers/{name}" for name in toy.DOMAINS}
    assert isinstance(recipe.rollout.environment, PythonToolConfig)
