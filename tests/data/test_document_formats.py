"""Documents of every format: texts are translated, and everything else stays."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import random
import re
import time
import zipfile
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import yaml

from attent.data.formats import subtitles, units
from attent.data.formats.message_format import choose_plural_sources
from attent.data.formats.units import InlineCode
from attent.data.pairs import CorpusError, LanguagePair
from attent.data.pretranslate import pretranslate_file
from tests.data.document_cases import FORMATS, WORDS, pack_docx, translate_in_parentheses

Translator = Callable[[Sequence[str]], Sequence[str]]


def check_documents(name: str, seeds: range) -> None:
    """Compare generated documents with what is expected of their translation, byte by byte outside of texts."""
    spec = FORMATS[name]
    for seed in seeds:
        document = spec.make(random.Random(f"{name} {seed}"))
        content = spec.pack(document.raw)
        assert spec.parse(spec.unpack(content)) == document.before, f"the generator is wrong: {content!r}"
        assert pretranslate_file(content, name, list, fields=spec.fields).content == content
        result = pretranslate_file(content, name, translate_in_parentheses, src="en", tgt="de", fields=spec.fields)
        assert result.skipped == (), content
        translated = spec.unpack(result.content)
        assert spec.parse(translated) == document.after, content
        assert re.fullmatch(document.pattern, translated.decode(), re.DOTALL), (content, translated)
        again = pretranslate_file(result.content, name, list, fields=spec.fields)
        assert again.content == result.content, content


@pytest.mark.parametrize("name", FORMATS)
def test_texts_are_translated_and_everything_else_stays(name: str) -> None:
    check_documents(name, range(30))


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_texts_of_a_thousand_documents_are_translated(name: str) -> None:
    check_documents(name, range(30, 1030))


def translate(
    content: str | bytes, name: str, translator: Translator = translate_in_parentheses, **options: Any
) -> str:
    data = content.encode() if isinstance(content, str) else content
    return pretranslate_file(data, name, translator, **{"src": "en", "tgt": "de", **options}).content.decode()


def list_requests(content: str, name: str, **options: Any) -> list[str]:
    """Return the texts that a model would be given."""
    requests: list[str] = []
    translate(content, name, lambda texts: requests.extend(texts) or list(texts), **options)
    return requests


def translate_in_capitals(text: str) -> str:
    return "".join(part if part.startswith("<") else part.upper() for part in re.split(r"(<[^<>]*>)", text))


def get_error(content: str | bytes, name: str, **options: Any) -> str:
    with pytest.raises(CorpusError) as error:
        translate(content, name, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


# Subtitles

EPISODE = """1
00:00:01,000 --> 00:00:02,000
Good evening. The man who lives
next door has bought

2
00:00:02,100 --> 00:00:04,000
a <i>new bicycle</i>, and he is proud of it.

3
00:00:04,100 --> 00:00:05,000
- Who told you that?
- <i>My brother.</i>

4
00:00:09,000 --> 00:00:10,000
{\\an8}♪ La la la ♪

