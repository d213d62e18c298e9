"""Argument checks. Shapes and dtypes are always checked, values on request only, because that waits for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mopd.losses.divergences import LOSSES, TAILS

MASS_LIMIT = 1 + 1e-4
"""Largest teacher mass that is taken for rounding."""
SAMPLED_TAIL = "sampled"
"""The tail that is no function of S alone."""
BACKENDS = ("auto", "reference", "chunked", "triton")
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def check_logits(inp: Tensor, temperature: float, backend: str, overwrite_input: bool, world_size: int) -> None:
    """Check the logits and the options that every function of this package takes."""
    if inp.dim() not in (2, 3) or inp.dtype not in FLOATS or inp.size(-1) == 0:
        raise ValueError(f"inp is {inp.dtype} {list(inp.shape)}: pass float logits [T, V/tp] or [S, B, V/tp]")
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}: set it above 0")
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}: choose one of {', '.join(BACKENDS)}")
    if overwrite_input and not inp.is_contiguous():
        raise ValueError(
            f"overwrite_input needs contiguous logits, inp {list(inp.shape)} has strides {inp.stride()}: unset it"
        )
    if backend == "reference" and (world_size > 1 or overwrite_input):
        raise ValueError("backend 'reference' has no tensor parallelism and no overwrite_input: set 'chunked'")


def check_rows(name: str, value: Tensor, rows: Sequence[int], kind: str) -> None:
    """Check a tensor with one number per row; ``kind`` is 'int' or 'float'."""
    good = value.dtype in (torch.int32, torch.int64) if kind == "int" else value.dtype in (torch.float32, torch.float64)
    if list(value.shape) != list(rows) or not good:
        want = "int32 or int64" if kind == "int" else "float32 or float64"
        raise ValueError(f"{name} is {value.dtype} {list(value.shape)}: pass {want} {list(rows)}, the rows of inp")


def check_columns(name: str, value: Tensor, rows: Sequence[int], kind: str) -> None:
    """Check a tensor with a few numbers per row: its leading dims must be the rows of the logits."""
    if value.dim() <= len(rows):
        raise ValueError(f"{name} is {list(value.shape)}: pass {list(rows)} followed by the top-k dimension")
    if 0 in value.shape[len(rows) :]:
        raise ValueError(f"{name} is {list(value.shape)}: K must be at least 1")
    check_rows(name, value.flatten(len(rows))[..., 0], rows, kind)


def check_choice(loss: str, tail: str, beta: float) -> None:
    """Check the names of loss and tail, and the mixture weight."""
    if loss not in LOSSES:
        raise ValueError(f"loss is {loss!r}: choose one of {', '.join(LOSSES)}")
    if tail not in (*TAILS, SAMPLED_TAIL):
        raise ValueError(f"tail is {tail!r}: choose one of {', '.join((*TAILS, SAMPLED_TAIL))}")
    if not 0 <= beta <= 1:
        raise ValueError(f"beta is {beta}: set it between 0 and 1")


def check_sampled_tail(loss: str, target: Tensor | None, target_logprobs: Tensor | None, per_row: int) -> None:
    """Check what ``tail: sampled`` needs; ``per_row`` dimensions follow the rows in the teachers' ids."""
    if loss != "reverse_kl":
        raise ValueError(f"tail is 'sampled' and loss {loss!r}: samples of the student estimate reverse_kl alone")
    if target is None or target_logprobs is None or per_row != 1:
        raise ValueError("tail 'sampled' needs target, target_logprobs, and ids [rows, K] of one teacher: pass them")


def check_caps(
    logprob_min_clamp: float | None,
    loss_max_clamp: float | None,
    loss_soft_cap: float | None,
    entry_max_clamp: float | None = None,
) -> None:
    """Check clamps and caps."""
    if logprob_min_clamp is not None and logprob_min_clamp >= 0:
        raise ValueError(f"logprob_min_clamp is {logprob_min_clamp}: log-probs are negative, set for example -10")
    caps = {"loss_max_clamp": loss_max_clamp, "loss_soft_cap": loss_soft_cap, "entry_max_clamp": entry_max_clamp}
    for name, value in caps.items():
        if value is not None and not value > 0:
            raise ValueError(f"{name} is {value}: set it above 0")
    if loss_max_clamp is not None and loss_soft_cap is not None:
        raise ValueError("loss_max_clamp and loss_soft_cap are both set: keep one")


