"""What each head does, in numbers averaged over the tokens of many sentences, and in a few words chosen by them.

One pass over given pairs (`measure`) with sums that run along: no weights are kept. The weights of a single sentence
that were recorded already, of whatever model, give the same columns (`measure_trace`). Showing them is left to others.

A share is averaged over the tokens that had a choice: something of the kind to look at, and something else besides. So
the decoder's first step, which sees the start alone, counts nowhere.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from attent import settings
from attent.decoding.alignment import WORD_START_MARKERS, TokenWordMap, compute_fingerprint, count_mutual_links
from attent.decoding.forced_decoding import (
    EncodedPair,
    TeacherForcingBatch,
    batch_pairs,
    check_pairs,
    encode_pairs,
    eval_mode,
)
from attent.formatting import format_percent
from attent.inspection.attention_trace import unpack_weights
from attent.inspection.record import attach_taps
from attent.models import Seq2Seq
from attent.nn import AttentionRecord, attention_layers

if TYPE_CHECKING:
    from attent.text.tokenizer import Tokenizer
    from attent.text.vocabulary import Vocabulary

HEAD_STATS_FILE = "heads.json"
DEFAULT_MAX_PAIRS = 500  # pairs: with twice as many, no share of any head moved by more than 0.015
BATCH_TOKENS = 2048  # of one side, filled up, that go through the model at once
MAX_TOKENS = 512  # tokens of one side: the squares of longer ones would need gigabytes
MAX_QUERY_ROWS = 256  # tokens of a longer sentence that are asked where they look, at even distances
NO_SPELLING = -1  # the number of a token that is like no other

StatUnit = Literal["share", "bits", "tokens", "correlation"]


MIN_WORDS = 2  # of each side: one word has nobody to compete with for its links


class HeadStatsError(ValueError):
    """Heads that cannot be measured, in a sentence."""


@dataclass(frozen=True, kw_only=True)
class HeadValues:
    """Of one head; None: it has no such thing to look at."""

    itself: float | None = None
    previous: float | None = None
    next: float | None = None
    first: float | None = None
    end: float | None = None
    punctuation: float | None = None
    same: float | None = None
    shared: float | None = None
    distance: float | None = None
    entropy: float | None = None
    evenness: float | None = None
    confidence: float | None = None
    alignment: float | None = None
    written: float | None = None
    read: float | None = None
    diagonal: float | None = None


@dataclass(frozen=True)
class StatColumn:
    """What a value means."""

    key: str
    label: str
    unit: StatUnit
    help: str


STAT_COLUMNS = (
    StatColumn(
        "itself", "itself", "share", "Weight on the token itself; in a decoder, on the one that it has just read."
    ),
    StatColumn("previous", "previous", "share", "Weight on the token before it, where that is not the first."),
    StatColumn("next", "next", "share", "Weight on the token behind it, where that may be seen and is not the end."),
    StatColumn(
        "first",
        "first",
        "share",
        "Weight on the first token, in a decoder the start. In self-attention the first two tokens are left out, for "
        "which it is themselves or their neighbour.",
    ),
    StatColumn(
        "end",
        "end",
        "share",
        "Weight on the end or a separator, where heads rest that have nothing to say. In self-attention it and the "
        "token before it are left out, for which it is themselves or their neighbour.",
    ),
    StatColumn(
        "punctuation", "punctuation", "share", "Weight on punctuation other than the token itself, if there is any."
    ),
    StatColumn(
        "same",
        "same token",
        "share",
        "Weight on tokens spelled alike elsewhere, of the tokens that have such. In cross-attention: like the token "
        "that is being written, as names and numbers are.",
    ),
    StatColumn(
        "shared",
        "one for all",
        "share",
        "Weight on the token that a sentence looks at most: near 100% where every token looks at the same one.",
    ),
    StatColumn("distance", "distance", "tokens", "How many tokens away it looks, on average."),
    StatColumn(
        "entropy", "entropy", "bits", "0: it looks at one token alone. 3 bits: as spread as evenly over 8 tokens."
    ),
    StatColumn("evenness", "evenness", "share", "Entropy as a share of the most that there can be: 100% is all alike."),
    StatColumn(
        "confidence", "confidence", "share", "Each row's greatest weight, the end left out (Voita et al. 2019)."
    ),
    StatColumn(
        "alignment", "alignment", "share", "The better of: when written, when read. Chance alone gives up to half."
    ),
    StatColumn(
        "written",
        "aligned when written",
        "share",
        "Links that are the best of both their words: of the source words that target words look at most while they "
        "are written, those that no other target word looks at more.",
    ),
    StatColumn("read", "aligned when read", "share", "The same one step later, when the decoder has read the word."),
    StatColumn(
        "diagonal",
        "diagonal",
        "correlation",
        "Correlation between where a target token stands and where it looks: 1 on the diagonal, 0 without order.",
    ),
)


@dataclass(frozen=True, kw_only=True)
class HeadStats:
    path: str  # of its attention, such as decoder.blocks.3.cross_attn
    head: int  # from 0
    says: str
    values: HeadValues


@dataclass(frozen=True, kw_only=True)
class HeadStatsReport:
    """`heads.json`: what every head of a model does."""

    sentences: int
    dataset: str  # what sentences they were
    heads: tuple[HeadStats, ...]
    weights_digest: str = ""  # the mark of the weights

    def to_document(self) -> dict[str, Any]:
        """The section `properties` of a document, with those columns that any head has."""
        rows = [asdict(head) for head in self.heads]
        for row in rows:
            row["values"] = {key: value if value is None else round(value, 4) for key, value in row["values"].items()}
        columns = [asdict(each) for each in STAT_COLUMNS if any(row["values"][each.key] is not None for row in rows)]
        for row in rows:
            row["values"] = {column["key"]: row["values"][column["key"]] for column in columns}
        return {"sentences": self.sentences, "of": self.dataset, "columns": columns, "heads": rows}


def save_head_stats(folder: Path, head_stats: HeadStatsReport) -> None:
    settings.write_json(settings.to_dict(head_stats), Path(folder) / HEAD_STATS_FILE)


def load_head_stats(folder: Path, model: nn.Module) -> HeadStatsReport | None:
    """What the folder holds of these very weights; None: nothing, or of other weights."""
    path = Path(folder) / HEAD_STATS_FILE
    if not path.exists():
        return None
    found = settings.from_dict(HeadStatsReport, settings.read_json(path), where=str(path))
    return found if found.weights_digest == compute_fingerprint(model) else None


# ---- over many pairs -------------------------------------------------------------------------------------------------


def measure_heads(
    model: Seq2Seq,
    tokenizer: Tokenizer,
    sources: Sequence[str],
    targets: Sequence[str],
    *,
    to: str | None = None,
    max_pairs: int = DEFAULT_MAX_PAIRS,
    dataset: str = "the pairs that were given",
    progress: Callable[[int, int], None] | None = None,
    batch_tokens: int = BATCH_TOKENS,
) -> HeadStatsReport:
    """What each head does while the model reads the sources and writes the targets.

    to        the language of the targets, for a model trained with tags
    most      if there are more pairs, so many are taken, at even distances
    progress  is told after each batch how many pairs are done, and of how many
    """
    check_pairs(sources, targets)
    chosen = sample_evenly(len(sources), max_pairs)
    sources, targets = [sources[i] for i in chosen], [targets[i] for i in chosen]
    if not sources:
        raise HeadStatsError("there must be a pair to measure heads with, but there is none; give some")
    rows = encode_pairs(model, tokenizer, sources, targets, to, min(batch_tokens, MAX_TOKENS))
    sums = {path: HeadAccumulator(layer.heads) for path, layer in attention_layers(model).items()}
    done = 0
    with eval_mode(model), torch.no_grad():
        for places in batch_pairs([row.source for row in rows], [row.target for row in rows], batch_tokens):
            some = [rows[i] for i in places]
            words = [TokenWordMap.from_row(tokenizer, sources[i], targets[i], rows[i]) for i in places]
            with attach_stat_taps(model, BatchKeyCategories(model, tokenizer, some, words), sums):
                TeacherForcingBatch.from_ids(
                    model, [row.source for row in some], [row.target for row in some]
                ).compute_states(model)
            done += len(places)
            if progress is not None:
                progress(done, len(rows))
    return HeadStatsReport(
        sentences=len(rows),
        dataset=dataset,
        heads=tuple(describe_heads(sums)),
        weights_digest=compute_fingerprint(model),
    )


def sample_evenly(count: int, max_count: int) -> list[int]:
    """At most so many places, from the beginning to the end: a corpus often is in some order."""
    if max_count < 1:
        raise HeadStatsError(f"`most` must be 1 or more, but is {max_count}")
    taken = min(count, max_count)
    return [i * count // taken for i in range(taken)]


def attach_stat_taps(
    model: nn.Module, categories: BatchKeyCategories, accumulators: Mapping[str, HeadAccumulator]
) -> AbstractContextManager[None]:
    """While the block lasts, what each layer does is added up at once."""

    def tap(path: str) -> Callable[[AttentionRecord], None]:
        return lambda look: accumulators[path].observe(look.weights.float(), categories.get_for_layer(path, look))

    layers = attention_layers(model)
    return attach_taps(layers, {path: tap(path) for path in layers})


class BatchKeyCategories:
    """What there is to look at in a batch: of every layer of one kind the same, so it is worked out once."""

    def __init__(
        self, model: Seq2Seq, tokenizer: Tokenizer, rows: Sequence[EncodedPair], word_pairs: Sequence[TokenWordMap]
    ) -> None:
        numbers: dict[str, int] = {}
        start = model.config.start_id
        self.source = build_token_features(tokenizer.source, [row.source for row in rows], numbers)
        self.target = build_token_features(tokenizer.target, [row.target for row in rows], numbers)
        self.decoder_input = build_token_features(
            tokenizer.target, [[start, *row.target[:-1]] for row in rows], numbers, special_ids=(start,)
        )
        self.word_pairs = word_pairs
        self.cache: dict[tuple[str, str], KeyCategories] = {}

    def get_for_layer(self, path: str, record: AttentionRecord) -> KeyCategories:
        kind = path.partition(".")[0], path.rpartition(".")[2]
        if kind not in self.cache:
            self.cache[kind] = self.build_categories(*kind, record)
        return self.cache[kind]

    def build_categories(self, stack: str, sublayer: str, record: AttentionRecord) -> KeyCategories:
        B, _, Tq, Tk = record.weights.shape
        allowed = record.mask.to_dense(B, Tq, Tk, record.weights.device)[:, 0].cpu()
        if sublayer == "cross_attn":
            return KeyCategories.from_features(
                self.target, self.source, allowed, is_self=False, word_pairs=self.word_pairs
            )
        both = self.source if stack == "encoder" else self.decoder_input
        return KeyCategories.from_features(both, both, allowed, is_self=True)


# ---- tokens ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TokenFeatures:
    """The tokens of some sentences, (B, T) each, filled up on the right."""

    spelling_ids: Tensor  # the same number where two tokens are spelled alike
    is_end: Tensor
    is_punctuation: Tensor
    is_token: Tensor


def build_token_features(
    vocabulary: Vocabulary, rows: Sequence[Sequence[int]], spelling_ids: dict[str, int], special_ids: Sequence[int] = ()
) -> TokenFeatures:
    ends = {vocabulary.end} - set(
        special_ids
    )  # a decoder that starts from the end (T5 from padding) has no end to read
    silent = {vocabulary.end, vocabulary.pad, vocabulary.start, vocabulary.unknown, *special_ids}
    silent |= {vocabulary.get_tag_id(language) for language in vocabulary.tags}
    known = dict(iter_pieces(vocabulary, {i for row in rows for i in row} - silent))
    return TokenFeatures(
        spelling_ids=pad_rows(
            [[get_spelling_id(known.get(i, ""), spelling_ids) for i in row] for row in rows], NO_SPELLING
        ),
        is_end=pad_rows([[i in ends for i in row] for row in rows], False),
        is_punctuation=pad_rows([[is_punctuation(known.get(i, "")) for i in row] for row in rows], False),
        is_token=pad_rows([[True for _ in row] for row in rows], False),
    )


def iter_pieces(vocabulary: Vocabulary, token_ids: Iterable[int]) -> Iterator[tuple[int, str]]:
    inside = [i for i in token_ids if i < vocabulary.size]  # an imported model may have rows that no piece belongs to
    return zip(inside, vocabulary.to_pieces(inside), strict=True)


def get_spelling_id(piece: str, spelling_ids: dict[str, int]) -> int:
    return spelling_ids.setdefault(piece, len(spelling_ids)) if piece else NO_SPELLING


def is_punctuation(piece: str) -> bool:
    """Of signs alone: `▁"`, `.`, `--`; also currency and the like."""
    signs = piece.lstrip("".join(WORD_START_MARKERS)).strip()
    return bool(signs) and all(unicodedata.category(sign)[0] in "PS" for sign in signs)


def pad_rows(rows: Sequence[Sequence[int]], pad_value: int) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[pad_value] * (longest - len(row))] for row in rows])


# ---- what there is to look at ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class KeyCategories:
    """Of some sentences: who had a choice, and where each kind of token stands for them."""

    has_choice: Tensor  # (B, Tq) tokens that could look at more than one
    num_visible: Tensor  # (B, Tq) at how many
    category_masks: Mapping[str, Tensor]  # (B, Tq, Tk), empty rows for those who had no choice
    distances: Tensor | None  # (Tq, Tk), in self-attention
    is_end: Tensor  # (B, 1, 1, Tk)
    position_moments: Tensor | None  # (6, B, Tq, Tk), in cross-attention: of the two places, each from 0 to 1
    word_pairs: Sequence[TokenWordMap] = ()

    def select_rows(self, rows: Tensor) -> KeyCategories:
        """For some of those who look; what has gaps tells no alignment."""
        if len(rows) == self.has_choice.shape[1]:
            return self
        return replace(
            self,
            has_choice=self.has_choice[:, rows],
            num_visible=self.num_visible[:, rows],
            category_masks={key: where[:, rows] for key, where in self.category_masks.items()},
            distances=None if self.distances is None else self.distances[rows],
            position_moments=None if self.position_moments is None else self.position_moments[:, :, rows],
            word_pairs=(),
        )

    @classmethod
    def from_features(
        cls,
        queries: TokenFeatures,
        keys: TokenFeatures,
        allowed: Tensor,
        *,
        is_self: bool,
        word_pairs: Sequence[TokenWordMap] = (),
    ) -> KeyCategories:
        seen = queries.is_token[:, :, None] & keys.is_token[:, None] & allowed
        visible = seen.sum(-1)
        choice = (visible > 1)[..., None]
        kinds = {key: where & seen & choice for key, where in build_category_masks(queries, keys, is_self).items()}
        q, k = (torch.arange(n)[:, None] for n in seen.shape[1:])
        return cls(
            has_choice=visible > 1,
            num_visible=visible,
            category_masks=kinds,
            distances=(q - k.T).abs() if is_self else None,
            is_end=keys.is_end[:, None, None],
            position_moments=None if is_self else compute_position_moments(queries.is_token, keys.is_token),
            word_pairs=word_pairs,
        )


def build_category_masks(queries: TokenFeatures, keys: TokenFeatures, is_self: bool) -> dict[str, Tensor]:
    """For each kind, (B, Tq, Tk): is that token of the kind, for the one that looks?"""
    q, k = torch.arange(queries.is_token.shape[1])[:, None], torch.arange(keys.is_token.shape[1])
    ends, marks = keys.is_end[:, None], keys.is_punctuation[:, None]
    alike = (queries.spelling_ids[:, :, None] == keys.spelling_ids[:, None]) & (keys.spelling_ids != NO_SPELLING)[
        :, None
    ]
    if not is_self:
        return {"first": (k == 0) & (q >= 0), "end": ends, "punctuation": marks, "same": alike}
    return {
        "itself": k == q,
        "previous": (k == q - 1) & (k > 0),
        "next": (k == q + 1) & ~ends,
        "first": (k == 0) & (q > 1),
        "end": ends & (k != q) & (k != q + 1),
        "punctuation": marks & (k != q),
        "same": alike & (k != q),
    }


def compute_position_moments(is_query: Tensor, is_key: Tensor) -> Tensor:
    """1, x, y, xx, yy, xy of the places of both sides, (6, B, Tq, Tk); nothing of filler."""
    x, y = compute_relative_positions(is_query)[:, :, None], compute_relative_positions(is_key)[:, None]
    real = is_query[:, :, None] & is_key[:, None]
    one = torch.ones(())
    return torch.stack([real * each for each in (one, x, y, x * x, y * y, x * y)])


def compute_relative_positions(is_token: Tensor) -> Tensor:
    """From 0 for a sentence's first token to 1 for its last."""
    return torch.arange(is_token.shape[1]) / (is_token.sum(1, keepdim=True) - 1).clamp(min=1)


