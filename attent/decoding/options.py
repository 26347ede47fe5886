"""Options, requests and results of search and generation, as plain dataclasses without torch.

Options are declared here once: their metadata has the help and the aliases from which `attent.cli` derives flags. A
hypothesis is ranked by its score: the sum of log-probabilities divided by a length penalty; the length includes the end
token if there is one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, Unpack, get_args

from attent.storage.errors import AttentError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


LengthPenaltyType = Literal["avg", "wu", "none"]
EngineName = Literal["torch", "ctranslate2"]
DtypeName = Literal["float32", "bfloat16", "float16"]
OptionGroup = Literal["Common", "Search", "Sampling", "Device"]
StopCheck = Callable[[], bool]  # polled at every step; True cancels the work

SCORE_FORMULAS: dict[LengthPenaltyType, str] = {
    "avg": "score = log_prob / length^alpha",
    "wu": "score = log_prob / ((5 + length) / 6)^alpha",
    "none": "score = log_prob",
}
MAX_EXTRA_TOKENS = 50  # of a target compared with its source (section 6.1 of the paper)


class InputError(AttentError):
    """The text, the model or the language cannot be used as requested."""


@dataclass(frozen=True)
class Option:
    """The command-line form of an option: help, aliases (names of other toolkits) and group."""

    help: str
    aliases: tuple[str, ...]
    group: OptionGroup


T = TypeVar("T")


def option(default: T, help_text: str, aliases: str = "", group: OptionGroup = "Search") -> T:
    """Return a dataclass field with a default and an `Option` in its metadata; spaces separate aliases."""
    return field(default=default, metadata={"option": Option(help_text, tuple(aliases.split()), group)})


class SearchKeywords(TypedDict, total=False):
    """The options of `SearchOptions` and `SamplingOptions` as keyword arguments, for editors and type checkers."""

    beam_size: int
    n_best: int
    length_penalty: float
    length_penalty_type: LengthPenaltyType
    max_length: int | None
    min_length: int
    no_repeat_ngram_size: int
    patience: float | None
    beam_groups: int
    diversity_penalty: float
    prevent_loops: bool
    temperature: float
    top_k: int
    top_p: float
    seed: int


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Sample each token. The same seed, text and position give the same token, whatever else is in the batch."""

    temperature: float = option(
        1.0, "divide the logits by this: below 1 is more conservative, above more diverse", group="Sampling"
    )
    top_k: int = option(
        0,
        "sample from this many most likely tokens; 0: from all",
        "--sampling-topk --random-sampling-topk",
        group="Sampling",
    )
    top_p: float = option(
        1.0,
        "sample from the smallest set of tokens with this total probability (nucleus sampling)",
        "--sampling-topp --random-sampling-topp",
        group="Sampling",
    )
    seed: int = option(1, "the same seed and text give the same sample", group="Sampling")

    def __post_init__(self) -> None:
        if not 0 < self.temperature < float("inf"):
            raise InputError(f"`temperature` must be greater than 0, but is {self.temperature}")
        if self.top_k < 0:
            raise InputError(f"`top_k` must be 1 or more, or 0 for all tokens, but is {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise InputError(f"`top_p` must be greater than 0 and at most 1, but is {self.top_p}")


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """How to search for the best target. The defaults are those of section 6.1 of the paper."""

    beam_size: int = option(
        4, "number of beams, by default 4; 1: greedy search", "-b --beam --num-beams", group="Common"
    )
    n_best: int = option(1, "translations per line", "--nbest --nbest-size --num-return-sequences", group="Common")
    length_penalty: float = option(
        0.6, "alpha, by default 0.6; larger values favor longer translations", "--lenpen --normalize --alpha"
    )
    length_penalty_type: LengthPenaltyType = option(  # noqa: RUF009
        "avg",
        "avg (default): score = log_prob / length^alpha, as in fairseq, Hugging Face and CTranslate2. "
        "wu: score = log_prob / ((5 + length) / 6)^alpha, as in the paper. none: score = log_prob. The length is in "
        "tokens, including the end token",
    )
    max_length: int | None = option(
        None,
        "maximum tokens of a translation, by default those of its source + 50",
        "--max-decoding-length --max-new-tokens",
    )
    min_length: int = option(0, "minimum tokens of a translation", "--min-decoding-length")
    no_repeat_ngram_size: int = option(0, "never generate an n-gram of this size twice", "--block-ngram-repeat")
    patience: float | None = option(
        None, "stop after beam size x patience finished hypotheses; by default when none can become better"
    )
    beam_groups: int = option(
        1,
        "diverse beam search: groups of beams that avoid each other's tokens",
        "--diverse-beam-groups --num-beam-groups",
    )
    diversity_penalty: float = option(
        0.5,
        "penalty of a token for each earlier group that chose it at this step, by default 0.5",
        "--diverse-beam-strength",
    )
    prevent_loops: bool = option(
        True, "search again without loops where a translation repeats itself and its source does not; on by default"
    )
    sampling: SamplingOptions | None = None  # sample `n_best` targets instead of searching
    banned_first: tuple[int, ...] = ()  # tokens that no target starts with
    rank_truncated_equally: bool = False  # rank hypotheses cut at max_length by score; False: after finished ones

    def __post_init__(self) -> None:
        for name in ("beam_size", "n_best", "beam_groups"):
            check_minimum(name, getattr(self, name), 1)
        for name in ("length_penalty", "min_length", "no_repeat_ngram_size", "diversity_penalty"):
            check_minimum(name, getattr(self, name), 0)
        if self.max_length is not None:
            check_minimum("max_length", self.max_length, 1)
        if self.patience is not None:
            check_minimum("patience", self.patience, 1)
        if self.length_penalty_type not in get_args(LengthPenaltyType):
            choices = ", ".join(get_args(LengthPenaltyType))
            raise InputError(f"`length_penalty_type` must be one of {choices}, but is {self.length_penalty_type!r}")
        if self.max_length is not None and self.min_length >= self.max_length:
            raise InputError(
                f"`min_length` must be less than `max_length`={self.max_length}, which includes the end token, but is "
                f"{self.min_length}"
            )
        if self.sampling is None and self.n_best > self.beam_size:
            raise InputError(
                f"`n_best` must be at most `beam_size`={self.beam_size}, but is {self.n_best}; widen the beam"
            )
        if self.beam_size % self.beam_groups:
            raise InputError(
                f"`beam_size`={self.beam_size} must be a multiple of `beam_groups`, but that is {self.beam_groups}"
            )

    def change(self, *, min_beam_size: int = 1, **keywords: Unpack[SearchKeywords]) -> SearchOptions:
        """Return these options with some changed. An option of sampling replaces the search by sampling; a beam size
        that is not given grows with `n_best`.
        """
        changes: dict[str, Any] = dict(keywords)
        if unknown := [name for name in changes if name not in SearchKeywords.__annotations__]:
            near = get_close_matches(unknown[0], SearchKeywords.__annotations__)
            hint = f"did you mean `{near[0]}`?" if near else "see `help(translator.translate)`"
            raise InputError(f"there is no option `{unknown[0]}` of the search; {hint}")
        of_sampling = {item.name: changes.pop(item.name) for item in fields(SamplingOptions) if item.name in changes}
        if of_sampling:
            changes["sampling"] = replace(self.sampling or SamplingOptions(), **of_sampling)
        if "beam_size" not in changes:
            n_best = 1 if changes.get("sampling", self.sampling) else changes.get("n_best", 1)
            size, groups = max(self.beam_size, min_beam_size, n_best), changes.get("beam_groups", self.beam_groups)
            changes["beam_size"] = size if groups < 1 else -(-size // groups) * groups
        return replace(self, **changes)

    @property
    def score_formula(self) -> str:
        formula = SCORE_FORMULAS[self.length_penalty_type]
        return formula if self.length_penalty_type == "none" else f"{formula}, alpha = {self.length_penalty:g}"

    def compute_score_divisor(self, length: int) -> float:
        """Return the divisor of a sum of log-probabilities."""
        match self.length_penalty_type:
            case "avg":
                return float(max(length, 1) ** self.length_penalty)
            case "wu":
                return float(((5 + length) / 6) ** self.length_penalty)
            case "none":
                return 1.0

    def compute_max_length(self, source_length: int) -> int:
        """Return the maximum target length (with the end token) for a source (without its end token)."""
        return source_length + MAX_EXTRA_TOKENS if self.max_length is None else self.max_length


Function = TypeVar("Function", bound=Callable[..., Any])


def list_search_keywords(function: Function) -> Function:
    """Add the search options, which a function takes as `SearchKeywords`, to its signature and docstring for `help`."""
    signature = inspect.signature(function)
    parameters = [item for item in signature.parameters.values() if item.kind is not item.VAR_KEYWORD]
    rows = []
    for item in (*fields(SearchOptions), *fields(SamplingOptions)):
        if "option" in item.metadata:
            kind, default = inspect.Parameter.KEYWORD_ONLY, item.default
            parameters.append(inspect.Parameter(item.name, kind, default=default, annotation=item.type))
            rows.append(f"{item.name:<20}  {item.metadata['option'].help}")
    function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    options = "".join(f"\n    {row}" for row in rows)
    function.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\nOptions of the search:\n{options}\n"
    return function


@dataclass(frozen=True, kw_only=True)
class PhraseConstraints:
    """Prefix, required and banned phrases of one translation."""

    prefix: str = ""
    prefix_is_partial: bool = False  # the last word of the prefix may be continued
    require: tuple[str, ...] = ()
    ban: tuple[str, ...] = ()  # in any case

    def __post_init__(self) -> None:
        for name in ("require", "ban"):
            object.__setattr__(self, name, tuple(getattr(self, name)))  # a list is accepted

    @property
    def prefix_ends_word(self) -> bool:
        """True if a new word must follow the prefix; after punctuation, such as an opening quote, anything may."""
        last = self.prefix[-1:]
        return last.isspace() or (last.isalnum() and not self.prefix_is_partial)

    def extend(
        self, prefix: str | None = None, require: Sequence[str] = (), ban: Sequence[str] = ()
    ) -> PhraseConstraints:
        """Return these constraints with more phrases, and with another prefix unless it is None."""
        if prefix is None and not require and not ban:
            return self
        return PhraseConstraints(
            prefix=self.prefix if prefix is None else prefix,
            prefix_is_partial=self.prefix_is_partial and prefix is None,
            require=(*self.require, *require),
            ban=(*self.ban, *ban),
        )


NO_CONSTRAINTS = PhraseConstraints()


@dataclass(frozen=True)
class Segment:
    """A text, or a sentence of one, to search a translation for."""

    text: str
    constraints: PhraseConstraints = NO_CONSTRAINTS
    rng_key: int = field(default=0, compare=False)
    gap: str = field(default="", compare=False)  # whitespace after it
    context: str = ""  # preceding sentences, see `attent.text.vocabulary`

    @property
    def source(self) -> str:
        """The text that is encoded."""
        return self.context + self.text


@dataclass(frozen=True, kw_only=True)
class SearchRequest:
    """A tokenized source to search a target for."""

    source_ids: Sequence[int]  # with the end token, as from `Tokenizer.encode_source`
    prefix_ids: Sequence[int] = ()  # the target starts with these
    required_phrases: tuple[tuple[int, ...], ...] = ()
    banned_phrases: tuple[str, ...] = ()  # as text
    prefix_ends_word: bool = False  # a new word must follow the prefix
    rng_key: int = 0  # sampling depends on it
    max_length: int = 0  # of the target, with the end token
    forbid_loops: bool = False  # never repeat a short sequence of tokens over and over; set by `prevent_loops`


@dataclass(frozen=True, kw_only=True, repr=False)
class Hypothesis:
    """A target that a search has found; the translator adds text and tokens. It prints as its text."""

    token_ids: tuple[int, ...]  # without the end token
    log_prob: float  # sum over the tokens, including the end token
    score: float  # with the length penalty, see `SearchOptions.score_formula`
    is_finished: bool  # False: truncated at max_length
    text: str = ""
    tokens: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.text!r}, score={self.score:.4f})"


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """The engine and device of a model."""

    engine: EngineName | None = option(  # noqa: RUF009
        None, "by default ctranslate2 (int8) on a CPU for all that it supports, else torch", group="Device"
    )
    device: str | None = option(None, "cuda, cuda:1, mps or cpu; by default the fastest available", group="Device")
    dtype: DtypeName | None = option(  # noqa: RUF009
        None, "of the torch engine: by default bfloat16 on an NVIDIA GPU, else float32", group="Device"
    )
    threads: int | None = option(None, "CPU threads, by default all cores", "--cpu-threads", group="Device")
    batch_tokens: int | None = option(None, "of the torch engine: source tokens x beams per batch", group="Device")


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """How to continue a prompt. By default each token is sampled from the likely ones."""

    max_new_tokens: int = option(
        200, "maximum tokens to generate, including the end token; by default 200", "--max-length -l", group="Common"
    )
    n: int = option(1, "texts per prompt", "-n --num-return-sequences", group="Common")
    stop: tuple[str, ...] = option((), "end the text before this string; may be repeated", group="Common")
    temperature: float = option(
        0.8, "by default 0.8; below 1 is more conservative, above more diverse; 0: greedy", "-t", group="Sampling"
    )
    top_k: int = option(0, "sample from this many most likely tokens; 0: from all", group="Sampling")
    top_p: float = option(
        0.95, "sample from the smallest set of tokens with this total probability, by default 0.95", group="Sampling"
    )
    seed: int = option(
        1, "the same seed gives the same text; by default 1, on the command line random", group="Sampling"
    )

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "n"):
            check_minimum(name, getattr(self, name), 1)
        check_minimum("temperature", self.temperature, 0)
        if not all(self.stop):
            raise InputError("`stop` must be non-empty strings, but one is empty; leave it out")
        if self.n > 1 and not self.temperature:
            raise InputError(
                f"`n` must be 1 for greedy search, since all texts would be equal, but is {self.n}; set a "
                f"`temperature` above 0"
            )
        _ = self.sampling

    @property
    def sampling(self) -> SamplingOptions | None:
        if not self.temperature:
            return None
        return SamplingOptions(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, seed=self.seed)


FinishReason = Literal["end", "stop", "length"]


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A text that continues a prompt."""

    prompt: str
    prompt_tokens: int
    text: str  # up to the end, or to the stop string
    token_ids: tuple[int, ...]  # without the end token; up to the token that completes a stop string
    log_prob: float  # sum over these tokens and the end token if there is one
    finish_reason: FinishReason  # end: end token; stop: stop string; length: truncated


def check_minimum(name: str, value: float, minimum: float) -> None:
    if not isinstance(value, int | float) or not minimum <= value < float("inf"):
        raise InputError(f"`{name}` must be {minimum} or more, but is {value!r}")


# --- engines list the options that they support; any other goes to the torch engine, so that none is ever ignored ----


def find_unsupported_field(value: DataclassInstance, supported: frozenset[str]) -> str | None:
    """Return the first field that differs from its default and is not in `supported`."""
    for name, default in list_unsupported_fields(type(value), supported):
        if (getattr(value, name) or None) != (default or None):  # empty is empty: () and []
            return name
    return None


@cache
def list_unsupported_fields(kind: type[DataclassInstance], supported: frozenset[str]) -> list[tuple[str, Any]]:
    return [(field.name, field.default) for field in fields(kind) if field.name not in supported]
