"""Checks that need no model and no torch. They report everything that is wrong with a recipe and its files.

Each check names the parts of the recipe that it reads. One that reads what is refused already is left out, as it could
only report the same mistake again.
"""

from __future__ import annotations

import difflib
import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from mopd.base.files.reading import read_bytes, read_text, shown_path
from mopd.base.hardware import Hardware
from mopd.base.types import UserError
from mopd.config.data import DataConfig, DataFileConfig
from mopd.config.load import Draft
from mopd.config.machine.places import engine_groups, place_on_machine
from mopd.config.payloads import always_ids_of, token_ids
from mopd.config.reading.tree import dotted
from mopd.conversion.models.adapter_updates import check_updates
from mopd.conversion.models.dims import check_routes
from mopd.conversion.models.reading import read_dims
from mopd.data.columns import RowCheck, survey
from mopd.data.files import quoted
from mopd.data.hub.names import hub_data, hub_model
from mopd.data.image_processing import check_image_keys, read_image_processing, sees_images
from mopd.data.prompts import (
    check_domains_have_teachers,
    check_texts_have_domains,
    require_vision_student,
    require_vision_teachers,
)
from mopd.data.templates.rendering import Renderer
from mopd.data.views import Views
from mopd.launch.checks.domains import GroundTruths, check_domains
from mopd.launch.checks.inputs import (
    Check,
    check_adapter,
    check_cuda,
    check_data_file,
    check_machine,
    check_model_folder,
    check_samples,
    file_checks,
)
from mopd.launch.preparing import check_student_layout, settled
from mopd.planning.plan import check_models
from mopd.rewards.domains import build_rewards

MAX_ROWS = 10_000
"""Rows read of each data file: a wrong column shows in the first, another domain among the first."""
TOKENIZER_FILE, CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
MAX_TOKENIZER_BYTES = 2**27
"""Bytes of a tokenizer's file; the largest vocabularies take 35 MB."""
ALIKE = 0.75
"""Likeness of two names from which one is taken for the other, mistyped."""
Path_ = tuple[str, ...]


def _check_folder(model: str, where: str) -> None:
    """Check a model's folder; a mistyped one is told the name that is here."""
    _refuse_mistyped_name(model, where)
    check_model_folder(model, where)


