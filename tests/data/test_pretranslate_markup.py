"""Markup of translations: copied by the model, else taken out of the text and projected; never lost."""

from __future__ import annotations

import random
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from lxml import etree

from attent.data.formats import placeholders
from attent.data.formats.units import InlineContent, TransferredContent
from attent.data.pairs import CorpusError
from attent.data.pretranslate import COPY_SAMPLE_RUNS, PretranslateResult, pretranslate_file
from attent.decoding.markup import remove_codes
from tests.data.pretranslate_cases import FILES_PER_KIND, GENERATORS, project_reversed, reverse_words

HEADER = 'msgid ""\nmsgstr "Content-Type: text/plain; charset=UTF-8\\n"\n'


def drop_placeholders(contents: Sequence[InlineContent]) -> list[TransferredContent]:
    """Translate by reversing the words without all placeholders."""

    def translate(text: str) -> str:
        return reverse_words(placeholders.GENERIC.pattern.sub("", text).replace("`", ""))

    return [project_reversed(content, translate) for content in contents]


def transfer(text: str, name: str = "a.txt", **options: bool) -> PretranslateResult:
    def translate(texts: Sequence[str]) -> list[str]:
        assert options, "tags must not go through a model that has not learned them"
        return [text.upper() for text in texts]

    return pretranslate_file(text.encode(), name, translate, transfer=drop_placeholders, **options)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a %s b", "b %s a"),
        ("all of %s.", "of. all %s"),
        ("%s: not found", "%s: found not"),
        ("a <b>b c</b> d", "d <b>c b</b> a"),
        ("a <b>%s</b> c", "c <b>%s</b> a"),
        ("see (%s) now", "now (%s) see"),
        ("a %s b %d c", "c %s b %d a"),  # positional ones keep their order
        ("a {x} b {y} c", "c {y} b {x} a"),
        ("from {a} {b} to", "to {a} {b} from"),
        ("a <i>b</i><wbr/> c", "c<wbr/> <i>b</i> a"),
    ],
)
def test_lost_placeholders_are_projected(source: str, expected: str) -> None:
    result = transfer(f"{source}\n")
    assert (result.content.decode(), result.filled_count, result.skipped) == (f"{expected}\n", 1, ())


def test_placeholders_that_the_model_copies_stay_where_it_puts_them() -> None:
    def swap(contents: Sequence[InlineContent]) -> list[TransferredContent]:
        return [project_reversed(content) for content in contents]

    result = pretranslate_file(b"{n} of <b>all %s</b>\n", "a.txt", list, transfer=swap)
    assert result.content == b"<b>%s all</b> of {n}\n"


@pytest.mark.parametrize(
    ("source", "translation", "expected", "is_certain"),
    [
        ("<code>run</code> it", "Stunrung run", "Stunrung <code>run</code>", True),
        ("<code>run</code> it", "Stunrung", "<code>run</code> it", False),
        ("at <code>v</code> now", "vier Uhr", "at <code>v</code> now", False),
        ("<code>v</code> is here", "vier bei v", "vier bei <code>v</code>", True),
        ("two <code>u8</code>s here", "zwei u8s", "zwei <code>u8</code>s", True),
        ("the <code>run</code> now", "我run了", "我<code>run</code>了", True),
        ("a <code>文</code> b", "中文字", "中<code>文</code>字", True),
    ],
)
def test_code_inside_of_another_word_is_not_copied(
    source: str, translation: str, expected: str, is_certain: bool
) -> None:
    def translate(contents: Sequence[InlineContent]) -> list[TransferredContent]:
        texts = [remove_codes(content) for content in contents]
        is_copied = all(isinstance(part, str) for content in contents for part in content)
        if is_copied:
            return [TransferredContent(((translation,),), is_certain=True) for _ in texts]
        return [TransferredContent((content,), is_certain=False) for content in contents]

    result = pretranslate_file(f"<p>{source}</p>".encode(), "a.html", list, transfer=translate)
    assert result.content.decode() == f"<p>{expected}</p>"
    assert len(result.for_review) == (not is_certain)


