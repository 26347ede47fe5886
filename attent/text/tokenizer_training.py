"""Training of tokenizers on a sample of the corpus, in bounded time and memory, deterministic to the byte."""

import io
import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from sentencepiece import SentencePieceTrainer, set_min_log_level

from attent.storage.errors import AttentError
from attent.text.tokenizer import SEPARATE_FILES, Tokenizer, build_own_files
from attent.text.vocabulary import END, ESCAPE, MASK_TOKEN, PAD, SILENT_LOG_LEVEL, SPACE, START, UNKNOWN, TokenizerError

TokenizerKind = Literal["bpe", "unigram", "char"]

# Characters per side to train on. More changes little: five times as many encode Europarl in 0.4% fewer ids. A unigram
# model needs ten times the time and memory per character.
MAX_SAMPLE_CHARS = {"bpe": 20_000_000, "unigram": 5_000_000, "char": 20_000_000}
MAX_LINE_CHARS = 1000  # SentencePiece silently drops lines of more than 4192 bytes
MIN_VOCAB = 512  # of an automatic size; 256 ids are bytes
MAX_VOCAB = 32_768
VOCAB_MULTIPLE = 64  # for tensor cores
RARE_ONE_IN = 1_000_000  # rarer characters are encoded as bytes
FIRST_CJK = "\u2e80"  # a Chinese, Japanese or Korean character counts as three letters

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")
RESERVED_SYMBOL = re.compile(r"<(pad|s|/s|unk|mask|0x[0-9A-F]{2}|2[^<>]+|extra_id_\d+)>")
# SentencePiece silently drops lines with `▅`, which it uses itself; the others are encoded as bytes.
NON_TEXT = re.compile(rf"[\x00-\x1f\x7f\ud800-\udfff▅{SPACE}]+")


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    kind: TokenizerKind = "bpe"  # char: single characters, for tiny tasks
    vocab: int | None = None  # size; None: chosen from the data
    joint: bool = True  # one vocabulary for both sides
    symbols: tuple[str, ...] = ()  # never split, such as "%s" or "{name}"

    def __post_init__(self) -> None:
        if self.kind not in get_args(TokenizerKind):
            raise AttentError(f"`kind` must be one of {', '.join(get_args(TokenizerKind))}, but is {self.kind!r}")
        if self.vocab is not None and (type(self.vocab) is not int or not 1 <= self.vocab <= 2**20):
            raise AttentError(f"`vocab` must be a number up to {2**20:,}, or none, but is {self.vocab!r}")
        for symbol in self.symbols:
            if not symbol or NON_TEXT.search(symbol) or any(map(str.isspace, symbol)):
                required = f"be without spaces, control characters and `{SPACE}`"
                raise AttentError(f"`symbols` must {required}, but one is {symbol!r}")
            if RESERVED_SYMBOL.fullmatch(symbol):
                raise AttentError(f"`symbols` must not hold {symbol!r}: it is reserved; choose another")
        check_unique("symbols", self.symbols)


def check_unique(name: str, values: Sequence[str]) -> None:
    twice = [value for value, count in Counter(values).items() if count > 1]
    if twice:
        raise AttentError(f"`{name}` must differ from each other, but {twice[0]!r} occurs twice; remove one")


def train_tokenizer(
    sources: Iterable[str],
    targets: Iterable[str],
    config: TokenizerConfig = TokenizerConfig(),
    tags: Sequence[str] = (),
    seed: int = 0,
) -> Tokenizer:
    """Train a tokenizer for translation, with a tag for each language of `tags`; the seed selects the sample."""
    controls = make_tag_symbols(tags)
    source, target = (sample_lines(lines, seed, MAX_SAMPLE_CHARS[config.kind]) for lines in (sources, targets))
    if config.joint:
        return Tokenizer.from_files(build_own_files(fit_vocabulary(source + target, config, controls)))
    # Only the source has language tags.
    models = fit_vocabulary(source, config, controls), fit_vocabulary(target, config, ())
    return Tokenizer.from_files(dict(zip(SEPARATE_FILES, models, strict=True)))


def make_tag_symbols(tags: Sequence[str]) -> list[str]:
    check_unique("tags", tags)
    for tag in tags:
        if not re.fullmatch(r"[\w-]+", tag):
            raise AttentError(f"`tags` must be languages such as de or pt-BR, but one is {tag!r}")
    return [f"<2{tag}>" for tag in tags]


def train_monolingual_tokenizer(
    texts: Iterable[str],
    config: TokenizerConfig,
    *,
    mask: bool = False,
    sentinels: int = 0,
    tags: Sequence[str] = (),
    seed: int = 0,
) -> Tokenizer:
    """Train a tokenizer for texts of one side, on single lines, with a mask token, sentinels or language tags."""
    lines = (line for text in texts for line in text.split("\n"))
    parts = (line[at : at + MAX_LINE_CHARS] for line in lines for at in range(0, len(line), MAX_LINE_CHARS))
    sample = sample_lines(parts, seed, MAX_SAMPLE_CHARS[config.kind])
    controls = [MASK_TOKEN] * mask + [f"<extra_id_{number}>" for number in range(sentinels)] + make_tag_symbols(tags)
    return Tokenizer.from_files(build_own_files(fit_vocabulary(sample, config, controls)))


