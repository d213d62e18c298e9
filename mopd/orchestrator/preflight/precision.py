"""What low precision costs a teacher: its scores, got as training gets them, beside its plain folder's.

A row of the engine's has its own most probable ids, and everything else in a bucket: on these the KL is a lower bound
of that over the vocabulary. Shapes: R response tokens, V vocabulary, K top-k.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mopd.base.hardware import free_memory_bytes
from mopd.base.types import UserError
from mopd.config.schema import Recipe
from mopd.conversion.models.reading import read_dims
from mopd.data.tokenizer import compare_tokenizers, load_tokenizer
from mopd.launch.checks.inputs import Check, check_model_folder
from mopd.launch.preparing import weights_bytes
from mopd.losses.api import parallel_topk_distill
from mopd.orchestrator.preflight.parity import Probe, Reference

SHARE_OF_DISTANCE = 0.1
"""Share of KL(student || plain teacher) at the start above which the cost is a warning: a student that equals the
engine's scores is still as far from the teacher as they are, so a tenth of the way is out of its reach."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Distance of an engine's scores from those of the plain folder."""

    kl: float
    """Mean KL(plain || engine), nats a token."""
    mean_difference: float
    """Mean |log-prob difference| of the sampled tokens."""
    max_difference: float
    same_top1: float
    """Share of rows whose most probable id is the same."""
    num_tokens: int
    num_ids: int
    """Ids of a row beside its bucket."""
    distance: float | None
    """KL(student || plain), estimated at the student's tokens; ``None`` where it has drawn none."""

    def limit(self, floor: float) -> float:
        """The KL above which a warning says so; ``floor`` is what the preflight permits a faithful engine."""
        return max(floor, SHARE_OF_DISTANCE * (self.distance or 0.0))

    def check(self, title: str, folder: str, floor: float) -> Check:
        """Return the verdict."""
        limit, distance = self.limit(floor), self.distance
        why = f"what preflight.max_self_kl permits, {floor:g}" if limit == floor else "a tenth of KL(student || plain)"
        detail = (
            f"beside {folder}: KL(plain || engine) {self.kl:.2e} nats a token on its top {self.num_ids} and their "
            f"bucket (limit {limit:.2g}: {why}), |log-prob difference| of {self.num_tokens} sampled tokens mean "
            f"{self.mean_difference:.2e}, max {self.max_difference:.2e}; the most probable id is the same at "
            f"{self.same_top1:.1%}"
        )
        detail += "" if distance is None else f"; KL(student || plain) about {distance:.3f}"
        numbers = {
            "kl": self.kl, "limit": limit, "mean_difference": self.mean_difference,
            "max_difference": self.max_difference, "same_top1": self.same_top1, "tokens": self.num_tokens,
            "top_k": self.num_ids, "student_kl": distance,
        }  # fmt: skip
        if self.kl <= limit:
            return Check(title, "ok", detail, numbers)
        detail += ": the student learns this error too; serve more bits, or keep some layers plain"
        return Check(title, "warning", detail, numbers)


def cost_of(
    reference: Reference, probes: Sequence[Probe], drawn: Sequence[tuple[Tensor, Tensor]] | None, temperature: float
) -> Cost:
    """Return the cost of what an engine says of ``probes``. ``drawn`` are the student's log-probs [R] of the same
    tokens, and whether each is its own [R]."""
    kls, differences, same, distances = list[Tensor](), list[Tensor](), list[Tensor](), list[Tensor]()
    num_ids = 0
    for number, probe in enumerate(probes):
        assert probe.ids is not None and probe.logprobs is not None and probe.token_logprobs is not None
        logits_RV = reference.rows(probe.tokens, probe.prompt_length, probe.images)
        plain_RV = (logits_RV / temperature).log_softmax(-1)
        kl_R, _ = parallel_topk_distill(
            logits_RV, probe.ids.long(), probe.logprobs, loss="reverse_kl", tail="bucket", temperature=temperature
        )
        plain_R = plain_RV.gather(1, probe.tokens[probe.prompt_length :, None])[:, 0]
        kls.append(kl_R)
        differences.append((plain_R - probe.token_logprobs).abs())
        best_R = probe.ids.gather(1, probe.logprobs.argmax(1, keepdim=True))[:, 0]
        same.append(plain_RV.argmax(1) == best_R)
        num_ids = probe.ids.shape[1]
        if drawn is not None:
            own_R, mask_R = drawn[number]
            distances.append((own_R - plain_R)[mask_R])
    difference = torch.cat(differences).double()
    return Cost(
        kl=torch.cat(kls).double().mean().item(),
        mean_difference=difference.mean().item(),
        max_difference=difference.max().item(),
        same_top1=torch.cat(same).double().mean().item(),
        num_tokens=difference.numel(),
        num_ids=num_ids,
        distance=torch.cat(distances).double().mean().item() if distances else None,
    )


def check_beside(recipe: Recipe, beside: Mapping[str, str]) -> None:
    """Raise ``UserError`` unless each is a folder that this machine's memory holds, of the teacher's vocabulary."""
    for name, folder in beside.items():
        where = f"--beside {name}"
        if name not in recipe.teachers:
            known = ", ".join(map(repr, recipe.teachers))
            raise UserError(f"{where}: the recipe has no such teacher (it has {known}): name one of them")
        teacher = recipe.teachers[name]
        if teacher.refresh is not None:
            raise UserError(f"{where}: teachers.{name}.model is the student itself: name another teacher")
        check_model_folder(folder, where)
        own, plain = read_dims(Path(teacher.model), takes_quantised=True).vocab_size, read_dims(Path(folder)).vocab_size
        if own != plain:
            raise UserError(
                f"{where}: {folder} has a vocabulary of {plain} and teachers.{name}.model {teacher.model} one of "
                f"{own}: name the folder that it was quantised from"
            )
        differences = compare_tokenizers(load_tokenizer(teacher.model), load_tokenizer(folder), own)
        if differences:
            raise UserError(
                f"{where}: {folder} and teachers.{name}.model {teacher.model} do not share a tokenizer: "
                f"{'; '.join(differences)}: name the folder that it was quantised from"
            )
        size, free = weights_bytes(Path(folder)), free_memory_bytes()
        if size is not None and size > free:
            raise UserError(
                f"{where}: {folder} has {size / 2**30:.1f} GiB of weights, which transformers reads into host memory, "
                f"and {free / 2**30:.1f} GiB are free: run the check on a machine with more"
            )
