"""Reports of pre-translated files: JSON, TSV and XLIFF with the codes of source and target."""

from __future__ import annotations

import json

from lxml import etree

from attent.data.formats import xliff
from attent.data.pairs import LanguagePair, Pair, ReadOptions
from attent.data.pretranslate import PretranslateResult, format_bilingual, format_report, pretranslate_file
from tests.data.pretranslate_cases import project_reversed, reverse_words

PAGE = "<p>one <b>two</b> <img> three &amp; four\n<p>five\x01 <i>six</i>\n<p>seven <b>eight</b> <i>nine</i>"
LANGUAGES = LanguagePair("en", "de")


def make_result() -> PretranslateResult:
    """Return a page with a unit that is certain, one that is skipped, and one to review."""
    return pretranslate_file(
        PAGE.encode(),
        "a.html",
        lambda texts: [text.upper() for text in texts],
        transfer=lambda contents: [
            project_reversed(
                content, lambda text: "" if "five" in text else reverse_words(text).upper(), () if index > 1 else None
            )
            for index, content in enumerate(contents)
        ],
        src="en",
        tgt="de",
    )


def test_report_has_every_unit_with_its_state() -> None:
    result = make_result()
    report = json.loads(format_report(result, "a.html", is_tsv=False))
    assert (report["filled"], report["kept"], report["skipped"], report["to_review"]) == (2, 0, 1, 1)
    assert [(unit["state"], unit["reason"]) for unit in report["units"]] == [
        ("translated", ""),
        ("skipped", "its translation is empty"),
        ("needs-review", "the place of its markup is a guess"),
    ]
    assert report["units"][0]["source"] == "one <b>two</b> <img> three & four"
    rows = [line.split("\t") for line in format_report(result, "a.html", is_tsv=True).decode().splitlines()]
    assert [row[1] for row in rows] == ["state", "translated", "skipped", "needs-review"]
    assert {len(row) for row in rows} == {5}


def list_codes(side: etree._Element) -> list[tuple[object, ...]]:
    return sorted((code.tag, *code.items(), code.text) for code in side.iter("{*}bpt", "{*}ept", "{*}ph"))


def test_bilingual_file_has_the_codes_of_the_source_in_its_targets() -> None:
    content = format_bilingual(make_result(), 'a "page" \x02.html', LANGUAGES)
    units = etree.fromstring(content).findall(".//{*}trans-unit")
    codes = [[list_codes(side) for side in unit[:2]] for unit in (units[0], units[2])]
    assert [len(source) for source, _ in codes] == [3, 4]
    assert all(source == target for source, target in codes)
    notes = [None, "its translation is empty", "the place of its markup is a guess"]
    assert [unit.findtext("{*}note") for unit in units] == notes
    states = [unit.find("{*}target").get("state") for unit in (units[0], units[2])]
    assert states == ["translated", "needs-review-translation"]
    pairs = xliff.read_pairs([content], "a.xlf", LANGUAGES, ReadOptions(fuzzy=True))
    assert [(pair.source.strip(), pair.target.split()) for pair in pairs if isinstance(pair, Pair)] == [
        ("one two  three & four", ["FOUR", "&", "THREE", "TWO", "ONE"]),
        ("seven eight nine", ["NINE", "EIGHT", "SEVEN"]),
    ]


def test_only_the_text_with_unsure_markup_is_to_review() -> None:
    page = b"<p>one <b>two</b> <img alt='three four'></p>"
    result = pretranslate_file(page, "a.html", list, transfer=lambda cs: [project_reversed(c, links=()) for c in cs])
    assert [bool(content.reason) for content in result.filled] == [True, False]
