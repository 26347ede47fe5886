"""PO catalogs: filled and skipped entries, checked with gettext's tools."""

from __future__ import annotations

import importlib.util
import os
import random
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from attent.data.pairs import CorpusError
from tests.data.pretranslate_cases import fail_if_called, pretranslate
from tests.data.test_directives import NEVER_OPTIONAL

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
        'msgid " \\n"\nmsgstr ""\n',
        'msgid " "\nmsgid_plural "a"\nmsgstr[0] ""\n',
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
        ("Plural-Forms: nplurals = 2 ; plural = n != 1 ;", "the header has no Plural-Forms"),
        ("Plural-Forms: nplurals=2; plural =n != 1;", "the header has no Plural-Forms"),
        ("Plural-Forms: nplurals=2; plural=n/0;", "the rule of the header's Plural-Forms is not valid"),
        ("Plural-Forms: nplurals=2; plural=__import__;", "the rule of the header's Plural-Forms is not valid"),
        ("Plural-Forms: nplurals=2; plural=n != !1;", "the rule of the header's Plural-Forms is not valid"),
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
        ('msgid "a"\nmsgid_plural ""\nmsgstr[0] ""\nmsgstr[1] ""\n', "its msgid_plural is empty"),
        ('msgid "a"\nmsgid_plural " "\nmsgstr[0] ""\n', "its msgid_plural is empty"),
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
    result = pretranslate(content, "a.po", lambda texts: [text.replace("%d", "") for text in texts])
    assert (result.content.decode(), result.filled_count) == (content, 0)


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


@pytest.mark.parametrize(
    ("src", "tgt", "message"),
    [("en", "fr", "a.po does not contain en and fr: it has de"), ("de", "en", "catalog for de, but en is requested")],
)
def test_other_languages_are_refused(src: str, tgt: str, message: str) -> None:
    with pytest.raises(CorpusError, match=message):
        pretranslate(f'{HEADER}\nmsgid "a"\nmsgstr ""\n', "a.po", fail_if_called, src=src, tgt=tgt)


FORMAT_IDS = [  # flag, singular, plural
    ("c-format", "one word", "%d words"),
    ("c-format", "%d word of %s", "%d words of %s"),
    ("c-format", "one word of %s", "%d words of %s"),
    ("c-format", "%1$s has one word", "%1$s has %2$d words"),
    ("python-format", "%(n)d word", "%(n)d words"),
    ("python-format", "one word by %(x)r", "%(n)d words by %(x)r"),
    ("python-brace-format", "{} word", "{} words"),
    ("php-format", "%' 5d word", "%' 5d words"),
    ("ruby-format", "%<n>d word", "%<n>d words"),
    ("boost-format", "%1% word", "%1% words"),
    ("sh-format", "one word", "$n words"),
    ("javascript-format", "%j word", "%j words"),
    ("qt-plural-format", "%n word", "%n words"),
    ("scheme-format", "~a word", "~a words"),
    ("kde-format", "_one &word", "%1 _words"),
    *((f"{name}-format", "one word", f"{directive} words") for name, directive in NEVER_OPTIONAL.items()),
    ("python-format", "one word", "%d words"),
]
RULES = ["nplurals=1; plural=0;", "nplurals=2; plural=(n != 1);", "nplurals=2; plural=(n > 1);", RUSSIAN, SLOVENIAN, ""]


def check_by_msgfmt(content: bytes, path: Path) -> Counter[str]:
    """Return the errors of a catalog, fuzzy entries included, without their lines."""
    path.write_bytes(content)
    command = ["msgfmt", "--check", "--use-fuzzy", "-o", "/dev/null", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={"LC_ALL": "C"})
    messages = Counter(re.sub(r"^\S+:\d+: ", "", line) for line in done.stderr.splitlines())
    return messages if done.returncode else Counter()


@needs_gettext
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("damages", [False, True])
def test_msgfmt_accepts_every_filled_entry(rule: str, damages: bool, tmp_path: Path) -> None:
    rng = random.Random(3)
    header = HEADER.replace("Plural-Forms: nplurals=2; plural=(n != 1);", rule and f"Plural-Forms: {rule}")
    entries = [
        f'#, {flag}\nmsgctxt "{number}"\nmsgid "{first}"\nmsgid_plural "{second}"\nmsgstr[0] ""\n\n'
        f'#, {flag}\nmsgctxt "{number}"\nmsgid "{second} {number}"\nmsgstr ""\n'
        for number, (flag, first, second) in enumerate(FORMAT_IDS * 10)
    ]

    def translate(texts: Sequence[str]) -> list[str]:
        return [_damage_placeholders(text, rng) for text in texts] if damages else list(texts)

    result = pretranslate("\n".join([header, *entries]), "a.po", translate)
    assert result.filled_count > 70
    assert bool(result.skipped) == (damages or not rule)
    assert check_by_msgfmt(result.content, tmp_path / "a.po") == Counter()


def find_django() -> Path | None:
    """Return the folder of an unpacked Django, given by DJANGO_FOLDER or installed."""
    spec = importlib.util.find_spec("django")
    folder = os.environ.get("DJANGO_FOLDER") or (spec and spec.origin and Path(spec.origin).parent)
    return Path(folder) if folder else None


@pytest.mark.slow
@needs_gettext
@pytest.mark.parametrize("is_emptied", [False, True])
def test_echoed_catalogs_of_django_have_no_new_errors(is_emptied: bool, tmp_path: Path) -> None:
    folder = find_django()
    if folder is None:
        pytest.skip("needs Django's catalogs: install django, or set DJANGO_FOLDER to an unpacked wheel")
    catalogs = sorted(folder.rglob("*.po"))
    assert len(catalogs) > 1000
    for catalog in catalogs:
        content = catalog.read_bytes()
        if is_emptied:
            head, blank, rest = content.decode().partition("\n\n")
            text = r'(msgstr(?:\[\d\])?) "(?:[^"\\]|\\.)*"(?:\n"(?:[^"\\]|\\.)*")*'
            content = f"{head}{blank}{re.sub(text, chr(92) + '1 ' + chr(34) * 2, rest)}".encode()
        result = pretranslate(content, catalog.name, list)
        errors = check_by_msgfmt(result.content, tmp_path / "a.po")
        assert not errors or not errors - check_by_msgfmt(content, tmp_path / "a.po"), f"{catalog}: {errors}"


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
