"""Prompts with images: how many tokens each takes, where its bytes are found again, and what is refused."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image, ImageOps
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from mopd.base.types import ImageRef, UserError
from mopd.config.data import DataConfig
from mopd.config.groups import Assignment, TeacherConfig
from mopd.data.image_files import digest_of, image_size, read_rgb
from mopd.data.image_processing import read_image_processing
from mopd.data.image_processor import ImageProcessor
from mopd.data.image_refs import image_refs_from_tensor, image_refs_to_tensor
from mopd.data.images import ImageStore
from mopd.data.prompts import PromptDataset, load_prompts, require_vision_teachers
from mopd.data.tokenizer import load_tokenizer
from mopd.data.vision_prompts import read_vision
from tests.fixtures.vision import (
    IMAGE_TOKEN_ID,
    VISION_CHAT_TEMPLATE,
    image_bytes,
    make_vision_model,
    write_image_processing,
)

Load = Callable[..., PromptDataset]
BUBBLE = 10_000
"""Pixels on a side that only a header claims."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("vision") / "model")


@pytest.fixture
def load(model: Path, tmp_path: Path) -> Load:
    """Load rows from a file in ``tmp_path``, as a student that sees images or as one that does not."""

    def loaded(
        rows: list[dict[str, Any]], name: str = "data.parquet", *, sees: bool = True, **keys: Any
    ) -> PromptDataset:
        write(tmp_path / name, rows)
        cfg = DataConfig(train=(str(tmp_path / name),), **keys)
        tokenizer = load_tokenizer(model)
        vision = read_vision(model, cfg.max_pixels, tokenizer) if sees else None
        return load_prompts(cfg.train, cfg, tokenizer, vision)

    return loaded


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    if path.suffix == ".jsonl":
        path.write_text("\n\n".join(map(json.dumps, rows)) + "\n")  # blank lines are no rows
    else:
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)


def row(text: str, *images: Any, domain: str = "read", **columns: Any) -> dict[str, Any]:
    """As verl writes it."""
    return {
        "prompt": [{"role": "user", "content": text}],
        "data_source": domain,
        "images": [{"bytes": image, "path": None} if isinstance(image, bytes) else image for image in images],
        **columns,
    }


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_sizes_are_those_of_the_processor(tmp_path: Path, family: str) -> None:
    write_image_processing(tmp_path, family)
    processing, numbers = read_image_processing(tmp_path, None), random.Random(0)
    side = processing.patch_size * processing.merge_size
    for _ in range(3000):
        height, width = (round(2 ** numbers.uniform(0, 12)) for _ in range(2))
        if max(height, width) > 200 * min(height, width):
            continue
        expected = smart_resize(height, width, side, processing.min_pixels, processing.max_pixels)
        _, rows, columns = processing.grid(height, width)
        assert (rows * processing.patch_size, columns * processing.patch_size) == expected
    files = [image_bytes(56, 84), image_bytes(300, 40, kind="JPEG"), image_bytes(9, 11, kind="BMP"), image_bytes()]
    patches, grids = ImageProcessor(processing).patches(files)
    assert [tuple(grid) for grid in grids.tolist()] == [processing.grid(*image_size(file, "")) for file in files]
    assert patches.shape == (grids.prod(1).sum(), 3 * 2 * processing.patch_size**2)
    alone, _ = ImageProcessor(processing).patches(files[2:3])
    assert torch.equal(alone, patches[grids[:2].prod(1).sum() :][: len(alone)])


def test_every_setting_that_changes_pixels_changes_the_fingerprint(tmp_path: Path) -> None:
    write_image_processing(tmp_path)
    settings = json.loads((tmp_path / "preprocessor_config.json").read_text())
    seen = {read_image_processing(tmp_path, None).fingerprint, read_image_processing(tmp_path, 6000).fingerprint}
    changes: dict[str, Any] = {
        "patch_size": 7, "temporal_patch_size": 1, "merge_size": 4, "min_pixels": 60, "max_pixels": 9000,
        "image_mean": [0, 0, 0], "image_std": [1, 1, 1], "rescale_factor": 1, "resample": 2,
    }  # fmt: skip
    for change in changes.items():
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings | dict([change])))
        seen.add(read_image_processing(tmp_path, None).fingerprint)
    assert len(seen) == 2 + len(changes)
    # The same numbers as a section of the whole processor's file, under the names of later models.
    sizes = {"size": {"shortest_edge": settings.pop("min_pixels"), "longest_edge": settings.pop("max_pixels")}}
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": settings | sizes}))
    assert read_image_processing(tmp_path, None).fingerprint in seen


