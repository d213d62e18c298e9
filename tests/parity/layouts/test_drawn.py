"""Packed sequences, padded ones and one rank agree for models, samples and layouts that nobody chose (``make parity``).

Invariant: loss, gradient norm and metrics of a step are those of one rank that computes one padded sequence at a
time, within 1e-5 (fp32). ``MOPD_PARITY_CASES`` are drawn (without it none), from ``MOPD_PARITY_SEED`` on, beside those
that have found a fault; a failure tells the number that draws it again. Responses have one token at least; there may be
fewer samples than ranks that share their tokens or layers. Not exercised: CUDA, TransformerEngine.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

from tests.parity.layouts.drawn import draw, world_size
from tests.parity.layouts.steps import assert_same_step
from tests.parity.student.harness import run_ranks

Results = dict[str, Any]
NUM_CASES = int(os.environ.get("MOPD_PARITY_CASES", "0"))
FIRST = int(os.environ.get("MOPD_PARITY_SEED", random.randrange(2**31)))
FOUND = (2,)
"""Values of latent attention that are wider than its keys."""
NUMBERS = sorted({*FOUND, *range(FIRST, FIRST + NUM_CASES)}) if NUM_CASES else []
FORMS = {"packed": True, "padded": False}
ONE: Results = {"tp": 1, "cp": 1, "pp": 1, "dp": 1, "sp": False}

pytestmark = [
    pytest.mark.multirank,
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not NUM_CASES, reason="takes long: make parity"),
]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[str, Results, dict[str, Results]]]:
    """Number -> its description, what one rank says of one sequence at a time, what each layout and form says."""
    folder = tmp_path_factory.mktemp("drawn")
    all_drawn = {number: draw(number, folder / str(number)) for number in NUMBERS}
    by_ranks: dict[int, Results] = {1: {}, 2: {}, 4: {}}
    for number, one in all_drawn.items():
        by_ranks[1][f"{number}/one"] = {**ONE, **one.case, "micro_batch_size": 1, "packing": False, "steps": 1}
        for layout in ({**ONE}, *one.layouts):
            for form, packing in FORMS.items():
                name = f"{number}/{form} {layout}"
                by_ranks[world_size(layout)][name] = {**layout, **one.case, "packing": packing, "steps": 1}
    found: Results = {}
    for ranks, cases in by_ranks.items():
        found |= run_ranks(ranks, {"model": "unused", "cases": cases}, folder / f"{ranks}_ranks", timeout_s=3000)
    return {
        number: (
            one.describe(),
            found.pop(f"{number}/one"),
            {name: result for name, result in found.items() if name.startswith(f"{number}/")},
        )
        for number, one in all_drawn.items()
    }


@pytest.mark.parametrize("number", NUMBERS)
def test_every_layout_and_form_agrees(drawn: dict[int, Any], number: int) -> None:
    described, expected, found = drawn[number]
    (wanted,) = expected["steps"]
    for name, result in found.items():
        (step,) = result["steps"]
        assert_same_step(step, wanted, f"at {name}; {described}")
