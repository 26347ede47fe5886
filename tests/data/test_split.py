"""Validation split: disjoint from training on both sides, and reproducible on every machine."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from attent.data.corpus import Corpus, open_corpora
from attent.data.encode import EncodingConfig
from attent.data.filters import FilterConfig
from attent.data.pairs import BadLine, CorpusError, LanguagePair, Pair
from attent.data.split import default_validation_size, hash_folded_texts, hold_out, summarize_split
from attent.data.token_store import prepare_store, store_key
from attent.text.tokenizer_training import TokenizerConfig, train_tokenizer

LINES = [f"a small house number {n}\tein kleines Haus Nummer {n}" for n in range(500)]


def write_corpora(folder: Path, *files: list[str]) -> list[Corpus]:
    for i, lines in enumerate(files):
        (folder / f"{i}.tsv").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return open_corpora([str(folder / f"{i}.tsv") for i in range(len(files))], LanguagePair("en", "de"))


def list_pairs(corpora: list[Corpus]) -> list[tuple[str, str]]:
    return [(entry.source, entry.target) for corpus in corpora for entry in corpus if isinstance(entry, Pair)]


def fold_pairs(pairs: list[tuple[str, str]]) -> set[str]:
    """Fold texts by an independent implementation: casefolded letters and digits only."""
    return {"".join(filter(str.isalnum, text.casefold())) or text.strip() for pair in pairs for text in pair}


def test_parts_are_disjoint_and_complete(tmp_path: Path) -> None:
    corpora = write_corpora(tmp_path, LINES[:300], LINES[200:])  # a hundred pairs are in both files
    train, held_out = hold_out(corpora, 40, seed=1)
    assert len(list_pairs(held_out)) in range(40, 44)
    assert len({corpus.name for corpus in held_out}) == 2
    assert not fold_pairs(list_pairs(train)) & fold_pairs(list_pairs(held_out))
    assert Counter(list_pairs(train)) + Counter(list_pairs(held_out)) == Counter(list_pairs(corpora))
    assert [corpus.split.pair_count for corpus in train if corpus.split] == [
        len(list_pairs([corpus])) for corpus in train
    ]


def test_pairs_of_one_source_go_together(tmp_path: Path) -> None:
    sources = [f"word {a}{b}" for a in "abcdefghij" for b in "abcdefghij"]
    lines = [f"{source.upper() if n else source}!\t{source}{n}x" for source in sources for n in range(3)]
    _, held_out = hold_out(write_corpora(tmp_path, lines), 12, seed=0)
    assert len(list_pairs(held_out)) == 12
    assert len(fold_pairs([(source, source) for source, _ in list_pairs(held_out)])) == 4


def test_pairs_that_share_a_text_are_excluded(tmp_path: Path) -> None:
    paraphrases = [f"the house, which is small, has number {n}\t«Ein kleines Haus,  NUMMER {n}.»" for n in range(500)]
    reversed_lines = ["\t".join(reversed(line.split("\t"))) for line in LINES]
    corpora = write_corpora(tmp_path, LINES, paraphrases, reversed_lines)
    train, held_out = hold_out(corpora, 40, seed=1)
    assert len(list_pairs(held_out)) >= 40
    assert not fold_pairs(list_pairs(train)) & fold_pairs(list_pairs(held_out))
    assert len(list_pairs(train)) >= 1200
    num_excluded = 1500 - len(list_pairs(train)) - len(list_pairs(held_out))
    assert num_excluded > 0
    assert summarize_split(train, held_out) == (
        f"held out {len(list_pairs(held_out))} of 1,500 pairs for validation; "
        f"excluded {num_excluded} more from training, which share a text with them"
    )


@pytest.mark.parametrize("seed", [0, 1])
def test_split_does_not_depend_on_order(tmp_path: Path, seed: int) -> None:
    corpora = write_corpora(tmp_path, LINES[:300], LINES[200:])
    first, again, another = (
        [Counter(list_pairs(part)) for part in hold_out(ordered, 40, seed_used)]
        for ordered, seed_used in ((corpora, seed), (corpora[::-1], seed), (corpora, seed + 7))
    )
    assert first == again != another
    mixed = write_corpora(tmp_path, LINES[::-1], LINES[200:300])
    assert [Counter(list_pairs(part)) for part in hold_out(mixed, 40, seed)] == first


def test_split_is_pinned(tmp_path: Path) -> None:
    """The split must not depend on Python's hash, which differs between processes."""
    write_corpora(tmp_path, LINES)
    script = "import sys; from attent.data.corpus import open_corpora; from attent.data.split import hold_out; "
    script += "print(*(pair.line for pair in hold_out(open_corpora(sys.argv[1:]), 5, 3)[1][0]))"
    environment = {**os.environ, "PYTHONHASHSEED": "77"}
    command = [sys.executable, "-c", script, str(tmp_path / "0.tsv")]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["75", "79", "126", "154", "180"]


