"""Tokenizers of other libraries, trained here and written in the file layout of Hugging Face."""

from __future__ import annotations

import io
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from tests.text.corpus import lines

TAGS = (">>deu<<", ">>por_BR<<")
WHISPER_TOKENS = (
    "endoftext startoftranscript en zh de translate transcribe startoflm startofprev nospeech notimestamps"
).split()


@cache
def sentencepiece_model(
    side: int = 0,
    model_type: str = "unigram",
    ids: tuple[int, int, int, int] = (-1, 1, 2, 0),
    user_defined_symbols: tuple[str, ...] = (),
) -> bytes:
    """Train with SentencePiece's defaults: text and spaces are normalized. `ids`: pad, start, end, unknown."""
    model = io.BytesIO()
    pad, start, end, unknown = ids
    SentencePieceTrainer.train(
        sentence_iterator=iter(lines()[side]),
        model_writer=model,
        model_type=model_type,
        vocab_size=100,
        pad_id=pad,
        bos_id=start,
        eos_id=end,
        unk_id=unknown,
        hard_vocab_limit=False,
        user_defined_symbols=list(user_defined_symbols),
        minloglevel=4,
    )
    return model.getvalue()


def list_pieces(model: bytes) -> list[str]:
    processor = SentencePieceProcessor(model_proto=model)
    piece_ids = [i for i in range(len(processor)) if not processor.is_control(i) and not processor.is_unknown(i)]
    return processor.id_to_piece(piece_ids)


def write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")


def marian_folder(folder: Path, separate: bool = False, tags: tuple[str, ...] = ()) -> Path:
    """Write a folder like opus-mt models: `</s>` 0, `<unk>` 1, `<pad>` last, and the pieces of both sides between."""
    folder.mkdir(parents=True, exist_ok=True)
    models = [sentencepiece_model(side) for side in (0, 1)]
    for name, model in zip(("source.spm", "target.spm"), models, strict=True):
        (folder / name).write_bytes(model)
    pieces = [list_pieces(model) for model in models]
    both = list(dict.fromkeys(pieces[0] + pieces[1]))
    write_json(folder / "vocab.json", number_pieces([*tags, *(pieces[0] if separate else both)]))
    if separate:
        write_json(folder / "target_vocab.json", number_pieces(pieces[1]))
    write_json(folder / "tokenizer_config.json", {"separate_vocabs": separate, "tokenizer_class": "MarianTokenizer"})
    return folder


def number_pieces(pieces: list[str]) -> dict[str, int]:
    return {piece: i for i, piece in enumerate(["</s>", "<unk>", *pieces, "<pad>"])}


def whisper_folder(folder: Path, timestamps: int = 1501) -> Path:
    """Write a folder like those of Whisper: byte-level BPE, prompt tokens, then timestamps."""
    tokenizers = pytest.importorskip("tokenizers")
    folder.mkdir(parents=True, exist_ok=True)
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator(lines()[0], vocab_size=300, show_progress=False)
    special = [f"<|{name}|>" for name in WHISPER_TOKENS]
    times = [f"<|{i * 0.02:.2f}|>" for i in range(timestamps)]
    defaults = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), special[0])
    config = {"tokenizer_class": "WhisperTokenizer", **defaults, "additional_special_tokens": special[1:]}
    write_json(folder / "tokenizer_config.json", config)
    trained.add_special_tokens(special)
    trained.add_tokens([tokenizers.AddedToken(name, normalized=False) for name in times])
    trained.save(str(folder / "tokenizer.json"))
    return folder
