"""Folders that Marian has written: decoder.yml, or MODEL.npz.decoder.yml, names the model and a vocabulary per side.

A vocabulary is a SentencePiece model, or a YAML file of pieces and ids, as in OPUS-MT, with source.spm and target.spm
beside it. Folders in decoder.yml are ignored: they are those of another machine.
"""

import json
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from attent.text.vocabulary import TokenizerError, load_processor


class MarianFolder(NamedTuple):
    model: Path
    vocabularies: tuple[Path, Path]


def find_marian_folder(folder: Path) -> MarianFolder | None:
    """Return the files of a folder that Marian has written; None for other folders."""
    if (folder / "config.json").exists() or not any(folder.glob("*.npz")):
        return None
    candidates = {}
    for path in folder.glob("*decoder.yml"):
        settings = parse_yaml(path.read_bytes(), path)
        models, vocabularies = (
            [folder / PurePosixPath(str(name)).name for name in settings.get(key, ())] for key in ("models", "vocabs")
        )
        if len(models) == 1 and vocabularies:
            candidates[models[0]] = MarianFolder(models[0], (vocabularies[0], vocabularies[-1]))
    if len(candidates) != 1:
        problem = f"has those of {len(candidates)}; keep that of the model to use"
        raise TokenizerError(f"{folder}: must have the decoder.yml of one Marian model, but {problem}")
    (files,) = candidates.values()
    missing = [path for path in (files.model, *files.vocabularies) if not path.is_file()]
    if missing:
        raise TokenizerError(f"{missing[0]}: is missing, but decoder.yml names it; download it too")
    return files


def parse_yaml(content: bytes, where: Path) -> dict[str, Any]:
    """Parse a YAML mapping; all values are text, since a piece such as `no` is no truth value."""
    import yaml

    try:
        return dict(yaml.load(content, getattr(yaml, "CBaseLoader", yaml.BaseLoader)))
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise TokenizerError(f"{where}: is not valid YAML ({str(error).splitlines()[0]}); get it again") from error


def read_marian_tokenizer(native: MarianFolder) -> dict[str, bytes]:
    """Return the tokenizer as the files of `MarianTokenizer`. It adds padding, from which decoding starts."""
    files, vocabularies = {}, []
    for side, path in zip(("source", "target"), native.vocabularies, strict=True):
        model = path if path.suffix == ".spm" else path.with_name(f"{side}.spm")
        if not model.is_file():
            raise TokenizerError(f"{model}: is missing; it must hold the SentencePiece model of {path.name}")
        files[f"{side}.spm"] = content = model.read_bytes()
        if path == model:
            processor = load_processor(content, str(path))
            ids = {processor.id_to_piece(i): i for i in range(len(processor))}
        else:
            values = parse_yaml(path.read_bytes(), path).items()
            ids = {piece: int(i) if str(i).isdecimal() else -1 for piece, i in values}  # -1 is refused later
        vocabularies.append(json.dumps(ids | {"<pad>": len(ids)}, ensure_ascii=False).encode())
    return files | dict(zip(("vocab.json", "target_vocab.json"), dict.fromkeys(vocabularies), strict=False))
