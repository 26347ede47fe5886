"""Make the vocabulary of a translator smaller: keep the tokens that a corpus and the scripts of its languages need.

Dropping pieces does not change the segmentation of text that consists of kept pieces:
- Unigram: the best segmentation is still the best of those that remain. Unknown text and user-defined pieces are scored
  relative to the lowest and the highest score, so both extremes are kept.
- BPE: the best merge is still the best of those that remain; a piece is kept with all that are merged on the way to it.
"""

import json
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from itertools import count, islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from attent.models import Seq2Seq, build_empty
from attent.models.weights import assign_weights, build_empty_like, collect_tensors
from attent.storage.errors import AttentError
from attent.text import tokenizer_formats as formats
from attent.text.scripts import SCRIPT_LETTERS, compile_letter_pattern, get_language_scripts
from attent.text.tokenizer import Tokenizer, choose_language

Files = Mapping[str, bytes]
BLOCK_LINES = 1_000
EMBEDDINGS = ("source_embedding.weight", "target_embedding.weight", "output.weight", "output.bias")
CONFIG_FILES = {formats.CONFIG_FILE, formats.SPECIAL_TOKENS_FILE}
SENTENCEPIECE_SUFFIXES = (".model", ".spm")
# Field numbers and values of SentencePiece's sentencepiece_model.proto
PIECES, TRAINER_SPEC, SELF_TEST_DATA = 1, 2, 4
PIECE_NAME, PIECE_SCORE, PIECE_TYPE, NORMAL_PIECE = 1, 2, 3, 1
MODEL_TYPE, BPE_MODEL = 3, 2


def trim_vocabulary(
    model: Seq2Seq, tokenizer: Tokenizer, files: Files, corpus: Path, languages: Sequence[str], vocab: int | None
) -> tuple[Seq2Seq, Tokenizer, Files, str]:
    """Return the smaller model, its tokenizer, the files of the folder, and a line about the corpus.

    Greedy search finds the same tokens as before where all of them are kept. Probabilities are higher, since they sum
    to 1 over fewer tokens, so beam search can prefer another hypothesis.

    corpus     text in the languages that remain, one sentence per line
    languages  whose tokens and scripts remain, in any notation; none: all of them
    vocab      maximum number of tokens; None: all that occur in the corpus
    """
    old_files = {**{name: files[name] for name in CONFIG_FILES & files.keys()}, **tokenizer.files}
    ids, dropped = choose_ids(tokenizer, old_files, corpus, languages, vocab)
    new_ids = {old: new for new, old in enumerate(ids)}
    new_files = {name: rewrite_file(name, content, dropped, new_ids) for name, content in old_files.items()}
    trimmed = Tokenizer.from_files(new_files)
    lines = covered = 0
    for block in read_blocks(corpus):
        for old_row, new_row in zip(encode_sides(tokenizer, block), encode_sides(trimmed, block), strict=True):
            expected = [new_ids.get(i) for i in old_row]
            if None not in expected and expected != new_row:
                raise AttentError(f"{corpus}: line {lines + 1} would be encoded differently; nothing is written")
            lines, covered = lines + 1, covered + (None not in expected)
    report = f"{covered:,} of {lines:,} lines consist of kept pieces, and are encoded as before"
    files = {name: files[name] for name in files.keys() - {*formats.TOKENIZER_FILES}} | new_files
    return select_tokens(model, ids), trimmed, files, report


def read_blocks(corpus: Path) -> Iterator[list[str]]:
    with corpus.expanduser().open(encoding="utf-8") as lines:
        try:
            while block := [line.rstrip("\n") for line in islice(lines, BLOCK_LINES)]:
                yield block
        except UnicodeDecodeError as error:
            raise AttentError(f"{corpus}: must be UTF-8 text, but is not ({error.reason}); convert it") from error


def encode_sides(tokenizer: Tokenizer, lines: Sequence[str]) -> list[list[int]]:
    rows = tokenizer.source.encode(lines)
    return rows if tokenizer.joint else [a + b for a, b in zip(rows, tokenizer.target.encode(lines), strict=True)]


def select_tokens(model: Seq2Seq, ids: Sequence[int]) -> Seq2Seq:
    """Return a copy with these tokens only; the new id of a token is its index in `ids`."""
    config, rows = model.config, torch.tensor(ids)
    tensors = collect_tensors(model, build_empty_like(model))
    tensors |= {name: tensors[name].index_select(0, rows) for name in EMBEDDINGS if name in tensors}
    start, end = ids.index(config.start_id), ids.index(config.end_id)
    smaller = replace(config, vocab=len(ids), target_vocab=None, start_id=start, end_id=end)
    return assign_weights(build_empty(smaller), tensors, "the model with fewer tokens")