def test_images_take_their_tokens_and_are_found_again(load: Load, model: Path, tmp_path: Path) -> None:
    """Over several row groups, in any order, from threads."""
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "a.webp").write_bytes(image_bytes(70, 30, seed=5, kind="WEBP"))
    files = [image_bytes(56, 84, seed) for seed in range(3)]
    rows = [
        row("x<image>", files[0]),
        row("plain", domain="sort"),
        row("<image><image>y", files[1], {"path": "below/a.webp"}),
        {**row("no list", domain="sort"), "images": None},
        row("z <image>", {"bytes": files[2], "path": "whence/it/came.png"}),
    ]
    dataset = load(rows)
    processing = read_image_processing(model, None)
    for found in dataset.rows:
        sizes = [processing.num_tokens(ref.grid) for ref in found.images]
        assert found.tokens.count(IMAGE_TOKEN_ID) == sum(sizes)
        assert found.text.count("<|image_pad|>") == len(found.images)
    assert [len(found.images) for found in dataset.rows] == [1, 0, 2, 0, 1]
    assert dataset.image_counts == {"read": 3}
    assert dataset.row(1).tokens == load([rows[1] | {"images": None}], "text.parquet", sees=False).row(0).tokens
    expected = {digest_of(file): file for file in (*files, (tmp_path / "below" / "a.webp").read_bytes())}
    given = [image for images in dataset.images_of([4, 2, 0, 1, 2]) or [] for image in images]
    assert len(given) == 6
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda one: one.load() == expected[one.digest], given * 4))


def test_paths_in_json_lines(load: Load, tmp_path: Path) -> None:
    files = [image_bytes(56, 84, seed, kind="JPEG") for seed in range(3)]
    for i, file in enumerate(files):
        (tmp_path / f"{i}.jpg").write_bytes(file)
    rows = [row("<image>", {"path": f"{i}.jpg"}, own={"images": {"path": f"{2 - i}.jpg"}}) for i in range(3)]
    dataset = load(rows, "data.jsonl")
    assert [images[0].load() for images in dataset.images_of([2, 0, 1]) or []] == [files[i] for i in (2, 0, 1)]
    nested = load(rows, "data.jsonl", image_key="own.images")  # and a single image that is in no list
    assert [images[0].load() for images in nested.images_of([2, 0, 1]) or []] == [files[i] for i in (0, 2, 1)]


def test_references_survive_the_data_plane() -> None:
    numbers = random.Random(0)
    refs = [
        ImageRef(file=i, row=2**40 + i, number=i, digest=numbers.randbytes(16), grid=(1, 2 * i, 4)) for i in range(9)
    ]
    assert list(image_refs_from_tensor(image_refs_to_tensor(refs))) == refs
    assert image_refs_to_tensor(()).shape == (0, 8) and image_refs_from_tensor(image_refs_to_tensor(())) == ()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_photographs_are_turned_upright(orientation: int) -> None:
    image, exif = Image.open(io.BytesIO(image_bytes(40, 60))), Image.Exif()
    exif[0x0112] = orientation
    for kind in ("JPEG", "PNG", "WEBP"):
        stream = io.BytesIO()
        image.save(stream, kind, exif=exif)
        expected = ImageOps.exif_transpose(Image.open(stream))
        found = read_rgb(stream.getvalue(), "here")
        assert image_size(stream.getvalue(), "here") == (expected.height, expected.width) == (found.height, found.width)
        assert np.array_equal(np.asarray(found), np.asarray(expected))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA"])
def test_what_is_transparent_stands_on_white(mode: str) -> None:
    image = Image.open(io.BytesIO(image_bytes(40, 60))).convert("RGBA")
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    stream = io.BytesIO()
    image.convert(mode).save(stream, "PNG")
    stored = Image.open(io.BytesIO(stream.getvalue())).convert("RGBA")
    expected = Image.alpha_composite(Image.new("RGBA", stored.size, "white"), stored).convert("RGB")
    difference = np.abs(np.asarray(read_rgb(stream.getvalue(), "here"), int) - np.asarray(expected, int))
    assert difference.max() <= 1  # two formulas of one mean


def encoded(kind: str, *frames: Image.Image) -> bytes:
    stream = io.BytesIO()
    frames[0].save(stream, kind, save_all=len(frames) > 1, append_images=frames[1:])
    return stream.getvalue()


