"""Directives of format strings by gettext's flags, such as `%s` of `c-format` and `{name}` of `python-brace-format`.

The groups of a format's pattern tell the argument that a directive takes: one with a `number` (`%2$s`) or a `name`
(`%(x)s`, `{0}`), otherwise the next one; none if it is `void` (`%%`). A `fixed` directive must keep its place, and so
must a character that begins no known directive. The patterns may match more than the language allows.
"""

import re
from collections import Counter
from functools import cache

_NEXT_STAR = re.compile(r"\*(?!\d)")  # a width or precision that is an argument
_NUMBER = r"(?P<number>[1-9]\d{0,5}\$)?"


def _make_printf(
    conversion: str, *, argument: str = _NUMBER, flags: str = "[ #+0'-]*+", size: str = "", void: str = "%"
) -> str:
    """Return the pattern of `%`, argument, flags, width, precision, size and conversion."""
    star = r"\*(?:\d++\$)?"
    return rf"%{argument}{flags}(?:\d++|{star})?(?:\.(?:\d++|{star})?)?{size}(?:(?P<void>{void})|{conversion})"


def _make_c(conversion: str) -> str:
    flags, size = "[ #+0'I-]*+", "(?:[hlLqjzZt]|I64|I32)*+"
    return _make_printf(f"{conversion}|<[^<>]*>", flags=flags, size=size, void="[%m]")


_BRACES = r"(?P<void>\{\{|\}\})|\{(?P<name>[A-Za-z0-9_][^{}:]*)?(?::(?:[^{}]|\{[^{}]*\})*)?\}"
_LISP = r"(?P<fixed>~(?:(?:[+-]?\d+|'.|[vV#])?,)*(?:[+-]?\d+|'.|[vV#])?[:@]*(?:/[^/]*/|\{(?:~[:@]*\})?|.))"
_RUBY = (
    r"%[ #+0-9.*-]*+(?P<name><[^<>]*>[ #+0-9.*-]*+[A-Za-z%\n]|\{[^{}]*\})"
    r"|%[ #+0-]*+(?P<number>[1-9]\d{0,5}\$)?[ #+0-9.*$-]*+(?:[A-Za-z]|(?P<void>[%\n]))"
)
_FORMATS = {  # characters that must not stand alone; the pattern of directives
    "awk": ("%", _make_printf("[diouxXeEfFgGaAcs]")),
    "boost": (
        "%",
        r"%(?P<name>[1-9]\d*%)|"
        + _make_printf(
            r"[cCsSidouxXeEfgGp]\|?|\|",
            argument=r"\|?" + _NUMBER,
            flags="[ #+0'_=hl-]*+",
            size="[hlL]*+",
            void=r"%|(?:[tn]|T.)\|?",
        ),
    ),
    "c": ("%", _make_c("[diouxXeEfFgGaAcCsSpn]")),
    "c++": ("{}", _BRACES),
    "csharp": ("{}", r"(?P<void>\{\{|\}\})|\{(?P<name>[^{}]*)\}"),
    "d": ("%", _make_c("[diouxXeEfFgGaAcsr(|)]")),
    "elisp": ("%", _make_printf("[sSdioxXcefgG]")),
    "gcc-internal": (
        "%",
        r"(?P<fixed>%[<>}R])|(?P<relative>%[{r])|" + _make_printf("[A-Za-z@]", flags="[qlwzt+#]*+", void="[%'m]"),
    ),
    "gfc-internal": ("%", _make_printf("[CLiducs]", flags="l?")),
    "go": ("%", _make_printf("[A-Za-z]", argument=r"(?P<number>\[\d{1,6}\])?")),
    "java": ("{}", r"(?P<text>'[^'{}]*(?:'|\Z))|(?P<fixed>'[^']*(?:'|\Z))|\{(?P<name>(?:[^{}]|\{[^{}]*\})*)\}"),
    "java-printf": (
        "%",
        r"(?P<relative>%<[^A-Za-z<]*[A-Za-z]{1,2})|" + _make_printf("[tT]?[A-Za-z]", flags="[ #+0,(-]*+", void="[%n]"),
    ),
    "javascript": ("%", _make_printf("[sbdoxXufcj]", flags="[ +0I-]*+")),
    "kde": ("", r"%(?P<name>\d+)"),
    "kde-kuit": ("", r"%(?P<name>\d+)|(?P<fixed><[^>]*>?|\]\]>)|(?P<void>&[^;&\s]*;)"),
    "librep": ("%", _make_printf("[sSpdDxXoc]", flags="[ +0^-]*+")),
    "lisp": ("~", _LISP),
    "lua": ("%", _make_printf("[aAcdEeFfgGiopqsuXx]", argument="")),
    "objc": ("%", _make_c("[diouxXeEfFgGaAcCsSpn@]")),
    "object-pascal": ("%", _make_printf("[dDuUxXeEfFgGnNmMsSpP]", argument=r"(?P<number>\d{0,6}:|\*:)?", flags="-?")),
    "perl": ("%", _make_printf("[A-Za-z]", flags="[ #+0v*-]*+", size="(?:[hlLqVztj]|I64|I32|I)*+")),
    "perl-brace": ("", r"\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)\}"),
    "php": ("%", _make_printf("[sbduoxXeEfFgGci]", flags="(?:[ +0-]|'.)*+", size="l?")),
    "python": ("%", _make_printf("[A-Za-z]", argument=r"(?P<name>\((?:[^()]|\([^()]*+\))*+\))?", size="[hlL]?")),
    "python-brace": ("{}", _BRACES),
    "qt": ("", r"%(?P<name>L?\d\d?)"),
    "qt-plural": ("", r"%(?P<name>L?n)"),
    "ruby": ("%", _RUBY),
    "rust": ("{}", _BRACES),
    "scheme": ("~", _LISP),
    "sh": ("$", r"\$(?P<name>[A-Za-z_][A-Za-z0-9_]*|\{[^{}]*\})"),
    "smalltalk": ("%", r"%(?:(?P<void>%)|(?P<name>(?:<[^<>]*>)?\d))"),
    "tcl": ("%", _make_printf("[diuxXocsfeEgG]", flags="[ #+0-]*+", size="[hl]?")),
    "ycp": ("%", r"%(?:(?P<void>%)|(?P<name>\d))"),
}

