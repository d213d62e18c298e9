"""References become positions and patches of a micro-batch: each file once, each token its feature."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mopd.base.types import ImageRef, SampleMeta, UserError
from mopd.config.load import load_recipe
from mopd.conversion.models.reading import read_dims
from mopd.data.image_files import digest_of
from mopd.data.image_refs import image_refs_to_tensor
from mopd.data.packing import PackingRules
from mopd.student.images import StudentImages
from mopd.student.token_layout import TokenLayout, choose_token_layout
from tests.fixtures.recipe import RECIPE
from tests.fixtures.samples import meta_of
from tests.fixtures.vision import IMAGE_TOKEN_ID, image_bytes, make_vision_model

FILES = {"a.png": image_bytes(56, 84), "b.png": image_bytes(56, 56, 1)}
GRIDS = [(1, 4, 6), (1, 4, 4)]
SIZES = [6, 4]
"""Tokens of each."""
RECTANGLES = PackingRules(is_packed=False, max_tokens=64, micro_batch_size=None, square_cost=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and a data file with two images in its only row."""
    folder = make_vision_model(tmp_path_factory.mktemp("images"))
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    (folder / "rows.jsonl").write_text(json.dumps({"images": [{"path": name} for name in FILES]}) + "\n")
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


def _images(folder: Path, *, has_tower: bool) -> StudentImages:
    paths = [f"student.model={folder}", f"data.train=[{folder}/rows.jsonl]"]
    recipe = load_recipe(folder / "recipe.yaml", paths).recipe
    vision = read_dims(folder).vision
    assert vision is not None
    return StudentImages(recipe, vision, has_tower=has_tower)


def _refs(*numbers: int) -> Tensor:
    digests = [digest_of(content) for content in FILES.values()]
    return image_refs_to_tensor([ImageRef(file=0, row=0, number=n, digest=digests[n], grid=GRIDS[n]) for n in numbers])


def _tokens(*numbers: int) -> Tensor:
    """A text token before each image and one behind the last."""
    return torch.tensor([token for n in numbers for token in [3, *[IMAGE_TOKEN_ID] * SIZES[n]]] + [4])


def _sample(*numbers: int) -> tuple[Tensor, Tensor]:
    return _tokens(*numbers), _refs(*numbers)


def _metas(samples: list[tuple[Tensor, Tensor]]) -> list[SampleMeta]:
    return [meta_of(i, prompt=len(tokens), response=0) for i, (tokens, _) in enumerate(samples)]


def _padded(samples: list[tuple[Tensor, Tensor]]) -> TokenLayout:
    """Right-padded."""
    return choose_token_layout(_metas(samples), RECTANGLES, (1, 1))


def test_each_file_is_read_once_and_each_token_has_its_feature(folder: Path) -> None:
    samples = [_sample(1), _sample(), _sample(0, 1)]
    made = _images(folder, has_tower=True).read(samples, _padded(samples))
    assert made is not None
    assert made.grids.tolist() == [list(GRIDS[1]), list(GRIDS[0])]  # in the order of their first use
    assert len(made.patches) == sum(4 * size for size in SIZES)
    padded = torch.nn.utils.rnn.pad_sequence([tokens for tokens, _ in samples])  # [S, B]
    assert sorted(made.rows.tolist()) == (padded.flatten() == IMAGE_TOKEN_ID).nonzero()[:, 0].tolist()
    first, second, third = list(range(4)), list(range(4, 10)), list(range(4))
    assert made.sources.tolist() == [*first, *second, *third]
    assert made.rows.tolist() == [
        3 * s + b
        for b, starts in ((0, [(1, 4)]), (2, [(1, 6), (8, 4)]))
        for start, size in starts
        for s in range(start, start + size)
    ]


def test_ranks_without_the_tower_read_nothing(folder: Path) -> None:
    samples = [_sample(0), _sample()]
    blind, seeing = (_images(folder, has_tower=has_tower) for has_tower in (False, True))
    token_layout = choose_token_layout(_metas(samples), RECTANGLES, (3, 9))
    assert blind.read(samples, token_layout) is None
    assert seeing.read([_sample()], _padded([_sample()])) is None
    positions = blind.position_ids(samples, token_layout.positions(), token_layout)
    assert torch.equal(positions, seeing.position_ids(samples, token_layout.positions(), token_layout))
    positions = token_layout.sequences(positions)
    assert positions.shape == (3, 3, 9)
    assert positions[:, 0].tolist() == [
        [0, 1, 1, 1, 1, 1, 1, 4, 8],
        [0, 1, 1, 1, 2, 2, 2, 4, 8],
        [0, 1, 2, 3, 1, 2, 3, 4, 8],
    ]
    assert (positions[:, 1:] == torch.arange(9)).all()


def test_in_a_pack_each_sequence_has_its_own_positions_and_rows(folder: Path) -> None:
    samples = [_sample(1), _sample(), _sample(0, 1)]
    rules = replace(RECTANGLES, is_packed=True, total_multiple=8)
    token_layout = choose_token_layout(_metas(samples), rules, (1, 1))
    images = _images(folder, has_tower=True)
    positions = token_layout.sequences(images.position_ids(samples, token_layout.positions(), token_layout))
    alone = [_padded([sample]) for sample in samples]
    own = [images.position_ids([sample], one.positions(), one) for sample, one in zip(samples, alone, strict=True)]
    ends = token_layout.shape[1] - sum(one.num_rows for one in alone)
    assert 0 < ends < 8
    assert torch.equal(positions[:, 0], torch.cat([*own, torch.arange(ends).expand(3, ends)], dim=1))
    made = images.read(samples, token_layout)
    assert made is not None
    tokens = torch.cat([tokens for tokens, _ in samples])
    assert made.rows.tolist() == (tokens == IMAGE_TOKEN_ID).nonzero()[:, 0].tolist()
    first, second = list(range(4)), list(range(4, 10))
    assert made.sources.tolist() == [*first, *second, *first]


def test_other_tokens_and_changed_files_are_refused(folder: Path) -> None:
    images, token_layout = _images(folder, has_tower=True), _padded([_sample(0)])
    with pytest.raises(ValueError, match="4 image tokens for 1 images that have 6"):
        images.position_ids([(_tokens(1), _refs(0))], token_layout.positions(), token_layout)
    changed = _refs(0)
    changed[0, 3] += 1  # of the digest
    with pytest.raises(UserError, match=r"rows.jsonl: row 0: image 0 has changed"):
        images.read([(_tokens(0), changed)], token_layout)
    other_grid = image_refs_to_tensor(
        [ImageRef(file=0, row=0, number=0, digest=digest_of(FILES["a.png"]), grid=GRIDS[1])]
    )
    with pytest.raises(RuntimeError, match="the processor makes grids"):
        images.read([(_tokens(1), other_grid)], token_layout)
