"""`attent data`: the report, JSON output, and error messages."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.cells import cell_len

import attent
from attent import cli
from tests.text.corpus import lines as corpus_lines

ROOT = Path(attent.__file__).parent.parent
GOOD = [f"Sentence number {i} is about the sea.\tSatz Nummer {i} handelt vom Meer." for i in range(300)]
ODD = [
    "A \x1b[31mred\x1b[0m bell\x07\tEine rote Glocke",
    "It is written from right to left.\t" + "هذا النص مكتوب من اليمين إلى اليسار " * 4,
    "It is written in wide letters.\t" + "これは日本語で書かれた長い文章です。" * 2,
    "\u202eturned round\u202c and long " + "x" * 300 + "\tkurz",
]


def write(path: Path, lines: list[str]) -> str:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")
    return str(path)


def run(*arguments: str) -> int:
    return cli.main(["data", *arguments, "--src", "en", "--tgt", "de"])


@pytest.fixture
def odd(tmp_path: Path) -> str:
    return write(tmp_path / "odd.tsv", [*GOOD, *ODD, "one column", GOOD[0]])


def test_report_fits_80_columns(odd: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(odd) == 0
    text = capsys.readouterr().out
    assert all(cell_len(line) <= 80 for line in text.splitlines())
    assert all(char.isprintable() or char == "\n" for char in text)
    assert "\\x1b[31mred" in text
    assert "\\u202e" in text
    assert text.count("…\n") >= 2  # long values are truncated with an ellipsis


def test_report_has_counts_and_locations(odd: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(odd) == 0
    text = capsys.readouterr().out
    for expected in ("305 pairs", "odd.tsv:301", "odd.tsv:305", "duplicates", "pairs to train on"):
        assert expected in text
    assert "one side over 4 times longer than the other (summaries: than usual)" in " ".join(text.split())


def test_each_text_is_cited_with_its_own_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "train.en", ["one small dog sleeps", "two small dogs sleep", "three"])
    write(tmp_path / "train.de", ["ein kleiner Hund schl\x07ft", "zwei kleine Hunde schlafen", "drei"])
    write(tmp_path / "test.en", ["all of my dogs are asleep"])
    write(tmp_path / "test.de", ["zwei kleine Hunde schlafen"])
    assert run(str(tmp_path)) == 0
    printed = capsys.readouterr().out
    assert "train.en:1  one small dog sleeps" in printed
    assert "train.de:1  ein kleiner Hund schl\\x07ft" in printed
    assert "test.de:1   zwei kleine Hunde schlafen" in printed
    assert "train.de:2  zwei kleine Hunde schlafen" in printed


def test_swapped_sides_are_reported_with_the_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    en, de = (list(side[:50]) for side in corpus_lines())
    pairs = list(zip(de, en, strict=True))
    table = [f"{source}\t{target}" for source, target in pairs]
    moses = write(tmp_path / "a.en", de)
    write(tmp_path / "a.de", en)
    for path, advice in (
        (write(tmp_path / "plain.tsv", table), "run attent data with --src de --tgt en"),
        (
            write(tmp_path / "header.tsv", ["en\tde", *table]),
            f"exchange the languages that {tmp_path}/header.tsv declares",
        ),
        (moses, f"exchange the names of {moses} and {tmp_path}/a.de"),
    ):
        assert cli.main(["data", path, "--src", "en", "--tgt", "de", "--json"]) == 0
        (text,) = json.loads(capsys.readouterr().out)["language_problems"]
        assert text.startswith(f"{path}: the two sides look swapped (“")
        assert text.endswith(f"; if they are, {advice}")
    write(tmp_path / "same.tsv", [f"{text}\tNo: {text}" for text in en])
    assert run(str(tmp_path / "same.tsv")) == 0
    assert "both sides look like en" in capsys.readouterr().out


def test_json_is_one_object(odd: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(odd, "--json") == 0
    output = capsys.readouterr()
    report = json.loads(output.out)
    assert report["pairs"] == 305
    assert report["source"]["languages"] == ["en"]
    assert {finding["name"]: finding["count"] for finding in report["dropped"]} == {
        "empty": 0,
        "control": 1,
        "max_chars": 0,
        "length_ratio": 1,
        "identical": 0,
        "script": 2,
        "duplicates": 1,
    }
    assert report["bad_lines"][0]["examples"][0]["line"] == 305
    assert output.err == ""


def test_against_lists_contaminated_sentences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train, test = write(tmp_path / "train.tsv", GOOD), write(tmp_path / "newstest.tsv", [GOOD[7], "New.\tNeu."])
    assert run(train, "--against", test) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "newstest.tsv: of 2 sentences, 1 in this corpus: scores on it would be inflated." in text
    assert "newstest.tsv:1" in text
    assert "train.tsv:8" in text


def test_folder_is_checked_against_its_own_test_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, lines in (
        ("train", GOOD),
        ("test", GOOD[:3]),
        ("valid", ["Fresh text for all.\tFrischer Text für alle."]),
    ):
        write(tmp_path / f"{name}.en", [line.split("\t")[0] for line in lines])
        write(tmp_path / f"{name}.de", [line.split("\t")[1] for line in lines])
    assert run(str(tmp_path), "--json") == 0
    tests = json.loads(capsys.readouterr().out)["test_sets"]
    assert [(test["name"].split()[-1], test["same_pair"]) for test in tests] == [
        ("test", 3),
        ("valid", 0),
    ]


def folder_of(path: Path, **splits: list[str]) -> str:
    path.mkdir()
    for name, lines in splits.items():
        write(path / f"{name}.tsv", lines)
    return str(path)


def test_against_adds_to_the_test_sets_of_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    for split in ("train", "valid", "test"):
        write(folder / f"{split}.tsv", [f"a {split} sentence {n}\tein {split} Satz {n}" for n in range(5)])
    other = write(tmp_path / "other.tsv", GOOD)
    assert run(str(folder), "--against", other, "--json") == 0
    names = [test["name"] for test in json.loads(capsys.readouterr().out)["test_sets"]]
    assert names == ["other.tsv", "own test", "own valid"]


def test_against_a_folder_uses_its_test_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = write(tmp_path / "c.tsv", GOOD)
    both = folder_of(tmp_path / "both", train=GOOD, test=[GOOD[7], "Quite another thing.\tGanz etwas anderes."])
    alone = folder_of(tmp_path / "alone", train=GOOD[:5])
    assert run(corpus, "--against", both, "--against", alone, "--json") == 0
    tests = json.loads(capsys.readouterr().out)["test_sets"]
    assert [(test["name"], test["sentences"], test["same_pair"]) for test in tests] == [
        ("both test", 2, 1),
        ("alone", 5, 5),
    ]
    assert [[Path(file).name for file in test["files"]] for test in tests] == [["test.tsv"], ["train.tsv"]]
    assert run(corpus, "--against", both) == 0
    text = capsys.readouterr().out
    assert "Overlap with both test  2 sentences" in text
    assert "test.tsv" in text[text.index("Overlap with") :]


def test_against_reads_fuzzy_entries_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus, test = write(tmp_path / "c.tsv", GOOD), tmp_path / "t.po"
    source, target = GOOD[3].split("\t")
    test.write_text(f'#, fuzzy\nmsgid "{source}"\nmsgstr "{target}"\n', encoding="utf-8")
    for option, counts in (([], (0, 0)), (["--fuzzy"], (1, 1))):
        assert run(corpus, "--against", str(test), "--json", *option) == 0
        contamination = json.loads(capsys.readouterr().out)["test_sets"][0]
        assert (contamination["sentences"], contamination["same_pair"]) == counts


def test_weight_and_single_pair_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(write(tmp_path / "own.tsv", GOOD[:1]) + ":3", write(tmp_path / "c.tsv", GOOD)) == 0
    text = capsys.readouterr().out
    assert "1 pair, weight 3\n" in text
    assert "300 pairs\n" in text
    assert " 1 pairs" not in text


def test_keep_all_is_shown(odd: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(odd, "--keep-all") == 0
    assert "not applied: --keep-all" in capsys.readouterr().out


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_truncated_file_is_reported_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cut.tsv.gz"
    path.write_bytes(gzip.compress("\n".join(GOOD * 40).encode())[:-100])
    assert run(str(path)) == 1
    output = capsys.readouterr()
    assert "Reading stopped early" in " ".join(output.out.split())
    assert output.err.startswith("attent: error: ")
    assert "cut.tsv.gz" in output.err


def test_unread_corpora_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cut.tsv.gz"
    path.write_bytes(gzip.compress("\n".join(GOOD * 40).encode())[:-100])
    later = write(tmp_path / "later.tsv", GOOD)
    assert run(str(path), later, "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert report["unread_corpora"] == [later]
    assert f"Not read: {later}." in report["diagnostics"][0]["text"]


@pytest.mark.parametrize("content", ["", "\n\n", "one column\nonly\n"])
def test_corpus_without_pairs_fails_without_traceback(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.tsv"
    path.write_text(content)
    assert run(str(path)) == 1
    output = capsys.readouterr()
    assert "has no pairs" in output.out or output.err.startswith("attent: error: ")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["{corpus}", "--against", "no-such-test.tsv"], "no-such-test.tsv"),
        (["{corpus}", "--src", "e n"], "not a language tag"),
    ],
)
def test_error_is_one_sentence(
    arguments: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = write(tmp_path / "c.tsv", GOOD)
    assert cli.main(["data", *(argument.format(corpus=corpus) for argument in arguments)]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert expected in output.err
    assert len(output.err.splitlines()) == 1


def test_standard_input_is_a_hyphen(odd: str) -> None:
    command = [sys.executable, "-m", "attent", "data", "-", "--json"]
    with open(odd, "rb") as lines:
        done = subprocess.run(command, stdin=lines, cwd=ROOT, capture_output=True, check=True)
    assert json.loads(done.stdout)["pairs"] == 305


def test_help_and_report_do_not_import_torch(odd: str) -> None:
    report = "import atexit\natexit.register(lambda: print('LOADED', 'torch' in sys.modules))"
    for arguments in (["data", "--help"], ["data", odd]):
        code = f"import sys\n{report}\nfrom attent.cli import main\nsys.exit(main({arguments!r}))"
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
        assert "LOADED False" in done.stdout


@pytest.mark.skipif(sys.platform == "win32", reason="has no head")
def test_closed_pipe_is_no_error(odd: str) -> None:
    command = f"{sys.executable} -m attent data {odd} | head -1"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr == ""
