"""Tasks on text: which files are used, what is reported of them, and which pre-trained weights are used."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attent.models import EncoderConfig, TextEncoder, build
from attent.nn import StackConfig
from attent.nn.lora import add_lora
from attent.storage.errors import FolderError
from attent.training import task_heads
from attent.training.config import DataConfig, Run
from attent.training.events import Note
from attent.training.tasks.base import RunContext
from attent.training.tasks.text_task import TextSplits, load_pretrained, load_splits

CONFIG = EncoderConfig(vocab=20, stack=StackConfig(layers=1, width=8, heads=2, ffn_width=8), masked_lm=True)


def load(tmp_path: Path, *names: str, layout: Any = "lines", **data: Any) -> tuple[TextSplits, list[Note]]:
    notes: list[Any] = []
    context = RunContext(data_dir=tmp_path / "state", device=torch.device("cpu"), report=notes.append)
    config = DataConfig(train=tuple(str(tmp_path / name) for name in names), **data)
    return load_splits(Run(task="mlm", data=config), context, layout), notes


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


def test_the_end_of_each_of_few_documents_is_held_out(tmp_path: Path) -> None:
    write(tmp_path, a="x" * 1000, b="y" * 500)
    splits, notes = load(tmp_path, "a.txt", "b.txt", layout="documents")
    assert [len(text) for text in splits.train.texts] == [900, 450]
    expected = "held out 150 characters of 2 documents, the last part of each for validation"
    assert notes[0].text.startswith(expected)
    _, notes = load(tmp_path, "a.txt", layout="documents")
    assert notes[0].text.startswith("held out the last 100 characters for validation")


# ---- pre-trained models ----------------------------------------------------------------------------------------------


def encoder(**changes: Any) -> TextEncoder:
    model = build(replace(CONFIG, **changes))
    assert isinstance(model, TextEncoder)
    return model


def test_only_heads_are_new() -> None:
    pretrained, config = encoder(), replace(CONFIG, masked_lm=False, pooler=True, labels=("a", "b"))
    model = load_pretrained(config, pretrained)
    new = task_heads.find_new_heads(model, pretrained)
    assert set(new) == {"pooler.dense.weight", "pooler.dense.bias", "classifier.weight", "classifier.bias"}
    for name, parameter in model.named_parameters():
        assert name in new or torch.equal(parameter, pretrained.state_dict()[name])
    again = load_pretrained(config, model)
    assert task_heads.find_new_heads(again, model) == ()
    assert task_heads.find_new_heads(load_pretrained(replace(config, labels=("b", "a")), model), model) == (
        "classifier.weight",
        "classifier.bias",
    )
    assert set(task_heads.find_new_heads(load_pretrained(CONFIG, model), model)) == {
        f"masked_lm.{name}" for name in ("dense.weight", "dense.bias", "norm.weight", "norm.bias", "output.bias")
    }


def test_a_stack_of_another_shape_is_refused() -> None:
    with pytest.raises(FolderError, match="wrong shape: `encoder"):
        load_pretrained(replace(CONFIG, stack=replace(CONFIG.stack, ffn_width=16)), encoder())


def test_new_heads_are_trained_beside_lora() -> None:
    pretrained = encoder()
    model = load_pretrained(replace(CONFIG, masked_lm=False, pooler=True, labels=("a", "b")), pretrained)
    new = task_heads.find_new_heads(model, pretrained)
    add_lora(model, 2, new)
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name for name in trainable if not name.endswith((".up", ".down"))} == set(new)
