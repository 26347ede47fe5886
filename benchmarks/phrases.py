"""The grammar of the built-in corpus `phrases`: short English sentences and their German translations.

`python -m benchmarks.phrases` writes the corpus into the package.

    the three small dogs sleep in the garden        die drei kleinen Hunde schlafen im Garten
    today the old woman is singing behind the house heute singt die alte Frau hinter dem Haus
    a brave bird has waited next to the church      ein mutiger Vogel hat neben der Kirche gewartet

German word order differs from English, and adjectives agree in gender and number, so that a small model has something
to learn. Hashes choose the sentences: every machine generates the same files.
"""

import gzip
from collections.abc import Iterator
from itertools import count, islice
from typing import NamedTuple, TypeVar

from attent.data.builtin import PHRASES_FILE, PHRASES_SPLITS
from attent.data.file_hashes import hash_bytes


class _Noun(NamedTuple):
    en: str
    en_plural: str
    de: str
    de_plural: str
    gender: str  # m, f, n


class _Verb(NamedTuple):
    en: str
    en_third: str
    en_participle: str
    en_progressive: str
    de: str
    de_third: str
    de_participle: str
    de_auxiliary: str  # haben or sein


NOUNS = [
    _Noun(*row.split())
    for row in (
        "dog dogs Hund Hunde m",
        "cat cats Katze Katzen f",
        "horse horses Pferd Pferde n",
        "bird birds Vogel Vögel m",
        "child children Kind Kinder n",
        "girl girls Mädchen Mädchen n",
        "man men Mann Männer m",
        "woman women Frau Frauen f",
    )
]
ADJECTIVES = [
    ("small", "klein"), ("big", "groß"), ("old", "alt"), ("young", "jung"), ("brave", "mutig"), ("clever", "klug"),
]  # fmt: skip
NUMBERS = [("two", "zwei"), ("three", "drei"), ("four", "vier"), ("five", "fünf")]
VERBS = [
    _Verb(*row.split())
    for row in (
        "sleep sleeps slept sleeping schlafen schläft geschlafen haben",
        "play plays played playing spielen spielt gespielt haben",
        "wait waits waited waiting warten wartet gewartet haben",
        "sing sings sung singing singen singt gesungen haben",
        "dance dances danced dancing tanzen tanzt getanzt haben",
        "run runs run running laufen läuft gelaufen sein",
    )
]
PREPOSITIONS = [("in", "in"), ("behind", "hinter"), ("in front of", "vor"), ("next to", "neben")]
PLACES = [
    ("garden", "Garten", "m"), ("park", "Park", "m"), ("house", "Haus", "n"), ("car", "Auto", "n"),
    ("school", "Schule", "f"), ("church", "Kirche", "f"),
]  # fmt: skip
TIMES = [("today", "heute"), ("now", "jetzt"), ("here", "hier"), ("sometimes", "manchmal"), ("often", "oft")]
MODALS = [("can", "kann"), ("must", "muss"), ("wants to", "will")]
PLURAL_MODALS = [("can", "können"), ("must", "müssen"), ("want to", "wollen")]
ARTICLES = {"m": "der", "f": "die", "n": "das"}
INDEFINITE = {"m": ("ein", "er"), "f": ("eine", "e"), "n": ("ein", "es")}  # article and ending of the adjective
AUXILIARIES = {"haben": ("hat", "haben"), "sein": ("ist", "sind")}


Option = TypeVar("Option")


class _Draws:
    def __init__(self, number: int) -> None:
        self.number, self.count = number, 0

    def choose(self, options: list[Option]) -> Option:
        self.count += 1
        return options[hash_bytes(f"phrase {self.number} {self.count}".encode()) % len(options)]


def write_corpus() -> None:
    pairs = islice(generate_pairs(), sum(PHRASES_SPLITS.values()))
    text = "".join(f"{source}\t{target}\n" for source, target in pairs)
    PHRASES_FILE.write_bytes(gzip.compress(text.encode(), mtime=0))


def generate_pairs() -> Iterator[tuple[str, str]]:
    seen: set[str] = set()
    for number in count():
        source, target = _make_sentence(_Draws(number))
        if source not in seen:
            seen.add(source)
            yield source, target


def _make_sentence(draws: _Draws) -> tuple[str, str]:
    en, de, is_plural = _make_subject(draws)
    verb, (en_place, de_place) = draws.choose(VERBS), _make_place(draws)
    en_verb, de_verb = (verb.en, verb.de) if is_plural else (verb.en_third, verb.de_third)
    match draws.choose(["present", "time", "perfect", "modal", "negation"]):
        case "present":
            return f"{en} {en_verb} {en_place}", f"{de} {de_verb} {de_place}"
        case "time":
            time, de_time = draws.choose(TIMES)
            is_are = "are" if is_plural else "is"
            return f"{time} {en} {is_are} {verb.en_progressive} {en_place}", f"{de_time} {de_verb} {de} {de_place}"
        case "perfect":
            auxiliary = AUXILIARIES[verb.de_auxiliary][is_plural]
            has_have = "have" if is_plural else "has"
            english = f"{en} {has_have} {verb.en_participle} {en_place}"
            return english, f"{de} {auxiliary} {de_place} {verb.de_participle}"
        case "modal":
            modal, de_modal = draws.choose(PLURAL_MODALS if is_plural else MODALS)
            return f"{en} {modal} {verb.en} {en_place}", f"{de} {de_modal} {de_place} {verb.de}"
        case _:
            do_does = "do" if is_plural else "does"
            return f"{en} {do_does} not {verb.en} {en_place}", f"{de} {de_verb} nicht {de_place}"


def _make_subject(draws: _Draws) -> tuple[str, str, bool]:
    """Return a noun phrase in English and German (nominative), and whether it is plural."""
    noun, (adjective, de_adjective) = draws.choose(NOUNS), draws.choose(ADJECTIVES)
    number, de_number = draws.choose(NUMBERS)
    match draws.choose(["the", "the", "a", "the plural", "the number", "number"]):
        case "the":
            return f"the {adjective} {noun.en}", f"{ARTICLES[noun.gender]} {de_adjective}e {noun.de}", False
        case "a":
            article, ending = INDEFINITE[noun.gender]
            a_an = "an" if adjective[0] in "aeiou" else "a"
            return f"{a_an} {adjective} {noun.en}", f"{article} {de_adjective}{ending} {noun.de}", False
        case "the plural":
            return f"the {adjective} {noun.en_plural}", f"die {de_adjective}en {noun.de_plural}", True
        case "the number":
            german = f"die {de_number} {de_adjective}en {noun.de_plural}"
            return f"the {number} {adjective} {noun.en_plural}", german, True
        case _:
            return f"{number} {adjective} {noun.en_plural}", f"{de_number} {de_adjective}e {noun.de_plural}", True


def _make_place(draws: _Draws) -> tuple[str, str]:
    """Return a prepositional phrase in English and German (dative)."""
    (preposition, de_preposition), (noun, de_noun, gender) = draws.choose(PREPOSITIONS), draws.choose(PLACES)
    article = "der" if gender == "f" else "dem"
    german = "im" if (de_preposition, article) == ("in", "dem") else f"{de_preposition} {article}"
    return f"{preposition} the {noun}", f"{german} {de_noun}"


if __name__ == "__main__":
    write_corpus()
