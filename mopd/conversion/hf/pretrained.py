"""The only caller of transformers' loaders. Model folders are untrusted: no code of theirs runs, and the user is not
asked to allow it; nothing is fetched; weights are safetensors; damage is reported in one line that names the file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.initialization import no_init_weights

from mopd.base.files.json_text import read_json_object
from mopd.base.files.reading import read_bytes, read_text, shown_path
from mopd.base.text import one_line
from mopd.base.types import UserError
from mopd.conversion.hf.reader import HfReader, read_tokenizer_json
from mopd.conversion.models.config_keys import CONFIG_FILE, Keys, read_config
from mopd.conversion.models.known import FAMILIES
from mopd.conversion.models.vision_config import VISION_FORMATS

ADAPTER_CONFIG = "adapter_config.json"
GENERATION_CONFIG = "generation_config.json"
TOKENIZER_FILE = "tokenizer.json"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_SMALL_TOKENIZER_FILES = (_TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json", "chat_template.json")
_MAX_TOKENIZER_BYTES = 2**28
_MAX_TOKEN_ID = 2**24
"""Limit of token ids. Tokenizers make tables of this length; the largest published vocabularies have 2^18 tokens."""
_CURE = "fetch the file again"
_SPARE_WEIGHTS = 2**20


def load_config(folder: Path) -> PretrainedConfig:
    """Return ``config.json`` as transformers reads it.

    Raises:
        UserError: the folder or file is missing, damaged, of an unknown model type, or needs code of the folder.
    """
    read_config(folder)
    with _refusing(folder / CONFIG_FILE, "cannot be used"):
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return config


def load_weights(folder: Path, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """Return the model of a folder on the CPU, and transformers' loading report, in which missing weights and weights
    of another shape are listed.

    Raises:
        UserError: as ``load_config`` does; damaged weights, or weights of another model; an adapter alone.
    """
    config = load_config(folder)
    if (folder / ADAPTER_CONFIG).exists():  # transformers would load the base it names, with the adapter
        raise UserError(
            f"{shown_path(folder / ADAPTER_CONFIG)}: the folder holds an adapter, not a whole model: merge it with "
            "'mopd convert merge-lora', or remove this file if the weights are whole"
        )
    require_weights_fit(folder, config)
    _read_generation_config(folder)
    with _refusing(folder, "cannot load the model"):
        loaded: Any = _auto_class(config).from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=_attention(config),
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # the caller refuses them by name
            output_loading_info=True,
        )
    model, info = loaded
    return model, info


def build_model(folder: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Return the model of ``config.json`` on ``device`` with undefined weights. Raise ``UserError`` as
    ``load_weights``."""
    config = load_config(folder)
    if any(folder.glob("*.safetensors")):
        require_weights_fit(folder, config)
    with _refusing(folder / CONFIG_FILE, "cannot be built"), no_init_weights(), device:
        model = _auto_class(config).from_config(
            config, dtype=dtype, attn_implementation=_attention(config), trust_remote_code=False
        )
        model.tie_weights()
    return cast(PreTrainedModel, model)


