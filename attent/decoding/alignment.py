"""Which source word each target word came from, read off the cross-attention in one pass over a finished pair.

It is the same for every engine that found the target, and for a target that a person wrote. Two things are to choose:
which heads of which layer, and at which step to look: when the token is written, or one later, when the decoder reads
it and knows which one it is. `attent.score.alignment` measures that against alignments by hand; without such, `agreed`
takes the head on which both languages agree most. The choice is kept in the model folder, with a mark of the weights
that it holds for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attent import settings
from attent.decoding.forced_decoding import (
    BATCH_TOKENS,
    EncodedPair,
    TeacherForcingBatch,
    TokenIds,
    batch_by_length,
    check_pairs,
    encode_pairs,
    eval_mode,
)
from attent.models import Seq2Seq
from attent.nn import AttentionRecord, attention_layers
from attent.nn.attention import Attention

if TYPE_CHECKING:
    from attent.text.tokenizer import Tokenizer
    from attent.text.vocabulary import Vocabulary

ALIGNMENT_FILE = "alignment.json"
WORD_START_MARKERS = ("▁", "Ġ")  # with which a piece says that a space stands before it
UNKNOWN_WORD = "\ufffd"  # for what a vocabulary cannot spell
SHIFTS = (False, True)  # when a token is written, when it is read
MAX_SELECTION_PAIRS = 500  # pairs to choose heads by
FINGERPRINT_VALUES = 1024  # numbers of each parameter that go into the mark of a model

Links = tuple[tuple[int, int], ...]  # (source word, target word), from 0


class AlignmentError(ValueError):
    """Alignments that cannot be made or chosen, in a sentence."""


@dataclass(frozen=True, kw_only=True)
class HeadSelection:
    """Where to look: heads of a layer of the decoder, from 0."""

    layer: int
    heads: tuple[int, ...] | None = None  # whose mean is taken; None: of all
    shift: bool = True  # look when the token is read, one step after it was written

    def __str__(self) -> str:
        heads = (
            "mean of all heads"
            if self.heads is None
            else f"head{'s' * (len(self.heads) > 1)} {_join_numbers(self.heads)}"
        )
        return f"layer {self.layer}, {heads}, when it is {'read' if self.shift else 'written'}"


def _join_numbers(numbers: Sequence[int]) -> str:
    return " + ".join(map(str, numbers))


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """Of one pair, by its words: what stands between spaces."""

    links: Links  # for each target word the source word that it looked at most, in the order of targets
    weights: tuple[tuple[float, ...], ...]  # target words x source words; what looked at the end is in none of them

    @property
    def mutual_links(self) -> Links:
        """The surest links: those whose source word, too, was looked at by no other target word more."""
        best = [max(range(len(column)), key=column.__getitem__) for column in zip(*self.weights, strict=True)]
        return tuple((source, target) for source, target in self.links if best[source] == target)

    @property
    def pharaoh(self) -> str:
        return format_pharaoh(self.links)


def format_pharaoh(links: Links) -> str:
    """`0-0 1-2`: source-target, from 0."""
    return " ".join(f"{source}-{target}" for source, target in sorted(links))


def align_texts(
    model: Seq2Seq,
    tokenizer: Tokenizer,
    sources: Sequence[str],
    targets: Sequence[str],
    selection: HeadSelection,
    *,
    to: str | None = None,
    batch_tokens: int = BATCH_TOKENS,
) -> list[Alignment]:
    """Of each target with its source; `choice` may be that of `choice_of`."""
    check_pairs(sources, targets)
    rows = encode_pairs(model, tokenizer, sources, targets, to, batch_tokens)
    return align_rows(model, tokenizer, sources, targets, rows, selection, batch_tokens)


def align_rows(
    model: Seq2Seq,
    tokenizer: Tokenizer,
    sources: Sequence[str],
    targets: Sequence[str],
    rows: Sequence[EncodedPair],
    selection: HeadSelection,
    batch_tokens: int = BATCH_TOKENS,
) -> list[Alignment]:
    """The same where the ids are known, such as those that a search has found: each side with its end."""
    check_selection(selection, model)
    found = [Alignment(links=(), weights=())] * len(rows)
    for place, weights in compute_cross_weights(model, rows, [selection.layer], batch_tokens):
        words = TokenWordMap.from_row(tokenizer, sources[place], targets[place], rows[place])
        found[place] = words.build_alignment(select_weights(weights[0], selection))
    return found


def select_weights(weights: Tensor, selection: HeadSelection) -> Tensor:
    """(H, Tt, Ts) of one layer -> (Tt - 1, Ts): for each target token but the end, where it looked."""
    heads = weights if selection.heads is None else weights[list(selection.heads)]
    return heads.mean(0)[selection.shift :][: weights.shape[1] - 1]


# ---- looking ---------------------------------------------------------------------------------------------------------


def find_cross_layers(model: nn.Module) -> list[Attention]:
    """The layers by which a decoder looks at the source, the first one first."""
    named = attention_layers(model)
    layers = [layer for path, layer in named.items() if path.startswith("decoder.") and path.endswith(".cross_attn")]
    if not layers:
        raise AlignmentError(
            f"the model must have cross-attention to align with, but this {type(model).__name__} has none; "
            "give an encoder-decoder model"
        )
    return layers


def compute_cross_weights(
    model: Seq2Seq, rows: Sequence[EncodedPair], layers: Sequence[int], batch_tokens: int = BATCH_TOKENS
) -> Iterator[tuple[int, Tensor]]:
    """For each pair its place and (layers, H, Tt, Ts): what each token looks at when it is written."""
    every = find_cross_layers(model)
    most = count_max_heads([every[i] for i in layers])
    sources, targets = [row.source for row in rows], [row.target for row in rows]
    with eval_mode(model), torch.no_grad():
        for places in batch_by_length(sources, targets, batch_tokens):
            batch = TeacherForcingBatch.from_ids(model, [sources[i] for i in places], [targets[i] for i in places])
            with record_weights([every[i] for i in layers]) as seen:
                batch.compute_states(model)
            every_head = [pad_heads(weights.float().cpu(), most) for (weights,) in seen]
            together = torch.stack(every_head, 1)  # (B, layers, H, Tt, Ts)
            for weights, place in zip(together, places, strict=True):
                yield place, weights[..., : len(targets[place]), : len(sources[place])]


def count_max_heads(layers: Sequence[Attention]) -> int:
    """Of a pruned model each layer may have another number, also none."""
    return max(1, *(layer.heads for layer in layers))


def pad_heads(weights: Tensor, count: int) -> Tensor:
    """(B, H, Tt, Ts) with as many heads as the layer of most: those that were pruned look at nothing."""
    return F.pad(weights, (0, 0, 0, 0, 0, count - weights.shape[1]))


@contextmanager
def record_weights(layers: Sequence[Attention]) -> Iterator[list[list[Tensor]]]:
    """For each layer its weights in each call while the block lasts."""
    seen: list[list[Tensor]] = [[] for _ in layers]
    taps = [build_tap(into) for into in seen]
    for layer, each in zip(layers, taps, strict=True):
        layer.taps.append(each)
    try:
        yield seen
    finally:
        for layer, each in zip(layers, taps, strict=True):
            layer.taps.remove(each)


def build_tap(records: list[Tensor]) -> Callable[[AttentionRecord], None]:
    return lambda look: records.append(look.weights)


# ---- tokens to words -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TokenWordMap:
    """Which word each token of a pair belongs to; None: to none."""

    source_word_ids: list[int | None]
    target_word_ids: list[int | None]  # without the end
    source_word_count: int
    target_word_count: int

    @classmethod
    def from_row(cls, tokenizer: Tokenizer, source: str, target: str, row: EncodedPair) -> TokenWordMap:
        source_words, target_words = source.split(), target.split()
        return cls(
            source_word_ids=[*map_tokens_to_words(tokenizer.source, row.source[:-1], source_words), None],
            target_word_ids=map_tokens_to_words(tokenizer.target, row.target[:-1], target_words),
            source_word_count=len(source_words),
            target_word_count=len(target_words),
        )

    def build_alignment(self, weights: Tensor) -> Alignment:
        """From (target tokens, source tokens)."""
        by_word = self.pool_by_word(weights)
        if not self.source_word_count:
            return Alignment(links=(), weights=((),) * self.target_word_count)
        links = tuple((int(row.argmax()), place) for place, row in enumerate(by_word) if float(row.max()) > 0)
        return Alignment(links=links, weights=tuple(tuple(row) for row in by_word.tolist()))

    def pool_by_word(self, weights: Tensor) -> Tensor:
        """(..., target tokens, source tokens) -> (..., target words, source words): a word is looked at as much as all
        its tokens together, and looks as they do on average."""
        summed = weights @ build_word_matrix(self.source_word_ids, self.source_word_count)
        means = build_word_matrix(self.target_word_ids, self.target_word_count)
        return (means / means.sum(0).clamp(min=1)).T @ summed


def build_word_matrix(word_ids: Sequence[int | None], count: int) -> Tensor:
    """(tokens, words): 1 where the token is of the word."""
    ones = torch.zeros(len(word_ids), count)
    for token, word in enumerate(word_ids):
        if word is not None:
            ones[token, word] = 1
    return ones


def map_tokens_to_words(vocabulary: Vocabulary, token_ids: TokenIds, words: Sequence[str]) -> list[int | None]:
    """For each token the word of the text that it belongs to."""
    places: list[int | None] = []
    spelled: list[str] = []
    for part in split_at_spaces(vocabulary, token_ids):
        counts, found = count_words(vocabulary, part)
        places += [None if count == 0 else len(spelled) + count - 1 for count in counts]
        spelled += found
    if len(spelled) == len(words):
        return places
    others = match_words(spelled, words)  # a vocabulary that spells the text otherwise, or a text that was cut
    return [None if place is None else others[place] for place in places]


def split_at_spaces(vocabulary: Vocabulary, token_ids: TokenIds) -> Iterator[list[int]]:
    """Tokens up to the next that begins with a space: mostly those of one word."""
    part: list[int] = []
    for token, piece in zip(token_ids, vocabulary.to_pieces(token_ids), strict=True):
        if part and piece.startswith(WORD_START_MARKERS):
            yield part
            part = []
        part.append(token)
    if part:
        yield part


def count_words(vocabulary: Vocabulary, token_ids: list[int]) -> tuple[list[int], list[str]]:
    """For each token of a part how many words there are up to it, and all these words."""
    words = vocabulary.decode(token_ids).split()
    if not words and vocabulary.unknown in token_ids:
        words = [UNKNOWN_WORD]
    if len(words) < 2:
        return [len(words)] * len(token_ids), words
    counts = [len(vocabulary.decode(token_ids[: end + 1]).split()) for end in range(len(token_ids))]
    return [min(count, len(words)) for count in counts], words


def match_words(decoded_words: Sequence[str], words: Sequence[str]) -> list[int | None]:
    """For each word as it is spelled the one of the text: equal ones, and between them in proportion."""
    places: list[int | None] = [None] * len(decoded_words)
    for _, a, b, c, d in SequenceMatcher(None, decoded_words, words, autojunk=False).get_opcodes():
        for i in range(a, b):
            places[i] = c + (i - a) * (d - c) // (b - a) if d > c else None
    return places


# ---- every place to look at ------------------------------------------------------------------------------------------


def list_selections(model: nn.Module) -> list[HeadSelection]:
    """Every step, layer and head, and the mean of a layer's heads before these."""
    layers = find_cross_layers(model)
    heads = [None, *((head,) for head in range(count_max_heads(layers)))]
    return [
        HeadSelection(layer=layer, heads=some, shift=shift)
        for shift in SHIFTS
        for layer in range(len(layers))
        for some in heads
    ]


