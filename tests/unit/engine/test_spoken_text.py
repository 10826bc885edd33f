"""Texts of one vocabulary as tokens of another: bytes, maps between the two, and parts."""

from __future__ import annotations

import itertools
import json
import random
from array import array
from functools import cache

import pytest
import torch
from tokenizers import Tokenizer, decoders, models

from paceline_engine.model_files.identity import canonical_tokenizer
from paceline_engine.speaking.mapped_rows import RowMap
from paceline_engine.speaking.overlap import measure_overlap
from paceline_engine.speaking.spoken_text import SpokenText, has_seams
from paceline_engine.speaking.token_map import NO_TOKEN, map_tokens
from paceline_engine.speaking.vocabulary import Vocabulary
from paceline_engine.terms.backend import ModelLoadError
from support.speakers import END, KINDS, TEXTS
from support.tiny_tokenizers import TINY_TOKENIZERS

PAIRS = [*itertools.permutations(KINDS, 2)]
SAYS_EVERYTHING = ("byte level", "pieces")


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    return KINDS[kind](420)


@cache
def vocabulary_of(kind: str) -> Vocabulary:
    tokenizer = tokenizer_of(kind)
    return Vocabulary(
        tokenizer.to_str().encode(),
        size=tokenizer.get_vocab_size(),
        end_ids=(tokenizer.token_to_id(END[kind]),),
        name=kind,
    )


@cache
def map_of(target: str, drafter: str):
    return map_tokens(vocabulary_of(target), vocabulary_of(drafter))


def text_of(target: str, drafter: str, *, seams: bool = True) -> SpokenText:
    ours = vocabulary_of(drafter)
    return SpokenText(vocabulary_of(target), ours, map_of(target, drafter), seams=seams)


def spelled(vocabulary: Vocabulary, ids) -> bytes:
    return b"".join(vocabulary.contents[each] or b"" for each in ids)


@pytest.mark.parametrize("kind", KINDS)
def test_each_token_has_the_bytes_that_it_adds_to_a_text(kind):
    vocabulary = vocabulary_of(kind)
    for text in TEXTS:
        said = spelled(vocabulary, vocabulary.encode(text.encode()))
        if kind in SAYS_EVERYTHING:
            assert said == text.encode()
        else:  # its normaliser changes characters, and what it does not know is left out
            assert set(said.decode()) & set(text) - {" "}
        assert not any(map(vocabulary.is_special, vocabulary.encode(text.encode())))


@pytest.mark.parametrize("kind", TINY_TOKENIZERS)
def test_tokenizers_whose_tokens_have_no_bytes_are_refused(kind):
    tokenizer = TINY_TOKENIZERS[kind]()
    told = {"size": tokenizer.get_vocab_size(), "name": "m"}
    content = tokenizer.to_str().encode()
    if "pieces" not in kind and "ends" not in kind:
        assert any(Vocabulary(content, **told).contents)
        return
    if "ends" in kind:
        tokenizer = Tokenizer(models.BPE({"a</w>": 0}, [], end_of_word_suffix="</w>"))
    else:
        tokenizer = Tokenizer(models.WordPiece({"a": 0, "##b": 1}, unk_token="a"))
        tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ModelLoadError, match="pieces of words"):
        Vocabulary(tokenizer.to_str().encode(), **told)


@pytest.mark.parametrize("content", [b"x\xff\xfey", "🚴".encode()[:3], b"ok " + "é".encode()[:1]])
@pytest.mark.parametrize("kind", SAYS_EVERYTHING)
def test_bytes_that_are_no_character_are_tokens_of_single_bytes(kind, content):
    vocabulary = vocabulary_of(kind)
    assert spelled(vocabulary, vocabulary.encode(content)) == content


@pytest.mark.parametrize(("target", "drafter"), PAIRS)
def test_a_token_means_the_first_token_that_its_bytes_begin_with(target, drafter):
    theirs, ours, found = vocabulary_of(target), vocabulary_of(drafter), map_of(target, drafter)
    for each, token in enumerate(found.first):
        if token != NO_TOKEN and not ours.is_special(each):
            assert ours.contents[each].startswith(theirs.contents[token])
    if target in SAYS_EVERYTHING:
        mapped = [token != NO_TOKEN for token in found.first]
        missing = [each for each, there in enumerate(mapped) if not there]
        assert {ours.contents[each] for each in missing} == {None}
    (end,) = ours.end_ids
    assert found.first[end] == theirs.end_ids[0]


@pytest.mark.parametrize(("target", "drafter"), PAIRS)
def test_what_is_longer_in_one_vocabulary_is_several_tokens_of_the_other(target, drafter):
    theirs, ours, found = vocabulary_of(target), vocabulary_of(drafter), map_of(target, drafter)
    for paths, whole, part in ((found.longer, ours, theirs), (found.composed, theirs, ours)):
        assert len(paths)
        for first in range(part.size):
            rows = paths.after((first,))
            assert ((first,) in paths) == bool(rows)
            for following, token, ends in rows:
                begins = spelled(part, (first, following))
                assert whole.contents[token].startswith(begins)
                assert ends == (whole.contents[token] == begins)


