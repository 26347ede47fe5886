"""`attent translate`: one line per line, documents, typing at a terminal, progress and error messages."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

import attent
from attent import cli, models
from attent.cli.shared import ProgressDisplay, SearchFlags, build_search_options, use_flag_names
from attent.cli.translate import TranslateFlags, build_pipeline
from attent.data.formats.units import SkippedUnit
from attent.data.pretranslate import PretranslateResult
from attent.decoding import input_lines
from attent.decoding.input_lines import LineSource
from attent.decoding.options import SCORE_FORMULAS, PhraseConstraints, SamplingOptions, SearchOptions
from attent.decoding.pipeline import TranslationPipeline, report_pretranslation, translate_lines
from attent.decoding.translator import Translator, translate_texts
from attent.models import Seq2Seq, shift_right
from attent.models.config import mirror_encoder
from attent.nn import StackConfig
from attent.text.language_id import LANGUAGES_FILE, LanguageIdentifier
from attent.text.tokenizer import Tokenizer
from attent.training.loop import write_model
from attent.training.tasks.base import hash_files
from tests.text.corpus import lines as corpus_lines
from tests.text.corpus import tokenizer
from tests.training.runs import digest, reverse, sentences, write_corpus
from tests.training.toys import model

SMALL = (
    "--size tiny --set model.width=32 --set model.ffn_width=64 --set model.layers=1 --batch-tokens 512 --vocab 300 "
    "--hold-out 6 --steps 12 --save-every 12 --valid-every 12 --valid-sentences 4 --beam-size 1 --lr 0.01 --quiet"
).split()
TEXT = ["the red cat sees a dog", "", "the big man takes a bike", "   ", "\u2028 bird\x0cstone", "eine Straße"]

DOG = "A dog slowly walking on the market square."
MAN = "A man again waiting near an old railway bridge."

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def bilingual_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bilingual run."""
    root = tmp_path_factory.mktemp("trained")
    corpus = write_corpus(root / "corpus.tsv", 60)
    arguments = ["--data", str(corpus), "--src", "en", "--tgt", "xx", "--out", str(root / "run"), *SMALL]
    assert cli.main(["train", *arguments]) == 0
    return root / "run"


@pytest.fixture(scope="module")
def multilingual_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two target languages."""
    root = tmp_path_factory.mktemp("tagged")
    rows = ["en\tde\tfr", *(f"{text}\t{reverse(text)}\t{text.upper()}" for text in sentences(60))]
    (root / "text.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    arguments = ["--data", str(root / "text.tsv"), "--src", "en", "--tgt", "de,fr", "--out", str(root / "run")]
    assert cli.main(["train", *arguments, *SMALL]) == 0
    return root / "run"


@pytest.fixture(scope="module")
def trained_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with two language tags, trained on one until it generates sentences, so that constraints show."""
    folder, words = tmp_path_factory.mktemp("learned") / "model", tokenizer()
    stack = StackConfig(layers=1, width=48, heads=4, ffn_width=96, dropout=0.0)
    torch.manual_seed(1)
    made = Seq2Seq(replace(model().config, encoder=stack, decoder=mirror_encoder(stack)))
    optimiser = torch.optim.Adam(made.parameters(), lr=5e-3)
    sources, targets = (side[:640] for side in corpus_lines())
    pairs = list(zip(words.encode_source(sources, "de"), words.encode_target(targets), strict=True))
    for step in range(80):
        (source, lengths), (target, ends) = map(pad_rows, zip(*pairs[step * 32 % 640 :][:32], strict=True))
        logits = made(source, shift_right(target, made.config.start_id), lengths, ends)
        loss = cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=words.target.pad)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    write_model(folder, made.eval(), words)
    return folder


def pad_rows(rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    filled = pad_sequence([torch.tensor(row) for row in rows], True, tokenizer().target.pad)
    return filled, torch.tensor([len(row) for row in rows])


@pytest.fixture(scope="module")
def pipeline(trained_model: Path) -> TranslationPipeline:
    translator = Translator.load(trained_model, engine="torch")
    return TranslationPipeline(translator=translator, options=SearchOptions(), to="de")


def set_stdin(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="ascii"))


def run_translate(capsys: Capture, *arguments: object) -> str:
    """Return the output with the torch engine; CTranslate2 rounds, which breaks ties differently."""
    capsys.readouterr()
    assert cli.main(["translate", *map(str, arguments), "--engine", "torch"]) == 0
    return capsys.readouterr().out


