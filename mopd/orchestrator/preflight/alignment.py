"""Check that a teacher's scores are those of the rows that were asked about, where no second model can say so.

The teacher continues contexts greedily, and its generation reports the log-prob of every token that it drew. The same
continuations are then scored, by the way that training takes. Scores and reports have to agree, and every mistake that
is made on that way has to disagree by far: rows one position off, a prompt without its first token or with it twice, a
prompt that lost its left half. Contexts of four tokens are among them, where one token more or less changes everything
even in a low-precision engine.

Two more checks catch what both ways would do alike. Another first token has to change the scores, or the server cuts
prompts on the left. And one token repeated gives the same distribution at every place (attention over equal values is
that value), in every model whose positions are rotary: something put before each prompt shows as a difference.

A teacher that sees images is asked about prompts that hold some; a black image in their place has to change its scores.

Shapes: N tokens of a continuation, K top-k.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from PIL import Image
from torch import Tensor

from mopd.base.types import PromptImage
from mopd.data.image_files import digest_of
from mopd.engines.interface import Generation, Images, SamplingParams, Scores, ToDraw, ToScore
from mopd.engines.replicas.interface import SampleFailed
from mopd.engines.vision import EngineVision
from mopd.orchestrator.teachers import TeacherGroup

NUM_TOKENS = 8
"""Tokens of a continuation."""
NUM_PIECE_TOKENS = 3
"""Tokens of a short context, beside its first token."""
PIECES_PER_PROBE = 2
FARTHER = 10.0
"""Factor by which every other reading has to be farther off than the right one."""
MIN_EFFECT, MIN_EFFECT_FLOAT32 = 1e-4, 1e-5
"""Least mean |log-prob difference| that another first token of a long prompt makes, in most dtypes and in float32."""
NOISE = 3.0
"""Factor by which such an effect has to exceed an engine's difference from itself."""
NUM_TEXT_TOKENS = 64
"""Tokens of a response that is scored after a whole prompt."""
REPEATS = 4
NUM_REPEATED = 8
MAX_REPEATED_SHARE = 0.2
"""Most that a repeated token's rows may differ, as a share of their difference behind a known first token: beyond it
something unknown stands before the prompt."""
NUM_BEST = 4
"""Most probable tokens of a row that are compared."""

