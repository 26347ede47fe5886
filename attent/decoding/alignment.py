"""Word alignment from cross-attention, in one pass over a finished sentence pair.

An alignment depends on the layer and its heads, and on the step: the one that outputs a token, or the next, where the
token is the decoder's input. `attent.scoring.alignment` selects by gold alignments; without any, `select_by_agreement`
takes the head on which both directions agree most. The selection is saved in the model folder with a fingerprint of the
weights.

A head may attend almost evenly to the whole source, or to its end token: then the word with the most attention says
nothing. Such a link is unreliable (`MIN_SHARPNESS`) and kept apart.
"""

import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attent.decoding.forced_decoding import (
    BATCH_TOKENS,
    EncodedPair,
    TeacherForcingBatch,
    TokenIds,
    batch_pairs,
    check_pairs,
    encode_pairs,
)
from attent.models import Seq2Seq
from attent.models.folder import read_side_settings, write_side_settings
from attent.nn import AttentionRecord, get_attention_layers
from attent.nn.attention import Attention
from attent.nn.eval_mode import eval_mode
from attent.storage.errors import AttentError
from attent.text.tokenizer import Tokenizer
from attent.text.vocabulary import Vocabulary

ALIGNMENT_FILE = "alignment.json"
WORD_START_MARKERS = ("▁", "Ġ")  # of tokens with a space before them
UNKNOWN_WORD = "\ufffd"
SHIFTS = (False, True)  # the step that outputs a token, the step after it
MAX_SELECTION_PAIRS = 500
FINGERPRINT_VALUES = 1024  # of each parameter
# Share of the attention above a uniform one that makes a link reliable. On 100 hand-aligned Europarl sentences 2% of
# the links of a trained head are below it, and one in four of those is right; a head that has learned nothing has 0.
MIN_SHARPNESS = 0.05

Links = tuple[tuple[int, int], ...]  # (source word, target word), from 0


class AlignmentError(AttentError):
    """Words cannot be aligned with this model or selection."""


@dataclass(frozen=True, kw_only=True)
class HeadSelection:
    """The decoder layer and heads whose cross-attention gives the alignment."""

    layer: int
    heads: tuple[int, ...] | None = None  # whose mean is taken; None: all
    shift: bool = True  # use the step after the one that outputs the token

    def __str__(self) -> str:
        heads = "mean of all heads"
        if self.heads is not None:
            heads = f"head{'s' * (len(self.heads) > 1)} {' + '.join(map(str, self.heads))}"
        return f"layer {self.layer}, {heads}, at the {'next step' if self.shift else 'output step'}"


@dataclass(frozen=True, kw_only=True)
class MeasuredSelection:
    """The content of `alignment.json`: a selection and how it was measured."""

    selection: HeadSelection
    aer: float | None = None  # percent, on sentences that it was not selected by
    agreement: float | None = None  # percent of links that are best for both their words
    sentences: int
    fingerprint: str  # of the weights


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """The alignment of a sentence pair; words are separated by spaces."""

    links: Links  # for each target word the source word with the most attention, if that is distinct
    unreliable_links: Links = ()  # the others
    weights: tuple[tuple[float, ...], ...]  # target words x source words; attention to the end token is left out

    @property
    def all_links(self) -> Links:
        """One link for each target word, as alignment error rates are measured."""
        return tuple(sorted((*self.links, *self.unreliable_links), key=lambda link: link[1]))

    @property
    def mutual_links(self) -> Links:
        """The links that are best for both their words."""
        best = [max(range(len(column)), key=column.__getitem__) for column in zip(*self.weights, strict=True)]
        return tuple((source, target) for source, target in self.all_links if best[source] == target)

    def drop_context(self, words: int) -> Self:
        """Leave out the first words of the source."""
        links, unreliable = (
            tuple((source - words, target) for source, target in part if source >= words)
            for part in (self.links, self.unreliable_links)
        )
        weights = tuple(row[words:] for row in self.weights)
        return replace(self, links=links, unreliable_links=unreliable, weights=weights)

    @property
    def pharaoh(self) -> str:
        """`0-0 1-2`: source-target, from 0, sorted."""
        return " ".join(f"{source}-{target}" for source, target in sorted(self.links))


