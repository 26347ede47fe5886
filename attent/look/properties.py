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
from attent.decode.align import BEGINNINGS, WordPair, mark, mutual_links
from attent.decode.force import Pass, Row, batches, check_pairs, encoded, evaluating
from attent.look.record import tapped
from attent.look.trace import weights_of
from attent.models import Seq2Seq
from attent.nn import Look, attention_layers

if TYPE_CHECKING:
    from attent.text.tokenizer import Tokenizer
    from attent.text.vocabulary import Vocabulary

NAME = "heads.json"
ENOUGH = 500  # pairs: with twice as many, no share of any head moved by more than 0.015
BATCH_TOKENS = 2048  # of one side, filled up, that go through the model at once
LONGEST = 512  # tokens of one side: the squares of longer ones would need gigabytes
ROWS = 256  # tokens of a longer sentence that are asked where they look, at even distances
UNLIKE = -1  # the number of a token that is like no other

Unit = Literal["share", "bits", "tokens", "correlation"]


FEWEST_WORDS = 2  # of each side: one word has nobody to compete with for its links


class PropertiesError(ValueError):
    """Heads that cannot be measured, in a sentence."""


@dataclass(frozen=True, kw_only=True)
class Values:
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
class Column:
    """What a value means."""

    key: str
    label: str
    unit: Unit
    help: str


