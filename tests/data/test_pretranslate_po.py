"""PO catalogs: filled and skipped entries, checked with gettext's tools."""

from __future__ import annotations

import random
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from attent.data.pairs import CorpusError
from tests.data.pretranslate_cases import fail_if_called, pretranslate

HEADER = (
    'msgid ""\nmsgstr ""\n"Language: de\\n"\n"Content-Type: text/plain; charset=UTF-8\\n"\n'
    '"Plural-Forms: nplurals=2; plural=(n != 1);\\n"\n'
)
needs_gettext = pytest.mark.skipif(shutil.which("msgfmt") is None, reason="gettext's tools are not installed")


def pretranslate_entry(entry: str, header: str = HEADER) -> str:
    """Return the pre-translated entry; the header must not change."""
    result = pretranslate(f"{header}\n{entry}", "a.po").content.decode()
    assert result.startswith(f"{header}\n")
    return result[len(header) + 1 :]


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ('msgid "a"\nmsgstr ""', '#, fuzzy\nmsgid "a"\nmsgstr "(a)"'),
        ('msgid "a"\nmsgstr ""   \n', '#, fuzzy\nmsgid "a"\nmsgstr "(a)"   \n'),
        ('#, c-format\nmsgid "a %s"\nmsgstr ""\n', '#, fuzzy, c-format\nmsgid "a %s"\nmsgstr "(a %s)"\n'),
        ('#,\nmsgid "a"\nmsgstr ""\n', '#, fuzzy\nmsgid "a"\nmsgstr "(a)"\n'),
        ('#, fuzzy\n#| msgid "b"\nmsgid "a"\nmsgstr ""\n', '#, fuzzy\n#| msgid "b"\nmsgid "a"\nmsgstr "(a)"\n'),
        ('#: x\n#| msgid "b"\nmsgid "a"\nmsgstr ""\n', '#: x\n#, fuzzy\n#| msgid "b"\nmsgid "a"\nmsgstr "(a)"\n'),
        ('msgid "a\\n"\nmsgstr ""\n', '#, fuzzy\nmsgid "a\\n"\nmsgstr "(a)\\n"\n'),
        ('msgid "a\\n\\tb"\nmsgstr ""\n', '#, fuzzy\nmsgid "a\\n\\tb"\nmsgstr ""\n"(a)\\n"\n"\\t(b)"\n'),
        ('msgid " say \\"\\\\\\" "\nmsgstr ""\n', '#, fuzzy\nmsgid " say \\"\\\\\\" "\nmsgstr " (say \\"\\\\\\") "\n'),
        ('msgid "\\303\\274 x"\nmsgstr ""\n', '#, fuzzy\nmsgid "\\303\\274 x"\nmsgstr "(ü x)"\n'),
        ('msgid "%d%%"\nmsgstr ""\n', '#, fuzzy\nmsgid "%d%%"\nmsgstr "%d%%"\n'),
    ],
)
def test_entry_is_filled_and_flagged(before: str, expected: str) -> None:
    assert pretranslate_entry(before) == expected


@pytest.mark.parametrize(
    "entry",
    [
        'msgid "a"\nmsgstr "b"\n',
        'msgid "a"\nmsgstr " "\n',
        '#, fuzzy\nmsgid "a"\nmsgstr "b"\n',
        '#~ msgid "a"\n#~ msgstr ""\n',
        '# c\n#~ msgctxt "x"\n#~ msgid ""\n#~ "a"\n#~ msgid_plural "b"\n#~ msgstr[0] ""\n',
        '#~| msgid "old"\n#~ msgid "a"\n#~ msgstr ""\n\n# at the end, \xe9',
        'msgctxt "x"\nmsgid ""\nmsgstr ""\n',
        'domain "x"\n\nmsgid "a"\nmsgstr "b"',
    ],
)
def test_other_entries_are_unchanged(entry: str) -> None:
    assert pretranslate(f"{HEADER}\n{entry}", "a.po", fail_if_called).content.decode() == f"{HEADER}\n{entry}"


PLURAL = 'msgid "one file"\nmsgid_plural "%d files"\n'


SHOWN = 'msgid "%d file"\nmsgid_plural "%d files"\n'
RUSSIAN = "nplurals=3; plural=(n%10==1 && n%100!=11 ? 0 : n%10>=2 && n%10<=4 && (n%100<10 || n%100>=20) ? 1 : 2);"
SLOVENIAN = "nplurals=4; plural=(n%100==1 ? 0 : n%100==2 ? 1 : n%100==3 || n%100==4 ? 2 : 3);"


