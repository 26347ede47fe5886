"""What is held out: nothing of it is in training, on either side, and it is the same everywhere."""

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


def written(folder: Path, *files: list[str]) -> list[Corpus]:
    for i, lines in enumerate(files):
        (folder / f"{i}.tsv").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return open_corpora([str(folder / f"{i}.tsv") for i in range(len(files))], LanguagePair("en", "de"))


def pairs(found: list[Corpus]) -> list[tuple[str, str]]:
    return [(entry.source, entry.target) for corpus in found for entry in corpus if isinstance(entry, Pair)]


def texts(found: list[tuple[str, str]]) -> set[str]:
    """As they are compared, written down a second time: letters and digits alone, in small."""
    return {"".join(filter(str.isalnum, text.casefold())) or text.strip() for pair in found for text in pair}


def test_the_parts_have_no_text_in_common_and_together_are_all(tmp_path: Path) -> None:
    found = written(tmp_path, LINES[:300], LINES[200:])  # a hundred are in both files
    train, held = hold_out(found, 40, seed=1)
    assert len(pairs(held)) in range(40, 44)
    assert len({corpus.name for corpus in held}) == 2
    assert not texts(pairs(train)) & texts(pairs(held))
    assert Counter(pairs(train)) + Counter(pairs(held)) == Counter(pairs(found))
    assert [corpus.split.pair_count for corpus in train if corpus.split] == [len(pairs([corpus])) for corpus in train]


def test_a_source_with_many_translations_goes_as_one(tmp_path: Path) -> None:
    sources = [f"word {a}{b}" for a in "abcdefghij" for b in "abcdefghij"]
    lines = [f"{source.upper() if n else source}!\t{source}{n}x" for source in sources for n in range(3)]
    _, held = hold_out(written(tmp_path, lines), 12, seed=0)
    assert len(pairs(held)) == 12
    assert len(texts([(source, source) for source, _ in pairs(held)])) == 4


def test_pairs_that_share_a_target_or_turn_a_pair_around_are_left_out_of_training(tmp_path: Path) -> None:
    other = [f"the house, which is small, has number {n}\t«Ein kleines Haus,  NUMMER {n}.»" for n in range(500)]
    turned = ["\t".join(reversed(line.split("\t"))) for line in LINES]
    found = written(tmp_path, LINES, other, turned)
    train, held = hold_out(found, 40, seed=1)
    assert len(pairs(held)) >= 40
    assert not texts(pairs(train)) & texts(pairs(held))
    assert len(pairs(train)) >= 1200
    lost = 1500 - len(pairs(train)) - len(pairs(held))
    assert lost > 0
    assert summarize_split(train, held) == (
        f"held out {len(pairs(held))} of 1,500 pairs for validation; "
        f"excluded {lost} more from training, which share a text with them"
    )


@pytest.mark.parametrize("seed", [0, 1])
def test_the_choice_does_not_depend_on_the_order_of_files_or_lines(tmp_path: Path, seed: int) -> None:
    found = written(tmp_path, LINES[:300], LINES[200:])
    first, again, another = (
        [Counter(pairs(part)) for part in hold_out(given, 40, chance)]
        for given, chance in ((found, seed), (found[::-1], seed), (found, seed + 7))
    )
    assert first == again != another
    mixed = written(tmp_path, LINES[::-1], LINES[200:300])
    assert [Counter(pairs(part)) for part in hold_out(mixed, 40, seed)] == first


def test_the_choice_is_the_same_in_every_process_and_version(tmp_path: Path) -> None:
    """Python's own hash differs between processes; the numbers here are from the day that this was written."""
    written(tmp_path, LINES)
    told = "import sys; from attent.data.corpus import open_corpora; from attent.data.split import hold_out; "
    told += "print(*(pair.line for pair in hold_out(open_corpora(sys.argv[1:]), 5, 3)[1][0]))"
    environment = {**os.environ, "PYTHONHASHSEED": "77"}
    command = [sys.executable, "-c", told, str(tmp_path / "0.tsv")]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["75", "79", "126", "154", "180"]


def test_bad_lines_stay_with_the_training_part(tmp_path: Path) -> None:
    found = written(tmp_path, [*LINES[:250], "one column only", *LINES[250:], "another"])
    train, held = hold_out(found, 50, seed=1)
    assert [entry.line for entry in train[0] if isinstance(entry, BadLine)] == [251, 502]
    assert all(isinstance(entry, Pair) and LINES[entry.line - 1 - (entry.line > 251)] for entry in held[0])


def test_a_frequent_source_or_target_is_never_held_out(tmp_path: Path) -> None:
    lines = [*LINES, *["Yes.\tJa."] * 40, *(f"I say yes {n}\tJa." for n in range(40))]
    for seed in range(5):
        train, held = hold_out(written(tmp_path, lines), 60, seed)
        assert len(held) == 1
        assert len(pairs(held)) == 60
        assert "Ja." not in {target for _, target in pairs(held)}
        assert ("Yes.", "Ja.") in pairs(train)


def test_with_labels_for_targets_the_sources_alone_are_kept_apart(tmp_path: Path) -> None:
    lines = [f"some text of number {n}\t{'good' if n % 3 else 'bad'}" for n in range(298)]
    lines += ["another text\tunclear", "and another\tboth"]  # with labels of their own, but what would these tell
    train, held = hold_out(written(tmp_path, lines), 30, seed=1)
    assert (len(pairs(train)), len(pairs(held))) == (270, 30)
    assert not {source for source, _ in pairs(train)} & {source for source, _ in pairs(held)}
    assert summarize_split(train, held).endswith("targets repeat too often to be disjoint")