# ---- sums that run along ---------------------------------------------------------------------------------------------


@dataclass
class HeadAccumulator:
    """Of the heads of one layer, over all that was seen so far."""

    num_heads: int
    head_indices: tuple[int, ...] | None = None  # of these heads; None: from 0
    is_self: bool = True
    is_causal: bool = True  # until something later was seen
    totals: dict[str, Tensor] = field(default_factory=dict)  # (H, 2): a sum, and of how many
    position_moments: Tensor | None = None  # (6, H)

    def add(self, key: str, sums: Tensor, count: Tensor | float) -> None:
        new = torch.stack([sums.double().cpu(), torch.as_tensor(count).double().cpu().expand(self.num_heads)], -1)
        self.totals[key] = self.totals.get(key, torch.zeros(self.num_heads, 2, dtype=torch.float64)) + new

    def observe(self, weights: Tensor, categories: KeyCategories) -> None:
        """(B, H, Tq, Tk), and what there was to look at."""
        weights = weights.cpu()
        rows = categories.has_choice[:, None].float()  # (B, 1, Tq)
        count = categories.has_choice.sum()
        for key, where in categories.category_masks.items():
            self.add(key, torch.einsum("bhqk,bqk->h", weights, where.float()), where.any(-1).sum())
        bits = torch.special.entr(weights).sum(-1) / math.log(2)
        self.add("entropy", (bits * rows).sum((0, 2)), count)
        self.add(
            "possible",
            (categories.num_visible.clamp(min=1).log2() * categories.has_choice).sum().expand(self.num_heads),
            count,
        )
        tokens = rows.sum(-1).clamp(min=1)[..., None]  # (B, 1, 1)
        most = ((weights * rows[..., None]).sum(2) / tokens).amax(-1)  # (B, H)
        self.add("shared", most.sum(0), categories.has_choice.any(-1).sum())
        self.add("confidence", (weights.masked_fill(categories.is_end, 0).amax(-1) * rows).sum((0, 2)), count)
        if categories.distances is not None:
            away = (weights * categories.distances).sum(-1)
            self.add("distance", (away * rows).sum((0, 2)), count)
        self.observe_alignment(weights, categories)

    def observe_alignment(self, weights: Tensor, categories: KeyCategories) -> None:
        self.is_self = categories.position_moments is None
        self.is_causal = "next" not in categories.category_masks or (
            self.is_causal and not bool(categories.category_masks["next"].any())
        )
        if categories.position_moments is not None:
            new = torch.einsum("bhqk,mbqk->mh", weights, categories.position_moments).double()
            self.position_moments = new if self.position_moments is None else self.position_moments + new
        for row, words in zip(weights, categories.word_pairs, strict=False):
            for key, links in (
                ("written", count_word_links(row, words, 0)),
                ("read", count_word_links(row, words, 1)),
            ):
                self.add(key, links[:, 0], links[:, 1])

    def compute_values(self, head: int) -> HeadValues:
        means = {key: compute_mean(*pair[head].tolist()) for key, pair in self.totals.items()}
        possible = means.pop("possible", None)
        entropy = means.get("entropy")
        means["evenness"] = None if entropy is None or not possible else entropy / possible
        aligned = [share for key in ("written", "read") if (share := means.get(key)) is not None]
        means["alignment"] = max(aligned, default=None)
        means["diagonal"] = (
            None if self.position_moments is None else compute_correlation(self.position_moments[:, head].tolist())
        )
        return HeadValues(**means)


