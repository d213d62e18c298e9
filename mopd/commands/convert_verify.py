"""``mopd convert verify``: are two checkpoints, each of either format, the same model?

Tensors are compared one by one, then both models compute logits in fp32: a Hugging Face folder through transformers, a
distributed checkpoint through Megatron's ``GPTModel``. Tensors alone cannot see a mistake that a conversion and its
inverse share; logits can.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mopd import cpu_shim
from mopd.config.student import ParallelConfig, StudentConfig
from mopd.conversion.jobs.contents import Contents, fingerprint, open_checkpoint
from mopd.conversion.models.towers import with_naming
from mopd.conversion.torch_dist.reader import MANIFEST_FILE
from mopd.data.tokenizer import load_tokenizer
from mopd.engines.torch.loading import load_model as load_transformers
from mopd.launch import failure
from mopd.student import parallel
from mopd.student.checkpoints import checkpoint
from mopd.student.model.gpt import build_model
from mopd.types import UserError

PROBE_TEXT = (
    "The quick brown fox counts: 3.14159, 2^10 = 1024. Der Schnee fällt; 雪が降る。 def f(x): return x ** 2 + 1\n"
    "Once, in a year of 365 days, nobody asked why the sky is blue."
)
MAX_PROBE_TOKENS = 128
MAX_DIFFERENCES = 1000
"""After so many a comparison ends."""
TIMEOUT_S = 600.0
_UNREADABLE = "unreadable"


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
        tokens = _probe(one, text)
        gap = float((logits_of(one, tokens) - logits_of(other, tokens)).abs().max())
        report |= {"probe_tokens": tokens.shape[1], "largest_logit_difference": gap}
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


def _probe(contents: Contents, text: str | None) -> Tensor:
    """Token ids [1, T] int64 below the vocabulary's size."""
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
    return torch.tensor([ids[: contents.dims.max_positions]])


@torch.no_grad()
def logits_of(contents: Contents, tokens: Tensor) -> Tensor:
    """fp32 logits [1, T, V] of one checkpoint, on CPU, for token ids [1, T]."""
    if not contents.is_megatron:
        model = load_transformers(contents.folder, "float32", torch.device("cpu"))
        logits: Tensor = model(tokens).logits
        return logits.float()
    if not (contents.folder / MANIFEST_FILE).is_file():
        raise UserError(
            f"{contents.folder}: without a manifest nothing says that it is whole: convert it first and verify the "
            "result, or pass --no-logits"
        )
    checkpoint.verify(contents.folder)
    student = StudentConfig(model=str(contents.origin), dtype="float32", transformer_impl="local")
    length = tokens.shape[1]
    is_hidden = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    with parallel.joined(ParallelConfig(), timeout_s=TIMEOUT_S, seed=0) as layout, cpu_shim.activate():
        model = build_model(student, contents.dims, layout)
        checkpoint.load_weights(contents.folder, model)
        model.eval()
        inputs = (tokens, torch.arange(length)[None], is_hidden)
        logits = model(*(tensor.to(layout.device) for tensor in inputs))
        return logits[..., : contents.dims.vocab_size].float().cpu()