def test_empty_texts_are_not_held_out(tmp_path: Path) -> None:
    untranslated = [line.split("\t")[0] + "\t " for line in LINES[:40]]
    lines = [f"text {n}\t " for n in range(80)] + [f" \tText {n}" for n in range(80)] + untranslated + LINES[:40]
    train, held = hold_out(written(tmp_path, lines), 4, seed=1)
    assert len(pairs(held)) == 4
    assert all(source.strip() and target.strip() for source, target in pairs(held))
    assert len(pairs(train)) == 232  # without those, and without the same sources untranslated


@pytest.mark.parametrize("lines", [[], LINES[:1], ["A house.\tein Haus", "a HOUSE\tdas Haus"], ["\ta", "\tb"]])
def test_there_must_be_two_sources(tmp_path: Path, lines: list[str]) -> None:
    with pytest.raises(CorpusError, match="at least 2 different sources"):
        hold_out(written(tmp_path, lines), 1, seed=0)


def test_two_pairs_are_enough(tmp_path: Path) -> None:
    train, held = hold_out(written(tmp_path, LINES[:2]), 100, seed=0)
    assert len(pairs(train)) == len(pairs(held)) == 1


def test_a_file_that_has_changed_is_refused(tmp_path: Path) -> None:
    train, _ = hold_out(written(tmp_path, LINES), 10, seed=0)
    written(tmp_path, LINES[1:])
    with pytest.raises(CorpusError, match="has changed since a part of it was held out"):
        list(train[0])


def test_nothing_to_hold_out_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="must be 1 or more, but is 0"):
        hold_out(written(tmp_path, LINES), 0, seed=0)


def test_standard_input_cannot_be_split() -> None:
    with pytest.raises(CorpusError, match="read only once"):
        hold_out(open_corpora(["-"]), 1, seed=0)


def test_the_parts_have_stores_of_their_own(tmp_path: Path) -> None:
    found = written(tmp_path, LINES)
    sides = [[line.split("\t")[side] for line in LINES] for side in range(2)]
    recipe = EncodingConfig(
        tokenizer=train_tokenizer(*sides, TokenizerConfig(kind="char")), filters=FilterConfig.disabled()
    )
    parts = [found, *hold_out(found, 50, seed=1), *hold_out(found, 50, seed=2)]
    assert len({store_key(part, recipe, tmp_path) for part in parts}) == 5
    assert [len(prepare_store(part, recipe, tmp_path / "stores", workers=1)) for part in parts] == [
        500,
        450,
        50,
        450,
        50,
    ]


def test_what_stands_beside_is_not_split(tmp_path: Path) -> None:
    for name in ("train", "valid"):
        (tmp_path / f"{name}.tsv").write_text("\n".join(LINES), encoding="utf-8")
    train, _ = hold_out(open_corpora([str(tmp_path)], LanguagePair("en", "de")), 50, seed=1)
    valid = train[0].get_sibling_split("valid")
    assert valid is not None
    assert len(pairs([valid])) == 500


@pytest.mark.parametrize(
    ("available", "held"), [(1, 1), (2, 1), (20, 2), (1_000, 100), (5_000, 200), (29_000, 580), (10**7, 2_000)]
)
def test_how_much_is_held_out(available: int, held: int) -> None:
    assert default_validation_size(available) == held


def test_texts_are_compared_without_case_spaces_and_punctuation() -> None:
    one, same, other, mark, marks, none, blank = hash_folded_texts(
        ["It's  2!", "its 2", "its 3", "!", "! !", "", " \t"]
    ).tolist()
    assert one == same != other
    assert len({other, mark, marks, none}) == 4
    assert none == blank == 0
    assert hash_folded_texts([]).tolist() == []


TEXT = st.text("abAB. ", max_size=3)
FILES = st.lists(st.lists(st.tuples(TEXT, TEXT), max_size=12), min_size=1, max_size=3)


@settings(max_examples=60, deadline=None)
@example([[("a", "b"), ("b", "a")]], 1, 0)
@example([[("a", "a"), ("b", "b")]], 1, 0)
@example([[("a", "ab"), ("a", "ba"), ("b", "ab"), ("b", "ba")]], 1, 0)
@given(FILES, st.integers(1, 9), st.integers(0, 9))
def test_whatever_the_data_are(files: list[list[tuple[str, str]]], wanted: int, seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = written(Path(folder), *[[f"{source}\t{target}" for source, target in lines] for lines in files])
        everything = [pair for pair in pairs(found) if pair[0].strip() and pair[1].strip()]
        if len(texts([(source, source) for source, _ in everything])) < 2:
            with pytest.raises(CorpusError):
                hold_out(found, wanted, seed)
            return
        train, held = hold_out(found, wanted, seed)
        assert pairs(train)
        assert pairs(held)
        assert len(train) == len(found)
        assert not Counter(pairs(train)) + Counter(pairs(held)) - Counter(pairs(found))
        sources = [texts([(source, source) for source, _ in pairs(part)]) for part in (train, held)]
        assert not sources[0] & sources[1]
        if all(corpus.split and corpus.split.has_disjoint_targets for corpus in train):
            left = Counter(pairs(found)) - Counter(pairs(train)) - Counter(pairs(held))
            assert not texts(pairs(train)) & texts(pairs(held)) - {""}
            assert all(texts([pair]) & texts(pairs(held)) for pair in left)
        again = hold_out(found[::-1], wanted, seed)
        assert [Counter(pairs(part)) for part in again] == [Counter(pairs(train)), Counter(pairs(held))]
