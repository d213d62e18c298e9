"""Prompts with images: the place of each image in the text, and the number of tokens that it takes there."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mopd.base.types import ImageRef, UserError
from mopd.conversion.models.dims import VisionDims
from mopd.conversion.models.reading import read_dims
from mopd.data.files import MISSING, quoted
from mopd.data.image_files import digest_of, image_size
from mopd.data.image_processing import ImageProcessing, check_image_keys, read_image_processing, sees_images
from mopd.data.images import stored_images

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARK = "<image>"
"""Mark that stands for an image in a prompt's text."""
OTHER_MEDIA = {"videos": "<video>", "audios": "<audio>"}
"""Columns and marks of media that no family takes here."""
Messages = list[dict[str, Any]]


def read_vision(folder: str | Path, max_pixels: int | None, tokenizer: PreTrainedTokenizerBase) -> VisionPrompts | None:
    """Return how the student in ``folder`` reads images; ``None`` if it sees none.

    Raises:
        UserError: its files cannot be used or do not belong together; ``max_pixels`` for a student without vision.
    """
    if sees_images(folder):
        dims = read_dims(Path(folder)).vision
        assert dims is not None, "its family has vision"
        return VisionPrompts(dims, read_image_processing(folder, max_pixels), tokenizer)
    check_image_keys(sees=False, max_pixels=max_pixels)
    return None


class VisionPrompts:
    """Reader of the images in the prompts of a vision-language student."""

    def __init__(self, dims: VisionDims, processing: ImageProcessing, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raise ``UserError`` if the three arguments do not belong together."""
        self.processing = processing
        theirs = {name: getattr(processing, name) for name in ("patch_size", "temporal_patch_size")}
        for name, size in {**theirs, "spatial_merge_size": processing.merge_size}.items():
            if getattr(dims, name) != size:
                raise UserError(
                    f"student.model: vision_config.{name} of config.json is {getattr(dims, name)}, its processor has "
                    f"{size}: take both files of one model"
                )
        tokens = tokenizer.convert_ids_to_tokens([*dims.token_ids])
        if not all(isinstance(token, str) and token for token in tokens):
            raise UserError(
                f"student.model: its tokenizer has no tokens for the ids {dims.token_ids} of images and videos, which "
                "its config.json names: take the tokenizer that belongs to the model"
            )
        self.token_ids = dims.token_ids
        """Ids that stand for vision, never for text."""
        self._image_id, self._video_id = dims.image_token_id, dims.video_token_id
        image, _, start, end = self._tokens = tuple(tokens)
        self._spelled = f"{start}{image}{end}"

    def refs(self, value: Any, path: Path, *, file: int, row: int, place: str) -> tuple[ImageRef, ...]:
        """Return references to the images in a row's image column. Each file is read once, its pixels are only counted.

        Raises:
            UserError: names file, row and image of what cannot be used.
        """
        made = []
        for number, image in enumerate(stored_images(value, path, place)):
            content = image.read()
            grid = self.processing.grid(*image_size(content, image.place))
            made.append(ImageRef(file=file, row=row, number=number, digest=digest_of(content), grid=grid))
        return tuple(made)

    def refuse_other_media(self, row: Mapping[str, Any], place: str) -> None:
        """Raise ``UserError`` for a row with videos or audio."""
        for column in OTHER_MEDIA:
            if row.get(column, MISSING) not in (MISSING, None, []):
                raise UserError(f"{place}: column {column!r}: {column} are not supported: remove the row")

    def placed_in_text(self, text: str, num_images: int, place: str) -> str:
        """Return ``text`` with the tokens of an image in place of each mark. Raise ``UserError`` as
        ``placed_in_chat``."""
        self._check_marks([text], num_images, place)
        return text.replace(MARK, self._spelled) if num_images else text

    def placed_in_chat(self, messages: Messages, num_images: int, place: str) -> Messages:
        """Return the messages; the content of one with marks becomes a list of texts and images, as chat templates take
        it.

        Raises:
            UserError: there are more or fewer marks than images, they stand in several messages or not in a user's, a
                text holds a token that stands for images, or marks a video or audio.
        """
        self._check_marks([message["content"] for message in messages], num_images, place)
        marked = [message for message in messages if num_images and MARK in message["content"]]
        if len(marked) > 1:
            raise UserError(f"{place}: {MARK} in {len(marked)} messages: images in several turns are not supported")
        for message in marked:
            if message["role"] != "user":
                raise UserError(
                    f"{place}: {MARK} in a message of role {quoted(message['role'])}: move it to the user's"
                )
        return [
            message | {"content": _parts(message["content"])} if message in marked else message for message in messages
        ]

    def _check_marks(self, texts: Sequence[str], num_images: int, place: str) -> None:
        for text in texts:
            for token in self._tokens:
                if token in text:
                    raise UserError(
                        f"{place}: the prompt holds {quoted(token)}, which stands for an image: write {MARK}"
                    )
            for column, mark in OTHER_MEDIA.items():
                if num_images and mark in text:
                    raise UserError(f"{place}: the prompt holds {mark}: {column} are not supported: remove the row")
        num_marks = sum(text.count(MARK) for text in texts)
        if num_marks != num_images:
            raise UserError(
                f"{place}: the prompt has {num_marks} {MARK} for {num_images} images: correct the row, or set "
                "data.image_key to the column of the images"
            )

    def expanded(self, ids: Sequence[int], images: Sequence[ImageRef], place: str) -> tuple[int, ...]:
        """Return ``ids`` with the token that stands for an image repeated once for each of its merged patches.

        Raises:
            UserError: there are more or fewer of these tokens than images.
        """
        num_places = sum(id_ == self._image_id for id_ in ids)
        if num_places != len(images) or self._video_id in ids:
            raise UserError(
                f"{place}: {num_places} places for {len(images)} images in the tokens of the prompt: the chat template "
                f"drops or repeats them: correct it, or set data.chat_template"
            )
        if not images:
            return tuple(ids)
        left = iter(images)
        parts = [[id_] * (self.processing.num_tokens(next(left).grid) if id_ == self._image_id else 1) for id_ in ids]
        return tuple(id_ for part in parts for id_ in part)


def _parts(text: str) -> list[dict[str, str]]:
    """Return ``"a <image> b"`` as a text, an image and a text."""
    pieces = [piece for piece in re.split(f"({MARK})", text) if piece]
    return [{"type": "image"} if piece == MARK else {"type": "text", "text": piece} for piece in pieces]
