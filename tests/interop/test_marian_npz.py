"""Folders that Marian has written give Marian's translations and scores.

The models in marian_models/ were trained with Marian 1.12.42 on `phrases`, and translations.tsv holds the best
hypotheses of its beam search (-b 4 --normalize 0.6) with their log probabilities. `joint` has one SentencePiece
vocabulary and tied embeddings; `separate` has YAML vocabularies, an untied output and normalized embeddings.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attent
from attent.decoding.options import SearchOptions
from attent.decoding.translator import Translator
from attent.interop.export import convert_model
from attent.interop.marian_npz import SETTINGS
from attent.storage.errors import AttentError
from attent.text.tokenizer import Tokenizer
from attent.training.folder_info import inspect_folder

MODELS = Path(__file__).parent / "marian_models"
Arrays = dict[str, np.ndarray[Any, Any]]


@pytest.mark.parametrize("name", ["joint", "separate"])
def test_translations_and_scores_are_those_of_marian(name: str) -> None:
    lines = (MODELS / name / "translations.tsv").read_text(encoding="utf-8").splitlines()
    sources, targets, log_probs = zip(*(line.split("\t") for line in lines), strict=True)
    translator = Translator.load(MODELS / name, engine="torch")
    found = translator.translate(sources, SearchOptions(beam_size=4), prevent_loops=False)
    assert [each.text for each in found] == list(targets)
    assert [each.log_prob for each in found] == pytest.approx([float(each) for each in log_probs], abs=3e-4)
    assert ("model", "encoder-decoder Transformer, saved by Marian") in inspect_folder(MODELS / name).rows


@pytest.mark.parametrize("name", ["joint", "separate"])
def test_conversion_is_a_model_of_attent_with_the_same_translations(name: str, tmp_path: Path) -> None:
    assert convert_model(MODELS / name, tmp_path / "own") == "an attent model, with its tokenizer"
    ours, theirs = (Translator.load(folder, engine="torch") for folder in (tmp_path / "own", MODELS / name))
    assert ours("the big dog") == theirs("the big dog")
    with pytest.raises(AttentError, match=r"`encoder\.\w+` must be"):  # such as the wavelengths of positions
        convert_model(MODELS / name, tmp_path / "hf", "hf")


def change_settings(old: str, new: str) -> Callable[[Arrays], Arrays]:
    def change(arrays: Arrays) -> Arrays:
        text = arrays[SETTINGS].tobytes().decode()
        assert old in text
        return arrays | {SETTINGS: np.frombuffer(text.replace(old, new).encode(), np.int8)}

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_settings('preprocess: ""', "preprocess: n"), "`transformer-preprocess` must be '', but is 'n'"),
        (change_settings("autoreg: self-attention", "autoreg: rnn"), "`transformer-decoder-autoreg` must be"),
        (change_settings("heads: 4", "heads: 5"), "`dim-emb` must be a multiple of `transformer-heads`=5, but is 32"),
        (change_settings("dec-depth: 1", "dec-depth: 2"), "decoder_l2_self_Wq is not a file in the archive"),
        (lambda arrays: arrays | {"Wpos": np.zeros((3, 4), np.float32)}, "`Wpos` is not known in a Transformer"),
        (lambda arrays: arrays | {"Wemb": arrays["Wemb"][1:]}, "wrong shape: `source_embedding.weight`"),
        (lambda arrays: arrays | {"Wemb": np.array([print])}, "cannot be read as a Marian model"),  # a pickle
        (lambda arrays: {}, f"{SETTINGS} is not a file in the archive"),
    ],
)
def test_other_models_are_refused(change: Callable[[Arrays], Arrays], message: str, tmp_path: Path) -> None:
    shutil.copytree(MODELS / "joint", tmp_path / "model")
    path = tmp_path / "model" / "model.npz"
    with np.load(path) as arrays:
        changed = change(dict(arrays))
    np.savez(path, **changed)  # type: ignore[arg-type]
    with pytest.raises(AttentError) as error:
        attent.load(tmp_path / "model")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_incomplete_folders_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(MODELS / "separate", folder)

    def check(message: str) -> None:
        with pytest.raises(AttentError, match=message):
            Tokenizer.load(folder)

    shutil.copy(folder / "en.vocab.yml", folder / "kept")
    (folder / "en.vocab.yml").write_text("a: [")
    check(r"en\.vocab\.yml: is not valid YAML")
    (folder / "en.vocab.yml").write_text("</s>: 0\n<unk>: one\n")
    check(r"vocab\.json: must number its pieces from 0")
    (folder / "en.vocab.yml").unlink()
    check(r"en\.vocab\.yml: is missing, but decoder\.yml names it")
    (folder / "kept").rename(folder / "en.vocab.yml")
    (folder / "source.spm").unlink()
    check(r"source\.spm: is missing; it must hold the SentencePiece model of en\.vocab\.yml")
    (folder / "best.decoder.yml").write_text("models: [/elsewhere/best.npz]\nvocabs: [/elsewhere/vocab.spm]\n")
    check("must have the decoder.yml of one Marian model, but has those of 2")
    for path in folder.glob("*decoder.yml"):
        path.write_text("models: [a.npz, b.npz]\n")
    check("must have the decoder.yml of one Marian model, but has those of 0")


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    shutil.copytree(MODELS / "joint", tmp_path / "model")
    (tmp_path / "model" / "model.npz").write_bytes(b"damaged")
    with pytest.raises(AttentError, match="cannot be read as a Marian model"):
        attent.load(tmp_path / "model")
