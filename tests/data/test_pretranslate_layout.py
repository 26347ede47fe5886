"""Markdown and plain text: the text is translated and the layout stays."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from markdown_it import MarkdownIt

from tests.data import fuzz
from tests.data.pretranslate_cases import GENERATORS, fail_if_called, get_error, pretranslate, translate_in_parentheses

PAGE = """---
title: not touched
---
# Heading with `code` #

A paragraph with a [link](https://a.example/b "title"), an ![image](c.png),
a [reference][r], <b>a tag</b>, *stress*, __more__ and a hard\x20\x20
break, then a [label].

Setext
------

- item one
  goes on
- [ ] task

      code in the item

  a second paragraph
1. first

    still the item

> quoted
> text
>> deeper

| a head | b |
|:-------|--:|
| `x|y` z | d \\| e |

<details>
<summary>More of it</summary>
</details>

```python
print("code")
```

    indented code

<!-- a comment
of two lines -->
<pre>
raw
</pre>

[r]: https://a.example/c
[label]:
  https://a.example/d
[^1]: A note.

* * *
The end[^1] costs $x + y$ or 5 %.
"""


def list_structure(text: str, markup: MarkdownIt) -> list[tuple[str, ...]]:
    """Return the parsed structure of a Markdown document, without its text."""
    body = text.split("---\n", 2)[2]
    structure = []
    for token in markup.parse(body):
        if token.type == "inline":
            children = [child for child in token.children or [] if child.type not in ("text", "softbreak")]
            structure += [
                (child.type, child.content if "code" in child.type else "", str(child.attrGet("href")))
                for child in children
            ]
        elif token.type != "html_block":
            structure.append((token.type, token.tag, token.content, str(token.level)))
    return structure


def test_markdown_structure_is_kept() -> None:
    markup = MarkdownIt("commonmark").enable("table")
    result = pretranslate(PAGE, "a.md")
    after = result.content.decode()
    assert result.skipped == ()
    assert list_structure(after, markup) == list_structure(PAGE, markup)
    for unchanged in (
        "title: not touched",
        'print("code")',
        "    indented code",
        "of two lines -->",
        "\nraw\n",
        "* * *",
    ):
        assert unchanged in after
    for translated in (
        "# (Heading with `code`) #",
        "- [ ] (task)",
        "| (a head) | (b) |",
        "<summary>(More of it)</summary>",
    ):
        assert translated in after
    assert "[^1]: (A note.)" in after
    assert "\n    (still the item)\n" in after
    assert "\n  (a second paragraph)\n" in after
    assert "| (`x|y` z) | (d \\| e) |" in after


def test_identity_translation_gives_the_same_document() -> None:
    markup = MarkdownIt("commonmark").enable("table")
    after = pretranslate(PAGE, "a.md", lambda texts: list(texts)).content.decode()
    assert " ".join(markup.render(after).split()) == " ".join(markup.render(PAGE).split())


def test_model_sees_sentences() -> None:
    requested: list[str] = []

    def translate(texts: Sequence[str]) -> list[str]:
        requested.extend(texts)
        return list(texts)

    pretranslate(PAGE, "a.md", translate)
    assert requested[1].startswith(
        "A paragraph with a <x1> link </x1>, an <x2> image </x2>, a <x3> reference </x3>, <b>a tag</b>, *stress*"
    )
    assert {"break, then a [label].", "Setext", "item one goes on", "quoted text", "deeper"} <= set(requested)
    assert not any("code(" in text or "raw" in text or "comment" in text for text in requested)


@pytest.mark.parametrize(
    ("start", "end"), [("```", "```"), ("~~~ sh", "~~~~"), ("````", "````"), ("$$", "$$"), ("<!--", "-->")]
)
def test_blocks_of_code_and_formulas_stay_until_they_end(start: str, end: str) -> None:
    block = f"{start}\nfirst words\n\n``\nmore words ``` here\n{end}\n"
    after = pretranslate(f"Before it.\n\n{block}\nAfter it.\n", "a.md").content.decode()
    assert after == f"(Before it.)\n\n{block}\n(After it.)\n"


def test_a_formula_in_a_list_stays() -> None:
    formula = "$$\n  x = a\n  $$\n"
    assert pretranslate(f"- {formula}\nAfter it.\n", "a.md").content.decode() == f"- {formula}\n(After it.)\n"


@pytest.mark.parametrize(("before", "after"), [("a [b](c) d\n", "x [y](c) z\n"), ("a **b** d\n", "a **b** d\n")])
def test_paragraph_with_lost_markup_is_skipped(before: str, after: str) -> None:
    result = pretranslate(before, "a.md", lambda texts: ["x <x1>y</x1> z"])
    assert result.content.decode() == after
    assert [unit.reason for unit in result.skipped] == ([] if before != after else ["its translation lost **"])


def test_wrapped_lines_do_not_begin_with_markup() -> None:
    text = "one - two 3. four # five > six + seven | eight = nine ``` ten eleven [x]: twelve"
    result = pretranslate("first line\nsecond\n", "a.md", lambda texts: [text]).content.decode()
    markup = MarkdownIt("commonmark").enable("table")
    assert [token.type for token in markup.parse(result)] == ["paragraph_open", "inline", "paragraph_close"]
    assert result.count("\n") > 3


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", ""),
        ("\n \n", "\n \n"),
        ("a\n", "(a)\n"),
        ("  a b\t c  \r\n\r\n10\r\nd", "  (a b)\t (c)  \r\n\r\n10\r\n(d)"),
        ("a\rb\r", "(a)\r(b)\r"),
        ("\ufeffa", "\ufeff(a)"),
    ],
)
def test_plain_text_keeps_lines_and_spaces(before: str, after: str) -> None:
    assert pretranslate(before, "a.txt").content.decode() == after


def test_utf_16_stays_utf_16() -> None:
    assert pretranslate("a ü\n".encode("utf-16"), "a.txt").content == "(a ü)\n".encode("utf-16")


def test_invalid_utf_8_line_is_unchanged() -> None:
    result = pretranslate(b"a \xff\nb\n", "a.txt")
    assert result.content == b"a \xff\n(b)\n"
    assert [(unit.line, unit.reason) for unit in result.skipped] == [(1, "it is not in the file's encoding")]


# Broken files of every kind.

WORDS = [
    *(b"<target/>", b"<x id='1'/>", b"</g>", b"<seg/>", b"<mrk>", b"<!--", b"<![CDATA[", b"%s"),
    *(b'msgid "a"\n', b'msgstr ""\n', b"#~ ", b"```\n", b"> ", b"- ", b"**", b"[x](y)"),
]


@pytest.mark.parametrize("name", [*GENERATORS, "a.md", "a.txt"])
def test_broken_file_is_refused_or_filled_completely(name: str) -> None:
    rng = random.Random(name)
    outcomes = {"refused": 0, "filled": 0}
    for _ in range(300):
        content = GENERATORS[name](rng)[0] if name in GENERATORS else PAGE.encode()
        for _ in range(rng.choice((1, 1, 2))):
            content = fuzz.mutate(content, [*WORDS, *fuzz.NASTY_TOKENS], rng)
        message = get_error(content, name)
        if message:
            assert ": " in message
            assert "\n" not in message
            outcomes["refused"] += 1
            continue
        result = pretranslate(content, name)
        outcomes["filled"] += result.filled_count
        if name in GENERATORS:
            assert (
                pretranslate(
                    result.content, name, fail_if_called if not result.skipped else translate_in_parentheses
                ).content
                == result.content
            )
    assert all(outcomes.values()), outcomes


def test_code_at_the_end_of_a_sentence_is_part_of_it() -> None:
    assert pretranslate("Run `make`\n", "a.md").content == b"(Run `make`)\n"
    lossy = pretranslate(
        "Run `make` now\n\nThen `stop`.\n", "a.md", lambda texts: [text.replace("`", "") for text in texts]
    )
    assert lossy.content == b"Run `make` now\n\nThen `stop`.\n"
    assert [unit.line for unit in lossy.skipped] == [1, 3]


def test_link_label_is_not_translated() -> None:
    page = "See [the label] or [brackets].\n\n[The Label]: https://a.example\n"
    assert pretranslate(page, "a.md", lambda texts: ["[the label] [KLAMMERN]"]).content.startswith(
        b"[the label] [KLAMMERN]\n"
    )
    assert (
        pretranslate(page, "a.md", lambda texts: ["[Name] [Klammern]"]).skipped[0].reason
        == "its translation lost [the label]"
    )