def count_word_links(weights: Tensor, word_pair: TokenWordMap, step_offset: int) -> Tensor:
    """(H, Tq, Tk) of one pair, maybe with filler -> (H, 2): links that are the best of both their words; all."""
    if word_pair.source_word_count < MIN_WORDS or word_pair.target_word_count < MIN_WORDS:
        return torch.zeros(weights.shape[0], 2)
    tokens = weights[:, step_offset : step_offset + len(word_pair.target_word_ids), : len(word_pair.source_word_ids)]
    word_pair = replace(
        word_pair, target_word_ids=word_pair.target_word_ids[: tokens.shape[1]]
    )  # without an end, the last was never read
    return count_mutual_links(word_pair.pool_by_word(tokens))


def compute_mean(total: float, count: float) -> float | None:
    return total / count if count else None


def compute_correlation(sums: Sequence[float]) -> float | None:
    """From the sums of 1, x, y, xx, yy, xy. Without order where it always looks at one place."""
    n, x, y, xx, yy, xy = sums
    if not n:
        return None
    spread = max(0.0, xx / n - (x / n) ** 2) * max(0.0, yy / n - (y / n) ** 2)
    return (xy / n - x * y / n**2) / math.sqrt(spread) if spread > 1e-12 else 0.0


def describe_heads(
    accumulators: Mapping[str, HeadAccumulator], self_names: Mapping[str, str] | None = None
) -> Iterator[HeadStats]:
    """`own`: what tokens are called for those who look at their own text; None: as in a text."""
    for path, each in accumulators.items():
        names = self_names or (DECODER_NAMES if each.is_causal else SELF_ATTENTION_NAMES)
        for place, head in enumerate(each.head_indices or range(each.num_heads)):
            values = each.compute_values(place)
            words = describe_cross_attention(values) if not each.is_self else describe_self_attention(values, names)
            yield HeadStats(path=path, head=head, says=words, values=values)