# Formats whose plural form for a single number may lack an argument, according to msgfmt.
_COUNT_IS_OPTIONAL = frozenset(
    "awk boost c csharp elisp java java-printf javascript kde librep objc perl perl-brace php python python-brace "
    "qt-plural sh smalltalk tcl ycp".split()
)


@cache
def get_directive_pattern(format_name: str) -> re.Pattern[str] | None:
    """Return the pattern of a format's directives and stray characters; None if the format is not known."""
    if format_name not in _FORMATS:
        return None
    reserved, pattern = _FORMATS[format_name]
    reserved = re.escape(reserved)
    stray = rf"|(?P<stray>[{reserved}][^\s{reserved}]{{0,3}})" if reserved else ""
    return re.compile(pattern + stray, re.DOTALL)


def find_directive_problem(source: str, target: str, pattern: re.Pattern[str]) -> str:
    """Return how the directives of a translation differ from those of its source, or ""."""
    if Counter(_assign_arguments(source, pattern)) == Counter(_assign_arguments(target, pattern)):
        return ""
    expected, actual = (Counter(match[0] for match in _find_directives(text, pattern)) for text in (source, target))
    if lost := expected - actual:
        return f"its translation lost {', '.join(lost)}"
    if gained := actual - expected:
        return f"its translation gained {', '.join(gained)}"
    return f"its translation has {' and '.join(expected)} in another order"


def can_lack_count(singular: str, plural: str, format_name: str) -> bool:
    """True if msgfmt accepts the singular as the plural form for 1; False if that is not certain.

    The singular may lack at most one argument, the last or one with a name, in formats that allow it.
    """
    pattern = get_directive_pattern(format_name)
    if pattern is None:
        return False
    in_singular, in_plural = (Counter(_assign_arguments(text, pattern)) for text in (singular, plural))
    missing = list((in_plural - in_singular).elements())
    if in_singular - in_plural or len(missing) > 1:
        return False
    if not missing:
        return True
    number, directive = missing[0]
    if format_name not in _COUNT_IS_OPTIONAL or "*" in directive or (number and format_name == "python"):
        return False
    if number:
        has_names = any(_get_name(text, pattern) for _, text in in_singular)  # `%2%` has the argument of `%2$d`
        return not has_names and {other for other, _ in in_singular if other} == set(range(1, number))
    name = _get_name(directive, pattern)
    first_words = re.findall(r"\w+", name or "")[:1]  # `0` of `{0,number}`
    # Another directive may have the same argument with another type, or inside: `{0,choice,0#a|1#b{1}}`.
    return bool(first_words) and first_words[0] not in re.findall(r"\w+", " ".join(text for _, text in in_singular))


def _get_name(directive: str, pattern: re.Pattern[str]) -> str | None:
    match = pattern.fullmatch(directive)
    return match.groupdict().get("name") if match else None


def _find_directives(text: str, pattern: re.Pattern[str]) -> list[re.Match[str]]:
    return [match for match in pattern.finditer(text) if match.lastgroup != "text"]


def _assign_arguments(text: str, pattern: re.Pattern[str]) -> list[tuple[int, str]]:
    """Return (number of the argument, directive without it) of each directive.

    If arguments are given in several ways, it is the place of the directive: no other order is certain to be right.
    """
    directives: list[tuple[int, str]] = []
    ways: set[str] = set()
    next_number, fixed_count = 1, 0
    matches = _find_directives(text, pattern)
    for match in matches:
        way, directive, number = match.lastgroup or "next", match[0], 0
        star_count = len(_NEXT_STAR.findall(directive))
        given_number = match.groupdict().get("number")
        ways |= {way, *(["next"] if star_count else []), *(["number"] if given_number else [])}
        if way == "number" and given_number:
            number = int(re.sub(r"\D", "", given_number) or 0) + given_number.endswith(":")  # Pascal counts from 0
            directive = directive.replace(given_number, "", 1)
        elif way == "next":
            number = next_number
        elif way in ("fixed", "stray"):
            fixed_count += 1
            number = fixed_count
        next_number += star_count + (way == "next")
        directives.append((number, directive))
    if len(ways - {"void", "fixed"}) > 1:
        return [(index, match[0]) for index, match in enumerate(matches)]
    return directives