@pytest.mark.parametrize(
    ("rule", "ids", "singular_forms"),
    [
        ("nplurals=1; plural=0;", PLURAL, []),
        ("nplurals=2; plural=(n != 1);", PLURAL, [0]),
        ("nplurals=2; plural=(n > 1);", PLURAL, []),  # form 0 is for 0 and 1
        ("nplurals=2; plural=(n > 1);", SHOWN, [0]),
        (RUSSIAN, PLURAL, []),  # form 0 is for 1, 21, 31, ...
        (RUSSIAN, SHOWN, [0]),
        (SLOVENIAN, PLURAL, []),
        ("nplurals=3; plural=(n%10==0 ? 0 : n==1 ? 1 : 2);", PLURAL, [1]),
        ("nplurals=3; plural=n == 1 ? 0 : n != 0 && n % 1000000 == 0 ? 1 : 2;", PLURAL, [0]),
        ("nplurals=2; plural=(n != 1);", '#, c-format\nmsgid "a %s"\nmsgid_plural "%d of %s"\n', []),
        ("nplurals=2; plural=(n != 1);", '#, c-format\nmsgid "a %s"\nmsgid_plural "%s has %d"\n', [0]),
    ],
)
def test_each_plural_form_has_the_source_that_its_numbers_need(rule: str, ids: str, singular_forms: list[int]) -> None:
    header = HEADER.replace("nplurals=2; plural=(n != 1);", rule)
    result = pretranslate_entry(f'{ids}msgstr[0] ""\n', header)
    singular, plural = re.findall(r'msgid.* "(.*)"', ids)
    count = int(rule[9])
    expected = [f"({singular if form in singular_forms else plural})" for form in range(count)]
    assert re.findall(r'msgstr.*"(.*)"', result) == expected


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        ("", "the header has no Plural-Forms"),
        ("Plural-Forms: nplurals=INTEGER; plural=EXPRESSION;", "the header has no Plural-Forms"),
        ("Plural-Forms: nplurals=2; plural=n/0;", "the rule of the header's Plural-Forms is not valid"),
        ("Plural-Forms: nplurals=2; plural=__import__;", "the rule of the header's Plural-Forms is not valid"),
        ("Plural-Forms: nplurals=1; plural=(n != 1);", "the rule of the header's Plural-Forms is not valid"),
    ],
)
def test_plurals_without_a_rule_are_not_filled(rule: str, reason: str) -> None:
    header = HEADER.replace("Plural-Forms: nplurals=2; plural=(n != 1);", rule)
    content = f'{header}\n{PLURAL}msgstr[0] ""\nmsgstr[1] ""\n'
    result = pretranslate(content, "a.po", fail_if_called)
    assert (result.content.decode(), [unit.reason for unit in result.skipped]) == (content, [reason])


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (f'{PLURAL}msgstr[0] "eine"\nmsgstr[1] ""\n', "some of its plural forms are translated"),
        (f'{PLURAL}msgstr[0] ""\nmsgstr[1] ""\nmsgstr[2] ""\n', "it has 3 plural forms, but the header says 2"),
        (f'{PLURAL}msgstr[1] ""\n', "its plural forms are not numbered from 0"),
        (
            'msgid "\\n%d file"\nmsgid_plural "%d files"\nmsgstr[0] ""\n',
            "only one of its singular and plural has a line break at an end",
        ),
        ('msgid "a\\0b"\nmsgstr ""\n', "it has a NUL character"),
        ('msgid "\\x00"\nmsgstr ""\n', "it has a NUL character"),
        ('msgid "{n, plural, one {a} other {b}}"\nmsgstr ""\n', "it has forms of its own (plural, select)"),
    ],
)
def test_unfillable_entries_are_skipped_with_a_reason(entry: str, reason: str) -> None:
    content = f"{HEADER}\n{entry}"
    result = pretranslate(content, "a.po", fail_if_called)
    assert result.content.decode() == content
    assert [(unit.line, unit.reason) for unit in result.skipped] == [(7, reason)]


def test_lost_placeholder_in_one_form_skips_the_entry() -> None:
    content = f'{HEADER}\n{PLURAL}msgstr[0] ""\nmsgstr[1] ""\n'
    result = pretranslate(content, "a.po", lambda texts: [text.replace("%d", "") for text in texts if text])
    assert result.content.decode().endswith('msgstr[0] "one file"\nmsgstr[1] "%d files"\n')  # restored on the retry
    lossy = pretranslate(content, "a.po", lambda texts: [text.replace("%d", "") or "x" for text in texts], tgt="de")
    assert lossy.filled_count == 1