def concatenate_alignments(parts: Sequence[tuple[Alignment, int]]) -> Alignment:
    """Join the alignments of consecutive sentences, each with the number of its source words."""
    links: list[tuple[int, int]] = []
    unreliable: list[tuple[int, int]] = []
    weights: list[tuple[float, ...]] = []
    before, after = 0, sum(words for _, words in parts)
    for part, words in parts:
        after -= words
        links += [(source + before, target + len(weights)) for source, target in part.links]
        unreliable += [(source + before, target + len(weights)) for source, target in part.unreliable_links]
        weights += [(*[0.0] * before, *row, *[0.0] * after) for row in part.weights]
        before += words
    return Alignment(links=tuple(links), unreliable_links=tuple(unreliable), weights=tuple(weights))


def align_rows(
    model: Seq2Seq,
    tokenizer: Tokenizer,
    sources: Sequence[str],
    targets: Sequence[str],
    rows: Sequence[EncodedPair],
    selection: HeadSelection,
    batch_tokens: int = BATCH_TOKENS,
) -> list[Alignment]:
    """Align texts whose token ids are known, such as those of a search: both sides with their end token."""
    check_selection(selection, model)
    alignments = [Alignment(links=(), weights=())] * len(rows)
    for index, weights in compute_cross_weights(model, rows, [selection.layer], batch_tokens):
        words = TokenWordMap.from_row(tokenizer, sources[index], targets[index], rows[index])
        alignments[index] = words.build_alignment(select_weights(weights[0], selection))
    return alignments


def select_weights(weights: Tensor, selection: HeadSelection) -> Tensor:
    """(H, Tt, Ts) of one layer -> (Tt - 1, Ts), without the end token's row."""
    heads = weights if selection.heads is None else weights[list(selection.heads)]
    return heads.mean(0)[selection.shift :][: weights.shape[1] - 1]


def find_cross_layers(model: nn.Module) -> list[Attention]:
    """Return the cross-attention of each decoder layer."""
    named = get_attention_layers(model)
    layers = [layer for path, layer in named.items() if path.startswith("decoder.") and path.endswith(".cross_attn")]
    if not layers:
        raise AlignmentError(
            f"the model must have cross-attention to align words, but this {type(model).__name__} has none; "
            "use an encoder-decoder model with attention"
        )
    return layers


def compute_cross_weights(
    model: Seq2Seq, rows: Sequence[EncodedPair], layers: Sequence[int], batch_tokens: int = BATCH_TOKENS
) -> Iterator[tuple[int, Tensor]]:
    """Yield for each pair its index and its attention weights (layers, H, Tt, Ts)."""
    cross_layers = find_cross_layers(model)
    selected = [cross_layers[i] for i in layers]
    heads = count_max_heads(selected)
    sources, targets = [row.source for row in rows], [row.target for row in rows]
    with eval_mode(model), torch.no_grad():
        for indices in batch_pairs(sources, targets, batch_tokens):
            batch = TeacherForcingBatch.from_ids(model, [sources[i] for i in indices], [targets[i] for i in indices])
            with record_weights(selected) as records:
                batch.compute_states(model)
            padded = [F.pad(x.float().cpu(), (0, 0, 0, 0, 0, heads - x.shape[1])) for (x,) in records]
            stacked = torch.stack(padded, 1)  # (B, layers, H, Tt, Ts)
            for weights, index in zip(stacked, indices, strict=True):
                yield index, weights[..., : len(targets[index]), : len(sources[index])]


def count_max_heads(layers: Sequence[Attention]) -> int:
    """Return the largest number of heads: the layers of a pruned model differ, and may have none."""
    return max(1, *(layer.heads for layer in layers))


@contextmanager
def attach_observers(
    layers: Collection[Attention], observers: Sequence[Callable[[AttentionRecord], None]]
) -> Iterator[None]:
    for layer, observer in zip(layers, observers, strict=True):
        layer.observers.append(observer)
    try:
        yield
    finally:
        for layer, observer in zip(layers, observers, strict=True):
            layer.observers.remove(observer)


@contextmanager
def record_weights(layers: Sequence[Attention]) -> Iterator[list[list[Tensor]]]:
    """Record each layer's attention weights, one tensor per call, while the block lasts."""
    records: list[list[Tensor]] = [[] for _ in layers]
    observers = [lambda record, calls=calls: calls.append(record.weights) for calls in records]
    with attach_observers(layers, observers):
        yield records