# ---- in words --------------------------------------------------------------------------------------------------------

DOMINANT_SHARE = 0.5  # a share that is a habit
COMBINED_SHARE = 0.6  # two kinds that are one habit between them
ALIGNED_SHARE, LOOSELY_ALIGNED_SHARE = (
    0.7,
    0.6,
)  # of the links mutual: chance gives about half, and of a few words any share
MIN_CONFIDENCE = 0.5  # the confidence of a head whose links are to be believed
LEANING_SHARE, LEANING_MARGIN = 0.33, 1.5  # a share that is a leaning, if it is so many times the next one
UNIFORM_EVENNESS, WIDE_EVENNESS = 0.9, 0.8  # of the greatest entropy
SHARP_EVENNESS = 0.15

SELF_ATTENTION_NAMES = {
    "itself": "itself",
    "previous": "the previous token",
    "next": "the next token",
    "first": "the first token",
    "end": "the end",
    "punctuation": "punctuation",
    "same": "the same token elsewhere",
    "token": "token",
    "text": "sentence",
}
DECODER_NAMES = SELF_ATTENTION_NAMES | {
    "itself": "the token just read",
    "previous": "the token before the one just read",
    "first": "the start",
}
PATCH_NAMES = SELF_ATTENTION_NAMES | {
    "previous": "the patch on its left",
    "next": "the patch on its right",
    "first": "the class token",
    "token": "patch",
    "text": "picture",
}
SINK_CATEGORIES = ("first", "end", "punctuation")