5
00:00:11,000 --> 00:00:12,000
1984
"""


def test_sentences_over_several_cues_are_translated_as_sentences() -> None:
    requests = list_requests(EPISODE, "a.srt")
    assert [re.sub(r"<(/?)x?\d> ?", r"<\1i>", text).replace(" </", "</") for text in requests] == [
        "Good evening.",
        "The man who lives next door has bought a <i>new bicycle</i>, and he is proud of it.",
        "Who told you that?",
        "My brother.",
        "La la la",
    ]


def test_translations_of_sentences_are_divided_among_their_cues() -> None:
    after = translate(EPISODE, "a.srt", lambda texts: [translate_in_capitals(text) for text in texts])
    assert re.findall(r"\d+\n[\d:,]+ --> [\d:,]+\n", after) == re.findall(r"\d+\n[\d:,]+ --> [\d:,]+\n", EPISODE)
    assert "GOOD EVENING. THE MAN WHO\nLIVES NEXT DOOR HAS BOUGHT\n\n2" in after
    assert "\nA <i>NEW BICYCLE</i>, AND HE IS PROUD OF IT.\n\n3" in after
    assert "- WHO TOLD YOU THAT?\n- <i>MY BROTHER.</i>\n" in after
    assert "{\\an8}♪ LA LA LA ♪\n" in after


def test_a_translation_is_not_cut_inside_of_markup() -> None:
    start, end = InlineCode("", "<b>", "open", "1"), InlineCode("", "</b>", "close", "1")
    content = ("so ", start, "one two three four", end, " end of it")
    pieces = subtitles.split_content(content, [10, 10], keep_pairs=True)
    assert [units.get_raw_text(piece) for piece in pieces] == ["so <b>one two three four</b> ", "end of it"]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("A dog runs", "<v Bob>and barks."),  # another voice
        ("[DOOR SLAMS]", "and barks."),
        ("A dog runs", "- and barks."),
    ],
)
def test_other_speakers_and_sounds_do_not_continue_a_sentence(first: str, second: str) -> None:
    cues = f"WEBVTT\n\n00:01.000 --> 00:02.000\n{first}\n\n00:02.000 --> 00:03.000\n{second}\n"
    assert list_requests(cues, "a.vtt") == [first, "and barks."]


def test_a_pause_ends_a_sentence() -> None:
    cues = "1\n00:00:01,000 --> 00:00:02,000\nA dog\n\n2\n00:00:{},000 --> 00:00:09,000\nbarks\n"
    assert list_requests(cues.format("04"), "a.srt") == ["A dog barks"]
    assert list_requests(cues.format("08"), "a.srt") == ["A dog", "barks"]


def test_every_cue_gets_words_where_there_are_enough() -> None:
    cues = "".join(f"{n}\n00:00:0{n},000 --> 00:00:0{n},900\n{'very ' * n}long words\n\n" for n in range(1, 6))
    after = translate(cues, "a.srt", lambda texts: ["one two three four five"])
    assert re.findall(r"-->.*\n(.*)\n", after) == ["one", "two", "three", "four", "five"]
    after = translate(cues, "a.srt", lambda texts: ["一二三四五六七八九十"])
    assert all(re.findall(r"-->.*\n(.*)\n", after))


# ICU messages


def format_message(message: str, values: dict[str, object]) -> str:
    """Format an ICU message for English, as its specification says."""

    def format_part(offset: int, number: object) -> tuple[str, int]:
        text = ""
        while offset < len(message) and message[offset] != "}":
            quoted = re.compile(r"'(?:'|([{}#|](?:[^']|'')*)')").match(message, offset)
            choice = re.compile(r"\{(\w+), (plural|select),").match(message, offset)
            argument = re.compile(r"\{(\w+)(, number)?\}").match(message, offset)
            if quoted:
                text, offset = text + (quoted[1] or "'").replace("''", "'"), quoted.end()
            elif choice:
                value, offset = values[choice[1]], choice.end()
                branches = {}
                while message[offset] != "}":
                    head = re.compile(r"\s*([\w=]+)\s*\{").match(message, offset)
                    assert head is not None
                    branches[head[1]], offset = format_part(head.end(), value if choice[2] == "plural" else number)
                    offset = re.compile(r"\}\s*").match(message, offset).end()  # type: ignore[union-attr]
                key = ("one" if value == 1 else "other") if choice[2] == "plural" else str(value)
                text += branches.get(f"={value}", branches.get(key, branches["other"]))
                offset += 1
            elif argument:
                text, offset = text + str(values[argument[1]]), argument.end()
            elif message[offset] == "#" and number is not None:
                text, offset = text + str(number), offset + 1
            else:
                text, offset = text + message[offset], offset + 1
        return text, offset

    return format_part(0, None)[0]


def make_message(rng: random.Random, depth: int = 0) -> str:
    parts = [rng.choice(WORDS[:6])]
    for _ in range(rng.randint(1, 4)):
        kind = rng.randrange(6 if depth < 2 else 4)
        if kind < 4:
            parts.append(["{name}", "'{'x'}'", "#", "it''s"][kind] if rng.random() < 0.6 else rng.choice(WORDS[:6]))
        elif kind == 4:
            forms = f"one {{{make_message(rng, depth + 1)}}} other {{{make_message(rng, depth + 1)}}}"
            parts.append(f"{{{rng.choice('nm')}, plural, =0 {{none}} {forms}}}")
        else:
            parts.append(f"{{g, select, male {{{make_message(rng, depth + 1)}}} other {{they}}}}")
    return " ".join([*parts, rng.choice(WORDS[:3])])


def test_formatting_a_translated_message_is_translating_a_formatted_one() -> None:
    rng, count = random.Random(3), 0
    for _ in range(80):
        message = make_message(rng)
        content = json.dumps([message]).encode()
        result = pretranslate_file(content, "a.json", translate_in_parentheses, src="en", tgt="en")
        if result.skipped:
            assert "more than 100 forms" in "".join(unit.reason for unit in result.skipped)
            continue
        translated = json.loads(result.content)[0]
        is_message = re.search("plural|select", message)
        for number, other, gender in itertools.product((0, 1, 7), (1, 5), ("male", "female")):
            values: dict[str, object] = {"n": number, "m": other, "g": gender, "name": "Bob"}
            expected = format_message(message, values) if is_message else message
            assert (format_message(translated, values) if is_message else translated) == f"({expected})", message
            count += 1
    assert count > 500


@pytest.mark.parametrize(
    ("target", "added"),
    [
        ("ru", "few {(# files)} many {(# files)}"),
        ("de", ""),
        ("ja", ""),
        ("ar", "zero {(# files)} two {(# files)} few {(# files)} many {(# files)}"),
    ],
)
def test_plural_categories_of_the_target_language_are_added(target: str, added: str) -> None:
    after = translate('["{n, plural, one {# file} other {# files}}"]', "a.json", tgt=target)
    assert after == f'["{{n, plural, one {{(# file)}} other {{(# files)}}{" " * bool(added)}{added}}}"]'


def test_the_singular_is_the_source_where_it_shows_the_number() -> None:
    other = {"other": ["#"]}
    assert choose_plural_sources({"one": ["#"], **other}, LanguagePair("en", "lv")) == {"zero": "other"}
    assert choose_plural_sources({"two": ["#"], **other}, LanguagePair("he", "ru"))["one"] == "other"
    assert choose_plural_sources({"one": [], **other}, LanguagePair("en", "ru")) == {"few": "other", "many": "other"}
    assert choose_plural_sources(other, LanguagePair("en", "xx")) == {}


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("{n, plural, one {a}}", "it has forms without `other`"),
        ("{n, plural, offset:1 one {a} other {b}}", "its forms have an offset"),
        ("{n, plural, one {a} other {b}", "it has forms without `other`"),
        ("a {n, plural, other {b}} }", "it has a } too many"),
        ("{n, plural, other {b}} {", "it has a { that is not closed or begins no argument"),
        ("{n, select, other {x " * 12 + "}}" * 12, "it has forms inside each other, more than 10 deep"),
        ("{n, plural, one {a} other {b}} " * 21, "it has more than 20 plurals and selects"),
        ("{n, plural, one {a} other {b}} " * 8, "it has more than 100 forms"),
    ],
)
def test_messages_that_cannot_be_translated_stay(message: str, reason: str) -> None:
    result = pretranslate_file(json.dumps([message]).encode(), "a.json", translate_in_parentheses)
    assert [unit.reason for unit in result.skipped] == [reason]
    assert json.loads(result.content) == [message]


# Strings of programs


def test_fields_select_keys_and_everything_inside() -> None:
    page = '{"id": "some words", "title": "a_b", "body": [{"text": "One"}, "Two"], "other": {"title": "Three"}}'
    after = translate(page, "a.json", fields=("title", "body"))
    assert after == re.sub('"(a_b|One|Two|Three)"', r'"(\1)"', page)
    page = "a: One\nb:\n  c: &x Two\n  d: [Three]\ne: *x\n"
    after = translate(page, "a.yml", lambda _: ["Zwei", "Drei"], fields=("b",))
    assert after == page.replace("Two", "Zwei").replace("Three", "Drei")


def test_metadata_of_application_strings_stays() -> None:
    page = '{"@@locale": "en", "a": "One", "@a": {"description": "A word"}}'
    assert translate(page, "app.arb") == page.replace('"One"', '"(One)"')
    page = '{"a": {"message": "Hi $NAME$ there", "description": "A word", "placeholders": {"name": {"content": "$1"}}}}'
    assert translate(page, "messages.json") == page.replace("Hi $NAME$ there", "(Hi $NAME$ there)")
    assert "lost $NAME$" in pretranslate_file(page.encode(), "messages.json", lambda _: ["x"]).skipped[0].reason


def test_broken_strings_are_refused_with_their_line() -> None:
    assert "a.json is not JSON at line 2 (" in get_error('{"a":\n"b" "c"}', "a.json")
    assert "a.json is nested too deeply" in get_error("[" * 100_000, "a.json")
    assert "a.yaml is not YAML at line 2 (" in get_error("a: b\nc: d: e\n", "a.yaml")
    assert "a.yaml has over 200 collections inside each other" in get_error("[" * 100_000, "a.yaml")
    assert 'a.strings has no `"key" = "value";` at line 2' in get_error('"a" = "b";\n"c" = d;\n', "a.strings")


def test_aliases_of_yaml_are_not_expanded() -> None:
    pairs = itertools.pairwise("abcdefghij")
    bomb = "a: &a [word, word]\n" + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in pairs)
    assert translate(bomb, "a.yaml") == bomb.replace("[word, word]", '["(word)", "(word)"]')


def test_yaml_values_keep_their_type() -> None:
    page = "a: no\nb: 12\nc: 2020-01-01\nd: ~\ne: !other words\nf: Never\ng: !!str words\n"
    words = iter(["No", "12:30", "words"])
    after = yaml.safe_load(translate(page, "a.yaml", lambda texts: [next(words) for _ in texts]).replace("!other", ""))
    assert after == {**yaml.safe_load(page.replace("!other", "")), "f": "No", "g": "12:30"}


def test_properties_keep_their_encoding() -> None:
    after = pretranslate_file("a=Größe one\n".encode("latin-1"), "a.properties", lambda _: ["Größe €"])
    assert after.content == "a=Größe \\u20ac\n".encode("latin-1")
    assert translate("a=It''s {0}", "a.properties", lambda _: ["l'ü {0}"]) == "a=l''\\u00fc {0}"
    assert translate("a=It's", "a.properties", lambda _: [" l'𝒳\n"]) == "a=l'\\ud835\\udcb3"


def test_strings_in_utf_16_stay_so() -> None:
    after = pretranslate_file('"a" = "One";'.encode("utf-16"), "a.strings", lambda _: ['"Ä"\\'])
    assert after.content == '"a" = "\\"Ä\\"\\\\";'.encode("utf-16")


def test_android_plurals_get_the_items_of_the_language() -> None:
    items = '    <item quantity="one">%d file</item>\n    <item quantity="other">%d files</item>\n'
    page = f'<resources>\n  <plurals name="a">\n{items}  </plurals>\n</resources>\n'
    few, many = (f'    <item quantity="{key}">(%d files)</item>\n' for key in ("few", "many"))
    after = page.replace("%d file<", "(%d file)<").replace("%d files<", "(%d files)<")
    assert translate(page, "strings.xml", tgt="pl") == after.replace("  </plurals>", f"{few}{many}  </plurals>")
    assert translate(page, "strings.xml", tgt="fr").count("<item") == 3
    assert translate(page, "strings.xml", tgt="de") == after


def test_android_spaces_and_quotes_are_those_that_are_shown() -> None:
    link = '<string name="b">\\u00e9 <i>x</i>\\n<![CDATA[<a href="u">y</a>]]></string>'
    page = f'<resources><string name="a">  one\n  two "  three  "</string>{link}</resources>'
    assert list_requests(page, "strings.xml")[0] == "one two   three"
    assert translate(page, "strings.xml", list) == page
    after = translate(page, "strings.xml", lambda texts: [f"@{text}'" for text in texts])
    assert '<string name="a">\\@one two \\u0020\\u0020three\\\' \\u0020</string>' in after
    assert '&lt;a href=\\"u\\"&gt;y&lt;/a&gt;' in after


def test_android_characters_of_two_escapes_are_one() -> None:
    page = '<resources><string name="a">Hi \\ud83d\\ude00 there</string></resources>'
    assert list_requests(page, "strings.xml") == ["Hi 😀 there"]


# Tables


def test_empty_cells_of_the_target_are_filled() -> None:
    table = 'id,en,de\n1,"One, two",\n2,Three,Drei\n3,,\n4,"Four ""x""",""\n5\n'
    result = pretranslate_file(table.encode(), "a.csv", translate_in_parentheses, src="en", tgt="de")
    after = table.replace('two",', 'two","(One, two)"').replace('x""",""', 'x""","(Four ""x"")"')
    assert result.content.decode() == after
    assert (result.filled_count, result.existing_count) == (2, 1)
    assert [(unit.line, unit.reason) for unit in result.skipped] == [(6, "its row has too few columns")]
    assert translate("source\ttarget\nOne\t\n", "a.tsv") == "source\ttarget\nOne\t(One)\n"