def claimed(width: int, height: int) -> bytes:
    """A PNG whose header says that it is so large."""
    import zlib

    content = image_bytes(8, 8)
    header = b"IHDR" + width.to_bytes(4, "big") + height.to_bytes(4, "big") + content[24:29]
    return content[:12] + header + zlib.crc32(header).to_bytes(4, "big") + content[33:]


PICTURE = Image.new("RGB", (60, 40), "red")
BAD_FILES: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "no image of the formats PNG, JPEG, WEBP, BMP"),
    "a text": (b"an image", "no image of the formats PNG, JPEG, WEBP, BMP: convert it"),
    "another format": (encoded("GIF", PICTURE), "no image of the formats"),
    "a TIFF": (encoded("TIFF", PICTURE), "no image of the formats"),
    "an animated PNG": (encoded("PNG", PICTURE, Image.new("RGB", (60, 40))), "the image is animated: keep one frame"),
    "an animated WEBP": (encoded("WEBP", PICTURE, Image.new("RGB", (60, 40))), "the image is animated"),
    "CMYK": (encoded("JPEG", PICTURE.convert("CMYK")), "the image has mode CMYK, taken are"),
    "16 bits": (encoded("PNG", Image.new("I;16", (60, 40))), "the image has mode I;16"),
    "a bomb": (claimed(BUBBLE, BUBBLE), f"more than {2**26} pixels, the limit"),
    "a large bomb": (claimed(2**31 - 1, 2**31 - 1), f"more than {2**26} pixels, the limit"),
    "a line": (encoded("PNG", Image.new("RGB", (402, 2))), "sides that differ more than 200 times"),
    "a cut header": (image_bytes(kind="JPEG")[:100], "no image of the formats"),
}


@pytest.mark.parametrize("case", BAD_FILES)
@pytest.mark.filterwarnings("error")
def test_bad_files_name_the_row(load: Load, case: str) -> None:
    content, line = BAD_FILES[case]
    with pytest.raises(UserError, match=r"data\.parquet: row 1: image 1: ") as caught:
        load([row("a"), row("<image><image>", image_bytes(), content)])
    assert line in str(caught.value) and "\n" not in str(caught.value)


