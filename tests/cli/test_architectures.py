"""`attent train --arch`: other architectures train, translate, score and are inspected by the usual commands; what they
do not support is refused in a sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import attent
from attent.interop.export import convert_model
from attent.models import Seq2Seq, presets
from attent.nn import LSTMDecoderConfig, StackConfig
from attent.nn.lora import LoRAError, add_lora
from attent.training.config import TrainError, read_run, read_user_settings
from attent.training.folder_info import inspect_folder
from attent.training.run import TrainResult, train
from tests.training.runs import write_corpus


def train_small(folder: Path, arch: str, **options: object) -> TrainResult:
    data = folder / "corpus.tsv"
    write_corpus(data, 60)
    more = {"steps": 3, "valid_sentences": 2, "beam_size": 1, "batch_tokens": 256, "hold_out": 6, "size": "tiny"}
    settings = {"model.width": 16, "model.layers": 2}
    return train(data, src="en", tgt="xx", out=folder / arch, arch=arch, settings=settings, **more | options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of each architecture."""
    root = tmp_path_factory.mktemp("archs")
    for arch in ("lstm", "lstm-no-attention"):
        assert train_small(root, arch).stop_reason == "steps"
    return root


@pytest.mark.parametrize(("arch", "attention"), [("lstm", "additive"), ("lstm-no-attention", "none")])
def test_a_run_states_its_architecture_and_recipe(folder: Path, arch: str, attention: str) -> None:
    run = read_run(folder / arch / "run.toml")
    assert isinstance(run.model.decoder, LSTMDecoderConfig)
    assert (run.arch, run.model.decoder.attention, run.data.layout) == (arch, attention, "bucketed")
    assert (run.train.clip_norm, run.train.compile) == (1.0, False)
    assert "bidirectional LSTM and LSTM" in (folder / arch / "card.md").read_text(encoding="utf-8")
    info = inspect_folder(folder / arch)
    assert ("model", "encoder-decoder LSTM, saved by attent") in info.rows
    assert ("attent look" in dict(info.rows)["use with"]) == (arch == "lstm")
    page = " ".join(" ".join(row) for row in info.rows)
    assert f"decoder 2 layers, width 16, LSTM, {'no' if attention == 'none' else attention} attention" in page


def test_it_translates_scores_aligns_and_is_inspected(folder: Path) -> None:
    translator = attent.Translator.load(folder / "lstm")
    (translation,) = translator.translate(["the big house"], alignment=True, beam_size=2)
    assert translation.alignment is not None
    report = attent.score(folder / "lstm", str(folder / "corpus.tsv"), src="en", tgt="xx")
    assert report
    layers = json.loads(attent.look(translator, "the big house", beam_size=2).to_json())["layers"]
    assert [(layer["path"], layer["heads"]) for layer in layers] == [("decoder.blocks.0.cross_attn", 1)]


def test_alignment_needs_attention(folder: Path) -> None:
    translator = attent.Translator.load(folder / "lstm-no-attention")
    with pytest.raises(ValueError, match="but this Seq2Seq has none; use an encoder-decoder model with attention"):
        translator.translate(["the big house"], alignment=True)


def test_convolutions_train_translate_and_are_inspected(tmp_path: Path) -> None:
    train_small(tmp_path, "conv")
    run = read_run(tmp_path / "conv" / "run.toml")
    assert (run.arch, run.model.encoder.kind, run.data.layout, run.train.clip_norm) == ("conv", "conv", "bucketed", 1.0)
    assert "encoder-decoder convolutions of 3 positions" in dict(inspect_folder(tmp_path / "conv").rows)["model"]
    translator = attent.Translator.load(tmp_path / "conv")
    (translation,) = translator.translate(["the big house"], alignment=True, beam_size=2)
    assert translation.alignment is not None
    layers = json.loads(attent.look(translator, "the big house", beam_size=2).to_json())["layers"]
    assert [layer["path"] for layer in layers] == ["decoder.blocks.0.cross_attn", "decoder.blocks.1.cross_attn"]


def test_it_is_fine_tuned_in_its_architecture(folder: Path, tmp_path: Path) -> None:
    data = folder / "corpus.tsv"
    more = {"steps": 1, "batch_tokens": 256, "hold_out": 6, "valid_sentences": 0, "beam_size": 1}
    train(data, src="en", tgt="xx", out=tmp_path / "tuned", init_from=str(folder / "lstm"), **more)
    assert isinstance(read_run(tmp_path / "tuned" / "run.toml").model.decoder, LSTMDecoderConfig)
    with pytest.raises(TrainError, match="`arch` cannot be changed with --from"):
        train(data, src="en", tgt="xx", out=tmp_path / "x", init_from=str(folder / "lstm"), arch="transformer", **more)