def test_columns_are_named_in_errors() -> None:
    assert get_error("a;b\n1;2\n", "a.csv") == (
        "a.csv has no columns of source and target: name the fields to translate, of a, b"
    )
    assert get_error("a;b\n1;2\n", "a.csv", fields=("c",)) == "a.csv has no column c: its first line names a, b"
    assert "a.srt has no fields to choose from" in get_error("", "a.srt", fields=("c",))


# Word documents


def make_docx(paragraphs: str, part: str = "word/document.xml", **others: str) -> bytes:
    """Return a document with these paragraphs; `others` are parts of `word/` by the name before `.xml`."""
    roots = {"header1": "hdr", "footer1": "ftr"}
    space = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main" xmlns:x="urn:x"'
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(part, f"<w:document {space}><w:body>{paragraphs}</w:body></w:document>")
        for name, text in others.items():
            root = roots.get(name, name)
            archive.writestr(f"word/{name}.xml", f"<w:{root} {space}>{text}</w:{root}>")
    return buffer.getvalue()


def read_part(content: bytes, name: str = "document") -> str:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert archive.testzip() is None
        return archive.read(f"word/{name}.xml").decode()


def make_run(text: str, properties: str = "") -> str:
    return f'<w:r>{properties}<w:t xml:space="preserve">{text}</w:t></w:r>'


