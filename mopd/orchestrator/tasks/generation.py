"""Responses of a model to prompts from the command line: a look at a student while or after it learns."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from mopd.base.files.reading import read_bytes, shown_path
from mopd.base.files.temporary import TemporaryFolder
from mopd.base.types import ImageRef, PromptImage, UserError
from mopd.config.data import MAX_IMAGE_BYTES, DataConfig
from mopd.config.groups import TorchEngineConfig
from mopd.config.load import load_recipe
from mopd.config.rollout import RolloutConfig
from mopd.config.schema import Recipe
from mopd.conversion.jobs.streaming import megatron_to_hf
from mopd.data.hub.fetch import fetch_model
from mopd.data.hub.names import hub_model
from mopd.data.image_files import MAX_IMAGES, digest_of, image_size, read_rgb
from mopd.data.prompts import PromptRow, encode_prompts
from mopd.data.tokenizer import load_tokenizer, read_texts, stops_of
from mopd.data.turns import TurnFrame
from mopd.data.vision_prompts import MARK, VisionPrompts, read_vision
from mopd.engines.interface import Generation, Images, SamplingParams, ToDraw
from mopd.engines.torch.engine import TorchEngine
from mopd.environments.process import Environments
from mopd.orchestrator.rollout import derive_seed, play_turns
from mopd.orchestrator.trajectories import Player, Segment, Trajectory, segments_of
from mopd.run.checkpointing import complete_steps
from mopd.run.folder import RunDir

SAMPLES_OF_A_PROMPT = 2**20
"""Seeds of one prompt, so that a response does not depend on how many others are asked for."""
USUAL_TOKENS = 256
"""Tokens of a response where no number is asked for and the model takes so many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One response."""

    prompt: str
    response: str
    """Special tokens left out."""
    num_tokens: int
    finish_reason: str
    """Reason of the end: ``stop``, or ``length`` where the response was cut off."""
    mean_logprob: float
    """Mean log-prob of the tokens that the model drew, in nats, at the temperature that they were drawn with."""
    segments: Sequence[Segment] = ()
    """Its parts in order, with an environment."""
    environment_reward: float | None = None
    """Sum of what the environment gave, with one."""


@contextmanager
def model_folder(model: str) -> Iterator[tuple[Path, Recipe | None]]:
    """Yield a Hugging Face folder of the model, and the recipe of its run, if it is of one.

    A run stands for its export. A checkpoint is converted into a temporary folder, which is gone afterwards. A name on
    the Hub is fetched into its cache.

    Raises:
        UserError: ``model`` is nothing of the kind, or a run without an export.
    """
    path, name = Path(model), hub_model(model)
    if name is not None:
        try:
            (folder,) = fetch_model(name).paths
        except UserError as error:
            raise UserError(f"generate: {str(name)!r}: {error}") from error
        yield Path(folder), None
    elif (path / "config.json").is_file():
        yield path, _recipe_of(path.parent) if path.name == RunDir(path.parent).hf.name else None
    elif (path / "recipe.yaml").is_file():
        run = RunDir(path)
        if not (run.hf / "config.json").is_file():
            steps = complete_steps(run.checkpoints)
            newest = f": name {shown_path(run.checkpoint(steps[-1]))}" if steps else ", nor a complete checkpoint: wait"
            raise UserError(f"generate: {shown_path(path)!r} has no export ({run.hf.name}) yet{newest}")
        yield run.hf, _recipe_of(path)
    elif (path / "manifest.json").is_file():
        with TemporaryFolder("mopd-generate-") as work:
            job = megatron_to_hf(path, Path(work) / "hf")
            job.begin(resume=False)
            job.write_share(0, 1)
            job.complete()
            yield job.target, _recipe_of(path.resolve().parent.parent)
    else:
        raise UserError(
            f"generate: {shown_path(path)!r} is no Hugging Face folder (config.json), run (recipe.yaml) or complete "
            "checkpoint (manifest.json): check the path"
        )


def _recipe_of(run_dir: Path) -> Recipe | None:
    """Return a run's recipe, if there is one."""
    recipe = run_dir / "recipe.yaml"
    return load_recipe(recipe).recipe if recipe.is_file() else None