@dataclass(frozen=True)
class CorpusSample:
    lines: list[str]
    total_chars: int  # of the whole corpus

    def __add__(self, other: "CorpusSample") -> "CorpusSample":
        return CorpusSample(self.lines + other.lines, self.total_chars + other.total_chars)


def sample_lines(lines: Iterable[str], seed: int, max_chars: int) -> CorpusSample:
    """Sample lines uniformly, up to `max_chars`; whenever the sample is full, the probability is halved."""
    rng = random.Random(seed)
    sample: list[tuple[float, str]] = []
    total_chars, sample_chars, probability = 0, 0, 1.0
    for line in lines:
        total_chars += len(line)
        draw = rng.random()
        if draw >= probability:
            continue
        sample.append((draw, line[:MAX_LINE_CHARS]))
        sample_chars += len(sample[-1][1])
        if sample_chars > max_chars:
            probability /= 2
            sample = [item for item in sample if item[0] < probability]
            sample_chars = sum(len(line) for _, line in sample)
    texts = (NON_TEXT.sub(" ", line) for _, line in sample)
    return CorpusSample([text for text in texts if text.strip()], total_chars)


def count_characters(sample: CorpusSample) -> Counter[str]:
    counts: Counter[str] = Counter()
    for line in sample.lines:
        counts.update(line)
    del counts[" "]
    return counts


def choose_vocab_size(sample: CorpusSample, counts: Counter[str]) -> int:
    """Choose the vocabulary size: five times the square root of the number of letters and, beyond four million letters,
    where most words have an id, three times as many ids for forty times as many letters.

    Tuned by the scores of trained models (docs/log.md). It gives Multi30k (3.8M letters) 9,792 ids, and 500,000 pairs
    of Europarl (160M letters) 31,872.
    """
    in_sample = sum(counts.values())
    wide = sum(count for letter, count in counts.items() if letter >= FIRST_CJK)
    length = sample.total_chars * (in_sample + 2 * wide) / in_sample
    root, beyond = 5 * length**0.5, 10_000 * (length / 3.8e6) ** 0.31
    size = round(min(root, beyond) / VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    return min(max(size, MIN_VOCAB), MAX_VOCAB)


def remove_rare_characters(sample: CorpusSample, counts: Counter[str], max_characters: int) -> CorpusSample:
    """Replace rare characters by spaces: they are encoded as bytes, else large scripts would leave words no ids."""
    total = sum(counts.values())
    frequent = {letter for letter, count in counts.most_common(max(max_characters, 1)) if count * RARE_ONE_IN >= total}
    rare = "".join(letter for letter in counts if letter not in frequent)
    if not rare:
        return sample
    pattern = re.compile(f"[{re.escape(rare)}]+")
    return replace(sample, lines=[pattern.sub(" ", line) for line in sample.lines])


def fit_vocabulary(sample: CorpusSample, config: TokenizerConfig, controls: Sequence[str]) -> bytes:
    """Train a SentencePiece model, with ids for `controls`, which no text is encoded to."""
    if not sample.lines:
        raise TokenizerError("there is no text to train a tokenizer on: every line is empty; check the corpus")
    counts = count_characters(sample)
    fixed = len(SPECIAL_TOKENS) + len(controls) + len(config.symbols) + 256 + 2  # and the escape and the space
    size = config.vocab or (choose_vocab_size(sample, counts) if config.kind != "char" else MAX_VOCAB)
    if size <= fixed:
        raise TokenizerError(f"`vocab` must be more than {fixed}, of which 256 are for bytes, but is {size}; raise it")
    max_characters = (size - fixed) if config.kind == "char" else (size - fixed) // 2
    sample = remove_rare_characters(sample, counts, max_characters)
    try:
        return run_sentencepiece(sample.lines, size, config, controls)
    except RuntimeError as error:
        size = parse_max_vocab(size, config, error)
    return run_sentencepiece(sample.lines, size, config, controls)


def parse_max_vocab(size: int, config: TokenizerConfig, error: RuntimeError) -> int:
    match = re.search(r"too high.*<= (\d+)", str(error))
    if not match:
        raise TokenizerError(f"SentencePiece cannot train a tokenizer on this text: {error}") from error
    possible = int(match[1])
    if config.vocab is not None:
        advice = f"set it to at most {possible}, or leave it out"
        raise TokenizerError(f"`vocab` is {size}, but the text is too small for that; {advice}") from error
    return possible


def run_sentencepiece(lines: list[str], size: int, config: TokenizerConfig, controls: Sequence[str]) -> bytes:
    set_min_log_level(SILENT_LOG_LEVEL)
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type=config.kind,
        vocab_size=size,
        pad_id=PAD,
        bos_id=START,
        eos_id=END,
        unk_id=UNKNOWN,
        pad_piece=SPECIAL_TOKENS[PAD],
        control_symbols=list(controls),  # `<2de>` in a text is encoded as letters
        user_defined_symbols=[ESCAPE, *config.symbols],
        # Lossless.
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        byte_fallback=True,
        character_coverage=1.0,  # `remove_rare_characters` has chosen
        num_threads=1,  # for deterministic sums
        minloglevel=SILENT_LOG_LEVEL,
    )
    return model.getvalue()