Context = tuple[tuple[int, ...], tuple[PromptImage, ...]]
"""Tokens, and the images whose placeholders are among them."""
OTHER_READINGS = {
    "later": "rows that stand one place too late",
    "earlier": "rows that stand one place too early",
    "dropped": "a prompt without its first token (does the server add one?)",
    "doubled": "a prompt with its first token twice (does the server drop one?)",
    "cut": "a prompt without its left half",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Alignment:
    """Outcome of the check."""

    difference: float
    """Mean |log-prob difference| between scoring and generating, of the worse of short and long contexts."""
    nearest: float
    """The same for the wrong reading that comes nearest."""
    num_tokens: int
    problem: str
    """Why the scores cannot be trusted; empty when they can."""


@dataclass(frozen=True, slots=True)
class Text:
    """A probe: tokens of a domain's prompt and of the student's response to it."""

    tokens: tuple[int, ...]
    prompt_length: int
    images: tuple[PromptImage, ...] = ()
    """Images of the prompt."""


@dataclass(frozen=True, slots=True)
class Continued:
    """A context and the teacher's greedy continuation."""

    context: tuple[int, ...]
    drawn: Generation
    images: tuple[PromptImage, ...] = ()

    def scored_after(self, context: Sequence[int]) -> tuple[Tensor, int]:
        """Return the tokens to score, and where the response begins, with ``context`` as the prompt."""
        return torch.cat([torch.tensor(context, dtype=torch.int64), self.drawn.tokens]), len(context)


class AlignmentCheck:
    """Asks one teacher, by way of its router; nothing is kept."""

    def __init__(
        self,
        group: TeacherGroup,
        *,
        top_k: int,
        longest: int,
        limit: float,
        dtype: str,
        sight: EngineVision | None = None,
    ) -> None:
        """Set up. ``longest`` is the longest sequence that a replica need take, ``limit`` the largest mean difference
        between the log-probs of scoring and generating, ``dtype`` the engine's, ``sight`` the teacher's where probes
        may have images."""
        self._group, self._sight = group, sight
        self._vision_ids = frozenset(() if sight is None else sight.dims.token_ids)
        self._top_k, self._longest, self._limit, self._dtype = top_k, longest, limit, dtype
        self._min_effect = MIN_EFFECT_FLOAT32 if dtype == "float32" else MIN_EFFECT

    async def run(self, probes: Sequence[Text], *, has_rotary_positions: bool) -> Alignment:
        """Compare scores of ``probes``. ``has_rotary_positions``: the teacher's positions are rotary and its attention
        plain, so that a repeated token is a test. ``SampleFailed`` where a replica does not answer."""
        size = max(1, min(NUM_PIECE_TOKENS, self._longest - 4))
        texts = [self._without_images(probe) for probe in probes]
        short = await self._continue(_short_contexts(texts, size), room=1)
        long = await self._continue(self._long_contexts(probes), room=0)
        right = [await self._score([(one, one.context) for one in kind]) for kind in (short, long)]
        kinds = zip((short, long), right, strict=True)
        difference = max(_difference(kind, rows, self._vision_ids) for kind, rows in kinds)
        others = await self._others(short, long, [*right[0], *right[1]])
        problem = (
            self._find_misreading(difference, others)
            or await self._find_lost_first_token(short, right[0], difference)
            or await self._find_cut_prompt(probes)
            or await self._find_lost_image(probes)
            or (await self._find_prefix(texts) if has_rotary_positions else "")
        )
        return Alignment(
            difference=difference,
            nearest=min(farthest for farthest, _ in others.values()),
            num_tokens=sum(len(one.drawn.tokens) for one in [*short, *long]),
            problem=problem,
        )

    async def _others(
        self, short: Sequence[Continued], long: Sequence[Continued], right: Sequence[Scores]
    ) -> dict[str, tuple[float, float]]:
        """Return each wrong reading's mean distance from what was generated: where it is farthest, and over all
        contexts.

        One context that speaks against a reading is enough, where a continuation repeats itself none can.
        """
        pairs = list(zip([*short, *long], right, strict=True))
        distances: dict[str, list[Tensor]] = {}
        """[2, N] each: by whatever speaks against the reading, and how well it fits."""
        for name, shift in (("later", 1), ("earlier", -1)):
            distances[name] = [_shifted_distance(one, rows, shift) for one, rows in pairs if len(rows.ids) > 1]
        asked = {
            "dropped": [(one, one.context[1:]) for one in short],
            "doubled": [(one, (one.context[0], *one.context)) for one in short],
            "cut": [
                (one, one.context[len(one.context) // 2 :]) for one in long if len(one.context) > 1 and not one.images
            ],
        }
        known = {one.context: rows for one, rows in pairs}
        for name, questions in asked.items():
            answers = await self._score(questions)
            distances[name] = [
                _other_distance(one, known[one.context], rows)
                for (one, _), rows in zip(questions, answers, strict=True)
            ]
        return {
            name: (max(own[0].mean().item() for own in found), torch.cat(found, dim=1)[1].mean().item())
            for name, found in distances.items()
            if found
        }

    def _find_misreading(self, difference: float, others: dict[str, tuple[float, float]]) -> str:
        nearest = min(others, key=lambda name: others[name][1])
        if not difference <= self._limit:
            fits = others[nearest][1] <= max(self._limit, difference / FARTHER)
            hint = f"; they fit {OTHER_READINGS[nearest]} ({others[nearest][1]:.1e})" if fits else ""
            return f"they differ from what its own generation reports by {difference:.2e} (limit {self._limit:g}){hint}"
        for name, (farthest, _) in others.items():
            # A second <bos> in front of one is almost nothing to many large models, and below a coarse engine's noise.
            if name == "doubled" and self._dtype != "float32":
                continue
            if not farthest > max(self._limit, FARTHER * difference):
                return (
                    f"they fit {OTHER_READINGS[name]} as well ({farthest:.1e}) as what was asked ({difference:.1e}): "
                    "does the server change prompts?"
                )
        return ""

    async def _find_lost_first_token(
        self, short: Sequence[Continued], rows: Sequence[Scores], difference: float
    ) -> str:
        """Check that another first token of a short context changes everything."""
        changed = await self._score([(one, _other_first(one.context)) for one in short])
        effect = max(_change(one, other) for one, other in zip(rows, changed, strict=True))
        if effect > max(self._limit, FARTHER * difference):
            return ""
        return f"another first token does not change them (by {effect:.1e}): does the server drop it?"

    async def _find_cut_prompt(self, probes: Sequence[Text]) -> str:
        """Check that another first token of each whole prompt changes its scores above the engine's own noise."""
        lengths = [min(self._longest, probe.prompt_length + NUM_TEXT_TOKENS) for probe in probes]
        plain = [replace(probe, tokens=probe.tokens[:length]) for probe, length in zip(probes, lengths, strict=True)]
        other = [replace(text, tokens=_other_first(text.tokens, self._vision_ids)) for text in plain]
        for text, (effect, noise) in zip(plain, await self._effects(plain, other), strict=True):
            if not effect > max(self._min_effect, NOISE * noise):
                return (
                    f"another first token of a prompt of {text.prompt_length} tokens does not change them (by "
                    f"{effect:.1e}): does the server cut prompts on the left?"
                )
        return ""

    async def _find_lost_image(self, probes: Sequence[Text]) -> str:
        """Check that a black image in place of a prompt's changes scores above the engine's own noise."""
        seen = [replace(probe, tokens=probe.tokens[: self._longest]) for probe in probes if probe.images]
        if not seen:
            return ""
        black = [replace(probe, images=tuple(map(self._black, probe.images))) for probe in seen]
        effects, noises = zip(*await self._effects(seen, black), strict=True)
        if max(effects) > max(self._min_effect, NOISE * max(noises)):
            return ""
        return f"another image does not change them (by {max(effects):.1e}): does the server drop images?"

    async def _effects(self, plain: Sequence[Text], other: Sequence[Text]) -> list[tuple[float, float]]:
        """Return how far each text's scores are from those of the other one, and from a second answer to the first."""
        first, again, changed = [
            await self._ask(
                [(torch.tensor(text.tokens), text.prompt_length) for text in texts], [text.images for text in texts]
            )
            for texts in (plain, plain, other)
        ]
        answers = zip(first, again, changed, strict=True)
        return [(_change(one, unlike), _change(one, same)) for one, same, unlike in answers]

    def _black(self, image: PromptImage) -> PromptImage:
        """Return a black image of the same grid."""
        assert self._sight is not None, "a probe has images where the teacher sees them"
        side, (_, height, width) = self._sight.processing.patch_size, image.grid
        stream = io.BytesIO()
        Image.new("RGB", (width * side, height * side)).save(stream, format="PNG")
        content = stream.getvalue()
        return PromptImage(digest=digest_of(content), grid=image.grid, load=lambda: content)

    def _without_images(self, probe: Text) -> Text:
        """Return the probe's text alone."""
        if not self._vision_ids:
            return probe
        kept = [place for place, token in enumerate(probe.tokens) if token not in self._vision_ids]
        length = sum(place < probe.prompt_length for place in kept)
        return Text(tuple(probe.tokens[place] for place in kept), length)

    def _long_contexts(self, probes: Sequence[Text]) -> list[Context]:
        """Return most of each prompt, where few teachers are certain of what comes next; all of it; and the prompt with
        half of the response. No image is cut: contexts end after the last one."""
        contexts: dict[Hashable, Context] = {}
        for probe in probes:
            least = max((i + 1 for i, token in enumerate(probe.tokens) if token in self._vision_ids), default=1)
            prompt = probe.prompt_length
            for end in (3 * prompt // 4, prompt, (prompt + len(probe.tokens)) // 2):
                context = probe.tokens[: min(max(end, least), self._longest - 1)]
                contexts[context, tuple(image.digest for image in probe.images)] = context, probe.images
        return [*contexts.values()]

    async def _find_prefix(self, probes: Sequence[Text]) -> str:
        """Check that a repeated token gives one distribution at every place."""
        count = min(REPEATS, self._longest - 1)
        first = probes[0].tokens[0]
        seen = dict.fromkeys(token for probe in probes for token in probe.tokens if token != first)
        repeated = [*seen][:: max(1, len(seen) // NUM_REPEATED)][:NUM_REPEATED]
        if count < 3 or not repeated:
            return ""
        plain = [([token] * count, 1) for token in repeated]
        known = [([first, *[token] * count], 2) for token in repeated]
        rows = await self._ask([(torch.tensor(tokens), start) for tokens, start in [*plain, *known]])
        alone, after = (
            torch.stack([_spread(given) for given in part]).mean().item()
            for part in (rows[: len(plain)], rows[len(plain) :])
        )
        if alone <= self._limit or alone <= MAX_REPEATED_SHARE * after:
            return ""
        return (
            f"a repeated token does not get one distribution at every place (by {alone:.1e}): does the server put "
            "something before each prompt, such as another <bos> or a chat template?"
        )

    async def _continue(self, contexts: Sequence[Context], *, room: int) -> list[Continued]:
        """Return the contexts with their greedy continuations; ``room`` tokens stay free for longer prompts."""
        tokens, images = [context for context, _ in contexts], [own for _, own in contexts]
        count = max(1, min(NUM_TOKENS, self._longest - room - max(map(len, tokens))))
        sampling = SamplingParams(max_new_tokens=count, temperature=0.0)
        async with self._group.kept_awake():
            drawn = await self._group.generate(ToDraw(tokens, sampling, [0] * len(tokens), images=images))
        return [Continued(context, given, own) for (context, own), given in zip(contexts, drawn, strict=True)]

    async def _score(self, questions: Sequence[tuple[Continued, Sequence[int]]]) -> list[Scores]:
        asked = [one.scored_after(context) for one, context in questions]
        return await self._ask(asked, [one.images for one, _ in questions])

    async def _ask(self, sequences: Sequence[tuple[Tensor, int]], images: Images = None) -> list[Scores]:
        tokens, starts = [tokens for tokens, _ in sequences], [start for _, start in sequences]
        request = ToScore(tokens, starts, top_k=self._top_k, temperature=1.0, images=images)
        answers = await self._group.score(request)
        return [answer for answer in answers if not isinstance(answer, SampleFailed)]  # the first of these was raised


def _short_contexts(probes: Sequence[Text], size: int) -> list[Context]:
    """Return contexts of a prompt's first token and ``size`` tokens of its text."""
    contexts: list[Context] = []
    for probe in probes:
        text = probe.tokens[1:]
        for place in range(PIECES_PER_PROBE):
            start = (place + 1) * max(0, len(text) - size) // (PIECES_PER_PROBE + 1)
            contexts.append(((probe.tokens[0], *text[start : start + size]), ()))
    return contexts


def _other_first(context: tuple[int, ...], barred: Collection[int] = ()) -> tuple[int, ...]:
    """Return the context with another token of its own, which every vocabulary has and is not barred, in front."""
    first = context[0]
    own = (token for token in reversed(context) if token != first and token not in barred)
    other = next(own, first - 1 if first else 1)
    return (other, *context[1:])


def _change(one: Scores, other: Scores) -> float:
    """Return the mean |difference| of two scores of one response: of its tokens, and of what the rows list, by rank."""
    tokens = (one.token_logprobs - other.token_logprobs).abs()
    listed = (one.logprobs - other.logprobs).abs().nan_to_num(0.0)  # -inf may be listed
    return torch.cat([tokens, listed.flatten()]).mean().item()


def _best(rows: Scores, barred: Collection[int], *, otherwise: Tensor) -> Tensor:
    """Return the largest log-prob [N] of each row, ``barred`` ids left out, or ``otherwise`` where no other is
    listed."""
    is_barred = torch.isin(rows.ids, torch.tensor([*barred], dtype=rows.ids.dtype))
    return torch.where(is_barred.all(1), otherwise, rows.logprobs.masked_fill(is_barred, -torch.inf).amax(1))


def _difference(continued: Sequence[Continued], scores: Sequence[Scores], barred: Collection[int]) -> float:
    """Return the mean distance between scored and generated, by whichever says more: the tokens' own log-probs, the
    rows' best (a greedy token is it, where ``barred`` ids are left out), or how far below its best a row has the
    token."""
    distances = []
    for one, rows in zip(continued, scores, strict=True):
        expected = one.drawn.logprobs
        best = _best(rows, barred, otherwise=expected) if barred else rows.logprobs[:, 0]
        listed = _listed(rows, one.drawn.tokens, otherwise=rows.logprobs[:, -1])
        distances.append(torch.stack([(rows.token_logprobs - expected).abs(), (best - expected).abs(), best - listed]))
    return torch.cat(distances, dim=1).mean(1).max().item()


def _shifted_distance(one: Continued, rows: Scores, shift: int) -> Tensor:
    """Return distances [2, N - 1] from the rows ``shift`` positions further on: by token or by value, and by token
    alone."""
    keep = slice(0, -1) if shift > 0 else slice(1, None)
    taken = slice(1, None) if shift > 0 else slice(0, -1)
    other = Scores(ids=rows.ids[taken], logprobs=rows.logprobs[taken], token_logprobs=rows.token_logprobs[taken])
    tokens, expected = one.drawn.tokens[keep], one.drawn.logprobs[keep]
    lowest = torch.minimum(other.logprobs[:, -1], expected)  # an absent token is below the list
    by_token = (_listed(other, tokens, otherwise=lowest) - expected).abs()
    return torch.stack([torch.maximum(by_token, (other.token_logprobs - expected).abs()), by_token])


def _other_distance(one: Continued, right: Scores, other: Scores) -> Tensor:
    """Return distances [2, N] of the rows after another prompt: from what was generated or, where a teacher is certain
    of its tokens whatever stands before them, from all that the right rows list; and from what was generated alone."""
    tokens = (other.token_logprobs - one.drawn.logprobs).abs()
    rows = (other.logprobs - right.logprobs).abs().nan_to_num(0.0).mean(1)  # -inf may be listed
    return torch.stack([torch.maximum(tokens, rows), tokens])


def _listed(rows: Scores, tokens: Tensor, *, otherwise: Tensor) -> Tensor:
    """Return the log-probs [N] that the rows list for ``tokens`` [N], ``otherwise`` [N] for those that are not
    listed."""
    is_own = rows.ids == tokens[:, None]
    return torch.where(is_own.any(1), torch.where(is_own, rows.logprobs, 0.0).sum(1), otherwise)


def _spread(rows: Scores) -> Tensor:
    """Return the mean |difference| of the best log-probs between the first row and the others."""
    best = rows.logprobs[:, :NUM_BEST]
    return (best[1:] - best[:1]).abs().mean()
