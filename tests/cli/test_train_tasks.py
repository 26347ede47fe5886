"""`attent train --task ...`: each makes a folder that `attent.load` reads, goes on where it was, can be trained
further, and says a sentence about what it cannot do.
"""

from __future__ import annotations

import json
import math
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import attent
from attent import cli
from attent.models import CausalLM, Seq2Seq, TextEncoder, weights
from attent.nn import LearnedConfig
from attent.text.tokenizer import Tokenizer
from attent.training import checkpoint
from attent.training.config import read_run
from tests.training.runs import MAX_EXTRA_TOKENS, contents, events

SHAPE = "--set model.layers=1 --set model.width=16 --set model.heads=2 --set model.ffn_width=32".split()
SMALL = "--max-tokens 48 --batch-tokens 256 --steps 4 --valid-every 2 --save-every 2".split()
WORDS = "the a big small red cat dog house sees likes paints under over".split()

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setattr("attent.decoding.options.MAX_EXTRA_TOKENS", MAX_EXTRA_TOKENS)


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
        ("mlm", TextEncoder, ("A masked language model", "attent fill", "Accuracy", "nats per masked token")),
        ("spans", Seq2Seq, ("attent train --from", "Perplexity")),
        ("classify", TextEncoder, ("A text classifier", "attent classify", "95% interval", "Labels: no, yes.")),
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
    assert run.train.optimizer == "adamw"
    assert run.train.label_smoothing == 0.0
    told = events(out, "validated")
    assert [event["step"] for event in told] == [2, 4]
    assert set(told[-1]["metrics"]) == ({"accuracy"} if task in ("mlm", "classify") else set())
    assert bool(told[-1]["samples"]) == (task != "spans")
    finished = json.loads((out / "state" / "finished.json").read_text())
    scores = finished["scores"]
    assert scores[0]["split"] == "validation"
    assert "loss" in scores[0]["metrics"]
    assert finished["unit"] == scores[0]["unit"] == ("document" if task == "lm" else "text")


def test_bits_of_a_text_are_those_of_its_tokens_and_its_end(folders: dict[str, Path], text: Path) -> None:
    whole = (text / "lines.txt").read_text()
    held = whole[int(0.9 * len(whole)) :]
    vocabulary = Tokenizer.load(folders["lm"]).source
    told = len(vocabulary.prefix_ids) + len(vocabulary.encode([held])[0])  # and the end, but for the first token
    scores = json.loads((folders["lm"] / "state" / "finished.json").read_text())["scores"][0]["metrics"]
    nats = scores["loss"] * told
    assert scores["bits_per_character"] == pytest.approx(nats / math.log(2) / len(held), rel=1e-6)
    assert scores["bits_per_byte"] == pytest.approx(nats / math.log(2) / len(held.encode()), rel=1e-6)


def test_the_card_counts_what_was_held_out(folders: dict[str, Path]) -> None:
    card = (folders["mlm"] / "card.md").read_text()
    assert "| lines.txt | 120 | 108 | 12 |" in card
    assert "Dropped: held out for validation (12)." in card
    notes = [event["text"] for event in events(folders["mlm"], "note")]
    assert "held out 12 of 120 texts for validation (name your own with --valid)" in notes


def test_who_has_learned_spans_is_told_how_to_go_on(folders: dict[str, Path]) -> None:
    assert "--set data.filters.length_ratio=0" in events(folders["spans"], "note")[-1]["text"]


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
    assert isinstance(model, TextEncoder)
    assert model.config.labels == ("no", "yes")
    scores = json.loads((folders["classify"] / "state" / "finished.json").read_text())["scores"]
    assert scores[0]["name"] == "dev.tsv"
    assert scores[0]["num_examples"] == 20


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
    assert not [name for name in after if name.startswith("masked_lm.")]
    assert [name for name in after if name.startswith("classifier.")]


def test_beside_frozen_weights_a_new_head_learns(folders: dict[str, Path], text: Path, tmp_path: Path) -> None:
    out = tmp_path / "lora"
    more = ["--from", str(folders["mlm"]), "--lora", "2", "--lr", "2e-2", "--warmup", "1", "--schedule", "constant"]
    steps = ["--max-tokens", "48", "--batch-tokens", "512", "--valid-every", "8", "--save-every", "8"]
    assert train("classify", text / "train.tsv", out, *more, *steps, "--steps", "24", "--dropout", "0.0") == 0
    told = [event["loss"] for event in events(out, "validated")]
    assert told[-1] < told[0] < 0.7
    assert told[-1] < 0.6  # guessing gives 0.69
    notes = [event["text"] for event in events(out, "note")]
    assert f"a new head for whole texts, and one for 2 labels; the rest is that of {folders['mlm']}" in notes
    assert cli.main(["train", "--out", str(out), "--steps", "26"]) == 0
    first, last = (
        checkpoint.load_checkpoint(checkpoint.checkpoint_path(out / "state", step)).tensors["weights"]
        for step in (24, 26)
    )
    assert (first["embedding.weight"] == attent.load(folders["mlm"]).state_dict()["embedding.weight"]).all()
    assert (first["embedding.weight"] == last["embedding.weight"]).all()
    assert (first["classifier.weight"] != last["classifier.weight"]).any()


