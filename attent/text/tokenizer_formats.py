"""Loading of tokenizers: SentencePiece (ours, LLaMA, T5), Marian, and `tokenizer.json` (GPT-2, BERT, Whisper).

Imported tokenizers give the ids that their model was trained with; most normalize text and are not lossless. Special
tokens in a text, such as `</s>` or `>>deu<<`, are encoded as letters. Each loader takes the contents of the files by
name, and a prefix for the names in errors.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple, get_args

from attent import settings
from attent.text.vocabulary import (
    SENTINEL_PATTERN,
    AddedToken,
    SentencePieceOptions,
    SentencePieceVocabulary,
    TokenizerError,
    Vocabulary,
    check_ids,
    load_processor,
    replace_surrogates,
)

CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
ADDED_TOKENS_FILE = "added_tokens.json"
FAST_TOKENIZER_FILE = "tokenizer.json"
FORMAT_FILE = "tokenizer_format.json"  # says whether attent trained `tokenizer.model`
TOKENIZER_FILES = (  # all that Hugging Face's libraries write; copied even if another file determines the ids
    "tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json merges.txt vocab.txt "
    "tokenizer.model spiece.model sentencepiece.bpe.model source.spm target.spm target_vocab.json chat_template.jinja"
).split()
OWN_FORMAT, FOREIGN_FORMAT = "attent", "sentencepiece"
MAX_VOCAB = 2**24
DEFAULT_SENTINELS = 100  # of T5
MARIAN_TAG = re.compile(r">>(.+)<<")
M2M_LANGUAGE = re.compile(r"__([a-z]{2,3})__")
M2M_LANGUAGES = """
    af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl gu ha he hi hr ht hu hy id
    ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn mr ms my ne nl no ns oc or pa pl ps pt ro ru sd si
    sk sl so sq sr ss su sv sw ta th tl tn tr uk ur uz vi wo xh yi yo zh zu
"""  # in the order of their ids, for folders that do not list them
MBART_50_LANGUAGES = """
    ar_AR cs_CZ de_DE en_XX es_XX et_EE fi_FI fr_XX gu_IN hi_IN it_IT ja_XX kk_KZ ko_KR lt_LT lv_LV my_MM ne_NP nl_XX
    ro_RO ru_RU si_LK tr_TR vi_VN zh_CN af_ZA az_AZ bn_IN fa_IR he_IL hr_HR id_ID ka_GE km_KH mk_MK ml_IN mn_MN mr_IN
    pl_PL ps_AF pt_XX sv_SE sw_KE ta_IN te_IN th_TH tl_XX uk_UA ur_PK xh_ZA gl_ES sl_SI