class PieceModel(NamedTuple):
    scores: Mapping[str, float]
    rank_merge: Callable[[str, str], float | None] | None  # the lowest rank is merged first; None: Unigram

    def find_needed_pieces(self, piece: str) -> set[str]:
        """Return a piece with all that are merged on the way to it."""
        symbols, needed, rank_merge = list(piece), {piece}, self.rank_merge
        if rank_merge is None:
            return needed
        needed.update(symbols)
        while ranks := [(r, i) for i, pair in enumerate(pairwise(symbols)) if (r := rank_merge(*pair)) is not None]:
            i = min(ranks)[1]
            symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
            needed.add(symbols[i])
        return needed


def choose_ids(
    tokenizer: Tokenizer, files: Files, corpus: Path, languages: Sequence[str], vocab: int | None
) -> tuple[list[int], set[str]]:
    models = [model for name in sorted(files) if (model := read_pieces(name, files[name])) is not None]
    if not models or {"target.model", "target_vocab.json"} & files.keys():
        raise AttentError("only SentencePiece, BPE and Unigram tokenizers with one vocabulary can be trimmed")
    source = tokenizer.source
    names = source.to_pieces(range(source.size))
    known, text_pieces = set(names), {piece for model in models for piece in model.scores}
    special = [source.start, source.end, source.pad, source.unknown, source.mask, *source.language_ids.values()]
    kept = known - text_pieces | select_characters(known, languages) | {names[i] for i in special if i is not None}
    if languages and source.language_ids:
        remaining = [choose_language(language, list(source.language_ids)) for language in languages]
        if formats.FAIRSEQ_FILE not in files:  # whose languages have fixed places after the pieces
            kept -= {names[i] for language, i in source.language_ids.items() if language not in remaining}
    for scores in (model.scores for model in models if model.rank_merge is None):
        kept |= {min(scores, key=scores.__getitem__), max(scores, key=scores.__getitem__)} & known
    if vocab is not None and vocab < len(kept):
        raise AttentError(f"`vocab` must be at least {len(kept)}, for special tokens and characters, but is {vocab}")
    counts = Counter(i for block in read_blocks(corpus) for row in encode_sides(tokenizer, block) for i in row)
    for i, _ in counts.most_common():
        added = {piece for model in models for piece in model.find_needed_pieces(names[i])} & known - kept
        if vocab is None or len(kept) + len(added) <= vocab:
            kept |= added
    return [i for i, name in enumerate(names) if name in kept], known - kept


def select_characters(pieces: Set[str], languages: Sequence[str]) -> set[str]:
    """Return the pieces of one letter of the languages' scripts, or of Latin, which names and BART's bytes need."""
    every_script = frozenset(SCRIPT_LETTERS)
    scripts = [get_language_scripts(language) or every_script for language in languages] or [every_script]
    foreign = every_script - {"Latn"}.union(*scripts)
    foreign_letter = compile_letter_pattern(foreign)
    return {piece for piece in pieces if len(piece) == 1 and not foreign_letter.match(piece)}


def read_pieces(name: str, content: bytes) -> PieceModel | None:
    """Read the segmentation model in a tokenizer's file; None for other files."""
    if name.endswith(SENTENCEPIECE_SUFFIXES):
        return read_sentencepiece(content)
    data = json.loads(content) if name == formats.FAST_TOKENIZER_FILE else {}
    model = data.get("model", {})
    if model.get("type") not in ("BPE", "Unigram"):
        return None
    is_bpe = model["type"] == "BPE"
    ranks = {tuple(split_merge(merge)): rank for rank, merge in enumerate(model.get("merges", ()))}
    scores = dict.fromkeys(model["vocab"], 0.0) if is_bpe else dict(model["vocab"])
    special = {token["content"] for token in data["added_tokens"]} | set(filter(formats.BYTE_TOKEN.fullmatch, scores))
    text_scores = {piece: scores[piece] for piece in scores.keys() - special}
    return PieceModel(text_scores, (lambda left, right: ranks.get((left, right))) if is_bpe else None)


