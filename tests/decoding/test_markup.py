"""Projection of inline codes along a word alignment: every code once, well nested, around the aligned words."""

from __future__ import annotations

import random
import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attent.data.formats import placeholders
from attent.data.formats.units import InlineCode, InlineContent, get_display_text, join_texts
from attent.decoding.markup import MAX_CODES, project_codes, remove_codes
from tests.data.pretranslate_cases import project_reversed


def project(source: str, target: str, links: str) -> tuple[str, bool]:
    """Project the tags and placeholders of a text along links such as "0-0 1-2"."""
    pairs = [link.split("-") for link in links.split()]
    content = placeholders.mark_codes((source,))
    result = project_codes(content, target, tuple((int(left), int(right)) for left, right in pairs))
    return get_display_text(result.candidates[0]), result.is_certain


@pytest.mark.parametrize(
    ("source", "target", "links", "expected"),
    [
        ("the <b>red car</b> is", "das rote Auto ist", "0-0 1-1 2-2 3-3", "das <b>rote Auto</b> ist"),
        ("the <b>red</b> car", "el coche rojo", "0-0 2-1 1-2", "el coche <b>rojo</b>"),
        ("I <b>gave up</b> early", "ich gab früh auf", "0-0 1-1 3-2 2-3", "ich <b>gab früh auf</b>"),
        ("a <b>b</b>, c", "x, y z", "0-1 1-0 2-2", "<b>x</b>, y z"),
        ("a <b>b,</b> c", "x y, z", "0-0 1-1 2-2", "x <b>y,</b> z"),
        ('say "<b>hi</b>" now', "jetzt „hallo“ sagen", "0-2 1-1 2-0", "jetzt „<b>hallo</b>“ sagen"),
        ('say <b>"hi"</b> now', "jetzt „hallo“ sagen", "0-2 1-1 2-0", "jetzt <b>„hallo“</b> sagen"),
        ("<b>Why?</b> No.", "¿Por qué? No.", "0-0 0-1 1-2", "<b>¿Por qué?</b> No."),
        ("<a><b>x</b> y</a> z", "Z Y X", "0-2 1-1 2-0", "Z <a>Y <b>X</b></a>"),
        ("<i>x</i> <b>y</b>", "Y X", "0-1 1-0", "<b>Y</b> <i>X</i>"),
        ("x<sup>2</sup> is y", "x2 ist y", "0-0 1-1 2-2", "x<sup>2</sup> ist y"),
        ("call <b>Anna Li</b> now", "ruf jetzt Anna Li an", "0-0 2-1 1-1", "ruf jetzt <b>Anna Li</b> an"),
        ("x <img/> y", "X Y", "0-0 1-1", "X <img/> Y"),
        ("x<img/> y z", "Z X Y", "2-0 0-1 1-2", "Z X<img/> Y"),
        ("x <img/>y z", "X Y Z", "0-0 1-1 2-2", "X <img/>Y Z"),  # one space, as in the source
        ("x y<img/> z", "Y X Z", "0-1 1-0 2-2", "Y<img/> X Z"),
        ("wait for %s", "warte.", "0-0", "warte %s."),
        ("not %s here, no", "hier nicht, nein", "0-1 1-0 2-2", "hier %s nicht, nein"),
        ("file “%s” of %d", "Datei von", "0-0 1-1", "Datei “%s” von %d"),
    ],
)
def test_codes_enclose_the_aligned_words(source: str, target: str, links: str, expected: str) -> None:
    assert project(source, target, links) == (expected, expected != "ich <b>gab früh auf</b>")


@pytest.mark.parametrize(
    ("source", "target", "links", "expected"),
    [
        ("x <b>y</b> z", "X Z", "0-0 2-1", "X <b>Z</b>"),  # nothing is aligned with y
        ("x <b>y</b> z", "X Y Z", "", "X <b>Y</b> Z"),  # nothing is aligned
        ("the <b>red</b> car", "红色的车", "0-0 1-0 2-0", "红<b>色的</b>车"),  # cannot be aligned by words
        ("a <b>b</b> c <i>d</i>", "X", "1-0 3-0", "<b>X</b><i></i>"),
        ("a, <i></i> b <i></i>.", "A, B.", "", "A, <i></i> B <i></i>."),  # in order
        ("a. <b>b.</b> c", "A. B. C", "", "A. <b>B.</b> C"),
        ("a b {x} c d", "A C B D", "0-0 1-2 2-1 3-3", "A C {x} B D"),
    ],
)
def test_guesses_are_small_and_not_certain(source: str, target: str, links: str, expected: str) -> None:
    text, is_certain = project(source, target, links)
    assert text == expected
    assert is_certain == ("{x}" in source)