def compute_word_weights(
    model: Seq2Seq, tokenizer: Tokenizer, sources: Sequence[str], targets: Sequence[str], rows: Sequence[EncodedPair]
) -> Iterator[tuple[int, Tensor]]:
    """For each pair with words on both sides its place and (choices, target words, source words)."""
    layers = range(len(find_cross_layers(model)))
    for place, weights in compute_cross_weights(model, rows, layers):
        words = TokenWordMap.from_row(tokenizer, sources[place], targets[place], rows[place])
        if words.source_word_count and words.target_word_count:
            both = torch.cat([weights.mean(1, keepdim=True), weights], 1)  # (layers, 1 + H, Tt, Ts)
            last = both.shape[2] - 1
            steps = torch.stack([both[:, :, int(shift) :][:, :, :last] for shift in SHIFTS])
            yield place, words.pool_by_word(steps).flatten(0, 2)


def select_by_agreement(
    model: Seq2Seq,
    tokenizer: Tokenizer,
    sources: Sequence[str],
    targets: Sequence[str],
    *,
    to: str | None = None,
    max_pairs: int = MAX_SELECTION_PAIRS,
) -> MeasuredSelection:
    """The choice for a model without alignments by hand: where most links are the best of both their words.

    A head that aligns has a word of its own for nearly each target word; one that does something else has not.
    """
    check_pairs(sources, targets)
    rows = encode_pairs(model, tokenizer, sources[:max_pairs], targets[:max_pairs], to)
    shares = torch.zeros(len(list_selections(model)), 2)
    for _, weights in compute_word_weights(model, tokenizer, sources, targets, rows):
        shares += count_mutual_links(weights)
    if not shares[:, 1].any():
        raise AlignmentError("there must be pairs with words on both sides to choose heads by, but there are none")
    share = shares[:, 0] / shares[:, 1].clamp(min=1)
    best = int(share.argmax())
    return MeasuredSelection(
        selection=list_selections(model)[best],
        agreement=100 * float(share[best]),
        sentences=len(rows),
        fingerprint=compute_fingerprint(model),
    )


