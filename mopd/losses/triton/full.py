# mypy: disable-error-code="no-untyped-def"
"""The passes of full-vocabulary divergences as kernels: each logit of both sides is read once a pass.

What is computed, and the collectives between the passes, is in ``mopd.losses.chunked.full``. All arithmetic is fp32 on
loaded values.

Shape legend: T rows, V columns of this rank, B columns of a tile, one a lane.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from mopd.losses.call import LossCall
from mopd.losses.chunked.full import FullLoss, FullPasses, FullStats
from mopd.losses.triton.functions import on_device
from mopd.losses.triton.launches import layout, power_of_two
from mopd.losses.triton.streaming import FAR, LOWEST, MINUS_INFINITY, row_of

FORWARD: tl.constexpr = tl.constexpr(0)
REVERSE: tl.constexpr = tl.constexpr(1)
JSD: tl.constexpr = tl.constexpr(2)
SKEWED_FORWARD: tl.constexpr = tl.constexpr(3)
SKEWED_REVERSE: tl.constexpr = tl.constexpr(4)
BLOCK = 1024
"""Columns of a tile: eight a lane."""
NUM_WARPS = 4


@triton.jit
def _moved(total, cross, by, by_other):
    """Return sum of exponentials and cross sum after the peaks of both sides rose by ``-by`` and ``-by_other``."""
    shrink = tl.exp(by)
    difference = tl.maximum(by, FAR) - tl.maximum(by_other, FAR)  # not 0 * -inf where nothing was summed yet
    return total * shrink, shrink * (cross + total * difference)


@triton.jit
def first_kernel(
    z_ptr, t_ptr, weight_ptr, stats_ptr, inner, stride_a, stride_b, stride_v, t_stride, t_stride_v,
    num_columns, width, scale, FORM: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Write the five numbers of a row, online and lane by lane. Grid: T."""
    row = tl.program_id(0)
    active = True
    if weight_ptr is not None:
        active = tl.load(weight_ptr + row) != 0
    if active:
        z, t = row_of(z_ptr, row, inner, stride_a, stride_b, 0), t_ptr + row.to(tl.int64) * t_stride
        lane = tl.arange(0, B)
        peak, t_peak = tl.full([B], LOWEST, tl.float32), tl.full([B], LOWEST, tl.float32)
        total, t_total, cross = tl.zeros([B], tl.float32), tl.zeros([B], tl.float32), tl.zeros([B], tl.float32)
        for begin in range(0, num_columns, B):
            column = (begin + lane).to(tl.int64)
            inside = column < num_columns
            # Padding is read too: the width is a multiple of 16 bytes where the true vocabulary is not.
            x = tl.load(z + column * stride_v, mask=column < width, other=0.0).to(tl.float32) * scale
            y = tl.load(t + column * t_stride_v, mask=column < width, other=0.0).to(tl.float32) * scale
            new, t_new = tl.where(inside, tl.maximum(peak, x), peak), tl.where(inside, tl.maximum(t_peak, y), t_peak)
            by, t_by = peak - new, t_peak - t_new
            if FORM == FORWARD:
                t_total, cross = _moved(t_total, cross, t_by, by)
                total *= tl.exp(by)
            else:
                total, cross = _moved(total, cross, by, t_by)
                t_total *= tl.exp(t_by)
            dx, dy = x - new, y - t_new
            ex, ey = tl.where(inside, tl.exp(dx), 0.0), tl.where(inside, tl.exp(dy), 0.0)
            total, t_total = total + ex, t_total + ey
            term = ey * (dy - dx) if FORM == FORWARD else ex * (dx - dy)
            cross += tl.where(inside, term, 0.0)
            peak, t_peak = new, t_new
        top, t_top = tl.max(peak, 0), tl.max(t_peak, 0)
        if FORM == FORWARD:
            t_total, cross = _moved(t_total, cross, t_peak - t_top, peak - top)
            total *= tl.exp(peak - top)
        else:
            total, cross = _moved(total, cross, peak - top, t_peak - t_top)
            t_total *= tl.exp(t_peak - t_top)
        out = stats_ptr + row.to(tl.int64) * 5
        # A shard of padding alone: the peak is -inf, not the value that the search started from.
        tl.store(out, top if num_columns > 0 else MINUS_INFINITY)
        tl.store(out + 1, tl.sum(total, 0))
        tl.store(out + 2, t_top if num_columns > 0 else MINUS_INFINITY)
        tl.store(out + 3, tl.sum(t_total, 0))
        tl.store(out + 4, tl.sum(cross, 0))


