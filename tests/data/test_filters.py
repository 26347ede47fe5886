"""Pair filters: dropped and kept pairs; duplicate detection compared with a Python set."""

from __future__ import annotations

import pickle  # noqa: TID251 - what multiprocessing does with a sieve
import subprocess
import sys
import unicodedata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attent.data.filters import (
    FILTER_ORDER,
    FilterConfig,
    KeySet,
    PairFilter,
    find_damage,
    hash_pairs,
    infer_scripts,
    is_mojibake,
    weighted_length,
)
from attent.data.pairs import LanguagePair, Pair
from attent.text import scripts

LONG = "The quick brown fox jumps over the lazy dog and runs away. "


ENGLISH_GERMAN, DEFAULT = LanguagePair("en", "de"), FilterConfig()


def drop_reason(
    source: str, target: str, languages: LanguagePair = ENGLISH_GERMAN, filters: FilterConfig = DEFAULT
) -> str | None:
    return PairFilter(filters, infer_scripts(languages, [])).drop_reason(source, target)


# ---- kept pairs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("OK", "Einverstanden"),
        ("EU", "Europäische Union"),
        ("OK", "OK"),
        ("Microsoft Office 365", "Microsoft Office 365"),
        ("Guns N' Roses", "Guns N' Roses"),
        ("2024-11-15", "2024-11-15"),
        ("https://example.org/a/b/c-d", "https://example.org/a/b/c-d"),
        ("ERR_FILE_NOT_FOUND (0x80070002)", "ERR_FILE_NOT_FOUND (0x80070002)"),
        ("first line\nsecond line\tand a tab", "erste Zeile\nzweite Zeile\tund ein Tab"),
        ("The word λόγος means reason.", "Das Wort λόγος bedeutet Vernunft."),
        ("He said “Spaß” and “Fuß”.", "Er sagte »Spaß« und »Fuß« – mit ß…"),
        ("BEAUTY\u00a0: HEALTH\u00a0!", "BEAUTÉ\u00a0: SANTÉ\u00a0!"),
        ("MORNING’S “MANHÃ” É", "DIE “MANHÃ” DANACH"),
        ("Family 👩‍👩‍👧 and soft\u00adhyphen", "Familie 👩‍👩‍👧 und Trenn\u00adstrich"),
        ("!!!", "???"),
    ],
)
def test_good_pairs_are_kept(source: str, target: str) -> None:
    assert drop_reason(source, target) is None


@pytest.mark.parametrize(
    ("tag", "text"),
    [
        ("ja", "これは日本語の文章です。"),
        ("zh", "人人生而自由，在尊严和权利上一律平等。"),
        ("ko", "모든 인간은 태어날 때부터 자유롭다."),
        ("ru", "Нажмите OK, чтобы открыть Windows PowerShell."),
        ("sr", "Sva ljudska bića rađaju se slobodna i jednaka."),
        ("sr", "Сва људска бића рађају се слободна и једнака."),
        ("hi", "सभी मनुष्यों को गौरव और अधिकारों के मामले में"),
        ("ar", "يولد جميع الناس أحرارا متساوين في الكرامة"),
        ("twi", "Awurade ka kyerɛɛ Mose sɛ, kɔ hɔ."),
        ("ru", "iPhone"),
    ],
)
def test_languages_in_their_own_script_are_kept(tag: str, text: str) -> None:
    assert drop_reason("All human beings are born free", text, LanguagePair("en", tag)) is None


# ---- dropped pairs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "source", "target"),
    [
        ("empty", "Hello there", " \t "),
        ("empty", "", ""),
        ("control", "Hello\x00there", "Hallo dort"),
        ("control", "Hello there", "Hallo\ufffd dort"),
        ("control", "Hello \ud800there", "Hallo dort"),
        ("control", "It is for you", "Es ist fÃ¼r dich"),
        ("control", "It’s for you", "Itâ€™s for you"),
        ("control", "hello to all", "Ð¿Ñ€Ð¸Ð²ÐµÑ‚"),
        ("max_chars", LONG * 40, LONG * 40 + "!"),
        ("length_ratio", "Short sentence.", LONG * 4),
        ("identical", "This sentence was never translated.", "This sentence was never translated."),
        ("script", "All human beings are born free", "Все люди рождаются свободными и равными"),
    ],
)
def test_bad_pairs_are_dropped_with_reason(name: str, source: str, target: str) -> None:
    assert drop_reason(source, target) == name
    disabled = PairFilter(FilterConfig.disabled(), infer_scripts(LanguagePair("en", "de"), []))
    assert disabled.drop_reason(source, target) is None


