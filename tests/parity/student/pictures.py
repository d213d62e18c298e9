"""A data file with images, samples whose prompts hold them, and transformers' own answer to these."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from mopd.base.types import ImageRef, SampleMeta
from mopd.data.image_files import digest_of
from mopd.data.image_processing import read_image_processing
from mopd.data.image_processor import ImageProcessor
from mopd.data.image_refs import image_refs_from_tensor, image_refs_to_tensor
from tests.fixtures.vision import IMAGE_TOKEN_ID, TOKEN_IDS, image_bytes
from tests.parity.student.samples import make_samples

SIZES = [[], [(56, 84)], [(84, 112), (56, 56)], [(56, 84), (64, 160)], [(160, 64), (56, 84), (56, 84)]]
"""Rows of the file: heights and widths of their images."""
IS_ADJACENT = [False, False, False, True, False]
"""Whether the images of a row follow one another without text."""
TEXT_VOCAB = min(TOKEN_IDS.values())
"""Ids below are those of text."""
START, END = TOKEN_IDS["<|vision_start|>"], TOKEN_IDS["<|vision_end|>"]
Samples = tuple[list[SampleMeta], dict[str, list[Tensor]]]


def write_pictures(folder: Path) -> Path:
    """A data file with a row for each of ``SIZES``; equal sizes of a row are the same image."""
    folder.mkdir(parents=True)
    rows = []
    for row, sizes in enumerate(SIZES):
        for number, (height, width) in enumerate(sizes):
            content = image_bytes(height, width, seed=100 * row + sizes.index((height, width)))
            (folder / f"{row}_{number}.png").write_bytes(content)
        rows.append({"images": [{"path": f"{row}_{number}.png"} for number in range(len(sizes))]})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder / "rows.jsonl"


def make_seen_samples(num: int, model: Path, data: Path, *, with_images: bool = True, **options: Any) -> Samples:
    """``make_samples`` with the images of the file's rows, one row after another, in their prompts."""
    metas, fields = make_samples(num, vocab_size=TEXT_VOCAB, **options)
    processing = read_image_processing(model, None)
    fields["images"] = []
    for i, meta in enumerate(metas):
        row = i % len(SIZES) if with_images else 0
        refs, prompt = [], [int(fields["tokens"][i][0])]
        for number, (height, width) in enumerate(SIZES[row]):
            content = (data.parent / f"{row}_{number}.png").read_bytes()
            grid = processing.grid(height, width)
            refs.append(ImageRef(file=0, row=row, number=number, digest=digest_of(content), grid=grid))
            text = [] if IS_ADJACENT[row] else [5, 6]
            prompt += [START, *[IMAGE_TOKEN_ID] * processing.num_tokens(grid), END, *text]
        own = fields["tokens"][i]
        fields["tokens"][i] = torch.cat([torch.tensor(prompt), own[1:]])
        fields["images"].append(image_refs_to_tensor(refs))
        metas[i] = dataclasses.replace(meta, prompt_length=meta.prompt_length + len(prompt) - 1)
    return metas, fields


class Seen:
    """transformers' model of a folder with vision, for one sample at a time."""

    def __init__(self, folder: Path, data: Path, dtype: torch.dtype = torch.float32) -> None:
        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype)
        self._processor, self._data = ImageProcessor(read_image_processing(folder, None)), data

    def log_softmax(self, tokens: Tensor, images: Tensor) -> Tensor:
        """[L, V] of one sample."""
        files = [(self._data.parent / f"{r.row}_{r.number}.png").read_bytes() for r in image_refs_from_tensor(images)]
        options: dict[str, Any] = {}
        if files:
            patches, grids = self._processor.patches(files)
            options = {"pixel_values": patches, "image_grid_thw": grids}
        self.model.model.rope_deltas = None
        types = (tokens == IMAGE_TOKEN_ID).int()[None]
        logits = self.model(input_ids=tokens[None], mm_token_type_ids=types, use_cache=False, **options).logits[0]
        return torch.log_softmax(logits, -1)

    def step(self, samples: Samples) -> tuple[float, dict[str, float]]:
        """Loss (forward KL on the teacher's top-k and the rest as one outcome, mean over loss tokens) and what its
        gradient's norm is with each of ``student.vision.freeze``."""
        metas, fields = samples
        total = torch.zeros(())
        for i, meta in enumerate(metas):
            log_p = self.log_softmax(fields["tokens"][i], fields["images"][i])
            for r in range(meta.response_length):
                if fields["loss_mask"][i][r]:
                    q = fields["teacher_logprobs"][i][r].to(log_p.dtype).exp()
                    p = log_p[meta.prompt_length + r - 1].exp()[fields["teacher_ids"][i][r].long()]
                    rest = (1 - q.sum()) * ((1 - q.sum()) / (1 - p.sum())).log()
                    total = total + (q * (q / p).log()).sum() + rest
        loss = total / sum(meta.num_loss_tokens for meta in metas)
        self.model.zero_grad()
        loss.backward()
        squares = {"text": 0.0, "merger": 0.0, "tower": 0.0}
        for name, parameter in self.model.named_parameters():
            part = "text" if ".visual." not in name else "merger" if "merger" in name else "tower"
            squares[part] += 0.0 if parameter.grad is None else float(parameter.grad.double().square().sum())
        text, merger, tower = squares.values()
        norms = {"none": text + merger + tower, "tower": text + merger, "tower_and_merger": text}
        return loss.item(), {freeze: math.sqrt(square) for freeze, square in norms.items()}
