"""Small copies of prompts' images, as text that stands in records and in the page itself."""

from __future__ import annotations

import base64
import io
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_THUMBNAILS = 4
"""Largest number of thumbnails of one example."""
MAX_CHARACTERS = 65536
"""Largest length of one thumbnail; noise of the largest size has 40,000 characters."""
_SIDE = 160
"""Largest length of the longer side, in pixels."""
_QUALITY = 80
_FORM = re.compile(r"data:image/jpeg;base64,[A-Za-z0-9+/]+={0,2}")


def thumbnail(image: Image) -> str:
    """Return a ``data:`` address of an RGB image that holds the whole of it, as JPEG; no larger than 160 pixels a
    side."""
    small, stream = image.copy(), io.BytesIO()
    small.thumbnail((_SIDE, _SIDE))
    small.save(stream, format="JPEG", quality=_QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(stream.getvalue()).decode()}"


def are_thumbnails(values: Any) -> bool:
    """Return whether a record's example may hold these as images: nothing that makes a page fetch or run something."""
    return (
        isinstance(values, list)
        and len(values) <= MAX_THUMBNAILS
        and all(isinstance(value, str) and len(value) <= MAX_CHARACTERS for value in values)
        and all(_FORM.fullmatch(value) for value in values)
    )
