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
    SENTINEL_PATTERN,
    AddedToken,
    SentencePieceOptions,
    SentencePieceVocabulary,
    SubwordSampling,
    TokenizerError,
    Vocabulary,
    check_ids,
    find_tag,
    load_processor,
    replace_surrogates,
)

CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
ADDED_TOKENS_FILE = "added_tokens.json"
FAST_TOKENIZER_FILE = "tokenizer.json"
MAX_VOCAB = 2**24  # more than any vocabulary has
DEFAULT_SENTINELS = 100  # that T5 has when its files do not say
MARIAN_TAG = re.compile(r">>(.+)<<")
NO_SAMPLING = "only a tokenizer that attent has trained can sample; leave sampling out"

Files = Mapping[str, bytes]
VocabularyPair = tuple[Vocabulary, Vocabulary]


# --- SentencePiece files ---------------------------------------------------------------------------------------------


def load_sentencepiece(files: Files, where: str) -> VocabularyPair:
    """`tokenizer.model`: ours, or that of LLaMA and its kin, of which other files beside it tell more."""
    said = read_special_tokens(files, where)
    told = SentencePieceOptions(
        added_tokens=read_added_tokens(files, said, where),
        eos_token=get_token_name(said.get("eos_token")),
        add_bos=said.get("add_bos_token") is not False,
        add_eos=said.get("add_eos_token") is True,
    )
    both = SentencePieceVocabulary(files["tokenizer.model"], where + "tokenizer.model", options=told)
    return both, both


def load_separate(files: Files, where: str) -> VocabularyPair:
    """`source.model` and `target.model`: ours."""
    source, target = (SentencePieceVocabulary(files[name], where + name) for name in ("source.model", "target.model"))
    return source, target


def load_t5(files: Files, where: str) -> VocabularyPair:
    """`spiece.model`: ids behind its own are sentinels."""
    extra = read_config(files, where).get("extra_ids", DEFAULT_SENTINELS)
    if type(extra) is not int or not 0 <= extra <= 10_000:
        raise TokenizerError(
            f"{where}{CONFIG_FILE}: `extra_ids` must be a number up to 10000, but is {extra!r}; correct it"
        )
    both = SentencePieceVocabulary(files["spiece.model"], where + "spiece.model", extra)
    return both, both


def read_config(files: Files, where: str) -> dict[str, Any]:
    return settings.parse_json(files[CONFIG_FILE], where + CONFIG_FILE) if CONFIG_FILE in files else {}


def read_added_tokens(files: Files, special_tokens: Mapping[str, Any], where: str) -> dict[int, AddedToken]:
    """Pieces that a model got when its tokenizer was made already, by their ids, wherever the folder tells of them."""
    further = special_tokens.get("additional_special_tokens")
    named = [*special_tokens.values(), *(further if isinstance(further, list) else [])]
    special = {name for one in named if (name := get_token_name(one))}
    found = {}
    for i, one in iter_added_tokens(files, special_tokens, where):
        name = get_token_name(one)
        if name is not None and type(i) is int and 0 <= i < MAX_VOCAB:
            found[i] = AddedToken(name, name in special or (isinstance(one, dict) and one.get("special") is True))
    return dict(sorted(found.items()))


def iter_added_tokens(files: Files, special_tokens: Mapping[str, Any], where: str) -> Iterator[tuple[Any, Any]]:
    """Ids and pieces as they stand in three files; the last knows best."""
    if ADDED_TOKENS_FILE in files:
        yield from (
            (i, name) for name, i in settings.parse_json(files[ADDED_TOKENS_FILE], where + ADDED_TOKENS_FILE).items()
        )
    listed = (
        settings.parse_json(files[FAST_TOKENIZER_FILE], where + FAST_TOKENIZER_FILE).get("added_tokens")
        if FAST_TOKENIZER_FILE in files
        else None
    )
    if isinstance(listed, list):
        yield from ((one.get("id"), one) for one in listed if isinstance(one, dict))
    told = special_tokens.get("added_tokens_decoder")
    if isinstance(told, dict):
        yield from ((int(i), one) for i, one in told.items() if re.fullmatch("[0-9]{1,9}", i))


# --- Marian ----------------------------------------------------------------------------------------------------------


