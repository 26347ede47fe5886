"""`attent convert`: a model folder as one of another kind: ours, Hugging Face's, or CTranslate2's.

What the weights become is `attent.interop`'s business; here they get their tokenizer, and the folder appears as a
whole or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

if TYPE_CHECKING:
    from attent.models import Model
    from attent.text.tokenizer import Tokenizer, Vocabulary

TargetFormat = Literal["attent", "hf", "ctranslate2"]
Quantization = Literal["int8", "int16", "float16", "bfloat16", "float32"]
Dtype = Literal["float32", "bfloat16", "float16", "float64"]

TOKENIZER_FILES = (  # of tokenizers, as Hugging Face's libraries write them: all travel along, whichever one decides the ids
    "tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json merges.txt vocab.txt "
    "tokenizer.model spiece.model source.spm target.spm target_vocab.json chat_template.jinja"
).split()
HF_CLASS_NAMES = {  # what transformers calls each family
    "bert": "a BERT model",
    "gpt2": "a GPT2LMHeadModel",
    "llama": "a LlamaForCausalLM",
    "marian": "a MarianMTModel",
    "t5": "a T5ForConditionalGeneration",
    "vit": "a ViT model",
}


class ConvertError(ValueError):
    """The folder cannot be converted, in a sentence."""


def convert(
    model: Annotated[Path, Parameter(help="a model folder, ours or a Hugging Face one")],
    out: Annotated[Path, Parameter(help="the folder to write; it must be new or empty")],
    /,
    *,
    to: Annotated[TargetFormat, Parameter(help="attent; hf: of transformers; ctranslate2: translators alone")],
    dtype: Annotated[Dtype | None, Parameter(help="store weights in this precision [default: as they are]")] = None,
    quantization: Annotated[Quantization, Parameter(help="with --to ctranslate2: how weights are stored")] = "int8",
) -> None:
    """Write a model folder as one of another kind."""
    check_paths(model, out)
    import torch

    from attent.interop import load

    loaded = load(model, dtype=None if dtype is None else getattr(torch, dtype))
    tokenizer = load_tokenizer(model.expanduser(), loaded)
    further = read_tokenizer_files(model.expanduser())
    writers: dict[TargetFormat, Callable[[Path], str]] = {
        "attent": lambda folder: write_attent(loaded, tokenizer, further, folder),
        "hf": lambda folder: write_hf(loaded, tokenizer, further, folder),
        "ctranslate2": lambda folder: write_ctranslate2(loaded, tokenizer, folder, quantization),
    }
    told = write_atomically(out.expanduser().absolute(), writers[to])
    print(f"{out}: {told}")


def load_tokenizer(folder: Path, model: Model) -> Tokenizer | None:
    """The model's tokenizer. A translator must have one: it would be of no use without; others may come without."""
    from attent.decoding.translator import load_tokenizer
    from attent.models import Seq2Seq
    from attent.text.tokenizer import TOKENIZER_FORMATS

    there = any((folder / layout.required_files[0]).exists() for layout in TOKENIZER_FORMATS)
    return load_tokenizer(folder) if there or isinstance(model, Seq2Seq) else None


def read_tokenizer_files(folder: Path) -> dict[str, bytes]:
    """The tokenizer's files that the folder has; those of our own folder are verified."""
    from attent.models.folder import read_extra_files
    from attent.storage.manifest import MANIFEST_FILE

    if (folder / MANIFEST_FILE).exists():
        return read_extra_files(folder)
    return {name: (folder / name).read_bytes() for name in TOKENIZER_FILES if (folder / name).is_file()}


def check_paths(model: Path, out: Path) -> None:
    """Before a large model is read."""
    folder, target = model.expanduser(), out.expanduser()
    if (folder / "model.bin").exists() and any(folder.glob("*_vocabulary.json")):
        raise ConvertError(
            f"{model}: is a CTranslate2 model, whose weights cannot be taken back; convert the folder it was made from"
        )
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ConvertError(f"{out}: is there already, and nothing is overwritten; give a new or an empty folder")


def write_atomically(out: Path, write: Callable[[Path], str]) -> str:
    """Call `write` with a temporary folder that then becomes `out`; on an error nothing is left behind."""
    from attent.storage.atomic import atomic_folder, make_folder
    from attent.storage.manifest import explain_save_errors

    with explain_save_errors(out, "converted model"):
        make_folder(out.parent)
        with atomic_folder(out) as staged:
            return write(staged)


