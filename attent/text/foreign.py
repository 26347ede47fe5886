"""Tokenizers that imported models bring: Marian's, plain SentencePiece files (T5, LLaMA), `tokenizer.json`, and what
GPT-2 and BERT had before it.

They are read as they are and give the ids that the model was trained with; they normalise text as their makers chose,
so unlike ours they need not give it back as it was. Letters of a text are letters here too: a `</s>` or `>>deu<<` that
somebody writes is no command. Each function takes the files' contents by name, and how to name them in an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attent import settings
from attent.text.vocabulary import (
    SENTINEL,
    Added,
    Pieces,
    Sampling,
    TokenizerError,
    Told,
    Vocabulary,
    check_ids,
    find_tag,
    load,
    valid,
)

CONFIG = "tokenizer_config.json"
MAP = "special_tokens_map.json"
ADDED = "added_tokens.json"
FAST = "tokenizer.json"
MOST = 2**24  # more than any vocabulary has
SENTINELS = 100  # that T5 has when its files do not say
MARIAN_TAG = re.compile(r">>(.+)<<")
NO_SAMPLING = "only a tokenizer that attent has trained can sample; leave sampling out"

Files = Mapping[str, bytes]
Sides = tuple[Vocabulary, Vocabulary]


# --- SentencePiece files ---------------------------------------------------------------------------------------------


def plain(files: Files, where: str) -> Sides:
    """`tokenizer.model`: ours, or that of LLaMA and its kin, of which other files beside it tell more."""
    said = specials(files, where)
    told = Told(
        added=additions(files, said, where),
        end=name_of(said.get("eos_token")),
        starts=said.get("add_bos_token") is not False,
        ends=said.get("add_eos_token") is True,
    )
    both = Pieces(files["tokenizer.model"], where + "tokenizer.model", told=told)
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


def additions(files: Files, said: Mapping[str, Any], where: str) -> dict[int, Added]:
    """Pieces that a model got when its tokenizer was made already, by their ids, wherever the folder tells of them."""
    further = said.get("additional_special_tokens")
    named = [*said.values(), *(further if isinstance(further, list) else [])]
    special = {name for one in named if (name := name_of(one))}
    found = {}
    for i, one in told_pieces(files, said, where):
        name = name_of(one)
        if name is not None and type(i) is int and 0 <= i < MOST:
            found[i] = Added(name, name in special or (isinstance(one, dict) and one.get("special") is True))
    return dict(sorted(found.items()))


def told_pieces(files: Files, said: Mapping[str, Any], where: str) -> Iterator[tuple[Any, Any]]:
    """Ids and pieces as they stand in three files; the last knows best."""
    if ADDED in files:
        yield from ((i, name) for name, i in settings.parse_json(files[ADDED], where + ADDED).items())
    listed = settings.parse_json(files[FAST], where + FAST).get("added_tokens") if FAST in files else None
    if isinstance(listed, list):
        yield from ((one.get("id"), one) for one in listed if isinstance(one, dict))
    told = said.get("added_tokens_decoder")
    if isinstance(told, dict):
        yield from ((int(i), one) for i, one in told.items() if re.fullmatch("[0-9]{1,9}", i))


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

    together: frozenset[int] = frozenset()

    def __init__(self, model: bytes, where: str, ids: dict[str, int]) -> None:
        self._processor = load(model, where)
        self._ids = ids
        self._names = sorted(ids, key=lambda name: ids[name])
        self._tags = {match[1]: i for name, i in ids.items() if (match := MARIAN_TAG.fullmatch(name))}
        self.size = len(ids)
        self.end, self.unknown, self.pad = ids["</s>"], ids["<unk>"], ids["<pad>"]
        self.start = self.pad
        self._silent = {self.end, self.unknown, self.pad, *self._tags.values()}
        self.before: tuple[int, ...] = ()
        self.after: tuple[int, ...] = (self.end,)
        self.mask: int | None = None
        self.sentinels: tuple[int, ...] = ()

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

    def decode_all(self, rows: Sequence[Sequence[int]]) -> list[str]:
        return [self.decode(ids) for ids in rows]

    def pieces(self, ids: Sequence[int]) -> list[str]:
        check_ids(ids, self.size)
        return [self._names[i] for i in ids]

    def tag(self, language: str) -> int:
        return find_tag(self._tags, language)


# --- Hugging Face's `tokenizers` --------------------------------------------------------------------------------------

# Where a folder does not say which pieces are special: their names in published models.
USUAL = {
    "start": ("<s>", "[CLS]", "<bos>", "<|begin_of_text|>"),
    "end": ("</s>", "[SEP]", "<eos>", "<|endoftext|>", "<|end_of_text|>"),
    "pad": ("<pad>", "[PAD]"),
    "unknown": ("<unk>", "[UNK]"),
    "mask": ("[MASK]", "<mask>"),
}
SAID = {
    "start": ("bos_token", "cls_token"),
    "end": ("eos_token", "sep_token"),
    "pad": ("pad_token",),
    "unknown": ("unk_token",),
    "mask": ("mask_token",),
}
BYTE = re.compile(r"<0x([0-9A-F]{2})>")
WHOLE_AND_HALF = "éé".encode()[:3]
PROBE = "a"  # a text to see what is put around


def fast(files: Files, where: str) -> Sides:
    """`tokenizer.json`, read by Hugging Face's `tokenizers`."""
    read = read_fast(files[FAST], where + FAST)
    return both_sides(read, specials(files, where), where + FAST)