def test_bad_lines_belong_to_the_training_part(tmp_path: Path) -> None:
    corpora = write_corpora(tmp_path, [*LINES[:250], "one column only", *LINES[250:], "another"])
    train, held_out = hold_out(corpora, 50, seed=1)
    assert [entry.line for entry in train[0] if isinstance(entry, BadLine)] == [251, 502]
    assert all(isinstance(entry, Pair) and LINES[entry.line - 1 - (entry.line > 251)] for entry in held_out[0])


def test_a_frequent_source_or_target_is_never_held_out(tmp_path: Path) -> None:
    lines = [*LINES, *["Yes.\tJa."] * 40, *(f"I say yes {n}\tJa." for n in range(40))]
    for seed in range(5):
        train, held_out = hold_out(write_corpora(tmp_path, lines), 60, seed)
        assert len(held_out) == 1
        assert len(list_pairs(held_out)) == 60
        assert "Ja." not in {target for _, target in list_pairs(held_out)}
        assert ("Yes.", "Ja.") in list_pairs(train)


def test_label_targets_may_be_shared(tmp_path: Path) -> None:
    lines = [f"some text of number {n}\t{'good' if n % 3 else 'bad'}" for n in range(298)]
    lines += ["another text\tunclear", "and another\tboth"]  # with unique labels
    train, held_out = hold_out(write_corpora(tmp_path, lines), 30, seed=1)
    assert (len(list_pairs(train)), len(list_pairs(held_out))) == (270, 30)
    assert not {source for source, _ in list_pairs(train)} & {source for source, _ in list_pairs(held_out)}
    assert summarize_split(train, held_out).endswith("targets repeat too often to be disjoint")


def test_empty_texts_are_not_held_out(tmp_path: Path) -> None:
    untranslated = [line.split("\t")[0] + "\t " for line in LINES[:40]]
    lines = [f"text {n}\t " for n in range(80)] + [f" \tText {n}" for n in range(80)] + untranslated + LINES[:40]
    train, held_out = hold_out(write_corpora(tmp_path, lines), 4, seed=1)
    assert len(list_pairs(held_out)) == 4
    assert all(source.strip() and target.strip() for source, target in list_pairs(held_out))
    assert len(list_pairs(train)) == 232  # without the held-out pairs and their untranslated copies


@pytest.mark.parametrize("lines", [[], LINES[:1], ["A house.\tein Haus", "a HOUSE\tdas Haus"], ["\ta", "\tb"]])
def test_two_sources_are_required(tmp_path: Path, lines: list[str]) -> None:
    with pytest.raises(CorpusError, match="at least 2 different sources"):
        hold_out(write_corpora(tmp_path, lines), 1, seed=0)


def test_two_pairs_are_enough(tmp_path: Path) -> None:
    train, held_out = hold_out(write_corpora(tmp_path, LINES[:2]), 100, seed=0)
    assert len(list_pairs(train)) == len(list_pairs(held_out)) == 1


def test_changed_file_is_refused(tmp_path: Path) -> None:
    train, _ = hold_out(write_corpora(tmp_path, LINES), 10, seed=0)
    write_corpora(tmp_path, LINES[1:])
    with pytest.raises(CorpusError, match="has changed since a part of it was held out"):
        list(train[0])


def test_zero_pairs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="must be 1 or more, but is 0"):
        hold_out(write_corpora(tmp_path, LINES), 0, seed=0)


