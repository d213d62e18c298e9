"""Images of data files: the content of a row's image column, and the encoded bytes behind a reference."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mopd.base.files.reading import read_bytes, shown_path
from mopd.base.types import ImageRef, PromptImage, UserError
from mopd.config.data import MAX_IMAGE_BYTES, DataConfig, DataFileConfig
from mopd.data.files import MISSING, ColumnReader, described, lookup, quoted
from mopd.data.image_files import MAX_IMAGES, digest_of, read_rgb


@dataclass(frozen=True, slots=True)
class StoredImage:
    """An image as its row has it: encoded bytes, or a path below the folder of the data file."""

    content: bytes | None
    path: str | None
    folder: Path
    """Folder of the data file."""
    place: str
    """Text that names file, row and number, for messages."""

    def read(self) -> bytes:
        """Return the encoded file.

        Raises:
            UserError: there is no such file, it is too large, or it lies outside the folder.
        """
        if self.content is not None:  # whoever opens it refuses one that is too large
            return self.content
        assert self.path is not None, "one of the two"
        where = f"{self.place}: path {quoted(self.path)}"
        if "\0" in self.path:
            raise UserError(f"{where} is not a possible file name: correct it")
        folder = os.path.realpath(self.folder)
        # Resolved before the comparison: neither ``..`` nor a link may lead out of the folder.
        real = os.path.realpath(os.path.join(folder, self.path))
        if os.path.commonpath([folder, real]) != folder:
            raise UserError(
                f"{where} leads out of the folder of the data file: put the image below {shown_path(folder)}"
            )
        if not os.path.isfile(real):
            raise UserError(f"{where}: no such file in {shown_path(folder)}: put it there or remove the row")
        return read_bytes(real, cure=f"it is an image of {self.place}: scale it down", max_bytes=MAX_IMAGE_BYTES)


def stored_images(value: Any, path: Path, place: str) -> list[StoredImage]:
    """Return the images in the image column of a row of the data file ``path``; none if it is absent or null.

    Raises:
        UserError: it is no list of ``{bytes: …}`` and ``{path: …}``, or too long a one.
    """
    if value is MISSING or value is None:
        return []
    items = [value] if isinstance(value, Mapping) else value
    if not isinstance(items, list):
        raise UserError(
            f"{place}: the images (data.image_key) are {described(value)}, not a list of "
            "{bytes: …} or {path: …}: correct the row, or set data.image_key"
        )
    if len(items) > MAX_IMAGES:
        raise UserError(f"{place}: {len(items)} images, at most {MAX_IMAGES} are taken: remove some")
    found = []
    for number, item in enumerate(items):
        content, name = (item.get("bytes"), item.get("path")) if isinstance(item, Mapping) else (None, None)
        if isinstance(content, bytes):
            name = None  # a name beside bytes only says where they came from
        elif content is not None or not isinstance(name, str) or not name:
            raise UserError(
                f"{place}: image {number} (data.image_key) is {described(item)}, not "
                "{bytes: …} with the encoded file or {path: …} with a name: correct the row"
            )
        found.append(StoredImage(content, name, path.parent, f"{place}: image {number}"))
    return found


def holds_images(value: Any) -> bool:
    """Return whether the content of a row's image column looks like images, well or badly written."""
    items = value if isinstance(value, list) else [value]
    return any(isinstance(item, Mapping) and ("bytes" in item or "path" in item) for item in items)


class ImageStore:
    """The images of some data files. Files are opened on first use. Thread-safe."""

    def __init__(self, entries: Sequence[str | DataFileConfig], cfg: DataConfig) -> None:
        """``entries`` are ``cfg.train`` or ``cfg.validation``, whichever the references were made from."""
        self._paths = [Path(file.path) for file in cfg.files(entries)]
        self._key = cfg.image_key
        self._readers: dict[int, ColumnReader] = {}
        self._lock = threading.Lock()
        self._sound: set[bytes] = set()
        """Digests of files that could be decoded."""

    def read(self, ref: ImageRef) -> bytes:
        """Return the encoded file.

        Raises:
            UserError: it cannot be read, or is another than the reference was made from; names file and row.
        """
        path, (_, _, below) = self._paths[ref.file], self._key.partition(".")
        value = self._reader(ref.file).value(ref.row)
        if below and isinstance(value, Mapping):
            value = lookup(value, below)
        images = stored_images(value, path, f"{shown_path(path)}: row {ref.row}")
        content = images[ref.number].read() if ref.number < len(images) else b""
        if digest_of(content) != ref.digest:
            raise UserError(f"{self.place(ref)} has changed since the prompts were loaded: restore it, or start again")
        return content

    def prompt_image(self, ref: ImageRef) -> PromptImage:
        """Return the image for an engine. Its ``load`` decodes the image first: a damaged one raises here, by file and
        row, and not somewhere in a server."""
        return PromptImage(digest=ref.digest, grid=ref.grid, load=partial(self._load, ref))

    def prepare(self, file: int) -> None:
        """Open a data file that has images. Raise ``UserError`` if single rows of it cannot be read."""
        self._reader(file)

    def place(self, ref: ImageRef) -> str:
        """Return file, row and number, for messages."""
        return f"{shown_path(self._paths[ref.file])}: row {ref.row}: image {ref.number}"

    def _load(self, ref: ImageRef) -> bytes:
        content = self.read(ref)
        if ref.digest not in self._sound:
            read_rgb(content, self.place(ref))
            self._sound.add(ref.digest)
        return content

    def _reader(self, file: int) -> ColumnReader:
        with self._lock:
            if file not in self._readers:
                self._readers[file] = ColumnReader(self._paths[file], self._key.partition(".")[0])
            return self._readers[file]
