"""Train the toy's models on exercises and answers, save them as Hugging Face folders, and measure them.

Shapes: B exercises, S tokens, N images, D width of the merged features, V letters.
"""

from __future__ import annotations

import itertools
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from mopd.base.files.writing import write_json
from mopd.conversion.hf.pretrained import load_weights
from mopd.data.image_processing import PREPROCESSOR_FILE, read_image_processing
from mopd.data.image_processor import ImageProcessor
from tools.quickstart.models import progress
from tools.quickstart.tasks import LETTERS
from tools.quickstart.training import fit, new_model, pad_rows
from tools.vision_toy.glyphs import HEIGHT, WIDTH, encoded
from tools.vision_toy.tasks import IMAGE_MARK, Exercise, exercises
from tools.vision_toy.tokenizer import build_tokenizer

PATCH, MERGE = 14, 2
IMAGE_TOKENS = (HEIGHT // (PATCH * MERGE)) * (WIDTH // (PATCH * MERGE))
PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
    "patch_size": PATCH,
    "temporal_patch_size": 2,
    "merge_size": MERGE,
    "min_pixels": 56 * 56,
    "max_pixels": 112 * 112,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
SLACK = 2
"""Tokens beyond the longest answer that a measured model may write."""


class ToyMaker:
    """Trains with one set of numbers and measures on one set of validation rows (by domain)."""

    def __init__(
        self,
        validation: Mapping[str, Sequence[tuple[Exercise, bytes]]],
        *,
        seed: int,
        text_shape: dict[str, Any],
        tower_shape: dict[str, Any],
        batch_size: int,
        lr: float,
        threads: int,
    ) -> None:
        """``validation``: exercises and their encoded images, empty without."""
        if threads:
            torch.set_num_threads(threads)
        transformers.logging.disable_progress_bar()
        self._tokenizer = build_tokenizer()
        self._ids = self._tokenizer.get_vocab()
        with tempfile.TemporaryDirectory() as folder:
            write_json(Path(folder) / PREPROCESSOR_FILE, PREPROCESSOR)
            self._processor = ImageProcessor(read_image_processing(folder, None))
        self._validation = validation
        self._held_out = frozenset(one.prompt for one, _ in validation["sort"])
        self._seed, self._text_shape, self._tower_shape = seed, text_shape, tower_shape
        self._batch_size, self._lr = batch_size, lr

    def make_base(self, out: Path, *, tower_steps: int, steps: int) -> dict[str, Any]:
        """The student: first its tower by itself, under a linear layer that is thrown away, then the whole on both
        domains with the base's mistakes. Returns exact match by domain, as the other two do."""
        model = self._new_model()
        with progress("tower", tower_steps) as report:
            reader = _Reader(model.model.visual, self._tower_shape["out_hidden_size"], self._seed)
            fit(reader, self._images(tower_steps), steps=tower_steps, lr=self._lr, report=report)
        with progress("base", steps) as report:
            batches = self._batches(("read", "sort"), steps, is_base=True)
            fit(model, batches, steps=steps, lr=self._lr, report=report)
        return self._save(model, out)

    def make_reader(self, out: Path, base: Path, *, steps: int) -> dict[str, Any]:
        """The vision-language teacher: a copy of the base that learns every glyph's name, and to sort nothing."""
        model, _ = load_weights(base, torch.float32)
        with progress("teacher of read", steps) as report:
            fit(model, self._batches(("read",), steps), steps=steps, lr=self._lr, report=report)
        return self._save(model, out)

    def make_sorter(self, out: Path, *, short_steps: int, steps: int) -> dict[str, Any]:
        """The text teacher: a plain Qwen3 that sees no images; it learns short inputs first, then all."""
        model = new_model(self._tokenizer, self._text_shape, self._seed)
        for count, is_short in ((short_steps, True), (steps, False)):
            with progress("teacher of sort", count) as report:
                fit(model, self._batches(("sort",), count, is_base=is_short), steps=count, lr=self._lr, report=report)
        return self._save(model, out)

    def _new_model(self) -> Qwen2_5_VLForConditionalGeneration:
        torch.manual_seed(self._seed)
        ids: dict[str, Any] = {
            f"{name}_token_id": self._ids[f"<|{token}|>"]
            for name, token in (
                ("image", "image_pad"),
                ("video", "video_pad"),
                ("vision_start", "vision_start"),
                ("vision_end", "vision_end"),
            )
        }
        tower = {"patch_size": PATCH, "spatial_merge_size": MERGE, "temporal_patch_size": 2, **self._tower_shape}
        text = {
            "vocab_size": len(self._tokenizer),
            "tie_word_embeddings": True,
            "bos_token_id": self._tokenizer.bos_token_id,
            "eos_token_id": self._tokenizer.eos_token_id,
            "pad_token_id": self._tokenizer.pad_token_id,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
            "initializer_range": 0.05,
            "max_position_embeddings": 128,
            **self._text_shape,
        }
        config = Qwen2_5_VLConfig(
            text_config=text, vision_config=tower, tie_word_embeddings=True, dtype="float32", **ids
        )
        return Qwen2_5_VLForConditionalGeneration(config)

    def _images(self, steps: int) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Batches of images alone, labelled with their letters [N, 2]."""
        stream, dice = exercises("read", "tower"), random.Random("tower")
        for _ in range(steps):
            made = list(itertools.islice(stream, self._batch_size))
            labels = torch.tensor([[LETTERS.index(letter) for letter in one.letters] for one in made])
            yield self._seen([encoded(one.letters, dice, _kind(dice)) for one in made]), labels

    def _batches(
        self, domains: tuple[str, ...], steps: int, *, is_base: bool = False
    ) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        seed = "base" if is_base else "+".join(domains)
        dice = random.Random(seed)
        streams = itertools.cycle([self._fresh(domain, seed, is_base) for domain in domains])
        for _ in range(steps):
            made = [next(next(streams)) for _ in range(self._batch_size)]
            pairs = [(self._prompt(one), one.mistaken if is_base else one.answer) for one in made]
            tokens_BS, labels_BS = pad_rows(self._tokenizer, pairs)
            files = [encoded(one.letters, dice, _kind(dice)) for one in made if one.letters]
            yield self._inputs(tokens_BS, files), labels_BS

    def _fresh(self, domain: str, seed: str, is_base: bool) -> Iterator[Exercise]:
        """Without the prompts to sort that are kept for validation; an image is another each time."""
        made = exercises(domain, seed, is_base=is_base)
        return (one for one in made if one.letters or one.prompt not in self._held_out)

    def _prompt(self, one: Exercise) -> list[int]:
        """Token ids, each image's placeholder as often as it has tokens."""
        text = one.prompt.removeprefix(IMAGE_MARK)
        content = [{"type": "image"}, {"type": "text", "text": text}] if one.letters else text
        messages: Any = [{"role": "user", "content": content}]
        rendered: Any = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        expanded = rendered.replace("<|image_pad|>", "<|image_pad|>" * IMAGE_TOKENS)
        ids: list[int] = self._tokenizer(expanded, add_special_tokens=False)["input_ids"]
        return ids

    def _inputs(self, tokens_BS: Tensor, files: Sequence[bytes]) -> dict[str, Tensor]:
        inputs = {"input_ids": tokens_BS}
        if files:
            is_image = tokens_BS == self._ids["<|image_pad|>"]
            seen = self._seen(files)
            inputs |= {"mm_token_type_ids": is_image.int(), "pixel_values": seen["patches"]}
            inputs["image_grid_thw"] = seen["grids"]
        return inputs

    def _seen(self, files: Sequence[bytes]) -> dict[str, Tensor]:
        patches, grids = self._processor.patches(files)
        return {"patches": patches, "grids": grids}

    def _save(self, model: Any, out: Path) -> dict[str, Any]:
        model.generation_config.eos_token_id = self._tokenizer.eos_token_id
        model.generation_config.pad_token_id = self._tokenizer.pad_token_id
        model.save_pretrained(out)
        self._tokenizer.save_pretrained(out)
        sees = isinstance(model, Qwen2_5_VLForConditionalGeneration)
        if sees:
            write_json(out / PREPROCESSOR_FILE, PREPROCESSOR)
        shares = {
            domain: self._share(model, rows) for domain, rows in self._validation.items() if sees or domain == "sort"
        }
        return {"exact_match": shares, "weights": model.num_parameters()}

    @torch.no_grad()
    def _share(self, model: Any, rows: Sequence[tuple[Exercise, bytes]]) -> float:
        """Of exactly right greedy answers."""
        model.eval()
        prompts = [self._prompt(one) for one, _ in rows]
        width = max(map(len, prompts))
        pad = self._tokenizer.pad_token_id
        tokens_BS = torch.tensor([[pad] * (width - len(row)) + row for row in prompts])
        visible_BS = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts])
        output = model.generate(
            **self._inputs(tokens_BS, [file for _, file in rows if file]),
            attention_mask=visible_BS,
            max_new_tokens=max(len(one.answer) for one, _ in rows) + SLACK,
            do_sample=False,
            temperature=None,
        )
        answers = self._tokenizer.batch_decode(output[:, width:], skip_special_tokens=True)
        return sum(answer == one.answer for answer, (one, _) in zip(answers, rows, strict=True)) / len(rows)


class _Reader(nn.Module):
    """The tower under a linear layer that names both glyphs from all merged features of an image at once."""

    def __init__(self, tower: nn.Module, width: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.tower = tower
        self.names = nn.Linear(IMAGE_TOKENS * width, 2 * len(LETTERS))

    def forward(self, patches: Tensor, grids: Tensor, use_cache: bool) -> SimpleNamespace:
        """``logits`` [N, 2, V]."""
        features_TD = self.tower(patches, grid_thw=grids).pooler_output
        return SimpleNamespace(logits=self.names(features_TD.view(len(grids), -1)).view(len(grids), 2, -1))


def _kind(dice: random.Random) -> str:
    return dice.choice(("JPEG", "PNG"))
