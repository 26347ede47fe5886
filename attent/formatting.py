"""Numbers, durations and Markdown as text. Standard library only: every part of the package may import it."""

import re
import unicodedata
from collections.abc import Sequence

MARKDOWN_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~&!$])")
HARMLESS_INVISIBLE = "\u200c\u200d\u00ad"  # joiners and soft hyphens: part of how words are written


def format_count(count: int, noun: str, plural: str | None = None) -> str:
    """1 pair, 1,200 pairs."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def format_short(count: int) -> str:
    """2.6 million, 310 thousand, 980."""
    for size, name in ((10**9, "billion"), (10**6, "million"), (10**3, "thousand")):
        if count >= size:
            return f"{count / size:.1f} {name}" if count < 10 * size else f"{count / size:,.0f} {name}"
    return str(count)


def format_percent(fraction: float) -> str:
    """12%, 3%, 0%."""
    return f"{100 * fraction:.0f}%"


def format_precise_percent(fraction: float) -> str:
    """12%, 3.1%, 0.020%: more digits for small fractions, and never 100% for less than all."""
    if 0.995 <= fraction < 1:
        return f"{min(100 * fraction, 99.99):.2f}%"
    for minimum, digits in ((0.1, 0), (0.001, 1), (0.00001, 3)):
        if fraction >= minimum:
            return f"{100 * fraction:.{digits}f}%"
    return "<0.001%" if fraction else "0%"


def format_bytes(count: int) -> str:
    """12 bytes, 1.5 KiB, 3.0 GiB."""
    for size, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= size:
            return f"{count / size:.1f} {name}"
    return f"{count} bytes"


def format_duration(seconds: float) -> str:
    """The two largest units: 3 h 20 min, 7 min 12 s, 4 s."""
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    if seconds < 3_600 - 0.5:
        return f"{round(seconds) // 60} min {round(seconds) % 60} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} days {hours % 24} h"


def escape_invisible(text: str) -> str:
    """Escape characters that are invisible, move the cursor or change the text direction."""
    return "".join(map(_escape_char, text))


def _escape_char(char: str) -> str:
    if char.isprintable() or char in HARMLESS_INVISIBLE or unicodedata.category(char) == "Zs":
        return char
    short = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}
    return short.get(char) or (f"\\x{ord(char):02x}" if ord(char) < 256 else f"\\u{ord(char):04x}")


def escape_markdown(text: str) -> str:
    """Text on one line, escaped so that Markdown shows it literally, also in a table cell."""
    return MARKDOWN_SPECIAL.sub(r"\\\1", _join_lines(text))


def _join_lines(text: str) -> str:
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())


def format_code(text: str) -> str:
    """A code span; its fence is longer than any run of backticks in the text."""
    line = _join_lines(text)
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", line)), default=0))
    return f"{fence} {line} {fence}" if len(fence) > 1 else f"`{line}`"


def code_block(language: str, lines: str) -> str:
    return f"```{language}\n{lines}\n```"


def markdown_table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    right_aligned: Sequence[int] = (),
    code_columns: Sequence[int] = (),
) -> str:
    """A Markdown table without its empty columns."""
    columns = [i for i in range(len(header)) if any(row[i] for row in rows)]
    rule = ["---:" if i in right_aligned else "---" for i in columns]
    body = [[_code_cell(row[i]) if i in code_columns else escape_markdown(row[i]) for i in columns] for row in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in ([header[i] for i in columns], rule, *body))


def _code_cell(text: str) -> str:
    """A code span, except for text with `|` or a backslash, which cannot be escaped inside of one."""
    return format_code(text) if _join_lines(text) and not set(text) & set("|\\") else escape_markdown(text)
