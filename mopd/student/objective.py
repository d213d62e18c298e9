"""Evaluation of the recipe's ``loss`` section: the loss that is minimised and the sums behind the metrics."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mopd.base.types import (
    HIDDEN_FIELD,
    TEACHER_FIELDS,
    TOKEN_FIELD,
    DomainSums,
    MicroBatchPlan,
    SampleMeta,
    UserError,
)
from mopd.config.losses import (
    CustomLossConfig,
    FullLossConfig,
    KLLossConfig,
    Loss,
    PolicyGradientConfig,
    TopKLossConfig,
    budget_of,
    has_domain_baseline,
)
from mopd.losses import (
    LinearHead,
    domain_factors,
    kept_sequences,
    largest_rows,
    linear_loss,
    num_chosen,
    parallel_custom_loss,
    parallel_entropy_and_topk_overlap,
    parallel_full_distill,
    parallel_gather_logprobs,
    parallel_policy_gradient,
    parallel_sampled_kl,
    parallel_topk_distill,
    token_weights,
    total_chosen,
)
from mopd.losses.chunked.custom import CUSTOM
from mopd.losses.linear.head import Rows
from mopd.student.attention import to_device
from mopd.student.batch import HostRows, LossRows
from mopd.student.custom_loss import load_custom_loss
from mopd.student.model.gpt import LMHead
from mopd.student.parallel import Layout
from mopd.student.teacher_heads import TeacherHeads

logger = logging.getLogger(__name__)

MASKED_SEQUENCES = "masked_sequences"
"""Metric name: number of responses that the sequence mask leaves out."""
GRADIENT_SQUARES = "gradient_squares"
"""Metric name: squared norm of the gradient of the hidden states at the LM head."""
CHOSEN = "loss_tokens"
"""Metric name: number of tokens that ``loss.tokens`` lets count, the only ones in the means of what needs the loss."""
SEEN = ("student_logprobs", "student_mass", "score")
"""Numbers of every row, also of those that do not count, where ``loss.tokens`` ranks rows by their ``score``; without
ids of a teacher there is no mass on them."""
DIAGNOSTICS = ("entropy", "topk_overlap")
"""Names of the expensive metrics, computed only on request."""
SUPPORT_LOSSES = (TopKLossConfig, CustomLossConfig)
"""Losses that tell the student's mass on the teacher's ids themselves."""


class Sums:
    """Per-domain sums of one step, accumulated on the device without a host synchronisation, and the number of samples
    and loss tokens of the whole step."""

    def __init__(
        self,
        names: Sequence[str],
        *,
        num_domains: int,
        num_samples: int,
        num_loss_tokens: int,
        device: torch.device,
        domain_factors: Tensor | None = None,
    ) -> None:
        """``domain_factors`` [domains] fp32 are what the weights of each domain's tokens are multiplied with."""
        self.names = tuple(names)
        self.num_samples, self.num_loss_tokens = num_samples, num_loss_tokens
        self.domain_factors = domain_factors
        self._gradient = torch.zeros(num_domains, dtype=torch.float64, device=device)
        self._totals = torch.zeros(num_domains, len(names), dtype=torch.float64, device=device)
        self._is_bad = torch.zeros(num_samples + 1, dtype=torch.float64, device=device)

    def add(self, rows: LossRows, columns: Mapping[str, Tensor]) -> None:
        """Add one micro-batch: ``columns[name]`` is [T]; rows outside the loss mask do not count.

        Samples whose loss sum is not finite are marked by their position in the plan.
        """
        values = torch.stack([columns[name].detach().double() for name in self.names])
        is_own = self._is_of_domain(rows) & rows.loss_mask
        # Not a matrix product: inf * 0 would carry one domain's infinity into the others.
        self._totals += torch.where(is_own[:, None], values, 0.0).sum(-1)
        is_bad = rows.loss_mask & ~torch.isfinite(values[self.names.index("loss")])
        self._is_bad.index_put_((rows.sample_positions[rows.samples],), is_bad.double(), accumulate=True)

    def _is_of_domain(self, rows: LossRows) -> Tensor:
        """Return [domains, T] bool."""
        domains = torch.arange(self._totals.shape[0], device=rows.domains.device)
        return rows.domains[rows.samples] == domains[:, None]

    def add_gradient(self, rows: LossRows, gradient: Tensor, *, part: int) -> None:
        """Add the squared norm of ``gradient`` [S, B, H] of one micro-batch's hidden states at the LM head by domain;
        under sequence parallelism the rank's ``part`` of S."""
        squares = torch.linalg.vector_norm(gradient, dim=-1, dtype=torch.float32).flatten().double().square()
        is_own = self._is_of_domain(rows)[:, part * len(squares) : (part + 1) * len(squares)]
        self._gradient += torch.where(is_own, squares, 0.0).sum(-1)

    def reduce(self, domains: Sequence[str], layout: Layout) -> tuple[dict[str, DomainSums], list[int]]:
        """Return the sums over all ranks by domain (domains without a loss token are left out), and the plan positions
        of samples with a non-finite loss. One all-reduce and one host synchronisation; equal on every rank."""
        flat = torch.cat([self._totals.flatten(), self._is_bad[:-1]])
        # Tensor-parallel neighbours hold the same numbers: each row must count once in the sum over all ranks. Of the
        # hidden states' gradient they hold different rows under sequence parallelism.
        if not layout.reports_loss:
            flat = torch.zeros_like(flat)
        own = self._gradient * (layout.sequence_parallel or layout.tp_rank == 0)
        flat = torch.cat([own, flat])
        dist.all_reduce(flat)
        everything = flat.tolist()
        squares, numbers = everything[: len(domains)], everything[len(domains) :]
        result = {}
        for i, domain in enumerate(domains):
            by_name = dict(zip(self.names, numbers[i * len(self.names) : (i + 1) * len(self.names)], strict=True))
            num_tokens = round(by_name.pop("num_tokens"))
            if num_tokens:
                result[domain] = DomainSums(num_tokens=num_tokens, sums=by_name | {GRADIENT_SQUARES: squares[i]})
        is_bad = numbers[len(domains) * len(self.names) :]
        return result, [i for i, bad in enumerate(is_bad) if bad]


