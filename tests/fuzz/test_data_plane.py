"""What comes over the local data plane's socket: a reader's questions, a storage's heads and frames."""

from __future__ import annotations

import threading

import torch

from mopd.conversion.mapped import TORCH_DTYPES
from mopd.data_plane.frames import FrameError, from_frames, packed, to_frames, unpacked
from mopd.data_plane.local import SampleServer
from tests.fuzz.harness import fuzz

FIELDS = {
    "tokens": [torch.arange(5), torch.arange(4)],
    "loss_mask": [torch.ones(2, dtype=torch.bool), torch.zeros(0, dtype=torch.bool)],
    "teacher_logprobs": [torch.randn(2, 3), torch.randn(1, 3)],
}


def test_heads_and_frames() -> None:
    head, frames = to_frames(FIELDS)
    valid = packed({"number": 1, "fields": head, "frames": [bytes(frame) for frame in frames]})

    def read(body: bytes) -> None:
        given = unpacked(body)
        if not isinstance(given, dict) or given.keys() != {"number", "fields", "frames"}:
            raise FrameError("keys")
        if not isinstance(given["frames"], list) or not all(isinstance(frame, bytes) for frame in given["frames"]):
            raise FrameError("frames")
        for tensors in from_frames(given["fields"], given["frames"]).values():
            assert all(tensor.dtype in TORCH_DTYPES.values() for tensor in tensors)

    fuzz("data plane: heads and frames", [valid], read, (FrameError,))


def test_questions() -> None:
    server = SampleServer(lambda ids, names: {name: [torch.zeros(1)] * len(ids) for name in names}, host=None)
    valid = packed({"number": 1, "sample_ids": [1, 2**40, 3], "fields": ["tokens", "loss_mask"]})
    try:
        fuzz("data plane: questions", [valid], lambda body: server._answer([body]), (FrameError,))
        assert any(thread.name == "samples" and thread.is_alive() for thread in threading.enumerate())
    finally:
        server.close()