COLUMNS = (
    Column("itself", "itself", "share", "Weight on the token itself; in a decoder, on the one that it has just read."),
    Column("previous", "previous", "share", "Weight on the token before it, where that is not the first."),
    Column("next", "next", "share", "Weight on the token behind it, where that may be seen and is not the end."),
    Column(
        "first",
        "first",
        "share",
        "Weight on the first token, in a decoder the start. In self-attention the first two tokens are left out, for "
        "which it is themselves or their neighbour.",
    ),
    Column(
        "end",
        "end",
        "share",
        "Weight on the end or a separator, where heads rest that have nothing to say. In self-attention it and the "
        "token before it are left out, for which it is themselves or their neighbour.",
    ),
    Column(
        "punctuation", "punctuation", "share", "Weight on punctuation other than the token itself, if there is any."
    ),
    Column(
        "same",
        "same token",
        "share",
        "Weight on tokens spelled alike elsewhere, of the tokens that have such. In cross-attention: like the token "
        "that is being written, as names and numbers are.",
    ),
    Column(
        "shared",
        "one for all",
        "share",
        "Weight on the token that a sentence looks at most: near 100% where every token looks at the same one.",
    ),
    Column("distance", "distance", "tokens", "How many tokens away it looks, on average."),
    Column("entropy", "entropy", "bits", "0: it looks at one token alone. 3 bits: as spread as evenly over 8 tokens."),
    Column("evenness", "evenness", "share", "Entropy as a share of the most that there can be: 100% is all alike."),
    Column("confidence", "confidence", "share", "Each row's greatest weight, the end left out (Voita et al. 2019)."),
    Column("alignment", "alignment", "share", "The better of: when written, when read. Chance alone gives up to half."),
    Column(
        "written",
        "aligned when written",
        "share",
        "Links that are the best of both their words: of the source words that target words look at most while they "
        "are written, those that no other target word looks at more.",
    ),
    Column("read", "aligned when read", "share", "The same one step later, when the decoder has read the word."),
    Column(
        "diagonal",
        "diagonal",
        "correlation",
        "Correlation between where a target token stands and where it looks: 1 on the diagonal, 0 without order.",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Head:
    path: str  # of its attention, such as decoder.blocks.3.cross
    head: int  # from 0
    says: str
    values: Values


@dataclass(frozen=True, kw_only=True)
class Properties:
    """`heads.json`: what every head of a model does."""

    sentences: int
    of: str  # what sentences they were
    heads: tuple[Head, ...]
    model: str = ""  # the mark of the weights

    def document(self) -> dict[str, Any]:
        """The section `properties` of a document, with those columns that any head has."""
        rows = [asdict(head) for head in self.heads]
        for row in rows:
            row["values"] = {key: value if value is None else round(value, 4) for key, value in row["values"].items()}
        columns = [asdict(each) for each in COLUMNS if any(row["values"][each.key] is not None for row in rows)]
        for row in rows:
            row["values"] = {column["key"]: row["values"][column["key"]] for column in columns}
        return {"sentences": self.sentences, "of": self.of, "columns": columns, "heads": rows}


def remember(folder: Path, properties: Properties) -> None:
    settings.write_json(settings.to_dict(properties), Path(folder) / NAME)


def remembered(folder: Path, model: nn.Module) -> Properties | None:
    """What the folder holds of these very weights; None: nothing, or of other weights."""
    path = Path(folder) / NAME
    if not path.exists():
        return None
    found = settings.from_dict(Properties, settings.read_json(path), where=str(path))
    return found if found.model == mark(model) else None


# ---- over many pairs -------------------------------------------------------------------------------------------------


def measure(
    model: Seq2Seq,
    tokenizer: Tokenizer,
    sources: Sequence[str],
    targets: Sequence[str],
    *,
    to: str | None = None,
    most: int = ENOUGH,
    of: str = "the pairs that were given",
    progress: Callable[[int, int], None] | None = None,
    batch_tokens: int = BATCH_TOKENS,
) -> Properties:
    """What each head does while the model reads the sources and writes the targets.

    to        the language of the targets, for a model trained with tags
    most      if there are more pairs, so many are taken, at even distances
    progress  is told after each batch how many pairs are done, and of how many
    """
    check_pairs(sources, targets)
    chosen = evenly(len(sources), most)
    sources, targets = [sources[i] for i in chosen], [targets[i] for i in chosen]
    if not sources:
        raise PropertiesError("there must be a pair to measure heads with, but there is none; give some")
    rows = encoded(model, tokenizer, sources, targets, to, min(batch_tokens, LONGEST))
    sums = {path: Sums(layer.heads) for path, layer in attention_layers(model).items()}
    done = 0
    with evaluating(model), torch.no_grad():
        for places in batches([row.source for row in rows], [row.target for row in rows], batch_tokens):
            some = [rows[i] for i in places]
            words = [WordPair.of(tokenizer, sources[i], targets[i], rows[i]) for i in places]
            with watching(model, Scenes(model, tokenizer, some, words), sums):
                Pass.of(model, [row.source for row in some], [row.target for row in some]).states(model)
            done += len(places)
            if progress is not None:
                progress(done, len(rows))
    return Properties(sentences=len(rows), of=of, heads=tuple(described(sums)), model=mark(model))


def evenly(count: int, most: int) -> list[int]:
    """At most so many places, from the beginning to the end: a corpus often is in some order."""
    if most < 1:
        raise PropertiesError(f"`most` must be 1 or more, but is {most}")
    taken = min(count, most)
    return [i * count // taken for i in range(taken)]


def watching(model: nn.Module, scenes: Scenes, sums: Mapping[str, Sums]) -> AbstractContextManager[None]:
    """While the block lasts, what each layer does is added up at once."""

    def tap(path: str) -> Callable[[Look], None]:
        return lambda look: sums[path].observe(look.weights.float(), scenes.of(path, look))

    layers = attention_layers(model)
    return tapped(layers, {path: tap(path) for path in layers})


class Scenes:
    """What there is to look at in a batch: of every layer of one kind the same, so it is worked out once."""

    def __init__(self, model: Seq2Seq, tokenizer: Tokenizer, rows: Sequence[Row], words: Sequence[WordPair]) -> None:
        numbers: dict[str, int] = {}
        start = model.config.start
        self.source = side(tokenizer.source, [row.source for row in rows], numbers)
        self.target = side(tokenizer.target, [row.target for row in rows], numbers)
        self.read = side(tokenizer.target, [[start, *row.target[:-1]] for row in rows], numbers, special=(start,))
        self.words = words
        self.known: dict[tuple[str, str], Scene] = {}

    def of(self, path: str, look: Look) -> Scene:
        kind = path.partition(".")[0], path.rpartition(".")[2]
        if kind not in self.known:
            self.known[kind] = self.made(*kind, look)
        return self.known[kind]

    def made(self, stack: str, name: str, look: Look) -> Scene:
        B, _, Tq, Tk = look.weights.shape
        allowed = look.mask.dense(B, Tq, Tk, look.weights.device)[:, 0].cpu()
        if name == "cross":
            return Scene.of(self.target, self.source, allowed, own=False, words=self.words)
        both = self.source if stack == "encoder" else self.read
        return Scene.of(both, both, allowed, own=True)


# ---- tokens ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Side:
    """The tokens of some sentences, (B, T) each, filled up on the right."""

    spelled: Tensor  # the same number where two tokens are spelled alike
    end: Tensor
    punctuation: Tensor
    real: Tensor


def side(
    vocabulary: Vocabulary, rows: Sequence[Sequence[int]], numbers: dict[str, int], special: Sequence[int] = ()
) -> Side:
    ends = {vocabulary.end} - set(special)  # a decoder that starts from the end (T5 from padding) has no end to read
    silent = {vocabulary.end, vocabulary.pad, vocabulary.start, vocabulary.unknown, *special}
    silent |= {vocabulary.tag(language) for language in vocabulary.tags}
    known = dict(pieces_of(vocabulary, {i for row in rows for i in row} - silent))
    return Side(
        spelled=filled([[numbered(known.get(i, ""), numbers) for i in row] for row in rows], UNLIKE),
        end=filled([[i in ends for i in row] for row in rows], False),
        punctuation=filled([[is_punctuation(known.get(i, "")) for i in row] for row in rows], False),
        real=filled([[True for _ in row] for row in rows], False),
    )


def pieces_of(vocabulary: Vocabulary, ids: Iterable[int]) -> Iterator[tuple[int, str]]:
    inside = [i for i in ids if i < vocabulary.size]  # an imported model may have rows that no piece belongs to
    return zip(inside, vocabulary.pieces(inside), strict=True)


def numbered(piece: str, numbers: dict[str, int]) -> int:
    return numbers.setdefault(piece, len(numbers)) if piece else UNLIKE


def is_punctuation(piece: str) -> bool:
    """Of signs alone: `▁"`, `.`, `--`; also currency and the like."""
    signs = piece.lstrip("".join(BEGINNINGS)).strip()
    return bool(signs) and all(unicodedata.category(sign)[0] in "PS" for sign in signs)


def filled(rows: Sequence[Sequence[int]], filler: int) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[filler] * (longest - len(row))] for row in rows])


