"""Log-probs of given ids, and hidden states, at every scored position, inside a worker of vLLM (0.32, its V1 runner).

vLLM gives prompt log-probs at the most probable ids alone. A request that names ids or asks for hidden states is taken
out of vLLM's own loop over prompts; everything else of it, batching, chunks of a long prompt, the answer's way back,
stays vLLM's. The answer is an ordinary table of prompt log-probs, a row for each token: [the token itself, the most
probable ids, the given ones]. The native field of the V2 runner (``prompt_logprob_token_ids``) needs a GPU's Triton;
mopd runs V1 everywhere.

Hidden states, those after the final norm that the output matrix reads, do not fit that table, whose numbers become
Python's: one worker keeps them under the request's name until they are taken (``take_hidden``). States of a prompt that
is not complete belong to vLLM's own account of the request, and go with it when it is aborted.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

GIVEN_IDS, GIVEN_START, GIVEN_TOP_K = "mopd_ids", "mopd_start", "mopd_top_k"
"""Keys of a request's ``extra_args``: int32 ids of each row as bytes, the first row, and how many of its most probable
ids are asked for beside them."""
HIDDEN_NAME = "mopd_hidden"
"""Key of a request's ``extra_args``: name under which its hidden states are kept; absent where none are asked for."""
MAX_ROWS = 256
"""Rows of logits over the vocabulary that exist at a time."""


def score_given(runner: Any, empty_table: Callable[[int, int], Any], *, keeps_hidden: bool) -> None:
    """Make a worker's runner answer requests that name ids or ask for hidden states. Does nothing the second time.

    ``empty_table(rows, columns)`` makes vLLM's table of log-probs. All workers of a replica have the same hidden
    states: ``keeps_hidden`` says whether this one keeps them.
    """
    if hasattr(runner, "mopd_hidden"):
        return
    runner.mopd_hidden, runner.mopd_keeps_hidden = dict[str, Tensor](), keeps_hidden
    native = runner._get_prompt_logprobs_dict

    def both(this: Any, hidden_states: Tensor, num_scheduled_tokens: dict[str, int]) -> dict[str, Any]:
        asked = this.num_prompt_logprobs
        own = [name for name in asked if GIVEN_START in (this.requests[name].sampling_params.extra_args or {})]
        held = {name: asked.pop(name) for name in own}  # vLLM's own loop must not see them
        answers: dict[str, Any] = native(hidden_states, num_scheduled_tokens)
        asked.update(held)
        for name, width in held.items():
            # one that is not scheduled was preempted, and stays
            if name in num_scheduled_tokens:
                request = this.requests[name]
                if request.in_progress_prompt_logprobs_cpu is None:
                    request.in_progress_prompt_logprobs_cpu = _table(request, width, empty_table)
                done = _score(this, name, hidden_states, num_scheduled_tokens[name])
                if done is not None:
                    answers[name] = done
                    del asked[name]
                    request.in_progress_prompt_logprobs_cpu = None
        return answers

    runner._get_prompt_logprobs_dict = types.MethodType(both, runner)


def take_hidden(runner: Any, name: str) -> bytes | None:
    """Return the bits of a request's hidden states [R, H] bf16, and forget them; ``None`` where there are none: in all
    workers but one, and of a request whose prompt was not completed."""
    states = runner.mopd_hidden.pop(name, None)
    return None if states is None else states.view(torch.int16).numpy().tobytes()


def _table(request: Any, width: int, empty_table: Callable[[int, int], Any]) -> Any:
    """Return the table of a request that was asked for ``width`` ids a row: its tokens and ids, and no log-prob yet.
    Rows before the response stay zeros."""
    prompt, extra = request.prompt_token_ids, request.sampling_params.extra_args
    start, top_k, num_rows = extra[GIVEN_START], extra[GIVEN_TOP_K], len(prompt) - 1
    table = empty_table(num_rows, width + 1)
    for part in (table.logprob_token_ids, table.logprobs, table.selected_token_ranks):
        part.zero_()
    table.logprob_token_ids[:, 0] = torch.tensor(prompt[1:])
    if width > top_k:
        ids = np.frombuffer(extra[GIVEN_IDS], np.int32).reshape(num_rows - start, width - top_k)
        table.logprob_token_ids[start:, 1 + top_k :] = torch.from_numpy(ids.copy())
    return table


def _score(runner: Any, name: str, hidden: Tensor, num_scheduled: int) -> Any:
    """Score the rows of a request that this forward step has computed, and keep their hidden states if they are asked
    for; return its table once that is complete.

    Row r of the table, and of the request's hidden states, predicts the prompt's token r + 1.
    """
    request = runner.requests[name]
    extra, table = request.sampling_params.extra_args, request.in_progress_prompt_logprobs_cpu
    top_k, num_rows, start = extra[GIVEN_TOP_K], len(table.logprobs), extra[GIVEN_START]
    states = None
    if HIDDEN_NAME in extra and runner.mopd_keeps_hidden:
        states = getattr(request, "mopd_states", None)
        if states is None:  # a preempted request computes rows a second time, into the same memory
            states = request.mopd_states = torch.empty(num_rows - start, hidden.shape[1], dtype=torch.bfloat16)
    before = request.num_computed_tokens
    place = runner.query_start_loc.np[runner.input_batch.req_id_to_index[name]].item() - before
    last = min(before + num_scheduled, num_rows)
    for low in range(max(start, before), last, MAX_ROWS):
        high = min(low + MAX_ROWS, last)
        ids, logprobs = table.logprob_token_ids[low:high], table.logprobs[low:high]
        logits = runner.model.compute_logits(hidden[place + low : place + high]).float()
        ids[:, 1 : 1 + top_k] = logits.topk(top_k, dim=1).indices.cpu()
        wanted = ids.to(logits.device, torch.int64)
        logprobs.copy_(logits.gather(1, wanted) - logits.logsumexp(1, keepdim=True))
        if states is not None:
            states[low - start : high - start].copy_(hidden[place + low : place + high])
    if before + num_scheduled <= num_rows:
        return None
    if states is not None:
        runner.mopd_hidden[extra[HIDDEN_NAME]] = states
    return table