def load_marian(files: Files, where: str) -> VocabularyPair:
    """A SentencePiece model for each side, and which id each piece has: for both in `vocab.json`, unless the target
    has a `target_vocab.json` of its own."""
    target_ids = "target_vocab.json" if "target_vocab.json" in files else "vocab.json"
    source = MarianVocabulary(files["source.spm"], where + "source.spm", read_vocab_json(files, "vocab.json", where))
    target = MarianVocabulary(files["target.spm"], where + "target.spm", read_vocab_json(files, target_ids, where))
    return source, target


def read_vocab_json(files: Files, name: str, where: str) -> dict[str, int]:
    ids = settings.parse_json(files[name], where + name)
    if not all(type(i) is int for i in ids.values()) or sorted(ids.values()) != list(range(len(ids))):
        raise TokenizerError(f"{where}{name}: must number its pieces from 0, each once, but does not; get it again")
    missing = [special for special in ("</s>", "<unk>", "<pad>") if special not in ids]
    if missing:
        raise TokenizerError(f"{where}{name}: must have {missing[0]}, but does not; get the file again")
    return ids


class MarianVocabulary:
    """One side of a Marian model as Hugging Face stores it: decoding starts from padding."""

    byte_ids: frozenset[int] = frozenset()

    def __init__(self, model: bytes, where: str, ids: dict[str, int]) -> None:
        self._processor = load_processor(model, where)
        self._ids = ids
        self._tokens = sorted(ids, key=lambda name: ids[name])
        self._tags = {match[1]: i for name, i in ids.items() if (match := MARIAN_TAG.fullmatch(name))}
        self.size = len(ids)
        self.end, self.unknown, self.pad = ids["</s>"], ids["<unk>"], ids["<pad>"]
        self.start = self.pad
        self._skipped_ids = {self.end, self.unknown, self.pad, *self._tags.values()}
        self.prefix_ids: tuple[int, ...] = ()
        self.suffix_ids: tuple[int, ...] = (self.end,)
        self.mask: int | None = None
        self.sentinels: tuple[int, ...] = ()

    @property
    def tags(self) -> tuple[str, ...]:
        return tuple(self._tags)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        # By pieces and not by SentencePiece's ids: what one side's model does not know may still be in `vocab.json`.
        rows = self._processor.encode([replace_surrogates(text) for text in texts], out_type=str, num_threads=1)
        return [[self._ids.get(piece, self.unknown) for piece in row] for row in rows]

    def sample(self, texts: Sequence[str], sampling: SubwordSampling, seed: int) -> list[list[int]]:
        raise TokenizerError(NO_SAMPLING)

    def decode(self, ids: Sequence[int]) -> str:
        check_ids(ids, self.size)
        text: str = self._processor.decode([self._tokens[i] for i in ids if i not in self._skipped_ids])
        return text.replace("▁", " ").strip()

    def decode_batch(self, rows: Sequence[Sequence[int]]) -> list[str]:
        return [self.decode(ids) for ids in rows]

    def to_pieces(self, ids: Sequence[int]) -> list[str]:
        check_ids(ids, self.size)
        return [self._tokens[i] for i in ids]

    def get_tag_id(self, language: str) -> int:
        return find_tag(self._tags, language)


# --- Hugging Face's `tokenizers` --------------------------------------------------------------------------------------

# Where a folder does not say which pieces are special: their names in published models.
DEFAULT_SPECIALS = {
    "start": ("<s>", "[CLS]", "<bos>", "<|begin_of_text|>"),
    "end": ("</s>", "[SEP]", "<eos>", "<|endoftext|>", "<|end_of_text|>"),
    "pad": ("<pad>", "[PAD]"),
    "unknown": ("<unk>", "[UNK]"),
    "mask": ("[MASK]", "<mask>"),
}
SPECIAL_TOKEN_KEYS = {
    "start": ("bos_token", "cls_token"),
    "end": ("eos_token", "sep_token"),
    "pad": ("pad_token",),
    "unknown": ("unk_token",),
    "mask": ("mask_token",),
}
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
WHOLE_AND_HALF = "éé".encode()[:3]
PROBE = "a"  # a text to see what is put around


def load_fast(files: Files, where: str) -> VocabularyPair:
    """`tokenizer.json`, read by Hugging Face's `tokenizers`."""
    read = parse_fast(files[FAST_TOKENIZER_FILE], where + FAST_TOKENIZER_FILE)
    return wrap_fast(read, read_special_tokens(files, where), where + FAST_TOKENIZER_FILE)


