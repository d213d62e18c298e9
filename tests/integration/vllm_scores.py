"""Log-probs of given tokens by vLLM, model after model (started by ``test_export_serves.py``: vLLM wants a process of
its own, and its environment set before the import).

Usage: python vllm_scores.py "3 4 5" FOLDER...; prints ``SCORES [...]`` per folder: the log-probs of tokens 1, 2, …
given those before.
"""

from __future__ import annotations

import json
import sys

from vllm import LLM, SamplingParams


def scores(folder: str, tokens: list[int]) -> list[float]:
    llm = LLM(
        model=folder,
        load_format="safetensors",
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=64,
        max_num_batched_tokens=256,
        max_num_seqs=8,
        kv_cache_memory_bytes=32 * 2**20,
        enforce_eager=True,
        enable_chunked_prefill=False,
    )
    options = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    (answer,) = llm.generate([{"prompt_token_ids": tokens}], options, use_tqdm=False)
    return [row[token].logprob for row, token in zip(answer.prompt_logprobs[1:], tokens[1:], strict=True)]


if __name__ == "__main__":
    asked = [int(token) for token in sys.argv[1].split()]
    for path in sys.argv[2:]:
        print("SCORES", json.dumps(scores(path, asked)), flush=True)
