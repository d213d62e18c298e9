"""What the starts of ranks in this folder do with students that see images: cases by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoModelForImageTextToText, Qwen2Config, Qwen2ForCausalLM

from tests.fixtures.vision import VISION_FAMILIES, make_vision_model
from tests.parity.student.pictures import write_pictures

Cases = dict[str, dict[str, Any]]
FREEZES = ("none", "tower", "tower_and_merger")
NUM_LAYERS = 4


def make_vision_inputs(folder: Path) -> Path:
    """Below ``folder`` a model of each family, the text model inside Qwen2.5-VL's (``text``), and the data file."""
    for family in VISION_FAMILIES:
        make_vision_model(folder / family, family, num_layers=NUM_LAYERS)
    whole = AutoModelForImageTextToText.from_pretrained(folder / "qwen2_5_vl")
    shared = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    more = ("num_key_value_heads", "max_position_embeddings", "tie_word_embeddings", "rms_norm_eps", "pad_token_id")
    text = Qwen2Config(
        **{key: getattr(whole.config.text_config, key) for key in (*shared, *more)},
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    model = Qwen2ForCausalLM(text)
    model.model.load_state_dict(whole.model.language_model.state_dict())
    model.tie_weights()
    model.save_pretrained(folder / "text")
    write_pictures(folder / "data")
    return folder


def _case(folder: Path, family: str, layout: dict[str, Any], **rest: Any) -> dict[str, Any]:
    files = {"processor": str(folder / "qwen2_5_vl"), "data": str(folder / "data" / "rows.jsonl")}
    if family != "text":
        files["processor"] = str(folder / family)
    return {**layout, **files, "model": str(folder / family), "steps": 1, **rest}


def on_one_rank(folder: Path, one: dict[str, Any]) -> Cases:
    """Every freeze of every family."""
    return {
        f"vision/{family}/one/{freeze}": _case(folder, family, one, freeze=freeze, logprobs=freeze == "none")
        for family in VISION_FAMILIES
        for freeze in FREEZES
    } | {
        f"vision/{family}/one/padded": _case(folder, family, one, freeze="none", packing=False, logprobs=True)
        for family in VISION_FAMILIES
    }


def on_two_ranks(folder: Path, layouts: Cases) -> Cases:
    """Each family at most layouts, one of them exported, one saved; a text batch by the family and by its text's."""
    uneven, saved = {"first_stage_layers": 1}, str(folder / "saved")
    twins = {"with_images": False, "steps": 2}
    cases = {
        "qwen2_5_vl/tp2": _case(folder, "qwen2_5_vl", layouts["tp2"], freeze="none"),
        "qwen3_vl/tp2_sp/padded": _case(folder, "qwen3_vl", layouts["tp2_sp"], freeze="none", packing=False),
        "qwen2_5_vl/pp2/padded": _case(folder, "qwen2_5_vl", layouts["pp2"], freeze="tower", packing=False, **uneven),
        "qwen2_5_vl/dp2": _case(folder, "qwen2_5_vl", layouts["dp2"], freeze="none"),
        "qwen2_5_vl/pp2": _case(
            folder, "qwen2_5_vl", layouts["pp2"], freeze="tower", save_hf=str(folder / "exported"), **uneven
        ),
        "qwen3_vl/tp2_sp": _case(
            folder, "qwen3_vl", layouts["tp2_sp"], freeze="none", micro_batch_size=2, save=saved, steps_after=1
        ),
        "qwen3_vl/tp2_sp/resumed": _case(
            folder, "qwen3_vl", layouts["tp2_sp"], freeze="none", micro_batch_size=2, load=saved, steps=0, steps_after=1
        ),
        "qwen3_vl/tp2_sp/full": _case(folder, "qwen3_vl", layouts["tp2_sp"], freeze="none", recompute="full"),
        "qwen2_5_vl/cp2": _case(folder, "qwen2_5_vl", layouts["cp2"], freeze="tower"),
        "qwen3_vl/cp2/padded": _case(folder, "qwen3_vl", layouts["cp2"], freeze="none", packing=False),
        "qwen3_vl/pp2": _case(folder, "qwen3_vl", layouts["pp2"], freeze="none"),
        "qwen3_vl/pp2/loaded": _case(
            folder, "qwen3_vl", layouts["pp2"], freeze="none", steps=0, load=saved, first_stage_layers=3
        ),
        "twin/vision": _case(folder, "qwen2_5_vl", layouts["tp2_sp"], freeze="tower_and_merger", **twins),
        "twin/text": _case(folder, "text", layouts["tp2_sp"], **twins),
    }
    return {f"vision/{name}": case for name, case in cases.items()}


def on_four_ranks(folder: Path, layouts: Cases) -> Cases:
    """Qwen3-VL over tensor and pipeline ranks, Qwen2.5-VL over interleaved stages and data ranks."""
    return {
        "vision/qwen3_vl/tp2_pp2": _case(folder, "qwen3_vl", layouts["tp2_pp2"], freeze="none", recompute="full"),
        "vision/qwen2_5_vl/pp2_dp2": _case(folder, "qwen2_5_vl", {**layouts["pp2_dp2"], "vp": 2}, freeze="none"),
    }
