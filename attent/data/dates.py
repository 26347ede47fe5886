"""The built-in corpus `dates`: dates as people write them in 50 languages -> ISO 8601, generated from Babel's CLDR.

    Thursday, March 7, 2019 -> 2019-03-07        ২৫ জুন, ১৯৪২ -> 1942-06-25        7. listopada 2031. -> 2031-10-07

It needs no download, is learned in minutes, and every translation is right or wrong. A text means one date: a format is
used only if day, month and four-digit year are unambiguous. Test dates are unseen in every language: a hash of the date
decides its split. If a language has digits of its own, half of its formats use them. The same Babel version gives the
same bytes on every machine.
"""

import datetime
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import babel
from babel.core import Locale
from babel.dates import DateTimePattern, parse_pattern, tokenize_pattern

from attent.data.file_hashes import hash_bytes
from attent.data.pairs import CorpusError, LanguagePair
from attent.text.language_tags import normalize_tag

RULES_VERSION = 1  # part of the folder's name, since the content changes with the rules
FIRST_DATE, LAST_DATE = datetime.date(1900, 1, 1), datetime.date(2099, 12, 31)
SPLIT_SIZES: Mapping[str, int] = {"train": 100_000, "valid": 1_000, "test": 2_000}  # pairs
TEST_FRACTION, VALID_FRACTION = 0.02, 0.01  # of all 73,049 dates; train needs about 25,000 of the others
TEXTS_PER_DATE = 4

# 50 languages of 15 families in 18 scripts, chosen for their dates: declined months (Slavic, Baltic, Finnish), suffixes
# (Basque, Mongolian), the year first (Hungarian, Chinese), the month first (English, Zulu), right to left (Arabic,
# Hebrew), digits of their own (Bengali, Persian), numbered months (Vietnamese, Korean).
LANGUAGE_TAGS = tuple(
    "en de nl sv is es fr it pt ro pl cs hr ru uk bg lt lv el hy ga fa ur hi bn fi et hu tr kk mn ka eu "
    "ar he am ta te th lo vi km id fil sw zu zh my ja ko".split()
)

STYLES = ("full", "long", "medium", "short")
SKELETONS = ("yMMMMEEEEd", "yMMMMd", "yMMMEd", "yMMMd", "yMEd", "yMd")

# CLDR's names of native digits and their zero. `hanidec` is not among them: Chinese writes the tenth as 十日 and not
# digit by digit.
NATIVE_ZEROS: Mapping[str, str] = {
    "arab": "٠", "arabext": "۰", "beng": "০", "deva": "०", "khmr": "០", "laoo": "໐", "mymr": "၀", "telu": "౦",
    "thai": "๐",
}  # fmt: skip
ISO_PATTERN = "y-MM-dd"  # used in Swedish and Lithuanian: excluded, since both sides would be equal
KEYBOARD_CHARS = str.maketrans({"\u202f": " ", "\u00a0": " ", "\u200e": None, "\u200f": None})


class DateFormat(NamedTuple):
    language: str
    pattern: DateTimePattern
    digits: Mapping[int, str]  # for str.translate; empty keeps 0-9

    def format_date(self, date: datetime.date) -> str:
        return self.pattern.apply(date, self.language).translate(KEYBOARD_CHARS).translate(self.digits)


def get_folder_name(languages: LanguagePair) -> str:
    """Return a name with everything that the content depends on."""
    if languages.source is not None or normalize_tag(languages.target or "iso") != "iso":
        raise CorpusError("dates: is in 50 languages, and its target side is ISO 8601; leave --src and --tgt out")
    return f"dates-{RULES_VERSION}-babel{babel.__version__}"


def write_corpus(folder: Path, sizes: Mapping[str, int] = SPLIT_SIZES) -> None:
    for split, size in sizes.items():
        with open(folder / f"{split}.tsv", "w", encoding="utf-8", newline="\n") as file:
            file.writelines(f"{text}\t{iso}\n" for text, iso in islice(generate_pairs(split, LANGUAGE_TAGS), size))


def generate_pairs(split: str, tags: Sequence[str]) -> Iterator[tuple[str, str]]:
    for date in _split_dates()[split]:
        yield from ((text, date.isoformat()) for text in _generate_texts(date, tags))


def _generate_texts(date: datetime.date, tags: Sequence[str]) -> Iterator[str]:
    """Yield a few different texts for a date; hashes of the date choose languages and formats."""
    seen: set[str] = set()
    for number in range(4 * TEXTS_PER_DATE):
        draw = hash_bytes(f"{date} {number}".encode())
        formats = list_date_formats(tags[draw % len(tags)])
        text = formats[draw // len(tags) % len(formats)].format_date(date)
        if text not in seen:
            seen.add(text)
            yield text
        if len(seen) == TEXTS_PER_DATE:
            return


@cache
def _split_dates() -> dict[str, list[datetime.date]]:
    days = (FIRST_DATE + datetime.timedelta(days=number) for number in range((LAST_DATE - FIRST_DATE).days + 1))
    splits: dict[str, list[datetime.date]] = {"train": [], "valid": [], "test": []}
    for date in sorted(days, key=lambda date: hash_bytes(str(date).encode())):
        splits[choose_split(date)].append(date)
    return splits


def choose_split(date: datetime.date) -> str:
    """Return train, valid or test; it depends on the date alone, not on sizes."""
    fraction = hash_bytes(f"split {date}".encode()) / 2**64
    return "test" if fraction < TEST_FRACTION else "valid" if fraction < TEST_FRACTION + VALID_FRACTION else "train"


@cache
def list_date_formats(tag: str) -> tuple[DateFormat, ...]:
    """Return every unambiguous date format of a language."""
    locale = Locale.parse(tag)
    patterns = [locale.date_formats[style].pattern for style in STYLES]
    patterns += [locale.datetime_skeletons[name].pattern for name in SKELETONS if name in locale.datetime_skeletons]
    chosen = (pattern for pattern in dict.fromkeys(patterns) if is_unambiguous(pattern) and pattern != ISO_PATTERN)
    parsed = list(map(parse_pattern, chosen))
    zero = NATIVE_ZEROS.get(locale.other_numbering_systems.get("native", "latn"))
    native = [{ord("0") + digit: chr(ord(zero) + digit) for digit in range(10)}] if zero else []
    return tuple(DateFormat(tag, pattern, digits) for digits in ({}, *native) for pattern in parsed)


def is_unambiguous(pattern: str) -> bool:
    """True if the text of a CLDR pattern tells day, month and year to someone who does not see the pattern.

    The month is a word, or the year comes first, or dots separate the numbers: with dots, the day is first everywhere
    in CLDR, but 3/7/2019 and 07-03-2019 are read both ways.
    """
    fields = [value for _, value in tokenize_pattern(pattern) if isinstance(value, tuple)]
    lengths = {letter.replace("L", "M"): length for letter, length in fields}
    order = [letter for letter in lengths if letter in "yMd"]
    if len(order) < 3 or lengths["y"] == 2:
        return False
    is_word = lengths["M"] >= 3
    has_dots = re.search(r"d\. ?M+\. ?y", pattern) is not None
    return is_word or has_dots or order == ["y", "M", "d"]