"""
MBART_25_LANGUAGES, MBART_25_PROBLEM = 25, "a language after the end token (mBART-25) is not supported; use mBART-50"
FAIRSEQ_FILE, FAIRSEQ_SPECIALS = "sentencepiece.bpe.model", ("<s>", "<pad>", "</s>", "<unk>")
FAIRSEQ_LANGUAGE = re.compile(r"[a-z]{2,3}_([A-Z][a-z]{3}|[A-Z]{2})")  # eng_Latn of NLLB, en_XX of mBART

Files = Mapping[str, bytes]
VocabularyPair = tuple[Vocabulary, Vocabulary]


def load_sentencepiece(files: Files, where: str) -> VocabularyPair:
    """Load `tokenizer.model`, of attent or of LLaMA and similar models, which have more files."""
    special_tokens = read_special_tokens(files, where)
    is_own = read_json(files, FORMAT_FILE, where).get("format") == OWN_FORMAT
    options = SentencePieceOptions(
        added_tokens=read_added_tokens(files, special_tokens, where),
        eos_token=get_token_name(special_tokens.get("eos_token")),
        add_bos=special_tokens.get("add_bos_token") is not False,
        add_eos=special_tokens.get("add_eos_token") is True,
    )
    both = SentencePieceVocabulary(
        files["tokenizer.model"], where + "tokenizer.model", options=None if is_own else options, is_own=is_own
    )
    return both, both


def load_separate(files: Files, where: str) -> VocabularyPair:
    source, target = (
        SentencePieceVocabulary(files[name], where + name, is_own=True) for name in ("source.model", "target.model")
    )
    return source, target


def load_t5(files: Files, where: str) -> VocabularyPair:
    """Load `spiece.model`; the ids after its own are sentinels."""
    extra = read_json(files, CONFIG_FILE, where).get("extra_ids", DEFAULT_SENTINELS)
    if type(extra) is not int or not 0 <= extra <= 10_000:
        problem = f"`extra_ids` must be a number up to 10000, but is {extra!r}"
        raise TokenizerError(f"{where}{CONFIG_FILE}: {problem}; correct it")
    both = SentencePieceVocabulary(files["spiece.model"], where + "spiece.model", extra)
    return both, both


def read_json(files: Files, name: str, where: str) -> dict[str, Any]:
    return settings.parse_json(files[name], where + name) if name in files else {}


def read_added_tokens(files: Files, special_tokens: Mapping[str, Any], where: str) -> dict[int, AddedToken]:
    """Return the tokens that were added to a trained tokenizer, by id."""
    tokens = [*special_tokens.values(), *iter_additional_tokens(special_tokens)]
    special = {name for token in tokens if (name := get_token_name(token))}
    added = {}
    for i, token in iter_added_tokens(files, special_tokens, where):
        name = get_token_name(token)
        if name is not None and type(i) is int and 0 <= i < MAX_VOCAB:
            added[i] = AddedToken(name, name in special or (isinstance(token, dict) and token.get("special") is True))
    return dict(sorted(added.items()))


def iter_added_tokens(files: Files, special_tokens: Mapping[str, Any], where: str) -> Iterator[tuple[Any, Any]]:
    """Yield ids and tokens of three files; later ones take precedence."""
    yield from ((i, name) for name, i in read_json(files, ADDED_TOKENS_FILE, where).items())
    listed = read_json(files, FAST_TOKENIZER_FILE, where).get("added_tokens")
    if isinstance(listed, list):
        yield from ((token.get("id"), token) for token in listed if isinstance(token, dict))
    decoder = special_tokens.get("added_tokens_decoder")
    if isinstance(decoder, dict):
        yield from ((int(i), token) for i, token in decoder.items() if re.fullmatch("[0-9]{1,9}", i))


def iter_additional_tokens(special_tokens: Mapping[str, Any]) -> Iterator[Any]:
    for key in ("additional_special_tokens", "extra_special_tokens"):
        listed = special_tokens.get(key)
        yield from listed if isinstance(listed, list) else ()


def load_marian(files: Files, where: str) -> VocabularyPair:
    """Load a SentencePiece model per side, and the ids of pieces, shared unless there is a `target_vocab.json`."""
    target_ids = "target_vocab.json" if "target_vocab.json" in files else "vocab.json"
    source = MarianVocabulary(files["source.spm"], where + "source.spm", read_vocab_json(files, "vocab.json", where))
    target = MarianVocabulary(files["target.spm"], where + "target.spm", read_vocab_json(files, target_ids, where))
    return source, target


def read_vocab_json(files: Files, name: str, where: str) -> dict[str, int]:
    ids = settings.parse_json(files[name], where + name)
    if not all(type(i) is int for i in ids.values()) or sorted(ids.values()) != list(range(len(ids))):
        raise TokenizerError(f"{where}{name}: must number its pieces from 0, but does not; download it again")
    missing = [special for special in ("</s>", "<unk>", "<pad>") if special not in ids]
    if missing:
        raise TokenizerError(f"{where}{name}: must have {missing[0]}, but does not; download the file again")
    return ids


def load_fairseq(files: Files, where: str) -> VocabularyPair:
    """Load the SentencePiece model of M2M-100 or mBART-50 and the ids of its pieces; those of its languages follow.

    M2M-100 lists the ids; mBART-50 has fairseq's four special tokens in place of SentencePiece's three.
    """
    model_path, special_tokens = where + FAIRSEQ_FILE, read_special_tokens(files, where)
    declared = [name for token in iter_additional_tokens(special_tokens) if (name := get_token_name(token))]
    is_m2m = "vocab.json" in files or any(map(M2M_LANGUAGE.fullmatch, declared))
    if is_m2m and "vocab.json" not in files:
        raise TokenizerError(f"{where}vocab.json: is missing; {FAIRSEQ_FILE} needs it")
    names = list(filter((M2M_LANGUAGE if is_m2m else FAIRSEQ_LANGUAGE).fullmatch, declared))
    if is_m2m:
        pieces, end = read_vocab_json(files, "vocab.json", where), []
        names = names or [f"__{language}__" for language in M2M_LANGUAGES.split()]
    else:
        if special_tokens.get("tokenizer_class") == "MBartTokenizer" or len(names) == MBART_25_LANGUAGES:
            raise TokenizerError(f"{model_path}: {MBART_25_PROBLEM}")
        processor = load_processor(files[FAIRSEQ_FILE], model_path)
        tokens = [*FAIRSEQ_SPECIALS, *map(processor.id_to_piece, range(3, len(processor)))]
        pieces, end = {name: i for i, name in enumerate(tokens)}, ["<mask>"]
        names = names or MBART_50_LANGUAGES.split()
    ids = pieces | {name: len(pieces) + i for i, name in enumerate([*names, *end])}
    both = MarianVocabulary(files[FAIRSEQ_FILE], model_path, ids)
    both.language_ids = {name.strip("_"): ids[name] for name in names}
    both._skipped_ids.update(ids[name] for name in [*names, *end, *FAIRSEQ_SPECIALS[:1]] if name in ids)
    return both, both


class MarianVocabulary(Vocabulary):
    """One side of a Marian model in Hugging Face's format; decoding starts from padding."""

    def __init__(self, model: bytes, where: str, ids: dict[str, int]) -> None:
        self._processor = load_processor(model, where)
        self._ids = ids
        self._tokens = sorted(ids, key=lambda name: ids[name])
        self._tags = {match[1]: i for name, i in ids.items() if (match := MARIAN_TAG.fullmatch(name))}
        self.tags = tuple(self._tags)
        self.size = len(ids)
        self.end, self.unknown, self.pad = ids["</s>"], ids["<unk>"], ids["<pad>"]
        self.start = self.pad
        self._skipped_ids = {self.end, self.unknown, self.pad, *self._tags.values()}
        self.prefix_ids, self.suffix_ids = (), (self.end,)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        # By pieces, not by SentencePiece's ids: `vocab.json` may have pieces that this side's model lacks.
        rows = self._processor.encode([replace_surrogates(text) for text in texts], out_type=str, num_threads=1)
        return [[self._ids.get(piece, self.unknown) for piece in row] for row in rows]

    def decode(self, ids: Sequence[int]) -> str:
        check_ids(ids, self.size)
        text: str = self._processor.decode([self._tokens[i] for i in ids if i not in self._skipped_ids])
        return text.replace("▁", " ").strip()

    def to_pieces(self, ids: Sequence[int]) -> list[str]:
        check_ids(ids, self.size)
        return [self._tokens[i] for i in ids]


