"""The examples in the docstrings of public objects run, on a model that was trained on the sentences in them.

To have the examples of an object tested, add it to `EXAMPLES`.
"""

from __future__ import annotations

import asyncio
import doctest
from itertools import product
from pathlib import Path

import pandas as pd
import pytest
import torch
import torch.nn.functional as F

import attent
from attent.decoding.alignment import save_measured_selection, select_by_agreement
from attent.decoding.batching import pad_token_ids
from attent.decoding.translator import Translation
from attent.models import Seq2Seq, Seq2SeqConfig, shift_right
from attent.models.config import mirror_encoder
from attent.nn import StackConfig
from attent.scoring.report import ScoreReport
from attent.text.tokenizer_training import TokenizerConfig, train_tokenizer
from attent.training.autoconfig import fit_to_tokenizer
from attent.training.loop import write_model

EXAMPLES: list[object] = [
    attent.Inspection, attent.Translator, ScoreReport, Seq2Seq.summary, Translation, attent.build, attent.load,
    attent.look, attent.mask_heads, attent.measure_heads, attent.nn.Attention, attent.nn.Block, attent.nn.FeedForward,
    attent.nn.Residual, attent.nn.Stack, attent.presets, attent.record, attent.score,
]  # fmt: skip

SUBJECTS = {"A man": "Ein Mann", "A dog": "Ein Hund", "The man": "Der Mann", "The dog": "Der Hund"}
VERBS = {"sings": "singt", "sleeps": "schläft", "waits": "wartet", "walks": "läuft"}
PAIRS = [(f"{who[0]} {does[0]}.", f"{who[1]} {does[1]}.") for who, does in product(SUBJECTS.items(), VERBS.items())]
NUM_STEPS = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a small trained model, `runs/en-de`, and its sentences, `test.tsv`."""
    torch.manual_seed(0)
    sources, targets = zip(*PAIRS, strict=True)
    tokenizer = train_tokenizer(sources, targets, TokenizerConfig(vocab=390))
    stack = StackConfig(layers=1, width=32, heads=2, ffn_width=64, dropout=0.0)
    model = Seq2Seq(fit_to_tokenizer(Seq2SeqConfig(vocab=9, encoder=stack, decoder=mirror_encoder(stack)), tokenizer))
    source, lengths = pad_token_ids(tokenizer.encode_source(sources), torch.device("cpu"))
    target, target_lengths = pad_token_ids(tokenizer.encode_target(targets), torch.device("cpu"))
    is_padding = torch.arange(target.shape[1]) >= target_lengths[:, None]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(NUM_STEPS):
        logits = model(source, shift_right(target, model.config.start_id), lengths, target_lengths)
        loss = F.cross_entropy(logits.flatten(0, 1), target.masked_fill(is_padding, -100).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    folder = tmp_path_factory.mktemp("examples")
    write_model(folder / "runs" / "en-de", model.eval(), tokenizer)
    save_measured_selection(folder / "runs" / "en-de", select_by_agreement(model, tokenizer, sources, targets))
    (folder / "test.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in PAIRS), encoding="utf-8")
    return folder


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: getattr(example, "__name__", str(example)))
def test_examples_run(example: object, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    names = {
        "asyncio": asyncio,
        "attent": attent,
        "frame": pd.DataFrame({"en": ["A man sings.", "A dog sleeps."]}),
        "torch": torch,
        "translator": attent.Translator.load("runs/en-de"),
    }
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    tests = [test for test in doctest.DocTestFinder(exclude_empty=True).find(example, globs=names) if test.examples]
    assert tests, f"{example} has no example"
    problems: list[str] = []
    for test in tests:
        runner.run(test, out=problems.append)
    assert not problems, "".join(problems)
