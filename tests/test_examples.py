"""The examples in the docstrings of public objects run, on a model that was trained on the sentences in them; typical
mistakes in calling these objects are explained.

To have the examples of an object tested, add it to `EXAMPLES`.
"""

from __future__ import annotations

import asyncio
import doctest
import signal
from itertools import product
from pathlib import Path

import pandas as pd
import pytest
import torch
import torch.nn.functional as F

import attent
from attent.decoding.alignment import save_measured_selection, select_by_agreement
from attent.decoding.loading import pad_token_ids
from attent.decoding.translator import Translation
from attent.models import Seq2Seq, Seq2SeqConfig, shift_right
from attent.models.config import mirror_encoder
from attent.nn import StackConfig
from attent.scoring.report import ScoreReport
from attent.text.tokenizer_training import TokenizerConfig, train_tokenizer
from attent.training.autoconfig import fit_to_tokenizer
from attent.training.loop import write_model
from tests.inspection import models

EXAMPLES: list[object] = [
    attent, attent.AttentError, attent.Captioner, attent.Generator, attent.Predictor, attent.Transcriber,
    attent.Inspection, attent.Translator, ScoreReport, Seq2Seq.summary, Translation, attent.build, attent.load,
    attent.look, attent.mask_heads, attent.measure_heads, attent.nn.Attention, attent.nn.Block, attent.nn.FeedForward,
    attent.nn.Residual, attent.nn.Stack, attent.presets, attent.record, attent.score, attent.serve,
]  # fmt: skip

SUBJECTS = {"A man": "Ein Mann", "A dog": "Ein Hund", "The man": "Der Mann", "The dog": "Der Hund"}
VERBS = {"sings": "singt", "sleeps": "schläft", "waits": "wartet", "walks": "läuft"}
PAIRS = [(f"{who[0]} {does[0]}.", f"{who[1]} {does[1]}.") for who, does in product(SUBJECTS.items(), VERBS.items())]
NUM_STEPS = 60


def print_and_stop(address: str) -> None:
    """Print the address of a server, then press Ctrl-C."""
    print(address)
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a small trained model, `runs/en-de`, its sentences, `test.tsv`, and untrained others."""
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
    for name, other in (("asr", models.speech()), ("bert", models.encoder(("sleep", "music"))), ("lm", models.causal()),
                        ("captions", models.captioner())):  # fmt: skip
        write_model(folder / "runs" / name, other, models.tokenizer())
    models.write_chirp(folder).rename(folder / "talk.wav")
    models.write_ring(folder).rename(folder / "picture.png")
    (folder / "test.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in PAIRS), encoding="utf-8")
    return folder


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: getattr(example, "__name__", str(example)))
def test_examples_run(example: object, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    names = {
        "asyncio": asyncio,
        "attent": attent,
        "frame": pd.DataFrame({"en": ["A man sings.", "A dog sleeps."]}),
        "print_and_stop": print_and_stop,
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


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("translator('A dog', beam_size='4')", "`beam_size` must be 1 or more, but is '4'"),
        ("attent.look(translator, ['A dog'])", "`text` must be one string, but is of type list"),
        ("attent.look(attent.load('runs/en-de'), 'A dog')", "`model` must be a folder or a Translator"),
        ("attent.mask_heads('runs/en-de', 'decoder.blocks.0').__enter__()", "`model` must be a model or a Translator"),
        ("attent.mask_heads(translator, ['decoder.blocks.0']).__enter__()", "a part must be like"),
        ("attent.measure_heads('runs/en-de', [('a', 'b')])", "`translator` must be a Translator, but is of type str"),
        ("attent.measure_heads(translator, 'test.tsv')", "`pairs` must be [(source, target), ...]"),
        ("attent.record('runs/en-de').__enter__()", "`model` must be a model, but is of type str; see `attent.load`"),
        ("attent.score(attent.load('runs/en-de'), 'test.tsv')", "`model` must be a translator or a model folder"),
        ("attent.score(translator, [])", "`data` must have at least one pair, but is empty"),
        ("attent.score(translator, 'test.tsv', metrics=['blue'])", "`metrics` must be some of bleu, bleu-lc-tok, "),
        ("attent.score(translator, 'test.tsv', metrics=[])", "`metrics` must be some of bleu, bleu-lc-tok, "),
        ("attent.serve('runs/en-de', port='80')", "`port` must be 0 to 65535, but is '80'"),
    ],
)
def test_a_mistake_is_explained_in_a_sentence(
    code: str, message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(attent.AttentError) as caught:
        eval(code, {"attent": attent, "translator": attent.Translator.load("runs/en-de")})  # noqa: S307
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_single_values_are_taken_as_lists(folder: Path) -> None:
    model, part = folder / "runs" / "en-de", "decoder.blocks.0.cross_attn:1"
    masked = [attent.look(model, "A dog", mask=mask, layers=layers) for mask, layers in ((part, 0), ([part], [0]))]
    assert masked[0] == masked[1]
    reports = [attent.score(model, PAIRS, metrics=metrics, device="cpu") for metrics in ("chrf", ["chrf"])]
    assert reports[0] == reports[1]


def test_serving_from_a_running_event_loop_is_refused(folder: Path) -> None:
    async def serve() -> None:
        attent.serve(folder / "runs" / "en-de", src="en", tgt="de", port=0)

    with pytest.raises(attent.AttentError, match="cannot be served from a notebook"):
        asyncio.run(serve())
