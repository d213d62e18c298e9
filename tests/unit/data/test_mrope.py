"""Positions of text and images equal those of transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from mopd.data.mrope import image_starts, mrope_positions
from tests.fixtures.vision import IMAGE_TOKEN_ID, TOKEN_IDS, VISION_FAMILIES

START, END = TOKEN_IDS["<|vision_start|>"], TOKEN_IDS["<|vision_end|>"]
IDS = {"image_token_id": IMAGE_TOKEN_ID, "merge_size": 2}


def _layout(rng: np.random.Generator) -> tuple[list[int], list[tuple[int, int, int]]]:
    """Tokens and grids of up to four images, some adjacent, with text before, between and behind or without."""
    tokens: list[int] = [5] * int(rng.integers(0, 6))
    grids = []
    for _ in range(rng.integers(0, 5)):
        rows, columns = (int(side) for side in rng.integers(1, 9, 2))
        grids.append((1, 2 * rows, 2 * columns))
        tokens += [START] + [IMAGE_TOKEN_ID] * (rows * columns) + [END] + [7] * int(rng.integers(0, 4))
    return tokens or [5], grids


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_equal_those_of_transformers(family: str) -> None:
    """1,000 random layouts, the last token included that a response begins with."""
    name = VISION_FAMILIES[family]
    with torch.device("meta"):
        config = getattr(transformers, f"{name}Config")(
            text_config={"num_hidden_layers": 1}, vision_config={"depth": 1}, image_token_id=IMAGE_TOKEN_ID
        )
        model = getattr(transformers, f"{name}Model")(config)
    rng = np.random.default_rng(0)
    for _ in range(1000):
        tokens, grids = _layout(rng)
        ids = torch.tensor([tokens])
        expected, delta = model.get_rope_index(
            ids, image_grid_thw=torch.tensor(grids), mm_token_type_ids=(ids == IMAGE_TOKEN_ID).int()
        )
        positions = mrope_positions(np.array(tokens), grids, **IDS)
        assert positions.tolist() == expected[:, 0].tolist()
        assert positions.max() + 1 - len(tokens) == delta


def test_images_need_no_token_between_them() -> None:
    tokens, grids = np.array([IMAGE_TOKEN_ID] * 5 + [3]), [(1, 2, 4), (1, 2, 6)]
    assert image_starts(tokens, grids, **IDS) == [0, 2]
    assert mrope_positions(tokens, grids, **IDS).tolist() == [
        [0, 0, 2, 2, 2, 5],
        [0, 0, 2, 2, 2, 5],
        [0, 1, 2, 3, 4, 5],
    ]


@pytest.mark.parametrize(
    ("tokens", "told"),
    [
        ([1, 2], "0 image tokens for 1 images that have 2"),
        ([1, IMAGE_TOKEN_ID], "1 image tokens for 1 images"),
        ([IMAGE_TOKEN_ID] * 3, "3 image tokens for 1 images"),
        ([IMAGE_TOKEN_ID, 4, IMAGE_TOKEN_ID], "other tokens stand between those of an image, from 0 to 2"),
    ],
)
def test_tokens_that_are_not_the_images(tokens: list[int], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        mrope_positions(np.array(tokens), [(1, 2, 4)], **IDS)
