"""Where features of images stand among the embedded tokens. That they are right is ``tests/parity/student``'s."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mopd.student.model import gpt as multimodal
from mopd.student.model.gpt import with_images


def test_text_stays_as_it_is() -> None:
    embedded = torch.randn(4, 1, 2)
    tower: Any = None
    placed, deeper = with_images(embedded, tower, None, sequence_parallel=False)
    assert placed is embedded and deeper is None


@pytest.mark.parametrize("num_deeper", [0, 2])
def test_features_take_the_rows_of_their_tokens(num_deeper: int, monkeypatch: pytest.MonkeyPatch) -> None:
    embedded, features = torch.zeros(4, 1, 2), torch.ones(2, 2)
    deeper = [features * (10 + layer) for layer in range(num_deeper)]
    monkeypatch.setattr(multimodal, "image_features", lambda tower, images: (features, deeper))
    tower, images = None, SimpleNamespace(rows=torch.tensor([1, 3]))
    placed, context = with_images(embedded, tower, images, sequence_parallel=False)  # type: ignore[arg-type]
    assert placed[:, 0, 0].tolist() == [0, 1, 0, 1]
    if not num_deeper:
        assert context is None
    else:
        assert context is not None and context[:, :, 0, 0].tolist() == [[0, 10, 0, 10], [0, 11, 0, 11]]
