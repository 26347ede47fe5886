"""`attent train --task ...`: each makes a folder that `attent.load` reads, goes on where it was, can be trained
further, and says a sentence about what it cannot do.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

import attent
from attent import cli
from attent.models import CausalLM, Encoder, Seq2Seq
from attent.text.tokenizer import Tokenizer
from attent.train.config import read_run
from tests.train.runs import contents, events

SHAPE = "--set model.layers=1 --set model.width=16 --set model.heads=2 --set model.inner=32".split()
SMALL = "--longest 48 --batch-tokens 256 --steps 4 --valid-every 2 --save-every 2".split()
WORDS = "the a big small red cat dog house sees likes paints under over".split()

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")


def sentences(count: int, seed: int = 1) -> list[str]:
    chance = random.Random(seed)
    return [" ".join(chance.choices(WORDS, k=chance.randrange(3, 12))) for _ in range(count)]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    lines = sentences(120)
    (folder / "lines.txt").write_text("\n".join(lines) + "\n")
    (folder / "train.tsv").write_text("".join(f"{line}\t{'yes' if 'cat' in line else 'no'}\n" for line in lines))
    (folder / "dev.tsv").write_text("".join(f"{line}\t{'yes' if 'cat' in line else 'no'}\n" for line in lines[:20]))
    (folder / "pairs.tsv").write_text("".join(f"{line}\t{line}\n" for line in lines))
    return folder


def train(task: str, data: Path | None, out: Path, *more: str) -> int:
    named = [] if data is None else ["--data", str(data)]
    return cli.main(["train", "--task", task, *named, "--out", str(out), *more])


def made(task: str, text: Path, tmp: Path) -> Path:
    data = text / ("train.tsv" if task == "classify" else "lines.txt")
    more = ["--set", "model.head_width=8"] if task == "spans" else []
    vocab = ["--set", "data.tokenizer.kind=char"] if task == "lm" else ["--vocab", "340"]
    assert train(task, data, tmp / task, *SMALL, *SHAPE, *vocab, *more) == 0
    return tmp / task


@pytest.fixture(scope="module")
def folders(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    tmp = tmp_path_factory.mktemp("runs")
    return {task: made(task, text, tmp) for task in ("lm", "mlm", "spans", "classify")}


@pytest.mark.parametrize(
    ("task", "kind", "words"),
    [
        ("lm", CausalLM, ("A language model", "attent generate", "Bits per character", "nats per token")),
        ("mlm", Encoder, ("A masked language model", "attent fill", "Accuracy", "nats per hidden word")),
        ("spans", Seq2Seq, ("attent train --from", "Perplexity")),
        ("classify", Encoder, ("A classifier of texts", "attent classify", "95% interval", "It tells no, yes.")),
    ],
)
def test_each_task_makes_a_whole_folder(
    folders: dict[str, Path], task: str, kind: type, words: tuple[str, ...]
) -> None:
    out = folders[task]
    assert isinstance(attent.load(out), kind)
    card = (out / "card.md").read_text()
    for word in words:
        assert word in card
    run = read_run(out / "run.toml")
    assert run.task == task
    assert run.train.optimiser == "adamw"
    assert run.train.label_smoothing == 0.0
    told = events(out, "validated")
    assert [event["step"] for event in told] == [2, 4]
    assert (told[-1]["accuracy"] is not None) == (task in ("mlm", "classify"))
    assert told[-1]["bleu"] is None
    assert bool(told[-1]["samples"]) == (task != "spans")
    scores = json.loads((out / "state" / "finished.json").read_text())["scores"]
    assert scores[0]["kind"] == "validation"
    assert "loss" in scores[0]


def test_a_tokenizer_has_what_its_task_needs(folders: dict[str, Path]) -> None:
    found = {task: Tokenizer.load(out).source for task, out in folders.items()}
    assert found["mlm"].mask is not None
    assert len(found["spans"].sentinels) == 32
    for task in ("lm", "classify"):
        assert found[task].mask is None
        assert not found[task].sentinels
    assert len(found["lm"].encode(["ab\ncd"])[0]) == 6  # a token a character, and SentencePiece's own space


def test_labels_are_those_of_the_data_and_files_beside_validate(folders: dict[str, Path]) -> None:
    model = attent.load(folders["classify"])
    assert isinstance(model, Encoder)
    assert model.config.labels == ("no", "yes")
    scores = json.loads((folders["classify"] / "state" / "finished.json").read_text())["scores"]
    assert scores[0]["name"] == "dev.tsv"
    assert scores[0]["pairs"] == 20


def test_a_run_goes_on_from_its_folder_alone(folders: dict[str, Path], tmp_path: Path, capsys: Capture) -> None:
    out = shutil.copytree(folders["lm"], tmp_path / "run")
    before = contents(out)
    assert cli.main(["train", "--out", str(out)]) == 0
    assert "this run is complete" in capsys.readouterr().err
    assert {name for name, digest in contents(out).items() if before.get(name) != digest} <= {"log.jsonl"}
    assert cli.main(["train", "--out", str(out), "--steps", "6"]) == 0
    assert read_run(out / "run.toml").train.steps == 6
    assert events(out, "ended")[-1]["step"] == 6


def test_a_classifier_begins_with_what_masked_words_have_taught(
    folders: dict[str, Path], text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "classify"
    more = ["--from", str(folders["mlm"]), "--lr", "1e-9", "--dropout", "0.0"]
    assert train("classify", text / "train.tsv", out, *SMALL, *more) == 0
    before, after = attent.load(folders["mlm"]).state_dict(), attent.load(out).state_dict()
    assert Tokenizer.load(out) == Tokenizer.load(folders["mlm"])
    shared = [name for name in after if name in before]
    assert any(name.startswith("encoder.") for name in shared)
    for name in shared:
        assert (after[name] - before[name]).abs().max() < 1e-6
    assert not [name for name in after if name.startswith("masked.")]
    assert [name for name in after if name.startswith("classifier.")]


def test_a_model_of_spans_is_trained_further_as_a_translator(
    folders: dict[str, Path], text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "translate"
    more = ["--from", str(folders["spans"]), "--valid-sentences", "4", "--beam-size", "1", "--hold-out", "8"]
    assert cli.main(["train", "--data", str(text / "pairs.tsv"), "--out", str(out), *SMALL, *more]) == 0
    assert read_run(out / "run.toml").task == "translate"
    assert "attent translate" in (out / "card.md").read_text()


@pytest.mark.parametrize(
    ("task", "name", "more", "told"),
    [
        ("lm", "empty.txt", (), "there is no text to learn from"),
        ("lm", "memory.tmx", (), "is a file of pairs (tmx), and text alone is wanted here"),
        ("lm", "nowhere.txt", (), "there is no such file or folder"),
        ("classify", "pairs.tsv", (), "is it a corpus of translations (--task translate)?"),
        ("classify", "same.tsv", ("--hold-out", "0"), "there must be 2 labels or more to tell apart, but all are 'x'"),
        ("mlm", "lines.txt", ("--metric", "bleu"), "`train.metric` must be loss or accuracy for --task mlm"),
        ("lm", "lines.txt", ("--rdrop", "1"), "`train.rdrop` is for --task translate alone"),
        ("mlm", "lines.txt", ("--set", "model.encoder.layers=2"), "model.encoder"),
        ("lm", "lines.txt", ("--set", "model.layesr=2"), "did you mean `model.layers`?"),
        ("mlm", "lines.txt", ("--from", "LM"), "must be an encoder of text for --task mlm, but is a language model"),
        ("mlm", "lines.txt", ("--from", "CLASSIFY"), "its tokenizer has no mask such as [MASK]"),
        ("lm", "lines.txt", ("--from", "LM", "--size", "tiny"), "`size` cannot be chosen with --from"),
        ("classify", "strange", (), "dev.tsv: has the label 'maybe', which none of the texts to train on has"),
    ],
)
def test_what_cannot_be_done_is_told_in_a_sentence(
    folders: dict[str, Path],
    text: Path,
    tmp_path: Path,
    capsys: Capture,
    task: str,
    name: str,
    more: tuple[str, ...],
    told: str,
) -> None:
    shutil.copytree(text, tmp_path / "data")
    (tmp_path / "data" / "empty.txt").write_text("\n")
    (tmp_path / "data" / "memory.tmx").write_text("<tmx/>")
    (tmp_path / "data" / "same.tsv").write_text("a\tx\nb\tx\nc\tx\n")
    (tmp_path / "data" / "strange").mkdir()
    (tmp_path / "data" / "strange" / "train.tsv").write_text("text\tlabel\na\tx\nb\ty\nc\tx\n")
    (tmp_path / "data" / "strange" / "dev.tsv").write_text("text\tlabel\na\tmaybe\n")
    given = [str(folders[word.lower()]) if word in ("LM", "CLASSIFY") else word for word in more]
    capsys.readouterr()
    assert train(task, tmp_path / "data" / name, tmp_path / "out", *SMALL, *given) == 1
    printed = capsys.readouterr()
    complaints = [line for line in printed.err.splitlines() if line.startswith("attent: error: ")]
    assert len(complaints) == 1, printed.err
    assert told in complaints[0]
    assert "Traceback" not in printed.err


def test_another_task_is_another_run(folders: dict[str, Path], text: Path, tmp_path: Path, capsys: Capture) -> None:
    out = shutil.copytree(folders["lm"], tmp_path / "run")
    assert train("mlm", text / "lines.txt", out) == 1
    assert 'task: "lm" -> "mlm"' in capsys.readouterr().err