def load_gpt2(files: Files, where: str) -> VocabularyPair:
    """`vocab.json` and `merges.txt`: BPE over bytes."""
    said = read_special_tokens(files, where)
    made = build_byte_level(files, said, where)
    known = [
        name for name in (get_token_name(said.get(key)) for keys in SPECIAL_TOKEN_KEYS.values() for key in keys) if name
    ]
    made.add_special_tokens(
        [name for name in known or [*DEFAULT_SPECIALS["end"]] if made.token_to_id(name) is not None]
    )
    add_tokens(made, read_added_tokens(files, said, where), where)
    return wrap_fast(made, said, where + "vocab.json")


def add_tokens(tokenizer: Any, pieces: Mapping[int, AddedToken], where: str) -> None:
    """Pieces behind those of the vocabulary: `tokenizers` counts on from there by itself."""
    tokenizers = import_tokenizers(where + "merges.txt")
    size = tokenizer.get_vocab_size(with_added_tokens=False)
    for i, piece in pieces.items():
        if i >= size or tokenizer.token_to_id(piece.name) == i:
            one = tokenizers.AddedToken(piece.name, special=piece.special, normalized=False)
            (tokenizer.add_special_tokens if piece.special else tokenizer.add_tokens)([one])
        if i >= size and tokenizer.token_to_id(piece.name) != i:
            raise TokenizerError(
                f"{where}vocab.json: pieces that were added must be numbered on from {size}, but {piece.name!r} is "
                f"{i}; get {ADDED_TOKENS_FILE} and {CONFIG_FILE} again"
            )


def build_byte_level(files: Files, special_tokens: dict[str, Any], where: str) -> Any:
    tokenizers = import_tokenizers(where + "merges.txt")
    merges = decode_lines(files["merges.txt"], where + "merges.txt")
    pairs = [tuple(line.split(" ")) for line in merges if line and not line.startswith("#version")]
    vocab = settings.parse_json(files["vocab.json"], where + "vocab.json")
    try:
        made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=pairs))
    except Exception as error:
        raise TokenizerError(f"{where}merges.txt: does not fit vocab.json: {error}; get both files again") from error
    prefix = special_tokens.get("add_prefix_space") is True
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    made.decoder = tokenizers.decoders.ByteLevel()
    return encode_specials_as_text(made)


def load_bert(files: Files, where: str) -> VocabularyPair:
    """`vocab.txt`, a piece a line: WordPiece, of small letters unless the folder says otherwise."""
    tokenizers = import_tokenizers(where + "vocab.txt")
    said = read_special_tokens(files, where)
    lines = decode_lines(files["vocab.txt"], where + "vocab.txt")
    vocab = {line: i for i, line in enumerate(lines) if line or i < len(lines) - 1}
    first, last, unknown = (get_token_name(said.get(key)) or usual for key, usual in BERT_SPECIALS.items())
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
    return wrap_fast(encode_specials_as_text(made), said, where + "vocab.txt")


BERT_SPECIALS = {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}


def wrap_fast(tokenizer: Any, special_tokens: dict[str, Any], where: str) -> VocabularyPair:
    both = FastVocabulary(tokenizer, special_tokens, where)
    return both, both


def read_special_tokens(files: Files, where: str) -> dict[str, Any]:
    """What the folder says of its special pieces; older ones have a file for that alone."""
    older = (
        settings.parse_json(files[SPECIAL_TOKENS_FILE], where + SPECIAL_TOKENS_FILE)
        if SPECIAL_TOKENS_FILE in files
        else {}
    )
    said = {key: value for key, value in read_config(files, where).items() if value is not None}
    return older | said


def get_token_name(token: Any) -> str | None:
    """A piece by its name, or by an object that has it."""
    name = token.get("content") if isinstance(token, dict) else token
    return name if isinstance(name, str) else None


def decode_lines(content: bytes, where: str) -> list[str]:
    try:
        return [line.rstrip("\r") for line in content.decode().split("\n")]
    except UnicodeDecodeError as error:
        raise TokenizerError(
            f"{where}: must be UTF-8, but byte {error.start + 1} is not; get the file again"
        ) from error


