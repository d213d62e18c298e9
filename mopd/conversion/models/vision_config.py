"""``VisionDims`` from a ``config.json``. No torch in this module.

Two forms are read: Qwen2.5-VL's published one, whose text keys stand at the top, and that of later models, with
``text_config``. ``vision_config`` is an object in both.
"""

from __future__ import annotations

from dataclasses import dataclass

from mopd.conversion.models.config_keys import Keys, refuse_quantised
from mopd.conversion.models.dims import Naming, VisionDims

MAX_BLOCKS = 1_000
"""Largest number of blocks of a tower; published ones have some dozens."""
MAX_SIDE = 1_024
"""Largest side of a patch in pixels, and of a merged patch in patches; published ones are below 20."""
MAX_POSITIONS = 2**20
MROPE_KEYS = frozenset({"mrope_section", "mrope_interleaved"})
"""Keys of the rope that divide its frequencies among time, height and width."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionFormat:
    """Properties in which the vision configs of one ``model_type`` differ from other families'."""

    naming: Naming
    """How its published checkpoints name tensors."""
    activation: str
    """The only supported ``hidden_act`` of the tower."""
    has_windows: bool = False
    has_deepstack: bool = False
    """Whether it has DeepStack features and learned positions."""
    is_interleaved: bool = False
    """Whether its rotary frequencies of time, height and width alternate."""


VISION_FORMATS = {
    "qwen2_5_vl": VisionFormat(naming="flat", activation="silu", has_windows=True),
    "qwen3_vl": VisionFormat(
        naming="nested", activation="gelu_pytorch_tanh", has_deepstack=True, is_interleaved=True
    ),
}  # fmt: skip
"""``model_type`` -> its format, for the families that see images."""


def text_keys(keys: Keys, family: str) -> Keys:
    """Return the language model's keys: ``text_config``, or the top level of an older config."""
    if family not in VISION_FORMATS or (family == "qwen2_5_vl" and keys.absent("text_config")):
        return keys
    text = keys.section("text_config")
    text.only("model_type", f"{family}_text")
    return text


def is_tied(keys: Keys, text: Keys, family: str) -> bool:
    """Return whether the head is the embedding; absent means that it is not.

    Raises:
        UserError: the top level and ``text_config`` disagree: some libraries read the one and some the other.
    """
    key = "tie_word_embeddings"
    at_top = not keys.absent(key) and keys.flag(key)
    if text is keys or text.absent(key):
        return at_top
    if family == "qwen2_5_vl" and keys.absent(key):  # transformers takes the nested one then
        return text.flag(key)
    if text.flag(key) != at_top:
        raise text.error(key, f"is {text.flag(key)} but {at_top} at the top level: make them equal")
    return at_top


