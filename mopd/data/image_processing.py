"""Settings by which a family's processor cuts an image into patches: enough to count an image's tokens. No torch."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from mopd.base.files.json_text import read_json_object
from mopd.base.files.reading import shown_path
from mopd.base.types import UserError
from mopd.config.data import MAX_IMAGE_PIXELS
from mopd.conversion.models.config_keys import Keys, read_config
from mopd.conversion.models.vision_config import VISION_FORMATS

PREPROCESSOR_FILE, PROCESSOR_FILE = "preprocessor_config.json", "processor_config.json"
_CURE = "fetch the file again"
_TYPES = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast")
"""Processor classes of Qwen2-VL and its successors; the two compute alike."""
_MAX_SIDE = 1024
"""Largest side of a patch, and of the square of patches that is merged."""
_ALWAYS_ON = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")
_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_BICUBIC = 3
_DEFAULT_PIXELS = (56 * 56, 28 * 28 * 1280)
"""Smallest and largest number of pixels of one image if a file names neither: the processor class's own defaults."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageProcessing:
    """All settings that change pixels or their number."""

    patch_size: int
    """Side of a patch in pixels."""
    temporal_patch_size: int
    """Frames of a patch; an image is repeated that many times."""
    merge_size: int
    """Side of the square of patches that becomes one token."""
    min_pixels: int
    """Smallest number of pixels; smaller images are scaled up."""
    max_pixels: int
    """Largest number of pixels; larger images are scaled down."""
    mean: tuple[float, ...]
    """Value subtracted from each colour."""
    std: tuple[float, ...]
    """Value that each colour is divided by."""
    rescale_factor: float
    """Factor that a byte is multiplied by first."""
    resample: int
    """Pillow's number of the resampling filter."""

    @property
    def fingerprint(self) -> str:
        """Hex hash, equal for two processors that make the same pixels of the same file."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    def grid(self, height: int, width: int) -> tuple[int, int, int]:
        """Return (1, rows, columns) of patches of an image with this height and width in pixels: sides become
        multiples of a token's, the area comes between ``min_pixels`` and ``max_pixels``, the ratio changes as little
        as possible."""
        side = self.patch_size * self.merge_size
        rows, columns = round(height / side), round(width / side)  # Python rounds .5 to even, and so do processors
        area = rows * columns * side * side
        if area > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            rows = max(1, math.floor(height / shrink / side))
            columns = max(1, math.floor(width / shrink / side))
        elif area < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            rows, columns = math.ceil(height * grow / side), math.ceil(width * grow / side)
        return 1, rows * self.merge_size, columns * self.merge_size

    def num_tokens(self, grid: tuple[int, int, int]) -> int:
        """Return the tokens that an image of ``grid`` takes in a prompt."""
        return math.prod(grid) // self.merge_size**2


def sees_images(folder: str | Path) -> bool:
    """Return whether the model of a folder takes images, by its ``config.json``. Raise ``UserError`` for a bad one."""
    return read_config(Path(folder)).get("model_type") in VISION_FORMATS


def check_image_keys(*, sees: bool, max_pixels: int | None = None, is_stored: bool = False) -> None:
    """Refuse keys of the recipe that do not go with a student that sees images or does not; ``is_stored``: samples are
    kept, or stored ones are read.

    Raises:
        UserError: one line with the key.
    """
    if max_pixels is not None and not sees:
        raise UserError("data.max_pixels is set but student.model sees no images: remove the key or name another")
    if is_stored and sees:
        raise UserError(
            "metrics.keep_samples, data.scored: student.model sees images, which stored samples do not hold: leave "
            "both out"
        )


def read_image_processing(folder: str | Path, max_pixels: int | None) -> ImageProcessing:
    """Read the settings of a model's folder; ``max_pixels`` replaces the folder's if it is given.

    Raises:
        UserError: there is no such file, it is damaged or of another kind of processor, or it asks for what is not
            carried out: names file and key.
    """
    keys = _read(Path(folder))
    kind = keys.config.get("image_processor_type", keys.config.get("feature_extractor_type"))
    if kind not in _TYPES:
        raise keys.error(
            "image_processor_type", f"{kind!a:.100}: use a model whose processor is one of {', '.join(_TYPES)}"
        )
    for key in _ALWAYS_ON:
        if keys.config.get(key, True) is not True:
            raise keys.error(key, "images are resized, rescaled, normalized and RGB: set true")
    least, most = _DEFAULT_PIXELS
    if not keys.absent("size"):
        size = keys.section("size")
        least, most = _pixels(size, "shortest_edge", least), _pixels(size, "longest_edge", most)
    least, most = _pixels(keys, "min_pixels", least), _pixels(keys, "max_pixels", most)
    rescale_factor = keys.config.get("rescale_factor", 1 / 255)
    if not _is_number(rescale_factor):
        raise keys.error("rescale_factor", f"{rescale_factor!a:.100} is not a number; {_CURE}")
    found = ImageProcessing(
        patch_size=_count(keys, "patch_size", 14),
        temporal_patch_size=_count(keys, "temporal_patch_size", 2),
        merge_size=_count(keys, "merge_size", 2),
        min_pixels=least,
        max_pixels=most if max_pixels is None else max_pixels,
        mean=_colours(keys, "image_mean", _CLIP_MEAN),
        std=_colours(keys, "image_std", _CLIP_STD),
        rescale_factor=float(rescale_factor),
        resample=_count(keys, "resample", _BICUBIC, least=0, most=5),
    )
    if found.max_pixels < max(found.min_pixels, (found.patch_size * found.merge_size) ** 2):
        key = f"{shown_path(keys.path)}: max_pixels" if max_pixels is None else "data.max_pixels"
        raise UserError(
            f"{key}: {found.max_pixels} is less than the {found.min_pixels} that {shown_path(keys.path)} asks for at "
            f"least, or than one token's {(found.patch_size * found.merge_size) ** 2}: raise it"
        )
    return found


def _read(folder: Path) -> Keys:
    """Return the image processor's settings: a file of their own, or a section of the whole processor's."""
    whole, own = folder / PROCESSOR_FILE, folder / PREPROCESSOR_FILE
    if whole.is_file():
        section = read_json_object(whole, cure=_CURE, any_number=True).get("image_processor")
        if isinstance(section, Mapping):
            return Keys(section, whole)
    if not own.is_file():
        raise UserError(f"{shown_path(own)}: missing: a model that sees images comes with this file: fetch it")
    return Keys(read_json_object(own, cure=_CURE, any_number=True), own)


def _pixels(keys: Keys, key: str, default: int) -> int:
    return _count(keys, key, default, most=2 * MAX_IMAGE_PIXELS)


def _count(keys: Keys, key: str, default: int, *, least: int = 1, most: int = _MAX_SIDE) -> int:
    expected = f"a whole number from {least} to {most}; {_CURE}"
    return default if keys.absent(key) else int(keys.value(key, int, expected, lambda v: least <= v <= most))


def _colours(keys: Keys, key: str, default: tuple[float, ...]) -> tuple[float, ...]:
    if key not in keys.config:
        return default
    numbers = keys.value(key, list, f"three numbers; {_CURE}", lambda v: len(v) == 3 and all(map(_is_number, v)))
    if key == "image_std" and 0 in numbers:
        raise keys.error(key, f"{numbers} holds 0, by which colours are divided; {_CURE}")
    return tuple(map(float, numbers))


def _is_number(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, (int, float)) and math.isfinite(value)
