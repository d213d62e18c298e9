"""``mopd convert verify``: are two checkpoints, each of either format, the same model?

Tensors are compared one by one, then both models compute logits in fp32: a Hugging Face folder through transformers, a
distributed checkpoint through Megatron's ``GPTModel``. Tensors alone cannot see a mistake that a conversion and its
inverse share; logits can. A model that sees images gets one among the probe's text.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mopd.base.types import UserError
from mopd.config.student import ParallelConfig, StudentConfig
from mopd.conversion.jobs.contents import Contents, fingerprint, open_checkpoint
from mopd.conversion.models.dims import VisionDims
from mopd.conversion.models.towers import with_naming
from mopd.conversion.torch_dist.reader import MANIFEST_FILE
from mopd.data.mrope import mrope_positions
from mopd.data.tokenizer import load_tokenizer
from mopd.engines.torch.loading import load_model as load_transformers
from mopd.launch import failure
from mopd.student import cpu_shim, parallel
from mopd.student.checkpoints import checkpoint
from mopd.student.model.gpt import build_model
from mopd.student.vision import ImageInput

PROBE_TEXT = (
    "The quick brown fox counts: 3.14159, 2^10 = 1024. Der Schnee fällt; 雪が降る。 def f(x): return x ** 2 + 1\n"
    "Once, in a year of 365 days, nobody asked why the sky is blue."
)
MAX_PROBE_TOKENS = 128
MAX_DIFFERENCES = 1000
"""Number of differences after which a comparison ends."""
TIMEOUT_S = 600.0
_UNREADABLE = "unreadable"
_IMAGE_SIDES = (2, 3)
"""Height and width of the probe's image in merged patches: unequal, so that they cannot be mixed up unseen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitsProbe:
    """Input of which both models compute logits."""

    tokens: Tensor
    """[1, T] int64."""
    patches: Tensor | None = None
    """[P, numbers of a patch] fp32 of one image; None for a model of text."""
    grids: Tensor | None = None
    """[1, 3] int64: its grid."""


def verify(
    first: Path, second: Path, *, text: str | None, tolerance: float, compares_logits: bool, allow_pickle: bool
) -> dict[str, Any]:
    """Compare two checkpoints; the report's ``same`` is the answer, ``differences`` says what differs.

    Args:
        text: probe text; None takes a built-in one. Without a tokenizer fixed token ids are used.
        tolerance: largest difference of any logit.

    Raises:
        UserError: one of them cannot be opened.
    """
    if failure.is_rank() and failure.rank_and_world_size()[1] > 1:
        raise UserError("verify runs in one process: start it without torchrun")
    one, other = (open_checkpoint(folder, allow_pickle=allow_pickle) for folder in (first, second))
    differences = [*_config_differences(one, other), *_unexpected(one), *_unexpected(other)]
    num_tensors = 0
    if one.dims.family == other.dims.family:
        found, num_tensors = _tensor_differences(one, other)
        differences += found
    report: dict[str, Any] = {"first": str(first), "second": str(second), "tensors": num_tensors}
    is_complete = not any(entry["problem"].startswith(_UNREADABLE) for entry in differences)
    if compares_logits and is_complete and one.dims.vocab_size == other.dims.vocab_size:
        probe = _probe(one, text)
        gap = float((logits_of(one, probe) - logits_of(other, probe)).abs().max())
        report |= {"probe_tokens": probe.tokens.shape[1], "largest_logit_difference": gap}
        if not gap <= tolerance:  # NaN differs
            differences.append({"name": "logits", "problem": f"differ by {gap:.3g}, tolerance {tolerance:g}"})
    return report | {"same": not differences, "differences": differences}


def _config_differences(one: Contents, other: Contents) -> list[dict[str, str]]:
    first, second = (with_naming(contents.dims, "flat") for contents in (one, other))
    return [
        {"name": f"config: {key}", "problem": f"{getattr(first, key)!r} and {getattr(second, key)!r}"}
        for key in type(first).__dataclass_fields__
        if getattr(first, key) != getattr(second, key)
    ]


def _unexpected(contents: Contents) -> list[dict[str, str]]:
    return [{"name": name, "problem": f"no place for it in {contents.folder}"} for name in contents.unexpected()]


def _tensor_differences(one: Contents, other: Contents) -> tuple[list[dict[str, str]], int]:
    """Parameter by parameter, in the order of the model with more of them; the first one's names are told."""
    owned = [{row.megatron[0]: row for row in contents.rows()} for contents in (one, other)]
    rows = owned[1] | owned[0]
    differences: list[dict[str, str]] = []
    num_tensors = 0
    for key, row in rows.items():
        if len(differences) >= MAX_DIFFERENCES:
            differences.append({"name": row.hf_names[0], "problem": "this tensor and what follows are not compared"})
            break
        prints = []
        for contents, own in zip((one, other), owned, strict=True):
            try:
                prints.append([fingerprint(tensor) for _, tensor in contents.read(own.get(key, row))])
            except UserError as error:  # a finding, and what this command is for
                differences.append({"name": row.hf_names[0], "problem": f"{_UNREADABLE}: {error}"})
        if len(prints) < 2:
            continue
        for name, first, second in zip(row.hf_names, *prints, strict=True):
            num_tensors += 1
            for what in ("dtype", "shape", "sha256"):
                a, b = first[what], second[what]
                if a != b:
                    problem = "other values" if what == "sha256" else f"{what} {a} and {b}"
                    differences.append({"name": name, "problem": problem})
                    break
    return differences, num_tensors