def run_failing(capsys: Capture, *arguments: object) -> str:
    capsys.readouterr()
    assert cli.main(["translate", *map(str, arguments)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    return check_one_line(printed.err)


def check_one_line(message: str, kind: str = "error: ") -> str:
    assert message.startswith(f"attent: {kind}")
    assert len(message.splitlines()) == 1
    return message


def run_misused(capsys: Capture, *arguments: object) -> str:
    """Return the message of a usage error."""
    capsys.readouterr()
    assert cli.main(["translate", *map(str, arguments)]) == cli.EXIT_USAGE
    return check_one_line(capsys.readouterr().err)


# ---- lines -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_one_line_per_line_in_order(
    trained_model: Path, end: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    set_stdin(monkeypatch, end.join([*TEXT, ""]).encode())
    out = run_translate(capsys, trained_model, "-", "--to", "de")
    loaded, words = models.read_model(trained_model), Tokenizer.load(trained_model)
    expected = translate_texts(loaded, words, TEXT, to="de")
    assert len(set(expected)) >= 4  # otherwise the test is too weak
    assert out == "".join(f"{' '.join(line.splitlines())}\n" for line in expected)
    assert [line == "" for line in out.split("\n")[:-1]] == [not text.strip() for text in TEXT]


@pytest.mark.parametrize(
    ("content", "count"), [(b"", 0), (b"\n", 1), (b"\n\n\n", 3), (b"a dog", 1), (b"\xef\xbb\xbfa dog\n", 1)]
)
def test_line_counts_of_unusual_line_ends(
    bilingual_run: Path, content: bytes, count: int, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "text.txt").write_bytes(content)
    capsys.readouterr()
    assert cli.main(["translate", str(bilingual_run), str(tmp_path / "text.txt")]) == 0
    printed = capsys.readouterr()
    assert printed.out.count("\n") == count
    assert ("is empty, there is nothing to translate" in printed.err) == (count == 0)


@pytest.mark.parametrize(("side", "has_warning"), [(0, False), (1, True)])
def test_text_in_the_wrong_language_is_a_warning(side: int, has_warning: bool, tmp_path: Path, capsys: Capture) -> None:
    folder, file = tmp_path / "model", tmp_path / "in.txt"
    identifier = LanguageIdentifier.learn({"en": corpus_lines()[0]}, {"de": corpus_lines()[1]})
    write_model(folder, model(), tokenizer(), {LANGUAGES_FILE: identifier.to_bytes()})
    assert LANGUAGES_FILE not in Tokenizer.load(folder).files
    file.write_text("".join(f"{line}\n" for line in corpus_lines()[side][:5]), encoding="utf-8")
    flags = ["--to", "de", "--beam-size", "1", "--max-length", "2"]
    assert cli.main(["translate", str(folder), str(file), *flags]) == 0
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 5
    warning = f"but {folder} translates from en to de; for a text in de, use a model that translates from it"
    assert (warning in printed.err) == has_warning
    assert ("warning: 5 of 5 lines look like de (such as “" in printed.err) == has_warning
    (folder / LANGUAGES_FILE).write_bytes(identifier.to_bytes()[:-1] + b"x")
    assert cli.main(["translate", str(folder), str(file), *flags]) == 1
    assert LANGUAGES_FILE in capsys.readouterr().err


XLIFF = (
    '<xliff version="1.2"><file source-language="{}" target-language="{}" original="x"><body><trans-unit id="1">'
    "<source>A man.</source></trans-unit></body></file></xliff>"
)
TMX = '<tmx version="1.4"><body><tu>{}</tu></body></tmx>'
ENGLISH, FRENCH = '<tuv xml:lang="en"><seg>A man.</seg></tuv>', '<tuv xml:lang="fr-CA"><seg>Un homme.</seg></tuv>'
GERMAN, EMPTY = '<tuv xml:lang="de-AT"><seg/></tuv>', '<tuv xml:lang="en"><seg> </seg></tuv>'
GERMAN_TEXT = GERMAN.replace("<seg/>", "<seg>Ein Mann.</seg>")


def test_languages_of_a_document_must_be_those_of_the_model(tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "model"
    identifier = LanguageIdentifier.learn({"en": corpus_lines()[0]}, {"de": corpus_lines()[1]})
    write_model(folder, model(), tokenizer(), {LANGUAGES_FILE: identifier.to_bytes()})
    header = 'msgid ""\nmsgstr ""\n"Language: {}\\n"\n\nmsgid "A man."\nmsgstr ""\n'
    documents = {
        "fr.po": header.format("fr"),
        "en-fr.xlf": XLIFF.format("en", "fr"),
        "de-en.xlf": XLIFF.format("de", "en"),
        "fr.tmx": TMX.format(FRENCH),
        "de-en.tmx": TMX.format(GERMAN_TEXT + EMPTY).replace("<body>", '<header srclang="de-AT"/><body>'),
        "en-fr.tmx": TMX.format(ENGLISH + FRENCH),
        "en.tmx": TMX.format(ENGLISH),
        "en-de-fr.tmx": TMX.format(ENGLISH + FRENCH + GERMAN),
        "unknown.po": header.format(""),
        "de_AT.po": header.format("de_AT"),
        "en-de.xlf": XLIFF.format("en-US", "de-DE"),
        "text.txt": "A man.\n",
    }
    for name, content in documents.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    flags = ["--to", "", "--beam-size", "1", "--max-length", "2"]
    for name in list(documents)[:6]:
        message = run_failing(capsys, folder, tmp_path / name, *flags)
        assert f", but {folder} translates from en to de; use another file or model" in message
    for name in list(documents)[6:]:
        assert cli.main(["translate", str(folder), str(tmp_path / name), *flags]) == 0
        assert "warning: --" not in capsys.readouterr().err
    assert "en-fr.tmx does not contain en and de: it has en, fr-ca, but" in message
    assert cli.main(["translate", str(folder), str(tmp_path / "en-fr.tmx"), *flags, "--tgt", "de"]) == 0
    for name, language in (("fr.po", "fr"), ("text.txt", "en")):
        assert cli.main(["translate", str(folder), str(tmp_path / name), *flags, "--tgt", language]) == 0
        assert f"warning: --tgt is {language}, but {folder} translates from en to de" in capsys.readouterr().err


def test_blocks_stay_in_order(
    trained_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr("attent.decoding.pipeline.CPU_BLOCK_LINES", 2)
    (tmp_path / "text.txt").write_text("\n".join(TEXT * 2), encoding="utf-8")
    translations = run_translate(capsys, trained_model, tmp_path / "text.txt", "--to", "de", "-b", "1").splitlines()
    loaded, words = models.read_model(trained_model), Tokenizer.load(trained_model)
    blocks = [translate_texts(loaded, words, TEXT[i : i + 2], to="de", beam_size=1) for i in (0, 2, 4)] * 2
    assert translations == [" ".join(line.splitlines()) for block in blocks for line in block]


def test_a_closed_pipe_ends_quietly(
    bilingual_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    (tmp_path / "text.txt").write_text("\n".join(TEXT), encoding="utf-8")
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", encoding="utf-8") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert cli.main(["translate", str(bilingual_run), str(tmp_path / "text.txt")]) == cli.EXIT_BROKEN_PIPE
        monkeypatch.undo()
    assert capsys.readouterr().err == ""


def test_each_block_is_written_before_the_next_is_read(
    pipeline: TranslationPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attent.decoding.pipeline.CPU_BLOCK_LINES", 1)
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="\n")
    seen = []

    def chunks() -> Iterator[bytes]:
        for _ in range(3):
            seen.append(out.buffer.getvalue().count(b"\n"))  # type: ignore[attr-defined]
            yield f"{DOG}\n".encode()

    source = LineSource(name="text", chunks=chunks(), has_more=lambda: True)
    translate_lines(pipeline, source, out, ProgressDisplay(io.StringIO()))
    assert seen == [0, 1, 2]


@pytest.fixture
def concurrent_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks in flight, as on a GPU."""
    monkeypatch.setattr(TranslationPipeline, "max_pending_blocks", 2)
    monkeypatch.setattr("attent.decoding.pipeline.CPU_BLOCK_LINES", 1)


@pytest.mark.usefixtures("concurrent_blocks")
def test_concurrent_blocks_stay_in_order(trained_model: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "text.txt").write_text("\n".join(TEXT * 2), encoding="utf-8")
    translations = run_translate(capsys, trained_model, tmp_path / "text.txt", "--to", "de", "-b", "1").splitlines()
    loaded, words = models.read_model(trained_model), Tokenizer.load(trained_model)
    expected = [translate_texts(loaded, words, [text], to="de", beam_size=1)[0] for text in TEXT]
    assert translations == [" ".join(line.splitlines()) for line in expected] * 2


@pytest.mark.usefixtures("concurrent_blocks")
@pytest.mark.parametrize("wrong", [b"\xff", b"a " * 2_001], ids=["not UTF-8", "not to be aligned"])
def test_lines_before_an_invalid_one_are_written_and_none_after(
    trained_model: Path, wrong: bytes, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "text.txt").write_bytes(b"\n".join([b"a dog"] * 4 + [wrong] + [b"a man"] * 4))
    capsys.readouterr()
    assert (
        cli.main(["translate", str(trained_model), str(tmp_path / "text.txt"), "--alignment", "hard", "--to", "de"])
        == 1
    )
    printed = capsys.readouterr()
    assert printed.out.count("\n") == 4
    assert "text.txt, line 5: " in printed.err


@pytest.mark.parametrize(
    ("name", "content", "title"),
    [
        ("page.txt", "<!DOCTYPE html>\n<html>\n", "HTML: give it as a file whose name ends in .html"),
        ("a.txt", "1\n00:00:01,000 --> 00:00:02,000\nHello\n", "an SRT subtitle file"),
        ("a.csv.gz", "a dog\n", "CSV"),
        ("a.odt", "PK\x03\x04", "an office document"),
        ("a.po.gz", 'msgid "a"\nmsgstr ""\n', "PO"),
    ],
)
def test_other_formats_are_refused_by_name(
    name: str, content: str, title: str, tmp_path: Path, capsys: Capture
) -> None:
    data = content.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    output = tmp_path / "out.txt"
    words = ["translate", str(tmp_path / "no model is needed"), str(tmp_path / name), "-o", str(output)]
    assert cli.main(words) == 1
    assert f"{name} must be text, but is {title}" in capsys.readouterr().err
    assert not output.exists()


def test_lines_of_other_formats_are_translated_on_request(
    trained_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    page = b"<!DOCTYPE html>\n<p>a dog</p>\n"
    set_stdin(monkeypatch, page)
    assert cli.main(["translate", str(trained_model), "--to", "de"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "standard input must be text, but is HTML" in printed.err
    for name in ("page.html", "catalog.po"):
        (tmp_path / name).write_bytes(page)
        assert (
            cli.main(["translate", str(trained_model), str(tmp_path / name), "--to", "de", "--input-type", "lines"])
            == 0
        )
        assert capsys.readouterr().out.count("\n") == 2


@pytest.mark.usefixtures("concurrent_blocks")
def test_no_block_is_held_back_while_input_is_pending(pipeline: TranslationPipeline) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="\n")
    more = [True, True, False, False]  # after each line: the third one blocks
    seen = []

    def chunks() -> Iterator[bytes]:
        for _ in more:
            seen.append(out.buffer.getvalue().count(b"\n"))  # type: ignore[attr-defined]
            yield f"{DOG}\n".encode()

    source = LineSource(name="text", chunks=chunks(), has_more=lambda: more[len(seen) - 1])
    translate_lines(pipeline, source, out, ProgressDisplay(io.StringIO()))
    assert seen == [0, 0, 0, 3]


def test_output_file_is_written_and_never_the_input(trained_model: Path, tmp_path: Path, capsys: Capture) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "out.txt"
    text.write_text("a dog\n\na man", encoding="utf-8")
    assert run_translate(capsys, trained_model, text, "--to", "de", "-o", out) == ""
    assert out.read_text(encoding="utf-8") == run_translate(capsys, trained_model, text, "--to", "de", "-o", "-")
    assert "must not be the input file" in run_failing(capsys, trained_model, text, "--to", "de", "-o", text)
    assert "in an existing folder" in run_failing(
        capsys, trained_model, text, "--to", "de", "-o", tmp_path / "no" / "x"
    )
    assert text.read_text(encoding="utf-8") == "a dog\n\na man"


def test_a_failed_run_keeps_the_old_output_and_names_the_partial_one(
    trained_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    text, keep, partial = (tmp_path / name for name in ("text.txt", "keep.txt", "keep.txt.partial"))
    text.write_bytes(b"a dog\nein Stra\xdfe\n")
    keep.write_text("old\n", encoding="utf-8")
    for number in (1, 2):
        assert cli.main(["translate", str(trained_model), str(text), "--to", "de", "-o", str(keep)]) == 1
        *messages, error = capsys.readouterr().err.splitlines()
        assert "text.txt, line 2: must be UTF-8, but byte 9 is 0xdf" in error
        assert (
            f"keep.txt keeps its old content, because the run did not finish; its output so far is in {partial}"
            in (messages[-1])
        )
        assert (number == 2) == any("keep.txt.partial: is left from a run that did not finish" in m for m in messages)
    assert keep.read_text(encoding="utf-8") == "old\n"
    assert partial.read_text(encoding="utf-8").count("\n") == 1


@pytest.mark.slow
def test_a_killed_run_keeps_the_old_output(trained_model: Path, tmp_path: Path) -> None:
    keep, partial = tmp_path / "keep.txt", tmp_path / "keep.txt.partial"
    keep.write_text("old\n", encoding="utf-8")
    command = [sys.executable, "-m", "attent", "translate", str(trained_model), "--to", "de", "-o", str(keep)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(b"a dog\n")
    process.stdin.flush()  # and no end: the run waits for more
    end = time.monotonic() + 60
    while not (partial.exists() and partial.stat().st_size) and time.monotonic() < end:
        time.sleep(0.05)
    process.kill()
    process.communicate()
    assert keep.read_text(encoding="utf-8") == "old\n"
    assert partial.read_text(encoding="utf-8").count("\n") == 1


def test_a_glossary_or_a_file_of_the_model_is_never_the_output(
    trained_model: Path, tmp_path: Path, capsys: Capture
) -> None:
    text, glossary = tmp_path / "text.txt", tmp_path / "glossary.tsv"
    text.write_text("a dog\n", encoding="utf-8")
    glossary.write_text("dog\tHund\n", encoding="utf-8")
    for output in (glossary, trained_model / "config.json", trained_model / "manifest.json"):
        before = output.read_bytes()
        arguments = [trained_model, text, "--to", "de", "--glossary", glossary, "-o", output]
        assert f"{output.name}: must not be an input" in run_failing(capsys, *arguments)
        assert output.read_bytes() == before


def test_redirected_input_is_never_the_output(
    trained_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a dog\n", encoding="utf-8")
    with open(text, encoding="utf-8") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert "text.txt: must not be the input file; use another name" in run_failing(
            capsys, trained_model, "-", "--to", "de", "-o", text
        )
    with open(text, "a", encoding="utf-8") as stdout:  # attent translate MODEL text.txt >> text.txt
        monkeypatch.setattr(sys, "stdout", stdout)
        assert cli.main(["translate", str(trained_model), str(text), "--to", "de"]) == 1
    assert "standard output must not be the input file" in capsys.readouterr().err
    assert text.read_text(encoding="utf-8") == "a dog\n"


def test_a_compressed_file_is_decompressed(
    trained_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    packed = gzip.compress("\n".join(TEXT).encode())
    (tmp_path / "text.gz").write_bytes(packed)
    (tmp_path / "text.txt").write_text("\n".join(TEXT), encoding="utf-8")
    outputs = [
        run_translate(capsys, trained_model, tmp_path / name, "--to", "de", "-b", 1) for name in ("text.gz", "text.txt")
    ]
    assert outputs[0] == outputs[1]
    set_stdin(monkeypatch, packed)
    assert "is it a text file" in run_failing(capsys, trained_model, "--to", "de")


# ---- languages -------------------------------------------------------------------------------------------------------


def test_a_multilingual_model_needs_a_target_language(
    multilingual_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    set_stdin(monkeypatch, b"the red cat sees a dog\n")
    message = run_failing(capsys, multilingual_run)
    assert "--to" in message
    assert "de, fr" in message
    message = run_failing(capsys, multilingual_run, "--to", "xx")
    assert "`xx`" in message
    assert "de, fr" in message
    assert cli.main(["translate", str(multilingual_run), "--to", "fr"]) == 0
    assert capsys.readouterr().out.count("\n") == 1


def test_a_bilingual_model_rejects_a_target_language(
    bilingual_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    set_stdin(monkeypatch, b"a dog\n")
    assert "one target language" in run_failing(capsys, bilingual_run, "--to", "de")


def test_an_empty_target_language_means_no_tag(
    trained_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """A model may be fine-tuned without tags while its tokenizer still has them."""
    set_stdin(monkeypatch, b"a dog\n")
    out = run_translate(capsys, trained_model, "--to", "")
    loaded, words = models.read_model(trained_model), Tokenizer.load(trained_model)
    plain, into_german = (translate_texts(loaded, words, ["a dog"], to=to)[0] for to in (None, "de"))
    assert plain != into_german
    assert out == f"{' '.join(plain.splitlines())}\n"


# ---- constraints ----------------------------------------------------------------------------------------------------


def test_require_ban_and_prefix(trained_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    set_stdin(monkeypatch, f"{DOG}\n\n{MAN}\n".encode())
    plain = run_translate(capsys, trained_model, "--to", "de").split("\n")
    assert "langsam" in plain[0]
    set_stdin(monkeypatch, f"{DOG}\n\n{MAN}\n".encode())
    flags = ("--require", "Hund", "--require", "alten Park", "--prefix", "Zwei Frauen", "--ban", "Langsam")
    translations = run_translate(capsys, trained_model, "--to", "de", *flags).split("\n")
    assert translations[1] == ""
    for line in (translations[0], translations[2]):
        assert line.startswith("Zwei Frauen")
        assert "Hund" in line
        assert "alten Park" in line
        assert "langsam" not in line


def test_a_banned_phrase_in_the_prefix_is_refused(
    trained_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    flags = ("--to", "de", "--prefix", "Ein Hund", "--ban", "hund")
    set_stdin(monkeypatch, b"")
    error = run_failing(capsys, trained_model, *flags)
    assert "attent: error: the prefix `Ein Hund` contains the banned `hund`; leave one out" in error


def test_glossary_terms_occur_where_required(
    trained_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    terms = tmp_path / "terms.tsv"
    terms.write_text("dog\tEisenbahn\n", encoding="utf-8")
    set_stdin(monkeypatch, f"{DOG}\n{MAN}\n".encode())
    translations = run_translate(capsys, trained_model, "--to", "de", "--glossary", terms).splitlines()
    assert ["Eisenbahn" in line for line in translations] == [True, False]
    terms.write_text("dog\tHund\ncat Katze\n", encoding="utf-8")
    assert f"{terms}:2: must be a term" in run_failing(capsys, trained_model, "--glossary", terms)


def test_lines_before_an_impossible_constraint_are_written(
    trained_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    set_stdin(monkeypatch, f"{DOG}\n{MAN}\n{'a dog. ' * 100}\n{DOG}\n".encode())
    capsys.readouterr()
    arguments = ["translate", str(trained_model), "--to", "de", "--require", "Hund", "--engine", "torch"]
    assert cli.main([*arguments, "--max-length", "30"]) == 1
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 2
    assert "standard input, line 3: a text with a prefix or required phrases must be" in check_one_line(printed.err)


# ---- search options --------------------------------------------------------------------------------------------------


def test_help_has_the_length_penalty_formulas(capsys: Capture) -> None:
    assert cli.main(["translate", "--help"]) == 0
    page = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for formula in SCORE_FORMULAS.values():
        assert formula in page
    assert page.index("Common") < page.index("Constraints") < page.index("Sampling") < page.index("Device")


def test_help_does_not_import_torch() -> None:
    code = "import sys; from attent import cli; cli.main(['translate', '--help']); print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()[-1] == "False"


def test_translator_is_public() -> None:
    assert attent.Translator is Translator


def test_flags_reach_the_pipeline(trained_model: Path, tmp_path: Path) -> None:
    (tmp_path / "terms.tsv").write_text("dog\tHund\n", encoding="utf-8")
    flags = TranslateFlags(
        to="de", src="en", glossary=tmp_path / "terms.tsv", prefix="Ein ", require=("Hund",), ban=("Katze",),
        mbr_candidates=5, split_sentences=True, output_type="json", with_score=True,
        alignment="soft", n_best=2, engine="torch", device="cpu",
    )  # fmt: skip
    options = SearchOptions(beam_size=5, n_best=2)
    pipeline = build_pipeline(trained_model, options, flags, ProgressDisplay(io.StringIO()))
    assert (pipeline.to, pipeline.source_lang, pipeline.options) == ("de", "en", options)
    assert pipeline.constraints == PhraseConstraints(prefix="Ein ", require=("Hund",), ban=("Katze",))
    assert pipeline.glossary is not None
    assert [match.forms for match in pipeline.glossary.find_terms("a dog")] == [("Hund",)]
    assert (pipeline.mbr_candidates, pipeline.split_sentences) == (5, True)
    output = pipeline.output_format
    assert (output.type, output.n_best, output.with_score, output.alignment) == ("json", 2, True, "soft")
    assert output.score_formula == options.score_formula


def test_aliases_of_other_toolkits(trained_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    ours = ["--beam-size", "3", "--length-penalty", "1.5", "--n-best", "2", "--max-length", "9", "--min-length", "4"]
    theirs = ["--num_beams", "3", "--lenpen", "1.5", "--nbest", "2", "--max-new-tokens", "9", "--min_length", "4"]
    set_stdin(monkeypatch, b"a dog\n")
    expected = run_translate(capsys, trained_model, "--to", "de", *ours)
    set_stdin(monkeypatch, b"a dog\n")
    assert expected == run_translate(capsys, trained_model, "--to", "de", *theirs)
    assert len(expected.splitlines()) == 2


def test_search_flags_become_options_with_a_sufficient_beam() -> None:
    assert build_search_options(SearchFlags()) == SearchOptions()
    assert build_search_options(SearchFlags(n_best=7)) == SearchOptions(n_best=7, beam_size=7)
    assert build_search_options(SearchFlags(beam_groups=3)).beam_size == 6
    assert build_search_options(SearchFlags(prevent_loops=False)) == SearchOptions(prevent_loops=False)
    assert build_search_options(SearchFlags(seed=5)).sampling is not None
    assert build_search_options(SearchFlags(seed=5, n_best=9)).beam_size == 4
    for flags, sampling in (
        ({"sample": True}, SamplingOptions()),
        ({"temperature": 0.5}, SamplingOptions(temperature=0.5)),
        ({"top_k": 3, "top_p": 0.5, "seed": 0}, SamplingOptions(top_k=3, top_p=0.5, seed=0)),
        ({"seed": 1}, SamplingOptions()),
    ):
        for beam_size in (1, 2):
            expected = SearchOptions(beam_size=beam_size, n_best=3, sampling=sampling)
            assert build_search_options(SearchFlags(beam_size=beam_size, n_best=3, **flags)) == expected
    assert build_search_options(SearchFlags(beam_size=1)) == SearchOptions(beam_size=1)
    assert build_search_options(SearchFlags(), min_beam_size=9).beam_size == 9
    assert build_search_options(SearchFlags(beam_size=1), min_beam_size=9).beam_size == 1
    with pytest.raises(ValueError, match="widen the beam"):
        build_search_options(SearchFlags(beam_size=3, n_best=5))
    message = use_flag_names("`n_best` must be at most `beam_size`=3, or raise max_length")
    assert message == "`--n-best` must be at most `--beam-size`=3, or raise --max-length"


def test_a_beam_of_one_with_sampling_flags_samples(
    trained_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """Greedy search is what CTranslate2 supports; with any sampling flag it must not take over."""
    outputs = []
    for flags in (
        ["--temperature", "3"],
        ["-b", "1", "--temperature", "3"],
        ["-b", "1", "--temperature", "3", "--seed", "2"],
        ["-b", "1"],
    ):
        set_stdin(monkeypatch, f"{DOG}\n".encode())
        assert cli.main(["translate", str(trained_model), "--to", "de", *flags]) == 0
        outputs.append(capsys.readouterr().out)
    wide, hot, seeded, greedy = outputs
    assert hot == wide
    assert len({hot, seeded, greedy}) == 3


def test_samples_depend_on_seed_and_line_and_not_on_chunks(
    trained_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr("attent.decoding.pipeline.CPU_BLOCK_LINES", 2)
    outputs = []
    for seed, slow in ((1, False), (1, True), (2, False)):
        set_stdin(monkeypatch, b"a dog\n" * 5)
        monkeypatch.setattr(input_lines, "CHUNK_BYTES", 6 if slow else 100)
        outputs.append(
            run_translate(capsys, trained_model, "--to", "de", "--seed", seed, "--temperature", 3).splitlines()
        )
    assert outputs[0] == outputs[1]
    assert len(set(outputs[0])) == 5
    assert not set(outputs[0]) & set(outputs[2])


def test_json_has_formula_and_alignment(trained_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    set_stdin(monkeypatch, b"a dog\n\n")
    flags = ("--output-type", "json", "--alignment", "soft", "--alpha", 0.5, "--n-best", 2)
    rows = [json.loads(row) for row in run_translate(capsys, trained_model, "--to", "de", *flags).splitlines()]
    assert [row["formula"] for row in rows] == ["score = log_prob / length^alpha, alpha = 0.5"] * 2
    assert [len(weights) for weights in rows[0]["weights"]] == [2] * len(rows[0]["hyp"].split())
    assert len(rows[0]["n_best"]) == 2
    assert rows[1]["hyp"] == ""


def test_ensemble(trained_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    set_stdin(monkeypatch, b"a dog\n")
    alone = run_translate(capsys, trained_model, "--to", "de", "--with-score")
    set_stdin(monkeypatch, b"a dog\n")
    assert run_translate(capsys, trained_model, "--to", "de", "--with-score", "--ensemble", trained_model) == alone


def test_a_long_line_is_split_and_reported(
    trained_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    set_stdin(monkeypatch, b"a dog\n" + b"A man is walking. " * 60 + b"\n")
    capsys.readouterr()
    arguments = ["translate", str(trained_model), "--to", "de", "-b", "1", "--max-length", "20", "--engine", "torch"]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr()
    assert printed.out.count("\n") == 2
    assert "standard input, line 2: too long to translate at once" in check_one_line(printed.err, "")
    monkeypatch.setattr("attent.decoding.pipeline.MAX_ALIGNED_WORDS", 240)
    set_stdin(monkeypatch, b"A man is walking. " * 60 + b"\n")
    assert cli.main([*arguments, "--alignment", "hard"]) == 0
    monkeypatch.setattr("attent.decoding.pipeline.MAX_ALIGNED_WORDS", 239)
    capsys.readouterr()
    set_stdin(monkeypatch, b"a dog\n" + b"A man is walking. " * 60 + b"\n")
    assert cli.main([*arguments, "--alignment", "hard"]) == 1
    printed = capsys.readouterr()
    assert printed.out.count("\n") == 1
    assert "error: standard input, line 2: a line must have at most 239 words for alignment" in printed.err


def test_an_unavailable_device_is_reported(
    trained_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    set_stdin(monkeypatch, b"a dog\n")
    message = run_failing(capsys, trained_model, "--device", "cuda:77")
    assert "device cuda:77: cannot be used here" in message
    assert "this machine has" in message
    assert "device gpu: cannot be used here" in run_failing(capsys, trained_model, "--device", "gpu")


# ---- documents -------------------------------------------------------------------------------------------------------

PO = """msgid ""
msgstr "Content-Type: text/plain; charset=UTF-8\\n"

msgid "A dog"
msgstr ""

msgid "A man"
msgstr "Ein Mann"
"""


def test_a_po_file_is_filled_and_overwritten_only_in_place(
    trained_model: Path, tmp_path: Path, capsys: Capture
) -> None:
    file = tmp_path / "text.po"
    file.write_text(PO, encoding="utf-8")
    capsys.readouterr()
    arguments = ["translate", str(trained_model), str(file), "--to", "de", "--engine", "torch"]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr()
    assert f"attent: {file}: 1 filled, 1 kept, 0 skipped" in printed.err
    assert printed.out != PO
    assert "#, fuzzy" in printed.out
    assert 'msgstr "Ein Mann"' in printed.out
    assert file.read_text(encoding="utf-8") == PO
    assert cli.main([*arguments, "-o", str(tmp_path / "out.po")]) == 0
    assert (tmp_path / "out.po").read_text(encoding="utf-8") == printed.out
    assert cli.main([*arguments, "--in-place"]) == 0
    assert file.read_text(encoding="utf-8") == printed.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.po", "text.po"]


def test_in_place_is_for_documents_only(trained_model: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "text.txt").write_text("a dog", encoding="utf-8")
    assert "--in-place is for documents" in run_failing(capsys, trained_model, tmp_path / "text.txt", "--in-place")


def test_a_damaged_document_is_rejected_and_unchanged(trained_model: Path, tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "text.xlf"
    file.write_text("<xliff", encoding="utf-8")
    assert str(file) in run_failing(capsys, trained_model, file, "--to", "de", "--in-place")
    assert file.read_text(encoding="utf-8") == "<xliff"


@pytest.mark.parametrize("engine", ["torch", "ctranslate2"])
def test_a_page_keeps_its_markup_with_every_engine(
    engine: str, trained_model: Path, tmp_path: Path, capsys: Capture
) -> None:
    pytest.importorskip("ctranslate2")
    page = '<html lang="en"><title>A dog</title><p class=x>A <b>dog</b> and a <i title="A man">man</i>.<br>\n'
    page += "<pre>A dog</pre>"
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    arguments = ["translate", str(trained_model), str(tmp_path / "page.html"), "--to", "de", "--engine", engine]
    assert cli.main([*arguments, "--src", "en", "--tgt", "de"]) == 0
    printed = capsys.readouterr()
    assert "page.html: 2 filled, 0 kept, 0 skipped" in printed.err
    assert "placeholders" not in printed.err  # no constraint that CTranslate2 does not support
    assert printed.out.startswith('<html lang="de"><title>')
    for tag in ("<p class=x>", "<b>", "</b>", "</i>", "<br>\n<pre>A dog</pre>"):
        assert printed.out.count(tag) == 1
    assert "A dog</title>" not in printed.out
    assert 'title="A man"' not in printed.out


def test_placeholders_that_a_model_loses_are_put_back(trained_model: Path, tmp_path: Path, capsys: Capture) -> None:
    entry = '\n#, c-format\nmsgid "A dog sees %s and %s and %d"\nmsgstr ""\n'
    (tmp_path / "a.po").write_text(PO.partition("\n\n")[0] + "\n" + entry, encoding="utf-8")
    assert cli.main(["translate", str(trained_model), str(tmp_path / "a.po"), "--to", "de"]) == 0
    printed = capsys.readouterr()
    assert "1 filled, 0 kept, 0 skipped" in printed.err
    target = printed.out.splitlines()[-1]
    assert re.findall(r"%\w", target) == ["%s", "%s", "%d"]


def test_skipped_units_are_listed_up_to_a_limit(tmp_path: Path) -> None:
    for count, lines in ((0, 1), (20, 21), (21, 22)):
        skipped = tuple(SkippedUnit(line=i + 1, reason="it is long", source="a\tb") for i in range(count))
        result = PretranslateResult(content=b"", filled_count=1234, existing_count=5, skipped=skipped)
        messages: list[str] = []
        report_pretranslation(result, Path("a.po"), messages.append)
        assert messages[0] == f"a.po: 1,234 filled, 5 kept, {count} skipped"
        assert messages[1:2] == ["a.po, line 1: skipped, because it is long: a\\tb"] * (count > 0)
        assert (messages[-1] == "... and 1 more") == (count == 21)
        assert len(messages) == lines


# ---- typing at a terminal --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("ending", "code", "last_words"), [("ctrl-d", 0, ""), ("ctrl-c", 130, "attent: interrupted")])
def test_typed_lines_are_answered_until_ctrl_d_or_ctrl_c(
    trained_model: Path, ending: str, code: int, last_words: str
) -> None:
    pty = pytest.importorskip("pty", reason="needs a pseudo-terminal")
    controller, terminal = pty.openpty()
    command = [sys.executable, "-m", "attent", "translate", str(trained_model), "--to", "de", "--engine", "torch"]
    process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal)
    output = ""

    def read_until(text: str) -> None:
        nonlocal output
        deadline = time.monotonic() + 60
        while text not in output and select.select([controller], [], [], max(0.0, deadline - time.monotonic()))[0]:
            output += os.read(controller, 2**16).decode()

    try:
        read_until("end with Ctrl-D\r\n")
        assert output == "attent: type one sentence per line; end with Ctrl-D\r\n"
        expected = Translator.load(trained_model, engine="torch").translate([DOG], to="de")[0].text
        for _ in range(2):
            output = ""
            os.write(controller, f"{DOG}\n".encode())
            read_until(f"{expected}\r\n")
            assert output == f"{DOG}\r\n{expected}\r\n"  # the terminal shows what is typed
        output = ""
        if ending == "ctrl-d":
            os.write(controller, b"\x04")
        else:
            process.send_signal(signal.SIGINT)
        assert process.wait(60) == code
        read_until(last_words)
        assert output.strip() == last_words
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
        os.close(controller)


# ---- progress --------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_shown_on_terminals_only_and_cleared() -> None:
    now = [0.0]
    for stream, quiet, shown in ((Terminal(), False, True), (Terminal(), True, False), (io.StringIO(), False, False)):
        now[0] = 0.0
        with ProgressDisplay(stream, clock=lambda: now[0]) as screen:
            screen.start(1000, quiet=quiet)
            now[0] = 2.0
            screen.update(100, 250)
            screen.print_message("a word")
        message = stream.getvalue()
        assert ("100 lines, 50 a second, 25%, 6 s left" in message) == shown
        assert message.endswith("\r\x1b[Kattent: a word\n" if shown else "attent: a word\n")


def draw_progress(size: int | None, *shows: tuple[float, int, int | None]) -> list[str]:
    """Return the progress lines for (seconds, lines, total lines)."""
    now = [0.0]
    with ProgressDisplay(stream := Terminal(), clock=lambda: now[0]) as screen:
        screen.start(size, quiet=False)
        for seconds, lines, of in shows:
            now[0] = seconds
            screen.update(lines, lines, total_lines=of)
        return stream.getvalue().split("\r\x1b[K")[1:]


def test_speed_is_measured_over_the_last_seconds() -> None:
    """The start may be slow, for example on a GPU."""
    assert draw_progress(1000, (20.0, 10, None), (22.0, 110, None), (26.0, 310, None), (28.0, 410, None)) == [
        "10 lines, 0.5 a second, 1%, 33 min 0 s left",
        "110 lines, 5.0 a second, 11%, 2 min 58 s left",
        "310 lines, 50 a second, 31%, 14 s left",
        "410 lines, 50 a second, 41%, 12 s left",
    ]


def test_a_second_pass_restarts_the_speed() -> None:
    """A document may be processed in several passes."""
    assert draw_progress(None, (1.0, 100, 200), (2.0, 200, 200), (3.0, 3, 6), (4.0, 6, 6)) == [
        "100 lines, 100 a second, 50%, 1 s left",
        "200 lines, 100 a second, 100%, 0 s left",
        "3 lines, 3.0 a second, 50%, 1 s left",
        "6 lines, 3.0 a second, 100%, 0 s left",
    ]


def test_a_finished_fraction_without_progress_has_no_time_left() -> None:
    assert draw_progress(100, (1.0, 100, None), (7.0, 100, None), (8.0, 200, None)) == [
        "100 lines, 100 a second, 100%, 0 s left",
        "100 lines, 0.0 a second, 100%",
        "200 lines, 14 a second, 100%",
    ]
    assert draw_progress(None, (1.0, 10, None), (1.1, 11, None), (1.25, 12, None)) == [
        "10 lines, 10 a second",
        "12 lines, 9.6 a second",
    ]


# ---- invalid input ---------------------------------------------------------------------------------------------------


def test_invalid_utf8_is_reported_after_the_lines_before_it(
    bilingual_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    content = "a dog\n\nein Mädchen\n".encode("latin-1")
    (tmp_path / "text.txt").write_bytes(content)
    capsys.readouterr()
    assert cli.main(["translate", str(bilingual_run), str(tmp_path / "text.txt")]) == 1
    printed = capsys.readouterr()
    assert printed.out.count("\n") == 2
    message = check_one_line(printed.err)
    assert f"{tmp_path / 'text.txt'}, line 3: must be UTF-8, but byte 6 is 0xe4; convert" in message
    set_stdin(monkeypatch, b"\x7fELF\0\0")
    assert "standard input, line 1: must be text, but byte 5 is 0" in run_failing(capsys, bilingual_run)


def test_a_run_without_a_model_is_reported(bilingual_run: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "run.toml").write_bytes((bilingual_run / "run.toml").read_bytes())
    (tmp_path / "text.txt").write_bytes(b"a dog")
    assert "its run has not saved one yet" in run_failing(capsys, tmp_path, tmp_path / "text.txt")


@pytest.mark.parametrize("command", [["translate"], ["look", "A dog."], ["score", "--data", "phrases"]])
def test_a_deleted_config_is_named(command: list[str], bilingual_run: Path, tmp_path: Path, capsys: Capture) -> None:
    folder = shutil.copytree(bilingual_run, tmp_path / "model", ignore=shutil.ignore_patterns("state", "config.json"))
    assert cli.main([command[0], str(folder), *command[1:]]) == 1
    error = capsys.readouterr().err
    assert f"{folder / 'config.json'}: is missing, though manifest.json lists it; copy the model again" in error
    (folder / "manifest.json").unlink()
    assert cli.main([command[0], str(folder), *command[1:]]) == 1
    assert f"{folder}: must hold config.json, but does not" in capsys.readouterr().err


def test_missing_files_are_named(
    bilingual_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    set_stdin(monkeypatch, b"a dog\n")
    message = run_failing(capsys, tmp_path / "nowhere")
    assert str(tmp_path / "nowhere") in message
    assert "does not exist" in message
    message = run_failing(capsys, bilingual_run, tmp_path / "nothing.txt")
    assert f"{tmp_path / 'nothing.txt'}: must be a text file" in message
    assert f"{tmp_path}: must be a text file" in run_failing(capsys, bilingual_run, tmp_path)
    assert "tokenizer" in run_failing(capsys, save_without_tokenizer(tmp_path / "bare"))


def save_without_tokenizer(folder: Path) -> Path:
    model().save(folder)
    return folder


# ---- model card and info --------------------------------------------------------------------------------------------


def test_model_card_has_checksums_and_the_command(bilingual_run: Path, multilingual_run: Path) -> None:
    corpus = bilingual_run.parent / "corpus.tsv"
    assert hash_files(["corpus"], [corpus]) == (("corpus", digest(corpus)),)
    card = (bilingual_run / "card.md").read_text(encoding="utf-8")
    assert f"| `{digest(corpus)}` |" in card
    assert "| `train.label_smoothing` | `0.1` |" in card
    assert "| `train.lr` | `0.01` |" in card
    assert "| `model.dropout` | `0.1` |" in card
    assert "--to" not in card
    card = (multilingual_run / "card.md").read_text(encoding="utf-8")
    assert " --to de < input.txt" in card
    assert card.count(digest(multilingual_run.parent / "text.tsv")) == 1


def test_info_of_a_finished_run(bilingual_run: Path, capsys: Capture) -> None:
    assert cli.main(["info", str(bilingual_run)]) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert "12 steps; complete" in page
    assert "scores validation" in page


# ---- layout and permissions ----------------------------------------------------------------------------------------


def test_surrounding_whitespace_is_kept(trained_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    set_stdin(monkeypatch, b"the red cat\n  the red cat\t\n \n")
    first, second, empty = run_translate(capsys, trained_model, "--to", "de").split("\n")[:3]
    assert (second, empty.strip()) == (f"  {first}\t", "")
    assert first == first.strip() != ""


def test_in_place_keeps_permissions_and_other_files(trained_model: Path, tmp_path: Path) -> None:
    file, other = tmp_path / "menu.po", tmp_path / "menu.po.new"
    file.write_text('msgid ""\nmsgstr ""\n\nmsgid "the red cat"\nmsgstr ""\n')
    file.chmod(0o640)
    other.write_text("mine")
    assert cli.main(["translate", str(trained_model), str(file), "--to", "de", "--engine", "torch", "--in-place"]) == 0
    assert "#, fuzzy" in file.read_text()
    assert (other.read_text(), file.stat().st_mode & 0o777) == ("mine", 0o640)
    assert {path.name for path in tmp_path.iterdir()} == {"menu.po", "menu.po.new"}


def test_document_flags_are_checked(trained_model: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "menu.po").write_text('msgid "the red cat"\nmsgstr ""\n')
    assert "leave --n-best out" in run_misused(capsys, trained_model, tmp_path / "menu.po", "--n-best", "2")


def test_fields_of_a_document_are_translated(trained_model: Path, tmp_path: Path, capsys: Capture) -> None:
    table = tmp_path / "table.csv"
    table.write_text("id,text,note\n1,a dog,a man\n", encoding="utf-8")
    assert cli.main(["translate", str(trained_model), str(table), "--to", "de", "--field", "text"]) == 0
    header, row = capsys.readouterr().out.splitlines()
    assert header == "id,text,note"
    assert row.startswith("1,")
    assert row.endswith(",a man")
    assert row != "1,a dog,a man"
    assert "no column x: its first line names id, text, note" in run_failing(
        capsys, trained_model, table, "--to", "de", "--field", "x"
    )
    (tmp_path / "text.txt").write_text("a dog\n", encoding="utf-8")
    assert "--field is for documents" in run_failing(
        capsys, trained_model, tmp_path / "text.txt", "--to", "de", "--field", "x"
    )


def test_report_and_bilingual_file_of_a_document(trained_model: Path, tmp_path: Path, capsys: Capture) -> None:
    page, report, bilingual = (tmp_path / name for name in ("a.html", "report.tsv", "a.xlf"))
    page.write_text("<p>a man in <b>blue</b>", encoding="utf-8")
    flags = ["--to", "de", "--report", report, "--bilingual", bilingual]
    printed = run_translate(capsys, trained_model, page, *flags)
    line, state, _, source, target = report.read_text(encoding="utf-8").splitlines()[1].split("\t")
    assert (line, source, target in printed) == ("1", "a man in <b>blue</b>", True)
    assert state in ("translated", "needs-review")
    assert "<source>a man in <bpt" in bilingual.read_text(encoding="utf-8")
    assert "must not be an input" in run_failing(capsys, trained_model, page, "--to", "de", "--report", page)
    assert "existing folder" in run_failing(capsys, trained_model, page, "--to", "de", "--report", tmp_path / "x" / "y")
    assert "must be a file" in run_failing(capsys, trained_model, page, "--to", "de", "--bilingual", "-")
    text = tmp_path / "a.txt"
    text.write_text("a\n", encoding="utf-8")
    assert "--bilingual is for documents" in run_failing(capsys, trained_model, text, "--to", "de", *flags[-2:])