def test_links_of_other_texts_do_no_harm() -> None:
    assert project("a <b>b</b>", "X Y", "9-0 0-9 1-1")[0] == "X <b>Y</b>"


texts = st.text('ab c.,("%\u05d0\u05e9 \u0645-é日\u00a0\u200f', max_size=12)
codes = st.builds(
    InlineCode,
    st.just(""),
    st.sampled_from(["<1>", "<2>", "</1>", "<3/>"]),
    st.sampled_from(["open", "close", "standalone"]),
    st.sampled_from("1234"),
    st.just(False),
    st.booleans(),
)


@given(
    st.lists(st.one_of(codes, texts), max_size=14),
    texts.map(lambda text: text.strip()),
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=10),
)
def test_every_code_once_and_nothing_but_space_and_codes_is_added(
    parts: list[str | InlineCode], target: str, links: list[tuple[int, int]]
) -> None:
    source = join_texts(parts)
    result = project_codes(source, target, tuple(links))
    brackets = Counter(char for part in source if isinstance(part, str) for char in part if not char.isspace())
    for candidate in result.candidates:
        assert Counter(_list_codes(candidate)) == Counter(_list_codes(source))
        text = "".join(part for part in candidate if isinstance(part, str))
        added = Counter("".join(text.split())) - Counter("".join(target.split()))
        assert not added - brackets
        assert set(added) <= set('"(.,%-')
        assert not Counter("".join(target.split())) - Counter("".join(text.split()))
    if not brackets["("] and not brackets['"']:
        assert _list_codes(result.candidates[-1]) == _list_codes(source)


def _list_codes(content: InlineContent) -> list[InlineCode]:
    return [part for part in content if isinstance(part, InlineCode)]


def make_tree(rng: random.Random, depth: int = 0) -> str:
    """Return nested tags, placeholders and words."""
    pieces = []
    for _ in range(rng.randint(1, 4)):
        word = rng.choice(["one", "two,", "(three)", "four.", "שלום", "مرحبا", "é", "%s", "{n}", "<br2/>", "&amp;"])
        tag = rng.choice(["b", "i", "a", "span"])
        inner = make_tree(rng, depth + 1) if depth < 3 and rng.random() < 0.4 else word
        pieces.append(f"<{tag}>{inner}</{tag}>" if rng.random() < 0.4 else inner)
    return rng.choice([" ", " ", ""]).join(pieces)


def test_projection_of_nested_tags_is_well_nested() -> None:
    rng, certain = random.Random(3), 0
    for _ in range(2000):
        source = make_tree(rng)
        content = placeholders.mark_codes((source,))
        count = len(remove_codes(content).split())
        links = tuple((rng.randrange(count), rng.randrange(count)) for _ in range(count)) if count else ()
        result = project_reversed(content, links=rng.choice([links, None]))
        first = placeholders.unmark_codes(result.candidates[0])
        problem = placeholders.find_problem((source,), first)
        assert not problem or ("nested" in problem and not _is_nested(source)), (source, first, problem)
        certain += result.is_certain
    assert 200 < certain < 1800


def _is_nested(text: str) -> bool:
    return not placeholders.find_problem((text,), (f"{text} ",)) and placeholders._is_well_nested(
        list(placeholders._list_tags((text,)))
    )


def test_many_codes_take_little_time() -> None:
    for count in (MAX_CODES // 2, 20_000):
        nested = [InlineCode("", f"<{index}>", "open", str(index)) for index in range(count)]
        closing = [InlineCode("", f"</{index}>", "close", str(index)) for index in reversed(range(count))]
        mixed = [part for code in nested for part in (code, "a ")]
        for source in (join_texts([*nested, "x", *closing]), join_texts([*mixed, *closing]), join_texts(mixed)):
            start = time.process_time()
            result = project_reversed(source)
            assert time.process_time() - start < 3
            assert Counter(_list_codes(result.candidates[0])) == Counter(_list_codes(source))
