"""`attent translate` as a person meets it: as many lines out as in, and a sentence for what it cannot translate."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest

from attent import cli, models
from attent.cli.carding import sha256
from attent.cli.translate import TranslateError, lines
from attent.decode.translate import translate
from attent.text.tokenizer import Tokenizer
from attent.train.loop import write_model
from tests.text.corpus import tokenizer
from tests.train.runs import digest, reverse, sentences, write_corpus
from tests.train.toys import model

SMALL = (
    "--size tiny --set model.width=32 --set model.inner=64 --set model.layers=1 --batch-tokens 512 --vocab 300 "
    "--hold-out 6 --steps 12 --save-every 12 --valid-every 12 --valid-sentences 4 --beam-size 1 --lr 0.01 --quiet"
).split()
TEXT = ["the red cat sees a dog", "", "the big man takes a bike", "   ", "\u2028 bird\x0cstone", "eine Straße"]

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one language."""
    root = tmp_path_factory.mktemp("trained")
    corpus = write_corpus(root / "corpus.tsv", 60)
    arguments = ["--data", str(corpus), "--src", "en", "--tgt", "xx", "--out", str(root / "run"), *SMALL]
    assert cli.main(["train", *arguments]) == 0
    return root / "run"


@pytest.fixture(scope="module")
def tagged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two languages."""
    root = tmp_path_factory.mktemp("tagged")
    rows = ["en\tde\tfr", *(f"{text}\t{reverse(text)}\t{text.upper()}" for text in sentences(60))]
    (root / "text.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    arguments = ["--data", str(root / "text.tsv"), "--src", "en", "--tgt", "de,fr", "--out", str(root / "run")]
    assert cli.main(["train", *arguments, *SMALL]) == 0
    return root / "run"


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights by chance have an answer, and another one, to everything."""
    folder = tmp_path_factory.mktemp("random") / "model"
    write_model(folder, model(), tokenizer())
    return folder


def give(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="ascii"))