@pytest.mark.parametrize(("target", "drafter"), PAIRS)
def test_special_tokens_go_by_role_and_what_has_none_is_read_as_its_text(target, drafter):
    theirs, ours = vocabulary_of(target), vocabulary_of(drafter)
    text = text_of(target, drafter)
    (end,) = theirs.end_ids
    words = theirs.encode(b"a b")
    text.follow(array("I", [*words, end, *words]))
    own = ours.encode(b"a b")
    assert [*text.ids()] == [*own, *ours.end_ids, *own]
    for name, special in theirs.special.items():
        if special != end:
            text.follow(array("I", [*words, special]))
            assert not {*text.ids()} & {*ours.end_ids, *ours.special.values()}
            if drafter in SAYS_EVERYTHING:
                assert spelled(ours, text.ids()) == b"a b" + name.encode()


@pytest.mark.parametrize(("target", "drafter"), PAIRS)
def test_a_text_in_parts_is_the_whole_text(target, drafter):
    theirs = vocabulary_of(target)
    assert has_seams(vocabulary_of(drafter))
    chosen = random.Random(1)
    longer = " ".join(chosen.choices(TEXTS, k=24)).encode()
    ids = array("I", theirs.encode(longer))
    ids[len(ids) // 2 : len(ids) // 2] = array("I", theirs.end_ids)
    text = text_of(target, drafter)
    for _ in range(60):
        length = chosen.randrange(1, len(ids))
        prefix = ids[:length]
        if chosen.random() < 0.5:  # a token that was rejected
            prefix[-1] = chosen.randrange(theirs.size)
        text.follow(prefix)
        whole = text_of(target, drafter, seams=False)
        whole.follow(prefix)
        assert text.ids() == whole.ids()
        shorter = chosen.randrange(1, length + 1)
        whole.follow(prefix[:shorter])
        assert text.ids(shorter) == whole.ids()


def test_a_part_is_open_again_if_the_space_that_closed_it_is_taken_back():
    theirs = vocabulary_of("byte level")
    ids = array("I", theirs.encode(" ".join(TEXTS[:1] * 5).encode()))
    letter = theirs.encode(b"s")
    text = text_of(*SAYS_EVERYTHING)
    for length in range(1, len(ids)):
        text.follow(ids)
        other = ids[:length] + array("I", letter)
        text.follow(other)
        whole = text_of(*SAYS_EVERYTHING, seams=False)
        whole.follow(other)
        assert text.ids() == whole.ids()


def test_the_row_before_a_token_counts_where_the_drafter_would_have_written_a_longer_one():
    target, drafter = SAYS_EVERYTHING
    theirs, found = vocabulary_of(target), map_of(target, drafter)
    rows = RowMap(found, size=theirs.size)
    counted = 0
    for token in range(theirs.size):
        text, prefix = text_of(target, drafter), array("I", [*theirs.encode(b"x = "), token])
        text.follow(prefix)
        ids = text.ids()
        bounds = rows.bounds(text, prefix, ids)
        if len(bounds) != 2:
            continue
        _, before = bounds[1]
        following, longer, _ = found.longer.after((token,))[0]
        said = {
            length: torch.zeros(vocabulary_of(drafter).size)
            for length in range(before, len(ids) + 1)
        }
        for length in range(before, len(ids)):
            said[length][ids[length]] = 0.5
        said[before][longer] += 0.5
        other = next(
            it for it, first in enumerate(found.first) if first not in {following, NO_TOKEN}
        )
        said[len(ids)][other] = 1.0
        row, _ = rows.joined(said, bounds, prefix=prefix, ids=ids)
        assert float(row.sum()) == pytest.approx(1)
        assert float(row[following]) == pytest.approx(0.5 / (0.5 + 0.5 ** (len(ids) - before)))
        counted += 1
    assert counted > 5


def test_a_vocabulary_with_a_token_across_a_seam_has_none():
    tokenizer = Tokenizer(
        models.BPE({"a": 0, " ": 1, "a ": 2, "a a": 3}, [("a", " "), ("a ", "a")])
    )
    across = Vocabulary(tokenizer.to_str().encode(), size=4, name="across")
    assert not has_seams(across)


def test_rows_beyond_the_vocabulary_are_no_tokens():
    tokenizer = tokenizer_of("byte level")
    padded = Vocabulary(canonical_tokenizer_of(tokenizer), size=500, name="padded")
    assert padded.contents[420:] == [None] * 80
    found = map_tokens(padded, vocabulary_of("pieces"))
    assert max(found.first) < 420
    found = map_tokens(vocabulary_of("pieces"), padded)
    assert {*found.first[420:]} == {NO_TOKEN}


def canonical_tokenizer_of(tokenizer: Tokenizer) -> bytes:
    return canonical_tokenizer(json.loads(tokenizer.to_str()))


def test_a_drafter_with_little_of_what_the_target_writes_is_refused():
    few = Tokenizer(models.BPE({letter: at for at, letter in enumerate("abc ")}, []))
    drafter = Vocabulary(few.to_str().encode(), size=4, name="few")
    overlap = measure_overlap(vocabulary_of("byte level"), drafter)
    with pytest.raises(ModelLoadError, match=r"only 1?\d% .* below 40%"):
        overlap.check("few")
    measure_overlap(vocabulary_of("byte level"), vocabulary_of("unigram")).check("enough")
