"""The stand-in of TransformerEngine offers and takes what the real package does, by a record of its versions; what
Megatron and mopd call is held against that record wherever the stand-in is called (``tests/parity/student``)."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
from packaging.specifiers import SpecifierSet

from mopd.student.model.config import TRANSFORMER_ENGINE
from tests.fixtures import engine_stand_in as stand_in
from tests.fixtures.transformer_engine_api import CALLED, as_recorded, imported, record


@pytest.fixture
def modules() -> Iterator[dict[str, ModuleType]]:
    """The stand-in's, of this process for the test alone."""
    before = {name for name in sys.modules if name.split(".")[0] == "transformer_engine"}
    stand_in.install()
    found = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "transformer_engine"}
    yield found
    for name in found.keys() - before:
        del sys.modules[name]


def test_the_record_is_of_what_is_imported_and_of_the_versions_that_are_taken() -> None:
    assert {(module, name) for module, names in record()["names"].items() for name in names} == set(imported())
    assert record()["calls"].keys() == CALLED.keys()
    for versions in record()["calls"].values():
        assert {version.rpartition(".")[0] for version in versions} == {"2.9", "2.10", "2.11", "2.12"}
        assert all(version in SpecifierSet(TRANSFORMER_ENGINE) for version in versions)


def test_the_stand_in_offers_no_name_that_the_package_lacks(modules: dict[str, ModuleType]) -> None:
    """Megatron takes another way where one is missing, and a GPU would go a way that nothing here has gone."""
    offered = [
        (module, name)
        for module, names in record()["names"].items()
        for name, versions in names.items()
        if stand_in.VERSION not in versions and hasattr(modules.get(module), name)
    ]
    assert offered == []
    assert any(hasattr(modules.get(module), name) for module, names in record()["names"].items() for name in names)


def test_the_parameters_of_attention_are_those_of_every_version() -> None:
    own = {field.name for field in dataclasses.fields(stand_in.AttentionParams)}
    for fields in record()["calls"]["AttentionParams"].values():
        assert own <= {field.rstrip("=") for field in fields}


def test_an_argument_of_one_version_alone_is_refused() -> None:
    @as_recorded("DotProductAttention.forward")
    def forward(*args: object, **options: object) -> str:
        return "taken"

    assert forward(None, 1, 2, 3, None, qkv_format="thd") == "taken"
    with pytest.raises(
        AssertionError, match=r"DotProductAttention\.forward of TransformerEngine 2\.9\.0: .*num_splits"
    ):
        forward(None, 1, 2, 3, num_splits=1)