class StaticChecks:
    """Every check of a draft recipe that needs no model and no torch, each with an outcome of its own."""

    def __init__(self, draft: Draft, hardware: Hardware) -> None:
        self._draft = draft
        self._loaded = draft.loaded
        self._recipe = draft.loaded.recipe
        self._hardware = hardware
        self._no_folder: set[Path_] = set()
        """Keys of the models whose folder is not here, whatever the reason."""
        self._domains: dict[str, int] = {}
        """Rows by domain: those of the training data where it has some, else of the validation data."""
        self._of_split: dict[str, Counter[str]] = {"train": Counter(), "validation": Counter()}
        """Rows of each by domain."""
        self._with_images: Counter[str] = Counter()
        """Rows with images by domain, among those that were read."""
        self._student_sees: bool | None = None
        """Whether the student sees images; ``None`` where its config is not known."""
        self._are_all_read = True

    def run(self) -> Iterator[Check]:
        """Yield each outcome, in the order of what relies on what."""
        for problem in self._draft.problems:
            yield Check("recipe", "failed", problem)
        if not self._draft.problems:
            yield Check("recipe", "ok", f"{len(self._loaded.origins)} values")
        yield from self._models()
        yield from self._adapters()
        for title, check in file_checks(self._loaded, lambda *key: self._is_whole(key)):
            yield from self._try(title, [], check)
        for i, folder in enumerate(self._recipe.data.scored if self._is_whole(("data",)) else ()):
            yield from self._try(f"data.scored[{i}]", [], partial(check_samples, self._loaded, folder))
        if ("student", "model") not in self._no_folder:
            yield from self._try("layout of the student", [("student",)], self._layout)
            lengths = [("student",), ("data", "max_prompt_length"), ("rollout", "max_response_length")]
            yield from self._try("lengths", lengths, self._lengths) if self._is_whole(("teachers",)) else ()
            yield from self._image_keys()
            yield from self._try("ids of a position", [("student",), ("loss",), ("teachers",)], self._ids_asked)
            yield from self._tokenizers()
            named = {key: tokens for key, tokens in self._tokens_named() if tokens}
            if named and self._is_whole(("student",)):
                yield from self._try("tokens of the recipe", [], partial(self._tokens, named))
            if self._is_whole(("data",)):
                yield from self._template()
        if not self._draft.broken:
            gpus = list(self._try("GPUs", [], self._gpus))
            yield from gpus
            if gpus[0].status == "ok":
                yield from self._try(
                    "weights to the rollout", [], lambda: settled(self._loaded, self._hardware).weights_way
                )
        for split in ("train", "validation"):
            yield from self._rows(split)
        domains = [("teachers", name, key) for name in self._recipe.teachers or {} for key in ("domains", "default")]
        if not self._domains:
            if self._is_whole(("data",)):
                yield Check("teachers of the domains", "skipped", "no row of the training data has been read here")
            return
        routes = list(self._try("teachers of the domains", [("data",), *domains], self._routes))
        yield from routes
        if self._are_all_read and not self._draft.broken and all(check.status == "ok" for check in routes):
            yield from self._try("keys of the domains", [], self._domain_keys)
        if self._are_all_read:
            texts = partial(check_texts_have_domains, self._recipe.data, self._domains)
            yield from self._try("texts of the domains", [("data",)], texts)
        if self._with_images and not self._no_folder and self._student_sees is not None:
            yield from self._try("images", [("data",), *self._model_keys[1:], *domains], self._images)
        if self._is_whole(("validation",)) and self._is_whole(("loss",)) and self._recipe.needs_rewards:
            yield from self._try("rewards of the domains", [("data",), ("rewards",)], self._rewards)

    def _models(self) -> Iterator[Check]:
        for key in filter(self._is_whole, self._model_keys):
            model, name = self._model(key), dotted(key)
            if hub_model(model) is not None:
                self._no_folder.add(key)
                yield from self._hub(name, model, self._loaded.where(*key))
                continue
            for check in self._try(name, [], partial(_check_folder, model, self._loaded.where(*key))):
                if check.status == "failed":
                    self._no_folder.add(key)
                yield check

    def _hub(self, title: str, text: str, where: str) -> Iterator[Check]:
        """Yield that a name of the Hub is left for later, or that it is nearly a path that is here."""
        (found,) = self._try(title, [], lambda: _refuse_mistyped_name(text, where))
        later = f"{text} is a name of the Hub, which is fetched when a run needs it"
        yield Check(title, "skipped", later) if found.status == "ok" else found

    def _folders(self) -> dict[str, Path]:
        """Return the folders of the models that are here, by ``student`` and ``teachers.NAME``."""
        return {dotted(key[:-1]): Path(self._model(key)) for key in self._model_keys if key not in self._no_folder}

    @property
    def _model_keys(self) -> list[Path_]:
        """Keys of the models, the student's first."""
        return [("student", "model"), *(("teachers", name, "model") for name in self._recipe.teachers or {})]

    def _adapters(self) -> Iterator[Check]:
        """Hold teachers' adapters against the models that are here."""
        for name, teacher in (self._recipe.teachers or {}).items():
            key: Path_ = ("teachers", name, "adapter")
            if self._is_whole(key[:-1]) and teacher.adapter is not None and (*key[:-1], "model") not in self._no_folder:
                yield from self._try(dotted(key), [], partial(check_adapter, self._loaded, name))

    def _model(self, key: Path_) -> str:
        return self._recipe.student.model if len(key) == 2 else self._recipe.teachers[key[1]].model

    def _lengths(self) -> str:
        """Check that the longest sample has positions in every model that is here, and room in a micro-batch."""
        folders = self._folders()
        dims = {key: read_dims(folder, takes_quantised=key != "student") for key, folder in folders.items()}
        check_models(self._loaded, dims, with_layout=False)
        recipe = self._recipe
        longest = recipe.data.max_prompt_length + recipe.rollout.max_response_length
        return f"{longest} tokens in {len(folders)} of {1 + len(recipe.teachers)} models"

    def _ids_asked(self) -> str:
        """Check that the student's vocabulary has as many ids as the loss asks a teacher for."""
        top_k, num_ids = self._recipe.loss.top_k, read_dims(Path(self._recipe.student.model)).vocab_size
        if self._recipe.support_width and top_k > num_ids:
            raise UserError(
                f"{self._loaded.where('loss', 'top_k')}: {top_k} is above the {num_ids} ids of student.model: lower it"
            )
        return f"{top_k} of {num_ids}" if self._recipe.support_width else "none"

    def _template(self) -> Iterator[Check]:
        """Yield whether the chat template leaves room for a prompt."""
        limit, title = self._recipe.data.max_prompt_length, "chat template"
        try:
            taken = _template_tokens(self._folders()["student"], self._recipe.data)
        except FileNotFoundError as error:
            yield Check(title, "skipped", f"{error}: no such file, so the tokenizer itself is asked")
        except UserError as error:
            yield Check(title, "failed", str(error))
        else:
            where = self._loaded.where("data", "max_prompt_length")
            failed = f"{where}: {limit} tokens, and the chat template takes {taken} without a prompt: raise it"
            found = f"{taken} of {limit} tokens are the chat template's"
            yield Check(title, "failed", failed) if taken >= limit else Check(title, "ok", found)

    def _tokenizers(self) -> Iterator[Check]:
        """Hold the tokenizers of teachers whose folder is here against the student's."""
        folders = self._folders() if self._is_whole(("teachers",)) else {}
        student = folders.pop("student", None)
        if student is None or not self._is_whole(("student",)):
            return
        for key, folder in folders.items():
            title = f"tokenizer of {key.removeprefix('teachers.')}"
            try:
                problem = _tokenizer_problem(student, folder, read_dims(student).vocab_size)
            except FileNotFoundError as error:
                yield Check(title, "skipped", f"{error}: no such file, so the models themselves are compared")
            except UserError as error:
                yield Check(title, "failed", str(error))
            else:
                where = f"{self._loaded.where(*key.split('.', 1), 'model')}: {folder} and the student"
                if key.removeprefix("teachers.") in self._recipe.own_tokenizers:
                    failed = f"{where} share a tokenizer, but {key}.tokenizer is own: remove that key"
                    yield Check(title, "ok", "its own") if problem else Check(title, "failed", failed)
                    continue
                failed = f"{where} do not share a tokenizer: {problem}; choose a teacher with the student's tokenizer"
                failed += f", or set {key}.tokenizer: own (docs/teachers.md)"
                yield Check(title, "failed", failed) if problem else Check(title, "ok", "same ids, same tokens")

    def _tokens_named(self) -> Iterator[tuple[str, Sequence[int | str]]]:
        """Yield the keys that name tokens of the student, each with what it names."""
        if self._is_whole(("loss",)):
            yield "loss.always_ids", always_ids_of(self._recipe.loss)
        if self._is_whole(("rollout",)):
            yield "rollout.stop_token_ids", self._recipe.rollout.stop_token_ids

    def _tokens(self, named: Mapping[str, Sequence[int | str]]) -> str:
        """Check that the student's tokenizer has the tokens."""
        path = Path(self._recipe.student.model) / TOKENIZER_FILE
        if not path.is_file():
            return f"not looked up: there is no {TOKENIZER_FILE}"
        vocabulary = {token: number for number, token in _ids(path).items()}
        return f"{sum(len(token_ids(tokens, vocabulary, key)) for key, tokens in named.items())} there"

    def _layout(self) -> str:
        check_machine(self._loaded)
        dims = check_student_layout(self._recipe.student)
        check_updates(self._recipe, dims)
        check_routes(dims, replay_routes=self._recipe.rollout.replay_routes)
        self._student_sees = dims.vision is not None
        return f"{self._recipe.student.parallel.world_size} ranks for {dims.num_layers} layers of {dims.family}"

    def _image_keys(self) -> Iterator[Check]:
        """Yield whether keys that go with images, or without, fit the student, where the recipe has such keys."""
        if self._student_sees is None or not (self._is_whole(("data",)) and self._is_whole(("metrics",))):
            return
        data, sees = self._recipe.data, self._student_sees
        is_stored = self._recipe.metrics.keep_samples or bool(data.scored)
        if data.max_pixels is not None or is_stored:
            check = partial(check_image_keys, sees=sees, max_pixels=data.max_pixels, is_stored=is_stored)
            yield from self._try("keys of images", [], check)

    def _gpus(self) -> str:
        check_cuda(self._hardware)
        loaded = settled(self._loaded, self._hardware)
        num_ranks = loaded.recipe.student.parallel.world_size
        place_on_machine(engine_groups(loaded.recipe), num_ranks, self._hardware.num_gpus).require(loaded.where)
        return f"{self._hardware.num_gpus} here, {num_ranks} trainer ranks"

    def _rows(self, split: str) -> Iterator[Check]:
        if not self._is_whole(("data",)):
            return
        entries = getattr(self._recipe.data, split)
        for i, file in enumerate(self._recipe.data.files(entries)):
            title = f"data.{split}[{i}]"
            if hub_data(file.path) is not None:
                self._are_all_read = False
                yield from self._hub(title, file.path, self._loaded.where("data", split))
                continue
            yield from self._try(title, [], partial(self._read, file, split))

    def _read(self, file: DataFileConfig, split: str) -> str:
        try:
            check_data_file(self._loaded, file.path, split)
            sees = bool(self._student_sees)
            key = self._recipe.data.image_key
            found = survey(file, MAX_ROWS, image_key=key, student_sees=sees, checks=[*self._row_checks(split)])
        except UserError:
            self._are_all_read = False
            raise
        self._are_all_read &= found.is_whole
        for domain, count in found.counts.items():
            before = self._domains.get(domain, 0)
            self._domains[domain] = before + count if split == "train" else before or count
        self._of_split[split] += found.counts
        self._with_images += found.with_images
        shown = ", ".join(f"{quoted(domain)} {count}" for domain, count in sorted(found.counts.items())[:10])
        seen = f", {found.with_images.total()} of them with images" if found.with_images else ""
        return f"rows by domain: {shown}{seen}" + ("" if found.is_whole else f" (of the first {MAX_ROWS})")

    def _row_checks(self, split: str) -> Iterator[RowCheck]:
        """Yield what each row of a split is held against."""
        if self._is_whole(("teachers",)):
            yield Views(self._recipe.views, self._recipe.assignment)
        if not self._draft.broken:
            recipe = self._recipe
            is_judged = recipe.needs_task_advantage or recipe.gates if split == "train" else recipe.validation
            try:
                rewards = build_rewards(recipe.rewards) if is_judged else None
            except UserError:  # `_rewards` and the checks of files tell it, once
                rewards = None
            if rewards is not None:
                yield GroundTruths(rewards)

    def _images(self) -> str:
        """Check that the student and the teachers of domains with images see them."""
        if not self._student_sees:
            require_vision_student(self._with_images)
        teachers = self._recipe.teachers.items()
        sighted = [name for name, teacher in teachers if sees_images(teacher.model)]
        taught = {domain: count for domain, count in self._with_images.items() if domain not in self._watched}
        require_vision_teachers(taught, self._recipe.assignment, sighted)
        read_image_processing(self._recipe.student.model, self._recipe.data.max_pixels)
        return f"student and {len(sighted)} of {len(teachers)} teachers see them"

    def _routes(self) -> str:
        assignment = self._recipe.assignment
        taught = {domain: count for domain, count in self._domains.items() if domain not in self._watched}
        warnings = check_domains_have_teachers(taught, assignment.by_domain, default_teacher=assignment.default)
        if warnings and self._are_all_read:
            return "; ".join(warnings)
        return f"{len(self._domains)} domains"

    @property
    def _watched(self) -> Sequence[str]:
        """Domains without a teacher, as far as they are known."""
        return self._recipe.watched_domains if self._is_whole(("validation",)) else ()

    def _domain_keys(self) -> None:
        validation = None if self._recipe.validation is None else self._of_split["validation"]
        check_domains(self._recipe, self._of_split["train"], validation)

    def _rewards(self) -> str:
        rewards = build_rewards(self._recipe.rewards)
        try:
            for domain in self._domains:
                rewards.of(domain)
        except UserError as error:
            raise UserError(f"{self._loaded.path}: {error}") from error
        return f"{len(self._domains)} domains"

    def _try(self, title: str, needs: Sequence[Path_], check: Callable[[], str | None]) -> Iterator[Check]:
        """Run ``check``, which returns what it found, if all parts of the recipe that it reads are whole."""
        if not all(map(self._is_whole, needs)):
            return
        try:
            yield Check(title, "ok", check() or "there")
        except UserError as error:
            yield Check(title, "failed", str(error))

    def _is_whole(self, key: Path_) -> bool:
        """Return whether neither the key nor what is above or below it was refused."""
        return not any(key[: len(other)] == other[: len(key)] for other in self._draft.broken)


