"""Check that a teacher, asked through router, wire and engine, says what its own folder says.

The reference is the plainest computation there is: each probe prefix alone through a transformers forward, no padding,
no cache, no batch, and the last position's logits. It knows nothing of rows and shifts, so it tells a score of the
wrong position, a dropped token or another teacher apart from the right one.

Shapes: P probed positions of one sample, V vocabulary, K top-k.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mopd.base.types import PromptImage
from mopd.conversion.adapters import merge_adapter, read_adapter
from mopd.conversion.hf.head import OutputHead
from mopd.data.image_processor import ImageProcessor
from mopd.engines.torch.loading import load_model
from mopd.engines.vision import read_vision
from mopd.losses.api import parallel_topk_distill

MAX_PROBE_POSITIONS = 8
HEAD_ROWS = 16_384
"""Rows of an output matrix that are read at a time."""
BF16_ROUNDING = 2.0**-9
"""Largest relative error of a number that is rounded to bf16."""
REFERENCE_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """One sample as a teacher scored it."""

    tokens: Tensor
    """[L] int64."""
    prompt_length: int
    ids: Tensor | None
    """[R, K] int32; ``None`` where no rows of ids travel."""
    logprobs: Tensor | None
    """[R, K] fp32."""
    token_logprobs: Tensor | None
    """[R] fp32; ``None`` where an ensemble has merged them."""
    images: Sequence[PromptImage] = ()
    """Images of the prompt."""
    hidden: Tensor | None = None
    """[R, H] bf16; ``None`` where no hidden states travel."""

    @property
    def positions(self) -> list[int]:
        """The response positions that are looked at, the first and the last among them."""
        last = len(self.tokens) - self.prompt_length - 1
        return sorted({round(i * last / (MAX_PROBE_POSITIONS - 1)) for i in range(MAX_PROBE_POSITIONS)})

    def logprobs_by(self, head: OutputHead, temperature: float) -> Tensor:
        """Return the log-probs [P, V] fp32 that the output matrix makes of the hidden states."""
        assert self.hidden is not None, "only a teacher that sends them is asked about"
        own = self.hidden[self.positions].float()
        return (torch.cat([own @ part.T for part in _parts(head)], 1) / temperature).log_softmax(-1)

    def rounding_by(self, head: OutputHead, said_PV: Tensor, temperature: float) -> Tensor:
        """Return how far [P] fp32 the responses' log-probs are off, to first order, because the states were rounded to
        bf16: each channel by half a unit in the last place, in signs that do not agree. ``said_PV`` is what
        ``logprobs_by`` has said."""
        assert self.hidden is not None, "only a teacher that sends them is asked about"
        own_P = self.tokens[[self.prompt_length + p for p in self.positions]]
        slope_PH = torch.cat([head.rows(token, token + 1).float() for token in own_P.tolist()])
        for part, said in zip(_parts(head), said_PV.exp().split(HEAD_ROWS, 1), strict=True):
            slope_PH = slope_PH - said @ part
        slack_PH: Tensor = BF16_ROUNDING / temperature * self.hidden[self.positions].float() * slope_PH
        return slack_PH.square().sum(-1).sqrt()


def _parts(head: OutputHead) -> Iterator[Tensor]:
    for low in range(0, head.vocab_size, HEAD_ROWS):
        yield head.rows(low, low + HEAD_ROWS).float()


@dataclass(frozen=True, kw_only=True, slots=True)
class Parity:
    """Distance of a teacher's scores from its folder's."""

    kl: float
    """Mean KL(scores || folder) on the top-k and their tail, or over the vocabulary where hidden states travel, in
    nats: the floor of every KL measured with it."""
    mean_difference: float
    """Mean |log-prob difference| over all top-k entries and sampled tokens."""
    max_difference: float
    num_positions: int


class Reference:
    """A teacher's folder under transformers, on the CPU."""

    def __init__(self, folder: str, dtype: str, max_pixels: int | None = None, *, adapter: str | None = None) -> None:
        """Load the folder, and merge an ``adapter`` into it. ``dtype`` is the engine's, so that rounding of weights is
        no difference; ``max_pixels`` of an image as in ``read_image_processing``. ``UserError`` if it cannot be
        loaded."""
        chosen = dtype if dtype in REFERENCE_DTYPES else "float32"
        self._model = load_model(Path(folder), chosen, torch.device("cpu")).eval()
        if adapter is not None:
            self._model.load_state_dict(merge_adapter(self._model.state_dict(), read_adapter(adapter)), strict=False)
        self._sight = read_vision(Path(folder), max_pixels)
        self._folder = Path(folder)

    def logits(self, tokens: Tensor, images: Sequence[PromptImage] = ()) -> Tensor:
        """Return the logits [V] fp32 of what follows ``tokens`` [L], which hold the placeholders of ``images``."""
        seen = self._seen(tokens, images) if images else {}
        with torch.inference_mode():
            logits: Tensor = self._model(input_ids=tokens[None], use_cache=False, **seen).logits[0, -1]
        return logits.float().clone()

    def rows(self, tokens: Tensor, start: int, images: Sequence[PromptImage] = ()) -> Tensor:
        """Return the logits [R, V] fp32 of the response ``tokens[start:]`` [R] by one forward of all ``tokens`` [L]."""
        seen = self._seen(tokens, images) if images else {}
        with torch.inference_mode():
            logits: Tensor = self._model(input_ids=tokens[None], use_cache=False, **seen).logits[0, start - 1 : -1]
        return logits.float().clone()

    def _seen(self, tokens: Tensor, images: Sequence[PromptImage]) -> dict[str, Tensor]:
        """Return the images as arguments of transformers, which finds their places and positions itself."""
        assert self._sight is not None, "a teacher without vision gets no images"
        patches, grids = ImageProcessor(self._sight.processing).patches([image.load() for image in images])
        is_image = (tokens == self._sight.dims.image_token_id).long()
        patches = patches.to(self._model.dtype)
        return {"pixel_values": patches, "image_grid_thw": grids, "mm_token_type_ids": is_image[None]}

    def compare(self, probes: Sequence[Probe], *, temperature: float) -> Parity:
        """Compare all probes, at up to ``MAX_PROBE_POSITIONS`` response positions each, with the first and the last."""
        kls, differences = zip(*(self._compare(probe, temperature) for probe in probes), strict=True)
        kl, difference = torch.cat(kls), torch.cat(differences)
        return Parity(
            kl=kl.mean().item(),
            mean_difference=difference.mean().item(),
            max_difference=difference.max().item(),
            num_positions=kl.numel(),
        )

    def _compare(self, probe: Probe, temperature: float) -> tuple[Tensor, Tensor]:
        """Return the KL [P] and all |differences|, flat."""
        positions = probe.positions
        logits_PV = torch.stack([self.logits(probe.tokens[: probe.prompt_length + p], probe.images) for p in positions])
        expected_PV = (logits_PV / temperature).log_softmax(-1)
        differences, kl_P = list[Tensor](), torch.zeros(len(positions))
        if probe.ids is not None and probe.logprobs is not None:
            ids_PK, logprobs_PK = probe.ids[positions].long(), probe.logprobs[positions]
            kl_P, _ = parallel_topk_distill(
                logits_PV, ids_PK, logprobs_PK, loss="forward_kl", tail="bucket", temperature=temperature
            )
            listed = ids_PK < expected_PV.shape[1]  # a place without an id has one above every vocabulary
            expected_PK = expected_PV.gather(-1, ids_PK.where(listed, 0))
            differences.append((expected_PK - logprobs_PK)[listed].abs())
        if probe.hidden is not None:
            said_PV = probe.logprobs_by(OutputHead(self._folder), temperature)
            kl_P = (said_PV.exp() * (said_PV - expected_PV)).sum(-1)
        if probe.token_logprobs is not None:
            own_P = probe.tokens[[probe.prompt_length + p for p in positions]]
            expected_P = expected_PV.gather(-1, own_P[:, None]).squeeze(-1)
            differences.append((expected_P - probe.token_logprobs[positions]).abs())
        return kl_P, torch.cat(differences)


def head_difference(head: OutputHead, probes: Sequence[Probe], *, temperature: float) -> tuple[float, float]:
    """Return the mean |log-prob difference| of responses' tokens between what an engine has said of them and what the
    output matrix makes of its hidden states, and how much of it their rounding explains, which grows with the logits:
    a teacher that is sure of another token than the student's is off by more. Another matrix, or states of another
    place or layer, err by nats."""
    differences, roundings = list[Tensor](), list[Tensor]()
    for probe in probes:
        assert probe.token_logprobs is not None, "no ensemble sends hidden states"
        own_P = probe.tokens[[probe.prompt_length + p for p in probe.positions]]
        said_PV = probe.logprobs_by(head, temperature)
        found_P = said_PV.gather(1, own_P[:, None]).squeeze(1)
        differences.append((found_P - probe.token_logprobs[probe.positions]).abs())
        roundings.append(probe.rounding_by(head, said_PV, temperature))
    return torch.cat(differences).mean().item(), torch.cat(roundings).mean().item()
