"""Tensors as frames: every dtype and shape comes back bit for bit, and bytes that are none are told."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mopd.conversion.mapped import TORCH_DTYPES
from mopd.data_plane.frames import OWN_FRAME_BYTES, FrameError, from_frames, packed, to_frames, unpacked


def fields() -> dict[str, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    values: dict[str, list[torch.Tensor]] = {}
    for name, dtype in TORCH_DTYPES.items():
        shapes = ((3,), (0,), (2, 0, 4), (5, 7), (), (OWN_FRAME_BYTES // 2, 3))
        raw = [torch.randint(0, 2, shape, generator=generator) for shape in shapes]
        values[name] = [value.to(dtype) for value in raw]
    values["no_sample"] = []
    values["nan"] = [torch.tensor([float("nan"), -0.0, float("inf")])]
    return values


def test_every_dtype_and_shape_comes_back_bit_for_bit() -> None:
    given = fields()
    head, frames = to_frames(given)
    for sent in (frames, [b"".join(frames)]):  # as they are, and end to end, where few are aligned
        got = from_frames(unpacked(packed(head)), sent)
        assert list(got) == list(given)
        for name, tensors in given.items():
            assert [(t.dtype, t.shape) for t in got[name]] == [(t.dtype, t.shape) for t in tensors]
            for one, other in zip(got[name], tensors, strict=True):
                assert torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def test_large_tensors_are_sent_from_where_they_lie_and_small_ones_share_a_frame() -> None:
    large = torch.zeros(OWN_FRAME_BYTES // 4)
    _, frames = to_frames({"a": [torch.ones(3), large, torch.ones(2)], "b": [torch.ones(1)]})
    assert [memoryview(frame).nbytes for frame in frames] == [12, OWN_FRAME_BYTES, 12]
    large += 1
    assert bytes(frames[1][:4]) == b"\x00\x00\x80\x3f"


def test_tensors_of_one_field_must_agree_in_dtype() -> None:
    with pytest.raises(KeyError, match=r"field 'a' mixes dtypes \['F32', 'I64'\]"):
        to_frames({"a": [torch.ones(1), torch.ones(1).long()]})


@pytest.mark.parametrize(
    ("head", "frames"),
    [
        ([["a", "I64", [[2]]]], [b"12345678"]),  # less than said
        ([["a", "I64", [[1]]]], [b"12345678", b"9"]),  # more
        ([["a", "I64", [[1]]]], []),
        ([["a", "object", [[1]]]], [b"12345678"]),
        ([["a", "I8", [[-1]]]], [b""]),
        ([["a", "I8", [[2**70]]]], [b"1"]),
        ([["a", "I8", [["1"]]]], [b"1"]),
        ([["a", "I8"]], [b""]),
        (7, []),
        ([[["a"], "I8", [[1]]]], [b"1"]),
    ],
)
def test_frames_that_are_no_tensors_are_told(head: Any, frames: list[bytes]) -> None:
    with pytest.raises(FrameError):
        from_frames(head, frames)


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x81", b"\x01\x02", b"\x91" * 10_000])
def test_a_head_that_is_no_msgpack_is_told(body: bytes) -> None:
    with pytest.raises(FrameError, match="not msgpack"):
        unpacked(body)