@dataclass(frozen=True, kw_only=True)
class TokenWordMap:
    """The word of each token of a sentence pair; None: no word."""

    source_word_ids: list[int | None]
    target_word_ids: list[int | None]  # without the end token
    source_word_count: int
    target_word_count: int

    @classmethod
    def from_row(cls, tokenizer: Tokenizer, source: str, target: str, row: EncodedPair) -> Self:
        source_words, target_words = source.split(), target.split()
        return cls(
            source_word_ids=[*map_tokens_to_words(tokenizer.source, row.source[:-1], source_words), None],
            target_word_ids=map_tokens_to_words(tokenizer.target, row.target[:-1], target_words),
            source_word_count=len(source_words),
            target_word_count=len(target_words),
        )

    def build_alignment(self, weights: Tensor) -> Alignment:
        """Build the alignment from weights (target tokens, source tokens)."""
        by_word = self.pool_by_word(weights)
        if not self.source_word_count:
            return Alignment(links=(), weights=((),) * self.target_word_count)
        links = [(int(row.argmax()), target) for target, row in enumerate(by_word) if float(row.max()) > 0]
        uniform = build_word_matrix(self.source_word_ids, self.source_word_count).mean(0)  # attention of an even head
        sharpness = (by_word - uniform) / (1 - uniform)  # the end token is no word, so `uniform` is below 1
        reliable = tuple(link for link in links if float(sharpness[link[1], link[0]]) >= MIN_SHARPNESS)
        return Alignment(
            links=reliable,
            unreliable_links=tuple(link for link in links if link not in reliable),
            weights=tuple(tuple(row) for row in by_word.tolist()),
        )

    def pool_by_word(self, weights: Tensor) -> Tensor:
        """(..., target tokens, source tokens) -> (..., target words, source words).

        The weights of a source word's tokens are summed, those of a target word's averaged.
        """
        summed = weights @ build_word_matrix(self.source_word_ids, self.source_word_count)
        members = build_word_matrix(self.target_word_ids, self.target_word_count)
        return (members / members.sum(0).clamp(min=1)).T @ summed


def build_word_matrix(word_ids: Sequence[int | None], count: int) -> Tensor:
    """Return (tokens, words) with 1 where the token belongs to the word."""
    matrix = torch.zeros(len(word_ids), count)
    for token, word in enumerate(word_ids):
        if word is not None:
            matrix[token, word] = 1
    return matrix


def map_tokens_to_words(vocabulary: Vocabulary, token_ids: TokenIds, words: Sequence[str]) -> list[int | None]:
    """Return for each token the index of its word in the text."""
    word_ids: list[int | None] = []
    decoded: list[str] = []
    parts = list(split_at_spaces(vocabulary, token_ids))
    for part, text in zip(parts, vocabulary.decode_batch(parts), strict=True):
        counts, part_words = count_words(vocabulary, part, text.split())
        word_ids += [None if count == 0 else len(decoded) + count - 1 for count in counts]
        decoded += part_words
    if len(decoded) == len(words):
        return word_ids
    matches = match_words(decoded, words)  # the vocabulary normalizes the text, or it was truncated
    return [None if word is None else matches[word] for word in word_ids]


def split_at_spaces(vocabulary: Vocabulary, token_ids: TokenIds) -> Iterator[list[int]]:
    """Split before each token that starts with a space, mostly into words."""
    part: list[int] = []
    for token, piece in zip(token_ids, vocabulary.to_pieces(token_ids), strict=True):
        if part and piece.startswith(WORD_START_MARKERS):
            yield part
            part = []
        part.append(token)
    if part:
        yield part


def count_words(vocabulary: Vocabulary, token_ids: list[int], words: list[str]) -> tuple[list[int], list[str]]:
    """Return the number of words up to each token, and the words of the decoded tokens."""
    if not words and vocabulary.unknown in token_ids:
        words = [UNKNOWN_WORD]
    if len(words) < 2:
        return [len(words)] * len(token_ids), words
    counts = [len(vocabulary.decode(token_ids[: end + 1]).split()) for end in range(len(token_ids))]
    return [min(count, len(words)) for count in counts], words


def match_words(decoded_words: Sequence[str], words: Sequence[str]) -> list[int | None]:
    """Return for each decoded word its word in the text: equal ones, and proportionally between them."""
    matches: list[int | None] = [None] * len(decoded_words)
    for _, a, b, c, d in SequenceMatcher(None, decoded_words, words, autojunk=False).get_opcodes():
        for i in range(a, b):
            matches[i] = c + (i - a) * (d - c) // (b - a) if d > c else None
    return matches


def list_selections(model: nn.Module) -> list[HeadSelection]:
    """Return all selections: each step and layer, with the mean of all heads, then each head."""
    layers = find_cross_layers(model)
    heads = [None, *((head,) for head in range(count_max_heads(layers)))]
    return [
        HeadSelection(layer=layer, heads=selected, shift=shift)
        for shift in SHIFTS
        for layer in range(len(layers))
        for selected in heads
    ]