def describe_self_attention(values: HeadValues, names: Mapping[str, str] = SELF_ATTENTION_NAMES) -> str:
    """One habit of self-attention, in words; `names` of what it looks at."""
    shares = get_shares(values, ("itself", "previous", "next", *SINK_CATEGORIES))
    if values.same is not None and values.same >= DOMINANT_SHARE > max(shares.values(), default=0.0):
        return f"looks at {names['same']} ({format_percent(values.same)} where there is one)"
    return (
        describe_dominant_key(shares, names)
        or describe_end_and_punctuation(shares, names)
        or describe_local_focus(shares, names)
        or describe_spread(values)
        or describe_sharp_focus(values, names)
        or describe_preference(values, shares, names)
        or describe_mixed_pattern(values, shares, names)
    )


def describe_cross_attention(values: HeadValues) -> str:
    """One habit of cross-attention, in words."""
    shares = get_shares(values, SINK_CATEGORIES)
    resting, aligned = (
        describe_dominant_key(shares, SELF_ATTENTION_NAMES)
        or describe_end_and_punctuation(shares, SELF_ATTENTION_NAMES),
        describe_alignment(values),
    )
    if resting and (rest := aligned or describe_loose_alignment(values)):
        return f"{resting}; what is left {rest}"
    return (
        resting
        or aligned
        or describe_copying(values)
        or describe_spread(values)
        or describe_loose_alignment(values)
        or describe_sharp_focus(values)
        or describe_preference(values, shares, SELF_ATTENTION_NAMES)
        or describe_mixed_pattern(values, {}, SELF_ATTENTION_NAMES)
    )