@triton.jit
def _log_probs(z, t, column, width, stride_v, t_stride_v, scale, numbers, num_rows):
    """Return log-probs of student and teacher at ``column`` [B], whatever padding holds."""
    x = tl.load(z + column * stride_v, mask=column < width, other=0.0).to(tl.float32) * scale
    y = tl.load(t + column * t_stride_v, mask=column < width, other=0.0).to(tl.float32) * scale
    log_p = (x - tl.load(numbers)) - tl.load(numbers + num_rows)
    log_q = (y - tl.load(numbers + 2 * num_rows)) - tl.load(numbers + 3 * num_rows)
    return log_p, log_q


@triton.jit
def _log_mixture(log_p, log_q, log_own, log_theirs):
    """Return log(exp(log_p + log_own) + exp(log_q + log_theirs))."""
    a, b = log_p + log_own, log_q + log_theirs
    high = tl.maximum(a, b)
    return high + tl.log(1.0 + tl.exp(tl.minimum(a, b) - high))


@triton.jit
def second_kernel(
    z_ptr, t_ptr, weight_ptr, numbers_ptr, sums_ptr, num_rows,
    inner, stride_a, stride_b, stride_v, t_stride, t_stride_v,
    num_columns, width, scale, share, log_own, log_theirs,
    FORM: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Write a row's part of the divergence and of ``sum p phi``. Grid: T."""
    row = tl.program_id(0)
    active = True
    if weight_ptr is not None:
        active = tl.load(weight_ptr + row) != 0
    if active:
        z, t = row_of(z_ptr, row, inner, stride_a, stride_b, 0), t_ptr + row.to(tl.int64) * t_stride
        value, mean = tl.zeros([B], tl.float32), tl.zeros([B], tl.float32)
        for begin in range(0, num_columns, B):
            column = (begin + tl.arange(0, B)).to(tl.int64)
            inside = column < num_columns
            log_p, log_q = _log_probs(z, t, column, width, stride_v, t_stride_v, scale, numbers_ptr + row, num_rows)
            mixture = _log_mixture(log_p, log_q, log_own, log_theirs)
            p, q = tl.exp(log_p), tl.exp(log_q)
            if FORM == JSD:
                phi = (1 - share) * (log_p - mixture)
                term = share * q * (log_q - mixture) + p * phi
            elif FORM == SKEWED_FORWARD:
                phi = (share - 1) * tl.exp(log_q - mixture)
                term = q * (log_q - mixture)
            else:
                ratio = log_p - mixture
                phi = ratio - (1 - share) * tl.exp(ratio)
                term = p * ratio
            value += tl.where(inside, term, 0.0)
            mean += tl.where(inside, p * phi, 0.0)
        out = sums_ptr + row.to(tl.int64) * 2
        tl.store(out, tl.sum(value, 0))
        tl.store(out + 1, tl.sum(mean, 0))


@triton.jit
def gradient_kernel(
    z_ptr, t_ptr, upstream_ptr, numbers_ptr, pull_ptr, column_ptr, out_ptr, num_rows,
    inner, stride_a, stride_b, stride_v, out_inner, out_stride_a, out_stride_b, out_stride_v, t_stride, t_stride_v,
    num_columns, width, tiles, scale, share, log_own, log_theirs, FORM: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Write ``upstream p (phi - sum p phi)``, and ``upstream pull`` more at a row's ``column``; 0 in padding and where
    upstream is 0. Grid: T * tiles. ``out`` may be ``z``: a program reads and writes its own tile only."""
    pid = tl.program_id(0)
    row = pid // tiles
    column = ((pid % tiles) * B + tl.arange(0, B)).to(tl.int64)
    inside = column < num_columns
    out = row_of(out_ptr, row, out_inner, out_stride_a, out_stride_b, 0) + column * out_stride_v
    upstream = tl.load(upstream_ptr + row)
    gradient = tl.zeros([B], tl.float32)
    if upstream != 0:
        z, t = row_of(z_ptr, row, inner, stride_a, stride_b, 0), t_ptr + row.to(tl.int64) * t_stride
        log_p, log_q = _log_probs(z, t, column, width, stride_v, t_stride_v, scale, numbers_ptr + row, num_rows)
        p, mean = tl.exp(log_p), tl.load(numbers_ptr + 4 * num_rows + row)
        if FORM == FORWARD:
            gradient = -mean * p - tl.exp(log_q)
        else:
            if FORM == REVERSE:
                phi = log_p - log_q
            else:
                mixture = _log_mixture(log_p, log_q, log_own, log_theirs)
                if FORM == JSD:
                    phi = (1 - share) * (log_p - mixture)
                elif FORM == SKEWED_FORWARD:
                    phi = (share - 1) * tl.exp(log_q - mixture)
                else:
                    phi = (log_p - mixture) - (1 - share) * tl.exp(log_p - mixture)
            gradient = p * (phi - mean)
        if pull_ptr is not None:
            gradient += tl.where(column == tl.load(column_ptr + row), tl.load(pull_ptr + row), 0.0)
        gradient = tl.where(inside, upstream * gradient, 0.0)
    tl.store(out, gradient.to(out_ptr.dtype.element_ty), mask=column < width)


def _form(kind: FullLoss) -> int:
    """Return the kernels' number of a form."""
    if kind.loss == "jsd":
        return int(JSD.value)
    plain, skewed = (FORWARD, SKEWED_FORWARD) if kind.loss == "forward_kl" else (REVERSE, SKEWED_REVERSE)
    return int((skewed if kind.is_mixed else plain).value)


def _shares(kind: FullLoss) -> tuple[float, float, float]:
    """Return the teacher's weight in the mixture, and the logs of the student's and the teacher's; 0 without one."""
    share = kind.teacher_share
    return (share, math.log1p(-share), math.log(share)) if kind.is_mixed else (0.0, 0.0, 0.0)


def _numbers(stats: FullStats) -> Tensor:
    """Return ``[5, T]``: peak and log-sum of student and teacher, and ``sum p phi``."""
    parts = stats.peak, stats.log_sum, stats.teacher_peak, stats.teacher_log_sum, stats.mean_phi
    return torch.stack(parts).float()


def _address(x: Tensor) -> tuple[int, int, int, int]:
    """Return ``inner`` and the strides of ``row_of``, and that of columns."""
    at = layout(x)
    return at.inner, at.stride_a, at.stride_b, at.stride_v


def _first(inp: Tensor, teacher_TV: Tensor, kind: FullLoss, call: LossCall) -> Tensor:
    rows, n = teacher_TV.size(0), call.shard.num_columns
    stats_TS = inp.new_zeros(rows, 5, dtype=torch.float32)
    with on_device(inp):
        first_kernel[(rows,)](
            inp, teacher_TV, call.weight_T, stats_TS, *_address(inp), *teacher_TV.stride(),
            n, inp.size(-1), 1 / call.temperature,
            FORM=_form(kind), B=min(BLOCK, power_of_two(inp.size(-1))), num_warps=NUM_WARPS,
        )  # fmt: skip
    return stats_TS


def _second(inp: Tensor, teacher_TV: Tensor, kind: FullLoss, stats: FullStats, call: LossCall) -> Tensor:
    rows, n = teacher_TV.size(0), call.shard.num_columns
    sums_T2 = inp.new_zeros(rows, 2, dtype=torch.float32)
    with on_device(inp):
        second_kernel[(rows,)](
            inp, teacher_TV, call.weight_T, _numbers(stats), sums_T2, rows,
            *_address(inp), *teacher_TV.stride(), n, inp.size(-1), 1 / call.temperature, *_shares(kind),
            FORM=_form(kind), B=min(BLOCK, power_of_two(inp.size(-1))), num_warps=NUM_WARPS,
        )  # fmt: skip
    return sums_T2


def _gradient(
    inp: Tensor, out: Tensor, teacher_TV: Tensor, kind: FullLoss, stats: FullStats, upstream_T: Tensor, call: LossCall
) -> None:
    rows, width, n = teacher_TV.size(0), inp.size(-1), call.shard.num_columns
    block = min(BLOCK, power_of_two(width))
    tiles = triton.cdiv(width, block)
    pull = None if stats.pull is None else stats.pull.float().contiguous()
    column = None if stats.column is None else stats.column.int()
    with on_device(inp):
        gradient_kernel[(rows * tiles,)](
            inp, teacher_TV, upstream_T.float().contiguous(), _numbers(stats), pull, column, out, rows,
            *_address(inp), *_address(out), *teacher_TV.stride(), n, width, tiles, 1 / call.temperature,
            *_shares(kind), FORM=_form(kind), B=block, num_warps=NUM_WARPS,
        )  # fmt: skip


TRITON = FullPasses(_first, _second, _gradient)
