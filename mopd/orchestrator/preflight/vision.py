"""Checks of prompts with images: sound files, and the same tokens for student and teachers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mopd.base.types import UserError
from mopd.conversion.models.reading import read_dims
from mopd.data.image_processing import sees_images
from mopd.data.prompts import PromptDataset
from mopd.data.tokenizer import compare_tokenizers, load_tokenizer
from mopd.launch.checks.inputs import Check
from mopd.orchestrator.workers import Inputs

NUM_DECODED = 64
"""Number of images of each split that are decoded, spread over it."""


def check_images(inputs: Inputs) -> Check:
    """Check that a sample of the images can be decoded; training decodes them all, one by one."""
    num_rows, num_decoded = 0, 0
    for dataset in (inputs.train, inputs.validation):
        if dataset is None or dataset.images is None:
            continue
        num_rows += sum(dataset.image_counts.values())
        refs = [ref for row in dataset.rows for ref in row.images]
        for ref in refs[:: max(1, len(refs) // NUM_DECODED)][:NUM_DECODED]:
            try:
                dataset.images.prompt_image(ref).load()
            except UserError as error:
                return Check("images", "failed", str(error))
            num_decoded += 1
    return Check("images", "ok", f"{num_rows} rows with images, {num_decoded} images decoded")


def tokenizer_differences(inputs: Inputs, model: str, vocab_size: int) -> list[str]:
    """Return what differs between the tokenizers of the student and of the teacher ``model`` (``compare_tokenizers``).
    Ids that stand for images count only where the teacher sees images. ``vocab_size`` is the student's."""
    theirs, vision = load_tokenizer(model), inputs.vision
    if vision is None or not sees_images(model):
        unneeded = () if vision is None else vision.token_ids
        return compare_tokenizers(inputs.tokenizer, theirs, vocab_size, unneeded)
    differences = compare_tokenizers(inputs.tokenizer, theirs, vocab_size)
    dims = read_dims(Path(model)).vision
    assert dims is not None, "it sees images"
    if dims.token_ids != vision.token_ids:
        differences.append(
            f"images and videos have the ids {vision.token_ids} in the student's config.json and {dims.token_ids} in "
            "the teacher's"
        )
    return differences


def probe_rows(dataset: PromptDataset, domains: Sequence[str], most: int) -> list[tuple[str, int]]:
    """Return the first rows of ``domains`` with their domains, one with images among them where there is one."""
    rows_by_domain = dataset.rows_by_domain
    own = [(domain, row) for domain in domains for row in rows_by_domain[domain]]
    chosen = own[:most]
    if not any(dataset.row(row).images for _, row in chosen):
        chosen[-1:] = next(([place] for place in own[most:] if dataset.row(place[1]).images), chosen[-1:])
    return chosen
