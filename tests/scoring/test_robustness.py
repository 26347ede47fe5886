"""Robustness scores: what each change costs a translator that is sensitive to it."""

from __future__ import annotations

import pytest

from attent.data.augment import KINDS
from attent.scoring.evaluate import list_robustness_rows, measure_robustness, remove_inline_tags
from attent.scoring.metrics import compute_metrics
from tests.text.corpus import lines

SOURCES, TARGETS = (list(side[:60]) for side in lines())
BY_SOURCE = {source.lower(): target for source, target in zip(SOURCES, TARGETS, strict=True)}


def test_each_change_is_scored_alone() -> None:
    def translate(sources: list[str]) -> list[str]:
        """Know every sentence in any case, but nothing with typos or tags."""
        found = [BY_SOURCE.get(source.lower().strip(), "?") for source in sources]
        return [text.upper() if source.isupper() else text for source, text in zip(sources, found, strict=True)]

    clean = compute_metrics(translate(SOURCES), TARGETS, ("bleu", "chrf"), resamples=0)
    rows = {row.name: row for row in measure_robustness(translate, SOURCES, TARGETS, clean, "de")}
    assert list(rows) == [name for name, kind in KINDS.items() if kind.is_tested]
    assert rows["upper"].differences == (0.0, 0.0)
    assert rows["typos"].scores[0].value < 10
    assert rows["typos"].differences[0] < -90
    assert rows["tags"].tags_kept == 0
    assert rows["upper"].tags_kept is None
    table = list_robustness_rows(clean, tuple(rows.values()))
    assert table[0] == ["", "BLEU", "", "chrF", "", "tags kept"]
    assert table[1][:2] == ["clean", "100.00"]
    assert {len(row) for row in table} == {6}


def test_tags_are_removed_before_scoring() -> None:
    def translate(sources: list[str]) -> list[str]:
        return sources  # copies the tags

    clean = compute_metrics(SOURCES, SOURCES, ("bleu",), resamples=0)
    (tags,) = (row for row in measure_robustness(translate, SOURCES, SOURCES, clean, "en") if row.name == "tags")
    assert tags.tags_kept == 100
    assert tags.scores[0].value == pytest.approx(100)
    assert remove_inline_tags("A <x1> big </x1>, <x2/> red <x3/>.") == "A big, red ."
