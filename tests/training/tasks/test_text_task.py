"""Tasks on text: which files are used, what is reported of them, and which pre-trained weights are used."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from attent.models import EncoderConfig, TextEncoder, build
from attent.nn import StackConfig
from attent.nn.lora import add_lora
from attent.storage.errors import FolderError
from attent.text.bulk_encoder import EncodedSentences
from attent.text.tokenizer_training import TokenizerConfig
from attent.training.autoconfig import DataSize, look_up
from attent.training.config import DataConfig, RunConfig, TrainConfig, TrainError
from attent.training.events import Note
from attent.training.tasks import base, get_task_class
from attent.training.tasks.base import RunContext
from attent.training.tasks.text_classification import TextClassificationTask
from attent.training.tasks.text_task import (
    CPU_SIZE_BY_TOKENS,
    GPU_SIZE_BY_TOKENS,
    TextSplits,
    load_splits,
)

CONFIG = EncoderConfig(vocab=20, stack=StackConfig(layers=1, width=8, heads=2, ffn_width=8), masked_lm=True)


def load(tmp_path: Path, *names: str, layout: Any = "lines", **data: Any) -> tuple[TextSplits, list[Note]]:
    notes: list[Any] = []
    context = RunContext(data_dir=tmp_path / "state", device=torch.device("cpu"), report=notes.append)
    config = DataConfig(train=tuple(str(tmp_path / name) for name in names), **data)
    return load_splits(RunConfig(task="mlm", data=config), context, layout), notes


def write(tmp_path: Path, **files: str) -> None:
    for name, text in files.items():
        (tmp_path / f"{name}.txt").write_text(text)


def test_files_named_as_validation_and_test_sets_are_not_trained_on(tmp_path: Path) -> None:
    write(tmp_path, train="a\nb\n", valid="b\nc\n", test="d\n")
    splits, notes = load(tmp_path, "test.txt", "train.txt", "valid.txt")
    assert splits.train.texts == ["a", "b"]
    assert splits.valid is not None
    assert splits.valid.texts == ["b", "c"]
    assert [texts.texts for texts in splits.tests] == [["d"]]
    reported = [note.text for note in notes]
    assert "valid.txt: not trained on; its name marks it as a validation set" in reported
    assert "test.txt: not trained on; its name marks it as a testing set" in reported


def test_contamination_is_reported(tmp_path: Path) -> None:
    write(tmp_path, train="a\nb\n", valid="b\nc\n", test="d\n")
    _, notes = load(tmp_path, "train.txt")
    assert [note.text for note in notes if note.level == "warning"] == [
        "valid.txt: 1 of its 2 texts are also in the training data, so its scores are too good"
    ]


def test_a_test_set_that_cannot_be_read_is_refused_if_it_was_named(tmp_path: Path) -> None:
    write(tmp_path, train="a\nb\nc\nd\n", valid="e\n", test="\n\n")
    splits, notes = load(tmp_path, "train.txt")
    assert splits.tests == ()
    (warning,) = (note.text for note in notes if note.level == "warning")
    assert warning.startswith(str(tmp_path / "test.txt"))
    assert warning.endswith("; this test set was found automatically and is skipped")
    with pytest.raises(TrainError, match=r"test\.txt"):
        load(tmp_path, "train.txt", test=(str(tmp_path / "test.txt"),))


def test_skipped_lines_are_reported(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n{\n{\n{"other": "b"}\n{"text": "d"}\n')
    splits, notes = load(tmp_path, "train.jsonl", hold_out=0)
    assert splits.train.texts == ["a", "d"]
    (warning,) = (note.text for note in notes if note.level == "warning")
    assert warning.startswith("train.jsonl: skipped lines: 2 ")
    assert ", 1 " in warning


def test_truncated_texts_and_too_few_tokens_are_reported(tmp_path: Path) -> None:
    notes: list[Any] = []
    task = object.__new__(TextClassificationTask)
    task.context = RunContext(data_dir=tmp_path, device=torch.device("cpu"), report=notes.append)
    rows = EncodedSentences(np.arange(9), np.array([4, 5]))
    texts = SimpleNamespace(name="set", texts=["a", "b"])
    assert task.fit_length(texts, rows, 5).lengths.tolist() == [4, 5]  # type: ignore[arg-type]
    assert notes == []
    assert task.fit_length(texts, rows, 4).lengths.tolist() == [4, 4]  # type: ignore[arg-type]
    text = "set: 1 of 2 texts have more than 4 tokens and are truncated; a larger `max_tokens` keeps more"
    assert notes == [Note(text=text, level="warning")]
    task.tokenizer = SimpleNamespace(source=SimpleNamespace(prefix_ids=(1,), suffix_ids=(2, 3)))  # type: ignore[assignment]
    task.max_tokens = 3
    with pytest.raises(TrainError, match=r"`data\.max_tokens` must be 4 or more, but is 3"):
        task.prepare_texts(texts)  # type: ignore[arg-type]


def test_the_end_of_each_of_few_documents_is_held_out(tmp_path: Path) -> None:
    write(tmp_path, a="x" * 1000, b="y" * 500)
    splits, notes = load(tmp_path, "a.txt", "b.txt", layout="documents")
    assert [len(text) for text in splits.train.texts] == [900, 450]
    expected = "held out the last part of each document, 150 characters, for validation"
    assert notes[0].text.startswith(expected)
    _, notes = load(tmp_path, "a.txt", layout="documents")
    assert notes[0].text.startswith("held out the last part of each document, 100 characters, for validation")


# ---- pre-trained models ----------------------------------------------------------------------------------------------


def encoder(**changes: Any) -> TextEncoder:
    model = build(replace(CONFIG, **changes))
    assert isinstance(model, TextEncoder)
    return model


def test_only_heads_are_new() -> None:
    pretrained, config = encoder(), replace(CONFIG, masked_lm=False, pooler=True, labels=("a", "b"))
    model = base.load_pretrained(config, pretrained)
    new = base.find_new_head_parameters(model, pretrained)
    assert set(new) == {"pooler.dense.weight", "pooler.dense.bias", "classifier.weight", "classifier.bias"}
    for name, parameter in model.named_parameters():
        assert name in new or torch.equal(parameter, pretrained.state_dict()[name])
    again = base.load_pretrained(config, model)
    assert base.find_new_head_parameters(again, model) == ()
    assert base.find_new_head_parameters(base.load_pretrained(replace(config, labels=("b", "a")), model), model) == (
        "classifier.weight",
        "classifier.bias",
    )
    assert set(base.find_new_head_parameters(base.load_pretrained(CONFIG, model), model)) == {
        f"masked_lm.{name}" for name in ("dense.weight", "dense.bias", "norm.weight", "norm.bias", "output.bias")
    }


def test_a_stack_of_another_shape_is_refused() -> None:
    with pytest.raises(FolderError, match="wrong shape: `encoder"):
        base.load_pretrained(replace(CONFIG, stack=replace(CONFIG.stack, ffn_width=16)), encoder())


def test_new_heads_are_trained_beside_lora() -> None:
    pretrained = encoder()
    model = base.load_pretrained(replace(CONFIG, masked_lm=False, pooler=True, labels=("a", "b")), pretrained)
    new = base.find_new_head_parameters(model, pretrained)
    add_lora(model, 2, new)
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name for name in trainable if not name.endswith((".up", ".down"))} == set(new)


# ---- tasks -----------------------------------------------------------------------------------------------------------

WORDS = "the cat sat on a mat and saw one dog there with two birds".split()


def prepare_task(tmp_path: Path, task: Any = "mlm", events: list[Any] | None = None, **data: Any) -> Any:
    text = "\n".join(" ".join(WORDS[(i + j) % len(WORDS)] for j in range(3 + i % 9)) for i in range(80))
    (tmp_path / "text.txt").write_text(text + "\n")
    report = (lambda event: None) if events is None else events.append
    context = RunContext(data_dir=tmp_path / "state", device=torch.device("cpu"), report=report)
    tokenizer = TokenizerConfig(kind="char") if task == "lm" else TokenizerConfig(vocab=300)
    config = DataConfig(train=(str(tmp_path / "text.txt"),), tokenizer=tokenizer, max_tokens=16, **data)
    run = RunConfig(task=task, data=config, train=TrainConfig(batch_tokens=64))
    return get_task_class(task)(run, None, context), run


@pytest.mark.parametrize("layout", ["packed", "bucketed"])
def test_batches_have_the_requested_layout_and_limits(tmp_path: Path, layout: Any) -> None:
    task, run = prepare_task(tmp_path, layout=layout)
    loader = task.build_train_batches(run)
    batch = loader.get_batch(0, 0)
    assert (batch.inputs.packing is not None) == (layout == "packed")
    assert batch.num_padded_tokens <= 64
    assert batch.row_length <= (64 if layout == "packed" else 16)


@pytest.mark.parametrize("name", ["mlm", "lm", "spans"])
def test_the_size_follows_the_number_of_training_tokens(tmp_path: Path, name: Any) -> None:
    events: list[Any] = []
    task, run = prepare_task(tmp_path, name, events)
    tokens = len(task.encoded_texts.ids)
    assert task.data_size.num_tokens == tokens
    assert task.data_size.num_examples == len(task.splits.train.texts)
    size, _, reason = task.choose_model(run, {"task": name})
    assert size == "tiny"
    assert reason.startswith(f"for {tokens:,} tokens on a CPU; dropout ")
    assert task.describe_data().source_tokens == tokens
    kind, pieces = ("char", "characters and bytes") if name == "lm" else ("bpe", "subwords")
    described = [event.text for event in events if event.text.startswith("tokenizer: ")]
    assert described == [f"tokenizer: {kind}, {task.vocabulary.size:,} {pieces}"]


@pytest.mark.parametrize(
    ("tokens", "cpu", "gpu"),
    [
        (499_999, "tiny", "tiny"), (500_000, "tiny", "small"), (49_999_999, "tiny", "small"),
        (50_000_000, "small", "small"), (99_999_999, "small", "small"), (100_000_000, "small", "base"),
    ],
)  # fmt: skip
def test_sizes_change_exactly_at_their_limits(tokens: int, cpu: str, gpu: str) -> None:
    assert look_up(CPU_SIZE_BY_TOKENS, tokens) == cpu
    assert look_up(GPU_SIZE_BY_TOKENS, tokens) == gpu


def test_steps_follow_from_tokens_epochs_and_batches(tmp_path: Path) -> None:
    task, run = prepare_task(tmp_path)
    config = task.build_config("tiny")
    for tokens, steps in ((4_096_000, 100_000), (1_000, 2_000), (40_960_000, 300_000)):
        task.data_size = DataSize(num_examples=1, num_tokens=tokens)
        train = task.fill_train_config(replace(run, size="tiny", model=config, train=TrainConfig()))
        assert (train.steps, train.batch_tokens) == (steps, 4_096)
    assert train.warmup == 4_000
    task.data_size = DataSize(num_examples=1, num_tokens=4_096_000)
    train = task.fill_train_config(replace(run, size="tiny", model=config, train=TrainConfig(accumulate=4)))
    assert train.steps == 25_000
    tuned = task.fill_train_config(replace(run, size=None, model=config, train=TrainConfig(), init_from="model"))
    assert (tuned.steps, tuned.lr, tuned.warmup) == (3_000, 5e-4, 300)


def test_scores_are_per_target_and_their_time_is_estimated(tmp_path: Path) -> None:
    task, run = prepare_task(tmp_path, "lm")
    model = build(task.build_config("tiny")).eval()
    assert task.estimate_scoring_seconds(model, run) > 0
    (scores,) = task.score_model(model, run)
    assert scores.split == "validation"
    texts = task.splits.valid
    total, count = task.compute_loss(model, task.get_eval_batches(texts))
    assert scores.metrics["loss"] == pytest.approx(total / count)
    assert scores.metrics["bits_per_character"] == pytest.approx(total / math.log(2) / texts.char_count)
    assert scores.num_examples == len(texts.texts)
    assert task.get_eval_batches(texts) is task.get_eval_batches(texts)


def test_progress_is_reported_every_few_seconds_with_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Any] = []
    context = RunContext(data_dir=Path("nowhere"), device=torch.device("cpu"), report=events.append)
    now = [100.0]
    monkeypatch.setattr("attent.training.tasks.base.time.monotonic", lambda: now[0])
    report = context.track_progress("scoring test", "sentences", 40)
    for seconds, done in ((4.0, 5), (5.0, 10), (9.0, 20), (10.0, 30), (30.0, 0), (31.0, 40)):
        now[0] = 100 + seconds
        report(done)
    assert [event.text for event in events] == [
        "scoring test: 10 of 40 sentences, about 15 s left",
        "scoring test: 30 of 40 sentences, about 3 s left",
    ]


@pytest.mark.parametrize("task", ["lm", "mlm", "spans", "classify"])
def test_larger_models_have_lower_learning_rates(task: str) -> None:
    defaults = get_task_class(task).size_defaults  # type: ignore[arg-type, attr-defined]
    for rates in (defaults.lr_by_size, defaults.finetune_lr_by_size):
        values = [rates[size] for size in ("tiny", "small", "base", "big")]
        assert values == sorted(values, reverse=True)
        assert all(1e-5 <= value <= 5e-3 for value in values)