# ---- what there is to look at ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Of some sentences: who had a choice, and where each kind of token stands for them."""

    choosing: Tensor  # (B, Tq) tokens that could look at more than one
    visible: Tensor  # (B, Tq) at how many
    kinds: Mapping[str, Tensor]  # (B, Tq, Tk), empty rows for those who had no choice
    away: Tensor | None  # (Tq, Tk), in self-attention
    end: Tensor  # (B, 1, 1, Tk)
    moments: Tensor | None  # (6, B, Tq, Tk), in cross-attention: of the two places, each from 0 to 1
    words: Sequence[WordPair] = ()

    def thinned(self, rows: Tensor) -> Scene:
        """For some of those who look; what has gaps tells no alignment."""
        if len(rows) == self.choosing.shape[1]:
            return self
        return replace(
            self,
            choosing=self.choosing[:, rows],
            visible=self.visible[:, rows],
            kinds={key: where[:, rows] for key, where in self.kinds.items()},
            away=None if self.away is None else self.away[rows],
            moments=None if self.moments is None else self.moments[:, :, rows],
            words=(),
        )

    @classmethod
    def of(cls, queries: Side, keys: Side, allowed: Tensor, *, own: bool, words: Sequence[WordPair] = ()) -> Scene:
        seen = queries.real[:, :, None] & keys.real[:, None] & allowed
        visible = seen.sum(-1)
        choice = (visible > 1)[..., None]
        kinds = {key: where & seen & choice for key, where in kinds_of(queries, keys, own).items()}
        q, k = (torch.arange(n)[:, None] for n in seen.shape[1:])
        return cls(
            choosing=visible > 1,
            visible=visible,
            kinds=kinds,
            away=(q - k.T).abs() if own else None,
            end=keys.end[:, None, None],
            moments=None if own else moments(queries.real, keys.real),
            words=words,
        )


def kinds_of(queries: Side, keys: Side, own: bool) -> dict[str, Tensor]:
    """For each kind, (B, Tq, Tk): is that token of the kind, for the one that looks?"""
    q, k = torch.arange(queries.real.shape[1])[:, None], torch.arange(keys.real.shape[1])
    ends, marks = keys.end[:, None], keys.punctuation[:, None]
    alike = (queries.spelled[:, :, None] == keys.spelled[:, None]) & (keys.spelled != UNLIKE)[:, None]
    if not own:
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