def gpt2(files: Files, where: str) -> Sides:
    """`vocab.json` and `merges.txt`: BPE over bytes."""
    said = specials(files, where)
    made = byte_level(files, said, where)
    known = [name for name in (name_of(said.get(key)) for keys in SAID.values() for key in keys) if name]
    made.add_special_tokens([name for name in known or [*USUAL["end"]] if made.token_to_id(name) is not None])
    add(made, additions(files, said, where), where)
    return both_sides(made, said, where + "vocab.json")


def add(made: Any, pieces: Mapping[int, Added], where: str) -> None:
    """Pieces behind those of the vocabulary: `tokenizers` counts on from there by itself."""
    tokenizers = package(where + "merges.txt")
    size = made.get_vocab_size(with_added_tokens=False)
    for i, piece in pieces.items():
        if i >= size or made.token_to_id(piece.name) == i:
            one = tokenizers.AddedToken(piece.name, special=piece.special, normalized=False)
            (made.add_special_tokens if piece.special else made.add_tokens)([one])
        if i >= size and made.token_to_id(piece.name) != i:
            raise TokenizerError(
                f"{where}vocab.json: pieces that were added must be numbered on from {size}, but {piece.name!r} is "
                f"{i}; get {ADDED} and {CONFIG} again"
            )


def byte_level(files: Files, said: dict[str, Any], where: str) -> Any:
    tokenizers = package(where + "merges.txt")
    merges = text_lines(files["merges.txt"], where + "merges.txt")
    pairs = [tuple(line.split(" ")) for line in merges if line and not line.startswith("#version")]
    vocab = settings.parse_json(files["vocab.json"], where + "vocab.json")
    try:
        made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=pairs))
    except Exception as error:
        raise TokenizerError(f"{where}merges.txt: does not fit vocab.json: {error}; get both files again") from error
    prefix = said.get("add_prefix_space") is True
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    made.decoder = tokenizers.decoders.ByteLevel()
    return as_letters(made)


