"""Rule-based sentence splitting in linear time, and splitting of sentences that are too long.

The parts and the whitespace between them are the text, character for character. The rules look at the word before a
full stop (`abbreviations.toml`) and at the next one. In doubt they do not split: a model translates two sentences at
once better than half a sentence.
"""

import re
import tomllib
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from attent.storage.errors import AttentError

ABBREVIATIONS_FILE = Path(__file__).with_name("abbreviations.toml")
WORD_LISTS = ("titles", "numeric", "general", "starters")
ORDINAL_LANGUAGES = frozenset("bs et eu fi fo hr hu is lb lv mk nn sk sl sq sr tr".split())  # others
FULL_STOPS = ".!?…‥؟۔।॥።፧։᠃᠉။៕។܀‼⁇⁈⁉‽"
WIDE_STOPS = "。！？｡"  # need no following space
CLOSING_MARKS = "\"'”’»›“‘«)]}」』）】》〉"  # “‘« close in German, ”’»› elsewhere
LINE_ENDS = frozenset("\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029")
NO_BREAK_SPACES = frozenset("\xa0\u202f")  # alone, they join two words: "M. Dupont"
GREEK_QUESTION = ";"
MAX_ABBREVIATION = 40  # characters at the end of a token that are searched
MAX_GRAPHEME = 64  # characters; longer ones occur only in hostile text and may be split

# Without “‘«, which open a quotation in Chinese and French.
_SURE_ENDS = re.escape("".join(sorted(set(FULL_STOPS + WIDE_STOPS + CLOSING_MARKS) - set("“‘«"))))
_GAP = re.compile(rf"([{WIDE_STOPS}][{_SURE_ENDS}]*+)\s*+|\s++")
_TRAILING_MARKS = re.compile(rf"[{_SURE_ENDS}]++(?=\s|$)")  # a token without a word, as in "Oui ! » Il"
_NEXT = re.compile(r"(?:[-–—•*]\s)?[^\w\s]*+(\w{0,24})")
_LAST = re.compile(r"(?:\w['’](?=\w$))?[\w.]*$")  # all of "that's", but only "art" of "l'art"
_ROMAN = re.compile(r"[IVXLCDM]+")
_ACRONYM = re.compile(r"(?:[^\W\d_]{1,2}\.)+[^\W\d_]{1,3}")  # U.S, z.B, i.d.R, n.Chr
_QUOTED_ON = re.compile("って|[とを、，]")  # Japanese: the sentence continues after a quotation
_CLAUSE = re.compile(r"[,;:،؛–—](?=\s)|[，、；：]")
_SPACE = re.compile(r"\s+")


@dataclass(frozen=True, slots=True)
class SentencePart:
    """A sentence, or a part of one, and the whitespace after it. Leading whitespace follows an empty first part."""

    text: str
    gap: str = ""


def split_sentences(text: str, language: str | None = None, max_chars: int = 2000) -> list[SentencePart]:
    """Split a text into sentences, also at line breaks, and sentences of more than `max_chars` into parts."""
    if max_chars < 1:
        raise AttentError(f"`max_chars` must be 1 or more, but is {max_chars}")
    parts: list[SentencePart] = []
    start = 0
    for stop, following in _find_boundaries(text, language):
        parts += _split_long(text, (start, stop, following), max_chars)
        start = following
    return parts


