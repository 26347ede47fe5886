"""The `dates` corpus: every text means one date, and no test date is in the training split."""

from __future__ import annotations

import datetime
import re
import unicodedata
from collections import Counter
from pathlib import Path

import pytest

from attent.data import dates
from attent.data.pairs import CorpusError, LanguagePair

SMALL = {"train": 8_000, "valid": 400, "test": 800}

# Month names in the form used in dates, written by hand from grammar books, independent of CLDR.
MONTHS = {
    "en": "January February March April May June July August September October November December",
    "de": "Januar Februar März April Mai Juni Juli August September Oktober November Dezember",
    "fr": "janvier février mars avril mai juin juillet août septembre octobre novembre décembre",
    "es": "enero febrero marzo abril mayo junio julio agosto septiembre octubre noviembre diciembre",
    "ru": "января февраля марта апреля мая июня июля августа сентября октября ноября декабря",
    "pl": "stycznia lutego marca kwietnia maja czerwca lipca sierpnia września października listopada grudnia",
    "hr": "siječnja veljače ožujka travnja svibnja lipnja srpnja kolovoza rujna listopada studenoga prosinca",
    "fi": "tammikuuta helmikuuta maaliskuuta huhtikuuta toukokuuta kesäkuuta heinäkuuta elokuuta syyskuuta lokakuuta "
    "marraskuuta joulukuuta",
    "tr": "Ocak Şubat Mart Nisan Mayıs Haziran Temmuz Ağustos Eylül Ekim Kasım Aralık",
    "el": "Ιανουαρίου Φεβρουαρίου Μαρτίου Απριλίου Μαΐου Ιουνίου Ιουλίου Αυγούστου Σεπτεμβρίου Οκτωβρίου Νοεμβρίου "
    "Δεκεμβρίου",
    "id": "Januari Februari Maret April Mei Juni Juli Agustus September Oktober November Desember",
    "th": "มกราคม กุมภาพันธ์ มีนาคม เมษายน พฤษภาคม มิถุนายน กรกฎาคม สิงหาคม กันยายน ตุลาคม พฤศจิกายน ธันวาคม",
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[str, str]]]:
    folder = tmp_path_factory.mktemp("dates")
    dates.write_corpus(folder, SMALL)
    return {split: read_pairs(folder / f"{split}.tsv") for split in SMALL}


def read_pairs(path: Path) -> list[tuple[str, str]]:
    lines = path.read_bytes().decode().split("\n")
    assert lines.pop() == ""
    pairs = [line.split("\t") for line in lines]
    return [(text, iso) for text, iso in pairs]


def list_days(year: int) -> list[datetime.date]:
    first = datetime.date(year, 1, 1)
    return [
        first + datetime.timedelta(days=day) for day in range(366) if (first + datetime.timedelta(day)).year == year
    ]


def find_numbers(text: str) -> list[int]:
    """Return the numbers in a text, in any script's digits."""
    plain = "".join(str(unicodedata.decimal(letter, letter)) for letter in text)
    return [int(number) for number in re.findall("[0-9]+", plain)]


# ---- the languages -----------------------------------------------------------------------------------------


def test_there_are_fifty_languages_and_all_of_them_are_used(corpus: dict[str, list[tuple[str, str]]]) -> None:
    assert len(set(dates.LANGUAGE_TAGS)) == len(dates.LANGUAGE_TAGS) == 50
    texts = {text for text, _ in corpus["test"]}
    days = {datetime.date.fromisoformat(iso) for _, iso in corpus["test"][:400]}
    for tag in dates.LANGUAGE_TAGS:
        assert texts & {form.format_date(day) for form in dates.list_date_formats(tag) for day in days}, tag


def test_every_language_has_several_formats() -> None:
    assert {
        tag: len(dates.list_date_formats(tag)) for tag in dates.LANGUAGE_TAGS if len(dates.list_date_formats(tag)) < 3
    } == {}


@pytest.mark.parametrize(
    "script", ["LATIN", "CYRILLIC", "GREEK", "ARMENIAN", "GEORGIAN", "ARABIC", "HEBREW", "ETHIOPIC"]
)
def test_all_scripts_occur(script: str, corpus: dict[str, list[tuple[str, str]]]) -> None:
    assert any(unicodedata.name(letter, "").startswith(script) for text, _ in corpus["train"] for letter in text)


@pytest.mark.parametrize("zero", dates.NATIVE_ZEROS.values(), ids=dates.NATIVE_ZEROS.keys())
def test_native_digits_occur(zero: str, corpus: dict[str, list[tuple[str, str]]]) -> None:
    assert unicodedata.decimal(zero) == 0
    assert any(zero in text for text, _ in corpus["train"])


# ---- unambiguous dates -------------------------------------------------------------------------------------


