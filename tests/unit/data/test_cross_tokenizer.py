"""Chunks between common byte boundaries of two tokenizers, held against brute force and the definition in float64.

Not exercised here: tokenizers that normalise so that byte sums agree by chance.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from mopd.base.types import UserError
from mopd.data.cross_tokenizer import NO_CHUNK, NO_ROW, NO_TOKEN, Aligned, CrossTokenizer, common_chunks
from tools.quickstart.tokenizer import build_other_tokenizer, build_tokenizer

WORDS = ["".join(random.Random(i).choices("abcdefghij", k=2 + i % 5)) for i in range(600)]
ALPHABETS = [
    "abcdefghij ",
    "äöüßéñ ",
    "漢字かなカナ",
    "🙂👩‍👩‍👧🇩🇪",
    "\t\n  ",
    "0123456789.,-",
    "ﬁ①Ａ\u0301\u200d\ufeff",
]
SPECIAL = ("<eos>", "<pad>", "<think>")
UNSCORED = ("<pad>", "<bos>", "<unk>", "<user>", "<assistant>")
OTHER_SPECIAL = ("</s>", "<pad>", "<reason>")


def bpe(size: int, seed: int, special: Sequence[str], *, by_words: bool, is_sentencepiece: bool = False) -> Tokenizer:
    rng = random.Random(seed)
    texts = [" ".join(rng.choices(WORDS, k=20)) + " é漢字" for _ in range(300)]
    tokenizer = Tokenizer(models.BPE(byte_fallback=is_sentencepiece))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if is_sentencepiece:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        special, alphabet = [*special, *(f"<0x{i:02X}>" for i in range(256))], []
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=by_words)
        tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[*special], initial_alphabet=alphabet, show_progress=False, max_token_length=12
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def wrapped(tokenizer: Tokenizer, special: Sequence[str]) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=special[0],
        pad_token=special[1],
        additional_special_tokens=[*special[2:]],
    )


STUDENT = wrapped(bpe(500, 1, SPECIAL, by_words=False), SPECIAL)
TEACHER = wrapped(bpe(900, 2, OTHER_SPECIAL, by_words=True), OTHER_SPECIAL)


def cross_of(student: PreTrainedTokenizerFast = STUDENT, teacher: PreTrainedTokenizerFast = TEACHER) -> CrossTokenizer:
    return CrossTokenizer(student, teacher, {"<think>": "<reason>"}, most_tokens=4096, key="teachers.math")


def sentencepiece() -> PreTrainedTokenizerFast:
    state = json.loads(bpe(700, 3, OTHER_SPECIAL, by_words=False, is_sentencepiece=True).to_str())
    # the bytes were trained as special ones, which they are not
    state["added_tokens"] = [own for own in state["added_tokens"] if own["content"] in OTHER_SPECIAL]
    return wrapped(Tokenizer.from_str(json.dumps(state)), OTHER_SPECIAL)


def a_text(rng: random.Random) -> str:
    parts = [
        " ".join(rng.choices(WORDS, k=3)) if rng.random() < 0.5 else "".join(rng.choices(rng.choice(ALPHABETS), k=5))
        for _ in range(rng.randint(1, 4))
    ]
    return "".join(parts)


def text_of(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int]) -> bytes:
    """What the ids of a byte-level tokenizer stand for, by the alphabet that the library itself decodes."""
    written = "".join(tokenizer.convert_ids_to_tokens([*ids]))
    return b"".join(BYTE_OF[character] for character in written)


BYTE_OF: dict[str, bytes] = {}
_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
for _code in [*range(0x900), *range(0x1000, 0xD000, 0x1000), 0xE000, 0xF000, *range(0x10000, 0x110000, 0x10000)]:
    _written = _LEVEL.pre_tokenize_str(chr(_code))[0][0]
    BYTE_OF |= {own: bytes([byte]) for own, byte in zip(_written, chr(_code).encode(), strict=True)}


def test_chunks_of_ten_thousand_texts_are_all_common_boundaries() -> None:
    """The bytes of both sides' chunks are one another's and add up to the text, and a chunk ends exactly where the two
    lists of running sums have the same number: brute force over all pairs of tokens."""
    cross, rng = cross_of(), random.Random(0)
    assert (len(STUDENT), len(TEACHER)) == (500, 900)
    num_several = 0
    for _ in range(10_000):
        text = a_text(rng)
        ids = STUDENT(text, add_special_tokens=False)["input_ids"]
        if not ids:
            continue
        found = cross.align(ids)
        theirs = found.tokens.tolist()
        parts, other_parts = ([text_of(t, [i]) for i in own] for t, own in ((STUDENT, ids), (TEACHER, theirs)))
        assert b"".join(parts) == b"".join(other_parts) == text.encode()
        ends, others = ([sum(map(len, own[: i + 1])) for i in range(len(own))] for own in (parts, other_parts))
        common = sorted({a for a in ends for b in others if a == b})
        assert found.student_chunks.tolist() == [sum(end < a for end in common) for a in ends]
        assert found.teacher_chunks.tolist() == [sum(end < b for end in common) for b in others]
        pairs = [
            (found.student_chunks.tolist().count(c), found.teacher_chunks.tolist().count(c)) for c in range(len(common))
        ]
        assert found.is_one_to_one.tolist() == [pair == (1, 1) for pair in pairs]
        begins = [0, *common]
        for i, row in enumerate(found.rows.tolist()):
            start, other = (
                ends[i] - len(parts[i]),
                [end - len(own) for end, own in zip(others, other_parts, strict=True)],
            )
            beside = other.index(start) if start in begins else NO_ROW
            is_long = beside != NO_ROW and len(other_parts[beside]) >= len(parts[i])
            assert row == (beside if is_long else NO_ROW)
        num_several += sum(pair != (1, 1) for pair in pairs)
    assert num_several > 10_000


def test_what_the_student_draws_need_not_be_how_a_text_is_written() -> None:
    """Random ids, most of which are parts of characters: what is no text is in no chunk, the rest is aligned."""
    cross, rng = cross_of(), random.Random(1)
    known = [i for i in range(len(STUDENT)) if set(STUDENT.convert_ids_to_tokens(i)) <= BYTE_OF.keys()]
    plain = sorted({*known} - {*STUDENT.all_special_ids})
    num_whole = 0
    for _ in range(500):
        ids = rng.choices(plain, k=4)
        whole = text_of(STUDENT, ids)
        found = cross.align(ids)
        written = text_of(TEACHER, found.tokens.tolist()) if NO_CHUNK not in found.student_chunks else b""
        try:
            whole.decode()
        except UnicodeDecodeError as error:
            assert found.student_chunks[-1] == NO_CHUNK
            kept = [i for i, chunk in enumerate(found.student_chunks.tolist()) if chunk != NO_CHUNK]
            assert len(text_of(STUDENT, ids[: len(kept)])) <= error.start and kept == [*range(len(kept))]
        else:
            assert written == whole
            num_whole += 1
    assert 50 < num_whole < 450
    response = [
        *STUDENT("ab ", add_special_tokens=False)["input_ids"],
        *STUDENT("漢", add_special_tokens=False)["input_ids"],
    ]
    cut = cross.align(response[:-1]) if len(text_of(STUDENT, response[-1:])) < 3 else None
    assert cut is not None and cut.student_chunks[-1] == NO_CHUNK  # it ends inside a character
    assert text_of(TEACHER, cut.tokens.tolist()) == b"ab "


def test_special_tokens_are_chunks_of_their_own() -> None:
    cross = cross_of()
    ids = [
        *STUDENT("<think>", add_special_tokens=False)["input_ids"],
        *STUDENT("abc", add_special_tokens=False)["input_ids"],
        STUDENT.eos_token_id,
    ]
    found = cross.align(ids)
    theirs = TEACHER.convert_ids_to_tokens(found.tokens.tolist())
    assert theirs[0] == "<reason>" and theirs[-1] == "</s>"
    assert found.is_one_to_one[0] and found.is_one_to_one[-1]
    assert cross.student_ids(torch.tensor([TEACHER.eos_token_id])).item() == STUDENT.eos_token_id
    # a text that spells one is a text, in pieces
    spelled = Tokenizer.from_str(STUDENT.backend_tokenizer.to_str())
    spelled.encode_special_tokens = True
    pieces = spelled.encode("a</s>b", add_special_tokens=False).ids
    again = cross.align(pieces)
    assert TEACHER.eos_token_id not in again.tokens and text_of(TEACHER, again.tokens.tolist()) == b"a</s>b"


def test_unmapped_special_tokens_are_refused_by_name() -> None:
    with pytest.raises(UserError, match=r'tokenizer_map .*\{"<think>": null\}') as error:
        CrossTokenizer(STUDENT, TEACHER, {}, most_tokens=9, key="teachers.math")
    assert "\n" not in str(error.value) and "<pad>" not in str(error.value)
    for wrong, whose in (({"<tool>": None}, "student.model"), ({"<think>": "<tool>"}, "teachers.math.model")):
        with pytest.raises(UserError, match=f"tokenizer_map names '<tool>', which is no .* of {whose}"):
            CrossTokenizer(STUDENT, TEACHER, wrong, most_tokens=9, key="teachers.math")
    nobodys = CrossTokenizer(STUDENT, TEACHER, {"<think>": None}, most_tokens=9, key="teachers.math")
    found = nobodys.align(STUDENT("<think>ab", add_special_tokens=False)["input_ids"])
    assert found.student_chunks[0] == NO_CHUNK and found.counts()[2] == 1


def test_a_space_that_sentencepiece_adds_is_no_byte_of_the_text() -> None:
    teacher = sentencepiece()
    cross = cross_of(teacher=teacher)
    for text in ("abc de", " abc", "é漢字🙂 x", "a  b"):
        ids = STUDENT(text, add_special_tokens=False)["input_ids"]
        found = cross.align(ids)
        assert NO_CHUNK not in found.student_chunks and NO_CHUNK not in found.teacher_chunks
        assert not found.is_one_to_one[0]  # its first token is another one
    ours = cross_of(student=teacher_as_student(teacher), teacher=TEACHER)
    found = ours.align(teacher.backend_tokenizer.encode("abc 漢字🙂", add_special_tokens=False).ids)
    assert text_of(TEACHER, found.tokens.tolist()) == " abc 漢字🙂".encode()
    assert NO_CHUNK not in found.student_chunks


def teacher_as_student(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    state = tokenizer.backend_tokenizer.to_str().replace("</s>", "<eos>").replace("<reason>", "<think>")
    return wrapped(Tokenizer.from_str(state), SPECIAL)


def test_bytes_that_a_normaliser_changes_are_nobodys() -> None:
    core = bpe(600, 4, OTHER_SPECIAL, by_words=True)
    core.normalizer = normalizers.NFKC()
    cross = cross_of(teacher=wrapped(core, OTHER_SPECIAL))
    changed = cross.align(STUDENT("ab ﬁ①", add_special_tokens=False)["input_ids"])
    assert set(changed.student_chunks.tolist()) == {NO_CHUNK} and len(changed.tokens) > 0
    assert NO_CHUNK not in cross.align(STUDENT("ab fi", add_special_tokens=False)["input_ids"]).student_chunks


def test_ids_of_the_same_bytes_are_mapped() -> None:
    cross = cross_of()
    mapped = cross.student_ids(torch.arange(len(TEACHER)))
    num_mapped = num_pieces = 0
    for i, own in enumerate(mapped.tolist()):
        if own == NO_TOKEN or i in TEACHER.all_special_ids:
            continue
        num_mapped += 1
        ours, theirs = STUDENT.convert_ids_to_tokens(own), TEACHER.convert_ids_to_tokens(i)
        assert ours == theirs if theirs in STUDENT.get_vocab() else theirs.startswith(ours)
        num_pieces += ours != theirs
    assert num_mapped > 800 and num_pieces > 100
    assert cross.student_ids(torch.tensor([len(TEACHER), 10**6])).tolist() == [NO_TOKEN, NO_TOKEN]  # padding


def test_rows_add_up_what_begins_with_one_token() -> None:
    """By brute force: each id of the student has the mass of all listed tokens that map to it, and stands once."""
    cross, generator = cross_of(), torch.Generator().manual_seed(3)
    ids = torch.stack([torch.randperm(len(TEACHER), generator=generator)[:64] for _ in range(40)]).int()
    logprobs = torch.randn(ids.shape, generator=generator).log_softmax(1)
    own, got = cross.student_rows(ids, logprobs)
    num_joined = 0
    for row in range(len(ids)):
        wanted: dict[int, float] = {}
        for i, value in zip(cross.student_ids(ids[row]).tolist(), logprobs[row].double().exp().tolist(), strict=True):
            wanted[i] = wanted.get(i, 0.0) + value
        num_joined += ids.shape[1] - len(wanted)
        wanted.pop(NO_TOKEN, None)
        kept = own[row] != NO_TOKEN
        found = dict(zip(own[row][kept].tolist(), got[row][kept].exp().tolist(), strict=True))
        assert found == pytest.approx(wanted, rel=1e-5)
        assert kept.sum() == len(wanted) and (got[row][~kept] == -torch.inf).all()
    assert num_joined > 100


def test_rows_after_a_cut_are_those_of_the_text() -> None:
    """A teacher of independent letters, of which ``a`` before ``b`` is one token with it: where it reads ``a`` alone it
    leaves ``b`` out, and the letters' probabilities come back from both rows, exactly."""
    letter = {"a": 0.3, "b": 0.6, "c": 0.1}
    free = 1 - letter["b"]
    q = {"a": letter["a"] * free, "ab": letter["a"] * letter["b"], "b": letter["b"], "c": letter["c"]}
    r = {token: share / free for token, share in q.items() if token != "b"}
    cross = CrossTokenizer(
        build_tokenizer(), build_other_tokenizer(256), dict.fromkeys(UNSCORED), most_tokens=9, key="t"
    )
    ours, theirs = build_tokenizer().get_vocab(), build_other_tokenizer(256).get_vocab()
    no_id = theirs["<|pad|>"]

    def row(shares: dict[str, float]) -> tuple[Tensor, Tensor]:
        ids = [theirs[token] for token in shares] + [no_id] * (4 - len(shares))
        return torch.tensor([ids]), torch.tensor([[*shares.values()] + [0.0] * (4 - len(shares))]).log()

    read = cross.student_rows(*row(r))
    after, before = torch.tensor([theirs["a"]]), (*row(q), torch.tensor([q["a"]]).log())
    ids, logprobs = cross.as_text(read, after, before)
    kept = ids[0] != NO_TOKEN
    found = dict(zip(ids[0][kept].tolist(), logprobs[0][kept].exp().tolist(), strict=True))
    assert found == pytest.approx({ours[name]: share for name, share in letter.items()}, rel=1e-5)
    for unchanged in (theirs["c"], NO_TOKEN):  # no token begins with it; none was read
        same = cross.as_text(read, torch.tensor([unchanged]), before)
        assert all(torch.equal(one, other) for one, other in zip(same, read, strict=True))