def write_attent(model: Model, tokenizer: Tokenizer | None, extra_files: Mapping[str, bytes], folder: Path) -> str:
    from attent.models import weights

    weights.save_model(model, folder, {**extra_files, **(tokenizer.files if tokenizer else {})})
    return f"an attent model{describe_tokenizer(model, tokenizer)}"


def describe_tokenizer(model: Model, tokenizer: Tokenizer | None) -> str:
    from attent.models import VisionTransformer

    if isinstance(model, VisionTransformer):
        return ""
    return ", with its tokenizer" if tokenizer else ", without a tokenizer: there was none"


def write_ctranslate2(model: Model, tokenizer: Tokenizer | None, folder: Path, quantization: Quantization) -> str:
    from attent.interop import MODEL_DESCRIPTIONS, ctranslate2
    from attent.models import Seq2Seq

    if not isinstance(model, Seq2Seq):
        raise ConvertError(
            f"only {MODEL_DESCRIPTIONS[Seq2Seq][0]} can be written for CTranslate2, but this is {MODEL_DESCRIPTIONS[type(model)][0]}; "
            f"give --to hf or --to attent"
        )
    assert tokenizer is not None
    ctranslate2.write_conversion(model, tokenizer, folder, quantization=quantization)
    write_files(folder, tokenizer.files)
    end = tokenizer.source.to_pieces([tokenizer.source.end])[0]
    return f"a CTranslate2 model ({quantization}), with its tokenizer; it takes pieces of text, and {end} behind them"


# --- Hugging Face --------------------------------------------------------------------------------------------------


def write_hf(model: Model, tokenizer: Tokenizer | None, extra_files: Mapping[str, bytes], folder: Path) -> str:
    from attent.interop import detect_family, save_hf

    family = detect_family(model)
    save_hf(model, folder, pad=tokenizer.target.pad if tokenizer else None)
    told = f"{HF_CLASS_NAMES[family]} of transformers"
    if family == "marian":
        assert tokenizer is not None
        write_files(folder, build_marian_tokenizer(tokenizer, folder))
        return f"{told}, with its tokenizer{describe_differences(tokenizer)}"
    write_files(folder, {name: content for name, content in extra_files.items() if name in TOKENIZER_FILES})
    return f"{told}{describe_tokenizer(model, tokenizer)}{describe_sentencepiece(tokenizer)}"


def describe_sentencepiece(tokenizer: Tokenizer | None) -> str:
    """A tokenizer that we have trained is a SentencePiece model, which transformers has no class for."""
    ours = tokenizer is not None and tokenizer.files.keys() == {"tokenizer.model"} and tokenizer.source.suffix_ids
    return "'s file as it is: read it with the package sentencepiece" if ours else ""


def describe_differences(tokenizer: Tokenizer) -> str:
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


def build_marian_tokenizer(tokenizer: Tokenizer, folder: Path) -> dict[str, bytes]:
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
        "vocab.json": build_vocab_json(tokenizer.source, folder),
        "tokenizer_config.json": to_json_bytes(
            {
                "tokenizer_class": "MarianTokenizer",
                "separate_vocabs": not tokenizer.joint,
                "model_max_length": 512,
                "source_lang": None,
                "target_lang": None,
            }
        ),
    }
    return made if tokenizer.joint else made | {"target_vocab.json": build_vocab_json(tokenizer.target, folder)}


def build_vocab_json(vocabulary: Vocabulary, folder: Path) -> bytes:
    """Which id each piece has. A tag for a language, `<2de>`, is written as Marian's, `>>de<<`."""
    tags = {vocabulary.get_tag_id(language): f">>{language}<<" for language in vocabulary.tags}
    pieces = vocabulary.to_pieces(range(vocabulary.size))
    ids = {tags.get(i, piece): i for i, piece in enumerate(pieces)}
    if len(ids) != len(pieces):
        raise ConvertError(
            f"{folder.name}: two pieces of its tokenizer have one name, which Marian's cannot tell apart"
        )
    return to_json_bytes(ids)


def to_json_bytes(data: object) -> bytes:
    return (json.dumps(data, indent=2, ensure_ascii=False) + "\n").encode()


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).write_bytes(content)