def test_no_text_means_two_dates_in_any_language() -> None:
    """Checks every format of every language over a leap year, used by the corpus or not."""
    meaning: dict[str, datetime.date] = {}
    for tag in dates.LANGUAGE_TAGS:
        for form in dates.list_date_formats(tag):
            for date in list_days(2024):
                text = form.format_date(date)
                assert meaning.setdefault(text, date) == date, (tag, text, meaning[text])
    assert len(meaning) > 50_000


def test_no_text_of_the_corpus_means_two_dates(corpus: dict[str, list[tuple[str, str]]]) -> None:
    pairs = {pair for split in corpus.values() for pair in split}
    assert max(Counter(text for text, _ in pairs).values()) == 1


def test_year_and_day_can_be_read_off_every_line(corpus: dict[str, list[tuple[str, str]]]) -> None:
    for split in corpus.values():
        for text, iso in split:
            date = datetime.date.fromisoformat(iso)
            numbers = find_numbers(text)
            assert date.year in numbers, text
            numbers.remove(date.year)
            assert date.day in numbers, text
            numbers.remove(date.day)
            assert len(numbers) <= 2, text  # a numbered month, and Vietnam's numbered weekdays
            assert all(number <= 12 for number in numbers), text


@pytest.mark.parametrize("tag", MONTHS)
def test_dates_in_words_are_read_back_by_dateutil(tag: str) -> None:
    names = MONTHS[tag].split()
    for form in dates.list_date_formats(tag):
        if "MMMM" not in form.pattern.pattern:
            continue
        for date in list_days(2024):
            text = form.format_date(date)
            (month,) = [number for number, name in enumerate(names, 1) if re.search(rf"(?<!\w){name}(?!\w)", text)]
            day, year = sorted(find_numbers(text))
            assert datetime.date(year, month, day) == date, text


@pytest.mark.parametrize("pattern", ["M/d/y", "d/M/y", "dd-MM-y", "d.M.yy", "MMM d", "MMMM y", "yy. M. d.", "M.d.y"])
def test_ambiguous_formats_are_excluded(pattern: str) -> None:
    assert not dates.is_unambiguous(pattern)


@pytest.mark.parametrize(
    "pattern", ["d. MMMM y", "y-MM-dd", "y年M月d日", "dd.MM.y", "d. M. y.", "E, LLL d, yyyy", "EEEE 'den' d. MMMM y"]
)
def test_unambiguous_formats_are_used(pattern: str) -> None:
    assert dates.is_unambiguous(pattern)


def test_texts_use_keyboard_characters(corpus: dict[str, list[tuple[str, str]]]) -> None:
    letters = {letter for split in corpus.values() for text, _ in split for letter in text}
    unseen = {letter for letter in letters if unicodedata.category(letter) in ("Zs", "Zl", "Cf", "Cc")}
    assert unseen == {" ", "\u200c"}  # the joiner is a key of Persian keyboards, and belongs to its spelling
    assert all(text == text.strip() and text != iso for split in corpus.values() for text, iso in split)


# ---- the splits --------------------------------------------------------------------------------------------


def test_date_is_in_one_split_only(corpus: dict[str, list[tuple[str, str]]]) -> None:
    train, valid, test = ({iso for _, iso in corpus[split]} for split in ("train", "valid", "test"))
    assert not train & valid
    assert not train & test
    assert not valid & test


def test_split_of_a_date_depends_on_the_date_alone(corpus: dict[str, list[tuple[str, str]]]) -> None:
    for split, pairs in corpus.items():
        assert {dates.choose_split(datetime.date.fromisoformat(iso)) for _, iso in pairs} == {split}


def test_split_sizes_are_as_requested(corpus: dict[str, list[tuple[str, str]]]) -> None:
    assert {split: len(pairs) for split, pairs in corpus.items()} == SMALL


def test_dates_span_two_centuries_and_every_day_of_the_month(corpus: dict[str, list[tuple[str, str]]]) -> None:
    dates = [datetime.date.fromisoformat(iso) for _, iso in corpus["train"]]
    assert {date.month for date in dates} == set(range(1, 13))
    assert {date.day for date in dates} == set(range(1, 32))
    assert min(dates).year < 1910
    assert max(dates).year > 2090


def test_corpus_is_reproducible(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        dates.write_corpus(tmp_path / name, {"test": 500})
    assert (tmp_path / "one/test.tsv").read_bytes() == (tmp_path / "two/test.tsv").read_bytes()


def test_hash_is_the_same_on_every_machine() -> None:
    assert dates.hash_bytes(b"2019-03-07") == 0xADC05D9B9A1F86E3
    assert dates.choose_split(datetime.date(2019, 3, 7)) == "train"


@pytest.mark.parametrize("languages", [LanguagePair("en"), LanguagePair(None, "de")])
def test_languages_cannot_be_chosen(languages: LanguagePair) -> None:
    assert dates.get_folder_name(LanguagePair()) == dates.get_folder_name(LanguagePair(None, "ISO"))
    with pytest.raises(CorpusError, match="dates: is in 50 languages, and its target side is ISO 8601; leave --src"):
        dates.get_folder_name(languages)
