"""`attent translate --consistent-terms`: a term of a document that was translated in two ways gets one of them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

import attent
from attent import cli
from attent.decoding import document_terms
from attent.decoding.alignment import Alignment
from attent.decoding.translator import Translation
from tests.text.corpus import tokenizer

ADJECTIVES = {"big": "groß", "small": "klein", "old": "alt", "young": "jung"}
VERBS = {"runs": "rennt", "sleeps": "schläft", "sings": "singt", "walks": "geht"}
# The share of each form after each adjective; the first is the most likely one.
FORMS = {"big": ("Gerät", 0.7), "small": ("Gerät", 0.7), "old": ("Apparat", 0.7), "young": ("Apparat", 0.7)}
OTHERS = {"Gerät": "Apparat", "Apparat": "Gerät"}
PAGE = "the old Widget sleeps\n\nthe big Widget runs\n\nthe big Horse walks\n\nthe young Widget sings\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that translates `Widget` in two ways, which depend on the word before it."""
    rng, rows = random.Random(0), []
    for _ in range(1500):
        (adjective, ending), (verb, other) = (rng.choice(list(words.items())) for words in (ADJECTIVES, VERBS))
        form, share = FORMS[adjective]
        noun, target = rng.choice([("Widget", form if rng.random() < share else OTHERS[form]), ("Horse", "Pferd")])
        rows.append(f"the {adjective} {noun} {verb}\t{other} {target} {ending} das")  # in the opposite order
    out = tmp_path_factory.mktemp("terms")
    (out / "train.tsv").write_text("\n".join(rows), encoding="utf-8")
    settings = {"model.width": 64, "model.ffn_width": 128, "model.layers": 1, "model.dropout": 0.0}
    attent.train(
        out / "train.tsv", out=out / "run", src="en", tgt="de", size="tiny", steps=200, batch_tokens=1024, lr=3e-3,
        hold_out=20, valid_sentences=10, beam_size=1, threads=1, progress=False,
        settings={**settings, "data.filters.duplicates": False},
    )  # fmt: skip
    return out / "run"


@pytest.fixture(autouse=True)
def reverse_alignment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model has words in the opposite order; its attention looks at the adjective, which decides on the noun."""

    def align(*arguments: Any) -> list[Alignment]:
        return [
            build_reversed(len(source.split()), len(target.split()))
            for source, target in zip(*arguments[2:4], strict=True)
        ]

    monkeypatch.setattr("attent.decoding.translator.align_rows", align)


def build_reversed(sources: int, targets: int) -> Alignment:
    links = tuple((sources - 1 - index, index) for index in range(min(sources, targets)))
    weights = [tuple(float((source, index) in links) for source in range(sources)) for index in range(targets)]
    return Alignment(links=links, weights=tuple(weights))


def run_translate(folder: Path, page: Path, *arguments: object) -> tuple[list[str], dict[str, Any]]:
    report = page.with_suffix(".json")
    flags = ["--engine", "torch", "--report", str(report), *map(str, arguments)]
    assert cli.main(["translate", str(folder), str(page), "-o", str(page.with_suffix(".out")), *flags]) == 0
    lines = page.with_suffix(".out").read_text(encoding="utf-8").split("\n\n")
    return [line.strip() for line in lines], json.loads(report.read_text(encoding="utf-8"))


def test_a_term_is_translated_in_the_same_way(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, glossary = tmp_path / "page.md", tmp_path / "terms.tsv"
    page.write_text(PAGE, encoding="utf-8")
    free = ["schläft Apparat alt das", "rennt Gerät groß das", "geht Pferd groß das", "singt Apparat jung das"]
    assert run_translate(folder, page)[0] == free
    monkeypatch.setattr(document_terms, "MAX_COST", 3.0)
    lines, report = run_translate(folder, page, "--consistent-terms")
    assert lines == [line.replace("Gerät", "Apparat") for line in free]
    assert report["to_review"] == 0
    glossary.write_text("widget\tGerät\n", encoding="utf-8")  # has precedence
    lines, _ = run_translate(folder, page, "--consistent-terms", "--glossary", glossary)
    assert lines == [line.replace("Apparat", "Gerät") for line in free]
    monkeypatch.setattr(document_terms, "MAX_COST", 0.1)
    lines, report = run_translate(folder, page, "--consistent-terms")
    assert lines == free
    reasons = [unit["reason"] for unit in report["units"]]
    assert reasons == ["", "`Widget` is elsewhere translated as `Apparat`, but no form occurs", "", ""]
    assert report["to_review"] == 1
    monkeypatch.setattr(document_terms, "MIN_MEAN_LOG_PROB", 0.0)  # the model is never sure
    assert run_translate(folder, page, "--consistent-terms")[1]["to_review"] == 0


def test_terms_are_for_documents_and_plain_beam_search(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, arguments, problem in (
        ("a.txt", [], "--consistent-terms is for documents"),
        ("a.md", ["--sample"], "need plain beam search"),
    ):
        (tmp_path / name).write_text("the old Widget sleeps\n", encoding="utf-8")
        assert cli.main(["translate", str(folder), str(tmp_path / name), "--consistent-terms", *arguments]) == 1
        assert problem in capsys.readouterr().err
    flags = ["--consistent-terms", "--ban", "term", "-o", str(tmp_path / "out.md")]  # a word like any other
    assert cli.main(["translate", str(folder), str(tmp_path / "a.md"), *flags]) == 0


@pytest.mark.parametrize(
    ("forms", "expected"),
    [
        (["Vertrag", "Abkommen", "Abkommen"], ("Abkommen",)),  # the most frequent
        (["Vertrag", "Abkommen"], ("Vertrag",)),  # the first
        (["Vertrag", "Abkommen", "Verträge", "Vertrages"], ("Vertrag", "Verträge", "Vertrages")),
        (["Vertrag", "Verträge", "Vertrages"], None),  # inflected
        (["Vertrag", "Vertragspartner"], ("Vertrag",)),
        (["Tag", "Abkommen"], None),  # too short
        (["%s", "Abkommen"], None),
    ],
)
def test_forms_of_a_term_are_grouped_by_stem(forms: list[str], expected: tuple[str, ...] | None) -> None:
    units: dict[str, Translation] = {}
    for number, form in enumerate(forms):
        source, target = f"{number} Treaty", f"{form} {number}"
        hypothesis: dict[str, Any] = {"token_ids": (1,), "log_prob": -0.1, "score": -0.1, "is_finished": True}
        units[source] = Translation(**hypothesis, text=target, source=source, n_best=(), tokens=("a",))
        vars(units[source])["alignment"] = build_reversed(2, 2)
    glossary, again = document_terms.find_document_terms(units, tokenizer(), None)
    assert [entry.translations for entry in glossary.entries] == [expected] * (expected is not None)
    other = {"Vertrag": "Abkommen", "Abkommen": "Vertrag"}[expected[0]] if expected else ""  # a compound stays
    assert again == {source for source, unit in units.items() if unit.text.split()[0] == other}