def moments(queries: Tensor, keys: Tensor) -> Tensor:
    """1, x, y, xx, yy, xy of the places of both sides, (6, B, Tq, Tk); nothing of filler."""
    x, y = places(queries)[:, :, None], places(keys)[:, None]
    real = queries[:, :, None] & keys[:, None]
    one = torch.ones(())
    return torch.stack([real * each for each in (one, x, y, x * x, y * y, x * y)])


def places(real: Tensor) -> Tensor:
    """From 0 for a sentence's first token to 1 for its last."""
    return torch.arange(real.shape[1]) / (real.sum(1, keepdim=True) - 1).clamp(min=1)


# ---- sums that run along ---------------------------------------------------------------------------------------------


@dataclass
class Sums:
    """Of the heads of one layer, over all that was seen so far."""

    heads: int
    numbers: tuple[int, ...] | None = None  # of these heads; None: from 0
    own: bool = True
    causal: bool = True  # until something later was seen
    totals: dict[str, Tensor] = field(default_factory=dict)  # (H, 2): a sum, and of how many
    moments: Tensor | None = None  # (6, H)

    def add(self, key: str, sums: Tensor, count: Tensor | float) -> None:
        new = torch.stack([sums.double().cpu(), torch.as_tensor(count).double().cpu().expand(self.heads)], -1)
        self.totals[key] = self.totals.get(key, torch.zeros(self.heads, 2, dtype=torch.float64)) + new

    def observe(self, weights: Tensor, scene: Scene) -> None:
        """(B, H, Tq, Tk), and what there was to look at."""
        weights = weights.cpu()
        rows = scene.choosing[:, None].float()  # (B, 1, Tq)
        count = scene.choosing.sum()
        for key, where in scene.kinds.items():
            self.add(key, torch.einsum("bhqk,bqk->h", weights, where.float()), where.any(-1).sum())
        bits = torch.special.entr(weights).sum(-1) / math.log(2)
        self.add("entropy", (bits * rows).sum((0, 2)), count)
        self.add("possible", (scene.visible.clamp(min=1).log2() * scene.choosing).sum().expand(self.heads), count)
        tokens = rows.sum(-1).clamp(min=1)[..., None]  # (B, 1, 1)
        most = ((weights * rows[..., None]).sum(2) / tokens).amax(-1)  # (B, H)
        self.add("shared", most.sum(0), scene.choosing.any(-1).sum())
        self.add("confidence", (weights.masked_fill(scene.end, 0).amax(-1) * rows).sum((0, 2)), count)
        if scene.away is not None:
            away = (weights * scene.away).sum(-1)
            self.add("distance", (away * rows).sum((0, 2)), count)
        self.observe_cross(weights, scene)

    def observe_cross(self, weights: Tensor, scene: Scene) -> None:
        self.own = scene.moments is None
        self.causal = "next" not in scene.kinds or (self.causal and not bool(scene.kinds["next"].any()))
        if scene.moments is not None:
            new = torch.einsum("bhqk,mbqk->mh", weights, scene.moments).double()
            self.moments = new if self.moments is None else self.moments + new
        for row, words in zip(weights, scene.words, strict=False):
            for key, links in (("written", mutual(row, words, 0)), ("read", mutual(row, words, 1))):
                self.add(key, links[:, 0], links[:, 1])

    def values(self, head: int) -> Values:
        means = {key: mean(*pair[head].tolist()) for key, pair in self.totals.items()}
        possible = means.pop("possible", None)
        entropy = means.get("entropy")
        means["evenness"] = None if entropy is None or not possible else entropy / possible
        aligned = [share for key in ("written", "read") if (share := means.get(key)) is not None]
        means["alignment"] = max(aligned, default=None)
        means["diagonal"] = None if self.moments is None else correlation(self.moments[:, head].tolist())
        return Values(**means)


