"""Head statistics: where each head attends to on average, and a short description derived from the numbers.

`measure_heads` accumulates them in one pass over parallel text without storing weights; `measure_trace_heads` computes
the same values from the recorded weights of one input, for any model family.

A share is averaged over the queries that had a choice: at least one visible key of the category and one outside it.
The first decoder step, which sees the start token only, never counts.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from attent.data.arrays import select_evenly
from attent.decoding.alignment import (
    WORD_START_MARKERS,
    TokenWordMap,
    attach_observers,
    compute_fingerprint,
    count_mutual_links,
)
from attent.decoding.forced_decoding import EncodedPair, TeacherForcingBatch, batch_pairs, encode_pairs
from attent.decoding.translator import Translator
from attent.formatting import format_percent
from attent.inspection.attention_trace import unpack_weights
from attent.models import Seq2Seq
from attent.models.folder import read_side_settings
from attent.nn import AttentionRecord, get_attention_layers
from attent.nn.eval_mode import eval_mode
from attent.storage.errors import AttentError

if TYPE_CHECKING:
    from pandas import DataFrame

    from attent.text.tokenizer import Tokenizer
    from attent.text.vocabulary import Vocabulary

HEAD_STATS_FILE = "heads.json"
DEFAULT_MAX_PAIRS = 500  # with twice as many pairs, no share of any head moved by more than 0.015
BATCH_TOKENS = 2048  # padded tokens of one side per batch
MAX_TOKENS = 512  # per side: the attention matrices of longer texts need gigabytes
MAX_QUERY_ROWS = 256  # queries sampled from a longer text
NO_SPELLING = -1  # special tokens equal no other token

MIN_WORDS = 2  # per side: a single word has no competitor for its links

StatUnit = Literal["share", "bits"]


def stat(unit: StatUnit, text: str, **label: str) -> Any:
    """A field of `HeadValues`, which is also a column of its table; the default label is the name with spaces."""
    return field(default=None, metadata={"unit": unit, "help": text, **label})


@dataclass(frozen=True, kw_only=True)
class HeadValues:
    """Values of one head; None if no key of the category exists."""

    current: float | None = stat("share", "Weight on the query token itself; in a decoder, on the current input token.")
    previous: float | None = stat("share", "Weight on the previous token, unless it is the first.")
    next: float | None = stat("share", "Weight on the next token, if it is visible and not the end token.")
    first: float | None = stat(
        "share",
        "Weight on the first token (in a decoder, the start token). In self-attention, queries at the first two "
        "positions are excluded.",
    )
    end: float | None = stat(
        "share",
        "Weight on the end token or a separator, often an attention sink. In self-attention, the end token and the one "
        "before it are excluded as queries.",
    )
    punctuation: float | None = stat("share", "Weight on punctuation other than the query token.")
    same_token: float | None = stat(
        "share",
        "Weight on other occurrences of the same token. In cross-attention: on source tokens equal to the output "
        "token, such as names and numbers.",
    )
    top_key: float | None = stat(
        "share",
        "Mean weight on the most attended key of a sentence: near 100% if all queries attend to the same key.",
    )
    entropy: float | None = stat("bits", "0: all weight on one key. 3 bits: like a uniform distribution over 8 keys.")
    normalized_entropy: float | None = stat("share", "Entropy divided by its maximum: 100% is uniform attention.")
    confidence: float | None = stat(
        "share", "Mean of each query's maximum weight, the end token excluded (Voita et al. 2019)."
    )
    alignment: float | None = stat("share", "Maximum of the two alignment columns. Chance gives up to 50%.")
    aligned_on_output: float | None = stat(
        "share",
        "Share of mutual links: the source word with the most weight from a target word, when that word is the output, "
        "receives no more weight from any other target word.",
        label="aligned (output)",
    )
    aligned_on_input: float | None = stat(
        "share", "The same one step later, when the word is the decoder input.", label="aligned (input)"
    )


@dataclass(frozen=True, kw_only=True)
class HeadStats:
    path: str  # of its attention layer, such as decoder.blocks.3.cross_attn
    head: int  # from 0
    description: str
    values: HeadValues


@dataclass(frozen=True, kw_only=True)
class HeadStatsReport:
    """`heads.json`: the statistics of every head of a model."""

    sentences: int
    dataset: str
    heads: tuple[HeadStats, ...]
    weights_digest: str = ""

    def to_frame(self) -> DataFrame:
        """Return a pandas table with a line for each head; `HeadValues` describes its columns."""
        import pandas as pd

        return pd.DataFrame([asdict(head) | asdict(head.values) for head in self.heads]).drop(columns="values")

    def to_document(self) -> dict[str, Any]:
        rows = [asdict(head) for head in self.heads]
        used = [each for each in fields(HeadValues) if any(row["values"][each.name] is not None for row in rows)]
        columns = [{"key": each.name, "label": each.name.replace("_", " "), **each.metadata} for each in used]
        for row in rows:
            values = {each.name: row["values"][each.name] for each in used}
            row["values"] = {key: value if value is None else round(value, 4) for key, value in values.items()}
        return {"sentences": self.sentences, "dataset": self.dataset, "columns": columns, "heads": rows}


def load_head_stats(folder: Path, model: nn.Module) -> HeadStatsReport | None:
    report = read_side_settings(folder, HEAD_STATS_FILE, HeadStatsReport)
    return report if report is not None and report.weights_digest == compute_fingerprint(model) else None


# ---- parallel text ---------------------------------------------------------------------------------------------------


def measure_heads(
    translator: Translator,
    pairs: Iterable[tuple[str, str]],
    *,
    to: str | None = None,
    max_pairs: int = DEFAULT_MAX_PAIRS,
    dataset: str = "the given pairs",
    batch_tokens: int = BATCH_TOKENS,
) -> HeadStatsReport:
    """Measure where each head attends to on parallel text, with teacher forcing.

    pairs      sources and their translations
    to         target language, for models trained with language tags
    max_pairs  sample this many pairs, evenly spaced

    >>> translator = attent.Translator.load("runs/en-de")
    >>> stats = attent.measure_heads(translator, [("A man sings.", "Ein Mann singt.")])
    >>> stats.to_frame().columns[:5].tolist()  # a pandas table with a line for each head
    ['path', 'head', 'description', 'current', 'previous']
    """
    if not isinstance(translator, Translator):
        raise AttentError(f"`translator` must be a Translator, but is of type {type(translator).__name__}")
    model, tokenizer, pairs = translator.model, translator.tokenizer, list(pairs)
    if not pairs or not all(isinstance(pair, Sequence) and len(pair) == 2 for pair in pairs):
        raise AttentError("`pairs` must be [(source, target), ...], at least one; read a file of them first")
    if not isinstance(model, Seq2Seq):
        raise AttentError("the heads of one model can be measured at a time, but this is an ensemble; give one folder")
    if max_pairs < 1:
        raise AttentError(f"`max_pairs` must be 1 or more, but is {max_pairs}")
    sources, targets = zip(*select_evenly(pairs, max_pairs), strict=True)
    encoded = encode_pairs(model, tokenizer, sources, targets, to, min(batch_tokens, MAX_TOKENS))
    layers = get_attention_layers(model)
    accumulators = {path: HeadAccumulator(layer.heads) for path, layer in layers.items()}
    with eval_mode(model), torch.no_grad():
        for indices in batch_pairs([row.source for row in encoded], [row.target for row in encoded], batch_tokens):
            rows = [encoded[i] for i in indices]
            words = [TokenWordMap.from_row(tokenizer, sources[i], targets[i], encoded[i]) for i in indices]
            batch = TeacherForcingBatch.from_ids(model, [row.source for row in rows], [row.target for row in rows])
            categories = BatchKeyCategories(model, tokenizer, rows, words)
            observers = [partial(categories.observe, path, accumulators[path]) for path in layers]
            with attach_observers(layers.values(), observers):
                batch.compute_states(model)
    return HeadStatsReport(
        sentences=len(encoded),
        dataset=dataset,
        heads=tuple(describe_heads(accumulators)),
        weights_digest=compute_fingerprint(model),
    )


class BatchKeyCategories:
    """Key categories of a batch, computed once for all layers of a stack and kind."""

    def __init__(
        self, model: Seq2Seq, tokenizer: Tokenizer, rows: Sequence[EncodedPair], word_pairs: Sequence[TokenWordMap]
    ) -> None:
        spelling_ids = {"": NO_SPELLING}
        start = model.config.start_id
        self.source = build_token_features(tokenizer.source, [row.source for row in rows], spelling_ids)
        self.target = build_token_features(tokenizer.target, [row.target for row in rows], spelling_ids)
        self.decoder_input = build_token_features(
            tokenizer.target, [[start, *row.target[:-1]] for row in rows], spelling_ids, special_ids=(start,)
        )
        self.word_pairs = word_pairs
        self.cache: dict[tuple[str, str], KeyCategories] = {}

    def observe(self, path: str, accumulator: HeadAccumulator, record: AttentionRecord) -> None:
        kind = path.partition(".")[0], path.rpartition(".")[2]
        if kind not in self.cache:
            self.cache[kind] = self.build_categories(*kind, record)
        accumulator.observe(record.weights.float(), self.cache[kind])

    def build_categories(self, stack: str, sublayer: str, record: AttentionRecord) -> KeyCategories:
        B, _, Tq, Tk = record.weights.shape
        allowed = record.mask.to_dense(B, Tq, Tk, record.weights.device)[:, 0].cpu()
        if sublayer == "cross_attn":
            return KeyCategories.from_features(
                self.target, self.source, allowed, is_self=False, word_pairs=self.word_pairs
            )
        features = self.source if stack == "encoder" else self.decoder_input
        return KeyCategories.from_features(features, features, allowed, is_self=True)


@dataclass(frozen=True, kw_only=True)
class TokenFeatures:
    """Properties of padded tokens, (B, T) each."""

    spelling_ids: Tensor  # equal for tokens with the same piece
    is_end: Tensor
    is_punctuation: Tensor
    is_token: Tensor

    @classmethod
    def from_pieces(
        cls, rows: Sequence[Sequence[str]], is_end: Sequence[Sequence[bool]], spelling_ids: dict[str, int]
    ) -> TokenFeatures:
        """From the piece of each token, "" for special ones; `spelling_ids` gets new pieces."""
        ids = [[spelling_ids.setdefault(piece, len(spelling_ids)) for piece in row] for row in rows]
        return cls(
            spelling_ids=pad_rows(ids, NO_SPELLING).long(),
            is_end=pad_rows(is_end, False).bool(),
            is_punctuation=pad_rows([[is_punctuation(piece) for piece in row] for row in rows], False).bool(),
            is_token=pad_rows([[True for _ in row] for row in rows], False).bool(),
        )


def build_token_features(
    vocabulary: Vocabulary, rows: Sequence[Sequence[int]], spelling_ids: dict[str, int], special_ids: Sequence[int] = ()
) -> TokenFeatures:
    end_ids = {vocabulary.end} - set(special_ids)  # a decoder may start from the end token (T5: from padding)
    without_text = {vocabulary.end, vocabulary.pad, vocabulary.start, vocabulary.unknown, *special_ids}
    without_text |= {vocabulary.get_tag_id(language) for language in vocabulary.tags}
    # Imported models may have more rows than pieces.
    ids = [i for i in {i for row in rows for i in row} - without_text if i < vocabulary.size]
    pieces = dict(zip(ids, vocabulary.to_pieces(ids), strict=True))
    is_end = [[i in end_ids for i in row] for row in rows]
    return TokenFeatures.from_pieces([[pieces.get(i, "") for i in row] for row in rows], is_end, spelling_ids)


def is_punctuation(piece: str) -> bool:
    text = piece.lstrip("".join(WORD_START_MARKERS)).strip()
    return bool(text) and all(unicodedata.category(char)[0] in "PS" for char in text)


def pad_rows(rows: Sequence[Sequence[int]], pad_value: int) -> Tensor:
    length = max(map(len, rows))
    return torch.tensor([[*row, *[pad_value] * (length - len(row))] for row in rows])


@dataclass(frozen=True, kw_only=True)
class KeyCategories:
    """For a batch: which queries had a choice, and which keys belong to each category."""

    has_choice: Tensor  # (B, Tq) more than one visible key
    num_visible: Tensor  # (B, Tq) visible keys
    category_masks: Mapping[str, Tensor]  # (B, Tq, Tk), False for queries without a choice
    is_self: bool  # self-attention
    is_end: Tensor  # (B, 1, 1, Tk)
    word_pairs: Sequence[TokenWordMap] = ()

    def select_rows(self, rows: Tensor) -> KeyCategories:
        """Select queries; without word pairs, since alignment needs all of them."""
        if len(rows) == self.has_choice.shape[1]:
            return self
        return replace(
            self,
            has_choice=self.has_choice[:, rows],
            num_visible=self.num_visible[:, rows],
            category_masks={key: mask[:, rows] for key, mask in self.category_masks.items()},
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
        visible = queries.is_token[:, :, None] & keys.is_token[:, None] & allowed
        num_visible = visible.sum(-1)
        counted = visible & (num_visible > 1)[..., None]
        masks = {key: mask & counted for key, mask in build_category_masks(queries, keys, is_self).items()}
        return cls(
            has_choice=num_visible > 1,
            num_visible=num_visible,
            category_masks=masks,
            is_self=is_self,
            is_end=keys.is_end[:, None, None],
            word_pairs=word_pairs,
        )


def build_category_masks(queries: TokenFeatures, keys: TokenFeatures, is_self: bool) -> dict[str, Tensor]:
    """Return for each category a mask (B, Tq, Tk) of the keys that belong to it for each query."""
    q, k = torch.arange(queries.is_token.shape[1])[:, None], torch.arange(keys.is_token.shape[1])
    end, punctuation = keys.is_end[:, None], keys.is_punctuation[:, None]
    same = queries.spelling_ids[:, :, None] == keys.spelling_ids[:, None]
    same = same & (keys.spelling_ids != NO_SPELLING)[:, None]
    if not is_self:
        return {"first": (k == 0) & (q >= 0), "end": end, "punctuation": punctuation, "same_token": same}
    return {
        "current": k == q,
        "previous": (k == q - 1) & (k > 0),
        "next": (k == q + 1) & ~end,
        "first": (k == 0) & (q > 1),
        "end": end & (k != q) & (k != q + 1),
        "punctuation": punctuation & (k != q),
        "same_token": same & (k != q),
    }


@dataclass
class HeadAccumulator:
    num_heads: int
    is_self: bool = True
    is_causal: bool = True  # until a later key was visible
    totals: dict[str, Tensor] = field(default_factory=dict)  # (H, 2): sum and count

    def add(self, key: str, sums: Tensor, count: Tensor | float) -> None:
        new = torch.stack([sums.double().cpu(), torch.as_tensor(count).double().cpu().expand(self.num_heads)], -1)
        self.totals[key] = self.totals.get(key, torch.zeros(self.num_heads, 2, dtype=torch.float64)) + new

    def observe(self, weights: Tensor, categories: KeyCategories) -> None:
        """Add the weights (B, H, Tq, Tk) of a batch."""
        weights = weights.cpu()
        rows = categories.has_choice[:, None].float()  # (B, 1, Tq)
        count = categories.has_choice.sum()
        for key, mask in categories.category_masks.items():
            self.add(key, torch.einsum("bhqk,bqk->h", weights, mask.float()), mask.any(-1).sum())
        bits = torch.special.entr(weights).sum(-1) / math.log(2)
        self.add("entropy", (bits * rows).sum((0, 2)), count)
        max_bits = (categories.num_visible.clamp(min=1).log2() * categories.has_choice).sum()
        self.add("max_entropy", max_bits.expand(self.num_heads), count)
        num_queries = rows.sum(-1).clamp(min=1)[..., None]  # (B, 1, 1)
        top_key = ((weights * rows[..., None]).sum(2) / num_queries).amax(-1)  # (B, H)
        self.add("top_key", top_key.sum(0), categories.has_choice.any(-1).sum())
        self.add("confidence", (weights.masked_fill(categories.is_end, 0).amax(-1) * rows).sum((0, 2)), count)
        self.observe_alignment(weights, categories)

    def observe_alignment(self, weights: Tensor, categories: KeyCategories) -> None:
        self.is_self = categories.is_self
        self.is_causal = "next" not in categories.category_masks or (
            self.is_causal and not bool(categories.category_masks["next"].any())
        )
        for row, word_pair in zip(weights, categories.word_pairs, strict=False):
            for offset, key in enumerate(("aligned_on_output", "aligned_on_input")):
                links = count_word_links(row, word_pair, offset)
                self.add(key, links[:, 0], links[:, 1])

    def compute_values(self, head: int) -> HeadValues:
        sums = {key: pair[head].tolist() for key, pair in self.totals.items()}
        means = {key: total / count if count else None for key, (total, count) in sums.items()}
        max_entropy = means.pop("max_entropy", None)
        entropy = means.get("entropy")
        means["normalized_entropy"] = None if entropy is None or not max_entropy else entropy / max_entropy
        shares = (means.get(key) for key in ("aligned_on_output", "aligned_on_input"))
        means["alignment"] = max((share for share in shares if share is not None), default=None)
        return HeadValues(**means)


def count_word_links(weights: Tensor, word_pair: TokenWordMap, step_offset: int) -> Tensor:
    """Weights (H, Tq, Tk) of one pair, possibly padded -> (H, 2): number of mutual links, number of links."""
    if word_pair.source_word_count < MIN_WORDS or word_pair.target_word_count < MIN_WORDS:
        return torch.zeros(weights.shape[0], 2)
    tokens = weights[:, step_offset : step_offset + len(word_pair.target_word_ids), : len(word_pair.source_word_ids)]
    # Without an end token, the last word is never decoder input.
    word_pair = replace(word_pair, target_word_ids=word_pair.target_word_ids[: tokens.shape[1]])
    return count_mutual_links(word_pair.pool_by_word(tokens))


SELF_ATTENTION_NAMES = {
    "current": "itself",
    "previous": "the previous token",
    "next": "the next token",
    "first": "the first token",
    "end": "the end token",
    "punctuation": "punctuation",
    "same_token": "other occurrences of the token",
}
DECODER_NAMES = SELF_ATTENTION_NAMES | {
    "current": "the current input token",
    "previous": "the previous input token",
    "first": "the start token",
}


def describe_heads(
    accumulators: Mapping[str, HeadAccumulator], causal_names: Mapping[str, str] = DECODER_NAMES
) -> Iterator[HeadStats]:
    """Yield the statistics of each head; `causal_names` are the names of key categories in causal self-attention."""
    for path, accumulator in accumulators.items():
        names = causal_names if accumulator.is_causal else SELF_ATTENTION_NAMES
        for head in range(accumulator.num_heads):
            values = accumulator.compute_values(head)
            is_self = accumulator.is_self
            description = describe_self_attention(values, names) if is_self else describe_cross_attention(values)
            yield HeadStats(path=path, head=head, description=description, values=values)


DOMINANT_SHARE = 0.5  # one category dominates
COMBINED_SHARE = 0.6  # two categories dominate together
ALIGNED_SHARE, LOOSELY_ALIGNED_SHARE = 0.7, 0.6  # mutual links: chance gives about half
MIN_CONFIDENCE = 0.5  # below this, links are chance
UNIFORM_ENTROPY, DIFFUSE_ENTROPY = 0.9, 0.8  # of the maximum entropy
SHARP_ENTROPY = 0.15

SINK_CATEGORIES = ("first", "end", "punctuation")


def describe_self_attention(values: HeadValues, names: Mapping[str, str] = SELF_ATTENTION_NAMES) -> str:
    shares = get_shares(values, ("current", "previous", "next", *SINK_CATEGORIES))
    if values.same_token is not None and values.same_token >= DOMINANT_SHARE > max(shares.values(), default=0.0):
        return f"attends to {names['same_token']} ({format_percent(values.same_token)} if there are any)"
    local = {key: shares[key] for key in ("previous", "current", "next") if key in shares}
    local_focus = "local: " + ", ".join(f"{names[key]} {format_percent(share)}" for key, share in local.items())
    return (
        describe_dominant_keys(shares, names)
        or (local_focus if sum(local.values()) >= COMBINED_SHARE else "")
        or describe_spread(values)
        or describe_sharp_focus(values)
        or describe_mixed_pattern(values, shares, names)
    )


def describe_cross_attention(values: HeadValues) -> str:
    shares, names = get_shares(values, SINK_CATEGORIES), SELF_ATTENTION_NAMES
    sink = describe_dominant_keys(shares, names)
    alignment, loose_alignment = describe_alignment(values)
    if sink and (alignment or loose_alignment):
        return f"{sink}; otherwise {alignment or loose_alignment}"
    copies = values.alignment is None and (values.same_token or 0.0) >= DOMINANT_SHARE  # no alignable words: numbers
    share = format_percent(values.same_token or 0.0)
    return (
        sink
        or alignment
        or (f"copies: attends to the output token in the source ({share} if it occurs)" if copies else "")
        or describe_spread(values)
        or loose_alignment
        or describe_sharp_focus(values)
        or describe_mixed_pattern(values, shares, names)
    )


def describe_dominant_keys(shares: Mapping[str, float], names: Mapping[str, str]) -> str:
    """Describe heads with most weight on one category, or on the end token and the final punctuation together."""
    best = max(shares, key=shares.__getitem__, default=None)
    if best is not None and shares[best] >= DOMINANT_SHARE:
        return f"attends to {names[best]} ({format_percent(shares[best])})"
    end, punctuation = (shares.get(key, 0.0) for key in ("end", "punctuation"))
    if end + punctuation < COMBINED_SHARE:
        return ""
    percents = f"{format_percent(end)} + {format_percent(punctuation)}"
    return f"attends to {names['end']} and {names['punctuation']} ({percents})"


def describe_sharp_focus(values: HeadValues) -> str:
    if values.top_key is not None and values.top_key >= DOMINANT_SHARE:
        return f"attends to one token from every position ({format_percent(values.top_key)})"
    if values.normalized_entropy is None or values.normalized_entropy > SHARP_ENTROPY:
        return ""
    return f"attends to one token by content, not position ({format_entropy(values)})"


def get_shares(values: HeadValues, keys: Sequence[str]) -> dict[str, float]:
    return {key: share for key in keys if (share := getattr(values, key)) is not None}


def describe_alignment(values: HeadValues) -> tuple[str, str]:
    share = values.alignment or 0.0
    is_good = share >= ALIGNED_SHARE and (values.confidence or 0.0) >= MIN_CONFIDENCE
    step = "output" if share == values.aligned_on_output else "input"
    return (
        f"aligns when the word is the {step} ({format_percent(share)} mutual links)" if is_good else "",
        f"aligns loosely ({format_percent(share)} mutual links)" if share >= LOOSELY_ALIGNED_SHARE else "",
    )


def describe_spread(values: HeadValues) -> str:
    if values.normalized_entropy is None or values.normalized_entropy < DIFFUSE_ENTROPY:
        return ""
    spread = "uniform" if values.normalized_entropy >= UNIFORM_ENTROPY else "diffuse"
    return f"{spread} attention ({format_entropy(values)})"


def describe_mixed_pattern(values: HeadValues, shares: Mapping[str, float], names: Mapping[str, str]) -> str:
    parts = [f"{format_percent(values.alignment)} mutual links"] if values.alignment is not None else []
    largest = sorted(shares, key=lambda key: -shares[key])[:2]
    parts += [f"{names[key]} {format_percent(shares[key])}" for key in largest]
    parts += [format_entropy(values)] if values.entropy is not None else []
    return "mixed: " + (", ".join(parts) or "no choice of keys")


def format_entropy(values: HeadValues) -> str:
    assert values.entropy is not None
    maximum = f" of {values.entropy / values.normalized_entropy:.1f}" if values.normalized_entropy else ""
    return f"{values.entropy:.1f} bits{maximum}"


# ---- one input -------------------------------------------------------------------------------------------------------


def measure_trace_heads(layers: Iterable[Mapping[str, Any]], sides: Mapping[str, Mapping[str, Any]]) -> HeadStatsReport:
    """Measure the heads of one input; `layers` and `sides` as in a document."""
    spelling_ids = {"": NO_SPELLING}
    features = {name: build_document_features(side["tokens"], spelling_ids) for name, side in sides.items()}
    accumulators: dict[str, HeadAccumulator] = {}
    categories: dict[tuple[str, str, bool], KeyCategories] = {}
    for layer in layers:
        kind = layer["queries"], layer["keys"], bool(layer["causal"])
        if kind not in categories:
            categories[kind] = categorize_layer_keys(layer, features, sides)
        shape = tuple(features[name].is_token.shape[1] for name in kind[:2])
        max_rows = MAX_QUERY_ROWS if math.prod(shape) > MAX_TOKENS**2 else max(shape)
        rows = torch.tensor(select_evenly(range(shape[0]), max(1, max_rows)), dtype=torch.long)
        weights = unpack_weights(layer, shape[1], rows)
        accumulators[layer["path"]] = accumulator = HeadAccumulator(weights.shape[0])
        if weights.numel():
            accumulator.observe(weights[None], categories[kind].select_rows(rows))
    # A decoder-only model reads its text, so that its tokens are not named as decoder inputs.
    described = describe_heads(accumulators, SELF_ATTENTION_NAMES if len(sides) == 1 else DECODER_NAMES)
    return HeadStatsReport(sentences=1, dataset="this input", heads=tuple(described))


def categorize_layer_keys(
    layer: Mapping[str, Any], features: Mapping[str, TokenFeatures], sides: Mapping[str, Any]
) -> KeyCategories:
    queries, keys, image = features[layer["queries"]], features[layer["keys"]], sides[layer["keys"]].get("image")
    allowed = torch.ones(1, queries.is_token.shape[1], keys.is_token.shape[1], dtype=torch.bool)
    if layer["kind"] == "self":
        visible = allowed.tril() if layer["causal"] else allowed
        categories = KeyCategories.from_features(keys, keys, visible, is_self=True)
        if not image:
            return categories
        return categorize_patches(categories, image["columns"], image.get("num_prefix_tokens", 0))
    word_pair = build_word_pair(sides[layer["queries"]]["tokens"], sides[layer["keys"]]["tokens"])
    categories = KeyCategories.from_features(queries, keys, allowed, is_self=False, word_pairs=[word_pair])
    if image and not image.get("num_prefix_tokens", 0):  # a corner of the image, or the start of the recording
        masks = {key: mask for key, mask in categories.category_masks.items() if key != "first"}
        return replace(categories, category_masks=masks)
    return categories


def categorize_patches(categories: KeyCategories, columns: int, num_prefix_tokens: int) -> KeyCategories:
    """Categories for patches: neighbors are in the same row; prefix tokens have no position."""
    index = torch.arange(categories.has_choice.shape[1]) - num_prefix_tokens
    row, is_patch = index.div(columns, rounding_mode="floor"), index >= 0
    same_row = (row[:, None] == row) & is_patch[:, None] & is_patch
    masks = {
        key: mask & same_row if key in ("previous", "next") else mask for key, mask in categories.category_masks.items()
    }
    if not num_prefix_tokens:
        masks.pop("first")  # a corner of the image
    return replace(categories, category_masks=masks)


def build_document_features(tokens: Sequence[Mapping[str, Any]], spelling_ids: dict[str, int]) -> TokenFeatures:
    pieces = ["" if token["special"] not in (None, "byte") else token["piece"] for token in tokens]
    return TokenFeatures.from_pieces([pieces], [[token["special"] == "end" for token in tokens]], spelling_ids)


def build_word_pair(target: Sequence[Mapping[str, Any]], source: Sequence[Mapping[str, Any]]) -> TokenWordMap:
    """Group tokens into words by the spaces before them; without the target's end token."""
    target = target[:-1] if target and target[-1]["special"] == "end" else target
    (target_words, target_count), (source_words, source_count) = index_words(target), index_words(source)
    return TokenWordMap(
        source_word_ids=source_words,
        target_word_ids=target_words,
        source_word_count=source_count,
        target_word_count=target_count,
    )


def index_words(tokens: Sequence[Mapping[str, Any]]) -> tuple[list[int | None], int]:
    """Return the word of each token, None for special ones, and the number of words."""
    words: list[int | None] = []
    count = 0
    for token in tokens:
        is_special = token["special"] not in (None, "byte", "unknown")
        count += not is_special and (bool(token["space"]) or count == 0)
        words.append(None if is_special else count - 1)
    return words, count