def test_a_response_that_is_too_long_for_the_teacher_ends_at_a_chunk() -> None:
    short = CrossTokenizer(STUDENT, TEACHER, {"<think>": "<reason>"}, most_tokens=5, key="teachers.math")
    ids = STUDENT("漢字 漢字 漢字 éé", add_special_tokens=False)["input_ids"]
    found, whole = short.align(ids), cross_of().align(ids)
    assert len(found.tokens) == 5 and len(whole.tokens) > 5
    kept = found.student_chunks != NO_CHUNK
    assert 0 < kept.sum() < len(ids) and torch.equal(found.student_chunks[kept], whole.student_chunks[kept])
    assert set(found.teacher_chunks.tolist()) - {NO_CHUNK} == set(found.student_chunks.tolist()) - {NO_CHUNK}


def test_nothing_is_asked_of_an_empty_text() -> None:
    """A teacher scores one token at least, which no chunk has."""
    found = CrossTokenizer(STUDENT, TEACHER, {"<think>": None}, most_tokens=9, key="k").align(
        STUDENT("<think>", add_special_tokens=False)["input_ids"]
    )
    assert found.tokens.tolist() == [TEACHER.eos_token_id] and found.teacher_chunks.tolist() == [NO_CHUNK]
    assert torch.equal(found.spread(torch.tensor([-3.0]), torch.tensor([-0.5])), torch.tensor([-0.5]))


