"""Engine that runs a transformers causal language model in this process, on a CPU or a GPU.

Weights arrive over a process group or where they are staged, straight into the model's memory (``TorchIncoming``).
It never reads or changes torch's global random state, and holds at most ``MAX_LOGITS_ROWS`` rows of logits when it
scores.
Shapes: B sequences, S padded length, H hidden, V vocabulary, K top-k, R response tokens.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mopd.base.types import PromptImage, UserError
from mopd.config.groups import TorchEngineConfig
from mopd.config.student import LoraConfig
from mopd.conversion.adapters import Adapter
from mopd.engines.checks import (
    check_adapter,
    check_given,
    check_hidden_size,
    check_length,
    check_sampling,
    check_scoring,
    check_weights,
)
from mopd.engines.interface import (
    EngineInfo,
    EngineLimits,
    FinishReason,
    Generation,
    Reception,
    ResponseCallback,
    SamplingParams,
    Scores,
    ToDraw,
    ToScore,
    WeightsLost,
)
from mopd.engines.stop_texts import StopTexts
from mopd.engines.student_adapter import STUDENT, StudentAdapter
from mopd.engines.torch.adapters import TorchAdapters
from mopd.engines.torch.decoding import SeenBatch, decode, uniforms
from mopd.engines.torch.loading import build_empty_model, load_model, read_stop_ids, weight_slots
from mopd.engines.torch.routes import RouteRecorder
from mopd.engines.vision import EngineVision, check_images, read_vision
from mopd.engines.wire.weights import load_staged, stage_updates
from mopd.losses.teacher_topk import chunked_topk_logprobs
from mopd.weights.group import GroupOrder, TransferFailed
from mopd.weights.parts import TensorMeta
from mopd.weights.receiving import Receiver

if TYPE_CHECKING:
    from mopd.engines.torch.sight import VisionFeatures


LENGTH_KEY = "max_position_embeddings"
MAX_LOGITS_ROWS = 1024
"""Rows of [vocabulary] logits that scoring holds at a time: 0.6 GiB in fp32 at 150,000 tokens; more are no faster."""


class TorchEngine:
    """Implements ``Generator``, ``Scorer`` and ``Described`` (``mopd.engines.interface``)."""

    def __init__(
        self,
        model: PreTrainedModel,
        cfg: TorchEngineConfig,
        *,
        name: str,
        stop_ids: Sequence[int],
        has_weights: bool,
        sight: EngineVision | None = None,
        adapters: Mapping[str, Adapter] = MappingProxyType({}),
        student_adapter: StudentAdapter | None = None,
    ) -> None:
        """Wrap ``model``. ``name`` (the checkpoint folder) stands in error messages. ``adapters``: those that requests
        may name. ``student_adapter``: the weights that arrive are those of an adapter of this shape, which answers
        every request."""
        self.model = model.eval().requires_grad_(False)
        self.name = name
        self.weight_version = -1
        self.stop_ids = tuple(stop_ids)
        self._cfg = cfg
        self._has_weights = has_weights
        self.can_sleep = not has_weights and student_adapter is None
        """Whether its weights come from a student, so that ``sleep`` may lose them."""
        self._storage_sizes: dict[torch.UntypedStorage, int] = {}
        """Bytes of each storage that sleeps."""
        self._head_checked = False
        self._interrupted = threading.Event()
        self.incoming = TorchIncoming(self)
        self._adapters = TorchAdapters(self.model, name=name)
        for own, adapter in adapters.items():
            self._adapters.add(own, adapter)
        self._student = "" if student_adapter is None else STUDENT
        if student_adapter is not None:
            self._adapters.make_room(STUDENT, student_adapter)
        self.sight = sight
        self._eyes: VisionFeatures | None = None
        if sight is not None:
            from mopd.engines.torch.sight import (
                VisionFeatures,  # and with it what reads images, which models of text never need
            )

            self._eyes = VisionFeatures(self.model, sight)
        self.max_sequence = self.max_positions
        """Longest expected sequence in tokens; decides how many sequences ``info`` says a batch holds."""

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        cfg: TorchEngineConfig,
        device: torch.device | str = "cpu",
        *,
        max_pixels: int | None = None,
        has_weights: bool = True,
        adapters: Mapping[str, Adapter] = MappingProxyType({}),
        student_adapter: LoraConfig | None = None,
    ) -> TorchEngine:
        """Load a local Hugging Face folder with safetensors. Without ``has_weights`` build its architecture alone,
        whose weights arrive by ``load_weights``; with ``student_adapter`` load it, and only the adapter's arrive.
        ``max_pixels`` as in ``read_vision``.

        Raises:
            UserError: anything in the folder is missing or unreadable, or an adapter is none of this model.
        """
        is_whole = has_weights or student_adapter is not None
        path, make = Path(folder), load_model if is_whole else build_empty_model
        model = make(path, cfg.dtype, torch.device(device))
        return cls(
            model,
            cfg,
            name=str(folder),
            stop_ids=read_stop_ids(path, model.config),
            has_weights=has_weights,
            sight=read_vision(path, max_pixels),
            adapters=adapters,
            student_adapter=None if student_adapter is None else StudentAdapter.of(path, student_adapter),
        )

    @classmethod
    def empty(cls, folder: str | Path, cfg: TorchEngineConfig, device: torch.device | str = "cpu") -> TorchEngine:
        """Build the engine of ``folder`` without weights."""
        return cls.from_pretrained(folder, cfg, device, has_weights=False)

    @property
    def vocab_size(self) -> int:
        """Rows of the output matrix, padding included."""
        return int(self.model.get_output_embeddings().weight.shape[0])

    @property
    def max_positions(self) -> int:
        """Length of the longest sequence that the model supports."""
        return int(self.model.config.get_text_config().max_position_embeddings)

    async def info(self) -> EngineInfo:
        """Describe the engine. There is no manifest: the folder is not hashed here."""
        return EngineInfo(
            model=self.name,
            kind="torch",
            vocab_size=self.vocab_size,
            max_positions=self.max_positions,
            dtype=self._cfg.dtype,
            weight_version=self.weight_version,
            image_processing=None if self.sight is None else self.sight.processing.fingerprint,
            adapters=dict.fromkeys(self._adapters.names - {STUDENT}, ""),
            limits=EngineLimits(
                max_sequences=max(1, self._cfg.max_tokens_per_batch // self.max_sequence),
                max_running_tokens=self._cfg.max_tokens_per_batch,
            ),
        )

    async def check_health(self) -> None:
        """Return at once: the engine lives as long as this process."""

    async def close(self) -> None:
        """Leave the weight-transfer group, if any."""
        await self.incoming.leave()

    async def generate(self, asked: ToDraw, *, on_response: ResponseCallback | None = None) -> list[Generation]:
        """Draw one response per prompt. ``UserError`` for a prompt that does not fit with its response."""
        check_weights(self._has_weights, name=self.name)
        prompts, sampling = asked.prompts, asked.sampling
        check_images(self.sight, prompts, asked.images, name=self.name)
        check_sampling(asked, self.stop_ids, name=self.name)
        check_length(asked, self.max_positions, LENGTH_KEY, name=self.name)
        results: dict[int, Generation] = {}

        def note(
            i: int, tokens: Tensor, logprobs: Tensor, top_ids: Tensor, routes: Tensor | None, reason: FinishReason
        ) -> None:
            with torch.inference_mode(False):
                results[i] = Generation(  # clones: inference tensors cannot enter autograd later
                    tokens=tokens.clone(),
                    logprobs=logprobs.clone(),
                    top_ids=top_ids.clone() if sampling.num_top_ids else None,
                    routes=None if routes is None else routes.clone(),
                    finish_reason=reason,
                    token_versions=torch.full((len(tokens),), self.weight_version, dtype=torch.int32),
                )
                if on_response is not None:
                    on_response(i, results[i])

        lengths = [len(prompt) + sampling.max_new_tokens for prompt in prompts]
        stop_ids = torch.tensor(sampling.ends(self.stop_ids), dtype=torch.int64, device=self.model.device)
        stop_texts = StopTexts(self.name, sampling.stop) if sampling.stop else None
        try:
            for batch in token_budget_batches(lengths, self._cfg.max_tokens_per_batch):
                own = asked.at(batch)
                recorded = self._recorded(own.prompts, sampling)
                with torch.inference_mode(), self._answering(asked.adapter), recorded as routes:
                    decode(
                        self.model,
                        own.prompts,
                        sampling,
                        uniforms(own.seeds, sampling.max_new_tokens).to(self.model.device),
                        stop_ids,
                        lambda row, *response, batch=batch: note(batch[row], *response),
                        stop_texts=stop_texts,
                        seen=self._see(own.prompts, own.seen, pad_left=True),
                        routes=routes,
                        interrupted=self._interrupted.is_set,
                    )
        finally:
            self._interrupted.clear()
        return [results[i] for i in range(len(prompts))]

    async def sleep(self) -> None:
        """Free the memory of the weights, whose values are lost. No call may run."""
        self._has_weights, self.weight_version = False, -1
        if self._eyes is not None:
            self._eyes.forget()
        # only storages are resized: parameters keep their shapes, and `wake_up` needs no new ones
        for slot in self.weight_slots.values():
            storage = slot.untyped_storage()
            if storage.nbytes():
                self._storage_sizes[storage] = storage.nbytes()
                storage.resize_(0)
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    async def wake_up(self, *, weights_only: bool = False) -> None:
        """Allocate the memory of the weights again, which is all that ``sleep`` freed, whatever ``weights_only``."""
        for storage, size in self._storage_sizes.items():
            storage.resize_(size)
        self._storage_sizes.clear()

    def interrupt(self) -> None:
        """Ask the running ``generate`` to hand back what it has (``handed_back``) and return; from any thread. The
        request is dropped when a ``generate`` ends or weights are swapped."""
        self._interrupted.set()

    @property
    def weight_slots(self) -> dict[str, Tensor]:
        """Name -> memory of each weight that arrives: the checkpoint's (``mopd.engines.torch.loading.weight_slots``),
        or those of the student's adapter under PEFT's names."""
        if self._student:
            return self._adapters.slots(self._student)
        return weight_slots(self.model, None if self.sight is None else self.sight.dims.naming)

    async def load_weights(self, weights: Iterable[tuple[str, Tensor]], weight_version: int) -> None:
        """Replace all weights by ``(hf_name, tensor)`` pairs; tied weights arrive once. After an error the old weights
        answer on.

        Raises:
            ValueError: a name or shape does not match, or a weight is missing.
            NonFiniteError: a value is NaN or infinite, also if only in the engine's dtype.
        """
        await load_staged(self, stage_updates(weights, weight_version, into=self.weight_slots))

    async def swap_weights(self, prepared: Iterable[tuple[str, Tensor]], weight_version: int) -> None:
        """Copy prepared weights into the model and answer with them. A failure leaves the engine without weights."""
        slots = self.weight_slots
        self._interrupted.clear()
        self._has_weights, self.weight_version = False, -1
        # until all are copied there are none: after a failure half of them would be new
        with torch.no_grad():
            for name, tensor in prepared:
                slots[name].copy_(tensor)
        if self._eyes is not None:
            self._eyes.forget()
        self._has_weights, self.weight_version = True, weight_version

    async def score(self, asked: ToScore) -> list[Scores]:
        """Score the responses. ``ValueError`` for ``top_k`` or ids above the vocabulary, an empty prompt, or another
        ``hidden_size`` than the model's."""
        check_weights(self._has_weights, name=self.name)
        tokens = asked.tokens
        if not 0 <= asked.top_k <= self.vocab_size:
            raise ValueError(f"top_k is {asked.top_k}: {self.name} has a vocabulary of {self.vocab_size}")
        if asked.temperature <= 0:
            raise ValueError(f"temperature is {asked.temperature}: scoring needs a positive one")
        check_scoring(asked)
        check_length(asked, self.max_positions, LENGTH_KEY, name=self.name)
        if not self._head_checked and len(tokens):
            self._check_head(tokens[0])
        check_images(self.sight, tokens, asked.images, name=self.name)
        check_given(asked, vocab_size=self.vocab_size, name=self.name)
        check_hidden_size(asked.hidden_size, self.model.get_output_embeddings().weight.shape[1], name=self.name)
        results: dict[int, Scores] = {}
        for batch in token_budget_batches([len(t) for t in tokens], self._cfg.max_tokens_per_batch):
            own = asked.at(batch)
            with torch.inference_mode(), self._answering(asked.adapter):
                fields = self._score_batch(own)
            counts = [len(t) - start for t, start in zip(own.tokens, own.prompt_lengths, strict=True)]
            rows = [field.clone().split(counts) for field in fields]  # clones: see generate
            for i, ids_RK, logprobs_RK, logprobs_RN, hidden_RH in zip(batch, *rows, strict=True):
                results[i] = Scores(
                    ids=ids_RK,
                    logprobs=logprobs_RK,
                    token_logprobs=logprobs_RN[:, 0].clone(memory_format=torch.contiguous_format),  # also of one row
                    given_logprobs=logprobs_RN[:, 1:].contiguous() if asked.num_given else None,
                    hidden=hidden_RH if asked.hidden_size else None,
                )
        return [results[i] for i in range(len(tokens))]

    def _score_batch(self, asked: ToScore) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return ``(ids [R, K] int32, logprobs [R, K] fp32, logprobs [R, 1 + G] fp32 of the responses' own tokens and
        of the ids given, hidden states [R, hidden_size] bf16)`` of all responses end to end, on CPU.

        Sequences are padded on the right, which no token of a causal model attends to: no attention mask is needed.
        """
        device = self.model.device
        input_ids = torch.nn.utils.rnn.pad_sequence([t.long() for t in asked.tokens], batch_first=True)
        width = input_ids.shape[1]
        # logits at row t score token t + 1: a response from `start` needs the hidden states from start - 1 on
        places = [
            torch.arange(row * width + start - 1, row * width + len(t) - 1)
            for row, (t, start) in enumerate(zip(asked.tokens, asked.prompt_lengths, strict=True))
        ]
        places_R = torch.cat(places)  # the hidden state before each response token
        targets_RN = input_ids.view(-1)[places_R + 1][:, None]
        if asked.given is not None:
            targets_RN = torch.cat([targets_RN, torch.cat([*asked.given])], 1)
        hidden_BSH = self._hidden(input_ids.to(device), self._see(asked.tokens, asked.seen, pad_left=False))
        hidden_RH = hidden_BSH.reshape(-1, hidden_BSH.shape[-1])[places_R.to(device)]
        del hidden_BSH
        head = self.model.get_output_embeddings()
        scored = chunked_topk_logprobs(
            hidden_RH,
            head.weight,
            asked.top_k,
            max_rows=MAX_LOGITS_ROWS,
            target=targets_RN.to(device),
            temperature=asked.temperature,
            bias=getattr(head, "bias", None),
        )
        states = hidden_RH[:, : asked.hidden_size].to("cpu", torch.bfloat16)
        return scored.ids.cpu(), scored.logprobs.cpu(), cast(Tensor, scored.target_logprobs).cpu(), states

    def _answering(self, adapter: str) -> AbstractContextManager[None]:
        """Return the context in which an adapter, or the student's, stands beside the weights."""
        check_adapter(adapter, self._adapters.names - {STUDENT}, name=self.name)
        return self._adapters.used(adapter or self._student)

    def _recorded(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams
    ) -> AbstractContextManager[RouteRecorder | None]:
        """Return the context in which the routes of a batch are recorded, if ``sampling`` asks for them."""
        if sampling.routes is None:
            return nullcontext()
        longest = max(map(len, prompts)) + sampling.max_new_tokens
        return RouteRecorder(self.model, sampling.routes, len(prompts), longest, name=self.name).recording()

    def _see(
        self, sequences: Sequence[Any], images: Sequence[Sequence[PromptImage]], *, pad_left: bool
    ) -> SeenBatch | None:
        """Return the image inputs of a batch; ``None`` for a text model."""
        if self._eyes is None:
            return None
        return self._eyes.see(sequences, images, width=max(map(len, sequences)), pad_left=pad_left)

    def _hidden(self, input_ids_BS: Tensor, seen: SeenBatch | None = None) -> Tensor:
        """Return the last hidden states, [B, S, H]."""
        if seen is not None:
            given = self.model.base_model(
                input_ids=input_ids_BS, position_ids=seen.position_ids, use_cache=False, **seen.extra
            )
            return cast(Tensor, given.last_hidden_state)
        return cast(Tensor, self.model.get_decoder()(input_ids=input_ids_BS, use_cache=False).last_hidden_state)

    def _check_head(self, tokens: Tensor) -> None:
        """Raise ``UserError`` for a model that changes its logits after the output matrix (caps, scales): scoring
        applies that matrix itself."""
        probe = tokens[:8].long()[None].to(self.model.device)
        head = self.model.get_output_embeddings()
        with torch.inference_mode():
            expected = self.model(input_ids=probe, use_cache=False).logits
            actual = torch.nn.functional.linear(self._hidden(probe), head.weight, getattr(head, "bias", None))
            difference = (actual - expected).abs().max().item()
        if not difference <= 1e-3 * max(1.0, expected.abs().max().item()):
            raise UserError(
                f"{self.name}: model type {self.model.config.model_type!r} changes its logits after the output matrix "
                f"(by up to {difference:.3g}), which the torch engine cannot score: choose another model"
            )
        self._head_checked = True


