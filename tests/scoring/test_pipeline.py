"""Scoring a test set from its files to the report."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from attent.decoding.options import DeviceOptions, SearchOptions
from attent.decoding.translator import Translator
from attent.models import Seq2Seq, Seq2SeqConfig
from attent.models.config import mirror_encoder
from attent.nn import StackConfig
from attent.scoring.metrics import ScoreError
from attent.scoring.pipeline import ScoreOptions, score
from attent.training.autoconfig import fit_to_tokenizer
from attent.training.loop import write_model
from tests.text.corpus import lines, tokenizer

STACK = StackConfig(layers=1, width=16, heads=2, ffn_width=16)


def test_a_metric_without_its_package_is_refused_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sacremoses", None)
    (tmp_path / "test.tsv").write_text("a\tb\n")
    options = ScoreOptions(metrics=["bleu-lc-tok"])
    with pytest.raises(ScoreError, match=r"sacremoses.*pip install 'attent\[moses\]'"):
        score(tmp_path / "missing", str(tmp_path / "test.tsv"), src="en", tgt="de", options=options)


def test_each_pair_is_translated_into_its_language(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Seq2Seq(fit_to_tokenizer(Seq2SeqConfig(vocab=9, encoder=STACK, decoder=mirror_encoder(STACK)), tokenizer()))
    write_model(tmp_path / "model", model.eval(), tokenizer())
    search, sources = SearchOptions(beam_size=1, max_length=6), lines()[0][:4]
    options = ScoreOptions(search=search, save=tmp_path / "saved.txt", device=DeviceOptions(device="cpu"))
    translator, saved = Translator.load(tmp_path / "model", device="cpu"), {}
    (tmp_path / "test.tsv").write_text("".join(f"{source}\tTon\n" for source in sources))
    for language in ("de", "pt-BR"):
        score(tmp_path / "model", str(tmp_path / "test.tsv"), src="en", tgt=language, options=options)
        saved[language] = (tmp_path / "saved.txt").read_text().splitlines()
        expected = translator.translate(sources, search, to=language)
        assert saved[language] == [" ".join(translation.text.splitlines()) for translation in expected]
    assert saved["de"] != saved["pt-BR"]
