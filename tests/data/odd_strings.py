"""Odd strings for round trips through files that other programs write."""

from __future__ import annotations

import random

STRING_PIECES = [
    *(
        "Hello",
        "Straße",
        "naïve",
        "日本語",
        "مرحبا",
        "हिन्दी",
        "e\u0301",
        "👩‍👩‍👧",
        "𝒳",
        "<s>",
        "&amp;",
        "<b>",
        "a < b & c > d",
    ),
    *(
        "]]>",
        "<!--",
        "  ",
        "\u00a0",
        "\u2028",
        "\u200b",
        '"',
        "'",
        '""',
        "\\",
        "\\n",
        "\\x41",
        "%d",
        "{0}",
        "#",
        "#~",
        "=",
        ",",
    ),
    *("msgid", "\t", "\n", "  ", "…", "\ufffd", "–", "1,000", "fuzzy"),
]


def make_strings(count: int, seed: int) -> list[str]:
    """Return distinct texts that are neither empty nor blank."""
    rng = random.Random(seed)
    return [f"{number}{''.join(rng.choices(STRING_PIECES, k=rng.randint(1, 12)))}." for number in range(count)]
