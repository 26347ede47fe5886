"""Word translations learned from parallel text, and the alignment that follows."""

from __future__ import annotations

import random

from attent.data.augment import WORD, Lexicon

# "hell" and "mum" are other words in German: spelling does not help.
NOUNS = {"hell": "Hölle", "mum": "Mama", "dog": "Hund", "gift": "Geschenk", "art": "Kunst", "tree": "Baum"}
ADJECTIVES = {"bright": "hell", "silent": "mum", "fast": "schnelle", "red": "rote", "toxic": "gift", "such": "art"}
PLACES = {"here": "hier", "there": "dort", "everywhere": "überall"}


def make_pairs(count: int) -> list[tuple[str, str]]:
    rng = random.Random(0)
    pairs = []
    for _ in range(count):
        noun, adjective, place = (rng.choice(list(table.items())) for table in (NOUNS, ADJECTIVES, PLACES))
        pairs.append((f"The {adjective[0]} {noun[0]} is {place[0]}.", f"{place[1]} ist Das {adjective[1]} {noun[1]}."))
    return pairs


def test_words_are_aligned_across_word_order() -> None:
    lexicon = Lexicon.learn(make_pairs(300))
    source, target = WORD.findall("The bright dog is there."), WORD.findall("dort ist Das hell Hund.")
    links = {(source[i], target[j]) for i, j in lexicon.align(source, target)}
    assert links >= {("bright", "hell"), ("dog", "Hund"), (".", ".")}
    for english, german in {**NOUNS, **ADJECTIVES}.items():
        assert (english, german) in lexicon.entries


def test_entries_are_written_as_within_sentences() -> None:
    pairs = [("Dogs sleep, said Alice.", "Hunde schlafen, sagte Alice."), ("Big dogs sleep.", "Große Hunde schlafen.")]
    entries = dict(Lexicon.learn(10 * pairs).entries)
    assert entries["dogs"] == "Hunde"
    assert entries["Alice"] == "Alice"
    assert "Dogs" not in entries


def test_unknown_words_are_aligned_if_they_are_equal() -> None:
    lexicon = Lexicon.learn([])
    assert lexicon.entries == ()
    assert lexicon.align(["Call", "Smith", "at", "1940"], ["Um", "1940", "Smith", "anrufen"]) == [(1, 2), (3, 1)]
    assert lexicon.align(["a"], ["b"]) == lexicon.align([], ["b"]) == []


def test_texts_of_any_kind_are_accepted() -> None:
    lexicon = Lexicon.learn([("", "x"), ("a " * 100, "b"), ("我喜欢红色的车", "I like red cars"), ("...", "!")])
    assert lexicon.align(WORD.findall("红色"), []) == []
    assert WORD.findall("我喜欢 it's 1,5 m.") == ["我", "喜", "欢", "it's", "1,5", "m", "."]
