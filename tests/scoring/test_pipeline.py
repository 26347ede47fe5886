"""Scoring a test set from its files to the report."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from attent.data.audio import Recording
from attent.data.pairs import ANY_LANGUAGES, CorpusError, LanguagePair, ReasonTally
from attent.decoding.ensemble import Ensemble
from attent.decoding.options import DeviceOptions, SamplingOptions, SearchOptions
from attent.decoding.transcriber import Transcriber
from attent.decoding.translator import Translator
from attent.models import Seq2Seq, Seq2SeqConfig
from attent.models.config import mirror_encoder
from attent.models.weights import save_model
from attent.nn import AudioConfig, StackConfig
from attent.scoring import pipeline
from attent.scoring.metrics import ScoreError, compute_metrics
from attent.scoring.pipeline import (
    MAX_CHECKED_LINES,
    ScoreOptions,
    describe_search,
    describe_wrong_direction,
    read_hypotheses,
    score,
    search_to_dict,
)
from attent.scoring.report import render_page
from attent.storage.errors import AttentError
from attent.text.language_id import LANGUAGES_FILE, LanguageIdentifier
from attent.text.tokenizer_training import TokenizerConfig, train_monolingual_tokenizer
from attent.training.autoconfig import fit_to_tokenizer
from attent.training.loop import write_model
from tests.text.corpus import lines, tokenizer

STACK = StackConfig(layers=1, width=16, heads=2, ffn_width=16)


def test_a_metric_without_its_package_is_refused_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sacremoses", None)
    (tmp_path / "test.tsv").write_text("a\tb\n")
    options = ScoreOptions(metrics=["bleu-lc-tok"])
    with pytest.raises(AttentError, match=r"sacremoses.*pip install 'attent\[moses\]'"):
        score(tmp_path / "missing", str(tmp_path / "test.tsv"), src="en", tgt="de", **vars(options))


def test_each_pair_is_translated_into_its_language(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Seq2Seq(fit_to_tokenizer(Seq2SeqConfig(vocab=9, encoder=STACK, decoder=mirror_encoder(STACK)), tokenizer()))
    write_model(tmp_path / "model", model.eval(), tokenizer())
    search, sources = SearchOptions(beam_size=1, max_length=6), lines()[0][:4]
    options = ScoreOptions(search=search, save=tmp_path / "saved.txt", device=DeviceOptions(device="cpu"))
    translator, saved = Translator.load(tmp_path / "model", device="cpu"), {}
    (tmp_path / "test.tsv").write_text("".join(f"{source}\tTon\n" for source in sources))
    for language in ("de", "pt-BR"):
        score(tmp_path / "model", str(tmp_path / "test.tsv"), src="en", tgt=language, **vars(options))
        saved[language] = (tmp_path / "saved.txt").read_text().splitlines()
        expected = translator.translate(sources, search, to=language)
        assert saved[language] == [" ".join(translation.text.splitlines()) for translation in expected]
    assert saved["de"] != saved["pt-BR"]


SEARCH = SearchOptions()
PREFIX = f"{SEARCH.score_formula}, at most source + 50 tokens"


@pytest.mark.parametrize(
    ("options", "weights", "text"),
    [
        (ScoreOptions(), "float32", f"beam 4, {PREFIX}"),
        (ScoreOptions(search=SearchOptions(beam_size=1)), "bfloat16", f"greedy, {PREFIX}, bfloat16"),
        (
            ScoreOptions(search=SearchOptions(beam_size=6, beam_groups=3, patience=2.0)),
            "float32",
            f"beam 6, {PREFIX}, patience 2.0, beam_groups 3",
        ),
        (
            ScoreOptions(search=SearchOptions(max_length=1_000, min_length=2, no_repeat_ngram_size=3)),
            "float32",
            f"beam 4, {SEARCH.score_formula}, at most 1,000 tokens, min_length 2, no_repeat_ngram_size 3",
        ),
        (
            ScoreOptions(search=SearchOptions(sampling=SamplingOptions(temperature=0.7, top_k=5, top_p=0.9, seed=3))),
            "float32",
            f"sampling (temperature 0.7, top_k 5, top_p 0.9, seed 3), {PREFIX}",
        ),
        (
            ScoreOptions(search=SearchOptions(sampling=SamplingOptions()), device=DeviceOptions(engine="torch")),
            "float32",
            f"sampling (temperature 1, top_k 0, top_p 1, seed 1), {PREFIX}, engine torch",
        ),
        (ScoreOptions(ensemble=[Path("b"), Path("c")]), "float32", f"beam 4, {PREFIX}, with b, with c"),
    ],
)
def test_the_search_is_described(options: ScoreOptions, weights: str, text: str) -> None:
    assert describe_search(options, weights) == text
    data = search_to_dict(options, weights)
    assert (data["dtype"], data["engine"]) == (weights, options.device.engine)
    assert (data["beam_size"], data["formula"]) == (options.search.beam_size, options.search.score_formula)
    assert data["ensemble"] == [str(folder) for folder in options.ensemble]


def make_test_set(**changes: Any) -> pipeline.TestSet:
    base = pipeline.TestSet(
        name="test.tsv", sources=["a", "b"], references=["c", "d"], languages=["de", "de"], skipped=ReasonTally(),
        files=[],
    )  # fmt: skip
    return replace(base, **changes)


def test_translations_are_lines_of_utf8(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    path.write_bytes(b"\xef\xbb\xbf e \nf")
    assert read_hypotheses(path, make_test_set()) == ["e", "f"]
    path.write_bytes(b"\n\n")
    assert read_hypotheses(path, make_test_set()) == ["", ""]
    for content, count in ((b"", 0), (b"a\nb\n\n", 3)):
        path.write_bytes(content)
        problem = f"must have a line for each of the 2 pairs of test.tsv, but has {count}; translate this test set"
        with pytest.raises(ScoreError, match=problem):
            read_hypotheses(path, make_test_set())
    skipped = ReasonTally[str]()
    skipped.add("empty", "test.tsv:1")
    with pytest.raises(ScoreError, match=r"of test\.tsv \(1 of its lines are no pairs\), but has 3"):
        read_hypotheses(path, make_test_set(skipped=skipped))
    path.write_bytes(b"good\nb\xff\n")
    with pytest.raises(ValueError, match=r"out\.txt:2: must be UTF-8, but byte 2 is 0xff; convert the file first"):
        read_hypotheses(path, make_test_set())
    with pytest.raises(ScoreError, match="must be a file of translations or a model folder, but cannot be read"):
        read_hypotheses(tmp_path, make_test_set())


def test_the_language_of_all_references() -> None:
    assert make_test_set().language == "de"
    assert make_test_set(languages=["de", "fr"]).language is None
    assert make_test_set(languages=[None, None]).language is None


def test_nothing_to_score_is_reported(tmp_path: Path) -> None:
    (tmp_path / "test.tsv").write_text("a\tb\n")
    with pytest.raises(ScoreError, match="there is nothing to score: give a model, or a file of hypotheses"):
        score(None, str(tmp_path / "test.tsv"), src="en", tgt="de")
    (tmp_path / "test.tsv").write_text("a\n")
    with pytest.raises(CorpusError, match=r"test\.tsv: contains no sentence pairs: .*; attent data shows more"):
        score(None, [str(tmp_path / "test.tsv")], src="en", tgt="de")


def test_sides_in_another_language_are_named() -> None:
    english, german = lines()[0][:200], lines()[1][:200]
    identifier = LanguageIdentifier.learn({"en": lines()[0]}, {"de": lines()[1]})

    class KnownTranslator:
        folder, language_identifier = "M", identifier

        def describe_wrong_language(self, texts: list[str]) -> str | None:
            return identifier.find_mismatch(texts, identifier.sources)

    def describe(sources: list[str], references: list[str], pair: LanguagePair = ANY_LANGUAGES) -> str | None:
        test_set = make_test_set(sources=sources, references=references)
        return describe_wrong_direction(KnownTranslator(), pair, test_set)  # type: ignore[arg-type]

    assert describe(english, german) is None
    assert describe(english, german, LanguagePair("en", "de-AT")) is None
    reason = "but M translates from en to de; give --src en --tgt de"
    assert describe(english, german, LanguagePair("fr", None)) == f"the test set is read from fr to ?, {reason}"
    assert describe(english, german, LanguagePair(None, "en")) == f"the test set is read from ? to en, {reason}"
    swapped, source, target = describe(german, english), describe(german, german), describe(english, english)
    assert swapped is not None
    assert swapped.startswith("test.tsv: the two sides look swapped, exchange them: of the sources, 200 of 200 lines")
    assert source is not None
    assert source.startswith("test.tsv: of the sources, 200 of 200 lines look like de")
    assert target is not None
    assert target.startswith("test.tsv: of the references, 200 of 200 lines look like en")
    assert target.endswith(", but M translates into de")
    assert MAX_CHECKED_LINES == 2_000


def test_alignment_needs_one_language(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Seq2Seq(fit_to_tokenizer(Seq2SeqConfig(vocab=9, encoder=STACK, decoder=mirror_encoder(STACK)), tokenizer()))
    write_model(tmp_path / "model", model.eval(), tokenizer())
    (tmp_path / "test.tsv").write_text("en\tde\tpt-BR\na\tb\tc\nd\te\tf\n")
    options = ScoreOptions(alignment=Path("auto"), device=DeviceOptions(device="cpu"))
    with pytest.raises(ValueError, match=r"test\.tsv: must have one target language to be aligned; name it with --tgt"):
        score(tmp_path / "model", str(tmp_path / "test.tsv"), src="en", tgt="de,pt-BR", **vars(options))
    messages = list[str]()
    report = score(
        tmp_path / "model", str(tmp_path / "test.tsv"), src="en", tgt="de,pt-BR", notify=messages.append,
        **vars(ScoreOptions(force_decode=True, device=DeviceOptions(device="cpu", dtype="bfloat16"))),
    )  # fmt: skip
    assert report.forced is not None
    assert (report.model, report.num_pairs, len(report.forced)) == (str(tmp_path / "model"), 4, 4)
    assert (report.hypotheses, report.baseline, report.evaluation) == (None, None, None)


def test_files_of_translations_are_named_in_the_report(tmp_path: Path) -> None:
    for name, content in (("test.tsv", "a\tb c d e\nf\tg\n"), ("out", "b c d e\ng\n"), ("old", "b c\nx\n")):
        (tmp_path / name).write_text(content)
    options = ScoreOptions(hypotheses=tmp_path / "out", baseline=tmp_path / "old", save=tmp_path / "saved")
    report = score(None, str(tmp_path / "test.tsv"), src="en", tgt="de", **vars(options))
    assert (report.hypotheses, report.baseline) == (str(tmp_path / "out"), str(tmp_path / "old"))
    assert (report.model, report.search, report.search_summary, report.num_skipped) == (None, None, None, 0)
    assert report.test_set == str(tmp_path / "test.tsv")
    assert (tmp_path / "saved").read_text() == "b c d e\ng\n"
    assert report.evaluation is not None
    assert report.evaluation.exact == 100
    assert [comparison.metric for comparison in report.comparisons] == ["bleu", "chrf", "ter"]
    assert report.comparisons[1].difference > 0


def test_doubts_about_the_test_set_are_warnings(tmp_path: Path) -> None:
    identifier = LanguageIdentifier.learn({"en": lines()[0]}, {"de": lines()[1]})
    torch.manual_seed(0)
    model = Seq2Seq(fit_to_tokenizer(Seq2SeqConfig(vocab=9, encoder=STACK, decoder=mirror_encoder(STACK)), tokenizer()))
    write_model(tmp_path / "model", model.eval(), tokenizer(), {LANGUAGES_FILE: identifier.to_bytes()})
    (tmp_path / "test.tsv").write_text("a\tb\nno pair\n")
    warned, notes = list[str](), list[str]()
    options = ScoreOptions(search=SearchOptions(beam_size=1, max_length=2), device=DeviceOptions(device="cpu"))
    report = score(
        tmp_path / "model", str(tmp_path / "test.tsv"), src="fr", tgt="de", **vars(options), warn=warned.append,
        notify=notes.append,
    )  # fmt: skip
    assert (report.num_pairs, report.num_skipped) == (1, 1)
    skipped, direction = warned
    assert skipped.startswith(f"{tmp_path / 'test.tsv'}: lines without a pair are not scored: 1 ")
    assert direction.startswith("the test set is read from fr to de, but ")
    assert f"translating 1 sentences with {tmp_path / 'model'} ..." in notes
    assert report.search_summary is not None
    assert report.search_summary.startswith("greedy, ")
    assert report.search is not None
    assert report.search["max_length"] == 2


# ---- speech ----------------------------------------------------------------------------------------------------------


def write_speech_model(folder: Path, **files: bytes) -> Path:
    words = train_monolingual_tokenizer(["one two three"] * 3, TokenizerConfig(kind="char"))
    torch.manual_seed(0)
    stack = StackConfig(layers=1, width=16, heads=2, ffn_width=24)
    config = Seq2SeqConfig(
        vocab=words.target.size,
        frontend=AudioConfig(mel_bins=8),
        encoder=stack,
        decoder=mirror_encoder(stack),
        share_embeddings=False,
    )
    save_model(Seq2Seq(config), folder, words.files | files)
    return folder


def write_recordings(folder: Path) -> Path:
    soundfile = pytest.importorskip("soundfile")
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(3):
        soundfile.write(folder / f"{number}.wav", rng.normal(0, 0.1, 4_000 * (number + 1)), 16_000)
    rows = ["path\tsentence\tde", "0.wav\tone\teins", "1.wav\ttwo three\tzwei drei", "2.wav\tone two\teins zwei", ""]
    (folder / "test.tsv").write_text("\n".join(rows), encoding="utf-8")
    return folder / "test.tsv"


def test_a_speech_model_is_scored_by_the_error_rates_of_its_transcripts(tmp_path: Path) -> None:
    model, data = write_speech_model(tmp_path / "model"), write_recordings(tmp_path / "set")
    options = ScoreOptions(search=SearchOptions(beam_size=2), save=tmp_path / "out.txt", baseline=model)
    report = pipeline.score(model, str(data), src="en", **vars(options))
    assert report.evaluation is not None
    outputs = (tmp_path / "out.txt").read_text(encoding="utf-8").splitlines()
    transcriber = Transcriber.load(model)
    files = [tmp_path / "set" / f"{number}.wav" for number in range(3)]
    assert outputs == [transcriber.transcribe(file, beam_size=2).text for file in files]
    references = ["one", "two three", "one two"]
    expected = compute_metrics(outputs, references, ("wer", "cer"), resamples=0)
    assert [(s.metric, s.value) for s in report.evaluation.scores] == [(s.metric, s.value) for s in expected]
    assert [s.source for s in report.evaluation.sentences] == list(map(str, files))
    assert report.evaluation.groups == ()
    assert [c.difference for c in report.comparisons] == [0, 0]
    page = "\n".join(map(str, render_page(report, 1)))
    assert "Worst sentences  by WER of the sentence" in page
    assert list(report.evaluation.sentences[0].metrics) == ["wer", "cer"]
    assert report.search_summary is not None
    assert "at most 25 tokens per second" in report.search_summary


def test_files_of_transcripts_are_scored_by_error_rates(tmp_path: Path) -> None:
    (tmp_path / "test.tsv").write_text("path\tduration\tsentence\na.mp3\t1\ta b c d\nb.mp3\t1\te f\n")
    (tmp_path / "outputs.txt").write_text("a b c x\ne f\n")
    report = score(None, str(tmp_path / "test.tsv"), **vars(ScoreOptions(hypotheses=tmp_path / "outputs.txt")))
    assert report.evaluation is not None
    assert {score.metric: score.value for score in report.evaluation.scores}["wer"] == pytest.approx(100 / 6)
    (tmp_path / "test.tsv").write_text("image\tBild\ntext\tText\n")  # words in two languages
    report = score(None, str(tmp_path / "test.tsv"), **vars(ScoreOptions(hypotheses=tmp_path / "outputs.txt")))
    assert report.num_pairs == 2


def test_a_folder_of_recordings_and_texts_in_another_language_are_scored(tmp_path: Path) -> None:
    model, data = write_speech_model(tmp_path / "model"), write_recordings(tmp_path / "set")
    report = pipeline.score(model, str(data.parent), src="en", tgt="de")
    assert report.evaluation is not None
    assert [score.metric for score in report.evaluation.scores] == ["bleu", "chrf", "ter"]
    assert [sentence.reference for sentence in report.evaluation.sentences] == ["eins", "zwei drei", "eins zwei"]
    report = pipeline.score(model, str(data), **vars(ScoreOptions(metrics=("exact",))))
    assert report.evaluation is not None
    assert [score.metric for score in report.evaluation.scores] == ["exact"]


def test_a_speech_translator_is_scored_as_one_without_flags(tmp_path: Path) -> None:
    settings = b'[data]\nsrc = "en"\ntgt = "de"\n'
    model = write_speech_model(tmp_path / "model", **{"run.toml": settings})
    report = pipeline.score(model, str(write_recordings(tmp_path / "set")))
    assert report.evaluation is not None
    assert [score.metric for score in report.evaluation.scores] == ["bleu", "chrf", "ter"]
    assert [sentence.reference for sentence in report.evaluation.sentences] == ["eins", "zwei drei", "eins zwei"]


def test_what_only_translators_can_do_is_refused_of_a_speech_model(tmp_path: Path) -> None:
    model, data = write_speech_model(tmp_path / "model"), write_recordings(tmp_path / "set")
    for options in (ScoreOptions(force_decode=True), ScoreOptions(alignment=Path("auto"))):
        with pytest.raises(ScoreError, match="is for translators, but this is a speech model"):
            pipeline.score(model, str(data), **vars(options))


def test_recordings_that_cannot_be_read_are_reported_and_not_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = write_speech_model(tmp_path / "model"), write_recordings(tmp_path / "set")
    options = ScoreOptions(search=SearchOptions(beam_size=2), save=tmp_path / "out.txt", baseline=model)
    expected = pipeline.score(model, str(data), src="en", **vars(options))
    (data.parent / "1.wav").write_text("no audio")
    warned: list[str] = []
    report = pipeline.score(model, str(data), src="en", **vars(options), warn=warned.append)
    assert (report.num_pairs, report.num_skipped, report.num_unreadable) == (2, 1, 1)
    (warning,) = warned  # once, though two models read it
    assert warning.startswith(f"{data}:3: {data.parent / '1.wav'}: must be a recording")
    assert expected.evaluation is not None
    assert report.evaluation is not None
    first, _, third = expected.evaluation.sentences
    assert report.evaluation.sentences == (first, replace(third, number=2))
    outputs = (tmp_path / "out.txt").read_text(encoding="utf-8").split("\n")
    assert outputs == [first.output, "", third.output, ""]  # a line for each recording
    as_file = replace(options, baseline=tmp_path / "out.txt", save=None)
    compared = pipeline.score(model, str(data), src="en", **vars(as_file), warn=warned.append)
    assert [c.difference for c in compared.comparisons] == [0, 0]
    for number in (0, 2):
        (data.parent / f"{number}.wav").unlink()
    with pytest.raises(ScoreError, match=r"test\.tsv: must have files that can be read, but of 3 has none"):
        pipeline.score(model, str(data), warn=warned.append)
    (data.parent / "0.wav").write_text("no audio")
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(AttentError, match="needs soundfile"):
        pipeline.score(model, str(data))


def test_the_test_part_of_recordings_with_texts_is_scored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "b.tsv").touch()
    names = ["a", str(tmp_path / "b.tsv")]
    corpora = {
        names[0]: {"train": [Recording(Path("1"), "one")], "test": [Recording(Path("2"), "two")]},
        names[1]: {"train": [Recording(Path("3"), "three")], "valid": [Recording(Path("4"), "")]},
    }
    columns: list[tuple[str, ...]] = []
    monkeypatch.setattr(pipeline, "find_recordings", lambda name, names: columns.append(names) or corpora[name])
    test_set = pipeline.read_speech_test_set(names, LanguagePair("en", None))
    assert (test_set.sources, test_set.references) == (["2", "3"], ["two", "three"])
    assert (test_set.name, test_set.languages) == (", ".join(names), ["en", "en"])
    assert test_set.files == [tmp_path / "b.tsv"]
    assert pipeline.read_speech_test_set(names, LanguagePair("en", "de")).languages == ["de", "de"]
    corpora[names[1]] = {"valid": [Recording(Path("4"), "")]}
    with pytest.raises(CorpusError, match="contains no recordings with texts"):
        pipeline.read_speech_test_set(names[1:], LanguagePair("en", None))


def test_translators_are_scored_like_their_folders(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Seq2Seq(fit_to_tokenizer(Seq2SeqConfig(vocab=9, encoder=STACK, decoder=mirror_encoder(STACK)), tokenizer()))
    write_model(tmp_path / "model", model.eval(), tokenizer())
    (tmp_path / "test.tsv").write_text("".join(f"{source}\tTon\n" for source in lines()[0][:4]))
    translator = Translator.load(tmp_path / "model", device="cpu", engine="torch")
    data, keywords = tmp_path / "test.tsv", {"src": "en", "tgt": "de", "max_length": 6, "metrics": ["chrf"]}
    device = DeviceOptions(device="cpu", engine="torch")
    report = score(translator, data, baseline=tmp_path / "model", **keywords)
    same = score(str(tmp_path / "model"), data, baseline=translator, device=device, **keywords)
    assert (report.evaluation, report.search_summary) == (same.evaluation, same.search_summary)
    assert report.model == report.baseline == same.baseline == str(tmp_path / "model")
    assert report.comparisons[0].p_value == same.comparisons[0].p_value == 1.0
    pairs = [(source, "Ton") for source in lines()[0][:4]]
    frame = pd.DataFrame(pairs, columns=["en", "de"])
    for in_memory in (pairs, frame):
        assert score(translator, in_memory, **keywords).evaluation == report.evaluation
    assert score(translator, pairs, **keywords).test_set == "data"
    unsaved = Translator(model, tokenizer())
    assert score(unsaved, [data], **keywords).model == "a model in memory"
    with pytest.raises(ScoreError, match="this model has none"):
        score(unsaved, data, src="en", tgt="de", alignment="auto")
    with pytest.raises(ScoreError, match="give its folder"):
        score(unsaved, data, ensemble=[tmp_path / "model"], **keywords)
    with pytest.raises(ScoreError, match="this is an ensemble"):
        score(Translator(Ensemble([model, model]), tokenizer()), data, src="en", tgt="de", force_decode=True)
