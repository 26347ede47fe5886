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
from attent.decode.force import BATCH_TOKENS, Ids, Pass, Row, batches, check_pairs, encoded, evaluating
from attent.models import Seq2Seq
from attent.nn import Look, attention_layers
from attent.nn.attention import Attention

if TYPE_CHECKING:
    from attent.text.tokenizer import Tokenizer
    from attent.text.vocabulary import Vocabulary

NAME = "alignment.json"
BEGINNINGS = ("▁", "Ġ")  # with which a piece says that a space stands before it
UNSEEN = "\ufffd"  # for what a vocabulary cannot spell
STEPS = (False, True)  # when a token is written, when it is read
ENOUGH = 500  # pairs to choose heads by
SAMPLE = 1024  # numbers of each parameter that go into the mark of a model

Links = tuple[tuple[int, int], ...]  # (source word, target word), from 0


class AlignmentError(ValueError):
    """Alignments that cannot be made or chosen, in a sentence."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Where to look: heads of a layer of the decoder, from 0."""

    layer: int
    heads: tuple[int, ...] | None = None  # whose mean is taken; None: of all
    shift: bool = True  # look when the token is read, one step after it was written

    def __str__(self) -> str:
        heads = "mean of all heads" if self.heads is None else f"head{'s' * (len(self.heads) > 1)} {_list(self.heads)}"
        return f"layer {self.layer}, {heads}, when it is {'read' if self.shift else 'written'}"


def _list(numbers: Sequence[int]) -> str:
    return " + ".join(map(str, numbers))


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """Of one pair, by its words: what stands between spaces."""

    links: Links  # for each target word the source word that it looked at most, in the order of targets
    weights: tuple[tuple[float, ...], ...]  # target words x source words; what looked at the end is in none of them

    @property
    def mutual(self) -> Links:
        """The surest links: those whose source word, too, was looked at by no other target word more."""
        best = [max(range(len(column)), key=column.__getitem__) for column in zip(*self.weights, strict=True)]
        return tuple((source, target) for source, target in self.links if best[source] == target)

    @property
    def pharaoh(self) -> str:
        return pharaoh(self.links)


def pharaoh(links: Links) -> str:
    """`0-0 1-2`: source-target, from 0."""
    return " ".join(f"{source}-{target}" for source, target in sorted(links))


def align(
    model: Seq2Seq,
    tokenizer: Tokenizer,
    sources: Sequence[str],
    targets: Sequence[str],
    choice: Choice,
    *,
    to: str | None = None,
    batch_tokens: int = BATCH_TOKENS,
) -> list[Alignment]:
    """Of each target with its source; `choice` may be that of `choice_of`."""
    check_pairs(sources, targets)
    rows = encoded(model, tokenizer, sources, targets, to, batch_tokens)
    return align_rows(model, tokenizer, sources, targets, rows, choice, batch_tokens)


def align_rows(
    model: Seq2Seq,
    tokenizer: Tokenizer,
    sources: Sequence[str],
    targets: Sequence[str],
    rows: Sequence[Row],
    choice: Choice,
    batch_tokens: int = BATCH_TOKENS,
) -> list[Alignment]:
    """The same where the ids are known, such as those that a search has found: each side with its end."""
    check_choice(choice, model)
    found = [Alignment(links=(), weights=())] * len(rows)
    for place, weights in cross_weights(model, rows, [choice.layer], batch_tokens):
        words = WordPair.of(tokenizer, sources[place], targets[place], rows[place])
        found[place] = words.alignment(chosen(weights[0], choice))
    return found


def chosen(weights: Tensor, choice: Choice) -> Tensor:
    """(H, Tt, Ts) of one layer -> (Tt - 1, Ts): for each target token but the end, where it looked."""
    heads = weights if choice.heads is None else weights[list(choice.heads)]
    return heads.mean(0)[choice.shift :][: weights.shape[1] - 1]


# ---- looking ---------------------------------------------------------------------------------------------------------


def cross_layers(model: nn.Module) -> list[Attention]:
    """The layers by which a decoder looks at the source, the first one first."""
    named = attention_layers(model)
    layers = [layer for path, layer in named.items() if path.startswith("decoder.") and path.endswith(".cross")]
    if not layers:
        raise AlignmentError(
            f"the model must have cross-attention to align with, but this {type(model).__name__} has none; "
            "give an encoder-decoder model"
        )
    return layers


def cross_weights(
    model: Seq2Seq, rows: Sequence[Row], layers: Sequence[int], batch_tokens: int = BATCH_TOKENS
) -> Iterator[tuple[int, Tensor]]:
    """For each pair its place and (layers, H, Tt, Ts): what each token looks at when it is written."""
    every = cross_layers(model)
    most = most_heads([every[i] for i in layers])
    sources, targets = [row.source for row in rows], [row.target for row in rows]
    with evaluating(model), torch.no_grad():
        for places in batches(sources, targets, batch_tokens):
            batch = Pass.of(model, [sources[i] for i in places], [targets[i] for i in places])
            with watched([every[i] for i in layers]) as seen:
                batch.states(model)
            every_head = [with_heads(weights.float().cpu(), most) for (weights,) in seen]
            together = torch.stack(every_head, 1)  # (B, layers, H, Tt, Ts)
            for weights, place in zip(together, places, strict=True):
                yield place, weights[..., : len(targets[place]), : len(sources[place])]