def count_mutual_links(weights: Tensor) -> Tensor:
    """(choices, target words, source words) -> (choices, 2): links that are the best of both their words; all links."""
    best, back = weights.argmax(-1), weights.argmax(-2)  # (choices, target words), (choices, source words)
    made = weights.amax(-1) > 0
    both = back.gather(-1, best) == torch.arange(weights.shape[1])
    return torch.stack([(both & made).sum(-1), made.sum(-1)], -1).float()


# ---- what a model folder remembers -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MeasuredSelection:
    """`alignment.json`: a choice, and how it was found."""

    selection: HeadSelection
    aer: float | None = None  # percent, on sentences that it was not chosen by
    agreement: float | None = None  # percent of links that are the best of both their words
    sentences: int
    fingerprint: str  # the mark of the weights


def get_default_selection(model: nn.Module) -> HeadSelection:
    """For a model that nobody has measured: the middle layer, when the token is read. Layers above it look ahead to the
    next token already; how much worse they are stands in docs/log.md."""
    layers = [place for place, layer in enumerate(find_cross_layers(model)) if layer.heads] or [0]
    return HeadSelection(layer=layers[(len(layers) - 1) // 2])


def load_selection(folder: Path, model: nn.Module) -> HeadSelection:
    """What the folder remembers of these very weights, or the default."""
    found = load_measured_selection(folder, model)
    return found.selection if found else get_default_selection(model)


def load_measured_selection(folder: Path, model: nn.Module) -> MeasuredSelection | None:
    """None: nothing, or of other weights, such as before the model was trained further."""
    path = Path(folder) / ALIGNMENT_FILE
    if not path.exists():
        return None
    measured = settings.from_dict(MeasuredSelection, settings.read_json(path), where=str(path))
    if measured.fingerprint != compute_fingerprint(model):
        return None
    check_selection(measured.selection, model, f"{path}: ")
    return measured


def save_measured_selection(folder: Path, measured: MeasuredSelection) -> None:
    settings.write_json(settings.to_dict(measured), Path(folder) / ALIGNMENT_FILE)


def check_selection(selection: HeadSelection, model: nn.Module, location: str = "") -> None:
    layers = find_cross_layers(model)
    if not 0 <= selection.layer < len(layers):
        raise AlignmentError(
            f"{location}the layer to align by must be from 0 to {len(layers) - 1}, but is {selection.layer}; "
            "choose another, or measure again with attent score --alignment"
        )
    count = layers[selection.layer].heads
    if selection.heads is not None and not (selection.heads and all(0 <= head < count for head in selection.heads)):
        raise AlignmentError(
            f"{location}the heads to align by must be from 0 to {count - 1}, but are {_join_numbers(selection.heads) or 'none'}; "
            "choose others, or measure again with attent score --alignment"
        )


def compute_fingerprint(model: nn.Module) -> str:
    """By which to know these weights again, in full precision or half: a sample of each parameter."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters(), key=lambda each: each[0]):
        some = parameter.detach().flatten()[:FINGERPRINT_VALUES].bfloat16().cpu()
        digest.update(f"{name} {tuple(parameter.shape)}\n".encode())
        digest.update(some.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()
