"""A corpus with planted faults: every one is counted, and shown with its line."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from attent.data import leakage
from attent.data import report as reports
from attent.data.corpus import corpora
from attent.data.estimate import estimate
from attent.data.leakage import Against
from attent.data.pairs import Bad, CorpusError, Languages, Pair
from attent.data.report import HeldOut, Origin, Report, Survey, ignored, lengths, limits, named, percent, verdicts

NOUNS = "dog cat house tree river man woman child street car bird city book night morning".split()
VERBS = "sees likes finds follows draws remembers".split()
NAMEN = "Hund Katze Haus Baum Fluss Mann Frau Kind Straße Auto Vogel Stadt Buch Nacht Morgen".split()
VERBEN = "sieht mag findet verfolgt zeichnet erinnert".split()
LANGUAGES = Languages("en", "de")


def sentence(number: int) -> tuple[str, str]:
    """A different pair for each number, of the same length on both sides."""
    a, rest = number % 15, number // 15
    b, rest = rest % 15, rest // 15
    v, place = rest % 6, rest // 6
    english = f"The {NOUNS[a]} {VERBS[v]} the {NOUNS[b]} at number {place}."
    return english, f"{NAMEN[a]} {VERBEN[v]} bei Nummer {place}: {NAMEN[b]}."


def survey_of(path: Path, *, keep_all: bool = False, against: tuple[Pair, ...] = ()) -> Survey:
    tests = [HeldOut("test", ("test.tsv",), Against(against))] if against else []
    survey = Survey(keep_all=keep_all, tests=tests)
    for corpus in corpora([str(path)], LANGUAGES):
        survey.take(corpus)
    return survey


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")
    return path


PLANTED = {
    "empty": ("Nothing on the other side.", ""),
    "control": ("A bell\x07 rings at seven.", "Um sieben läutet es."),
    "longest": ("Word " * 500, "Wort " * 500),
    "ratio": ("Yes.", "Ja, und das ist der Anfang einer sehr langen Rede, die gar nicht mehr endet, " * 2),
    "identical": ("Nobody has ever translated this.", "Nobody has ever translated this."),
    "script": ("It is written in another script.", "Это написано другими буквами."),
}


@pytest.fixture(params=[100, 20_000], ids=["small", "of several chunks"])
def planted(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, list[int]]]:
    """Good lines with each fault once, twice, ... at random places, and two repeats; and on which lines they are."""
    good = [sentence(i) for i in range(request.param)]
    faults = [(name, pair) for n, (name, pair) in enumerate(PLANTED.items(), 1) for pair in [pair] * n]
    faults += [("mojibake", ("It is for you.", "Es ist fÃ¼r dich.")), ("one column", ("alone", ""))]
    random.Random(7).shuffle(faults)
    lines: list[str] = []
    where: dict[str, list[int]] = {}
    step = len(good) // len(faults)
    for i, (name, (source, target)) in enumerate(faults):
        lines += [f"{a}\t{b}" for a, b in good[i * step : (i + 1) * step]]
        lines.append(source if name == "one column" else f"{source}\t{target}")
        where.setdefault(name, []).append(len(lines))
    lines += [f"{a}\t{b}" for a, b in good[len(faults) * step :]]
    lines += [lines[0], f"  {lines[1]} "]
    where["duplicates"] = [len(lines) - 1, len(lines)]
    return write(tmp_path / "corpus.tsv", lines), where


def test_every_planted_fault_is_counted_and_shown_with_its_line(planted: tuple[Path, dict[str, list[int]]]) -> None:
    path, where = planted
    report = survey_of(path).report()
    total = len(path.read_text(encoding="utf-8").split("\n")) - 1
    assert report.pairs == total - 1
    assert [(bad.count, [e.line for e in bad.examples]) for bad in report.no_pairs] == [(1, where["one column"])]
    lines = {**where, "control": sorted([*where["control"], *where["mojibake"]])}
    for finding in report.dropped:
        expected = lines[finding.name]
        assert (finding.name, finding.count) == (finding.name, len(expected))
        assert [example.line for example in finding.examples] == expected[:3]
        assert {Path(example.file).name for example in finding.examples} == {"corpus.tsv"}
    assert report.mojibake == 1
    assert report.kept == report.pairs - sum(finding.count for finding in report.dropped)


def test_keep_all_counts_the_same_faults_and_keeps_them(planted: tuple[Path, dict[str, list[int]]]) -> None:
    filtered, kept = survey_of(planted[0]).report(), survey_of(planted[0], keep_all=True).report()
    assert kept.dropped == filtered.dropped
    assert kept.kept == kept.pairs > filtered.kept
    assert not kept.filtered


def test_words_characters_and_lengths_are_exact(tmp_path: Path) -> None:
    path = write(tmp_path / "c.tsv", ["one two\teins", "a  b c\tä", "x\ty z €"])
    report = survey_of(path).report()
    assert (report.source.words, report.target.words) == (6, 5)
    assert (report.source.characters, report.target.characters) == (7 + 6 + 1, 4 + 1 + 5)
    assert report.source.different == len(set("one twoa  b cx"))
    assert set(report.target.rare) == set("einsäyz€")
    assert (report.source.lengths.longest, report.source.lengths.median) == (3, 2)
    assert report.source.lengths.counts == (0, 1, 1, 1)


def test_the_shape_of_a_distribution() -> None:
    import numpy as np

    found = lengths("words", np.array([0, 50, 0, 45, 0, 0, 5]))
    assert (found.mean, found.median, found.most, found.longest) == (2.15, 1, 3, 6)


def test_a_language_without_spaces_is_measured_in_characters(tmp_path: Path) -> None:
    path = write(tmp_path / "c.tsv", ["你好世界\tHello world", "谢谢\tThanks"])
    survey = Survey()
    survey.take(corpora([str(path)], Languages("zh", "en"))[0])
    source, target = survey.report().source, survey.report().target
    assert (source.lengths.unit, source.lengths.longest) == ("characters", 4)
    assert (target.lengths.unit, target.lengths.longest) == ("words", 2)


def test_another_translation_of_the_same_source_is_counted_and_stays(tmp_path: Path) -> None:
    path = write(tmp_path / "c.tsv", ["Good day.\tGuten Tag.", "Good day.\tTag.", "Good day.\tGuten Tag.", "OK\tOK"])
    report = survey_of(path).report()
    assert (report.retranslated, report.count("duplicates"), report.same_sides, report.kept) == (1, 1, 1, 3)


def test_many_target_languages_are_no_retranslations(tmp_path: Path) -> None:
    for tag, text in (("en", "Good day."), ("de", "Guten Tag."), ("fr", "Bonjour.")):
        write(tmp_path / f"c.{tag}", [text])
    survey = Survey()
    for corpus in corpora([str(tmp_path / "c")], Languages("en", "de,fr")):
        survey.take(corpus)
    report = survey.report()
    assert (report.pairs, report.retranslated) == (2, 0)
    assert report.target.languages == ("de", "fr")


def test_a_pair_in_another_target_language_is_no_repeat(tmp_path: Path) -> None:
    for tag, text in (("en", "OK"), ("de", "OK."), ("fr", "OK.")):
        write(tmp_path / f"c.{tag}", [text, text])
    found = {}
    for by_target in (True, False):
        survey = Survey(by_target=by_target)
        for corpus in corpora([str(tmp_path / "c")], Languages("en", "de,fr")):
            survey.take(corpus)
        found[by_target] = survey.report().count("duplicates")
    assert found == {True: 2, False: 3}


def test_a_repeat_in_another_corpus_is_one_also_where_a_language_is_not_known(tmp_path: Path) -> None:
    survey = Survey()
    for name, languages in (("a.tsv", Languages()), ("b.tsv", LANGUAGES)):
        survey.take(corpora([str(write(tmp_path / name, ["Good day.\tGuten Tag."]))], languages)[0])
    assert survey.report().count("duplicates") == 1


def test_with_keep_all_the_sample_holds_what_the_filters_would_drop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = [f"{a}\t{b}" for a, b in map(sentence, range(20))]
    path = write(tmp_path / "c.tsv", [*good, good[0], "Only one side.\t", "x\t" + "y" * 5_000])
    assert len(survey_of(path, keep_all=True).sample.pairs()) == 23
    assert len(survey_of(path).sample.pairs()) == 20
    monkeypatch.setattr(reports, "SAMPLE", 100)
    path = write(tmp_path / "d.tsv", [line for line in good for _ in range(200)])
    drawn = survey_of(path, keep_all=True).sample.pairs()
    assert len(drawn) == 100
    assert len(set(drawn)) > 15  # and not all of the few pairs that stand lowest


def test_files_that_lie_there_unread_are_told(tmp_path: Path) -> None:
    for name in ("train.tsv", "more.tsv", "x.en"):
        write(tmp_path / name, ["Good day.\tGuten Tag."])
    report = survey_of(tmp_path).report()
    said = list(texts(report))
    assert any(text.startswith("2 Not read: more.tsv (") for text in said)
    assert any(text.startswith("1 Not read: x.en (") for text in said)
    assert len(json.loads(json.dumps(report.facts()))["origins"][0]["ignored"]) == 2


def test_a_file_that_another_pair_of_languages_reads_is_not_told_as_unread() -> None:
    origin = Origin("c", ("c/x.en", "c/x.de"), "en", "de", 1.0, 20_000, 0, ignored=("x.fr (why)", "y.en (why)"))
    other = replace(origin, files=("c/x.en", "c/x.fr"), ignored=("x.de (why)", "y.en (why)"))
    assert ignored([origin, other]) == ["y.en (why)"]
    assert named(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"


def test_characters_of_the_test_set_that_training_never_saw(tmp_path: Path) -> None:
    path = write(tmp_path / "c.tsv", [f"{a}\t{b}" for a, b in map(sentence, range(50))])
    test = (Pair("A tree ☃ here", "Baum ☃ ß Ж", "test.tsv", 1), Pair("The dog.", "Hund.", "test.tsv", 2))
    (found,) = survey_of(path, against=test).report().tests
    assert "☃" in found.unseen[0]
    assert set("☃Ж") <= set(found.unseen[1])
    assert " " not in found.unseen[0] + found.unseen[1]
    assert found.unseen_sentences == 1


def test_a_corpus_that_breaks_off_is_reported_up_to_there(tmp_path: Path) -> None:
    write(tmp_path / "c.en", [sentence(i)[0] for i in range(30)])
    write(tmp_path / "c.de", [sentence(i)[1] for i in range(20)])
    survey = Survey()
    with pytest.raises(CorpusError, match="30"):
        survey.take(corpora([str(tmp_path / "c")], LANGUAGES)[0])
    report = survey.report(error="broken")
    assert report.pairs == report.origins[0].pairs == 20
    assert "before the end" in verdicts(report)[0].text


def test_a_chunk_without_any_pair_is_not_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "CHUNK", 4)
    path = write(tmp_path / "c.tsv", [*["alone"] * 9, "Good day.\tGuten Tag.", *["alone"] * 8, "One\tEins"])
    report = survey_of(path).report()
    assert (report.pairs, report.no_pairs[0].count) == (2, 17)


def test_the_sample_is_fair_bounded_and_does_not_depend_on_the_order(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(reports, "SAMPLE", 50)
    monkeypatch.setattr(reports, "CHUNK", 100)
    lines = [f"{a}\t{b}" for a, b in map(sentence, range(3_000))]
    forward = survey_of(write(tmp_path / "a.tsv", lines)).sample.pairs()
    backward = survey_of(write(tmp_path / "b.tsv", lines[::-1])).sample.pairs()
    assert forward == backward
    assert len(set(forward)) == 50
    numbers = [lines.index(f"{a}\t{b}") for a, b in forward]
    assert 900 < sum(numbers) / 50 < 2_100


# ---- in words --------------------------------------------------------------------------------------------------------


def texts(report: Report) -> Iterator[str]:
    return (f"{verdict.weight} {verdict.text}" for verdict in verdicts(report))


def test_a_clean_corpus_is_told_so(tmp_path: Path) -> None:
    path = write(tmp_path / "c.tsv", [f"{a}\t{b}" for a, b in map(sentence, range(10_500))])
    assert list(texts(survey_of(path).report())) == ["0 Nothing serious found."]


def test_the_worst_is_said_first(tmp_path: Path) -> None:
    good = [f"{a}\t{b}" for a, b in map(sentence, range(200))]
    path = write(tmp_path / "c.tsv", [*good, *good[:20], *["alone"] * 30])
    test = tuple(Pair(*sentence(i), "test.tsv", i + 1) for i in range(190, 250))
    said = list(texts(survey_of(path, against=test).report()))
    assert said == sorted(said, reverse=True, key=lambda text: text[0])
    assert any("10 are in this corpus" in text and "too good" in text for text in said)
    assert any("30 lines could not be read as a pair" in text for text in said)
    assert any("came before, word for word" in text for text in said)
    assert any("Only 200 pairs: a model would learn them by heart" in text for text in said)
    assert not any("Nothing serious" in text for text in said)


def test_one_pair_and_one_sentence_are_told_as_one(tmp_path: Path) -> None:
    path = write(tmp_path / "c.tsv", ["Good day to all of you here.\tGuten Tag."])
    test = (Pair("Good day to all of you here.", "Einen guten Tag euch allen.", "test.tsv", 1),)
    said = list(texts(survey_of(path, against=test).report()))
    assert any(text.startswith("2 Only 1 pair: a model would learn it by heart.") for text in said)
    assert any("Of 1 sentence of test 1 is in this corpus" in text for text in said)


def test_a_test_set_without_a_sentence_is_worth_a_look(tmp_path: Path) -> None:
    path = write(tmp_path / "c.tsv", [f"{a}\t{b}" for a, b in map(sentence, range(50))])
    survey = Survey(tests=[HeldOut("test.tsv", ("test.tsv",), Against([Bad("one column only", "test.tsv", 1, "x")]))])
    survey.take(corpora([str(path)], LANGUAGES)[0])
    said = list(texts(survey.report()))
    assert "2 There is not one pair in test.tsv: nothing could be checked." in said
    assert "1 1 line of test.tsv could not be read as a pair." in said
    assert survey.report().facts()["tests"][0]["no_pairs"] == 1
    assert not any("No sentence" in text for text in said)


def test_short_sentences_that_come_again_are_told_too(tmp_path: Path) -> None:
    path = write(
        tmp_path / "c.tsv", ["Click OK now\tJetzt OK klicken", *(f"{a}\t{b}" for a, b in map(sentence, range(50)))]
    )
    test = (Pair("Click OK now", "Jetzt OK klicken", "test.tsv", 1),) * 3
    said = list(texts(survey_of(path, against=test).report()))
    assert "1 No sentence of test is in this corpus, nor nearly, but for 3 of three words or less." in said


def test_how_far_near_twins_were_sought_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leakage, "MOST", 20)
    path = write(tmp_path / "c.tsv", [f"{a}\t{b}" for a, b in map(sentence, range(50))])
    test = tuple(Pair(f"Entirely new words {i}", f"Ganz neue Worte {i}", "test.tsv", i) for i in range(25))
    report = survey_of(path, against=test).report()
    assert any("near twins were sought of the first 20 of 25 sentences only" in text for text in texts(report))
    assert report.facts()["tests"][0]["leakage"]["near_sought"] == 20
    leak = replace(report.tests[0].leakage, near_sought=25, uncompared=1_234)
    assert limits(leak).startswith("1,234 different lines of the corpus met too many")
    assert limits(replace(leak, uncompared=0)) == ""


def test_sides_the_wrong_way_round_are_suspected(tmp_path: Path) -> None:
    lines = [f"Это предложение номер {i} на русском\tThis is sentence number {i} in English" for i in range(40)]
    survey = Survey()
    survey.take(corpora([str(write(tmp_path / "c.tsv", lines))], Languages("en", "ru"))[0])
    assert any("--src and --tgt the right way" in text for text in texts(survey.report()))


@pytest.mark.parametrize(
    ("share", "told"),
    [(0, "0%"), (1, "100%"), (0.9999, "99.99%"), (0.12, "12%"), (0.031, "3.1%"), (0.0002, "0.020%"), (1e-7, "<0.001%")],
)
def test_a_share_has_as_many_digits_as_it_deserves(share: float, told: str) -> None:
    assert percent(share) == told


def test_every_fact_goes_into_json(planted: tuple[Path, dict[str, list[int]]]) -> None:
    report = survey_of(planted[0], against=(Pair(*sentence(3), "test.tsv", 9),)).report()
    facts = json.loads(json.dumps(report.facts()))
    assert facts["pairs"] == report.pairs
    assert facts["tests"][0]["leakage"]["twins"][0]["test"]["line"] == 9
    assert {finding["name"]: finding["count"] for finding in facts["dropped"]}["script"] == 6
    assert facts["verdicts"][0]["weight"] == 2


# ---- tokens and time -------------------------------------------------------------------------------------------------


def test_an_estimate_counts_tokens_and_measures_speed() -> None:
    sample = [sentence(i) for i in range(600)]
    found = estimate(sample, pairs=6_000, characters=10 * sum(len(a) + len(b) for a, b in sample), seconds=0.01)
    assert found is not None
    assert found.tokens.sampled == 600
    words = sum(len(source.split()) for source, _ in sample) * 10
    assert words < found.tokens.source < 4 * words
    assert found.tokens.source == pytest.approx(words * found.tokens.source_per_word + 6_000, rel=0.02)
    training = found.training
    assert (training.model, training.epochs) == ("tiny", 60)
    exact = (found.tokens.source + found.tokens.target) * 60 / training.tokens_per_second
    assert training.seconds[0] < exact < training.seconds[1]


@pytest.mark.parametrize("texts", [[], [("", "")], [("A pair.", "Ein Paar.")] * 100])
def test_too_little_has_no_estimate(texts: list[tuple[str, str]]) -> None:
    assert estimate(texts, 0, 0) is None
