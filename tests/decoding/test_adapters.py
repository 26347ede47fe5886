"""Adapters apart from their model: each gives what its merged model gives, several share one model and one server."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import attent
from attent import models
from attent.cli import main
from attent.cli.serve import parse_adapters
from attent.decoding.alignment import HeadSelection, MeasuredSelection, compute_fingerprint, save_measured_selection
from attent.decoding.engines.gpu.inference_model import find_unsupported_reason
from attent.decoding.forced_decoding import score_targets
from attent.decoding.translator import TranslationError, Translator
from attent.models import Seq2Seq
from attent.models.weights import write_adapter
from attent.nn.lora import AdaptedLinear, add_lora, merge_lora, split_parameters
from attent.serving.backend import ServiceConfig
from attent.serving.messages import CallContext, TranslateRequest
from attent.serving.service import TranslationService
from attent.storage.errors import FolderError
from attent.training.loop import write_model
from attent.training.run_options import TrainError
from tests.text.corpus import lines, tokenizer
from tests.training.test_lora import randomize, run_training
from tests.training.toys import model

SOURCES = [source.replace(".", "!") for source in dict.fromkeys(lines()[0])][:20]
NAMES = ("first", "second")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, two adapters of it, and the same merged."""
    home = tmp_path_factory.mktemp("adapters")
    write_model(home / "base", model(), tokenizer())
    for seed, name in enumerate(NAMES):
        adapted = model()
        torch.manual_seed(seed)
        add_lora(adapted, 3)
        randomize(adapted)
        write_adapter(home / name / "adapter", *split_parameters(dict(adapted.named_parameters())), "base")
        merge_lora(adapted)
        write_model(home / f"{name}-merged", adapted, tokenizer())
    return home


def load(folder: Path, adapter: Path | None = None, **options: Any) -> Translator:
    translator = Translator.load(folder, device="cpu", engine="torch", **options)
    return translator if adapter is None else translator.with_adapter(adapter)


def translate(translator: Translator, **options: Any) -> list[tuple[str, float]]:
    return [(item.text, item.score) for item in translator.translate(SOURCES, to="de", **options)]


@pytest.mark.parametrize("options", [{"beam_size": 1}, {"beam_size": 3, "n_best": 2}, {"temperature": 0.7, "seed": 4}])
def test_every_adapter_gives_what_its_merged_model_gives(home: Path, options: dict[str, Any]) -> None:
    plain = translate(load(home / "base"), **options)
    results = {name: translate(load(home / "base", home / name), **options) for name in NAMES}
    for name, result in results.items():
        merged = translate(load(home / f"{name}-merged"), **options)
        assert [text for text, _ in result] == [text for text, _ in merged]
        assert [score for _, score in result] == pytest.approx([score for _, score in merged], abs=1e-4)
        assert result != plain
    assert results["first"] != results["second"]


def test_adapters_share_the_weights_and_change_nothing_else(home: Path) -> None:
    base = load(home / "base")
    before = translate(base)
    first, second = (base.with_adapter(home / name) for name in NAMES)
    own = {id(parameter) for parameter in base.model.parameters()}
    for translator in (first, second):
        shared = [parameter for parameter in translator.model.parameters() if id(parameter) in own]
        assert len(shared) == len(own)
    assert translate(first) != before
    assert translate(base) == before
    for part in first.model.modules():
        if isinstance(part, AdaptedLinear):  # code that reads the weight gets the merged one
            torch.testing.assert_close(part.weight, part.base.weight + part.up @ part.down)
            x = torch.randn(2, part.base.in_features)
            torch.testing.assert_close(part(x), nn.functional.linear(x, part.weight, part.bias), rtol=1e-4, atol=1e-5)


def test_scores_and_alignments_are_those_of_the_adapter(home: Path) -> None:
    adapted, merged = load(home / "base", home / "first"), load(home / "first-merged")
    items = [translator.translate(SOURCES[0], to="de") for translator in (adapted, merged)]
    assert items[0].scores == pytest.approx(items[1].scores, abs=1e-4)
    assert items[0].alignment.links == items[1].alignment.links


def test_alignments_use_the_heads_that_were_selected_for_the_model(home: Path, tmp_path: Path) -> None:
    selection = HeadSelection(layer=0, heads=(1,), shift=False)
    for name in ("base", "first-merged"):
        folder = Path(shutil.copytree(home / name, tmp_path / name))
        fingerprint = compute_fingerprint(load(folder).model)
        save_measured_selection(folder, MeasuredSelection(selection=selection, sentences=9, fingerprint=fingerprint))
    translators = load(tmp_path / "base", home / "first"), load(tmp_path / "first-merged"), load(home / "first-merged")
    adapted, merged, unmeasured = (each.translate(SOURCES[0], to="de").alignment.weights for each in translators)
    assert torch.allclose(torch.tensor(adapted), torch.tensor(merged), atol=1e-4)
    assert not torch.allclose(torch.tensor(adapted), torch.tensor(unmeasured), atol=1e-4)


