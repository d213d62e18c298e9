"""Gradient norms and balancing losses of a student with experts, from their definitions on transformers' own model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from mopd.base.types import SampleMeta
from mopd.config.student import StudentConfig
from mopd.conversion.models.reading import read_dims
from mopd.data.packing import pack, packing_rules
from tests.parity.student.samples import make_routes, make_samples


def by_definition(
    folder: str,
    moe: dict[str, Any] | None = None,
    micro_batch_size: int = 1,
    *,
    packing: bool = False,
    routes: bool = False,
) -> dict[str, float]:
    """Gradient norm of the step's loss, with transformers' gradients: forward KL with a bucket for the tail, mean over
    loss tokens; plus the balancing losses of ``moe`` by their coefficients, summed over layers, mean over
    micro-batches, in the order of their plan on one rank. These losses themselves are means over layers too. With
    ``routes`` tokens go by those of ``make_routes``; also the share of choices that are the model's own."""
    moe = moe or {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    metas, fields = make_samples(16, vocab_size=model.config.vocab_size, top_k=8, seed=1, first_id=0)
    kl = torch.zeros((), dtype=torch.float64)
    logits_of: list[list[torch.Tensor]] = []
    forced = Forced(model, metas) if routes else None
    for i, meta in enumerate(metas):
        if forced is not None:
            forced.sample = i
        output = model(fields["tokens"][i][None], output_router_logits=bool(moe))
        student = output.logits[0].double().softmax(-1)
        for r in fields["loss_mask"][i].nonzero().flatten().tolist():
            q = fields["teacher_logprobs"][i][r].double().exp()
            p = student[meta.prompt_length + r - 1][fields["teacher_ids"][i][r].long()]
            kl = kl + (q * (q / p).log()).sum() + (1 - q.sum()) * ((1 - q.sum()) / (1 - p.sum())).log()
        logits_of.append([logits.double() for logits in output.router_logits] if moe else [])
    loss, result = kl / sum(meta.num_loss_tokens for meta in metas), {}
    for name, definition in (("moe_aux_loss_coeff", balancing_loss), ("moe_z_loss_coeff", z_loss)):
        if name not in moe:
            continue
        student = StudentConfig(model=folder, micro_batch_size=micro_batch_size, packing=packing)
        plan = pack(metas, packing_rules(student, read_dims(Path(folder)), on_gpu=False), dp_size=1)
        batches = [[sample.sample_id for sample in batch] for batch in plan.micro_batches[0]]
        kind = moe.get("moe_router_load_balancing_type", "aux_loss")
        terms = [
            definition([[logits_of[i][layer] for i in batch] for batch in batches], kind)
            for layer in range(model.config.num_hidden_layers)
        ]
        loss = loss + moe[name] * torch.stack(terms).sum()
        result[name] = float(torch.stack(terms).detach().mean())
    loss.backward()
    norm = sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None) ** 0.5
    if forced is not None:
        result["moe/route_agreement"] = forced.alike / forced.total
    return {"grad_norm": norm, **result}


class Forced:
    """Makes the routers of transformers' Qwen3-MoE choose as ``make_routes`` says, and counts choices."""

    def __init__(self, model: Any, metas: list[SampleMeta], seed: int = 1) -> None:
        moe = read_dims(Path(model.name_or_path)).moe
        assert moe is not None
        self.sample, self.alike, self.total = 0, 0, 0
        self._routes = make_routes(metas, moe.route_shape, seed=seed)
        for number, layer in enumerate(model.model.layers):
            layer.mlp.gate.register_forward_hook(partial(self._choose, number))

    def _choose(self, number: int, gate: Any, inputs: Any, output: Any) -> Any:
        given, own = self._routes[self.sample][:, number].long(), output[2]
        self.alike += int((own[:-1, :, None] == given[:, None, :]).sum())
        self.total += given.numel()
        chosen = torch.cat([given, own[-1:]])
        scores = torch.nn.functional.linear(inputs[0].reshape(len(chosen), -1), gate.weight).softmax(-1)
        probabilities = scores.gather(1, chosen)
        return output[0], probabilities / probabilities.sum(-1, keepdim=True), chosen


def z_loss(batches: list[list[torch.Tensor]], kind: str) -> torch.Tensor:
    """Mean over micro-batches of the mean over their tokens of the squared log-sum-exp of the logits."""
    return torch.stack([torch.cat(batch).logsumexp(-1).square().mean() for batch in batches]).mean()


def balancing_loss(batches: list[list[torch.Tensor]], kind: str) -> torch.Tensor:
    """Mean over micro-batches (``seq_aux_loss``: of the mean over their sequences) of E x sum over experts of (share of
    choices x mean probability). ``global_aux_loss`` takes the choices from all micro-batches so far, in tokens per
    micro-batch."""
    terms, choices = [], []
    for batch in batches:
        groups = batch if kind == "seq_aux_loss" else [torch.cat(batch)]
        parts = []
        for logits in groups:
            probabilities = logits.softmax(-1)
            chosen = torch.zeros_like(probabilities).scatter(1, logits.topk(2).indices, 0.5).sum(0)
            choices.append(chosen)
            if kind == "global_aux_loss":
                chosen = torch.stack(choices).mean(0)
            parts.append(4 * (chosen * probabilities.sum(0)).sum() / len(logits) ** 2)
        terms.append(torch.stack(parts).mean())
    return torch.stack(terms).mean()
