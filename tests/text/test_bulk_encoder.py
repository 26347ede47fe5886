"""Bulk encoding gives the same ids as encoding one by one."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attent.text import bulk_encoder
from attent.text.bulk_encoder import BulkEncoder, EncodedSentences, WordCache
from attent.text.tokenizer import Tokenizer
from attent.text.tokenizer_training import TokenizerConfig, train_tokenizer
from attent.text.vocabulary import SentencePieceVocabulary

SENTENCES = [f"a small house and {n} trees, seen from the street" for n in range(200)]
KINDS = ("bpe", "unigram", "char")


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    tags = ["de", "fr"]
    configs = [
        TokenizerConfig(kind="bpe", vocab=340, symbols=("{name}",)),
        TokenizerConfig(kind="unigram", vocab=340),
        TokenizerConfig(kind="char"),
    ]
    return {config.kind: train_tokenizer(SENTENCES, SENTENCES, config, tags=tags) for config in configs}


def rows(sentences: EncodedSentences) -> list[list[int]]:
    ends = sentences.lengths.cumsum().tolist()
    ids = sentences.ids.tolist()
    return [ids[end - length : end] for end, length in zip(ends, sentences.lengths.tolist(), strict=True)]


@settings(deadline=None)
@given(texts=st.lists(st.text(st.sampled_from("aehmos  \t\n{}mné日😀<s>.,▁\x1a01"), max_size=30)))
def test_bulk_gives_the_ids_of_encode(tokenizers: dict[str, Tokenizer], texts: list[str]) -> None:
    texts = [*texts, "{name} {name}{name}"]
    for tokenizer in tokenizers.values():
        fast = BulkEncoder(tokenizer.source, "<u2")
        for _ in range(2):  # the second time from the cache
            assert rows(fast.encode(texts)) == tokenizer.encode_source(texts)


@pytest.mark.parametrize("kind", KINDS)
def test_odd_texts_give_the_ids_of_encode(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    odd = [
        "",
        " ",
        "   ",
        " a",
        "a ",
        "a  b",
        "\ta",
        "a\nb",
        "\x1a",
        "\x1anothing",
        "\x1atag",
        "▁",
        "half \ud800 pair",
        "\0",
    ]
    tokenizer = tokenizers[kind]
    assert rows(BulkEncoder(tokenizer.source, "<u2").encode(odd)) == tokenizer.encode_source(odd)
    assert rows(BulkEncoder(tokenizer.source, "<u2").encode([])) == []


@pytest.mark.parametrize("kind", KINDS)
def test_each_text_starts_with_its_tag(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer, texts = tokenizers[kind], ["a house", "", "trees"]
    fast = BulkEncoder(tokenizer.source, "<u2")
    for language in ("de", "fr", "de"):
        expected = tokenizer.encode_source(texts, target_language=language)
        assert rows(fast.encode(texts, tokenizer.source.get_tag_id(language))) == expected
    assert rows(fast.encode(texts)) == tokenizer.encode_source(texts)


def test_memory_is_bounded(tokenizers: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_encoder, "MAX_CACHED_WORDS", 50)
    tokenizer, chance = tokenizers["bpe"], random.Random(0)
    assert isinstance(tokenizer.source, SentencePieceVocabulary)
    words = WordCache(tokenizer.source)
    for _ in range(100):
        texts = [" ".join(str(chance.randrange(10**6)) for _ in range(3))]
        assert rows(words.encode(texts, None, "<u4")) == tokenizer.encode_source(texts)
        assert len(words._index) <= 50 + 4


def test_only_models_with_independent_words_are_encoded_by_word(tokenizers: dict[str, Tokenizer]) -> None:
    by_word = {kind: getattr(tokenizer.source, "can_encode_by_word", None) for kind, tokenizer in tokenizers.items()}
    assert by_word["bpe"] is True
    assert by_word["unigram"] is False
