"""T5 translates as Marian does: from a Hugging Face folder, with the engine that can."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from attent.decoding.translator import Translator
from tests.text.imported_tokenizers import sentencepiece_model, write_json

TEXTS = ["A man slowly walking.", "Two women: singing in the park"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    transformers = pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("t5")
    torch.manual_seed(2)
    config = transformers.T5Config(
        vocab_size=128, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, initializer_factor=3.0
    )
    theirs = transformers.T5ForConditionalGeneration(config).eval()
    theirs.save_pretrained(path)
    (path / "spiece.model").write_bytes(sentencepiece_model(ids=(0, -1, 1, 2)))
    write_json(path / "tokenizer_config.json", {"extra_ids": 10})
    return path, theirs


def test_t5_is_searched_as_transformers_does(folder: tuple[Path, Any]) -> None:
    path, theirs = folder
    ours = Translator.load(path, device="cpu", engine="torch")
    assert (ours.model.config.start_id, ours.model.config.end_id) == (0, 1)
    found = ours.translate(TEXTS, beam_size=1, prevent_loops=False)
    engine = ours._build_torch_engine()
    for text, one in zip(TEXTS, found, strict=True):
        row = ours.tokenizer.encode_source([text])[0]
        written = theirs.generate(
            torch.tensor([row]),
            do_sample=False,
            max_new_tokens=len(row) - 1 + 50,
            decoder_start_token_id=0,
            suppress_tokens=sorted({engine.start_id, *engine.suppressed_tokens}),
        )[0].tolist()[1:]
        assert list(one.tokens) == ours.tokenizer.target.to_pieces([token for token in written if token != 1])


def test_without_a_word_the_engine_that_can_is_taken(folder: tuple[Path, Any]) -> None:
    plain = Translator.load(folder[0], device="cpu", engine="torch").translate(TEXTS)
    assert [one.tokens for one in Translator.load(folder[0], device="cpu").translate(TEXTS)] == [
        one.tokens for one in plain
    ]