def describe_dominant_key(shares: Mapping[str, float], names: Mapping[str, str]) -> str:
    best = max(shares, key=shares.__getitem__, default=None)
    if best is None or shares[best] < DOMINANT_SHARE:
        return ""
    return f"{'rests on' if best in SINK_CATEGORIES else 'looks at'} {names[best]} ({format_percent(shares[best])})"


def describe_end_and_punctuation(shares: Mapping[str, float], names: Mapping[str, str]) -> str:
    """The end and the full stop before it are looked at alike."""
    both = [shares.get(key, 0.0) for key in ("end", "punctuation")]
    if sum(both) < COMBINED_SHARE:
        return ""
    return (
        f"rests on {names['end']} and on {names['punctuation']} ({format_percent(both[0])} + {format_percent(both[1])})"
    )


def describe_local_focus(shares: Mapping[str, float], names: Mapping[str, str]) -> str:
    some = {key: shares[key] for key in ("previous", "itself", "next") if key in shares}
    if sum(some.values()) < COMBINED_SHARE:
        return ""
    return "stays near: " + ", ".join(f"{names[key]} {format_percent(share)}" for key, share in some.items())


def describe_sharp_focus(values: HeadValues, names: Mapping[str, str] = SELF_ATTENTION_NAMES) -> str:
    if values.shared is not None and values.shared >= DOMINANT_SHARE:
        one = f"one {names['token']} for the whole {names['text']}"
        return f"picks {one} ({format_percent(values.shared)}), wherever it stands"
    if values.evenness is None or values.evenness > SHARP_EVENNESS:
        return ""
    return f"picks one {names['token']} by what it is, not by where it stands ({format_entropy(values)})"


