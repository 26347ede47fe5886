"""`attent train --task ...`: each task writes a model folder, can be resumed and fine-tuned, and refuses bad input."""

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
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randrange(3, 12))) for _ in range(count)]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    lines = sentences(120)
    (folder / "lines.txt").write_text("\n".join(lines) + "\n")
    (folder / "train.tsv").write_text("".join(f"{line}\t{'yes' if 'cat' in line else 'no'}\n" for line in lines))
    (folder / "dev.tsv").write_text("".join(f"{line}\t{'yes' if 'cat' in line else 'no'}\n" for line in lines[:20]))
    (folder / "pairs.tsv").write_text("".join(f"{line}\t{line}\n" for line in lines))
    return folder


def train(task: str, data: Path | None, out: Path, *flags: str) -> int:
    named = [] if data is None else ["--data", str(data)]
    return cli.main(["train", "--task", task, *named, "--out", str(out), *flags])


def train_small(task: str, text: Path, tmp: Path) -> Path:
    data = text / ("train.tsv" if task == "classify" else "lines.txt")
    flags = ["--set", "model.head_width=8"] if task == "spans" else []
    vocab = ["--set", "data.tokenizer.kind=char"] if task == "lm" else ["--vocab", "340"]
    assert train(task, data, tmp / task, *SMALL, *SHAPE, *vocab, *flags) == 0
    return tmp / task