def test_limits_themselves_are_allowed() -> None:
    config = FilterConfig(max_chars=100, length_ratio=3)
    assert drop_reason("x" * 100, "y" * 100, filters=config) is None
    assert drop_reason("x" * 100, "y" * 101, filters=config) == "max_chars"
    assert drop_reason("x" * 4, "y" * 52, filters=config) is None  # (52 + 20) = 3 * (4 + 20)
    assert drop_reason("x" * 4, "y" * 53, filters=config) == "length_ratio"
    assert drop_reason("x" * 53, "y" * 4, filters=config) == "length_ratio"
    assert FilterConfig(max_chars=0, length_ratio=1).length_ratio == 1
    words = "this was not Translated"
    assert drop_reason(words, words) is None  # three words in lower case
    assert drop_reason(f"{words} yet", f"{words} yet") == "identical"
    assert drop_reason("日" * 11, "日" * 11, LanguagePair("ja", "zh")) is None
    assert drop_reason("日" * 12, "日" * 12, LanguagePair("ja", "zh")) == "identical"
    # Up to as many foreign letters as own ones, or eleven, may be a name.
    assert drop_reason("a b", "ж" * 11, filters=FilterConfig(length_ratio=0)) is None
    assert drop_reason("a b", "ж" * 12, filters=FilterConfig(length_ratio=0)) == "script"
    assert drop_reason("a b", "ж" * 12 + "z" * 12, filters=FilterConfig(length_ratio=0)) is None


def test_wide_characters_count_three_times() -> None:
    assert weighted_length("abc") == 3
    assert weighted_length("日本x") == 7
    assert drop_reason("x" * 1500, "日" * 700, LanguagePair("en", "zh")) == "max_chars"
    assert drop_reason("x" * 1500, "日" * 600, LanguagePair("en", "zh")) is None


def test_names_in_another_script_are_kept() -> None:
    name = "Microsoft Office Professional Plus"
    assert drop_reason(name, name, LanguagePair("en", "ru")) is None


def test_untranslated_sentence_without_spaces_is_dropped() -> None:
    text = "これは翻訳されなかった日本語の文章です。"
    assert drop_reason(text, text, LanguagePair("ja", "zh")) == "identical"


def test_script_is_inferred_if_the_language_is_unknown() -> None:
    pairs = [Pair("Привет, как дела сегодня", "Hello, how are you today", "f", 1)] * 5
    source, target = infer_scripts(LanguagePair(), pairs)
    assert source == {"Cyrl"}
    assert target == {"Latn"}
    assert infer_scripts(LanguagePair(), []) == (None, None)
    assert (
        PairFilter(FilterConfig(), (None, None)).drop_reason("Привет, как дела сегодня", "Hello, how are you today")
        is None
    )


def test_mixed_scripts_are_not_checked() -> None:
    texts = "четверг марта; jeudi mars; Πέμπτη Μαρτίου; الخميس مارس; 三月七日星期四; มีนาคม; मार्च; 목요일; მარტი; մարտ"
    pairs = [Pair(text, "2019-03-07", "f", 1) for text in texts.split()]
    assert infer_scripts(LanguagePair(), pairs) == (None, None)


def test_find_damage_returns_the_index() -> None:
    assert find_damage("plain") is None
    assert find_damage("abc\x07") == 3
    assert find_damage("Es ist fÃ¼r dich") == 8


WESTERN = "äöüßéèçñíøåæêîôëïÄÖÜÉ"


@given(st.text(WESTERN + "abc ,.", max_size=20), st.sampled_from(WESTERN))
def test_mojibake_is_found_and_correct_text_is_not(text: str, letter: str) -> None:
    sentence = text + letter
    assert is_mojibake(sentence.encode("utf-8").decode("latin-1"))
    assert not is_mojibake(sentence)


