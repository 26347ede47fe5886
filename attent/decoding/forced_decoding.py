"""Forced decoding: how likely a model holds given translations, token by token, in one pass over the whole target.

No search: what a search found can be scored anew here, and so can what a person wrote. Which token looked at which is
`align`'s, on the same batches; comparing with references is left to `attent.score`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from attent.interop.ctranslate2 import find_suppressed_tokens
from attent.models import Seq2Seq
from attent.models.seq2seq import shift_right

if TYPE_CHECKING:
    from attent.text.tokenizer import Tokenizer

BATCH_TOKENS = 4096  # of one side, filled up, that go through the model at once
MAX_LOGITS = 2**24  # numbers written down at once: 64 MiB, whatever the vocabulary
MAX_EXPONENT = 700.0  # exp of more is no number

TokenIds = Sequence[int]


class ForcedDecodingError(ValueError):
    """Texts that cannot be scored, in a sentence."""


@dataclass(frozen=True, kw_only=True)
class TargetScores:
    """One target as the model sees it."""

    tokens: tuple[str, ...]  # its pieces, the end last
    log_probs: tuple[float, ...]  # of each of them, given those before it and the source
    truncated: bool = False  # the source or the target was too long: this is of its beginning and the end

    @property
    def log_prob(self) -> float:
        return math.fsum(self.log_probs)

    @property
    def length(self) -> int:
        """Tokens, the end counted."""
        return len(self.log_probs)

    @property
    def perplexity(self) -> float:
        """Among how many tokens, all alike, the model would choose as doubtfully at each step."""
        return compute_perplexity(self.log_prob, self.length)


def compute_perplexity(log_prob: float, length: int) -> float:
    surprise = -log_prob / max(1, length)
    return math.exp(surprise) if surprise < MAX_EXPONENT else math.inf


def score_targets(
    model: Seq2Seq,
    tokenizer: Tokenizer,
    sources: Sequence[str],
    targets: Sequence[str],
    *,
    to: str | None = None,
    batch_tokens: int = BATCH_TOKENS,
) -> list[TargetScores]:
    """Each target as the translation of its source. Of an empty one the probability is that of ending at once.

    to            the language of the targets, for a model trained with tags
    batch_tokens  it bounds the memory; what is longer, or longer than the model has positions, is cut before its end
    """
    check_pairs(sources, targets)
    rows = encode_pairs(model, tokenizer, sources, targets, to, batch_tokens)
    never = find_suppressed_tokens(model.config, tokenizer)
    scored = score_token_ids(model, [one.source for one in rows], [one.target for one in rows], batch_tokens, never)
    return [
        TargetScores(
            tokens=tuple(tokenizer.target.to_pieces(one.target)), log_probs=tuple(each), truncated=one.truncated
        )
        for one, each in zip(rows, scored, strict=True)
    ]


def score_token_ids(
    model: Seq2Seq,
    sources: Sequence[TokenIds],
    targets: Sequence[TokenIds],
    batch_tokens: int = BATCH_TOKENS,
    suppressed_tokens: Sequence[int] = (),
) -> list[list[float]]:
    """The log-probability of each token of each target. A target has its end, unless it was cut off before it.

    Ids of `never` are no words and have no share in the probabilities; where a target has one, it has its share there.
    """
    found: list[list[float]] = [[] for _ in sources]
    with eval_mode(model), torch.no_grad():
        for places in batch_by_length(sources, targets, batch_tokens):
            batch = TeacherForcingBatch.from_ids(model, [sources[i] for i in places], [targets[i] for i in places])
            for place, each in zip(places, batch.score_tokens(model, suppressed_tokens), strict=True):
                found[place] = each
    return found


# ---- pairs of ids ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class EncodedPair:
    """One pair as ids, each side with its end."""

    source: list[int]
    target: list[int]
    truncated: bool


def check_pairs(sources: Sequence[str], targets: Sequence[str]) -> None:
    if len(sources) != len(targets):
        raise ForcedDecodingError(
            f"there must be a target for each source, but there are {len(sources):,} sources and {len(targets):,} "
            "targets; give both in one order"
        )


def encode_pairs(
    model: Seq2Seq,
    tokenizer: Tokenizer,
    sources: Sequence[str],
    targets: Sequence[str],
    to: str | None = None,
    max_length: int = BATCH_TOKENS,
) -> list[EncodedPair]:
    """The ids of both sides, each no longer than `longest` and than the model has positions for."""
    if max_length < 2:
        raise ForcedDecodingError(f"`batch_tokens` must be 2 or more, but is {max_length}")
    limits = [min(max_length, stack.positions.max_length or max_length) for stack in (model.encoder, model.decoder)]
    sides = (
        tokenizer.encode_source([text.strip() for text in sources], to),
        tokenizer.encode_target([text.strip() for text in targets]),
    )
    return [
        EncodedPair(
            source=truncate_ids(source, limits[0]),
            target=[*truncate_ids(target, limits[1])[:-1], model.config.end_id],
            truncated=len(source) > limits[0] or len(target) > limits[1],
        )
        for source, target in zip(*sides, strict=True)
    ]


def truncate_ids(ids: list[int], max_length: int) -> list[int]:
    """At most `limit` ids; the end stays."""
    return ids if len(ids) <= max_length else [*ids[: max_length - 1], ids[-1]]


def batch_by_length(sources: Sequence[TokenIds], targets: Sequence[TokenIds], batch_tokens: int) -> Iterator[list[int]]:
    """Places of pairs of like length, the longest first: if memory is short, that is known at once."""
    sizes = [max(len(source), len(target)) for source, target in zip(sources, targets, strict=True)]
    batch: list[int] = []
    for place in sorted((i for i in range(len(sizes)) if targets[i]), key=lambda i: (-sizes[i], i)):
        if batch and (len(batch) + 1) * sizes[batch[0]] > batch_tokens:
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


# ---- one pass --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TeacherForcingBatch:
    """Some pairs side by side, filled up on the right."""

    source: Tensor  # (B, Ts)
    source_lengths: Tensor
    target: Tensor  # (B, Tt) what is to be written
    target_lengths: Tensor
    decoder_input: Tensor  # (B, Tt) what the decoder reads meanwhile: one place to the right

    @classmethod
    def from_ids(cls, model: Seq2Seq, sources: Sequence[TokenIds], targets: Sequence[TokenIds]) -> TeacherForcingBatch:
        device = next(model.parameters()).device
        source, source_lengths = pad_rows(sources, device)
        target, target_lengths = pad_rows(targets, device)
        return cls(
            source=source,
            source_lengths=source_lengths,
            target=target,
            target_lengths=target_lengths,
            decoder_input=shift_right(target, model.config.start_id),
        )

    def compute_states(self, model: Seq2Seq) -> Tensor:
        """(B, Tt, E): what the decoder has in mind when it writes each token."""
        memory = model.encode(self.source, self.source_lengths)
        return model.decode(self.decoder_input, memory, self.target_lengths)

    def score_tokens(self, model: Seq2Seq, suppressed_tokens: Sequence[int] = ()) -> list[list[float]]:
        """Of each token of each row. The logits of a whole batch would need gigabytes: they are made piece by piece."""
        places = torch.arange(self.target.shape[1], device=self.target.device)
        real = places < self.target_lengths[:, None]
        states, ids = self.compute_states(model)[real], self.target[real]  # (N, E), (N,): no filler
        size = max(1, MAX_LOGITS // model.config.output_vocab)
        banned = torch.tensor(suppressed_tokens, dtype=torch.int64, device=ids.device)
        parts = [
            gather_log_probs(model.output(states[i : i + size]), ids[i : i + size], banned)
            for i in range(0, len(ids), size)
        ]
        each = torch.cat(parts).split(self.target_lengths.tolist())
        return [row.tolist() for row in each]


def gather_log_probs(logits: Tensor, ids: Tensor, suppressed_tokens: Tensor) -> Tensor:
    """(N, V), (N,) -> (N,)"""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    mine = logits.gather(1, ids[:, None])
    words = logits.index_fill(1, suppressed_tokens, float("-inf")).scatter(1, ids[:, None], mine)
    return mine[:, 0] - words.logsumexp(1)


def pad_rows(rows: Sequence[TokenIds], device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows of one length and how much of each is real; zeros are as good as any, since lengths tell."""
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)
    return ids, torch.tensor([len(row) for row in rows], device=device)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Without dropout; afterwards every part is as it was, also one that is never trained."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


class SharedContext:
    """A context that several threads are in at once: the first enters it, the last leaves it."""

    def __init__(self, make_context: Callable[[], AbstractContextManager[object]]) -> None:
        self.make_context = make_context
        self.lock = threading.Lock()
        self.num_users = 0
        self.stack = ExitStack()

    def __enter__(self) -> None:
        with self.lock:
            if self.num_users == 0:
                self.stack.enter_context(self.make_context())
            self.num_users += 1

    def __exit__(self, *error: object) -> None:
        with self.lock:
            self.num_users -= 1
            if self.num_users == 0:
                self.stack.close()
