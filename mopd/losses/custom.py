"""A loss that its user writes, on vocab-parallel logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from mopd.losses import checks
from mopd.losses.api import Metrics, Shared, open_call
from mopd.losses.chunked.custom import RowFunction, SampledTokens, custom_rows
from mopd.losses.topk import teacher_rows

if TYPE_CHECKING:
    from typing_extensions import Unpack


def parallel_custom_loss(
    inp: Tensor,
    teacher_ids: Tensor,
    teacher_logprobs: Tensor,
    function: RowFunction,
    *,
    target: Tensor,
    target_logprobs: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    reduce_loss: bool = False,
    **shared: Unpack[Shared],
) -> tuple[Tensor, Metrics]:
    """Compute a loss from a function of ``TopKRows``, which sees each row's log-probs and never a shard of the logits.

    One pass over the logits and one collective in forward, one pass in backward, whatever the function computes. The
    chunked layer serves all backends.

    Args:
        inp: student logits; see ``mopd.losses.api``, as for all arguments not named here.
        teacher_ids: int32 or int64 ``[rows, K]``, as of ``parallel_topk_distill``; of one teacher.
        teacher_logprobs: fp32 or float64, same shape. Entries of -inf are no ids of the row.
        function: rows -> losses ``[R]``, or losses and a mapping of numbers ``[R]`` by name. It must treat rows
            independently, leave its inputs as they are, and hold no collective.
        target: int64 ``[rows]``, the sampled token.
        target_logprobs: fp32 ``[rows]``, the teacher's log-prob of ``target``. Given with ``rollout_logprobs``, the
            function sees the three log-probs of the sampled token; else it sees none.
        rollout_logprobs: fp32 ``[rows]``, the sampler's.

    Returns:
        loss ``[rows]`` (or the sum) and metrics ``[rows]``: ``unweighted_loss``, ``teacher_mass``, ``student_mass``,
        ``student_logprobs``, and the function's own as ``custom_NAME``.

    Raises:
        LossProblem: a ValueError; the function returns no loss of the rows, in words that follow its name.
    """
    call = open_call(inp, **shared)
    checks.check_teacher(call.rows, teacher_ids, teacher_logprobs, None, call.shard.vocab_size)
    if teacher_ids.dim() != len(call.rows) + 1:
        raise ValueError(f"teacher_ids is {list(teacher_ids.shape)}: pass {list(call.rows)} + [K], of one teacher")
    if (target_logprobs is None) != (rollout_logprobs is None):
        raise ValueError("one of target_logprobs and rollout_logprobs is None: pass both, or neither")
    sampled = None
    if target_logprobs is not None and rollout_logprobs is not None:
        sampled = SampledTokens(
            call.logprobs("target_logprobs", target_logprobs),
            call.logprobs("rollout_logprobs", rollout_logprobs, sampled=True),
        )
    teacher = teacher_rows(call, teacher_ids, teacher_logprobs, None, target)
    row_loss, metrics = custom_rows(inp, call, function, teacher, sampled)
    return call.finish(row_loss, metrics, reduce_loss)
