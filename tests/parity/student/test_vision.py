"""A student that sees images: transformers, layouts, what is frozen, checkpoints.

Invariant: log-probs (1e-4, fp32), loss and gradient norm (1e-5 relative) equal those of transformers' own model for
prompts without images, with one, with two of unequal sizes, adjacent ones and the same one twice, for each family and
each ``student.vision.freeze``; loss and gradient norm are the same at TP2, TP2+SP, PP2 (with even and uneven stages),
DP2, TP2xPP2 and PP2xDP2, micro-batch sizes, packed or right-padded, and with recomputation; copies of a trained tower
stay equal bit by bit. A text batch gives bit by bit what the text family gives with the same weights. Not exercised:
CUDA, TransformerEngine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.fixtures.vision import VISION_FAMILIES
from tests.parity.student.pictures import SIZES, Seen, make_seen_samples
from tests.parity.student.vision_cases import FREEZES

pytestmark = [pytest.mark.multirank, pytest.mark.slow]

Results = dict[str, Any]


@pytest.fixture(scope="module", params=VISION_FAMILIES)
def seen(request: pytest.FixtureRequest, vision_folder: Path) -> tuple[str, Seen, Path]:
    """A family, its model in transformers, and the data file."""
    data = vision_folder / "data" / "rows.jsonl"
    return request.param, Seen(vision_folder / request.param, data), data


def _loss(step: Results) -> float:
    return sum(value for name, value in step.items() if name.startswith("weighted_loss/"))


def test_logprobs_equal_transformers(one_rank: Results, vision_folder: Path, seen: tuple[str, Seen, Path]) -> None:
    family, model, data = seen
    metas, fields = make_seen_samples(16, vision_folder / family, data, top_k=8, seed=0, first_id=0)
    result = one_rank[f"vision/{family}/one/none"]
    rows = [torch.tensor(row) for row in result["logprobs"] + result["one_logprob"]]
    counts = []
    for row, i in zip(rows, (3, 1, 2, 5), strict=True):
        tokens, start = fields["tokens"][i], metas[i].prompt_length
        with torch.no_grad():
            expected = model.log_softmax(tokens, fields["images"][i])
        wanted = torch.stack([expected[t - 1, tokens[t]] for t in range(start, len(tokens))])
        torch.testing.assert_close(row, wanted, atol=1e-4, rtol=0)
        counts.append(len(SIZES[i % len(SIZES)]))
    assert counts == [2, 1, 2, 0]


def test_loss_and_gradient_equal_transformers(
    one_rank: Results, vision_folder: Path, seen: tuple[str, Seen, Path]
) -> None:
    family, model, data = seen
    samples = make_seen_samples(16, vision_folder / family, data, top_k=8, seed=1, first_id=100)
    loss, norms = model.step(samples)
    assert norms["none"] > 1.01 * norms["tower"] > 1.01**2 * norms["tower_and_merger"]
    for freeze in FREEZES:
        step = one_rank[f"vision/{family}/one/{freeze}"]["steps"][0]
        assert _loss(step) == pytest.approx(loss, rel=1e-5)
        assert step["grad_norm"] == pytest.approx(norms[freeze], rel=1e-5)


@pytest.mark.parametrize(
    ("ranks", "case", "freeze"),
    [
        ("two_ranks", "qwen2_5_vl/tp2", "none"),
        ("two_ranks", "qwen2_5_vl/dp2", "none"),
        ("two_ranks", "qwen2_5_vl/pp2", "tower"),
        ("two_ranks", "qwen3_vl/tp2_sp", "none"),
        ("two_ranks", "qwen3_vl/tp2_sp/full", "none"),
        ("two_ranks", "qwen3_vl/tp2_sp/padded", "none"),
        ("two_ranks", "qwen2_5_vl/pp2/padded", "tower"),
        ("one_rank", "qwen2_5_vl/one/padded", "none"),
        ("one_rank", "qwen3_vl/one/padded", "none"),
        ("two_ranks", "qwen3_vl/cp2/padded", "none"),
        ("two_ranks", "qwen2_5_vl/cp2", "tower"),
        ("two_ranks", "qwen3_vl/pp2", "none"),
        ("four_ranks", "qwen3_vl/tp2_pp2", "none"),
        ("four_ranks", "qwen2_5_vl/pp2_dp2", "none"),
    ],
)
def test_layouts_change_nothing(
    request: pytest.FixtureRequest, one_rank: Results, ranks: str, case: str, freeze: str
) -> None:
    result: Results = request.getfixturevalue(ranks)[f"vision/{case}"]
    family = case.split("/")[0]
    step, expected = (dict(one["steps"][0]) for one in (result, one_rank[f"vision/{family}/one/{freeze}"]))
    for name in [name for name in expected if name.startswith("rate/")]:
        assert 0 < step.pop(name) < 1
        del expected[name]
    assert (_loss(step), step["grad_norm"]) == pytest.approx((_loss(expected), expected["grad_norm"]), rel=1e-5)
    # ``k1`` sums differences of either sign, of which little is left.
    assert step == pytest.approx(expected, rel=1e-5, abs=5e-5)
    assert len(set(result["towers"])) == 1
    assert result["is_packed"] == [not case.endswith("/padded")]


def test_what_is_frozen_has_no_buffer(one_rank: Results, vision_folder: Path) -> None:
    for family in VISION_FAMILIES:
        weights = load_file(vision_folder / family / "model.safetensors")
        of_tower = {name: tensor.numel() for name, tensor in weights.items() if "visual." in name}
        merger = sum(size for name, size in of_tower.items() if "merger" in name)
        none, tower, both = (one_rank[f"vision/{family}/one/{freeze}"]["num_trained"] for freeze in FREEZES)
        assert none - both == sum(of_tower.values())
        assert tower - both == merger


def test_text_is_the_text_familys_bit_for_bit(two_ranks: Results) -> None:
    """Two steps under tensor and sequence parallelism."""
    vision, text = two_ranks["vision/twin/vision"], two_ranks["vision/twin/text"]
    assert vision["text_hash"] == text["text_hash"] != ""
    for step, expected in zip(vision["steps"], text["steps"], strict=True):
        assert {name: value for name, value in step.items() if not name.startswith("rate/")} == expected
        assert step["rate/vision_tower_share"] == 0


def test_a_frozen_tower_is_exported_as_it_was(two_ranks: Results, vision_folder: Path) -> None:
    before, after = (load_file(vision_folder / name / "model.safetensors") for name in ("qwen2_5_vl", "exported"))
    assert before.keys() == after.keys()
    kept = {name for name, tensor in before.items() if torch.equal(tensor, after[name])}
    assert kept == {name for name in before if name.startswith("visual.") and "merger" not in name}


def test_checkpoints_hold_the_tower(two_ranks: Results) -> None:
    """Saved under tensor and sequence parallelism, loaded by a pipeline of uneven stages."""
    assert two_ranks["vision/qwen3_vl/pp2/loaded"]["loaded_hash"] == two_ranks["vision/qwen3_vl/tp2_sp"]["saved_hash"]


def test_a_resumed_step_is_the_same_bit_for_bit(two_ranks: Results) -> None:
    """The optimizer's states of a trained tower included."""
    resumed, straight = (two_ranks[f"vision/qwen3_vl/tp2_sp{name}"] for name in ("/resumed", ""))
    assert resumed["hash"] == straight["hash"] != straight["saved_hash"]
