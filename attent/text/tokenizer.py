"""The tokenizer of a model: the vocabularies of both sides, and their files."""

import hashlib
import json
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, Self

from attent.storage.atomic import find_file, write_files
from attent.text import tokenizer_formats as formats
from attent.text.language_tags import find_language, find_nearest_languages
from attent.text.tokenizer_formats import find_marian_folder, read_marian_tokenizer
from attent.text.vocabulary import SentencePieceVocabulary, TokenizerError, Vocabulary

__all__ = ["Tokenizer", "TokenizerError", "Vocabulary"]

JOINT_FILES = ("tokenizer.model",)
SEPARATE_FILES = ("source.model", "target.model")
MAX_FILE_BYTES = 128 * 2**20  # the largest published tokenizers have about 35 MB


class TokenizerFormat(NamedTuple):
    required_files: tuple[str, ...]
    optional_files: tuple[str, ...]
    load: Callable[[Mapping[str, bytes], str], tuple[Vocabulary, Vocabulary]]


_CONFIG = (formats.CONFIG_FILE, formats.SPECIAL_TOKENS_FILE)
TOKENIZER_FORMATS = (  # the first match wins; SentencePiece files take precedence over files derived from them
    TokenizerFormat(SEPARATE_FILES, (), formats.load_separate),
    TokenizerFormat(("source.spm", "target.spm", "vocab.json"), ("target_vocab.json",), formats.load_marian),
    TokenizerFormat(
        JOINT_FILES,
        (formats.FORMAT_FILE, *_CONFIG, formats.ADDED_TOKENS_FILE, formats.FAST_TOKENIZER_FILE),
        formats.load_sentencepiece,
    ),
    TokenizerFormat(("spiece.model",), (formats.CONFIG_FILE,), formats.load_t5),
    TokenizerFormat((formats.FAST_TOKENIZER_FILE,), _CONFIG, formats.load_fast),
    TokenizerFormat((formats.FAIRSEQ_FILE,), ("vocab.json", *_CONFIG), formats.load_fairseq),
)


