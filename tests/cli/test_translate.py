"""`attent translate` as a person meets it: as many lines out as in, and a sentence for what it cannot translate."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

import attent
from attent import cli, models
from attent.cli.interactive import COMMANDS, run_session
from attent.cli.line_progress import ProgressDisplay
from attent.cli.search_flags import SearchFlags, build_search_options, use_flag_names
from attent.decoding import Translator, input_lines
from attent.decoding.input_lines import InputLine, LineSource, parse_text_line
from attent.decoding.options import SCORE_FORMULAS, SearchOptions
from attent.decoding.pipeline import TranslationPipeline, translate_lines
from attent.decoding.translator import translate_texts
from attent.models import Seq2Seq, shift_right
from attent.models.config import mirror_encoder
from attent.nn import StackConfig
from attent.text.tokenizer import Tokenizer
from attent.training.loop import write_model
from attent.training.tasks.base import hash_file
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
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two tags that has seen one, for long enough to write sentences: what it is asked for can be seen."""
    folder, words = tmp_path_factory.mktemp("learned") / "model", tokenizer()
    stack = StackConfig(layers=1, width=48, heads=4, ffn_width=96, dropout=0.0)
    torch.manual_seed(1)
    made = Seq2Seq(replace(model().config, encoder=stack, decoder=mirror_encoder(stack)))
    optimiser = torch.optim.Adam(made.parameters(), lr=5e-3)
    sources, targets = (side[:640] for side in corpus_lines())
    pairs = list(zip(words.encode_source(sources, "de"), words.encode_target(targets), strict=True))
    for step in range(80):
        (source, lengths), (target, ends) = map(padded, zip(*pairs[step * 32 % 640 :][:32], strict=True))
        logits = made(source, shift_right(target, made.config.start_id), lengths, ends)
        loss = cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=words.target.pad)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    write_model(folder, made.eval(), words)
    return folder


def padded(rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    filled = pad_sequence([torch.tensor(row) for row in rows], True, tokenizer().target.pad)
    return filled, torch.tensor([len(row) for row in rows])


@pytest.fixture(scope="module")
def desk(learned: Path) -> TranslationPipeline:
    translator = Translator.load(learned, engine="torch")
    return TranslationPipeline(translator=translator, options=SearchOptions(), to="de")


def give(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="ascii"))


def printed(capsys: Capture, *arguments: object) -> str:
    """What the command prints, by our own engine: that of CTranslate2 rounds, and ties are broken otherwise."""
    capsys.readouterr()
    assert cli.main(["translate", *map(str, arguments), "--engine", "torch"]) == 0
    return capsys.readouterr().out


def refused(capsys: Capture, *arguments: object) -> str:
    capsys.readouterr()
    assert cli.main(["translate", *map(str, arguments)]) == 1
    found = capsys.readouterr()
    assert found.out == ""
    return sentence(found.err)


def sentence(told: str, kind: str = "error: ") -> str:
    assert told.startswith(f"attent: {kind}")
    assert len(told.splitlines()) == 1
    return told


def misused(capsys: Capture, *arguments: object) -> str:
    """A command that is wrong in itself."""
    capsys.readouterr()
    assert cli.main(["translate", *map(str, arguments)]) == cli.EXIT_USAGE
    return sentence(capsys.readouterr().err)


# ---- lines -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_each_line_gives_one_line_in_its_place(
    learned: Path, end: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    give(monkeypatch, end.join([*TEXT, ""]).encode())
    out = printed(capsys, learned, "-", "--to", "de")
    loaded, words = models.read_model(learned), Tokenizer.load(learned)
    expected = translate_texts(loaded, words, TEXT, to="de")
    assert len(set(expected)) >= 4  # else this would show little
    assert out == "".join(f"{' '.join(line.splitlines())}\n" for line in expected)
    assert [line == "" for line in out.split("\n")[:-1]] == [not text.strip() for text in TEXT]