# --- Hugging Face's `tokenizers` --------------------------------------------------------------------------------------

SPECIAL_TOKENS = {  # keys that declare them, and their names in published models, for folders that do not
    "start": (("bos_token", "cls_token"), ("<s>", "[CLS]", "<bos>", "<|begin_of_text|>")),
    "end": (("eos_token", "sep_token"), ("</s>", "[SEP]", "<eos>", "<|endoftext|>", "<|end_of_text|>")),
    "pad": (("pad_token",), ("<pad>", "[PAD]")),
    "unknown": (("unk_token",), ("<unk>", "[UNK]")),
    "mask": (("mask_token",), ("[MASK]", "<mask>")),
}
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
WHOLE_AND_HALF = "éé".encode()[:3]
PROBE = "a"  # encoded to find the tokens around a text


def load_fast(files: Files, where: str) -> VocabularyPair:
    content, path = files[FAST_TOKENIZER_FILE], where + FAST_TOKENIZER_FILE
    try:
        import tokenizers
    except ImportError as error:
        raise TokenizerError(f"{path}: needs the package `tokenizers`; run pip install 'attent[hf]'") from error
    settings.parse_json(content, path)  # reports the line of an error, which the package does not
    try:
        tokenizer = tokenizers.Tokenizer.from_str(content.decode())
    except Exception as error:
        raise TokenizerError(f"{path}: `tokenizers` cannot read it: {error}; download the file again") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    is_whisper = all(tokenizer.token_to_id(name) is not None for name in (TRANSCRIPT_START, NO_TIMESTAMPS))
    special_tokens = read_special_tokens(files, where)
    both = (WhisperVocabulary if is_whisper else FastVocabulary)(tokenizer, special_tokens, path)
    if str(special_tokens.get("tokenizer_class")).startswith(("Bart", "Roberta")):  # BART's is RoBERTa's
        both.first_ids = both.prefix_ids
    return both, both


