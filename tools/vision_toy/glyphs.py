"""Images of two glyphs, 56 x 84 pixels: each somewhere in its half, dark on light in colours of their own, noisy."""

from __future__ import annotations

import functools
import io
import random

import numpy as np
from PIL import Image, ImageFont

HEIGHT, WIDTH = 56, 84
SCALE = 4
"""Pixels for one of the font."""
SHIFT = (3, 4)
"""Most pixels from the middle of its half, to the sides, up and down."""
NOISE = 24
"""Most that a channel of a pixel differs from what was drawn."""
INK, PAPER = (0, 100), (150, 256)
"""Of each channel: smallest value, and the first that is too large."""
JPEG_QUALITY = 90


def encoded(letters: str, rng: random.Random, kind: str) -> bytes:
    """A file of the two ``letters`` as capitals; ``kind``: ``JPEG`` or ``PNG``."""
    stream = io.BytesIO()
    Image.fromarray(drawn(letters, rng)).save(stream, format=kind, quality=JPEG_QUALITY)  # PNG knows no quality
    return stream.getvalue()


def blank(kind: str) -> bytes:
    """A file of the same size without anything on it."""
    stream = io.BytesIO()
    Image.new("RGB", (WIDTH, HEIGHT), (128, 128, 128)).save(stream, format=kind)
    return stream.getvalue()


def drawn(letters: str, rng: random.Random) -> np.ndarray:
    """[HEIGHT, WIDTH, 3] uint8."""
    dice = np.random.default_rng(rng.getrandbits(64))
    is_ink = np.zeros((HEIGHT, WIDTH), dtype=bool)
    half = WIDTH // len(letters)
    for number, letter in enumerate(letters):
        glyph = _glyph(letter.upper())
        height, width = glyph.shape
        top = (HEIGHT - height) // 2 + rng.randint(-SHIFT[1], SHIFT[1])
        left = number * half + (half - width) // 2 + rng.randint(-SHIFT[0], SHIFT[0])
        is_ink[top : top + height, left : left + width] |= glyph
    ink, paper = dice.integers(*INK, 3), dice.integers(*PAPER, 3)
    pixels = np.where(is_ink[:, :, None], ink, paper) + dice.integers(-NOISE, NOISE + 1, (HEIGHT, WIDTH, 3))
    return np.clip(pixels, 0, 255).astype(np.uint8)


@functools.cache
def _glyph(letter: str) -> np.ndarray:
    """Of the bitmap font that Pillow carries, without its margins: [height, width] bool."""
    mask = ImageFont.load_default_imagefont().getmask(letter)
    points = np.array(mask, dtype=bool).reshape(mask.size[::-1])
    rows, columns = np.flatnonzero(points.any(axis=1)), np.flatnonzero(points.any(axis=0))
    glyph = points[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    return glyph.repeat(SCALE, axis=0).repeat(SCALE, axis=1)
