"""Write a model folder in another format (attent, Hugging Face, CTranslate2), with its tokenizer."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch

from attent import settings
from attent.formatting import format_bytes
from attent.interop import MODEL_DESCRIPTIONS, detect_family, get_model_kind, load, save_hf, whisper
from attent.interop.hf_folder import CONFIG_FILE, read_json, to_json_bytes
from attent.interop.trimming import trim_vocabulary
from attent.models import Model, Seq2Seq, VisionTransformer, weights
from attent.models.folder import has_manifest, read_extra_files, read_side_file, read_tokenizer
from attent.models.pruning import remove_layers
from attent.nn import AudioConfig
from attent.storage.atomic import atomic_folder, make_folder, write_files
from attent.storage.errors import AttentError
from attent.storage.hub import find_origin, locate_model
from attent.storage.manifest import explain_save_errors
from attent.text import tokenizer_formats as formats
from attent.text.tokenizer import Tokenizer, Vocabulary

TargetFormat = Literal["attent", "hf", "ctranslate2"]
ORIGIN_FILE = "hub.json"  # repository and commit of a model that was converted from the hub
HEAD_FILES = {"alignment.json", "heads.json", "ablation.json"}  # measurements that name heads by their layer


def convert_model(
    model_folder: Path,
    out: Path,
    to: TargetFormat | None = None,
    dtype: str | None = None,
    quantization: str | None = None,
    corpus: Path | None = None,
    languages: Sequence[str] = (),
    vocab: int | None = None,
    encoder_layers: int | None = None,
    decoder_layers: int | None = None,
) -> str:
    """Convert a model folder, by default to its own format; return a description. Errors leave nothing behind."""
    folder, target = locate_model(model_folder), out.expanduser().absolute()
    if quantization is not None and to != "ctranslate2":
        raise AttentError(f"--quantization {quantization} is for --to ctranslate2; add that, or use --dtype")
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise AttentError(f"{target}: exists, and nothing is overwritten; give a new or an empty folder")
    model = load(folder, dtype=None if dtype is None else getattr(torch, dtype))
    if has_manifest(folder):
        extra_files: Mapping[str, bytes] = read_extra_files(folder)
    else:
        paths = [folder / name for name in list_kept_files(model)]
        extra_files = {path.name: path.read_bytes() for path in paths if path.is_file()}
    repository, _, commit = (read_origin(folder) or "").partition("@")
    origin = {ORIGIN_FILE: to_json_bytes({"repository": repository, "commit": commit})} if commit else {}
    tokenizer = read_tokenizer(folder)
    if tokenizer is None and isinstance(model, Seq2Seq):  # which must have one; other models may lack it
        tokenizer = Tokenizer.load(folder)
    sizes, coverage = measure_sizes(model, tokenizer, folder), ""
    has_new_layers = encoder_layers is not None or decoder_layers is not None
    is_smaller = has_new_layers or bool(corpus or languages) or vocab is not None
    if is_smaller:
        if get_model_kind(model) is not Seq2Seq or not isinstance(model, Seq2Seq) or tokenizer is None:
            raise AttentError(f"{folder}: must be {MODEL_DESCRIPTIONS[Seq2Seq][0]} to be made smaller; use it as it is")
        if corpus is None and (languages or vocab is not None):
            raise AttentError("a corpus must show which pieces are needed; give one with --corpus")
        if corpus is not None:
            model, tokenizer, extra_files, coverage = trim_vocabulary(
                model, tokenizer, extra_files, corpus, languages, vocab
            )
        if has_new_layers:
            model = remove_layers(model, encoder_layers, decoder_layers)
            extra_files = {name: extra_files[name] for name in extra_files.keys() - HEAD_FILES}
    with explain_save_errors(target, "converted model"):
        make_folder(target.parent)
        with atomic_folder(target) as staged:
            if to == "hf" or (to is None and not has_manifest(folder) and (folder / CONFIG_FILE).is_file()):
                description = write_hf(model, tokenizer, extra_files, staged)
            elif to == "ctranslate2":
                description = write_ctranslate2(model, tokenizer, staged, quantization or "int8")
            else:
                weights.save_model(model, staged, {**extra_files, **(tokenizer.files if tokenizer else {}), **origin})
                description = f"an attent model{describe_tokenizer(model, tokenizer)}"
            if not has_manifest(staged):
                write_files(staged, origin)
            if is_smaller:
                rows = zip(sizes.items(), measure_sizes(model, tokenizer, staged).values(), strict=True)
                description += "".join(f"\n{name:12}{before} -> {after}" for (name, before), after in rows)
    return f"{description}\n{'corpus':12}{coverage}" if coverage else description


def measure_sizes(model: Model, tokenizer: Tokenizer | None, folder: Path) -> dict[str, str]:
    files = [file for pattern in ("*.safetensors", "model.bin", "*.npz") for file in folder.glob(pattern)]
    parameters = list(model.parameters())
    return {
        "vocabulary": f"{tokenizer.target.size if tokenizer else 0:,}",
        "parameters": f"{sum(parameter.numel() for parameter in parameters):,}",
        "file": format_bytes(sum(file.stat().st_size for file in files)),
        "memory": format_bytes(sum(parameter.nbytes for parameter in parameters)),
    }


def read_origin(folder: Path) -> str | None:
    """Return `owner/repo@commit` for a model of the hub, or one that was converted from it."""
    content = read_side_file(folder, ORIGIN_FILE)
    if content is None:
        return find_origin(folder)
    data = settings.parse_json(content, f"{folder}/{ORIGIN_FILE}")
    return f"{data.get('repository')}@{data.get('commit')}"


def list_kept_files(model: Model) -> list[str]:
    return [*formats.TOKENIZER_FILES, *(whisper.KEPT_FILES if get_model_kind(model) is AudioConfig else ())]


def describe_tokenizer(model: Model, tokenizer: Tokenizer | None) -> str:
    if isinstance(model, VisionTransformer):
        return ""
    return ", with its tokenizer" if tokenizer else ", without a tokenizer (the original has none)"


def write_ctranslate2(model: Model, tokenizer: Tokenizer | None, folder: Path, quantization: str) -> str:
    from attent.interop import ctranslate2

    kind = get_model_kind(model)
    if kind is not Seq2Seq or not isinstance(model, Seq2Seq):
        expected, actual = MODEL_DESCRIPTIONS[Seq2Seq][0], MODEL_DESCRIPTIONS[kind][0]
        raise AttentError(f"the model must be {expected} for CTranslate2, but is {actual}; use it as it is")
    assert tokenizer is not None
    ctranslate2.write_conversion(model, tokenizer, folder, quantization=quantization)
    write_files(folder, tokenizer.files)
    end = tokenizer.source.to_pieces([tokenizer.source.end])[0]
    return f"a CTranslate2 model ({quantization}), with its tokenizer; its input is subword pieces followed by {end}"


def write_hf(model: Model, tokenizer: Tokenizer | None, extra_files: Mapping[str, bytes], folder: Path) -> str:
    family = detect_family(model)
    save_hf(model, folder, pad=tokenizer.target.pad if tokenizer else None)
    name = f"{read_json(folder / CONFIG_FILE)['architectures'][0]} of transformers"
    if family == "marian":
        assert tokenizer is not None
        write_files(folder, build_marian_tokenizer(tokenizer, folder))
        return f"{name}, with its tokenizer"
    write_files(folder, {name: content for name, content in extra_files.items() if name in list_kept_files(model)})
    # A tokenizer trained by attent is a SentencePiece model without a class in transformers.
    is_ours = tokenizer is not None and tokenizer.is_own and tokenizer.joint
    note = " file, unchanged; load it with the package sentencepiece" if is_ours else ""
    return f"{name}{describe_tokenizer(model, tokenizer)}{note}"


def build_marian_tokenizer(tokenizer: Tokenizer, folder: Path) -> dict[str, bytes]:
    """Return the files of `MarianTokenizer`; those of a Hugging Face tokenizer are unchanged."""
    files = tokenizer.files
    if "tokenizer.model" in files:
        source = target = files["tokenizer.model"]
    elif "source.model" in files:
        source, target = files["source.model"], files["target.model"]
    else:
        return dict(files)
    config = {
        "tokenizer_class": "MarianTokenizer",
        "separate_vocabs": not tokenizer.joint,
        "model_max_length": 512,
        "source_lang": None,
        "target_lang": None,
    }
    built = {
        "source.spm": source,
        "target.spm": target,
        "vocab.json": build_vocab_json(tokenizer.source, folder),
        "tokenizer_config.json": to_json_bytes(config),
    }
    return built if tokenizer.joint else built | {"target_vocab.json": build_vocab_json(tokenizer.target, folder)}


def build_vocab_json(vocabulary: Vocabulary, folder: Path) -> bytes:
    """Map pieces to ids; the language tag `<2de>` becomes Marian's `>>de<<`."""
    tags = {vocabulary.get_tag_id(language): f">>{language}<<" for language in vocabulary.tags}
    pieces = vocabulary.to_pieces(range(vocabulary.size))
    ids = {tags.get(i, piece): i for i, piece in enumerate(pieces)}
    if len(ids) != len(pieces):
        raise AttentError(f"{folder.name}: two pieces of its tokenizer have one name, which Marian does not allow")
    return to_json_bytes(ids)