def read_special_tokens(files: Files, where: str) -> dict[str, Any]:
    config = {key: value for key, value in read_json(files, CONFIG_FILE, where).items() if value is not None}
    return read_json(files, SPECIAL_TOKENS_FILE, where) | config


def get_token_name(token: Any) -> str | None:
    name = token.get("content") if isinstance(token, dict) else token
    return name if isinstance(name, str) else None


class FastVocabulary(Vocabulary):
    def __init__(self, tokenizer: Any, special_tokens: dict[str, Any], where: str) -> None:
        self._tokenizer = tokenizer
        tokenizer.encode_special_tokens = True  # `</s>` in a text is encoded as letters
        names = tokenizer.get_vocab(with_added_tokens=True)
        self.size = 1 + max(names.values(), default=0)
        special_ids = {role: self._find_special(role, special_tokens) for role in SPECIAL_TOKENS}
        if special_ids["end"] is None:
            raise TokenizerError(f"{where}: has no end-of-sentence token; set eos_token in {CONFIG_FILE}")
        self.end = special_ids["end"]
        self.pad = self.end if special_ids["pad"] is None else special_ids["pad"]
        self.start = self.pad if special_ids["start"] is None else special_ids["start"]
        self.unknown = self.end if special_ids["unknown"] is None else special_ids["unknown"]
        self.mask = special_ids["mask"]
        self.prefix_ids, self.suffix_ids = self._find_affixes()
        sentinels = {int(match[1]): i for name, i in names.items() if (match := SENTINEL_PATTERN.fullmatch(name))}
        self.sentinels = tuple(sentinels[n] for n in sorted(sentinels))
        self.byte_ids = self._find_byte_ids(names)
        declared = {name for token in iter_additional_tokens(special_tokens) if (name := get_token_name(token))}
        special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special} | declared
        languages = {name: i for name, i in names.items() if FAIRSEQ_LANGUAGE.fullmatch(name) and name in special}
        self.language_ids = dict(sorted(languages.items(), key=lambda item: item[1]))
        if set(self.suffix_ids[1:]) & set(self.language_ids.values()):
            raise TokenizerError(f"{where}: {MBART_25_PROBLEM}")

    def _find_byte_ids(self, names: Mapping[str, int]) -> frozenset[int]:
        """Return the byte tokens if an incomplete character invalidates the one before it, as with LLaMA's decoder."""
        ids = {int(match[1], 16): i for name, i in names.items() if (match := BYTE_TOKEN.fullmatch(name))}
        if not ids.keys() >= set(WHOLE_AND_HALF):
            return frozenset()
        text = self._tokenizer.decode([ids[byte] for byte in WHOLE_AND_HALF])
        return frozenset() if text.startswith(WHOLE_AND_HALF[:2].decode()) else frozenset(ids.values())

    def _find_special(self, role: str, special_tokens: dict[str, Any]) -> int | None:
        keys, names = SPECIAL_TOKENS[role]
        declared = [get_token_name(special_tokens.get(key)) for key in keys]
        ids = (self._tokenizer.token_to_id(name) for name in (*declared, *names) if name is not None)
        return next((i for i in ids if i is not None), None)

    def _find_affixes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        row = self._tokenizer.encode(PROBE, add_special_tokens=True)
        text = [i for i, special in enumerate(row.special_tokens_mask) if not special]
        first, last = (text[0], text[-1] + 1) if text else (len(row.ids), len(row.ids))
        return tuple(row.ids[:first]), tuple(row.ids[last:])

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        rows = self._tokenizer.encode_batch_fast([replace_surrogates(text) for text in texts], add_special_tokens=False)
        if not self.language_ids:
            return [row.ids for row in rows]
        special = {self.start, self.end, self.pad, *self.language_ids.values()}  # mBART's are pieces of its vocabulary
        return [[self.unknown if i in special else i for i in row.ids] for row in rows]

    def decode(self, ids: Sequence[int]) -> str:
        check_ids(ids, self.size)
        languages = self.language_ids.values()
        return self._tokenizer.decode([int(i) for i in ids if i not in languages], skip_special_tokens=True)

    def to_pieces(self, ids: Sequence[int]) -> list[str]:
        check_ids(ids, self.size)
        return [self._tokenizer.id_to_token(int(i)) or f"<{i}>" for i in ids]


