"""Tokenizers that imported models bring: Marian's, plain SentencePiece files (T5, LLaMA) and `tokenizer.json`.

They are read as they are and give the ids that the model was trained with; they normalise text as their makers chose,
so unlike ours they need not give it back as it was. Letters of a text are letters here too: a `</s>` or `>>deu<<` that
somebody writes is no command. Each function takes the files' contents by name, and how to name them in an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from attent import settings
from attent.text.vocabulary import Pieces, Sampling, TokenizerError, Vocabulary, check_ids, find_tag, load, valid

CONFIG = "tokenizer_config.json"
SENTINELS = 100  # that T5 has when its files do not say
MARIAN_TAG = re.compile(r">>(.+)<<")
NO_SAMPLING = "only a tokenizer that attent has trained can sample; leave sampling out"

Files = Mapping[str, bytes]
Sides = tuple[Vocabulary, Vocabulary]


# --- SentencePiece files ---------------------------------------------------------------------------------------------


def plain(files: Files, where: str) -> Sides:
    """`tokenizer.model`: ours, or that of LLaMA and its kin."""
    both = Pieces(files["tokenizer.model"], where + "tokenizer.model")
    return both, both


def separate(files: Files, where: str) -> Sides:
    """`source.model` and `target.model`: ours."""
    source, target = (Pieces(files[name], where + name) for name in ("source.model", "target.model"))
    return source, target


def t5(files: Files, where: str) -> Sides:
    """`spiece.model`: ids behind its own are sentinels."""
    extra = config(files, where).get("extra_ids", SENTINELS)
    if type(extra) is not int or not 0 <= extra <= 10_000:
        raise TokenizerError(f"{where}{CONFIG}: `extra_ids` must be a number up to 10000, but is {extra!r}; correct it")
    both = Pieces(files["spiece.model"], where + "spiece.model", extra)
    return both, both


def config(files: Files, where: str) -> dict[str, Any]:
    return settings.parse_json(files[CONFIG], where + CONFIG) if CONFIG in files else {}


# --- Marian ----------------------------------------------------------------------------------------------------------


def marian(files: Files, where: str) -> Sides:
    """A SentencePiece model for each side, and which id each piece has: for both in `vocab.json`, unless the target
    has a `target_vocab.json` of its own."""
    target_ids = "target_vocab.json" if "target_vocab.json" in files else "vocab.json"
    source = Marian(files["source.spm"], where + "source.spm", piece_ids(files, "vocab.json", where))
    target = Marian(files["target.spm"], where + "target.spm", piece_ids(files, target_ids, where))
    return source, target


def piece_ids(files: Files, name: str, where: str) -> dict[str, int]:
    ids = settings.parse_json(files[name], where + name)
    if not all(type(i) is int for i in ids.values()) or sorted(ids.values()) != list(range(len(ids))):
        raise TokenizerError(f"{where}{name}: must number its pieces from 0, each once, but does not; get it again")
    missing = [special for special in ("</s>", "<unk>", "<pad>") if special not in ids]
    if missing:
        raise TokenizerError(f"{where}{name}: must have {missing[0]}, but does not; get the file again")
    return ids


class Marian:
    """One side of a Marian model as Hugging Face stores it: decoding starts from padding."""

    def __init__(self, model: bytes, where: str, ids: dict[str, int]) -> None:
        self._processor = load(model, where)
        self._ids = ids
        self._names = sorted(ids, key=lambda name: ids[name])
        self._tags = {match[1]: i for name, i in ids.items() if (match := MARIAN_TAG.fullmatch(name))}
        self.size = len(ids)
        self.end, self.unknown, self.pad = ids["</s>"], ids["<unk>"], ids["<pad>"]
        self.start = self.pad
        self._silent = {self.end, self.unknown, self.pad, *self._tags.values()}

    @property
    def tags(self) -> tuple[str, ...]:
        return tuple(self._tags)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        # By pieces and not by SentencePiece's ids: what one side's model does not know may still be in `vocab.json`.
        rows = self._processor.encode([valid(text) for text in texts], out_type=str, num_threads=1)
        return [[self._ids.get(piece, self.unknown) for piece in row] for row in rows]

    def sample(self, texts: Sequence[str], sampling: Sampling, seed: int) -> list[list[int]]:
        raise TokenizerError(NO_SAMPLING)

    def decode(self, ids: Sequence[int]) -> str:
        check_ids(ids, self.size)
        text: str = self._processor.decode([self._names[i] for i in ids if i not in self._silent])
        return text.replace("▁", " ").strip()

    def pieces(self, ids: Sequence[int]) -> list[str]:
        check_ids(ids, self.size)
        return [self._names[i] for i in ids]

    def tag(self, language: str) -> int:
        return find_tag(self._tags, language)


# --- tokenizer.json --------------------------------------------------------------------------------------------------

# Where a folder does not say which pieces are special: their names in published models.
USUAL = {
    "start": ("<s>", "[CLS]", "<bos>", "<|begin_of_text|>"),
    "end": ("</s>", "[SEP]", "<eos>", "<|endoftext|>", "<|end_of_text|>"),
    "pad": ("<pad>", "[PAD]"),
    "unknown": ("<unk>", "[UNK]"),
}
SAID = {
    "start": ("bos_token", "cls_token"),
    "end": ("eos_token", "sep_token"),
    "pad": ("pad_token",),
    "unknown": ("unk_token",),
}


def fast(files: Files, where: str) -> Sides:
    """`tokenizer.json`, read by Hugging Face's `tokenizers`."""
    both = Fast(read_fast(files["tokenizer.json"], where + "tokenizer.json"), config(files, where), where)
    return both, both


