"""What the files of model folders tell without a model and without transformers: mistaken names, tokenizers that
differ, prompts for which a chat template leaves no room."""

from __future__ import annotations

import difflib
import json
import os
from pathlib import Path
from typing import Any, cast

from mopd.base.files.reading import read_bytes, read_text, shown_path
from mopd.base.types import UserError
from mopd.config.data import DataConfig
from mopd.data.templates.rendering import Renderer

TOKENIZER_FILE, CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
MAX_BYTES = 2**27
"""Bytes of a tokenizer's file; the largest vocabularies take 35 MB."""
ALIKE = 0.75
"""Likeness of two names from which one is taken for the other, mistyped."""


def meant_path(text: str) -> Path | None:
    """Return the path that is here and differs from ``text`` by a mistyped folder or last part; ``None`` if there is
    none."""
    found = Path("/") if os.path.isabs(text) else Path()
    for part in Path(text).parts[os.path.isabs(text) :]:
        if not os.path.lexists(found / part):
            names = os.listdir(found) if os.path.isdir(found) and os.access(found, os.R_OK) else []
            near = difflib.get_close_matches(part, names, n=1, cutoff=ALIKE)
            if not near:
                return None
            part = near[0]
        found /= part
    return found if found != Path(text) else None


def refuse_mistyped_name(text: str, where: str) -> None:
    """Refuse a name of the Hub that is nearly a path that is here.

    Raises:
        UserError: ``where``, both, and how the Hub's is told from it.
    """
    near = None if "@" in text else meant_path(text.partition(":")[0])
    if near is not None:
        raise UserError(
            f"{where}: {shown_path(text)!r} is not here and {shown_path(near)!r} is: correct it, or write "
            f"{shown_path(text)}@main if a name of the Hub is meant"
        )


def tokenizer_problem(student: Path, teacher: Path, vocab_size: int) -> str | None:
    """Return how the ids of two folders' tokenizers differ below ``vocab_size``, ``None`` if they do not.

    Raises:
        FileNotFoundError: one of them has no ``tokenizer.json``.
        UserError: it cannot be read.
    """
    ours, theirs = (_ids(folder / TOKENIZER_FILE) for folder in (student, teacher))
    own = {number: token for number, token in ours.items() if number < vocab_size}
    unlike = sorted(number for number, token in own.items() if theirs.get(number) != token)
    if not unlike:
        return None
    listed = ", ".join(f"{number} is {own[number]!r} / {theirs.get(number)!r}" for number in unlike[:3])
    return f"{len(unlike)} of {len(own)} ids mean different tokens (student / teacher): {listed}"


class _TokenizerFiles:
    """Everything that a chat template gets of a tokenizer, read from its files."""

    def __init__(self, folder: Path) -> None:
        self.name_or_path = str(folder)
        path, beside, cure = folder / CONFIG_FILE, folder / "chat_template.jinja", "copy the tokenizer's files there"
        try:
            config = dict(json.loads(read_bytes(path, cure=cure)))
            tokens = {name: value for name, value in config.items() if name.endswith("_token") and value is not None}
            self.special_tokens_map = {
                name: value["content"] if isinstance(value, dict) else value for name, value in tokens.items()
            }
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise UserError(f"{shown_path(path)}: is no configuration of a tokenizer: {cure}") from error
        self.chat_template = read_text(beside, cure=cure) if beside.is_file() else config.get("chat_template")

    def get_chat_template(self, template: str | None) -> Any:
        return self.chat_template if template is None else template


def template_tokens(folder: Path, data: DataConfig) -> int:
    """Return the most tokens that a training prompt has before its first word: the chat template's, and those of a
    system message; 0 where there is no template.

    Raises:
        FileNotFoundError: the folder has no ``tokenizer.json`` or ``tokenizer_config.json``.
        UserError: the template fails.
    """
    from tokenizers import Tokenizer  # a fraction of a second

    for name in (TOKENIZER_FILE, CONFIG_FILE):
        if not (folder / name).is_file():
            raise FileNotFoundError(folder / name)
    with Renderer(data, cast(Any, _TokenizerFiles(folder))) as renderer:
        if not renderer.has_template:
            return 0
        for system in {file.system_prompt for file in data.files(data.train)}:
            said = [] if system is None else [{"role": "system", "content": system}]
            renderer.put([*said, {"role": "user", "content": ""}], "data.max_prompt_length")
        texts = renderer.texts()
    try:
        tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f"{shown_path(folder / TOKENIZER_FILE)}: {error}: copy the tokenizer's files there") from error
    return max(len(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts)


def _ids(path: Path) -> dict[int, str]:
    """Return the token of every id."""
    cure = "copy a Hugging Face tokenizer.json there"
    if not path.is_file():
        raise FileNotFoundError(path)
    try:
        content: Any = json.loads(read_bytes(path, cure=cure, max_bytes=MAX_BYTES))
        vocabulary = content["model"]["vocab"]
        pairs = (
            vocabulary.items() if isinstance(vocabulary, dict) else ((row[0], i) for i, row in enumerate(vocabulary))
        )
        found = {int(number): str(token) for token, number in pairs}
        return found | {int(row["id"]): str(row["content"]) for row in content.get("added_tokens") or ()}
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise UserError(f"{shown_path(path)}: is no tokenizer of the library tokenizers: {cure}") from error