def mutual(weights: Tensor, words: WordPair, shift: int) -> Tensor:
    """(H, Tq, Tk) of one pair, maybe with filler -> (H, 2): links that are the best of both their words; all."""
    if words.source_words < FEWEST_WORDS or words.target_words < FEWEST_WORDS:
        return torch.zeros(weights.shape[0], 2)
    tokens = weights[:, shift : shift + len(words.target), : len(words.source)]
    words = replace(words, target=words.target[: tokens.shape[1]])  # without an end, the last was never read
    return mutual_links(words.by_word(tokens))


def mean(total: float, count: float) -> float | None:
    return total / count if count else None


def correlation(sums: Sequence[float]) -> float | None:
    """From the sums of 1, x, y, xx, yy, xy. Without order where it always looks at one place."""
    n, x, y, xx, yy, xy = sums
    if not n:
        return None
    spread = max(0.0, xx / n - (x / n) ** 2) * max(0.0, yy / n - (y / n) ** 2)
    return (xy / n - x * y / n**2) / math.sqrt(spread) if spread > 1e-12 else 0.0


def described(sums: Mapping[str, Sums], own: Mapping[str, str] | None = None) -> Iterator[Head]:
    """`own`: what tokens are called for those who look at their own text; None: as in a text."""
    for path, each in sums.items():
        names = own or (WRITING if each.causal else OWN)
        for place, head in enumerate(each.numbers or range(each.heads)):
            values = each.values(place)
            words = cross_habit(values) if not each.own else own_habit(values, names)
            yield Head(path=path, head=head, says=words, values=values)


# ---- in words --------------------------------------------------------------------------------------------------------

MAIN = 0.5  # a share that is a habit
TOGETHER = 0.6  # two kinds that are one habit between them
ALIGNS, LOOSELY = 0.7, 0.6  # of the links mutual: chance gives about half, and of a few words any share
SURE = 0.5  # the confidence of a head whose links are to be believed
LEANS, CLEARLY = 0.33, 1.5  # a share that is a leaning, if it is so many times the next one
EVEN, WIDE = 0.9, 0.8  # of the greatest entropy
SHARP = 0.15

