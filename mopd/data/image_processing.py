"""Settings by which a family's processor cuts an image into patches: enough to count an image's tokens. No torch."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mopd.base.files.json_text import read_json_object
from mopd.base.files.reading import shown_path
from mopd.base.types import UserError
from mopd.config.data import MAX_IMAGE_PIXELS
from mopd.conversion.models.config_keys import read_config
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


def read_image_processing(folder: str | Path, max_pixels: int | None) -> ImageProcessing:
    """Read the settings of a model's folder; ``max_pixels`` replaces the folder's if it is given.

    Raises:
        UserError: there is no such file, it is damaged or of another kind of processor, or it asks for what is not
            carried out: names file and key.
    """
    path, settings = _read(Path(folder))
    kind = settings.get("image_processor_type", settings.get("feature_extractor_type"))
    if kind not in _TYPES:
        raise _refused(path, "image_processor_type", kind, f"use a model whose processor is one of {', '.join(_TYPES)}")
    for key in _ALWAYS_ON:
        if settings.get(key, True) is not True:
            raise _refused(path, key, settings[key], "images are resized, rescaled, normalized and RGB: set true")
    size = settings.get("size") or {}
    if not isinstance(size, Mapping):
        raise _refused(path, "size", size, _CURE)
    least, most = _DEFAULT_PIXELS
    least = _pixels(path, size, "shortest_edge", least)
    most = _pixels(path, size, "longest_edge", most)
    least, most = _pixels(path, settings, "min_pixels", least), _pixels(path, settings, "max_pixels", most)
    found = ImageProcessing(
        patch_size=_count(path, settings, "patch_size", 14),
        temporal_patch_size=_count(path, settings, "temporal_patch_size", 2),
        merge_size=_count(path, settings, "merge_size", 2),
        min_pixels=least,
        max_pixels=most if max_pixels is None else max_pixels,
        mean=_colours(path, settings, "image_mean", _CLIP_MEAN),
        std=_colours(path, settings, "image_std", _CLIP_STD),
        rescale_factor=_number(path, "rescale_factor", settings.get("rescale_factor", 1 / 255)),
        resample=_count(path, settings, "resample", _BICUBIC, most=5),
    )
    if found.max_pixels < max(found.min_pixels, (found.patch_size * found.merge_size) ** 2):
        key = f"{shown_path(path)}: max_pixels" if max_pixels is None else "data.max_pixels"
        raise UserError(
            f"{key}: {found.max_pixels} is less than the {found.min_pixels} that {shown_path(path)} asks for at least, "
            f"or than one token's {(found.patch_size * found.merge_size) ** 2}: raise it"
        )
    return found


def _read(folder: Path) -> tuple[Path, Mapping[str, Any]]:
    """Return the image processor's settings: a file of their own, or a section of the whole processor's."""
    whole = folder / PROCESSOR_FILE
    if whole.is_file():
        section = read_json_object(whole, cure=_CURE, any_number=True).get("image_processor")
        if isinstance(section, Mapping):
            return whole, section
    own = folder / PREPROCESSOR_FILE
    if not own.is_file():
        raise UserError(f"{shown_path(own)}: missing: a model that sees images comes with this file: fetch it")
    return own, read_json_object(own, cure=_CURE, any_number=True)


def _pixels(path: Path, settings: Mapping[str, Any], key: str, default: int) -> int:
    return _count(path, settings, key, default, most=2 * MAX_IMAGE_PIXELS)


def _count(path: Path, settings: Mapping[str, Any], key: str, default: int, *, most: int = _MAX_SIDE) -> int:
    value = settings.get(key)
    if value is None:
        return default
    if type(value) is not int or not 0 <= value <= most or (value == 0 and key != "resample"):
        raise _refused(path, key, value, f"it is a whole number up to {most}; {_CURE}")
    return value


def _colours(path: Path, settings: Mapping[str, Any], key: str, default: tuple[float, ...]) -> tuple[float, ...]:
    value = settings.get(key, default)
    if not isinstance(value, (list, tuple)) or len(value) != 3:
        raise _refused(path, key, value, f"it is three numbers; {_CURE}")
    numbers = tuple(_number(path, key, one) for one in value)
    if key == "image_std" and 0.0 in numbers:
        raise _refused(path, key, value, f"it is divided by; {_CURE}")
    return numbers


def _number(path: Path, key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise _refused(path, key, value, f"it is a number; {_CURE}")
    return float(value)


def _refused(path: Path, key: str, value: object, cure: str) -> UserError:
    return UserError(f"{shown_path(path)}: {key}: {value!a:.100}: {cure}")
