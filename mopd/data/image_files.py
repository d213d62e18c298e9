"""Encoded images from untrusted files: checked against limits by their header, and decoded to RGB pixels.

Student and engines get their pixels here, as vLLM makes them: rotated as EXIF says, transparency on white.
"""

from __future__ import annotations

import hashlib
import io
import warnings

from PIL import Image, ImageFile, UnidentifiedImageError

from mopd.base.text import one_line
from mopd.base.types import UserError
from mopd.config.data import MAX_IMAGE_BYTES, MAX_IMAGE_PIXELS

FORMATS = ("PNG", "JPEG", "WEBP", "BMP")
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA")
MAX_IMAGES = 16
"""Largest number of images of one prompt."""
MAX_ASPECT_RATIO = 200
"""Largest ratio of the longer to the shorter side: processors refuse images beyond it."""
_ORIENTATION = 0x0112
"""EXIF's tag of the orientation."""
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""EXIF orientation -> operation that makes the pixels upright; from 5 on it exchanges height and width."""


def digest_of(content: bytes) -> bytes:
    """Return the name of an encoded file: the first 16 bytes of its SHA-256."""
    return hashlib.sha256(content).digest()[:16]


def image_size(content: bytes, place: str) -> tuple[int, int]:
    """Return height and width of the upright image in pixels, from the header alone.

    Raises:
        UserError: headed by ``place``; a format, mode or size that is not taken, an animation, no image at all.
    """
    image, turn = _open(content, place)
    return (image.width, image.height) if turn >= 5 else (image.height, image.width)


def read_rgb(content: bytes, place: str) -> Image.Image:
    """Return the decoded, upright image in mode RGB. Raise ``UserError`` as ``image_size``, and for damaged pixels."""
    image, turn = _open(content, place)
    try:
        image.load()
        upright = image.transpose(_TURNS[turn]) if turn in _TURNS else image
        if "A" not in upright.mode and "transparency" not in upright.info:
            return upright.convert("RGB")
        layered = upright.convert("RGBA")
        white = Image.new("RGB", layered.size, (255, 255, 255))
        white.paste(layered, mask=layered.getchannel("A"))
        return white
    except Exception as error:  # decoders raise any exception on damaged files
        raise UserError(
            f"{place}: the image is damaged: {one_line(error):.200}: write it again or remove the row"
        ) from error


def _open(content: bytes, place: str) -> tuple[ImageFile.ImageFile, int]:
    """Return the image, not decoded yet, and its orientation, 1 for upright."""
    if len(content) > MAX_IMAGE_BYTES:
        raise UserError(f"{place}: the image has {len(content)} bytes, the limit is {MAX_IMAGE_BYTES}: scale it down")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # our own limit is below
            image = Image.open(io.BytesIO(content), formats=FORMATS)
            # ``Image.Image``'s method: the PNG reader's own decodes the pixels first.
            turn = Image.Image.getexif(image).get(_ORIENTATION, 1)
            is_animated = bool(getattr(image, "is_animated", False))
    except Image.DecompressionBombError as error:
        raise UserError(f"{place}: {_too_large(one_line(error))}") from error
    except Exception as error:  # the text of an UnidentifiedImageError only names an object
        why = "" if isinstance(error, UnidentifiedImageError) else f": {one_line(error):.200}"
        raise UserError(f"{place}: no image of the formats {', '.join(FORMATS)}{why}: convert it") from error
    if is_animated:
        raise UserError(f"{place}: the image is animated: keep one frame of it")
    if image.mode not in MODES:
        raise UserError(f"{place}: the image has mode {image.mode}, taken are {', '.join(MODES)}: convert it to RGB")
    if image.width * image.height > MAX_IMAGE_PIXELS:
        raise UserError(f"{place}: {_too_large(f'{image.width} x {image.height} pixels')}")
    if max(image.size) > MAX_ASPECT_RATIO * min(image.size):
        raise UserError(
            f"{place}: the image has {image.width} x {image.height} pixels, sides that differ more than "
            f"{MAX_ASPECT_RATIO} times: crop it"
        )
    return image, turn if isinstance(turn, int) else 1


def _too_large(what: str) -> str:
    return f"the image has more than {MAX_IMAGE_PIXELS} pixels, the limit ({what}): scale it down"