def test_invalid_bytes_skip_only_their_entry() -> None:
    content = HEADER.encode() + b'\n# \xff\nmsgid "a"\nmsgstr ""\n\nmsgid "b \xff"\nmsgstr ""\n'
    result = pretranslate(content, "a.po")
    expected = content.replace(b'msgid "a"\nmsgstr ""', b'#, fuzzy\nmsgid "a"\nmsgstr "(a)"')
    assert result.content == expected
    assert [(unit.line, unit.reason) for unit in result.skipped] == [(11, "it is not in the file's encoding")]


def test_translation_outside_the_charset_is_skipped() -> None:
    content = f'{HEADER}\nmsgid "a"\nmsgstr ""\n'.replace("UTF-8", "ISO-8859-2").encode("iso8859-2")
    result = pretranslate(content, "a.po", lambda texts: ["ő"])
    assert result.content.decode("iso8859-2").endswith('msgstr "ő"\n')
    result = pretranslate(content, "a.po", lambda texts: ["日"])
    assert result.content == content
    assert "iso8859-2, which has no '日'" in result.skipped[0].reason


def test_lone_percent_sign_is_refused_in_format_strings() -> None:
    entry = 'msgid "%d percent of it"\nmsgstr ""\n'
    plain, strict = (f"{HEADER}\n{flags}{entry}" for flags in ("", "#, c-format\n"))
    assert pretranslate(plain, "a.po", lambda texts: ["%d % davon"]).filled_count == 1
    assert (
        pretranslate(strict, "a.po", lambda texts: ["%d % davon"])
        .skipped[0]
        .reason.startswith("its translation gained % d")
    )
    assert pretranslate(strict, "a.po", lambda texts: ["%d Prozent davon"]).filled_count == 1


def test_carriage_returns_alone_end_lines() -> None:
    result = pretranslate('msgid "a"\rmsgstr ""\r', "a.po")
    assert result.content == b'#, fuzzy\rmsgid "a"\rmsgstr "(a)"\r'


@pytest.mark.parametrize(
    ("src", "tgt", "message"),
    [("en", "fr", "a.po does not contain en and fr: it has de"), ("de", "en", "catalog for de, but en is requested")],
)
def test_other_languages_are_refused(src: str, tgt: str, message: str) -> None:
    with pytest.raises(CorpusError, match=message):
        pretranslate(f'{HEADER}\nmsgid "a"\nmsgstr ""\n', "a.po", fail_if_called, src=src, tgt=tgt)


@needs_gettext
def test_msgfmt_accepts_every_filled_format_string(tmp_path: Path) -> None:
    rng = random.Random(3)
    formats = ["%s", "%d", "%5.2f", "%lu", "%%", "%-3s", "%c"]
    sources = [" and ".join(rng.choices(formats, k=rng.randint(1, 3))) for _ in range(300)]
    entries = [f'#, c-format\nmsgid "{n} word {source} end"\nmsgstr ""\n' for n, source in enumerate(sources)]

    def translate(texts: Sequence[str]) -> list[str]:
        return [_damage_placeholders(text, rng) for text in texts]

    result = pretranslate("\n".join([HEADER, *entries]), "a.po", translate)
    assert result.filled_count > 50
    assert len(result.skipped) > 50
    path = tmp_path / "a.po"
    path.write_bytes(result.content.replace(b"#, fuzzy, c-format", b"#, c-format"))
    done = subprocess.run(["msgfmt", "-c", "-o", "/dev/null", path], capture_output=True, text=True, check=False)
    assert not re.findall(r".*(?:msgstr|format).*", done.stderr), done.stderr


def _damage_placeholders(text: str, rng: random.Random) -> str:
    """Imitate errors of models: drop, repeat or swap words, split a placeholder, add a lone `%`, or none."""
    words = text.split(" ")
    first, second = rng.randrange(len(words)), rng.randrange(len(words))
    match rng.randrange(6):
        case 0:
            del words[first]
        case 1:
            words.insert(first, words[second])
        case 2:
            words[first], words[second] = words[second], words[first]
        case 3:
            words[first] = words[first].replace("%", "% ")
        case 4:
            words.insert(first, rng.choice(["%", "100%", "50% of", "5 %."]))
    return " ".join(words) or "x"