@pytest.mark.parametrize("filters", [{"max_chars": -1}, {"length_ratio": 0.5}, {"length_ratio": float("nan")}])
def test_invalid_config_is_refused(filters: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"`{next(iter(filters))}` must be"):
        FilterConfig(**filters)  # type: ignore[arg-type]


TEXTS = st.text(max_size=40) | st.sampled_from(["OK", "fÃ¼r", LONG, "日本語の文章です", "\x00", " "])


@given(TEXTS, TEXTS)
def test_disabled_filter_drops_nothing(source: str, target: str) -> None:
    first = drop_reason(source, target)
    assert drop_reason(source, target, filters=FilterConfig.disabled()) is None
    for name in FILTER_ORDER:
        value = {name: 0 if name in ("max_chars", "length_ratio") else False}
        reason = drop_reason(source, target, filters=FilterConfig(**value))  # type: ignore[arg-type]
        assert reason == first if first != name else reason != name


@pytest.mark.parametrize(
    ("target", "name"),
    [("x" * 99_999, "max_chars"), ("x" * 200, "length_ratio"), ("fÃ¼r dich", "control"), ("kurz", None)],
)
def test_other_filters_apply_to_empty_sides(target: str, name: str | None) -> None:
    assert (
        drop_reason("", target, filters=FilterConfig(empty=False))
        == drop_reason(target, " ", filters=FilterConfig(empty=False))
        == name
    )


@given(TEXTS, TEXTS)
def test_spaces_at_the_ends_do_not_matter(source: str, target: str) -> None:
    assert drop_reason(f" {source}\n", f"\t{target} ") == drop_reason(source.strip(), target.strip())


def test_length_ratio_is_relative_to_the_corpus_where_one_side_is_typically_shorter() -> None:
    def build(length: int) -> PairFilter:
        pairs = [Pair("x" * 980, "y" * (length + i), "a.tsv", i) for i in range(-10, 11)]
        return PairFilter.from_sample(DEFAULT, ENGLISH_GERMAN, pairs)

    summaries = pickle.loads(pickle.dumps(build(80)))  # noqa: S301 - a tenth of the source, 20 characters added to each
    assert summaries.typical_ratio == 0.1
    lengths = (4, 5, 380, 381)  # a quarter and four times the median, and one character past each
    assert [summaries.drop_reason("x" * 980, "y" * n) for n in lengths] == ["length_ratio", None, None, "length_ratio"]
    assert summaries.drop_reason("x" * 980, "z" * 980) == "length_ratio"
    # A median within a factor of two is that of a translation: the limits do not move.
    assert [build(n).typical_ratio for n in (479, 480, 1980, 1981)] == [0.499, 1.0, 1.0, 2.001]
    assert PairFilter.from_sample(DEFAULT, ENGLISH_GERMAN, []).typical_ratio == 1.0


@pytest.mark.parametrize("empty", [Pair("x" * 100, " ", "a.tsv", 1), Pair("", "y" * 100, "a.tsv", 1)])
def test_pairs_with_an_empty_side_do_not_change_the_typical_length_ratio(empty: Pair) -> None:
    good = Pair("x" * 100, "y" * 100, "a.tsv", 2)
    pair_filter = PairFilter.from_sample(DEFAULT, ENGLISH_GERMAN, [empty] * 600 + [good] * 400)
    assert pair_filter.drop_reason(good.source, good.target) is None
    assert PairFilter.from_sample(DEFAULT, ENGLISH_GERMAN, [empty]).typical_ratio == 1.0


def test_pair_filter_is_picklable() -> None:
    pair_filter = pickle.loads(  # noqa: S301
        pickle.dumps(PairFilter(FilterConfig(length_ratio=0), infer_scripts(LanguagePair("en", "ru"), [])))
    )
    assert pair_filter.config.length_ratio == 0
    assert pair_filter.drop_reason("All human beings are born free", "All men are born free, they say") == "script"


# ---- scripts ---------------------------------------------------------------------------------------------------------