OWN = {
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
WRITING = OWN | {
    "itself": "the token just read",
    "previous": "the token before the one just read",
    "first": "the start",
}
PATCHES = OWN | {
    "previous": "the patch on its left",
    "next": "the patch on its right",
    "first": "the class token",
    "token": "patch",
    "text": "picture",
}
RESTING = ("first", "end", "punctuation")


def own_habit(values: Values, names: Mapping[str, str] = OWN) -> str:
    """One habit of self-attention, in words; `names` of what it looks at."""
    shares = shares_of(values, ("itself", "previous", "next", *RESTING))
    if values.same is not None and values.same >= MAIN > max(shares.values(), default=0.0):
        return f"looks at {names['same']} ({percent(values.same)} where there is one)"
    return (
        main(shares, names)
        or pair(shares, names)
        or near(shares, names)
        or spread(values)
        or sharp(values, names)
        or leaning(values, shares, names)
        or mixed(values, shares, names)
    )


def cross_habit(values: Values) -> str:
    """One habit of cross-attention, in words."""
    shares = shares_of(values, RESTING)
    resting, aligned = main(shares, OWN) or pair(shares, OWN), alignment(values)
    if resting and (rest := aligned or loosely(values)):
        return f"{resting}; what is left {rest}"
    return (
        resting
        or aligned
        or copying(values)
        or spread(values)
        or loosely(values)
        or sharp(values)
        or leaning(values, shares, OWN)
        or mixed(values, {}, OWN)
    )


def main(shares: Mapping[str, float], names: Mapping[str, str]) -> str:
    best = max(shares, key=shares.__getitem__, default=None)
    if best is None or shares[best] < MAIN:
        return ""
    return f"{'rests on' if best in RESTING else 'looks at'} {names[best]} ({percent(shares[best])})"


def pair(shares: Mapping[str, float], names: Mapping[str, str]) -> str:
    """The end and the full stop before it are looked at alike."""
    both = [shares.get(key, 0.0) for key in ("end", "punctuation")]
    if sum(both) < TOGETHER:
        return ""
    return f"rests on {names['end']} and on {names['punctuation']} ({percent(both[0])} + {percent(both[1])})"


def near(shares: Mapping[str, float], names: Mapping[str, str]) -> str:
    some = {key: shares[key] for key in ("previous", "itself", "next") if key in shares}
    if sum(some.values()) < TOGETHER:
        return ""
    return "stays near: " + ", ".join(f"{names[key]} {percent(share)}" for key, share in some.items())


def sharp(values: Values, names: Mapping[str, str] = OWN) -> str:
    if values.shared is not None and values.shared >= MAIN:
        one = f"one {names['token']} for the whole {names['text']}"
        return f"picks {one} ({percent(values.shared)}), wherever it stands"
    if values.evenness is None or values.evenness > SHARP:
        return ""
    return f"picks one {names['token']} by what it is, not by where it stands ({bits(values)})"


def shares_of(values: Values, keys: Sequence[str]) -> dict[str, float]:
    return {key: share for key in keys if (share := getattr(values, key)) is not None}


def alignment(values: Values) -> str:
    if values.alignment is None or values.alignment < ALIGNS or (values.confidence or 0.0) < SURE:
        return ""
    step = "written" if values.alignment == values.written else "read"
    return f"aligns: {percent(values.alignment)} of its links are mutual, when the word is {step}"


def copying(values: Values) -> str:
    """Of texts whose words are not to be aligned, such as numbers that are written anew."""
    if values.alignment is not None or values.same is None or values.same < MAIN:
        return ""
    return f"copies: looks at the token that is being written ({percent(values.same)} where there is one)"


def loosely(values: Values) -> str:
    if values.alignment is None or values.alignment < LOOSELY:
        return ""
    return f"aligns loosely ({percent(values.alignment)} of its links are mutual)"


def spread(values: Values) -> str:
    if values.evenness is None or values.evenness < WIDE:
        return ""
    return f"spreads {'over everything' if values.evenness >= EVEN else 'widely'} ({bits(values)})"


def leaning(values: Values, shares: Mapping[str, float], names: Mapping[str, str]) -> str:
    best, second = [*sorted(shares, key=lambda key: -shares[key]), None, None][:2]
    if best is None or shares[best] < max(LEANS, CLEARLY * shares.get(second or "", 0.0)):
        return ""
    return f"leans towards {names[best]} ({percent(shares[best])}), {bits(values)}"


def mixed(values: Values, shares: Mapping[str, float], names: Mapping[str, str]) -> str:
    parts = [f"{percent(values.alignment)} of its links are mutual"] if values.alignment is not None else []
    most = sorted(shares, key=lambda key: -shares[key])[:2]
    parts += [f"{names[key]} {percent(shares[key])}" for key in most]
    parts += [bits(values)] if values.entropy is not None else []
    return "no single habit: " + (", ".join(parts) or "nothing to choose from")


def bits(values: Values) -> str:
    assert values.entropy is not None
    possible = f" of {values.entropy / values.evenness:.1f}" if values.evenness else ""
    return f"{values.entropy:.1f} bits{possible}"


def percent(share: float) -> str:
    return f"{100 * share:.0f}%"


# ---- of one sentence -------------------------------------------------------------------------------------------------


def measure_document(document: Mapping[str, Any]) -> dict[str, Any]:
    """The section `properties` of a document, from what the document itself holds."""
    found = measure_trace(document["layers"], document["sides"]).document()
    if any(side.get("image") for side in document["sides"].values()):
        found["columns"] = [column | ON_PICTURES.get(column["key"], {}) for column in found["columns"]]
    return found


ON_PICTURES = {  # what the columns are there
    "itself": {"help": "Weight on itself."},
    "previous": {"label": "left", "help": "Weight on the patch on its left, where there is one."},
    "next": {"label": "right", "help": "Weight on the patch on its right, where there is one."},
    "first": {"label": "class", "help": "Weight on the class token, of the patches."},
    "shared": {"help": "Weight on the patch that is looked at most: near 100% where all look at the same one."},
    "distance": {"help": "How many patches away it looks, on average, as the crow flies."},
    "entropy": {"help": "0: it looks at one patch alone. 3 bits: as spread as evenly over 8 patches."},
    "confidence": {"help": "Each patch's greatest weight, on average."},
}


def measure_trace(layers: Iterable[Mapping[str, Any]], sides: Mapping[str, Mapping[str, Any]]) -> Properties:
    """The same of one sentence: `layers` and `sides` as a document has them."""
    numbers: dict[str, int] = {}
    tokens = {name: side_of_tokens(each["tokens"], numbers) for name, each in sides.items()}
    sums: dict[str, Sums] = {}
    scenes: dict[tuple[str, str, bool], Scene] = {}
    for layer in layers:
        kind = layer["queries"], layer["keys"], bool(layer["causal"])
        if kind not in scenes:
            scenes[kind] = scene_of_layer(layer, tokens, sides)
        shape = tuple(tokens[name].real.shape[1] for name in kind[:2])
        most = ROWS if math.prod(shape) > LONGEST**2 else max(shape)
        rows = torch.tensor(evenly(shape[0], max(1, most)), dtype=torch.long)
        weights = weights_of(layer, shape[1], rows)
        heads = layer.get("numbers", range(weights.shape[0]))
        sums[layer["path"]] = Sums(weights.shape[0], numbers=tuple(heads))
        if weights.numel():
            sums[layer["path"]].observe(weights[None], scenes[kind].thinned(rows))
    picture = any(side.get("image") for side in sides.values())
    own = PATCHES if picture else OWN if len(sides) == 1 else None  # a text that is read names each token by itself
    of = f"this {'picture' if picture else 'sentence'} alone"
    return Properties(sentences=1, of=of, heads=tuple(described(sums, own)))


def scene_of_layer(layer: Mapping[str, Any], tokens: Mapping[str, Side], sides: Mapping[str, Any]) -> Scene:
    queries, keys = tokens[layer["queries"]], tokens[layer["keys"]]
    allowed = torch.ones(1, queries.real.shape[1], keys.real.shape[1], dtype=torch.bool)
    if layer["kind"] == "self":
        scene = Scene.of(keys, keys, allowed.tril() if layer["causal"] else allowed, own=True)
        image = sides[layer["keys"]].get("image")
        return on_grid(scene, image["columns"], image.get("before", 0)) if image else scene
    words = word_pair(sides[layer["queries"]]["tokens"], sides[layer["keys"]]["tokens"])
    return Scene.of(queries, keys, allowed, own=False, words=[words])


def on_grid(scene: Scene, columns: int, before: int) -> Scene:
    """Of patches: the one on the left is in the same row, distance is as the crow flies, and what stands before them
    (the class token) is nowhere."""
    place = torch.arange(scene.choosing.shape[1]) - before
    row, column, patch = place.div(columns, rounding_mode="floor"), place.remainder(columns), place >= 0
    both = patch[:, None] & patch[None]
    away = torch.stack([row, column], -1).float()
    beside = (row[:, None] == row[None]) & both
    kinds = {key: where & beside if key in ("previous", "next") else where for key, where in scene.kinds.items()}
    if not before:
        kinds.pop("first")  # a corner of the picture
    return replace(scene, kinds=kinds, away=torch.cdist(away, away) * both)


def side_of_tokens(tokens: Sequence[Mapping[str, Any]], numbers: dict[str, int]) -> Side:
    named = ["" if token["special"] not in (None, "byte") else token["piece"] for token in tokens]
    return Side(
        spelled=torch.tensor([[numbered(piece, numbers) for piece in named]]),
        end=torch.tensor([[token["special"] == "end" for token in tokens]], dtype=torch.bool),
        punctuation=torch.tensor([[is_punctuation(piece) for piece in named]], dtype=torch.bool),
        real=torch.ones(1, len(tokens), dtype=torch.bool),
    )


def word_pair(target: Sequence[Mapping[str, Any]], source: Sequence[Mapping[str, Any]]) -> WordPair:
    """By the spaces before tokens; the target without its end, as `mutual` looks at it."""
    written = target[:-1] if target and target[-1]["special"] == "end" else target
    target_words, source_words = words_of_tokens(written), words_of_tokens(source)
    return WordPair(
        source=source_words,
        target=target_words,
        source_words=1 + max((word for word in source_words if word is not None), default=-1),
        target_words=1 + max((word for word in target_words if word is not None), default=-1),
    )


def words_of_tokens(tokens: Sequence[Mapping[str, Any]]) -> list[int | None]:
    """For each token the number of its word; None: of no word."""
    words: list[int | None] = []
    count = 0
    for token in tokens:
        special = token["special"] not in (None, "byte", "unknown")
        count += not special and (bool(token["space"]) or count == 0)
        words.append(None if special else count - 1)
    return words
