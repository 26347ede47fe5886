"""Word by word is only a shorter way to the same ids."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor

from attent.text import words
from attent.text.tokenizer import Tokenizer
from attent.text.train import TokenizerConfig, train
from attent.text.words import Words, can_go_word_by_word

SENTENCES = [f"a small house and {n} trees, seen from the street" for n in range(200)]


def plain(tokenizer: Tokenizer) -> SentencePieceProcessor:
    return SentencePieceProcessor(model_proto=next(iter(tokenizer.files.values())))


@pytest.fixture(scope="module")
def bpe() -> SentencePieceProcessor:
    return plain(train(SENTENCES, SENTENCES, TokenizerConfig(vocab=340, symbols=("{name}",))))


@settings(deadline=None)
@given(texts=st.lists(st.text(st.sampled_from("aehmos  \t\n{}mné日😀<s>.,"), max_size=30)))
def test_words_give_the_ids_of_the_whole_text(bpe: SentencePieceProcessor, texts: list[str]) -> None:
    known = Words(bpe)
    for _ in range(2):  # the second time from memory
        assert known.encode([*texts, "{name} {name}{name}"]) == bpe.encode([*texts, "{name} {name}{name}"])


def test_spaces_at_the_ends_and_in_a_row_stay(bpe: SentencePieceProcessor) -> None:
    odd = ["", " ", "   ", " a", "a ", "a  b", "\ta", "a\nb"]
    assert Words(bpe).encode(odd) == bpe.encode(odd)


def test_memory_is_bounded_and_long_words_are_not_kept(
    bpe: SentencePieceProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(words, "REMEMBERED", 50)
    known, chance = Words(bpe), random.Random(0)
    texts = [" ".join(str(chance.randrange(10**6)) for _ in range(3)) for _ in range(100)] + ["x" * 100]
    for text in texts:
        assert known.encode([text]) == bpe.encode([text])
    assert len(known._known) <= 53  # full after the text that fills it
    assert "x" * 100 not in known._known


def test_only_models_whose_words_stand_alone_go_word_by_word(bpe: SentencePieceProcessor) -> None:
    assert can_go_word_by_word(bpe)
    unigram = plain(train(SENTENCES, SENTENCES, TokenizerConfig(kind="unigram", vocab=340)))
    assert not can_go_word_by_word(unigram)  # near ties are decided by how the numbers of a whole text are added