def test_other_engines_decline(home: Path) -> None:
    messages: list[str] = []
    translator = Translator.load(home / "base", device="cpu", notify=messages.append).with_adapter(home / "first")
    translated = translate(translator, beam_size=1)
    assert [text for text, _ in translated] == [text for text, _ in translate(load(home / "first-merged"), beam_size=1)]
    assert any("CTranslate2 does not support adapters" in message for message in messages)
    with pytest.raises(TranslationError, match="CTranslate2 does not support adapters"):
        translate(Translator.load(home / "base", device="cpu", engine="ctranslate2").with_adapter(home / "first"))
    assert "replaced" in str(find_unsupported_reason(translator.model))


def test_a_rounded_model_takes_its_adapter(home: Path) -> None:
    translator = load(home / "base", home / "first", dtype="bfloat16")
    assert {parameter.dtype for parameter in translator.model.parameters()} == {torch.bfloat16}
    assert len(translate(translator, beam_size=1)) == len(SOURCES)


def test_wrong_adapters_are_refused(home: Path) -> None:
    with pytest.raises(FolderError, match="is an adapter of base, not of this model"):
        load(home / "first-merged", home / "first")
    with pytest.raises(FolderError, match="must be an adapter, but is a model"):
        load(home / "base", home / "first-merged")
    with pytest.raises(FolderError, match="must be a model, but is an adapter of base; give that one"):
        load(home / "first" / "adapter")
    with pytest.raises(FolderError, match="does not exist"):
        load(home / "base", home / "third")
    with pytest.raises(TranslationError, match="this is an ensemble"):
        Translator.load(home / "base", home / "base", device="cpu").with_adapter(home / "first")


def test_a_server_chooses_the_adapter_of_each_request(home: Path) -> None:
    def load_service(model: str, **adapters: str) -> TranslationService:
        folders = tuple((name, home / folder) for name, folder in adapters.items())
        return TranslationService(ServiceConfig(folders=(home / model,), adapters=folders, languages=("en", None)))

    service = load_service("base", **{name: name for name in NAMES})

    def ask(name: str | None) -> list[str]:
        request = TranslateRequest(texts=tuple(SOURCES), source="en", target="de", model=name)
        return [item.text for item in service.translate(request, CallContext())]

    for name in NAMES:
        assert ask(name) == [text for text, _ in translate(load(home / f"{name}-merged"))]
    assert ask(None) == ask("base")
    assert [entry["name"] for entry in service.info.models] == ["base", *NAMES]
    with pytest.raises(FolderError, match="is an adapter of base"):
        load_service("first-merged", x="first")
    with pytest.raises(ValueError, match="must have another name than base"):
        load_service("base", base="first")


def test_names_of_adapters_are_checked() -> None:
    assert parse_adapters(("a=x/y", "b=z=1")) == {"a": "x/y", "b": "z=1"}
    for texts in (("legal",), ("=x",), ("a=",), ("a=x", "a=y")):
        with pytest.raises(ValueError, match="--adapter must be different names with folders"):
            parse_adapters(texts)


def test_training_keeps_an_adapter(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = tmp_path / "corpus.tsv"
    pairs = list(dict.fromkeys(zip(*lines(), strict=True)))[:80]
    corpus.write_text("".join(f"{source}\t{target}\n" for source, target in pairs), encoding="utf-8")
    flags = ["--from", str(home / "base"), "--lora", "4", "--keep-adapter"]
    run_training(corpus, tmp_path / "out", *flags, steps=8)
    assert isinstance(models.read_model(tmp_path / "out"), Seq2Seq)  # merged
    config = json.loads((tmp_path / "out" / "adapter" / "config.json").read_text())
    assert (config["rank"], config["base_model"]) == (4, str(home / "base"))
    # Not the translations: those of a model that has learned nothing are ties, which rounding decides.
    translators = load(home / "base", tmp_path / "out"), load(tmp_path / "out"), load(home / "base")
    apart, merged, base = (
        torch.tensor([scores.log_prob for scores in score_targets(model, tokenizer, SOURCES, lines()[1][:20])])
        for model, tokenizer in ((each.model, each.tokenizer) for each in translators)
    )
    torch.testing.assert_close(apart, merged, rtol=1e-5, atol=1e-4)
    assert (apart - base).abs().min() > 1e-3
    (tmp_path / "in.txt").write_text("".join(f"{source}\n" for source in SOURCES))
    flags = ["--adapter", str(tmp_path / "out"), "--to", "de", "--beam-size", "1", "--device", "cpu"]
    assert not main(["translate", str(home / "base"), str(tmp_path / "in.txt"), *flags])
    assert len(capsys.readouterr().out.splitlines()) == len(SOURCES)
    with pytest.raises(TrainError, match=r"`train\.keep_adapter` needs `train\.lora`"):
        attent.train(str(corpus), out=tmp_path / "x", src="en", tgt="de", init_from=home / "base", keep_adapter=True)
