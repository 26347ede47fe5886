"""A model trained with preceding sentences gets them from files and documents; figures of quality are printed."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from sacrebleu import sentence_chrf

import attent
from attent import cli
from attent.decoding.options import NO_CONSTRAINTS, InputError, SearchOptions
from attent.decoding.output_format import OutputFormat
from attent.decoding.pipeline import TranslationPipeline, choose_context
from attent.decoding.translator import Translator
from attent.training.config import TrainError

PRONOUNS = {"dog": "er", "cat": "sie", "horse": "es"}
VERBS = {"runs": "rennt", "sleeps": "schläft", "sings": "singt", "walks": "geht"}
ADJECTIVES = {"big": "groß", "small": "klein", "old": "alt", "young": "jung"}
LINES = ["here comes the big cat", "it sleeps now", "", "here comes the old dog", "it sings now", "", "it sleeps now"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pronoun of a second sentence depends on the first."""
    rng, rows = random.Random(0), []
    for _ in range(500):
        (noun, pronoun), (verb, other), (adjective, end) = (
            rng.choice(list(words.items())) for words in (PRONOUNS, VERBS, ADJECTIVES)
        )
        again = "again " * rng.randrange(2)
        rows += [
            f"here comes the {adjective} {noun}\tda kommt {noun.upper()} {end}",
            f"it {verb} {again}now\t{pronoun} {other} jetzt",
            "",
        ]
    out = tmp_path_factory.mktemp("context")
    (out / "train.tsv").write_text("\n".join(rows), encoding="utf-8")
    settings = {"model.width": 64, "model.ffn_width": 128, "model.layers": 1, "model.dropout": 0.0}
    result = attent.train(
        out / "train.tsv", out=out / "run", src="en", tgt="de", size="tiny", context=1, steps=130, batch_tokens=1024,
        lr=3e-3, hold_out=20, valid_sentences=10, beam_size=1, threads=1, progress=False,
        settings={**settings, "data.filters.duplicates": False},
    )  # fmt: skip
    assert result.scores[0]["metrics"]["bleu"] > 95
    return out / "run"


def test_lines_and_documents_have_their_preceding_sentences(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, page = tmp_path / "text.txt", tmp_path / "page.md"
    text.write_text("".join(f"{line}\n" for line in LINES), encoding="utf-8")
    page.write_text("# Here\n\nhere comes the big cat\n\nit sleeps now\n", encoding="utf-8")
    for arguments in ((), ("--context", "1"), ("--engine", "torch")):
        assert cli.main(["translate", str(folder), str(text), *arguments]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [lines[i].split(" ")[0] for i in (0, 1, 3, 4)] == ["da", "sie", "da", "er"]
        assert lines[2] == lines[5] == ""
    assert cli.main(["translate", str(folder), str(text), "--context", "0"]) == 0
    without = capsys.readouterr().out.splitlines()
    assert without[1] == without[6] == lines[6]
    assert cli.main(["translate", str(folder), str(page)]) == 0
    assert "\n\nsie schläft jetzt\n" in capsys.readouterr().out
    assert cli.main(["score", str(folder), "--data", str(folder.parent / "train.tsv"), "--json", "-b", "1"]) == 0
    scores = json.loads(capsys.readouterr().out)["scores"]
    assert next(score["value"] for score in scores if score["metric"] == "bleu") > 95


def test_alignment_and_output_leave_the_context_out(folder: Path) -> None:
    translator = Translator.load(folder, device="cpu", engine="torch")
    translation = translator("here comes the big cat␞ it sleeps now")
    assert (translation.text, translation.source) == ("sie schläft jetzt", "it sleeps now")
    assert [len(row) for row in translation.alignment.weights] == [3, 3, 3]
    assert all(source < 3 for source, _ in translation.alignment.all_links)
    segments, _ = translator._split_texts(
        ["A cat. It runs. It sings."], [NO_CONSTRAINTS], None, True, "en", 0, ["B.␞ "]
    )
    assert [segment.source for segment in segments[0]] == ["B.␞ A cat.", "A cat.␞ It runs.", "It runs.␞ It sings."]


def test_context_is_refused_where_the_model_has_none(folder: Path, tmp_path: Path) -> None:
    translator = Translator.load(folder, device="cpu", engine="torch")
    assert choose_context(translator, None) == 1
    with pytest.raises(InputError, match="--context 2 must be 0 to 1, as many as in training"):
        choose_context(translator, 2)
    vars(translator)["context"] = 0
    with pytest.raises(InputError, match="--context 1 needs a model of attent train --context N"):
        choose_context(translator, 1)
    pairs = [(f"a {i}", f"b {i}") for i in range(50)]
    options = {"src": "en", "tgt": "de", "size": "tiny", "steps": 1, "progress": False, "hold_out": 2, "threads": 1}
    attent.train(pairs, out=tmp_path / "plain", **options)
    with pytest.raises(TrainError, match="needs a tokenizer with ␞"):
        attent.train(pairs, out=tmp_path / "tuned", init_from=tmp_path / "plain", context=1, **options)


def test_figures_of_quality_are_those_of_chrf(folder: Path) -> None:
    translator = Translator.load(folder, device="cpu", engine="torch")
    pipeline = TranslationPipeline(
        translator=translator,
        options=SearchOptions(beam_size=3),
        reverse=translator,
        context=1,
        output_format=OutputFormat(type="json", with_quality=True),
    )
    for translation in pipeline.translate([LINES[0], LINES[1]]):
        assert translation.quality is not None
        n_best = translator(translation.source, n_best=3).n_best
        expected = [sentence_chrf(n_best[0].text, [each.text]).score for each in n_best[1:]]
        assert translation.quality.agreement == pytest.approx(sum(expected) / 2)
        back = translator(translation.text).text
        expected_back = sentence_chrf(back, [translation.source]).score
        assert translation.quality.back_translation == pytest.approx(expected_back)
        assert translation.quality.mean_log_prob == pytest.approx(translation.log_prob / (len(translation.tokens) + 1))
        fields = json.loads(pipeline.output_format.format_lines(translation, 0)[0])
        assert set(fields["quality"]) == {"mean_log_prob", "agreement", "back_translation"}
        assert "n_best" not in fields
    (empty,) = pipeline.translate([""])
    assert empty.quality is not None
    assert (empty.quality.agreement, empty.quality.back_translation) == (None, None)


def test_quality_is_printed_as_columns(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text(f"{LINES[0]}\n\n", encoding="utf-8")
    arguments = ["translate", str(folder), str(text), "--quality"]
    assert cli.main([*arguments, "--output-type", "tsv"]) == 0
    first, second = (line.split("\t") for line in capsys.readouterr().out.splitlines())
    assert (len(first), first[4], second) == (5, "", [""] * 5)
    assert cli.main(arguments) == 2
    assert "--quality needs --output-type json or tsv" in capsys.readouterr().err
    assert cli.main([*arguments, "--output-type", "json", "--n-best", "2"]) == 2
    assert "leave --n-best out" in capsys.readouterr().err
    assert cli.main([*arguments[:3], "--reverse", str(folder)]) == 2
