"""The models of a run that goes on are those that it began with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mopd.conversion.hf.manifest import make_manifest
from mopd.run.manifests import check_unchanged, write_manifests
from mopd.types import UserError
from tests.fixtures.tiny_models import make_hf_model


def test_another_model_or_another_set_of_them_is_refused(tmp_path: Path) -> None:
    one = make_manifest(make_hf_model(tmp_path / "model"), cache_file=None)
    models = {"student": one, "teachers.math": one}
    path = tmp_path / "manifest.json"
    write_manifests(path, models, {}, {})
    check_unchanged(path, models)
    for current, names in (({"student": one}, "teachers.math"), ({**models, "teachers.code": one}, "teachers.code")):
        with pytest.raises(UserError, match=f"manifest.json: {names} stand only in one of this file and the recipe"):
            check_unchanged(path, current)
    other = replace(one, weights_sha256="0" * 64)
    with pytest.raises(UserError, match=r"^teachers\.math\.model '.*' is not what the run began with"):
        check_unchanged(path, {"student": one, "teachers.math": other})
