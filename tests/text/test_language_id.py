"""Language identification: swapped texts are found, right ones, numbers and single lines raise no alarm."""

from __future__ import annotations

import numpy as np
import pytest

from attent.text.language_id import NUM_BUCKETS, LanguageIdentifier, find_wrong_sides
from tests.text.corpus import lines

EN, DE = (list(side) for side in lines())
# Sentences of another domain than the learned ones.
OTHER_EN = ["The committee will discuss the budget on Tuesday.", "My brother never answers his telephone at night."]
OTHER_DE = ["Der Ausschuss wird am Dienstag den Haushalt beraten.", "Mein Bruder geht nachts nie an sein Telefon."]
FRENCH = [
    "La commission examinera le budget de l'année prochaine mardi après-midi.",
    "Mon frère ne répond jamais au téléphone pendant la nuit.",
    "Deux jeunes femmes se promènent avec leur chien dans le parc.",
    "Le gouvernement a annoncé de nouvelles mesures pour les écoles.",
    "Je ne sais pas encore si nous pourrons venir vous voir dimanche.",
    "Les enfants jouent au bord de la rivière depuis ce matin.",
    "Il faut toujours fermer la porte avant de quitter la maison.",
    "Cette ville était autrefois la capitale d'un grand royaume.",
]


@pytest.fixture(scope="module")
def identifier() -> LanguageIdentifier:
    return LanguageIdentifier.learn({"en": EN}, {"de": DE})


def test_text_in_the_other_language_is_found_with_examples(identifier: LanguageIdentifier) -> None:
    for texts, expected, other in ((DE[:10], "en", "de"), (EN[:10], "de", "en")):
        mismatch = identifier.find_mismatch(texts, [expected])
        assert mismatch is not None
        assert (mismatch.language, mismatch.count, mismatch.total) == (other, 10, 10)
        assert len(set(mismatch.examples)) == 3
        assert set(mismatch.examples) <= set(texts)
        assert str(mismatch).startswith(f"10 of 10 lines look like {other} (such as “{mismatch.examples[0][:60]}")
    assert identifier.find_mismatch(OTHER_DE, ["en"]) is not None


def test_a_language_that_was_not_learned_is_found_in_long_texts(identifier: LanguageIdentifier) -> None:
    for expected in ("en", "de"):
        mismatch = identifier.find_mismatch(["Voici :", *FRENCH], [expected])
        assert mismatch is not None
        assert (mismatch.language, mismatch.total) == ("fr", len(FRENCH))
        assert mismatch.count >= len(FRENCH) - 1
        assert len(set(mismatch.examples)) == 3
        assert set(mismatch.examples) <= set(FRENCH)
    english = LanguageIdentifier.learn({"en": EN}, {})
    assert english.find_mismatch(FRENCH, ["en"]) is not None
    for texts in (FRENCH[:3], [*FRENCH, *OTHER_EN], OTHER_EN * 5, EN[:20]):
        assert english.find_mismatch(texts, ["en"]) is None
    unnamed = LanguageIdentifier.learn({"qaa": EN}, {})  # not in CLDR
    assert unnamed.find_mismatch(FRENCH, ["qaa"]) is None
    assert LanguageIdentifier.learn({"fr": FRENCH * 4}, {}).find_mismatch(FRENCH, ["fr"]) is None


@pytest.mark.parametrize("texts", [EN[:50], OTHER_EN, ["3.14 2019-01-01 17:30 100%"] * 50, [""], [], ["Berlin", "IBM"]])
def test_right_texts_and_texts_without_words_raise_no_alarm(identifier: LanguageIdentifier, texts: list[str]) -> None:
    assert identifier.find_mismatch(texts, ["en"]) is None


def test_few_lines_in_another_language_raise_no_alarm(identifier: LanguageIdentifier) -> None:
    assert identifier.find_mismatch([*EN[:8], *DE[:2]], ["en"]) is None
    mismatch = identifier.find_mismatch([*EN[:8], *DE[:3]], ["en"])
    assert mismatch is not None
    assert (mismatch.count, mismatch.total) == (3, 11)
    assert set(mismatch.examples) == set(DE[:3])


def test_short_lines_are_judged_together(identifier: LanguageIdentifier) -> None:
    short = ["ein Hund", "die Kinder", "zwei Frauen", "ein Mann steht"]
    assert identifier.find_mismatch(short[:1], ["en"]) is None
    mismatch = identifier.find_mismatch(["", *short, "17:30"], ["en"])
    assert mismatch is not None
    assert (mismatch.language, mismatch.count, mismatch.total) == ("de", 4, 4)
    assert mismatch.examples == ("ein Mann steht", "zwei Frauen", "die Kinder")
    assert identifier.find_mismatch(short, ["de"]) is None


def test_any_expected_or_unknown_language_is_right(identifier: LanguageIdentifier) -> None:
    assert identifier.find_mismatch(DE[:10], ["en", "de"]) is None
    assert identifier.find_mismatch(DE[:10], ["fr"]) is None


def test_file_is_small_and_gives_the_same_result(identifier: LanguageIdentifier) -> None:
    content = identifier.to_bytes()
    assert len(content) < 2 * (2 * NUM_BUCKETS + 100)
    again = LanguageIdentifier.from_bytes(content)
    assert again is not None
    assert (again.sources, again.targets) == (("en",), ("de",))
    assert again.find_mismatch(DE[:10], ["en"]) == identifier.find_mismatch(DE[:10], ["en"])
    assert np.abs(again.log_probs["en"] - identifier.log_probs["en"]).max() < 0.01
    assert LanguageIdentifier.from_bytes(content[:-1]) is None
    assert LanguageIdentifier.from_bytes(b"") is None


def test_too_little_text_is_no_profile() -> None:
    identifier = LanguageIdentifier.learn({"en": EN}, {"iso": ["2019-01-01"] * 2_000, "de": DE[:5]})
    assert (identifier.sources, identifier.targets) == (("en",), ())
    assert identifier.find_mismatch(DE[:5], ["en"]) is None


@pytest.mark.parametrize(
    ("sources", "targets", "expected"),
    [(EN, DE, (False, False)), (DE, EN, (True, True)), (EN, EN, (False, True)), (DE, DE, (True, False))],
    ids=["right", "swapped", "untranslated", "translated twice"],
)
def test_sides_of_a_corpus_are_compared_by_cldr(
    sources: list[str], targets: list[str], expected: tuple[bool, bool]
) -> None:
    assert find_wrong_sides(sources[:100], targets[:100], "en", "de-AT") == expected


def test_unknown_languages_are_not_compared() -> None:
    assert find_wrong_sides(DE, EN, "en", "qaa") == (False, False)


def test_at_most_two_million_characters_are_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = LanguageIdentifier.learn({"en": EN[:100]}, {})
    length = sum(map(len, EN[:100]))
    for limit in (length - len(EN[99]) + 1, length):  # the text that reaches the limit is the last
        monkeypatch.setattr("attent.text.language_id.MAX_LEARNED_CHARS", limit)
        assert np.array_equal(LanguageIdentifier.learn({"en": EN}, {}).log_probs["en"], whole.log_probs["en"])
