"""Nothing between a step's first kernel and the reduction of its metrics asks the device for a value.

On a CPU every call answers at once, so the calls that would wait on a GPU are looked for by name: the operators
underneath (``.item()``, ``nonzero``, a choice by a mask), and what Python asks of tensors (``tolist``, ``cpu``, a
tensor made of a list on a device, which is a blocking copy). Left out: the thread that prepares micro-batches, whose
tensors are the host's; Megatron's own way from tokens to experts and back, which needs their counts on the host; sends
and receives between pipeline stages (this is a world of one rank).
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mopd.student import parallel
from mopd.student.objective import Sums
from tests.fixtures.tiny_models import make_hf_model
from tests.parity.student.hidden_cases import make_models
from tests.parity.student.ranks import Case

aten = torch.ops.aten
WAITING_OPERATORS = {
    aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default,
    aten.bincount.default, aten._unique2.default, aten.repeat_interleave.Tensor,
}  # fmt: skip
WAITING_CALLS = {
    Tensor.item, Tensor.tolist, Tensor.cpu, Tensor.numpy, Tensor.__bool__, Tensor.__float__, Tensor.__int__,
}  # fmt: skip
COPIES = (torch.tensor, torch.as_tensor)
"""Where they name a device."""
DISPATCH = ("moe/token_dispatcher.py", "moe/moe_utils.py", "moe/experts.py")
OWN, LINES = ("test_no_waiting.py", "torch/_ops.py"), 6
ONE = {"tp": 1, "pp": 1, "dp": 1, "sp": False}
BALANCE = {"moe_aux_loss_coeff": 0.01, "moe_z_loss_coeff": 0.001, "moe_router_load_balancing_type": "seq_aux_loss"}
CASES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3_in_chunks": {"head_mib": 1, "wide": True},
    "qwen3_largest_tokens": {"loss": "task"},
    "qwen3_recompute": {"recompute": "full"},
    "qwen3_k2": {"loss": "k2"},
    "qwen3_hidden": {"loss": "full_jsd", "head_mib": 1},
    "qwen3_policy_gradient": {"loss": "policy_gradient"},
    "qwen3_moe": {"moe": BALANCE},
    "deepseek_v3": {"moe": {"moe_router_bias_update_rate": 0.001}},
}


class _Calls(TorchFunctionMode):
    def __init__(self, found: Callable[[Any], None]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in WAITING_CALLS or (func in COPIES and (kwargs or {}).get("device") is not None):
            self.found(func)
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    def __init__(self, found: Callable[[Any], None]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_mask = func in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default) and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if by_mask or func in WAITING_OPERATORS:
            self.found(func)
        return func(*args, **(kwargs or {}))


@contextmanager
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What waits until the sums are reduced, and who asked."""
    seen: list[str] = []

    def found(what: Any) -> None:
        asked = [frame for frame in traceback.extract_stack() if not frame.filename.endswith(OWN)]
        if not any(frame.filename.endswith(DISPATCH) for frame in asked):
            seen.append(f"{what}: {''.join(traceback.format_list(asked[-LINES:]))}")

    reduce = Sums.reduce
    with ExitStack() as watched:

        def reduced(*args: Any) -> Any:
            watched.close()
            return reduce(*args)

        monkeypatch.setattr(Sums, "reduce", reduced)
        watched.enter_context(_Operators(found))
        watched.enter_context(_Calls(found))
        yield seen


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    made: dict[str, str] = {}

    def model(family: str, **options: Any) -> str:
        name = f"{family}{options}"
        if name not in made:
            made[name] = str(make_hf_model(tmp_path_factory.mktemp("model"), family, **options))
        return made[name]

    return model


@pytest.mark.parametrize("name", CASES)
def test_nothing_waits(
    name: str, layout: parallel.Layout, models: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("mopd.losses.chunked.blocks.SYNCHRONOUS_DEVICES", ())
    case = {**ONE, **CASES[name]}
    family = name if name in ("qwen3_moe", "deepseek_v3") else "qwen3"
    if name == "qwen3_hidden":
        case["hidden"] = make_models(tmp_path)
    wide = {"vocab_size": 16_001} if case.get("wide") else {}
    it = Case(case["hidden"]["student"] if "hidden" in case else models(family, **wide), case)
    it.train(1)  # what is made once
    plan = it.plan(2)
    with waits(monkeypatch) as seen:
        it.worker.forward_backward(plan, diagnostics=True)
    it.close()
    assert not seen, "\n".join(seen)


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.all()),
        lambda x: (x > 0).nonzero(),
        lambda x: x[x > 0],
        lambda x: x.cpu(),
        lambda x: x.tolist(),
        lambda x: torch.tensor([1.0], device=x.device),
    ],
)
def test_the_watch_sees(ask: Callable[[Tensor], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with waits(monkeypatch) as seen:
        ask(torch.ones(2))
    assert seen
