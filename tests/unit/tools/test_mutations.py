"""Mutation tests: which tests are near a file, what a mutation is, and that listed survivors are not of yesterday."""

from __future__ import annotations

import pytest

from tests.mutations.run import ROOT, NearTests, mutations_of, read_of, read_survivors


def test_the_nearest_tests_are_those_that_name_the_file() -> None:
    near = NearTests()
    assert near.of("mopd/orchestrator/ledger.py")[0] == "tests/unit/orchestrator/test_ledger.py"
    assert near.of("mopd/data/packing.py")[0] == "tests/unit/data/test_packing.py"
    assert near.of("mopd/serving/images.py")[0] == "tests/unit/serving/test_images.py"  # imports it through the server


def test_a_mutation_changes_what_runs_and_is_the_same_each_time() -> None:
    file = "mopd/data/packing.py"
    lines = (ROOT / file).read_text().splitlines()
    number = next(i for i, line in enumerate(lines, 1) if "2 * size > rules.max_tokens" in line)
    (mutation,) = mutations_of(7, file, number)
    assert [mutation] == list(mutations_of(7, file, number))
    assert (mutation.line, mutation.before) == (number, lines[number - 1].strip()) and mutation.after != mutation.before
    docstring = next(i for i, line in enumerate(lines, 1) if line.startswith('"""'))
    assert not list(mutations_of(7, file, docstring))


@pytest.mark.parametrize(("changed", "is_read"), [("x: int | str = 1", False), ("x: int = 2", True)])
def test_annotations_are_not_read(changed: str, is_read: bool) -> None:
    assert (read_of(changed) != read_of("x: int = 1")) is is_read


def test_survivors_stand_in_their_files() -> None:
    for file, before, after in read_survivors():
        assert before != after
        text = " ".join(line.strip() for line in (ROOT / file).read_text().splitlines())
        assert before in text, f"survivors.yaml: {before!r} is no more in {file}: remove it"
