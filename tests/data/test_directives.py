"""Directives of format strings: no translation is accepted that gettext's `msgfmt --check-format` refuses."""

from __future__ import annotations

import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from attent.data.formats.placeholders import can_lack_count, find_directive_problem, get_directive_pattern
from tests.data import fuzz

needs_gettext = pytest.mark.skipif(shutil.which("msgfmt") is None, reason="gettext's tools are not installed")
PAIR_COUNT = fuzz.INPUT_COUNT // 25
HEADER = 'msgid ""\nmsgstr "Content-Type: text/plain; charset=UTF-8\\nPlural-Forms: nplurals=2; plural=n != 1;\\n"\n\n'
PRINTF = "%s %d %% %5d %-3s %.2f %x %c %1$s %2$d % d %ld %*d"
SAMPLES = {  # valid directives, and some that are not
    "awk": PRINTF,
    "boost": f"{PRINTF} %1% %2% %|1$s| %|s| %|5t| %Tx",
    "c": f"{PRINTF} %m %lld %hhu %zu %'d %I64d %<PRId64> %2$*1$d",
    "csharp": "{0} {1} {0:x} {1,-5} {{ }} { }",
    "elisp": PRINTF,
    "gcc-internal": "%s %d %qs %<a%> %qD %E %1$s %2$d %m %% %' %r %R %.*s %+D",
    "gfc-internal": "%s %d %C %L %li %lu %% %1$s %2$d",
    "java": "{0} {1} {0,number} {1,date,short} '{' '' ' } {0,choice,0#a|1#b{1}}",
    "java-printf": f"{PRINTF} %n %tY %<tm %,d",
    "javascript": f"{PRINTF} %j %b %Id",
    "kde": "%1 %2 %10 % %n %%",
    "kde-kuit": "%1 %2 <b>a</b> <i/> &amp; & < &x; ]]>",
    "librep": f"{PRINTF} %S %^s",
    "lisp": "~a ~s ~d ~5d ~% ~~ ~{~a~} ~[x~;y~] ~:@r ~* ~{~} ~",
    "lua": "%s %d %% %5.2f %q %x %1$s",
    "objc": f"{PRINTF} %@ %m",
    "object-pascal": "%s %d %0:s %1:d %% %-5d %*d %.2f %:s",
    "perl": f"{PRINTF} %vd %_ %b %lli",
    "perl-brace": "{a} {b} {a1} { } {1}",
    "php": "%s %d %b %' 5d %'x10s %% %1$s %2$d %e % d",
    "python": "%s %d %r %% %(a)s %(b)d %(a)r % d %*d %.2f %a",
    "python-brace": "{} {0} {1} {a} {a.b} {a[0]} {0:d} {a:>{w}} {{ }} { }",
    "qt": "%1 %2 %L1 %10 %n %% %",
    "qt-plural": "%n %Ln %1 %",
    "ruby": "%s %d %<a>s %<b>d %{a} %{b} %1$s %2$d %% %-5s %x %*d",
    "scheme": "~a ~s ~d ~5d ~% ~~ ~{~a~} ~[x~;y~] ~* ~@{~} ~",
    "sh": "$a $b ${a} ${b} $ $1 ${a:-x}",
    "smalltalk": "%1 %2 %% %<a|b>1 %",
    "tcl": "%s %d %% %5d %1$s %2$d %x %ld % d",
    "ycp": "%1 %2 %% %9 %",
}

NEVER_OPTIONAL = {  # directives that msgfmt wants in the form for 1 too
    "ruby": "%d",
    "lua": "%d",
    "qt": "%1",
    "scheme": "~d",
    "lisp": "~d",
    "gcc-internal": "%d %m",
    "gfc-internal": "%C",
    "object-pascal": "%d",
}


def make_text(rng: random.Random, format_name: str) -> str:
    directives = rng.choices(SAMPLES[format_name].split(" "), k=rng.randint(1, 3))
    return " ".join(["Some", *(part for directive in directives for part in (directive, "words"))])


