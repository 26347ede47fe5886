"""`attent score` as a person meets it: figures that others can repeat, and a sentence for what cannot be scored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import sacrebleu

from attent import cli, models
from attent.decoding.alignment import ALIGNMENT_FILE, load_selection
from attent.decoding.forced_decoding import compute_perplexity, score_targets
from attent.text.tokenizer import Tokenizer
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
    """A test set, named as the command wants it."""
    for name, side in (("test.en", SOURCES), ("test.de", REFERENCES), ("out.txt", WORSE)):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in side), encoding="utf-8")
    (tmp_path / "gold").write_text("0-0 1-1\n" * COUNT, encoding="utf-8")
    return ["--data", str(tmp_path / "test.en"), "--src", "en", "--tgt", "de"]


def run(capsys: Capture, *arguments: object) -> str:
    capsys.readouterr()
    assert cli.main(["score", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def refused(capsys: Capture, *arguments: object, code: int = 1) -> str:
    capsys.readouterr()
    assert cli.main(["score", *map(str, arguments)]) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    return printed.err


# ---- translations in a file ------------------------------------------------------------------------------------------


def test_a_file_is_scored_as_sacrebleu_would(data: list[str], tmp_path: Path, capsys: Capture) -> None:
    told = json.loads(run(capsys, *data, "--hypotheses", tmp_path / "out.txt", "--json"))
    scores = {one["metric"]: one for one in told["scores"]}
    assert list(scores) == ["bleu", "chrf", "chrf++", "ter"]
    assert scores["bleu"]["value"] == sacrebleu.corpus_bleu(WORSE, [REFERENCES]).score
    assert scores["ter"]["value"] == sacrebleu.corpus_ter(WORSE, [REFERENCES]).score
    assert "tok:13a" in scores["bleu"]["signature"]
    assert (told["num_pairs"], told["num_empty"], told["model"]) == (COUNT, 1, None)
    assert [one["output"] for one in told["sentences"]] == WORSE
    assert told["worst"][0] == COUNT
    assert sum(group["sentences"] for group in told["groups"]) == COUNT


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


def test_only_numbers_can_be_asked_for_in_their_order(data: list[str], tmp_path: Path, capsys: Capture) -> None:
    printed = run(capsys, *data, "--hypotheses", tmp_path / "out.txt", "-b", "-m", "ter", "bleu")
    ter, bleu = (metric(WORSE, [REFERENCES]).score for metric in (sacrebleu.corpus_ter, sacrebleu.corpus_bleu))
    assert printed == f"{ter:.2f}\n{bleu:.2f}\n"


@pytest.mark.parametrize("where", ["-", "rows.tsv"])
def test_each_sentence_can_be_had_as_a_row(where: str, data: list[str], tmp_path: Path, capsys: Capture) -> None:
    target = where if where == "-" else str(tmp_path / where)
    printed = run(capsys, *data, "--hypotheses", tmp_path / "out.txt", "--sentences", target)
    text = printed if where == "-" else (tmp_path / where).read_text(encoding="utf-8")
    rows = [line.split("\t") for line in text.splitlines()]
    assert rows[0] == ["number", "bleu", "chrf", "source", "reference", "output"]
    assert [row[3:] for row in rows[1:]] == [list(row) for row in zip(SOURCES, REFERENCES, WORSE, strict=True)]
    assert float(rows[1][1]) == round(sacrebleu.sentence_bleu(WORSE[0], [REFERENCES[0]]).score, 2)


def test_two_files_are_compared(data: list[str], tmp_path: Path, capsys: Capture) -> None:
    arguments = [*data, "--hypotheses", tmp_path / "test.de", "--baseline", tmp_path / "out.txt", "-m", "chrf"]
    assert run(capsys, *arguments).rstrip().endswith("   better")
    told = json.loads(run(capsys, *arguments, "--json"))
    (compared,) = told["comparisons"]
    assert compared["is_better"] is True
    assert compared["value"] == pytest.approx(100)
    assert compared["baseline"] == sacrebleu.corpus_chrf(WORSE, [REFERENCES]).score
    assert compared["p_value"] < 0.05


def test_of_a_folder_the_test_part_is_scored(data: list[str], tmp_path: Path, capsys: Capture) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    for name in ("test.en", "test.de"):
        (whole / name).write_bytes((tmp_path / name).read_bytes())
        (whole / name.replace("test", "train")).write_text("a dog\n" * 3, encoding="utf-8")
    languages = ["--src", "en", "--tgt", "de", "--hypotheses", tmp_path / "test.de"]
    assert run(capsys, "--data", whole, *languages, "-b", "-m", "bleu") == "100.00\n"
    told = refused(capsys, "--data", whole / "train.en", *languages)
    assert f"a line for each of the 3 pairs of {whole / 'train.en'}" in told


# ---- translating -----------------------------------------------------------------------------------------------------


def test_what_a_model_writes_is_scored_and_saved(
    folder: Path, data: list[str], tmp_path: Path, capsys: Capture
) -> None:
    flags = [folder, *data, "--beam-size", 2, "--save", tmp_path / "saved.txt", "-m", "chrf"]
    told = json.loads(run(capsys, *flags, "--json"))
    saved = (tmp_path / "saved.txt").read_text(encoding="utf-8").split("\n")[:-1]
    assert len(saved) == COUNT
    assert told["scores"][0]["value"] == sacrebleu.corpus_chrf(saved, [REFERENCES]).score
    assert told["search"]["beam_size"] == 2
    assert "length^alpha" in told["search"]["formula"]
    again = json.loads(run(capsys, *data, "--hypotheses", tmp_path / "saved.txt", "-m", "chrf", "--json"))
    assert again["scores"] == told["scores"]
    same = run(capsys, folder, *data, "--beam-size", 2, "-m", "chrf", "--baseline", folder)
    assert "may be chance" in same


def test_the_whole_search_can_be_asked_for_and_is_told(folder: Path, data: list[str], capsys: Capture) -> None:
    flags = ["--length-penalty-type", "wu", "--alpha", 1, "--max-length", 9, "--patience", 2, "--beam-groups", 2]
    command = [folder, *data, *flags, "-m", "chrf"]
    told = json.loads(run(capsys, *command, "--json"))
    search = told["search"]
    asked = [search[name] for name in ("beam_size", "beam_groups", "patience", "max_length", "length_penalty_type")]
    assert asked == [4, 2, 2.0, 9, "wu"]
    assert search["formula"] == "score = log_prob / ((5 + length) / 6)^alpha, alpha = 1"
    words = f"beam 4 in 2 groups of diversity 0.5 of patience 2, {search['formula']}, at most 9 tokens"
    page = run(capsys, *command).splitlines()
    assert [line.split(maxsplit=1)[1] for line in page if line.startswith("search ")] == [words]
    longer = json.loads(run(capsys, folder, *data, "-m", "chrf", "--json"))
    short, long = (sum(len(one["output"]) for one in each["sentences"]) for each in (told, longer))
    assert 0 < 2 * short < long  # a model by chance writes until it is stopped


def test_the_same_seed_draws_the_same_translations(folder: Path, data: list[str], capsys: Capture) -> None:
    draws = [
        json.loads(run(capsys, folder, *data, "--top-k", 5, "--seed", seed, "-m", "chrf", "--json"))
        for seed in (1, 1, 2)
    ]
    outputs = [[one["output"] for one in told["sentences"]] for told in draws]
    assert outputs[0] == outputs[1] != outputs[2]
    assert draws[2]["search"]["sampling"] == {"temperature": 1.0, "top_k": 5, "top_p": 1.0, "seed": 2}
    page = run(capsys, folder, *data, "--top-k", 5, "-m", "chrf")
    assert "drawn at temperature 1, top 5, seed 1, score = " in page


def test_models_that_write_together_are_scored(folder: Path, data: list[str], tmp_path: Path, capsys: Capture) -> None:
    write_model(tmp_path / "other", model(seed=7), tokenizer())
    ways = ([], ["--ensemble", tmp_path / "other"], ["--ensemble", folder])
    flags = [*data, "-m", "chrf", "--engine", "torch", "--json"]
    told = [json.loads(run(capsys, folder, *flags, *way)) for way in ways]
    outputs = [[one["output"] for one in each["sentences"]] for each in told]
    assert outputs[0] == outputs[2] != outputs[1]  # beside itself a model writes as alone
    assert told[1]["search"]["ensemble"] == [str(tmp_path / "other")]


# ---- forced decoding -------------------------------------------------------------------------------------------------


def test_forced_decoding_tells_how_likely_translations_are(
    folder: Path, data: list[str], tmp_path: Path, capsys: Capture
) -> None:
    loaded, words = models.read_model(folder), Tokenizer.load(folder)
    for given, targets in (([], REFERENCES), (["--hypotheses", tmp_path / "out.txt"], WORSE)):
        wanted = score_targets(loaded, words, SOURCES, targets, to="de")
        total, tokens = sum(one.log_prob for one in wanted), sum(one.length for one in wanted)
        told = json.loads(run(capsys, folder, *data, "--force-decode", "--json", *given))["forced"]
        assert told["log_prob"] == pytest.approx(total)
        assert told["tokens"] == tokens
        assert told["perplexity"] == pytest.approx(compute_perplexity(total, tokens))
        assert [one["log_prob"] for one in told["sentences"]] == pytest.approx([one.log_prob for one in wanted])
    assert "perplexity" in run(capsys, folder, *data, "--force-decode")
    rows = run(capsys, folder, *data, "--force-decode", "--sentences", "-").splitlines()
    assert len(rows) == COUNT + 1
    assert rows[0].startswith("number\tlog_prob\t")


# ---- alignments ------------------------------------------------------------------------------------------------------


def test_the_best_heads_are_told_and_kept_in_the_folder(
    folder: Path, data: list[str], tmp_path: Path, capsys: Capture
) -> None:
    flags = [folder, *data, "--alignment", tmp_path / "gold"]
    told = json.loads(run(capsys, *flags, "--json"))["alignment"]
    assert len(told["candidates"]) == 2 * 1 * (1 + 2)
    kept = load_selection(folder, models.read_model(folder))
    best = told["best"]["choice"]
    assert (kept.layer, kept.shift) == (best["layer"], best["shift"])
    page = run(capsys, *flags)
    assert "Alignment error rate" in page
    assert "the other half" in page
    (folder / ALIGNMENT_FILE).unlink()
    page = run(capsys, folder, *data, "--alignment", "auto")
    assert "of its links are the best of both their words" in page
    assert (folder / ALIGNMENT_FILE).exists()
    (folder / ALIGNMENT_FILE).unlink()


# ---- what cannot be scored -------------------------------------------------------------------------------------------


def test_files_of_other_lengths_are_named_with_both_counts(data: list[str], tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "short.txt").write_text("one\ntwo\n", encoding="utf-8")
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "latin.txt").write_bytes(b"a\n" * (COUNT - 1) + b"M\xe4dchen\n")
    told = refused(capsys, *data, "--hypotheses", tmp_path / "short.txt")
    assert f"short.txt: must have a line for each of the {COUNT} pairs" in told
    assert "but has 2" in told
    assert "but has 0" in refused(capsys, *data, "--hypotheses", tmp_path / "empty.txt")
    assert f"latin.txt:{COUNT}: must be UTF-8" in refused(capsys, *data, "--hypotheses", tmp_path / "latin.txt")
    assert "cannot be read" in refused(capsys, *data, "--hypotheses", tmp_path / "nothing.txt")
    against = refused(capsys, *data, "--hypotheses", tmp_path / "out.txt", "--baseline", tmp_path / "short.txt")
    assert "short.txt: must have a line for each" in against


def test_an_empty_test_set_and_bad_alignments_are_refused(
    folder: Path, data: list[str], tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "none.tsv").write_bytes(b"")
    told = refused(capsys, "--data", tmp_path / "none.tsv", "--hypotheses", tmp_path / "out.txt")
    assert "none.tsv" in told
    (tmp_path / "bad").write_text("0-0\n" * 3 + "1:2\n" + "0-0\n" * (COUNT - 4), encoding="utf-8")
    assert f"{tmp_path / 'bad'}:4: a link must be" in refused(capsys, folder, *data, "--alignment", tmp_path / "bad")
    (tmp_path / "short").write_text("0-0\n", encoding="utf-8")
    assert "must have a line for each pair" in refused(capsys, folder, *data, "--alignment", tmp_path / "short")
    assert not (folder / ALIGNMENT_FILE).exists()
    assert "does not exist" in refused(capsys, tmp_path / "nowhere", *data)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "nothing to score"),
        (["--force-decode"], "--force-decode needs a model"),
        (["--alignment", "gold"], "--alignment needs a model"),
        (["MODEL", "--hypotheses", "out.txt"], "leave MODEL out, or add --force-decode"),
        (["MODEL", "--force-decode", "--baseline", "x"], "leave --baseline out"),
        (["MODEL", "--alignment", "gold", "--save", "x"], "leave --save out"),
        (["--hypotheses", "out.txt", "--worst", "-1"], "--worst must be 0 or more"),
        (["--hypotheses", "out.txt", "-m", "blue"], 'Did you mean "bleu"'),
        (["MODEL", "--force-decode", "--ensemble", "x"], "--force-decode translates nothing: leave it out"),
        (["--hypotheses", "out.txt", "--ensemble", "x"], "--hypotheses translates nothing: leave it out"),
        (["MODEL", "--threads", "0"], "--threads must be 1 or more"),
        (["MODEL", "--batch-tokens", "0"], "--batch-tokens must be 1 or more"),
        (["MODEL", "--beam-size", "0"], "`--beam-size` must be 1 or more"),
        (["MODEL", "--n-best", "2"], "--n-best"),
    ],
)
def test_what_makes_no_sense_is_a_wrong_command(
    arguments: list[str], words: str, data: list[str], capsys: Capture
) -> None:
    assert words in refused(capsys, *arguments, *data, code=2)


def test_a_device_that_is_not_there_is_named_by_its_flag(folder: Path, data: list[str], capsys: Capture) -> None:
    told = refused(capsys, folder, *data, "--device", "gpu")
    assert "device gpu: cannot be used" in told
    assert "train" not in told


def test_a_language_that_a_model_lacks_is_named_by_its_flag(folder: Path, data: list[str], capsys: Capture) -> None:
    test = Path(data[1])
    test.with_suffix(".fr").write_bytes(test.with_suffix(".de").read_bytes())
    assert "--tgt must be one of its target languages" in refused(capsys, folder, *data[:-1], "fr")