@pytest.mark.parametrize(
    ("content", "count"), [(b"", 0), (b"\n", 1), (b"\n\n\n", 3), (b"a dog", 1), (b"\xef\xbb\xbfa dog\n", 1)]
)
def test_odd_ends_of_a_text_are_counted_as_everywhere(
    trained: Path, content: bytes, count: int, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "text.txt").write_bytes(content)
    capsys.readouterr()
    assert cli.main(["translate", str(trained), str(tmp_path / "text.txt")]) == 0
    found = capsys.readouterr()
    assert found.out.count("\n") == count
    assert ("is empty, there is nothing to translate" in found.err) == (count == 0)


def test_more_lines_than_one_block_stay_in_order(
    learned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr("attent.decoding.pipeline.CPU_BLOCK_LINES", 2)
    (tmp_path / "text.txt").write_text("\n".join(TEXT * 2), encoding="utf-8")
    found = printed(capsys, learned, tmp_path / "text.txt", "--to", "de", "-b", "1").splitlines()
    loaded, words = models.read_model(learned), Tokenizer.load(learned)
    blocks = [translate_texts(loaded, words, TEXT[i : i + 2], to="de", beam_size=1) for i in (0, 2, 4)] * 2
    assert found == [" ".join(line.splitlines()) for block in blocks for line in block]


def test_a_reader_that_goes_away_ends_it_quietly(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    (tmp_path / "text.txt").write_text("\n".join(TEXT), encoding="utf-8")
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", encoding="utf-8") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert cli.main(["translate", str(trained), str(tmp_path / "text.txt")]) == cli.EXIT_BROKEN_PIPE
        monkeypatch.undo()
    assert capsys.readouterr().err == ""


def test_each_block_is_written_out_before_the_next_is_read(
    desk: TranslationPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attent.decoding.pipeline.CPU_BLOCK_LINES", 1)
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="\n")
    seen = []

    def chunks() -> Iterator[bytes]:
        for _ in range(3):
            seen.append(out.buffer.getvalue().count(b"\n"))  # type: ignore[attr-defined]
            yield f"{DOG}\n".encode()

    source = LineSource(name="text", chunks=chunks(), has_more=lambda: True)
    translate_lines(desk, source, parse_text_line, out, ProgressDisplay(io.StringIO()))
    assert seen == [0, 1, 2]


@pytest.fixture
def some_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: several blocks are at work at once."""
    monkeypatch.setattr(TranslationPipeline, "max_pending_blocks", 2)
    monkeypatch.setattr("attent.decoding.pipeline.CPU_BLOCK_LINES", 1)


@pytest.mark.usefixtures("some_ahead")
def test_blocks_that_are_at_work_at_once_stay_in_order(learned: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "text.txt").write_text("\n".join(TEXT * 2), encoding="utf-8")
    found = printed(capsys, learned, tmp_path / "text.txt", "--to", "de", "-b", "1").splitlines()
    loaded, words = models.read_model(learned), Tokenizer.load(learned)
    expected = [translate_texts(loaded, words, [text], to="de", beam_size=1)[0] for text in TEXT]
    assert found == [" ".join(line.splitlines()) for line in expected] * 2


@pytest.mark.usefixtures("some_ahead")
@pytest.mark.parametrize("wrong", ["{}", '{"text": "a dog", "require": [""]}'], ids=["no line", "not to be done"])
def test_what_comes_before_a_line_at_fault_is_written_and_nothing_behind_it(
    learned: Path, wrong: str, tmp_path: Path, capsys: Capture
) -> None:
    lines = ['{"text": "a dog"}'] * 4 + [wrong] + ['{"text": "a man"}'] * 4
    (tmp_path / "text.jsonl").write_text("\n".join(lines), encoding="utf-8")
    capsys.readouterr()
    words = ["translate", str(learned), str(tmp_path / "text.jsonl"), "--input-type", "json", "--to", "de"]
    assert cli.main(words) == 1
    found = capsys.readouterr()
    assert found.out.count("\n") == 4
    assert "text.jsonl, line 5: " in found.err


@pytest.mark.usefixtures("some_ahead")
def test_no_block_is_held_back_while_nothing_more_comes(desk: TranslationPipeline) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="\n")
    more = [True, True, False, False]  # behind each line: the third has to be waited for
    seen = []

    def chunks() -> Iterator[bytes]:
        for _ in more:
            seen.append(out.buffer.getvalue().count(b"\n"))  # type: ignore[attr-defined]
            yield f"{DOG}\n".encode()

    source = LineSource(name="text", chunks=chunks(), has_more=lambda: more[len(seen) - 1])
    translate_lines(desk, source, parse_text_line, out, ProgressDisplay(io.StringIO()))
    assert seen == [0, 0, 0, 3]


def test_a_file_is_written_where_it_is_asked_for_and_never_over_what_is_read(
    learned: Path, tmp_path: Path, capsys: Capture
) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "out.txt"
    text.write_text("a dog\n\na man", encoding="utf-8")
    assert printed(capsys, learned, text, "--to", "de", "-o", out) == ""
    assert out.read_text(encoding="utf-8") == printed(capsys, learned, text, "--to", "de", "-o", "-")
    assert "must not be the input file" in refused(capsys, learned, text, "--to", "de", "-o", text)
    assert "in an existing folder" in refused(capsys, learned, text, "--to", "de", "-o", tmp_path / "no" / "x")
    assert text.read_text(encoding="utf-8") == "a dog\n\na man"


def test_a_compressed_file_is_unpacked(
    learned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    packed = gzip.compress("\n".join(TEXT).encode())
    (tmp_path / "text.gz").write_bytes(packed)
    (tmp_path / "text.txt").write_text("\n".join(TEXT), encoding="utf-8")
    found = [printed(capsys, learned, tmp_path / name, "--to", "de", "-b", 1) for name in ("text.gz", "text.txt")]
    assert found[0] == found[1]
    give(monkeypatch, packed)
    assert "must be text, but is gz data; decompress it first" in refused(capsys, learned, "--to", "de")


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
    assert "one target language" in refused(capsys, trained, "--to", "de")


def test_no_tag_can_be_asked_for(learned: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """Of a model that was trained further without tags, whose tokenizer has them still."""
    give(monkeypatch, b"a dog\n")
    out = printed(capsys, learned, "--to", "")
    loaded, words = models.read_model(learned), Tokenizer.load(learned)
    plain, into_german = (translate_texts(loaded, words, ["a dog"], to=to)[0] for to in (None, "de"))
    assert plain != into_german
    assert out == f"{' '.join(plain.splitlines())}\n"


# ---- what must and must not come -------------------------------------------------------------------------------------


def test_words_that_must_and_must_not_come_are_obeyed(
    learned: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    give(monkeypatch, f"{DOG}\n\n{MAN}\n".encode())
    plain = printed(capsys, learned, "--to", "de").split("\n")
    assert "langsam" in plain[0]
    give(monkeypatch, f"{DOG}\n\n{MAN}\n".encode())
    asked = ("--require", "Hund", "--require", "alten Park", "--prefix", "Zwei Frauen", "--ban", "Langsam")
    found = printed(capsys, learned, "--to", "de", *asked).split("\n")
    assert found[1] == ""
    for line in (found[0], found[2]):
        assert line.startswith("Zwei Frauen")
        assert "Hund" in line
        assert "alten Park" in line
        assert "langsam" not in line


def test_a_line_of_json_has_wishes_of_its_own(learned: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    rows = [{"text": DOG, "require": "Hund"}, {"src": MAN, "prefix": "Ein Mann", "require": ["Park", "Uhr"]}]
    give(monkeypatch, "\n\n".join(map(json.dumps, rows)).encode())
    found = printed(capsys, learned, "--to", "de", "--input-type", "json", "--require", "Brücke").splitlines()
    assert len(found) == 3
    assert found[1] == ""
    assert all(word in found[0] for word in ("Hund", "Brücke"))
    assert found[2].startswith("Ein Mann")
    assert all(word in found[2] for word in ("Park", "Uhr", "Brücke"))


def test_terms_of_a_glossary_come_where_they_are_called_for(
    learned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    terms = tmp_path / "terms.tsv"
    terms.write_text("dog\tEisenbahn\n", encoding="utf-8")
    give(monkeypatch, f"{DOG}\n{MAN}\n".encode())
    found = printed(capsys, learned, "--to", "de", "--glossary", terms).splitlines()
    assert ["Eisenbahn" in line for line in found] == [True, False]
    terms.write_text("dog\tHund\ncat Katze\n", encoding="utf-8")
    assert f"{terms}:2: must be a term" in refused(capsys, learned, "--glossary", terms)


def test_what_was_translated_before_a_wish_that_cannot_be_met_stays(
    learned: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    rows = [{"text": DOG}, {"text": MAN}, {"text": MAN, "require": "Eisenbahn " * 40}, {"text": DOG}]
    give(monkeypatch, "\n".join(map(json.dumps, rows)).encode())
    capsys.readouterr()
    arguments = ["translate", str(learned), "--to", "de", "--input-type", "json", "--engine", "torch"]
    assert cli.main([*arguments, "--max-length", "30"]) == 1
    found = capsys.readouterr()
    assert len(found.out.splitlines()) == 2
    assert "standard input, line 3: the required phrases must fit into" in sentence(found.err)
    assert "--max-length" in found.err


# ---- the search ------------------------------------------------------------------------------------------------------


def test_help_tells_the_formulas_of_the_length_penalty(capsys: Capture) -> None:
    assert cli.main(["translate", "--help"]) == 0
    page = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for formula in SCORE_FORMULAS.values():
        assert formula in page
    assert page.index("Common") < page.index("Constraints") < page.index("Sampling") < page.index("Device")


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys; from attent import cli; cli.main(['translate', '--help']); print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()[-1] == "False"


def test_the_translator_is_a_name_of_the_package() -> None:
    assert attent.Translator is Translator


def test_flags_that_others_know_mean_the_same(learned: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    ours = ["--beam-size", "3", "--length-penalty", "1.5", "--n-best", "2", "--max-length", "9", "--min-length", "4"]
    theirs = ["--num_beams", "3", "--lenpen", "1.5", "--nbest", "2", "--max-new-tokens", "9", "--min_length", "4"]
    give(monkeypatch, b"a dog\n")
    found = printed(capsys, learned, "--to", "de", *ours)
    give(monkeypatch, b"a dog\n")
    assert found == printed(capsys, learned, "--to", "de", *theirs)
    assert len(found.splitlines()) == 2


def test_a_search_has_what_was_asked_for_and_a_beam_that_is_wide_enough() -> None:
    assert build_search_options(SearchFlags()) == SearchOptions()
    assert build_search_options(SearchFlags(n_best=7)) == SearchOptions(n_best=7, beam_size=7)
    assert build_search_options(SearchFlags(beam_groups=3)).beam_size == 6
    assert build_search_options(SearchFlags(seed=5)).sampling is not None
    assert build_search_options(SearchFlags(seed=5, n_best=9)).beam_size == 4
    with pytest.raises(ValueError, match="widen the beam"):
        build_search_options(SearchFlags(beam_size=3, n_best=5))
    told = use_flag_names("`n_best` must be at most `beam_size`=3, or raise max_length")
    assert told == "`--n-best` must be at most `--beam-size`=3, or raise --max-length"


def test_what_is_drawn_depends_on_the_seed_and_the_place_and_not_on_the_pipe(
    learned: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr("attent.decoding.pipeline.CPU_BLOCK_LINES", 2)
    found = []
    for seed, slow in ((1, False), (1, True), (2, False)):
        give(monkeypatch, b"a dog\n" * 5)
        monkeypatch.setattr(input_lines, "CHUNK_BYTES", 6 if slow else 100)
        found.append(printed(capsys, learned, "--to", "de", "--seed", seed, "--temperature", 3).splitlines())
    assert found[0] == found[1]
    assert len(set(found[0])) == 5
    assert not set(found[0]) & set(found[2])


def test_json_has_the_formula_and_an_alignment_for_each_word(
    learned: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    give(monkeypatch, b"a dog\n\n")
    asked = ("--output-type", "json", "--alignment", "soft", "--alpha", 0.5, "--n-best", 2)
    rows = [json.loads(row) for row in printed(capsys, learned, "--to", "de", *asked).splitlines()]
    assert [row["formula"] for row in rows] == ["score = log_prob / length^alpha, alpha = 0.5"] * 2
    assert [len(weights) for weights in rows[0]["weights"]] == [2] * len(rows[0]["hyp"].split())
    assert len(rows[0]["n_best"]) == 2
    assert rows[1]["hyp"] == ""


def test_two_models_write_together(learned: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    give(monkeypatch, b"a dog\n")
    alone = printed(capsys, learned, "--to", "de", "--with-score")
    give(monkeypatch, b"a dog\n")
    assert printed(capsys, learned, "--to", "de", "--with-score", "--ensemble", learned) == alone


def test_a_line_that_is_too_long_is_cut_and_told(
    learned: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    give(monkeypatch, b"a dog\n" + b"A man is walking. " * 60 + b"\n")
    capsys.readouterr()
    asked = ["translate", str(learned), "--to", "de", "-b", "1", "--max-length", "20", "--engine", "torch"]
    assert cli.main(asked) == 0
    found = capsys.readouterr()
    assert found.out.count("\n") == 2
    assert "standard input, line 2: too long to translate at once" in sentence(found.err, "")
    monkeypatch.setattr("attent.decoding.pipeline.MAX_ALIGNED_WORDS", 100)
    give(monkeypatch, b"a dog\n" + b"A man is walking. " * 60 + b"\n")
    assert cli.main([*asked, "--alignment", "hard"]) == 1
    found = capsys.readouterr()
    assert found.out.count("\n") == 1
    assert "line 2: a line must have at most 100 words for alignment" in sentence(found.err)


def test_what_does_not_go_together_is_a_wrong_command(learned: Path, capsys: Capture) -> None:
    assert "`--beam-size` must be 1 or more, but is 0" in misused(capsys, learned, "-b", 0)
    assert "`--n-best` must be at most `--beam-size`=2" in misused(capsys, learned, "-b", 2, "--n-best", 3)
    assert "--output-type json" in misused(capsys, learned, "--alignment", "soft")
    assert "the best translation only" in misused(capsys, learned, "--alignment", "hard", "--n-best", 2)
    assert "leave FILE out" in misused(capsys, learned, "text.txt", "--interactive")
    assert "--in-place overwrites FILE" in misused(capsys, learned, "--in-place")
    assert "--mbr must be at least --n-best, 3" in misused(capsys, learned, "--mbr", 2, "--n-best", 3)
    assert "--threads must be 1 or more" in misused(capsys, learned, "--threads", 0)


def test_a_device_that_is_not_there_is_told(learned: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    give(monkeypatch, b"a dog\n")
    told = refused(capsys, learned, "--device", "cuda:77")
    assert "device cuda:77: cannot be used here" in told
    assert "this machine has" in told
    assert "device gpu: cannot be used here" in refused(capsys, learned, "--device", "gpu")


# ---- files of translators --------------------------------------------------------------------------------------------

PO = """msgid ""
msgstr "Content-Type: text/plain; charset=UTF-8\\n"

msgid "A dog"
msgstr ""

msgid "A man"
msgstr "Ein Mann"
"""


def test_a_po_file_comes_out_filled_and_only_in_place_if_asked_for(
    learned: Path, tmp_path: Path, capsys: Capture
) -> None:
    file = tmp_path / "text.po"
    file.write_text(PO, encoding="utf-8")
    capsys.readouterr()
    arguments = ["translate", str(learned), str(file), "--to", "de", "--engine", "torch"]
    assert cli.main(arguments) == 0
    found = capsys.readouterr()
    assert f"attent: {file}: 1 filled, 1 kept, 0 skipped" in found.err
    assert found.out != PO
    assert "#, fuzzy" in found.out
    assert 'msgstr "Ein Mann"' in found.out
    assert file.read_text(encoding="utf-8") == PO
    assert cli.main([*arguments, "-o", str(tmp_path / "out.po")]) == 0
    assert (tmp_path / "out.po").read_text(encoding="utf-8") == found.out
    assert cli.main([*arguments, "--in-place"]) == 0
    assert file.read_text(encoding="utf-8") == found.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.po", "text.po"]


def test_only_files_of_translators_are_written_over(learned: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "text.txt").write_text("a dog", encoding="utf-8")
    assert "--in-place is for PO" in refused(capsys, learned, tmp_path / "text.txt", "--in-place")


def test_a_file_that_is_damaged_is_refused_and_left(learned: Path, tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "text.xlf"
    file.write_text("<xliff", encoding="utf-8")
    assert str(file) in refused(capsys, learned, file, "--to", "de", "--in-place")
    assert file.read_text(encoding="utf-8") == "<xliff"


# ---- a talk ----------------------------------------------------------------------------------------------------------


def said(desk: TranslationPipeline, *typed: str) -> list[str]:
    lines, out = iter(typed), io.StringIO()

    def read(prompt: str) -> str:
        line = next(lines, None)
        if line is None:
            raise EOFError
        return line

    run_session(desk, read, out)
    return out.getvalue().rstrip("\n").split("\n")


def test_a_sentence_is_translated_and_asked_about(desk: TranslationPipeline) -> None:
    expected = desk.translate([InputLine(text=DOG)])[0].text
    found = said(desk, DOG, "", ":n 3", ":align")
    assert found[0] == expected
    best = [line.split(maxsplit=1)[1] for line in found[1:4]]
    assert best[0] == expected
    assert len(set(best)) == 3
    assert [line.split()[0] for line in found[4:]] == expected.split()


def test_other_ways_to_go_on_keep_what_comes_before(desk: TranslationPipeline) -> None:
    found = said(desk, DOG, ":alt 2")
    first = found[0].split()[0]
    others = [line.split(maxsplit=1)[1].split() for line in found[1:]]
    assert len(others) >= 2
    assert {words[0] for words in others} == {first}
    assert len({words[1] for words in others if words[1:]}) >= 2


def test_wishes_hold_until_they_are_taken_back(desk: TranslationPipeline) -> None:
    found = said(desk, DOG, ":require Eisenbahn", DOG, ":require", DOG, ":prefix Zwei Frauen", DOG)
    assert found[1] == "required: Eisenbahn"
    assert "Eisenbahn" in found[2]
    assert found[4] == found[0]
    assert found[6].startswith("Zwei Frauen ")


def test_a_slip_in_a_talk_is_told_and_the_talk_goes_on(desk: TranslationPipeline) -> None:
    found = said(desk, ":n", ":n x", ":nn", ":alt 99", DOG, ":alt 99", ":to xx", ":help", ":quit", DOG)
    assert "there is no sentence yet" in found[0]
    assert "must be a number from 1 to 1,000, but is `x`" in found[1]
    assert "did you mean :n?" in found[2]
    assert "there is no sentence yet" in found[3]
    assert "the word must be one of the" in found[5]
    assert "--to must be one of its target languages" in found[6]
    assert [line.split()[0] for line in found[7:]] == [f":{name}" for name in COMMANDS]


def test_ctrl_c_ends_a_translation_and_not_the_talk(desk: TranslationPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object, **options: object) -> Iterator[str]:
        yield "Ein"
        raise KeyboardInterrupt

    monkeypatch.setattr(desk.translator, "stream", interrupted)
    assert said(desk, DOG, ":require Hund")[:2] == ["Ein ...", "required: Hund"]


# ---- progress --------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_shown_at_a_terminal_only_and_leaves_nothing_behind() -> None:
    now = [0.0]
    for stream, quiet, shown in ((Terminal(), False, True), (Terminal(), True, False), (io.StringIO(), False, False)):
        now[0] = 0.0
        with ProgressDisplay(stream, clock=lambda: now[0]) as screen:
            screen.start(1000, quiet=quiet)
            now[0] = 2.0
            screen.update(100, 250)
            screen.print_message("a word")
        told = stream.getvalue()
        assert ("100 lines, 50 a second, 25%, 6 s left" in told) == shown
        assert told.endswith("\r\x1b[Kattent: a word\n" if shown else "attent: a word\n")


def told_of(size: int | None, *shows: tuple[float, int, int | None]) -> list[str]:
    """What is drawn at such seconds, for so many lines, of so many."""
    now = [0.0]
    with ProgressDisplay(stream := Terminal(), clock=lambda: now[0]) as screen:
        screen.start(size, quiet=False)
        for seconds, lines, of in shows:
            now[0] = seconds
            screen.update(lines, lines, total_lines=of)
        return stream.getvalue().split("\r\x1b[K")[1:]


def test_the_speed_is_that_of_the_last_seconds() -> None:
    """The start may take long, on a GPU for instance."""
    assert told_of(1000, (20.0, 10, None), (22.0, 110, None), (26.0, 310, None), (28.0, 410, None)) == [
        "10 lines, 0.5 a second, 1%, 33 min 0 s left",
        "110 lines, 5.0 a second, 11%, 2 min 58 s left",
        "310 lines, 50 a second, 31%, 14 s left",
        "410 lines, 50 a second, 41%, 12 s left",
    ]


def test_other_texts_have_a_speed_of_their_own() -> None:
    """A file of translators may be gone through more than once."""
    assert told_of(None, (1.0, 100, 200), (2.0, 200, 200), (3.0, 3, 6), (4.0, 6, 6)) == [
        "100 lines, 100 a second, 50%, 1 s left",
        "200 lines, 100 a second, 100%, 0 s left",
        "3 lines, 3.0 a second, 50%, 1 s left",
        "6 lines, 3.0 a second, 100%, 0 s left",
    ]


# ---- what cannot be read ---------------------------------------------------------------------------------------------


def test_text_that_is_not_utf8_is_named_by_its_line_and_what_came_before_it_stays(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    content = "a dog\n\nein Mädchen\n".encode("latin-1")
    (tmp_path / "text.txt").write_bytes(content)
    capsys.readouterr()
    assert cli.main(["translate", str(trained), str(tmp_path / "text.txt")]) == 1
    found = capsys.readouterr()
    assert found.out.count("\n") == 2
    told = sentence(found.err)
    assert f"{tmp_path / 'text.txt'}, line 3: must be UTF-8, but byte 6 is 0xe4; convert" in told
    give(monkeypatch, b"\x7fELF\0\0")
    assert "standard input, line 1: must be text, but byte 5 is 0" in refused(capsys, trained)


def test_a_run_without_a_model_yet_says_so(trained: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "run.toml").write_bytes((trained / "run.toml").read_bytes())
    (tmp_path / "text.txt").write_bytes(b"a dog")
    assert "its run has not saved one yet" in refused(capsys, tmp_path, tmp_path / "text.txt")


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
    assert hash_file(corpus) == digest(corpus)
    card = (trained / "card.md").read_text(encoding="utf-8")
    assert f"| `{digest(corpus)}` |" in card
    assert "| `train.label_smoothing` | `0.1` |" in card
    assert "| `train.lr` | `0.01` |" in card
    assert "| `model.dropout` | `0.3` |" in card
    assert "--to" not in card
    card = (tagged / "card.md").read_text(encoding="utf-8")
    assert " --to de < input.txt" in card
    assert card.count(digest(tagged.parent / "text.tsv")) == 1


def test_a_finished_run_is_known_to_be(trained: Path, capsys: Capture) -> None:
    assert cli.main(["info", str(trained)]) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert "12 updates; all updates done" in page
    assert "scored validation" in page


# ---- layout and other people's folders -------------------------------------------------------------------------------


def test_blanks_around_a_line_stay(learned: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    give(monkeypatch, b"the red cat\n  the red cat\t\n \n")
    first, second, empty = printed(capsys, learned, "--to", "de").split("\n")[:3]
    assert (second, empty.strip()) == (f"  {first}\t", "")
    assert first == first.strip() != ""


def test_a_filled_file_keeps_its_neighbours_and_its_permissions(learned: Path, tmp_path: Path) -> None:
    file, other = tmp_path / "menu.po", tmp_path / "menu.po.new"
    file.write_text('msgid ""\nmsgstr ""\n\nmsgid "the red cat"\nmsgstr ""\n')
    file.chmod(0o640)
    other.write_text("mine")
    assert cli.main(["translate", str(learned), str(file), "--to", "de", "--engine", "torch", "--in-place"]) == 0
    assert "#, fuzzy" in file.read_text()
    assert (other.read_text(), file.stat().st_mode & 0o777) == ("mine", 0o640)
    assert {path.name for path in tmp_path.iterdir()} == {"menu.po", "menu.po.new"}


def test_a_file_that_is_filled_comes_out_as_what_it_is(learned: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "menu.po").write_text('msgid "the red cat"\nmsgstr ""\n')
    assert "leave --n-best out" in misused(capsys, learned, tmp_path / "menu.po", "--n-best", "2")