def make_field(kind: str) -> str:
    return f'<w:r><w:fldChar w:fldCharType="{kind}"/></w:r>'


def translate_docx(content: bytes, translator: Translator = translate_in_parentheses) -> bytes:
    result = pretranslate_file(content, "a.docx", translator)
    assert result.skipped == ()
    return result.content


BOLD = "<w:rPr><w:b/></w:rPr>"


def test_runs_of_the_same_formatting_are_one_text() -> None:
    language = '<w:rPr><w:lang w:val="en-US"/></w:rPr>'
    runs = make_run("Some") + '<w:proofErr w:type="x"/>' + make_run(" wo", language) + make_run("rds", "<w:rPr/>")
    after = read_part(translate_docx(make_docx(f"<w:p>{runs}</w:p>")))
    assert f"<w:p>{make_run('(Some words)')}</w:p>" in after


def test_most_of_a_paragraph_needs_no_code() -> None:
    runs = make_run("Note:", "<w:rPr><w:i/></w:rPr>") + make_run(" many bold words", BOLD)
    content = make_docx(f"<w:p>{runs}</w:p>")
    after = read_part(translate_docx(content, lambda texts: [text.replace("bold", "large") for text in texts]))
    assert runs.replace("bold", "large") in after


def test_link_fields_are_translated_and_other_fields_stay() -> None:
    link = make_field("begin") + '<w:r><w:instrText> HYPERLINK "u" </w:instrText></w:r>' + make_field("separate")
    page = make_field("begin") + "<w:r><w:instrText>PAGE</w:instrText></w:r>" + make_field("separate")
    page += make_run("seven") + make_field("end")
    runs = make_run("See ") + link + make_run("the home page", BOLD) + make_field("end") + make_run(" on ") + page
    after = read_part(translate_docx(make_docx(f"<w:p>{runs}{make_run(' there')}</w:p>")))
    assert link + make_run("the home page", BOLD) + make_field("end") in after
    assert page + make_run(" there)") in after


