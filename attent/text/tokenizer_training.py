"""A tokenizer learnt from a corpus: of bounded time and memory, the same bytes from the same text every time.

Streams may be of any length: a sample is learnt from. What a tokenizer does afterwards is `vocabulary`'s.
"""

from __future__ import annotations

import io
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from sentencepiece import SentencePieceTrainer, set_min_log_level

from attent.text.subword_sampling import SPACE
from attent.text.tokenizer import JOINT_FILES, SEPARATE_FILES, Tokenizer
from attent.text.vocabulary import (
    END,
    ESCAPE,
    MASK_TOKEN,
    PAD,
    SENTINEL_PATTERN,
    SILENT_LOG_LEVEL,
    START,
    TAG_PATTERN,
    UNKNOWN,
    TokenizerError,
)

TokenizerKind = Literal["bpe", "unigram", "char"]

# Characters of each side to learn from. More changes little: five times as many spell Europarl in 0.4% fewer ids. The
# unigram model needs ten times the time for each, and as much memory.
MAX_SAMPLE_CHARS = {"bpe": 20_000_000, "unigram": 5_000_000, "char": 20_000_000}
MAX_LINE_CHARS = 1000  # characters of a line that are looked at; SentencePiece silently drops a line of over 4192 bytes
MIN_VOCAB = 512  # ids in a chosen vocabulary: 256 of them are bytes
MAX_VOCAB = 32_768
VOCAB_MULTIPLE = 64  # matrices of such a width suit tensor cores
RARE_ONE_IN = 1_000_000  # a character that is seldomer than one in so many is spelled in bytes
FIRST_CJK = "\u2e80"  # from here on (Chinese, Japanese, Korean) a character carries as much as three letters

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")
BYTE_PATTERN = re.compile(r"<0x[0-9A-F]{2}>")
# SentencePiece silently drops a line with `▅`, its own sign; the others here deserve no id, bytes will do for them.
NON_TEXT = re.compile(rf"[\x00-\x1f\x7f\ud800-\udfff▅{SPACE}]+")


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    kind: TokenizerKind = "bpe"  # char: each character for itself, for tiny tasks
    vocab: int | None = None  # how many ids; none: chosen from the data
    joint: bool = True  # one vocabulary for both languages, or one for each
    symbols: tuple[str, ...] = ()  # kept in one piece always, such as "%s" or "{name}"

    def __post_init__(self) -> None:
        if self.kind not in get_args(TokenizerKind):
            raise ValueError(f"`kind` must be one of {', '.join(get_args(TokenizerKind))}, but is {self.kind!r}")
        if self.vocab is not None and (type(self.vocab) is not int or not 1 <= self.vocab <= 2**20):
            raise ValueError(f"`vocab` must be a number up to {2**20:,}, or none, but is {self.vocab!r}")
        for symbol in self.symbols:
            check_symbol(symbol)
        check_unique("symbols", self.symbols)


def check_symbol(symbol: str) -> None:
    if not symbol or NON_TEXT.search(symbol) or any(character.isspace() for character in symbol):
        raise ValueError(f"`symbols` must be without spaces, control characters and `{SPACE}`, but one is {symbol!r}")
    if symbol in (*SPECIAL_TOKENS, MASK_TOKEN) or any(
        taken.fullmatch(symbol) for taken in (BYTE_PATTERN, TAG_PATTERN, SENTINEL_PATTERN)
    ):
        raise ValueError(f"`symbols` must not hold {symbol!r}: the tokenizer uses it itself; write it in another way")


def check_tags(tags: Sequence[str]) -> None:
    check_unique("tags", tags)
    for tag in tags:
        if not re.fullmatch(r"[\w-]+", tag):
            raise ValueError(f"`tags` must be languages such as de or pt-BR, but one is {tag!r}")


def check_unique(name: str, values: Sequence[str]) -> None:
    twice = [value for value, count in Counter(values).items() if count > 1]
    if twice:
        raise ValueError(f"`{name}` must differ from each other, but {twice[0]!r} stands twice; leave one out")


def train_tokenizer(
    sources: Iterable[str],
    targets: Iterable[str],
    config: TokenizerConfig = TokenizerConfig(),  # noqa: B008 - frozen
    tags: Sequence[str] = (),
    seed: int = 0,
) -> Tokenizer:
    """A tokenizer for translating `sources` into `targets`, with a tag for each language of `tags`.

    The seed decides which lines of a long text are learnt from.
    """
    check_tags(tags)
    controls = [f"<2{tag}>" for tag in tags]
    source, target = (sample_lines(lines, seed, MAX_SAMPLE_CHARS[config.kind]) for lines in (sources, targets))
    if config.joint:
        return Tokenizer.from_files({JOINT_FILES[0]: fit_vocabulary(source + target, config, controls)})
    # Only the source is told which language is wanted.
    models = fit_vocabulary(source, config, controls), fit_vocabulary(target, config, ())
    return Tokenizer.from_files(dict(zip(SEPARATE_FILES, models, strict=True)))


def train_monolingual_tokenizer(
    texts: Iterable[str], config: TokenizerConfig, *, mask: bool = False, sentinels: int = 0, seed: int = 0
) -> Tokenizer:
    """A tokenizer for text of one kind, with a mask for words that are to be told, or sentinels for spans of them.

    A text is learnt from line by line, for lines are what SentencePiece learns from.
    """
    sample = sample_lines(_split_lines(texts), seed, MAX_SAMPLE_CHARS[config.kind])
    controls = [MASK_TOKEN] * mask + [f"<extra_id_{number}>" for number in range(sentinels)]
    return Tokenizer.from_files({JOINT_FILES[0]: fit_vocabulary(sample, config, controls)})


