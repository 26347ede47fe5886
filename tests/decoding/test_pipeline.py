"""Constraints of the lines of a file."""

from __future__ import annotations

from typing import Any

from attent.decoding.input_lines import InputLine
from attent.decoding.options import Constraints, SearchOptions
from attent.decoding.pipeline import TranslationPipeline


def test_lines_add_to_the_constraints_of_the_file() -> None:
    no_translator: Any = None
    base = Constraints(prefix="Ein h", prefix_is_partial=True, banned=("Katze",))
    pipeline = TranslationPipeline(translator=no_translator, options=SearchOptions(), constraints=base)
    assert pipeline.build_line_constraints(InputLine(text="a dog")) == base
    assert pipeline.build_line_constraints(
        InputLine(text="a dog", required=("Hund",), banned=("Maus",))
    ) == Constraints(prefix="Ein h", prefix_is_partial=True, required=("Hund",), banned=("Katze", "Maus"))
    own_prefix = pipeline.build_line_constraints(InputLine(text="a dog", prefix="Der"))
    assert own_prefix == Constraints(prefix="Der", banned=("Katze",))