def test_a_field_of_several_paragraphs_stays() -> None:
    first = make_field("begin") + make_field("separate") + make_run("One")
    after = read_part(translate_docx(make_docx(f"<w:p>{first}</w:p><w:p>{make_run('Two')}{make_field('end')}</w:p>")))
    assert make_field("separate") + make_run("(One)") + "</w:p>" in after
    assert make_run("(Two)") + make_field("end") in after


def test_text_boxes_and_all_parts_are_translated() -> None:
    box = f"<w:r><x:box><w:txbxContent><w:p>{make_run('In a box')}</w:p></w:txbxContent></x:box></w:r>"
    others = {name: f"<w:p>{make_run(f'A {name}')}</w:p>" for name in ("header1", "footer1", "footnotes", "endnotes")}
    content = make_docx(f"<w:p>{make_run('Before')}{box}{make_run('after')}</w:p>", **others, styles="<w:p>No</w:p>")
    after = translate_docx(content)
    box_after = box.replace("In a box", "(In a box)")
    assert make_run("(Before)") + box_after + make_run("(after)") in read_part(after)
    assert all(f"(A {name})" in read_part(after, name) for name in others)
    assert "<w:p>No</w:p>" in read_part(after, "styles")


def test_tabs_and_line_breaks_separate_texts_and_deleted_text_stays() -> None:
    runs = "<w:r><w:t>One</w:t><w:tab/><w:t>two</w:t><w:br/><w:t>three</w:t></w:r>"
    deleted = "<w:del><w:r><w:delText>old</w:delText></w:r></w:del>"
    inserted = f"<w:ins>{make_run('and four')}</w:ins>"
    after = read_part(translate_docx(make_docx(f"<w:p>{runs}{deleted}{inserted}</w:p>")))
    assert re.sub("<.*?>", "", after) == "(One)(two)(threeoldand four)"
    assert deleted in after
    assert re.search(r"<w:ins><w:r><w:t[^>]*>and four</w:t></w:r></w:ins>", after)