def read_vision(keys: Keys, text: Keys, family: str, *, head_dim: int) -> VisionDims:
    """Return the ``VisionDims`` of a config whose family sees images, with the naming of published checkpoints.

    Args:
        text: the language model's keys.
        head_dim: channels of a head of the language model.

    Raises:
        UserError: a key is missing, contradicts another or asks for what the towers here do not do.
    """
    format_, tower = VISION_FORMATS[family], keys.section("vision_config")
    refuse_quantised(tower)
    _refuse_other_towers(tower, format_, family)
    if family == "qwen2_5_vl":  # its attention reads no head_dim
        text.only("head_dim", text.count("hidden_size") // text.count("num_attention_heads"))
    ids = {name: _token_id(keys, text, name) for name in ("image", "video", "vision_start", "vision_end")}
    if len(set(ids.values())) < len(ids):
        raise keys.error("image_token_id", f"the ids of vision are not distinct: {ids}")
    heads, hidden = tower.count("num_heads"), tower.count("hidden_size")
    if hidden % heads or hidden // heads % 4:
        raise tower.error("num_heads", f"{heads} does not cut hidden_size {hidden} into heads of a multiple of 4")
    depth = tower.at_most("depth", MAX_BLOCKS)
    if tower.count("out_hidden_size") != text.count("hidden_size"):
        problem = f"{tower.count('out_hidden_size')} is not the language model's hidden_size"
        raise tower.error("out_hidden_size", f"{problem}, {text.count('hidden_size')}")
    return VisionDims(
        naming=format_.naming,
        image_token_id=ids["image"],
        video_token_id=ids["video"],
        vision_start_token_id=ids["vision_start"],
        vision_end_token_id=ids["vision_end"],
        patch_size=tower.at_most("patch_size", MAX_SIDE),
        temporal_patch_size=tower.at_most("temporal_patch_size", MAX_SIDE),
        spatial_merge_size=tower.at_most("spatial_merge_size", MAX_SIDE),
        in_channels=3,
        depth=depth,
        hidden_size=hidden,
        num_heads=heads,
        intermediate_size=tower.count("intermediate_size"),
        out_hidden_size=tower.count("out_hidden_size"),
        window_size=_window_size(tower) if format_.has_windows else None,
        full_attention_blocks=_blocks(tower, "fullatt_block_indexes", depth) if format_.has_windows else (),
        num_position_embeddings=_positions(tower) if format_.has_deepstack else None,
        deepstack_layers=_deepstack_layers(tower, text, depth) if format_.has_deepstack else (),
        mrope_section=_mrope_section(text, format_, head_dim),
        mrope_interleaved=format_.is_interleaved,
    )


def _refuse_other_towers(tower: Keys, format_: VisionFormat, family: str) -> None:
    tower.one_of("hidden_act", (format_.activation,), "the activation of this family's tower")
    for key in ("in_channels", "in_chans"):
        tower.only(key, 3, "images are RGB")
    if not tower.absent("model_type"):  # the towers of published Qwen3-VL have the whole model's type
        tower.one_of("model_type", (family, f"{family}_vision"), "this family's tower")
    if not tower.absent("rope_parameters"):
        rope = tower.section("rope_parameters")
        rope.only("rope_type", "axial")
        rope.only("rope_theta", 10000.0)


def _token_id(keys: Keys, text: Keys, name: str) -> int:
    key = f"{name}_token_id"
    token, vocab_size = keys.whole(key), text.count("vocab_size")
    if token >= vocab_size:
        raise keys.error(key, f"{token} is beyond the vocabulary of {vocab_size}")
    return token


def _window_size(tower: Keys) -> int:
    size, merged = tower.count("window_size"), tower.count("patch_size") * tower.count("spatial_merge_size")
    if size < merged:
        raise tower.error("window_size", f"{size} is less than a merged patch, {merged} pixels")
    return size


def _positions(tower: Keys) -> int:
    number = tower.at_most("num_position_embeddings", MAX_POSITIONS)
    if int(number**0.5) ** 2 != number:
        raise tower.error("num_position_embeddings", f"{number} is no square")
    return number


def _blocks(tower: Keys, key: str, depth: int) -> tuple[int, ...]:
    blocks = tower.container(key, list)
    known = all(type(block) is int and 0 <= block < depth for block in blocks)
    if not known or len(set(blocks)) < len(blocks):
        raise tower.error(key, f"{blocks!a:.200} are not distinct blocks of the tower, 0 to {depth - 1}")
    return tuple(blocks)


def _deepstack_layers(tower: Keys, text: Keys, depth: int) -> tuple[int, ...]:
    key, num_layers = "deepstack_visual_indexes", text.count("num_hidden_layers")
    blocks = _blocks(tower, key, depth)
    if list(blocks) != sorted(blocks):  # features come in the order of blocks, whatever the list's
        raise tower.error(key, f"{list(blocks)} are not ascending")
    if len(blocks) > num_layers:
        raise tower.error(key, f"{len(blocks)} features do not fit the {num_layers} layers of the language model")
    return blocks


def _mrope_section(text: Keys, format_: VisionFormat, head_dim: int) -> tuple[int, int, int]:
    ropes = [text.section(key) for key in ("rope_scaling", "rope_parameters") if not text.absent(key)]
    if not ropes:
        raise text.error("rope_scaling", "missing, as is rope_parameters; one of them holds mrope_section")
    for rope in ropes:
        rope.only("mrope_interleaved", format_.is_interleaved)
        if format_.is_interleaved:  # transformers interleaves without being asked, vLLM does not
            rope.flag("mrope_interleaved")
    found = {_section(rope, format_, head_dim) for rope in ropes}
    if len(found) > 1:
        raise text.error("rope_scaling", "has another mrope_section than rope_parameters; keep one")
    return found.pop()


def _section(rope: Keys, format_: VisionFormat, head_dim: int) -> tuple[int, int, int]:
    key = "mrope_section"
    section = rope.container(key, list)
    if len(section) != 3 or not all(type(size) is int and size > 0 for size in section):
        raise rope.error(key, f"{section!a:.200} are not three positive whole numbers")
    time, height, width = section
    if time + height + width != head_dim // 2:
        raise rope.error(key, f"{section} do not sum to half of the head's {head_dim} channels")
    # The interleaved rope gives every third frequency to the height and to the width.
    if format_.is_interleaved and max(1 + 3 * (height - 1), 2 + 3 * (width - 1)) >= head_dim // 2:
        raise rope.error(key, f"{section}: height and width have more frequencies than every third of them")
    return time, height, width