def get_shares(values: HeadValues, keys: Sequence[str]) -> dict[str, float]:
    return {key: share for key in keys if (share := getattr(values, key)) is not None}


def describe_alignment(values: HeadValues) -> str:
    if values.alignment is None or values.alignment < ALIGNED_SHARE or (values.confidence or 0.0) < MIN_CONFIDENCE:
        return ""
    step = "written" if values.alignment == values.written else "read"
    return f"aligns: {format_percent(values.alignment)} of its links are mutual, when the word is {step}"


def describe_copying(values: HeadValues) -> str:
    """Of texts whose words are not to be aligned, such as numbers that are written anew."""
    if values.alignment is not None or values.same is None or values.same < DOMINANT_SHARE:
        return ""
    return f"copies: looks at the token that is being written ({format_percent(values.same)} where there is one)"


def describe_loose_alignment(values: HeadValues) -> str:
    if values.alignment is None or values.alignment < LOOSELY_ALIGNED_SHARE:
        return ""
    return f"aligns loosely ({format_percent(values.alignment)} of its links are mutual)"


def describe_spread(values: HeadValues) -> str:
    if values.evenness is None or values.evenness < WIDE_EVENNESS:
        return ""
    return (
        f"spreads {'over everything' if values.evenness >= UNIFORM_EVENNESS else 'widely'} ({format_entropy(values)})"
    )


def describe_preference(values: HeadValues, shares: Mapping[str, float], names: Mapping[str, str]) -> str:
    best, second = [*sorted(shares, key=lambda key: -shares[key]), None, None][:2]
    if best is None or shares[best] < max(LEANING_SHARE, LEANING_MARGIN * shares.get(second or "", 0.0)):
        return ""
    return f"leans towards {names[best]} ({format_percent(shares[best])}), {format_entropy(values)}"


def describe_mixed_pattern(values: HeadValues, shares: Mapping[str, float], names: Mapping[str, str]) -> str:
    parts = [f"{format_percent(values.alignment)} of its links are mutual"] if values.alignment is not None else []
    most = sorted(shares, key=lambda key: -shares[key])[:2]
    parts += [f"{names[key]} {format_percent(shares[key])}" for key in most]
    parts += [format_entropy(values)] if values.entropy is not None else []
    return "no single habit: " + (", ".join(parts) or "nothing to choose from")


def format_entropy(values: HeadValues) -> str:
    assert values.entropy is not None
    possible = f" of {values.entropy / values.evenness:.1f}" if values.evenness else ""
    return f"{values.entropy:.1f} bits{possible}"


# ---- of one sentence -------------------------------------------------------------------------------------------------


def measure_document_heads(document: Mapping[str, Any]) -> dict[str, Any]:
    """The section `properties` of a document, from what the document itself holds."""
    found = measure_trace_heads(document["layers"], document["sides"]).to_document()
    if any(side.get("image") for side in document["sides"].values()):
        found["columns"] = [column | IMAGE_COLUMN_TEXTS.get(column["key"], {}) for column in found["columns"]]
    return found


IMAGE_COLUMN_TEXTS = {  # what the columns are there
    "itself": {"help": "Weight on itself."},
    "previous": {"label": "left", "help": "Weight on the patch on its left, where there is one."},
    "next": {"label": "right", "help": "Weight on the patch on its right, where there is one."},
    "first": {"label": "class", "help": "Weight on the class token, of the patches."},
    "shared": {"help": "Weight on the patch that is looked at most: near 100% where all look at the same one."},
    "distance": {"help": "How many patches away it looks, on average, as the crow flies."},
    "entropy": {"help": "0: it looks at one patch alone. 3 bits: as spread as evenly over 8 patches."},
    "confidence": {"help": "Each patch's greatest weight, on average."},
}


