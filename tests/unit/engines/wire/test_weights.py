"""Weights cut into chunks and put together again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from mopd.engines.wire.limits import MAX_CHUNK_BYTES, MAX_CHUNK_PIECES
from mopd.engines.wire.messages import WireError, decode, encode
from mopd.engines.wire.weights import (
    Staging,
    TensorLedger,
    WeightChunk,
    WeightCommit,
    cut,
)


def weights() -> dict[str, Tensor]:
    """Every dtype that travels, scalars, empty tensors, views, and one tensor larger than a chunk."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(300, 200, generator=generator)
    return {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "transposed": matrix.t(),
        "bfloat16": matrix[:7].bfloat16(),
        "float8": matrix[:5].to(torch.float8_e4m3fn),
        "int8": torch.arange(-5, 5, dtype=torch.int8),
        "large": torch.randn(5000, generator=generator),
        "last": matrix[3],
    }


def chunks(source: dict[str, Tensor], ledger: TensorLedger, data_bytes: int) -> list[WeightChunk]:
    made = []
    for index, (pieces, data) in enumerate(cut(source.items(), ledger, data_bytes=data_bytes)):
        assert len(data) <= data_bytes
        made.append(WeightChunk(update_id="u", index=index, pieces=pieces, data=data))
    return [decode(encode(chunk), WeightChunk) for chunk in made]


def commit(ledger: TensorLedger) -> WeightCommit:
    return WeightCommit(update_id="u", num_tensors=ledger.num_tensors, digest=ledger.digest, on_running="finish")


@pytest.mark.parametrize("data_bytes", [997, 4096, 10**7])
def test_cut_and_put_together(data_bytes: int) -> None:
    ledger, staging = TensorLedger(), Staging(weights(), "u")
    for chunk in chunks(weights(), ledger, data_bytes):
        staging.add(chunk)
    back = staging.finish(commit(ledger))
    assert list(back) == list(weights())
    for name, tensor in weights().items():
        assert back[name].dtype == tensor.dtype and back[name].shape == tensor.shape
        assert torch.equal(back[name].float(), tensor.float())


def test_a_chunk_is_the_senders_own_memory() -> None:
    """The stream may reuse its tensor as soon as it is asked for the next one."""

    def stream() -> Iterator[tuple[str, Tensor]]:
        buffer = torch.zeros(4)
        for number in range(3):
            buffer.fill_(number)
            yield f"w{number}", buffer

    ((_, data),) = cut(stream(), TensorLedger())
    assert torch.frombuffer(data, dtype=torch.float32).tolist() == [0] * 4 + [1] * 4 + [2] * 4


def test_bodies_stay_within_the_limit() -> None:
    """64 MiB, frame and head included, for one large tensor and for many small ones with long names."""
    many = {f"{'n' * 240}{i}": torch.zeros(1) for i in range(MAX_CHUNK_PIECES + 5)}
    for source in ({"large": torch.zeros(2**24 + 99)}, many):
        bodies = [
            encode(WeightChunk(update_id="u" * 64, index=i, pieces=pieces, data=data))
            for i, (pieces, data) in enumerate(cut(source.items(), TensorLedger()))
        ]
        assert len(bodies) == 2
        assert max(map(len, bodies)) <= MAX_CHUNK_BYTES


def test_what_does_not_travel() -> None:
    with pytest.raises(ValueError, match="complex64"):
        list(cut([("w", torch.zeros(1, dtype=torch.complex64))], TensorLedger()))
    with pytest.raises(ValueError, match="longer than 256"):
        list(cut([("w" * 300, torch.zeros(1))], TensorLedger()))


def test_an_incomplete_update_is_refused() -> None:
    ledger = TensorLedger()
    made = chunks(weights(), ledger, 997)
    for missing in (1, len(made) - 1):
        staging = Staging(weights(), "u")
        with pytest.raises(WireError, match=r"was due|incomplete|arrived"):
            for chunk in [*made[:missing], *made[missing + 1 :]]:
                staging.add(chunk)
            staging.finish(commit(ledger))
    staging = Staging({"a": torch.zeros(2)}, "u")
    short = TensorLedger()
    for chunk in chunks({"a": torch.zeros(2)}, short, 997):
        staging.add(chunk)
    with pytest.raises(WireError, match="2 weights were sent but 1 arrived"):
        staging.finish(WeightCommit(update_id="u", num_tensors=2, digest=short.digest, on_running="finish"))
    with pytest.raises(WireError, match="or others"):
        staging.finish(WeightCommit(update_id="u", num_tensors=1, digest=b"other", on_running="finish"))


def test_a_tensor_that_comes_twice() -> None:
    staging = Staging({"a": torch.zeros(2)}, "u")
    (chunk,) = chunks({"a": torch.zeros(2)}, TensorLedger(), 997)
    staging.add(chunk)
    again = WeightChunk(update_id="u", index=1, pieces=chunk.pieces, data=chunk.data)
    with pytest.raises(WireError, match="'a' arrives twice"):
        staging.add(again)
    with pytest.raises(WireError, match="chunk 1 came when 2"):
        staging.add(again)


@pytest.mark.parametrize(
    ("piece", "problem"),
    [
        (("a", "float32", (2**20, 2**20), 0, 4), "has shape"),
        (("a", "float32", (), 0, 4), "has shape"),
        (("a", "int32", (4,), 0, 4), "has dtype int32"),
        (("b", "float32", (4,), 0, 4), "does not exist"),
        (("empty", "float32", (0, 7), 0, 0), "does not exist"),
        (("a", "float32", (4,), 4, 4), "at byte 4 came when byte 0"),
    ],
)
def test_only_the_models_own_weights_take_memory(piece: tuple[object, ...], problem: str) -> None:
    staging = Staging({"a": torch.zeros(4, dtype=torch.bfloat16)}, "u")
    data = torch.zeros(piece[4]).byte().numpy()  # type: ignore[call-overload]
    with pytest.raises(WireError, match=problem):
        staging.add(WeightChunk(update_id="u", index=0, pieces=(piece,), data=data))


@pytest.mark.parametrize(
    "piece",
    [
        ("a", "float32", (1,), 0),
        ("", "float32", (1,), 0, 4),
        ("a" * 300, "float32", (1,), 0, 4),
        (7, "float32", (1,), 0, 4),
        ("a", "complex64", (1,), 0, 4),
        ("a", "float32", 1, 0, 4),
        ("a", "float32", (-1,), 0, 4),
        ("a", "float32", (1.0,), 0, 4),
        ("a", "float32", (True,), 0, 4),
        ("a", "float32", (0, 2**62, 2**62), 0, 0),
        ("a", "float32", (1,), -4, 4),
        ("a", "float32", (1,), 1, 4),
        ("a", "float32", (1,), 0, 3),
    ],
)
def test_impossible_pieces(piece: tuple[object, ...]) -> None:
    chunk = WeightChunk(update_id="u", index=0, pieces=(piece,), data=torch.zeros(4).byte().numpy())
    with pytest.raises(WireError):
        decode(encode(chunk), WeightChunk)