@dataclass(frozen=True)
class Tokenizer:
    """Encodes source and target texts. With a joint vocabulary, both sides are one object."""

    source: Vocabulary = field(compare=False)
    target: Vocabulary = field(compare=False)
    files: Mapping[str, bytes] = field(repr=False)  # name -> content; they determine the ids
    languages: tuple[str, str] | None = None  # source and target, where both sides begin with their language

    @classmethod
    def from_files(cls, files: Mapping[str, bytes], where: str = "") -> Self:
        """Load a tokenizer from file contents; `where` prefixes the names in errors."""
        for layout in TOKENIZER_FORMATS:
            if layout.required_files[0] in files:
                missing = [name for name in layout.required_files if name not in files]
                if missing:
                    raise TokenizerError(f"{where}{missing[0]}: is missing; {layout.required_files[0]} needs it")
                files = {name: files[name] for name in layout.required_files + layout.optional_files if name in files}
                if layout.required_files == JOINT_FILES:
                    files = {formats.FORMAT_FILE: encode_format(formats.FOREIGN_FORMAT)} | files
                return cls(*layout.load(files, where), files)
        names = ", ".join(layout.required_files[0] for layout in TOKENIZER_FORMATS)
        required = f"it must have one of {names} (which `save_pretrained` of transformers writes)"
        raise TokenizerError(f"{where or 'the folder'}: has no tokenizer; {required}")

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return _rebuild_tokenizer, (dict(self.files), self.languages)

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    @property
    def joint(self) -> bool:
        return self.source is self.target

    @property
    def is_own(self) -> bool:
        return isinstance(self.source, SentencePieceVocabulary) and self.source.is_own

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the files; a cache key for encoded data."""
        digest = hashlib.sha256()
        for name, content in sorted(self.files.items()):
            digest.update(f"{name} {len(content)}\n".encode())
            digest.update(content)
        if self.languages is not None:
            digest.update(" ".join(self.languages).encode())
        return digest.hexdigest()

    def bind_languages(self, source: str | None, target: str | None) -> "Tokenizer":
        """Return the tokenizer of a language pair, in any notation, if texts begin with it (M2M-100, NLLB)."""
        known = list(self.source.language_ids)
        if not known:
            return self
        if source is None or target is None:
            advice = "name both, such as --src en --tgt de"
            raise TokenizerError(f"this model translates between {len(known)} languages; {advice}")
        return replace(self, languages=(choose_language(source, known), choose_language(target, known)))

    @property
    def prefixes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The tokens before each source and before each target, which a search is given."""
        if self.languages is None:
            return self.source.first_ids, self.target.first_ids
        source, target = self.languages
        return (self.source.language_ids[source],), (self.target.language_ids[target],)

    @property
    def source_prefix(self) -> tuple[int, ...]:
        return self.prefixes[0]

    @property
    def target_prefix(self) -> tuple[int, ...]:
        return self.prefixes[1]

    def encode_source(self, texts: Sequence[str], target_language: str | None = None) -> list[list[int]]:
        """Encode texts, with the end token and, for `target_language`, its tag before them."""
        return self.add_source_tokens(self.source.encode(texts), target_language)

    def add_source_tokens(self, rows: list[list[int]], target_language: str | None = None) -> list[list[int]]:
        tag = () if target_language is None else (self.source.get_tag_id(target_language),)
        return [[*self.source_prefix, *tag, *row, self.source.end] for row in rows]

    def encode_target(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts, with the end token; the start token is added by `shift_right`."""
        return [[*self.target_prefix, *row, self.target.end] for row in self.target.encode(texts)]

    def save(self, folder: Path) -> None:
        write_files(folder, self.files)
        for stale in {*JOINT_FILES, *SEPARATE_FILES, formats.FORMAT_FILE} - self.files.keys():
            (folder / stale).unlink(missing_ok=True)

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        folder = Path(folder)
        if not folder.is_dir():
            problem = "is a file" if folder.exists() else "does not exist"
            raise TokenizerError(f"{folder}: must be a model folder, but {problem}; give another")
        if (native := find_marian_folder(folder)) is not None:
            return cls.from_files(read_marian_tokenizer(native), f"{folder}/")
        for layout in TOKENIZER_FORMATS:
            files = read_files(folder, layout.required_files + layout.optional_files)
            if layout.required_files[0] in files:
                return cls.from_files(files, f"{folder}/")
        return cls.from_files({}, str(folder))


def read_files(folder: Path, names: Sequence[str]) -> dict[str, bytes]:
    paths = {name: find_file(folder, name, names) for name in names}
    paths = {name: path for name, path in paths.items() if path.exists()}
    for path in paths.values():
        if not path.is_file():
            raise TokenizerError(f"{path}: must be a file, but is not; copy the model again")
        if path.stat().st_size > MAX_FILE_BYTES:
            limit = MAX_FILE_BYTES // 2**20
            raise TokenizerError(f"{path}: must have at most {limit} MiB, but has more; is it a tokenizer?")
    return {name: path.read_bytes() for name, path in paths.items()}


def choose_language(requested: str, known: Sequence[str]) -> str:
    matches = find_language(requested, known)
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise TokenizerError(f"`{requested}` can be {' or '.join(matches)} in this model; name one of them")
    near = find_nearest_languages(requested, known) or known[:10]
    raise TokenizerError(f"this model has no language `{requested}`; its {len(known)} include {', '.join(near)}")


def _rebuild_tokenizer(files: Mapping[str, bytes], languages: tuple[str, str] | None) -> Tokenizer:
    return replace(Tokenizer.from_files(files), languages=languages)


def has_tokenizer(names: Container[str]) -> bool:
    """True if the file names include those of a tokenizer; an image model has none."""
    return any(layout.required_files[0] in names for layout in TOKENIZER_FORMATS)


def find_tokenizer(folder: Path) -> Tokenizer | None:
    return Tokenizer.load(folder) if has_tokenizer({path.name for path in folder.glob("*")}) else None


def build_own_files(model: bytes) -> dict[str, bytes]:
    return {JOINT_FILES[0]: model, formats.FORMAT_FILE: encode_format(formats.OWN_FORMAT)}


def encode_format(name: str) -> bytes:
    return json.dumps({"format": name}).encode()
