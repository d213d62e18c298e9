"""A step in plain PyTorch, as one would write it on the transformers model: what the student is held against."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence

from mopd.bench.student.inputs import Samples
from mopd.config.student import OptimizerConfig
from mopd.conversion.hf.pretrained import load_weights


class PlainStep:
    """Forward KL on the teacher's top k and the rest as one outcome, mean over response tokens; clipping; Adam.

    ``per_forward`` samples pass the model at a time (all of them without a number). Weights, gradients and Adam's
    states are of ``dtype``; the loss is computed in fp32.
    """

    def __init__(
        self,
        folder: Path,
        samples: Samples,
        config: OptimizerConfig,
        device: torch.device,
        *,
        dtype: torch.dtype = torch.float32,
        per_forward: int | None = None,
    ) -> None:
        self.model, _ = load_weights(folder, dtype)
        self.model.train().to(device)
        self._device = device
        self._samples = samples
        self._clip_grad = config.clip_grad
        size = per_forward or len(samples.metas)
        self._parts = [slice(start, start + size) for start in range(0, len(samples.metas), size)]
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=config.lr,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
        )

    def __call__(self) -> tuple[float, float]:
        """One optimizer step; the loss, and the gradient's norm before clipping."""
        self._optimizer.zero_grad()
        num_rows = sum(meta.response_length for meta in self._samples.metas)
        total = torch.zeros((), device=self._device)
        for part in self._parts:
            loss = self._losses(part).sum() / num_rows
            loss.backward()
            total += loss.detach()
        norm = clip_grad_norm_(self.model.parameters(), self._clip_grad)
        self._optimizer.step()
        return total.item(), norm.item()

    def _losses(self, part: slice) -> Tensor:
        """[R] of the part's response tokens."""
        tokens, rows, teacher_ids, teacher_logprobs = self._batch(part)
        # Right padding and a causal model: no mask is needed.
        logits = self.model(input_ids=tokens, use_cache=False).logits
        logprobs = torch.log_softmax(logits.flatten(0, 1)[rows], -1, dtype=torch.float32).gather(1, teacher_ids)
        probs, kept = teacher_logprobs.exp(), logprobs.exp()
        rest, own_rest = 1 - probs.sum(1), 1 - kept.sum(1)
        return (probs * (teacher_logprobs - logprobs)).sum(1) + rest * (rest / own_rest).log()

    def _batch(self, part: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tokens [B, S], flat numbers [R] of the rows that score a response token, and the teacher's [R, K]."""
        fields = self._samples.fields
        tokens = pad_sequence(fields["tokens"][part], batch_first=True)
        rows = [
            torch.arange(meta.prompt_length - 1, meta.length - 1) + b * tokens.size(1)
            for b, meta in enumerate(self._samples.metas[part])
        ]
        ids = torch.cat(fields["teacher_ids"][part]).long()
        made = (tokens, torch.cat(rows), ids, torch.cat(fields["teacher_logprobs"][part]))
        tokens, chosen, ids, logprobs = (tensor.to(self._device) for tensor in made)
        return tokens, chosen, ids, logprobs