def compute_word_weights(
    model: Seq2Seq, tokenizer: Tokenizer, sources: Sequence[str], targets: Sequence[str], rows: Sequence[EncodedPair]
) -> Iterator[tuple[int, Tensor]]:
    """Yield for each pair with words on both sides its index and weights (selections, target words, source words)."""
    layers = range(len(find_cross_layers(model)))
    for index, weights in compute_cross_weights(model, rows, layers):
        words = TokenWordMap.from_row(tokenizer, sources[index], targets[index], rows[index])
        if words.source_word_count and words.target_word_count:
            with_mean = torch.cat([weights.mean(1, keepdim=True), weights], 1)  # (layers, 1 + H, Tt, Ts)
            length = with_mean.shape[2] - 1
            steps = torch.stack([with_mean[:, :, int(shift) :][:, :, :length] for shift in SHIFTS])
            yield index, words.pool_by_word(steps).flatten(0, 2)


def select_by_agreement(
    model: Seq2Seq,
    tokenizer: Tokenizer,
    sources: Sequence[str],
    targets: Sequence[str],
    *,
    to: str | None = None,
    max_pairs: int = MAX_SELECTION_PAIRS,
) -> MeasuredSelection:
    """Select heads without gold alignments: those with the most links that are best for both their words.

    A head that aligns attends to a different source word for nearly every target word; others do not.
    """
    check_pairs(sources, targets)
    rows = encode_pairs(model, tokenizer, sources[:max_pairs], targets[:max_pairs], to)
    selections = list_selections(model)
    counts = torch.zeros(len(selections), 2)
    for _, weights in compute_word_weights(model, tokenizer, sources, targets, rows):
        counts += count_mutual_links(weights)
    if not counts[:, 1].any():
        raise AlignmentError("there must be pairs with words on both sides to select heads, but there are none")
    agreement = counts[:, 0] / counts[:, 1].clamp(min=1)
    best = int(agreement.argmax())
    return MeasuredSelection(
        selection=selections[best],
        agreement=100 * float(agreement[best]),
        sentences=len(rows),
        fingerprint=compute_fingerprint(model),
    )


def count_mutual_links(weights: Tensor) -> Tensor:
    """(selections, target words, source words) -> (selections, 2): links that are best for both words, all links."""
    best_source, best_target = weights.argmax(-1), weights.argmax(-2)
    has_link = weights.amax(-1) > 0
    is_mutual = best_target.gather(-1, best_source) == torch.arange(weights.shape[1])
    return torch.stack([(is_mutual & has_link).sum(-1), has_link.sum(-1)], -1).float()


def get_default_selection(model: nn.Module) -> HeadSelection:
    """Return the middle layer at the next step, for a model without measurements. Layers above it already attend to the
    source of the next token; docs/log.md has figures."""
    layers = [i for i, layer in enumerate(find_cross_layers(model)) if layer.heads] or [0]
    return HeadSelection(layer=layers[(len(layers) - 1) // 2])


def load_selection(folder: Path | None, model: nn.Module) -> HeadSelection:
    """Return the selection that the folder has for these weights, not for those before fine-tuning, or the default."""
    measured = None if folder is None else read_side_settings(folder, ALIGNMENT_FILE, MeasuredSelection)
    if folder is None or measured is None or measured.fingerprint != compute_fingerprint(model):
        return get_default_selection(model)
    check_selection(measured.selection, model, f"{folder / ALIGNMENT_FILE}: ")
    return measured.selection


def save_measured_selection(folder: Path, measured: MeasuredSelection) -> None:
    write_side_settings(folder, ALIGNMENT_FILE, measured)


def check_selection(selection: HeadSelection, model: nn.Module, location: str = "") -> None:
    counts, layer, heads = [layer.heads for layer in find_cross_layers(model)], selection.layer, selection.heads
    if not 0 <= layer < len(counts) or heads == () or not set(heads or ()) <= set(range(counts[layer])):
        raise AlignmentError(
            f"{location}the heads for alignment must be in one of the {len(counts)} decoder layers, all counted from "
            f"0, but are {selection}; choose others, or measure again with attent score --alignment"
        )


def compute_fingerprint(model: nn.Module) -> str:
    """Hash a sample of each parameter; the same in full and half precision."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters(), key=lambda item: item[0]):
        values = parameter.detach().flatten()[:FINGERPRINT_VALUES].bfloat16().cpu()
        digest.update(f"{name} {tuple(parameter.shape)}\n".encode())
        digest.update(values.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()