def most_heads(layers: Sequence[Attention]) -> int:
    """Of a pruned model each layer may have another number, also none."""
    return max(1, *(layer.heads for layer in layers))


def with_heads(weights: Tensor, count: int) -> Tensor:
    """(B, H, Tt, Ts) with as many heads as the layer of most: those that were pruned look at nothing."""
    return F.pad(weights, (0, 0, 0, 0, 0, count - weights.shape[1]))


@contextmanager
def watched(layers: Sequence[Attention]) -> Iterator[list[list[Tensor]]]:
    """For each layer its weights in each call while the block lasts."""
    seen: list[list[Tensor]] = [[] for _ in layers]
    taps = [tap(into) for into in seen]
    for layer, each in zip(layers, taps, strict=True):
        layer.taps.append(each)
    try:
        yield seen
    finally:
        for layer, each in zip(layers, taps, strict=True):
            layer.taps.remove(each)


def tap(into: list[Tensor]) -> Callable[[Look], None]:
    return lambda look: into.append(look.weights)


# ---- tokens to words -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class WordPair:
    """Which word each token of a pair belongs to; None: to none."""

    source: list[int | None]
    target: list[int | None]  # without the end
    source_words: int
    target_words: int

    @classmethod
    def of(cls, tokenizer: Tokenizer, source: str, target: str, row: Row) -> WordPair:
        source_words, target_words = source.split(), target.split()
        return cls(
            source=[*words_of(tokenizer.source, row.source[:-1], source_words), None],
            target=words_of(tokenizer.target, row.target[:-1], target_words),
            source_words=len(source_words),
            target_words=len(target_words),
        )

    def alignment(self, weights: Tensor) -> Alignment:
        """From (target tokens, source tokens)."""
        by_word = self.by_word(weights)
        if not self.source_words:
            return Alignment(links=(), weights=((),) * self.target_words)
        links = tuple((int(row.argmax()), place) for place, row in enumerate(by_word) if float(row.max()) > 0)
        return Alignment(links=links, weights=tuple(tuple(row) for row in by_word.tolist()))

    def by_word(self, weights: Tensor) -> Tensor:
        """(..., target tokens, source tokens) -> (..., target words, source words): a word is looked at as much as all
        its tokens together, and looks as they do on average."""
        summed = weights @ table(self.source, self.source_words)
        means = table(self.target, self.target_words)
        return (means / means.sum(0).clamp(min=1)).T @ summed


def table(words: Sequence[int | None], count: int) -> Tensor:
    """(tokens, words): 1 where the token is of the word."""
    ones = torch.zeros(len(words), count)
    for token, word in enumerate(words):
        if word is not None:
            ones[token, word] = 1
    return ones


def words_of(vocabulary: Vocabulary, ids: Ids, words: Sequence[str]) -> list[int | None]:
    """For each token the word of the text that it belongs to."""
    places: list[int | None] = []
    spelled: list[str] = []
    for part in parts_of(vocabulary, ids):
        counts, found = spelled_out(vocabulary, part)
        places += [None if count == 0 else len(spelled) + count - 1 for count in counts]
        spelled += found
    if len(spelled) == len(words):
        return places
    others = matched(spelled, words)  # a vocabulary that spells the text otherwise, or a text that was cut
    return [None if place is None else others[place] for place in places]


def parts_of(vocabulary: Vocabulary, ids: Ids) -> Iterator[list[int]]:
    """Tokens up to the next that begins with a space: mostly those of one word."""
    part: list[int] = []
    for token, piece in zip(ids, vocabulary.pieces(ids), strict=True):
        if part and piece.startswith(BEGINNINGS):
            yield part
            part = []
        part.append(token)
    if part:
        yield part


def spelled_out(vocabulary: Vocabulary, part: list[int]) -> tuple[list[int], list[str]]:
    """For each token of a part how many words there are up to it, and all these words."""
    words = vocabulary.decode(part).split()
    if not words and vocabulary.unknown in part:
        words = [UNSEEN]
    if len(words) < 2:
        return [len(words)] * len(part), words
    counts = [len(vocabulary.decode(part[: end + 1]).split()) for end in range(len(part))]
    return [min(count, len(words)) for count in counts], words


def matched(spelled: Sequence[str], words: Sequence[str]) -> list[int | None]:
    """For each word as it is spelled the one of the text: equal ones, and between them in proportion."""
    places: list[int | None] = [None] * len(spelled)
    for _, a, b, c, d in SequenceMatcher(None, spelled, words, autojunk=False).get_opcodes():
        for i in range(a, b):
            places[i] = c + (i - a) * (d - c) // (b - a) if d > c else None
    return places


# ---- every place to look at ------------------------------------------------------------------------------------------