def read_fast(content: bytes, where: str) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        advice = "run pip install 'attent[hf]'"
        raise TokenizerError(f"{where}: needs the package `tokenizers` to be read; {advice}") from error
    settings.parse_json(content, where)  # names the line of damage, which the package does not
    try:
        tokenizer = tokenizers.Tokenizer.from_str(content.decode())
    except Exception as error:
        raise TokenizerError(f"{where}: `tokenizers` cannot read it: {error}; get the file again") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # `</s>` in a text is four letters
    return tokenizer


class Fast:
    """A vocabulary that Hugging Face's `tokenizers` reads."""

    tags: tuple[str, ...] = ()

    def __init__(self, tokenizer: Any, config: dict[str, Any], where: str) -> None:
        self._tokenizer = tokenizer
        names = tokenizer.get_vocab(with_added_tokens=True)
        self.size: int = 1 + max(names.values(), default=0)
        found = {role: self._special(role, config) for role in USUAL}
        if found["end"] is None:
            raise TokenizerError(f"{where}tokenizer.json: no piece ends a sentence; name it in {CONFIG}, as eos_token")
        self.end: int = found["end"]
        self.pad: int = self.end if found["pad"] is None else found["pad"]
        self.start: int = self.pad if found["start"] is None else found["start"]
        self.unknown: int = self.end if found["unknown"] is None else found["unknown"]

    def _special(self, role: str, config: dict[str, Any]) -> int | None:
        said = [config.get(key) for key in SAID[role]]
        names = [one.get("content") if isinstance(one, dict) else one for one in said]
        names = [name for name in names if isinstance(name, str)] or list(USUAL[role])
        ids = (self._tokenizer.token_to_id(name) for name in names)
        return next((i for i in ids if i is not None), None)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        rows = self._tokenizer.encode_batch_fast([valid(text) for text in texts], add_special_tokens=False)
        return [row.ids for row in rows]

    def sample(self, texts: Sequence[str], sampling: Sampling, seed: int) -> list[list[int]]:
        raise TokenizerError(NO_SAMPLING)

    def decode(self, ids: Sequence[int]) -> str:
        check_ids(ids, self.size)
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        check_ids(ids, self.size)
        return [self._tokenizer.id_to_token(int(i)) or f"<{i}>" for i in ids]

    def tag(self, language: str) -> int:
        return find_tag({}, language)
