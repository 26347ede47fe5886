"""Output formats, each as other tools read it, with one line per translation."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from attent.decoding.alignment import Alignment
from attent.decoding.options import Hypothesis, SearchOptions
from attent.decoding.output_format import OutputFormat, format_moses, format_pharaoh
from attent.decoding.translator import SearchedText, Translation, Translator, join_hypotheses
from tests.text.corpus import tokenizer
from tests.training.toys import model

BREAKS = "a\tb\nc\r\nd\u2028e\x85f\x1b\x07g\x9bh\x7fi"  # and what controls a terminal


BEST = Hypothesis(
    token_ids=(5, 6, 7, 8),
    text="Ein Hund läuft.",
    score=-0.12345,
    log_prob=-0.5,
    tokens=("▁Ein", "▁Hund", "▁läuft", "."),
    is_finished=True,
)
ALIGNMENT = Alignment(
    links=((0, 0), (1, 2)), unreliable_links=((2, 1),), weights=((0.75, 0.25, 0.0), (0.1, 1 / 3, 0.5))
)


def build_translation(**fields: Any) -> Translation:
    n_best = (BEST, replace(BEST, text="Ein Hund rennt.", score=-1.0, log_prob=-4.25))
    translation = Translation(**{**vars(BEST), "source": "A dog runs.", "n_best": n_best, **fields})
    vars(translation)["alignment"] = ALIGNMENT  # as `alignment=True` stores it
    return translation


ONE = build_translation()


def format_lines(translation: Translation = ONE, number: int = 7, **options: object) -> list[str]:
    return OutputFormat(**options).format_lines(translation, number)  # type: ignore[arg-type]


def test_plain_text_is_the_translation() -> None:
    assert format_lines() == ["Ein Hund läuft."]


def test_the_score_precedes_the_text_and_the_alignment_follows() -> None:
    assert format_lines(with_score=True) == ["-0.1235\tEin Hund läuft."]
    assert format_lines(alignment="hard") == ["Ein Hund läuft. ||| 0-0 1-2"]
    assert format_lines(with_score=True, alignment="hard") == ["-0.1235\tEin Hund läuft. ||| 0-0 1-2"]


@pytest.mark.parametrize(
    ("options", "is_plain"),
    [({}, True), ({"type": "tsv"}, False), ({"n_best": 2}, False), ({"with_score": True}, False),
     ({"alignment": "hard"}, False)],
)  # fmt: skip
def test_only_text_alone_is_plain(options: dict[str, Any], is_plain: bool) -> None:
    assert OutputFormat(**options).is_plain == is_plain


def test_an_empty_line_stays_empty() -> None:
    empty = join_hypotheses("", SearchedText(Translator(model(), tokenizer()), [], [], []), SearchOptions())
    assert format_lines(empty) == [""]
    assert format_lines(empty, alignment="hard") == [" |||"]
    assert format_lines(empty, type="tsv") == ["\t"]
    assert format_lines(empty, type="tsv", n_best=3) == ["\t"]
    assert format_lines(empty, n_best=3) == ["7 |||  ||| 0.0000"]
    assert json.loads(format_lines(empty, type="json")[0])["hyp"] == ""


def test_n_best_lists_have_the_moses_format() -> None:
    assert format_lines(n_best=2) == ["7 ||| Ein Hund läuft. ||| -0.1235", "7 ||| Ein Hund rennt. ||| -1.0000"]
    assert format_lines(n_best=5) == format_lines(n_best=2)  # there are no more


def test_separators_in_the_text_are_escaped() -> None:
    barred = replace(BEST, text="a ||| b |||| c || d")
    assert format_moses(0, barred).split(" ||| ") == ["0", "a | | | b | | | | c || d", "-0.1235"]
    assert format_lines(build_translation(text="a ||| b"), alignment="hard") == ["a | | | b ||| 0-0 1-2"]
    assert format_lines(build_translation(text="a ||| b")) == ["a ||| b"]


def test_tsv_columns() -> None:
    assert format_lines(type="tsv") == ["A dog runs.\tEin Hund läuft."]
    assert format_lines(type="tsv", with_score=True, alignment="hard") == [
        "A dog runs.\tEin Hund läuft.\t-0.1235\t0-0 1-2"
    ]
    assert format_lines(type="tsv", n_best=2, with_score=True) == [
        "A dog runs.\tEin Hund läuft.\t-0.1235",
        "A dog runs.\tEin Hund rennt.\t-1.0000",
    ]


@pytest.mark.parametrize("kind", ["text", "tsv", "json"])
def test_one_translation_is_one_line(kind: str) -> None:
    broken = build_translation(source=BREAKS, text=BREAKS)
    (line,) = format_lines(broken, type=kind)
    assert len(line.splitlines()) == 1
    assert line.replace("\t", "").isprintable()
    if kind != "json":
        assert line.split("\t") == ["a b c d e f g h i"] * (2 if kind == "tsv" else 1)
    else:
        assert json.loads(line)["hyp"] == BREAKS


def test_json_fields() -> None:
    (line,) = format_lines(type="json", n_best=2, alignment="hard", score_formula="score = log_prob")
    assert json.loads(line) == {
        "src": "A dog runs.",
        "hyp": "Ein Hund läuft.",
        "score": -0.12345,
        "log_prob": -0.5,
        "tokens": ["▁Ein", "▁Hund", "▁läuft", "."],
        "finished": True,
        "alignment": [[0, 0], [1, 2]],
        "unreliable_links": [[2, 1]],
        "n_best": [
            {
                "hyp": "Ein Hund läuft.",
                "score": -0.12345,
                "log_prob": -0.5,
                "tokens": list(ONE.tokens),
                "finished": True,
            },
            {"hyp": "Ein Hund rennt.", "score": -1.0, "log_prob": -4.25, "tokens": list(ONE.tokens), "finished": True},
        ],
        "formula": "score = log_prob",
    }
    assert "ä" in line


def test_soft_alignments_are_weights() -> None:
    facts = json.loads(format_lines(type="json", alignment="soft")[0])
    assert facts["alignment"] == [[0, 0], [1, 2]]
    assert facts["weights"] == [[0.75, 0.25, 0.0], [0.1, 0.3333, 0.5]]
    assert "weights" not in json.loads(format_lines(type="json", alignment="hard")[0])


def test_json_omits_what_was_not_requested() -> None:
    assert not {"alignment", "weights", "n_best"} & json.loads(format_lines(type="json")[0]).keys()


def test_infinite_and_tiny_numbers() -> None:
    odd = build_translation(score=float("-inf"), log_prob=-1e-9)
    fields = json.loads(format_lines(odd, type="json")[0])
    assert fields["score"] is None
    assert str(fields["log_prob"]) == "0.0"
    assert format_lines(build_translation(score=-1e-9), with_score=True)[0].startswith("0.0000\t")


def test_alignments_have_the_pharaoh_format() -> None:
    assert format_pharaoh([(0, 0), (1, 2), (10, 3)]) == "0-0 1-2 10-3"
    assert format_pharaoh([]) == ""