def bert(files: Files, where: str) -> Sides:
    """`vocab.txt`, a piece a line: WordPiece, of small letters unless the folder says otherwise."""
    tokenizers = package(where + "vocab.txt")
    said = specials(files, where)
    lines = text_lines(files["vocab.txt"], where + "vocab.txt")
    vocab = {line: i for i, line in enumerate(lines) if line or i < len(lines) - 1}
    first, last, unknown = (name_of(said.get(key)) or usual for key, usual in BERT_PIECES.items())
    missing = [name for name in (first, last, unknown) if name not in vocab]
    if missing:
        raise TokenizerError(f"{where}vocab.txt: must have {missing[0]}, but does not; get the file again")
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab, unk_token=unknown))
    made.normalizer = tokenizers.normalizers.BertNormalizer(
        lowercase=said.get("do_lower_case", True) is not False,
        strip_accents=said.get("strip_accents"),
        handle_chinese_chars=said.get("tokenize_chinese_chars", True) is not False,
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    made.decoder = tokenizers.decoders.WordPiece()
    around = [(name, vocab[name]) for name in (first, last)]
    made.post_processor = tokenizers.processors.TemplateProcessing(single=f"{first} $A {last}", special_tokens=around)
    made.add_special_tokens([name for name in (first, last, unknown, "[PAD]", "[MASK]") if name in vocab])
    return both_sides(as_letters(made), said, where + "vocab.txt")


BERT_PIECES = {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}


def both_sides(tokenizer: Any, said: dict[str, Any], where: str) -> Sides:
    both = Fast(tokenizer, said, where)
    return both, both


def specials(files: Files, where: str) -> dict[str, Any]:
    """What the folder says of its special pieces; older ones have a file for that alone."""
    older = settings.parse_json(files[MAP], where + MAP) if MAP in files else {}
    said = {key: value for key, value in config(files, where).items() if value is not None}
    return older | said


def name_of(said: Any) -> str | None:
    """A piece by its name, or by an object that has it."""
    name = said.get("content") if isinstance(said, dict) else said
    return name if isinstance(name, str) else None


def text_lines(content: bytes, where: str) -> list[str]:
    try:
        return [line.rstrip("\r") for line in content.decode().split("\n")]
    except UnicodeDecodeError as error:
        raise TokenizerError(
            f"{where}: must be UTF-8, but byte {error.start + 1} is not; get the file again"
        ) from error


def package(where: str) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        advice = "run pip install 'attent[hf]'"
        raise TokenizerError(f"{where}: needs the package `tokenizers` to be read; {advice}") from error
    return tokenizers


def read_fast(content: bytes, where: str) -> Any:
    tokenizers = package(where)
    settings.parse_json(content, where)  # names the line of damage, which the package does not
    try:
        tokenizer = tokenizers.Tokenizer.from_str(content.decode())
    except Exception as error:
        raise TokenizerError(f"{where}: `tokenizers` cannot read it: {error}; get the file again") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return as_letters(tokenizer)


def as_letters(tokenizer: Any) -> Any:
    tokenizer.encode_special_tokens = True  # `</s>` in a text is four letters
    return tokenizer


class Fast:
    """A vocabulary that Hugging Face's `tokenizers` reads."""

    tags: tuple[str, ...] = ()

    def __init__(self, tokenizer: Any, said: dict[str, Any], where: str) -> None:
        self._tokenizer = tokenizer
        names = tokenizer.get_vocab(with_added_tokens=True)
        self.size: int = 1 + max(names.values(), default=0)
        found = {role: self._special(role, said) for role in USUAL}
        if found["end"] is None:
            raise TokenizerError(f"{where}: no piece ends a sentence; name it in {CONFIG}, as eos_token")
        self.end: int = found["end"]
        self.pad: int = self.end if found["pad"] is None else found["pad"]
        self.start: int = self.pad if found["start"] is None else found["start"]
        self.unknown: int = self.end if found["unknown"] is None else found["unknown"]
        self.mask: int | None = found["mask"]
        self.before, self.after = self._around()
        sentinels = {int(match[1]): i for name, i in names.items() if (match := SENTINEL.fullmatch(name))}
        self.sentinels: tuple[int, ...] = tuple(sentinels[n] for n in sorted(sentinels))
        self.together = self._together(names)

    def _together(self, names: Mapping[str, int]) -> frozenset[int]:
        """Pieces that are bytes, if half a character behind a whole one spoils that: a decoder of LLaMA's kind."""
        ids = {int(match[1], 16): i for name, i in names.items() if (match := BYTE.fullmatch(name))}
        if not ids.keys() >= set(WHOLE_AND_HALF):
            return frozenset()
        text = self._tokenizer.decode([ids[byte] for byte in WHOLE_AND_HALF])
        return frozenset() if text.startswith(WHOLE_AND_HALF[:2].decode()) else frozenset(ids.values())

    def _special(self, role: str, said: dict[str, Any]) -> int | None:
        names = [*(name_of(said.get(key)) for key in SAID[role]), *USUAL[role]]
        ids = (self._tokenizer.token_to_id(name) for name in names if name is not None)
        return next((i for i in ids if i is not None), None)

    def _around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What it puts before and behind a text."""
        row = self._tokenizer.encode(PROBE, add_special_tokens=True)
        text = [place for place, special in enumerate(row.special_tokens_mask) if not special]
        first, last = (text[0], text[-1] + 1) if text else (len(row.ids), len(row.ids))
        return tuple(row.ids[:first]), tuple(row.ids[last:])

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        rows = self._tokenizer.encode_batch_fast([valid(text) for text in texts], add_special_tokens=False)
        return [row.ids for row in rows]

    def sample(self, texts: Sequence[str], sampling: Sampling, seed: int) -> list[list[int]]:
        raise TokenizerError(NO_SAMPLING)

    def decode(self, ids: Sequence[int]) -> str:
        check_ids(ids, self.size)
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    def decode_all(self, rows: Sequence[Sequence[int]]) -> list[str]:
        return [self.decode(ids) for ids in rows]

    def pieces(self, ids: Sequence[int]) -> list[str]:
        check_ids(ids, self.size)
        return [self._tokenizer.id_to_token(int(i)) or f"<{i}>" for i in ids]

    def tag(self, language: str) -> int:
        return find_tag({}, language)