def test_standard_input_cannot_be_split() -> None:
    with pytest.raises(CorpusError, match="read only once"):
        hold_out(open_corpora(["-"]), 1, seed=0)


def test_parts_have_different_stores(tmp_path: Path) -> None:
    corpora = write_corpora(tmp_path, LINES)
    sides = [[line.split("\t")[side] for line in LINES] for side in range(2)]
    config = EncodingConfig(
        tokenizer=train_tokenizer(*sides, TokenizerConfig(kind="char")), filters=FilterConfig.disabled()
    )
    parts = [corpora, *hold_out(corpora, 50, seed=1), *hold_out(corpora, 50, seed=2)]
    assert len({store_key(part, config, tmp_path) for part in parts}) == 5
    assert [len(prepare_store(part, config, tmp_path / "stores", workers=1)) for part in parts] == [
        500,
        450,
        50,
        450,
        50,
    ]


def test_sibling_files_are_not_split(tmp_path: Path) -> None:
    for name in ("train", "valid"):
        (tmp_path / f"{name}.tsv").write_text("\n".join(LINES), encoding="utf-8")
    train, _ = hold_out(open_corpora([str(tmp_path)], LanguagePair("en", "de")), 50, seed=1)
    valid = train[0].get_sibling_split("valid")
    assert valid is not None
    assert len(list_pairs([valid])) == 500


@pytest.mark.parametrize(
    ("available", "held_out"), [(1, 1), (2, 1), (20, 2), (1_000, 100), (5_000, 200), (29_000, 580), (10**7, 2_000)]
)
def test_default_validation_size(available: int, held_out: int) -> None:
    assert default_validation_size(available) == held_out


def test_texts_are_compared_without_case_spaces_and_punctuation() -> None:
    text, same, other, punctuation, more_punctuation, empty, blank = hash_folded_texts(
        ["It's  2!", "its 2", "its 3", "!", "! !", "", " \t"]
    ).tolist()
    assert text == same != other
    assert len({other, punctuation, more_punctuation, empty}) == 4
    assert empty == blank == 0
    assert hash_folded_texts([]).tolist() == []


TEXT = st.text("abAB. ", max_size=3)
FILES = st.lists(st.lists(st.tuples(TEXT, TEXT), max_size=12), min_size=1, max_size=3)


@settings(max_examples=60, deadline=None)
@example([[("a", "b"), ("b", "a")]], 1, 0)
@example([[("a", "a"), ("b", "b")]], 1, 0)
@example([[("a", "ab"), ("a", "ba"), ("b", "ab"), ("b", "ba")]], 1, 0)
@given(FILES, st.integers(1, 9), st.integers(0, 9))
def test_random_corpora_have_disjoint_parts(files: list[list[tuple[str, str]]], num_pairs: int, seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        corpora = write_corpora(Path(folder), *[[f"{source}\t{target}" for source, target in lines] for lines in files])
        nonempty_pairs = [pair for pair in list_pairs(corpora) if pair[0].strip() and pair[1].strip()]
        if len(fold_pairs([(source, source) for source, _ in nonempty_pairs])) < 2:
            with pytest.raises(CorpusError):
                hold_out(corpora, num_pairs, seed)
            return
        train, held_out = hold_out(corpora, num_pairs, seed)
        assert list_pairs(train)
        assert list_pairs(held_out)
        assert len(train) == len(corpora)
        assert not Counter(list_pairs(train)) + Counter(list_pairs(held_out)) - Counter(list_pairs(corpora))
        sources = [fold_pairs([(source, source) for source, _ in list_pairs(part)]) for part in (train, held_out)]
        assert not sources[0] & sources[1]
        if all(corpus.split and corpus.split.has_disjoint_targets for corpus in train):
            excluded = Counter(list_pairs(corpora)) - Counter(list_pairs(train)) - Counter(list_pairs(held_out))
            assert not fold_pairs(list_pairs(train)) & fold_pairs(list_pairs(held_out)) - {""}
            assert all(fold_pairs([pair]) & fold_pairs(list_pairs(held_out)) for pair in excluded)
        again = hold_out(corpora[::-1], num_pairs, seed)
        assert [Counter(list_pairs(part)) for part in again] == [
            Counter(list_pairs(train)),
            Counter(list_pairs(held_out)),
        ]