def measure_trace_heads(layers: Iterable[Mapping[str, Any]], sides: Mapping[str, Mapping[str, Any]]) -> HeadStatsReport:
    """The same of one sentence: `layers` and `sides` as a document has them."""
    numbers: dict[str, int] = {}
    tokens = {name: build_document_features(each["tokens"], numbers) for name, each in sides.items()}
    sums: dict[str, HeadAccumulator] = {}
    scenes: dict[tuple[str, str, bool], KeyCategories] = {}
    for layer in layers:
        kind = layer["queries"], layer["keys"], bool(layer["causal"])
        if kind not in scenes:
            scenes[kind] = categorize_layer_keys(layer, tokens, sides)
        shape = tuple(tokens[name].is_token.shape[1] for name in kind[:2])
        most = MAX_QUERY_ROWS if math.prod(shape) > MAX_TOKENS**2 else max(shape)
        rows = torch.tensor(sample_evenly(shape[0], max(1, most)), dtype=torch.long)
        weights = unpack_weights(layer, shape[1], rows)
        heads = layer.get("numbers", range(weights.shape[0]))
        sums[layer["path"]] = HeadAccumulator(weights.shape[0], head_indices=tuple(heads))
        if weights.numel():
            sums[layer["path"]].observe(weights[None], scenes[kind].select_rows(rows))
    picture = any(side.get("image") for side in sides.values())
    own = (
        PATCH_NAMES if picture else SELF_ATTENTION_NAMES if len(sides) == 1 else None
    )  # a text that is read names each token by itself
    of = f"this {'picture' if picture else 'sentence'} alone"
    return HeadStatsReport(sentences=1, dataset=of, heads=tuple(describe_heads(sums, own)))


def categorize_layer_keys(
    layer: Mapping[str, Any], features: Mapping[str, TokenFeatures], sides: Mapping[str, Any]
) -> KeyCategories:
    queries, keys = features[layer["queries"]], features[layer["keys"]]
    allowed = torch.ones(1, queries.is_token.shape[1], keys.is_token.shape[1], dtype=torch.bool)
    if layer["kind"] == "self":
        scene = KeyCategories.from_features(keys, keys, allowed.tril() if layer["causal"] else allowed, is_self=True)
        image = sides[layer["keys"]].get("image")
        return categorize_patches(scene, image["columns"], image.get("before", 0)) if image else scene
    words = build_word_pair(sides[layer["queries"]]["tokens"], sides[layer["keys"]]["tokens"])
    return KeyCategories.from_features(queries, keys, allowed, is_self=False, word_pairs=[words])


def categorize_patches(categories: KeyCategories, columns: int, num_prefix_tokens: int) -> KeyCategories:
    """Of patches: the one on the left is in the same row, distance is as the crow flies, and what stands before them
    (the class token) is nowhere."""
    place = torch.arange(categories.has_choice.shape[1]) - num_prefix_tokens
    row, column, patch = place.div(columns, rounding_mode="floor"), place.remainder(columns), place >= 0
    both = patch[:, None] & patch[None]
    away = torch.stack([row, column], -1).float()
    beside = (row[:, None] == row[None]) & both
    kinds = {
        key: where & beside if key in ("previous", "next") else where
        for key, where in categories.category_masks.items()
    }
    if not num_prefix_tokens:
        kinds.pop("first")  # a corner of the picture
    return replace(categories, category_masks=kinds, distances=torch.cdist(away, away) * both)


def build_document_features(tokens: Sequence[Mapping[str, Any]], spelling_ids: dict[str, int]) -> TokenFeatures:
    named = ["" if token["special"] not in (None, "byte") else token["piece"] for token in tokens]
    return TokenFeatures(
        spelling_ids=torch.tensor([[get_spelling_id(piece, spelling_ids) for piece in named]]),
        is_end=torch.tensor([[token["special"] == "end" for token in tokens]], dtype=torch.bool),
        is_punctuation=torch.tensor([[is_punctuation(piece) for piece in named]], dtype=torch.bool),
        is_token=torch.ones(1, len(tokens), dtype=torch.bool),
    )


def build_word_pair(target: Sequence[Mapping[str, Any]], source: Sequence[Mapping[str, Any]]) -> TokenWordMap:
    """By the spaces before tokens; the target without its end, as `mutual` looks at it."""
    written = target[:-1] if target and target[-1]["special"] == "end" else target
    target_words, source_words = index_words(written), index_words(source)
    return TokenWordMap(
        source_word_ids=source_words,
        target_word_ids=target_words,
        source_word_count=1 + max((word for word in source_words if word is not None), default=-1),
        target_word_count=1 + max((word for word in target_words if word is not None), default=-1),
    )


def index_words(tokens: Sequence[Mapping[str, Any]]) -> list[int | None]:
    """For each token the number of its word; None: of no word."""
    words: list[int | None] = []
    count = 0
    for token in tokens:
        special = token["special"] not in (None, "byte", "unknown")
        count += not special and (bool(token["space"]) or count == 0)
        words.append(None if special else count - 1)
    return words