BAD_ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "too few marks": (row("x", image_bytes()), "the prompt has 0 <image> for 1 images"),
    "too many marks": (row("<image><image>", image_bytes()), "the prompt has 2 <image> for 1 images"),
    "a mark without images": (row("<image>"), "the prompt has 1 <image> for 0 images"),
    "a placeholder": (row("<|image_pad|>"), "the prompt holds '<|image_pad|>', which stands for an image"),
    "another placeholder": (row("<image><|vision_end|>", image_bytes()), "the prompt holds '<|vision_end|>'"),
    "a video": (row("<image><video>", image_bytes()), "the prompt holds <video>: videos are not supported"),
    "audio": (row("<image><audio>", image_bytes()), "the prompt holds <audio>: audios are not supported"),
    "a column of videos": (row("x", videos=[{"path": "a.mp4"}]), "column 'videos': videos are not supported"),
    "several turns": (
        {**row("x", *2 * [image_bytes()]), "prompt": [{"role": "user", "content": "<image>"}] * 2},
        "<image> in 2 messages: images in several turns are not supported",
    ),
    "a system's image": (
        {**row("x", image_bytes()), "prompt": [{"role": "system", "content": "<image>"}]},
        "<image> in a message of role 'system'",
    ),
    "too many": (row("<image>" * 17, *17 * [image_bytes()]), "17 images, at most 16 are taken"),
    "no such file": (row("<image>", {"path": "none.png"}), "path 'none.png': no such file in"),
    "a way out": (row("<image>", {"path": "../secret.png"}), "leads out of the folder of the data file"),
    "an absolute way out": (row("<image>", {"path": "/etc/passwd"}), "leads out of the folder of the data file"),
    "a link out": (row("<image>", {"path": "link.png"}), "leads out of the folder of the data file"),
    "a folder": (row("<image>", {"path": "."}), "no such file"),
    "no possible name": (row("<image>", {"path": "a\0b"}), "not a possible file name"),
    "neither": (row("<image>", {"bytes": None, "path": None}), "not {bytes: …} with the encoded file or {path: …}"),
    "a name alone": ({**row("<image>"), "images": ["a.png"]}, "image 0 (data.image_key) is str 'a.png', not"),
    "bytes as text": (row("<image>", {"bytes": "iVBOR"}), "image 0 (data.image_key) is dict"),
    "a number": ({**row("<image>"), "images": 7}, "the images (data.image_key) are int 7, not a list of"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_bad_rows_name_the_row(load: Load, tmp_path: Path, case: str) -> None:
    bad, line = BAD_ROWS[case]
    (tmp_path / "link.png").symlink_to("/etc/passwd")
    with pytest.raises(UserError, match=r"data\.parquet: row 0: ") as caught:
        load([bad])
    assert line in str(caught.value) and "\n" not in str(caught.value)


def test_files_beyond_the_limit(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("images", "image_files"):
        monkeypatch.setattr(f"mopd.data.{module}.MAX_IMAGE_BYTES", 1000)
    (tmp_path / "a.png").write_bytes(image_bytes())
    for image in (image_bytes(), {"path": "a.png"}):
        with pytest.raises(UserError, match=r"1000(:| bytes)") as caught:
            load([row("<image>", image)])
        assert "row 0: image 0" in str(caught.value)


def test_damage_that_no_header_shows_is_found_before_an_engine_gets_it(load: Load) -> None:
    cut = image_bytes(200, 200, kind="JPEG")
    dataset = load([row("<image>", cut[: len(cut) // 2])])
    ((image,),) = dataset.images_of([0]) or []
    with pytest.raises(UserError, match=r"data\.parquet: row 0: image 0: the image is damaged: .*truncated"):
        image.load()


@pytest.mark.parametrize("name", ["data.parquet", "data.jsonl"])
def test_a_file_that_changes_is_noticed(load: Load, tmp_path: Path, name: str) -> None:
    """Another image, another row's, none; then a file with fewer rows."""
    for i in range(3):
        (tmp_path / f"{i}.png").write_bytes(image_bytes(seed=i))
    rows = [row("<image>", {"path": f"{i}.png"}) for i in range(3)]

    def read_again(dataset: PromptDataset, number: int) -> None:
        cfg = DataConfig(train=(str(tmp_path / name),))
        ImageStore(cfg.train, cfg).read(dataset.row(number).images[0])

    for others in ([rows[2], *rows[1:]], [row("x"), *rows[1:]]):
        dataset = load(rows, name)
        write(tmp_path / name, others)
        with pytest.raises(UserError, match="row 0: image 0 has changed since the prompts were loaded"):
            read_again(dataset, 0)
    dataset = load(rows, name)
    (tmp_path / "0.png").write_bytes(image_bytes(seed=9))
    with pytest.raises(UserError, match="row 0: image 0 has changed"):
        read_again(dataset, 0)
    write(tmp_path / name, rows[:2])
    with pytest.raises(UserError, match="row 2 is not there any more"):
        read_again(dataset, 2)


def test_templates_that_drop_or_repeat_images(load: Load, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    for image, places in (("", 0), ("<|image_pad|><|image_pad|>", 2)):
        template.write_text(VISION_CHAT_TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", image))
        with pytest.raises(UserError, match=rf"row 0: {places} places for 1 images in the tokens of the prompt"):
            load([row("<image>", image_bytes())], chat_template=str(template))


def test_long_prompts_are_never_cut_through_an_image(load: Load) -> None:
    rows = [row("a" * 40), row("<image>", image_bytes()), row("<image>b", image_bytes(112, 112))]
    longest = len(load(rows).row(1).tokens)
    filtered = load(rows, max_prompt_length=longest, overlong_prompts="filter")
    assert [len(found.images) for found in filtered.rows] == [1] and filtered.num_filtered == {"read": 2}
    with pytest.raises(UserError, match=r"row 2: .* 1 images included, which cannot be cut, .*: filter$"):
        load(rows, max_prompt_length=longest, overlong_prompts="truncate")
    small = load(rows, max_pixels=56 * 56)
    assert len(small.row(1).tokens) < longest


def test_who_sees_no_images_is_told_how_many_there_are(load: Load) -> None:
    rows = [row("<image>", image_bytes()), row("x", domain="sort"), row("<image>", image_bytes(), domain="name")] * 3
    with pytest.raises(
        UserError, match=r"of domain 'name' \(3 rows\), 'read' \(3 rows\), for a student that sees none"
    ):
        load(rows, sees=False)
    teachers = {
        "one": TeacherConfig(model="a", domains=("read",)),
        "two": TeacherConfig(model="b", domains=("name", "sort")),
    }
    counts = load(rows).image_counts
    require_vision_teachers(counts, Assignment(teachers), ["one", "two"])
    with pytest.raises(UserError, match=r"sees none: teachers\.two for domain 'name' \(3 rows\): give"):
        require_vision_teachers(counts, Assignment(teachers), ["one"])
    require_vision_teachers({"read": 3}, Assignment(teachers), ["one"])