@pytest.fixture(scope="module")
def folders(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    tmp = tmp_path_factory.mktemp("runs")
    return {task: train_small(task, text, tmp) for task in ("lm", "mlm", "spans", "classify")}


@pytest.mark.parametrize(
    ("task", "kind", "words"),
    [
        ("lm", CausalLM, ("A language model", "attent generate", "Bits per character", "nats per token")),
        ("mlm", TextEncoder, ("A masked language model", "attent fill", "Accuracy", "nats per masked token")),
        ("spans", Seq2Seq, ("attent train --from", "Perplexity")),
        ("classify", TextEncoder, ("A text classifier", "attent classify", "95% interval", "Labels: no, yes.")),
    ],
)
def test_each_task_writes_a_model_folder(
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
    validations = events(out, "validated")
    assert [event["step"] for event in validations] == [2, 4]
    assert set(validations[-1]["metrics"]) == ({"accuracy"} if task in ("mlm", "classify") else set())
    assert bool(validations[-1]["samples"]) == (task != "spans")
    finished = json.loads((out / "state" / "finished.json").read_text())
    scores = finished["scores"]
    assert scores[0]["split"] == "validation"
    assert "loss" in scores[0]["metrics"]
    assert finished["unit"] == scores[0]["unit"] == ("document" if task == "lm" else "text")


def test_bits_per_character_count_the_end_token(folders: dict[str, Path], text: Path) -> None:
    whole = (text / "lines.txt").read_text()
    held = whole[int(0.9 * len(whole)) :]
    vocabulary = Tokenizer.load(folders["lm"]).source
    num_targets = len(vocabulary.prefix_ids) + len(vocabulary.encode([held])[0])  # the end, but not the first token
    scores = json.loads((folders["lm"] / "state" / "finished.json").read_text())["scores"][0]["metrics"]
    nats = scores["loss"] * num_targets
    assert scores["bits_per_character"] == pytest.approx(nats / math.log(2) / len(held), rel=1e-6)
    assert scores["bits_per_byte"] == pytest.approx(nats / math.log(2) / len(held.encode()), rel=1e-6)


def test_the_card_counts_held_out_texts(folders: dict[str, Path]) -> None:
    card = (folders["mlm"] / "card.md").read_text()
    assert "| lines.txt | 120 | 108 | 12 |" in card
    assert "Dropped: held out for validation (12)." in card
    notes = [event["text"] for event in events(folders["mlm"], "note")]
    assert "held out 12 of 120 texts for validation (name your own with --valid)" in notes


def test_a_span_model_suggests_fine_tuning(folders: dict[str, Path]) -> None:
    assert "fine-tune it: attent train --from" in events(folders["spans"], "note")[-1]["text"]


def test_a_tokenizer_has_what_its_task_needs(folders: dict[str, Path]) -> None:
    vocabularies = {task: Tokenizer.load(out).source for task, out in folders.items()}
    assert vocabularies["mlm"].mask is not None
    assert len(vocabularies["spans"].sentinels) == 32
    for task in ("lm", "classify"):
        assert vocabularies[task].mask is None
        assert not vocabularies[task].sentinels
    assert len(vocabularies["lm"].encode(["ab\ncd"])[0]) == 6  # characters and a leading space


def test_labels_come_from_the_data_and_validation_files_are_found(folders: dict[str, Path]) -> None:
    model = attent.load(folders["classify"])
    assert isinstance(model, TextEncoder)
    assert model.config.labels == ("no", "yes")
    scores = json.loads((folders["classify"] / "state" / "finished.json").read_text())["scores"]
    assert scores[0]["name"] == "dev.tsv"
    assert scores[0]["num_examples"] == 20


def test_a_run_is_resumed_from_its_folder_alone(folders: dict[str, Path], tmp_path: Path, capsys: Capture) -> None:
    out = shutil.copytree(folders["lm"], tmp_path / "run")
    before = contents(out)
    assert cli.main(["train", "--out", str(out)]) == 0
    assert "this run is complete" in capsys.readouterr().err
    assert {name for name, digest in contents(out).items() if before.get(name) != digest} <= {"log.jsonl"}
    assert cli.main(["train", "--out", str(out), "--steps", "6"]) == 0
    assert read_run(out / "run.toml").train.steps == 6
    assert events(out, "ended")[-1]["step"] == 6


def test_a_classifier_starts_from_a_masked_lm(folders: dict[str, Path], text: Path, tmp_path: Path) -> None:
    out = tmp_path / "classify"
    flags = ["--from", str(folders["mlm"]), "--lr", "1e-9", "--dropout", "0.0"]
    assert train("classify", text / "train.tsv", out, *SMALL, *flags) == 0
    before, after = attent.load(folders["mlm"]).state_dict(), attent.load(out).state_dict()
    assert Tokenizer.load(out) == Tokenizer.load(folders["mlm"])
    shared = [name for name in after if name in before]
    assert any(name.startswith("encoder.") for name in shared)
    for name in shared:
        assert (after[name] - before[name]).abs().max() < 1e-6
    assert not [name for name in after if name.startswith("masked_lm.")]
    assert [name for name in after if name.startswith("classifier.")]


def test_a_new_head_is_trained_beside_lora(folders: dict[str, Path], text: Path, tmp_path: Path) -> None:
    out = tmp_path / "lora"
    flags = ["--from", str(folders["mlm"]), "--lora", "2", "--lr", "2e-2", "--warmup", "1"]
    steps = ["--max-tokens", "48", "--batch-tokens", "512", "--valid-every", "8", "--save-every", "8"]
    assert train("classify", text / "train.tsv", out, *flags, *steps, "--steps", "24", "--dropout", "0.0") == 0
    losses = [event["loss"] for event in events(out, "validated")]
    assert losses[-1] < losses[0] < 0.7
    assert losses[-1] < 0.6  # chance is 0.69
    notes = [event["text"] for event in events(out, "note")]
    assert any(note.startswith("new heads: ") and "classifier" in note for note in notes)
    assert cli.main(["train", "--out", str(out), "--steps", "26"]) == 0
    first, last = (
        checkpoint.load_checkpoint(checkpoint.checkpoint_path(out / "state", step)).tensors["weights"]
        for step in (24, 26)
    )
    assert (first["embedding.weight"] == attent.load(folders["mlm"]).state_dict()["embedding.weight"]).all()
    assert (first["embedding.weight"] == last["embedding.weight"]).all()
    assert (first["classifier.weight"] != last["classifier.weight"]).any()


def test_a_run_is_not_resumed_with_other_labels_or_validation_texts(
    text: Path, tmp_path: Path, capsys: Capture
) -> None:
    lines = (text / "train.tsv").read_text()
    data, dev, out = tmp_path / "train.tsv", tmp_path / "dev.tsv", tmp_path / "run"
    data.write_text(lines)
    dev.write_text("a cat\tyes\n")
    assert train("classify", data, out, *SMALL, *SHAPE, "--vocab", "340") == 0
    swapped = lines.replace("\tyes", "\t?").replace("\tno", "\tyes").replace("\t?", "\tno")
    for train_text, valid_text, expected in (
        (swapped, "a cat\tyes\n", "the labels must match its checkpoints"),
        (
            lines.replace("\tyes", "\tcat"),
            "a cat\tcat\n",
            "must have the labels that this run started with, no, yes, but has cat, no",
        ),
        (lines, "a dog\tno\n", "the validation set must match its checkpoints"),
    ):
        data.write_text(train_text)
        dev.write_text(valid_text)
        capsys.readouterr()
        assert cli.main(["train", "--out", str(out), "--steps", "6"]) == 1
        assert expected in capsys.readouterr().err


def test_texts_are_limited_to_the_positions_of_the_pretrained_model(
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


def test_a_test_set_with_unknown_labels_is_skipped_or_refused(text: Path, tmp_path: Path, capsys: Capture) -> None:
    for name in ("train.tsv", "dev.tsv"):
        shutil.copy(text / name, tmp_path / name)
    (tmp_path / "test.tsv").write_text("text\tlabel\nthe cat\tmaybe\n")
    small = [*SMALL, *SHAPE, "--vocab", "340"]
    assert train("classify", tmp_path / "train.tsv", tmp_path / "out", *small) == 0
    assert "'maybe', which no training text has" in capsys.readouterr().err
    scores = json.loads((tmp_path / "out" / "state" / "finished.json").read_text())["scores"]
    assert [score["name"] for score in scores] == ["dev.tsv"]
    named = ["--test", str(tmp_path / "test.tsv")]
    assert train("classify", tmp_path / "train.tsv", tmp_path / "other", *small, *named) == 1


def test_a_span_model_is_fine_tuned_as_a_translator(folders: dict[str, Path], text: Path, tmp_path: Path) -> None:
    out = tmp_path / "translate"
    flags = ["--from", str(folders["spans"]), "--valid-sentences", "4", "--beam-size", "1", "--hold-out", "8"]
    assert cli.main(["train", "--data", str(text / "pairs.tsv"), "--out", str(out), *SMALL, *flags]) == 0
    assert read_run(out / "run.toml").task == "translate"
    assert "attent translate" in (out / "card.md").read_text()


@pytest.mark.parametrize(
    ("task", "name", "flags", "expected"),
    [
        ("lm", "empty.txt", (), "there is no text to learn from"),
        ("lm", "memory.tmx", (), "is a file of pairs (tmx)"),
        ("lm", "nowhere.txt", (), "there is no such file or folder"),
        ("classify", "pairs.tsv", (), "is it a corpus of translations (--task translate)?"),
        ("classify", "same.tsv", ("--hold-out", "0"), "must have at least 2 labels, but all are 'x'"),
        ("mlm", "lines.txt", ("--metric", "bleu"), "`train.metric` must be loss or accuracy for --task mlm"),
        ("lm", "lines.txt", ("--rdrop", "1"), "`train.rdrop` has no effect with --task lm; leave it out"),
        ("mlm", "lines.txt", ("--src", "en"), "`data.src` has no effect with --task mlm"),
        (
            "classify",
            "train.tsv",
            ("--set", "data.filters.length_ratio=2"),
            "`data.filters.length_ratio` has no effect with --task",
        ),
        ("lm", "lines.txt", ("--layout", "packed"), "`data.layout` has no effect with --task lm"),
        ("spans", "lines.txt", ("--set", "data.images.flip=0"), "`data.images.flip` has no effect with --task spans"),
        ("lm", "lines.txt:3", (), "weights are for --task translate only"),
        ("mlm", "lines.txt", ("--set", "model.encoder.layers=2"), "model.encoder"),
        ("lm", "lines.txt", ("--set", "model.layesr=2"), "did you mean `model.layers`?"),
        ("mlm", "lines.txt", ("--from", "LM"), "must be a text encoder for --task mlm, but is a language model"),
        ("mlm", "lines.txt", ("--from", "CLASSIFY"), "its tokenizer has no mask token"),
        ("lm", "lines.txt", ("--from", "LM", "--size", "tiny"), "`size` cannot be changed with --from"),
        ("classify", "strange", (), "dev.tsv: has the label 'maybe', which no training text has"),
    ],
)
def test_bad_input_is_refused_with_one_sentence(
    folders: dict[str, Path],
    text: Path,
    tmp_path: Path,
    capsys: Capture,
    task: str,
    name: str,
    flags: tuple[str, ...],
    expected: str,
) -> None:
    shutil.copytree(text, tmp_path / "data")
    (tmp_path / "data" / "empty.txt").write_text("\n")
    (tmp_path / "data" / "memory.tmx").write_text("<tmx/>")
    (tmp_path / "data" / "same.tsv").write_text("a\tx\nb\tx\nc\tx\n")
    (tmp_path / "data" / "strange").mkdir()
    (tmp_path / "data" / "strange" / "train.tsv").write_text("text\tlabel\na\tx\nb\ty\nc\tx\n")
    (tmp_path / "data" / "strange" / "dev.tsv").write_text("text\tlabel\na\tmaybe\n")
    resolved = [str(folders[word.lower()]) if word in ("LM", "CLASSIFY") else word for word in flags]
    capsys.readouterr()
    assert train(task, tmp_path / "data" / name, tmp_path / "out", *SMALL, *resolved) == 1
    printed = capsys.readouterr()
    errors = [line for line in printed.err.splitlines() if line.startswith("attent: error: ")]
    assert len(errors) == 1, printed.err
    assert expected in errors[0]
    assert "Traceback" not in printed.err


def test_a_run_cannot_change_its_task(folders: dict[str, Path], text: Path, tmp_path: Path, capsys: Capture) -> None:
    out = shutil.copytree(folders["lm"], tmp_path / "run")
    assert train("mlm", text / "lines.txt", out) == 1
    assert 'task: "lm" -> "mlm"' in capsys.readouterr().err
