"""Subword sampling: seeded, the same in every process, and with the probabilities of the papers."""

from __future__ import annotations

import hashlib
import math
import os
import random
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from sentencepiece import SentencePieceProcessor

from attent.text.tokenizer import Tokenizer
from attent.text.tokenizer_training import TokenizerKind
from attent.text.vocabulary import SentencePieceVocabulary
from tests.text.corpus import lines, tokenizer
from tests.text.imported_tokenizers import sentencepiece_model
from tests.text.test_tokenizer import KINDS, ODD

TEXTS = [*lines()[1][:50], *ODD]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rate", [0.0, 5e-10])
def test_rate_zero_gives_the_usual_segmentation(kind: TokenizerKind, rate: float) -> None:
    ours = tokenizer(kind)
    assert ours.sample_target(TEXTS, rate, 1) == ours.encode_target(TEXTS)
    assert ours.sample_source(TEXTS, rate, 1, target_language="de") == ours.encode_source(TEXTS, target_language="de")


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.99])
def test_a_sampled_text_round_trips(rate: float) -> None:
    ours = tokenizer()
    rows = ours.sample_source(TEXTS, rate, 7)
    assert [ours.source.decode(ids) for ids in rows] == TEXTS


def test_a_higher_rate_gives_more_pieces() -> None:
    counts = [sum(map(len, tokenizer().sample_target(TEXTS, rate, 3))) for rate in (0, 0.05, 0.1, 0.3)]
    assert counts == sorted(set(counts))


def test_the_result_depends_on_the_seed_only() -> None:
    ours = tokenizer()
    first = ours.sample_target(TEXTS, 0.1, 5)
    assert ours.sample_target(TEXTS, 0.1, 6) != first
    random.seed(0)
    assert ours.sample_target(TEXTS, 0.1, 5) == first
    fresh = Tokenizer.from_files(dict(ours.files))  # with an empty cache
    assert fresh.sample_target(TEXTS, 0.1, 5) == first


def test_both_sides_of_a_pair_are_sampled_independently() -> None:
    ours = tokenizer()
    assert ours.sample_source(TEXTS, 0.1, 5) != ours.sample_target(TEXTS, 0.1, 5)


def test_another_process_gives_the_same_samples(tmp_path: Path) -> None:
    tokenizer().save(tmp_path)
    texts = lines()[1][:50]
    code = (
        "import sys, hashlib; from pathlib import Path; from attent.text.tokenizer import Tokenizer\n"
        "texts = sys.stdin.buffer.read().decode().split('|')\n"
        "rows = Tokenizer.load(Path(sys.argv[1])).sample_target(texts, 0.1, 11)\n"
        "print(hashlib.sha256(repr(rows).encode()).hexdigest())"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        input="|".join(texts).encode(),
        capture_output=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "17"},
    )
    rows = tokenizer().sample_target(texts, 0.1, 11)
    assert run.stdout.decode().strip() == hashlib.sha256(repr(rows).encode()).hexdigest()


def test_a_symbol_is_never_split() -> None:
    vocabulary = tokenizer().source
    rows = vocabulary.sample(["a%sb {name}"] * 50, 0.9, 1)
    assert all({"%s", "{name}"} <= set(vocabulary.to_pieces(ids)) for ids in rows)


def test_a_line_without_spaces_is_sampled_too() -> None:
    vocabulary = tokenizer().source
    text = "Eisenbahnbrücke" * 40
    (ids,) = vocabulary.sample([text], 0.1, 2)
    assert vocabulary.decode(ids) == text
    assert vocabulary.sample([text], 1e-9, 2) == vocabulary.encode([text])


@pytest.mark.parametrize("rate", [-0.1, 1, 1.5, math.nan])
def test_an_impossible_rate_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="`rate` must be at least 0 and less than 1, but is"):
        tokenizer().source.sample(TEXTS, rate, 1)


# --- the papers' probabilities ---------------------------------------------------------------------------------------

DRAWS = 6000


def draw_segmentations(word: str, rate: float) -> Counter[str]:
    vocabulary = tokenizer().source
    return Counter(" ".join(vocabulary.to_pieces(ids)) for ids in vocabulary.sample([word] * DRAWS, rate, 1))


def assert_near(counts: Counter[str], expected: dict[str, float]) -> None:
    """Assert that counts are within five standard deviations of their expectation, which may itself be sampled."""
    for spelling in counts.keys() | expected.keys():
        mean = DRAWS * expected.get(spelling, 0)
        assert abs(counts[spelling] - mean) <= 5 * math.sqrt(2 * max(mean, 1)), spelling


@pytest.mark.parametrize("rate", [0.1, 0.4])
def test_bpe_dropout_is_that_of_the_paper(rate: float) -> None:
    """Algorithm 1 of Provilkov et al., with a draw for every merge at every step."""
    processor = SentencePieceProcessor(model_proto=tokenizer().files["tokenizer.model"])
    chance = random.Random(2)
    expected = Counter(
        " ".join(segment_with_bpe_dropout(processor, list("▁walking"), rate, chance)) for _ in range(DRAWS)
    )
    counts = draw_segmentations("walking", rate)
    assert len(counts) > 3
    assert_near(counts, {spelling: count / DRAWS for spelling, count in expected.items()})


def segment_with_bpe_dropout(
    processor: SentencePieceProcessor, pieces: list[str], rate: float, rng: random.Random
) -> list[str]:
    while True:
        merged = [(processor.piece_to_id(a + b), at) for at, (a, b) in enumerate(pairwise(pieces))]
        known = [(-processor.get_score(i), at) for i, at in merged if i != processor.unk_id()]
        left = [merge for merge in known if rng.random() >= rate]
        if not left:
            return pieces
        _, at = min(left)
        pieces = [*pieces[:at], pieces[at] + pieces[at + 1], *pieces[at + 2 :]]


@pytest.mark.parametrize("kind", ["unigram", "char"])
def test_only_bpe_is_sampled(kind: TokenizerKind) -> None:
    with pytest.raises(ValueError, match="needs a tokenizer of the kind bpe"):
        tokenizer(kind).source.sample(["A man."], 0.1, 1)


def test_imported_vocabularies_do_not_support_sampling() -> None:
    with pytest.raises(ValueError, match="only tokenizers trained by attent"):
        SentencePieceVocabulary(sentencepiece_model()).sample(["A man."], 0.1, 1)