class Objective:
    """The recipe's loss on a vocabulary-parallel LM head.

    ``loss = sum over rows of weight x loss_row`` with weights from ``loss.aggregation`` and global denominators: summed
    over micro-batches and ranks it is the whole batch's loss, however it is cut. Only rows with a loss token become
    logits.
    """

    def __init__(
        self,
        loss: Loss,
        layout: Layout,
        *,
        true_vocab_size: int,
        lm_head_memory_budget_mib: int,
        teacher_weights: Tensor | None = None,
        has_support: bool = True,
        has_chunks: bool = False,
        heads: TeacherHeads | None = None,
    ) -> None:
        """``teacher_weights`` [domains, D] fp32 is given for an ensemble, where teacher fields are [T, D, K]. Each row
        adds up to 1 and holds 0 for teachers that the domain does not have. Without ``has_support`` (payloads
        ``sampled`` and ``hidden``) no ids come from the teachers, and there is no metric of rows of ids. With
        ``has_chunks`` rows of a top-k loss have an advantage beside their teacher's ids, or in the place of them
        (``mopd.data.cross_tokenizer``). ``heads`` are needed on the last stage by losses over the whole vocabulary."""
        self.loss = loss
        self._has_support, self._has_chunks = has_support, has_chunks
        self._heads = heads
        self._layout = layout
        self._budget_mib = lm_head_memory_budget_mib
        self._teacher_weights = teacher_weights
        self._correction = loss.correction
        self._largest = None if loss.tokens == "all" else loss.tokens
        self._custom = load_custom_loss(loss) if isinstance(loss, CustomLossConfig) else None
        self._has_warned = False
        self._options: dict[str, Any] = {
            "temperature": loss.temperature,
            "dist_process_group": layout.tp_group,
            "true_vocab_size": true_vocab_size,
        }

    @property
    def field_names(self) -> tuple[str, ...]:
        """Data-plane fields that this loss and its metrics read."""
        fields = ["tokens", "loss_mask", *(TEACHER_FIELDS if self._has_support else (TOKEN_FIELD,))]
        loss = self.loss
        if isinstance(loss, FullLossConfig):
            fields.append(HIDDEN_FIELD)
        is_own = isinstance(loss, CustomLossConfig) and loss.own_samples
        is_ratio = isinstance(loss, PolicyGradientConfig) and loss.old_logprobs == "rollout"
        if self._correction is not None or is_own or is_ratio:
            fields.append("rollout_logprobs")
        if not isinstance(loss, KLLossConfig) and loss.task_reward_weight:
            fields.append("task_advantage")
        if self._has_chunks:
            fields.append("chunk_advantage")
        if has_domain_baseline(loss):
            fields.append("baseline")
        return tuple(fields)

    def domain_factors(self, samples: Sequence[SampleMeta], domains: Sequence[str]) -> Tensor | None:
        """Return what the weights of each domain's tokens are multiplied with, [domains] fp32, so that the domain gets
        its budget of the whole batch's ``samples``; ``None`` without a budget."""
        budget = budget_of(self.loss, domains)
        if not budget:
            return None
        by_sequence = self.loss.aggregation == "sequence_mean"
        counts: Counter[str] = Counter()
        for sample in samples:
            counts[sample.domain] += bool(sample.num_loss_tokens) if by_sequence else self._num_counting([sample])
        total = len(samples) if by_sequence else counts.total()
        # A domain that a teacher names and the data does not have needs no share.
        shares = [budget.get(domain, 0.0) for domain in domains]
        factors = domain_factors([counts[domain] for domain in domains], shares, total=total)
        return to_device(torch.tensor(factors), device=self._layout.device)

    def num_loss_tokens(self, plan: MicroBatchPlan) -> int:
        """Return how many of a plan's loss tokens count, over all ranks: the denominator of ``token_mean``."""
        if self._largest is None:
            return plan.num_loss_tokens
        return self._num_counting(sample for rank in plan.micro_batches for batch in rank for sample in batch)

    def _num_counting(self, samples: Iterable[SampleMeta]) -> int:
        lengths = (sample.num_loss_tokens for sample in samples)
        return sum(lengths) if self._largest is None else total_chosen(lengths, self._largest.share)

    def new_sums(
        self, *, diagnostics: bool, domain_factors: Tensor | None = None, own_samples: bool = True, **sizes: int
    ) -> Sums:
        """Return empty sums of this loss's metrics; the same names on every rank, stages without logits included.
        ``own_samples``: estimators of the KL from the student's own tokens make sense. ``sizes`` are those of
        ``Sums``."""
        names = [
            "num_tokens",
            "weight",
            "loss",
            "weighted_loss",
            *(("k1", "k3") if own_samples else ()),
            *(("teacher_mass",) if self._has_support else ()),
        ]
        if isinstance(self.loss, TopKLossConfig):
            names += ["student_mass", "clamped", "tail_floored"]
            names += ["clamped_entries"] if self.loss.holds_entries else []
            names += ["divergence", "task_loss"] if self.loss.task_reward_weight or self._has_chunks else []
            names += ["tail_loss", "outside"] if self.loss.tail == "sampled" else []
        elif isinstance(self.loss, KLLossConfig):
            names += ["clamped"]
        elif isinstance(self.loss, FullLossConfig):
            names += ["hidden_error", *(("divergence", "task_loss") if self.loss.task_reward_weight else ())]
        elif self._custom is not None:
            names += ["student_mass", *(f"{CUSTOM}{name}" for name in self._custom[1])]
        else:
            names += ["ratio", "clip_fraction", "correction_weight", "baseline"]
        if self._correction is not None:
            names += ["rollout_kl"] + ([] if isinstance(self.loss, PolicyGradientConfig) else ["correction_weight"])
            names += [] if self._correction.sequence is None else [MASKED_SEQUENCES]
        if self._largest is not None:
            names += [CHOSEN, "score", "chosen_score"]
        if diagnostics:
            # The sampled losses do not read the teacher's top-k; the student's mass on it takes a pass by itself.
            of_support = () if isinstance(self.loss, SUPPORT_LOSSES) else ("student_mass",)
            names += (*DIAGNOSTICS, *of_support) if self._has_support else DIAGNOSTICS[:1]
        return Sums(names, **sizes, device=self._layout.device, domain_factors=domain_factors)

    def __call__(self, head: LMHead, *, rows: LossRows, sums: Sums) -> Tensor:
        """Return this micro-batch's share of the loss, an fp32 scalar, and add its metrics to ``sums``.

        The gradient of the head's weight goes to its ``main_grad``. Backward must start here, with gradient 1.
        """
        weights = token_weights(
            rows.loss_mask,
            "token_mean" if self.loss.aggregation == "domain_mean" else self.loss.aggregation,
            num_loss_tokens=sums.num_loss_tokens,
            num_samples=sums.num_samples,
            sample_index=rows.samples,
            sample_loss_tokens=self._counts(rows),
        )
        if sums.domain_factors is not None:
            weights = weights * sums.domain_factors[rows.domains][rows.samples]
        flat = {"targets": rows.targets, "weights": weights, **rows.fields}
        if self._teacher_weights is not None:
            flat["teacher_weights"] = self._teacher_weights[rows.domains][rows.samples]
        own = self._linear_head(rows.loss_rows)

        def over_responses(name: str, per_row_R: Tensor) -> Tensor:
            return self._over_responses(name, own.spread(per_row_R, head.hidden).flatten(), rows)

        at_once = self._rows_at_once(own, head)
        if at_once < own.num_rows(head.hidden):
            # A response's rows come in several pieces, and the first already needs to know which responses and tokens
            # count: an extra forward pass over the head tells.
            with torch.no_grad():
                if self._largest is not None:
                    of_teachers = None if self._largest.largest == "student_entropy" else rows.row_domains
                    look = partial(self._look_at, flat, row_domains=of_teachers)
                    _, seen = linear_loss(head.hidden, head.weight, look, own, at_once)
                    flat |= {name: value.flatten() for name, value in seen.items()}
                    flat[CHOSEN] = self._over_responses(CHOSEN, flat["score"], rows)
                if MASKED_SEQUENCES in sums.names:
                    current = flat.get("student_logprobs")
                    if current is None:
                        where = rows.loss_rows
                        current = self.logprobs(head, rows.targets, temperature=self.loss.temperature, index=where)
                    flat[MASKED_SEQUENCES] = self._over_responses(MASKED_SEQUENCES, current, rows)
        row_loss = partial(
            self._losses_and_columns,
            flat,
            over_responses,
            diagnostics=DIAGNOSTICS[0] in sums.names,
            row_domains=rows.row_domains,
        )
        loss, columns = linear_loss(head.hidden, head.weight, row_loss, own, at_once)
        columns = {name: value.flatten() for name, value in columns.items()}
        sums.add(rows, {"num_tokens": rows.loss_mask, "weight": weights * columns.get(CHOSEN, 1)} | columns)
        if head.hidden.requires_grad:
            part = self._layout.tp_rank if self._layout.sequence_parallel else 0
            head.hidden.register_hook(lambda gradient: sums.add_gradient(rows, gradient, part=part))
        return loss

    def logprobs(self, head: LMHead, targets: Tensor, *, temperature: float, index: Tensor | None = None) -> Tensor:
        """Return [T] fp32 log-probs of ``targets`` [T] under softmax(logits / temperature), 0 in rows that ``index``
        does not name."""
        options = {**self._options, "temperature": temperature}

        def gather(logits: Tensor, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
            logprobs, _ = parallel_gather_logprobs(logits, rows.of(targets)[:, None], **options)
            return logprobs.squeeze(1), {"logprobs": logprobs.detach().squeeze(1)}

        own = self._linear_head(index)
        _, columns = linear_loss(head.hidden, head.weight, gather, own, self._rows_at_once(own, head))
        return columns["logprobs"].flatten()

    def _linear_head(self, index: Tensor | None) -> LinearHead:
        return LinearHead(self._layout.tp_group, self._layout.sequence_parallel, index)

    def _rows_at_once(self, own: LinearHead, head: LMHead) -> int:
        """Return how many rows' logits fit the memory budget; log a warning once if not all do. Raise ``UserError`` if
        the budget is too small for any."""
        num_rows = own.num_rows(head.hidden)
        try:
            more = 0 if self._heads is None else self._heads.row_bytes()
            at_once = own.rows_within(self._budget_mib * 2**20, head.hidden, head.weight, more)
        except ValueError as error:
            raise UserError(
                f"student.lm_head_memory_budget_mib {self._budget_mib} cannot be kept: {error}; raise it, or lower "
                "student.max_tokens_per_micro_batch"
            ) from error
        if at_once < num_rows and self._layout.reports_loss and not self._has_warned:
            self._has_warned = True
            needed = num_rows * (head.weight.size(0) * head.weight.element_size() + more) / 2**20
            logger.warning(
                f"LM head: the logits of {num_rows} tokens would take {needed:.0f} MiB, more than "
                f"student.lm_head_memory_budget_mib {self._budget_mib}: such micro-batches are computed {at_once} "
                "tokens at a time"
            )
        return at_once

    def _counts(self, rows: LossRows) -> Tensor:
        """Return how many tokens of each sample count [n]."""
        return rows.num_loss_tokens if self._largest is None else num_chosen(rows.num_loss_tokens, self._largest.share)

    def _over_responses(self, name: str, per_row: Tensor, rows: LossRows) -> Tensor:
        """Return what is decided over whole responses, [T], from a number of each row.

        ``CHOSEN``, from the score: whether the row counts. ``MASKED_SEQUENCES``, from the student's log-probs of the
        sampled tokens: 1 / (its loss tokens) in each row of a response that the sequence mask leaves out, so that its
        loss rows add up to 1 and the sum counts responses; 0 elsewhere.
        """
        group = self._layout.cp_group if self._layout.cp_size > 1 else None
        if name == CHOSEN:
            counts = self._counts(rows)
            return largest_rows(per_row, rows.loss_mask, rows.samples, counts, numbers=rows.numbers, group=group)
        assert self._correction is not None and self._correction.sequence is not None
        bounds = self._correction.sequence
        kept = kept_sequences(
            per_row,
            rows.fields["rollout_logprobs"],
            rows.loss_mask,
            low=bounds.low,
            high=bounds.high,
            sample_index=rows.samples,
            num_samples=len(rows.domains),
            group=group,
        )
        return torch.where(kept, 0.0, 1 / rows.num_loss_tokens.clamp_min(1).double())[rows.samples]

    def _losses_and_columns(
        self,
        data: Mapping[str, Tensor],
        over_responses: Callable[[str, Tensor], Tensor],
        logits: Tensor,
        rows: Rows,
        *,
        diagnostics: bool,
        row_domains: HostRows | None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the weighted losses [R] of some rows and their metrics, from their logits [R, V/tp].

        Backward overwrites the logits with their gradient. ``over_responses`` is called only if ``data`` does not say
        which responses and tokens count; ``rows`` are then all rows.
        """
        own = self._rows_of(data, rows, row_domains)
        columns = self._diagnostics(logits, own) if diagnostics else {}
        seen: dict[str, Tensor] = {}
        if self._largest is not None:
            if CHOSEN not in own:
                own |= self._look(logits, own)
                own[CHOSEN] = rows.of(over_responses(CHOSEN, own["score"]))
            own["weights"] = own["weights"] * own[CHOSEN]
            seen = {name: own[name] for name in self._seen}
            columns |= {CHOSEN: own[CHOSEN], "chosen_score": seen["score"] * own[CHOSEN]}
        loss, metrics = self._loss_rows(logits, own)
        metrics |= seen
        current = metrics["student_logprobs"]
        if self._correction is not None:
            metrics["rollout_kl"] = own["rollout_logprobs"].double() - current
            if self._correction.sequence is not None:
                part = own.get(MASKED_SEQUENCES)
                part = rows.of(over_responses(MASKED_SEQUENCES, current)) if part is None else part
                kept = (part == 0).to(loss.dtype)  # a factor: torch.where would hide a loss that is not finite
                loss = loss * kept
                metrics |= {MASKED_SEQUENCES: part, "unweighted_loss": metrics["unweighted_loss"] * kept}
        k1 = current.double() - own["teacher_token_logprobs"]
        if self._has_support:
            columns["teacher_mass"] = _over_teachers(own, own["teacher_logprobs"].exp().sum(-1))
        columns |= metrics
        columns |= {
            "loss": metrics["unweighted_loss"],
            "divergence": metrics["unweighted_loss"] - metrics.get("task_loss", 0),
            "weighted_loss": loss.detach(),
            "k1": k1,
            "k3": torch.expm1(-k1) + k1,
        }
        return loss, columns

    def _rows_of(self, data: Mapping[str, Tensor], rows: Rows, row_domains: HostRows | None) -> dict[str, Tensor]:
        """Return some rows of the data, and where teachers send hidden states their logits of these rows."""
        own = {name: rows.of(value) for name, value in data.items()}
        if self._heads is not None and row_domains is not None:
            own["teacher_logits"] = self._heads.logits(own[HIDDEN_FIELD], row_domains[rows.low : rows.high])
        return own

    def _look_at(
        self, data: Mapping[str, Tensor], logits: Tensor, rows: Rows, *, row_domains: HostRows | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return ``_look`` at some rows, as ``linear_loss`` wants it."""
        seen = self._look(logits, self._rows_of(data, rows, row_domains))
        return seen["score"], seen

    @property
    def _seen(self) -> tuple[str, ...]:
        return SEEN if self._has_support else tuple(name for name in SEEN if name != "student_mass")

    @torch.no_grad()
    def _look(self, logits: Tensor, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return ``_seen`` of rows, before it is known which of them count: one pass over the logits more. The
        divergence is the forward KL of the ids that the teacher gave, or of the whole vocabulary."""
        assert self._largest is not None
        by_entropy = self._largest.largest == "student_entropy"
        options = {**self._options, "target": own["targets"], "loss_weight": own["weights"]}
        if self._has_support:
            ids, logprobs = own["teacher_ids"], own["teacher_logprobs"]
            options |= {"teacher_weights": own.get("teacher_weights")}
        else:  # the entropy needs no teacher: the sampled token alone stands for its ids
            ids, logprobs = (own[name].unsqueeze(1) for name in ("targets", TOKEN_FIELD))
        if by_entropy or self._has_support:
            _, metrics = parallel_topk_distill(logits.detach(), ids, logprobs, with_entropy=by_entropy, **options)
        else:
            _, metrics = parallel_full_distill(logits.detach(), own["teacher_logits"], **options)
        metrics["score"] = metrics["entropy" if by_entropy else "unweighted_loss"]
        return {name: metrics[name] for name in self._seen}

    def _diagnostics(self, logits: Tensor, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the expensive metrics [R], without gradient."""
        weights, logits = own["weights"], logits.detach()
        ids = own["teacher_ids"] if self._has_support else own["targets"][:, None]
        overlaps, masses = [], []
        for ids_RK in ids.unbind(1) if "teacher_weights" in own and self._has_support else (ids,):
            entropy, overlap = parallel_entropy_and_topk_overlap(logits, ids_RK, loss_weight=weights, **self._options)
            overlaps.append(overlap)
            if self._has_support and not isinstance(self.loss, SUPPORT_LOSSES):
                logprobs, _ = parallel_gather_logprobs(logits, ids_RK, loss_weight=weights, **self._options)
                masses.append(logprobs.exp().sum(-1))
        if not self._has_support:
            return {"entropy": entropy}
        columns = {"entropy": entropy, "topk_overlap": _mean_of_teachers(own, overlaps)}
        return columns | ({"student_mass": _mean_of_teachers(own, masses)} if masses else {})

    def _loss_rows(self, logits: Tensor, own: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return weighted losses [R] and metrics [R] from the loss's own function."""
        loss = self.loss
        options = {**self._options, "loss_weight": own["weights"], "overwrite_input": logits.requires_grad}
        if self._correction is not None and self._correction.of_tokens is not None:
            options |= {"rollout_logprobs": own["rollout_logprobs"], "correction": self._correction.of_tokens}
        if isinstance(loss, CustomLossConfig):
            return self._custom_rows(logits, own, loss, options)
        if not isinstance(loss, KLLossConfig) and loss.task_reward_weight:
            options |= {"task_advantage": own["task_advantage"], "task_reward_weight": loss.task_reward_weight}
        if isinstance(loss, FullLossConfig):
            return self._full_rows(logits, own, loss, options)
        if self._has_chunks:
            task = options.get("task_reward_weight", 0) * own.get("task_advantage", 0)
            options |= {"task_advantage": task + own["chunk_advantage"], "task_reward_weight": 1.0}
        if isinstance(loss, TopKLossConfig):
            return parallel_topk_distill(
                logits,
                own["teacher_ids"],
                own["teacher_logprobs"],
                loss=loss.type.removeprefix("topk_"),
                tail=loss.resolved_tail,
                beta=loss.beta,
                logprob_min_clamp=loss.logprob_min_clamp,
                loss_max_clamp=loss.loss_max_clamp,
                loss_soft_cap=loss.loss_soft_cap,
                entry_max_clamp=loss.entry_max_clamp,
                target=own["targets"],
                target_logprobs=own[TOKEN_FIELD] if loss.tail == "sampled" else None,
                teacher_weights=own.get("teacher_weights"),
                **options,
            )
        teacher = own["teacher_token_logprobs"]
        if isinstance(loss, KLLossConfig):
            return parallel_sampled_kl(
                logits, own["targets"], teacher, loss.type, loss_max_clamp=loss.loss_max_clamp, **options
            )
        if loss.baseline == "kl":
            options |= {"topk_ids": own["teacher_ids"], "topk_logprobs": own["teacher_logprobs"]}
            options["topk_weights"] = own.get("teacher_weights")
        elif loss.baseline == "domain":
            options["baseline"] = own["baseline"]
        return parallel_policy_gradient(
            logits,
            own["targets"],
            teacher,
            old_logprobs=own["rollout_logprobs"] if loss.old_logprobs == "rollout" else None,
            clip_ratio_low=loss.clip_ratio_low,
            clip_ratio_high=loss.clip_ratio_high,
            dual_clip=loss.dual_clip,
            **options,
        )

    def _full_rows(
        self, logits: Tensor, own: Mapping[str, Tensor], loss: FullLossConfig, options: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return what ``_loss_rows`` does, over the whole vocabulary."""
        value, metrics = parallel_full_distill(
            logits,
            own["teacher_logits"],
            loss=loss.type.removeprefix("full_"),
            beta=loss.beta,
            skew=loss.skew,
            target=own["targets"],
            **options,
        )
        metrics["hidden_error"] = (metrics.pop("teacher_logprobs") - own[TOKEN_FIELD]).abs()
        return value, metrics

    def _custom_rows(
        self, logits: Tensor, own: Mapping[str, Tensor], loss: CustomLossConfig, options: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return what ``_loss_rows`` does, by a user's function."""
        assert self._custom is not None
        if loss.own_samples:
            options |= {"target_logprobs": own[TOKEN_FIELD], "rollout_logprobs": own["rollout_logprobs"]}
        ids, logprobs = own["teacher_ids"], own["teacher_logprobs"]
        return parallel_custom_loss(logits, ids, logprobs, self._custom[0], target=own["targets"], **options)


def _mean_of_teachers(own: Mapping[str, Tensor], per_teacher: Sequence[Tensor]) -> Tensor:
    """Return the weighted mean [R] of one [R] per teacher."""
    return _over_teachers(own, torch.stack([*per_teacher], dim=-1) if "teacher_weights" in own else per_teacher[0])


def _over_teachers(own: Mapping[str, Tensor], values: Tensor) -> Tensor:
    """Return the weighted mean [R] over an ensemble's teachers of [R, D]; without an ensemble ``values`` [R] itself."""
    weights = own.get("teacher_weights")
    return values if weights is None else (weights * values).sum(-1)
