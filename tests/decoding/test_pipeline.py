"""Constraints of the lines of a file."""

from __future__ import annotations

import json

from attent.decoding.input_lines import parse_json_line
from attent.decoding.options import PhraseConstraints, Segment


def test_lines_add_to_the_constraints_of_the_file() -> None:
    base = PhraseConstraints(prefix="Ein h", prefix_is_partial=True, banned=("Katze",))

    def parse(**fields: object) -> object:
        return parse_json_line(json.dumps({"text": "a dog", **fields}).encode(), "line 1", base)

    assert parse() == "a dog"
    assert parse(require="Hund", ban=["Maus"]) == Segment(
        "a dog", PhraseConstraints(prefix="Ein h", prefix_is_partial=True, required=("Hund",), banned=("Katze", "Maus"))
    )
    assert parse(prefix="Der") == Segment("a dog", PhraseConstraints(prefix="Der", banned=("Katze",)))
    assert parse(prefix="") == Segment("a dog", PhraseConstraints(banned=("Katze",)))
