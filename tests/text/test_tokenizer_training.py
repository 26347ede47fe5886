"""Tokenizer training: deterministic, silent, from any text, with a vocabulary size that the text supports."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from attent import settings
from attent.text.tokenizer import Tokenizer, TokenizerError
from attent.text.tokenizer_training import (
    CorpusSample,
    TokenizerConfig,
    TokenizerKind,
    choose_vocab_size,
    count_characters,
    parse_max_vocab,
    sample_lines,
    train_tokenizer,
)
from tests.text.corpus import lines, tokenizer
from tests.text.test_tokenizer import KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_text_gives_the_same_bytes(kind: TokenizerKind) -> None:
    config = TokenizerConfig(kind=kind)
    assert train_tokenizer(*lines(), config) == train_tokenizer(iter(lines()[0]), iter(lines()[1]), config)


def test_another_process_learns_the_same_bytes_and_prints_nothing() -> None:
    code = (
        "import sys; from attent.text.tokenizer_training import TokenizerConfig, train_tokenizer\n"
        "from tests.text.corpus import lines\n"
        "configs = [TokenizerConfig(kind=kind) for kind in ('bpe', 'unigram', 'char')]\n"
        "made = [train_tokenizer(*lines(), config).fingerprint for config in configs]\n"
        "made += [train_tokenizer(['a', ''], ['b']).fingerprint]\n"
        "sys.exit(' '.join(made))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    made = [train_tokenizer(*lines(), TokenizerConfig(kind=kind)).fingerprint for kind in KINDS]
    assert run.stdout == ""
    assert run.stderr.strip() == " ".join([*made, train_tokenizer(["a", ""], ["b"]).fingerprint])


# --- size ------------------------------------------------------------------------------------------------------------


def test_the_requested_size_is_exact() -> None:
    assert tokenizer().source.size == 350


def test_a_longer_text_gets_a_larger_vocabulary_up_to_a_limit() -> None:
    few = CorpusSample(["some letters"], total_chars=0)
    sizes = [
        choose_vocab_size(CorpusSample(few.lines, seen), count_characters(few))
        for seen in (10, 10**6, 10**7, 10**8, 10**10)
    ]
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 512
    assert sizes[-1] == 32_768
    assert all(size % 64 == 0 for size in sizes)


def test_the_sizes_of_known_corpora_are_as_documented() -> None:
    few = CorpusSample(["letters"], 0)
    chosen = [
        choose_vocab_size(CorpusSample(few.lines, seen), count_characters(few))
        for seen in (3_819_194, 7_135_730, 11_319_330)
    ]
    assert chosen == [9792, 12160, 14016]


def test_scripts_of_wide_characters_count_threefold() -> None:
    latin, chinese = CorpusSample(["a" * 100], 3 * 10**7), CorpusSample(["汉" * 100], 10**7)
    assert choose_vocab_size(latin, count_characters(latin)) == choose_vocab_size(chinese, count_characters(chinese))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", [["a"], ["a", "", "  "], ["abc def"] * 3, ["汉字"], ["😀"], ["\t", "x\ty"]])
def test_a_tiny_text_is_enough(kind: TokenizerKind, text: list[str]) -> None:
    ours = train_tokenizer(text, text, TokenizerConfig(kind=kind))
    assert [ours.source.decode(ids) for ids in ours.source.encode(text)] == text
    assert ours.source.size < 512


def test_a_size_that_the_text_cannot_fill_is_refused_with_the_largest_that_it_can() -> None:
    with pytest.raises(TokenizerError, match=r"`vocab` is 30000, but the text is too small .* at most (\d+)") as caught:
        train_tokenizer(*lines(), TokenizerConfig(vocab=30_000))
    possible = int(str(caught.value).split("at most ")[1].split(",")[0])
    assert train_tokenizer(*lines(), TokenizerConfig(vocab=possible)).source.size == possible


def test_a_size_without_room_for_the_bytes_is_refused() -> None:
    for kind in KINDS:
        with pytest.raises(
            TokenizerError, match="`vocab` must be more than 262, of which 256 are for bytes, but is 200"
        ):
            train_tokenizer(*lines(), TokenizerConfig(kind=kind, vocab=200))
        assert train_tokenizer(*lines(), TokenizerConfig(kind=kind, vocab=263)).source.size == 263


@pytest.mark.parametrize("text", [[], [""], ["  ", "\t\n", "\x00"]])
def test_empty_text_is_refused(text: list[str]) -> None:
    with pytest.raises(TokenizerError, match="there is no text to train a tokenizer"):
        train_tokenizer(text, text)
    with pytest.raises(TokenizerError, match="there is no text"):
        train_tokenizer(["a"], text, TokenizerConfig(joint=False))


# --- characters ------------------------------------------------------------------------------------------------------


def test_characters_take_at_most_half_of_the_vocabulary() -> None:
    many = ["".join(chr(0x4E00 + (7 * line + 13 * at) % 5000) for at in range(40)) for line in range(500)]
    ours = train_tokenizer([*many, *lines()[0]], lines()[1], TokenizerConfig(vocab=700))
    pieces = ours.source.to_pieces(range(ours.source.size))
    assert (
        sum(len(piece) == 1 for piece in pieces) <= 219 + 2
    )  # half of the remaining vocabulary, the space and the escape
    assert "▁wieder" in pieces
    assert ours.source.decode(ours.source.encode([many[0]])[0]) == many[0]


def test_only_rare_characters_are_encoded_as_bytes() -> None:
    text = ["the same old words " * 20] * 3000
    ours = train_tokenizer([*text, "once: ž", *["often: ö"] * 5], text, TokenizerConfig(vocab=300))
    assert ours.source.to_pieces(ours.source.encode(["žö"])[0])[-3:] == ["<0xC5>", "<0xBE>", "ö"]


@pytest.mark.parametrize("sign", ["▅", "▁", "\t", "\x00", "\n"])
def test_separator_characters_in_the_training_text_get_no_piece(sign: str) -> None:
    ours = train_tokenizer([f"zebra{sign}crossing"] * 50, ["word"] * 50)
    assert ours.source.to_pieces(ours.source.encode(["zebra"])[0]) == ["▁zebra"]
    assert not any(
        sign in piece[1:] or piece == sign != "▁" for piece in ours.source.to_pieces(range(ours.source.size))
    )


def test_lines_of_any_length_are_used() -> None:
    ours = train_tokenizer(["zebra " * 2_000_000], ["汉" * 1_000_000])
    assert ours.source.to_pieces(ours.source.encode(["zebra"])[0]) == ["▁zebra"]


# --- sampling of the training text -----------------------------------------------------------------------------------


def number_lines(count: int) -> Iterator[str]:
    return (f"{number:09}" for number in range(count))


def test_a_sample_is_bounded_and_uniform() -> None:
    sample = sample_lines(number_lines(100_000), seed=0, max_chars=45_000)
    taken = [int(line) for line in sample.lines]
    assert sample.total_chars == 900_000
    assert 2_000 < len(taken) <= 5_000
    assert abs(sum(number < 50_000 for number in taken) / len(taken) - 0.5) < 0.05
    assert taken == sorted(taken)


def test_a_sample_depends_on_its_seed_only() -> None:
    first = sample_lines(number_lines(10_000), 1, 9_000)
    assert sample_lines(number_lines(10_000), 1, 9_000) == first
    assert sample_lines(number_lines(10_000), 2, 9_000).lines != first.lines


def test_a_small_text_is_used_completely() -> None:
    assert sample_lines(number_lines(100), 0, 900).lines == list(number_lines(100))


# --- settings --------------------------------------------------------------------------------------------------------


def test_symbols_and_tags_have_their_own_ids() -> None:
    ours = tokenizer()
    assert ours.source.to_pieces(range(4, 9)) == ["<2de>", "<2pt-BR>", "\x1a", "%s", "{name}"]
    assert ours.source.tags == ("de", "pt-BR")
    assert tokenizer(joint=False).source.tags == ("de", "pt-BR")
    assert tokenizer(joint=False).target.tags == ()


@pytest.mark.parametrize(
    ("symbols", "words"),
    [
        (("",), "without spaces"),
        (("{my name}",), "without spaces"),
        (("a▁b",), "without spaces"),
        (("\x1a",), "without spaces"),
        (("<s>",), "it is reserved"),
        (("<0x41>",), "it is reserved"),
        (("<2de>",), "it is reserved"),
        (("%s", "%d", "%s"), "'%s' occurs twice"),
    ],
)
def test_invalid_symbols_are_refused(symbols: tuple[str, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TokenizerConfig(symbols=symbols)


def test_symbols_may_contain_any_characters() -> None:
    symbols = ("a,b", '"', "'", "[x]", "\\n", "^", "-", "é", ",")
    ours = train_tokenizer(*lines(), TokenizerConfig(symbols=symbols))
    for symbol in symbols:
        assert symbol in ours.source.to_pieces(ours.source.encode([f"x{symbol}y"])[0])


@pytest.mark.parametrize(("tags", "words"), [(["de", "de"], "'de' occurs twice"), (["d>e"], "but one is 'd>e'")])
def test_invalid_tags_are_refused(tags: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        train_tokenizer(*lines(), tags=tags)


def test_the_settings_are_read_from_toml(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('kind = "unigram"\nsymbols = ["%s"]\n', encoding="utf-8")
    data = settings.read_toml_dict(tmp_path / "run.toml")
    for override in ("vocab=none", "joint=false"):
        settings.apply_override(TokenizerConfig, data, override)
    config = settings.from_dict(TokenizerConfig, data)
    assert config == TokenizerConfig(kind="unigram", joint=False, symbols=("%s",))
    with pytest.raises(ValueError, match="did you mean 'unigram'"):
        settings.apply_override(TokenizerConfig, data, "kind=unigramm")


@pytest.mark.parametrize("vocab", [0, -5, True, 2.5, 10**9])
def test_an_impossible_size_is_refused(vocab: int) -> None:
    with pytest.raises(ValueError, match="`vocab` must be a number"):
        TokenizerConfig(vocab=vocab)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="`kind` must be one of bpe, unigram, char, but is 'word'"):
        TokenizerConfig(kind="word")  # type: ignore[arg-type]


def test_surrogates_in_the_text_are_handled() -> None:
    assert isinstance(train_tokenizer(["a \ud800 b"] * 10, ["c"]), Tokenizer)


def test_other_errors_of_sentencepiece_are_reported() -> None:
    with pytest.raises(TokenizerError, match="SentencePiece cannot train a tokenizer on this text: no reason"):
        parse_max_vocab(100, TokenizerConfig(), RuntimeError("no reason"))
    too_high = RuntimeError("Vocabulary size too high (100). Please set it to a value <= 60.")
    assert parse_max_vocab(100, TokenizerConfig(), too_high) == 60