def _meant_path(text: str) -> Path | None:
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


def _refuse_mistyped_name(text: str, where: str) -> None:
    """Refuse a name of the Hub that is nearly a path that is here.

    Raises:
        UserError: ``where``, both, and how the Hub's is told from it.
    """
    near = None if "@" in text else _meant_path(text.partition(":")[0])
    if near is not None:
        raise UserError(
            f"{where}: {shown_path(text)!r} is not here and {shown_path(near)!r} is: correct it, or write "
            f"{shown_path(text)}@main if a name of the Hub is meant"
        )


def _tokenizer_problem(student: Path, teacher: Path, vocab_size: int) -> str | None:
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


def _template_tokens(folder: Path, data: DataConfig) -> int:
    """Return the most tokens that a training prompt has beside its words: the chat template's, and those of a system
    message and of a suffix; 0 where there is no template.

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
        for file in data.files(data.train):
            for system, suffix in itertools.product(_texts(file.system_prompt), _texts(file.prompt_suffix)):
                said = [] if system is None else [{"role": "system", "content": system}]
                renderer.put([*said, {"role": "user", "content": suffix or ""}], "data.max_prompt_length")
        texts = renderer.texts()
    try:
        tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f"{shown_path(folder / TOKENIZER_FILE)}: {error}: copy the tokenizer's files there") from error
    return max(len(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts)


def _texts(texts: str | Mapping[str, str] | None) -> list[str | None]:
    """Return every text of a ``system_prompt`` or ``prompt_suffix``."""
    return [*texts.values()] if isinstance(texts, Mapping) else [texts]


def _ids(path: Path) -> dict[int, str]:
    """Return the token of every id."""
    cure = "copy a Hugging Face tokenizer.json there"
    if not path.is_file():
        raise FileNotFoundError(path)
    try:
        content: Any = json.loads(read_bytes(path, cure=cure, max_bytes=MAX_TOKENIZER_BYTES))
        vocabulary = content["model"]["vocab"]
        pairs = (
            vocabulary.items() if isinstance(vocabulary, dict) else ((row[0], i) for i, row in enumerate(vocabulary))
        )
        found = {int(number): str(token) for token, number in pairs}
        return found | {int(row["id"]): str(row["content"]) for row in content.get("added_tokens") or ()}
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise UserError(f"{shown_path(path)}: is no tokenizer of the library tokenizers: {cure}") from error