def refused(capsys: Capture, *arguments: object) -> str:
    capsys.readouterr()
    assert cli.main(["translate", *map(str, arguments)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("attent: error: ")
    assert len(printed.err.splitlines()) == 1
    return printed.err


# ---- lines -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_each_line_gives_one_line_in_its_place(
    random_model: Path, end: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    give(monkeypatch, end.join([*TEXT, ""]).encode())
    assert cli.main(["translate", str(random_model), "--to", "de"]) == 0
    printed = capsys.readouterr().out
    loaded, words = models.read(random_model), Tokenizer.load(random_model)
    expected = translate(loaded, words, TEXT, to="de")
    assert len(set(expected)) >= 4  # else this would show little
    assert printed == "".join(f"{' '.join(line.splitlines())}\n" for line in expected)
    assert [line == "" for line in printed.split("\n")[:-1]] == [not text.strip() for text in TEXT]


@pytest.mark.parametrize(
    ("content", "count"), [(b"", 0), (b"\n", 1), (b"\n\n\n", 3), (b"a dog", 1), (b"\xef\xbb\xbfa dog\n", 1)]
)
def test_odd_ends_of_a_text_are_counted_as_everywhere(
    trained: Path, content: bytes, count: int, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "text.txt").write_bytes(content)
    assert cli.main(["translate", str(trained), str(tmp_path / "text.txt")]) == 0
    assert capsys.readouterr().out.count("\n") == count


def test_the_mark_at_the_head_of_a_file_is_no_text() -> None:
    mark = b"\xef\xbb\xbf"
    assert list(lines([mark + b"a dog\r\n", b"a\rcat"], "text.txt")) == ["a dog", "a\rcat"]
    with pytest.raises(TranslateError, match="line 1: must be UTF-8, but byte 2 is 0xe4"):
        list(lines([mark + b"M\xe4dchen"], "text.txt"))


def test_more_lines_than_one_block_stay_in_order(
    random_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr("attent.cli.translate.BLOCK", 2)
    (tmp_path / "text.txt").write_text("\n".join(TEXT * 2), encoding="utf-8")
    assert cli.main(["translate", str(random_model), str(tmp_path / "text.txt"), "--to", "de", "-b", "1"]) == 0
    printed = capsys.readouterr().out.splitlines()
    loaded, words = models.read(random_model), Tokenizer.load(random_model)
    blocks = [translate(loaded, words, TEXT[i : i + 2], to="de", beam_size=1) for i in (0, 2, 4)] * 2
    assert printed == [" ".join(line.splitlines()) for block in blocks for line in block]


def test_a_reader_that_goes_away_ends_it_quietly(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    (tmp_path / "text.txt").write_text("\n".join(TEXT), encoding="utf-8")
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", encoding="utf-8") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert cli.main(["translate", str(trained), str(tmp_path / "text.txt")]) == cli.CLOSED_PIPE
        monkeypatch.undo()
    assert capsys.readouterr().err == ""


# ---- languages -------------------------------------------------------------------------------------------------------


def test_a_model_of_several_languages_asks_for_one(
    tagged: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    give(monkeypatch, b"the red cat sees a dog\n")
    told = refused(capsys, tagged)
    assert "--to" in told
    assert "de, fr" in told
    told = refused(capsys, tagged, "--to", "xx")
    assert "`xx`" in told
    assert "de, fr" in told
    assert cli.main(["translate", str(tagged), "--to", "fr"]) == 0
    assert capsys.readouterr().out.count("\n") == 1


def test_a_model_of_one_language_takes_no_other(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    give(monkeypatch, b"a dog\n")
    assert "one language only" in refused(capsys, trained, "--to", "de")


def test_no_tag_can_be_asked_for(random_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """Of a model that was trained further without tags, whose tokenizer has them still."""
    give(monkeypatch, b"a dog\n")
    assert cli.main(["translate", str(random_model), "--to", ""]) == 0
    loaded, words = models.read(random_model), Tokenizer.load(random_model)
    plain, into_german = (translate(loaded, words, ["a dog"], to=to)[0] for to in (None, "de"))
    assert plain != into_german
    assert capsys.readouterr().out == f"{' '.join(plain.splitlines())}\n"


# ---- what cannot be read ---------------------------------------------------------------------------------------------


def test_text_that_is_not_utf8_is_named_by_its_line(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    content = "a dog\n\nein Mädchen\n".encode("latin-1")
    (tmp_path / "text.txt").write_bytes(content)
    told = refused(capsys, trained, tmp_path / "text.txt")
    assert f"{tmp_path / 'text.txt'}, line 3: must be UTF-8, but byte 6 is 0xe4; convert" in told
    give(monkeypatch, content)
    assert "standard input, line 3:" in refused(capsys, trained)


def test_what_is_not_there_is_named(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    give(monkeypatch, b"a dog\n")
    told = refused(capsys, tmp_path / "nowhere")
    assert str(tmp_path / "nowhere") in told
    assert "does not exist" in told
    told = refused(capsys, trained, tmp_path / "nothing.txt")
    assert f"{tmp_path / 'nothing.txt'}: must be a text file" in told
    assert f"{tmp_path}: must be a text file" in refused(capsys, trained, tmp_path)
    assert "tokenizer" in refused(capsys, bare(tmp_path / "bare"))


def bare(folder: Path) -> Path:
    model().save(folder)
    return folder


# ---- the card of what was translated with ----------------------------------------------------------------------------


def test_the_card_tells_checksums_reasons_and_how_to_ask(trained: Path, tagged: Path) -> None:
    corpus = trained.parent / "corpus.tsv"
    assert sha256(corpus) == digest(corpus)
    card = (trained / "card.md").read_text(encoding="utf-8")
    assert f"| `{digest(corpus)}` |" in card
    assert "| `train.label_smoothing` | `0.1` |" in card
    assert "| `train.lr` | `0.01` | as asked for |" in card
    assert "| `model.dropout` | `0.3` | few pairs are soon learned by heart |" in card
    assert "--to" not in card
    card = (tagged / "card.md").read_text(encoding="utf-8")
    assert " --to de < input.txt" in card
    assert card.count(digest(tagged.parent / "text.tsv")) == 1


def test_a_finished_run_is_known_to_be(trained: Path, capsys: Capture) -> None:
    assert cli.main(["info", str(trained)]) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert "12 updates; all updates done" in page
    assert "scored validation" in page
