"""The corpus report: on a corpus with planted faults, each fault is counted and reported with its line."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from attent.data import contamination
from attent.data import report as reports
from attent.data.contamination import ContaminationChecker
from attent.data.corpus import open_corpora
from attent.data.diagnostics import describe_limits, diagnose, format_names, list_ignored_files, to_json
from attent.data.estimate import MIN_PAIRS, CorpusEstimate, TokenEstimate, TrainingEstimate, estimate_tokens
from attent.data.pairs import BadLine, CorpusError, LanguagePair, Pair
from attent.data.report import CorpusReport, CorpusSummary, CorpusSurvey, HeldOutSet, summarize_lengths
from attent.data.report_text import render_report
from attent.training.autoconfig import estimate_corpus

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
    tests = [HeldOutSet("test", ("test.tsv",), ContaminationChecker(against))] if against else []
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
    assert report.mojibake_pairs == 1
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
    assert set(report.target.rare_characters) == set("einsäyz€")
    assert (report.source.lengths.max_length, report.source.lengths.median) == (3, 2)
    assert report.source.lengths.counts == (0, 1, 1, 1)


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


def test_retranslations_are_counted_and_kept(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "c.tsv", ["Good day.\tGuten Tag.", "Good day.\tTag.", "Good day.\tGuten Tag.", "OK\tOK"]
    )
    report = survey_file(path).build_report()
    assert (
        report.retranslated_pairs,
        report.count_dropped("duplicates"),
        report.identical_pairs,
        report.kept_pairs,
    ) == (1, 1, 1, 3)


def test_target_languages_are_no_retranslations(tmp_path: Path) -> None:
    for tag, text in (("en", "Good day."), ("de", "Guten Tag."), ("fr", "Bonjour.")):
        write_lines(tmp_path / f"c.{tag}", [text])
    survey = CorpusSurvey()
    for corpus in open_corpora([str(tmp_path / "c")], LanguagePair("en", "de,fr")):
        survey.read_corpus(corpus)
    report = survey.build_report()
    assert (report.pairs, report.retranslated_pairs) == (2, 0)
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


def test_keep_all_sample_has_all_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = [f"{a}\t{b}" for a, b in map(make_pair, range(20))]
    path = write_lines(tmp_path / "c.tsv", [*good, good[0], "Only one side.\t", "x\t" + "y" * 5_000])
    assert len(survey_file(path, keep_all=True).sample.pairs()) == 23
    assert len(survey_file(path).sample.pairs()) == 20
    monkeypatch.setattr(reports, "ESTIMATE_SAMPLE_SIZE", 100)
    path = write_lines(tmp_path / "d.tsv", [line for line in good for _ in range(200)])
    sample = survey_file(path, keep_all=True).sample.pairs()
    assert len(sample) == 100
    assert len(set(sample)) > 15  # not only the few pairs with the lowest hashes


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


def test_unseen_characters_of_the_test_set(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "c.tsv", [f"{a}\t{b}" for a, b in map(make_pair, range(50))])
    test = (Pair("A tree ☃ here", "Baum ☃ ß Ж", "test.tsv", 1), Pair("The dog.", "Hund.", "test.tsv", 2))
    (result,) = survey_file(path, against=test).build_report().test_sets
    assert "☃" in result.unseen_characters[0]
    assert set("☃Ж") <= set(result.unseen_characters[1])
    assert " " not in result.unseen_characters[0] + result.unseen_characters[1]
    assert result.unseen_sentences == 1


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


def test_sample_is_uniform_and_order_independent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(reports, "ESTIMATE_SAMPLE_SIZE", 50)
    monkeypatch.setattr(reports, "CHUNK_PAIRS", 100)
    lines = [f"{a}\t{b}" for a, b in map(make_pair, range(3_000))]
    forward = survey_file(write_lines(tmp_path / "a.tsv", lines)).sample.pairs()
    backward = survey_file(write_lines(tmp_path / "b.tsv", lines[::-1])).sample.pairs()
    assert forward == backward
    assert len(set(forward)) == 50
    numbers = [lines.index(f"{a}\t{b}") for a, b in forward]
    assert 900 < sum(numbers) / 50 < 2_100


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
            HeldOutSet(
                "test.tsv", ("test.tsv",), ContaminationChecker([BadLine("one column only", "test.tsv", 1, "x")])
            )
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
    assert "1 No sentence of test is in this corpus, exactly or nearly, except 3 of three words or less." in messages


def test_limits_of_the_search_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contamination, "MAX_NEAR_SENTENCES", 20)
    path = write_lines(tmp_path / "c.tsv", [f"{a}\t{b}" for a, b in map(make_pair, range(50))])
    test = tuple(Pair(f"Entirely new words {i}", f"Ganz neue Worte {i}", "test.tsv", i) for i in range(25))
    report = survey_file(path, against=test).build_report()
    assert any(
        "near duplicates were searched for the first 20 of 25 sentences only" in text
        for text in format_diagnostics(report)
    )
    assert to_json(report)["test_sets"][0]["contamination"]["near_checked"] == 20
    overlap = replace(report.test_sets[0].contamination, near_checked=25, uncompared_lines=1_234)
    assert describe_limits(overlap).startswith("1,234 different lines of the corpus had too many")
    assert describe_limits(replace(overlap, uncompared_lines=0)) == ""


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


def test_unfinished_entries_and_retranslations_are_normal(tmp_path: Path) -> None:
    path = tmp_path / "a.po"
    entries = [("", "Language: de\\n"), ("A dog runs", "Ein Hund läuft"), ("A cat", ""), ("A bird", "")]
    path.write_text("\n".join(f'msgid "{source}"\nmsgstr "{target}"\n' for source, target in entries))
    messages = list(format_diagnostics(survey_file(path).build_report()))
    assert "1 2 entries without a finished translation: normal in such files." in messages
    assert not any("could not be read" in text for text in messages)
    good = [f"{a}\t{b}" for a, b in map(make_pair, range(100))]
    for repeated, is_reported in ((5, False), (6, True)):
        lines = [*good[repeated:], *(f"{line} again" for line in good[-repeated:])]
        report = survey_file(write_lines(tmp_path / "a.tsv", lines)).build_report()
        assert (report.pairs, report.retranslated_pairs) == (100, repeated)
        text = "1 6.0% of the pairs repeat a source with another translation: normal, they are kept."
        assert (text in format_diagnostics(report)) == is_reported


def test_rows_that_are_shown_only_where_they_apply(tmp_path: Path) -> None:
    good = [f"{a}\t{b}" for a, b in map(make_pair, range(60))]
    report = survey_file(write_lines(tmp_path / "a.tsv", good), against=(Pair("x", "y", "t.tsv", 1),)).build_report()
    (test_set,) = (replace(test_set, unseen_sentences=0) for test_set in report.test_sets)
    plain = render_report(replace(report, test_sets=(test_set,)))
    assert "of them with" not in plain
    assert "none of them is in the corpus, exactly or nearly" in plain
    some = replace(report, identical_pairs=3, retranslated_pairs=6)
    lines = [" ".join(line.split()) for line in render_report(some).splitlines()]
    assert "3 5.0% of them with equal sides (names, codes ...)" in lines
    assert any(line.startswith("6 10% of them with a source that occurred before, translated") for line in lines)
    overlap = replace(test_set.contamination, sentences=0)
    empty = replace(report, test_sets=(replace(test_set, contamination=overlap),))
    assert "it has no pairs" in render_report(empty)
    overlap = replace(test_set.contamination, uncompared_lines=1_234)
    limited = replace(report, test_sets=(replace(test_set, contamination=overlap),))
    assert "1,234 different lines of the corpus had too many" in render_report(limited)


def test_swapped_sides_are_suspected(tmp_path: Path) -> None:
    lines = [f"Это предложение номер {i} на русском\tThis is sentence number {i} in English" for i in range(40)]
    survey = CorpusSurvey()
    survey.read_corpus(open_corpora([str(write_lines(tmp_path / "c.tsv", lines))], LanguagePair("en", "ru"))[0])
    assert any("--src and --tgt swapped" in text for text in format_diagnostics(survey.build_report()))


def test_json_has_every_field(corpus_with_faults: tuple[Path, dict[str, list[int]]]) -> None:
    report = survey_file(corpus_with_faults[0], against=(Pair(*make_pair(3), "test.tsv", 9),)).build_report()
    data = json.loads(json.dumps(to_json(report)))
    assert data["pairs"] == report.pairs
    assert data["test_sets"][0]["contamination"]["matches"][0]["test"]["line"] == 9
    assert {finding["name"]: finding["count"] for finding in data["dropped"]}["script"] == 6
    assert data["diagnostics"][0]["severity"] == 2


# ---- estimates -------------------------------------------------------------------------------------------------------


def test_estimate_has_tokens_and_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attent.training.autoconfig.CPU_MINUTES", 1e6)
    sample = [make_pair(i) for i in range(600)]
    result = estimate_corpus(
        sample, num_pairs=6_000, num_characters=10 * sum(len(a) + len(b) for a, b in sample), seconds=0.01
    )
    assert result is not None
    assert result.tokens.sampled_pairs == 600
    word_count = sum(len(source.split()) for source, _ in sample) * 10
    assert word_count < result.tokens.source_tokens < 4 * word_count
    assert result.tokens.source_tokens == pytest.approx(
        word_count * result.tokens.source_tokens_per_word + 6_000, rel=0.02
    )
    training = result.training
    num_tokens = max(result.tokens.source_tokens, result.tokens.target_tokens)
    assert (training.size, training.epochs) == ("tiny", 2_000 * 4_096 / num_tokens)  # the minimum number of steps
    exact = result.tokens.total * training.epochs / training.tokens_per_second
    assert training.seconds[0] < exact < training.seconds[1]


@pytest.mark.parametrize(
    ("planned", "epochs", "seconds", "expected"),
    [
        (16.2, 60.01, (1_800, 1_800), "about 30 minutes for about 16 of 60 epochs: at most 30 minutes on a CPU by"),
        (0.021, 8.0, (1_800, 1_800), "for about 0.021 of 8 epochs: at most 30 minutes on a CPU by default"),
        (1234.0, 1234.0, (300, 900), "5 to 15 minutes for 1,234 epochs, which are often enough"),
    ],
)
def test_report_says_how_many_epochs_fit(
    tmp_path: Path, planned: float, epochs: float, seconds: tuple[int, int], expected: str
) -> None:
    path = write_lines(tmp_path / "a.tsv", ["\t".join(make_pair(i)) for i in range(20)])
    training = TrainingEstimate("tiny", 10**6, epochs, planned, "CPU, 1 thread", 5_000, seconds)
    estimate = CorpusEstimate(TokenEstimate(100, 20, 200, 200, 1.0, 1.0), training)
    assert expected in " ".join(render_report(survey_file(path).build_report(estimate)).split())


def test_tokens_of_a_sample_are_counted_and_extrapolated() -> None:
    texts = [make_pair(i) for i in range(MIN_PAIRS)]
    sample = estimate_tokens(texts, 3 * MIN_PAIRS, 10_000)
    assert sample is not None
    source, target = (sum(map(len, rows)) for rows in sample.rows)
    assert (sample.estimate.source_tokens, sample.estimate.target_tokens) == (3 * source, 3 * target)
    assert sample.estimate.total == 3 * (source + target)
    assert sample.estimate.vocab_size == sample.tokenizer.target.size
    words = [sum(len(pair[side].split()) for pair in texts) for side in (0, 1)]
    assert sample.estimate.source_tokens_per_word == round((source - MIN_PAIRS) / words[0], 2)
    assert sample.estimate.target_tokens_per_word == round((target - MIN_PAIRS) / words[1], 2)
    assert estimate_tokens(texts[1:], 1_000, 10_000) is None


@pytest.mark.parametrize("texts", [[], [("", "")], [("A pair.", "Ein Paar.")] * 100])
def test_tiny_corpus_has_no_estimate(texts: list[tuple[str, str]]) -> None:
    assert estimate_corpus(texts, 0, 0) is None