def _split_lines(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        for line in text.split("\n"):
            yield from (line[at : at + MAX_LINE_CHARS] for at in range(0, len(line), MAX_LINE_CHARS))


# --- what is learnt from ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CorpusSample:
    lines: list[str]
    total_chars: int  # characters of the whole text

    def __add__(self, other: CorpusSample) -> CorpusSample:
        return CorpusSample(self.lines + other.lines, self.total_chars + other.total_chars)


def sample_lines(lines: Iterable[str], seed: int, max_chars: int) -> CorpusSample:
    """Lines that fit into `room`, each with the same chance. Whenever they no longer fit, the chance is halved."""
    draws = random.Random(seed)
    kept: list[tuple[float, str]] = []
    seen, held, chance = 0, 0, 1.0
    for line in lines:
        seen += len(line)
        draw = draws.random()
        if draw >= chance:
            continue
        kept.append((draw, line[:MAX_LINE_CHARS]))
        held += len(kept[-1][1])
        if held > max_chars:
            chance /= 2
            kept = [one for one in kept if one[0] < chance]
            held = sum(len(line) for _, line in kept)
    texts = (NON_TEXT.sub(" ", line) for _, line in kept)
    return CorpusSample([text for text in texts if text.strip()], seen)


def count_characters(sample: CorpusSample) -> Counter[str]:
    counts: Counter[str] = Counter()
    for line in sample.lines:
        counts.update(line)
    del counts[" "]
    return counts


def choose_vocab_size(sample: CorpusSample, counts: Counter[str]) -> int:
    """How many ids a text of this length can teach: five times the square root of its letters, and beyond four million
    of them, where most words have their own already, three times as many for a text forty times as long.

    Measured by what a trained model scores (docs/log.md): Multi30k, of 3.8M letters, gives 37.9 BLEU with 3,328 ids and
    40.0 with 10,000, though most of these are met a few times only. Chosen are, for joint BPE:

                       pairs   letters   chosen
        multi30k      29,000      3.8M    9,792
        bible en-twi  29,500      7.1M   12,160
        tatoeba      161,800     11.3M   14,016
        europarl     500,000      160M   31,872
    """
    in_sample = sum(counts.values())
    wide = sum(count for letter, count in counts.items() if letter >= FIRST_CJK)
    length = sample.total_chars * (in_sample + 2 * wide) / in_sample
    root, beyond = 5 * length**0.5, 10_000 * (length / 3.8e6) ** 0.31
    size = round(min(root, beyond) / VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    return min(max(size, MIN_VOCAB), MAX_VOCAB)


def remove_rare_characters(sample: CorpusSample, counts: Counter[str], max_characters: int) -> CorpusSample:
    """The sample with a space for each character that gets no id of its own: the rare, and those behind `most`.

    Bytes spell them; a script of thousands of characters would leave no room for words otherwise.
    """
    total = sum(counts.values())
    kept = {letter for letter, count in counts.most_common(max(max_characters, 1)) if count * RARE_ONE_IN >= total}
    rare = "".join(letter for letter in counts if letter not in kept)
    if not rare:
        return sample
    pattern = re.compile(f"[{re.escape(rare)}]+")
    return replace(sample, lines=[pattern.sub(" ", line) for line in sample.lines])


# --- learning --------------------------------------------------------------------------------------------------------


def fit_vocabulary(sample: CorpusSample, config: TokenizerConfig, controls: Sequence[str]) -> bytes:
    """A SentencePiece model with a size that the text can fill, and ids for what no text ever gives (`controls`)."""
    if not sample.lines:
        raise TokenizerError("there is no text to learn a tokenizer from: every line is empty; look at the corpus")
    counts = count_characters(sample)
    fixed = len(SPECIAL_TOKENS) + len(controls) + 1 + len(config.symbols) + 256 + 1  # with the escape and the space
    size = config.vocab or (choose_vocab_size(sample, counts) if config.kind != "char" else MAX_VOCAB)
    if size <= fixed:
        raise TokenizerError(f"`vocab` must be more than {fixed}, of which 256 are for bytes, but is {size}; raise it")
    most = (size - fixed) if config.kind == "char" else (size - fixed) // 2
    sample = remove_rare_characters(sample, counts, most)
    try:
        return run_sentencepiece(sample.lines, size, config, controls)
    except RuntimeError as error:
        size = parse_max_vocab(size, config, error)
    return run_sentencepiece(sample.lines, size, config, controls)


def parse_max_vocab(size: int, config: TokenizerConfig, error: RuntimeError) -> int:
    """The size that a text can fill when it cannot fill `size`, if that was our choice."""
    found = re.search(r"too high.*<= (\d+)", str(error))
    if not found:
        raise TokenizerError(f"SentencePiece cannot learn a tokenizer from this text: {error}") from error
    possible = int(found[1])
    if config.vocab is not None:
        advice = f"give at most {possible}, or leave it out and it is chosen"
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
        control_symbols=list(controls),  # no text ever gives them: `<2de>` in a text is six letters
        user_defined_symbols=[ESCAPE, *config.symbols],
        # Nothing is lost on the way to numbers and back.
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        byte_fallback=True,
        character_coverage=1.0,  # `without_rare` has decided
        num_threads=1,  # sums in another order would be other sums
        minloglevel=SILENT_LOG_LEVEL,
    )
    return model.getvalue()
