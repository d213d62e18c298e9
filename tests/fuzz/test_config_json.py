"""``config.json`` of every family: as the name tables and as transformers read it; beside it the other small files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers
from safetensors.torch import save_file
from torch import zeros

from mopd.base.types import UserError
from mopd.conversion.adapters import peft_names, read_any_adapter
from mopd.conversion.hf.pretrained import load_config, load_tokenizer, read_stop_ids
from mopd.conversion.models import families
from mopd.conversion.models.reading import read_dims
from tests.fixtures.tiny_models import CONFIGS, FAMILIES, FAMILY_KEYS, make_tokenizer
from tests.fuzz.harness import fuzz
from tests.unit.conversion.test_vision_dims import QWEN2_5_VL_3B, QWEN3_VL_4B, changed

COMMON = {
    "vocab_size": 48, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 256, "eos_token_id": 2, "torch_dtype": "float32", "rope_theta": 10000.0,
}  # fmt: skip


def config_of(family: str) -> bytes:
    architecture = f"{FAMILIES[family].removesuffix('Text')}ForCausalLM"
    keys = {"architectures": [architecture], "num_key_value_heads": 2, "head_dim": 32}
    if family.startswith("deepseek"):
        del keys["head_dim"]
    config = getattr(transformers, f"{CONFIGS.get(family, FAMILIES[family])}Config")(
        **COMMON | keys | FAMILY_KEYS.get(family, {})
    )
    return json.dumps(config.to_dict() | {"architectures": keys["architectures"]}).encode()


def vision_configs() -> list[bytes]:
    """Flat and nested."""
    configs = [changed(QWEN2_5_VL_3B, {"num_hidden_layers": 2}), changed(QWEN3_VL_4B, {"vision_config.depth": 18})]
    return [json.dumps(config).encode() for config in configs]


def test_configs(tmp_path: Path) -> None:
    """Names are made as well: a config may not ask for more of them than fit in memory."""

    def read(content: bytes) -> None:
        (tmp_path / "config.json").write_bytes(content)
        for _ in families.all_params(read_dims(tmp_path)):
            pass

    fuzz("config.json", [*(config_of(family) for family in FAMILIES), *vision_configs()], read, (UserError,))


def test_configs_of_transformers(tmp_path: Path) -> None:
    def read(content: bytes) -> None:
        (tmp_path / "config.json").write_bytes(content)
        read_stop_ids(tmp_path, load_config(tmp_path))

    configs = [*(config_of(family) for family in FAMILIES), *vision_configs()]
    fuzz("config.json of transformers", configs, read, (UserError,))


def test_generation_configs(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(config_of("qwen3"))
    config = load_config(tmp_path)

    def read(content: bytes) -> None:
        (tmp_path / "generation_config.json").write_bytes(content)
        read_stop_ids(tmp_path, config)

    fuzz("generation_config.json", [b'{"eos_token_id": [2, 3], "pad_token_id": 0}'], read, (UserError,))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_tokenizers(tmp_path: Path, name: str) -> None:
    make_tokenizer(tmp_path)
    valid = (tmp_path / name).read_bytes()

    def read(content: bytes) -> None:
        (tmp_path / name).write_bytes(content)
        load_tokenizer(tmp_path)

    fuzz(name, [valid], read, (UserError,))


def test_adapter_configs(tmp_path: Path) -> None:
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "rank_pattern": {"q_proj": 8}, "alpha_pattern": {}}

    names = peft_names("model.layers.0.self_attn.q_proj")
    save_file(dict(zip(names, (zeros(8, 2), zeros(2, 8)), strict=True)), tmp_path / "adapter_model.safetensors")

    def read(content: bytes) -> None:
        (tmp_path / "adapter_config.json").write_bytes(content)
        read_any_adapter(tmp_path)

    fuzz("adapter_config.json", [json.dumps(config).encode()], read, (UserError,))