def test_common_chunks_by_hand() -> None:
    """``sor|t|ed`` against ``s|ort|ed``; tokens without bytes; a rest that only one side writes."""
    assert common_chunks([3, 1, 2], [1, 3, 2]) == ([0, 0, 1], [0, 0, 1], 2)
    assert common_chunks([0, 2, 0, 1], [2, 1]) == ([0, 0, 0, 1], [0, 1], 2)
    assert common_chunks([2, 2], [2, 1]) == ([0, NO_CHUNK], [0, NO_CHUNK], 1)


def test_spread_is_the_definition() -> None:
    """In float64: a chunk's teacher sum by each token's share of the student's sum; a chunk's differences add up to its
    difference of sums."""
    rng = random.Random(5)
    cross = cross_of()
    for _ in range(200):
        ids = STUDENT(a_text(rng), add_special_tokens=False)["input_ids"] + [STUDENT.eos_token_id]
        found = cross.align(ids)
        teacher, student = -3 * torch.rand(len(found.tokens)), -2 * torch.rand(len(ids))
        got = found.spread(teacher, student)
        for chunk in range(len(found.is_one_to_one)):
            ours = [i for i, own in enumerate(found.student_chunks.tolist()) if own == chunk]
            theirs = [i for i, own in enumerate(found.teacher_chunks.tolist()) if own == chunk]
            sum_p, sum_q = (math_sum(v, places) for v, places in ((student, ours), (teacher, theirs)))
            for i in ours:
                assert got[i].item() == pytest.approx(sum_q * student[i].double().item() / sum_p, abs=1e-5)
            assert math_sum(student - got, ours) == pytest.approx(sum_p - sum_q, abs=1e-5)


def math_sum(values: torch.Tensor, places: list[int]) -> float:
    return sum(values[i].double().item() for i in places)


def test_certain_tokens_share_equally() -> None:
    found = Aligned(
        tokens=torch.tensor([5]),
        student_chunks=torch.tensor([0, 0, NO_CHUNK]),
        teacher_chunks=torch.tensor([0]),
        is_one_to_one=torch.tensor([False]),
        rows=torch.tensor([NO_ROW, NO_ROW, NO_ROW]),
    )
    got = found.spread(torch.tensor([-4.0]), torch.tensor([0.0, 0.0, -0.25]))
    assert got.tolist() == [-2.0, -2.0, -0.25]