def read_sentencepiece(content: bytes) -> PieceModel:
    scores, is_bpe = {}, False
    for number, value, _ in iter_fields(content):
        fields = parse_fields(value) if number in (PIECES, TRAINER_SPEC) else {}
        if number == TRAINER_SPEC:
            is_bpe = fields.get(MODEL_TYPE) == BPE_MODEL
        elif number == PIECES and fields.get(PIECE_TYPE, NORMAL_PIECE) == NORMAL_PIECE:
            scores[fields[PIECE_NAME].decode()] = struct.unpack("<f", fields.get(PIECE_SCORE, bytes(4)))[0]
    ranks = {piece: -score for piece, score in scores.items()}
    return PieceModel(scores, (lambda left, right: ranks.get(left + right)) if is_bpe else None)


def iter_fields(message: bytes) -> Iterator[tuple[int, Any, bytes]]:
    """Yield (number, integer or bytes, encoded field) of a protobuf message; SentencePiece's parser needs a package."""
    position = 0

    def read_integer() -> int:  # 7 bits in each byte, lowest first; all bytes but the last are above 127
        nonlocal position
        value = 0
        for shift in count(0, 7):
            byte, position = message[position], position + 1
            value |= (byte & 127) << shift
            if byte < 128:
                break
        return value

    while position < len(message):
        start = position
        number, wire_type = divmod(read_integer(), 8)
        value = size = read_integer() if wire_type in (0, 2) else {1: 8, 5: 4}[wire_type]
        if wire_type != 0:
            position += size
        yield number, message[position - size : position] if wire_type else value, message[start:position]


def parse_fields(message: bytes) -> dict[int, Any]:
    return {number: value for number, value, _ in iter_fields(message)}


def rewrite_file(name: str, content: bytes, dropped: Set[str], new_ids: Mapping[int, int]) -> bytes:
    if name.endswith(SENTENCEPIECE_SUFFIXES):
        return rewrite_sentencepiece(content, dropped)
    if name == formats.FAST_TOKENIZER_FILE:
        rewritten = rewrite_fast(json.loads(content), dropped, new_ids)
    elif name == "vocab.json":
        rewritten = {piece: new_ids[i] for piece, i in json.loads(content).items() if piece not in dropped}
    elif name in CONFIG_FILES:
        rewritten = rewrite_config(json.loads(content), dropped)
    else:
        return content
    return json.dumps(rewritten, ensure_ascii=False).encode()


def rewrite_sentencepiece(content: bytes, dropped: Set[str]) -> bytes:
    return b"".join(
        encoded
        for number, value, encoded in iter_fields(content)
        if number != SELF_TEST_DATA  # segmentations that are checked when the model is loaded
        and not (number == PIECES and parse_fields(value)[PIECE_NAME].decode() in dropped)
    )


def rewrite_config(config: dict[str, Any], dropped: Set[str]) -> dict[str, Any]:
    """Remove the dropped tokens, and ids that transformers reads from other files too."""
    for key in ("additional_special_tokens", "extra_special_tokens"):
        if isinstance(config.get(key), list):
            config[key] = [token for token in config[key] if formats.get_token_name(token) not in dropped]
    stale = {"added_tokens_decoder"} | {key for key in ("src_lang", "tgt_lang") if config.get(key) in dropped}
    return {key: value for key, value in config.items() if key not in stale}


def rewrite_fast(data: dict[str, Any], dropped: Set[str], new_ids: Mapping[int, int]) -> dict[str, Any]:
    model = data["model"]
    if model["type"] == "BPE":
        model["vocab"] = {piece: new_ids[i] for piece, i in model["vocab"].items() if piece not in dropped}
        model["merges"] = [m for m in map(split_merge, model["merges"]) if dropped.isdisjoint([*m, "".join(m)])]
    else:
        model["vocab"] = [entry for entry in model["vocab"] if entry[0] not in dropped]
        model["unk_id"] = new_ids[model["unk_id"]]
    added = [token for token in data["added_tokens"] if token["content"] not in dropped]
    data["added_tokens"] = [token | {"id": new_ids[token["id"]]} for token in added]
    for token in (data["post_processor"] or {}).get("special_tokens", {}).values():
        token["ids"] = [new_ids.get(i, 0) for i in token["ids"]]  # a dropped language is replaced by any token
    return data | {"padding": None}


def split_merge(merge: str | list[str]) -> list[str]:
    return merge.split(" ") if isinstance(merge, str) else merge