def check_teacher(rows: Sequence[int], ids: Tensor, logprobs: Tensor, weights: Tensor | None, vocab_size: int) -> None:
    """Check the shapes of the teachers' top-k."""
    check_columns("teacher_ids", ids, rows, "int")
    if ids.dim() > len(rows) + 2 or ids.shape != logprobs.shape:
        raise ValueError(
            f"teacher_ids is {list(ids.shape)} and teacher_logprobs {list(logprobs.shape)}: "
            f"pass both as {list(rows)} + [K] or + [D, K]"
        )
    check_columns("teacher_logprobs", logprobs, rows, "float")
    if not 1 <= ids.size(-1) <= vocab_size:
        raise ValueError(f"teacher_ids is {list(ids.shape)}: K must lie between 1 and the vocabulary size {vocab_size}")
    several = ids.dim() == len(rows) + 2
    if several and weights is None and ids.size(-2) > 1:
        raise ValueError(
            f"teacher_ids {list(ids.shape)} holds several teachers: pass teacher_weights {list(ids.shape[:-1])}"
        )
    if weights is not None:
        want = list(ids.shape[:-1]) if several else [*rows, 1]
        if list(weights.shape) != want or weights.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"teacher_weights is {weights.dtype} {list(weights.shape)}: pass float32 {want}")


def check_teacher_values(ids_TDK: Tensor, logprobs_TDK: Tensor, live_TDK: Tensor, vocab_size: int) -> None:
    """Check the numbers of the teachers' top-k on rows with weight. Waits for the device."""
    listed = live_TDK & (logprobs_TDK != -torch.inf)
    if bool((listed & (ids_TDK < 0)).any()):
        raise ValueError(f"teacher_ids holds {int(ids_TDK[listed].min())}: ids start at 0")
    wrong = listed & (logprobs_TDK.isnan() | (logprobs_TDK == torch.inf))
    if bool(wrong.any()):
        raise ValueError(
            f"teacher_logprobs holds {float(logprobs_TDK[wrong][0])} ({int(wrong.sum())} times): pass log-probs <= 0"
        )
    inside = listed & (ids_TDK < vocab_size)
    mass = float(torch.where(inside, logprobs_TDK.double().exp(), 0).sum(-1).max()) if inside.numel() else 0.0
    if mass > MASS_LIMIT:
        raise ValueError(
            f"teacher_logprobs sum to a mass of {mass:.6g}: at most {MASS_LIMIT} is rounding; normalise them"
        )
    order = torch.where(inside, ids_TDK, -1).sort(-1).values
    if bool(((order[..., 1:] == order[..., :-1]) & (order[..., 1:] >= 0)).any()):
        raise ValueError("teacher_ids lists one id twice for the same teacher and row: pass each id once")


def check_targets(
    target_T: Tensor, teacher_logprobs_T: Tensor | None, active_T: Tensor | None, vocab_size: int
) -> None:
    """Check the sampled tokens on rows with weight. Waits for the device."""
    live = torch.ones_like(target_T, dtype=torch.bool) if active_T is None else active_T
    wrong = live & ((target_T < 0) | (target_T >= vocab_size))
    if bool(wrong.any()):
        raise ValueError(f"target holds {int(target_T[wrong][0])}: ids lie between 0 and {vocab_size - 1}")
    if teacher_logprobs_T is not None:
        bad = live & (teacher_logprobs_T.isnan() | (teacher_logprobs_T == torch.inf))
        if bool(bad.any()):
            raise ValueError(f"teacher_logprobs holds {float(teacher_logprobs_T[bad][0])}: pass log-probs <= 0")


def check_full(loss: str, beta: float, skew: float) -> None:
    """Check the choice of a full-vocabulary divergence."""
    check_choice(loss, "none", beta)
    if not 0 <= skew < 1:
        raise ValueError(f"skew is {skew}: set at least 0 and less than 1")
    if skew > 0 and loss == "jsd":
        raise ValueError(f"skew is {skew} and loss 'jsd', whose mixture is beta's: set skew 0")
