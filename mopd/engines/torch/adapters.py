"""Low-rank adapters beside the linear modules of a transformers model, whose weights stay as they are.

While an adapter is used each of its modules adds ``scale * (x A^T) B^T`` to its output. One is used at a time.
Shapes: I inputs and O outputs of a module, r rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mopd.base.types import UserError
from mopd.conversion.adapters import Adapter, peft_names
from mopd.engines.student_adapter import StudentAdapter

_Pair = tuple[Tensor, Tensor, float]
"""A [r, I], B [O, r] and the scale of one module."""


class TorchAdapters:
    """Adapters of one model, by name. Only linear modules of the language model can have one: a vision tower's features
    are kept from request to request, and engines apply the output matrix themselves."""

    def __init__(self, model: PreTrainedModel, *, name: str) -> None:
        """``name`` is the model's in errors."""
        self._model, self._model_name = model, name
        self._by_name: dict[str, dict[str, _Pair]] = {}
        self._used: dict[str, _Pair] = {}
        """What the modules add now, by name of the module."""
        self._hooked: set[str] = set()

    @property
    def names(self) -> set[str]:
        """Names of all adapters."""
        return set(self._by_name)

    def add(self, name: str, adapter: Adapter) -> None:
        """Load an adapter's tensors. ``UserError`` for one with a module that the model lacks, or of another shape."""
        tensors, modules = adapter.tensors(), self._linears()
        pairs: dict[str, _Pair] = {}
        for module in adapter.modules:
            linear = self._linear(modules, module, str(adapter.path))
            a, b = (tensors[own] for own in peft_names(module))
            if (a.shape[1], b.shape[0]) != (linear.in_features, linear.out_features) or a.shape[0] != b.shape[1]:
                raise UserError(
                    f"{adapter.path}: {module!r} has A {list(a.shape)} and B {list(b.shape)}, its base "
                    f"{self._model_name} a weight [{linear.out_features}, {linear.in_features}]: use the adapter's base"
                )
            weight = linear.weight
            pairs[module] = a.to(weight), b.to(weight), adapter.scale
        self._keep(name, pairs)

    def make_room(self, name: str, shape: StudentAdapter) -> None:
        """Make an adapter of this shape whose tensors will be written into ``slots``. ``UserError`` as ``add``."""
        pairs, linears = dict[str, _Pair](), self._linears()
        for one in shape.modules:
            weight = self._linear(linears, one.module, "student.lora").weight
            a, b = (weight.new_zeros(size) for size in ((shape.rank, one.num_inputs), (one.num_outputs, shape.rank)))
            pairs[one.module] = a, b, shape.scale
        self._keep(name, pairs)

    def slots(self, name: str) -> dict[str, Tensor]:
        """Return the memory of an adapter's tensors by PEFT's names: writing there loads them."""
        return {
            own: tensor
            for module, (a, b, _) in self._by_name[name].items()
            for own, tensor in zip(peft_names(module), (a, b), strict=True)
        }

    @contextmanager
    def used(self, name: str) -> Iterator[None]:
        """Use an adapter inside the context; an empty name uses none."""
        self._used = self._by_name[name] if name else {}
        try:
            yield
        finally:
            self._used = {}

    def _linear(self, linears: Mapping[str, nn.Linear], module: str, where: str) -> nn.Linear:
        if module not in linears:
            raise UserError(
                f"{where}: adapts {module!r}, which is no linear module of the language model of {self._model_name} "
                "under transformers: use the adapter's own base, or merge it into that (mopd convert merge-lora)"
            )
        return linears[module]

    def _linears(self) -> dict[str, nn.Linear]:
        """Return the linear modules of the language model, without the output matrix, by their names in the model."""
        inner = {id(module) for module in self._model.get_decoder().modules()}
        named = self._model.named_modules()
        return {name: own for name, own in named if isinstance(own, nn.Linear) and id(own) in inner}

    def _keep(self, name: str, pairs: dict[str, _Pair]) -> None:
        modules = self._linears()
        for module in pairs.keys() - self._hooked:
            modules[module].register_forward_hook(self._hook(module))
        self._hooked |= pairs.keys()
        self._by_name[name] = pairs

    def _hook(self, name: str) -> Any:
        def add(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
            pair = self._used.get(name)
            if pair is None:
                return None
            a, b, scale = pair
            low = nn.functional.linear(inputs[0], a)
            return torch.add(output, nn.functional.linear(low, b), alpha=scale)

        return add
