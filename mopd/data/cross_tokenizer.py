"""One response in the tokens of two tokenizers, and log-probs of the one as log-probs of the other.

Both are taken for the bytes that their tokens stand for. A *chunk* lies between two neighbouring byte positions at
which a token of each ends: the finest pieces that both write as whole tokens. With the student's tokens ``sor|t|ed``
and the teacher's ``s|ort|ed`` the chunks are ``sort`` (2 tokens, 2 tokens) and ``ed`` (one to one).

Special tokens stand for no bytes: they part a response, and where the teacher has a counterpart they are chunks of
their own.
Shapes: R response tokens of the student, N of the teacher, C chunks, K most probable ids of a row.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from mopd.base.types import UserError

NO_CHUNK = -1
"""Chunk of a token that the other side has no counterpart for."""
NO_ROW = -1
"""The teacher's row of a token that begins nothing that it has a distribution over."""
NO_TOKEN = -1
"""The student's id of a token that only the teacher has."""
MAX_PAIRS = 2**20
"""Pairs of the teacher's tokens of which is remembered what one has behind the other."""
_SPACE = "\u2581"
"""What sentencepiece writes for a space."""
_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}
"""Byte of each character of byte-level BPE."""


@dataclass(frozen=True, slots=True)
class Aligned:
    """A response as a teacher with a tokenizer of its own reads it."""

    tokens: Tensor
    """[N] int64 of the teacher; at least one."""
    student_chunks: Tensor
    """[R] int64: chunk of each of the student's tokens, ascending; ``NO_CHUNK`` for one that nobody scores."""
    teacher_chunks: Tensor
    """[N] int64: the same of the teacher's."""
    is_one_to_one: Tensor
    """[C] bool: the chunk is one token of each, of the same bytes."""
    rows: Tensor
    """[R] int64: which of the teacher's N rows is a distribution over what the student's token begins; ``NO_ROW`` for
    none. It is that of a chunk's first token, where the teacher's own is as long at least."""

    def spread(self, teacher_N: Tensor, student_R: Tensor) -> Tensor:
        """Return the teacher's log-probs [R] fp32 over the student's tokens.

        A chunk's sum of ``teacher_N`` is divided over its student tokens in proportion to their own log-probs
        ``student_R`` (equally, where these are all 0): a token that the student was sure of decided nothing. The sum
        over a chunk of student - teacher is the chunk's difference of summed log-probs. A token in no chunk gets the
        student's own log-prob: no difference.
        """
        count = len(self.is_one_to_one)
        ours, theirs = self.student_chunks, self.teacher_chunks
        own = student_R.double()
        student_C, teacher_C, size_C = (
            own.new_zeros(count + 1).index_add(0, chunks % (count + 1), values)  # NO_CHUNK is the last one
            for chunks, values in ((ours, own), (theirs, teacher_N.double()), (ours, torch.ones_like(own)))
        )
        total = student_C[ours]
        share = torch.where(size_C[ours] == 1, 1.0, torch.where(total < 0, own / total, 1 / size_C[ours]))
        return torch.where(ours == NO_CHUNK, own, teacher_C[ours] * share).float()

    def advantage(self, teacher_N: Tensor, student_R: Tensor, first_R: Tensor) -> Tensor:
        """Return the advantage [R] fp32 of tokens without a row, ``spread`` - ``student_R``, and 0 for others.

        Of a chunk whose first token has a row, what is left of the teacher's log-prob is divided: without ``first_R``,
        the log-prob by that row of what the token begins. Where that is -inf, the teacher goes on in another way, and
        what follows has no advantage.
        """
        has_row = self.rows != NO_ROW
        begun = torch.where(has_row, first_R.double(), 0.0)
        count = len(self.is_one_to_one) + 1
        begun_C = begun.new_zeros(count).index_add(0, self.student_chunks % count, begun.clamp_min(-1e9))
        left = torch.where(has_row, 0.0, student_R.double())  # a token with a row takes no part in what is divided
        firsts = _first_of_each(self.teacher_chunks)
        rest = teacher_N.double() - torch.where(firsts, begun_C[self.teacher_chunks], 0.0)
        found = self.spread(rest, left) - left
        is_nobodys = has_row | (self.student_chunks == NO_CHUNK) | (begun_C[self.student_chunks] < -1e8)
        return found.masked_fill(is_nobodys, 0.0).float()

    def counts(self) -> tuple[int, int, int, int]:
        """Return numbers of tokens of the student; those in one-to-one chunks; those in none; chunks."""
        one_to_one = torch.cat([self.is_one_to_one, torch.zeros(1, dtype=torch.bool)])[self.student_chunks]
        unscored = (self.student_chunks == NO_CHUNK).sum()
        return len(self.student_chunks), int(one_to_one.sum()), int(unscored), len(self.is_one_to_one)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What the ids of a tokenizer stand for."""

    texts: Mapping[int, bytes]
    """Bytes of every id but special ones. A token may be part of a character."""
    added: Mapping[str, int]
    """Tokens that stand outside of the model, special or not, such as ``<think>``."""
    special: Mapping[str, int]
    """Those that decoding leaves out."""
    by_bytes: Mapping[bytes, int]
    """The id that encoding uses for some bytes: of a piece and a byte (``<0x61>``) the piece."""

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, key: str) -> Vocabulary:
        """Read a tokenizer of the ``tokenizers`` library.

        Raises:
            UserError: with ``key``, if it is none, or its tokens are not known to be bytes.
        """
        decoders = _decoders(json.loads(backend_of(tokenizer, key).to_str())["decoder"])
        kinds = {decoder["type"] for decoder in decoders}
        is_byte_level = "ByteLevel" in kinds
        replaced = [decoder["pattern"].get("String") for decoder in decoders if decoder["type"] == "Replace"]
        if not is_byte_level and _SPACE not in replaced and "Metaspace" not in kinds and kinds != {"Fuse"}:
            raise UserError(
                f"{key}: the tokenizer's decoder is {', '.join(sorted(kinds)) or 'absent'}, so that the bytes of its "
                "tokens are not known: another tokenizer has to be byte-level BPE or sentencepiece"
            )
        added = {str(token.content): i for i, token in tokenizer.added_tokens_decoder.items()}
        special = {str(token.content): i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        special |= dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
        texts, bytewise = dict[int, bytes](), dict[bytes, int]()
        by_bytes = dict[bytes, int]()
        for token, i in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
            if token in special:
                continue
            number = re.fullmatch(r"<0x([0-9A-F]{2})>", token)
            if token in added or kinds == {"Fuse"}:
                texts[i] = token.encode()
            elif is_byte_level:
                texts[i] = bytes(_BYTES[character] for character in token)
            elif number and "ByteFallback" in kinds:
                texts[i] = bytes([int(number[1], 16)])
                bytewise[texts[i]] = i
                continue
            else:
                texts[i] = token.replace(_SPACE, " ").encode()
            by_bytes.setdefault(texts[i], i)
        return cls(texts, added | special, special, bytewise | by_bytes)


class CrossTokenizer:
    """Reads a student's responses in the tokens of one teacher."""

    def __init__(
        self,
        student: PreTrainedTokenizerBase,
        teacher: PreTrainedTokenizerBase,
        special: Mapping[str, str | None],
        *,
        most_tokens: int,
        key: str,
    ) -> None:
        """Set up. ``special`` is the teacher's ``tokenizer_map``; what it does not name is the student's eos, which is
        the teacher's, and special tokens of one text, which are one another. ``most_tokens``: N at most.

        Raises:
            UserError: with ``key``, for special tokens without a counterpart, by name; for names that no token has; for
                a tokenizer whose tokens are not known to be bytes.
        """
        ours, theirs = Vocabulary.of(student, "student.model"), Vocabulary.of(teacher, f"{key}.model")
        self._most, self._end, self._key = most_tokens, teacher.eos_token_id, key
        if self._end is None or student.eos_token_id is None:
            raise UserError(f"{key}.tokenizer is own, but the student's tokenizer or the teacher's has no eos token")
        found = _counterparts(ours, theirs, special, key)
        self._special = {student.eos_token_id: self._end} | found
        missing = sorted(token for token, i in ours.special.items() if i not in self._special)
        if missing:
            example = ", ".join(f"{json.dumps(token)}: null" for token in missing)
            raise UserError(
                f"{key}.tokenizer is own, but special tokens of the student have no counterpart: add to "
                f"{key}.tokenizer_map the teacher's token, or null for one that nobody is to score: {{{example}}}"
            )
        self._texts = {i: text for i, text in ours.texts.items() if i not in self._special}
        self._their_texts = theirs.texts
        self._backend = Tokenizer.from_str(backend_of(teacher, key).to_str())
        self._backend.encode_special_tokens = True  # a text that spells a special token is a text
        self._backend.no_truncation()
        self._backend.no_padding()
        self._student_ids = torch.full((max(teacher.get_vocab().values()) + 2,), NO_TOKEN, dtype=torch.int64)
        """[teacher's ids + 1]: the last one stands for ids that only pad its output matrix."""
        writes = backend_of(student, "student.model")
        for i, text in theirs.texts.items():
            self._student_ids[i] = ours.by_bytes.get(text, _first_piece(text, writes, ours))
        for i, other in reversed(self._special.items()):  # of several the first, eos
            if other is not None:
                self._student_ids[other] = i
        self._first = cache(lambda text: ours.by_bytes.get(text, _first_piece(text, writes, ours)))
        self._rest_of = lru_cache(maxsize=MAX_PAIRS)(self._rest)
        self._lengths, self._first_bytes = torch.zeros_like(self._student_ids), torch.zeros_like(self._student_ids)
        for i, text in theirs.texts.items():
            self._lengths[i], self._first_bytes[i] = len(text), text[0] if text else 0

    def student_ids(self, ids: Tensor) -> Tensor:
        """Return the student's ids int64 of the same bytes, or the same role, as the teacher's; of a token that the
        student writes in pieces the first one; ``NO_TOKEN`` where it has none."""
        return self._student_ids[ids.long().clamp_max(len(self._student_ids) - 1)]

    def student_rows(self, ids: Tensor, logprobs: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows of the teacher's ids [M, K] and log-probs [M, K] fp32 as rows of the student's, without repeats:
        the probability of a student's id is that of all the teacher's tokens that begin with it (``student_ids``).
        A place without an id holds ``NO_TOKEN`` and -inf."""
        found, mass = _added_up(self.student_ids(ids), logprobs.double().exp())
        return found, mass.log().float().masked_fill(found == NO_TOKEN, -torch.inf)

    def as_text(
        self, rows: tuple[Tensor, Tensor], after: Tensor, before: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return ``student_rows`` [M, K] as distributions over what follows a text, however the teacher cuts it.

        A teacher that reads ``a`` does not expect ``b`` where ``ab`` is one token: it would have said that. With q the
        row at which ``a`` was read, and r the one after it, the probability of a student's id y is

            (q(a) r(y) + sum of q(z) over tokens z that are ``a`` and more, which begins with y) / M

        M is the sum of q over ``a`` and all such z of the row. The K most probable are kept; rows after a token that
        no other continues are as they were. What longer tokens two or more back would have said is left out.

        Args:
            rows: ids and log-probs.
            after: [M] int64: the teacher's token before each row; ``NO_TOKEN`` for none.
            before: of each row the one before it: the teacher's ids [M, K], log-probs [M, K], those of ``after`` [M].
        """
        begins, rest = self._continued(after, before[0])
        chosen = begins.any(1)
        if not chosen.any():
            return rows
        again = before[2][chosen].double().exp()
        more = before[1][chosen].double().exp() * begins[chosen]
        shares = torch.cat([again[:, None] * rows[1][chosen].double().exp(), more], 1)
        both, mass = _added_up(torch.cat([rows[0][chosen], rest[chosen]], 1), shares)
        best = mass.masked_fill(both == NO_TOKEN, 0.0).topk(rows[0].shape[1], dim=1)
        shares = best.values / (again + more.sum(1))[:, None]
        found, logprobs = rows[0].clone(), rows[1].clone()
        found[chosen] = both.gather(1, best.indices).masked_fill(shares == 0, NO_TOKEN)
        logprobs[chosen] = shares.log().float()
        return found, logprobs

    def _continued(self, after: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return which of the teacher's ``ids`` [M, K] are more than the tokens ``after`` [M], which they begin with,
        and the student's first id of what they have behind these; ``NO_TOKEN`` where it has none, and elsewhere."""
        last = len(self._lengths) - 1
        ids, after = ids.long().clamp_max(last), after.masked_fill(after == NO_TOKEN, last)
        lengths = self._lengths[after][:, None]
        begins = (
            (lengths > 0)
            & (self._lengths[ids] > lengths)
            & (self._first_bytes[ids] == self._first_bytes[after][:, None])
        )
        row, place = begins.nonzero(as_tuple=True)
        pairs, where = torch.unique(after[row] * (last + 1) + ids[row, place], return_inverse=True)
        found = [self._rest_of(pair // (last + 1), pair % (last + 1)) for pair in pairs.tolist()]
        rest = torch.full_like(ids, NO_TOKEN)
        begins[row, place] = torch.tensor([own is not None for own in found], dtype=torch.bool)[where]
        rest[row, place] = torch.tensor([NO_TOKEN if own is None else own for own in found], dtype=ids.dtype)[where]
        return begins, rest

    def _rest(self, begun: int, token: int) -> int | None:
        """Return the student's first id of what the teacher's ``token`` has behind the token ``begun``; None if it does
        not begin with that."""
        start, text = self._their_texts[begun], self._their_texts[token]
        return self._first(text[len(start) :]) if text.startswith(start) else None

    def align(self, response: Sequence[int]) -> Aligned:
        """Return a response in the teacher's tokens, which are encoded apart from the prompt, as its start is a
        boundary. A response may end inside a character; the student's tokens from there on are in no chunk, and so are
        those of a text whose bytes the teacher's tokenizer changes."""
        tokens, ours, theirs, one_to_one, rows = list[int](), list[int](), list[int](), list[bool](), list[int]()
        start = 0
        while start < len(response):
            if response[start] not in self._texts:
                other = self._special.get(response[start])
                ours.append(NO_CHUNK if other is None else len(one_to_one))
                rows.append(NO_ROW if other is None else len(tokens))
                if other is not None:
                    tokens.append(other)
                    theirs.append(len(one_to_one))
                    one_to_one.append(True)
                start += 1
                continue
            end = start + 1
            while end < len(response) and response[end] in self._texts:
                end += 1
            written, own, other_chunks, kinds, firsts = self._align_text([self._texts[i] for i in response[start:end]])
            rows += [NO_ROW if row == NO_ROW else row + len(tokens) for row in firsts]
            for chunks, more in ((ours, own), (theirs, other_chunks)):
                chunks += [NO_CHUNK if chunk == NO_CHUNK else chunk + len(one_to_one) for chunk in more]
            tokens += written
            one_to_one += kinds
            start = end
        return self._limited(tokens, ours, theirs, one_to_one, rows)

    def _align_text(self, parts: Sequence[bytes]) -> tuple[list[int], list[int], list[int], list[bool], list[int]]:
        """Return, of some text without special tokens, the teacher's tokens, both sides' chunks, which of these are one
        to one, and the rows of the student's tokens (``Aligned``)."""
        whole = b"".join(parts)
        text = whole[: _valid_length(whole)]
        tokens = self._backend.encode(text.decode(), add_special_tokens=False).ids
        written = [self._their_texts.get(token) for token in tokens]
        lengths = [len(own or b"") for own in written]
        again = b"".join(own or b"" for own in written)
        has_space = again == b" " + text  # sentencepiece puts one before a text
        if None in written or not (has_space or again == text):
            return tokens, [NO_CHUNK] * len(parts), [NO_CHUNK] * len(tokens), [], [NO_ROW] * len(parts)
        if has_space:
            lengths[0] -= 1
        ours, theirs, count = common_chunks([len(part) for part in parts], lengths)
        sizes = Counter(ours), Counter(theirs)
        kinds = [sizes[0][chunk] == sizes[1][chunk] == 1 for chunk in range(count)]
        if has_space and kinds:
            kinds[0] = False  # that token is another one
        rows, first = [NO_ROW] * len(parts), dict(reversed([(chunk, row) for row, chunk in enumerate(theirs)]))
        for i, chunk in enumerate(ours):
            begins = chunk != NO_CHUNK and (i == 0 or ours[i - 1] != chunk) and not (has_space and chunk == 0)
            if begins and 0 < len(parts[i]) <= lengths[first[chunk]]:
                rows[i] = first[chunk]
        return tokens, ours, theirs, kinds, rows

    def _limited(
        self, tokens: list[int], ours: list[int], theirs: list[int], one_to_one: list[bool], rows: list[int]
    ) -> Aligned:
        """Return the whole, without the chunks that end after ``most_tokens``."""
        count = min((chunk for chunk in theirs[self._most :] if chunk != NO_CHUNK), default=len(one_to_one))
        ours, theirs = ([chunk if chunk < count else NO_CHUNK for chunk in chunks] for chunks in (ours, theirs))
        rows = [NO_ROW if chunk == NO_CHUNK else row for row, chunk in zip(rows, ours, strict=True)]
        if not tokens:  # a teacher is asked for something
            tokens, theirs = [self._end], [NO_CHUNK]
        return Aligned(
            tokens=torch.tensor(tokens[: self._most]),
            student_chunks=torch.tensor(ours, dtype=torch.int64),
            teacher_chunks=torch.tensor(theirs[: self._most]),
            is_one_to_one=torch.tensor(one_to_one[:count], dtype=torch.bool),
            rows=torch.tensor(rows, dtype=torch.int64),
        )


def _first_of_each(chunks: Tensor) -> Tensor:
    """Return whether each token [N] is the first of its chunk, bool; ``chunks`` ascend but for ``NO_CHUNK``."""
    before = torch.nn.functional.pad(chunks[:-1], (1, 0), value=NO_CHUNK - 1)
    return (chunks != before) & (chunks != NO_CHUNK)


def common_chunks(ours: Sequence[int], theirs: Sequence[int]) -> tuple[list[int], list[int], int]:
    """Return the chunk of each token of two tokenizers and the number of chunks, from the tokens' numbers of bytes.

    A chunk ends wherever a token of each ends. A token without bytes is in the chunk that ends where it stands (the
    first one at the start); one after the last common end is in none.
    """
    ends, other_ends = list(accumulate(ours)), list(accumulate(theirs))
    common = sorted({*ends} & {*other_ends} - {0})
    places = torch.tensor(common, dtype=torch.int64)

    def chunks_of(positions: list[int]) -> list[int]:
        found = torch.searchsorted(places, torch.tensor(positions, dtype=torch.int64)).tolist()
        return [chunk if chunk < len(common) else NO_CHUNK for chunk in found]

    return chunks_of(ends), chunks_of(other_ends), len(common)


def backend_of(tokenizer: PreTrainedTokenizerBase, key: str) -> Tokenizer:
    """Return what the ``tokenizers`` library knows of a tokenizer. ``UserError`` with ``key`` for a slow one."""
    backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UserError(f"{key}: {type(tokenizer).__name__} has no tokenizer.json: save it as a fast tokenizer")
    return backend


def _counterparts(
    ours: Vocabulary, theirs: Vocabulary, special: Mapping[str, str | None], key: str
) -> dict[int, int | None]:
    """Return the teacher's id, or none, of each of the student's tokens that ``special`` names or both define."""
    found: dict[int, int | None] = {}
    for token, other in special.items():
        for name, known, whose in ((token, ours, "student.model"), (other, theirs, f"{key}.model")):
            if name is not None and name not in known.added:
                raise UserError(
                    f"{key}.tokenizer_map names {name!r}, which is no special or added token of {whose}'s tokenizer "
                    f"(it has {', '.join(sorted(known.added)[:20])}): correct it"
                )
        found[ours.added[token]] = None if other is None else theirs.added[other]
    shared = {i: theirs.special[token] for token, i in ours.special.items() if token in theirs.special}
    return found | {i: other for i, other in shared.items() if i not in found}


def _added_up(ids: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """Return ids [M, K] without repeats, ``NO_TOKEN`` behind them, and the sum [M, K] of each one's shares."""
    own, order = ids.sort(dim=1)
    place = torch.nn.functional.pad((own[:, 1:] != own[:, :-1]).cumsum(1), (1, 0))
    found = torch.full_like(own, NO_TOKEN).scatter(1, place, own)
    return found, torch.zeros_like(shares).scatter_add(1, place, shares.gather(1, order))


def _first_piece(text: bytes, student: Tokenizer, vocabulary: Vocabulary) -> int:
    """Return the first token with which the student writes ``text``; ``NO_TOKEN`` for a part of a character."""
    if _valid_length(text) < len(text):
        return NO_TOKEN
    token = next(iter(student.encode(text.decode(), add_special_tokens=False).ids), NO_TOKEN)
    own = vocabulary.texts.get(token, b"")
    return token if own and text.startswith(own) else NO_TOKEN


def _decoders(decoder: Any) -> list[dict[str, Any]]:
    """Return a decoder of a ``tokenizer.json`` and those inside of it that are none but a sequence."""
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [own for inner in decoder["decoders"] for own in _decoders(inner)]
    return [decoder]


def _valid_length(text: bytes) -> int:
    """Return how many bytes are whole characters before the first that are none."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return error.start
    return len(text)