def test_placeholders_that_a_sample_loses_do_not_go_through_the_model_later() -> None:
    requested: list[list[str]] = []

    def lose_names(contents: Sequence[InlineContent]) -> list[TransferredContent]:
        requested.append([remove_codes(content) for content in contents])
        return [project_reversed(content, lambda text: reverse_words(text.replace("{n}", "N"))) for content in contents]

    lines = [f"a{number} {{n}} b" if number % 3 else f"a{number} %s b" for number in range(96)]
    lines += ["no code", "x {n} and %s", "x {other} y", "a1 {n} b"]
    result = pretranslate_file("\n".join(lines).encode(), "a.txt", list, transfer=lose_names)
    expected = ["b %s a0", "b {n} a1", "code no", "%s and {n} x", "y {other} x", "b {n} a1"]
    found = result.content.decode().split("\n")
    assert [*found[:2], *found[-4:]] == expected
    assert result.skipped == ()
    sample, rest = requested
    assert sample == lines[:COPY_SAMPLE_RUNS]
    # `{n}` was lost in each sentence of the sample, `%s` in none, and not more than half of them were copied.
    assert rest[:2] == ["a1 b", "a2 b"]
    assert rest[-5:] == ["a94 b", "a95 b", "no code", "x and %s", "x y"]
    assert "a93 %s b" in rest


def test_tags_go_through_a_model_that_copies_them() -> None:
    assert transfer("a <b>b</b> %s\n", copies_tags=False).content == b"<b>b</b> a %s\n"
    result = transfer("Run *make* on\n", "a.md", copies_tags=True)
    assert result.content == b"RUN *MAKE* ON\n"
    assert transfer("a [b](c) d\n", "a.md", copies_tags=True).content == b"d [b](c) a\n"  # it lost the tags


def test_tags_beyond_those_that_a_model_knows_are_projected() -> None:
    requested: list[str] = []

    def translate(texts: Sequence[str]) -> list[str]:
        requested.extend(texts)
        return list(texts)

    text = "x " + " ".join(f"[{letter}](u)" for letter in "abcdefghij") + " y\n\na [b](u) c\n"
    result = pretranslate_file(text.encode(), "a.md", translate, transfer=drop_placeholders, copies_tags=True)
    assert requested == ["a <x1> b </x1> c"]
    assert result.content.startswith(b"y [j](u) [i](u)")


def test_thousands_of_tags_go_through_a_model_in_little_time() -> None:
    page = f"<p>{'<b>word</b> ' * 20_000}</p>".encode()
    start = time.process_time()
    assert pretranslate_file(page, "a.html", list).content == page
    assert time.process_time() - start < 10


def test_empty_pairs_at_the_ends_stay_there() -> None:
    page = "<p><a id='x'></a>One two. <i></i></p>"
    assert transfer(page, "a.html").content.decode() == page.replace("One two.", "two. One")


def test_uncertain_placement_is_reported_for_review() -> None:
    def transfer_unaligned(contents: Sequence[InlineContent]) -> list[TransferredContent]:
        return [project_reversed(content, links=()) for content in contents]

    result = pretranslate_file(b"a <b>b</b> c\n\nd e\n", "a.txt", list, transfer=transfer_unaligned)
    assert [(unit.line, unit.source) for unit in result.for_review] == [(1, "a <b>b</b> c")]
    assert result.content == b"c <b>b</b> a\n\ne d\n"


def test_unit_without_projection_is_skipped_with_the_reason() -> None:
    result = pretranslate_file(b"%s: not found (%d)\nAll is well\n", "a.txt", lambda texts: ["x" for _ in texts])
    assert result.content == b"%s: not found (%d)\nx\n"
    assert [unit.reason for unit in result.skipped] == ["its translation lost %s, %d"]


@pytest.mark.parametrize("is_plain", [True, False])
def test_wrong_number_of_translations_is_an_error(is_plain: bool) -> None:
    def drop(contents: Sequence[object]) -> list[TransferredContent]:
        return []

    options: dict[str, Callable[..., list[TransferredContent]]] = {} if is_plain else {"transfer": drop}
    with pytest.raises(CorpusError, match="must be 1 translations, but there are 0"):
        pretranslate_file(b"a %s b\n", "a.txt", lambda texts: [], **options)  # type: ignore[arg-type]


def test_entry_with_a_format_is_filled_by_its_rules() -> None:
    entry = '\n#, c-format\nmsgid "copy %s to %s, <b>now</b> at %d%%"\nmsgstr ""\n'
    result = pretranslate_file(f"{HEADER}{entry}".encode(), "a.po", list, transfer=drop_placeholders)
    assert result.filled_count == 1
    target = result.content.decode().splitlines()[-1]
    assert target.index("%s") < target.rindex("%s") < target.index("%d%%")