def test_a_run_does_not_go_on_with_other_labels_or_another_validation_part(
    text: Path, tmp_path: Path, capsys: Capture
) -> None:
    lines = (text / "train.tsv").read_text()
    data, dev, out = tmp_path / "train.tsv", tmp_path / "dev.tsv", tmp_path / "run"
    data.write_text(lines)
    dev.write_text("a cat\tyes\n")
    assert train("classify", data, out, *SMALL, *SHAPE, "--vocab", "340") == 0
    swapped = lines.replace("\tyes", "\t?").replace("\tno", "\tyes").replace("\t?", "\tno")
    for train_with, validate_on, told in (
        (swapped, "a cat\tyes\n", "its checkpoints were made with other labels; give the labels of then"),
        (
            lines.replace("\tyes", "\tcat"),
            "a cat\tcat\n",
            "must have the labels that this run started with, no, yes, but has cat, no",
        ),
        (lines, "a dog\tno\n", "its checkpoints were made with another validation set"),
    ):
        data.write_text(train_with)
        dev.write_text(validate_on)
        capsys.readouterr()
        assert cli.main(["train", "--out", str(out), "--steps", "6"]) == 1
        assert told in capsys.readouterr().err


def test_texts_are_no_longer_than_a_model_to_begin_from_knows(
    folders: dict[str, Path], text: Path, tmp_path: Path, capsys: Capture
) -> None:
    tokenizer, loaded = Tokenizer.load(folders["lm"]), attent.load(folders["lm"])
    assert isinstance(loaded, CausalLM)
    config = replace(loaded.config, stack=replace(loaded.config.stack, positions=LearnedConfig(max_length=12)))
    weights.save_model(attent.build(config), tmp_path / "short", tokenizer.files)
    few = "--batch-tokens 256 --steps 2 --valid-every 2 --save-every 2".split()
    data, out, start = text / "lines.txt", tmp_path / "out", str(tmp_path / "short")
    assert train("lm", data, out, *few, "--from", start) == 0
    assert read_run(out / "run.toml").data.max_tokens == 12
    assert any("limited to 12 tokens" in event["text"] for event in events(out, "note"))
    assert train("lm", data, tmp_path / "other", *few, "--from", start, "--max-tokens", "48") == 1
    assert "`data.max_tokens` must be at most 12, the positions of" in capsys.readouterr().err


def test_a_test_set_with_strange_labels_is_not_scored_unless_it_was_asked_for(
    text: Path, tmp_path: Path, capsys: Capture
) -> None:
    for name in ("train.tsv", "dev.tsv"):
        shutil.copy(text / name, tmp_path / name)
    (tmp_path / "test.tsv").write_text("text\tlabel\nthe cat\tmaybe\n")
    small = [*SMALL, *SHAPE, "--vocab", "340"]
    assert train("classify", tmp_path / "train.tsv", tmp_path / "out", *small) == 0
    assert "'maybe', which no training text has" in capsys.readouterr().err
    scores = json.loads((tmp_path / "out" / "state" / "finished.json").read_text())["scores"]
    assert [one["name"] for one in scores] == ["dev.tsv"]
    asked = ["--test", str(tmp_path / "test.tsv")]
    assert train("classify", tmp_path / "train.tsv", tmp_path / "other", *small, *asked) == 1


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
        ("lm", "memory.tmx", (), "is a file of pairs (tmx), but must be plain text here"),
        ("lm", "nowhere.txt", (), "there is no such file or folder"),
        ("classify", "pairs.tsv", (), "is it a corpus of translations (--task translate)?"),
        ("classify", "same.tsv", ("--hold-out", "0"), "must have at least 2 labels, but all are 'x'"),
        ("mlm", "lines.txt", ("--metric", "bleu"), "`train.metric` must be loss or accuracy for --task mlm"),
        ("lm", "lines.txt", ("--rdrop", "1"), "`train.rdrop` means nothing for --task lm; leave it out"),
        ("mlm", "lines.txt", ("--src", "en"), "`data.src` means nothing for --task mlm"),
        (
            "classify",
            "train.tsv",
            ("--set", "data.filters.length_ratio=2"),
            "`data.filters.length_ratio` means nothing for --task",
        ),
        ("lm", "lines.txt", ("--layout", "packed"), "`data.layout` means nothing for --task lm"),
        ("spans", "lines.txt", ("--set", "data.images.flip=0"), "`data.images.flip` means nothing for --task spans"),
        ("lm", "lines.txt:3", (), "weights are for --task translate only"),
        ("mlm", "lines.txt", ("--set", "model.encoder.layers=2"), "model.encoder"),
        ("lm", "lines.txt", ("--set", "model.layesr=2"), "did you mean `model.layers`?"),
        ("mlm", "lines.txt", ("--from", "LM"), "must be an encoder of text for --task mlm, but is a language model"),
        ("mlm", "lines.txt", ("--from", "CLASSIFY"), "its tokenizer has no mask token"),
        ("lm", "lines.txt", ("--from", "LM", "--size", "tiny"), "`size` cannot be changed with --from"),
        ("classify", "strange", (), "dev.tsv: has the label 'maybe', which no training text has"),
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
