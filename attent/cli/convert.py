"""`attent convert`: a model folder as one of another kind: ours, Hugging Face's Marian, or CTranslate2's.

What the weights become is `attent.interop`'s business; here they get their tokenizer, and the folder appears as a
whole or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

if TYPE_CHECKING:
    from attent.models import Seq2Seq
    from attent.text.tokenizer import Tokenizer, Vocabulary

Kind = Literal["attent", "hf", "ctranslate2"]
Quantization = Literal["int8", "int16", "float16", "bfloat16", "float32"]


class ConvertError(ValueError):
    """The folder cannot be converted, in a sentence."""


def convert(
    model: Annotated[Path, Parameter(help="a model folder, ours or a Hugging Face Marian one")],
    out: Annotated[Path, Parameter(help="the folder to write; it must be new or empty")],
    /,
    *,
    to: Annotated[Kind, Parameter(help="attent; hf: MarianMTModel and MarianTokenizer of transformers; ctranslate2")],
    quantization: Annotated[Quantization, Parameter(help="with --to ctranslate2: how weights are stored")] = "int8",
) -> None:
    """Write a model folder as one of another kind."""
    check_paths(model, out)
    from attent.decode.translator import tokenizer_of
    from attent.interop import load

    loaded, tokenizer = load(model), tokenizer_of(model.expanduser())
    writers: dict[Kind, Callable[[Path], str]] = {
        "attent": lambda folder: to_attent(loaded, tokenizer, folder),
        "hf": lambda folder: to_hf(loaded, tokenizer, folder),
        "ctranslate2": lambda folder: to_ctranslate2(loaded, tokenizer, folder, quantization),
    }
    told = as_a_whole(out.expanduser().absolute(), writers[to])
    print(f"{out}: {told}")


def check_paths(model: Path, out: Path) -> None:
    """Before a large model is read."""
    folder, target = model.expanduser(), out.expanduser()
    if (folder / "model.bin").exists() and any(folder.glob("*_vocabulary.json")):
        raise ConvertError(
            f"{model}: is a CTranslate2 model, whose weights cannot be taken back; convert the folder it was made from"
        )
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ConvertError(f"{out}: is there already, and nothing is overwritten; give a new or an empty folder")


def as_a_whole(out: Path, write: Callable[[Path], str]) -> str:
    """What `write` makes of a folder aside becomes `out` in one step; if it fails, nothing is left behind."""
    from attent.models.folder import explained, make_folder, sync

    with explained(out, "converted model"):
        make_folder(out.parent)
        aside = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".new", dir=out.parent))
        try:
            told = write(aside / out.name)
            for path in (*(aside / out.name).iterdir(), aside / out.name):
                sync(path)
            if out.is_dir():
                out.rmdir()  # empty: Windows renames onto nothing else
            os.rename(aside / out.name, out)
            sync(out.parent)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return told


def to_attent(model: Seq2Seq, tokenizer: Tokenizer, folder: Path) -> str:
    from attent.train.loop import write_model

    write_model(folder, model, tokenizer)
    return "an attent model, with its tokenizer"


def to_ctranslate2(model: Seq2Seq, tokenizer: Tokenizer, folder: Path, quantization: Quantization) -> str:
    from attent.interop import ctranslate2

    ctranslate2.write(model, tokenizer, folder, quantization=quantization)
    write_files(folder, tokenizer.files)
    end = tokenizer.source.pieces([tokenizer.source.end])[0]
    return f"a CTranslate2 model ({quantization}), with its tokenizer; it takes pieces of text, and {end} behind them"


# --- Hugging Face --------------------------------------------------------------------------------------------------


def to_hf(model: Seq2Seq, tokenizer: Tokenizer, folder: Path) -> str:
    from attent.interop import marian

    marian.save(model, folder, pad=tokenizer.target.pad)
    write_files(folder, hf_tokenizer(tokenizer, folder))
    return f"a MarianMTModel of transformers, with its tokenizer{differences(tokenizer)}"


def differences(tokenizer: Tokenizer) -> str:
    """What is not the same in `MarianTokenizer` as in ours: measured on 1,000 lines of many scripts."""
    if not {"tokenizer.model", "source.model"} & tokenizer.files.keys():
        return ""
    told = (
        "; MarianTokenizer gives the same ids but for text that holds the sign `▁` or U+001A, or that spells a special "
        "piece such as </s>, and strips the space around what it decodes"
    )
    tags = tokenizer.source.tags
    # Our models know a space behind the tag as a token, and were trained without it.
    return f"{told}; ask for a language by >>{tags[0]}<< before the text, without a space" if tags else told


def hf_tokenizer(tokenizer: Tokenizer, folder: Path) -> dict[str, bytes]:
    """The files of `MarianTokenizer`; those of a tokenizer that came from Hugging Face are as they were."""
    files = tokenizer.files
    if "tokenizer.model" in files:
        source = target = files["tokenizer.model"]
    elif "source.model" in files:
        source, target = files["source.model"], files["target.model"]
    else:
        return dict(files)
    made = {
        "source.spm": source,
        "target.spm": target,
        "vocab.json": piece_ids(tokenizer.source, folder),
        "tokenizer_config.json": json_of(
            {
                "tokenizer_class": "MarianTokenizer",
                "separate_vocabs": not tokenizer.joint,
                "model_max_length": 512,
                "source_lang": None,
                "target_lang": None,
            }
        ),
    }
    return made if tokenizer.joint else made | {"target_vocab.json": piece_ids(tokenizer.target, folder)}


def piece_ids(vocabulary: Vocabulary, folder: Path) -> bytes:
    """Which id each piece has. A tag for a language, `<2de>`, is written as Marian's, `>>de<<`."""
    tags = {vocabulary.tag(language): f">>{language}<<" for language in vocabulary.tags}
    pieces = vocabulary.pieces(range(vocabulary.size))
    ids = {tags.get(i, piece): i for i, piece in enumerate(pieces)}
    if len(ids) != len(pieces):
        raise ConvertError(
            f"{folder.name}: two pieces of its tokenizer have one name, which Marian's cannot tell apart"
        )
    return json_of(ids)


def json_of(data: object) -> bytes:
    return (json.dumps(data, indent=2, ensure_ascii=False) + "\n").encode()


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).write_bytes(content)