def build_tower(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Return the vision tower of ``config.json`` on the CPU with undefined weights.

    Raises:
        UserError: as ``load_config`` does, or the tower cannot be built.
    """
    config = load_config(folder)
    with _refusing(folder / CONFIG_FILE, "its vision tower cannot be built"), no_init_weights():
        tower = AutoModel.from_config(
            config.vision_config, dtype=dtype, attn_implementation="sdpa", trust_remote_code=False
        )
    return cast(PreTrainedModel, tower)


def _auto_class(config: PretrainedConfig) -> Any:
    """Return transformers' class for loading the model; it does not count models that see images as causal ones."""
    return AutoModelForImageTextToText if config.model_type in VISION_FORMATS else AutoModelForCausalLM


def _attention(config: PretrainedConfig) -> str:
    """Return transformers' kind of attention: its fused kernel, unless the model's family says otherwise."""
    family = FAMILIES.get(config.model_type)
    return "sdpa" if family is None else family.attention


def require_computes(folder: Path, model: PreTrainedModel) -> None:
    """Refuse a model whose layers do not fit together, which transformers only finds when they run.

    Raises:
        UserError: what transformers says.
    """
    probe = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    with _refusing(folder / CONFIG_FILE, "makes a model that cannot run"), torch.inference_mode():
        model(input_ids=probe, use_cache=False)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a folder.

    Raises:
        UserError: a file is missing, damaged, of an unknown kind, or needs code of the folder.
    """
    for name in _SMALL_TOKENIZER_FILES:
        if (folder / name).exists():
            content = read_json_object(folder / name, cure=_CURE, any_number=True)
            added = content.get("added_tokens_decoder") if name == _TOKENIZER_CONFIG else content
            _require_ids(folder / name, added)
    if (folder / TOKENIZER_FILE).exists():
        content = read_tokenizer_json(folder / TOKENIZER_FILE)
        model, added = content.get("model"), content.get("added_tokens")
        vocabulary = model.get("vocab") if isinstance(model, dict) else None
        for tokens in (vocabulary, *(added if isinstance(added, list) else [])):
            _require_ids(folder / TOKENIZER_FILE, tokens)
    for path in (folder / "vocab.json", folder / "vocab.txt", folder / "merges.txt", *folder.glob("*.model")):
        if path.exists():
            read_bytes(path, cure=_CURE, max_bytes=_MAX_TOKENIZER_BYTES)
    for path in (folder / "chat_template.jinja", *(folder / "additional_chat_templates").glob("*.jinja")):
        if path.exists():
            read_text(path, cure=_CURE)
    with _refusing(folder, "cannot load the tokenizer"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        ids = (*tokenizer.get_vocab().values(), *tokenizer.all_special_ids)
        if not all(isinstance(token, int) and 0 <= token < _MAX_TOKEN_ID for token in ids):
            raise ValueError("it has ids that are no whole numbers >= 0")
        return tokenizer


def read_stop_ids(folder: Path, config: PretrainedConfig) -> tuple[int, ...]:
    """Return ``eos_token_id`` (one or several) of ``generation_config.json``, else of the model config; or ().

    Raises:
        UserError: it is no token id.
    """
    generation = _read_generation_config(folder)
    path, eos = folder / GENERATION_CONFIG, generation.get("eos_token_id")
    if eos is None:
        path, eos = folder / CONFIG_FILE, getattr(config.get_text_config(), "eos_token_id", None)
    ids = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
    if not all(type(token) is int and -1 <= token < _MAX_TOKEN_ID for token in ids):
        raise Keys({}, path).error("eos_token_id", f"{eos!a:.100} is no token id and no list of them; {_CURE}")
    return ids


def require_weights_fit(folder: Path, config: PretrainedConfig) -> None:
    """Refuse a config that asks for far more than the weight files hold, before anything of that size is allocated.
    Smaller differences are left to transformers.

    Raises:
        UserError: names both sizes; or the weight files are damaged.
    """
    reader, path = HfReader(folder), folder / CONFIG_FILE
    layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    if isinstance(layers, int) and layers > len(reader.names):
        raise Keys({}, path).error(
            "num_hidden_layers", f"is {layers} where the weight files hold {len(reader.names)} tensors in all; {_CURE}"
        )
    if getattr(config, "quantization_config", None) is not None:
        return  # several weights in one stored number
    with _refusing(path, "cannot be built"), no_init_weights(), torch.device("meta"):
        model: nn.Module = _auto_class(config).from_config(config, trust_remote_code=False)
    asked = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    stored = sum(prod(reader.shape(name)) for name in reader.names)
    if asked > 2 * stored + _SPARE_WEIGHTS:
        raise UserError(
            f"{shown_path(path)}: asks for {asked:,} weights where the weight files hold {stored:,}: config and "
            "weights belong to different models"
        )


def _require_ids(path: Path, tokens: Any) -> None:
    """Raise ``UserError`` for token ids beyond ``_MAX_TOKEN_ID``, as values (``{"a": 3}``) or as keys (``{"3": {…}}``)
    of an object."""
    for key, value in tokens.items() if isinstance(tokens, dict) else ():
        number = int(key) if isinstance(value, dict) and key.isdecimal() and len(key) < 20 else value
        if isinstance(number, int) and not 0 <= number < _MAX_TOKEN_ID:
            raise UserError(
                f"{shown_path(path)}: token {key!a:.100} has id {number}, not 0 to {_MAX_TOKEN_ID - 1}; {_CURE}"
            )


def _read_generation_config(folder: Path) -> dict[str, Any]:
    path = folder / GENERATION_CONFIG
    return read_json_object(path, cure=_CURE, any_number=True) if path.exists() else {}


@contextmanager
def _refusing(path: Path, problem: str) -> Iterator[None]:
    """Turn whatever transformers raises over a folder into one line. Its errors are of any kind, and panics of the
    tokenizers' Rust code are not even an ``Exception``."""
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        if "trust_remote_code" in str(error):
            raise UserError(
                f"{shown_path(path)}: needs code of its own folder, which never runs: use a checkpoint of a model type "
                "that transformers has itself"
            ) from error
        raise UserError(
            f"{shown_path(path)}: {problem}: {one_line(error):.300}: fetch the folder again or name another"
        ) from error