def split_by_tokens(
    sentences: Sequence[SentencePart], count_tokens: Callable[[Sequence[str]], Sequence[int]], max_tokens: int
) -> list[SentencePart]:
    """Split sentences of more than `max_tokens` tokens; a single character is never split."""
    if max_tokens < 1:
        raise AttentError(f"`max_tokens` must be 1 or more, but is {max_tokens}")
    result: list[SentencePart] = []
    for sentence, tokens in zip(sentences, count_tokens([part.text for part in sentences]), strict=True):
        length = len(sentence.text)
        if tokens <= max_tokens or length <= 1:
            result.append(sentence)
            continue
        max_chars = max(1, length * max_tokens // tokens)
        parts = list(_split_long(sentence.text + sentence.gap, (0, length, length + len(sentence.gap)), max_chars))
        result += split_by_tokens(parts, count_tokens, max_tokens)
    return result


def _find_boundaries(text: str, language: str | None) -> Iterator[tuple[int, int]]:
    """Yield where each sentence ends and where the next one starts."""
    is_greek = (language or "").lower().split("-")[0] == "el"
    rules = _BoundaryRules(get_abbreviations(language), FULL_STOPS + WIDE_STOPS + GREEK_QUESTION * is_greek)
    sentence = token = 0  # start of the current ones
    stop = following = 0
    for gap in _GAP.finditer(text):
        stop, following = gap.end(1) if gap[1] else gap.start(), gap.end()
        if following == len(text):
            break
        if LINE_ENDS.isdisjoint(text[stop:following]) and stop:
            if _TRAILING_MARKS.match(text, following):
                continue
            if gap[1]:  # a wide stop and the closing marks after it
                ended = text[stop - 1] not in CLOSING_MARKS or not _QUOTED_ON.match(text, following)
            else:
                ended = rules.ends_sentence(text, sentence, token, stop, following)
        else:
            ended = True
        token = following
        if ended:
            yield stop, following
            sentence = following
    if text:
        yield (stop, following) if following == len(text) else (len(text), len(text))


@dataclass(frozen=True)
class _BoundaryRules:
    abbreviations: "AbbreviationRules"
    stops: str

    def ends_sentence(self, text: str, sentence: int, token: int, stop: int, following: int) -> bool:
        if text[stop - 1] not in self.stops and text[stop - 1] not in CLOSING_MARKS:
            return False
        whole = text[token:stop]
        closed = whole.rstrip(CLOSING_MARKS + " \t\xa0\u202f")
        bare = closed.rstrip(self.stops)
        if len(bare) == len(closed) or (stop + 1 == following and text[stop] in NO_BREAK_SPACES):
            return False
        if whole[0] in "([（" and whole[-1] in ")]）":  # "(!)", "(etc.)"
            return False
        following_word = _NEXT.match(text, following)
        next_word = following_word[1] if following_word else ""
        if next_word[:1].islower():
            return False
        if closed[len(bare) :] != ".":
            return True
        initial = following_word is not None and len(next_word) == 1 and text.startswith(".", following_word.end())
        last = _LAST.search(bare[-MAX_ABBREVIATION:])
        return self.is_final_full_stop(last[0] if last else "", next_word, initial, token == sentence)

    def is_final_full_stop(self, word: str, next_word: str, initial: bool, first: bool) -> bool:
        """Decide by the words around a full stop. `initial`: the next is one; `first`: `word` is the first word."""
        words, lower = self.abbreviations, word.lower()
        starts = next_word in words.starters and not initial
        if word in words.titles:
            return False
        if lower in words.numeric and (next_word[:1].isdigit() or _ROMAN.fullmatch(next_word)):
            return False
        if word.isdigit() and first and len(word) <= 3:  # of a list
            return False
        if word.isdigit():  # an ordinal? years are none
            return starts or not words.ordinals or len(word) > (2 if next_word[:1].isdigit() else 3)
        if len(word) == 1 and word.isalpha() and word.lower() != word.upper():  # an initial, "z. B.", "a."
            return starts and not first
        if _ROMAN.fullmatch(word) and (first or words.ordinals):
            return starts and not first
        if lower in words.general or _ACRONYM.fullmatch(word):
            return starts
        return True


def _split_long(text: str, span: tuple[int, int, int], max_chars: int) -> Iterator[SentencePart]:
    """Yield a (start, stop, next start) span in parts of about equal length."""
    start, stop, following = span
    while stop - start > max_chars:
        end = _find_cut(text, start, stop, max_chars)
        space = _SPACE.match(text, end, stop)
        after = space.end() if space else end
        yield SentencePart(text[start:end], text[end:after])
        start = after
    yield SentencePart(text[start:stop], text[stop:following])


def _find_cut(text: str, start: int, stop: int, max_chars: int) -> int:
    """Return the end of a clause, else of a word, else of a grapheme, nearest to where the parts would be equal."""
    ideal = start + -(-(stop - start) // -(-(stop - start) // max_chars))
    reach = (ideal - start) // 2
    low, high = max(start + 1, ideal - reach), min(ideal + reach, start + max_chars)
    ends = [match.end() for match in _CLAUSE.finditer(text, low, high)]
    ends = ends or [match.start() for match in _SPACE.finditer(text, low, high + 1)]
    if ends:
        end = min(ends, key=lambda end: abs(end - ideal))
        return start + len(text[start:end].rstrip())
    for index in range(ideal, max(ideal - MAX_GRAPHEME, start), -1):
        if _is_grapheme_boundary(text[index - 1], text[index]):
            return index
    return ideal


def _is_grapheme_boundary(before: str, after: str) -> bool:
    """False if the two characters may belong to one grapheme."""
    if unicodedata.category(after)[0] == "M" or "\u200d" in (before, after):
        return False
    if unicodedata.combining(before) == 9:  # a virama joins two consonants
        return False
    if "\ud800" <= before <= "\udbff" and "\udc00" <= after <= "\udfff":  # a surrogate pair
        return False
    flags = "\U0001f1e6" <= before <= "\U0001f1ff" and "\U0001f1e6" <= after <= "\U0001f1ff"
    modifiers = "\U0001f3fb" <= after <= "\U0001f3ff" or "\U000e0020" <= after <= "\U000e007f"
    return not (flags or modifiers or "\u1160" <= after <= "\u11ff")  # the last: Hangul jamo


@dataclass(frozen=True, kw_only=True)
class AbbreviationRules:
    titles: frozenset[str]
    numeric: frozenset[str]
    general: frozenset[str]
    starters: frozenset[str]
    ordinals: bool  # "3." means the third


@cache
def load_languages() -> dict[str, AbbreviationRules]:
    tables = tomllib.loads(ABBREVIATIONS_FILE.read_text(encoding="utf-8"))
    languages = {
        language: AbbreviationRules(
            **{name: frozenset(table[name].split()) for name in WORD_LISTS}, ordinals=table.get("ordinals", False)
        )
        for language, table in tables.items()
    }
    return languages | {"nb": languages["da"], "no": languages["da"]}


@cache
def get_abbreviations(language: str | None) -> AbbreviationRules:
    """Return the rules of a language ("de", "de-AT"), or the union of all if it is unknown or None."""
    code, languages = (language or "").replace("_", "-").split("-")[0].lower(), load_languages()
    if code in languages:
        return languages[code]
    union = {name: frozenset().union(*(getattr(words, name) for words in languages.values())) for name in WORD_LISTS}
    return AbbreviationRules(**union, ordinals=language is None or code in ORDINAL_LANGUAGES)