def test_documents_that_cannot_be_read_are_refused() -> None:
    assert "a.docx is damaged or protected by a password" in get_error(b"PK\x03\x04", "a.docx")
    assert "a.docx is not a Word document" in get_error(make_docx("", "xl/workbook.xml"), "a.docx")
    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("word/document.xml", "w") as part:
        for _ in range(129):
            part.write(b" " * 2**20)
    assert "a.docx has over 128 MiB of text or 1 GiB unpacked" in get_error(bomb.getvalue(), "a.docx")


@pytest.mark.parametrize("pack", [str.encode, pack_docx], ids=["strings.xml", "a.docx"])
def test_attacks_by_xml_are_refused(pack: Callable[[str], bytes], request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.id
    bomb = (
        '<!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;&a;">]><resources><string name="a">&b;</string></resources>'
    )
    assert "declares entities" in get_error(pack(bomb), name)
    external = bomb.replace("[", 'SYSTEM "file:///etc/passwd" [')
    assert "declares entities" in get_error(pack(external), name)


CUE = "1\n00:00:01,000 --> 00:00:02,000\n"
LARGE = 50_000


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.srt", CUE + "a" + " " * LARGE + "b\nc"),
        ("a.srt", CUE + "<i>a" * LARGE + "</b>" * LARGE),
        ("a.srt", CUE + "a\n" * LARGE),
        ("a.json", '["' + "a." * LARGE + '!"]'),
        ("a.json", '["' + "{n, plural, " * LARGE + '"]'),
        ("a.yaml", "a: [" + "*a, " * LARGE + "]"),
        ("a.properties", "a" * LARGE + "\\\n" * LARGE),
        ("a.strings", '"' * LARGE),
        ("a.csv", '"' * LARGE),
        ("a.docx", f"<w:p>{make_field('begin') * 3000}{make_run('words')}</w:p>"),
    ],
)
def test_time_grows_with_the_size(name: str, content: str) -> None:
    data = make_docx(content) if name == "a.docx" else content.encode()
    start = time.process_time()
    with contextlib.suppress(CorpusError):
        pretranslate_file(data, name, translate_in_parentheses)
    assert time.process_time() - start < 5
