"""Which of Megatron-Core's fields a recipe may override, and what a refusal says."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import pytest
from megatron.core.transformer.transformer_config import MLATransformerConfig

from mopd.base.types import UserError
from mopd.config.schema import Recipe
from mopd.config.student import StudentConfig
from mopd.student.model.overrides import ALLOWED, NEEDS, OWNED, REFUSED, WITH_TRANSFORMER_ENGINE, check_overrides

FIELDS = sorted(field.name for field in dataclasses.fields(MLATransformerConfig))
NAMED = [
    *ALLOWED,
    *WITH_TRANSFORMER_ENGINE,
    *(name for table in (OWNED, REFUSED) for n in table.values() for name in n.split()),
]


def test_tables_name_fields_of_megatron_once() -> None:
    assert [name for name, count in collections.Counter(NAMED).items() if count > 1] == []
    assert set(NAMED) <= set(FIELDS)


def test_what_is_not_allowed_is_one_line() -> None:
    for name in set(FIELDS) - {*ALLOWED, *WITH_TRANSFORMER_ENGINE}:
        with pytest.raises(UserError) as error:
            check_overrides({name: 2}, has_transformer_engine=True)
        message = str(error.value)
        assert message.startswith(f"student.megatron_overrides.{name}: ")
        assert "remove the override" in message and "\n" not in message


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("num_layers_in_first_pipeline_stage", "from student.parallel.num_layers_in_first_pipeline_stage"),
        ("activation_func", "from student.model"),
        ("softmax_scale", "another function"),
        ("hidden_dropout", "without noise"),
        ("init_method_std", "nothing is drawn"),
        ("fp8", "only TransformerEngine's layers know it"),
        ("moe_expert_capacity_factor", "or to none"),
        ("bf16", "from student.dtype"),
        ("cuda_graph_impl", "no test of mopd shows"),
    ],
)
def test_the_reason_is_named(name: str, part: str) -> None:
    with pytest.raises(UserError) as error:
        check_overrides({name: 2})
    assert part in str(error.value)


def test_owners_are_keys_of_the_schema() -> None:
    for key in OWNED:
        section: Any = Recipe
        for part in key.split("."):
            fields = {field.name for field in dataclasses.fields(section)}
            assert part in fields, key
            section = overrides_section(section, part)


def overrides_section(section: Any, part: str) -> Any:
    default = next(field.default for field in dataclasses.fields(section) if field.name == part)
    if dataclasses.is_dataclass(default):
        return type(default)
    return StudentConfig if part == "student" else None


@pytest.mark.parametrize("name", NEEDS)
def test_what_would_do_nothing_is_refused(name: str) -> None:
    values: Any = (ALLOWED | WITH_TRANSFORMER_ENGINE)[name]
    value = values[:1] if isinstance(values, list) else values[0] if isinstance(values, tuple) else 1
    with pytest.raises(UserError, match=f"overrides.{name}: it does nothing without {NEEDS[name]}: ") as error:
        check_overrides({name: True if values is bool else value}, has_transformer_engine=True)
    assert "\n" not in str(error.value)


def test_a_recipe_key_may_be_what_is_needed() -> None:
    given = {"recompute_modules": ["mlp"]}
    assert check_overrides(given, owned=["recompute_granularity"]) == given


@pytest.mark.parametrize("name", ["optimizer_cpu_offload", "use_precision_aware_optimizer", "bucket_size"])
def test_fields_of_other_configurations_name_their_owner(name: str) -> None:
    with pytest.raises(UserError, match=f"overrides.{name}: it is a field of Megatron's .* which mopd builds from"):
        check_overrides({name: True}, has_transformer_engine=True)


@pytest.mark.parametrize(
    ("name", "good", "wrong"),
    [
        ("deterministic_mode", True, ["yes", 1, None, [True]]),
        ("cpu_offloading_num_layers", 4, [0, -1, 1.5, True, "2", None]),
        ("attention_backend", "fused", ["nonsense", None, 3, ["full"], {}]),
        ("recompute_modules", ["core_attn", "mlp"], ["core_attn", [], ["x"], ["mlp", "mlp"], [["mlp"]], None, {}]),
    ],
)
def test_values_are_checked(name: str, good: Any, wrong: list[Any]) -> None:
    needed = {"cpu_offloading": True, "cpu_offloading_num_layers": 1, "recompute_granularity": "selective"}
    checked = check_overrides({**needed, name: good}, has_transformer_engine=True)[name]
    assert checked == good or checked.name == good
    for value in wrong:
        with pytest.raises(UserError, match=f"student.megatron_overrides.{name}: .* is not ") as error:
            check_overrides({name: value}, has_transformer_engine=True)
        assert "\n" not in str(error.value)


def test_what_needs_transformer_engine_says_so() -> None:
    for given in (*({name: True} for name in WITH_TRANSFORMER_ENGINE), {"recompute_modules": ["mlp", "layernorm"]}):
        with pytest.raises(UserError, match="TransformerEngine"):
            check_overrides(given)


def test_a_typo_names_the_nearest_field() -> None:
    with pytest.raises(UserError, match=r"overrides.recompute_moduls: .*did you mean 'recompute_modules'"):
        check_overrides({"recompute_moduls": ["core_attn"]})