def test_plural_with_lost_count_is_filled() -> None:
    header = HEADER.replace("UTF-8", "UTF-8\\nPlural-Forms: nplurals=2; plural=(n != 1);")
    entry = '\n#, c-format\nmsgid "one file"\nmsgid_plural "%d files"\nmsgstr[0] ""\nmsgstr[1] ""\n'
    result = pretranslate_file(f"{header}{entry}".encode(), "a.po", list, transfer=drop_placeholders)
    assert result.content.decode().endswith('msgstr[0] "file one"\nmsgstr[1] "%d files"\n')


def test_detagged_text_has_no_double_spaces() -> None:
    content = placeholders.mark_codes(("a %s, %d b (%s) <b>c</b> %s.",))
    assert remove_codes(content) == "a, b c."


# Generated files.


@pytest.mark.parametrize("name", list(GENERATORS))
def test_generated_files_are_filled_with_all_their_markup(name: str) -> None:
    for seed in range(FILES_PER_KIND):
        before, _, _ = GENERATORS[name](random.Random(f"{name} {seed}"))
        result = pretranslate_file(before, name, list, transfer=drop_placeholders)
        reasons = {unit.reason for unit in result.skipped}
        assert not any("lost" in reason or "gained" in reason or "nested" in reason for reason in reasons), reasons
        again = pretranslate_file(result.content, name, list, transfer=drop_placeholders)
        assert (again.filled_count, again.content) == (0, result.content)
        if name.endswith((".xlf", ".tmx")):
            etree.fromstring(result.content)


XLIFF = '<xliff version="1.2" xmlns="urn:oasis:names:tc:xliff:document:1.2"><file><body>{}</body></file></xliff>'


def make_inline(rng: random.Random, number: list[int], depth: int = 0) -> str:
    """Return words and nested inline elements of XLIFF, with placeholders and entities."""
    pieces = []
    for _ in range(rng.randint(1, 4)):
        number[0] += 1
        word = rng.choice(
            ["one", "two,", "(three)", "שלום", "%s", "{n}", "&lt;b&gt;", "&amp;", f'<x id="{number[0]}"/>']
        )
        inner = make_inline(rng, number, depth + 1) if depth < 3 and rng.random() < 0.4 else word
        element = rng.choice(
            ["<g id='{0}'>{1}</g>", "<bpt id='{0}'>b</bpt>{1}<ept id='{0}'>b</ept>", "<mrk mtype='x{0}'>{1}</mrk>"]
        )
        pieces.append(element.format(number[0], inner) if rng.random() < 0.4 else inner)
    return rng.choice([" ", " ", ""]).join(pieces)


def test_random_xliff_keeps_every_inline_element() -> None:
    rng, filled = random.Random(2), 0
    for _ in range(300):
        source = f"<source>a {make_inline(rng, [0])}</source>"
        content = XLIFF.format(f'<trans-unit id="1">{source}</trans-unit>').encode()
        result = pretranslate_file(content, "a.xlf", list, transfer=drop_placeholders, src="en", tgt="de")
        assert result.skipped == (), source
        unit = etree.fromstring(result.content).find(".//{*}trans-unit")
        elements = [Counter((child.tag, *sorted(child.items())) for child in side.iter("{*}*")) for side in unit]
        filled += result.filled_count
        if result.filled_count:
            assert (
                elements[0] - elements[1] == Counter(["{urn:oasis:names:tc:xliff:document:1.2}source"])
                or sum((elements[0] - elements[1]).values()) == 1
            )
    assert filled == 300


def test_random_markdown_keeps_links_and_code() -> None:
    rng = random.Random(4)
    pieces = [
        "one",
        "*two three*",
        "**four**",
        "[five](http://a.example/{n})",
        "`code {n}`",
        "![six](b.png)",
        "~~x y~~",
        "&amp;",
        "<i>z</i>",
    ]
    for _ in range(300):
        text = (
            "Words "
            + " ".join(rng.choice(pieces).replace("{n}", str(number)) for number in range(rng.randint(1, 8)))
            + "."
        )
        result = pretranslate_file(f"{text}\n".encode(), "a.md", list, transfer=drop_placeholders)
        assert result.skipped == (), text
        counts = [
            Counter(re.findall(r"\]\([^)]*\)|`[^`]*`|!\[|\*+|~~|&amp;|</?i>", each))
            for each in (text, result.content.decode())
        ]
        assert counts[0] == counts[1], text
