"""What a run on text alone is told of its files, and what of a model to begin from it takes."""

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


def found(tmp_path: Path, *names: str, form: Any = "lines", **data: Any) -> tuple[TextSplits, list[Note]]:
    notes: list[Any] = []
    place = RunContext(data_dir=tmp_path / "state", device=torch.device("cpu"), report=notes.append)
    config = DataConfig(train=tuple(str(tmp_path / name) for name in names), **data)
    return load_splits(Run(task="mlm", data=config), place, form), notes


def write(tmp_path: Path, **files: str) -> None:
    for name, text in files.items():
        (tmp_path / f"{name}.txt").write_text(text)


def test_files_that_are_for_validation_by_their_names_are_told(tmp_path: Path) -> None:
    write(tmp_path, train="a\nb\n", valid="b\nc\n", test="d\n")
    source, notes = found(tmp_path, "test.txt", "train.txt", "valid.txt")
    assert source.train.texts == ["a", "b"]
    assert source.valid is not None
    assert source.valid.texts == ["b", "c"]
    assert [one.texts for one in source.tests] == [["d"]]
    told = [note.text for note in notes]
    assert "valid.txt: is not trained on: by its name it is there to validate on" in told
    assert "test.txt: is not trained on: by its name it is there to score at the end" in told


def test_texts_that_are_in_both_parts_are_told(tmp_path: Path) -> None:
    write(tmp_path, train="a\nb\n", valid="b\nc\n", test="d\n")
    _, notes = found(tmp_path, "train.txt")
    assert [note.text for note in notes if note.level == "warning"] == [
        "valid.txt: 1 of its 2 texts are in the text to train on, too: its scores are better than they should be"
    ]


def test_what_is_taken_of_a_few_documents_is_told(tmp_path: Path) -> None:
    write(tmp_path, a="x" * 1000, b="y" * 500)
    source, notes = found(tmp_path, "a.txt", "b.txt", form="documents")
    assert [len(text) for text in source.train.texts] == [900, 450]
    told = "held out 150 characters of 2 documents, the last part of each for validation"
    assert notes[0].text.startswith(told)
    _, notes = found(tmp_path, "a.txt", form="documents")
    assert notes[0].text.startswith("held out the last 100 characters for validation")


# ---- a model to begin from -------------------------------------------------------------------------------------------


def encoder(**changes: Any) -> TextEncoder:
    made = build(replace(CONFIG, **changes))
    assert isinstance(made, TextEncoder)
    return made


def test_only_heads_are_new_and_the_rest_is_taken() -> None:
    loaded, wanted = encoder(), replace(CONFIG, masked_lm=False, pooler=True, labels=("a", "b"))
    model = load_pretrained(wanted, loaded)
    anew = task_heads.find_new_heads(model, loaded)
    assert set(anew) == {"pooler.dense.weight", "pooler.dense.bias", "classifier.weight", "classifier.bias"}
    for name, parameter in model.named_parameters():
        assert name in anew or torch.equal(parameter, loaded.state_dict()[name])
    again = load_pretrained(wanted, model)
    assert task_heads.find_new_heads(again, model) == ()
    assert task_heads.find_new_heads(load_pretrained(replace(wanted, labels=("b", "a")), model), model) == (
        "classifier.weight",
        "classifier.bias",
    )
    assert set(task_heads.find_new_heads(load_pretrained(CONFIG, model), model)) == {
        f"masked_lm.{name}" for name in ("dense.weight", "dense.bias", "norm.weight", "norm.bias", "output.bias")
    }


def test_a_stack_of_another_shape_is_refused() -> None:
    with pytest.raises(FolderError, match="wrong shape: `encoder"):
        load_pretrained(replace(CONFIG, stack=replace(CONFIG.stack, ffn_width=16)), encoder())


def test_with_lora_what_is_new_learns() -> None:
    loaded = encoder()
    model = load_pretrained(replace(CONFIG, masked_lm=False, pooler=True, labels=("a", "b")), loaded)
    anew = task_heads.find_new_heads(model, loaded)
    add_lora(model, 2, anew)
    learning = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name for name in learning if not name.endswith((".up", ".down"))} == set(anew)
