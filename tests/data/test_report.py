"""The corpus report: on a corpus with planted faults, each fault is counted and reported with its line."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from attent.data import report as reports
from attent.data.corpus import open_corpora
from attent.data.pairs import BadLine, CorpusError, LanguagePair, Pair
from attent.data.report import ContaminationChecker, CorpusReport, CorpusSummary, CorpusSurvey, summarize_lengths
from attent.data.report_text import diagnose, format_names, list_ignored_files, render_report, to_json

NOUNS = "dog cat house tree river man woman child street car bird city book night morning".split()
VERBS = "sees likes finds follows draws remembers".split()
NAMEN = "Hund Katze Haus Baum Fluss Mann Frau Kind Straße Auto Vogel Stadt Buch Nacht Morgen".split()
VERBEN = "sieht mag findet verfolgt zeichnet erinnert".split()
LANGUAGES = LanguagePair("en", "de")


def make_pair(number: int) -> tuple[str, str]:
    """Return a distinct pair for each number, with sides of similar length."""
    a, rest = number % 15, number // 15
    b, rest = rest % 15, rest // 15
    v, house = rest % 6, rest // 6
    english = f"The {NOUNS[a]} {VERBS[v]} the {NOUNS[b]} at number {house}."
    return english, f"{NAMEN[a]} {VERBEN[v]} bei Nummer {house}: {NAMEN[b]}."


def survey_file(path: Path, *, keep_all: bool = False, against: tuple[Pair, ...] = ()) -> CorpusSurvey:
    tests = [ContaminationChecker(against, "test", ("test.tsv",))] if against else []
    survey = CorpusSurvey(keep_all=keep_all, test_sets=tests)
    for corpus in open_corpora([str(path)], LANGUAGES):
        survey.read_corpus(corpus)
    return survey


def write_lines(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")
    return path


FAULTY_PAIRS = {
    "empty": ("Nothing on the other side.", ""),
    "control": ("A bell\x07 rings at seven.", "Um sieben läutet es."),
    "max_chars": ("Word " * 500, "Wort " * 500),
    "length_ratio": ("Yes.", "Ja, und das ist der Anfang einer sehr langen Rede, die gar nicht mehr endet, " * 2),
    "identical": ("Nobody has ever translated this.", "Nobody has ever translated this."),
    "script": ("It is written in another script.", "Это написано другими буквами."),
}


@pytest.fixture(params=[100, 20_000], ids=["small", "several chunks"])
def corpus_with_faults(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, list[int]]]:
    """Write good lines with random faults and two duplicates; return the path and the lines of each fault."""
    good = [make_pair(i) for i in range(request.param)]
    faults = [(name, pair) for n, (name, pair) in enumerate(FAULTY_PAIRS.items(), 1) for pair in [pair] * n]
    faults += [("mojibake", ("It is for you.", "Es ist fÃ¼r dich.")), ("one column", ("alone", ""))]
    random.Random(7).shuffle(faults)
    lines: list[str] = []
    fault_lines: dict[str, list[int]] = {}
    step = len(good) // len(faults)
    for i, (name, (source, target)) in enumerate(faults):
        lines += [f"{a}\t{b}" for a, b in good[i * step : (i + 1) * step]]
        lines.append(source if name == "one column" else f"{source}\t{target}")
        fault_lines.setdefault(name, []).append(len(lines))
    lines += [f"{a}\t{b}" for a, b in good[len(faults) * step :]]
    lines += [lines[0], f"  {lines[1]} "]
    fault_lines["duplicates"] = [len(lines) - 1, len(lines)]
    return write_lines(tmp_path / "corpus.tsv", lines), fault_lines


def test_planted_faults_are_counted_with_their_lines(corpus_with_faults: tuple[Path, dict[str, list[int]]]) -> None:
    path, fault_lines = corpus_with_faults
    report = survey_file(path).build_report()
    total = len(path.read_text(encoding="utf-8").split("\n")) - 1
    assert report.pairs == total - 1
    assert [(bad.count, [e.line for e in bad.examples]) for bad in report.bad_lines] == [(1, fault_lines["one column"])]
    lines = {**fault_lines, "control": sorted([*fault_lines["control"], *fault_lines["mojibake"]])}
    for finding in report.dropped:
        expected = lines[finding.name]
        assert (finding.name, finding.count) == (finding.name, len(expected))
        assert [example.line for example in finding.examples] == expected[:3]
        assert {Path(example.file).name for example in finding.examples} == {"corpus.tsv"}
    assert report.kept_pairs == report.pairs - sum(finding.count for finding in report.dropped)


def test_keep_all_counts_but_keeps(corpus_with_faults: tuple[Path, dict[str, list[int]]]) -> None:
    filtered, unfiltered = (
        survey_file(corpus_with_faults[0]).build_report(),
        survey_file(corpus_with_faults[0], keep_all=True).build_report(),
    )
    assert unfiltered.dropped == filtered.dropped
    assert unfiltered.kept_pairs == unfiltered.pairs > filtered.kept_pairs
    assert not unfiltered.filters_applied


def test_counts_are_exact(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "c.tsv", ["one two\teins", "a  b c\tä", "x\ty z €"])
    report = survey_file(path).build_report()
    assert (report.source.words, report.target.words) == (6, 5)
    assert (report.source.characters, report.target.characters) == (7 + 6 + 1, 4 + 1 + 5)
    assert report.source.distinct_characters == len(set("one twoa  b cx"))
    assert (report.source.lengths.max_length, report.source.lengths.median) == (3, 2)


@pytest.mark.parametrize(("start", "shown"), [(0, 0), (40, 0), (41, 21), (500, 480)])
def test_excerpt_begins_before_the_damage(start: int, shown: int) -> None:
    text = f"{'a' * start}\x07{'b' * 300}"
    excerpt = reports._make_excerpt(text)
    assert excerpt == f"{'…' if shown else ''}{text[shown : shown + 200]}…"
    assert reports._make_excerpt("c" * 200) == "c" * 200


def test_sides_are_columns_with_a_gap(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "c.tsv", ["one two\teins", "a  b c\tä", "x\ty z €"])
    shown = render_report(survey_file(path).build_report())
    assert re.search(r"^words +6    +5$", shown, re.MULTILINE)
    assert re.search(r"^ +source \(en\)   target \(de\)$", shown, re.MULTILINE)


def test_summarize_lengths() -> None:
    import numpy as np

    result = summarize_lengths("words", np.array([0, 50, 0, 45, 0, 0, 5]))
    assert (result.mean, result.median, result.percentile_95, result.max_length) == (2.15, 1, 3, 6)


def test_languages_without_spaces_are_measured_in_characters(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "c.tsv", ["你好世界\tHello world", "谢谢\tThanks"])
    survey = CorpusSurvey()
    survey.read_corpus(open_corpora([str(path)], LanguagePair("zh", "en"))[0])
    source, target = survey.build_report().source, survey.build_report().target
    assert (source.lengths.unit, source.lengths.max_length) == ("characters", 4)
    assert (target.lengths.unit, target.lengths.max_length) == ("words", 2)


def test_retranslations_are_kept(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "c.tsv", ["Good day.\tGuten Tag.", "Good day.\tTag.", "Good day.\tGuten Tag.", "OK\tOK"]
    )
    report = survey_file(path).build_report()
    assert (report.count_dropped("duplicates"), report.kept_pairs) == (1, 3)


def test_pairs_of_several_target_languages_are_counted(tmp_path: Path) -> None:
    for tag, text in (("en", "Good day."), ("de", "Guten Tag."), ("fr", "Bonjour.")):
        write_lines(tmp_path / f"c.{tag}", [text])
    survey = CorpusSurvey()
    for corpus in open_corpora([str(tmp_path / "c")], LanguagePair("en", "de,fr")):
        survey.read_corpus(corpus)
    report = survey.build_report()
    assert report.pairs == 2
    assert report.target.languages == ("de", "fr")


def test_pair_in_another_target_language_is_no_duplicate(tmp_path: Path) -> None:
    for tag, text in (("en", "OK"), ("de", "OK."), ("fr", "OK.")):
        write_lines(tmp_path / f"c.{tag}", [text, text])
    result = {}
    for by_target in (True, False):
        survey = CorpusSurvey(per_target=by_target)
        for corpus in open_corpora([str(tmp_path / "c")], LanguagePair("en", "de,fr")):
            survey.read_corpus(corpus)
        result[by_target] = survey.build_report().count_dropped("duplicates")
    assert result == {True: 2, False: 3}


def test_duplicates_across_corpora_without_language(tmp_path: Path) -> None:
    survey = CorpusSurvey()
    for name, languages in (("a.tsv", LanguagePair()), ("b.tsv", LANGUAGES)):
        survey.read_corpus(open_corpora([str(write_lines(tmp_path / name, ["Good day.\tGuten Tag."]))], languages)[0])
    assert survey.build_report().count_dropped("duplicates") == 1


def test_ignored_files_are_reported(tmp_path: Path) -> None:
    for name in ("train.tsv", "more.tsv", "x.en"):
        write_lines(tmp_path / name, ["Good day.\tGuten Tag."])
    report = survey_file(tmp_path).build_report()
    messages = list(format_diagnostics(report))
    assert any(text.startswith("2 Not read: more.tsv (") for text in messages)
    assert any(text.startswith("1 Not read: x.en (") for text in messages)
    assert len(json.loads(json.dumps(to_json(report)))["corpora"][0]["ignored_files"]) == 2


def test_file_read_for_another_language_pair_is_not_ignored() -> None:
    origin = CorpusSummary(
        "c", ("c/x.en", "c/x.de"), "en", "de", 1.0, 20_000, 0, ignored_files=("x.fr (why)", "y.en (why)")
    )
    other = replace(origin, files=("c/x.en", "c/x.fr"), ignored_files=("x.de (why)", "y.en (why)"))
    assert list_ignored_files([origin, other]) == ["y.en (why)"]
    assert format_names(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"


def test_truncated_corpus_is_reported_up_to_the_error(tmp_path: Path) -> None:
    write_lines(tmp_path / "c.en", [make_pair(i)[0] for i in range(30)])
    write_lines(tmp_path / "c.de", [make_pair(i)[1] for i in range(20)])
    survey = CorpusSurvey()
    with pytest.raises(CorpusError, match="30"):
        survey.read_corpus(open_corpora([str(tmp_path / "c")], LANGUAGES)[0])
    report = survey.build_report(error="broken")
    assert report.pairs == report.corpora[0].pairs == 20
    assert "stopped early" in diagnose(report)[0].text


def test_chunk_without_pairs_does_not_end_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "CHUNK_PAIRS", 4)
    path = write_lines(tmp_path / "c.tsv", [*["alone"] * 9, "Good day.\tGuten Tag.", *["alone"] * 8, "One\tEins"])
    report = survey_file(path).build_report()
    assert (report.pairs, report.bad_lines[0].count) == (2, 17)


# ---- diagnostics -----------------------------------------------------------------------------------------------------


def format_diagnostics(report: CorpusReport) -> Iterator[str]:
    return (f"{diagnostic.severity} {diagnostic.text}" for diagnostic in diagnose(report))


def test_clean_corpus_has_no_problems(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "c.tsv", [f"{a}\t{b}" for a, b in map(make_pair, range(10_500))])
    assert list(format_diagnostics(survey_file(path).build_report())) == ["0 No serious problems found."]


def test_diagnostics_are_sorted_by_severity(tmp_path: Path) -> None:
    good = [f"{a}\t{b}" for a, b in map(make_pair, range(200))]
    path = write_lines(tmp_path / "c.tsv", [*good, *good[:20], *["alone"] * 30])
    test = tuple(Pair(*make_pair(i), "test.tsv", i + 1) for i in range(190, 250))
    messages = list(format_diagnostics(survey_file(path, against=test).build_report()))
    assert messages == sorted(messages, reverse=True, key=lambda text: text[0])
    assert any("10 in this corpus" in text and "inflated" in text for text in messages)
    assert any("30 lines could not be read as a pair" in text for text in messages)
    assert any("of the pairs are duplicates" in text for text in messages)
    assert any("Only 200 pairs: a model would overfit" in text for text in messages)
    assert not any("No serious problems" in text for text in messages)


def test_singular_forms(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "c.tsv", ["Good day to all of you here.\tGuten Tag."])
    test = (Pair("Good day to all of you here.", "Einen guten Tag euch allen.", "test.tsv", 1),)
    messages = list(format_diagnostics(survey_file(path, against=test).build_report()))
    assert any(text.startswith("2 Only 1 pair: a model would overfit.") for text in messages)
    assert any("test: of 1 sentence, 1 in this corpus" in text for text in messages)


def test_empty_test_set_is_reported(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "c.tsv", [f"{a}\t{b}" for a, b in map(make_pair, range(50))])
    survey = CorpusSurvey(
        test_sets=[
            ContaminationChecker([BadLine("one column only", "test.tsv", 1, "x")], "test.tsv", ("test.tsv",)),
        ]
    )
    survey.read_corpus(open_corpora([str(path)], LANGUAGES)[0])
    messages = list(format_diagnostics(survey.build_report()))
    assert "2 test.tsv has no pairs: nothing could be checked." in messages
    assert "1 1 line of test.tsv could not be read as a pair." in messages
    assert to_json(survey.build_report())["test_sets"][0]["bad_lines"] == 1
    assert not any("No sentence" in text for text in messages)


def test_short_matches_are_reported(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "c.tsv", ["Click OK now\tJetzt OK klicken", *(f"{a}\t{b}" for a, b in map(make_pair, range(50)))]
    )
    test = (Pair("Click OK now", "Jetzt OK klicken", "test.tsv", 1),) * 3
    messages = list(format_diagnostics(survey_file(path, against=test).build_report()))
    assert "1 No sentence of test is in this corpus, except 3 of three words or less." in messages


@pytest.mark.parametrize(("empty", "is_reported"), [(1, False), (2, True)])
def test_more_than_a_hundredth_of_empty_sides_is_reported(tmp_path: Path, empty: int, is_reported: bool) -> None:
    lines = [f"{source}\t{target}" for source, target in map(make_pair, range(100 - empty))]
    path = write_lines(tmp_path / "a.tsv", [*lines, *(f"{' ' * i}a\t{' ' * i}" for i in range(1, 1 + empty))])
    report = survey_file(path).build_report()
    assert any("with an empty side: 2.0%" in line for line in format_diagnostics(report)) == is_reported


def test_unreadable_lines_are_reported_with_reason_and_line(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_bytes(b"a\tb\nf\xfcr\tpour\n")
    (text,) = (line for line in format_diagnostics(survey_file(path).build_report()) if "could not" in line)
    assert text.endswith("1 line could not be read as a pair and is skipped: not UTF-8, first in a.tsv:2.")


def test_swapped_sides_are_suspected(tmp_path: Path) -> None:
    lines = [f"Это предложение номер {i} на русском\tThis is sentence number {i} in English" for i in range(40)]
    survey = CorpusSurvey()
    survey.read_corpus(open_corpora([str(write_lines(tmp_path / "c.tsv", lines))], LanguagePair("en", "ru"))[0])
    assert any("--src and --tgt swapped" in text for text in format_diagnostics(survey.build_report()))


def test_json_has_every_field(corpus_with_faults: tuple[Path, dict[str, list[int]]]) -> None:
    report = survey_file(corpus_with_faults[0], against=(Pair(*make_pair(3), "test.tsv", 9),)).build_report()
    data = json.loads(json.dumps(to_json(report)))
    assert data["pairs"] == report.pairs
    assert data["test_sets"][0]["matches"][0]["test"]["line"] == 9
    assert {finding["name"]: finding["count"] for finding in data["dropped"]}["script"] == 6
    assert data["diagnostics"][0]["severity"] == 2