def test_lora_needs_attention() -> None:
    with pytest.raises(LoRAError, match="must be 0 for a model without attention"):
        add_lora(attent.build(presets.lstm_no_attention(9, "tiny")), 2)


@pytest.mark.parametrize("to", ["hf", "ctranslate2"])
def test_other_formats_are_refused(folder: Path, tmp_path: Path, to: str) -> None:
    with pytest.raises(ValueError, match=r"only a Transformer is supported here, but `encoder\.kind` is lstm"):
        convert_model(folder / "lstm", tmp_path / "out", to)


def test_an_engine_that_does_not_support_it_is_refused_only_if_requested(folder: Path) -> None:
    messages: list[str] = []
    attent.Translator.load(folder / "lstm-no-attention", notify=messages.append).translate(["the big house"])
    assert not messages
    with pytest.raises(ValueError, match="only a Transformer is supported"):
        attent.Translator.load(folder / "lstm", engine="ctranslate2").translate(["the big house"])


def test_settings_are_validated_for_the_architecture(tmp_path: Path) -> None:
    requested = read_user_settings(None, {"arch": "lstm"}, ["model.decoder.attention=dot", "model.dropout=0.2"])
    assert requested["model"]["decoder"] == {"kind": "lstm", "attention": "dot", "dropout": 0.2}
    for arch, override, message in (
        ("lstm", "model.decoder.heads=2", "heads"),
        ("lstm", "model.decoder.attention=soft", "additive"),
        ("transformer", "model.decoder.attention=dot", "attention"),
        ("lstm-no-attention", "model.decoder.input_feeding=true", "`input_feeding` must be false"),
    ):
        with pytest.raises(ValueError, match=message):
            read_user_settings(None, {"arch": arch}, [override])
    with pytest.raises(ValueError, match="`arch` has no effect with --task lm"):
        read_user_settings(None, {"arch": "lstm", "task": "lm"}, [])
    with pytest.raises(TrainError, match=r"`data\.layout` must be bucketed or fixed for --arch lstm, but is packed"):
        train_small(tmp_path, "lstm", layout="packed")


@pytest.mark.parametrize("arch", ["transformer", "lstm-no-attention", "conv"])
def test_a_run_file_of_another_architecture_is_refused(folder: Path, arch: str) -> None:
    """Its model would be trained under the name of the requested one."""
    file = folder / "lstm" / "run.toml"
    assert read_user_settings(file, {"arch": "lstm"}, [])["arch"] == read_user_settings(file, {}, [])["arch"] == "lstm"
    key = "decoder.attention`=additive" if arch == "lstm-no-attention" else "encoder.kind`=lstm"
    message = f"`arch` must match `model.{key}, but is {arch}; leave one out"
    for flags, overrides in (({"arch": arch}, []), ({}, [f"arch={arch}"])):
        with pytest.raises(TrainError, match=message):
            read_user_settings(file, flags, overrides)
    with pytest.raises(TrainError, match=r"`arch` must match `model\.decoder\.attention`=none, but is lstm"):
        read_user_settings(folder / "lstm-no-attention" / "run.toml", {"arch": "lstm"}, [])
    with pytest.raises(TrainError, match=r"`arch` must match `model\.decoder\.kind`=conv, but is lstm"):
        read_user_settings(None, {"arch": "lstm"}, ["model.decoder.kind=conv"])


def test_an_override_of_the_architecture_decides_the_keys_of_the_model() -> None:
    requested = read_user_settings(None, {}, ["model.decoder.attention=dot", "arch=lstm"])
    assert requested["model"]["decoder"] == {"kind": "lstm", "attention": "dot"}


@pytest.mark.parametrize("size", ["tiny", "small", "base", "big"])
def test_sizes_have_about_as_many_parameters_as_the_transformer(size: str) -> None:
    def count(arch: str) -> int:
        model = attent.models.build_empty(presets.ARCHS[arch](32_000 if size in ("base", "big") else 9_000, size))
        assert isinstance(model, Seq2Seq)
        return sum(parameter.numel() for parameter in model.parameters())

    assert [count("lstm"), count("conv")] == pytest.approx([count("transformer")] * 2, rel=0.05)
    assert 0.89 * count("transformer") < count("lstm-no-attention") < count("transformer")
    assert isinstance(presets.ARCHS["transformer"](9, size).encoder, StackConfig)