def import_tokenizers(where: str) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        advice = "run pip install 'attent[hf]'"
        raise TokenizerError(f"{where}: needs the package `tokenizers` to be read; {advice}") from error
    return tokenizers


def parse_fast(content: bytes, where: str) -> Any:
    tokenizers = import_tokenizers(where)
    settings.parse_json(content, where)  # names the line of damage, which the package does not
    try:
        tokenizer = tokenizers.Tokenizer.from_str(content.decode())
    except Exception as error:
        raise TokenizerError(f"{where}: `tokenizers` cannot read it: {error}; get the file again") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return encode_specials_as_text(tokenizer)


def encode_specials_as_text(tokenizer: Any) -> Any:
    tokenizer.encode_special_tokens = True  # `</s>` in a text is four letters
    return tokenizer


class FastVocabulary:
    """A vocabulary that Hugging Face's `tokenizers` reads."""

    tags: tuple[str, ...] = ()

    def __init__(self, tokenizer: Any, special_tokens: dict[str, Any], where: str) -> None:
        self._tokenizer = tokenizer
        names = tokenizer.get_vocab(with_added_tokens=True)
        self.size: int = 1 + max(names.values(), default=0)
        found = {role: self._find_special(role, special_tokens) for role in DEFAULT_SPECIALS}
        if found["end"] is None:
            raise TokenizerError(f"{where}: no piece ends a sentence; name it in {CONFIG_FILE}, as eos_token")
        self.end: int = found["end"]
        self.pad: int = self.end if found["pad"] is None else found["pad"]
        self.start: int = self.pad if found["start"] is None else found["start"]
        self.unknown: int = self.end if found["unknown"] is None else found["unknown"]
        self.mask: int | None = found["mask"]
        self.prefix_ids, self.suffix_ids = self._find_affixes()
        sentinels = {int(match[1]): i for name, i in names.items() if (match := SENTINEL_PATTERN.fullmatch(name))}
        self.sentinels: tuple[int, ...] = tuple(sentinels[n] for n in sorted(sentinels))
        self.byte_ids = self._find_byte_ids(names)

    def _find_byte_ids(self, names: Mapping[str, int]) -> frozenset[int]:
        """Pieces that are bytes, if half a character behind a whole one spoils that: a decoder of LLaMA's kind."""
        ids = {int(match[1], 16): i for name, i in names.items() if (match := BYTE_TOKEN.fullmatch(name))}
        if not ids.keys() >= set(WHOLE_AND_HALF):
            return frozenset()
        text = self._tokenizer.decode([ids[byte] for byte in WHOLE_AND_HALF])
        return frozenset() if text.startswith(WHOLE_AND_HALF[:2].decode()) else frozenset(ids.values())

    def _find_special(self, role: str, special_tokens: dict[str, Any]) -> int | None:
        names = [
            *(get_token_name(special_tokens.get(key)) for key in SPECIAL_TOKEN_KEYS[role]),
            *DEFAULT_SPECIALS[role],
        ]
        ids = (self._tokenizer.token_to_id(name) for name in names if name is not None)
        return next((i for i in ids if i is not None), None)

    def _find_affixes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What it puts before and behind a text."""
        row = self._tokenizer.encode(PROBE, add_special_tokens=True)
        text = [place for place, special in enumerate(row.special_tokens_mask) if not special]
        first, last = (text[0], text[-1] + 1) if text else (len(row.ids), len(row.ids))
        return tuple(row.ids[:first]), tuple(row.ids[last:])

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        rows = self._tokenizer.encode_batch_fast([replace_surrogates(text) for text in texts], add_special_tokens=False)
        return [row.ids for row in rows]

    def sample(self, texts: Sequence[str], sampling: SubwordSampling, seed: int) -> list[list[int]]:
        raise TokenizerError(NO_SAMPLING)

    def decode(self, ids: Sequence[int]) -> str:
        check_ids(ids, self.size)
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    def decode_batch(self, rows: Sequence[Sequence[int]]) -> list[str]:
        return [self.decode(ids) for ids in rows]

    def to_pieces(self, ids: Sequence[int]) -> list[str]:
        check_ids(ids, self.size)
        return [self._tokenizer.id_to_token(int(i)) or f"<{i}>" for i in ids]

    def get_tag_id(self, language: str) -> int:
        return find_tag({}, language)
