"""Small copies of prompts' images, as text that stands in records and in the page itself."""

from __future__ import annotations

import base64
import io
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_THUMBNAILS = 4
"""Of one example."""
MAX_CHARACTERS = 65536
"""Of one thumbnail: noise of the largest size has 40,000."""
_SIDE = 160
"""Pixels of the longer side, at most."""
_QUALITY = 80
_FORM = re.compile(r"data:image/jpeg;base64,[A-Za-z0-9+/]+={0,2}")


def thumbnail(image: Image) -> str:
    """A ``data:`` address of an RGB image that holds the whole of it, as JPEG; no larger than 160 pixels a side."""
    small, stream = image.copy(), io.BytesIO()
    small.thumbnail((_SIDE, _SIDE))
    small.save(stream, format="JPEG", quality=_QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(stream.getvalue()).decode()}"


def are_thumbnails(values: Any) -> bool:
    """What an example of a record may hold as its images; nothing that would make a page fetch or run something."""
    return (
        isinstance(values, list)
        and len(values) <= MAX_THUMBNAILS
        and all(isinstance(value, str) and len(value) <= MAX_CHARACTERS for value in values)
        and all(_FORM.fullmatch(value) for value in values)
    )
