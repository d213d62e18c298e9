"""Uploads of a run's Hugging Face folders to the Hub, beside the steps."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, is_offline_mode
from huggingface_hub.utils import disable_progress_bars

from mopd.base.files.reading import shown_path
from mopd.base.files.writing import write_json
from mopd.base.text import one_line
from mopd.base.types import UserError
from mopd.config.output import PushConfig

logger = logging.getLogger(__name__)
TOKEN = "HF_TOKEN"
MAX_REASON = 300
"""Characters of a failure's reason that are told."""
FINISH_S = 3600.0
"""Seconds that the end of a run waits for its last uploads."""


def check_token(where: str) -> None:
    """Check that the environment lets this machine upload; ``where`` heads the ``UserError``."""
    if not os.environ.get(TOKEN):
        raise UserError(f"{where}: {TOKEN} is not set here: export a token that may write, or remove the section")
    if is_offline_mode():
        raise UserError(f"{where}: HF_HUB_OFFLINE is set, so nothing can be uploaded: unset it, or remove the section")


def make_repository(cfg: PushConfig, where: str) -> None:
    """Make the repository, unless it is there.

    Raises:
        UserError: the Hub refuses or cannot be reached, or the repository is public and ``cfg`` wants a private one.
    """
    api = HfApi(token=os.environ[TOKEN])
    try:
        api.create_repo(cfg.repo, private=cfg.private, exist_ok=True)
        is_private = api.model_info(cfg.repo).private
    except Exception as error:  # the library's own, its HTTP client's, the system's: told whole
        raise UserError(
            f"{where}: {cfg.repo} cannot be made or written ({one_line(error):.{MAX_REASON}}): check the name, {TOKEN} "
            "and HF_ENDPOINT, or remove the section"
        ) from error
    if cfg.private and not is_private:
        raise UserError(
            f"{where}: {cfg.repo} is there and public: set push_to_hub.private: false to upload to it, or name another"
        )


@dataclass(frozen=True, slots=True)
class Upload:
    """A folder that is to be uploaded, and the message of its commit."""

    folder: Path
    message: str


class HubPusher:
    """Uploads folders in their order, each as a commit of the default branch, in a thread that no step waits for.

    A failed upload is told, counted, and tried again before the next folder's and at the end. ``record`` holds the
    commit of each folder, by its name, so that a resumed run uploads what an earlier life of it did not come to.
    """

    def __init__(self, cfg: PushConfig, record: Path, commits: Mapping[str, Any]) -> None:
        """Begin with the ``commits`` that ``record`` holds already."""
        self._cfg, self._record = cfg, record
        self._commits = dict(commits)
        self._waiting: list[Upload] = []
        self._num_pushed = self._num_failures = 0
        self._changed = threading.Condition()
        self._is_asked = False
        """Whether something has been asked for since the thread last began to upload."""
        self._is_uploading = False
        self._api = HfApi(token=os.environ[TOKEN])
        disable_progress_bars()  # they would be drawn over the run's own
        # Not joined at exit: a run that is asked to stop does not wait for an upload.
        threading.Thread(target=self._work, name="hub uploads", daemon=True).start()

    def has_pushed(self, folder: Path) -> bool:
        """Return whether the record has a commit of a folder of this name."""
        return folder.name in self._commits

    def push(self, folder: Path, message: str) -> None:
        """Have a folder uploaded, which nobody changes any more; returns at once."""
        with self._changed:
            self._waiting.append(Upload(folder, message))
            self._is_asked = True
            self._changed.notify_all()

    def finish(self) -> None:
        """Try what is left once more and wait for it; a line says what is not on the Hub then."""
        with self._changed:
            self._is_asked = self._is_asked or bool(self._waiting)
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._is_asked and not self._is_uploading, FINISH_S)
            left = [shown_path(one.folder) for one in self._waiting]
        if left:
            logger.warning(
                "%d folders are not on the Hub: hf upload %s FOLDER for each of %s", len(left), self._cfg.repo, left
            )

    def take_numbers(self) -> dict[str, float]:
        """Return the uploads and failures so far, and the folders that wait."""
        with self._changed:
            numbers = (self._num_pushed, self._num_failures, len(self._waiting))
        return dict(zip(("hub/pushed", "hub/failures", "hub/waiting"), map(float, numbers), strict=True))

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_asked)
                self._is_asked, self._is_uploading = False, True
            while self._waiting and self._upload(self._waiting[0]):
                pass
            with self._changed:
                self._is_uploading = False
                self._changed.notify_all()

    def _upload(self, upload: Upload) -> bool:
        """Upload one folder; return whether it is on the Hub."""
        try:
            made = self._api.upload_folder(
                repo_id=self._cfg.repo, folder_path=upload.folder, commit_message=upload.message
            )
            self._commits[upload.folder.name] = made.oid
            write_json(self._record, self._commits)
        except Exception as error:  # whatever it is, it must not end the run, nor this thread
            with self._changed:
                self._num_failures += 1
            logger.warning(
                "%s could not be uploaded to %s (%.*s): tried again before the next one",
                shown_path(upload.folder), self._cfg.repo, MAX_REASON, one_line(error),
            )  # fmt: skip
            return False
        with self._changed:
            self._waiting.pop(0)
            self._num_pushed += 1
        return True
