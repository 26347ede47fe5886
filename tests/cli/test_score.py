"""`attent score`: scores are those of sacreBLEU, and bad input is refused with one sentence."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import sacrebleu

from attent import cli, models
from attent.data.augment import KINDS
from attent.decoding.alignment import ALIGNMENT_FILE, load_selection
from attent.decoding.forced_decoding import compute_perplexity, score_targets
from attent.scoring.metrics import ScoreError
from attent.scoring.pipeline import score
from attent.text.language_id import LANGUAGES_FILE, LanguageIdentifier
from attent.text.tokenizer import Tokenizer
from attent.text.tokenizer_training import TokenizerConfig, train_tokenizer
from attent.training.loop import write_model
from tests.text.corpus import lines, tokenizer
from tests.training.toys import model

COUNT = 12
SOURCES, REFERENCES = (list(side[:COUNT]) for side in lines())
WORSE = [*(text.replace("ein", "kein").replace("ll", "l").replace("t", "d") for text in REFERENCES[:-1]), ""]

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("random") / "model"
    write_model(folder, model(), tokenizer())
    return folder


@pytest.fixture
def data(tmp_path: Path) -> list[str]:
    """Return the flags of a test set."""
    for name, side in (("test.en", SOURCES), ("test.de", REFERENCES), ("out.txt", WORSE)):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in side), encoding="utf-8")
    (tmp_path / "gold").write_text("0-0 1-1\n" * COUNT, encoding="utf-8")
    return ["--data", str(tmp_path / "test.en"), "--src", "en", "--tgt", "de"]


def run(capsys: Capture, *arguments: object) -> str:
    capsys.readouterr()
    assert cli.main(["score", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def run_failing(capsys: Capture, *arguments: object, code: int = 1) -> str:
    capsys.readouterr()
    assert cli.main(["score", *map(str, arguments)]) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    return printed.err


# ---- languages ------------------------------------------------------------------------------------------------------


def test_wrong_direction_and_swapped_sides_are_warnings(data: list[str], tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "model"
    identifier = LanguageIdentifier.learn({"en": lines()[0]}, {"de": lines()[1]})
    without_tags = train_tokenizer(*lines(), TokenizerConfig(vocab=tokenizer().source.size))
    write_model(path, model(), without_tags, {LANGUAGES_FILE: identifier.to_bytes()})
    run_flags = [path, "--beam-size", "1", "--max-length", "2"]
    swapped = [*data[:2], "--src", "de", "--tgt", "en"]
    for flags, expected in (
        (data, ""),
        (swapped, f"read from de to en, but {path} translates from en to de; give --src en --tgt de"),
    ):
        capsys.readouterr()
        assert cli.main(["score", *map(str, run_flags), *flags]) == 0
        warning = capsys.readouterr().err
        assert expected in warning
        assert bool(expected) == bool(warning)
    rows = [f"{reference}\t{source}\n" for source, reference in zip(SOURCES, REFERENCES, strict=True)]
    (tmp_path / "swapped.tsv").write_text("".join(rows), encoding="utf-8")
    flags = ["--data", str(tmp_path / "swapped.tsv"), "--src", "en", "--tgt", "de"]
    assert cli.main(["score", *map(str, run_flags), *flags]) == 0
    warning = capsys.readouterr().err
    assert (
        f"the two sides look swapped, exchange them: of the sources, {COUNT} of {COUNT} lines look like de" in warning
    )


# ---- translations in a file ------------------------------------------------------------------------------------------


def test_a_file_is_scored_as_sacrebleu_would(data: list[str], tmp_path: Path, capsys: Capture) -> None:
    result = json.loads(run(capsys, *data, "--hypotheses", tmp_path / "out.txt", "--json"))
    scores = {score["metric"]: score for score in result["scores"]}
    assert list(scores) == ["bleu", "chrf", "ter"]
    assert scores["bleu"]["value"] == sacrebleu.corpus_bleu(WORSE, [REFERENCES]).score
    assert scores["ter"]["value"] == sacrebleu.corpus_ter(WORSE, [REFERENCES]).score
    assert "tok:13a" in scores["bleu"]["signature"]
    assert (result["num_pairs"], result["num_empty"], result["model"]) == (COUNT, 1, None)
    assert [sentence["output"] for sentence in result["sentences"]] == WORSE
    assert result["worst"][0] == COUNT
    assert sum(group["sentences"] for group in result["groups"]) == COUNT


def test_the_page_has_scores_signatures_lengths_and_the_worst(data: list[str], tmp_path: Path, capsys: Capture) -> None:
    page = run(capsys, *data, "--hypotheses", tmp_path / "out.txt", "--worst", 2, "-m", "bleu", "ter")
    bleu = sacrebleu.corpus_bleu(WORSE, [REFERENCES]).score
    assert f"BLEU   {bleu:.2f}" in page
    assert " ± " in page
    assert "TER    nrefs:1|bs:1000|seed:12345|case:lc|" in page
    assert "chrF++" not in page
    assert f"pair {COUNT}  BLEU 0.0, chrF 0.0" in page
    assert page.count("  reference  ") == 2
    assert "1 empty" in page
    ratio = sum(map(len, WORSE)) / sum(map(len, REFERENCES))
    assert f"; length ratio {ratio:.3f} (characters of the output to those of the reference)" in page


def test_exact_matches_are_a_metric(data: list[str], tmp_path: Path, capsys: Capture) -> None:
    matches = sum(output == reference for output, reference in zip(WORSE, REFERENCES, strict=True))
    result = json.loads(run(capsys, *data, "--hypotheses", tmp_path / "out.txt", "--json", "-m", "exact", "chrf++"))
    assert result["scores"][0]["value"] == pytest.approx(100 * matches / COUNT)


def test_scores_are_in_the_order_of_the_metrics(data: list[str], tmp_path: Path, capsys: Capture) -> None:
    result = json.loads(run(capsys, *data, "--hypotheses", tmp_path / "out.txt", "--json", "-m", "ter", "bleu"))
    ter, bleu = (metric(WORSE, [REFERENCES]).score for metric in (sacrebleu.corpus_ter, sacrebleu.corpus_bleu))
    assert [(score["metric"], score["value"]) for score in result["scores"]] == [("ter", ter), ("bleu", bleu)]


def test_two_files_are_compared(data: list[str], tmp_path: Path, capsys: Capture) -> None:
    arguments = [*data, "--hypotheses", tmp_path / "test.de", "--baseline", tmp_path / "out.txt", "-m", "chrf"]
    assert run(capsys, *arguments).rstrip().endswith("   better")
    result = json.loads(run(capsys, *arguments, "--json"))
    (comparison,) = result["comparisons"]
    assert comparison["is_better"] is True
    assert comparison["value"] == pytest.approx(100)
    assert comparison["baseline"] == sacrebleu.corpus_chrf(WORSE, [REFERENCES]).score
    assert comparison["p_value"] < 0.05


def test_robustness_is_a_table_and_json(folder: Path, data: list[str], capsys: Capture) -> None:
    arguments = [folder, *data, "--robust", "-m", "chrf", "--beam-size", "1", "--max-length", "8", "--engine", "torch"]
    page = run(capsys, *arguments)
    rows = page.partition("Robustness")[2].partition("By source length")[0].splitlines()[2:]
    names = ["clean", *(kind.help for kind in KINDS.values() if kind.is_tested)]
    assert [row[: len(name)] for row, name in zip(rows, names, strict=False)] == names
    result = json.loads(run(capsys, *arguments, "--json"))
    assert [row["name"] for row in result["robustness"]] == [name for name, kind in KINDS.items() if kind.is_tested]
    clean = result["scores"][0]["value"]
    for row in result["robustness"]:
        assert row["scores"][0]["value"] - clean == pytest.approx(row["differences"][0])
    for others, problem in (
        (["--hypotheses", "x"], "with --hypotheses nothing is translated"),
        (["--force-decode"], "--force-decode translates nothing: leave --robust out"),
    ):
        assert problem in run_failing(capsys, folder, *data, "--robust", *others, code=2)
    assert "--robust needs a model" in run_failing(capsys, *data, "--robust", code=2)
    with pytest.raises(ScoreError, match="`robust` translates"):
        score(folder, data[1], src="en", tgt="de", robust=True, force_decode=True)


def test_the_test_part_of_a_folder_is_scored(data: list[str], tmp_path: Path, capsys: Capture) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    for name in ("test.en", "test.de"):
        (whole / name).write_bytes((tmp_path / name).read_bytes())
        (whole / name.replace("test", "train")).write_text("a dog\n" * 3, encoding="utf-8")
    languages = ["--src", "en", "--tgt", "de", "--hypotheses", tmp_path / "test.de"]
    result = json.loads(run(capsys, "--data", whole, *languages, "--json", "-m", "bleu"))
    assert result["scores"][0]["value"] == pytest.approx(100)
    error = run_failing(capsys, "--data", whole / "train.en", *languages)
    assert f"a line for each of the 3 pairs of {whole / 'train.en'}" in error


# ---- translating -----------------------------------------------------------------------------------------------------


def test_translations_are_scored_and_saved(folder: Path, data: list[str], tmp_path: Path, capsys: Capture) -> None:
    flags = [folder, *data, "--beam-size", 2, "--save", tmp_path / "saved.txt", "-m", "chrf"]
    result = json.loads(run(capsys, *flags, "--json"))
    saved = (tmp_path / "saved.txt").read_text(encoding="utf-8").split("\n")[:-1]
    assert len(saved) == COUNT
    assert result["scores"][0]["value"] == sacrebleu.corpus_chrf(saved, [REFERENCES]).score
    assert result["search"]["beam_size"] == 2
    assert "length^alpha" in result["search"]["formula"]
    again = json.loads(run(capsys, *data, "--hypotheses", tmp_path / "saved.txt", "-m", "chrf", "--json"))
    assert again["scores"] == result["scores"]
    same = run(capsys, folder, *data, "--beam-size", 2, "-m", "chrf", "--baseline", folder)
    assert "not significant" in same


def test_search_options_are_applied_and_reported(folder: Path, data: list[str], capsys: Capture) -> None:
    flags = ["--length-penalty-type", "wu", "--alpha", 1, "--max-length", 9, "--patience", 2, "--beam-groups", 2]
    command = [folder, *data, *flags, "-m", "chrf"]
    result = json.loads(run(capsys, *command, "--json"))
    search = result["search"]
    values = [search[name] for name in ("beam_size", "beam_groups", "patience", "max_length", "length_penalty_type")]
    assert values == [4, 2, 2.0, 9, "wu"]
    assert search["formula"] == "score = log_prob / ((5 + length) / 6)^alpha, alpha = 1"
    summary = f"beam 4, {search['formula']}, at most 9 tokens, patience 2.0, beam_groups 2"
    page = run(capsys, *command).splitlines()
    assert [line.split(maxsplit=1)[1] for line in page if line.startswith("search ")] == [summary]
    longer = json.loads(run(capsys, folder, *data, "-m", "chrf", "--json"))
    short, long = (sum(len(s["output"]) for s in each["sentences"]) for each in (result, longer))
    assert 0 < 2 * short < long  # an untrained model generates up to the maximum length


def test_the_same_seed_draws_the_same_translations(folder: Path, data: list[str], capsys: Capture) -> None:
    draws = [
        json.loads(run(capsys, folder, *data, "--top-k", 5, "--seed", seed, "-m", "chrf", "--json"))
        for seed in (1, 1, 2)
    ]
    outputs = [[sentence["output"] for sentence in result["sentences"]] for result in draws]
    assert outputs[0] == outputs[1] != outputs[2]
    assert draws[2]["search"]["sampling"] == {"temperature": 1.0, "top_k": 5, "top_p": 1.0, "seed": 2}
    page = run(capsys, folder, *data, "--top-k", 5, "-m", "chrf")
    assert "sampling (temperature 1, top_k 5, top_p 1, seed 1), score = " in page


def test_an_ensemble_is_scored(folder: Path, data: list[str], tmp_path: Path, capsys: Capture) -> None:
    write_model(tmp_path / "other", model(seed=7), tokenizer())
    ensembles = ([], ["--ensemble", tmp_path / "other"], ["--ensemble", folder])
    flags = [*data, "-m", "chrf", "--engine", "torch", "--json"]
    results = [json.loads(run(capsys, folder, *flags, *ensemble)) for ensemble in ensembles]
    outputs = [[sentence["output"] for sentence in result["sentences"]] for result in results]
    assert outputs[0] == outputs[2] != outputs[1]  # an ensemble of copies equals the model
    assert results[1]["search"]["ensemble"] == [str(tmp_path / "other")]


# ---- forced decoding -------------------------------------------------------------------------------------------------


def test_forced_decoding_scores_given_translations(
    folder: Path, data: list[str], tmp_path: Path, capsys: Capture
) -> None:
    loaded, loaded_tokenizer = models.read_model(folder), Tokenizer.load(folder)
    for flags, targets in (([], REFERENCES), (["--hypotheses", tmp_path / "out.txt"], WORSE)):
        expected = score_targets(loaded, loaded_tokenizer, SOURCES, targets, to="de")
        total, tokens = sum(scores.log_prob for scores in expected), sum(scores.length for scores in expected)
        result = json.loads(run(capsys, folder, *data, "--force-decode", "--json", *flags))["forced"]
        assert result["log_prob"] == pytest.approx(total)
        assert result["tokens"] == tokens
        assert result["perplexity"] == pytest.approx(compute_perplexity(total, tokens))
        assert [s["log_prob"] for s in result["sentences"]] == pytest.approx([s.log_prob for s in expected])
    assert "perplexity" in run(capsys, folder, *data, "--force-decode")


# ---- alignments ------------------------------------------------------------------------------------------------------


def test_the_best_heads_are_reported_and_saved(folder: Path, data: list[str], tmp_path: Path, capsys: Capture) -> None:
    folder, other = (shutil.copytree(folder, tmp_path / name) for name in ("first", "second"))
    flags = [folder, *data, "--alignment", tmp_path / "gold"]
    result = json.loads(run(capsys, *flags, "--json"))["alignment"]
    assert len(result["candidates"]) == 2 * 1 * (1 + 2)
    saved = load_selection(folder, models.read_model(folder))
    best = result["best"]["choice"]
    assert (saved.layer, saved.shift) == (best["layer"], best["shift"])
    page = run(capsys, *flags)
    assert "Alignment error rate" in page
    assert "test half" in page
    page = run(capsys, other, *data, "--alignment", "auto")
    assert "of their links are mutual" in page
    assert (other / ALIGNMENT_FILE).exists()


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_no_input_is_overwritten(folder: Path, data: list[str], tmp_path: Path, capsys: Capture) -> None:
    hypotheses = tmp_path / "hypotheses.txt"
    hypotheses.write_text("a\n" * COUNT, encoding="utf-8")
    os.link(hypotheses, tmp_path / "link.txt")
    test_file = tmp_path / "test.de"
    before = test_file.read_bytes()
    for output, inputs in ((test_file, [folder]), (tmp_path / "link.txt", ["--hypotheses", hypotheses])):
        assert "must not be an input" in run_failing(capsys, *inputs, *data, "--save", output)
    assert test_file.read_bytes() == before
    assert hypotheses.read_text(encoding="utf-8") == "a\n" * COUNT


def test_files_of_different_lengths_are_refused(data: list[str], tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "short.txt").write_text("one\ntwo\n", encoding="utf-8")
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "latin.txt").write_bytes(b"a\n" * (COUNT - 1) + b"M\xe4dchen\n")
    error = run_failing(capsys, *data, "--hypotheses", tmp_path / "short.txt")
    assert f"short.txt: must have a line for each of the {COUNT} pairs" in error
    assert "but has 2" in error
    assert "but has 0" in run_failing(capsys, *data, "--hypotheses", tmp_path / "empty.txt")
    assert f"latin.txt:{COUNT}: must be UTF-8" in run_failing(capsys, *data, "--hypotheses", tmp_path / "latin.txt")
    assert "cannot be read" in run_failing(capsys, *data, "--hypotheses", tmp_path / "nothing.txt")
    error = run_failing(capsys, *data, "--hypotheses", tmp_path / "out.txt", "--baseline", tmp_path / "short.txt")
    assert "short.txt: must have a line for each" in error


def test_an_empty_test_set_and_bad_alignments_are_refused(
    folder: Path, data: list[str], tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "none.tsv").write_bytes(b"")
    assert "none.tsv" in run_failing(capsys, "--data", tmp_path / "none.tsv", "--hypotheses", tmp_path / "out.txt")
    (tmp_path / "bad").write_text("0-0\n" * 3 + "1:2\n" + "0-0\n" * (COUNT - 4), encoding="utf-8")
    assert f"{tmp_path / 'bad'}:4: a link must be" in run_failing(
        capsys, folder, *data, "--alignment", tmp_path / "bad"
    )
    (tmp_path / "short").write_text("0-0\n", encoding="utf-8")
    assert "must have a line for each pair" in run_failing(capsys, folder, *data, "--alignment", tmp_path / "short")
    assert not (folder / ALIGNMENT_FILE).exists()
    assert "does not exist" in run_failing(capsys, tmp_path / "nowhere", *data)


def test_a_missing_device_is_named_by_its_flag(folder: Path, data: list[str], capsys: Capture) -> None:
    error = run_failing(capsys, folder, *data, "--device", "gpu")
    assert "device gpu: cannot be used" in error
    assert "train" not in error


def test_an_unknown_language_is_named_by_its_flag(folder: Path, data: list[str], capsys: Capture) -> None:
    test = Path(data[1])
    test.with_suffix(".fr").write_bytes(test.with_suffix(".de").read_bytes())
    assert "--tgt must be one of its target languages" in run_failing(capsys, folder, *data[:-1], "fr")


def test_skipped_lines_are_explained(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "half.en").write_text("a dog\na cat\n", encoding="utf-8")
    (tmp_path / "half.de").write_bytes("ein Hund\nein K\xe4tzchen\n".encode("latin-1"))
    data = ["--data", str(tmp_path / "half.en"), "--src", "en", "--tgt", "de"]
    assert cli.main(["score", str(folder), *data]) == 0
    assert f"1 not UTF-8 (the first: {tmp_path}/half.de:2)" in capsys.readouterr().err