UNICODE_NAMES = {"Latn": "LATIN", "Grek": "GREEK", "Cyrl": "CYRILLIC", "Armn": "ARMENIAN", "Hebr": "HEBREW",
    "Arab": "ARABIC", "Deva": "DEVANAGARI", "Beng": "BENGALI", "Guru": "GURMUKHI", "Gujr": "GUJARATI",
    "Orya": "ORIYA", "Taml": "TAMIL", "Telu": "TELUGU", "Knda": "KANNADA", "Mlym": "MALAYALAM", "Sinh": "SINHALA",
    "Thai": "THAI", "Laoo": "LAO", "Tibt": "TIBETAN", "Mymr": "MYANMAR", "Geor": "GEORGIAN", "Hang": "HANGUL",
    "Ethi": "ETHIOPIC", "Khmr": "KHMER", "Hani": "CJK"}  # fmt: skip


@pytest.fixture(scope="module")
def name_letters() -> dict[str, str]:
    """Yield every character that has a name, with its name."""
    return {chr(c): name for c in range(0x2FFFF) if (name := unicodedata.name(chr(c), ""))}


@pytest.mark.parametrize("code", UNICODE_NAMES)
def test_script_letters_match_unicode_names(code: str, name_letters: dict[str, str]) -> None:
    every = "".join(name_letters)
    mine = set(scripts.compile_letter_pattern(frozenset({code})).findall(every))
    theirs = set(scripts.compile_letter_pattern(frozenset(scripts.SCRIPT_LETTERS) - {code}).findall(every))
    assert not mine & theirs
    assert all(unicodedata.category(char)[0] in "LM" or char == "〇" for char in mine)
    named_letters = {
        char
        for char, name in name_letters.items()
        if name.startswith((f"{UNICODE_NAMES[code]} ", f"{UNICODE_NAMES[code]}-"))
        and unicodedata.category(char) in ("Ll", "Lu", "Lo")
    }
    assert not named_letters & theirs
    common = {char for char in named_letters if char < "\u1d00" or code == "Hani"}  # later blocks are historic scripts
    assert len(common - mine) <= 0.03 * len(common)  # each Unicode version adds a few


@pytest.mark.parametrize(
    ("tag", "expected"),
    [
        ("en", {"Latn"}),
        ("en_GB", {"Latn"}),
        ("ja", {"Hani", "Kana"}),
        ("zh-TW", {"Hani", "Bopo"}),
        ("sr", {"Cyrl", "Latn"}),
        ("sr-Latn", {"Latn"}),
        ("uz-Cyrl-UZ", {"Cyrl"}),
        ("deu", {"Latn"}),
        ("twi", {"Latn"}),
    ],
)
def test_language_scripts_come_from_cldr(tag: str, expected: set[str]) -> None:
    assert scripts.get_language_scripts(tag) == expected


@pytest.mark.parametrize("tag", ["xx", "qaa", "", "en-Zzzz"])
def test_unknown_languages_have_no_scripts(tag: str) -> None:
    assert scripts.get_language_scripts(tag) is None


# ---- duplicates ------------------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(0, 40) | st.integers(0, 2**64 - 1), max_size=30), max_size=30))
def test_key_set_equals_a_set(calls: list[list[int]]) -> None:
    key_set, known = KeySet(), set[int]()
    for keys in calls:
        expected = []
        for key in keys:
            expected.append(key not in known)
            known.add(key)
        assert key_set.add(np.array(keys, dtype=np.uint64)).tolist() == expected
    assert len(key_set) == len(known)


def test_key_set_uses_few_bytes_and_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KeySet, "MAX_MERGED_RUN", 20_000)
    key_set, random = KeySet(), np.random.default_rng(0)
    keys = random.integers(0, 2**64, 200_000, dtype=np.uint64)
    for chunk in keys.reshape(-1, 1_000):
        assert key_set.add(chunk).all()
    assert not key_set.add(keys).any()
    assert sum(run.nbytes for run in key_set._runs) == 8 * len(keys)
    assert len(key_set._runs) < 35


def test_pair_keys_are_stable_and_ordered() -> None:
    code = "from attent.data.filters import hash_pairs; print(hash_pairs(['a', 'b'], ['ü', 'ü']).tolist())"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    keys = hash_pairs(["a", "b"], ["ü", "ü"])
    assert str(keys.tolist()) == output.strip()
    assert len({*keys.tolist(), *hash_pairs(["ü", "ab"], ["a", ""]).tolist(), *hash_pairs(["a"], ["b"]).tolist()}) == 5


def test_lone_surrogates_have_a_key() -> None:
    assert len(hash_pairs(["\ud800"], [""])) == 1