def damage_text(text: str, rng: random.Random, format_name: str) -> str:
    """Drop, swap, repeat, number or alter directives, as a bad translation might; also leave them alone."""
    words = text.split(" ")
    first, second = rng.randrange(len(words)), rng.randrange(len(words))
    match rng.randrange(7):
        case 0:
            del words[first]
        case 1:
            words[first], words[second] = words[second], words[first]
        case 2:
            words.insert(first, words[second])
        case 3:
            rng.shuffle(words)
            words = [word.replace("%", f"%{rng.randint(1, 3)}$", 1) for word in words]
        case 4:
            position = rng.randint(0, len(words[first]))
            char = rng.choice(SAMPLES[format_name])
            words[first] = words[first][:position] + char + words[first][position + rng.randint(0, 1) :]
        case 5:
            words = ["Wort" if word == "words" else word for word in words]
    return " ".join(words) or "x"


def drop_words(text: str, rng: random.Random) -> str:
    """Leave out one to three words, as the singular of a plural does."""
    words = text.split(" ")
    for _ in range(rng.randint(1, 3)):
        del words[rng.randrange(len(words))]
    return " ".join(words) or "x"


def check_by_msgfmt(
    pairs: list[tuple[str, str]], format_name: str, folder: Path, *, plural: bool = False
) -> list[bool]:
    """Return whether `msgfmt` accepts each pair of source and translation, or of the form for 1 and the plural."""
    entries = [
        f"#, {format_name}-format\nmsgctxt {_quote(str(number))}\n"
        + (
            f"msgid {_quote(first)}\nmsgid_plural {_quote(second)}\n"
            f"msgstr[0] {_quote(first)}\nmsgstr[1] {_quote(second)}\n\n"
            if plural
            else f"msgid {_quote(first)}\nmsgstr {_quote(second)}\n\n"
        )
        for number, (first, second) in enumerate(pairs)
    ]
    path = folder / "a.po"
    path.write_text(HEADER + "".join(entries), encoding="utf-8")
    command = ["msgfmt", "--check-format", "--check-header", "-o", "/dev/null", str(path)]
    report = subprocess.run(command, capture_output=True, text=True, check=False, env={"LC_ALL": "C"}).stderr
    lines = [int(line.split(":")[1]) for line in report.splitlines() if re.match(rf"{re.escape(str(path))}:\d", line)]
    refused = {(line - HEADER.count("\n") - 1) // entries[0].count("\n") for line in lines}
    return [number not in refused for number in range(len(pairs))]


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


@needs_gettext
@pytest.mark.parametrize("format_name", SAMPLES)
def test_no_translation_is_accepted_that_msgfmt_refuses(format_name: str, tmp_path: Path) -> None:
    rng = random.Random(f"{format_name} {fuzz.SEED}")
    sources = [make_text(rng, format_name) for _ in range(PAIR_COUNT)]
    pairs = [(source, damage_text(source, rng, format_name)) for source in sources]
    pattern = get_directive_pattern(format_name)
    assert pattern is not None
    accepted = [not find_directive_problem(source, target, pattern) for source, target in pairs]
    expected = check_by_msgfmt(pairs, format_name, tmp_path)
    assert [pair for pair, ours, theirs in zip(pairs, accepted, expected, strict=True) if ours and not theirs] == []
    assert not all(expected)
    assert sum(ours and theirs for ours, theirs in zip(accepted, expected, strict=True)) > PAIR_COUNT / 4


@pytest.mark.parametrize(
    ("format_name", "source", "target", "problem"),
    [
        ("c", "a %s %d", "b %s %d", ""),
        ("c", "a %s %d", "b %2$d %1$s", ""),
        ("c", "a %s %d", "b %d %s", "in another order"),
        ("c", "a %s %s", "b %2$s %s", "lost %s"),
        ("c", "a %1$s %2$s", "b %2$s %1$s", ""),
        ("c", "a % d", "b %d", "lost % d"),
        ("c", "a", "100% sicher", "gained % s"),
        ("c", "a %d%%", "b %d%", "lost %%"),
        ("python", "a %r", "b", "lost %r"),
        ("python", "a %(x)r %(y)s", "b %(y)s %(x)r", ""),
        ("python", "a %(x)r", "b %(x)s", "lost %(x)r"),
        ("python", "a %s", "b %1$s", "lost %s"),
        ("php", "a %b", "b", "lost %b"),
        ("php", "a %' 5d", "b %5d", "lost %' 5d"),
        ("sh", "a $x ${y}", "${y} b $x", ""),
        ("sh", "a $x", "b x", "lost $x"),
        ("boost", "a %1% %2%", "%2% b %1%", ""),
        ("boost", "a %1%", "b", "lost %1%"),
        ("ruby", "a %<x>s %{y}", "%{y} b %<x>s", ""),
        ("ruby", "a %<x>s", "b %<y>s", "lost %<x>s"),
        ("javascript", "a %s %j", "b %j %s", "in another order"),
        ("java", "a {0}", "l'image {0}", "lost {0}"),
        ("java", "a {0}", "l''image {0}", ""),
        ("qt", "a %1", "b %10", "lost %1"),
        ("lisp", "a ~a ~s", "b ~s ~a", "in another order"),
        ("object-pascal", "a %0:s %1:d", "b %1:d %0:s", ""),
        ("object-pascal", "a %0:d", "b %d", ""),
        ("object-pascal", "a %1:d", "b %d", "its translation lost %1:d"),
        ("rust", "a {} {x}", "{x} b {}", "in another order"),
        ("kde-kuit", "<b>a</b> %1", "b %1", "lost <b>, </b>"),
    ],
)
def test_directives_are_kept(format_name: str, source: str, target: str, problem: str) -> None:
    pattern = get_directive_pattern(format_name)
    assert pattern is not None
    reported = find_directive_problem(source, target, pattern)
    assert (problem in reported) if problem else not reported


@pytest.mark.parametrize("format_name", SAMPLES)
def test_hostile_text_takes_linear_time(format_name: str) -> None:
    pattern = get_directive_pattern(format_name)
    assert pattern is not None
    for piece in ("%", "0", "%<", "%(", "{", "{:", "'", "${", "~{", "&", "<", "%1$"):
        text = SAMPLES[format_name][0] + piece * 5_000
        assert not find_directive_problem(text, text, pattern)


def test_unknown_format_has_no_directives() -> None:
    assert get_directive_pattern("cobol") is None


@pytest.mark.parametrize(
    ("format_name", "singular", "plural", "expected"),
    [
        ("c", "one", "%d", True),
        ("c", "%s", "%s %d", True),
        ("c", "%s", "%d %s", False),
        ("c", "%2$s", "%1$d %2$s", False),
        ("c", "%1$s", "%1$s %2$d", True),
        ("c", "%s", "many", False),
        ("c", "one", "%s %d", False),
        ("python", "one", "%(n)d", True),
        ("python", "one", "%d", False),
        ("boost", "%1% of %2%", "%1% of %2% %2$d", False),
        ("boost", "%2%", "%2% %2$d", False),
        ("java", "one", "{0}", True),
        ("java", "{0}", "{0,number} {0}", False),
        ("kde", "one", "%1 %2", False),
        *((name, "one", text, False) for name, text in NEVER_OPTIONAL.items()),
        *((name, text, text, True) for name, text in NEVER_OPTIONAL.items()),
        ("cobol", "one", "%d", False),
    ],
)
def test_singular_may_lack_the_count(format_name: str, singular: str, plural: str, expected: bool) -> None:
    assert can_lack_count(singular, plural, format_name) == expected


@needs_gettext
@pytest.mark.parametrize("format_name", SAMPLES)
def test_no_singular_is_accepted_that_msgfmt_refuses_as_a_plural_form(format_name: str, tmp_path: Path) -> None:
    rng = random.Random(f"{format_name} {fuzz.SEED}")
    plurals = [make_text(rng, format_name) for _ in range(PAIR_COUNT)]
    pairs = [("Some words" if rng.random() < 0.3 else drop_words(plural, rng), plural) for plural in plurals]
    accepted = [can_lack_count(singular, plural, format_name) for singular, plural in pairs]
    expected = check_by_msgfmt(pairs, format_name, tmp_path, plural=True)
    assert [pair for pair, ours, theirs in zip(pairs, accepted, expected, strict=True) if ours and not theirs] == []
    assert any(accepted)
    assert not all(accepted)