def choices(model: nn.Module) -> list[Choice]:
    """Every step, layer and head, and the mean of a layer's heads before these."""
    layers = cross_layers(model)
    heads = [None, *((head,) for head in range(most_heads(layers)))]
    return [
        Choice(layer=layer, heads=some, shift=shift)
        for shift in STEPS
        for layer in range(len(layers))
        for some in heads
    ]


def everywhere(
    model: Seq2Seq, tokenizer: Tokenizer, sources: Sequence[str], targets: Sequence[str], rows: Sequence[Row]
) -> Iterator[tuple[int, Tensor]]:
    """For each pair with words on both sides its place and (choices, target words, source words)."""
    layers = range(len(cross_layers(model)))
    for place, weights in cross_weights(model, rows, layers):
        words = WordPair.of(tokenizer, sources[place], targets[place], rows[place])
        if words.source_words and words.target_words:
            both = torch.cat([weights.mean(1, keepdim=True), weights], 1)  # (layers, 1 + H, Tt, Ts)
            last = both.shape[2] - 1
            steps = torch.stack([both[:, :, int(shift) :][:, :, :last] for shift in STEPS])
            yield place, words.by_word(steps).flatten(0, 2)


def agreed(
    model: Seq2Seq,
    tokenizer: Tokenizer,
    sources: Sequence[str],
    targets: Sequence[str],
    *,
    to: str | None = None,
    most: int = ENOUGH,
) -> Measured:
    """The choice for a model without alignments by hand: where most links are the best of both their words.

    A head that aligns has a word of its own for nearly each target word; one that does something else has not.
    """
    check_pairs(sources, targets)
    rows = encoded(model, tokenizer, sources[:most], targets[:most], to)
    shares = torch.zeros(len(choices(model)), 2)
    for _, weights in everywhere(model, tokenizer, sources, targets, rows):
        shares += mutual_links(weights)
    if not shares[:, 1].any():
        raise AlignmentError("there must be pairs with words on both sides to choose heads by, but there are none")
    share = shares[:, 0] / shares[:, 1].clamp(min=1)
    best = int(share.argmax())
    return Measured(
        choice=choices(model)[best], agreement=100 * float(share[best]), sentences=len(rows), model=mark(model)
    )


def mutual_links(weights: Tensor) -> Tensor:
    """(choices, target words, source words) -> (choices, 2): links that are the best of both their words; all links."""
    best, back = weights.argmax(-1), weights.argmax(-2)  # (choices, target words), (choices, source words)
    made = weights.amax(-1) > 0
    both = back.gather(-1, best) == torch.arange(weights.shape[1])
    return torch.stack([(both & made).sum(-1), made.sum(-1)], -1).float()


# ---- what a model folder remembers -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Measured:
    """`alignment.json`: a choice, and how it was found."""

    choice: Choice
    aer: float | None = None  # percent, on sentences that it was not chosen by
    agreement: float | None = None  # percent of links that are the best of both their words
    sentences: int
    model: str  # the mark of the weights


def default_choice(model: nn.Module) -> Choice:
    """For a model that nobody has measured: the middle layer, when the token is read. Layers above it look ahead to the
    next token already; how much worse they are stands in docs/log.md."""
    layers = [place for place, layer in enumerate(cross_layers(model)) if layer.heads] or [0]
    return Choice(layer=layers[(len(layers) - 1) // 2])


def choice_of(folder: Path, model: nn.Module) -> Choice:
    """What the folder remembers of these very weights, or the default."""
    found = remembered(folder, model)
    return found.choice if found else default_choice(model)


def remembered(folder: Path, model: nn.Module) -> Measured | None:
    """None: nothing, or of other weights, such as before the model was trained further."""
    path = Path(folder) / NAME
    if not path.exists():
        return None
    measured = settings.from_dict(Measured, settings.read_json(path), where=str(path))
    if measured.model != mark(model):
        return None
    check_choice(measured.choice, model, f"{path}: ")
    return measured


def remember(folder: Path, measured: Measured) -> None:
    settings.write_json(settings.to_dict(measured), Path(folder) / NAME)


def check_choice(choice: Choice, model: nn.Module, where: str = "") -> None:
    layers = cross_layers(model)
    if not 0 <= choice.layer < len(layers):
        raise AlignmentError(
            f"{where}the layer to align by must be from 0 to {len(layers) - 1}, but is {choice.layer}; "
            "choose another, or measure again with attent score --alignment"
        )
    count = layers[choice.layer].heads
    if choice.heads is not None and not (choice.heads and all(0 <= head < count for head in choice.heads)):
        raise AlignmentError(
            f"{where}the heads to align by must be from 0 to {count - 1}, but are {_list(choice.heads) or 'none'}; "
            "choose others, or measure again with attent score --alignment"
        )


def mark(model: nn.Module) -> str:
    """By which to know these weights again, in full precision or half: a sample of each parameter."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters(), key=lambda each: each[0]):
        some = parameter.detach().flatten()[:SAMPLE].bfloat16().cpu()
        digest.update(f"{name} {tuple(parameter.shape)}\n".encode())
        digest.update(some.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()