def token_budget_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Group the indices of ``lengths`` into batches of similar length, longest first; ties keep the order of the
    request.

    The padded cost of a batch (rows x its longest length) stays within ``max_tokens``; a request that is longer on its
    own gets a batch of its own.

    Example: ``token_budget_batches([3, 9, 4], 10)`` is ``[[1], [2, 0]]``.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not batches or (len(batches[-1]) + 1) * lengths[batches[-1][0]] > max_tokens:
            batches.append([])
        batches[-1].append(index)
    return batches


class TorchIncoming:
    """Implements ``Incoming`` (``mopd.engines.interface``) for ``TorchEngine``."""

    def __init__(self, engine: TorchEngine) -> None:
        self._engine = engine
        self._receiver: Receiver | None = None
        self._given_up = threading.Event()
        """Set by ``leave`` or a later ``join``: ends the last ``join``."""

    async def join(self, order: GroupOrder, first_rank: int, metas: Sequence[TensorMeta]) -> None:
        """Leave the previous group and enter a new one, in another thread."""
        slots, device = self._target()
        # ends a `join` of another group that still waits
        self._given_up.set()
        given_up = self._given_up = threading.Event()  # made before the first await: a `leave` during it ends this join
        await self._close()
        try:
            self._receiver = await asyncio.to_thread(
                Receiver,
                order,
                first_rank,
                metas,
                keeps_views=False,
                slots=slots,
                device=device,
                given_up=given_up,
            )
        except TransferFailed as error:
            raise WeightsLost(f"{self._engine.name}: {error}") from error

    async def receive(
        self, weight_version: int, *, verify: bool, patience_s: float, ready: Callable[[], object]
    ) -> Reception:
        """Replace all weights by what the group sends. Blocks the event loop: no call may run meanwhile."""
        receiver, began = self._receiver, time.perf_counter()
        if receiver is None:
            raise WeightsLost(f"{self._engine.name} is in no group")
        ready()
        try:
            tensors = receiver.tensors(verify=verify, patience_s=patience_s)
            await self._engine.swap_weights(tensors, weight_version)
        except TransferFailed as error:
            raise WeightsLost(f"{self._engine.name}: {error}") from error
        return Reception(wait_s=receiver.wait_s, load_s=time.perf_counter() - began - receiver.wait_s)

    async def leave(self) -> None:
        """Leave the group; a waiting ``join`` ends at once."""
        self._given_up.set()
        await self._close()

    def _target(self) -> tuple[dict[str, Tensor], torch.device]:
        """Return the memory of weights that may be written where they arrive, and the device of the others."""
        slots = self._engine.weight_slots
        return slots, next(iter(slots.values())).device

    async def _close(self) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            await asyncio.to_thread(receiver.close)  # waits for a reception in progress