TRANSCRIPT_START, NO_TIMESTAMPS = "<|startoftranscript|>", "<|notimestamps|>"
LANGUAGE_TOKEN = re.compile(r"<\|([a-z]{2,3})\|>")
TIMESTAMP_TOKEN = re.compile(r"<\|\d+\.\d\d\|>")
TIMESTAMP_SECONDS = 0.02  # between two timestamp tokens
NUM_TIMESTAMPS = 1501  # from 0 to 30 seconds
WhisperTask = Literal["transcribe", "translate"]  # translate: to English


class WhisperVocabulary(FastVocabulary):
    """Whisper's byte-level BPE, then prompt tokens (language, task), then a timestamp token for every 0.02 seconds.

    A target starts with `<|startoftranscript|>`; the tags are the languages of the recording. The first published
    tokenizers leave the names of timestamps out: these have the ids after `<|notimestamps|>` in any case.
    """

    def __init__(self, tokenizer: Any, special_tokens: dict[str, Any], where: str) -> None:
        super().__init__(tokenizer, special_tokens, where)
        names = tokenizer.get_vocab(with_added_tokens=True)
        self.start = names[TRANSCRIPT_START]
        self.no_timestamps: int = names[NO_TIMESTAMPS]
        count = sum(TIMESTAMP_TOKEN.fullmatch(name) is not None for name in names) or NUM_TIMESTAMPS
        self.timestamps = range(self.no_timestamps + 1, self.no_timestamps + 1 + count)  # ids
        self.size = max(self.size, self.timestamps.stop)
        self.task_ids = {task: names[f"<|{task}|>"] for task in get_args(WhisperTask) if f"<|{task}|>" in names}
        languages = {match[1]: i for name, i in names.items() if (match := LANGUAGE_TOKEN.fullmatch(name))}
        self._tags = dict(sorted(languages.items(), key=lambda item: item[1]))
        self.tags = tuple(self._tags)

    def decode(self, ids: Sequence[int]) -> str:
        return super().decode([i for i in ids if i not in self.timestamps])

    def to_pieces(self, ids: Sequence[int]) -> list[str]:
        pieces = super().to_pieces(ids)
        seconds = [(i - self.timestamps.start) * TIMESTAMP_SECONDS for i in ids]  # since the start of the window
        return [
            f"<|{time:.2f}|>" if i in self.timestamps else piece
            for i, time, piece in zip(ids, seconds, pieces, strict=True)
        ]


def build_prompt(
    vocabulary: WhisperVocabulary, language: str | None, task: WhisperTask = "transcribe"
) -> tuple[int, ...]:
    """Return the target ids that follow `vocabulary.start` and tell Whisper what to do, without timestamps.

    `language` is that of the recording; None for a model of English only, which knows no languages and tasks.
    """
    if language is None:
        return (vocabulary.no_timestamps,)
    if task not in vocabulary.task_ids:
        raise TokenizerError(f"the task must be one of {', '.join(vocabulary.task_ids)}, but is {task!r}; give another")
    return (vocabulary.get_tag_id(language), vocabulary.task_ids[task], vocabulary.no_timestamps)


# ---- folders that Marian has written ---------------------------------------------------------------------------------
# decoder.yml, or MODEL.npz.decoder.yml, names the model and a vocabulary per side: a SentencePiece model, or a YAML
# file of pieces and ids, as in OPUS-MT, with source.spm and target.spm beside it. Folders in decoder.yml are those of
# another machine, and are ignored.


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