def generate(
    model: str,
    prompts: Sequence[str],
    *,
    images: Sequence[str] = (),
    is_raw: bool,
    num_samples: int,
    max_new_tokens: int | None,
    temperature: float,
    seed: int,
    in_environment: bool = False,
) -> list[Answer]:
    """Sample ``num_samples`` responses to each prompt, prompt after prompt, on a GPU where there is one.

    A response depends on model, prompt, images, temperature, seed and its number alone. Of a run's model it ends as its
    recipe says.

    Args:
        images: image files, in the order of their marks in the prompts.
        is_raw: prompts are tokenized as they are; otherwise each is a user's message in the chat template.
        max_new_tokens: None takes ``USUAL_TOKENS``, or fewer where the model has no room for as many.
        in_environment: play each prompt in the environment of the run's recipe, as a row of no ground truth.

    Raises:
        UserError: see ``model_folder``; no chat template, or a prompt or image that the model cannot take.
    """
    with model_folder(model) as (folder, recipe):
        tokenizer = load_tokenizer(folder)
        cfg = DataConfig(train=("-",)) if recipe is None else recipe.data  # its files are not read
        rollout = RolloutConfig() if recipe is None else recipe.rollout
        environment = rollout.environment if in_environment else None
        if in_environment and environment is None:
            raise UserError(f"generate: {model!r} is of no run with rollout.environment: remove --environment")
        if not is_raw and cfg.chat_template is None and tokenizer.chat_template is None:
            raise UserError(f"generate: the tokenizer of {shown_path(folder)!r} has no chat template: add --raw")
        vision = read_vision(folder, cfg.max_pixels, tokenizer)
        shown = _images_of(prompts, images, vision, shown_path(folder))
        encoded = encode_prompts(
            [text if is_raw else [{"role": "user", "content": text}] for text in prompts],
            cfg,
            tokenizer,
            [f"prompt {number}" for number in range(1, len(prompts) + 1)],
            vision,
            [[ref for ref, _ in own] for own in shown],
        )
        engine = _engine(folder, cfg.max_pixels)
        longest = max(map(len, encoded))
        room = engine.max_positions - longest
        if room < (max_new_tokens or 1):
            raise UserError(
                f"generate: the longest prompt has {longest} tokens, the model takes {engine.max_positions} with the "
                "response: shorten it or lower --max-new-tokens"
            )
        sampling = SamplingParams(
            max_new_tokens=max_new_tokens or min(USUAL_TOKENS, room),
            temperature=temperature,
            **stops_of(rollout, tokenizer),
        )
        places = [(row, number) for row in range(len(prompts)) for number in range(num_samples)]
        seeds = [derive_seed(seed, row * SAMPLES_OF_A_PROMPT + number, "generate") for row, number in places]
        seen = [[image for _, image in shown[row]] for row, _ in places] if images else None
        rows = [_as_row(prompts[row], encoded[row], number) for row, number in places]
        player = None
        if environment is not None:
            frame = TurnFrame(tokenizer, cfg, environment)
            player = Player(Environments(environment), frame, max_prompt_length=cfg.max_prompt_length)
        made = asyncio.run(_draw(engine, player, rows, sampling, seeds, seen))
        texts = read_texts([one.tokens.tolist() for one in made], tokenizer, rollout.cut_texts)
        return [
            _answer(row.text, one, text, segments_of(tokenizer, one))
            for row, one, text in zip(rows, made, texts, strict=True)
        ]


def _engine(folder: Path, max_pixels: int | None) -> TorchEngine:
    is_cuda = torch.cuda.is_available()
    cfg = TorchEngineConfig(dtype="bfloat16" if is_cuda else "float32")
    return TorchEngine.from_pretrained(folder, cfg, torch.device("cuda" if is_cuda else "cpu"), max_pixels=max_pixels)


def _as_row(prompt: str, tokens: Sequence[int], number: int) -> PromptRow:
    return PromptRow(
        domain="generate",
        text=prompt,
        tokens=tuple(tokens),
        ground_truth=None,
        extra_info=None,
        place=f"prompt {prompt!r:.40}, response {number + 1}",
    )


async def _draw(
    engine: TorchEngine,
    player: Player | None,
    rows: Sequence[PromptRow],
    sampling: SamplingParams,
    seeds: Sequence[int],
    images: Images,
) -> Sequence[Generation]:
    """Return a response to each row; with a ``player`` a trajectory."""
    if player is None:
        return await engine.generate(ToDraw([row.tokens for row in rows], sampling, seeds, images=images))
    try:
        return await play_turns(player, engine, rows, sampling, seeds, images)
    finally:
        player.environments.close()


def _answer(prompt: str, made: Generation, text: str, segments: Sequence[Segment]) -> Answer:
    played = made if isinstance(made, Trajectory) else None
    return Answer(
        prompt=prompt,
        response=text,
        num_tokens=len(made.tokens),
        finish_reason=made.finish_reason,
        mean_logprob=(made.logprobs if played is None else made.logprobs[played.loss_mask]).mean().item(),
        segments=segments,
        environment_reward=None if played is None else played.reward,
    )


def _images_of(
    prompts: Sequence[str], files: Sequence[str], vision: VisionPrompts | None, model: str
) -> list[list[tuple[ImageRef, PromptImage]]]:
    """Return the images of each prompt, by its marks."""
    if vision is None:
        if files:
            raise UserError(f"generate: {model!r} sees no images: name a vision-language model, or remove --image")
        return [[] for _ in prompts]
    counts = [text.count(MARK) for text in prompts]
    if sum(counts) != len(files):
        raise UserError(
            f"generate: the prompts have {sum(counts)} {MARK} for {len(files)} --image: write {MARK} where each image "
            "is to stand"
        )
    if max(counts) > MAX_IMAGES:
        raise UserError(f"generate: a prompt has {max(counts)} images: at most {MAX_IMAGES} are taken")
    left = iter([_image(file, vision) for file in files])
    return [list(itertools.islice(left, count)) for count in counts]


def _image(file: str, vision: VisionPrompts) -> tuple[ImageRef, PromptImage]:
    place = f"--image {shown_path(file)}"
    content = read_bytes(file, cure="it is an image: scale it down", max_bytes=MAX_IMAGE_BYTES)
    grid, digest = vision.processing.grid(*image_size(content, place)), digest_of(content)
    read_rgb(content, place)  # a damaged one ends here
    ref = ImageRef(file=0, row=0, number=0, digest=digest, grid=grid)
    return ref, PromptImage(digest=digest, grid=grid, load=lambda: content)