def _probe(contents: Contents, text: str | None) -> LogitsProbe:
    """Token ids below the vocabulary's size, and an image of noise in their middle where the model sees any."""
    vision, ids = contents.dims.vision, _text_ids(contents, text)
    if vision is None:
        return LogitsProbe(tokens=torch.tensor([ids[: contents.dims.max_positions]]))
    height, width = (vision.spatial_merge_size * side for side in _IMAGE_SIDES)
    image = [vision.image_token_id] * (height * width // vision.spatial_merge_size**2)
    ids = [token for token in ids if token not in vision.token_ids][: contents.dims.max_positions - len(image) - 2]
    middle = len(ids) // 2
    ids[middle:middle] = [vision.vision_start_token_id, *image, vision.vision_end_token_id]
    numbers = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    noise = torch.randn(height * width, numbers, generator=torch.Generator().manual_seed(0))
    return LogitsProbe(tokens=torch.tensor([ids]), patches=noise, grids=torch.tensor([[1, height, width]]))


def _text_ids(contents: Contents, text: str | None) -> list[int]:
    if (contents.origin / "tokenizer_config.json").is_file():
        ids = load_tokenizer(contents.origin)(text or PROBE_TEXT)["input_ids"][:MAX_PROBE_TOKENS]
        if len(ids) < 2:
            raise UserError(f"--text {text!r} has {len(ids)} tokens: give a longer one")
        if max(ids) >= contents.dims.vocab_size:
            raise UserError(
                f"{contents.origin}: its tokenizer gives id {max(ids)}, the model has {contents.dims.vocab_size}: "
                "they belong to different models; restore the tokenizer's files, or pass --no-logits"
            )
    else:
        ids = [(7 + 31 * position) % contents.dims.vocab_size for position in range(MAX_PROBE_TOKENS)]
    return list(ids)


@torch.no_grad()
def logits_of(contents: Contents, probe: LogitsProbe) -> Tensor:
    """fp32 logits [1, T, V] of one checkpoint, on CPU."""
    vision, tokens = contents.dims.vision, probe.tokens
    if not contents.is_megatron:
        model = load_transformers(contents.folder, "float32", torch.device("cpu"))
        images = {}
        if vision is not None:
            is_image = (tokens == vision.image_token_id).int()
            images = {"pixel_values": probe.patches, "image_grid_thw": probe.grids, "mm_token_type_ids": is_image}
        logits: Tensor = model(tokens, **images).logits
        return logits.float()
    if not (contents.folder / MANIFEST_FILE).is_file():
        raise UserError(
            f"{contents.folder}: without a manifest nothing says that it is whole: convert it first and verify the "
            "result, or pass --no-logits"
        )
    checkpoint.verify(contents.folder)
    student = StudentConfig(model=str(contents.origin), dtype="float32", transformer_impl="local")
    with parallel.joined(ParallelConfig(), timeout_s=TIMEOUT_S, seed=0) as layout, cpu_shim.activate():
        model = build_model(student, contents.dims, layout)
        checkpoint.load_weights(contents.folder, model)
        model.eval()
        positions, seen = torch.arange(tokens.shape[1])[None], {}
        if vision is not None:
            positions, seen = _positions(probe, vision), {"images": _image_input(probe, vision, layout.device)}
        logits = model(*(tensor.to(layout.device) for tensor in (tokens, positions)), **seen)
        return logits[..., : contents.dims.vocab_size].float().cpu()


def _positions(probe: LogitsProbe, vision: VisionDims) -> Tensor:
    """[3, 1, T] int64."""
    assert probe.grids is not None
    ((_, height, width),) = probe.grids.tolist()
    (tokens,) = probe.tokens.numpy().astype(np.int64)
    positions = mrope_positions(
        tokens, [(1, height, width)], image_token_id=vision.image_token_id, merge_size=vision.spatial_merge_size
    )
    return torch.from_numpy(positions)[:, None]


def _image_input(probe: LogitsProbe, vision: VisionDims, device: torch.device) -> ImageInput:
    """The probe's image as a micro-batch has it: flat places of its tokens, and whose feature each gets."""
    assert probe.patches is not None and probe.grids is not None
    rows = (probe.tokens[0] == vision.image_token_id).nonzero().flatten()
    return ImageInput(
        patches=probe.patches.to(device),
        grids=probe.grids.to(device),
        rows=rows.to(device),
        sources=torch.arange(len(rows), device=device),
    )
